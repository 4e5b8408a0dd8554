package http

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// TestWhomBucketsCount holds every bucket to its subject. Each limit is one: of callers in one list the first is admitted
// and the others find the budget spent; callers of different lists do not meet.
func TestWhomBucketsCount(t *testing.T) {
	t.Parallel()
	var ones []string
	for _, b := range ratelimit.Buckets() {
		if b.Info().Default != (ratelimit.Rule{}) {
			ones = append(ones, fmt.Sprintf(`%q: {"limit": 1, "scale_ms": 60000}`, b))
		}
	}
	f := newFront(t, limits("{"+strings.Join(ones, ",")+"}"))

	neighbour := must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Neighbour"}))
	second := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "shop", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	foreign := f.newChannel(t, neighbour.ID, channel.NewChannel{Name: "site", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	ownKey, otherKey, foreignKey := f.apiKey(), header("X-Api-Key", f.newKey(t, f.tenant.ID)), header("X-Api-Key", f.newKey(t, neighbour.ID))
	_, otherOperator, err := f.Tenants.CreateOperatorToken(t.Context(), testActor, tenants.NewOperatorToken{Name: "night", Scopes: []string{"read"}})
	if err != nil {
		t.Fatal(err)
	}
	f.refresh(t)
	admin, owner := f.asAdmin(t, auth.RoleViewer), f.asOwner(t)
	otherSession := f.signedIn(t, auth.Admins, "viewer@example.com")
	secret := func(ch channel.Channel) option { return bearer(ch.Secret.Reveal()) }
	legacy := func(ch channel.Channel) option { return header("X-Channel-Token", ch.Secret.Reveal()) }
	// token is a new client token for each request: whom it speaks for is counted, not the token.
	token := func(ch channel.Channel, c auth.Claims) option {
		c.TenantID, c.ChannelID = ch.TenantID, ch.ID
		text, _, err := f.Tokens.Issue(time.Now(), c)
		if err != nil {
			t.Fatal(err)
		}
		return bearer(text)
	}
	ada, bob := auth.Claims{UserID: "ada"}, auth.Claims{UserID: "bob"}
	nobody := auth.Claims{ConversationID: uuid.New()}

	type caller func() answer
	ask := func(method, path string, o ...option) caller {
		return func() answer { return f.call(t, method, path, "", o...) }
	}
	write := func(path string, o ...option) caller {
		return func() answer { return f.call(t, "POST", path, `{"text":"x"}`, o...) }
	}
	show := func(path string, o ...option) caller { return func() answer { return f.show(t, path, o...) } }
	// hook is a webhook of who knows the secret, or none.
	hook := func(ch channel.Channel, endpoint, addr string, secret secrets.Text) caller {
		body := `{"text":"x"}`
		return write("/api/v1/channels/"+ch.ID.String()+"/"+endpoint, from(addr), signed(secret, body, time.Now()))
	}
	login := func(addr string, area area, tenant, email string) caller {
		return func() answer {
			v := url.Values{"email": {email}, "password": {"wrong"}}
			if tenant != "" {
				v.Set("tenant", tenant)
			}
			return f.post(t, area.home()+"/login", v, from(addr))
		}
	}
	unknown := func(addr string, o option) caller { return ask("GET", "/api/v1/conversations", from(addr), o) }

	activities := "/api/v1/conversations/" + uuid.NewString() + "/activities"
	clientConversation := "/api/v1/converger/conversations/" + uuid.NewString()
	const generate, refresh = "/api/v1/converger/tokens/generate", "/api/v1/converger/tokens/refresh"

	rows := map[ratelimit.Bucket][][]caller{
		// A tenant, whoever writes for it, by either API.
		ratelimit.ActivityCreate: {
			{write(activities, ownKey), write(activities, otherKey), write(activities, legacy(f.webhook)), write(activities, legacy(second)),
				write(clientConversation+"/activities", token(f.webhook, ada)), write(clientConversation+"/activities", token(f.webhook, bob)),
				write(clientConversation+"/activities", token(second, nobody))},
			{write(clientConversation+"/activities", token(foreign, ada)), write(activities, foreignKey)},
		},
		// A tenant.
		ratelimit.Upload: {
			{write(clientConversation+"/upload", token(f.webhook, ada)), write(clientConversation+"/upload", token(f.webhook, bob)),
				write(clientConversation+"/upload", token(second, ada))},
			{write(clientConversation+"/upload", token(foreign, ada))},
		},
		// A channel: its provider, and apart from that all who have not proved to be it. The provider's first post is one of those.
		ratelimit.Inbound: {
			{hook(f.webhook, "inbound", "198.51.100.1:1", f.webhook.Secret), hook(f.webhook, "inbound", "203.0.113.1:1", ""), hook(f.webhook, "status", "203.0.113.2:1", "")},
			{hook(f.webhook, "inbound", "198.51.100.1:2", f.webhook.Secret), hook(f.webhook, "status", "198.51.100.1:3", f.webhook.Secret),
				ask("GET", "/api/v1/channels/"+f.webhook.ID.String()+"/inbound", from("198.51.100.1:4"))},
			{hook(second, "status", "198.51.100.1:1", second.Secret), hook(second, "inbound", "203.0.113.1:1", "")},
			{hook(second, "inbound", "198.51.100.1:2", second.Secret), hook(second, "inbound", "198.51.100.1:3", "")},
			{hook(foreign, "inbound", "203.0.113.1:1", ""), hook(foreign, "inbound", "198.51.100.1:1", foreign.Secret)},
		},
		// A channel.
		ratelimit.TokenGenerate: {
			{ask("POST", generate, secret(f.webhook)), ask("POST", refresh, token(f.webhook, ada)), ask("POST", refresh, token(f.webhook, bob))},
			{ask("POST", refresh, token(second, ada)), ask("POST", generate, secret(second))},
			{ask("POST", generate, secret(foreign))},
		},
		// An address, ahead of any credential.
		ratelimit.TokenCreate: {
			{write("/api/v1/tokens", from("198.51.100.1:1"), legacy(f.webhook)), write("/api/v1/tokens", from("198.51.100.1:2"), legacy(foreign)), write("/api/v1/tokens", from("198.51.100.1:3"))},
			{write("/api/v1/tokens", from("[2001:db8::1]:1"), legacy(f.webhook)), write("/api/v1/tokens", from("[2001:db8::2]:1"), legacy(f.webhook))},
			{write("/api/v1/tokens", from("[2001:db8:0:1::1]:1"), legacy(f.webhook))},
		},
		ratelimit.LoginIP: {
			{login("192.0.2.11:1", areaAdmin, "", "a@example.com"), login("192.0.2.11:2", areaAdmin, "", "b@example.com"), login("192.0.2.11:3", areaPortal, "Acme", "c@example.com")},
			{login("192.0.2.12:1", areaAdmin, "", "d@example.com")},
		},
		// An account, by whatever spelling and from wherever; there is none of these.
		ratelimit.LoginAccount: {
			{login("192.0.2.21:1", areaAdmin, "", "nobody@example.com"), login("192.0.2.22:1", areaAdmin, "", " NoBody@Example.com")},
			{login("192.0.2.23:1", areaPortal, "Acme", "nobody@example.com"), login("192.0.2.24:1", areaPortal, "ACME ", "nobody@example.com")},
			{login("192.0.2.25:1", areaPortal, "Neighbour", "nobody@example.com")},
		},
		ratelimit.UnknownCaller: {
			{unknown("192.0.2.31:1", header("X-Api-Key", "cvg_live_x")), unknown("192.0.2.31:2", header("X-Channel-Token", "x")),
				ask("GET", managementPrefix+"/tenants", from("192.0.2.31:3"), bearer("x")), ask("POST", generate, from("192.0.2.31:4"), bearer("x")),
				ask("GET", "/api/v1/channels/"+uuid.NewString()+"/inbound", from("192.0.2.31:5")), ask("POST", refresh, from("192.0.2.31:6"), bearer("x.y.z")),
				show("/admin", from("192.0.2.31:7"), f.withCookie(areaAdmin, sessionCookie, "cvg_ses_x"))},
			{unknown("192.0.2.32:1", header("X-Api-Key", "cvg_live_x"))},
		},
		// An API key's tenant; of a client token the user.
		ratelimit.APIRead: {
			{ask("GET", "/api/v1/conversations", ownKey), ask("GET", "/api/v1/deliveries", otherKey), ask("GET", "/api/v1/routing_rules", legacy(f.webhook))},
			{ask("GET", "/api/v1/conversations", foreignKey)},
			{ask("GET", clientConversation, token(f.webhook, ada)), ask("GET", clientConversation+"/activities", token(f.webhook, ada))},
			{ask("GET", clientConversation, token(f.webhook, bob))},
			{ask("GET", clientConversation, token(second, ada))},
			{ask("GET", clientConversation, token(foreign, ada))},
			{ask("GET", clientConversation, token(f.webhook, nobody)), ask("GET", clientConversation, token(f.webhook, nobody))},
			{ask("GET", clientConversation, token(f.webhook, auth.Claims{ConversationID: uuid.New()}))},
		},
		// A session, not its user.
		ratelimit.WebPage: {
			{show("/admin", admin), show("/admin/tenants", admin), show("/admin/account", admin, from("192.0.2.99:1"))},
			{show("/admin", otherSession)},
			{show("/portal", owner), show("/portal/account", owner)},
		},
		ratelimit.Management: {
			{ask("GET", managementPrefix+"/tenants", f.ops()), ask("GET", managementPrefix+"/rate_limits", f.ops(), from("192.0.2.99:1"))},
			{ask("GET", managementPrefix+"/tenants", bearer(otherOperator.Reveal()))},
		},
	}

	for _, b := range ratelimit.Buckets() {
		_, has := rows[b]
		used := slices.ContainsFunc(f.routes, func(rt route) bool { return rt.bucket == b })
		// Deliveries are paced by package delivery, and no second factor is asked for yet.
		if elsewhere := b == ratelimit.ChannelOutbound || b == ratelimit.SecondFactor; !has && (used || !elsewhere) {
			t.Errorf("%s: whom does it count? It has no row", b)
		}
	}
	for _, b := range ratelimit.Buckets() { // one after the other: some rows fail to sign in, or are unknown, on purpose
		check := func(who string, a answer, admitted bool) {
			t.Helper()
			if (a.StatusCode != http.StatusTooManyRequests) != admitted {
				t.Errorf("%s: %s: admitted %v, want %v: %s", b, who, !admitted, admitted, a)
			}
			// Guards tell their state with a refusal at most.
			if told := a.Header.Get("Ratelimit"); !b.Info().Guard && b != ratelimit.UnknownCaller && !strings.HasPrefix(told, fmt.Sprintf(`"%s";r=0;`, b)) {
				t.Errorf("%s: %s was decided by %q", b, who, told)
			}
		}
		for i, list := range rows[b] {
			check(fmt.Sprintf("list %d, the first", i), list[0](), true)
		}
		for i, list := range rows[b] {
			for j, next := range list[1:] {
				check(fmt.Sprintf("list %d, number %d", i, j+2), next(), false)
			}
		}
	}
}
