package whatsappinfobip

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"

	"converger/internal/channel"
	"converger/internal/fault"
)

// minSecret is the shortest password or header value, in bytes. Guesses are slowed by the channel's limit of unproven
// addresses only, and both are made once and never typed.
const minSecret = channel.MinSecret

// Adapter is the Infobip adapter.
type Adapter struct {
	guard    *channel.Guard
	unsigned *channel.UnsignedWarning
}

var (
	_ channel.Receiver   = (*Adapter)(nil)
	_ channel.PathKeeper = (*Adapter)(nil)
)

// New makes the adapter. The guard says which base_url may be saved.
func New(guard *channel.Guard, log *slog.Logger) *Adapter {
	return &Adapter{guard: guard, unsigned: channel.NewUnsignedWarning(log)}
}

// Type implements [channel.Adapter].
func (*Adapter) Type() channel.Type { return channel.TypeWhatsAppInfobip }

// Modes implements [channel.Adapter].
func (*Adapter) Modes() []channel.Mode { return []channel.Mode{channel.ModeInbound} }

// Fields implements [channel.Adapter].
func (*Adapter) Fields() []channel.Field {
	return append([]channel.Field{
		{
			Name: "sender", Type: channel.FieldString, Required: true, Max: 32, Label: "Sender",
			Help: "The WhatsApp number at Infobip, digits only, beginning with the country's code. Events of other senders are ignored.",
		},
		{
			Name: "secret_path", Type: channel.FieldBoolean, Label: "Secret in the callback URL",
			Help: "On unless switched off. Infobip posts to a URL that nobody else knows. It is shown when the channel is created, when " +
				"its config is changed and when its secret is rotated, which changes the URL too.",
		},
		{
			Name: "basic_user", Type: channel.FieldString, Max: 255, Label: "User",
			Help: "If Infobip's notification profile logs in (basic authentication): its user name.",
		},
		{
			Name: "basic_password", Type: channel.FieldString, Secret: true, Max: 512, Label: "Password",
			Help: fmt.Sprintf("Of that user, at least %d characters.", minSecret),
		},
		{
			Name: "previous_basic_password", Type: channel.FieldString, Secret: true, Max: 512, Label: "Previous password",
			Help: "Accepted too, while the password is being changed. Remove it afterwards.",
		},
		{
			Name: "header_name", Type: channel.FieldString, Max: 256, Label: "Header",
			Help: "If Infobip's notification profile sends a header of its own: its name.",
		},
		{
			Name: "header_value", Type: channel.FieldString, Secret: true, Max: 2048, Label: "Header's value",
			Help: fmt.Sprintf("The whole value of that header, at least %d characters.", minSecret),
		},
		{
			Name: "previous_header_value", Type: channel.FieldString, Secret: true, Max: 2048, Label: "Previous header's value",
			Help: "Accepted too, while the value is being changed. Remove it afterwards.",
		},
		{
			Name: "base_url", Type: channel.FieldURL, Max: channel.MaxURL, Label: "Base URL",
			Help: "Of the account, for example https://abc123.api.infobip.com. Not used to receive.",
		},
		{
			Name: "api_key", Type: channel.FieldString, Secret: true, Max: 512, Label: "API key",
			Help: "Of the account. Not used to receive.",
		},
	}, channel.CommonFields()...)
}

type config struct {
	Sender                string `json:"sender"`
	SecretPath            bool   `json:"secret_path"`
	BasicUser             string `json:"basic_user"`
	BasicPassword         string `json:"basic_password"`
	PreviousBasicPassword string `json:"previous_basic_password"`
	HeaderName            string `json:"header_name"`
	HeaderValue           string `json:"header_value"`
	PreviousHeaderValue   string `json:"previous_header_value"`
	BaseURL               string `json:"base_url"`
}

// parseConfig reads a config. secret_path is on by default, so that a channel about which nobody thought has a proof.
func parseConfig(raw json.RawMessage) (config, error) {
	c := config{SecretPath: true}
	err := json.Unmarshal(raw, &c)
	return c, err
}

// Validate implements [channel.Adapter].
func (a *Adapter) Validate(raw json.RawMessage, requireSignature bool) []fault.Field {
	faults := channel.ValidateConfig(a.Fields(), raw, requireSignature)
	if len(faults) > 0 {
		return faults
	}
	c, err := parseConfig(raw)
	if err != nil { // a config of the right types always unmarshals
		return []fault.Field{{Code: fault.Malformed, Detail: "cannot be read"}}
	}
	add := func(pointer, code, format string, args ...any) {
		faults = append(faults, fault.Field{Pointer: pointer, Code: code, Detail: fmt.Sprintf(format, args...)})
	}
	// A pair is whole or not there, and its secrets can't be guessed.
	pair := func(name, value, secretName, secret, previousName, previous string) {
		switch {
		case value == "" && (secret != "" || previous != ""):
			add("/"+name, fault.Required, "is required beside %s", secretName)
		case value != "" && secret == "":
			add("/"+secretName, fault.Required, "is required beside %s", name)
		}
		for _, s := range []struct{ name, text string }{{secretName, secret}, {previousName, previous}} {
			if s.text != "" && len(s.text) < minSecret {
				add("/"+s.name, fault.OutOfRange, "must be at least %d bytes", minSecret)
			}
		}
	}

	if !digits(c.Sender) {
		add("/sender", fault.Malformed, "must be the number that Infobip shows as the sender, digits only")
	}
	pair("basic_user", c.BasicUser, "basic_password", c.BasicPassword, "previous_basic_password", c.PreviousBasicPassword)
	if strings.Contains(c.BasicUser, ":") {
		add("/basic_user", fault.Malformed, "must not hold a colon") // RFC 7617, 2
	}
	pair("header_name", c.HeaderName, "header_value", c.HeaderValue, "previous_header_value", c.PreviousHeaderValue)
	switch name := strings.ToLower(c.HeaderName); {
	case name == "":
	case !channel.ValidHeaderName(name):
		add("/header_name", fault.Malformed, "is not a header name")
	case reservedHeader(name):
		add("/header_name", fault.Conflict, "has a meaning of its own and proves nothing")
	case name == "authorization" && c.BasicUser != "":
		add("/header_name", fault.Conflict, "is the header of basic_user; use one of them")
	}
	for _, v := range []struct{ name, text string }{{"header_value", c.HeaderValue}, {"previous_header_value", c.PreviousHeaderValue}} {
		if !channel.ValidHeaderValue(v.text) {
			add("/"+v.name, fault.Malformed, "must be printable ASCII")
		}
	}
	if requireSignature && !c.SecretPath && c.BasicUser == "" && c.HeaderName == "" {
		add("/secret_path", fault.Required, "must be on, or basic_user or header_name be set, while require_signature is true: "+
			"something has to prove who is posting")
	}
	if c.BaseURL != "" {
		if err := a.guard.CheckURL(c.BaseURL); err != nil {
			add("/base_url", fault.Malformed, "%s", err)
		}
	}
	return faults
}

// reservedHeader reports names, in lower case, that the connection or another proof uses. Some of them never reach a
// receiver as headers.
func reservedHeader(name string) bool {
	switch name {
	case "host", "connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "expect", "content-length",
		"content-type", "content-encoding":
		return true
	}
	return strings.HasPrefix(name, "x-converger-") || strings.HasPrefix(name, "proxy-")
}

func digits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// ProviderAck implements [channel.Receiver]: Infobip repeats what is not answered in time.
func (*Adapter) ProviderAck() bool { return true }

// KeepsPath implements [channel.PathKeeper].
func (*Adapter) KeepsPath(ch *channel.Channel) bool {
	c, err := parseConfig(ch.Config)
	return err == nil && c.SecretPath
}
