package activity

import (
	"cmp"
	"context"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/tenants"
)

// Targets says which channels get an activity. It is asked inside the transaction, once for each activity, and answers
// from memory: no query, no lock held for long. It must be safe for concurrent use.
type Targets interface {
	// Targets returns the channels that get a, which was appended to a conversation of channel ch. It must not keep a.
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

// Enqueuer writes deliveries into the transaction of their activities. It must be safe for concurrent use.
type Enqueuer interface {
	// EnqueueTx writes what work needs. wake, which may be nil, is called after the commit and must not block; it is not
	// called when the transaction fails. The conversations are locked; EnqueueTx may lock lanes, and nothing that the
	// lock order puts before them.
	EnqueueTx(ctx context.Context, tx pgx.Tx, work []Work) (wake func(), err error)
}

// Options of a store. The zero value is usable.
type Options struct {
	MaxBatch     int           // activities in one transaction; 0 means 256
	Queue        int           // activities that may wait for a transaction; 0 means 4096
	Flushers     int           // transactions of Append at one time; 0 means 2
	LockTimeout  time.Duration // how long an item waits for a lock that another transaction holds; 0 means 2 s
	BatchTimeout time.Duration // how long a transaction may take, the wait for a connection included; 0 means 10 s
	DrainTimeout time.Duration // how long Run works on the queue after it was told to stop; 0 means 10 s
	// Broadcast gets the new activities of each transaction after its commit. Those of one conversation that this node
	// accepted through Append come in the order of their seq. It must not block and must not keep the slice. May be nil.
	Broadcast  func([]Activity)
	Registerer prometheus.Registerer // nil: metrics are counted but not exported
	Logger     *slog.Logger          // nil: slog.Default()
}

// Store keeps participants, conversations and activities. Every method takes the tenant first and finds only what is
// that tenant's; everything else is ErrNotFound. All methods are safe for concurrent use.
type Store struct {
	pool     *pgxpool.Pool
	targets  Targets
	enqueuer Enqueuer
	o        Options
	metrics  *metrics
	queue    *queue
	parking  parking
}

// NewStore makes a store. It starts nothing: what Append queues is written once [Store.Run] runs.
func NewStore(pool *pgxpool.Pool, targets Targets, enqueuer Enqueuer, o Options) *Store {
	o.MaxBatch = cmp.Or(o.MaxBatch, 256)
	o.Queue = cmp.Or(o.Queue, 4096)
	o.Flushers = cmp.Or(o.Flushers, 2)
	o.LockTimeout = cmp.Or(o.LockTimeout, 2*time.Second)
	o.BatchTimeout = cmp.Or(o.BatchTimeout, 10*time.Second)
	o.DrainTimeout = cmp.Or(o.DrainTimeout, 10*time.Second)
	o.Logger = cmp.Or(o.Logger, slog.Default())
	q := newQueue(o.Flushers, o.MaxBatch, o.Queue)
	return &Store{
		pool: pool, targets: targets, enqueuer: enqueuer, o: o,
		queue: q, metrics: newMetrics(o.Registerer, q.length),
	}
}
