package http

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// statusClasses are the values of the label status: 429 stands apart from the other 4xx, since it asks for another
// reaction.
var statusClasses = [...]string{"1xx", "2xx", "3xx", "4xx", "429", "5xx"}

func statusClass(status int) int {
	switch {
	case status == http.StatusTooManyRequests:
		return 4
	case status < 200:
		return 0
	case status < 500:
		return status/100 - 1
	}
	return 5
}

// methodLabel keeps the label method to a fixed set: methods are invented by whoever calls.
func methodLabel(m string) string {
	switch m {
	case http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete, http.MethodOptions:
		return m
	}
	return "other"
}

// metrics are the front's series. Their labels come from the route table only.
type metrics struct {
	requests *prometheus.CounterVec
	duration *prometheus.HistogramVec
	inFlight prometheus.Gauge
	bad      *prometheus.CounterVec // refused signatures, by route
	denied   prometheus.Counter
}

// routeSeries are the series of one route, looked up once.
type routeSeries struct {
	requests [len(statusClasses)]prometheus.Counter
	duration prometheus.Observer
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_http_requests_total",
			Help: "Requests answered, by method, route pattern and class of status; 429 is a class of its own.",
		}, []string{"method", "route", "status"}),
		duration: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "converger_http_request_duration_seconds",
			Help:    "From the first look at a request to the end of its answer.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
		}, []string{"method", "route"}),
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: "converger_http_requests_in_flight",
			Help: "Requests that are being answered.",
		}),
		bad: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_http_signatures_refused_total",
			Help: "Webhooks refused because they were not signed, or not well, by route pattern.",
		}, []string{"route"}),
	}
	m.denied = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "converger_http_addresses_denied_total",
		Help: "Requests refused because their address is in a range that the operator denies.",
	})
	if reg != nil {
		reg.MustRegister(m.requests, m.duration, m.inFlight, m.bad, m.denied)
	}
	return m
}

// series makes the series of a route, at 0.
func (m *metrics) series(method, pattern string) *routeSeries {
	s := &routeSeries{duration: m.duration.WithLabelValues(method, pattern)}
	for i, class := range statusClasses {
		s.requests[i] = m.requests.WithLabelValues(method, pattern, class)
	}
	return s
}

func (m *metrics) observe(c *call, took time.Duration) {
	status := c.status
	if status == 0 {
		status = http.StatusOK // nothing was written: net/http sends 200
	}
	if c.route != nil {
		c.route.series.requests[statusClass(status)].Inc()
		c.route.series.duration.Observe(took.Seconds())
		return
	}
	method := methodLabel(c.r.Method)
	m.requests.WithLabelValues(method, unmatched, statusClasses[statusClass(status)]).Inc()
	m.duration.WithLabelValues(method, unmatched).Observe(took.Seconds())
}
