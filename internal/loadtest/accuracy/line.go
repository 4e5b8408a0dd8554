package main

import (
	"context"
	"io"
	"net"
	"sync"
	"time"
)

// roads are the ways between nodes, by the index of both: how long they take, and whether they are cut.
type roads struct {
	delay time.Duration // one way

	mu  sync.Mutex
	cut func(a, b int) bool
	was chan struct{} // closed when cut changes
}

func newRoads(delay time.Duration) *roads { return &roads{delay: delay, was: make(chan struct{})} }

// set cuts the ways for which cut says so; nil: none.
func (r *roads) set(cut func(a, b int) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.cut = cut
	close(r.was)
	r.was = make(chan struct{})
}

// open tells whether the way from a to b is open, and gives the channel that tells of a change.
func (r *roads) open(a, b int) (bool, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.cut == nil || !r.cut(a, b) && !r.cut(b, a), r.was
}

// pass waits until what was sent at a moment is over there; false: done came first.
func (r *roads) pass(a, b int, sent time.Time, done <-chan struct{}) bool {
	if wait := r.delay - time.Since(sent); wait > 0 {
		t := time.NewTimer(wait)
		defer t.Stop()
		select {
		case <-t.C:
		case <-done:
			return false
		}
	}
	for {
		open, changed := r.open(a, b)
		if open {
			return true
		}
		select {
		case <-changed:
		case <-done:
			return false
		}
	}
}

// dialer opens the connections of node a; place tells which node is at an address.
func (r *roads) dialer(a int, place func(address string) int) func(context.Context, string, string) (net.Conn, error) {
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		b := place(address)
		if !r.pass(a, b, time.Now(), ctx.Done()) {
			return nil, ctx.Err()
		}
		conn, err := (&net.Dialer{}).DialContext(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return newLine(conn, r, a, b), nil
	}
}

// line is a connection from node a to node b along their road. What is sent on it arrives after the road's delay, and
// waits while the road is cut, as it would in the kernel. Deadlines are not kept: its users close it.
type line struct {
	net.Conn
	out, in chan parcel
	rest    []byte // of the parcel that is being read
	done    chan struct{}
	close   func() error
}

type parcel struct {
	b    []byte
	sent time.Time
}

const parcels = 4096 // under way, each way

func newLine(conn net.Conn, r *roads, a, b int) *line {
	l := &line{Conn: conn, out: make(chan parcel, parcels), in: make(chan parcel, parcels), done: make(chan struct{})}
	l.close = sync.OnceValue(func() error {
		close(l.done)
		return conn.Close()
	})
	go func() { // ends with the line
		defer func() { _ = l.Close() }()
		for {
			select {
			case p := <-l.out:
				if !r.pass(a, b, p.sent, l.done) {
					return
				}
				if _, err := conn.Write(p.b); err != nil {
					return
				}
			case <-l.done:
				return
			}
		}
	}()
	go func() { // ends with the connection
		defer close(l.in)
		arrived := make(chan parcel, parcels)
		go func() {
			defer close(arrived)
			for {
				buf := make([]byte, 16<<10)
				n, err := conn.Read(buf)
				if n > 0 {
					select {
					case arrived <- parcel{buf[:n], time.Now()}:
					case <-l.done:
						return
					}
				}
				if err != nil {
					return
				}
			}
		}()
		for p := range arrived {
			if !r.pass(b, a, p.sent, l.done) {
				return
			}
			select {
			case l.in <- p:
			case <-l.done:
				return
			}
		}
	}()
	return l
}

// Write implements [net.Conn].
func (l *line) Write(b []byte) (int, error) {
	select {
	case <-l.done: // also while there is room for more
		return 0, net.ErrClosed
	default:
	}
	select {
	case l.out <- parcel{append([]byte(nil), b...), time.Now()}:
		return len(b), nil
	case <-l.done:
		return 0, net.ErrClosed
	}
}

// Read implements [net.Conn].
func (l *line) Read(b []byte) (int, error) {
	if len(l.rest) == 0 {
		select {
		case p, ok := <-l.in:
			if !ok {
				return 0, io.EOF
			}
			l.rest = p.b
		case <-l.done:
			return 0, net.ErrClosed
		}
	}
	n := copy(b, l.rest)
	l.rest = l.rest[n:]
	return n, nil
}

// Close implements [net.Conn].
func (l *line) Close() error { return l.close() }

// SetDeadline implements [net.Conn], and does nothing.
func (l *line) SetDeadline(time.Time) error { return nil }

// SetReadDeadline implements [net.Conn], and does nothing.
func (l *line) SetReadDeadline(time.Time) error { return nil }

// SetWriteDeadline implements [net.Conn], and does nothing.
func (l *line) SetWriteDeadline(time.Time) error { return nil }
