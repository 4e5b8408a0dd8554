package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"

	"converger/internal/postgres"
	"converger/migrations"
)

// pgbenchScript inserts one row of 300 bytes into a table with one index: the least that accepting a message can cost when
// each has its own transaction.
const pgbenchScript = "INSERT INTO floor (body) VALUES (repeat('x', 300));\n"

const pgbenchClients = 32

// pgbench is the floor of accepting.
type pgbench struct {
	program string
	script  string
	env     []string
}

// newPgbench makes the floor's table in a database of its own. missing says why there is no floor, when there is none.
func newPgbench(ctx context.Context, binDir, dir, database string) (_ *pgbench, missing string, _ error) {
	p := &pgbench{program: filepath.Join(binDir, "pgbench"), script: filepath.Join(dir, "insert.sql")}
	if _, err := os.Stat(p.program); err != nil {
		return nil, "no pgbench in " + binDir + ": it comes with a full Postgres package", nil
	}
	env, err := libpqEnv(database)
	if err != nil {
		return nil, "", err
	}
	p.env = append(os.Environ(), env...)
	if err := os.WriteFile(p.script, []byte(pgbenchScript), 0o600); err != nil {
		return nil, "", err
	}
	conn, err := pgx.Connect(ctx, database)
	if err != nil {
		return nil, "", err
	}
	defer func() { _ = conn.Close(ctx) }()
	_, err = conn.Exec(ctx, "CREATE TABLE floor (id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, body text NOT NULL)")
	return p, "", err
}

// libpqEnv puts a URL into the environment of a libpq program: on the command line everybody could read the password.
func libpqEnv(database string) ([]string, error) {
	u, err := url.Parse(database)
	if err != nil {
		return nil, errors.New("the database's URL cannot be read")
	}
	password, _ := u.User.Password()
	host, port := u.Query().Get("host"), u.Query().Get("port")
	if host == "" {
		host, port = u.Hostname(), u.Port()
	}
	return []string{
		"PGHOST=" + host, "PGPORT=" + port, "PGUSER=" + u.User.Username(), "PGPASSWORD=" + password,
		"PGDATABASE=" + strings.TrimPrefix(u.Path, "/"),
	}, nil
}

// rate runs it for whole seconds and returns rows a second.
func (p *pgbench) rate(ctx context.Context, d time.Duration) (float64, error) {
	seconds := max(1, int(math.Round(d.Seconds())))
	cmd := exec.CommandContext(ctx, p.program, "-n", "-f", p.script, "-M", "prepared",
		"-c", strconv.Itoa(pgbenchClients), "-j", "2", "-T", strconv.Itoa(seconds))
	cmd.Env = p.env
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("pgbench: %w\n%s", err, strings.TrimSpace(string(out)))
	}
	return parseTPS(string(out))
}

// tpsLine is of pgbench since 14; 13 and before print two, this one among them.
var tpsLine = regexp.MustCompile(`(?m)^tps = ([0-9.]+) \((?:without initial connection time|excluding connections establishing)\)`)

func parseTPS(out string) (float64, error) {
	m := tpsLine.FindStringSubmatch(out)
	if m == nil {
		return 0, fmt.Errorf("pgbench printed no rate:\n%s", strings.TrimSpace(out))
	}
	return strconv.ParseFloat(m[1], 64)
}

// noop is a job that does nothing.
type noop struct{}

// Kind implements [river.JobArgs].
func (noop) Kind() string { return "noop" }

type noopWorker struct{ river.WorkerDefaults[noop] }

// Work implements [river.Worker].
func (*noopWorker) Work(context.Context, *river.Job[noop]) error { return nil }

const (
	riverJobs       = 30_000
	riverWorkers    = 500
	riverCooldown   = 5 * time.Millisecond
	riverPoll       = 50 * time.Millisecond
	riverInsertMany = 2_000
	riverPatience   = 2 * time.Minute
)

// riverFloor is the floor of delivering: River works jobs that do nothing.
type riverFloor struct {
	pool *pgxpool.Pool
}

func newRiverFloor(ctx context.Context, database string) (*riverFloor, error) {
	if _, err := migrations.Up(ctx, database); err != nil {
		return nil, err
	}
	pool, err := postgres.Open(ctx, database, postgres.Options{MaxConns: 20, AppName: "pathbench river"})
	if err != nil {
		return nil, err
	}
	return &riverFloor{pool: pool}, nil
}

func (f *riverFloor) close() { f.pool.Close() }

// rate inserts jobs, then works them, and returns jobs a second from the first one's completion to the last one's; they are
// completed when the database says so.
func (f *riverFloor) rate(ctx context.Context) (float64, error) {
	if _, err := f.pool.Exec(ctx, "TRUNCATE river_job"); err != nil {
		return 0, fmt.Errorf("river floor: %w", err)
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, &noopWorker{})
	client, err := river.NewClient(riverpgxv5.New(f.pool), &river.Config{
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: riverWorkers}},
		Workers:           workers,
		FetchCooldown:     riverCooldown,
		FetchPollInterval: riverPoll,
		Logger:            slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return 0, fmt.Errorf("river floor: %w", err)
	}
	batch := make([]river.InsertManyParams, riverInsertMany)
	for i := range batch {
		batch[i].Args = noop{}
	}
	for range riverJobs / riverInsertMany {
		if _, err := client.InsertManyFast(ctx, batch); err != nil {
			return 0, fmt.Errorf("river floor: %w", err)
		}
	}
	completed, unsubscribe := client.SubscribeConfig(&river.SubscribeConfig{
		ChanSize: riverJobs, Kinds: []river.EventKind{river.EventKindJobCompleted},
	})
	defer unsubscribe()
	if err := client.Start(ctx); err != nil {
		return 0, fmt.Errorf("river floor: %w", err)
	}
	defer func() { _ = client.Stop(context.WithoutCancel(ctx)) }() // idle, or told to stop by ctx
	ctx, cancel := context.WithTimeout(ctx, riverPatience)
	defer cancel()
	var first time.Time
	for n := range riverJobs {
		select {
		case <-completed:
			if n == 0 {
				first = time.Now()
			}
		case <-ctx.Done():
			return 0, fmt.Errorf("river floor: %d of %d jobs done: %w", n, riverJobs, ctx.Err())
		}
	}
	return (riverJobs - 1) / time.Since(first).Seconds(), nil
}

// testFsync runs pg_test_fsync and returns its line for fdatasync; "" when there is none.
func testFsync(ctx context.Context, binDir, dir string) string {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // it goes on for a quarter of a minute after the line that is wanted
	cmd := exec.CommandContext(ctx, filepath.Join(binDir, "pg_test_fsync"), "-s", "1", "-f", filepath.Join(dir, "fsync.test"))
	out, err := cmd.StdoutPipe()
	if err != nil || cmd.Start() != nil {
		return ""
	}
	defer func() { _ = cmd.Wait() }() // it was cut off
	found := ""
	for lines := bufio.NewScanner(out); found == "" && lines.Scan(); {
		found = parseFsync(lines.Text())
	}
	cancel()
	return found
}

var fsyncLine = regexp.MustCompile(`^\s*fdatasync\s+([0-9.]+ ops/sec\s+[0-9]+ usecs/op)`)

// parseFsync reads a line. The first of fdatasync is for one write of 8 kB, as a small commit is.
func parseFsync(line string) string {
	m := fsyncLine.FindStringSubmatch(line)
	if m == nil {
		return ""
	}
	return strings.Join(strings.Fields(m[1]), " ")
}
