package delivery

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics of the package; every label is from a fixed set.
type metrics struct {
	attempts        *prometheus.CounterVec   // outcome, type
	attemptSeconds  *prometheus.HistogramVec // type
	finished        *prometheus.CounterVec   // status, reason
	handedOver      *prometheus.CounterVec   // by
	replies         *prometheus.CounterVec   // result
	receipts        *prometheus.CounterVec   // result
	circuits        *prometheus.CounterVec   // to, by
	errors          *prometheus.CounterVec   // where
	retried         prometheus.Counter
	dispatchSeconds prometheus.Histogram
	groupSize       prometheus.Histogram
	expired         prometheus.Counter
	stale           prometheus.Counter
	late            prometheus.Counter
}

func newMetrics(r prometheus.Registerer, s *Service) *metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: "converger", Subsystem: "delivery", Name: name, Help: help}, labels)
	}
	m := &metrics{
		attempts: counter("attempts_total", "Attempts, by what they came to and the channel's type.", "outcome", "type"),
		attemptSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: "converger", Subsystem: "delivery",
			Name: "attempt_seconds", Help: "Time of one attempt.", Buckets: []float64{.005, .025, .1, .25, .5, 1, 2.5, 5, 10, 30}}, []string{"type"}),
		finished:   counter("finished_total", "Deliveries that were sent, became uncertain or failed, by reason of failure.", "status", "reason"),
		handedOver: counter("lanes_handed_over_total", "Lanes handed over to workers, by the append or by the dispatcher.", "by"),
		replies:    counter("replies_total", "Replies of adapters: stored, or dropped because the conversation was closed or did not take them.", "result"),
		receipts:   counter("receipts_total", "Receipts: applied, stale (nothing new) or unknown.", "result"),
		circuits:   counter("circuits_turned_total", "Circuits of channels that opened, closed or were paused, by attempts or by hand.", "to", "by"),
		retried:    counter("retried_total", "Failed deliveries that were made pending again by hand.").WithLabelValues(),
		errors:     counter("errors_total", "Failures of the machinery itself, by place.", "where"),
		dispatchSeconds: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "converger", Subsystem: "delivery",
			Name: "dispatch_seconds", Help: "Time of one hand-over by the dispatcher.", Buckets: prometheus.ExponentialBuckets(.001, 2, 12)}),
		groupSize: prometheus.NewHistogram(prometheus.HistogramOpts{Namespace: "converger", Subsystem: "delivery",
			Name: "outcome_group_size", Help: "Outcomes written together.", Buckets: prometheus.ExponentialBuckets(1, 2, 9)}),
		expired: counter("leases_expired_total", "Lanes taken over because their worker died or could not record.").WithLabelValues(),
		stale:   counter("jobs_stale_total", "Jobs that came after their lease was taken over, and did nothing.").WithLabelValues(),
		late:    counter("outcomes_late_total", "Attempts that were recorded and did not count: another worker had made them.").WithLabelValues(),
	}
	if r == nil {
		return m
	}
	r.MustRegister(m.attempts, m.attemptSeconds, m.finished, m.handedOver, m.replies, m.receipts, m.circuits, m.retried, m.errors,
		m.dispatchSeconds, m.groupSize, m.expired, m.stale, m.late,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "converger", Subsystem: "delivery", Name: "lanes_working",
			Help: "Lanes that workers of this node are working."}, func() float64 { return float64(s.running.Load()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "converger", Subsystem: "delivery", Name: "overdue_seconds",
			Help: "For how long the first of the lanes that wait, of all nodes, should have been handed over to a worker; 0: none waits."},
			func() float64 { return time.Duration(s.overdue.Load()).Seconds() }))
	return m
}

// count counts an attempt.
func (m *metrics) count(l *lane, a *attempt, counted bool) {
	m.attempts.WithLabelValues(string(a.outcome.Kind), string(l.typ)).Inc()
	m.attemptSeconds.WithLabelValues(string(l.typ)).Observe(a.took.Seconds())
	switch {
	case !counted:
		m.late.Inc()
	case a.status == StatusFailed:
		m.finished.WithLabelValues(string(a.status), a.reason).Inc()
	case a.status != StatusPending:
		m.finished.WithLabelValues(string(a.status), "").Inc()
	}
}
