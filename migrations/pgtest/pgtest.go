package pgtest

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/devpg"
	"converger/internal/postgres"
	"converger/migrations"
)

// EnvURL names the environment variable with the URL of a server to share, instead of a private one.
const EnvURL = "CONVERGER_TEST_DATABASE_URL"

const (
	// lockID keeps two test binaries from building one template: "pgtest" in ASCII.
	lockID int64 = 0x706774657374
	// folderPattern of a private server's folder; see sweep.
	folderPattern = "converger-pgtest-*"
	setupTimeout  = 2 * time.Minute
)

// Main runs the tests of a package and then stops its private server and removes the folder. Use it so:
//
//	func TestMain(m *testing.M) { pgtest.Main(m) }
func Main(m *testing.M) {
	code := m.Run()
	if shared.stop != nil {
		if err := shared.stop(); err != nil {
			fmt.Fprintln(os.Stderr, "pgtest:", err)
		}
	}
	os.Exit(code)
}

// Empty makes a database without a schema and returns its URL. It is dropped when the test ends.
func Empty(t testing.TB) string {
	t.Helper()
	return create(t, "")
}

// New makes a database with the schema of package migrations and returns its URL. It is dropped when the test ends,
// with whatever is still connected to it.
func New(t testing.TB) string {
	t.Helper()
	_, template, err := shared.ready()
	if err != nil {
		t.Fatal("pgtest:", err)
	}
	return create(t, template)
}

// Pool is [New] with a pool of internal/postgres on it, which is closed when the test ends. It has room for ten
// connections.
func Pool(t testing.TB) *pgxpool.Pool {
	t.Helper()
	return PoolWith(t, postgres.Options{MaxConns: 10})
}

// PoolWith is [Pool] with the caller's options, such as a [postgres.QueryCounter].
func PoolWith(t testing.TB, o postgres.Options) *pgxpool.Pool {
	t.Helper()
	return Open(t, New(t), o)
}

// Open opens a further pool, as another node would, on the database at url. It is closed when the test ends.
func Open(t testing.TB, url string, o postgres.Options) *pgxpool.Pool {
	t.Helper()
	pool, err := postgres.Open(t.Context(), url, o)
	if err != nil {
		t.Fatal("pgtest:", err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// create makes a database, as a clone of template unless that is "".
func create(t testing.TB, template string) string {
	t.Helper()
	admin, _, err := shared.ready()
	if err != nil {
		t.Fatal("pgtest:", err)
	}
	name := "t_" + strings.ToLower(rand.Text()[:16])
	sql := "CREATE DATABASE " + name
	if template != "" {
		sql += " TEMPLATE " + template
	}
	if err := exec(t.Context(), admin, sql); err != nil {
		t.Fatal("pgtest:", err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), setupTimeout) // t's context has ended
		defer cancel()
		if err := exec(ctx, admin, "DROP DATABASE "+name+" WITH (FORCE)"); err != nil {
			t.Error("pgtest:", err)
		}
	})
	u, err := withDatabase(admin, name)
	if err != nil {
		t.Fatal("pgtest:", err)
	}
	return u
}

// server is what the tests of this binary share.
type server struct {
	once     sync.Once
	admin    string // URL
	template string
	err      error
	stop     func() error // nil unless private
}

var shared server

// ready gives the server's URL and the template's name, after making both if need be.
func (s *server) ready() (admin, template string, err error) {
	s.once.Do(func() {
		ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
		defer cancel()
		if s.admin = os.Getenv(EnvURL); s.admin == "" {
			if s.admin, s.stop, s.err = StartServer(ctx); s.err != nil {
				return
			}
		}
		s.template, s.err = buildTemplate(ctx, s.admin)
	})
	return s.admin, s.template, s.err
}

// StartServer starts a private server that is fast and keeps nothing, in a temporary folder that stop removes. The program
// withpg shares it through [EnvURL].
func StartServer(ctx context.Context) (url string, stop func() error, err error) {
	sweep()
	dir, err := os.MkdirTemp("", folderPattern)
	if err != nil {
		return "", nil, err
	}
	srv, err := devpg.Start(ctx, devpg.Config{Dir: dir, BinDir: os.Getenv("PG_BIN"), VendoredDir: vendored(), Fast: true})
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return srv.URL(), func() error {
		ctx, cancel := context.WithTimeout(context.Background(), setupTimeout)
		defer cancel()
		return errors.Join(srv.Stop(ctx), os.RemoveAll(dir))
	}, nil
}

// sweep removes the folders of test binaries that ended without [Main], which their servers did not outlive.
func sweep() {
	dirs, err := filepath.Glob(filepath.Join(os.TempDir(), folderPattern))
	if err != nil {
		return
	}
	for _, d := range dirs {
		// One that has no lock yet was made a moment ago by a binary that is about to start its server.
		if _, err := os.Stat(filepath.Join(d, "lock")); err == nil {
			_ = devpg.Remove(d) // in use, or another user's: not ours to remove
		}
	}
}

// vendored is the folder in the checkout where `make` lets npm install a server. Tests run in their package's folder.
func vendored() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return filepath.Join(dir, ".cache", "pg")
		}
		up := filepath.Dir(dir)
		if up == dir {
			return ""
		}
		dir = up
	}
}

// buildTemplate makes the migrated database that tests are cloned from, unless it is there already. The flag
// datistemplate, set last, tells a whole one from one whose maker was killed.
func buildTemplate(ctx context.Context, admin string) (string, error) {
	name := "converger_template_" + migrations.Fingerprint()
	conn, err := pgx.Connect(ctx, admin)
	if err != nil {
		return "", fmt.Errorf("connect: %w", err)
	}
	defer func() { _ = conn.Close(ctx) }() // which unlocks too
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", lockID); err != nil {
		return "", fmt.Errorf("lock: %w", err)
	}
	var whole bool
	err = conn.QueryRow(ctx, "SELECT datistemplate FROM pg_database WHERE datname = $1", name).Scan(&whole)
	switch {
	case err == nil && whole:
		return name, nil
	case err != nil && !errors.Is(err, pgx.ErrNoRows):
		return "", fmt.Errorf("look for template: %w", err)
	}
	for _, sql := range []string{"DROP DATABASE IF EXISTS " + name + " WITH (FORCE)", "CREATE DATABASE " + name} {
		if _, err := conn.Exec(ctx, sql); err != nil {
			return "", fmt.Errorf("make template: %w", err)
		}
	}
	u, err := withDatabase(admin, name)
	if err != nil {
		return "", err
	}
	if _, err := migrations.Up(ctx, u); err != nil {
		return "", fmt.Errorf("migrate template: %w", err)
	}
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+name+" IS_TEMPLATE true ALLOW_CONNECTIONS false"); err != nil {
		return "", fmt.Errorf("seal template: %w", err)
	}
	return name, nil
}

// exec runs one statement on a connection of its own: an idle shared one would be a goroutine that leak checks find.
func exec(ctx context.Context, url, sql string) error {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	_, err = conn.Exec(ctx, sql)
	if err != nil {
		err = fmt.Errorf("%s: %w", sql, err)
	}
	return errors.Join(err, conn.Close(ctx))
}

// withDatabase is the URL of another database of the server.
func withDatabase(server, name string) (string, error) {
	u, err := url.Parse(server)
	if err != nil || u.Scheme == "" {
		return "", fmt.Errorf("%s must be a postgres:// URL", EnvURL) // the value may hold a password
	}
	u.Path = "/" + name
	return u.String(), nil
}
