package main

import (
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// badLink stands at the address that a node advertises. What it passes on comes late, a part of the packets is lost, and a
// connection breaks at times with all that is on its way.
type badLink struct {
	delay atomic.Int64 // ns, of every piece
	loss  atomic.Int64 // in a thousand: packets lost, and connections broken by a piece
	count atomic.Int64 // of what was lost
}

func newBadLink(t testing.TB, at, to string) *badLink {
	t.Helper()
	l := &badLink{}
	var lc net.ListenConfig
	listener, err := lc.Listen(t.Context(), "tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	packets, err := lc.ListenPacket(t.Context(), "udp", at)
	if err != nil {
		t.Fatal(err)
	}
	target, err := net.ResolveUDPAddr("udp", to)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	var all sync.WaitGroup
	t.Cleanup(func() {
		close(done)
		_ = listener.Close()
		_ = packets.Close()
		all.Wait()
	})
	all.Go(func() {
		for {
			from, err := listener.Accept()
			if err != nil {
				return
			}
			all.Go(func() { l.carry(from, to, done, &all) })
		}
	})
	all.Go(func() {
		for b := make([]byte, 65536); ; {
			n, _, err := packets.ReadFrom(b)
			if err != nil {
				return
			}
			if !l.loses() {
				_, _ = packets.WriteTo(b[:n], target)
			}
		}
	})
	return l
}

func (l *badLink) loses() bool {
	lost := rand.Int64N(1000) < l.loss.Load()
	if lost {
		l.count.Add(1)
	}
	return lost
}

func (l *badLink) carry(from net.Conn, target string, done <-chan struct{}, all *sync.WaitGroup) {
	defer func() { _ = from.Close() }()
	to, err := net.Dial("tcp", target) //nolint:noctx // at once
	if err != nil {
		return
	}
	defer func() { _ = to.Close() }()
	ended := make(chan struct{}, 2)
	for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
		all.Go(func() {
			l.pass(way[0], way[1])
			ended <- struct{}{}
		})
	}
	select {
	case <-ended:
	case <-done:
	}
}

// pass passes pieces on, each after the delay, until a connection ends or is broken.
func (l *badLink) pass(from, to net.Conn) {
	type piece struct {
		b   []byte
		due time.Time
	}
	queue := make(chan piece, 10000)
	go func() {
		defer close(queue)
		for {
			b := make([]byte, 32768)
			n, err := from.Read(b)
			if n > 0 {
				queue <- piece{b[:n], time.Now().Add(time.Duration(l.delay.Load()))}
			}
			if err != nil {
				return
			}
		}
	}()
	defer func() { // let the reader end
		_ = from.Close()
		for range queue {
		}
	}()
	for p := range queue {
		if wait := time.Until(p.due); wait > 0 {
			time.Sleep(wait) // the delay itself
		}
		if l.loses() {
			return
		}
		if _, err := io.Copy(to, strings.NewReader(string(p.b))); err != nil {
			return
		}
	}
}

// Between two nodes everything takes 20 ms each way; then three packets of a hundred are lost, and as often a connection breaks,
// with what is on its way. The limit holds, nobody meets an error, and without faults all is well again.
func TestLateAndLostMessages(t *testing.T) {
	t.Parallel()
	var outside []string
	for range 2 {
		outside = append(outside, freePort(t))
	}
	f := planFleet(t, 2, map[string]string{"CLUSTER_PEERS": strings.Join(outside, ",")}, func(i int) map[string]string {
		return map[string]string{"CLUSTER_ADVERTISE": outside[i]}
	})
	var links []*badLink
	for i, n := range f.nodes {
		links = append(links, newBadLink(t, outside[i], n.environ["CLUSTER_BIND"]))
	}
	f.startAll(t)
	flood, calm := f.startFlood(t), f.startCalm(t)
	flood.awaitWindows(t, 2)
	held := f.heldBack(t, flood)
	for _, l := range links {
		l.delay.Store(int64(20 * time.Millisecond))
	}
	flood.awaitMore(t, 3)
	for _, l := range links {
		l.loss.Store(30)
	}
	flood.awaitMore(t, 4)
	lost := int64(0)
	for _, l := range links {
		l.delay.Store(0)
		l.loss.Store(0)
		lost += l.count.Load()
	}
	if lost == 0 {
		t.Error("nothing was lost")
	}
	t.Logf("%d connections and packets were lost", lost)
	f.whole(t, 2)
	// A tenth of the limit, and what comes to the one while news of the other is held back by the delay, or by a new connection.
	within(t, flood, calm, held+floodLimit/5)
}
