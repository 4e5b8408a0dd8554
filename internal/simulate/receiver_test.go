package simulate

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"converger/internal/signature"
)

const channelSecret = "3q2-7wAAAABJb2FkZWRTZWNyZXRPZlRoaXJ0eVR3b0I"

// endpoint is a running Receiver.
type endpoint struct {
	url  string
	out  *output
	stop func() // ends it and waits; safe to call again
}

func newEndpoint(t *testing.T, o ReceiverOptions) *endpoint {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	e := &endpoint{out: &output{}}
	ready, done := make(chan net.Addr, 1), make(chan struct{})
	o.Addr, o.Out = "127.0.0.1:0", e.out
	o.Ready = func(addr net.Addr) { ready <- addr }
	go func() {
		defer close(done)
		if err := Receiver(ctx, o); err != nil {
			t.Errorf("Receiver: %v", err)
		}
	}()
	e.stop = func() { cancel(); <-done }
	t.Cleanup(e.stop)
	select {
	case addr := <-ready:
		e.url = "http://" + addr.String()
	case <-done:
		t.FailNow()
	}
	return e
}

// delivery makes a request as the hub does: both schemes, the reference library
// signing the standard one.
func delivery(t *testing.T, url, id, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/hook", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	library, err := standardwebhooks.NewWebhookRaw(signature.StandardKey(channelSecret))
	if err != nil {
		t.Fatal(err)
	}
	standard, err := library.Sign(id, now, []byte(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(standardwebhooks.HeaderWebhookID, id)
	req.Header.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(now.Unix(), 10))
	req.Header.Set(standardwebhooks.HeaderWebhookSignature, standard)
	req.Header.Set(deliveryHeader, id)
	req.Header.Set(eventHeader, "activity.created")
	if err := signature.SignTimestamped(req.Header, []byte(body), [][]byte{[]byte(channelSecret)}, now); err != nil {
		t.Fatal(err)
	}
	return req
}

// do sends without following redirects and reads the whole answer.
func do(t *testing.T, req *http.Request) (*http.Response, []byte, error) {
	t.Helper()
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	return resp, body, err
}

func status(t *testing.T, req *http.Request) int {
	t.Helper()
	resp, _, err := do(t, req)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode
}

func TestReceiverVerifies(t *testing.T) {
	t.Parallel()
	const body = `{"type":"message","text":"Grüße"}`
	tests := []struct {
		name    string
		secrets []string
		change  func(*http.Request)
		want    []string
	}{
		{"valid", []string{channelSecret}, nil,
			[]string{"converger VALID", "standard VALID", `activity.created message "Grüße"`, "/hook", "delivery dlv_1", "try 1", "-> 200", "VALID × 1"}},
		{"previous secret", []string{"new", channelSecret}, nil, []string{"converger VALID", "standard VALID"}},
		{"pasted form of the secret", []string{"whsec_" + base64.StdEncoding.EncodeToString([]byte(channelSecret))}, nil,
			[]string{"standard VALID", "converger INVALID (no signature matches)", "INVALID × 1"}},
		{"other secret", []string{"other"}, nil,
			[]string{"converger INVALID (no signature matches)", "standard INVALID (no signature matches)"}},
		{"stale", []string{channelSecret}, func(r *http.Request) { r.Header.Set("webhook-timestamp", "1700000000") },
			[]string{"converger VALID", "standard INVALID (timestamp outside the tolerance", "INVALID × 1"}},
		{"unsigned", []string{channelSecret}, func(r *http.Request) { r.Header.Del("x-converger-signature") },
			[]string{"converger INVALID (header missing"}},
		{"no secret", nil, nil, []string{"converger UNCHECKED", "standard UNCHECKED", "UNCHECKED × 1"}},
		{"empty secret", []string{""}, nil, []string{"converger UNCHECKED", "standard UNCHECKED"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, ReceiverOptions{Secrets: tt.secrets})
			req := delivery(t, e.url, "dlv_1", body)
			if tt.change != nil {
				tt.change(req)
			}
			if got := status(t, req); got != http.StatusOK {
				t.Errorf("status %d", got)
			}
			e.stop()
			e.out.want(t, append(tt.want, "listening on "+e.url, "deliveries: 1, repeats: 0")...)
			for _, secret := range tt.secrets {
				if secret != "" && strings.Contains(e.out.String(), secret) {
					t.Error("the output holds a secret")
				}
			}
		})
	}
}

func TestReceiverCountsTriesAndFailsTheFirst(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, ReceiverOptions{
		Behaviour: Behaviour{FailFirst: 2, Status: http.StatusServiceUnavailable, RetryAfter: 1500 * time.Millisecond},
	})
	for try, want := range []int{503, 503, 200, 200} {
		for _, id := range []string{"dlv_1", "dlv_2"} {
			resp, _, err := do(t, delivery(t, e.url, id, "{}"))
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != want {
				t.Errorf("%s, try %d: status %d, want %d", id, try+1, resp.StatusCode, want)
			}
			if got, want := resp.Header.Get("Retry-After"), map[int]string{503: "2"}[want]; got != want {
				t.Errorf("%s, try %d: Retry-After %q, want %q", id, try+1, got, want)
			}
		}
	}
	e.stop()
	e.out.want(t, "delivery dlv_2  try 4", "deliveries: 8, repeats: 6", "answers: 200 × 4, 503 × 4")
}

func TestReceiverMisbehaves(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name      string
		behaviour Behaviour
		status    int // 0: no answer
		length    int
		location  string
	}{
		{"gone", Behaviour{Status: 410}, 410, 0, ""},
		{"redirect", Behaviour{Redirect: "http://127.0.0.1:1/else"}, 307, 0, "http://127.0.0.1:1/else"},
		{"redirect with a status", Behaviour{Redirect: "/else", Status: 301}, 301, 0, "/else"},
		{"dropped", Behaviour{DropConnection: true}, 0, 0, ""},
		{"huge", Behaviour{HugeBody: 5<<20 + 1}, 200, 5<<20 + 1, ""},
		{"slow, bounded", Behaviour{HugeBody: 3, SlowBody: time.Millisecond}, 200, 3, ""},
		{"always at random", Behaviour{FailRate: 1}, 500, 0, ""},
		{"delayed", Behaviour{Delay: 50 * time.Millisecond}, 200, 0, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, ReceiverOptions{Behaviour: tt.behaviour})
			begin := time.Now()
			resp, body, err := do(t, delivery(t, e.url, "dlv_1", "{}"))
			if took := time.Since(begin); took < tt.behaviour.Delay {
				t.Errorf("answered after %s, want %s or more", took, tt.behaviour.Delay)
			}
			if tt.status == 0 {
				if !errors.Is(err, io.EOF) {
					t.Errorf("error %v, want a connection closed without an answer", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if resp.StatusCode != tt.status || len(body) != tt.length || resp.Header.Get("Location") != tt.location {
				t.Errorf("status %d, %d B, location %q; want %d, %d B, %q", resp.StatusCode, len(body),
					resp.Header.Get("Location"), tt.status, tt.length, tt.location)
			}
		})
	}
}

// A receiver that is told to stop does not wait for what would never end.
func TestReceiverStopsWhileItMisbehaves(t *testing.T) {
	t.Parallel()
	for name, behaviour := range map[string]Behaviour{
		"hang":  {Hang: true},
		"delay": {Delay: time.Hour},
		"slow":  {SlowBody: time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, ReceiverOptions{Behaviour: behaviour})
			printed := e.out.await("delivery dlv_1")
			answered := make(chan error, 1)
			req := delivery(t, e.url, "dlv_1", "{}")
			go func() {
				_, _, err := do(t, req)
				answered <- err
			}()
			<-printed
			select {
			case err := <-answered:
				t.Fatalf("answered before the stop: %v", err)
			default:
			}
			begin := time.Now()
			e.stop()
			if took := time.Since(begin); took >= stopGrace {
				t.Errorf("stopped after %s: the connection was waited for", took)
			}
			if err := <-answered; err == nil {
				t.Error("answered properly after all")
			}
			e.out.want(t, "deliveries: 1,")
		})
	}
}

// A client that leaves ends the wait for it; the bubble fails if the handler
// stayed.
func TestHangEndsWithTheClient(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		r := newReceiver(ReceiverOptions{Out: io.Discard}, Behaviour{Hang: true})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		req := httptest.NewRequestWithContext(ctx, http.MethodPost, "/", nil)
		begin := time.Now()
		func() {
			defer func() {
				if got, _ := recover().(error); !errors.Is(got, http.ErrAbortHandler) {
					t.Errorf("the handler ended with %v, want an aborted connection", got)
				}
			}()
			r.ServeHTTP(httptest.NewRecorder(), req)
		}()
		if took := time.Since(begin); took != time.Minute {
			t.Errorf("hung for %s, want until the client left after a minute", took)
		}
	})
}

func TestReceiverFailRate(t *testing.T) {
	t.Parallel()
	run := func(seed uint64) (string, int) {
		r := newReceiver(ReceiverOptions{Out: io.Discard}, Behaviour{FailRate: 0.3, Seed: seed, Status: 500})
		var pattern strings.Builder
		for i := range 2000 {
			req := httptest.NewRequest(http.MethodPost, "/", nil)
			req.Header.Set(deliveryHeader, strconv.Itoa(i))
			w := httptest.NewRecorder()
			r.ServeHTTP(w, req)
			pattern.WriteByte("0123456789"[w.Code/100])
		}
		return pattern.String(), strings.Count(pattern.String(), "5")
	}
	first, failed := run(1)
	if failed < 500 || failed > 700 {
		t.Errorf("%d of 2000 failed, want about 600", failed)
	}
	if again, _ := run(1); again != first {
		t.Error("the same seed fails others")
	}
	if other, _ := run(2); other == first {
		t.Error("another seed fails the same")
	}
}

func TestReceiverRemembersTheLastIDs(t *testing.T) {
	t.Parallel()
	r := newReceiver(ReceiverOptions{Out: io.Discard}, Behaviour{Status: 200})
	r.mu.Lock()
	defer r.mu.Unlock()
	const n = 2*maxRemembered + 17
	for i := range n {
		if got := r.count(fmt.Sprint(i)); got != 1 {
			t.Fatalf("id %d: try %d", i, got)
		}
	}
	if len(r.tries) != maxRemembered || len(r.order) != maxRemembered {
		t.Errorf("%d and %d ids kept, want %d", len(r.tries), len(r.order), maxRemembered)
	}
	for _, kept := range []int{n - 1, n - maxRemembered} {
		if got := r.count(fmt.Sprint(kept)); got != 2 {
			t.Errorf("id %d: try %d, want 2", kept, got)
		}
	}
	if got := r.count(fmt.Sprint(n - maxRemembered - 1)); got != 1 {
		t.Errorf("the first id beyond those kept: try %d, want 1", got)
	}
	for range 2 {
		if got := r.count(""); got != 1 {
			t.Errorf("without an id: try %d, want 1", got)
		}
	}
}

func TestReceiverRefusesLargeBodies(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, ReceiverOptions{ShowBody: true})
	if got := status(t, delivery(t, e.url, "dlv_1", strings.Repeat("x", maxDelivery+1))); got != http.StatusRequestEntityTooLarge {
		t.Errorf("status %d, want 413", got)
	}
	if got := status(t, delivery(t, e.url, "dlv_2", strings.Repeat("x", maxDelivery))); got != http.StatusOK {
		t.Errorf("status %d at the limit, want 200", got)
	}
	e.stop()
	e.out.want(t, "unreadable body", "answers: 200 × 1, 413 × 1")
	req := httptest.NewRequest(http.MethodGet, "/", nil)
	w := httptest.NewRecorder()
	newReceiver(ReceiverOptions{Out: io.Discard}, Behaviour{}).ServeHTTP(w, req)
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("GET: status %d, want 405", w.Code)
	}
}

// Whoever posts must not be able to steer the terminal.
func TestReceiverPrintsNoControlCharacters(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	r := newReceiver(ReceiverOptions{Out: &out, ShowBody: true}, Behaviour{Status: 200})
	req := httptest.NewRequest(http.MethodPost, "/a%1b%0ab", strings.NewReader("{\"text\":\"a\\u001b[2J\"}\nsecond\x1b[31m\rline"))
	req.Header[deliveryHeader] = []string{"id\x1b\nforged line"}
	req.Header[eventHeader] = []string{"event\x9b\u202e"}
	r.ServeHTTP(httptest.NewRecorder(), req)
	for _, bad := range "\x1b\r\u009b\u202e" {
		if strings.ContainsRune(out.String(), bad) {
			t.Errorf("%q in the output %q", bad, &out)
		}
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) != 3 || !strings.Contains(lines[2], "second [31m line") {
		t.Errorf("want one line and two of the body, got %q", lines)
	}
}

func TestReceiverOptions(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name string
		o    ReceiverOptions
		want string
	}{
		{"no output", ReceiverOptions{Addr: "127.0.0.1:0"}, "no writer"},
		{"no port", ReceiverOptions{Addr: "127.0.0.1", Out: io.Discard}, "port"},
		{"every interface", ReceiverOptions{Addr: ":0", Out: io.Discard}, "--yes"},
		{"every interface, v4", ReceiverOptions{Addr: "0.0.0.0:0", Out: io.Discard}, "--yes"},
		{"fail first", ReceiverOptions{Addr: "127.0.0.1:0", Out: io.Discard, Behaviour: Behaviour{FailFirst: -1}}, "fail first"},
		{"fail rate", ReceiverOptions{Addr: "127.0.0.1:0", Out: io.Discard, Behaviour: Behaviour{FailRate: 1.1}}, "fail rate"},
		{"fail rate NaN", ReceiverOptions{Addr: "127.0.0.1:0", Out: io.Discard, Behaviour: Behaviour{FailRate: math.NaN()}}, "fail rate"},
		{"status", ReceiverOptions{Addr: "127.0.0.1:0", Out: io.Discard, Behaviour: Behaviour{Status: 99}}, "status 99"},
		{"delay", ReceiverOptions{Addr: "127.0.0.1:0", Out: io.Discard, Behaviour: Behaviour{Delay: -1}}, "negative"},
		{"hang and drop", ReceiverOptions{Addr: "127.0.0.1:0", Out: io.Discard, Behaviour: Behaviour{Hang: true, DropConnection: true}}, "exclude"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			tt.o.Ready = func(net.Addr) { cancel() } // so that a missing check fails instead of hanging
			if err := Receiver(ctx, tt.o); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}

	ctx, cancel := context.WithCancel(t.Context())
	o := ReceiverOptions{Addr: ":0", Out: io.Discard, Yes: true, Ready: func(net.Addr) { cancel() }}
	if err := Receiver(ctx, o); err != nil {
		t.Errorf("every interface with Yes: %v", err)
	}
}
