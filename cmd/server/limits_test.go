package main

import (
	"net/http"
	"os"
	"path/filepath"
	"testing"

	"converger/internal/devpg"
)

// A limit is a limit over three nodes, whichever is asked: nearly so where every node counts, exactly where one does.
func TestLimitsHoldOverNodes(t *testing.T) {
	t.Parallel()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(tempDir(t), ".dev")
	p := spawn(t, map[string]string{"PG_BIN": found[0].Dir,
		"RATE_LIMITS": `{"activity_create":{"limit":60,"scale_ms":86400000},"token_generate":{"limit":10,"scale_ms":86400000}}`},
		"dev", "--dir", dir, "--nodes", "3", "--addr", "127.0.0.1:0")
	if _, err := p.out.await("node3 http", p.ended); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	d, err := demoFlags{Dir: dir}.read()
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range d.Nodes {
		eventually(t, patience, "three members at "+n.BaseURL, func() bool { return metric(t, n.BaseURL, visible) == "3" })
	}
	hook := d.Channels["webhook"]
	chat := d.by(t).newConversation(t, hook.ID)
	offer := func(times, good int, path, body string, headers ...string) (admitted int) {
		for i := range times {
			a, err := newAPI(t, d.Nodes[i%3].BaseURL, headers...).try(t.Context(), "POST", path, body)
			switch {
			case err != nil:
				t.Fatal(err)
			case a.status == good:
				admitted++
			case a.status != http.StatusTooManyRequests:
				t.Fatalf("POST %s: %s", path, a)
			}
		}
		return admitted
	}
	sent := offer(150, http.StatusCreated, "/api/v1/conversations/"+chat+"/activities", `{"text":"once more"}`, "X-Api-Key", d.Tenant.APIKey)
	if sent < 60 || sent > 63 {
		t.Errorf("%d activities of a limit of 60 were admitted", sent)
	}
	made := offer(30, http.StatusOK, "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"}}`, "Authorization", "Bearer "+hook.Secret)
	if made != 10 {
		t.Errorf("%d tokens of a limit of 10 were admitted", made)
	}
	for _, n := range d.Nodes {
		if v := metric(t, n.BaseURL, `converger_rate_limit_sync_dropped_total{reason="malformed"}`); v != "0" {
			t.Errorf("%s messages of other nodes could not be read at %s", v, n.BaseURL)
		}
	}
}
