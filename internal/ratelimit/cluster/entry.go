package cluster

import (
	"sync"
	"sync/atomic"

	"converger/internal/ratelimit"
)

// entry is what a node keeps of a key that peers reported, or that is worth
// reporting: 32 bytes beside the key's counter, a cell for each peer, and a usage
// if the key is used here too. Its number, with that of its pool, is the counter's
// link. Nothing here has a pointer: a million entries cost the garbage collector
// nothing.
type entry struct {
	head   atomic.Uint64 // what others have: ms<<32 | units; valid in that millisecond, or until it is set to 0 if ms is always
	before atomic.Uint32 // what others had of the window before
	use    atomic.Uint32 // number of the usage in the pool, 0: never used here; above thinShift: one refusal in 2^thin is counted
	key    ratelimit.Key // guarded by chunk.mu; zero: the entry is not in use
}

const (
	always    = 1<<32 - 1
	thinShift = 27
	useMask   = 1<<thinShift - 1
)

func (e *entry) usage() uint32 { return e.use.Load() & useMask }

// setThin changes how refusals are sampled: a hot key's are looked at no further.
func (e *entry) setThin(thin uint32) {
	for {
		was := e.use.Load()
		is := was&useMask | thin<<thinShift
		if is == was || e.use.CompareAndSwap(was, is) {
			return
		}
	}
}

// usage is what a node keeps of its own use of a key, and of what the others were
// told of it.
type usage struct {
	last  atomic.Uint64 // State.Word of the window that ended last
	tried atomic.Uint32 // attempts since the last tick that base does not show
	base  atomic.Uint32 // own count, or spent, at the last tick
	spent atomic.Uint32 // token bucket: spent in the epoch, wraps
	early atomic.Uint32 // token bucket: what spent must exceed for an early report
	quota atomic.Uint32 // one more than the quota of the policy last applied, 0: none; see policy
	lists atomic.Uint32 // activeBit and so on

	dead bool // guarded by pool.mu: the counter gave up its place; to be freed when in no list

	// Guarded by the mu of the entry's chunk.
	force  bool  // tell at the next tick
	quiet  uint8 // looks at it since it rests
	seen   uint8 // number of the tick that measured it last
	demand float32
	epoch  uint32 // token bucket: of spent
	told   told   // the last report
	toldAt ratelimit.Instant
}

const (
	activeBit  = 1 << iota // in the pool's list of active keys
	queuedBit              // for an early report
	restingBit             // in the pool's list of resting keys
	heldBit                // looked at, from that list
	listedBits = activeBit | queuedBit | restingBit | heldBit
)

func (u *usage) in(lists uint32) bool { return u.lists.Load()&lists != 0 }

// policy is the one last applied to a counter kept under shape, as far as reports
// need it; false when none was, or the counter is changing its place or shape.
func (u *usage) policy(shape uint64) (ratelimit.Policy, bool) {
	q := u.quota.Load()
	if q == 0 || shape == 0 {
		return ratelimit.Policy{}, false
	}
	return ratelimit.FromShapeOf(shape, q-1), true
}

// attempts is the demand, 0 of a key that is not used here.
func (u *usage) attempts() float64 {
	if u == nil {
		return 0
	}
	return float64(u.demand)
}

// reset makes a usage new, but for the lists that it may be in.
func (u *usage) reset(epoch uint32) {
	u.last.Store(0)
	for _, a := range []*atomic.Uint32{&u.tried, &u.base, &u.spent, &u.early, &u.quota} {
		a.Store(0)
	}
	u.dead, u.force, u.quiet, u.seen, u.demand, u.epoch, u.told, u.toldAt = false, false, 0, 0, 0, epoch, told{}, 0
}

// told is what of a report decides when the next one is due; see register.
type told struct {
	win, count uint32
	demand     float32
}

const (
	pools     = 64
	chunkLen  = 64
	entryBits = 26 // of a link, the rest is the number of the pool
	entryMask = 1<<entryBits - 1
)

// chunk holds entries and their cells, stride cells to an entry. One mutex for all
// of a chunk is held for a moment by whoever computes, reports or merges one of its
// keys, at most once a millisecond and key by those who check.
type chunk struct {
	cells  []cell
	stride int
	mu     sync.Mutex // guards cells, stride, and the keys and usages of the entries

	entries [chunkLen]entry
}

// of returns the cells of entry i, by the peer's slot. The chunk is locked.
func (c *chunk) of(i uint32) []cell { return c.cells[int(i)*c.stride : (int(i)+1)*c.stride] }

// pool is a part of the entries with its own lock, so that none is shared by all keys.
type pool struct {
	chunks slab[chunk]
	usages slab[[chunkLen]usage]

	mu       sync.Mutex
	next     uint32 // entries ever used; 0 stands for none
	free     []uint32
	nextUse  uint32 // usages ever used; 0 stands for none
	freeUses []uint32
	active   []uint32
	resting  []uint32 // nothing of them is due before they are used again; some are active by now
	due      []uint32 // queued for an early report
	_        [64]byte
}

// slab is a list that grows by a part at a time and is read without a lock.
type slab[T any] struct{ parts atomic.Pointer[[]*T] }

func (s *slab[T]) part(i uint32) *T { return (*s.parts.Load())[i] }

func (s *slab[T]) all() []*T {
	if p := s.parts.Load(); p != nil {
		return *p
	}
	return nil
}

// grow adds a part, unless there are more than i. One goroutine grows at a time.
func (s *slab[T]) grow(i uint32, made func() *T) {
	if parts := s.all(); int(i) >= len(parts) {
		parts = append(parts[:len(parts):len(parts)], made())
		s.parts.Store(&parts)
	}
}

func (pl *pool) usage(n uint32) *usage { return &pl.usages.part(n / chunkLen)[n%chunkLen] }

// entry finds the entry of a link, and where its cells are.
func (s *Store) entry(link uint32) (*entry, *chunk, uint32) {
	c := s.pools[link>>entryBits].chunks.part(link & entryMask / chunkLen)
	i := link % chunkLen
	return &c.entries[i], c, i
}

// usage is that of an entry, nil if there is none.
func (s *Store) usage(link uint32, e *entry) *usage {
	if n := e.usage(); n != 0 {
		return s.pools[link>>entryBits].usage(n)
	}
	return nil
}

// used is usage, made if need be.
func (s *Store) used(link uint32, e *entry) *usage {
	if u := s.usage(link, e); u != nil {
		return u
	}
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	n := e.usage()
	if n == 0 {
		if l := len(pl.freeUses); l > 0 {
			n = pl.freeUses[l-1]
			pl.freeUses = pl.freeUses[:l-1]
		} else {
			pl.nextUse++
			n = pl.nextUse
			pl.usages.grow(n/chunkLen, func() *[chunkLen]usage { return new([chunkLen]usage) })
		}
		pl.usage(n).reset(s.epochs.Add(1))
		e.use.Store(n)
	}
	return pl.usage(n)
}

// alloc makes an entry for a key; 0 when there are too many.
func (s *Store) alloc(k ratelimit.Key) uint32 {
	n := uint32(k.Lo>>58) % pools
	pl := &s.pools[n]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	var i uint32
	if l := len(pl.free); l > 0 {
		i = pl.free[l-1]
		pl.free = pl.free[:l-1]
	} else {
		if pl.next == entryMask {
			return 0
		}
		pl.next++
		i = pl.next
		pl.chunks.grow(i/chunkLen, func() *chunk {
			stride := int(s.stride.Load())
			return &chunk{cells: make([]cell, chunkLen*stride), stride: stride}
		})
	}
	link := n<<entryBits | i
	e, c, j := s.entry(link)
	c.mu.Lock()
	defer c.mu.Unlock()
	clear(c.of(j))
	e.before.Store(0)
	e.head.Store(0)
	e.key = k
	if u := s.usage(link, e); u != nil { // somebody came late, when the entry was free
		u.reset(s.epochs.Add(1))
		e.setThin(0)
	}
	return link
}

// Freed implements local.Peers.
func (s *Store) Freed(link uint32) {
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	e, c, _ := s.entry(link)
	u := s.usage(link, e)
	if u == nil {
		pl.release(link, e, c)
		return
	}
	u.dead = true
	u.lists.And(^uint32(restingBit)) // the list skips it: that comes only once a second, and strangers are many
	pl.collect(link, e, c, u)
}

// collect frees a dead entry that is in no list. pl.mu is held.
func (pl *pool) collect(link uint32, e *entry, c *chunk, u *usage) {
	if u.dead && !u.in(listedBits) {
		u.dead = false
		pl.freeUses = append(pl.freeUses, e.use.Swap(0)&useMask)
		pl.release(link, e, c)
	}
}

func (pl *pool) release(link uint32, e *entry, c *chunk) {
	c.mu.Lock()
	e.key = ratelimit.Key{}
	c.mu.Unlock()
	pl.free = append(pl.free, link&entryMask)
}

// activate puts a key on the list that the tick walks, unless it is there.
func (s *Store) activate(link uint32, u *usage) (anew bool) {
	if u.in(activeBit) {
		return false
	}
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	if anew = s.lives(link, u) && u.lists.Or(activeBit)&activeBit == 0; anew {
		pl.active = append(pl.active, link)
	}
	return anew
}

// lives tells that a usage is still that of the entry by which a check found it: it may have been freed since, and be
// another key's by now. The pool is locked.
func (s *Store) lives(link uint32, u *usage) bool {
	e, _, _ := s.entry(link)
	return !u.dead && s.usage(link, e) == u
}

// hurry queues a key for an early report.
func (s *Store) hurry(link uint32, u *usage) {
	if u.in(queuedBit) {
		return
	}
	n := link >> entryBits
	pl := &s.pools[n]
	pl.mu.Lock()
	queue := s.lives(link, u) && u.lists.Or(queuedBit)&queuedBit == 0
	if queue {
		pl.due = append(pl.due, link)
	}
	pl.mu.Unlock()
	if !queue {
		return
	}
	s.pending.Or(1 << n)
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// widen makes room for cells of so many peers.
func (s *Store) widen(stride int) {
	s.stride.Store(int32(stride))
	for n := range s.pools {
		pl := &s.pools[n]
		pl.mu.Lock()
		chunks := pl.chunks.all()
		pl.mu.Unlock()
		for _, c := range chunks {
			c.mu.Lock()
			if c.stride < stride {
				cells := make([]cell, chunkLen*stride)
				for i := range chunkLen {
					copy(cells[i*stride:], c.of(uint32(i)))
				}
				c.cells, c.stride = cells, stride
			}
			c.mu.Unlock()
		}
	}
}

// forget clears the cells of a peer's slot, before another peer gets it.
func (s *Store) forget(slot int) {
	s.each(func(_ uint32, e *entry, _ *usage, cells []cell) {
		if slot < len(cells) {
			cells[slot] = cell{}
		}
		e.head.Store(0)
	})
}

// each calls f with every entry ever used, locked; the usage may be nil.
func (s *Store) each(f func(link uint32, e *entry, u *usage, cells []cell)) {
	for n := range s.pools {
		s.eachOf(n, f)
	}
}

func (s *Store) eachOf(n int, f func(link uint32, e *entry, u *usage, cells []cell)) {
	pl := &s.pools[n]
	pl.mu.Lock()
	used := pl.next
	pl.mu.Unlock()
	for i := uint32(1); i <= used; i++ {
		link := uint32(n)<<entryBits | i
		e, c, j := s.entry(link)
		c.mu.Lock()
		f(link, e, s.usage(link, e), c.of(j))
		c.mu.Unlock()
	}
}
