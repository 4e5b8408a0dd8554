package jobs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"

	"converger/internal/delivery"
	"converger/internal/postgres"
	"converger/internal/tenants"
)

// The queues.
const (
	queueLanes       = "lanes"
	queueInbound     = "inbound"
	queueMaintenance = "maintenance"
)

const (
	// fetchCooldown is the least time between two fetches of a queue. River's default of 100 ms is most of the time from
	// insert to work.
	fetchCooldown = 5 * time.Millisecond
	// fetchPoll is the longest: a notification that River suppressed, or that came before a commit, costs at most this.
	fetchPoll            = 50 * time.Millisecond
	fetchPollMaintenance = time.Second

	// jobTimeout is longer than a lane's lease: a lane that takes longer has lost it.
	jobTimeout = time.Minute
	// rescueAfter is when a job whose worker died may run again. Lanes heal by their lease, long before.
	rescueAfter = 3 * time.Minute

	// Rows of finished jobs are kept for a look only; thousands come every second.
	keepCompleted = 15 * time.Second
	keepFailed    = time.Hour
)

// Deliverer is what jobs needs of [delivery.Service].
type Deliverer interface {
	Work(ctx context.Context, job delivery.LaneJob) error
	GiveUpUncertainAllTenants(ctx context.Context) (int, error)
}

// InboundProcessor works a stored inbound event; the service of package inbound is one. It tolerates events that were
// processed already. An error means that it is to be tried again.
type InboundProcessor interface {
	Process(ctx context.Context, tenant tenants.ID, eventID uuid.UUID) error
}

// SessionRemover removes what is left of sign-ins that have ended; the sessions of package auth are one.
type SessionRemover interface {
	// RemoveEndedAllTenants removes a batch and returns how many rows it had; 0: nothing is left.
	RemoveEndedAllTenants(ctx context.Context) (int, error)
}

// Options of a [Client]. Zero members take the default in brackets.
type Options struct {
	// Workers is the number of lane jobs, of up to 8 lanes, that this node works at once; an attempt that waits holds no
	// database connection [500].
	Workers int
	// InboundWorkers is the number of inbound events that this node works at once; they do hold connections [50].
	InboundWorkers int
	// SoftStop is how long running jobs may go on after Run's context has ended, HardStop how long they may take to return
	// once they are cancelled [20 s, 5 s].
	SoftStop, HardStop time.Duration
	// Sessions is asked once an hour to remove what has ended; nil: nobody is.
	Sessions SessionRemover
	// InsertOnly makes a client that queues jobs for others and works none; Run then only waits.
	InsertOnly bool
	// Logger takes errors and panics of jobs and warnings of River; nil: nothing is logged.
	Logger *slog.Logger
}

// Client inserts and works jobs. Its methods are safe for concurrent use.
type Client struct {
	pool      *pgxpool.Pool
	river     *river.Client[pgx.Tx]
	deliverer Deliverer
	inbound   InboundProcessor
	o         Options
	log       *slog.Logger
	started   group         // lanes worked without a job
	pokes     chan struct{} // capacity 1
	lanes     poker
	events    poker
}

var _ delivery.Jobs = (*Client)(nil)

// New makes a client; it starts nothing, see Run. SetInbound must be called before Run, unless the client only inserts;
// then deliverer may be nil too.
func New(pool *pgxpool.Pool, deliverer Deliverer, o Options) (*Client, error) {
	o.Workers = cmp.Or(o.Workers, 500)
	o.InboundWorkers = cmp.Or(o.InboundWorkers, 50)
	o.SoftStop = cmp.Or(o.SoftStop, 20*time.Second)
	o.HardStop = cmp.Or(o.HardStop, 5*time.Second)
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	c := &Client{pool: pool, deliverer: deliverer, o: o, log: log, pokes: make(chan struct{}, 1)}
	c.lanes.queue, c.events.queue = queueLanes, queueInbound
	config := &river.Config{
		FetchCooldown:               fetchCooldown,
		FetchPollInterval:           fetchPoll,
		JobTimeout:                  jobTimeout,
		RescueStuckJobsAfter:        rescueAfter,
		CompletedJobRetentionPeriod: keepCompleted,
		CancelledJobRetentionPeriod: keepFailed,
		DiscardedJobRetentionPeriod: keepFailed,
		Logger:                      slog.New(quiet{log.Handler()}),
		ErrorHandler:                errorLog{log},
	}
	if !o.InsertOnly {
		config.Workers = river.NewWorkers()
		river.AddWorker(config.Workers, &laneWorker{c: c})
		river.AddWorker(config.Workers, &inboundWorker{c: c})
		addMaintenance(config, c)
		config.Queues = map[string]river.QueueConfig{
			queueLanes:       {MaxWorkers: o.Workers},
			queueInbound:     {MaxWorkers: o.InboundWorkers},
			queueMaintenance: {MaxWorkers: 2, FetchPollInterval: fetchPollMaintenance},
		}
	}
	var err error
	if c.river, err = river.NewClient(riverpgxv5.New(pool), config); err != nil {
		return nil, fmt.Errorf("set up the job queue: %w", err)
	}
	return c, nil
}

// SetInbound sets who works inbound events.
func (c *Client) SetInbound(p InboundProcessor) { c.inbound = p }

// ErrNotStopped says that jobs were still running when Run gave up waiting for them. Their leases protect what they do.
var ErrNotStopped = errors.New("jobs: some did not stop in time")

// Run works jobs, and lanes that are started here, until ctx ends, then stops: no new ones, SoftStop for those that run,
// HardStop after they are cancelled. It fails when the database cannot be reached at its start, and with ErrNotStopped. It
// can run once.
func (c *Client) Run(ctx context.Context) error {
	if c.o.InsertOnly {
		<-ctx.Done()
		return nil
	}
	// River cancels every job when the context that it was started with ends; stopping is done in steps instead.
	work, cancelLanes := context.WithCancel(context.WithoutCancel(ctx))
	defer cancelLanes()
	if err := c.river.Start(context.WithoutCancel(ctx)); err != nil {
		return fmt.Errorf("start the job queue: %w", err)
	}
	c.started.open(work)
	c.pokeLoop(ctx)

	lanes := c.started.shut()
	stop := func(patience time.Duration, stop func(context.Context) error) error {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
		defer cancel()
		err := stop(ctx)
		select {
		case <-lanes:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	if stop(c.o.SoftStop, c.river.Stop) == nil {
		return nil
	}
	c.log.Warn("jobs did not end by themselves; cancelling them", "waited", c.o.SoftStop)
	cancelLanes()
	if err := stop(c.o.HardStop, c.river.StopAndCancel); err != nil {
		return fmt.Errorf("%w: %w", ErrNotStopped, err)
	}
	return nil
}

// lanesPerJob bounds the lanes of one job. A job costs the database as much as a delivery does; a larger one would be worked
// by one node while others stand idle.
const lanesPerJob = 8

// laneArgs is the stored form of a lane job.
type laneArgs struct {
	Lanes []delivery.LaneJob `json:"lanes"`
}

// Kind implements river.JobArgs.
func (laneArgs) Kind() string { return "lane" }

// InsertOpts implements river.JobArgsWithInsertOpts.
func (laneArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: queueLanes, MaxAttempts: 1}
}

// InsertLanesTx implements [delivery.Jobs].
func (c *Client) InsertLanesTx(ctx context.Context, tx pgx.Tx, lanes []delivery.LaneJob) error {
	var params []river.InsertManyParams
	for some := range slices.Chunk(lanes, lanesPerJob) {
		params = append(params, river.InsertManyParams{Args: laneArgs{some}})
	}
	if _, err := c.river.InsertManyFastTx(ctx, tx, params); err != nil {
		return fmt.Errorf("queue %d lanes: %w", len(lanes), err)
	}
	return nil
}

type laneWorker struct {
	river.WorkerDefaults[laneArgs]
	c *Client
}

// Work implements river.Worker: the job's lanes are worked at once, so that none waits for another's receiver.
func (w *laneWorker) Work(ctx context.Context, job *river.Job[laneArgs]) error {
	errs := make([]error, len(job.Args.Lanes))
	var wg sync.WaitGroup
	for i, lane := range job.Args.Lanes {
		wg.Go(func() { errs[i] = w.c.workLane(ctx, lane) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// workLane works a lane in a goroutine where River's recovery does not reach.
func (c *Client) workLane(ctx context.Context, lane delivery.LaneJob) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v\n%s", v, debug.Stack())
		}
	}()
	return c.deliverer.Work(ctx, lane)
}

// StartLanes implements [delivery.Jobs].
func (c *Client) StartLanes(lanes []delivery.LaneJob) bool {
	return c.started.start(len(lanes), func(ctx context.Context, i int) {
		ctx, cancel := context.WithTimeout(ctx, jobTimeout)
		defer cancel()
		if err := c.workLane(ctx, lanes[i]); err != nil {
			c.log.Error("work on a lane failed", "lane_id", lanes[i].LaneID,
				"database_unavailable", postgres.IsUnavailable(err), "error", err)
		}
	})
}

// group is work without a job that Run owns.
type group struct {
	mu  sync.Mutex
	ctx context.Context // that of Run, between open and shut; else nil
	wg  sync.WaitGroup
}

func (g *group) open(ctx context.Context) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ctx = ctx
}

// shut lets nothing start any more; what it returns is closed once everything has ended.
func (g *group) shut() (ended <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ctx = nil
	done := make(chan struct{})
	go func() { g.wg.Wait(); close(done) }()
	return done
}

// start calls do(0), …, do(n-1) at once, each in a goroutine, or returns false.
func (g *group) start(n int, do func(ctx context.Context, i int)) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ctx == nil {
		return false
	}
	ctx := g.ctx
	for i := range n {
		g.wg.Go(func() { do(ctx, i) })
	}
	return true
}

// inboundArgs is the stored form of an inbound job.
type inboundArgs struct {
	TenantID tenants.ID `json:"tenant_id"`
	EventID  uuid.UUID  `json:"event_id"`
	Again    uuid.UUID  `json:"again,omitzero"` // sets the job of a repeated run apart from one that is ending
}

// Kind implements river.JobArgs.
func (inboundArgs) Kind() string { return "inbound" }

// InsertOpts implements river.JobArgsWithInsertOpts: events that are queued again in case their job was lost get no second
// one.
func (inboundArgs) InsertOpts() river.InsertOpts {
	return river.InsertOpts{Queue: queueInbound, MaxAttempts: 10, UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: openStates}}
}

// openStates are those of jobs that will still run.
var openStates = []rivertype.JobState{
	rivertype.JobStateAvailable, rivertype.JobStatePending, rivertype.JobStateRunning,
	rivertype.JobStateRetryable, rivertype.JobStateScheduled,
}

// InsertInboundTx queues the work on a stored inbound event in the caller's transaction. The caller knows that the event
// needs work: where it has an open job already, that one is on its way out, its work done and its end not yet recorded.
func (c *Client) InsertInboundTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, eventID uuid.UUID) error {
	args := inboundArgs{TenantID: tenant, EventID: eventID}
	inserted, err := c.river.InsertTx(ctx, tx, args, nil)
	if err == nil && inserted.UniqueSkippedAsDuplicate {
		args.Again = uuid.New()
		_, err = c.river.InsertTx(ctx, tx, args, nil)
	}
	if err != nil {
		return fmt.Errorf("queue inbound event: %w", err)
	}
	return nil
}

type inboundWorker struct {
	river.WorkerDefaults[inboundArgs]
	c *Client
}

// Work implements river.Worker.
func (w *inboundWorker) Work(ctx context.Context, job *river.Job[inboundArgs]) error {
	return w.c.inbound.Process(ctx, job.Args.TenantID, job.Args.EventID)
}

// NextRetry implements river.Worker: 1, 2, 4, … seconds, at most a minute.
func (w *inboundWorker) NextRetry(job *river.Job[inboundArgs]) time.Time {
	return time.Now().Add(min(time.Second<<min(max(job.Attempt-1, 0), 6), time.Minute))
}
