package cluster

import (
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// Registers of some starts of nodes, as a set that merges.
type registers map[cluster.ID]register

func (rs registers) merge(id cluster.ID, m register) (grown int64) {
	r := rs[id]
	grown, _ = r.merge(m)
	rs[id] = r
	return grown
}

// history draws what some starts of nodes sent: each batch number once, counts that
// rise and, by refunds and resets, fall.
func history(rt *rapid.T) (sent []struct {
	id cluster.ID
	m  register
}) {
	for id := cluster.ID(1); id <= cluster.ID(rapid.IntRange(1, 4).Draw(rt, "starts")); id++ {
		batch := rapid.SampledFrom([]uint32{0, 1<<31 - 3, 1<<32 - 4}).Draw(rt, "first batch")
		win, spent := uint32(7), uint32(0)
		for range rapid.IntRange(0, 12).Draw(rt, "messages") {
			if batch++; batch == 0 {
				batch = 1
			}
			if rapid.IntRange(0, 5).Draw(rt, "new window") == 0 {
				win, spent = win+1, 0
			}
			spent = uint32(max(0, int(spent)+rapid.IntRange(-3, 10).Draw(rt, "spent")))
			sent = append(sent, struct {
				id cluster.ID
				m  register
			}{id, register{batch: batch, win: win, count: spent, known: spent}})
		}
	}
	return sent
}

// Lost, repeated, reordered, merged twice: in the end everybody has the last word of
// each.
func TestMergeLaws(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		sent := history(rt)
		want := registers{}
		for _, s := range sent { // in order
			want[s.id] = s.m
		}
		seed := rapid.Uint64().Draw(rt, "order")
		rng := rand.New(rand.NewPCG(seed, 1))
		got, tokens := registers{}, map[cluster.ID]int64{}
		for range 2 {
			for _, i := range rng.Perm(len(sent)) {
				if rng.IntN(4) == 0 && sent[i].m != want[sent[i].id] { // lost, but not the last
					continue
				}
				got.merge(sent[i].id, sent[i].m)
				got.merge(sent[i].id, sent[i].m)
			}
		}
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(register{})); diff != "" {
			rt.Fatalf("not what was sent last:\n%s", diff)
		}
		// What a bucket is charged in an epoch is what was spent in it, on any path.
		charged := registers{}
		for _, i := range rng.Perm(len(sent)) {
			if m := sent[i].m; m.win == 7 {
				tokens[sent[i].id] += charged.merge(sent[i].id, m)
			}
		}
		for id, r := range charged {
			if tokens[id] != int64(r.count) {
				rt.Fatalf("charged %d, spent %d", tokens[id], r.count)
			}
		}
	})
}

func TestMergeIsAssociative(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		sent := history(rt)
		k := rapid.IntRange(0, len(sent)).Draw(rt, "cut")
		whole, left, right := registers{}, registers{}, registers{}
		for i, s := range sent {
			whole.merge(s.id, s.m)
			if i < k {
				left.merge(s.id, s.m)
			} else {
				right.merge(s.id, s.m)
			}
		}
		for id, r := range right { // states merge as messages do
			left.merge(id, r)
		}
		if diff := cmp.Diff(whole, left, cmp.AllowUnexported(register{})); diff != "" {
			rt.Fatal(diff)
		}
	})
}

// In 24.8 days of a batch a millisecond numbers wrap half way; the newer one wins.
func TestBatchNumbersWrap(t *testing.T) {
	t.Parallel()
	r := register{batch: 1<<32 - 1, win: 1, count: 10}
	if _, taken := r.merge(register{batch: 1, win: 1, count: 4}); !taken || r.count != 4 {
		t.Errorf("a refund after the wrap was ignored: %+v", r)
	}
	if _, taken := r.merge(register{batch: 1<<32 - 1, win: 1, count: 10}); taken {
		t.Error("the old message came back")
	}
}

func TestRegisterKeepsTheWindowBefore(t *testing.T) {
	t.Parallel()
	r := register{batch: 1, win: 5, count: 40, prev: 30}
	for win, want := range map[uint32][2]uint32{4: {30, 0}, 5: {40, 30}, 6: {0, 40}, 7: {0, 0}} {
		if got := [2]uint32{r.in(win), r.before(win)}; got != want {
			t.Errorf("seen from window %d: %v, want %v", win, got, want)
		}
	}
}

// What a cell keeps comes back, but for the lower bits of the demand.
func TestCellKeepsItsRegister(t *testing.T) {
	t.Parallel()
	if size := unsafe.Sizeof(cell{}); size != 24 {
		t.Errorf("a cell takes %d bytes, want 24", size)
	}
	if size := unsafe.Sizeof(entry{}); size != 32 {
		t.Errorf("an entry takes %d bytes, want 32", size)
	}
	rapid.Check(t, func(t *rapid.T) {
		units := rapid.Uint32Range(0, ratelimit.MaxLimit)
		want := register{
			batch: rapid.Uint32().Draw(t, "batch"), win: rapid.Uint32().Draw(t, "win"), count: rapid.Uint32().Draw(t, "count"),
			prev: units.Draw(t, "prev"), known: units.Draw(t, "known"), at: rapid.Uint32Range(0, 1<<stampBits-1).Draw(t, "at"),
			demand: math.Float32frombits(uint32(half(rapid.Float32Range(0, 1e9).Draw(t, "demand"))) << 16),
		}
		near := want.win + uint32(rapid.Int32Range(-1<<23+1, 1<<23-1).Draw(t, "off"))
		var c cell
		c.store(want)
		if got := c.load(near); got != want {
			t.Fatalf("%+v, want %+v", got, want)
		}
		if epoch := rapid.Uint32().Draw(t, "epoch"); (c.load(epoch).win == epoch) != ((epoch-want.win)<<8 == 0) {
			t.Fatalf("window %d is taken for %d", want.win, epoch)
		}
	})
}
