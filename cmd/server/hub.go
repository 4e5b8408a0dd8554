package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/channel/echo"
	"converger/internal/channel/webhook"
	"converger/internal/channel/whatsappinfobip"
	"converger/internal/channel/whatsappmeta"
	"converger/internal/cluster"
	"converger/internal/connlimit"
	"converger/internal/delivery"
	apphttp "converger/internal/http"
	"converger/internal/inbound"
	"converger/internal/jobs"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	limitcluster "converger/internal/ratelimit/cluster"
	"converger/internal/ratelimit/overview"
	"converger/internal/ratelimit/owner"
	"converger/internal/ratelimit/redis"
	"converger/internal/secrets"
	"converger/internal/tenants"
	"converger/migrations"
	"converger/web"
)

// hub is one node: its services, made and not yet started.
type hub struct {
	cfg      Config
	log      *slog.Logger
	metrics  *prometheus.Registry
	pool     *pgxpool.Pool
	draining atomic.Bool

	node  *cluster.Node // nil: alone
	beats *pgxpool.Pool // its heartbeats

	shared *limitcluster.Store // nil unless limits are counted so
	owned  *owner.Store        // likewise
	remote *redis.Store        // likewise

	tenants    *tenants.Store
	channels   *channel.Store
	directory  *tenants.Directory
	usage      *auth.Usage
	refusals   *auth.Refusals
	users      *auth.Users
	sessions   *auth.Sessions
	signIn     *auth.SignIn
	activities *activity.Store
	files      *upload.Dir
	sweeper    *upload.Sweeper
	deliveries *delivery.Service
	rules      *delivery.Rules
	jobs       *jobs.Client

	connections *connlimit.Limiter
	handler     http.Handler
}

// newBox makes the box that seals secrets, from CLOAK_KEY and the retired ones.
func newBox(cfg Config) (*secrets.Box, error) {
	current, err := decodeKey(cfg.EncryptionKey.Reveal())
	if err != nil {
		return nil, fmt.Errorf("CLOAK_KEY: %w", err)
	}
	retired := make([][]byte, len(cfg.RetiredKeys))
	for i, k := range cfg.RetiredKeys {
		if retired[i], err = decodeKey(k.Reveal()); err != nil {
			return nil, fmt.Errorf("CLOAK_RETIRED_KEYS: %w", err)
		}
	}
	return secrets.NewBox(current, retired...)
}

// deriveKeys makes the key of a purpose from SECRET_KEY_BASE, and those that are only known still from the previous one.
func deriveKeys(cfg Config, purpose string) (current []byte, retired [][]byte, err error) {
	if current, err = auth.DeriveKey([]byte(cfg.SecretKeyBase.Reveal()), purpose); err != nil || cfg.PreviousSecretKeyBase == "" {
		return current, nil, err
	}
	previous, err := auth.DeriveKey([]byte(cfg.PreviousSecretKeyBase.Reveal()), purpose)
	return current, [][]byte{previous}, err
}

// newTokens makes the signer of client tokens.
func newTokens(cfg Config) (*auth.Tokens, error) {
	current, retired, err := deriveKeys(cfg, "client tokens")
	if err != nil {
		return nil, err
	}
	return auth.NewTokens(current, retired...)
}

// setSignIn makes what people sign in with.
func (h *hub) setSignIn(throttle *ratelimit.Login, reg prometheus.Registerer) error {
	passwords, err := auth.NewPasswords(h.cfg.BcryptCost)
	if err != nil {
		return err
	}
	sessionKey, retiredSessionKeys, err := deriveKeys(h.cfg, "web sessions")
	if err != nil {
		return err
	}
	deviceKey, retiredDeviceKeys, err := deriveKeys(h.cfg, "known devices")
	if err != nil {
		return err
	}
	h.users = auth.NewUsers(h.pool, passwords)
	h.sessions = auth.NewSessions(h.pool, auth.SessionOptions{Idle: h.cfg.SessionIdle, Absolute: h.cfg.SessionAbsolute},
		sessionKey, retiredSessionKeys...)
	h.signIn, err = auth.NewSignIn(auth.SignInConfig{Users: h.users, Sessions: h.sessions, Throttle: throttle, Directory: h.directory,
		Key: deviceKey, Retired: retiredDeviceKeys, Refusals: h.refusals, Registerer: reg, Logger: h.log})
	return err
}

// newAdapters makes the registry of the channel types of this program.
func newAdapters(cfg Config, log *slog.Logger) (*channel.Registry, error) {
	guard, err := channel.NewGuard(channel.GuardOptions{AllowPrivate: cfg.WebhookAllowPrivateTargets, Allowed: cfg.WebhookAllowedTargets})
	if err != nil {
		return nil, fmt.Errorf("WEBHOOK_ALLOWED_TARGETS: %w", err)
	}
	return channel.NewRegistry(echo.New(), webhook.New(guard, log), whatsappinfobip.New(guard, log), whatsappmeta.New(log)), nil
}

// newHub makes a node. It reads nothing and starts nothing; close it in any case.
func newHub(ctx context.Context, cfg Config, log *slog.Logger) (_ *hub, err error) {
	reg := prometheus.NewRegistry()
	h := &hub{cfg: cfg, log: log, metrics: reg}
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "converger_build_info", Help: "1, with the version of the program.", ConstLabels: prometheus.Labels{"version": version}})
	build.Set(1)
	limiting := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "converger_rate_limit_enabled", Help: "0 if RATE_LIMIT_ENABLED=false: only the guards of logins are on."})
	if cfg.RateLimitEnabled {
		limiting.Set(1)
	}
	reg.MustRegister(build, limiting)

	h.pool, err = postgres.Open(ctx, cfg.DatabaseURL.Reveal(), postgres.Options{MaxConns: int32(cfg.PoolSize), AppName: "converger"})
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			h.close()
		}
	}()
	if cfg.Clustered() {
		if err := h.join(ctx, reg); err != nil {
			return nil, err
		}
	}
	box, err := newBox(cfg)
	if err != nil {
		return nil, err
	}
	registry, err := newAdapters(cfg, log)
	if err != nil {
		return nil, err
	}
	tokens, err := newTokens(cfg)
	if err != nil {
		return nil, err
	}
	cursorKey, err := auth.DeriveKey([]byte(cfg.SecretKeyBase.Reveal()), "page cursors")
	if err != nil {
		return nil, err
	}
	limiterKey, err := auth.DeriveKey([]byte(cfg.SecretKeyBase.Reveal()), "rate limit keys")
	if err != nil {
		return nil, err
	}
	hasher, err := ratelimit.NewHasher(limiterKey)
	if err != nil {
		return nil, err
	}
	counters, clock, err := h.counters(reg)
	if err != nil {
		return nil, err
	}
	limiter, err := ratelimit.New(ratelimit.Config{
		Store: counters, Clock: clock, Operator: cfg.RateLimits, Disabled: !cfg.RateLimitEnabled, Registerer: reg})
	if err != nil {
		return nil, err
	}
	throttle := ratelimit.NewLogin(limiter, hasher)

	h.tenants = tenants.NewStore(h.pool)
	h.channels = channel.NewStore(h.pool, box, registry)
	h.directory = tenants.NewDirectory(h.pool, tenants.DirectoryOptions{
		TTL: cfg.DirectoryTTL, Derive: apphttp.NewDeriver(hasher, log), Registerer: reg, Logger: log})
	h.usage = auth.NewUsage(h.tenants, log)
	if h.refusals, err = auth.NewRefusals(h.tenants, reg, log); err != nil {
		return nil, err
	}
	if err := h.setSignIn(throttle, reg); err != nil {
		return nil, err
	}
	h.deliveries = delivery.NewService(h.pool, h.channels, registry, h.directory, delivery.Options{
		Workers: cfg.Workers, Pacer: delivery.NewPacer(limiter, hasher), Registerer: reg, Logger: log})
	h.activities = activity.NewStore(h.pool, h.deliveries, h.deliveries, activity.Options{Registerer: reg, Logger: log})
	h.deliveries.SetAppender(h.activities.Append)
	h.rules = delivery.NewRules(h.pool, registry)
	h.files = upload.NewDir(cfg.UploadDir)
	h.sweeper = upload.NewSweeper(h.files, h.activities.OrphanUploadsAllTenants, reg, log)
	received := inbound.NewService(h.pool, h.channels, registry, h.activities, h.deliveries, inbound.Options{Registerer: reg, Logger: log})
	h.jobs, err = jobs.New(h.pool, h.deliveries, jobs.Options{
		Workers: cfg.Workers, SoftStop: cfg.ShutdownTimeout / 2, HardStop: cfg.ShutdownTimeout / 4,
		Sessions: h.sessions, Logger: log})
	if err != nil {
		return nil, err
	}
	h.jobs.SetInbound(received)
	h.deliveries.SetJobs(h.jobs)
	received.SetJobs(h.jobs)

	h.connections, err = newConnLimiter(cfg, h.directory, reg, log)
	if err != nil {
		return nil, err
	}
	view := overview.Config{Limiter: limiter, Login: throttle, Policy: apphttp.NewPolicyOf(limiter, h.directory), Name: cfg.cluster().NodeName, Version: version}
	if cfg.ConnLimitEnabled {
		view.Connections = func() overview.Connections { return connectionsOf(h.connections.Snapshot()) }
	}
	if h.node != nil {
		view.Network = h.node
	}
	seen := overview.New(view)
	if h.node != nil {
		h.node.Handle(overview.Topic, seen.Handler())
	}
	h.handler, err = apphttp.New(apphttp.Deps{
		Directory: h.directory, Tenants: h.tenants, Channels: h.channels, Registry: registry, Activities: h.activities,
		Uploads: upload.NewIntake(h.files, upload.Options{
			MaxBytes: int64(cfg.UploadMaxBytes), Types: cfg.UploadAllowedTypes, Registerer: reg}),
		Deliveries: h.deliveries, Rules: h.rules, Inbound: received, Limiter: limiter, Overview: seen, Hasher: hasher, Tokens: tokens, Usage: h.usage, Refusals: h.refusals,
		Users: h.users, Sessions: h.sessions, SignIn: h.signIn,
		CursorKey: cursorKey, Pages: web.Files(), Logger: log, Registerer: reg, Gatherer: reg,
		Checks: h.checks(), Draining: h.draining.Load,
		Config: apphttp.Config{
			Version: version, PublicURL: cfg.PublicURL, TrustedProxies: cfg.TrustedProxies, AdminNets: cfg.AdminNets, CORSOrigins: cfg.CORSOrigins,
			MetricsToken: cfg.MetricsToken, MetricsNets: cfg.MetricsAllowedIPs, TellDecisionTime: cfg.RateLimitTell,
			MaxBody: int64(cfg.APIMaxBytes), MaxInboundBody: int64(cfg.InboundMaxBytes), BodyMemory: int64(cfg.BodyMemory),
		},
	})
	if err != nil {
		return nil, err
	}
	return h, nil
}

// newConnLimiter makes what bounds the connections of clients.
func newConnLimiter(cfg Config, directory *tenants.Directory, reg prometheus.Registerer, log *slog.Logger) (*connlimit.Limiter, error) {
	c := connlimit.Config{
		Exempt: func(a netip.Addr) bool {
			return slices.ContainsFunc(cfg.TrustedProxies, func(p netip.Prefix) bool { return p.Contains(a) }) ||
				directory.RangeKind(a, time.Now()) == tenants.RangeExempt
		},
		Answer: apphttp.RefuseConnection(cfg.PublicURL), Registerer: reg, Logger: log,
	}
	if cfg.ConnLimitEnabled {
		c.PerAddress, c.Total = cfg.ConnLimitPerIP, cfg.ConnLimitTotal
	}
	return connlimit.New(c)
}

// connectionsOf is what operators see of the connections to this node.
func connectionsOf(s connlimit.Snapshot) overview.Connections {
	return overview.Connections{
		Total: s.Total, Addresses: s.Addresses, MaxTotal: s.MaxTotal, MaxPerAddress: s.MaxPerAddress,
		Refused: map[string]uint64{"connection_limit_exceeded": s.RefusedAddress, "global_limit_exceeded": s.RefusedTotal},
	}
}

// join makes the node's place in the cluster.
func (h *hub) join(ctx context.Context, reg prometheus.Registerer) (err error) {
	// A pool of its own: a heartbeat that waits for requests would be late when it matters.
	h.beats, err = postgres.Open(ctx, h.cfg.DatabaseURL.Reveal(), postgres.Options{MaxConns: 1, AppName: "converger heartbeat"})
	if err != nil {
		return err
	}
	c := h.cfg.cluster()
	c.Database, c.Registerer, c.Logger = h.beats, reg, h.log
	c.Starting = true // until startCounters has brought what the others have counted
	if off := h.cfg.ClusterClockOffset; off != 0 {
		h.log.Warn("this node's clock is set off, for a test (CLUSTER_TEST_CLOCK_OFFSET_MS)", slog.Duration("offset", off))
		began := time.Now()
		c.Now = func() int64 { return began.Add(off).UnixNano() + int64(time.Since(began)) }
	}
	h.node, err = cluster.New(c)
	return err
}

// close gives the database's connections back.
func (h *hub) close() {
	h.pool.Close()
	if h.beats != nil {
		h.beats.Close()
	}
	if h.remote != nil {
		if err := h.remote.Close(); err != nil {
			h.log.Warn("the connections to Redis are not closed in order", slog.Any("error", err))
		}
	}
}

// checks are what readiness asks, beside draining.
func (h *hub) checks() []apphttp.Check {
	checks := []apphttp.Check{
		{Name: "database", Run: func(ctx context.Context) error {
			if err := h.pool.Ping(ctx); err != nil {
				return errors.New("database unavailable")
			}
			return nil
		}},
		{Name: "schema", Run: func(ctx context.Context) error {
			err := migrations.Check(ctx, h.pool)
			switch {
			case errors.Is(err, migrations.ErrTooNew): // a rolling update: the schema is migrated before the last old node goes
				return nil
			case errors.Is(err, migrations.ErrPending):
				return errors.New("migrations pending")
			case err != nil:
				return errors.New("migrations unknown")
			}
			return nil
		}},
		{Name: "directory", Degrades: true, Run: func(context.Context) error {
			if s := h.directory.State(); s.Stale {
				return fmt.Errorf("configuration in memory is %s old", time.Since(s.RefreshedAt).Round(time.Second))
			}
			return nil
		}},
		{Name: "uploads", Degrades: true, Run: func(ctx context.Context) error {
			if err := h.files.Check(ctx); err != nil {
				return errors.New("the folder of uploads can't be written to (UPLOAD_DIR)")
			}
			return nil
		}},
		{Name: "rate_limits", Degrades: true, Run: func(context.Context) error {
			if !h.cfg.RateLimitEnabled {
				return errors.New("rate limiting is switched off (RATE_LIMIT_ENABLED=false)")
			}
			return nil
		}},
	}
	if h.remote != nil {
		checks = append(checks,
			apphttp.Check{Name: "redis", Degrades: true, Run: func(context.Context) error { return h.remote.Degraded() }})
	}
	if h.node != nil {
		checks = append(checks,
			apphttp.Check{Name: "cluster", Run: func(context.Context) error { return h.node.Ready() }},
			apphttp.Check{Name: "peers", Degrades: true, Run: func(context.Context) error { return h.node.Degraded() }})
	}
	return checks
}

// serve runs the node on the listener until ctx ends, then stops it in the order of lifetimes: readiness off, the
// balancer's delay, http, jobs, deliveries, activities, refreshers, pool. ready is called once requests are answered.
func (h *hub) serve(ctx context.Context, listener net.Listener, ready func()) (err error) {
	defer h.close()
	switch err := migrations.Check(ctx, h.pool); {
	case errors.Is(err, migrations.ErrTooNew): // an old node that restarts in a rolling update
		h.log.Warn("the schema is newer than this program", slog.Any("detail", err))
	case err != nil:
		listener.Close()
		return fmt.Errorf("check the schema: %w", err)
	}
	if err := h.directory.Load(ctx); err != nil {
		listener.Close()
		return fmt.Errorf("load the directory: %w", err)
	}
	if !h.cfg.RateLimitEnabled {
		h.log.Warn("rate limiting is switched off, but for the guards of logins (RATE_LIMIT_ENABLED=false)")
	}

	if !h.cfg.ConnLimitEnabled {
		h.log.Warn("connections are not limited (CONN_LIMIT_ENABLED=false)")
	}
	h.checkOpenFiles()

	if err := h.files.Check(ctx); err != nil {
		h.log.Warn("the folder of uploads can't be written to: uploads are refused until it can (UPLOAD_DIR)", slog.Any("error", err))
	}

	life := newLifetimes(h.log, h.cfg.ShutdownTimeout)
	life.start("directory", h.directory.Run)
	life.start("usage", h.usage.Run)
	life.start("refusals", h.refusals.Run)
	if h.node != nil {
		life.start("cluster", h.node.Run)
		select { // what limits is not to be counted alone if others are there
		case <-h.node.Settled():
		case <-ctx.Done():
		}
	}
	h.startCounters(ctx, life)
	life.start("activities", h.activities.Run)
	life.start("uploads", h.sweeper.Run)
	life.start("deliveries", h.deliveries.Run)
	life.start("jobs", h.jobs.Run)
	server := apphttp.NewServer(h.handler, h.log)
	counted := h.connections.Listen(listener)
	life.start("http", func(ctx context.Context) error { return serveHTTP(ctx, server, counted, h.cfg.ShutdownTimeout*9/10) })
	h.log.Info("ready", slog.String("address", listener.Addr().String()), slog.String("version", version))
	if ready != nil {
		ready()
	}

	failure := life.wait(ctx)
	h.draining.Store(true)
	if failure == nil && h.cfg.DrainDelay > 0 {
		h.log.Info("draining", slog.Duration("delay", h.cfg.DrainDelay))
		time.Sleep(h.cfg.DrainDelay)
	}
	return errors.Join(failure, life.stop())
}

// serveHTTP serves until ctx ends, then lets requests finish for at most patience.
func serveHTTP(ctx context.Context, server *http.Server, listener net.Listener, patience time.Duration) error {
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	select {
	case err := <-failed:
		return err
	case <-ctx.Done():
	}
	stopping, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := server.Shutdown(stopping); err != nil {
		_ = server.Close()
		return fmt.Errorf("requests were cut off: %w", err)
	}
	return nil
}

// checkOpenFiles warns when the system would refuse connections before the caps do: then no client is told why, and
// deliveries and the database go without, too.
func (h *hub) checkOpenFiles() {
	const others = 64 // the log, listeners, uploads, other nodes
	need := uint64(h.cfg.ConnLimitTotal + connlimit.MaxGoodbyes + h.cfg.Workers + h.cfg.PoolSize + others)
	if limit := maxOpenFiles(); h.cfg.ConnLimitEnabled && limit < need {
		h.log.Warn("this process may not open as many files as it may need: raise the limit (ulimit -n, LimitNOFILE) or lower CONN_LIMIT_TOTAL",
			slog.Uint64("limit", limit), slog.Uint64("needed", need))
	}
}

// keepAlive finds out within a minute that a client is gone without a word, whatever a connection is waiting for.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 30 * time.Second, Interval: 10 * time.Second, Count: 3}

// listen opens the address that clients connect to.
func listen(ctx context.Context, address string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAliveConfig: keepAlive}
	return lc.Listen(ctx, "tcp", address)
}

type serveCmd struct {
	UntilInputEnds bool `help:"Stop when standard input ends: with whoever started it." hidden:""`
}

func (c serveCmd) Run(e *env) error {
	if c.UntilInputEnds {
		ctx, stop := context.WithCancel(e.ctx)
		defer stop()
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			stop()
		}()
		e.ctx = ctx
	}
	cfg, err := LoadConfig(e.getenv)
	if err != nil {
		return err
	}
	h, err := newHub(e.ctx, cfg, newLogger(cfg, e.stderr))
	if err != nil {
		return err
	}
	listener, err := listen(e.ctx, cfg.Listen)
	if err != nil {
		h.close()
		return fmt.Errorf("listen: %w", err)
	}
	return h.serve(e.ctx, listener, nil)
}
