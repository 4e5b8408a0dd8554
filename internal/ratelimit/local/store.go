package local

import (
	"context"
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/ratelimit"
)

const (
	// DefaultMaxKeys is the number of keys held unless configured otherwise.
	DefaultMaxKeys = 1_000_000

	maxShards   = 64
	keysOfShard = 1024 // a shard is not made for fewer
	// slack is how near to the limit a count may come by plain additions. Nearer,
	// or for a cost above slackCost, a compare-and-swap decides: a refused cost
	// never shows to others.
	slack     = 1024
	slackCost = 16
	// overflowLen is the number of counters that the subjects of a bucket share
	// when there is no room for more keys.
	overflowLen = 1024
	overflowHi  = 2
)

// Config is what a Store is made of.
type Config struct {
	// MaxKeys bounds the number of keys, RATE_LIMIT_MAX_KEYS; 0 means
	// DefaultMaxKeys. A key costs about 57 bytes.
	MaxKeys int
	// Clock is read when a call's time contradicts the counter, to tell a call
	// that was delayed from a clock that stepped back. The zero Clock trusts the
	// call: for tests, which pass time in.
	Clock ratelimit.Clock
	// Peers adds what other nodes spend; nil for none.
	Peers Peers
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
}

// Store implements ratelimit.Store in memory.
type Store struct {
	shards  []shard
	shift   uint // of Key.Lo, to the number of its shard
	maxKeys int  // of a shard
	clock   ratelimit.Clock
	peers   Peers
	share   atomic.Uint64 // of every limit, held<<32 | of; 0: the whole
	resets  resets

	overflowMu   sync.Mutex                                  // as shard.mu
	overflow     [ratelimit.NumBuckets]atomic.Pointer[table] // made when first needed
	overflowed   atomic.Uint64
	overflowedAt atomic.Int64
}

var _ ratelimit.Store = (*Store)(nil)

// New makes a store. The error is of the registration of metrics, or of a
// negative MaxKeys.
func New(c Config) (*Store, error) {
	if c.MaxKeys < 0 {
		return nil, fmt.Errorf("ratelimit/local: %d keys", c.MaxKeys)
	}
	if c.MaxKeys == 0 {
		c.MaxKeys = DefaultMaxKeys
	}
	n := 1
	for n < maxShards && c.MaxKeys >= 2*n*keysOfShard {
		n *= 2
	}
	s := &Store{
		shards: make([]shard, n), shift: uint(64 - bits.TrailingZeros(uint(n))),
		maxKeys: c.MaxKeys / n, clock: c.Clock, peers: c.Peers,
	}
	for i := range s.shards {
		s.shards[i].peers = c.Peers
		s.shards[i].tab.Store(newTable(minSlots))
	}
	if c.Registerer != nil {
		if err := s.register(c.Registerer); err != nil {
			return nil, fmt.Errorf("ratelimit/local: register metrics: %w", err)
		}
	}
	return s, nil
}

// Backend implements ratelimit.Store.
func (s *Store) Backend(ratelimit.Bucket) string { return "local" }

// Keys is the number of keys held, ended ones included that still have their place.
func (s *Store) Keys() int {
	n := int64(0)
	for i := range s.shards {
		n += s.shards[i].keys.Load()
	}
	return int(n)
}

func (s *Store) shard(k ratelimit.Key) *shard { return &s.shards[k.Lo>>s.shift] }

// ref is a slot in its table, and what its hi must be for a spend to count.
type ref struct {
	sl   *slot
	word *atomic.Uint64
	prev *atomic.Uint32
	hi   uint64
}

// lookup finds a key without a lock; ref.sl is nil if there is none.
func (s *Store) lookup(sh *shard, k ratelimit.Key) ref {
	t := sh.tab.Load()
	if i := t.find(k); i >= 0 {
		return t.ref(i, k.Hi)
	}
	return ref{}
}

// shared returns the overflow counter of a key; ref.sl is nil if the bucket never
// needed one.
func (s *Store) shared(k ratelimit.Key, b ratelimit.Bucket) ref {
	t := s.overflow[b].Load()
	if t == nil {
		return ref{}
	}
	return t.ref(int(k.Lo%overflowLen), overflowHi)
}

// Take implements ratelimit.Store. It allocates nothing.
func (s *Store) Take(_ context.Context, now ratelimit.Instant, it ratelimit.Item) (d ratelimit.Decision) {
	s.Spend(&d, now, it)
	return d
}

// Spend is Take for stores that embed this one: a decision that is handed on is copied in
// whole words of which the parts were just written, for which processors wait. d is zero.
func (s *Store) Spend(d *ratelimit.Decision, now ratelimit.Instant, it ratelimit.Item) {
	s.take(d, it.Key, it.Policy, it.Spend(), now, 0)
}

// take spends cost, if need be so far ahead (nanoseconds, token buckets only). d is zero.
func (s *Store) take(d *ratelimit.Decision, k ratelimit.Key, p *ratelimit.Policy, cost uint32, now ratelimit.Instant, ahead int64) {
	if cost > p.Quota() {
		_, *d = p.Decide(s.seen(k, p, now), cost, now)
		return
	}
	sh := s.shard(k)
	t := sh.tab.Load()
	g, _ := bits.Mul64(k.Hi, uint64(t.groups()))
	r := t.ref(int(g*groupLen+k.Hi%groupLen), k.Hi) // where most keys are
	if !r.is(k) {
		r = s.lookup(sh, k)
	}
	for {
		if r.sl != nil {
			if p.Algorithm() == ratelimit.TokenBucket {
				if s.spendTokens(d, r, p, cost, now, ahead) {
					return
				}
			} else if s.spendWindow(d, r, p, cost, now) {
				return
			}
		}
		r, now = s.prepare(sh, k, p, now)
	}
}

// spendWindow reports false when the slot must be prepared first.
func (s *Store) spendWindow(d *ratelimit.Decision, r ref, p *ratelimit.Policy, cost uint32, now ratelimit.Instant) bool {
	index, into := p.Window(now)
	for {
		hint := r.sl.form.Load() ^ p.Shape()
		blind := hinted(hint, index) && cost <= slackCost
		w := uint64(index)<<32 | ceiling(hint) // what blind takes the word to be
		if !blind {
			w = r.word.Load()
			if hint = r.sl.form.Load() ^ p.Shape(); hint > ratelimit.ShapeSpare {
				return false
			}
		}
		win, into, at := index, into, now
		if tag := uint32(w >> 32); tag != index {
			switch ahead := int32(tag - index); {
			case tag == frozen:
				return false
			case ahead == 1: // we were preempted past the window's end: never roll back
				win, into, at = tag, 0, p.WindowStart(tag)
			case ahead < 0 && p.Algorithm() == ratelimit.FixedWindow:
				if r.word.CompareAndSwap(w, uint64(index)<<32) {
					s.rolled(r, w)
				}
				continue
			default:
				return false
			}
		}
		link, mark := s.link(r)
		others, before, thin := s.others(link, p, win, at)
		count, prev, carried := uint32(w), uint32(0), uint32(0)
		if p.Algorithm() == ratelimit.SlidingWindow {
			prev = r.prev.Load() + before
			carried = p.Carried(prev, into)
		}
		room := p.Limit() - min(p.Limit(), others+carried)
		switch {
		case uint64(count)+uint64(cost) > uint64(room):
			if blind {
				r.unhint(p, hint)
				continue
			}
			s.refused(r, link, thin, p, cost, at)
			p.RefuseWindow(d, prev, count+others, carried, cost, into, at)
			return true
		case room-count > slack && cost <= slackCost:
			w = r.word.Add(uint64(cost))
			if uint32(w>>32) != win || uint32(w) > room {
				// A window began meanwhile, or many added at once: take it back
				// where it was booked.
				r.unhint(p, hint)
				r.unspend(uint32(w>>32), cost)
				continue
			}
		case r.word.CompareAndSwap(w, w+uint64(cost)):
			w += uint64(cost)
		default:
			if blind {
				r.unhint(p, hint)
			}
			continue
		}
		if (hint != 0 || room-count > slack) && uint64(uint32(w)) > ceiling(hint) {
			r.hint(p, hint, win, uint32(w), room)
		}
		if r.sl.hi.Load() != r.hi { // the slot went to another key under our hands
			r.unspend(win, cost)
			return false
		}
		if uint32(w) > mark {
			s.peers.Passed(Counter{r}, p, at)
		}
		p.AdmitWindow(d, prev, uint32(w)+others, carried, into, at)
		return true
	}
}

// unspend takes cost back from a window and reports whether it still runs.
func (r ref) unspend(win, cost uint32) bool {
	for {
		w := r.word.Load()
		if uint32(w>>32) != win || win == frozen {
			return false
		}
		if r.word.CompareAndSwap(w, w-uint64(min(cost, uint32(w)))) {
			return true
		}
	}
}

// spendTokens reports false when the slot must be prepared first.
func (s *Store) spendTokens(d *ratelimit.Decision, r ref, p *ratelimit.Policy, cost uint32, now ratelimit.Instant, ahead int64) bool {
	need := s.TokenTime(p, cost)
	tolerance := max(p.Tolerance(), need) // a share of a burst is at least this one
	link, _ := s.link(r)
	unseen, thin := int64(0), uint32(0) // the time of the tokens that peers are expected to have spent
	if link != 0 {
		var others uint32
		others, _, thin = s.peers.Others(link, p, 0, now)
		unseen = s.TokenTime(p, others)
	}
	for {
		w := r.word.Load()
		if r.sl.form.Load() != p.Shape() || w>>32 == frozen {
			return false
		}
		if r.steppedBack(p, w, now) {
			return false
		}
		tat := max(int64(w), int64(now))
		next := tat + need
		over := next + unseen - int64(now) - tolerance
		if over > ahead {
			s.refused(r, link, thin, p, cost, now)
			p.RefuseTokens(d, tat+unseen, over, now)
			return true
		}
		if far := next - int64(now) - p.Tolerance(); far > 0 {
			r.reserving(uint32(far/1e6 + 1))
		}
		if !r.word.CompareAndSwap(w, uint64(next)) {
			continue
		}
		if r.sl.hi.Load() != r.hi {
			r.untake(need)
			return false
		}
		if s.peers != nil {
			s.peers.Spent(Counter{r}, p, int64(cost), now)
		}
		p.AdmitTokens(d, next+unseen, now)
		if ahead > 0 {
			d.WaitMs = uint32(max(over+1e6-1, 0) / 1e6)
		}
		return true
	}
}

// steppedBack spares the cold word where the answer is plain.
func (r ref) steppedBack(p *ratelimit.Policy, w uint64, now ratelimit.Instant) bool {
	return p.SteppedBack(int64(w), 0, now) && p.SteppedBack(int64(w), r.prev.Load(), now)
}

// reserving notes that the bucket may be booked ms ahead.
func (r ref) reserving(ms uint32) {
	for old := r.prev.Load(); old < ms && !r.prev.CompareAndSwap(old, ms); old = r.prev.Load() {
	}
}

// untake moves a bucket back by d nanoseconds, unless its slot is out of use.
func (r ref) untake(d int64) bool {
	for {
		w := r.word.Load()
		if w>>32 == frozen {
			return false
		}
		if r.word.CompareAndSwap(w, uint64(max(int64(w)-d, 0))) {
			return true
		}
	}
}

// prepare makes a key's counter ready to be spent on: it inserts the key, turns
// the counter into the policy's unit, begins a sliding window, or corrects one
// that a clock's step back left in the future. It returns the time to go on with.
func (s *Store) prepare(sh *shard, k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant) (ref, ratelimit.Instant) {
	r := s.lookup(sh, k)
	if r.sl == nil && sh.fullAt.Load() == int64(now)/1e6 {
		return s.prepareOverflow(k, p, now)
	}
	sh.mu.Lock()
	if r = s.lookup(sh, k); r.sl == nil {
		if t, i := sh.insert(k, p, now, s.maxKeys); i >= 0 {
			r = t.ref(i, k.Hi)
		}
	}
	if r.sl != nil {
		if s.peers != nil && r.sl.shape() != p.Shape() {
			s.peers.Changed(k)
		}
		now = s.settle(r, p, now)
		sh.mu.Unlock()
		return r, now
	}
	sh.mu.Unlock()
	return s.prepareOverflow(k, p, now)
}

// prepareOverflow takes the lock only when the counter needs it: all the
// subjects that found no room come here.
func (s *Store) prepareOverflow(k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant) (ref, ratelimit.Instant) {
	s.overflowed.Add(1)
	s.overflowedAt.Store(int64(now))
	r := s.shared(k, p.Bucket())
	if r.sl != nil && r.ready(p, now) {
		return r, now
	}
	s.overflowMu.Lock()
	defer s.overflowMu.Unlock()
	if s.overflow[p.Bucket()].Load() == nil {
		t := newTable(overflowLen)
		for i := range t.len() {
			sl := t.at(i).sl
			sl.lo.Store(overflowKey(p.Bucket(), i).Lo)
			sl.hi.Store(overflowHi)
		}
		s.overflow[p.Bucket()].Store(t)
	}
	r = s.shared(k, p.Bucket())
	return r, s.settle(r, p, now)
}

// ready tells whether a counter can be spent on as it is.
func (r ref) ready(p *ratelimit.Policy, now ratelimit.Instant) bool {
	w := r.word.Load()
	if r.sl.shape() != p.Shape() {
		return false
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		return !r.steppedBack(p, w, now)
	}
	index, _ := p.Window(now)
	tag := uint32(w >> 32)
	return tag == index || tag == index+1 || tag < index && p.Algorithm() == ratelimit.FixedWindow
}

// settle does for prepare what concerns the counter. The lock of r is held, so
// that the word is changed elsewhere only by spending.
func (s *Store) settle(r ref, p *ratelimit.Policy, now ratelimit.Instant) ratelimit.Instant {
	if shape := r.sl.shape(); shape != p.Shape() {
		r.sl.form.Store(0) // nobody spends from here on
		for {
			w := r.word.Load()
			state := p.Fresh(now)
			if shape != 0 {
				state = s.convert(r, shape, p, ratelimit.State{Word: w, Prev: r.prev.Load()}, now)
			}
			if r.word.CompareAndSwap(w, state.Word) {
				r.prev.Store(state.Prev)
				if s.peers != nil {
					Counter{r}.SetMark(0)
				}
				r.sl.form.Store(p.Shape())
				return now
			}
		}
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		if !r.steppedBack(p, r.word.Load(), now) {
			return now
		}
		if now = s.latest(now); r.steppedBack(p, r.word.Load(), now) {
			r.word.Store(uint64(int64(now) + p.Tolerance()))
		}
		return now
	}
	for {
		w := r.word.Load()
		index, _ := p.Window(now)
		tag := uint32(w >> 32)
		next := uint64(index) << 32
		switch d := int32(tag - index); {
		case d == 0 || d == 1:
			return now
		case d > 1:
			if latest := s.latest(now); latest != now {
				now = latest
				continue
			}
			next |= uint64(uint32(w))
		case d == -1: // prev first: a reader that sees the new window sees its prev
			r.prev.Store(uint32(w))
		default:
			r.prev.Store(0)
		}
		if r.word.CompareAndSwap(w, next) {
			s.rolled(r, w)
			return now
		}
	}
}

// latest reads the clock, where there is one.
func (s *Store) latest(now ratelimit.Instant) ratelimit.Instant {
	if s.clock.IsZero() {
		return now
	}
	return max(now, s.clock.Now())
}

// Ask is what TakeAll would answer, without spending.
func (s *Store) Ask(now ratelimit.Instant, items []ratelimit.Item) ratelimit.Decision {
	var strictest ratelimit.Decision
	for i, it := range items {
		_, d := it.Policy.Decide(s.seen(it.Key, it.Policy, now), it.Spend(), now)
		d.Item = uint8(i)
		if i == 0 || d.Stricter(strictest) {
			strictest = d
		}
	}
	return strictest
}

// TakeAll implements ratelimit.Store. It asks all before it spends, so that a
// refusal by one is not seen by the users of another, and takes back what it
// spent when somebody else came in between.
func (s *Store) TakeAll(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item) ratelimit.Decision {
	if len(items) == 1 {
		return s.Take(ctx, now, items[0])
	}
	if d := s.Ask(now, items); !d.Allowed {
		return d
	}
	var strictest ratelimit.Decision
	at := now
	for i, it := range items {
		var d ratelimit.Decision
		s.take(&d, it.Key, it.Policy, it.Spend(), now, 0)
		d.Item = uint8(i)
		if !d.Allowed {
			for _, spent := range items[:i] {
				s.Refund(ctx, ratelimit.Booking{At: at}, spent)
			}
			return d
		}
		at = max(at, d.At)
		if i == 0 || d.Stricter(strictest) {
			strictest = d
		}
	}
	strictest.At = at
	return strictest
}

// Refund implements ratelimit.Store.
func (s *Store) Refund(_ context.Context, b ratelimit.Booking, it ratelimit.Item) {
	at := b.At
	sh := s.shard(it.Key)
	for {
		r := s.lookup(sh, it.Key)
		mu := &sh.mu
		if r.sl == nil {
			if r, mu = s.shared(it.Key, it.Policy.Bucket()), &s.overflowMu; r.sl == nil {
				return
			}
		}
		w, p := r.word.Load(), it.Policy
		if shape := r.sl.shape(); shape == 0 {
			return
		} else if shape != p.Shape() { // changed since: give back in its present unit
			old := ratelimit.FromShape(shape)
			p = &old
		}
		tag := uint32(w >> 32)
		if tag == frozen { // moving to another table, which holds the lock
			mu.Lock()
			mu.Unlock() //nolint:staticcheck // the lock is only waited for
			continue
		}
		if p.Algorithm() == ratelimit.TokenBucket {
			if r.untake(s.TokenTime(p, it.Spend())) {
				if s.peers != nil {
					s.peers.Spent(Counter{r}, it.Policy, -int64(it.Spend()), at)
				}
				return
			}
			continue
		}
		win, _ := p.Window(at)
		switch {
		case tag == win:
			if r.unspend(win, it.Spend()) {
				s.returned(r, it.Policy, at)
				return
			}
		case tag == win+1 && p.Algorithm() == ratelimit.SlidingWindow:
			mu.Lock()
			if s.lookup(sh, it.Key).sl == r.sl || r.hi == overflowHi {
				if uint32(r.word.Load()>>32) == tag {
					r.prev.Store(r.prev.Load() - min(it.Spend(), r.prev.Load()))
				}
				mu.Unlock()
				s.returned(r, it.Policy, at)
				return
			}
			mu.Unlock()
		default:
			return
		}
	}
}

// Reserve implements ratelimit.Store.
func (s *Store) Reserve(_ context.Context, now ratelimit.Instant, it ratelimit.Item, maxWait time.Duration) ratelimit.Decision {
	ahead := min(max(maxWait, 0), ratelimit.MaxReserve).Truncate(time.Millisecond).Nanoseconds()
	if it.Policy.Algorithm() != ratelimit.TokenBucket {
		ahead = 0
	}
	var d ratelimit.Decision
	s.take(&d, it.Key, it.Policy, it.Spend(), now, ahead)
	if d.Allowed && ahead == 0 {
		d.WaitMs = 0
	}
	return d
}

// Peek implements ratelimit.Store; it never fails. What subjects beyond MaxKeys
// see is the use of the counter that they share.
func (s *Store) Peek(_ context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	return it.Policy.Usage(s.seen(it.Key, it.Policy, now), now), nil
}

// seen is a key's counter with what the other nodes have of it.
func (s *Store) seen(k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant) ratelimit.State {
	state := s.state(k, p, now)
	link := uint32(0)
	if s.peers != nil {
		r := s.lookup(s.shard(k), k)
		if r.sl == nil {
			r = s.shared(k, p.Bucket())
		}
		if r.sl != nil {
			link, _ = s.link(r)
		}
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		if link != 0 && p.Limit() > 0 {
			others, _, _ := s.peers.Others(link, p, 0, now)
			state.Word += uint64(s.TokenTime(p, others))
		}
		return state
	}
	index, _ := p.Window(now)
	if int32(uint32(state.Word>>32)-index) < 0 { // as the next spend would find it
		state, _ = p.Decide(state, p.Limit()+1, now)
	}
	others, before, _ := s.others(link, p, uint32(state.Word>>32), now)
	state.Word += uint64(others)
	state.Prev += before
	return state
}

// state reads a key's own counter in a policy's unit, into which it is converted if
// it was kept in another.
func (s *Store) state(k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant) ratelimit.State {
	if p.Algorithm() == ratelimit.TokenBucket && p.Limit() == 0 { // it has no unit to count in
		return p.Fresh(now)
	}
	sh := s.shard(k)
	mu, r := &sh.mu, s.lookup(sh, k)
	if r.sl == nil {
		if sh.keys.Load() < int64(s.maxKeys) {
			return p.Fresh(now)
		}
		if mu, r = &s.overflowMu, s.shared(k, p.Bucket()); r.sl == nil {
			return p.Fresh(now)
		}
	}
	state := ratelimit.State{Word: r.word.Load(), Prev: r.prev.Load()}
	shape := r.sl.shape()
	if state.Word>>32 == frozen || shape != p.Shape() || r.word.Load()>>32 != state.Word>>32 {
		mu.Lock() // changing just now, or to be changed: what is read under the lock is whole
		if r.hi != overflowHi {
			r = s.lookup(sh, k)
		}
		if r.sl == nil {
			shape = 0
		} else {
			if shape = r.sl.shape(); shape != 0 && shape != p.Shape() { // as the next spend would find it
				if s.peers != nil {
					s.peers.Changed(k)
				}
				s.settle(r, p, now)
				shape = p.Shape()
			}
			state = ratelimit.State{Word: r.word.Load(), Prev: r.prev.Load()}
		}
		mu.Unlock()
	}
	if shape == 0 {
		return p.Fresh(now)
	}
	return state
}

func (s *Store) register(reg prometheus.Registerer) error {
	evicted := func() float64 {
		n := uint64(0)
		for i := range s.shards {
			n += s.shards[i].evicted.Load()
		}
		return float64(n)
	}
	overflowing := func() float64 {
		if s.overflowing() {
			return 1
		}
		return 0
	}
	for _, c := range []prometheus.Collector{
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "converger_rate_limit_keys",
			Help: "Keys held in this node's memory.",
		}, func() float64 { return float64(s.Keys()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "converger_rate_limit_keys_max",
			Help: "The bound on converger_rate_limit_keys.",
		}, func() float64 { return float64(s.maxKeys * len(s.shards)) }),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "converger_rate_limit_evictions_total",
			Help: "Ended counters whose place was given up.",
		}, evicted),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "converger_rate_limit_overflow",
			Help: "1 while subjects without room share counters, and for ten seconds after.",
		}, overflowing),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "converger_rate_limit_overflow_total",
			Help: "Checks that were decided by a shared counter.",
		}, func() float64 { return float64(s.overflowed.Load()) }),
	} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}
