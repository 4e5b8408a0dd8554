package local

import (
	"context"
	"sync"
	"sync/atomic"

	"converger/internal/ratelimit"
)

// MaxResets bounds the resets that a store remembers. Beyond it the one that ends
// first is forgotten: what a node that has not heard of it counts may come back.
const MaxResets = 16_384

// Reset says that nothing counts any more of what was spent on a key before a moment.
// It is a version of the key's counters: of two the later one holds, whatever the
// order and however often they come, and what somebody has counted who knows only
// of an earlier one is out of date.
type Reset struct {
	Key ratelimit.Key
	At  ratelimit.Instant
	// Until is when nothing that was spent by then bears on what is admitted.
	Until ratelimit.Instant
}

// Valid tells whether a reset that came from elsewhere can be one.
func (r Reset) Valid() bool {
	return r.Key.Hi > overflowHi && r.At > 0 && r.At < r.Until && r.Until-r.At <= longest
}

// longest bounds how long a reset matters. A token bucket may be in debt for longer, when several nodes spent its burst
// at once; what is left of that then comes back.
const longest = ratelimit.Instant(ratelimit.MaxRefill + 2*ratelimit.MaxScale)

// resets are those that a store remembers. Checks never look at them.
type resets struct {
	n  atomic.Int64 // len(m): mostly there are none
	mu sync.Mutex
	m  map[ratelimit.Key]Reset
}

// add reports whether the reset is news.
func (s *resets) add(r Reset, now ratelimit.Instant) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if r.Until <= now || s.m[r.Key].At >= r.At {
		return false
	}
	if s.m == nil {
		s.m = map[ratelimit.Key]Reset{}
	}
	s.m[r.Key] = r
	s.drop(now)
	return true
}

// drop forgets what has ended and, if there are too many, what ends first. mu is held.
func (s *resets) drop(now ratelimit.Instant) {
	var first Reset
	if len(s.m) > MaxResets {
		for k, r := range s.m {
			if r.Until <= now {
				delete(s.m, k)
			} else if first.Until == 0 || r.Until < first.Until {
				first = r
			}
		}
	}
	if len(s.m) > MaxResets {
		delete(s.m, first.Key)
	}
	s.n.Store(int64(len(s.m)))
}

// ResetOf is the last reset of a key that may still matter; the zero Reset if there is none.
func (s *Store) ResetOf(k ratelimit.Key, now ratelimit.Instant) Reset {
	if s.resets.n.Load() == 0 {
		return Reset{}
	}
	s.resets.mu.Lock()
	defer s.resets.mu.Unlock()
	if r := s.resets.m[k]; r.Until > now {
		return r
	}
	return Reset{}
}

// Resets are all that may still matter, in no order.
func (s *Store) Resets(now ratelimit.Instant) []Reset {
	if s.resets.n.Load() == 0 {
		return nil
	}
	s.resets.mu.Lock()
	defer s.resets.mu.Unlock()
	all := make([]Reset, 0, len(s.resets.m))
	for k, r := range s.resets.m {
		if r.Until <= now {
			delete(s.resets.m, k)
			continue
		}
		all = append(all, r)
	}
	s.resets.n.Store(int64(len(s.resets.m)))
	return all
}

// NewReset is a reset of an item at a moment. It matters as long as anything that this
// node knows to be spent on it, or its policy if it has one.
func (s *Store) NewReset(now ratelimit.Instant, it ratelimit.Item) Reset {
	r := Reset{Key: it.Key, At: max(now, 1)}
	r.Until = r.At + 1
	if it.Policy != nil {
		r.Until = max(r.Until, it.Policy.Ends(now))
	}
	if c, ok := s.Counter(it.Key); ok {
		if state, shape := c.Load(); shape != 0 {
			p := ratelimit.FromShape(shape)
			r.Until = max(r.Until, p.Ends(now))
			if p.Algorithm() == ratelimit.TokenBucket {
				r.Until = max(r.Until, ratelimit.Instant(state.Word))
			}
		}
	}
	r.Until = min(r.Until, r.At+longest)
	return r
}

// Reset implements ratelimit.Store; it never fails. A counter that subjects
// share is not reset: that would give all of them a fresh budget.
func (s *Store) Reset(_ context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	s.TakeReset(s.NewReset(now, it), now)
	return nil
}

// TakeReset forgets what was spent until a reset, unless that has been done before. It
// reports whether it was news.
func (s *Store) TakeReset(reset Reset, now ratelimit.Instant) bool {
	if !s.resets.add(reset, now) {
		return false
	}
	sh := s.shard(reset.Key)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	r := s.lookup(sh, reset.Key)
	if r.sl == nil {
		return true
	}
	p := ratelimit.FromShape(r.sl.shape())
	for {
		was := ratelimit.State{Word: r.word.Load(), Prev: r.prev.Load()}
		is := p.Forget(was, reset.At, now)
		r.prev.Store(is.Prev)
		if r.word.CompareAndSwap(was.Word, is.Word) {
			if link, _ := s.link(r); link != 0 {
				s.peers.Emptied(link, p.Shape(), reset.At)
			}
			return true
		}
	}
}
