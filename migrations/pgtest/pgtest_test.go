package pgtest_test

import (
	"strconv"
	"sync"
	"testing"

	"converger/internal/postgres"
	"converger/migrations"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

func TestPoolHasTheSchema(t *testing.T) {
	t.Parallel()
	if err := migrations.Check(t.Context(), pgtest.Pool(t)); err != nil {
		t.Error(err)
	}
}

func TestEmptyHasNoSchema(t *testing.T) {
	t.Parallel()
	var n int
	pool := pgtest.Open(t, pgtest.Empty(t), postgres.Options{})
	err := pool.QueryRow(t.Context(), "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace").Scan(&n)
	if err != nil || n != 0 {
		t.Errorf("%d relations in an empty database, %v", n, err)
	}
}

func TestTestsDoNotSeeEachOther(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	seen := map[string]bool{}
	for i := range 8 {
		t.Run(strconv.Itoa(i), func(t *testing.T) {
			t.Parallel()
			pool := pgtest.Pool(t)
			if _, err := pool.Exec(t.Context(), "CREATE TABLE mine (x int)"); err != nil {
				t.Error("another test's table is here:", err)
			}
			var name string
			if err := pool.QueryRow(t.Context(), "SELECT current_database()").Scan(&name); err != nil {
				t.Fatal(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if seen[name] {
				t.Errorf("database %s given twice", name)
			}
			seen[name] = true
		})
	}
}

// A database is gone when its test has ended, with sessions that the test forgot.
func TestDatabaseIsDropped(t *testing.T) {
	t.Parallel()
	var url string
	t.Run("the test", func(t *testing.T) {
		url = pgtest.New(t)
	})
	left := pgtest.Open(t, url, postgres.Options{})
	if err := left.Ping(t.Context()); err == nil {
		t.Errorf("database %s is still there", url)
	}
}

func BenchmarkNew(b *testing.B) {
	pgtest.New(b)
	for b.Loop() {
		pgtest.New(b)
	}
}
