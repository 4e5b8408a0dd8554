package redis

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	goredis "github.com/redis/go-redis/v9"

	"converger/internal/ratelimit"
)

type metrics struct {
	fallbacks *prometheus.CounterVec
	fallen    map[string]prometheus.Counter // its series, by reason
}

// Why a decision was taken without Redis.
const (
	reasonOpen        = "open"        // the breaker is: Redis was not asked
	reasonSettling    = "settling"    // another call is telling Redis what was admitted without it
	reasonTimeout     = "timeout"     // no answer in time
	reasonUnreachable = "unreachable" // no connection, or one that broke
	reasonBusy        = "busy"        // no connection was free
	reasonSignIn      = "sign_in"     // the password or the rights of the user
	reasonReadOnly    = "read_only"   // a replica
	reasonMemory      = "memory"      // Redis is full
	reasonCluster     = "cluster"     // a Redis Cluster, and the URL does not say so
	reasonRefused     = "refused"     // another error of Redis, such as while it loads
	reasonMalformed   = "malformed"   // an answer that is not understood
	reasonRefundLost  = "refund_lost" // no decision: what was to be given back stays counted
)

var reasons = []string{reasonOpen, reasonSettling, reasonTimeout, reasonUnreachable, reasonBusy, reasonSignIn, reasonReadOnly, reasonMemory,
	reasonCluster, reasonRefused, reasonMalformed, reasonRefundLost}

func reasonOf(err error) string {
	var timeout net.Error
	var said goredis.Error
	switch {
	case errors.Is(err, errMalformed):
		return reasonMalformed
	case errors.Is(err, goredis.ErrPoolTimeout), errors.Is(err, goredis.ErrPoolExhausted):
		return reasonBusy
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		return reasonTimeout
	case goredis.IsAuthError(err), goredis.IsPermissionError(err):
		return reasonSignIn
	case goredis.IsReadOnlyError(err):
		return reasonReadOnly
	case goredis.IsOOMError(err):
		return reasonMemory
	case goredis.HasErrorPrefix(err, "MOVED"):
		return reasonCluster
	case errors.As(err, &said):
		return reasonRefused
	}
	return reasonUnreachable
}

// fell counts a decision that was taken here because Redis did not answer.
func (s *Store) fell(err error) {
	reason := reasonOf(err)
	s.m.fallen[reason].Inc()
	s.outage.alone()
	s.outage.failed(reason, err, s.live())
}

// outage says once that Redis does not answer, and once that it does again.
type outage struct {
	log   *slog.Logger
	clock ratelimit.Clock // that no step reaches: that of the store follows the database's in a cluster
	down  atomic.Bool
	last  atomic.Int64 // the clock at the last failure
	n     atomic.Int64 // decisions taken alone in this outage

	mu     sync.Mutex // of what follows; taken when an outage begins, ends or is asked for
	since  ratelimit.Instant
	reason string
}

// alone counts a decision.
func (o *outage) alone() { o.n.Add(1) }

func (o *outage) failed(reason string, err error, nodes int) {
	now := o.clock.Now()
	o.last.Store(int64(now))
	if !o.down.CompareAndSwap(false, true) {
		return
	}
	o.mu.Lock()
	o.since, o.reason = now, reason
	o.mu.Unlock()
	line := "rate limits: Redis can't be asked, deciding with a share of each limit"
	if reason == reasonCluster {
		line += "; it is a Redis Cluster, so add ?cluster=true to RATE_LIMIT_REDIS_URL"
	}
	o.log.Warn(line, slog.Bool("outage", true), slog.String("reason", reason), slog.Any("error", err), slog.Int("nodes", nodes))
}

// well is called when Redis has answered: an outage is over after a second without a failure.
func (o *outage) well() {
	if !o.down.Load() {
		return
	}
	now := o.clock.Now()
	if int64(now)-o.last.Load() < int64(time.Second) || !o.down.CompareAndSwap(true, false) {
		return
	}
	o.mu.Lock()
	since := o.since
	o.mu.Unlock()
	o.log.Warn("rate limits: Redis answers again", slog.Bool("outage", false),
		slog.Int64("decided_alone", o.n.Swap(0)), slog.Duration("after", time.Duration(now-since).Round(time.Millisecond)))
}

// why is the reason of the present outage, "" if there is none.
func (o *outage) why() string {
	if !o.down.Load() {
		return ""
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.reason
}

func (s *Store) register(reg prometheus.Registerer) error {
	s.m.fallbacks = prometheus.NewCounterVec(prometheus.CounterOpts{
		Name:        "converger_rate_limit_fallbacks_total",
		Help:        "Decisions taken with a share of the limit because the one who counts could not be asked, by reason.",
		ConstLabels: prometheus.Labels{"backend": "redis"},
	}, []string{"reason"})
	s.m.fallen = make(map[string]prometheus.Counter, len(reasons))
	for _, r := range reasons {
		s.m.fallen[r] = s.m.fallbacks.WithLabelValues(r)
	}
	if reg == nil {
		return nil
	}
	own := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "converger_rate_limit_redis_" + name, Help: help}, value)
	}
	labels := prometheus.Labels{"backend": "redis"}
	for _, c := range []prometheus.Collector{
		s.m.fallbacks,
		own("breaker_state", "0: checks ask Redis; 1: probes are answered, and what was counted without Redis is brought there; 2: Redis is not asked.",
			func() float64 { return float64(s.breaker.state.Load()) }),
		own("connections", "Connections to Redis.", func() float64 { return float64(s.client.PoolStats().TotalConns) }),
		own("nodes", "Live nodes as this one knows: without Redis it enforces this part of every limit.", func() float64 { return float64(s.live()) }),
		own("clock_offset_seconds", "How far the clock of Redis is ahead of this node's.",
			func() float64 { return time.Duration(s.offset.Load()).Seconds() }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "converger_rate_limit_keys", Help: "Keys held in this node's memory.", ConstLabels: labels,
		}, func() float64 { return float64(s.shadow.keys()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "converger_rate_limit_keys_max", Help: "The bound on converger_rate_limit_keys.", ConstLabels: labels,
		}, func() float64 { return float64(s.shadow.bound()) }),
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "converger_rate_limit_overflow", Help: "1 while subjects without room share counters, and for ten seconds after.", ConstLabels: labels,
		}, func() float64 {
			if s.shadow.overflowing(s.serverTime(s.clock.Now())) {
				return 1
			}
			return 0
		}),
		prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name: "converger_rate_limit_overflow_total", Help: "Checks that were decided by a shared counter.", ConstLabels: labels,
		}, func() float64 { return float64(s.shadow.overflowed.Load()) }),
	} {
		if err := reg.Register(c); err != nil {
			return err
		}
	}
	return nil
}
