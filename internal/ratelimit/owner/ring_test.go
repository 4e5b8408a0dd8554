package owner

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"converger/internal/cluster"
)

func TestRing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		ids := rapid.SliceOfNDistinct(rapid.Uint64Min(1), 2, 12, rapid.ID).Draw(rt, "ids")
		r := ring{}
		for _, id := range ids {
			r = append(r, cluster.ID(id))
		}
		slices.Sort(r)
		gone := rapid.IntRange(0, len(r)-1).Draw(rt, "gone")
		without := slices.Delete(slices.Clone(r), gone, gone+1)
		counts := map[cluster.ID]int{}
		const keys = 3000
		for i := range uint64(keys) {
			k := key(i + 1)
			owner, next := r.first(k)
			if owner == next || owner == 0 || next == 0 {
				rt.Fatalf("owner %v, next %v", owner, next)
			}
			counts[owner]++
			// Without the owner the next owns; nobody else's keys move.
			heir, _ := without.first(k)
			switch {
			case owner == r[gone] && heir != next:
				rt.Fatalf("%v inherits from %v, the copy is at %v", heir, owner, next)
			case owner != r[gone] && heir != owner:
				rt.Fatalf("a key moved from %v to %v when %v left", owner, heir, r[gone])
			}
		}
		for id, n := range counts {
			if even := keys / len(r); n < even*7/10 || n > even*13/10+10 {
				rt.Fatalf("%v owns %d of %d keys among %d nodes", id, n, keys, len(r))
			}
		}
	})
}

func TestNewRingIsSorted(t *testing.T) {
	t.Parallel()
	v := &cluster.View{Peers: []cluster.Peer{{ID: 2, Standing: cluster.Visible}, {ID: 4, Standing: cluster.Joining}, {ID: 6, Standing: cluster.Split}, {ID: 8, Standing: cluster.Visible}}}
	for self, want := range map[cluster.ID]ring{1: {1, 2, 8}, 5: {2, 5, 8}, 9: {2, 8, 9}} {
		if got := newRing(self, v); !slices.Equal(got, want) {
			t.Errorf("%v: %v, want %v", self, got, want)
		}
	}
}
