package http

import (
	"net/http"
	"strings"
)

// maxIdempotencyKey is the longest key, in bytes.
const maxIdempotencyKey = 255

// idempotencyKey reads Idempotency-Key (draft-ietf-httpapi-idempotency-key-header-07), a structured-field string whose
// quotes many clients leave out, or the older X-Idempotency-Key, which has none. "" when there is none.
func idempotencyKey(h http.Header) (string, error) {
	var key string
	var given bool
	for _, name := range []string{"Idempotency-Key", "X-Idempotency-Key"} {
		for _, value := range h[name] {
			k, ok := unquoteKey(value)
			if !ok {
				return "", newProblem(codeInvalidIdempotency, "%s must have 1 to %d printable ASCII characters, with or without quotes around all of them.",
					name, maxIdempotencyKey)
			}
			if given && k != key {
				return "", newProblem(codeInvalidIdempotency, "Two different idempotency keys were sent.")
			}
			key, given = k, true
		}
	}
	return key, nil
}

// unquoteKey takes the quotes and escapes of a structured-field string (RFC 9651, 3.3.3) off, if there are any.
func unquoteKey(value string) (string, bool) {
	value = strings.Trim(value, " \t")
	if inner, quoted := strings.CutPrefix(value, `"`); quoted {
		var b strings.Builder
		for {
			i := strings.IndexAny(inner, `"\`)
			if i < 0 {
				return "", false // no end
			}
			b.WriteString(inner[:i])
			if inner[i] == '"' {
				if i != len(inner)-1 {
					return "", false // something follows; the draft has no parameters
				}
				break
			}
			if i+1 == len(inner) || inner[i+1] != '"' && inner[i+1] != '\\' {
				return "", false
			}
			b.WriteByte(inner[i+1])
			inner = inner[i+2:]
		}
		value = b.String()
	}
	if len(value) == 0 || len(value) > maxIdempotencyKey {
		return "", false
	}
	for i := range len(value) {
		if value[i] < ' ' || value[i] > '~' {
			return "", false
		}
	}
	return value, true
}
