package cluster

import (
	"fmt"
	"testing"
	"time"

	"converger/internal/ratelimit"
)

const lan = time.Millisecond

// The accuracy that the design promises, in simulated time on the real stores.
func TestAccuracy(t *testing.T) {
	t.Parallel()
	skew := func(d time.Duration) func(int) time.Duration {
		return func(i int) time.Duration {
			if i == 0 {
				return d
			}
			return 0
		}
	}
	for _, c := range []struct {
		name        string
		load        load
		nodes       int
		net         conditions
		mean, worst float64 // overshoot, percent
		refused     float64 // within the limit, percent
		windows     int
	}{
		{"even 2x", even(2), 3, conditions{latency: lan}, 1.5, 5, 0, 12},
		{"even 10x", even(10), 3, conditions{latency: lan}, 1.5, 5, 0, 12},
		{"zipf 10x", zipf(10), 3, conditions{latency: lan}, 1.5, 5, 0, 12},
		{"even 2x", even(2), 20, conditions{latency: lan}, 3, 8, 0, 12},
		{"even 10x", even(10), 20, conditions{latency: lan}, 3, 8, 0, 12},
		{"zipf 10x", zipf(10), 20, conditions{latency: lan}, 3, 8, 0, 12},
		{"even 100x", even(100), 3, conditions{latency: lan}, 3, 12, 0, 8},
		{"even 100x", even(100), 20, conditions{latency: lan}, 6, 20, 0, 8},
		{"bursts 10x", bursts(10), 3, conditions{latency: lan}, 3, 8, 100, 24},
		{"bursts 10x", bursts(10), 20, conditions{latency: lan}, 3, 8, 100, 24},
		{"cold flood 10x", cold(10), 3, conditions{latency: lan}, 5, 10, 0, 24},
		{"cold flood 10x", cold(10), 20, conditions{latency: lan}, 5, 10, 0, 24},
		{"sticky 0.8x", sticky(0.8), 3, conditions{latency: lan}, 0, 0, 0, 12},
		{"sticky 0.8x", sticky(0.8), 20, conditions{latency: lan}, 0, 0, 0, 12},
		{"spike 0.9x", spike(0.9), 3, conditions{latency: lan}, 0, 0, 0, 24},
		{"spike 0.9x", spike(0.9), 20, conditions{latency: lan}, 0, 0, 0, 24},
		{"moving 3x", moving(3), 3, conditions{latency: lan}, 1, 3, 1, 24},
		{"moving 3x", moving(3), 20, conditions{latency: lan}, 1, 3, 1, 24},
		{"even 10x, 10 ms", even(10), 3, conditions{latency: 10 * time.Millisecond}, 5, 15, 0, 12},
		{"even 10x, 40 ms", even(10), 3, conditions{latency: 40 * time.Millisecond}, 5, 15, 0, 12},
		{"even 10x, 5 % lost", even(10), 3, conditions{latency: lan, loss: 0.05}, 5, 15, 0, 12},
		{"even 10x, 2 ms skew", even(10), 3, conditions{latency: lan, skew: skew(2 * time.Millisecond)}, 3, 8, 0, 12},
		{"even 10x, 20 ms skew", even(10), 3, conditions{latency: lan, skew: skew(20 * time.Millisecond)}, 3, 8, 0, 12},
		{"even 10x, 400 ms skew", even(10), 3, conditions{latency: lan, skew: skew(400 * time.Millisecond)}, 3, 8, 0, 12},
		{"even 1000x", even(1000), 3, conditions{latency: lan}, 8, 20, 0, 6},
	} {
		for _, limit := range []int64{100, 1000} {
			t.Run(fmt.Sprintf("%s/%d nodes/%d", c.name, c.nodes, limit), func(t *testing.T) {
				t.Parallel()
				s := newSim(t, c.nodes, c.net)
				p := newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second})
				f := s.offer(item(p, 1), c.load, c.windows).figures(2)
				t.Logf("overshoot %.2f %% mean, %.2f %% worst; unused %.2f %%; refused %.2f %%; %.0f messages, %.1f kB a node and second",
					100*f.over, 100*f.overMax, 100*f.under, 100*f.refused, f.messages, f.kilo)
				if 100*f.over > c.mean || 100*f.overMax > c.worst || 100*f.refused > c.refused || 100*f.under > 1 {
					t.Errorf("promised %v %% mean, %v %% worst, %v %% refused, and that nothing is left unused", c.mean, c.worst, c.refused)
				}
			})
		}
	}
}

// The measurement finds what it looks for: nodes that only exchange counts at the
// regular time overshoot as the simulator says.
func TestPlainReportsOvershoot(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		nodes    int
		x, least float64
	}{{3, 10, 0.3}, {20, 10, 0.3}, {3, 100, 1.5}} {
		s := newSim(t, c.nodes, conditions{latency: lan, plain: true})
		f := s.offer(item(newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Second}), 1), even(c.x), 8).figures(2)
		t.Logf("%d nodes, %v times the limit: %.0f %% over it", c.nodes, c.x, 100*f.over)
		if f.over < c.least {
			t.Errorf("want at least %.0f %%", 100*c.least)
		}
	}
}

// The long-run rate of a token bucket is exact: what a peer spent is subtracted
// even below zero.
func TestTokenBucketLongRun(t *testing.T) {
	t.Parallel()
	for _, nodes := range []int{3, 20} {
		for _, rate := range []int64{100, 1000} {
			for _, burst := range []int64{rate, rate / 10} {
				for _, x := range []float64{10, 100} {
					t.Run(fmt.Sprintf("%d nodes/%d per second/burst %d/%.0fx", nodes, rate, burst, x), func(t *testing.T) {
						t.Parallel()
						s := newSim(t, nodes, conditions{latency: lan})
						p := newPolicy(t, ratelimit.Rule{Limit: rate, Scale: time.Second, Algorithm: ratelimit.TokenBucket, Burst: burst})
						const span = 10
						var admitted float64
						for i, a := range s.offer(item(p, 1), even(x), span+2).admitted {
							if i >= 2 && i < span+2 {
								admitted += a
							}
						}
						off := 100 * (admitted/float64(rate*span) - 1)
						t.Logf("%+.2f %%", off)
						if allowed := map[int]float64{3: 0.5, 20: 1}[nodes]; off > allowed || off < -allowed {
							t.Errorf("the rate is off by %+.2f %%, promised %v %%", off, allowed)
						}
					})
				}
			}
		}
	}
}

// A cluster cut in two admits the limit over both sides together, from the second
// full window after the cut; healed, it is exact again.
func TestSplit(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		for _, full := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/full %v", a, full), func(t *testing.T) {
				t.Parallel()
				apart := false
				s := newSim(t, 3, conditions{latency: lan, full: full, cut: func(from, to *node) bool {
					return apart && (from.index == 2) != (to.index == 2)
				}})
				it := item(newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Second, Algorithm: a}), 1)
				s.offer(it, even(10), 3)
				apart = true
				s.run(500*time.Millisecond, nil) // silent for as long is invisible
				s.views()
				s.run(500*time.Millisecond, nil)
				s.offer(it, even(10), 2)
				f := s.offer(it, even(10), 8).figures(0)
				t.Logf("apart: %.2f %% mean, %.2f %% worst, unused %.2f %%", 100*f.over, 100*f.overMax, 100*f.under)
				switch {
				case full && (f.over < 0.8 || f.over > 1.2):
					t.Errorf("overshoot %.1f %%, want that of two whole limits", 100*f.over)
				case !full && (f.overMax > 0.10 || f.under > 0.02):
					t.Errorf("overshoot %.1f %%, unused %.1f %%", 100*f.overMax, 100*f.under)
				}
				apart = false
				s.views()
				for _, n := range s.nodes {
					if err := n.Sync(t.Context()); err != nil {
						t.Fatal(err)
					}
				}
				f = s.offer(it, even(10), 6).figures(2)
				if f.over > 0.015 || f.overMax > 0.05 || f.under > 0.02 {
					t.Errorf("healed: overshoot %.1f %%, worst %.1f %%, unused %.1f %%", 100*f.over, 100*f.overMax, 100*f.under)
				}
			})
		}
	}
}

// In the window of a cut the side that has spent more than its share is not given
// more, and leaves the other what remains.
func TestSplitInALongWindow(t *testing.T) {
	t.Parallel()
	apart := false
	s := newSim(t, 3, conditions{latency: lan, cut: func(from, to *node) bool {
		return apart && (from.index == 2) != (to.index == 2)
	}})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Hour}), 1)
	s.run(time.Second, func(n *node, now ratelimit.Instant) {
		if n.index == 2 && s.now < begin.Add(40*time.Millisecond) {
			n.Take(t.Context(), now, it) // 400 of a share of 333
		}
	})
	apart = true
	s.views()
	admitted := [3]int{}
	s.run(2*time.Second, func(n *node, now ratelimit.Instant) {
		if n.Take(t.Context(), now, it).Allowed {
			admitted[n.index]++
		}
	})
	if got := admitted[0] + admitted[1]; got < 600 || got > 630 || admitted[2] != 0 {
		t.Errorf("admitted %v, want 600 on the side of two and none on the other", admitted)
	}
}

// A node that is killed and comes back, as another member, does not loosen a limit.
func TestKillAndRestart(t *testing.T) {
	t.Parallel()
	for _, limit := range []int64{100, 1000} {
		s := newSim(t, 3, conditions{latency: lan})
		it := item(newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second}), 1)
		s.offer(it, even(10), 3)
		s.nodes[1].dead = true
		f := s.offer(it, even(10), 1).figures(0)
		s.run(300*time.Millisecond, nil)
		n := s.start(1)
		s.nodes[1] = n
		s.views()
		if err := n.Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		s.run(700*time.Millisecond, nil)
		g := s.offer(it, even(10), 3).figures(0)
		t.Logf("limit %d: killed %.1f %%, restarted %.1f %%", limit, 100*f.overMax, 100*g.overMax)
		if f.overMax > 0.1 || g.overMax > 0.1 {
			t.Errorf("limit %d: overshoot %.1f %% after the kill, %.1f %% after the restart", limit, 100*f.overMax, 100*g.overMax)
		}
	}
}

// A start does not loosen a limit: what was spent before, by those that live and
// by those that are gone, is known to a node before it takes its first request.
func TestJoinLearnsCounts(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		s := newSim(t, 3, conditions{latency: lan})
		it := item(newPolicy(t, ratelimit.Rule{Limit: 900, Scale: time.Hour, Algorithm: a}), 1)
		s.run(3*time.Second, func(n *node, now ratelimit.Instant) {
			if s.now < begin.Add(30*time.Millisecond) {
				n.Take(t.Context(), now, it)
			}
		})
		s.nodes[2].dead = true // its 300 stand
		s.nodes[2] = s.start(2)
		s.views()
		if err := s.nodes[2].Sync(t.Context()); err != nil {
			t.Fatal(err)
		}
		if u, err := s.nodes[2].Peek(t.Context(), s.now, it); err != nil || u.Used < 895 || u.Used > 900 {
			t.Errorf("%v: the new node knows of %d spent (%v), want 900", a, u.Used, err)
		}
	}
}
