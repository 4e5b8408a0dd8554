package wire

import (
	"bufio"
	"context"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Arrival is a delivery as it reached a receiver.
type Arrival struct {
	ID   string // the delivery's, of Webhook-Id
	Body []byte // valid until the observer returns
	At   time.Time
}

// Key is the idempotency key in the body, a canonical activity; "" if it is null or has anything escaped.
func (a Arrival) Key() string { return textMember(a.Body, "idempotency_key") }

// Receiver answers every delivery with 204, after a delay if it has one. It is safe for concurrent use.
type Receiver struct {
	listener net.Listener
	delay    time.Duration
	arrived  atomic.Int64
	observer atomic.Pointer[func(Arrival)]

	conns sync.WaitGroup
	mu    sync.Mutex
	open  map[net.Conn]struct{} // nil once closed
}

// NewReceiver listens on address (host:port, port 0 for a free one) and serves until Close; ctx bounds the start only.
func NewReceiver(ctx context.Context, address string, delay time.Duration) (*Receiver, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	r := &Receiver{listener: l, delay: delay, open: map[net.Conn]struct{}{}}
	r.conns.Go(r.accept)
	return r, nil
}

// URL is where deliveries go.
func (r *Receiver) URL() string { return "http://" + r.listener.Addr().String() + "/hook" }

// Arrived counts the deliveries so far.
func (r *Receiver) Arrived() int64 { return r.arrived.Load() }

// Observe has f called, from many goroutines, for each arrival; nil stops it.
func (r *Receiver) Observe(f func(Arrival)) {
	if f == nil {
		r.observer.Store(nil)
		return
	}
	r.observer.Store(&f)
}

// Close ends all connections and waits for their goroutines.
func (r *Receiver) Close() {
	_ = r.listener.Close()
	r.mu.Lock()
	for c := range r.open {
		_ = c.Close()
	}
	r.open = nil
	r.mu.Unlock()
	r.conns.Wait()
}

func (r *Receiver) accept() {
	for {
		conn, err := r.listener.Accept()
		if err != nil {
			return
		}
		r.mu.Lock()
		closed := r.open == nil
		if !closed {
			r.open[conn] = struct{}{}
		}
		r.mu.Unlock()
		if closed {
			_ = conn.Close()
			return
		}
		r.conns.Go(func() {
			r.serve(conn)
			_ = conn.Close()
			r.mu.Lock()
			delete(r.open, conn)
			r.mu.Unlock()
		})
	}
}

var noContent = []byte("HTTP/1.1 204 No Content\r\n\r\n")

func (r *Receiver) serve(conn net.Conn) {
	in := bufio.NewReaderSize(conn, 4<<10)
	var body []byte
	for {
		if _, err := in.ReadSlice('\n'); err != nil {
			return
		}
		h, err := readHead(in)
		if err != nil || h.length < 0 {
			return
		}
		at := time.Now()
		if observe := r.observer.Load(); observe != nil {
			body = append(body[:0], make([]byte, h.length)...)
			if _, err := io.ReadFull(in, body); err != nil {
				return
			}
			(*observe)(Arrival{ID: h.id, Body: body, At: at})
		} else if _, err := in.Discard(h.length); err != nil {
			return
		}
		r.arrived.Add(1)
		if r.delay > 0 {
			time.Sleep(r.delay)
		}
		if _, err := conn.Write(noContent); err != nil {
			return
		}
	}
}
