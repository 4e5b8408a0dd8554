package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"converger/internal/loadtest/report"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	yes, no := true, false
	for name, tt := range map[string]struct {
		in   result
		want *bool
	}{
		"met":       {result{Target: 0.25, Rates: []float64{30, 10, 25}, Floors: []float64{100, 100, 100}}, &yes},
		"not met":   {result{Target: 0.25, Rates: []float64{30, 10, 24}, Floors: []float64{100, 100, 100}}, &no},
		"no target": {result{Rates: []float64{30}, Floors: []float64{100}}, nil},
		"no floor":  {result{Target: 0.25, Rates: []float64{30}, Floors: []float64{0}}, nil},
	} {
		tt.in.judge()
		if diff := cmp.Diff(tt.want, tt.in.Met); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}

func TestTable(t *testing.T) {
	t.Parallel()
	no := false
	m := machine{Machine: report.Machine{CPUs: 2, GOOS: "linux", GOARCH: "amd64", Go: "go1"}, Postgres: "Postgres 15.1", Version: "converger v1", Rounds: 3, Seconds: 2.5, Others: 0.25}
	results := []*result{
		{Work: "accepted", Beside: "pgbench", Rates: []float64{20, 30, 40}, Floors: []float64{100, 100, 50}, Target: 0.35, Met: &no},
		{Work: "no floor", Beside: "pgbench", Rates: []float64{20}, Floors: []float64{0}, Missing: "no pgbench here", Target: 0.1},
		{Work: "idle", Measured: "3.0 / 9.0 ms", Aim: "≤ 5 / ≤ 20 ms", Note: "why"},
	}
	var b strings.Builder
	if err := writeTable(&b, m, results); err != nil {
		t.Fatal(err)
	}
	want := `| work     | measured     | beside  | floor           | ratio (lowest to highest) | to reach      |         |
|----------|--------------|---------|-----------------|---------------------------|---------------|---------|
| accepted | 30/s         | pgbench | 100/s           | 0.30 (0.20 to 0.80)       | ≥ 0.35        | NOT MET |
| no floor | 20/s         | pgbench | no pgbench here | –                         | ≥ 0.10        | –       |
| idle     | 3.0 / 9.0 ms | –       | –               | –                         | ≤ 5 / ≤ 20 ms | –       |

converger v1; Postgres 15.1; 2 CPUs, linux/amd64, go1; fdatasync: no pg_test_fsync here; medians of 3 rounds of 2.5 s
DISTURBED: other programs used up to 25% of the processors; measure again on a quiet machine.
idle: why
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}
