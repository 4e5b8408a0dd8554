package cluster

import (
	"fmt"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// A reset holds against a node that did not hear of it: one that hung, one beyond a split, one that was asked for its counts
// by a node that starts. What it has counted counts nowhere again, and it takes the reset in itself when it is back.
func TestResetHoldsAgainstThoseWhoMissedIt(t *testing.T) {
	t.Parallel()
	const limit = 90
	hang := func(s *sim, yes bool) {
		n := s.nodes[0]
		n.hangs = yes
		for _, l := range n.waiting {
			s.deliver(l)
		}
		n.waiting = nil
	}
	for _, c := range []struct {
		name       string
		lose, back func(s *sim)
		busy       bool // it is asked before it has read what came meanwhile
	}{
		{"hung", func(s *sim) { hang(s, true) }, func(s *sim) { hang(s, false) }, false},
		{"hung, and asked first", func(s *sim) { hang(s, true) }, func(s *sim) { hang(s, false) }, true},
		{"beyond a split", func(s *sim) {
			s.net.cut = func(from, to *node) bool { return (from.index == 0) != (to.index == 0) }
		}, func(s *sim) { s.net.cut = nil }, false},
		{"beyond a split, and a node starts", func(s *sim) {
			s.net.cut = func(from, to *node) bool { return (from.index == 0) != (to.index == 0) }
		}, func(s *sim) {
			s.net.cut = nil
			s.nodes[2].dead = true
			s.nodes[2] = s.start(2)
		}, false},
	} {
		for _, a := range algorithms {
			for _, away := range []time.Duration{400 * time.Millisecond, 6 * time.Second} {
				t.Run(fmt.Sprint(c.name, "/", a, "/", away), func(t *testing.T) {
					t.Parallel()
					s := newSim(t, 3, conditions{latency: lan})
					it := item(newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Hour, Algorithm: a}), 1)
					spent := 0
					s.run(time.Second, func(n *node, now ratelimit.Instant) {
						if s.rng.IntN(50) == 0 {
							spent += spend(t, n, now, it, 1)
						}
					})
					if spent < limit*9/10 {
						t.Fatal(spent)
					}
					c.lose(s)
					if away > time.Second || s.net.cut != nil {
						s.views()
					}
					s.run(away, nil)
					s.reset(it, s.nodes[1:]...)
					again := spend(t, s.nodes[1], s.now, it, 10)
					most := again + 2
					if a == ratelimit.TokenBucket {
						most += again / 2 // beside one that is missing a token refills in the time of one and a half
					}
					s.run(300*time.Millisecond, nil)
					if c.busy {
						spend(t, s.nodes[0], s.now, it, 5)
						s.nodes[0].poll(s.nodes[0].clock.Now())
					}
					started := s.nodes[2]
					c.back(s)
					s.views()
					if s.nodes[2] != started {
						if err := s.nodes[2].Sync(t.Context()); err != nil {
							t.Fatal(err)
						}
					}
					// Besides what they know of, nodes expect some of each other: less than the part of the one that was away.
					for range 1000 {
						s.run(2*time.Millisecond, nil)
						for _, n := range s.nodes[1:] {
							if got := used(t, n, s.now, it); got > again+spent/6 {
								t.Fatalf("node %d counts %d after a reset and %d more", n.index, got, again)
							}
						}
					}
					for _, n := range s.nodes {
						if got := used(t, n, s.now, it); got < again-2 || got > most {
							t.Errorf("node %d counts %d after a reset and %d more", n.index, got, again)
						}
					}
				})
			}
		}
	}
}

// What a node tells of others, and that it tells of resets of which it knows nothing else.
func TestResetsAmongStates(t *testing.T) {
	t.Parallel()
	s := newSim(t, 3, conditions{latency: lan})
	n := s.nodes[0]
	it := item(newPolicy(t, ratelimit.Rule{Limit: 100, Scale: time.Hour}), 1)
	win, _ := it.Policy.Window(s.now)
	s.now = s.now.Add(time.Second)
	idle := item(it.Policy, 2)
	s.reset(it, n)
	s.reset(idle, n)
	var w writer
	w.begin(kindState, 7, s.now)
	w.record(it.Key, it.Policy, register{win: win, count: 3, known: 8}, []other{{99, register{batch: 1, win: win, count: 5}}}, local.Reset{})
	if err := n.receive(s.nodes[1].id, w.end(), s.now); err != nil {
		t.Fatal(err)
	}
	if got := n.known(it); got != 0 {
		t.Errorf("%d counted by a state of before a reset", got)
	}
	joined := s.start(3)
	s.nodes = append(s.nodes, joined)
	s.views()
	if err := joined.Sync(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, k := range []ratelimit.Key{it.Key, idle.Key} {
		if joined.ResetOf(k, s.now) == (local.Reset{}) {
			t.Error("a node that starts does not hear of a reset")
		}
	}
}

// Who takes a reset in late keeps what was spent in windows that began after it.
func TestLateResetLeavesLaterWindows(t *testing.T) {
	t.Parallel()
	for _, a := range algorithms[:2] {
		s := newSim(t, 2, conditions{latency: lan})
		p := newPolicy(t, ratelimit.Rule{Limit: 100, Scale: 10 * time.Second, Algorithm: a})
		it := item(p, 1)
		spend(t, s.nodes[0], s.now, it, 40)
		at := s.now.Add(time.Second)
		s.run(12*time.Second, nil)
		spend(t, s.nodes[0], s.now, it, 30)
		s.run(300*time.Millisecond, nil)
		for _, n := range s.nodes {
			if !n.TakeReset(local.Reset{Key: it.Key, At: at, Until: at.Add(time.Minute)}, s.now) {
				t.Fatal("it is no news")
			}
			if n.TakeReset(local.Reset{Key: it.Key, At: at - 1, Until: at.Add(time.Minute)}, s.now) {
				t.Error("an earlier one is news")
			}
			if got := used(t, n, s.now, it); got < 30 || got > 32 {
				t.Errorf("%v: node %d counts %d, want the 30 after the reset, and little that is expected", a, n.index, got)
			}
		}
	}
}

// After a change of scale or algorithm every node says at once how much is used, whether it was asked for the budget before or
// not, and a check there finds just that: of what one node has spent as much as of what it spends from then on.
func TestLookUpAfterAChangeOfPolicy(t *testing.T) {
	t.Parallel()
	rules := []ratelimit.Rule{
		{Limit: 100, Scale: time.Hour},
		{Limit: 100, Scale: 2 * time.Hour},
		{Limit: 100, Scale: 2 * time.Hour, Algorithm: ratelimit.SlidingWindow},
		{Limit: 100, Scale: 12 * time.Hour, Algorithm: ratelimit.TokenBucket},
		{Limit: 5, Scale: time.Hour, Burst: 100, Algorithm: ratelimit.TokenBucket},
	}
	for _, from := range rules {
		for _, to := range rules {
			if from == to {
				continue
			}
			for _, first := range []int{0, 1} { // who is asked first under the new policy: who has spent, or another
				s := newSim(t, 3, conditions{latency: lan})
				before, after := item(newPolicy(t, from), 1), item(newPolicy(t, to), 1)
				spend(t, s.nodes[0], s.now, before, 60)
				s.run(3*time.Second, nil)
				look := func(n *node, want int) {
					t.Helper()
					got := used(t, n, s.now, after)
					d := n.Take(t.Context(), s.now, after)
					if got < want-2 || got > want+2 || int(d.Remaining) != 100-got-1 {
						t.Errorf("%v %v, then %v %v: node %d says that %d of %d are used, and a check finds %+v", from.Algorithm, from, to.Algorithm, to, n.index, got, want, d)
					}
				}
				look(s.nodes[first], 60)
				s.run(3*time.Second, nil)
				spend(t, s.nodes[first], s.now, after, 9)
				s.run(3*time.Second, nil)
				look(s.nodes[1-first], 70)
				look(s.nodes[2], 70)
			}
		}
	}
}
