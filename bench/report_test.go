package main

import (
	"strings"
	"testing"
)

func TestJudge(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		ratios []float64
		target float64
		least  bool
		want   string
	}{
		"within":                       {[]float64{0.4, 0.5, 0.55}, 0.6, false, "met"},
		"beyond":                       {[]float64{0.7, 0.75, 0.8}, 0.6, false, "missed by 25 %"},
		"at least":                     {[]float64{0.91, 0.92, 0.95}, 0.9, true, "met"},
		"not at least":                 {[]float64{0.8, 0.81, 0.82}, 0.9, true, "missed by 10 %"},
		"one round says otherwise":     {[]float64{0.5, 0.5, 0.5, 0.5, 0.9}, 0.6, false, "met"},
		"wild, and all say the same":   {[]float64{0.1, 0.2, 0.3, 0.4, 0.5}, 0.6, false, "met"},
		"wild, and they say different": {[]float64{0.3, 0.4, 0.55, 0.8, 0.9}, 0.6, false, "machine too noisy"},
	} {
		if got := judge(tt.ratios, tt.target, tt.least); !strings.HasPrefix(got, tt.want) {
			t.Errorf("%s: %q, want %q", name, got, tt.want)
		}
	}
}

func TestMedianAndQuartiles(t *testing.T) {
	t.Parallel()
	if got := median([]float64{4, 1, 3, 2}); got != 2.5 {
		t.Errorf("median %v", got)
	}
	if got := quartiles([]float64{1, 2, 3, 4, 5, 6, 7, 100}); got != 3 {
		t.Errorf("middle half %v", got)
	}
}
