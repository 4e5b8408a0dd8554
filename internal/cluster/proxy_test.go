package cluster_test

import (
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// proxy stands at the address that a node advertises and passes TCP and UDP on to where it listens. A blocked direction
// holds TCP's bytes back, which TCP would repeat until the cut is healed, and loses UDP's packets.
type proxy struct {
	addr, target string
	in, out      lane // towards the node, and back on connections that were opened towards it
	delay        atomic.Int64
}

type lane struct {
	mu      sync.Mutex
	blocked chan struct{} // closed when it opens; nil: open
}

func (l *lane) block() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.blocked == nil {
		l.blocked = make(chan struct{})
	}
}

func (l *lane) open() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.blocked != nil {
		close(l.blocked)
		l.blocked = nil
	}
}

// gate is closed, or nil, once the lane is open.
func (l *lane) gate() chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.blocked
}

func newProxy(t testing.TB, target string) *proxy {
	t.Helper()
	p := &proxy{addr: at(freePort(t)), target: target}
	l, err := net.Listen("tcp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	u, err := net.ListenPacket("udp", p.addr)
	if err != nil {
		t.Fatal(err)
	}
	to, err := net.ResolveUDPAddr("udp", target)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var wg sync.WaitGroup
	t.Cleanup(func() {
		close(done)
		l.Close()
		u.Close()
		wg.Wait()
	})
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { p.carry(conn, done, &wg) })
		}
	})
	wg.Go(func() {
		b := make([]byte, 65536)
		for {
			n, _, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			if p.in.gate() == nil {
				_, _ = u.WriteTo(b[:n], to)
			}
		}
	})
	return p
}

func (p *proxy) carry(from net.Conn, done <-chan struct{}, wg *sync.WaitGroup) {
	defer from.Close()
	to, err := net.Dial("tcp", p.target)
	if err != nil {
		return
	}
	defer to.Close()
	ended := make(chan struct{}, 2)
	wg.Go(func() { p.copy(to, from, &p.in, done); ended <- struct{}{} })
	wg.Go(func() { p.copy(from, to, &p.out, done); ended <- struct{}{} })
	select {
	case <-ended:
	case <-done:
	}
}

// copy passes bytes on, each after the delay, and none while the lane is blocked.
func (p *proxy) copy(to, from net.Conn, l *lane, done <-chan struct{}) {
	type chunk struct {
		b   []byte
		due time.Time
	}
	queue := make(chan chunk, 10000)
	go func() {
		defer close(queue)
		for {
			b := make([]byte, 32768)
			n, err := from.Read(b)
			if n > 0 {
				select {
				case queue <- chunk{b[:n], time.Now().Add(time.Duration(p.delay.Load()))}:
				case <-done:
					return
				}
			}
			if err != nil {
				return
			}
		}
	}()
	for c := range queue {
		if wait := time.Until(c.due); wait > 0 {
			time.Sleep(wait) // the delay itself
		}
		for gate := l.gate(); gate != nil; gate = l.gate() {
			select {
			case <-gate:
			case <-done:
				return
			}
		}
		if _, err := to.Write(c.b); err != nil {
			return
		}
	}
}

// pair is two nodes that reach each other through proxies only.
type pair struct {
	a, b running
	to   [2]*proxy // a, b
}

// cut blocks what a sends to b.
func (p pair) cutAB() { p.to[1].in.block(); p.to[0].out.block() }

// cutBA blocks what b sends to a.
func (p pair) cutBA() { p.to[0].in.block(); p.to[1].out.block() }

func (p pair) heal() {
	for _, x := range p.to {
		x.in.open()
		x.out.open()
	}
}
