package channel_test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"converger/internal/channel"
	"converger/internal/channel/echo"
	"converger/internal/channel/webhook"
	"converger/internal/channel/whatsappmeta"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

var operator = tenants.Actor{Type: tenants.ActorOperator, ID: "op", RequestID: "req_1"}

// fixture is a store with two tenants.
type fixture struct {
	*channel.Store
	pool   *pgxpool.Pool
	reg    *channel.Registry
	box    *secrets.Box
	tenant tenants.ID
	other  tenants.ID
}

func newFixture(t *testing.T, pool *pgxpool.Pool) fixture {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	reg := channel.NewRegistry(echo.New(), webhook.New(newGuard(t, channel.GuardOptions{}), log), whatsappmeta.New(log))
	box, err := secrets.NewBox(bytes.Repeat([]byte{7}, secrets.KeySize))
	if err != nil {
		t.Fatal(err)
	}
	f := fixture{Store: channel.NewStore(pool, box, reg), pool: pool, reg: reg, box: box}
	for i, id := range []*tenants.ID{&f.tenant, &f.other} {
		tenant, err := tenants.NewStore(pool).Create(t.Context(), operator, tenants.NewTenant{Name: fmt.Sprintf("tenant %d", i)})
		if err != nil {
			t.Fatal(err)
		}
		*id = tenant.ID
	}
	return f
}

func (f fixture) create(t *testing.T, in channel.NewChannel) channel.Channel {
	t.Helper()
	ch, err := f.Create(t.Context(), operator, f.tenant, in)
	if err != nil {
		t.Fatal(err)
	}
	return ch
}

func echoNamed(name string) channel.NewChannel {
	return channel.NewChannel{Name: name, Type: channel.TypeEcho}
}

func hook(name, config string) channel.NewChannel {
	return channel.NewChannel{Name: name, Type: channel.TypeWebhook, Config: json.RawMessage(config)}
}

func ptr[T any](v T) *T { return &v }

// faults is a *fault.Invalid as "pointer code" lines.
func faults(t *testing.T, err error) []string {
	t.Helper()
	var invalid *fault.Invalid
	if !errors.As(err, &invalid) {
		t.Fatalf("got %v, want a *fault.Invalid", err)
	}
	var lines []string
	for _, f := range invalid.Fields {
		lines = append(lines, f.Pointer+" "+f.Code)
	}
	return lines
}

func version(t *testing.T, pool *pgxpool.Pool) (v int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT version FROM configuration`).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestStoreCreate(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	before := version(t, f.pool)
	got := f.create(t, channel.NewChannel{
		Name: "hook", Type: channel.TypeWebhook, RateLimit: " 80 / s ", RetryPolicy: json.RawMessage(`{"max_attempts":3,"backoff":"fixed"}`),
		Config: json.RawMessage(`{"url":"https://example.com/","headers":{"Authorization":"Bearer s3cret"}}`), Ordered: ptr(false),
	})
	want := channel.Channel{
		TenantID: f.tenant, Name: "hook", Type: channel.TypeWebhook, Mode: channel.ModeDuplex, Status: channel.StatusActive,
		Config: got.Config, Secret: got.Secret, RequireSignature: true, RateLimit: "80/s",
		RetryPolicy: channel.RetryPolicy{MaxAttempts: 3, Backoff: channel.BackoffFixed}, MaxInFlight: 100, Version: before + 1,
		ID: got.ID, InsertedAt: got.InsertedAt, UpdatedAt: got.UpdatedAt,
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if v := version(t, f.pool); v != before+1 {
		t.Errorf("version %d, want %d", v, before+1)
	}
	key, ok := strings.CutPrefix(got.Secret.Reveal(), "whsec_")
	if b, err := base64.StdEncoding.DecodeString(key); !ok || err != nil || len(b) != 32 {
		t.Errorf("secret is not whsec_ and 32 bytes: %d, %v", len(b), err)
	}
	if _, err := standardwebhooks.NewWebhook(got.Secret.Reveal()); err != nil {
		t.Errorf("the library of Standard Webhooks refuses the secret: %v", err)
	}
	read, err := f.Get(t.Context(), f.tenant, got.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(got, read); diff != "" {
		t.Errorf("read back: %s", diff)
	}

	// Nothing readable at rest, and nothing in the audit log.
	var row, audit string
	if err := f.pool.QueryRow(t.Context(), `SELECT string_agg(c::text || encode(c.config, 'escape') || encode(c.secret, 'escape'), '') FROM channels c`).Scan(&row); err != nil {
		t.Fatal(err)
	}
	if err := f.pool.QueryRow(t.Context(), `SELECT string_agg(a::text, '') FROM audit_log a WHERE resource_type = 'channel'`).Scan(&audit); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"row": row, "audit log": audit} {
		if strings.Contains(text, "s3cret") || strings.Contains(text, key) || text == "" {
			t.Errorf("the %s holds a secret, or nothing: %s", name, text)
		}
	}
	if !strings.Contains(audit, "https://example.com/") || !strings.Contains(audit, "create") || !strings.Contains(audit, "req_1") {
		t.Errorf("the audit log does not say what was made: %s", audit)
	}
}

func TestStoreCreateFaults(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	for name, tt := range map[string]struct {
		in   channel.NewChannel
		want []string
	}{
		"everything at once": {
			channel.NewChannel{Name: " ", Type: channel.TypeWebhook, Mode: "sideways", Status: "on", Config: json.RawMessage(`{"url":"ftp://x","colour":1}`),
				Secret: "short", RateLimit: "0/s", RetryPolicy: json.RawMessage(`{"max_attempts":0,"base_ms":"1","backoff":"wild","x":1}`), MaxInFlight: -1},
			[]string{"/name required", "/status unknown_value", "/max_in_flight out_of_range", "/rate_limit malformed", "/mode unknown_value",
				"/config/colour unknown_member", "/secret out_of_range",
				"/retry_policy/backoff unknown_value", "/retry_policy/base_ms invalid_type", "/retry_policy/max_attempts out_of_range", "/retry_policy/x unknown_member"},
		},
		"no type":                {channel.NewChannel{Name: "n"}, []string{"/type required"}},
		"unknown type":           {channel.NewChannel{Name: "n", Type: "pigeon"}, []string{"/type unknown_value"}},
		"mode of the type":       {channel.NewChannel{Name: "n", Type: channel.TypeEcho, Mode: channel.ModeInbound}, []string{"/mode unknown_value"}},
		"only inbound":           {channel.NewChannel{Name: "n", Type: channel.TypeWhatsAppMeta, Mode: channel.ModeDuplex, Config: json.RawMessage(`{"phone_number_id":"1","verify_token":"t","app_secret":"s"}`)}, []string{"/mode unknown_value"}},
		"no url to send to":      {hook("n", `{}`), []string{"/config/url required"}},
		"a private url":          {hook("n", `{"url":"http://127.0.0.1"}`), []string{"/config/url malformed"}},
		"config is a list":       {hook("n", `[]`), []string{"/config invalid_type"}},
		"idle time-out":          {channel.NewChannel{Name: "n", Type: channel.TypeEcho, Config: json.RawMessage(`{"conversation_idle_timeout_seconds":0}`)}, []string{"/config/conversation_idle_timeout_seconds out_of_range"}},
		"maximum below the base": {channel.NewChannel{Name: "n", Type: channel.TypeEcho, RetryPolicy: json.RawMessage(`{"base_ms":10,"max_ms":9}`)}, []string{"/retry_policy/max_ms out_of_range"}},
		"policy is a list":       {channel.NewChannel{Name: "n", Type: channel.TypeEcho, RetryPolicy: json.RawMessage(`[1]`)}, []string{"/retry_policy invalid_type"}},
		"time-out over a lease":  {channel.NewChannel{Name: "n", Type: channel.TypeEcho, RetryPolicy: json.RawMessage(`{"timeout_ms":30001}`)}, []string{"/retry_policy/timeout_ms out_of_range"}},
		"control in the name":    {echoNamed("a\nb"), []string{"/name malformed"}},
		"long name":              {echoNamed(strings.Repeat("é", 201)), []string{"/name too_long"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := f.Create(t.Context(), operator, f.tenant, tt.in)
			if diff := cmp.Diff(tt.want, faults(t, err)); diff != "" {
				t.Error(diff)
			}
		})
	}
	if _, err := f.Create(t.Context(), operator, f.tenant, hook("inbound only needs no url", `{}`)); err == nil {
		t.Error("a duplex webhook without url was accepted")
	}
	in := hook("inbound only needs no url", `{}`)
	in.Mode = channel.ModeInbound
	f.create(t, in)
	f.create(t, echoNamed(strings.Repeat("é", 200)))
	if _, err := f.Create(t.Context(), operator, uuid.Must(uuid.NewV7()), echoNamed("n")); !errors.Is(err, tenants.ErrNotFound) {
		t.Errorf("unknown tenant: got %v, want tenants.ErrNotFound", err)
	}
}

func TestStoreUpdate(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	ch := f.create(t, hook("a", `{"url":"https://example.com/","headers":{"Authorization":"Bearer one","X-B":"two"}}`))
	f.create(t, echoNamed("b"))

	// What is shown can be sent back with a change: the secrets stay.
	shown, err := json.Marshal(channel.RedactedConfig(f.reg, ch))
	if err != nil || strings.Contains(string(shown), "one") {
		t.Fatal(string(shown), err)
	}
	edited := strings.Replace(strings.Replace(string(shown), "example.com", "example.org", 1), `"X-B":"[redacted]"`, `"X-B":"new"`, 1)
	got, err := f.Update(t.Context(), operator, f.tenant, ch.ID, channel.Patch{
		Name: ptr("c"), Status: ptr(channel.StatusInactive), Config: json.RawMessage(edited), RequireSignature: ptr(false), Ordered: ptr(false),
		RateLimit: ptr("600/m"), RetryPolicy: json.RawMessage(`{"timeout_ms":1000}`), MaxInFlight: ptr(5),
	})
	if err != nil {
		t.Fatal(err)
	}
	want := ch
	want.Name, want.Status, want.RequireSignature, want.Ordered, want.RateLimit = "c", channel.StatusInactive, false, false, "600/m"
	want.RetryPolicy, want.MaxInFlight, want.Version, want.UpdatedAt = channel.RetryPolicy{TimeoutMS: 1000}, 5, got.Version, got.UpdatedAt
	want.Config = json.RawMessage(`{"headers":{"Authorization":"Bearer one","X-B":"new"},"url":"https://example.org/"}`)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if got.Version <= ch.Version || !got.UpdatedAt.After(ch.UpdatedAt) {
		t.Errorf("version %d, updated %s: not later than before", got.Version, got.UpdatedAt)
	}
	read, err := f.Get(t.Context(), f.tenant, ch.ID)
	if diff := cmp.Diff(got, read); err != nil || diff != "" {
		t.Error(err, diff)
	}

	before := version(t, f.pool)
	for name, tt := range map[string]struct {
		patch channel.Patch
		want  []string
	}{
		"a mark without a value": {channel.Patch{Config: json.RawMessage(`{"url":"https://example.org/","headers":{"X-New":"[redacted]"}}`)}, []string{"/config/headers/X-New malformed"}},
		"no url any more":        {channel.Patch{Config: json.RawMessage(`{}`), RateLimit: ptr("x")}, []string{"/rate_limit malformed", "/config/url required"}},
		"policy":                 {channel.Patch{RetryPolicy: json.RawMessage(`{"x":1}`)}, []string{"/retry_policy/x unknown_member"}},
	} {
		if _, err := f.Update(t.Context(), operator, f.tenant, ch.ID, tt.patch); !cmp.Equal(tt.want, faults(t, err)) {
			t.Errorf("%s: got %v, want %v", name, faults(t, err), tt.want)
		}
	}
	if _, err := f.Update(t.Context(), operator, f.tenant, ch.ID, channel.Patch{Name: ptr("b")}); !errors.Is(err, channel.ErrNameTaken) {
		t.Errorf("taken name: got %v, want ErrNameTaken", err)
	}
	after, err := f.Get(t.Context(), f.tenant, ch.ID)
	if diff := cmp.Diff(got, after); err != nil || diff != "" || version(t, f.pool) != before {
		t.Errorf("refused changes changed something: %v %s", err, diff)
	}
	cleared, err := f.Update(t.Context(), operator, f.tenant, ch.ID, channel.Patch{RateLimit: ptr("")})
	if err != nil || cleared.RateLimit != "" {
		t.Errorf("no limit: %q, %v", cleared.RateLimit, err)
	}
}

func TestStoreSecrets(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	in := echoNamed("a")
	in.Secret = "sixteen bytes ok"
	ch := f.create(t, in)
	in.Name = "b"
	if _, err := f.Create(t.Context(), operator, f.other, in); !cmp.Equal([]string{"/secret conflict"}, faults(t, err)) {
		t.Errorf("one secret for two channels: %v", err)
	}

	at := time.Now()
	rotated, err := f.RotateSecret(t.Context(), operator, f.tenant, ch.ID, time.Hour, "")
	if err != nil {
		t.Fatal(err)
	}
	if rotated.PreviousSecret != ch.Secret || rotated.Secret == ch.Secret || rotated.PreviousUntil.Before(at.Add(time.Hour-time.Millisecond)) || rotated.PreviousUntil.After(time.Now().Add(time.Hour)) {
		t.Error("the current secret did not become the previous one for an hour")
	}
	if got := rotated.Secrets(at); len(got) != 2 || string(got[0]) != rotated.Secret.Reveal() || string(got[1]) != in.Secret {
		t.Error("both secrets should be valid during the overlap, the current one first")
	}
	if got := rotated.Secrets(rotated.PreviousUntil); len(got) != 1 {
		t.Error("the previous secret should end with the overlap")
	}
	read, err := f.Get(t.Context(), f.tenant, ch.ID)
	if err != nil || read.PreviousSecret != rotated.PreviousSecret || !read.PreviousUntil.Equal(rotated.PreviousUntil) {
		t.Errorf("read back: %v, until %s", err, read.PreviousUntil)
	}
	// A previous secret still names its channel.
	if _, err := f.Create(t.Context(), operator, f.other, in); !cmp.Equal([]string{"/secret conflict"}, faults(t, err)) {
		t.Errorf("a previous secret for another channel: %v", err)
	}

	again, err := f.RotateSecret(t.Context(), operator, f.tenant, ch.ID, -1, "another secret, chosen")
	if err != nil || again.PreviousSecret != rotated.Secret || again.Secret != "another secret, chosen" ||
		time.Until(again.PreviousUntil).Round(time.Minute) != channel.DefaultOverlap {
		t.Errorf("second rotation: %v, until %s", err, again.PreviousUntil)
	}
	if b, err := f.Create(t.Context(), operator, f.other, in); err != nil || b.Secret != "sixteen bytes ok" {
		t.Errorf("the secret before the previous one is not free: %v", err)
	}
	none, err := f.RotateSecret(t.Context(), operator, f.tenant, ch.ID, 0, "")
	if err != nil || none.PreviousSecret != "" || !none.PreviousUntil.IsZero() {
		t.Errorf("without overlap: %v, until %s", err, none.PreviousUntil)
	}

	for name, tt := range map[string]struct {
		overlap time.Duration
		secret  string
		want    []string
	}{
		"too long and too short": {channel.MaxOverlap + 1, "short", []string{"/overlap_seconds out_of_range", "/secret out_of_range"}},
		"a blank":                {0, " 0123456789abcdef", []string{"/secret malformed"}},
		"the same":               {0, none.Secret.Reveal(), []string{"/secret conflict"}},
		"another channel's":      {0, in.Secret, []string{"/secret conflict"}},
	} {
		if _, err := f.RotateSecret(t.Context(), operator, f.tenant, ch.ID, tt.overlap, tt.secret); !cmp.Equal(tt.want, faults(t, err)) {
			t.Errorf("%s: got %v, want %v", name, faults(t, err), tt.want)
		}
	}
	var audit string
	if err := f.pool.QueryRow(t.Context(), `SELECT string_agg(a::text, '') FROM audit_log a`).Scan(&audit); err != nil {
		t.Fatal(err)
	}
	if strings.Count(audit, "rotate_secret") != 3 || strings.Contains(audit, "chosen") {
		t.Errorf("audit log: %s", audit)
	}
}

// Sealed values are bound to their row and column: copied to another place they do not open.
func TestStoreSealedValuesStayInPlace(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	a, b := f.create(t, echoNamed("a")), f.create(t, echoNamed("b"))
	for _, sql := range []string{
		`UPDATE channels SET secret = (SELECT secret FROM channels WHERE id = $2) WHERE id = $1`,
		`UPDATE channels SET config = secret WHERE id = $1 AND $2::uuid IS NOT NULL`,
	} {
		if _, err := f.pool.Exec(t.Context(), sql, a.ID, b.ID); err != nil {
			t.Fatal(err)
		}
		if _, err := f.Get(t.Context(), f.tenant, a.ID); !errors.Is(err, secrets.ErrSealed) {
			t.Errorf("%s: got %v, want ErrSealed", sql, err)
		}
	}
}

func TestStoreDelete(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	in := echoNamed("a")
	in.Secret = "sixteen bytes ok"
	ch := f.create(t, in)
	if err := f.Delete(t.Context(), operator, f.tenant, ch.ID); err != nil {
		t.Fatal(err)
	}
	_, getErr := f.Get(t.Context(), f.tenant, ch.ID)
	_, currentErr := f.Current(t.Context(), f.tenant, ch.ID, ch.Version)
	_, updateErr := f.Update(t.Context(), operator, f.tenant, ch.ID, channel.Patch{Name: ptr("b")})
	_, rotateErr := f.RotateSecret(t.Context(), operator, f.tenant, ch.ID, 0, "")
	deleteErr := f.Delete(t.Context(), operator, f.tenant, ch.ID)
	for name, err := range map[string]error{"get": getErr, "current": currentErr, "update": updateErr, "rotate": rotateErr, "delete": deleteErr} {
		if !errors.Is(err, channel.ErrNotFound) {
			t.Errorf("%s: got %v, want ErrNotFound", name, err)
		}
	}
	if list, err := f.List(t.Context(), f.tenant, uuid.Nil, 10); err != nil || len(list) != 0 {
		t.Errorf("list: %v, %v", list, err)
	}
	var rowVersion int64
	var secret []byte
	if err := f.pool.QueryRow(t.Context(), `SELECT version, secret FROM channels WHERE id = $1 AND deleted_at IS NOT NULL`, ch.ID).Scan(&rowVersion, &secret); err != nil || rowVersion != version(t, f.pool) {
		t.Errorf("the row must tell the other nodes: version %d, %v", rowVersion, err)
	}
	if plain, err := f.box.Open(secret, "channels", "secret", ch.ID); err != nil || string(plain) == in.Secret {
		t.Errorf("the secret is still there, or unreadable: %v", err)
	}
	f.create(t, in) // name and secret are free
}

func TestStoreList(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	var want []uuid.UUID
	for i := range 5 {
		want = append(want, f.create(t, echoNamed(fmt.Sprint(i))).ID)
	}
	var got []uuid.UUID
	after := uuid.Nil
	for {
		page, err := f.List(t.Context(), f.tenant, after, 2)
		if err != nil {
			t.Fatal(err)
		}
		for _, ch := range page {
			got = append(got, ch.ID)
			after = ch.ID
		}
		if len(page) < 2 {
			break
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestStoreKeepsTenantsApart(t *testing.T) {
	t.Parallel()
	f := newFixture(t, pgtest.Pool(t))
	ch := f.create(t, echoNamed("a"))
	if _, err := f.Current(t.Context(), f.tenant, ch.ID, ch.Version); err != nil {
		t.Fatal(err)
	}
	_, getErr := f.Get(t.Context(), f.other, ch.ID)
	_, currentErr := f.Current(t.Context(), f.other, ch.ID, ch.Version)
	_, updateErr := f.Update(t.Context(), operator, f.other, ch.ID, channel.Patch{Name: ptr("b")})
	_, rotateErr := f.RotateSecret(t.Context(), operator, f.other, ch.ID, 0, "")
	deleteErr := f.Delete(t.Context(), operator, f.other, ch.ID)
	for name, err := range map[string]error{"get": getErr, "current": currentErr, "update": updateErr, "rotate": rotateErr, "delete": deleteErr} {
		if !errors.Is(err, channel.ErrNotFound) {
			t.Errorf("%s: got %v, want ErrNotFound", name, err)
		}
	}
	if list, err := f.List(t.Context(), f.other, uuid.Nil, 10); err != nil || len(list) != 0 {
		t.Errorf("list: %v, %v", list, err)
	}
	if got, err := f.Get(t.Context(), f.tenant, ch.ID); err != nil || !cmp.Equal(ch, got) {
		t.Errorf("the channel changed: %v", err)
	}
	if _, err := f.Create(t.Context(), operator, f.other, echoNamed("a")); err != nil {
		t.Errorf("names belong to a tenant: %v", err)
	}
	if _, err := f.Create(t.Context(), operator, f.tenant, echoNamed("a")); !errors.Is(err, channel.ErrNameTaken) {
		t.Errorf("got %v, want ErrNameTaken", err)
	}
}

func TestCurrent(t *testing.T) {
	t.Parallel()
	queries := postgres.CountQueries(nil)
	f := newFixture(t, pgtest.PoolWith(t, postgres.Options{Tracer: queries}))
	ch := f.create(t, echoNamed("a"))

	queries.Reset()
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			if got, err := f.Current(t.Context(), f.tenant, ch.ID, ch.Version); err != nil || got.Version < ch.Version {
				t.Errorf("got %v, %v", got, err)
			}
		})
	}
	wg.Wait()
	// Who arrives between the end of the shared read and the first look reads again; never the whole herd.
	if n := queries.Count(); n < 1 || n > 5 {
		t.Errorf("%d queries for 200 callers", n)
	}

	// Another node's store has the old one in memory; a newer version asked for gives the newer channel.
	node := channel.NewStore(f.pool, f.box, f.reg)
	if _, err := node.Current(t.Context(), f.tenant, ch.ID, ch.Version); err != nil {
		t.Fatal(err)
	}
	updated, err := f.Update(t.Context(), operator, f.tenant, ch.ID, channel.Patch{Name: ptr("b")})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := node.Current(t.Context(), f.tenant, ch.ID, updated.Version); err != nil || got.Name != "b" {
		t.Errorf("newer version: %v, %v", got, err)
	}
	// The newest version serves whoever asks for an older one, without a query.
	queries.Reset()
	if got, err := node.Current(t.Context(), f.tenant, ch.ID, ch.Version); err != nil || got.Name != "b" || queries.Count() != 0 {
		t.Errorf("older version: %v, %v, %d queries", got, err, queries.Count())
	}
	// A version that the database does not have is an error, never an older channel.
	if got, err := node.Current(t.Context(), f.tenant, ch.ID, updated.Version+1); err == nil {
		t.Errorf("version to come: %v", got)
	}
	if _, err := node.Current(t.Context(), f.tenant, uuid.Must(uuid.NewV7()), 1); !errors.Is(err, channel.ErrNotFound) {
		t.Errorf("unknown: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := channel.NewStore(f.pool, f.box, f.reg).Current(ctx, f.tenant, ch.ID, 1); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestParseRateLimit(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]channel.RateLimit{
		"": {}, "  ": {},
		"80/s":                   {Limit: 80, Per: time.Second},
		" 600 / m ":              {Limit: 600, Per: time.Minute},
		"1000000/h":              {Limit: 1_000_000, Per: time.Hour},
		"0/s":                    {Limit: -1},
		"-1/s":                   {Limit: -1},
		"+1/s":                   {Limit: -1},
		"1.5/s":                  {Limit: -1},
		"1000001/s":              {Limit: -1},
		"1":                      {Limit: -1},
		"/s":                     {Limit: -1},
		"1/":                     {Limit: -1},
		"1/d":                    {Limit: -1},
		"1/S":                    {Limit: -1},
		"1/s/s":                  {Limit: -1},
		"1 0/s":                  {Limit: -1},
		"0x10/s":                 {Limit: -1},
		"99999999999999999999/s": {Limit: -1},
	} {
		got, err := channel.ParseRateLimit(text)
		if want.Limit < 0 {
			if err == nil {
				t.Errorf("%q: got %v, want an error", text, got)
			}
			continue
		}
		if err != nil || got != want {
			t.Errorf("%q: got %v and %v, want %v", text, got, err, want)
		}
		if again, err := channel.ParseRateLimit(got.String()); err != nil || again != got {
			t.Errorf("%q: its text %q gives %v, %v", text, got.String(), again, err)
		}
	}
}
