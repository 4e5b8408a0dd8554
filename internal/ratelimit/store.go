package ratelimit

import (
	"context"
	"time"
)

// Instant is a moment in Unix nanoseconds. Production reads it from a Clock,
// which never steps; tests pass any number.
type Instant int64

// InstantOf converts a time.Time by its wall clock.
func InstantOf(t time.Time) Instant { return Instant(t.UnixNano()) }

// Time converts back.
func (i Instant) Time() time.Time { return time.Unix(0, int64(i)) }

// Add returns the moment d later.
func (i Instant) Add(d time.Duration) Instant { return i + Instant(d) }

// Clock is wall time at its making plus monotonic time since: a step of the
// wall clock does not reach the limiter. Safe for concurrent use.
type Clock struct {
	start time.Time
	unix  int64
	read  func() Instant
}

// NewClock reads the wall clock once.
func NewClock() Clock {
	t := time.Now()
	return Clock{start: t, unix: t.UnixNano()}
}

// ClockFrom is a clock that read tells, such as one that all nodes of a cluster
// agree on.
func ClockFrom(read func() Instant) Clock { return Clock{read: read} }

// IsZero tells whether c is no clock.
func (c Clock) IsZero() bool { return c.read == nil && c.start.IsZero() }

// Now reads the clock. It costs more than a check: read it once a request, just
// before the check, and pass it down.
func (c Clock) Now() Instant {
	if c.read != nil {
		return c.read()
	}
	return Instant(c.unix + int64(time.Since(c.start)))
}

// Item is one budget and what a request wants of it.
type Item struct {
	Key    Key
	Policy *Policy // nil: no limit, always admitted
	Cost   uint32  // 0 means 1
}

// Decision is the answer to a check. It is passed by value and is kept to four
// words, since a bigger result costs more than the check.
type Decision struct {
	// Policy is the policy really applied, of the strictest item: of refusals the
	// one with the longest wait, of admissions the one with the least part of its
	// quota remaining. Nil when no limit was enforced.
	Policy *Policy
	// At is the store's own time of the decision.
	At Instant
	// Remaining is what the strictest budget has left after the decision.
	Remaining uint32
	// WaitMs is, of a refusal, the milliseconds until the same request would be
	// admitted if nobody else came; of an admission with nothing remaining,
	// until one unit is free; else until the whole budget is free again (fixed
	// and sliding windows: until the window ends). Of an admitted reservation it
	// is the time until the reserved moment, 0 for now.
	WaitMs uint32
	// Item is the index of the strictest item.
	Item uint8
	// Allowed says that the request may go on, and that every item was spent.
	Allowed bool
	// Counted marks a request that a bucket in count mode would have refused.
	Counted bool
	// Unnamed asks the caller to tell Limiter.Name whom the key stands for: it is about
	// to be shown to operators. Whoever does not know leaves it.
	Unnamed bool
	// Alone has a bit for each item, 1<<i for item i: it was decided by the node
	// that was asked, with a share of the limit, because the one who counts could
	// not be asked. Items beyond the 32nd have none.
	Alone uint32
}

// AllAlone is Decision.Alone of a decision of which every item was decided so.
const AllAlone = 1<<32 - 1

// Booking tells a store where and when it booked a spend, so that it can give it
// back.
type Booking struct {
	At    Instant // the At of the decision
	Alone bool    // not with the one who counts
}

// Booking is that of item i of the decision, by its place in the request.
func (d Decision) Booking(i int) Booking { return Booking{d.At, d.Alone>>uint(i)&1 != 0} }

// AsPart is the decision on items of a larger request, as one on the request:
// index tells the place there of each item.
func (d Decision) AsPart(index []uint8) Decision {
	alone := d.Alone
	d.Alone = 0
	for i, place := range index {
		d.Alone |= alone >> i & 1 << place
	}
	d.Item = index[d.Item]
	return d
}

// Spend is the cost as stores book it.
func (it Item) Spend() uint32 { return max(it.Cost, 1) }

// Limited tells whether a budget was really enforced, and so whether the answer
// should describe it.
func (d Decision) Limited() bool { return d.Policy != nil }

// Stricter tells whether d rather than o is the answer to a request that met both:
// of refusals the one with the longer wait, of admissions the one that left less
// of its quota. Both have a policy.
func (d Decision) Stricter(o Decision) bool {
	switch {
	case d.Allowed != o.Allowed:
		return o.Allowed
	case !d.Allowed:
		return d.WaitMs > o.WaitMs
	}
	return uint64(d.Remaining)*uint64(o.Policy.Quota()) < uint64(o.Remaining)*uint64(d.Policy.Quota())
}

// Usage is the state of one budget, for operators.
type Usage struct {
	Policy    *Policy
	Used      uint32 // estimate of what is in use now
	Remaining uint32
	WaitMs    uint32 // milliseconds until nothing is in use, if nobody asks: of a sliding window within the next
}

// Store holds the counters. Implementations decide and count in one atomic
// step, are safe for concurrent use, and always decide: a backend that cannot
// reach its peers or its server falls back by itself and never fails open for a
// guard bucket. Their operations follow these laws, which
// internal/ratelimit/ratelimittest checks:
//
//   - a budget never admits more than its limit in a window (backends that
//     promise less accuracy state it as a number);
//   - a refusal leaves no trace: it neither lengthens the wait nor hides a part
//     of the budget from others (of several items, only while two spends race);
//   - a change of policy keeps past use: the count of the running window for a
//     change of limit, the present use, at most a full budget, for a change of
//     scale, burst or algorithm;
//   - time that steps back neither refills a budget nor locks it for more than
//     one window.
//
// The policy comes with each call, so a store needs no configuration. now is
// the caller's clock; a store that has a better one corrects it.
type Store interface {
	// Backend names the backend that decides for a bucket, as a metric label.
	Backend(Bucket) string
	// Take spends one item, or refuses it. The item has a policy.
	Take(ctx context.Context, now Instant, it Item) Decision
	// TakeAll spends every item or none; the strictest decision is the answer.
	// The items have policies and distinct keys, and are not retained.
	TakeAll(ctx context.Context, now Instant, items []Item) Decision
	// Refund gives back what an admitted Take, TakeAll or Reserve spent on an
	// item; b is Decision.Booking of it. Once the window is over nothing happens.
	// It must not be called twice for one spend.
	Refund(ctx context.Context, b Booking, it Item)
	// Reserve spends an item for the first moment at which it is free, if that is
	// at most maxWait (up to MaxReserve) away; WaitMs tells when. Only token
	// buckets can be booked ahead: the others admit now or refuse.
	Reserve(ctx context.Context, now Instant, it Item, maxWait time.Duration) Decision
	// Peek reads a budget without spending from it; Cost is ignored. It tells what a
	// check at the same moment would find: a counter that was kept under another shape
	// is converted, as by the first check, and goes on under the new one from there.
	Peek(ctx context.Context, now Instant, it Item) (Usage, error)
	// Reset forgets what was spent on an item until now: on this node and, where another
	// server counts, there. The policy, nil where no limit applies, tells for how long
	// what was spent could come back. No other node is asked: whoever resets asks every
	// one, with the same now, which is the reset's version; to repeat it changes
	// nothing. What a node that was not reached has counted until then does not count
	// for the others any more, and it takes the reset in from them when it is back.
	// The error is of a server that can't be asked.
	Reset(ctx context.Context, now Instant, it Item) error
}

// MaxReserve is how far ahead a token bucket can be booked.
const MaxReserve = time.Minute
