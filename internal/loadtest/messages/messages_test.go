package messages

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/wire"
)

// Every duration lands in a bucket whose upper end is at least as large and at most 1 % larger.
func TestBucketsAreTrue(t *testing.T) {
	t.Parallel()
	last := -1
	for us := uint64(0); us < 1<<histRange; us += 1 + us/1000 {
		b := bucketOf(us)
		if b < last || b >= histSize {
			t.Fatalf("%d µs lands in bucket %d after %d, of %d", us, b, last, histSize)
		}
		last = b
		if up := upper(b); up < us || float64(up) > float64(us)*1.01+1 {
			t.Fatalf("%d µs lands in bucket %d that ends at %d", us, b, up)
		}
	}
	if b := bucketOf(1 << 60); b != histSize-1 {
		t.Errorf("a very long time lands in bucket %d", b)
	}
}

func TestQuantiles(t *testing.T) {
	t.Parallel()
	h := &hist{}
	if got := h.read().latency(); got != (Latency{}) {
		t.Errorf("of nothing: %+v", got)
	}
	r := rand.New(rand.NewPCG(1, 2))
	var all []time.Duration
	for range 10_000 {
		d := time.Duration(r.ExpFloat64() * float64(20*time.Millisecond)).Truncate(time.Microsecond)
		all = append(all, d)
		h.add(d)
	}
	slices.Sort(all)
	c := h.read()
	for _, q := range []float64{0, 0.001, 0.5, 0.9, 0.99, 0.999, 1} {
		want := all[max(0, min(len(all)-1, int(q*float64(len(all)))-1))]
		if got := c.quantile(q); got < want || float64(got) > float64(want)*1.01+1000 {
			if q > 0 { // the least is only a bound
				t.Errorf("quantile %g is %s, want %s", q, got, want)
			}
		}
	}
	h.add(-time.Second) // a clock that was set back
	h.add(time.Hour)
	later := h.read().since(c)
	if later.total != 2 || later.quantile(0.5) != 0 || later.quantile(1) < time.Hour {
		t.Errorf("between two readings: %d, %s, %s", later.total, later.quantile(0.5), later.quantile(1))
	}
}

func TestBitset(t *testing.T) {
	t.Parallel()
	var b bitset
	want := map[int64]bool{}
	r := rand.New(rand.NewPCG(3, 4))
	for range 5000 {
		i := r.Int64N(20_000)
		if before := b.set(i); before != want[i] {
			t.Fatalf("bit %d was %v", i, before)
		}
		want[i] = true
	}
	for i := range int64(25_000) {
		if b.has(i) != want[i] {
			t.Fatalf("bit %d is %v", i, b.has(i))
		}
	}
}

func TestLedger(t *testing.T) {
	t.Parallel()
	l := newLedger("abc", time.Now())
	arrive := func(number, seq int64, chat string) {
		body, err := json.Marshal(map[string]any{"text": l.key(number, time.Millisecond) + " xxx", "seq": seq, "conversation_id": chat})
		if err != nil {
			t.Fatal(err)
		}
		l.observe(wire.Arrival{Body: body, At: l.began.Add(3 * time.Millisecond)})
	}
	for n := range int64(5) {
		l.ack(n)
	}
	arrive(0, 1, "a")
	arrive(1, 2, "a")
	arrive(1, 2, "a") // a repeat
	arrive(3, 4, "a")
	arrive(2, 3, "a") // late
	arrive(3, 5, "a") // the same message as another activity
	arrive(7, 1, "b") // before it is acknowledged
	l.ack(7)
	arrive(8, 2, "b") // never acknowledged: its answer was lost
	for _, body := range []string{"", "{}", `{"text":"hello","seq":1,"conversation_id":"a"}`, `{"text":"lt-xyz-1-1 x","seq":9,"conversation_id":"a"}`,
		`{"text":"lt-abc-1-1 x","seq":0,"conversation_id":"a"}`, `{"text":"lt-abc--5-1 x","seq":9,"conversation_id":"a"}`, `{"text":"lt-abc-99999999999999-1 x","seq":9,"conversation_id":"a"}`} {
		l.observe(wire.Arrival{Body: []byte(body), At: time.Now()})
	}
	// Number 4 is lost.
	if diff := cmp.Diff(Check{Lost: 1, Doubled: 1, OutOfOrder: 1, Repeats: 1, Strange: 7}, l.check()); diff != "" {
		t.Error(diff)
	}
	if n := l.delivered.Load(); n != 6 || l.open() != 1 {
		t.Errorf("%d delivered, %d open", n, l.open())
	}
	if took := l.took.read(); took.total != 6 || took.quantile(1) < 2*time.Millisecond || took.quantile(1) > 3*time.Millisecond {
		t.Errorf("took %+v", took.latency())
	}
	arriveProbe, err := json.Marshal(map[string]any{"text": l.key(probeNumber, 0) + " x", "seq": 1, "conversation_id": "p"})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // it may be repeated
		l.observe(wire.Arrival{Body: arriveProbe, At: time.Now()})
	}
	select {
	case <-l.probed:
	default:
		t.Error("the probe was not seen")
	}
}

// The share of webhooks is kept in every stretch, and each kind takes its places in turn.
func TestPlaces(t *testing.T) {
	t.Parallel()
	for _, share := range []float64{0, 0.2, 0.5, 1} {
		w := &world{posts: make([]place, 10), webhooks: make([]place, 4)}
		for i := range w.posts {
			w.posts[i].path = fmt.Sprint("p", i)
		}
		for i := range w.webhooks {
			w.webhooks[i].path = fmt.Sprint("w", i)
		}
		l := newLoad(Options{Inbound: share}, w, newLedger("x", time.Now()))
		seen, webhooks := map[string]int{}, 0
		for n := range int64(1000) {
			p, kind := l.place(n)
			seen[p.path]++
			if kind == &l.webhooks {
				webhooks++
			}
			if want := share * float64(n+1); float64(webhooks) < want-1 || float64(webhooks) > want+1 {
				t.Fatalf("share %g: %d webhooks of %d", share, webhooks, n+1)
			}
		}
		for i := range w.webhooks {
			if got, want := seen[fmt.Sprint("w", i)], int(share*1000)/4; got < want-1 || got > want+1 {
				t.Errorf("share %g: %d at webhook %d, want about %d", share, got, i, want)
			}
		}
	}
}

func TestReason(t *testing.T) {
	t.Parallel()
	for want, test := range map[string]struct {
		answer wire.Answer
		err    error
	}{
		"429 rate_limited":               {answer: wire.Answer{Status: 429, Code: "rate_limited"}},
		"502":                            {answer: wire.Answer{Status: 502}},
		"no answer in time":              {err: &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}},
		"connection refused":             {err: &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}},
		"connection closed":              {err: fmt.Errorf("read: %w", io.EOF)},
		"name not found":                 {err: &net.OpError{Op: "dial", Err: &net.DNSError{IsNotFound: true}}},
		"connection failed: out of luck": {err: errors.New("out of luck")},
	} {
		if got := reason(test.answer, test.err); got != want {
			t.Errorf("%+v, %v: %q, want %q", test.answer, test.err, got, want)
		}
	}
	l := newLoad(Options{}, &world{}, newLedger("x", time.Now()))
	for i := range 1000 {
		l.count(fmt.Sprint(i))
	}
	if n := len(l.readErrors()); n > maxErrors+1 {
		t.Errorf("%d kinds of errors are told apart", n)
	}
}

func TestJudge(t *testing.T) {
	t.Parallel()
	row := func(change func(*Row)) Row {
		r := Row{Accepted: 1000, Latency: Latency{P50: 5, P99: 20}, Delivered: 1000, Delivery: Latency{P50: 6, P99: 30},
			Resident: 100 << 20, Goroutines: 300, Standing: 20 << 20, Dead: 10_000}
		change(&r)
		return r
	}
	same := func(*Row) {}
	for name, test := range map[string]struct {
		first, last func(*Row)
		bad         []string
	}{
		"flat":               {same, same, nil},
		"a slow start":       {func(r *Row) { r.Accepted, r.Resident = 10, 1<<20 }, same, nil},
		"within the bounds":  {same, func(r *Row) { r.Accepted, r.Resident, r.Standing = 920, 115<<20, 23<<20 }, nil},
		"rate falls tenfold": {same, func(r *Row) { r.Accepted, r.Delivered = 100, 100 }, []string{"accepted per second", "delivered per second"}},
		"memory grows":       {same, func(r *Row) { r.Resident = 200 << 20 }, []string{"memory of the hub (MiB)"}},
		"bloat grows":        {same, func(r *Row) { r.Standing, r.Dead = 40<<20, 100_000 }, []string{"standing tables (MiB)", "dead rows of standing tables"}},
		"latency grows":      {same, func(r *Row) { r.Latency.P50, r.Latency.P99 = 50, 500 }, []string{"latency p50 (ms)", "latency p99 (ms)"}},
		"goroutines leak":    {same, func(r *Row) { r.Goroutines = 5000 }, []string{"goroutines of the hub"}},
		"delivery lags":      {same, func(r *Row) { r.Delivery.P50 = 1000 }, []string{"delivery p50 (ms)"}},
	} {
		rows := []Row{row(test.first), row(test.first), row(test.first), row(same), row(same), row(same), row(test.last), row(test.last), row(test.last)}
		for i := range rows {
			rows[i].From, rows[i].Seconds = float64(i)*60, 60
		}
		var bad []string
		for _, f := range judge(rows, true) {
			if !f.OK {
				bad = append(bad, f.What)
			}
		}
		if diff := cmp.Diff(test.bad, bad); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
	short := []Row{}
	for i := range 9 { // in a minute, autovacuum has hardly come by
		short = append(short, row(func(r *Row) { r.From, r.Seconds, r.Standing = float64(i)*10, 10, int64(i)<<20 }))
	}
	for _, f := range judge(short, true) {
		if !f.OK || strings.Contains(f.What, "tables") {
			t.Errorf("a short run: %+v", f)
		}
	}
	if got := judge(make([]Row, minRows-1), true); got != nil {
		t.Errorf("a verdict of few rows: %+v", got)
	}
}

func TestOptionsAreValidated(t *testing.T) {
	t.Parallel()
	good := func() Options {
		return Options{Hub: &hub.Client{Base: "http://127.0.0.1:4000"}, Tenants: 1, Channels: 1, Conversations: 1, Callers: 1, Duration: time.Second,
			Size: 1, Timeout: time.Second, Row: time.Second, Every: time.Second, ReceiverAddress: "127.0.0.1:0"}
	}
	if _, err := good().validate(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"no tenants":            {func(o *Options) { o.Tenants = 0 }, "0 tenants"},
		"too many tenants":      {func(o *Options) { o.Tenants = 1001 }, "1001 tenants"},
		"too many in all":       {func(o *Options) { o.Tenants, o.Conversations = 1000, 1000 }, "in all"},
		"too many callers":      {func(o *Options) { o.Callers = 10_001 }, "callers"},
		"a negative rate":       {func(o *Options) { o.Rate = -1 }, "rate"},
		"a huge rate":           {func(o *Options) { o.Rate = 1e9 }, "rate"},
		"no duration":           {func(o *Options) { o.Duration = 0 }, "duration"},
		"a share above 1":       {func(o *Options) { o.Inbound = 1.1 }, "share"},
		"no text":               {func(o *Options) { o.Size = 0 }, "texts"},
		"another machine":       {func(o *Options) { o.Hub.Base = "http://192.0.2.1" }, "the hub: \"192.0.2.1\" is ::ffff:192.0.2.1: not a loopback address"},
		"receiver elsewhere":    {func(o *Options) { o.ReceiverAddress = "0.0.0.0:0" }, "the receiver"},
		"receiver URL away":     {func(o *Options) { o.ReceiverAddress, o.ReceiverURL = "", "http://192.0.2.1/" }, "the receiver"},
		"two receivers":         {func(o *Options) { o.ReceiverURL = "http://127.0.0.1/" }, "another one"},
		"no URL":                {func(o *Options) { o.Hub.Base = "hub" }, "the hub"},
		"no URL with a secret":  {func(o *Options) { o.Hub.Base = "http://u:hunter2@h" }, "the hub"},
		"no time between lines": {func(o *Options) { o.Every = 0 }, "progress"},
	} {
		o := good()
		test.change(&o)
		if _, err := o.validate(t.Context()); err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v, want it to say %q", name, err, test.want)
		}
	}
	o := good()
	o.Hub.Base, o.Yes = "http://192.0.2.1", true
	if _, err := o.validate(t.Context()); err != nil {
		t.Errorf("another machine with permission: %v", err)
	}
}

// The report is readable also when little is known, and its JSON has no infinities.
func TestReportOfLittle(t *testing.T) {
	t.Parallel()
	flat := false
	for _, r := range []*Report{
		{},
		{Delivers: true, Errors: map[string]int64{"429 rate_limited": 3}, NoMetrics: "the hub's /metrics can't be read", Rows: []Row{{}}, Flat: &flat, Soak: []Flat{{What: "x"}},
			Tables: []Table{{Name: "lanes"}}, Processors: "cpu", Others: 0.5, Behind: 4, Rate: 10, WhatRemains: "nothing", Check: Check{Lost: 1, Strange: 2}},
	} {
		var text, raw bytes.Buffer
		if err := errors.Join(r.Write(&text), r.WriteJSON(&raw)); err != nil || !json.Valid(raw.Bytes()) {
			t.Errorf("%v", err)
		}
		if strings.Contains(text.String(), "%!") || strings.Contains(text.String(), "NaN") {
			t.Errorf("%s", &text)
		}
		if r.Delivers {
			for _, want := range []string{"3 × 429 rate_limited", "can't be read", "lost 1", "DISTURBED", "NOT FLAT", "4 messages were due", "lanes", "nothing"} {
				if !strings.Contains(text.String(), want) {
					t.Errorf("the report lacks %q:\n%s", want, &text)
				}
			}
		}
	}
}
