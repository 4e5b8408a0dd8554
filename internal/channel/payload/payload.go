package payload

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxDepth is how deep arrays and objects may nest. Real bodies stay below ten.
const MaxDepth = 32

// Limits of a number: more than any float64, less than what Postgres' jsonb refuses or blows up to many kilobytes.
const (
	maxNumber   = 400 // characters
	maxExponent = 400
)

// Faults of a body. Decode wraps them with the offset at which they were found.
var (
	ErrSyntax    = errors.New("is not valid JSON")
	ErrUTF8      = errors.New("is not valid UTF-8")
	ErrDepth     = fmt.Errorf("nests deeper than %d levels", MaxDepth)
	ErrDuplicate = errors.New("has an object that names a member twice")
	ErrNumber    = errors.New("has a number that is too large or too precise")
)

// Decode reads one JSON value: map[string]any, []any, string, [json.Number], bool or nil.
//
// A member given twice is refused: readers differ in which one they believe, and what one system checked another might
// not have used. A NUL and half a surrogate pair, which Postgres cannot store, become U+FFFD.
//
// Errors wrap one of the Err values; their text is made for the sender and holds nothing of the body.
func Decode(body []byte) (any, error) {
	if !utf8.Valid(body) {
		return nil, ErrUTF8
	}
	d := decoder{json: json.NewDecoder(bytes.NewReader(body))}
	d.json.UseNumber()
	v, err := d.value(0)
	if err != nil {
		return nil, fmt.Errorf("%w (near byte %d)", err, d.json.InputOffset())
	}
	if _, err := d.json.Token(); err != io.EOF {
		return nil, fmt.Errorf("%w: something follows the value (near byte %d)", ErrSyntax, d.json.InputOffset())
	}
	return v, nil
}

type decoder struct{ json *json.Decoder }

func (d decoder) value(depth int) (any, error) {
	token, err := d.json.Token()
	if err != nil {
		return nil, ErrSyntax
	}
	switch token := token.(type) {
	case string:
		return Clean(token), nil
	case json.Number:
		return token, checkNumber(string(token))
	case json.Delim:
		if depth == MaxDepth {
			return nil, ErrDepth
		}
		if token == '{' {
			return d.object(depth + 1)
		}
		return d.array(depth + 1)
	default: // bool, nil
		return token, nil
	}
}

func (d decoder) object(depth int) (any, error) {
	members := map[string]any{}
	for d.json.More() {
		token, err := d.json.Token()
		if err != nil {
			return nil, ErrSyntax
		}
		name := Clean(token.(string)) // the decoder gives nothing else in this place
		if _, ok := members[name]; ok {
			return nil, ErrDuplicate
		}
		if members[name], err = d.value(depth); err != nil {
			return nil, err
		}
	}
	return members, d.end()
}

func (d decoder) array(depth int) (any, error) {
	items := []any{}
	for d.json.More() {
		v, err := d.value(depth)
		if err != nil {
			return nil, err
		}
		items = append(items, v)
	}
	return items, d.end()
}

func (d decoder) end() error {
	if _, err := d.json.Token(); err != nil {
		return ErrSyntax
	}
	return nil
}

func checkNumber(s string) error {
	if len(s) > maxNumber {
		return ErrNumber
	}
	if i := strings.IndexAny(s, "eE"); i >= 0 {
		if exponent, err := strconv.Atoi(s[i+1:]); err != nil || exponent > maxExponent || exponent < -maxExponent {
			return ErrNumber
		}
	}
	return nil
}

// Clean makes text from outside storable: NUL and invalid UTF-8 become U+FFFD.
func Clean(s string) string {
	return strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
}

// Cut shortens s to at most n bytes without splitting a character.
func Cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// Excerpt makes the beginning of an answer fit to be stored and shown: at most n bytes of valid UTF-8 in which control
// characters other than line ends and tabs are blanks.
func Excerpt(answer []byte, n int) string {
	if len(answer) > n {
		answer = answer[:n]
	}
	text := strings.Map(func(r rune) rune {
		if unicode.IsControl(r) && r != '\n' && r != '\t' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(string(answer), "\uFFFD"))
	return strings.TrimSpace(Cut(text, n))
}

// Pointer makes a JSON pointer (RFC 6901) of the tokens: strings and ints.
func Pointer(tokens ...any) string {
	var b strings.Builder
	for _, t := range tokens {
		b.WriteByte('/')
		switch t := t.(type) {
		case int:
			b.WriteString(strconv.Itoa(t))
		case string:
			b.WriteString(pointerEscaper.Replace(t))
		default:
			panic(fmt.Sprintf("payload: %T in a JSON pointer", t))
		}
	}
	return b.String()
}

var pointerEscaper = strings.NewReplacer("~", "~0", "/", "~1")
