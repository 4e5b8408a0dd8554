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
		{"bursts 10x", bursts(10), 3, conditions{latency: lan}, 3, 8, 0, 24},
		{"bursts 10x", bursts(10), 20, conditions{latency: lan}, 3, 8, 0, 24},
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
		{"even 10x, 20 ms skew", even(10), 3, conditions{latency: lan, skew: skew(20 * time.Millisecond)}, 300, 800, 0, 12},
		{"even 10x, plain", even(10), 3, conditions{latency: lan, plain: true}, 300, 800, 0, 12},
	} {
		for _, limit := range []int64{100, 1000} {
			t.Run(fmt.Sprintf("%s/%d nodes/%d", c.name, c.nodes, limit), func(t *testing.T) {
				t.Parallel()
				s := newSim(t, c.nodes, c.net)
				p := newPolicy(t, ratelimit.Rule{Limit: limit, Scale: time.Second})
				f := s.offer(item(p, 1), c.load, c.windows).figures(2)
				t.Logf("overshoot %.2f %% mean, %.2f %% worst; unused %.2f %%; refused %.2f %%; %.0f messages, %.1f kB a node and second",
					100*f.over, 100*f.overMax, 100*f.under, 100*f.refused, f.messages, f.kilo)
				if 100*f.over > c.mean || 100*f.overMax > c.worst || 100*f.refused > c.refused {
					t.Errorf("promised %v %% mean, %v %% worst, %v %% refused", c.mean, c.worst, c.refused)
				}
			})
		}
	}
}
