package tenants

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/migrations/pgtest"
)

func newStore(t testing.TB) (*Store, *pgxpool.Pool) {
	t.Helper()
	pool := pgtest.Pool(t)
	return NewStore(pool), pool
}

type auditRow struct {
	TenantID                                                           *ID
	ActorType, ActorID, Action, ResourceType, ResourceID, Changes, Req string
}

// lastAudit is the newest line of the audit log, and how many there are.
func lastAudit(t testing.TB, pool *pgxpool.Pool) (row auditRow, n int) {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
SELECT tenant_id, actor_type, actor_id, action, resource_type, resource_id, changes::text, COALESCE(request_id, '(null)')
FROM audit_log ORDER BY id`)
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[auditRow])
	if err != nil || len(all) == 0 {
		t.Fatalf("audit log: %d lines, %v", len(all), err)
	}
	return all[len(all)-1], len(all)
}

func version(t testing.TB, pool *pgxpool.Pool) (v int64) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), versionQuery).Scan(&v); err != nil {
		t.Fatal(err)
	}
	return v
}

func wantInvalid(t testing.TB, what string, err error, pointer, code string) {
	t.Helper()
	var bad *fault.Invalid
	if !errors.As(err, &bad) || len(bad.Fields) != 1 || bad.Fields[0].Pointer != pointer || bad.Fields[0].Code != code {
		t.Errorf("%s: error %#v, want %s at %s", what, err, code, pointer)
	}
}

func sameJSON(t testing.TB, what, got, want string) {
	t.Helper()
	var g, w any
	if err := errors.Join(json.Unmarshal([]byte(got), &g), json.Unmarshal([]byte(want), &w)); err != nil {
		t.Fatalf("%s: %v in %s", what, err, got)
	}
	if diff := cmp.Diff(w, g); diff != "" {
		t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func TestCreateTenant(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	before := version(t, pool)
	made, err := s.Create(t.Context(), operator, NewTenant{Name: "Ærø Shipping"})
	if err != nil {
		t.Fatal(err)
	}
	want := Tenant{Name: "Ærø Shipping", Status: StatusActive, Limits: json.RawMessage("{}"), MaxInFlight: 400, Version: before + 1}
	if diff := cmp.Diff(want, made, cmpopts.IgnoreFields(Tenant{}, "ID", "InsertedAt", "UpdatedAt")); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	if made.ID.Version() != 7 || time.Since(made.InsertedAt).Abs() > time.Hour || made.InsertedAt.Location() != time.UTC {
		t.Errorf("id %v, inserted %v", made.ID, made.InsertedAt)
	}
	got, err := s.Get(t.Context(), made.ID)
	if diff := cmp.Diff(made, got); diff != "" || err != nil {
		t.Errorf("Get: %v (-created +got):\n%s", err, diff)
	}
	audit, _ := lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{"before": null, "after": {"name": "Ærø Shipping", "status": "active"}}`)
	audit.Changes = ""
	wantAudit := auditRow{TenantID: &made.ID, ActorType: "operator", ActorID: "op-1", Action: "create",
		ResourceType: "tenant", ResourceID: made.ID.String(), Req: "req-1"}
	if diff := cmp.Diff(wantAudit, audit); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
}

func TestCreateTenantRefuses(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	newTenant(t, s, "Acme")
	before := version(t, pool)
	for _, taken := range []string{"Acme", "acme", "ACME"} {
		wantErr(t, taken, second(s.Create(t.Context(), operator, NewTenant{Name: taken})), ErrNameTaken)
	}
	for name, code := range map[string]string{
		"":                        fault.Required,
		" \t":                     fault.Required,
		"a\x00b":                  fault.Malformed,
		"a\nb":                    fault.Malformed,
		"\xff":                    fault.Malformed,
		" Acme":                   fault.Malformed,
		strings.Repeat("æ", 201):  fault.TooLong,
		strings.Repeat("x", 9999): fault.TooLong,
	} {
		wantInvalid(t, fmt.Sprintf("name %.20q", name), second(s.Create(t.Context(), operator, NewTenant{Name: name})), "/name", code)
	}
	if _, err := s.Create(t.Context(), operator, NewTenant{Name: strings.Repeat("æ", 200)}); err != nil {
		t.Errorf("200 characters: %v", err)
	}
	if _, n := lastAudit(t, pool); n != 2 || version(t, pool) != before+1 {
		t.Errorf("refusals left traces: %d audit lines, version %d after %d", n, version(t, pool), before)
	}
}

func TestListAllTenants(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	var want []string
	for i := range 5 {
		want = append(want, newTenant(t, s, fmt.Sprint("tenant ", i)).Name)
	}
	var got []string
	var after uuid.UUID
	for {
		page, err := s.ListAllTenants(t.Context(), after, 2)
		if err != nil || len(page) > 2 {
			t.Fatalf("%d tenants, %v", len(page), err)
		}
		if len(page) == 0 {
			break
		}
		for _, tenant := range page {
			got = append(got, tenant.Name)
		}
		after = page[len(page)-1].ID
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pages (-want +got):\n%s", diff)
	}
}

func TestSetStatus(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	suspended, err := s.SetStatus(t.Context(), operator, tenant.ID, StatusSuspended)
	if err != nil || suspended.Status != StatusSuspended || suspended.Version != tenant.Version+1 {
		t.Fatalf("suspended: %+v, %v", suspended, err)
	}
	audit, lines := lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{"before": {"status": "active"}, "after": {"status": "suspended"}}`)
	again, err := s.SetStatus(t.Context(), operator, tenant.ID, StatusSuspended)
	if diff := cmp.Diff(suspended, again); diff != "" || err != nil {
		t.Errorf("suspended again: %v (-first +second):\n%s", err, diff)
	}
	if _, n := lastAudit(t, pool); n != lines || version(t, pool) != suspended.Version {
		t.Error("a change to the same status left a trace")
	}
	wantInvalid(t, "status", second(s.SetStatus(t.Context(), operator, tenant.ID, "gone")), "/status", fault.UnknownValue)
}

func TestSetUploadTypes(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	before := version(t, pool)
	set, err := s.SetUploadTypes(t.Context(), operator, tenant.ID, []string{"text/plain", "image/png", "text/plain"})
	want := []string{"image/png", "text/plain"}
	if err != nil || !slices.Equal(set.UploadTypes, want) || set.Version != before+1 {
		t.Fatalf("set: %+v, %v", set, err)
	}
	audit, lines := lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{"before": {"allowed_upload_types": null}, "after": {"allowed_upload_types": ["image/png", "text/plain"]}}`)
	if _, err := s.SetUploadTypes(t.Context(), operator, tenant.ID, want); err != nil {
		t.Error(err)
	}
	if _, n := lastAudit(t, pool); n != lines || version(t, pool) != before+1 {
		t.Error("setting the same types left traces")
	}
	d := NewDirectory(pool, DirectoryOptions{})
	if err := d.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	if e, ok := d.Tenant(tenant.ID); !ok || !slices.Equal(e.UploadTypes, want) {
		t.Errorf("the directory has %v", e)
	}
	for _, none := range [][]string{{}, nil} {
		if set, err = s.SetUploadTypes(t.Context(), operator, tenant.ID, none); err != nil || set.UploadTypes != nil {
			t.Errorf("reset: %+v, %v", set, err)
		}
	}
	wantErr(t, "unknown tenant", second(s.SetUploadTypes(t.Context(), operator, uuid.New(), want)), ErrNotFound)
}

func TestCreateKey(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	expires := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
	k, text, err := s.CreateKey(t.Context(), operator, tenant.ID, NewKey{Name: "backend", Scopes: []string{"read", "read"}, ExpiresAt: &expires})
	if err != nil {
		t.Fatal(err)
	}
	want := APIKey{TenantID: tenant.ID, Name: "backend", Prefix: text.Reveal()[:13], Scopes: []string{"read"},
		ExpiresAt: &expires, Version: tenant.Version + 1}
	if diff := cmp.Diff(want, k, cmpopts.IgnoreFields(APIKey{}, "ID", "InsertedAt")); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	var stored []byte
	if err := pool.QueryRow(t.Context(), `SELECT hash FROM api_keys`).Scan(&stored); err != nil || [32]byte(stored) != hashOf(t, text) {
		t.Errorf("stored hash %x, %v", stored, err)
	}
	// Nothing stored may hold the key itself.
	var dump string
	err = pool.QueryRow(t.Context(), `SELECT (SELECT string_agg(k::text, ' ') FROM api_keys k) || (SELECT string_agg(a::text, ' ') FROM audit_log a)`).Scan(&dump)
	if err != nil || strings.Contains(dump, text.Reveal()[13:]) {
		t.Errorf("the key is in the database: %v", err)
	}

	both, _ := newKey(t, s, tenant.ID)
	if diff := cmp.Diff([]string{"read", "write"}, both.Scopes); diff != "" {
		t.Errorf("default scopes (-want +got):\n%s", diff)
	}
	list, err := s.ListKeys(t.Context(), tenant.ID)
	if diff := cmp.Diff([]APIKey{k, both}, list); diff != "" || err != nil {
		t.Errorf("ListKeys: %v (-want +got):\n%s", err, diff)
	}

	past := time.Now().Add(-time.Second)
	wantInvalid(t, "expired", third(s.CreateKey(t.Context(), operator, tenant.ID, NewKey{Name: "k", ExpiresAt: &past})), "/expires_at", fault.OutOfRange)
	wantInvalid(t, "scope", third(s.CreateKey(t.Context(), operator, tenant.ID, NewKey{Name: "k", Scopes: []string{"read", "admin"}})), "/scopes/1", fault.UnknownValue)
	wantInvalid(t, "name", third(s.CreateKey(t.Context(), operator, tenant.ID, NewKey{})), "/name", fault.Required)
}

func TestRevokeKey(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	k, _ := newKey(t, s, tenant.ID)
	revoke := func(at time.Time) APIKey {
		t.Helper()
		k, err := s.RevokeKey(t.Context(), operator, tenant.ID, k.ID, at)
		if err != nil {
			t.Fatal(err)
		}
		return k
	}
	day := time.Now().Add(24 * time.Hour).UTC().Truncate(time.Microsecond)
	if got := revoke(day); !got.RevokedAt.Equal(day) {
		t.Errorf("revoked at %v, want %v", got.RevokedAt, day)
	}
	if got := revoke(day.Add(time.Hour)); !got.RevokedAt.Equal(day) {
		t.Errorf("a later revocation moved it to %v", got.RevokedAt)
	}
	hour := day.Add(-23 * time.Hour)
	if got := revoke(hour); !got.RevokedAt.Equal(hour) {
		t.Errorf("an earlier revocation left it at %v", got.RevokedAt)
	}
	now := revoke(time.Time{})
	if now.RevokedAt.After(time.Now()) {
		t.Errorf("revoked now: %v", now.RevokedAt)
	}
	audit, lines := lastAudit(t, pool)
	if audit.Action != "revoke" || audit.ResourceID != k.ID.String() || audit.Req != "req-1" {
		t.Errorf("audit %+v", audit)
	}
	if again := revoke(time.Now()); !again.RevokedAt.Equal(*now.RevokedAt) || again.Version != now.Version {
		t.Errorf("revoked again: %+v, want %+v", again, now)
	}
	if _, n := lastAudit(t, pool); n != lines {
		t.Error("a repeated revocation was audited")
	}
}

// TestRevocationIsByTheDatabaseClock: a revocation "now" by a node whose clock is ahead must not wait for the others' clocks.
func TestRevocationIsByTheDatabaseClock(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	k, _ := newKey(t, s, newTenant(t, s, "Acme").ID)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(t.Context()) }()
	// What Store sends for "now", by a clock that is an hour ahead.
	got, err := postgres.One(t.Context(), tx, ErrNotFound, scanKey, revokeKeyQuery, k.TenantID, k.ID, time.Now().Add(time.Hour), 1)
	if err != nil || got.RevokedAt.After(time.Now().Add(time.Minute)) {
		t.Errorf("revoked at %v, %v", got.RevokedAt, err)
	}
}

func TestOperatorTokens(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	made, text, err := s.CreateOperatorToken(t.Context(), operator, NewOperatorToken{Name: "deploy", Scopes: []string{"write", "read"}})
	if err != nil {
		t.Fatal(err)
	}
	want := OperatorToken{Name: "deploy", Prefix: text.Reveal()[:13], Scopes: []string{"read", "write"}, Version: version(t, pool)}
	if diff := cmp.Diff(want, made, cmpopts.IgnoreFields(OperatorToken{}, "ID", "InsertedAt")); diff != "" {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	if audit, _ := lastAudit(t, pool); audit.TenantID != nil || audit.Action != "create" || audit.ResourceType != "operator_token" {
		t.Errorf("audit %+v", audit)
	}
	if _, err := ParseOperatorToken(text.Reveal()); err != nil {
		t.Error(err)
	}
	soon := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
	if got, err := s.RevokeOperatorToken(t.Context(), operator, made.ID, soon, false); err != nil || !got.RevokedAt.Equal(soon) {
		t.Errorf("scheduled: %+v, %v", got, err)
	}
	revoked, err := s.RevokeOperatorToken(t.Context(), operator, made.ID, time.Now(), false)
	if err != nil || !revoked.RevokedAt.Before(soon) {
		t.Errorf("revoked: %+v, %v", revoked, err)
	}
	again, err := s.RevokeOperatorToken(t.Context(), operator, made.ID, soon, false)
	if diff := cmp.Diff(revoked, again); diff != "" || err != nil {
		t.Errorf("revoked again: %v (-first +second):\n%s", err, diff)
	}
	list, err := s.ListOperatorTokens(t.Context())
	if diff := cmp.Diff([]OperatorToken{revoked}, list); diff != "" || err != nil {
		t.Errorf("ListOperatorTokens: %v (-want +got):\n%s", err, diff)
	}
	wantErr(t, "unknown token", second(s.RevokeOperatorToken(t.Context(), operator, uuid.New(), soon, false)), ErrNotFound)
	wantInvalid(t, "name", third(s.CreateOperatorToken(t.Context(), operator, NewOperatorToken{})), "/name", fault.Required)
}

func TestLimits(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	limits := func(want string) {
		t.Helper()
		got, err := s.Get(t.Context(), tenant.ID)
		if err != nil {
			t.Fatal(err)
		}
		sameJSON(t, "limits", string(got.Limits), want)
	}
	set := func(bucket, override string) {
		t.Helper()
		if err := s.SetLimit(t.Context(), operator, tenant.ID, bucket, json.RawMessage(override)); err != nil {
			t.Fatal(err)
		}
	}
	limits(`{}`)
	set("upload", `{"limit":1,"scale_ms":1000}`)
	set("inbound", `{"limit":2,"scale_ms":1000}`)
	set("inbound", `{"limit":3,"scale_ms":60000}`)
	limits(`{"upload":{"limit":1,"scale_ms":1000},"inbound":{"limit":3,"scale_ms":60000}}`)
	audit, _ := lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{
		"before": {"limits": {"inbound": {"limit": 2, "scale_ms": 1000}}},
		"after": {"limits": {"inbound": {"limit": 3, "scale_ms": 60000}}}}`)

	// A bucket's name, not a secret's.
	set("token_generate", `{"limit":4,"scale_ms":1000}`)
	audit, _ = lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{"before": {"limits": {"token_generate": null}},
		"after": {"limits": {"token_generate": {"limit": 4, "scale_ms": 1000}}}}`)

	for range 2 { // the second time there is nothing to remove
		if err := s.DeleteLimit(t.Context(), operator, tenant.ID, "inbound"); err != nil {
			t.Fatal(err)
		}
	}
	limits(`{"upload":{"limit":1,"scale_ms":1000},"token_generate":{"limit":4,"scale_ms":1000}}`)
	audit, lines := lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{"before": {"limits": {"inbound": {"limit": 3, "scale_ms": 60000}}},
		"after": {"limits": {"inbound": null}}}`)
	for _, bad := range []string{"", "{", "\x00"} {
		wantInvalid(t, "not JSON", s.SetLimit(t.Context(), operator, tenant.ID, "upload", json.RawMessage(bad)), "", fault.Malformed)
	}
	if lines != 6 {
		t.Errorf("%d audit lines, want 6", lines)
	}
}

func TestConcurrentLimitsLoseNone(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	tenant := newTenant(t, s, "Acme")
	const buckets = 20
	var writers sync.WaitGroup
	for i := range buckets {
		writers.Go(func() {
			override := json.RawMessage(fmt.Sprintf(`{"limit":%d}`, i))
			if err := s.SetLimit(t.Context(), operator, tenant.ID, fmt.Sprint("bucket_", i), override); err != nil {
				t.Error(err)
			}
		})
	}
	writers.Wait()
	all, err := s.Get(t.Context(), tenant.ID)
	var got map[string]struct{ Limit int }
	if err := errors.Join(err, json.Unmarshal(all.Limits, &got)); err != nil {
		t.Fatal(err)
	}
	for i := range buckets {
		if o, ok := got[fmt.Sprint("bucket_", i)]; !ok || o.Limit != i {
			t.Errorf("bucket_%d: %v, %v", i, o, ok)
		}
	}
}

// TestForeignIDs: every method with an id of nothing, or of another tenant's key, says ErrNotFound and changes nothing.
func TestForeignIDs(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	a, b := newTenant(t, s, "A"), newTenant(t, s, "B")
	keyOfA, _ := newKey(t, s, a.ID)
	before, nobody := version(t, pool), uuid.Must(uuid.NewV7())
	wantErr(t, "Get", second(s.Get(t.Context(), nobody)), ErrNotFound)
	wantErr(t, "SetStatus", second(s.SetStatus(t.Context(), operator, nobody, StatusSuspended)), ErrNotFound)
	wantErr(t, "SetLimit", s.SetLimit(t.Context(), operator, nobody, "upload", json.RawMessage(`{}`)), ErrNotFound)
	wantErr(t, "DeleteLimit", s.DeleteLimit(t.Context(), operator, nobody, "upload"), ErrNotFound)
	wantErr(t, "CreateKey", third(s.CreateKey(t.Context(), operator, nobody, NewKey{Name: "k"})), ErrNotFound)
	wantErr(t, "RevokeKey of B", second(s.RevokeKey(t.Context(), operator, b.ID, keyOfA.ID, time.Now())), ErrNotFound)
	wantErr(t, "RevokeKey of nobody", second(s.RevokeKey(t.Context(), operator, nobody, keyOfA.ID, time.Now())), ErrNotFound)
	if keys, err := s.ListKeys(t.Context(), b.ID); err != nil || len(keys) != 0 {
		t.Errorf("B lists %v, %v", keys, err)
	}
	keys, err := s.ListKeys(t.Context(), a.ID)
	if diff := cmp.Diff([]APIKey{keyOfA}, keys); diff != "" || err != nil || version(t, pool) != before {
		t.Errorf("something changed: version %d after %d, %v, %s", version(t, pool), before, err, diff)
	}
}

func TestTouchUsed(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	tenant := newTenant(t, s, "Acme")
	used, _ := newKey(t, s, tenant.ID)
	unused, _ := newKey(t, s, tenant.ID)
	token, _, err := s.CreateOperatorToken(t.Context(), operator, NewOperatorToken{Name: "deploy"})
	if err != nil {
		t.Fatal(err)
	}
	before := version(t, pool)
	start := time.Now().UTC().Truncate(time.Microsecond)
	for _, step := range []struct{ at, want time.Duration }{
		{0, 0},
		{59 * time.Second, 0}, // within the minute: not written
		{60 * time.Second, 60 * time.Second},
		{30 * time.Second, 60 * time.Second}, // a late batch of another node does not go back
	} {
		at := start.Add(step.at)
		err := s.TouchUsed(t.Context(), map[uuid.UUID]time.Time{used.ID: at, uuid.New(): at}, map[uuid.UUID]time.Time{token.ID: at})
		if err != nil {
			t.Fatal(err)
		}
		keys, err := s.ListKeys(t.Context(), tenant.ID)
		if err != nil || len(keys) != 2 || keys[0].LastUsedAt == nil || !keys[0].LastUsedAt.Equal(start.Add(step.want)) {
			t.Errorf("used at +%v: %+v, %v", step.at, keys, err)
		} else if keys[1].ID != unused.ID || keys[1].LastUsedAt != nil {
			t.Errorf("unused key: %+v", keys[1])
		}
		tokens, err := s.ListOperatorTokens(t.Context())
		if err != nil || tokens[0].LastUsedAt == nil || !tokens[0].LastUsedAt.Equal(start.Add(step.want)) {
			t.Errorf("token used at +%v: %+v, %v", step.at, tokens, err)
		}
	}
	if version(t, pool) != before {
		t.Error("the configuration version was raised")
	}
	if err := s.TouchUsed(t.Context(), nil, nil); err != nil {
		t.Error(err)
	}
}

func TestAuditIsRedacted(t *testing.T) {
	t.Parallel()
	_, pool := newStore(t)
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		return AuditTx(t.Context(), tx, Actor{Type: ActorSystem, ID: "test"}, Entry{
			Action: "update", ResourceType: "channel", ResourceID: "c",
			Before: map[string]any{"config": map[string]any{"Access_Token": "planted-1", "verify_token": nil, "url": "https://x"}},
			After:  struct{ Secret secrets.Text }{"planted-2"},
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	audit, _ := lastAudit(t, pool)
	sameJSON(t, "audit", audit.Changes, `{
		"before": {"config": {"Access_Token": "[REDACTED]", "verify_token": null, "url": "https://x"}},
		"after": {"Secret": "[REDACTED]"}}`)
	if audit.Req != "(null)" {
		t.Errorf("request id %q, want NULL", audit.Req)
	}
}

func third[A, B any](_ A, _ B, err error) error { return err }
