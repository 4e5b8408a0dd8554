package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"converger/internal/loadtest/report"
	"converger/internal/ratelimit"
)

var columns = []string{"load", "nodes", "limit", "promised, mean / worst", "overshoot, mean / worst window", "refused within", "unused", "sent by a node", "report delay p99 / max, wait", ""}

// cells are a line of the table.
func (r result) cells() []string {
	pc := func(share float64) string { return fmt.Sprintf("%.2f %%", 100*share) }
	most := func(p *float64) string {
		if p == nil {
			return "–"
		}
		return fmt.Sprintf("≤ %g %%", float64(int(*p*1e4+0.5))/100)
	}
	tokens := r.rule.Algorithm == ratelimit.TokenBucket
	c := []string{r.name, fmt.Sprint(r.nodes), fmt.Sprintf("%d/s", r.rule.Limit)}
	if tokens {
		c[2] += fmt.Sprintf(", burst %d", r.rule.Burst)
	}
	p := r.promise
	switch {
	case r.atLeast > 0:
		c = append(c, fmt.Sprintf("must show ≥ %g %%", 100*r.atLeast))
	case p.LongRun != nil:
		c = append(c, fmt.Sprintf("rate within ± %g %%", 100**p.LongRun))
	case p.RefusedWithin != nil:
		c = append(c, fmt.Sprintf("%s / %s; refused within %s", most(p.Over), most(p.OverWorst), most(p.RefusedWithin)))
	default:
		c = append(c, most(p.Over)+" / "+most(p.OverWorst))
	}
	if tokens {
		c = append(c, fmt.Sprintf("rate %+.2f %%", 100*r.figures.LongRun), "–", "–")
	} else {
		c = append(c, pc(r.figures.Over)+" / "+pc(r.figures.OverWorst), pc(r.figures.RefusedWithin), pc(r.figures.Unused))
	}
	c = append(c, fmt.Sprintf("%.0f/s, %.1f kB/s", r.traffic.messages, r.traffic.bytes/1000),
		fmt.Sprintf("%.2f / %.1f, %.0f ms", r.traffic.delay.P99, r.traffic.delay.Max, r.traffic.delay.Wait))
	switch {
	case r.busy != "" && len(r.promise.Broken(r.figures)) == 0:
		c = append(c, "not judged; within")
	case r.busy != "":
		c = append(c, "not judged")
	case len(r.broken) > 0:
		c = append(c, "NOT KEPT")
	default:
		c = append(c, "kept")
	}
	return c
}

// markdown is the table with what it was made on, as docs/accuracy.md has it.
func markdown(results []result, machine string, when time.Time) string {
	rows := [][]string{columns}
	notJudged := 0
	for _, r := range results {
		rows = append(rows, r.cells())
		if r.busy != "" {
			notJudged++
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s by `make accuracy` on %s.", when.UTC().Format("2 January 2006"), machine)
	if notJudged > 0 {
		fmt.Fprintf(&b, " %d of %d rows are not judged: the machine was too busy for reports to arrive in time, so they show the machine more than the limiter. Those that were within what is promised all the same are marked.", notJudged, len(results))
	}
	b.WriteString("\n\n" + report.Table(rows))
	return b.String()
}

func thisMachine() string {
	return fmt.Sprintf("a machine with %s, all nodes and callers on it", report.ThisMachine())
}

// The marks between which the table stands in the page.
const (
	beginMark = "<!-- accuracy -->\n"
	endMark   = "<!-- /accuracy -->"
)

// embed replaces what stands between the marks of a page.
func embed(page []byte, table string) ([]byte, error) {
	before, rest, ok := bytes.Cut(page, []byte(beginMark))
	_, after, ended := bytes.Cut(rest, []byte(endMark))
	if !ok || !ended {
		return nil, errors.New("the page has no place for the table: " + strings.TrimSpace(beginMark) + " … " + endMark)
	}
	return bytes.Join([][]byte{before, []byte(beginMark + table + endMark), after}, nil), nil
}

func embedIn(path, table string) error {
	page, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if page, err = embed(page, table); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return os.WriteFile(path, page, 0o644) //nolint:gosec // a page for everybody
}
