package http

import (
	"bytes"
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

const testPassword = "correct horse battery"

// browser is what a browser says that it takes.
func browser(r *http.Request) {
	r.Header.Set("Accept", "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8")
	r.Header.Set("User-Agent", "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/150.0.0.0 Safari/537.36")
}

// cookie brings a cookie of an area.
func (f *front) withCookie(a area, what, value string) option {
	return func(r *http.Request) { r.AddCookie(&http.Cookie{Name: f.cookieName(a, what), Value: value}) }
}

// post sends a page's form, as a browser does.
func (f *front) post(t testing.TB, path string, values url.Values, options ...option) answer {
	t.Helper()
	options = append([]option{browser, header("Content-Type", "application/x-www-form-urlencoded")}, options...)
	return f.call(t, "POST", path, values.Encode(), options...)
}

// show asks for a page, as a browser does.
func (f *front) show(t testing.TB, path string, options ...option) answer {
	t.Helper()
	return f.call(t, "GET", path, "", append([]option{browser}, options...)...)
}

// newUser makes a user with the password of the tests.
func (f *front) newUser(t testing.TB, realm auth.Realm, email string, role auth.Role) auth.User {
	t.Helper()
	u, err := f.Users.Create(t.Context(), testActor, realm, auth.NewUser{Email: email, Role: role, Password: testPassword})
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// signedIn gives the cookie of a new session of a user of the realm.
func (f *front) signedIn(t testing.TB, realm auth.Realm, email string) option {
	t.Helper()
	c := auth.Credentials{Email: email, Password: testPassword}
	a := areaAdmin
	if id, ok := realm.Tenant(); ok {
		tenant, err := f.Tenants.Get(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		a, c.Portal, c.Tenant = areaPortal, true, tenant.Name
	}
	in, err := f.SignIn.Password(t.Context(), auth.Visitor{IP: netip.MustParseAddr("192.0.2.1"), UserAgent: "a test"}, c)
	if err != nil {
		t.Fatal(err)
	}
	return f.withCookie(a, sessionCookie, in.Token.Reveal())
}

// sessionOf is the id of the session whose cookie this is.
func (f *front) sessionOf(t testing.TB, cookie option) uuid.UUID {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), "GET", "/admin", nil)
	cookie(r)
	c, err := r.Cookie(f.cookieName(areaAdmin, sessionCookie))
	if err != nil {
		t.Fatal(err)
	}
	s, err := f.Sessions.Load(t.Context(), false, must(f.Sessions.Parse(c.Value)))
	if err != nil {
		t.Fatal(err)
	}
	return s.ID
}

// asAdmin makes an administrator of the role, and gives the cookie of a session.
func (f *front) asAdmin(t testing.TB, role auth.Role) option {
	t.Helper()
	email := string(role) + "@example.com"
	f.newUser(t, auth.Admins, email, role)
	return f.signedIn(t, auth.Admins, email)
}

// asOwner makes an owner of the front's tenant, and gives the cookie of a session.
func (f *front) asOwner(t testing.TB) option {
	t.Helper()
	realm := auth.TenantRealm(f.tenant.ID)
	f.newUser(t, realm, "owner@acme.example", auth.RoleOwner)
	return f.signedIn(t, realm, "owner@acme.example")
}

func (a answer) has(t testing.TB, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if !bytes.Contains(a.body, []byte(p)) {
			t.Errorf("the page lacks %q:\n%s", p, a.body)
		}
	}
}

func (a answer) lacks(t testing.TB, parts ...string) {
	t.Helper()
	for _, p := range parts {
		if bytes.Contains(a.body, []byte(p)) {
			t.Errorf("the page has %q:\n%s", p, a.body)
		}
	}
}

// leads checks where an answer sends the browser.
func (a answer) leads(t testing.TB, to string) {
	t.Helper()
	if a.StatusCode != http.StatusSeeOther || a.Header.Get("Location") != to {
		t.Fatalf("%d to %q, want 303 to %q: %s", a.StatusCode, a.Header.Get("Location"), to, a.body)
	}
}

// cookieOf finds what the answer sets.
func (f *front) cookieOf(a answer, ar area, what string) *http.Cookie {
	for _, c := range a.Cookies() {
		if c.Name == f.cookieName(ar, what) {
			return c
		}
	}
	return nil
}

// unlimited switches the budget of sessions off, for tests that open more pages than a person.
func unlimited(d *Deps) {
	limits(`{"web_page":"off","unknown_caller":"off"}`)(d)
}

func TestSignInAndOut(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.newUser(t, auth.Admins, "ada@example.com", auth.RoleAdmin)
	f.newUser(t, auth.TenantRealm(f.tenant.ID), "bo@acme.example", auth.RoleMember)
	for _, tt := range []struct {
		a     area
		right url.Values
		next  string
	}{
		{areaAdmin, url.Values{"email": {" ADA@example.com "}, "password": {testPassword}}, "/admin/tenants?q=x"},
		{areaPortal, url.Values{"tenant": {" acme"}, "email": {"Bo@Acme.example"}, "password": {testPassword}}, "/portal/account"},
	} {
		t.Run(areas[tt.a].place, func(t *testing.T) { // one after the other: each counts the queries of all
			home := tt.a.home()
			f.show(t, home).leads(t, home+"/login")
			f.show(t, tt.next).leads(t, home+"/login?"+url.Values{"next": {tt.next}}.Encode())
			queries := f.queries.Count()
			page := f.show(t, home+"/login?"+url.Values{"next": {tt.next}}.Encode())
			page.is(t, 200, "")
			page.has(t, `name="next" value="`+strings.ReplaceAll(tt.next, "&", "&amp;")+`"`, "autofocus")
			if n := f.queries.Count() - queries; n != 0 {
				t.Errorf("showing the form costs %d queries", n)
			}

			empty := f.post(t, home+"/login", url.Values{})
			empty.is(t, 422, "")
			empty.has(t, "Enter your email.", `aria-invalid="true"`, "<title>Error: Sign in")
			wrong := url.Values{"next": {tt.next}}
			for name, v := range tt.right {
				wrong[name] = v
			}
			wrong.Set("password", "wrong-canary")
			refused := f.post(t, home+"/login", wrong)
			refused.is(t, 401, "")
			refused.has(t, "is not right", tt.right.Get("email"), `name="next"`, `role="alert"`)
			refused.lacks(t, "wrong-canary")
			if f.cookieOf(refused, tt.a, sessionCookie) != nil {
				t.Error("a refusal sets a session")
			}

			right := url.Values{"next": {tt.next}}
			for name, v := range tt.right {
				right[name] = v
			}
			in := f.post(t, home+"/login", right)
			in.leads(t, tt.next)
			session, device := f.cookieOf(in, tt.a, sessionCookie), f.cookieOf(in, tt.a, deviceCookie)
			for _, c := range []*http.Cookie{session, device} {
				if c == nil || !c.HttpOnly || !c.Secure || c.SameSite != http.SameSiteLaxMode || c.Path != "/" || c.Domain != "" || !strings.HasPrefix(c.Name, "__Host-") {
					t.Fatalf("cookie %+v", c)
				}
			}
			own := f.withCookie(tt.a, sessionCookie, session.Value)
			mine := f.show(t, home, own)
			mine.is(t, 200, "")
			mine.has(t, "Sign out", `aria-current="page"`)
			if got := mine.Header.Get("Cache-Control"); got != "no-store" {
				t.Errorf("Cache-Control %q", got)
			}
			f.show(t, (areaAdmin+areaPortal-tt.a).home(), f.withCookie(areaAdmin+areaPortal-tt.a, sessionCookie, session.Value)).
				leads(t, (areaAdmin+areaPortal-tt.a).home()+"/login") // no session of the other area

			out := f.post(t, home+"/logout", nil, own)
			out.leads(t, home+"/login")
			if c := f.cookieOf(out, tt.a, sessionCookie); c == nil || c.MaxAge >= 0 {
				t.Errorf("signing out leaves the cookie: %v", c)
			}
			said := f.show(t, home+"/login", f.withCookie(tt.a, noticeCookie, f.cookieOf(out, tt.a, noticeCookie).Value))
			said.has(t, "You are signed out.")
			if c := f.cookieOf(said, tt.a, noticeCookie); c == nil || c.MaxAge >= 0 {
				t.Error("the notice would be shown again")
			}
			f.show(t, home, own).leads(t, home+"/login")
		})
	}
}

// The lock shows on the form, and sends nobody away; the owner's device still gets in.
func TestSignInLocked(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.newUser(t, auth.Admins, "ada@example.com", auth.RoleAdmin)
	right := url.Values{"email": {"ada@example.com"}, "password": {testPassword}}
	in := f.post(t, "/admin/login", right)
	in.leads(t, "/admin")
	known := f.withCookie(areaAdmin, deviceCookie, f.cookieOf(in, areaAdmin, deviceCookie).Value)
	f.AdminNets = append(f.AdminNets, netip.MustParsePrefix("198.51.100.0/24"))
	stranger := func(i int) option { return func(r *http.Request) { r.RemoteAddr = fmt.Sprintf("198.51.100.%d:1", i) } }
	for i := range 5 {
		f.post(t, "/admin/login", url.Values{"email": {"ada@example.com"}, "password": {"guess"}}, stranger(i+1)).is(t, 401, "")
	}
	queries := f.queries.Count()
	locked := f.post(t, "/admin/login", right, stranger(9))
	if locked.StatusCode != 429 || locked.Header.Get("Retry-After") == "" || f.queries.Count() != queries {
		t.Fatalf("the sixth: %s, Retry-After %q, %d queries", locked, locked.Header.Get("Retry-After"), f.queries.Count()-queries)
	}
	locked.has(t, "Too many attempts have failed", "ada@example.com", "<form")
	f.post(t, "/admin/login", right, known).leads(t, "/admin")
}

// Each locked device of an account is shown apart, and let in by its own subject: the others, and the account, stay as they are.
func TestLockedDevicesAreResetApart(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.newUser(t, auth.Admins, "ada@example.com", auth.RoleAdmin)
	f.AdminNets = append(f.AdminNets, netip.MustParsePrefix("198.51.100.0/24"))
	attempts := 0
	try := func(password string, o ...option) int {
		attempts++ // each from another address
		o = append(o, from(fmt.Sprintf("198.51.100.%d:1", attempts)))
		return f.post(t, "/admin/login", url.Values{"email": {"ada@example.com"}, "password": {password}}, o...).StatusCode
	}
	var devices []option
	for range 2 {
		in := f.post(t, "/admin/login", url.Values{"email": {"ada@example.com"}, "password": {testPassword}})
		devices = append(devices, f.withCookie(areaAdmin, deviceCookie, f.cookieOf(in, areaAdmin, deviceCookie).Value))
	}
	locked := func() (n []bool) {
		for _, d := range devices {
			n = append(n, try(testPassword, d) == http.StatusTooManyRequests)
		}
		return append(n, try(testPassword) == http.StatusTooManyRequests)
	}
	for range 5 {
		try("guess", devices[0])
		try("guess", devices[1])
		try("guess")
	}
	if got := fmt.Sprint(locked()); got != "[true true true]" {
		t.Fatalf("locked: %s", got)
	}
	a := well(t, f.call(t, "GET", managementPrefix+"/rate_limits", "", f.ops()))
	free := map[string]bool{}
	for _, top := range a.get(t, "data", "top_refused", "login_account").([]any) {
		subject := top.([]any)[0].(string)
		if free[subject] || !strings.HasPrefix(subject, "admin ada@example.com") {
			t.Errorf("shown twice, or as somebody else: %s", subject)
		}
		free[subject] = true
		usage := managementPrefix + "/rate_limits/usage?" + url.Values{"bucket": {"login_account"}, "subject": {subject}}.Encode()
		if a := well(t, f.call(t, "GET", usage, "", f.ops())); a.get(t, "data", "subject") != subject || a.get(t, "data", "used") != 5.0 {
			t.Errorf("%s: %s", subject, a)
		}
		if a := well(t, f.call(t, "DELETE", usage, "", f.ops())); a.get(t, "data", "cleared") != true {
			t.Errorf("%s: %s", subject, a)
		}
		still := 0
		for _, l := range locked() {
			if l {
				still++
			}
		}
		if want := 3 - len(free); still != want {
			t.Errorf("%d of 3 are locked after %d resets, want %d", still, len(free), want)
		}
	}
	if len(free) != 3 {
		t.Errorf("shown are %v, want the account and two devices", free)
	}
}

// next leads to a page of the area and nowhere else.
func TestSafeNext(t *testing.T) {
	t.Parallel()
	tests := map[string]string{
		"": "/admin", "/admin": "/admin", "/admin/tenants?q=a%26b&cursor=x": "/admin/tenants?q=a%26b&cursor=x", "/admin/tenants/%20x": "/admin/tenants/%20x",
		"/portal": "/admin", "/administrator": "/admin", "/": "/admin", "/api/v1/management/tenants": "/admin",
		"//evil.test": "/admin", `/\evil.test`: "/admin", `\\\\evil.test`: "/admin", "https:evil.test": "/admin", "%2f%2fevil.test": "/admin",
		"/%09/evil.test": "/admin", "javascript:1": "/admin", "https://evil.test/admin": "/admin", "//evil.test/admin": "/admin", "///admin": "/admin",
		"/admin/../..//evil.test": "/admin", "/admin//evil.test": "/admin", "/admin/..": "/admin", "/admin/%0d%0aLocation:x": "/admin", "/admin\t": "/admin",
		`/admin/\evil.test`: "/admin", "/admin/%5cevil.test": "/admin", "\u0020/admin": "/admin", "admin": "/admin", "/admin#x": "/admin", "/admin:80@evil.test": "/admin",
		"http:/admin": "/admin", "/admin?" + strings.Repeat("x", 3000): "/admin", "%zz": "/admin",
	}
	for in, want := range tests {
		if got := safeNext(areaAdmin, in); got != want {
			t.Errorf("next=%q leads to %q, want %q", in, got, want)
		}
	}
}

func FuzzSafeNext(f *testing.F) {
	for _, s := range []string{"//evil.test", "/admin/tenants?q=1", `/\evil`, "/admin/%2e%2e/x", "https:evil"} {
		f.Add(s)
	}
	base, err := url.Parse("https://hub.example/admin/login")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, in string) {
		got := safeNext(areaAdmin, in)
		u, err := base.Parse(got)
		if err != nil || u.Host != "hub.example" || u.Scheme != "https" || u.User != nil || areaOf(u.Path) != areaAdmin {
			t.Errorf("next=%q leads to %q (%v)", in, u, err)
		}
	})
}

// Forms are taken from our own pages only.
func TestForeignForms(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin := f.asAdmin(t, auth.RoleAdmin)
	before := f.rows(t)
	hub := func(r *http.Request) { r.Host = "hub.example" }
	for name, tt := range map[string]struct {
		header, value string
		ok            bool
	}{
		"our origin":                 {"Origin", "https://hub.example", true},
		"our page":                   {"Referer", "https://hub.example/admin/tenants", true},
		"a program":                  {"X-Nothing", "x", true},
		"browser: same origin":       {"Sec-Fetch-Site", "same-origin", true},
		"browser: typed":             {"Sec-Fetch-Site", "none", true},
		"another site":               {"Origin", "https://evil.test", false},
		"a sibling":                  {"Origin", "https://other.hub.example", false},
		"our host without TLS":       {"Origin", "http://hub.example", false},
		"our host, another port":     {"Origin", "https://hub.example:8443", false},
		"null":                       {"Origin", "null", false},
		"nonsense":                   {"Origin", "hub.example", false},
		"another page":               {"Referer", "https://evil.test/https://hub.example/", false},
		"a page without TLS":         {"Referer", "http://hub.example/admin", false},
		"browser: cross-site":        {"Sec-Fetch-Site", "cross-site", false},
		"browser: sibling":           {"Sec-Fetch-Site", "same-site", false},
		"browser: says what is new":  {"Sec-Fetch-Site", "someday", false},
		"the name as a beginning":    {"Origin", "https://hub.example.evil.test", false},
		"the name as a person":       {"Referer", "https://hub.example@evil.test/", false},
		"the name behind a fragment": {"Referer", "https://evil.test/#https://hub.example", false},
	} {
		for _, path := range []string{"/admin/tenants", "/admin/login", "/portal/login"} {
			a := f.post(t, path, url.Values{}, admin, hub, header(tt.header, tt.value))
			if refused := a.StatusCode == 403 && bytes.Contains(a.body, []byte(codeCrossOrigin)); refused == tt.ok {
				t.Errorf("%s, POST %s: %d, want it taken: %v", name, path, a.StatusCode, tt.ok)
			}
			if !tt.ok && !bytes.Contains(a.body, []byte("PUBLIC_URL")) {
				t.Errorf("%s: the refusal does not name the setting: %s", name, a.body)
			}
		}
		f.show(t, "/admin/tenants", admin, hub, header(tt.header, tt.value)).is(t, 200, "") // looking changes nothing
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("tables changed:\n%s", diff)
	}
}

// Behind a proxy that ends TLS, rewrites Host, listens on another port and cuts a path prefix, PUBLIC_URL makes it work.
func TestPagesBehindProxy(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) {
		d.PublicURL = "https://hub.example:8443/chat/"
		d.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	})
	f.newUser(t, auth.Admins, "ada@example.com", auth.RoleAdmin)
	proxy := func(r *http.Request) {
		r.Host, r.RemoteAddr = "node-1:4000", "10.0.0.1:5"
		r.Header.Set("X-Forwarded-For", "192.0.2.7")
		r.Header.Set("X-Forwarded-Proto", "https")
	}
	f.show(t, "/admin/tenants", proxy).leads(t, "/chat/admin/login?next=%2Fadmin%2Ftenants")
	f.show(t, "/admin/login", proxy).has(t, `action="/chat/admin/login"`, `href="/chat/static/site.css?v=`)
	right := url.Values{"email": {"ada@example.com"}, "password": {testPassword}, "next": {"/admin/tenants"}}
	f.post(t, "/admin/login", right, proxy, header("Origin", "https://hub.example")).has(t, "PUBLIC_URL", "https://hub.example:8443")
	in := f.post(t, "/admin/login", right, proxy, header("Origin", "https://hub.example:8443"))
	in.leads(t, "/chat/admin/tenants")
	f.show(t, "/admin/tenants", proxy, f.withCookie(areaAdmin, sessionCookie, f.cookieOf(in, areaAdmin, sessionCookie).Value)).has(t, `href="/chat/admin/tenants/`)
}

// Without TLS cookies have no Secure, for browsers would not send them back; and nothing comes from the Host header.
func TestPagesWithoutTLS(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.PublicURL = "http://127.0.0.1:4000" })
	f.newUser(t, auth.Admins, "ada@example.com", auth.RoleAdmin)
	right := url.Values{"email": {"ada@example.com"}, "password": {testPassword}}
	in := f.post(t, "/admin/login", right, header("Origin", "http://localhost:4000"), func(r *http.Request) { r.Host = "localhost:4000" })
	in.leads(t, "/admin")
	if c := f.cookieOf(in, areaAdmin, sessionCookie); c == nil || c.Secure || !c.HttpOnly || strings.HasPrefix(c.Name, "__") {
		t.Errorf("cookie %+v", c)
	}
	for _, path := range []string{"/admin/", "//evil.test/..", "/admin", "/portal/account"} {
		a := f.show(t, path, func(r *http.Request) { r.Host = "evil.test" })
		if strings.Contains(a.Header.Get("Location")+string(a.body), "evil") {
			t.Errorf("%s: Location %q: %s", path, a.Header.Get("Location"), a.body)
		}
	}
}

// Administration is open to listed addresses only, found as everywhere; behind a proxy that nobody declared, to none. All
// of it, and ahead of the database.
func TestAdminAddresses(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) {
		d.AdminNets = []netip.Prefix{netip.MustParsePrefix("192.0.2.0/28"), netip.MustParsePrefix("2001:db8::/32"), netip.MustParsePrefix("10.9.9.9/32")}
		d.TrustedProxies = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}
	})
	admin := f.asAdmin(t, auth.RoleSuperAdmin)
	tests := map[string]struct {
		options []option
		status  int
		code    code
	}{
		"listed":                       {[]option{from("192.0.2.1:5")}, 200, ""},
		"IPv6":                         {[]option{from("[2001:db8::7]:5")}, 200, ""},
		"mapped":                       {[]option{from("[::ffff:192.0.2.1]:5")}, 200, ""},
		"not listed":                   {[]option{from("192.0.2.200:5")}, 403, codeAddressRefused},
		"through a declared proxy":     {[]option{from("10.0.0.1:5"), header("X-Forwarded-For", "192.0.2.1")}, 200, ""},
		"through it, not listed":       {[]option{from("10.0.0.1:5"), header("X-Forwarded-For", "203.0.113.1")}, 403, codeAddressRefused},
		"claims to be listed":          {[]option{from("203.0.113.1:5"), header("X-Forwarded-For", "192.0.2.1")}, 403, codeProxyUndeclared},
		"through an undeclared proxy":  {[]option{from("192.0.2.1:5"), header("X-Forwarded-For", "203.0.113.1")}, 403, codeProxyUndeclared},
		"the same, by another header":  {[]option{from("192.0.2.1:5"), header("X-Real-Ip", "203.0.113.1")}, 403, codeProxyUndeclared},
		"the same, by the newest":      {[]option{from("192.0.2.1:5"), header("Forwarded", "for=203.0.113.1")}, 403, codeProxyUndeclared},
		"the same, as some clouds say": {[]option{from("192.0.2.1:5"), header("True-Client-Ip", "203.0.113.1")}, 403, codeProxyUndeclared},
		"from a listed proxy":          {[]option{from("10.9.9.9:5")}, 200, ""},
		"it names no client":           {[]option{from("10.9.9.9:5"), header("X-Forwarded-For", "unknown")}, 403, codeAddressRefused},
		"it does so elsewhere":         {[]option{from("10.9.9.9:5"), header("X-Real-Ip", "203.0.113.1")}, 403, codeAddressRefused},
	}
	for name, tt := range tests {
		a := f.call(t, "GET", "/admin/tenants", "", append(tt.options, admin)...)
		if a.is(t, tt.status, tt.code); tt.code == "" {
			continue
		}
		f.call(t, "GET", "/portal/login", "", tt.options...).is(t, 200, "") // the portal is open to all
		queries := f.queries.Count()
		for i := range f.routes {
			if rt := &f.routes[i]; rt.area == areaAdmin {
				path := regexp.MustCompile(`\{[a-z_]+\}`).ReplaceAllString(rt.pattern, uuid.NewString())
				f.call(t, rt.method, path, "", append(tt.options, admin)...).is(t, 403, tt.code)
			}
		}
		for _, r := range [][2]string{{"GET", "/admin/nothing"}, {"GET", "/admin/"}, {"DELETE", "/admin/tenants"}, {"BREW", "/admin"}} {
			f.call(t, r[0], r[1], "", tt.options...).is(t, 403, tt.code)
		}
		if n := f.queries.Count() - queries; n != 0 {
			t.Errorf("%s: refusals cost %d queries", name, n)
		}
		page := f.show(t, "/admin/login", tt.options...)
		page.has(t, "<h1>", map[code]string{codeAddressRefused: "ADMIN_IP_WHITELIST", codeProxyUndeclared: "TRUSTED_PROXIES"}[tt.code])
	}
}

// A session that floods is told to wait, ahead of the database, and not to sign in; others are not disturbed. Cookies that
// nobody issued are guesses.
func TestPageLimits(t *testing.T) {
	t.Parallel()
	f := newFront(t, limits(`{"web_page":{"limit":3,"scale_ms":60000}}`))
	admin := f.asAdmin(t, auth.RoleAdmin)
	for _, path := range []string{"/admin", "/admin/tenants", "/admin/account"} {
		a := f.show(t, path, admin)
		a.is(t, 200, "")
		if a.Header.Get("Ratelimit-Policy") != `"web_page";q=3;w=60` {
			t.Errorf("RateLimit-Policy %q", a.Header.Get("Ratelimit-Policy"))
		}
	}
	queries := f.queries.Count()
	for _, a := range []answer{f.show(t, "/admin/tenants", admin), f.post(t, "/admin/tenants", url.Values{"name": {"x"}}, admin)} {
		if a.StatusCode != 429 || a.Header.Get("Retry-After") == "" || a.Header.Get("Location") != "" || f.cookieOf(a, areaAdmin, sessionCookie) != nil {
			t.Errorf("the fourth: %d %v", a.StatusCode, a.Header)
		}
		a.has(t, "Please wait", "come back in")
	}
	if n := f.queries.Count() - queries; n != 0 {
		t.Errorf("refusals cost %d queries", n)
	}
	f.show(t, "/admin", f.signedIn(t, auth.Admins, "admin@example.com")).is(t, 200, "")

	queries = f.queries.Count()
	for i := range 31 {
		a := f.show(t, "/admin", f.withCookie(areaAdmin, sessionCookie, fmt.Sprintf("cvg_ses_%d", i)), from("127.0.0.1:1"))
		if i < 30 {
			a.leads(t, "/admin/login")
		} else if a.StatusCode != 429 {
			t.Errorf("guess %d: %d", i, a.StatusCode)
		}
	}
	if n := f.queries.Count() - queries; n != 0 {
		t.Errorf("invented sessions cost %d queries", n)
	}
	f.call(t, "GET", "/admin", "").leads(t, "/admin/login")                                             // curl
	f.call(t, "GET", "/admin", "", header("Accept", "application/json")).is(t, 401, codeSignInRequired) // a program
}

// What a role does not allow is refused wherever it is asked for, and not offered.
func TestViewersLook(t *testing.T) {
	t.Parallel()
	f := newFront(t, unlimited)
	viewer := f.asAdmin(t, auth.RoleViewer)
	limitOverride(t, f, `{"limit":7,"scale_ms":1000}`, "upload")
	before, tried := f.rows(t), 0
	for i := range f.routes {
		rt := &f.routes[i]
		if rt.right == 0 {
			continue
		}
		if rt.method == http.MethodGet {
			t.Errorf("%s %s: looking needs no right", rt.method, rt.pattern)
		}
		tried++
		path := strings.NewReplacer("{tenant_id}", f.tenant.ID.String(), "{bucket}", "upload").Replace(rt.pattern)
		a := f.call(t, rt.method, path, "name=x&limit=1&scale_ms=1&unit=s&algorithm=fixed_window", header("Content-Type", "application/x-www-form-urlencoded"), viewer)
		a.is(t, 403, codeInsufficientRole)
	}
	if tried < 5 {
		t.Errorf("only %d routes need a right", tried)
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("tables changed:\n%s", diff)
	}
	id := f.tenant.ID.String()
	for _, path := range []string{"/admin/tenants", "/admin/tenants/" + id, "/admin/tenants/" + id + "/limits", "/admin/tenants/" + id + "/limits/upload"} {
		page := f.show(t, path, viewer)
		page.is(t, 200, "")
		if n := bytes.Count(page.body, []byte(`method="post"`)); n != 1 { // to sign out
			t.Errorf("%s offers a viewer %d forms:\n%s", path, n, page.body)
		}
	}
}

// Taking rights away holds with the next page.
func TestRightsAreThoseOfNow(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin := f.asAdmin(t, auth.RoleAdmin)
	f.newUser(t, auth.Admins, "root@example.com", auth.RoleSuperAdmin)
	u := must(f.Users.ByEmail(t.Context(), auth.Admins, "admin@example.com"))
	suspend := "/admin/tenants/" + f.tenant.ID.String() + "/suspend"
	f.post(t, suspend, nil, admin).leads(t, "/admin/tenants/"+f.tenant.ID.String())
	role, off := auth.RoleViewer, auth.UserInactive
	must(f.Users.Update(t.Context(), testActor, auth.Admins, u.ID, auth.UserChange{Role: &role}))
	f.post(t, suspend, nil, admin).is(t, 403, "")
	f.show(t, "/admin", admin).has(t, "(viewer)")
	must(f.Users.Update(t.Context(), testActor, auth.Admins, u.ID, auth.UserChange{Status: &off}))
	gone := f.show(t, "/admin", admin)
	gone.leads(t, "/admin/login")
	if c := f.cookieOf(gone, areaAdmin, sessionCookie); c == nil || c.MaxAge >= 0 {
		t.Error("the cookie of an ended session stays")
	}
}

// The portal of a suspended tenant is closed, to open sessions too.
func TestSuspendedTenantsPortal(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	owner := f.asOwner(t)
	f.show(t, "/portal", owner).is(t, 200, "")
	must(f.Tenants.SetStatus(t.Context(), testActor, f.tenant.ID, tenants.StatusSuspended))
	f.refresh(t)
	f.show(t, "/portal", owner).leads(t, "/portal/login")
	f.post(t, "/portal/login", url.Values{"tenant": {"Acme"}, "email": {"owner@acme.example"}, "password": {testPassword}}).is(t, 401, "")
}

func TestTenantPages(t *testing.T) {
	t.Parallel()
	f := newFront(t, unlimited)
	admin := f.asAdmin(t, auth.RoleAdmin)
	for i := range 120 {
		must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: fmt.Sprintf("Shop %03d <b>&", i)}))
	}
	names := func(a answer) []string {
		var out []string
		for _, m := range regexp.MustCompile(`<th scope="row"><a href="[^"]+">([^<]+)</a>`).FindAllSubmatch(a.body, -1) {
			out = append(out, string(m[1]))
		}
		return out
	}
	var all []string
	next := "/admin/tenants?q=shop"
	for pages := 0; next != ""; pages++ {
		a := f.show(t, next, admin)
		a.is(t, 200, "")
		a.lacks(t, "<b>&")
		all = append(all, names(a)...)
		next = ""
		if m := regexp.MustCompile(`href="([^"]+)" rel="next"`).FindSubmatch(a.body); m != nil {
			next = strings.ReplaceAll(string(m[1]), "&amp;", "&")
		}
		if pages > 3 {
			t.Fatal("the pages have no end")
		}
	}
	if len(all) != 120 || !slices.IsSorted(all) || len(slices.Compact(all)) != 120 {
		t.Errorf("%d names over all pages: %v", len(all), all)
	}
	f.show(t, "/admin/tenants?q=nobody", admin).has(t, "No tenant has “nobody” in its name")
	f.show(t, "/admin/tenants?q=%25", admin).has(t, "No tenant has") // a sign and no pattern
	f.show(t, "/admin/tenants?q=shop&cursor=abc", admin).is(t, 400, "")
	f.show(t, "/admin/tenants?q=%00", admin).is(t, 400, "")

	form := f.show(t, "/admin/tenants", admin)
	id := string(regexp.MustCompile(`name="id" value="([^"]+)"`).FindSubmatch(form.body)[1])
	for _, tt := range []struct{ name, says string }{
		{"", "Must not be empty."}, {" x", "Must not begin or end with a space."}, {strings.Repeat("x", 201), "Must have at most 200 characters."}, {"aCME", "Another tenant has this name."},
	} {
		a := f.post(t, "/admin/tenants", url.Values{"name": {tt.name}, "id": {id}}, admin)
		a.is(t, 422, "")
		a.has(t, tt.says, `aria-describedby="name-hint name-error"`, "autofocus", "<details open>", id)
	}
	before := f.rows(t)["tenants"]
	var clicks [3]answer // of an impatient hand
	var wg sync.WaitGroup
	for i := range clicks {
		wg.Go(func() { clicks[i] = f.post(t, "/admin/tenants", url.Values{"name": {"Newcomer"}, "id": {id}}, admin) })
	}
	wg.Wait()
	for _, a := range clicks {
		a.leads(t, "/admin/tenants/"+id)
	}
	if n := f.rows(t)["tenants"] - before; n != 1 {
		t.Errorf("three clicks made %d tenants", n)
	}
	other := f.post(t, "/admin/tenants", url.Values{"name": {"Another"}, "id": {id}}, admin) // the same form, found again by the back button
	if other.StatusCode != 303 || strings.HasSuffix(other.Header.Get("Location"), id) {
		t.Errorf("%d %s", other.StatusCode, other.Header.Get("Location"))
	}
	page := f.show(t, "/admin/tenants/"+id, admin)
	page.has(t, "<h1>Newcomer", "Suspend Newcomer")
	f.post(t, "/admin/tenants/"+id+"/suspend", nil, admin).leads(t, "/admin/tenants/"+id)
	f.show(t, "/admin/tenants/"+id, admin).has(t, "suspended", "Activate Newcomer")
	f.post(t, "/admin/tenants/"+id+"/activate", nil, admin).leads(t, "/admin/tenants/"+id)
	if entry, ok := f.Directory.Tenant(uuid.MustParse(id)); !ok || entry.Status != tenants.StatusActive {
		t.Errorf("in force on this node: %+v", entry)
	}
	var actors []string
	rows, err := f.pool.Query(t.Context(), `SELECT DISTINCT actor_type || ' ' || actor_id FROM audit_log WHERE resource_id = $1`, id)
	if err != nil {
		t.Fatal(err)
	}
	for rows.Next() {
		var s string
		if err := rows.Scan(&s); err != nil {
			t.Fatal(err)
		}
		actors = append(actors, s)
	}
	if len(actors) != 1 || !strings.HasPrefix(actors[0], tenants.ActorAdmin+" ") {
		t.Errorf("the audit log names %v", actors)
	}
	f.show(t, "/admin/tenants/"+uuid.NewString(), admin).is(t, 404, "")
	f.show(t, "/admin/tenants/7", admin).is(t, 400, "")
}

func TestLimitPages(t *testing.T) {
	t.Parallel()
	f := newFront(t, limits(`{"api_read":{"limit":50,"scale_ms":1000,"mode":"count"},"management":"off"}`))
	admin := f.asAdmin(t, auth.RoleAdmin)
	list := "/admin/tenants/" + f.tenant.ID.String() + "/limits"
	page := f.show(t, list, admin)
	page.has(t, "100 per second", "50 per second, only counted", "500 per second", "<code>channel_outbound</code>")
	page.lacks(t, "Rate limiting is off")

	one := list + "/inbound"
	f.show(t, one, admin).has(t, `name="limit" type="text" value="500"`, `<option value="s" selected>seconds`, "up to 1,000 may pass")
	f.show(t, list+"/login_ip", admin).is(t, 404, "")
	f.show(t, list+"/nothing", admin).is(t, 404, "")
	good := url.Values{"limit": {"200"}, "scale_ms": {"2"}, "unit": {"min"}, "algorithm": {"sliding_window"}, "action": {"save"}}
	with := func(name, value string) url.Values {
		v := url.Values{}
		for k, x := range good {
			v[k] = x
		}
		v.Set(name, value)
		return v
	}
	const limits, scales, bursts = "Must be a whole number from 0 (refuse everything) to 1,000,000,000.", "the time from 1 second to 1 day", `id="burst-error">`
	for _, tt := range []struct {
		values url.Values
		field  string
		says   string
	}{
		{with("limit", "-1"), "limit", limits}, {with("limit", "1000000001"), "limit", limits}, {with("limit", "1e3"), "limit", limits}, {with("limit", ""), "limit", limits},
		{with("limit", "99999999999999999999"), "limit", limits}, {with("limit", "1.5"), "limit", limits}, {with("limit", "<i>"), "limit", limits},
		{with("scale_ms", "0"), "scale_ms", scales}, {with("scale_ms", "1441"), "scale_ms", scales}, {with("scale_ms", "x"), "scale_ms", scales},
		{with("scale_ms", "9223372036854775807"), "scale_ms", scales}, {with("unit", "weeks"), "scale_ms", scales}, {with("scale_ms", "-2"), "scale_ms", scales},
		{with("algorithm", "guess"), "algorithm", "Must be one of"}, {with("burst", "5"), "burst", bursts},
		{url.Values{"limit": {"1"}, "scale_ms": {"1"}, "unit": {"s"}, "algorithm": {"token_bucket"}, "burst": {"0"}}, "burst", bursts},
		{url.Values{"limit": {"1"}, "scale_ms": {"24"}, "unit": {"h"}, "algorithm": {"token_bucket"}, "burst": {"1000000"}}, "burst", bursts},
		{url.Values{}, "limit", limits},
	} {
		a := f.post(t, one, tt.values, admin)
		a.is(t, 422, "")
		a.has(t, tt.says, `id="`+tt.field+`-error"`, "<title>Error: ")
		a.lacks(t, "<i>")
		tag := regexp.MustCompile(`<(?:input|select) id="` + tt.field + `"[^>]*>`).Find(a.body)
		for _, want := range []string{`aria-invalid="true"`, "autofocus", tt.field + "-error"} {
			if !bytes.Contains(tag, []byte(want)) {
				t.Errorf("%v: the field lacks %s: %s", tt.values, want, tag)
			}
		}
		if v := tt.values.Get("burst"); v != "" {
			a.has(t, `name="burst" type="text" value="`+v+`"`)
		}
	}
	if own := must(f.Tenants.Get(t.Context(), f.tenant.ID)).Limits; string(own) != "{}" {
		t.Errorf("refused forms saved %s", own)
	}

	f.post(t, one, with("action", "preview"), admin).has(t, "Not saved yet.", "At most 200 webhook requests in any 2 minutes")
	f.show(t, list, admin).has(t, "500 per second")
	saved := f.post(t, one, good, admin)
	saved.leads(t, list)
	after := f.show(t, list, admin, f.withCookie(areaAdmin, noticeCookie, f.cookieOf(saved, areaAdmin, noticeCookie).Value))
	after.has(t, "200 per 2 minutes", "The limit is in force.")
	entry, _ := f.Directory.Tenant(f.tenant.ID)
	if p := f.Limiter.Policy(ratelimit.Inbound, overridesOf(entry), nil); p.Limit() != 200 || p.ScaleMs() != 120_000 || p.Algorithm() != ratelimit.SlidingWindow {
		t.Errorf("in force: %+v", p.Rule())
	}
	f.show(t, one, admin).has(t, `value="200"`, `<option value="min" selected>minutes`, `<option value="sliding_window" selected>`, "Remove the own limit")

	zero := f.post(t, one, url.Values{"limit": {"0"}, "scale_ms": {"2"}, "unit": {"min"}, "algorithm": {"sliding_window"}, "was": f.was(t, one, admin)["was"]}, admin)
	f.show(t, list, admin, f.withCookie(areaAdmin, noticeCookie, f.cookieOf(zero, areaAdmin, noticeCookie).Value)).has(t, "0: refuses everything", "every request is refused until you raise it")
	f.show(t, one, admin).has(t, "Refuses everything.")

	f.post(t, one+"/remove", f.was(t, one, admin), admin).leads(t, list)
	f.post(t, one+"/remove", nil, admin).leads(t, list)
	f.show(t, list, admin).lacks(t, "refuses everything", "200 per 2 minutes")
}

// was is what the form of a limit remembers.
func (f *front) was(t testing.TB, page string, options ...option) url.Values {
	t.Helper()
	found := regexp.MustCompile(`name="was" value="([^"]*)"`).FindSubmatch(f.show(t, page, options...).body)
	if found == nil {
		t.Fatal("the form remembers nothing")
	}
	return url.Values{"was": {html.UnescapeString(string(found[1]))}}
}

// Of two who change a limit at the same time the second is told, and sees what is in force; who meant it sends the form
// again. One form that is sent twice, and changes of other limits, are no conflict.
func TestLimitChangedByTwo(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin := f.asAdmin(t, auth.RoleAdmin)
	list := "/admin/tenants/" + f.tenant.ID.String() + "/limits"
	one := list + "/inbound"
	rule := func(limit string, was url.Values) url.Values {
		return url.Values{"limit": {limit}, "scale_ms": {"1"}, "unit": {"s"}, "algorithm": {"token_bucket"}, "action": {"save"}, "was": was["was"]}
	}
	opened := f.was(t, one, admin)
	f.post(t, list+"/api_read", rule("9", f.was(t, list+"/api_read", admin)), admin).leads(t, list)
	f.post(t, one, rule("111", opened), admin).leads(t, list)
	f.post(t, one, rule("111", opened), admin).leads(t, list)
	late := f.post(t, one, rule("222", opened), admin)
	late.is(t, 409, "")
	late.has(t, "Nothing was saved", `name="limit" type="text" value="222"`, "<strong>111 per second", "<title>Error: ")
	late = f.post(t, one+"/remove", opened, admin)
	late.is(t, 409, "")
	late.has(t, "Nothing was saved", `name="limit" type="text" value="111"`)
	f.show(t, list, admin).has(t, "111 per second")

	// A change that this node has not heard of yet counts too.
	now := f.was(t, one, admin)
	if err := f.Tenants.SetLimit(t.Context(), testActor, f.tenant.ID, "inbound", raw(`{"limit":333,"scale_ms":1000,"algorithm":"fixed_window"}`)); err != nil {
		t.Fatal(err)
	}
	late = f.post(t, one, rule("222", now), admin)
	late.is(t, 409, "")
	late.has(t, "<strong>333 per second")
	found := regexp.MustCompile(`name="was" value="([^"]*)"`).FindSubmatch(late.body)
	f.post(t, one, rule("222", url.Values{"was": {html.UnescapeString(string(found[1]))}}), admin).leads(t, list)
	f.show(t, list, admin).has(t, "222 per second")
	now = f.was(t, one, admin)
	if err := f.Tenants.SetLimit(t.Context(), testActor, f.tenant.ID, "api_read", raw(`{"limit":8,"scale_ms":1000,"algorithm":"fixed_window"}`)); err != nil {
		t.Fatal(err)
	}
	f.post(t, one, rule("223", now), admin).leads(t, list)
	f.show(t, list, admin).has(t, "223 per second", "8 per second")
}

// With limits switched off every page of administration says so, and shows what will be in force again.
func TestLimitsOffBanner(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) {
		d.Limiter = standing(ratelimit.Config{Disabled: true})
	})
	admin := f.asAdmin(t, auth.RoleAdmin)
	limitOverride(t, f, `{"limit":7,"scale_ms":1000}`, "upload")
	for i := range f.routes {
		if rt := &f.routes[i]; rt.area == areaAdmin && rt.method == "GET" && rt.auth == credentialAdmin {
			path := strings.NewReplacer("{tenant_id}", f.tenant.ID.String(), "{bucket}", "upload").Replace(rt.pattern)
			f.show(t, path, admin).has(t, "RATE_LIMIT_ENABLED=false")
		}
	}
	f.show(t, "/admin/tenants/"+f.tenant.ID.String()+"/limits", admin).has(t, "7 per second", "100 per second", "no limit", "<td>5 per minute</td>") // guards stay on
	f.show(t, "/admin/login").lacks(t, "RATE_LIMIT_ENABLED")                                                                                         // no business of strangers
}

// The portal shows what belongs to the session's tenant, whatever else the request says, and no secret.
func TestPortalShowsItsOwn(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	owner := f.asOwner(t)
	other := must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Rival"}))
	f.newChannel(t, other.ID, channel.NewChannel{Name: "rival channel", Type: channel.TypeEcho})
	f.newKey(t, other.ID)
	f.refresh(t)
	limitOverride(t, f, `{"limit":1234,"scale_ms":1000}`, "upload")
	a := f.show(t, "/portal?tenant_id="+other.ID.String()+"&tenant=Rival", owner, header("X-Api-Key", f.newKey(t, other.ID)))
	a.is(t, 200, "")
	a.has(t, "<h1>Acme", "site", "whatsapp_meta", f.webhook.ID.String(), f.key[:13]+"…", "read, write", "1,234 per second", "(owner, Acme)")
	a.lacks(t, "ival", other.ID.String(), f.key, f.webhook.Secret.Reveal(), "app-secret-for-tests", "EAAtoken", "verify-canary")
	empty := f.withCookie(areaPortal, sessionCookie, func() string {
		realm := auth.TenantRealm(must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Empty"})).ID)
		f.refresh(t)
		f.newUser(t, realm, "x@empty.example", auth.RoleViewer)
		in, err := f.SignIn.Password(t.Context(), auth.Visitor{IP: netip.MustParseAddr("192.0.2.1")}, auth.Credentials{Portal: true, Tenant: "Empty", Email: "x@empty.example", Password: testPassword})
		if err != nil {
			t.Fatal(err)
		}
		return in.Token.Reveal()
	}())
	f.show(t, "/portal", empty).has(t, "There is no channel yet.", "There is no API key yet.")
}

// Whoever was given a password chooses another before anything else.
func TestForcedPassword(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	for _, tt := range []struct {
		a     area
		realm auth.Realm
	}{{areaAdmin, auth.Admins}, {areaPortal, auth.TenantRealm(f.tenant.ID)}} {
		role, home := tt.realm.Roles()[0], tt.a.home()
		if _, err := f.Users.Create(t.Context(), testActor, tt.realm, auth.NewUser{Email: "new@example.com", Role: role, Password: testPassword, MustChangePassword: true}); err != nil {
			t.Fatal(err)
		}
		first := url.Values{"tenant": {"Acme"}, "email": {"new@example.com"}, "password": {testPassword}}
		in := f.post(t, home+"/login", first)
		in.leads(t, home+"/password")
		own := f.withCookie(tt.a, sessionCookie, f.cookieOf(in, tt.a, sessionCookie).Value)
		for i := range f.routes {
			if rt := &f.routes[i]; rt.area == tt.a && rt.auth.isSession() && !rt.anyPassword {
				path := regexp.MustCompile(`\{[a-z_]+\}`).ReplaceAllString(rt.pattern, uuid.NewString())
				f.call(t, rt.method, path, "", browser, own).leads(t, home+"/password")
			}
		}
		f.call(t, "GET", home, "", own, header("Accept", "application/json")).is(t, 403, codePasswordChange)
		f.show(t, home+"/password", own).has(t, "Choose a password")
		next := "another good sentence"
		for _, bad := range []struct{ current, password, repeat, says string }{
			{"", next, next, "Is needed."}, {testPassword, "", "", "Is needed."}, {testPassword, next, next + "x", "Is not the same"},
			{testPassword, "short", "short", `id="password-error"`}, {testPassword, strings.Repeat("é", 40), strings.Repeat("é", 40), "72 bytes"}, {"wrong-canary", next, next, `id="current_password-error"`},
		} {
			a := f.post(t, home+"/password", url.Values{"current_password": {bad.current}, "password": {bad.password}, "repeat": {bad.repeat}}, own)
			a.is(t, 422, "")
			a.has(t, bad.says, "autofocus", `aria-invalid="true"`)
			a.lacks(t, "wrong-canary", next)
		}
		elsewhere := f.post(t, home+"/login", first)
		changed := f.post(t, home+"/password", url.Values{"current_password": {testPassword}, "password": {next}, "repeat": {next}}, own)
		changed.leads(t, home+"/account")
		f.show(t, home, own).is(t, 200, "")
		f.show(t, home, f.withCookie(tt.a, sessionCookie, f.cookieOf(elsewhere, tt.a, sessionCookie).Value)).leads(t, home+"/login")
		f.post(t, home+"/login", first).is(t, 401, "")
	}
}

func TestOwnSessions(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.newUser(t, auth.Admins, "ada@example.com", auth.RoleViewer)
	f.newUser(t, auth.Admins, "bo@example.com", auth.RoleSuperAdmin)
	mine, second, third, others := f.signedIn(t, auth.Admins, "ada@example.com"), f.signedIn(t, auth.Admins, "ada@example.com"), f.signedIn(t, auth.Admins, "ada@example.com"), f.signedIn(t, auth.Admins, "bo@example.com")
	ends := regexp.MustCompile(`action="(/admin/sessions/[^"]+/end)"`)
	page := f.show(t, "/admin/account", mine)
	page.has(t, "ada@example.com", "this one", "192.0.2.1", "End all but this one")
	own := ends.FindAllSubmatch(page.body, -1)
	if len(own) != 2 {
		t.Fatalf("%d sessions can be ended, want 2:\n%s", len(own), page.body)
	}
	theirs := ends.FindSubmatch(f.show(t, "/admin/account", f.signedIn(t, auth.Admins, "bo@example.com")).body)[1]
	f.post(t, string(theirs), nil, mine).is(t, 404, "")
	f.show(t, "/admin", others).is(t, 200, "")

	f.post(t, string(own[0][1]), nil, mine).leads(t, "/admin/account")
	left := 0
	for _, s := range []option{second, third} {
		if f.show(t, "/admin", s).StatusCode == 200 {
			left++
		}
	}
	if left != 1 {
		t.Errorf("%d of two sessions are left after one was ended", left)
	}
	f.post(t, "/admin/sessions/end", nil, mine).leads(t, "/admin/account")
	f.show(t, "/admin/account", mine).lacks(t, "End all but this one")
	for _, s := range []option{second, third} {
		f.show(t, "/admin", s).leads(t, "/admin/login")
	}
	f.show(t, "/admin", others).is(t, 200, "")
}

// A link signs in once, by its button and not by being looked at, also when the account is locked.
func TestSignInLink(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	u := f.newUser(t, auth.Admins, "ada@example.com", auth.RoleAdmin)
	for range 5 {
		f.post(t, "/admin/login", url.Values{"email": {"ada@example.com"}, "password": {"guess"}})
	}
	f.post(t, "/admin/login", url.Values{"email": {"ada@example.com"}, "password": {testPassword}}).is(t, 429, "")
	token, _, err := f.Users.IssueLink(t.Context(), testActor, auth.Admins, u.ID)
	if err != nil {
		t.Fatal(err)
	}
	path := "/admin/link/" + token.Reveal()
	for range 3 { // a mail scanner
		f.show(t, path).has(t, `action="`+path+`"`, "<button")
	}
	f.post(t, "/portal/link/"+token.Reveal(), nil).lacks(t, "cvg_ses_")
	in := f.post(t, path, nil)
	in.leads(t, "/admin")
	own := f.withCookie(areaAdmin, sessionCookie, f.cookieOf(in, areaAdmin, sessionCookie).Value)
	if c := f.cookieOf(in, areaAdmin, deviceCookie); c != nil {
		t.Errorf("the link takes from a known device what it is known by: %v", c)
	}
	f.show(t, "/admin/password", own).lacks(t, "Current password")
	again := f.post(t, path, nil)
	if again.StatusCode < 400 || f.cookieOf(again, areaAdmin, sessionCookie) != nil {
		t.Errorf("the link works twice: %s", again)
	}
	again.has(t, "<h1>")
	for i := range 40 {
		a := f.post(t, fmt.Sprintf("/portal/link/cvg_lnk_%d", i), nil, from("127.0.0.9:1"))
		if last := a.StatusCode == 429; last != (i >= 30) {
			t.Fatalf("guess %d: %d", i, a.StatusCode)
		}
	}
	// Somebody without a password is led to choose one, and asked for none before.
	n, err := f.Users.Create(t.Context(), testActor, auth.Admins, auth.NewUser{Email: "new@example.com", Role: auth.RoleViewer})
	if err != nil {
		t.Fatal(err)
	}
	first, _, err := f.Users.IssueLink(t.Context(), testActor, auth.Admins, n.ID)
	if err != nil {
		t.Fatal(err)
	}
	in = f.post(t, "/admin/link/"+first.Reveal(), nil)
	in.leads(t, "/admin/password")
	own = f.withCookie(areaAdmin, sessionCookie, f.cookieOf(in, areaAdmin, sessionCookie).Value)
	f.show(t, "/admin/password", own).lacks(t, "Current password")
	f.post(t, "/admin/password", url.Values{"password": {testPassword}, "repeat": {testPassword}}, own).leads(t, "/admin/account")
	f.post(t, "/admin/login", url.Values{"email": {"new@example.com"}, "password": {testPassword}}, from("127.0.0.8:1")).leads(t, "/admin")

	if strings.Contains(f.log.String(), token.Reveal()) {
		t.Error("the log holds the link")
	}
}

// The form asks for the current password exactly when a change is refused without it: nobody is locked out by a field that
// is not there, and nobody has to know what a link is for.
func TestCurrentPasswordIsAskedFor(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	const late = auth.LinkTTL + time.Minute
	for name, test := range map[string]struct {
		byLink bool
		age    time.Duration // of the session
		none   bool          // the user has no password
		asks   bool
	}{
		"signed in by password":               {asks: true},
		"by a link":                           {byLink: true},
		"by a link some time ago":             {byLink: true, age: late, asks: true},
		"a first link":                        {byLink: true, none: true},
		"a first link that was some time ago": {byLink: true, none: true, age: late},
	} {
		for a, realm := range map[area]auth.Realm{areaAdmin: auth.Admins, areaPortal: auth.TenantRealm(f.tenant.ID)} {
			person := auth.NewUser{Email: uuid.NewString() + "@example.com", Role: realm.Roles()[0], Password: testPassword}
			if test.none {
				person.Password = ""
			}
			u, err := f.Users.Create(t.Context(), testActor, realm, person)
			if err != nil {
				t.Fatal(err)
			}
			var own option
			if test.byLink {
				link, _, err := f.Users.IssueLink(t.Context(), testActor, realm, u.ID)
				if err != nil {
					t.Fatal(err)
				}
				in := f.post(t, a.home()+"/link/"+link.Reveal(), nil)
				own = f.withCookie(a, sessionCookie, f.cookieOf(in, a, sessionCookie).Value)
			} else {
				own = f.signedIn(t, realm, u.Email)
			}
			if _, err := f.pool.Exec(t.Context(), `UPDATE web_sessions SET inserted_at = inserted_at - $2::interval WHERE user_id = $1`, u.ID, test.age); err != nil {
				t.Fatal(err)
			}
			page := f.show(t, a.home()+"/password", own)
			page.has(t, `autocomplete="username" value="`+u.Email+`"`) // for password managers
			asks := bytes.Contains(page.body, []byte(`name="current_password"`))
			if asks != test.asks {
				t.Errorf("%s at %s: the current password is asked for: %v", name, a.home(), asks)
			}
			const next = "another good sentence"
			values := url.Values{"password": {next}, "repeat": {next}}
			for range 6 { // as long as guesses would lock the account
				if changed := f.post(t, a.home()+"/password", values, own); changed.StatusCode != http.StatusSeeOther {
					changed.is(t, 422, "")
					changed.has(t, "Is needed.", "Have a new sign-in link issued")
				} else if test.asks {
					t.Errorf("%s at %s: the password was changed without the current one", name, a.home())
				}
				if !test.asks {
					break
				}
			}
			values.Set("current_password", testPassword)
			if test.asks {
				f.post(t, a.home()+"/password", values, own).leads(t, a.home()+"/account")
			}
			f.post(t, a.home()+"/login", url.Values{"tenant": {"Acme"}, "email": {u.Email}, "password": {next}}, from("127.0.0.8:1")).leads(t, a.home())
		}
	}
}

// Every page carries the headers that keep browsers from being used against it. What takes the focus only so that a keyboard
// can scroll it says what it is, and the link past the navigation leads to what can take the focus.
func TestPageHeaders(t *testing.T) {
	t.Parallel()
	f := newFront(t, unlimited)
	admin, owner := f.asAdmin(t, auth.RoleSuperAdmin), f.asOwner(t)
	ids := strings.NewReplacer("{tenant_id}", f.tenant.ID.String(), "{bucket}", "upload", "{code}", "not_found", "{token}", "x", "{file}", "site.css")
	focused := regexp.MustCompile(`<([a-z]+)([^>]*) tabindex="0"([^>]*)>`)
	role, label := regexp.MustCompile(` role="(?:region|group)"`), regexp.MustCompile(` aria-label="([^"]+)"`)
	pages, boxes := 0, 0
	check := func(name string, a answer, private bool) {
		t.Helper()
		want := map[string]string{
			"Content-Security-Policy": pageCSP, "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin",
			"Cross-Origin-Opener-Policy": "same-origin", "Cross-Origin-Resource-Policy": "same-origin", "Strict-Transport-Security": "max-age=31536000",
		}
		if private {
			want["Cache-Control"] = "no-store"
		}
		for h, v := range want {
			if got := a.Header.Get(h); got != v {
				t.Errorf("%s: %s %q, want %q", name, h, got, v)
			}
		}
		if m := regexp.MustCompile(`<script|<style| style=| on[a-z]+=|(?:src|action)="(?:https?:|//)|<link [^>]*href="(?:https?:|//)`).Find(a.body); m != nil {
			t.Errorf("%s holds %q, which its content policy forbids", name, m)
		}
		for _, want := range []string{`<html lang="en">`, "<title>", `<main id="main" tabindex="-1">`, `<a class="skip" href="#main">`, "<h1>"} {
			if n := bytes.Count(a.body, []byte(want)); n != 1 {
				t.Errorf("%s has %s %d times", name, want, n)
			}
		}
		labels := map[string]bool{}
		for _, m := range focused.FindAllStringSubmatch(string(a.body), -1) {
			attributes := m[2] + m[3]
			is := label.FindStringSubmatch(attributes)
			switch {
			case is == nil, !role.MatchString(attributes) && m[1] != "nav":
				t.Errorf("%s: no role or no name: %s", name, m[0])
			case labels[is[1]]:
				t.Errorf("%s: two boxes have the name %q", name, is[1])
			default:
				labels[is[1]] = true
			}
			boxes++
		}
		pages++
	}
	for i := range f.routes {
		rt := &f.routes[i]
		if rt.area == areaNone || rt.method != "GET" || strings.HasPrefix(rt.pattern, "/static") {
			continue
		}
		a := f.show(t, ids.Replace(rt.pattern), admin, owner)
		a.is(t, 200, "")
		check(rt.pattern, a, rt.area != areaPublic)
	}
	if pages < 15 {
		t.Errorf("only %d pages", pages)
	}
	if boxes < 500 {
		t.Errorf("only %d boxes that scroll", boxes)
	}
	for _, path := range []string{"/nothing", "/admin/nothing", "/portal/x", "/admin/tenants/7", "/static/nothing.css", "/problems/nothing"} {
		a := f.show(t, path, admin, owner)
		if a.StatusCode < 400 {
			t.Errorf("%s: %d", path, a.StatusCode)
		}
		check(path, a, true)
		f.call(t, "GET", path, "", admin, owner).is(t, a.StatusCode, "") // as JSON
	}
	f.call(t, "GET", "/api/v1/nothing", "", browser).is(t, 404, codeNotFound) // an API stays one
	f.call(t, "GET", "/api/v1/conversations", "", header("Accept", "text/html")).is(t, 401, codeMissingCredential)
}

// Every problem has a page, for those who ask for one.
func TestProblemPages(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.described = nil // the route is made to answer what it never does
	for _, k := range catalogue {
		f.routes[0].area, f.routes[0].handle = areaPublic, func(*call) (*reply, error) {
			return nil, newProblem(k.Code, "What <b>happened</b> here.")
		}
		a := f.show(t, f.routes[0].pattern)
		if k.Code == codeSignInRequired || k.Code == codePasswordChange {
			continue // led to a form
		}
		if a.StatusCode != k.Status || a.Header.Get("Content-Type") != typeHTML {
			t.Errorf("%s: %d %s", k.Code, a.StatusCode, a.Header.Get("Content-Type"))
		}
		a.has(t, "What &lt;b&gt;happened", "<h1>", string(k.Code), a.Header.Get("X-Request-Id"))
		f.call(t, "GET", f.routes[0].pattern, "").is(t, k.Status, k.Code)
	}
	f.routes[0].handle = func(*call) (*reply, error) { panic("canary-in-a-page") }
	a := f.show(t, f.routes[0].pattern)
	a.is(t, 500, "")
	a.has(t, "<h1>Internal error")
	a.lacks(t, "canary")
}

// Forms of every kind are refused with words and never with a 5xx.
func TestBadForms(t *testing.T) {
	t.Parallel()
	f := newFront(t, unlimited)
	admin, owner := f.asAdmin(t, auth.RoleSuperAdmin), f.asOwner(t)
	ids := strings.NewReplacer("{tenant_id}", f.tenant.ID.String(), "{bucket}", "upload", "{token}", "x")
	tried := 0
	for i := range f.routes {
		rt := &f.routes[i]
		if rt.body != bodyFields {
			continue
		}
		tried++
		for what, body := range map[string]string{
			"bad escape": "name=%zz", "bad UTF-8": "name=%ff", "NUL": "name=%00&email=a%00", "a name of NUL": "%00=1", "half a pair": "name=%ed%a0%80",
			"too long": "name=" + strings.Repeat("x", maxFormBody), "many": strings.Repeat("a=1&", 2000), "semicolons": "a=1;b=2", "nothing": "&", "JSON": `{"name":"x"}`,
			"long values": "name=" + strings.Repeat("x", 3000) + "&email=" + strings.Repeat("y", 3000) + "&password=" + strings.Repeat("z", 3000) + "&tenant=" + strings.Repeat("t", 3000) + "&limit=" + strings.Repeat("9", 300),
			"odd text":    "name=%e2%80%ae%f0%9f%98%80%0a&email=%e2%80%ae&tenant=%7f&password=%20&limit=%d9%a1&id=x&scale_ms=+1&unit=&algorithm=&current_password=x&repeat=%0a",
		} {
			for _, kind := range []string{"application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "text/plain", "application/json", ""} {
				addr := f.addresses.Add(1)
				a := f.call(t, rt.method, ids.Replace(rt.pattern), body, browser, admin, owner, header("Content-Type", kind), func(r *http.Request) {
					if rt.auth == credentialPassword { // each guesser from elsewhere
						r.RemoteAddr = fmt.Sprintf("127.0.%d.%d:1", addr>>8&255, addr&255)
					}
				})
				if a.StatusCode >= 500 || a.StatusCode < 300 {
					t.Errorf("%s %s, %s as %q: %d", rt.method, rt.pattern, what, kind, a.StatusCode)
				}
				if kind == "text/plain" && a.StatusCode != 415 && a.StatusCode != 413 {
					t.Errorf("%s takes %s: %d", rt.pattern, kind, a.StatusCode)
				}
			}
		}
	}
	if tried < 6 {
		t.Errorf("only %d forms", tried)
	}
}

// Pages as they are sent, reviewed as files.
func TestPagesGolden(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	admin, owner := f.asAdmin(t, auth.RoleAdmin), f.asOwner(t)
	limitOverride(t, f, `{"limit":0,"scale_ms":1000}`, "inbound")
	id := "/admin/tenants/" + f.tenant.ID.String()
	for name, a := range map[string]answer{
		"admin-login":         f.show(t, "/admin/login?next=/admin/tenants"),
		"admin-overview":      f.show(t, "/admin", admin),
		"admin-tenants":       f.show(t, "/admin/tenants", admin),
		"admin-tenants-error": f.post(t, "/admin/tenants", url.Values{"name": {"<Acme>\t"}}, admin),
		"admin-tenant":        f.show(t, id, admin),
		"admin-limits":        f.show(t, id+"/limits", admin),
		"admin-limit":         f.show(t, id+"/limits/inbound", admin),
		"admin-limit-error":   f.post(t, id+"/limits/inbound", url.Values{"limit": {"-1"}, "scale_ms": {"5"}, "unit": {"min"}, "algorithm": {"token_bucket"}, "burst": {"x"}}, admin),
		"admin-account":       f.show(t, "/admin/account", admin),
		"admin-password":      f.show(t, "/admin/password", admin),
		"link":                f.show(t, "/admin/link/token"),
		"portal-login-error":  f.post(t, "/portal/login", url.Values{"tenant": {"Acme"}, "email": {"x"}, "password": {"y"}}),
		"portal":              f.show(t, "/portal", owner),
		"not-found":           f.show(t, "/admin/nothing", admin, header("X-Request-Id", "req_of_the_test")),
	} {
		golden(t, "page-"+name+".golden.html", maskPage(a.body))
	}
}

// maskPage replaces what is different in each run.
func maskPage(b []byte) []byte {
	for _, m := range [][2]string{
		{`[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}`, "ID"}, {`\d{4}-\d\d-\d\dT[0-9:.]+Z">\d{4}-\d\d-\d\d \d\d:\d\d UTC`, `TIME">TIME`},
		{`\?v=[0-9a-f]{12}`, "?v=VERSION"}, {`cvg_live_[\w-]{4}`, "cvg_live_XXXX"},
	} {
		b = regexp.MustCompile(m[0]).ReplaceAll(b, []byte(m[1]))
	}
	return b
}

// Static files are kept for ever under the address that pages use, and not otherwise.
func TestStaticFiles(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	address := string(regexp.MustCompile(`/static/site\.css\?v=\w+`).Find(f.show(t, "/").body))
	for path, keep := range map[string]string{address: "immutable", "/static/site.css": "max-age=300", "/static/site.css?v=x": "max-age=300", "/static/icon.svg": "max-age=300"} {
		a := f.call(t, "GET", path, "")
		a.is(t, 200, "")
		if got := a.Header.Get("Cache-Control"); !strings.Contains(got, keep) {
			t.Errorf("%s: %q", path, got)
		}
	}
}
