package main

import (
	"net/http"
	"syscall"
	"testing"
	"time"
)

// Nodes are restarted one after the other at their addresses, then one is killed and started again, all under load. What
// was spent stays spent, nobody is unlimited in between nor locked out, and nobody meets an error but who calls the node
// that is away.
func TestRestartsUnderLoad(t *testing.T) {
	t.Parallel()
	const day, window = 24 * time.Hour, 3 * time.Second
	f := newFleet(t, 3, map[string]string{"RATE_LIMITS": `{"token_generate":{"limit":10,"scale_ms":86400000}}`}, nil)
	spent, busy, quiet := newCustomer(t, f.ops, "Spent"), newCustomer(t, f.ops, "Busy"), newCustomer(t, f.ops, "Quiet")
	hook := spent.newChannel(t, "echo", "outbound", nil)
	f.limit(t, spent, "api_read", 60, day)
	f.limit(t, busy, "api_read", 30, window)
	f.limit(t, quiet, "api_read", 300, 2*time.Second)
	const list, tokens, body = "/api/v1/conversations?limit=1", "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"}}`
	key := func(c customer) []string { return []string{"X-Api-Key", c.api.header.Get("X-Api-Key")} }
	bearer := []string{"Authorization", "Bearer " + hook.Secret}

	// All is spent, at whichever node.
	exhaust := func(method, path, body string, headers ...string) {
		t.Helper()
		eventually(t, patience, "all nodes to refuse "+path, func() bool {
			refusals := 0
			for _, n := range f.nodes {
				a, err := n.api.try(t.Context(), method, path, body, headers...)
				if err != nil {
					t.Fatal(err)
				}
				if a.status == http.StatusTooManyRequests {
					refusals++
				}
			}
			return refusals == len(f.nodes)
		})
	}
	exhaust("GET", list, "", key(spent)...)
	exhaust("POST", tokens, body, bearer...)

	gone := f.startPress(t, 200, day, 50*time.Millisecond, "GET", list, "", key(spent)...)
	gated := f.startPress(t, 200, day, 50*time.Millisecond, "POST", tokens, body, bearer...)
	flood := f.startPress(t, 200, window, 10*time.Millisecond, "GET", list, "", key(busy)...)
	calm := f.startPress(t, 200, 2*time.Second, 100*time.Millisecond, "GET", list, "", key(quiet)...)
	for i, n := range f.nodes {
		began := time.Now()
		n.restart(t, syscall.SIGTERM)
		more, _ := gone.count()
		t.Logf("node %d restarted in %s: %d more admitted", i+1, time.Since(began).Round(time.Millisecond), more)
	}
	f.whole(t, 3)
	tokensBefore, _ := gated.count()
	began := time.Now()
	f.nodes[1].restart(t, syscall.SIGKILL)
	t.Logf("killed and restarted in %s", time.Since(began).Round(time.Millisecond))
	f.whole(t, 3)
	tokensAfter, _ := gated.count()
	t.Logf("tokens: %d in the roll, %d in the kill", tokensBefore, tokensAfter-tokensBefore)

	for what, p := range map[string]*press{"spent": gone, "tokens": gated, "flood": flood, "quiet": calm} {
		p.healthy(t, what)
	}
	flood.inWindows(t, "flood", 30, 0.1, 2)
	if n, _ := gone.count(); n != 0 {
		t.Errorf("%d requests were admitted of a budget that was spent", n)
	}
	if _, n := calm.count(); n != 0 {
		t.Errorf("%d requests of a tenant within its limit were refused", n)
	}
}
