package cluster

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

const (
	// pingEvery is how often a peer is heard at least: by a ping, unless messages go out anyway. measureEvery is how often the
	// round trip is measured at least.
	pingEvery    = 100 * time.Millisecond
	measureEvery = 500 * time.Millisecond
	// silence ends a connection: after a cut a new one is up at once, while the old would wait for the kernel's next
	// repetition, which the cut has put off ever further. A shorter cut the kernel heals as fast; and on a machine that is
	// too busy to answer, opening anew makes it busier.
	silence = 4 * time.Second
	// connectTimeout bounds the way there, openTimeout the whole until the first answer: many handshakes at once, as after
	// a mass restart, may take their time, and giving up would only add to them.
	connectTimeout = 2 * time.Second
	openTimeout    = 5 * time.Second
	// redialFirst and redialMax bound the pause between attempts to connect. Where the connection is had and nobody answers,
	// somebody is too busy, or stopped: the pause grows to redialSlow, and ends when the peer is heard.
	redialFirst = 50 * time.Millisecond
	redialMax   = time.Second
	redialSlow  = 5 * time.Second
	// queueLen and queueBytes bound what waits for one peer. At a report every 2 ms it is half a second.
	queueLen   = 256
	queueBytes = 8 << 20
	// unreachableAfter is how long a peer's address may fail before an operator hears of it.
	unreachableAfter = 5 * time.Second
)

// peer is another node, as long as it is known. The fields below mu belong to the roster's lock; the others are free.
type peer struct {
	id      ID
	heard   atomic.Int64 // Node.elapsed at its last frame, 0: never
	latency atomic.Int64 // ns
	skew    atomic.Int64 // ns, in its own words
	offset  atomic.Int64 // its corrected clock less our own, uncorrected; valid once latency is
	session atomic.Uint64
	link    atomic.Pointer[grpc.ClientConn] // while messages can be sent
	dropped atomic.Uint64
	// starting: it takes no requests yet, as far as it has said.
	starting atomic.Bool
	// replaced: another member answers at its address.
	replaced atomic.Bool
	// removed: it is off the roster, so what comes on its streams would be lost.
	removed atomic.Bool
	// failing is Node.elapsed since which no session was had, 0: there is one, or nobody tried.
	failing atomic.Int64
	queue   chan outgoing
	waits   atomic.Int64  // bytes in queue
	wake    chan struct{} // it has opened a stream to us, so it can be reached

	// of the roster
	m        member
	label    string // as its heartbeat says, "" if there was none
	gossip   bool
	row      row
	standing Standing
	listed   bool // in the view
	leaving  bool
	cancel   context.CancelFunc // ends its session loop; nil: none yet
}

// outgoing is a frame that waits.
type outgoing struct {
	kind    byte
	topic   Topic
	sent    int64
	body    []byte
	flushed chan struct{} // of a ping: closed once it was answered
}

// drop empties the queue: what could not be sent is older than what the next session will bring.
func (p *peer) drop(count *dropCounter) {
	for {
		select {
		case o := <-p.queue:
			p.waits.Add(-int64(len(o.body)))
			if o.kind == frameMessage {
				p.dropped.Add(1)
				count.Inc()
			}
		default:
			return
		}
	}
}

// keep holds a session open to the peer until ctx ends.
func (n *Node) keep(ctx context.Context, p *peer) {
	pause := redialFirst
	for ctx.Err() == nil {
		address := n.addressOf(p)
		wasUp, err := n.talk(ctx, p, address)
		if ctx.Err() != nil {
			return
		}
		n.kick()
		if wasUp {
			pause = redialFirst
		}
		p.failing.CompareAndSwap(0, n.elapsed())
		attrs := []any{slog.String("peer", p.id.String()), slog.String("address", address), slog.Any("error", err)}
		if n.unreachable(p) && n.lives(p) {
			n.log.Warn("a member can't be reached at the address that it advertises", attrs...)
		} else {
			n.log.Debug("a connection to a member ended", attrs...)
		}
		select {
		case <-ctx.Done():
		case <-p.wake:
		case <-time.After(pause/2 + rand.N(pause/2)): // not all at once
		}
		most := redialMax
		if errors.Is(err, errSilent) {
			most = redialSlow
		}
		pause = min(2*pause, most)
	}
}

// unreachable tells whether a peer could not be reached for so long that it is no passing trouble.
func (n *Node) unreachable(p *peer) bool {
	since := p.failing.Load()
	return since != 0 && n.elapsed()-since > int64(unreachableAfter)
}

// lives tells whether a peer was alive when it was last judged: gossip believes in a dead one for some seconds more.
func (n *Node) lives(p *peer) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return p.listed
}

var errSilent = errors.New("no answer")

// talk is one session: a connection, and on it the stream of our messages to the peer. wasUp tells whether the peer answered.
func (n *Node) talk(ctx context.Context, p *peer, address string) (wasUp bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	cc, err := n.dial(p.id, address, func(_ net.Conn, err error) {
		if isSomebodyElse(err) {
			p.replaced.Store(true)
		}
		if isStranger(err) {
			n.strangers.refused(p.id.String(), "a node of another cluster, or with another CLUSTER_SECRET or CLUSTER_LABEL, answers at the address of a member",
				slog.String("peer", p.id.String()), slog.String("address", address))
		}
		cancel(fmt.Errorf("handshake: %w", err))
	})
	if err != nil {
		return false, err
	}
	defer func() { _ = cc.Close() }()
	watchdog := time.AfterFunc(openTimeout, func() { cancel(errSilent) })
	defer watchdog.Stop()
	hello := metadata.AppendToOutgoingContext(ctx, helloKey, string(n.hello))
	stream, err := cc.NewStream(hello, &streamDesc, methodStream)
	if err != nil {
		return false, reason(ctx, err)
	}
	p.drop(&n.metrics.dropped[dropDisconnected])
	var pings pings
	var reader sync.WaitGroup
	reader.Go(func() {
		for {
			var b []byte
			if err := stream.RecvMsg(&b); err != nil {
				cancel(err)
				return
			}
			if len(b) < pongLen {
				cancel(fmt.Errorf("a pong of %d bytes", len(b)))
				return
			}
			watchdog.Reset(silence)
			n.measured(p, b)
			if !wasUp {
				wasUp = true
				p.replaced.Store(false)
				p.failing.Store(0)
				p.session.Add(1)
				p.link.Store(cc)
				n.metrics.sessions.Inc()
				n.kick()
			}
			pings.answered(int64(binary.BigEndian.Uint64(b)))
		}
	})
	err = n.send(ctx, stream, p, &pings)
	p.link.Store(nil)
	cancel(err)
	reader.Wait()
	p.drop(&n.metrics.dropped[dropDisconnected])
	return wasUp, reason(ctx, err)
}

// reason prefers why the session was ended to how that showed.
func reason(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// send writes what is queued, and pings, until the stream or ctx ends.
func (n *Node) send(ctx context.Context, stream grpc.ClientStream, p *peer, pings *pings) error {
	tick := time.NewTicker(pingEvery)
	defer tick.Stop()
	o := outgoing{kind: framePing}
	var measured time.Time
	var flags byte // as last sent
	busy := false  // a message went out since the last tick
	for {
		if busy = busy || o.kind == frameMessage; o.kind == framePing {
			measured = time.Now()
		}
		head := make([]byte, 1, 32)
		head[0] = o.kind
		switch o.kind {
		case framePing:
			flags = n.flags()
			head = append(n.clockFrame(head, uint64(pings.sending(n.local(), o.flushed))), flags)
		case frameMessage:
			head = binary.BigEndian.AppendUint64(append(head, byte(o.topic)), uint64(o.sent))
		}
		if err := stream.SendMsg(packet{head, o.body}); err != nil {
			if o.kind == frameMessage {
				p.dropped.Add(1)
				n.metrics.dropped[dropDisconnected].Inc()
			}
			return err
		}
		n.metrics.sent(len(head) + len(o.body))
		for next := false; !next; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-tick.C:
				next = !busy || time.Since(measured) >= measureEvery || flags != n.flags()
				o, busy = outgoing{kind: framePing}, false
			case o = <-p.queue:
				p.waits.Add(-int64(len(o.body)))
				next = true
			}
		}
	}
}

// pings are those that were sent and not answered. A ping's number is our clock at its sending, made to rise.
type pings struct {
	mu      sync.Mutex
	last    int64
	waiting []waiting
}

type waiting struct {
	seq  int64
	done chan struct{}
}

func (p *pings) sending(now int64, done chan struct{}) (seq int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.last = max(p.last+1, now)
	if done != nil {
		p.waiting = append(p.waiting, waiting{p.last, done})
	}
	return p.last
}

func (p *pings) answered(seq int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.waiting) > 0 && p.waiting[0].seq <= seq {
		close(p.waiting[0].done)
		p.waiting = p.waiting[1:]
	}
}

// measured takes a pong: the round trip, the peer's clock and its skew.
func (n *Node) measured(p *peer, pong []byte) {
	now := n.local()
	sent := int64(binary.BigEndian.Uint64(pong))
	trip := min(max(now-sent, 1), int64(silence))
	p.offset.Store(int64(binary.BigEndian.Uint64(pong[8:])) - (sent + trip/2))
	p.skew.Store(int64(binary.BigEndian.Uint64(pong[16:])))
	// Smoothed as TCP does (RFC 6298): an eighth of the news. A stall of the sender is no delay of the way; visibleFor is
	// the most that a peer can lag and still count.
	sample := min(trip/2, int64(visibleFor))
	if old := p.latency.Load(); old != 0 {
		sample = old + (sample-old)/8
	}
	p.latency.Store(max(sample, 1))
}
