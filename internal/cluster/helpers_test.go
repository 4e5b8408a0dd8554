package cluster_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/cluster"
	"converger/internal/cluster/clustertest"
	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

const (
	secret = "7f1d0c5b9a3e48d2b6c4f0e1a2938475"
	// patience is how long a test waits for what should take a second at most: busy processors and the race detector included.
	patience = 30 * time.Second
)

func ports(t testing.TB, n int) []string {
	t.Helper()
	var out []string
	for range n {
		out = append(out, clustertest.FreeAddress(t))
	}
	return out
}

// running is a node that runs until the test ends or stop.
type running struct {
	*cluster.Node
	stop func()
	log  *lines
}

// lines is a log that tests read.
type lines struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// config is that of a node on loopback.
func config(bind string, peers ...string) cluster.Config {
	return cluster.Config{Label: "test", NodeName: "n" + bind[strings.LastIndex(bind, ":")+1:], Version: "test", Secret: []byte(secret), Bind: bind, Peers: peers}
}

// run starts a node; handle may register handlers.
func run(t testing.TB, c cluster.Config, handle ...func(*cluster.Node)) running {
	t.Helper()
	log := &lines{}
	c.Logger = slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if c.Registerer == nil {
		c.Registerer = prometheus.NewPedanticRegistry()
	}
	n, err := cluster.New(c)
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range handle {
		h(n)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- n.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("node %s: %v", c.Bind, err)
			}
		case <-time.After(patience):
			t.Errorf("node %s does not stop", c.Bind)
		}
	})
	t.Cleanup(func() {
		stop()
		if t.Failed() {
			t.Logf("log of %s (%s):\n%s", c.Bind, n.ID(), log)
		}
	})
	return running{n, stop, log}
}

// await waits until the node's view is as wanted.
func (r running) await(t testing.TB, what string, ok func(*cluster.View) bool) *cluster.View {
	t.Helper()
	timeout := time.After(patience)
	tick := time.NewTicker(20 * time.Millisecond) // for what closes no channel
	defer tick.Stop()
	for {
		v, changed := r.Watch()
		if ok(v) {
			return v
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-timeout:
			t.Fatalf("node %s never saw %s; it sees %s", r.ID(), what, show(r.View()))
		}
	}
}

func show(v *cluster.View) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d of %d", v.Visible, v.Alive)
	for _, p := range v.Peers {
		fmt.Fprintf(&b, "; %s %s at %s connected %t session %d heard %s", p.ID, p.Standing, p.Address, p.Connected, p.Session, p.Heard)
	}
	return b.String()
}

// sees tells whether exactly these are visible, and connected.
func sees(nodes ...running) func(*cluster.View) bool {
	var ids []cluster.ID
	for _, n := range nodes {
		ids = append(ids, n.ID())
	}
	slices.Sort(ids)
	return func(v *cluster.View) bool {
		var got []cluster.ID
		for _, p := range v.Peers {
			if p.Standing != cluster.Visible || !p.Connected {
				return false
			}
			got = append(got, p.ID)
		}
		return slices.Equal(got, ids) && v.Visible == len(ids)+1 && v.Alive == len(ids)+1
	}
}

// awaitWhole waits until everybody sees everybody.
func awaitWhole(t testing.TB, nodes ...running) {
	t.Helper()
	for i, n := range nodes {
		others := slices.Delete(slices.Clone(nodes), i, i+1)
		n.await(t, "the whole cluster", sees(others...))
	}
}

// runAll starts a node at each address; mod may change the configurations.
func runAll(t testing.TB, addresses []string, mod func(i int, c *cluster.Config), handle ...func(*cluster.Node)) []running {
	t.Helper()
	var nodes []running
	for i, a := range addresses {
		c := config(a, addresses...)
		if mod != nil {
			mod(i, &c)
		}
		nodes = append(nodes, run(t, c, handle...))
	}
	return nodes
}

// heartbeats opens a node's own pool.
func heartbeats(t testing.TB, url string) *pgxpool.Pool {
	t.Helper()
	return pgtest.Open(t, url, postgres.Options{MaxConns: 1, AppName: "heartbeat"})
}
