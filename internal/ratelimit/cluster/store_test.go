package cluster

import (
	"bytes"
	"context"
	"runtime"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
	"converger/internal/ratelimit/ratelimittest"
)

// mesh connects stores in real time: what one broadcasts the others have received
// when Broadcast returns. It has no goroutines.
type mesh struct {
	mu    sync.Mutex
	nodes []*meshNode
}

type meshNode struct {
	*Store
	mesh *mesh
	id   cluster.ID
	view *cluster.View
}

func newMesh(tb testing.TB, nodes int, c Config) []*meshNode {
	tb.Helper()
	m := &mesh{}
	for i := range nodes {
		n := &meshNode{mesh: m, id: cluster.ID(i + 1), view: &cluster.View{Visible: nodes, Alive: nodes}}
		for j := range nodes {
			if j != i {
				n.view.Peers = append(n.view.Peers, cluster.Peer{ID: cluster.ID(j + 1), Standing: cluster.Visible, Latency: time.Millisecond, Session: 1})
			}
		}
		c.Network = n
		if c.Clock.IsZero() {
			c.Clock = ratelimit.NewClock()
		}
		var err error
		if n.Store, err = New(c); err != nil {
			tb.Fatal(err)
		}
		m.nodes = append(m.nodes, n)
	}
	for _, n := range m.nodes {
		n.look(c.Clock.Now())
	}
	return m.nodes
}

func (n *meshNode) ID() cluster.ID              { return n.id }
func (n *meshNode) View() *cluster.View         { return n.view }
func (n *meshNode) Flush(context.Context) error { return nil }

func (n *meshNode) Broadcast(_ cluster.Topic, body []byte) int {
	for _, o := range n.mesh.nodes {
		if o != n {
			n.mesh.mu.Lock() // messages of one peer come one at a time
			o.Handler().Receive(n.id, cluster.Message{Body: body})
			n.mesh.mu.Unlock()
		}
	}
	return len(n.mesh.nodes) - 1
}

func (n *meshNode) Send(to cluster.ID, _ cluster.Topic, body []byte) bool {
	n.mesh.nodes[to-1].Handler().Receive(n.id, cluster.Message{Body: body})
	return true
}

func (n *meshNode) Fetch(ctx context.Context, from cluster.ID, _ cluster.Topic, each func([]byte) error) error {
	return n.mesh.nodes[from-1].Handler().State(ctx, n.id, each)
}

func (n *meshNode) Call(ctx context.Context, to cluster.ID, _ cluster.Topic, request []byte) ([]byte, error) {
	return n.mesh.nodes[to-1].Handler().Answer(ctx, n.id, request)
}

// Alone, and as one of three of which the others are idle, a node keeps every law
// of a store on one machine.
func TestConformance(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{1, 3} {
		t.Run(map[int]string{1: "alone", 3: "of three"}[nodes], func(t *testing.T) {
			t.Parallel()
			newStore := func(t *testing.T, maxKeys int) ratelimit.Store {
				// The clock is behind the times that are passed in, so that those count.
				clock := ratelimit.ClockFrom(func() ratelimit.Instant { return 1 })
				return newMesh(t, nodes, Config{MaxKeys: maxKeys, Clock: clock})[0].Store
			}
			ratelimittest.Run(t, func(t *testing.T) ratelimit.Store { return newStore(t, 0) })
			ratelimittest.RunBound(t, newStore)
		})
	}
}

var algorithms = []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket}

func used(tb testing.TB, s ratelimit.Store, now ratelimit.Instant, it ratelimit.Item) int {
	tb.Helper()
	u, err := s.Peek(tb.Context(), now, it)
	if err != nil {
		tb.Fatal(err)
	}
	return int(u.Used)
}

func spend(tb testing.TB, s ratelimit.Store, now ratelimit.Instant, it ratelimit.Item, n int) int {
	tb.Helper()
	admitted := 0
	for range n {
		if s.Take(tb.Context(), now, it).Allowed {
			admitted++
		}
	}
	return admitted
}

// On the path of a check nothing is allocated, with live peers too.
func TestTakeAllocatesNothing(t *testing.T) {
	for _, a := range algorithms {
		for _, limit := range []int64{1, 1000, ratelimit.MaxLimit} {
			s := newSim(t, 3, conditions{latency: lan})
			it := item(newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second, Algorithm: a}), 1)
			s.offer(it, even(min(10, 1e4/float64(limit))), 1)
			items := []ratelimit.Item{it, item(it.Policy, 2)}
			n := s.nodes[0]
			n.TakeAll(t.Context(), n.clock.Now(), items)
			if got := testing.AllocsPerRun(2000, func() {
				s.now = s.now.Add(100 * time.Microsecond) // other milliseconds: the headroom is computed anew
				n.Take(t.Context(), s.now, it)
				n.TakeAll(t.Context(), s.now, items)
				n.Refund(t.Context(), ratelimit.Booking{At: s.now}, it)
			}); got != 0 {
				t.Errorf("%v, limit %d: %v allocations", a, limit, got)
			}
		}
	}
}

// As little is allocated on the whole path of a request's check, through limiter and router, with peers that live and report.
func TestCheckAllocatesNothingWithLivePeers(t *testing.T) {
	for _, a := range algorithms {
		clock := ratelimit.NewClock()
		nodes := newMesh(t, 3, Config{Clock: clock})
		exact, err := local.New(local.Config{Clock: clock})
		if err != nil {
			t.Fatal(err)
		}
		n := nodes[0]
		l, err := ratelimit.New(ratelimit.Config{Clock: clock, Store: ratelimit.NewRouter(func(b ratelimit.Bucket) ratelimit.Store {
			if b.Info().Exact {
				return exact
			}
			return n
		})})
		if err != nil {
			t.Fatal(err)
		}
		ctx, now := t.Context(), clock.Now()
		it := item(newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Hour, Algorithm: a}), 1)
		for _, m := range nodes {
			spend(t, m, now, it, 100)
			m.flushAll(now)
		}
		if got := used(t, n, now, it); got < 299 { // a token bucket has refilled a little
			t.Fatalf("%v: %d used in the eyes of a node, of which the others have spent 200", a, got)
		}
		admitted, refused := 0, 0
		if got := testing.AllocsPerRun(5000, func() {
			now = now.Add(100 * time.Microsecond) // other milliseconds: the headroom is computed anew
			d := l.Check(ctx, now, it)
			switch {
			case !d.Allowed:
				refused++
			case admitted%2 == 0:
				l.Refund(ctx, d, it)
				fallthrough
			default:
				admitted++
			}
		}); got != 0 {
			t.Errorf("%v: %v allocations", a, got)
		}
		if admitted == 0 || refused == 0 {
			t.Errorf("%v: %d admitted and %d refused: both paths are meant", a, admitted, refused)
		}
	}
}

// Messages that are lost, repeated and out of order change nothing in the end.
func TestDeliveryDoesNotMatterInTheEnd(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms {
		s := newSim(t, 3, conditions{latency: lan, cut: func(_, to *node) bool { return to.index == 2 }})
		it := item(newPolicy(t, ratelimit.Rule{Limit: 100_000, Scale: time.Hour, Algorithm: a}), 1)
		type sent struct {
			from cluster.ID
			body []byte
		}
		var all []sent
		spent := 0
		for range 30 {
			s.run(50*time.Millisecond, func(n *node, now ratelimit.Instant) {
				if n.index < 2 && s.rng.IntN(3) == 0 {
					spent += spend(t, n, now, it, 1+s.rng.IntN(60))
					if s.rng.IntN(10) == 0 {
						n.Refund(t.Context(), ratelimit.Booking{At: now}, it)
						spent--
					}
				}
				for _, l := range s.mail {
					if l.to.index != l.from.index && l.to.index < 2 {
						all = append(all, sent{l.from.id, l.body})
					}
				}
				s.mail = s.mail[:0]
			})
		}
		for _, n := range s.nodes[:2] {
			n.flushAll(n.clock.Now())
		}
		last := map[cluster.ID]sent{}
		for _, l := range s.mail {
			last[l.from.id] = sent{l.from.id, l.body}
		}
		third := s.nodes[2]
		third.table.Store(&table{n: 3, slots: slices.Clone(s.nodes[0].table.Load().slots)})
		for i := range third.table.Load().slots {
			third.table.Load().slots[i].visible = true
		}
		for range 2 {
			for _, i := range s.rng.Perm(len(all)) {
				if s.rng.IntN(3) > 0 {
					if err := third.receive(all[i].from, all[i].body, s.now); err != nil {
						t.Fatal(err)
					}
				}
			}
			for _, m := range last {
				if err := third.receive(m.from, m.body, s.now); err != nil {
					t.Fatal(err)
				}
			}
		}
		_, c, i := third.entry(func() uint32 { c, _ := third.Counter(it.Key); l, _ := c.Link(); return l }())
		known := 0
		for _, r := range c.of(i) {
			known += int(r.count)
		}
		if known != spent || len(last) != 2 {
			t.Errorf("%v: %d known of %d spent (last words of %d)", a, known, spent, len(last))
		}
	}
}

// What was given back is given back everywhere, whatever arrives late.
func TestRefundSurvives(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms {
		s := newSim(t, 3, conditions{latency: lan})
		it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Hour, Algorithm: a}), 1)
		it.Cost = 90
		d := s.nodes[0].Take(t.Context(), s.now, it)
		s.run(3*time.Second, nil)
		if got := used(t, s.nodes[1], s.now, it); got < 88 || got > 92 {
			t.Fatalf("%v: the others know of %d spent, want 90", a, got)
		}
		s.nodes[0].Refund(t.Context(), d.Booking(0), it)
		s.run(time.Second, nil)
		for _, n := range s.nodes {
			if got := used(t, n, s.now, it); got != 0 {
				t.Errorf("%v: node %d still counts %d", a, n.index, got)
			}
		}
	}
}

func TestResetIsForAllNodes(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms {
		s := newSim(t, 3, conditions{latency: lan})
		it := item(newPolicy(t, ratelimit.Rule{Limit: 90, Scale: time.Hour, Algorithm: a}), 1)
		s.run(2*time.Second, func(n *node, now ratelimit.Instant) {
			if s.now < begin.Add(500*time.Millisecond) {
				n.Take(t.Context(), now, it)
			}
		})
		s.reset(it, s.nodes...)
		s.run(time.Second, nil)
		for _, n := range s.nodes {
			if got := used(t, n, s.now, it); got != 0 {
				t.Errorf("%v: node %d still counts %d", a, n.index, got)
			}
		}
		if got := spend(t, s.nodes[2], s.now, it, 200); got != 90 {
			t.Errorf("%v: %d admitted after a reset, want 90", a, got)
		}
	}
}

// What has ended is dropped by those who sent it and by those who received it.
func TestEndedWindowsAreDropped(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms {
		s := newSim(t, 3, conditions{latency: lan})
		p := newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a})
		const keys = 500
		next := uint64(0)
		s.run(100*time.Millisecond, func(n *node, now ratelimit.Instant) {
			n.Take(t.Context(), now, item(p, next%keys+1))
			next++
		})
		s.run(300*time.Millisecond, nil)
		if got := s.nodes[0].linked(); got != keys {
			t.Fatalf("%v: %d keys known, want %d", a, got, keys)
		}
		s.run(20*time.Second, nil)
		for _, n := range s.nodes {
			if got := n.linked(); got != 0 {
				t.Errorf("%v: node %d still holds %d keys", a, n.index, got)
			}
		}
		before := s.nodes[0].messages
		s.run(5*time.Second, nil)
		if got := s.nodes[0].messages - before; got != 0 {
			t.Errorf("%v: %d messages of idle keys", a, got)
		}
	}
}

// linked counts the entries in use.
func (s *Store) linked() int {
	n := 0
	s.each(func(_ uint32, e *entry, _ *usage, _ []cell) {
		if e.key != (ratelimit.Key{}) {
			n++
		}
	})
	return n
}

// Bytes between nodes grow with active keys, not with requests.
func TestBytesDoNotGrowWithRequests(t *testing.T) {
	t.Parallel()
	var kilo [3]float64
	for i, x := range []float64{10, 100, 1000} {
		s := newSim(t, 3, conditions{latency: lan})
		it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Second}), 1)
		kilo[i] = s.offer(it, even(x), 6).figures(1).kilo
	}
	if kilo[2] > 1.5*kilo[0] {
		t.Errorf("%.2f kB a node and second at 10 times the limit, %.2f at 100, %.2f at 1000", kilo[0], kilo[1], kilo[2])
	}
}

// A key that spends a tiny part of its limit is hardly spoken of.
func TestSlowKeysAreNotReported(t *testing.T) {
	t.Parallel()
	s := newSim(t, 3, conditions{latency: lan})
	p := newPolicy(t, ratelimit.Rule{Limit: 100_000, Scale: time.Hour})
	const keys = 1000
	s.run(3*time.Second, func(n *node, now ratelimit.Instant) {
		n.Take(t.Context(), now, item(p, s.rng.Uint64N(keys)+1))
	})
	if s.nodes[0].bytes != 0 {
		t.Errorf("%d bytes about keys that spent a thousandth of their limit at most", s.nodes[0].bytes)
	}
}

// A change of policy, which reaches the nodes one after the other, neither gives
// back nor takes away.
func TestPolicyChangeOverNodes(t *testing.T) {
	t.Parallel()
	for _, from := range algorithms {
		for _, to := range algorithms {
			s := newSim(t, 3, conditions{latency: lan})
			it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Hour, Algorithm: from}), 1)
			s.run(time.Second, func(n *node, now ratelimit.Instant) {
				if s.now < begin.Add(2*time.Millisecond) {
					n.Take(t.Context(), now, it) // 20 each
				}
			})
			changed := item(newPolicy(t, ratelimit.Rule{Limit: 120, Scale: 2 * time.Hour, Algorithm: to}), 1)
			admitted := 0
			for i := range s.nodes { // one after the other, 200 ms apart
				admitted += spend(t, s.nodes[i], s.now, changed, 1)
				s.run(200*time.Millisecond, nil)
			}
			s.run(time.Second, nil)
			for _, n := range s.nodes {
				admitted += spend(t, n, s.now, changed, 100)
				s.run(200*time.Millisecond, nil)
			}
			// 60 were in use. Up to a rounding, and a reserve in token buckets that
			// were not heard of while they changed.
			if admitted < 55 || admitted > 66 {
				t.Errorf("%v to %v: %d admitted after the change, want 60", from, to, admitted)
			}
		}
	}
}

// Subjects without room share counters, and these hold over the nodes too.
func TestOverflowIsSharedByNodes(t *testing.T) {
	t.Parallel()
	const maxKeys = 100
	s := newSim(t, 3, conditions{latency: lan, maxKeys: maxKeys})
	p := newPolicy(t, ratelimit.Rule{Limit: 5, Scale: time.Minute})
	for _, n := range s.nodes {
		for k := range uint64(maxKeys) {
			n.Take(t.Context(), s.now, item(p, k+1))
		}
	}
	stranger := item(p, 1<<40)
	admitted := 0
	s.run(2*time.Second, func(n *node, now ratelimit.Instant) {
		if s.rng.IntN(100) == 0 {
			admitted += spend(t, n, now, stranger, 1)
		}
	})
	if admitted < 5 || admitted > 8 {
		t.Errorf("%d of a limit of 5 admitted for a subject without room", admitted)
	}
}

// Members come and go; registers make room for them and are used again.
func TestManyStarts(t *testing.T) {
	t.Parallel()
	s := newSim(t, 3, conditions{latency: lan})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Second}), 1)
	for range 60 {
		s.nodes[1].dead = true
		s.nodes[1] = s.start(1)
		s.views()
		if err := s.nodes[1].Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		if f := s.offer(it, even(10), 3).figures(1); f.overMax > 0.1 {
			t.Fatalf("overshoot %.0f %%", 100*f.overMax)
		}
	}
	if got := len(s.nodes[0].peers); got > 40 {
		t.Errorf("%d places for the registers of three nodes", got)
	}
}

// known is what a node has admitted in a counter's window and was told by others.
func (s *Store) known(it ratelimit.Item) int {
	c, _ := s.Counter(it.Key)
	state, _ := c.Load()
	sum := int(uint32(state.Word))
	if link, _ := c.Link(); link != 0 {
		_, ch, i := s.entry(link)
		ch.mu.Lock()
		defer ch.mu.Unlock()
		for _, kept := range ch.of(i) {
			r := kept.load(uint32(state.Word >> 32))
			sum += int(r.in(uint32(state.Word >> 32)))
		}
	}
	return sum
}

// Real callers, reporters and receivers, for the race detector; and the limit holds.
func TestParallelCallersOnThreeNodes(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms {
		nodes := newMesh(t, 3, Config{})
		const limit = 2000
		it := item(newPolicy(t, ratelimit.Rule{Limit: limit, Scale: 24 * time.Hour, Algorithm: a}), 1)
		small := newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a})
		var mu sync.Mutex
		admitted := 0
		var callers, reporters sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		for _, n := range nodes {
			reporters.Go(func() {
				if err := n.Run(ctx); err != nil {
					t.Error(err)
				}
			})
			for w := range 2 {
				callers.Go(func() {
					got := 0
					for i := range 1500 {
						if i%10 == 9 {
							time.Sleep(time.Millisecond) // the pace of a flood, not of a loop
						}
						now := n.clock.Now()
						if n.Take(ctx, now, it).Allowed {
							got++
						}
						other := item(small, uint64(2+(i*7+w)%700))
						if d := n.Take(ctx, now, other); d.Allowed && i%5 == 0 {
							n.Refund(ctx, d.Booking(0), other)
						}
					}
					mu.Lock()
					admitted += got
					mu.Unlock()
				})
			}
		}
		callers.Wait()
		cancel()
		reporters.Wait()
		// How exact it is depends on how busy the machine is, and is tested in
		// simulated time. Here nothing must get lost or be counted twice.
		if admitted < limit*95/100 || admitted > 3*limit {
			t.Errorf("%v: %d admitted of a limit of %d", a, admitted, limit)
		}
		for i, n := range nodes {
			if got := n.known(it); a != ratelimit.TokenBucket && got != admitted {
				t.Errorf("%v: node %d knows of %d spent, not of %d", a, i, got, admitted)
			}
		}
	}
}

// A node that leaves tells everything first.
func TestLeaveFlushes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		nodes := newMesh(t, 3, Config{Clock: ratelimit.NewClock()})
		it := item(newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Hour}), 1)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := nodes[0].Run(ctx); err != nil {
				t.Error(err)
			}
		})
		time.Sleep(time.Second)
		if got := spend(t, nodes[0], nodes[0].clock.Now(), it, 11); got != 11 {
			t.Fatal(got)
		}
		cancel()
		wg.Wait()
		if got := used(t, nodes[1], nodes[1].clock.Now(), it); got != 11 {
			t.Errorf("%d known of 11 spent", got)
		}
	})
}

// In simulated real time: news near the limit is out within milliseconds, news far
// from it at the regular time.
func TestRunReportsInTime(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		nodes := newMesh(t, 3, Config{Clock: ratelimit.NewClock()})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, n := range nodes {
			wg.Go(func() { _ = n.Run(ctx) })
		}
		time.Sleep(time.Second)
		knows := func(it ratelimit.Item) int { return used(t, nodes[1], nodes[1].clock.Now(), it) }
		now := func() ratelimit.Instant { return nodes[0].clock.Now() }

		near := item(newPolicy(t, ratelimit.Rule{Limit: 12, Scale: time.Hour}), 1)
		spend(t, nodes[0], now(), near, 5)
		time.Sleep(3 * time.Millisecond)
		if got := knows(near); got != 5 {
			t.Errorf("near the limit %d of 5 are known after 3 ms", got)
		}
		far := item(newPolicy(t, ratelimit.Rule{Limit: 1200, Scale: time.Hour}), 2)
		spend(t, nodes[0], now(), far, 50)
		time.Sleep(3 * time.Millisecond)
		if got := knows(far); got != 0 {
			t.Errorf("far from the limit %d are known at once", got)
		}
		time.Sleep(DefaultSyncInterval)
		if got := knows(far); got < 50 || got > 150 {
			t.Errorf("after the interval %d are counted, 50 and what is expected besides", got)
		}
		cancel()
		wg.Wait()
	})
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	n := &meshNode{view: &cluster.View{}}
	for name, c := range map[string]Config{
		"no network": {Clock: ratelimit.NewClock()},
		"no clock":   {Network: n},
		"interval":   {Network: n, Clock: ratelimit.NewClock(), SyncInterval: time.Millisecond},
		"keys":       {Network: n, Clock: ratelimit.NewClock(), MaxKeys: -1},
	} {
		if _, err := New(c); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
}

// When a connection broke, what was lost with it is made good: both sides hear what
// the other has counted, also of keys that nobody has touched since.
func TestLostMessagesAreMadeGood(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms {
		lost := true
		s := newSim(t, 3, conditions{latency: lan, cut: func(_, _ *node) bool { return false }})
		s.net.cut = func(from, to *node) bool { return lost && from.index == 0 }
		it := item(newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Hour, Algorithm: a}), 1)
		spend(t, s.nodes[0], s.now, it, 400)
		s.run(3*time.Second, nil) // the key is quiet by now
		lost = false
		for _, n := range s.nodes { // nobody missed anybody, but the streams were opened anew
			v := *n.view
			v.Peers = slices.Clone(v.Peers)
			for i := range v.Peers {
				v.Peers[i].Session++
			}
			n.view = &v
		}
		s.run(time.Second, nil)
		if got := used(t, s.nodes[1], s.now, it); got < 390 || got > 410 {
			t.Errorf("%v: told again, %d are known of 400 spent", a, got)
		}
		if err := s.nodes[2].Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		if got := used(t, s.nodes[2], s.now, it); got < 390 || got > 410 {
			t.Errorf("%v: asked for, %d are known of 400 spent", a, got)
		}
	}
}

// A peer that does not answer is asked again, and the caller is told.
func TestSyncAsksAgain(t *testing.T) {
	t.Parallel()
	away := false
	s := newSim(t, 2, conditions{latency: lan})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Hour}), 1)
	spend(t, s.nodes[0], s.now, it, 50)
	s.nodes[1] = s.start(1)
	s.views()
	s.net.cut = func(_, _ *node) bool { return away }
	away = true
	if err := s.nodes[1].Sync(t.Context()); err == nil {
		t.Error("no error of a peer that is away")
	}
	away = false
	if err := s.nodes[1].Sync(t.Context()); err != nil {
		t.Error(err)
	}
	if got := used(t, s.nodes[1], s.now, it); got != 50 {
		t.Errorf("%d known, want 50", got)
	}
}

// Counts of a window that is far ahead, by a clock that is wrong, are not held.
func TestWrongClocksAreNotBelieved(t *testing.T) {
	t.Parallel()
	s := newSim(t, 2, conditions{latency: lan, skew: func(i int) time.Duration { return time.Duration(i) * time.Hour }})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Minute}), 1)
	spend(t, s.nodes[1], s.nodes[1].clock.Now(), it, 100)
	s.run(time.Second, nil)
	if got := used(t, s.nodes[0], s.now, it); got != 0 || s.nodes[0].linked() != 0 {
		t.Errorf("%d counted of a window in an hour", got)
	}
	if got := spend(t, s.nodes[0], s.now, it, 200); got != 100 {
		t.Errorf("%d admitted, want 100", got)
	}
}

func TestMemoryPerKey(t *testing.T) {
	if testing.Short() || raceEnabled {
		t.Skip("fills several hundred thousand keys")
	}
	const keys = 300_000
	heap := func() uint64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	for _, c := range []struct {
		name  string
		limit int64 // of which each key spends one
		most  float64
	}{
		{"not worth a report", 1000, 64},
		{"used here and reported by this node", 10, 230},
	} {
		s := newSim(t, 3, conditions{latency: lan, maxKeys: keys})
		p := newPolicy(t, ratelimit.Rule{Limit: c.limit, Scale: time.Hour})
		before := heap()
		for k := range uint64(keys) {
			s.nodes[0].Take(t.Context(), s.now, item(p, k+1))
		}
		perKey := float64(heap()-before) / float64(s.nodes[0].Keys())
		t.Logf("%s: %.0f B a key", c.name, perKey)
		if perKey > c.most {
			t.Errorf("%s: %.0f B a key, want at most %.0f", c.name, perKey, c.most)
		}
		runtime.KeepAlive(s)
	}

	s := newSim(t, 3, conditions{latency: lan, maxKeys: keys})
	n, p := s.nodes[0], newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Hour})
	win, _ := p.Window(s.now)
	before := heap()
	for _, peer := range s.nodes[1:] {
		var w writer
		for k := range uint64(keys) {
			if !w.open() {
				w.begin(kindReport, uint32(k+1), s.now)
			}
			w.record(item(p, k+1).Key, p, register{win: win, count: 1, known: 2, demand: 1}, nil, local.Reset{})
			if w.full() || k == keys-1 {
				if err := n.receive(peer.id, w.end(), s.now); err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	if got, perKey := n.Keys(), float64(heap()-before)/float64(n.Keys()); perKey > 64+32+2*24 || got < keys*95/100 {
		t.Errorf("%d keys that both peers reported, %.1f B a key; want at most 144", got, perKey)
	}
	runtime.KeepAlive(s)
}

// Five million invented addresses against a bound of 200,000 keys, each of which is reported.
func TestInventedSubjects(t *testing.T) { // not parallel: it weighs the heap
	subjects, bound, perKey := 5_000_000, 200_000, 240.0
	if raceEnabled {
		subjects, bound = 100_000, 20_000 // ten times slower each
		perKey = 280                      // of so few, what does not grow with them weighs more
	}
	ratelimittest.RunInvented(t, subjects, bound, perKey, func(t *testing.T, maxKeys int) ratelimit.Store {
		clock := ratelimit.ClockFrom(func() ratelimit.Instant { return 1 }) // behind the times that are passed in, so that those count
		n := newMesh(t, 3, Config{MaxKeys: maxKeys, Clock: clock})[0]
		n.mesh.nodes = n.mesh.nodes[:1] // nobody listens: the peers' heap is not weighed
		return &polled{meshNode: n, every: maxKeys / 40}
	})
}

// polled is a node that reports between checks.
type polled struct {
	*meshNode
	every, checks int
}

func (p *polled) Take(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) ratelimit.Decision {
	if p.checks++; p.checks%p.every == 0 {
		p.poll(now)
	}
	return p.meshNode.Take(ctx, now, it)
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	if raceEnabled {
		t.Skip("in simulated time")
	}
	reg := prometheus.NewRegistry()
	s := newSim(t, 2, conditions{latency: lan})
	store, err := New(Config{Network: s.nodes[0], Clock: s.nodes[0].clock, Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	s.nodes[0].Store = store
	s.views()
	for _, n := range s.nodes {
		it := item(newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Hour}), 1)
		spend(t, n, s.now, it, 5)
	}
	s.run(time.Second, nil)
	if err := store.receive(s.nodes[1].id, []byte{9}, s.now); err == nil {
		t.Error("a malformed message was no error")
	}
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for _, name := range []string{
		"converger_rate_limit_keys cluster",
		"converger_rate_limit_sync_batches_total received", "converger_rate_limit_sync_batches_total sent",
		"converger_rate_limit_sync_bytes_total received", "converger_rate_limit_sync_bytes_total sent",
		"converger_rate_limit_sync_reports_total all", "converger_rate_limit_sync_reports_total early",
		"converger_rate_limit_sync_dropped_total malformed",
		"converger_rate_limit_sync_tick_seconds",
		"converger_rate_limit_sync_age_seconds " + s.nodes[1].id.String(),
	} {
		if got[name] <= 0 {
			t.Errorf("%s is %v", name, got[name])
		}
	}
	for _, name := range dropReasons {
		if _, ok := got["converger_rate_limit_sync_dropped_total "+name]; !ok {
			t.Errorf("no series of drops for the reason %s", name)
		}
	}
}

// After a change of scale or algorithm a node that had used the key before, and serves nobody until another has spent the
// new budget, does not hand it out again: it asks when it first applies the new policy.
func TestChangedPolicyIsOneBudget(t *testing.T) {
	t.Parallel()
	rules := []ratelimit.Rule{
		{Limit: 100, Scale: time.Second},
		{Limit: 30, Scale: time.Hour},
		{Limit: 30, Scale: time.Hour, Algorithm: ratelimit.SlidingWindow},
		{Limit: 6, Scale: 10 * time.Minute, Burst: 30, Algorithm: ratelimit.TokenBucket},
		{Limit: 12, Scale: 10 * time.Minute, Burst: 30, Algorithm: ratelimit.TokenBucket},
	}
	for _, from := range rules {
		for _, to := range rules[1:] {
			if from == to {
				continue
			}
			for _, quiet := range []time.Duration{300 * time.Millisecond, 5 * time.Second} {
				s := newSim(t, 3, conditions{latency: lan})
				before, after := item(newPolicy(t, from), 1), item(newPolicy(t, to), 1)
				for _, n := range s.nodes {
					spend(t, n, s.now, before, 1)
				}
				s.run(700*time.Millisecond, nil)
				admitted := spend(t, s.nodes[0], s.now, after, 60)
				hear := func(n *node, _ ratelimit.Instant) {
					for len(n.changed) > 0 {
						n.inquireOf(t.Context(), nil)
					}
				}
				s.run(quiet, hear)
				for _, n := range s.nodes[1:] {
					admitted += spend(t, n, s.now, after, 1) // a request by which it learns of the new policy
					hear(n, s.now)
					admitted += spend(t, n, s.now, after, 60)
					s.run(quiet, hear)
				}
				if admitted < 26 || admitted > 30+2 {
					t.Errorf("%v, then %v, %s later: %d admitted, want 27 to 32", before.Policy.Rule(), after.Policy.Rule(), quiet, admitted)
				}
			}
		}
	}
}

func FuzzStateRequest(f *testing.F) {
	f.Add(stateRequest([]ratelimit.Key{{Hi: 3, Lo: 4}, {Hi: 5, Lo: 6}}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if keys, ok := readStateRequest(b); ok && !bytes.Equal(stateRequest(keys), b) {
			t.Errorf("%x is read as %v", b, keys)
		}
	})
}

// A key that is asked now and then is told once each time, whatever became of its demand since; and the others don't
// expect more of it than that for long.
func TestRareRequestsAreToldOnce(t *testing.T) {
	t.Parallel()
	const requests = 8
	s := newSim(t, 3, conditions{latency: lan})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 50, Scale: time.Hour}), 1)
	n := s.nodes[0]
	for range requests {
		n.Take(t.Context(), s.now, it)
		s.run(900*time.Millisecond, nil)
	}
	if n.messages > requests {
		t.Errorf("%d requests, %d messages", requests, n.messages)
	}
	for _, o := range s.nodes[1:] {
		if u, err := o.Peek(t.Context(), s.now, it); err != nil || u.Used != requests {
			t.Errorf("node %d knows of %d used (%v), want %d", o.index, u.Used, err, requests)
		}
	}
}

// What a key that came to rest, or is in no list any more, spends then is told as soon as that of any other.
func TestRestedKeyIsHeardAgain(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		for _, rests := range []time.Duration{300 * time.Millisecond, 1500 * time.Millisecond, 5 * time.Second} {
			for _, burst := range []int{30, 200} { // of which the first is told at the next regular time, the second at once
				s := newSim(t, 3, conditions{latency: lan})
				it := item(newPolicy(t, ratelimit.Rule{Limit: 900, Scale: time.Hour, Algorithm: a}), 1)
				n := s.nodes[0]
				for range 20 {
					n.Take(t.Context(), s.now, it)
				}
				s.run(rests, nil)
				for range burst {
					n.Take(t.Context(), s.now, it)
				}
				wait := 10 * time.Millisecond
				if burst < 100 {
					wait += DefaultSyncInterval
				}
				s.run(wait, nil)
				if u, err := s.nodes[1].Peek(t.Context(), s.now, it); err != nil || int(u.Used) < 20+burst-2 { // a bucket refills by one meanwhile
					t.Errorf("%v, rested for %v: the others know of %d used (%v), want %d", a, rests, u.Used, err, 20+burst)
				}
			}
		}
	}
}

// A last report that was lost is repeated once the key has rested.
func TestLastReportIsRepeated(t *testing.T) {
	t.Parallel()
	lost := true
	s := newSim(t, 3, conditions{latency: lan, cut: func(_, _ *node) bool { return lost }})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 50, Scale: time.Hour}), 1)
	lost = false
	s.views()
	lost = true
	s.nodes[0].Take(t.Context(), s.now, it)
	s.run(300*time.Millisecond, nil)
	lost = false
	s.run(3*time.Second, nil)
	if u, err := s.nodes[1].Peek(t.Context(), s.now, it); err != nil || u.Used != 1 {
		t.Errorf("the others know of %d used (%v), want 1", u.Used, err)
	}
}
