package ratelimit

import (
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// slow is the reference: every admission is remembered with its moment, and the
// rules are applied to the whole list as they are written down.
type slow struct {
	rule  Rule
	spent []spend
}

type spend struct {
	at   Instant
	cost int64
}

func (s *slow) admits(cost int64, now Instant) bool {
	if cost > s.rule.Limit && s.rule.Algorithm != TokenBucket {
		return false
	}
	switch s.rule.Algorithm {
	case TokenBucket:
		return s.level(now).Cmp(big.NewRat(s.burst()-cost, 1)) <= 0 && s.rule.Limit > 0
	case SlidingWindow:
		scale := s.rule.Scale.Milliseconds()
		ms := int64(now) / 1e6
		index, into := ms/scale, ms%scale
		prev := min(s.count(index-1), s.rule.Limit)
		return s.count(index)+prev*(scale-into-1)/scale+cost <= s.rule.Limit
	default:
		return s.count(int64(now)/1e6/s.rule.Scale.Milliseconds())+cost <= s.rule.Limit
	}
}

func (s *slow) count(index int64) (n int64) {
	for _, x := range s.spent {
		if int64(x.at)/1e6/s.rule.Scale.Milliseconds() == index {
			n += x.cost
		}
	}
	return n
}

func (s *slow) burst() int64 {
	if s.rule.Burst > 0 {
		return s.rule.Burst
	}
	return s.rule.Limit
}

// level is what a token bucket lacks to be full, exactly.
func (s *slow) level(now Instant) *big.Rat {
	level, last := new(big.Rat), Instant(0)
	drain := func(to Instant) {
		level.Sub(level, big.NewRat(int64(to-last)*s.rule.Limit, s.rule.Scale.Nanoseconds()))
		if level.Sign() < 0 {
			level.SetInt64(0)
		}
		last = to
	}
	for i, x := range s.spent {
		if i == 0 {
			last = x.at
		}
		drain(x.at)
		level.Add(level, big.NewRat(x.cost, 1))
	}
	if len(s.spent) > 0 {
		drain(now)
	}
	return level
}

func mustPolicy(t interface{ Fatal(...any) }, r Rule) *Policy {
	p, err := NewPolicy(APIRead, r)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

const noon = Instant(500_000 * time.Hour)

func genRule(t *rapid.T, exact bool) Rule {
	r := Rule{
		Limit:     rapid.Int64Range(1, 20).Draw(t, "limit"),
		Scale:     time.Duration(rapid.Int64Range(1000, 5000).Draw(t, "scale")) * time.Millisecond,
		Algorithm: Algorithm(rapid.IntRange(0, 2).Draw(t, "algorithm")),
	}
	if exact { // a token is a whole number of nanoseconds
		r.Limit = rapid.SampledFrom([]int64{1, 2, 4, 5, 8, 10, 20}).Draw(t, "limit")
	}
	if r.Algorithm == TokenBucket {
		r.Burst = rapid.Int64Range(0, 2*r.Limit).Draw(t, "burst")
	}
	return r
}

func TestFastEqualsSlow(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := genRule(t, true)
		p, ref := mustPolicy(t, r), &slow{rule: r}
		now := noon
		s := p.Fresh(now)
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(r.Scale)/4).Draw(t, "gap")))
			cost := rapid.Uint32Range(1, uint32(r.Limit)+1).Draw(t, "cost")
			want := ref.admits(int64(cost), now)
			next, d := p.Decide(s, cost, now)
			if d.Allowed != want {
				t.Fatalf("%+v: cost %d at +%v: allowed %v, want %v", r, cost, time.Duration(now-noon), d.Allowed, want)
			}
			if d.Allowed {
				ref.spent = append(ref.spent, spend{now, int64(cost)})
			}
			room := uint32(0)
			for ref.admits(int64(room)+1, now) {
				room++
			}
			if d.Remaining != room {
				t.Fatalf("%+v: %d remaining, want %d", r, d.Remaining, room)
			}
			s = next
		}
	})
}

// The wait is exact: a moment earlier the same request is refused, then it is
// admitted. A cost of 1 never waits longer than a window.
func TestWaitIsExact(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := genRule(t, false)
		p := mustPolicy(t, r)
		now := noon.Add(time.Duration(rapid.Int64Range(0, int64(r.Scale)).Draw(t, "into")))
		s := p.Fresh(now)
		for range rapid.IntRange(1, 60).Draw(t, "requests") {
			cost := rapid.Uint32Range(1, p.Quota()).Draw(t, "cost")
			next, d := p.Decide(s, cost, now)
			if !d.Allowed {
				then := now.Add(time.Duration(d.WaitMs) * time.Millisecond)
				if _, d := p.Decide(next, cost, then); !d.Allowed {
					t.Fatalf("%+v: cost %d refused again after %d ms", r, cost, d.WaitMs)
				}
				if _, d := p.Decide(next, cost, then.Add(-time.Millisecond)); d.Allowed {
					t.Fatalf("%+v: cost %d would have passed a millisecond earlier", r, cost)
				}
				if cost == 1 && d.WaitMs > p.WindowMs() {
					t.Fatalf("%+v: a wait of %d ms", r, d.WaitMs)
				}
			}
			s = next
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(r.Scale)/4).Draw(t, "gap")))
		}
	})
}

// What operators are told is exact, too: a moment earlier something is in use, then nothing is.
func TestUsageTellsWhenAllIsFree(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := genRule(t, false)
		p := mustPolicy(t, r)
		now := noon.Add(time.Duration(rapid.Int64Range(0, int64(r.Scale)).Draw(t, "into")))
		s := p.Fresh(now)
		for range rapid.IntRange(1, 20).Draw(t, "requests") {
			s, _ = p.Decide(s, rapid.Uint32Range(1, p.Quota()).Draw(t, "cost"), now)
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(r.Scale)/4).Draw(t, "gap")))
		}
		now = now.Add(time.Duration(rapid.Int64Range(-int64(r.Scale)/4, 2*int64(r.Scale)).Draw(t, "look")))
		u := p.Usage(s, now)
		if u.Policy != p || u.Used != p.Used(s, now) || u.Remaining != p.Quota()-min(p.Quota(), u.Used) || (u.Used == 0) != (u.WaitMs == 0) {
			t.Fatalf("%+v: %+v", r, u)
		}
		whole := now.Add(time.Duration(u.WaitMs) * time.Millisecond)
		if used := p.Used(s, whole); used != 0 {
			t.Fatalf("%+v: %d used after %d ms", r, used, u.WaitMs)
		}
		if u.WaitMs > 0 && p.Used(s, whole.Add(-time.Millisecond)) == 0 {
			t.Fatalf("%+v: all free before %d ms", r, u.WaitMs)
		}
	})
}

// A caller of a token bucket that never runs ahead of the rate is never refused,
// however unevenly it comes and however the numbers divide.
func TestWithinTheRateIsNeverRefused(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := Rule{
			Limit:     rapid.Int64Range(1, MaxLimit).Draw(t, "limit"),
			Scale:     time.Duration(rapid.Int64Range(1000, 86_400_000).Draw(t, "scale")) * time.Millisecond,
			Algorithm: TokenBucket,
		}
		r.Burst = rapid.Int64Range(1, min(r.Limit, 1000)).Draw(t, "burst")
		p, ref := mustPolicy(t, r), &slow{rule: r}
		now := noon
		s := p.Fresh(now)
		token := max(r.Scale.Nanoseconds()/r.Limit, 1)
		for range rapid.IntRange(1, 100).Draw(t, "requests") {
			now = now.Add(time.Duration(rapid.Int64Range(0, 4*token).Draw(t, "gap")))
			cost := rapid.Uint32Range(1, 3).Draw(t, "cost")
			if !ref.admits(int64(cost), now) {
				continue
			}
			ref.spent = append(ref.spent, spend{now, int64(cost)})
			var d Decision
			if s, d = p.Decide(s, cost, now); !d.Allowed {
				t.Fatalf("%+v: refused at +%v within the rate", r, time.Duration(now-noon))
			}
		}
	})
}

// What a token bucket admits over the exact rule is less than a nanosecond's
// refill a request.
func TestTokenBucketKeepsTheRate(t *testing.T) {
	t.Parallel()
	for _, limit := range []int64{1, 3, 7, 997, 999_983} {
		p := mustPolicy(t, Rule{Limit: limit, Scale: time.Second, Algorithm: TokenBucket})
		s, admitted := p.Fresh(noon), int64(0)
		const seconds, offers = 10, 200_000
		for n := range offers {
			var d Decision
			if s, d = p.Decide(s, 1, noon.Add(time.Duration(n)*seconds*time.Second/offers)); d.Allowed {
				admitted++
			}
		}
		bound := min(limit*(seconds+1)+1+admitted*limit/1e9, offers)
		if admitted > bound || admitted < min(limit*(seconds+1)*98/100, offers)-1 {
			t.Errorf("%d per second admitted %d in %d s, at most %d", limit, admitted, seconds, bound)
		}
	}
}

func TestReciprocalDivides(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p := mustPolicy(t, Rule{Limit: 1, Scale: time.Duration(rapid.Int64Range(1000, 86_400_000).Draw(t, "ms")) * time.Millisecond})
		x := rapid.Uint64Range(0, 1<<58-1).Draw(t, "x")
		if rapid.Bool().Draw(t, "near a multiple") {
			x = x/uint64(p.scaleMs)*uint64(p.scaleMs) - rapid.Uint64Range(0, min(1, x/uint64(p.scaleMs))).Draw(t, "less")
		}
		q, r := p.div(x)
		if q != x/uint64(p.scaleMs) || r != x%uint64(p.scaleMs) {
			t.Fatalf("%d / %d = %d rest %d", x, p.scaleMs, q, r)
		}
	})
}

// A change of policy keeps the use, whatever it is changed from and to.
func TestConvertKeepsUse(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		from, to := mustPolicy(t, genRule(t, false)), mustPolicy(t, genRule(t, false))
		now := noon.Add(time.Duration(rapid.Int64Range(0, 1e10).Draw(t, "into")))
		s := from.Fresh(now)
		for range rapid.IntRange(0, 30).Draw(t, "requests") {
			s, _ = from.Decide(s, 1, now)
			now = now.Add(time.Duration(rapid.Int64Range(0, 1e8).Draw(t, "gap")))
		}
		want := from.Used(s, now)
		if to.Algorithm() == TokenBucket {
			want = min(want, to.Quota())
		}
		converted := to.Convert(from.Shape(), s, now)
		if got := to.Used(converted, now); got != want {
			t.Fatalf("%+v to %+v: %d used, want %d", from.Rule(), to.Rule(), got, want)
		}
	})
}

func TestOver(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		alg   Algorithm
		after time.Duration // of spending everything at noon
	}{{FixedWindow, 2 * time.Second}, {SlidingWindow, 4 * time.Second}, {TokenBucket, 2 * time.Second}} {
		p := mustPolicy(t, Rule{Limit: 10, Scale: 2 * time.Second, Algorithm: tt.alg})
		s, _ := p.Decide(p.Fresh(noon), 10, noon)
		end := noon.Add(tt.after)
		if Over(p.Shape(), s.Word, end-1) {
			t.Errorf("%v is over too early", tt.alg)
		}
		if !Over(p.Shape(), s.Word, end) {
			t.Errorf("%v is not over at its end", tt.alg)
		}
	}
}
