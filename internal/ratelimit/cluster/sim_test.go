package cluster

import (
	"container/heap"
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// begin is the first moment of a window of every scale up to an hour.
const begin = ratelimit.Instant(500_000 * time.Hour)

// step is the resolution of simulated time.
const step = 100 * time.Microsecond

// sim is a cluster in one goroutine and simulated time: the real stores, and a
// network that delays, loses and cuts.
type sim struct {
	tb    testing.TB
	now   ratelimit.Instant
	rng   *rand.Rand
	nodes []*node
	mail  mailbox
	net   conditions
	nextN cluster.ID
}

type conditions struct {
	latency time.Duration             // mean one-way delay; half of it is fixed
	loss    float64                   // part of the messages that never arrive
	skew    func(i int) time.Duration // of node i's clock
	cut     func(from, to *node) bool // asked when a message is sent
	plain   bool                      // no rule: regular reports alone
	full    bool                      // RATE_LIMIT_PARTITION=full
	maxKeys int
}

type node struct {
	*Store
	sim      *sim
	id       cluster.ID
	index    int
	skew     ratelimit.Instant
	view     *cluster.View
	dead     bool
	hangs    bool // what is sent to it waits
	nextPoll ratelimit.Instant
	waiting  []letter
	messages int
	bytes    int
}

type letter struct {
	at   ratelimit.Instant
	seq  int
	from *node
	to   *node
	body []byte
}

type mailbox []letter

func (m mailbox) Len() int { return len(m) }
func (m mailbox) Less(i, j int) bool {
	return m[i].at < m[j].at || m[i].at == m[j].at && m[i].seq < m[j].seq
}
func (m mailbox) Swap(i, j int) { m[i], m[j] = m[j], m[i] }
func (m *mailbox) Push(x any)   { *m = append(*m, x.(letter)) }
func (m *mailbox) Pop() any {
	l := (*m)[len(*m)-1]
	*m = (*m)[:len(*m)-1]
	return l
}

func newSim(tb testing.TB, nodes int, c conditions) *sim {
	tb.Helper()
	if raceEnabled {
		tb.Skip("one goroutine in simulated time: slow to watch, and nothing to find")
	}
	s := &sim{tb: tb, now: begin, rng: rand.New(rand.NewPCG(1, uint64(nodes))), net: c}
	for i := range nodes {
		s.nodes = append(s.nodes, s.start(i))
	}
	s.views()
	for _, n := range s.nodes {
		if err := n.Sync(tb.Context()); err != nil {
			tb.Fatal(err)
		}
		n.nextPoll = n.clock.Now() + ratelimit.Instant(s.rng.Float64()*float64(DefaultSyncInterval))
		n.nextTick = n.nextPoll
	}
	return s
}

// start makes a node with a new identity; nobody knows it before views.
func (s *sim) start(index int) *node {
	s.nextN++
	n := &node{sim: s, id: s.nextN, index: index, view: &cluster.View{Visible: 1, Alive: 1}}
	if s.net.skew != nil {
		n.skew = ratelimit.Instant(s.net.skew(index))
	}
	store, err := New(Config{
		Network: n, MaxKeys: s.net.maxKeys, Plain: s.net.plain, FullOnSplit: s.net.full,
		Clock: ratelimit.ClockFrom(func() ratelimit.Instant { return s.now + n.skew }),
	})
	if err != nil {
		s.tb.Fatal(err)
	}
	n.Store = store
	return n
}

// views lets every node see all that live, those behind a cut as invisible.
func (s *sim) views() {
	for _, n := range s.nodes {
		if n.hangs {
			continue
		}
		v := &cluster.View{Visible: 1, Alive: 1}
		for _, o := range s.nodes {
			if o == n || o.dead {
				continue
			}
			p := cluster.Peer{ID: o.id, Standing: cluster.Visible, Latency: s.net.latency, Session: 1}
			v.Alive++
			if o.hangs || s.net.cut != nil && s.net.cut(o, n) {
				p.Standing = cluster.Split
			} else {
				v.Visible++
			}
			v.Peers = append(v.Peers, p)
		}
		n.view = v
		n.look(n.clock.Now())
	}
}

func (n *node) ID() cluster.ID              { return n.id }
func (n *node) View() *cluster.View         { return n.view }
func (n *node) Flush(context.Context) error { return nil }

func (n *node) Broadcast(_ cluster.Topic, body []byte) int {
	n.messages++
	n.bytes += len(body)
	for _, o := range n.sim.nodes {
		if o != n {
			n.post(o, body)
		}
	}
	return len(n.view.Peers)
}

// post sends a letter, unless it is lost.
func (n *node) post(o *node, body []byte) {
	if o.dead || n.sim.net.cut != nil && n.sim.net.cut(n, o) || n.sim.rng.Float64() < n.sim.net.loss {
		return
	}
	half := float64(n.sim.net.latency) / 2
	delay := ratelimit.Instant(half + n.sim.rng.ExpFloat64()*half)
	heap.Push(&n.sim.mail, letter{n.sim.now + delay, n.sim.mail.Len() + n.messages<<16, n, o, body})
}

func (n *node) Send(to cluster.ID, _ cluster.Topic, body []byte) bool {
	n.messages++
	for _, o := range n.sim.nodes {
		if o.id == to {
			n.post(o, body)
		}
	}
	return true
}

// reset asks nodes, as an operator does.
func (s *sim) reset(it ratelimit.Item, nodes ...*node) {
	for _, n := range nodes {
		if err := n.Reset(s.tb.Context(), s.now, it); err != nil {
			s.tb.Fatal(err)
		}
	}
}

func (n *node) handler(id cluster.ID) (cluster.Handler, error) {
	for _, o := range n.sim.nodes {
		if o.id == id && !o.dead && (n.sim.net.cut == nil || !n.sim.net.cut(o, n)) {
			return o.Handler(), nil
		}
	}
	return cluster.Handler{}, cluster.ErrUnreachable
}

func (n *node) Fetch(ctx context.Context, from cluster.ID, _ cluster.Topic, each func([]byte) error) error {
	h, err := n.handler(from)
	if err != nil {
		return err
	}
	return h.State(ctx, n.id, each)
}

func (n *node) Call(ctx context.Context, to cluster.ID, _ cluster.Topic, request []byte) ([]byte, error) {
	h, err := n.handler(to)
	if err != nil {
		return nil, err
	}
	return h.Answer(ctx, n.id, request)
}

func (s *sim) deliver(l letter) {
	switch {
	case l.to.dead:
	case l.to.hangs:
		l.to.waiting = append(l.to.waiting, l)
	default:
		if err := l.to.receive(l.from.id, l.body, l.to.clock.Now()); err != nil {
			s.tb.Fatal(err)
		}
	}
}

// run lets time pass: deliver, poll, and call each for every node and step.
func (s *sim) run(d time.Duration, each func(n *node, now ratelimit.Instant)) {
	for end := s.now.Add(d); s.now < end; s.now = s.now.Add(step) {
		for len(s.mail) > 0 && s.mail[0].at <= s.now {
			s.deliver(heap.Pop(&s.mail).(letter))
		}
		for _, n := range s.nodes {
			if n.dead || n.hangs {
				continue
			}
			now := n.clock.Now()
			if each != nil {
				each(n, now)
			}
			if now >= n.nextPoll || n.pending.Load() != 0 {
				n.nextPoll = n.poll(now)
			}
		}
	}
}

func poisson(r *rand.Rand, m float64) int {
	if m <= 0 {
		return 0
	}
	if m > 30 {
		return int(max(0, math.Round(m+math.Sqrt(m)*r.NormFloat64())))
	}
	l, k, p := math.Exp(-m), 0, 1.0
	for {
		if p *= r.Float64(); p <= l {
			return k
		}
		k++
	}
}

// load is the requests per second that node i of n gets at t seconds.
type load func(i, n int, t, limit float64) float64

// tally counts what happened, by the window in which the deciding node booked it.
type tally struct {
	limit                      float64
	admitted, offered, refused []float64
	seconds                    float64
	nodes, messages, bytes     int
}

// offer runs a load on one key for so many windows.
func (s *sim) offer(it ratelimit.Item, l load, windows int) *tally {
	p := it.Policy
	t := &tally{
		limit: float64(p.Limit()), nodes: len(s.nodes), seconds: float64(windows) * float64(p.ScaleMs()) / 1000,
		admitted: make([]float64, windows+2), offered: make([]float64, windows+2), refused: make([]float64, windows+2),
	}
	first, _ := p.Window(s.now)
	start := s.now
	for _, n := range s.nodes {
		n.messages, n.bytes = 0, 0
	}
	s.run(time.Duration(windows)*time.Duration(p.ScaleMs())*time.Millisecond, func(n *node, now ratelimit.Instant) {
		at := seconds(s.now - start)
		for k := poisson(s.rng, l(n.index, len(s.nodes), at, t.limit)*step.Seconds()); k > 0; k-- {
			d := n.Take(s.tb.Context(), now, it)
			win, _ := p.Window(d.At)
			w := min(max(int(int32(win-first)), 0), windows+1)
			t.offered[w]++
			if d.Allowed {
				t.admitted[w]++
			} else if t.admitted[w] < t.limit {
				t.refused[w]++
			}
		}
	})
	for _, n := range s.nodes {
		t.messages += n.messages
		t.bytes += n.bytes
	}
	return t
}

type figures struct {
	over, overMax  float64 // parts of the limit
	under          float64 // left unused though it was asked for, mean
	refused        float64 // refused within the limit, worst window
	messages, kilo float64 // per node and second
}

// figures sums up windows from skip on, all but the last, which may be cut short.
func (t *tally) figures(skip int) figures {
	var f figures
	n := len(t.admitted) - 2
	for w := skip; w < n; w++ {
		over := max(0, t.admitted[w]-t.limit) / t.limit
		f.over += over / float64(n-skip)
		f.overMax = max(f.overMax, over)
		f.under += max(0, min(t.limit, t.offered[w])-t.admitted[w]) / t.limit / float64(n-skip)
		if t.offered[w] <= t.limit {
			f.refused = max(f.refused, t.refused[w]/t.limit)
		}
	}
	f.messages = float64(t.messages) / float64(t.nodes) / t.seconds
	f.kilo = float64(t.bytes) / float64(t.nodes) / t.seconds / 1000
	return f
}

func even(x float64) load {
	return func(_, n int, _, limit float64) float64 { return x * limit / float64(n) }
}

func zipf(x float64) load {
	return func(i, n int, _, limit float64) float64 {
		h := 0.0
		for k := 1; k <= n; k++ {
			h += 1 / float64(k)
		}
		return x * limit / float64(i+1) / h
	}
}

func sticky(x float64) load {
	return func(i, _ int, _, limit float64) float64 {
		if i == 0 {
			return x * limit
		}
		return 0
	}
}

// spike sends x times the limit within 5 ms to one node, every 1.3 s to another.
func spike(x float64) load {
	return func(i, n int, t, limit float64) float64 {
		if i == int(t/1.3)%n && math.Mod(t, 1.3) < 0.005 {
			return x * limit / 0.005
		}
		return 0
	}
}

// moving goes to one node at a time, another every 0.35 s.
func moving(x float64) load {
	return func(i, n int, t, limit float64) float64 {
		if int(t/0.35)%n == i {
			return x * limit
		}
		return 0
	}
}

// bursts are on for 0.3 s of every 1.7 s, at all nodes.
func bursts(x float64) load {
	return func(_, n int, t, limit float64) float64 {
		if math.Mod(t, 1.7) < 0.3 {
			return x * limit / float64(n)
		}
		return 0
	}
}

// cold is nothing for five seconds, then a flood of one.
func cold(x float64) load {
	return func(_, n int, t, limit float64) float64 {
		if int(t)%6 == 5 {
			return x * limit / float64(n)
		}
		return 0
	}
}

func newPolicy(tb testing.TB, r ratelimit.Rule) *ratelimit.Policy {
	tb.Helper()
	p, err := ratelimit.NewPolicy(ratelimit.ActivityCreate, r)
	if err != nil {
		tb.Fatal(err)
	}
	return p
}

func item(p *ratelimit.Policy, n uint64) ratelimit.Item {
	return ratelimit.Item{Key: ratelimit.Key{Hi: n*0x9E3779B97F4A7C15 | 2, Lo: n * 0xBF58476D1CE4E5B9}, Policy: p}
}
