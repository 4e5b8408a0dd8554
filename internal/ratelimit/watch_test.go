package ratelimit_test

import (
	"context"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"time"

	"converger/internal/ratelimit"
)

// subjectOf is the name that these tests give the keys of hasher.Tenant.
func subjectOf(n byte) ratelimit.Name {
	return ratelimit.Name{Tenant: [16]byte{n}, Text: fmt.Sprint("tenant ", n)}
}

// ask checks one unit as a caller does, names included.
func (f fixture) ask(b ratelimit.Bucket, n byte, now ratelimit.Instant) ratelimit.Decision {
	it := ratelimit.Item{Key: f.hasher.Tenant(b, [16]byte{n}), Policy: f.Policy(b, nil, nil)}
	d := f.Check(f.Context(), now, it)
	if d.Unnamed {
		f.Name(b, it.Key, subjectOf(n))
	}
	return d
}

func counts(top []ratelimit.Heavy) string {
	text := ""
	for _, h := range top {
		text += fmt.Sprintf("%s: %d; ", h.Name.Text, h.Count)
	}
	return text
}

func TestMostRefused(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, `{"upload": {"limit": 1, "scale_ms": 60000}, "api_read": {"limit": 1, "scale_ms": 60000, "mode": "count"}}`, false)
	now := noon
	for i, n := range []byte{1, 1, 1, 1, 2, 2, 3} {
		f.ask(ratelimit.Upload, n, now.Add(time.Duration(i)*time.Millisecond))
		f.ask(ratelimit.APIRead, n, now.Add(time.Duration(i)*time.Millisecond))
	}
	for _, b := range []ratelimit.Bucket{ratelimit.Upload, ratelimit.APIRead} {
		seen := f.Observe(b, now.Add(time.Second), 10)
		if got, want := counts(seen.Top), "tenant 1: 3; tenant 2: 1; "; got != want {
			t.Errorf("%s: %s want %s", b, got, want)
		}
		counted := b == ratelimit.APIRead
		if len(seen.Recent) != 2 || seen.Recent[0].Name != subjectOf(2) || seen.Recent[1].Count != 3 || seen.Recent[1].Counted != counted {
			t.Errorf("%s: recent %+v", b, seen.Recent)
		}
		if seen.Refused+seen.Counted != 4 || (seen.Counted != 0) != counted {
			t.Errorf("%s: %d refused, %d counted", b, seen.Refused, seen.Counted)
		}
	}
	if seen := f.Observe(ratelimit.Upload, now, 1); len(seen.Top) != 1 {
		t.Errorf("%d subjects, want the one most refused", len(seen.Top))
	}
	if k, n, ok := f.Find(ratelimit.Upload, "tenant 2"); !ok || n != subjectOf(2) || k != f.hasher.Tenant(ratelimit.Upload, [16]byte{2}) {
		t.Errorf("found %v %v %v", k, n, ok)
	}
	if _, _, ok := f.Find(ratelimit.Upload, "tenant 9"); ok {
		t.Error("found a subject that was never seen")
	}
}

// TestPeriodsTurn counts a refusal for its period and the next, and then no more.
func TestPeriodsTurn(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, `{"upload": {"limit": 0, "scale_ms": 1000}}`, false)
	f.ask(ratelimit.Upload, 1, noon)
	for _, tt := range []struct {
		after time.Duration
		want  string
	}{
		{ratelimit.TopPeriod - time.Second, "tenant 1: 1; "},
		{2*ratelimit.TopPeriod - time.Second, "tenant 1: 1; "},
		{2 * ratelimit.TopPeriod, ""},
	} {
		if got := counts(f.Observe(ratelimit.Upload, noon.Add(tt.after), 10).Top); got != tt.want {
			t.Errorf("after %v: %q, want %q", tt.after, got, tt.want)
		}
	}
	// A subject keeps its name into the next period.
	f.ask(ratelimit.Upload, 1, noon)
	f.ask(ratelimit.Upload, 1, noon.Add(ratelimit.TopPeriod))
	if got := counts(f.Observe(ratelimit.Upload, noon.Add(ratelimit.TopPeriod), 10).Top); got != "tenant 1: 1; " && got != "tenant 1: 2; " {
		t.Errorf("in the next period: %q", got)
	}
}

// TestFloodIsSampled drives more decisions than are looked at one by one: what is shown stays right to a few percent, for
// the heaviest too when it is one of many, and a quiet bucket is looked at whole again soon after.
func TestFloodIsSampled(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, `{"upload": {"limit": 0, "scale_ms": 1000}}`, false)
	const rate, seconds = 100_000, 3
	for i := range rate * seconds {
		n := byte(1)
		if i%4 == 0 {
			n = byte(2 + i/4%100)
		}
		f.ask(ratelimit.Upload, n, noon.Add(time.Duration(i)*time.Second/rate))
	}
	end := noon.Add(seconds * time.Second)
	seen := f.Observe(ratelimit.Upload, end, 3)
	want := 0.75 * rate * seconds
	if got := float64(seen.Top[0].Count); seen.Top[0].Name != subjectOf(1) || math.Abs(got/want-1) > 0.05 {
		t.Errorf("the flood shows as %s, want %.0f of tenant 1", counts(seen.Top), want)
	}
	if got := float64(f.Demand(ratelimit.Upload, [16]byte{1}, end, 1)[0].Total()); math.Abs(got/want-1) > 0.05 {
		t.Errorf("demand %.0f, want %.0f", got, want)
	}
	if want := float64(rate * seconds / 10); math.Abs(seen.RefusedRate/want-1) > 0.05 { // averaged over ten seconds
		t.Errorf("%.0f a second, want %.0f", seen.RefusedRate, want)
	}
	for i := range 10 {
		f.ask(ratelimit.Upload, 200, end.Add(time.Second).Add(time.Duration(i)*100*time.Millisecond))
	}
	recent := f.Observe(ratelimit.Upload, end.Add(2*time.Second), 3).Recent
	if i := slices.IndexFunc(recent, func(r ratelimit.Refusal) bool { return r.Name == subjectOf(200) }); i < 0 {
		t.Error("a refusal after the flood is not seen")
	}
}

// TestObserversAreBounded has many invented subjects refused while one is refused more: memory stays, and the one is seen.
func TestObserversAreBounded(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, `{"upload": {"limit": 0, "scale_ms": 1000}}`, false)
	for i := range 60_000 {
		now := noon.Add(time.Duration(i) * 5 * time.Millisecond)
		k := ratelimit.Key{Hi: uint64(i) + 2, Lo: uint64(i) << 40}
		if i%20 == 0 {
			k = f.hasher.Tenant(ratelimit.Upload, [16]byte{1})
		}
		if d := f.Check(t.Context(), now, ratelimit.Item{Key: k, Policy: f.Policy(ratelimit.Upload, nil, nil)}); d.Unnamed && i%20 == 0 {
			f.Name(ratelimit.Upload, k, subjectOf(1))
		}
	}
	now := noon.Add(300 * time.Second)
	seen := f.Observe(ratelimit.Upload, now, 1_000_000)
	if len(seen.Top) > 512 || len(seen.Recent) > 64 {
		t.Errorf("%d subjects and %d refusals are kept", len(seen.Top), len(seen.Recent))
	}
	if seen.Top[0].Name != subjectOf(1) {
		t.Errorf("the most refused is not first: %+v", seen.Top[0])
	}
	if got := f.Demand(ratelimit.Upload, [16]byte{}, now, 1_000_000); len(got) > 256 {
		t.Errorf("the demand of %d subjects is kept", len(got))
	}
	if got := f.Demand(ratelimit.Upload, [16]byte{1}, now, 1_000_000); len(got) != 1 {
		t.Error("the demand of the busiest is not kept")
	}
}

// TestObserversTogether is for the race detector.
func TestObserversTogether(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, "", false)
	var wg sync.WaitGroup
	for g := range byte(4) {
		wg.Go(func() {
			for i := range 5_000 {
				f.ask(ratelimit.Upload, 1+g%2, noon.Add(time.Duration(i)*400*time.Microsecond))
			}
		})
	}
	wg.Go(func() {
		for range 200 {
			f.Observe(ratelimit.Upload, noon, 10)
			f.Demand(ratelimit.Upload, [16]byte{1}, noon, 10)
		}
	})
	wg.Wait()
	seen := f.Observe(ratelimit.Upload, noon.Add(2*time.Second), 10)
	if seen.Allowed+seen.Refused != 20_000 || len(seen.Top) != 2 {
		t.Errorf("%d allowed, %d refused, top %s", seen.Allowed, seen.Refused, counts(seen.Top))
	}
}

func TestDemandOfTheLastHour(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, "", false)
	f.ask(ratelimit.Upload, 1, noon.Add(-2*time.Hour)) // too long ago
	for s := range 100 {
		for range 1 + s%3 {
			f.ask(ratelimit.Upload, 1, noon.Add(time.Duration(s)*time.Second))
		}
		f.ask(ratelimit.Upload, 2, noon.Add(time.Duration(s)*time.Second))
	}
	got := f.Demand(ratelimit.Upload, [16]byte{1}, noon.Add(100*time.Second), 10)
	if len(got) != 1 || got[0].Name != subjectOf(1) || got[0].Total() != 199 || got[0].Sampled != 1 || len(got[0].Units) != ratelimit.DemandSeconds {
		t.Fatalf("%d subjects, total %d", len(got), got[0].Total())
	}
	at := int64(noon)/1e9 - got[0].Start
	if d := got[0].Units[at : at+6]; !slices.Equal(d, []uint32{1, 2, 3, 1, 2, 3}) {
		t.Errorf("the first seconds: %v", d)
	}
	now := noon.Add(100 * time.Second)
	if all := f.Demand(ratelimit.Upload, [16]byte{}, now, 10); len(all) != 2 || all[0].Total() != 199 || all[1].Name != subjectOf(2) || all[1].Total() != 100 {
		t.Errorf("of all: %d subjects", len(all))
	}
	if one := f.Demand(ratelimit.Upload, [16]byte{}, now, 1); len(one) != 1 || one[0].Name != subjectOf(1) {
		t.Errorf("of the busiest: %d subjects", len(one))
	}
	for n, want := range map[byte]uint64{1: 199, 2: 100, 3: 0} {
		d, ok := f.DemandOf(ratelimit.Upload, f.hasher.Tenant(ratelimit.Upload, [16]byte{n}), now)
		if ok != (want > 0) || d.Total() != want || ok && d.Name != subjectOf(n) {
			t.Errorf("of %d: %t, %d", n, ok, d.Total())
		}
	}
	if _, ok := f.DemandOf(ratelimit.Upload, got[0].Key, now.Add(2*time.Hour)); ok {
		t.Error("a demand is told that is too long ago")
	}
}

// TestDemandOfEveryBucket: whoever may set its limit, an operator can size it.
func TestDemandOfEveryBucket(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, "", false)
	for _, b := range ratelimit.Buckets() {
		p, err := ratelimit.NewPolicy(b, ratelimit.Rule{Limit: 1, Scale: time.Minute, Algorithm: b.Info().Algorithm})
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			f.Check(t.Context(), noon, ratelimit.Item{Key: ratelimit.Key{Hi: 2, Lo: 1}, Policy: p})
		}
		if d, ok := f.DemandOf(b, ratelimit.Key{Hi: 2, Lo: 1}, noon); !ok || d.Total() != 3 {
			t.Errorf("%s: %t, %d", b, ok, d.Total())
		}
	}
}

func TestReplay(t *testing.T) {
	t.Parallel()
	flat := slices.Repeat([]uint32{10}, 60)
	burst := append([]uint32{100}, slices.Repeat([]uint32{0}, 59)...)
	for name, tt := range map[string]struct {
		rule                        ratelimit.Rule
		units                       []uint32
		refused                     uint64
		peak                        uint32
		windows, exceeded, tolerate int
	}{
		"within":         {ratelimit.Rule{Limit: 10, Scale: time.Second}, flat, 0, 10, 60, 0, 0},
		"half":           {ratelimit.Rule{Limit: 5, Scale: time.Second}, flat, 300, 10, 60, 60, 0},
		"zero":           {ratelimit.Rule{Scale: time.Second}, flat, 600, 10, 60, 60, 0},
		"minute":         {ratelimit.Rule{Limit: 600, Scale: time.Minute}, flat, 0, 10, 1, 0, 0},
		"short minute":   {ratelimit.Rule{Limit: 100, Scale: time.Minute}, flat, 500, 10, 1, 1, 0},
		"burst":          {ratelimit.Rule{Limit: 10, Scale: time.Second}, burst, 90, 100, 1, 1, 0},
		"burst in token": {ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 100}, burst, 0, 100, 1, 0, 0},
		"rate of tokens": {ratelimit.Rule{Limit: 5, Scale: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 5}, flat, 295, 10, 60, 60, 5},
		"sliding":        {ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: ratelimit.SlidingWindow}, flat, 0, 10, 60, 0, 60},
	} {
		p, err := ratelimit.NewPolicy(ratelimit.Upload, tt.rule)
		if err != nil {
			t.Fatal(err)
		}
		f := p.Replay(int64(noon)/1e9, tt.units)
		if d := int(f.Refused) - int(tt.refused); d < -tt.tolerate || d > tt.tolerate {
			t.Errorf("%s: %d refused, want %d", name, f.Refused, tt.refused)
		}
		if f.Admitted+f.Refused != f.Demand || f.Peak != tt.peak || f.PeakAt != int64(noon)/1e9 || f.Windows != tt.windows || f.Exceeded > tt.windows ||
			tt.tolerate == 0 && f.Exceeded != tt.exceeded {
			t.Errorf("%s: %+v", name, f)
		}
	}
}

// TestReplayIsTheRule compares the forecast with what the limiter itself decides on the same demand.
func TestReplayIsTheRule(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		f := newLimiter(t, fmt.Sprintf(`{"upload": {"limit": 37, "scale_ms": 1500, "algorithm": %q}}`, a), false)
		p, demand, admitted := f.Policy(ratelimit.Upload, nil, nil), make([]uint32, 120), uint64(0)
		for s := range demand {
			demand[s] = uint32(10 * (s * s % 7))
			for i := range demand[s] {
				now := noon.Add(time.Duration(s)*time.Second + time.Duration(i/(max(demand[s]/10, 1)))*100*time.Millisecond)
				if f.Check(t.Context(), now, ratelimit.Item{Key: ratelimit.Key{Hi: 9}, Policy: p}).Allowed {
					admitted++
				}
			}
		}
		if got := p.Replay(int64(noon)/1e9, demand); got.Admitted != admitted {
			t.Errorf("%s: the forecast admits %d of %d, the limiter %d", a, got.Admitted, got.Demand, admitted)
		}
	}
}

func TestLoginNames(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, "", false)
	login := ratelimit.NewLogin(f.Limiter, f.hasher)
	fail := func(account string, exists bool) {
		t.Helper()
		a := ratelimit.LoginAttempt{Account: account, Shown: func() string { return "account:digest" }}
		r, _, err := login.Reserve(context.Background(), a)
		if err != nil {
			t.Fatal(err)
		}
		if r == nil {
			return
		}
		if exists {
			login.NameAccount(a, account)
		}
		r.Keep()
	}
	for range 7 {
		fail("admin jane@example.com", true)
		fail("hunter2", false)
	}
	var names []string
	for _, h := range f.Observe(ratelimit.LoginAccount, f.Now(), 10).Top {
		names = append(names, h.Name.Text)
	}
	slices.Sort(names)
	if !slices.Equal(names, []string{"account:digest", "admin jane@example.com"}) {
		t.Errorf("locked accounts are shown as %q", names)
	}
}

func TestResetOfALogin(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, "", false)
	login := ratelimit.NewLogin(f.Limiter, f.hasher)
	attempt := func() bool {
		r, _, err := login.Reserve(t.Context(), ratelimit.LoginAttempt{Account: "jane"})
		if err != nil {
			t.Fatal(err)
		}
		if r != nil {
			r.Keep()
		}
		return r != nil
	}
	for range 5 {
		attempt()
	}
	if attempt() {
		t.Fatal("a sixth attempt")
	}
	k := f.hasher.Account(ratelimit.LoginAccount, "jane")
	if err := f.Reset(t.Context(), f.Now(), ratelimit.ActivityCreate, ratelimit.Item{Key: k}); err != nil {
		t.Fatal(err)
	}
	login.Forget(k)
	if !attempt() {
		t.Error("still locked after a reset")
	}
}

// TestTheBusyKeepTheirPlace has many subjects come by once where others are busy: their demand is not forgotten for it.
func TestTheBusyKeepTheirPlace(t *testing.T) {
	t.Parallel()
	f := newLimiter(t, "", false)
	ask := func(n uint64, now ratelimit.Instant) {
		it := ratelimit.Item{Key: ratelimit.Key{Hi: n + 2, Lo: n << 50}, Policy: f.Policy(ratelimit.Upload, nil, nil)}
		if f.Check(t.Context(), now, it).Unnamed {
			f.Name(ratelimit.Upload, it.Key, subjectOf(1))
		}
	}
	now := noon
	for range 10 {
		for n := range uint64(256) {
			ask(n, now)
			now = now.Add(time.Millisecond)
		}
	}
	for n := range uint64(50) {
		now = now.Add(2 * time.Second)
		ask(1000+n, now)
	}
	got := f.Demand(ratelimit.Upload, [16]byte{1}, now, 1000)
	if len(got) != 256 || got[255].Total() < 10 {
		t.Errorf("%d subjects are kept, the least busy with %d", len(got), got[len(got)-1].Total())
	}
}
