package main

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"converger/internal/devpg"
	"converger/migrations/pgtest"
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
	alone := 0.0 // on a machine so busy that an owner was not in time
	for _, n := range d.Nodes {
		for _, reason := range []string{"timeout", "unreachable"} {
			v, err := strconv.ParseFloat(metric(t, n.BaseURL, `converger_rate_limit_fallbacks_total{backend="owner",reason="`+reason+`"}`), 64)
			if err != nil {
				t.Fatal(err)
			}
			alone += v
		}
	}
	if made != 10 && (alone == 0 || made < 10 || made > 10+3*4) {
		t.Errorf("%d tokens of a limit of 10 were admitted, %v decisions without the owner", made, alone)
	}
	for _, n := range d.Nodes {
		if v := metric(t, n.BaseURL, `converger_rate_limit_sync_dropped_total{reason="malformed"}`); v != "0" {
			t.Errorf("%s messages of other nodes could not be read at %s", v, n.BaseURL)
		}
	}
}

// A node that starts knows what the others have admitted before it takes its first request: a deploy does not loosen a
// limit, and neither does a node that was killed.
func TestStartDoesNotLoosenALimit(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	var lc net.ListenConfig
	l, err := lc.Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_, members, err := nodeAddresses(t.Context(), l, "127.0.0.1", "127.0.0.1:0", 2)
	if err != nil {
		t.Fatal(err)
	}
	node := func(i int) *program {
		return spawn(t, serveEnv(url, map[string]string{
			"UPLOAD_DIR": t.TempDir(), "CLUSTER_BIND": members[i], "CLUSTER_PEERS": strings.Join(members, ","), "METRICS_ALLOWED_IPS": "127.0.0.1",
			"RATE_LIMITS": `{"activity_create":{"limit":20,"scale_ms":86400000},"token_generate":{"limit":5,"scale_ms":86400000}}`,
		}), "serve").ready(t)
	}
	first := node(0)
	c := newCustomer(t, management(t, first, url), "Tenant")
	hook := c.newChannel(t, "echo", "outbound", nil)
	chat := c.newConversation(t, hook.ID)
	post := func(p *program, path, body string, headers ...string) int {
		t.Helper()
		a, err := newAPI(t, p.base, headers...).try(t.Context(), "POST", path, body)
		if err != nil {
			t.Fatal(err)
		}
		return a.status
	}
	say := func(p *program) int { // counted by every node
		t.Helper()
		return post(p, "/api/v1/conversations/"+chat+"/activities", `{"text":"once more"}`, "X-Api-Key", c.api.header.Get("X-Api-Key"))
	}
	token := func(p *program) int { // counted by one
		t.Helper()
		return post(p, "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"}}`, "Authorization", "Bearer "+hook.Secret)
	}
	for range 20 {
		if got := say(first); got != http.StatusCreated {
			t.Fatal(got)
		}
	}
	for range 5 {
		if got := token(first); got != http.StatusOK {
			t.Fatal(got)
		}
	}
	second := node(1)
	refuses := func(when string) {
		t.Helper()
		if a, b := say(second), token(second); a != http.StatusTooManyRequests || b != http.StatusTooManyRequests {
			t.Errorf("%s an activity is answered %d, a token %d", when, a, b)
		}
	}
	refuses("as the first requests of a new node")
	first.kill()
	if got := say(second); got != http.StatusTooManyRequests { // a token may be had, of this node's share, until the owner is missed
		t.Errorf("when the other node has just been killed an activity is answered %d", got)
	}
	eventually(t, patience, "the dead to be missed", func() bool { return metric(t, second.base, visible) == "1" })
	refuses("alone")
	second.kill()
}
