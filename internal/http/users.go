package http

import (
	"errors"
	"net/http"
	"net/url"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/secrets"
)

// registerUserRoutes: the people who sign in to the pages, those of the installation and those of each tenant, by the same
// handlers.
func (s *server) registerUserRoutes() {
	admins := func(*call) (auth.Realm, error) { return auth.Admins, nil }
	for _, people := range []struct {
		at    string
		realm func(*call) (auth.Realm, error)
	}{{"/admin_users", admins}, {"/tenants/{tenant_id}/users", s.tenantRealm}} {
		of := func(handle func(*call, auth.Realm) (*reply, error)) func(*call) (*reply, error) {
			return func(c *call) (*reply, error) {
				realm, err := people.realm(c)
				if err != nil {
					return nil, err
				}
				return handle(c, realm)
			}
		}
		one := people.at + "/{user_id}"
		s.operatorRoute(http.MethodPost, people.at, bodyJSON, of(s.postUser))
		s.operatorRoute(http.MethodGet, people.at, bodyNone, of(s.listUsers))
		s.operatorRoute(http.MethodGet, one, bodyNone, of(s.showUser))
		s.operatorRoute(http.MethodPatch, one, bodyJSON, of(s.patchUser))
		s.operatorRoute(http.MethodDelete, one, bodyNone, of(s.removeUser))
		s.operatorRoute(http.MethodPost, one+"/password", bodyJSON, of(s.putPassword))
		s.operatorRoute(http.MethodPost, one+"/sign_in_link", bodyNone, of(s.postLink))
		s.operatorRoute(http.MethodGet, one+"/sessions", bodyNone, of(s.listUserSessions))
		s.operatorRoute(http.MethodDelete, one+"/sessions", bodyNone, of(s.endUserSessions))
		s.operatorRoute(http.MethodDelete, one+"/sessions/{session_id}", bodyNone, of(s.endUserSession))
	}
}

// tenantRealm is the realm of the tenant in the path, if there is one.
func (s *server) tenantRealm(c *call) (auth.Realm, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return auth.Realm{}, err
	}
	return auth.TenantRealm(t.ID), nil
}

type userBody struct {
	ID                 uuid.UUID       `json:"id"`
	TenantID           *uuid.UUID      `json:"tenant_id,omitempty"` // of a tenant's user
	Email              string          `json:"email"`
	Name               string          `json:"name"`
	Role               auth.Role       `json:"role"`
	Status             auth.UserStatus `json:"status"`
	HasPassword        bool            `json:"has_password"`
	MustChangePassword bool            `json:"must_change_password"`
	LastSignInAt       *time.Time      `json:"last_sign_in_at"`
	InsertedAt         time.Time       `json:"inserted_at"`
	UpdatedAt          time.Time       `json:"updated_at"`
}

func userJSON(u auth.User) userBody {
	b := userBody{
		ID: u.ID, Email: u.Email, Name: u.Name, Role: u.Role, Status: u.Status, HasPassword: u.HasPassword, MustChangePassword: u.MustChangePassword,
		LastSignInAt: utc(u.LastSignInAt), InsertedAt: u.InsertedAt.UTC(), UpdatedAt: u.UpdatedAt.UTC(),
	}
	if tenant, ok := u.Realm.Tenant(); ok {
		b.TenantID = &tenant
	}
	return b
}

// userOf finds the user of the path.
func (s *server) userOf(c *call, realm auth.Realm) (auth.User, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return auth.User{}, err
	}
	return s.Users.Get(c.ctx(), realm, id)
}

// postUser makes an active user. Without a password it takes a sign-in link to get in; with one, the user chooses another
// after the first sign-in, unless must_change_password says otherwise.
func (s *server) postUser(c *call, realm auth.Realm) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("email")
	f.require("role")
	in := auth.NewUser{Email: f.str("email"), Name: f.str("name"), Role: auth.Role(f.str("role")), Password: secrets.Text(f.str("password"))}
	in.MustChangePassword = f.flagOr("must_change_password", in.Password != "")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	u, err := s.Users.Create(c.ctx(), c.actor(), realm, in)
	if err != nil {
		return nil, err
	}
	p, err := settingReply(c, http.StatusCreated, u.Version(), userJSON(u))
	if err != nil {
		return nil, err
	}
	return p.with("Location", c.r.URL.EscapedPath()+"/"+u.ID.String()), nil
}

// listUsers lists a realm's users, or the one who has an address.
func (s *server) listUsers(c *call, realm auth.Realm) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	email := q.Get("email")
	list := []string{"users", c.r.URL.Path, email}
	after, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, err := s.usersBy(c, realm, email, after, limit+1)
	if err != nil {
		return nil, err
	}
	next := ""
	if len(found) > limit {
		found = found[:limit]
		next = s.cursors.encode(found[limit-1].ID, list...)
	}
	bodies := make([]userBody, len(found))
	for i, u := range found {
		bodies[i] = userJSON(u)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

func (s *server) usersBy(c *call, realm auth.Realm, email string, after uuid.UUID, limit int) ([]auth.User, error) {
	if email == "" {
		return s.Users.List(c.ctx(), realm, after, limit)
	}
	u, err := s.Users.ByEmail(c.ctx(), realm, email)
	if errors.Is(err, auth.ErrUserNotFound) {
		return nil, nil
	}
	return []auth.User{u}, err
}

func (s *server) showUser(c *call, realm auth.Realm) (*reply, error) {
	u, err := s.userOf(c, realm)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, u.Version(), userJSON(u))
}

// patchUser changes the members that are given.
func (s *server) patchUser(c *call, realm auth.Realm) (*reply, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	change := auth.UserChange{Name: f.optStr("name"), Role: (*auth.Role)(f.optStr("role")), Status: (*auth.UserStatus)(f.optStr("status"))}
	f.refuseNull()
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	u, err := s.Users.Update(c.ctx(), c.actor(), realm, id, change, expected...)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, u.Version(), userJSON(u))
}

func (s *server) removeUser(c *call, realm auth.Realm) (*reply, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if err := s.Users.Delete(c.ctx(), c.actor(), realm, id, expected...); err != nil {
		return nil, err
	}
	return &reply{status: http.StatusNoContent}, nil
}

// putPassword ends all sessions of the user, who has to choose another password unless must_change_password is false.
func (s *server) putPassword(c *call, realm auth.Realm) (*reply, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("password")
	password, mustChange := secrets.Text(f.str("password")), f.flagOr("must_change_password", true)
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	if err := s.Users.SetPassword(c.ctx(), c.actor(), realm, id, password, mustChange); err != nil {
		return nil, err
	}
	return s.showUser(c, realm)
}

type linkBody struct {
	URL       string    `json:"url"` // shown this once
	ExpiresAt time.Time `json:"expires_at"`
}

// postLink makes the address at which the user signs in once without a password, also while the account is locked.
func (s *server) postLink(c *call, realm auth.Realm) (*reply, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return nil, err
	}
	token, expires, err := s.Users.IssueLink(c.ctx(), c.actor(), realm, id)
	if err != nil {
		return nil, err
	}
	pages := "/portal"
	if realm == auth.Admins {
		pages = "/admin"
	}
	return dataReply(http.StatusCreated, linkBody{s.PublicURL + pages + "/link/" + url.PathEscape(token.Reveal()), expires.UTC()})
}

type sessionBody struct {
	ID        uuid.UUID `json:"id"`
	Address   string    `json:"address"`
	UserAgent string    `json:"user_agent"`
	ByLink    bool      `json:"by_link"`
	OpenedAt  time.Time `json:"opened_at"`
	SeenAt    time.Time `json:"seen_at"`
	ExpiresAt time.Time `json:"expires_at"`
}

// listUserSessions has no pages: one person has few.
func (s *server) listUserSessions(c *call, realm auth.Realm) (*reply, error) {
	u, err := s.userOf(c, realm)
	if err != nil {
		return nil, err
	}
	found, err := s.Sessions.List(c.ctx(), realm, u.ID)
	if err != nil {
		return nil, err
	}
	bodies := make([]sessionBody, len(found))
	for i, x := range found {
		bodies[i] = sessionBody{x.ID, x.Address, x.UserAgent, x.ByLink, x.OpenedAt.UTC(), x.SeenAt.UTC(), x.ExpiresAt.UTC()}
	}
	return dataReply(http.StatusOK, bodies)
}

func (s *server) endUserSessions(c *call, realm auth.Realm) (*reply, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return nil, err
	}
	if _, err := s.Sessions.EndAll(c.ctx(), c.actor(), realm, id, uuid.Nil); err != nil {
		return nil, err
	}
	return &reply{status: http.StatusNoContent}, nil
}

func (s *server) endUserSession(c *call, realm auth.Realm) (*reply, error) {
	id, err := c.pathID("user_id")
	if err != nil {
		return nil, err
	}
	session, err := c.pathID("session_id")
	if err != nil {
		return nil, err
	}
	if err := s.Sessions.End(c.ctx(), c.actor(), realm, id, session); err != nil {
		return nil, err
	}
	return &reply{status: http.StatusNoContent}, nil
}
