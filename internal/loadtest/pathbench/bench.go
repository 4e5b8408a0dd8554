package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/devpg"
	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/procstat"
	"converger/internal/loadtest/report"
	"converger/internal/loadtest/wire"
	"converger/internal/postgres"
)

// Names of rows, for --only.
const (
	rowAccept    = "accept"
	rowAccept32  = "accept32"
	rowBacklog   = "backlog"
	rowTogether  = "together"
	rowIdle      = "idle"
	rowNeighbour = "neighbour"
	rowKill      = "kill"
)

var rowNames = []string{rowAccept, rowAccept32, rowBacklog, rowTogether, rowIdle, rowNeighbour, rowKill}

const (
	perLane       = 10 // deliveries that a backlog has in each lane, at least
	idlePosts     = 300
	drainPatience = 2 * time.Minute
	warmUp        = time.Second
	slowAnswer    = 500 * time.Millisecond
	loopback      = "127.0.0.1:0"
	noisyLanes    = 200 // twice the deliveries that a channel may have in flight

	idleP50, idleP99 = 5 * time.Millisecond, 20 * time.Millisecond
)

type options struct {
	program string
	rounds  int
	seconds float64
	queued  int
	only    []string // none: all rows
}

func (o options) wants(rows ...string) bool {
	return len(o.only) == 0 || slices.ContainsFunc(rows, func(r string) bool { return slices.Contains(o.only, r) })
}

func (o options) span() time.Duration { return time.Duration(o.seconds * float64(time.Second)) }

// bench is a run with everything it has started.
type bench struct {
	o        options
	progress io.Writer
	began    time.Time
	machine  machine
	results  []*result

	hub        *hub.Process
	postgres   *devpg.Server
	db         *pgxpool.Pool // the hub's database
	fast, slow *wire.Receiver
	world      *world
	pgbench    *pgbench
	noPgbench  string
	river      *riverFloor

	queued  int64 // accepted with a delivery that has not been waited for
	arrived int64 // at the fast receiver, when queued was 0
}

func (b *bench) say(format string, args ...any) {
	fmt.Fprintf(b.progress, "[%5.1f s] %s\n", time.Since(b.began).Seconds(), fmt.Sprintf(format, args...))
}

func (b *bench) usage() procstat.Usage { return procstat.Read(b.hub.PID(), b.postgres.PID()) }

// spent says who used the processors since before, and for a rate how much each item took of ours; it remembers the
// share of strangers.
func (b *bench) spent(before procstat.Usage, rate float64) string {
	now := b.usage()
	s, ok := now.Since(before)
	if !ok {
		return ""
	}
	b.machine.Others = max(b.machine.Others, s.Others)
	if rate == 0 {
		return s.String()
	}
	return fmt.Sprintf("%s; %.0f µs of ours each", s, 1e6*s.Seconds/(rate*now.At.Sub(before.At).Seconds()))
}

// run does everything in dir and leaves nothing running. What was measured before an error is in results.
func (b *bench) run(ctx context.Context, dir, binDir, vendored string) (err error) {
	b.began, b.machine = time.Now(), machine{Machine: report.ThisMachine()}
	b.machine.Rounds, b.machine.Seconds = b.o.rounds, b.o.seconds
	found, err := devpg.Find(binDir, vendored)
	if err != nil {
		return err
	}
	bin := found[0].Dir // what devpg takes for an empty folder
	b.machine.Fsync = testFsync(ctx, bin, dir)
	pg, err := devpg.Start(ctx, devpg.Config{Dir: dir + "/postgres", BinDir: bin})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Stop(context.WithoutCancel(ctx))) }()
	b.postgres = pg
	if err := b.prepare(ctx, pg, bin, dir); err != nil {
		return err
	}
	defer b.close()
	return b.measure(ctx)
}

// prepare starts the hub and the receivers and makes the floors' databases.
func (b *bench) prepare(ctx context.Context, pg *devpg.Server, bin, dir string) (err error) {
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	admin, err := pgx.Connect(ctx, pg.URL())
	if err != nil {
		return err
	}
	defer func() { _ = admin.Close(context.WithoutCancel(ctx)) }()
	if err := admin.QueryRow(ctx, "SELECT 'Postgres ' || current_setting('server_version')").Scan(&b.machine.Postgres); err != nil {
		return err
	}
	database := func(name string) (string, error) {
		_, err := admin.Exec(ctx, "CREATE DATABASE "+name)
		return strings.Replace(pg.URL(), "/"+devpg.Name+"?", "/"+name+"?", 1), err
	}
	floors, err := database("pgbench_floor")
	if err != nil {
		return err
	}
	if b.pgbench, b.noPgbench, err = newPgbench(ctx, bin, dir, floors); err != nil {
		return err
	}
	if b.noPgbench != "" {
		b.say("%s; its rows have no ratio", b.noPgbench)
	}
	if b.o.wants(rowBacklog) {
		floors, err := database("river_floor")
		if err != nil {
			return err
		}
		if b.river, err = newRiverFloor(ctx, floors); err != nil {
			return err
		}
	}

	if b.db, err = postgres.Open(ctx, pg.URL(), postgres.Options{MaxConns: 2, AppName: "pathbench"}); err != nil {
		return err
	}
	if b.fast, err = wire.NewReceiver(ctx, loopback, 0); err != nil {
		return err
	}
	if b.slow, err = wire.NewReceiver(ctx, loopback, slowAnswer); err != nil {
		return err
	}
	if b.hub, err = hub.NewProcess(ctx, b.o.program, pg.URL(), dir); err != nil {
		return err
	}
	if b.machine.Version, err = b.hub.Run(ctx, "version"); err != nil {
		return err
	}
	if _, err := b.hub.Run(ctx, "migrate", "up"); err != nil {
		return err
	}
	if b.hub.Token, err = b.hub.Run(ctx, "operator", "create", "pathbench"); err != nil {
		return err
	}
	if err := b.hub.Start(ctx); err != nil {
		return err
	}
	if b.world, err = newWorld(ctx, b.hub, b.fast.URL(), b.slow.URL()); err != nil {
		return err
	}
	b.say("hub is ready: pid %d, %d tenants, %d conversations", b.hub.PID(), worldTenants+1,
		len(b.world.out.conversations)+len(b.world.in.conversations)+len(b.world.noisy.conversations))
	return nil
}

func (b *bench) close() {
	if b.hub != nil {
		b.hub.Stop()
	}
	for _, r := range []*wire.Receiver{b.fast, b.slow} {
		if r != nil {
			r.Close()
		}
	}
	if b.river != nil {
		b.river.close()
	}
	if b.db != nil {
		b.db.Close()
	}
}

func (b *bench) measure(ctx context.Context) error {
	for _, to := range [][]*conversation{b.world.in.conversations, b.world.out.conversations} {
		if _, err := b.accept(ctx, to, 32, warmUp); err != nil {
			return fmt.Errorf("warm up: %w", err)
		}
	}
	if err := b.drain(ctx); err != nil {
		return fmt.Errorf("warm up: %w", err)
	}
	if b.o.wants(rowIdle) {
		if err := b.idle(ctx); err != nil {
			return fmt.Errorf("idle: %w", err)
		}
	}
	if b.o.wants(rowAccept, rowAccept32, rowBacklog, rowTogether) {
		if err := b.inTurns(ctx); err != nil {
			return err
		}
	}
	if b.o.wants(rowNeighbour) {
		if err := b.neighbour(ctx); err != nil {
			return fmt.Errorf("neighbour: %w", err)
		}
	}
	if b.o.wants(rowKill) {
		if err := b.killed(ctx); err != nil {
			return fmt.Errorf("kill: %w", err)
		}
	}
	return nil
}

func (b *bench) add(r *result) *result {
	b.results = append(b.results, r)
	return r
}

// step measures one thing and says what came out and who used the processors.
func (b *bench) step(what string, measure func() (float64, error)) (float64, error) {
	before := b.usage()
	v, err := measure()
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	b.say("%-50s %6.0f/s  %s", what, v, b.spent(before, v))
	return v, nil
}

// inTurns measures the rates, each round beside its own floors.
func (b *bench) inTurns(ctx context.Context) error {
	const pgbenchFloor = "pgbench, single-row INSERT, 32 clients"
	besidePgbench := func(row, work string, target float64) *result {
		return &result{Row: row, Work: work, Beside: pgbenchFloor, Target: target, Missing: b.noPgbench}
	}
	accept := besidePgbench(rowAccept, "accepted over HTTP, 128 callers, one delivery each", 0.25)
	bare := besidePgbench(rowAccept, "accepted over HTTP, 128 callers, no delivery", 0)
	accept32 := besidePgbench(rowAccept32, "accepted over HTTP, 32 callers, one delivery each", 0.15)
	backlog := &result{Row: rowBacklog, Work: "deliveries of a backlog to a fast receiver", Beside: "River, no-op jobs", Target: 0.7}
	together64 := besidePgbench(rowTogether, "accepted and delivered together, 64 callers", 0.15)
	together256 := besidePgbench(rowTogether, "accepted and delivered together, 256 callers", 0.35)
	for _, r := range []*result{accept, bare, accept32, backlog, together64, together256} {
		if b.o.wants(r.Row) {
			b.add(r)
		}
	}
	accepting := func(r *result, to []*conversation, callers int, floor float64) error {
		v, err := b.step(r.Work, func() (float64, error) { return b.accept(ctx, to, callers, b.o.span()) })
		r.Rates, r.Floors = append(r.Rates, v), append(r.Floors, floor)
		return err
	}

	for round := range b.o.rounds {
		b.say("round %d of %d", round+1, b.o.rounds)
		if b.o.wants(rowAccept, rowAccept32, rowBacklog) {
			if err := b.hold(ctx, b.world.out.channels); err != nil {
				return err
			}
		}
		if b.o.wants(rowAccept, rowAccept32) {
			floor, err := b.inserting(ctx)
			if err != nil {
				return err
			}
			if b.o.wants(rowAccept) {
				if err := accepting(accept, b.world.out.conversations, 128, floor); err != nil {
					return err
				}
				if err := accepting(bare, b.world.in.conversations, 128, floor); err != nil {
					return err
				}
			}
			if b.o.wants(rowAccept32) {
				if err := accepting(accept32, b.world.out.conversations, 32, floor); err != nil {
					return err
				}
			}
		}
		if b.o.wants(rowBacklog) {
			if err := b.backlog(ctx, backlog); err != nil {
				return err
			}
		}
		if b.o.wants(rowAccept, rowAccept32, rowBacklog) {
			if err := b.release(ctx, b.world.out.channels); err != nil {
				return err
			}
			if err := b.drain(ctx); err != nil {
				return err
			}
		}
		if b.o.wants(rowTogether) {
			floor, err := b.inserting(ctx)
			if err != nil {
				return err
			}
			if err := b.together(ctx, together64, 64, floor); err != nil {
				return err
			}
			if err := b.together(ctx, together256, 256, floor); err != nil {
				return err
			}
		}
		for _, r := range b.results {
			r.judge()
		}
	}
	return nil
}

// inserting is the floor of accepting; 0 where there is no pgbench.
func (b *bench) inserting(ctx context.Context) (float64, error) {
	if b.pgbench == nil {
		return 0, nil
	}
	return b.step("floor: pgbench", func() (float64, error) { return b.pgbench.rate(ctx, b.o.span()) })
}

// accept returns how many activities a second were accepted.
func (b *bench) accept(ctx context.Context, to []*conversation, callers int, d time.Duration) (float64, error) {
	l := newLoad(b.hub.Addr(), callers)
	defer l.close()
	n, took, err := l.run(ctx, to, d, 0)
	if &to[0] == &b.world.out.conversations[0] {
		b.queued += n
	}
	return float64(n) / took.Seconds(), err
}

// backlog lets the held deliveries go and measures until the last one is recorded, beside River.
func (b *bench) backlog(ctx context.Context, r *result) error {
	if missing := int64(perLane*len(b.world.out.conversations)) - b.queued; missing > 0 {
		l := newLoad(b.hub.Addr(), 128)
		n, _, err := l.run(ctx, b.world.out.conversations, 0, missing)
		l.close()
		if b.queued += n; err != nil {
			return fmt.Errorf("fill the backlog: %w", err)
		}
	}
	n := b.queued
	v, err := b.step(fmt.Sprintf("backlog of %d deliveries in %d lanes", n, len(b.world.out.conversations)), func() (float64, error) {
		if err := b.release(ctx, b.world.out.channels); err != nil {
			return 0, err
		}
		if err := hub.Until(ctx, drainPatience, func() (bool, error) { return b.fast.Arrived() > b.arrived, nil }); err != nil {
			return 0, err
		}
		first, before := time.Now(), b.fast.Arrived()-b.arrived
		if err := b.drain(ctx); err != nil {
			return 0, err
		}
		return float64(n-before) / time.Since(first).Seconds(), nil
	})
	if err != nil {
		return err
	}
	floor, err := b.step("floor: River, no-op jobs", func() (float64, error) { return b.river.rate(ctx) })
	r.Rates, r.Floors = append(r.Rates, v), append(r.Floors, floor)
	return err
}

// together accepts and delivers at once: its rate is the lower of the two within the time.
func (b *bench) together(ctx context.Context, r *result, callers int, floor float64) error {
	v, err := b.step(r.Work, func() (float64, error) {
		start, before := time.Now(), b.fast.Arrived()
		accepted, err := b.accept(ctx, b.world.out.conversations, callers, b.o.span())
		delivered := float64(b.fast.Arrived()-before) / time.Since(start).Seconds()
		if err == nil {
			b.say("  %.0f/s accepted, %.0f/s delivered meanwhile", accepted, delivered)
		}
		return min(accepted, delivered), err
	})
	if err != nil {
		return err
	}
	r.Rates, r.Floors = append(r.Rates, v), append(r.Floors, floor)
	return b.drain(ctx)
}

// hold parks the channels' deliveries: they are queued and not handed to workers. It is the database's column that decides.
func (b *bench) hold(ctx context.Context, channels []string) error {
	_, err := b.db.Exec(ctx, "UPDATE channels SET hold_until = now() + interval '1 day' WHERE id = ANY ($1::text[]::uuid[])", channels)
	return err
}

func (b *bench) release(ctx context.Context, channels []string) error {
	_, err := b.db.Exec(ctx, "UPDATE channels SET hold_until = NULL WHERE id = ANY ($1::text[]::uuid[])", channels)
	return err
}

// drain waits until everything that was queued has arrived and is recorded.
func (b *bench) drain(ctx context.Context) error {
	err := hub.Until(ctx, drainPatience, func() (bool, error) { return b.fast.Arrived()-b.arrived >= b.queued, nil })
	if err == nil {
		err = b.idleLanes(ctx, b.world.out.channels)
	}
	if err != nil {
		return fmt.Errorf("%d of %d deliveries have arrived: %w", b.fast.Arrived()-b.arrived, b.queued, err)
	}
	b.queued, b.arrived = 0, b.fast.Arrived()
	return nil
}

// idleLanes waits until nothing of the channels is due or in a worker's hands.
func (b *bench) idleLanes(ctx context.Context, channels []string) error {
	return b.untilNone(ctx, `SELECT EXISTS (SELECT FROM lanes
		WHERE channel_id = ANY ($1::text[]::uuid[]) AND (next_at IS NOT NULL OR lease_token IS NOT NULL))`, channels)
}

func (b *bench) untilNone(ctx context.Context, query string, args ...any) error {
	return hub.Until(ctx, drainPatience, func() (bool, error) {
		var some bool
		err := b.db.QueryRow(ctx, query, args...).Scan(&some)
		return !some, err
	})
}

func (b *bench) timed(ctx context.Context, what string, n int) (p50, p99 time.Duration, err error) {
	before := b.usage()
	took, err := latencies(ctx, b.hub.Addr(), b.world.out.conversations, b.fast, n)
	if err != nil {
		return 0, 0, err
	}
	b.arrived += int64(len(took))
	p50, p99 = percentile(took, 50), percentile(took, 99)
	b.say("%-36s p50 %.1f ms, p99 %.1f ms  %s", what, ms(p50), ms(p99), b.spent(before, 0))
	return p50, p99, nil
}

func (b *bench) idle(ctx context.Context) error {
	p50, p99, err := b.timed(ctx, "idle", idlePosts)
	if err != nil {
		return err
	}
	met := p50 <= idleP50 && p99 <= idleP99
	b.add(&result{
		Row: rowIdle, Work: "idle, post to first attempt, p50 / p99",
		Measured: fmt.Sprintf("%.1f / %.1f ms", ms(p50), ms(p99)),
		Aim:      fmt.Sprintf("≤ %.0f / ≤ %.0f ms", ms(idleP50), ms(idleP99)), Met: &met,
		Details: map[string]any{"p50_ms": ms(p50), "p99_ms": ms(p99), "posts": idlePosts},
	})
	return nil
}

// neighbour measures a tenant's latency before, while and after another one's deliveries queue up at a slow endpoint. What
// before and after differ by is noise.
func (b *bench) neighbour(ctx context.Context) error {
	before50, before99, err := b.timed(ctx, "neighbour: alone, before", idlePosts)
	if err != nil {
		return err
	}
	l := newLoad(b.hub.Addr(), 128)
	n, took, err := l.run(ctx, b.world.noisy.conversations, 0, int64(b.o.queued))
	l.close()
	if err != nil {
		return fmt.Errorf("queue up: %w", err)
	}
	b.say("neighbour: %d queued in %.1f s to an endpoint that takes %s", n, took.Seconds(), slowAnswer)
	beside50, beside99, err := b.timed(ctx, "neighbour: beside the queue", idlePosts)
	if err != nil {
		return err
	}
	arrived := b.slow.Arrived()
	if arrived == n {
		return errors.New("the queue was empty before the measurement ended: queue more")
	}
	if err := b.hold(ctx, b.world.noisy.channels); err != nil {
		return err
	}
	if err := b.untilNone(ctx, `SELECT EXISTS (SELECT FROM lanes WHERE channel_id = ANY ($1::text[]::uuid[])
		AND lease_token IS NOT NULL)`, b.world.noisy.channels); err != nil {
		return fmt.Errorf("stop the queue: %w", err)
	}
	after50, after99, err := b.timed(ctx, "neighbour: alone, after", idlePosts)
	if err != nil {
		return err
	}
	// p99 of 300 is the third worst: it needs a wider margin.
	met := beside50 <= max(before50, after50)*5/4+time.Millisecond && beside99 <= max(before99, after99)*3/2+5*time.Millisecond
	b.add(&result{
		Row: rowNeighbour, Work: fmt.Sprintf("post to first attempt beside a tenant with %d queued to a slow endpoint, p50 / p99", n),
		Measured: fmt.Sprintf("%.1f / %.1f ms", ms(beside50), ms(beside99)),
		Beside:   "the same without it, before and after",
		Floor:    fmt.Sprintf("%.1f / %.1f and %.1f / %.1f ms", ms(before50), ms(before99), ms(after50), ms(after99)),
		Aim:      "no worse than noise", Met: &met,
		Note: "noise is taken as 1.25 times the worse p50 and 1 ms, 1.5 times the worse p99 and 5 ms",
		Details: map[string]any{"p50_ms": ms(beside50), "p99_ms": ms(beside99), "queued": n, "queue_worked_meanwhile": arrived,
			"before_p50_ms": ms(before50), "before_p99_ms": ms(before99), "after_p50_ms": ms(after50), "after_p99_ms": ms(after99)},
	})
	return nil
}

const (
	killCallers       = 64
	killConversations = 200
	retryPause        = 20 * time.Millisecond
	// killPatience is longer than the lease of a lane whose worker died (45 s).
	killPatience = 90 * time.Second
)

// witness is what the callers of the kill row were told and what the receiver saw.
type witness struct {
	mu    sync.Mutex
	acked map[string]*conversation  // by idempotency key
	came  map[string]map[string]int // key → delivery id → times
}

func (w *witness) ack(key string, c *conversation) {
	w.mu.Lock()
	w.acked[key] = c
	w.mu.Unlock()
}

func (w *witness) see(a wire.Arrival) {
	w.mu.Lock()
	defer w.mu.Unlock()
	key := a.Key()
	if w.came[key] == nil {
		w.came[key] = map[string]int{}
	}
	w.came[key][a.ID]++
}

// missing is how many acknowledged activities have not arrived.
func (w *witness) missing() (n int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for key := range w.acked {
		if len(w.came[key]) == 0 {
			n++
		}
	}
	return n
}

// killed kills the hub in the middle of accepting and delivering, and starts it again. Callers whose request was cut off
// repeat it under the same key until it is acknowledged.
func (b *bench) killed(ctx context.Context) error {
	w := &witness{acked: map[string]*conversation{}, came: map[string]map[string]int{}}
	b.fast.Observe(w.see)
	defer b.fast.Observe(nil)
	conversations := b.world.out.conversations[:killConversations]

	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the callers when this ends early
	running, stop := context.WithCancel(ctx)
	defer stop()
	errs := make(chan error, killCallers)
	for i := range killCallers {
		go func() { errs <- b.persist(ctx, running, w, conversations, i) }()
	}
	wait := func(d time.Duration) error {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(d):
			return nil
		case err := <-errs:
			return errors.Join(err, errors.New("a caller ended early"))
		}
	}
	if err := wait(b.o.span()); err != nil {
		return err
	}
	b.hub.Kill()
	b.say("kill: SIGKILL under load")
	if err := b.hub.Start(ctx); err != nil {
		return err
	}
	b.say("kill: the hub is ready again")
	if err := wait(b.o.span()); err != nil {
		return err
	}
	stop()
	for range killCallers {
		if err := <-errs; err != nil {
			return err
		}
	}
	// Late is a measurement too: what has not come by then is lost.
	err := hub.Until(ctx, killPatience, func() (bool, error) { return w.missing() == 0, nil })
	if err != nil && ctx.Err() != nil {
		return err
	}
	b.say("kill: %d acknowledged, %d of them not delivered yet", len(w.acked), w.missing())
	if err := b.idleLanes(ctx, b.world.out.channels); err != nil && ctx.Err() != nil {
		return err
	}
	b.arrived = b.fast.Arrived()

	listed, gaps, err := b.listed(ctx, conversations)
	if err != nil {
		return err
	}
	b.fast.Observe(nil)
	w.mu.Lock()
	defer w.mu.Unlock()
	var unlisted, doubled, undelivered, repeats, most int
	for key := range w.acked {
		switch n := listed[key]; {
		case n == 0:
			unlisted++
		case n > 1 || len(w.came[key]) > 1: // two activities, or two delivery ids for one
			doubled++
		}
		if len(w.came[key]) == 0 {
			undelivered++
		}
		for _, times := range w.came[key] {
			repeats += times - 1
			most = max(most, times-1)
		}
	}
	met := unlisted+undelivered+doubled+gaps == 0
	r := b.add(&result{
		Row: rowKill, Work: fmt.Sprintf("SIGKILL of the hub under load, %d acknowledged", len(w.acked)),
		Measured: fmt.Sprintf("lost %d, doubled %d, repeats %d (at most %d of a delivery)", unlisted+undelivered, doubled, repeats, most),
		Aim:      "lost 0", Met: &met,
		Details: map[string]any{"acknowledged": len(w.acked), "not_listed": unlisted, "not_delivered": undelivered,
			"doubled": doubled, "conversations_with_a_gap": gaps, "repeated_attempts": repeats, "most_repeats_of_a_delivery": most},
	})
	if !met {
		r.Note = fmt.Sprintf("not listed %d, not delivered within %s %d, listed or delivered as two %d, conversations with a gap in seq %d",
			unlisted, killPatience, undelivered, doubled, gaps)
	}
	return nil
}

// persist posts until running ends, each activity until it is acknowledged.
func (b *bench) persist(ctx, running context.Context, w *witness, to []*conversation, i int) error {
	c := newCaller(b.hub.Addr())
	defer c.Close()
	for n := i; running.Err() == nil; n += killCallers {
		conv, key := to[n%len(to)], newKey()
		for {
			status, err := post(ctx, c, conv, key, text)
			if err == nil && status == http.StatusCreated {
				w.ack(key, conv)
				break
			}
			if err == nil && status < 500 {
				return fmt.Errorf("post an activity: HTTP %d", status)
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(retryPause):
			}
		}
	}
	return nil
}

// listed reads the conversations through the API: how often each key is there, and in how many a seq is missing.
func (b *bench) listed(ctx context.Context, conversations []*conversation) (byKey map[string]int, gaps int, err error) {
	byKey = map[string]int{}
	for _, conv := range conversations {
		next, mark, gap := int64(1), "", false
		for more := true; more; {
			var page struct {
				Data []struct {
					Seq            int64
					IdempotencyKey string `json:"idempotency_key"`
				}
				Meta struct {
					Watermark string
					HasMore   bool `json:"has_more"`
				}
			}
			path := "/api/v1/conversations/" + conv.id + "/activities?limit=1000&watermark=" + mark
			if err := b.hub.Call(ctx, http.MethodGet, path, conv.tenant.As(), nil, &page); err != nil {
				return nil, 0, err
			}
			for _, a := range page.Data {
				gap = gap || a.Seq != next
				next = a.Seq + 1
				byKey[a.IdempotencyKey]++
			}
			mark, more = page.Meta.Watermark, page.Meta.HasMore
		}
		if gap {
			gaps++
		}
	}
	return byKey, gaps, nil
}
