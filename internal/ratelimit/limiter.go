package ratelimit

import (
	"context"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Config is what a Limiter is made of.
type Config struct {
	// Store holds the counters. Required.
	Store Store
	// Clock is read by Limiter.Now; the zero Clock is replaced by NewClock.
	Clock Clock
	// Operator is the operator's configuration, RATE_LIMITS; nil for none.
	Operator *Operator
	// Disabled switches every bucket off but the guards: RATE_LIMIT_ENABLED=false.
	Disabled bool
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Limiter decides: it resolves policies, asks the store and counts the answers.
// Safe for concurrent use; a check allocates nothing.
type Limiter struct {
	store    Store
	clock    Clock
	disabled bool
	operator *Operator
	builtin  [NumBuckets]*Policy
}

// New makes a limiter. It starts nothing.
func New(c Config) (*Limiter, error) {
	l := &Limiter{store: c.Store, clock: c.Clock, disabled: c.Disabled, operator: c.Operator}
	if l.clock == (Clock{}) {
		l.clock = NewClock()
	}
	for _, b := range Buckets() {
		if d := b.Info().Default; d.Scale > 0 {
			p, err := NewPolicy(b, d)
			if err != nil {
				return nil, err
			}
			l.builtin[b] = p
		}
	}
	return l, nil
}

// Now reads the clock.
func (l *Limiter) Now() Instant { return l.clock.Now() }

// Enabled tells whether limiting is on; the guards are on in any case.
func (l *Limiter) Enabled() bool { return !l.disabled }

// Policy resolves what applies to a bucket: the tenant's override, else the
// operator's configuration, else the caller's own default, else the built-in
// one. It is nil when no limit applies, which Check takes as such.
func (l *Limiter) Policy(b Bucket, tenant *Overrides, own *Policy) *Policy {
	if p := tenant.Policy(b); p != nil {
		return p
	}
	if own != nil {
		return own
	}
	return l.builtin[b]
}

// Check spends one item, or refuses it. An item without a policy is admitted.
func (l *Limiter) Check(ctx context.Context, now Instant, it Item) Decision {
	if it.Policy == nil {
		return Decision{At: now, Allowed: true}
	}
	return l.store.Take(ctx, now, it)
}

// CheckAll spends every item or none; the strictest decision is the answer.
// Items without a policy are skipped.
func (l *Limiter) CheckAll(ctx context.Context, now Instant, items ...Item) Decision {
	return l.store.TakeAll(ctx, now, items)
}

// Refund gives back what an allowed decision spent on its items.
func (l *Limiter) Refund(ctx context.Context, d Decision, items ...Item) {
	for _, it := range items {
		if it.Policy != nil {
			l.store.Refund(ctx, d.At, it)
		}
	}
}

// Reserve spends an item for the first moment at which it is free, if that is at
// most maxWait away; see Store.Reserve.
func (l *Limiter) Reserve(ctx context.Context, now Instant, it Item, maxWait time.Duration) Decision {
	if it.Policy == nil {
		return Decision{At: now, Allowed: true}
	}
	return l.store.Reserve(ctx, now, it, maxWait)
}

// Peek reads a budget without spending from it.
func (l *Limiter) Peek(ctx context.Context, now Instant, it Item) (Usage, error) {
	return l.store.Peek(ctx, now, it)
}

// Reset forgets what was spent on a key.
func (l *Limiter) Reset(ctx context.Context, now Instant, k Key) error {
	return l.store.Reset(ctx, now, k)
}
