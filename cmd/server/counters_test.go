package main

import (
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"converger/internal/devpg"
	"converger/migrations/pgtest"
)

// A limit is a limit over three nodes: the 101st request is refused whichever is asked. Where every node counts, news takes
// its time; where one does, the limit is exact.
func TestLimitsHoldOverNodes(t *testing.T) {
	t.Parallel()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(tempDir(t), ".dev")
	p := spawn(t, map[string]string{"PG_BIN": found[0].Dir,
		"RATE_LIMITS": `{"activity_create":{"limit":100,"scale_ms":86400000},"token_generate":{"limit":10,"scale_ms":86400000}}`},
		"dev", "--dir", dir, "--nodes", "3", "--addr", "127.0.0.1:0")
	if _, err := p.out.await("node3 http", p.ended); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	d, err := demoFlags{Dir: dir}.read()
	if err != nil {
		t.Fatal(err)
	}
	f := &fleet{logs: []*journal{p.log}}
	for _, n := range d.Nodes {
		f.nodes = append(f.nodes, &fleetNode{program: &program{base: n.BaseURL}, environ: map[string]string{"CLUSTER_NODE_NAME": n.BaseURL}, api: newAPI(t, n.BaseURL)})
	}
	f.whole(t, 3)
	hook := d.Channels["webhook"]
	chat := d.by(t).newConversation(t, hook.ID)
	say := []string{"POST", "/api/v1/conversations/" + chat + "/activities", `{"text":"once more"}`}
	key, bearer := []string{"X-Api-Key", d.Tenant.APIKey}, []string{"Authorization", "Bearer " + hook.Secret}

	// One request at a time: the next may be there before the news of the last, at most by a tenth of the limit, and on a machine
	// that is not too busy hardly ever.
	sent, most := f.exhaust(t, say[0], say[1], say[2], key...), 103
	if slowest := f.slowest(t); slowest > 0.01 {
		t.Logf("99 of 100 messages took %v s at most", slowest)
		most = 110
	}
	if sent < 100 || sent > most {
		t.Errorf("%d activities of a limit of 100 were admitted, want at most %d", sent, most)
	}
	made := f.exhaust(t, "POST", tokenPath, tokenBody, bearer...)
	if made != 10 && (!f.missed() || made < 10 || made > 10+3*tokenShare) {
		t.Errorf("%d tokens of a limit of 10 were admitted; a node decided without the owner: %v", made, f.missed())
	}
	for range 10 {
		for i, n := range f.nodes {
			for _, r := range []struct{ call, headers []string }{{say, key}, {[]string{"POST", tokenPath, tokenBody}, bearer}} {
				a, err := n.api.try(t.Context(), r.call[0], r.call[1], r.call[2], r.headers...)
				alone := r.call[1] == tokenPath && a.status == http.StatusOK && f.missed() // out of a share of the limit
				if err != nil || a.status != http.StatusTooManyRequests && !alone {
					t.Errorf("beyond the limit node %d answers %v %s", i+1, err, a)
				}
			}
		}
	}
	if n := f.sum(t, `converger_rate_limit_sync_dropped_total{reason="malformed"}`); n != 0 {
		t.Errorf("%v messages of other nodes could not be read", n)
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
