package http

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/inbound"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/overview"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// Deliveries is what the front asks of package delivery; [delivery.Service] is one.
type Deliveries interface {
	List(ctx context.Context, tenant tenants.ID, f delivery.Filter, before uuid.UUID, limit int) (page []delivery.Delivery, more bool, err error)
	Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (delivery.Delivery, error)
	Attempts(ctx context.Context, tenant tenants.ID, deliveryID uuid.UUID) ([]delivery.Attempt, error)
	Retry(ctx context.Context, by tenants.Actor, tenant tenants.ID, id uuid.UUID) (delivery.Delivery, error)
	RetryChannel(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID, f delivery.RetryFilter, limit int) (retried int, more bool, err error)
	State(ctx context.Context, tenant tenants.ID, channelID uuid.UUID) (delivery.ChannelState, error)
	Pause(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID) (delivery.ChannelState, error)
	Resume(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID) (delivery.ChannelState, error)
}

// Inbound takes webhooks in; [inbound.Service] is one.
type Inbound interface {
	Verify(r inbound.Request) error
	Receive(ctx context.Context, r inbound.Request) (inbound.Answer, error)
	Replay(ctx context.Context, by tenants.Actor, tenant tenants.ID, event uuid.UUID) (inbound.Event, error)
	Get(ctx context.Context, tenant tenants.ID, event uuid.UUID) (inbound.Event, error)
	ListAllTenants(ctx context.Context, f inbound.Filter, before uuid.UUID, limit int) (page []inbound.Event, more bool, err error)
}

// Usage hears which key or token was used; [auth.Usage] is one.
type Usage interface {
	Key(id uuid.UUID, at time.Time)
	OperatorToken(id uuid.UUID, at time.Time)
}

// Proofs remember for an hour which address has proved by a valid signature that it speaks for a channel's provider;
// *Proofs of package ratelimit/proofs are such. Neither method waits for anything.
type Proofs interface {
	Has(k ratelimit.Key, now time.Time) bool
	Add(k ratelimit.Key, now time.Time)
}

// Check is one thing that has to be right for this node to take traffic.
type Check struct {
	Name string
	// Run returns nil, or an error whose text is shown to whoever asks: a sentence without addresses or secrets. It
	// gets a second.
	Run func(ctx context.Context) error
	// Degrades marks a check whose failure is shown but does not make the node unready.
	Degrades bool
}

// Deps is what the front is made of. Everything without a remark is required.
type Deps struct {
	Directory  *tenants.Directory // made with NewDeriver(Hasher)
	Tenants    *tenants.Store
	Channels   *channel.Store
	Registry   *channel.Registry
	Activities *activity.Store
	Uploads    *upload.Intake
	Deliveries Deliveries
	Rules      *delivery.Rules
	Inbound    Inbound
	Limiter    *ratelimit.Limiter
	Overview   *overview.Overview // of Limiter, made with NewPolicyOf
	Hasher     ratelimit.Hasher
	Proofs     Proofs
	Tokens     *auth.Tokens
	Usage      Usage          // optional
	Refusals   *auth.Refusals // optional
	Users      *auth.Users
	Sessions   *auth.Sessions
	SignIn     *auth.SignIn
	CursorKey  []byte // authenticates page cursors; 32 bytes, see [auth.DeriveKey]
	Pages      fs.FS  // templates/*.html and static/*
	Logger     *slog.Logger
	Registerer prometheus.Registerer // optional
	Gatherer   prometheus.Gatherer   // what /metrics shows; optional

	Checks   []Check
	Draining func() bool // optional; true once the node is going down

	Config
}

// Config are the front's settings.
type Config struct {
	Version        string         // of the program
	PublicURL      string         // scheme and host under which callers reach the hub, without a slash at its end
	TrustedProxies []netip.Prefix // whose X-Forwarded-For is believed
	CORSOrigins    []string       // exact origins, or "*"
	MetricsToken   secrets.Text   // "": none
	MetricsNets    []netip.Prefix // addresses that may read /metrics without a token; with neither it does not exist
	AdminNets      []netip.Prefix // addresses that the pages of administration are open to

	TellDecisionTime bool // limited answers say when they were decided, for load tests; see tellTime

	MaxBody        int64         // bytes of a JSON body; 0: DefaultMaxBody
	MaxInboundBody int64         // bytes of a webhook; 0: DefaultMaxInboundBody
	BodyMemory     int64         // bytes of bodies being read or worked at one time; 0: DefaultBodyMemory
	BodyTimeout    time.Duration // for the whole body to arrive; 0: DefaultBodyTimeout
	HandlerTimeout time.Duration // for everything behind the guards, body included; 0: DefaultHandlerTimeout
}

// Defaults of Config. The largest activity has 64 KiB of text, ten attachments of 4 KiB and 16 KiB of metadata: 120 KiB, and
// six times that from a client that escapes every character. Meta's webhooks reach 3 MB.
const (
	DefaultMaxBody        = 1 << 20
	DefaultMaxInboundBody = 3 << 20
	DefaultBodyMemory     = 256 << 20
	DefaultBodyTimeout    = 15 * time.Second
	DefaultHandlerTimeout = 30 * time.Second
)

// server is the front.
type server struct {
	Deps
	auth    *auth.Authenticator
	metrics *metrics

	memory, strangersMemory *memory // for bodies

	cursors    cursors
	health     health
	forwarding forwarding
	pages      *pages
	uploading  uploading

	description *description

	refusalHead []byte // see appendRefusal

	origin      string // scheme and host of the public URL
	secure      bool   // it is https
	crossOrigin *http.CrossOriginProtection

	routes []route
	mux    http.Handler
}

// New makes the front's handler. It starts nothing. The error names a dependency that is missing, or a template that
// can't be read.
func New(d Deps) (http.Handler, error) {
	s, err := newServer(d)
	if err != nil {
		return nil, err
	}
	return s, nil
}

func newServer(d Deps) (*server, error) {
	if d.Directory == nil || d.Tenants == nil || d.Channels == nil || d.Registry == nil || d.Activities == nil || d.Uploads == nil || d.Deliveries == nil ||
		d.Rules == nil || d.Inbound == nil || d.Proofs == nil || d.Limiter == nil || d.Overview == nil || d.Tokens == nil || d.Users == nil || d.Sessions == nil || d.SignIn == nil || d.Pages == nil || d.Logger == nil || len(d.CursorKey) == 0 || d.Hasher == (ratelimit.Hasher{}) {
		return nil, errors.New("http: a dependency is missing")
	}
	d.PublicURL = strings.TrimRight(d.PublicURL, "/")
	public, err := url.Parse(d.PublicURL)
	if err != nil {
		return nil, fmt.Errorf("http: public URL: %w", err)
	}
	origin, crossOrigin := public.Scheme+"://"+public.Host, http.NewCrossOriginProtection()
	if err := crossOrigin.AddTrustedOrigin(origin); err != nil {
		return nil, fmt.Errorf("http: public URL: %w", err)
	}
	pages, err := newPages(d.Pages, public.EscapedPath())
	if err != nil {
		return nil, err
	}
	setDefault(&d.MaxBody, DefaultMaxBody)
	setDefault(&d.MaxInboundBody, DefaultMaxInboundBody)
	setDefault(&d.BodyMemory, DefaultBodyMemory)
	setDefault(&d.BodyTimeout, DefaultBodyTimeout)
	setDefault(&d.HandlerTimeout, DefaultHandlerTimeout)
	s := &server{
		Deps: d, auth: auth.New(d.Directory, d.Tokens), metrics: newMetrics(d.Registerer),
		memory: newMemory(d.BodyMemory - d.BodyMemory/4), strangersMemory: newMemory(d.BodyMemory / 4),
		refusalHead: refusalHead(d.PublicURL),
		cursors:     cursors{d.CursorKey}, pages: pages, origin: origin, secure: public.Scheme == "https", crossOrigin: crossOrigin,
	}
	s.registerHealthRoutes()
	s.registerPageRoutes()
	s.registerAdminRoutes()
	s.registerPortalRoutes()
	s.registerConversationRoutes()
	s.registerDeliveryRoutes()
	s.registerRoutingRoutes()
	s.registerClientRoutes()
	s.registerInboundRoutes()
	s.registerManagementRoutes()
	s.registerDescriptionRoutes()
	if s.description, err = s.describe(); err != nil {
		return nil, fmt.Errorf("http: describe the routes: %w", err)
	}
	for i := range s.routes {
		s.routes[i].query = s.description.query(&s.routes[i])
	}
	s.mux = s.mount()
	return s, nil
}

func setDefault[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// register adds a row to the route table.
func (s *server) register(rt route) {
	if rt.maxBody == 0 {
		rt.maxBody = s.MaxBody
		if rt.area != areaNone {
			rt.maxBody = maxFormBody
		}
	}
	s.routes = append(s.routes, rt)
}

// Limits of a connection's phases. The deadline for headers is absolute, and so is that of a body (Config.BodyTimeout):
// neither is renewed by a byte now and then.
const (
	headerTimeout  = 10 * time.Second
	writeTimeout   = 60 * time.Second
	idleTimeout    = 2 * time.Minute
	maxHeaderBytes = 32 << 10
)

// NewServer makes the net/http server for a handler of [New]; the caller serves and stops it. HTTP/2 is not spoken: it
// needs TLS, which ends at the proxy in front.
func NewServer(h http.Handler, l *slog.Logger) *http.Server {
	return &http.Server{
		Handler:           h,
		ReadHeaderTimeout: headerTimeout,
		WriteTimeout:      writeTimeout,
		IdleTimeout:       idleTimeout,
		MaxHeaderBytes:    maxHeaderBytes,

		DisableGeneralOptionsHandler: true, // OPTIONS * is answered like the rest

		ErrorLog: slog.NewLogLogger(l.Handler(), slog.LevelDebug), // noise of strangers: bad TLS, cut connections
	}
}
