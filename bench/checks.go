package main

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-chi/httprate"
	"github.com/puzpuzpuz/xsync/v4"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2"
	"github.com/throttled/throttled/v2/store/memstore"
	"golang.org/x/time/rate"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// contestant is a limiter. take checks the i-th key; now is read outside, once for many checks.
type contestant struct {
	name string
	take func(i int, now time.Time, at ratelimit.Instant) (allowed bool)
}

const (
	nameLocal, nameCluster, nameReference = "local", "cluster", "sethvargo/go-limiter"

	manyKeys = 100_000
	perLook  = 512 // checks between two looks at the clock
)

// load is what a row offers.
type load struct {
	work    string
	keys    int
	allowed bool
	cores   int
	target  float64
	spread  bool // the keys are used at the other nodes too, which report each of them every second
}

var loads = []load{
	{"allow, one hot key, 1 core", 1, true, 1, 0.60, true},
	{"allow, one hot key, 2 cores", 1, true, 2, 0.60, true},
	{"allow, 100,000 keys in turn, 1 core", manyKeys, true, 1, 0.60, false},
	{"allow, 100,000 keys in turn, 1 core, all reported by both peers", manyKeys, true, 1, 0, true},
	{"deny, one hot key, 1 core", 1, false, 1, 0.50, true},
	{"deny, one hot key, 2 cores", 1, false, 2, 0.30, true},
}

func (b *bench) checks(ctx context.Context) error {
	for _, l := range loads {
		if !strings.Contains(l.work, b.load) {
			continue
		}
		if err := b.check(ctx, l); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) check(ctx context.Context, l load) error {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(l.cores))
	clock := newClock()
	contestants, stop, err := l.contestants(ctx, clock)
	if err != nil {
		return err
	}
	defer stop()
	ns := map[string][]float64{}
	for round := range b.rounds + 1 {
		for i := range contestants {
			c := contestants[(i+round)%len(contestants)]
			took, err := l.run(ctx, c, clock, b.slice)
			if err != nil {
				return fmt.Errorf("%s, %s: %w", l.work, c.name, err)
			}
			if round > 0 { // the first fills maps and caches
				ns[c.name] = append(ns[c.name], took)
			}
		}
	}
	line := l.work + ":"
	for _, c := range contestants {
		line += fmt.Sprintf(" %s %.0f", c.name, median(ns[c.name]))
	}
	b.say("%s ns", line)
	for _, name := range []string{nameLocal, nameCluster} {
		q := ratios(ns[name], ns[nameReference])
		target, verdict := fmt.Sprintf("≤ %.2f", l.target), judge(q, l.target, false)
		if l.target == 0 {
			if name == nameLocal {
				continue // it has no peers
			}
			target, verdict = "", "no target of its own"
		}
		b.add(row{
			work: l.work + ", " + name, measured: span(ns[name], "%.0f") + " ns",
			beside: fmt.Sprintf("%s %.0f ns, floor %.0f ns", nameReference, median(ns[nameReference]), median(ns["floor"])),
			ratio:  span(q, "%.2f"), target: target, verdict: verdict,
		})
	}
	return nil
}

// run returns the processor time of a check in nanoseconds, on the thread that checks: what other programs take from it,
// and what the nodes do beside checks (see the part sync), is not in it.
func (l load) run(ctx context.Context, c contestant, clock ratelimit.Clock, d time.Duration) (float64, error) {
	var wg sync.WaitGroup
	var checks, wrong, spent atomic.Int64
	start := time.Now()
	for w := range l.cores {
		wg.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			i, n, bad := w*l.keys/l.cores, int64(0), int64(0)
			began := threadTime()
			for now := start; now.Sub(start) < d; now = time.Now() {
				at := clock.Now()
				for range perLook {
					if c.take(i, now, at) != l.allowed {
						bad++
					}
					if i++; i == l.keys {
						i = 0
					}
				}
				n += perLook
			}
			spent.Add(threadTime() - began)
			checks.Add(n)
			wrong.Add(bad)
		})
	}
	wg.Wait()
	if n := wrong.Load(); n > checks.Load()/20 { // a refused key is admitted at each window's start
		return 0, fmt.Errorf("%d of %d checks had the other answer", n, checks.Load())
	}
	return float64(spent.Load()) / float64(checks.Load()), ctx.Err()
}

// contestants makes them all ready for a load, the cluster with three nodes at work.
func (l load) contestants(ctx context.Context, clock ratelimit.Clock) (all []contestant, stop func(), err error) {
	limit := int64(100)
	if l.allowed {
		limit = ratelimit.MaxLimit
	}
	if l.keys > 1 {
		limit = 10_000_000
	}
	p := policy(limit, time.Second)
	items, names := make([]ratelimit.Item, l.keys), make([]string, l.keys)
	for i := range items {
		items[i], names[i] = ratelimit.Item{Key: key(i + 1), Policy: p}, "tenant-"+strconv.Itoa(i)
	}
	store := func(s ratelimit.Store) func(int, time.Time, ratelimit.Instant) bool {
		return func(i int, _ time.Time, at ratelimit.Instant) bool { return s.Take(ctx, at, items[i]).Allowed }
	}
	alone, err := local.New(local.Config{Clock: clock})
	if err != nil {
		return nil, nil, err
	}
	mesh, err := newMesh(3, clock)
	if err != nil {
		return nil, nil, err
	}
	var loops []func(context.Context)
	for i, m := range mesh {
		loops = append(loops, m.loops()...)
		if i > 0 && l.spread {
			loops = append(loops, func(ctx context.Context) { spendAtPeer(ctx, m, clock, items, limit) })
		}
	}
	interval := time.Second
	if l.allowed { // what it fills up by is too little for a great limit: it must do with its first tokens
		interval = time.Hour
	}
	reference, err := memorystore.New(&memorystore.Config{Tokens: uint64(limit), Interval: interval, SweepInterval: time.Hour, SweepMinTTL: time.Hour, InitialAlloc: l.keys})
	if err != nil {
		return nil, nil, err
	}
	ended := background(ctx, loops...)
	stop = func() {
		ended()
		_ = reference.Close(context.WithoutCancel(ctx))
	}
	gcraStore, err := memstore.NewCtx(2 * l.keys)
	if err != nil {
		return nil, stop, err
	}
	gcra, err := throttled.NewGCRARateLimiterCtx(gcraStore, throttled.RateQuota{MaxRate: throttled.PerSec(int(limit)), MaxBurst: int(min(limit, math.MaxInt32))})
	if err != nil {
		return nil, stop, err
	}
	counter := httprate.NewLocalLimitCounter(time.Second)
	counter.Config(int(limit), time.Second)
	floor := xsync.NewMap[ratelimit.Key, *atomic.Uint64]()
	for _, it := range items {
		floor.Store(it.Key, new(atomic.Uint64))
	}
	all = []contestant{
		{nameLocal, store(alone)},
		{nameCluster, store(mesh[0])},
		{nameReference, func(i int, _ time.Time, _ ratelimit.Instant) bool {
			_, _, _, ok, _ := reference.Take(ctx, names[i]) // fails only when closed
			return ok
		}},
		{"httprate's counter", func(i int, now time.Time, _ ratelimit.Instant) bool {
			window := now.UTC().Truncate(time.Second)
			n, _, _ := counter.Get(names[i], window, window.Add(-time.Second)) // never fails
			if n >= int(limit) {
				return false
			}
			_ = counter.Increment(names[i], window) // never fails
			return true
		}},
		{"throttled", func(i int, _ time.Time, _ ratelimit.Instant) bool {
			limited, _, err := gcra.RateLimitCtx(ctx, names[i], 1)
			return err == nil && !limited || err != nil && l.allowed // two cores on one key: it gives up after some tries
		}},
		{"floor", func(i int, _ time.Time, at ratelimit.Instant) bool {
			c, _ := floor.Load(items[i].Key)
			window := uint64(at) / 1e9 << 32
			for {
				switch w := c.Load(); {
				case w>>32 != window>>32:
					c.CompareAndSwap(w, window)
				case uint32(w) >= uint32(limit):
					return false
				default:
					c.Add(1)
					return true
				}
			}
		}},
	}
	if l.keys == 1 {
		r := rate.NewLimiter(rate.Limit(limit), int(limit))
		all = append(all, contestant{"x/time/rate", func(_ int, now time.Time, _ ratelimit.Instant) bool { return r.AllowN(now, 1) }})
	}
	select { // the peers' first reports
	case <-ctx.Done():
	case <-time.After(300 * time.Millisecond):
	}
	return all, stop, ctx.Err()
}

// spendAtPeer keeps a node's part in the load alive: enough of each key's limit that the others must be told, and never
// so much that it is exhausted by that; of a limit that is to refuse, more than all of it.
func spendAtPeer(ctx context.Context, m *node, clock ratelimit.Clock, items []ratelimit.Item, limit int64) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for n := 0; ; n++ {
		part := items
		if len(items) > 1 { // a twentieth of them at a time: once a second each
			part = items[n%20*len(items)/20 : (n%20+1)*len(items)/20]
		}
		for _, it := range part {
			it.Cost = uint32(max(1, limit/90))
			if limit == 100 {
				it.Cost = 10
			}
			m.Take(ctx, clock.Now(), it)
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}
