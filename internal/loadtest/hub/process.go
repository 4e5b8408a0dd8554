package hub

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	startPatience = time.Minute
	stopPatience  = 20 * time.Second
)

// limits keeps every limit of the measured routes on and out of the way.
const limits = `{"activity_create":{"limit":1000000000,"scale_ms":1000},"api_read":{"limit":1000000000,"scale_ms":1000},` +
	`"inbound":{"limit":1000000000,"scale_ms":1000},"management":{"limit":1000000000,"scale_ms":1000}}`

// Process is the real program as a child process, on a free port of loopback, with all limits on (only their numbers are
// large) and its metrics open to loopback. One goroutine uses it.
type Process struct {
	Client // its Token is the caller's to set

	program string
	addr    string
	env     []string
	logPath string

	cmd   *exec.Cmd
	ended chan struct{} // closed when cmd has ended
}

// NewProcess prepares the program; the database must be there. Its log goes to dir/hub.log, uploads to dir/uploads.
func NewProcess(ctx context.Context, program, database, dir string) (*Process, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().String()
	if err := l.Close(); err != nil {
		return nil, err
	}
	// Of the machine's environment only what a process needs: settings of a real hub must not leak in.
	keep := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return !slices.Contains([]string{"PATH", "HOME", "TMPDIR", "TZ", "GODEBUG", "GOMAXPROCS", "GOGC"}, name)
	})
	return &Process{
		Client:  Client{Base: "http://" + addr, HTTP: &http.Client{Timeout: startPatience, Transport: &http.Transport{MaxIdleConnsPerHost: 16}}},
		program: program, addr: addr, logPath: filepath.Join(dir, "hub.log"),
		env: append(keep,
			"DATABASE_URL="+database,
			"LISTEN="+addr,
			"PUBLIC_URL=http://"+addr,
			"SECRET_KEY_BASE="+randomText(64),
			"CLOAK_KEY="+randomText(32),
			"RATE_LIMITS="+limits,
			"WEBHOOK_ALLOW_PRIVATE_TARGETS=true",
			"METRICS_ALLOWED_IPS=127.0.0.0/8",
			"UPLOAD_DIR="+filepath.Join(dir, "uploads"),
			"DRAIN_DELAY_MS=0",
			"CONN_LIMIT_PER_IP=10000", // the load comes from one address
		),
	}, nil
}

func randomText(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return base64.StdEncoding.EncodeToString(b)
}

// Run runs a command of the program to its end and returns what it printed.
func (h *Process) Run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, h.program, args...)
	cmd.Env = h.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", h.program, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// Start starts the hub and waits until it is ready.
func (h *Process) Start(ctx context.Context) error {
	logFile, err := os.OpenFile(h.logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()                                      // the child has its own
	h.cmd = exec.CommandContext(context.WithoutCancel(ctx), h.program, "serve") // it is stopped in good order, by stop
	h.cmd.Env, h.cmd.Stdout, h.cmd.Stderr, h.cmd.SysProcAttr = h.env, logFile, logFile, ownGroup()
	if err := h.cmd.Start(); err != nil {
		return fmt.Errorf("start the hub: %w", err)
	}
	h.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // whoever waits for ended knows why it ended, or reads the log
		close(ended)
	}(h.cmd, h.ended)
	err = Until(ctx, startPatience, func() (bool, error) {
		select {
		case <-h.ended:
			return false, errors.New("it ended")
		default:
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.addr+"/health/ready", http.NoBody)
		if err != nil {
			return false, err
		}
		resp, err := h.HTTP.Do(req)
		if err != nil {
			return false, nil //nolint:nilerr // it does not listen yet
		}
		defer resp.Body.Close()
		_, _ = io.Copy(io.Discard, resp.Body)
		return resp.StatusCode == http.StatusOK, nil
	})
	if err != nil {
		return fmt.Errorf("the hub did not become ready: %w\n%s", err, h.logTail())
	}
	return nil
}

// Addr is the host and port where it serves.
func (h *Process) Addr() string { return h.addr }

// PID is the process id of the running program.
func (h *Process) PID() int { return h.cmd.Process.Pid }

// Kill ends the hub by SIGKILL.
func (h *Process) Kill() {
	_ = h.cmd.Process.Kill()
	<-h.ended
}

// Stop ends the hub in good order, or by SIGKILL when that takes too long. A hub that was not started is stopped.
func (h *Process) Stop() {
	if h.cmd == nil {
		return
	}
	_ = h.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-h.ended:
	case <-time.After(stopPatience):
		h.Kill()
	}
}

func (h *Process) logTail() string {
	b, err := os.ReadFile(h.logPath)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "The end of its log:\n" + strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// Until calls done every few milliseconds until it says true or fails; its limit is an error.
func Until(ctx context.Context, limit time.Duration, done func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}
