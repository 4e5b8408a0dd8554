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

	UploadTypes uploadTypesCmd `cmd:"" help:"Show and set which types of files a tenant may upload."`
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
	guard
	Name        *string `help:"New name." placeholder:"NAME"`
	MaxInFlight *int    `help:"Most attempts to deliver of the tenant under way at one time, over all nodes. 400 for a new tenant." placeholder:"N"`
}

func (c tenantUpdateCmd) Run(e *env) error {
	change := members{}
	if c.Name != nil {
		change["name"] = *c.Name
	}
	if c.MaxInFlight != nil {
		change["max_in_flight"] = *c.MaxInFlight
	}
	if len(change) == 0 {
		return errNoChange
	}
	return c.changeTenant(e, c.Tenant, http.MethodPatch, change)
}

type tenantSuspendCmd struct {
	managementFlags
	tenantArg
	guard
}

func (c tenantSuspendCmd) Run(e *env) error {
	return c.changeTenant(e, c.Tenant, http.MethodPost, nil, "suspend")
}

type tenantActivateCmd struct {
	managementFlags
	tenantArg
	guard
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

type uploadTypesCmd struct {
	Show  uploadTypesShowCmd  `cmd:"" help:"Show the types that a tenant may upload."`
	Set   uploadTypesSetCmd   `cmd:"" help:"Give a tenant its own list, in place of the one it has."`
	Reset uploadTypesResetCmd `cmd:"" help:"Give a tenant the installation's list again."`
}

type uploadTypesShowCmd struct {
	managementFlags
	tenantArg
}

func (c uploadTypesShowCmd) Run(e *env) error {
	return c.changeUploadTypes(e, c.Tenant, http.MethodGet, nil)
}

type uploadTypesSetCmd struct {
	managementFlags
	tenantArg
	guard
	Types []string `arg:"" name:"type" help:"Media types, such as image/png; application/octet-stream stands for every type that the hub does not know."`
}

// Help shows an example.
func (uploadTypesSetCmd) Help() string {
	return `Example:

    server tenant upload-types set acme image/png image/jpeg application/pdf`
}

func (c uploadTypesSetCmd) Run(e *env) error {
	return c.changeUploadTypes(e, c.Tenant, http.MethodPut, members{"types": c.Types})
}

type uploadTypesResetCmd struct {
	managementFlags
	tenantArg
	guard
}

func (c uploadTypesResetCmd) Run(e *env) error {
	return c.changeUploadTypes(e, c.Tenant, http.MethodPut, members{"types": []string{}})
}

// changeUploadTypes asks for a tenant's types of uploads, or for a change of them, and shows them.
func (f managementFlags) changeUploadTypes(e *env, tenant, method string, in any) error {
	h, err := f.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(tenant, "upload_types")
	if err != nil {
		return err
	}
	o, err := h.do(method, path, in)
	if err != nil {
		return err
	}
	return h.show(o, column{"OWN", "types"}, column{"IN FORCE", "effective"})
}
