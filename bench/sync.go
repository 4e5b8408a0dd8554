package main

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sys/unix"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

const (
	// Limits of each key, a second. One request is too little of the first to be told within its window (limit / (32 nodes)), and
	// enough of the second: each is told once.
	syncUntold, syncTold = 100, 50

	syncWarmUp = 3 * time.Second
	syncFor    = 5 * time.Second

	mostSyncBytes = 3.5e6 // a second, to both peers together
	mostSyncShare = 0.14  // of a core, over all three
)

// sync has one node of three check 100,000 keys once a second each, and measures what the three do beside that. The
// target is for keys that are really told.
func (b *bench) sync(ctx context.Context) error {
	if err := b.syncOf(ctx, syncUntold, false); err != nil {
		return err
	}
	return b.syncOf(ctx, syncTold, true)
}

func (b *bench) syncOf(ctx context.Context, limit int64, judged bool) error {
	clock := newClock()
	alone, err := local.New(local.Config{Clock: clock})
	if err != nil {
		return err
	}
	base, err := active(ctx, alone, clock, limit, func() {})
	if err != nil {
		return err
	}
	mesh, err := newMesh(3, clock)
	if err != nil {
		return err
	}
	var loops []func(context.Context)
	for _, m := range mesh {
		loops = append(loops, m.loops()...)
	}
	defer background(ctx, loops...)()
	var before int64
	share, err := active(ctx, mesh[0], clock, limit, func() { before = mesh[0].bytes.Load() })
	if err != nil {
		return err
	}
	bytes := float64(mesh[0].bytes.Load()-before) / syncFor.Seconds()
	share = max(0, share-base)
	verdict := judge([]float64{bytes}, mostSyncBytes, false)
	if v := judge([]float64{share}, mostSyncShare, false); verdict == "met" {
		verdict = v
	}
	target := fmt.Sprintf("≤ %.1f MB/s, ≤ %.0f %%", mostSyncBytes/1e6, 100*mostSyncShare)
	if !judged {
		target, verdict = "–", "no target of its own"
	}
	b.add(row{
		work:     fmt.Sprintf("sync loop, 100,000 keys active on one of 3 nodes, 1 request a second each of %d", limit),
		measured: fmt.Sprintf("%.1f MB/s, %.0f %% of a core over all three", bytes/1e6, 100*share),
		beside:   fmt.Sprintf("the checks alone: %.0f %% of a core", 100*base),
		target:   target, verdict: verdict,
	})
	return nil
}

// active checks the keys in turn, and returns the part of a core that this process uses meanwhile, after a warm-up.
func active(ctx context.Context, store ratelimit.Store, clock ratelimit.Clock, limit int64, warm func()) (share float64, err error) {
	p := policy(limit, time.Second)
	items := make([]ratelimit.Item, manyKeys)
	for i := range items {
		items[i] = ratelimit.Item{Key: key(i + 1), Policy: p}
	}
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	var measured time.Time
	var cpu time.Duration
	start, done := time.Now(), 0
	for {
		now := time.Now()
		for due := int(now.Sub(start).Seconds() * manyKeys); done < due; done++ {
			store.Take(ctx, clock.Now(), items[done%manyKeys])
		}
		switch {
		case measured.IsZero() && now.Sub(start) > syncWarmUp:
			measured, cpu = now, processorTime()
			warm()
		case !measured.IsZero() && now.Sub(measured) >= syncFor:
			return (processorTime() - cpu).Seconds() / now.Sub(measured).Seconds(), nil
		}
		select {
		case <-ctx.Done():
			return 0, ctx.Err()
		case <-tick.C:
		}
	}
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// threadTime is what the calling thread has used, in nanoseconds.
func threadTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		return 0
	}
	return t.Nano()
}
