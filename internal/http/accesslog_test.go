package http

import (
	"encoding/json"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/tenants"
)

// lines are the levels of the access log's lines that a request causes.
func (f *front) lines(t *testing.T, request func()) (levels []string) {
	t.Helper()
	before := len(f.log.String())
	request()
	for line := range strings.Lines(f.log.String()[before:]) {
		var l struct{ Level, Msg string }
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if l.Msg == "request" {
			levels = append(levels, l.Level)
		}
	}
	return levels
}

// Nothing bounds what strangers send, so that a line for each of their requests, whatever it asks for, is for debugging
// only; whoever has proved who it is has one.
func TestAccessLogIsOfKnownCallers(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) {
		unlimited(d) // what is refused by a limit is another reason
		d.MetricsToken = "the metrics token"
	})
	v := f.newConversation(t)
	_, revoked, err := f.Tenants.CreateOperatorToken(t.Context(), testActor, tenants.NewOperatorToken{Name: "gone", Scopes: []string{"read"}})
	if err != nil {
		t.Fatal(err)
	}
	admin := f.asAdmin(t, auth.RoleAdmin)
	hook, webhook := `{"text":"x"}`, "/api/v1/channels/"+f.webhook.ID.String()+"/inbound"
	meta := "/api/v1/channels/" + f.whatsapp.ID.String() + "/inbound?hub.mode=subscribe&hub.challenge=1&hub.verify_token="
	origin := header("Origin", "https://app.example")
	password := func(text string) url.Values {
		return url.Values{"email": {"admin@example.com"}, "password": {text}}
	}
	type kind struct {
		name string
		send func() answer
	}
	ask := func(name, method, path, body string, o ...option) kind {
		return kind{name, func() answer { return f.call(t, method, path, body, o...) }}
	}
	strangers := []kind{
		ask("no such path", "GET", "/.env", ""),
		ask("no such method", "DELETE", "/api/v1/conversations", ""),
		ask("a method nobody has", "BREW", "/coffee", ""),
		ask("a preflight", "OPTIONS", "/api/v1/conversations", "", origin, header("Access-Control-Request-Method", "POST")),
		ask("a preflight from elsewhere", "OPTIONS", "/api/v1/x", "", header("Origin", "https://evil.example"), header("Access-Control-Request-Method", "POST")),
		ask("an unknown key", "GET", "/api/v1/conversations", "", header("X-Api-Key", inventedKey(f.key, 1))),
		ask("a malformed key", "GET", "/api/v1/conversations", "", header("X-Api-Key", "x")),
		ask("an unknown secret", "GET", "/api/v1/routing_rules", "", header("X-Channel-Token", "x")),
		ask("a forged token", "POST", "/api/v1/converger/tokens/refresh", "", bearer("a.b.c")),
		ask("an unknown operator", "GET", managementPrefix+"/tenants", "", bearer(revoked.Reveal()[:len(revoked.Reveal())-1]+"!")),
		ask("an unknown channel", "POST", "/api/v1/channels/"+uuid.NewString()+"/inbound", hook),
		ask("no signature", "POST", webhook, hook),
		ask("a forged webhook", "POST", webhook, hook, signed("a guess", hook, time.Now())),
		ask("a forged path", "POST", webhook+"/a-guess", hook),
		ask("a guessed handshake", "GET", meta+"guess", ""),
		ask("a handshake without a secret", "GET", webhook, ""),
		ask("an invented session", "GET", "/admin", "", browser, f.withCookie(areaAdmin, sessionCookie, "cvg_ses_x")),
		ask("a public page", "GET", "/problems", "", browser),
		ask("a probe", "GET", "/health/ready", ""),
		ask("metrics", "GET", "/metrics", "", bearer("the metrics token")),
		{"a wrong password", func() answer { return f.post(t, "/admin/login", password("wrong")) }},
		{"an empty form", func() answer { return f.post(t, "/portal/login", url.Values{}) }},
		{"a form from elsewhere", func() answer {
			return f.post(t, "/admin/login", password("wrong"), header("Origin", "https://evil.example"))
		}},
		{"a guessed link", func() answer { return f.post(t, "/admin/link/cvg_lnk_x", nil) }},
	}
	for _, rt := range f.routes { // and every address without any credential
		path := rt.pattern
		for name, id := range map[string]string{"channel_id": f.webhook.ID.String(), "tenant_id": f.tenant.ID.String(), "conversation_id": v.ID.String()} {
			path = strings.ReplaceAll(path, "{"+name+"}", id)
		}
		strangers = append(strangers, ask(rt.method+" "+rt.pattern, rt.method, path, ""))
	}
	for _, k := range strangers {
		var a answer
		if got := f.lines(t, func() { a = k.send() }); len(got) != 1 || got[0] != "DEBUG" {
			t.Errorf("a stranger, %s: lines %v for %s", k.name, got, a)
		}
	}
	for _, k := range []kind{
		ask("a key", "GET", "/api/v1/conversations", "", f.apiKey()),
		ask("a key, to what is not there", "GET", "/api/v1/conversations/"+uuid.NewString(), "", f.apiKey()),
		ask("a secret", "POST", "/api/v1/converger/tokens/generate", "", bearer(f.webhook.Secret.Reveal())),
		ask("a token", "GET", "/api/v1/converger/conversations/"+v.ID.String(), "", bearer(f.newToken(t, auth.Claims{ConversationID: v.ID}))),
		ask("an operator", "GET", managementPrefix+"/tenants", "", f.ops()),
		ask("a provider", "POST", webhook, hook, signed(f.webhook.Secret, hook, time.Now())),
		ask("a provider that checks the address", "GET", meta+"verify-canary", ""),
		ask("a person", "GET", "/admin", "", browser, admin),
		{"a right password", func() answer { return f.post(t, "/admin/login", password(testPassword)) }},
	} {
		var a answer
		if got := f.lines(t, func() { a = k.send() }); len(got) != 1 || got[0] != "INFO" {
			t.Errorf("%s: lines %v for %s", k.name, got, a)
		}
	}
	limitOverride(t, f, `{"limit":0,"scale_ms":1000}`, "api_read")
	if got := f.lines(t, func() { f.call(t, "GET", "/api/v1/conversations", "", f.apiKey()).is(t, 429, codeRateLimited) }); len(got) != 1 || got[0] != "DEBUG" {
		t.Errorf("refused by a limit: lines %v", got)
	}
}
