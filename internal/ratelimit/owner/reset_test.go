package owner

import (
	"fmt"
	"testing"
	"time"

	"converger/internal/ratelimit"
)

// A reset holds against a node that did not hear of it, be it the key's owner, who keeps its copy or neither, whether it
// speaks before it is spoken to or not, and whether the others knew the key or not. It takes the reset in when it is back.
func TestResetHoldsAgainstThoseWhoMissedIt(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		for lost := range 3 {
			for _, copied := range []bool{true, false} {
				for _, speaks := range []bool{true, false} {
					t.Run(fmt.Sprintf("%v/node %d/copied %v/speaks first %v", a, lost, copied, speaks), func(t *testing.T) {
						t.Parallel()
						m := newMesh(t, 3, Config{})
						p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 9, Scale: time.Hour, Algorithm: a})
						it := m.ownedBy(p, m.nodes[0], 1)
						m.nodes[1].spend(t, it, 7)
						if copied {
							m.copyAll()
						}
						whole := m.nodes[0].ring()
						away := m.nodes[lost]
						away.gone.Store(true) // it sees the others as before
						m.nodes[(lost+1)%3].see(m.nodes[(lost+2)%3])
						m.nodes[(lost+2)%3].see(m.nodes[(lost+1)%3])
						fewer := m.nodes[(lost+1)%3].ring()
						handOver := func(was, is ring) {
							for i, n := range m.nodes {
								if i != lost {
									n.handOver(was, is)
								}
							}
						}
						handOver(whole, fewer)
						m.now.Add(int64(5 * time.Second))
						for i, n := range m.nodes {
							if i != lost {
								if err := n.Reset(t.Context(), m.clock.Now(), it); err != nil {
									t.Fatal(err)
								}
							}
						}
						if got := m.nodes[(lost+1)%3].spend(t, it, 2); got != 2 {
							t.Errorf("%d of 2 admitted after the reset", got)
						}
						m.copyAll()
						m.now.Add(int64(5 * time.Second))

						away.gone.Store(false)
						if speaks {
							away.handOver(fewer, whole)
							away.stale(it.Key)
							away.copyDirty()
						}
						m.views()
						handOver(fewer, whole)
						for range 3 {
							m.copyAll()
							for i, n := range m.nodes {
								if got := n.used(t, it); got != 2 {
									t.Errorf("%d used in the eyes of node %d, want the 2 after the reset", got, i)
								}
							}
						}
						// It is the owner's word also when the owner goes.
						m.nodes[0].gone.Store(true)
						m.views()
						if got := m.nodes[1].used(t, it); got != 2 {
							t.Errorf("%d used in the eyes of the heir, want 2", got)
						}
					})
				}
			}
		}
	}
}

// A node that starts takes nothing from before a reset over from one that has missed it.
func TestResetHoldsForNewcomers(t *testing.T) {
	t.Parallel()
	m := newMesh(t, 2, Config{})
	joined := m.start(t, Config{})
	p := newPolicy(t, ratelimit.LoginAccount, ratelimit.Rule{Limit: 9, Scale: time.Hour})
	it := m.movesTo(p, m.nodes[0], joined)
	m.nodes[0].spend(t, it, 7)
	m.copyAll()
	m.now.Add(int64(time.Second))
	if err := m.nodes[1].Reset(t.Context(), m.clock.Now(), it); err != nil {
		t.Fatal(err)
	}
	joined.see(m.nodes...)
	if err := joined.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	if u, err := joined.counts.Peek(t.Context(), m.clock.Now(), it); err != nil || u.Used != 0 {
		t.Errorf("%d used of before a reset (%v)", u.Used, err)
	}
}
