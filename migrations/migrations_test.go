package migrations_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/migrations"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// schema makes files from name, SQL pairs.
func schema(pairs ...string) fstest.MapFS {
	fs := fstest.MapFS{}
	for i := 0; i < len(pairs); i += 2 {
		fs[pairs[i]+".up.sql"] = &fstest.MapFile{Data: []byte(pairs[i+1])}
	}
	return fs
}

func newDatabase(t *testing.T) (url string, pool *pgxpool.Pool) {
	t.Helper()
	url = pgtest.Empty(t)
	return url, pgtest.Open(t, url, postgres.Options{MaxConns: 4})
}

func scan[T any](t *testing.T, pool *pgxpool.Pool, sql string) (v T) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestUpOnAnEmptyDatabaseAndAgain(t *testing.T) {
	t.Parallel()
	url, pool := newDatabase(t)
	before, err := migrations.Status(t.Context(), pool)
	if err != nil {
		t.Fatal(err)
	}
	if len(before.Applied) != 0 || len(before.RiverApplied) != 0 || len(before.Pending) == 0 || len(before.RiverPending) == 0 {
		t.Errorf("an empty database: %+v", before)
	}
	err = migrations.Check(t.Context(), pool)
	if !errors.Is(err, migrations.ErrPending) || !strings.Contains(err.Error(), "0001_init") || !strings.Contains(err.Error(), "river 001") {
		t.Errorf("check of an empty database: %v", err)
	}

	rep, err := migrations.Up(t.Context(), url+"&pool_max_conns=7") // a URL as the pool takes it
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before.Pending, rep.Applied); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(before.RiverPending, rep.River); diff != "" {
		t.Error(diff)
	}
	if err := migrations.Check(t.Context(), pool); err != nil {
		t.Error(err)
	}
	if n := scan[int](t, pool, "SELECT count(*) FROM river_job") + scan[int](t, pool, "SELECT count(*) FROM tenants"); n != 0 {
		t.Errorf("%d rows from nowhere", n)
	}

	rep, err = migrations.Up(t.Context(), url)
	if err != nil || len(rep.Applied)+len(rep.River) != 0 {
		t.Errorf("a second time: %+v, %v", rep, err)
	}
}

// Five nodes start within a moment of each other, on an empty database and from the previous release: case DB-03.
func TestUpByManyNodesAtOnce(t *testing.T) {
	t.Parallel()
	const rounds, nodes = 6, 5
	// A slow first step, so that the others surely come while it runs; a concurrent index, which would wait for a node that
	// waits inside the database.
	old := schema("0001_first", "CREATE TABLE a (id int); SELECT pg_sleep(0.05)")
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // nodes that wait for each other for ever
	defer cancel()
	next := schema("0001_first", "CREATE TABLE a (id int); SELECT pg_sleep(0.05)",
		"0002_second", "CREATE TABLE b (id int)", "0003_index", "CREATE INDEX CONCURRENTLY a_id ON a (id)")
	for range rounds {
		url, pool := newDatabase(t)
		for _, s := range []struct {
			fs   fstest.MapFS
			want []string
		}{
			{old, []string{"0001_first"}},
			{next, []string{"0002_second", "0003_index"}},
		} {
			var wg sync.WaitGroup
			reports := make([]migrations.Report, nodes)
			for i := range nodes {
				wg.Go(func() {
					var err error
					if reports[i], err = migrations.UpFS(ctx, url, s.fs); err != nil {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			var applied []string
			for _, r := range reports {
				applied = append(applied, r.Applied...)
			}
			if diff := cmp.Diff(s.want, applied); diff != "" {
				t.Errorf("all nodes together applied:\n%s", diff)
			}
			st, err := migrations.StatusFS(t.Context(), pool, s.fs)
			if err != nil || st.Err() != nil || len(st.RiverPending) != 0 {
				t.Errorf("%+v, %v", st, err)
			}
		}
	}
}

func TestUpWaitsForTheLockAndObeysItsContext(t *testing.T) {
	t.Parallel()
	url, pool := newDatabase(t)
	holder, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer holder.Release()
	if _, err := holder.Exec(t.Context(), "SELECT pg_advisory_lock($1)", migrations.LockID); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := make(chan error, 1)
	go func() {
		_, err := migrations.Up(ctx, url)
		result <- err
	}()
	// It has come as far as the lock when its session is there.
	deadline := time.Now().Add(30 * time.Second)
	for scan[int](t, pool, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'converger-migrate' AND datname = current_database() AND query LIKE '%advisory%'") == 0 {
		if time.Now().After(deadline) {
			t.Fatal("it never came")
		}
	}
	if scan[bool](t, pool, "SELECT to_regclass('schema_migrations') IS NOT NULL") {
		t.Error("it worked without the lock")
	}
	cancel()
	if err := <-result; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	// A node that dies holding the lock gives it back with its session.
	if err := holder.Conn().Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := migrations.Up(t.Context(), url); err != nil {
		t.Error(err)
	}
}

func TestUpWithACancelledContextChangesNothing(t *testing.T) {
	t.Parallel()
	url, pool := newDatabase(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := migrations.Up(ctx, url); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if scan[bool](t, pool, "SELECT to_regclass('schema_migrations') IS NOT NULL") {
		t.Error("it worked all the same")
	}
}

func TestAFailedMigration(t *testing.T) {
	t.Parallel()
	url, pool := newDatabase(t)
	bad := schema("0001_good", "CREATE TABLE a (id int)", "0002_bad", "CREATE TABLE b (id int); INSERT INTO nowhere VALUES (1)",
		"0003_later", "CREATE TABLE c (id int)")
	good := schema("0001_good", "CREATE TABLE a (id int)", "0002_bad", "CREATE TABLE b (id int)", "0003_later", "CREATE TABLE c (id int)")

	rep, err := migrations.UpFS(t.Context(), url, bad)
	if err == nil || !strings.Contains(err.Error(), "nowhere") {
		t.Fatalf("the failure itself: %v", err)
	}
	if diff := cmp.Diff([]string{"0001_good"}, rep.Applied); diff != "" {
		t.Errorf("report of the failed run:\n%s", diff)
	}
	if !scan[bool](t, pool, "SELECT to_regclass('a') IS NOT NULL AND to_regclass('b') IS NULL AND to_regclass('c') IS NULL") {
		t.Error("the failed file left something behind, or a later one ran")
	}

	// Nothing goes on until someone has looked, not even with a mended file.
	rep, err = migrations.UpFS(t.Context(), url, good)
	if !errors.Is(err, migrations.ErrDirty) || len(rep.Applied)+len(rep.River) != 0 {
		t.Fatalf("after it: %+v, %v", rep, err)
	}
	st, statusErr := migrations.StatusFS(t.Context(), pool, good)
	if statusErr != nil || st.Dirty != "0002_bad" || !errors.Is(st.Err(), migrations.ErrDirty) {
		t.Errorf("status: %+v, %v", st, statusErr)
	}

	// What the error says to run in psql is the way out.
	_, rest, _ := strings.Cut(err.Error(), "in psql: ")
	sql, _, _ := strings.Cut(rest, ";")
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("advice %q: %v", sql, err)
	}
	rep, err = migrations.UpFS(t.Context(), url, good)
	if diff := cmp.Diff([]string{"0002_bad", "0003_later"}, rep.Applied); err != nil || diff != "" {
		t.Errorf("after the advice: %v\n%s", err, diff)
	}
}

func TestAFailedFirstMigration(t *testing.T) {
	t.Parallel()
	url, pool := newDatabase(t)
	if _, err := migrations.UpFS(t.Context(), url, schema("0001_bad", "SELEKT")); err == nil {
		t.Fatal("no error")
	}
	_, err := migrations.UpFS(t.Context(), url, schema("0001_bad", "SELECT 1"))
	if !errors.Is(err, migrations.ErrDirty) {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(err.Error(), "in psql: ")
	sql, _, _ := strings.Cut(rest, ";")
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatalf("advice %q: %v", sql, err)
	}
	if _, err := migrations.UpFS(t.Context(), url, schema("0001_bad", "SELECT 1")); err != nil {
		t.Error(err)
	}
}

func TestANewerSchemaIsLeftAlone(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ sql, want string }{
		"ours":    {"UPDATE schema_migrations SET version = 9999", "9999"},
		"River's": {"INSERT INTO river_migration (line, version) VALUES ('main', 999)", "river 999"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			url := pgtest.New(t)
			pool := pgtest.Open(t, url, postgres.Options{})
			if _, err := pool.Exec(t.Context(), c.sql); err != nil {
				t.Fatal(err)
			}
			for what, err := range map[string]error{
				"check": migrations.Check(t.Context(), pool),
				"up":    func() error { _, err := migrations.Up(t.Context(), url); return err }(),
			} {
				if !errors.Is(err, migrations.ErrTooNew) || !strings.Contains(fmt.Sprint(err), c.want) {
					t.Errorf("%s: %v", what, err)
				}
			}
		})
	}
}

func TestCheckIsTwoQueries(t *testing.T) {
	t.Parallel()
	counter := postgres.CountQueries(nil)
	pool := pgtest.PoolWith(t, postgres.Options{Tracer: counter})
	if err := migrations.Check(t.Context(), pool); err != nil {
		t.Fatal(err)
	}
	if n := counter.Count(); n != 2 {
		t.Errorf("%d queries", n)
	}
}

func TestCheckTellsAnUnreachableDatabaseApart(t *testing.T) {
	t.Parallel()
	pool := pgtest.Open(t, "postgres://u@127.0.0.1:1/x", postgres.Options{})
	if err := migrations.Check(t.Context(), pool); !postgres.IsUnavailable(err) || errors.Is(err, migrations.ErrPending) {
		t.Errorf("got %v", err)
	}
}

func TestFileNames(t *testing.T) {
	t.Parallel()
	for name, fs := range map[string]fstest.MapFS{
		"a number of three digits": schema("001_x", ""),
		"no name":                  schema("0001", ""),
		"one number twice":         schema("0001_a", "", "0001_b", ""),
		"a down file":              {"0001_a.down.sql": &fstest.MapFile{}},
	} {
		if _, err := migrations.Load(fs); err == nil {
			t.Errorf("%s was accepted", name)
		}
	}
}

func TestFingerprint(t *testing.T) {
	t.Parallel()
	if a, b := migrations.Fingerprint(), migrations.Fingerprint(); a != b || len(a) != 12 {
		t.Errorf("%q, then %q", a, b)
	}
}
