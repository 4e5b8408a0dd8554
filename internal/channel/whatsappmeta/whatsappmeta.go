package whatsappmeta

import (
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"strings"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/signature"
)

// maxChallenge is the longest challenge, in digits, that the handshake repeats. Meta's have ten.
const maxChallenge = 64

// Adapter is the WhatsApp Cloud API adapter.
type Adapter struct {
	unsigned *channel.UnsignedWarning
}

var (
	_ channel.Receiver   = (*Adapter)(nil)
	_ channel.Subscriber = (*Adapter)(nil)
)

// New makes the adapter.
func New(log *slog.Logger) *Adapter { return &Adapter{unsigned: channel.NewUnsignedWarning(log)} }

// Type implements [channel.Adapter].
func (*Adapter) Type() channel.Type { return channel.TypeWhatsAppMeta }

// Modes implements [channel.Adapter].
func (*Adapter) Modes() []channel.Mode { return []channel.Mode{channel.ModeInbound} }

// Fields implements [channel.Adapter].
func (*Adapter) Fields() []channel.Field {
	return append([]channel.Field{
		{
			Name: "phone_number_id", Type: channel.FieldString, Required: true, Max: 64, Label: "Phone number ID",
			Help: "From the app's WhatsApp page; not the phone number. Events of other numbers of the app are ignored.",
		},
		{
			Name: "verify_token", Type: channel.FieldString, Required: true, Secret: true, Max: 512, Label: "Verify token",
			Help: "Any text; give Meta the same one when you enter the callback URL.",
		},
		{
			Name: "app_secret", Type: channel.FieldString, RequiredWithSignature: true, Secret: true, Max: 512, Label: "App secret",
			Help: "From the app's basic settings. Meta signs its requests with it.",
		},
		{
			Name: "previous_app_secret", Type: channel.FieldString, Secret: true, Max: 512, Label: "Previous app secret",
			Help: "Accepted too, while the app's secret is being changed. Remove it afterwards.",
		},
		{
			Name: "access_token", Type: channel.FieldString, Secret: true, Max: 2048, Label: "Access token",
			Help: "Of a system user. Not used to receive.",
		},
		{
			Name: "graph_api_version", Type: channel.FieldString, Max: 16, Label: "Graph API version",
			Help: "For example v26.0.",
		},
	}, channel.CommonFields()...)
}

type config struct {
	PhoneNumberID     string `json:"phone_number_id"`
	VerifyToken       string `json:"verify_token"`
	AppSecret         string `json:"app_secret"`
	PreviousAppSecret string `json:"previous_app_secret"`
	GraphAPIVersion   string `json:"graph_api_version"`
}

func parseConfig(raw json.RawMessage) (config, error) {
	var c config
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
	if !digits(c.PhoneNumberID) {
		faults = append(faults, fault.Field{Pointer: "/phone_number_id", Code: fault.Malformed,
			Detail: "must be the number's ID at Meta, digits only"})
	}
	if requireSignature && c.AppSecret == "" {
		faults = append(faults, fault.Field{Pointer: "/app_secret", Code: fault.Required,
			Detail: "is required while require_signature is true"})
	}
	if v := c.GraphAPIVersion; v != "" {
		major, minor, ok := strings.Cut(strings.TrimPrefix(v, "v"), ".")
		if !ok || v[0] != 'v' || !digits(major) || !digits(minor) {
			faults = append(faults, fault.Field{Pointer: "/graph_api_version", Code: fault.Malformed, Detail: "must look like v26.0"})
		}
	}
	return faults
}

func digits(s string) bool { return s != "" && strings.Trim(s, "0123456789") == "" }

// ProviderAck implements [channel.Receiver].
func (*Adapter) ProviderAck() bool { return true }

// Verify checks Meta's signature with the app's secret or the one before. The channel's own secret and header mean
// nothing here.
func (a *Adapter) Verify(ch *channel.Channel, r channel.Request) error {
	c, err := parseConfig(ch.Config)
	if err != nil {
		return fmt.Errorf("%w: unreadable config", channel.ErrSignature)
	}
	var keys [][]byte
	for _, secret := range []string{c.AppSecret, c.PreviousAppSecret} {
		if secret != "" {
			keys = append(keys, []byte(secret))
		}
	}
	missing := len(r.Header.Values(signature.HeaderHubSHA256)) == 0
	if !ch.RequireSignature && (missing || len(keys) == 0) {
		a.unsigned.Warn(ch, "no signature, or no app_secret to check it with")
		return nil
	}
	if missing {
		return channel.ErrUnsigned
	}
	if err := signature.VerifyHubSHA256(r.Header, r.Body, keys, r.Now); err != nil {
		if errors.Is(err, signature.ErrMissing) || errors.Is(err, signature.ErrNoKey) {
			return fmt.Errorf("%w: %w", channel.ErrUnsigned, err)
		}
		return fmt.Errorf("%w: %w", channel.ErrSignature, err)
	}
	return nil
}

// Subscribe answers the challenge to whoever knows the verify token. The answer is digits only, for it is sent back.
func (*Adapter) Subscribe(ch *channel.Channel, q url.Values) (string, error) {
	c, err := parseConfig(ch.Config)
	if err != nil || c.VerifyToken == "" {
		return "", fmt.Errorf("%w: the channel has no verify_token", channel.ErrForbidden)
	}
	one := func(name string) string {
		if values := q[name]; len(values) == 1 {
			return values[0]
		}
		return "" // two tokens would be two guesses
	}
	token, challenge := one("hub.verify_token"), one("hub.challenge")
	switch {
	case subtle.ConstantTimeCompare([]byte(token), []byte(c.VerifyToken)) != 1:
		return "", fmt.Errorf("%w: hub.verify_token does not match", channel.ErrForbidden)
	case one("hub.mode") != "subscribe":
		return "", fmt.Errorf("%w: hub.mode is not subscribe", channel.ErrForbidden)
	case !digits(challenge) || len(challenge) > maxChallenge:
		return "", fmt.Errorf("%w: hub.challenge is not a number", channel.ErrForbidden)
	}
	return challenge, nil
}
