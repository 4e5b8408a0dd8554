package secrets

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
)

// redacted is what a Text shows in place of itself, also when it is empty.
const redacted = "[redacted]"

// Text is a secret held in memory: a key, a token, a password. Whatever prints, logs or marshals it (every verb of fmt,
// slog, encoding/json, encoding.TextMarshaler) gets "[redacted]". [Text.Reveal] is the one way out, and easy to search
// for. Reading JSON into a Text takes the string as it is.
//
// Three holes cannot be closed from here. fmt does not call methods on unexported struct fields: a struct that keeps a
// Text in one must not be printed, or must have a String method. fmt answers %w and %p of a Text with a complaint that
// shows the value; go vet refuses both. encoding/json writes map keys of a string type as they are: a Text is no key.
type Text string

var (
	_ fmt.Formatter  = Text("")
	_ slog.LogValuer = Text("")
)

// Reveal gives the secret itself.
func (t Text) Reveal() string { return string(t) }

// String implements [fmt.Stringer].
func (Text) String() string { return redacted }

// Format implements [fmt.Formatter]: for every verb, even one that a string does not have, where fmt would otherwise
// report the mistake together with the value.
func (Text) Format(s fmt.State, _ rune) { _, _ = io.WriteString(s, redacted) }

// LogValue implements [slog.LogValuer].
func (Text) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText implements [encoding.TextMarshaler], and so covers JSON, XML and flags.
func (Text) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Hash is the SHA-256 of a secret, by which it is stored and looked up. That is enough for secrets of 256 random bits,
// which cannot be guessed whatever the speed of the hash; passwords need a slow one.
func Hash(text string) [sha256.Size]byte {
	var buf [64]byte // on the stack for everything we hash per request
	return sha256.Sum256(append(buf[:0], text...))
}
