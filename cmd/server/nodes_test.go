package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"converger/internal/devpg"
	"converger/migrations/pgtest"
)

// metric reads the value of a series, written as in the text format without its value.
func metric(t testing.TB, base, series string) string {
	t.Helper()
	return newAPI(t, base).metric(t, series)
}

// metric is the same over a connection that is kept.
func (a *api) metric(t testing.TB, series string) string {
	t.Helper()
	got := a.call(t, http.StatusOK, "GET", "/metrics", "")
	for line := range strings.Lines(string(got.body)) {
		if v, ok := strings.CutPrefix(line, series+" "); ok {
			return strings.TrimSpace(v)
		}
	}
	t.Fatalf("no series %s in\n%s", series, got.body)
	return ""
}

const visible = `converger_cluster_members{standing="visible"}`

// `server dev --nodes 3` is one cluster of three processes on one database. One that is killed comes back; one signal
// stops them all.
func TestDevNodes(t *testing.T) {
	t.Parallel()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(tempDir(t), ".dev")
	own := newEndpoint(t)
	p := spawn(t, map[string]string{"PG_BIN": found[0].Dir, "LOG_LEVEL": "info"},
		"dev", "--dir", dir, "--nodes", "3", "--addr", "127.0.0.1:0", "--receiver-url", own.url)
	if _, err := p.out.await("node3 http", p.ended); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	d, err := demoFlags{Dir: dir}.read()
	if err != nil {
		t.Fatal(err)
	}
	if len(d.Nodes) != 3 || d.Nodes[0].BaseURL != d.BaseURL {
		t.Fatalf("nodes in %s: %+v, base URL %s", demoFile, d.Nodes, d.BaseURL)
	}
	for i, n := range d.Nodes {
		eventually(t, patience, "three members at "+n.BaseURL, func() bool { return metric(t, n.BaseURL, visible) == "3" })
		a := newAPI(t, n.BaseURL).call(t, http.StatusOK, "GET", "/health/ready", "")
		var ready struct {
			Degraded []string
			Checks   map[string]string
		}
		if err := json.Unmarshal(a.body, &ready); err != nil || ready.Checks["cluster"] != "ok" || ready.Checks["peers"] != "ok" {
			t.Errorf("node %d: %v %s", i+1, err, a.body)
		}
		if err := syscall.Kill(n.PID, 0); err != nil {
			t.Errorf("process %d: %v", n.PID, err)
		}
	}
	// What one node is told, another knows.
	c := d.by(t)
	chat := c.newConversation(t, d.Channels["webhook"].ID)
	there := newAPI(t, d.Nodes[2].BaseURL, "X-Api-Key", d.Tenant.APIKey)
	m := data[message](t, there.call(t, http.StatusCreated, "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"from the third node"}`))
	own.await(t, m.ID)
	for i := range 3 {
		if line, _ := p.log.find(fmt.Sprintf("[node%d] ", i+1)); !strings.Contains(line, "msg=") {
			t.Errorf("no line of node %d in\n%s", i+1, p.log)
		}
	}

	limitsOfAllNodes(t, d, there, chat)

	// The others go on without one that is killed, and another process takes its place.
	if err := syscall.Kill(d.Nodes[1].PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, "the second node to be missed", func() bool { return metric(t, d.BaseURL, visible) == "2" })
	eventually(t, patience, "its place to be taken", func() bool { return metric(t, d.BaseURL, visible) == "3" })
	killed := d.Nodes[1].PID
	eventually(t, patience, "its process to be listed", func() bool {
		d, err = demoFlags{Dir: dir}.read()
		return err == nil && d.Nodes[1].PID != killed
	})
	eventually(t, patience, "it to serve", func() bool {
		a, err := newAPI(t, d.Nodes[1].BaseURL).try(t.Context(), "GET", "/health/ready", "")
		return err == nil && a.status == http.StatusOK
	})

	// As Ctrl-C does.
	if err := p.process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.ended:
	case <-time.After(patience):
		t.Fatalf("it does not stop:\n%s", p.log)
	}
	if p.err != nil {
		t.Errorf("it ended with %v:\n%s", p.err, p.log)
	}
	for _, n := range d.Nodes {
		if err := syscall.Kill(n.PID, 0); err == nil { // its parent has waited for it
			t.Errorf("process %d is still there", n.PID)
		}
	}
	if log := p.log.String(); strings.Contains(log, "level=ERROR") || strings.Contains(log, "not everything that was counted") {
		t.Errorf("errors from start to stop:\n%s", log)
	}
}

// What a limit does at one node is seen at each, and a counter that is reset at one is reset at all.
func limitsOfAllNodes(t *testing.T, d demo, third *api, chat string) {
	t.Helper()
	const base = "/api/v1/management"
	ops := make([]*api, len(d.Nodes))
	for i, n := range d.Nodes {
		ops[i] = newAPI(t, n.BaseURL, "Authorization", "Bearer "+d.ManagementToken)
	}
	limit := base + "/tenants/" + d.Tenant.ID + "/limits/activity_create"
	ops[0].call(t, http.StatusOK, "PUT", limit, `{"limit":3,"scale_ms":86400000}`)
	eventually(t, patience, "a refusal at the third node", func() bool {
		a, err := third.try(t.Context(), "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"again"}`)
		return err == nil && a.status == http.StatusTooManyRequests
	})
	type node struct{ Error *string }
	for i := range ops {
		all := data[struct {
			TopRefused map[string][][2]any `json:"top_refused"`
			Nodes      []node
		}](t, ops[i].call(t, http.StatusOK, "GET", base+"/rate_limits", ""))
		if top := all.TopRefused["activity_create"]; len(top) != 1 || top[0][0] != d.Tenant.ID || len(all.Nodes) != 3 || slices.ContainsFunc(all.Nodes, func(n node) bool { return n.Error != nil }) {
			t.Errorf("node %d: most refused %v, nodes %+v", i+1, top, all.Nodes)
		}
	}
	usage := base + "/rate_limits/usage?bucket=activity_create&subject=" + d.Tenant.ID
	used := func(at *api) (n int) {
		return data[struct{ Used int }](t, at.call(t, http.StatusOK, "GET", usage, "")).Used
	}
	for i := range ops {
		eventually(t, patience, fmt.Sprintf("node %d to know of the use", i+1), func() bool { return used(ops[i]) >= 3 })
	}
	if a := ops[1].call(t, http.StatusOK, "DELETE", usage, ""); !data[struct{ Cleared bool }](t, a).Cleared {
		t.Errorf("reset: %s", a.body)
	}
	for i := range ops {
		eventually(t, patience, fmt.Sprintf("node %d to know of the reset", i+1), func() bool { return used(ops[i]) == 0 })
	}
	tried := data[[]struct{ Demand, Refused int }](t, ops[0].call(t, http.StatusOK, "POST", base+"/tenants/"+d.Tenant.ID+"/limits/preview", `{"activity_create":{"limit":1,"scale_ms":86400000}}`))
	if len(tried) != 1 || tried[0].Demand < 2 || tried[0].Refused != tried[0].Demand-1 {
		t.Errorf("tried: %+v", tried)
	}
	ops[0].call(t, http.StatusOK, "DELETE", limit, "")
	metricsOfLimits(t, d)
}

// metricsOfLimits: every series that operators are promised is there, whatever has happened so far, and none names a tenant,
// a key or an address.
func metricsOfLimits(t *testing.T, d demo) {
	t.Helper()
	page := string(newAPI(t, d.BaseURL).call(t, http.StatusOK, "GET", "/metrics", "").body)
	for _, series := range []string{
		`converger_rate_limit_exceeded_count{bucket="web_page"} 0`,
		`converger_rate_limit_decisions_total{backend="cluster",bucket="upload",decision="counted"} 0`,
		`converger_rate_limit_decisions_total{backend="owner",bucket="login_ip",decision="refused"} 0`,
		`converger_rate_limit_check_duration_seconds_count{backend="owner"} `,
		`converger_rate_limit_keys{backend="cluster"} `, `converger_rate_limit_keys{backend="owner"} `,
		`converger_rate_limit_keys_max{backend="cluster"} `,
		`converger_rate_limit_evictions_total{backend="cluster"} `,
		`converger_rate_limit_overflow{backend="cluster"} 0`,
		`converger_rate_limit_overflow_total{backend="owner"} 0`,
		`converger_rate_limit_sync_age_seconds{node="node3"} `, // which has counted
		`converger_rate_limit_sync_batches_total{direction="received"} `, `converger_rate_limit_sync_bytes_total{direction="sent"} `,
		`converger_rate_limit_sync_dropped_total{reason="clock"} 0`,
		`converger_rate_limit_fallbacks_total{backend="owner",reason="malformed"} 0`,
		`converger_cluster_clock_skew_seconds `, `converger_cluster_dropped_total{reason="queue_full"} `,
	} {
		if !strings.Contains(page, "\n"+series) {
			t.Errorf("no series %s", series)
		}
	}
	labels := regexp.MustCompile(`^converger_rate_limit_\w+\{(.*)\} `)
	name := regexp.MustCompile(`(\w+)="[^"]*"`)
	for line := range strings.Lines(page) {
		m := labels.FindStringSubmatch(line)
		if m == nil {
			continue
		}
		for _, l := range name.FindAllStringSubmatch(m[1], -1) {
			if !slices.Contains([]string{"backend", "bucket", "decision", "direction", "kind", "le", "node", "reason"}, l[1]) {
				t.Errorf("a label %s: %s", l[1], line)
			}
		}
		for _, secret := range []string{d.Tenant.ID, "127.0.0.1", "cvg_"} {
			if strings.Contains(m[1], secret) {
				t.Errorf("a label tells whom it counted: %s", line)
			}
		}
	}
}

// The nodes of a development cluster end with the process that started them, also when that is killed.
func TestDevNodesDieWithTheirParent(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(tempDir(t), ".dev")
	// Not tied to this process as other spawned programs are, nor are its children: what ends them is the program's own doing.
	p := spawn(t, map[string]string{envProgram: "1"}, "dev", "--dir", dir, "--nodes", "2", "--addr", "127.0.0.1:0", "--database-url", pgtest.New(t))
	if _, err := p.out.await("node2 http", p.ended); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	d, err := demoFlags{Dir: dir}.read()
	if err != nil {
		t.Fatal(err)
	}
	p.kill()
	eventually(t, patience, "the nodes to end", func() bool {
		// By their addresses: nobody may have waited for the processes.
		return !slices.ContainsFunc(d.Nodes, func(n demoNode) bool {
			_, err := newAPI(t, n.BaseURL).try(t.Context(), "GET", "/health/live", "")
			return err == nil
		})
	})
}

// A node that is to have peers and finds none says so, and takes traffic after ten seconds all the same.
func TestServeWithoutItsPeers(t *testing.T) {
	t.Parallel()
	began := time.Now()
	p := serve(t, pgtest.New(t), map[string]string{"CLUSTER_BIND": "127.0.0.1:0", "CLUSTER_PEERS": "127.0.0.1:1", "METRICS_ALLOWED_IPS": "127.0.0.1"})
	a := newAPI(t, p.base)
	if got := a.call(t, http.StatusServiceUnavailable, "GET", "/health/ready", ""); !strings.Contains(string(got.body), "cluster: expected peers: none seen of 1 listed") {
		t.Errorf("%s", got)
	}
	if v := metric(t, p.base, visible); v != "1" {
		t.Errorf("%s members", v)
	}
	a.call(t, http.StatusOK, "GET", "/health/live", "")
	var got answer
	eventually(t, patience, "readiness", func() (ok bool) {
		got, _ = a.try(t.Context(), "GET", "/health/ready", "")
		return got.status == http.StatusOK
	})
	if took := time.Since(began); took < 9*time.Second {
		t.Errorf("ready after %s", took)
	}
	if !strings.Contains(string(got.body), `"degraded":["peers: expected peers: none seen of 1 listed`) {
		t.Errorf("%s", got)
	}
}

// asking is an HTTP client's transport that is a function.
type asking func(*http.Request) (*http.Response, error)

func (a asking) RoundTrip(r *http.Request) (*http.Response, error) { return a(r) }

// A node is waited for until it is ready, and for a bounded time whatever it does instead.
func TestAwaitReady(t *testing.T) {
	t.Parallel()
	answers := func(status int) asking {
		return func(*http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: status, Body: http.NoBody}, nil
		}
	}
	silent := func(r *http.Request) (*http.Response, error) {
		<-r.Context().Done()
		return nil, r.Context().Err()
	}
	const soon = 5 * time.Second
	for name, test := range map[string]struct {
		node asking
		stop bool // soon after the start
		end  bool // likewise
		want string
		took time.Duration
	}{
		"it is ready":            {node: answers(200), took: 50 * time.Millisecond},
		"it is never ready":      {node: answers(503), want: "is not ready after 1m0s", took: nodeStart},
		"it does not answer":     {node: silent, want: "is not ready after 1m0s", took: nodeStart},
		"nobody listens":         {node: func(*http.Request) (*http.Response, error) { return nil, errors.New("refused") }, want: "is not ready after 1m0s", took: nodeStart},
		"it ends":                {node: answers(503), end: true, want: "node1 ended", took: soon},
		"the program is stopped": {node: silent, stop: true, took: soon},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), 10*nodeStart) // for a wait without an end
				defer cancel()
				ended := make(chan *devNode, 1)
				if test.stop {
					time.AfterFunc(soon, cancel)
				}
				if test.end {
					time.AfterFunc(soon, func() { ended <- &devNode{} })
				}
				began := time.Now()
				err := awaitReady(ctx, &http.Client{Transport: test.node}, "http://node", ended)
				if took := time.Since(began); took != test.took {
					t.Errorf("after %v, want %v", took, test.took)
				}
				if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
					t.Errorf("%v, want %q", err, test.want)
				}
			})
		})
	}
}
