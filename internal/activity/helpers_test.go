package activity

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// toChannel sends everything to one channel, but nothing to its own author.
type toChannel struct{ id uuid.UUID }

func (c toChannel) Targets(_ uuid.UUID, a *New) []Target {
	if c.id == uuid.Nil || a.Sender == a.ParticipantExternalID {
		return nil
	}
	return []Target{{ChannelID: c.id, Ordered: true}}
}

// lanes is an Enqueuer that writes what the real one writes, but for the jobs.
type lanes struct {
	woken atomic.Int64
	fail  atomic.Bool
}

var errEnqueue = errors.New("no deliveries today")

const lanesSQL = `
WITH work AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::bigint[], $6::uuid[])
        AS t (tenant_id, channel_id, conversation_id, activity_id, seq, id)
), woken AS (
    INSERT INTO lanes (tenant_id, id, channel_id, conversation_id, next_at, wakes)
    SELECT tenant_id, gen_random_uuid(), channel_id, conversation_id, now(), 1
    FROM work GROUP BY tenant_id, channel_id, conversation_id ORDER BY channel_id, conversation_id
    ON CONFLICT (channel_id, conversation_id)
        DO UPDATE SET wakes = lanes.wakes + 1, next_at = coalesce(lanes.next_at, excluded.next_at)
    RETURNING id, channel_id, conversation_id
)
INSERT INTO deliveries (tenant_id, id, activity_id, channel_id, lane_id, seq)
SELECT t.tenant_id, t.id, t.activity_id, t.channel_id, w.id, t.seq
FROM work t JOIN woken w USING (channel_id, conversation_id)`

func (l *lanes) EnqueueTx(ctx context.Context, tx pgx.Tx, work []Work) (func(), error) {
	if l.fail.Load() {
		return nil, errEnqueue
	}
	n := len(work)
	tenant, ch, conv, act, id := make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n)
	seq := make([]int64, n)
	for i, w := range work {
		tenant[i], ch[i], conv[i], act[i], seq[i] = w.TenantID, w.ChannelID, w.ConversationID, w.ActivityID, w.Seq
		id[i] = uuid.Must(uuid.NewV7())
	}
	if _, err := tx.Exec(ctx, lanesSQL, tenant, ch, conv, act, seq, id); err != nil {
		return nil, err
	}
	return func() { l.woken.Add(int64(n)) }, nil
}

// world is a database with a tenant that has a channel with a conversation, and a store that runs.
type world struct {
	url   string
	pool  *pgxpool.Pool
	store *Store
	lanes *lanes

	tenant  tenants.ID
	channel uuid.UUID
	conv    uuid.UUID
}

func newWorld(t testing.TB, o Options) *world {
	t.Helper()
	w := &world{url: pgtest.New(t)}
	w.pool = pgtest.Open(t, w.url, postgres.Options{MaxConns: 10})
	w.tenant, w.channel = addTenant(t, w.pool)
	w.lanes = &lanes{}
	w.store = NewStore(w.pool, toChannel{w.channel}, w.lanes, unhurried(o))
	run(t, w.store)
	w.conv = w.newConversation(t)
	return w
}

// node is a second store on the same database, as on another machine.
func (w *world) node(t testing.TB, o Options) *Store {
	t.Helper()
	s := NewStore(pgtest.Open(t, w.url, postgres.Options{MaxConns: 10}), toChannel{w.channel}, w.lanes, unhurried(o))
	run(t, s)
	return s
}

// run runs s until the end of the test.
func run(t testing.TB, s *Store) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
}

func (w *world) newConversation(t testing.TB) uuid.UUID {
	t.Helper()
	c, err := w.store.CreateConversation(t.Context(), w.tenant, NewConversation{ChannelID: w.channel})
	if err != nil {
		t.Fatal(err)
	}
	return c.ID
}

// message is a valid activity for the world's conversation.
func (w *world) message(text string) New {
	return New{TenantID: w.tenant, ConversationID: w.conv, Caller: "key:1", Sender: "user", Author: AuthorTenant, Text: &text}
}

func (w *world) keyed(key, text string) New {
	n := w.message(text)
	n.IdempotencyKey = key
	return n
}

func (w *world) append(t testing.TB, items ...New) []Result {
	t.Helper()
	return w.store.Append(t.Context(), items)
}

// must appends one item, which has to succeed.
func (w *world) must(t testing.TB, n New) Activity {
	t.Helper()
	r := w.append(t, n)[0]
	if r.Err != nil {
		t.Fatalf("append: %v", r.Err)
	}
	return r.Activity
}

func (w *world) count(t testing.TB, sql string, args ...any) int {
	t.Helper()
	var n int
	if err := w.pool.QueryRow(t.Context(), sql, args...).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// checkDatabase compares what must agree at any time: seqs without a gap, last_seq, keys and their activities,
// one delivery for each activity.
func (w *world) checkDatabase(t testing.TB) {
	t.Helper()
	for name, sql := range map[string]string{
		"conversations whose seqs have a gap or differ from last_seq": `
			SELECT count(*) FROM conversations c LEFT JOIN LATERAL (
				SELECT count(*) n, coalesce(max(seq), 0) top FROM activities a WHERE a.conversation_id = c.id) a ON true
			WHERE c.last_seq <> a.n OR c.last_seq <> a.top`,
		"keys without an activity": `
			SELECT count(*) FROM idempotency_keys k WHERE NOT EXISTS (
				SELECT FROM activities a WHERE a.id = k.activity_id AND a.idempotency_key = k.key)`,
		"activities with a key that is not claimed": `
			SELECT count(*) FROM activities a WHERE a.idempotency_key IS NOT NULL AND NOT EXISTS (
				SELECT FROM idempotency_keys k WHERE a.id = k.activity_id)`,
		"activities without a delivery": `
			SELECT count(*) FROM activities a WHERE NOT EXISTS (SELECT FROM deliveries d WHERE d.activity_id = a.id)`,
	} {
		if n := w.count(t, sql); n != 0 {
			t.Errorf("%d %s", n, name)
		}
	}
}

// addTenant makes a tenant with a channel.
func addTenant(t testing.TB, pool *pgxpool.Pool) (tenants.ID, uuid.UUID) {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	_, err := pool.Exec(t.Context(), `INSERT INTO tenants (id, name, version) VALUES ($1, $2, 1)`, id, "tenant "+id.String())
	if err != nil {
		t.Fatal(err)
	}
	return id, addChannel(t, pool, id)
}

func addChannel(t testing.TB, pool *pgxpool.Pool, tenant tenants.ID) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	_, err := pool.Exec(t.Context(), `
		INSERT INTO channels (tenant_id, id, name, type, mode, config, secret, secret_hash, version)
		VALUES ($1, $2, $3, 'webhook', 'duplex', '', '', sha256(uuid_send($2)), 1)`, tenant, id, "channel "+id.String())
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func ptr[T any](v T) *T { return &v }

func raw(format string, args ...any) json.RawMessage {
	return json.RawMessage(fmt.Sprintf(format, args...))
}

const patience = 30 * time.Second

// jsonEqual compares raw JSON by its values: jsonb keeps neither spacing nor order.
var jsonEqual = gocmp.Transformer("JSON", func(raw json.RawMessage) (v any) {
	if len(raw) > 0 {
		if err := json.Unmarshal(raw, &v); err != nil {
			panic(err)
		}
	}
	return v
})

// waitForLock returns when some session waits for a lock of another.
func waitForLock(t testing.TB, pool *pgxpool.Pool) {
	t.Helper()
	waitFor(t, func() (waiting bool) {
		err := pool.QueryRow(t.Context(), `SELECT EXISTS (
			SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock')`).Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
		return waiting
	})
}

// unhurried gives transactions and the drain time for a slow machine, unless the test has set them.
func unhurried(o Options) Options {
	o.BatchTimeout, o.DrainTimeout = cmp.Or(o.BatchTimeout, patience), cmp.Or(o.DrainTimeout, patience)
	return o
}
