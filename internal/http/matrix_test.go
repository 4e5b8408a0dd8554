package http

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/inbound"
	"converger/internal/tenants"
)

// Every route that names something, taken from the route table, is tried with the ids of another tenant's things and with
// ids of nothing: the answer is the same 404, and no table changes.
func TestForeignIDs(t *testing.T) {
	t.Parallel()
	f := newFront(t, unlimited)
	ctx := t.Context()

	other := must(f.Tenants.Create(ctx, testActor, tenants.NewTenant{Name: "Other"}))
	otherKey, _, err := f.Tenants.CreateKey(ctx, testActor, other.ID, tenants.NewKey{Name: "theirs"})
	if err != nil {
		t.Fatal(err)
	}
	theirs := f.newChannel(t, other.ID, channel.NewChannel{Name: "theirs", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	f.refresh(t)
	conversation := must(f.Activities.CreateConversation(ctx, other.ID, activity.NewConversation{ChannelID: theirs.ID}))
	text := "theirs"
	theirFile := activity.Upload{ID: uuid.Must(uuid.NewV7()), ContentType: "text/plain", Size: 4, Name: "theirs.txt", URL: "/x"}
	if err := f.Uploads.Put(ctx, upload.Key(other.ID, theirFile.ID), strings.NewReader("data")); err != nil {
		t.Fatal(err)
	}
	posted := f.Activities.Append(ctx, []activity.New{{TenantID: other.ID, ConversationID: conversation.ID, Sender: "user", Text: &text, Uploads: []activity.Upload{theirFile}}})
	if posted[0].Err != nil {
		t.Fatal(posted[0].Err)
	}
	deliveries, _, err := f.Deliveries.List(ctx, other.ID, delivery.Filter{}, uuid.Nil, 1)
	if err != nil || len(deliveries) != 1 {
		t.Fatalf("the other tenant has %d deliveries (%v), want 1", len(deliveries), err)
	}
	hook := `{"text":"hi"}`
	f.call(t, "POST", "/api/v1/channels/"+theirs.ID.String()+"/inbound", hook, signed(theirs.Secret, hook, time.Now())).is(t, 201, "")
	events, _, err := f.Inbound.ListAllTenants(ctx, inbound.Filter{TenantID: &other.ID}, uuid.Nil, 1)
	if err != nil || len(events) != 1 {
		t.Fatalf("the other tenant has %d events (%v), want 1", len(events), err)
	}
	sink := f.newChannel(t, other.ID, channel.NewChannel{Name: "sink", Type: channel.TypeEcho})
	rule := must(f.Rules.Create(ctx, testActor, other.ID, delivery.NewRoutingRule{Name: "theirs", SourceChannelID: theirs.ID, TargetChannelIDs: []uuid.UUID{sink.ID}}))

	f.newUser(t, auth.Admins, "other@example.com", auth.RoleAdmin)
	theirSession := f.sessionOf(t, f.signedIn(t, auth.Admins, "other@example.com"))
	theirUser := must(f.Users.Create(ctx, testActor, auth.TenantRealm(other.ID), auth.NewUser{Email: "ada@other.example", Role: auth.RoleOwner}))
	admin, owner := f.asAdmin(t, auth.RoleSuperAdmin), f.asOwner(t)

	foreign := map[string]string{
		"conversation_id": conversation.ID.String(), "delivery_id": deliveries[0].ID.String(), "channel_id": theirs.ID.String(),
		"tenant_id": f.tenant.ID.String(), "key_id": otherKey.ID.String(), "event_id": events[0].ID.String(), "rule_id": rule.ID.String(), "bucket": "inbound",
		"secret": "x", "attachment_id": theirFile.ID.String(), "token_id": uuid.NewString(), "range_id": uuid.NewString(),
		"user_id": theirUser.ID.String(), "session_id": theirSession.String(),
	}
	random := map[string]string{}
	for name := range foreign {
		random[name] = uuid.Must(uuid.NewV7()).String()
	}
	bodies := map[string]string{
		"/activities": `{"text":"hi"}`, "/limits/{bucket}": `{"limit":1,"scale_ms":1000}`, "/keys": `{"name":"k"}`,
		"/channels": `{"name":"c","type":"echo"}`, "/channels/{channel_id}": `{"name":"mine now"}`,
		"/api/v1/routing_rules/{rule_id}": `{"routing_rule":{"name":"mine now"}}`, "/tenants/{tenant_id}/routing_rules/{rule_id}": `{"name":"mine now"}`,
		"/upload_types": `{"types":["image/png"]}`, "/tenants/{tenant_id}": `{"name":"mine now"}`, "/address_ranges/{range_id}": `{"note":"mine now"}`,
		"/users": `{"email":"eve@example.com","role":"owner"}`, "/{user_id}": `{"name":"mine now"}`, "/{user_id}/password": `{"password":"correct horse battery"}`,
	}
	// Of the tenant itself, and of a channel that the secret below is not of.
	neighbour := f.newConversation(t)
	f.Activities.Append(ctx, []activity.New{{TenantID: f.tenant.ID, ConversationID: neighbour.ID, Sender: "user", Text: &text}})
	ourSink := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "sink", Type: channel.TypeEcho})
	neighbourRule := must(f.Rules.Create(ctx, testActor, f.tenant.ID, delivery.NewRoutingRule{Name: "ours", SourceChannelID: f.webhook.ID, TargetChannelIDs: []uuid.UUID{ourSink.ID}}))
	neighbours := map[string]string{"conversation_id": neighbour.ID.String(), "channel_id": f.webhook.ID.String(), "rule_id": neighbourRule.ID.String()}
	secret := header("X-Channel-Token", f.whatsapp.Secret.Reveal())

	credentials := map[credential]option{
		credentialKey: f.apiKey(), credentialKeyOrSecret: f.apiKey(), credentialOperator: f.ops(), credentialToken: bearer(f.newToken(t, auth.Claims{UserID: "u"})),
		credentialSignature: func(*http.Request) {}, credentialAdmin: admin, credentialPortal: owner,
	}

	before := f.rows(t)
	tried := 0
	for _, rt := range f.routes {
		if !strings.Contains(rt.pattern, "_id}") {
			continue
		}
		for kind, ids := range map[string]map[string]string{"another tenant's": foreign, "random": random, "another channel's": neighbours} {
			if kind == "another channel's" && rt.auth != credentialKeyOrSecret {
				continue
			}
			// The management API and providers may name any tenant's things; what they may not is mix two tenants'.
			mixes := strings.Contains(rt.pattern, "{tenant_id}") && strings.Count(rt.pattern, "_id}") > 1
			anybodys := rt.auth == credentialOperator || rt.auth == credentialSignature || rt.auth == credentialAdmin && strings.Contains(rt.pattern, "{tenant_id}")
			if kind == "another tenant's" && anybodys && !mixes {
				continue
			}
			path := rt.pattern
			for name, id := range ids {
				path = strings.ReplaceAll(path, "{"+name+"}", id)
			}
			if strings.Contains(path, "{") {
				t.Fatalf("%s: give the test an id for it", path)
			}
			body := ""
			if rt.body != bodyNone {
				body = "{}"
				for end, b := range bodies {
					if strings.HasSuffix(rt.pattern, end) {
						body = b
					}
				}
			}
			as := []option{credentials[rt.auth]}
			switch {
			case kind == "another channel's":
				as = []option{secret}
			case rt.auth == credentialKeyOrSecret:
				as = append(as, secret)
			}
			form := func(*http.Request) {}
			if rt.body == bodyFields {
				body, form = "name=x&limit=1&scale_ms=1&unit=s&algorithm=fixed_window", header("Content-Type", "application/x-www-form-urlencoded")
			}
			for _, credential := range as {
				tried++
				a := f.call(t, rt.method, path, body, credential, form)
				if a.StatusCode != http.StatusNotFound || a.get(t, "code") != string(codeNotFound) {
					t.Errorf("%s %s with %s ids: %s", rt.method, rt.pattern, kind, a)
				}
				if strings.Contains(string(a.body), other.ID.String()) {
					t.Errorf("%s %s names the other tenant", rt.method, rt.pattern)
				}
			}
		}
	}
	if tried < 40 {
		t.Errorf("only %d cases: the table is not what the test thinks", tried)
	}
	if diff := cmp.Diff(before, f.rows(t)); diff != "" {
		t.Errorf("refused requests changed tables:\n%s", diff)
	}
	if v := must(f.Activities.GetConversation(ctx, other.ID, conversation.ID, nil)); v.Status != activity.StatusActive {
		t.Error("the other tenant's conversation was closed")
	}
	if r := must(f.Rules.Get(ctx, other.ID, rule.ID)); !cmp.Equal(r, rule) {
		t.Errorf("the other tenant's rule became %+v", r)
	}
	if v := must(f.Activities.GetConversation(ctx, f.tenant.ID, neighbour.ID, nil)); v.Status != activity.StatusActive {
		t.Error("the conversation of another channel was closed")
	}
	if r := must(f.Rules.Get(ctx, f.tenant.ID, neighbourRule.ID)); !cmp.Equal(r, neighbourRule) {
		t.Errorf("another channel's rule became %+v", r)
	}
	for tenant, ch := range map[uuid.UUID]uuid.UUID{other.ID: theirs.ID, f.tenant.ID: f.webhook.ID} {
		if st := must(f.Deliveries.State(ctx, tenant, ch)); st.Circuit != delivery.CircuitClosed {
			t.Errorf("a channel's deliveries are %s", st.Circuit)
		}
	}
	if ch := must(f.Channels.Get(ctx, other.ID, theirs.ID)); ch.Name != "theirs" {
		t.Error("the other tenant's channel was renamed")
	}
}

// Foreign ids in bodies and queries are no way round.
func TestForeignIDsInBodies(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	ctx := t.Context()
	other := must(f.Tenants.Create(ctx, testActor, tenants.NewTenant{Name: "Other"}))
	theirs := f.newChannel(t, other.ID, channel.NewChannel{Name: "theirs", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	conversation := must(f.Activities.CreateConversation(ctx, other.ID, activity.NewConversation{ChannelID: theirs.ID}))
	text := "theirs"
	posted := f.Activities.Append(ctx, []activity.New{{TenantID: other.ID, ConversationID: conversation.ID, Sender: "user", Text: &text}})[0]
	if posted.Err != nil {
		t.Fatal(posted.Err)
	}
	mine := f.newConversation(t)
	f.refresh(t)
	before := f.rows(t)

	f.call(t, "POST", "/api/v1/conversations", `{"channel_id":"`+theirs.ID.String()+`"}`, f.apiKey()).is(t, 404, codeNotFound)
	f.call(t, "POST", "/api/v1/conversations/"+mine.ID.String()+"/activities", `{"type":"messageReaction","text":"+1","reply_to_id":"`+posted.Activity.ID.String()+`"}`,
		f.apiKey()).is(t, 422, codeValidationFailed)
	hook := `{"text":"hi","conversation_id":"` + conversation.ID.String() + `"}`
	a := f.call(t, "POST", "/api/v1/channels/"+f.webhook.ID.String()+"/inbound", hook, signed(f.webhook.Secret, hook, time.Now()))
	a.is(t, 404, codeNotFound)
	for _, q := range []string{"/api/v1/conversations?channel_id=", "/api/v1/deliveries?channel_id="} {
		a := f.call(t, "GET", q+theirs.ID.String(), "", f.apiKey())
		a.is(t, 200, "")
		if n := len(a.get(t, "data").([]any)); n != 0 {
			t.Errorf("%s shows %d of another tenant's", q, n)
		}
	}
	for _, body := range []string{
		`{"name":"r","source_channel_id":"` + theirs.ID.String() + `","target_channel_ids":["` + f.webhook.ID.String() + `"]}`,
		`{"name":"r","source_channel_id":"` + f.webhook.ID.String() + `","target_channel_ids":["` + theirs.ID.String() + `"]}`,
	} {
		f.call(t, "POST", "/api/v1/routing_rules", `{"routing_rule":`+body+`}`, f.apiKey()).is(t, 422, codeValidationFailed)
	}
	after := f.rows(t)
	delete(before, "inbound_events") // the event is stored, as every signed one is
	delete(after, "inbound_events")
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("refused requests changed tables:\n%s", diff)
	}
}
