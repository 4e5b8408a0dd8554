package auth

import (
	"crypto/hkdf"
	"crypto/sha256"
	"errors"
	"fmt"
)

// MinSecretBytes is the least length of SECRET_KEY_BASE and of each retired secret, in bytes.
const MinSecretBytes = 32

// ErrWeakSecret says that a secret is shorter than MinSecretBytes.
var ErrWeakSecret = errors.New("auth: secret is too short")

// DeriveKey derives a 32-byte key for one purpose from a secret (HKDF with SHA-256, RFC 5869): keys of two purposes
// say nothing about each other. The purpose is part of the key: changing its text retires every key made with it.
func DeriveKey(secret []byte, purpose string) ([]byte, error) {
	if len(secret) < MinSecretBytes {
		return nil, ErrWeakSecret
	}
	key, err := hkdf.Key(sha256.New, secret, nil, "converger "+purpose, 32)
	if err != nil {
		return nil, fmt.Errorf("auth: derive key: %w", err)
	}
	return key, nil
}
