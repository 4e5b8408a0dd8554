package activity

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// The types of an activity. The last two are made by the program itself only, see [New.Internal].
const (
	TypeMessage            = "message"
	TypeEvent              = "event"
	TypeTyping             = "typing"
	TypeMessageReaction    = "messageReaction"
	TypeMessageUpdate      = "messageUpdate"
	TypeMessageDelete      = "messageDelete"
	TypeEndOfConversation  = "endOfConversation"
	TypeConversationUpdate = "conversationUpdate"
	TypeDeliveryReceipt    = "deliveryReceipt"
)

// The statuses of a conversation.
const (
	StatusActive = "active"
	StatusClosed = "closed"
)

// AuthorTenant is the author of what a tenant's own servers write: they are trusted with every sender of theirs.
const AuthorTenant = "tenant"

// SenderSystem is the sender of activities that the program writes itself.
const SenderSystem = "system"

// Reasons an operation was refused; the caller's input errors are *[fault.Invalid]. Errors of the database are wrapped,
// so that [postgres.IsUnavailable] sees through them.
var (
	// ErrNotFound: no such thing in this tenant, or not in the channel that the caller is bound to.
	ErrNotFound = errors.New("activity: not found")
	// ErrClosed: the conversation takes no activities until it is reopened.
	ErrClosed = errors.New("activity: conversation is closed")
	// ErrKeyReused: the idempotency key was used by the same caller, in this conversation, with another body.
	ErrKeyReused = errors.New("activity: idempotency key was used with another body")
	// ErrOverloaded: the queue in front of the database is full, or the program is stopping. Nothing was written.
	ErrOverloaded = errors.New("activity: too many activities are waiting")
	// ErrLockTimeout: another transaction held the conversation, or the idempotency key, for too long. Nothing was written.
	ErrLockTimeout = errors.New("activity: the conversation is busy")
	// ErrUnknownOutcome: the connection was lost while the transaction was being committed. The activity may exist; only a
	// repeat with the same idempotency key can tell. It always wraps an error for which [postgres.IsUnavailable] is true.
	ErrUnknownOutcome = errors.New("activity: the outcome of the commit is unknown")
	// ErrBadWatermark: the text is no watermark.
	ErrBadWatermark = errors.New("activity: malformed watermark")
)

// Activity is one entry of a conversation. It never changes, but for the two stamps.
type Activity struct {
	TenantID       tenants.ID
	ID             uuid.UUID // version 7; says nothing of the order, Seq does
	ConversationID uuid.UUID
	ChannelID      uuid.UUID // the conversation's
	Seq            int64     // 1, 2, 3, … in its conversation, without a gap
	Type           string
	Sender         string
	Text           *string
	Attachments    json.RawMessage // an array of objects
	Metadata       json.RawMessage // an object
	IdempotencyKey *string
	ReplyToID      *uuid.UUID
	EditedAt       *time.Time // when a messageUpdate named it last
	DeletedAt      *time.Time // when a messageDelete named it
	InsertedAt     time.Time  // the clock of the database
}

// Participant is a person as one channel knows them: the same telephone number on two channels is two participants.
type Participant struct {
	TenantID    tenants.ID
	ID          uuid.UUID
	ChannelID   uuid.UUID
	ExternalID  string // the best identity at the time of the first contact
	DisplayName *string
	Metadata    json.RawMessage // an object
	InsertedAt  time.Time
	UpdatedAt   time.Time
}

// Conversation is an ordered list of activities on one channel.
type Conversation struct {
	TenantID      tenants.ID
	ID            uuid.UUID // version 7
	ChannelID     uuid.UUID
	ParticipantID *uuid.UUID
	Participant   *Participant // nil when there is none; loaded by every method that returns a Conversation
	Status        string       // StatusActive or StatusClosed
	LastSeq       int64        // the seq of its last activity, 0 before the first
	Metadata      json.RawMessage
	InsertedAt    time.Time
	UpdatedAt     time.Time // of the last activity or change of status
}

// New is an activity that somebody wants to append.
type New struct {
	// ID is the id that the activity gets, a fresh UUIDv7, for callers that must name it before it exists; the zero UUID
	// leaves it to the store.
	ID             uuid.UUID
	TenantID       tenants.ID
	ConversationID uuid.UUID
	// ChannelID, when set, is the channel that the caller is bound to: a conversation of another is ErrNotFound.
	ChannelID *uuid.UUID

	// Caller is the scope of the idempotency key, such as "key:<uuid>", "user:<id>" or "channel:<uuid>": two callers may
	// use the same key for two things.
	Caller         string
	IdempotencyKey string // "" for none
	// BodyHash tells a repeat from another body under the same key. [Validate] computes it when it is nil.
	BodyHash []byte

	Type   string // "" becomes TypeMessage
	Sender string // the name shown; callers that choose it freely are told apart by Author
	// Author is who writes: AuthorTenant, or what names one user or participant within the tenant. An edit or deletion needs
	// the author of the original, or the tenant itself naming its sender. "" can't edit anything.
	Author      string
	Text        *string
	Attachments []json.RawMessage
	Metadata    json.RawMessage // an object; nil or null becomes {}
	ReplyToID   *uuid.UUID
	// Uploads are stored files. Each gets a row in the activity's transaction, and is the activity's attachment behind
	// those in Attachments.
	Uploads []Upload

	// ParticipantExternalID is the external id of the conversation's participant, so that [Targets] can spare the author
	// an echo. The store fills it in before it asks for the targets.
	ParticipantExternalID string
	// Internal allows the types that only the program itself writes.
	Internal bool

	valid bool // Validate has accepted it
}

// Result is what became of one [New].
type Result struct {
	Activity Activity
	// Repeat says that the idempotency key was known: Activity is the original, nothing was written.
	Repeat bool
	Err    error
}

// NewConversation is a conversation to be made.
type NewConversation struct {
	ChannelID uuid.UUID
	Status    string // "": active
	// At most one of the two: a participant of the channel, or a person to be found or made.
	ParticipantID *uuid.UUID
	Participant   *channel.Participant
	Metadata      json.RawMessage // an object; nil becomes {}
}

// Filter narrows a list of conversations; zero members don't.
type Filter struct {
	Status     string
	ChannelID  *uuid.UUID
	ExternalID string // any identity of the participant
}
