package cluster

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

type metrics struct {
	sent, received           prometheus.Counter
	sentBytes, receivedBytes prometheus.Counter
	records, early           prometheus.Counter
	drops                    *prometheus.CounterVec
	tick                     prometheus.Histogram
}

var dropReasons = []string{"malformed", "full", "other_policy", "clock", "too_many_peers"}

func (m *metrics) dropped(reason string) { m.drops.WithLabelValues(reason).Inc() }

func (s *Store) register(reg prometheus.Registerer) error {
	batches := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "converger_rate_limit_sync_batches_total",
		Help: "Messages with counts, by direction; one sent to several nodes counts once.",
	}, []string{"direction"})
	bytes := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "converger_rate_limit_sync_bytes_total",
		Help: "Bytes of messages with counts, by direction; one sent to several nodes counts once.",
	}, []string{"direction"})
	reports := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "converger_rate_limit_sync_reports_total",
		Help: "Counts reported to other nodes: all, and those reported ahead of the regular time.",
	}, []string{"kind"})
	s.m = metrics{
		sent: batches.WithLabelValues("sent"), received: batches.WithLabelValues("received"),
		sentBytes: bytes.WithLabelValues("sent"), receivedBytes: bytes.WithLabelValues("received"),
		records: reports.WithLabelValues("all"), early: reports.WithLabelValues("early"),
		drops: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_rate_limit_sync_dropped_total",
			Help: "Counts or messages of other nodes that could not be used, by reason.",
		}, []string{"reason"}),
		tick: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name:    "converger_rate_limit_sync_tick_seconds",
			Help:    "Time that a round of regular reports takes.",
			Buckets: []float64{10e-6, 100e-6, 1e-3, 5e-3, 20e-3, 100e-3},
		}),
	}
	for _, r := range dropReasons {
		s.m.drops.WithLabelValues(r)
	}
	if reg == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{batches, bytes, reports, s.m.drops, s.m.tick, &ages{s, prometheus.NewDesc(
		"converger_rate_limit_sync_age_seconds",
		"Time since counts of another node were last received, by the node's name.", []string{"node"}, nil)}} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}

// ages collects the sync age of the peers that are not dead.
type ages struct {
	s    *Store
	desc *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (a *ages) Describe(ch chan<- *prometheus.Desc) { ch <- a.desc }

// Collect implements prometheus.Collector.
func (a *ages) Collect(ch chan<- prometheus.Metric) {
	now := a.s.clock.Now()
	oldest := map[string]time.Duration{} // names need not be unique
	a.s.peersMu.Lock()
	for _, p := range a.s.peers {
		if h := p.heard.Load(); !p.gone && h != 0 {
			name := p.name
			if name == "" {
				name = p.id.String()
			}
			oldest[name] = max(oldest[name], time.Duration(int64(now)-h))
		}
	}
	a.s.peersMu.Unlock()
	for name, age := range oldest {
		ch <- prometheus.MustNewConstMetric(a.desc, prometheus.GaugeValue, age.Seconds(), name)
	}
}
