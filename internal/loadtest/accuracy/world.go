package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/cluster"
	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/limits"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	limitcluster "converger/internal/ratelimit/cluster"
)

// conditions are those under which nodes run.
type conditions struct {
	delay time.Duration // one way, between all nodes
	loss  float64       // share of the reports that never arrive
	skew  time.Duration // of the first node's clock, before it is corrected
	plain bool          // regular reports alone, without the rule
	cuts  bool          // connections can be cut
}

// world is a cluster. Requests go to its places, numbered from 0; a place may change its node.
type world struct {
	conditions
	database string
	label    string
	secret   []byte
	addrs    []string // of the nodes, by number; there are some to spare
	roads    *roads   // by number
	places   []atomic.Pointer[node]
	all      []*node // every one ever started, by number
}

// node is one member with its counters.
type node struct {
	*cluster.Node
	number int
	counts *limitcluster.Store
	clock  ratelimit.Clock
	beats  *pgxpool.Pool
	stop   func() error

	messages, bytes atomic.Int64 // sent; one to several nodes counts once

	mu       sync.Mutex
	arrivals []arrival
}

// arrival is a message that came, by the cluster's clock in nanoseconds.
type arrival struct{ sent, took int64 }

const (
	patience = time.Minute // for a cluster to be whole
	spare    = 4           // nodes that may take another's place
)

// plainInterval is that of plain reports. How much they overshoot depends on where in a window they fall, from nothing to
// two thirds; with this they come ten milliseconds earlier in each window, so that ten windows have the mean of all places,
// a third.
const plainInterval = 101 * time.Millisecond

// newWorld starts n nodes and waits until each sees all others.
func newWorld(ctx context.Context, database string, n int, c conditions) (_ *world, err error) {
	w := &world{conditions: c, database: database, label: "accuracy-" + rand.Text()[:10], secret: []byte(rand.Text() + rand.Text() + rand.Text()),
		roads: newRoads(c.delay), places: make([]atomic.Pointer[node], n)}
	if w.addrs, err = hub.FreeAddresses(ctx, n+spare, true); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, w.close())
		}
	}()
	for range n {
		if _, err := w.launch(ctx); err != nil {
			return nil, err
		}
	}
	for i, started := range w.all {
		if err := w.admit(ctx, started, i, n); err != nil {
			return nil, err
		}
	}
	return w, nil
}

// launch starts a node. Nobody asks it before admit.
func (w *world) launch(ctx context.Context) (*node, error) {
	n := &node{number: len(w.all)}
	var err error
	if n.beats, err = postgres.Open(ctx, w.database, postgres.Options{MaxConns: 1, AppName: "accuracy heartbeat"}); err != nil {
		return nil, err
	}
	quiet := slog.New(slog.DiscardHandler)
	c := cluster.Config{Label: w.label, NodeName: fmt.Sprintf("node%d", n.number+1), Version: "accuracy", Secret: w.secret,
		Bind: w.addrs[n.number], Peers: w.addrs, Database: n.beats, Logger: quiet}
	if n.number == 0 && w.skew != 0 {
		began := time.Now()
		c.Now = func() int64 { return began.Add(w.skew).UnixNano() + int64(time.Since(began)) }
	}
	if w.delay != 0 || w.cuts {
		c.Dial = w.roads.dialer(n.number, func(address string) int { return slices.Index(w.addrs, address) })
	}
	if n.Node, err = cluster.New(c); err != nil {
		n.beats.Close()
		return nil, err
	}
	n.clock = ratelimit.ClockFrom(func() ratelimit.Instant { return ratelimit.Instant(n.Now()) })
	config := limitcluster.Config{Network: counted{n}, Clock: n.clock, Plain: w.plain, Logger: quiet}
	if w.plain {
		config.SyncInterval = plainInterval
	}
	n.counts, err = limitcluster.New(config)
	if err != nil {
		n.beats.Close()
		return nil, err
	}
	h := n.counts.Handler()
	receive := h.Receive
	h.Receive = func(from cluster.ID, m cluster.Message) {
		if w.loss > 0 && mathrand.Float64() < w.loss {
			return
		}
		n.mu.Lock()
		n.arrivals = append(n.arrivals, arrival{m.Sent, n.Now() - m.Sent})
		n.mu.Unlock()
		receive(from, m)
	}
	n.Handle(limitcluster.Topic, h)

	living, end := context.WithCancel(context.WithoutCancel(ctx))
	ended := make(chan error, 1)
	go func() { ended <- n.live(living) }()
	n.stop = sync.OnceValue(func() error {
		end()
		err := <-ended
		n.beats.Close()
		return err
	})
	w.all = append(w.all, n)
	return n, nil
}

// live runs the node and its counters until ctx ends; then the counters say their last before the node leaves.
func (n *node) live(ctx context.Context) error {
	talking, leave := context.WithCancel(context.WithoutCancel(ctx))
	var counting sync.WaitGroup
	counting.Go(func() {
		defer leave()
		<-n.Settled()
		_ = n.counts.Run(ctx) // it has no errors
	})
	err := n.Run(talking)
	counting.Wait()
	return err
}

// counted is a node as its counters see it: it counts what they send.
type counted struct{ *node }

// Broadcast implements [limitcluster.Network].
func (c counted) Broadcast(t cluster.Topic, body []byte) int {
	c.messages.Add(1)
	c.bytes.Add(int64(len(body)))
	return c.Node.Broadcast(t, body)
}

// admit waits until a node has settled, sees so many, itself included, and has their counts, as the program does before it
// takes requests; then place i is its.
func (w *world) admit(ctx context.Context, n *node, i, see int) error {
	select {
	case <-n.Settled():
	case <-ctx.Done():
		return ctx.Err()
	}
	err := hub.Until(ctx, patience, func() (bool, error) {
		connected := 1
		for _, p := range n.View().Peers {
			if p.Standing == cluster.Visible && p.Connected && p.Latency > 0 {
				connected++
			}
		}
		return connected >= see, nil
	})
	if err != nil {
		return fmt.Errorf("node %d sees %d nodes of %d: %w", n.number+1, n.View().Visible, see, err)
	}
	if err := n.counts.Sync(ctx); err != nil {
		return err
	}
	w.places[i].Store(n)
	return nil
}

// kill silences the node of a place at once and for good: no word of it arrives any more, nor a heartbeat, and nobody asks it.
func (w *world) kill(i int) {
	n := w.places[i].Swap(nil)
	w.roads.set(func(a, b int) bool { return a == n.number || b == n.number })
	n.beats.Close()
}

// close stops all nodes side by side.
func (w *world) close() error {
	w.roads.set(nil)
	errs := make([]error, len(w.all))
	var all sync.WaitGroup
	for i, n := range w.all {
		all.Go(func() { errs[i] = n.stop() })
	}
	all.Wait()
	return errors.Join(errs...)
}

// flood is one limit under load.
type flood struct {
	rule  ratelimit.Rule
	item  ratelimit.Item
	tally limits.Tally
}

func newFlood(r ratelimit.Rule) (*flood, error) {
	p, err := ratelimit.NewPolicy(ratelimit.APIRead, r)
	if err != nil {
		return nil, err
	}
	return &flood{rule: r, item: ratelimit.Item{Key: ratelimit.Key{Hi: mathrand.Uint64() | 2, Lo: mathrand.Uint64()}, Policy: p, Cost: 1}}, nil
}

// offer runs a load on all floods for so many windows of a second, from the edge of one on, and returns the number of the
// first. Beside it during, if there is one, is called with the moment of that edge.
func (w *world) offer(ctx context.Context, floods []*flood, l limits.Load, factor float64, windows int, during func(began time.Time) error) (first int64, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	now := w.places[0].Load().clock.Now()
	first = limits.WindowAt(int64(now)/1e6, 1000) + 1
	began := time.Now().Add(time.Duration(first*1e9 - int64(now)))
	var asking sync.WaitGroup
	tallies := make([][]limits.Tally, len(w.places))
	for i := range w.places {
		tallies[i] = make([]limits.Tally, len(floods))
		asking.Go(func() { w.ask(ctx, i, floods, tallies[i], l, factor, windows, began) })
	}
	if during != nil {
		if err = during(began); err != nil {
			cancel()
		}
	}
	asking.Wait()
	for i := range tallies {
		for j, f := range floods {
			f.tally.Merge(&tallies[i][j])
		}
	}
	return first, errors.Join(err, context.Cause(ctx))
}

const step = time.Millisecond // between two looks at what is due

// ask asks the node of place i what is due.
func (w *world) ask(ctx context.Context, i int, floods []*flood, tallies []limits.Tally, l limits.Load, factor float64, windows int, began time.Time) {
	arrivals := make([]*limits.Arrivals, len(floods))
	for j := range floods {
		arrivals[j] = limits.NewArrivals(l, mathrand.New(mathrand.NewPCG(mathrand.Uint64(), uint64(i))))
	}
	time.Sleep(mathrand.N(step)) // or all nodes would be asked at the same moment of each millisecond
	tick := time.NewTicker(step)
	defer tick.Stop()
	for last := 0.0; last < float64(windows); {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Since(began).Seconds() // and so in windows
		if now <= 0 {
			continue
		}
		n := w.places[i].Load()
		for j, f := range floods {
			due := arrivals[j].Next(float64(f.rule.Limit) * l.Due(i, len(w.places), last, now, factor))
			if n == nil { // it is dead, and its callers with it
				continue
			}
			for range due {
				d := n.counts.Take(ctx, n.clock.Now(), f.item)
				tallies[j].Add(limits.WindowAt(int64(d.At)/1e6, 1000), d.Allowed)
			}
		}
		last = now
	}
}

// traffic is what nodes sent and how long it was on its way.
type traffic struct {
	messages, bytes float64 // of a node, in a second
	delay           limits.Delay
}

// mark begins to count traffic.
func (w *world) mark() {
	for _, n := range w.all {
		n.messages.Store(0)
		n.bytes.Store(0)
		n.mu.Lock()
		n.arrivals = n.arrivals[:0]
		n.mu.Unlock()
	}
}

// traffic is that of so many seconds since mark; of delays only those of messages that were sent from a moment on count,
// and the road's own delay does not.
func (w *world) traffic(seconds float64, from int64) traffic {
	var t traffic
	var took []int64
	for _, n := range w.all {
		t.messages += float64(n.messages.Load()) / float64(len(w.all)) / seconds
		t.bytes += float64(n.bytes.Load()) / float64(len(w.all)) / seconds
		n.mu.Lock()
		for _, a := range n.arrivals {
			if a.sent >= from {
				took = append(took, max(0, a.took-int64(w.delay)))
			}
		}
		n.mu.Unlock()
	}
	t.delay.Messages = int64(len(took))
	if len(took) == 0 {
		return t
	}
	slices.Sort(took)
	at := func(q float64) float64 { return float64(took[int(math.Ceil(q*float64(len(took))))-1]) / 1e6 }
	t.delay.P50, t.delay.P99, t.delay.Max = at(0.5), at(0.99), at(1)
	return t
}
