package tenants

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/secrets"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// operator is the actor of changes whose actor does not matter.
var operator = Actor{Type: ActorOperator, ID: "op-1", RequestID: "req-1"}

func newTenant(t testing.TB, s *Store, name string) Tenant {
	t.Helper()
	tenant, err := s.Create(t.Context(), operator, NewTenant{Name: name})
	if err != nil {
		t.Fatalf("Create: %v", err)
	}
	return tenant
}

func newKey(t testing.TB, s *Store, tenant ID) (APIKey, secrets.Text) {
	t.Helper()
	k, text, err := s.CreateKey(t.Context(), operator, tenant, NewKey{Name: "backend"})
	if err != nil {
		t.Fatalf("CreateKey: %v", err)
	}
	return k, text
}

// newChannel writes a channel as package channel would, in one configuration change.
func newChannel(t testing.TB, pool *pgxpool.Pool, tenant ID, name, secret string) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	hash := secrets.Hash(secret)
	change(t, pool, `
INSERT INTO channels (tenant_id, id, name, type, mode, config, secret, secret_hash, version)
SELECT $1, $2, $3, 'webhook', 'duplex', '', '', $4, version FROM configuration`, tenant, id, name, hash[:])
	return id
}

// change runs one statement as a change of configuration; it may read the new version from the configuration row.
func change(t testing.TB, pool *pgxpool.Pool, sql string, args ...any) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		if _, err := BumpTx(t.Context(), tx); err != nil {
			return err
		}
		_, err := tx.Exec(t.Context(), sql, args...)
		return err
	})
	if err != nil {
		t.Fatalf("change: %v", err)
	}
}

func hashOf(t testing.TB, key secrets.Text) [32]byte {
	t.Helper()
	hash, err := ParseKey(key.Reveal())
	if err != nil {
		t.Fatalf("ParseKey: %v", err)
	}
	return hash
}

// eventually waits for ok. The limit is only for a test that fails: it is generous, for machines that are busy.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("in vain: %s", what)
		}
	}
}

func wantErr(t testing.TB, what string, got, want error) {
	t.Helper()
	if !errors.Is(got, want) {
		t.Errorf("%s: error %v, want %v", what, got, want)
	}
}
