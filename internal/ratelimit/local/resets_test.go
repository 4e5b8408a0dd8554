package local

import (
	"testing"
	"time"

	"converger/internal/ratelimit"
)

// Resets are versions: of several of a key the latest holds, however often and in whatever order they come. They end with
// what they concern, and there is a bound on them.
func TestResets(t *testing.T) {
	t.Parallel()
	s := newStore(t, Config{})
	now := benchNow
	key := func(n uint64) ratelimit.Key { return ratelimit.Key{Hi: 77, Lo: n} }
	reset := func(n uint64, at, until time.Duration) Reset { return Reset{key(n), now.Add(at), now.Add(until)} }
	for _, test := range []struct {
		r    Reset
		news bool
	}{
		{reset(1, 0, time.Minute), true},
		{reset(1, 0, time.Minute), false},
		{reset(1, -time.Second, time.Hour), false},
		{reset(1, time.Second, time.Second+1), true},
		{reset(2, -time.Minute, -time.Second), false}, // ended
	} {
		if got := s.TakeReset(test.r, now); got != test.news {
			t.Errorf("%+v is news: %v", test.r, got)
		}
	}
	if got := s.ResetOf(key(1), now); got != reset(1, time.Second, time.Second+1) {
		t.Errorf("the last one is %+v", got)
	}
	later := now.Add(2 * time.Second)
	if got, all := s.ResetOf(key(1), later), s.Resets(later); got != (Reset{}) || len(all) != 0 || s.resets.n.Load() != 0 {
		t.Errorf("after its end: %+v, %+v", got, all)
	}
	for n := range uint64(MaxResets + 100) {
		s.TakeReset(reset(n, 0, time.Minute+time.Duration(n)), now)
	}
	if got := len(s.Resets(now)); got != MaxResets {
		t.Errorf("%d resets are remembered, want %d", got, MaxResets)
	}
	if s.ResetOf(key(99), now) != (Reset{}) || s.ResetOf(key(100), now) == (Reset{}) {
		t.Error("not the ones that end first were forgotten")
	}
}

// A reset lasts as long as what it takes away could matter, under its policy or that of the counter.
func TestResetsLast(t *testing.T) {
	t.Parallel()
	hour := newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Hour})
	bucket := newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 1000})
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 77, Lo: 3}, Policy: hour}
	s := newStore(t, Config{})
	s.Take(t.Context(), benchNow, it)
	for _, p := range []*ratelimit.Policy{nil, bucket, hour} {
		it.Policy = p
		r := s.NewReset(benchNow, it)
		if !r.Valid() || r.Until < hour.Ends(benchNow) {
			t.Errorf("%+v ends before the window of the counter", r)
		}
	}
	it.Policy = bucket
	for range 1000 {
		s.Take(t.Context(), benchNow, it)
	}
	it.Policy = nil
	if r := s.NewReset(benchNow, it); r.Until < benchNow.Add(99*time.Second) {
		t.Errorf("%+v ends before the bucket is full", r)
	}
	it.Policy = bucket
	if r := newStore(t, Config{}).NewReset(benchNow, it); r.Until < benchNow.Add(99*time.Second) {
		t.Errorf("%+v ends before the bucket is full", r)
	}
}

// Who hears of a reset late keeps what was spent in windows that began after it.
func TestLateReset(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms[:2] {
		p := newPolicy(t, ratelimit.Rule{Limit: 100, Scale: 10 * time.Second, Algorithm: a})
		for _, test := range []struct {
			again time.Duration // after the reset when it is spent on again
			want  uint32
		}{{3 * time.Second, 0}, {10 * time.Second, 30}, {20 * time.Second, 30}} {
			s := newStore(t, Config{})
			it := ratelimit.Item{Key: ratelimit.Key{Hi: 77, Lo: 3}, Policy: p}
			index, _ := p.Window(benchNow)
			begin := p.WindowStart(index)
			it.Cost = 40
			s.Take(t.Context(), begin, it)
			now := begin.Add(test.again)
			it.Cost = 30
			s.Take(t.Context(), now, it)
			s.TakeReset(Reset{it.Key, begin + 1, begin.Add(time.Minute)}, now)
			if u, _ := s.Peek(t.Context(), now, it); u.Used != test.want {
				t.Errorf("%v, %v after a reset: %d used, want %d", a, test.again, u.Used, test.want)
			}
		}
	}
}
