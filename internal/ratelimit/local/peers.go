package local

import (
	"math/bits"
	"math/rand/v2"
	"sync"

	"converger/internal/ratelimit"
)

// Peers adds to the counters of this node what the other nodes of a cluster have
// of the same budgets, and learns what to tell them. A key about which there is
// something to keep has a link, a number that Peers gave out; 0 is none.
//
// The methods are called on the path of a check, by any number of goroutines at
// once, and must not block or allocate. Those that say so are called with the
// lock of the key's shard held and must not call the Store.
type Peers interface {
	// Others is how much of p's budget the other nodes have taken, or must be
	// expected to have, at a moment: of window win and, for sliding windows, of
	// the one before. Of a token bucket it is what they are expected to have
	// spent beyond what Book has booked. Of the refusals that follow one in 1<<thin is
	// to be told.
	Others(link uint32, p *ratelimit.Policy, win uint32, now ratelimit.Instant) (taken, before, thin uint32)
	// Passed is told that a window's own count passed its counter's mark.
	Passed(c Counter, p *ratelimit.Policy, now ratelimit.Instant)
	// Returned is told that a window's own count was lowered by a refund.
	Returned(c Counter, p *ratelimit.Policy, now ratelimit.Instant)
	// Spent is told of every spend from a token bucket, and of refunds as
	// negative ones.
	Spent(c Counter, p *ratelimit.Policy, n int64, now ratelimit.Instant)
	// Refused is told of a refusal, or of one in so many as Others said with as many
	// times its cost: a hot key's are not written one by one.
	Refused(c Counter, link uint32, p *ratelimit.Policy, cost uint32, now ratelimit.Instant)
	// Rolled is told that a window ended with this own state, State.Word.
	Rolled(link uint32, word uint64)
	// Emptied is told that what was spent until a moment was taken out of a counter
	// kept under a shape: Policy.Forget. The shard is locked.
	Emptied(link uint32, shape uint64, at ratelimit.Instant)
	// Changed is told that a check applies another policy to a counter that is there,
	// before it is converted. The shard is locked.
	Changed(k ratelimit.Key)
	// Convert turns the own state of a counter into one under another policy, as
	// Policy.Convert does. The shard is locked.
	Convert(link uint32, shape uint64, p *ratelimit.Policy, s ratelimit.State, now ratelimit.Instant) ratelimit.State
	// Freed is told that a counter gave up its place. The shard is locked.
	Freed(link uint32)
}

// Counter is one counter of a Store with Peers. Beside its state it has a mark,
// the own count above which Peers.Passed is called, and a link. A new counter, and
// one whose window has just begun, has the mark 0.
type Counter struct{ ref }

// Key is the counter's key; of a counter that subjects share, a key of its own,
// which is the same on every node.
func (c Counter) Key() ratelimit.Key {
	return ratelimit.Key{Hi: c.sl.hi.Load(), Lo: c.sl.lo.Load()}
}

// Load returns the counter's own state and the shape in which it is kept. The
// state is meaningless, with shape 0, while the counter is changing its place or
// shape.
func (c Counter) Load() (s ratelimit.State, shape uint64) {
	s = ratelimit.State{Word: c.word.Load(), Prev: c.prev.Load()}
	shape = c.sl.shape()
	if s.Word>>32 == frozen || c.sl.hi.Load() != c.hi {
		return ratelimit.State{}, 0
	}
	return s, shape
}

// Link returns the counter's link and mark.
func (c Counter) Link() (link, mark uint32) {
	a := c.sl.mark.Load()
	return uint32(a), uint32(a >> 32)
}

// SwapMark sets the mark if it is still old.
func (c Counter) SwapMark(old, mark uint32) bool {
	for {
		a := c.sl.mark.Load()
		if uint32(a>>32) != old {
			return false
		}
		if c.sl.mark.CompareAndSwap(a, uint64(mark)<<32|uint64(uint32(a))) {
			return true
		}
	}
}

// SetMark sets the mark.
func (c Counter) SetMark(mark uint32) {
	for {
		a := c.sl.mark.Load()
		if c.sl.mark.CompareAndSwap(a, uint64(mark)<<32|uint64(uint32(a))) {
			return
		}
	}
}

// Book spends on behalf of others from a token bucket, even below zero, or gives
// back when n is negative. It reports false when the counter has moved.
func (s *Store) Book(c Counter, p *ratelimit.Policy, n int64, now ratelimit.Instant) bool {
	d := s.TokenTime(p, uint32(min(max(n, -n), ratelimit.MaxLimit)))
	if n < 0 {
		return c.untake(d)
	}
	for {
		w := c.word.Load()
		if w>>32 == frozen || c.sl.hi.Load() != c.hi {
			return false
		}
		next := max(int64(w), int64(now)) + d
		if far := next - int64(now) - p.Tolerance(); far > 0 { // a debt, not a clock gone wrong
			c.reserving(uint32(min(far/1e6+1, 1<<32-1)))
		}
		if c.word.CompareAndSwap(w, uint64(next)) {
			return true
		}
	}
}

// Counter finds the counter of a key that Counter.Key returned.
func (s *Store) Counter(k ratelimit.Key) (Counter, bool) {
	if k.Hi == overflowHi {
		if k.Lo>>32 >= uint64(ratelimit.NumBuckets) {
			return Counter{}, false
		}
		r := s.shared(k, ratelimit.Bucket(k.Lo>>32))
		return Counter{r}, r.sl != nil
	}
	r := s.lookup(s.shard(k), k)
	return Counter{r}, r.sl != nil
}

// Ensure finds the counter of a key, or makes one under p, and begins the window
// of now if the counter is kept under p's shape. It fails when the store is full.
func (s *Store) Ensure(k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant) (Counter, bool) {
	if c, ok := s.Counter(k); ok || k.Hi == overflowHi {
		if ok && p.Algorithm() != ratelimit.TokenBucket && c.sl.shape() == p.Shape() && !c.ready(p, now) {
			mu := s.lockOf(k)
			mu.Lock()
			defer mu.Unlock()
			if c, ok = s.Counter(k); ok && c.sl.shape() == p.Shape() {
				s.settle(c.ref, p, now)
			}
		}
		return c, ok
	}
	sh := s.shard(k)
	sh.mu.Lock()
	defer sh.mu.Unlock()
	if _, i := sh.insert(k, p, now, s.maxKeys); i < 0 {
		return Counter{}, false
	}
	return s.Counter(k)
}

// Attach gives the counter of a key the link that alloc returns, unless it has
// one. It reports false when there is no such counter. alloc must not call the Store.
func (s *Store) Attach(k ratelimit.Key, alloc func() uint32) (Counter, uint32, bool) {
	mu := s.lockOf(k)
	mu.Lock()
	defer mu.Unlock()
	c, ok := s.Counter(k)
	if !ok {
		return c, 0, false
	}
	link, _ := c.Link()
	if link == 0 {
		link = alloc()
		c.sl.mark.Add(uint64(link)) // nobody else changes the lower half
	}
	return c, link, true
}

// Adopt keeps a counter in which nothing is left to remember under p's shape from here
// on. It reports false when there is something, or no such counter.
func (s *Store) Adopt(k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant) bool {
	mu := s.lockOf(k)
	mu.Lock()
	defer mu.Unlock()
	c, ok := s.Counter(k)
	if !ok {
		return false
	}
	if shape := c.sl.shape(); shape != p.Shape() {
		if !ratelimit.Over(shape, c.word.Load(), now) {
			return false
		}
		s.settle(c.ref, p, now)
	}
	return true
}

// Detach takes a link from its counter; true means that the counter no longer
// knows it and Freed will not be called.
func (s *Store) Detach(k ratelimit.Key, link uint32) bool {
	mu := s.lockOf(k)
	mu.Lock()
	defer mu.Unlock()
	c, ok := s.Counter(k)
	if !ok {
		return false
	}
	if l, _ := c.Link(); l != link {
		return false
	}
	c.sl.mark.Store(0)
	return true
}

// Walk calls f with the counters of one part of the store, and returns false when
// there is no such part. Counters that come, go or move meanwhile may be missed
// or met twice.
func (s *Store) Walk(part int, f func(Counter)) bool {
	var t *table
	switch {
	case part < len(s.shards):
		t = s.shards[part].tab.Load()
	case part < len(s.shards)+len(s.overflow):
		t = s.overflow[part-len(s.shards)].Load()
	default:
		return false
	}
	if t == nil {
		return true
	}
	for i := range t.len() {
		if r := t.at(i); r.hi > vacant {
			f(Counter{r})
		}
	}
	return true
}

// SetShare makes the store enforce only a part of every limit, rounded up: what
// this node, or its side of a split, may spend of what nodes beyond its reach
// spend from too. Any of <= held is the whole limit. It reports whether that is news.
func (s *Store) SetShare(held, of int) (changed bool) {
	v := uint64(0)
	if 0 < held && held < of {
		v = uint64(held)<<32 | uint64(of)
	}
	return s.share.Swap(v) != v
}

// Withheld is the part of a window's limit that is not enforced here.
func (s *Store) Withheld(p *ratelimit.Policy) uint32 {
	v := s.share.Load()
	if v == 0 {
		return 0
	}
	held, of := v>>32, v&(1<<32-1)
	return p.Limit() - uint32((uint64(p.Limit())*held+of-1)/of)
}

// TokenTime is the time in which n tokens of p refill at the rate enforced here.
func (s *Store) TokenTime(p *ratelimit.Policy, n uint32) int64 {
	d := p.TokenTime(n)
	if v := s.share.Load(); v != 0 {
		hi, lo := bits.Mul64(uint64(d), v&(1<<32-1))
		if hi >= v>>32 {
			return 1 << 62
		}
		q, _ := bits.Div64(hi, lo, v>>32)
		return int64(min(q, 1<<62))
	}
	return d
}

// lockOf is the lock that guards where and how a key's counter is kept.
func (s *Store) lockOf(k ratelimit.Key) *sync.Mutex {
	if k.Hi == overflowHi {
		return &s.overflowMu
	}
	return &s.shard(k).mu
}

func overflowKey(b ratelimit.Bucket, i int) ratelimit.Key {
	return ratelimit.Key{Hi: overflowHi, Lo: uint64(b)<<32 | uint64(i)}
}

// link returns no link and the greatest mark without Peers.
func (s *Store) link(r ref) (link, mark uint32) {
	if s.peers == nil {
		return 0, 1<<32 - 1
	}
	return Counter{r}.Link()
}

// others asks Peers, or tells what this node's share leaves out.
func (s *Store) others(link uint32, p *ratelimit.Policy, win uint32, at ratelimit.Instant) (taken, before, thin uint32) {
	if link != 0 {
		return s.peers.Others(link, p, win, at)
	}
	return s.Withheld(p), 0, 0
}

func (s *Store) refused(r ref, link, thin uint32, p *ratelimit.Policy, cost uint32, now ratelimit.Instant) {
	if s.peers != nil && (thin == 0 || rand.Uint32()>>(32-thin) == 0) {
		s.peers.Refused(Counter{r}, link, p, cost<<thin, now)
	}
}

func (s *Store) returned(r ref, p *ratelimit.Policy, at ratelimit.Instant) {
	if s.peers != nil {
		s.peers.Returned(Counter{r}, p, at)
	}
}

// rolled begins a window for Peers too: its first spend passes the mark.
func (s *Store) rolled(r ref, word uint64) {
	if s.peers == nil {
		return
	}
	for {
		a := r.sl.mark.Load()
		if r.sl.mark.CompareAndSwap(a, uint64(uint32(a))) {
			if link := uint32(a); link != 0 {
				s.peers.Rolled(link, word)
			}
			return
		}
	}
}

func (s *Store) convert(r ref, shape uint64, p *ratelimit.Policy, state ratelimit.State, now ratelimit.Instant) ratelimit.State {
	if link, _ := s.link(r); link != 0 {
		return s.peers.Convert(link, shape, p, state, now)
	}
	return p.Convert(shape, state, now)
}

// Put takes over the state of a counter from another node: as it is, or, when it
// must not lose what was spent here, the greater of both. p tells the shape. It
// reports false when the store is full.
func (s *Store) Put(k ratelimit.Key, p *ratelimit.Policy, state ratelimit.State, greater bool, now ratelimit.Instant) bool {
	if _, ok := s.Ensure(k, p, now); !ok || k.Hi == overflowHi {
		return false
	}
	mu := s.lockOf(k)
	mu.Lock()
	defer mu.Unlock()
	c, ok := s.Counter(k)
	if !ok {
		return false
	}
	if shape := c.sl.shape(); shape != p.Shape() {
		s.settle(c.ref, p, now)
	}
	for {
		w := c.word.Load()
		if greater && !after(p, state, ratelimit.State{Word: w, Prev: c.prev.Load()}) {
			return true
		}
		if c.word.CompareAndSwap(w, state.Word) {
			c.prev.Store(state.Prev)
			return true
		}
	}
}

// after tells whether more is spent in a than in b. Of windows the later one counts.
func after(p *ratelimit.Policy, a, b ratelimit.State) bool {
	if p.Algorithm() == ratelimit.TokenBucket {
		return int64(a.Word) > int64(b.Word)
	}
	if d := int32(uint32(a.Word>>32) - uint32(b.Word>>32)); d != 0 {
		return d > 0
	}
	return uint32(a.Word) > uint32(b.Word) || uint32(a.Word) == uint32(b.Word) && a.Prev > b.Prev
}
