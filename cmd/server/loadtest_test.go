package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"converger/internal/devpg"
	"converger/internal/loadtest/messages"
	"converger/migrations/pgtest"
)

// loadtest runs `server loadtest messages` with --json and reads its report.
func loadtest(t *testing.T, environ map[string]string, args ...string) messages.Report {
	t.Helper()
	p := start(t, environ, append([]string{"loadtest", "messages", "--json", "--dir", t.TempDir(), "--tenants", "3", "--conversations", "4", "--callers", "4",
		"--warm-up", "200ms", "--duration", "2s", "--inbound", "0.25"}, args...)...)
	select {
	case <-p.ended:
	case <-time.After(4 * patience): // it starts a database and a hub, and waits for what is under way
		t.Fatalf("the load test did not end:\n%s", p.log)
	}
	if p.err != nil {
		t.Fatalf("%v\n%s%s", p.err, p.out, p.log)
	}
	var r messages.Report
	if err := json.Unmarshal([]byte(p.out.String()), &r); err != nil {
		t.Fatalf("%v:\n%s", err, p.out)
	}
	return r
}

func checkReport(t *testing.T, r messages.Report) {
	t.Helper()
	if r.Accepted == 0 || r.Webhooks.Count == 0 || r.Posts.Count == 0 || len(r.Errors) > 0 || r.Interrupted {
		t.Errorf("accepted %d, %d posts, %d webhooks, errors %v", r.Accepted, r.Posts.Count, r.Webhooks.Count, r.Errors)
	}
	if !r.Delivers || r.Delivered < r.Accepted || r.Check != (messages.Check{Repeats: r.Check.Repeats}) {
		t.Errorf("%d delivered of %d; %+v", r.Delivered, r.Accepted, r.Check)
	}
	if r.NoMetrics != "" || r.PeakResident == 0 || r.HubCPU == 0 {
		t.Errorf("the hub's memory and processor: %d, %g, %s", r.PeakResident, r.HubCPU, r.NoMetrics)
	}
}

// Against a hub that runs already: its own limits are no hindrance, and afterwards the tenants can do nothing any more.
func TestLoadtestAgainstARunningHub(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, map[string]string{"METRICS_TOKEN": "a token for metrics"})
	ops := management(t, p, url)
	token := strings.TrimPrefix(ops.header.Get("Authorization"), "Bearer ")
	r := loadtest(t, map[string]string{"CONVERGER_TOKEN": token, "METRICS_TOKEN": "a token for metrics"}, "--server", p.base, "--rate", "150")
	checkReport(t, r)
	if r.Accepted+r.Behind < 250 || len(r.Tables) != 0 || r.Processors != "" {
		t.Errorf("%d accepted, %d behind of 300 that were due; %v %q", r.Accepted, r.Behind, r.Tables, r.Processors)
	}
	type tenant struct{ ID, Name, Status string }
	found := 0
	for _, x := range data[[]tenant](t, ops.call(t, 200, "GET", "/api/v1/management/tenants", "")) {
		if !strings.HasPrefix(x.Name, "loadtest "+r.Run) {
			continue
		}
		found++
		channels := data[[]any](t, ops.call(t, 200, "GET", "/api/v1/management/tenants/"+x.ID+"/channels", ""))
		if x.Status != "suspended" || len(channels) > 0 {
			t.Errorf("%s is %s and has %d channels", x.Name, x.Status, len(channels))
		}
	}
	if found != 3 {
		t.Errorf("%d tenants of the run", found)
	}
}

// With a hub of its own, which it removes.
func TestLoadtestStartsAHub(t *testing.T) {
	t.Parallel()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	r := loadtest(t, map[string]string{"PG_BIN": found[0].Dir}, "--start", "--program", thisProgram(t))
	checkReport(t, r)
	if len(r.Tables) == 0 || !strings.Contains(r.WhatRemains, "removed") {
		t.Errorf("%v %q", r.Tables, r.WhatRemains)
	}
	if left, _ := filepath.Glob(filepath.Join(os.TempDir(), "loadtest-*")); len(left) > 0 {
		for _, dir := range left {
			if b, err := os.ReadFile(filepath.Join(dir, "hub.log")); err == nil && strings.Contains(string(b), r.Hub[len("http://"):]) {
				t.Errorf("%s is left", dir)
			}
		}
	}
}

// thisProgram is this test binary as a program: it has to be told so, and exec keeps the process's id.
func thisProgram(t *testing.T) string {
	t.Helper()
	program := filepath.Join(t.TempDir(), "server")
	script := fmt.Sprintf("#!/bin/sh\n%s=1 exec %s \"$@\"\n", envProgram, shellWord(os.Args[0]))
	if err := os.WriteFile(program, []byte(script), 0o700); err != nil {
		t.Fatal(err)
	}
	return program
}

// A hub that does not start is an error with its own words, and nothing is left.
func TestLoadtestStartFails(t *testing.T) {
	t.Parallel()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "server")
	if err := os.WriteFile(program, []byte("#!/bin/sh\necho out of order >&2\nexit 1\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	p := start(t, map[string]string{"PG_BIN": found[0].Dir}, "loadtest", "messages", "--start", "--program", program)
	if err := p.result(t); err == nil || !strings.Contains(err.Error(), "out of order") {
		t.Errorf("%v", err)
	}
}

func TestLoadtestSaysWhatItNeeds(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		args []string
		want string
	}{
		{nil, "--start"},
		{[]string{"--start", "--server", "http://127.0.0.1:1"}, "not both"},
		{[]string{"--server", "http://192.0.2.1"}, "loopback"},
		{[]string{"--server", "http://127.0.0.1:1", "--callers", "100000", "--tenants", "0"}, "0 tenants"},
		{[]string{"--server", "http://127.0.0.1:1"}, "refused"},
	} {
		p := start(t, map[string]string{"CONVERGER_TOKEN": "t"}, append([]string{"loadtest", "messages", "--dir", t.TempDir()}, test.args...)...)
		if err := p.result(t); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %v, want it to say %q", test.args, err, test.want)
		}
	}
}
