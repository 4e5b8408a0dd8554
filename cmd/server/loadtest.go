package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/devpg"
	loadhub "converger/internal/loadtest/hub"
	"converger/internal/loadtest/messages"
	"converger/internal/postgres"
	"converger/internal/tenants"
	"converger/migrations"
)

type loadtestCmd struct {
	Messages loadtestMessagesCmd `cmd:"" help:"Load a hub with messages of many tenants over HTTP, and tell what it took."`
	Limits   loadtestLimitsCmd   `cmd:"" help:"Flood a limit over the nodes of a cluster, and tell how exactly it was kept."`
}

// loadtestMessagesCmd runs against a hub that runs already, or starts one with a private database.
type loadtestMessagesCmd struct {
	managementFlags
	MetricsToken string `help:"The hub's METRICS_TOKEN, for its processor time and memory; default is the environment's."`
	Start        bool   `help:"Start a hub with a private database and all limits out of the way, for this run only."`
	Program      string `help:"The program to start; default is this one." placeholder:"bin/server" type:"path"`

	Tenants       int           `help:"Tenants." default:"10"`
	Channels      int           `help:"Channels of each tenant." default:"2"`
	Conversations int           `help:"Conversations of each channel." default:"25"`
	Callers       int           `help:"Connections, and so the most requests under way at one time." default:"32"`
	Rate          float64       `help:"Messages a second that are due; latency counts from when each was due. 0: every caller sends as soon as it has its answer." default:"0"`
	Duration      time.Duration `help:"Time of the load." default:"30s"`
	WarmUp        time.Duration `help:"Time of the same load before it, not counted." default:"2s"`
	Inbound       float64       `help:"Share of the messages that come as signed webhooks of providers, 0 to 1." default:"0.2"`
	Size          int           `help:"Bytes of each text." default:"300"`
	Timeout       time.Duration `help:"How long to wait for one answer." default:"10s"`
	Drain         time.Duration `help:"How long to wait at the end for messages that have not arrived." default:"60s"`

	Receive      string `help:"Where the built-in receiver of deliveries listens; the hub must reach it, and be allowed to (WEBHOOK_ALLOWED_TARGETS)." default:"127.0.0.1:0"`
	Receiver     string `help:"Deliver to this URL instead; nothing is known of deliveries then." placeholder:"URL" xor:"receiver"`
	NoDeliveries bool   `help:"Accept only: deliver nothing." xor:"receiver"`

	Row   time.Duration `help:"Time of a row of the report; default is a minute, or a sixth of a shorter run." placeholder:"1m"`
	Every time.Duration `help:"Time between lines of progress." default:"2s"`
	Soak  bool          `help:"Judge whether the last third of the run was like the second, in rate, latency, memory and bloat; fails when not."`
	Keep  bool          `help:"Leave the tenants as they are, instead of suspending them."`
	Yes   bool          `help:"Load a hub on another machine than this one."`
}

func (c loadtestMessagesCmd) Run(e *env) (err error) {
	o := messages.Options{
		Tenants: c.Tenants, Channels: c.Channels, Conversations: c.Conversations, Callers: c.Callers, Rate: c.Rate, Duration: c.Duration,
		WarmUp: c.WarmUp, Inbound: c.Inbound, Size: c.Size, Timeout: c.Timeout, Drain: c.Drain, ReceiverURL: c.Receiver,
		Row: cmp.Or(c.Row, min(time.Minute, c.Duration/6)), Every: c.Every, Soak: c.Soak, Yes: c.Yes, Keep: c.Keep, Progress: e.stderr,
	}
	if c.Receiver == "" && !c.NoDeliveries {
		o.ReceiverAddress = c.Receive
	}
	if c.Start && c.Server != "" {
		return misused("which hub? Pass --server or --start, not both")
	}
	if c.Start {
		stop, err := c.start(e, &o)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, stop()) }()
	} else if err := c.find(e, &o); err != nil {
		return err
	}
	report, err := messages.Run(e.ctx, o)
	if report == nil {
		return err
	}
	write := report.Write
	if c.JSON {
		write = report.WriteJSON
	}
	return errors.Join(err, write(e.stdout))
}

// find fills in a hub that runs already.
func (c loadtestMessagesCmd) find(e *env, o *messages.Options) error {
	h, err := c.connect(e)
	if err != nil {
		return fmt.Errorf("%w; or let --start start a hub", err)
	}
	o.MetricsToken = cmp.Or(c.MetricsToken, e.getenv("METRICS_TOKEN"))
	o.Hub = &loadhub.Client{Base: h.base, Token: h.token, HTTP: newHTTPClient()}
	return nil
}

// start starts a hub and its database for the run, and gives the way to remove them.
func (c loadtestMessagesCmd) start(e *env, o *messages.Options) (stop func() error, err error) {
	fmt.Fprintln(e.stderr, "Starting a hub with a private Postgres …")
	s, err := startHubs(e, c.Program, func(program, database, dir string) ([]*loadhub.Process, error) {
		p, err := loadhub.NewProcess(e.ctx, program, database, dir)
		return []*loadhub.Process{p}, err
	})
	if err != nil {
		return nil, err
	}
	o.Hub, o.Database, o.HubPID, o.PostgresPID = &s.hubs[0].Client, s.pool, s.hubs[0].PID(), s.postgresPID
	return s.stop, nil
}

// startedHubs are programs that were started for a run, with their database, in a folder of their own.
type startedHubs struct {
	hubs        []*loadhub.Process // with an operator's token
	pool        *pgxpool.Pool
	postgresPID int
	undo        []func() error
}

// stop removes everything, last made first.
func (s *startedHubs) stop() error {
	var all error
	for i := len(s.undo) - 1; i >= 0; i-- {
		all = errors.Join(all, s.undo[i]())
	}
	return all
}

// startHubs starts a private Postgres and what prepare makes. program is that to run; "" is this one.
func startHubs(e *env, program string, prepare func(program, database, dir string) ([]*loadhub.Process, error)) (_ *startedHubs, err error) {
	s := &startedHubs{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stop())
		}
	}()
	if program == "" {
		if program, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	dir, err := os.MkdirTemp("", "loadtest-")
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { return os.RemoveAll(dir) })
	pg, err := devpg.Start(e.ctx, devpg.Config{Dir: filepath.Join(dir, "pg"), BinDir: e.getenv("PG_BIN"), VendoredDir: filepath.Join(".cache", "pg")})
	if err != nil {
		return nil, err
	}
	s.postgresPID = pg.PID()
	s.undo = append(s.undo, func() error { return pg.Stop(context.WithoutCancel(e.ctx)) })
	if _, err := migrations.Up(e.ctx, pg.URL()); err != nil {
		return nil, err
	}
	s.pool, err = postgres.Open(e.ctx, pg.URL(), postgres.Options{MaxConns: 2, AppName: "converger loadtest"})
	if err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error { s.pool.Close(); return nil })
	token, err := loadtestToken(e.ctx, s.pool)
	if err != nil {
		return nil, err
	}
	if s.hubs, err = prepare(program, pg.URL(), dir); err != nil {
		return nil, err
	}
	s.undo = append(s.undo, func() error {
		var all sync.WaitGroup // side by side: each says goodbye to the others
		for _, h := range s.hubs {
			all.Go(h.Stop)
		}
		all.Wait()
		return nil
	})
	for _, h := range s.hubs {
		h.Token = token
		if err := h.Launch(e.ctx); err != nil {
			return nil, err
		}
	}
	for _, h := range s.hubs {
		if err := h.AwaitReady(e.ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}

func loadtestToken(ctx context.Context, pool *pgxpool.Pool) (string, error) {
	_, text, err := tenants.NewStore(pool).CreateOperatorToken(ctx, byCommandLine(), tenants.NewOperatorToken{Name: "loadtest"})
	return text.Reveal(), err
}
