package cluster

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
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
const Topic cluster.Topic = 'c'

// Network is this node's place in the cluster, as *cluster.Node of internal/cluster.
type Network interface {
	ID() cluster.ID
	View() *cluster.View
	Send(to cluster.ID, t cluster.Topic, body []byte) bool
	Broadcast(t cluster.Topic, body []byte) int
	Flush(ctx context.Context) error
	Fetch(ctx context.Context, from cluster.ID, t cluster.Topic, each func(piece []byte) error) error
	Call(ctx context.Context, to cluster.ID, t cluster.Topic, request []byte) ([]byte, error)
}

// DefaultSyncInterval is the default of Config.SyncInterval.
const DefaultSyncInterval = 100 * time.Millisecond

// Config is what a Store is made of.
type Config struct {
	// MaxKeys bounds the keys held; see local.Config.
	MaxKeys int
	// Network connects the nodes; its handler for Topic must be Store.Handler. Required.
	Network Network
	// Clock is the cluster's: nodes number their windows by it. Required.
	Clock ratelimit.Clock
	// SyncInterval is the time between two regular reports,
	// RATE_LIMIT_SYNC_INTERVAL_MS; 0 means DefaultSyncInterval.
	SyncInterval time.Duration
	// FullOnSplit makes each side of a split enforce the whole limit instead of
	// its share: RATE_LIMIT_PARTITION=full.
	FullOnSplit bool
	// Plain, for tests only, sends regular reports and nothing else: no early ones,
	// no dead reckoning. It shows what the rule is worth.
	Plain bool
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger; nil means slog.Default.
	Logger *slog.Logger
}

// Store implements ratelimit.Store over the nodes of a cluster. Checks are decided
// in this node's memory.
type Store struct {
	*local.Store
	network  Network
	clock    ratelimit.Clock
	interval time.Duration
	full     bool
	plain    bool
	log      *slog.Logger

	pools   [pools]pool
	stride  atomic.Int32 // cells of an entry
	epochs  atomic.Uint32
	pending atomic.Uint64 // pools with early reports queued
	wake    chan struct{}
	behind  chan struct{}      // a peer's state must be asked for
	changed chan ratelimit.Key // peers must be asked for what they have of a key

	peersMu sync.Mutex // guards the assignment of slots; never taken on the path of a check
	slotOf  map[cluster.ID]int
	peers   []*peer // by slot; nil: free
	seen    *cluster.View
	synced  map[cluster.ID]uint64 // one more than the session in which the peer's state was had
	table   atomic.Pointer[table]

	out      sync.Mutex // guards what follows: one goroutine encodes at a time
	batch    uint32
	w        writer
	lastTick ratelimit.Instant
	nextTick ratelimit.Instant
	ticks    int
	later    [4][]uint32 // early reports that wait for minGap, by the millisecond in which they are due
	laterMs  int64       // the last millisecond that was looked at
	links    []uint32    // scratch of tick
	urgent   []uint32    // scratch of early

	m metrics
}

var (
	_ ratelimit.Store = (*Store)(nil)
	_ local.Peers     = (*Store)(nil)
)

// table is what checks need to know of the peers.
type table struct {
	n     int // nodes that share a limit, this one included
	slots []standing
}

type standing struct {
	id            cluster.ID
	visible, away bool    // neither: dead, or never seen
	latency       float64 // seconds
}

// New makes a store. The error is of the configuration or of the registration of metrics.
func New(c Config) (*Store, error) {
	if c.Network == nil || c.Clock.IsZero() {
		return nil, errors.New("ratelimit/cluster: a network and a clock are required")
	}
	s := &Store{
		network: c.Network, clock: c.Clock, interval: c.SyncInterval, full: c.FullOnSplit, plain: c.Plain, log: c.Logger,
		wake: make(chan struct{}, 1), slotOf: map[cluster.ID]int{}, synced: map[cluster.ID]uint64{}, behind: make(chan struct{}, 1), changed: make(chan ratelimit.Key, maxInquiries),
	}
	if s.interval == 0 {
		s.interval = DefaultSyncInterval
	}
	if s.interval < 10*time.Millisecond || s.interval > 10*time.Second {
		return nil, fmt.Errorf("ratelimit/cluster: a sync interval of %v", s.interval)
	}
	if s.log == nil {
		s.log = slog.Default()
	}
	s.stride.Store(2)
	s.table.Store(&table{n: 1})
	var err error
	counts := local.Config{MaxKeys: c.MaxKeys, Clock: c.Clock, Peers: s}
	if c.Registerer != nil {
		counts.Registerer = prometheus.WrapRegistererWith(prometheus.Labels{"backend": "cluster"}, c.Registerer)
	}
	if s.Store, err = local.New(counts); err != nil {
		return nil, err
	}
	if err := s.register(c.Registerer); err != nil {
		return nil, fmt.Errorf("ratelimit/cluster: register metrics: %w", err)
	}
	return s, nil
}

// Backend implements ratelimit.Store.
func (s *Store) Backend(ratelimit.Bucket) string { return "cluster" }

// Take implements ratelimit.Store. It allocates nothing.
func (s *Store) Take(_ context.Context, now ratelimit.Instant, it ratelimit.Item) (d ratelimit.Decision) {
	s.Spend(&d, now, it)
	return d
}

// Others implements local.Peers: reported and expected, as of this millisecond.
func (s *Store) Others(link uint32, p *ratelimit.Policy, win uint32, now ratelimit.Instant) (taken, before, thin uint32) {
	e, c, i := s.entry(link)
	ms := uint32(uint64(now) / 1e6)
	h := e.head.Load()
	if m := uint32(h >> 32); m != ms && m != always {
		h = s.renew(link, e, c, i, p, win, now)
	}
	return uint32(h), e.before.Load(), e.use.Load() >> thinShift
}

// renew computes an entry's head for this millisecond, unless somebody else does.
func (s *Store) renew(link uint32, e *entry, c *chunk, i uint32, p *ratelimit.Policy, win uint32, now ratelimit.Instant) (head uint64) {
	ms, h := uint32(uint64(now)/1e6), e.head.Load()
	if !c.mu.TryLock() {
		// Somebody is at it. The value of a moment ago will do, if it is of this window.
		if _, into := p.Window(now); h != 0 && ms-uint32(h>>32) <= 3 && into > 4 {
			return h
		}
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	h = e.head.Load()
	if m := uint32(h >> 32); m == ms || m == always {
		return h
	}
	cells := c.of(i)
	until := uint32(always)
	if s.Withheld(p) != 0 || slices.ContainsFunc(cells, func(c cell) bool { return c.batch != 0 }) {
		until = ms
	}
	taken, before := s.compute(s.usage(link, e).attempts(), cells, p, win, now)
	e.before.Store(before)
	h = uint64(until)<<32 | uint64(taken)
	e.head.Store(h)
	return h
}

// compute is the sum of the rule over the peers; demand is this node's own. The chunk is locked.
func (s *Store) compute(demand float64, cells []cell, p *ratelimit.Policy, win uint32, now ratelimit.Instant) (taken, before uint32) {
	t := s.table.Load()
	rum := rumour{total: demand}
	for j := range cells {
		if t.visible(j) {
			rum.total += float64(cells[j].load(win).demand)
		}
	}
	limit := float64(p.Limit())
	rum.worth, rum.interval = worthTelling(p.Quota(), t.n), s.interval.Seconds()
	start := p.WindowStart(win)
	var here, away, unseen, past float64
	for j := range cells {
		if cells[j].batch == 0 {
			continue
		}
		r := cells[j].load(win)
		windows := p.Algorithm() != ratelimit.TokenBucket
		if windows {
			past += float64(r.before(win))
			if t.away(j) {
				away += float64(r.in(win))
				continue
			}
			here += float64(r.in(win))
		}
		if s.plain || r.demand == 0 || !t.visible(j) {
			continue
		}
		rum.demand, rum.age, rum.latency = float64(r.demand), s.since(r.at, now), t.slots[j].latency
		if rum.stale() {
			continue
		}
		if !windows {
			burst := float64(p.Quota())
			rum.left = max(0, burst-float64(r.known))
			unseen += rum.expectedTokens(limit*1000/float64(p.ScaleMs()), burst, t.n)
			continue
		}
		if r.win == win {
			rum.left = max(0, limit-float64(r.known))
		} else {
			rum.left = limit
			rum.age = min(rum.age, seconds(now-start))
		}
		unseen += rum.expected(t.n)
	}
	taken = units(here + unseen + beyond(away, float64(s.withheld(p))))
	return taken, units(past)
}

func (s *Store) withheld(p *ratelimit.Policy) uint32 {
	if p.Algorithm() == ratelimit.TokenBucket { // the refill is shared, not the burst
		return 0
	}
	return s.Withheld(p)
}

func (t *table) visible(slot int) bool { return slot < len(t.slots) && t.slots[slot].visible }
func (t *table) away(slot int) bool    { return slot < len(t.slots) && t.slots[slot].away }

// units rounds down: who stands at a whole number below the limit is admitted.
func units(f float64) uint32 { return uint32(min(max(f, 0), ratelimit.MaxLimit)) }

// stampBits of ticks of 65.536 µs are the time that registers keep; they wrap after almost five hours.
const stampBits = 28

func stamp(now ratelimit.Instant) uint32 { return uint32(uint64(now)>>16) & (1<<stampBits - 1) }

// apart is a less b in ticks, of two stamps less than two hours from each other.
func apart(a, b uint32) int32 { return int32((a-b)<<(32-stampBits)) >> (32 - stampBits) }

// since is the time in seconds since a stamp, 0 if it is of the future.
func (s *Store) since(at uint32, now ratelimit.Instant) float64 {
	return float64(max(apart(stamp(now), at), 0)) * 65536e-9
}

const markPending = math.MaxUint32

// Passed implements local.Peers.
func (s *Store) Passed(c local.Counter, p *ratelimit.Policy, now ratelimit.Instant) {
	link, mark := c.Link()
	state, shape := c.Load()
	count := uint32(state.Word)
	if shape == 0 || mark == markPending || count <= mark {
		return
	}
	n := s.table.Load().n
	if n == 1 {
		c.SwapMark(mark, count+p.Limit()/8)
		return
	}
	if link == 0 {
		if m := uint32(worthTelling(p.Limit(), n)); count <= m {
			c.SwapMark(mark, m)
			return
		}
		if link = s.attach(c.Key()); link == 0 {
			return
		}
		if c, _ = s.Counter(c.Key()); c == (local.Counter{}) {
			return
		}
	}
	u, rested := s.use(link, p)
	q := quantum(float64(p.Limit()), n)
	if s.plain {
		c.SwapMark(mark, markPending)
		return
	}
	if float64(count) < q && mark < uint32(q) { // the window's first report is not due yet
		c.SwapMark(mark, uint32(math.Ceil(q))-1)
		return
	}
	if rested && count == mark+1 { // it was as good as told when it came to rest
		c.SwapMark(mark, count)
		return
	}
	if c.SwapMark(mark, markPending) {
		s.hurry(link, u)
	}
}

// attach gives a key an entry; 0 when it can't have one.
func (s *Store) attach(k ratelimit.Key) uint32 {
	_, link, _ := s.Attach(k, func() uint32 { return s.alloc(k) })
	return link
}

// use notes that a key is in use here, and tells whether it is so anew.
func (s *Store) use(link uint32, p *ratelimit.Policy) (u *usage, anew bool) {
	e, _, _ := s.entry(link)
	u = s.used(link, e)
	if q := p.Quota() + 1; u.quota.Load() != q {
		u.quota.Store(q)
	}
	return u, s.activate(link, u)
}

// Returned implements local.Peers.
func (s *Store) Returned(c local.Counter, p *ratelimit.Policy, _ ratelimit.Instant) {
	if s.table.Load().n == 1 {
		return
	}
	link, _ := c.Link()
	if link == 0 {
		if link = s.attach(c.Key()); link == 0 {
			return
		}
	}
	u, _ := s.use(link, p)
	_, chunk, _ := s.entry(link)
	chunk.mu.Lock()
	u.force = true
	chunk.mu.Unlock()
}

// Spent implements local.Peers.
func (s *Store) Spent(c local.Counter, p *ratelimit.Policy, n int64, _ ratelimit.Instant) {
	link, _ := c.Link()
	if link == 0 {
		if s.table.Load().n == 1 {
			return
		}
		if link = s.attach(c.Key()); link == 0 {
			return
		}
		q := tokenQuantum(float64(p.Quota()), float64(p.Limit())*1000/float64(p.ScaleMs()), s.interval.Seconds(), s.table.Load().n)
		u, _ := s.use(link, p)
		u.early.CompareAndSwap(0, uint32(math.Ceil(q))-1)
	}
	u, _ := s.use(link, p)
	spent := u.spent.Add(uint32(n))
	if n > 0 && int32(spent-u.early.Load()) > 0 && !s.plain {
		s.hurry(link, u)
	}
}

// Refused implements local.Peers: it counts the demand.
func (s *Store) Refused(c local.Counter, link uint32, p *ratelimit.Policy, cost uint32, _ ratelimit.Instant) {
	if link == 0 {
		if p.Limit() == 0 || s.table.Load().n == 1 {
			return
		}
		if link = s.attach(c.Key()); link == 0 {
			return
		}
	}
	u, _ := s.use(link, p)
	u.tried.Add(cost)
}

// Rolled implements local.Peers.
func (s *Store) Rolled(link uint32, word uint64) {
	e, _, _ := s.entry(link)
	u := s.usage(link, e)
	if u == nil {
		if uint32(word) == 0 {
			return // only the peers have used it
		}
		u = s.used(link, e)
	}
	u.last.Store(word)
	if d := int32(uint32(word) - u.base.Swap(0)); d > 0 {
		u.tried.Add(uint32(d))
	}
}

// Changed implements local.Peers: what the others told under the new policy, while this
// node still counted under the old one, was of no use to it, so they are asked.
func (s *Store) Changed(k ratelimit.Key) {
	if s.table.Load().n == 1 {
		return
	}
	select {
	case s.changed <- k:
	default: // so many at once: their next reports tell
	}
}

// Convert implements local.Peers. Every node converts its own count; what the
// peers have is asked for, and is converted here until it comes.
func (s *Store) Convert(link uint32, shape uint64, p *ratelimit.Policy, state ratelimit.State, now ratelimit.Instant) ratelimit.State {
	e, c, i := s.entry(link)
	u := s.used(link, e)
	c.mu.Lock()
	defer c.mu.Unlock()
	cells := c.of(i)
	old := ratelimit.FromShape(shape)
	near, _ := old.Window(now)
	was, is := old.Algorithm() == ratelimit.TokenBucket, p.Algorithm() == ratelimit.TokenBucket
	e.head.Store(0)
	u.told, u.toldAt, u.force = told{}, 0, true
	u.base.Store(0)
	u.quota.Store(p.Quota() + 1)
	switch {
	case was && is:
		return p.Convert(shape, state, now)
	case was: // the bucket holds what all have spent: each has its part of that
		win, _ := p.Window(now)
		own := p.Fresh(now)
		own.Word += uint64(u.divide(cells, near, win, old.Used(state, now)))
		return own
	}
	index, _ := p.Window(now)
	others := uint32(0)
	for j := range cells {
		r := cells[j].load(near)
		used := old.Used(ratelimit.State{Word: uint64(r.win)<<32 | uint64(r.count), Prev: r.prev}, now)
		others = min(others+used, ratelimit.MaxLimit)
		r.win, r.count, r.prev, r.known = index, used, 0, used
		if is {
			r.win, r.count, r.known = 0, 0, 0
		}
		cells[j].store(r)
	}
	converted := p.Convert(shape, state, now)
	if is && p.Limit() > 0 {
		converted.Word += uint64(p.TokenTime(min(others, p.Quota())))
		u.spent.Store(0)
		u.early.Store(0)
		u.epoch = s.epochs.Add(1)
	}
	return converted
}

// divide turns what is used of a token bucket into counts of a window: each node has the part that it had in what was
// spent, as far as known, else as much as any other. It returns this node's own; the others' stand until they report. The
// chunk is locked.
func (u *usage) divide(cells []cell, near, win, used uint32) (own uint32) {
	all, heard := uint64(u.spent.Load()), uint64(1)
	for j := range cells {
		if cells[j].batch != 0 {
			all += uint64(cells[j].load(near).count)
			heard++
		}
	}
	own = used
	for j := range cells {
		if cells[j].batch == 0 {
			continue
		}
		r := cells[j].load(near)
		part := uint64(used) / heard
		if all > 0 {
			part = uint64(float64(used) * float64(r.count) / float64(all))
		}
		r.win, r.count, r.prev, r.known = win, uint32(part), 0, used
		own -= min(own, r.count)
		cells[j].store(r)
	}
	return own
}

// Emptied implements local.Peers: what others were known to have spent is taken out as well, and they are told.
func (s *Store) Emptied(link uint32, shape uint64, at ratelimit.Instant) {
	e, c, i := s.entry(link)
	u := s.usage(link, e)
	p := ratelimit.FromShape(shape)
	win, _ := p.Window(at)
	c.mu.Lock()
	cells := c.of(i)
	for j := range cells {
		r := cells[j].load(win)
		r.forget(&p, at)
		cells[j].store(r)
	}
	e.head.Store(0)
	if u != nil {
		if p.Algorithm() == ratelimit.TokenBucket { // what is told of it counts from here on
			u.spent.Store(0)
			u.early.Store(0)
			u.epoch = s.epochs.Add(1)
		} else if last := u.last.Load(); int32(uint32(last>>32)-win) <= 0 {
			u.last.Store(0)
		}
		u.base.Store(0)
		u.force = true
	}
	c.mu.Unlock()
	if u != nil && u.quota.Load() != 0 {
		s.activate(link, u)
		s.hurry(link, u)
	}
}

// Peek implements ratelimit.Store; it never fails. When the policy has changed since this node last applied one, the
// others are asked first what they have under the new one.
func (s *Store) Peek(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	if c, ok := s.Counter(it.Key); ok && s.table.Load().n > 1 {
		if _, shape := c.Load(); shape != it.Policy.Shape() {
			_, _ = s.Store.Peek(ctx, now, it) // never fails
			s.inquireOf(ctx, []ratelimit.Key{it.Key})
		}
	}
	return s.Store.Peek(ctx, now, it)
}
