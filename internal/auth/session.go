package auth

import (
	"context"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/secrets"
	"converger/internal/tenants"
)

// SessionDigest is the SHA-256 of a session's token: by it the session is stored and found, and pages are limited
// ([ratelimit.Hasher.Session]).
type SessionDigest = [32]byte

// Session is somebody signed in, as of the request that loaded it.
type Session struct {
	ID   uuid.UUID
	User User // read with the session: role and status of this moment
	// ByLink says that a sign-in link opened it: pages may let the user set a password without asking for the current one.
	ByLink    bool
	Address   string // the client's, canonical text, when it was opened
	UserAgent string // a label, cut to 200 characters
	OpenedAt  time.Time
	SeenAt    time.Time // to about a minute
	ExpiresAt time.Time // the sooner of the idle and the absolute end, were it not used again
}

// Actor is who the session is in the audit log.
func (s Session) Actor(requestID string) tenants.Actor { panic("not yet") }

// SessionOptions of [NewSessions]. Zero members take the default in brackets.
type SessionOptions struct {
	Idle     time.Duration // [12 h]
	Absolute time.Duration // [7 days]
}

// Sessions reads and ends sessions; [SignIn] opens them. Safe for concurrent use.
type Sessions struct{ pool *pgxpool.Pool }

// NewSessions makes one. key, 32 bytes made for this purpose ([DeriveKey]), marks the tokens, so that an invented one is
// refused from memory; retired keys still know theirs.
func NewSessions(pool *pgxpool.Pool, o SessionOptions, key []byte, retired ...[]byte) *Sessions {
	panic("not yet")
}

// Parse checks the form and the mark of a token, without the database, and gives the digest to load it by. The error is
// [ErrMalformed].
func (s *Sessions) Parse(token string) (SessionDigest, error) { panic("not yet") }

// Load finds a session that has not ended, with its user, in one query, and notes its use at most once a minute. The user
// is active, and so is the tenant. portal tells which pages ask: the sessions of administrators are none there, nor are
// those of tenants' users in the admin pages. It returns [ErrUnknown] for a session that ended, in whatever way.
func (s *Sessions) Load(ctx context.Context, portal bool, d SessionDigest) (Session, error) {
	panic("not yet")
}

// List returns the sessions of a user that have not ended, the one used last first.
func (s *Sessions) List(ctx context.Context, realm Realm, user uuid.UUID) ([]Session, error) {
	panic("not yet")
}

// End ends one session of a user, as signing out does. It returns [ErrUserNotFound] if there is none.
func (s *Sessions) End(ctx context.Context, by tenants.Actor, realm Realm, user, session uuid.UUID) error {
	panic("not yet")
}

// EndAll ends all sessions of a user but the one kept ([uuid.Nil]: none), and returns how many those were.
func (s *Sessions) EndAll(ctx context.Context, by tenants.Actor, realm Realm, user, keep uuid.UUID) (int, error) {
	panic("not yet")
}

// RemoveEndedAllTenants removes up to 1000 sessions and as many links whose time is over, and returns how many rows went.
// It is called again until none do.
func (s *Sessions) RemoveEndedAllTenants(ctx context.Context) (int, error) { panic("not yet") }

// LinkTTL is the life of a sign-in link.
const LinkTTL = 15 * time.Minute

// IssueLink makes a one-time sign-in link for an active user, in place of an earlier one that is still open, and returns
// its token and when it expires. The page that opens it is GET /admin/link/{token} or /portal/link/{token}: a form whose
// POST spends the token ([SignIn.Link]). It returns [ErrUserNotFound].
func (s *Users) IssueLink(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID) (token secrets.Text, expires time.Time, err error) {
	panic("not yet")
}
