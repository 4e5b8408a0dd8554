package http

import (
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/tenants"
)

// registerTenantRoutes: suspended and activated, never deleted: their messages stay.
func (s *server) registerTenantRoutes() {
	s.operatorRoute(http.MethodPost, "/tenants", bodyJSON, s.createTenant)
	s.operatorRoute(http.MethodGet, "/tenants", bodyNone, s.listTenants)
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}", bodyNone, s.getTenant)
	s.operatorRoute(http.MethodPatch, "/tenants/{tenant_id}", bodyJSON, s.updateTenant)
	s.operatorRoute(http.MethodPost, "/tenants/{tenant_id}/suspend", bodyNone, s.suspendTenant)
	s.operatorRoute(http.MethodPost, "/tenants/{tenant_id}/activate", bodyNone, s.activateTenant)
}

type tenantBody struct {
	ID          uuid.UUID       `json:"id"`
	Name        string          `json:"name"`
	Status      tenants.Status  `json:"status"`
	Limits      json.RawMessage `json:"limits"`
	MaxInFlight int             `json:"max_in_flight"`
	InsertedAt  time.Time       `json:"inserted_at"`
	UpdatedAt   time.Time       `json:"updated_at"`
}

func tenantJSON(t tenants.Tenant) tenantBody {
	return tenantBody{t.ID, t.Name, t.Status, orObject(t.Limits), t.MaxInFlight, t.InsertedAt.UTC(), t.UpdatedAt.UTC()}
}

func (s *server) createTenant(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("name")
	in := tenants.NewTenant{Name: f.str("name")}
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	t, err := s.Tenants.Create(c.ctx(), c.actor(), in)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return settingReply(c, http.StatusCreated, t.Version, tenantJSON(t))
}

// listTenants lists all, or the one that has a name.
func (s *server) listTenants(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	if name := q.Get("name"); name != "" {
		return s.tenantNamed(c, name)
	}
	after, err := s.cursors.decode(q.Get("cursor"), "tenants")
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, err := s.Tenants.ListAllTenants(c.ctx(), after, limit+1)
	if err != nil {
		return nil, err
	}
	next := ""
	if len(found) > limit {
		found = found[:limit]
		next = s.cursors.encode(found[limit-1].ID, "tenants")
	}
	bodies := make([]tenantBody, len(found))
	for i, t := range found {
		bodies[i] = tenantJSON(t)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

func (s *server) tenantNamed(c *call, name string) (*reply, error) {
	found := []tenantBody{}
	switch t, err := s.Tenants.ByName(c.ctx(), name); {
	case err == nil:
		found = append(found, tenantJSON(t))
	case !errors.Is(err, tenants.ErrNotFound):
		return nil, err
	}
	return pageReply(c.r.URL, found, defaultPage, "")
}

func (s *server) getTenant(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.Get(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, t.Version, tenantJSON(t))
}

// updateTenant changes the members that are given.
func (s *server) updateTenant(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	patch := tenants.TenantPatch{Name: f.optStr("name"), MaxInFlight: f.optInt("max_in_flight")}
	f.refuseNull()
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.Update(c.ctx(), c.actor(), id, patch, expected...)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return settingReply(c, http.StatusOK, t.Version, tenantJSON(t))
}

func (s *server) suspendTenant(c *call) (*reply, error) {
	return s.setStatus(c, tenants.StatusSuspended)
}

func (s *server) activateTenant(c *call) (*reply, error) { return s.setStatus(c, tenants.StatusActive) }

func (s *server) setStatus(c *call, status tenants.Status) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.SetStatus(c.ctx(), c.actor(), id, status, expected...)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return settingReply(c, http.StatusOK, t.Version, tenantJSON(t))
}
