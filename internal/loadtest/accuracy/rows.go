package main

import (
	"context"
	"fmt"
	"time"

	"converger/internal/loadtest/limits"
	"converger/internal/ratelimit"
)

// row is a line of the table: a load, and what must come of it.
type row struct {
	name    string
	nodes   int
	load    limits.Load
	factor  float64
	rules   []ratelimit.Rule
	promise limits.Promise
	atLeast float64 // in place of a promise: the overshoot that must show
	conditions

	windows int // of the load; 0: its own number
	from    int // the first that is looked at; 0: the load's own choice
	// trouble is made while the load runs; the world is thrown away after it.
	trouble func(ctx context.Context, w *world, began time.Time) error
	http    bool // over HTTP, with three processes of the program
}

func (r row) count() int {
	if r.windows > 0 {
		return r.windows
	}
	return r.load.Settling() + r.load.Windows()
}

func (r row) first() int {
	if r.from > 0 {
		return r.from
	}
	return r.load.Settling()
}

// key names the row for --only.
func (r row) key() string { return fmt.Sprintf("%s, %d nodes", r.name, r.nodes) }

func fixed(perSecond ...int64) (all []ratelimit.Rule) {
	for _, n := range perSecond {
		all = append(all, ratelimit.Rule{Limit: n, Scale: time.Second})
	}
	return all
}

// buckets are token buckets of each rate, with a burst of the rate and of its tenth.
func buckets(perSecond ...int64) (all []ratelimit.Rule) {
	for _, n := range perSecond {
		for _, burst := range []int64{n, n / 10} {
			all = append(all, ratelimit.Rule{Limit: n, Scale: time.Second, Algorithm: ratelimit.TokenBucket, Burst: burst})
		}
	}
	return all
}

// together tells which limits are flooded at the same time. Twenty nodes on one machine tell each other the news of one in
// some thousand messages within a tenth of a second; those of several would keep each other waiting.
func together(nodes int, rules []ratelimit.Rule) (all [][]ratelimit.Rule) {
	if nodes <= 3 {
		return [][]ratelimit.Rule{rules}
	}
	for i := range rules {
		all = append(all, rules[i:i+1])
	}
	return all
}

// plainOvershoot is what regular reports alone must be seen to overshoot by, at ten times the limit on three nodes.
const plainOvershoot = 0.25

// table is what docs/accuracy.md promises, in its order.
func table() []row {
	both := fixed(100, 1000)
	all := []row{
		{name: "plain reports every 101 ms, without the rule, 10x", nodes: 3, load: limits.Even, factor: 10, rules: both, windows: 12, atLeast: plainOvershoot, conditions: conditions{plain: true}},
	}
	for _, nodes := range []int{3, 20} {
		for _, l := range []struct {
			name   string
			load   limits.Load
			factor float64
		}{
			{"even 2x", limits.Even, 2}, {"even 10x", limits.Even, 10}, {"zipf 10x", limits.Zipf, 10}, {"even 100x", limits.Even, 100},
			{"bursts of 10x", limits.Bursts, 10}, {"cold flood of 10x", limits.Cold, 10}, {"one sticky node, 0.8x", limits.Sticky, 0.8},
			{"spike of 0.9x", limits.Spike, 0.9}, {"moving, 3x", limits.Moving, 3},
		} {
			p, ok := limits.Promised(limits.FixedWindow, 100, time.Second, l.load, l.factor, nodes)
			if !ok {
				panic("accuracy: nothing is promised for " + l.name)
			}
			for _, rules := range together(nodes, both) {
				all = append(all, row{name: l.name, nodes: nodes, load: l.load, factor: l.factor, rules: rules, promise: p})
			}
		}
		for _, x := range []float64{10, 100} {
			p, _ := limits.Promised(limits.TokenBucket, 100, time.Second, limits.Even, x, nodes)
			for _, rules := range together(nodes, buckets(100, 1000)) {
				all = append(all, row{name: fmt.Sprintf("token bucket, %gx", x), nodes: nodes, load: limits.Even, factor: x, rules: rules, promise: p})
			}
		}
	}
	far, off := limits.Overshoot(0.05, 0.15), limits.Overshoot(0.03, 0.08)
	tenth := 0.10
	worst := limits.Promise{OverWorst: &tenth}
	even := row{nodes: 3, load: limits.Even, factor: 10, rules: both}
	add := func(name string, p limits.Promise, change func(*row)) {
		r := even
		r.name, r.promise = name, p
		change(&r)
		all = append(all, r)
	}
	add("even 10x, 10 ms between nodes", far, func(r *row) { r.delay = 10 * time.Millisecond })
	add("even 10x, 40 ms between nodes", far, func(r *row) { r.delay = 40 * time.Millisecond })
	add("even 10x, 5 % of reports lost", far, func(r *row) { r.loss = 0.05 })
	add("even 10x, one clock 20 ms off", off, func(r *row) { r.skew = 20 * time.Millisecond })
	add("even 10x, one clock 400 ms off", off, func(r *row) { r.skew = 400 * time.Millisecond })
	add("even 10x, split in two", worst, func(r *row) { r.cuts, r.trouble, r.windows, r.from = true, split, 14, 5 })
	add("even 10x, one node killed and replaced", worst, func(r *row) { r.cuts, r.trouble, r.windows = true, replace, 16 })
	add("even 2x over HTTP", limits.Overshoot(0.015, 0.05), func(r *row) { r.http, r.factor = true, 2 })
	add("even 10x over HTTP", limits.Overshoot(0.015, 0.05), func(r *row) { r.http = true })
	return all
}

// at waits for a moment of a load, in windows since it began.
func at(ctx context.Context, began time.Time, windows float64) error {
	t := time.NewTimer(time.Until(began.Add(time.Duration(windows * float64(time.Second)))))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// split cuts the last node off in the middle of window 3: 4 is the first full window after it, and 5 the second.
func split(ctx context.Context, w *world, began time.Time) error {
	if err := at(ctx, began, 3.5); err != nil {
		return err
	}
	last := len(w.places) - 1
	w.roads.set(func(a, b int) bool { return (a == last) != (b == last) })
	return nil
}

// replace kills the last node in the middle of window 4, and has another one take its place when it is ready: at the
// latest some windows before the end.
func replace(ctx context.Context, w *world, began time.Time) error {
	if err := at(ctx, began, 4.5); err != nil {
		return err
	}
	last := len(w.places) - 1
	w.kill(last)
	if err := at(ctx, began, 8.3); err != nil {
		return err
	}
	n, err := w.launch(ctx)
	if err != nil {
		return err
	}
	return w.admit(ctx, n, last, len(w.places))
}
