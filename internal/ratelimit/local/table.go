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

// slot is what checks read of a counter and hardly ever write: 32 bytes without a
// pointer, so that a million of them cost the garbage collector nothing.
type slot struct {
	hi, lo atomic.Uint64
	form   atomic.Uint64 // Policy.Shape; of windows with a hint in ratelimit.ShapeSpare
	mark   atomic.Uint64 // only with Peers: mark<<32 | link, see Counter
}

// shape is the Policy.Shape under which the counter is kept: a word is read before
// the shape that tells its unit.
func (sl *slot) shape() uint64 {
	form := sl.form.Load()
	if ratelimit.Algorithm(form>>ratelimit.ShapeAlgorithm) != ratelimit.TokenBucket {
		form &^= ratelimit.ShapeSpare
	}
	return form
}

// A hint is what a window's form has in ratelimit.ShapeSpare: that it is one, the last
// nine bits of the window's index, and a ceiling in units of slack, which the window's count
// had not passed. Who finds the limit further off than slack even at the ceiling adds to the
// word without a look at it first: cores that share a key then wait for its line once a
// check and not twice. Whoever passes the ceiling puts another hint before it does anything
// else, so that no more such additions go astray than there are callers at work; a hint that
// is old or wrong costs no more than that.
const (
	hintWindow = 20 // bits of the ceiling, below those of the window
	hintSet    = 1 << 9
)

// hinted tells whether a form differs from a policy's shape by nothing but a hint for win.
func hinted(hint uint64, win uint32) bool { return hint>>hintWindow == uint64(win%hintSet|hintSet) }

func ceiling(hint uint64) uint64 { return hint % (1 << hintWindow) * slack }

// hint replaces a hint by one whose ceiling is half way from a window's count to where slack
// begins, since all cores must learn of each; by none near the limit.
//
//go:noinline
func (r ref) hint(p *ratelimit.Policy, was uint64, win, count, room uint32) {
	is := uint64(0)
	if room > count+slack {
		if top := (count + (room-slack-count)/2) / slack; top*slack > count {
			is = uint64(win%hintSet|hintSet)<<hintWindow | uint64(top)
		}
	}
	if is != was {
		r.sl.form.CompareAndSwap(p.Shape()|was, p.Shape()|is)
	}
}

func (r ref) unhint(p *ratelimit.Policy, was uint64) {
	r.sl.form.CompareAndSwap(p.Shape()|was, p.Shape())
}

// table is an open-addressed hash table that is replaced, never emptied: a
// search ends at the first slot that was never used.
type table struct {
	slots []slot
	// words are State.Word. They stand apart because every check that admits writes
	// one: the line that tells whose a counter is stays with all cores.
	words []atomic.Uint64
	prevs []atomic.Uint32 // cold: State.Prev; of token buckets how far they were booked ahead, ms
}

func newTable(slots int) *table {
	n := (slots + groupLen - 1) / groupLen * groupLen
	return &table{make([]slot, n), make([]atomic.Uint64, n), make([]atomic.Uint32, n)}
}

func (t *table) len() int    { return len(t.slots) }
func (t *table) groups() int { return len(t.slots) / groupLen }

// ref is what a spend needs of counter i, whose key must begin with hi.
func (t *table) ref(i int, hi uint64) ref {
	return ref{sl: &t.slots[i], word: &t.words[i], prev: &t.prevs[i], hi: hi}
}

// at is the ref of a counter as it is.
func (t *table) at(i int) ref {
	r := t.ref(i, 0)
	r.hi = r.sl.hi.Load()
	return r
}

// is tells whether a counter is that of a key.
func (r ref) is(k ratelimit.Key) bool { return r.sl.hi.Load() == k.Hi && r.sl.lo.Load() == k.Lo }

// unlink forgets what Peers kept for a slot whose counter has ended.
func (r ref) unlink(peers Peers) {
	if peers == nil {
		return
	}
	if link := uint32(r.sl.mark.Swap(0)); link != 0 {
		peers.Freed(link)
	}
}

// walk is the order in which a key's groups are tried.
type walk struct{ group, step, groups uint32 }

func (t *table) walk(k ratelimit.Key) walk {
	hi, _ := bits.Mul64(k.Hi, uint64(t.groups()))
	return walk{uint32(hi), uint32(k.Lo), uint32(t.groups())}
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
			r := t.at(i)
			switch {
			case r.is(k):
				return i
			case r.hi == 0:
				return -1
			}
		}
		w.next()
	}
	return -1
}

// over tells whether a counter has ended by a moment.
func (r ref) over(at ratelimit.Instant) bool {
	w := r.word.Load()
	return ratelimit.Over(r.sl.shape(), w, at)
}

// retire takes an ended counter out of use, unless somebody spends on it just now.
func (r ref) retire(at ratelimit.Instant) bool {
	w := r.word.Load()
	return ratelimit.Over(r.sl.shape(), w, at) && r.word.CompareAndSwap(w, frozenWord)
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
		grown, atLeast := t.len() >= max(maxSlots, minSlots), minSlots
		if grown || sh.used*10 < t.len()*8 {
			i := sh.claim(t, k, now-grace)
			if i < 0 && grown {
				i = sh.claim(t, k, now)
			}
			if i >= 0 {
				fresh := p.Fresh(now)
				r := t.at(i)
				r.prev.Store(fresh.Prev)
				r.sl.form.Store(p.Shape())
				r.sl.lo.Store(k.Lo)
				r.word.Store(fresh.Word)
				r.sl.hi.Store(k.Hi)
				sh.keys.Add(1)
				return t, i
			}
			if grown {
				break
			}
			atLeast = t.len() * 5 / 4 // room, but none where k may be
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
			r := t.at(i)
			switch {
			case r.hi == 0:
				sh.used++
				r.word.Store(frozenWord)
			case r.hi == vacant:
			case r.retire(ended):
				r.unlink(sh.peers)
				sh.keys.Add(-1)
				sh.evicted.Add(1)
			default:
				continue
			}
			r.sl.hi.Store(vacant)
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
	for i := range t.len() {
		found = sh.free(t, i, now) || found
	}
	return found
}

func (sh *shard) free(t *table, i int, now ratelimit.Instant) bool {
	r := t.at(i)
	if r.hi <= vacant || !r.retire(now) {
		return false
	}
	r.sl.hi.Store(vacant)
	r.unlink(sh.peers)
	sh.keys.Add(-1)
	sh.evicted.Add(1)
	return true
}

// grow replaces the table by one that holds the counters which have not ended by
// a moment, with room for as many again. mu is held.
func (sh *shard) grow(t *table, ended ratelimit.Instant, atLeast, maxSlots int) {
	living := 0
	for i := range t.len() {
		if r := t.at(i); r.hi > vacant && !r.over(ended) {
			living++
		}
	}
	for n := min(max(living*2, atLeast), maxSlots); ; n += n / 8 {
		if sh.moveTo(t, newTable(n), ended) {
			return
		}
	}
}

// moveTo chooses the new places first, which has no effect, and moves the
// counters then: each word is frozen as it is read, so that whoever holds the
// old slot starts over and finds the new one.
func (sh *shard) moveTo(t, nt *table, ended ratelimit.Instant) bool {
	places := make([]int32, t.len())
	for i := range places {
		r := t.at(i)
		places[i] = -1
		if r.hi > vacant && !r.over(ended) {
			to := nt.place(ratelimit.Key{Hi: r.hi, Lo: r.sl.lo.Load()})
			if to < 0 {
				return false
			}
			places[i] = int32(to)
		}
	}
	keys := 0
	for i, to := range places {
		r := t.at(i)
		w := r.word.Swap(frozenWord)
		if r.hi <= vacant {
			continue
		}
		if to < 0 {
			// Over, unless somebody spent on it since it was looked at.
			if !ratelimit.Over(r.sl.shape(), w, ended) {
				to = int32(nt.place(ratelimit.Key{Hi: r.hi, Lo: r.sl.lo.Load()}))
			}
			if to < 0 {
				sh.evicted.Add(1)
				r.unlink(sh.peers)
				continue
			}
		}
		n := nt.at(int(to))
		n.word.Store(w)
		n.prev.Store(r.prev.Load())
		n.sl.form.Store(r.sl.form.Load())
		n.sl.mark.Store(r.sl.mark.Load()) // a link is set under mu only; a lost mark is set anew
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
			i := w.index(k, j)
			if r := t.at(i); r.hi == 0 {
				r.sl.lo.Store(k.Lo)
				r.sl.hi.Store(k.Hi)
				return i
			}
		}
		w.next()
	}
	return -1
}
