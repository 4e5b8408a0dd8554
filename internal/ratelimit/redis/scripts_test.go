package redis

import (
	"math/bits"
	"math/rand/v2"
	"testing"
	"time"

	goredis "github.com/redis/go-redis/v9"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

// The scripts decide as the rules in Go do, to the last unit and millisecond, whatever the limits and however they change.
func TestScriptsDecideAsTheRules(t *testing.T) {
	t.Parallel()
	s := inTestTime(t, redistest.Start(t).URL())
	random := rand.New(rand.NewPCG(5, 1))
	algorithms := []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket}
	limits := []int64{1, 3, 7, 50, 999, 1_000_003, 999_999_937, ratelimit.MaxLimit}
	scales := []time.Duration{time.Second, 1537 * time.Millisecond, time.Minute, ratelimit.MaxScale - time.Millisecond, ratelimit.MaxScale}
	policy := func() *ratelimit.Policy {
		for {
			r := ratelimit.Rule{Limit: limits[random.IntN(len(limits))], Scale: scales[random.IntN(len(scales))], Algorithm: algorithms[random.IntN(3)]}
			if r.Algorithm == ratelimit.TokenBucket && random.IntN(2) == 0 {
				r.Burst = 1 + random.Int64N(r.Limit)
			}
			if p, err := ratelimit.NewPolicy(ratelimit.Upload, r); err == nil {
				return p
			}
		}
	}
	for sequence := range 60 {
		it := ratelimit.Item{Key: ratelimit.Key{Hi: uint64(sequence) + 2, Lo: random.Uint64()}, Policy: policy()}
		now := begin.Add(time.Duration(random.Int64N(int64(48 * time.Hour))))
		state, kept := it.Policy.Fresh(now), it.Policy
		for step := range 60 {
			if random.IntN(15) == 0 {
				it.Policy = policy()
			}
			it.Cost = uint32(1 + random.Int64N(int64(it.Policy.Quota())/2+2))
			if random.IntN(4) == 0 {
				it.Cost = 1
			}
			now = now.Add(time.Duration(random.Int64N(it.Policy.Rule().Scale.Nanoseconds()) >> random.IntN(12)))
			if kept.Shape() != it.Policy.Shape() {
				state = it.Policy.Convert(kept.Shape(), state, now)
			}
			kept = it.Policy
			var want ratelimit.Decision
			state, want = it.Policy.Decide(state, it.Cost, now)
			if got := s.Take(t.Context(), now, it); got != want {
				t.Fatalf("sequence %d, step %d: %+v, cost %d at %d:\n%+v, want\n%+v", sequence, step, it.Policy.Rule(), it.Cost, now, got, want)
			}
			if u, err := s.Peek(t.Context(), now, it); err != nil || u.Used != it.Policy.Used(state, now) {
				t.Fatalf("sequence %d, step %d: %+v: %d used, want %d (%v)", sequence, step, it.Policy.Rule(), u.Used, it.Policy.Used(state, now), err)
			}
		}
	}
}

// Lua has no whole numbers; its division is exact all the same.
func TestMuldiv(t *testing.T) {
	t.Parallel()
	s := inTestTime(t, redistest.Start(t).URL())
	script := goredis.NewScript(common + "return {muldiv(tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5]))}")
	random := rand.New(rand.NewPCG(5, 2))
	below := func(most int64) int64 { return random.Int64N(most>>random.IntN(bits.Len64(uint64(most)))) + 1 }
	for range 2000 {
		a, b, c := below(1<<53-1), below(1<<31-1), below(1<<47-1)
		hi, lo := bits.Mul64(uint64(a), uint64(b))
		if hi >= uint64(c) {
			continue
		}
		q, r := bits.Div64(hi, lo, uint64(c))
		if q >= 1<<53 {
			continue
		}
		ops := []op{{script: script, key: "none", args: []any{0, 0, a, b, c}}}
		if err := do(t.Context(), s.client, ops); err != nil {
			t.Fatal(err)
		}
		if got := ops[0].answer; got[0] != int64(q) || got[1] != int64(r) {
			t.Errorf("%d * %d / %d is %d, remainder %d; want %d, %d", a, b, c, got[0], got[1], q, r)
		}
	}
}
