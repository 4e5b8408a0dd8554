package limits

import (
	"fmt"
	"time"
)

// Promise is what is promised of a load, in shares of the limit. What is nil is not promised.
type Promise struct {
	Over, OverWorst *float64 // at most
	RefusedWithin   *float64 // at most
	LongRun         *float64 // at most, above or below
}

// Overshoot promises a mean and a worst overshoot.
func Overshoot(mean, worst float64) Promise { return Promise{Over: &mean, OverWorst: &worst} }

// LongRun promises a rate.
func LongRun(off float64) Promise { return Promise{LongRun: &off} }

// Refusing promises, beside p, how much is refused within the limit.
func (p Promise) Refusing(most float64) Promise {
	p.RefusedWithin = &most
	return p
}

// The promises are made for limits from 100 in a window of a second or longer: a share of a smaller one is less than one request.
const (
	leastLimit = 100
	leastScale = time.Second
)

// Algorithms that a limit may have.
const (
	FixedWindow   = "fixed_window"
	SlidingWindow = "sliding_window"
	TokenBucket   = "token_bucket"
)

// Promised is what is promised of a load of factor times the limit on so many nodes with a healthy network between them;
// false if nothing is. docs/accuracy.md lists the same.
func Promised(algorithm string, limit int64, scale time.Duration, l Load, factor float64, nodes int) (Promise, bool) {
	few := nodes <= 3
	of := func(three, twenty float64) float64 {
		if few {
			return three
		}
		return twenty
	}
	if limit < leastLimit || scale < leastScale || nodes > 20 {
		return Promise{}, false
	}
	switch algorithm {
	case TokenBucket:
		if (l == Even || l == Zipf) && factor > 1 && factor <= 100 {
			return LongRun(of(0.005, 0.01)), true
		}
		return Promise{}, false
	case FixedWindow:
	default:
		return Promise{}, false
	}
	switch {
	case (l == Even || l == Zipf) && factor <= 10:
		return Overshoot(of(0.015, 0.03), of(0.05, 0.08)), true
	case l == Even && factor <= 100:
		return Overshoot(of(0.03, 0.06), of(0.12, 0.20)), true
	case l == Bursts && factor <= 10:
		return Overshoot(0.03, 0.08), true
	case l == Cold && factor <= 10:
		return Overshoot(0.05, 0.10), true
	case l == Sticky && factor <= 0.8, l == Spike && factor <= 0.9:
		return Overshoot(0, 0).Refusing(0), true
	case l == Moving && factor <= 3:
		return Overshoot(0.01, 0.03).Refusing(0.01), true
	}
	return Promise{}, false
}

// Broken lists what of a promise was not kept; nothing if all was.
func (p Promise) Broken(f Figures) []string {
	var all []string
	most := func(what string, got float64, bound *float64) {
		if bound != nil && got > *bound+1e-9 {
			all = append(all, fmt.Sprintf("%s %s, promised at most %s", what, percent(got), percent(*bound)))
		}
	}
	most("overshoot in the mean", f.Over, p.Over)
	most("overshoot in the worst window", f.OverWorst, p.OverWorst)
	most("refused within the limit", f.RefusedWithin, p.RefusedWithin)
	most("long-run rate off by", max(f.LongRun, -f.LongRun), p.LongRun)
	return all
}

// Delay is how long messages were on their way between nodes, in milliseconds.
type Delay struct {
	Messages int64   `json:"messages"`
	P50      float64 `json:"p50_ms"`
	P99      float64 `json:"p99_ms"`
	Max      float64 `json:"max_ms"`
	// Wait is the longest that a thread of a node waited for a processor: a report may wait there before it is sent. 0 if
	// that is not known.
	Wait float64 `json:"longest_wait_ms"`
}

// The delays up to which a machine is fit to be judged on. Messages cross loopback in a tenth of a millisecond: what takes
// longer waited for a processor.
const (
	fitP99 = 2.0
	fitMax = 10.0
)

// Busy tells why the machine was too busy for a judgement; "" if it was not.
func (d Delay) Busy() string {
	switch {
	case d.P99 > fitP99:
		return fmt.Sprintf("the machine was too busy: reports between nodes took %.3g ms in the 99th percentile, and %.3g ms is the most to judge by", d.P99, fitP99)
	case d.Max > fitMax:
		return fmt.Sprintf("the machine was too busy: a report between nodes took %.3g ms, and %.3g ms is the most to judge by", d.Max, fitMax)
	case d.Wait > fitMax:
		return fmt.Sprintf("the machine was too busy: a node waited %.3g ms for a processor, and %.3g ms is the most to judge by", d.Wait, fitMax)
	}
	return ""
}

func percent(share float64) string { return fmt.Sprintf("%.2f %%", 100*share) }
