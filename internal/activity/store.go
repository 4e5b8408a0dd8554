package activity

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// Targets says which channels get an activity. It is asked inside the transaction, once for each activity, and answers
// from memory: no query, no lock held for long.
type Targets interface {
	// Targets returns the channels that get a, which was appended to a conversation of channel ch. a is not to be kept.
	Targets(ch uuid.UUID, a *New) []Target
}

// Target is a channel that gets an activity.
type Target struct {
	ChannelID uuid.UUID
	Ordered   bool // in the order of the conversation
}

// Work is one delivery to be made.
type Work struct {
	TenantID       tenants.ID
	ChannelID      uuid.UUID // the target
	Ordered        bool
	ConversationID uuid.UUID
	ActivityID     uuid.UUID
	Seq            int64
}

// Enqueuer writes deliveries into the transaction of their activities.
type Enqueuer interface {
	// EnqueueTx writes what work needs. wake, which may be nil, is called after the commit and must not block; it is not
	// called when the transaction fails.
	EnqueueTx(ctx context.Context, tx pgx.Tx, work []Work) (wake func(), err error)
}

// Options of a store. The zero value is usable.
type Options struct {
	MaxBatch     int           // activities in one transaction, 256 when 0
	Queue        int           // activities that may wait, 4096 when 0
	Flushers     int           // transactions at one time, 2 when 0
	LockTimeout  time.Duration // how long one lock is waited for, 2 s when 0
	BatchTimeout time.Duration // how long one transaction may take, waiting for a connection included; 10 s when 0
	DrainTimeout time.Duration // how long Run works on the queue after it was told to stop; 10 s when 0
	// Broadcast gets the new activities of each transaction after its commit; those of a conversation come in the order
	// of their seq as far as one node accepted them. It must not block and must not keep the slice. May be nil.
	Broadcast  func([]Activity)
	Registerer prometheus.Registerer // nil: no metrics
	Logger     *slog.Logger          // nil: the default one
}

// Store keeps conversations, participants and activities. All methods are safe for concurrent use.
type Store struct{}

// NewStore makes a store. Append waits until Run is running.
func NewStore(pool *pgxpool.Pool, targets Targets, enqueuer Enqueuer, o Options) *Store { return &Store{} }

var errSoon = errors.New("activity: being written")

// Run commits what Append queues, until ctx is cancelled and the queue is empty or the drain time is over. It returns nil.
func (s *Store) Run(ctx context.Context) error { return errSoon }

// Append writes each of items in a transaction shared with other callers, and waits for the commit.
func (s *Store) Append(ctx context.Context, items []New) []Result { return nil }

// AppendTx appends in the caller's transaction.
func (s *Store) AppendTx(ctx context.Context, tx pgx.Tx, items []New) (_ []Result, after func(), _ error) {
	return nil, nil, errSoon
}

// Get returns one activity, or ErrNotFound.
func (s *Store) Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (Activity, error) {
	return Activity{}, errSoon
}

// List returns the activities of a conversation with a seq above afterSeq, oldest first, at most limit.
func (s *Store) List(ctx context.Context, tenant tenants.ID, conversation uuid.UUID, ch *uuid.UUID, afterSeq int64, limit int) (_ []Activity, hasMore bool, _ error) {
	return nil, false, errSoon
}

// CreateConversation makes a conversation; ErrNotFound when the channel or the participant is not there.
func (s *Store) CreateConversation(ctx context.Context, tenant tenants.ID, n NewConversation) (Conversation, error) {
	return Conversation{}, errSoon
}

// CreateConversationTx is CreateConversation in the caller's transaction.
func (s *Store) CreateConversationTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, n NewConversation) (Conversation, error) {
	return Conversation{}, errSoon
}

// GetConversation returns a conversation with its participant; ch, when set, is the channel it must belong to.
func (s *Store) GetConversation(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID) (Conversation, error) {
	return Conversation{}, errSoon
}

// ListConversations returns conversations newest first, those with an id below before (uuid.Nil: from the newest on).
func (s *Store) ListConversations(ctx context.Context, tenant tenants.ID, f Filter, before uuid.UUID, limit int) (_ []Conversation, hasMore bool, _ error) {
	return nil, false, errSoon
}

// Close closes a conversation; changed is false when it was closed before.
func (s *Store) Close(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID, reason string) (_ Conversation, changed bool, _ error) {
	return Conversation{}, false, errSoon
}

// Reopen is the reverse of Close.
func (s *Store) Reopen(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID, reason string) (_ Conversation, changed bool, _ error) {
	return Conversation{}, false, errSoon
}

// ResolveParticipantTx finds or makes the participant and locks its row until the end of the transaction.
func (s *Store) ResolveParticipantTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, p channel.Participant) (Participant, error) {
	return Participant{}, errSoon
}

// OpenConversationTx returns the newest active conversation of the participant, else a new one; its row is locked.
func (s *Store) OpenConversationTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, participant *uuid.UUID, idle time.Duration, metadata json.RawMessage) (_ Conversation, created bool, _ error) {
	return Conversation{}, false, errSoon
}

// Validate checks and normalises n; the error is a *fault.Invalid.
func Validate(n *New) error { return errSoon }

// Canonical is the activity as JSON.
func (a Activity) Canonical() []byte { return nil }

// Watermark is the position after seq, for [ParseWatermark].
func Watermark(seq int64) string { return "" }

// ParseWatermark reads a watermark.
func ParseWatermark(text string) (afterSeq int64, err error) { return 0, ErrBadWatermark }
