package auth

import (
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

var (
	// ErrBadCredentials says that tenant, address and password do not belong together, or that the user or tenant is
	// switched off: which of these, nobody is told.
	ErrBadCredentials = errors.New("auth: wrong name or password")
	// ErrLink says that a sign-in link is unknown, spent or past its time: which of these, nobody is told.
	ErrLink = errors.New("auth: not a link that is open")
)

// LockedError refuses an attempt before its password was looked at: too many have failed.
type LockedError struct {
	// Decision names the bucket (login_ip or login_account) and the wait; the answer is 429.
	Decision ratelimit.Decision
}

// Error implements error.
func (*LockedError) Error() string { return "auth: too many failed sign-ins" }

// DeviceLife is how long a device counts as known after it signed in.
const DeviceLife = 180 * 24 * time.Hour

// Visitor is who knocks, as the request tells.
type Visitor struct {
	IP        netip.Addr // the client's, behind trusted proxies
	Exempt    bool       // the operator has exempted IP from limits on addresses
	UserAgent string
	RequestID string
	// Device is the value of the device cookie, "" for none. Anything may stand there.
	Device string
}

func (v Visitor) address() string { return v.IP.Unmap().WithZone("").String() }

// userAgent is the label by which people tell their sessions apart.
func (v Visitor) userAgent() string {
	text := []rune(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return -1
		}
		return r
	}, v.UserAgent[:min(len(v.UserAgent), 4*maxUserAgentChars)]))
	return string(text[:min(len(text), maxUserAgentChars)])
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
	Device  secrets.Text // for the device cookie, to be kept DeviceLife; "" after a link: it proves no knowledge of a password
}

// TenantNames finds tenants by what people type; [tenants.Directory] does.
type TenantNames interface {
	TenantNamed(name string) (*tenants.TenantEntry, bool)
}

// SignInConfig is what a [SignIn] is made of. All but Retired, Registerer and Logger are required.
type SignInConfig struct {
	Users     *Users
	Sessions  *Sessions
	Throttle  *ratelimit.Login
	Directory TenantNames
	// Key has 32 bytes, made for this purpose ([DeriveKey]): it signs device cookies and digests names for the audit log.
	// Retired keys still know their cookies.
	Key        []byte
	Retired    [][]byte
	Refusals   *Refusals // records what fails
	Registerer prometheus.Registerer
	Logger     *slog.Logger
}

// SignIn opens sessions. Safe for concurrent use.
type SignIn struct {
	SignInConfig
	devices  marker
	attempts *prometheus.CounterVec
}

// The results of an attempt, as a metric label.
const (
	resultPassword   = "password"
	resultLink       = "link"
	resultWrong      = "wrong"
	resultLocked     = "locked"
	resultOverloaded = "overloaded"
	resultWrongLink  = "wrong_link"
	resultError      = "error"
)

// NewSignIn makes a SignIn. The error is of the registration of metrics.
func NewSignIn(c SignInConfig) (*SignIn, error) {
	s := &SignIn{
		SignInConfig: c, devices: append(marker{c.Key}, c.Retired...),
		attempts: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "converger_sign_ins_total", Help: "Attempts to sign in, by realm and result."}, []string{"realm", "result"}),
	}
	if s.Logger == nil {
		s.Logger = slog.New(slog.DiscardHandler)
	}
	for _, realm := range []Realm{Admins, {}} {
		for _, result := range []string{resultPassword, resultLink, resultWrong, resultLocked, resultOverloaded, resultWrongLink, resultError} {
			s.attempts.WithLabelValues(realm.String(), result)
		}
	}
	hashes := prometheus.NewCounterFunc(prometheus.CounterOpts{
		Name: "converger_password_hashes_total", Help: "Passwords hashed, to be set or compared."},
		func() float64 { return float64(c.Users.passwords.hashed.Load()) })
	if c.Registerer != nil {
		for _, m := range []prometheus.Collector{s.attempts, hashes} {
			if err := c.Registerer.Register(m); err != nil {
				return nil, fmt.Errorf("auth: register metrics: %w", err)
			}
		}
	}
	return s, nil
}

// account is an account that was typed, whether it exists or not.
type account struct {
	realm  Realm  // the zero Realm, in which nobody is found, for an unknown tenant
	open   bool   // the tenant is active, or there is none
	email  string // canonical
	name   string // of the whole, for counters and digests: no two accounts have one
	portal bool
}

func (s *SignIn) account(c Credentials) account {
	a := account{realm: Admins, open: true, email: tenants.Canonical(c.Email), portal: c.Portal}
	if !c.Portal {
		a.name = "admin " + a.email
		return a
	}
	tenant, ok := s.Directory.TenantNamed(c.Tenant)
	if !ok {
		unknown := tenants.Canonical(c.Tenant)
		a.realm, a.open = Realm{}, false
		a.name = fmt.Sprintf("unknown %d %s %s", len(unknown), unknown, a.email)
		return a
	}
	a.realm, a.open = TenantRealm(tenant.ID), tenant.Status == tenants.StatusActive
	a.name = "tenant " + tenant.ID.String() + " " + a.email
	return a
}

func accountOf(u User) account {
	a := account{realm: u.Realm, open: true, email: u.Email, name: "admin " + u.Email}
	if id, ok := u.Realm.Tenant(); ok {
		a.portal, a.name = true, "tenant "+id.String()+" "+u.Email
	}
	return a
}

// Password signs in by password. The order of steps: names to their canonical form; room for the attempt reserved in the
// counters of address and account (or of the account on a known device); one query; one bcrypt comparison, of the same
// cost whether the account is unknown, the password wrong, or the user or tenant switched off; the session, with the
// audit record, in one transaction. A refusal by the counters costs no query and no hash.
//
// It returns a [*LockedError], [ErrBadCredentials], [ErrOverloaded], or the database's own error.
func (s *SignIn) Password(ctx context.Context, v Visitor, c Credentials) (SignedIn, error) {
	a := s.account(c)
	u, known, err := s.verify(ctx, v, a, c.Password)
	if err != nil {
		s.count(a.portal, err)
		return SignedIn{}, err
	}
	var in SignedIn
	err = s.Users.change(ctx, "sign in", func(tx pgx.Tx) error {
		in, err = s.openTx(ctx, tx, v, u, false)
		return err
	})
	if errors.Is(err, ErrUserNotFound) { // deleted, switched off, or given another password a moment ago
		err = ErrBadCredentials
	}
	s.count(a.portal, err)
	if err != nil {
		return SignedIn{}, err
	}
	in.Device = s.newDevice(u, known)
	return in, nil
}

// Link spends a sign-in link and signs its user in; it works while the account is locked. portal tells which pages it was
// opened at: a link of the other realm is none. It returns [ErrLink] or the database's own error.
func (s *SignIn) Link(ctx context.Context, v Visitor, portal bool, token string) (SignedIn, error) {
	in, err := s.link(ctx, v, portal, token)
	switch {
	case err == nil:
		s.attempts.WithLabelValues(in.Session.User.Realm.String(), resultLink).Inc()
	case errors.Is(err, ErrLink):
		s.attempts.WithLabelValues(realmLabel(portal), resultWrongLink).Inc()
	default:
		s.count(portal, err)
	}
	return in, err
}

// Deleting the row spends the link: of many at once one finds it. If the session can't be opened, the link is not spent.
const spendLinkQuery = `
DELETE FROM sign_in_links l USING users u
WHERE l.hash = $1 AND l.expires_at > now() AND u.realm = l.realm AND u.id = l.user_id AND (u.tenant_id IS NOT NULL) = $2
	AND (u.tenant_id IS NULL OR EXISTS (SELECT FROM tenants t WHERE t.id = u.tenant_id AND t.status = 'active'))
RETURNING ` + userColumns

func (s *SignIn) link(ctx context.Context, v Visitor, portal bool, token string) (SignedIn, error) {
	if !looksLikeLink(token) {
		return SignedIn{}, ErrLink
	}
	hash := secrets.Hash(token)
	var in SignedIn
	err := s.Users.change(ctx, "sign in by link", func(tx pgx.Tx) error {
		u, err := postgres.One(ctx, tx, ErrUserNotFound, scanUser, spendLinkQuery, hash[:], portal)
		if err != nil {
			return err
		}
		in, err = s.openTx(ctx, tx, v, u, true)
		return err
	})
	if errors.Is(err, ErrUserNotFound) {
		err = ErrLink
	}
	if err != nil {
		return SignedIn{}, err
	}
	return in, nil
}

// ChangePassword lets a user choose a new password. The current one is asked for, and throttled as a sign-in is, unless
// session.MayResetPassword. All other sessions, known devices and the open link end; the session goes on, and gets a new
// device cookie. It returns a [*fault.Invalid] with the pointer "/password" (the new one) or "/current_password", or with
// none if the password was changed since the session was loaded; a [*LockedError], or [ErrOverloaded].
func (s *SignIn) ChangePassword(ctx context.Context, v Visitor, session Session, current, password secrets.Text) (device secrets.Text, err error) {
	u := session.User
	var bad fault.Invalid
	checkPassword(&bad, password, u.Email)
	if password == current {
		bad.Addf("/password", fault.Conflict, "must not be the present one")
	}
	if err := bad.Err(); err != nil {
		return "", err
	}
	if !session.MayResetPassword {
		switch _, _, err := s.verify(ctx, v, accountOf(u), current); {
		case errors.Is(err, ErrBadCredentials):
			return "", fault.Invalidf("/current_password", fault.Conflict, "is not the present password")
		case err != nil:
			return "", err
		}
	}
	if u, err = s.Users.setPassword(ctx, session.Actor(v.RequestID), u, password, false, session.ID); err != nil {
		return "", err
	}
	return s.newDevice(u, deviceMark{}), nil
}

// verify finds the user whose password it is, at the cost of a reservation. known is the device that the visitor proved,
// the zero one if none.
func (s *SignIn) verify(ctx context.Context, v Visitor, a account, password secrets.Text) (u User, known deviceMark, err error) {
	known = s.devices.device(v.Device, a.name, time.Now())
	room, err := s.reserve(ctx, v, a, known)
	if err != nil {
		return User{}, deviceMark{}, err
	}
	// Whatever happens from here on before a password was compared is no failure of the visitor's.
	giveBack := true
	defer func() {
		if giveBack {
			room.Refund(ctx)
		}
	}()
	if len(password.Reveal()) > MaxPasswordBytes { // nobody's, and bcrypt would look at its beginning only
		giveBack = false
		s.failed(v, a, User{}, known, room, "too_long")
		return User{}, deviceMark{}, ErrBadCredentials
	}
	found, hash, err := s.find(ctx, a)
	if err != nil {
		return User{}, deviceMark{}, fmt.Errorf("sign in: %w", err)
	}
	if known.id != "" && (known.user != found.ID || known.version != found.PasswordVersion) {
		// The password was changed since: the device counts as any other.
		known = deviceMark{}
		room.Refund(ctx)
		giveBack = false
		if room, err = s.reserve(ctx, v, a, known); err != nil {
			return User{}, deviceMark{}, err
		}
		giveBack = true
	}
	right, stale, err := s.Users.passwords.compare(ctx, hash, password)
	if err != nil {
		return User{}, deviceMark{}, fmt.Errorf("sign in: %w", err)
	}
	reason := ""
	switch {
	case found.ID == uuid.Nil:
		reason = "unknown"
	case !right:
		reason = "wrong_password"
	case !a.open:
		reason = "tenant_suspended"
	case found.Status != UserActive:
		reason = "inactive"
	}
	if reason != "" {
		giveBack = false
		s.failed(v, a, found, known, room, reason)
		return User{}, deviceMark{}, ErrBadCredentials
	}
	if stale {
		s.rehash(ctx, found, hash, password)
	}
	if err := inTime(ctx); err != nil { // not before: who guessed wrong has guessed
		return User{}, deviceMark{}, fmt.Errorf("sign in: %w", err)
	}
	return found, known, nil
}

// attempt is whom an attempt counts against.
func (s *SignIn) attempt(v Visitor, a account, known deviceMark) ratelimit.LoginAttempt {
	attempt := ratelimit.LoginAttempt{IP: v.IP, Account: a.name, Device: known.id,
		Shown: func() string { return s.shown("account:"+s.digest("account "+a.name), known) }}
	if v.Exempt {
		attempt.IP = netip.Addr{}
	}
	return attempt
}

// OnKnownDevice stands between an account and the digits that tell its known devices apart, where operators are shown what
// counts against it on one of them.
const OnKnownDevice = " on known device "

// shown is the text by which operators are shown what an account's attempts count against. What is counted for a device is
// told from what is for the account at large and for its other devices: each is reset by its own text.
func (s *SignIn) shown(name string, known deviceMark) string {
	if known.id == "" {
		return name
	}
	return name + OnKnownDevice + s.digest("device " + known.id)[:8]
}

// AccountName is the name of the account that somebody would sign in to: by it limits count, and operators see it of those
// that exist.
func (s *SignIn) AccountName(portal bool, tenant, email string) string {
	return s.account(Credentials{Portal: portal, Tenant: tenant, Email: email}).name
}

func (s *SignIn) reserve(ctx context.Context, v Visitor, a account, known deviceMark) (*ratelimit.LoginReservation, error) {
	room, d, err := s.Throttle.Reserve(ctx, s.attempt(v, a, known))
	switch {
	case err != nil: // it waited for the outcome of other attempts
		return nil, fmt.Errorf("sign in: %w", inTime(ctx))
	case room == nil:
		return nil, &LockedError{d}
	}
	return room, nil
}

const findUserQuery = `SELECT COALESCE(u.password_hash, ''), ` + userColumns + ` FROM users u WHERE realm = $1 AND email = $2`

// find returns the zero User for an account that does not exist. The query is made in any case: the time it takes tells
// nothing.
func (s *SignIn) find(ctx context.Context, a account) (u User, hash string, err error) {
	u, err = postgres.One(ctx, s.Users.pool, ErrUserNotFound, func(row pgx.CollectableRow) (u User, err error) {
		return u, row.Scan(append([]any{&hash}, u.targets()...)...)
	}, findUserQuery, a.realm.id, a.email)
	if errors.Is(err, ErrUserNotFound) {
		return User{}, "", nil
	}
	return u, hash, err
}

const rehashQuery = `UPDATE users SET password_hash = $4 WHERE realm = $1 AND id = $2 AND password_hash = $3`

// rehash brings a hash to the configured cost, now that the password is at hand. The next sign-in tries again if it fails.
func (s *SignIn) rehash(ctx context.Context, u User, old string, password secrets.Text) {
	hash, err := s.Users.passwords.hash(ctx, password)
	if err == nil {
		_, err = s.Users.pool.Exec(ctx, rehashQuery, u.Realm.id, u.ID, old, hash)
	}
	if err != nil {
		s.Logger.WarnContext(ctx, "a password's hash was not brought to the configured cost", "error", err)
	}
}

const signedInQuery = `UPDATE users SET last_sign_in_at = now() WHERE realm = $1 AND id = $2`

// openTx opens a session for u if u still is as it was read: it returns ErrUserNotFound if not.
func (s *SignIn) openTx(ctx context.Context, tx pgx.Tx, v Visitor, u User, byLink bool) (SignedIn, error) {
	now, err := postgres.One(ctx, tx, ErrUserNotFound, scanUser, lockUserQuery, u.Realm.id, u.ID)
	if err != nil {
		return SignedIn{}, err
	}
	if now.Status != UserActive || now.PasswordVersion != u.PasswordVersion {
		return SignedIn{}, ErrUserNotFound
	}
	if _, err := tx.Exec(ctx, signedInQuery, u.Realm.id, u.ID); err != nil {
		return SignedIn{}, err
	}
	session, token, err := s.Sessions.openTx(ctx, tx, v, now, byLink)
	if err != nil {
		return SignedIn{}, err
	}
	err = audit(ctx, tx, session.Actor(v.RequestID), "sign_in", now, nil,
		map[string]any{"session_id": session.ID, "address": session.Address, "by_link": byLink})
	return SignedIn{Session: session, Token: token}, err
}

// newDevice makes the cookie of a device that has just proved the password; one that was known keeps its id.
func (s *SignIn) newDevice(u User, known deviceMark) secrets.Text {
	known.user, known.version = u.ID, u.PasswordVersion
	if known.id == "" {
		known.id = string(random(16))
	}
	return s.devices.deviceCookie(known, accountOf(u).name, time.Now())
}

// failed counts a failure and records it. The record names a user by id, and an account that does not exist by a digest:
// what was typed may have been a password in the wrong field.
func (s *SignIn) failed(v Visitor, a account, u User, known deviceMark, room *ratelimit.LoginReservation, reason string) {
	if u.ID != uuid.Nil {
		s.Throttle.NameAccount(s.attempt(v, a, known), s.shown(a.name, known))
	}
	action, after := "sign_in_failed", map[string]any{"reason": reason, "address": v.address()}
	if locked := room.Keep(); locked != 0 {
		action, after["bucket"] = "lock", locked.String()
	}
	e := tenants.Entry{Action: action, ResourceType: a.realm.String() + "_user", ResourceID: u.ID.String(), After: after}
	if u.ID == uuid.Nil {
		e.ResourceType, e.ResourceID = "account", s.digest("account "+a.name)
	}
	if id, ok := a.realm.Tenant(); ok && id != uuid.Nil {
		e.TenantID = &id
	}
	s.Refusals.Record(tenants.Actor{Type: tenants.ActorSystem, ID: "sign_in", RequestID: v.RequestID}, e)
}

// digest names an account or a device to operators without repeating what was typed, or what the cookie holds.
func (s *SignIn) digest(of string) string {
	h := hmac.New(sha256.New, s.Key)
	h.Write([]byte(of))
	return hex.EncodeToString(h.Sum(nil)[:8])
}

func (s *SignIn) count(portal bool, err error) {
	result := resultError
	var locked *LockedError
	switch {
	case err == nil:
		result = resultPassword
	case errors.As(err, &locked):
		result = resultLocked
	case errors.Is(err, ErrBadCredentials):
		result = resultWrong
	case errors.Is(err, ErrOverloaded):
		result = resultOverloaded
	}
	s.attempts.WithLabelValues(realmLabel(portal), result).Inc()
}

func realmLabel(portal bool) string {
	if portal {
		return Realm{}.String()
	}
	return Admins.String()
}
