package auth

import "errors"

// The bounds of a password. bcrypt reads 72 bytes and no more: what does not fit is refused, not cut.
const (
	MinPasswordChars = 8
	MaxPasswordBytes = 72
)

// ErrOverloaded says that too many passwords are being hashed at this moment. Nothing was decided, nothing counted.
var ErrOverloaded = errors.New("auth: too many passwords are being hashed")

// Passwords hashes and compares passwords, so many at once as there are processors. Safe for concurrent use.
type Passwords struct{ cost int }

// NewPasswords makes one for a bcrypt cost from 4 (tests) to 20; see MinCost and MaxCost.
func NewPasswords(cost int) (*Passwords, error) { panic("not yet") }
