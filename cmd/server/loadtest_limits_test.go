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

// Nodes that run already are found, and what they lack is said.
func TestLoadtestLimitsSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	told := map[string]string{"RATE_LIMIT_TELL_TIME": "true", "METRICS_ALLOWED_IPS": "127.0.0.1"}
	alone, other, silent := serve(t, url, told), serve(t, url, told), serve(t, url, nil)
	token := strings.TrimPrefix(management(t, alone, url).header.Get("Authorization"), "Bearer ")
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
		{[]string{"--nodes", silent.base}, "RATE_LIMIT_TELL_TIME=true"},
		{[]string{"--nodes", alone.base + "," + other.base}, "not one cluster"},
	} {
		p := start(t, map[string]string{"CONVERGER_TOKEN": token}, append([]string{"loadtest", "limits", "--dir", t.TempDir()}, test.args...)...)
		if err := p.result(t); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want it to say %q", test.args, err, test.want)
		}
	}
}
