package cluster

import (
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// The cost of a check with three live nodes that report the key, beside that of a
// node alone, in one run: compare the two.
func BenchmarkTake(b *testing.B) {
	for _, a := range algorithms {
		for _, c := range []struct {
			name  string
			limit int64
		}{{"allow", ratelimit.MaxLimit}, {"deny", 100}} {
			p := newPolicy(b, ratelimit.Rule{Limit: c.limit, Scale: time.Second, Algorithm: a})
			it := item(p, 1)
			alone, err := local.New(local.Config{})
			if err != nil {
				b.Fatal(err)
			}
			s := newSim(b, 4, conditions{latency: lan})
			s.offer(it, even(min(10, 1e4/float64(c.limit))), 1)
			for name, store := range map[string]ratelimit.Store{"local": alone, "cluster": s.nodes[0].Store} {
				b.Run(a.String()+"/"+c.name+"/"+name, func(b *testing.B) {
					b.ReportAllocs()
					ctx, now := b.Context(), s.now
					for b.Loop() {
						store.Take(ctx, now, it)
						now += 100
					}
				})
				b.Run(a.String()+"/"+c.name+"/"+name+"/parallel", func(b *testing.B) {
					ctx, start := b.Context(), s.now
					b.RunParallel(func(pb *testing.PB) {
						now := start
						for pb.Next() {
							store.Take(ctx, now, it)
							now += 100
						}
					})
				})
			}
		}
	}
}

func BenchmarkTake100kKeys(b *testing.B) {
	p := newPolicy(b, ratelimit.Rule{Limit: 1000, Scale: time.Second})
	items := make([]ratelimit.Item, 100_000)
	for i := range items {
		items[i] = item(p, uint64(i+1))
	}
	alone, err := local.New(local.Config{})
	if err != nil {
		b.Fatal(err)
	}
	s := newSim(b, 4, conditions{latency: lan})
	n := uint64(0)
	s.run(time.Second, func(node *node, now ratelimit.Instant) {
		for range 10 {
			node.Take(b.Context(), now, items[n%uint64(len(items))])
			n++
		}
	})
	for name, store := range map[string]ratelimit.Store{"local": alone, "cluster": s.nodes[0].Store} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			ctx, i, now := b.Context(), 0, s.now
			for b.Loop() {
				store.Take(ctx, now, items[i])
				now += 100
				if i++; i == len(items) {
					i = 0
				}
			}
		})
	}
}

// A round of regular reports over 100,000 keys of which a tenth is worth telling.
func BenchmarkTick(b *testing.B) {
	p := newPolicy(b, ratelimit.Rule{Limit: 1000, Scale: time.Second})
	s := newSim(b, 3, conditions{latency: lan})
	n := s.nodes[0]
	now := s.now
	b.ReportAllocs()
	for b.Loop() {
		b.StopTimer()
		for i := range 100_000 {
			it := item(p, uint64(i+1))
			if it.Cost = 1; i%10 == 0 {
				it.Cost = 20
			}
			n.Take(b.Context(), now, it)
		}
		s.mail = s.mail[:0]
		b.StartTimer()
		now = now.Add(DefaultSyncInterval)
		n.poll(now)
	}
}
