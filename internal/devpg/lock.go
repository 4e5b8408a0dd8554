package devpg

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// ErrRunning says that a folder has a running server; the error around it says whose.
var ErrRunning = errors.New("a server is running on this folder already")

const (
	lockPoll = 50 * time.Millisecond
	// orphanGrace is how long a start waits for the server of a starter that is dead, which shuts down by itself (measured:
	// under a second).
	orphanGrace = 15 * time.Second
)

// acquire takes the lock of dir. The lock belongs to the open file, which the server's processes inherit, so it is free
// only when the last of them has gone, whatever became of the starter.
func acquire(ctx context.Context, dir string) (*os.File, error) {
	path := filepath.Join(dir, "lock")
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("devpg: open lock: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, orphanGrace)
	defer cancel()
	tick := time.NewTicker(lockPoll)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			return nil, fmt.Errorf("devpg: lock %s: %w", path, errors.Join(err, f.Close()))
		}
		pid := holder(path)
		if pid > 0 && alive(pid) {
			_ = f.Close() // nothing was written
			return nil, fmt.Errorf("devpg: %w: process %d uses %s; stop it, or choose another folder", ErrRunning, pid, dir)
		}
		select {
		case <-ctx.Done():
			_ = f.Close() // nothing was written
			return nil, fmt.Errorf("devpg: %w: its starter has gone but the server in %s has not; `fuser %s` names its processes",
				ErrRunning, dir, path)
		case <-tick.C:
		}
	}
	if err := f.Truncate(0); err != nil {
		return nil, fmt.Errorf("devpg: write lock: %w", errors.Join(err, f.Close()))
	}
	if _, err := f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0); err != nil {
		return nil, fmt.Errorf("devpg: write lock: %w", errors.Join(err, f.Close()))
	}
	return f, nil
}

// holder reads who took the lock, or 0 in the moment before that process has written it.
func holder(path string) int {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0
	}
	return pid
}

// alive reports whether a process runs (a zombie does not).
func alive(pid int) bool {
	if err := syscall.Kill(pid, 0); err != nil && !errors.Is(err, syscall.EPERM) {
		return false
	}
	return !zombie(pid)
}

// Remove deletes a folder and all data in it, unless a server runs there: then the error is around [ErrRunning].
func Remove(dir string) error {
	ctx, cancel := context.WithCancel(context.Background())
	cancel() // do not wait
	f, err := acquire(ctx, dir)
	if err != nil {
		return err
	}
	if err := errors.Join(os.RemoveAll(dir), f.Close()); err != nil {
		return fmt.Errorf("devpg: remove: %w", err)
	}
	return nil
}
