package ratelimit_test

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

const noon = ratelimit.Instant(500_000 * time.Hour)

type fixture struct {
	*testing.T
	*ratelimit.Limiter
	reg    *prometheus.Registry
	hasher ratelimit.Hasher
}

func newLimiter(t *testing.T, operator string, disabled bool) fixture {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	reg := prometheus.NewPedanticRegistry()
	store, err := local.New(local.Config{Registerer: reg})
	must(err)
	op, err := ratelimit.ParseOperator([]byte(operator))
	must(err)
	l, err := ratelimit.New(ratelimit.Config{Store: store, Operator: op, Disabled: disabled, Registerer: reg})
	must(err)
	h, err := ratelimit.NewHasher([]byte("a secret for tests only"))
	must(err)
	return fixture{t, l, reg, h}
}

func (f fixture) item(b ratelimit.Bucket, o *ratelimit.Overrides) ratelimit.Item {
	return ratelimit.Item{Key: f.hasher.Tenant(b, [16]byte{1}), Policy: f.Policy(b, o, nil)}
}

// page renders the metrics as a scraper sees them.
func (f fixture) page(format expfmt.FormatType) string {
	f.Helper()
	families, err := f.reg.Gather()
	if err != nil {
		f.Fatal(err)
	}
	var b bytes.Buffer
	enc := expfmt.NewEncoder(&b, expfmt.NewFormat(format))
	for _, m := range families {
		if err := enc.Encode(m); err != nil {
			f.Fatal(err)
		}
	}
	return b.String()
}

func (f fixture) series(line string) {
	f.Helper()
	if page := f.page(expfmt.TypeTextPlain); !strings.Contains(page, "\n"+line+"\n") {
		name, _, _ := strings.Cut(line, " ")
		for l := range strings.Lines(page) {
			if strings.HasPrefix(l, name) {
				f.Errorf("want %s, got %s", line, l)
				return
			}
		}
		f.Errorf("no series %s", line)
	}
}

func TestResolutionOrder(t *testing.T) {
	t.Parallel()
	own, err := ratelimit.NewPolicy(ratelimit.Upload, ratelimit.Rule{Limit: 7, Scale: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	tenant, err := ratelimit.Compile([]byte(`{"upload":{"limit":20,"scale_ms":1000}}`))
	if err != nil {
		t.Fatal(err)
	}
	const operator = `{"upload":{"limit":30,"scale_ms":1000}}`
	for _, tt := range []struct {
		name     string
		operator string
		disabled bool
		tenant   *ratelimit.Overrides
		own      *ratelimit.Policy
		want     int // -1: no limit
	}{
		{"built-in", "", false, nil, nil, 10},
		{"caller's default", "", false, nil, own, 7},
		{"operator before caller", operator, false, nil, own, 30},
		{"tenant before operator", operator, false, tenant, own, 20},
		{"off", `{"upload":"off"}`, false, nil, own, -1},
		{"tenant before off", `{"upload":"off"}`, false, tenant, nil, 20},
		{"disabled", operator, true, tenant, own, -1},
	} {
		l := newLimiter(t, tt.operator, tt.disabled)
		got := -1
		if p := l.Policy(ratelimit.Upload, tt.tenant, tt.own); p != nil {
			got = int(p.Limit())
		}
		if got != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, got, tt.want)
		}
	}
	if newLimiter(t, "", false).Policy(ratelimit.ChannelOutbound, nil, nil) != nil {
		t.Error("a channel without a rate of its own has a limit")
	}
}

func TestDisabledKeepsTheGuards(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, "", true)
	if l.Enabled() {
		t.Error("enabled")
	}
	p, err := ratelimit.NewPolicy(ratelimit.ChannelOutbound, ratelimit.Rule{Scale: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	// A policy that did not come from Policy is off as well.
	d := l.Check(t.Context(), noon, ratelimit.Item{Policy: p})
	if !d.Allowed || d.Limited() {
		t.Errorf("channel_outbound: %+v", d)
	}
	for _, b := range ratelimit.Buckets() {
		if on := l.Policy(b, nil, nil) != nil; on != b.Info().Guard {
			t.Errorf("%s: on is %v", b, on)
		}
	}
	login := l.item(ratelimit.LoginIP, nil)
	for n := range 7 {
		if d := l.Check(t.Context(), noon, login); d.Allowed != (n < 5) {
			t.Errorf("login %d: %+v", n+1, d)
		}
	}
}

func TestCountMode(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, `{"web_page":{"limit":1,"scale_ms":1000,"mode":"count"}}`, false)
	web := l.item(ratelimit.WebPage, nil)
	for n := range 3 {
		d := l.Check(t.Context(), noon, web)
		if !d.Allowed || d.Limited() || d.Counted != (n > 0) {
			t.Errorf("request %d: %+v", n+1, d)
		}
	}
	l.series(`converger_rate_limit_decisions_total{backend="local",bucket="web_page",decision="counted"} 2`)
	l.series(`converger_rate_limit_decisions_total{backend="local",bucket="web_page",decision="allowed"} 1`)
	l.series(`converger_rate_limit_exceeded_count{bucket="web_page"} 0`)
}

func TestRefundInCountMode(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, `{"web_page":{"limit":1,"scale_ms":1000,"mode":"count"}}`, false)
	web := l.item(ratelimit.WebPage, nil)
	first := l.Check(t.Context(), noon, web)
	l.Refund(t.Context(), first, web)
	if d := l.Check(t.Context(), noon, web); d.Counted {
		t.Error("a refund in count mode was lost")
	}
	// A request that would have been refused spent nothing.
	l.Refund(t.Context(), l.Check(t.Context(), noon, web), web)
	if d := l.Check(t.Context(), noon, web); !d.Counted {
		t.Error("a refund gave back what was not spent")
	}
}

func TestSeriesExistFromTheStart(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, "", false)
	for _, b := range ratelimit.Buckets() {
		l.series(fmt.Sprintf(`converger_rate_limit_exceeded_count{bucket="%s"} 0`, b))
		for _, d := range []string{"allowed", "refused", "counted"} {
			l.series(fmt.Sprintf(`converger_rate_limit_decisions_total{backend="local",bucket="%s",decision="%s"} 0`, b, d))
		}
	}
	l.series(`converger_rate_limit_check_duration_seconds_count{backend="local"} 0`)
	l.series(`converger_rate_limit_keys 0`)
	l.series(`converger_rate_limit_keys_max 1e+06`)
	l.series(`converger_rate_limit_evictions_total 0`)
	l.series(`converger_rate_limit_overflow 0`)
	l.series(`converger_rate_limit_overflow_total 0`)
	// Dashboards know this very name, whichever format the scraper asks for.
	for _, format := range []expfmt.FormatType{expfmt.TypeTextPlain, expfmt.TypeOpenMetrics} {
		if !strings.Contains(l.page(format), "\nconverger_rate_limit_exceeded_count{bucket=\"upload\"} 0") {
			t.Errorf("format %v renames converger_rate_limit_exceeded_count", format)
		}
	}
}

func TestChecksAreSampled(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, "", false)
	it := l.item(ratelimit.Inbound, nil)
	for n := range 10_000 {
		l.Check(t.Context(), noon.Add(time.Duration(n)*137*time.Microsecond), it)
	}
	page := l.page(expfmt.TypeTextPlain)
	_, rest, _ := strings.Cut(page, `converger_rate_limit_check_duration_seconds_count{backend="local"} `)
	var samples int
	if _, err := fmt.Sscan(rest, &samples); err != nil || samples < 1 || samples > 100 {
		t.Errorf("%d of 10,000 checks were measured (%v)", samples, err)
	}
}

func TestReserve(t *testing.T) {
	t.Parallel()
	l := newLimiter(t, "", false)
	p, err := ratelimit.NewPolicy(ratelimit.ChannelOutbound, ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: ratelimit.TokenBucket})
	if err != nil {
		t.Fatal(err)
	}
	it := ratelimit.Item{Key: l.hasher.Channel(ratelimit.ChannelOutbound, [16]byte{1}, [16]byte{2}), Policy: p}
	for n := range 12 {
		d := l.Reserve(t.Context(), noon, it, 150*time.Millisecond)
		if want := max(0, 100*(n-9)); d.Allowed != (n < 11) || n < 11 && d.WaitMs != uint32(want) {
			t.Errorf("delivery %d: %+v", n+1, d)
		}
	}
}

func TestCheckAllocatesNothing(t *testing.T) {
	l := newLimiter(t, "", false)
	tenant, err := ratelimit.Compile([]byte(`{"upload":{"limit":20,"scale_ms":1000}}`))
	if err != nil {
		t.Fatal(err)
	}
	ctx, now := t.Context(), l.Now()
	var d ratelimit.Decision
	for name, check := range map[string]func(){
		"one":      func() { d = l.Check(ctx, now, l.item(ratelimit.Upload, tenant)) },
		"refunded": func() { l.Refund(ctx, d, l.item(ratelimit.Upload, tenant)) },
	} {
		if n := testing.AllocsPerRun(1000, check); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
	}
}

func BenchmarkLimiterCheck(b *testing.B) {
	store, err := local.New(local.Config{})
	if err != nil {
		b.Fatal(err)
	}
	l, err := ratelimit.New(ratelimit.Config{Store: store})
	if err != nil {
		b.Fatal(err)
	}
	p, err := ratelimit.NewPolicy(ratelimit.APIRead, ratelimit.Rule{Limit: ratelimit.MaxLimit, Scale: time.Second})
	if err != nil {
		b.Fatal(err)
	}
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 12345, Lo: 67890}, Policy: p}
	ctx := b.Context()
	now := noon
	for b.Loop() {
		l.Check(ctx, now, it)
		now += 7
	}
}
