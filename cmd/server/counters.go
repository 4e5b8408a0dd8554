package main

import (
	"context"
	"encoding/hex"
	"fmt"
	"log/slog"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/ratelimit"
	limitcluster "converger/internal/ratelimit/cluster"
	"converger/internal/ratelimit/local"
	"converger/internal/ratelimit/owner"
	"converger/internal/ratelimit/redis"
)

// counters makes what counts limits, and the clock by which they are counted: for every bucket the backend that it is
// configured to have.
func (h *hub) counters() (ratelimit.Store, ratelimit.Clock, error) {
	clock := ratelimit.NewClock()
	if h.node != nil {
		clock = ratelimit.ClockFrom(func() ratelimit.Instant { return ratelimit.Instant(h.node.Now()) })
	}
	stores := map[ratelimit.Backend]ratelimit.Store{}
	for _, b := range ratelimit.Buckets() {
		backend := h.cfg.Backend(b)
		if stores[backend] != nil {
			continue
		}
		s, err := h.counter(backend, clock)
		if err != nil {
			return nil, clock, err
		}
		stores[backend] = s
	}
	if len(stores) == 1 {
		for _, s := range stores {
			return s, clock, nil
		}
	}
	return ratelimit.NewRouter(func(b ratelimit.Bucket) ratelimit.Store { return stores[h.cfg.Backend(b)] }), clock, nil
}

func (h *hub) counter(backend ratelimit.Backend, clock ratelimit.Clock) (_ ratelimit.Store, err error) {
	switch backend {
	case ratelimit.BackendCluster:
		h.shared, err = limitcluster.New(limitcluster.Config{
			MaxKeys: h.cfg.RateLimitMaxKeys, Network: h.node, Clock: clock, SyncInterval: h.cfg.RateLimitSync,
			FullOnSplit: h.cfg.RateLimitFull, Registerer: h.metrics, Logger: h.log})
		if err == nil {
			h.node.Handle(limitcluster.Topic, h.shared.Handler())
		}
		return h.shared, err
	case ratelimit.BackendOwner:
		h.owned, err = owner.New(owner.Config{
			MaxKeys: h.cfg.RateLimitMaxKeys, Network: h.node, Clock: clock,
			FullOnSplit: h.cfg.RateLimitFull, Registerer: h.metrics, Logger: h.log})
		if err == nil {
			h.node.Handle(owner.Topic, h.owned.Handler())
		}
		return h.owned, err
	case ratelimit.BackendRedis:
		target, err := redis.ParseURL(h.cfg.RateLimitRedis.Reveal())
		if err != nil {
			return nil, fmt.Errorf("RATE_LIMIT_REDIS_URL %w", err)
		}
		key, _, err := deriveKeys(h.cfg, "rate limit installation")
		if err != nil {
			return nil, err
		}
		c := redis.Config{Target: target, Installation: hex.EncodeToString(key[:8]), MaxKeys: h.cfg.RateLimitMaxKeys, Clock: clock,
			Registerer: h.metrics, Logger: h.log}
		if h.node != nil {
			c.Nodes = func() int { return h.node.View().Alive }
		}
		h.remote, err = redis.New(c)
		return h.remote, err
	}
	return local.New(local.Config{
		MaxKeys: h.cfg.RateLimitMaxKeys, Clock: clock,
		Registerer: prometheus.WrapRegistererWith(prometheus.Labels{"backend": "local"}, h.metrics)})
}

// countersPatience is how long a start waits for the counts of the others.
const countersPatience = 5 * time.Second

// redisPatience is how long it waits for Redis: an outage of it must not become one of starts.
const redisPatience = 2 * time.Second

// startCounters has what the other nodes have counted brought here, so that a start does not loosen a limit, and
// starts the exchange with them.
func (h *hub) startCounters(ctx context.Context, life *lifetimes) {
	ask := func(sync func(context.Context) error, otherwise string) {
		asking, cancel := context.WithTimeout(ctx, countersPatience)
		defer cancel()
		if err := sync(asking); err != nil && ctx.Err() == nil {
			h.log.Warn(otherwise, slog.Any("error", err))
		}
	}
	const looser = "counts of other nodes could not be had: limits are looser for a window"
	if h.remote != nil {
		joining, cancel := context.WithTimeout(ctx, redisPatience)
		if err := h.remote.Join(joining); err != nil && ctx.Err() == nil {
			h.log.Warn("Redis can't be asked: until it can this node does not know of others that share its limits (RATE_LIMIT_REDIS_URL)",
				slog.Any("error", err))
		}
		cancel()
		life.start("rate limits at Redis", h.remote.Run)
	}
	if h.node != nil {
		ask(h.proofs.Sync, "proofs of other nodes could not be had: providers have to prove themselves to this node, too")
		life.start("proofs of providers", h.proofs.Run)
	}
	if h.shared != nil {
		ask(h.shared.Sync, looser)
		life.start("rate limit reports", h.shared.Run)
	}
	if h.owned != nil { // the last: what it takes over is current for a moment only
		ask(h.owned.Sync, looser)
		life.start("rate limit owners", h.owned.Run)
	}
	if h.node != nil {
		h.node.Open()
	}
}
