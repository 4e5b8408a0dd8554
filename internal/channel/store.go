package channel

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// Failures of the store, beside *fault.Invalid.
var (
	ErrNotFound  = errors.New("channel: no such channel")
	ErrNameTaken = errors.New("channel: the tenant has a channel of this name")
)

// Overlap during which a rotated secret stays valid.
const (
	DefaultOverlap = 24 * time.Hour
	MaxOverlap     = 7 * 24 * time.Hour
)

// MinSecret is the shortest secret, in bytes, that a user may choose.
const MinSecret = 16

// DefaultMaxInFlight is how many attempts a channel makes at one time unless it says otherwise.
const DefaultMaxInFlight = 100

const (
	table                = "channels" // with the column, what a sealed value is bound to
	columnConfig         = "config"
	columnSecret         = "secret"
	columnPreviousSecret = "previous_secret"
)

// SealedColumns are the columns of this package's tables that hold sealed values.
func SealedColumns() []secrets.Column {
	return []secrets.Column{
		{Table: table, Name: columnConfig, Row: "id"},
		{Table: table, Name: columnSecret, Row: "id"},
		{Table: table, Name: columnPreviousSecret, Row: "id"},
	}
}

// Store keeps channels in Postgres, their config and secrets sealed. It is safe for concurrent use. Changes that take
// expected versions are made only to a channel that has one of them, else they return [tenants.ErrChanged].
type Store struct {
	pool *pgxpool.Pool
	box  *secrets.Box
	reg  *Registry
	now  func() time.Time

	current currentCache
}

// NewStore makes a store. reg knows the types that channels may have.
func NewStore(pool *pgxpool.Pool, box *secrets.Box, reg *Registry) *Store {
	return &Store{pool: pool, box: box, reg: reg, now: time.Now}
}

// NewChannel is what a channel is made from.
type NewChannel struct {
	Name             string
	Type             Type
	Mode             Mode            // "": the type's first
	Status           Status          // "": active
	Config           json.RawMessage // nil: {}
	Secret           string          // "": generated; else at least MinSecret bytes
	RequireSignature *bool           // nil: true
	Ordered          *bool           // nil: true
	RateLimit        string          // see ParseRateLimit
	RetryPolicy      json.RawMessage // an object with the members of RetryPolicy; nil: {}
	MaxInFlight      int             // 0: DefaultMaxInFlight
}

// Patch is a change; nil members stay as they are.
type Patch struct {
	Name   *string
	Mode   *Mode
	Status *Status
	// Config replaces the whole object. A secret member (or a secret map's value) given as [Redacted] keeps its stored
	// value, so that what [RedactedConfig] shows can be edited and sent back.
	Config           json.RawMessage
	RequireSignature *bool
	Ordered          *bool
	RateLimit        *string         // "": none
	RetryPolicy      json.RawMessage // replaces the whole object
	MaxInFlight      *int
}

// Create makes a channel. Errors: *fault.Invalid with every fault, ErrNameTaken, tenants.ErrNotFound.
func (s *Store) Create(ctx context.Context, actor tenants.Actor, tenant tenants.ID, in NewChannel) (Channel, error) {
	ch, err := s.newChannel(tenant, in)
	if err != nil {
		return Channel{}, err
	}
	err = s.change(ctx, func(tx pgx.Tx, version int64) error {
		ch.Version = version
		if err := secretFreeTx(ctx, tx, ch.ID, ch.Secret, in.Secret != ""); err != nil {
			return err
		}
		row, err := s.seal(&ch)
		if err != nil {
			return err
		}
		err = tx.QueryRow(ctx, insertChannel, row).Scan(&ch.InsertedAt, &ch.UpdatedAt)
		if err != nil {
			return mapConstraint(err)
		}
		return s.auditTx(ctx, tx, actor, "create", nil, &ch)
	})
	if err != nil {
		return Channel{}, fmt.Errorf("create channel: %w", err)
	}
	return ch, nil
}

const insertChannel = `
INSERT INTO channels (tenant_id, id, name, type, mode, status, config, secret, secret_hash, require_signature, ordered,
                      rate_limit, retry_policy, max_in_flight, version)
VALUES (@tenant_id, @id, @name, @type, @mode, @status, @config, @secret, @secret_hash, @require_signature, @ordered,
        @rate_limit, @retry_policy, @max_in_flight, @version)
RETURNING inserted_at, updated_at`

const channelColumns = `tenant_id, id, name, type, mode, status, config, secret, previous_secret,
	previous_secret_expires_at, require_signature, ordered, rate_limit, retry_policy, max_in_flight, hold_until, version,
	inserted_at, updated_at`

const getChannel = `SELECT ` + channelColumns + ` FROM channels WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`

// Get returns a channel, or ErrNotFound.
func (s *Store) Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (Channel, error) {
	ch, err := s.getTx(ctx, s.pool, getChannel, tenant, id)
	if err != nil {
		return Channel{}, fmt.Errorf("get channel: %w", err)
	}
	return ch, nil
}

func (s *Store) getTx(ctx context.Context, q postgres.Querier, sql string, tenant tenants.ID, id uuid.UUID) (Channel, error) {
	rows, _ := q.Query(ctx, sql, tenant, id) // the error is CollectExactlyOneRow's too
	ch, err := pgx.CollectExactlyOneRow(rows, s.scan)
	if errors.Is(err, pgx.ErrNoRows) {
		return Channel{}, ErrNotFound
	}
	return ch, err
}

const listChannels = `SELECT ` + channelColumns + ` FROM channels
WHERE tenant_id = $1 AND id > $2 AND deleted_at IS NULL ORDER BY id LIMIT $3`

// List returns at most limit channels in the order of their ids, from the first after after (uuid.Nil: the beginning).
func (s *Store) List(ctx context.Context, tenant tenants.ID, after uuid.UUID, limit int) ([]Channel, error) {
	rows, _ := s.pool.Query(ctx, listChannels, tenant, after, limit)
	list, err := pgx.CollectRows(rows, s.scan)
	if err != nil {
		return nil, fmt.Errorf("list channels: %w", err)
	}
	return list, nil
}

// Update changes a channel. Errors: *fault.Invalid with every fault, ErrNotFound, ErrNameTaken.
func (s *Store) Update(ctx context.Context, actor tenants.Actor, tenant tenants.ID, id uuid.UUID, patch Patch, expected ...int64) (Channel, error) {
	return s.update(ctx, actor, tenant, id, expected, "update", func(_ pgx.Tx, ch *Channel) error {
		return s.apply(ch, patch)
	})
}

// RotateSecret gives the channel a new secret: the given one, or a generated one for "". The secret until now stays
// valid for overlap (negative: DefaultOverlap; 0: not at all; at most MaxOverlap), the one before it is dropped. Errors:
// *fault.Invalid, ErrNotFound.
func (s *Store) RotateSecret(ctx context.Context, actor tenants.Actor, tenant tenants.ID, id uuid.UUID,
	overlap time.Duration, secret string, expected ...int64,
) (Channel, error) {
	if overlap < 0 {
		overlap = DefaultOverlap
	}
	var faults []fault.Field
	if overlap > MaxOverlap {
		faults = append(faults, fault.Field{Pointer: "/overlap_seconds", Code: fault.OutOfRange,
			Detail: fmt.Sprintf("must be at most %d (7 days)", int(MaxOverlap.Seconds()))})
	}
	faults = append(faults, checkSecret(secret)...)
	if len(faults) > 0 {
		return Channel{}, &fault.Invalid{Fields: faults}
	}
	chosen := secret != ""
	if !chosen {
		secret = NewSecret()
	}
	return s.update(ctx, actor, tenant, id, expected, "rotate_secret", func(tx pgx.Tx, ch *Channel) error {
		if secret == ch.Secret.Reveal() {
			return fault.Invalidf("/secret", fault.Conflict, "is the secret that the channel has now; choose another")
		}
		if err := secretFreeTx(ctx, tx, ch.ID, secrets.Text(secret), chosen); err != nil {
			return err
		}
		ch.PreviousSecret, ch.PreviousUntil = "", time.Time{}
		if overlap > 0 {
			ch.PreviousSecret, ch.PreviousUntil = ch.Secret, s.now().Add(overlap).UTC().Truncate(time.Microsecond) // as stored
		}
		ch.Secret = secrets.Text(secret)
		return nil
	})
}

const updateChannel = `
UPDATE channels SET name = @name, mode = @mode, status = @status, config = @config, secret = @secret,
       secret_hash = @secret_hash, previous_secret = @previous_secret, previous_secret_hash = @previous_secret_hash,
       previous_secret_expires_at = @previous_secret_expires_at, require_signature = @require_signature,
       ordered = @ordered, rate_limit = @rate_limit, retry_policy = @retry_policy, max_in_flight = @max_in_flight,
       version = @version, updated_at = now()
WHERE tenant_id = @tenant_id AND id = @id AND deleted_at IS NULL
RETURNING updated_at`

func (s *Store) update(ctx context.Context, actor tenants.Actor, tenant tenants.ID, id uuid.UUID, expected []int64, action string,
	edit func(pgx.Tx, *Channel) error,
) (Channel, error) {
	var ch Channel
	err := s.change(ctx, func(tx pgx.Tx, version int64) error {
		// The configuration row's lock keeps other changes away, so that what is read here is what gets replaced.
		before, err := s.getTx(ctx, tx, getChannel, tenant, id)
		if err != nil {
			return err
		}
		if err := tenants.CheckVersion(before.Version, expected); err != nil {
			return err
		}
		ch = before
		if err := edit(tx, &ch); err != nil {
			return err
		}
		ch.Version = version
		row, err := s.seal(&ch)
		if err != nil {
			return err
		}
		if err := tx.QueryRow(ctx, updateChannel, row).Scan(&ch.UpdatedAt); err != nil {
			return mapConstraint(err)
		}
		return s.auditTx(ctx, tx, actor, action, &before, &ch)
	})
	if err != nil {
		return Channel{}, fmt.Errorf("%s channel: %w", action, err)
	}
	return ch, nil
}

// The credentials go with the channel: nothing reads them any more, and a copy of the database should not hold them.
const deleteChannel = `
UPDATE channels SET deleted_at = now(), updated_at = now(), version = $3, config = $4, secret = $5, secret_hash = $6,
       previous_secret = NULL, previous_secret_hash = NULL, previous_secret_expires_at = NULL
WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`

// Delete marks a channel as deleted and destroys its config and secrets. Its name and secret are free again; rows that
// refer to it stay. Errors: ErrNotFound, also for a second time.
func (s *Store) Delete(ctx context.Context, actor tenants.Actor, tenant tenants.ID, id uuid.UUID, expected ...int64) error {
	err := s.change(ctx, func(tx pgx.Tx, version int64) error {
		before, err := s.getTx(ctx, tx, getChannel, tenant, id)
		if err != nil {
			return err
		}
		if err := tenants.CheckVersion(before.Version, expected); err != nil {
			return err
		}
		nobodys := NewSecret()
		hash := secrets.Hash(nobodys)
		_, err = tx.Exec(ctx, deleteChannel, tenant, id, version,
			s.box.Seal([]byte("{}"), table, columnConfig, id), s.box.Seal([]byte(nobodys), table, columnSecret, id), hash[:])
		if err != nil {
			return err
		}
		return s.auditTx(ctx, tx, actor, "delete", &before, nil)
	})
	if err != nil {
		return fmt.Errorf("delete channel: %w", err)
	}
	s.current.forget(tenant, id)
	return nil
}

// change runs fn in a transaction that holds the configuration row.
func (s *Store) change(ctx context.Context, fn func(tx pgx.Tx, version int64) error) error {
	return pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		version, err := tenants.BumpTx(ctx, tx)
		if err != nil {
			return err
		}
		return fn(tx, version)
	})
}

// NewSecret makes a secret in the form of Standard Webhooks, whsec_ and the base64 of 32 random bytes, so that its text
// can be given to any library of that scheme.
func NewSecret() string {
	var b [32]byte
	rand.Read(b[:]) // never fails, see crypto/rand
	return "whsec_" + base64.StdEncoding.EncodeToString(b[:])
}

const secretTaken = `SELECT EXISTS (SELECT FROM channels WHERE id <> $1 AND deleted_at IS NULL
	AND (secret_hash = $2 OR previous_secret_hash = $2 AND previous_secret_expires_at > now()))`

// secretFreeTx refuses a chosen secret by which another channel can be found: secrets name channels. The caller holds
// the configuration row, so that no other secret appears meanwhile.
func secretFreeTx(ctx context.Context, tx pgx.Tx, id uuid.UUID, secret secrets.Text, chosen bool) error {
	if !chosen {
		return nil // 256 random bits
	}
	hash := secrets.Hash(secret.Reveal())
	var taken bool
	if err := tx.QueryRow(ctx, secretTaken, id, hash[:]).Scan(&taken); err != nil {
		return err
	}
	if taken {
		return fault.Invalidf("/secret", fault.Conflict, "is in use; choose another, or leave it out to have one made")
	}
	return nil
}

func mapConstraint(err error) error {
	switch postgres.Constraint(err) {
	case "channels_name_key":
		return ErrNameTaken
	case "channels_tenant_id_fkey":
		return tenants.ErrNotFound
	}
	return err
}

func (s *Store) auditTx(ctx context.Context, tx pgx.Tx, actor tenants.Actor, action string, before, after *Channel) error {
	entry := tenants.Entry{Action: action, ResourceType: "channel"}
	// A nil *Channel would be a non-nil any.
	if before != nil {
		entry.TenantID, entry.ResourceID, entry.Before = &before.TenantID, before.ID.String(), s.snapshot(before)
	}
	if after != nil {
		entry.TenantID, entry.ResourceID, entry.After = &after.TenantID, after.ID.String(), s.snapshot(after)
	}
	return tenants.AuditTx(ctx, tx, actor, entry)
}

// snapshot is a channel as the audit log keeps it: no secret, the config redacted.
func (s *Store) snapshot(ch *Channel) map[string]any {
	m := map[string]any{
		"name": ch.Name, "type": ch.Type, "mode": ch.Mode, "status": ch.Status, "config": RedactedConfig(s.reg, *ch),
		"require_signature": ch.RequireSignature, "ordered": ch.Ordered, "rate_limit": ch.RateLimit,
		"retry_policy": ch.RetryPolicy, "max_in_flight": ch.MaxInFlight,
	}
	if !ch.PreviousUntil.IsZero() {
		m["previous_until"] = ch.PreviousUntil.UTC()
	}
	return m
}

// seal makes the arguments of insertChannel and updateChannel.
func (s *Store) seal(ch *Channel) (pgx.NamedArgs, error) {
	policy, err := json.Marshal(ch.RetryPolicy)
	if err != nil {
		return nil, fmt.Errorf("marshal retry policy: %w", err)
	}
	hash := secrets.Hash(ch.Secret.Reveal())
	args := pgx.NamedArgs{
		"tenant_id": ch.TenantID, "id": ch.ID, "name": ch.Name, "type": string(ch.Type), "mode": string(ch.Mode),
		"status":      string(ch.Status),
		"config":      s.box.Seal(ch.Config, table, columnConfig, ch.ID),
		"secret":      s.box.Seal([]byte(ch.Secret.Reveal()), table, columnSecret, ch.ID),
		"secret_hash": hash[:], "previous_secret": nil, "previous_secret_hash": nil, "previous_secret_expires_at": nil,
		"require_signature": ch.RequireSignature, "ordered": ch.Ordered, "rate_limit": nil,
		"retry_policy": json.RawMessage(policy), "max_in_flight": ch.MaxInFlight, "version": ch.Version,
	}
	if ch.RateLimit != "" {
		args["rate_limit"] = ch.RateLimit
	}
	if ch.PreviousSecret != "" {
		previous := secrets.Hash(ch.PreviousSecret.Reveal())
		args["previous_secret"] = s.box.Seal([]byte(ch.PreviousSecret.Reveal()), table, columnPreviousSecret, ch.ID)
		args["previous_secret_hash"] = previous[:]
		args["previous_secret_expires_at"] = ch.PreviousUntil
	}
	return args, nil
}

// scan reads a row of channelColumns.
func (s *Store) scan(row pgx.CollectableRow) (Channel, error) {
	var (
		ch                       Channel
		config, secret, previous []byte
		previousUntil            *time.Time
		rateLimit                *string
		policy                   []byte
	)
	err := row.Scan(&ch.TenantID, &ch.ID, &ch.Name, &ch.Type, &ch.Mode, &ch.Status, &config, &secret, &previous,
		&previousUntil, &ch.RequireSignature, &ch.Ordered, &rateLimit, &policy, &ch.MaxInFlight, &ch.HoldUntil,
		&ch.Version, &ch.InsertedAt, &ch.UpdatedAt)
	if err != nil {
		return Channel{}, err
	}
	if err := json.Unmarshal(policy, &ch.RetryPolicy); err != nil {
		return Channel{}, fmt.Errorf("channel %s: retry policy: %w", ch.ID, err)
	}
	if rateLimit != nil {
		ch.RateLimit = *rateLimit
	}
	open := func(sealed []byte, column string) []byte {
		plain, openErr := s.box.Open(sealed, table, column, ch.ID)
		if openErr != nil {
			err = errors.Join(err, fmt.Errorf("channel %s: %s: %w", ch.ID, column, openErr))
		}
		return plain
	}
	ch.Config = open(config, columnConfig)
	ch.Secret = secrets.Text(open(secret, columnSecret))
	if previous != nil {
		ch.PreviousSecret, ch.PreviousUntil = secrets.Text(open(previous, columnPreviousSecret)), *previousUntil
	}
	if err != nil {
		return Channel{}, err
	}
	return ch, nil
}
