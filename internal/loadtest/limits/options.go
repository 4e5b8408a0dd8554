package limits

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/wire"
	"converger/internal/simulate"
)

// Options is what a run is made of. Zero numbers are not defaults: the caller chooses them.
type Options struct {
	// Nodes are those of one cluster, with an operator's token that may write. The first is asked to make what is needed.
	Nodes []*hub.Client
	// MetricsToken opens their /metrics; "" tries without.
	MetricsToken string
	// PIDs are the nodes' processes, as far as they run on this machine: how long they wait for a processor is watched.
	PIDs []int

	Limit     int64         // 1 to 1,000,000,000
	Scale     time.Duration // of its window, whole milliseconds, a second to a minute
	Algorithm string        // FixedWindow, SlidingWindow or TokenBucket
	Burst     int64         // of a token bucket; 0: the limit

	Load     Load
	Factor   float64       // of the limit, that is offered
	Duration time.Duration // at least four windows; at most a day
	Callers  int           // connections to each node, 1 to 1,000
	Timeout  time.Duration // of one request

	Started bool // the nodes were started for the run and go with it
	Yes     bool // permit nodes on other machines
	Keep    bool // leave the tenant as it is

	// Progress receives a line each Every. Required.
	Progress io.Writer
	Every    time.Duration
}

// The largest runs: a slip of the finger must not flood anybody.
const (
	maxNodes   = 100
	maxCallers = 1000
	maxLimit   = 1_000_000_000
	maxRate    = 1e6 // requests a second
	minWindows = 4   // two are left out
)

// windows is how many whole windows the run has.
func (o Options) windows() int64 { return int64(o.Duration / o.Scale) }

// quota is what the headers of answers show as the budget.
func (o Options) quota() int64 {
	if o.Algorithm == TokenBucket && o.Burst > 0 {
		return o.Burst
	}
	return o.Limit
}

// validate names everything that is wrong, and makes the targets of the callers.
func (o Options) validate(ctx context.Context) ([]wire.Target, error) {
	var all []error
	need := func(ok bool, format string, args ...any) {
		if !ok {
			all = append(all, fmt.Errorf(format, args...))
		}
	}
	need(len(o.Nodes) >= 1 && len(o.Nodes) <= maxNodes, "%d nodes: want 1 to %d", len(o.Nodes), maxNodes)
	need(o.Limit >= 1 && o.Limit <= maxLimit, "limit %d: want 1 to %d", o.Limit, maxLimit)
	need(o.Scale >= time.Second && o.Scale <= time.Minute && o.Scale%time.Millisecond == 0, "a window of %s: want whole milliseconds, 1s to 1m", o.Scale)
	need(slices.Contains([]string{FixedWindow, SlidingWindow, TokenBucket}, o.Algorithm), "algorithm %q: want %s, %s or %s", o.Algorithm, FixedWindow, SlidingWindow, TokenBucket)
	need(o.Burst == 0 || o.Algorithm == TokenBucket && o.Burst >= 1 && o.Burst <= maxLimit, "burst %d: only a %s has one, from 1 to %d", o.Burst, TokenBucket, maxLimit)
	_, err := ParseLoad(string(o.Load))
	all = append(all, err)
	need(o.Factor > 0 && o.Factor <= 1e6, "factor %g: want more than 0, and at most a million", o.Factor)
	if o.Scale > 0 {
		need(float64(o.Limit)*o.Factor/o.Scale.Seconds() <= maxRate, "%g requests a second: want at most %g", float64(o.Limit)*o.Factor/o.Scale.Seconds(), maxRate)
		need(o.windows() >= minWindows && o.Duration <= 24*time.Hour, "duration %s: want at least %d windows (%s), and at most a day", o.Duration, minWindows, minWindows*o.Scale)
		need(o.Load != Cold || o.windows() >= coldPeriod, "duration %s: a cold flood comes in the last of every %d windows, so want at least %s", o.Duration, coldPeriod, coldPeriod*o.Scale)
	}
	need(o.Callers >= 1 && o.Callers <= maxCallers, "%d callers: want 1 to %d for each node", o.Callers, maxCallers)
	need(o.Timeout > 0 && o.Every > 0, "no time-out, or no time between lines of progress")
	targets := make([]wire.Target, len(o.Nodes))
	for i, n := range o.Nodes {
		t, err := wire.ParseTarget(n.Base)
		if err != nil {
			all = append(all, fmt.Errorf("node %d: %w", i+1, err))
			continue
		}
		t.Timeout = o.Timeout
		if !o.Yes {
			t.Control = simulate.LoopbackOnly
			all = append(all, simulate.StayHere(ctx, fmt.Sprintf("node %d", i+1), n.Base))
		}
		targets[i] = t
	}
	return targets, errors.Join(all...)
}
