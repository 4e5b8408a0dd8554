package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"converger/migrations/pgtest"
)

// from makes an api whose connections come from an address of this machine.
func (a *api) from(t testing.TB, address string) *api {
	t.Helper()
	b := a.with()
	b.header = a.header.Clone()
	transport := &http.Transport{DialContext: dialerFrom(t, address).DialContext, MaxIdleConnsPerHost: 64}
	t.Cleanup(transport.CloseIdleConnections)
	b.client = &http.Client{Timeout: patience, Transport: transport}
	return b
}

// dialerFrom connects from an address of this machine. Where loopback is one address only, the test is skipped.
func dialerFrom(t testing.TB, address string) *net.Dialer {
	t.Helper()
	local := &net.TCPAddr{IP: net.ParseIP(address)}
	l, err := net.ListenTCP("tcp", local)
	if err != nil {
		t.Skipf("this machine has no address %s: %v", address, err)
	}
	l.Close()
	return &net.Dialer{LocalAddr: local, Timeout: patience}
}

// connections is what a hub says of its connections, less the one that asks.
func (a *api) connections(t testing.TB) int {
	t.Helper()
	n, err := strconv.Atoi(a.metric(t, "converger_connections_open"))
	if err != nil {
		t.Fatal(err)
	}
	return n - 1
}

// The caps hold on the real hub against slow, silent and greedy clients, who are told so; ordinary ones are served beside them;
// what dripped or said nothing is cut at its deadline; a proxy speaks for many; and in the end nothing is counted.
func TestConnectionLimits(t *testing.T) {
	t.Parallel()
	const perIP, total = 20, 100
	url := pgtest.New(t)
	p := serve(t, url, map[string]string{
		"CONN_LIMIT_PER_IP": fmt.Sprint(perIP), "CONN_LIMIT_TOTAL": fmt.Sprint(total), "TRUSTED_PROXIES": "127.0.0.9", "METRICS_ALLOWED_IPS": "127.0.0.0/8",
	})
	host := strings.TrimPrefix(p.base, "http://")
	watch, ordinary := newAPI(t, p.base), newAPI(t, p.base).from(t, "127.0.0.3")
	watch.connections(t)
	ordinary.call(t, 200, "GET", "/health/live", "")

	// Forty clients each from two addresses: half drip their header, byte after byte, the others say nothing.
	var held, refused atomic.Int64
	var wg sync.WaitGroup
	for _, address := range []string{"127.0.0.4", "127.0.0.5"} {
		d := dialerFrom(t, address)
		for i := range 2 * perIP {
			wg.Go(func() {
				c, err := d.DialContext(t.Context(), "tcp", host)
				if err != nil {
					t.Errorf("can't connect: %v", err)
					return
				}
				defer c.Close()
				_ = c.SetDeadline(time.Now().Add(patience))
				if i%2 == 0 {
					dripping := make(chan struct{})
					defer func() { <-dripping }()
					go func() {
						defer close(dripping)
						for _, b := range []byte("GET /health/live HTTP/1.1\r\nHost: hub\r\nX-Slow: " + strings.Repeat("x", 1000)) {
							if _, err := c.Write([]byte{b}); err != nil {
								return
							}
							time.Sleep(200 * time.Millisecond) // its manner, not a synchronisation
						}
					}()
					defer c.Close()
				}
				res, err := http.ReadResponse(bufio.NewReader(c), nil)
				switch {
				case err == nil && res.StatusCode == http.StatusServiceUnavailable:
					refused.Add(1)
					var body struct{ Code, Detail string }
					if json.NewDecoder(res.Body).Decode(&body) != nil || body.Code != "connection_limit_exceeded" || body.Detail == "" ||
						res.Header.Get("Retry-After") == "" || res.Header.Get("Content-Type") != "application/problem+json" {
						t.Errorf("refused with %v %+v", res.Header, body)
					}
				case err == nil && res.StatusCode == http.StatusRequestTimeout, err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
					held.Add(1) // until the deadline of its header
				default:
					t.Errorf("it was not cut: %v", err)
				}
			})
		}
	}
	eventually(t, patience, "the refusals", func() bool { return refused.Load() == 2*perIP })
	if n := watch.metric(t, `converger_connections_refused_total{reason="address"}`); n != fmt.Sprint(2*perIP) {
		t.Errorf("%s refusals counted", n)
	}
	ordinary.call(t, 200, "GET", "/health/live", "")

	// Whoever is in a range that the operator exempts may have more.
	ops := management(t, p, url)
	ops.call(t, 201, "POST", "/api/v1/management/address_ranges", `{"cidr":"127.0.0.8","kind":"exempt"}`)
	exempt, told := hold(t, p.base, "127.0.0.8", 2*perIP)
	if len(exempt) != 2*perIP {
		t.Errorf("an exempt address got %d connections, then %q", len(exempt), told)
	}
	for _, c := range exempt {
		c.Close()
	}
	ops.client.CloseIdleConnections()
	eventually(t, patience, "those to be gone", func() bool { return watch.connections(t) <= 2*perIP+1 })

	// A proxy may have more than one address may, up to the total; beyond that everybody is told so.
	many, over := hold(t, p.base, "127.0.0.9", total)
	if len(many) <= perIP || !strings.Contains(over, `"code":"global_limit_exceeded"`) {
		t.Errorf("a proxy got %d connections, then %q", len(many), over)
	}
	ordinary.call(t, 200, "GET", "/health/live", "") // over the connection that it has

	for _, c := range many {
		c.Close()
	}
	wg.Wait()
	if n := held.Load(); n != 2*perIP {
		t.Errorf("%d connections were held, want %d", n, 2*perIP)
	}
	ordinary.client.CloseIdleConnections()
	eventually(t, patience, "nothing to be counted", func() bool { return watch.connections(t) == 0 })
	if _, err := p.log.await("connections are refused", p.ended); err != nil {
		t.Error(err)
	}

	// Switched off, nobody is refused, and all are still counted.
	off := serve(t, url, map[string]string{
		"CONN_LIMIT_ENABLED": "false", "CONN_LIMIT_PER_IP": "1", "CONN_LIMIT_TOTAL": "2", "METRICS_ALLOWED_IPS": "127.0.0.0/8"})
	free, told := hold(t, off.base, "127.0.0.4", 5)
	if n := newAPI(t, off.base).connections(t); len(free) != 5 || n < 5 {
		t.Errorf("without limits an address got %d connections, then %q; %d are counted", len(free), told, n)
	}
	type shown struct {
		Connections *struct {
			Total int
			Max   int `json:"max_total"`
		}
	}
	if c := data[shown](t, management(t, off, url).call(t, 200, "GET", "/api/v1/management/rate_limits", "")).Connections; c == nil || c.Total < 5 || c.Max != 0 {
		t.Errorf("without limits %+v are shown", c)
	}
}

// hold opens connections from an address, one after the other, until one is refused: what it was told. They stay open until
// the test ends.
func hold(t testing.TB, base, address string, most int) (open []net.Conn, refusal string) {
	t.Helper()
	dialer := dialerFrom(t, address)
	for range most {
		c, err := dialer.DialContext(t.Context(), "tcp", strings.TrimPrefix(base, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		_ = c.SetDeadline(time.Now().Add(patience))
		if _, err := io.WriteString(c, "GET /health/live HTTP/1.1\r\nHost: hub\r\nX-Forwarded-For: 192.0.2.1\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		res, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != http.StatusOK {
			b, _ := io.ReadAll(res.Body)
			return open, string(b)
		}
		open = append(open, c)
	}
	return open, ""
}

// Ten thousand clients that are connected and silent cost memory, and nobody else anything; when they go, all is given back.
// With the race detector they are two thousand, for the time it takes.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	const perIP = 100
	n := 10_000
	if raceDetector {
		n = 2000
	}
	if most := int(min(maxOpenFiles(), 1<<30)) - 2000; most < n { // this process runs other tests too, and hands its limit down
		n = most / perIP * perIP
		t.Logf("only %d connections: this process may open %d files", n, maxOpenFiles())
	}
	if n < perIP {
		t.Skip("this process may open too few files")
	}
	p := spawn(t, serveEnv(pgtest.New(t), map[string]string{
		"CONN_LIMIT_PER_IP": fmt.Sprint(perIP), "CONN_LIMIT_TOTAL": fmt.Sprint(n + perIP), "METRICS_ALLOWED_IPS": "127.0.0.0/8", "UPLOAD_DIR": t.TempDir(),
	}), "serve").ready(t)
	host := strings.TrimPrefix(p.base, "http://")
	watch, other := newAPI(t, p.base), newAPI(t, p.base).from(t, "127.0.0.3")
	other.call(t, 200, "GET", "/health/live", "")
	before := watch.memory(t)

	conns := make([]net.Conn, n)
	var wg sync.WaitGroup
	for g := range 16 {
		wg.Go(func() {
			answer := make([]byte, 4096)
			for i := g; i < n && !t.Failed(); i += 16 {
				d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 1, byte(1+i/perIP))}, Timeout: patience}
				c, err := d.DialContext(t.Context(), "tcp", host)
				if err != nil {
					t.Errorf("connection %d: %v", i, err)
					return
				}
				conns[i] = c
				_ = c.SetDeadline(time.Now().Add(patience))
				// One answer, so that it idles as connections do and is not waited for by the deadline of its first header.
				if _, err = io.WriteString(c, "GET /health/live HTTP/1.1\r\nHost: hub\r\n\r\n"); err == nil {
					var read int
					read, err = c.Read(answer)
					if err == nil && !strings.HasPrefix(string(answer[:read]), "HTTP/1.1 200") {
						err = errors.New(string(answer[:read]))
					}
				}
				if err != nil {
					t.Errorf("connection %d: %v", i, err)
					return
				}
			}
		})
	}
	wg.Wait()
	defer func() {
		for _, c := range conns {
			if c != nil {
				c.Close()
			}
		}
	}()
	if t.Failed() {
		return
	}
	if open := watch.connections(t); open < n {
		t.Errorf("%d of %d are open", open, n)
	}
	each := (watch.memory(t) - before) / float64(n)
	t.Logf("%d idle connections: %.1f KiB of the Go runtime each", n, each/1024)
	if each > 128<<10 {
		t.Errorf("an idle connection costs %.0f bytes", each)
	}
	// The address is at its cap, another is not.
	d := dialerFrom(t, "127.0.1.1")
	c, err := d.DialContext(t.Context(), "tcp", host)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: hub\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if res, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || res.StatusCode != 503 {
		t.Errorf("one more of an address: %v", err)
	}
	other.client.CloseIdleConnections()
	other.call(t, 200, "GET", "/health/live", "")
	for _, c := range conns {
		c.Close()
	}
	other.client.CloseIdleConnections()
	eventually(t, patience, "nothing to be counted", func() bool { return watch.connections(t) == 0 })
}

// memory is what a hub's Go runtime holds, in bytes: heap and stacks in use.
func (a *api) memory(t testing.TB) float64 {
	t.Helper()
	sum := 0.
	for _, name := range []string{"go_memstats_heap_inuse_bytes", "go_memstats_stack_inuse_bytes"} {
		v, err := strconv.ParseFloat(a.metric(t, name), 64)
		if err != nil {
			t.Fatal(err)
		}
		sum += v
	}
	return sum
}
