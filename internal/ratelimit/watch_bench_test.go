package ratelimit

import (
	"context"
	"testing"
	"time"
)

// constant is a Store that costs next to nothing.
type constant struct {
	Store
	d Decision
}

func (constant) Backend(Bucket) string { return "none" }

func (c constant) Take(context.Context, Instant, Item) Decision { return c.d }

// BenchmarkObservers tells what the observers add to a check: the best of rounds with and without them, in turn, on one
// hot key at five million checks a second.
func BenchmarkObservers(b *testing.B) {
	for _, allowed := range []bool{true, false} {
		name := map[bool]string{true: "allow", false: "deny"}[allowed]
		b.Run(name, func(b *testing.B) {
			p, err := NewPolicy(ActivityCreate, ActivityCreate.Info().Default)
			if err != nil {
				b.Fatal(err)
			}
			l, err := New(Config{Store: constant{d: Decision{Policy: p, Allowed: allowed}}})
			if err != nil {
				b.Fatal(err)
			}
			ctx, it, now, step := b.Context(), Item{Key: Key{7, 9}, Policy: p}, InstantOf(time.Now()), Instant(200)
			const round = 10_000 // shorter than a turn of the scheduler: on a busy machine some are undisturbed
			best := [2]time.Duration{time.Hour, time.Hour}
			b.ReportAllocs()
			for b.Loop() {
				for i, check := range []func(context.Context, Instant, Item) Decision{l.unobserved, l.Check} {
					start := time.Now()
					for range round {
						check(ctx, now, it)
						now += step
					}
					best[i] = min(best[i], time.Since(start))
				}
			}
			b.ReportMetric(float64(best[0].Nanoseconds())/round, "without-ns")
			b.ReportMetric(float64(best[1].Nanoseconds())/round, "with-ns")
			b.ReportMetric(float64((best[1]-best[0]).Nanoseconds())/round, "added-ns")
		})
	}
}

// unobserved is Check without the observers.
func (l *Limiter) unobserved(ctx context.Context, now Instant, it Item) Decision {
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
	l.counted(&it, &d, now)
	return d
}

func (l *Limiter) counted(it *Item, d *Decision, now Instant) {
	o := allowed
	if !d.Allowed {
		o = refused
	}
	if it.Policy.count {
		if d.Policy = nil; !d.Allowed {
			o = counted
			d.Allowed, d.Counted, d.WaitMs = true, true, 0
		}
	}
	l.meter.add(it.Policy.bucket, o, now)
}
