package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/gubernator-io/gubernator/v2"
	gubernators "github.com/gubernator-io/gubernator/v2/cluster"
	"github.com/sirupsen/logrus"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/owner"
)

const (
	ownerCallers = 32
	ownerSlice   = 400 * time.Millisecond
	ownerP50     = 150.0 // µs
	ownerKeys    = 64
)

// remote is a limiter whose checks another node decides.
type remote struct {
	name  string
	check func(ctx context.Context, i int) error
	// decidedAlone is how many checks met no answer in time; nil: such ones fail.
	decidedAlone func() int64

	p50, alone, together []float64 // by round: µs, checks a second of one caller, and of ownerCallers
}

func (b *bench) owner(ctx context.Context) error {
	ours, stop, err := ownerStore(ctx)
	if err != nil {
		return err
	}
	defer stop()
	theirs, stopTheirs, err := gubernatorNodes()
	if err != nil {
		return fmt.Errorf("gubernator: %w", err)
	}
	defer stopTheirs()
	all := append([]*remote{ours}, theirs...)
	for round := range b.rounds + 1 {
		for i := range all {
			r := all[(i+round)%len(all)]
			one, err := r.load(ctx, 1)
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			many, err := r.load(ctx, ownerCallers)
			if err != nil {
				return fmt.Errorf("%s: %w", r.name, err)
			}
			if round > 0 {
				r.p50 = append(r.p50, float64(one[len(one)/2].Nanoseconds())/1000)
				r.alone = append(r.alone, float64(len(one))/ownerSlice.Seconds())
				r.together = append(r.together, float64(len(many))/ownerSlice.Seconds())
			}
		}
	}
	if n := ours.decidedAlone(); n > 0 {
		b.say("owner: %d checks had no answer within the deadline and were decided by this node's share", n)
	}
	b.add(row{
		work: "owner: check at another node, 1 caller, p50", measured: span(ours.p50, "%.0f") + " µs",
		beside: fmt.Sprintf("%s %.0f µs, %s %.0f µs", theirs[0].name, median(theirs[0].p50), theirs[1].name, median(theirs[1].p50)),
		ratio:  span(ratios(ours.p50, theirs[0].p50), "%.2f"), target: fmt.Sprintf("≤ %.0f µs", ownerP50), verdict: judge(ours.p50, ownerP50, false),
	})
	for _, t := range theirs {
		q := ratios(ours.together, t.together)
		b.add(row{
			work: fmt.Sprintf("owner: checks a second, %d callers", ownerCallers), measured: span(ours.together, "%.0f") + "/s",
			beside: fmt.Sprintf("%s %.0f/s", t.name, median(t.together)), ratio: span(q, "%.2f"), target: "> 1", verdict: judge(q, 1, true),
		})
	}
	return nil
}

// load has callers check for a slice, and returns the times of all checks in order.
func (r *remote) load(ctx context.Context, callers int) ([]time.Duration, error) {
	took := make([][]time.Duration, callers)
	errs := make([]error, callers)
	var wg sync.WaitGroup
	start := time.Now()
	for c := range callers {
		wg.Go(func() {
			for i := c; time.Since(start) < ownerSlice && errs[c] == nil; i++ {
				began := time.Now()
				errs[c] = r.check(ctx, i)
				took[c] = append(took[c], time.Since(began))
			}
		})
	}
	wg.Wait()
	all := slices.Concat(took...)
	slices.Sort(all)
	return all, errors.Join(errs...)
}

// ownerStore is a node of three, as the program makes them, and checks keys that another one owns.
func ownerStore(ctx context.Context) (r *remote, stop func(), err error) {
	log := slog.New(slog.DiscardHandler)
	var addresses []string
	for range 3 {
		a, err := freeAddress(ctx)
		if err != nil {
			return nil, nil, err
		}
		addresses = append(addresses, a)
	}
	var nodes []*callCounter
	var stores []*owner.Store
	var loops []func(context.Context)
	for i, a := range addresses {
		made, err := cluster.New(cluster.Config{Label: "bench", NodeName: strconv.Itoa(i), Secret: []byte("a secret for measuring only, long enough"), Bind: a, Peers: addresses, Logger: log})
		if err != nil {
			return nil, nil, err
		}
		n := &callCounter{Node: made}
		s, err := owner.New(owner.Config{Network: n, Clock: ratelimit.ClockFrom(func() ratelimit.Instant { return ratelimit.Instant(n.Now()) }), Logger: log})
		if err != nil {
			return nil, nil, err
		}
		n.Handle(owner.Topic, s.Handler())
		nodes, stores = append(nodes, n), append(stores, s)
		loops = append(loops, func(ctx context.Context) { _ = n.Run(ctx) }, func(ctx context.Context) { _ = s.Run(ctx) }) // what fails shows below
	}
	stop = background(ctx, loops...)
	for deadline := time.Now().Add(20 * time.Second); slices.ContainsFunc(nodes, func(n *callCounter) bool { return n.View().Visible < len(nodes) }); {
		if time.Now().After(deadline) {
			return nil, stop, errors.New("the nodes do not find each other")
		}
		time.Sleep(20 * time.Millisecond)
	}
	// Whoever calls a node with a check has a key that it does not own.
	me, p := nodes[0], policy(ratelimit.MaxLimit, time.Hour)
	check := func(it ratelimit.Item) ratelimit.Decision {
		return stores[0].Take(ctx, ratelimit.Instant(me.Now()), it)
	}
	var keys []ratelimit.Item
	for i := 1; len(keys) < ownerKeys; i++ {
		it, before := ratelimit.Item{Key: key(i), Policy: p}, me.calls.Load()
		if check(it); me.calls.Load() > before {
			keys = append(keys, it)
		}
	}
	return &remote{name: "owner", check: func(_ context.Context, i int) error {
		d := check(keys[i%len(keys)])
		if !d.Allowed {
			return errors.New("refused")
		}
		if d.At&1 != 0 { // the backend's sign that it went by its own share
			me.alone.Add(1)
		}
		return nil
	}, decidedAlone: me.alone.Load}, stop, nil
}

// callCounter notes that a node was asked.
type callCounter struct {
	*cluster.Node
	calls, alone atomic.Int64
}

// Call implements owner.Network.
func (c *callCounter) Call(ctx context.Context, to cluster.ID, t cluster.Topic, request []byte) ([]byte, error) {
	c.calls.Add(1)
	return c.Node.Call(ctx, to, t, request)
}

func freeAddress(ctx context.Context) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

// gubernatorNodes are three daemons in this process, asked without the hop of a client: unbatched, and batched as is its default.
func gubernatorNodes() (all []*remote, stop func(), err error) {
	logrus.SetOutput(io.Discard)
	peers := make([]gubernator.PeerInfo, 3)
	for i := range peers {
		peers[i] = gubernator.PeerInfo{GRPCAddress: "127.0.0.1:0", HTTPAddress: "127.0.0.1:0"}
	}
	if err := gubernators.StartWith(peers); err != nil {
		return nil, nil, err
	}
	me := gubernators.DaemonAt(0)
	var keys []string
	for i := 0; len(keys) < ownerKeys; i++ {
		k := "tenant-" + strconv.Itoa(i)
		if of, err := gubernators.FindOwningPeer("bench", k); err != nil {
			return nil, gubernators.Stop, err
		} else if of.GRPCAddress != me.PeerInfo.GRPCAddress {
			keys = append(keys, k)
		}
	}
	for _, b := range []struct {
		name     string
		behavior gubernator.Behavior
	}{{"gubernator unbatched", gubernator.Behavior_NO_BATCHING}, {"gubernator batched", gubernator.Behavior_BATCHING}} {
		all = append(all, &remote{name: b.name, check: func(ctx context.Context, i int) error {
			answer, err := me.V1Server.GetRateLimits(ctx, &gubernator.GetRateLimitsReq{Requests: []*gubernator.RateLimitReq{{
				Name: "bench", UniqueKey: keys[i%len(keys)], Hits: 1, Limit: ratelimit.MaxLimit, Duration: time.Hour.Milliseconds(), Behavior: b.behavior,
			}}})
			if err != nil {
				return err
			}
			if r := answer.Responses[0]; r.Error != "" || r.Status != gubernator.Status_UNDER_LIMIT {
				return fmt.Errorf("%v %s", r.Status, r.Error)
			}
			return nil
		}})
	}
	return all, gubernators.Stop, nil
}
