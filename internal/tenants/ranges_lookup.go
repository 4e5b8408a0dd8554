package tenants

import (
	"net/netip"
	"slices"
	"time"

	"github.com/google/uuid"
)

// rangeEntry is what a node knows of an address range; deleted ones are not in the directory.
type rangeEntry struct {
	id      uuid.UUID
	prefix  netip.Prefix
	kind    RangeKind
	expires time.Time // zero: never
}

// addressRanges finds the range that decides for an address: a table of all ranges, tried at each length of prefix that is
// in use, the longest first. Operators write a handful of lengths, so that this is a few look-ups; a trie would be quicker
// only with dozens of them. Immutable.
type addressRanges struct {
	lengths4, lengths6 []int // descending
	byPrefix           map[netip.Prefix]*rangeEntry
}

// newAddressRanges gives nil for none, so that the common case is a single comparison.
func newAddressRanges(entries []*rangeEntry) *addressRanges {
	if len(entries) == 0 {
		return nil
	}
	a := &addressRanges{byPrefix: make(map[netip.Prefix]*rangeEntry, len(entries))}
	for _, e := range entries {
		a.byPrefix[e.prefix] = e
		lengths := &a.lengths6
		if e.prefix.Addr().Is4() {
			lengths = &a.lengths4
		}
		if !slices.Contains(*lengths, e.prefix.Bits()) {
			*lengths = append(*lengths, e.prefix.Bits())
		}
	}
	for _, lengths := range [][]int{a.lengths4, a.lengths6} {
		slices.SortFunc(lengths, func(x, y int) int { return y - x })
	}
	return a
}

func (a *addressRanges) len() int {
	if a == nil {
		return 0
	}
	return len(a.byPrefix)
}

// kind is "" for an address that is in no range. An expired range leaves its addresses to the next wider one.
func (a *addressRanges) kind(addr netip.Addr, now time.Time) RangeKind {
	if a == nil {
		return ""
	}
	lengths := a.lengths6
	if addr.Is4() {
		lengths = a.lengths4
	}
	for _, bits := range lengths {
		p, err := addr.Prefix(bits)
		if err != nil {
			return "" // not an address
		}
		if e, ok := a.byPrefix[p]; ok && (e.expires.IsZero() || now.Before(e.expires)) {
			return e.kind
		}
	}
	return ""
}
