package cluster

import (
	"context"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// Reports carry no burst: what one tells does not give back what a burst far beyond the rate has spent.
func TestReportsRefillNoBurst(t *testing.T) {
	t.Parallel()
	for _, r := range []ratelimit.Rule{
		{Limit: 10, Scale: time.Minute, Algorithm: ratelimit.TokenBucket, Burst: 100},
		{Limit: 100, Scale: time.Hour, Algorithm: ratelimit.TokenBucket, Burst: 300},
	} {
		s := newSim(t, 3, conditions{latency: lan})
		it := item(newPolicy(t, r), 1)
		spend(t, s.nodes[1], s.now, it, 1)
		s.run(300*time.Millisecond, nil)
		total := 1
		for range 8 {
			total += spend(t, s.nodes[0], s.now, it, int(r.Burst)/2)
			s.run(50*time.Millisecond, nil)
			total += spend(t, s.nodes[1], s.now, it, 1)
			s.run(250*time.Millisecond, nil)
		}
		if most := int(r.Burst) + 2; total > most {
			t.Errorf("%d in %s with a burst of %d: %d were admitted within three seconds", r.Limit, r.Scale, r.Burst, total)
		}
	}
}

// A key that rests is heard of at once when its policy has changed meanwhile.
func TestRestedKeyUnderAnotherPolicy(t *testing.T) {
	t.Parallel()
	bucket := ratelimit.Rule{Limit: 1000, Scale: time.Minute, Algorithm: ratelimit.TokenBucket, Burst: 1000}
	window := ratelimit.Rule{Limit: 1000, Scale: time.Hour}
	for _, change := range [][2]ratelimit.Rule{{bucket, window}, {window, bucket}, {{Limit: 1000, Scale: time.Second}, window}} {
		for _, rest := range []time.Duration{0, 2500 * time.Millisecond, 4 * time.Second} {
			s := newSim(t, 3, conditions{latency: lan})
			it := item(newPolicy(t, change[0]), 1)
			s.run(500*time.Millisecond, func(n *node, now ratelimit.Instant) {
				if s.rng.IntN(500) == 0 {
					spend(t, n, now, it, 1)
				}
			})
			s.run(rest, nil)
			it = item(newPolicy(t, change[1]), 1)
			admitted := 0
			s.run(2*time.Second, func(n *node, now ratelimit.Instant) {
				if s.rng.IntN(20) == 0 {
					admitted += spend(t, n, now, it, 1)
				}
			})
			if admitted > 1000*105/100+34 { // and what a bucket refills in two seconds
				t.Errorf("%v after a rest of %s under %v: %d were admitted", change[1], rest, change[0], admitted)
			}
		}
	}
}

// A look-up asks the others beside the loop that does.
func TestInquiriesSideBySide(t *testing.T) {
	t.Parallel()
	for range 300 {
		n := newMesh(t, 1, Config{})[0]
		for i := range 50 {
			n.changed <- ratelimit.Key{Hi: uint64(i + 2)}
		}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan struct{}, 2)
		for range cap(ended) {
			go func() {
				n.inquireOf(ctx, nil)
				ended <- struct{}{}
			}()
		}
		for range cap(ended) {
			select {
			case <-ended:
			case <-time.After(30 * time.Second):
				t.Fatal("one waits for what the other has taken")
			}
		}
		cancel()
	}
}

// However deep a budget is in debt, its reset is one that the others read.
func TestResetOfADeepDebt(t *testing.T) {
	t.Parallel()
	s := newSim(t, 3, conditions{latency: lan})
	it := item(newPolicy(t, ratelimit.Rule{Limit: 10, Scale: 24 * time.Hour, Algorithm: ratelimit.TokenBucket, Burst: 300}), 1)
	s.run(time.Second, func(n *node, now ratelimit.Instant) { spend(t, n, now, it, 3) })
	for _, n := range s.nodes {
		r := n.NewReset(s.now, it)
		if err := readResets(appendResets(nil, []local.Reset{r})[0], func(local.Reset) {}); err != nil {
			t.Errorf("a reset of %s: %v", time.Duration(r.Until-r.At), err)
		}
	}
}
