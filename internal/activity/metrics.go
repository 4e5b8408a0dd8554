package activity

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	created, repeat, refused, failed prometheus.Counter
	batch                            prometheus.Observer
	duration                         prometheus.Observer
}

// newMetrics registers the metrics of a store; reg may be nil.
func newMetrics(reg prometheus.Registerer, queued func() int) *metrics {
	results := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "converger_activities_total",
		Help: "Activities by what became of them: created, repeat (the key was known), refused (the caller's fault), failed.",
	}, []string{"result"})
	batch := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "converger_append_batch_size",
		Help:    "Activities in one transaction of the group commit.",
		Buckets: []float64{1, 2, 4, 8, 16, 32, 64, 128, 256},
	})
	duration := prometheus.NewHistogram(prometheus.HistogramOpts{
		Name:    "converger_append_duration_seconds",
		Help:    "Time of one transaction of the group commit, from the wait for a connection to the commit.",
		Buckets: []float64{.001, .002, .004, .008, .016, .032, .064, .125, .25, .5, 1, 2, 4, 8},
	})
	length := prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "converger_append_queue_length",
		Help: "Activities that wait for a transaction.",
	}, func() float64 { return float64(queued()) })
	if reg != nil {
		reg.MustRegister(results, batch, duration, length)
	}
	return &metrics{
		created: results.WithLabelValues("created"), repeat: results.WithLabelValues("repeat"),
		refused: results.WithLabelValues("refused"), failed: results.WithLabelValues("failed"),
		batch: batch, duration: duration,
	}
}

// batchDone notes one transaction of the group commit.
func (m *metrics) batchDone(items int, took time.Duration) {
	m.batch.Observe(float64(items))
	m.duration.Observe(took.Seconds())
}

func (m *metrics) countOne(r *Result) {
	switch {
	case r.Err == nil && r.Repeat:
		m.repeat.Inc()
	case r.Err == nil:
		m.created.Inc()
	case isRefusal(r.Err):
		m.refused.Inc()
	default:
		m.failed.Inc()
	}
}
