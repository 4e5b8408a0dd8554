package postgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	pgxuuid "github.com/vgarvardt/pgx-google-uuid/v5"
)

const (
	// connectTimeout bounds one attempt to connect, all of TCP, TLS and authentication. A URL may set connect_timeout.
	connectTimeout = 5 * time.Second
	// pingTimeout bounds the ping of a connection that stood idle for over a second; a dead one is replaced after it.
	pingTimeout = 2 * time.Second
	// statementTimeout stops a statement that nobody waits for any longer: no request lives that long. Long maintenance
	// uses SET LOCAL statement_timeout.
	statementTimeout = 30 * time.Second
	// idleInTransactionTimeout ends a session whose transaction was forgotten, before it starves the pool and holds
	// back vacuum. No transaction of ours waits for anything but the database.
	idleInTransactionTimeout = 15 * time.Second
	// maxConnLifetime and its jitter spread reconnections, so that the pool follows a moved server without a stampede.
	maxConnLifetime       = time.Hour
	maxConnLifetimeJitter = 10 * time.Minute
	healthCheckPeriod     = 30 * time.Second
)

// Querier is what both a [pgxpool.Pool] and a [pgx.Tx] offer, for helpers that run inside or outside a transaction.
type Querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
	CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error)
}

var (
	_ Querier = (*pgxpool.Pool)(nil)
	_ Querier = (pgx.Tx)(nil)
)

// Options of a pool. The zero value is usable.
type Options struct {
	// MaxConns is the most connections the pool opens; 0 takes pool_max_conns of the URL, else pgx's default.
	MaxConns int32
	// AppName is shown as application_name in pg_stat_activity; empty means "converger".
	AppName string
	// Tracer sees every query, or nil; see [QueryCounter].
	Tracer pgx.QueryTracer
}

// Open makes a pool for url, a postgres:// URL or a keyword/value string as pgx reads them. It does not connect: the
// first query does, so a server that is down is an error of that query and no reason to fail the start of a pool.
// ctx lends its values to the pool's background work; its cancellation does not close the pool.
//
// Every session has plan_cache_mode=force_generic_plan (our statements are prepared, and planning them anew costs more
// than it gains), enable_seqscan=off (they are made for their indexes) and jit=off, time zone UTC, a statement and an idle-in-transaction timeout (a URL may set others), and reads and
// writes [github.com/google/uuid.UUID] in binary. lock_timeout is left to callers (SET LOCAL). The caller closes the pool.
func Open(ctx context.Context, url string, o Options) (*pgxpool.Pool, error) {
	cfg, err := ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("postgres: the database URL %w", err)
	}
	if o.MaxConns > 0 {
		cfg.MaxConns = o.MaxConns
	}
	cfg.MaxConnLifetime = maxConnLifetime
	cfg.MaxConnLifetimeJitter = maxConnLifetimeJitter
	cfg.HealthCheckPeriod = healthCheckPeriod
	cfg.PingTimeout = pingTimeout

	conn := cfg.ConnConfig
	conn.Tracer = o.Tracer
	if conn.ConnectTimeout == 0 {
		conn.ConnectTimeout = connectTimeout
	}
	// A peer that vanished without a word is noticed in half a minute, not after the kernel's two hours.
	conn.DialFunc = (&net.Dialer{KeepAliveConfig: net.KeepAliveConfig{
		Enable: true, Idle: 15 * time.Second, Interval: 5 * time.Second, Count: 3,
	}}).DialContext

	conn.RuntimeParams["plan_cache_mode"] = "force_generic_plan"
	// A table that was analysed while it was empty, as next month's partitions are by a nightly ANALYZE, is taken for empty
	// until it is analysed again: plans would read all of it meanwhile. Whatever has an index is to use it. Where there is
	// none the table is read all the same, at an imaginary price that would start the JIT compiler for nothing.
	conn.RuntimeParams["enable_seqscan"] = "off"
	conn.RuntimeParams["jit"] = "off"
	conn.RuntimeParams["timezone"] = "UTC"
	conn.RuntimeParams["application_name"] = cmp.Or(o.AppName, conn.RuntimeParams["application_name"], "converger")
	setDefault(conn.RuntimeParams, "statement_timeout", statementTimeout)
	setDefault(conn.RuntimeParams, "idle_in_transaction_session_timeout", idleInTransactionTimeout)

	// Only a server that takes writes is of use to us; with several hosts in the URL the next one is tried.
	conn.ValidateConnect = func(ctx context.Context, c *pgconn.PgConn) error {
		if err := checkVersion(c.ParameterStatus("server_version")); err != nil {
			return err
		}
		return pgconn.ValidateConnectTargetSessionAttrsReadWrite(ctx, c)
	}
	// A session that lives on after its server turned read-only would fail every write until it aged out of the pool
	// (and keep a job leader from ever working again). The refusal itself closes it; no check per query is needed.
	fatal := conn.OnPgError
	conn.OnPgError = func(c *pgconn.PgConn, e *pgconn.PgError) bool {
		return e.Code != codeReadOnly && fatal(c, e)
	}
	cfg.AfterConnect = func(_ context.Context, c *pgx.Conn) error {
		pgxuuid.Register(c.TypeMap())
		return nil
	}
	pool, err := pgxpool.NewWithConfig(ctx, cfg)
	if err != nil {
		return nil, fmt.Errorf("postgres: make pool: %w", err)
	}
	return pool, nil
}

// ParseURL reads what [Open] takes. Its error completes a sentence about the URL and repeats nothing of it: pgx redacts the
// password where it finds it, but one with a / or a : that is not encoded is found elsewhere, such as in "invalid port".
func ParseURL(url string) (*pgxpool.Config, error) {
	cfg, err := pgxpool.ParseConfig(url)
	if err == nil {
		return cfg, nil
	}
	if _, ok := errors.AsType[*fs.PathError](err); ok { // sslrootcert and the like
		return nil, errors.New("names a certificate, key or service file that can't be read")
	}
	return nil, errors.New("can't be read; it must look like postgres://user:password@host:5432/database?option=value, " +
		"with / : @ ? # % in the password written as %2F %3A %40 %3F %23 %25")
}

// setDefault sets a duration parameter, in milliseconds as Postgres reads a bare number, unless the URL has it.
func setDefault(params map[string]string, name string, d time.Duration) {
	if _, ok := params[name]; !ok {
		params[name] = strconv.FormatInt(d.Milliseconds(), 10)
	}
}

// MinVersion is the oldest major version of the server that the program's statements are tested with.
const MinVersion = 15

// checkVersion refuses a server that is too old. What can't be read, such as a proxy's own words, passes.
func checkVersion(version string) error {
	major, _, _ := strings.Cut(strings.TrimSpace(version), ".")
	if n, err := strconv.Atoi(major); err == nil && n < MinVersion {
		return fmt.Errorf("the server is Postgres %s; version %d or newer is needed", version, MinVersion)
	}
	return nil
}
