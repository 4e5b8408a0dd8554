package tenants

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/secrets"
)

var errDraft = errors.New("not written yet")

type Store struct{ pool *pgxpool.Pool }

func NewStore(pool *pgxpool.Pool) *Store { return &Store{pool: pool} }

func (s *Store) Create(ctx context.Context, by Actor, t NewTenant) (Tenant, error) {
	return Tenant{}, errDraft
}
func (s *Store) Get(ctx context.Context, id ID) (Tenant, error) { return Tenant{}, errDraft }
func (s *Store) ListAllTenants(ctx context.Context, after uuid.UUID, limit int) ([]Tenant, error) {
	return nil, errDraft
}
func (s *Store) SetStatus(ctx context.Context, by Actor, id ID, status Status) (Tenant, error) {
	return Tenant{}, errDraft
}
func (s *Store) CreateKey(ctx context.Context, by Actor, id ID, k NewKey) (APIKey, secrets.Text, error) {
	return APIKey{}, "", errDraft
}
func (s *Store) ListKeys(ctx context.Context, id ID) ([]APIKey, error) { return nil, errDraft }
func (s *Store) RevokeKey(ctx context.Context, by Actor, id ID, keyID uuid.UUID, at time.Time) (APIKey, error) {
	return APIKey{}, errDraft
}
func (s *Store) Limits(ctx context.Context, id ID) (json.RawMessage, error) { return nil, errDraft }
func (s *Store) SetLimit(ctx context.Context, by Actor, id ID, bucket string, override json.RawMessage) error {
	return errDraft
}
func (s *Store) DeleteLimit(ctx context.Context, by Actor, id ID, bucket string) error {
	return errDraft
}
func (s *Store) CreateOperatorToken(ctx context.Context, by Actor, t NewOperatorToken) (OperatorToken, secrets.Text, error) {
	return OperatorToken{}, "", errDraft
}
func (s *Store) ListOperatorTokens(ctx context.Context) ([]OperatorToken, error) {
	return nil, errDraft
}
func (s *Store) RevokeOperatorToken(ctx context.Context, by Actor, id uuid.UUID, at time.Time) (OperatorToken, error) {
	return OperatorToken{}, errDraft
}
func (s *Store) TouchUsed(ctx context.Context, keys, tokens map[uuid.UUID]time.Time) error {
	return errDraft
}

func BumpTx(ctx context.Context, tx pgx.Tx) (version int64, err error) { return 0, errDraft }
func AuditTx(ctx context.Context, tx pgx.Tx, by Actor, e Entry) error  { return errDraft }
