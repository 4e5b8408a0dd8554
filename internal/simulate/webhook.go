package simulate

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"converger/internal/signature"
)

// Scheme names how a generic webhook is signed.
type Scheme string

// The schemes that a webhook channel accepts; see internal/signature.
const (
	SchemeTimestamped Scheme = "timestamped" // X-Converger-Signature
	SchemeStandard    Scheme = "standard"    // Standard Webhooks 1.0.0
)

// WebhookOptions tells Webhook what to send. Messages defaults to 1.
type WebhookOptions struct {
	SendOptions
	// Secret is the channel's secret, as the hub shows it. Required.
	Secret string
	// Scheme defaults to SchemeTimestamped.
	Scheme Scheme
	// Text of the message. With several messages, each but the first has its
	// number added. Empty means a greeting.
	Text string
	// Sender is who writes, as shown to people. Empty means "Simulated sender".
	Sender string
	// ExternalID identifies the sender to the channel, so that all messages
	// join one conversation. Empty means "simulated-sender".
	ExternalID string
	// IdempotencyKey of the message; with several messages, each but the first
	// has -2, -3, … added. Empty makes a new one for each message.
	IdempotencyKey string
}

// webhookBody is a message for a webhook channel.
type webhookBody struct {
	Type           string `json:"type"`
	Text           string `json:"text"`
	Sender         string `json:"sender"`
	DisplayName    string `json:"display_name"`
	ExternalID     string `json:"external_id"`
	IdempotencyKey string `json:"idempotency_key"`
}

// Webhook posts signed messages, one a body, to a channel of type webhook. With
// SchemeStandard the webhook-id is new for each message and the same for its
// repeats. It returns an error for senseless options, if any post was not
// answered as expected, or the context's if that ended the run.
func Webhook(ctx context.Context, o WebhookOptions) error {
	if o.Secret == "" {
		return errors.New("simulate webhook: no channel secret")
	}
	o.Scheme = cmp.Or(o.Scheme, SchemeTimestamped)
	if o.Scheme != SchemeTimestamped && o.Scheme != SchemeStandard {
		return fmt.Errorf("simulate webhook: unknown scheme %q: want %s or %s", o.Scheme, SchemeTimestamped, SchemeStandard)
	}
	s, err := newSender(ctx, o.SendOptions, 1)
	if err != nil {
		return fmt.Errorf("simulate webhook: %w", err)
	}

	posts := make([]*post, s.Messages)
	for i := range posts {
		key := o.IdempotencyKey
		text := cmp.Or(o.Text, "Hello from the simulator 👋")
		if key == "" {
			key = fmt.Sprintf("sim-%016x", s.rand.Uint64())
		} else if i > 0 {
			key = fmt.Sprintf("%s-%d", key, i+1)
		}
		if i > 0 {
			text = fmt.Sprintf("%s (%d)", text, i+1)
		}
		sender := cmp.Or(o.Sender, "Simulated sender")
		body, err := json.Marshal(webhookBody{
			Type: "message", Text: text, Sender: sender, DisplayName: sender,
			ExternalID: cmp.Or(o.ExternalID, "simulated-sender"), IdempotencyKey: key,
		})
		if err != nil {
			return fmt.Errorf("simulate webhook: encode a message: %w", err)
		}
		id := fmt.Sprintf("msg_%016x", s.rand.Uint64())
		posts[i] = &post{body: body, holds: []string{fmt.Sprintf("%q", clean(text, 60))},
			sign: func(header http.Header, now time.Time) error {
				if o.Scheme == SchemeStandard {
					key := s.key(signature.StandardKey(o.Secret))
					return signature.SignStandard(header, id, body, [][]byte{key}, now)
				}
				return signature.SignTimestamped(header, body, [][]byte{s.key([]byte(o.Secret))}, now)
			}}
	}
	if err := s.run(ctx, posts, map[int]string{
		http.StatusUnauthorized: "compare the secret with the channel's, the scheme with what the channel accepts, and this machine's clock.",
	}); err != nil {
		return fmt.Errorf("simulate webhook: %w", err)
	}
	return nil
}
