package http

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"html"
	"math"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
	"converger/internal/ratelimit/overview"
	"converger/internal/tenants"
)

// well expects an answer of 200.
func well(t testing.TB, a answer) answer {
	t.Helper()
	a.is(t, 200, "")
	return a
}

// member reads a member of a decoded answer by its path.
func member(v any, path ...string) any {
	for _, p := range path {
		m, ok := v.(map[string]any)
		if !ok {
			return nil
		}
		v = m[p]
	}
	return v
}

// flood uses up the tenant's activities: a limit of 2 a day, and five requests.
func (f *front) flood(t *testing.T) {
	t.Helper()
	limitOverride(t, f, `{"limit":2,"scale_ms":86400000}`, "activity_create")
	c := f.newConversation(t)
	for range 5 {
		f.call(t, "POST", "/api/v1/conversations/"+c.ID.String()+"/activities", `{"text":"hello"}`, f.apiKey())
	}
}

func TestRateLimitsAtRest(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
	for _, b := range ratelimit.Buckets() {
		for _, of := range []string{"config", "decisions_per_second", "refused_total", "top_refused"} {
			if _, ok := a.get(t, "data", of).(map[string]any)[b.String()]; !ok {
				t.Errorf("%s has no %s", of, b)
			}
		}
		if top := a.get(t, "data", "top_refused", b.String()).([]any); len(top) != 0 {
			t.Errorf("%s: %v are refused", b, top)
		}
	}
	if a.get(t, "data", "enabled") != true || a.get(t, "data", "connections") != nil {
		t.Errorf("%s", a)
	}
	nodes := a.get(t, "data", "nodes").([]any)
	if len(nodes) != 1 || member(nodes[0], "name") != "a" || member(nodes[0], "standing") != "asked" || member(nodes[0], "version") != "test" {
		t.Errorf("nodes: %v", nodes)
	}
	store := member(nodes[0], "stores").([]any)[0]
	if member(store, "backend") != "local" || member(store, "max_keys").(float64) < 1e6/2 {
		t.Errorf("store: %v", store)
	}
	config := a.get(t, "data", "config", "login_account")
	if member(config, "limit") != 5.0 || member(config, "source") != "built_in" || member(config, "algorithm") != "sliding_window" || member(config, "backend") != "local" {
		t.Errorf("config: %v", config)
	}
	if a.get(t, "data", "config", "channel_outbound") != nil {
		t.Error("channel_outbound has a limit of its own accord")
	}
}

func TestConfigAsEnforced(t *testing.T) {
	t.Parallel()
	f := newFront(t, limits(`{"upload": "off", "api_read": {"limit": 7, "scale_ms": 2000, "mode": "count"}}`))
	a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
	if a.get(t, "data", "config", "upload") != nil {
		t.Error("a bucket that is off has a limit")
	}
	if l := f.call(t, "GET", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/limits/channel_outbound", "", f.ops()); l.get(t, "data", "mode") != "channel" {
		t.Errorf("what each channel sets: %s", l)
	}
	if c := a.get(t, "data", "config", "api_read"); member(c, "limit") != 7.0 || member(c, "scale_ms") != 2000.0 || member(c, "mode") != "count" || member(c, "source") != "operator" {
		t.Errorf("config: %v", c)
	}
}

func TestRefusalsAreShown(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.flood(t)
	a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
	tenant := f.tenant.ID.String()
	if got := fmt.Sprint(a.get(t, "data", "top_refused", "activity_create")); got != "[["+tenant+" 3]]" {
		t.Errorf("most refused: %s", got)
	}
	if got := a.get(t, "data", "refused_total", "activity_create"); got != 3.0 {
		t.Errorf("%v are refused", got)
	}
	if got := a.get(t, "data", "subjects", tenant, "tenant"); got != "Acme" {
		t.Errorf("the subject's name is %v", got)
	}
	recent := a.get(t, "data", "recent_refusals").([]any)
	if len(recent) != 1 || member(recent[0], "count") != 3.0 || member(recent[0], "subject") != tenant || member(recent[0], "limit") != 2.0 || member(recent[0], "retry_after_ms").(float64) < 1 {
		t.Errorf("recent: %v", recent)
	}
	if got := a.get(t, "data", "decisions_per_second", "activity_create", "refused").(float64); got <= 0 {
		t.Errorf("%v refused a second", got)
	}
}

// TestEveryRefusalHasAName drives every bucket of the route table to a refusal: each subject is shown by a name that finds
// its budget again, and none by a secret.
func TestEveryRefusalHasAName(t *testing.T) {
	t.Parallel()
	var all []string
	for _, b := range ratelimit.Buckets() {
		if b.Info().Default != (ratelimit.Rule{}) && b != ratelimit.Management && !b.Info().Guard {
			all = append(all, fmt.Sprintf(`%q: {"limit": 0, "scale_ms": 60000}`, b))
		}
	}
	f := newFront(t, limits("{"+strings.Join(all, ",")+"}"))
	admin := f.asAdmin(t, auth.RoleViewer)
	channel, tenant := f.webhook.ID.String(), f.tenant.ID.String()
	json := header("Content-Type", "application/json")
	for _, tt := range []struct {
		bucket, want string
		refuse       func()
	}{
		{"activity_create", tenant, func() {
			f.call(t, "POST", "/api/v1/conversations/"+uuid.NewString()+"/activities", `{"text":"x"}`, f.apiKey())
		}},
		{"api_read", tenant, func() { f.call(t, "GET", "/api/v1/conversations", "", f.apiKey()) }},
		{"inbound", channel + "/unproven", func() { f.call(t, "POST", "/api/v1/channels/"+channel+"/inbound", `{}`, json) }},
		{"token_generate", channel, func() {
			f.call(t, "POST", "/api/v1/converger/tokens/generate", `{}`, header("Authorization", "Bearer "+f.secretOf(t, channel).Reveal()))
		}},
		{"unknown_caller", "192.0.2.1", func() {
			f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", "cvg_live_"+strings.Repeat("a", 43)))
		}},
		{"login_ip", "192.0.2.1", func() {
			for range 6 {
				f.post(t, "/admin/login", url.Values{"email": {"nobody@example.com"}, "password": {"wrong"}})
			}
		}},
		{"web_page", "", func() { f.show(t, "/admin", admin) }},
	} {
		tt.refuse()
		a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
		top, _ := a.get(t, "data", "top_refused", tt.bucket).([]any)
		if len(top) != 1 {
			t.Errorf("%s: %v are refused, want one subject", tt.bucket, top)
			continue
		}
		subject := top[0].([]any)[0].(string)
		if tt.want != "" && subject != tt.want || strings.HasPrefix(subject, "key:") {
			t.Errorf("%s: %s is refused, want %s", tt.bucket, subject, tt.want)
		}
		usage := well(t, f.call(t, "GET", managementPrefix+"/rate_limits/usage?"+url.Values{"bucket": {tt.bucket}, "subject": {subject}}.Encode(), "", f.ops()))
		b, _ := ratelimit.ParseBucket(tt.bucket)
		if k, _, ok := f.Limiter.Find(b, subject); !ok || usage.get(t, "data", "key") != k.String() || usage.get(t, "data", "subject") != subject {
			t.Errorf("%s: looking %s up finds another budget: %s", tt.bucket, subject, usage)
		}
	}
}

func TestUsageAndReset(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.flood(t)
	for _, subject := range []string{f.tenant.ID.String(), "Acme", " acme "} {
		a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits/usage?"+url.Values{"bucket": {"activity_create"}, "subject": {subject}}.Encode(), "", f.ops()))
		if a.get(t, "data", "used") != 2.0 || a.get(t, "data", "limit") != 2.0 || a.get(t, "data", "remaining") != 0.0 || a.get(t, "data", "tenant") != "Acme" {
			t.Errorf("%q: %s", subject, a)
		}
		if node := a.get(t, "data", "nodes").([]any)[0]; member(node, "counted_here") != 2.0 || member(node, "wait_ms").(float64) < 1 {
			t.Errorf("%q: %v", subject, node)
		}
	}
	path := managementPrefix + "/rate_limits/usage?bucket=activity_create&subject=Acme"
	for range 2 { // again is as good
		if a := well(t, f.call(t, "DELETE", path, "", f.ops())); a.get(t, "data", "cleared") != true {
			t.Errorf("%s", a)
		}
	}
	if a := f.call(t, "GET", path, "", f.ops()); a.get(t, "data", "used") != 0.0 {
		t.Errorf("after the reset: %s", a)
	}
	var n int
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM audit_log WHERE action = 'reset' AND resource_type = 'rate_limit' AND tenant_id = $1 AND resource_id = $2`,
		f.tenant.ID, "activity_create "+f.tenant.ID.String()).Scan(&n); err != nil || n != 2 {
		t.Errorf("%d lines in the audit log, %v", n, err)
	}
}

func TestSubjectsAsOperatorsWriteThem(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	tenant, channel, id := f.tenant.ID.String(), f.webhook.ID.String(), uuid.NewString()
	for _, tt := range []struct {
		bucket, subject, want string
		status                int
	}{
		{"upload", tenant, tenant, 200},
		{"upload", strings.ToUpper(tenant), tenant, 200},
		{"upload", "Nobody", "", 404},
		{"upload", id, "", 404},
		{"inbound", channel, channel, 200},
		{"inbound", channel + "/unproven", channel + "/unproven", 200},
		{"inbound", id, "", 404},
		{"inbound", "site", "", 400},
		{"token_generate", channel + "/unproven", "", 400},
		{"channel_outbound", channel, channel, 200},
		{"api_read", "Acme", tenant, 200},
		{"api_read", channel + "/user:jane", channel + "/user:jane", 200},
		{"api_read", id + "/user:jane", "", 404},
		{"unknown_caller", "203.0.113.7", "203.0.113.7", 200},
		{"unknown_caller", "::ffff:203.0.113.7", "203.0.113.7", 200},
		{"unknown_caller", "2001:DB8:0:0:1::7", "2001:db8::/64", 200},
		{"unknown_caller", "2001:db8::/64", "2001:db8::/64", 200},
		{"unknown_caller", "203.0.113.7:49152", "203.0.113.7", 200},
		{"unknown_caller", "[2001:db8::1]:443", "2001:db8::/64", 200},
		{"unknown_caller", "[2001:db8::1]", "2001:db8::/64", 200},
		{"unknown_caller", "fe80::1%eth0", "fe80::/64", 200},
		{"unknown_caller", "203.0.113.7/32", "203.0.113.7", 200},
		{"unknown_caller", "[2001:db8::1", "", 400},
		{"unknown_caller", "203.0.113.7:", "", 400},
		{"unknown_caller", "2001:db8::/48", "", 400},
		{"unknown_caller", "203.0.113.0/24", "", 400},
		{"unknown_caller", "localhost", "", 400},
		{"login_account", "admin Jane@Example.com", "admin jane@example.com", 200},
		{"login_account", "Acme jane@example.com", "tenant " + tenant + " jane@example.com", 200},
		{"login_account", "tenant " + tenant + " jane@example.com", "tenant " + tenant + " jane@example.com", 200},
		{"login_account", "jane", "", 400},
		{"login_account", "admin jane@example.com on known device 1a2b3c4d", "", 404}, // not seen lately
		{"login_account", "Nobody jane@example.com", "", 404},
		{"login_account", id + " jane@example.com", "", 404},
		{"login_account", "tenant " + id + " jane@example.com", "", 404},
		{"login_account", "Ünbekannt\u202e jane@example.com", "", 404},
		{"web_page", strings.Repeat("ab", 32), strings.Repeat("ab", 8), 200},
		{"web_page", strings.Repeat("ab", 8), "", 404},
		{"web_page", "jane", "", 400},
		{"management", id, id, 200},
		{"management", "ops", "", 400},
		{"upload", "key:" + strings.Repeat("1", 32), "key:" + strings.Repeat("1", 32), 200},
		{"upload", "key:1", "", 404},
		{"upload", "key:" + strings.Repeat("0", 32), "", 404}, // no hasher makes it
		{"upload", "", "", 400},
		{"nothing", tenant, "", 400},
		{"", tenant, "", 400},
	} {
		for _, method := range []string{"GET", "DELETE"} {
			a := f.call(t, method, managementPrefix+"/rate_limits/usage?"+url.Values{"bucket": {tt.bucket}, "subject": {tt.subject}}.Encode(), "", f.ops())
			if a.StatusCode != tt.status || tt.status == 200 && a.get(t, "data", "subject") != tt.want {
				t.Errorf("%s %s %q: want %d %s, got %s", method, tt.bucket, tt.subject, tt.status, tt.want, a)
			}
		}
	}
	// The same budget as an address that is counted.
	a := f.call(t, "GET", managementPrefix+"/rate_limits/usage?bucket=unknown_caller&subject=2001:db8::9", "", f.ops())
	b := f.call(t, "GET", managementPrefix+"/rate_limits/usage?bucket=unknown_caller&subject=2001:db8:0:0:ffff::", "", f.ops())
	if a.get(t, "data", "key") != b.get(t, "data", "key") {
		t.Error("two addresses of one /64 have two budgets")
	}
}

func TestPreviewOfLimits(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.flood(t) // five requests, whatever came of them
	path := managementPrefix + "/tenants/" + f.tenant.ID.String() + "/limits/preview"
	a := well(t, f.call(t, "POST", path, `{"activity_create":{"limit":1,"scale_ms":3600000},"upload":{"limit":1,"scale_ms":1000}}`, f.ops()))
	list := a.get(t, "data").([]any)
	if len(list) != 2 {
		t.Fatalf("%s", a)
	}
	// Over an edge of the hour there are two windows.
	refused := member(list[0], "refused").(float64)
	if member(list[0], "demand") != 5.0 || refused != 4 && refused != 3 || member(list[0], "admitted").(float64)+refused != 5 || member(list[0], "peak_per_second").(float64) < 1 {
		t.Errorf("forecast: %v", list[0])
	}
	if s := member(list[0], "subjects").([]any); len(s) != 1 || member(s[0], "subject") != f.tenant.ID.String() {
		t.Errorf("subjects: %v", s)
	}
	if member(list[1], "demand") != 0.0 || member(list[1], "since") != nil {
		t.Errorf("of a bucket without demand: %v", list[1])
	}
	for body, pointer := range map[string]string{
		`{}`: "#",
		`{"upload":{"limit":-1,"scale_ms":1000}}`:  "#/upload/limit",
		`{"web_page":{"limit":1,"scale_ms":1000}}`: "#/web_page",
		`{"nothing":1}`: "#/nothing",
		`{"channel_outbound":{"limit":1,"scale_ms":1000}}`: "#/channel_outbound",
	} {
		if a := f.call(t, "POST", path, body, f.ops()); a.StatusCode != 422 || !strings.Contains(a.String(), `"pointer":"`+pointer+`"`) {
			t.Errorf("%s: want a fault of %s, got %s", body, pointer, a)
		}
	}
	if a := f.call(t, "POST", path, `{"channel_outbound":{"limit":1,"scale_ms":1000}}`, f.ops()); !strings.Contains(a.String(), "is set at each channel, as its rate_limit") {
		t.Errorf("of a limit that channels have: %s", a)
	}
	f.call(t, "POST", managementPrefix+"/tenants/"+uuid.NewString()+"/limits/preview", `{"upload":{"limit":1,"scale_ms":1000}}`, f.ops()).is(t, 404, codeNotFound)
}

// besides is a node's place in a cluster of two.
type besides struct{ other *overview.Overview }

func (besides) ID() cluster.ID { return 1 }
func (besides) View() *cluster.View {
	return &cluster.View{Alive: 2, Visible: 2, Peers: []cluster.Peer{{ID: 2, Name: "b", Version: "test", Standing: cluster.Visible, Connected: true}}}
}
func (n besides) Call(ctx context.Context, _ cluster.ID, _ cluster.Topic, request []byte) ([]byte, error) {
	return n.other.Handler().Answer(ctx, 1, request)
}

// TestDemandOfABucket: who asks how much, on two nodes together, and of one subject when.
func TestDemandOfABucket(t *testing.T) {
	t.Parallel()
	var second *ratelimit.Limiter
	f := newFront(t, func(d *Deps) {
		second = must(ratelimit.New(ratelimit.Config{Store: must(local.New(local.Config{})), Clock: ratelimit.ClockFrom(d.Limiter.Now)}))
		b := overview.New(overview.Config{Limiter: second, Policy: NewPolicyOf(second, d.Directory), Name: "b", Version: "test"})
		d.Overview = overview.New(overview.Config{Limiter: d.Limiter, Policy: NewPolicyOf(d.Limiter, d.Directory), Name: "a", Version: "test", Network: besides{b}})
	})
	other := must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Other"}))
	f.flood(t) // five requests, whatever came of them
	f.refresh(t)
	ask := func(times int, name ratelimit.Name, key ratelimit.Key) {
		for range times {
			if d := second.Check(t.Context(), second.Now(), ratelimit.Item{Key: key, Policy: second.Policy(ratelimit.ActivityCreate, nil, nil)}); d.Unnamed {
				second.Name(ratelimit.ActivityCreate, key, name)
			}
		}
	}
	tenant, gone := f.tenant.ID, uuid.New()
	ask(7, ratelimit.Name{Tenant: tenant, Text: tenant.String()}, f.Hasher.Tenant(ratelimit.ActivityCreate, tenant))
	ask(3, ratelimit.Name{Tenant: gone, Text: gone.String()}, f.Hasher.Tenant(ratelimit.ActivityCreate, gone)) // of a tenant that is no more
	path := func(query ...string) string {
		q := url.Values{}
		for i := 0; i < len(query); i += 2 {
			q.Set(query[i], query[i+1])
		}
		return managementPrefix + "/rate_limits/demand?" + q.Encode()
	}
	get := func(query ...string) (answer, []any) {
		t.Helper()
		a := well(t, f.call(t, "GET", path(append([]string{"bucket", "activity_create"}, query...)...), "", f.ops()))
		if nodes := a.get(t, "data", "nodes").([]any); a.get(t, "data", "complete") != true || a.get(t, "data", "detail") != nil || len(nodes) != 2 || member(nodes[1], "name") != "b" {
			t.Errorf("%v: nodes of %s", query, a)
		}
		return a, a.get(t, "data", "subjects").([]any)
	}

	a, all := get()
	if len(all) != 2 || a.get(t, "data", "subject") != nil || a.get(t, "data", "tenant_id") != nil {
		t.Fatalf("%s", a)
	}
	busiest := all[0]
	if member(busiest, "subject") != tenant.String() || member(busiest, "tenant") != "Acme" || member(busiest, "tenant_id") != tenant.String() || member(busiest, "total") != 12.0 ||
		member(busiest, "sampled") != 1.0 || member(busiest, "series") != nil {
		t.Errorf("the busiest: %v", busiest)
	}
	if member(all[1], "subject") != gone.String() || member(all[1], "tenant") != nil || member(all[1], "total") != 3.0 {
		t.Errorf("the next: %v", all[1])
	}
	if _, own := get("tenant_id", tenant.String()); len(own) != 1 || member(own[0], "subject") != tenant.String() || member(own[0], "series") != nil {
		t.Errorf("of the tenant: %v", own)
	}
	if a, none := get("tenant_id", other.ID.String()); len(none) != 0 || a.get(t, "data", "tenant_id") != other.ID.String() {
		t.Errorf("of a tenant that asked for nothing: %s", a)
	}
	if a, none := get("subject", other.ID.String()); len(none) != 0 || a.get(t, "data", "subject") != other.ID.String() {
		t.Errorf("of a subject that asked for nothing: %s", a)
	}

	a, one := get("subject", " acme ", "tenant_id", tenant.String())
	if len(one) != 1 || a.get(t, "data", "subject") != tenant.String() || member(one[0], "total") != 12.0 {
		t.Fatalf("%s", a)
	}
	when := func(v any) time.Time {
		t.Helper()
		return must(time.Parse(time.RFC3339, v.(string)))
	}
	start, since, peak := when(member(one[0], "series", "start")), when(member(one[0], "since")), when(member(one[0], "peak_at"))
	seconds := member(one[0], "series", "per_second").([]any)
	if end := start.Add(time.Duration(len(seconds)) * time.Second); len(seconds) <= ratelimit.DemandSeconds-60 || len(seconds) > ratelimit.DemandSeconds || end.Before(since) ||
		when(a.get(t, "data", "at")).Truncate(time.Second).Add(time.Second) != end {
		t.Errorf("%d seconds from %s, %s", len(seconds), start, a.get(t, "data", "at"))
	}
	sum, lastMinute := 0.0, 0.0
	for i, n := range seconds {
		at := start.Add(time.Duration(i) * time.Second)
		if (n == nil) != at.Before(since) {
			t.Errorf("at %s, before or after %s: %v", at, since, n)
		}
		n, _ := n.(float64)
		if sum += n; n > member(one[0], "peak_per_second").(float64) || at.Equal(peak) && n != member(one[0], "peak_per_second") {
			t.Errorf("at %s %v, and the peak %v at %s", at, n, member(one[0], "peak_per_second"), peak)
		}
	}
	for _, n := range seconds[len(seconds)-60:] {
		n, _ := n.(float64)
		lastMinute += n
	}
	if got := member(one[0], "last_minute_per_second").(float64); sum != 12 || math.Abs(got-lastMinute/60) > 0.005 {
		t.Errorf("the seconds have %v in all and %v in the last minute, told as %v a second", sum, lastMinute, got)
	}

	// A bucket that no tenant's limit may name: it counts these very questions.
	token := well(t, f.call(t, "GET", path("bucket", "management"), "", f.ops()))
	if list := token.get(t, "data", "subjects").([]any); len(list) != 1 || member(list[0], "total").(float64) < 6 || member(list[0], "tenant_id") != nil {
		t.Errorf("%s", token)
	}

	for _, tt := range []struct {
		status int
		code   code
		query  []string
	}{
		{400, codeInvalidParameter, nil},
		{400, codeInvalidParameter, []string{"bucket", "coffee"}},
		{400, codeInvalidParameter, []string{"bucket", "upload", "tenant_id", "Acme"}},
		{400, codeInvalidParameter, []string{"bucket", "unknown_caller", "subject", "localhost"}},
		{404, codeNotFound, []string{"bucket", "upload", "tenant_id", gone.String()}},
		{404, codeNotFound, []string{"bucket", "upload", "subject", "Nobody"}},
		{404, codeNotFound, []string{"bucket", "upload", "subject", "Acme", "tenant_id", other.ID.String()}},
		{404, codeNotFound, []string{"bucket", "unknown_caller", "subject", "192.0.2.1", "tenant_id", tenant.String()}},
	} {
		f.call(t, "GET", path(tt.query...), "", f.ops()).is(t, tt.status, tt.code)
	}
	f.call(t, "GET", path("bucket", "upload"), "").is(t, 401, "")
}

// TestReadingLimitsCostsNoQuery: an operator can look while the database does not answer.
func TestReadingLimitsCostsNoQuery(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
	before := f.queries.Count()
	well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
	well(t, f.call(t, "GET", managementPrefix+"/rate_limits/usage?bucket=upload&subject=Acme", "", f.ops()))
	well(t, f.call(t, "GET", managementPrefix+"/rate_limits/demand?bucket=upload&subject=Acme", "", f.ops()))
	well(t, f.call(t, "POST", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/limits/preview", `{"upload":{"limit":1,"scale_ms":1000}}`, f.ops()))
	if n := f.queries.Count() - before; n != 0 {
		t.Errorf("%d queries", n)
	}
}

// inTrouble is a node's place in a cluster of which others are missing.
type inTrouble struct{ view cluster.View }

func (inTrouble) ID() cluster.ID        { return 1 }
func (n inTrouble) View() *cluster.View { return &n.view }
func (inTrouble) Call(_ context.Context, to cluster.ID, _ cluster.Topic, _ []byte) ([]byte, error) {
	if to == 2 {
		return nil, context.DeadlineExceeded
	}
	return nil, fmt.Errorf("%w: secret stack of calls", cluster.ErrRefused)
}

// awayStore counts in memory, and says that it counts somewhere that can't be asked.
type awayStore struct {
	*local.Store
	backend ratelimit.Backend
	nodes   int
	err     error
}

func (s *awayStore) Backend(ratelimit.Bucket) string { return string(s.backend) }
func (s *awayStore) States(ratelimit.Instant) []ratelimit.StoreState {
	return []ratelimit.StoreState{{Backend: string(s.backend), Nodes: s.nodes, FallingBack: s.err != nil, Keys: 70, MaxKeys: 70, Overflowing: true}}
}
func (s *awayStore) Peek(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	if s.err != nil {
		return ratelimit.Usage{}, s.err
	}
	return s.Store.Peek(ctx, now, it)
}
func (s *awayStore) Reset(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	return errors.Join(s.Store.Reset(ctx, now, it), s.err)
}

// troubled is a front whose limits have the trouble.
func troubled(t *testing.T, store *awayStore, view *cluster.View) *front {
	store.Store = must(local.New(local.Config{}))
	return newFront(t, func(d *Deps) {
		d.Limiter = must(ratelimit.New(ratelimit.Config{Store: store}))
		c := overview.Config{Limiter: d.Limiter, Policy: NewPolicyOf(d.Limiter, d.Directory), Name: "a", Version: "test", Logger: d.Logger}
		if view != nil {
			c.Network = inTrouble{*view}
		}
		d.Overview = overview.New(c)
	})
}

// A reset is whole without the dead: they take it in before what they have counted counts again, unless that is nobody
// else's.
func TestResetWithoutTheDead(t *testing.T) {
	t.Parallel()
	for backend, cleared := range map[ratelimit.Backend]bool{ratelimit.BackendCluster: true, ratelimit.BackendOwner: true, ratelimit.BackendRedis: true, ratelimit.BackendLocal: false} {
		t.Run(string(backend), func(t *testing.T) {
			t.Parallel()
			f := troubled(t, &awayStore{backend: backend}, &cluster.View{Dead: []cluster.Dead{{ID: 4, Name: "d", Silent: time.Minute}}})
			a := well(t, f.call(t, "DELETE", managementPrefix+"/rate_limits/usage?bucket=activity_create&subject=Acme", "", f.ops()))
			nodes := a.get(t, "data", "nodes").([]any)
			if detail := a.get(t, "data", "detail"); a.get(t, "data", "cleared") != cleared || (detail == nil) != cleared || len(nodes) != 2 || member(nodes[1], "error") == nil {
				t.Errorf("without a dead node: %s", a)
			}
		})
	}
}

// What can't be known is said to be unknown, a part is said to be one, and what to do next is said where an operator looks: in
// the API and on the page. Causes are for the log.
func TestRateLimitsInTrouble(t *testing.T) {
	t.Parallel()
	chain := errors.New("ratelimit/redis: look: dial tcp: secret stack of calls")
	gone := &cluster.View{
		Peers: []cluster.Peer{{ID: 2, Name: "b", Version: "2", Standing: cluster.Split, Heard: time.Minute}, {ID: 3, Name: "c", Version: "old", Standing: cluster.Visible, Heard: time.Second}},
		Dead:  []cluster.Dead{{ID: 4, Name: "d", Version: "3", Silent: 3 * time.Minute}},
	}
	const nextTime = "When all nodes answer again, look it up, and reset it again if need be."
	const alone = "One more node counts at the same Redis. It is no cluster with the node that was asked (CLUSTER_PEERS), and can't be asked from there."
	for name, tt := range map[string]struct {
		store   awayStore
		view    *cluster.View
		remarks []string
		used    any
		unknown string // of the look-up
		cleared bool
		reset   string
		page    []string
		notice  string
	}{
		"nodes are missing": {
			awayStore{backend: ratelimit.BackendCluster}, gone,
			[]string{"The node b did not answer within 1 s. What it has seen is missing here.", "The node d is dead or hangs (silent since "},
			2.0, "The node b did not answer within 1 s. The node c answered with an error, which the log of the node that was asked has. The node d is dead or hangs (silent since ",
			false, "Reset is what was counted on a. Not on b: it did not answer within ",
			[]string{"<strong>1 of 4 nodes</strong> together", "<strong>2</strong>, 0 left, as far as the nodes tell", "<td>dead<span class=\"sub error\">is dead or hangs", "<td>3 min ago</td>", "unknown"}, "names those that did not",
		},
		"Redis is away": {
			awayStore{backend: ratelimit.BackendRedis, err: chain}, nil,
			[]string{"On a the backend redis can't be asked", "RATE_LIMIT_MAX_KEYS (70 keys)"},
			nil, "How much is used is unknown while Redis can't be asked. Until then each node goes by its share of the limit; what it has used of that is what it has counted itself.",
			false, "Reset is what was counted on a. The count at Redis, which is one for all nodes, stands: Redis can't be asked. Reset it again when it answers.",
			[]string{"<strong>unknown</strong>", "does not know: it can&#39;t ask Redis", `<td class="number">2</td>`}, "The count at Redis stands",
		},
		"nodes are known by Redis only": {
			awayStore{backend: ratelimit.BackendRedis, nodes: 2}, nil, []string{alone + " What it has seen is missing here."},
			2.0, "", true, "", []string{"<strong>2</strong>, 0 left"}, "The counter is reset on every node.",
		},
		"nodes are known by Redis only, and count for themselves": {
			awayStore{backend: ratelimit.BackendLocal, nodes: 2}, nil, []string{alone + " What it has seen is missing here."},
			2.0, alone + " What it has counted is not in these numbers.", false, "Reset is what was counted on a. " + alone + " Reset it there too.",
			[]string{"<strong>2</strong>, 0 left, as far as the nodes tell"}, "reset it there too",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := troubled(t, &tt.store, tt.view)
			f.flood(t)
			usage := managementPrefix + "/rate_limits/usage?bucket=activity_create&subject=Acme"
			clean := func(what, text string) {
				t.Helper()
				if strings.Contains(text, "secret stack") {
					t.Errorf("%s tells the cause: %s", what, text)
				}
			}

			a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
			clean("the picture", a.String())
			remarks := fmt.Sprint(a.get(t, "data", "remarks"))
			for _, want := range tt.remarks {
				if !strings.Contains(remarks, want) {
					t.Errorf("remarks: want %s in %s", want, remarks)
				}
			}
			if whole := tt.view == nil && tt.store.nodes < 2; a.get(t, "data", "complete") != whole {
				t.Errorf("complete: %s", a)
			}
			if got := a.get(t, "data", "nodes_elsewhere"); got != float64(max(tt.store.nodes-1, 0)) {
				t.Errorf("%v nodes elsewhere", got)
			}
			if tt.view != nil {
				nodes := a.get(t, "data", "nodes").([]any)
				d := nodes[len(nodes)-1]
				if at, err := time.Parse(time.RFC3339, fmt.Sprint(member(d, "last_heard_at"))); err != nil || member(d, "standing") != "dead" || member(d, "name") != "d" ||
					time.Since(at) < 3*time.Minute || member(nodes[0], "last_heard_at") != nil || member(nodes[1], "standing") != "split" {
					t.Errorf("nodes: %v", nodes)
				}
			}

			a = well(t, f.call(t, "GET", usage, "", f.ops()))
			clean("the look-up", a.String())
			detail, _ := a.get(t, "data", "detail").(string)
			if a.get(t, "data", "used") != tt.used || !strings.HasPrefix(detail, tt.unknown) || (detail == "") != (tt.unknown == "") || a.get(t, "data", "complete") != (tt.unknown == "") {
				t.Errorf("used: %s", a)
			}
			for _, n := range a.get(t, "data", "nodes").([]any) {
				if failed := member(n, "error") != nil; failed != (member(n, "used") == nil) || failed != (member(n, "remaining") == nil) {
					t.Errorf("node: %v", n)
				}
			}

			a = well(t, f.call(t, "GET", managementPrefix+"/rate_limits/demand?bucket=activity_create&subject=Acme", "", f.ops()))
			clean("the demand", a.String())
			detail, _ = a.get(t, "data", "detail").(string)
			begins, ends := "", "" // Redis does not know it in any case
			switch {
			case tt.view != nil:
				begins, ends = "The node b did not answer within 1 s. The node c answered", "What they have been asked is not in these numbers."
			case tt.store.nodes > 1:
				begins, ends = alone, "What it has been asked is not in these numbers."
			}
			if !strings.HasPrefix(detail, begins) || !strings.HasSuffix(detail, ends) || a.get(t, "data", "complete") != (detail == "") || (detail == "") != (begins == "") ||
				member(a.get(t, "data", "subjects").([]any)[0], "total") != 5.0 {
				t.Errorf("demand: %s", a)
			}

			admin := f.asAdmin(t, auth.RoleAdmin)
			form := url.Values{"bucket": {"activity_create"}, "subject": {f.tenant.ID.String()}}
			page := f.show(t, rateLimitsPath+"?"+form.Encode(), admin)
			clean("the page", string(page.body))
			page.has(t, tt.page...)
			for _, want := range tt.remarks {
				page.has(t, html.EscapeString(want))
			}
			if tt.view != nil {
				f.show(t, rateLimitsPath+"?only=upload", admin).has(t, "As far as 1 of 4 nodes tell, nothing has been refused since ", "As far as 1 of 4 nodes tell, nothing has been refused in this bucket")
			}
			done := f.post(t, rateLimitsPath+"/reset", form, admin)
			f.show(t, rateLimitsPath, admin, f.withCookie(areaAdmin, noticeCookie, f.cookieOf(done, areaAdmin, noticeCookie).Value)).has(t, tt.notice)

			a = well(t, f.call(t, "DELETE", usage, "", f.ops()))
			clean("the reset", a.String())
			detail, _ = a.get(t, "data", "detail").(string)
			if a.get(t, "data", "cleared") != tt.cleared || !strings.HasPrefix(detail, tt.reset) || tt.view != nil && !strings.HasSuffix(detail, nextTime) {
				t.Errorf("reset: %s", a)
			}
		})
	}
}

func TestRateLimitPage(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin, viewer := f.asAdmin(t, auth.RoleAdmin), f.asAdmin(t, auth.RoleViewer)
	page := f.show(t, rateLimitsPath, viewer)
	page.is(t, 200, "")
	page.has(t, `href="/admin/rate_limits" aria-current="page"`, "Nothing has been refused", "<code>channel_outbound</code>", "100 per second", "every 5 s")
	if page.Header.Get("Refresh") != "" {
		t.Error("the page loads itself again unasked")
	}

	f.flood(t)
	f.show(t, rateLimitsPath, viewer).has(t, "Acme", f.tenant.ID.String(), `<td class="number">3</td>`)
	f.show(t, rateLimitsPath+"?only=upload", viewer).lacks(t, "Acme")
	f.show(t, rateLimitsPath+"?only=nothing", viewer).has(t, "Acme")

	look := rateLimitsPath + "?" + url.Values{"bucket": {"activity_create"}, "subject": {"Acme"}}.Encode()
	a := f.show(t, look, admin)
	a.has(t, "2 per day", "<strong>2</strong>, 0 left", "Yes, reset it")
	f.show(t, look, viewer).lacks(t, "Yes, reset it")
	for subject, says := range map[string]string{"Nobody": "There is no tenant", "": "must be the id or the name of a tenant", "<i>": "There is no tenant"} {
		a := f.show(t, rateLimitsPath+"?"+url.Values{"bucket": {"activity_create"}, "subject": {subject}}.Encode(), viewer)
		if a.StatusCode != 404 && a.StatusCode != 400 {
			t.Errorf("%q: %d", subject, a.StatusCode)
		}
		a.has(t, says, `id="subject-error"`, "<title>Error: ")
		a.lacks(t, "<i>")
	}
	f.show(t, rateLimitsPath+"?bucket=nothing&subject=Acme", viewer).has(t, `id="bucket-error"`)

	reset := url.Values{"bucket": {"activity_create"}, "subject": {f.tenant.ID.String()}}
	f.post(t, rateLimitsPath+"/reset", reset, viewer).is(t, 403, "")
	done := f.post(t, rateLimitsPath+"/reset", reset, admin)
	done.leads(t, rateLimitsPath+"?"+reset.Encode())
	f.show(t, rateLimitsPath+"?"+reset.Encode(), admin, f.withCookie(areaAdmin, noticeCookie, f.cookieOf(done, areaAdmin, noticeCookie).Value)).
		has(t, "The counter is reset on every node.", "<strong>0</strong>, 2 left")
	f.post(t, rateLimitsPath+"/reset", url.Values{"bucket": {"upload"}, "subject": {"Nobody"}}, admin).is(t, 404, "")
}

func TestLiveViewEnds(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin := f.asAdmin(t, auth.RoleViewer)
	with := func(every string, until time.Time) string {
		return rateLimitsPath + "?" + url.Values{"every": {every}, "until": {strconv.FormatInt(until.Unix(), 10)}, "only": {"upload"}}.Encode()
	}
	on := f.show(t, with("5", time.Now().Add(30*time.Minute)), admin)
	if on.Header.Get("Refresh") != "5" {
		t.Errorf("Refresh: %q", on.Header.Get("Refresh"))
	}
	on.has(t, `<a class="button plain small" href="/admin/rate_limits?only=upload">Pause</a>`, `aria-current="true">every 5 s`)
	for _, path := range []string{with("5", time.Now().Add(-time.Second)), with("5", time.Now().Add(48*time.Hour)), with("1", time.Now().Add(time.Minute)), rateLimitsPath + "?every=5"} {
		if a := f.show(t, path, admin); a.Header.Get("Refresh") != "" {
			t.Errorf("%s loads itself again", path)
		}
	}
	f.show(t, with("5", time.Now().Add(-time.Second)), admin).has(t, "The live view has ended by itself")
}

func TestTryALimitOnItsPage(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin := f.asAdmin(t, auth.RoleAdmin)
	form := url.Values{"limit": {"1"}, "scale_ms": {"24"}, "unit": {"h"}, "algorithm": {"fixed_window"}, "action": {"try"}}
	one := "/admin/tenants/" + f.tenant.ID.String() + "/limits/"
	f.post(t, one+"activity_create", form, admin).has(t, "Not saved yet.", "there is nothing to try the limit against")
	f.flood(t)
	f.post(t, one+"activity_create", form, admin).has(t, "Not saved yet.", "Of 5 activities since", "The busiest second had")
	if own := must(f.Tenants.Get(t.Context(), f.tenant.ID)).Limits; strings.Contains(string(own), `"limit": 1,`) {
		t.Errorf("trying saved %s", own)
	}
}

// TestRefusedOperatorsAreAudited: an operator token that is refused leaves a record, without a query on the way of the answer.
func TestRefusedOperatorsAreAudited(t *testing.T) {
	t.Parallel()
	var refusals *auth.Refusals
	f := newFront(t, func(d *Deps) {
		refusals = must(auth.NewRefusals(d.Tenants, nil, d.Logger))
		d.Refusals = refusals
	})
	token, text, err := f.Tenants.CreateOperatorToken(t.Context(), testActor, tenants.NewOperatorToken{Name: "old"})
	if err != nil {
		t.Fatal(err)
	}
	must(f.Tenants.RevokeOperatorToken(t.Context(), testActor, token.ID, time.Now(), false))
	f.refresh(t)
	hash := must(tenants.ParseOperatorToken(text.Reveal()))
	before := f.queries.Count()
	f.call(t, "GET", managementPrefix+"/tenants", "", bearer(text.Reveal()), header("X-Request-Id", "req_refused")).is(t, 401, "")
	f.call(t, "GET", managementPrefix+"/tenants", "", bearer("cvg_op_nonsense")).is(t, 401, "")
	if n := f.queries.Count() - before; n > 1 { // the directory's early poll, for a token that may be new
		t.Errorf("%d queries for refused requests", n)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if err := refusals.Run(ctx); err != nil { // writes what waits
		t.Fatal(err)
	}
	var changes string
	if err := f.pool.QueryRow(t.Context(), `SELECT resource_id || ' ' || request_id || ' ' || changes FROM audit_log WHERE action = 'refused'`).Scan(&changes); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{hex.EncodeToString(hash[:8]) + " req_refused ", "unknown", "192.0.2.1"} {
		if !strings.Contains(changes, want) {
			t.Errorf("the record lacks %s: %s", want, changes)
		}
	}
}
