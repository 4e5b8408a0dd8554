package signature

import (
	"crypto/hmac"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
)

// Tolerance is how far the timestamp of a signature may lie before or after
// the receiver's clock, both ends included. It bounds how long a captured
// request can be replayed. Five minutes is the value of upstream Converger and
// of the Standard Webhooks reference libraries.
const Tolerance = 5 * time.Minute

// Failures of the Verify functions. Match them with errors.Is.
var (
	// ErrMissing says that a header of the scheme is absent or empty.
	ErrMissing = errors.New("signature: header missing")
	// ErrMalformed says that a header does not have the form of the scheme, or
	// was given more than once.
	ErrMalformed = errors.New("signature: header malformed")
	// ErrStale says that the timestamp lies further from now than Tolerance.
	// The signature itself was not looked at.
	ErrStale = errors.New("signature: timestamp outside the tolerance")
	// ErrMismatch says that no signature was made over this body with one of
	// the keys.
	ErrMismatch = errors.New("signature: no signature matches")
	// ErrLegacy says that X-Converger-Signature has the old form sha256=<hex>
	// and that it matches: the body is authentic, but nothing says when it was
	// sent, so it can be replayed for ever. See VerifyTimestamped.
	ErrLegacy = errors.New("signature: legacy form without a timestamp")
)

// Failures of both directions and of the Sign functions.
var (
	// ErrNoKey says that there is no key, or only empty ones: anybody could
	// make such a signature.
	ErrNoKey = errors.New("signature: no key")
	// ErrBadID says that a message id cannot be signed; see SignStandard.
	ErrBadID = errors.New("signature: bad message id")
)

// mac is an HMAC-SHA256.
type mac [sha256.Size]byte

// sum returns the HMAC of the parts, one after the other.
func sum(key []byte, parts ...[]byte) mac {
	h := hmac.New(sha256.New, key)
	for _, p := range parts {
		h.Write(p)
	}
	return mac(h.Sum(nil))
}

// match returns nil if one of the candidates is the HMAC of the parts under
// one of the keys. It compares every candidate with every key, so that its
// duration does not tell which of them was right.
func match(candidates []mac, keys [][]byte, parts ...[]byte) error {
	keys = usable(keys)
	if len(keys) == 0 {
		return ErrNoKey
	}
	found := false
	for _, key := range keys {
		want := sum(key, parts...)
		for _, got := range candidates {
			if hmac.Equal(got[:], want[:]) {
				found = true
			}
		}
	}
	if !found {
		return ErrMismatch
	}
	return nil
}

// usable returns the keys that are not empty: a channel without a previous
// secret passes an empty one, which must not become a key that everybody knows.
func usable(keys [][]byte) [][]byte {
	var out [][]byte
	for _, key := range keys {
		if len(key) > 0 {
			out = append(out, key)
		}
	}
	return out
}

// single returns the only value of a header. Two values are a failure, even if
// one of them is good: receivers differ in which one they read, and a proof
// that depends on the reader is none.
func single(header http.Header, name string) (string, error) {
	values := header.Values(name)
	switch {
	case len(values) > 1:
		return "", fmt.Errorf("%w: %s given %d times", ErrMalformed, name, len(values))
	case len(values) == 0 || values[0] == "":
		return "", fmt.Errorf("%w: %s", ErrMissing, name)
	}
	return values[0], nil
}

// checkTime parses Unix seconds as a sender writes them (decimal digits, no
// sign, no leading zero: the text is part of what is signed and has one form)
// and compares them with now.
func checkTime(text string, now time.Time) error {
	t, err := strconv.ParseUint(text, 10, 40)
	if err != nil || strconv.FormatUint(t, 10) != text {
		return fmt.Errorf("%w: the timestamp is not in Unix seconds", ErrMalformed)
	}
	// In whole seconds, as the sender counts.
	age := now.Unix() - int64(t)
	const limit = int64(Tolerance / time.Second)
	switch {
	case age > limit:
		return fmt.Errorf("%w: %d s old", ErrStale, age)
	case age < -limit:
		return fmt.Errorf("%w: %d s in the future", ErrStale, -age)
	}
	return nil
}
