package cluster_test

import (
	"context"
	"log/slog"
	"runtime"
	"syscall"
	"testing"
	"time"

	"converger/internal/cluster"
)

func benchPair(b *testing.B, h cluster.Handler) (from running, to cluster.ID) {
	b.Helper()
	nodes := runAll(b, ports(b, 2), func(_ int, c *cluster.Config) {
		c.Logger = slog.New(slog.DiscardHandler)
	}, func(n *cluster.Node) { n.Handle(topic, h) })
	awaitWhole(b, nodes...)
	return nodes[0], nodes[1].ID()
}

// One caller asks another node, over TLS on loopback.
func BenchmarkCall(b *testing.B) {
	node, to := benchPair(b, cluster.Handler{Answer: func(_ context.Context, _ cluster.ID, request []byte) ([]byte, error) {
		return request, nil
	}})
	ctx, cancel := context.WithTimeout(b.Context(), time.Hour)
	defer cancel()
	request := make([]byte, 64)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := node.Call(ctx, to, topic, request); err != nil {
			b.Fatal(err)
		}
	}
}

// A message, from Send to Receive, with nothing else on the way.
func BenchmarkMessage(b *testing.B) {
	arrived := make(chan struct{}, 1)
	node, to := benchPair(b, cluster.Handler{Receive: func(cluster.ID, cluster.Message) { arrived <- struct{}{} }})
	body := make([]byte, 1000)
	b.ReportAllocs()
	for b.Loop() {
		if !node.Send(to, topic, body) {
			b.Fatal("dropped")
		}
		<-arrived
	}
}

// BenchmarkIdle is the processor time that 20 idle nodes take, of one core: their pings and gossip.
func BenchmarkIdle(b *testing.B) {
	const n = 20
	nodes := runAll(b, ports(b, n), func(_ int, c *cluster.Config) {
		c.Logger = slog.New(slog.DiscardHandler)
	})
	for deadline := time.Now().Add(5 * time.Minute); !sees(nodes[1:]...)(nodes[0].View()); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatal(show(nodes[0].View()))
		}
	}
	var before, after syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &before)
	began := time.Now()
	for b.Loop() {
		time.Sleep(time.Second) // an idle second is what is measured
	}
	took := time.Since(began)
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &after)
	cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	b.ReportMetric(100*cpu.Seconds()/took.Seconds()/n, "%core/node")
	b.ReportMetric(float64(runtime.NumGoroutine())/n, "goroutines/node")
}
