package channel

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/secrets"
	"converger/internal/tenants"
)

// Type names a provider adapter.
type Type string

// The types of this version. Which of them a program really has is in its [Registry].
const (
	TypeEcho            Type = "echo"
	TypeWebhook         Type = "webhook"
	TypeWhatsAppInfobip Type = "whatsapp_infobip"
	TypeWhatsAppMeta    Type = "whatsapp_meta"
)

// Mode says in which direction a channel carries messages. Receipts are taken in every mode.
type Mode string

// The modes.
const (
	ModeInbound  Mode = "inbound"
	ModeOutbound Mode = "outbound"
	ModeDuplex   Mode = "duplex"
)

// Receives reports whether messages may come in.
func (m Mode) Receives() bool { return m == ModeInbound || m == ModeDuplex }

// Sends reports whether messages may go out.
func (m Mode) Sends() bool { return m == ModeOutbound || m == ModeDuplex }

// Status of a channel; an inactive one neither receives nor sends.
type Status string

// The statuses.
const (
	StatusActive   Status = "active"
	StatusInactive Status = "inactive"
)

// Channel is one configured connection of a tenant to the outside, with its secrets in clear. Values that come from
// [Store.Current] are shared between goroutines: read them only.
type Channel struct {
	TenantID tenants.ID
	ID       uuid.UUID
	Name     string
	Type     Type
	Mode     Mode
	Status   Status
	Config   json.RawMessage // a JSON object that the adapter has validated; holds credentials, see [RedactedConfig]

	Secret         secrets.Text
	PreviousSecret secrets.Text // "" when there is none; still there after PreviousUntil
	PreviousUntil  time.Time

	RequireSignature bool
	Ordered          bool   // deliveries keep the order of each conversation
	RateLimit        string // as [RateLimit.String] writes it, "" for none
	RetryPolicy      RetryPolicy
	MaxInFlight      int // attempts at one time over all nodes

	// HoldUntil is when deliveries go on; nil: now. Delivery moves it without a new version, so that the value here is
	// that of the moment when the channel was read.
	HoldUntil  *time.Time
	Version    int64 // the configuration version of the last change
	InsertedAt time.Time
	UpdatedAt  time.Time
}

// Secrets returns the texts of the secrets that are valid now, the current one first, as the keys of package signature.
func (c *Channel) Secrets(now time.Time) [][]byte {
	keys := [][]byte{[]byte(c.Secret.Reveal())}
	if c.PreviousSecret != "" && now.Before(c.PreviousUntil) {
		keys = append(keys, []byte(c.PreviousSecret.Reveal()))
	}
	return keys
}

// PathSecrets returns the secrets in which the channel's address may end now, the current one first: 192 bits each, as 32
// characters of base64url. They are derived from Secrets, so that an address, which stands in other people's settings
// and proxies' logs, opens nothing but itself, and changes, with the same overlap, when the channel's secret does.
func (c *Channel) PathSecrets(now time.Time) []string {
	const label = "converger callback address 1\x00" // no form of package signature signs a text that begins so
	var out []string
	for _, secret := range c.Secrets(now) {
		mac := hmac.New(sha256.New, secret)
		mac.Write([]byte(label))
		mac.Write(c.ID[:])
		out = append(out, base64.RawURLEncoding.EncodeToString(mac.Sum(nil)[:24]))
	}
	return out
}

// Backoff is the shape of the delay between attempts.
type Backoff string

// The shapes: after attempt n wait base*3^n, base*n or base, at most the policy's maximum.
const (
	BackoffExponential Backoff = "exponential"
	BackoffLinear      Backoff = "linear"
	BackoffFixed       Backoff = "fixed"
)

// DefaultMaxMS is the longest wait between attempts, in milliseconds, of a policy that names none.
const DefaultMaxMS = 3_600_000

// RetryPolicy says how often and when a delivery is tried again. A zero member means the default of package delivery.
type RetryPolicy struct {
	MaxAttempts int     `json:"max_attempts,omitempty"`
	Backoff     Backoff `json:"backoff,omitempty"`
	BaseMS      int     `json:"base_ms,omitempty"`
	MaxMS       int     `json:"max_ms,omitempty"`
	TimeoutMS   int     `json:"timeout_ms,omitempty"` // of one attempt, from the connection to the last byte
}

// RateLimit is the pace of a channel's deliveries.
type RateLimit struct {
	Limit int           // deliveries, 1 to MaxRateLimit
	Per   time.Duration // a second, a minute or an hour
}

// MaxRateLimit is the largest number in a rate limit: more than one Postgres could note.
const MaxRateLimit = 1_000_000

// ParseRateLimit reads "<n>/s", "<n>/m" or "<n>/h"; blanks around the parts are fine. The text "" is no limit: the zero
// RateLimit.
func ParseRateLimit(s string) (RateLimit, error) {
	if strings.TrimSpace(s) == "" {
		return RateLimit{}, nil
	}
	number, unit, ok := strings.Cut(s, "/")
	if !ok {
		return RateLimit{}, fmt.Errorf("must look like 80/s, 600/m or 1000/h")
	}
	var per time.Duration
	switch strings.TrimSpace(unit) {
	case "s":
		per = time.Second
	case "m":
		per = time.Minute
	case "h":
		per = time.Hour
	default:
		return RateLimit{}, fmt.Errorf("must end in /s, /m or /h")
	}
	number = strings.TrimSpace(number)
	n, err := strconv.Atoi(number)
	if err != nil || n < 1 || n > MaxRateLimit || number[0] == '+' {
		return RateLimit{}, fmt.Errorf("must begin with a whole number from 1 to %d", MaxRateLimit)
	}
	return RateLimit{Limit: n, Per: per}, nil
}

// String writes the form that [ParseRateLimit] reads, without blanks; "" for the zero value.
func (r RateLimit) String() string {
	switch r.Per {
	case time.Second:
		return strconv.Itoa(r.Limit) + "/s"
	case time.Minute:
		return strconv.Itoa(r.Limit) + "/m"
	case time.Hour:
		return strconv.Itoa(r.Limit) + "/h"
	}
	return ""
}
