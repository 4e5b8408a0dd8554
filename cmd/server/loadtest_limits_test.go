package main

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"time"

	"converger/internal/devpg"
	"converger/internal/loadtest/limits"
	"converger/migrations/pgtest"
)

// Three processes that the command starts are flooded and measured. How exact they are is the business of `make accuracy`:
// here only that nodes which were fit, if slowed by the race detector, are not as bad as nodes that don't hear each other.
func TestLoadtestLimitsStartsNodes(t *testing.T) {
	t.Parallel()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, map[string]string{"PG_BIN": found[0].Dir}, "loadtest", "limits", "--json", "--dir", t.TempDir(), "--start", "3", "--program", thisProgram(t),
		"--limit", "100", "--factor", "6", "--duration", "6s", "--callers", "2", "--timeout", patience.String())
	select {
	case <-p.ended:
	case <-time.After(6 * patience): // it starts a database and three nodes
		t.Fatalf("the load test did not end:\n%s", p.log)
	}
	var r limits.Report
	if err := json.Unmarshal([]byte(p.out.String()), &r); err != nil {
		t.Fatalf("%v; %v:\n%s%s", p.err, err, p.out, p.log)
	}
	t.Logf("%s; %+v; delay %+v", r.Verdict, r.Figures, r.Delay)
	if kept := r.Kept == nil || *r.Kept; kept != (p.err == nil) || !kept && r.Over > 0.1 {
		t.Errorf("%v: %s", p.err, r.Verdict)
	}
	if r.Windows != 4 || r.Admitted == 0 || r.Refused == 0 || len(r.Errors) > 0 || r.NoMetrics != "" || r.Messages == 0 || r.Bytes == 0 || r.Delay.Messages == 0 {
		t.Errorf("%+v", r)
	}
	if !strings.Contains(r.WhatRemains, "removed") {
		t.Errorf("what remains: %s", r.WhatRemains)
	}
}

// A node that runs already is found, and alone it keeps a limit exactly. Afterwards the run's tenant can do nothing any more.
func TestLoadtestLimitsAgainstARunningNode(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	hub := serve(t, url, map[string]string{"RATE_LIMIT_TELL_TIME": "true"})
	ops := management(t, hub, url)
	token := strings.TrimPrefix(ops.header.Get("Authorization"), "Bearer ")
	p := start(t, map[string]string{"CONVERGER_TOKEN": token}, "loadtest", "limits", "--dir", t.TempDir(), "--nodes", hub.base,
		"--limit", "100", "--factor", "3", "--duration", "4s", "--callers", "2", "--timeout", patience.String())
	select {
	case <-p.ended:
	case <-time.After(4 * patience):
		t.Fatalf("the load test did not end:\n%s", p.log)
	}
	for _, want := range []string{"100 per 1 s, fixed_window; load even, 3 times the limit, over one node", "0.00 % in the mean, 0.00 % in the worst window"} {
		if p.err != nil || !strings.Contains(p.out.String(), want) {
			t.Errorf("%v; %q is not in\n%s%s", p.err, want, p.out, p.log)
		}
	}
	type tenant struct{ Name, Status string }
	found := 0
	for _, x := range data[[]tenant](t, ops.call(t, 200, "GET", "/api/v1/management/tenants", "")) {
		if strings.HasPrefix(x.Name, "loadtest limits ") {
			if found++; x.Status != "suspended" {
				t.Errorf("%s is %s", x.Name, x.Status)
			}
		}
	}
	if found != 1 {
		t.Errorf("%d tenants of the run", found)
	}
}

func TestLoadtestLimitsSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "which nodes?"},
		{[]string{"--start", "3", "--nodes", "http://127.0.0.1:1"}, "not both"},
		{[]string{"--start", "300"}, "want 1 to 20"},
		{[]string{"--backend", "owner", "--nodes", "http://127.0.0.1:1"}, "for nodes that --start starts"},
		{[]string{"--start", "1", "--backend", "abacus"}, "no \"abacus\""},
		{[]string{"--load", "square"}, "the loads are even"},
		{[]string{"--nodes", "http://192.0.2.1,http://192.0.2.2"}, "loopback"},
		{[]string{"--nodes", "http://127.0.0.1:1"}, "refused"},
	} {
		p := start(t, map[string]string{"CONVERGER_TOKEN": "t"}, append([]string{"loadtest", "limits", "--dir", t.TempDir()}, test.args...)...)
		if err := p.result(t); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want it to say %q", test.args, err, test.want)
		}
	}
}
