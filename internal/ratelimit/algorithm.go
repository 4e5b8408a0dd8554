package ratelimit

import (
	"math/bits"
	"time"
)

// The rules of the three algorithms, in whole numbers and without a clock.
//
// Windows. A counter is a window's index and a count, with the count of the
// window before for sliding windows. A request is admitted when the estimate
// after it does not exceed the limit. A sliding window's estimate counts the
// previous window by the part that still overlaps, rounded down, so that
// admission goes on as long as the estimate is below the limit.
//
// Token bucket. A counter is the theoretical arrival time (TAT): the moment, in
// Unix nanoseconds, at which the bucket will be full again. Spending moves it
// on by TokenTime, and may move it Tolerance ahead of now at most. Rounding
// favours the caller by less than a nanosecond a request.

// State is one counter in the form in which stores keep and exchange it.
type State struct {
	Word uint64 // windows: index<<32 | count; token bucket: TAT
	Prev uint32 // sliding window: count of window index-1; token bucket: how far it was ever booked ahead, ms
}

// Window returns the index of the window that holds now and the milliseconds
// that have passed of it. The index is the same on every node.
func (p *Policy) Window(now Instant) (index, into uint32) {
	q, r := p.div(uint64(max(now, 0)) / 1e6)
	return uint32(q), uint32(r)
}

// WindowStart is the first moment of a window.
func (p *Policy) WindowStart(index uint32) Instant {
	return Instant(index) * Instant(p.scaleMs) * 1e6
}

// div divides x < 2^58 by the scale.
func (p *Policy) div(x uint64) (q, r uint64) {
	q, _ = bits.Mul64(x, p.magic)
	r = x - q*uint64(p.scaleMs)
	if r >= uint64(p.scaleMs) { // the reciprocal is rounded down: one short at most
		q++
		r -= uint64(p.scaleMs)
	}
	return q, r
}

// Carried is what the previous window's count still weighs, into milliseconds
// after the window's start. More than a full window is no worse than a full one:
// a limit that was lowered does not lock out for longer than a window.
func (p *Policy) Carried(prev, into uint32) uint32 {
	if prev == 0 {
		return 0
	}
	q, _ := p.div(uint64(min(prev, p.limit)) * uint64(p.scaleMs-into-1))
	return uint32(q)
}

// WindowWait is the number of milliseconds after which a refused request of a
// possible cost (1 to Limit) would be admitted. It is at most one window for a
// cost of 1, and at most two for a greater cost in a sliding window.
func (p *Policy) WindowWait(prev, count, cost, into uint32) uint32 {
	rest := p.scaleMs - into
	if p.alg != SlidingWindow {
		return rest
	}
	if uint64(count)+uint64(cost) <= uint64(p.limit) {
		return max(p.thinned(prev, p.limit-count-cost), into+1) - into
	}
	return rest + p.thinned(count, p.limit-cost)
}

// thinned is the first millisecond of a window at which Carried(prev) <= room.
func (p *Policy) thinned(prev, room uint32) uint32 {
	prev = min(prev, p.limit)
	if prev <= room {
		return 0
	}
	overlap := ((uint64(room)+1)*uint64(p.scaleMs) - 1) / uint64(prev)
	return p.scaleMs - 1 - uint32(min(overlap, uint64(p.scaleMs)-1))
}

// TokenTime is the time in nanoseconds in which n units refill, rounded down;
// the limit is not 0.
func (p *Policy) TokenTime(n uint32) int64 {
	if n == 1 {
		return p.tokenNs
	}
	return mulDiv(uint64(n), uint64(p.scaleMs)*1e6, uint64(p.limit))
}

// Tolerance is the time in nanoseconds in which the whole burst refills.
func (p *Policy) Tolerance() int64 { return p.toleranceNs }

// Tokens is the number of whole units that refill in d nanoseconds.
func (p *Policy) Tokens(d int64) uint32 {
	return uint32(min(mulDiv(uint64(max(d, 0)), uint64(p.limit), uint64(p.scaleMs)*1e6), MaxLimit))
}

func mulDiv(a, b, c uint64) int64 {
	hi, lo := bits.Mul64(a, b)
	if hi >= c {
		return 1<<63 - 1
	}
	q, _ := bits.Div64(hi, lo, c)
	return int64(min(q, 1<<63-1))
}

// Used is the present use of a counter kept under this policy's shape.
func (p *Policy) Used(s State, now Instant) uint32 {
	if p.alg == TokenBucket {
		debt := int64(s.Word) - int64(now)
		if debt <= 0 {
			return 0
		}
		return uint32(min(mulDivUp(debt, int64(p.limit), int64(p.scaleMs)*1e6), MaxLimit))
	}
	index, into := p.Window(now)
	tag, count := uint32(s.Word>>32), uint32(s.Word)
	switch d := int32(tag - index); {
	case d > 0: // the counter is ahead of this clock: it stands as at its start
		return count + p.slide(s.Prev, 0)
	case d == 0:
		return count + p.slide(s.Prev, into)
	case d == -1:
		return p.slide(count, into)
	}
	return 0
}

// Usage tells operators of a counter kept under this policy's shape.
func (p *Policy) Usage(s State, now Instant) Usage {
	used := p.Used(s, now)
	return Usage{Policy: p, Used: used, Remaining: p.Quota() - min(p.Quota(), used), WaitMs: p.whole(s, now)}
}

// whole is the number of milliseconds until nothing of a counter is in use.
func (p *Policy) whole(s State, now Instant) uint32 {
	if p.alg == TokenBucket {
		debt := max(int64(s.Word)-int64(now), 0)
		return uint32(min((debt+1e6-1)/1e6, 1<<32-1))
	}
	index, into := p.Window(now)
	count, prev, early := uint32(s.Word), s.Prev, uint32(0)
	switch d := int32(uint32(s.Word>>32) - index); {
	case d == 1: // this clock is behind: the counter stands as at its start
		into, early = 0, p.scaleMs-into
	case d == -1:
		count, prev = 0, count
	case d < -1:
		return 0
	}
	rest := p.scaleMs - into
	switch {
	case count > 0 && p.alg == SlidingWindow:
		return early + rest + p.thinned(count, 0)
	case count > 0:
		return early + rest
	case p.alg == SlidingWindow:
		return early + max(p.thinned(prev, 0), into) - into
	}
	return 0
}

func (p *Policy) slide(prev, into uint32) uint32 {
	if p.alg != SlidingWindow {
		return 0
	}
	return p.Carried(prev, into)
}

// Decide is the rule itself: what a request of a cost meets on a counter kept
// under this policy's shape, and the counter after it. Stores that hold State as
// atomics come to the same answers in another way.
func (p *Policy) Decide(s State, cost uint32, now Instant) (_ State, d Decision) {
	if p.alg == TokenBucket {
		return p.decideTokens(s, cost, now)
	}
	index, into := p.Window(now)
	at := now
	switch d := int32(uint32(s.Word>>32) - index); {
	case d == 0:
	case d == 1: // this clock is behind by less than a window: never move back
		into, at = 0, p.WindowStart(index+1)
	case d > 1: // it stepped back: the count goes on in the present window
		s.Word = uint64(index)<<32 | uint64(uint32(s.Word))
	case d == -1:
		s = State{uint64(index) << 32, uint32(s.Word)}
	default:
		s = State{Word: uint64(index) << 32}
	}
	count, carried := uint32(s.Word), p.slide(s.Prev, into)
	if cost > p.limit || uint64(count)+uint64(carried)+uint64(cost) > uint64(p.limit) {
		p.RefuseWindow(&d, s.Prev, count, carried, cost, into, at)
		return s, d
	}
	s.Word += uint64(cost)
	p.AdmitWindow(&d, s.Prev, count+cost, carried, into, at)
	return s, d
}

// The answers below are written field by field to where the caller wants them: a Decision that is returned through
// several functions is copied in each, which takes longer than the check.

// RefuseWindow answers a request that found count, and carried of the previous
// window.
func (p *Policy) RefuseWindow(d *Decision, prev, count, carried, cost, into uint32, at Instant) {
	d.Policy, d.At, d.Remaining, d.WaitMs, d.Allowed = p, at, 0, p.scaleMs, false
	if used := uint64(count) + uint64(carried); used < uint64(p.limit) {
		d.Remaining = p.limit - uint32(used)
	}
	switch {
	case cost > p.limit:
	case p.alg == SlidingWindow:
		d.WaitMs = p.WindowWait(prev, count, cost, into)
	default: // as WindowWait, without the call
		d.WaitMs = p.scaleMs - into
	}
}

// AdmitWindow answers a request after which count is reached.
func (p *Policy) AdmitWindow(d *Decision, prev, count, carried, into uint32, at Instant) {
	d.Policy, d.At, d.Remaining, d.WaitMs, d.Allowed = p, at, p.limit-count-carried, p.scaleMs-into, true
	if carried > 0 && d.Remaining == 0 {
		d.WaitMs = p.WindowWait(prev, count, 1, into)
	}
}

// SteppedBack tells that a token bucket is further ahead of now than spending
// could have brought it: the clock stepped back by more than a window. Such a
// bucket counts as exhausted and no more.
func (p *Policy) SteppedBack(tat int64, prev uint32, now Instant) bool {
	return tat-int64(now) > 2*p.toleranceNs+int64(prev)*1e6
}

func (p *Policy) decideTokens(s State, cost uint32, now Instant) (_ State, d Decision) {
	if p.SteppedBack(int64(s.Word), s.Prev, now) {
		s.Word = uint64(int64(now) + p.toleranceNs)
	}
	tat := max(int64(s.Word), int64(now))
	if cost > p.burst {
		return s, Decision{Policy: p, At: now, Remaining: p.Tokens(p.toleranceNs - tat + int64(now)), WaitMs: p.WindowMs()}
	}
	next := tat + p.TokenTime(cost)
	if over := next - int64(now) - p.toleranceNs; over > 0 {
		p.RefuseTokens(&d, tat, over, now)
		return s, d
	}
	s.Word = uint64(next)
	p.AdmitTokens(&d, next, now)
	return s, d
}

// RefuseTokens answers a request that a bucket at tat refuses for another over
// nanoseconds.
func (p *Policy) RefuseTokens(d *Decision, tat, over int64, now Instant) {
	d.Policy, d.At, d.Remaining, d.Allowed = p, now, p.Tokens(p.toleranceNs-tat+int64(now)), false
	d.WaitMs = uint32(min((over+1e6-1)/1e6, 1<<32-1))
}

// AdmitTokens answers a request that moved a bucket to next.
func (p *Policy) AdmitTokens(d *Decision, next int64, now Instant) {
	debt := next - int64(now)
	d.Policy, d.At, d.Remaining, d.Allowed = p, now, p.Tokens(p.toleranceNs-debt), true
	if d.Remaining == 0 {
		debt += p.tokenNs - p.toleranceNs
	}
	d.WaitMs = uint32(max(debt+1e6-1, 0) / 1e6)
}

// Fresh is a counter that nothing was spent on.
func (p *Policy) Fresh(now Instant) State {
	if p.alg == TokenBucket {
		return State{Word: uint64(max(now, 0))}
	}
	index, _ := p.Window(now)
	return State{Word: uint64(index) << 32}
}

// Convert turns a counter that was kept under another shape into one under this
// policy: it starts from the use at this moment, of a token bucket at most a
// full one.
func (p *Policy) Convert(shape uint64, s State, now Instant) State {
	old := FromShape(shape)
	used := old.Used(s, now)
	s = p.Fresh(now)
	if p.alg != TokenBucket {
		s.Word += uint64(used)
	} else if p.limit > 0 {
		s.Word += uint64(p.TokenTime(min(used, p.burst)))
	}
	return s
}

// FromShape rebuilds what a policy's shape tells: enough to read a counter, but
// a window's limit and a bucket's burst are the greatest possible ones.
func FromShape(shape uint64) Policy {
	p := Policy{
		alg: Algorithm(shape >> 57 & 3), scaleMs: uint32(shape >> 30 & (1<<27 - 1)),
		limit: MaxLimit, shape: shape,
	}
	if p.alg == TokenBucket {
		p.limit = uint32(shape & (1<<30 - 1))
	}
	p.derive()
	return p
}

// FromShapeOf is FromShape with the quota that the policy had: all that a check of
// its counters needs.
func FromShapeOf(shape uint64, quota uint32) Policy {
	p := FromShape(shape)
	switch {
	case p.alg != TokenBucket:
		p.limit = quota
	case quota != p.burst:
		p.burst = quota
		p.derive()
	}
	return p
}

// ValidShape tells whether a number from elsewhere is the shape of some policy
// with a limit that is not 0.
func ValidShape(shape uint64) bool {
	alg, scale, rate := Algorithm(shape>>57), shape>>30&(1<<27-1), shape&(1<<30-1)
	if alg > TokenBucket || scale < uint64(MinScale/time.Millisecond) || scale > uint64(MaxScale/time.Millisecond) {
		return false
	}
	if alg == TokenBucket {
		return 0 < rate && rate <= MaxLimit
	}
	return rate == 0
}

// Ends is the moment from which nothing that was spent by now bears on what is
// admitted. Of a token bucket that holds for one no deeper in debt than a full
// burst and what may be booked ahead; of FromShape's it takes the limit for the burst.
func (p *Policy) Ends(now Instant) Instant {
	if p.alg == TokenBucket {
		return now + Instant(p.toleranceNs) + Instant(MaxReserve)
	}
	index, _ := p.Window(now)
	if p.alg == SlidingWindow {
		index++
	}
	return p.WindowStart(index + 1)
}

// Forget takes out of a counter what was spent in the windows until that of a
// moment: a reset at it is heard of now. A token bucket, which can't tell, is full.
func (p *Policy) Forget(s State, at, now Instant) State {
	if p.alg == TokenBucket {
		return p.Fresh(now)
	}
	win, _ := p.Window(at)
	switch d := int32(uint32(s.Word>>32) - win); {
	case d <= 0:
		return State{Word: s.Word >> 32 << 32}
	case d == 1:
		s.Prev = 0
	}
	return s
}

// Over tells whether a counter kept under a shape has nothing left to remember.
func Over(shape, word uint64, now Instant) bool {
	alg := Algorithm(shape >> 57 & 3)
	if alg == TokenBucket {
		return int64(word) <= int64(now)
	}
	last := word>>32 + 1
	if alg == SlidingWindow {
		last++
	}
	return last*(shape>>30&(1<<27-1)) <= uint64(max(now, 0))/1e6
}
