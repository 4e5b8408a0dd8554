package main

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"time"
)

type channelsCmd struct {
	Create       channelsCreateCmd `cmd:"" help:"Make a channel of a tenant and print its secret, once."`
	List         channelsListCmd   `cmd:"" help:"List a tenant's channels."`
	Show         channelsShowCmd   `cmd:"" help:"Show one with its config and the state of its deliveries."`
	Update       channelsUpdateCmd `cmd:"" help:"Change a channel's name, status, config or pace."`
	RotateSecret channelsSecretCmd `cmd:"" help:"Give a channel a new secret and print it, once; the old one is honoured for a while."`
	Pause        channelsPauseCmd  `cmd:"" help:"Hold a channel's deliveries until it is resumed."`
	Resume       channelsResumeCmd `cmd:"" help:"Let a channel's deliveries go on: after a pause, or at once where failures hold them (an open circuit)."`
	Delete       channelsDeleteCmd `cmd:"" help:"Delete a channel; its conversations stay readable."`
}

// channelSettings are what create and update have in common; nil or empty for what is not given.
type channelSettings struct {
	Mode             *string `help:"Direction of messages: inbound, outbound or duplex (both). A new channel does all that its type can." enum:"inbound,outbound,duplex" placeholder:"MODE"`
	Status           *string `help:"Whether it receives and sends: active or inactive. A new channel is active." enum:"active,inactive" placeholder:"STATUS"`
	Config           string  `help:"Settings of the type, as a JSON object." placeholder:"JSON" xor:"config"`
	ConfigFile       string  `help:"File with that JSON, for settings that are secret; /dev/stdin for standard input." type:"path" placeholder:"FILE" xor:"config"`
	RateLimit        *string `help:"Pace of its deliveries, such as 80/s, 600/m or 1000/h; none for no limit, as a new channel has it." placeholder:"PACE"`
	RetryPolicy      string  `help:"When failed attempts are repeated, as a JSON object, such as {\"max_attempts\":5,\"backoff\":\"fixed\",\"base_ms\":60000}; what it leaves out is the installation's." placeholder:"JSON"`
	MaxInFlight      *int    `help:"Most attempts to deliver under way at one time, over all nodes. 100 for a new channel." placeholder:"N"`
	Ordered          *bool   `help:"Keep the order of each conversation. A new channel does." negatable:""`
	RequireSignature *bool   `help:"Refuse webhooks that are not signed. A new channel does." negatable:""`
}

// body is the members that were given.
func (s channelSettings) body() (members, error) {
	b := members{}
	if s.Mode != nil {
		b["mode"] = *s.Mode
	}
	if s.Status != nil {
		b["status"] = *s.Status
	}
	if s.RateLimit != nil {
		b["rate_limit"] = *s.RateLimit
		if *s.RateLimit == "none" {
			b["rate_limit"] = nil
		}
	}
	if s.MaxInFlight != nil {
		b["max_in_flight"] = *s.MaxInFlight
	}
	if s.Ordered != nil {
		b["ordered"] = *s.Ordered
	}
	if s.RequireSignature != nil {
		b["require_signature"] = *s.RequireSignature
	}
	text := []byte(s.Config)
	if s.ConfigFile != "" {
		var err error
		if text, err = os.ReadFile(s.ConfigFile); err != nil {
			return nil, fmt.Errorf("config of the channel: %w", err)
		}
	}
	if err := setJSON(b, "config", text, `{"url":"https://example.com/hook"}`); err != nil {
		return nil, err
	}
	return b, setJSON(b, "retry_policy", []byte(s.RetryPolicy), `{"max_attempts":5}`)
}

// setJSON sets a member to a JSON object, if text is not empty.
func setJSON(b members, name string, text []byte, example string) error {
	var object members
	switch {
	case len(text) == 0:
		return nil
	case json.Unmarshal(text, &object) != nil || object == nil: // the error of Unmarshal might quote a secret
		return misused(fmt.Sprintf("the %s must be a JSON object, such as %s", name, example))
	}
	b[name] = json.RawMessage(text)
	return nil
}

type channelsCreateCmd struct {
	managementFlags
	tenantArg
	Type string `arg:"" help:"What is at the other end, such as webhook, whatsapp_meta, whatsapp_infobip or echo."`
	Name string `arg:"" help:"Name of the channel."`
	channelSettings
}

// Help shows an example.
func (channelsCreateCmd) Help() string {
	return `The secret alone goes to standard output, so that a script can keep it:

    SECRET=$(server channels create acme webhook app --config '{"url":"https://example.com/hook"}')`
}

func (c channelsCreateCmd) Run(e *env) error {
	in, err := c.body()
	if err != nil {
		return err
	}
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "channels")
	if err != nil {
		return err
	}
	in["name"], in["type"] = c.Name, c.Type
	ch, err := h.do(http.MethodPost, path, in)
	if err != nil {
		return err
	}
	return h.revealSecret(ch)
}

// revealSecret prints the secret that a channel has just got; where its provider calls goes to standard error.
func (h *hubClient) revealSecret(ch members) error {
	hook := ""
	if address := cell(ch, "callback_url"); address != "–" {
		hook = " Webhooks for it go to " + address + "."
	}
	return h.reveal(ch, "secret", "Channel %s (%s).%s Its secret follows.", cell(ch, "id"), cell(ch, "name"), hook)
}

type channelsListCmd struct {
	managementFlags
	tenantArg
}

func (c channelsListCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "channels")
	if err != nil {
		return err
	}
	found, err := h.whole(path)
	if err != nil {
		return err
	}
	return h.showList(found, false, "No channels yet. Make one: server channels create TENANT TYPE NAME", column{"NAME", "name"}, column{"TYPE", "type"},
		column{"MODE", "mode"}, column{"STATUS", "status"}, column{"PACE", "rate_limit"}, column{"ID", "id"}, column{"CREATED", "inserted_at"})
}

// channelArg names a channel.
type channelArg struct {
	managementFlags
	Channel idArg `arg:"" help:"Id of the channel, see channels list."`
}

// call asks for the channel or for what is below it, or for a change.
func (a channelArg) call(e *env, method, below string, in any) (*hubClient, members, error) {
	h, err := a.connect(e)
	if err != nil {
		return nil, nil, err
	}
	o, err := h.do(method, "/channels/"+a.Channel.String()+below, in)
	return h, o, err
}

type channelsShowCmd struct{ channelArg }

func (c channelsShowCmd) Run(e *env) error {
	h, ch, err := c.call(e, http.MethodGet, "", nil)
	if err != nil {
		return err
	}
	if ch["delivery"], err = h.get("/channels/" + c.Channel.String() + "/delivery"); err != nil {
		return err
	}
	return h.showJSON(ch)
}

type channelsUpdateCmd struct {
	channelArg
	guard
	Name *string `help:"New name." placeholder:"NAME"`
	channelSettings
}

// Help shows examples.
func (channelsUpdateCmd) Help() string {
	return `Members of the config that are left out stay. Examples:

    server channels update 01a22bed-4fce-7919-9f38-f5f2e99b7618 --status inactive
    server channels update 01a22bed-4fce-7919-9f38-f5f2e99b7618 --config '{"url":"https://example.com/new"}' --rate-limit 80/s`
}

func (c channelsUpdateCmd) Run(e *env) error {
	change, err := c.body()
	if err != nil {
		return err
	}
	if c.Name != nil {
		change["name"] = *c.Name
	}
	if len(change) == 0 {
		return errNoChange
	}
	h, ch, err := c.call(e, http.MethodPatch, "", change)
	if err != nil {
		return err
	}
	return h.showJSON(ch)
}

type channelsSecretCmd struct {
	channelArg
	guard
	Overlap time.Duration `help:"How long the old secret is honoured." default:"24h"`
}

func (c channelsSecretCmd) Run(e *env) error {
	h, ch, err := c.call(e, http.MethodPost, "/secret", members{"overlap_seconds": int64(c.Overlap.Seconds())})
	if err != nil {
		return err
	}
	return h.revealSecret(ch)
}

type channelsPauseCmd struct{ channelArg }

func (c channelsPauseCmd) Run(e *env) error {
	h, o, err := c.call(e, http.MethodPost, "/pause", nil)
	if err != nil {
		return err
	}
	return h.done(o, "%s is paused: its deliveries wait until it is resumed.", c.Channel)
}

type channelsResumeCmd struct{ channelArg }

func (c channelsResumeCmd) Run(e *env) error {
	h, o, err := c.call(e, http.MethodPost, "/resume", nil)
	if err != nil {
		return err
	}
	return h.done(o, "%s delivers again.", c.Channel)
}

type channelsDeleteCmd struct {
	channelArg
	guard
}

func (c channelsDeleteCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	if err := h.remove("/channels/"+c.Channel.String(), nil); err != nil {
		return err
	}
	return h.done(nil, "Deleted %s.", c.Channel)
}
