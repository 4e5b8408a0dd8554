package channel

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"time"

	"github.com/google/uuid"

	"converger/internal/fault"
)

// Failures of adapters. They hold no text that came from outside.
var (
	// ErrUnsigned says that a request that had to be signed is not.
	ErrUnsigned = errors.New("channel: the request is not signed")
	// ErrSignature says that the request's signature does not hold: wrong, malformed, too old, or of a refused form.
	ErrSignature = errors.New("channel: the request's signature does not hold")
	// ErrForbidden says that a subscription handshake is refused.
	ErrForbidden = errors.New("channel: the handshake is refused")
)

// Adapter is the code for one channel type. Adapters keep no state of channels and are safe for concurrent use.
type Adapter interface {
	Type() Type
	// Modes lists what a channel of the type can be set to.
	Modes() []Mode
	// Fields is the schema of the config object, in the order in which a form shows it. It includes [CommonFields].
	Fields() []Field
	// Validate checks a config object and returns every fault; pointers begin at the object ("/url").
	Validate(config json.RawMessage, requireSignature bool) []fault.Field
}

// FieldType is the kind of value that a config field takes.
type FieldType string

// The kinds. A map is an object whose values are strings.
const (
	FieldString  FieldType = "string"
	FieldURL     FieldType = "url"
	FieldInteger FieldType = "integer"
	FieldBoolean FieldType = "boolean"
	FieldMap     FieldType = "map"
)

// Field describes one member of a config object.
type Field struct {
	Name                  string
	Type                  FieldType
	Required              bool
	RequiredWithSignature bool // required while the channel has require_signature
	RequiredToSend        bool // required while the channel's mode sends; checked by the store
	Secret                bool // shown as [Redacted]; in a map, each value
	Label                 string
	Help                  string
	Min, Max              int // integers: the range; strings and urls: the most bytes (Max, 0: 2,048)
}

// Endpoint is where an inbound request arrived.
type Endpoint string

// The endpoints.
const (
	EndpointInbound Endpoint = "inbound"
	EndpointStatus  Endpoint = "status"
)

// Receiver is an adapter whose channels take requests from outside.
type Receiver interface {
	Adapter
	// ProviderAck reports whether a stored event is answered at once with 200 and parsed later, because its provider
	// wants a fast answer and repeats anything else.
	ProviderAck() bool
	// Verify checks that a request comes from who may send to the channel. It returns nil, ErrUnsigned or ErrSignature
	// (wrapped with a reason that holds nothing received).
	Verify(ch *Channel, r Request) error
	// Parse reads a verified body. Of the header it uses those of [KeptHeaders] only. A fault of one item is in
	// Inbound.Rejected and harms no other; the error, always a *ParseError, says that nothing could be read.
	Parse(ch *Channel, endpoint Endpoint, h http.Header, body []byte, now time.Time) (Inbound, error)
}

// Request is what a request brings that may prove where it comes from.
type Request struct {
	Header     http.Header
	PathSecret string // what followed the endpoint in the address, escapes and all; "": nothing. See [PathKeeper].
	Body       []byte // the exact bytes received
	Now        time.Time
}

// PathKeeper is a Receiver whose channels can have an address that nobody else knows, for providers that sign nothing. A
// request at such an address of any other type, or of a channel that has none, is refused before Verify.
type PathKeeper interface {
	// KeepsPath reports whether the channel's address ends in one of [Channel.PathSecrets].
	KeepsPath(ch *Channel) bool
}

// KeptHeaders returns the names of the request headers that [Receiver.Parse] reads and that are to be stored with an
// event for a later Parse. None of them is a credential.
func KeptHeaders() []string { return []string{"Webhook-Id"} }

// Subscriber is a Receiver whose provider proves by a GET request that it may use the channel's address.
type Subscriber interface {
	// Subscribe returns the text to answer, harmless as text/plain, or ErrForbidden.
	Subscribe(ch *Channel, query url.Values) (answer string, err error)
}

// Sender is an adapter whose channels deliver.
type Sender interface {
	Adapter
	// Send makes one attempt. It is bounded in time and in bytes by the channel's config and by ctx, and never panics
	// on what the other side answers. A cancelled ctx gives a Retry.
	Send(ctx context.Context, ch *Channel, out Outbound) Outcome
}

// Outbound is one attempt to deliver an activity.
type Outbound struct {
	DeliveryID uuid.UUID // the same over all attempts
	ActivityID uuid.UUID
	Attempt    int    // from 1
	Body       []byte // the canonical activity as JSON, with timestamp
	Activity   OutboundActivity
	Now        time.Time // of this attempt; signatures carry it
}

// OutboundActivity is what adapters need of an activity beside its canonical form.
type OutboundActivity struct {
	Type     string
	Sender   string
	Text     string // "" for none
	Metadata json.RawMessage
}

// OutcomeKind is what an attempt came to.
type OutcomeKind string

// The kinds.
const (
	Sent      OutcomeKind = "sent"
	Retry     OutcomeKind = "retry"     // failed, and another attempt may help
	Failed    OutcomeKind = "failed"    // failed for good
	Uncertain OutcomeKind = "uncertain" // may have arrived, and a repeat would be a second message
)

// The stable words of Outcome.Reason.
const (
	ReasonDNS            = "dns"             // the name does not resolve
	ReasonRefused        = "refused"         // connection refused
	ReasonTLS            = "tls"             // certificate or handshake
	ReasonConnectTimeout = "connect_timeout" // no connection in time
	ReasonHeaderTimeout  = "header_timeout"  // connected, no answer in time
	ReasonBodyTimeout    = "body_timeout"    // the answer began and did not end in time
	ReasonClosed         = "closed"          // the other side closed the connection
	ReasonNetwork        = "network"         // any other transport error
	ReasonInterrupted    = "interrupted"     // this side stopped the attempt
	ReasonBlockedTarget  = "blocked_target"  // an address that may not be called
	ReasonRedirect       = "redirect"        // 3xx
	ReasonGone           = "gone"            // 410
	ReasonRateLimited    = "rate_limited"    // 429
	ReasonRejected       = "rejected"        // any other answer below 500
	ReasonServerError    = "server_error"    // 5xx
	ReasonBadConfig      = "bad_config"      // the channel's config cannot be used
)

// MaxRetryAfter caps Outcome.RetryAfter: a receiver may slow deliveries down, not stop them.
const MaxRetryAfter = time.Hour

// Outcome is the result of one attempt.
type Outcome struct {
	Kind              OutcomeKind
	Reason            string // one of the Reason words, "" for Sent
	StatusCode        int    // HTTP, 0 when there was no answer
	Error             string // for people: one or two sentences without secrets; "" for Sent
	Response          string // the beginning of the answer, cleaned, at most 2 KiB
	ProviderMessageID string
	RetryAfter        time.Duration // what the receiver asked for, 0 to MaxRetryAfter; never shortens the own back-off
	Disable           bool          // the receiver says that it is gone (410): the reason of the failure
	Replies           []Message     // to append to the activity's conversation
}

// Inbound is what a body held.
type Inbound struct {
	Messages []Message
	Receipts []Receipt
	Rejected []Rejected
	Ignored  []Ignored
}

// Rejected is an item that cannot be used.
type Rejected struct {
	Index int            // of the item among all items of the body, from 0
	ID    string         // as the provider names it, "" when it does not
	Err   *fault.Invalid // pointers begin at the body ("/2/text")
}

// Ignored is an item that is well-formed and not for this channel, or of a kind without meaning here. It stays in the
// raw event.
type Ignored struct {
	Kind   string // message, status, or the provider's word
	ID     string
	Reason string
}

// Message is one message from outside, or an adapter's reply. Strings are valid UTF-8 without NUL. Its limits
// (lengths, known types) are checked by package activity.
type Message struct {
	Index             int        // of the item among all items of the body, from 0, as Rejected.Index
	ProviderID        string     // de-duplicates within the channel, at most MaxProviderID bytes; "" never does
	ConversationID    *uuid.UUID // named by the sender; not checked
	Participant       *Participant
	Sender            string
	Type              string
	Text              string // "" for none
	Attachments       []json.RawMessage
	Metadata          map[string]any // numbers are json.Number
	ReplyToID         *uuid.UUID
	ReplyToProviderID string
	IdempotencyKey    string
	At                time.Time // when it was written, by the provider's word; else now
}

// MaxProviderID is the longest id, in bytes, by which a provider may name a message.
const MaxProviderID = 512

// Participant is who wrote a message.
type Participant struct {
	Identities  []Identity // at least one, the best first
	DisplayName string     // at most 255 characters, "" when unknown
	Metadata    map[string]any
}

// ExternalID is the value of the best identity.
func (p *Participant) ExternalID() string { return p.Identities[0].Value }

// Identity is one name of a participant within its channel.
type Identity struct {
	Kind  IdentityKind
	Value string // 1 to 255 bytes
}

// IdentityKind says what a name is.
type IdentityKind string

// The kinds of identities, as stored.
const (
	IdentityUserID     IdentityKind = "user_id"
	IdentityPhone      IdentityKind = "phone"
	IdentityExternalID IdentityKind = "external_id"
)

// Receipt is news about a delivery. At least one of ProviderID and DeliveryID is set.
type Receipt struct {
	ProviderID string
	DeliveryID *uuid.UUID // as claimed; not checked
	Status     string     // sent, delivered, read or failed
	At         time.Time
	Error      string // for failed: code and text
}

// ParseError says that a body could not be read at all.
type ParseError struct {
	Detail string // for the sender; holds nothing of the body
}

func (e *ParseError) Error() string { return "channel: unreadable body: " + e.Detail }

// Registry holds the adapters of a program. It does not change once made.
type Registry struct {
	adapters map[Type]Adapter
	types    []Type
}

// NewRegistry makes a registry. It panics when two adapters have one type: that is a fault of the program.
func NewRegistry(adapters ...Adapter) *Registry {
	r := &Registry{adapters: make(map[Type]Adapter, len(adapters))}
	for _, a := range adapters {
		if _, ok := r.adapters[a.Type()]; ok {
			panic("channel: two adapters of type " + string(a.Type()))
		}
		r.adapters[a.Type()] = a
		r.types = append(r.types, a.Type())
	}
	slices.Sort(r.types)
	return r
}

// Lookup returns the adapter of a type.
func (r *Registry) Lookup(t Type) (Adapter, bool) {
	a, ok := r.adapters[t]
	return a, ok
}

// Types lists the types in alphabetical order.
func (r *Registry) Types() []Type { return slices.Clone(r.types) }
