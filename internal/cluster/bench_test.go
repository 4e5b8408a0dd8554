package cluster_test

import (
	"context"
	"log/slog"
	"runtime"
	"sync/atomic"
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
	before, began := processorTime(), time.Now()
	for b.Loop() {
		time.Sleep(time.Second) // an idle second is what is measured
	}
	took := time.Since(began)
	b.ReportMetric(100*(processorTime()-before).Seconds()/took.Seconds()/n, "%core/node")
	b.ReportMetric(float64(runtime.NumGoroutine())/n, "goroutines/node")
}

// BenchmarkBurst has each of 20 nodes tell the 19 others something at the same moment, as at a window's start of a limit
// that is flooded everywhere, and waits until all have heard it.
func BenchmarkBurst(b *testing.B) {
	const n, all = 20, 20 * 19
	var heard atomic.Int64
	whole := make(chan struct{}, 1)
	nodes := runAll(b, ports(b, n), func(_ int, c *cluster.Config) {
		c.Logger = slog.New(slog.DiscardHandler)
	}, func(node *cluster.Node) {
		node.Handle(topic, cluster.Handler{Receive: func(cluster.ID, cluster.Message) {
			if heard.Add(1)%all == 0 {
				whole <- struct{}{}
			}
		}})
	})
	for _, node := range nodes {
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(50 * time.Millisecond) {
			connected := 0
			for _, p := range node.View().Peers {
				if p.Connected {
					connected++
				}
			}
			if connected == n-1 {
				break
			}
			if time.Now().After(deadline) {
				b.Fatal(show(node.View()))
			}
		}
	}
	body := make([]byte, 45)
	before := processorTime()
	for b.Loop() {
		for _, node := range nodes {
			if node.Broadcast(topic, body) != n-1 {
				b.Fatal("dropped")
			}
		}
		<-whole
	}
	b.ReportMetric(float64((processorTime()-before).Microseconds())/float64(b.N)/all, "cpu-µs/message")
}

// processorTime is what this process has used.
func processorTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
