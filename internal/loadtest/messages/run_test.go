package messages

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/loadtest/hub"
	"converger/internal/signature"
)

// fakeHub does what a run needs: it makes what it is told, numbers what is posted, and delivers it, or not, as misdeliver
// says for each message of a conversation.
type fakeHub struct {
	t          *testing.T
	base       string
	answer     func(number int) int              // status of the n-th message; nil: 201
	misdeliver func(seq int64) (seqs []int64)    // the seqs that go out for it; nil: itself
	stall      func(number int, r *http.Request) // before the answer

	mu       sync.Mutex
	received int
	ids      int
	receiver string
	seqs     map[string]int64
	calls    map[string]int // management calls by method and last segment
	tenants  map[string]string
	queue    chan fakeDelivery // one lane for all: nothing overtakes
}

type fakeDelivery struct {
	receiver string
	body     []byte
}

func newFakeHub(t *testing.T) *fakeHub {
	t.Helper()
	f := &fakeHub{t: t, seqs: map[string]int64{}, calls: map[string]int{}, tenants: map[string]string{}, queue: make(chan fakeDelivery, 1<<16)}
	s := httptest.NewServer(f)
	var lane sync.WaitGroup
	lane.Go(func() {
		for d := range f.queue {
			resp, err := http.Post(d.receiver, "application/json", bytes.NewReader(d.body)) //nolint:noctx // a test's
			if err == nil {                                                                 // else the run has ended
				resp.Body.Close()
			}
		}
	})
	t.Cleanup(func() { s.Close(); close(f.queue); lane.Wait() })
	f.base = s.URL
	return f
}

const fakeSecret = "whsec_ZmFrZSBzZWNyZXQgb2YgYSBmYWtlIGh1Yg=="

func (f *fakeHub) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	var in map[string]any
	_ = json.Unmarshal(body, &in) // some have none
	parts := strings.Split(r.URL.Path, "/")
	last := parts[len(parts)-1]
	status, out := http.StatusCreated, `{"data":{}}`
	switch {
	case r.URL.Path == "/metrics":
		status, out = 200, "process_cpu_seconds_total 1\nprocess_resident_memory_bytes 50000000\ngo_goroutines 10\n"
	case strings.HasPrefix(r.URL.Path, "/api/v1/management/"):
		out = f.manage(r.Method, last, in)
	case r.URL.Path == "/api/v1/conversations":
		out = fmt.Sprintf(`{"data":{"id":"conversation-%d"}}`, f.id())
	case last == "activities":
		status = f.take(r, parts[4], in)
	case last == "inbound":
		if err := signature.VerifyTimestamped(r.Header, body, [][]byte{[]byte(fakeSecret)}, time.Now()); err != nil {
			f.t.Errorf("an inbound webhook: %v", err)
		}
		status = f.take(r, parts[4]+"/"+fmt.Sprint(in["external_id"]), in)
	}
	w.WriteHeader(status)
	if status >= 400 {
		out = `{"code":"made_up"}`
	}
	fmt.Fprint(w, out)
}

func (f *fakeHub) id() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ids++
	return f.ids
}

func (f *fakeHub) manage(method, last string, in map[string]any) string {
	id := f.id()
	f.mu.Lock()
	defer f.mu.Unlock()
	if method == http.MethodDelete {
		last = "channel"
	}
	f.calls[method+" "+last]++
	switch last {
	case "tenants":
		f.tenants[fmt.Sprint("t", id)] = fmt.Sprint(in["name"])
		return fmt.Sprintf(`{"data":{"id":"t%d"}}`, id)
	case "keys":
		return fmt.Sprintf(`{"data":{"id":"k%d","api_key":"cvg_live_%d"}}`, id, id)
	case "channels":
		if config, ok := in["config"].(map[string]any); ok && config["url"] != nil {
			f.receiver = fmt.Sprint(config["url"])
		}
		return fmt.Sprintf(`{"data":{"id":"c%d","secret":%q}}`, id, fakeSecret)
	}
	return `{"data":{}}`
}

// take stores a message and delivers it.
func (f *fakeHub) take(r *http.Request, chat string, in map[string]any) int {
	f.mu.Lock()
	f.received++
	number := f.received
	f.mu.Unlock()
	if f.stall != nil {
		f.stall(number, r)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.answer != nil {
		if status := f.answer(number); status >= 300 {
			return status
		}
	}
	f.seqs[chat]++
	seqs := []int64{f.seqs[chat]}
	if f.misdeliver != nil {
		seqs = f.misdeliver(seqs[0])
	}
	for _, seq := range seqs {
		body, err := json.Marshal(map[string]any{"text": in["text"], "seq": seq, "conversation_id": chat})
		if err != nil {
			f.t.Error(err)
		}
		f.queue <- fakeDelivery{f.receiver, body}
	}
	return http.StatusCreated
}

func (f *fakeHub) options() Options {
	return Options{Hub: &hub.Client{Base: f.base, Token: "cvg_op_x", HTTP: &http.Client{Timeout: 10 * time.Second}}, Tenants: 2, Channels: 2, Conversations: 3,
		Callers: 4, Duration: 300 * time.Millisecond, Inbound: 0.25, Size: 100, Timeout: 10 * time.Second, Drain: 10 * time.Second,
		ReceiverAddress: "127.0.0.1:0", Row: 50 * time.Millisecond, Every: 20 * time.Millisecond, Progress: io.Discard}
}

func TestRunAgainstAFakeHub(t *testing.T) {
	t.Parallel()
	f := newFakeHub(t)
	o := f.options()
	var progress bytes.Buffer
	o.Progress, o.WarmUp = &progress, 50*time.Millisecond
	r, err := Run(t.Context(), o)
	if err != nil {
		t.Fatalf("%v\n%s", err, &progress)
	}
	if r.Accepted == 0 || r.Accepted != r.Posts.Count+r.Webhooks.Count || r.Webhooks.Count == 0 || r.Delivered < r.Accepted || r.Check != (Check{}) || len(r.Errors) > 0 || r.Interrupted {
		t.Errorf("%+v", r)
	}
	if share := float64(r.Webhooks.Count) / float64(r.Accepted); share < 0.2 || share > 0.3 {
		t.Errorf("%g of the messages were webhooks", share)
	}
	if len(r.Rows) < 4 || r.Rows[1].Resident != 50_000_000 || r.Conversations != 2*2*3+2*3 {
		t.Errorf("%d rows: %+v", len(r.Rows), r.Rows)
	}
	for _, want := range []string{"Ctrl-C", "/s accepted", "/s delivered", "== from 0 s"} {
		if !strings.Contains(progress.String(), want) {
			t.Errorf("progress lacks %q:\n%s", want, &progress)
		}
	}
	// Everything that was made is put to rest.
	want := map[string]int{"POST tenants": 2, "POST keys": 2, "PUT activity_create": 2, "PUT inbound": 2, "PUT api_read": 2, "POST channels": 6,
		"DELETE channel": 6, "POST revoke": 2, "POST suspend": 2}
	if diff := cmp.Diff(want, f.calls); diff != "" || !strings.Contains(r.WhatRemains, "suspended") {
		t.Errorf("%s\n%s", r.WhatRemains, diff)
	}
	for name := range maps.Values(f.tenants) {
		if !strings.HasPrefix(name, "loadtest "+r.Run+" ") {
			t.Errorf("a tenant is called %q", name)
		}
	}
}

// What a hub does wrong is found.
func TestRunFindsWhatIsWrong(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		misdeliver func(seq int64) []int64
		want       func(Check) bool
		broken     bool
	}{
		"lost":         {func(seq int64) []int64 { return []int64{seq}[:1-min(1, seq/5%2)] }, func(c Check) bool { return c.Lost > 0 && c.Doubled == 0 && c.OutOfOrder == 0 }, true},
		"doubled":      {func(seq int64) []int64 { return []int64{2 * seq, 2*seq + 1} }, func(c Check) bool { return c.Doubled > 0 && c.Lost == 0 }, true},
		"out of order": {func(seq int64) []int64 { return []int64{1_000_000 - seq} }, func(c Check) bool { return c.OutOfOrder > 0 && c.Lost == 0 && c.Doubled == 0 }, true},
		"repeated":     {func(seq int64) []int64 { return []int64{seq, seq} }, func(c Check) bool { return c.Repeats > 0 && c.Lost == 0 && c.Doubled == 0 }, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakeHub(t)
			f.misdeliver = test.misdeliver
			o := f.options()
			if o.Rate = 300; name == "lost" {
				o.Drain = 300 * time.Millisecond // it is waited for in vain
			}
			r, err := Run(t.Context(), o)
			if r == nil || !test.want(r.Check) {
				t.Fatalf("%+v, %v", r, err)
			}
			if test.broken != errors.Is(err, ErrBroken) {
				t.Errorf("error %v", err)
			}
		})
	}
}

func TestRunCountsRefusals(t *testing.T) {
	t.Parallel()
	f := newFakeHub(t)
	f.answer = func(n int) int {
		if n > 1 && n%3 == 0 {
			return http.StatusServiceUnavailable
		}
		return http.StatusCreated
	}
	r, err := Run(t.Context(), f.options())
	if err != nil || r.Errors["503 made_up"] == 0 || len(r.Errors) != 1 || r.Accepted == 0 {
		t.Errorf("%+v, %v", r, err)
	}
}

// A hub that stalls once makes all messages late that were due meanwhile, although only one request saw it: latency counts
// from when a message was due.
func TestStallIsNotHidden(t *testing.T) {
	t.Parallel()
	const stall = 200 * time.Millisecond
	for name, rate := range map[string]float64{"open": 100, "closed": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFakeHub(t)
			f.stall = func(n int, _ *http.Request) {
				if n == 5 {
					time.Sleep(stall) // the hub that is measured
				}
			}
			o := f.options()
			o.Callers, o.Rate, o.Duration, o.Inbound, o.ReceiverAddress = 1, rate, 500*time.Millisecond, 0, ""
			r, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			// 20 messages of 50 were due during the stall, so the worst tenth was late by half of it at least.
			late := r.Latency.P99 > ms(stall)*0.8
			if rate > 0 && (!late || r.Latency.Mean < ms(stall)*0.1) {
				t.Errorf("the stall does not show: %+v", r.Latency)
			}
			if rate > 0 && r.Accepted+r.Behind < 45 {
				t.Errorf("%d accepted and %d behind of 50 that were due", r.Accepted, r.Behind)
			}
			if rate == 0 && r.Latency.Count > 200 && late {
				t.Errorf("one late answer of %d is the 99th percentile: %+v", r.Latency.Count, r.Latency)
			}
		})
	}
}

// Ctrl-C ends the load at once, also when the hub does not answer, and the report tells what there was; tenants are put to
// rest all the same.
func TestRunIsInterrupted(t *testing.T) {
	t.Parallel()
	f := newFakeHub(t)
	ctx, cancel := context.WithCancel(t.Context())
	f.stall = func(n int, r *http.Request) {
		if n == 50 {
			cancel()
		}
		if n >= 50 {
			<-r.Context().Done()
		}
	}
	o := f.options()
	o.Duration = time.Hour
	r, err := Run(ctx, o)
	if err != nil || !r.Interrupted || r.Accepted == 0 || r.Check.Lost != 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	if f.calls["POST suspend"] != 2 {
		t.Errorf("not put to rest: %v", f.calls)
	}
}

// A hub that may not post to the receiver is found before the load.
func TestRunNeedsDeliveries(t *testing.T) {
	t.Parallel()
	f := newFakeHub(t)
	f.misdeliver = func(int64) []int64 { return nil }
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	f.stall = func(int, *http.Request) { time.AfterFunc(100*time.Millisecond, cancel) } // nobody has the patience
	r, err := Run(ctx, f.options())
	if r != nil || err == nil {
		t.Errorf("%+v, %v", r, err)
	}
	if f.received != 1 || f.calls["POST suspend"] != 2 {
		t.Errorf("%d messages; %v", f.received, f.calls)
	}
}

// What was made before setting up failed is put to rest.
func TestSettingUpFails(t *testing.T) {
	t.Parallel()
	refused := false
	f := newFakeHub(t)
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "/channels") {
			refused = true
			http.Error(w, `{"code":"made_up"}`, http.StatusUnprocessableEntity) // as for a receiver that is not public
			return
		}
		f.ServeHTTP(w, r)
	}))
	t.Cleanup(proxy.Close)
	f.base = proxy.URL
	o := f.options()
	var progress bytes.Buffer
	o.Progress = &progress
	r, err := Run(t.Context(), o)
	if refusal, ok := errors.AsType[*hub.StatusError](err); r != nil || !ok || refusal.Status != http.StatusUnprocessableEntity || !refused || !strings.Contains(err.Error(), "WEBHOOK_ALLOWED_TARGETS") {
		t.Errorf("%+v, %v", r, err)
	}
	if f.calls["POST suspend"] != 1 || !strings.Contains(progress.String(), "suspended") {
		t.Errorf("%v\n%s", f.calls, &progress)
	}
	if keys := slices.Sorted(maps.Keys(f.calls)); slices.Contains(keys, "DELETE channel") {
		t.Errorf("%v", keys)
	}
}
