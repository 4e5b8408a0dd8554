package main

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/wire"
)

// newFakeHub answers with statuses in turn, then with 201, and counts the posts of each path.
func newFakeHub(t *testing.T, accept func(key string), statuses ...int) (addr string, posts func() map[string]int) {
	t.Helper()
	var mu sync.Mutex
	seen := map[string]int{}
	fake := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.URL.Path]++
		status := http.StatusCreated
		if len(statuses) > 0 {
			status, statuses = statuses[0], statuses[1:]
		}
		mu.Unlock()
		if accept != nil {
			accept(strings.Trim(r.Header.Get("Idempotency-Key"), `"`))
		}
		w.WriteHeader(status)
	}))
	t.Cleanup(fake.Close)
	return strings.TrimPrefix(fake.URL, "http://"), func() map[string]int { return seen }
}

func newConversations(n int) []*conversation {
	out := make([]*conversation, n)
	for i := range out {
		out[i] = &conversation{id: fmt.Sprintf("c%d", i), tenant: &hub.Tenant{}}
	}
	return out
}

func TestLoadPostsTheNumberAskedForToAll(t *testing.T) {
	t.Parallel()
	addr, posts := newFakeHub(t, nil)
	l := newLoad(addr, 3)
	t.Cleanup(l.close)
	n, _, err := l.run(t.Context(), newConversations(5), 0, 100)
	if n != 100 || err != nil {
		t.Fatalf("accepted %d, %v; want 100", n, err)
	}
	if got := posts(); len(got) != 5 {
		t.Errorf("posted to %v, want all five", got)
	}
}

func TestLoadEndsAtARefusal(t *testing.T) {
	t.Parallel()
	addr, _ := newFakeHub(t, nil, 201, 201, 429)
	l := newLoad(addr, 1)
	t.Cleanup(l.close)
	n, _, err := l.run(t.Context(), newConversations(1), time.Minute, 0)
	if n != 2 || err == nil || !strings.Contains(err.Error(), "429") {
		t.Errorf("accepted %d, %v; want 2 and an error that names 429", n, err)
	}
}

func TestLatenciesMatchEachPostWithItsOwnArrival(t *testing.T) {
	t.Parallel()
	r, err := wire.NewReceiver(t.Context(), loopback, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	deliver := func(key string) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, r.URL(), bytes.NewReader([]byte(`{"idempotency_key":"`+key+`"}`)))
		if err != nil {
			t.Error(err)
			return
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Error(err)
			return
		}
		resp.Body.Close()
	}
	addr, _ := newFakeHub(t, func(key string) {
		deliver("a stranger's")
		deliver(key)
	})
	took, err := latencies(t.Context(), addr, newConversations(2), r, 5)
	if err != nil || len(took) != 5 {
		t.Fatalf("%v, %v; want five", took, err)
	}
	for _, d := range took {
		if d <= 0 || d > time.Minute {
			t.Errorf("took %s", d)
		}
	}
}
