package delivery

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/tenants"
)

// Failures that callers tell apart.
var (
	// ErrNotFound says that the tenant has no such delivery.
	ErrNotFound = errors.New("delivery: not found")
	// ErrUnknownStatus says that a filter names a status that does not exist.
	ErrUnknownStatus = errors.New("delivery: unknown status")
)

// Status is where a delivery stands.
type Status string

// The statuses. A delivery moves forward only, by the table of [Service.ApplyReceiptsTx]; pending and uncertain are the
// two from which its lane or the clock moves it on.
const (
	StatusPending   Status = "pending"   // waits for its turn, its next attempt, or its channel
	StatusUncertain Status = "uncertain" // may have arrived; waits for a receipt and is never sent again by itself
	StatusSent      Status = "sent"      // the receiver took it
	StatusDelivered Status = "delivered" // by the provider's receipt
	StatusRead      Status = "read"      // by the provider's receipt
	StatusFailed    Status = "failed"    // for good; Reason says why

	// StatusPaused is what a pending delivery reads as while its channel's circuit is not closed (see [Circuit]). It is
	// never stored.
	StatusPaused Status = "paused"
)

// ParseStatus reads a status, or returns ErrUnknownStatus.
func ParseStatus(s string) (Status, error) {
	switch st := Status(s); st {
	case StatusPending, StatusPaused, StatusUncertain, StatusSent, StatusDelivered, StatusRead, StatusFailed:
		return st, nil
	}
	return "", ErrUnknownStatus
}

// The reasons of failed deliveries that are not those of a single attempt (see the Reason words of package channel).
const (
	// ReasonExhausted: every attempt that the channel's policy allows has failed.
	ReasonExhausted = "exhausted"
	// ReasonChannelDeleted: the channel was deleted before the delivery was made.
	ReasonChannelDeleted = "channel_deleted"
	// ReasonUnsupported: the channel's type or mode no longer delivers.
	ReasonUnsupported = "unsupported"
	// ReasonUncertain: nobody said within the given time whether the message had arrived.
	ReasonUncertain = "uncertain"
	// ReasonReceipt: the provider reported the failure later.
	ReasonReceipt = "receipt"
	// ReasonCrashed: the adapter panicked; a fault of this program.
	ReasonCrashed = "crashed"
	// ReasonReply: the message arrived and its reply could not be stored for now.
	ReasonReply = "reply"
)

// Delivery is the delivery of one activity to one channel.
type Delivery struct {
	TenantID          tenants.ID
	ID                uuid.UUID
	ActivityID        uuid.UUID
	ChannelID         uuid.UUID
	Status            Status
	Attempts          int
	NextAt            time.Time // of a pending one: not before; of an uncertain one: when it is given up
	Reason            string    // a stable word: why it failed or waits; "" for none
	LastError         string    // for people, without secrets; "" for none
	ProviderMessageID string    // "" for none
	SentAt            *time.Time
	DeliveredAt       *time.Time
	ReadAt            *time.Time
	RetryCount        int     // replays by hand
	RetriedBy         *string // who replayed it last
	RetriedAt         *time.Time
	InsertedAt        time.Time
	UpdatedAt         time.Time
	Activity          activity.Activity // what is delivered; ChannelID is not filled in
}

// Attempt is one attempt of a delivery.
type Attempt struct {
	ID         uuid.UUID
	Number     int                 // from 1
	Outcome    channel.OutcomeKind // what the attempt itself came to
	Reason     string              // "" for none
	StatusCode int                 // HTTP; 0 when there was no answer
	Error      string              // for people, without secrets; "" for none
	Response   string              // the beginning of the answer
	StartedAt  time.Time           // by the database's clock
	Duration   time.Duration       // whole milliseconds
}

// Filter narrows a list; the zero value takes everything.
type Filter struct {
	Status     Status // "" for every one
	ChannelID  *uuid.UUID
	ActivityID *uuid.UUID
	From, To   time.Time // of the last change, both inclusive; zero for open
}

// LaneJob asks a worker to work a lane. Its JSON form is stored in the queue and does not change.
type LaneJob struct {
	LaneID     uuid.UUID `json:"lane_id"`
	LeaseToken uuid.UUID `json:"lease_token"` // a worker whose token is not the lane's is late and does nothing
}

// Jobs hands lanes to workers; package jobs implements it. Its methods may be called from many goroutines.
type Jobs interface {
	// StartLanes has this node work lanes at once, without a job that another node could take. It does not block. It
	// returns false, and does nothing, when the node works no lanes or is stopping.
	StartLanes(lanes []LaneJob) bool
	// InsertLanesTx queues the jobs in the caller's transaction, in one round trip.
	InsertLanesTx(ctx context.Context, tx pgx.Tx, lanes []LaneJob) error
	// Poke tells the workers of this node, after the commit, that there may be jobs. It does not block.
	Poke()
}

// Appender appends activities and waits for the result; [activity.Store.Append] is one.
type Appender func(ctx context.Context, in []activity.New) []activity.Result

// Pacer books the moment of a channel's next message in its outbound budget (bucket channel_outbound).
type Pacer interface {
	// Reserve books the first free moment if it is at most maxWait away and returns how long to wait for it, 0 for now.
	// ok is false when it is further away: nothing is booked, and wait is how long until it might be worth asking again.
	// A channel without a limit is always free.
	Reserve(ctx context.Context, ch *channel.Channel, maxWait time.Duration) (wait time.Duration, ok bool)
}

// Channels gives channels with their secrets; [channel.Store] is one.
type Channels interface {
	// Current returns the channel at least as new as version, from memory where possible; channel.ErrNotFound when it is
	// deleted.
	Current(ctx context.Context, tenant tenants.ID, id uuid.UUID, version int64) (*channel.Channel, error)
}

// Directory knows the channels that exist and where routing rules lead, from memory; [tenants.Directory] is one.
type Directory interface {
	Channel(id uuid.UUID) (*tenants.ChannelEntry, bool)
	// Routes returns the distinct targets of the enabled routing rules of a source channel, without the source.
	Routes(source uuid.UUID) []uuid.UUID
}
