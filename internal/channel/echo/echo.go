package echo

import (
	"context"
	"encoding/json"

	"converger/internal/channel"
	"converger/internal/fault"
)

// bot is the sender of the replies.
const bot = "bot"

// Adapter is the echo adapter.
type Adapter struct{}

var _ channel.Sender = Adapter{}

// New makes the adapter.
func New() Adapter { return Adapter{} }

// Type implements [channel.Adapter].
func (Adapter) Type() channel.Type { return channel.TypeEcho }

// Modes implements [channel.Adapter].
func (Adapter) Modes() []channel.Mode { return []channel.Mode{channel.ModeOutbound} }

// Fields implements [channel.Adapter].
func (Adapter) Fields() []channel.Field { return channel.CommonFields() }

// Validate implements [channel.Adapter].
func (a Adapter) Validate(config json.RawMessage, requireSignature bool) []fault.Field {
	return channel.ValidateConfig(a.Fields(), config, requireSignature)
}

// Send answers a message of anybody but the bot with the same text. The reply's idempotency key makes a repeated attempt
// harmless.
func (Adapter) Send(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
	outcome := channel.Outcome{Kind: channel.Sent}
	if a := out.Activity; a.Type == "message" && a.Sender != bot && a.Text != "" {
		outcome.Replies = []channel.Message{{
			Type:           "message",
			Sender:         bot,
			Text:           a.Text,
			IdempotencyKey: "echo:" + out.ActivityID.String(),
			At:             out.Now,
		}}
	}
	return outcome
}
