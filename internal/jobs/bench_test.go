package jobs

import (
	"context"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

const (
	benchLanes = 500
	benchEach  = 20
)

// noopArgs is a River job that does nothing.
type noopArgs struct{}

func (noopArgs) Kind() string { return "noop" }

type noopWorker struct {
	river.WorkerDefaults[noopArgs]
	n *atomic.Int64
}

func (w *noopWorker) Work(context.Context, *river.Job[noopArgs]) error { w.n.Add(1); return nil }

// BenchmarkBacklog delivers a backlog to a receiver that takes no time, twenty deliveries a lane, and works as many no-op
// jobs of River with the same number of workers, in turns. ratio is deliveries to jobs per second (aim: 0.7 or more).
func BenchmarkBacklog(b *testing.B) {
	var lanes, noops time.Duration
	for b.Loop() {
		lanes += backlogOfLanes(b)
		noops += backlogOfNoops(b)
	}
	n := float64(benchLanes*benchEach) * float64(b.N)
	b.ReportMetric(n/lanes.Seconds(), "deliveries/s")
	b.ReportMetric(n/noops.Seconds(), "noops/s")
	b.ReportMetric(noops.Seconds()/lanes.Seconds(), "ratio")
	b.ReportMetric(0, "ns/op")
}

func backlogOfLanes(b *testing.B) time.Duration {
	w := newWorld(b, benchLanes)
	exec(b, w.pool, `UPDATE channels SET hold_until = now() + interval '1 hour'`)
	var sent atomic.Int64
	n := w.newNode(b, func(context.Context, channel.Outbound) channel.Outcome {
		sent.Add(1)
		return channel.Outcome{Kind: channel.Sent, StatusCode: 204}
	}, delivery.Options{}, Options{})
	for i := range benchEach {
		if err := w.post(b.Context(), n.service, fmt.Sprint(i), w.conversations...); err != nil {
			b.Fatal(err)
		}
	}
	exec(b, w.pool, `ANALYZE`)
	exec(b, w.pool, `UPDATE channels SET hold_until = NULL`)
	start := time.Now()
	eventually(b, "all lanes at rest", func() bool {
		return sent.Load() >= benchLanes*benchEach && count(b, w.pool, `SELECT count(*) FROM lanes WHERE next_at IS NOT NULL`) == 0
	})
	took := time.Since(start)
	n.kill()
	if got := count(b, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`); got != benchLanes*benchEach || sent.Load() != benchLanes*benchEach {
		b.Fatalf("%d sent in %d attempts", got, sent.Load())
	}
	return took
}

func backlogOfNoops(b *testing.B) time.Duration {
	pool := pgtest.PoolWith(b, postgres.Options{MaxConns: 20})
	w := &noopWorker{n: &atomic.Int64{}}
	workers := river.NewWorkers()
	river.AddWorker(workers, w)
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Workers: workers, FetchCooldown: fetchCooldown, FetchPollInterval: fetchPoll,
		Queues: map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 500}}})
	if err != nil {
		b.Fatal(err)
	}
	params := make([]river.InsertManyParams, benchLanes*benchEach)
	for i := range params {
		params[i].Args = noopArgs{}
	}
	if _, err := client.InsertManyFast(b.Context(), params); err != nil {
		b.Fatal(err)
	}
	exec(b, pool, `ANALYZE`)
	start := time.Now()
	if err := client.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
	eventually(b, "all no-ops worked", func() bool {
		return w.n.Load() == int64(len(params)) && count(b, pool, `SELECT count(*) FROM river_job WHERE state <> 'completed'`) == 0
	})
	took := time.Since(start)
	if err := client.Stop(b.Context()); err != nil {
		b.Fatal(err)
	}
	return took
}

// BenchmarkIdle measures the time from the beginning of a post on an idle node to its first attempt (aim: 5 ms in the middle,
// 20 ms for all but one in a hundred).
func BenchmarkIdle(b *testing.B) {
	w := newWorld(b, 50)
	arrived := make(chan time.Time, 1)
	n := w.newNode(b, func(context.Context, channel.Outbound) channel.Outcome {
		arrived <- time.Now()
		return channel.Outcome{Kind: channel.Sent}
	}, delivery.Options{}, Options{})
	var took []time.Duration
	for i := 0; b.Loop(); i++ {
		time.Sleep(20 * time.Millisecond) // idle between posts
		start := time.Now()
		if err := w.post(b.Context(), n.service, "x", w.conversations[i%len(w.conversations)]); err != nil {
			b.Fatal(err)
		}
		took = append(took, (<-arrived).Sub(start))
	}
	slices.Sort(took)
	b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, "p50-ms")
	b.ReportMetric(float64(took[len(took)*99/100].Microseconds())/1000, "p99-ms")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkEnqueue is one append's share of delivery, handed over and not.
func BenchmarkEnqueue(b *testing.B) {
	for _, lanes := range []int{1, 100} {
		b.Run(fmt.Sprint(lanes), func(b *testing.B) {
			w := newWorld(b, lanes)
			s := delivery.NewService(w.pool, w, channel.NewRegistry(adapter(nil)), w, delivery.Options{})
			s.SetJobs(newClient(b, w.pool, nil, Options{InsertOnly: true}))
			for b.Loop() {
				if err := w.post(b.Context(), s, "x", w.conversations...); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
