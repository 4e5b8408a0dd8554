package auth

import (
	"context"
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

// The first parameter of each is the realm: a tenant's users are found through the tenant only.
const (
	userColumns = `u.realm, u.id, u.email, u.name, u.role, u.status, u.password_hash IS NOT NULL, u.must_change_password,
	u.password_version, u.last_sign_in_at, u.inserted_at, u.updated_at`

	insertUserQuery = `
INSERT INTO users AS u (realm, id, email, name, role, password_hash, must_change_password)
VALUES ($1, $2, $3, $4, $5, NULLIF($6, ''), $7) RETURNING ` + userColumns
	getUserQuery     = `SELECT ` + userColumns + ` FROM users u WHERE realm = $1 AND id = $2`
	lockUserQuery    = getUserQuery + ` FOR NO KEY UPDATE`
	userByEmailQuery = `SELECT ` + userColumns + ` FROM users u WHERE realm = $1 AND email = $2`
	listUsersQuery   = `SELECT ` + userColumns + ` FROM users u WHERE realm = $1 AND id > $2 ORDER BY id LIMIT $3`
	updateUserQuery  = `
UPDATE users u SET name = $3, role = $4, status = $5, updated_at = now() WHERE realm = $1 AND id = $2 RETURNING ` + userColumns
	deleteUserQuery  = `DELETE FROM users WHERE realm = $1 AND id = $2`
	setPasswordQuery = `
UPDATE users u SET password_hash = $3, must_change_password = $4, password_version = password_version + 1, updated_at = now()
WHERE realm = $1 AND id = $2 RETURNING ` + userColumns

	// In the order of ids, so that two who take rights away at the same time wait for each other and do not block; the second
	// then sees what the first left.
	lockSuperAdminsQuery = `
SELECT id FROM users WHERE realm = $1 AND role = 'super_admin' AND status = 'active' ORDER BY id FOR NO KEY UPDATE`

	deleteSessionsQuery = `DELETE FROM web_sessions WHERE realm = $1 AND user_id = $2 AND id <> $3`
	deleteLinkQuery     = `DELETE FROM sign_in_links WHERE realm = $1 AND user_id = $2`
	putLinkQuery        = `
INSERT INTO sign_in_links (realm, user_id, hash, expires_at) VALUES ($1, $2, $3, now() + $4::interval)
ON CONFLICT (realm, user_id) DO UPDATE SET hash = excluded.hash, expires_at = excluded.expires_at, inserted_at = now()
RETURNING expires_at`
)

// Names that the migration gave to constraints.
const (
	constraintUserEmail  = "users_email_key"
	constraintUserTenant = "users_tenant_id_fkey"
)

// LinkTTL is the life of a sign-in link.
const LinkTTL = 15 * time.Minute

// Users reads and changes users of both realms. It is safe for concurrent use. Each change is one transaction with its
// audit record, and is in force on every node with the next request, for sessions are read with their users. Changes that
// take expected versions ([User.Version]) are made only to a user who has one of them, else they return
// [tenants.ErrChanged].
//
// Besides the errors named at each method, every method returns the database's own, wrapped.
type Users struct {
	pool      *pgxpool.Pool
	passwords *Passwords
}

// NewUsers makes a Users.
func NewUsers(pool *pgxpool.Pool, p *Passwords) *Users { return &Users{pool: pool, passwords: p} }

// Create makes an active user. It returns a [*fault.Invalid], [ErrEmailTaken], [tenants.ErrNotFound] for an unknown
// tenant, or [ErrOverloaded].
func (s *Users) Create(ctx context.Context, by tenants.Actor, realm Realm, n NewUser) (User, error) {
	var bad fault.Invalid
	email := tenants.Canonical(n.Email)
	checkEmail(&bad, email)
	checkUserName(&bad, n.Name)
	checkRole(&bad, realm, n.Role)
	if n.Password != "" {
		checkPassword(&bad, n.Password, email)
	}
	if err := bad.Err(); err != nil {
		return User{}, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return User{}, fmt.Errorf("create user: %w", err)
	}
	hash := ""
	if n.Password != "" {
		if hash, err = s.passwords.hash(ctx, n.Password); err != nil {
			return User{}, fmt.Errorf("create user: %w", err)
		}
	}
	var u User
	err = s.change(ctx, "create user", func(tx pgx.Tx) error {
		u, err = postgres.One(ctx, tx, ErrUserNotFound, scanUser, insertUserQuery, realm.id, id, email, n.Name, n.Role, hash, n.MustChangePassword)
		switch postgres.Constraint(err) {
		case constraintUserEmail:
			return ErrEmailTaken
		case constraintUserTenant:
			return tenants.ErrNotFound
		}
		if err != nil {
			return err
		}
		return audit(ctx, tx, by, "create", u, nil, u.snapshot())
	})
	if err != nil {
		return User{}, err
	}
	return u, nil
}

// Get returns one user, or [ErrUserNotFound].
func (s *Users) Get(ctx context.Context, realm Realm, id uuid.UUID) (User, error) {
	u, err := postgres.One(ctx, s.pool, ErrUserNotFound, scanUser, getUserQuery, realm.id, id)
	if err != nil {
		return User{}, fmt.Errorf("get user: %w", err)
	}
	return u, nil
}

// ByEmail finds the user that was typed: the address is brought to its canonical form first. It returns
// [ErrUserNotFound].
func (s *Users) ByEmail(ctx context.Context, realm Realm, email string) (User, error) {
	u, err := postgres.One(ctx, s.pool, ErrUserNotFound, scanUser, userByEmailQuery, realm.id, tenants.Canonical(email))
	if err != nil {
		return User{}, fmt.Errorf("get user: %w", err)
	}
	return u, nil
}

// List returns up to limit users of a realm by ascending id, those after the given id ([uuid.Nil]: from the start).
func (s *Users) List(ctx context.Context, realm Realm, after uuid.UUID, limit int) ([]User, error) {
	list, err := postgres.Many(ctx, s.pool, scanUser, listUsersQuery, realm.id, after, limit)
	if err != nil {
		return nil, fmt.Errorf("list users: %w", err)
	}
	return list, nil
}

// Update changes name, role or status. A change of role ends no session: it holds from each session's next request on. A
// user who is made inactive loses all sessions and the open link. A change to what is already so changes nothing, and is
// not audited. It returns [ErrUserNotFound], [ErrLastSuperAdmin], or a [*fault.Invalid].
func (s *Users) Update(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID, c UserChange, expected ...int64) (User, error) {
	var bad fault.Invalid
	if c.Name != nil {
		checkUserName(&bad, *c.Name)
	}
	if c.Role != nil {
		checkRole(&bad, realm, *c.Role)
	}
	if c.Status != nil && *c.Status != UserActive && *c.Status != UserInactive {
		bad.Addf("/status", fault.UnknownValue, "must be %q or %q", UserActive, UserInactive)
	}
	if err := bad.Err(); err != nil {
		return User{}, err
	}
	var u User
	err := s.change(ctx, "change user", func(tx pgx.Tx) error {
		before, spare, err := lockUser(ctx, tx, realm, id)
		if err != nil {
			return err
		}
		if err := tenants.CheckVersion(before.Version(), expected); err != nil {
			return err
		}
		u = before
		u.Name, u.Role, u.Status = or(c.Name, u.Name), or(c.Role, u.Role), or(c.Status, u.Status)
		switch {
		case u == before:
			return nil
		case !spare && (u.Role != RoleSuperAdmin || u.Status != UserActive):
			return ErrLastSuperAdmin
		}
		if u, err = postgres.One(ctx, tx, ErrUserNotFound, scanUser, updateUserQuery, realm.id, id, u.Name, u.Role, u.Status); err != nil {
			return err
		}
		if u.Status != UserActive {
			if _, err := shutOut(ctx, tx, u, uuid.Nil); err != nil {
				return err
			}
		}
		return audit(ctx, tx, by, "update", u, before.snapshot(), u.snapshot())
	})
	if err != nil {
		return User{}, err
	}
	return u, nil
}

// SetPassword gives a user a new password, as an administrator does: all sessions, known devices and the open link end.
// mustChange makes the user choose another after the next sign-in. It returns [ErrUserNotFound], a [*fault.Invalid] with
// the pointer "/password", or [ErrOverloaded].
func (s *Users) SetPassword(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID, password secrets.Text, mustChange bool) error {
	u, err := s.Get(ctx, realm, id)
	if err != nil {
		return err
	}
	_, err = s.setPassword(ctx, by, u, password, mustChange, uuid.Nil)
	return err
}

// setPassword leaves the session keep, if there is one, which goes on under the new password; whoever has it proved the one
// of u, and may replace no later one.
func (s *Users) setPassword(ctx context.Context, by tenants.Actor, u User, password secrets.Text, mustChange bool, keep uuid.UUID) (User, error) {
	var bad fault.Invalid
	checkPassword(&bad, password, u.Email)
	if err := bad.Err(); err != nil {
		return User{}, err
	}
	hash, err := s.passwords.hash(ctx, password)
	if err != nil {
		return User{}, fmt.Errorf("set password: %w", err)
	}
	err = s.change(ctx, "set password", func(tx pgx.Tx) error {
		if keep != uuid.Nil {
			now, err := postgres.One(ctx, tx, ErrUserNotFound, scanUser, lockUserQuery, u.Realm.id, u.ID)
			if err != nil {
				return err
			}
			if now.PasswordVersion != u.PasswordVersion {
				return fault.Invalidf("", fault.Conflict, "the password was changed by somebody else a moment ago")
			}
		}
		if u, err = postgres.One(ctx, tx, ErrUserNotFound, scanUser, setPasswordQuery, u.Realm.id, u.ID, hash, mustChange); err != nil {
			return err
		}
		ended, err := shutOut(ctx, tx, u, keep)
		if err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, keepSessionQuery, u.Realm.id, u.ID, keep, u.PasswordVersion); err != nil {
			return err
		}
		return audit(ctx, tx, by, "set_password", u, nil, map[string]any{"must_change_password": mustChange, "sessions_ended": ended})
	})
	if err != nil {
		return User{}, err
	}
	return u, nil
}

// Delete removes a user with sessions and links; the audit log keeps what the user did. It returns [ErrUserNotFound] or
// [ErrLastSuperAdmin].
func (s *Users) Delete(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID, expected ...int64) error {
	return s.change(ctx, "delete user", func(tx pgx.Tx) error {
		u, spare, err := lockUser(ctx, tx, realm, id)
		if err != nil {
			return err
		}
		if err := tenants.CheckVersion(u.Version(), expected); err != nil {
			return err
		}
		if !spare {
			return ErrLastSuperAdmin
		}
		if _, err := tx.Exec(ctx, deleteUserQuery, realm.id, id); err != nil {
			return err
		}
		return audit(ctx, tx, by, "delete", u, u.snapshot(), nil)
	})
}

// IssueLink makes a one-time sign-in link for an active user, in place of an earlier one that is still open, and returns
// its token and when it expires, LinkTTL from now. The page that opens it is GET /admin/link/{token} or
// /portal/link/{token}: a form whose POST spends the token ([SignIn.Link]). It returns [ErrUserNotFound], or a
// [*fault.Invalid] for a user who is inactive.
func (s *Users) IssueLink(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID) (token secrets.Text, expires time.Time, err error) {
	token = newLinkToken()
	hash := secrets.Hash(token.Reveal())
	err = s.change(ctx, "make sign-in link", func(tx pgx.Tx) error {
		u, err := postgres.One(ctx, tx, ErrUserNotFound, scanUser, lockUserQuery, realm.id, id)
		if err != nil {
			return err
		}
		if u.Status != UserActive {
			return fault.Invalidf("", fault.Conflict, "the user is inactive")
		}
		if err := tx.QueryRow(ctx, putLinkQuery, realm.id, id, hash[:], LinkTTL).Scan(&expires); err != nil {
			return err
		}
		return audit(ctx, tx, by, "issue_link", u, nil, map[string]any{"expires_at": expires})
	})
	if err != nil {
		return "", time.Time{}, err
	}
	return token, expires, nil
}

func (s *Users) change(ctx context.Context, what string, fn func(tx pgx.Tx) error) error {
	if err := pgx.BeginFunc(ctx, s.pool, fn); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// lockUser locks a user for a change. spare is false when this is the only active super_admin.
func lockUser(ctx context.Context, tx pgx.Tx, realm Realm, id uuid.UUID) (u User, spare bool, err error) {
	spare = true
	if realm == Admins {
		able, err := postgres.Many(ctx, tx, pgx.RowTo[uuid.UUID], lockSuperAdminsQuery, realm.id)
		if err != nil {
			return User{}, false, err
		}
		spare = len(able) != 1 || able[0] != id
	}
	u, err = postgres.One(ctx, tx, ErrUserNotFound, scanUser, lockUserQuery, realm.id, id)
	return u, spare, err
}

// shutOut ends the sessions of a user but one, and the open link.
func shutOut(ctx context.Context, tx pgx.Tx, u User, keep uuid.UUID) (sessions int, err error) {
	tag, err := tx.Exec(ctx, deleteSessionsQuery, u.Realm.id, u.ID, keep)
	if err != nil {
		return 0, err
	}
	_, err = tx.Exec(ctx, deleteLinkQuery, u.Realm.id, u.ID)
	return int(tag.RowsAffected()), err
}

// snapshot is what the audit log shows of a user.
func (u User) snapshot() any {
	return map[string]any{"email": u.Email, "name": u.Name, "role": u.Role, "status": u.Status, "must_change_password": u.MustChangePassword}
}

// audit records a change of a user.
func audit(ctx context.Context, tx pgx.Tx, by tenants.Actor, action string, u User, before, after any) error {
	e := tenants.Entry{Action: action, ResourceType: u.Realm.String() + "_user", ResourceID: u.ID.String(), Before: before, After: after}
	if id, ok := u.Realm.Tenant(); ok {
		e.TenantID = &id
	}
	return tenants.AuditTx(ctx, tx, by, e)
}

func or[T any](v *T, otherwise T) T {
	if v == nil {
		return otherwise
	}
	return *v
}

func scanUser(row pgx.CollectableRow) (User, error) {
	var u User
	return u, row.Scan(u.targets()...)
}

// targets are where userColumns go.
func (u *User) targets() []any {
	return []any{&u.Realm.id, &u.ID, &u.Email, &u.Name, &u.Role, &u.Status, &u.HasPassword, &u.MustChangePassword,
		&u.PasswordVersion, &u.LastSignInAt, &u.InsertedAt, &u.UpdatedAt}
}
