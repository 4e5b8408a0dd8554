package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/cluster"
)

func TestThreeNodesFindEachOther(t *testing.T) {
	t.Parallel()
	began := time.Now()
	nodes := runAll(t, ports(t, 3), nil)
	awaitWhole(t, nodes...)
	t.Logf("whole after %s", time.Since(began))
	for _, n := range nodes {
		<-n.Settled()
		if err := n.Ready(); err != nil {
			t.Errorf("not ready: %v", err)
		}
		if err := n.Degraded(); err != nil {
			t.Errorf("degraded: %v", err)
		}
	}
	// One leaves: the others know at once, by its own word.
	left := time.Now()
	nodes[1].stop()
	nodes[0].await(t, "the third alone", sees(nodes[2]))
	t.Logf("a leaving node was gone after %s", time.Since(left))
	if log := nodes[0].log.String(); !strings.Contains(log, "has left the cluster") || strings.Contains(log, "is gone") {
		t.Error("a node that left is not told from one that died")
	}
}

const topic cluster.Topic = 7

func TestMessages(t *testing.T) {
	t.Parallel()
	type heard struct {
		by, from cluster.ID
		m        cluster.Message
	}
	inbox := make(chan heard, 10000)
	handle := func(n *cluster.Node) {
		n.Handle(topic, cluster.Handler{Receive: func(from cluster.ID, m cluster.Message) { inbox <- heard{n.ID(), from, m} }})
	}
	nodes := runAll(t, ports(t, 3), nil, handle)
	awaitWhole(t, nodes...)

	big := bytes.Repeat([]byte("x"), cluster.MaxMessage)
	if got := nodes[0].Broadcast(topic, big); got != 2 {
		t.Errorf("sent to %d", got)
	}
	for range 2 {
		if h := <-inbox; h.from != nodes[0].ID() || !bytes.Equal(h.m.Body, big) {
			t.Errorf("got %d bytes from %s", len(h.m.Body), h.from)
		}
	}
	if nodes[0].Send(nodes[1].ID(), topic, append(big, 'x')) {
		t.Error("a message above the bound was accepted")
	}
	if nodes[0].Send(nodes[0].ID(), topic, nil) || nodes[0].Send(12345, topic, nil) {
		t.Error("a message to nobody was accepted")
	}
	const n = 200
	for i := range n {
		if !nodes[2].Send(nodes[1].ID(), topic, fmt.Append(nil, i)) {
			t.Fatalf("message %d was dropped", i)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := nodes[2].Flush(ctx); err != nil {
		t.Fatal(err)
	}
	if len(inbox) != n {
		t.Fatalf("%d of %d messages were handled when Flush returned", len(inbox), n)
	}
	for i := range n {
		h := <-inbox
		if h.by != nodes[1].ID() || h.from != nodes[2].ID() || string(h.m.Body) != fmt.Sprint(i) {
			t.Fatalf("message %d: %q from %s at %s", i, h.m.Body, h.from, h.by)
		}
		if d := time.Duration(nodes[1].Now() - h.m.Sent); d < 0 || d > patience {
			t.Errorf("delay %s", d)
		}
	}
}

func TestCalls(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	nodes := runAll(t, ports(t, 2), nil, func(n *cluster.Node) {
		n.Handle(topic, cluster.Handler{
			Answer: func(ctx context.Context, from cluster.ID, request []byte) ([]byte, error) {
				switch string(request) {
				case "fail":
					return nil, errors.New("as you like")
				case "wait":
					select {
					case <-ctx.Done():
						return nil, ctx.Err()
					case <-release:
						return nil, nil
					}
				case "big":
					return make([]byte, cluster.MaxMessage), nil
				case "too big":
					return make([]byte, cluster.MaxMessage+1), nil
				}
				return fmt.Appendf(nil, "%s to %s", request, from), nil
			},
			State: func(_ context.Context, from cluster.ID, send func([]byte) error) error {
				for i := range 100 {
					if err := send(fmt.Append(nil, i)); err != nil {
						return err
					}
				}
				return nil
			},
		})
	})
	awaitWhole(t, nodes...)
	a, b := nodes[0], nodes[1]
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()

	if got, err := a.Call(ctx, b.ID(), topic, []byte("hello")); err != nil || string(got) != "hello to "+a.ID().String() {
		t.Errorf("got %q, %v", got, err)
	}
	if got, err := a.Call(ctx, b.ID(), topic, nil); err != nil || string(got) != " to "+a.ID().String() {
		t.Errorf("an empty call: %q, %v", got, err)
	}
	if got, err := a.Call(ctx, b.ID(), topic, []byte("big")); err != nil || len(got) != cluster.MaxMessage {
		t.Errorf("a big answer: %d bytes, %v", len(got), err)
	}
	for _, refused := range []struct {
		topic   cluster.Topic
		request string
	}{{topic, "fail"}, {topic, "too big"}, {topic + 1, "hello"}} {
		if _, err := a.Call(ctx, b.ID(), refused.topic, []byte(refused.request)); !errors.Is(err, cluster.ErrRefused) {
			t.Errorf("%v: %v", refused, err)
		}
	}
	if _, err := a.Call(ctx, 12345, topic, nil); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("a call to nobody: %v", err)
	}
	if _, err := a.Call(t.Context(), b.ID(), topic, nil); err == nil {
		t.Error("a call without a deadline was made")
	}
	short, cancelShort := context.WithTimeout(t.Context(), 30*time.Millisecond)
	defer cancelShort()
	if _, err := a.Call(short, b.ID(), topic, []byte("wait")); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a slow call: %v", err)
	}

	var pieces int
	err := a.Fetch(ctx, b.ID(), topic, func(piece []byte) error {
		if string(piece) != fmt.Sprint(pieces) {
			t.Errorf("piece %d is %q", pieces, piece)
		}
		pieces++
		return nil
	})
	if err != nil || pieces != 100 {
		t.Errorf("%d pieces, %v", pieces, err)
	}
	enough := errors.New("enough")
	if err := a.Fetch(ctx, b.ID(), topic, func([]byte) error { return enough }); !errors.Is(err, enough) {
		t.Errorf("a reader that has enough: %v", err)
	}
	if err := a.Fetch(ctx, b.ID(), topic+1, nil); !errors.Is(err, cluster.ErrRefused) {
		t.Errorf("state that nobody has: %v", err)
	}
	b.stop()
	if _, err := a.Call(ctx, b.ID(), topic, nil); !errors.Is(err, cluster.ErrUnreachable) {
		t.Errorf("a call to one that left: %v", err)
	}
}

// A receiver that hangs costs the sender nothing but the messages: it never waits, it counts, and goes on afterwards.
func TestReceiverThatHangs(t *testing.T) {
	t.Parallel()
	hang := make(chan struct{})
	release := sync.OnceFunc(func() { close(hang) })
	t.Cleanup(release)
	var got atomic.Int64
	registry := prometheus.NewPedanticRegistry()
	nodes := runAll(t, ports(t, 2), func(i int, c *cluster.Config) {
		if i == 0 {
			c.Registerer = registry
		}
	}, func(n *cluster.Node) {
		n.Handle(topic, cluster.Handler{Receive: func(cluster.ID, cluster.Message) {
			<-hang
			got.Add(1)
		}})
	})
	awaitWhole(t, nodes...)
	a, b := nodes[0], nodes[1]
	body := make([]byte, 64<<10)
	sent, longest := 0, time.Duration(0)
	const tries = 5000
	for range tries {
		began := time.Now()
		if a.Send(b.ID(), topic, body) {
			sent++
		}
		longest = max(longest, time.Since(began))
	}
	t.Logf("%d were taken", sent)
	if sent == 0 || sent > 230 { // 8 MiB queued, and a window of 1 MiB on the way
		t.Errorf("%d of %d messages of 64 KiB were taken", sent, tries)
	}
	if longest > time.Second {
		t.Errorf("sending took up to %s", longest)
	}
	if dropped := value(t, registry, "converger_cluster_dropped_total"); dropped < float64(tries-sent) {
		t.Errorf("%v of %d drops were counted", dropped, tries-sent)
	}
	// The sender notices that nobody answers, and hangs up.
	a.await(t, "the connection given up", func(v *cluster.View) bool { return len(v.Peers) == 1 && !v.Peers[0].Connected })
	release()
	awaitWhole(t, nodes...)
	before := got.Load()
	for !a.Send(b.ID(), topic, body) {
		time.Sleep(10 * time.Millisecond) // until there is room in the queue
	}
	a.await(t, "the message", func(*cluster.View) bool { return got.Load() > before })
}

func TestMetricsExistFromTheStart(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	c := config("127.0.0.1:0", "127.0.0.1:1")
	c.Registerer = registry
	if _, err := cluster.New(c); err != nil {
		t.Fatal(err)
	}
	if _, err := cluster.New(c); err == nil {
		t.Error("two nodes were made on one registry")
	}
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "converger_cluster_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	want := map[string]float64{
		"alive": 1, "members joining": 0, "members split": 0, "members visible": 1, "clock_skew_seconds": 0,
		"arrivals_total": 0, "departures_total left": 0, "departures_total died": 0, "splits_total": 0, "sessions_total": 0, "refused_total": 0,
		"messages_queued_total": 0, "frames_sent_total": 0, "bytes_sent_total": 0, "frames_received_total": 0, "bytes_received_total": 0,
		"dropped_total disconnected": 0, "dropped_total queue_full": 0, "dropped_total too_large": 0, "dropped_total no_handler": 0,
		"calls_total ok": 0, "calls_total timeout": 0, "calls_total unreachable": 0, "calls_total error": 0,
		"joins_total ok": 0, "joins_total failed": 0, "heartbeats_total ok": 0, "heartbeats_total failed": 0, "message_delay_seconds": 0,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// A peer's series come and go with it: their number stays that of the members.
func TestSeriesOfPeers(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewPedanticRegistry()
	nodes := runAll(t, ports(t, 2), func(i int, c *cluster.Config) {
		if i == 0 {
			c.Registerer = registry
		}
	})
	awaitWhole(t, nodes...)
	if age := value(t, registry, "converger_cluster_sync_age_seconds"); age > 5 {
		t.Errorf("last heard %v s ago", age)
	}
	if l := value(t, registry, "converger_cluster_latency_seconds"); l <= 0 || l > 1 {
		t.Errorf("latency %v s", l)
	}
	nodes[1].stop()
	nodes[0].await(t, "nobody", alone)
	families, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() == "converger_cluster_sync_age_seconds" {
			t.Errorf("a node that left has series: %v", f)
		}
	}
}

// A node that starts is heard and shown as one that takes no requests yet, until it opens; then the others know at once.
func TestStartingAndOpen(t *testing.T) {
	t.Parallel()
	addresses := ports(t, 2)
	nodes := runAll(t, addresses, func(i int, c *cluster.Config) { c.Starting = i == 1 })
	a, b := nodes[0], nodes[1]
	awaitWhole(t, a, b)
	starting := func(v *cluster.View) bool { return len(v.Peers) == 1 && v.Peers[0].Starting }
	a.await(t, "the other starting", starting)
	b.await(t, "the other open", func(v *cluster.View) bool { return !starting(v) })
	<-b.Settled()
	if v := a.View(); !starting(v) || v.Visible != 2 {
		t.Errorf("before it opened: %s", show(v))
	}
	b.Open()
	a.await(t, "the other open", func(v *cluster.View) bool { return !starting(v) })
}

// A secret is changed in three rounds, in each of which nodes of both settings are one cluster; without the first they are two.
func TestSecretIsChanged(t *testing.T) {
	t.Parallel()
	old, other := []byte(secret), []byte("d41d8cd98f00b204e9800998ecf8427e")
	rounds := [][2][]byte{{old, nil}, {old, other}, {other, old}, {other, nil}}
	for i := range len(rounds) - 1 {
		t.Run(fmt.Sprint("round ", i+1), func(t *testing.T) {
			t.Parallel()
			awaitWhole(t, runAll(t, ports(t, 2), func(n int, c *cluster.Config) { c.Secret, c.OtherSecret = rounds[i+n][0], rounds[i+n][1] })...)
		})
	}
	t.Run("at one go", func(t *testing.T) {
		t.Parallel()
		for _, n := range runAll(t, ports(t, 2), func(n int, c *cluster.Config) { c.Secret, c.OtherSecret = rounds[2*n][0], rounds[2*n][1] }) {
			<-n.Settled()
			if v := n.View(); v.Visible != 1 { // the one with both hears of the other by gossip
				t.Errorf("%s", show(v))
			}
		}
	})
}
