package messages

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Row is a stretch of the run, a minute unless the run is short. What is not known is 0.
type Row struct {
	From      float64 `json:"from_s"`
	Seconds   float64 `json:"seconds"`
	Accepted  float64 `json:"accepted_per_s"`
	Errors    int64   `json:"errors"`
	Latency   Latency `json:"latency"`
	Delivered float64 `json:"delivered_per_s"`
	Delivery  Latency `json:"delivery"` // from when a message was due to its arrival
	Open      int64   `json:"open"`     // acknowledged and not arrived, at its end

	HubCPU     float64 `json:"hub_cpu"` // processors that the hub kept busy
	Resident   int64   `json:"hub_resident_bytes"`
	Heap       int64   `json:"hub_heap_bytes"`
	Goroutines int64   `json:"hub_goroutines"`

	Database int64 `json:"database_bytes"`
	Standing int64 `json:"standing_bytes"` // of the tables that should not grow
	Dead     int64 `json:"standing_dead_rows"`
}

// Report is what a run has shown.
type Report struct {
	Hub           string  `json:"hub"`
	Run           string  `json:"run"` // in the names of its tenants
	Tenants       int     `json:"tenants"`
	Channels      int     `json:"channels"` // of each tenant
	Conversations int     `json:"conversations"`
	Callers       int     `json:"callers"`
	Rate          float64 `json:"rate,omitempty"` // that was asked for
	InboundShare  float64 `json:"inbound"`
	Seconds       float64 `json:"seconds"`
	Interrupted   bool    `json:"interrupted"`

	Accepted  int64            `json:"accepted"`
	PerSecond float64          `json:"accepted_per_s"`
	Latency   Latency          `json:"latency"`
	Posts     Latency          `json:"posts"`
	Webhooks  Latency          `json:"webhooks"`
	Behind    int64            `json:"behind"` // due, and not sent because every caller was busy
	Errors    map[string]int64 `json:"errors"`

	Delivers      bool    `json:"delivers"` // to the built-in receiver, so that what follows is known
	Delivered     int64   `json:"delivered"`
	DeliveredPerS float64 `json:"delivered_per_s"`
	Delivery      Latency `json:"delivery"`     // from when a message was due to its arrival
	DrainedIn     float64 `json:"drained_in_s"` // after the load's end, until the last arrival
	Check         Check   `json:"check"`

	NoMetrics     string  `json:"no_metrics,omitempty"`   // why the next three are not known
	HubCPU        float64 `json:"hub_cpu"`                // processors that the hub kept busy under the load
	CPUPerMessage float64 `json:"hub_cpu_us_per_message"` // with its delivery
	PeakResident  int64   `json:"hub_peak_resident_bytes"`
	Processors    string  `json:"processors,omitempty"` // who used them, when the hub was started for the run
	Others        float64 `json:"others,omitempty"`     // share of them that strangers used

	Tables      []Table `json:"tables,omitempty"` // at the end
	Rows        []Row   `json:"rows"`
	Soak        []Flat  `json:"soak,omitempty"`
	Flat        *bool   `json:"flat,omitempty"`
	WhatRemains string  `json:"what_remains"`
}

// Flat compares the last third of a run with the second: the first third warms up.
type Flat struct {
	What   string  `json:"what"`
	Second float64 `json:"second_third"`
	Last   float64 `json:"last_third"`
	Bound  float64 `json:"bound"` // what the last third may be, at least or at most
	OK     bool    `json:"ok"`
}

const (
	// minRows is how many rows a verdict needs.
	minRows = 6
	// settled is how long a run must be for its tables to be judged, in seconds: autovacuum comes by once a minute, and until
	// its second visit every table grows.
	settled = 300
)

// judge compares the thirds. It is generous: what it finds is worth looking at, and what it passes may still creep.
func judge(rows []Row, delivers bool) []Flat {
	if len(rows) < minRows {
		return nil
	}
	third := len(rows) / 3
	second, last := rows[len(rows)-2*third:len(rows)-third], rows[len(rows)-third:]
	mean := func(rows []Row, of func(Row) float64) float64 {
		sum := 0.0
		for _, r := range rows {
			sum += of(r)
		}
		return sum / float64(len(rows))
	}
	var all []Flat
	atLeast := func(what string, share float64, of func(Row) float64) {
		a, b := mean(second, of), mean(last, of)
		all = append(all, Flat{What: what, Second: a, Last: b, Bound: a * share, OK: b >= a*share})
	}
	atMost := func(what string, factor, more float64, of func(Row) float64) {
		a, b := mean(second, of), mean(last, of)
		if a == 0 && b == 0 {
			return // not known
		}
		all = append(all, Flat{What: what, Second: a, Last: b, Bound: a*factor + more, OK: b <= a*factor+more})
	}
	const mib = 1 << 20
	atLeast("accepted per second", 0.9, func(r Row) float64 { return r.Accepted })
	atMost("latency p50 (ms)", 1.5, 5, func(r Row) float64 { return r.Latency.P50 })
	atMost("latency p99 (ms)", 2, 20, func(r Row) float64 { return r.Latency.P99 })
	if delivers {
		atLeast("delivered per second", 0.9, func(r Row) float64 { return r.Delivered })
		atMost("delivery p50 (ms)", 1.5, 10, func(r Row) float64 { return r.Delivery.P50 })
	}
	atMost("memory of the hub (MiB)", 1.2, 16, func(r Row) float64 { return float64(r.Resident) / mib })
	atMost("goroutines of the hub", 1.2, 100, func(r Row) float64 { return float64(r.Goroutines) })
	if end := rows[len(rows)-1]; end.From+end.Seconds < settled {
		return all
	}
	atMost("standing tables (MiB)", 1.2, 2, func(r Row) float64 { return float64(r.Standing) / mib })
	atMost("dead rows of standing tables", 1.5, 20_000, func(r Row) float64 { return float64(r.Dead) })
	return all
}

func size(bytes int64) string {
	switch {
	case bytes == 0:
		return "–"
	case bytes < 10<<20:
		return fmt.Sprintf("%.1f MiB", float64(bytes)/(1<<20))
	}
	return fmt.Sprintf("%.0f MiB", float64(bytes)/(1<<20))
}

const rowHead = "FROM\tACCEPTED/S\tP50\tP99\tP99.9 ms\tERRORS\tDELIVERED/S\tP50\tP99 ms\tOPEN\tHUB CPU\tMEMORY\tHEAP\tGOROUTINES\tDATABASE\tSTANDING\tDEAD"

func (r Row) cells() string {
	cpu := "–"
	if r.HubCPU > 0 {
		cpu = fmt.Sprintf("%.2f", r.HubCPU)
	}
	return fmt.Sprintf("%.0f s\t%.0f\t%.1f\t%.1f\t%.1f\t%d\t%.0f\t%.1f\t%.1f\t%d\t%s\t%s\t%s\t%d\t%s\t%s\t%d", r.From, r.Accepted, r.Latency.P50, r.Latency.P99,
		r.Latency.P999, r.Errors, r.Delivered, r.Delivery.P50, r.Delivery.P99, r.Open, cpu, size(r.Resident), size(r.Heap), r.Goroutines,
		size(r.Database), size(r.Standing), r.Dead)
}

// String is the row in a sentence, for the lines of progress.
func (r Row) String() string {
	return fmt.Sprintf("== from %.0f s for %.1f s: %.0f/s accepted, p99 %.1f ms, %d errors; %.0f/s delivered, p99 %.1f ms, %d open; hub %.2f processors, %s, heap %s, "+
		"%d goroutines; database %s, of it standing %s with %d dead rows", r.From, r.Seconds, r.Accepted, r.Latency.P99, r.Errors, r.Delivered, r.Delivery.P99, r.Open,
		r.HubCPU, size(r.Resident), size(r.Heap), r.Goroutines, size(r.Database), size(r.Standing), r.Dead)
}

func (l Latency) String() string {
	if l.Count == 0 {
		return "none"
	}
	return fmt.Sprintf("p50 %.1f, p99 %.1f, p99.9 %.1f, max %.1f ms", l.P50, l.P99, l.P999, l.Max)
}

// Write prints the report for people.
func (r *Report) Write(w io.Writer) error {
	var b strings.Builder
	say := func(name, format string, args ...any) {
		fmt.Fprintf(&b, "%-12s %s\n", name, fmt.Sprintf(format, args...))
	}
	pace := "as fast as answers come"
	if r.Rate > 0 {
		pace = fmt.Sprintf("%g/s due", r.Rate)
	}
	say("load", "%d tenants, %d channels each, %d conversations; %d callers, %s, %.0f%% of it webhooks; %.1f s%s", r.Tenants, r.Channels, r.Conversations,
		r.Callers, pace, 100*r.InboundShare, r.Seconds, map[bool]string{true: ", interrupted"}[r.Interrupted])
	say("accepted", "%.0f/s (%d); %s", r.PerSecond, r.Accepted, r.Latency)
	if r.Posts.Count > 0 && r.Webhooks.Count > 0 {
		say("  posts", "%s", r.Posts)
		say("  webhooks", "%s", r.Webhooks)
	}
	if r.Behind > 0 {
		say("behind", "%d messages were due and not sent, because every caller was busy: more callers, or a lower rate", r.Behind)
	}
	if len(r.Errors) == 0 {
		say("errors", "none")
	}
	for _, name := range slices.Sorted(maps.Keys(r.Errors)) {
		say("errors", "%d × %s", r.Errors[name], name)
	}
	if r.Delivers {
		say("delivered", "%.0f/s (%d); %s; the last one %.1f s after the load", r.DeliveredPerS, r.Delivered, r.Delivery, r.DrainedIn)
		say("checked", "lost %d, doubled %d, out of order %d, repeats %d", r.Check.Lost, r.Check.Doubled, r.Check.OutOfOrder, r.Check.Repeats)
		if r.Check.Strange > 0 {
			say("", "%d requests at the receiver were not of this run", r.Check.Strange)
		}
	} else {
		say("delivered", "not known: there was no receiver of this run's own")
	}
	if r.NoMetrics != "" {
		say("hub", "%s", r.NoMetrics)
	} else {
		say("hub", "%.2f processors, %.0f µs for each message with its delivery; at most %s of memory", r.HubCPU, r.CPUPerMessage, size(r.PeakResident))
	}
	if r.Processors != "" {
		say("", "%s", r.Processors)
		if r.Others > disturbed {
			say("", "DISTURBED: other programs used %.0f%% of the processors; measure again on a quiet machine", 100*r.Others)
		}
	}
	b.WriteByte('\n')
	tw := tabwriter.NewWriter(&b, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, rowHead+"\t")
	for _, row := range r.Rows {
		fmt.Fprintln(tw, row.cells()+"\t")
	}
	_ = tw.Flush() // a Builder takes everything
	if len(r.Tables) > 0 {
		b.WriteByte('\n')
		tw = tabwriter.NewWriter(&b, 0, 4, 2, ' ', 0)
		fmt.Fprintln(tw, "TABLE\tSIZE\tROWS\tDEAD\tAUTOVACUUMS\t")
		for _, t := range r.Tables {
			fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t%s\n", t.Name, size(t.Bytes), t.Rows, t.Dead, t.Vacuums, map[bool]string{true: "keeps what comes in"}[t.Growing])
		}
		_ = tw.Flush()
	}
	if r.Flat != nil {
		b.WriteByte('\n')
		tw = tabwriter.NewWriter(&b, 0, 4, 2, ' ', 0)
		fmt.Fprintln(tw, "SOAK\tSECOND THIRD\tLAST THIRD\tBOUND\t")
		for _, f := range r.Soak {
			fmt.Fprintf(tw, "%s\t%.1f\t%.1f\t%.1f\t%s\n", f.What, f.Second, f.Last, f.Bound, map[bool]string{true: "ok", false: "NOT FLAT"}[f.OK])
		}
		_ = tw.Flush()
		fmt.Fprintf(&b, "verdict: %s\n", map[bool]string{true: "flat", false: "NOT FLAT"}[*r.Flat])
	}
	if r.WhatRemains != "" {
		fmt.Fprintf(&b, "\n%s\n", r.WhatRemains)
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// disturbed is the share of strangers from which on figures say little.
const disturbed = 0.1

// WriteJSON prints the report for programs.
func (r *Report) WriteJSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(r)
}

func perSecond(n int64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return math.Round(float64(n)/d.Seconds()*10) / 10
}
