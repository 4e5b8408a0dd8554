package jobs

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// adapter is a webhook whose attempts a test decides.
type adapter func(ctx context.Context, out channel.Outbound) channel.Outcome

func (adapter) Type() channel.Type                           { return channel.TypeWebhook }
func (adapter) Modes() []channel.Mode                        { return []channel.Mode{channel.ModeDuplex} }
func (adapter) Fields() []channel.Field                      { return nil }
func (adapter) Validate(json.RawMessage, bool) []fault.Field { return nil }
func (a adapter) Send(ctx context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
	return a(ctx, out)
}

// world is a database with one tenant and one channel, as nodes see it.
type world struct {
	url           string
	pool          *pgxpool.Pool
	tenant        tenants.ID
	channel       channel.Channel
	conversations []uuid.UUID
}

func (w *world) Channel(id uuid.UUID) (*tenants.ChannelEntry, bool) {
	return &tenants.ChannelEntry{ID: id, TenantID: w.tenant, Type: string(channel.TypeWebhook), Mode: "duplex", Ordered: true}, true
}

func (*world) Routes(uuid.UUID) []uuid.UUID { return nil }

func (w *world) Current(context.Context, tenants.ID, uuid.UUID, int64) (*channel.Channel, error) {
	return &w.channel, nil
}

func newWorld(t testing.TB, conversations int) *world {
	t.Helper()
	w := &world{url: pgtest.New(t), tenant: newID()}
	w.pool = pgtest.Open(t, w.url, postgres.Options{MaxConns: 10})
	w.channel = channel.Channel{TenantID: w.tenant, ID: newID(), Type: channel.TypeWebhook, Mode: channel.ModeDuplex,
		Status: channel.StatusActive, Ordered: true, RetryPolicy: channel.RetryPolicy{BaseMS: 1, Backoff: channel.BackoffFixed}}
	exec(t, w.pool, `INSERT INTO tenants (id, name, max_in_flight, version) VALUES ($1, 'acme', 1000, 1)`, w.tenant)
	exec(t, w.pool, `
INSERT INTO channels (tenant_id, id, name, type, mode, config, secret, secret_hash, max_in_flight, version)
VALUES ($1, $2, 'hook', 'webhook', 'duplex', '', '', $3, 1000, 1)`, w.tenant, w.channel.ID, make([]byte, 32))
	for range conversations {
		w.conversations = append(w.conversations, newID())
	}
	exec(t, w.pool, `INSERT INTO conversations (tenant_id, id, channel_id) SELECT $1, c, $2 FROM unnest($3::uuid[]) c`, w.tenant, w.channel.ID, w.conversations)
	return w
}

// node is a running service with its jobs.
type node struct {
	service *delivery.Service
	client  *Client
	kill    func() // stops it hard
}

// newNode starts a node with a pool of its own; it is stopped when the test ends.
func (w *world) newNode(t testing.TB, a adapter, do delivery.Options, o Options) *node {
	t.Helper()
	pool := pgtest.Open(t, w.url, postgres.Options{MaxConns: 10})
	n := &node{service: delivery.NewService(pool, w, channel.NewRegistry(a), w, do)}
	n.client = newClient(t, pool, n.service, o)
	n.client.SetInbound(processor(func(context.Context, uuid.UUID) error { return nil }))
	n.service.SetJobs(n.client)
	stopService := run(t, n.service.Run)
	stopClient := run(t, n.client.Run)
	n.kill = sync.OnceFunc(func() { stopClient(); stopService() })
	t.Cleanup(n.kill)
	return n
}

func newClient(t testing.TB, pool *pgxpool.Pool, d Deliverer, o Options) *Client {
	t.Helper()
	c, err := New(pool, d, o)
	if err != nil {
		t.Fatalf("New: %v", err)
	}
	return c
}

// run runs a loop until stop is called.
func run(t testing.TB, loop func(context.Context) error) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- loop(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
}

// processor is an [InboundProcessor].
type processor func(ctx context.Context, event uuid.UUID) error

func (p processor) Process(ctx context.Context, _ tenants.ID, event uuid.UUID) error {
	return p(ctx, event)
}

// post appends one message to each of the conversations, in one transaction.
func (w *world) post(ctx context.Context, s *delivery.Service, text string, conversations ...uuid.UUID) error {
	var wake func()
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		ids := make([]uuid.UUID, len(conversations))
		for i := range ids {
			ids[i] = newID()
		}
		rows, err := tx.Query(ctx, `
WITH c AS (
    UPDATE conversations SET last_seq = last_seq + 1 WHERE id = ANY ($1) RETURNING id, tenant_id, channel_id, last_seq
), a AS (
    INSERT INTO activities (tenant_id, id, conversation_id, seq, type, sender, text)
    SELECT c.tenant_id, u.a, c.id, c.last_seq, 'message', 'user', $3
    FROM unnest($1::uuid[], $2::uuid[]) u (c, a) JOIN c ON c.id = u.c
    RETURNING tenant_id, id, conversation_id, seq
)
SELECT a.tenant_id, c.channel_id, true, a.conversation_id, a.id, a.seq FROM a JOIN c ON c.id = a.conversation_id`, conversations, ids, text)
		if err != nil {
			return err
		}
		work, err := pgx.CollectRows(rows, pgx.RowToStructByPos[activity.Work])
		if err != nil {
			return err
		}
		wake, err = s.EnqueueTx(ctx, tx, work)
		return err
	})
	if err == nil {
		wake()
	}
	return err
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

func newID() uuid.UUID { return uuid.Must(uuid.NewV7()) }

// eventually waits for ok. The limit is only for a test that fails: it is generous, for machines that are busy.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 60*time.Second)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("in vain: %s", what)
		}
	}
}

// logs collects what is logged.
type logs struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.buf.String()
}

func (l *logs) logger() *slog.Logger {
	return slog.New(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug}))
}
