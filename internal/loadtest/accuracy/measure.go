package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/limits"
	"converger/internal/loadtest/procstat"
	"converger/internal/ratelimit"
)

// result is one limit of a row.
type result struct {
	row
	rule    ratelimit.Rule
	figures limits.Figures
	traffic traffic
	busy    string   // why it is not judged; "": it is
	broken  []string // what was not kept
}

func (r *result) judge() {
	switch r.busy = r.traffic.delay.Busy(); {
	case r.atLeast > 0: // a busy machine only makes it larger
		r.busy = ""
		if r.figures.Over < r.atLeast {
			r.broken = []string{fmt.Sprintf("overshoot %.2f %% where at least %.0f %% must show: the measurement is not to be trusted", 100*r.figures.Over, 100*r.atLeast)}
		}
	case r.busy == "":
		r.broken = r.promise.Broken(r.figures)
	}
}

// bench measures rows, one after the other.
type bench struct {
	database string
	tries    int // of a row while the machine is too busy
	progress io.Writer
	program  string // for the rows over HTTP
	dir      string // for its logs

	world *world // of the last row
	of    row
	hubs  []*hub.Process
}

// rest stops everything.
func (b *bench) rest() error {
	b.stopHubs()
	return b.close()
}

// close stops the last world.
func (b *bench) close() error {
	w := b.world
	if b.world = nil; w == nil {
		return nil
	}
	return w.close()
}

// measure runs a row, again if the machine was too busy, and prints what came of it. The last try is the result.
func (b *bench) measure(ctx context.Context, r row) (results []result, err error) {
	for try := 1; try <= b.tries; try++ {
		run := b.once
		if r.http {
			run = b.overHTTP
		}
		if results, err = run(ctx, r); err != nil {
			return nil, fmt.Errorf("%s: %w", r.key(), err)
		}
		busy := ""
		for i := range results {
			results[i].judge()
			fmt.Fprintf(b.progress, "%-45s %s\n", r.key(), strings.Join(results[i].cells()[2:], "  "))
			busy = results[i].busy
		}
		if busy == "" {
			break
		}
	}
	return results, nil
}

// settle is how long a world is left alone before its first load and between two.
const settle = time.Second

// once runs a row on nodes in this process.
func (b *bench) once(ctx context.Context, r row) ([]result, error) {
	if b.world != nil && (b.of.nodes != r.nodes || b.of.conditions != r.conditions || b.of.trouble != nil || r.trouble != nil) {
		if err := b.close(); err != nil {
			return nil, err
		}
	}
	if b.world == nil {
		w, err := newWorld(ctx, b.database, r.nodes, r.conditions)
		if err != nil {
			return nil, err
		}
		b.world, b.of = w, r
	}
	w := b.world
	if err := at(ctx, time.Now(), settle.Seconds()); err != nil {
		return nil, err
	}
	var floods []*flood
	for _, rule := range r.rules {
		f, err := newFlood(rule)
		if err != nil {
			return nil, err
		}
		floods = append(floods, f)
	}
	var during func(time.Time) error
	if r.trouble != nil {
		during = func(began time.Time) error { return r.trouble(ctx, w, began) }
	}
	w.mark()
	watching, watched := context.WithCancel(ctx)
	defer watched()
	var watcher sync.WaitGroup
	waits := procstat.NewWaits(os.Getpid())
	watcher.Go(func() { _ = waits.Run(watching) }) // it has no errors
	first, err := w.offer(ctx, floods, r.load, r.factor, r.count(), during)
	if err != nil {
		return nil, err
	}
	from := first + int64(r.first())
	watched()
	watcher.Wait()
	t := w.traffic(float64(r.count()), from*1e9)
	t.delay.Wait = float64(waits.Longest().Microseconds()) / 1000
	var all []result
	for _, f := range floods {
		all = append(all, result{row: r, rule: f.rule, traffic: t, figures: f.tally.Figures(f.rule.Limit, from, first+int64(r.count()))})
	}
	return all, nil
}

// overHTTP runs a row against processes of the program.
func (b *bench) overHTTP(ctx context.Context, r row) ([]result, error) {
	if err := b.close(); err != nil {
		return nil, err
	}
	if b.hubs == nil {
		if err := b.startHubs(ctx); err != nil {
			return nil, err
		}
	}
	var nodes []*hub.Client
	var pids []int
	for _, h := range b.hubs {
		nodes, pids = append(nodes, &h.Client), append(pids, h.PID())
	}
	var all []result
	for _, rule := range r.rules {
		report, err := limits.Run(ctx, limits.Options{
			Nodes: nodes, PIDs: pids, Limit: rule.Limit, Scale: rule.Scale, Algorithm: limits.FixedWindow, Load: r.load, Factor: r.factor,
			Duration: time.Duration(r.count()) * rule.Scale, Callers: 8, Timeout: 10 * time.Second, Started: true, Progress: io.Discard, Every: time.Minute,
		})
		switch {
		case report == nil:
			return nil, err
		case report.Interrupted:
			return nil, context.Cause(ctx)
		case report.NoMetrics != "" || len(report.Errors) > 0:
			return nil, errors.New(report.NoMetrics + fmt.Sprint(report.Errors))
		}
		all = append(all, result{row: r, rule: rule, figures: report.Figures, traffic: traffic{report.Messages, report.Bytes, report.Delay}})
	}
	return all, nil
}

// startHubs starts three processes of the program, until stopHubs.
func (b *bench) startHubs(ctx context.Context) (err error) {
	if b.hubs, err = hub.NewNodes(ctx, b.program, b.database, b.dir, 3, "RATE_LIMIT_TELL_TIME=true"); err != nil {
		return err
	}
	token, err := b.hubs[0].Run(ctx, "operator", "create", "accuracy")
	if err != nil {
		return err
	}
	for _, h := range b.hubs {
		h.Token = token
		if err := h.Launch(ctx); err != nil {
			return err
		}
	}
	for _, h := range b.hubs {
		if err := h.AwaitReady(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (b *bench) stopHubs() {
	var all sync.WaitGroup
	for _, h := range b.hubs {
		all.Go(h.Stop)
	}
	all.Wait()
}
