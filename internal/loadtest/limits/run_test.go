package limits

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/wire"
)

// fake is a hub of several nodes with the few routes that a run needs. Its budget is one for all nodes, or each node's own.
type fake struct {
	ahead  time.Duration // of its clock
	own    bool          // each node counts for itself
	silent bool          // it does not say when it decided
	alone  bool          // each node sees itself only

	mu        sync.Mutex
	rule      struct{ Limit, Burst int64 }
	used      map[[2]int64]int64 // by node, or 0 for all, and window
	suspended bool
	revoked   bool
}

func (f *fake) node(t *testing.T, i int) *hub.Client {
	t.Helper()
	mux := http.NewServeMux()
	answer := func(pattern, body string, do func()) {
		mux.HandleFunc(pattern, func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != "Bearer op" {
				t.Errorf("%s by %q", r.URL, r.Header.Get("Authorization"))
			}
			if do != nil {
				f.mu.Lock()
				defer f.mu.Unlock()
				do()
			}
			fmt.Fprint(w, body)
		})
	}
	const tenant = "/api/v1/management/tenants/t1"
	answer("POST /api/v1/management/tenants", `{"data":{"id":"t1"}}`, nil)
	answer("POST "+tenant+"/keys", `{"data":{"id":"k1","api_key":"key"}}`, nil)
	answer("POST "+tenant+"/keys/k1/revoke", `{}`, func() { f.revoked = true })
	answer("POST "+tenant+"/suspend", `{}`, func() { f.suspended = true })
	mux.HandleFunc("PUT "+tenant+"/limits/api_read", func(_ http.ResponseWriter, r *http.Request) {
		f.mu.Lock()
		defer f.mu.Unlock()
		if err := json.NewDecoder(r.Body).Decode(&f.rule); err != nil {
			t.Error(err)
		}
	})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, _ *http.Request) {
		members := 2
		if f.alone {
			members = 1
		}
		fmt.Fprintf(w, "%s %d\n%s0.001\"} 5\n%s+Inf\"} 5\n", seriesMembers, members, delayBuckets, delayBuckets)
	})
	mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		now := time.Now().Add(f.ahead).UnixMilli()
		f.mu.Lock()
		who := [2]int64{0, now / 1000}
		if f.own {
			who[0] = int64(i)
		}
		over := f.used[who] >= f.rule.Limit
		if !over {
			f.used[who]++
		}
		policy := fmt.Sprintf(`"api_read";q=%d;w=1`, f.rule.Limit)
		f.mu.Unlock()
		w.Header().Set("RateLimit-Policy", policy)
		if !f.silent {
			w.Header().Set(wire.DecidedAt, fmt.Sprint(now))
		}
		if r.Header.Get("X-Api-Key") != "key" {
			t.Errorf("by %q", r.Header.Get("X-Api-Key"))
		}
		if over {
			w.WriteHeader(http.StatusTooManyRequests)
			return
		}
		w.WriteHeader(http.StatusBadRequest)
	})
	s := httptest.NewServer(mux)
	t.Cleanup(s.Close)
	return &hub.Client{Base: s.URL, Token: "op", HTTP: s.Client()}
}

func (f *fake) options(t *testing.T) Options {
	t.Helper()
	f.used = map[[2]int64]int64{}
	return Options{
		Nodes: []*hub.Client{f.node(t, 0), f.node(t, 1)}, Limit: 100, Scale: time.Second, Algorithm: FixedWindow, Load: Even, Factor: 6,
		Duration: 5 * time.Second, Callers: 2, Timeout: 10 * time.Second, Progress: io.Discard, Every: time.Second,
	}
}

// One budget for both nodes is kept, one for each is not, and the measurement tells them apart, also when the hub's clock
// is not this machine's.
func TestRunTellsALimitThatIsKeptFromOneThatIsNot(t *testing.T) {
	t.Parallel()
	for name, f := range map[string]*fake{
		"kept":             {},
		"kept, clock off":  {ahead: 7*time.Hour + 400*time.Millisecond},
		"each for itself":  {own: true},
		"each, clock slow": {own: true, ahead: -300 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, err := Run(t.Context(), f.options(t))
			if r == nil {
				t.Fatal(err)
			}
			if r.Windows != 3 || r.NoMetrics != "" || len(r.Errors) > 0 || !f.suspended || !f.revoked {
				t.Errorf("%d windows, %q, errors %v; suspended %v, revoked %v", r.Windows, r.NoMetrics, r.Errors, f.suspended, f.revoked)
			}
			if r.Flooded < 3 { // 600 requests a second are nothing, but the machine may be busier than that
				t.Skipf("only %d windows were offered more than the limit: %+v", r.Flooded, r.Figures)
			}
			if f.own && r.Offered < int64(r.Windows)*500 { // both nodes have to be offered their hundred, in each window
				t.Skipf("the machine offered only %d of %d", r.Offered, r.Windows*600)
			}
			switch {
			case f.own && (r.Over < 0.99 || r.Over > 1.01):
				t.Errorf("two budgets of 100: over by %s, want 100 %%", percent(r.Over))
			case !f.own && r.OverWorst != 0:
				t.Errorf("one budget of 100: over by %s", percent(r.OverWorst))
			}
			if judged := r.Kept != nil; judged && (*r.Kept == f.own || errors.Is(err, ErrNotKept) != f.own) {
				t.Errorf("%s, %v", r.Verdict, err)
			}
			var text, object bytes.Buffer
			if err := errors.Join(r.Write(&text), r.WriteJSON(&object)); err != nil {
				t.Fatal(err)
			}
			var again Report
			if err := json.Unmarshal(object.Bytes(), &again); err != nil || again.Figures != r.Figures {
				t.Errorf("%v: %s", err, &object)
			}
			for _, want := range []string{"100 per 1 s, fixed_window; load even, 6 times the limit, over 2 nodes", r.Verdict, "is suspended and its key revoked"} {
				if !strings.Contains(text.String(), want) {
					t.Errorf("%q is not in\n%s", want, &text)
				}
			}
		})
	}
}

func TestRunSaysWhatIsMissing(t *testing.T) {
	t.Parallel()
	o := (&fake{silent: true}).options(t)
	if _, err := Run(t.Context(), o); !errors.Is(err, ErrSilent) || !strings.Contains(err.Error(), "RATE_LIMIT_TELL_TIME=true") {
		t.Errorf("nodes that do not tell: %v", err)
	}
	apart := &fake{alone: true}
	if _, err := Run(t.Context(), apart.options(t)); !errors.Is(err, ErrApart) || !apart.suspended {
		t.Errorf("nodes that do not see each other: %v; the tenant is suspended: %v", err, apart.suspended)
	}
	for name, c := range map[string]struct {
		change func(*Options)
		want   string
	}{
		"no node":        {func(o *Options) { o.Nodes = nil }, "0 nodes"},
		"address":        {func(o *Options) { o.Nodes = []*hub.Client{{Base: "nowhere"}} }, "node 1: the address is not of the form"},
		"elsewhere":      {func(o *Options) { o.Nodes = append(o.Nodes, &hub.Client{Base: "http://192.0.2.1"}) }, "loopback"},
		"limit":          {func(o *Options) { o.Limit = 0 }, "limit 0: want 1"},
		"window":         {func(o *Options) { o.Scale = 10 * time.Millisecond }, "1s to 1m"},
		"algorithm":      {func(o *Options) { o.Algorithm = "leaky" }, "want fixed_window"},
		"burst":          {func(o *Options) { o.Burst = 5 }, "only a token_bucket has one"},
		"load":           {func(o *Options) { o.Load = "square" }, "there is no load"},
		"factor":         {func(o *Options) { o.Factor = 0 }, "factor 0"},
		"rate":           {func(o *Options) { o.Factor = 1e6 }, "requests a second"},
		"short":          {func(o *Options) { o.Duration = 3 * time.Second }, "at least 4 windows"},
		"short for cold": {func(o *Options) { o.Load = Cold }, "a cold flood comes in the last of every 6"},
		"callers":        {func(o *Options) { o.Callers = 0 }, "0 callers"},
	} {
		o := (&fake{}).options(t)
		c.change(&o)
		if _, err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want it to say %q", name, err, c.want)
		}
	}
}

// A run that is ended early tells what was measured, and cleans up.
func TestRunIsInterrupted(t *testing.T) {
	t.Parallel()
	f := &fake{}
	o := f.options(t)
	o.Duration, o.Every = time.Hour, 10*time.Millisecond
	ctx, cancel := context.WithCancel(t.Context())
	o.Progress = writerFunc(func(line string) {
		if strings.HasPrefix(line, "[") {
			cancel()
		}
	})
	r, err := Run(ctx, o)
	if err != nil || !r.Interrupted || r.Verdict != "not judged: interrupted" || !f.suspended {
		t.Errorf("%v, %+v; suspended %v", err, r, f.suspended)
	}
}

type writerFunc func(string)

func (f writerFunc) Write(b []byte) (int, error) {
	f(string(b))
	return len(b), nil
}
