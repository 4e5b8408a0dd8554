package local

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/ratelimit"
)

const (
	groupLen = 8 // slots of a group: 256 bytes, four cache lines
	maxProbe = 8 // groups that a key may be in
	minSlots = 64
	// grace is how long an ended counter is kept while there is room: without
	// it, buckets that are idle for a moment would come and go all the time.
	grace = ratelimit.Instant(10 * time.Second)
	// frozen is the window index of a word that is no longer in use: its slot
	// was moved to another table or is being given to another key.
	frozen     = 1<<32 - 1
	frozenWord = frozen << 32
	// vacant marks a slot that holds no key but is passed over by searches;
	// ratelimit.Key never has it, nor 0, the mark of a slot never used.
	vacant = 1
)

// slot is one counter: 32 bytes without a pointer, so that a million of them
// cost the garbage collector nothing. word and shape are those of
// ratelimit.State and Policy.Shape; a word is read before the shape that tells
// its unit.
type slot struct {
	hi, lo      atomic.Uint64
	word, shape atomic.Uint64
}

// table is an open-addressed hash table that is replaced, never emptied: a
// search ends at the first slot that was never used.
type table struct {
	slots  []slot
	prev   []atomic.Uint32 // cold: State.Prev; of token buckets how far they were booked ahead, ms
	marks  []atomic.Uint64 // only with Peers: mark<<32 | link, see Counter
	groups uint32
}

func newTable(slots int, marks bool) *table {
	g := (slots + groupLen - 1) / groupLen
	t := &table{slots: make([]slot, g*groupLen), prev: make([]atomic.Uint32, g*groupLen), groups: uint32(g)}
	if marks {
		t.marks = make([]atomic.Uint64, g*groupLen)
	}
	return t
}

// ref is what a spend needs of slot i, which must hold a key that begins with hi.
func (t *table) ref(i int, hi uint64) ref {
	r := ref{sl: &t.slots[i], prev: &t.prev[i], hi: hi}
	if t.marks != nil {
		r.mark = &t.marks[i]
	}
	return r
}

// unlink forgets what Peers kept for a slot whose counter has ended.
func (t *table) unlink(i int, peers Peers) {
	if t.marks == nil {
		return
	}
	if link := uint32(t.marks[i].Swap(0)); link != 0 {
		peers.Freed(link)
	}
}

// walk is the order in which a key's groups are tried.
type walk struct{ group, step, groups uint32 }

func (t *table) walk(k ratelimit.Key) walk {
	hi, _ := bits.Mul64(k.Hi, uint64(t.groups))
	return walk{uint32(hi), uint32(k.Lo), t.groups}
}

func (w *walk) next() {
	w.group = uint32((uint64(w.group) + uint64(w.step%w.groups) + 1) % uint64(w.groups))
	w.step = w.step*0x9E3779B1 + 1
}

// index is the j-th slot of the present group in the order of key k.
func (w *walk) index(k ratelimit.Key, j int) int {
	return int(w.group)*groupLen + (int(k.Hi)+j)&(groupLen-1)
}

// find returns the index of a key, or -1. It takes no lock.
func (t *table) find(k ratelimit.Key) int {
	w := t.walk(k)
	for range maxProbe {
		for j := range groupLen {
			i := w.index(k, j)
			sl := &t.slots[i]
			switch hi := sl.hi.Load(); {
			case hi == k.Hi && sl.lo.Load() == k.Lo:
				return i
			case hi == 0:
				return -1
			}
		}
		w.next()
	}
	return -1
}

// over tells whether a slot's counter has ended by a moment.
func (s *slot) over(at ratelimit.Instant) bool {
	return ratelimit.Over(s.shape.Load(), s.word.Load(), at)
}

// retire takes an ended counter out of use, unless somebody spends on it just now.
func (s *slot) retire(at ratelimit.Instant) bool {
	w := s.word.Load()
	return ratelimit.Over(s.shape.Load(), w, at) && s.word.CompareAndSwap(w, frozenWord)
}

// shard is a part of the key space with its own table. The mutex is for
// inserting, growing and changes of a counter's unit, never for spending.
type shard struct {
	tab   atomic.Pointer[table]
	peers Peers
	mu    sync.Mutex
	// Guarded by mu; keys is read by metrics.
	used     int // slots that hold or held a key
	keys     atomic.Int64
	purgedAt ratelimit.Instant
	// fullAt is the millisecond in which an insert last failed: the search for
	// room is skipped for the rest of it.
	fullAt  atomic.Int64
	evicted atomic.Uint64
	_       [48]byte
}

// insert makes room for a key that is not in the table and starts its counter.
// It returns nil when the shard is full of living keys. mu is held.
func (sh *shard) insert(k ratelimit.Key, p *ratelimit.Policy, now ratelimit.Instant, maxKeys int) (*table, int) {
	maxSlots := maxKeys * 9 / 7 // leaves a load of 0.78
	for {
		t := sh.tab.Load()
		if sh.keys.Load() >= int64(maxKeys) && !sh.bury(t, k, now) && !sh.purge(t, now) {
			break
		}
		grown, atLeast := len(t.slots) >= max(maxSlots, minSlots), minSlots
		if grown || sh.used*10 < len(t.slots)*8 {
			i := sh.claim(t, k, now-grace)
			if i < 0 && grown {
				i = sh.claim(t, k, now)
			}
			if i >= 0 {
				fresh := p.Fresh(now)
				sl := &t.slots[i]
				t.prev[i].Store(fresh.Prev)
				sl.shape.Store(p.Shape())
				sl.lo.Store(k.Lo)
				sl.word.Store(fresh.Word)
				sl.hi.Store(k.Hi)
				sh.keys.Add(1)
				return t, i
			}
			if grown {
				break
			}
			atLeast = len(t.slots) * 5 / 4 // room, but none where k may be
		}
		sh.grow(t, now-grace, atLeast, max(maxSlots, minSlots))
	}
	sh.fullAt.Store(int64(now) / 1e6)
	return nil, -1
}

// claim takes the first slot of k's order that is unused, vacant or ended by a
// moment, and returns it vacant with a frozen word; -1 if there is none.
func (sh *shard) claim(t *table, k ratelimit.Key, ended ratelimit.Instant) int {
	w := t.walk(k)
	for range maxProbe {
		for j := range groupLen {
			i := w.index(k, j)
			sl := &t.slots[i]
			switch hi := sl.hi.Load(); {
			case hi == 0:
				sh.used++
				sl.word.Store(frozenWord)
			case hi == vacant:
			case sl.retire(ended):
				t.unlink(i, sh.peers)
				sh.keys.Add(-1)
				sh.evicted.Add(1)
			default:
				continue
			}
			sl.hi.Store(vacant)
			return i
		}
		w.next()
	}
	return -1
}

// bury frees one ended slot among those that k may be in.
func (sh *shard) bury(t *table, k ratelimit.Key, now ratelimit.Instant) bool {
	w := t.walk(k)
	for range maxProbe {
		for j := range groupLen {
			if sh.free(t, w.index(k, j), now) {
				return true
			}
		}
		w.next()
	}
	return false
}

// purge frees every ended slot, at most once a second.
func (sh *shard) purge(t *table, now ratelimit.Instant) bool {
	if d := now - sh.purgedAt; d >= 0 && d < ratelimit.Instant(time.Second) {
		return false
	}
	sh.purgedAt = now
	found := false
	for i := range t.slots {
		found = sh.free(t, i, now) || found
	}
	return found
}

func (sh *shard) free(t *table, i int, now ratelimit.Instant) bool {
	sl := &t.slots[i]
	if sl.hi.Load() <= vacant || !sl.retire(now) {
		return false
	}
	sl.hi.Store(vacant)
	t.unlink(i, sh.peers)
	sh.keys.Add(-1)
	sh.evicted.Add(1)
	return true
}

// grow replaces the table by one that holds the counters which have not ended by
// a moment, with room for as many again. mu is held.
func (sh *shard) grow(t *table, ended ratelimit.Instant, atLeast, maxSlots int) {
	living := 0
	for i := range t.slots {
		if t.slots[i].hi.Load() > vacant && !t.slots[i].over(ended) {
			living++
		}
	}
	for n := min(max(living*2, atLeast), maxSlots); ; n += n / 8 {
		if sh.moveTo(t, newTable(n, t.marks != nil), ended) {
			return
		}
	}
}

// moveTo chooses the new places first, which has no effect, and moves the
// counters then: each word is frozen as it is read, so that whoever holds the
// old slot starts over and finds the new one.
func (sh *shard) moveTo(t, nt *table, ended ratelimit.Instant) bool {
	places := make([]int32, len(t.slots))
	for i := range t.slots {
		sl := &t.slots[i]
		places[i] = -1
		if sl.hi.Load() > vacant && !sl.over(ended) {
			to := nt.place(ratelimit.Key{Hi: sl.hi.Load(), Lo: sl.lo.Load()})
			if to < 0 {
				return false
			}
			places[i] = int32(to)
		}
	}
	keys := 0
	for i := range t.slots {
		sl := &t.slots[i]
		w := sl.word.Swap(frozenWord)
		if sl.hi.Load() <= vacant {
			continue
		}
		to := int(places[i])
		if to < 0 {
			// Over, unless somebody spent on it since it was looked at.
			if !ratelimit.Over(sl.shape.Load(), w, ended) {
				to = nt.place(ratelimit.Key{Hi: sl.hi.Load(), Lo: sl.lo.Load()})
			}
			if to < 0 {
				sh.evicted.Add(1)
				t.unlink(i, sh.peers)
				continue
			}
		}
		nt.slots[to].word.Store(w)
		nt.slots[to].shape.Store(sl.shape.Load())
		nt.prev[to].Store(t.prev[i].Load())
		if t.marks != nil { // a link is set under mu only; a lost mark is set anew
			nt.marks[to].Store(t.marks[i].Load())
		}
		keys++
	}
	sh.used = keys
	sh.keys.Store(int64(keys))
	sh.tab.Store(nt)
	return true
}

// place reserves a slot for a key in a table that nobody else sees yet.
func (t *table) place(k ratelimit.Key) int {
	w := t.walk(k)
	for range maxProbe {
		for j := range groupLen {
			if i := w.index(k, j); t.slots[i].hi.Load() == 0 {
				t.slots[i].lo.Store(k.Lo)
				t.slots[i].hi.Store(k.Hi)
				return i
			}
		}
		w.next()
	}
	return -1
}
