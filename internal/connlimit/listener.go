package connlimit

import (
	"errors"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Listen returns a listener that counts the connections of inner, and accepts those that may be.
func (l *Limiter) Listen(inner net.Listener) net.Listener {
	return &listener{Listener: inner, limiter: l, goodbyes: map[net.Conn]struct{}{}}
}

type listener struct {
	net.Listener
	limiter *Limiter

	mu       sync.Mutex
	closed   bool
	goodbyes map[net.Conn]struct{} // connections that are being told
	running  sync.WaitGroup        // of these

	failed time.Time // when the log last told of an error; Accept's alone
}

// Accept implements [net.Listener]. Its errors are those of the listener inside. One goroutine may call it, as net/http does.
func (l *listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			l.acceptFailed(err)
			return nil, err
		}
		addr := peer(c)
		client, reason, ok := l.limiter.admit(addr)
		if ok {
			return l.limiter.hold(c, client), nil
		}
		l.limiter.refuse(addr, reason)
		l.dismiss(c, reason)
	}
}

// Close implements [net.Listener]. It cuts the goodbyes that are being said and waits for their end, which is now.
func (l *listener) Close() error {
	err := l.Listener.Close()
	l.mu.Lock()
	l.closed = true
	for c := range l.goodbyes {
		c.Close()
	}
	l.mu.Unlock()
	l.running.Wait()
	return err
}

// acceptFailed notes an error of accept. Only one goroutine calls Accept.
func (l *listener) acceptFailed(err error) {
	if errors.Is(err, net.ErrClosed) {
		return
	}
	l.limiter.failures.Inc()
	if now := time.Now(); now.Sub(l.failed) >= sayEvery {
		l.failed = now
		l.limiter.Logger.Error("a connection can't be accepted: if there are too many open files, raise that limit or lower CONN_LIMIT_TOTAL",
			slog.Any("error", err))
	}
}

// peer is the far end's address, IPv4-mapped IPv6 as IPv4 and without a zone; the zero Addr if it is not of TCP.
func peer(c net.Conn) netip.Addr {
	if a, ok := c.RemoteAddr().(*net.TCPAddr); ok {
		return a.AddrPort().Addr().Unmap().WithZone("")
	}
	return netip.Addr{}
}

// place is what an admitted connection holds of the counts.
type place struct {
	limiter *Limiter
	client  netip.Addr
	left    atomic.Bool
}

func (p *place) leave() {
	if p.left.CompareAndSwap(false, true) {
		p.limiter.leave(p.client)
	}
}

// tcpConn has all methods of *net.TCPConn: net/http looks for ReadFrom, which lets the kernel send files, and for CloseWrite,
// which lets a client read the answer to a request that was not read to its end.
type tcpConn struct {
	*net.TCPConn
	place
}

// Close implements [net.Conn]. The place is free once the descriptor is.
func (c *tcpConn) Close() error {
	defer c.leave()
	return c.TCPConn.Close()
}

// otherConn is a connection of another kind.
type otherConn struct {
	net.Conn
	place
}

// Close implements [net.Conn].
func (c *otherConn) Close() error {
	defer c.leave()
	return c.Conn.Close()
}

// hold ties the place of a client to a connection.
func (l *Limiter) hold(c net.Conn, client netip.Addr) net.Conn {
	if tcp, ok := c.(*net.TCPConn); ok {
		return &tcpConn{tcp, place{limiter: l, client: client}}
	}
	return &otherConn{c, place{limiter: l, client: client}}
}

const (
	// MaxGoodbyes bounds the connections that are being told that they are refused: descriptors and goroutines beyond the caps.
	MaxGoodbyes = 256
	// requestWait is how long a goodbye waits for the first bytes of a request, which come with the last packet of the
	// handshake or soon after.
	requestWait = 500 * time.Millisecond
	// goodbyeTime is how long all of a goodbye takes at most, whatever the client sends or does not.
	goodbyeTime = 2 * time.Second
	// goodbyeBytes is how much of a request is read and forgotten.
	goodbyeBytes = 256 << 10
	// hastyWrite bounds the writing of an answer that nobody waits for: it fits into the empty buffer of a new socket.
	hastyWrite = 50 * time.Millisecond
)

// dismiss tells a client that it is refused and closes the connection. It does not wait for the client.
func (l *listener) dismiss(c net.Conn, reason Reason) {
	answer := l.limiter.Answer(reason)
	if l.startGoodbye(c, answer) {
		return
	}
	l.limiter.unanswered.Inc()
	_ = c.SetWriteDeadline(time.Now().Add(hastyWrite))
	_, _ = c.Write(answer)
	c.Close()
}

// startGoodbye returns false when there are too many already, or the listener is closed.
func (l *listener) startGoodbye(c net.Conn, answer []byte) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || len(l.goodbyes) >= MaxGoodbyes {
		return false
	}
	l.goodbyes[c] = struct{}{}
	l.running.Go(func() {
		sayGoodbye(c, answer)
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.goodbyes, c)
	})
	return true
}

// sayGoodbye answers what is asked on a connection, once, and closes it when the client has read that. Errors are the
// client's: there is nobody to tell.
func sayGoodbye(c net.Conn, answer []byte) {
	defer c.Close()
	now := time.Now()
	_ = c.SetDeadline(now.Add(goodbyeTime))
	_ = c.SetReadDeadline(now.Add(requestWait))
	first := make([]byte, 4<<10)
	_, _ = c.Read(first)
	if _, err := c.Write(answer); err != nil {
		return
	}
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.CloseWrite()
	}
	_ = c.SetReadDeadline(now.Add(goodbyeTime))
	_, _ = io.CopyN(io.Discard, c, goodbyeBytes)
}
