package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/puddle/v2"

	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func newPool(t *testing.T, o postgres.Options) *pgxpool.Pool {
	t.Helper()
	return pgtest.Open(t, pgtest.Empty(t), o)
}

func mustExec(t *testing.T, q postgres.Querier, sql string, args ...any) {
	t.Helper()
	if _, err := q.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

func TestSessionSettings(t *testing.T) {
	t.Parallel()
	show := func(pool *pgxpool.Pool) map[string]string {
		got := map[string]string{}
		for _, name := range []string{
			"plan_cache_mode", "application_name", "timezone", "statement_timeout",
			"idle_in_transaction_session_timeout", "lock_timeout", "enable_seqscan", "jit",
		} {
			var v string
			if err := pool.QueryRow(t.Context(), "SELECT current_setting($1)", name).Scan(&v); err != nil {
				t.Fatal(err)
			}
			got[name] = v
		}
		return got
	}
	url := pgtest.Empty(t)
	for name, c := range map[string]struct {
		url  string
		opts postgres.Options
		want map[string]string
	}{
		"defaults": {url, postgres.Options{}, map[string]string{
			"plan_cache_mode": "force_generic_plan", "application_name": "converger", "timezone": "UTC",
			"statement_timeout": "30s", "idle_in_transaction_session_timeout": "15s", "lock_timeout": "0", "enable_seqscan": "off", "jit": "off",
		}},
		"the URL may set timeouts, not the time zone": {
			url + "&statement_timeout=7000&timezone=Asia/Tokyo&idle_in_transaction_session_timeout=9000&application_name=url",
			postgres.Options{AppName: "node 3"}, map[string]string{
				"plan_cache_mode": "force_generic_plan", "application_name": "node 3", "timezone": "UTC",
				"statement_timeout": "7s", "idle_in_transaction_session_timeout": "9s", "lock_timeout": "0", "enable_seqscan": "off", "jit": "off",
			}},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, show(pgtest.Open(t, c.url, c.opts))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestOpenNeitherConnectsNorShowsThePassword(t *testing.T) {
	t.Parallel()
	pool, err := postgres.Open(t.Context(), "postgres://u:sesame@127.0.0.1:1/db", postgres.Options{MaxConns: 3})
	if err != nil {
		t.Fatal("a server that is down:", err)
	}
	defer pool.Close()
	if n := pool.Config().MaxConns; n != 3 {
		t.Errorf("MaxConns is %d", n)
	}
	if err := pool.Ping(t.Context()); !postgres.IsUnavailable(err) || strings.Contains(err.Error(), "sesame") {
		t.Errorf("first use: %v", err)
	}
	if _, err := postgres.Open(t.Context(), "postgres://u:sesame@h/db?sslmode=perhaps", postgres.Options{}); err == nil ||
		strings.Contains(err.Error(), "sesame") {
		t.Errorf("bad URL: %v", err)
	}
}

// What can't be read is refused in words, with nothing of it: a password may be anywhere in it.
func TestParseURL(t *testing.T) {
	t.Parallel()
	for _, url := range []string{
		"postgres://u:sesame@h/db", "postgresql://u:ses%2Fame@h:5432/db?pool_max_conns=3", "host=h password=sesame dbname=db", "postgres://u@h,h2/db",
	} {
		if cfg, err := postgres.ParseURL(url); err != nil || cfg == nil {
			t.Errorf("%s: %v", url, err)
		}
	}
	for _, url := range []string{
		"sesame", "postgres://u:sesame@h:port/db", "postgres://u:sesame/x@h/db", "postgres://u:a:sesame@[::1/db", "postgres//u:sesame@h/db", "password='sesame",
		"postgres://u:%zzsesame@h/db", "postgres://h/db?password=sesame&sslmode=x", "postgres://u:sesame@h/db?sslmode=verify-full&sslrootcert=/no/such/sesame",
	} {
		if _, err := postgres.ParseURL(url); err == nil || strings.Contains(err.Error(), "sesame") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestUUIDsTravelAsTheyAre(t *testing.T) {
	t.Parallel()
	pool := newPool(t, postgres.Options{})
	id, other := uuid.New(), uuid.New()
	var got uuid.UUID
	var all []uuid.UUID
	var none *uuid.UUID
	err := pool.QueryRow(t.Context(), "SELECT $1::uuid, $2::uuid[], NULL::uuid", id, []uuid.UUID{id, other}).Scan(&got, &all, &none)
	if err != nil {
		t.Fatal(err)
	}
	if got != id || !cmp.Equal(all, []uuid.UUID{id, other}) || none != nil {
		t.Errorf("got %v, %v, %v", got, all, none)
	}
	// The codec and not driver.Valuer, which would send text.
	plan := pgxConn(t, pool).TypeMap().PlanEncode(2950, pgx.BinaryFormatCode, id)
	if plan == nil || strings.Contains(fmt.Sprintf("%T", plan), "Valuer") {
		t.Errorf("encoded by %T", plan)
	}
}

func pgxConn(t *testing.T, pool *pgxpool.Pool) *pgx.Conn {
	t.Helper()
	c, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Release)
	return c.Conn()
}

// A failover leaves sessions on a server that no longer takes writes. The first refusal must be the last for each.
func TestReadOnlyConnectionLeavesThePool(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 1})
	mustExec(t, pool, "CREATE TABLE x (n int)")
	mustExec(t, pool, "SET default_transaction_read_only = on") // the session sees what a demoted server would show it

	_, err := pool.Exec(t.Context(), "INSERT INTO x VALUES (1)")
	if !postgres.IsUnavailable(err) {
		t.Fatalf("a write on a read-only session: %v", err)
	}
	mustExec(t, pool, "INSERT INTO x VALUES (2)") // the only connection is a new one

	// A transaction's handle on the closed connection does no harm.
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, tx, "SET TRANSACTION READ ONLY")
	if _, err := tx.Exec(t.Context(), "INSERT INTO x VALUES (3)"); !postgres.IsUnavailable(err) {
		t.Errorf("in a transaction: %v", err)
	}
	if err := tx.Rollback(t.Context()); err != nil && !postgres.IsUnavailable(err) {
		t.Errorf("rollback: %v", err)
	}
	mustExec(t, pool, "INSERT INTO x VALUES (4)")
}

func TestReadOnlyServerIsNotAccepted(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 1})
	var name string
	if err := pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&name); err != nil {
		t.Fatal(err)
	}
	mustExec(t, pool, "ALTER DATABASE "+name+" SET default_transaction_read_only = on")
	late := pgtest.Open(t, url, postgres.Options{MaxConns: 1})
	if err := late.Ping(t.Context()); !postgres.IsUnavailable(err) {
		t.Errorf("connected to a read-only server: %v", err)
	}
	mustExec(t, pool, "ALTER DATABASE "+name+" RESET default_transaction_read_only")
	if err := late.Ping(t.Context()); err != nil {
		t.Errorf("the pool did not recover: %v", err)
	}
}

// Errors as they come from a real server and a real pool.
func TestErrorsOfAServer(t *testing.T) {
	t.Parallel()
	pool := newPool(t, postgres.Options{MaxConns: 4})
	mustExec(t, pool, `CREATE TABLE parent (id int CONSTRAINT parent_pk PRIMARY KEY, n int CONSTRAINT n_positive CHECK (n > 0));
		CREATE TABLE child (p int CONSTRAINT child_parent REFERENCES parent)`)
	mustExec(t, pool, "INSERT INTO parent VALUES (1, 1), (2, 1)")
	exec := func(ctx context.Context, sql string) error {
		_, err := pool.Exec(ctx, sql)
		return err
	}
	type facts struct {
		Unavailable, Serialization, LockTimeout bool
		Constraint                              string
	}
	for name, c := range map[string]struct {
		provoke func(t *testing.T) error
		want    facts
	}{
		"nothing":   {func(t *testing.T) error { return nil }, facts{}},
		"no rows":   {func(t *testing.T) error { return pgx.ErrNoRows }, facts{}},
		"syntax":    {func(t *testing.T) error { return exec(t.Context(), "SELEKT") }, facts{}},
		"unique":    {func(t *testing.T) error { return exec(t.Context(), "INSERT INTO parent VALUES (1, 1)") }, facts{Constraint: "parent_pk"}},
		"check":     {func(t *testing.T) error { return exec(t.Context(), "INSERT INTO parent VALUES (3, 0)") }, facts{Constraint: "n_positive"}},
		"reference": {func(t *testing.T) error { return exec(t.Context(), "INSERT INTO child VALUES (9)") }, facts{Constraint: "child_parent"}},
		"session killed": {func(t *testing.T) error {
			return exec(t.Context(), "SELECT pg_terminate_backend(pg_backend_pid())")
		}, facts{Unavailable: true}},
		"statement timeout": {func(t *testing.T) error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				mustExec(t, tx, "SET LOCAL statement_timeout = 1")
				_, err := tx.Exec(t.Context(), "SELECT pg_sleep(10)")
				return err
			})
		}, facts{Unavailable: true}},
		"caller's deadline": {func(t *testing.T) error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			return exec(ctx, "SELECT pg_sleep(10)")
		}, facts{Unavailable: true}},
		"client gone": {func(t *testing.T) error {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(5*time.Millisecond, cancel)
			return exec(ctx, "SELECT pg_sleep(10)")
		}, facts{}},
		"client gone before": {func(t *testing.T) error {
			ctx, cancel := context.WithCancel(t.Context())
			cancel()
			return exec(ctx, "SELECT 1")
		}, facts{}},
		"pool exhausted": {func(t *testing.T) error {
			small := pgtest.Open(t, pool.Config().ConnString(), postgres.Options{MaxConns: 1})
			c, err := small.Acquire(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Release()
			ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
			defer cancel()
			return small.Ping(ctx)
		}, facts{Unavailable: true}},
		"pool closed": {func(t *testing.T) error {
			p := pgtest.Open(t, pool.Config().ConnString(), postgres.Options{})
			p.Close()
			return p.Ping(t.Context())
		}, facts{Unavailable: true}},
		"unknown database": {func(t *testing.T) error {
			url := strings.Replace(pool.Config().ConnString(), "/t_", "/no_such_", 1)
			return pgtest.Open(t, url, postgres.Options{}).Ping(t.Context())
		}, facts{Unavailable: true}},
		"lock timeout": {func(t *testing.T) error {
			return pgx.BeginFunc(t.Context(), pool, func(holder pgx.Tx) error {
				mustExec(t, holder, "UPDATE parent SET n = 2 WHERE id = 1")
				_, err := pool.Exec(t.Context(), "SELECT FROM parent WHERE id = 1 FOR UPDATE NOWAIT")
				return err
			})
		}, facts{LockTimeout: true}},
		"serialization": {func(t *testing.T) error {
			return pgx.BeginTxFunc(t.Context(), pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
				mustExec(t, tx, "SELECT FROM parent")
				mustExec(t, pool, "UPDATE parent SET n = 3 WHERE id = 2")
				_, err := tx.Exec(t.Context(), "UPDATE parent SET n = 4 WHERE id = 2")
				return err
			})
		}, facts{Serialization: true}},
	} {
		t.Run(name, func(t *testing.T) { // in turn: they share rows
			err := c.provoke(t)
			if err == nil && name != "nothing" {
				t.Fatal("no error")
			}
			for _, err := range []error{err, wrap(err)} {
				got := facts{postgres.IsUnavailable(err), postgres.IsSerialization(err), postgres.IsLockTimeout(err), postgres.Constraint(err)}
				if diff := cmp.Diff(c.want, got); diff != "" {
					t.Errorf("%v:\n%s", err, diff)
				}
			}
		})
	}
}

func wrap(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("append: %w", err)
}

func TestIsUnavailableByCode(t *testing.T) {
	t.Parallel()
	for code, want := range map[string]bool{
		"08006": true, "25006": true, "25P03": true, "53100": true, "53300": true, "57014": true, "57P01": true, "57P02": true,
		"57P03": true, "57P05": true, "58030": true,
		"22P02": false, "23505": false, "25001": false, "40001": false, "40P01": false, "42P01": false, "55P03": false, "57000": false, "XX000": false,
	} {
		if got := postgres.IsUnavailable(&pgconn.PgError{Code: code}); got != want {
			t.Errorf("%s: %t", code, got)
		}
	}
	for _, err := range []error{
		io.EOF, io.ErrUnexpectedEOF, net.ErrClosed, os.ErrDeadlineExceeded, syscall.EPIPE, pgconn.ErrConnClosed, puddle.ErrClosedPool,
		context.DeadlineExceeded, &net.OpError{Op: "read", Err: syscall.ECONNRESET},
	} {
		if !postgres.IsUnavailable(wrap(err)) {
			t.Errorf("%v is not unavailable", err)
		}
	}
	if err := errors.Join(context.Canceled, io.EOF); postgres.IsUnavailable(err) {
		t.Error("a connection closed because the client left counts as unavailable")
	}
}

func TestQueryCounter(t *testing.T) {
	t.Parallel()
	statements := make(chan string, 100)
	counter := postgres.CountQueries(func(sql string) { statements <- sql })
	pool := newPool(t, postgres.Options{Tracer: counter})
	mustExec(t, pool, "CREATE TABLE x (n int)")
	counter.Reset()

	steps := []struct {
		name string
		want int64
		do   func() error
	}{
		{"a ping is no statement", 0, func() error { return pool.Ping(t.Context()) }},
		{"query row", 1, func() error { return pool.QueryRow(t.Context(), "SELECT 1").Scan(new(int)) }},
		{"a transaction with one insert", 3, func() error {
			return pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(t.Context(), "INSERT INTO x VALUES (1)")
				return err
			})
		}},
		{"a batch of two whose results nobody reads", 2, func() error {
			var b pgx.Batch
			b.Queue("INSERT INTO x VALUES ($1)", 2)
			b.Queue("INSERT INTO x VALUES ($1)", 3)
			return pool.SendBatch(t.Context(), &b).Close()
		}},
		{"copy", 1, func() error {
			_, err := pool.CopyFrom(t.Context(), pgx.Identifier{"x"}, []string{"n"}, pgx.CopyFromRows([][]any{{4}, {5}}))
			return err
		}},
	}
	for _, s := range steps {
		if err := s.do(); err != nil {
			t.Fatalf("%s: %v", s.name, err)
		}
		if got := counter.Count(); got != s.want {
			t.Errorf("%s: counted %d, want %d", s.name, got, s.want)
		}
		if got := counter.Reset(); got != s.want {
			t.Errorf("%s: reset said %d, want %d", s.name, got, s.want)
		}
	}
	if first := <-statements; !strings.HasPrefix(first, "CREATE TABLE x") {
		t.Errorf("first statement seen: %s", first)
	}
}

func TestRows(t *testing.T) {
	t.Parallel()
	pool := newPool(t, postgres.Options{})
	const query = "SELECT n FROM generate_series(1, $1::int) AS n"
	missing := errors.New("no such number")
	for rows, want := range []error{missing, nil, pgx.ErrTooManyRows} {
		if n, err := postgres.One(t.Context(), pool, missing, pgx.RowTo[int], query, rows); !errors.Is(err, want) || err == nil && n != 1 {
			t.Errorf("one of %d rows: %d, %v; want %v", rows, n, err, want)
		}
		if list, err := postgres.Many(t.Context(), pool, pgx.RowTo[int], query, rows); err != nil || len(list) != rows || list == nil {
			t.Errorf("all of %d rows: %v, %v", rows, list, err)
		}
	}
	var refused *pgconn.PgError
	if _, err := postgres.One(t.Context(), pool, missing, pgx.RowTo[int], "SELECT 1/0"); !errors.As(err, &refused) {
		t.Errorf("one of a failing query: %v", err)
	}
	if _, err := postgres.Many(t.Context(), pool, pgx.RowTo[int], "SELECT 1/0"); !errors.As(err, &refused) {
		t.Errorf("all of a failing query: %v", err)
	}
}
