package owner

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

func ops(tb testing.TB) []op {
	p := newPolicy(tb, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 1000, Scale: 90 * time.Second, Algorithm: ratelimit.TokenBucket, Burst: 50})
	q := newPolicy(tb, ratelimit.LoginIP, ratelimit.Rule{Limit: 0, Scale: time.Second, Algorithm: ratelimit.SlidingWindow})
	return []op{
		{kind: opTake, now: begin, items: []ratelimit.Item{{Key: key(1), Policy: p, Cost: 7}, {Key: key(2), Policy: q}}},
		{kind: opAsk, now: begin, items: []ratelimit.Item{{Key: key(2), Policy: q, Cost: 1 << 31}}},
		{kind: opRefund, now: begin + 2, items: []ratelimit.Item{{Key: key(3), Policy: p}}},
		{kind: opReserve, now: begin, wait: 1500 * time.Millisecond, items: []ratelimit.Item{{Key: key(3), Policy: p}}},
		{kind: opPeek, now: begin, items: []ratelimit.Item{{Key: key(3), Policy: p}}},
	}
}

func TestOpsRoundTrip(t *testing.T) {
	t.Parallel()
	var b []byte
	for _, o := range ops(t) {
		b = appendOp(b, &o)
	}
	r := reader{b: b}
	var ps policies
	for _, want := range ops(t) {
		var got op
		if err := r.op(&got, &ps); err != nil {
			t.Fatal(err)
		}
		if got.kind != want.kind || got.now != want.now || got.wait != want.wait || len(got.items) != len(want.items) {
			t.Errorf("got %+v, want %+v", got, want)
			continue
		}
		for i := range got.items {
			g, w := got.items[i], want.items[i]
			if g.Key != w.Key || g.Cost != w.Cost || (g.Policy == nil) != (w.Policy == nil) ||
				g.Policy != nil && (g.Policy.Rule() != w.Policy.Rule() || g.Policy.Bucket() != w.Policy.Bucket()) {
				t.Errorf("item %d: got %+v, want %+v", i, g, w)
			}
		}
	}
	if len(r.b) != 0 {
		t.Errorf("%d bytes left", len(r.b))
	}
}

func TestResultRoundTrip(t *testing.T) {
	t.Parallel()
	o := ops(t)[0]
	for _, want := range []result{{true, 1, 5, 1000, begin - 4}, {false, 0, 0, 1<<32 - 1, begin + 1e9}} {
		r := reader{b: appendResult(nil, o.now, want)}
		got, err := r.result(&o)
		if diff := cmp.Diff(want, got, cmp.AllowUnexported(result{})); diff != "" || err != nil {
			t.Errorf("%v %s", err, diff)
		}
	}
}

// Whatever is asked is answered or refused, and an answer can be read.
func FuzzAnswer(f *testing.F) {
	all := []byte{wireVersion}
	for _, o := range ops(f) {
		f.Add(appendOp([]byte{wireVersion}, &o))
		all = appendOp(all, &o)
	}
	f.Add(all)
	f.Fuzz(func(t *testing.T, b []byte) {
		n := newMesh(t, 2, Config{MaxKeys: 1000}).nodes[0]
		answer, err := n.answer(t.Context(), b)
		if err == nil && (len(answer) == 0 || answer[0] != wireVersion) {
			t.Fatal(answer)
		}
	})
}

func FuzzCopies(f *testing.F) {
	p := newPolicy(f, ratelimit.ActivityCreate, ratelimit.Rule{Limit: 1000, Scale: time.Second})
	win, _ := p.Window(begin)
	f.Add(appendReset([]byte{wireVersion}, local.Reset{Key: key(1), At: begin, Until: begin.Add(time.Hour)}))
	f.Add(appendCopy([]byte{wireVersion}, key(1), p.Shape(), ratelimit.State{Word: uint64(win)<<32 | 5, Prev: 7}))
	f.Fuzz(func(t *testing.T, b []byte) {
		n := newMesh(t, 2, Config{MaxKeys: 1000}).nodes[0]
		for _, all := range []bool{false, true} {
			_ = n.takeIn(1000, b, all)
		}
		it := ratelimit.Item{Key: key(1), Policy: p}
		n.Take(t.Context(), begin, it)
		if u, err := n.counts.Peek(t.Context(), begin, it); err != nil || u.Remaining > 1000 {
			t.Fatalf("%+v, %v", u, err)
		}
	})
}
