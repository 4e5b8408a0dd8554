package cluster

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The rule as the design states it, for one peer, without shortcuts: what it could
// have been asked, what it could have admitted in silence, and where it would have
// stopped.
func slowExpected(demand, age, left, latency, total, worth, interval float64, n int) float64 {
	least := demand * age
	quantum := left / (4 * float64(n))
	if quantum < 1 {
		quantum = 1
	}
	if v := quantum - 1 + demand*(0.002+latency); v < least {
		least = v
	}
	if v := left * (demand / total); v < least {
		least = v
	}
	if v := demand * (interval + latency); v < least && worth < least {
		least = max(v, worth)
	}
	return least
}

func TestExpectedEqualsTheDesign(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.IntRange(1, 100).Draw(rt, "nodes")
		r := rumour{
			demand:  rapid.Float64Range(0.5, 1e6).Draw(rt, "demand"),
			age:     rapid.Float64Range(0, 10).Draw(rt, "age"),
			left:    rapid.Float64Range(0, 1e9).Draw(rt, "left"),
			latency: rapid.Float64Range(0, 0.1).Draw(rt, "latency"),

			worth:    rapid.Float64Range(0, 1e7).Draw(rt, "worth"),
			interval: rapid.Float64Range(0.01, 10).Draw(rt, "interval"),
		}
		r.total = r.demand + rapid.Float64Range(0, 1e7).Draw(rt, "others")
		got, want := r.expected(n), slowExpected(r.demand, r.age, r.left, r.latency, r.total, r.worth, r.interval, n)
		if math.Abs(got-want) > 1e-9*(1+want) {
			rt.Fatalf("%+v among %d: expected %v, the design says %v", r, n, got, want)
		}
		// Laws: never negative, never beyond what was left, more with time.
		if got < 0 || got > r.left+1e-9 {
			rt.Fatalf("%+v: %v of %v left", r, got, r.left)
		}
		later := r
		later.age += rapid.Float64Range(0, 1).Draw(rt, "later")
		if later.expected(n) < got {
			rt.Fatalf("%+v: less is expected later", r)
		}
		// A token bucket expects a refill on top, but never more than the burst.
		rate, burst := rapid.Float64Range(1, 1e6).Draw(rt, "rate"), r.left+rapid.Float64Range(0, 1e6).Draw(rt, "spent")
		if tokens := r.expectedTokens(rate, burst, n); tokens < got-1e-6*(1+got) || tokens > burst+1e-6 {
			rt.Fatalf("%+v: %v tokens, %v in a window, burst %v", r, tokens, got, burst)
		}
	})
}

func TestSilentPeerIsNotExpectedForEver(t *testing.T) {
	t.Parallel()
	hot := rumour{demand: 1000, worth: 10, interval: 0.1}
	if hot.age = 0.2; hot.stale() {
		t.Error("a hot key is given up when one report is missing")
	}
	if hot.age = 0.5; !hot.stale() {
		t.Error("a hot key is not given up when several are")
	}
	slow := rumour{demand: 1, age: 9, worth: 10, interval: 0.1}
	if slow.stale() {
		t.Error("a slow key was given up before it was worth a report")
	}
	if slow.age, slow.worth = 40, 1e9; !slow.stale() {
		t.Error("a key is expected after the longest silence")
	}
}

func TestAveragedDemand(t *testing.T) {
	t.Parallel()
	d := 0.0
	for range 20 { // two seconds: ten time constants
		d = averaged(d, 100, 0.1)
	}
	if math.Abs(d-1000) > 1 {
		t.Errorf("a steady 1000 a second is measured as %v", d)
	}
	d = averaged(d, 0, demandTau.Seconds())
	if math.Abs(d-1000/math.E) > 1 {
		t.Errorf("after one time constant of silence %v is left", d)
	}
}

func TestQuantum(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		left float64
		n    int
		want float64
	}{{1200, 3, 100}, {12, 3, 1}, {11, 3, 1}, {0, 3, 1}, {1000, 20, 12.5}} {
		if got := quantum(c.left, c.n); got != c.want {
			t.Errorf("quantum(%v, %d) = %v, want %v", c.left, c.n, got, c.want)
		}
	}
	// Drained, a token bucket of 1200 a second reports what refills in a tenth.
	if got := tokenQuantum(0, 1200, 0.1, 3); got != 10 {
		t.Errorf("tokenQuantum = %v, want 10", got)
	}
}

func TestBeyond(t *testing.T) {
	t.Parallel()
	if beyond(400, 334) != 400 || beyond(100, 334) != 334 {
		t.Error("the other side has what it spent or its share, whichever is more")
	}
}

func TestDelays(t *testing.T) {
	t.Parallel()
	var d delays
	now := begin
	late := func(diff time.Duration) time.Duration {
		now = now.Add(time.Second)
		return time.Duration(d.late(int64(diff), now))
	}
	// A clock an hour apart, and a message now and then that waited.
	for range 30 {
		if got := late(-time.Hour + 2*time.Millisecond); got != 0 {
			t.Fatalf("a usual message is %v late", got)
		}
		if got := late(-time.Hour + 12*time.Millisecond); got != 10*time.Millisecond {
			t.Fatalf("a message that waited 10 ms is %v late", got)
		}
	}
	// The other clock is set: within two periods that is the new usual.
	for range 25 {
		late(5 * time.Millisecond)
	}
	if got := late(5 * time.Millisecond); got != 0 {
		t.Errorf("%v late after the clock was set", got)
	}
}
