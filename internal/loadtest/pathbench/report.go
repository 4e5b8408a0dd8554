package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"converger/internal/loadtest/report"
)

// result is one row of the table. Rates are a second, one of each round; a latency row has percentiles in milliseconds.
type result struct {
	Row    string    `json:"row"`
	Work   string    `json:"work"`
	Beside string    `json:"beside,omitempty"`
	Rates  []float64 `json:"rates,omitempty"`
	Floors []float64 `json:"floors,omitempty"` // of the same rounds
	Target float64   `json:"target,omitempty"` // least ratio; 0: none

	Measured string         `json:"measured,omitempty"` // instead of rates
	Floor    string         `json:"floor,omitempty"`
	Aim      string         `json:"aim,omitempty"`
	Details  map[string]any `json:"details,omitempty"`

	Missing string `json:"missing,omitempty"` // why there is no floor
	Met     *bool  `json:"met"`               // null: there is no target, or no floor to judge by
	Note    string `json:"note,omitempty"`    // said below the table
}

// judge sets Met of a row of rates.
func (r *result) judge() {
	if q := ratios(r.Rates, r.Floors); r.Target > 0 && len(q) > 0 {
		met := median(q) >= r.Target
		r.Met = &met
	}
}

func (r *result) cells() []string {
	c := []string{r.Work, r.Measured, r.Beside, r.Floor, "", r.Aim, ""}
	if len(r.Rates) > 0 {
		c[1] = rate(r.Rates)
	}
	if len(r.Floors) > 0 {
		c[3] = rate(r.Floors)
		q := ratios(r.Rates, r.Floors)
		if len(q) > 0 {
			c[4] = fmt.Sprintf("%.2f (%.2f to %.2f)", median(q), slices.Min(q), slices.Max(q))
		}
	}
	if r.Missing != "" {
		c[3] = r.Missing
	}
	if r.Target > 0 {
		c[5] = fmt.Sprintf("≥ %.2f", r.Target)
	}
	if r.Met != nil {
		c[6] = map[bool]string{true: "met", false: "NOT MET"}[*r.Met]
	}
	return c
}

func rate(rates []float64) string {
	m := median(rates)
	if math.IsNaN(m) {
		return "–"
	}
	return fmt.Sprintf("%.0f/s", m)
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// machine is what the figures were made on.
type machine struct {
	report.Machine
	Postgres string  `json:"postgres"`
	Fsync    string  `json:"pg_test_fsync_fdatasync,omitempty"`
	Version  string  `json:"hub"`
	Seconds  float64 `json:"seconds"`
	Rounds   int     `json:"rounds"`
	// Others is the greatest share of the processors, 0 to 1, that strangers used during a measurement.
	Others float64 `json:"others"`
}

// disturbed is the share of strangers from which on the ratios say little: the scheduler shares the processors out by
// process, and pgbench with its 32 backends outbids strangers where the hub with its few does not.
const disturbed = 0.1

func (m machine) String() string {
	fsync := m.Fsync
	if fsync == "" {
		fsync = "no pg_test_fsync here"
	}
	return fmt.Sprintf("%s; %s; %s; fdatasync: %s; medians of %d rounds of %g s", m.Version, m.Postgres, m.Machine, fsync, m.Rounds, m.Seconds)
}

var columns = []string{"work", "measured", "beside", "floor", "ratio (lowest to highest)", "to reach", ""}

// writeTable prints Markdown whose columns line up.
func writeTable(w io.Writer, m machine, results []*result) error {
	rows := [][]string{columns}
	for _, r := range results {
		rows = append(rows, r.cells())
	}
	var b strings.Builder
	b.WriteString(report.Table(rows) + "\n" + m.String() + "\n")
	if m.Others > disturbed {
		fmt.Fprintf(&b, "DISTURBED: other programs used up to %.0f%% of the processors; measure again on a quiet machine.\n", 100*m.Others)
	}
	for _, r := range results {
		if r.Note != "" {
			fmt.Fprintf(&b, "%s: %s\n", r.Work, r.Note)
		}
	}
	_, err := io.WriteString(w, b.String())
	return err
}

func writeJSON(w io.Writer, m machine, results []*result) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(struct {
		Machine machine   `json:"machine"`
		Results []*result `json:"results"`
	}{m, results})
}
