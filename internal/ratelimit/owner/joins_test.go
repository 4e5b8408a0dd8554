package owner

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// see makes a node see those nodes, and nobody else.
func (n *node) see(others ...*node) {
	v := &cluster.View{Visible: 1, Alive: 1}
	for _, o := range n.mesh.nodes { // by rising ID
		for _, wanted := range others {
			if o == wanted && o != n {
				v.Peers = append(v.Peers, cluster.Peer{ID: o.id, Standing: cluster.Visible, Session: 1})
				v.Visible++
				v.Alive++
			}
		}
	}
	n.view.Store(v)
}

// movesTo finds an item of the policy that belongs to one node, and to another once that has joined.
func (m *mesh) movesTo(p *ratelimit.Policy, from, to *node) ratelimit.Item {
	var before, after ring
	for _, n := range m.nodes {
		after = append(after, n.id)
		if n != to {
			before = append(before, n.id)
		}
	}
	for i := uint64(1); ; i++ {
		was, _ := before.first(key(i))
		is, _ := after.first(key(i))
		if was == from.id && is == to.id {
			return ratelimit.Item{Key: key(i), Policy: p}
		}
	}
}

// While the others see one after the other that a node has joined, each key is still counted by one node at a time:
// whoever is asked, what was spent anywhere counts.
func TestJoinLoosensNothing(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		t.Run(a.String(), func(t *testing.T) {
			t.Parallel()
			m := newMesh(t, 3, Config{Deadline: time.Minute})
			before := m.nodes[0].ring()
			elder, early, late := m.nodes[0], m.nodes[1], m.nodes[2]
			joined := m.start(t, Config{Deadline: time.Minute})
			it := m.movesTo(newPolicy(t, ratelimit.TokenGenerate, ratelimit.Rule{Limit: 10, Scale: time.Hour, Algorithm: a}), elder, joined)
			want := func(n *node, used int, when string) {
				t.Helper()
				if got := n.used(t, it); got != used {
					t.Errorf("%s: %d used in the eyes of %v, want %d", when, got, n.id, used)
				}
			}
			elder.spend(t, it, 2)
			joined.see(elder, early, late)
			if err := joined.Sync(t.Context()); err != nil {
				t.Fatal(err)
			}
			elder.spend(t, it, 1) // after the newcomer was told
			want(joined, 3, "nobody sees the newcomer")

			early.see(m.nodes...)
			early.handOver(before, early.ring())
			want(early, 3, "one sees the newcomer")
			d := early.Take(t.Context(), begin, it)
			early.spend(t, it, 1)
			late.spend(t, it, 1)
			want(elder, 6, "spent through the newcomer and past it")
			early.Refund(t.Context(), d.Booking(0), it)
			for _, n := range m.nodes {
				want(n, 5, "one given back")
			}

			elder.see(m.nodes...)
			want(late, 5, "the owner sees the newcomer and has not handed over")
			elder.handOver(before, elder.ring())
			late.spend(t, it, 1) // it asks the elder still
			elder.spend(t, it, 1)
			joined.spend(t, it, 1)
			for _, n := range m.nodes {
				want(n, 8, "handed over, and one does not see the newcomer")
			}
			if got := late.spend(t, it, 5); got != 2 {
				t.Errorf("%d admitted, want the 2 that are left", got)
			}

			late.see(m.nodes...)
			late.handOver(before, late.ring())
			for _, n := range m.nodes {
				want(n, 10, "all see the newcomer")
				if n.spend(t, it, 3) != 0 {
					t.Errorf("%v admits more than the limit", n.id)
				}
			}
			if joined.joins.going.Load() {
				t.Error("the newcomer still asks others, though all have handed over")
			}
		})
	}
}

// Items that are counted by several nodes are spent all or none while keys move, too.
func TestSeveralItemsWhileJoining(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 2, Config{Deadline: time.Minute})
	joined := m.start(t, Config{Deadline: time.Minute})
	p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 5, Scale: time.Hour})
	one, two := m.movesTo(p, m.nodes[0], joined), m.movesTo(p, m.nodes[1], joined)
	joined.see(m.nodes...)
	if err := joined.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	m.nodes[0].spend(t, one, 1)
	m.nodes[1].spend(t, two, 4)
	m.nodes[0].see(m.nodes...) // it asks the newcomer about both, who has to ask on at each
	items := []ratelimit.Item{one, two}
	if d := m.nodes[0].TakeAll(t.Context(), begin, items); !d.Allowed || d.Item != 1 || d.Remaining != 0 {
		t.Errorf("%+v", d)
	}
	if d := m.nodes[0].TakeAll(t.Context(), begin, items); d.Allowed || d.Item != 1 {
		t.Errorf("%+v", d)
	}
	for it, want := range map[ratelimit.Item]int{one: 2, two: 5} {
		for _, n := range m.nodes {
			if got := n.used(t, it); got != want {
				t.Errorf("%d used in the eyes of %v, want %d", got, n.id, want)
			}
		}
	}
}

// A newcomer decides by itself when the one that owned a key is gone, does not answer, or says nothing for long.
func TestJoinEnds(t *testing.T) {
	t.Parallel()
	for name, lose := range map[string]func(elder *node){
		"gone":  func(elder *node) { elder.gone.Store(true) },
		"hangs": func(elder *node) { elder.hangs.Store(true) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m := newMesh(t, 2, Config{Clock: ratelimit.NewClock()})
				joined := m.start(t, Config{Clock: ratelimit.NewClock()})
				it := m.movesTo(newPolicy(t, ratelimit.TokenGenerate, ratelimit.Rule{Limit: 10, Scale: time.Hour}), m.nodes[0], joined)
				m.nodes[0].spend(t, it, 4)
				joined.see(m.nodes...)
				if err := joined.Sync(t.Context()); err != nil {
					t.Fatal(err)
				}
				lose(m.nodes[0])
				if got := joined.spend(t, it, 1); got != 1 {
					t.Errorf("%d admitted, want 1", got)
				}
				if got := joined.spend(t, it, 20); got != 5 {
					t.Errorf("%d more admitted, want the 5 that are left as far as it was told", got)
				}
				time.Sleep(joinGrace + time.Nanosecond)
				if joined.joins.look(); joined.joins.going.Load() {
					t.Error("it still asks others")
				}
			})
		})
	}
}

// A run of it in time: a node joins under load, and nothing more than the limit is admitted in all.
func TestJoinUnderLoad(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		m := newMesh(t, 3, Config{Clock: ratelimit.NewClock()})
		m.delay.Store(int64(200 * time.Microsecond))
		var all sync.WaitGroup
		ctx, stop := context.WithCancel(t.Context())
		for _, n := range m.nodes {
			all.Go(func() { _ = n.Run(ctx) })
		}
		joined := m.start(t, Config{Clock: ratelimit.NewClock()})
		p := newPolicy(t, ratelimit.TokenGenerate, ratelimit.Rule{Limit: 40, Scale: time.Hour})
		items := []ratelimit.Item{m.movesTo(p, m.nodes[0], joined), m.movesTo(p, m.nodes[1], joined), m.movesTo(p, m.nodes[2], joined)}
		admitted := make([]atomic.Int64, len(items))
		var callers sync.WaitGroup
		for _, n := range m.nodes[:3] {
			for i, it := range items {
				callers.Go(func() {
					for range 100 {
						admitted[i].Add(int64(n.spend(t, it, 1)))
						time.Sleep(10 * time.Millisecond)
					}
				})
			}
		}
		time.Sleep(20 * time.Millisecond)
		joined.see(m.nodes...)
		if err := joined.Sync(ctx); err != nil {
			t.Fatal(err)
		}
		all.Go(func() { _ = joined.Run(ctx) })
		for _, n := range m.nodes[:3] { // a view is up to 100 ms old
			time.Sleep(33 * time.Millisecond)
			n.see(m.nodes...)
		}
		callers.Wait()
		stop()
		all.Wait()
		for i := range admitted {
			if got := admitted[i].Load(); got != 40 {
				t.Errorf("%d admitted of a limit of 40", got)
			}
		}
	})
}

func TestStartingNodesOwnNothing(t *testing.T) {
	t.Parallel()
	v := &cluster.View{Peers: []cluster.Peer{{ID: 2, Standing: cluster.Visible, Starting: true}, {ID: 4, Standing: cluster.Visible}}}
	if got := newRing(3, v); len(got) != 2 || got[0] != 3 || got[1] != 4 {
		t.Errorf("%v", got)
	}
}
