package inbound

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/tenants"
)

var (
	// ErrNotFound says that the tenant has no such event.
	ErrNotFound = errors.New("inbound: event not found")
	// ErrNotAccepting says that the channel's type or mode takes no messages from outside.
	ErrNotAccepting = errors.New("inbound: the channel takes no messages")
	// ErrNotReplayable says that the event was processed, or waits for its job.
	ErrNotReplayable = errors.New("inbound: only rejected and failed events can be processed again")
	// ErrUnreadable says that the body can't be read as what the channel's type expects. The event is stored. The error around it
	// says what was expected and holds nothing of the body.
	ErrUnreadable = errors.New("inbound: unreadable body")
	// ErrNoReceipt says that a body without any receipt was posted to the status endpoint. The event is stored.
	ErrNoReceipt = errors.New("inbound: the body holds no receipt")
)

// State is where an event stands.
type State string

// The states.
const (
	StateReceived  State = "received"  // stored; its job has yet to work it
	StateProcessed State = "processed" // every item became something, or was a repeat, or is listed as ignored
	StateRejected  State = "rejected"  // at least one item could not be used; the result says which and why
	StateFailed    State = "failed"    // nothing could be used; the error says why
)

// Request is one verified request to a channel's inbound or status endpoint.
type Request struct {
	Channel  *channel.Channel
	Endpoint channel.Endpoint
	Header   http.Header // only those of channel.KeptHeaders and Content-Type are kept
	// PathSecret is what followed the endpoint in the address, see [channel.Request]. It is never kept.
	PathSecret string
	Body       []byte // exact bytes, size already capped
	Now        time.Time
}

// Answer is what the sender is told.
type Answer struct {
	EventID uuid.UUID
	// Acknowledged says that the event is stored and will be worked by a job; Result is then empty.
	Acknowledged bool
	Result
}

// Result is what an event became. It is stored with the event; the JSON form is part of the management API.
type Result struct {
	// ActivityIDs are the activities of the messages in their order, those of repeats included.
	ActivityIDs     []uuid.UUID `json:"activity_ids"`
	Created         int         `json:"created"`
	Duplicates      int         `json:"duplicates"`
	Receipts        int         `json:"receipts_processed"`
	UnknownReceipts int         `json:"receipts_unknown"` // about messages that this hub did not send
	Rejected        []Rejected  `json:"rejected"`
	Ignored         []Ignored   `json:"ignored"`
}

// Rejected is an item that could not be used.
type Rejected struct {
	Index  int           `json:"index"` // among the items of the body, from 0
	ID     string        `json:"id,omitempty"`
	Reason string        `json:"reason"` // invalid, conversation_not_found or conversation_closed
	Fields []fault.Field `json:"fields,omitempty"`
}

// The reasons of Rejected.
const (
	ReasonInvalid              = "invalid"
	ReasonConversationNotFound = "conversation_not_found"
	ReasonConversationClosed   = "conversation_closed"
)

// Ignored is an item that is well-formed and has no meaning for the channel.
type Ignored struct {
	Kind   string `json:"kind"`
	ID     string `json:"id,omitempty"`
	Reason string `json:"reason"`
}

// Event is a stored request.
type Event struct {
	TenantID    tenants.ID
	ID          uuid.UUID
	ChannelID   uuid.UUID
	Endpoint    channel.Endpoint
	ContentType string
	Body        []byte // empty in lists
	Size        int    // of the body, in bytes
	State       State
	Tries       int
	Error       string // "" for none
	Result      *Result
	InsertedAt  time.Time
	ProcessedAt *time.Time
}

// Filter narrows a list of events; zero members don't.
type Filter struct {
	TenantID  *tenants.ID
	ChannelID *uuid.UUID
	State     State
}

// Jobs queues the work of stored events; package jobs implements it.
type Jobs interface {
	// InsertInboundTx queues a call of [Service.Process] in the caller's transaction.
	InsertInboundTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, event uuid.UUID) error
	// PokeInbound tells the workers of this node, after the commit, that there may be such a job. It does not block.
	PokeInbound()
}

// Receipts moves deliveries on; [delivery.Service] is one.
type Receipts interface {
	ApplyReceiptsTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, channelID uuid.UUID, receipts []channel.Receipt) (applied, unknown int, err error)
}

// keptHeaders is what Parse will need again.
func keptHeaders(h http.Header) json.RawMessage {
	kept := map[string]string{}
	for _, name := range channel.KeptHeaders() {
		if v := h.Get(name); v != "" && len(v) <= channel.MaxProviderID {
			kept[name] = v
		}
	}
	b, _ := json.Marshal(kept) // strings always marshal
	return b
}

func header(kept json.RawMessage) (http.Header, error) {
	var m map[string]string
	if err := json.Unmarshal(kept, &m); err != nil {
		return nil, err
	}
	h := http.Header{}
	for k, v := range m {
		h.Set(k, v)
	}
	return h, nil
}
