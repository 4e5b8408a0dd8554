package local

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/ratelimittest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	ratelimittest.Run(t, func(t *testing.T) ratelimit.Store { return newStore(t, Config{}) })
	ratelimittest.RunBound(t, func(t *testing.T, maxKeys int) ratelimit.Store {
		return newStore(t, Config{MaxKeys: maxKeys})
	})
}

// The store answers as the pure rule does, whatever comes: costs, refunds that
// undo the last spend, changed policies, clocks that step both ways, near the limit
// and far from it.
func TestStoreEqualsRule(t *testing.T) {
	t.Parallel()
	h := newHasher(t)
	rapid.Check(t, func(rt *rapid.T) {
		s := newStore(t, Config{})
		key := h.Tenant(ratelimit.ActivityCreate, tenant(1))
		draw := func() *ratelimit.Policy {
			r := ratelimit.Rule{
				Limit:     rapid.OneOf(rapid.Int64Range(0, 30), rapid.Int64Range(2*slack, 12*slack)).Draw(rt, "limit"),
				Scale:     time.Duration(rapid.Int64Range(1, 3).Draw(rt, "scale")) * time.Second,
				Algorithm: rapid.SampledFrom(algorithms).Draw(rt, "algorithm"),
			}
			p, err := ratelimit.NewPolicy(ratelimit.ActivityCreate, r)
			if err != nil {
				rt.Fatal(err)
			}
			return p
		}
		p := draw()
		now := benchNow
		var state ratelimit.State
		shape := uint64(0)
		for range rapid.IntRange(1, 80).Draw(rt, "steps") {
			gap := rapid.Int64Range(0, 3e8)
			if rapid.IntRange(0, 15).Draw(rt, "jump") == 0 {
				gap = rapid.Int64Range(-1e11, 1e11)
			}
			now += ratelimit.Instant(gap.Draw(rt, "gap"))
			if rapid.IntRange(0, 9).Draw(rt, "change") == 0 {
				p = draw()
			}
			it := ratelimit.Item{Key: key, Policy: p, Cost: rapid.OneOf(rapid.Uint32Range(1, 12), rapid.Uint32Range(slackCost, 2*slack)).Draw(rt, "cost")}
			noUnit := p.Algorithm() == ratelimit.TokenBucket && p.Limit() == 0
			if shape != 0 && shape != p.Shape() && !noUnit {
				state, shape = p.Convert(shape, state, now), p.Shape()
			}
			if it.Cost > p.Quota() { // refused without a look at the counter
				if s.Take(t.Context(), now, it).Allowed {
					rt.Fatal("an impossible cost was admitted")
				}
				continue
			}
			if shape == 0 {
				state, shape = p.Fresh(now), p.Shape()
			}
			next, want := p.Decide(state, it.Cost, now)
			got := s.Take(t.Context(), now, it)
			if got != want {
				rt.Fatalf("got %+v, want %+v", got, want)
			}
			if got.Allowed && rapid.IntRange(0, 4).Draw(rt, "refund") == 0 {
				s.Refund(t.Context(), got.Booking(0), it)
				next = undone(p, next, it.Cost)
			}
			state = next
		}
	})
}

func undone(p *ratelimit.Policy, s ratelimit.State, cost uint32) ratelimit.State {
	if p.Algorithm() == ratelimit.TokenBucket {
		s.Word -= uint64(p.TokenTime(cost))
	} else {
		s.Word -= uint64(cost)
	}
	return s
}

func TestTakeAllocatesNothing(t *testing.T) {
	h := newHasher(t)
	s := newStore(t, Config{})
	ctx := t.Context()
	for _, a := range algorithms {
		for _, limit := range []int64{1, ratelimit.MaxLimit} {
			p := newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second, Algorithm: a})
			items := []ratelimit.Item{
				{Key: h.Tenant(ratelimit.ActivityCreate, tenant(1)), Policy: p},
				{Key: h.Tenant(ratelimit.ActivityCreate, tenant(2)), Policy: p},
			}
			s.TakeAll(ctx, benchNow, items)
			if n := testing.AllocsPerRun(100, func() {
				s.Take(ctx, benchNow, items[0])
				s.TakeAll(ctx, benchNow, items)
				s.Refund(ctx, ratelimit.Booking{At: benchNow}, items[0])
			}); n != 0 {
				t.Errorf("%v, limit %d: %v allocations", a, limit, n)
			}
		}
	}
}

// Growing, rolling over and spending at once lose and invent nothing.
func TestGrowthKeepsCounts(t *testing.T) {
	t.Parallel()
	const keys, workers, rounds = 1000, 8, 4
	h := newHasher(t)
	for _, a := range algorithms {
		s := newStore(t, Config{})
		p := newPolicy(t, ratelimit.Rule{Limit: workers*rounds - 5, Scale: time.Minute, Algorithm: a})
		var admitted [keys]atomic.Int32
		var wg sync.WaitGroup
		for w := range workers {
			wg.Go(func() {
				for range rounds {
					for n := range keys {
						n = (n*7 + w*911) % keys
						if s.Take(t.Context(), benchNow, ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(n)), Policy: p}).Allowed {
							admitted[n].Add(1)
						}
					}
				}
			})
		}
		wg.Wait()
		for n := range keys {
			if got := admitted[n].Load(); got != workers*rounds-5 {
				t.Fatalf("%v: key %d admitted %d, want %d", a, n, got, workers*rounds-5)
			}
		}
		if s.Keys() != keys {
			t.Errorf("%v: %d keys held, want %d", a, s.Keys(), keys)
		}
	}
}

// Callers whose clock readings differ by a little meet around a window's edge:
// what the counter holds in the end is what was admitted in its window.
func TestWindowEdgeUnderParallelCallers(t *testing.T) {
	t.Parallel()
	const workers, requests = 4, 2000
	h := newHasher(t)
	for _, a := range algorithms[:2] {
		for _, limit := range []int64{100, 100_000} { // near the limit, and far from it
			p := newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second, Algorithm: a})
			edge := ratelimit.Instant(1_800_000_000 * time.Second)
			last, _ := p.Window(edge)
			for range 10 {
				s := newStore(t, Config{})
				it := ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(1)), Policy: p}
				var before, after atomic.Int64
				var wg sync.WaitGroup
				begin := make(chan struct{})
				for w := range workers {
					wg.Go(func() {
						<-begin
						for n := range requests {
							// The edge comes and, for the preempted, goes.
							now := edge.Add(time.Duration(n-requests/2-n%7*w) * time.Microsecond)
							d := s.Take(t.Context(), now, it)
							switch win, _ := p.Window(d.At); {
							case !d.Allowed:
							case win == last:
								after.Add(1)
							default:
								before.Add(1)
							}
						}
					})
				}
				close(begin)
				wg.Wait()
				u, err := s.Peek(t.Context(), edge, it)
				if err != nil {
					t.Fatal(err)
				}
				carried := int64(0)
				if a == ratelimit.SlidingWindow {
					carried = int64(p.Carried(uint32(before.Load()), 0))
				}
				if before.Load() > limit || after.Load() > limit || int64(u.Used)-carried != after.Load() {
					t.Fatalf("%v of %d: %d admitted before the edge, %d after, %d counted",
						a, limit, before.Load(), after.Load(), int64(u.Used)-carried)
				}
			}
		}
	}
}

// Callers who add without looking stop at the limit all the same, window after window: nobody
// is admitted beyond it, nobody refused before, and the count is what was admitted.
func TestBlindAdditionsKeepTheLimit(t *testing.T) {
	t.Parallel()
	const workers, windows, limit = 4, 3, 6*slack + 5
	h := newHasher(t)
	for _, a := range algorithms[:2] {
		p := newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second, Algorithm: a})
		s := newStore(t, Config{})
		it := ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(1)), Policy: p}
		for n := range windows {
			now := benchNow.Add(time.Duration(2*n) * time.Second) // what a sliding window carries is gone
			if n > 0 {
				s.Take(t.Context(), now, it)
				if form := s.lookup(s.shard(it.Key), it.Key).sl.form.Load(); form == p.Shape() {
					t.Fatalf("%v: no hint far from the limit", a)
				}
				s.Refund(t.Context(), ratelimit.Booking{At: now}, it)
			}
			var admitted atomic.Int64
			var wg sync.WaitGroup
			for range workers {
				wg.Go(func() {
					for s.Take(t.Context(), now, it).Allowed {
						admitted.Add(1)
					}
				})
			}
			wg.Wait()
			u, err := s.Peek(t.Context(), now, it)
			if err != nil || admitted.Load() != limit || u.Used != limit {
				t.Fatalf("%v, window %d: %d admitted of %d, %d counted (%v)", a, n, admitted.Load(), limit, u.Used, err)
			}
			if form := s.lookup(s.shard(it.Key), it.Key).sl.form.Load(); form != p.Shape() {
				t.Fatalf("%v: a hint at the limit", a)
			}
		}
	}
}

// A table that grows under a hot key loses none of its spends.
func TestGrowthUnderAHotKey(t *testing.T) {
	t.Parallel()
	h := newHasher(t)
	for _, a := range algorithms {
		p := newPolicy(t, ratelimit.Rule{Limit: 1_000_000, Scale: time.Hour, Algorithm: a})
		for range 5 {
			s := newStore(t, Config{MaxKeys: 1500}) // one shard
			hot := ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(0)), Policy: p}
			var wg sync.WaitGroup
			var grown atomic.Bool
			admitted := uint32(0)
			running := make(chan struct{})
			wg.Go(func() {
				for !grown.Load() {
					if s.Take(t.Context(), benchNow, hot).Allowed {
						if admitted++; admitted == 1000 {
							close(running)
						}
					}
				}
			})
			<-running
			for n := range 1400 {
				s.Take(t.Context(), benchNow, ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(n+1)), Policy: p})
			}
			grown.Store(true)
			wg.Wait()
			if u, err := s.Peek(t.Context(), benchNow, hot); err != nil || u.Used != admitted {
				t.Fatalf("%v: %d admitted, %d counted (%v)", a, admitted, u.Used, err)
			}
		}
	}
}

// Keys that have ended make room for new ones, and the memory stays bounded.
func TestEndedKeysGoFirst(t *testing.T) {
	t.Parallel()
	const maxKeys = 3000
	h := newHasher(t)
	s := newStore(t, Config{MaxKeys: maxKeys})
	p := newPolicy(t, ratelimit.Rule{Limit: 1, Scale: time.Second})
	now := benchNow
	for generation := range 20 {
		for n := range maxKeys {
			k := h.Tenant(ratelimit.ActivityCreate, tenant(generation*maxKeys+n))
			if !s.Take(t.Context(), now, ratelimit.Item{Key: k, Policy: p}).Allowed {
				if n < maxKeys*9/10 { // shards fill unevenly
					t.Fatalf("generation %d: subject %d shares a counter", generation, n)
				}
			}
		}
		if s.Keys() > maxKeys {
			t.Fatalf("%d keys held, at most %d", s.Keys(), maxKeys)
		}
		slots := 0
		for i := range s.shards {
			slots += s.shards[i].tab.Load().len()
		}
		if slots > maxKeys*3/2 {
			t.Fatalf("%d slots for %d keys", slots, maxKeys)
		}
		now = now.Add(3 * time.Second)
	}
}

// A delayed call must not move a counter back where the store can read a clock.
func TestDelayedCallIsNotAStepBack(t *testing.T) {
	t.Parallel()
	h := newHasher(t)
	clock := ratelimit.NewClock()
	for _, a := range algorithms {
		s := newStore(t, Config{Clock: clock})
		it := ratelimit.Item{
			Key:    h.Tenant(ratelimit.ActivityCreate, tenant(1)),
			Policy: newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Hour, Algorithm: a}),
		}
		now := clock.Now()
		for range 10 {
			s.Take(t.Context(), now, it)
		}
		if s.Take(t.Context(), now.Add(-5*time.Hour), it).Allowed {
			t.Errorf("%v: a delayed call was admitted", a)
		}
		if s.Take(t.Context(), now, it).Allowed {
			t.Errorf("%v: a delayed call refilled the budget", a)
		}
	}
}

func TestMemoryPerKey(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("fills a million keys")
	}
	const keys = DefaultMaxKeys
	h := newHasher(t)
	p := newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Hour})
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	s := newStore(t, Config{})
	before := heap()
	for n := range keys {
		s.Take(t.Context(), benchNow, ratelimit.Item{Key: h.Tenant(ratelimit.ActivityCreate, tenant(n)), Policy: p})
	}
	perKey := float64(heap()-before) / float64(s.Keys())
	t.Logf("%d keys, %.1f B a key", s.Keys(), perKey)
	if perKey > 64 || s.Keys() < keys*97/100 {
		t.Errorf("%d keys at %.1f B, want at most 64 B", s.Keys(), perKey)
	}
}

// Five million invented addresses against a bound of 200,000 keys.
func TestInventedSubjects(t *testing.T) { // not parallel: it weighs the heap
	subjects, bound := 5_000_000, 200_000
	if raceEnabled {
		subjects, bound = 100_000, 20_000 // ten times slower each
	}
	ratelimittest.RunInvented(t, subjects, bound, 64, func(t *testing.T, maxKeys int) ratelimit.Store {
		return newStore(t, Config{MaxKeys: maxKeys})
	})
}

func TestNewRefusesNegativeBound(t *testing.T) {
	t.Parallel()
	if _, err := New(Config{MaxKeys: -1}); err == nil {
		t.Error("a negative bound was accepted")
	}
}

// A later item that refuses after all were asked, here because two are one, takes
// the earlier spends back.
func TestTakeAllRollsBack(t *testing.T) {
	t.Parallel()
	h := newHasher(t)
	for _, a := range algorithms {
		s := newStore(t, Config{})
		item := func(n int, limit int64) ratelimit.Item {
			return ratelimit.Item{
				Key:    h.Tenant(ratelimit.ActivityCreate, tenant(n)),
				Policy: newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Minute, Algorithm: a}),
			}
		}
		items := []ratelimit.Item{item(1, 10), item(2, 1), item(2, 1)}
		if d := s.TakeAll(t.Context(), benchNow, items); d.Allowed || d.Item != 2 {
			t.Errorf("%v: %+v", a, d)
		}
		for i, it := range items {
			if u, err := s.Peek(t.Context(), benchNow, it); err != nil || u.Used != 0 {
				t.Errorf("%v: item %d keeps %d (%v)", a, i, u.Used, err)
			}
		}
	}
}
