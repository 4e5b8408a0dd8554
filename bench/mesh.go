package main

import (
	"context"
	"encoding/binary"
	"sync/atomic"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	limits "converger/internal/ratelimit/cluster"
)

// begin is the first moment of a window of every scale up to an hour, so that no long window ends during a run.
const begin = ratelimit.Instant(500_000 * time.Hour)

// newClock starts at begin.
func newClock() ratelimit.Clock {
	start := time.Now()
	return ratelimit.ClockFrom(func() ratelimit.Instant { return begin + ratelimit.Instant(time.Since(start)) })
}

// node is one of a cluster in this process: the real store, on a network of channels.
type node struct {
	*limits.Store
	id    cluster.ID
	view  *cluster.View
	mesh  []*node
	inbox chan letter
	bytes atomic.Int64 // sent, to each peer
	// kept, unless nil, gets the messages in place of the peers.
	kept func([]byte)
}

type letter struct {
	from cluster.ID
	body []byte
}

// newMesh makes n nodes that see each other and do nothing yet; run is to follow.
func newMesh(n int, clock ratelimit.Clock) ([]*node, error) {
	mesh := make([]*node, n)
	for i := range mesh {
		m := &node{id: cluster.ID(i + 1), view: &cluster.View{Visible: n, Alive: n}, mesh: mesh, inbox: make(chan letter, 4096)}
		for j := range mesh {
			if j != i {
				m.view.Peers = append(m.view.Peers, cluster.Peer{ID: cluster.ID(j + 1), Standing: cluster.Visible, Latency: 200 * time.Microsecond, Session: 1})
			}
		}
		var err error
		if m.Store, err = limits.New(limits.Config{Network: m, Clock: clock}); err != nil {
			return nil, err
		}
		mesh[i] = m
	}
	return mesh, nil
}

// loops are what a node does beside answering checks.
func (m *node) loops() []func(context.Context) {
	receive := m.Handler().Receive
	return []func(context.Context){
		func(ctx context.Context) { _ = m.Run(ctx) }, // returns nil
		func(ctx context.Context) {
			for {
				select {
				case <-ctx.Done():
					return
				case l := <-m.inbox:
					receive(l.from, cluster.Message{Body: l.body})
				}
			}
		},
	}
}

// ID implements the store's Network, as the following do.
func (m *node) ID() cluster.ID { return m.id }

// View implements Network.
func (m *node) View() *cluster.View { return m.view }

// Flush implements Network.
func (m *node) Flush(context.Context) error { return nil }

// Broadcast implements Network. A full inbox loses messages, as a real queue does.
func (m *node) Broadcast(_ cluster.Topic, body []byte) int {
	if m.kept != nil {
		m.kept(body)
		return len(m.mesh) - 1
	}
	n := 0
	for _, o := range m.mesh {
		if o != m && m.post(o, body) {
			n++
		}
	}
	return n
}

// Send implements Network.
func (m *node) Send(to cluster.ID, _ cluster.Topic, body []byte) bool {
	return m.post(m.mesh[to-1], body)
}

func (m *node) post(to *node, body []byte) bool {
	m.bytes.Add(int64(len(body)))
	select {
	case to.inbox <- letter{m.id, body}:
		return true
	default:
		return false
	}
}

// Fetch implements Network.
func (m *node) Fetch(ctx context.Context, from cluster.ID, _ cluster.Topic, each func([]byte) error) error {
	return m.mesh[from-1].Handler().State(ctx, m.id, each)
}

// Call implements Network.
func (m *node) Call(ctx context.Context, to cluster.ID, _ cluster.Topic, request []byte) ([]byte, error) {
	return m.mesh[to-1].Handler().Answer(ctx, m.id, request)
}

var hasher = must(ratelimit.NewHasher([]byte("a secret for measuring only")))

// key is the n-th tenant's.
func key(n int) ratelimit.Key {
	var id [16]byte
	binary.LittleEndian.PutUint64(id[:], uint64(n))
	return hasher.Tenant(ratelimit.ActivityCreate, id)
}

func policy(limit int64, scale time.Duration) *ratelimit.Policy {
	return must(ratelimit.NewPolicy(ratelimit.ActivityCreate, ratelimit.Rule{Limit: limit, Scale: scale}))
}

// must is for what can't fail.
func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}
