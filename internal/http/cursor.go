package http

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"net/url"
	"strconv"

	"github.com/google/uuid"
)

// Limits of keyset pages.
const (
	defaultPage = 50
	maxPage     = 500
)

// cursors makes and reads the cursors of keyset lists: base64url of a version byte, the last id of the page, and the
// first half of an HMAC over both, the list, whose list it is and its filter. So a cursor is opaque in earnest, and one of
// another list or filter is refused and does not skip rows in silence.
type cursors struct{ key []byte }

const (
	cursorVersion = 1
	cursorMAC     = 16
)

// list names what a cursor belongs to: the route, the tenant, the filter's values in a fixed order.
func (k cursors) encode(last uuid.UUID, list ...string) string {
	b := append([]byte{cursorVersion}, last[:]...)
	return base64.RawURLEncoding.EncodeToString(append(b, k.mac(b, list)...))
}

// decode returns the id after which the page begins; the zero UUID for no cursor.
func (k cursors) decode(text string, list ...string) (uuid.UUID, error) {
	if text == "" {
		return uuid.Nil, nil
	}
	b, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != 1+16+cursorMAC || b[0] != cursorVersion || !hmac.Equal(b[17:], k.mac(b[:17], list)) {
		return uuid.Nil, newProblem(codeInvalidCursor, "The cursor was altered, or was made for another list or filter.")
	}
	return uuid.UUID(b[1:17]), nil
}

func (k cursors) mac(b []byte, list []string) []byte {
	m := hmac.New(sha256.New, k.key)
	m.Write(b)
	for _, part := range list { // length first: no two lists meet in one text
		m.Write(binary.BigEndian.AppendUint32(nil, uint32(len(part))))
		m.Write([]byte(part))
	}
	return m.Sum(nil)[:cursorMAC]
}

// pageLimit reads `limit`: anything that is no positive number is the default, more than the most is the most.
func pageLimit(q url.Values, standard, most int) int {
	n, err := strconv.Atoi(q.Get("limit"))
	if err != nil || n < 1 {
		return standard
	}
	return min(n, most)
}

// queryID reads a UUID parameter, nil when absent.
func queryID(q url.Values, name string) (*uuid.UUID, error) {
	text := q.Get(name)
	if text == "" {
		return nil, nil //nolint:nilnil // absent is not an error
	}
	id, err := parseID(text)
	if err != nil {
		return nil, newProblem(codeInvalidParameter, "Invalid %s: it must be a UUID.", name)
	}
	return &id, nil
}

// pathID reads an id out of the path.
func (c *call) pathID(name string) (uuid.UUID, error) {
	id, err := parseID(c.param(name))
	if err != nil {
		return uuid.Nil, newProblem(codeMalformedID, "An identifier in the address is not a UUID.")
	}
	return id, nil
}

// query is the query's parameters. A malformed one or text that Postgres could not hold is refused.
func (c *call) query() (url.Values, error) {
	q, err := url.ParseQuery(c.r.URL.RawQuery)
	if err != nil {
		return nil, newProblem(codeInvalidParameter, "The query string is malformed.")
	}
	for name, values := range q {
		for _, v := range values {
			if !cleanText(v) {
				return nil, newProblem(codeInvalidParameter, "Invalid %s: it must be UTF-8 without NUL.", strconv.QuoteToASCII(truncate(name, 50)))
			}
		}
	}
	return q, nil
}
