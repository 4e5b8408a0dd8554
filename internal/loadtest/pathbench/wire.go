package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// The HTTP/1.1 of the driver: enough for a hub and a driver that know each other, on loopback.

// exchangeTimeout ends a request that nobody answers; the hub's own time-outs are shorter.
const exchangeTimeout = 30 * time.Second

// caller posts over one kept connection. Not safe for concurrent use.
type caller struct {
	addr string
	conn net.Conn
	in   *bufio.Reader
	out  []byte
}

func newCaller(addr string) *caller { return &caller{addr: addr} }

func (c *caller) close() {
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// post sends one activity and returns the status of the answer; ctx bounds the dialling only. After an error it is unknown what became of it; the next
// post opens a new connection.
func (c *caller) post(ctx context.Context, conv *conversation, key, text string) (status int, err error) {
	if c.conn == nil {
		if c.conn, err = (&net.Dialer{Timeout: exchangeTimeout}).DialContext(ctx, "tcp", c.addr); err != nil {
			return 0, err
		}
		c.in = bufio.NewReaderSize(c.conn, 4<<10)
	}
	b := c.out[:0]
	b = append(b, "POST /api/v1/conversations/"...)
	b = append(b, conv.id...)
	b = append(b, "/activities HTTP/1.1\r\nHost: "...)
	b = append(b, c.addr...)
	b = append(b, "\r\nX-Api-Key: "...)
	b = append(b, conv.tenant.apiKey...)
	b = append(b, "\r\nContent-Type: application/json\r\nIdempotency-Key: \""...)
	b = append(b, key...)
	b = append(b, "\"\r\nContent-Length: "...)
	b = strconv.AppendInt(b, int64(len(`{"text":""}`)+len(text)), 10)
	b = append(b, "\r\n\r\n{\"text\":\""...)
	b = append(b, text...)
	b = append(b, `"}`...)
	c.out = b

	err = c.conn.SetDeadline(time.Now().Add(exchangeTimeout))
	if err == nil {
		_, err = c.conn.Write(b)
	}
	var closing bool
	if err == nil {
		status, closing, err = readAnswer(c.in)
	}
	if err != nil || closing {
		c.close()
	}
	return status, err
}

// readAnswer reads an answer to its end and drops the body.
func readAnswer(in *bufio.Reader) (status int, closing bool, err error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return 0, false, err
	}
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.1 ")) {
		return 0, false, fmt.Errorf("not an HTTP/1.1 answer: %q", line)
	}
	if status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return 0, false, fmt.Errorf("not an HTTP/1.1 answer: %q", line)
	}
	head, err := readHead(in)
	if err != nil {
		return 0, false, err
	}
	if status != 204 && status != 304 && head.length < 0 {
		return 0, false, errors.New("an answer without Content-Length")
	}
	_, err = in.Discard(max(0, head.length))
	return status, head.closing, err
}

type head struct {
	length  int // of the body; -1: not said
	closing bool
	id      string // Webhook-Id, when there is one
}

// readHead reads header lines up to the empty one.
func readHead(in *bufio.Reader) (head, error) {
	h := head{length: -1}
	for {
		line, err := in.ReadSlice('\n')
		if err != nil {
			return h, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return h, nil
		}
		name, value, _ := bytes.Cut(line, []byte(":"))
		value = bytes.TrimSpace(value)
		switch {
		case len(name) == 14 && bytes.EqualFold(name, []byte("Content-Length")):
			if h.length, err = strconv.Atoi(string(value)); err != nil {
				return h, fmt.Errorf("header %q", line)
			}
		case len(name) == 10 && bytes.EqualFold(name, []byte("Connection")):
			h.closing = bytes.EqualFold(value, []byte("close"))
		case len(name) == 10 && bytes.EqualFold(name, []byte("Webhook-Id")):
			h.id = string(value)
		}
	}
}

// arrival is a delivery as it reached a receiver.
type arrival struct {
	key string // the activity's idempotency key
	id  string // the delivery's id
	at  time.Time
}

// receiver answers every delivery with 204, after a delay if it has one.
type receiver struct {
	listener net.Listener
	delay    time.Duration
	arrived  atomic.Int64
	observer atomic.Pointer[func(arrival)]

	conns sync.WaitGroup
	mu    sync.Mutex
	open  map[net.Conn]struct{} // nil once closed
}

// newReceiver listens on loopback and serves until close; ctx bounds the start only.
func newReceiver(ctx context.Context, delay time.Duration) (*receiver, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &receiver{listener: l, delay: delay, open: map[net.Conn]struct{}{}}
	r.conns.Go(r.accept)
	return r, nil
}

func (r *receiver) url() string { return "http://" + r.listener.Addr().String() + "/hook" }

// observe has f called, from many goroutines, for each arrival; nil stops it.
func (r *receiver) observe(f func(arrival)) {
	if f == nil {
		r.observer.Store(nil)
		return
	}
	r.observer.Store(&f)
}

func (r *receiver) close() {
	_ = r.listener.Close()
	r.mu.Lock()
	for c := range r.open {
		_ = c.Close()
	}
	r.open = nil
	r.mu.Unlock()
	r.conns.Wait()
}

func (r *receiver) accept() {
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

func (r *receiver) serve(conn net.Conn) {
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
			(*observe)(arrival{key: keyIn(body), id: h.id, at: at})
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

// keyIn finds the idempotency key in a canonical activity; ours have nothing to escape.
func keyIn(body []byte) string {
	_, rest, ok := bytes.Cut(body, []byte(`"idempotency_key":"`))
	if !ok {
		return ""
	}
	key, _, _ := bytes.Cut(rest, []byte(`"`))
	return string(key)
}

// until calls done every few milliseconds until it says true.
func until(ctx context.Context, limit time.Duration, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
