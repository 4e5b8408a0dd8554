package webhook

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/fault"
	"converger/internal/signature"
)

// Defaults and bounds of the config, from the system that this one is compatible with.
const (
	defaultConnectTimeout   = 5 * time.Second
	maxConnectTimeout       = 30 * time.Second
	defaultReceiveTimeout   = 10 * time.Second
	maxReceiveTimeout       = 60 * time.Second
	defaultMaxResponseBytes = 1 << 20
	maxMaxResponseBytes     = 10_000_000
	maxHeaderValue          = 4096
)

// Adapter is the webhook adapter.
type Adapter struct {
	guard    *channel.Guard
	client   *http.Client
	unsigned *channel.UnsignedWarning
}

var (
	_ channel.Receiver = (*Adapter)(nil)
	_ channel.Sender   = (*Adapter)(nil)
)

// New makes the adapter. All its attempts share one client of the guard.
func New(guard *channel.Guard, log *slog.Logger) *Adapter {
	return &Adapter{guard: guard, client: guard.Client(), unsigned: channel.NewUnsignedWarning(log)}
}

// Type implements [channel.Adapter].
func (*Adapter) Type() channel.Type { return channel.TypeWebhook }

// Modes implements [channel.Adapter].
func (*Adapter) Modes() []channel.Mode {
	return []channel.Mode{channel.ModeDuplex, channel.ModeInbound, channel.ModeOutbound}
}

// Fields implements [channel.Adapter].
func (*Adapter) Fields() []channel.Field {
	return append([]channel.Field{
		{
			Name: "url", Type: channel.FieldURL, RequiredToSend: true, Max: channel.MaxURL, Label: "Address",
			Help: "Where activities are posted to. Redirects are not followed: give the final address.",
		},
		{
			Name: "method", Type: channel.FieldString, Label: "Method", Help: "POST (the default), PUT or PATCH.",
		},
		{
			Name: "headers", Type: channel.FieldMap, Secret: true, Label: "Headers",
			Help: "Sent with each request, for example Authorization. Values are kept encrypted and never shown.",
		},
		{
			Name: "connect_timeout", Type: channel.FieldInteger, Min: 1, Max: int(maxConnectTimeout.Milliseconds()),
			Label: "Time to connect (ms)",
			Help:  fmt.Sprintf("Name, connection and TLS. %d unless given.", defaultConnectTimeout.Milliseconds()),
		},
		{
			Name: "receive_timeout", Type: channel.FieldInteger, Min: 1, Max: int(maxReceiveTimeout.Milliseconds()),
			Label: "Time to answer (ms)",
			Help: fmt.Sprintf("From the connection to the last byte of the answer. %d unless given.",
				defaultReceiveTimeout.Milliseconds()),
		},
		{
			Name: "max_response_bytes", Type: channel.FieldInteger, Min: 1, Max: maxMaxResponseBytes,
			Label: "Bytes read of an answer", Help: fmt.Sprintf("The rest is not read. %d unless given.", defaultMaxResponseBytes),
		},
	}, channel.CommonFields()...)
}

// config is the config object with defaults filled in.
type config struct {
	URL              string            `json:"url"`
	Method           string            `json:"method"`
	Headers          map[string]string `json:"headers"`
	ConnectTimeout   int               `json:"connect_timeout"` // ms
	ReceiveTimeout   int               `json:"receive_timeout"` // ms
	MaxResponseBytes int64             `json:"max_response_bytes"`
}

func parseConfig(raw json.RawMessage) (config, error) {
	c := config{
		Method:           http.MethodPost,
		ConnectTimeout:   int(defaultConnectTimeout.Milliseconds()),
		ReceiveTimeout:   int(defaultReceiveTimeout.Milliseconds()),
		MaxResponseBytes: defaultMaxResponseBytes,
	}
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
	if c.URL != "" {
		if err := a.guard.CheckURL(c.URL); err != nil {
			add("/url", fault.Malformed, "%s", err)
		}
	}
	if c.Method != http.MethodPost && c.Method != http.MethodPut && c.Method != http.MethodPatch {
		add("/method", fault.UnknownValue, "must be POST, PUT or PATCH")
	}
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(c.Headers)) {
		pointer, value := payload.Pointer("headers", name), c.Headers[name]
		lower := strings.ToLower(name)
		switch {
		case !channel.ValidHeaderName(name):
			add(pointer, fault.Malformed, "is not a header name")
		case reservedHeader(lower):
			add(pointer, fault.Conflict, "is set by Converger or by the connection and cannot be chosen")
		case seen[lower]:
			add(pointer, fault.Conflict, "is given twice; upper and lower case are the same header")
		}
		seen[lower] = true
		switch {
		case len(value) > maxHeaderValue:
			add(pointer, fault.TooLong, "must be at most %d bytes", maxHeaderValue)
		case !channel.ValidHeaderValue(value):
			add(pointer, fault.Malformed, "must be printable ASCII")
		}
	}
	return faults
}

// reservedHeader reports names, in lower case, that a channel must not set: they would forge what receivers verify, or
// confuse the connection.
func reservedHeader(name string) bool {
	switch name {
	case "host", "content-length", "content-type", "content-encoding", "accept-encoding", "connection", "keep-alive",
		"te", "trailer", "transfer-encoding", "upgrade", "expect", "idempotency-key", "x-idempotency-key":
		return true
	}
	return strings.HasPrefix(name, "proxy-") || strings.HasPrefix(name, "x-converger-") || strings.HasPrefix(name, "webhook-")
}

// ProviderAck implements [channel.Receiver]: the answer tells what became of the message.
func (*Adapter) ProviderAck() bool { return false }

// Verify accepts one good proof by either scheme, with the current secret or the previous one during a rotation. A
// request that brings proofs and none that holds is refused even where signatures are optional: somebody tried.
func (a *Adapter) Verify(ch *channel.Channel, r channel.Request) error {
	h, secrets := r.Header, ch.Secrets(r.Now)
	timestamped := signature.VerifyTimestamped(h, r.Body, secrets, r.Now)
	if timestamped == nil {
		return nil
	}
	standard := signature.VerifyStandard(h, r.Body, standardKeys(secrets), r.Now)
	if standard == nil {
		return nil
	}
	switch {
	case !present(h, signature.HeaderTimestamped) && !present(h, signature.HeaderStandardSignature):
		if ch.RequireSignature {
			return channel.ErrUnsigned
		}
		a.unsigned.Warn(ch, "no signature")
		return nil
	case errors.Is(timestamped, signature.ErrLegacy) && !ch.RequireSignature:
		a.unsigned.Warn(ch, "signature without a timestamp")
		return nil
	case present(h, signature.HeaderTimestamped):
		return fmt.Errorf("%w: %w", channel.ErrSignature, timestamped)
	}
	return fmt.Errorf("%w: %w", channel.ErrSignature, standard)
}

// present reports whether a header was sent at all. An empty one counts: it is a broken proof, not a missing one.
func present(h http.Header, name string) bool { return len(h.Values(name)) > 0 }

func standardKeys(secrets [][]byte) [][]byte {
	keys := make([][]byte, len(secrets))
	for i, s := range secrets {
		keys[i] = signature.StandardKey(string(s))
	}
	return keys
}
