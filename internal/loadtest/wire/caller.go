package wire

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http/httputil"
	"net/url"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
)

const (
	// defaultTimeout ends a request that nobody answers; the hub's own time-outs are shorter.
	defaultTimeout = 30 * time.Second
	maxHeader      = 4 << 10  // bytes of one header line of an answer
	maxRefusal     = 64 << 10 // bytes of a refusal's body that are looked at
)

// Target is where callers connect to. Its zero members are the defaults.
type Target struct {
	Secure  bool
	Address string        // host:port
	Host    string        // of the Host header; "": Address
	Path    string        // before each request's path
	Timeout time.Duration // of an exchange, and of a dial; 0: 30 s

	Control func(network, address string, c syscall.RawConn) error // of the dialer
}

// ParseTarget reads a base URL.
func ParseTarget(base string) (Target, error) {
	u, err := url.Parse(base)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Hostname() == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		// Not quoted: an address may hold a password.
		return Target{}, errors.New("the address is not of the form http://host:port")
	}
	t := Target{Secure: u.Scheme == "https", Address: u.Host, Host: u.Host}
	if u.Port() == "" {
		t.Address = net.JoinHostPort(u.Hostname(), map[bool]string{false: "80", true: "443"}[t.Secure])
	}
	for t.Path = u.EscapedPath(); len(t.Path) > 0 && t.Path[len(t.Path)-1] == '/'; {
		t.Path = t.Path[:len(t.Path)-1]
	}
	return t, nil
}

func (t Target) dial(ctx context.Context) (net.Conn, error) {
	d := &net.Dialer{Timeout: t.timeout(), Control: t.Control}
	if t.Secure {
		return (&tls.Dialer{NetDialer: d}).DialContext(ctx, "tcp", t.Address)
	}
	return d.DialContext(ctx, "tcp", t.Address)
}

func (t Target) timeout() time.Duration {
	if t.Timeout > 0 {
		return t.Timeout
	}
	return defaultTimeout
}

// Caller sends requests over one kept connection, one after the other. Only Abort may be called by another goroutine.
type Caller struct {
	target Target
	in     *bufio.Reader
	out    []byte

	mu      sync.Mutex
	conn    net.Conn
	aborted bool
}

// NewCaller makes a caller that has no connection yet.
func NewCaller(t Target) *Caller { return &Caller{target: t} }

// Close ends the connection.
func (c *Caller) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.conn != nil {
		_ = c.conn.Close()
		c.conn = nil
	}
}

// Abort ends the request that is under way, and refuses all later ones.
func (c *Caller) Abort() {
	c.mu.Lock()
	c.aborted = true
	c.mu.Unlock()
	c.Close()
}

// ErrAborted is the error of requests after [Caller.Abort].
var ErrAborted = errors.New("aborted")

// Reason names why an exchange failed, by few names, so that many failures can be counted by them.
func Reason(err error) string {
	var dns *net.DNSError
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded):
		return "no answer in time"
	case errors.Is(err, syscall.ECONNREFUSED):
		return "connection refused"
	case errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE) || errors.Is(err, net.ErrClosed):
		return "connection closed"
	case errors.As(err, &dns):
		return "name not found"
	}
	return "connection failed: " + err.Error()
}

// Answer is what came back.
type Answer struct {
	Status     int
	Code       string        // of a refusal: the member "code" of its problem, "" if it has none
	RetryAfter time.Duration // 0 unless the answer has whole seconds
	DecidedAt  int64         // Unix milliseconds at which a limit was decided, of a hub with RATE_LIMIT_TELL_TIME; else 0
}

// DecidedAt is the header of an answer's DecidedAt.
const DecidedAt = "Converger-Decided-At"

// Do sends a request and reads the answer to its end. head is header lines, each ended by \r\n, without Host and
// Content-Length. ctx bounds the dialling only.
func (c *Caller) Do(ctx context.Context, method, path, head string, body []byte) (Answer, error) {
	conn, err := c.connection(ctx)
	if err != nil {
		return Answer{}, err
	}
	b := c.out[:0]
	b = append(b, method...)
	b = append(b, ' ')
	b = append(b, c.target.Path...)
	b = append(b, path...)
	b = append(b, " HTTP/1.1\r\nHost: "...)
	if c.target.Host != "" {
		b = append(b, c.target.Host...)
	} else {
		b = append(b, c.target.Address...)
	}
	b = append(b, "\r\n"...)
	b = append(b, head...)
	b = append(b, "Content-Length: "...)
	b = strconv.AppendInt(b, int64(len(body)), 10)
	b = append(b, "\r\n\r\n"...)
	b = append(b, body...)
	c.out = b

	err = conn.SetDeadline(time.Now().Add(c.target.timeout()))
	if err == nil {
		_, err = conn.Write(b)
	}
	var answer Answer
	var closing bool
	if err == nil {
		answer, closing, err = readAnswer(c.in)
	}
	if err != nil || closing {
		c.Close()
	}
	return answer, err
}

// connection returns the kept connection, or a new one.
func (c *Caller) connection(ctx context.Context) (net.Conn, error) {
	c.mu.Lock()
	conn, aborted := c.conn, c.aborted
	c.mu.Unlock()
	if aborted {
		return nil, ErrAborted
	}
	if conn != nil {
		return conn, nil
	}
	conn, err := c.target.dial(ctx)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.aborted {
		_ = conn.Close()
		return nil, ErrAborted
	}
	c.conn, c.in = conn, bufio.NewReaderSize(conn, maxHeader)
	return conn, nil
}

// readAnswer reads an answer to its end. Of the body only a refusal's is looked at.
func readAnswer(in *bufio.Reader) (a Answer, closing bool, err error) {
	line, err := in.ReadSlice('\n')
	if err != nil {
		return a, false, err
	}
	if len(line) < 12 || !bytes.HasPrefix(line, []byte("HTTP/1.1 ")) {
		return a, false, fmt.Errorf("not an HTTP/1.1 answer: %q", line)
	}
	if a.Status, err = strconv.Atoi(string(line[9:12])); err != nil {
		return a, false, fmt.Errorf("not an HTTP/1.1 answer: %q", line)
	}
	h, err := readHead(in)
	if err != nil {
		return a, false, err
	}
	a.RetryAfter, a.DecidedAt = h.retryAfter, h.decidedAt
	var body io.Reader
	switch {
	case h.chunked: // of a proxy in between
		body = httputil.NewChunkedReader(in)
	case h.length >= 0:
		body = io.LimitReader(in, int64(h.length))
	case a.Status != 204 && a.Status != 304:
		return a, false, errors.New("an answer without Content-Length")
	default:
		return a, h.closing, nil
	}
	if a.Status >= 400 {
		refusal, err := io.ReadAll(io.LimitReader(body, maxRefusal))
		if err != nil {
			return a, false, err
		}
		a.Code = textMember(refusal, "code")
	}
	if h.chunked {
		if _, err = io.Copy(io.Discard, body); err == nil {
			_, err = readHead(in) // the trailer
		}
	} else {
		_, err = in.Discard(int(body.(*io.LimitedReader).N))
	}
	return a, h.closing, err
}

// textMember finds a member of a JSON object by its name, if its value is a text without anything escaped.
func textMember(object []byte, name string) string {
	_, rest, ok := bytes.Cut(object, []byte(`"`+name+`":`))
	if !ok {
		return ""
	}
	rest, ok = bytes.CutPrefix(bytes.TrimLeft(rest, " "), []byte(`"`))
	if !ok {
		return ""
	}
	value, _, _ := bytes.Cut(rest, []byte(`"`))
	return string(value)
}

type head struct {
	length     int // of the body; -1: not said
	chunked    bool
	closing    bool
	retryAfter time.Duration
	decidedAt  int64
	id         string // Webhook-Id, when there is one
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
		case len(name) == 17 && bytes.EqualFold(name, []byte("Transfer-Encoding")):
			h.chunked = bytes.EqualFold(value, []byte("chunked"))
		case len(name) == 10 && bytes.EqualFold(name, []byte("Connection")):
			h.closing = bytes.EqualFold(value, []byte("close"))
		case len(name) == 11 && bytes.EqualFold(name, []byte("Retry-After")):
			seconds, _ := strconv.Atoi(string(value)) // a date is none
			h.retryAfter = time.Duration(max(0, min(seconds, 3600))) * time.Second
		case len(name) == len(DecidedAt) && bytes.EqualFold(name, []byte(DecidedAt)):
			h.decidedAt, _ = strconv.ParseInt(string(value), 10, 64)
		case len(name) == 10 && bytes.EqualFold(name, []byte("Webhook-Id")):
			h.id = string(value)
		}
	}
}
