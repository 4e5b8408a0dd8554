package limits

import (
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var nearly = cmpopts.EquateApprox(0, 1e-9)

// Each load offers what its name says, where and when it says.
func TestLoadsOfferWhatTheySay(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		load     Load
		n        int
		from, to float64
		want     []float64 // by node, of a factor of 1
	}{
		{Even, 4, 0, 1, []float64{0.25, 0.25, 0.25, 0.25}},
		{Even, 3, 7.5, 10.5, []float64{1, 1, 1}},
		{Zipf, 3, 0, 11, []float64{6, 3, 2}},
		{Sticky, 3, 1, 3, []float64{2, 0, 0}},
		{Spike, 3, 0, 0.005, []float64{1, 0, 0}},
		{Spike, 3, 0.005, 1.3, []float64{0, 0, 0}},
		{Spike, 3, 1.3, 1.3025, []float64{0, 0.5, 0}},
		{Spike, 3, 0, 7.8, []float64{2, 2, 2}},
		{Bursts, 2, 0, 0.3, []float64{0.15, 0.15}},
		{Bursts, 2, 0.3, 1.7, []float64{0, 0}},
		{Bursts, 2, 0.2, 2, []float64{0.2, 0.2}},
		{Cold, 2, 0, 5, []float64{0, 0}},
		{Cold, 2, 5, 6, []float64{0.5, 0.5}},
		{Cold, 2, 5.5, 12, []float64{0.75, 0.75}},
		{Moving, 3, 0, 0.35, []float64{0.35, 0, 0}},
		{Moving, 3, 0.35, 0.5, []float64{0, 0.15, 0}},
		{Moving, 3, 0.9, 1.2, []float64{0.15, 0, 0.15}},
	} {
		for _, factor := range []float64{1, 10} {
			var got []float64
			for i := range c.n {
				got = append(got, c.load.Due(i, c.n, c.from, c.to, factor)/factor)
			}
			if diff := cmp.Diff(c.want, got, nearly); diff != "" {
				t.Errorf("%s from %g to %g:\n%s", c.load, c.from, c.to, diff)
			}
		}
	}
	// However time is cut, the sum is the same; and each load is known by its name.
	for _, l := range Loads() {
		sum, random := 0.0, rand.New(rand.NewPCG(1, 2))
		for at := 0.0; at < 24; {
			next := min(24, at+random.Float64()/10)
			sum += l.Due(1, 3, at, next, 2)
			at = next
		}
		if whole := l.Due(1, 3, 0, 24, 2); math.Abs(sum-whole) > 1e-6 {
			t.Errorf("%s: %g in pieces, %g as a whole", l, sum, whole)
		}
		if got, err := ParseLoad(string(l)); got != l || err != nil {
			t.Errorf("%s is read as %s, %v", l, got, err)
		}
	}
	if _, err := ParseLoad("square"); err == nil || !strings.Contains(err.Error(), "even, zipf, sticky, spike, bursts, cold, moving") {
		t.Errorf("%v does not name the loads", err)
	}
}

func TestArrivals(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(3, 4))
	for _, mean := range []float64{0, -1, 0.1, 3, 29, 31, 400} {
		const draws = 20000
		a, sum, squares := NewArrivals(Even, random), 0.0, 0.0
		for range draws {
			k := float64(a.Next(mean))
			sum += k
			squares += k * k
		}
		m := sum / draws
		want, off := max(0, mean), 5*math.Sqrt(max(0, mean)/draws)
		if math.Abs(m-want) > off+1e-9 {
			t.Errorf("mean %g, want %g", m, want)
		}
		if v := squares/draws - m*m; mean > 0 && math.Abs(v/mean-1) > 0.1 {
			t.Errorf("mean %g: variance %g", mean, v)
		}
	}
	// A load that is to stay within the limit does so in every spike, however time is cut.
	for _, limit := range []float64{100, 1000} {
		a := NewArrivals(Spike, random)
		for spike := range 50 {
			from, n := 3.9*float64(spike), 0
			for at := from; at < from+3.9; {
				next := min(from+3.9, at+random.Float64()/500)
				n += a.Next(limit * Spike.Due(0, 3, at, next, 0.9))
				at = next
			}
			if n != int(0.9*limit) {
				t.Fatalf("spike %d has %d requests, want %g", spike, n, 0.9*limit)
			}
		}
	}
}

func TestWindows(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ at, scale, want int64 }{
		{0, 1000, 0}, {999, 1000, 0}, {1000, 1000, 1}, {1764504000999, 1000, 1764504000}, {1764504001000, 1000, 1764504001}, {180_001, 60_000, 3},
	} {
		if got := WindowAt(c.at, c.scale); got != c.want {
			t.Errorf("%d of %d: window %d, want %d", c.at, c.scale, got, c.want)
		}
	}
}

func tally(first int64, windows ...Window) *Tally {
	var t Tally
	for i, w := range windows {
		for range w.Admitted {
			t.Add(first+int64(i), true)
		}
		for range w.Refused {
			t.Add(first+int64(i), false)
		}
	}
	return &t
}

func TestFigures(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		windows     []Window
		first, end  int64
		want        Figures
		wantVerdict string // of a promise of 1 % in the mean, 5 % at worst, nothing refused within the limit
	}{
		"exact": {[]Window{{100, 900}, {100, 900}}, 7, 9,
			Figures{Windows: 2, Flooded: 2, Offered: 2000, Admitted: 200, Refused: 1800}, ""},
		"over, and what is outside": {[]Window{{300, 0}, {100, 10}, {104, 10}, {500, 0}}, 8, 10,
			Figures{Windows: 2, Flooded: 2, Offered: 224, Admitted: 204, Refused: 20, Over: 0.02, OverWorst: 0.04, LongRun: 0.02}, "mean 2.00 %"},
		"idle windows do not make the mean better": {[]Window{{0, 0}, {110, 1}, {0, 0}, {50, 0}}, 7, 11,
			Figures{Windows: 4, Flooded: 1, Offered: 161, Admitted: 160, Refused: 1, Over: 0.1, OverWorst: 0.1, LongRun: -0.6}, "worst window 10.00 %"},
		"exactly the limit offered is no flood": {[]Window{{100, 0}}, 7, 8,
			Figures{Windows: 1, Offered: 100, Admitted: 100}, ""},
		"refused with room left": {[]Window{{60, 10}, {90, 30}}, 7, 9,
			Figures{Windows: 2, Flooded: 1, Offered: 190, Admitted: 150, Refused: 40, RefusedWithin: 0.1, Unused: 0.1, LongRun: -0.25}, "refused within the limit 10.00 %"},
		"nothing": {nil, 7, 7, Figures{}, ""},
	} {
		got := tally(7, c.windows...).Figures(100, c.first, c.end)
		if diff := cmp.Diff(c.want, got, nearly); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
		broken := strings.Join(Overshoot(0.01, 0.05).Refusing(0).Broken(got), "; ")
		if (broken == "") != (c.wantVerdict == "") || !strings.Contains(broken, c.wantVerdict) {
			t.Errorf("%s: %q, want %q", name, broken, c.wantVerdict)
		}
	}
	a, b := tally(1, Window{1, 2}, Window{3, 4}), tally(2, Window{10, 20}, Window{30, 40})
	a.Merge(b)
	var none Tally
	none.Merge(a)
	if diff := cmp.Diff(map[int64]Window{1: {1, 2}, 2: {13, 24}, 3: {30, 40}}, none.windows); diff != "" {
		t.Error(diff)
	}
	if broken := LongRun(0.005).Broken(Figures{LongRun: -0.006}); len(broken) != 1 {
		t.Errorf("a rate that is too low: %q", broken)
	}
}

func TestPromised(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		algorithm string
		limit     int64
		scale     time.Duration
		load      Load
		factor    float64
		nodes     int
		mean      float64 // -1: nothing is promised
	}{
		{FixedWindow, 100, time.Second, Even, 10, 3, 0.015},
		{FixedWindow, 1000, time.Second, Zipf, 2, 20, 0.03},
		{FixedWindow, 1000, time.Second, Even, 100, 3, 0.03},
		{FixedWindow, 1000, time.Second, Even, 100, 4, 0.06},
		{FixedWindow, 1000, time.Second, Zipf, 100, 3, -1},
		{FixedWindow, 1000, time.Second, Even, 101, 3, -1},
		{FixedWindow, 1000, time.Second, Sticky, 0.8, 3, 0},
		{FixedWindow, 1000, time.Second, Sticky, 2, 3, -1},
		{FixedWindow, 1000, time.Second, Moving, 3, 3, 0.01},
		{FixedWindow, 5, time.Second, Even, 10, 3, -1},
		{FixedWindow, 1000, 500 * time.Millisecond, Even, 10, 3, -1},
		{FixedWindow, 1000, time.Second, Even, 10, 21, -1},
		{SlidingWindow, 1000, time.Second, Even, 10, 3, -1},
		{TokenBucket, 1000, time.Second, Cold, 10, 3, -1},
	} {
		p, ok := Promised(c.algorithm, c.limit, c.scale, c.load, c.factor, c.nodes)
		if ok != (c.mean >= 0) || ok && *p.Over != c.mean {
			t.Errorf("%+v: %v, %+v", c, ok, p)
		}
	}
	if p, ok := Promised(TokenBucket, 1000, time.Second, Even, 100, 20); !ok || *p.LongRun != 0.01 || p.Over != nil {
		t.Errorf("token bucket: %v %+v", ok, p)
	}
}

// What is measured on a busy machine is told, and not judged.
func TestVerdict(t *testing.T) {
	t.Parallel()
	over := Figures{Offered: 1000, Over: 0.4, OverWorst: 0.4}
	for name, c := range map[string]struct {
		report   Report
		promised bool
		want     string
		kept     string
	}{
		"kept":               {Report{Figures: Figures{Offered: 1000}}, true, "kept", "yes"},
		"not kept":           {Report{Figures: over}, true, "NOT KEPT: overshoot in the mean 40.00 %, promised at most 1.00 %; overshoot in the worst window", "no"},
		"p99 late":           {Report{Figures: over, Delay: Delay{Messages: 9, P99: 5, Max: 5}}, true, "not judged: the machine was too busy: reports between nodes took 5 ms in the 99th", ""},
		"one late":           {Report{Figures: Figures{Offered: 1000}, Delay: Delay{Messages: 9, P99: 2, Max: 50}}, true, "not judged: the machine was too busy: a report between nodes took 50 ms", ""},
		"late at home":       {Report{Figures: over, Delay: Delay{Messages: 9, P99: 1, Max: 1, Wait: 25}}, true, "not judged: the machine was too busy: a node waited 25 ms for a processor", ""},
		"in time":            {Report{Figures: over, Delay: Delay{Messages: 9, P99: 2, Max: 10, Wait: 10}}, true, "NOT KEPT", "no"},
		"driver behind":      {Report{Figures: Figures{Offered: 900}, Behind: 50, Errors: map[string]int64{"x": 50}}, true, "not judged: 100 of 1000 requests", ""},
		"interrupted":        {Report{Figures: over, Interrupted: true}, true, "not judged: interrupted", ""},
		"nothing promised":   {Report{Figures: over}, false, "nothing is promised", ""},
		"delay not known":    {Report{Figures: over, Nodes: []string{"a", "b"}, NoMetrics: "HTTP 404"}, true, "not judged: how long reports were on their way is not known", ""},
		"one node, no delay": {Report{Figures: over, Nodes: []string{"a"}, NoMetrics: "HTTP 404"}, true, "NOT KEPT", "no"},
	} {
		r := c.report
		r.judge(Overshoot(0.01, 0.05), c.promised)
		kept := ""
		if r.Kept != nil {
			kept = map[bool]string{true: "yes", false: "no"}[*r.Kept]
		}
		if !strings.HasPrefix(r.Verdict, c.want) || kept != c.kept {
			t.Errorf("%s: %q, kept %q", name, r.Verdict, kept)
		}
	}
}

func TestReadingMetrics(t *testing.T) {
	t.Parallel()
	r := readingOf(map[string]float64{
		`converger_cluster_message_delay_seconds_bucket{le="0.0005"}`:   90,
		`converger_cluster_message_delay_seconds_bucket{le="0.002"}`:    99,
		`converger_cluster_message_delay_seconds_bucket{le="0.01"}`:     100,
		`converger_cluster_message_delay_seconds_bucket{le="+Inf"}`:     100,
		`converger_cluster_members{standing="split"}`:                   1,
		`converger_cluster_members{standing="visible"}`:                 3,
		`converger_rate_limit_sync_batches_total{direction="received"}`: 7,
		`converger_rate_limit_sync_batches_total{direction="sent"}`:     20,
		`converger_rate_limit_sync_bytes_total{direction="sent"}`:       1500,
		`converger_rate_limit_sync_reports_total{kind="all"}`:           30,
		`converger_rate_limit_sync_reports_total{kind="early"}`:         10,
	})
	if r.members != 3 || r.batches != 20 || r.bytes != 1500 || r.reports != 30 {
		t.Fatalf("%+v", r)
	}
	if diff := cmp.Diff(Delay{Messages: 100, P50: 0.5, P99: 2, Max: 10}, r.delay(reading{}), nearly); diff != "" {
		t.Error(diff)
	}
	before := reading{delays: map[float64]float64{0.0005: 90, 0.002: 98, 0.01: 98, math.Inf(1): 98}}
	if diff := cmp.Diff(Delay{Messages: 2, P50: 2, P99: 10, Max: 10}, r.delay(before), nearly); diff != "" {
		t.Error(diff)
	}
	if d := r.delay(r); d != (Delay{}) {
		t.Errorf("of no message: %+v", d)
	}
	beyond := reading{delays: map[float64]float64{5: 1, math.Inf(1): 2}}
	if d := beyond.delay(reading{}); d.Max <= 5000 || math.IsInf(d.Max, 0) {
		t.Errorf("beyond the last bound: %+v", d)
	}
	if alone := readingOf(map[string]float64{"go_goroutines": 7}); alone.members != 0 || len(alone.delays) != 0 {
		t.Errorf("of a node alone: %+v", alone)
	}
}
