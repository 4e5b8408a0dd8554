package http

import (
	"errors"
	"net/http"
	"net/url"
	"path"
	"strings"
	"time"

	"converger/internal/auth"
)

// Names of the cookies of an area, ahead of the prefix by which browsers keep them to this host (cookieName).
const (
	sessionCookie = "session"
	deviceCookie  = "device"
	noticeCookie  = "notice"
)

// cookieName is a cookie's name in an area: a person may be signed in to both. Over https it has the prefix with which
// browsers refuse it from other hosts and from plain http.
func (s *server) cookieName(a area, what string) string {
	name := "cvg_" + strings.TrimPrefix(a.home(), "/") + "_" + what
	if s.secure {
		return "__Host-" + name
	}
	return name
}

// setCookie sends a cookie that no script reads and no other site's request carries, but for links that are followed.
// life 0 keeps it until the browser closes, a negative one deletes it.
func (s *server) setCookie(c *call, a area, what, value string, life time.Duration) {
	http.SetCookie(c, &http.Cookie{
		Name: s.cookieName(a, what), Value: value, Path: "/", MaxAge: int(life.Seconds()),
		HttpOnly: true, Secure: s.secure, SameSite: http.SameSiteLaxMode,
	})
}

func (s *server) cookie(c *call, a area, what string) string {
	cookie, err := c.r.Cookie(s.cookieName(a, what))
	if err != nil {
		return ""
	}
	return cookie.Value
}

// signInRequired is the refusal of a request without a session. Browsers are led to the form (see server.detour).
func signInRequired() *problem {
	return newProblem(codeSignInRequired, "This page needs a session: sign in.").with("Www-Authenticate", `Session realm="converger"`)
}

// parseSession takes the session's token out of the cookie, without the database. One that nobody issued counts as a guess.
func (s *server) parseSession(c *call, a area) error {
	text := s.cookie(c, a, sessionCookie)
	if text == "" {
		return signInRequired()
	}
	digest, err := s.Sessions.Parse(text)
	if err != nil {
		s.setCookie(c, a, sessionCookie, "", -time.Second)
		_, err := s.stranger(c, signInRequired())
		return err
	}
	c.digest = digest
	return nil
}

// loadSession finds the session and its person as they are now, and checks what the route demands of them.
func (s *server) loadSession(c *call, rt *route) error {
	session, err := s.Sessions.Load(c.ctx(), rt.area == areaPortal, c.digest)
	if errors.Is(err, auth.ErrUnknown) { // ended: it was ours once, so it is no guess
		s.setCookie(c, rt.area, sessionCookie, "", -time.Second)
		return signInRequired()
	}
	if err != nil {
		return err
	}
	c.session = &session
	if id, ok := session.User.Realm.Tenant(); ok {
		if c.Tenant, ok = s.Directory.Tenant(id); !ok { // made a moment ago, on another node
			if s.Directory.Miss(c.ctx()) {
				c.Tenant, ok = s.Directory.Tenant(id)
			}
			if !ok {
				return signInRequired()
			}
		}
	}
	if session.User.MustChangePassword && !rt.anyPassword {
		return newProblem(codePasswordChange, "The password was given to you by somebody else. Choose your own first.")
	}
	if rt.right != 0 && !session.User.May(rt.right) {
		return newProblem(codeInsufficientRole, "Your role, %s, does not allow this.", session.User.Role)
	}
	return nil
}

// who is the person whom the frame of the page names.
func (c *call) who() *who {
	if c.session == nil {
		return nil
	}
	u := c.session.User
	w := &who{Name: u.Name, Role: roleName(u.Role)}
	if w.Name == "" {
		w.Name = u.Email
	}
	if c.Tenant != nil {
		w.Role += ", " + c.Tenant.Name
	}
	return w
}

func roleName(r auth.Role) string { return strings.ReplaceAll(string(r), "_", " ") }

// may tells whether the person may do something; pages leave out what is not.
func (c *call) may(r auth.Right) bool { return c.session != nil && c.session.User.May(r) }

// detour is where a browser is sent instead of an error that a form cures: to sign in, or to choose a password. "" is
// nowhere. Too many requests are no such error: whoever is refused by a limit is still signed in.
func (s *server) detour(c *call, p *problem) string {
	a := c.area()
	if a == areaNone || excludesHTML(c.r.Header) {
		return ""
	}
	switch p.code {
	case codeSignInRequired:
	case codePasswordChange:
		return a.home() + "/password"
	default:
		return ""
	}
	to := a.home() + "/login"
	if c.r.Method == http.MethodGet && c.r.URL.Path != a.home() {
		to += "?" + url.Values{"next": {c.r.URL.RequestURI()}}.Encode()
	}
	return to
}

// excludesHTML tells whether the Accept header leaves no room for a page.
func excludesHTML(h http.Header) bool {
	values := h["Accept"]
	if len(values) == 0 || acceptsHTML(h) {
		return false
	}
	for _, line := range values {
		for part := range strings.SplitSeq(line, ",") {
			name, params, _ := strings.Cut(part, ";")
			if name = strings.TrimSpace(name); (name == "*/*" || name == "text/*") && !refused(params) {
				return false
			}
		}
	}
	return true
}

// safeNext is where to go after signing in: a page of the area, named by its path on this hub and nothing else; the
// area's home in place of anything that is not that.
func safeNext(a area, text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "" || u.Host != "" || u.User != nil || u.Opaque != "" || len(text) > 2000 ||
		strings.ContainsFunc(text+u.Path, func(r rune) bool { return r == '\\' || r < ' ' || r == 0x7f }) ||
		path.Clean(u.Path) != u.Path || areaOf(u.Path) != a {
		return a.home()
	}
	next := u.EscapedPath()
	if u.RawQuery != "" {
		next += "?" + u.RawQuery
	}
	return next
}

// admits refuses everything of the administration to addresses that are not listed, and to those behind a proxy that was
// not declared, or does not tell them: who they are can't be known.
func (s *server) admits(c *call, a area) error {
	switch {
	case a != areaAdmin:
		return nil
	case c.doubt == doubtUnnamed:
		return newProblem(codeAddressRefused, "The request came through the proxy %s, which does not name your address in X-Forwarded-For in a way that "+
			"can be read, so whether it is listed can't be known. Have the proxy add the address to X-Forwarded-For.", c.ip)
	case c.doubt == doubtUndeclared:
		return newProblem(codeProxyUndeclared, "The request came through a proxy that is not listed in TRUSTED_PROXIES (%s), so "+
			"whose it is can't be known. List the proxy there, and the administration is reachable through it.", c.ip)
	case !isTrusted(c.ip, s.AdminNets):
		return newProblem(codeAddressRefused, "The administration is not open to your address, %s. ADMIN_IP_WHITELIST lists the addresses that it is open to.", c.ip)
	}
	return nil
}

// fromOurPages refuses a change that did not come from a page of this hub. Browsers tell; programs, which send neither
// header and no cookies that they were not given, pass.
func (s *server) fromOurPages(r *http.Request) error {
	refusal := func(origin string) error {
		return newProblem(codeCrossOrigin, "The form was sent by a page of %s, and this hub is reached at %s (PUBLIC_URL). If you opened "+
			"this hub's own page, PUBLIC_URL does not name the address in your browser.", origin, s.origin)
	}
	source := r.Header.Get("Origin")
	if err := s.crossOrigin.Check(r); err != nil {
		if source == "" {
			source = "another site"
		}
		return refusal(truncate(source, 200))
	}
	switch r.Method {
	case http.MethodGet, http.MethodHead, http.MethodOptions:
		return nil
	}
	if r.Header.Get("Sec-Fetch-Site") != "" {
		return nil // said by the browser, and checked above
	}
	// Older browsers. The check above compares hosts only, and does not read Referer.
	if source == "" {
		if source = r.Header.Get("Referer"); source == "" {
			return nil
		}
	}
	u, err := url.Parse(source)
	if err != nil || u.Scheme == "" || u.Host == "" {
		return refusal(truncate(source, 200))
	}
	origin := u.Scheme + "://" + u.Host
	own, _ := url.Parse(s.origin)
	if !strings.EqualFold(origin, s.origin) && (own == nil || own.Scheme != u.Scheme || !strings.EqualFold(u.Host, r.Host)) {
		return refusal(truncate(origin, 200))
	}
	return nil
}

// notices are what a page says after a form has done its work, by the code in the cookie that carries it over.
var notices = map[string]string{
	"tenant_created":   "The tenant is there.",
	"tenant_suspended": "The tenant is suspended: nothing is accepted for it any more.",
	"tenant_activated": "The tenant is active again.",
	"limit_saved":      "The limit is in force.",
	"limit_zero":       "The limit is in force, and it is 0: every request is refused until you raise it.",
	"limit_removed":    "The tenant's own limit is gone; that of the installation is in force.",
	"usage_cleared":    "The counter is reset on every node.",
	"password_changed": "The password is changed. All your other sessions have ended.",
	"session_ended":    "The session has ended.",
	"sessions_ended":   "All your other sessions have ended.",
	"signed_out":       "You are signed out.",
}

// partly are the notices of what was done in part.
var partly = map[string]string{
	"usage_cleared_partly":   "The counter is reset at the nodes that answered. “Look at this first” names those that did not: when they are back look it up, and reset it again if need be.",
	"usage_kept_partly":      "What the nodes have counted themselves is reset. The count at Redis stands, since Redis can't be asked: reset it again when it answers.",
	"usage_elsewhere_partly": "The counter is reset at the nodes below. There are others that count for themselves and can't be asked from here: reset it there too.",
}

// done sends the browser on to a page that says what was done.
func (s *server) done(c *call, notice, to string) *reply {
	s.setCookie(c, c.route.area, noticeCookie, notice, time.Minute)
	return s.seeOther(to)
}

// takeNotice is what the page is to say, once: what was done, or what was done in part.
func (s *server) takeNotice(c *call) (done, part string) {
	code := s.cookie(c, c.area(), noticeCookie)
	if code == "" || c.r.Method != http.MethodGet {
		return "", ""
	}
	s.setCookie(c, c.area(), noticeCookie, "", -time.Second)
	return notices[code], partly[code]
}
