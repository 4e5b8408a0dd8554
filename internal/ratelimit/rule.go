package ratelimit

import (
	"encoding/json"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"time"
)

// The ranges of a rule's numbers. A scale below a second could not be described
// by the rate-limit headers; a day is the longest that a counter in memory is
// worth. A bucket that needs more than MaxRefill to fill would outlive its use.
const (
	MaxLimit  = 1_000_000_000
	MinScale  = time.Second
	MaxScale  = 24 * time.Hour
	MaxRefill = 30 * 24 * time.Hour
)

// Rule is a limit as somebody configured it: Limit units in Scale. A Limit of 0
// refuses everything.
type Rule struct {
	Limit     int64
	Scale     time.Duration // whole milliseconds
	Algorithm Algorithm
	Burst     int64 // TokenBucket only; 0 means Limit
}

// String names the limit in words: "100 per second", "5,000 per 30 seconds".
func (r Rule) String() string {
	return Grouped(r.Limit) + " per " + scaleWords(r.Scale)
}

// Grouped writes a number that is not negative with its thousands apart, as people read it: 1,000,000.
func Grouped(n int64) string {
	text := strconv.FormatInt(n, 10)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

// MarshalJSON writes the form in which overrides are stored.
func (r Rule) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		Limit     int64  `json:"limit"`
		ScaleMs   int64  `json:"scale_ms"`
		Algorithm string `json:"algorithm"`
		Burst     int64  `json:"burst,omitempty"`
	}{r.Limit, r.Scale.Milliseconds(), r.Algorithm.String(), r.Burst})
}

// Validate reports every field that is out of range, as Errors.
func (r Rule) Validate() error {
	var errs Errors
	if r.Limit < 0 || r.Limit > MaxLimit {
		errs = append(errs, limitRange)
	}
	if r.Scale < MinScale || r.Scale > MaxScale || r.Scale%time.Millisecond != 0 {
		errs = append(errs, scaleRange)
	}
	if r.Algorithm > TokenBucket {
		errs = append(errs, algorithmRange)
	}
	if r.Burst != 0 {
		switch {
		case r.Algorithm != TokenBucket:
			errs = append(errs, burstElsewhere)
		case r.Burst < 0 || r.Burst > MaxLimit:
			errs = append(errs, burstRange)
		case len(errs) == 0 && r.Limit > 0 && refill(r) > MaxRefill.Nanoseconds():
			errs = append(errs, burstRefill)
		}
	}
	return errs.orNil()
}

// refill is the time in nanoseconds in which a token bucket fills, rounded up
// so that a caller who never runs ahead of the rate is never refused.
func refill(r Rule) int64 { return mulDivUp(r.Burst, r.Scale.Nanoseconds(), r.Limit) }

func mulDivUp(a, b, c int64) int64 {
	hi, lo := bits.Mul64(uint64(a), uint64(b))
	lo, carry := bits.Add64(lo, uint64(c)-1, 0)
	if hi += carry; hi >= uint64(c) {
		return math.MaxInt64
	}
	q, _ := bits.Div64(hi, lo, uint64(c))
	return int64(min(q, math.MaxInt64))
}

// Policy is a rule made ready for checks: immutable, safe for concurrent use,
// compared by identity. Make one when configuration is loaded, not per request.
type Policy struct {
	bucket Bucket
	alg    Algorithm
	count  bool // count mode
	guard  bool // stays on when limiting is off

	limit   uint32
	scaleMs uint32
	magic   uint64 // reciprocal of scaleMs: a 64-bit division costs 10 to 18 cycles
	shape   uint64

	burst       uint32 // token bucket
	tokenNs     int64  // time in which one unit refills, rounded down
	toleranceNs int64  // time in which the whole burst refills, rounded up

	rule   Rule
	header string // value of RateLimit-Policy
	prefix string // start of the value of RateLimit
}

// NewPolicy makes the policy of a rule; the error is that of Rule.Validate.
func NewPolicy(b Bucket, r Rule) (*Policy, error) { return newPolicy(b, r, false) }

func newPolicy(b Bucket, r Rule, count bool) (*Policy, error) {
	if !b.valid() {
		return nil, fmt.Errorf("ratelimit: no bucket %d", b)
	}
	if err := r.Validate(); err != nil {
		return nil, err
	}
	p := &Policy{
		bucket: b, alg: r.Algorithm, rule: r, count: count, guard: buckets[b].Guard,
		limit: uint32(r.Limit), scaleMs: uint32(r.Scale.Milliseconds()), burst: uint32(r.Burst),
	}
	p.shape = uint64(p.alg)<<57 | uint64(p.scaleMs)<<30
	if p.alg == TokenBucket {
		p.shape |= uint64(p.limit)
	}
	p.derive()
	p.prefix = `"` + b.String() + `"`
	p.header = fmt.Sprintf("%s;q=%d;w=%d", p.prefix, p.Quota(), ceilSeconds(p.WindowMs()))
	return p, nil
}

// derive computes what checks would otherwise divide for.
func (p *Policy) derive() {
	p.magic = math.MaxUint64 / uint64(p.scaleMs)
	if p.alg != TokenBucket {
		return
	}
	if p.burst == 0 || p.limit == 0 {
		p.burst = p.limit
	}
	if p.limit > 0 {
		scaleNs := int64(p.scaleMs) * 1e6
		p.tokenNs = scaleNs / int64(p.limit)
		p.toleranceNs = mulDivUp(int64(p.burst), scaleNs, int64(p.limit))
	}
}

// Bucket is the bucket the policy belongs to.
func (p *Policy) Bucket() Bucket { return p.bucket }

// Rule is what the policy was made of.
func (p *Policy) Rule() Rule { return p.rule }

// Algorithm is the rule by which the policy admits.
func (p *Policy) Algorithm() Algorithm { return p.alg }

// Limit is the number of units in a scale, 0 to MaxLimit.
func (p *Policy) Limit() uint32 { return p.limit }

// ScaleMs is the length of the window, or the time in which Limit units refill.
func (p *Policy) ScaleMs() uint32 { return p.scaleMs }

// CountOnly marks a policy that counts what it would have refused.
func (p *Policy) CountOnly() bool { return p.count }

// Quota is what a caller may spend at once: the limit, or a token bucket's burst.
func (p *Policy) Quota() uint32 {
	if p.alg == TokenBucket {
		return p.burst
	}
	return p.limit
}

// WindowMs is the time after which an exhausted budget is whole again: the
// scale, or the time in which a token bucket's burst refills. No wait is longer.
func (p *Policy) WindowMs() uint32 {
	if p.alg == TokenBucket && p.limit > 0 {
		return uint32((p.toleranceNs + 1e6 - 1) / 1e6)
	}
	return p.scaleMs
}

// ShapeAlgorithm is the place of the algorithm in a shape, which has no bits above it.
// ShapeSpare masks those which are 0 in the shapes of windows, for stores to use.
const (
	ShapeAlgorithm = 57
	ShapeSpare     = 1<<30 - 1
)

// Shape identifies the unit in which a counter under this policy is kept: equal
// shapes share state as it stands, unequal ones need Convert. It fits in 59 bits.
func (p *Policy) Shape() uint64 { return p.shape }
