package tenants

import (
	"encoding/json"
	"errors"
	"time"

	"github.com/google/uuid"
)

var (
	// ErrNotFound means no such tenant, key or token, or not of this tenant.
	ErrNotFound = errors.New("not found")
	// ErrNameTaken means that another tenant has this name, be it in other case.
	ErrNameTaken = errors.New("name is taken")
	// ErrChanged means that the row does not have, or no longer has, the version that the caller expects.
	ErrChanged = errors.New("changed meanwhile")
	// ErrLastToken means that without the operator token nobody could change anything through the management API.
	ErrLastToken = errors.New("the last operator token that may write")
	// ErrMalformedKey means that the text cannot be a key: wrong beginning, length or checksum.
	ErrMalformedKey = errors.New("malformed key")
	// ErrKeyExpired means that the key or token is past its expiry.
	ErrKeyExpired = errors.New("key has expired")
	// ErrKeyRevoked means that the key or token was revoked.
	ErrKeyRevoked = errors.New("key was revoked")
)

// ID names a tenant.
type ID = uuid.UUID

// Status of a tenant.
type Status string

// A suspended tenant keeps its data; its keys, client tokens and webhooks are refused.
const (
	StatusActive    Status = "active"
	StatusSuspended Status = "suspended"
)

// Tenant is a customer of the hub: the owner of everything else.
type Tenant struct {
	ID     ID
	Name   string // unique without regard to case
	Status Status
	// Limits are the overrides of rate limits: an object from bucket name to override, as package ratelimit reads them.
	Limits json.RawMessage
	// MaxInFlight is how many deliveries of the tenant may be under way at once.
	MaxInFlight int
	// UploadTypes are the media types that uploaded files may have; none: those of the installation.
	UploadTypes []string
	Version     int64 // configuration version of the last change
	InsertedAt  time.Time
	UpdatedAt   time.Time
}

// NewTenant is the input of [Store.Create].
type NewTenant struct {
	// ID is the tenant's id, made by the caller ([uuid.NewV7]) so that asking twice makes one; zero: it is made here.
	ID   ID
	Name string // 1 to 200 characters, none of them a control character
}

// TenantPatch is a change of a tenant; nil members stay as they are.
type TenantPatch struct {
	Name        *string // as in [NewTenant]
	MaxInFlight *int    // 1 to 100,000
}

// The kinds of caller that change something; see [Actor].
const (
	ActorOperator   = "operator"    // an operator token of the management API
	ActorTenantAPI  = "tenant_api"  // a tenant's API key
	ActorChannel    = "channel"     // a channel's secret
	ActorAdmin      = "admin"       // a person in the admin pages
	ActorTenantUser = "tenant_user" // a person in the portal
	ActorSystem     = "system"      // the program itself
)

// Actor is who changes something, for the audit log.
type Actor struct {
	Type      string // one of the Actor constants
	ID        string
	RequestID string // of the HTTP request, or ""
}

// APIKey is a tenant's key, without the key: only its hash is stored.
type APIKey struct {
	TenantID   ID
	ID         uuid.UUID
	Name       string
	Prefix     string   // the first 13 characters of the key
	Scopes     []string // "read", "write"
	ExpiresAt  *time.Time
	RevokedAt  *time.Time // may lie in the future: the key works until then
	LastUsedAt *time.Time // to about a minute
	Version    int64
	InsertedAt time.Time
}

// NewKey is the input of [Store.CreateKey].
type NewKey struct {
	Name      string     // 1 to 200 characters
	Scopes    []string   // "read", "write"; nil: both
	ExpiresAt *time.Time // in the future; nil: never
}

// OperatorToken is a credential of the management API, without its text.
type OperatorToken struct {
	ID         uuid.UUID
	Name       string
	Prefix     string // the first 13 characters of the token
	Scopes     []string
	ExpiresAt  *time.Time
	RevokedAt  *time.Time
	LastUsedAt *time.Time
	Version    int64
	InsertedAt time.Time
}

// NewOperatorToken is the input of [Store.CreateOperatorToken]; fields as in [NewKey].
type NewOperatorToken struct {
	Name      string
	Scopes    []string
	ExpiresAt *time.Time
}

// Scopes is a set of scopes.
type Scopes uint8

// The scopes, alike for API keys and operator tokens. Write does not imply read: a key that does both lists both.
const (
	ScopeRead Scopes = 1 << iota
	ScopeWrite
)

// Has reports whether all of want are in s.
func (s Scopes) Has(want Scopes) bool { return s&want == want }

var scopeNames = []struct {
	name  string
	scope Scopes
}{{"read", ScopeRead}, {"write", ScopeWrite}}

// parseScopes reads scope names; ok is false when one is unknown (a newer program may have written it: it grants nothing).
func parseScopes(names []string) (s Scopes, ok bool) {
	ok = true
next:
	for _, name := range names {
		for _, known := range scopeNames {
			if known.name == name {
				s |= known.scope
				continue next
			}
		}
		ok = false
	}
	return s, ok
}
