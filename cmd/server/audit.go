package main

type auditCmd struct {
	managementFlags
	Tenant       string `help:"Only changes of this tenant, by id or name." placeholder:"TENANT"`
	ActorType    string `help:"Only by this kind of caller: operator, admin, tenant_api, channel, tenant_user or system." placeholder:"TYPE"`
	Actor        string `help:"Only by this caller, such as the id of a token." placeholder:"ID"`
	Action       string `help:"Only this action, such as create, update, revoke." placeholder:"WORD"`
	ResourceType string `help:"Only things of this type, such as channel." placeholder:"TYPE"`
	Resource     string `help:"Only the thing with this id." placeholder:"ID"`
	From         string `help:"Only from this time or day on." placeholder:"2026-11-30"`
	To           string `help:"Only up to this time or day." placeholder:"2026-11-30T12:00:00Z"`
	Limit        int    `help:"Most to show; 0: all." default:"50"`
}

// Help shows examples.
func (auditCmd) Help() string {
	return `Examples:

    server audit --tenant acme --from 2026-11-30
    server audit --resource-type operator_token --action revoke --json`
}

func (c auditCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path := "/audit"
	if c.Tenant != "" {
		if path, err = h.tenantPath(c.Tenant, "audit"); err != nil {
			return err
		}
	}
	found, more, err := h.list(path, filter(map[string]string{"actor_type": c.ActorType, "actor_id": c.Actor, "action": c.Action,
		"resource_type": c.ResourceType, "resource_id": c.Resource, "from": c.From, "to": c.To}), c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "Nothing was changed that matches.", column{"WHEN", "inserted_at"}, column{"BY", "actor_type"}, column{"WHO", "actor_id"},
		column{"ACTION", "action"}, column{"WHAT", "resource_type"}, column{"ID", "resource_id"}, column{"BEFORE", "changes.before"}, column{"AFTER", "changes.after"})
}
