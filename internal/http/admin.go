package http

import (
	"errors"
	"net/http"
	"net/url"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerAdminRoutes: the pages of operators.
func (s *server) registerAdminRoutes() {
	s.registerSignInRoutes(areaAdmin, credentialAdmin)
	s.adminPage(http.MethodGet, "", s.showAdmin)
	s.registerAdminTenantRoutes()
	s.registerAdminLimitRoutes()
	s.registerAdminRateLimitRoutes()
}

// adminPage adds a row: everybody signed in may look, and change needs the right to write.
func (s *server) adminPage(method, pattern string, handle func(*call) (*reply, error)) {
	rt := route{method: method, area: areaAdmin, auth: credentialAdmin, bucket: ratelimit.WebPage}
	if method != http.MethodGet {
		rt.right, rt.body = auth.RightWrite, bodyFields
	}
	s.register(rt.at(areaAdmin.home()+pattern, handle))
}

// adminView is the first page of administration.
type adminView struct {
	Ready   readyBody
	Limited bool
}

func (s *server) showAdmin(c *call) (*reply, error) {
	return s.page(c, http.StatusOK, "admin.html", view{Title: "Overview", Main: adminView{s.readiness(c.started), s.Limiter.Enabled()}})
}

// registerAdminTenantRoutes: find, make, suspend.
func (s *server) registerAdminTenantRoutes() {
	s.adminPage(http.MethodGet, "/tenants", s.showTenants)
	s.adminPage(http.MethodPost, "/tenants", s.addTenant)
	s.adminPage(http.MethodGet, "/tenants/{tenant_id}", s.showTenant)
	s.adminPage(http.MethodPost, "/tenants/{tenant_id}/suspend", s.suspendOnPage)
	s.adminPage(http.MethodPost, "/tenants/{tenant_id}/activate", s.activateOnPage)
}

// tenantsView is the list of tenants with the form for another.
type tenantsView struct {
	Search      string
	Tenants     []tenants.Tenant
	First, Next string    // addresses of pages, "" for none
	Form        *pageForm // nil for those who may not
}

// tenantForm carries the id of the tenant that it makes: sent twice by an impatient hand, it makes one.
func tenantForm(id string) *pageForm {
	return newForm(
		&formField{Name: "name", Label: "Name", Autocomplete: "off", Required: true,
			Hint: "Its people type it when they sign in. Up to 200 characters, unique without regard to case."},
		&formField{Name: "id", Type: "hidden", Value: id},
	)
}

func (s *server) tenantsPage(c *call, status int, f *pageForm) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	v := tenantsView{Search: q.Get("q")}
	if c.may(auth.RightWrite) {
		v.Form = f
	}
	after, err := s.cursors.decode(q.Get("cursor"), "tenants by name", v.Search)
	if err != nil {
		return nil, err
	}
	if v.Tenants, err = s.Tenants.SearchAllTenants(c.ctx(), v.Search, after, defaultPage+1); err != nil {
		return nil, err
	}
	address := func(cursor string) string {
		q := url.Values{}
		if v.Search != "" {
			q.Set("q", v.Search)
		}
		if cursor != "" {
			q.Set("cursor", cursor)
		}
		if len(q) == 0 {
			return "/admin/tenants"
		}
		return "/admin/tenants?" + q.Encode()
	}
	if after != uuid.Nil {
		v.First = address("")
	}
	if len(v.Tenants) > defaultPage {
		v.Tenants = v.Tenants[:defaultPage]
		v.Next = address(s.cursors.encode(v.Tenants[defaultPage-1].ID, "tenants by name", v.Search))
	}
	return s.page(c, status, "admin-tenants.html", view{Title: "Tenants", Failed: f.failed(), Main: v})
}

func (s *server) showTenants(c *call) (*reply, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}
	return s.tenantsPage(c, http.StatusOK, tenantForm(id.String()))
}

func (s *server) addTenant(c *call) (*reply, error) {
	values, err := c.formValues()
	if err != nil {
		return nil, err
	}
	f := tenantForm("")
	f.fill(values)
	id, err := parseID(values.Get("id"))
	if err != nil {
		if id, err = uuid.NewV7(); err != nil {
			return nil, err
		}
		f.Get("id").Value = id.String()
	}
	t, err := s.Tenants.Create(c.ctx(), c.actor(), tenants.NewTenant{ID: id, Name: values.Get("name")})
	if errors.Is(err, tenants.ErrNameTaken) {
		f.fault("name", "Another tenant has this name.")
	}
	if f.take(err) || f.failed() {
		return s.tenantsPage(c, http.StatusUnprocessableEntity, f.focus(""))
	}
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return s.done(c, "tenant_created", "/admin/tenants/"+t.ID.String()), nil
}

type tenantView struct {
	Tenant tenants.Tenant
	Write  bool
}

func (s *server) showTenant(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.Get(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	return s.page(c, http.StatusOK, "admin-tenant.html", view{Title: t.Name, Main: tenantView{t, c.may(auth.RightWrite)}})
}

func (s *server) suspendOnPage(c *call) (*reply, error) {
	return s.setStatusOnPage(c, tenants.StatusSuspended, "tenant_suspended")
}

func (s *server) activateOnPage(c *call) (*reply, error) {
	return s.setStatusOnPage(c, tenants.StatusActive, "tenant_activated")
}

func (s *server) setStatusOnPage(c *call, status tenants.Status, notice string) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	if _, err := s.Tenants.SetStatus(c.ctx(), c.actor(), id, status); err != nil {
		return nil, err
	}
	s.changed(c)
	return s.done(c, notice, "/admin/tenants/"+id.String()), nil
}
