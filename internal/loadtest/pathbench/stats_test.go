package main

import (
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestMedian(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		values []float64
		want   float64
	}{
		{[]float64{3}, 3},
		{[]float64{9, 1, 5}, 5},
		{[]float64{4, 1, 3, 2}, 2.5},
	} {
		in := append([]float64(nil), tt.values...)
		if got := median(in); got != tt.want {
			t.Errorf("median(%v) = %v, want %v", tt.values, got, tt.want)
		}
		if diff := cmp.Diff(tt.values, in); diff != "" {
			t.Errorf("median changed its argument: %s", diff)
		}
	}
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("median of nothing = %v, want NaN", got)
	}
}

func TestPercentile(t *testing.T) {
	t.Parallel()
	hundred := make([]time.Duration, 100)
	for i := range hundred {
		hundred[i] = time.Duration(100 - i) // 100 down to 1
	}
	for _, tt := range []struct {
		values []time.Duration
		p      float64
		want   time.Duration
	}{
		{hundred, 50, 50},
		{hundred, 99, 99},
		{hundred, 100, 100},
		{hundred, 0, 1},
		{[]time.Duration{7}, 99, 7},
		{[]time.Duration{1, 2, 3}, 50, 2},
		{nil, 50, 0},
	} {
		if got := percentile(tt.values, tt.p); got != tt.want {
			t.Errorf("percentile %v of %d values = %d, want %d", tt.p, len(tt.values), got, tt.want)
		}
	}
}

func TestRatiosSkipRoundsWithoutAFloor(t *testing.T) {
	t.Parallel()
	got := ratios([]float64{10, 20, 30}, []float64{20, 0, 40})
	if diff := cmp.Diff([]float64{0.5, 0.75}, got); diff != "" {
		t.Error(diff)
	}
}
