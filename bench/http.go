package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/jackc/pgx/v5"

	"converger/internal/devpg"
	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/procstat"
	"converger/internal/loadtest/wire"
)

const (
	httpCallers = 16
	httpSlice   = time.Second
	httpWarm    = 500 * time.Millisecond
	leastHTTP   = 0.90

	bareCommand = "serve-bare" // how this program calls itself
	refusedPath = "/api/v1/conversations/01930000-0000-7000-8000-000000000001/activities"
)

// http measures the real program in processes of its own; the callers share the processors with it.
func (b *bench) http(ctx context.Context) (err error) {
	program, err := filepath.Abs(b.program)
	if err != nil {
		return err
	}
	if _, err := os.Stat(program); err != nil {
		return fmt.Errorf("%w; make build makes it", err)
	}
	dir, err := os.MkdirTemp("", "bench-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	found, err := devpg.Find(os.Getenv("PG_BIN"), filepath.Join("..", ".cache", "pg"))
	if err != nil {
		return err
	}
	pg, err := devpg.Start(ctx, devpg.Config{Dir: filepath.Join(dir, "postgres"), BinDir: found[0].Dir})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pg.Stop(context.WithoutCancel(ctx))) }()
	on, err := newServed(ctx, program, pg, dir, "on", "true")
	if err != nil {
		return err
	}
	defer on.hub.Stop()
	if err := b.refusals(ctx, on); err != nil {
		return err
	}
	off, err := newServed(ctx, program, pg, dir, "off", "false")
	if err != nil {
		return err
	}
	defer off.hub.Stop()
	return b.accepted(ctx, on, off)
}

// served is a hub with a database of its own, a tenant and what its callers send.
type served struct {
	hub    *hub.Process
	tenant *hub.Tenant
	list   string // a path whose answer comes from the database
}

func newServed(ctx context.Context, program string, pg *devpg.Server, dir, name, enabled string) (s *served, err error) {
	admin, err := pgx.Connect(ctx, pg.URL())
	if err != nil {
		return nil, err
	}
	defer func() { _ = admin.Close(context.WithoutCancel(ctx)) }()
	database := "limits_" + name
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+database); err != nil {
		return nil, err
	}
	home := filepath.Join(dir, name)
	if err := os.Mkdir(home, 0o700); err != nil {
		return nil, err
	}
	s = &served{}
	if s.hub, err = hub.NewProcess(ctx, program, strings.Replace(pg.URL(), "/"+devpg.Name+"?", "/"+database+"?", 1), home); err != nil {
		return nil, err
	}
	s.hub.Set("RATE_LIMIT_ENABLED", enabled)
	if _, err := s.hub.Run(ctx, "migrate", "up"); err != nil {
		return nil, err
	}
	if s.hub.Token, err = s.hub.Run(ctx, "operator", "create", "bench"); err != nil {
		return nil, err
	}
	if err := s.hub.Start(ctx); err != nil {
		return nil, err
	}
	if s.tenant, err = s.hub.NewTenant(ctx, "bench"); err == nil {
		var ch *hub.Channel
		if ch, err = s.hub.NewChannel(ctx, s.tenant, "bench", "inbound", ""); err == nil {
			var ids []string
			ids, err = s.hub.NewConversations(ctx, s.tenant, ch.ID, 1)
			s.list = "/api/v1/conversations/" + strings.Join(ids, "") + "/activities"
		}
	}
	if err != nil {
		s.hub.Stop()
		return nil, err
	}
	return s, nil
}

// refusals measures the program's 429 beside a bare handler's.
func (b *bench) refusals(ctx context.Context, on *served) error {
	limits := "/tenants/" + on.tenant.ID + "/limits/activity_create"
	if err := on.hub.Operate(ctx, http.MethodPut, limits, map[string]any{"limit": 0, "scale_ms": 1000}, nil); err != nil {
		return err
	}
	bare, err := startBare(ctx, on)
	if err != nil {
		return err
	}
	defer bare.stop()
	head := "X-Api-Key: " + on.tenant.APIKey + "\r\n"
	var rates [2][]float64
	var cpu [2][]float64 // µs of the server's processor time for an answer
	for round := range b.rounds + 1 {
		for i := range 2 {
			which := (i + round) % 2
			address, pid := on.hub.Addr(), on.hub.PID()
			if which == 1 {
				address, pid = bare.address, bare.cmd.Process.Pid
			}
			span := httpSlice
			if round == 0 {
				span = httpWarm
			}
			before := procstat.Read(pid, 0)
			n, took, err := ask(ctx, address, http.MethodPost, refusedPath, head, http.StatusTooManyRequests, span)
			if err != nil {
				return err
			}
			if round == 0 {
				continue
			}
			rates[which] = append(rates[which], float64(n)/took.Seconds())
			if s, ok := procstat.Read(pid, 0).Since(before); ok {
				cpu[which] = append(cpu[which], s.Hub*took.Seconds()*float64(runtime.NumCPU())/float64(n)*1e6)
			}
		}
	}
	detail := ""
	if len(cpu[0]) > 0 && len(cpu[1]) > 0 {
		detail = fmt.Sprintf(" (%.1f and %.1f µs of the server's processor)", median(cpu[0]), median(cpu[1]))
	}
	q := ratios(rates[0], rates[1])
	b.add(row{
		work: fmt.Sprintf("HTTP 429, whole stack over loopback, %d callers", httpCallers), measured: span(rates[0], "%.0f") + "/s",
		beside: fmt.Sprintf("bare chi, the same bytes: %.0f/s", median(rates[1])) + detail, ratio: span(q, "%.2f"),
		target: fmt.Sprintf("≥ %.2f", leastHTTP), verdict: judge(q, leastHTTP, true),
	})
	return nil
}

// accepted measures requests that pass, with limits on and off; each twice a round, which tells what is noise.
func (b *bench) accepted(ctx context.Context, on, off *served) error {
	var effect, noise []float64
	var rates [2][]float64
	for round := range b.rounds + 1 {
		var twice [2][]float64
		for i := range 4 {
			which := (i + round) % 2
			s := []*served{on, off}[which]
			span := httpSlice / 2
			n, took, err := ask(ctx, s.hub.Addr(), http.MethodGet, s.list, "X-Api-Key: "+s.tenant.APIKey+"\r\n", http.StatusOK, span)
			if err != nil {
				return err
			}
			twice[which] = append(twice[which], float64(n)/took.Seconds())
		}
		if round == 0 {
			continue
		}
		for which := range twice {
			noise = append(noise, max(twice[which][0], twice[which][1])/min(twice[which][0], twice[which][1])-1)
			rates[which] = append(rates[which], (twice[which][0]+twice[which][1])/2)
		}
		effect = append(effect, (twice[0][0]+twice[0][1])/(twice[1][0]+twice[1][1]))
	}
	verdict := "met"
	if loss := 1 - median(effect); loss > median(noise) {
		verdict = fmt.Sprintf("missed: limits cost %.1f %%", 100*loss)
	}
	b.add(row{
		work: "accepted requests (a list from the database), limits on", measured: span(rates[0], "%.0f") + "/s",
		beside: fmt.Sprintf("off: %.0f/s; the same hub twice in a round differs by %.1f %%", median(rates[1]), 100*median(noise)),
		ratio:  span(effect, "%.3f"), target: "within the noise", verdict: verdict,
	})
	return nil
}

// ask sends one request after the other on each of httpCallers connections and counts the answers.
func ask(ctx context.Context, address, method, path, head string, want int, d time.Duration) (answers int64, took time.Duration, err error) {
	var n atomic.Int64
	errs := make([]error, httpCallers)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range httpCallers {
		wg.Go(func() {
			c := wire.NewCaller(wire.Target{Address: address})
			defer c.Close()
			for time.Since(start) < d && errs[i] == nil && ctx.Err() == nil {
				a, err := c.Do(ctx, method, path, head, nil)
				if err == nil && a.Status != want {
					err = fmt.Errorf("%s %s: HTTP %d %s, want %d", method, path, a.Status, a.Code, want)
				}
				errs[i] = err
				n.Add(1)
			}
		})
	}
	wg.Wait()
	return n.Load(), time.Since(start), errors.Join(append(errs, ctx.Err())...)
}

// canned is an answer that a bare handler repeats.
type canned struct {
	Status int
	Header http.Header
	Body   []byte
}

// bareServer is this program again, with nothing but a router and a canned answer.
type bareServer struct {
	cmd     *exec.Cmd
	address string
}

// startBare has it repeat what the hub answers, header by header.
func startBare(ctx context.Context, on *served) (*bareServer, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, on.hub.Base+refusedPath, http.NoBody)
	if err != nil {
		return nil, err
	}
	r.Header.Set("X-Api-Key", on.tenant.APIKey)
	var answer canned
	// An override is in force within a second.
	err = hub.Until(ctx, 10*time.Second, func() (bool, error) {
		res, err := http.DefaultClient.Do(r)
		if err != nil {
			return false, err
		}
		defer res.Body.Close()
		answer = canned{Status: res.StatusCode, Header: res.Header}
		answer.Header.Del("Date")
		answer.Body, err = io.ReadAll(res.Body)
		return answer.Status == http.StatusTooManyRequests, err
	})
	if err != nil {
		return nil, fmt.Errorf("the hub does not refuse: HTTP %d %s: %w", answer.Status, answer.Body, err)
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(answer)
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, self, bareCommand)
	cmd.Stdin, cmd.Stderr = bytes.NewReader(text), os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	b := &bareServer{cmd: cmd}
	if _, err := fmt.Fscanln(out, &b.address); err != nil {
		b.stop()
		return nil, fmt.Errorf("the bare server did not start: %w", err)
	}
	return b, nil
}

func (b *bareServer) stop() {
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
}

// serveBare prints its address and serves until it is killed.
func serveBare(in io.Reader, out io.Writer) error {
	var answer canned
	if err := json.NewDecoder(in).Decode(&answer); err != nil {
		return err
	}
	names := slices.Collect(maps.Keys(answer.Header))
	mux := chi.NewRouter()
	mux.Post("/api/v1/conversations/{conversation_id}/activities", func(w http.ResponseWriter, _ *http.Request) {
		h := w.Header()
		for _, name := range names {
			h[name] = answer.Header[name]
		}
		w.WriteHeader(answer.Status)
		_, _ = w.Write(answer.Body)
	})
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintln(out, l.Addr()); err != nil {
		return err
	}
	s := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: 2 * time.Minute}
	return s.Serve(l)
}
