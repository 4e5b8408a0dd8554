package redis

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

// What was admitted before a reset is not brought back after it: not what a node admitted alone, nor what it heard, whether
// it tells by a check, by a look-up or by itself. What it admitted alone since then is.
func TestResetIsNotUndone(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	tells := map[string]func(*Store, ratelimit.Item){
		"by a check": func(s *Store, it ratelimit.Item) {
			d := s.Take(t.Context(), s.clock.Now(), it)
			s.Refund(t.Context(), d.Booking(0), it)
		},
		"by a look-up": func(s *Store, it ratelimit.Item) { used(t, s, it) },
		"by itself": func(s *Store, _ ratelimit.Item) {
			if err := s.settle(t.Context(), true); err != nil {
				t.Error(err)
			}
		},
	}
	n := uint64(0)
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		for how, tell := range tells {
			for _, test := range []struct {
				name               string
				here, alone, after int // what the node was admitted, what it took alone, and what after the reset
			}{
				{"heard", 20, 0, 0}, {"took alone", 0, 20, 0}, {"heard, and took alone", 20, 20, 0}, {"took alone since", 20, 0, 20},
			} {
				t.Run(fmt.Sprint(a, "/", test.name, "/", how), func(t *testing.T) {
					n++
					it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: n}, Policy: rule(t, 100, a)}
					two := func(c *Config) { c.Nodes = func() int { return 2 } }
					one, other := unhurried(t, server.URL(), two), unhurried(t, server.URL(), two)
					take := func(s *Store, times int) {
						t.Helper()
						for range times {
							if !s.Take(t.Context(), s.clock.Now(), it).Allowed {
								t.Fatal("refused")
							}
						}
					}
					take(one, 10)
					take(other, test.here)
					other.breaker.set(open)
					take(other, test.alone)
					if err := one.Reset(t.Context(), one.clock.Now(), it); err != nil {
						t.Fatal(err)
					}
					take(one, 3)
					take(other, test.after)
					other.breaker.set(closed)
					other.failures.Add(1)
					tell(other, it)
					for _, s := range []*Store{one, other} {
						if got := used(t, s, it); got != 3+test.after {
							t.Errorf("%d used after a reset and %d more", got, 3+test.after)
						}
					}
					// Alone again, it has its share of what is left: nothing from before the reset counts against it.
					other.breaker.set(open)
					most := 50 - max(test.after, (3+test.after+1)/2)
					if a == ratelimit.TokenBucket {
						most = (97 - test.after) / 2
					}
					got := 0
					for other.Take(t.Context(), other.clock.Now(), it).Allowed {
						got++
					}
					if test.after == 0 && (got < most-1 || got > most+1) {
						t.Errorf("%d admitted alone, want %d", got, most)
					}
				})
			}
		}
	}
}

func used(t *testing.T, s *Store, it ratelimit.Item) int {
	t.Helper()
	u, err := s.Peek(t.Context(), s.clock.Now(), it)
	if err != nil {
		t.Fatal(err)
	}
	return int(u.Used)
}

// Redis remembers a reset for as long as a node may know of what was spent before, be the key there or not, and then no longer.
func TestResetEnds(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		for _, spent := range []int{0, 5} {
			s := unhurried(t, server.URL(), nil)
			it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: uint64(a)*10 + uint64(spent)}, Policy: rule(t, 10, a)}
			for range spent {
				s.Take(t.Context(), s.clock.Now(), it)
			}
			now := s.clock.Now()
			if err := s.Reset(t.Context(), now, it); err != nil {
				t.Fatal(err)
			}
			s.Take(t.Context(), s.clock.Now(), it) // a token is back in less time than that
			ttl, err := s.client.PTTL(t.Context(), s.key(it.Key)).Result()
			if want := time.Duration(it.Policy.Ends(now) - now); err != nil || ttl < want-time.Minute || ttl > want+time.Minute {
				t.Errorf("%v, %d spent: the key is kept for %v, want %v (%v)", a, spent, ttl, want, err)
			}
			value, err := s.client.Get(t.Context(), s.key(it.Key)).Result()
			if err != nil || len(strings.Fields(value)) != 10 {
				t.Errorf("%q (%v), want ten words", value, err)
			}
		}
	}
	s := inTestTime(t, server.URL())
	p := testPolicy(t, 10, ratelimit.TokenBucket)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 100}, Policy: p}
	if err := s.Reset(t.Context(), begin, it); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		at    ratelimit.Instant
		words int
	}{{p.Ends(begin) - 1e9, 10}, {p.Ends(begin) + 1e9, 9}} {
		s.Take(t.Context(), test.at, it)
		value, err := s.client.Get(t.Context(), s.key(it.Key)).Result()
		if err != nil || len(strings.Fields(value)) != test.words {
			t.Errorf("%q (%v), want %d words", value, err, test.words)
		}
	}
}

// What was spent is forgotten also where it is no longer limited, or not yet.
func TestResetWithoutALimit(t *testing.T) {
	t.Parallel()
	s := unhurried(t, redistest.Start(t).URL(), nil)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 7, Lo: 1}, Policy: rule(t, 10, ratelimit.FixedWindow)}
	s.Take(t.Context(), s.clock.Now(), it)
	if err := s.Reset(t.Context(), s.clock.Now(), ratelimit.Item{Key: it.Key}); err != nil {
		t.Fatal(err)
	}
	if got := used(t, s, it); got != 0 {
		t.Errorf("%d used", got)
	}
}
