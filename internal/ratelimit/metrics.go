package ratelimit

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type outcome uint8

const (
	allowed outcome = iota
	refused
	counted // would have been refused, count mode
	numOutcomes
)

var outcomeNames = [numOutcomes]string{"allowed", "refused", "counted"}

// Counters are spread over stripes, each in a cache line of its own, so that
// counting a hot bucket does not cost more than checking it.
const stripes = 8

type stripe struct {
	n [numOutcomes]atomic.Uint64
	_ [64 - 8*numOutcomes]byte
}

// sampling is how many checks there are to one whose duration is measured.
const sampling = 1024

// meter counts decisions. It is a prometheus.Collector whose series all exist
// from the start.
type meter struct {
	counts [NumBuckets][stripes]stripe
	// pace says of which decisions the observers take note: tick<<32 | mask, of
	// decisions numbered n those with n&mask == 0. It changes four times a second.
	pace    [NumBuckets][numOutcomes]atomic.Uint64
	_       [64]byte
	backend [NumBuckets]string
	took    [NumBuckets]prometheus.Observer

	duration  *prometheus.HistogramVec
	exceeded  *prometheus.Desc
	decisions *prometheus.Desc
}

func newMeter(backend func(Bucket) string) *meter {
	m := &meter{
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "converger_rate_limit_check_duration_seconds",
			Help:    "Duration of a check, by backend; one check in 1024 is measured.",
			Buckets: []float64{100e-9, 250e-9, 1e-6, 10e-6, 100e-6, 1e-3, 5e-3, 20e-3, 50e-3},
		}, []string{"backend"}),
		exceeded: prometheus.NewDesc("converger_rate_limit_exceeded_count",
			"Requests refused by a rate limit, by the strictest bucket.", []string{"bucket"}, nil),
		decisions: prometheus.NewDesc("converger_rate_limit_decisions_total",
			"Decisions of the rate limiter; counted: would have been refused, but the bucket is in count mode.",
			[]string{"bucket", "decision", "backend"}, nil),
	}
	for _, b := range Buckets() {
		m.backend[b] = backend(b)
		m.took[b] = m.duration.WithLabelValues(m.backend[b])
	}
	return m
}

// spread maps a clock reading to evenly distributed bits.
func spread(now Instant) uint64 { return uint64(now) * 0x9E3779B97F4A7C15 }

func (m *meter) sample(now Instant) bool { return spread(now)>>32%sampling == 0 }

func (m *meter) observe(b Bucket, d time.Duration) { m.took[b].Observe(d.Seconds()) }

// add returns the number of the decision among those of its stripe.
func (m *meter) add(b Bucket, o outcome, now Instant) uint64 {
	return m.counts[b][spread(now)>>61].n[o].Add(1)
}

// due tells whether the n-th decision is to be looked at: the whole cost of
// observing most of them.
func (m *meter) due(b Bucket, o outcome, n uint64, now Instant) bool {
	pace := m.pace[b][o].Load()
	return uint32(pace>>32) != tickOf(now) || n&pace&(1<<32-1) == 0
}

func (m *meter) total(b Bucket, o outcome) uint64 {
	var n uint64
	for i := range m.counts[b] {
		n += m.counts[b][i].n[o].Load()
	}
	return n
}

// Describe implements prometheus.Collector.
func (m *meter) Describe(ch chan<- *prometheus.Desc) {
	ch <- m.exceeded
	ch <- m.decisions
	m.duration.Describe(ch)
}

// Collect implements prometheus.Collector.
func (m *meter) Collect(ch chan<- prometheus.Metric) {
	for _, b := range Buckets() {
		// Untyped: the OpenMetrics format would append _total to a counter's
		// name, and dashboards of existing installations use this very name.
		ch <- prometheus.MustNewConstMetric(m.exceeded, prometheus.UntypedValue, float64(m.total(b, refused)), b.String())
		for o := range numOutcomes {
			ch <- prometheus.MustNewConstMetric(m.decisions, prometheus.CounterValue, float64(m.total(b, o)),
				b.String(), outcomeNames[o], m.backend[b])
		}
	}
	m.duration.Collect(ch)
}
