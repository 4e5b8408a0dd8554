package delivery

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/singleflight"

	"converger/internal/activity"
	"converger/internal/channel"
)

// Options of a [Service]. Zero members take the default in brackets; durations below those of production are for tests.
type Options struct {
	// Workers is how many lanes may be worked at once over all nodes; a tenant gets at most 80 % of them divided by the
	// active tenants, so that 20 % stay free for who comes next [500].
	Workers int
	// Lease is how long a worker may hold a lane. It is longer than WorkFor, MaxAttempt and LeaseMargin together [45 s].
	Lease time.Duration
	// WorkFor is how long a worker goes on starting attempts of one lane before others get their turn [5 s].
	WorkFor time.Duration
	// MaxAttempt bounds every attempt, whatever the channel says [30 s].
	MaxAttempt time.Duration
	// LeaseMargin is what must be left of a lease after the longest attempt that is about to start: the time to record
	// it [5 s].
	LeaseMargin time.Duration
	// Tick is the longest time between two looks for due lanes [250 ms].
	Tick time.Duration
	// BreakAfter is how many attempts for a channel have to fail one after the other, on one node, to open its circuit; those
	// whose fault is the message's do not count [5].
	BreakAfter int
	// Cooldown is how long an open circuit lets nothing through; then one lane at a time tries [30 s].
	Cooldown time.Duration
	// UncertainFor is how long an uncertain delivery waits for a receipt [10 min].
	UncertainFor time.Duration
	// Pacer is the outbound budget of channels; nil: none.
	Pacer Pacer
	// Registerer takes the metrics; nil: they are not exported.
	Registerer prometheus.Registerer
	// Logger takes what operators should know; nil: nothing is logged.
	Logger *slog.Logger
}

// Service decides what is delivered where, hands lanes to workers, works them and keeps the state of deliveries.
// All methods are safe for concurrent use.
type Service struct {
	pool      *pgxpool.Pool
	channels  Channels
	registry  *channel.Registry
	directory Directory
	o         Options
	log       *slog.Logger
	m         *metrics

	jobs   Jobs
	append Appender

	readings chan *reading // to the readers
	outcomes chan *outcome // to the writers
	stopped  chan struct{} // closed once readers and writers have gone
	poke     chan struct{} // to the dispatcher; capacity 1

	breaker breaker
	counts  singleflight.Group // of parked deliveries

	running atomic.Int64              // lanes this node is working
	overdue atomic.Int64              // ns that the first due lane has waited at the last look
	behind  atomic.Pointer[tenantSet] // who had more due lanes at the last look than could be handed over; nil: nobody

	dispatching sync.Mutex // guards turns: one look at a time
	turns       turns
	expired     time.Time // when expired leases were looked for last
}

var (
	_ activity.Targets  = (*Service)(nil)
	_ activity.Enqueuer = (*Service)(nil)
)

// NewService makes a service; it starts nothing, see Run. SetJobs and SetAppender must be called before Run and before
// the first EnqueueTx or Work: they break the circle between the packages that hold each other up.
func NewService(pool *pgxpool.Pool, channels Channels, registry *channel.Registry, directory Directory, o Options) *Service {
	o.Workers = cmp.Or(o.Workers, 500)
	o.Lease = cmp.Or(o.Lease, 45*time.Second)
	o.WorkFor = cmp.Or(o.WorkFor, 5*time.Second)
	o.MaxAttempt = cmp.Or(o.MaxAttempt, 30*time.Second)
	o.LeaseMargin = cmp.Or(o.LeaseMargin, 5*time.Second)
	o.Tick = cmp.Or(o.Tick, 250*time.Millisecond)
	o.BreakAfter = cmp.Or(o.BreakAfter, 5)
	o.Cooldown = cmp.Or(o.Cooldown, 30*time.Second)
	o.UncertainFor = cmp.Or(o.UncertainFor, 10*time.Minute)
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	s := &Service{
		pool: pool, channels: channels, registry: registry, directory: directory, o: o, log: log,
		readings: make(chan *reading, 1024),
		outcomes: make(chan *outcome, 1024),
		stopped:  make(chan struct{}),
		poke:     make(chan struct{}, 1),
	}
	s.m = newMetrics(o.Registerer, s)
	return s
}

// SetJobs sets the queue of the workers.
func (s *Service) SetJobs(j Jobs) { s.jobs = j }

// SetAppender sets how replies of adapters become activities.
func (s *Service) SetAppender(a Appender) { s.append = a }

// Run reads and writes for the workers and hands due lanes to them until ctx ends. Workers that still wait for their lane or
// their outcome then get it: Run returns when everything that was handed to it is done, or could not be. Stop the workers
// first. It can run once. Its error is always nil: what fails is logged, counted and tried again.
func (s *Service) Run(ctx context.Context) error {
	defer close(s.stopped)
	var wg sync.WaitGroup
	s.serveWorkers(ctx, &wg)
	s.dispatchLoop(ctx)
	wg.Wait()
	return nil
}

// serveWorkers starts the readers and writers.
func (s *Service) serveWorkers(ctx context.Context, wg *sync.WaitGroup) {
	for range laneReaders {
		wg.Go(func() {
			inGroups(ctx, s.readings, laneGroup, func(g []*reading) { s.readGroup(ctx, g) })
		})
	}
	for range outcomeWriters {
		wg.Go(func() {
			inGroups(ctx, s.outcomes, outcomeGroup, func(g []*outcome) { s.writeGroup(ctx, g) })
		})
	}
}
