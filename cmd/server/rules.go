package main

import (
	"net/http"
)

type rulesCmd struct {
	List   rulesListCmd   `cmd:"" help:"List a tenant's routing rules."`
	Show   rulesShowCmd   `cmd:"" help:"Show one."`
	Create rulesCreateCmd `cmd:"" help:"Copy the activities of a channel to others."`
	Update rulesUpdateCmd `cmd:"" help:"Change a rule, or switch it on or off."`
	Delete rulesDeleteCmd `cmd:"" help:"Delete a rule; what was copied already stays."`
}

var ruleColumns = []column{{"NAME", "name"}, {"ENABLED", "enabled"}, {"FROM", "source_channel_id"}, {"TO", "target_channel_ids"}, {"ID", "id"}, {"CHANGED", "updated_at"}}

type rulesListCmd struct {
	managementFlags
	tenantArg
}

func (c rulesListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "routing_rules")
	if err != nil {
		return err
	}
	found, err := h.whole(path)
	if err != nil {
		return err
	}
	return h.showList(found, false, "No rules yet. Make one: server rules create TENANT NAME FROM TO", ruleColumns...)
}

type rulesCreateCmd struct {
	managementFlags
	tenantArg
	Name     string  `arg:"" help:"Name of the rule."`
	From     idArg   `arg:"" help:"Id of the channel whose activities are copied, see channels list."`
	To       []idArg `arg:"" help:"Ids of the channels that get the copies, 20 at most."`
	Disabled bool    `help:"Make it switched off."`
}

// Help shows an example.
func (rulesCreateCmd) Help() string {
	return `A copy is not copied on, and rules that would make a circle are refused. Example:

    server rules create acme "to the archive" 01a22bed-4fce-7919-9f38-f5f2e99b7618 01a22bec-ac96-7d00-b66c-85ff5215fb3a`
}

func (c rulesCreateCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "routing_rules")
	if err != nil {
		return err
	}
	r, err := h.do(http.MethodPost, path, members{"name": c.Name, "source_channel_id": c.From, "target_channel_ids": c.To, "enabled": !c.Disabled})
	if err != nil {
		return err
	}
	return h.show(r, ruleColumns...)
}

// ruleArgs name a rule.
type ruleArgs struct {
	managementFlags
	tenantArg
	Rule idArg `arg:"" help:"Id of the rule, see rules list."`
}

// connect finds the hub, and where it keeps the rule.
func (a ruleArgs) connect(e *env) (h *hubClient, path string, err error) {
	if h, err = a.managementFlags.connect(e); err != nil {
		return nil, "", err
	}
	path, err = h.tenantPath(a.Tenant, "routing_rules", a.Rule.String())
	return h, path, err
}

// change asks for the rule, or for a change of it.
func (a ruleArgs) change(e *env, method string, in any) (*hubClient, members, error) {
	h, path, err := a.connect(e)
	if err != nil {
		return nil, nil, err
	}
	r, err := h.do(method, path, in)
	return h, r, err
}

type rulesShowCmd struct{ ruleArgs }

func (c rulesShowCmd) Run(e *env) error {
	h, r, err := c.change(e, http.MethodGet, nil)
	if err != nil {
		return err
	}
	return h.show(r, ruleColumns...)
}

type rulesUpdateCmd struct {
	ruleArgs
	guard
	Name    *string `help:"New name." placeholder:"NAME"`
	From    *idArg  `help:"Copy the activities of this channel." placeholder:"ID"`
	To      []idArg `help:"Copy to this channel, in place of those that the rule has; once for each." placeholder:"ID" sep:"none"`
	Enabled *bool   `help:"Switch it on, or off." negatable:""`
}

// Help shows an example.
func (rulesUpdateCmd) Help() string {
	return `What is not given stays. Example:

    server rules update acme 01a22bf1-9c52-7a61-8b8e-4d0d3c1f7e55 --no-enabled`
}

func (c rulesUpdateCmd) Run(e *env) error {
	change := members{}
	if c.Name != nil {
		change["name"] = *c.Name
	}
	if c.From != nil {
		change["source_channel_id"] = *c.From
	}
	if c.To != nil {
		change["target_channel_ids"] = c.To
	}
	if c.Enabled != nil {
		change["enabled"] = *c.Enabled
	}
	if len(change) == 0 {
		return errNoChange
	}
	h, r, err := c.change(e, http.MethodPatch, change)
	if err != nil {
		return err
	}
	return h.show(r, ruleColumns...)
}

type rulesDeleteCmd struct {
	ruleArgs
	guard
}

func (c rulesDeleteCmd) Run(e *env) error {
	h, path, err := c.connect(e)
	if err != nil {
		return err
	}
	if err := h.remove(path, nil); err != nil {
		return err
	}
	return h.done(nil, "Deleted %s.", c.Rule)
}
