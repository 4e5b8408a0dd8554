package tenants

import (
	"context"
	"encoding/json"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/prometheus/client_golang/prometheus"
)

// Deriver computes what callers want ready beside each entry (hashed limiter keys, compiled overrides). It is called
// once for each (re)loaded entry, before the entry is visible, and must not call the Directory. The results stay in
// the entry's Derived.
type Deriver interface {
	Tenant(*TenantEntry) any
	Channel(*ChannelEntry) any
	OperatorToken(*OperatorEntry) any
}

// TenantEntry is what a node knows of a tenant. Entries are immutable; a change makes a new one.
type TenantEntry struct {
	ID          ID
	Name        string
	Status      Status
	Limits      json.RawMessage // as [Tenant.Limits]
	MaxInFlight int
	Version     int64
	Derived     any
}

// KeyEntry is what a node knows of an API key.
type KeyEntry struct {
	ID        uuid.UUID
	TenantID  ID
	Tenant    *TenantEntry // the newest at the time of the lookup, never nil
	Name      string
	Scopes    Scopes
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: never
	Version   int64
}

// Usable returns nil, [ErrKeyRevoked] or [ErrKeyExpired].
func (k *KeyEntry) Usable(now time.Time) error { return usable(now, k.ExpiresAt, k.RevokedAt) }

// ChannelEntry is what a node knows of a channel; deleted ones are not in the directory.
type ChannelEntry struct {
	ID                 uuid.UUID
	TenantID           ID
	Type, Mode, Status string
	RequireSignature   bool
	Ordered            bool
	RateLimit          string // as stored; "" none
	Version            int64
	SecretHash         [32]byte
	PreviousSecretHash [32]byte // zero: none
	PreviousUntil      time.Time
	Derived            any
}

// OperatorEntry is what a node knows of an operator token.
type OperatorEntry struct {
	ID        uuid.UUID
	Name      string
	Scopes    Scopes
	ExpiresAt time.Time // zero: never
	RevokedAt time.Time // zero: never
	Version   int64
	Derived   any
}

// Usable returns nil, [ErrKeyRevoked] or [ErrKeyExpired].
func (t *OperatorEntry) Usable(now time.Time) error { return usable(now, t.ExpiresAt, t.RevokedAt) }

func usable(now, expires, revoked time.Time) error {
	switch {
	case !revoked.IsZero() && !now.Before(revoked):
		return ErrKeyRevoked
	case !expires.IsZero() && !now.Before(expires):
		return ErrKeyExpired
	}
	return nil
}

// DirectoryOptions of a [Directory]; zero values take the defaults.
type DirectoryOptions struct {
	TTL        time.Duration // how long the set counts as fresh without a successful poll; 30 s
	PollEvery  time.Duration // 250 ms
	Derive     Deriver       // nil: entries have no Derived
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// DirectoryState says how fresh a directory is.
type DirectoryState struct {
	Version     int64     // configuration version of the set; 0 before the first load
	LoadedAt    time.Time // when rows were last read
	RefreshedAt time.Time // when the set was last known to be current
	Stale       bool      // RefreshedAt is older than the TTL, or nothing was loaded yet
	Err         error     // of the last poll; nil when it succeeded
}

type Directory struct{}

func NewDirectory(pool *pgxpool.Pool, o DirectoryOptions) *Directory { return &Directory{} }

func (d *Directory) Load(ctx context.Context) error                      { return errDraft }
func (d *Directory) Run(ctx context.Context) error                       { return errDraft }
func (d *Directory) Refresh(ctx context.Context) error                   { return errDraft }
func (d *Directory) Key(hash [32]byte) (*KeyEntry, bool)                 { return nil, false }
func (d *Directory) Tenant(id ID) (*TenantEntry, bool)                   { return nil, false }
func (d *Directory) Channel(id uuid.UUID) (*ChannelEntry, bool)          { return nil, false }
func (d *Directory) ChannelBySecret(hash [32]byte) (*ChannelEntry, bool) { return nil, false }
func (d *Directory) OperatorToken(hash [32]byte) (*OperatorEntry, bool)  { return nil, false }
func (d *Directory) Miss(ctx context.Context) bool                       { return false }
func (d *Directory) State() DirectoryState                               { return DirectoryState{} }
