package ratelimit

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// loginPatience is how long an attempt waits for the reservations of others: a few password hashes of a busy node.
const loginPatience = 5 * time.Second

// LoginAttempt names whom an attempt to sign in counts against.
type LoginAttempt struct {
	// IP is the client's address; IPv6 counts by its /64.
	IP netip.Addr
	// Account is the canonical name of the account, whether it exists or not: the text that also finds it.
	Account string
	// Device is the id of a device that has signed in to this very account before, "" for none. The caller has verified
	// that. Such an attempt counts against the account on this device instead of the account at large, so that strangers
	// do not keep the owner out.
	Device string
}

// Login is the throttle in front of passwords: buckets LoginIP and LoginAccount, both consulted and reserved together,
// before the password is looked at. Failures stay counted, successes are given back.
//
// A budget that is used up by reservations whose outcome is open does not lock: an attempt that meets one waits until one
// of them is given back, and is refused once all of them turned out to be failures, or after five seconds. Only what is
// given back admits a waiting attempt, not the beginning of the next window, and open reservations count in full across a
// window's edge: a hundred parallel guesses get as many verifications as the limit says.
//
// On several nodes the open reservations of other nodes are not seen: an attempt that meets only those is refused.
//
// It is safe for concurrent use, holds memory only for attempts that are under way, and owns no goroutine.
type Login struct {
	limiter *Limiter
	hasher  Hasher

	mu    sync.Mutex
	gates map[Key]*gate
}

// NewLogin makes a throttle over a limiter's store.
func NewLogin(l *Limiter, h Hasher) *Login {
	return &Login{limiter: l, hasher: h, gates: make(map[Key]*gate)}
}

type gate struct{}

// LoginReservation is room for the verification of one password. Exactly one of Keep and Refund must be called, once.
type LoginReservation struct {
	login     *Login
	exhausted bool
}

// Reserve makes room for one attempt in every budget that it counts against, or in none.
//
// A nil reservation without an error is a refusal: the decision tells the bucket and the wait, as for any other limit. The
// error is ctx's own, when it ends while the attempt waits.
func (t *Login) Reserve(ctx context.Context, a LoginAttempt) (*LoginReservation, Decision, error) {
	panic("not yet")
}

// Keep counts the attempt as a failure. It reports whether this failure used up a budget: the lock begins with it.
func (r *LoginReservation) Keep() (locked bool) { panic("not yet") }

// Refund gives the attempt back: the password was right, or was never looked at.
func (r *LoginReservation) Refund(ctx context.Context) { panic("not yet") }
