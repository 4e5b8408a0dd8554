package cluster

import (
	"cmp"
	"slices"
	"time"
)

const (
	// visibleFor is how long a peer counts as visible after it was heard. It is heard at least every pingEvery.
	visibleFor = 500 * time.Millisecond
	// staleAfter is the age at which a heartbeat no longer speaks for its node; they come every beatEvery.
	staleAfter = 3 * time.Second
	// deadFor and maxDead bound the dead in a view: who looks into it comes within minutes, and a hundred names in a row
	// would hide the one that matters.
	deadFor = 10 * time.Minute
	maxDead = 16
)

// witness is how far the database's word about who lives can be taken.
type witness uint8

const (
	noWitness     witness = iota // there is no database: gossip alone tells (tests)
	witnessGone                  // not reached for staleAfter
	witnessRecent                // reached again for less than staleAfter: others may not have had time to write
	witnessSteady
)

// row is the state of a peer's heartbeat row at the last reading.
type row uint8

const (
	rowNone row = iota
	rowFresh
	rowStale
)

// sighting is all that is known of a peer.
type sighting struct {
	heard    time.Duration // since its last message; -1: never
	row      row
	gossip   bool // gossip calls it alive
	replaced bool // another member answers at its address
}

// judge decides a peer's standing; ok is false for the dead. It is the rule of a split: what can't be heard and lives
// all the same keeps its share, what is dead leaves it to the others, and in doubt it lives.
func judge(s sighting, w witness) (standing Standing, ok bool) {
	ever := s.heard >= 0
	switch {
	case ever && s.heard <= visibleFor:
		return Visible, true
	case s.replaced:
		return 0, false
	case w == noWitness:
		if !s.gossip {
			return 0, false
		}
		if ever {
			return Split, true
		}
		return Joining, true
	case w == witnessGone, s.row == rowFresh:
		return Split, true
	case ever && (w == witnessRecent || s.heard < staleAfter && s.row == rowNone):
		// Its row may yet come: the database is just back, or the peer was too young to have one.
		return Split, true
	case !ever && s.gossip:
		return Joining, true
	}
	return 0, false
}

// missed are the dead that an operator is to hear of, the last first. Of heartbeats only stale ones are given, living are the
// nodes that live, now is the corrected clock.
func missed(stale []beat, living []member, now time.Time) []Dead {
	var dead []Dead
	for _, b := range stale {
		succeeds := func(m member) bool {
			return m.Address == b.m.Address || m.Name != "" && m.Name == b.m.Name && m.started().After(now.Add(-b.age))
		}
		if b.age < deadFor && !slices.ContainsFunc(living, succeeds) {
			dead = append(dead, Dead{b.id, b.m.Name, b.m.Address, b.m.Version, b.m.started(), b.age})
		}
	}
	slices.SortFunc(dead, func(a, b Dead) int { return cmp.Or(cmp.Compare(a.Silent, b.Silent), cmp.Compare(a.ID, b.ID)) })
	return dead[:min(len(dead), maxDead)]
}
