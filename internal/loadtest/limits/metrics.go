package limits

import (
	"cmp"
	"context"
	"fmt"
	"math"
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

// reading is what one node, or all of them together, had counted at a moment.
type reading struct {
	members, batches, bytes, reports float64
	delays                           map[float64]float64 // by upper bound in seconds, cumulative
}

// readingOf picks what is looked at. A node that is no cluster has none of the series.
func readingOf(metrics map[string]float64) reading {
	r := reading{members: metrics[seriesMembers], batches: metrics[seriesBatches], bytes: metrics[seriesBytes], reports: metrics[seriesReports],
		delays: map[float64]float64{}}
	for name, n := range metrics {
		if bound, ok := strings.CutPrefix(name, delayBuckets); ok {
			if le, err := strconv.ParseFloat(strings.TrimSuffix(bound, `"}`), 64); err == nil {
				r.delays[le] = n
			}
		}
	}
	return r
}

// readNodes sums what all nodes have counted; members is the fewest that one of them sees.
func readNodes(ctx context.Context, nodes []*hub.Client, token string) (reading, error) {
	sum := reading{members: math.Inf(1), delays: map[float64]float64{}}
	for _, n := range nodes {
		metrics, err := n.Metrics(ctx, token)
		if err != nil {
			return reading{}, fmt.Errorf("%s: %w", n.Base, err)
		}
		r := readingOf(metrics)
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
