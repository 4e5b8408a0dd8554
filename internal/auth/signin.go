package auth

import (
	"context"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/ratelimit"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// ErrBadCredentials says that tenant, address and password do not belong together, or that the user or tenant is switched
// off: which of these, nobody is told.
var ErrBadCredentials = errors.New("auth: wrong name or password")

// ErrLink says that a sign-in link is unknown, spent or past its time: which of these, nobody is told.
var ErrLink = errors.New("auth: not a link that is open")

// LockedError refuses an attempt before its password was looked at: too many have failed.
type LockedError struct {
	// Decision names the bucket (login_ip or login_account) and the wait; the answer is 429.
	Decision ratelimit.Decision
}

// Error implements error.
func (*LockedError) Error() string { return "auth: too many failed sign-ins" }

// Visitor is who knocks, as the request tells.
type Visitor struct {
	IP        netip.Addr // the client's, behind trusted proxies
	UserAgent string
	RequestID string
	// Device is the value of the device cookie, "" for none. Anything may stand there.
	Device string
}

// Credentials are what was typed.
type Credentials struct {
	Portal   bool   // a tenant's user; else an administrator
	Tenant   string // the tenant's name; portal only
	Email    string
	Password secrets.Text
}

// SignedIn is a session that was just opened, with what the browser is to keep.
type SignedIn struct {
	Session Session
	Token   secrets.Text // for the session cookie
	Device  secrets.Text // for the device cookie, to be kept DeviceLife
}

// DeviceLife is how long a device counts as known after it signed in.
const DeviceLife = 180 * 24 * time.Hour

// SignInConfig is what a [SignIn] is made of. All but Registerer are required.
type SignInConfig struct {
	Users     *Users
	Sessions  *Sessions
	Throttle  *ratelimit.Login
	Directory TenantNames
	// Key has 32 bytes, made for this purpose ([DeriveKey]): it signs device cookies and digests names for the audit log.
	// Retired keys still know their cookies.
	Key        []byte
	Retired    [][]byte
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// TenantNames finds tenants by what people type; [tenants.Directory] does.
type TenantNames interface {
	TenantNamed(name string) (*tenants.TenantEntry, bool)
}

// SignIn opens sessions. Safe for concurrent use.
type SignIn struct{ c SignInConfig }

// NewSignIn makes a SignIn. The error is of the registration of metrics.
func NewSignIn(c SignInConfig) (*SignIn, error) { panic("not yet") }

// Password signs in by password. The order of steps: names to their canonical form; room for the attempt reserved in the
// counters of address and account (or of the account on a known device); one query; one bcrypt comparison, of the same
// cost whether the account is unknown, the password wrong, or the user or tenant switched off; the session, with the
// audit record, in one transaction. A refusal by the counters costs no query and no hash.
//
// It returns a [*LockedError], [ErrBadCredentials], [ErrOverloaded], or the database's own error.
func (s *SignIn) Password(ctx context.Context, v Visitor, c Credentials) (SignedIn, error) {
	panic("not yet")
}

// Link spends a sign-in link and signs its user in; it works while the account is locked. portal tells which pages it was
// opened at: a link of the other realm is none. It returns [ErrLink] or the database's own error.
func (s *SignIn) Link(ctx context.Context, v Visitor, portal bool, token string) (SignedIn, error) {
	panic("not yet")
}

// ChangePassword lets a user choose a new password. The current one is asked for, and throttled as a sign-in is, unless
// the session came by a link. All other sessions, known devices and open links end; the session goes on, and gets a new
// device cookie. It returns a [*fault.Invalid] with the pointer "/password" (the new one) or "/current_password", a
// [*LockedError], or [ErrOverloaded].
func (s *SignIn) ChangePassword(ctx context.Context, v Visitor, session Session, current, password secrets.Text) (device secrets.Text, err error) {
	panic("not yet")
}
