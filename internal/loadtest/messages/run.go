package messages

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"time"

	"converger/internal/loadtest/procstat"
	"converger/internal/loadtest/wire"
)

var (
	// ErrBroken says that a promise was broken: messages were lost, doubled or out of order.
	ErrBroken = errors.New("messages were lost, doubled or out of order")
	// ErrNotFlat is the verdict of a soak.
	ErrNotFlat = errors.New("the run was not flat: see the table above")
)

const (
	restPatience  = time.Minute      // for putting tenants to rest
	probePatience = 10 * time.Second // for the first delivery
	readPatience  = 5 * time.Second  // for /metrics and tables
)

// run is one run with everything it has started.
type run struct {
	o      Options
	report *Report
	load   *load
	ledger *ledger

	start, last, tick mark // of the counted load; at the end of the last row; at the last line of progress
	noProcess         error
}

// mark is how far everything is at one instant.
type mark struct {
	at        time.Time
	accepted  int64
	failed    int64
	delivered int64
	took      *counts
	delivery  *counts
}

// Run sets up, loads, waits for what is under way, and puts everything to rest. When ctx ends before its time, the report
// tells what was measured until then, and that is no error. Errors, beside those of setting up: ErrBroken and ErrNotFlat;
// the report is there then.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	target, err := o.validate(ctx)
	if err != nil {
		return nil, err
	}
	name := strings.ToLower(rand.Text()[:6])
	r := &run{o: o, ledger: newLedger(name, time.Now()), report: &Report{
		Hub: o.Hub.Base, Run: name, Tenants: o.Tenants, Channels: o.Channels, Callers: o.Callers, Rate: o.Rate, InboundShare: o.Inbound,
	}}
	receiver := o.ReceiverURL
	if o.ReceiverAddress != "" {
		own, err := wire.NewReceiver(ctx, o.ReceiverAddress, 0)
		if err != nil {
			return nil, fmt.Errorf("the receiver: %w", err)
		}
		defer own.Close()
		own.Observe(r.ledger.observe)
		receiver, r.report.Delivers = own.URL(), true
	}
	world, err := o.build(ctx, name, receiver)
	defer func() { // also after an error and after a Ctrl-C
		remains := o.rest(ctx, name, world)
		if report == nil {
			fmt.Fprintln(o.Progress, remains)
			return
		}
		report.WhatRemains = remains
	}()
	if err != nil {
		return nil, err
	}
	r.report.Conversations = len(world.posts) + len(world.webhooks)
	r.load = newLoad(o, world, r.ledger)
	fmt.Fprintf(o.Progress, "Run %s: %d tenants, %d conversations. Ctrl-C ends it and prints what was measured.\n", name, o.Tenants, r.report.Conversations)
	if r.report.Delivers {
		if err := r.probe(ctx, target, world); err != nil {
			return nil, err
		}
	}
	r.load.run(ctx, target, o.WarmUp)
	r.measure(ctx, target)
	return r.report, r.verdict()
}

// rest puts the world to rest and says what remains of it.
func (o Options) rest(ctx context.Context, name string, w *world) string {
	switch {
	case len(w.tenants) == 0:
		return "Nothing was made on the hub."
	case o.Keep:
		return fmt.Sprintf("The run's tenants (%d, %q) are kept, with their channels, keys and raised limits.", len(w.tenants), namePrefix+name)
	case o.Database != nil:
		return "The hub and its database were started for this run and are removed."
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restPatience)
	defer cancel()
	if err := w.rest(ctx, o.Hub); err != nil {
		return fmt.Sprintf("NOT CLEANED UP: suspend the run's tenants (%d, %q) by hand: %v", len(w.tenants), namePrefix+name, err)
	}
	return fmt.Sprintf("The run's tenants (%d, %q) are suspended, their channels deleted and their keys revoked; their messages stay until their month goes.",
		len(w.tenants), namePrefix+name)
}

// probe sends one message and waits for its delivery: a load whose deliveries can't arrive measures nothing.
func (r *run) probe(ctx context.Context, target wire.Target, w *world) error {
	c := wire.NewCaller(target)
	defer c.Close()
	key := r.ledger.key(probeNumber, 0)
	head, body, err := w.posts[0].request(key, r.o.text(key), time.Now())
	if err != nil {
		return err
	}
	answer, err := c.Do(ctx, http.MethodPost, w.posts[0].path, head, body)
	if err != nil {
		return fmt.Errorf("post a first message: %w", err)
	}
	if answer.Status != http.StatusCreated {
		return fmt.Errorf("post a first message: HTTP %d %s", answer.Status, answer.Code)
	}
	select {
	case <-r.ledger.probed:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(probePatience):
	}
	return fmt.Errorf("the hub does not deliver to the receiver of this run: %s. It may have to be allowed to (WEBHOOK_ALLOWED_TARGETS=127.0.0.1), "+
		"or give an address that it reaches; without deliveries the run goes on with --no-deliveries", r.whyNot(ctx, w))
}

// whyNot asks the hub why the first delivery did not arrive.
func (r *run) whyNot(ctx context.Context, w *world) string {
	var list struct {
		Data []struct {
			Status    string `json:"status"`
			Reason    string `json:"reason"`
			LastError string `json:"last_error"`
		} `json:"data"`
	}
	for _, t := range w.tenants {
		if err := r.o.Hub.Call(ctx, http.MethodGet, "/api/v1/deliveries?limit=1", t.As(), nil, &list); err != nil {
			return err.Error()
		}
		if len(list.Data) > 0 {
			d := list.Data[0]
			return strings.TrimRight(strings.TrimSpace(d.Status+" "+d.Reason+" "+d.LastError), ".")
		}
	}
	return "it has no delivery of it"
}

// mark reads the counters.
func (r *run) mark() mark {
	return mark{
		at: time.Now(), accepted: r.load.accepted.Load(), failed: r.load.failed.Load(), delivered: r.ledger.delivered.Load(),
		took: r.load.took.read(), delivery: r.ledger.took.read(),
	}
}

// measure runs the counted load and the wait after it.
func (r *run) measure(ctx context.Context, target wire.Target) {
	posts, webhooks := r.load.posts.read(), r.load.webhooks.read()
	r.load.resetErrors()
	before := r.process(ctx)
	usage := procstat.Read(r.o.HubPID, r.o.PostgresPID)
	r.start = r.mark()
	r.last, r.tick = r.start, r.start
	cpu := before // at the end of the last row

	done := make(chan int64, 1)
	go func() { done <- r.load.run(ctx, target, r.o.Duration) }()
	lines, rows := time.NewTicker(r.o.Every), time.NewTicker(r.o.Row)
	defer lines.Stop()
	defer rows.Stop()
	for running := true; running; {
		select {
		case <-lines.C:
			r.line()
		case <-rows.C:
			cpu = r.row(ctx, cpu)
		case r.report.Behind = <-done:
			running = false
		}
	}
	ended := time.Now()
	if since := ended.Sub(r.last.at); since >= r.o.Row/2 || len(r.report.Rows) == 0 && since > 0 {
		r.row(ctx, cpu)
	}
	end := r.mark()
	after := r.process(ctx)
	spent, spentKnown := procstat.Read(r.o.HubPID, r.o.PostgresPID).Since(usage)
	r.report.Interrupted = ctx.Err() != nil
	r.drain(ctx)
	drained := r.process(ctx)

	p, took := r.report, end.at.Sub(r.start.at)
	p.Seconds = took.Seconds()
	p.Accepted = end.accepted - r.start.accepted
	p.PerSecond = perSecond(p.Accepted, took)
	p.Latency = end.took.since(r.start.took).latency()
	p.Posts, p.Webhooks = r.load.posts.read().since(posts).latency(), r.load.webhooks.read().since(webhooks).latency()
	p.Errors = r.load.readErrors()
	if p.Delivers {
		p.DeliveredPerS = perSecond(end.delivered-r.start.delivered, took)
		final := r.mark()
		p.Delivered = final.delivered - r.start.delivered
		p.Delivery = final.delivery.since(r.start.delivery).latency()
		p.DrainedIn = max(0, r.ledger.lastArrival().Sub(ended).Seconds())
		p.Check = r.ledger.check()
		if p.Interrupted { // nobody waited for what was under way
			p.Check.Lost = 0
		}
	}
	if r.noProcess != nil {
		p.NoMetrics = r.noProcess.Error()
	} else if p.Accepted > 0 {
		p.HubCPU = (after.cpuSeconds - before.cpuSeconds) / took.Seconds()
		p.CPUPerMessage = (drained.cpuSeconds - before.cpuSeconds) * 1e6 / float64(p.Accepted)
	}
	if r.o.HubPID != 0 && spentKnown {
		p.Processors, p.Others = spent.String(), spent.Others
	}
	p.Tables = r.tables(ctx)
	if r.o.Soak {
		p.Soak = judge(p.Rows, p.Delivers)
		flat := len(p.Soak) > 0 && !slices.ContainsFunc(p.Soak, func(f Flat) bool { return !f.OK })
		p.Flat = &flat
	}
}

// drain waits for the messages that have not arrived, as long as that makes sense.
func (r *run) drain(ctx context.Context) {
	if !r.report.Delivers {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, r.o.Drain)
	defer cancel()
	lines := time.NewTicker(r.o.Every)
	defer lines.Stop()
	look := time.NewTicker(20 * time.Millisecond)
	defer look.Stop()
	for r.ledger.open() > 0 {
		select {
		case <-ctx.Done():
			return
		case <-lines.C:
			fmt.Fprintf(r.o.Progress, "waiting for %d messages to arrive\n", r.ledger.open())
		case <-look.C:
		}
	}
}

// line prints the progress since the last one.
func (r *run) line() {
	now := r.mark()
	span := now.at.Sub(r.tick.at)
	l := now.took.since(r.tick.took)
	fmt.Fprintf(r.o.Progress, "[%4.0f s] %6.0f/s accepted, p50 %.1f, p99 %.1f ms", now.at.Sub(r.start.at).Seconds(),
		perSecond(now.accepted-r.tick.accepted, span), ms(l.quantile(0.5)), ms(l.quantile(0.99)))
	if r.report.Delivers {
		d := now.delivery.since(r.tick.delivery)
		fmt.Fprintf(r.o.Progress, "; %6.0f/s delivered, p50 %.1f, p99 %.1f ms, %d open", perSecond(now.delivered-r.tick.delivered, span),
			ms(d.quantile(0.5)), ms(d.quantile(0.99)), r.ledger.open())
	}
	if r.o.Rate > 0 {
		if behind := int64(r.o.Rate*now.at.Sub(r.start.at).Seconds()) - (now.accepted + now.failed - r.start.accepted - r.start.failed); behind > int64(r.o.Callers) {
			fmt.Fprintf(r.o.Progress, "; %d behind", behind)
		}
	}
	fmt.Fprintf(r.o.Progress, "; %d errors\n", now.failed-r.start.failed)
	r.tick = now
}

// row adds a row from the last one to now, and returns what the hub told of itself at its end.
func (r *run) row(ctx context.Context, before process) process {
	now, after := r.mark(), r.process(ctx)
	span := now.at.Sub(r.last.at)
	row := Row{
		From: math.Round(r.last.at.Sub(r.start.at).Seconds()), Seconds: span.Seconds(),
		Accepted: perSecond(now.accepted-r.last.accepted, span), Errors: now.failed - r.last.failed, Latency: now.took.since(r.last.took).latency(),
		Resident: int64(after.resident), Heap: int64(after.heap), Goroutines: int64(after.goroutines),
	}
	if after.cpuSeconds > before.cpuSeconds {
		row.HubCPU = (after.cpuSeconds - before.cpuSeconds) / span.Seconds()
	}
	if r.report.Delivers {
		row.Delivered, row.Delivery = perSecond(now.delivered-r.last.delivered, span), now.delivery.since(r.last.delivery).latency()
		row.Open = r.ledger.open()
	}
	tables := r.tables(ctx)
	for _, t := range tables {
		row.Database += t.Bytes
	}
	row.Standing, row.Dead = standing(tables)
	r.report.PeakResident = max(r.report.PeakResident, row.Resident)
	r.report.Rows = append(r.report.Rows, row)
	fmt.Fprintln(r.o.Progress, row)
	r.last = now
	return after
}

// process reads what the hub tells of itself; after a failure it asks no more.
func (r *run) process(ctx context.Context) process {
	if r.noProcess != nil {
		return process{}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readPatience)
	defer cancel()
	p, err := readProcess(ctx, r.o.Hub, r.o.MetricsToken)
	r.noProcess = err
	return p
}

// tables reads the tables, when the database is known. It is a view only: a failure leaves it empty.
func (r *run) tables(ctx context.Context) []Table {
	if r.o.Database == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readPatience)
	defer cancel()
	tables, err := readTables(ctx, r.o.Database)
	if err != nil {
		fmt.Fprintln(r.o.Progress, err)
	}
	return tables
}

func (r *run) verdict() error {
	var all []error
	if c := r.report.Check; c.Lost+c.Doubled+c.OutOfOrder > 0 {
		all = append(all, fmt.Errorf("%w: %d, %d and %d", ErrBroken, c.Lost, c.Doubled, c.OutOfOrder))
	}
	if flat := r.report.Flat; flat != nil && !*flat {
		err := ErrNotFlat
		if len(r.report.Soak) == 0 {
			err = fmt.Errorf("%w: too few rows for a verdict (%d of %d)", ErrNotFlat, len(r.report.Rows), minRows)
		}
		all = append(all, err)
	}
	return errors.Join(all...)
}
