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
	"strconv"
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
	addrs, err := FreeAddresses(ctx, 1, false)
	if err != nil {
		return nil, err
	}
	return newProcess(program, addrs[0], filepath.Join(dir, "hub.log"), environment(database, dir)), nil
}

// NewNodes prepares the program n times, as the nodes of one cluster on loopback. settings are further variables of each,
// NAME=value. The logs go to dir/node1.log and so on.
func NewNodes(ctx context.Context, program, database, dir string, n int, settings ...string) ([]*Process, error) {
	addrs, err := FreeAddresses(ctx, n, false)
	if err != nil {
		return nil, err
	}
	members, err := FreeAddresses(ctx, n, true)
	if err != nil {
		return nil, err
	}
	env := append(environment(database, dir), "CLUSTER_PEERS="+strings.Join(members, ","),
		"POOL_SIZE="+strconv.Itoa(min(10, max(4, 150/n-3)))) // of the 200 connections of a private Postgres, each node has a few beside its pool
	env = append(env, settings...)
	nodes := make([]*Process, n)
	for i := range nodes {
		name := "node" + strconv.Itoa(i+1)
		nodes[i] = newProcess(program, addrs[i], filepath.Join(dir, name+".log"), slices.Concat(env, []string{"CLUSTER_BIND=" + members[i], "CLUSTER_NODE_NAME=" + name}))
	}
	return nodes, nil
}

// FreeAddresses finds n ports of loopback, as host:port, that are free for TCP, and for UDP too if both are needed. All are held until the
// last is found, so that they differ; then somebody else might take one.
func FreeAddresses(ctx context.Context, n int, both bool) (all []string, err error) {
	var lc net.ListenConfig
	var held []io.Closer
	defer func() {
		for _, h := range held {
			err = errors.Join(err, h.Close())
		}
	}()
	for range n {
		l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		held = append(held, l)
		if both {
			p, err := lc.ListenPacket(ctx, "udp", l.Addr().String())
			if err != nil {
				return nil, err
			}
			held = append(held, p)
		}
		all = append(all, l.Addr().String())
	}
	return all, nil
}

// environment is what all processes on a database are told.
func environment(database, dir string) []string {
	// Of the machine's environment only what a process needs: settings of a real hub must not leak in.
	keep := slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return !slices.Contains([]string{"PATH", "HOME", "TMPDIR", "TZ", "GODEBUG", "GOMAXPROCS", "GOGC"}, name)
	})
	return append(keep,
		"DATABASE_URL="+database,
		"SECRET_KEY_BASE="+randomText(64),
		"CLOAK_KEY="+randomText(32),
		"RATE_LIMITS="+limits,
		"WEBHOOK_ALLOW_PRIVATE_TARGETS=true",
		"METRICS_ALLOWED_IPS=127.0.0.0/8",
		"UPLOAD_DIR="+filepath.Join(dir, "uploads"),
		"DRAIN_DELAY_MS=0",
		"CONN_LIMIT_PER_IP=10000", // the load comes from one address
	)
}

func newProcess(program, addr, logPath string, env []string) *Process {
	return &Process{
		Client:  Client{Base: "http://" + addr, HTTP: &http.Client{Timeout: startPatience, Transport: &http.Transport{MaxIdleConnsPerHost: 16}}},
		program: program, addr: addr, logPath: logPath,
		env: append(env, "LISTEN="+addr, "PUBLIC_URL=http://"+addr),
	}
}

func randomText(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return base64.StdEncoding.EncodeToString(b)
}

// Set gives the program a setting, in place of one that it had, from its next start on.
func (h *Process) Set(name, value string) { h.env = append(h.env, name+"="+value) }

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
	if err := h.Launch(ctx); err != nil {
		return err
	}
	return h.AwaitReady(ctx)
}

// Launch starts the hub. The nodes of a cluster are all launched before the first is waited for: one that expects others
// and sees none is not ready for a while.
func (h *Process) Launch(ctx context.Context) error {
	logFile, err := os.OpenFile(h.logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()                                      // the child has its own
	h.cmd = exec.CommandContext(context.WithoutCancel(ctx), h.program, "serve") // it is stopped in good order, by stop
	h.cmd.Env, h.cmd.Stdout, h.cmd.Stderr, h.cmd.SysProcAttr = h.env, logFile, logFile, ownGroup()
	if err := h.cmd.Start(); err != nil {
		h.cmd = nil
		return fmt.Errorf("start the hub: %w", err)
	}
	h.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // whoever waits for ended knows why it ended, or reads the log
		close(ended)
	}(h.cmd, h.ended)
	return nil
}

// AwaitReady waits until the hub takes requests.
func (h *Process) AwaitReady(ctx context.Context) error {
	err := Until(ctx, startPatience, func() (bool, error) {
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
