package secrets

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/google/uuid"
)

var (
	// ErrSealed means that the sealed value does not open: it was altered, cut, sealed for another row or column, or with another
	// key of the same id.
	ErrSealed = errors.New("sealed value does not open")
	// ErrUnknownKey means that the value was sealed with a key that this Box does not hold.
	ErrUnknownKey = errors.New("sealed with an unknown key")
)

// The layout of a sealed value: 1 byte version | 4 bytes key id | 12 bytes nonce | ciphertext and 16 bytes tag.
const (
	KeySize = 32 // bytes of a key: AES-256

	boxVersion = 1
	keyIDSize  = 4
	headSize   = 1 + keyIDSize
)

// KeyID is how a key is named in what it sealed: the first four bytes of its SHA-256. It is no secret.
type KeyID [keyIDSize]byte

// IDOf gives the id of a key.
func IDOf(key []byte) KeyID {
	sum := sha256.Sum256(key)
	return KeyID(sum[:keyIDSize])
}

// String writes the id as eight hexadecimal digits.
func (id KeyID) String() string { return hex.EncodeToString(id[:]) }

// Column is a column of a table in which sealed values stand; NULL is none. The names are those that [Box.Seal] was
// given. Row is the column with the UUID that Seal was given; an index of its own makes it unique.
type Column struct{ Table, Name, Row string }

// String is table.column.
func (c Column) String() string { return c.Table + "." + c.Name }

// SealedBy tells which key sealed a value; false: the value does not begin as sealed ones do.
func SealedBy(sealed []byte) (KeyID, bool) {
	if len(sealed) < headSize || sealed[0] != boxVersion {
		return KeyID{}, false
	}
	return KeyID(sealed[1:headSize]), true
}

// Head is what every value that the key of this id sealed begins with, for queries.
func (id KeyID) Head() []byte { return append([]byte{boxVersion}, id[:]...) }

// Box seals values for the database and opens them again. It is safe for concurrent use.
type Box struct {
	current KeyID
	keys    map[KeyID]cipher.AEAD
}

// NewBox makes a Box that seals with current and opens with current and any of retired; so a key is changed without a
// stop: the old one is retired until everything has been sealed anew. Keys are [KeySize] random bytes. A key is known
// in sealed values by the first four bytes of its SHA-256; two different keys with the same id are refused.
func NewBox(current []byte, retired ...[]byte) (*Box, error) {
	b := &Box{keys: make(map[KeyID]cipher.AEAD, 1+len(retired))}
	seen := make(map[KeyID][sha256.Size]byte, 1+len(retired))
	for i, key := range append([][]byte{current}, retired...) {
		if len(key) != KeySize {
			return nil, fmt.Errorf("key %d has %d bytes instead of %d", i, len(key), KeySize)
		}
		sum := sha256.Sum256(key)
		id := KeyID(sum[:keyIDSize])
		if other, ok := seen[id]; ok && other != sum {
			return nil, fmt.Errorf("key %d has the same id as another key; make a new one", i)
		}
		block, err := aes.NewCipher(key)
		if err != nil {
			return nil, fmt.Errorf("key %d: %w", i, err)
		}
		// Random nonces are safe for 2^32 values a key (NIST SP 800-38D, 8.3).
		aead, err := cipher.NewGCMWithRandomNonce(block)
		if err != nil {
			return nil, fmt.Errorf("key %d: %w", i, err)
		}
		if i == 0 {
			b.current = id
		}
		seen[id], b.keys[id] = sum, aead
	}
	return b, nil
}

// Current is the id of the key that seals.
func (b *Box) Current() KeyID { return b.current }

// Knows tells whether the Box holds a key.
func (b *Box) Knows(id KeyID) bool {
	_, ok := b.keys[id]
	return ok
}

// Seal encrypts plain for one column of one row. The result is len(plain)+33 bytes.
func (b *Box) Seal(plain []byte, table, column string, row uuid.UUID) []byte {
	aead := b.keys[b.current]
	out := make([]byte, 0, headSize+len(plain)+aead.Overhead())
	out = append(out, boxVersion)
	out = append(out, b.current[:]...)
	return aead.Seal(out, nil, plain, place(table, column, row))
}

// Open gives back what Seal encrypted for the same column and row. It returns [ErrUnknownKey] or [ErrSealed].
func (b *Box) Open(sealed []byte, table, column string, row uuid.UUID) ([]byte, error) {
	id, ok := SealedBy(sealed)
	if !ok {
		return nil, ErrSealed
	}
	aead, ok := b.keys[id]
	if !ok {
		return nil, ErrUnknownKey
	}
	plain, err := aead.Open(nil, nil, sealed[headSize:], place(table, column, row))
	if err != nil {
		return nil, ErrSealed
	}
	return plain, nil
}

// place is the additional data: a value copied to another row or column does not open there.
func place(table, column string, row uuid.UUID) []byte {
	aad := make([]byte, 0, len(table)+len(column)+2+len(row))
	aad = append(append(aad, table...), 0)
	aad = append(append(aad, column...), 0)
	return append(aad, row[:]...)
}
