package auth

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/crypto/bcrypt"

	"converger/internal/fault"
	"converger/internal/secrets"
)

const (
	// MinPasswordChars is the least length of a password, in characters.
	MinPasswordChars = 8
	// MaxPasswordBytes is the greatest, in bytes of UTF-8: bcrypt reads no more, and what does not fit is refused, not cut.
	MaxPasswordBytes = 72

	// MinCost is the least cost of bcrypt, for tests; each step doubles the time.
	MinCost = bcrypt.MinCost
	// MaxCost is the greatest: about a minute.
	MaxCost = 20

	// hashPatience is how long a password waits for a processor.
	hashPatience = 5 * time.Second
)

// ErrOverloaded says that too many passwords are being hashed at this moment: one waited too long for a processor, or the
// request's time ended with its hash. Nothing was done, nothing counted.
var ErrOverloaded = errors.New("auth: too many passwords are being hashed")

// Passwords hashes passwords and compares them with bcrypt, so many at once as there are processors; others wait a little.
// Safe for concurrent use.
type Passwords struct {
	cost   int
	slots  chan struct{}
	hashed atomic.Int64 // passwords hashed, to be set or compared
	work   atomic.Int64 // what comparisons took, in rounds of bcrypt
}

// NewPasswords makes one for a bcrypt cost between MinCost and MaxCost.
func NewPasswords(cost int) (*Passwords, error) {
	if cost < MinCost || cost > MaxCost {
		return nil, fmt.Errorf("auth: a bcrypt cost of %d is not between %d and %d", cost, MinCost, MaxCost)
	}
	return &Passwords{cost: cost, slots: make(chan struct{}, runtime.GOMAXPROCS(0))}, nil
}

// dummyHash has the form of a bcrypt hash of a cost. No password is known that it is of; who compares with it does not look
// at the answer.
func dummyHash(cost int) []byte {
	return fmt.Appendf(nil, "$2a$%02d$%s", cost, "NoOneHasThisSalt......uGVuZHNoZXJlMDEyMzQ1Njc4OTAxMjM")[:60]
}

// inTime is an error once ctx has ended. Time that ran out was spent on hashes, or on the wait for them: [ErrOverloaded], lest
// the next query fail and the database get the blame. Else it is ctx's own.
func inTime(ctx context.Context) error {
	err := ctx.Err()
	if errors.Is(err, context.DeadlineExceeded) {
		return ErrOverloaded
	}
	return err
}

// hash makes the hash of a password that was checked. It returns [ErrOverloaded], or ctx's error.
func (p *Passwords) hash(ctx context.Context, password secrets.Text) (string, error) {
	if err := p.enter(ctx); err != nil {
		return "", err
	}
	defer p.leave()
	hash, err := bcrypt.GenerateFromPassword([]byte(password.Reveal()), p.cost)
	if err != nil {
		return "", fmt.Errorf("auth: hash password: %w", err)
	}
	return string(hash), inTime(ctx)
}

// compare tells whether a password is the one that was hashed. It takes the time of one hash of the configured cost,
// whatever the answer: also for "", where there is no hash, and for a hash that was made with a lower cost. stale says that
// the hash is not of the configured cost. It returns [ErrOverloaded], or ctx's error; neither once the answer is known.
func (p *Passwords) compare(ctx context.Context, hash string, password secrets.Text) (right, stale bool, err error) {
	if err := p.enter(ctx); err != nil {
		return false, false, err
	}
	defer p.leave()
	text := []byte(password.Reveal())
	cost, err := bcrypt.Cost([]byte(hash))
	if err != nil { // none, or one that we can't read: as nobody's
		p.matches(dummyHash(p.cost), p.cost, text)
		return false, false, nil
	}
	right = p.matches([]byte(hash), cost, text)
	for ; cost < p.cost; cost++ { // 2^cost and 2^cost + 2^(cost+1) + … make 2^p.cost
		p.matches(dummyHash(cost), cost, text)
		stale = true
	}
	return right, stale || cost > p.cost, nil
}

// matches computes one hash.
func (p *Passwords) matches(hash []byte, cost int, text []byte) bool {
	p.work.Add(1 << cost)
	return bcrypt.CompareHashAndPassword(hash, text) == nil
}

func (p *Passwords) enter(ctx context.Context) error {
	select {
	case p.slots <- struct{}{}:
		p.hashed.Add(1)
		return nil
	default:
	}
	timer := time.NewTimer(hashPatience)
	defer timer.Stop()
	select {
	case p.slots <- struct{}{}:
		p.hashed.Add(1)
		return nil
	case <-timer.C:
		return ErrOverloaded
	case <-ctx.Done():
		return inTime(ctx)
	}
}

func (p *Passwords) leave() { <-p.slots }

// checkPassword says what is wrong with a new password of the account.
func checkPassword(bad *fault.Invalid, password secrets.Text, email string) {
	const pointer = "/password"
	text := password.Reveal()
	switch {
	case text == "":
		bad.Addf(pointer, fault.Required, "must not be empty")
	case !utf8.ValidString(text) || strings.ContainsRune(text, 0):
		bad.Addf(pointer, fault.Malformed, "must be UTF-8 without NUL")
	case strings.TrimSpace(text) == "":
		bad.Addf(pointer, fault.Malformed, "must not be white space alone")
	case utf8.RuneCountInString(text) < MinPasswordChars:
		bad.Addf(pointer, fault.OutOfRange, "must have at least %d characters", MinPasswordChars)
	case len(text) > MaxPasswordBytes:
		bad.Addf(pointer, fault.TooLong, "must have at most %d bytes, and has %d: letters with accents take 2 of them, emoji 4",
			MaxPasswordBytes, len(text))
	case strings.EqualFold(text, email):
		bad.Addf(pointer, fault.Conflict, "must not be the address")
	}
}
