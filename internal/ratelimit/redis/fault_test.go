package redis

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

// patience is how long a test waits for what has to come.
const patience = 60 * time.Second

func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited for %s", what)
		}
	}
}

// rule is a limit whose window of about a day does not end while a test runs.
func rule(t testing.TB, limit int64, a ratelimit.Algorithm) *ratelimit.Policy {
	t.Helper()
	scale := 24 * time.Hour
	for into := time.Duration(0); into < scale/4 || into > scale*3/4; scale -= time.Minute {
		into = time.Duration(time.Now().UnixNano() % int64(scale))
		if into >= scale/4 && into <= scale*3/4 {
			break
		}
	}
	p, err := ratelimit.NewPolicy(ratelimit.ActivityCreate, ratelimit.Rule{Limit: limit, Scale: scale, Algorithm: a})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// fleet is several nodes that count at one Redis, under load.
type fleet struct {
	stores   []*Store
	admitted atomic.Int64
	refused  []atomic.Int64 // by node, when Redis was asked
	without  []atomic.Int64 // by node, decisions without Redis
	longest  atomic.Int64   // ns
	stop     func()
}

// startFleet has callers at each node take from it until the test ends.
func startFleet(t *testing.T, server *redistest.Server, nodes, callers int, it ratelimit.Item) *fleet {
	t.Helper()
	f := &fleet{refused: make([]atomic.Int64, nodes), without: make([]atomic.Int64, nodes)}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	var wg sync.WaitGroup
	f.stop = func() { cancel(); wg.Wait() }
	t.Cleanup(f.stop)
	for range nodes {
		s := newStore(t, server.URL(), nil)
		t.Cleanup(f.stop) // before the store is closed
		f.stores = append(f.stores, s)
		wg.Go(func() { _ = s.Run(ctx) })
	}
	for _, s := range f.stores {
		eventually(t, "all nodes to know each other", func() bool { return s.Join(ctx) == nil && s.live() == nodes && s.States(0)[0].Nodes == nodes })
	}
	for n, s := range f.stores {
		for range callers {
			wg.Go(func() {
				for ctx.Err() == nil {
					now := s.clock.Now()
					d := s.Take(ctx, now, it)
					f.longest.Store(max(f.longest.Load(), int64(s.clock.Now()-now)))
					switch {
					case d.Policy != it.Policy:
						t.Errorf("no decision: %+v", d)
					case d.Allowed:
						f.admitted.Add(1)
					}
					switch {
					case d.Alone != 0:
						f.without[n].Add(1)
					case !d.Allowed:
						f.refused[n].Add(1)
					}
					time.Sleep(200 * time.Microsecond) // a caller, not a benchmark
				}
			})
		}
	}
	return f
}

// each waits until a counter has grown by n at every node.
func (f *fleet) each(t *testing.T, what string, c []atomic.Int64, n int64) {
	t.Helper()
	for i := range c {
		from := c[i].Load()
		eventually(t, what, func() bool { return c[i].Load() >= from+n })
	}
}

func (f *fleet) within(t *testing.T, limit int64, when string) {
	t.Helper()
	if got := f.admitted.Load(); got > limit {
		t.Errorf("%s: %d of a limit of %d were admitted", when, got, limit)
	}
}

// Whatever happens to Redis under load: every check is decided, soon, and all nodes together admit no more than the limit,
// before, during and after.
func TestOutages(t *testing.T) {
	t.Parallel()
	fixed := []ratelimit.Algorithm{ratelimit.FixedWindow}
	for _, test := range []struct {
		name       string
		breaks     func(*testing.T, *redistest.Server)
		mends      func(*testing.T, *redistest.Server)
		reasons    []string // what fallbacks are counted as before the breaker opens, one of them; on a busy machine calls time out
		algorithms []ratelimit.Algorithm
	}{
		{"killed", func(_ *testing.T, r *redistest.Server) { r.Kill() }, func(t *testing.T, r *redistest.Server) { r.Restart(t) },
			[]string{reasonUnreachable, reasonTimeout}, []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow}},
		{"frozen", func(t *testing.T, r *redistest.Server) { r.Freeze(t) }, func(t *testing.T, r *redistest.Server) { r.Thaw(t) },
			[]string{reasonTimeout}, fixed},
		{"a replica", tell("REPLICAOF 127.0.0.1 1"), tell("REPLICAOF NO ONE"), []string{reasonReadOnly, reasonTimeout}, fixed},
		{"full", tell("CONFIG SET maxmemory 1"), tell("CONFIG SET maxmemory 0"), []string{reasonMemory, reasonTimeout}, fixed},
		{"another password", tell("CONFIG SET requirepass other", "AUTH other", "CLIENT KILL TYPE normal SKIPME yes"),
			tell("AUTH other", "CONFIG SET requirepass \"\""), []string{reasonSignIn, reasonUnreachable, reasonTimeout}, fixed},
	} {
		for _, a := range test.algorithms {
			t.Run(test.name+"/"+a.String(), func(t *testing.T) {
				t.Parallel()
				const limit = 1800
				server := redistest.Start(t)
				it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 7}, Policy: rule(t, limit, a)}
				f := startFleet(t, server, 3, 3, it)
				eventually(t, "the first third to be admitted", func() bool { return f.admitted.Load() >= limit/3 })
				test.breaks(t, server)
				for _, s := range f.stores {
					eventually(t, "the breaker to open", func() bool { return s.breaker.is(open) })
				}
				f.each(t, "decisions without Redis", f.without, 600)
				f.within(t, limit, "without Redis")
				if got := f.admitted.Load(); got < limit/2 { // on a busy machine many calls are in doubt, and count
					t.Errorf("without Redis %d of a limit of %d were admitted: a share was not used", got, limit)
				}
				for i, s := range f.stores {
					if err := s.Degraded(); err == nil || !strings.Contains(err.Error(), "Redis") {
						t.Errorf("node %d calls itself %v", i, err)
					}
					counted := 0
					for _, reason := range test.reasons {
						counted += s.fallbacks(t, reason)
					}
					if counted == 0 {
						var all []string
						for _, reason := range reasons {
							all = append(all, fmt.Sprintf("%s: %d", reason, s.fallbacks(t, reason)))
						}
						t.Errorf("node %d counts no fallback as %v: %v", i, test.reasons, all)
					}
				}
				test.mends(t, server)
				for _, s := range f.stores {
					eventually(t, "the breaker to close", func() bool { return s.breaker.is(closed) && s.Degraded() == nil })
				}
				f.each(t, "refusals by Redis", f.refused, 50)
				f.within(t, limit, "afterwards")
				f.stop()
				// What was admitted without it, and what it lost, is there.
				all := unhurried(t, server.URL(), nil)
				u, err := all.Peek(t.Context(), all.clock.Now(), it)
				if err != nil || int64(u.Used) < f.admitted.Load() {
					t.Errorf("Redis knows of %d of %d (%v)", u.Used, f.admitted.Load(), err)
				}
				t.Logf("%d of %d admitted, longest check %v", f.admitted.Load(), limit, time.Duration(f.longest.Load()))
				if longest := time.Duration(f.longest.Load()); longest > 3*time.Second {
					t.Errorf("a check took %v", longest)
				}
			})
		}
	}
}

// tell sends a server commands.
func tell(commands ...string) func(*testing.T, *redistest.Server) {
	return func(t *testing.T, r *redistest.Server) {
		if got := r.Do(t, commands...); strings.HasPrefix(got, "-") {
			t.Fatal(got)
		}
	}
}

// fallbacks reads the fallbacks counted for a reason.
func (s *Store) fallbacks(t testing.TB, reason string) int {
	t.Helper()
	return int(metricOf(t, s.m.fallen[reason]))
}

// A token bucket that was served without Redis gives no second burst.
func TestOutageOfATokenBucket(t *testing.T) {
	t.Parallel()
	const limit = 1800
	server := redistest.Start(t)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 7}, Policy: rule(t, limit, ratelimit.TokenBucket)}
	began := time.Now()
	f := startFleet(t, server, 3, 3, it)
	eventually(t, "the first third to be admitted", func() bool { return f.admitted.Load() >= limit/3 })
	server.Kill()
	f.each(t, "decisions without Redis", f.without, 600)
	server.Restart(t)
	for _, s := range f.stores {
		eventually(t, "the breaker to close", func() bool { return s.breaker.is(closed) && s.Degraded() == nil })
	}
	f.each(t, "refusals by Redis", f.refused, 50)
	refilled := it.Policy.Tokens(time.Since(began).Nanoseconds()) + 1
	// What a node heard last may be a few tokens old.
	f.within(t, limit+int64(refilled)+limit/100, "in all")
}

// Scripts that are flushed are sent again, and nobody notices.
func TestScriptsFlushed(t *testing.T) {
	t.Parallel()
	const limit = 3000
	server := redistest.Start(t)
	f := startFleet(t, server, 2, 4, ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 7}, Policy: rule(t, limit, ratelimit.FixedWindow)})
	for part := range int64(5) {
		eventually(t, "more admissions", func() bool { return f.admitted.Load() >= limit/6*(part+1) })
		tell("SCRIPT FLUSH")(t, server)
	}
	f.each(t, "refusals", f.refused, 10)
	f.stop()
	for _, s := range f.stores {
		if n := s.fallbacks(t, reasonRefused); n != 0 {
			t.Errorf("%d checks met NOSCRIPT", n)
		}
	}
	f.within(t, limit, "in all")
}

// 400 callers at four nodes get exactly 50 of 50.
func TestExactOverNodes(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	var nodes []*Store
	for range 4 {
		s := unhurried(t, server.URL(), nil)
		nodes = append(nodes, s)
	}
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: uint64(a)}, Policy: rule(t, 50, a)}
		var admitted atomic.Int64
		var wg sync.WaitGroup
		for i := range 400 {
			s := nodes[i%len(nodes)]
			wg.Go(func() {
				if s.Take(t.Context(), s.clock.Now(), it).Allowed {
					admitted.Add(1)
				}
			})
		}
		wg.Wait()
		if got := admitted.Load(); got != 50 {
			t.Errorf("%v: %d of 400 admitted, want 50", a, got)
		}
	}
}

// A node that finds Redis again before another has told it what it admitted meanwhile keeps to its share until then.
func TestReturnBeforeTheOthers(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 7}, Policy: rule(t, 100, ratelimit.FixedWindow)}
	var nodes []*Store
	for range 2 {
		s := unhurried(t, server.URL(), func(c *Config) { c.Nodes = func() int { return 2 } })
		nodes = append(nodes, s)
	}
	take := func(s *Store, n int) (admitted int) {
		for range n {
			if s.Take(t.Context(), s.clock.Now(), it).Allowed {
				admitted++
			}
		}
		return admitted
	}
	total := take(nodes[0], 20) + take(nodes[1], 20)
	for _, s := range nodes {
		s.breaker.set(open)
	}
	total += take(nodes[1], 100)
	if total != 70 {
		t.Fatalf("%d admitted before Redis is back, want 40 and the rest of a share", total)
	}
	nodes[0].recover(t.Context())
	if nodes[0].careful.Load() == 0 {
		t.Fatal("it is not careful")
	}
	nodes[0].careful.Store(int64(nodes[0].clock.Now().Add(time.Hour))) // however long the next calls take
	total += take(nodes[0], 200)
	if total != 100 {
		t.Errorf("%d of 100 admitted when one node has Redis again and the other has not", total)
	}
	nodes[1].recover(t.Context())
	for _, s := range nodes {
		s.careful.Store(0) // as two seconds later
		total += take(s, 100)
	}
	u, err := nodes[0].Peek(t.Context(), nodes[0].clock.Now(), it)
	if total != 100 || err != nil || u.Used != 100 {
		t.Errorf("%d of 100 admitted in all, %d at Redis (%v)", total, u.Used, err)
	}
}

// The worst that uneven load can do: all of it is at one node until Redis dies, and at the others after it, which have not
// asked for the subject and so know nothing of its use. Each gives it a whole share, once: less than twice the limit in
// all. Windows after it, without Redis and with it, keep the limit.
func TestOutageUnderUnevenLoad(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		nodes         int
		limit, before int64 // before of limit are admitted by Redis at the first node
		others        int   // what each other one admits without it
	}{
		{2, 100, 70, 50},
		{3, 99, 99, 33},
	} {
		for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow} {
			t.Run(fmt.Sprintf("%d of %d at one of %d nodes, %v", test.before, test.limit, test.nodes, a), func(t *testing.T) {
				t.Parallel()
				server := redistest.Start(t)
				p, err := ratelimit.NewPolicy(ratelimit.ActivityCreate, ratelimit.Rule{Limit: test.limit, Scale: time.Minute, Algorithm: a})
				if err != nil {
					t.Fatal(err)
				}
				it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 7}, Policy: p}
				now := begin
				var nodes []*Store
				for range test.nodes {
					s := unhurried(t, server.URL(), func(c *Config) {
						c.Nodes = func() int { return test.nodes }
						c.Clock = ratelimit.ClockFrom(func() ratelimit.Instant { return now })
					})
					s.test = true
					nodes = append(nodes, s)
				}
				take := func(s *Store, n int64) (admitted int) {
					for range n {
						if s.Take(t.Context(), now, it).Allowed {
							admitted++
						}
					}
					return admitted
				}
				all := func() (admitted int) {
					for _, s := range nodes {
						admitted += take(s, 3*test.limit)
					}
					return admitted
				}
				total := take(nodes[0], test.before)
				server.Kill()
				for _, s := range nodes {
					s.breaker.set(open)
				}
				if got := take(nodes[0], 3*test.limit); got != max(0, int(test.limit)/test.nodes-int(test.before)) {
					t.Errorf("the node that had admitted %d of %d admits %d more", test.before, test.limit, got)
				}
				for _, s := range nodes[1:] {
					got := take(s, 3*test.limit)
					if got != test.others {
						t.Errorf("a node that knows nothing admits %d, want %d", got, test.others)
					}
					total += got
				}
				if want := int(test.before) + (test.nodes-1)*test.others; total != want || total >= 2*int(test.limit) {
					t.Errorf("%d of %d admitted in the window of the failure, want %d", total, test.limit, want)
				}
				now = now.Add(time.Minute)
				if got := all(); got > int(test.limit) || a == ratelimit.FixedWindow && got != int(test.limit) {
					t.Errorf("%d of %d admitted in the window after it, without Redis", got, test.limit)
				}
				server.Restart(t)
				for _, s := range nodes {
					s.recover(t.Context())
				}
				if got := all(); got != 0 {
					t.Errorf("%d more admitted in that window when Redis is back", got)
				}
				now = now.Add(time.Minute)
				if got := all(); got > int(test.limit) || a == ratelimit.FixedWindow && got != int(test.limit) {
					t.Errorf("%d of %d admitted in the window after that, with Redis", got, test.limit)
				}
			})
		}
	}
}

// A key that Redis loses in a failure comes back by the next call; one that an operator deletes does not.
func TestLostKeysComeBack(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: uint64(a)}, Policy: rule(t, 10, a)}
		one, two := unhurried(t, server.URL(), nil), unhurried(t, server.URL(), nil)
		take := func(s *Store, remaining uint32) {
			t.Helper()
			if d := s.Take(t.Context(), s.clock.Now(), it); !d.Allowed || d.Remaining != remaining || d.Alone != 0 {
				t.Errorf("%v: %+v, want %d remaining", a, d, remaining)
			}
		}
		take(one, 9)
		take(two, 8)
		tell("DEL "+one.key(it.Key))(t, server)
		take(one, 9)
		take(two, 8)
		take(one, 7)
		tell("FLUSHALL")(t, server)
		one.failures.Add(1)
		two.failures.Add(1)
		take(two, 7) // it had heard of two
		take(one, 5) // it had heard of three, and of none of them twice
		take(two, 4)
	}
}
