package http

import (
	"encoding/json"
	"net/http"
	"net/url"
	"time"

	"github.com/google/uuid"

	"converger/internal/tenants"
)

// registerAuditRoutes: who changed what.
func (s *server) registerAuditRoutes() {
	s.operatorRoute(http.MethodGet, "/audit", bodyNone, s.listAudit)
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/audit", bodyNone, s.listTenantAudit)
}

type recordBody struct {
	ID           uuid.UUID       `json:"id"`
	TenantID     *uuid.UUID      `json:"tenant_id"`
	ActorType    string          `json:"actor_type"`
	ActorID      string          `json:"actor_id"`
	Action       string          `json:"action"`
	ResourceType string          `json:"resource_type"`
	ResourceID   string          `json:"resource_id"`
	Changes      json.RawMessage `json:"changes"`
	RequestID    *string         `json:"request_id"`
	InsertedAt   time.Time       `json:"inserted_at"`
}

func (s *server) listAudit(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	tenant, err := queryID(q, "tenant_id")
	if err != nil {
		return nil, err
	}
	return s.auditPage(c, q, tenant)
}

func (s *server) listTenantAudit(c *call) (*reply, error) {
	tenant, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	if _, err := s.Tenants.Get(c.ctx(), tenant); err != nil {
		return nil, err
	}
	return s.auditPage(c, q, &tenant)
}

// auditPage lists what was changed of a tenant, or everything for nil.
func (s *server) auditPage(c *call, q url.Values, tenant *tenants.ID) (*reply, error) {
	f := tenants.AuditFilter{
		ActorType: q.Get("actor_type"), ActorID: q.Get("actor_id"), Action: q.Get("action"),
		ResourceType: q.Get("resource_type"), ResourceID: q.Get("resource_id"),
	}
	var err error
	if f.From, err = queryTime(q, "from", 0); err != nil {
		return nil, err
	}
	if f.To, err = queryTime(q, "to", 24*time.Hour-time.Microsecond); err != nil {
		return nil, err
	}
	list := []string{"audit", ""}
	if tenant != nil {
		list[1] = tenant.String()
	}
	for _, name := range []string{"actor_type", "actor_id", "action", "resource_type", "resource_id", "from", "to"} {
		list = append(list, q.Get(name))
	}
	before, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	var found []tenants.Record
	var more bool
	if tenant != nil {
		found, more, err = s.Tenants.ListAudit(c.ctx(), *tenant, f, before, limit)
	} else {
		found, more, err = s.Tenants.ListAuditAllTenants(c.ctx(), f, before, limit)
	}
	if err != nil {
		return nil, err
	}
	bodies := make([]recordBody, len(found))
	for i, r := range found {
		bodies[i] = recordBody{
			ID: r.ID, TenantID: r.TenantID, ActorType: r.ActorType, ActorID: r.ActorID, Action: r.Action,
			ResourceType: r.ResourceType, ResourceID: r.ResourceID, Changes: r.Changes, RequestID: optional(r.RequestID), InsertedAt: r.InsertedAt,
		}
	}
	next := ""
	if more {
		next = s.cursors.encode(found[len(found)-1].ID, list...)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}
