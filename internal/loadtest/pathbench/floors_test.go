package main

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseTPS(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		out  string
		want float64
		bad  bool
	}{
		"15":     {out: "latency average = 1.5 ms\ninitial connection time = 20.1 ms\ntps = 20740.123456 (without initial connection time)\n", want: 20740.123456},
		"13":     {out: "tps = 900.5 (including connections establishing)\ntps = 1000.5 (excluding connections establishing)\n", want: 1000.5},
		"failed": {out: "pgbench: error: connection refused\n", bad: true},
	} {
		got, err := parseTPS(tt.out)
		if (err != nil) != tt.bad || got != tt.want {
			t.Errorf("%s: %v, %v; want %v", name, got, err, tt.want)
		}
	}
}

func TestParseFsync(t *testing.T) {
	t.Parallel()
	for line, want := range map[string]string{
		"        fdatasync                          6080.071 ops/sec     164 usecs/op": "6080.071 ops/sec 164 usecs/op",
		"        open_datasync                      5802.317 ops/sec     172 usecs/op": "",
		"        fsync_writethrough                              n/a":                  "",
		"Compare file sync methods using one 8kB write:":                               "",
	} {
		if got := parseFsync(line); got != want {
			t.Errorf("%q: got %q, want %q", line, got, want)
		}
	}
}

func TestLibpqEnv(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		url  string
		want []string
	}{
		{"postgres://me:p%40ss@/db?host=%2Ftmp%2Frun&port=5432&sslmode=disable",
			[]string{"PGHOST=/tmp/run", "PGPORT=5432", "PGUSER=me", "PGPASSWORD=p@ss", "PGDATABASE=db"}},
		{"postgres://me:pw@127.0.0.1:6000/db",
			[]string{"PGHOST=127.0.0.1", "PGPORT=6000", "PGUSER=me", "PGPASSWORD=pw", "PGDATABASE=db"}},
	} {
		got, err := libpqEnv(tt.url)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Error(diff)
		}
	}
}
