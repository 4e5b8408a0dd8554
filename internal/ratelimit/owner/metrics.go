package owner

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

type metrics struct {
	calls, asked, bytes        prometheus.Counter
	copies, dropped, malformed prometheus.Counter
	passed                     prometheus.Counter
	fallbacks                  *prometheus.CounterVec
}

var reasons = []string{"unreachable", "timeout", "busy", "refused", "malformed", "refund_lost"}

func reasonOf(err error) string {
	switch {
	case errors.Is(err, cluster.ErrUnreachable):
		return "unreachable"
	case errors.Is(err, errBusy):
		return "busy"
	case errors.Is(err, cluster.ErrRefused):
		return "refused"
	case errors.Is(err, errMalformed):
		return "malformed"
	case errors.Is(err, context.DeadlineExceeded):
		return "timeout"
	}
	return "unreachable"
}

// fell counts a decision that was taken here because an owner did not answer.
func (s *Store) fell(err error) {
	reason := reasonOf(err)
	s.m.fallbacks.WithLabelValues(reason).Inc()
	s.outage.failed(reason, err)
}

// outage says once that owners do not answer, and once that they do again, each at
// most once a second.
type outage struct {
	log   *slog.Logger
	clock ratelimit.Clock // that no step reaches: that of the store follows the database's
	down  atomic.Bool
	last  atomic.Int64 // the clock at the last failure
	n     atomic.Int64 // failures of this outage
	said  atomic.Int64 // the clock at the last line
}

func (o *outage) failed(reason string, err error) {
	now := int64(o.clock.Now())
	o.last.Store(now)
	o.n.Add(1)
	if said := o.said.Load(); now-said >= int64(time.Second) && !o.down.Load() && o.said.CompareAndSwap(said, now) {
		o.down.Store(true)
		o.log.Warn("rate limits: the owner of a key can't be asked, deciding with a share of the limit",
			slog.Bool("outage", true), slog.String("reason", reason), slog.Any("error", err))
	}
}

// well is called when an owner has answered, look now and then.
func (o *outage) well() {
	if o.down.Load() {
		o.look()
	}
}

// look ends an outage after a second without a failure.
func (o *outage) look() {
	now := int64(o.clock.Now())
	if now-o.last.Load() < int64(time.Second) || !o.down.CompareAndSwap(true, false) {
		return
	}
	o.said.Store(now)
	o.log.Warn("rate limits: owners of keys answer again", slog.Bool("outage", false), slog.Int64("decided_alone", o.n.Swap(0)))
}

func (s *Store) register(reg prometheus.Registerer) error {
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: "converger_rate_limit_owner_" + name, Help: help})
	}
	s.m = metrics{
		calls:     counter("calls_total", "Calls to owners of keys; one carries all checks that waited."),
		asked:     counter("checks_total", "Checks, refunds and looks that were sent to owners of keys."),
		bytes:     counter("bytes_total", "Bytes sent to owners of keys, and of copies."),
		copies:    counter("copies_total", "Copies of keys sent to the next of their owner."),
		dropped:   counter("copies_dropped_total", "Messages with copies, or copies received, that found no room."),
		passed:    counter("passed_on_total", "Checks of others that were passed on while a key moved to a node that joined."),
		malformed: counter("malformed_total", "Messages with copies that could not be read."),
		fallbacks: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name:        "converger_rate_limit_fallbacks_total",
			Help:        "Decisions taken with a share of the limit because the one who counts could not be asked, by reason.",
			ConstLabels: prometheus.Labels{"backend": "owner"},
		}, []string{"reason"}),
	}
	for _, r := range reasons {
		s.m.fallbacks.WithLabelValues(r)
	}
	if reg == nil {
		return nil
	}
	for _, c := range []prometheus.Collector{s.m.calls, s.m.asked, s.m.bytes, s.m.copies, s.m.dropped, s.m.malformed, s.m.passed, s.m.fallbacks} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}
