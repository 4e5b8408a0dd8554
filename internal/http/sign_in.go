package http

import (
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
)

// registerSignInRoutes: how people get in and out, and their own account, alike in both areas. Showing a form costs no
// query and is not limited; sending a password is throttled by the failures of address and account (see auth.SignIn).
func (s *server) registerSignInRoutes(a area, session credential) {
	open := route{method: http.MethodGet, area: a}
	s.register(open.at(a.home()+"/login", s.showSignIn))
	s.register(open.by(http.MethodPost).of(credentialPassword).takes(bodyFields).at(a.home()+"/login", s.signIn))
	s.register(open.at(a.home()+"/link/{token}", s.showLink))
	s.register(open.by(http.MethodPost).of(credentialLink).at(a.home()+"/link/{token}", s.useLink))

	own := route{method: http.MethodGet, area: a, auth: session, bucket: ratelimit.WebPage, anyPassword: true}
	s.register(own.at(a.home()+"/password", s.showPassword))
	s.register(own.by(http.MethodPost).takes(bodyFields).at(a.home()+"/password", s.changePassword))
	s.register(own.by(http.MethodPost).at(a.home()+"/logout", s.signOut))
	own.anyPassword = false
	s.register(own.at(a.home()+"/account", s.showAccount))
	s.register(own.by(http.MethodPost).at(a.home()+"/sessions/end", s.endOtherSessions))
	s.register(own.by(http.MethodPost).at(a.home()+"/sessions/{session_id}/end", s.endSession))
}

// signInView is the form to sign in.
type signInView struct {
	Form *pageForm
	Next string
}

func signInForm(a area) *pageForm {
	f := newForm(
		&formField{Name: "email", Label: "Email", Type: "email", Autocomplete: "username", Required: true},
		&formField{Name: "password", Label: "Password", Type: "password", Autocomplete: "current-password", Required: true},
	)
	if a == areaPortal {
		tenant := &formField{Name: "tenant", Label: "Tenant", Hint: "The name under which your organisation is known here.", Autocomplete: "organization", Required: true}
		f.Fields = append([]*formField{tenant}, f.Fields...)
	}
	return f
}

func (s *server) signInPage(c *call, status int, f *pageForm, next string) (*reply, error) {
	if next = safeNext(c.route.area, next); next == c.route.area.home() {
		next = ""
	}
	return s.page(c, status, "sign-in.html", view{Title: "Sign in", Failed: f.failed(), Main: signInView{f, next}})
}

func (s *server) showSignIn(c *call) (*reply, error) {
	f := signInForm(c.route.area)
	next := c.r.URL.Query().Get("next")
	return s.signInPage(c, http.StatusOK, f.focus(f.Fields[0].Name), next)
}

func (s *server) signIn(c *call) (*reply, error) {
	values, err := c.formValues()
	if err != nil {
		return nil, err
	}
	a := c.route.area
	f, next := signInForm(a), values.Get("next")
	f.fill(values)
	for _, x := range f.Fields {
		if values.Get(x.Name) == "" {
			x.Error = "Enter your " + map[string]string{"tenant": "tenant's name", "email": "email", "password": "password"}[x.Name] + "."
		}
	}
	if f.failed() {
		return s.signInPage(c, http.StatusUnprocessableEntity, f.focus(""), next)
	}
	in, err := s.SignIn.Password(c.ctx(), s.visitor(c), auth.Credentials{
		Portal: a == areaPortal, Tenant: values.Get("tenant"), Email: values.Get("email"), Password: secrets.Text(values.Get("password")),
	})
	if status, header, ok := c.throttled(err, f); ok {
		r, err := s.signInPage(c, status, f.focus("password"), next)
		if err == nil && header != "" {
			r = r.with("Retry-After", header)
		}
		return r, err
	}
	if errors.Is(err, auth.ErrBadCredentials) {
		f.Problem = "Email or password is not right."
		if a == areaPortal {
			f.Problem = "Tenant, email or password is not right."
		}
		r, err := s.signInPage(c, http.StatusUnauthorized, f.focus("password"), next)
		if err != nil {
			return nil, err
		}
		return r.with("Www-Authenticate", `Session realm="converger"`), nil
	}
	if err != nil {
		return nil, err
	}
	return s.welcome(c, in, safeNext(a, next)), nil
}

// throttled says on a form that it can't be worked now, and how long to wait.
func (c *call) throttled(err error, f *pageForm) (status int, retryAfter string, ok bool) {
	var locked *auth.LockedError
	switch {
	case errors.As(err, &locked):
		p := limitProblem(locked.Decision)
		c.decision = locked.Decision
		f.Problem = "Too many attempts have failed. " + p.detail
		return http.StatusTooManyRequests, p.header[0][1], true
	case errors.Is(err, auth.ErrOverloaded):
		f.Problem = "Many people are signing in at this moment. Try again in a few seconds."
		return http.StatusServiceUnavailable, "2", true
	}
	return 0, "", false
}

// visitor is who knocks.
func (s *server) visitor(c *call) auth.Visitor {
	return auth.Visitor{
		IP: c.ip, Exempt: c.exempt(), UserAgent: truncate(c.r.UserAgent(), 500), RequestID: c.id,
		Device: s.cookie(c, c.route.area, deviceCookie),
	}
}

// welcome gives the browser its session and sends it on.
func (s *server) welcome(c *call, in auth.SignedIn, next string) *reply {
	a := c.route.area
	c.proved = true
	s.setCookie(c, a, sessionCookie, in.Token.Reveal(), 0)
	if in.Device != "" { // else the one that the browser has goes on
		s.setCookie(c, a, deviceCookie, in.Device.Reveal(), auth.DeviceLife)
	}
	if in.Session.User.MustChangePassword || !in.Session.User.HasPassword {
		next = a.home() + "/password"
	}
	return s.seeOther(next)
}

// showLink shows a button: what only reads mail must not use the link up. Whether the token is any good costs a query and
// is told to nobody who has not pressed it.
func (s *server) showLink(c *call) (*reply, error) {
	return s.page(c, http.StatusOK, "link.html", view{Title: "Sign in", Main: c.param("token")})
}

// useLink signs in by a one-time link. What fails counts as a guess, and is counted before it is looked up.
func (s *server) useLink(c *call) (*reply, error) {
	refund, err := s.stranger(c, nil)
	if err != nil {
		return nil, err
	}
	in, err := s.SignIn.Link(c.ctx(), s.visitor(c), c.route.area == areaPortal, c.param("token"))
	if !errors.Is(err, auth.ErrLink) {
		refund()
	}
	if err != nil {
		return nil, err
	}
	return s.welcome(c, in, c.route.area.home()), nil
}

// signOut ends the session. One that has ended already is as good.
func (s *server) signOut(c *call) (*reply, error) {
	u := c.session.User
	err := s.Sessions.End(c.ctx(), c.actor(), u.Realm, u.ID, c.session.ID)
	if err != nil && !errors.Is(err, auth.ErrUserNotFound) {
		return nil, err
	}
	s.setCookie(c, c.route.area, sessionCookie, "", -time.Second)
	return s.done(c, "signed_out", c.route.area.home()+"/login"), nil
}

// passwordView is the form to choose a password.
type passwordView struct {
	Form   *pageForm
	Email  string // by which password managers know the account
	Forced bool
}

// passwordForm asks for the current password where [auth.SignIn.ChangePassword] does.
func passwordForm(session *auth.Session) *pageForm {
	f := newForm(
		&formField{Name: "password", Label: "New password", Type: "password", Autocomplete: "new-password", Required: true,
			Hint: "At least 8 characters; a sentence is good. Up to 72 bytes."},
		&formField{Name: "repeat", Label: "New password again", Type: "password", Autocomplete: "new-password", Required: true},
	)
	if !session.MayResetPassword {
		current := &formField{Name: "current_password", Label: "Current password", Type: "password", Autocomplete: "current-password", Required: true,
			Hint: fmt.Sprintf("Forgotten? Have a new sign-in link issued: for %.0f minutes after it you are not asked.", auth.LinkTTL.Minutes())}
		f.Fields = append([]*formField{current}, f.Fields...)
	}
	return f
}

func (s *server) passwordPage(c *call, status int, f *pageForm) (*reply, error) {
	u := c.session.User
	return s.page(c, status, "password.html", view{Title: "Password", Failed: f.failed(), Main: passwordView{f, u.Email, u.MustChangePassword || !u.HasPassword}})
}

func (s *server) showPassword(c *call) (*reply, error) {
	f := passwordForm(c.session)
	return s.passwordPage(c, http.StatusOK, f.focus(f.Fields[0].Name))
}

func (s *server) changePassword(c *call) (*reply, error) {
	values, err := c.formValues()
	if err != nil {
		return nil, err
	}
	f := passwordForm(c.session)
	for _, x := range f.Fields {
		if values.Get(x.Name) == "" {
			x.Error = "Is needed."
		}
	}
	if f.Get("repeat").Error == "" && values.Get("repeat") != values.Get("password") {
		f.fault("repeat", "Is not the same as the new password.")
	}
	if f.failed() {
		return s.passwordPage(c, http.StatusUnprocessableEntity, f.focus(""))
	}
	device, err := s.SignIn.ChangePassword(c.ctx(), s.visitor(c), *c.session, secrets.Text(values.Get("current_password")), secrets.Text(values.Get("password")))
	if status, header, ok := c.throttled(err, f); ok {
		r, err := s.passwordPage(c, status, f.focus(""))
		if err != nil {
			return nil, err
		}
		return r.with("Retry-After", header), nil
	}
	if f.take(err) {
		return s.passwordPage(c, http.StatusUnprocessableEntity, f.focus(""))
	}
	if err != nil {
		return nil, err
	}
	s.setCookie(c, c.route.area, deviceCookie, device.Reveal(), auth.DeviceLife)
	return s.done(c, "password_changed", c.route.area.home()+"/account"), nil
}

// accountView is a person's own account.
type accountView struct {
	User     auth.User
	Role     string
	Sessions []sessionView
	Others   int // sessions besides this one
}

type sessionView struct {
	ID                    uuid.UUID
	Browser, Address      string
	Since, LastUsed, Ends time.Time
	Current               bool
}

func (s *server) showAccount(c *call) (*reply, error) {
	u := c.session.User
	list, err := s.Sessions.List(c.ctx(), u.Realm, u.ID)
	if err != nil {
		return nil, err
	}
	v := accountView{User: u, Role: roleName(u.Role)}
	for _, x := range list {
		v.Sessions = append(v.Sessions, sessionView{x.ID, browserName(x.UserAgent), x.Address, x.OpenedAt, x.SeenAt, x.ExpiresAt, x.ID == c.session.ID})
		if x.ID != c.session.ID {
			v.Others++
		}
	}
	return s.page(c, http.StatusOK, "account.html", view{Title: "Account", Main: v})
}

func (s *server) endSession(c *call) (*reply, error) {
	id, err := c.pathID("session_id")
	if err != nil {
		return nil, err
	}
	u := c.session.User
	if err := s.Sessions.End(c.ctx(), c.actor(), u.Realm, u.ID, id); err != nil {
		return nil, err
	}
	if id == c.session.ID {
		s.setCookie(c, c.route.area, sessionCookie, "", -time.Second)
		return s.done(c, "signed_out", c.route.area.home()+"/login"), nil
	}
	return s.done(c, "session_ended", c.route.area.home()+"/account"), nil
}

func (s *server) endOtherSessions(c *call) (*reply, error) {
	u := c.session.User
	if _, err := s.Sessions.EndAll(c.ctx(), c.actor(), u.Realm, u.ID, c.session.ID); err != nil {
		return nil, err
	}
	return s.done(c, "sessions_ended", c.route.area.home()+"/account"), nil
}
