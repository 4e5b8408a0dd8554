package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
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
	startPatience = 30 * time.Second
	stopPatience  = 20 * time.Second
)

// limits keeps every limit of the measured routes on and out of the way.
const limits = `{"activity_create":{"limit":1000000000,"scale_ms":1000},"api_read":{"limit":1000000000,"scale_ms":1000},` +
	`"management":{"limit":1000000000,"scale_ms":1000}}`

// hub is the real program as a child process. One goroutine uses it.
type hub struct {
	program string
	addr    string
	env     []string
	logPath string
	token   string // of an operator

	cmd   *exec.Cmd
	ended chan struct{} // closed when cmd has ended
	http  *http.Client  // for setting up and checking, not for load
}

// newHub prepares the program; the database must be there.
func newHub(ctx context.Context, program, database, dir string) (*hub, error) {
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
	return &hub{
		program: program, addr: addr, logPath: filepath.Join(dir, "hub.log"),
		env: append(keep,
			"DATABASE_URL="+database,
			"LISTEN="+addr,
			"PUBLIC_URL=http://"+addr,
			"SECRET_KEY_BASE="+randomText(64),
			"CLOAK_KEY="+randomText(32),
			"RATE_LIMITS="+limits,
			"WEBHOOK_ALLOW_PRIVATE_TARGETS=true",
			"DRAIN_DELAY_MS=0",
		),
		http: &http.Client{Timeout: startPatience, Transport: &http.Transport{MaxIdleConnsPerHost: 16}},
	}, nil
}

func randomText(n int) string {
	b := make([]byte, n)
	_, _ = rand.Read(b) // never fails
	return base64.StdEncoding.EncodeToString(b)
}

// run runs a command of the program to its end and returns what it printed.
func (h *hub) run(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, h.program, args...)
	cmd.Env = h.env
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s %s: %w\n%s", h.program, strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(stdout.String()), nil
}

// start starts the hub and waits until it is ready.
func (h *hub) start(ctx context.Context) error {
	logFile, err := os.OpenFile(h.logPath, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()                                      // the child has its own
	h.cmd = exec.CommandContext(context.WithoutCancel(ctx), h.program, "serve") // it is stopped in good order, by stop
	h.cmd.Env, h.cmd.Stdout, h.cmd.Stderr = h.env, logFile, logFile
	if err := h.cmd.Start(); err != nil {
		return fmt.Errorf("start the hub: %w", err)
	}
	h.ended = make(chan struct{})
	go func(cmd *exec.Cmd, ended chan struct{}) {
		_ = cmd.Wait() // whoever waits for ended knows why it ended, or reads the log
		close(ended)
	}(h.cmd, h.ended)
	err = until(ctx, startPatience, func() (bool, error) {
		select {
		case <-h.ended:
			return false, errors.New("it ended")
		default:
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.addr+"/health/ready", http.NoBody)
		if err != nil {
			return false, err
		}
		resp, err := h.http.Do(req)
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

func (h *hub) pid() int { return h.cmd.Process.Pid }

// kill ends the hub by SIGKILL.
func (h *hub) kill() {
	_ = h.cmd.Process.Kill()
	<-h.ended
}

// stop ends the hub in good order, or by SIGKILL when that takes too long. A hub that was not started is stopped.
func (h *hub) stop() {
	if h.cmd == nil {
		return
	}
	_ = h.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-h.ended:
	case <-time.After(stopPatience):
		h.kill()
	}
}

func (h *hub) logTail() string {
	b, err := os.ReadFile(h.logPath)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return "The end of its log:\n" + strings.Join(lines[max(0, len(lines)-15):], "\n")
}

// call sends a JSON request and reads the answer into out. credential is a header and its value.
func (h *hub) call(ctx context.Context, method, path string, credential [2]string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://"+h.addr+path, body)
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set(credential[0], credential[1])
	resp, err := h.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s\n%s", method, path, resp.Status, b)
	}
	return json.Unmarshal(b, out)
}

func (h *hub) operate(ctx context.Context, method, path string, in, out any) error {
	return h.call(ctx, method, path, [2]string{"Authorization", "Bearer " + h.token}, in, out)
}
