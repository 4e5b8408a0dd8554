package main

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
)

type inboundCmd struct {
	List   inboundListCmd   `cmd:"" help:"List received webhooks, newest first."`
	Show   inboundShowCmd   `cmd:"" help:"Show one with its body."`
	Replay inboundReplayCmd `cmd:"" help:"Process a rejected or failed one again."`
}

type inboundListCmd struct {
	managementFlags
	State   *string `help:"Only those that are received, processed, rejected or failed." enum:"received,processed,rejected,failed" placeholder:"STATE"`
	Tenant  string  `help:"Only this tenant's, by id or name." placeholder:"TENANT"`
	Channel *idArg  `help:"Only this channel's." placeholder:"ID"`
	Limit   int     `help:"Most to show; 0: all." default:"50"`
}

func (c inboundListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	q := filter(map[string]string{"state": given(c.State), "channel_id": given(c.Channel)})
	if c.Tenant != "" {
		id, err := h.tenantID(c.Tenant)
		if err != nil {
			return err
		}
		q.Set("tenant_id", id)
	}
	found, more, err := h.list("/inbound_events", q, c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "No events match.", column{"RECEIVED", "inserted_at"}, column{"STATE", "state"}, column{"ID", "id"},
		column{"TENANT", "tenant_id"}, column{"CHANNEL", "channel_id"}, column{"ENDPOINT", "endpoint"}, column{"ERROR", "error"})
}

// eventFlags name whose events they are; inbound list shows it.
type eventFlags struct {
	managementFlags
	Tenant string `help:"The event's tenant, by id or name; default is the demo's." placeholder:"TENANT"`
}

// path is where the management API keeps an event.
func (f eventFlags) path(h *hubClient, event idArg, below ...string) (string, error) {
	tenant := f.Tenant
	if tenant == "" {
		d, err := f.read()
		if err != nil {
			return "", err
		}
		if tenant = d.Tenant.ID; tenant == "" {
			return "", errors.New("whose event? Pass --tenant (inbound list shows it)")
		}
	}
	return h.tenantPath(tenant, append([]string{"inbound_events", event.String()}, below...)...)
}

type inboundShowCmd struct {
	eventFlags
	ID idArg `arg:"" help:"Id of the event."`
}

func (c inboundShowCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := c.path(h, c.ID)
	if err != nil {
		return err
	}
	event, err := h.get(path)
	if err != nil {
		return err
	}
	if c.JSON {
		return h.showJSON(event)
	}
	encoded, _ := event["body"].(string)
	body, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return fmt.Errorf("the hub's answer holds no readable body: %w", err)
	}
	delete(event, "body")
	if err := h.showJSON(event); err != nil {
		return err
	}
	fmt.Fprintf(e.stdout, "\n%s\n", printable(body))
	return nil
}

type inboundReplayCmd struct {
	eventFlags
	IDs []idArg `arg:"" name:"id" help:"Ids of the events."`
}

func (c inboundReplayCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	return each(c.IDs, func(id idArg) error {
		path, err := c.path(h, id, "replay")
		if err != nil {
			return err
		}
		event, err := h.do(http.MethodPost, path, nil)
		if err != nil {
			return err
		}
		return h.done(event, "%s is queued again.", id)
	})
}
