package redis

import (
	"sync/atomic"

	"converger/internal/ratelimit"
)

// The breaker opens when more than tripPercent of the calls of the last tripSeconds have failed, if there were
// tripCalls at least.
const (
	tripSeconds = 10
	tripPercent = 1
	tripCalls   = 20
)

type breakerState int32

const (
	closed   breakerState = iota // checks ask Redis
	halfOpen                     // probes were answered; what was counted meanwhile is brought there
	open                         // checks don't ask
)

func (s breakerState) String() string { return [...]string{"closed", "half_open", "open"}[s] }

// breaker counts calls and failures by the second. Checks read one word of it; it has no lock. Two calls that begin a
// second's count at the same time may lose a few.
type breaker struct {
	state   atomic.Int32
	seconds [tripSeconds]struct{ second, calls, failed atomic.Int64 }
	tripped chan struct{} // holds one token when the breaker has opened
}

func newBreaker() *breaker { return &breaker{tripped: make(chan struct{}, 1)} }

func (b *breaker) is(s breakerState) bool { return breakerState(b.state.Load()) == s }

// report counts a call. It reports whether the breaker opened by it.
func (b *breaker) report(now ratelimit.Instant, failed bool) bool {
	second := int64(now) / 1e9
	s := &b.seconds[second%tripSeconds]
	if was := s.second.Load(); was != second && s.second.CompareAndSwap(was, second) {
		s.calls.Store(0)
		s.failed.Store(0)
	}
	s.calls.Add(1)
	if !failed {
		return false
	}
	s.failed.Add(1)
	var calls, bad int64
	for i := range b.seconds {
		if s := &b.seconds[i]; second-s.second.Load() < tripSeconds {
			calls += s.calls.Load()
			bad += s.failed.Load()
		}
	}
	if calls < tripCalls || bad*100 <= calls*tripPercent || !b.state.CompareAndSwap(int32(closed), int32(open)) {
		return false
	}
	select {
	case b.tripped <- struct{}{}:
	default:
	}
	return true
}

// set moves on to a state; closed begins a new count.
func (b *breaker) set(s breakerState) {
	if s == closed {
		for i := range b.seconds {
			b.seconds[i].second.Store(0)
		}
	}
	b.state.Store(int32(s))
}
