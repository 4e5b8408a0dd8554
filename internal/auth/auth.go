package auth

import (
	"errors"
	"time"

	"github.com/google/uuid"

	"converger/internal/secrets"
	"converger/internal/tenants"
)

// Why a caller is refused.
var (
	// ErrMalformed says that the text can't be a credential of this kind: it was mistyped, or is of another kind.
	ErrMalformed = errors.New("auth: malformed credential")
	// ErrUnknown says that the credential has the right form but that nobody is known by it, here and now.
	ErrUnknown = errors.New("auth: unknown credential")
	// ErrExpired says that the credential's own time is over.
	ErrExpired = errors.New("auth: credential has expired")
	// ErrRevoked says that the credential was taken back.
	ErrRevoked = errors.New("auth: credential was revoked")
	// ErrChannelGone says that a good client token names a channel that does not exist, any more or yet.
	ErrChannelGone = errors.New("auth: the channel of the token is gone")
	// ErrChannelInactive says that the credential's channel is switched off.
	ErrChannelInactive = errors.New("auth: channel is inactive")
	// ErrTenantSuspended says that the credential's tenant is suspended.
	ErrTenantSuspended = errors.New("auth: tenant is suspended")
)

// MayBeNewer tells whether err could come from a directory that is behind: the credential may be known a moment later.
func MayBeNewer(err error) bool {
	return errors.Is(err, ErrUnknown) || errors.Is(err, ErrChannelGone)
}

// IsStranger tells whether err means that nobody of ours is calling, as against somebody whose rights have ended.
// Such failures are what a guesser makes.
func IsStranger(err error) bool {
	return errors.Is(err, ErrUnknown) || errors.Is(err, ErrMalformed)
}

// Directory is what the authenticator asks; [tenants.Directory] satisfies it.
type Directory interface {
	Key(hash [32]byte) (*tenants.KeyEntry, bool)
	Tenant(tenants.ID) (*tenants.TenantEntry, bool)
	Channel(uuid.UUID) (*tenants.ChannelEntry, bool)
	ChannelBySecret(hash [32]byte) (*tenants.ChannelEntry, bool)
	OperatorToken(hash [32]byte) (*tenants.OperatorEntry, bool)
}

// Caller is who is calling. Of Key, Operator and Token at most one is set.
type Caller struct {
	Tenant   *tenants.TenantEntry  // nil for operators
	Channel  *tenants.ChannelEntry // of a channel secret or a client token
	Key      *tenants.KeyEntry
	Operator *tenants.OperatorEntry
	Token    *Claims
}

// Scopes are what the caller may do. Only API keys and operator tokens have them; others may do what their routes say.
func (c *Caller) Scopes() tenants.Scopes {
	switch {
	case c.Key != nil:
		return c.Key.Scopes
	case c.Operator != nil:
		return c.Operator.Scopes
	}
	return tenants.ScopeRead | tenants.ScopeWrite
}

// Authenticator tells who is calling. It is immutable and safe for concurrent use.
type Authenticator struct {
	directory Directory
	tokens    *Tokens
}

// New makes an authenticator.
func New(d Directory, t *Tokens) *Authenticator { return &Authenticator{directory: d, tokens: t} }

// APIKey finds the tenant of an API key. Errors: ErrMalformed, ErrUnknown, ErrExpired, ErrRevoked, ErrTenantSuspended.
func (a *Authenticator) APIKey(now time.Time, text string) (Caller, error) {
	hash, err := tenants.ParseKey(text)
	if err != nil {
		return Caller{}, ErrMalformed
	}
	key, ok := a.directory.Key(hash)
	if !ok {
		return Caller{}, ErrUnknown
	}
	if err := usable(key.Usable(now)); err != nil {
		return Caller{}, err
	}
	if key.Tenant.Status != tenants.StatusActive {
		return Caller{}, ErrTenantSuspended
	}
	return Caller{Tenant: key.Tenant, Key: key}, nil
}

// Operator finds an operator token. Errors: ErrMalformed, ErrUnknown, ErrExpired, ErrRevoked.
func (a *Authenticator) Operator(now time.Time, text string) (Caller, error) {
	hash, err := tenants.ParseOperatorToken(text)
	if err != nil {
		return Caller{}, ErrMalformed
	}
	token, ok := a.directory.OperatorToken(hash)
	if !ok {
		return Caller{}, ErrUnknown
	}
	if err := usable(token.Usable(now)); err != nil {
		return Caller{}, err
	}
	return Caller{Operator: token}, nil
}

// ChannelSecret finds the channel whose current, or not yet expired previous, secret text is. Errors: ErrUnknown,
// ErrChannelInactive, ErrTenantSuspended. A secret may be any text that the tenant chose, so none is malformed.
func (a *Authenticator) ChannelSecret(text string) (Caller, error) {
	if text == "" {
		return Caller{}, ErrUnknown
	}
	ch, ok := a.directory.ChannelBySecret(secrets.Hash(text))
	if !ok {
		return Caller{}, ErrUnknown
	}
	return a.ofChannel(ch)
}

// Channel finds the channel that an address names, for routes whose credential is a signature over the body. Errors:
// ErrUnknown, ErrChannelInactive, ErrTenantSuspended. With the last two the caller is still returned.
func (a *Authenticator) Channel(id uuid.UUID) (Caller, error) {
	ch, ok := a.directory.Channel(id)
	if !ok {
		return Caller{}, ErrUnknown
	}
	return a.ofChannel(ch)
}

// ClientToken reads a client token and checks what it names. Errors: ErrMalformed (no token of ours), ErrExpired,
// ErrChannelGone, ErrChannelInactive, ErrTenantSuspended.
func (a *Authenticator) ClientToken(now time.Time, text string) (Caller, error) {
	claims, err := a.tokens.Parse(now, text)
	switch {
	case errors.Is(err, ErrTokenExpired):
		return Caller{}, ErrExpired
	case err != nil:
		return Caller{}, ErrMalformed
	}
	ch, ok := a.directory.Channel(claims.ChannelID)
	if !ok || ch.TenantID != claims.TenantID {
		return Caller{}, ErrChannelGone
	}
	c, err := a.ofChannel(ch)
	if err != nil {
		return Caller{}, err
	}
	c.Token = &claims
	return c, nil
}

func (a *Authenticator) ofChannel(ch *tenants.ChannelEntry) (Caller, error) {
	tenant, ok := a.directory.Tenant(ch.TenantID)
	if !ok {
		return Caller{}, ErrUnknown // half of a change that is being loaded
	}
	c := Caller{Tenant: tenant, Channel: ch}
	switch {
	case tenant.Status != tenants.StatusActive:
		return c, ErrTenantSuspended
	case ch.Status != channelActive:
		return c, ErrChannelInactive
	}
	return c, nil
}

// channelActive is the status of a channel that works (the check constraint of channels.status).
const channelActive = "active"

func usable(err error) error {
	switch {
	case errors.Is(err, tenants.ErrKeyExpired):
		return ErrExpired
	case err != nil:
		return ErrRevoked
	}
	return nil
}
