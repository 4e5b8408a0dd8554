package main

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"strings"
	"testing"

	"converger/internal/auth"
	"converger/internal/secrets"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

// newTestHub makes a node of the program on a database, and does not start it.
func newTestHub(t testing.TB, url string, changes map[string]string) *hub {
	t.Helper()
	settings := map[string]string{"UPLOAD_DIR": t.TempDir(), "BCRYPT_COST": "10"}
	maps.Copy(settings, changes)
	environ := serveEnv(url, settings)
	cfg, err := LoadConfig(func(name string) string { return environ[name] })
	if err != nil {
		t.Fatal(err)
	}
	h, err := newHub(t.Context(), cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.pool.Close)
	if err := h.directory.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	return h
}

// An administrator is made, let in again and shut out by the command line; a running node follows at once.
func TestAdministrators(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	h := newTestHub(t, url, nil)
	env := map[string]string{"DATABASE_URL": url, "PUBLIC_URL": "https://hub.example.com/", "BCRYPT_COST": "10"}
	admin := func(args ...string) string {
		t.Helper()
		return strings.TrimSpace(runOK(t, env, append([]string{"admin"}, args...)...))
	}
	v := auth.Visitor{IP: netip.MustParseAddr("192.0.2.1")}
	signIn := func(password string) (auth.SignedIn, error) {
		return h.signIn.Password(t.Context(), v, auth.Credentials{Email: "ada@example.com", Password: secrets.Text(password)})
	}

	if out := admin("list"); !strings.Contains(out, "admin create") {
		t.Errorf("an empty list: %s", out)
	}
	first := admin("create", "Ada@Example.com", "--name", "Ada")
	in, err := signIn(first)
	if err != nil || !in.Session.User.MustChangePassword || in.Session.User.Role != auth.RoleSuperAdmin {
		t.Fatalf("the first password: %+v, %v", in, err)
	}
	viewer := admin("create", "bob@example.com", "--role", "viewer")
	list := admin("list")
	if !strings.Contains(list, "ada@example.com") || !strings.Contains(list, "viewer") || strings.Contains(list, first) || strings.Contains(list, viewer) {
		t.Errorf("list:\n%s", list)
	}

	// Without an address that browsers can open no link is made, which would end the one that somebody waits for.
	links := func() (n int) {
		if err := h.pool.QueryRow(t.Context(), `SELECT count(*) FROM sign_in_links`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for address, flag := range map[string]string{"": "", "hub.example.com": "", "https://x.example/?y": "", "https://hub.example.com": "not a url"} {
		line := []string{"admin", "sign-in-link", "ada@example.com", "--database-url", url}
		if flag != "" {
			line = append(line, "--public-url", flag)
		}
		p := start(t, map[string]string{"PUBLIC_URL": address, "BCRYPT_COST": "10"}, line...)
		if err := p.result(t); err == nil || exitCode(err) != exitUsage || p.out.String() != "" || links() != 0 {
			t.Errorf("a link at %q %q: %v, %d links\n%s", address, flag, err, links(), p.out)
		}
	}
	for _, flag := range []string{"https://other.example", "https://Other.Example:443/"} {
		if link := admin("sign-in-link", "ada@example.com", "--public-url", flag); !strings.HasPrefix(link, "https://other.example/admin/link/") {
			t.Errorf("the link at %s is %s", flag, link)
		}
	}

	link := admin("sign-in-link", "ADA@example.com")
	token, ok := strings.CutPrefix(link, "https://hub.example.com/admin/link/")
	if !ok {
		t.Fatalf("the link is %s", link)
	}
	if _, err := h.signIn.Link(t.Context(), v, false, token); err != nil {
		t.Errorf("the link: %v", err)
	}
	if _, err := h.signIn.Link(t.Context(), v, false, token); !errors.Is(err, auth.ErrLink) {
		t.Errorf("the link, twice: %v", err)
	}

	second := admin("set-password", "ada@example.com")
	if _, err := signIn(first); !errors.Is(err, auth.ErrBadCredentials) {
		t.Errorf("the first password after the second: %v", err)
	}
	if in, err = signIn(second); err != nil {
		t.Errorf("the second password: %v", err)
	}
	digest, err := h.sessions.Parse(in.Token.Reveal())
	if err != nil {
		t.Fatal(err)
	}

	for _, refused := range []struct {
		args []string
		want error
	}{
		{[]string{"disable", "ada@example.com"}, auth.ErrLastSuperAdmin},
		{[]string{"disable", "nobody@example.com"}, auth.ErrUserNotFound},
		{[]string{"create", "ADA@example.com"}, auth.ErrEmailTaken},
	} {
		if err := start(t, env, append([]string{"admin"}, refused.args...)...).result(t); !errors.Is(err, refused.want) {
			t.Errorf("admin %v: %v", refused.args, err)
		}
	}
	admin("create", "carol@example.com")
	admin("disable", "ada@example.com")
	if _, err := h.sessions.Load(t.Context(), false, digest); !errors.Is(err, auth.ErrUnknown) {
		t.Errorf("the session of one who is switched off: %v", err)
	}
	admin("enable", "ada@example.com")
	if _, err = signIn(second); err != nil {
		t.Errorf("switched on again: %v", err)
	}
}

// The previous secret still knows sessions and devices; one that is gone knows none.
func TestSessionsOutliveARotation(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	before := newTestHub(t, url, nil)
	tenant, err := before.tenants.Create(t.Context(), byCommandLine(), tenants.NewTenant{Name: "Shop"})
	if err != nil {
		t.Fatal(err)
	}
	_, err = before.users.Create(t.Context(), byCommandLine(), auth.TenantRealm(tenant.ID),
		auth.NewUser{Email: "ada@example.com", Role: auth.RoleOwner, Password: "correct horse"})
	if err != nil {
		t.Fatal(err)
	}
	if err := before.directory.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	in, err := before.signIn.Password(t.Context(), auth.Visitor{IP: netip.MustParseAddr("192.0.2.1")},
		auth.Credentials{Portal: true, Tenant: "shop", Email: "ada@example.com", Password: "correct horse"})
	if err != nil {
		t.Fatal(err)
	}
	other := strings.Repeat("x", 4) + testSecretKeyBase
	for what, tt := range map[string]struct {
		changes map[string]string
		known   bool
	}{
		"rotated":  {map[string]string{"SECRET_KEY_BASE": other, "SECRET_KEY_BASE_PREVIOUS": testSecretKeyBase}, true},
		"replaced": {map[string]string{"SECRET_KEY_BASE": other}, false},
	} {
		h := newTestHub(t, url, tt.changes)
		digest, err := h.sessions.Parse(in.Token.Reveal())
		if err == nil {
			_, err = h.sessions.Load(t.Context(), true, digest)
		}
		if (err == nil) != tt.known {
			t.Errorf("%s: %v", what, err)
		}
	}
}
