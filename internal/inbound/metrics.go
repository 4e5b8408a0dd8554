package inbound

import (
	"errors"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/channel"
)

type metrics struct {
	events     *prometheus.CounterVec // by channel type and state
	messages   *prometheus.CounterVec // by channel type and outcome
	signatures *prometheus.CounterVec // by channel type and reason
}

func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		events: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_inbound_events_total", Help: "Inbound events worked, by channel type and the state they ended in."},
			[]string{"channel_type", "state"}),
		messages: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_inbound_items_total", Help: "Messages and receipts of inbound events, by what became of them."},
			[]string{"channel_type", "outcome"}),
		signatures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_inbound_signature_failures_total", Help: "Inbound requests refused for their signature."},
			[]string{"channel_type", "reason"}),
	}
	if r != nil {
		r.MustRegister(m.events, m.messages, m.signatures)
	}
	return m
}

func (m *metrics) refused(t channel.Type, err error) {
	reason := "invalid"
	if errors.Is(err, channel.ErrUnsigned) {
		reason = "missing"
	}
	m.signatures.WithLabelValues(string(t), reason).Inc()
}

func (m *metrics) worked(t channel.Type, r Result) {
	m.events.WithLabelValues(string(t), string(r.state())).Inc()
	for outcome, n := range map[string]int{
		"created": r.Created, "duplicate": r.Duplicates, "rejected": len(r.Rejected), "ignored": len(r.Ignored),
		"receipt": r.Receipts, "receipt_unknown": r.UnknownReceipts,
	} {
		m.messages.WithLabelValues(string(t), outcome).Add(float64(n))
	}
}
