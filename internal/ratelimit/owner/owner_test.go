package owner

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/ratelimittest"
)

const begin = ratelimit.Instant(500_000 * time.Hour)

// mesh is a cluster in memory. Calls run in the caller's goroutine, after delay.
type mesh struct {
	nodes []*node
	clock ratelimit.Clock
	now   atomic.Int64 // of the clock, unless it is real
	delay atomic.Int64 // of a call, ns
}

type node struct {
	*Store
	mesh  *mesh
	id    cluster.ID
	view  atomic.Pointer[cluster.View]
	hangs atomic.Bool // does not answer
	gone  atomic.Bool // can't be reached
	calls atomic.Int64
	log   *lines
}

func newMesh(tb testing.TB, nodes int, c Config) *mesh {
	tb.Helper()
	m := &mesh{clock: c.Clock}
	m.now.Store(int64(begin))
	if m.clock.IsZero() {
		m.clock = ratelimit.ClockFrom(func() ratelimit.Instant { return ratelimit.Instant(m.now.Load()) })
	}
	for range nodes {
		m.start(tb, c)
	}
	m.views()
	return m
}

func (m *mesh) start(tb testing.TB, c Config) *node {
	tb.Helper()
	n := &node{mesh: m, id: cluster.ID(len(m.nodes)+1) * 1000, log: &lines{}}
	n.view.Store(&cluster.View{Visible: 1, Alive: 1})
	c.Network, c.Clock, c.Logger = n, m.clock, slog.New(slog.NewTextHandler(n.log, nil))
	var err error
	if n.Store, err = New(c); err != nil {
		tb.Fatal(err)
	}
	m.nodes = append(m.nodes, n)
	return n
}

// views lets every node see those that are not gone.
func (m *mesh) views() {
	for _, n := range m.nodes {
		v := &cluster.View{Visible: 1, Alive: 1}
		for _, o := range m.nodes {
			if o != n && !o.gone.Load() {
				v.Peers = append(v.Peers, cluster.Peer{ID: o.id, Standing: cluster.Visible, Session: 1})
				v.Visible++
				v.Alive++
			}
		}
		n.view.Store(v)
	}
}

// counter reads a series by its name and the value of one of its labels.
func counter(tb testing.TB, reg prometheus.Gatherer, name, label string) float64 {
	tb.Helper()
	families, err := reg.Gather()
	if err != nil {
		tb.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			for _, l := range m.GetLabel() {
				if f.GetName() == name && l.GetValue() == label {
					return m.GetCounter().GetValue()
				}
			}
		}
	}
	tb.Fatalf("no series %s of %s", name, label)
	return 0
}

func (n *node) ID() cluster.ID      { return n.id }
func (n *node) View() *cluster.View { return n.view.Load() }

func (n *node) peer(id cluster.ID) *node {
	for _, o := range n.mesh.nodes {
		if o.id == id && !o.gone.Load() && !n.gone.Load() {
			return o
		}
	}
	return nil
}

func (n *node) Send(to cluster.ID, _ cluster.Topic, body []byte) bool {
	o := n.peer(to)
	if o == nil || o.hangs.Load() {
		return false
	}
	o.Handler().Receive(n.id, cluster.Message{Body: body})
	return true
}

func (n *node) Call(ctx context.Context, to cluster.ID, _ cluster.Topic, request []byte) ([]byte, error) {
	n.calls.Add(1)
	o := n.peer(to)
	if o == nil {
		return nil, cluster.ErrUnreachable
	}
	if d := time.Duration(n.mesh.delay.Load()); d > 0 {
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	if o.hangs.Load() {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	return o.Handler().Answer(ctx, n.id, request)
}

func (n *node) Fetch(ctx context.Context, from cluster.ID, _ cluster.Topic, each func([]byte) error) error {
	if o := n.peer(from); o != nil {
		return o.Handler().State(ctx, n.id, each)
	}
	return cluster.ErrUnreachable
}

// copyAll does what Run would.
func (m *mesh) copyAll() {
	for _, n := range m.nodes {
		n.copyDirty()
	}
}

type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lines) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.b.String(), text)
}

// everywhere asks another node each time, and moves the cluster's clock to the
// caller's.
type everywhere struct {
	m *mesh
	n atomic.Int64
}

func (e *everywhere) at(now ratelimit.Instant) *Store {
	if now != 0 {
		e.m.now.Store(int64(now))
	}
	return e.m.nodes[int(e.n.Add(1))%len(e.m.nodes)].Store
}

func (e *everywhere) Backend(b ratelimit.Bucket) string { return e.at(0).Backend(b) }

func (e *everywhere) Take(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) ratelimit.Decision {
	return e.at(now).Take(ctx, now, it)
}

func (e *everywhere) TakeAll(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item) ratelimit.Decision {
	return e.at(now).TakeAll(ctx, now, items)
}

func (e *everywhere) Refund(ctx context.Context, b ratelimit.Booking, it ratelimit.Item) {
	e.at(0).Refund(ctx, b, it)
}

func (e *everywhere) Reserve(ctx context.Context, now ratelimit.Instant, it ratelimit.Item, maxWait time.Duration) ratelimit.Decision {
	return e.at(now).Reserve(ctx, now, it, maxWait)
}

func (e *everywhere) Peek(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	return e.at(now).Peek(ctx, now, it)
}

// Reset asks every node, as an operator does.
func (e *everywhere) Reset(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	for range e.m.nodes {
		if err := e.at(now).Reset(ctx, now, it); err != nil {
			return err
		}
	}
	return nil
}

// Whichever node is asked, the answers are those of one store.
func TestConformance(t *testing.T) {
	t.Parallel()
	for name, nodes := range map[string]int{"alone": 1, "three nodes": 3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ratelimittest.Run(t, func(t *testing.T) ratelimit.Store {
				return &everywhere{m: newMesh(t, nodes, Config{Deadline: time.Minute})}
			})
			if nodes == 1 { // more nodes hold more keys
				ratelimittest.RunBound(t, func(t *testing.T, maxKeys int) ratelimit.Store {
					return &everywhere{m: newMesh(t, nodes, Config{MaxKeys: maxKeys})}
				})
			}
		})
	}
}

func newPolicy(tb testing.TB, b ratelimit.Bucket, r ratelimit.Rule) *ratelimit.Policy {
	tb.Helper()
	p, err := ratelimit.NewPolicy(b, r)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func key(n uint64) ratelimit.Key {
	return ratelimit.Key{Hi: n*0x9E3779B97F4A7C15 | 2, Lo: n * 0xBF58476D1CE4E5B9}
}

// ownedBy finds an item of the policy whose key belongs to the node.
func (m *mesh) ownedBy(p *ratelimit.Policy, n *node, from uint64) ratelimit.Item {
	for i := from; ; i++ {
		if to, _ := m.nodes[0].ring().first(key(i)); to == n.id {
			return ratelimit.Item{Key: key(i), Policy: p}
		}
	}
}

func (n *node) used(tb testing.TB, it ratelimit.Item) int {
	tb.Helper()
	u, err := n.Peek(tb.Context(), n.clock.Now(), it)
	if err != nil {
		tb.Fatal(err)
	}
	return int(u.Used)
}

func (n *node) spend(tb testing.TB, it ratelimit.Item, times int) int {
	tb.Helper()
	admitted := 0
	for range times {
		if n.Take(tb.Context(), n.clock.Now(), it).Allowed {
			admitted++
		}
	}
	return admitted
}

func login(tb testing.TB) *ratelimit.Policy {
	return newPolicy(tb, ratelimit.LoginAccount, ratelimit.LoginAccount.Info().Default)
}

// 300 guesses at once over three nodes get five verifications; while an owner that
// was not yet missed does not answer, at most five at each live node.
func TestGuessesInParallel(t *testing.T) {
	t.Parallel()
	guess := func(t *testing.T, m *mesh, account ratelimit.Item) []int {
		address := m.ownedBy(newPolicy(t, ratelimit.LoginIP, ratelimit.Rule{Limit: 1000, Scale: time.Minute}), m.nodes[0], 1000)
		var wg sync.WaitGroup
		admitted := make([]atomic.Int64, len(m.nodes))
		for i := range 300 {
			n := i % len(m.nodes)
			if m.nodes[n].gone.Load() {
				continue
			}
			wg.Go(func() {
				if m.nodes[n].TakeAll(t.Context(), m.clock.Now(), []ratelimit.Item{address, account}).Allowed {
					admitted[n].Add(1)
				}
			})
		}
		wg.Wait()
		got := make([]int, len(admitted))
		for i := range admitted {
			got[i] = int(admitted[i].Load())
		}
		return got
	}
	t.Run("healthy", func(t *testing.T) {
		t.Parallel()
		m := newMesh(t, 3, Config{Deadline: time.Minute})
		got := guess(t, m, m.ownedBy(login(t), m.nodes[1], 1))
		if got[0]+got[1]+got[2] != 5 {
			t.Errorf("%v admitted, want 5 together", got)
		}
	})
	t.Run("owner lost", func(t *testing.T) {
		t.Parallel()
		m := newMesh(t, 3, Config{})
		it := m.ownedBy(login(t), m.nodes[1], 1)
		m.nodes[1].gone.Store(true) // and still in the views
		got := guess(t, m, it)
		// A share of five among three is two, rounded up.
		if got[0] != 2 || got[2] != 2 {
			t.Errorf("%v admitted, want 2 at each live node", got)
		}
	})
}

func TestOwnerThatHangs(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		reg := prometheus.NewRegistry()
		m := newMesh(t, 3, Config{Clock: ratelimit.NewClock()})
		if err := m.nodes[0].register(reg); err != nil {
			t.Fatal(err)
		}
		asker, owner := m.nodes[0], m.nodes[1]
		it := m.ownedBy(newPolicy(t, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 10, Scale: time.Hour}), owner, 1)
		if got := asker.spend(t, it, 3); got != 3 {
			t.Fatal(got)
		}
		owner.hangs.Store(true)
		start := time.Now()
		d := asker.Take(t.Context(), asker.clock.Now(), it)
		if took := time.Since(start); took != DefaultDeadline {
			t.Errorf("decided after %v, want %v", took, DefaultDeadline)
		}
		if !d.Allowed || d.Policy != it.Policy {
			t.Errorf("%+v", d)
		}
		// A share of ten among three is four; one of them is given back here, not at the owner.
		if got := asker.spend(t, it, 10); got != 3 {
			t.Errorf("%d more admitted alone, want 3", got)
		}
		asker.Refund(t.Context(), d.Booking(0), it)
		if got := asker.spend(t, it, 10); got != 1 {
			t.Errorf("%d admitted after a refund, want 1", got)
		}
		owner.hangs.Store(false)
		if got := owner.used(t, it); got != 3 {
			t.Errorf("the owner counts %d, want 3", got)
		}
		time.Sleep(2 * time.Second)
		if got := asker.spend(t, it, 20); got != 7 {
			t.Errorf("%d admitted by the owner, want the 7 that are left", got)
		}
		if start, end := asker.log.count("can't be asked"), asker.log.count("answer again"); start != 1 || end != 1 {
			t.Errorf("%d lines at the start and %d at the end of the outage, want one each", start, end)
		}
		if got := counter(t, reg, "converger_rate_limit_fallbacks_total", "timeout"); got != 21 {
			t.Errorf("%v decisions counted as taken alone, want 21", got)
		}
	})
}

// In front of a password a busy owner is waited for: nobody admits guesses beside it, and none is counted twice. One that
// hangs is waited for until another owns the key.
func TestGuardsWaitForABusyOwner(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 3, Config{Clock: ratelimit.NewClock()})
		it := m.ownedBy(login(t), m.nodes[1], 1)
		m.delay.Store(int64(150 * time.Millisecond))
		var wg sync.WaitGroup
		var admitted atomic.Int64
		for i := range 300 {
			wg.Go(func() { admitted.Add(int64(m.nodes[i%3].spend(t, it, 1))) })
		}
		wg.Wait()
		if got := admitted.Load(); got != 5 {
			t.Errorf("%d guesses admitted, want 5", got)
		}
		m.nodes[1].hangs.Store(true)
		start := time.Now()
		if d := m.nodes[0].Take(t.Context(), m.clock.Now(), it); d.Allowed != true || !d.Booking(0).Alone {
			t.Errorf("%+v, want a decision taken alone", d)
		}
		if took := time.Since(start); took != guardDeadline {
			t.Errorf("decided after %v, want %v", took, guardDeadline)
		}
	})
}

// A check alone goes at once; those that come while calls are under way share the next.
func TestConcurrentChecksAreBatched(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 2, Config{Clock: ratelimit.NewClock()})
		asker := m.nodes[0]
		it := m.ownedBy(newPolicy(t, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 50, Scale: time.Hour}), m.nodes[1], 1)
		m.delay.Store(int64(time.Millisecond))
		start := time.Now()
		asker.spend(t, it, 1)
		if took := time.Since(start); took != time.Millisecond || asker.calls.Load() != 1 {
			t.Errorf("a lone check took %v and %d calls", took, asker.calls.Load())
		}
		var wg sync.WaitGroup
		var admitted atomic.Int64
		for range 200 {
			wg.Go(func() { admitted.Add(int64(asker.spend(t, it, 1))) })
		}
		wg.Wait()
		if admitted.Load() != 49 {
			t.Errorf("%d admitted, want 49", admitted.Load())
		}
		if calls := asker.calls.Load(); calls > 1+maxFlying+2 {
			t.Errorf("%d calls for 200 checks at once", calls)
		}
		if took := time.Since(start); took > 4*time.Millisecond {
			t.Errorf("all took %v", took)
		}
	})
}

// What could not be sent in time is decided here, and not spent there later.
func TestLateQuestionsAreNotAsked(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 2, Config{Clock: ratelimit.NewClock()})
		asker, owner := m.nodes[0], m.nodes[1]
		it := m.ownedBy(newPolicy(t, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 1000, Scale: time.Hour}), owner, 1)
		owner.hangs.Store(true)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() { asker.spend(t, it, 1) })
		}
		wg.Wait()
		owner.hangs.Store(false)
		time.Sleep(time.Second)
		if got := owner.used(t, it); got != 0 {
			t.Errorf("%d spent at the owner by checks that were decided without it", got)
		}
	})
}

// The next in order has a warm copy: when an owner dies, what was spent stands.
func TestCopiesOutliveTheOwner(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		m := newMesh(t, 3, Config{})
		p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 5, Scale: time.Minute, Algorithm: a})
		it := m.ownedBy(p, m.nodes[2], 1)
		d := m.nodes[0].Take(t.Context(), begin, it)
		m.nodes[1].spend(t, it, 3)
		m.copyAll()
		m.nodes[0].Refund(t.Context(), d.Booking(0), it) // the copy follows it down
		m.copyAll()
		m.nodes[2].gone.Store(true)
		m.views()
		if got := m.nodes[0].used(t, it); got != 3 {
			t.Errorf("%v: %d known after the owner's death, want 3", a, got)
		}
		if got := m.nodes[1].spend(t, it, 10); got != 2 {
			t.Errorf("%v: %d admitted, want the 2 that were left", a, got)
		}
	}
}

// Nodes that join or leave take over the keys that become theirs.
func TestKeysMoveWithMembers(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 2, Config{})
	p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 5, Scale: time.Minute})
	const keys = 300
	for i := range uint64(keys) {
		m.nodes[i%2].spend(t, ratelimit.Item{Key: key(i + 1), Policy: p}, 3)
	}
	m.copyAll()
	before := m.nodes[0].ring()
	joined := m.start(t, Config{})
	m.views()
	if err := joined.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i := range uint64(keys) {
		it := ratelimit.Item{Key: key(i + 1), Policy: p}
		if got := m.nodes[i%3].used(t, it); got != 3 {
			t.Fatalf("key %d: %d used after a join, want 3", i, got)
		}
	}
	// Spent on after the join, then handed over by those that stay.
	for _, n := range m.nodes[:2] {
		n.handOver(before, n.ring())
	}
	for i := range uint64(keys) {
		m.nodes[i%3].spend(t, ratelimit.Item{Key: key(i + 1), Policy: p}, 1)
	}
	m.copyAll()
	with := m.nodes[0].ring()
	m.nodes[1].gone.Store(true)
	m.views()
	for _, n := range m.nodes {
		n.handOver(with, n.ring())
	}
	for i := range uint64(keys) {
		it := ratelimit.Item{Key: key(i + 1), Policy: p}
		if got := m.nodes[i%2*2].spend(t, it, 5); got != 1 {
			t.Fatalf("key %d: %d admitted after a member left, want the one that was left", i, got)
		}
	}
	// And everything has a copy again.
	left := m.nodes[0].ring()
	m.copyAll()
	m.nodes[2].gone.Store(true)
	m.views()
	if len(left) != 2 {
		t.Fatal(left)
	}
	for i := range uint64(keys) {
		if got := m.nodes[0].spend(t, ratelimit.Item{Key: key(i + 1), Policy: p}, 5); got != 0 {
			t.Fatalf("key %d: %d admitted after two members left, want none", i, got)
		}
	}
}

// Run does in time what the tests above do by hand.
func TestRun(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 3, Config{Clock: ratelimit.NewClock()})
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for _, n := range m.nodes {
			wg.Go(func() {
				if err := n.Run(ctx); err != nil {
					t.Error(err)
				}
			})
		}
		p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 5, Scale: time.Hour})
		it := m.ownedBy(p, m.nodes[2], 1)
		m.nodes[0].spend(t, it, 4)
		time.Sleep(3 * copyGap)
		m.nodes[2].gone.Store(true)
		m.views()
		time.Sleep(2 * lookEvery) // the heir makes another copy
		m.nodes[0].linesMu.Lock()
		if m.nodes[0].lines[m.nodes[2].id] != nil {
			t.Error("the line to a node that is gone is kept")
		}
		m.nodes[0].linesMu.Unlock()
		heir, _ := m.nodes[0].ring().first(it.Key)
		for _, n := range m.nodes[:2] {
			if got := n.used(t, it); got != 4 {
				t.Errorf("%d known, want 4", got)
			}
		}
		for _, n := range m.nodes {
			if n.id == heir {
				n.gone.Store(true)
			}
		}
		m.views()
		for _, n := range m.nodes[:2] {
			if !n.gone.Load() {
				if got := n.spend(t, it, 5); got != 1 {
					t.Errorf("%d admitted by the last, want 1", got)
				}
			}
		}
		cancel()
		wg.Wait()
	})
}

// A side of a split enforces its share, whoever owns the key there.
func TestSplitShare(t *testing.T) {
	t.Parallel()
	for _, full := range []bool{false, true} {
		m := newMesh(t, 3, Config{FullOnSplit: full})
		n := m.nodes[0]
		v := &cluster.View{Visible: 1, Alive: 3}
		for _, o := range m.nodes[1:] {
			v.Peers = append(v.Peers, cluster.Peer{ID: o.id, Standing: cluster.Split})
		}
		n.view.Store(v)
		it := ratelimit.Item{Key: key(1), Policy: newPolicy(t, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 10, Scale: time.Minute})}
		if got, want := n.spend(t, it, 20), map[bool]int{false: 4, true: 10}[full]; got != want {
			t.Errorf("full %v: %d admitted beyond a split, want %d", full, got, want)
		}
	}
}

func TestPeekSaysWhenTheOwnerIsAway(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 2, Config{})
	it := m.ownedBy(login(t), m.nodes[1], 1)
	m.nodes[1].gone.Store(true)
	if _, err := m.nodes[0].Peek(t.Context(), begin, it); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("Peek: %v", err)
	}
}

// Another node's clock may be off; the owner's own counts then.
func TestOwnerTrustsItsClock(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 2, Config{})
	it := m.ownedBy(newPolicy(t, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 2, Scale: time.Minute}), m.nodes[1], 1)
	ahead := begin.Add(time.Hour)
	d := m.nodes[0].Take(t.Context(), ahead, it)
	if !d.Allowed || d.At != begin {
		t.Errorf("booked at %v, want %v", d.At.Time(), begin.Time())
	}
	m.nodes[0].Refund(t.Context(), d.Booking(0), it)
	if got := m.nodes[1].used(t, it); got != 0 {
		t.Errorf("%d used after the refund", got)
	}
}

// Invented addresses, by far more than there is room for, in a cluster whose nodes keep copies for each other.
func TestInventedSubjects(t *testing.T) { // not parallel: it weighs the heap
	const nodes = 3
	// Each node has room for so many, of 64 bytes, beside what waits to be copied.
	ratelimittest.RunInvented(t, 25_000, 2_500, nodes*(64+32), func(t *testing.T, maxKeys int) ratelimit.Store {
		return &copying{everywhere: everywhere{m: newMesh(t, nodes, Config{MaxKeys: maxKeys, Deadline: time.Minute})}}
	})
}

// copying is a cluster whose nodes send each other copies between checks, as Run does.
type copying struct {
	everywhere
	checks int
}

func (c *copying) Take(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) ratelimit.Decision {
	if c.checks++; c.checks%500 == 0 {
		for _, n := range c.m.nodes {
			n.copyDirty()
		}
	}
	return c.everywhere.Take(ctx, now, it)
}

// How long owners have not failed is told by a clock that a step of the wall clock, or of the database's, does not reach.
func TestOutageEndsByAClockThatNeverSteps(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 1, Config{})
	n := m.nodes[0]
	before := n.outage.clock.Now()
	if m.now.Add(int64(24 * time.Hour)); n.outage.clock.Now() >= before.Add(24*time.Hour) {
		t.Error("a clock that steps is what tells how long an outage has been over")
	}
	n.outage.clock = m.clock // steady from here on
	n.fell(errMalformed)
	m.now.Add(int64(time.Second - 1))
	if n.outage.well(); !n.outage.down.Load() {
		t.Error("an outage ends within a second of the last failure")
	}
	m.now.Add(1)
	if n.outage.well(); n.outage.down.Load() {
		t.Error("an outage goes on a second after the last failure")
	}
}

func TestNewRefuses(t *testing.T) {
	t.Parallel()
	if _, err := New(Config{Clock: ratelimit.NewClock()}); err == nil {
		t.Error("accepted without a network")
	}
	if _, err := New(Config{Network: &node{}}); err == nil {
		t.Error("accepted without a clock")
	}
}

// Of a request with several owners, one of whom can't be asked, each part is given back where it was booked.
func TestPartsAreGivenBackWhereTheyWereBooked(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 3, Config{})
	p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 6, Scale: time.Hour})
	here, there, away := m.ownedBy(p, m.nodes[0], 1), m.ownedBy(p, m.nodes[1], 1), m.ownedBy(p, m.nodes[2], 1)
	m.nodes[2].gone.Store(true) // and still in the views
	for _, items := range [][]ratelimit.Item{{here, away, there}, {away, here}, {there, here, away}, {away}} {
		d := m.nodes[0].TakeAll(t.Context(), begin, items)
		if !d.Allowed {
			t.Fatalf("%+v", d)
		}
		for i, it := range items {
			if alone := d.Booking(i).Alone; alone != (it == away) {
				t.Errorf("item %d of %d: booked alone: %v", i, len(items), alone)
			}
			m.nodes[0].Refund(t.Context(), d.Booking(i), it)
		}
		for _, it := range []ratelimit.Item{here, there} {
			if got := m.nodes[1].used(t, it); got != 0 {
				t.Errorf("%d used at an owner after all was given back", got)
			}
		}
		if u, _ := m.nodes[0].alone.Peek(t.Context(), begin, away); u.Used != 4 { // what is not this node's share of 6
			t.Errorf("%d used of the share after all was given back", u.Used-4)
		}
	}
}
