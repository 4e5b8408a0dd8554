package cluster

import (
	"bytes"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

var wasReset = local.Reset{Key: ratelimit.Key{Hi: 78, Lo: 99}, At: begin.Add(-time.Minute), Until: begin.Add(time.Hour)}

// write makes a message of two records, of which the key of the second may have been reset.
func write(kind byte, p *ratelimit.Policy, r register, others []other, reset local.Reset) []byte {
	var w writer
	w.begin(kind, r.batch, begin)
	w.record(ratelimit.Key{Hi: 77, Lo: 99}, p, r, others, local.Reset{})
	w.record(ratelimit.Key{Hi: 78, Lo: 99}, p, r, nil, reset)
	return w.end()
}

func TestMessageRoundTrip(t *testing.T) {
	t.Parallel()
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket} {
		p := newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: 1500 * time.Millisecond, Algorithm: a})
		win, _ := p.Window(begin)
		r := register{batch: 1 << 31, win: win - 1, count: 300, prev: 20, known: 900, demand: 256}
		var others []other
		if a == ratelimit.TokenBucket {
			r.win, r.prev = 4_000_000_000, 0
		} else {
			others = []other{{9, register{batch: 3, win: win, count: 5, prev: 6}}, {10, register{batch: 4, win: win - 1}}}
		}
		for _, kind := range []byte{kindReport, kindState} {
			var rd reader
			if err := rd.begin(write(kind, p, r, others, wasReset)); err != nil {
				t.Fatal(err)
			}
			var rec record
			for n := range 2 {
				if ok, err := rd.next(&rec); !ok || err != nil {
					t.Fatal(ok, err)
				}
				if want := []local.Reset{{}, wasReset}[n]; rec.reset != want {
					t.Errorf("record %d: a reset %+v, want %+v", n, rec.reset, want)
				}
				if rec.shape.Shape() != p.Shape() || rec.key != (ratelimit.Key{Hi: 77 + uint64(n), Lo: 99}) {
					t.Errorf("record %d: %+v", n, rec)
				}
				if diff := cmp.Diff(r, rec.register, cmp.AllowUnexported(register{})); diff != "" {
					t.Errorf("%v: %s", a, diff)
				}
				if n == 0 && kind == kindState && len(others) > 0 {
					if diff := cmp.Diff(others, rec.others, cmp.AllowUnexported(register{}, other{})); diff != "" {
						t.Errorf("%v: %s", a, diff)
					}
				}
			}
			if ok, err := rd.next(&rec); ok || err != nil {
				t.Errorf("at the end: %v, %v", ok, err)
			}
		}
	}
}

// A demand is never rounded to none: it would stop being expected.
func TestDemandIsRoundedUp(t *testing.T) {
	t.Parallel()
	p := newPolicy(t, ratelimit.Rule{Limit: 10, Scale: time.Second})
	for _, d := range []float32{0, 1e-9, 0.5, 1, 3.93, 15.8, 15.9, 16, 3333.33, 1e9} {
		var rd reader
		var rec record
		if err := rd.begin(write(kindReport, p, register{batch: 1, demand: d}, nil, local.Reset{})); err != nil {
			t.Fatal(err)
		}
		if _, err := rd.next(&rec); err != nil || rec.demand < d || rec.demand > max(d*1.01, d+0.125) || d == 0 && rec.demand != 0 {
			t.Errorf("%v arrives as %v (%v)", d, rec.demand, err)
		}
	}
}

func TestMessagesAreSmall(t *testing.T) {
	t.Parallel()
	p := newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Second})
	win, _ := p.Window(begin)
	r := register{batch: 100, win: win, count: 300, known: 900, prev: 333, demand: 3000}
	if n := len(write(kindReport, p, r, nil, local.Reset{})); n > 20+2*26 {
		t.Errorf("two reports take %d bytes", n)
	}
	// Many keys of which each was asked once: nearly nothing but the keys, of which order saves a byte.
	var w writer
	w.begin(kindReport, 1<<31, begin)
	for k := range uint64(1800) {
		w.record(item(p, k).Key, p, register{win: win, count: 1, prev: 1, known: 1, demand: 3.93}, nil, local.Reset{})
	}
	if n := float64(len(w.end())) / 1800; n > 17.2 {
		t.Errorf("a key that was asked once takes %.1f bytes", n)
	}
}

// Whatever arrives is read or refused, and what was read can be taken in.
func FuzzReceive(f *testing.F) {
	for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.TokenBucket} {
		p := newPolicy(f, ratelimit.Rule{Limit: 1000, Scale: time.Second, Algorithm: a})
		win, _ := p.Window(begin)
		var others []other
		if a == ratelimit.FixedWindow {
			others = []other{{9, register{batch: 3, win: win, count: 5}}}
		}
		f.Add(write(kindReport, p, register{batch: 1, win: win, count: 3, known: 4, demand: 10}, nil, wasReset))
		f.Add(write(kindState, p, register{batch: 2, win: win, count: 3, known: 4, demand: 10}, others, local.Reset{}))
		f.Add(appendResets(nil, []local.Reset{wasReset})[0])
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		n := newSim(t, 3, conditions{maxKeys: 100}).nodes[0]
		sent := bytes.Clone(b)
		err := n.receive(2, b, begin)
		if !bytes.Equal(sent, b) {
			t.Fatal("the message was changed")
		}
		if err != nil {
			return
		}
		for _, a := range []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.TokenBucket} {
			p := newPolicy(t, ratelimit.Rule{Limit: 1000, Scale: time.Second, Algorithm: a})
			it := ratelimit.Item{Key: ratelimit.Key{Hi: 77, Lo: 99}, Policy: p}
			n.Take(t.Context(), begin, it)
			n.poll(begin)
			if u, err := n.Peek(t.Context(), begin, it); err != nil || u.Remaining > 1000 {
				t.Fatalf("%+v, %v", u, err)
			}
		}
	})
}
