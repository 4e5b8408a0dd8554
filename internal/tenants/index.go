package tenants

import "sync/atomic"

// index finds entries by a key they carry: an open-addressed table of pointers. Readers take no lock and allocate
// nothing; there is one writer at a time (the Directory's poll). As fast as a general concurrent map, it costs 11 to 21
// bytes a row beside the entry, where that needs about 60: keys are not stored twice and, being random already (SHA-256,
// the tail of a UUIDv7), not hashed again, but for names. Nobody outside can make them collide, for they are made by the
// program, or hashed with a seed of the process.
//
// An entry never moves within a table: put replaces it in its slot, remove leaves a mark that readers step over, and a
// table that fills up is copied aside and published whole. So a reader beside a writer sees the old entry or the new
// one, and never misses a third.
type index[K comparable, E any] struct {
	table atomic.Pointer[[]atomic.Pointer[E]] // length is a power of two
	key   func(*E) K
	spot  func(K) uint64 // where the search for a key begins; its low bits must be random
	gone  *E             // marks a slot whose entry was removed

	live atomic.Int64 // entries
	used int          // slots that are not nil; only the writer looks
}

const indexMinSlots = 8

// newIndex makes an index with room for n entries; it grows when there are more.
func newIndex[K comparable, E any](n int, key func(*E) K, spot func(K) uint64) *index[K, E] {
	x := &index[K, E]{key: key, spot: spot, gone: new(E)}
	x.table.Store(newTable[E](n))
	return x
}

// newTable makes a table that n entries fill to three quarters at most.
func newTable[E any](n int) *[]atomic.Pointer[E] {
	size := indexMinSlots
	for size/4*3 < n {
		size *= 2
	}
	t := make([]atomic.Pointer[E], size)
	return &t
}

func (x *index[K, E]) get(k K) (*E, bool) {
	table := *x.table.Load()
	mask := uint64(len(table) - 1)
	for i := x.spot(k) & mask; ; i = (i + 1) & mask {
		switch e := table[i].Load(); {
		case e == nil:
			return nil, false
		case e != x.gone && x.key(e) == k:
			return e, true
		}
	}
}

// len is the number of entries; safe beside the writer.
func (x *index[K, E]) len() int { return int(x.live.Load()) }

// put adds e, or replaces the entry with the same key.
func (x *index[K, E]) put(e *E) {
	if table := *x.table.Load(); (x.used+1)*4 > len(table)*3 {
		x.rebuild()
	}
	if x.insert(*x.table.Load(), e) {
		x.live.Add(1)
	}
}

// insert reports whether e is new rather than a replacement.
func (x *index[K, E]) insert(table []atomic.Pointer[E], e *E) bool {
	k, mask := x.key(e), uint64(len(table)-1)
	for i := x.spot(k) & mask; ; i = (i + 1) & mask {
		switch old := table[i].Load(); {
		case old == nil:
			table[i].Store(e)
			x.used++
			return true
		case old != x.gone && x.key(old) == k:
			table[i].Store(e)
			return false
		}
	}
}

// remove takes out the entry with this key, if there is one.
func (x *index[K, E]) remove(k K) {
	table := *x.table.Load()
	mask := uint64(len(table) - 1)
	for i := x.spot(k) & mask; ; i = (i + 1) & mask {
		switch e := table[i].Load(); {
		case e == nil:
			return
		case e != x.gone && x.key(e) == k:
			table[i].Store(x.gone)
			x.live.Add(-1)
			return
		}
	}
}

// rebuild publishes a copy without the marks, sized for twice the entries.
func (x *index[K, E]) rebuild() {
	table := newTable[E](2 * x.len())
	x.used = 0
	for e := range x.all() {
		x.insert(*table, e)
	}
	x.table.Store(table)
}

// all ranges over the entries, in no order. Entries put meanwhile may or may not be met.
func (x *index[K, E]) all() func(yield func(*E) bool) {
	return func(yield func(*E) bool) {
		table := *x.table.Load()
		for i := range table {
			if e := table[i].Load(); e != nil && e != x.gone && !yield(e) {
				return
			}
		}
	}
}
