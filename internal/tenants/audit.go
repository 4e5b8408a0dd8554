package tenants

import (
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/postgres"
	"converger/internal/secrets"
)

// Entry is one line of the audit log; see [AuditTx].
type Entry struct {
	TenantID     *ID    // nil: concerns no single tenant
	Action       string // "create", "update", "delete", "toggle_status", "revoke", ...
	ResourceType string // "tenant", "api_key", "operator_token", "channel", ...
	ResourceID   string
	// Before and After are snapshots that marshal to JSON, nil for what did not or does not exist. They are redacted.
	Before, After any
}

// Record is a line of the audit log as it is read.
type Record struct {
	ID           uuid.UUID
	TenantID     *ID
	ActorType    string
	ActorID      string
	Action       string
	ResourceType string
	ResourceID   string
	Changes      json.RawMessage // {"before": …, "after": …}, without secrets
	RequestID    string          // "" when no request caused it
	InsertedAt   time.Time
}

// AuditFilter narrows a list of audit records; zero members take everything. Texts are matched exactly.
type AuditFilter struct {
	ActorType, ActorID       string
	Action                   string
	ResourceType, ResourceID string
	From, To                 time.Time // both inclusive
}

const (
	insertAuditQuery = `
INSERT INTO audit_log (id, tenant_id, actor_type, actor_id, action, resource_type, resource_id, changes, request_id)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, NULLIF($9, ''))`

	listAuditQuery = `
SELECT id, tenant_id, actor_type, actor_id, action, resource_type, resource_id, changes, COALESCE(request_id, ''), inserted_at
FROM audit_log`
)

// auditSlack is how far apart a record's id, made by a node's clock, and its time, the database's, are expected to be at
// most: by so much the ids that are searched reach beyond the times that are asked for.
const auditSlack = 24 * time.Hour

// AuditTx records a change in the transaction that makes it. The snapshots are redacted ([secrets.Redact]).
func AuditTx(ctx context.Context, tx pgx.Tx, by Actor, e Entry) error {
	id, err := uuid.NewV7()
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	changes := map[string]any{"before": secrets.Redact(e.Before), "after": secrets.Redact(e.After)}
	_, err = tx.Exec(ctx, insertAuditQuery,
		id, e.TenantID, by.Type, by.ID, e.Action, e.ResourceType, e.ResourceID, changes, by.RequestID)
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	return nil
}

// Audit records what changes nothing in the database, such as a counter that was reset.
func (s *Store) Audit(ctx context.Context, by Actor, e Entry) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error { return AuditTx(ctx, tx, by, e) })
}

// ListAudit returns what was changed of a tenant, newest first: the records older than before ([uuid.Nil]: from the
// newest on), at most limit, and whether there are more.
func (s *Store) ListAudit(ctx context.Context, tenant ID, f AuditFilter, before uuid.UUID, limit int) ([]Record, bool, error) {
	return s.listAudit(ctx, &tenant, f, before, limit)
}

// ListAuditAllTenants is ListAudit of everything, also of what belongs to no tenant.
func (s *Store) ListAuditAllTenants(ctx context.Context, f AuditFilter, before uuid.UUID, limit int) ([]Record, bool, error) {
	return s.listAudit(ctx, nil, f, before, limit)
}

func (s *Store) listAudit(ctx context.Context, tenant *ID, f AuditFilter, before uuid.UUID, limit int) ([]Record, bool, error) {
	sql, args := auditSQL(tenant, f, before, limit+1)
	list, err := postgres.Many(ctx, s.pool, scanRecord, sql, args...)
	if err != nil {
		return nil, false, fmt.Errorf("list audit log: %w", err)
	}
	if len(list) > limit {
		return list[:limit], true, nil
	}
	return list, false, nil
}

// auditSQL has a text for each set of filters, so that each is planned with the index that it needs.
func auditSQL(tenant *ID, f AuditFilter, before uuid.UUID, limit int) (string, []any) {
	var where []string
	var args []any
	and := func(condition string, v any) {
		args = append(args, v)
		where = append(where, strings.ReplaceAll(condition, "?", "$"+strconv.Itoa(len(args))))
	}
	if tenant != nil {
		and("tenant_id = ?", *tenant)
	}
	for _, text := range []struct{ column, value string }{
		{"actor_type", f.ActorType}, {"actor_id", f.ActorID}, {"action", f.Action}, {"resource_type", f.ResourceType}, {"resource_id", f.ResourceID},
	} {
		if text.value != "" {
			and(text.column+" = ?", text.value)
		}
	}
	if !f.From.IsZero() {
		and("inserted_at >= ?", f.From)
		if floor := f.From.Add(-auditSlack); floor.Unix() > 0 { // the floor of what lies before 1970 is not below anything
			and("id >= uuid_v7_floor(?)", floor)
		}
	}
	if !f.To.IsZero() {
		and("inserted_at <= ?", f.To)
		and("id < uuid_v7_floor(?)", f.To.Add(auditSlack))
	}
	if before != uuid.Nil {
		and("id < ?", before)
	}
	sql := listAuditQuery
	if len(where) > 0 {
		sql += "\nWHERE " + strings.Join(where, " AND ")
	}
	args = append(args, limit)
	return sql + "\nORDER BY id DESC LIMIT $" + strconv.Itoa(len(args)), args
}

// scanRecord redacts once more: names of secrets that are known today were perhaps not known when the line was written.
func scanRecord(row pgx.CollectableRow) (Record, error) {
	var r Record
	var changes json.RawMessage
	err := row.Scan(&r.ID, &r.TenantID, &r.ActorType, &r.ActorID, &r.Action, &r.ResourceType, &r.ResourceID, &changes,
		&r.RequestID, &r.InsertedAt)
	if err != nil {
		return r, err
	}
	r.InsertedAt = r.InsertedAt.UTC()
	r.Changes, err = json.Marshal(secrets.Redact(changes))
	return r, err
}
