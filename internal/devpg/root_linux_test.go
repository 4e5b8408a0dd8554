package devpg

import (
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
)

// closedDir is a folder below one that only root may enter, as a checkout under /root.
func closedDir(t *testing.T) string {
	t.Helper()
	dir := newDir(t)
	if err := os.Chmod(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "dev")
}

// runAs starts and stops a server in dir as id.
func runAs(t *testing.T, id identity, dir string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	lock, err := acquire(t.Context(), filepath.Dir(dir))
	if err != nil {
		t.Fatal(err)
	}
	c := cluster{bin: bestBinaries(t), id: id, dir: dir, lock: lock, fast: true}
	pw, err := c.init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	s, err := c.run(t.Context(), pw)
	if err != nil {
		t.Fatal(err)
	}
	if got := query[int](t, s.URL(), "SELECT 1"); got != 1 {
		t.Errorf("got %d", got)
	}
	if uid, _ := owner(filepath.Join("/proc", strconv.Itoa(s.PID()))); !id.namespace && uid != id.uid {
		t.Errorf("the server runs as %d, want %d", uid, id.uid)
	}
	if err := s.Stop(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestRootInAClosedFolder(t *testing.T) {
	t.Parallel()
	needRoot(t)
	needNamespaces(t)
	s := newServer(t, Config{Dir: closedDir(t), Fast: true})
	if uid, ok := owner(s.DataDir()); !ok || uid != 0 {
		t.Errorf("data owned by %d", uid)
	}
	// It has no right on the machine that nobody would not have, but to root's own files.
	if status := read(t, "/proc/"+strconv.Itoa(s.PID())+"/status"); !strings.Contains(status, "CapEff:\t0000000000000000") {
		t.Errorf("the server has capabilities:\n%s", status)
	}
}

func needNamespaces(t *testing.T) {
	t.Helper()
	id, err := lookup("nobody")
	if err != nil {
		t.Skip("no user nobody:", err)
	}
	id.namespace = true
	if err := id.prepare(t.Context(), bestBinaries(t), filepath.Join(newDir(t), "pg")); err != nil {
		t.Skip("user namespaces are forbidden here:", err)
	}
}

// Where namespaces are forbidden, rights are dropped to another user; a folder closed to that one sends the data elsewhere,
// where they are found again. (TestRootUsesDataAsTheirOwner shows the dropping in an open folder.)
func TestRootFallsBackToAnOpenFolder(t *testing.T) {
	t.Parallel()
	needRoot(t)
	bin := bestBinaries(t)
	tries := dropTries()
	if len(tries) == 0 {
		t.Skip("no user to drop to")
	}
	home, fallback := closedDir(t), filepath.Join(newDir(t), "elsewhere")
	id, dir, err := settleAs(t.Context(), tries, bin, "pg", home, fallback)
	if err != nil {
		t.Fatal(err)
	}
	if dir != filepath.Join(fallback, "pg") {
		t.Errorf("settled in %s", dir)
	}
	runAs(t, id, dir)
	again, dirAgain, err := settleAs(t.Context(), tries, bin, "pg", home, fallback)
	if err != nil || again.uid != id.uid || dirAgain != dir {
		t.Errorf("again: %+v in %s, %v", again, dirAgain, err)
	}
}

// A try that fails leaves no folder behind that would be closed to the next one.
func TestFailedTriesLeaveNoFolders(t *testing.T) {
	t.Parallel()
	needRoot(t)
	home, fallback := newDir(t), newDir(t)
	missing := Binaries{Dir: filepath.Join(home, "nowhere"), Major: 99}
	if _, _, err := settleAs(t.Context(), append(namespaceTries(), dropTries()...), missing, "pg99", home, fallback); err == nil {
		t.Fatal("settled with programs that are not there")
	}
	for _, h := range []string{home, fallback} {
		if left, err := os.ReadDir(h); err != nil || len(left) > 0 {
			t.Errorf("left in %s: %v, %v", h, left, err)
		}
	}
}

// Data made by an ordinary user stay that user's when root starts the server.
func TestRootUsesDataAsTheirOwner(t *testing.T) {
	t.Parallel()
	needRoot(t)
	nobody, err := lookup("nobody")
	if err != nil {
		t.Fatal(err)
	}
	home := newDir(t)
	dir := filepath.Join(home, "pg"+strconv.Itoa(bestBinaries(t).Major))
	if err := nobody.prepare(t.Context(), bestBinaries(t), dir); err != nil {
		t.Fatal(err)
	}
	runAs(t, nobody, dir)
	s := newServer(t, Config{Dir: home, Fast: true})
	if uid, _ := owner(s.DataDir()); uid != nobody.uid {
		t.Errorf("data owned by %d", uid)
	}
	if uid, _ := owner(filepath.Join("/proc", strconv.Itoa(s.PID()))); uid != nobody.uid {
		t.Errorf("server runs as %d", uid)
	}
}

// The zombie of a killed starter does not keep the folder.
func TestZombieIsNotAlive(t *testing.T) {
	t.Parallel()
	attr := &os.ProcAttr{Files: []*os.File{nil, nil, nil}, Sys: &syscall.SysProcAttr{}}
	p, err := os.StartProcess("/bin/sh", []string{"sh", "-c", "exit 0"}, attr)
	if err != nil {
		t.Fatal(err)
	}
	for alive(p.Pid) { // until it has ended; nobody has waited for it
	}
	if err := syscall.Kill(p.Pid, 0); err != nil {
		t.Errorf("it is gone altogether: %v", err)
	}
	if _, err := p.Wait(); err != nil {
		t.Error(err)
	}
}
