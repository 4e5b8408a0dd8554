package devpg

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// ErrOtherMajor says that the folder holds data of another major version than any server found; the error around it says
// what to do. The data are not touched.
var ErrOtherMajor = errors.New("the data are of another major version")

const (
	// Name is the user and the database that the server has.
	Name = "converger"

	startTimeout = 90 * time.Second // the first start of a slow machine, or recovery after a crash
	readyPoll    = 10 * time.Millisecond
	stopTimeout  = 20 * time.Second // then Postgres is told to leave without a checkpoint
	quitTimeout  = 5 * time.Second  // then it is killed
	// maxSocketPath is the room for a path in sockaddr_un, less its final NUL: 108 on Linux, 104 on the BSDs and macOS.
	maxSocketPath = 103
	logTail       = 15 // lines of log in an error
)

// Config of a private server.
type Config struct {
	// Dir is the private folder; it is made when absent. Required.
	Dir string
	// BinDir is the folder with initdb and postgres; empty searches, see [Find].
	BinDir string
	// VendoredDir is a folder into which npm may have installed a server; empty for none.
	VendoredDir string
	// Fast gives up all safety of the data in a crash of the machine (fsync=off) and allows more connections, for tests.
	Fast bool
}

// Server is a running private server. Its methods are safe for concurrent use.
type Server struct {
	url      string
	dataDir  string
	cmd      *exec.Cmd
	stopping atomic.Bool
	done     chan struct{}
	err      error // set before done is closed
}

// Start makes the data if there are none and starts the server; it returns when the server answers. ctx bounds the start
// only. The server lives until [Server.Stop], or until this process ends in any way.
//
// Errors are around [ErrRunning], [ErrNoBinaries] or [ErrOtherMajor], or tell what failed with the end of the server's log.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	if cfg.Dir == "" {
		return nil, errors.New("devpg: no folder given")
	}
	home, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	if err := os.MkdirAll(home, 0o755); err != nil { // open to others: the server may run as another user
		return nil, fmt.Errorf("devpg: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	lock, err := acquire(ctx, home)
	if err != nil {
		return nil, err
	}
	s, err := start(ctx, cfg, home, lock)
	if err != nil {
		_ = lock.Close() // closed already where a process had been started
		return nil, err
	}
	return s, nil
}

func start(ctx context.Context, cfg Config, home string, lock *os.File) (*Server, error) {
	found, err := Find(cfg.BinDir, cfg.VendoredDir)
	if err != nil {
		return nil, err
	}
	bin, err := choose(found, home)
	if err != nil {
		return nil, err
	}
	id, dir, err := settle(ctx, bin, home)
	if err != nil {
		return nil, err
	}
	c := cluster{bin: bin, id: id, dir: dir, lock: lock, fast: cfg.Fast}
	password, err := c.init(ctx)
	if err != nil {
		return nil, err
	}
	return c.run(ctx, password)
}

// choose takes the best server that fits the data under home, or the best of all when there are none.
func choose(found []Binaries, home string) (Binaries, error) {
	have := dataMajors(home)
	if os.Geteuid() == 0 {
		have = append(have, dataMajors(fallbackHome(home))...)
	}
	if len(have) == 0 {
		return found[0], nil
	}
	for _, b := range found {
		if slices.Contains(have, b.Major) {
			return b, nil
		}
	}
	return Binaries{}, fmt.Errorf("devpg: %w: %s has data of Postgres %d, found was Postgres %d (%s); install Postgres %d or "+
		"set PG_BIN to it, or move the folder's pg%d away to start with an empty database",
		ErrOtherMajor, home, have[0], found[0].Major, found[0].Dir, have[0], have[0])
}

// dataMajors lists the versions of the data under home, the newest first.
func dataMajors(home string) []int {
	var majors []int
	for _, p := range glob(filepath.Join(home, "pg*", "data", "PG_VERSION")) {
		b, err := os.ReadFile(p)
		if err != nil {
			continue
		}
		if n, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
			majors = append(majors, n)
		}
	}
	slices.Sort(majors)
	slices.Reverse(majors)
	return majors
}

// cluster is the data of one major version and how to run programs on them.
type cluster struct {
	bin  Binaries
	id   identity
	dir  string // .../pgNN
	lock *os.File
	fast bool
}

func (c cluster) data() string { return filepath.Join(c.dir, "data") }

// command makes a process of the server that holds the lock, dies by deathSignal with this process, and knows nothing of
// the caller's Postgres settings.
func (c cluster) command(ctx context.Context, deathSignal syscall.Signal, name string, args ...string) (*exec.Cmd, error) {
	attr, err := c.id.attr()
	if err != nil {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	bindToParent(attr, deathSignal)
	cmd := exec.CommandContext(ctx, filepath.Join(c.bin.Dir, name), args...)
	cmd.Dir = c.dir
	cmd.SysProcAttr = attr
	cmd.ExtraFiles = []*os.File{c.lock}
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		return strings.HasPrefix(kv, "PG") || strings.HasPrefix(kv, "LC_") || strings.HasPrefix(kv, "LANG")
	}), "LC_ALL=C")
	return cmd, nil
}

// init makes the data unless they exist, and returns the password.
func (c cluster) init(ctx context.Context) (string, error) {
	pwFile := filepath.Join(c.dir, "password")
	if b, err := os.ReadFile(filepath.Join(c.data(), "PG_VERSION")); err == nil {
		if v := strings.TrimSpace(string(b)); v != strconv.Itoa(c.bin.Major) {
			return "", fmt.Errorf("devpg: %w: %s is of Postgres %s", ErrOtherMajor, c.data(), v)
		}
		pw, err := os.ReadFile(pwFile)
		if err != nil {
			return "", fmt.Errorf("devpg: the password of the data in %s is lost, move the folder away to start anew: %w", c.dir, err)
		}
		return strings.TrimSpace(string(pw)), nil
	}
	// Made beside and renamed: what a killed initdb left is never taken for data.
	fresh := filepath.Join(c.dir, "data.new")
	if err := os.RemoveAll(fresh); err != nil {
		return "", fmt.Errorf("devpg: %w", err)
	}
	pw := rand.Text() // 128 bits
	if err := os.WriteFile(pwFile, []byte(pw+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("devpg: %w", err)
	}
	if err := c.id.own(pwFile); err != nil {
		return "", fmt.Errorf("devpg: %w", err)
	}
	args := []string{"-D", fresh, "-U", Name, "-A", "scram-sha-256", "--pwfile", pwFile, "-E", "UTF8", "--locale=C"}
	if c.fast {
		args = append(args, "--no-sync")
	}
	cmd, err := c.command(ctx, syscall.SIGKILL, "initdb", args...)
	if err != nil {
		return "", err
	}
	var out []byte
	onOwnThread(func() { out, err = cmd.CombinedOutput() })
	if err != nil {
		return "", fmt.Errorf("devpg: initdb as %s: %w\n%s", c.id.name, err, strings.TrimSpace(string(out)))
	}
	if err := os.Rename(fresh, c.data()); err != nil {
		return "", fmt.Errorf("devpg: %w", err)
	}
	return pw, nil
}

// onOwnThread runs f on an OS thread that ends with it: the death signal of a process follows the thread that made it, and
// the Go runtime is free to end any other thread.
func onOwnThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlocked
		f()
	}()
	<-done
}

// run starts the server and waits until it answers.
func (c cluster) run(ctx context.Context, password string) (*Server, error) {
	host, port := filepath.Join(c.dir, "run"), 5432
	args := []string{"-D", c.data()}
	if socket := filepath.Join(host, ".s.PGSQL.5432"); len(socket) <= maxSocketPath && !strings.ContainsAny(socket, `,"`) {
		args = append(args, "-k", host, "-c", "listen_addresses=")
	} else {
		host = "127.0.0.1"
		var err error
		if port, err = freePort(ctx); err != nil {
			return nil, fmt.Errorf("devpg: find a free port: %w", err)
		}
		args = append(args, "-c", "unix_socket_directories=", "-c", "listen_addresses="+host)
	}
	args = append(args, "-p", strconv.Itoa(port), "-c", "timezone=UTC", "-c", "log_timezone=UTC")
	if c.fast {
		args = append(args, "-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=300")
	} else {
		args = append(args, "-c", "max_connections=200")
	}

	logPath := filepath.Join(c.dir, "log")
	if err := os.Rename(logPath, logPath+".old"); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	logFile, err := os.OpenFile(logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	defer func() { _ = logFile.Close() }() // the server has its own

	// SIGINT is Postgres' "fast" shutdown: end the sessions, write everything, leave.
	cmd, err := c.command(context.Background(), syscall.SIGINT, "postgres", args...)
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = logFile, logFile
	query := url.Values{"host": {host}, "port": {strconv.Itoa(port)}, "sslmode": {"disable"}}
	dsn := url.URL{
		Scheme: "postgres", User: url.UserPassword(Name, password), Path: "/" + Name,
		RawQuery: strings.ReplaceAll(query.Encode(), "+", "%20"), // libpq and pgx read a plus as itself
	}
	s := &Server{url: dsn.String(), dataDir: c.data(), cmd: cmd, done: make(chan struct{})}
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // see onOwnThread
		err := cmd.Start()
		started <- err
		if err != nil {
			return
		}
		s.supervise(c.lock, logPath)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("devpg: %w", err)
	}
	dsn.Path = "/postgres"
	if err := s.ready(ctx, dsn.String()); err != nil {
		select {
		case <-s.done: // it says itself why
			return nil, s.err
		default:
		}
		s.kill()
		return nil, fmt.Errorf("devpg: postgres as %s: %w\n%s", c.id.name, err, tail(logPath))
	}
	return s, nil
}

// supervise waits for the process to end.
func (s *Server) supervise(lock *os.File, logPath string) {
	err := s.cmd.Wait()
	if !s.stopping.Load() {
		if err == nil {
			err = errors.New("exit status 0")
		}
		s.err = fmt.Errorf("devpg: postgres ended by itself: %w; the end of %s:\n%s", err, logPath, tail(logPath))
	}
	// After a crash other processes of the server hold the lock for a moment more; the next starter is to wait for them,
	// not to take us for the owner.
	_ = lock.Truncate(0)
	_ = lock.Close()
	close(s.done)
}

// ready waits until the server answers at admin, and makes our database there.
func (s *Server) ready(ctx context.Context, admin string) error {
	tick := time.NewTicker(readyPoll)
	defer tick.Stop()
	for {
		conn, err := pgx.Connect(ctx, admin)
		if err == nil {
			defer func() { _ = conn.Close(ctx) }() // nothing hangs on it
			return createDatabase(ctx, conn)
		}
		var pg *pgconn.PgError
		if errors.As(err, &pg) && pg.Code != "57P03" { // cannot_connect_now: it is starting up
			return err
		}
		select {
		case <-s.done:
			return s.err
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-tick.C:
		}
	}
}

func createDatabase(ctx context.Context, conn *pgx.Conn) error {
	var exists bool
	err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)", Name).Scan(&exists)
	if err != nil || exists {
		return err
	}
	_, err = conn.Exec(ctx, "CREATE DATABASE "+pgx.Identifier{Name}.Sanitize())
	return err
}

// URL is the address of the database, with its password, for pgx and libpq.
func (s *Server) URL() string { return s.url }

// DataDir is where the data lie.
func (s *Server) DataDir() string { return s.dataDir }

// PID is the process id of the server.
func (s *Server) PID() int { return s.cmd.Process.Pid }

// Done is closed when the server has ended, for whatever reason; see [Server.Err].
func (s *Server) Done() <-chan struct{} { return s.done }

// Err is nil while the server runs and after [Server.Stop]; else it tells why the server ended by itself.
func (s *Server) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// Stop ends all sessions, lets the server write everything, and returns when it has gone. When ctx ends, or 20 s pass,
// the server is told to leave at once (it recovers at its next start), and then killed. A second Stop is no error.
func (s *Server) Stop(ctx context.Context) error {
	s.stopping.Store(true)
	ctx, cancel := context.WithTimeout(ctx, stopTimeout)
	defer cancel()
	s.signal(syscall.SIGINT)
	select {
	case <-s.done:
		return s.err
	case <-ctx.Done():
	}
	s.kill()
	return fmt.Errorf("devpg: postgres did not shut down in time and was killed: %w", ctx.Err())
}

// kill ends the server in haste: SIGQUIT lets it end its own processes, SIGKILL is for one that hangs.
func (s *Server) kill() {
	s.stopping.Store(true)
	s.signal(syscall.SIGQUIT)
	select {
	case <-s.done:
	case <-time.After(quitTimeout):
		s.signal(syscall.SIGKILL)
		<-s.done
	}
}

func (s *Server) signal(sig syscall.Signal) {
	_ = s.cmd.Process.Signal(sig) // a process that has ended is what we want
}

func freePort(ctx context.Context) (int, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	port := l.Addr().(*net.TCPAddr).Port
	return port, l.Close()
}

// tail is the last lines of a log, for an error.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-logTail):], "\n")
}
