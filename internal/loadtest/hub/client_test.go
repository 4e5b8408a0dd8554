package hub

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func newClient(t *testing.T, handler http.HandlerFunc) *Client {
	t.Helper()
	s := httptest.NewServer(handler)
	t.Cleanup(s.Close)
	return &Client{Base: s.URL, Token: "cvg_op_x", HTTP: s.Client()}
}

func TestNewTenantChannelAndConversations(t *testing.T) {
	t.Parallel()
	answers := map[string]string{
		"/api/v1/management/tenants":              `{"data":{"id":"t1"}}`,
		"/api/v1/management/tenants/t1/keys":      `{"data":{"id":"k1","api_key":"cvg_live_x"}}`,
		"/api/v1/management/tenants/t1/channels":  `{"data":{"id":"c1","secret":"whsec_x"}}`,
		"/api/v1/conversations":                   `{"data":{"id":"v1"}}`,
		"/api/v1/management/tenants/t1/unrelated": `{}`,
	}
	c := newClient(t, func(w http.ResponseWriter, r *http.Request) {
		want := [2]string{"Authorization", "Bearer cvg_op_x"}
		if r.URL.Path == "/api/v1/conversations" {
			want = [2]string{"X-Api-Key", "cvg_live_x"}
		}
		var body map[string]any
		if r.Header.Get(want[0]) != want[1] || r.Header.Get("Content-Type") != "application/json" || json.NewDecoder(r.Body).Decode(&body) != nil {
			t.Errorf("%s: %v %v", r.URL, r.Header, body)
		}
		w.WriteHeader(http.StatusCreated)
		fmt.Fprint(w, answers[r.URL.Path])
	})
	tenant, err := c.NewTenant(t.Context(), "x")
	if diff := cmp.Diff(&Tenant{ID: "t1", APIKey: "cvg_live_x", KeyID: "k1"}, tenant); err != nil || diff != "" {
		t.Fatalf("%v\n%s", err, diff)
	}
	channel, err := c.NewChannel(t.Context(), tenant, "x", "duplex", "http://127.0.0.1:1/")
	if diff := cmp.Diff(&Channel{ID: "c1", Secret: "whsec_x"}, channel); err != nil || diff != "" {
		t.Fatalf("%v\n%s", err, diff)
	}
	ids, err := c.NewConversations(t.Context(), tenant, channel.ID, 3)
	if diff := cmp.Diff([]string{"v1", "v1", "v1"}, ids); err != nil || diff != "" {
		t.Fatalf("%v\n%s", err, diff)
	}
}

func TestMetrics(t *testing.T) {
	t.Parallel()
	text := "# HELP a_total x\n# TYPE a_total counter\na_total 1.25\nb{c=\"d e\",le=\"+Inf\"} 4.5e+07\nnothing_known NaN\n"
	c := newClient(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, text)
	})
	got, err := c.Metrics(t.Context(), "secret")
	want := map[string]float64{"a_total": 1.25, `b{c="d e",le="+Inf"}`: 4.5e7, "nothing_known": math.NaN()}
	if diff := cmp.Diff(want, got, cmpopts.EquateNaNs()); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := c.Metrics(t.Context(), ""); !errors.Is(err, errNoMetrics) {
		t.Errorf("without the token: %v", err)
	}
	for _, bad := range []string{"nothing\n", "a_total many\n", "<p>Welcome to the proxy\n"} {
		if got, err := parseMetrics(strings.NewReader(bad)); err == nil {
			t.Errorf("%q: %v", bad, got)
		}
	}
}

func TestCallComesBackWhenItIsTold(t *testing.T) {
	t.Parallel()
	calls := 0
	c := newClient(t, func(w http.ResponseWriter, _ *http.Request) {
		switch calls++; calls {
		case 1:
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusTooManyRequests)
		case 2:
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusServiceUnavailable)
		case 3:
			fmt.Fprint(w, `{}`)
		default:
			http.Error(w, "no such thing", http.StatusNotFound)
		}
	})
	if err := c.Operate(t.Context(), "GET", "/tenants", nil, nil); err != nil || calls != 3 {
		t.Errorf("%d calls, %v", calls, err)
	}
	err := c.Operate(t.Context(), "GET", "/tenants", nil, nil)
	if refused, ok := errors.AsType[*StatusError](err); !ok || refused.Status != http.StatusNotFound || calls != 4 {
		t.Errorf("a refusal for good: %d calls, %v", calls, err)
	}
}

func TestDeal(t *testing.T) {
	t.Parallel()
	items := []string{"a1", "a2", "b1", "b2", "c1", "c2"}
	Deal(items, 2)
	if diff := cmp.Diff([]string{"a1", "b1", "c1", "a2", "b2", "c2"}, items); diff != "" {
		t.Error(diff)
	}
	Deal[string](nil, 0)
}

func TestUntil(t *testing.T) {
	t.Parallel()
	n := 0
	if err := Until(t.Context(), time.Minute, func() (bool, error) { n++; return n == 3, nil }); err != nil || n != 3 {
		t.Errorf("%d times, %v", n, err)
	}
	failed := errors.New("failed")
	if err := Until(t.Context(), time.Minute, func() (bool, error) { return false, failed }); !errors.Is(err, failed) {
		t.Error(err)
	}
	if err := Until(t.Context(), time.Millisecond, func() (bool, error) { return false, nil }); !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}
