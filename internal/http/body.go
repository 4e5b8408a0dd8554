package http

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"time"
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

// readBody reads the body of a matched and admitted request: bounded in size and in time, not compressed, JSON where the
// route takes JSON.
func (s *server) readBody(c *call, rt *route) error {
	r := c.r
	if r.ContentLength == 0 || r.Body == http.NoBody {
		c.bodyRead = true
		if rt.body == bodyJSON {
			return newProblem(codeMalformedBody, "The body is empty; a JSON object is expected.")
		}
		return nil
	}
	if r.ContentLength > rt.maxBody {
		return tooLarge(rt)
	}
	// Inflating would lift every bound on size: nothing that is sent here is worth it.
	if e := r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return newProblem(codeUnsupportedMedia, "The body must not be compressed (Content-Encoding).")
	}
	switch kind := r.Header.Get("Content-Type"); {
	case rt.body == bodyRaw:
	case rt.body == bodyFields && !isForm(kind):
		return newProblem(codeUnsupportedMedia, "The body must be a form: Content-Type: application/x-www-form-urlencoded.")
	case rt.body != bodyFields && !isJSON(kind):
		return newProblem(codeUnsupportedMedia, "The body must be JSON and say so: Content-Type: application/json.")
	}
	// One deadline for the whole body: a sender of a byte now and then can't stretch it.
	control := http.NewResponseController(c.ResponseWriter)
	_ = control.SetReadDeadline(time.Now().Add(s.BodyTimeout))
	c.memory = s.memoryFor(c, rt)
	body, err := c.readAll(http.MaxBytesReader(c, r.Body, rt.maxBody), r.ContentLength)
	if err != nil {
		var size *http.MaxBytesError
		switch {
		case errors.As(err, &size):
			return tooLarge(rt)
		case errors.Is(err, errNoMemory):
			return noMemory()
		case errors.Is(err, os.ErrDeadlineExceeded):
			return newProblem(codeRequestTimeout, "The body did not arrive within %v.", s.BodyTimeout)
		}
		return newProblem(codeMalformedBody, "The body ended too early, or its chunks are malformed.")
	}
	// The deadline must not outlive the body: net/http watches the connection for a client that leaves.
	_ = control.SetReadDeadline(time.Time{})
	c.bodyRead, c.body = true, body
	return nil
}

// errNoMemory says that the node's budget for bodies is spent.
var errNoMemory = errors.New("http: too many bodies in memory")

func noMemory() *problem {
	return newProblem(codeOverloaded, "This node is reading as many bodies as it has memory for. Nothing was stored; send the request again.").retryAfter(1)
}

// memory is a budget of bytes for the bodies of requests that are being read or worked. Safe for concurrent use.
type memory struct{ free atomic.Int64 }

func newMemory(bytes int64) *memory {
	m := &memory{}
	m.free.Store(bytes)
	return m
}

func (m *memory) take(n int64) bool {
	if m.free.Add(-n) < 0 {
		m.free.Add(n)
		return false
	}
	return true
}

// memoryFor is the budget that a request's body counts against. Addresses that have not proven themselves to a channel, and
// people who are not signed in, share a quarter, so that unsigned bodies can't take the memory of signed ones.
func (s *server) memoryFor(c *call, rt *route) *memory {
	if rt.auth == credentialPassword || rt.auth == credentialSignature && !s.Proofs.Has(s.proofKey(c), c.started) {
		return s.strangersMemory
	}
	return s.memory
}

// readAll reads to the end. Memory is taken as bytes come, not as they are announced, and is given back when the request
// is over (call.release).
func (c *call) readAll(r io.Reader, announced int64) ([]byte, error) {
	size := int64(16 << 10)
	if announced >= 0 {
		size = min(size, announced+1) // one more than announced, so that the end is seen without growing
	}
	var b []byte
	for {
		if len(b) == cap(b) {
			if len(b) > 0 {
				size = 2 * int64(cap(b))
				if announced >= int64(len(b)) {
					size = min(size, announced+1)
				}
			}
			if !c.memory.take(size) {
				return nil, errNoMemory
			}
			c.held += size
			b = append(make([]byte, 0, size), b...)
		}
		n, err := r.Read(b[len(b):cap(b)])
		b = b[:len(b)+n]
		switch {
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			return nil, err
		}
	}
}

// release gives back the memory of the body.
func (c *call) release() {
	if c.held > 0 {
		c.memory.free.Add(c.held)
		c.held = 0
	}
}

func tooLarge(rt *route) *problem {
	return newProblem(codeBodyTooLarge, "The body is longer than %d bytes.", rt.maxBody)
}

// isJSON tells whether a Content-Type is application/json or a +json type; parameters don't matter, since the body must
// be UTF-8 in any case.
func isJSON(contentType string) bool {
	name, _, _ := strings.Cut(contentType, ";")
	name = strings.ToLower(strings.TrimSpace(name))
	return name == "application/json" || strings.HasPrefix(name, "application/") && strings.HasSuffix(name, "+json")
}

// isForm tells whether a Content-Type is that of a page's form.
func isForm(contentType string) bool {
	name, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(name), "application/x-www-form-urlencoded")
}

// object reads the call's body as an object's members. An empty optional body is an object without any.
func (c *call) object() (*fields, error) {
	if len(c.body) == 0 && c.route.body == bodyOptional {
		return newFields(nil), nil
	}
	members, err := parseObject(c.body)
	if err != nil {
		return nil, err
	}
	return newFields(members), nil
}

// cleanText tells whether text can be stored: UTF-8 without NUL.
func cleanText(s string) bool { return utf8.ValidString(s) && strings.IndexByte(s, 0) < 0 }

// truncate cuts s to at most n bytes of whole characters.
func truncate(s string, n int) string {
	if len(s) <= n {
		return s
	}
	return strings.ToValidUTF8(s[:n], "")
}
