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
	"converger/internal/ratelimit/proofs"
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
	proofs *proofs.Proofs      // of providers

	hasher   ratelimit.Hasher
	limiter  *ratelimit.Limiter
	throttle *ratelimit.Login

	tenants    *tenants.Store
	registry   *channel.Registry
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
	inbound    *inbound.Service
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
func (h *hub) setSignIn() error {
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
	h.signIn, err = auth.NewSignIn(auth.SignInConfig{Users: h.users, Sessions: h.sessions, Throttle: h.throttle, Directory: h.directory,
		Key: deviceKey, Retired: retiredDeviceKeys, Refusals: h.refusals, Registerer: h.metrics, Logger: h.log})
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

// newMetrics makes the registry of the node's metrics, with those of the process.
func newMetrics(cfg Config) *prometheus.Registry {
	build := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "converger_build_info", Help: "1, with the version of the program.", ConstLabels: prometheus.Labels{"version": version}})
	build.Set(1)
	limiting := prometheus.NewGauge(prometheus.GaugeOpts{
		Name: "converger_rate_limit_enabled", Help: "0 if RATE_LIMIT_ENABLED=false: only the guards of logins are on."})
	if cfg.RateLimitEnabled {
		limiting.Set(1)
	}
	reg := prometheus.NewRegistry()
	reg.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}), build, limiting)
	return reg
}

// newHub makes a node. It reads nothing and starts nothing; close it in any case.
func newHub(ctx context.Context, cfg Config, log *slog.Logger) (_ *hub, err error) {
	h := &hub{cfg: cfg, log: log, metrics: newMetrics(cfg)}
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
		if err := h.join(ctx); err != nil {
			return nil, err
		}
	}
	if err := h.setLimits(); err != nil {
		return nil, err
	}
	h.tenants = tenants.NewStore(h.pool)
	h.directory = tenants.NewDirectory(h.pool, tenants.DirectoryOptions{
		TTL: cfg.DirectoryTTL, Derive: apphttp.NewDeriver(h.hasher, log), Registerer: h.metrics, Logger: log})
	h.usage = auth.NewUsage(h.tenants, log)
	if h.refusals, err = auth.NewRefusals(h.tenants, h.metrics, log); err != nil {
		return nil, err
	}
	for _, set := range []func() error{h.setSignIn, h.setMessages, h.setFront} {
		if err := set(); err != nil {
			return nil, err
		}
	}
	return h, nil
}

// setLimits makes what limits requests and attempts to sign in.
func (h *hub) setLimits() error {
	key, _, err := deriveKeys(h.cfg, "rate limit keys")
	if err != nil {
		return err
	}
	if h.hasher, err = ratelimit.NewHasher(key); err != nil {
		return err
	}
	counters, clock, err := h.counters()
	if err != nil {
		return err
	}
	h.limiter, err = ratelimit.New(ratelimit.Config{
		Store: counters, Clock: clock, Operator: h.cfg.RateLimits, Disabled: !h.cfg.RateLimitEnabled, Registerer: h.metrics})
	if err != nil {
		return err
	}
	h.throttle = ratelimit.NewLogin(h.limiter, h.hasher)
	return nil
}

// setMessages makes what takes messages in and sends them out.
func (h *hub) setMessages() error {
	box, err := newBox(h.cfg)
	if err != nil {
		return err
	}
	if h.registry, err = newAdapters(h.cfg, h.log); err != nil {
		return err
	}
	h.channels = channel.NewStore(h.pool, box, h.registry)
	h.deliveries = delivery.NewService(h.pool, h.channels, h.registry, h.directory, delivery.Options{
		Workers: h.cfg.Workers, Pacer: delivery.NewPacer(h.limiter, h.hasher), Registerer: h.metrics, Logger: h.log})
	h.activities = activity.NewStore(h.pool, h.deliveries, h.deliveries, activity.Options{Registerer: h.metrics, Logger: h.log})
	h.rules = delivery.NewRules(h.pool, h.registry)
	h.files = upload.NewDir(h.cfg.UploadDir)
	h.sweeper = upload.NewSweeper(h.files, h.activities.OrphanUploadsAllTenants, h.metrics, h.log)
	h.inbound = inbound.NewService(h.pool, h.channels, h.registry, h.activities, h.deliveries, inbound.Options{Registerer: h.metrics, Logger: h.log})
	h.jobs, err = jobs.New(h.pool, h.deliveries, jobs.Options{
		Workers: h.cfg.Workers, SoftStop: h.cfg.ShutdownTimeout / 2, HardStop: h.cfg.ShutdownTimeout / 4,
		Sessions: h.sessions, Logger: h.log})
	if err != nil {
		return err
	}
	// Two circles are closed here: an activity makes deliveries, whose replies become activities; and jobs work deliveries and
	// events, which make jobs.
	h.deliveries.SetAppender(h.activities.Append)
	h.deliveries.SetJobs(h.jobs)
	h.inbound.SetJobs(h.jobs)
	h.jobs.SetInbound(h.inbound)
	return nil
}

// setFront makes what clients and operators talk to.
func (h *hub) setFront() error {
	tokens, err := newTokens(h.cfg)
	if err != nil {
		return err
	}
	cursorKey, _, err := deriveKeys(h.cfg, "page cursors")
	if err != nil {
		return err
	}
	h.connections, err = newConnLimiter(h.cfg, h.directory, h.metrics, h.log)
	if err != nil {
		return err
	}
	view := overview.Config{Limiter: h.limiter, Login: h.throttle, Policy: apphttp.NewPolicyOf(h.limiter, h.directory), Name: h.cfg.cluster().NodeName, Version: version,
		Logger: h.log, Connections: func() overview.Connections { return connectionsOf(h.connections.Snapshot()) }}
	var peers proofs.Network // nil: alone
	if h.node != nil {
		view.Network, peers = h.node, h.node
	}
	seen := overview.New(view)
	h.proofs = proofs.New(peers, h.log)
	if h.node != nil {
		h.node.Handle(overview.Topic, seen.Handler())
		h.node.Handle(proofs.Topic, h.proofs.Handler())
	}
	h.handler, err = apphttp.New(apphttp.Deps{
		Directory: h.directory, Tenants: h.tenants, Channels: h.channels, Registry: h.registry, Activities: h.activities,
		Uploads: upload.NewIntake(h.files, upload.Options{
			MaxBytes: int64(h.cfg.UploadMaxBytes), Types: h.cfg.UploadAllowedTypes, Registerer: h.metrics}),
		Deliveries: h.deliveries, Rules: h.rules, Inbound: h.inbound, Limiter: h.limiter, Overview: seen, Hasher: h.hasher, Proofs: h.proofs, Tokens: tokens, Usage: h.usage, Refusals: h.refusals,
		Users: h.users, Sessions: h.sessions, SignIn: h.signIn,
		CursorKey: cursorKey, Pages: web.Files(), Logger: h.log, Registerer: h.metrics, Gatherer: h.metrics,
		Checks: h.checks(), Draining: h.draining.Load,
		Config: apphttp.Config{
			Version: version, PublicURL: h.cfg.PublicURL, TrustedProxies: h.cfg.TrustedProxies, AdminNets: h.cfg.AdminNets, CORSOrigins: h.cfg.CORSOrigins,
			MetricsToken: h.cfg.MetricsToken, MetricsNets: h.cfg.MetricsAllowedIPs, TellDecisionTime: h.cfg.RateLimitTell,
			MaxBody: int64(h.cfg.APIMaxBytes), MaxInboundBody: int64(h.cfg.InboundMaxBytes), BodyMemory: int64(h.cfg.BodyMemory),
		},
	})
	return err
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
func (h *hub) join(ctx context.Context) (err error) {
	// A pool of its own: a heartbeat that waits for requests would be late when it matters.
	h.beats, err = postgres.Open(ctx, h.cfg.DatabaseURL.Reveal(), postgres.Options{MaxConns: 1, AppName: "converger heartbeat"})
	if err != nil {
		return err
	}
	c := h.cfg.cluster()
	c.Database, c.Registerer, c.Logger = h.beats, h.metrics, h.log
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
