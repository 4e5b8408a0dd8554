package tenants

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	"golang.org/x/time/rate"
)

const (
	defaultTTL       = 30 * time.Second
	defaultPollEvery = 250 * time.Millisecond

	// versionTimeout bounds the poll's one-row query, connecting included; readTimeout bounds the reading of rows, at the
	// first load perhaps hundreds of thousands.
	versionTimeout = 2 * time.Second
	readTimeout    = 30 * time.Second

	// The budget of early polls, and how long a caller without one waits for a poll that is under way anyway.
	earlyPollsPerSecond = 1
	earlyPollBurst      = 2
	missWait            = 250 * time.Millisecond

	// listenRetry is the pause before the connection for notifications is opened anew; polls do the work meanwhile.
	listenRetry = time.Second
)

// DirectoryOptions of a [Directory]; zero values take the defaults.
type DirectoryOptions struct {
	TTL        time.Duration         // how long the set counts as fresh after a successful poll; 30 s
	PollEvery  time.Duration         // 250 ms
	Derive     Deriver               // nil: entries have no Derived
	Registerer prometheus.Registerer // nil: no metrics
	Logger     *slog.Logger          // nil: [slog.Default]
}

// DirectoryState says how fresh a directory is.
type DirectoryState struct {
	Version     int64     // configuration version of the set; 0 before the first load
	LoadedAt    time.Time // when rows were last read
	RefreshedAt time.Time // when the set was last known to be current
	Stale       bool      // RefreshedAt is older than the TTL, or nothing was loaded yet
	Err         error     // of the last poll; nil when it succeeded
}

// Directory holds in memory what requests are judged by before any database work: tenants, API keys, channels, operator
// tokens and routing rules of all tenants, and address ranges. Lookups take no lock and allocate nothing; all methods are safe for concurrent use.
// Entries are shared and must not be changed.
//
// It follows the database by configuration version: a poll reads the version and, when it has moved, the rows changed
// since, in one snapshot. Versions become visible in their own order (see [BumpTx]), so nothing is missed. The whole set
// is read at the start, when the version went back, and when it moved during an outage: the database may have been
// restored from a backup, and then rows differ that no version tells of.
type Directory struct {
	pool      *pgxpool.Pool
	ttl       time.Duration
	pollEvery time.Duration
	derive    Deriver
	log       *slog.Logger
	budget    *rate.Limiter

	set   atomic.Pointer[entrySet]
	state atomic.Pointer[DirectoryState] // Stale is computed by State
	// suspect is set when the database was lost from sight: it may come back as another one.
	suspect atomic.Bool

	mu     sync.Mutex
	flying *poll // the poll under way; its caller alone writes set, state and outage
	outage time.Time

	reloads    prometheus.Counter
	earlyPolls prometheus.Counter
}

// poll is one look at the database, shared by all who wait for it.
type poll struct {
	done chan struct{} // closed when err is set
	err  error
}

// NewDirectory makes an empty directory. Nothing is read before [Directory.Load] or [Directory.Run].
func NewDirectory(pool *pgxpool.Pool, o DirectoryOptions) *Directory {
	metrics := promauto.With(o.Registerer)
	d := &Directory{
		pool:      pool,
		ttl:       cmp.Or(o.TTL, defaultTTL),
		pollEvery: cmp.Or(o.PollEvery, defaultPollEvery),
		derive:    o.Derive,
		log:       cmp.Or(o.Logger, slog.Default()),
		budget:    rate.NewLimiter(earlyPollsPerSecond, earlyPollBurst),
		reloads: metrics.NewCounter(prometheus.CounterOpts{Name: "converger_directory_reloads_total",
			Help: "Times that changed configuration was read into memory."}),
		earlyPolls: metrics.NewCounter(prometheus.CounterOpts{Name: "converger_directory_early_polls_total",
			Help: "Polls made at once because a request brought an unknown key or id."}),
	}
	d.set.Store(newEntrySet(changedRows{}))
	d.state.Store(&DirectoryState{})
	metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "converger_directory_age_seconds",
		Help: "Time since the configuration in memory was last known to be current; +Inf before the first load."}, d.age)
	for kind, size := range map[string]func(*entrySet) int{
		"tenant":         func(s *entrySet) int { return s.tenants.len() },
		"api_key":        func(s *entrySet) int { return s.keys.len() },
		"channel":        func(s *entrySet) int { return s.channels.len() },
		"operator_token": func(s *entrySet) int { return s.operators.len() },
		"routing_rule":   func(s *entrySet) int { return s.rules.len() },
		"address_range":  func(s *entrySet) int { return s.addresses.Load().len() },
	} {
		metrics.NewGaugeFunc(prometheus.GaugeOpts{Name: "converger_directory_entries",
			Help: "Entries of the configuration in memory.", ConstLabels: prometheus.Labels{"kind": kind}},
			func() float64 { return float64(size(d.set.Load())) })
	}
	return d
}

// Key finds an API key by the hash that [ParseKey] gives. The caller still has to ask [KeyEntry.Usable] and the tenant's
// status.
func (d *Directory) Key(hash [32]byte) (*KeyEntry, bool) { return d.set.Load().keys.get(hash) }

// Tenant finds a tenant, also a suspended one.
func (d *Directory) Tenant(id ID) (*TenantEntry, bool) { return d.set.Load().tenants.get(id) }

// Channel finds a channel, of whatever tenant, also an inactive one.
func (d *Directory) Channel(id uuid.UUID) (*ChannelEntry, bool) { return d.set.Load().channels.get(id) }

// ChannelBySecret finds the channel that has this secret ([secrets.Hash] of it), or had it and still honours it.
func (d *Directory) ChannelBySecret(hash [32]byte) (*ChannelEntry, bool) {
	set := d.set.Load()
	if c, ok := set.secrets.get(hash); ok {
		return c, true
	}
	if c, ok := set.previous.get(hash); ok && time.Now().Before(c.PreviousUntil) {
		return c, true
	}
	return nil, false
}

// OperatorToken finds a token of the management API by the hash that [ParseOperatorToken] gives. The caller still has to
// ask [OperatorEntry.Usable].
func (d *Directory) OperatorToken(hash [32]byte) (*OperatorEntry, bool) {
	return d.set.Load().operators.get(hash)
}

// Routes returns the channels to which enabled routing rules copy what happens in a channel's conversations: each once,
// never the channel itself, in no order that means anything. Whether they exist, send, or are switched on is for the caller
// to ask [Directory.Channel]. The slice is shared and must not be changed.
func (d *Directory) Routes(source uuid.UUID) []uuid.UUID {
	if r, ok := d.set.Load().routes.get(source); ok {
		return r.targets
	}
	return nil
}

// RangeKind tells what is done with the requests of an address: the kind of the range with the longest prefix that has it
// and has not expired, "" when none does. IPv4-mapped IPv6 is to be given as IPv4.
func (d *Directory) RangeKind(addr netip.Addr, now time.Time) RangeKind {
	return d.set.Load().addresses.Load().kind(addr, now)
}

// State says how fresh the directory is.
func (d *Directory) State() DirectoryState {
	s := *d.state.Load()
	s.Stale = time.Since(s.RefreshedAt) > d.ttl
	return s
}

func (d *Directory) age() float64 {
	if at := d.state.Load().RefreshedAt; !at.IsZero() {
		return time.Since(at).Seconds()
	}
	return math.Inf(1)
}

// Load fills the directory; a node is not ready before it has succeeded. An empty database is a success.
func (d *Directory) Load(ctx context.Context) error {
	if err := d.Refresh(ctx); err != nil {
		return fmt.Errorf("load directory: %w", err)
	}
	return nil
}

// Refresh returns when everything committed before the call is in the directory, or with the error of the poll or of
// ctx. Callers that come together share polls. The end of ctx does not stop a poll that others may wait for.
func (d *Directory) Refresh(ctx context.Context) error {
	return d.refresh(ctx, context.WithoutCancel(ctx))
}

// Miss is to be called after a lookup found nothing, and reports whether it is worth another one: a key made a moment
// ago on another node may not have arrived here. A few calls a second poll the database; others join a poll that is
// under way, for a short time at most; all the rest are told no at once, as is everybody while the database is away.
func (d *Directory) Miss(ctx context.Context) bool {
	if d.state.Load().Err != nil {
		return false
	}
	if d.budget.Allow() {
		d.earlyPolls.Inc()
		return d.Refresh(ctx) == nil
	}
	d.mu.Lock()
	p := d.flying
	d.mu.Unlock()
	if p == nil {
		return false
	}
	enough := time.NewTimer(missWait)
	defer enough.Stop()
	select {
	case <-p.done:
		return p.err == nil
	case <-enough.C:
	case <-ctx.Done():
	}
	return false
}

// Run keeps the directory current until ctx ends, then returns nil. Changes arrive with their notification, else with
// the next poll. It outlives any loss of the database.
func (d *Directory) Run(ctx context.Context) error {
	hints := make(chan struct{}, 1)
	var listener sync.WaitGroup
	listener.Go(func() { d.listen(ctx, hints) })
	defer listener.Wait()
	tick := time.NewTicker(d.pollEvery)
	defer tick.Stop()
	for {
		_ = d.refresh(ctx, ctx) // the outcome is in the state and, when it changes, in the log
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-hints:
		}
	}
}

// refresh makes a poll under pollCtx, or shares one that began after the call.
func (d *Directory) refresh(ctx, pollCtx context.Context) error {
	for beganAfterUs := false; ; beganAfterUs = true {
		d.mu.Lock()
		p := d.flying
		if p == nil {
			p = &poll{done: make(chan struct{}), err: errors.New("poll did not end")}
			d.flying = p
			d.mu.Unlock()
			defer func() { // also when a Deriver panics
				d.mu.Lock()
				d.flying = nil
				d.mu.Unlock()
				close(p.done)
			}()
			p.err = d.poll(pollCtx)
			return p.err
		}
		d.mu.Unlock()
		select {
		case <-p.done:
			if beganAfterUs {
				return p.err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// poll looks at the database once and records the outcome. Only one runs at a time.
func (d *Directory) poll(ctx context.Context) error {
	began := time.Now()
	suspect := d.suspect.Swap(false)
	next := *d.state.Load()
	version, loaded, err := d.catchUp(ctx, next.Version, suspect)
	if err != nil && ctx.Err() != nil && errors.Is(ctx.Err(), context.Canceled) {
		return err // we are told to stop: it says nothing about the database
	}
	next.Err = err
	if err != nil {
		d.suspect.Store(true)
		if d.outage.IsZero() {
			d.outage = began
			d.log.Warn("configuration can't be refreshed; the last good set stays in force",
				slog.Bool("outage", true), slog.Int64("version", next.Version), slog.Any("error", err))
		}
	} else {
		next.Version, next.RefreshedAt = version, began
		if loaded {
			next.LoadedAt = began
			d.reloads.Inc()
		}
		if !d.outage.IsZero() {
			d.log.Warn("configuration is refreshed again", slog.Bool("outage", false), slog.Int64("version", version), slog.Duration("after", time.Since(d.outage)))
			d.outage = time.Time{}
		}
	}
	d.state.Store(&next)
	return err
}

// catchUp brings the set from version own to the database's, and reports whether rows were read for it.
func (d *Directory) catchUp(ctx context.Context, own int64, suspect bool) (version int64, loaded bool, err error) {
	if version, err = d.readVersion(ctx); err != nil {
		return 0, false, err
	}
	if version == own {
		return own, false, nil
	}
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	if own != 0 && !suspect {
		rows, err := readChanges(ctx, d.pool, own)
		if err != nil {
			return 0, false, fmt.Errorf("read changed configuration: %w", err)
		}
		if rows.version > own { // else it went back
			d.set.Load().apply(rows, d.derive)
			return rows.version, true, nil
		}
	}
	rows, err := readChanges(ctx, d.pool, 0)
	if err != nil {
		return 0, false, fmt.Errorf("read configuration: %w", err)
	}
	// Built aside: until it is complete, the old set answers.
	set := newEntrySet(rows)
	set.apply(rows, d.derive)
	d.set.Store(set)
	return rows.version, true, nil
}

func (d *Directory) readVersion(ctx context.Context) (version int64, err error) {
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	if err := d.pool.QueryRow(ctx, versionQuery).Scan(&version); err != nil {
		return 0, fmt.Errorf("read configuration version: %w", err)
	}
	return version, nil
}

// listen turns notifications into hints until ctx ends.
func (d *Directory) listen(ctx context.Context, hints chan<- struct{}) {
	for {
		err := d.listenOnce(ctx, hints)
		if ctx.Err() != nil {
			return
		}
		// No more than this: without notifications polls bring everything a little later, and they report outages.
		d.log.Debug("no notifications of configuration changes for the moment", "err", err)
		select {
		case <-ctx.Done():
			return
		case <-time.After(listenRetry):
		}
	}
}

func (d *Directory) listenOnce(ctx context.Context, hints chan<- struct{}) error {
	// A connection of its own: one of the pool's, kept for ever, would be missing from it.
	conn, err := pgx.ConnectConfig(ctx, d.pool.Config().ConnConfig.Copy())
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	defer func() {
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = conn.Close(closing)
	}()
	if _, err := conn.Exec(ctx, "LISTEN "+notifyChannel); err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	hint(hints) // what changed before this moment was not notified to us
	for {
		n, err := conn.WaitForNotification(ctx)
		if err != nil {
			d.suspect.Store(true)
			return fmt.Errorf("wait for notification: %w", err)
		}
		if version, err := strconv.ParseInt(n.Payload, 10, 64); err == nil && version == d.state.Load().Version {
			continue // our own change, already refreshed
		}
		hint(hints)
	}
}

func hint(hints chan<- struct{}) {
	select {
	case hints <- struct{}{}:
	default: // a poll is due already
	}
}
