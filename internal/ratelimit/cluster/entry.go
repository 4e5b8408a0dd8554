package cluster

import (
	"sync"
	"sync/atomic"

	"converger/internal/ratelimit"
)

// entry is what a node keeps of a key beside its counter: what peers said of it,
// and what they were told. Only keys that peers reported, or that are worth
// reporting, have one. Its number, with that of its pool, is the counter's link.
type entry struct {
	head   atomic.Uint64 // what others have: ms<<32 | units; valid in that millisecond
	last   atomic.Uint64 // State.Word of the window that ended last
	policy atomic.Pointer[ratelimit.Policy]
	before atomic.Uint32 // what others had of the window before
	tried  atomic.Uint32 // attempts since the last tick that base does not show
	base   atomic.Uint32 // own count, or spent, at the last tick
	spent  atomic.Uint32 // token bucket: spent in the epoch, wraps
	early  atomic.Uint32 // token bucket: what spent must exceed for an early report
	thin   atomic.Uint32 // one refusal in 2^thin is counted
	queued atomic.Bool   // for an early report
	active atomic.Bool   // in the pool's list of active keys

	dead bool // guarded by pool.mu: gave up its place, to be freed when in no list

	mu     sync.Mutex // guards what follows, and the entry's registers
	key    ratelimit.Key
	demand float32
	epoch  uint32            // token bucket: of spent
	told   told              // the last report
	toldAt ratelimit.Instant // 0: never told
	quiet  uint8             // ticks without anything to tell
	force  bool              // tell at the next tick
}

// told is what of a report decides when the next one is due; see register.
type told struct {
	win, count uint32
	demand     float32
}

const (
	pools     = 64
	chunkLen  = 256
	entryBits = 26 // of a link, the rest is the number of the pool
	entryMask = 1<<entryBits - 1
)

// chunk holds entries and their registers, stride registers to an entry. regs and
// stride change only while every entry is locked.
type chunk struct {
	entries [chunkLen]entry
	regs    []register
	stride  int
}

// registers are those of entry i, by the peer's slot. The entry is locked.
func (c *chunk) registers(i uint32) []register {
	return c.regs[int(i)*c.stride : (int(i)+1)*c.stride]
}

// pool is a part of the entries with its own lock, so that none is shared by all keys.
type pool struct {
	chunks atomic.Pointer[[]*chunk]

	mu     sync.Mutex
	next   uint32 // entries ever used; 0 stands for none
	free   []uint32
	active []uint32
	due    []uint32 // queued for an early report
	_      [64]byte
}

// entry finds the entry of a link, and where its registers are.
func (s *Store) entry(link uint32) (*entry, *chunk, uint32) {
	c := (*s.pools[link>>entryBits].chunks.Load())[link&entryMask/chunkLen]
	i := link % chunkLen
	return &c.entries[i], c, i
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
		var chunks []*chunk
		if old := pl.chunks.Load(); old != nil {
			chunks = *old
		}
		if int(i/chunkLen) >= len(chunks) {
			stride := int(s.stride.Load())
			chunks = append(chunks[:len(chunks):len(chunks)], &chunk{regs: make([]register, chunkLen*stride), stride: stride})
			pl.chunks.Store(&chunks)
		}
	}
	link := n<<entryBits | i
	e, c, j := s.entry(link)
	e.mu.Lock()
	defer e.mu.Unlock()
	clear(c.registers(j))
	for _, a := range []*atomic.Uint32{&e.before, &e.tried, &e.base, &e.spent, &e.early, &e.thin} {
		a.Store(0)
	}
	e.head.Store(0)
	e.last.Store(0)
	e.policy.Store(nil)
	e.key, e.demand, e.quiet, e.force, e.told, e.toldAt = k, 0, 0, false, told{}, 0
	e.epoch = s.epochs.Add(1)
	return link
}

// Freed implements local.Peers.
func (s *Store) Freed(link uint32) {
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	defer pl.mu.Unlock()
	e, _, _ := s.entry(link)
	e.dead = true
	s.collect(pl, e, link)
}

// collect frees a dead entry that is in no list. pl.mu is held.
func (s *Store) collect(pl *pool, e *entry, link uint32) {
	if e.dead && !e.active.Load() && !e.queued.Load() {
		e.dead = false
		e.mu.Lock()
		e.key = ratelimit.Key{} // in use no more
		e.mu.Unlock()
		pl.free = append(pl.free, link&entryMask)
	}
}

// activate puts an entry on the list that the tick walks.
func (s *Store) activate(link uint32, e *entry) {
	if e.active.Load() {
		return
	}
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	if !e.dead && e.active.CompareAndSwap(false, true) {
		pl.active = append(pl.active, link)
	}
	pl.mu.Unlock()
}

// hurry queues an entry for an early report.
func (s *Store) hurry(link uint32, e *entry) {
	if e.queued.Load() {
		return
	}
	n := link >> entryBits
	pl := &s.pools[n]
	pl.mu.Lock()
	queue := !e.dead && e.queued.CompareAndSwap(false, true)
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

// widen makes room for registers of so many peers.
func (s *Store) widen(stride int) {
	s.stride.Store(int32(stride))
	for n := range s.pools {
		pl := &s.pools[n]
		pl.mu.Lock()
		chunks := pl.chunks.Load()
		pl.mu.Unlock()
		if chunks == nil {
			continue
		}
		for _, c := range *chunks {
			for i := range c.entries {
				c.entries[i].mu.Lock()
			}
			if c.stride < stride {
				regs := make([]register, chunkLen*stride)
				for i := range chunkLen {
					copy(regs[i*stride:], c.regs[i*c.stride:(i+1)*c.stride])
				}
				c.regs, c.stride = regs, stride
			}
			for i := range c.entries {
				c.entries[i].mu.Unlock()
			}
		}
	}
}

// forget clears the registers of a peer's slot, before another peer gets it.
func (s *Store) forget(slot int) {
	s.each(func(_ uint32, e *entry, regs []register) {
		if slot < len(regs) {
			regs[slot] = register{}
		}
		e.head.Store(0)
	})
}

// each calls f with every entry ever used, locked.
func (s *Store) each(f func(link uint32, e *entry, regs []register)) {
	for n := range s.pools {
		s.eachOf(n, f)
	}
}

func (s *Store) eachOf(n int, f func(link uint32, e *entry, regs []register)) {
	pl := &s.pools[n]
	pl.mu.Lock()
	used := pl.next
	pl.mu.Unlock()
	for i := uint32(1); i <= used; i++ {
		link := uint32(n)<<entryBits | i
		e, c, j := s.entry(link)
		e.mu.Lock()
		f(link, e, c.registers(j))
		e.mu.Unlock()
	}
}
