package http

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"
	"unicode/utf8"
)

// maxDepth is the deepest nesting of arrays and objects that a body may have: nothing the API takes comes near it, and
// every later walk over the value may recurse.
const maxDepth = 32

// parseObject reads a JSON object and refuses what other readers of the same bytes could understand differently, or
// what Postgres can't hold: text that is not UTF-8, NUL (raw or as \u0000), members given twice, anything behind the
// object, nesting deeper than maxDepth. The error is a *problem.
func parseObject(body []byte) (map[string]json.RawMessage, error) {
	if err := checkJSON(body); err != nil {
		return nil, newProblem(codeMalformedBody, "The body can't be read: %v.", err)
	}
	var members map[string]json.RawMessage
	if err := json.Unmarshal(body, &members); err != nil || members == nil {
		return nil, newProblem(codeMalformedBody, "The body must be a JSON object.")
	}
	return members, nil
}

// checkJSON walks over one JSON value. Its error is for the caller: it quotes no values.
func checkJSON(body []byte) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return errors.New("it is empty")
	}
	if !utf8.Valid(body) {
		return errors.New("it is not valid UTF-8")
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber() // a number out of range is a matter of its member, not of the syntax
	var (
		open    []map[string]struct{} // names seen, by level; nil for an array
		wantKey bool
	)
	for {
		token, err := d.Token()
		if err != nil {
			return describeSyntax(err, d.InputOffset())
		}
		switch v := token.(type) {
		case json.Delim:
			switch v {
			case '{', '[':
				if len(open) == maxDepth {
					return fmt.Errorf("it is nested deeper than %d levels", maxDepth)
				}
				var names map[string]struct{}
				if v == '{' {
					names = make(map[string]struct{})
				}
				open = append(open, names)
				wantKey = v == '{'
				continue
			default:
				open = open[:len(open)-1]
			}
		case string:
			if strings.IndexByte(v, 0) >= 0 {
				return fmt.Errorf("it holds a NUL character (near byte %d)", d.InputOffset())
			}
			if wantKey {
				names := open[len(open)-1]
				if _, twice := names[v]; twice {
					return fmt.Errorf("a member is given twice (near byte %d)", d.InputOffset())
				}
				names[v] = struct{}{}
				wantKey = false
				continue
			}
		}
		if len(open) == 0 {
			break
		}
		wantKey = open[len(open)-1] != nil
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON value")
	}
	return nil
}

func describeSyntax(err error, offset int64) error {
	var syntax *json.SyntaxError
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return errors.New("it ends too early")
	case errors.As(err, &syntax):
		// The decoder's own words name characters of the body; its place is enough.
		return fmt.Errorf("it is not JSON (near byte %d)", syntax.Offset)
	default:
		return fmt.Errorf("it is not JSON (near byte %d)", offset)
	}
}
