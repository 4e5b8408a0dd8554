package ratelimit

import (
	"context"
	"errors"
	"fmt"
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
	policies [NumBuckets]*Policy // operator's or built-in, nil: no limit
	operated [NumBuckets]bool    // the operator said so
	meter    *meter
	watches  [NumBuckets]*watch
	started  Instant
}

// New makes a limiter. It starts nothing.
func New(c Config) (*Limiter, error) {
	if c.Store == nil {
		return nil, errors.New("ratelimit: no store")
	}
	l := &Limiter{store: c.Store, clock: c.Clock, disabled: c.Disabled}
	if l.clock.IsZero() {
		l.clock = NewClock()
	}
	l.started = l.clock.Now()
	for _, b := range Buckets() {
		l.watches[b] = newWatch()
		if p, ok := c.Operator.Policy(b); ok {
			l.policies[b], l.operated[b] = p, true
		} else if d := b.Info().Default; d != (Rule{}) {
			p, err := NewPolicy(b, d)
			if err != nil {
				return nil, err
			}
			l.policies[b] = p
		}
	}
	l.meter = newMeter(c.Store.Backend)
	if c.Registerer != nil {
		if err := c.Registerer.Register(l.meter); err != nil {
			return nil, fmt.Errorf("ratelimit: register metrics: %w", err)
		}
	}
	return l, nil
}

// Operator returns what the operator's configuration says of a bucket, nil for "off", and whether it says anything, be
// limiting switched on or not.
func (l *Limiter) Operator(b Bucket) (*Policy, bool) {
	if !b.valid() || !l.operated[b] {
		return nil, false
	}
	return l.policies[b], true
}

// Backend names the backend that decides for a bucket.
func (l *Limiter) Backend(b Bucket) string { return l.store.Backend(b) }

// States tells of the stores behind the limiter; those that do not tell are left out.
func (l *Limiter) States(now Instant) []StoreState { return statesOf(l.store, now) }

// Own is what this node itself has counted of a budget's present use; ok is false
// for backends that do not know it apart.
func (l *Limiter) Own(now Instant, it Item) (used uint32, ok bool) { return ownOf(l.store, now, it) }

// Now reads the clock.
func (l *Limiter) Now() Instant { return l.clock.Now() }

// Enabled tells whether limiting is on; the guards are on in any case.
func (l *Limiter) Enabled() bool { return !l.disabled }

// Policy resolves what applies to a bucket: the tenant's override, else the
// operator's configuration, else the caller's own default, else the built-in
// one. It is nil when no limit applies, which Check takes as such.
func (l *Limiter) Policy(b Bucket, tenant *Overrides, own *Policy) *Policy {
	p := tenant.Policy(b)
	switch {
	case p != nil:
	case !b.valid():
	case l.operated[b] || own == nil:
		p = l.policies[b]
	default:
		p = own
	}
	if !l.applies(p) {
		return nil
	}
	return p
}

func (l *Limiter) applies(p *Policy) bool { return p != nil && (!l.disabled || p.guard) }

// Check spends one item, or refuses it. An item without a policy is admitted.
func (l *Limiter) Check(ctx context.Context, now Instant, it Item) Decision {
	if !l.applies(it.Policy) {
		return Decision{At: now, Allowed: true}
	}
	var d Decision
	if l.meter.sample(now) {
		start := time.Now()
		d = l.store.Take(ctx, now, it)
		l.meter.observe(it.Policy.bucket, time.Since(start))
	} else {
		d = l.store.Take(ctx, now, it)
	}
	l.settle(&it, &d, now)
	return d
}

// settle counts a decision on one item and lets through what is only counted.
func (l *Limiter) settle(it *Item, d *Decision, now Instant) {
	o, wait := allowed, d.WaitMs
	if !d.Allowed {
		o = refused
	}
	if it.Policy.count {
		if d.Policy = nil; !d.Allowed {
			o = counted
			d.Allowed, d.Counted, d.WaitMs = true, true, 0
		}
	}
	if n := l.meter.add(it.Policy.bucket, o, now); l.meter.due(it.Policy.bucket, o, n, now) {
		d.Unnamed = l.watches[it.Policy.bucket].see(l.meter, it, o, n, wait, now)
	}
}

// note is settle for a decision that stands; see Decision.Unnamed for the result.
func (l *Limiter) note(it Item, o outcome, waitMs uint32, now Instant) (unnamed bool) {
	b := it.Policy.bucket
	n := l.meter.add(b, o, now)
	return l.meter.due(b, o, n, now) && l.watches[b].see(l.meter, &it, o, n, waitMs, now)
}

// Refund gives back what an allowed decision spent on its items: those of its
// Check or Reserve, or of the store's TakeAll, in their order. Call it once.
func (l *Limiter) Refund(ctx context.Context, d Decision, items ...Item) {
	for i, it := range items {
		// Of a counted request it is unknown what was spent in count mode: nothing
		// is given back, which only counts more.
		if l.applies(it.Policy) && (!it.Policy.count || !d.Counted) {
			l.store.Refund(ctx, d.Booking(i), it)
		}
	}
}

// Reserve spends an item for the first moment at which it is free, if that is at
// most maxWait away; see Store.Reserve.
func (l *Limiter) Reserve(ctx context.Context, now Instant, it Item, maxWait time.Duration) Decision {
	if !l.applies(it.Policy) {
		return Decision{At: now, Allowed: true}
	}
	d := l.store.Reserve(ctx, now, it, maxWait)
	l.settle(&it, &d, now)
	return d
}

// Peek reads a budget without spending from it. The item has a policy.
func (l *Limiter) Peek(ctx context.Context, now Instant, it Item) (Usage, error) {
	return l.store.Peek(ctx, now, it)
}

// Reset forgets on this node what was spent on an item of a bucket; see Store.Reset. The item may have no policy.
func (l *Limiter) Reset(ctx context.Context, now Instant, b Bucket, it Item) error {
	s := l.store
	if r, ok := s.(*Router); ok { // an item without a policy does not tell its bucket
		s = r.stores[b]
	}
	return s.Reset(ctx, now, it)
}
