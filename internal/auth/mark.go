package auth

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/secrets"
)

// The texts that browsers keep are a prefix that says what it is (and lets secret scanners find it), random bytes, and a
// mark: a keyed digest of them, so that an invented one is told without asking anybody.
const (
	sessionPrefix = "cvg_ses_"
	devicePrefix  = "cvg_dev_"
	linkPrefix    = "cvg_link_"

	randomBytes = 32
	markBytes   = 16 // 128 bits: forging one means as many guesses over the network
)

// marker makes and checks marks; the first key makes them.
type marker [][]byte

func (m marker) mark(key []byte, prefix string, parts ...[]byte) []byte {
	h := hmac.New(sha256.New, key)
	h.Write([]byte(prefix)) // of fixed length for each kind, and no kind's is the beginning of another's
	for _, p := range parts {
		h.Write(p)
	}
	return h.Sum(nil)[:markBytes]
}

// seal writes payload with its mark. context is marked too, and not written.
func (m marker) seal(prefix string, payload []byte, context string) secrets.Text {
	marked := slices.Concat(payload, m.mark(m[0], prefix, payload, []byte(context)))
	return secrets.Text(prefix + base64.RawURLEncoding.EncodeToString(marked))
}

// open reads what seal wrote, of a payload of n bytes.
func (m marker) open(prefix string, n int, context, text string) (payload []byte, ok bool) {
	body, ok := strings.CutPrefix(text, prefix)
	if !ok || len(body) != base64.RawURLEncoding.EncodedLen(n+markBytes) {
		return nil, false
	}
	// Strict: each session has one text, and so one digest.
	b, err := base64.RawURLEncoding.Strict().DecodeString(body)
	if err != nil {
		return nil, false
	}
	for _, key := range m {
		if hmac.Equal(b[n:], m.mark(key, prefix, b[:n], []byte(context))) {
			return b[:n], true
		}
	}
	return nil, false
}

func random(n int) []byte {
	b := make([]byte, n)
	rand.Read(b) // never fails
	return b
}

// deviceMark is a browser that has signed in to an account; its cookie says so.
type deviceMark struct {
	id      string // random, 16 bytes
	user    uuid.UUID
	version int64 // of the user's password
}

const deviceBytes = 16 + 16 + 8 + 8

// deviceCookie writes a device for an account. The account's name is in the mark, so that the cookie proves nothing to
// another account.
func (m marker) deviceCookie(d deviceMark, account string, now time.Time) secrets.Text {
	b := make([]byte, 0, deviceBytes)
	b = append(b, d.id...)
	b = append(b, d.user[:]...)
	b = binary.BigEndian.AppendUint64(b, uint64(d.version))
	b = binary.BigEndian.AppendUint64(b, uint64(now.Unix()))
	return m.seal(devicePrefix, b, account)
}

// device reads a device cookie of an account; the zero deviceMark is none. Whether user and version are still those of the
// account is for the caller to see.
func (m marker) device(text, account string, now time.Time) deviceMark {
	b, ok := m.open(devicePrefix, deviceBytes, account, text)
	if !ok {
		return deviceMark{}
	}
	made := time.Unix(int64(binary.BigEndian.Uint64(b[40:])), 0)
	if now.Sub(made) > DeviceLife {
		return deviceMark{}
	}
	return deviceMark{id: string(b[:16]), user: uuid.UUID(b[16:32]), version: int64(binary.BigEndian.Uint64(b[32:]))}
}

// newLinkToken makes the token of a sign-in link. It has no mark: the command line makes links without knowing any key.
func newLinkToken() secrets.Text {
	return secrets.Text(linkPrefix + base64.RawURLEncoding.EncodeToString(random(randomBytes)))
}

// looksLikeLink checks the form of a link's token.
func looksLikeLink(text string) bool {
	body, ok := strings.CutPrefix(text, linkPrefix)
	return ok && len(body) == base64.RawURLEncoding.EncodedLen(randomBytes)
}
