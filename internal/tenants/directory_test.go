package tenants

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/migrations/pgtest"
)

// never is a poll interval that no test waits for.
const never = time.Hour

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

// newDirectory makes a loaded directory that does not run.
func newDirectory(t testing.TB, pool *pgxpool.Pool, o DirectoryOptions) *Directory {
	t.Helper()
	if o.Logger == nil {
		o.Logger = quiet()
	}
	d := NewDirectory(pool, o)
	if err := d.Load(t.Context()); err != nil {
		t.Fatalf("Load: %v", err)
	}
	return d
}

// run starts Run and returns a function that stops it and waits; the test's end does the same.
func run(t testing.TB, d *Directory) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := d.Run(ctx); err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	stop = func() { cancel(); running.Wait() }
	t.Cleanup(stop)
	return stop
}

func refresh(t testing.TB, d *Directory) {
	t.Helper()
	if err := d.Refresh(t.Context()); err != nil {
		t.Fatalf("Refresh: %v", err)
	}
}

// outage takes the database away: no connection stays or is accepted until end is called.
func outage(t testing.TB, pool *pgxpool.Pool) (end func()) {
	t.Helper()
	cfg := pool.Config().ConnConfig.Copy()
	name := cfg.Database
	cfg.Database, cfg.Tracer = "postgres", nil
	admin, err := pgx.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = admin.Close(context.Background()) })
	do := func(sql string, args ...any) {
		t.Helper()
		if _, err := admin.Exec(t.Context(), sql, args...); err != nil {
			t.Fatal(err)
		}
	}
	do("ALTER DATABASE " + name + " ALLOW_CONNECTIONS false")
	do("SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1", name)
	return func() { t.Helper(); do("ALTER DATABASE " + name + " ALLOW_CONNECTIONS true") }
}

func TestDirectoryHoldsWhatIsInForce(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	if err := s.SetLimit(t.Context(), operator, tenant.ID, "upload", []byte(`{"limit": 1}`)); err != nil {
		t.Fatal(err)
	}
	k, text := newKey(t, s, tenant.ID)
	revoked, revokedText := newKey(t, s, tenant.ID)
	if _, err := s.RevokeKey(t.Context(), operator, tenant.ID, revoked.ID, time.Now()); err != nil {
		t.Fatal(err)
	}
	token, tokenText, err := s.CreateOperatorToken(t.Context(), operator, NewOperatorToken{Name: "deploy", Scopes: []string{"read"}})
	if err != nil {
		t.Fatal(err)
	}
	ch := newChannel(t, pool, tenant.ID, "site", "s1")
	deleted := newChannel(t, pool, tenant.ID, "old", "s2")
	newRule(t, pool, tenant.ID, ch, true, deleted) // a deleted target is the reader's to notice
	newRule(t, pool, tenant.ID, deleted, false, ch)
	change(t, pool, `UPDATE channels SET deleted_at = now(), version = (SELECT version FROM configuration) WHERE id = $1`, deleted)

	metrics := prometheus.NewPedanticRegistry()
	d := newDirectory(t, pool, DirectoryOptions{Registerer: metrics})
	wantTenant := &TenantEntry{ID: tenant.ID, Name: "Acme", Status: StatusActive, Limits: []byte(`{"upload": {"limit": 1}}`),
		MaxInFlight: 400, Version: tenant.Version + 1}
	gotTenant, _ := d.Tenant(tenant.ID)
	if diff := cmp.Diff(wantTenant, gotTenant); diff != "" {
		t.Errorf("tenant (-want +got):\n%s", diff)
	}
	gotKey, _ := d.Key(hashOf(t, text))
	wantKey := &KeyEntry{ID: k.ID, TenantID: tenant.ID, Tenant: wantTenant, Name: "backend", Scopes: ScopeRead | ScopeWrite, Version: k.Version}
	if diff := cmp.Diff(wantKey, gotKey, cmpopts.IgnoreUnexported(KeyEntry{})); diff != "" {
		t.Errorf("key (-want +got):\n%s", diff)
	}
	hash, err := ParseOperatorToken(tokenText.Reveal())
	if err != nil {
		t.Fatal(err)
	}
	gotToken, _ := d.OperatorToken(hash)
	wantToken := &OperatorEntry{ID: token.ID, Name: "deploy", Scopes: ScopeRead, Version: token.Version}
	if diff := cmp.Diff(wantToken, gotToken, cmpopts.IgnoreUnexported(OperatorEntry{})); diff != "" {
		t.Errorf("token (-want +got):\n%s", diff)
	}
	wantChannel := &ChannelEntry{ID: ch, TenantID: tenant.ID, Type: "webhook", Mode: "duplex", Status: "active",
		RequireSignature: true, Ordered: true, Version: version(t, pool) - 4, SecretHash: secrets.Hash("s1")}
	gotChannel, _ := d.Channel(ch)
	if diff := cmp.Diff(wantChannel, gotChannel); diff != "" {
		t.Errorf("channel (-want +got):\n%s", diff)
	}
	if bySecret, ok := d.ChannelBySecret(secrets.Hash("s1")); !ok || bySecret != gotChannel {
		t.Errorf("by secret: %v", bySecret)
	}
	if diff := cmp.Diff([]uuid.UUID{deleted}, d.Routes(ch)); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
	for what, found := range map[string]bool{
		"route of a disabled rule":  d.Routes(deleted) != nil,
		"revoked key":               has(d.Key(hashOf(t, revokedText))),
		"deleted channel":           has(d.Channel(deleted)),
		"deleted channel by secret": has(d.ChannelBySecret(secrets.Hash("s2"))),
		"invented key":              has(d.Key(secrets.Hash("x"))),
		"invented channel":          has(d.Channel(uuid.New())),
		"invented tenant":           has(d.Tenant(uuid.New())),
		"invented token":            has(d.OperatorToken(secrets.Hash("x"))),
		"no previous secret":        has(d.ChannelBySecret([32]byte{})),
	} {
		if found {
			t.Errorf("%s was found", what)
		}
	}
	if st := d.State(); st.Version != version(t, pool) || st.Stale || st.Err != nil || st.LoadedAt.IsZero() {
		t.Errorf("state %+v", st)
	}
	wantMetrics := map[string]float64{
		"converger_directory_entries{address_range}":  0,
		"converger_directory_entries{api_key}":        1,
		"converger_directory_entries{channel}":        1,
		"converger_directory_entries{operator_token}": 1,
		"converger_directory_entries{routing_rule}":   1,
		"converger_directory_entries{tenant}":         1,
		"converger_directory_reloads_total{}":         1,
		"converger_directory_early_polls_total{}":     0,
	}
	got := gather(t, metrics)
	if age := got["converger_directory_age_seconds{}"]; age <= 0 || age > 60 {
		t.Errorf("age %v", age)
	}
	delete(got, "converger_directory_age_seconds{}")
	if diff := cmp.Diff(wantMetrics, got); diff != "" {
		t.Errorf("metrics (-want +got):\n%s", diff)
	}
}

// gather reads gauges and counters by name and label value.
func gather(t testing.TB, from prometheus.Gatherer) map[string]float64 {
	t.Helper()
	families, err := from.Gather()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]float64{}
	for _, family := range families {
		for _, m := range family.GetMetric() {
			var label string
			for _, l := range m.GetLabel() {
				label += l.GetValue()
			}
			// One of the two is nil, and then zero.
			values[family.GetName()+"{"+label+"}"] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	return values
}

func has[E any](_ *E, ok bool) bool { return ok }

// TestDirectoryFollowsChanges applies each kind of change to a loaded directory.
func TestDirectoryFollowsChanges(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	d := newDirectory(t, pool, DirectoryOptions{})
	tenant := newTenant(t, s, "Acme")
	k, text := newKey(t, s, tenant.ID)
	hash := hashOf(t, text)
	if has(d.Key(hash)) {
		t.Fatal("found before any poll")
	}
	refresh(t, d)
	if !has(d.Key(hash)) || !has(d.Tenant(tenant.ID)) {
		t.Fatal("a new tenant and key are not found")
	}

	t.Log("suspension shows at the key, too, which did not change itself")
	if _, err := s.SetStatus(t.Context(), operator, tenant.ID, StatusSuspended); err != nil {
		t.Fatal(err)
	}
	refresh(t, d)
	if e, ok := d.Key(hash); !ok || e.Tenant.Status != StatusSuspended {
		t.Errorf("key of a suspended tenant: %+v, %v", e, ok)
	}
	if e, ok := d.Tenant(tenant.ID); !ok || e.Status != StatusSuspended {
		t.Errorf("suspended tenant: %+v, %v", e, ok)
	}

	t.Log("a scheduled revocation needs no reload when its time comes")
	later := time.Now().Add(time.Hour)
	if _, err := s.RevokeKey(t.Context(), operator, tenant.ID, k.ID, later); err != nil {
		t.Fatal(err)
	}
	refresh(t, d)
	e, ok := d.Key(hash)
	if !ok || e.Usable(time.Now()) != nil {
		t.Errorf("before its time: %v, %v", ok, e.Usable(time.Now()))
	}
	wantErr(t, "at its time", e.Usable(later), ErrKeyRevoked)

	t.Log("a revocation removes the key")
	if _, err := s.RevokeKey(t.Context(), operator, tenant.ID, k.ID, time.Now()); err != nil {
		t.Fatal(err)
	}
	token, tokenText, err := s.CreateOperatorToken(t.Context(), operator, NewOperatorToken{Name: "deploy"})
	if err != nil {
		t.Fatal(err)
	}
	refresh(t, d)
	tokenHash, _ := ParseOperatorToken(tokenText.Reveal())
	if has(d.Key(hash)) || !has(d.OperatorToken(tokenHash)) {
		t.Errorf("revoked key found: %v; new token found: %v", has(d.Key(hash)), has(d.OperatorToken(tokenHash)))
	}
	if _, err := s.RevokeOperatorToken(t.Context(), operator, token.ID, time.Now(), false); err != nil {
		t.Fatal(err)
	}
	refresh(t, d)
	if has(d.OperatorToken(tokenHash)) {
		t.Error("revoked token found")
	}
}

// newRule writes an enabled or disabled routing rule as package delivery would, in one configuration change.
func newRule(t testing.TB, pool *pgxpool.Pool, tenant ID, source uuid.UUID, enabled bool, targets ...uuid.UUID) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	change(t, pool, `
INSERT INTO routing_rules (tenant_id, id, name, source_channel_id, target_channel_ids, enabled, version)
SELECT $1, $2, $3, $4, $5, $6, version FROM configuration`, tenant, id, id.String(), source, targets, enabled)
	return id
}

// Where rules lead follows each kind of change, and a directory that follows has what one has that reads everything.
func TestDirectoryFollowsRules(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	var ch [5]uuid.UUID
	names := map[uuid.UUID]int{}
	for i := range ch {
		ch[i] = newChannel(t, pool, tenant.ID, fmt.Sprint(i), fmt.Sprint("s", i))
		names[ch[i]] = i
	}
	d := newDirectory(t, pool, DirectoryOptions{})
	expect := func(what string, want map[int][]int) {
		t.Helper()
		refresh(t, d)
		for _, at := range []*Directory{d, newDirectory(t, pool, DirectoryOptions{})} {
			got := map[int][]int{}
			for i := range ch {
				for _, target := range at.Routes(ch[i]) {
					got[i] = append(got[i], names[target])
				}
			}
			if diff := cmp.Diff(want, got, cmpopts.SortSlices(func(a, b int) bool { return a < b })); diff != "" {
				t.Errorf("%s (-want +got):\n%s", what, diff)
			}
		}
	}
	alter := func(id uuid.UUID, set string, args ...any) {
		t.Helper()
		change(t, pool, `UPDATE routing_rules SET `+set+`, version = (SELECT version FROM configuration) WHERE id = $1`, append([]any{id}, args...)...)
	}

	expect("no rule", map[int][]int{})
	first := newRule(t, pool, tenant.ID, ch[0], true, ch[1], ch[2])
	second := newRule(t, pool, tenant.ID, ch[0], true, ch[2], ch[3])
	expect("two rules of a source, each target once", map[int][]int{0: {1, 2, 3}})
	alter(first, "enabled = false")
	expect("one disabled", map[int][]int{0: {2, 3}})
	alter(first, "enabled = true")
	expect("and enabled", map[int][]int{0: {1, 2, 3}})
	alter(second, "target_channel_ids = $2", []uuid.UUID{ch[4]})
	expect("other targets", map[int][]int{0: {1, 2, 4}})
	alter(second, "source_channel_id = $2", ch[3])
	expect("another source", map[int][]int{0: {1, 2}, 3: {4}})
	alter(first, "deleted_at = now()")
	expect("one deleted", map[int][]int{3: {4}})
	alter(second, "deleted_at = now()")
	expect("all deleted", map[int][]int{})
}

func TestDirectoryFollowsChannelSecrets(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	d := newDirectory(t, pool, DirectoryOptions{})
	tenant := newTenant(t, s, "Acme")
	ch := newChannel(t, pool, tenant.ID, "site", "s1")
	rotate := func(to, previous string, until time.Time) {
		t.Helper()
		hash, old := secrets.Hash(to), secrets.Hash(previous)
		change(t, pool, `
UPDATE channels SET secret_hash = $2, previous_secret = '', previous_secret_hash = $3, previous_secret_expires_at = $4,
    version = (SELECT version FROM configuration) WHERE id = $1`, ch, hash[:], old[:], until)
		refresh(t, d)
	}
	want := func(found map[string]bool) {
		t.Helper()
		for secret, want := range found {
			if e, ok := d.ChannelBySecret(secrets.Hash(secret)); ok != want || ok && e.ID != ch {
				t.Errorf("%s: found %v, want %v", secret, ok, want)
			}
		}
	}
	refresh(t, d)
	want(map[string]bool{"s1": true, "s2": false})
	rotate("s2", "s1", time.Now().Add(time.Hour))
	want(map[string]bool{"s1": true, "s2": true})
	rotate("s3", "s2", time.Now().Add(time.Hour))
	want(map[string]bool{"s1": false, "s2": true, "s3": true})
	rotate("s4", "s3", time.Now().Add(-time.Second))
	want(map[string]bool{"s2": false, "s3": false, "s4": true})

	// Deleted, and its secret taken over by another channel, seen in one poll and in either order of rows.
	change(t, pool, `UPDATE channels SET deleted_at = now(), version = (SELECT version FROM configuration) WHERE id = $1`, ch)
	heir := newChannel(t, pool, tenant.ID, "heir", "s4")
	refresh(t, d)
	if e, ok := d.ChannelBySecret(secrets.Hash("s4")); !ok || e.ID != heir {
		t.Errorf("the heir is not found by its secret: %+v, %v", e, ok)
	}
	if has(d.Channel(ch)) || d.set.Load().previous.len() != 0 {
		t.Errorf("the deleted channel left traces")
	}
	rows := changedRows{channels: []changedRow[ChannelEntry]{
		{entry: &ChannelEntry{ID: ch, SecretHash: secrets.Hash("s4")}},
		{entry: &ChannelEntry{ID: heir}, gone: true},
	}}
	d.set.Load().apply(rows, nil)
	if e, ok := d.ChannelBySecret(secrets.Hash("s4")); !ok || e.ID != ch {
		t.Errorf("put before removal: %+v, %v", e, ok)
	}
}

func TestUsable(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, c := range []struct {
		name             string
		expires, revoked time.Time
		want             error
	}{
		{"no end", time.Time{}, time.Time{}, nil},
		{"before both", now.Add(1), now.Add(1), nil},
		{"at expiry", now, time.Time{}, ErrKeyExpired},
		{"at revocation", time.Time{}, now, ErrKeyRevoked},
		{"after both", now.Add(-1), now.Add(-1), ErrKeyRevoked},
	} {
		key := KeyEntry{ExpiresAt: c.expires, RevokedAt: c.revoked}
		token := OperatorEntry{ExpiresAt: c.expires, RevokedAt: c.revoked}
		wantErr(t, c.name+": key", key.Usable(now), c.want)
		wantErr(t, c.name+": token", token.Usable(now), c.want)
	}
}

// deriver notes what it was given, as a caller's would compile limits.
type deriver struct{ calls atomic.Int64 }

func (d *deriver) Tenant(t *TenantEntry) any          { d.calls.Add(1); return "limits " + string(t.Limits) }
func (d *deriver) Channel(c *ChannelEntry) any        { d.calls.Add(1); return "channel " + c.ID.String() }
func (d *deriver) OperatorToken(o *OperatorEntry) any { d.calls.Add(1); return "token " + o.Name }

func TestDerived(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	ch := newChannel(t, pool, tenant.ID, "site", "s1")
	_, text, err := s.CreateOperatorToken(t.Context(), operator, NewOperatorToken{Name: "deploy"})
	if err != nil {
		t.Fatal(err)
	}
	derive := &deriver{}
	d := newDirectory(t, pool, DirectoryOptions{Derive: derive})
	c, _ := d.Channel(ch)
	hash, _ := ParseOperatorToken(text.Reveal())
	o, _ := d.OperatorToken(hash)
	e, _ := d.Tenant(tenant.ID)
	got := []any{e.Derived, c.Derived, o.Derived}
	if diff := cmp.Diff([]any{"limits {}", "channel " + ch.String(), "token deploy"}, got); diff != "" {
		t.Errorf("derived (-want +got):\n%s", diff)
	}
	if err := s.SetLimit(t.Context(), operator, tenant.ID, "upload", []byte(`1`)); err != nil {
		t.Fatal(err)
	}
	refresh(t, d)
	if e, _ := d.Tenant(tenant.ID); e.Derived != `limits {"upload": 1}` || derive.calls.Load() != 4 {
		t.Errorf("after a change of one tenant: %v, %d calls", e.Derived, derive.calls.Load())
	}
}

// TestNotificationIsEnough: no poll is due for an hour, so only the notification can bring a change of another node.
func TestNotificationIsEnough(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	s := NewStore(pgtest.Open(t, url, postgres.Options{}))
	tenant := newTenant(t, s, "Acme")
	d := newDirectory(t, pgtest.Open(t, url, postgres.Options{}), DirectoryOptions{PollEvery: never})
	run(t, d)
	fastest := never
	for range 3 {
		_, text := newKey(t, s, tenant.ID)
		committed := time.Now()
		eventually(t, "a key of another node", func() bool { return has(d.Key(hashOf(t, text))) })
		fastest = min(fastest, time.Since(committed))
	}
	if fastest > time.Second {
		t.Errorf("the fastest of three changes took %v, want well under a second", fastest)
	}
	t.Logf("in force after %v", fastest)
}

// TestPollIsEnough changes configuration without a word, as when notifications are lost.
func TestPollIsEnough(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	d := newDirectory(t, pool, DirectoryOptions{})
	run(t, d)
	fastest := never
	for _, status := range []Status{StatusSuspended, StatusActive, StatusSuspended} {
		_, err := pool.Exec(t.Context(), `
WITH v AS (UPDATE configuration SET version = version + 1 RETURNING version)
UPDATE tenants SET status = $1, version = v.version FROM v`, status)
		if err != nil {
			t.Fatal(err)
		}
		committed := time.Now()
		eventually(t, "a silent change", func() bool { e, _ := d.Tenant(tenant.ID); return e.Status == status })
		fastest = min(fastest, time.Since(committed))
	}
	if fastest > time.Second {
		t.Errorf("the fastest of three changes took %v, want well under a second", fastest)
	}
	t.Logf("in force after %v", fastest)
}

// logLines counts lines by level.
type logLines struct {
	slog.Handler
	mu    sync.Mutex
	lines map[slog.Level]int
}

func (l *logLines) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }
func (l *logLines) Handle(_ context.Context, r slog.Record) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines[r.Level]++
	return nil
}

func (l *logLines) take() map[slog.Level]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines := l.lines
	l.lines = map[slog.Level]int{}
	return lines
}

func TestDirectorySurvivesAnOutage(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	pool := pgtest.Open(t, url, postgres.Options{}) // not the directory's, which recovers without help
	s := NewStore(pool)
	tenant := newTenant(t, s, "Acme")
	_, text := newKey(t, s, tenant.ID)
	lines, metrics := &logLines{lines: map[slog.Level]int{}}, prometheus.NewPedanticRegistry()
	d := newDirectory(t, pgtest.Open(t, url, postgres.Options{}), DirectoryOptions{TTL: 200 * time.Millisecond,
		PollEvery: 5 * time.Millisecond, Logger: slog.New(lines), Registerer: metrics})
	run(t, d)
	for round := range 2 {
		end := outage(t, pool)
		eventually(t, "the state shows the outage", func() bool { st := d.State(); return st.Err != nil && st.Stale })
		if !has(d.Key(hashOf(t, text))) {
			t.Error("the last good set is gone")
		}
		if d.Miss(t.Context()) {
			t.Error("a miss is worth another look while the database is away")
		}
		if n := gather(t, metrics)["converger_directory_early_polls_total{}"]; n != 0 {
			t.Errorf("%v early polls of a database that is away", n)
		}
		if err := d.Refresh(t.Context()); !postgres.IsUnavailable(err) {
			t.Errorf("Refresh: %v", err)
		}
		end()
		eventually(t, "recovery", func() bool { st := d.State(); return st.Err == nil && !st.Stale })
		if diff := cmp.Diff(map[slog.Level]int{slog.LevelWarn: 2}, lines.take()); diff != "" {
			t.Errorf("round %d: log lines (-want +got):\n%s", round, diff)
		}
		pool.Reset()
		_, text = newKey(t, s, tenant.ID)
		eventually(t, "a change after the outage", func() bool { return has(d.Key(hashOf(t, text))) })
	}
}

// TestListenerComesBack: with no poll due, a change after an outage can only be seen through a new LISTEN.
func TestListenerComesBack(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	d := newDirectory(t, pool, DirectoryOptions{PollEvery: never})
	run(t, d)
	_, text := newKey(t, s, tenant.ID)
	eventually(t, "the listener works", func() bool { return has(d.Key(hashOf(t, text))) })
	outage(t, pool)()
	pool.Reset() // for newKey
	_, text = newKey(t, s, tenant.ID)
	eventually(t, "the listener works again", func() bool { return has(d.Key(hashOf(t, text))) })
}

// TestRestoredDatabase: after an outage the database is an older one. No version tells of rows that are no longer there.
func TestRestoredDatabase(t *testing.T) {
	t.Parallel()
	for name, after := range map[string]int{"version behind": -1, "version ahead again": +3} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, pool := newStore(t)
			tenant := newTenant(t, s, "Acme")
			_, kept := newKey(t, s, tenant.ID)
			lost, lostText := newKey(t, s, tenant.ID)
			d := newDirectory(t, pool, DirectoryOptions{})
			if !has(d.Key(hashOf(t, lostText))) {
				t.Fatal("key not found")
			}
			end := outage(t, pool)
			if err := d.Refresh(t.Context()); err == nil {
				t.Fatal("no outage")
			}
			end()
			_, err := pool.Exec(t.Context(), `DELETE FROM api_keys WHERE id = $1`, lost.ID)
			if err == nil {
				_, err = pool.Exec(t.Context(), `UPDATE configuration SET version = version + $1`, after)
			}
			if err != nil {
				t.Fatal(err)
			}
			refresh(t, d)
			if !has(d.Key(hashOf(t, kept))) || has(d.Key(hashOf(t, lostText))) {
				t.Errorf("kept key found: %v; lost key found: %v", has(d.Key(hashOf(t, kept))), has(d.Key(hashOf(t, lostText))))
			}
		})
	}
}

// TestEmptySetReplaces: nothing in a healthy database means nothing; a load that fails means nothing at all.
func TestEmptySetReplaces(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	_, text := newKey(t, s, tenant.ID)
	d := newDirectory(t, pool, DirectoryOptions{})

	// A table is missing: the version is read, the rows are not.
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`UPDATE configuration SET version = 1`)
	exec(`ALTER TABLE channels RENAME TO hidden`)
	if err := d.Refresh(t.Context()); err == nil {
		t.Error("a load without a table succeeded")
	}
	if st := d.State(); !has(d.Key(hashOf(t, text))) || !has(d.Tenant(tenant.ID)) || st.Err == nil || st.Version == 1 {
		t.Errorf("a failed load replaced the set: %+v", st)
	}
	exec(`ALTER TABLE hidden RENAME TO channels`)
	exec(`TRUNCATE tenants CASCADE`)
	refresh(t, d)
	if st := d.State(); has(d.Key(hashOf(t, text))) || has(d.Tenant(tenant.ID)) || st.Err != nil || st.Version != 1 {
		t.Errorf("an empty set did not replace the old one: %+v", st)
	}
}

func TestMissFindsAKeyOfAMomentAgo(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	d := newDirectory(t, pool, DirectoryOptions{}) // does not run: only a miss can look
	_, text := newKey(t, s, tenant.ID)
	if has(d.Key(hashOf(t, text))) || !d.Miss(t.Context()) || !has(d.Key(hashOf(t, text))) {
		t.Error("the key is not found after a miss")
	}
}

// TestMissesAreCheap: strangers with invented keys cost a handful of queries, however many they are, and no memory.
func TestMissesAreCheap(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	s := NewStore(pgtest.Open(t, url, postgres.Options{}))
	newKey(t, s, newTenant(t, s, "Acme").ID)
	queries := postgres.CountQueries(nil)
	d := newDirectory(t, pgtest.Open(t, url, postgres.Options{Tracer: queries}), DirectoryOptions{})
	entries := d.set.Load().keys.len()
	queries.Reset()
	began := time.Now()
	const callers, each = 8, 2500
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for range each {
				var hash [32]byte
				_, _ = rand.Read(hash[:])
				if _, ok := d.Key(hash); ok {
					t.Error("an invented key was found")
				}
				d.Miss(t.Context())
			}
		})
	}
	wg.Wait()
	allowed := int64(earlyPollBurst + earlyPollsPerSecond*time.Since(began).Seconds() + 1)
	if n := queries.Count(); n == 0 || n > allowed {
		t.Errorf("%d misses cost %d queries, want 1 to %d", callers*each, n, allowed)
	}
	if n := d.set.Load().keys.len(); n != entries {
		t.Errorf("%d keys held, want %d", n, entries)
	}
}

// TestRefreshSeesOwnChange: whoever refreshes after a commit finds the change, also among many who share polls.
func TestRefreshSeesOwnChange(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	d := newDirectory(t, pool, DirectoryOptions{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 25 {
				_, text, err := s.CreateKey(t.Context(), operator, tenant.ID, NewKey{Name: "k"})
				if err == nil {
					err = d.Refresh(t.Context())
				}
				if err != nil || !has(d.Key(secrets.Hash(text.Reveal()))) {
					t.Errorf("own key not found after Refresh (%v)", err)
				}
			}
		})
	}
	wg.Wait()
}

// TestCallersGoingAwayDoNotStopPolls: the caller whose request ended makes the poll all the same, for those who share it.
func TestCallersGoingAwayDoNotStopPolls(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	d := newDirectory(t, pool, DirectoryOptions{})
	tenant := newTenant(t, s, "Acme")
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if err := d.Refresh(gone); err != nil || !has(d.Tenant(tenant.ID)) {
		t.Errorf("Refresh: %v", err)
	}
	if st := d.State(); st.Err != nil {
		t.Errorf("state %+v", st)
	}
}

// TestStoppingIsNoOutage: a poll that is cut off by Run's end says nothing about the database.
func TestStoppingIsNoOutage(t *testing.T) {
	t.Parallel()
	_, pool := newStore(t)
	lines := &logLines{lines: map[slog.Level]int{}}
	d := newDirectory(t, pool, DirectoryOptions{Logger: slog.New(lines)})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, "poll", d.refresh(ctx, ctx), context.Canceled)
	if st := d.State(); st.Err != nil || len(lines.take()) != 0 {
		t.Errorf("counts as an outage: %v", st.Err)
	}
}

// Not parallel: it looks at all goroutines of the process.
func TestRunLeavesNoGoroutine(t *testing.T) {
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	d := newDirectory(t, pool, DirectoryOptions{})
	before := goleak.IgnoreCurrent()
	stop := run(t, d)
	_, text := newKey(t, s, tenant.ID)
	eventually(t, "the directory runs", func() bool { return has(d.Key(hashOf(t, text))) })
	stop()
	goleak.VerifyNone(t, before)
}

// manyChannels is what a load of n channels of n/10 tenants reads.
func manyChannels(n int) changedRows {
	r := changedRows{version: 1}
	for i := range n {
		if i%10 == 0 {
			r.tenants = append(r.tenants, &TenantEntry{ID: uuid.Must(uuid.NewV7()), Name: fmt.Sprint("tenant ", i), Status: StatusActive})
		}
		c := &ChannelEntry{ID: uuid.Must(uuid.NewV7()), TenantID: r.tenants[len(r.tenants)-1].ID, Type: "webhook", Mode: "duplex", Status: "active"}
		_, _ = rand.Read(c.SecretHash[:])
		r.channels = append(r.channels, changedRow[ChannelEntry]{entry: c})
	}
	return r
}

func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// Not parallel: it measures the heap and allocations of the process.
func TestLookupsAllocateNothing(t *testing.T) {
	s := newEntrySet(changedRows{})
	rows := manyChannels(1000)
	s.apply(rows, nil)
	d := NewDirectory(nil, DirectoryOptions{})
	d.set.Store(s)
	c := rows.channels[7].entry
	allocs := testing.AllocsPerRun(100, func() {
		if !has(d.Channel(c.ID)) || !has(d.ChannelBySecret(c.SecretHash)) || !has(d.Tenant(c.TenantID)) || has(d.Key(c.SecretHash)) {
			t.Error("wrong answer")
		}
	})
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// TestMemoryPerChannel holds the directory to its price: the entry itself (240 bytes) and what finding it costs.
//
// Not parallel: it measures the heap of the process.
func TestMemoryPerChannel(t *testing.T) {
	const n, ceiling = 100_000, 300
	before := heap()
	set := func() *entrySet { // what was read is garbage once it is applied
		rows := manyChannels(n)
		set := newEntrySet(rows)
		set.apply(rows, nil)
		return set
	}()
	perRow := float64(heap()-before) / n
	if perRow > ceiling {
		t.Errorf("%.0f bytes a channel, want at most %d", perRow, ceiling)
	}
	t.Logf("%.0f bytes a channel, a tenth of a tenant included", perRow)
	runtime.KeepAlive(set)
}

func BenchmarkLookup(b *testing.B) {
	const n = 100_000
	rows := manyChannels(n)
	set := newEntrySet(rows)
	set.apply(rows, nil)
	d := NewDirectory(nil, DirectoryOptions{})
	d.set.Store(set)
	lookup := func(name string, find func(*ChannelEntry) bool) {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for i := 0; pb.Next(); i = (i + 7919) % n {
					if !find(rows.channels[i].entry) {
						b.Error("not found")
					}
				}
			})
		})
	}
	lookup("channel", func(c *ChannelEntry) bool { return has(d.Channel(c.ID)) })
	lookup("channel_by_secret", func(c *ChannelEntry) bool { return has(d.ChannelBySecret(c.SecretHash)) })
	lookup("tenant", func(c *ChannelEntry) bool { return has(d.Tenant(c.TenantID)) })
	lookup("unknown_key", func(c *ChannelEntry) bool { return !has(d.Key(c.SecretHash)) })
}

// BenchmarkLoad reads 100,000 channels of a real database.
func BenchmarkLoad(b *testing.B) {
	const n = 100_000
	s, pool := newStore(b)
	tenant := newTenant(b, s, "Acme")
	change(b, pool, `
INSERT INTO channels (tenant_id, id, name, type, mode, config, secret, secret_hash, version)
SELECT $1, gen_random_uuid(), i::text, 'webhook', 'duplex', '', '', sha256(i::text::bytea), version
FROM configuration, generate_series(1, $2::int) AS i`, tenant.ID, n)
	before := heap()
	var d *Directory
	for b.Loop() {
		d = newDirectory(b, pool, DirectoryOptions{})
	}
	b.ReportMetric(float64(heap()-before)/n, "heap-B/channel")
	if got := d.set.Load().channels.len(); got != n {
		b.Errorf("%d channels", got)
	}
}
