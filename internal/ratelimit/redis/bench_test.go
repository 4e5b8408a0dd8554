package redis

import (
	"testing"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

var benchAlgorithms = []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket}

// A check at a Redis on this machine, one caller: mostly the way there and back.
func BenchmarkTake(b *testing.B) {
	server := redistest.Start(b)
	for _, a := range benchAlgorithms {
		b.Run(a.String(), func(b *testing.B) {
			s := unhurried(b, server.URL(), nil)
			it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: uint64(a)}, Policy: rule(b, ratelimit.MaxLimit, a)}
			b.ReportAllocs()
			for b.Loop() {
				s.Take(b.Context(), s.clock.Now(), it)
			}
		})
	}
}

// The same by many callers, over the connections that they share.
func BenchmarkTakeParallel(b *testing.B) {
	s := unhurried(b, redistest.Start(b).URL(), nil)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(b, ratelimit.MaxLimit, ratelimit.FixedWindow)}
	b.SetParallelism(16)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s.Take(b.Context(), s.clock.Now(), it)
		}
	})
}

// A check while the breaker is open.
func BenchmarkTakeAlone(b *testing.B) {
	for _, a := range benchAlgorithms {
		b.Run(a.String(), func(b *testing.B) {
			s := newAlone(b, 1000, 3)
			it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(b, ratelimit.MaxLimit, a)}
			now := s.clock.Now()
			b.ReportAllocs()
			for b.Loop() {
				s.Take(b.Context(), now, it)
			}
		})
	}
}

// Without Redis a check allocates nothing; with it about as much as the client's command does.
func TestAllocations(t *testing.T) {
	for _, a := range benchAlgorithms {
		s := newAlone(t, 1000, 3)
		it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(t, ratelimit.MaxLimit, a)}
		now := s.clock.Now()
		if got := testing.AllocsPerRun(100, func() { s.Take(t.Context(), now, it) }); got != 0 {
			t.Errorf("%v: %v allocations without Redis", a, got)
		}
	}
	s := unhurried(t, redistest.Start(t).URL(), nil)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(t, ratelimit.MaxLimit, ratelimit.FixedWindow)}
	if got := testing.AllocsPerRun(100, func() { s.Take(t.Context(), s.clock.Now(), it) }); got > 60 {
		t.Errorf("%v allocations with Redis", got)
	} else {
		t.Logf("%v allocations with Redis", got)
	}
}
