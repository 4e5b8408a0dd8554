package connlimit

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"
)

// patience is how long a test waits for what should happen at once.
const patience = 30 * time.Second

func TestMain(m *testing.M) {
	if os.Getenv(envStarved) != "" {
		serveStarved()
		return
	}
	goleak.VerifyTestMain(m)
}

// testAnswer is what tests refuse with.
func testAnswer(r Reason) []byte {
	body := "too many: " + r.String()
	return fmt.Appendf(nil, "HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nRetry-After: 2\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

func newLimiter(t testing.TB, c Config) *Limiter {
	t.Helper()
	c.Answer = testAnswer
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	l, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// serve runs an HTTP server behind the limiter until the test ends, and returns its address. Whatever the test left
// open, nothing may be counted then.
func serve(t testing.TB, l *Limiter, server *http.Server) string {
	t.Helper()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return serveOn(t, l, server, inner)
}

func serveOn(t testing.TB, l *Limiter, server *http.Server, inner net.Listener) string {
	t.Helper()
	if server.Handler == nil {
		server.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") })
	}
	server.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelError)
	done := make(chan error)
	go func() { done <- server.Serve(l.Listen(inner)) }()
	t.Cleanup(func() {
		server.Close()
		if err := <-done; !errors.Is(err, http.ErrServerClosed) {
			t.Errorf("it served until %v", err)
		}
		await(t, "all connections to be given back", func() bool { return isEmpty(l) })
	})
	return inner.Addr().String()
}

func isEmpty(l *Limiter) bool {
	s := l.Snapshot()
	return s.Total == 0 && s.Addresses == 0
}

// await waits for something that nobody tells of.
func await(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// dial connects from an address of this machine.
func dial(t testing.TB, from, to string) *net.TCPConn {
	t.Helper()
	c, err := dialer(t, from).Dial("tcp", to)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	return c.(*net.TCPConn)
}

func dialer(t testing.TB, from string) *net.Dialer {
	t.Helper()
	local := &net.TCPAddr{IP: net.ParseIP(from)}
	if l, err := net.ListenTCP("tcp", local); err != nil {
		t.Skipf("this machine has no address %s: %v", from, err)
	} else {
		l.Close()
	}
	return &net.Dialer{LocalAddr: local, Timeout: patience}
}

// ask sends a request and returns status and body.
func ask(t testing.TB, c net.Conn) string {
	t.Helper()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: hub\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return read(t, c)
}

func read(t testing.TB, c net.Conn) string {
	t.Helper()
	res, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("half an answer: %v", err)
	}
	return fmt.Sprint(res.StatusCode, " ", string(body))
}

const (
	served      = "200 served"
	overAddress = "503 too many: address"
	overTotal   = "503 too many: total"
)

func TestCaps(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{PerAddress: 3, Total: 5})
	addr := serve(t, l, &http.Server{})
	var ones []*net.TCPConn
	for range 3 {
		ones = append(ones, dial(t, "127.0.0.2", addr))
		if got := ask(t, ones[len(ones)-1]); got != served {
			t.Fatal(got)
		}
	}
	if got := ask(t, dial(t, "127.0.0.2", addr)); got != overAddress {
		t.Errorf("the fourth of an address: %s", got)
	}
	for range 2 {
		if got := ask(t, dial(t, "127.0.0.3", addr)); got != served {
			t.Fatalf("another address: %s", got)
		}
	}
	if got := ask(t, dial(t, "127.0.0.4", addr)); got != overTotal {
		t.Errorf("the sixth of all: %s", got)
	}
	if got := ask(t, dial(t, "127.0.0.2", addr)); got != overAddress {
		t.Errorf("over both caps: %s", got)
	}
	want := Snapshot{Total: 5, Addresses: 2, MaxPerAddress: 3, MaxTotal: 5, RefusedAddress: 2, RefusedTotal: 1}
	if diff := cmp.Diff(want, l.Snapshot()); diff != "" {
		t.Errorf("snapshot:\n%s", diff)
	}
	// A place that is given back is had by the next; the served keep theirs.
	ones[0].Close()
	await(t, "the place", func() bool { return l.Snapshot().Total == 4 })
	if got := ask(t, dial(t, "127.0.0.4", addr)); got != served {
		t.Errorf("after one has gone: %s", got)
	}
	if got := ask(t, ones[1]); got != served {
		t.Errorf("an old connection: %s", got)
	}
}

func TestNoCaps(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{})
	addr := serve(t, l, &http.Server{})
	for range 50 {
		dial(t, "127.0.0.1", addr)
	}
	await(t, "all to be counted", func() bool { return cmp.Equal(l.Snapshot(), Snapshot{Total: 50, Addresses: 1}) })
}

// What counts as one address is what the limits count; a proxy counts for itself, and may have any number.
func TestAddresses(t *testing.T) {
	t.Parallel()
	ip := netip.MustParseAddr
	l := newLimiter(t, Config{PerAddress: 2, Total: 100, Exempt: func(a netip.Addr) bool { return a == ip("192.0.2.9") || a == ip("2001:db8::9") }})
	var proxy []netip.Addr
	for range 3 {
		client, _, ok := l.admit(ip("2001:db8::9"))
		if !ok {
			t.Fatal("an exempt IPv6 address is refused")
		}
		proxy = append(proxy, client)
	}
	for i := range 2 {
		for _, a := range []string{"192.0.2.1", "2001:db8::1", "2001:db8:0:1::1"} {
			if _, _, ok := l.admit(ip(a)); !ok {
				t.Errorf("connection %d of %s is refused", i+1, a)
			}
		}
	}
	for _, a := range []string{"192.0.2.1", "::ffff:192.0.2.1", "2001:db8::1", "2001:db8::ffff:1", "2001:db8::dead:beef:1", "2001:db8:0:1:8000::"} {
		if _, reason, ok := l.admit(ip(a)); ok || reason != OverAddress {
			t.Errorf("one more of %s is admitted", a)
		}
	}
	for _, client := range proxy { // which counted beside those of its /64
		l.leave(client)
	}
	var from []netip.Addr
	for range 94 {
		client, _, ok := l.admit(ip("192.0.2.9"))
		if !ok {
			t.Fatal("an exempt address is refused")
		}
		from = append(from, client)
	}
	if _, reason, ok := l.admit(ip("192.0.2.9")); ok || reason != OverTotal {
		t.Error("an exempt address is admitted beyond the total")
	}
	if s := l.Snapshot(); s.Total != 100 || s.Addresses != 4 {
		t.Errorf("%+v", s)
	}
	for _, client := range from {
		l.leave(client)
	}
	if s := l.Snapshot(); s.Total != 6 || s.Addresses != 3 {
		t.Errorf("without the exempt: %+v", s)
	}
}

// However callers come and go, no cap is passed for a moment, and nothing is left in the end: neither counts nor entries.
func TestCountsUnderContention(t *testing.T) {
	t.Parallel()
	const addresses, perAddress, total = 40, 3, 60
	l := newLimiter(t, Config{PerAddress: perAddress, Total: total})
	var held [addresses]atomic.Int64
	var all atomic.Int64
	var wg sync.WaitGroup
	for g := range 8 {
		wg.Go(func() {
			r := rand.New(rand.NewPCG(1, uint64(g)))
			var mine []int
			for range 5000 {
				if len(mine) > 0 && r.IntN(2) == 0 {
					i := r.IntN(len(mine))
					n := mine[i]
					mine[i], mine = mine[len(mine)-1], mine[:len(mine)-1]
					held[n].Add(-1)
					all.Add(-1)
					l.leave(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}))
					continue
				}
				n := r.IntN(addresses)
				if _, _, ok := l.admit(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)})); ok {
					mine = append(mine, n)
					if held[n].Add(1) > perAddress || all.Add(1) > total {
						t.Errorf("address %d is over a cap", n)
					}
				}
			}
			for _, n := range mine {
				held[n].Add(-1)
				all.Add(-1)
				l.leave(netip.AddrFrom4([4]byte{10, 0, 0, byte(n)}))
			}
		})
	}
	wg.Wait()
	if !isEmpty(l) || len(l.clients) != 0 {
		t.Errorf("left over: %+v", l.Snapshot())
	}
}

// A flood from one address never holds more than its cap, and another address is served all the while.
func TestFlood(t *testing.T) {
	t.Parallel()
	const perAddress = 20
	l := newLimiter(t, Config{PerAddress: perAddress, Total: 1000})
	var over atomic.Int64
	addr := serve(t, l, &http.Server{ConnState: func(_ net.Conn, s http.ConnState) {
		if s := l.Snapshot(); s.Total > perAddress+1 { // and the other address
			over.Store(int64(s.Total))
		}
	}})
	flood := dialer(t, "127.0.0.2")
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := i; ctx.Err() == nil; n++ {
				c, err := flood.DialContext(ctx, "tcp", addr)
				if err != nil {
					continue
				}
				switch n % 4 { // some say nothing, some half of something, some go without a word
				case 0:
					_, _ = io.WriteString(c, "GET / HT")
				case 1:
					_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: hub\r\n\r\n")
				case 2:
					_ = c.(*net.TCPConn).SetLinger(0)
				}
				c.Close()
			}
		})
	}
	for n := 0; n < 20 || l.Snapshot().RefusedAddress < 100; n++ {
		c := dial(t, "127.0.0.3", addr)
		if got := ask(t, c); got != served {
			t.Errorf("beside a flood: %s", got)
		}
		c.Close()
		if t.Failed() {
			break
		}
		await(t, "the connection to be given back", func() bool {
			l.mu.Lock()
			defer l.mu.Unlock()
			return l.clients[netip.MustParseAddr("127.0.0.3")] == 0
		})
	}
	stop()
	wg.Wait()
	if n := over.Load(); n > 0 {
		t.Errorf("%d connections were open, of %d that may be", n, perAddress+1)
	}
	await(t, "the flood to be forgotten", func() bool { return isEmpty(l) })
}

// However a connection ends, its place is given back, once.
func TestEveryEndGivesBack(t *testing.T) {
	t.Parallel()
	handler := http.NewServeMux()
	handler.HandleFunc("/panic", func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	handler.HandleFunc("/hijack", func(w http.ResponseWriter, _ *http.Request) {
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		var wg sync.WaitGroup
		for range 8 { // whoever has it closes it
			wg.Go(func() { c.Close() })
		}
		wg.Wait()
	})
	handler.HandleFunc("/body", func(_ http.ResponseWriter, r *http.Request) { _, _ = io.Copy(io.Discard, r.Body) })
	l := newLimiter(t, Config{PerAddress: 10, Total: 10})
	addr := serve(t, l, &http.Server{Handler: handler, ReadHeaderTimeout: 200 * time.Millisecond, IdleTimeout: 200 * time.Millisecond, ReadTimeout: time.Second})
	send := func(text string) func(*net.TCPConn) {
		return func(c *net.TCPConn) {
			_, _ = io.WriteString(c, text)
		}
	}
	for name, speak := range map[string]func(*net.TCPConn){
		"says nothing":           func(*net.TCPConn) {},
		"half a header":          send("GET / HTTP/1.1\r\nHost: h"),
		"not HTTP":               send("\x16\x03\x01\x02\x00\r\n\r\n"),
		"idle after an answer":   send("GET / HTTP/1.1\r\nHost: hub\r\n\r\n"),
		"asks to close":          send("GET / HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n\r\n"),
		"half a body":            send("POST /body HTTP/1.1\r\nHost: hub\r\nContent-Length: 100\r\n\r\nhalf"),
		"the handler panics":     send("GET /panic HTTP/1.1\r\nHost: hub\r\n\r\n"),
		"the handler hijacks it": send("GET /hijack HTTP/1.1\r\nHost: hub\r\n\r\n"),
		"resets":                 func(c *net.TCPConn) { _ = c.SetLinger(0); c.Close() },
		"closes its half only":   func(c *net.TCPConn) { _ = c.CloseWrite() },
		"goes":                   func(c *net.TCPConn) { c.Close() },
	} {
		for range 5 {
			speak(dial(t, "127.0.0.1", addr))
		}
		await(t, name, func() bool { return isEmpty(l) })
	}
	if n := l.Snapshot().RefusedAddress; n > 0 {
		t.Errorf("%d were refused: places were not given back in time", n)
	}
}

// A client that vanishes, here by a socket that the kernel forgets without telling, is found out by keep-alives, whatever
// the server waits for.
func TestVanishedClient(t *testing.T) {
	t.Parallel()
	lc := net.ListenConfig{KeepAliveConfig: net.KeepAliveConfig{Enable: true, Idle: time.Second, Interval: time.Second, Count: 2}}
	inner, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newLimiter(t, Config{PerAddress: 10, Total: 10})
	addr := serveOn(t, l, &http.Server{}, inner) // no timeouts
	c := dial(t, "127.0.0.1", addr)
	await(t, "the connection", func() bool { return l.Snapshot().Total == 1 })
	raw, err := c.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	const tcpRepair = 19 // TCP_REPAIR: closed in this mode, a socket sends nothing
	var failed error
	if err := raw.Control(func(fd uintptr) { failed = syscall.SetsockoptInt(int(fd), syscall.IPPROTO_TCP, tcpRepair, 1) }); err != nil || failed != nil {
		t.Skipf("this user can't make a socket vanish: %v %v", err, failed)
	}
	c.Close()
	if l.Snapshot().Total != 1 {
		t.Error("the socket did not vanish without a word: this test shows nothing")
	}
	await(t, "the place of the vanished", func() bool { return isEmpty(l) })
}

// Those who are refused and say nothing, read nothing and do not go delay nobody, are told all the same, and are few at a time.
func TestSilentRefused(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{PerAddress: 1, Total: 100})
	addr := serve(t, l, &http.Server{})
	first := dial(t, "127.0.0.2", addr)
	if got := ask(t, first); got != served {
		t.Fatal(got)
	}
	var silent []*net.TCPConn
	for range MaxGoodbyes + 100 {
		silent = append(silent, dial(t, "127.0.0.2", addr))
	}
	if got := ask(t, dial(t, "127.0.0.3", addr)); got != served {
		t.Errorf("beside the silent: %s", got)
	}
	for i, c := range silent {
		if got := read(t, c); got != overAddress {
			t.Errorf("the silent %d: %s", i, got)
		}
		if n, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("the silent %d reads %d bytes more, %v", i, n, err)
		}
	}
	if s := l.Snapshot(); s.RefusedAddress != MaxGoodbyes+100 {
		t.Errorf("%+v", s)
	}
	if got := ask(t, first); got != served {
		t.Errorf("the first: %s", got)
	}
}

// A client that is in the middle of its request when it is refused reads the whole answer, and no reset.
func TestRefusedInTheMiddleOfARequest(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{PerAddress: 1, Total: 100})
	addr := serve(t, l, &http.Server{})
	dial(t, "127.0.0.2", addr)
	await(t, "the first", func() bool { return l.Snapshot().Total == 1 })
	body := bytes.Repeat([]byte("x"), goodbyeBytes/2)
	for range 20 {
		began := time.Now()
		c := dial(t, "127.0.0.2", addr)
		if _, err := fmt.Fprintf(c, "POST / HTTP/1.1\r\nHost: hub\r\nContent-Length: %d\r\n\r\n", len(body)); err != nil {
			t.Fatal(err)
		}
		for part := body; len(part) > 0; part = part[len(part)/2+1:] {
			if _, err := c.Write(part[:len(part)/2+1]); err != nil && time.Since(began) < goodbyeTime*3/4 { // else the machine was too busy
				t.Fatalf("cut in the middle of the request: %v", err)
			}
		}
		if got := read(t, c); got != overAddress {
			t.Errorf("got %s", got)
		}
		c.Close()
	}
}

// A refused client is not interrupted: it hears nothing before it has spoken, and may take its time to say the rest. What the
// machine was too busy for is not judged.
func TestRefusedSlowly(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{PerAddress: 1, Total: 100})
	addr := serve(t, l, &http.Server{})
	dial(t, "127.0.0.2", addr)
	await(t, "the first", func() bool { return l.Snapshot().Total == 1 })
	began := time.Now()
	c := dial(t, "127.0.0.2", addr)
	_ = c.SetReadDeadline(time.Now().Add(requestWait / 5))
	if n, err := c.Read(make([]byte, 100)); time.Since(began) < requestWait/2 && (n > 0 || !errors.Is(err, os.ErrDeadlineExceeded)) {
		t.Errorf("before it has spoken it reads %d bytes, %v", n, err)
	}
	_ = c.SetReadDeadline(time.Now().Add(patience))
	_, err := io.WriteString(c, "POST / HTTP/1.1\r\nHost: hub\r\nContent-Length: 2\r\n\r\n")
	for range 2 { // the first part of a body that nobody takes makes the far end reset, the second meets that
		time.Sleep(requestWait * 6 / 5) // the client's manner, not a synchronisation
		if err == nil {
			_, err = io.WriteString(c, "x")
		}
	}
	if err != nil && time.Since(began) < goodbyeTime*3/4 {
		t.Errorf("it is cut off: %v", err)
	}
	if got := read(t, c); got != overAddress {
		t.Errorf("got %s", got)
	}
}

// An ordinary HTTP client takes the refusal for what it is. (net/http drops a connection that answers before it has been asked.)
func TestRefusedHTTPClient(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{PerAddress: 1, Total: 100})
	addr := serve(t, l, &http.Server{})
	dial(t, "127.0.0.2", addr)
	await(t, "the first", func() bool { return l.Snapshot().Total == 1 })
	transport := &http.Transport{DialContext: dialer(t, "127.0.0.2").DialContext}
	defer transport.CloseIdleConnections()
	client := &http.Client{Transport: transport, Timeout: patience}
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			var body io.Reader
			if i%2 == 0 {
				body = strings.NewReader(strings.Repeat("x", 50_000))
			}
			req, err := http.NewRequest("PUT", "http://"+addr, body)
			if err != nil {
				t.Error(err)
				return
			}
			began := time.Now()
			res, err := client.Do(req)
			if err != nil {
				if time.Since(began) < goodbyeTime*3/4 { // else the machine was too busy
					t.Errorf("no answer: %v", err)
				}
				return
			}
			defer res.Body.Close()
			if text, err := io.ReadAll(res.Body); err != nil || res.StatusCode != 503 || res.Header.Get("Retry-After") != "2" || string(text) != "too many: address" {
				t.Errorf("%d %v %q %v", res.StatusCode, res.Header, text, err)
			}
		})
	}
	wg.Wait()
}

// A goodbye ends, whatever the client does.
func TestGoodbyeEnds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		answer int // bytes
		client func(net.Conn)
	}{
		"never says a word":        {100, func(net.Conn) {}},
		"never reads":              {32 << 20, func(net.Conn) {}}, // more than the buffers of both sides
		"drips":                    {100, func(c net.Conn) { drip(c, 50*time.Millisecond) }},
		"pours more than is taken": {100, func(c net.Conn) { _, _ = io.CopyN(c, zeros{}, 8<<20) }},
		"is gone":                  {100, func(c net.Conn) { c.Close() }},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inner, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer inner.Close()
			far := dial(t, "127.0.0.1", inner.Addr().String())
			near, err := inner.Accept()
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			wg.Go(func() { test.client(far) })
			began := time.Now()
			sayGoodbye(near, make([]byte, test.answer))
			if took := time.Since(began); took > goodbyeTime+patience/2 {
				t.Errorf("it took %s", took)
			}
			if _, err := near.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
				t.Errorf("it is not closed: %v", err)
			}
			far.Close()
			wg.Wait()
		})
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// drip sends a byte now and then until nobody takes it. The pause is the client's manner, not a synchronisation.
func drip(c net.Conn, pause time.Duration) {
	for {
		if _, err := c.Write([]byte("x")); err != nil {
			return
		}
		time.Sleep(pause)
	}
}

// Closing the listener ends the goodbyes at once; nobody waits for the refused.
func TestCloseCutsGoodbyes(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := newLimiter(t, Config{PerAddress: 1, Total: 1})
	if _, _, ok := l.admit(netip.MustParseAddr("127.0.0.1")); !ok {
		t.Fatal("the first is refused")
	}
	listener := l.Listen(inner).(*listener)
	accepting := make(chan error)
	go func() {
		_, err := listener.Accept()
		accepting <- err
	}()
	for range 10 {
		dial(t, "127.0.0.1", inner.Addr().String())
	}
	await(t, "the refusals", func() bool { return l.Snapshot().RefusedAddress == 10 })
	began := time.Now()
	listener.Close()
	if took := time.Since(began); took > goodbyeTime/2 {
		t.Errorf("it took %s: it waited for them", took)
	}
	if err := <-accepting; !errors.Is(err, net.ErrClosed) {
		t.Errorf("accept ended with %v", err)
	}
	if n := len(listener.goodbyes); n > 0 {
		t.Errorf("%d goodbyes are left", n)
	}
}

// net/http looks for these methods on its connections.
func TestConnectionsKeepTheirMethods(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, Config{})
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener := l.Listen(inner)
	defer listener.Close()
	dial(t, "127.0.0.1", inner.Addr().String())
	c, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := c.(io.ReaderFrom); !ok {
		t.Error("it can't send files")
	}
	if _, ok := c.(interface{ CloseWrite() error }); !ok {
		t.Error("it can't close its half")
	}
	if _, ok := c.(syscall.Conn); !ok {
		t.Error("its socket can't be reached")
	}
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() { c.Close() })
	}
	wg.Wait()
	if !isEmpty(l) || l.open != 0 {
		t.Errorf("after twenty closes: %+v", l.Snapshot())
	}
	if err := c.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("one more: %v", err)
	}
}

// faulty fails some times before it accepts.
type faulty struct {
	net.Listener
	left atomic.Int64
}

func (f *faulty) Accept() (net.Conn, error) {
	if f.left.Add(-1) >= 0 {
		return nil, &net.OpError{Op: "accept", Net: "tcp", Err: os.NewSyscallError("accept4", syscall.EMFILE)}
	}
	return f.Listener.Accept()
}

// An error of accept, such as too many open files, is waited out by net/http, counted, and told now and then.
func TestAcceptErrors(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &faulty{Listener: inner}
	f.left.Store(5)
	reg := prometheus.NewRegistry()
	log := &lines{}
	l := newLimiter(t, Config{PerAddress: 1, Total: 1, Registerer: reg, Logger: slog.New(slog.NewTextHandler(log, nil))})
	addr := serveOn(t, l, &http.Server{}, f)
	if got := ask(t, dial(t, "127.0.0.1", addr)); got != served {
		t.Errorf("after errors: %s", got)
	}
	if v := value(t, reg, "converger_connections_accept_errors_total", ""); v != 5 {
		t.Errorf("%v errors counted, want 5", v)
	}
	if n := log.count("can't be accepted"); n != 1 {
		t.Errorf("told %d times, want 1:\n%s", n, log)
	}
}

// lines keeps a log. Safe for concurrent use.
type lines struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lines) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(b)
}

func (l *lines) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func (l *lines) count(part string) int { return strings.Count(l.String(), part) }

// value reads a series: of a label's value, or without labels.
func value(t *testing.T, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.Metric {
			if f.GetName() == name && (label == "" && len(m.Label) == 0 || label != "" && len(m.Label) == 1 && m.Label[0].GetValue() == label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	t.Fatalf("no series %s of %q", name, label)
	return 0
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	l := newLimiter(t, Config{PerAddress: 2, Total: 3, Registerer: reg})
	for _, a := range []string{"192.0.2.1", "192.0.2.1", "192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"} {
		addr := netip.MustParseAddr(a)
		if _, reason, ok := l.admit(addr); !ok {
			l.refuse(addr, reason)
		}
	}
	for series, want := range map[[2]string]float64{
		{"converger_connections_open", ""}:                 3,
		{"converger_connections_addresses", ""}:            2,
		{"converger_connections_max", "address"}:           2,
		{"converger_connections_max", "total"}:             3,
		{"converger_connections_refused_total", "address"}: 1,
		{"converger_connections_refused_total", "total"}:   2,
		{"converger_connections_unanswered_total", ""}:     0,
		{"converger_connections_accept_errors_total", ""}:  0,
	} {
		if got := value(t, reg, series[0], series[1]); got != want {
			t.Errorf("%v is %v, want %v", series, got, want)
		}
	}
	if _, err := New(Config{Registerer: reg}); err == nil {
		t.Error("a second limiter on one registry is not refused")
	}
}

// A flood is a line a second, which counts what was not told.
func TestRefusalsAreLoggedNowAndThen(t *testing.T) {
	t.Parallel()
	log := &lines{}
	l := newLimiter(t, Config{Logger: slog.New(slog.NewTextHandler(log, nil))})
	began := time.Now()
	addr := netip.MustParseAddr("2001:db8::1")
	for range 10_000 {
		l.refuse(addr, OverAddress)
	}
	if n, most := log.count("connections are refused"), 1+int(time.Since(began)/sayEvery); n < 1 || n > most {
		t.Errorf("told %d times, want 1 to %d", n, most)
	}
	l.mu.Lock()
	l.said = l.said.Add(-sayEvery)
	l.mu.Unlock()
	l.refuse(addr, OverTotal)
	if text := log.String(); !strings.Contains(text, "over_the_cap_of_an_address=9999 over_the_cap_of_all=1 last_address=2001:db8::1") {
		t.Errorf("what was not told is not made up for:\n%s", text)
	}
}
