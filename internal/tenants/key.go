package tenants

import (
	"crypto/rand"
	"encoding/base64"
	"hash/crc32"
	"strings"

	"converger/internal/secrets"
)

// A key is a prefix that says what it is (and lets secret scanners find it), 32 random bytes in base64url, and a
// checksum: the CRC-32 (IEEE) of all that precedes in six base62 digits, so that a mistyped or cut key is told from a
// revoked one without asking anybody.
const (
	apiKeyPrefix        = "cvg_live_"
	operatorTokenPrefix = "cvg_op_"

	keyRandomBytes   = 32
	keyRandomChars   = 43 // base64url of 32 bytes, unpadded
	keyChecksumChars = 6  // 62^6 > 2^32
	shownPrefixChars = 13 // stored in clear, to recognise a key by

	base62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
)

// ParseKey checks the form of a tenant's API key and gives the hash by which [Directory.Key] finds it, or
// [ErrMalformedKey]. A text of any size costs a bounded, small time, and nothing is allocated.
func ParseKey(text string) (hash [32]byte, err error) { return parseKey(apiKeyPrefix, text) }

// ParseOperatorToken is [ParseKey] for the tokens of the management API and [Directory.OperatorToken].
func ParseOperatorToken(text string) (hash [32]byte, err error) {
	return parseKey(operatorTokenPrefix, text)
}

func parseKey(prefix, text string) ([32]byte, error) {
	if len(text) != len(prefix)+keyRandomChars+keyChecksumChars || !strings.HasPrefix(text, prefix) {
		return [32]byte{}, ErrMalformedKey
	}
	body, sum := text[:len(text)-keyChecksumChars], text[len(text)-keyChecksumChars:]
	if want := checksum(body); sum != string(want[:]) {
		return [32]byte{}, ErrMalformedKey
	}
	return secrets.Hash(text), nil
}

func generateKey(prefix string) secrets.Text {
	var random [keyRandomBytes]byte
	_, _ = rand.Read(random[:]) // never fails
	body := prefix + base64.RawURLEncoding.EncodeToString(random[:])
	sum := checksum(body)
	return secrets.Text(body + string(sum[:]))
}

func checksum(s string) (digits [keyChecksumChars]byte) {
	crc := ^uint32(0) // by hand: crc32.ChecksumIEEE wants a slice, and the conversion would allocate per request
	for i := range len(s) {
		crc = crc32.IEEETable[byte(crc)^s[i]] ^ crc>>8
	}
	crc = ^crc
	for i := range digits {
		digits[len(digits)-1-i] = base62[crc%62]
		crc /= 62
	}
	return digits
}
