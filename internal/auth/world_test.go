package auth

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/netip"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
	"converger/internal/secrets"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// world is an installation with a tenant, and what signs people in to it.
type world struct {
	*SignIn
	pool    *pgxpool.Pool
	queries *postgres.QueryCounter
	store   *tenants.Store
	names   *tenants.Directory
	tenant  tenants.ID
	reg     *prometheus.Registry
}

type worldOptions struct {
	limits   string // RATE_LIMITS
	cost     int    // of bcrypt
	sessions SessionOptions
}

// unlimited switches the throttle off, for tests that are about something else.
const unlimited = `{"login_ip": "off", "login_account": "off"}`

func newWorld(t testing.TB, o worldOptions) *world {
	t.Helper()
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	w := &world{queries: postgres.CountQueries(nil), reg: prometheus.NewPedanticRegistry()}
	w.pool = pgtest.PoolWith(t, postgres.Options{MaxConns: 10, Tracer: w.queries})
	w.store = tenants.NewStore(w.pool)
	w.names = tenants.NewDirectory(w.pool, tenants.DirectoryOptions{})
	w.tenant = w.newTenant(t, "Acme")

	operator, err := ratelimit.ParseOperator([]byte(o.limits))
	check(err)
	clock := ratelimit.NewClock()
	counters, err := local.New(local.Config{Clock: clock})
	check(err)
	limiter, err := ratelimit.New(ratelimit.Config{Store: counters, Clock: clock, Operator: operator})
	check(err)
	hasher, err := ratelimit.NewHasher(secret)
	check(err)
	passwords, err := NewPasswords(max(o.cost, MinCost))
	check(err)
	refusals, err := NewRefusals(w.store, w.reg, slog.New(slog.DiscardHandler))
	check(err)
	w.SignIn, err = NewSignIn(SignInConfig{
		Users: NewUsers(w.pool, passwords), Sessions: NewSessions(w.pool, o.sessions, must(DeriveKey(secret, "sessions"))),
		Throttle: ratelimit.NewLogin(limiter, hasher), Directory: w.names, Key: must(DeriveKey(secret, "devices")), Refusals: refusals, Registerer: w.reg,
	})
	check(err)
	return w
}

// newTenant makes a tenant that the directory knows.
func (w *world) newTenant(t testing.TB, name string) tenants.ID {
	t.Helper()
	tenant, err := w.store.Create(t.Context(), someone, tenants.NewTenant{Name: name})
	if err == nil {
		err = w.names.Load(t.Context())
	}
	if err != nil {
		t.Fatal(err)
	}
	return tenant.ID
}

const password secrets.Text = "correct horse battery"

var (
	someone = tenants.Actor{Type: tenants.ActorSystem, ID: "test", RequestID: "req-1"}
	ownIP   = netip.MustParseAddr("192.0.2.1")
	strange = netip.MustParseAddr("198.51.100.7")
)

func (w *world) newUser(t testing.TB, realm Realm, email string, role Role) User {
	t.Helper()
	u, err := w.Users.Create(t.Context(), someone, realm, NewUser{Email: email, Name: "Ada", Role: role, Password: password})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func (w *world) newAdmin(t testing.TB) User {
	t.Helper()
	return w.newUser(t, Admins, "admin@x.test", RoleSuperAdmin)
}

// admin signs an administrator in with what was typed.
func (w *world) admin(ctx context.Context, ip netip.Addr, email string, typed secrets.Text) (SignedIn, error) {
	return w.Password(ctx, Visitor{IP: ip, UserAgent: "test"}, Credentials{Email: email, Password: typed})
}

// in signs in somebody whose password is the usual one.
func (w *world) in(t testing.TB, u User) SignedIn {
	t.Helper()
	c := Credentials{Email: u.Email, Password: password}
	if id, ok := u.Realm.Tenant(); ok {
		tenant, err := w.store.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		c.Portal, c.Tenant = true, tenant.Name
	}
	in, err := w.Password(t.Context(), Visitor{IP: ownIP, UserAgent: "test"}, c)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

// load is what a request with the session's cookie does.
func (w *world) load(ctx context.Context, in SignedIn) (Session, error) {
	d, err := w.Sessions.Parse(in.Token.Reveal())
	if err != nil {
		return Session{}, err
	}
	return w.Sessions.Load(ctx, in.Session.User.Realm != Admins, d)
}

func (w *world) exec(t testing.TB, sql string, args ...any) {
	t.Helper()
	if _, err := w.pool.Exec(t.Context(), sql, args...); err != nil {
		t.Fatal(err)
	}
}

// hashes is the number of hashes of the full cost that fn's comparisons take; nothing else may compare meanwhile.
func (w *world) hashes(fn func()) float64 {
	before := w.Users.passwords.work.Load()
	fn()
	return float64(w.Users.passwords.work.Load()-before) / float64(int(1)<<w.Users.passwords.cost)
}

// record is a line of the audit log.
type record struct {
	TenantID                           *uuid.UUID
	ActorType, Actor, Action, Resource string
	ResourceID                         string
	Changes                            string
}

// audited returns the records of an action, oldest first.
func (w *world) audited(t testing.TB, action string) []record {
	t.Helper()
	w.Refusals.writeQueue(t.Context())
	rows, err := postgres.Many(t.Context(), w.pool, scanRecord, `SELECT tenant_id, actor_type, actor_id, action, resource_type, resource_id, changes::text
FROM audit_log WHERE action = $1 AND resource_type <> 'tenant' ORDER BY id`, action)
	if err != nil {
		t.Fatal(err)
	}
	return rows
}

func (r record) after(t testing.TB) map[string]any {
	t.Helper()
	var c struct{ After map[string]any }
	if err := json.Unmarshal([]byte(r.Changes), &c); err != nil {
		t.Fatal(err)
	}
	return c.After
}

func scanRecord(row pgx.CollectableRow) (record, error) { return pgx.RowToStructByPos[record](row) }

func wantErr(t testing.TB, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: error %v, want %v", what, got, want)
	}
}

// wantInvalid wants err to name one field with a code.
func wantInvalid(t testing.TB, what string, err error, pointer, code string) {
	t.Helper()
	var invalid *fault.Invalid
	if !errors.As(err, &invalid) || len(invalid.Fields) != 1 || invalid.Fields[0].Pointer != pointer || invalid.Fields[0].Code != code {
		t.Errorf("%s: %v, want %s at %s", what, err, code, pointer)
	}
}

func locked(err error) (*LockedError, bool) {
	var l *LockedError
	ok := errors.As(err, &l)
	return l, ok
}

// eventually repeats try until it is content. The limit is only for a test that fails: it is generous, for machines that
// are busy.
func eventually(t testing.TB, what string, try func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !try() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("in vain: %s", what)
		}
	}
}
