package main

import (
	"net/http"
	"strings"
	"syscall"
	"testing"
)

// A provider that has proved itself to one node is known to the others, and to that one after it was killed: strangers who
// go on spending the budget of who has not keep it out of none.
func TestProofsTravelAndOutliveARestart(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 2, map[string]string{"TRUSTED_PROXIES": "127.0.0.1", "RATE_LIMITS": `{"inbound":{"limit":20,"scale_ms":86400000}}`}, nil)
	a, b := f.nodes[0], f.nodes[1]
	const secret, provider, newcomer, stranger = "app-secret-for-tests", "198.51.100.1", "198.51.100.2", "203.0.113.66"
	ch := newCustomer(t, f.ops, "Tenant").newChannel(t, "whatsapp_meta", "inbound", map[string]any{
		"access_token": "EAAtoken", "phone_number_id": "106540352242922", "app_secret": secret, "verify_token": "verify"})
	const out = 1 // refused by the limit in question
	post := func(n *fleetNode, from, secret string) int {
		t.Helper()
		const body = `{"object":"whatsapp_business_account","entry":[]}`
		got, err := n.api.try(t.Context(), "POST", "/api/v1/channels/"+ch.ID+"/inbound", body,
			"X-Forwarded-For", from, "X-Hub-Signature-256", metaSignature(body, secret))
		if err != nil {
			t.Fatal(err)
		}
		if got.status == http.StatusTooManyRequests && strings.HasPrefix(got.header.Get("RateLimit-Policy"), `"inbound";`) {
			return out
		}
		return got.status
	}
	if got := post(a, provider, secret); got != http.StatusOK {
		t.Fatalf("the provider's first webhook: %d", got)
	}
	for _, n := range f.nodes {
		eventually(t, patience, "strangers to have spent their budget", func() bool { return post(n, stranger, "a guess") == out })
	}
	spent := func(n *fleetNode) {
		t.Helper()
		if got := post(n, newcomer, secret); got != out {
			t.Errorf("an address that has proved nothing gets %d: the test shows nothing", got)
		}
	}
	spent(a)
	spent(b)
	eventually(t, patience, "the proof to be known to the other node", func() bool { return post(b, provider, secret) == http.StatusOK })
	a.restart(t, syscall.SIGKILL)
	spent(a)
	if got := post(a, provider, secret); got != http.StatusOK {
		t.Errorf("a known provider at a node that was restarted: %d", got)
	}
}
