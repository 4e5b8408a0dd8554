package redis

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

func metricOf(t testing.TB, m prometheus.Metric) float64 {
	t.Helper()
	var v dto.Metric
	if err := m.Write(&v); err != nil {
		t.Fatal(err)
	}
	return v.GetCounter().GetValue() + v.GetGauge().GetValue()
}

// All series exist from the start, and share their names with the other backends.
func TestSeries(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	newStore(t, "redis://127.0.0.1:1", func(c *Config) { c.Registerer = reg })
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]int{}
	for _, f := range families {
		got[f.GetName()] = len(f.GetMetric())
	}
	for _, name := range []string{"breaker_state", "connections", "nodes", "clock_offset_seconds"} {
		if got["converger_rate_limit_redis_"+name] != 1 {
			t.Errorf("no series %s in %v", name, got)
		}
	}
	for _, name := range []string{"keys", "keys_max", "overflow", "overflow_total"} {
		if got["converger_rate_limit_"+name] != 1 {
			t.Errorf("no series %s in %v", name, got)
		}
	}
	if got["converger_rate_limit_fallbacks_total"] != len(reasons) {
		t.Errorf("fallbacks: %v", got)
	}
}

// An outage is one line at its start and one at its end, and neither tells the password.
func TestOutageIsTwoLines(t *testing.T) {
	t.Parallel()
	var log bytes.Buffer
	server := redistest.Start(t, "--requirepass", "right")
	s := unhurried(t, "redis://:wrong-secret@"+server.Addr(), func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(t, 50, ratelimit.FixedWindow)}
	for range 10 {
		if d := s.Take(t.Context(), s.clock.Now(), it); !d.Allowed || d.Alone == 0 {
			t.Errorf("with a wrong password: %+v", d)
		}
		if state := s.States(s.clock.Now()); len(state) != 1 || state[0].Backend != "redis" || !state[0].FallingBack || state[0].Breaker == "" {
			t.Errorf("an operator sees %+v", state)
		}
	}
	if n := s.fallbacks(t, reasonSignIn); n == 0 {
		t.Errorf("a wrong password is not counted as such: %v", log.String())
	}
	tell("AUTH right", "CONFIG SET requirepass wrong-secret")(t, server)
	eventually(t, "the outage to end", func() bool {
		s.Take(t.Context(), s.clock.Now(), it)
		return s.Degraded() == nil
	})
	if got := strings.Count(log.String(), "\n"); got != 2 || strings.Contains(log.String(), "secret") ||
		!strings.Contains(log.String(), "sign_in") || !strings.Contains(log.String(), "answers again") {
		t.Errorf("%d lines:\n%s", got, log.String())
	}
}

// How long Redis has not failed is told by a clock that a step of the wall clock, or of the database's, does not reach.
func TestOutageEndsByAClockThatNeverSteps(t *testing.T) {
	t.Parallel()
	now := begin
	steps := ratelimit.ClockFrom(func() ratelimit.Instant { return now })
	s := newStore(t, "redis://127.0.0.1:1", func(c *Config) { c.Clock = steps })
	before := s.outage.clock.Now()
	if now = now.Add(24 * time.Hour); s.outage.clock.Now() >= before.Add(24*time.Hour) {
		t.Error("a clock that steps is what tells how long an outage has been over")
	}
	s.outage.clock = steps // steady from here on
	s.fell(errMalformed)
	now = now.Add(time.Second - 1)
	if s.outage.well(); !s.outage.down.Load() {
		t.Error("an outage ends within a second of the last failure")
	}
	now++
	if s.outage.well(); s.outage.down.Load() {
		t.Error("an outage goes on a second after the last failure")
	}
}

func TestBreaker(t *testing.T) {
	t.Parallel()
	second := ratelimit.Instant(time.Second)
	t.Run("twenty calls are needed", func(t *testing.T) {
		t.Parallel()
		b := newBreaker()
		for range tripCalls - 1 {
			if b.report(begin, true) {
				t.Fatal("opened by too few calls")
			}
		}
		if !b.report(begin, true) || !b.is(open) {
			t.Error("not opened by 20 failures of 20")
		}
		if b.report(begin, true) {
			t.Error("opened twice")
		}
	})
	t.Run("one in a hundred is not more than one in a hundred", func(t *testing.T) {
		t.Parallel()
		b := newBreaker()
		for i := range 1980 {
			b.report(begin.Add(time.Duration(i)*4*time.Millisecond), false)
		}
		now := begin.Add(9 * time.Second)
		for i := range 20 {
			if b.report(now, true) {
				t.Fatalf("opened by %d failures of 2000", i+1)
			}
		}
		if !b.report(now, true) {
			t.Error("not opened by 21 failures of 2001")
		}
	})
	t.Run("what is older than ten seconds does not count", func(t *testing.T) {
		t.Parallel()
		b := newBreaker()
		for range 19 {
			b.report(begin, true)
		}
		if b.report(begin+10*second, true) {
			t.Error("opened by what was ten seconds ago")
		}
		for range 18 {
			b.report(begin+11*second, true)
		}
		if !b.report(begin+19*second, true) {
			t.Error("not opened by 20 failures of ten seconds")
		}
		b.set(closed)
		if b.report(begin+19*second, true) {
			t.Error("the count did not begin anew")
		}
	})
}

func TestReasons(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := unhurried(t, server.URL(), nil)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(t, 50, ratelimit.FixedWindow)}
	for _, test := range []struct{ breaks, mends, reason string }{
		{"REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE", reasonReadOnly},
		{"CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", reasonMemory},
		{"SET " + s.key(it.Key) + " 1", "DEL " + s.key(it.Key), ""}, // what somebody else wrote there is no budget
		{"LPUSH " + s.key(it.Key) + " 1", "DEL " + s.key(it.Key), reasonRefused},
	} {
		tell(test.breaks)(t, server)
		d := s.Take(t.Context(), s.clock.Now(), it)
		if alone := d.Alone != 0; !d.Allowed || alone != (test.reason != "") || alone && s.fallbacks(t, test.reason) != 1 {
			t.Errorf("%s: %+v, wants to be counted as %q", test.breaks, d, test.reason)
		}
		tell(test.mends)(t, server)
	}
	if got := reasonOf(errors.New("dial tcp: connection refused")); got != reasonUnreachable {
		t.Error(got)
	}
}
