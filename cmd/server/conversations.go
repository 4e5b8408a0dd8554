package main

import (
	"net/http"
)

type conversationsCmd struct {
	List       conversationsListCmd       `cmd:"" help:"List a tenant's conversations, newest first."`
	Show       conversationsShowCmd       `cmd:"" help:"Show one."`
	Activities conversationsActivitiesCmd `cmd:"" help:"Show what was said in one, oldest first."`
	Close      conversationsCloseCmd      `cmd:"" help:"Close one: it takes no more activities."`
	Reopen     conversationsReopenCmd     `cmd:"" help:"Open a closed one again."`
}

type conversationsListCmd struct {
	managementFlags
	tenantArg
	Status     *string `help:"Only those that are active or closed." enum:"active,closed" placeholder:"STATUS"`
	Channel    *idArg  `help:"Only this channel's." placeholder:"ID"`
	ExternalID string  `help:"Only those with this person, by your id or the provider's." placeholder:"ID"`
	Limit      int     `help:"Most to show; 0: all." default:"50"`
}

func (c conversationsListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "conversations")
	if err != nil {
		return err
	}
	found, more, err := h.list(path, filter(map[string]string{"status": given(c.Status), "channel_id": given(c.Channel), "external_id": c.ExternalID}), c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "No conversations match.", column{"CREATED", "inserted_at"}, column{"STATUS", "status"}, column{"ID", "id"},
		column{"CHANNEL", "channel_id"}, column{"WITH", "participant.external_id"}, column{"NAME", "participant.display_name"}, column{"LAST", "updated_at"})
}

// conversationArgs name a conversation.
type conversationArgs struct {
	managementFlags
	tenantArg
	ID idArg `arg:"" help:"Id of the conversation, see conversations list."`
}

// show asks for the conversation, or for a change of it, and shows it.
func (a conversationArgs) show(e *env, method string, below ...string) error {
	h, err := a.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(a.Tenant, append([]string{"conversations", a.ID.String()}, below...)...)
	if err != nil {
		return err
	}
	o, err := h.do(method, path, nil)
	if err != nil {
		return err
	}
	return h.showJSON(o)
}

type conversationsShowCmd struct{ conversationArgs }

func (c conversationsShowCmd) Run(e *env) error { return c.show(e, http.MethodGet) }

type conversationsCloseCmd struct{ conversationArgs }

func (c conversationsCloseCmd) Run(e *env) error { return c.show(e, http.MethodPost, "close") }

type conversationsReopenCmd struct{ conversationArgs }

func (c conversationsReopenCmd) Run(e *env) error { return c.show(e, http.MethodPost, "reopen") }

type conversationsActivitiesCmd struct {
	conversationArgs
	Limit int `help:"Most to show; 0: all." default:"50"`
}

func (c conversationsActivitiesCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "conversations", c.ID.String(), "activities")
	if err != nil {
		return err
	}
	found, more, err := h.list(path, nil, c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "Nothing was said yet.", column{"SEQ", "seq"}, column{"WHEN", "inserted_at"}, column{"TYPE", "type"}, column{"SENDER", "sender"},
		column{"TEXT", "text"}, column{"ID", "id"})
}
