package main

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"converger/internal/simulate"
)

type simulateCmd struct {
	WhatsApp simulateWhatsAppCmd `cmd:"" name:"whatsapp" help:"Post signed WhatsApp Cloud API webhooks: by default one batch with two texts, an image and a status."`
	Webhook  simulateWebhookCmd  `cmd:"" help:"Post signed generic webhooks."`
	Receiver simulateReceiverCmd `cmd:"" help:"Receive deliveries: print them, verify their signatures, and misbehave on request."`
}

// sendFlags are those of both senders.
type sendFlags struct {
	demoFlags
	BaseURL      string        `help:"The hub; default is the demo's." placeholder:"http://127.0.0.1:4000"`
	Channel      *idArg        `help:"Channel id; default is the demo's channel of that type." placeholder:"ID"`
	Secret       string        `help:"What the channel verifies with: the app secret, or the channel's secret; default is the demo's."`
	Messages     int           `help:"Messages in all; 0: three of WhatsApp, one of a webhook." default:"0"`
	Repeat       int           `help:"Post each body this many times, the same bytes." default:"1"`
	Shuffle      bool          `help:"Post the bodies, and what they hold, in another order."`
	BadSignature bool          `help:"Sign with another secret; 401 is then the expected answer."`
	Seed         uint64        `help:"Number to make the same bodies by, run after run; 0 makes new ones each time." default:"0"`
	Timeout      time.Duration `help:"How long to wait for one answer." default:"10s"`
	Yes          bool          `help:"Post to another machine than this one."`
}

// options fills in what the flags left open: kind is the demo's name of the channel.
func (f sendFlags) options(e *env, kind string) (simulate.SendOptions, demoChannel, error) {
	d, err := f.read()
	if err != nil {
		return simulate.SendOptions{}, demoChannel{}, err
	}
	ch := d.Channels[kind]
	o := simulate.SendOptions{
		BaseURL: f.BaseURL, ChannelID: given(f.Channel), Messages: f.Messages, Repeat: f.Repeat, Shuffle: f.Shuffle,
		BadSignature: f.BadSignature, Seed: f.Seed, Timeout: f.Timeout, Yes: f.Yes, Out: e.stdout,
	}
	if o.BaseURL == "" {
		o.BaseURL = d.BaseURL
	}
	switch {
	case o.ChannelID == "":
		o.ChannelID = ch.ID
	case o.ChannelID != ch.ID:
		ch = demoChannel{ID: o.ChannelID} // another channel: the demo's secrets are not its own
		for _, c := range d.Channels {
			if c.ID == o.ChannelID {
				ch = c
			}
		}
	}
	switch {
	case o.BaseURL == "":
		return o, ch, fmt.Errorf("which hub? Start one with `server dev`, or pass --base-url (no %s in %s)", demoFile, f.Dir)
	case o.ChannelID == "":
		return o, ch, errors.New("which channel? Pass --channel ID")
	}
	return o, ch, nil
}

var errNoSecret = errors.New("which secret? Pass --secret; the demo's file knows none for this channel")

type simulateWhatsAppCmd struct {
	sendFlags
	PhoneNumberID string `help:"The business's phone number id; default is the demo's." placeholder:"ID"`
	Statuses      int    `help:"Statuses in all; 0: none." default:"1"`
	People        int    `help:"How many people write; every second one has a username and no number." default:"1"`
	Batch         int    `help:"Most items in one body." default:"10"`
}

func (c simulateWhatsAppCmd) Run(e *env) error {
	o, ch, err := c.options(e, "whatsapp_meta")
	if err != nil {
		return err
	}
	statuses := c.Statuses
	if statuses == 0 {
		statuses = -1 // the library's word for none
	}
	w := simulate.WhatsAppOptions{
		SendOptions: o, AppSecret: cmp.Or(c.Secret, ch.AppSecret), PhoneNumberID: cmp.Or(c.PhoneNumberID, ch.PhoneID),
		Statuses: statuses, People: c.People, Batch: c.Batch,
	}
	if w.AppSecret == "" {
		return errNoSecret
	}
	return simulate.WhatsApp(e.ctx, w)
}

type simulateWebhookCmd struct {
	sendFlags
	Scheme         string `help:"How to sign: ${enum}." enum:"timestamped,standard" default:"timestamped"`
	Text           string `help:"Text of the message."`
	Sender         string `help:"Who wrote it, for the activity's sender."`
	ExternalID     string `help:"The person's id at the sender; messages of one person share a conversation."`
	IdempotencyKey string `help:"Idempotency key; with several messages a number is added."`
}

func (c simulateWebhookCmd) Run(e *env) error {
	o, ch, err := c.options(e, "webhook")
	if err != nil {
		return err
	}
	w := simulate.WebhookOptions{
		SendOptions: o, Secret: cmp.Or(c.Secret, ch.Secret), Scheme: simulate.Scheme(c.Scheme),
		Text: c.Text, Sender: c.Sender, ExternalID: c.ExternalID, IdempotencyKey: c.IdempotencyKey,
	}
	if w.Secret == "" {
		return errNoSecret
	}
	return simulate.Webhook(e.ctx, w)
}

type simulateReceiverCmd struct {
	demoFlags
	Addr           string        `help:"Address to listen on." default:"127.0.0.1:4100"`
	Secret         []string      `help:"Secrets to verify with; default is that of the demo's webhook channel."`
	ShowBody       bool          `help:"Print each body."`
	Status         int           `help:"Answer with this status; 0: 500 to attempts that --fail-first or --fail-rate choose, 307 with --redirect, else 200." default:"0"`
	RetryAfter     time.Duration `help:"Send Retry-After with the answer."`
	FailFirst      int           `help:"Misbehave for the first N attempts of each delivery only; the hub's first retries come after 30 s and 90 s." placeholder:"N"`
	FailRate       float64       `help:"Misbehave for this part of the attempts, 0 to 1." placeholder:"0.5"`
	Seed           uint64        `help:"Number by which --fail-rate chooses; another one chooses other attempts. 0 unless given." placeholder:"N"`
	Delay          time.Duration `help:"Wait before answering."`
	Hang           bool          `help:"Never answer."`
	DropConnection bool          `help:"Close the connection without an answer."`
	Redirect       string        `help:"Redirect to this URL."`
	HugeBody       int64         `help:"Answer with a body of this many bytes." placeholder:"N"`
	SlowBody       time.Duration `help:"Send the answer's body over this time."`
	Yes            bool          `help:"Listen on another address than loopback."`
}

func (c simulateReceiverCmd) Run(e *env) error {
	d, err := c.read()
	if err != nil {
		return err
	}
	known := c.Secret
	switch ch, ok := d.Channels["webhook"]; {
	case len(known) > 0:
	case ok:
		known = []string{ch.Secret}
		fmt.Fprintln(e.stdout, "Signatures are checked with the secret of the demo's webhook channel.")
	default:
		fmt.Fprintf(e.stdout, "Signatures are not checked: there is no %s in %s. Pass --secret.\n", demoFile, c.Dir)
	}
	return simulate.Receiver(e.ctx, simulate.ReceiverOptions{
		Addr: c.Addr, Secrets: known, Out: e.stdout, ShowBody: c.ShowBody, Yes: c.Yes,
		Behaviour: simulate.Behaviour{
			FailFirst: c.FailFirst, FailRate: c.FailRate, Seed: c.Seed, Status: c.Status, RetryAfter: c.RetryAfter, Delay: c.Delay,
			Hang: c.Hang, DropConnection: c.DropConnection, Redirect: c.Redirect, HugeBody: c.HugeBody, SlowBody: c.SlowBody,
		},
	})
}
