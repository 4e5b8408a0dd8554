package signature

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// Headers of the Standard scheme, from Standard Webhooks 1.0.0
// (https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md).
const (
	HeaderStandardID        = "Webhook-Id"
	HeaderStandardTimestamp = "Webhook-Timestamp"
	HeaderStandardSignature = "Webhook-Signature"
)

const (
	standardPrefix  = "whsec_" // begins a secret for symmetric signatures
	standardVersion = "v1"     // HMAC-SHA256; v1a is ed25519, which needs no secret of ours
)

// StandardKey returns the key that the text of a secret stands for in the
// Standard scheme: the decoded bytes if it is whsec_ and padded standard
// base64 of at least one byte, else the bytes of the whole text. It is the only
// scheme that decodes; the others use the text itself as key.
func StandardKey(secret string) []byte {
	if encoded, ok := strings.CutPrefix(secret, standardPrefix); ok {
		if key, err := base64.StdEncoding.DecodeString(encoded); err == nil && len(key) > 0 {
			return key
		}
	}
	return []byte(secret)
}

// SignStandard sets the three headers of the Standard scheme, with one
// signature v1,<base64> for each key, where the signature is the HMAC-SHA256 of
// "<id>.<now in Unix seconds>.<body>". Keys come from StandardKey. The id
// names the message and stays the same over all tries; the time is that of the
// try. The id is printable ASCII without blanks and without a dot, which ends
// it in the signed text; otherwise ErrBadID. ErrNoKey if no key is usable. On
// an error no header is set.
func SignStandard(header http.Header, id string, body []byte, keys [][]byte, now time.Time) error {
	if !validID(id) {
		return fmt.Errorf("%w: want printable ASCII without blanks and dots", ErrBadID)
	}
	keys = usable(keys)
	if len(keys) == 0 {
		return ErrNoKey
	}
	t := strconv.FormatInt(now.Unix(), 10)
	signatures := make([]string, 0, len(keys))
	for _, key := range keys {
		m := sum(key, []byte(id+"."+t+"."), body)
		signatures = append(signatures, standardVersion+","+base64.StdEncoding.EncodeToString(m[:]))
	}
	header.Set(HeaderStandardID, id)
	header.Set(HeaderStandardTimestamp, t)
	header.Set(HeaderStandardSignature, strings.Join(signatures, " "))
	return nil
}

// VerifyStandard checks the three headers of the Standard scheme over the raw
// body. It returns nil if one v1 signature matches one key (from StandardKey)
// and the time is within Tolerance of now; then the value of HeaderStandardID
// is proven too. Signatures of other versions are ignored. Failures:
// ErrMissing, ErrMalformed, ErrStale, ErrMismatch, ErrNoKey.
func VerifyStandard(header http.Header, body []byte, keys [][]byte, now time.Time) error {
	id, err := single(header, HeaderStandardID)
	if err != nil {
		return err
	}
	t, err := single(header, HeaderStandardTimestamp)
	if err != nil {
		return err
	}
	value, err := single(header, HeaderStandardSignature)
	if err != nil {
		return err
	}
	if !validID(id) {
		return fmt.Errorf("%w: %s: want printable ASCII without blanks and dots", ErrMalformed, HeaderStandardID)
	}
	var candidates []mac
	for element := range strings.FieldsSeq(value) {
		if version, text, _ := strings.Cut(element, ","); version == standardVersion {
			if m, ok := parseBase64(text); ok {
				candidates = append(candidates, m)
			}
		}
	}
	if len(candidates) == 0 {
		return fmt.Errorf("%w: %s: want v1,<base64 of 32 bytes>", ErrMalformed, HeaderStandardSignature)
	}
	if err := checkTime(t, now); err != nil {
		return err
	}
	return match(candidates, keys, []byte(id+"."+t+"."), body)
}

// parseBase64 reads an HMAC-SHA256 in padded standard base64, in its only form.
func parseBase64(text string) (m mac, ok bool) {
	b, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil || len(b) != len(m) {
		return m, false
	}
	return mac(b), true
}

func validID(id string) bool {
	return id != "" && !strings.ContainsFunc(id, func(r rune) bool {
		return r == '.' || r <= ' ' || r > '~'
	})
}
