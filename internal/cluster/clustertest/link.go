package clustertest

import (
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// FreeAddress finds an address on loopback that is free for TCP and UDP, and stays so: its port is below those that the
// kernel gives to outgoing connections, so that none takes it while a node is away.
func FreeAddress(t testing.TB) string {
	t.Helper()
	var lc net.ListenConfig
	for range 100 {
		at := net.JoinHostPort("127.0.0.1", strconv.Itoa(20000+rand.IntN(12000)))
		l, err := lc.Listen(t.Context(), "tcp", at)
		if err != nil {
			continue
		}
		u, err := lc.ListenPacket(t.Context(), "udp", at)
		_ = l.Close()
		if err != nil {
			continue
		}
		_ = u.Close()
		return at
	}
	t.Fatal("no free port")
	return ""
}

// Link stands at the address that a node advertises and passes TCP and UDP on to where it listens. It is perfect until told
// otherwise; all of it may be changed at any time.
type Link struct {
	In  Way // towards the node
	Out Way // back, on connections that were opened towards it

	target string
	delay  atomic.Int64 // ns, of every piece of a connection
	loss   atomic.Int64 // of a thousand
	lost   atomic.Int64
	done   chan struct{}
	all    sync.WaitGroup
}

// NewLink opens a link at an address, to another.
func NewLink(t testing.TB, at, target string) *Link {
	t.Helper()
	l := &Link{target: target, done: make(chan struct{})}
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	packets, err := lc.ListenPacket(t.Context(), "udp", at)
	if err != nil {
		t.Fatal(err)
	}
	to, err := net.ResolveUDPAddr("udp", target)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		close(l.done)
		_ = listener.Close()
		_ = packets.Close()
		l.all.Wait()
	})
	l.all.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			l.all.Go(func() { l.carry(conn) })
		}
	})
	l.all.Go(func() {
		for b := make([]byte, 65536); ; {
			n, _, err := packets.ReadFrom(b)
			if err != nil {
				return
			}
			if l.In.gate() == nil && !l.loses() {
				_, _ = packets.WriteTo(b[:n], to)
			}
		}
	})
	return l
}

// Delay makes what a connection carries so much later, each way.
func (l *Link) Delay(d time.Duration) { l.delay.Store(int64(d)) }

// Lose loses so many packets of a thousand; as often a piece of what a connection carries breaks it, with all that is on its way.
func (l *Link) Lose(perThousand int) { l.loss.Store(int64(perThousand)) }

// Lost counts the packets that were lost and the connections that were broken.
func (l *Link) Lost() int64 { return l.lost.Load() }

func (l *Link) loses() bool {
	lost := rand.Int64N(1000) < l.loss.Load()
	if lost {
		l.lost.Add(1)
	}
	return lost
}

func (l *Link) carry(from net.Conn) {
	defer func() { _ = from.Close() }()
	to, err := net.Dial("tcp", l.target) //nolint:noctx // at once
	if err != nil {
		return
	}
	defer func() { _ = to.Close() }()
	ended := make(chan struct{}, 2)
	l.all.Go(func() { l.pass(to, from, &l.In); ended <- struct{}{} })
	l.all.Go(func() { l.pass(from, to, &l.Out); ended <- struct{}{} })
	select {
	case <-ended:
	case <-l.done:
	}
}

// pass passes pieces on, each after the delay and none while the way is blocked, until a connection ends or is broken.
func (l *Link) pass(to, from net.Conn, w *Way) {
	type piece struct {
		b   []byte
		due time.Time
	}
	queue := make(chan piece, 10000)
	ended := make(chan struct{})
	defer close(ended)
	l.all.Go(func() {
		defer close(queue)
		for {
			b := make([]byte, 32768)
			n, err := from.Read(b)
			if n > 0 {
				select {
				case queue <- piece{b[:n], time.Now().Add(time.Duration(l.delay.Load()))}:
				case <-ended:
					return
				}
			}
			if err != nil {
				return
			}
		}
	})
	for p := range queue {
		if wait := time.Until(p.due); wait > 0 {
			time.Sleep(wait) // the delay itself
		}
		for gate := w.gate(); gate != nil; gate = w.gate() {
			select {
			case <-gate:
			case <-l.done:
				return
			}
		}
		if l.loses() {
			return
		}
		if _, err := to.Write(p.b); err != nil {
			return
		}
	}
}

// Way is one direction of a link. A blocked one holds back TCP's bytes, which TCP would repeat until the cut is healed, and
// loses UDP's packets.
type Way struct {
	mu      sync.Mutex
	blocked chan struct{} // closed when it opens; nil: open
}

// Block stops the way; of a blocked one it changes nothing.
func (w *Way) Block() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.blocked == nil {
		w.blocked = make(chan struct{})
	}
}

// Open opens the way again; of an open one it changes nothing.
func (w *Way) Open() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.blocked != nil {
		close(w.blocked)
		w.blocked = nil
	}
}

// gate is closed, or nil, once the way is open.
func (w *Way) gate() chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.blocked
}
