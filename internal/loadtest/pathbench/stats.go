package main

import (
	"math"
	"slices"
	"time"
)

// median is the middle value, or the mean of the two middle ones; NaN of nothing.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	mid := len(s) / 2
	if len(s)%2 == 1 {
		return s[mid]
	}
	return (s[mid-1] + s[mid]) / 2
}

// percentile is the nearest-rank percentile: the smallest value that p per cent of all do not exceed. 0 of nothing.
func percentile(values []time.Duration, p float64) time.Duration {
	if len(values) == 0 {
		return 0
	}
	s := slices.Sorted(slices.Values(values))
	rank := int(math.Ceil(p / 100 * float64(len(s))))
	return s[min(max(rank, 1), len(s))-1]
}

// ratios divides value by value; a round without a floor gives none.
func ratios(rates, floors []float64) []float64 {
	var out []float64
	for i := range min(len(rates), len(floors)) {
		if floors[i] > 0 {
			out = append(out, rates[i]/floors[i])
		}
	}
	return out
}
