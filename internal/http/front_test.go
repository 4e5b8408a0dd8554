package http

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/channel/echo"
	"converger/internal/channel/webhook"
	"converger/internal/channel/whatsappinfobip"
	"converger/internal/channel/whatsappmeta"
	"converger/internal/delivery"
	"converger/internal/inbound"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
	"converger/internal/ratelimit/overview"
	"converger/internal/ratelimit/proofs"
	"converger/internal/secrets"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestMain(m *testing.M) { pgtest.Main(m) }

var (
	testActor  = tenants.Actor{Type: tenants.ActorSystem, ID: "test"}
	testSecret = []byte("0123456789abcdef0123456789abcdef")
)

// front is the whole front over a real database, with one tenant and its channels.
type front struct {
	*server
	pool     *pgxpool.Pool
	queries  *postgres.QueryCounter
	registry *prometheus.Registry
	log      *lockedBuffer
	url      string // of a real server around it
	files    string // the folder of uploads

	tenant   tenants.Tenant
	key      string
	operator string
	sent     int // by operatorOf

	described *described   // holds each answer against the description; nil in benchmarks
	addresses atomic.Int64 // given out by tests that need many
	webhook   channel.Channel
	whatsapp  channel.Channel
}

// noJobs takes jobs and forgets them: the front's tests end where the queue begins.
type noJobs struct{}

func (noJobs) StartLanes([]delivery.LaneJob) bool                              { return true }
func (noJobs) InsertLanesTx(context.Context, pgx.Tx, []delivery.LaneJob) error { return nil }
func (noJobs) Poke()                                                           {}
func (noJobs) InsertInboundTx(context.Context, pgx.Tx, uuid.UUID, uuid.UUID) error {
	return nil
}
func (noJobs) PokeInbound() {}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// newFront makes a front; change may alter what it is made of.
func newFront(t testing.TB, change ...func(*Deps)) *front {
	t.Helper()
	return newFrontAt(t, pgtest.New(t), change...)
}

func newFrontAt(t testing.TB, database string, change ...func(*Deps)) *front {
	t.Helper()
	f := &front{files: t.TempDir(), queries: &postgres.QueryCounter{}, registry: prometheus.NewRegistry(), log: &lockedBuffer{}}
	f.pool = pgtest.Open(t, database, postgres.Options{MaxConns: 10, Tracer: f.queries})
	logger := slog.New(slog.NewJSONHandler(f.log, &slog.HandlerOptions{Level: slog.LevelDebug}))

	box := must(secrets.NewBox(testSecret))
	guard := must(channel.NewGuard(channel.GuardOptions{AllowPrivate: true}))
	reg := channel.NewRegistry(echo.New(), webhook.New(guard, logger), whatsappmeta.New(logger), whatsappinfobip.New(guard, logger))
	hasher := must(ratelimit.NewHasher(testSecret))
	// Polls come by hand only: they must not be counted as queries of requests.
	directory := tenants.NewDirectory(f.pool, tenants.DirectoryOptions{PollEvery: time.Hour, Derive: NewDeriver(hasher, logger), Logger: logger})
	channels := channel.NewStore(f.pool, box, reg)
	deliveries := delivery.NewService(f.pool, channels, reg, directory, delivery.Options{})
	activities := activity.NewStore(f.pool, deliveries, deliveries, activity.Options{})
	deliveries.SetJobs(noJobs{})
	deliveries.SetAppender(activities.Append)
	events := inbound.NewService(f.pool, channels, reg, activities, deliveries, inbound.Options{})
	events.SetJobs(noJobs{})

	d := Deps{
		Directory: directory, Tenants: tenants.NewStore(f.pool), Channels: channels, Registry: reg, Activities: activities,
		Uploads:    upload.NewIntake(upload.NewDir(f.files), upload.Options{Registerer: f.registry}),
		Deliveries: deliveries, Rules: delivery.NewRules(f.pool, reg), Inbound: events, Hasher: hasher, Proofs: proofs.New(nil, logger), Tokens: must(auth.NewTokens(testSecret)),
		Users: auth.NewUsers(f.pool, must(auth.NewPasswords(auth.MinCost))), Sessions: auth.NewSessions(f.pool, auth.SessionOptions{}, testSecret),
		CursorKey: testSecret, Pages: os.DirFS("../../web"), Logger: logger, Registerer: f.registry, Gatherer: f.registry,
		Limiter: standing(ratelimit.Config{Registerer: f.registry}),
		Config: Config{PublicURL: "https://hub.example", CORSOrigins: []string{"https://app.example"},
			AdminNets: []netip.Prefix{netip.MustParsePrefix("127.0.0.0/8"), netip.MustParsePrefix("192.0.2.0/24")}}, // httptest's address
	}
	for _, c := range change {
		c(&d)
	}
	throttle := ratelimit.NewLogin(d.Limiter, hasher)
	if d.Overview == nil {
		d.Overview = overview.New(overview.Config{Limiter: d.Limiter, Login: throttle, Policy: NewPolicyOf(d.Limiter, directory), Name: "a", Version: "test"})
	}
	if d.Refusals == nil {
		d.Refusals = must(auth.NewRefusals(d.Tenants, nil, logger))
	}
	d.SignIn = must(auth.NewSignIn(auth.SignInConfig{Users: d.Users, Sessions: d.Sessions, Throttle: throttle,
		Directory: directory, Key: testSecret, Refusals: d.Refusals, Registerer: f.registry, Logger: logger}))
	f.server = must(newServer(d))
	if t, ok := t.(*testing.T); ok {
		f.described = newDescribed(t, f.server)
	}

	ctx := t.Context()
	f.tenant = must(d.Tenants.Create(ctx, testActor, tenants.NewTenant{Name: "Acme"}))
	f.key = f.newKey(t, f.tenant.ID)
	_, operator, err := d.Tenants.CreateOperatorToken(ctx, testActor, tenants.NewOperatorToken{Name: "ops", Scopes: []string{"read", "write"}})
	if err != nil {
		t.Fatal(err)
	}
	f.operator = operator.Reveal()
	f.webhook = f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "site", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	f.whatsapp = f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "whatsapp", Type: channel.TypeWhatsAppMeta, Config: raw(
		`{"access_token":"EAAtoken","phone_number_id":"106540352242922","app_secret":"app-secret-for-tests","verify_token":"verify-canary"}`)})
	if err := directory.Load(ctx); err != nil {
		t.Fatal(err)
	}

	run, stop := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- activities.Run(run) }()
	ts := httptest.NewUnstartedServer(nil)
	ts.Config = NewServer(f, logger)
	ts.Start()
	f.url = ts.URL
	t.Cleanup(func() {
		ts.Close()
		stop()
		if err := <-done; err != nil {
			t.Errorf("activities: %v", err)
		}
	})
	return f
}

// standing makes a limiter whose clock stands: no window turns and no budget fills up under a test, whatever the hour and
// however slow the machine.
func standing(c ratelimit.Config) *ratelimit.Limiter {
	now := ratelimit.NewClock().Now()
	c.Clock = ratelimit.ClockFrom(func() ratelimit.Instant { return now })
	c.Store = must(local.New(local.Config{}))
	return must(ratelimit.New(c))
}

// limits gives a front the operator's configuration of limits.
func limits(operator string) func(*Deps) {
	return func(d *Deps) {
		d.Limiter = standing(ratelimit.Config{Operator: must(ratelimit.ParseOperator([]byte(operator)))})
	}
}

// ticking gives a front limits of which time passes, for tests of just that.
func ticking(d *Deps) {
	d.Limiter = must(ratelimit.New(ratelimit.Config{Store: must(local.New(local.Config{}))}))
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func raw(s string) json.RawMessage { return json.RawMessage(s) }

func (f *front) newKey(t testing.TB, tenant tenants.ID) string {
	t.Helper()
	_, key, err := f.Tenants.CreateKey(t.Context(), testActor, tenant, tenants.NewKey{Name: "server"})
	if err != nil {
		t.Fatal(err)
	}
	return key.Reveal()
}

func (f *front) newChannel(t testing.TB, tenant tenants.ID, n channel.NewChannel) channel.Channel {
	t.Helper()
	ch, err := f.Channels.Create(t.Context(), testActor, tenant, n)
	if err != nil {
		t.Fatalf("create channel %s: %v", n.Name, err)
	}
	return ch
}

// refresh brings changes that a test made behind the front's back into its directory.
func (f *front) refresh(t testing.TB) {
	t.Helper()
	if err := f.Directory.Refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func (f *front) newConversation(t testing.TB) activity.Conversation {
	t.Helper()
	v, err := f.Activities.CreateConversation(t.Context(), f.tenant.ID, activity.NewConversation{ChannelID: f.webhook.ID})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func (f *front) newToken(t testing.TB, c auth.Claims) string {
	t.Helper()
	c.TenantID = f.tenant.ID
	if c.ChannelID == uuid.Nil {
		c.ChannelID = f.webhook.ID
	}
	text, _, err := f.Tokens.Issue(time.Now(), c)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// answer is a response that was read whole.
type answer struct {
	*http.Response
	body []byte
}

func (a answer) String() string { return fmt.Sprintf("%d %s", a.StatusCode, a.body) }

// json decodes the body into a map.
func (a answer) json(t testing.TB) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(a.body, &m); err != nil {
		t.Fatalf("answer is not JSON: %v: %s", err, a)
	}
	return m
}

// get follows names and indices into a JSON answer.
func (a answer) get(t testing.TB, path ...string) any {
	t.Helper()
	var v any = a.json(t)
	for _, name := range path {
		m, ok := v.(map[string]any)
		if !ok {
			t.Fatalf("no %v in %s", path, a)
		}
		v = m[name]
	}
	return v
}

// is checks the status and, for problems, the code.
func (a answer) is(t testing.TB, status int, c code) {
	t.Helper()
	if a.StatusCode != status {
		t.Fatalf("status %d, want %d: %s", a.StatusCode, status, a.body)
	}
	if c != "" && a.get(t, "code") != string(c) {
		t.Fatalf("code %v, want %s: %s", a.get(t, "code"), c, a.body)
	}
}

// option changes a request of a test.
type option func(*http.Request)

func header(name, value string) option {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

func bearer(token string) option { return header("Authorization", "Bearer "+token) }

func (f *front) apiKey() option { return header("X-Api-Key", f.key) }

func (f *front) ops() option { return bearer(f.operator) }

// from makes the request come from an address.
func from(addr string) option { return func(r *http.Request) { r.RemoteAddr = addr } }

// call sends a request straight to the handler. body is sent as JSON unless an option says otherwise; "" is no body.
func (f *front) call(t testing.TB, method, path, body string, options ...option) answer {
	t.Helper()
	var in io.Reader
	if body != "" {
		in = strings.NewReader(body)
	}
	r := httptest.NewRequestWithContext(t.Context(), method, path, in)
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for _, o := range options {
		o(r)
	}
	w := httptest.NewRecorder()
	f.ServeHTTP(w, r)
	res := w.Result()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{res, b}
}

// signed signs a webhook's body as upstream does.
func signed(secret secrets.Text, body string, at time.Time) option {
	mac := hmac.New(sha256.New, []byte(secret.Reveal()))
	fmt.Fprintf(mac, "%d.%s", at.Unix(), body)
	return header("X-Converger-Signature", fmt.Sprintf("t=%d,v1=%s", at.Unix(), hex.EncodeToString(mac.Sum(nil))))
}

func metaSigned(body string) option {
	mac := hmac.New(sha256.New, []byte("app-secret-for-tests"))
	mac.Write([]byte(body))
	return header("X-Hub-Signature-256", "sha256="+hex.EncodeToString(mac.Sum(nil)))
}

// rows counts the rows of every table, to show that something had no effect.
func (f *front) rows(t testing.TB) map[string]int64 {
	t.Helper()
	rows, err := f.pool.Query(t.Context(), `SELECT relname FROM pg_class WHERE relkind IN ('r', 'p') AND NOT relispartition
		AND relnamespace = 'public'::regnamespace`)
	if err != nil {
		t.Fatal(err)
	}
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	counts := map[string]int64{}
	for _, n := range names {
		var c int64
		if err := f.pool.QueryRow(t.Context(), "SELECT count(*) FROM "+pgx.Identifier{n}.Sanitize()).Scan(&c); err != nil {
			t.Fatal(err)
		}
		counts[n] = c
	}
	return counts
}

// golden compares with a file, or writes it.
func golden(t testing.TB, name string, got []byte) {
	t.Helper()
	path := "testdata/" + name
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		t.Fatalf("%s does not exist: run the tests with -update", path)
	}
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s differs:\n%s", name, got)
	}
}
