package auth

import (
	"context"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/secrets"
	"converger/internal/tenants"
)

// Users reads and changes users of both realms. It is safe for concurrent use. Each change is one transaction with its
// audit record, and is in force on every node with the next request, for sessions are read with their users.
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
	panic("not yet")
}

// Get returns one user, or [ErrUserNotFound].
func (s *Users) Get(ctx context.Context, realm Realm, id uuid.UUID) (User, error) { panic("not yet") }

// ByEmail finds the user that was typed: the address is brought to its canonical form first. It returns
// [ErrUserNotFound].
func (s *Users) ByEmail(ctx context.Context, realm Realm, email string) (User, error) {
	panic("not yet")
}

// List returns up to limit users of a realm by ascending id, those after the given id ([uuid.Nil]: from the start).
func (s *Users) List(ctx context.Context, realm Realm, after uuid.UUID, limit int) ([]User, error) {
	panic("not yet")
}

// Update changes name, role or status. A change of role ends no session: it holds from each session's next request on. A
// user who is made inactive loses all sessions and open links. It returns [ErrUserNotFound], [ErrLastSuperAdmin], or a
// [*fault.Invalid].
func (s *Users) Update(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID, c UserChange) (User, error) {
	panic("not yet")
}

// SetPassword gives a user a new password, as an administrator does: all sessions, known devices and open links end.
// mustChange makes the user choose another at the next sign-in. It returns [ErrUserNotFound], a [*fault.Invalid] with
// the pointer "/password", or [ErrOverloaded].
func (s *Users) SetPassword(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID, password secrets.Text, mustChange bool) error {
	panic("not yet")
}

// Delete removes a user with sessions and links; the audit log keeps what the user did. It returns [ErrUserNotFound] or
// [ErrLastSuperAdmin].
func (s *Users) Delete(ctx context.Context, by tenants.Actor, realm Realm, id uuid.UUID) error {
	panic("not yet")
}
