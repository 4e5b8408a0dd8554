package limits

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"
)

// Report is what a run has shown.
type Report struct {
	Nodes     []string `json:"nodes"`
	Run       string   `json:"run"` // in the name of its tenant
	Limit     int64    `json:"limit"`
	ScaleMs   int64    `json:"scale_ms"`
	Algorithm string   `json:"algorithm"`
	Burst     int64    `json:"burst,omitempty"`
	Load      Load     `json:"load"`
	Factor    float64  `json:"factor"`

	Seconds     float64 `json:"seconds"`
	Interrupted bool    `json:"interrupted"`
	// Settling is how many windows at the beginning are not in the figures.
	Settling int `json:"settling_windows"`
	Figures
	Rate   float64          `json:"offered_per_s"` // on average, over the whole run
	Behind int64            `json:"behind"`        // due, and not sent: every caller was busy
	Errors map[string]int64 `json:"errors"`

	NoMetrics string `json:"no_metrics,omitempty"` // why the next four are not known
	// Reports, Messages and Bytes are sent by a node in a second; what goes to several nodes counts once.
	Reports  float64 `json:"reports_per_node_and_s"`
	Messages float64 `json:"messages_per_node_and_s"`
	Bytes    float64 `json:"bytes_per_node_and_s"`
	Delay    Delay   `json:"report_delay"` // upper bounds

	// Verdict is "kept", "NOT KEPT: …", "not judged: …" or "nothing is promised: …".
	Verdict     string `json:"verdict"`
	Kept        *bool  `json:"kept"` // null: not judged
	WhatRemains string `json:"what_remains"`
}

// subject is the limit and the load in words.
func (r Report) subject() string {
	what := fmt.Sprintf("%d per %g s, %s", r.Limit, float64(r.ScaleMs)/1000, r.Algorithm)
	if r.Burst > 0 {
		what += fmt.Sprintf(" with a burst of %d", r.Burst)
	}
	nodes := "one node"
	if n := len(r.Nodes); n > 1 {
		nodes = fmt.Sprintf("%d nodes", n)
	}
	return fmt.Sprintf("%s; load %s, %g times the limit, over %s", what, r.Load, r.Factor, nodes)
}

// Write prints it for people.
func (r Report) Write(w io.Writer) error {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	line := func(what, format string, args ...any) { fmt.Fprintf(t, "%s\t%s\n", what, fmt.Sprintf(format, args...)) }
	fmt.Fprintf(&b, "%s\n", r.subject())
	if r.Interrupted {
		fmt.Fprintln(&b, "Interrupted: this is what was measured until then.")
	}
	line("windows", "%d in %.0f s; looked at %d of them, of which %d were offered more than the limit", r.Settling+r.Windows, r.Seconds, r.Windows, r.Flooded)
	line("offered", "%d", r.Offered)
	line("admitted", "%d", r.Admitted)
	line("refused", "%d", r.Refused)
	if r.Algorithm == TokenBucket {
		line("long-run rate", "%+.2f %% of the limit", 100*r.LongRun)
	} else {
		line("overshoot", "%s in the mean, %s in the worst window", percent(r.Over), percent(r.OverWorst))
		line("refused within the limit", "%s of the limit in the worst window", percent(r.RefusedWithin))
		line("left unused", "%s of the limit in the mean", percent(r.Unused))
	}
	if r.NoMetrics != "" {
		line("between nodes", "not known: %s", r.NoMetrics)
	} else {
		line("sent by a node", "%.1f reports a second in %.1f messages, %.0f bytes", r.Reports, r.Messages, r.Bytes)
		line("report delay", "p50 ≤ %g, p99 ≤ %g, max ≤ %g ms (%d messages)", r.Delay.P50, r.Delay.P99, r.Delay.Max, r.Delay.Messages)
	}
	if r.Delay.Wait > 0 {
		line("waited for a processor", "%.3g ms, the longest of a node's threads", r.Delay.Wait)
	}
	line("not sent", "%d that were due while every caller was busy", r.Behind)
	for _, what := range slices.Sorted(maps.Keys(r.Errors)) {
		line("error", "%d × %s", r.Errors[what], what)
	}
	line("verdict", "%s", r.Verdict)
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(&b, r.WhatRemains)
	_, err := io.WriteString(w, b.String())
	return err
}

// WriteJSON prints it for programs.
func (r Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

// lostShare is the share of the load that may be missing from a run that is judged.
const lostShare = 0.02

// judge sets the verdict.
func (r *Report) judge(p Promise, promised bool) {
	failed := r.Behind
	for _, n := range r.Errors {
		failed += n
	}
	busy := r.Delay.Busy()
	switch {
	case r.Interrupted:
		r.Verdict = "not judged: interrupted"
	case !promised:
		r.Verdict = "nothing is promised for this; docs/accuracy.md lists what is"
	case len(r.Nodes) > 1 && r.NoMetrics != "":
		r.Verdict = "not judged: how long reports were on their way is not known, so neither is whether the machine was fit: " + r.NoMetrics
	case busy != "":
		r.Verdict = "not judged: " + busy
	case float64(failed) > lostShare*float64(r.Offered+failed):
		r.Verdict = fmt.Sprintf("not judged: %d of %d requests were not sent in time, or not answered; more --callers, or a smaller --factor", failed, r.Offered+failed)
	default:
		broken := p.Broken(r.Figures)
		kept := len(broken) == 0
		r.Kept, r.Verdict = &kept, "kept"
		if !kept {
			r.Verdict = "NOT KEPT: " + strings.Join(broken, "; ")
		}
	}
}
