package redis

import (
	"fmt"
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/ratelimittest"
	"converger/internal/ratelimit/redis/redistest"
)

// begin is the first moment of a window of every scale up to an hour.
const begin = ratelimit.Instant(500_000 * time.Hour)

func target(t testing.TB, url string) Target {
	t.Helper()
	target, err := ParseURL(url)
	if err != nil {
		t.Fatal(err)
	}
	return target
}

// newStore makes a store; change adjusts its configuration.
func newStore(t testing.TB, url string, change func(*Config)) *Store {
	t.Helper()
	c := Config{Target: target(t, url), Installation: "test", Clock: ratelimit.NewClock(), MaxKeys: 100_000,
		Registerer: prometheus.NewRegistry(), Logger: slog.New(slog.DiscardHandler)}
	if change != nil {
		change(&c)
	}
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// unhurried makes a store with so much patience that a busy machine does not make it decide alone.
func unhurried(t testing.TB, url string, change func(*Config)) *Store {
	t.Helper()
	s := newStore(t, url, func(c *Config) {
		c.Target.patience = patience
		if change != nil {
			change(c)
		}
	})
	s.patience = patience
	return s
}

var stores atomic.Int64

// inTestTime makes a store that takes its caller's time and has keys of its own.
func inTestTime(t testing.TB, url string) *Store {
	s := unhurried(t, url, nil)
	s.test = true
	s.prefix = fmt.Sprintf("test%d:", stores.Add(1))
	return s
}

func TestLaws(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	ratelimittest.Run(t, func(t *testing.T) ratelimit.Store { return inTestTime(t, server.URL()) })
}
