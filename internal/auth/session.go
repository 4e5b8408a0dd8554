package auth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// The default lives of sessions.
const (
	DefaultSessionIdle     = 12 * time.Hour
	DefaultSessionAbsolute = 7 * 24 * time.Hour
)

const maxUserAgentChars = 200 // as the migration checks

const (
	sessionHead = `s.id, s.by_link, s.by_link AND (u.password_hash IS NULL OR s.inserted_at > now() - $1::interval),
	s.address, s.user_agent, s.inserted_at, `
	sessionColumns = sessionHead + `s.seen_at, LEAST(s.expires_at, s.seen_at + $2::interval), ` + userColumns
	usedColumns    = sessionHead + `now(), LEAST(s.expires_at, now() + $2::interval), ` + userColumns // of one that is used now

	// What makes a session one that goes on. The tenant's status counts too; administrators have no tenant.
	fromLiveSessions = `
FROM web_sessions s JOIN users u ON u.realm = s.realm AND u.id = s.user_id LEFT JOIN tenants t ON t.id = u.tenant_id
WHERE s.expires_at > now() AND s.seen_at > now() - $2::interval AND s.password_version = u.password_version
	AND u.status = 'active' AND (t.status = 'active') IS NOT FALSE`

	// Two in one round trip. The update finds no row but once a minute; if it finds one of a session that does not go on,
	// it changes nothing for it.
	loadSessionQuery = `
WITH touched AS (
	UPDATE web_sessions SET seen_at = now()
	WHERE hash = $3 AND seen_at <= now() - interval '1 minute' AND seen_at > now() - $2::interval)
SELECT ` + usedColumns + fromLiveSessions + ` AND s.hash = $3 AND (u.tenant_id IS NOT NULL) = $4`
	listSessionsQuery = `
SELECT ` + sessionColumns + fromLiveSessions + ` AND s.realm = $3 AND s.user_id = $4 ORDER BY s.seen_at DESC, s.id DESC`

	insertSessionQuery = `
INSERT INTO web_sessions (realm, user_id, id, hash, password_version, by_link, address, user_agent, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, now() + $9::interval)`
	getSessionQuery    = `SELECT ` + sessionColumns + fromLiveSessions + ` AND s.realm = $3 AND s.user_id = $4 AND s.id = $5`
	keepSessionQuery   = `UPDATE web_sessions SET password_version = $4 WHERE realm = $1 AND user_id = $2 AND id = $3`
	deleteSessionQuery = `DELETE FROM web_sessions WHERE realm = $1 AND user_id = $2 AND id = $3`

	// Both tables are small, and swept once an hour: an index on the times would cost more than it saves.
	removeSessionsAllTenantsQuery = `
DELETE FROM web_sessions WHERE hash = ANY (ARRAY(
	SELECT hash FROM web_sessions WHERE expires_at <= now() OR seen_at <= now() - $1::interval LIMIT $2 FOR UPDATE SKIP LOCKED))`
	removeLinksAllTenantsQuery = `
DELETE FROM sign_in_links WHERE hash = ANY (ARRAY(
	SELECT hash FROM sign_in_links WHERE expires_at <= now() LIMIT $1 FOR UPDATE SKIP LOCKED))`
)

// removeBatch bounds the rows of one removal.
const removeBatch = 1000

// SessionDigest is the SHA-256 of a session's token: by it the session is stored and found, and pages are limited
// ([ratelimit.Hasher.Session]).
type SessionDigest = [32]byte

// Session is somebody signed in, as of the request that loaded it.
type Session struct {
	ID   uuid.UUID
	User User // read with the session: role and status of this moment
	// ByLink says that a sign-in link opened it, and MayResetPassword that it did so within LinkTTL, or that the user has no
	// password: then a new password is set without asking for the current one.
	ByLink           bool
	MayResetPassword bool
	Address          string // the client's, canonical text, when it was opened
	UserAgent        string // a label, cut to 200 characters
	OpenedAt         time.Time
	SeenAt           time.Time // to about a minute
	ExpiresAt        time.Time // the sooner of the idle and the absolute end, were it not used again
}

// Actor is who the session is in the audit log.
func (s Session) Actor(requestID string) tenants.Actor { return s.User.Actor(requestID) }

// SessionOptions of [NewSessions]. Zero members take the default.
type SessionOptions struct {
	Idle     time.Duration // a session ends when it was not used for so long, to about a minute
	Absolute time.Duration // and at this age in any case
}

// Sessions reads and ends sessions; [SignIn] opens them. Times are the database's. Safe for concurrent use.
//
// Besides the errors named at each method, every method that takes a context returns the database's own, wrapped.
type Sessions struct {
	pool  *pgxpool.Pool
	o     SessionOptions
	marks marker
}

// NewSessions makes one. key, 32 bytes made for this purpose ([DeriveKey]), marks the tokens, so that an invented one is
// refused from memory; retired keys still know theirs.
func NewSessions(pool *pgxpool.Pool, o SessionOptions, key []byte, retired ...[]byte) *Sessions {
	o.Idle = cmp.Or(o.Idle, DefaultSessionIdle)
	o.Absolute = cmp.Or(o.Absolute, DefaultSessionAbsolute)
	return &Sessions{pool: pool, o: o, marks: append(marker{key}, retired...)}
}

// Parse checks the form and the mark of a token, without the database, and gives the digest to load it by. The error is
// [ErrMalformed].
func (s *Sessions) Parse(token string) (SessionDigest, error) {
	if _, ok := s.marks.open(sessionPrefix, randomBytes, "", token); !ok {
		return SessionDigest{}, ErrMalformed
	}
	return secrets.Hash(token), nil
}

// Load finds a session that has not ended, with its user, in one query, and notes its use at most once a minute. The user
// is active, and so is the tenant. portal tells which pages ask: the sessions of administrators are none there, nor are
// those of tenants' users in the admin pages. It returns [ErrUnknown] for a session that ended, in whatever way.
func (s *Sessions) Load(ctx context.Context, portal bool, d SessionDigest) (Session, error) {
	found, err := postgres.One(ctx, s.pool, ErrUserNotFound, scanSession, loadSessionQuery, LinkTTL, s.o.Idle, d[:], portal)
	switch {
	case errors.Is(err, ErrUserNotFound):
		return Session{}, ErrUnknown
	case err != nil:
		return Session{}, fmt.Errorf("load session: %w", err)
	}
	return found, nil
}

// List returns the sessions of a user that have not ended, the one used last first.
func (s *Sessions) List(ctx context.Context, realm Realm, user uuid.UUID) ([]Session, error) {
	list, err := postgres.Many(ctx, s.pool, scanSession, listSessionsQuery, LinkTTL, s.o.Idle, realm.id, user)
	if err != nil {
		return nil, fmt.Errorf("list sessions: %w", err)
	}
	return list, nil
}

// End ends one session of a user, as signing out does. It returns [ErrUserNotFound] if there is none.
func (s *Sessions) End(ctx context.Context, by tenants.Actor, realm Realm, user, session uuid.UUID) error {
	return s.end(ctx, by, realm, user, func(tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, deleteSessionQuery, realm.id, user, session)
		if err == nil && tag.RowsAffected() == 0 {
			err = ErrUserNotFound
		}
		return map[string]any{"session_id": session}, err
	})
}

// EndAll ends all sessions of a user but the one kept ([uuid.Nil]: none), and returns how many those were. It returns
// [ErrUserNotFound].
func (s *Sessions) EndAll(ctx context.Context, by tenants.Actor, realm Realm, user, keep uuid.UUID) (ended int, err error) {
	err = s.end(ctx, by, realm, user, func(tx pgx.Tx) (any, error) {
		tag, err := tx.Exec(ctx, deleteSessionsQuery, realm.id, user, keep)
		ended = int(tag.RowsAffected())
		return map[string]any{"sessions_ended": ended}, err
	})
	return ended, err
}

func (s *Sessions) end(ctx context.Context, by tenants.Actor, realm Realm, user uuid.UUID, remove func(pgx.Tx) (after any, err error)) error {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		u, err := postgres.One(ctx, tx, ErrUserNotFound, scanUser, getUserQuery, realm.id, user)
		if err != nil {
			return err
		}
		after, err := remove(tx)
		if err != nil {
			return err
		}
		return audit(ctx, tx, by, "end_session", u, nil, after)
	})
	if err != nil {
		return fmt.Errorf("end session: %w", err)
	}
	return nil
}

// RemoveEndedAllTenants removes up to 1000 sessions, and as many links, whose time is over, and returns how many rows
// went. It is called again until none do.
func (s *Sessions) RemoveEndedAllTenants(ctx context.Context) (int, error) {
	sessions, err := s.pool.Exec(ctx, removeSessionsAllTenantsQuery, s.o.Idle, removeBatch)
	if err != nil {
		return 0, fmt.Errorf("remove ended sessions: %w", err)
	}
	links, err := s.pool.Exec(ctx, removeLinksAllTenantsQuery, removeBatch)
	if err != nil {
		return 0, fmt.Errorf("remove expired sign-in links: %w", err)
	}
	return int(sessions.RowsAffected() + links.RowsAffected()), nil
}

// openTx writes a session for a user whom the caller's transaction has locked, and returns its token.
func (s *Sessions) openTx(ctx context.Context, tx pgx.Tx, v Visitor, u User, byLink bool) (Session, secrets.Text, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Session{}, "", err
	}
	token := s.marks.seal(sessionPrefix, random(randomBytes), "")
	hash := secrets.Hash(token.Reveal())
	_, err = tx.Exec(ctx, insertSessionQuery, u.Realm.id, u.ID, id, hash[:], u.PasswordVersion, byLink,
		v.address(), v.userAgent(), s.o.Absolute)
	if err != nil {
		return Session{}, "", err
	}
	opened, err := postgres.One(ctx, tx, ErrUserNotFound, scanSession, getSessionQuery, LinkTTL, s.o.Idle, u.Realm.id, u.ID, id)
	return opened, token, err
}

func scanSession(row pgx.CollectableRow) (Session, error) {
	var s Session
	return s, row.Scan(append([]any{&s.ID, &s.ByLink, &s.MayResetPassword, &s.Address, &s.UserAgent, &s.OpenedAt, &s.SeenAt, &s.ExpiresAt},
		s.User.targets()...)...)
}
