package main

import (
	"fmt"
	"io"
	"slices"

	"converger/internal/loadtest/report"
)

// row is a line of the table.
type row struct {
	work, measured, beside, ratio, target, verdict string
}

// tooFar is how far the rounds' ratios may lie apart, of their median, for the median to count when they do not all say
// the same.
const tooFar = 0.25

// judge says whether the median of ratios is within a target: at most, or at least when least is set. When the rounds lie
// on both sides of the target and further apart than tooFar, nothing can be said.
func judge(ratios []float64, target float64, least bool) string {
	low, high, mid := slices.Min(ratios), slices.Max(ratios), median(ratios)
	met := mid <= target
	if least {
		met = mid >= target
	}
	switch {
	case low <= target && target <= high && quartiles(ratios)/mid > tooFar:
		return fmt.Sprintf("machine too noisy: the middle half of the rounds spreads over %.0f %%", 100*quartiles(ratios)/mid)
	case met:
		return "met"
	}
	return fmt.Sprintf("missed by %.0f %%", 100*max(mid/target-1, 1-mid/target))
}

// span is a median with the lowest and the highest value.
func span(values []float64, format string) string {
	return fmt.Sprintf(format+" ("+format+" to "+format+")", median(values), slices.Min(values), slices.Max(values))
}

func median(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	return (s[(len(s)-1)/2] + s[len(s)/2]) / 2
}

// quartiles is the width of the middle half.
func quartiles(values []float64) float64 {
	s := slices.Sorted(slices.Values(values))
	return s[len(s)-1-len(s)/4] - s[len(s)/4]
}

// ratios divides round by round.
func ratios(a, b []float64) []float64 {
	q := make([]float64, len(a))
	for i := range a {
		q[i] = a[i] / b[i]
	}
	return q
}

// writeTable prints the rows.
func writeTable(w io.Writer, rows []row) {
	table := [][]string{{"what", "measured", "beside", "ratio (lowest to highest)", "to reach", ""}}
	for _, r := range rows {
		table = append(table, []string{r.work, r.measured, r.beside, r.ratio, r.target, r.verdict})
	}
	fmt.Fprint(w, report.Table(table))
}
