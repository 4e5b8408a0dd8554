package main

import (
	"fmt"
	"net/http"
	"strings"
)

type deliveriesCmd struct {
	List   deliveriesListCmd   `cmd:"" help:"List a tenant's deliveries, newest first."`
	Show   deliveriesShowCmd   `cmd:"" help:"Show one with its attempts."`
	Replay deliveriesReplayCmd `cmd:"" help:"Send failed ones again: those that are named, or all of a channel."`
}

type deliveriesListCmd struct {
	managementFlags
	tenantArg
	Status   *string `help:"Only those that are pending, paused, uncertain, sent, delivered, read or failed." enum:"pending,paused,uncertain,sent,delivered,read,failed" placeholder:"STATUS"`
	Channel  *idArg  `help:"Only this channel's." placeholder:"ID"`
	Activity *idArg  `help:"Only this activity's." placeholder:"ID"`
	From     string  `help:"Only changed from this time or day on." placeholder:"2026-11-30"`
	To       string  `help:"Only changed up to this time or day." placeholder:"2026-11-30T12:00:00Z"`
	Limit    int     `help:"Most to show; 0: all." default:"50"`
}

// Help shows an example.
func (deliveriesListCmd) Help() string {
	return `Example:

    server deliveries list acme --status failed --from 2026-11-30T10:02:00Z --to 2026-11-30T10:05:00Z`
}

func (c deliveriesListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "deliveries")
	if err != nil {
		return err
	}
	found, more, err := h.list(path, filter(map[string]string{"status": given(c.Status), "channel_id": given(c.Channel), "activity_id": given(c.Activity), "from": c.From, "to": c.To}), c.Limit)
	if err != nil {
		return err
	}
	return h.showList(found, more, "No deliveries match.", column{"CREATED", "inserted_at"}, column{"STATUS", "status"}, column{"ID", "id"},
		column{"CHANNEL", "channel_id"}, column{"ATTEMPTS", "attempts"}, column{"NEXT", "next_attempt_at"}, column{"REASON", "reason"}, column{"LAST ERROR", "last_error"})
}

type deliveriesShowCmd struct {
	managementFlags
	tenantArg
	ID idArg `arg:"" help:"Id of the delivery."`
}

func (c deliveriesShowCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "deliveries", c.ID.String())
	if err != nil {
		return err
	}
	d, err := h.do(http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	return h.showJSON(d)
}

type deliveriesReplayCmd struct {
	managementFlags
	tenantArg
	IDs     []idArg `arg:"" optional:"" name:"id" help:"Ids of failed deliveries."`
	Channel *idArg  `help:"All failed deliveries of this channel, instead of ids." placeholder:"ID"`
	From    string  `help:"Of a channel: only changed from this time or day on." placeholder:"2026-11-30"`
	To      string  `help:"Of a channel: only changed up to this time or day." placeholder:"2026-11-30T12:00:00Z"`
}

// Help shows examples.
func (deliveriesReplayCmd) Help() string {
	return `Examples:

    server deliveries replay acme 01a22bec-ac96-7d00-b66c-85ff5215fb3a
    server deliveries replay acme --channel 01a22bed-4fce-7919-9f38-f5f2e99b7618 --from 2026-11-30T10:02:00Z`
}

func (c deliveriesReplayCmd) Run(e *env) error {
	if (len(c.IDs) == 0) == (c.Channel == nil) {
		return misused("which deliveries? Pass their ids, or --channel ID for all failed ones of a channel")
	}
	if c.Channel == nil && c.From+c.To != "" {
		return misused("--from and --to choose from the deliveries of a --channel, and not from ids")
	}
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	tenant, err := h.tenantPath(c.Tenant)
	if err != nil {
		return err
	}
	if c.Channel != nil {
		return c.replayChannel(h, strings.TrimPrefix(tenant, "/tenants/"))
	}
	return each(c.IDs, func(id idArg) error {
		d, err := h.do(http.MethodPost, tenant+"/deliveries/"+id.String()+"/retry", nil)
		if err != nil {
			return err
		}
		return h.done(d, "%s is sent again.", id)
	})
}

// replayChannel goes on until the hub says that nothing is left: it takes a bounded number at a time.
func (c deliveriesReplayCmd) replayChannel(h *hubClient, tenant string) error {
	ch, err := h.get("/channels/" + c.Channel.String())
	if err != nil {
		return err
	}
	if owner := cell(ch, "tenant_id"); !strings.EqualFold(owner, tenant) {
		return misused(fmt.Sprintf("channel %s is of tenant %s, and not of %s", *c.Channel, owner, c.Tenant))
	}
	filter := members{}
	for name, v := range map[string]string{"from": c.From, "to": c.To} {
		if v != "" {
			filter[name] = v
		}
	}
	for more := true; more; {
		o, err := h.do(http.MethodPost, "/channels/"+c.Channel.String()+"/deliveries/retry", filter)
		if err != nil {
			return err
		}
		if err := h.done(o, "%s are sent again.", cell(o, "retried")); err != nil {
			return err
		}
		more = o["has_more"] == true
	}
	return nil
}
