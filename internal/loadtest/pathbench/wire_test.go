package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

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
			http.Error(w, "slow down", http.StatusTooManyRequests)
		case 3:
			w.Header().Set("Connection", "close")
			w.WriteHeader(http.StatusCreated)
		}
	}))
	t.Cleanup(hub.Close)
	c := newCaller(strings.TrimPrefix(hub.URL, "http://"))
	t.Cleanup(c.close)
	conv := &conversation{id: "c1", tenant: &tenant{apiKey: "cvg_live_x"}}
	for i, want := range []int{201, 429, 201, 200} {
		status, err := c.post(t.Context(), conv, fmt.Sprintf("k%d", i), "hi")
		if err != nil || status != want {
			t.Fatalf("post %d: %d, %v; want %d", i, status, err, want)
		}
	}
	want := request{"/api/v1/conversations/c1/activities", "cvg_live_x", `"k0"`, "hi"}
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
	c := newCaller(strings.TrimPrefix(hub.URL, "http://"))
	t.Cleanup(c.close)
	conv := &conversation{id: "c1", tenant: &tenant{}}
	if status, err := c.post(t.Context(), conv, "k", "hi"); err == nil {
		t.Errorf("a lost connection gave %d", status)
	}
	if status, err := c.post(t.Context(), conv, "k", "hi"); err != nil || status != 201 {
		t.Errorf("the next post: %d, %v", status, err)
	}
}

func TestReceiverAnswersNetHTTP(t *testing.T) {
	t.Parallel()
	r, err := newReceiver(t.Context(), 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	post := func(id, body string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.url(), bytes.NewReader([]byte(body)))
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
	var got []arrival
	r.observe(func(a arrival) {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(a.at) > time.Minute {
			t.Errorf("arrived at %s", a.at)
		}
		a.at = time.Time{}
		got = append(got, a)
	})
	post("d1", `{"seq":1,"idempotency_key":"bench-1","text":"x"}`)
	post("d2", `{"seq":2,"idempotency_key":null}`)
	r.observe(nil)
	post("d3", `{}`)
	mu.Lock()
	defer mu.Unlock()
	if diff := cmp.Diff([]arrival{{key: "bench-1", id: "d1"}, {id: "d2"}}, got, cmp.AllowUnexported(arrival{})); diff != "" {
		t.Error(diff)
	}
	if n := r.arrived.Load(); n != 4 {
		t.Errorf("%d arrived, want 4", n)
	}
}
