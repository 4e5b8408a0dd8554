package tenants

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/secrets"
)

// notifyChannel carries the new configuration version as a decimal number, a hint for directories.
const notifyChannel = "converger_config"

const (
	bumpQuery = `
WITH bumped AS (UPDATE configuration SET version = version + 1 RETURNING version)
SELECT bumped.version FROM bumped, pg_notify('` + notifyChannel + `', bumped.version::text)`

	tenantColumns = `id, name, status, limits, max_in_flight, allowed_upload_types, version, inserted_at, updated_at`

	insertTenantQuery = `INSERT INTO tenants (id, name, version) VALUES ($1, $2, $3) RETURNING ` + tenantColumns
	getTenantQuery    = `SELECT ` + tenantColumns + ` FROM tenants WHERE id = $1`
	tenantByNameQuery = `SELECT ` + tenantColumns + ` FROM tenants WHERE lower(name) = lower($1)`
	listTenantsQuery  = `SELECT ` + tenantColumns + ` FROM tenants WHERE id > $1 ORDER BY id LIMIT $2`
	setStatusQuery    = `
UPDATE tenants SET status = $2, version = $3, updated_at = now() WHERE id = $1 RETURNING ` + tenantColumns

	updateTenantQuery = `
UPDATE tenants SET name = $2, max_in_flight = $3, version = $4, updated_at = now() WHERE id = $1 RETURNING ` + tenantColumns

	setUploadTypesQuery = `
UPDATE tenants SET allowed_upload_types = NULLIF($2::text[], '{}'), version = $3, updated_at = now() WHERE id = $1 RETURNING ` + tenantColumns

	getLimitQuery = `SELECT limits -> $2::text, version FROM tenants WHERE id = $1`
	setLimitQuery = `
UPDATE tenants SET limits = limits || jsonb_build_object($2::text, $3::jsonb), version = $4, updated_at = now() WHERE id = $1`
	deleteLimitQuery = `
UPDATE tenants SET limits = limits - $2::text, version = $3, updated_at = now() WHERE id = $1`

	keyColumns = `tenant_id, id, name, prefix, scopes, expires_at, revoked_at, last_used_at, version, inserted_at`

	insertKeyQuery = `
INSERT INTO api_keys (tenant_id, id, name, prefix, hash, scopes, expires_at, version)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8) RETURNING ` + keyColumns
	getKeyQuery    = `SELECT ` + keyColumns + ` FROM api_keys WHERE tenant_id = $1 AND id = $2`
	listKeysQuery  = `SELECT ` + keyColumns + ` FROM api_keys WHERE tenant_id = $1 ORDER BY id`
	revokeKeyQuery = `
UPDATE api_keys SET revoked_at = LEAST($3, now()), version = $4 WHERE tenant_id = $1 AND id = $2 RETURNING ` + keyColumns
	scheduleKeyQuery = `
UPDATE api_keys SET revoked_at = $3, version = $4 WHERE tenant_id = $1 AND id = $2 RETURNING ` + keyColumns

	tokenColumns = `id, name, prefix, scopes, expires_at, revoked_at, last_used_at, version, inserted_at`

	insertTokenQuery = `
INSERT INTO operator_tokens (id, name, prefix, hash, scopes, expires_at, version)
VALUES ($1, $2, $3, $4, $5, $6, $7) RETURNING ` + tokenColumns
	getTokenQuery    = `SELECT ` + tokenColumns + ` FROM operator_tokens WHERE id = $1`
	listTokensQuery  = `SELECT ` + tokenColumns + ` FROM operator_tokens ORDER BY id`
	revokeTokenQuery = `
UPDATE operator_tokens SET revoked_at = LEAST($2, now()), version = $3 WHERE id = $1 RETURNING ` + tokenColumns
	scheduleTokenQuery = `
UPDATE operator_tokens SET revoked_at = $2, version = $3 WHERE id = $1 RETURNING ` + tokenColumns

	// Others that may write and outlive the instant $2.
	otherWritersQuery = `
SELECT EXISTS (SELECT FROM operator_tokens WHERE id <> $1 AND 'write' = ANY (scopes)
    AND (expires_at IS NULL OR expires_at > $2) AND (revoked_at IS NULL OR revoked_at > $2))`

	// Rows that another node is touching at this moment are left to it, so that two nodes never wait for each other.
	touchKeysAllTenantsQuery = `
UPDATE api_keys SET last_used_at = due.at
FROM (
    SELECT k.tenant_id, k.id, used.at
    FROM unnest($1::uuid[], $2::timestamptz[]) AS used (id, at) JOIN api_keys k ON k.id = used.id
    WHERE k.last_used_at IS NULL OR k.last_used_at <= used.at - interval '1 minute'
    FOR NO KEY UPDATE OF k SKIP LOCKED
) AS due
WHERE api_keys.tenant_id = due.tenant_id AND api_keys.id = due.id`
	touchTokensQuery = `
UPDATE operator_tokens SET last_used_at = due.at
FROM (
    SELECT t.id, used.at
    FROM unnest($1::uuid[], $2::timestamptz[]) AS used (id, at) JOIN operator_tokens t ON t.id = used.id
    WHERE t.last_used_at IS NULL OR t.last_used_at <= used.at - interval '1 minute'
    FOR NO KEY UPDATE OF t SKIP LOCKED
) AS due
WHERE operator_tokens.id = due.id`
)

// Names that the migration gave to constraints.
const (
	constraintTenantName = "tenants_name_key"
	constraintKeyTenant  = "api_keys_tenant_id_fkey"
)

// Store reads and changes tenants, keys and operator tokens. It is safe for concurrent use. Each change is one
// transaction with its audit record, and reaches the directories of all nodes within a second.
//
// Changes that take expected versions are made only to a row that has one of them, else they return [ErrChanged]; with
// none given they are made to whatever the row is.
//
// Besides the errors named at each method, every method returns the database's own, wrapped.
type Store struct{ pool *pgxpool.Pool }

// NewStore makes a Store on a pool from [postgres.Open].
func NewStore(pool *pgxpool.Pool) *Store { return &Store{pool: pool} }

// BumpTx raises the configuration version and returns the new one, with which the caller marks every row it changes. It
// must come first in the transaction: the lock it takes is held to the commit, so changes of configuration run one
// after another and their versions become visible in order. Directories are notified at the commit.
func BumpTx(ctx context.Context, tx pgx.Tx) (version int64, err error) {
	if err := tx.QueryRow(ctx, bumpQuery).Scan(&version); err != nil {
		return 0, fmt.Errorf("bump configuration version: %w", err)
	}
	return version, nil
}

// CheckVersion returns [ErrChanged] if versions are expected and have is none of them. It is to be asked in the transaction
// that makes the change, after [BumpTx].
func CheckVersion(have int64, expected []int64) error {
	if len(expected) > 0 && !slices.Contains(expected, have) {
		return ErrChanged
	}
	return nil
}

// errUnchanged ends a change that finds everything as wanted: nothing is written, and no node reloads.
var errUnchanged = errors.New("unchanged")

// change runs fn in a transaction that has taken the next configuration version.
func (s *Store) change(ctx context.Context, what string, fn func(tx pgx.Tx, version int64) error) error {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		version, err := BumpTx(ctx, tx)
		if err != nil {
			return err
		}
		return fn(tx, version)
	})
	if err != nil && !errors.Is(err, errUnchanged) {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// Create makes an active tenant without keys. A tenant that has the id and the name already is returned as it is; under
// the id of another name a tenant with an id of its own is made. It returns a [*fault.Invalid] for a bad name, or
// [ErrNameTaken].
func (s *Store) Create(ctx context.Context, by Actor, n NewTenant) (Tenant, error) {
	var bad fault.Invalid
	checkName(&bad, n.Name)
	if err := bad.Err(); err != nil {
		return Tenant{}, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return Tenant{}, fmt.Errorf("create tenant: %w", err)
	}
	var t Tenant
	err = s.change(ctx, "create tenant", func(tx pgx.Tx, version int64) error {
		if n.ID != uuid.Nil {
			switch t, err = postgres.One(ctx, tx, ErrNotFound, scanTenant, getTenantQuery, n.ID); {
			case errors.Is(err, ErrNotFound):
				id = n.ID
			case err != nil:
				return err
			case t.Name == n.Name:
				return errUnchanged
			}
		}
		t, err = postgres.One(ctx, tx, ErrNotFound, scanTenant, insertTenantQuery, id, n.Name, version)
		if postgres.Constraint(err) == constraintTenantName {
			return ErrNameTaken
		}
		if err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{TenantID: &id, Action: "create", ResourceType: "tenant",
			ResourceID: id.String(), After: map[string]any{"name": t.Name, "status": t.Status}})
	})
	if err != nil {
		return Tenant{}, err
	}
	return t, nil
}

// Get returns one tenant, or [ErrNotFound].
func (s *Store) Get(ctx context.Context, id ID) (Tenant, error) {
	t, err := postgres.One(ctx, s.pool, ErrNotFound, scanTenant, getTenantQuery, id)
	if err != nil {
		return Tenant{}, fmt.Errorf("get tenant: %w", err)
	}
	return t, nil
}

// ByName returns the tenant of this name, in whatever case, or [ErrNotFound].
func (s *Store) ByName(ctx context.Context, name string) (Tenant, error) {
	t, err := postgres.One(ctx, s.pool, ErrNotFound, scanTenant, tenantByNameQuery, name)
	if err != nil {
		return Tenant{}, fmt.Errorf("find tenant by name: %w", err)
	}
	return t, nil
}

// ListAllTenants returns up to limit tenants by ascending id, those after the given id ([uuid.Nil]: from the start).
func (s *Store) ListAllTenants(ctx context.Context, after uuid.UUID, limit int) ([]Tenant, error) {
	list, err := postgres.Many(ctx, s.pool, scanTenant, listTenantsQuery, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list tenants: %w", err)
	}
	return list, nil
}

// SetStatus suspends or reactivates a tenant; one that has the status already is returned as it is. It returns
// [ErrNotFound], or a [*fault.Invalid] for an unknown status.
func (s *Store) SetStatus(ctx context.Context, by Actor, id ID, status Status, expected ...int64) (Tenant, error) {
	if status != StatusActive && status != StatusSuspended {
		return Tenant{}, fault.Invalidf("/status", fault.UnknownValue, "must be %q or %q", StatusActive, StatusSuspended)
	}
	var t Tenant
	err := s.change(ctx, "set tenant status", func(tx pgx.Tx, version int64) (err error) {
		if t, err = getTenantTx(ctx, tx, id, expected); err != nil {
			return err
		}
		if t.Status == status {
			return errUnchanged
		}
		before := t.Status
		if t, err = postgres.One(ctx, tx, ErrNotFound, scanTenant, setStatusQuery, id, status, version); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{TenantID: &id, Action: "toggle_status", ResourceType: "tenant",
			ResourceID: id.String(), Before: map[string]any{"status": before}, After: map[string]any{"status": status}})
	})
	if err != nil {
		return Tenant{}, err
	}
	return t, nil
}

// Update changes a tenant. It returns a [*fault.Invalid], [ErrNotFound] or [ErrNameTaken].
func (s *Store) Update(ctx context.Context, by Actor, id ID, patch TenantPatch, expected ...int64) (Tenant, error) {
	var bad fault.Invalid
	if patch.Name != nil {
		checkName(&bad, *patch.Name)
	}
	if n := patch.MaxInFlight; n != nil && (*n < 1 || *n > maxInFlight) {
		bad.Addf("/max_in_flight", fault.OutOfRange, "must be from 1 to %d", maxInFlight)
	}
	if err := bad.Err(); err != nil {
		return Tenant{}, err
	}
	var t Tenant
	err := s.change(ctx, "update tenant", func(tx pgx.Tx, version int64) (err error) {
		before, err := getTenantTx(ctx, tx, id, expected)
		if err != nil {
			return err
		}
		t = before
		if patch.Name != nil {
			t.Name = *patch.Name
		}
		if patch.MaxInFlight != nil {
			t.MaxInFlight = *patch.MaxInFlight
		}
		if t.Name == before.Name && t.MaxInFlight == before.MaxInFlight {
			return errUnchanged
		}
		t, err = postgres.One(ctx, tx, ErrNotFound, scanTenant, updateTenantQuery, id, t.Name, t.MaxInFlight, version)
		if postgres.Constraint(err) == constraintTenantName {
			return ErrNameTaken
		}
		if err != nil {
			return err
		}
		shown := func(t Tenant) any { return map[string]any{"name": t.Name, "max_in_flight": t.MaxInFlight} }
		return AuditTx(ctx, tx, by, Entry{TenantID: &id, Action: "update", ResourceType: "tenant", ResourceID: id.String(),
			Before: shown(before), After: shown(t)})
	})
	if err != nil {
		return Tenant{}, err
	}
	return t, nil
}

// getTenantTx reads the tenant that a change is about to replace: the lock of [BumpTx] keeps others away.
func getTenantTx(ctx context.Context, tx pgx.Tx, id ID, expected []int64) (Tenant, error) {
	t, err := postgres.One(ctx, tx, ErrNotFound, scanTenant, getTenantQuery, id)
	if err != nil {
		return Tenant{}, err
	}
	return t, CheckVersion(t.Version, expected)
}

// SetUploadTypes says which types of files the tenant's uploads may have, in place of the installation's; none: those
// again. The caller has checked that they are types that uploads can have. It returns [ErrNotFound].
func (s *Store) SetUploadTypes(ctx context.Context, by Actor, id ID, types []string, expected ...int64) (Tenant, error) {
	types = slices.Compact(slices.Sorted(slices.Values(types)))
	var t Tenant
	err := s.change(ctx, "set upload types", func(tx pgx.Tx, version int64) (err error) {
		if t, err = getTenantTx(ctx, tx, id, expected); err != nil {
			return err
		}
		if slices.Equal(t.UploadTypes, types) {
			return errUnchanged
		}
		before := t.UploadTypes
		if t, err = postgres.One(ctx, tx, ErrNotFound, scanTenant, setUploadTypesQuery, id, types, version); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{TenantID: &id, Action: "update", ResourceType: "tenant", ResourceID: id.String(),
			Before: map[string]any{"allowed_upload_types": before}, After: map[string]any{"allowed_upload_types": types}})
	})
	if err != nil {
		return Tenant{}, err
	}
	return t, nil
}

// SetLimit sets one bucket's override and leaves the others. The caller has validated both (package ratelimit knows how);
// here override need only be JSON, else a [*fault.Invalid]. It returns [ErrNotFound].
func (s *Store) SetLimit(ctx context.Context, by Actor, id ID, bucket string, override json.RawMessage, expected ...int64) error {
	if !json.Valid(override) {
		return fault.Invalidf("", fault.Malformed, "must be JSON")
	}
	return s.changeLimit(ctx, by, id, bucket, override, expected)
}

// DeleteLimit removes one bucket's override, if there is one. It returns [ErrNotFound] for an unknown tenant.
func (s *Store) DeleteLimit(ctx context.Context, by Actor, id ID, bucket string, expected ...int64) error {
	return s.changeLimit(ctx, by, id, bucket, nil, expected)
}

// changeLimit removes the override when it is nil.
func (s *Store) changeLimit(ctx context.Context, by Actor, id ID, bucket string, override json.RawMessage, expected []int64) error {
	return s.change(ctx, "change limit", func(tx pgx.Tx, version int64) error {
		var have int64
		before, err := postgres.One(ctx, tx, ErrNotFound, func(row pgx.CollectableRow) (v *json.RawMessage, err error) {
			err = row.Scan(&v, &have)
			return v, err
		}, getLimitQuery, id, bucket)
		if err != nil {
			return err
		}
		if err := CheckVersion(have, expected); err != nil {
			return err
		}
		switch {
		case override != nil:
			_, err = tx.Exec(ctx, setLimitQuery, id, bucket, override, version)
		case before != nil:
			_, err = tx.Exec(ctx, deleteLimitQuery, id, bucket, version)
		default:
			return errUnchanged
		}
		if err != nil {
			return err
		}
		// Only this bucket's side of both snapshots: the others did not change.
		snapshot := func(v any) any { return map[string]any{"limits": map[string]any{bucket: v}} }
		return AuditTx(ctx, tx, by, Entry{TenantID: &id, Action: "update", ResourceType: "tenant",
			ResourceID: id.String(), Before: snapshot(before), After: snapshot(override)})
	})
}

// CreateKey makes an API key and returns it with its text, which is never to be had again. It returns [ErrNotFound], or
// a [*fault.Invalid] for a bad name, scope or expiry.
func (s *Store) CreateKey(ctx context.Context, by Actor, tenant ID, n NewKey) (APIKey, secrets.Text, error) {
	scopes, err := checkCredential(n.Name, n.Scopes, n.ExpiresAt)
	if err != nil {
		return APIKey{}, "", err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return APIKey{}, "", fmt.Errorf("create key: %w", err)
	}
	text := generateKey(apiKeyPrefix)
	hash := secrets.Hash(text.Reveal())
	var k APIKey
	err = s.change(ctx, "create key", func(tx pgx.Tx, version int64) error {
		k, err = postgres.One(ctx, tx, ErrNotFound, scanKey, insertKeyQuery,
			tenant, id, n.Name, text.Reveal()[:shownPrefixChars], hash[:], scopes, n.ExpiresAt, version)
		if postgres.Constraint(err) == constraintKeyTenant {
			return ErrNotFound
		}
		if err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{TenantID: &tenant, Action: "create", ResourceType: "api_key",
			ResourceID: id.String(), After: snapshot(k.Name, k.Prefix, k.Scopes, k.ExpiresAt, k.RevokedAt)})
	})
	if err != nil {
		return APIKey{}, "", err
	}
	return k, text, nil
}

// ListKeys returns all keys of a tenant, also revoked and expired ones, oldest first; none for an unknown tenant.
func (s *Store) ListKeys(ctx context.Context, tenant ID) ([]APIKey, error) {
	list, err := postgres.Many(ctx, s.pool, scanKey, listKeysQuery, tenant)
	if err != nil {
		return nil, fmt.Errorf("list keys: %w", err)
	}
	return list, nil
}

// RevokeKey makes a key useless from the instant at on: now for one that is zero or past, later for one that is to
// overlap its successor. A key that is revoked already keeps the earlier of both instants. It returns [ErrNotFound].
func (s *Store) RevokeKey(ctx context.Context, by Actor, tenant ID, keyID uuid.UUID, at time.Time) (APIKey, error) {
	query := revocation(&at, revokeKeyQuery, scheduleKeyQuery)
	var k APIKey
	err := s.change(ctx, "revoke key", func(tx pgx.Tx, version int64) (err error) {
		if k, err = postgres.One(ctx, tx, ErrNotFound, scanKey, getKeyQuery, tenant, keyID); err != nil {
			return err
		}
		if k.RevokedAt != nil && !k.RevokedAt.After(at) {
			return errUnchanged
		}
		before := snapshot(k.Name, k.Prefix, k.Scopes, k.ExpiresAt, k.RevokedAt)
		if k, err = postgres.One(ctx, tx, ErrNotFound, scanKey, query, tenant, keyID, at, version); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{TenantID: &tenant, Action: "revoke", ResourceType: "api_key",
			ResourceID: keyID.String(), Before: before, After: snapshot(k.Name, k.Prefix, k.Scopes, k.ExpiresAt, k.RevokedAt)})
	})
	if err != nil {
		return APIKey{}, err
	}
	return k, nil
}

// CreateOperatorToken is [Store.CreateKey] for the management API.
func (s *Store) CreateOperatorToken(ctx context.Context, by Actor, n NewOperatorToken) (OperatorToken, secrets.Text, error) {
	scopes, err := checkCredential(n.Name, n.Scopes, n.ExpiresAt)
	if err != nil {
		return OperatorToken{}, "", err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return OperatorToken{}, "", fmt.Errorf("create operator token: %w", err)
	}
	text := generateKey(operatorTokenPrefix)
	hash := secrets.Hash(text.Reveal())
	var t OperatorToken
	err = s.change(ctx, "create operator token", func(tx pgx.Tx, version int64) error {
		t, err = postgres.One(ctx, tx, ErrNotFound, scanToken, insertTokenQuery,
			id, n.Name, text.Reveal()[:shownPrefixChars], hash[:], scopes, n.ExpiresAt, version)
		if err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{Action: "create", ResourceType: "operator_token",
			ResourceID: id.String(), After: snapshot(t.Name, t.Prefix, t.Scopes, t.ExpiresAt, t.RevokedAt)})
	})
	if err != nil {
		return OperatorToken{}, "", err
	}
	return t, text, nil
}

// ListOperatorTokens returns all operator tokens, also revoked and expired ones, oldest first.
func (s *Store) ListOperatorTokens(ctx context.Context) ([]OperatorToken, error) {
	list, err := postgres.Many(ctx, s.pool, scanToken, listTokensQuery)
	if err != nil {
		return nil, fmt.Errorf("list operator tokens: %w", err)
	}
	return list, nil
}

// GetOperatorToken returns one token, or [ErrNotFound].
func (s *Store) GetOperatorToken(ctx context.Context, id uuid.UUID) (OperatorToken, error) {
	t, err := postgres.One(ctx, s.pool, ErrNotFound, scanToken, getTokenQuery, id)
	if err != nil {
		return OperatorToken{}, fmt.Errorf("get operator token: %w", err)
	}
	return t, nil
}

// RevokeOperatorToken is [Store.RevokeKey] for an operator token. With keepLast it returns [ErrLastToken], and has changed
// nothing, when from that instant on no token could write any more.
func (s *Store) RevokeOperatorToken(ctx context.Context, by Actor, id uuid.UUID, at time.Time, keepLast bool) (OperatorToken, error) {
	query := revocation(&at, revokeTokenQuery, scheduleTokenQuery)
	var t OperatorToken
	err := s.change(ctx, "revoke operator token", func(tx pgx.Tx, version int64) (err error) {
		if t, err = postgres.One(ctx, tx, ErrNotFound, scanToken, getTokenQuery, id); err != nil {
			return err
		}
		if t.RevokedAt != nil && !t.RevokedAt.After(at) {
			return errUnchanged
		}
		if keepLast && slices.Contains(t.Scopes, "write") {
			others, err := postgres.One(ctx, tx, ErrNotFound, pgx.RowTo[bool], otherWritersQuery, id, at)
			if err != nil {
				return err
			}
			if !others {
				return ErrLastToken
			}
		}
		before := snapshot(t.Name, t.Prefix, t.Scopes, t.ExpiresAt, t.RevokedAt)
		if t, err = postgres.One(ctx, tx, ErrNotFound, scanToken, query, id, at, version); err != nil {
			return err
		}
		return AuditTx(ctx, tx, by, Entry{Action: "revoke", ResourceType: "operator_token",
			ResourceID: id.String(), Before: before, After: snapshot(t.Name, t.Prefix, t.Scopes, t.ExpiresAt, t.RevokedAt)})
	})
	if err != nil {
		return OperatorToken{}, err
	}
	return t, nil
}

// revocation fills in a zero instant and picks the statement. What is revoked now is revoked by the database's clock
// (LEAST with its now()), which also decides that directories drop it: a node whose clock is ahead can't delay it.
func revocation(at *time.Time, revoke, schedule string) string {
	now := time.Now()
	if at.IsZero() {
		*at = now
	}
	if at.After(now) {
		return schedule
	}
	return revoke
}

// TouchUsed notes when keys and operator tokens, by their ids, were last used. A row is written at most once a minute,
// and no version is raised. It is meant to be called every few seconds with what was collected; unknown ids are ignored.
func (s *Store) TouchUsed(ctx context.Context, keys, tokens map[uuid.UUID]time.Time) error {
	touch := func(query string, used map[uuid.UUID]time.Time) error {
		if len(used) == 0 {
			return nil
		}
		ids := slices.Collect(maps.Keys(used))
		at := make([]time.Time, len(ids))
		for i, id := range ids {
			at[i] = used[id]
		}
		_, err := s.pool.Exec(ctx, query, ids, at)
		return err
	}
	if err := errors.Join(touch(touchKeysAllTenantsQuery, keys), touch(touchTokensQuery, tokens)); err != nil {
		return fmt.Errorf("note use of keys: %w", err)
	}
	return nil
}

// snapshot is what the audit log shows of a key or token.
func snapshot(name, prefix string, scopes []string, expires, revoked *time.Time) any {
	return map[string]any{"name": name, "prefix": prefix, "scopes": scopes, "expires_at": expires, "revoked_at": revoked}
}

func scanTenant(row pgx.CollectableRow) (Tenant, error) {
	var t Tenant
	err := row.Scan(&t.ID, &t.Name, &t.Status, &t.Limits, &t.MaxInFlight, &t.UploadTypes, &t.Version, &t.InsertedAt, &t.UpdatedAt)
	t.InsertedAt, t.UpdatedAt = t.InsertedAt.UTC(), t.UpdatedAt.UTC()
	return t, err
}

func scanKey(row pgx.CollectableRow) (APIKey, error) {
	var k APIKey
	err := row.Scan(&k.TenantID, &k.ID, &k.Name, &k.Prefix, &k.Scopes, &k.ExpiresAt, &k.RevokedAt, &k.LastUsedAt,
		&k.Version, &k.InsertedAt)
	k.ExpiresAt, k.RevokedAt, k.LastUsedAt = utc(k.ExpiresAt), utc(k.RevokedAt), utc(k.LastUsedAt)
	k.InsertedAt = k.InsertedAt.UTC()
	return k, err
}

func scanToken(row pgx.CollectableRow) (OperatorToken, error) {
	var t OperatorToken
	err := row.Scan(&t.ID, &t.Name, &t.Prefix, &t.Scopes, &t.ExpiresAt, &t.RevokedAt, &t.LastUsedAt,
		&t.Version, &t.InsertedAt)
	t.ExpiresAt, t.RevokedAt, t.LastUsedAt = utc(t.ExpiresAt), utc(t.RevokedAt), utc(t.LastUsedAt)
	t.InsertedAt = t.InsertedAt.UTC()
	return t, err
}

func utc(t *time.Time) *time.Time {
	if t != nil {
		*t = t.UTC()
	}
	return t
}
