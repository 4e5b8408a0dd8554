package main

import (
	"encoding/json"
	"net/url"
	"strings"
	"testing"

	"converger/migrations/pgtest"
)

// A hub whose limits are switched off says so where an operator looks, limits nobody, and still guards its logins.
// (That every page of the administration says so is a test of package http.)
func TestLimitsOff(t *testing.T) {
	t.Parallel()
	database := pgtest.New(t)
	p := serve(t, database, map[string]string{
		"RATE_LIMIT_ENABLED": "false", "BCRYPT_COST": "10", "METRICS_ALLOWED_IPS": "127.0.0.1",
		"RATE_LIMITS": `{"management":{"limit":1,"scale_ms":86400000},"unknown_caller":{"limit":1,"scale_ms":86400000},"login_account":{"limit":2,"scale_ms":86400000},"login_ip":{"limit":2,"scale_ms":86400000}}`,
	})
	if line, _ := p.log.find("rate limiting is switched off"); !strings.Contains(line, `"level":"WARN"`) || !strings.Contains(line, "RATE_LIMIT_ENABLED=false") {
		t.Errorf("the log says %q", line)
	}
	a := newAPI(t, p.base)
	var ready struct {
		Status   string
		Degraded []string
	}
	got := a.call(t, 200, "GET", "/health/ready", "")
	if err := json.Unmarshal(got.body, &ready); err != nil || ready.Status != "ready" || !strings.Contains(strings.Join(ready.Degraded, "\n"), "RATE_LIMIT_ENABLED=false") {
		t.Errorf("readiness: %v %s", err, got)
	}
	if v := a.metric(t, "converger_rate_limit_enabled"); v != "0" {
		t.Errorf("converger_rate_limit_enabled is %s", v)
	}
	ops := management(t, p, database)
	for range 3 {
		eventually(t, patience, "the token to be known", func() bool {
			a, err := ops.try(t.Context(), "GET", "/api/v1/management/tenants", "")
			return err == nil && a.status == 200
		})
		a.with("Authorization", "Bearer nobody").call(t, 401, "GET", "/api/v1/management/tenants", "")
	}
	form := "email=" + url.QueryEscape("nobody@example.com") + "&password=guess"
	for _, want := range []int{401, 401, 429} {
		a.with("Content-Type", formType).call(t, want, "POST", "/admin/login", form)
	}
}
