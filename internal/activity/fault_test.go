package activity

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

// Backends die under load, in any phase of a transaction. What has a key is tried again until it succeeds: each exists
// once, and what was acknowledged exists.
func TestKilledBackends(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	killer := connect(t, w.url, "")
	done := make(chan struct{})
	var killing sync.WaitGroup
	killing.Go(func() {
		for kills := 0; kills < 25; {
			select {
			case <-done:
				return
			default:
			}
			var n int
			err := killer.QueryRow(context.WithoutCancel(t.Context()), `
				SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
				WHERE datname = current_database() AND pid <> pg_backend_pid() AND state <> 'idle'`).Scan(&n)
			if err != nil {
				t.Error(err)
				return
			}
			kills += n
		}
	})
	const callers, each = 16, 25
	var failures, unknown atomic.Int64
	var mu sync.Mutex
	seqs := map[int64]uuid.UUID{}
	parallel(callers, func(c int) {
		for i := range each {
			for {
				r := w.store.Append(context.WithoutCancel(t.Context()), []New{w.keyed(fmt.Sprintf("%d-%d", c, i), "x")})[0]
				if r.Err == nil {
					mu.Lock()
					seqs[r.Activity.Seq] = r.Activity.ID
					mu.Unlock()
					break
				}
				failures.Add(1)
				if errors.Is(r.Err, ErrUnknownOutcome) {
					unknown.Add(1)
				}
				if !postgres.IsUnavailable(r.Err) {
					t.Errorf("not an unavailable database: %v", r.Err)
					return
				}
			}
		}
	})
	close(done)
	killing.Wait()
	t.Logf("%d failed answers, %d of them with an unknown outcome", failures.Load(), unknown.Load())
	if failures.Load() == 0 {
		t.Error("no backend was killed in time")
	}
	if len(seqs) != callers*each {
		t.Errorf("%d activities were acknowledged, want %d", len(seqs), callers*each)
	}
	if n := w.count(t, `SELECT count(*) FROM activities`); n != callers*each {
		t.Errorf("%d activities are there, want %d", n, callers*each)
	}
	w.checkDatabase(t)
}

// connect opens a single connection to the server of url, to database unless that is "".
func connect(t testing.TB, url, database string) *pgx.Conn {
	t.Helper()
	cfg, err := pgx.ParseConfig(url)
	if err != nil {
		t.Fatal(err)
	}
	if database != "" {
		cfg.Database = database
	}
	conn, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close(context.WithoutCancel(t.Context())) })
	return conn
}

// While the database takes no connections, items fail soon with an error that says so; when it is back, the same store
// works on.
func TestDatabaseGoneAndBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	w.must(t, w.message("before"))
	admin := connect(t, w.url, "postgres")
	name := pgx.Identifier{w.pool.Config().ConnConfig.Database}.Sanitize()
	admit := func(yes bool) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), fmt.Sprintf(`ALTER DATABASE %s ALLOW_CONNECTIONS %v`, name, yes)); err != nil {
			t.Fatal(err)
		}
	}
	admit(false)
	_, err := admin.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1`,
		w.pool.Config().ConnConfig.Database)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for range 20 {
		if r := w.store.Append(ctx, []New{w.keyed("k", "during")})[0]; !postgres.IsUnavailable(r.Err) {
			t.Fatalf("while the database is away: %+v", r)
		}
	}
	admit(true)
	if r := w.append(t, w.keyed("k", "during"))[0]; r.Err != nil || r.Repeat || r.Activity.Seq != 2 {
		t.Errorf("afterwards: %+v", r)
	}
}

// hold locks the world's conversation until release is called.
func (w *world) hold(t testing.TB) (release func()) {
	t.Helper()
	tx, err := w.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM conversations WHERE id = $1 FOR UPDATE`, w.conv); err != nil {
		t.Fatal(err)
	}
	return func() {
		t.Helper()
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// start appends items in the background, and returns how to get their results.
func (w *world) start(t testing.TB, s *Store, items ...New) (results func() []Result) {
	t.Helper()
	c := make(chan []Result, 1)
	go func() { c <- s.Append(context.WithoutCancel(t.Context()), items) }()
	return func() []Result { return <-c }
}

// stoppable is a second node that the test stops itself.
func (w *world) stoppable(t testing.TB, o Options) (_ *Store, stop context.CancelFunc, stopped <-chan struct{}) {
	t.Helper()
	s := NewStore(pgtest.Open(t, w.url, postgres.Options{}), toChannel{w.channel}, w.lanes, unhurried(o))
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		if err := s.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); <-ended })
	return s, cancel, ended
}

func TestStopFinishesTheQueue(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	s, stop, stopped := w.stoppable(t, Options{LockTimeout: patience, MaxBatch: 4})
	release := w.hold(t)
	items := make([]New, 30)
	for i := range items {
		items[i] = w.keyed(fmt.Sprint(i/2), "x") // each key twice
	}
	results := w.start(t, s, items...)
	waitForLock(t, w.pool)
	stop()
	waitFor(t, func() bool {
		s.queue.mu.Lock()
		defer s.queue.mu.Unlock()
		return s.queue.closed
	})
	if r := s.Append(t.Context(), []New{w.message("late")})[0]; !errors.Is(r.Err, ErrOverloaded) {
		t.Errorf("after the stop: %v", r.Err)
	}
	release()
	for i, r := range results() {
		if r.Err != nil || r.Repeat != (i%2 == 1) {
			t.Errorf("item %d: repeat %v, %v", i, r.Repeat, r.Err)
		}
	}
	<-stopped
	if n := s.queue.length(); n != 0 {
		t.Errorf("%d items are still counted", n)
	}
	w.checkDatabase(t)
}

func TestStopGivesUpAfterTheDrainTime(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	s, stop, stopped := w.stoppable(t, Options{LockTimeout: patience, DrainTimeout: 50 * time.Millisecond, MaxBatch: 4})
	release := w.hold(t)
	defer release()
	items := make([]New, 30)
	for i := range items {
		items[i] = w.message("x")
	}
	results := w.start(t, s, items...)
	waitForLock(t, w.pool)
	stop()
	<-stopped
	for i, r := range results() {
		if !errors.Is(r.Err, ErrOverloaded) {
			t.Errorf("item %d: repeat %v, %v", i, r.Repeat, r.Err)
		}
	}
}

func TestFullQueueRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{LockTimeout: patience, Queue: 3})
	release := w.hold(t)
	first := w.start(t, w.store, w.message("in the transaction"))
	waitForLock(t, w.pool)
	// The same key four times: those that join another's answer take room as well.
	rest := w.start(t, w.store, w.keyed("k", "x"), w.keyed("k", "x"), w.keyed("k", "x"), w.keyed("k", "x"), w.message("y"))
	waitFor(t, func() bool { return w.store.queue.length() == 3 })
	if r := w.append(t, w.message("z"))[0]; !errors.Is(r.Err, ErrOverloaded) {
		t.Errorf("with a full queue: %+v", r)
	}
	release()
	if r := first()[0]; r.Err != nil {
		t.Error(r.Err)
	}
	for i, r := range rest() {
		if i < 3 && r.Err != nil || i >= 3 && !errors.Is(r.Err, ErrOverloaded) {
			t.Errorf("item %d: repeat %v, %v", i, r.Repeat, r.Err)
		}
	}
	w.must(t, w.message("there is room again"))
}

// While somebody holds a conversation, others are written, and its own items keep their order.
func TestHeldConversationDelaysNobodyElse(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{LockTimeout: 8 * time.Second})
	free := w.message("free")
	free.ConversationID = w.newConversation(t)
	release := w.hold(t)
	early := w.start(t, w.store, w.message("1"), w.keyed("k", "2"), w.keyed("k", "2"), w.message("3"))
	waitFor(t, func() bool {
		w.store.parking.mu.Lock()
		defer w.store.parking.mu.Unlock()
		return len(w.store.parking.parked) == 1
	})
	w.must(t, free)
	late := w.start(t, w.store, w.message("4"), free, w.message("5"))
	w.must(t, free)
	release()
	if diff := cmp.Diff([]string{"seq 1", "seq 2", "repeat 2", "seq 3"}, describe(early())); diff != "" {
		t.Errorf("early (-want +got):\n%s", diff)
	}
	got := describe(late())
	if diff := cmp.Diff([]string{"seq 4", "seq 5"}, []string{got[0], got[2]}); diff != "" {
		t.Errorf("late (-want +got):\n%s", diff)
	}
	w.checkDatabase(t)
}

// The connection is lost during COMMIT: only a repeat with the key can tell, and it does.
func TestUnknownOutcome(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	_, err := w.pool.Exec(t.Context(), `
		CREATE SEQUENCE commits; -- counts what is rolled back as well
		CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM nextval('commits'); PERFORM pg_terminate_backend(pg_backend_pid()); PERFORM pg_sleep(10); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER die AFTER INSERT ON idempotency_keys DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW WHEN (new.key = 'die') EXECUTE FUNCTION die()`)
	if err != nil {
		t.Fatal(err)
	}
	r := w.append(t, w.keyed("die", "x"))[0]
	if !errors.Is(r.Err, ErrUnknownOutcome) || !postgres.IsUnavailable(r.Err) {
		t.Errorf("got %v", r.Err)
	}
	// Not even the program itself may try again: who has no key would be written twice.
	if n := w.count(t, `SELECT last_value FROM commits`); n != 1 {
		t.Errorf("the transaction was tried %d times", n)
	}
	if _, err := w.pool.Exec(t.Context(), `DROP TRIGGER die ON idempotency_keys`); err != nil {
		t.Fatal(err)
	}
	if r := w.append(t, w.keyed("die", "x"))[0]; r.Err != nil || r.Activity.Seq != 1 {
		t.Errorf("the repeat: %+v", r)
	}
	w.checkDatabase(t)
}

// A caller that goes away stops waiting; what it queued is written all the same.
func TestCallerGoesAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{LockTimeout: patience})
	release := w.hold(t)
	ctx, cancel := context.WithCancel(t.Context())
	results := make(chan Result, 1)
	go func() { results <- w.store.Append(ctx, []New{w.keyed("k", "x")})[0] }()
	waitForLock(t, w.pool)
	cancel()
	if r := <-results; !errors.Is(r.Err, context.Canceled) {
		t.Errorf("got %+v", r)
	}
	repeat := w.start(t, w.store, w.keyed("k", "x"))
	release()
	if r := repeat()[0]; r.Err != nil || !r.Repeat || r.Activity.Seq != 1 {
		t.Errorf("the repeat: %+v", r)
	}
}

func waitFor(t testing.TB, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen in time")
		}
		time.Sleep(time.Millisecond) // looks again, until the deadline
	}
}

// Batches of two nodes that overlap at random, with keys of each other's, never stop each other for good, and every
// item ends well: no deadlock, no time-out, no 5xx for the loser of a race (TK-13).
func TestRandomOverlappingBatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{LockTimeout: patience})
	nodes := []*Store{w.store, w.node(t, Options{LockTimeout: patience})}
	convs := []uuid.UUID{w.conv}
	targets := []uuid.UUID{w.must(t, w.message("first")).ID}
	for range 7 {
		c := w.newConversation(t)
		n := w.message("first")
		n.ConversationID = c
		convs, targets = append(convs, c), append(targets, w.must(t, n).ID)
	}
	var repeats atomic.Int64
	parallel(16, func(c int) {
		random := rand.New(rand.NewPCG(1, uint64(c)))
		for range 25 {
			items := make([]New, 1+random.IntN(20))
			for i := range items {
				conv := random.IntN(len(convs))
				items[i] = w.message("x")
				if random.IntN(2) == 0 {
					items[i] = w.keyed(fmt.Sprint(random.IntN(40)), "x")
				}
				items[i].ConversationID = convs[conv]
				if random.IntN(10) == 0 && items[i].IdempotencyKey == "" {
					items[i].Type, items[i].ReplyToID = TypeMessageUpdate, &targets[conv]
				}
			}
			for i, r := range nodes[random.IntN(2)].Append(context.WithoutCancel(t.Context()), items) {
				if r.Err != nil {
					t.Errorf("item %d: %v", i, r.Err)
				}
				if r.Repeat {
					repeats.Add(1)
				}
			}
		}
	})
	if repeats.Load() == 0 {
		t.Error("no key was used twice")
	}
	w.checkDatabase(t)
	var deadlocks int
	err := w.pool.QueryRow(t.Context(), `SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()`).Scan(&deadlocks)
	if err != nil || deadlocks != 0 {
		t.Errorf("%d deadlocks, %v", deadlocks, err)
	}
}

// Fifty writers and a reader that follows by watermark: it sees every activity once, in order (TK-15).
func TestReaderMissesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	nodes := []*Store{w.store, w.node(t, Options{})}
	const writers, each = 50, 20
	var writing sync.WaitGroup
	for i := range writers {
		writing.Go(func() {
			for range each {
				if r := nodes[i%2].Append(context.WithoutCancel(t.Context()), []New{w.message("x")})[0]; r.Err != nil {
					t.Error(r.Err)
				}
			}
		})
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	seen := make(map[uuid.UUID]bool)
	mark := Watermark(0)
	for len(seen) < writers*each {
		after, err := ParseWatermark(mark)
		if err != nil {
			t.Fatal(err)
		}
		page, _, err := w.store.List(ctx, w.tenant, w.conv, nil, after, 7)
		if err != nil {
			t.Fatalf("after %d activities: %v", len(seen), err)
		}
		for _, a := range page {
			after++
			if a.Seq != after || seen[a.ID] {
				t.Fatalf("seq %d where %d is next", a.Seq, after)
			}
			seen[a.ID] = true
		}
		mark = Watermark(after)
	}
	writing.Wait()
	w.checkDatabase(t)
}

// A pool of four connections serves any number of callers: nobody holds one and asks for a second (DB-01).
func TestFewConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	pool := pgtest.Open(t, w.url, postgres.Options{MaxConns: 2})
	s := NewStore(pool, toChannel{w.channel}, w.lanes, Options{})
	run(t, s)
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	parallel(24, func(i int) {
		var err error
		switch i % 6 {
		case 0, 1:
			n := w.message("x")
			n.ConversationID = w.conv
			err = s.Append(ctx, []New{n})[0].Err
			if errors.Is(err, ErrClosed) {
				err = nil
			}
		case 2:
			_, err = s.CreateConversation(ctx, w.tenant, NewConversation{ChannelID: w.channel, Participant: ptr(phone(fmt.Sprint(i)))})
		case 3:
			_, _, err = s.List(ctx, w.tenant, w.conv, nil, 0, 10)
		case 4:
			_, _, err = s.Close(ctx, w.tenant, w.conv, nil, ReasonManual)
		case 5:
			_, _, err = s.Reopen(ctx, w.tenant, w.conv, nil, ReasonManual)
		}
		if err != nil {
			t.Errorf("caller %d: %v", i, err)
		}
	})
	if n := pool.Stat().AcquiredConns(); n != 0 {
		t.Errorf("%d connections were not given back", n)
	}
	w.checkDatabase(t)
}
