package http

import (
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/delivery"
	"converger/internal/fault"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerRoutingRoutes: where a tenant's channels copy their activities to. A channel's secret knows and makes the rules of
// its channel only. Rules are settings, with entity tags, on the tenant API too.
func (s *server) registerRoutingRoutes() {
	const list, one = "/api/v1/routing_rules", "/api/v1/routing_rules/{rule_id}"
	read := route{method: http.MethodGet, auth: credentialKeyOrSecret, scope: tenants.ScopeRead, bucket: ratelimit.APIRead}
	write := route{method: http.MethodPost, auth: credentialKeyOrSecret, scope: tenants.ScopeWrite, bucket: ratelimit.APIRead}

	s.register(write.at(list, s.createRoutingRule).takes(bodyJSON))
	s.register(read.at(list, s.listRoutingRules))
	s.register(read.at(one, s.getRoutingRule))
	s.register(write.by(http.MethodPatch).at(one, s.updateRoutingRule).takes(bodyJSON))
	s.register(write.by(http.MethodPut).at(one, s.updateRoutingRule).takes(bodyJSON)) // partial as well, as documented
	s.register(write.by(http.MethodDelete).at(one, s.deleteRoutingRule))
}

// registerOperatorRoutingRoutes: the same for operators.
func (s *server) registerOperatorRoutingRoutes() {
	const list, one = "/tenants/{tenant_id}/routing_rules", "/tenants/{tenant_id}/routing_rules/{rule_id}"
	s.operatorRoute(http.MethodPost, list, bodyJSON, s.forTenant(s.createRoutingRule))
	s.operatorRoute(http.MethodGet, list, bodyNone, s.forTenant(s.listRoutingRules))
	s.operatorRoute(http.MethodGet, one, bodyNone, s.forTenant(s.getRoutingRule))
	s.operatorRoute(http.MethodPatch, one, bodyJSON, s.forTenant(s.updateRoutingRule))
	s.operatorRoute(http.MethodDelete, one, bodyNone, s.forTenant(s.deleteRoutingRule))
}

type routingRuleBody struct {
	ID               uuid.UUID   `json:"id"`
	Name             string      `json:"name"`
	SourceChannelID  uuid.UUID   `json:"source_channel_id"`
	TargetChannelIDs []uuid.UUID `json:"target_channel_ids"`
	Enabled          bool        `json:"enabled"`
	TenantID         uuid.UUID   `json:"tenant_id"`
	InsertedAt       time.Time   `json:"inserted_at"`
	UpdatedAt        time.Time   `json:"updated_at"`
}

func routingRuleJSON(r delivery.RoutingRule) routingRuleBody {
	return routingRuleBody{
		ID: r.ID, Name: r.Name, SourceChannelID: r.SourceChannelID, TargetChannelIDs: r.TargetChannelIDs, Enabled: r.Enabled,
		TenantID: r.TenantID, InsertedAt: r.InsertedAt.UTC(), UpdatedAt: r.UpdatedAt.UTC(),
	}
}

// ruleMember is the member of a body of the tenant API that holds the rule. Beside it, and in it, unknown members are ignored:
// clients send back what they were shown. A body of the management API is the rule, and nothing else.
const ruleMember = "routing_rule"

// ruleFields reads the members of the body's rule.
func ruleFields(c *call) (*fields, error) {
	f, err := c.object()
	if err != nil || c.Operator != nil {
		return f, err
	}
	rule := f.sub(ruleMember)
	if !f.has(ruleMember) || f.err() != nil {
		return nil, newProblem(codeMalformedBody, "The body must hold the rule as an object in the member %q.", ruleMember)
	}
	return rule, nil
}

// ruleFaults is what is wrong with the members that were read.
func (c *call) ruleFaults(f *fields) error {
	if c.Operator != nil {
		f.refuseUnknown()
	}
	return f.err()
}

// inRule moves the pointers of refused fields to where the body has them.
func (f *fields) inRule(err error) error {
	var invalid *fault.Invalid
	if !errors.As(err, &invalid) {
		return err
	}
	moved := &fault.Invalid{}
	for _, field := range invalid.Fields {
		field.Pointer = f.prefix + field.Pointer
		moved.Fields = append(moved.Fields, field)
	}
	return moved
}

func (s *server) createRoutingRule(c *call) (*reply, error) {
	f, err := ruleFields(c)
	if err != nil {
		return nil, err
	}
	in := delivery.NewRoutingRule{Name: f.str("name"), TargetChannelIDs: f.ids("target_channel_ids"), Enabled: f.optBool("enabled")}
	if source := f.id("source_channel_id"); source != nil {
		in.SourceChannelID = *source
		f.ownSource(c, source)
	}
	if err := c.ruleFaults(f); err != nil {
		return nil, err
	}
	r, err := s.Rules.Create(c.ctx(), c.actor(), c.Tenant.ID, in)
	if err != nil {
		return nil, f.inRule(err)
	}
	s.changed(c)
	p, err := settingReply(c, http.StatusCreated, r.Version, routingRuleJSON(r))
	if err != nil {
		return nil, err
	}
	return p.with("Location", c.r.URL.EscapedPath()+"/"+r.ID.String()), nil
}

// listRoutingRules has no pages: a tenant has at most [delivery.MaxRules].
func (s *server) listRoutingRules(c *call) (*reply, error) {
	found, err := s.Rules.List(c.ctx(), c.Tenant.ID)
	if err != nil {
		return nil, err
	}
	bodies := make([]routingRuleBody, 0, len(found))
	for _, r := range found {
		if c.mayRoute(r.SourceChannelID) {
			bodies = append(bodies, routingRuleJSON(r))
		}
	}
	return dataReply(http.StatusOK, bodies)
}

// mayRoute tells whether the caller may know and change rules of a source channel.
func (c *call) mayRoute(source uuid.UUID) bool {
	own := c.ownChannel()
	return own == nil || *own == source
}

// ownSource notes a fault when the caller may not make rules for the source channel that it names.
func (f *fields) ownSource(c *call, source *uuid.UUID) {
	if source != nil && !c.mayRoute(*source) {
		f.fault("source_channel_id", fault.NotFound, "must be the channel whose secret was sent")
	}
}

// ownRule reads the rule in the path, if the caller may know of it.
func (s *server) ownRule(c *call) (delivery.RoutingRule, error) {
	id, err := c.pathID("rule_id")
	if err != nil {
		return delivery.RoutingRule{}, err
	}
	r, err := s.Rules.Get(c.ctx(), c.Tenant.ID, id)
	if err == nil && !c.mayRoute(r.SourceChannelID) {
		err = delivery.ErrRuleNotFound
	}
	return r, err
}

func (s *server) getRoutingRule(c *call) (*reply, error) {
	r, err := s.ownRule(c)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, r.Version, routingRuleJSON(r))
}

// updateRoutingRule changes the members that are given.
func (s *server) updateRoutingRule(c *call) (*reply, error) {
	before, err := s.ownRule(c)
	if err != nil {
		return nil, err
	}
	f, err := ruleFields(c)
	if err != nil {
		return nil, err
	}
	patch := delivery.RoutingRulePatch{Name: f.optStr("name"), SourceChannelID: f.id("source_channel_id"),
		TargetChannelIDs: f.ids("target_channel_ids"), Enabled: f.optBool("enabled")}
	f.ownSource(c, patch.SourceChannelID)
	f.refuseNull()
	if err := c.ruleFaults(f); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	r, err := s.Rules.Update(c.ctx(), c.actor(), c.Tenant.ID, before.ID, patch, expected...)
	if err != nil {
		return nil, f.inRule(err)
	}
	s.changed(c)
	return settingReply(c, http.StatusOK, r.Version, routingRuleJSON(r))
}

func (s *server) deleteRoutingRule(c *call) (*reply, error) {
	r, err := s.ownRule(c)
	if err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if err := s.Rules.Delete(c.ctx(), c.actor(), c.Tenant.ID, r.ID, expected...); err != nil {
		return nil, err
	}
	s.changed(c)
	return &reply{status: http.StatusNoContent}, nil
}
