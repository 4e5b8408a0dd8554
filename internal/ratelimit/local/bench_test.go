package local

import (
	"encoding/binary"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"converger/internal/ratelimit"
)

// The clock is read outside the check, as the product does: once a request.
const benchNow = ratelimit.Instant(1_800_000_000_123_456_789)

func newStore(tb testing.TB, c Config) *Store {
	tb.Helper()
	s, err := New(c)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func newHasher(tb testing.TB) ratelimit.Hasher {
	tb.Helper()
	h, err := ratelimit.NewHasher([]byte("a secret for tests only"))
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

func newPolicy(tb testing.TB, r ratelimit.Rule) *ratelimit.Policy {
	tb.Helper()
	p, err := ratelimit.NewPolicy(ratelimit.ActivityCreate, r)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func tenant(n int) (id [16]byte) {
	binary.LittleEndian.PutUint64(id[:], uint64(n))
	return id
}

var algorithms = []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket}

func BenchmarkTake(b *testing.B) {
	h := newHasher(b)
	for _, a := range algorithms {
		for _, c := range []struct {
			name  string
			limit int64
		}{{"allow", ratelimit.MaxLimit}, {"deny", 1}} {
			p := newPolicy(b, ratelimit.Rule{Limit: c.limit, Scale: time.Second, Algorithm: a})
			it := ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(1)), Policy: p}
			b.Run(a.String()+"/"+c.name, func(b *testing.B) {
				s := newStore(b, Config{})
				b.ReportAllocs()
				ctx := b.Context()
				for b.Loop() {
					s.Take(ctx, benchNow, it)
				}
			})
			b.Run(a.String()+"/"+c.name+"/parallel", func(b *testing.B) {
				s := newStore(b, Config{})
				ctx := b.Context()
				b.RunParallel(func(pb *testing.PB) {
					for pb.Next() {
						s.Take(ctx, benchNow, it)
					}
				})
			})
		}
	}
}

func BenchmarkTake100kKeys(b *testing.B) {
	h := newHasher(b)
	p := newPolicy(b, ratelimit.Rule{Limit: 1000, Scale: time.Second})
	keys := make([]ratelimit.Key, 100_000)
	for i := range keys {
		keys[i] = h.Tenant(ratelimit.ActivityCreate, tenant(i))
	}
	b.Run("local", func(b *testing.B) {
		s := newStore(b, Config{})
		ctx, i, now := b.Context(), 0, benchNow
		for b.Loop() {
			s.Take(ctx, now, ratelimit.Item{Key: keys[i], Policy: p})
			now += 100
			if i++; i == len(keys) {
				i = 0
			}
		}
	})
	b.Run("x_time_rate", func(b *testing.B) {
		m := map[ratelimit.Key]*rate.Limiter{}
		var mu sync.Mutex
		i, now := 0, benchNow
		for b.Loop() {
			mu.Lock()
			l := m[keys[i]]
			if l == nil {
				l = rate.NewLimiter(1000, 1000)
				m[keys[i]] = l
			}
			mu.Unlock()
			l.AllowN(now.Time(), 1)
			now += 100
			if i++; i == len(keys) {
				i = 0
			}
		}
	})
}

func BenchmarkXTimeRate(b *testing.B) {
	now := benchNow.Time()
	for _, c := range []struct {
		name  string
		limit rate.Limit
		burst int
	}{{"allow", 1e9, 1e9}, {"deny", 1, 1}} {
		b.Run(c.name, func(b *testing.B) {
			l := rate.NewLimiter(c.limit, c.burst)
			for b.Loop() {
				l.AllowN(now, 1)
			}
		})
		b.Run(c.name+"/parallel", func(b *testing.B) {
			l := rate.NewLimiter(c.limit, c.burst)
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					l.AllowN(now, 1)
				}
			})
		})
	}
}
