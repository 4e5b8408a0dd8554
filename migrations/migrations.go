package migrations

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/golang-migrate/migrate/v4"
	migratepgx "github.com/golang-migrate/migrate/v4/database/pgx/v5"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"

	"converger/internal/postgres"
)

//go:embed *.up.sql
var files embed.FS

var (
	// ErrPending says that the database lacks migrations of this program; the error around it names them.
	ErrPending = errors.New("schema is behind this program")
	// ErrTooNew says that the database has migrations that this program does not know; the error around it names them.
	ErrTooNew = errors.New("schema is newer than this program")
	// ErrDirty says that a migration failed and nobody has looked at it yet; the error around it says what to do.
	ErrDirty = errors.New("a migration failed half-way")
)

const (
	// lockID is the key of our advisory lock: "converge" in ASCII, so that pg_locks shows the same number everywhere.
	lockID int64 = 0x636f6e7665726765
	// lockPoll is how often a waiting node tries the lock.
	lockPoll = 50 * time.Millisecond
)

// Report tells what [Up] did.
type Report struct {
	// Applied and River name the migrations run by this call, in order, such as "0001_init"; both are empty when there
	// was nothing to do.
	Applied, River []string
	// Waited is the time spent waiting for another node that was migrating, Took the time of the migrations.
	Waited, Took time.Duration
}

// State is a database against this program.
type State struct {
	// Applied and Pending name this program's migrations, in order. RiverApplied and RiverPending are River's.
	Applied, Pending, RiverApplied, RiverPending []string
	// Unknown names versions in the database that this program does not know: a newer program's.
	Unknown []string
	// Dirty names the migration that failed half-way, or is empty.
	Dirty string
}

// Err is nil when the schema is what this program was built for, else an error around [ErrDirty], [ErrTooNew] or
// [ErrPending], the gravest first, that names the versions and what to do.
func (s State) Err() error {
	switch pending := slices.Concat(s.Pending, s.RiverPending); {
	case s.Dirty != "":
		return dirtyError(s)
	case len(s.Unknown) > 0:
		return fmt.Errorf("%w: it has %s; run the newer program", ErrTooNew, strings.Join(s.Unknown, ", "))
	case len(pending) > 0:
		return fmt.Errorf("%w: missing %s; run `server migrate up`", ErrPending, strings.Join(pending, ", "))
	}
	return nil
}

func dirtyError(s State) error {
	before := "truncate schema_migrations"
	if i := slices.Index(s.Applied, s.Dirty); i > 0 {
		v, _, _ := strings.Cut(s.Applied[i-1], "_")
		n, _ := strconv.ParseUint(v, 10, 63)
		before = fmt.Sprintf("update schema_migrations set version = %d, dirty = false", n)
	}
	return fmt.Errorf("%w: %s. Find the cause in the log of that run and mend it; a file of several statements ran as "+
		"one transaction and left nothing behind, a CREATE INDEX CONCURRENTLY may have left an invalid index to drop. "+
		"Then run in psql: %s; and `server migrate up` again", ErrDirty, s.Dirty, before)
}

// Up brings the database at url to this program's schema: our migrations, then River's. Any number of nodes may call it
// at once: one works, the others wait for it and find nothing to do. It uses connections of its own, with no statement
// timeout. When ctx ends it stops waiting, or stops after the migration that is running.
//
// Errors: around [ErrDirty] or [ErrTooNew] without a change, else of the connection or of the migration that failed;
// what earlier migrations did stays, and Report names it.
func Up(ctx context.Context, url string) (Report, error) { return up(ctx, url, files) }

// Status reads the state of the database behind pool. It changes nothing and works on an empty database.
func Status(ctx context.Context, pool *pgxpool.Pool) (State, error) {
	return status(ctx, pool, files)
}

// Check returns nil when the schema is exactly this program's, else an error around [ErrPending], [ErrTooNew] or
// [ErrDirty], or the database's own error. It costs two small queries, so it fits the start and a readiness probe; a
// probe should bear [ErrTooNew], for in a rolling update the schema is migrated before the last old node has gone.
func Check(ctx context.Context, pool *pgxpool.Pool) error {
	s, err := status(ctx, pool, files)
	if err != nil {
		return err
	}
	return s.Err()
}

// Fingerprint is a short hash of all migrations, ours and River's: equal exactly for equal schemas.
func Fingerprint() string {
	h := sha256.New()
	own, err := load(files)
	if err != nil {
		panic(err) // the files are compiled in
	}
	for _, m := range own {
		b, err := fs.ReadFile(files, m.file)
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(h, "%s %d\n%s", m.file, len(b), b)
	}
	for _, m := range riverVersions() {
		fmt.Fprintf(h, "river %d %d\n%s", m.Version, len(m.SQLUp), m.SQLUp)
	}
	return hex.EncodeToString(h.Sum(nil)[:6])
}

// migration is one file of ours.
type migration struct {
	version int
	name    string // NNNN_name
	file    string
}

var fileName = regexp.MustCompile(`^([0-9]{4})_[a-z0-9_]+\.up\.sql$`)

// load lists the migrations of fsys in order, and refuses names that golang-migrate would quietly skip.
func load(fsys fs.FS) ([]migration, error) {
	entries, err := fs.Glob(fsys, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("migrations: list: %w", err)
	}
	var ms []migration
	for _, e := range entries { // Glob sorts
		match := fileName.FindStringSubmatch(path.Base(e))
		if match == nil {
			return nil, fmt.Errorf("migrations: %s is not named NNNN_name.up.sql", e)
		}
		v, err := strconv.Atoi(match[1])
		if err != nil {
			return nil, fmt.Errorf("migrations: %s: %w", e, err)
		}
		if len(ms) > 0 && ms[len(ms)-1].version == v {
			return nil, fmt.Errorf("migrations: %s and %s have one number", ms[len(ms)-1].file, e)
		}
		ms = append(ms, migration{version: v, name: strings.TrimSuffix(e, ".up.sql"), file: e})
	}
	return ms, nil
}

func up(ctx context.Context, url string, fsys fs.FS) (rep Report, err error) {
	cfg, err := postgres.ParseURL(url) // the pool's parser: it knows pool_* parameters, which a plain connection refuses
	if err != nil {
		return rep, fmt.Errorf("migrations: the database URL %w", err)
	}
	cfg.ConnConfig.RuntimeParams["application_name"] = "converger-migrate"
	cfg.ConnConfig.RuntimeParams["statement_timeout"] = "0"
	cfg.MaxConns = 2

	start := time.Now()
	unlock, err := lock(ctx, cfg.ConnConfig)
	if err != nil {
		return rep, err
	}
	defer unlock()
	rep.Waited = time.Since(start)

	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return rep, fmt.Errorf("migrations: make pool: %w", err)
	}
	defer pool.Close()
	before, err := status(ctx, pool, fsys)
	if err != nil {
		return rep, err
	}
	if err := before.Err(); err != nil && !errors.Is(err, ErrPending) {
		return rep, err
	}
	start = time.Now()
	defer func() { rep.Took = time.Since(start) }()
	ownErr := upOwn(ctx, cfg.ConnConfig, fsys)
	// Read again rather than believe: after an error the report still says how far it came.
	after, err := status(context.WithoutCancel(ctx), pool, fsys)
	if err != nil {
		return rep, errors.Join(ownErr, err)
	}
	for _, name := range after.Applied {
		if !slices.Contains(before.Applied, name) && name != after.Dirty {
			rep.Applied = append(rep.Applied, name)
		}
	}
	if ownErr != nil {
		return rep, ownErr
	}
	res, err := riverMigrator(pool).Migrate(ctx, rivermigrate.DirectionUp, nil)
	if err != nil {
		return rep, fmt.Errorf("migrations: river: %w", err)
	}
	for _, v := range res.Versions {
		rep.River = append(rep.River, riverName(v.Version, v.Name))
	}
	return rep, nil
}

// lock takes our advisory lock on a connection of its own. It tries and waits rather than block in pg_advisory_lock: a
// blocked call holds a snapshot, and a CREATE INDEX CONCURRENTLY of the node that works would wait for it for ever.
func lock(ctx context.Context, cfg *pgx.ConnConfig) (unlock func(), err error) {
	conn, err := pgx.ConnectConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("migrations: %w", err)
	}
	// Closing the connection is what unlocks, here as in a crash.
	unlock = func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
		defer cancel()
		_ = conn.Close(ctx) // the lock goes with the session whatever Close says
	}
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		var got bool
		if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", lockID).Scan(&got); err != nil {
			unlock()
			return nil, fmt.Errorf("migrations: take lock: %w", err)
		}
		if got {
			return unlock, nil
		}
		select {
		case <-ctx.Done():
			unlock()
			return nil, fmt.Errorf("migrations: another node is migrating: %w", ctx.Err())
		case <-tick.C:
		}
	}
}

// upOwn runs golang-migrate over fsys. The caller holds our lock, so golang-migrate's own is only ever contended by a
// command-line tool that someone runs by hand.
func upOwn(ctx context.Context, cfg *pgx.ConnConfig, fsys fs.FS) error {
	src, err := iofs.New(fsys, ".")
	if err != nil {
		return fmt.Errorf("migrations: open files: %w", err)
	}
	db := stdlib.OpenDB(*cfg)
	drv, err := migratepgx.WithInstance(db, &migratepgx.Config{})
	if err != nil {
		return fmt.Errorf("migrations: %w", errors.Join(err, db.Close()))
	}
	m, err := migrate.NewWithInstance("iofs", src, "pgx5", drv)
	if err != nil {
		return fmt.Errorf("migrations: %w", errors.Join(err, drv.Close()))
	}
	stop := context.AfterFunc(ctx, func() { m.GracefulStop <- true }) // buffered for one
	err = m.Up()
	stop()
	srcErr, dbErr := m.Close()
	switch {
	case err != nil && !errors.Is(err, migrate.ErrNoChange):
		return fmt.Errorf("migrations: %w", err)
	case ctx.Err() != nil:
		return fmt.Errorf("migrations: stopped between two migrations: %w", ctx.Err())
	}
	return errors.Join(srcErr, dbErr)
}

// status reads both version tables; a table that is not there yet is an empty one.
func status(ctx context.Context, pool *pgxpool.Pool, fsys fs.FS) (State, error) {
	var s State
	own, err := load(fsys)
	if err != nil {
		return s, err
	}
	version, dirty := 0, false
	err = pool.QueryRow(ctx, "SELECT version, dirty FROM schema_migrations").Scan(&version, &dirty)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) && !undefinedTable(err) {
		return s, fmt.Errorf("migrations: read schema_migrations: %w", err)
	}
	known := false
	for _, m := range own {
		if m.version > version {
			s.Pending = append(s.Pending, m.name)
			continue
		}
		s.Applied = append(s.Applied, m.name)
		known = m.version == version
	}
	if version > 0 && !known {
		s.Unknown = append(s.Unknown, fmt.Sprintf("%04d", version))
	}
	if dirty {
		s.Dirty = fmt.Sprintf("%04d", version)
		if known {
			s.Dirty = s.Applied[len(s.Applied)-1]
		}
	}

	rows, err := pool.Query(ctx, "SELECT version FROM river_migration WHERE line = 'main' ORDER BY version")
	var applied []int
	if err == nil {
		applied, err = pgx.CollectRows(rows, pgx.RowTo[int])
	}
	if err != nil && !undefinedTable(err) {
		return s, fmt.Errorf("migrations: read river_migration: %w", err)
	}
	for _, m := range riverVersions() {
		name := riverName(m.Version, m.Name)
		if i := slices.Index(applied, m.Version); i >= 0 {
			s.RiverApplied = append(s.RiverApplied, name)
			applied = slices.Delete(applied, i, i+1)
		} else {
			s.RiverPending = append(s.RiverPending, name)
		}
	}
	for _, v := range applied {
		s.Unknown = append(s.Unknown, fmt.Sprintf("river %03d", v))
	}
	return s, nil
}

func riverName(version int, name string) string {
	return fmt.Sprintf("river %03d %s", version, name)
}

// riverVersions lists the migrations of the River we are built with; reading them is a millisecond of every [Check].
var riverVersions = sync.OnceValue(func() []rivermigrate.Migration { return riverMigrator(nil).AllVersions() })

// riverMigrator makes River's migrator; with a nil pool it only lists versions. Its log line per migration says no more
// than Report does.
func riverMigrator(pool *pgxpool.Pool) *rivermigrate.Migrator[pgx.Tx] {
	m, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{
		Logger: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		panic(err) // only for an unknown migration line, and we take the default
	}
	return m
}

func undefinedTable(err error) bool {
	var pg *pgconn.PgError
	return errors.As(err, &pg) && pg.Code == "42P01"
}
