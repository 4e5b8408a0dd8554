package limits

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"converger/internal/loadtest/hub"
)

// What is read of a node's /metrics.
const (
	seriesMembers = `converger_cluster_members{standing="visible"}`
	seriesBatches = `converger_rate_limit_sync_batches_total{direction="sent"}`
	seriesBytes   = `converger_rate_limit_sync_bytes_total{direction="sent"}`
	seriesReports = `converger_rate_limit_sync_reports_total{kind="all"}`
	delayBuckets  = `converger_cluster_message_delay_seconds_bucket{le="`
)

var errNoMetrics = errors.New("the node's /metrics can't be read: pass its METRICS_TOKEN, or let this address in (METRICS_ALLOWED_IPS)")

// reading is what one node, or all of them together, had counted at a moment.
type reading struct {
	members, batches, bytes, reports float64
	delays                           map[float64]float64 // by upper bound in seconds, cumulative
}

func readNode(ctx context.Context, c *hub.Client, token string) (reading, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, c.Base+"/metrics", http.NoBody)
	if err != nil {
		return reading{}, err
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	resp, err := c.HTTP.Do(req)
	if err != nil {
		return reading{}, err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		_, _ = io.Copy(io.Discard, resp.Body)
		return reading{}, fmt.Errorf("%w (HTTP %d)", errNoMetrics, resp.StatusCode)
	}
	return parseMetrics(resp.Body)
}

// parseMetrics reads the text format of Prometheus. A node that is no cluster has none of the series.
func parseMetrics(in io.Reader) (reading, error) {
	r := reading{delays: map[float64]float64{}}
	fields := map[string]*float64{seriesMembers: &r.members, seriesBatches: &r.batches, seriesBytes: &r.bytes, seriesReports: &r.reports}
	lines := bufio.NewScanner(in)
	for lines.Scan() {
		line := lines.Text()
		at := strings.LastIndexByte(line, ' ')
		if at < 0 {
			continue
		}
		name, text := line[:at], line[at+1:]
		field := fields[name]
		bound, ok := strings.CutPrefix(name, delayBuckets)
		if field == nil && !ok {
			continue
		}
		v, err := strconv.ParseFloat(text, 64)
		if err != nil {
			return r, fmt.Errorf("read /metrics: %s is %q", name, text)
		}
		if field != nil {
			*field = v
			continue
		}
		le, err := strconv.ParseFloat(strings.TrimSuffix(bound, `"}`), 64)
		if err != nil {
			return r, fmt.Errorf("read /metrics: %s", name)
		}
		r.delays[le] = v
	}
	if err := lines.Err(); err != nil {
		return r, fmt.Errorf("read /metrics: %w", err)
	}
	return r, nil
}

// readNodes sums what all nodes have counted; members is the fewest that one of them sees.
func readNodes(ctx context.Context, nodes []*hub.Client, token string) (reading, error) {
	sum := reading{members: math.Inf(1), delays: map[float64]float64{}}
	for _, n := range nodes {
		r, err := readNode(ctx, n, token)
		if err != nil {
			return reading{}, fmt.Errorf("%s: %w", n.Base, err)
		}
		sum.members = min(sum.members, r.members)
		sum.batches += r.batches
		sum.bytes += r.bytes
		sum.reports += r.reports
		for le, n := range r.delays {
			sum.delays[le] += n
		}
	}
	return sum, nil
}

// delay is that of the messages between two readings. A histogram knows upper bounds only, so each is one.
func (r reading) delay(before reading) Delay {
	type bucket struct{ le, n float64 }
	var all []bucket
	for le, n := range r.delays {
		all = append(all, bucket{le, n - before.delays[le]})
	}
	slices.SortFunc(all, func(a, b bucket) int { return cmp.Compare(a.le, b.le) })
	if len(all) == 0 || all[len(all)-1].n == 0 {
		return Delay{}
	}
	total := all[len(all)-1].n
	at := func(q float64) float64 {
		for i, b := range all {
			if b.n >= math.Ceil(q*total) {
				if math.IsInf(b.le, 1) && i > 0 { // JSON has no infinity; what is beyond the last bound is more than enough
					return 2000 * all[i-1].le
				}
				return 1000 * b.le
			}
		}
		return 0
	}
	return Delay{Messages: int64(total), P50: at(0.5), P99: at(0.99), Max: at(1)}
}
