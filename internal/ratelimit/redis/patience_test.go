package redis

import (
	"context"
	"io"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

// promised is what a check may wait for Redis at most, as docs/redis.md says.
const promised = 50 * time.Millisecond

// dialBy makes a client's connections in a way of its own.
type dialBy func() (net.Conn, error)

func (d dialBy) DialHook(goredis.DialHook) goredis.DialHook {
	return func(context.Context, string, string) (net.Conn, error) { return d() }
}
func (dialBy) ProcessHook(next goredis.ProcessHook) goredis.ProcessHook { return next }
func (dialBy) ProcessPipelineHook(next goredis.ProcessPipelineHook) goredis.ProcessPipelineHook {
	return next
}

// However Redis keeps silent, no check waits longer than is promised; in a bubble, where time is exact on a busy machine too.
// Nobody may wait for a free connection in it: the client shares the timers of that with those outside.
func TestLongestWait(t *testing.T) {
	t.Parallel()
	silent := func(reads bool) dialBy {
		return func() (net.Conn, error) {
			ours, theirs := net.Pipe()
			if reads {
				go func() { _, _ = io.Copy(io.Discard, theirs) }()
			}
			return ours, nil
		}
	}
	for _, test := range []struct {
		name string
		dial dialBy
	}{
		{"a connection that is not made", func() (net.Conn, error) { time.Sleep(dialTimeout); return nil, context.DeadlineExceeded }},
		{"a server that reads and never answers", silent(true)},
		{"a server that does not read", silent(false)},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				c := Config{Target: target(t, "redis://127.0.0.1:1"), Installation: "test", Clock: ratelimit.NewClock(), Logger: slog.New(slog.DiscardHandler)}
				s, err := New(c)
				if err != nil {
					t.Fatal(err)
				}
				s.client.AddHook(test.dial)
				p := rule(t, 50, ratelimit.SlidingWindow)
				one, two := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: p}, ratelimit.Item{Key: ratelimit.Key{Hi: 8}, Policy: p}
				for name, check := range map[string]func(){
					"Take": func() {
						if d := s.Take(t.Context(), s.clock.Now(), one); !d.Allowed || d.Alone == 0 {
							t.Errorf("Take: %+v", d)
						}
					},
					"TakeAll": func() {
						if d := s.TakeAll(t.Context(), s.clock.Now(), []ratelimit.Item{one, two}); !d.Allowed || d.Alone == 0 {
							t.Errorf("TakeAll: %+v", d)
						}
					},
					"Reserve": func() {
						if d := s.Reserve(t.Context(), s.clock.Now(), one, time.Minute); !d.Allowed || d.Alone == 0 {
							t.Errorf("Reserve: %+v", d)
						}
					},
					"Peek": func() {
						if u, err := s.Peek(t.Context(), s.clock.Now(), one); err == nil {
							t.Errorf("Peek: %+v", u)
						}
					},
					"Reset": func() {
						if s.Reset(t.Context(), s.clock.Now(), one) == nil {
							t.Error("Reset: no error")
						}
					},
				} {
					began := time.Now()
					if check(); time.Since(began) != promised {
						t.Errorf("%s waited %v, want %v", name, time.Since(began), promised)
					}
				}
				time.Sleep(2 * dialTimeout) // connections in the making end
				if err := s.Close(); err != nil {
					t.Error(err)
				}
			})
		})
	}
}

// Who finds all connections taken waits for one for a part of that time, is decided without Redis, and is counted as such.
func TestAllConnectionsTaken(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := newStore(t, server.URL()+"?pool_size=1", nil)
	s.patience = patience // what ends the wait is the pool's
	client := s.client.(*goredis.Client)
	if most := client.Options().PoolTimeout; most <= 0 || most >= promised {
		t.Errorf("a check may wait %v for a connection, and %v in all", most, promised)
	}
	taken := client.Conn()
	if err := taken.Ping(t.Context()).Err(); err != nil {
		t.Fatal(err)
	}
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7}, Policy: rule(t, 50, ratelimit.FixedWindow)}
	if d := s.Take(t.Context(), s.clock.Now(), it); !d.Allowed || d.Alone == 0 || s.fallbacks(t, reasonBusy) != 1 {
		t.Errorf("%+v, and %d are counted as busy", d, s.fallbacks(t, reasonBusy))
	}
	if err := taken.Close(); err != nil {
		t.Error(err)
	}
	if d := s.Take(t.Context(), s.clock.Now(), it); !d.Allowed || d.Alone != 0 || d.Remaining != 48 {
		t.Errorf("with a free connection: %+v, want both counted at Redis", d)
	}
}
