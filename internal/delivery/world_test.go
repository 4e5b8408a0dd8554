package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// adapter is a channel type whose attempts a test decides.
type adapter struct {
	typ  channel.Type
	send func(ctx context.Context, ch *channel.Channel, out channel.Outbound) channel.Outcome

	mu    sync.Mutex
	calls []channel.Outbound
	order map[uuid.UUID][]string // texts by channel, in the order of the attempts
}

func (a *adapter) Type() channel.Type                         { return a.typ }
func (*adapter) Modes() []channel.Mode                        { return []channel.Mode{channel.ModeDuplex} }
func (*adapter) Fields() []channel.Field                      { return nil }
func (*adapter) Validate(json.RawMessage, bool) []fault.Field { return nil }
func (a *adapter) Send(ctx context.Context, ch *channel.Channel, out channel.Outbound) channel.Outcome {
	a.mu.Lock()
	a.calls = append(a.calls, out)
	if a.order == nil {
		a.order = map[uuid.UUID][]string{}
	}
	a.order[ch.ID] = append(a.order[ch.ID], out.Activity.Text)
	a.mu.Unlock()
	if a.send == nil {
		return channel.Outcome{Kind: channel.Sent}
	}
	return a.send(ctx, ch, out)
}

func (a *adapter) sent() []channel.Outbound {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]channel.Outbound(nil), a.calls...)
}

func (a *adapter) texts(ch uuid.UUID) []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return append([]string(nil), a.order[ch]...)
}

// queue is the workers' queue in a table, so that it is part of the inserting transaction as River's is.
type queue struct {
	pool     *pgxpool.Pool
	pokes    chan struct{}
	stopping atomic.Bool // no lane is started
}

func newQueue(t testing.TB, pool *pgxpool.Pool) *queue {
	t.Helper()
	exec(t, pool, `CREATE TABLE IF NOT EXISTS test_jobs (id bigint GENERATED ALWAYS AS IDENTITY, lane_id uuid, token uuid)`)
	return &queue{pool: pool, pokes: make(chan struct{}, 1)}
}

func (q *queue) InsertLanesTx(ctx context.Context, tx pgx.Tx, lanes []LaneJob) error {
	ids, tokens := make([]uuid.UUID, len(lanes)), make([]uuid.UUID, len(lanes))
	for i, l := range lanes {
		ids[i], tokens[i] = l.LaneID, l.LeaseToken
	}
	_, err := tx.Exec(ctx, `INSERT INTO test_jobs (lane_id, token) SELECT * FROM unnest($1::uuid[], $2::uuid[])`, ids, tokens)
	return err
}

// StartLanes leaves the lanes to whoever takes jobs, like those of the dispatcher.
func (q *queue) StartLanes(lanes []LaneJob) bool {
	if q.stopping.Load() {
		return false
	}
	err := pgx.BeginFunc(context.Background(), q.pool, func(tx pgx.Tx) error { return q.InsertLanesTx(context.Background(), tx, lanes) })
	q.Poke()
	return err == nil
}

func (q *queue) Poke() {
	select {
	case q.pokes <- struct{}{}:
	default:
	}
}

// take removes up to n jobs from the queue.
func (q *queue) take(ctx context.Context, n int) ([]LaneJob, error) {
	rows, err := q.pool.Query(ctx, `
DELETE FROM test_jobs WHERE id IN (SELECT id FROM test_jobs ORDER BY id LIMIT $1 FOR UPDATE SKIP LOCKED) RETURNING lane_id, token`, n)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowToStructByPos[LaneJob])
}

// world is a database with one tenant, and the service over it.
type world struct {
	*Service
	queue   *queue
	adapter *adapter
	url     string
	tenant  tenants.ID
	dir     *directory
}

// directory holds channels for a test, as [tenants.Directory] and [channel.Store] would.
type directory struct {
	mu       sync.Mutex
	channels map[uuid.UUID]channel.Channel
	routes   map[uuid.UUID][]uuid.UUID
}

func (d *directory) Routes(source uuid.UUID) []uuid.UUID {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.routes[source]
}

func (d *directory) Channel(id uuid.UUID) (*tenants.ChannelEntry, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ch, ok := d.channels[id]
	return &tenants.ChannelEntry{ID: id, TenantID: ch.TenantID, Type: string(ch.Type), Mode: string(ch.Mode), Status: string(ch.Status), Ordered: ch.Ordered}, ok
}

func (d *directory) Current(_ context.Context, tenant tenants.ID, id uuid.UUID, _ int64) (*channel.Channel, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ch, ok := d.channels[id]
	if !ok || ch.TenantID != tenant {
		return nil, channel.ErrNotFound
	}
	return &ch, nil
}

// newWorld makes a database and a service whose readers and writers run; hand-over and work are the test's, see drain.
func newWorld(t testing.TB, o Options) *world {
	t.Helper()
	url := pgtest.New(t)
	w := &world{url: url, tenant: newID(), adapter: &adapter{typ: channel.TypeWebhook}, dir: &directory{channels: map[uuid.UUID]channel.Channel{}}}
	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 16})
	w.queue = newQueue(t, pool)
	w.Service = w.node(t, pool, o)
	w.tenant = w.newTenant(t)
	return w
}

// node makes a further service on the same database, channels and queue.
func (w *world) node(t testing.TB, pool *pgxpool.Pool, o Options) *Service {
	t.Helper()
	s := NewService(pool, w.dir, channel.NewRegistry(w.adapter), w.dir, o)
	s.SetJobs(w.queue)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	s.serveWorkers(ctx, &wg)
	t.Cleanup(func() { cancel(); wg.Wait() })
	return s
}

func (w *world) newTenant(t testing.TB) tenants.ID {
	t.Helper()
	id := newID()
	exec(t, w.pool, `INSERT INTO tenants (id, name, version) VALUES ($1, $2, 1)`, id, id.String())
	return id
}

// newChannel makes an active, ordered, duplex channel; change may alter it before it is stored.
func (w *world) newChannel(t testing.TB, tenant tenants.ID, change func(*channel.Channel)) uuid.UUID {
	t.Helper()
	ch := channel.Channel{TenantID: tenant, ID: newID(), Type: w.adapter.typ, Mode: channel.ModeDuplex,
		Status: channel.StatusActive, Ordered: true, MaxInFlight: 100, Version: 1,
		RetryPolicy: channel.RetryPolicy{BaseMS: 1, Backoff: channel.BackoffFixed}}
	if change != nil {
		change(&ch)
	}
	hash := [32]byte{}
	copy(hash[:], ch.ID[:])
	exec(t, w.pool, `
INSERT INTO channels (tenant_id, id, name, type, mode, status, config, secret, secret_hash, ordered, max_in_flight, version)
VALUES ($1, $2, $3, $4, $5, $6, '', '', $7, $8, $9, 1)`,
		tenant, ch.ID, ch.ID.String(), ch.Type, ch.Mode, ch.Status, hash[:], ch.Ordered, ch.MaxInFlight)
	w.dir.mu.Lock()
	w.dir.channels[ch.ID] = ch
	w.dir.mu.Unlock()
	return ch.ID
}

func (w *world) newConversation(t testing.TB, ch uuid.UUID) uuid.UUID {
	t.Helper()
	id := newID()
	exec(t, w.pool, `INSERT INTO conversations (tenant_id, id, channel_id) SELECT tenant_id, $1, id FROM channels WHERE id = $2`, id, ch)
	return id
}

// post appends messages to a conversation as package activity would, and enqueues them for the conversation's channel.
func (w *world) post(t testing.TB, conversation uuid.UUID, texts ...string) []uuid.UUID {
	t.Helper()
	ids, err := post(t.Context(), w.Service, conversation, texts...)
	if err != nil {
		t.Fatalf("post: %v", err)
	}
	return ids
}

func post(ctx context.Context, s *Service, conversation uuid.UUID, texts ...string) (ids []uuid.UUID, err error) {
	var wake func()
	err = pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var last int64
		work := activity.Work{ConversationID: conversation}
		if err := tx.QueryRow(ctx, `
UPDATE conversations c SET last_seq = last_seq + $2 FROM channels ch WHERE c.id = $1 AND ch.id = c.channel_id
RETURNING c.tenant_id, c.channel_id, c.last_seq, ch.ordered`, conversation, len(texts)).Scan(&work.TenantID, &work.ChannelID, &last, &work.Ordered); err != nil {
			return err
		}
		var all []activity.Work
		for i, text := range texts {
			w := work
			w.ActivityID, w.Seq = newID(), last-int64(len(texts))+int64(i)+1
			ids = append(ids, w.ActivityID)
			all = append(all, w)
			if _, err := tx.Exec(ctx, `INSERT INTO activities (tenant_id, id, conversation_id, seq, type, sender, text) VALUES ($1, $2, $3, $4, 'message', 'user', $5)`,
				w.TenantID, w.ActivityID, conversation, w.Seq, text); err != nil {
				return err
			}
		}
		var err error
		wake, err = s.EnqueueTx(ctx, tx, all)
		return err
	})
	if err != nil {
		return nil, err
	}
	wake()
	return ids, nil
}

// drain hands lanes over and works them, one after another, until none is due.
func (w *world) drain(t testing.TB) {
	t.Helper()
	for {
		n, err := w.Dispatch(t.Context())
		if err != nil {
			t.Fatalf("Dispatch: %v", err)
		}
		jobs := w.takeAll(t)
		for _, j := range jobs {
			if err := w.Work(t.Context(), j); err != nil {
				t.Fatalf("Work: %v", err)
			}
		}
		if n == 0 && len(jobs) == 0 {
			return
		}
	}
}

// drainUntil drains, waiting for retries, until ok.
func (w *world) drainUntil(t testing.TB, what string, ok func() bool) {
	t.Helper()
	eventually(t, what, func() bool { w.drain(t); return ok() })
}

func (w *world) takeAll(t testing.TB) []LaneJob {
	t.Helper()
	jobs, err := w.queue.take(t.Context(), 1_000_000)
	if err != nil {
		t.Fatalf("take jobs: %v", err)
	}
	return jobs
}

// workers works jobs of the queue, n at a time, with a service, until the test ends or stop is called.
func (w *world) workers(t testing.TB, s *Service, n int) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	jobs := make(chan LaneJob)
	wg.Go(func() {
		defer close(jobs)
		for ctx.Err() == nil {
			taken, err := w.queue.take(ctx, n)
			if err != nil && ctx.Err() == nil {
				t.Errorf("take jobs: %v", err)
			}
			for _, j := range taken {
				select {
				case jobs <- j:
				case <-ctx.Done():
					return
				}
			}
			if len(taken) == 0 {
				select {
				case <-w.queue.pokes:
				case <-time.After(2 * time.Millisecond):
				case <-ctx.Done():
				}
			}
		}
	})
	for range n {
		wg.Go(func() {
			for j := range jobs {
				if err := s.Work(ctx, j); err != nil && !errors.Is(err, context.Canceled) && ctx.Err() == nil {
					t.Errorf("Work: %v", err)
				}
			}
		})
	}
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); wg.Wait() }) }
	t.Cleanup(stop)
	return stop
}

// dispatcher runs the loop of the dispatcher until the test ends or stop is called.
func (w *world) dispatcher(t testing.TB, s *Service) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() { s.dispatchLoop(ctx) })
	var once sync.Once
	stop = func() { once.Do(func() { cancel(); wg.Wait() }) }
	t.Cleanup(stop)
	return stop
}

// only returns the one delivery of an activity.
func (w *world) only(t testing.TB, activityID uuid.UUID) Delivery {
	t.Helper()
	var tenant tenants.ID
	if err := w.pool.QueryRow(t.Context(), `SELECT tenant_id FROM activities WHERE id = $1`, activityID).Scan(&tenant); err != nil {
		t.Fatal(err)
	}
	page, _, err := w.List(t.Context(), tenant, Filter{ActivityID: &activityID}, uuid.Nil, 10)
	if err != nil || len(page) != 1 {
		t.Fatalf("deliveries of %s: %d, %v", activityID, len(page), err)
	}
	return page[0]
}

func exec(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

func count(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) (n int) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return n
}

// eventually waits for ok. The limit is only for a test that fails: it is generous, for machines that are busy.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("in vain: %s", what)
		}
	}
}

func texts(n int) []string {
	out := make([]string, n)
	for i := range out {
		out[i] = fmt.Sprintf("m%03d", i)
	}
	return out
}
