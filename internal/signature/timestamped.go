package signature

import (
	"encoding/hex"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// HeaderTimestamped carries the signature of the Timestamped scheme.
const HeaderTimestamped = "X-Converger-Signature"

// SignTimestamped sets HeaderTimestamped to t=<now in Unix seconds> and one
// v1=<lower-case hex> for each key, where v1 is the HMAC-SHA256 of "<t>.<body>".
// A key is the text of a channel's secret, byte for byte. During a rotation
// pass both keys, so that receivers with either one accept. Each try of a
// delivery is signed anew. It returns ErrNoKey if no key is usable.
func SignTimestamped(header http.Header, body []byte, keys [][]byte, now time.Time) error {
	keys = usable(keys)
	if len(keys) == 0 {
		return ErrNoKey
	}
	t := strconv.FormatInt(now.Unix(), 10)
	value := "t=" + t
	for _, key := range keys {
		m := sum(key, []byte(t+"."), body)
		value += ",v1=" + hex.EncodeToString(m[:])
	}
	header.Set(HeaderTimestamped, value)
	return nil
}

// VerifyTimestamped checks HeaderTimestamped over the raw body. It returns nil
// if one v1 matches one key and the time is within Tolerance of now.
//
// The elements may stand in any order; there is exactly one t and at least one
// v1 that is 64 hex digits of either case; other elements are ignored, so that
// a later version can be added beside v1.
//
// The older form sha256=<hex> (HMAC of the body alone) is never accepted: it
// returns ErrLegacy if it matches, which a caller may treat as a warning where
// signatures are optional, and ErrMismatch if not. Other failures: ErrMissing,
// ErrMalformed, ErrStale, ErrMismatch, ErrNoKey.
func VerifyTimestamped(header http.Header, body []byte, keys [][]byte, now time.Time) error {
	value, err := single(header, HeaderTimestamped)
	if err != nil {
		return err
	}
	if digits, ok := strings.CutPrefix(value, hubPrefix); ok {
		m, ok := parseHex(digits)
		if !ok {
			return fmt.Errorf("%w: %s: want %s and 64 hex digits", ErrMalformed, HeaderTimestamped, hubPrefix)
		}
		if err := match([]mac{m}, keys, body); err != nil {
			return err
		}
		return ErrLegacy
	}

	var (
		t          string
		candidates []mac
	)
	for element := range strings.SplitSeq(value, ",") {
		name, text, _ := strings.Cut(strings.TrimSpace(element), "=")
		switch name {
		case "t":
			if t != "" {
				return fmt.Errorf("%w: %s has more than one t", ErrMalformed, HeaderTimestamped)
			}
			t = text
		case "v1":
			if m, ok := parseHex(text); ok {
				candidates = append(candidates, m)
			}
		}
	}
	if t == "" || len(candidates) == 0 {
		return fmt.Errorf("%w: %s: want t=<unix seconds>,v1=<64 hex digits>", ErrMalformed, HeaderTimestamped)
	}
	if err := checkTime(t, now); err != nil {
		return err
	}
	return match(candidates, keys, []byte(t+"."), body)
}

// parseHex reads an HMAC-SHA256 as hex digits of either case.
func parseHex(digits string) (m mac, ok bool) {
	if len(digits) != hex.EncodedLen(len(m)) {
		return m, false
	}
	_, err := hex.Decode(m[:], []byte(digits))
	return m, err == nil
}
