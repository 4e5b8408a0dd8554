package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"strconv"
	"time"

	"github.com/go-chi/httprate"
	"github.com/sethvargo/go-limiter"
	"github.com/sethvargo/go-limiter/memorystore"
	"github.com/throttled/throttled/v2/store/memstore"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	limits "converger/internal/ratelimit/cluster"
	"converger/internal/ratelimit/local"
)

const (
	memoryKeys = 1_000_000

	perKey       = 64.0 // bytes
	perReported  = 32.0
	perPeer      = 24.0
	fullGCMillis = 5.0
)

// heap is what lives after a collection.
func heap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

// collection is the time of a full collection, in milliseconds: the shortest of some.
func collection() float64 {
	best := math.Inf(1)
	for range 7 {
		start := time.Now()
		runtime.GC()
		best = min(best, time.Since(start).Seconds()*1000)
	}
	return best
}

// weigh fills something and says what a key of it weighs, and what a collection with all of them takes.
func weigh(keys int, fill func() (kept any, err error)) (bytes, gc float64, err error) {
	before := heap()
	kept, err := fill()
	if err != nil {
		return 0, 0, err
	}
	bytes = (heap() - before) / float64(keys)
	gc = collection()
	runtime.KeepAlive(kept)
	return bytes, gc, nil
}

func (b *bench) memory(ctx context.Context) error {
	empty := collection()
	verdict := func(bytes, most, gc float64) string {
		v := judge([]float64{bytes}, most, false)
		if g := judge([]float64{gc}, fullGCMillis, false); v == "met" && g != "met" {
			v = "collection " + g
		}
		return v
	}
	add := func(work string, bytes, gc, most float64, beside string) {
		target := ""
		v := "no target of its own"
		if most > 0 {
			target, v = fmt.Sprintf("≤ %.0f B, ≤ %.0f ms", most, fullGCMillis), verdict(bytes, most, gc)
		}
		b.add(row{work: work, measured: fmt.Sprintf("%.1f B, collection %.1f ms", bytes, gc), beside: beside, target: target, verdict: v})
	}

	p := policy(10, time.Hour)
	store, err := local.New(local.Config{})
	if err != nil {
		return err
	}
	bytes, gc, err := weigh(memoryKeys, func() (any, error) {
		for i := range memoryKeys {
			store.Take(ctx, begin, ratelimit.Item{Key: key(i + 1), Policy: p})
		}
		return store, ctx.Err()
	})
	if err != nil {
		return err
	}
	add("memory of a key at 1,000,000, local", bytes, gc, perKey, fmt.Sprintf("empty heap: %.1f ms", empty))

	// In a cluster of three: keys that nobody spoke of, then those that both peers reported, then used here too.
	clock := ratelimit.ClockFrom(func() ratelimit.Instant { return begin })
	mesh, err := newMesh(3, clock)
	if err != nil {
		return err
	}
	quiet := policy(1_000_000, time.Hour)
	bytes, gc, err = weigh(memoryKeys, func() (any, error) {
		for i := range memoryKeys {
			mesh[2].Take(ctx, begin, ratelimit.Item{Key: key(i + 1), Policy: quiet})
		}
		return mesh, ctx.Err()
	})
	if err != nil {
		return err
	}
	add("the same, cluster, not reported", bytes, gc, perKey, "")

	var said [2][][]byte
	for i := range said {
		if said[i], err = reports(ctx, i, p); err != nil {
			return err
		}
	}
	if mesh, err = newMesh(3, clock); err != nil {
		return err
	}
	me := mesh[2]
	me.kept = func([]byte) {} // messages are handed over below
	bytes, _, err = weigh(memoryKeys, func() (any, error) {
		for i, messages := range said {
			for _, body := range messages {
				me.Handler().Receive(cluster.ID(i+1), cluster.Message{Body: body})
			}
		}
		return mesh, ctx.Err()
	})
	if err != nil {
		return err
	}
	if me.Keys() < memoryKeys*95/100 {
		return fmt.Errorf("only %d keys were heard of", me.Keys())
	}
	runtime.KeepAlive(said)
	said = [2][][]byte{} // weighed before and after, but no part of what a node keeps
	gc = collection()
	add("the same, reported by both peers", bytes, gc, perKey+perReported+2*perPeer, "")

	used, gc, err := weigh(memoryKeys, func() (any, error) {
		for i := range memoryKeys {
			me.Take(ctx, begin, ratelimit.Item{Key: key(i + 1), Policy: p})
		}
		return mesh, ctx.Err()
	})
	if err != nil {
		return err
	}
	add("the same, used and reported by this node too", bytes+used, gc, 0, "")
	runtime.KeepAlive(mesh)
	return b.memoryOfPeers(ctx)
}

// reports are what the i-th node of three tells of a request for each key.
func reports(ctx context.Context, i int, p *ratelimit.Policy) ([][]byte, error) {
	mesh, err := newMesh(3, newClock())
	if err != nil {
		return nil, err
	}
	var said [][]byte
	records := 0
	mesh[i].kept = func(body []byte) {
		said = append(said, body)
		records += len(body)
	}
	started, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- mesh[i].Run(started) }()
	for n := range memoryKeys {
		mesh[i].Take(ctx, begin, ratelimit.Item{Key: key(n + 1), Policy: p})
	}
	time.Sleep(2 * limits.DefaultSyncInterval) // what is left is told when it leaves
	stop()
	if err := <-done; err != nil {
		return nil, err
	}
	if records < 20*memoryKeys {
		return nil, errors.New("a peer did not report its keys")
	}
	return said, ctx.Err()
}

// memoryOfPeers weighs other limiters; their keys are strings, which they keep or hash.
func (b *bench) memoryOfPeers(ctx context.Context) error {
	var sweeping limiter.Store
	defer func() {
		if sweeping != nil {
			_ = sweeping.Close(context.WithoutCancel(ctx)) // else its sweeper keeps it alive
		}
	}()
	for _, peer := range []struct {
		name string
		fill func() (any, error)
	}{
		{"httprate's counter", func() (any, error) {
			c := httprate.NewLocalLimitCounter(time.Hour)
			c.Config(10, time.Hour)
			window := time.Now().UTC().Truncate(time.Hour)
			for i := range memoryKeys {
				_ = c.Increment("tenant-"+strconv.Itoa(i), window) // never fails
			}
			return c, ctx.Err()
		}},
		{"throttled", func() (any, error) {
			s, err := memstore.NewCtx(memoryKeys)
			if err != nil {
				return nil, err
			}
			for i := range memoryKeys {
				if _, err := s.SetIfNotExistsWithTTL(ctx, "tenant-"+strconv.Itoa(i), int64(i), time.Hour); err != nil {
					return nil, err
				}
			}
			return s, ctx.Err()
		}},
		{nameReference, func() (any, error) {
			s, err := memorystore.New(&memorystore.Config{Tokens: 10, Interval: time.Hour, SweepInterval: time.Hour, SweepMinTTL: time.Hour})
			if err != nil {
				return nil, err
			}
			sweeping = s
			for i := range memoryKeys {
				if _, _, _, _, err := s.Take(ctx, "tenant-"+strconv.Itoa(i)); err != nil {
					return nil, err
				}
			}
			return s, ctx.Err()
		}},
	} {
		bytes, gc, err := weigh(memoryKeys, peer.fill)
		if err != nil {
			return fmt.Errorf("%s: %w", peer.name, err)
		}
		b.add(row{work: "the same, " + peer.name, measured: fmt.Sprintf("%.1f B, collection %.1f ms", bytes, gc), verdict: "a peer"})
	}
	return nil
}
