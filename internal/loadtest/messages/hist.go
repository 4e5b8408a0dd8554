package messages

import (
	"math"
	"math/bits"
	"sync/atomic"
	"time"
)

const (
	subBits   = 7                                    // 128 buckets for each power of two: an error below 1 %
	histRange = 32                                   // bits of a value: up to 71 minutes in microseconds
	histSize  = (histRange - subBits + 1) << subBits // 26 KB
)

// hist counts durations in buckets that are as wide as their values are large. It is safe for concurrent use.
type hist struct {
	counts [histSize]atomic.Int64
	sum    atomic.Int64 // microseconds
}

func (h *hist) add(d time.Duration) {
	us := uint64(max(0, d.Microseconds()))
	h.counts[bucketOf(us)].Add(1)
	h.sum.Add(int64(us))
}

func bucketOf(us uint64) int {
	us = min(us, 1<<histRange-1)
	shift := max(0, bits.Len64(us)-subBits-1)
	return shift<<subBits + int(us>>shift)
}

// upper is the largest value of a bucket, in microseconds.
func upper(bucket int) uint64 {
	shift := max(0, bucket>>subBits-1)
	return (uint64(bucket-shift<<subBits)+1)<<shift - 1
}

// counts is a copy of a hist, or what came between two copies. The zero value is empty.
type counts struct {
	n       [histSize]int64
	total   int64
	sumSecs float64
}

func (h *hist) read() *counts {
	c := &counts{sumSecs: float64(h.sum.Load()) / 1e6}
	for i := range h.counts {
		c.n[i] = h.counts[i].Load()
		c.total += c.n[i]
	}
	return c
}

func (c *counts) since(before *counts) *counts {
	d := &counts{total: c.total - before.total, sumSecs: c.sumSecs - before.sumSecs}
	for i := range c.n {
		d.n[i] = c.n[i] - before.n[i]
	}
	return d
}

// quantile is the duration, to 1 %, that the share q of all do not exceed; 0 of nothing.
func (c *counts) quantile(q float64) time.Duration {
	rank := int64(math.Ceil(q * float64(c.total)))
	for i, n := range c.n {
		if rank -= n; n > 0 && rank <= 0 {
			return time.Duration(upper(i)) * time.Microsecond
		}
	}
	return 0
}

// Latency is percentiles in milliseconds; zeros of nothing.
type Latency struct {
	Count int64   `json:"count"`
	Mean  float64 `json:"mean_ms"`
	P50   float64 `json:"p50_ms"`
	P99   float64 `json:"p99_ms"`
	P999  float64 `json:"p999_ms"`
	Max   float64 `json:"max_ms"`
}

func (c *counts) latency() Latency {
	l := Latency{Count: c.total, P50: ms(c.quantile(0.5)), P99: ms(c.quantile(0.99)), P999: ms(c.quantile(0.999)), Max: ms(c.quantile(1))}
	if c.total > 0 {
		l.Mean = math.Round(c.sumSecs/float64(c.total)*1e6) / 1e3
	}
	return l
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }
