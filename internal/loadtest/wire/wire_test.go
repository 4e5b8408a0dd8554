package wire

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func newCaller(t *testing.T, base string) *Caller {
	t.Helper()
	target, err := ParseTarget(base)
	if err != nil {
		t.Fatal(err)
	}
	c := NewCaller(target)
	t.Cleanup(c.Close)
	return c
}

// The small HTTP is held against that of the standard library, which the hub uses.

func TestCallerPostsWhatNetHTTPReads(t *testing.T) {
	t.Parallel()
	type request struct{ path, apiKey, key, text string }
	var got []request
	remotes := map[string]bool{}
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var body struct{ Text string }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil {
			t.Error(err)
		}
		got = append(got, request{r.URL.Path, r.Header.Get("X-Api-Key"), r.Header.Get("Idempotency-Key"), body.Text})
		remotes[r.RemoteAddr] = true
		switch len(got) {
		case 1:
			w.WriteHeader(http.StatusCreated)
			fmt.Fprint(w, `{"data":{}}`)
		case 2:
			w.Header().Set("Retry-After", "7")
			w.Header().Set("Converger-Decided-At", "1764504000123")
			w.WriteHeader(http.StatusTooManyRequests)
			fmt.Fprint(w, `{"type":"about:blank","code": "rate_limited","detail":"slow down"}`)
		case 3:
			w.Header().Set("Connection", "close")
			w.WriteHeader(http.StatusCreated)
		case 5:
			w.WriteHeader(http.StatusNoContent)
		case 6: // chunked, with a trailer
			w.Header().Set("Trailer", "X-Late")
			for range 3 {
				fmt.Fprint(w, strings.Repeat("x", 5000))
				w.(http.Flusher).Flush()
			}
			w.Header().Set("X-Late", "1")
		}
	}))
	t.Cleanup(hub.Close)
	c := newCaller(t, hub.URL+"/base/")
	for i, want := range []Answer{{Status: 201}, {Status: 429, Code: "rate_limited", RetryAfter: 7 * time.Second, DecidedAt: 1764504000123}, {Status: 201}, {Status: 200}, {Status: 204}, {Status: 200}} {
		a, err := c.Do(t.Context(), "POST", "/x", fmt.Sprintf("X-Api-Key: cvg_live_x\r\nIdempotency-Key: \"k%d\"\r\n", i), []byte(`{"text":"hi"}`))
		if err != nil || a != want {
			t.Fatalf("post %d: %+v, %v; want %+v", i, a, err, want)
		}
	}
	want := request{"/base/x", "cvg_live_x", `"k0"`, "hi"}
	if got[0] != want {
		t.Errorf("got %+v, want %+v", got[0], want)
	}
	if len(remotes) != 2 { // one, and another after the hub closed it
		t.Errorf("%d connections, want 2", len(remotes))
	}
}

func TestCallerReportsALostConnection(t *testing.T) {
	t.Parallel()
	calls := 0
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if calls++; calls == 1 {
			panic(http.ErrAbortHandler)
		}
		w.WriteHeader(http.StatusCreated)
	}))
	t.Cleanup(hub.Close)
	c := newCaller(t, hub.URL)
	if a, err := c.Do(t.Context(), "POST", "/", "", nil); err == nil {
		t.Errorf("a lost connection gave %+v", a)
	}
	if a, err := c.Do(t.Context(), "POST", "/", "", nil); err != nil || a.Status != 201 {
		t.Errorf("the next post: %+v, %v", a, err)
	}
}

func TestCallerIsAborted(t *testing.T) {
	t.Parallel()
	arrived := make(chan struct{})
	hub := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // only then the server looks whether the client has gone
		close(arrived)
		<-r.Context().Done()
	}))
	t.Cleanup(hub.Close)
	c := newCaller(t, hub.URL)
	go func() {
		<-arrived
		c.Abort()
	}()
	if a, err := c.Do(t.Context(), "POST", "/", "", nil); err == nil {
		t.Errorf("an aborted request gave %+v", a)
	}
	if _, err := c.Do(t.Context(), "POST", "/", "", nil); !errors.Is(err, ErrAborted) {
		t.Errorf("after it: %v", err)
	}
}

func TestCallerSpeaksTLS(t *testing.T) {
	t.Parallel()
	hub := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	hub.Config.ErrorLog = log.New(io.Discard, "", 0)
	t.Cleanup(hub.Close)
	// Its certificate is nobody's: that it is checked is what can be seen.
	if a, err := newCaller(t, hub.URL).Do(t.Context(), "GET", "/", "", nil); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestParseTarget(t *testing.T) {
	t.Parallel()
	for base, want := range map[string]Target{
		"http://127.0.0.1:4000":       {Address: "127.0.0.1:4000", Host: "127.0.0.1:4000"},
		"https://hub.example.com":     {Secure: true, Address: "hub.example.com:443", Host: "hub.example.com"},
		"http://[::1]/":               {Address: "[::1]:80", Host: "[::1]"},
		"https://h.test:8443/a%20b//": {Secure: true, Address: "h.test:8443", Host: "h.test:8443", Path: "/a%20b"},
	} {
		got, err := ParseTarget(base)
		if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Target{}, "Control")); err != nil || diff != "" {
			t.Errorf("%s: %v\n%s", base, err, diff)
		}
	}
	for _, base := range []string{"", "127.0.0.1:4000", "ftp://h", "http://", "http://u:secret@h", "http://h?q", "http://h#f", "http://h:port"} {
		if got, err := ParseTarget(base); err == nil || strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: %+v, %v", base, got, err)
		}
	}
}

func TestReceiverAnswersNetHTTP(t *testing.T) {
	t.Parallel()
	r, err := NewReceiver(t.Context(), "127.0.0.1:0", 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	post := func(id, body string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL(), bytes.NewReader([]byte(body)))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("webhook-id", id)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if b, err := io.ReadAll(resp.Body); resp.StatusCode != http.StatusNoContent || len(b) > 0 || err != nil {
			t.Errorf("answer %s %q, %v", resp.Status, b, err)
		}
	}
	post("unobserved", strings.Repeat("x", 10_000))

	var mu sync.Mutex
	type arrival struct{ id, key string }
	var got []arrival
	r.Observe(func(a Arrival) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(a.At) > time.Minute {
			t.Errorf("arrived at %s", a.At)
		}
		got = append(got, arrival{a.ID, a.Key()})
	})
	post("d1", `{"seq":1,"idempotency_key":"bench-1","text":"x"}`)
	post("d2", `{"seq":2,"idempotency_key":null}`)
	r.Observe(nil)
	post("d3", `{}`)
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]arrival{{"d1", "bench-1"}, {"d2", ""}}, got, cmp.AllowUnexported(arrival{})); diff != "" {
		t.Error(diff)
	}
	if n := r.Arrived(); n != 4 {
		t.Errorf("%d arrived, want 4", n)
	}
}
