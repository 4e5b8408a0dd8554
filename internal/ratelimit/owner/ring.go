package owner

import (
	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// Rendezvous hashing (Thaler and Ravishankar, 1998): every key orders the nodes by
// a hash of both, the first owns the key and the second keeps a copy. A node that
// comes or goes moves only the keys that it owns, or owned: one N-th.

// ring is the nodes among which keys are shared out, by rising ID.
type ring []cluster.ID

// newRing takes the nodes that can be heard and have opened, and this one.
func newRing(self cluster.ID, v *cluster.View) ring {
	r := make(ring, 0, len(v.Peers)+1)
	placed := false
	for _, p := range v.Peers { // by rising ID
		if !placed && self < p.ID {
			r, placed = append(r, self), true
		}
		if p.Standing == cluster.Visible && !p.Starting {
			r = append(r, p.ID)
		}
	}
	if !placed {
		r = append(r, self)
	}
	return r
}

// first returns the owner of a key and the next in its order, 0 if there is none.
func (r ring) first(k ratelimit.Key) (owner, next cluster.ID) {
	var best, second uint64
	for _, id := range r {
		switch s := score(k, id); {
		case owner == 0 || s > best:
			next, second = owner, best
			owner, best = id, s
		case next == 0 || s > second:
			next, second = id, s
		}
	}
	return owner, next
}

// score mixes a key, which is a hash already, with a node (the finalizer of
// SplitMix64, Steele, Lea and Flood, 2014).
func score(k ratelimit.Key, id cluster.ID) uint64 {
	x := k.Hi ^ uint64(id)*0x9E3779B97F4A7C15
	x = (x ^ x>>30) * 0xBF58476D1CE4E5B9
	x = (x ^ x>>27 ^ k.Lo) * 0x94D049BB133111EB
	return x ^ x>>31
}
