package main

import (
	"net/http"
)

type tenantCmd struct {
	Create   tenantCreateCmd   `cmd:"" help:"Make a tenant."`
	List     tenantListCmd     `cmd:"" help:"List the tenants."`
	Show     tenantShowCmd     `cmd:"" help:"Show one."`
	Update   tenantUpdateCmd   `cmd:"" help:"Rename a tenant, or change how many of its deliveries may be under way."`
	Suspend  tenantSuspendCmd  `cmd:"" help:"Refuse whatever comes from a tenant or for it; its data stay."`
	Activate tenantActivateCmd `cmd:"" help:"Undo a suspension."`
}

// tenantArg names a tenant.
type tenantArg struct {
	Tenant string `arg:"" help:"Id or name of the tenant."`
}

var tenantColumns = []column{{"NAME", "name"}, {"ID", "id"}, {"STATUS", "status"}, {"MAX IN FLIGHT", "max_in_flight"}, {"LIMITS", "limits"}, {"CREATED", "inserted_at"}}

type tenantCreateCmd struct {
	managementFlags
	Name string `arg:"" help:"Name of the tenant."`
}

func (c tenantCreateCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	t, err := h.do(http.MethodPost, "/tenants", members{"name": c.Name})
	if err != nil {
		return err
	}
	return h.done(t, "Tenant %s (%s). Its first key: server keys create %[1]s NAME", cell(t, "id"), cell(t, "name"))
}

type tenantListCmd struct {
	managementFlags
	Limit int `help:"Most to show; 0: all." default:"50"`
}

func (c tenantListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	found, more, err := h.list("/tenants", nil, c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "No tenants yet. Make one: server tenant create NAME", tenantColumns...)
}

type tenantShowCmd struct {
	managementFlags
	tenantArg
}

func (c tenantShowCmd) Run(e *env) error {
	return c.changeTenant(e, c.Tenant, http.MethodGet, nil)
}

type tenantUpdateCmd struct {
	managementFlags
	tenantArg
	Name        *string `help:"New name." placeholder:"NAME"`
	MaxInFlight *int    `help:"Most deliveries of the tenant under way at once." placeholder:"N"`
}

func (c tenantUpdateCmd) Run(e *env) error {
	change := members{}
	if c.Name != nil {
		change["name"] = *c.Name
	}
	if c.MaxInFlight != nil {
		change["max_in_flight"] = *c.MaxInFlight
	}
	return c.changeTenant(e, c.Tenant, http.MethodPatch, change)
}

type tenantSuspendCmd struct {
	managementFlags
	tenantArg
}

func (c tenantSuspendCmd) Run(e *env) error {
	return c.changeTenant(e, c.Tenant, http.MethodPost, nil, "suspend")
}

type tenantActivateCmd struct {
	managementFlags
	tenantArg
}

func (c tenantActivateCmd) Run(e *env) error {
	return c.changeTenant(e, c.Tenant, http.MethodPost, nil, "activate")
}

// changeTenant asks for a tenant, or for a change of it, and shows it.
func (f managementFlags) changeTenant(e *env, tenant, method string, in any, below ...string) error {
	h, err := f.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(tenant, below...)
	if err != nil {
		return err
	}
	t, err := h.do(method, path, in)
	if err != nil {
		return err
	}
	return h.show(t, tenantColumns...)
}
