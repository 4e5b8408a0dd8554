package cluster

import (
	"context"
	"errors"
	"fmt"
	"math"

	"github.com/prometheus/client_golang/prometheus"
)

// Reasons for which a message is dropped.
type dropReason uint8

const (
	dropDisconnected dropReason = iota
	dropQueueFull
	dropTooLarge
	dropNoHandler
	numDropReasons
)

var dropNames = [numDropReasons]string{"disconnected", "queue_full", "too_large", "no_handler"}

type dropCounter struct{ prometheus.Counter }

// metrics of a node. It collects the state of the peers when it is asked; all other series exist from the start.
type metrics struct {
	node *Node

	messages, bytesOut, framesOut, bytesIn, framesIn prometheus.Counter
	dropped                                          [numDropReasons]dropCounter
	sessions, arrivals, left, died, splits, refused  prometheus.Counter
	calls                                            *prometheus.CounterVec
	joins                                            *prometheus.CounterVec
	beats                                            *prometheus.CounterVec
	delay                                            prometheus.Histogram

	own []prometheus.Collector

	members, alive, skew, heard, latency, queued *prometheus.Desc
}

func newMetrics(reg prometheus.Registerer, n *Node) (*metrics, error) {
	m := &metrics{node: n}
	counter := func(name, help string, labels prometheus.Labels) prometheus.Counter {
		c := prometheus.NewCounter(prometheus.CounterOpts{Name: "converger_cluster_" + name, Help: help, ConstLabels: labels})
		m.own = append(m.own, c)
		return c
	}
	vec := func(name, help, label string, values ...string) *prometheus.CounterVec {
		c := prometheus.NewCounterVec(prometheus.CounterOpts{Name: "converger_cluster_" + name, Help: help}, []string{label})
		for _, v := range values {
			c.WithLabelValues(v)
		}
		m.own = append(m.own, c)
		return c
	}
	m.messages = counter("messages_queued_total", "Messages for other nodes that were queued.", nil)
	m.framesOut = counter("frames_sent_total", "Frames sent on streams to other nodes: messages and pings.", nil)
	m.bytesOut = counter("bytes_sent_total", "Bytes of these frames.", nil)
	m.framesIn = counter("frames_received_total", "Frames received on streams of other nodes.", nil)
	m.bytesIn = counter("bytes_received_total", "Bytes of these frames.", nil)
	for r, name := range dropNames {
		m.dropped[r].Counter = counter("dropped_total", "Messages between nodes that were dropped.", prometheus.Labels{"reason": name})
	}
	m.sessions = counter("sessions_total", "Streams opened to other nodes.", nil)
	m.arrivals = counter("arrivals_total", "Nodes heard for the first time, or again after they were gone.", nil)
	m.left = counter("departures_total", "Nodes that are no longer members.", prometheus.Labels{"how": "left"})
	m.died = counter("departures_total", "Nodes that are no longer members.", prometheus.Labels{"how": "died"})
	m.splits = counter("splits_total", "Times that a node which lives could no longer be heard.", nil)
	m.refused = counter("refused_total", "Connections and packets of nodes with another label or secret that were refused.", nil)
	m.calls = vec("calls_total", "Calls to other nodes.", "result", "ok", "timeout", "unreachable", "error")
	m.joins = vec("joins_total", "Attempts to join at a listed address that was no member.", "result", "ok", "failed")
	m.beats = vec("heartbeats_total", "Heartbeats to the database.", "result", "ok", "failed")
	m.delay = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "converger_cluster_message_delay_seconds",
		Help:    "Time from queueing a message on one node to handling it on another, by the corrected clocks.",
		Buckets: []float64{100e-6, 250e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.1, 0.5, 1, 5}})
	m.own = append(m.own, m.delay)

	peer := []string{"node", "id"}
	m.members = prometheus.NewDesc("converger_cluster_members",
		"Nodes by what this one makes of them, itself among the visible; split: lives, and can't be heard.", []string{"standing"}, nil)
	m.alive = prometheus.NewDesc("converger_cluster_alive", "Nodes that live, this one included.", nil, nil)
	m.skew = prometheus.NewDesc("converger_cluster_clock_skew_seconds", "How far this machine's clock is ahead of the database's.", nil, nil)
	m.heard = prometheus.NewDesc("converger_cluster_sync_age_seconds", "Time since a node was last heard; +Inf: never.", peer, nil)
	m.latency = prometheus.NewDesc("converger_cluster_latency_seconds", "Smoothed one-way delay to a node: half the round trip.", peer, nil)
	m.queued = prometheus.NewDesc("converger_cluster_queue", "Messages that wait to be sent to a node.", peer, nil)
	if reg != nil {
		if err := reg.Register(m); err != nil {
			return nil, fmt.Errorf("cluster: register metrics: %w", err)
		}
	}
	return m, nil
}

// Describe implements [prometheus.Collector].
func (m *metrics) Describe(ch chan<- *prometheus.Desc) {
	for _, c := range m.own {
		c.Describe(ch)
	}
	for _, d := range []*prometheus.Desc{m.members, m.alive, m.skew, m.heard, m.latency, m.queued} {
		ch <- d
	}
}

// Collect implements [prometheus.Collector].
func (m *metrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range m.own {
		c.Collect(ch)
	}
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	v := m.node.View()
	count := [numStandings]int{Visible: 1}
	for _, p := range v.Peers {
		count[p.Standing]++
		age := p.Heard.Seconds()
		if p.Heard < 0 {
			age = math.Inf(1)
		}
		gauge(m.heard, age, p.Name, p.ID.String())
		gauge(m.latency, p.Latency.Seconds(), p.Name, p.ID.String())
		gauge(m.queued, float64(p.Queued), p.Name, p.ID.String())
	}
	for s, c := range count {
		gauge(m.members, float64(c), Standing(s).String())
	}
	gauge(m.alive, float64(v.Alive))
	gauge(m.skew, v.Skew.Seconds())
}

func (m *metrics) sent(bytes int) {
	m.framesOut.Inc()
	m.bytesOut.Add(float64(bytes))
}

func (m *metrics) received(bytes int) {
	m.framesIn.Inc()
	m.bytesIn.Add(float64(bytes))
}

func (m *metrics) call(err error) {
	result := "error"
	switch {
	case err == nil:
		result = "ok"
	case errors.Is(err, ErrUnreachable):
		result = "unreachable"
	case errors.Is(err, context.DeadlineExceeded):
		result = "timeout"
	}
	m.calls.WithLabelValues(result).Inc()
}

func (m *metrics) join(ok bool) { m.joins.WithLabelValues(okOrFailed(ok)).Inc() }

func (m *metrics) beat(err error) {
	if m.node.config.Database != nil {
		m.beats.WithLabelValues(okOrFailed(err == nil)).Inc()
	}
}

func okOrFailed(ok bool) string {
	if ok {
		return "ok"
	}
	return "failed"
}
