package auth

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"converger/internal/fault"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// What goes wrong with users.
var (
	// ErrUserNotFound means no such user or session, or not of this realm.
	ErrUserNotFound = errors.New("auth: no such user")
	// ErrEmailTaken means that another user of the realm has this address, be it in other case.
	ErrEmailTaken = errors.New("auth: address is taken")
	// ErrLastSuperAdmin means that the change would leave nobody who may manage administrators.
	ErrLastSuperAdmin = errors.New("auth: the last active super_admin can't be taken away")
)

// Realm is whose people users are: the installation's, or one tenant's. The zero Realm is nobody's: nothing is found in it.
// Realms are comparable.
type Realm struct{ id uuid.UUID }

// Admins is the realm of those who run the installation.
var Admins = Realm{uuid.Max}

// TenantRealm is the realm of a tenant's people. That of [uuid.Nil] is the zero Realm.
func TenantRealm(id tenants.ID) Realm {
	if id == uuid.Max { // no tenant: ids are of version 7
		return Realm{}
	}
	return Realm{id}
}

// Tenant is the tenant whose people these are; ok is false for [Admins].
func (r Realm) Tenant() (id tenants.ID, ok bool) {
	if r == Admins {
		return uuid.Nil, false
	}
	return r.id, true
}

// String is "admin" or "tenant": safe as a metric label.
func (r Realm) String() string {
	if r == Admins {
		return "admin"
	}
	return "tenant"
}

// Role is what a user may do; which roles there are depends on the realm.
type Role string

// The roles. Admin and viewer exist in both realms.
const (
	RoleSuperAdmin Role = "super_admin" // admin realm: also manages administrators
	RoleOwner      Role = "owner"       // tenant realm: also manages owners
	RoleAdmin      Role = "admin"
	RoleMember     Role = "member" // tenant realm
	RoleViewer     Role = "viewer" // looks and changes nothing
)

// Roles are the roles of a realm, the mightiest first.
func (r Realm) Roles() []Role {
	if r == Admins {
		return []Role{RoleSuperAdmin, RoleAdmin, RoleViewer}
	}
	return []Role{RoleOwner, RoleAdmin, RoleMember, RoleViewer}
}

// UserStatus says whether a user may sign in.
type UserStatus string

// An inactive user keeps the account and can't sign in; the sessions end with the change.
const (
	UserActive   UserStatus = "active"
	UserInactive UserStatus = "inactive"
)

// User is a person who can sign in.
type User struct {
	Realm Realm
	ID    uuid.UUID
	// Email is the name of the account, in its canonical form ([tenants.Canonical]).
	Email  string
	Name   string // for people; may be empty
	Role   Role
	Status UserStatus
	// HasPassword is false for a user who was made without one: only a sign-in link lets such a user in.
	HasPassword bool
	// MustChangePassword says that the password was given by somebody else: pages let the user do nothing before a change.
	MustChangePassword bool
	// PasswordVersion is raised by each change of the password.
	PasswordVersion int64
	LastSignInAt    *time.Time
	InsertedAt      time.Time
	UpdatedAt       time.Time
}

// Version tells one state of the user, as it is changed by others, from the ones before: the microsecond of the change.
// Signing in makes no new one.
func (u User) Version() int64 { return u.UpdatedAt.UnixMicro() }

// Right is a kind of thing that people do.
type Right uint8

// The rights.
const (
	// RightWrite: change channels, keys, rules, limits; replay deliveries; whatever the realm's pages can change.
	RightWrite Right = iota + 1
	// RightManageUsers: make, change and remove the users of tenants (admin realm), or of the own tenant (tenant realm).
	RightManageUsers
	// RightManageAdmins: make, change and remove administrators.
	RightManageAdmins
)

// May tells whether the user's role gives a right.
func (u User) May(r Right) bool {
	switch u.Role {
	case RoleSuperAdmin:
		return true
	case RoleOwner, RoleAdmin:
		return r == RightWrite || r == RightManageUsers
	case RoleMember:
		return r == RightWrite
	}
	return false
}

// MayGrant tells whether the user may give a role of the realm, take it away, or change somebody who has it. It takes
// RightManageAdmins or RightManageUsers, and within a tenant nobody reaches above the own role.
func (u User) MayGrant(realm Realm, role Role) bool {
	switch {
	case !slices.Contains(realm.Roles(), role):
		return false
	case realm == Admins:
		return u.Realm == Admins && u.May(RightManageAdmins)
	case u.Realm == Admins:
		return u.May(RightManageUsers)
	}
	return u.Realm == realm && u.May(RightManageUsers) && (role != RoleOwner || u.Role == RoleOwner)
}

// Actor is the user as the audit log names those who change something: by address.
func (u User) Actor(requestID string) tenants.Actor {
	a := tenants.Actor{Type: tenants.ActorTenantUser, ID: u.Email, RequestID: requestID}
	if u.Realm == Admins {
		a.Type = tenants.ActorAdmin
	}
	return a
}

// NewUser is the input of [Users.Create].
type NewUser struct {
	Email string // as typed; stored in canonical form
	Name  string // up to 200 characters
	Role  Role   // of the realm
	// Password has 8 characters at least and 72 bytes at most; "" makes a user who needs a sign-in link.
	Password secrets.Text
	// MustChangePassword: the password was made up by somebody else.
	MustChangePassword bool
}

// UserChange is the input of [Users.Update]: nil leaves a member as it is.
type UserChange struct {
	Name   *string
	Role   *Role
	Status *UserStatus
}

const (
	maxEmailChars = 254 // RFC 5321, 4.5.3.1.3, and as the migration checks
	maxNameChars  = 200 // as the migration checks
)

// emailForm is what the documentation promises of an address, and no more: only a message that arrives proves one.
var emailForm = regexp.MustCompile(`^[^\s@]+@[^\s@]+$`)

func checkEmail(bad *fault.Invalid, canonical string) {
	const pointer = "/email"
	switch {
	case canonical == "":
		bad.Addf(pointer, fault.Required, "must not be empty")
	case utf8.RuneCountInString(canonical) > maxEmailChars:
		bad.Addf(pointer, fault.TooLong, "must have at most %d characters", maxEmailChars)
	case !emailForm.MatchString(canonical) || strings.ContainsFunc(canonical, unprintable):
		bad.Addf(pointer, fault.Malformed, "must be an address such as ada@example.com")
	}
}

func checkUserName(bad *fault.Invalid, name string) {
	switch {
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		bad.Addf("/name", fault.Malformed, "must be UTF-8 without control characters")
	case utf8.RuneCountInString(name) > maxNameChars:
		bad.Addf("/name", fault.TooLong, "must have at most %d characters", maxNameChars)
	}
}

func checkRole(bad *fault.Invalid, realm Realm, role Role) {
	if roles := realm.Roles(); !slices.Contains(roles, role) {
		bad.Addf("/role", fault.UnknownValue, "must be one of %s", fault.List(roles))
	}
}

func unprintable(r rune) bool { return r == utf8.RuneError || !unicode.IsPrint(r) }
