package cluster_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

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
