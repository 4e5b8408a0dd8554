package tenants

import (
	"context"
	"time"
	"unique"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	versionQuery = `SELECT version FROM configuration`

	// Since version $1; with 0, everything that is in force: the rows marked as gone matter only to those who knew them.
	tenantsSinceAllTenantsQuery = `
SELECT id, name, status, limits, max_in_flight, allowed_upload_types, version FROM tenants WHERE version > $1`
	keysSinceAllTenantsQuery = `
SELECT tenant_id, id, name, hash, scopes, expires_at, revoked_at, version, (revoked_at <= now()) IS TRUE AS gone
FROM api_keys WHERE version > $1 AND ($1 > 0 OR revoked_at IS NULL OR revoked_at > now())`
	channelsSinceAllTenantsQuery = `
SELECT tenant_id, id, type, mode, status, require_signature, ordered, COALESCE(rate_limit, ''), secret_hash,
       previous_secret_hash, previous_secret_expires_at, version, deleted_at IS NOT NULL AS gone
FROM channels WHERE version > $1 AND ($1 > 0 OR deleted_at IS NULL)`
	operatorTokensSinceQuery = `
SELECT id, name, hash, scopes, expires_at, revoked_at, version, (revoked_at <= now()) IS TRUE AS gone
FROM operator_tokens WHERE version > $1 AND ($1 > 0 OR revoked_at IS NULL OR revoked_at > now())`
	rulesSinceAllTenantsQuery = `
SELECT id, source_channel_id, target_channel_ids, NOT enabled OR deleted_at IS NOT NULL AS gone
FROM routing_rules WHERE version > $1 AND ($1 > 0 OR enabled AND deleted_at IS NULL)`
	rangesSinceQuery = `
SELECT id, cidr, kind, expires_at, deleted_at IS NOT NULL AS gone
FROM address_ranges WHERE version > $1 AND ($1 > 0 OR deleted_at IS NULL)`
)

// changedRows is what changed after some version, as of version.
type changedRows struct {
	version   int64
	tenants   []*TenantEntry
	keys      []changedRow[KeyEntry]
	channels  []changedRow[ChannelEntry]
	operators []changedRow[OperatorEntry]
	rules     []changedRow[ruleEntry]
	ranges    []changedRow[rangeEntry]
}

type changedRow[E any] struct {
	entry *E
	gone  bool // revoked, disabled or deleted
}

// readChanges reads all tables in one snapshot and one round trip; since 0 means the whole set.
func readChanges(ctx context.Context, pool *pgxpool.Pool, since int64) (r changedRows, err error) {
	snapshot := pgx.TxOptions{IsoLevel: pgx.RepeatableRead, AccessMode: pgx.ReadOnly}
	err = pgx.BeginTxFunc(ctx, pool, snapshot, func(tx pgx.Tx) error {
		var batch pgx.Batch
		batch.Queue(versionQuery).QueryRow(func(row pgx.Row) error { return row.Scan(&r.version) })
		queueRows(&batch, &r.tenants, scanTenantEntry, tenantsSinceAllTenantsQuery, since)
		queueRows(&batch, &r.keys, scanKeyEntry, keysSinceAllTenantsQuery, since)
		queueRows(&batch, &r.channels, scanChannelEntry, channelsSinceAllTenantsQuery, since)
		queueRows(&batch, &r.operators, scanOperatorEntry, operatorTokensSinceQuery, since)
		queueRows(&batch, &r.rules, scanRuleEntry, rulesSinceAllTenantsQuery, since)
		queueRows(&batch, &r.ranges, scanRangeEntry, rangesSinceQuery, since)
		return tx.SendBatch(ctx, &batch).Close()
	})
	return r, err
}

func queueRows[T any](batch *pgx.Batch, into *[]T, scan pgx.RowToFunc[T], sql string, args ...any) {
	batch.Queue(sql, args...).Query(func(rows pgx.Rows) (err error) {
		*into, err = pgx.CollectRows(rows, scan)
		return err
	})
}

func scanTenantEntry(row pgx.CollectableRow) (*TenantEntry, error) {
	t := &TenantEntry{}
	return t, row.Scan(&t.ID, &t.Name, &t.Status, &t.Limits, &t.MaxInFlight, &t.UploadTypes, &t.Version)
}

func scanKeyEntry(row pgx.CollectableRow) (r changedRow[KeyEntry], err error) {
	k := &KeyEntry{}
	var hash []byte
	var scopes []string
	var expires, revoked *time.Time
	err = row.Scan(&k.TenantID, &k.ID, &k.Name, &hash, &scopes, &expires, &revoked, &k.Version, &r.gone)
	k.Scopes, _ = parseScopes(scopes)
	k.ExpiresAt, k.RevokedAt = orZero(expires), orZero(revoked)
	copy(k.hash[:], hash)
	r.entry = k
	return r, err
}

func scanChannelEntry(row pgx.CollectableRow) (r changedRow[ChannelEntry], err error) {
	c := &ChannelEntry{}
	var hash, previous []byte
	var until *time.Time
	err = row.Scan(&c.TenantID, &c.ID, &c.Type, &c.Mode, &c.Status, &c.RequireSignature, &c.Ordered, &c.RateLimit, &hash,
		&previous, &until, &c.Version, &r.gone)
	// A handful of different words in all rows: one copy of each.
	for _, s := range []*string{&c.Type, &c.Mode, &c.Status, &c.RateLimit} {
		*s = unique.Make(*s).Value()
	}
	copy(c.SecretHash[:], hash)
	copy(c.PreviousSecretHash[:], previous)
	c.PreviousUntil = orZero(until)
	r.entry = c
	return r, err
}

func scanOperatorEntry(row pgx.CollectableRow) (r changedRow[OperatorEntry], err error) {
	t := &OperatorEntry{}
	var hash []byte
	var scopes []string
	var expires, revoked *time.Time
	err = row.Scan(&t.ID, &t.Name, &hash, &scopes, &expires, &revoked, &t.Version, &r.gone)
	t.Scopes, _ = parseScopes(scopes)
	t.ExpiresAt, t.RevokedAt = orZero(expires), orZero(revoked)
	copy(t.hash[:], hash)
	r.entry = t
	return r, err
}

func scanRuleEntry(row pgx.CollectableRow) (r changedRow[ruleEntry], err error) {
	r.entry = &ruleEntry{}
	return r, row.Scan(&r.entry.id, &r.entry.source, &r.entry.targets, &r.gone)
}

func scanRangeEntry(row pgx.CollectableRow) (r changedRow[rangeEntry], err error) {
	r.entry = &rangeEntry{}
	var expires *time.Time
	err = row.Scan(&r.entry.id, &r.entry.prefix, &r.entry.kind, &expires, &r.gone)
	r.entry.expires = orZero(expires)
	return r, err
}

func orZero(t *time.Time) time.Time {
	if t == nil {
		return time.Time{}
	}
	return t.UTC()
}
