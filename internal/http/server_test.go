package http

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/migrations/pgtest"
)

func TestHealth(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var database, directory error
	var draining bool
	check := func(err *error) func(context.Context) error {
		return func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			return *err
		}
	}
	f := newFront(t, func(d *Deps) {
		d.Checks = []Check{{Name: "database", Run: check(&database)}, {Name: "directory", Run: check(&directory), Degrades: true}}
		d.Draining = func() bool { mu.Lock(); defer mu.Unlock(); return draining }
	})
	set := func(db, dir error, drain bool) {
		mu.Lock()
		defer mu.Unlock()
		database, directory, draining = db, dir, drain
		f.health.mu.Lock()
		f.health.last = nil // the test does not wait for the answer to age
		f.health.mu.Unlock()
	}
	for _, method := range []string{"GET", "HEAD"} {
		for _, path := range []string{"/health/live", "/health/ready"} {
			a := f.call(t, method, path, "")
			if a.StatusCode != 200 || a.Header.Get("Cache-Control") != "no-store" {
				t.Errorf("%s %s: %s %v", method, path, a, a.Header)
			}
		}
	}
	set(nil, errors.New("older than its time to live"), false)
	a := f.call(t, "GET", "/health/ready", "")
	if a.is(t, 200, ""); a.get(t, "status") != "ready" || !strings.Contains(string(a.body), "older than") {
		t.Errorf("degraded: %s", a)
	}
	set(errors.New("does not answer"), nil, false)
	a = f.call(t, "GET", "/health/ready", "")
	if a.StatusCode != 503 || a.get(t, "status") != "unavailable" || !strings.Contains(fmt.Sprint(a.get(t, "reasons")), "does not answer") {
		t.Errorf("no database: %s", a)
	}
	f.call(t, "GET", "/health/live", "").is(t, 200, "")
	set(nil, nil, true)
	if a = f.call(t, "GET", "/health/ready", ""); a.StatusCode != 503 || a.get(t, "status") != "draining" {
		t.Errorf("draining: %s", a)
	}
}

// Probes are outside every client's budget, and a flood of them reaches the checks twice a second at most.
func TestProbesAreNotLimited(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	asked := 0
	f := newFront(t, func(d *Deps) {
		d.MetricsNets = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")} // httptest's address
		d.Checks = []Check{{Name: "database", Run: func(context.Context) error {
			mu.Lock()
			defer mu.Unlock()
			asked++
			return nil
		}}}
	})
	for range 40 {
		f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", "cvg_live_x"))
	}
	began := time.Now()
	for range 40 {
		for _, path := range []string{"/health/live", "/health/ready", "/metrics"} {
			f.call(t, "GET", path, "").is(t, 200, "")
		}
	}
	if most := 2 + int(time.Since(began)/checkEvery); asked > most {
		t.Errorf("40 rounds of probes asked the database %d times, want at most %d", asked, most)
	}
}

func TestMetricsAccess(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.call(t, "GET", "/metrics", "").is(t, 404, codeNotFound)
	f = newFront(t, func(d *Deps) { d.MetricsToken = "the metrics token" })
	f.call(t, "GET", "/metrics", "").is(t, 401, codeInvalidCredential)
	f.call(t, "GET", "/metrics", "", bearer("the metrics toke")).is(t, 401, codeInvalidCredential)
	f.call(t, "GET", "/metrics", "", bearer("")).is(t, 401, codeInvalidCredential)
	f.call(t, "GET", "/metrics", "", bearer("the metrics token")).is(t, 200, "")
	f = newFront(t, func(d *Deps) { d.MetricsNets = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")} })
	f.call(t, "GET", "/metrics", "", bearer("")).is(t, 401, codeInvalidCredential)
	f.call(t, "GET", "/metrics", "", from("198.51.100.4:1")).is(t, 200, "")
}

// Nothing that a caller invents becomes a series (MT-01); 429 can be told from other 4xx.
func TestMetricLabels(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	series := func() (n int, text string) {
		families, err := f.registry.Gather()
		if err != nil {
			t.Fatal(err)
		}
		var b strings.Builder
		for _, m := range families {
			if strings.HasPrefix(m.GetName(), "converger_http_") {
				n += len(m.GetMetric())
				fmt.Fprintln(&b, m)
			}
		}
		return n, b.String()
	}
	f.call(t, "GET", "/first", "") // the series of the unmatched, by method
	for _, m := range []string{"HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "X"} {
		f.call(t, m, "/first", "")
	}
	before, _ := series()
	for i := range 500 {
		f.call(t, "GET", fmt.Sprintf("/scan/%d.php?x=%d", i, i), "")
		f.call(t, fmt.Sprintf("METHOD%d", i), "/health/live", "")
		f.call(t, "GET", "/api/v1/conversations/"+uuid.NewString(), "", header("Host", fmt.Sprint("h", i)), f.apiKey())
	}
	after, text := series()
	if after > before+2 { // unmatched 4xx of "other" may be new
		t.Errorf("%d series became %d", before, after)
	}
	for _, want := range []string{`"unmatched"`, `"other"`, `"429"`, `/api/v1/conversations/{conversation_id}`} {
		if !strings.Contains(text, strings.Trim(want, `"`)) {
			t.Errorf("no series with %s", want)
		}
	}
	limitOverride(t, f, `{"limit":0,"scale_ms":1000}`, "api_read")
	exceeded := map[string]string{"bucket": "api_read"}
	refusedBefore := counter(t, f, "converger_rate_limit_exceeded_count", exceeded)
	f.call(t, "GET", "/api/v1/conversations", "", f.apiKey()).is(t, 429, codeRateLimited)
	if got := counter(t, f, "converger_http_requests_total", map[string]string{"route": "/api/v1/conversations", "method": "GET", "status": "429"}); got != 1 {
		t.Errorf("refusals counted: %v", got)
	}
	if got := counter(t, f, "converger_rate_limit_exceeded_count", exceeded); got != refusedBefore+1 {
		t.Errorf("refusals counted by the limiter: %v more", got-refusedBefore)
	}
}

func counter(t testing.TB, f *front, name string, labels map[string]string) float64 {
	t.Helper()
	families, err := f.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range families {
		if family.GetName() != name {
			continue
		}
	metrics:
		for _, m := range family.GetMetric() {
			for _, l := range m.GetLabel() {
				if want, ok := labels[l.GetName()]; ok && want != l.GetValue() {
					continue metrics
				}
			}
			// One of them is set; the limiter's count is untyped, for the sake of its name.
			return m.GetCounter().GetValue() + m.GetUntyped().GetValue()
		}
	}
	t.Fatalf("no metric %s%v", name, labels)
	return 0
}

// Forwarding headers of strangers don't move anybody to another budget (RL-31); behind a declared proxy they do.
func TestBudgetsByAddress(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")} })
	guess := func(peer string, forwarded string) int {
		return f.call(t, "GET", "/api/v1/conversations", "", from(peer), header("X-Api-Key", "cvg_live_x"), func(r *http.Request) {
			if forwarded != "" {
				for _, name := range []string{"X-Forwarded-For", "X-Real-Ip", "True-Client-Ip", "Forwarded"} {
					r.Header.Set(name, forwarded)
				}
			}
		}).StatusCode
	}
	for i := range 30 {
		if s := guess("198.51.100.7:1", fmt.Sprintf("203.0.113.%d", i)); s != 401 {
			t.Fatalf("guess %d: %d", i, s)
		}
	}
	if s := guess("198.51.100.7:1", "203.0.113.99"); s != 429 {
		t.Errorf("a stranger's header gave a new budget: %d", s)
	}
	if !strings.Contains(f.log.String(), "TRUSTED_PROXIES") || strings.Count(f.log.String(), "TRUSTED_PROXIES") != 1 {
		t.Error("one warning about forwarding headers is wanted")
	}
	if ready := f.call(t, "GET", "/health/ready", ""); !strings.Contains(string(ready.body), "TRUSTED_PROXIES") {
		t.Errorf("readiness says nothing: %s", ready)
	}
	for i, forwarded := range []string{"192.0.2.9:1111", "192.0.2.9:2222", " 192.0.2.9 ", "1.2.3.4, 192.0.2.9"} {
		for range 8 {
			guess("10.1.1.1:1", forwarded)
		}
		if s := guess("10.1.1.1:1", "192.0.2.9"); i == 3 && s != 429 {
			t.Errorf("spellings of one address have several budgets: %d", s)
		}
	}
	if s := guess("10.1.1.1:1", "192.0.2.10"); s != 401 {
		t.Errorf("the neighbour behind the proxy is refused: %d", s)
	}
	// IPv6 counts by /64.
	for i := range 30 {
		guess(fmt.Sprintf("[2001:db8:0:1::%x]:1", i), "")
	}
	if s := guess("[2001:db8:0:1::ffff]:1", ""); s != 429 {
		t.Errorf("the same /64 has two budgets: %d", s)
	}
	if s := guess("[2001:db8:0:2::1]:1", ""); s != 401 {
		t.Errorf("the next /64 is refused: %d", s)
	}
}

// dial opens a raw connection to the front's server.
func (f *front) dial(t testing.TB) net.Conn {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", must(url.Parse(f.url)).Host)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return conn
}

func (f *front) exchange(t testing.TB, request string) (*http.Response, net.Conn) {
	t.Helper()
	conn := f.dial(t)
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	return res, conn
}

// A body has one deadline: a byte now and then does not renew it. Meanwhile others are served.
// Senders that nobody knows can't take the memory of the others: beyond their share they are told to come back.
func TestBodiesShareBoundedMemory(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.BodyMemory = 8 << 20 })
	const announced, sent = 200_000, 150_000
	var refused int
	var open []net.Conn
	for range 8 {
		conn := f.dial(t)
		fmt.Fprintf(conn, "POST /api/v1/channels/%s/inbound HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", f.webhook.ID, announced, strings.Repeat("x", sent))
		// What is admitted waits for the rest and says nothing.
		_ = conn.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			open = append(open, conn)
			continue
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusServiceUnavailable || res.Header.Get("Retry-After") == "" {
			t.Errorf("answer %v, want 503 with Retry-After", res.Status)
		}
		refused++
	}
	if refused == 0 || len(open) == 0 {
		t.Errorf("%d bodies were admitted and %d refused, want some of each", len(open), refused)
	}
	conversation := f.newConversation(t)
	body := `{"text":"` + strings.Repeat("y", 60_000) + `"}`
	if a := f.call(t, "POST", "/api/v1/conversations/"+conversation.ID.String()+"/activities", body, f.apiKey()); a.StatusCode != 201 {
		t.Errorf("a tenant's post beside them: %s", a.body)
	}
	for _, conn := range open {
		_ = conn.Close()
	}
	hook := `{"text":"` + strings.Repeat("z", 60_000) + `"}`
	for deadline := time.Now().Add(10 * time.Second); ; {
		a := f.hook(t, "inbound", hook, signed(f.webhook.Secret, hook, time.Now()))
		if a.StatusCode == 201 {
			break
		}
		if a.StatusCode != 503 || time.Now().After(deadline) {
			t.Fatalf("after they left: %s", a.body)
		}
	}
	free := func() int64 { return f.strangersMemory.free.Load() + f.memory.free.Load() }
	for deadline := time.Now().Add(10 * time.Second); free() != 8<<20; { // given back a moment after the answer
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are free when nothing is read, want all", free())
		}
	}
}

func TestSlowBodyIsCut(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.BodyTimeout = 300 * time.Millisecond })
	conn := f.dial(t)
	fmt.Fprintf(conn, "POST /api/v1/channels/%s/inbound HTTP/1.1\r\nHost: x\r\nContent-Length: 2000000\r\n\r\n", f.webhook.ID)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(50 * time.Millisecond)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if _, err := conn.Write([]byte{'{'}); err != nil {
					return
				}
			case <-stop:
				return
			}
		}
	})
	res, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusRequestTimeout || !res.Close {
		t.Errorf("answer %v, close %v", res.Status, res.Close)
	}
	close(stop)
	wg.Wait()
}

// The answer to a refused request comes at once, though its body never does, and the connection ends.
func TestRefusedBodyIsNotDrained(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	big := fmt.Sprintf("POST /api/v1/channels/%s/inbound HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n", f.webhook.ID, DefaultMaxInboundBody+1)
	for name, tt := range map[string]struct {
		request string
		status  int
	}{
		"unknown path":    {"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n", 404},
		"unknown channel": {"POST /api/v1/channels/" + uuid.NewString() + "/inbound HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n", 404},
		"no key":          {"POST /api/v1/conversations HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n", 401},
		"too big":         {big, 413},
		"expects 100":     {strings.Replace(big, "\r\n\r\n", "\r\nExpect: 100-continue\r\n\r\n", 1), 413},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res, conn := f.exchange(t, tt.request)
			if res.StatusCode != tt.status || !res.Close {
				t.Errorf("answer %v, close %v; want %d and a close", res.Status, res.Close, tt.status)
			}
			if _, err := io.ReadAll(conn); err != nil && !errors.Is(err, io.EOF) && !strings.Contains(err.Error(), "reset") {
				t.Errorf("the connection stays open: %v", err)
			}
		})
	}
}

// A chunked body that exceeds the cap is cut at the cap.
func TestChunkedBodyIsCapped(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.MaxBody = 1000 })
	body := io.MultiReader(strings.NewReader(`{"text":"`), bytes.NewReader(bytes.Repeat([]byte("x"), 5000)), strings.NewReader(`"}`))
	req, err := http.NewRequestWithContext(t.Context(), "POST", f.url+"/api/v1/conversations", body)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", f.key)
	req.Header.Set("Content-Type", "application/json")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusRequestEntityTooLarge || res.Header.Get("Content-Type") != typeProblem {
		t.Errorf("%v %v", res.Status, res.Header)
	}
}

// What is no HTTP request, or could be read in two ways (UP-13), is refused by net/http ahead of the API: docs/api.md says so, and how.
func TestWhatIsNoRequest(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	text := string(must(os.ReadFile("../../docs/api.md")))
	_, documented, _ := strings.Cut(text, "What is no request")
	documented, _, _ = strings.Cut(documented, "\n\n")
	const rest = "Host: x\r\n\r\n"
	for name, tt := range map[string]struct {
		status  int
		request string
	}{
		"two lengths":        {400, "POST /api/v1/conversations HTTP/1.1\r\nContent-Length: 2\r\nContent-Length: 3\r\n" + rest + "{}x"},
		"length no number":   {400, "POST /api/v1/conversations HTTP/1.1\r\nContent-Length: -2\r\n" + rest},
		"space before colon": {400, "GET /health/live HTTP/1.1\r\nAccept : x\r\n" + rest},
		"no colon":           {400, "GET /health/live HTTP/1.1\r\nAccept\r\n" + rest},
		"control character":  {400, "GET /health/live HTTP/1.1\r\nAccept: \x01\r\n" + rest},
		"no host":            {400, "GET /health/live HTTP/1.1\r\n\r\n"},
		"two hosts":          {400, "GET /health/live HTTP/1.1\r\nHost: y\r\n" + rest},
		"no request line":    {400, "hello\r\n" + rest},
		"TLS":                {400, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"},
		"no version":         {400, "GET /health/live\r\n" + rest},
		"bad escape":         {400, "GET /%zz HTTP/1.1\r\n" + rest},
		"header too large":   {431, "GET /health/live HTTP/1.1\r\nX: " + strings.Repeat("x", 36<<10) + "\r\n" + rest},
		"address too large":  {431, "GET /" + strings.Repeat("x", 36<<10) + " HTTP/1.1\r\n" + rest},
		"unknown coding":     {501, "POST /api/v1/conversations HTTP/1.1\r\nTransfer-Encoding: xchunked\r\n" + rest + "{}"},
		"two codings":        {501, "POST /api/v1/conversations HTTP/1.1\r\nTransfer-Encoding: gzip, chunked\r\n" + rest + "{}"},
		"expectation":        {417, "POST /api/v1/conversations HTTP/1.1\r\nExpect: tea\r\nContent-Length: 2\r\n" + rest + "{}"},
		"version to come":    {505, "GET /health/live HTTP/4.0\r\n" + rest},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res, _ := f.exchange(t, tt.request)
			body, err := io.ReadAll(res.Body)
			if res.StatusCode != tt.status || !res.Close || err != nil {
				t.Errorf("%v, close %v, %v; want %d and a close", res.Status, res.Close, err, tt.status)
			}
			kind := res.Header.Get("Content-Type")
			if tt.status == http.StatusExpectationFailed {
				kind += "text/plain; charset=utf-8" // it has no body
			}
			if kind != "text/plain; charset=utf-8" || res.Header.Get("X-Request-Id") != "" || strings.HasPrefix(string(body), "{") {
				t.Errorf("%v %q", res.Header, body)
			}
			if !strings.Contains(documented, fmt.Sprintf(" %d ", tt.status)) {
				t.Errorf("docs/api.md does not say %d", tt.status)
			}
		})
	}
}

// What is a request is answered by the API, also where net/http has an answer of its own.
func TestUnusualRequests(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	for name, tt := range map[string]struct {
		status  int
		request string
	}{
		"options of all": {404, "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n"},
		"proxying":       {404, "CONNECT example.com:443 HTTP/1.1\r\nHost: x\r\n\r\n"},
		"whole address":  {404, "GET http://example.com/nothing HTTP/1.1\r\nHost: x\r\n\r\n"},
		"large header":   {404, "GET /nothing HTTP/1.1\r\nHost: x\r\nX: " + strings.Repeat("x", 36<<10-100) + "\r\n\r\n"},
		"HTTP/1.0":       {404, "GET /nothing HTTP/1.0\r\n\r\n"},
		"HTTP/2":         {404, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			res, _ := f.exchange(t, tt.request)
			if res.StatusCode != tt.status || res.Header.Get("Content-Type") != typeProblem || res.Header.Get("X-Request-Id") == "" {
				t.Errorf("%v %v, want %d", res.Status, res.Header, tt.status)
			}
		})
	}
}

func TestServerLimits(t *testing.T) {
	t.Parallel()
	s := NewServer(http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	if s.ReadHeaderTimeout <= 0 || s.WriteTimeout <= 0 || s.IdleTimeout <= 0 || s.MaxHeaderBytes <= 0 {
		t.Errorf("a phase without a limit: %+v", s)
	}
	if s.WriteTimeout <= DefaultHandlerTimeout {
		t.Error("an answer that took its full time could not be sent")
	}
	// As operators are told.
	doc := string(must(os.ReadFile("../../docs/operations.md")))
	for client, patience := range map[string]time.Duration{"connects and says nothing, or drips a header": s.ReadHeaderTimeout,
		"drips a body": DefaultBodyTimeout, "does not read its answer": s.WriteTimeout, "idles between requests": s.IdleTimeout} {
		words := fmt.Sprintf("%d s", patience/time.Second)
		if patience > time.Minute {
			words = fmt.Sprintf("%d min", patience/time.Minute)
		}
		if !strings.Contains(doc, "| "+client+" | "+words) {
			t.Errorf("a client that %s is cut after %s, which docs/operations.md does not say", client, words)
		}
	}
}

// gate is a TCP proxy in front of the database that can be shut.
type gate struct {
	listener net.Listener
	target   string
	mu       sync.Mutex
	shut     bool
	open     map[net.Conn]struct{}
}

func newGate(t testing.TB, network, target string) *gate {
	t.Helper()
	l, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{listener: l, target: target, open: map[net.Conn]struct{}{}}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { g.pipe(c, network) })
		}
	})
	t.Cleanup(func() {
		l.Close()
		g.set(true)
		wg.Wait()
	})
	return g
}

func (g *gate) pipe(c net.Conn, network string) {
	defer c.Close()
	g.mu.Lock()
	shut := g.shut
	g.open[c] = struct{}{}
	g.mu.Unlock()
	defer func() {
		g.mu.Lock()
		delete(g.open, c)
		g.mu.Unlock()
	}()
	if shut {
		return
	}
	db, err := (&net.Dialer{}).DialContext(context.Background(), network, g.target)
	if err != nil {
		return
	}
	defer db.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		_, _ = io.Copy(db, c)
		db.Close()
	}()
	_, _ = io.Copy(c, db)
	c.Close()
	<-done
}

// set shuts the gate, and cuts what goes through it, or opens it.
func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = shut
	if shut {
		for c := range g.open {
			c.Close()
		}
	}
}

// Without its database the hub says so, refuses what it refuses anyway, and goes on when the database is back.
func TestDatabaseGone(t *testing.T) {
	t.Parallel()
	direct := must(url.Parse(pgtest.New(t)))
	network, target := "tcp", direct.Host
	if dir := direct.Query().Get("host"); dir != "" { // a socket's folder
		port := direct.Query().Get("port")
		if port == "" {
			port = "5432"
		}
		network, target = "unix", dir+"/.s.PGSQL."+port
	}
	g := newGate(t, network, target)
	through := *direct
	q := through.Query()
	q.Del("host")
	q.Del("port")
	through.Host, through.RawQuery = g.listener.Addr().String(), q.Encode()
	f := newFrontAt(t, through.String())
	v := f.newConversation(t)
	path := "/api/v1/conversations/" + v.ID.String() + "/activities"
	f.call(t, "POST", path, `{"text":"before"}`, f.apiKey()).is(t, 201, "")

	g.set(true)
	hook := `{"text":"x"}`
	for name, a := range map[string]answer{
		"post":    f.call(t, "POST", path, `{"text":"lost"}`, f.apiKey()),
		"list":    f.call(t, "GET", path, "", f.apiKey()),
		"inbound": f.hook(t, "inbound", hook, signed(f.webhook.Secret, hook, time.Now())),
		"tenants": f.call(t, "POST", managementPrefix+"/tenants", `{"name":"x"}`, f.ops()),
	} {
		if a.StatusCode != 503 || a.get(t, "code") != string(codeUnavailable) || a.Header.Get("Retry-After") == "" {
			t.Errorf("%s without a database: %s", name, a)
		}
	}
	f.call(t, "GET", path, "", header("X-Api-Key", "cvg_live_x")).is(t, 401, codeInvalidCredential)
	f.call(t, "GET", "/nothing", "").is(t, 404, codeNotFound)
	f.call(t, "GET", "/health/live", "").is(t, 200, "")

	g.set(false)
	var a answer
	for began := time.Now(); time.Since(began) < 20*time.Second; {
		if a = f.call(t, "POST", path, `{"text":"after"}`, f.apiKey()); a.StatusCode == 201 {
			break
		}
	}
	a.is(t, 201, "")
	found, _, err := f.Activities.List(t.Context(), f.tenant.ID, v.ID, nil, 0, 10)
	if err != nil {
		t.Fatal(err)
	}
	var texts []string
	for _, x := range found {
		texts = append(texts, *x.Text)
	}
	if got := strings.Join(texts, ","); got != "before,after" {
		t.Errorf("stored: %s", got)
	}
}
