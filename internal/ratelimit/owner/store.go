package owner

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// Topic is the store's in a node's connections.
const Topic cluster.Topic = 'o'

// Network is this node's place in the cluster, as *cluster.Node.
type Network interface {
	ID() cluster.ID
	View() *cluster.View
	Send(to cluster.ID, t cluster.Topic, body []byte) bool
	Fetch(ctx context.Context, from cluster.ID, t cluster.Topic, each func(piece []byte) error) error
	Call(ctx context.Context, to cluster.ID, t cluster.Topic, request []byte) ([]byte, error)
}

// Config is what a Store is made of.
type Config struct {
	// MaxKeys bounds the keys that this node owns or keeps a copy of; see local.Config.
	MaxKeys int
	// Network connects the nodes; its handler for Topic must be Store.Handler. Required.
	Network Network
	// Clock is the cluster's. What others ask with a time more than maxSkew from it
	// is decided by it. Required.
	Clock ratelimit.Clock
	// Deadline is how long a check waits for the owner of its key; 0 means DefaultDeadline.
	// Those that guard credentials wait for guardDeadline at least.
	Deadline time.Duration
	// FullOnSplit makes each side of a split enforce the whole limit instead of
	// its share: RATE_LIMIT_PARTITION=full.
	FullOnSplit bool
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger; nil means slog.Default.
	Logger *slog.Logger
}

// DefaultDeadline is the default of Config.Deadline.
const DefaultDeadline = 20 * time.Millisecond

// guardDeadline is as long as a peer that is silent counts as visible: thereafter
// the key has another owner. What comes behind a guard is a password's hash, which
// takes longer than an owner that is merely busy, and a check that gives up costs
// twice: each node then admits guesses of its own, and what the owner counts all
// the same is never given back.
const guardDeadline = 500 * time.Millisecond

const maxSkew = ratelimit.Instant(time.Second)

// Store implements ratelimit.Store by asking the owner of a key.
type Store struct {
	network  Network
	clock    ratelimit.Clock
	full     bool
	log      *slog.Logger
	patience time.Duration

	counts *local.Store // of keys that this node owns, and copies of others
	alone  *local.Store // what was decided here because an owner could not be asked

	policies policies
	place    atomic.Pointer[place]
	moved    chan struct{} // the ring has changed

	linesMu sync.Mutex
	lines   map[cluster.ID]*line

	joins joins

	dirtyMu sync.Mutex
	dirty   map[ratelimit.Key]struct{} // keys whose copy is out of date
	wake    chan struct{}

	outage outage
	m      metrics
}

var _ ratelimit.Store = (*Store)(nil)

// place is the ring that belongs to a view.
type place struct {
	view *cluster.View
	ring ring
}

// New makes a store. The error is of the configuration or of the registration of metrics.
func New(c Config) (*Store, error) {
	if c.Network == nil || c.Clock.IsZero() {
		return nil, errors.New("ratelimit/owner: a network and a clock are required")
	}
	s := &Store{
		network: c.Network, clock: c.Clock, full: c.FullOnSplit, log: c.Logger, patience: c.Deadline,
		moved: make(chan struct{}, 1), lines: map[cluster.ID]*line{},
		dirty: map[ratelimit.Key]struct{}{}, wake: make(chan struct{}, 1),
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	s.outage.log, s.outage.clock = s.log, ratelimit.NewClock()
	if s.patience == 0 {
		s.patience = DefaultDeadline
	}
	var err error
	if s.counts, err = local.New(local.Config{MaxKeys: c.MaxKeys, Clock: c.Clock, Registerer: labelled(c.Registerer, "owner")}); err != nil {
		return nil, err
	}
	if s.alone, err = local.New(local.Config{MaxKeys: c.MaxKeys, Clock: c.Clock, Registerer: labelled(c.Registerer, "owner_alone")}); err != nil {
		return nil, err
	}
	if err := s.register(c.Registerer); err != nil {
		return nil, fmt.Errorf("ratelimit/owner: register metrics: %w", err)
	}
	s.place.Store(&place{ring: ring{c.Network.ID()}})
	s.ring()
	return s, nil
}

func labelled(reg prometheus.Registerer, backend string) prometheus.Registerer {
	if reg == nil {
		return nil
	}
	return prometheus.WrapRegistererWith(prometheus.Labels{"backend": backend}, reg)
}

// Backend implements ratelimit.Store.
func (s *Store) Backend(ratelimit.Bucket) string { return "owner" }

// ring returns the present ring, and takes over a view that has changed.
func (s *Store) ring() ring {
	v, p := s.network.View(), s.place.Load()
	if p.view == v {
		return p.ring
	}
	r := newRing(s.network.ID(), v)
	if !s.place.CompareAndSwap(p, &place{v, r}) {
		return s.place.Load().ring
	}
	s.alone.SetShare(1, v.Alive)
	if s.full {
		s.counts.SetShare(1, 1)
	} else {
		s.counts.SetShare(v.Visible, v.Alive)
	}
	if !slices.Equal(p.ring, r) {
		select {
		case s.moved <- struct{}{}:
		default:
		}
	}
	return r
}

// Take implements ratelimit.Store.
func (s *Store) Take(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) ratelimit.Decision {
	if to, _ := s.ring().first(it.Key); to == s.network.ID() && !s.joins.going.Load() {
		d := s.counts.Take(ctx, now, it)
		if d.Allowed {
			s.stale(it.Key)
		}
		return d
	}
	return s.TakeAll(ctx, now, []ratelimit.Item{it})
}

// TakeAll implements ratelimit.Store. When the items have several owners, all are
// asked before any spends.
func (s *Store) TakeAll(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item) ratelimit.Decision {
	return s.takeAll(ctx, now, s.group(items, s.route))
}

func (s *Store) takeAll(ctx context.Context, now ratelimit.Instant, groups []*group) ratelimit.Decision {
	if len(groups) == 1 {
		return groups[0].decide(ctx, opTake, now)
	}
	if d := decideAll(ctx, groups, opAsk, now); !d.Allowed {
		return d
	}
	d := decideAll(ctx, groups, opTake, now)
	if !d.Allowed { // somebody came in between
		for _, g := range groups {
			if g.d.Allowed {
				for i, it := range g.items {
					s.refund(ctx, g.target, g.d.Booking(int(g.index[i])), it)
				}
			}
		}
	}
	return d
}

// target is who is asked to decide on a key. An owner decides, or knows who else
// does while keys move; whoever is asked for the last time decides.
type target struct {
	to   cluster.ID
	last bool
}

// group is the items of a request on which the same node decides.
type group struct {
	s *Store
	target
	items []ratelimit.Item
	index []uint8 // of items in the request
	alone bool    // the owner could not be asked
	d     ratelimit.Decision
}

func (s *Store) group(items []ratelimit.Item, route func(ratelimit.Key) target) []*group {
	var groups []*group
	for i, it := range items {
		to := route(it.Key)
		n := slices.IndexFunc(groups, func(g *group) bool { return g.target == to })
		if n < 0 {
			n = len(groups)
			groups = append(groups, &group{s: s, target: to})
		}
		groups[n].items = append(groups[n].items, it)
		groups[n].index = append(groups[n].index, uint8(i))
	}
	return groups
}

// decideAll asks the owners at the same time; the strictest decision is the answer.
func decideAll(ctx context.Context, groups []*group, k kind, now ratelimit.Instant) ratelimit.Decision {
	var wg sync.WaitGroup
	for _, g := range groups[1:] {
		wg.Go(func() { g.d = g.decide(ctx, k, now) })
	}
	groups[0].d = groups[0].decide(ctx, k, now)
	wg.Wait()
	strictest, at, alone := groups[0].d, groups[0].d.At, groups[0].d.Alone
	for _, g := range groups[1:] {
		if g.d.Stricter(strictest) {
			strictest = g.d
		}
		at, alone = max(at, g.d.At), alone|g.d.Alone
	}
	strictest.At, strictest.Alone = at, alone
	return strictest
}

func (g *group) decide(ctx context.Context, k kind, now ratelimit.Instant) ratelimit.Decision {
	if !g.alone {
		res, err := g.s.ask(ctx, g.target, op{kind: k, now: now, items: g.items})
		if err == nil {
			return g.decision(res, 0)
		}
		g.alone = true
		g.s.fell(err)
	}
	o := op{kind: k, now: now, items: g.items}
	return g.decision(exec(ctx, g.s.alone, &o), ratelimit.AllAlone)
}

func (g *group) decision(r result, alone uint32) ratelimit.Decision {
	return ratelimit.Decision{
		Policy: g.items[r.item].Policy, At: r.at, Remaining: r.remaining, WaitMs: r.waitMs,
		Item: r.item, Allowed: r.allowed, Alone: alone,
	}.AsPart(g.index)
}

// ask has an op done by a node, which may be this one.
func (s *Store) ask(ctx context.Context, by target, o op) (result, error) {
	if by.to == s.network.ID() {
		return s.own(ctx, &o), nil
	}
	o.last = by.last
	s.linesMu.Lock()
	l := s.lines[by.to]
	if l == nil {
		l = &line{to: by.to, call: s.call}
		s.lines[by.to] = l
	}
	s.linesMu.Unlock()
	res, err := l.ask(ctx, o, s.patienceFor(o.items))
	switch {
	case err == nil:
		s.outage.well()
	case by.last: // the key is, or was, this node's too: what it knows is better than a share
		return s.own(ctx, &o), nil
	}
	return res, err
}

func (s *Store) patienceFor(items []ratelimit.Item) time.Duration {
	for _, it := range items {
		if it.Policy.Bucket().Info().Guard {
			return max(s.patience, guardDeadline)
		}
	}
	return s.patience
}

// hangUp forgets the lines to nodes that are gone: every start of a node has an ID of its own.
func (s *Store) hangUp(v *cluster.View) {
	s.linesMu.Lock()
	defer s.linesMu.Unlock()
	maps.DeleteFunc(s.lines, func(id cluster.ID, _ *line) bool {
		return !slices.ContainsFunc(v.Peers, func(p cluster.Peer) bool { return p.ID == id })
	})
}

// call asks several questions at once.
func (s *Store) call(ctx context.Context, to cluster.ID, qs []*question) {
	b := []byte{wireVersion}
	for _, q := range qs {
		b = appendOp(b, &q.op)
	}
	s.m.calls.Inc()
	s.m.asked.Add(float64(len(qs)))
	s.m.bytes.Add(float64(len(b)))
	answer, err := s.network.Call(ctx, to, Topic, b)
	r := reader{b: answer}
	if err == nil && r.byte() != wireVersion {
		err = errMalformed
	}
	for _, q := range qs {
		if q.err = err; err == nil {
			q.res, err = r.result(&q.op)
			q.err = err
		}
	}
}

// own does an op on the keys of this node.
func (s *Store) own(ctx context.Context, o *op) result {
	res := exec(ctx, s.counts, o)
	if o.kind == opRefund || res.allowed && (o.kind == opTake || o.kind == opReserve) {
		for _, it := range o.items {
			s.stale(it.Key)
		}
	}
	return res
}

// exec does an op on counters in memory.
func exec(ctx context.Context, counts *local.Store, o *op) result {
	var d ratelimit.Decision
	switch o.kind {
	case opTake:
		d = counts.TakeAll(ctx, o.now, o.items)
	case opAsk:
		d = counts.Ask(o.now, o.items)
	case opReserve:
		d = counts.Reserve(ctx, o.now, o.items[0], o.wait)
	case opRefund:
		for _, it := range o.items {
			counts.Refund(ctx, ratelimit.Booking{At: o.now}, it)
		}
	case opPeek:
		u, _ := counts.Peek(ctx, o.now, o.items[0]) // never fails
		d = ratelimit.Decision{At: o.now, Remaining: u.Used, WaitMs: u.WaitMs}
	}
	return result{d.Allowed, d.Item, d.Remaining, d.WaitMs, d.At}
}

// Refund implements ratelimit.Store. One that its owner does not hear of is lost,
// which only counts more.
func (s *Store) Refund(ctx context.Context, b ratelimit.Booking, it ratelimit.Item) {
	s.refund(ctx, s.route(it.Key), b, it)
}

func (s *Store) refund(ctx context.Context, to target, b ratelimit.Booking, it ratelimit.Item) {
	if b.Alone {
		s.alone.Refund(ctx, b, it)
		return
	}
	if _, err := s.ask(ctx, to, op{kind: opRefund, now: b.At, items: []ratelimit.Item{it}}); err != nil {
		s.m.fallbacks.WithLabelValues("refund_lost").Inc()
	}
}

// Reserve implements ratelimit.Store.
func (s *Store) Reserve(ctx context.Context, now ratelimit.Instant, it ratelimit.Item, maxWait time.Duration) ratelimit.Decision {
	g := s.group([]ratelimit.Item{it}, s.route)[0]
	wait := min(max(maxWait, 0), ratelimit.MaxReserve)
	res, err := s.ask(ctx, g.target, op{kind: opReserve, now: now, wait: wait, items: g.items})
	if err == nil {
		return g.decision(res, 0)
	}
	s.fell(err)
	d := s.alone.Reserve(ctx, now, it, wait)
	d.Alone = 1
	return d
}

// Peek implements ratelimit.Store. The error is of a key whose owner can't be asked.
func (s *Store) Peek(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	by := s.route(it.Key)
	res, err := s.ask(ctx, by, op{kind: opPeek, now: now, items: []ratelimit.Item{it}})
	if err != nil {
		return ratelimit.Usage{}, fmt.Errorf("ratelimit/owner: ask %v: %w", by.to, err)
	}
	p := it.Policy
	return ratelimit.Usage{Policy: p, Used: res.remaining, Remaining: p.Quota() - min(p.Quota(), res.remaining), WaitMs: res.waitMs}, nil
}

// Reset implements ratelimit.Store; it never fails. Owner, copy and share are all reset, each at its node.
func (s *Store) Reset(_ context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	s.takeReset(s.counts.NewReset(now, it), now)
	return nil
}

// takeReset forgets what was spent until a reset, whoever counted it here.
func (s *Store) takeReset(r local.Reset, now ratelimit.Instant) {
	if s.counts.TakeReset(r, now) {
		s.alone.TakeReset(r, now)
		s.stale(r.Key)
	}
}

// answer does for others what they ask of the keys of this node. Who is asked
// decides, also while nodes do not agree yet on who lives; only while keys move to a
// node that joins is another asked on, once: see joins.
func (s *Store) answer(ctx context.Context, request []byte) ([]byte, error) {
	r := reader{b: request}
	if r.byte() != wireVersion {
		return nil, errMalformed
	}
	var o op
	var moving []op // while keys move: all, to be done side by side
	var asked []ratelimit.Instant
	going := s.joins.going.Load()
	b := []byte{wireVersion}
	for n := 0; len(r.b) > 0; n++ {
		if n == maxOps {
			return nil, errMalformed
		}
		if err := r.op(&o, &s.policies); err != nil {
			return nil, err
		}
		at := o.now
		if o.kind != opRefund {
			if mine := s.clock.Now(); mine-o.now > maxSkew || o.now-mine > maxSkew {
				o.now = mine
			}
		}
		if going {
			moving, asked = append(moving, o), append(asked, at)
			o.items = nil // those stay with the op
			continue
		}
		b = appendResult(b, at, s.own(ctx, &o))
	}
	for i, res := range s.serveAll(ctx, moving) {
		b = appendResult(b, asked[i], res)
	}
	return b, nil
}
