package main

import (
	"context"
	"fmt"
	"io"
	stdlog "log"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/postgres"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

// chromium finds a browser where scripts/fetch-browser looks, or skips the test; with CONVERGER_BROWSER=required, which
// continuous integration sets, that is a failure.
func chromium(t testing.TB) string {
	t.Helper()
	names := []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"}
	if given := os.Getenv("CHROMIUM"); given != "" {
		names = []string{given}
	}
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	missing(t, "no Chromium: make browser fetches one, CHROMIUM names one")
	return ""
}

func missing(t testing.TB, what string) {
	t.Helper()
	if os.Getenv("CONVERGER_BROWSER") == "required" {
		t.Fatal(what)
	}
	t.Skip(what)
}

// startBrowser starts a Chromium that talks to nobody but the tests.
func startBrowser(t testing.TB) context.Context {
	t.Helper()
	options := []chromedp.ExecAllocatorOption{
		chromedp.ExecPath(chromium(t)), chromedp.UserDataDir(t.TempDir()), chromedp.NoFirstRun, chromedp.Headless, chromedp.DisableGPU,
		chromedp.NoSandbox, // Chromium refuses to run as root with one, and opens nothing but our pages
		chromedp.Flag("disable-quic", true), chromedp.Flag("disable-background-networking", true), chromedp.Flag("disable-component-update", true),
		chromedp.Flag("disable-sync", true), chromedp.Flag("disable-dev-shm-usage", true), chromedp.Flag("hide-scrollbars", true),
		chromedp.Flag("ignore-certificate-errors", true), // of the proxy of a test
	}
	allocator, stop := chromedp.NewExecAllocator(context.WithoutCancel(t.Context()), options...)
	ctx, end := chromedp.NewContext(allocator)
	if err := chromedp.Do(ctx); err != nil {
		t.Fatalf("start %s: %v", chromium(t), err)
	}
	t.Cleanup(func() {
		end()
		stop()
		chromedp.FromContext(ctx).Allocator.Wait() // which removes the folder
	})
	return ctx
}

// tab is a page in a browser of its own: it shares no cookies with others. Whatever goes wrong fails the test.
type tab struct {
	t    testing.TB
	ctx  context.Context
	base string

	elsewhere string // another site that the test goes to

	mu         sync.Mutex
	complaints []string // of the console, the content policy, the network
}

// newTab opens one. It fails the test in its end if the page complained of anything.
func newTab(browser context.Context, t testing.TB, base string) *tab {
	t.Helper()
	b := &tab{t: t, base: base}
	ctx, end := chromedp.NewContext(browser, chromedp.WithNewBrowserContext(), chromedp.WithListener(b.listen))
	ctx, stop := context.WithTimeout(ctx, 6*patience)
	b.ctx = ctx
	t.Cleanup(func() {
		stop()
		end()
		b.mu.Lock()
		defer b.mu.Unlock()
		for _, c := range b.complaints {
			t.Errorf("the browser complains: %s", c)
		}
	})
	b.do(chromedp.EmulateViewport(1200, 900))
	return b
}

func (b *tab) listen(event any) {
	complain := func(format string, args ...any) {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.complaints = append(b.complaints, fmt.Sprintf(format, args...))
	}
	switch e := event.(type) {
	case *log.EventEntryAdded: // violations of the content policy too
		// That a page came with a status of 4xx is what some tests are about; they look at the status themselves.
		expected := e.Entry.Source == log.EntrySourceNetwork && strings.Contains(e.Entry.Text, "responded with a status of 4")
		if e.Entry.Level == log.EntryLevelError && !expected {
			complain("%s: %s (%s)", e.Entry.Source, e.Entry.Text, e.Entry.URL)
		}
	case *runtime.EventConsoleAPICalled:
		if e.Type == runtime.ConsoleAPICalledTypeError || e.Type == runtime.ConsoleAPICalledTypeWarning {
			complain("console.%s", e.Type)
		}
	case *runtime.EventExceptionThrown:
		complain("exception: %s", e.ExceptionDetails.Text)
	case *network.EventRequestWillBeSent:
		if !strings.HasPrefix(e.Request.URL, b.base+"/") && (b.elsewhere == "" || !strings.HasPrefix(e.Request.URL, b.elsewhere)) {
			complain("the page asks for %s", e.Request.URL)
		}
	}
}

func (b *tab) do(steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	if err := again(func() error { return chromedp.Do(b.ctx, steps...) }); err != nil {
		b.t.Fatal(err)
	}
}

// again repeats what found its element, and then not: the browser has numbered the nodes of a page anew just after it
// was loaded. Nothing was done to the page then.
func again(step func() error) (err error) {
	for range 5 {
		if err = step(); err == nil || !strings.Contains(err.Error(), "No node with given id") {
			return err
		}
	}
	return err
}

// turns does what makes another page come, and checks its status and path; a path that ends in * is a beginning.
func (b *tab) turns(status int64, path string, steps ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	var r *network.Response
	if err := again(func() (err error) {
		r, err = chromedp.RunResponse(b.ctx, steps...)
		return err
	}); err != nil {
		b.t.Fatalf("to %s: %v", path, err)
	}
	at := strings.TrimPrefix(r.URL, b.base)
	path, beginning := strings.CutSuffix(path, "*")
	if beginning {
		at = at[:min(len(at), len(path))]
	}
	if r.Status != status || at != path {
		b.t.Fatalf("status %d at %s, want %d at %s: %s", r.Status, at, status, path, b.text("main"))
	}
}

func (b *tab) open(status int64, path string) {
	b.t.Helper()
	b.turns(status, path, chromedp.Navigate(b.base+path))
}

func (b *tab) click(status int64, path, selector string) {
	b.t.Helper()
	b.turns(status, path, chromedp.Click(chromedp.CSS(selector)))
}

// fill replaces what stands in a field.
func (b *tab) fill(id, text string) {
	b.t.Helper()
	b.do(chromedp.Focus(chromedp.ID(id)), chromedp.KeyEvent("a", chromedp.KeyModifiers(chromedp.ModifierCtrl)), chromedp.KeyEvent(text))
}

func (b *tab) text(selector string) string {
	b.t.Helper()
	var text string
	if err := again(func() (err error) {
		text, err = chromedp.Run(b.ctx, chromedp.Text(chromedp.CSS(selector)))
		return err
	}); err != nil {
		b.t.Fatalf("text of %s: %v", selector, err)
	}
	return text
}

func (b *tab) shows(parts ...string) {
	b.t.Helper()
	text := b.text("body")
	for _, p := range parts {
		if !strings.Contains(text, p) {
			b.t.Errorf("the page does not show %q:\n%s", p, text)
		}
	}
}

func (b *tab) lacks(parts ...string) {
	b.t.Helper()
	text := b.text("body")
	for _, p := range parts {
		if strings.Contains(text, p) {
			b.t.Errorf("the page shows %q:\n%s", p, text)
		}
	}
}

// ask evaluates an expression in the page.
func ask[T any](b *tab, expression string) T {
	b.t.Helper()
	v, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression, func(p *runtime.EvaluateParams) { p.AwaitPromise = new(true) }))
	if err != nil {
		b.t.Fatalf("%.100s: %v", expression, err)
	}
	return v
}

// focused is the id of the element that the keys go to, else its text.
func (b *tab) focused() string {
	b.t.Helper()
	return ask[string](b, `document.activeElement.id || document.activeElement.textContent.trim()`)
}

// prefers sets the colour scheme that the reader's system asks for, and no motion: colours that fade are none to judge.
func (b *tab) prefers(scheme string) {
	b.t.Helper()
	_, err := chromedp.Call(b.ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: scheme}, {Name: "prefers-reduced-motion", Value: "reduce"}}})
	if err != nil {
		b.t.Fatal(err)
	}
}

// picture writes a picture of the page into the folder that CONVERGER_SHOTS names, if any: for people.
func (b *tab) picture(name string) {
	b.t.Helper()
	dir := os.Getenv("CONVERGER_SHOTS")
	if dir == "" {
		return
	}
	png, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, name+".png"), png, 0o644)
	}
	if err != nil {
		b.t.Logf("no picture of %s: %v", name, err)
	}
}

// site is a hub with people in it.
type site struct {
	*program
	customer
	browser context.Context
	channel string // of Acme
}

const (
	adminEmail, viewerEmail, ownerEmail = "ada@example.com", "vera@example.com", "bo@acme.example"
	sitePassword                        = "correct horse battery"
)

func newSite(t testing.TB, changes map[string]string) *site {
	t.Helper()
	browser := startBrowser(t) // first: without one there is nothing to do
	database := pgtest.New(t)
	const cost = 10 // the least that is allowed: under the race detector a hash of the default takes seconds
	environ := map[string]string{"BCRYPT_COST": strconv.Itoa(cost)}
	maps.Copy(environ, changes)
	p := serve(t, database, environ)
	s := &site{program: p, customer: newCustomer(t, management(t, p, database), "Acme"), browser: browser}
	s.channel = s.newChannel(t, "webhook", "duplex", map[string]any{"url": "http://127.0.0.1:9/"}).ID
	passwords, err := auth.NewPasswords(cost)
	if err != nil {
		t.Fatal(err)
	}
	users := auth.NewUsers(pgtest.Open(t, database, postgres.Options{MaxConns: 1}), passwords)
	for _, u := range []struct {
		realm auth.Realm
		email string
		role  auth.Role
	}{{auth.Admins, adminEmail, auth.RoleAdmin}, {auth.Admins, viewerEmail, auth.RoleViewer}, {auth.TenantRealm(uuid.MustParse(s.id)), ownerEmail, auth.RoleOwner}} {
		_, err := users.Create(t.Context(), tenants.Actor{Type: tenants.ActorSystem, ID: "tests"}, u.realm, auth.NewUser{Email: u.email, Role: u.role, Password: sitePassword})
		if err != nil {
			t.Fatal(err)
		}
	}
	return s
}

func (s *site) tab(t testing.TB) *tab { return newTab(s.browser, t, s.base) }

// signIn signs an administrator in, or with a tenant somebody of its staff.
func (b *tab) signIn(tenant, email string) {
	b.t.Helper()
	area := "/admin"
	if tenant != "" {
		area = "/portal"
	}
	b.open(200, area+"/login")
	if tenant != "" {
		b.fill("tenant", tenant)
	}
	b.fill("email", email)
	b.fill("password", sitePassword)
	b.click(200, area, "main button")
}

// People use the pages in a real browser. Everything that a page loads, does and says is watched: see tab.
func TestBrowser(t *testing.T) {
	t.Parallel()
	// One bucket is counted at a Redis that is not there: its look-up is of the unknown.
	s := newSite(t, map[string]string{"RATE_LIMITS": `{"token_create":{"backend":"redis"}}`, "RATE_LIMIT_REDIS_URL": "redis://127.0.0.1:1"})
	t.Run("administrator", func(t *testing.T) { t.Parallel(); s.administrator(t) })
	t.Run("portal", func(t *testing.T) { t.Parallel(); s.portal(t) })
	t.Run("keyboard", func(t *testing.T) { t.Parallel(); s.keyboard(t) })
	t.Run("without scripts", func(t *testing.T) { t.Parallel(); s.withoutScripts(t) })
	t.Run("every page", func(t *testing.T) { t.Parallel(); s.everyPage(t) })
}

// Behind a proxy that ends TLS, cuts a path off and names the node in Host, a browser signs in, sends forms and keeps its
// cookies, once PUBLIC_URL and TRUSTED_PROXIES are right.
func TestBrowserBehindProxy(t *testing.T) {
	t.Parallel()
	var node atomic.Pointer[url.URL]
	proxy := httptest.NewTLSServer(http.StripPrefix("/chat", &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(node.Load()) // and Host with it
			r.SetXForwarded()
		},
		ErrorLog: stdlog.New(io.Discard, "", 0),
	}))
	t.Cleanup(proxy.Close)
	s := newSite(t, map[string]string{"PUBLIC_URL": proxy.URL + "/chat", "TRUSTED_PROXIES": "127.0.0.1"})
	target, err := url.Parse(s.base)
	if err != nil {
		t.Fatal(err)
	}
	node.Store(target)

	b := newTab(s.browser, t, proxy.URL+"/chat")
	b.signIn("", adminEmail)
	one := "/admin/tenants/" + s.id + "/limits/upload"
	b.open(200, one)
	b.fill("limit", "0")
	b.click(200, "/admin/tenants/"+s.id+"/limits", `button[value="save"]`)
	b.shows("every request is refused until you raise it", "0: refuses everything")
	b.picture("admin-limits-zero")
	cookies, err := chromedp.Call(b.ctx, network.GetCookies, network.GetCookiesParams{})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range cookies.Cookies {
		if !strings.HasPrefix(c.Name, "__Host-cvg_admin_") || !c.Secure || !c.HTTPOnly || c.SameSite != network.CookieSameSiteLax {
			t.Errorf("cookie %+v", c)
		}
	}
	if len(cookies.Cookies) < 2 {
		t.Errorf("%d cookies, want those of the session and of the device", len(cookies.Cookies))
	}
	b.click(200, "/admin/login", ".who button")

	// Another site's form gets nowhere, even with the cookies of somebody who is signed in.
	b.signIn("", adminEmail)
	evil := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<form method="post" action="%s/admin/tenants/%s/suspend"><button>x</button></form>`, b.base, s.id)
	}))
	t.Cleanup(evil.Close)
	b.elsewhere = evil.URL
	b.do(chromedp.Navigate(evil.URL))
	b.click(403, "/admin/tenants/"+s.id+"/suspend", "button")
	b.shows("The form was sent by a page of " + evil.URL)
	b.open(200, "/admin/tenants/"+s.id)
	b.shows("active")
}

// administrator signs in, finds a tenant, changes a limit, sees it in force, takes it back, and signs out.
func (s *site) administrator(t *testing.T) {
	b := s.tab(t)
	b.turns(200, "/admin/login?next=%2Fadmin%2Ftenants", chromedp.Navigate(b.base+"/admin/tenants"))
	b.picture("admin-login")
	b.fill("email", adminEmail)
	b.fill("password", "not this one")
	b.click(401, "/admin/login", "main button")
	b.shows("Email or password is not right.")
	if got := b.focused(); got != "password" {
		t.Errorf("after a wrong password the focus is on %q", got)
	}
	if got := ask[string](b, `document.getElementById("email").value + "|" + document.getElementById("password").value`); got != adminEmail+"|" {
		t.Errorf("the form holds %q", got)
	}
	b.picture("admin-login-error")
	b.fill("password", sitePassword)
	b.click(200, "/admin/tenants", "main button")
	b.shows("Tenants", "Acme", "active", adminEmail)

	b.do(chromedp.Click(chromedp.CSS("summary")))
	b.fill("name", "acme")
	b.click(422, "/admin/tenants", "details button")
	b.shows("Another tenant has this name.")
	b.picture("admin-tenants-error")
	b.fill("name", "Bakery")
	b.click(200, "/admin/tenants/*", "details button")
	b.shows("Done. The tenant is there.", "Bakery")
	b.do(chromedp.Click(chromedp.CSS("summary")))
	b.picture("admin-tenant-suspend")
	b.click(200, "/admin/tenants/*", "details button")
	b.shows("The tenant is suspended", "Activate Bakery")
	b.turns(200, "/admin/tenants/*", chromedp.Reload())
	b.lacks("Done.") // said once

	b.open(200, "/admin/tenants?q=acm")
	b.lacks("Bakery")
	limits := "/admin/tenants/" + s.id + "/limits"
	b.click(200, limits, "td.act a")
	b.shows("activity_create", "100 per second")
	b.picture("admin-limits")
	one := limits + "/activity_create"
	b.click(200, one, `a[href$="/activity_create"]`)
	b.fill("limit", "2000000000")
	b.fill("scale_ms", "2")
	b.click(422, one, `button[value="save"]`)
	b.shows("Must be a whole number from 0 (refuse everything) to 1,000,000,000.")
	if got := b.focused(); got != "limit" {
		t.Errorf("the focus is on %q", got)
	}
	if got := ask[string](b, `document.getElementById("limit").value + " in " + document.getElementById("scale_ms").value`); got != "2000000000 in 2" {
		t.Errorf("the form holds %q", got)
	}
	b.picture("admin-limit-error")
	b.fill("limit", "3")
	b.click(200, one, `button[value="preview"]`)
	b.shows("Not saved yet.", "At most 3 activities in each 2 seconds")
	b.picture("admin-limit-preview")
	b.do(chromedp.SetValue(chromedp.ID("unit"), "h"))
	b.fill("scale_ms", "24")
	b.click(200, limits, `button[value="save"]`)
	b.shows("Done. The limit is in force.", "3 per day")

	chat := s.newConversation(t, s.channel)
	var statuses []int
	for range 4 {
		a, err := s.api.try(t.Context(), "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"x"}`)
		if err != nil {
			t.Fatal(err)
		}
		statuses = append(statuses, a.status)
	}
	if fmt.Sprint(statuses) != "[201 201 201 429]" {
		t.Errorf("with the limit of the page: %v", statuses)
	}
	b.open(200, one)
	b.click(200, one, `button[value="try"]`)
	b.shows("Not saved yet.", "Of 4 activities since")
	b.picture("admin-limit-try")

	b.click(200, "/admin/rate_limits", `nav a[href$="/rate_limits"]`)
	b.shows("Most refused", "Lately refused", "Acme", "activity_create")
	b.picture("admin-rate-limits")
	b.click(200, "/admin/rate_limits?*", `td.act a`)
	b.shows("0 left", "Reset this counter")
	b.do(chromedp.Click(chromedp.CSS("summary")))
	b.picture("admin-rate-limits-use")
	b.click(200, "/admin/rate_limits?*", "details button.danger")
	b.shows("The counter is reset on every node.", "3 left")
	b.do(chromedp.SetValue(chromedp.ID("subject"), "nobody here"))
	b.click(404, "/admin/rate_limits?*", ".form button")
	b.shows("There is no tenant of this id or name: nobody here.")
	b.picture("admin-rate-limits-error")
	b.open(200, "/admin/rate_limits?bucket=token_create&subject=192.0.2.1:443")
	b.shows("192.0.2.1 in token_create", "How much is used is unknown while Redis can't be asked.", "the backend redis can't be asked: it decides with its share of the limits.")
	b.do(chromedp.Click(chromedp.CSS("summary")))
	b.click(200, "/admin/rate_limits?*", "details button.danger")
	b.shows("Not everywhere.", "The count at Redis stands")
	b.picture("admin-rate-limits-partly")
	b.open(200, "/admin/rate_limits?only=upload")
	b.shows("Nothing has been refused in this bucket since the start.")
	b.picture("admin-rate-limits-empty")
	b.click(200, "/admin/rate_limits?*", ".choices a")
	b.shows("This page loads itself again every 5 seconds", "Pause")
	b.click(200, "/admin/rate_limits?only=upload", ".live .button")
	b.lacks("loads itself again")

	b.open(200, one)
	b.click(200, limits, "button.danger")
	b.shows("Done. The tenant's own limit is gone")
	b.lacks("3 per day")
	s.api.call(t, 201, "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"x"}`)

	b.click(200, "/admin/login", ".who button")
	b.shows("You are signed out.")
	b.turns(200, "/admin/login?next=*", chromedp.Navigate(b.base+limits))
}

// portal: somebody of the staff sees what belongs to the tenant, and ends a session on another device.
func (s *site) portal(t *testing.T) {
	phone, desk := s.tab(t), s.tab(t)
	phone.signIn(" ACME ", ownerEmail)
	desk.signIn("Acme", ownerEmail)
	desk.shows("Channels", "webhook duplex", "in and out", "API keys", "cvg_live_", "read, write", "Limits", "500 per second", "(owner, Acme)")
	desk.picture("portal")
	desk.click(200, "/portal/account", `nav a[href="/portal/account"]`)
	desk.shows("this one", "127.0.0.1", "Chrome on")
	desk.click(200, "/portal/account", `form[action="/portal/sessions/end"] button`)
	desk.shows("All your other sessions have ended.")
	phone.turns(200, "/portal/login", chromedp.Navigate(phone.base+"/portal"))
	desk.open(404, "/portal/tenants")
	desk.shows("Not found", "There is nothing at this address.")
	desk.picture("portal-not-found")
	desk.turns(200, "/admin/login", chromedp.Navigate(desk.base+"/admin")) // another area, another session
}

// keyboard: everything can be reached and done by keys, and what has the focus can be seen.
func (s *site) keyboard(t *testing.T) {
	b := s.tab(t)
	press := chromedp.KeyEvent
	b.open(200, "/admin/login")
	// Browsers set it with the first frame that they draw, which may be behind the load.
	eventually(t, patience, "the focus to begin on the email", func() bool { return b.focused() == "email" })
	b.do(press(adminEmail), press("\t"), press(sitePassword))
	b.turns(200, "/admin", press("\r"))

	b.do(press("\t"))
	if got := b.focused(); got != "Skip to content" {
		t.Errorf("the first stop is %q", got)
	}
	if !ask[bool](b, `(r => r.left >= 0 && r.top >= 0 && r.width > 0)(document.activeElement.getBoundingClientRect())`) {
		t.Error("the link to skip is not shown when it has the focus")
	}
	b.do(press("\r"), press("\t"))
	if got := b.focused(); got != "q" {
		t.Errorf("behind the skip the first stop is %q", got)
	}
	// to tabs until an element with this text or id has the focus.
	to := func(want string) {
		t.Helper()
		for range 60 {
			b.do(press("\t"))
			if got := b.focused(); got == want {
				if ask[string](b, `getComputedStyle(document.activeElement).outlineStyle`) == "none" {
					t.Errorf("the focus on %q is not seen", want)
				}
				return
			}
		}
		t.Fatalf("no way by keys to %q", want)
	}
	b.do(press("Acme"))
	b.turns(200, "/admin/tenants?q=Acme", press("\r"))
	to("Limits of Acme")
	limits := "/admin/tenants/" + s.id + "/limits"
	b.turns(200, limits, press("\r"))
	to("Change upload")
	b.turns(200, limits+"/upload", press("\r"))
	to("limit")
	b.do(press("77")) // replaces what is selected, as a field is when it is tabbed to
	to("Save")
	b.turns(200, limits, press("\r"))
	b.shows("77 per second")
	to("Change upload")
	b.turns(200, limits+"/upload", press("\r"))
	to("Remove the own limit")
	b.turns(200, limits, press(" "))
	b.lacks("77 per second")
	to("Sign out")
	b.turns(200, "/admin/login", press("\r"))
}

// withoutScripts: nothing needs them.
func (s *site) withoutScripts(t *testing.T) {
	b := s.tab(t)
	if _, err := chromedp.Call(b.ctx, emulation.SetScriptExecutionDisabled, emulation.SetScriptExecutionDisabledParams{Value: true}); err != nil {
		t.Fatal(err)
	}
	b.signIn("", adminEmail)
	one := "/admin/tenants/" + s.id + "/limits/api_read"
	b.open(200, one)
	b.fill("scale_ms", "never")
	b.click(422, one, `button[value="save"]`)
	b.shows("the time from 1 second to 1 day")
	b.fill("scale_ms", "1")
	b.fill("limit", "299")
	b.click(200, "/admin/tenants/"+s.id+"/limits", `button[value="save"]`)
	b.shows("The limit is in force.", "299 per second")
	b.open(200, one)
	b.click(200, "/admin/tenants/"+s.id+"/limits", "button.danger")
	b.click(200, "/admin/login", ".who button")
}

// everyPage opens each page in light and dark, wide and narrow, and looks for faults of accessibility.
func (s *site) everyPage(t *testing.T) {
	b := s.tab(t)
	b.open(200, "/admin/login")
	axe, err := os.ReadFile(filepath.Join("..", "..", ".cache", "axe", "node_modules", "axe-core", "axe.min.js"))
	if err != nil {
		missing(t, "no axe-core: make browser fetches it")
	}
	tenant := "/admin/tenants/" + s.id
	look := func(name string) {
		for _, scheme := range []string{"light", "dark"} {
			b.prefers(scheme)
			for _, width := range []int64{1200, 320} {
				b.do(chromedp.EmulateViewport(width, 900))
				b.picture(fmt.Sprintf("page-%s-%s-%d", name, scheme, width))
				if got := ask[int64](b, `document.scrollingElement.scrollWidth`); got > width {
					t.Errorf("%s is %d wide in a window of %d", name, got, width)
				}
				if (scheme == "light") != (width == 1200) {
					continue // both schemes and both widths, but not all four
				}
				found := ask[[]string](b, string(axe)+`;axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}).then(r =>
					r.violations.map(v => v.id + ": " + v.help + ": " + v.nodes.map(n => n.html).join(" ")))`)
				for _, f := range found {
					t.Errorf("%s, %s, %d wide: %s", name, scheme, width, f)
				}
			}
		}
		background := ask[string](b, `getComputedStyle(document.body).backgroundColor`)
		b.prefers("light")
		if light := ask[string](b, `getComputedStyle(document.body).backgroundColor`); light == background {
			t.Errorf("%s is as light in the dark: %s", name, light)
		}
	}
	for name, path := range map[string]string{"index": "/", "problems": "/problems", "problem": "/problems/rate_limited", "docs": "/docs", "portal-login": "/portal/login", "link": "/admin/link/x"} {
		b.open(200, path)
		look(name)
	}
	b.open(404, "/nothing")
	look("not-found")
	b.open(200, "/portal/login")
	b.click(422, "/portal/login", "main button")
	look("portal-login-empty")
	b.signIn("", adminEmail)
	for name, path := range map[string]string{
		"admin": "/admin", "tenants": "/admin/tenants", "tenants-none": "/admin/tenants?q=nobody", "tenant": tenant, "limits": tenant + "/limits",
		"limit": tenant + "/limits/inbound", "account": "/admin/account", "password": "/admin/password",
		"rate-limits": "/admin/rate_limits", "rate-limits-use": "/admin/rate_limits?bucket=upload&subject=Acme",
		"rate-limits-unknown": "/admin/rate_limits?bucket=token_create&subject=192.0.2.1",
	} {
		b.open(200, path)
		look(name)
	}
	b.open(400, "/admin/rate_limits?bucket=unknown_caller&subject=somewhere")
	look("rate-limits-error")
	b.open(200, tenant+"/limits/inbound")
	b.fill("limit", "x")
	b.fill("burst", "-1")
	b.click(422, tenant+"/limits/inbound", `button[value="save"]`)
	look("limit-error")
	b.signIn("Acme", ownerEmail)
	for name, path := range map[string]string{"portal": "/portal", "portal-account": "/portal/account"} {
		b.open(200, path)
		look(name)
	}
	b.signIn("", viewerEmail)
	b.open(200, tenant+"/limits/inbound")
	b.lacks("Save")
	look("viewer-limit")
}
