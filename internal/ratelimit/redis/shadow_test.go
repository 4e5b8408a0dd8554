package redis

import (
	"context"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/ratelimittest"
)

// alone is a store that never asks Redis: what nodes do without it must keep the same laws.
type alone struct {
	*Store
}

func newAlone(t testing.TB, maxKeys, nodes int) alone {
	s := newStore(t, "redis://127.0.0.1:1", func(c *Config) { c.MaxKeys, c.Nodes = maxKeys, func() int { return nodes } })
	s.test = true
	s.breaker.set(open)
	return alone{s}
}

func (a alone) Peek(_ context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	e, sh := a.shadow.hold(it, now)
	defer sh.mu.Unlock()
	return it.Policy.Usage(e.mine, now), nil
}

func (a alone) Reset(_ context.Context, _ ratelimit.Instant, it ratelimit.Item) error {
	a.shadow.forget(it.Key)
	return nil
}

func TestAloneKeepsTheLaws(t *testing.T) {
	t.Parallel()
	ratelimittest.Run(t, func(t *testing.T) ratelimit.Store { return newAlone(t, 100_000, 1) })
	t.Run("bound", func(t *testing.T) {
		t.Parallel()
		ratelimittest.RunBound(t, func(t *testing.T, maxKeys int) ratelimit.Store { return newAlone(t, maxKeys, 1) })
	})
}

// Invented addresses while Redis is away, by far more than there is room for: about 200 bytes for each that is remembered.
func TestInventedSubjects(t *testing.T) { // not parallel: it weighs the heap
	ratelimittest.RunInvented(t, 100_000, 10_000, 250, func(t *testing.T, maxKeys int) ratelimit.Store { return newAlone(t, maxKeys, 1) })
}

// What a node has used of its share is its own while Redis can't be asked, and nobody's else.
func TestOwnIsOfTheShare(t *testing.T) {
	t.Parallel()
	s := newAlone(t, 1000, 3)
	now := s.clock.Now()
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 7}, Policy: testPolicy(t, 30, ratelimit.FixedWindow)}
	if own, ok := s.Own(now, it); own != 0 || !ok {
		t.Errorf("before anything %d, %t", own, ok)
	}
	for range 12 { // two more than its share
		s.Take(t.Context(), now, it)
	}
	if own, ok := s.Own(now, it); own != 10 || !ok {
		t.Errorf("of a share of 10 %d are used, %t", own, ok)
	}
	if _, ok := s.Own(now, ratelimit.Item{Key: it.Key, Policy: testPolicy(t, 30, ratelimit.TokenBucket)}); ok {
		t.Error("a number of tokens that refill at a share of the rate")
	}
	s.breaker.set(closed)
	if _, ok := s.Own(now, it); ok {
		t.Error("what is counted at Redis is somebody's own")
	}
}

func testPolicy(t testing.TB, limit int64, a ratelimit.Algorithm) *ratelimit.Policy {
	t.Helper()
	p, err := ratelimit.NewPolicy(ratelimit.LoginIP, ratelimit.Rule{Limit: limit, Scale: time.Minute, Algorithm: a})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// What a node may do alone follows from what it was given and what it has heard.
func TestShares(t *testing.T) {
	t.Parallel()
	windows := []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow}
	for _, test := range []struct {
		name              string
		limit             int64
		nodes             int
		own, heard, alone int
	}{
		{"nothing known: a share, rounded up", 100, 3, 0, 0, 34},
		{"a guard of five among many", 5, 20, 0, 0, 1},
		{"what it had counts", 100, 2, 20, 20, 30},
		{"more than its share: nothing", 100, 2, 70, 70, 0},
		{"little of what others had a lot of: a share of the rest", 100, 2, 1, 91, 4},
		{"others had all", 100, 4, 0, 100, 0},
		{"alone in the world", 100, 1, 60, 60, 40},
	} {
		for _, a := range windows {
			s := newShadow(1000)
			it := ratelimit.Item{Key: ratelimit.Key{Hi: 2, Lo: 3}, Policy: testPolicy(t, test.limit, a)}
			index, _ := it.Policy.Window(begin)
			for n := range test.own {
				s.note(it, reply{free: true, now: begin, state: ratelimit.State{Word: uint64(index)<<32 | uint64(n+1)}, born: 1}, 1, test.nodes, &claim{failures: 1})
			}
			if test.heard > 0 {
				s.note(it, reply{now: begin, state: ratelimit.State{Word: uint64(index)<<32 | uint64(test.heard)}, born: 1}, 0, test.nodes, &claim{failures: 1})
			}
			got := 0
			for range 200 {
				if s.spend(it, begin, 0, test.nodes, true).Allowed {
					got++
				}
			}
			if got != test.alone {
				t.Errorf("%s, %v: %d of a limit of %d, want %d", test.name, a, got, test.limit, test.alone)
			}
			// All of it is owed, once, and only as long as its window counts.
			c, ok := s.claim(it, begin, 1)
			if !ok || int(count(c.owed)) != test.alone {
				t.Errorf("%s, %v: owes %d, want %d", test.name, a, count(c.owed), test.alone)
			}
			if test.alone > 0 {
				if _, ok := s.claim(it, begin, 1); ok {
					t.Errorf("%s, %v: two calls tell what is owed", test.name, a)
				}
				s.release(it, begin, &c)
			}
			later := begin.Add(3 * time.Minute)
			if c, ok := s.claim(it, later, 1); !ok || count(c.owed)+c.owed.Prev != 0 {
				t.Errorf("%s, %v: owes %+v after the window", test.name, a, c.owed)
			}
		}
	}
}

// A token bucket alone refills at its share of the rate, and begins no fuller than it was.
func TestShareOfATokenBucket(t *testing.T) {
	t.Parallel()
	s := newShadow(1000)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 2, Lo: 3}, Policy: testPolicy(t, 60, ratelimit.TokenBucket)} // one a second
	spend := func(now ratelimit.Instant) (got int) {
		for s.spend(it, now, 0, 3, true).Allowed {
			got++
		}
		return got
	}
	// 30 of 60 are left at Redis.
	s.note(it, reply{now: begin, state: ratelimit.State{Word: uint64(begin.Add(30 * time.Second))}, born: 1}, 0, 3, &claim{failures: 1})
	if got := spend(begin); got != 10 {
		t.Errorf("%d of 30 tokens for one node of three, want 10", got)
	}
	if got := spend(begin.Add(30 * time.Second)); got != 10 {
		t.Errorf("%d tokens in 30 s at a third of one a second, want 10", got)
	}
	// A node that was given more than its share of the rate is not locked out for longer than a burst takes.
	now := begin.Add(10 * time.Minute)
	for n := range 1000 {
		now = now.Add(time.Second)
		s.note(it, reply{free: true, now: now, state: ratelimit.State{Word: uint64(now.Add(time.Duration(n%2) * time.Second))}, born: 1}, 1, 3, &claim{failures: 1})
	}
	if d := s.spend(it, now, 0, 3, true); d.Allowed || d.WaitMs > 3000 {
		t.Errorf("a node beyond its share: %+v", d)
	}
}

// What is given back finds where it was booked.
func TestRefundWithoutRedis(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		s := newShadow(1000)
		it := ratelimit.Item{Key: ratelimit.Key{Hi: 2, Lo: 3}, Policy: testPolicy(t, 10, a)}
		for range 3 {
			s.spend(it, begin, 0, 2, true)
		}
		if !s.giveBack(it, begin, 2, bookedHere) {
			t.Errorf("%v: what is owed was to be given back at Redis", a)
		}
		c, _ := s.claim(it, begin, 1)
		if count(c.owed) != 2 {
			t.Errorf("%v: %d owed after three spends and a refund", a, count(c.owed))
		}
		if s.giveBack(it, begin, 2, bookedHere) {
			t.Errorf("%v: what Redis was told was not to be given back there", a)
		}
		got := 0
		for s.spend(it, begin, 0, 2, true).Allowed {
			got++
		}
		if got != 4 { // five are its share, one is spent
			t.Errorf("%v: %d admitted after two refunds of three, want 4", a, got)
		}
	}
}

// What has ended is dropped by the walk that looks for what Redis must be told; what is owed or still counts stays.
func TestShadowDropsWhatHasEnded(t *testing.T) {
	t.Parallel()
	s := newShadow(1000)
	walk := func(now ratelimit.Instant) {
		for shard := range shadowShards {
			s.unsettled(shard, now, 0, false)
		}
	}
	p := testPolicy(t, 10, ratelimit.FixedWindow)
	for n := range uint64(100) {
		s.spend(ratelimit.Item{Key: ratelimit.Key{Hi: 2, Lo: n}, Policy: p}, begin, 0, 1, false)
	}
	owed := ratelimit.Item{Key: ratelimit.Key{Hi: 2, Lo: 1000}, Policy: p}
	s.spend(owed, begin, 0, 1, true)
	if walk(begin); s.keys() != 101 {
		t.Errorf("%d entries within the window, want 101", s.keys())
	}
	if walk(begin.Add(2 * time.Hour)); s.keys() != 1 {
		t.Errorf("%d entries long after it, want that of the debt", s.keys())
	}
}

// A full shadow says so, as a full store does: at once, and for ten seconds after.
func TestOverflowIsTold(t *testing.T) {
	t.Parallel()
	a := newAlone(t, shadowShards, 1)
	p := testPolicy(t, 10, ratelimit.FixedWindow)
	tells := func(now ratelimit.Instant, keys int, overflowing bool) {
		t.Helper()
		if st := a.States(now)[0]; st.Keys < keys || st.MaxKeys != shadowShards || st.Overflowing != overflowing {
			t.Errorf("%+v", st)
		}
	}
	tells(begin, 0, false)
	a.Take(t.Context(), begin, ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: p})
	tells(begin, 1, false)
	for n := range uint64(2 * shadowShards) {
		a.Take(t.Context(), begin, ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: n}, Policy: p})
	}
	tells(begin, shadowShards, true)
	if got := a.shadow.overflowed.Load(); got != shadowShards {
		t.Errorf("%d checks were decided by shared counters, want %d", got, shadowShards)
	}
	tells(begin.Add(9*time.Second), shadowShards, true)
	tells(begin.Add(11*time.Second), shadowShards, false)
}
