package http

import (
	"encoding/json"
	"net/http"

	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerLimitRoutes: a tenant's limits, bucket by bucket.
func (s *server) registerLimitRoutes() {
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/limits", bodyNone, s.listLimits)
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/limits/{bucket}", bodyNone, s.getLimit)
	s.operatorRoute(http.MethodPut, "/tenants/{tenant_id}/limits/{bucket}", bodyJSON, s.putLimit)
	s.operatorRoute(http.MethodDelete, "/tenants/{tenant_id}/limits/{bucket}", bodyNone, s.deleteLimit)
}

// limitBody is one bucket as it stands for a tenant. A null rule is no limit, or no override.
type limitBody struct {
	Bucket      string          `json:"bucket"`
	Overridable bool            `json:"overridable"`
	Default     *ratelimit.Rule `json:"default"` // of the installation
	Override    *ratelimit.Rule `json:"override"`
	Effective   *ratelimit.Rule `json:"effective"` // as this node enforces it
	Mode        string          `json:"mode"`      // enforce; count: what is over the limit is counted and goes on; channel: each has its own; off: no limit
}

func (s *server) limitJSON(t *tenants.TenantEntry, b ratelimit.Bucket) limitBody {
	overrides := overridesOf(t)
	effective := s.Limiter.Policy(b, overrides, nil)
	mode := "enforce"
	switch {
	case b == ratelimit.ChannelOutbound && s.Limiter.Enabled():
		mode = "channel"
	case effective == nil || !s.Limiter.Enabled() && !b.Info().Guard:
		mode = "off"
	case effective.CountOnly():
		mode = "count"
	}
	return limitBody{
		Bucket: b.String(), Overridable: b.Info().TenantOverride,
		Default: ruleOf(s.Limiter.Policy(b, nil, nil)), Override: ruleOf(overrides.Policy(b)),
		Effective: ruleOf(effective), Mode: mode,
	}
}

func ruleOf(p *ratelimit.Policy) *ratelimit.Rule {
	if p == nil {
		return nil
	}
	r := p.Rule()
	return &r
}

// enforcedTenant is the tenant of the path as this node has it in memory: what is shown is what is enforced.
func (s *server) enforcedTenant(c *call) (*tenants.TenantEntry, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	t, ok := s.Directory.Tenant(id)
	if !ok && s.Directory.Miss(c.ctx()) {
		t, ok = s.Directory.Tenant(id)
	}
	if !ok {
		return nil, tenants.ErrNotFound
	}
	return t, nil
}

func (s *server) listLimits(c *call) (*reply, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, err
	}
	var bodies []limitBody
	for _, b := range ratelimit.Buckets() {
		bodies = append(bodies, s.limitJSON(t, b))
	}
	return settingReply(c, http.StatusOK, t.Version, bodies)
}

// limitOf finds the tenant and the bucket of the path.
func (s *server) limitOf(c *call) (*tenants.TenantEntry, ratelimit.Bucket, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, 0, err
	}
	b, ok := ratelimit.ParseBucket(c.param("bucket"))
	if !ok {
		return nil, 0, newProblem(codeNotFound, "There is no bucket of this name; the list of the tenant's limits has all.")
	}
	return t, b, nil
}

func (s *server) getLimit(c *call) (*reply, error) {
	t, b, err := s.limitOf(c)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, t.Version, s.limitJSON(t, b))
}

func (s *server) putLimit(c *call) (*reply, error) {
	t, b, err := s.limitOf(c)
	if err != nil {
		return nil, err
	}
	if _, err := c.object(); err != nil {
		return nil, err
	}
	rule, err := ratelimit.ParseOverride(b, c.body)
	if err != nil {
		return nil, err
	}
	canonical, err := json.Marshal(rule)
	if err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if err := s.Tenants.SetLimit(c.ctx(), c.actor(), t.ID, b.String(), canonical, expected...); err != nil {
		return nil, err
	}
	return s.limitNow(c, t.ID, b)
}

// deleteLimit restores the default. Removing what is not there changes nothing and is no error, unless it can never be there.
func (s *server) deleteLimit(c *call) (*reply, error) {
	t, b, err := s.limitOf(c)
	if err != nil {
		return nil, err
	}
	if !b.Info().TenantOverride {
		return nil, ratelimit.ErrNoOverride
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if err := s.Tenants.DeleteLimit(c.ctx(), c.actor(), t.ID, b.String(), expected...); err != nil {
		return nil, err
	}
	return s.limitNow(c, t.ID, b)
}

// limitNow answers with the limit that is in force after a change.
func (s *server) limitNow(c *call, tenant tenants.ID, b ratelimit.Bucket) (*reply, error) {
	s.changed(c)
	t, ok := s.Directory.Tenant(tenant)
	if !ok {
		return nil, tenants.ErrNotFound
	}
	return settingReply(c, http.StatusOK, t.Version, s.limitJSON(t, b))
}
