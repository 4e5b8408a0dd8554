package signature

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// HeaderHubSHA256 carries the signature of the HubSHA256 scheme.
const HeaderHubSHA256 = "X-Hub-Signature-256"

const hubPrefix = "sha256="

// SignHubSHA256 sets HeaderHubSHA256 to sha256=<lower-case hex HMAC-SHA256 of
// the body> as Meta does with the app's secret as key. The header has room for
// one signature. It returns ErrNoKey if the key is empty.
func SignHubSHA256(header http.Header, body, key []byte) error {
	if len(key) == 0 {
		return ErrNoKey
	}
	m := sum(key, body)
	header.Set(HeaderHubSHA256, hubPrefix+hex.EncodeToString(m[:]))
	return nil
}

// VerifyHubSHA256 checks HeaderHubSHA256 over the raw body; upper-case hex
// passes. The scheme has no timestamp, so a captured request can be replayed:
// receivers have to drop repeats by message id. The time is ignored; it is
// here so that all schemes have the same type. Failures: ErrMissing,
// ErrMalformed, ErrMismatch, ErrNoKey.
func VerifyHubSHA256(header http.Header, body []byte, keys [][]byte, _ time.Time) error {
	value, err := single(header, HeaderHubSHA256)
	if err != nil {
		return err
	}
	digits, found := strings.CutPrefix(value, hubPrefix)
	m, ok := parseHex(digits)
	if !found || !ok {
		return fmt.Errorf("%w: %s: want %s and 64 hex digits", ErrMalformed, HeaderHubSHA256, hubPrefix)
	}
	return match([]mac{m}, keys, body)
}
