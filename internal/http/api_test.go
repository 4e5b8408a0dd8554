package http

import (
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/tenants"
)

// keysOf are the members of an object, sorted.
func keysOf(t testing.TB, v any) []string {
	t.Helper()
	m, ok := v.(map[string]any)
	if !ok {
		t.Fatalf("not an object: %v", v)
	}
	var names []string
	for n := range m {
		names = append(names, n)
	}
	slices.Sort(names)
	return names
}

func TestTenantConversations(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	body := fmt.Sprintf(`{"channel_id":%q,"external_id":"ada","display_name":"Ada","metadata":{"vip":true},"colour":"ignored"}`, f.webhook.ID)
	a := f.call(t, "POST", "/api/v1/conversations", body, f.apiKey())
	a.is(t, 201, "")
	id := a.get(t, "data", "id").(string)
	want := []string{"channel_id", "id", "inserted_at", "metadata", "participant", "participant_id", "status", "tenant_id", "updated_at"}
	if diff := cmp.Diff(want, keysOf(t, a.get(t, "data"))); diff != "" {
		t.Errorf("members of a conversation:\n%s", diff)
	}
	if a.get(t, "data", "participant", "external_id") != "ada" || a.get(t, "data", "metadata", "vip") != true {
		t.Errorf("conversation: %s", a)
	}
	if got := a.Header.Get("Location"); got != "/api/v1/conversations/"+id {
		t.Errorf("Location: %q", got)
	}
	got := f.call(t, "GET", "/api/v1/conversations/"+id, "", f.apiKey())
	got.is(t, 200, "")
	if diff := cmp.Diff(a.get(t, "data"), got.get(t, "data")); diff != "" {
		t.Errorf("read back:\n%s", diff)
	}

	// Closing and opening again say the same twice, and leave one activity each.
	for _, step := range []struct{ verb, status string }{{"close", "closed"}, {"close", "closed"}, {"reopen", "active"}, {"reopen", "active"}} {
		a := f.call(t, "POST", "/api/v1/conversations/"+id+"/"+step.verb, "", f.apiKey())
		a.is(t, 200, "")
		if a.get(t, "data", "status") != step.status {
			t.Errorf("%s: %s", step.verb, a)
		}
	}
	list := f.call(t, "GET", "/api/v1/conversations/"+id+"/activities", "", f.apiKey())
	if n := len(list.get(t, "data").([]any)); n != 2 {
		t.Errorf("%d activities after close and reopen, want 2: %s", n, list)
	}
	f.call(t, "POST", "/api/v1/conversations", fmt.Sprintf(`{"channel_id":%q}`, uuid.New()), f.apiKey()).is(t, 404, codeNotFound)
}

// A list is walked by its cursor and its Link alike, without a gap or a repeat; a cursor serves its own list only.
func TestPages(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	var want []string
	for range 7 {
		want = append(want, f.newConversation(t).ID.String())
	}
	slices.Reverse(want) // newest first
	var got []string
	path := "/api/v1/conversations?limit=3&status=active"
	for range 10 {
		a := f.call(t, "GET", path, "", f.apiKey())
		a.is(t, 200, "")
		for _, v := range a.get(t, "data").([]any) {
			got = append(got, v.(map[string]any)["id"].(string))
		}
		link := a.Header.Get("Link")
		if a.get(t, "meta", "has_more") == false {
			if link != "" || a.get(t, "meta", "next_cursor") != nil {
				t.Errorf("a last page names a next one: %q", link)
			}
			break
		}
		next, ok := strings.CutSuffix(strings.TrimPrefix(link, "<"), `>; rel="next"`)
		u := must(url.Parse(next))
		if !ok || u.Query().Get("cursor") != a.get(t, "meta", "next_cursor") || u.Host != "" {
			t.Fatalf("Link %q and next_cursor %v differ", link, a.get(t, "meta", "next_cursor"))
		}
		path = next
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("walked:\n%s", diff)
	}

	cursor := f.call(t, "GET", "/api/v1/conversations?limit=3", "", f.apiKey()).get(t, "meta", "next_cursor").(string)
	f.call(t, "GET", "/api/v1/conversations?limit=2&cursor="+cursor, "", f.apiKey()).is(t, 200, "")
	altered := "B" + cursor[1:]
	if altered == cursor {
		altered = "C" + cursor[1:]
	}
	for _, bad := range []string{
		"/api/v1/conversations?status=active&cursor=" + cursor,
		"/api/v1/deliveries?cursor=" + cursor,
		"/api/v1/conversations?cursor=" + altered,
		"/api/v1/conversations?cursor=" + cursor[:len(cursor)-2],
	} {
		f.call(t, "GET", bad, "", f.apiKey()).is(t, 400, codeInvalidCursor)
	}
	other := must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Other"}))
	key := f.newKey(t, other.ID)
	f.refresh(t)
	f.call(t, "GET", "/api/v1/conversations?cursor="+cursor, "", header("X-Api-Key", key)).is(t, 400, codeInvalidCursor)
}

func FuzzCursor(f *testing.F) {
	k := cursors{testSecret}
	f.Add(k.encode(uuid.New(), "a"))
	f.Add("")
	f.Fuzz(func(t *testing.T, text string) {
		if id, err := k.decode(text, "a"); err == nil && text != "" && k.encode(id, "a") != text {
			t.Errorf("%q is not the cursor of %v", text, id)
		}
	})
}

func TestTenantActivities(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	path := "/api/v1/conversations/" + f.newConversation(t).ID.String() + "/activities"
	a := f.call(t, "POST", path, `{"text":"hi","sender":"ada","attachments":[{"contentType":"image/png","contentUrl":"https://cdn.example/a.png"}],"metadata":{"a":1}}`, f.apiKey())
	a.is(t, 201, "")
	want := []string{"attachments", "conversation_id", "deleted_at", "edited_at", "id", "idempotency_key", "inserted_at", "metadata", "reply_to_id", "sender", "seq", "tenant_id", "text", "type"}
	if diff := cmp.Diff(want, keysOf(t, a.get(t, "data"))); diff != "" {
		t.Errorf("members of an activity:\n%s", diff)
	}
	first := a.get(t, "data", "id").(string)
	f.call(t, "POST", path, `{"type":"messageReaction","text":"👍","reply_to_id":"`+first+`"}`, f.apiKey()).is(t, 201, "")
	f.call(t, "POST", path, `{"type":"messageUpdate","text":"hello","sender":"ada","reply_to_id":"`+first+`"}`, f.apiKey()).is(t, 201, "")
	for name, body := range map[string]string{
		"internal type": `{"type":"deliveryReceipt"}`, "unknown type": `{"type":"smoke"}`, "empty sender": `{"text":"x","sender":""}`,
		"reply to nothing": `{"type":"messageReaction","text":"x","reply_to_id":"` + uuid.NewString() + `"}`,
		"attachment":       `{"attachments":[{"contentUrl":"https://cdn.example/a.png"}]}`, "metadata": `{"text":"x","metadata":[]}`,
	} {
		if a := f.call(t, "POST", path, body, f.apiKey()); a.StatusCode != 422 || len(a.get(t, "errors").([]any)) == 0 {
			t.Errorf("%s: %s", name, a)
		}
	}

	// Pages by watermark; an empty one repeats what it was asked with.
	page := f.call(t, "GET", path+"?limit=2", "", f.apiKey())
	page.is(t, 200, "")
	mark := page.get(t, "meta", "watermark").(string)
	if page.get(t, "meta", "has_more") != true || !strings.Contains(page.Header.Get("Link"), "watermark="+mark) {
		t.Errorf("first page: %s, Link %q", page, page.Header.Get("Link"))
	}
	page = f.call(t, "GET", path+"?watermark="+mark, "", f.apiKey())
	if data := page.get(t, "data").([]any); len(data) != 1 || data[0].(map[string]any)["seq"] != 3.0 {
		t.Errorf("second page: %s", page)
	}
	last := page.get(t, "meta", "watermark").(string)
	page = f.call(t, "GET", path+"?watermark="+last, "", f.apiKey())
	if page.get(t, "meta", "watermark") != last || page.get(t, "meta", "has_more") != false {
		t.Errorf("empty page: %s", page)
	}
	if edited := f.call(t, "GET", path+"?limit=1", "", f.apiKey()).get(t, "data").([]any)[0].(map[string]any)["edited_at"]; edited == nil {
		t.Error("the edited message has no edited_at")
	}

	// Deliveries: one for each message to its own channel.
	list := f.call(t, "GET", "/api/v1/deliveries?activity_id="+first, "", f.apiKey())
	list.is(t, 200, "")
	deliveries := list.get(t, "data").([]any)
	if len(deliveries) != 1 {
		t.Fatalf("deliveries: %s", list)
	}
	d := deliveries[0].(map[string]any)
	if d["status"] != "pending" || d["payload"].(map[string]any)["id"] != first || d["channel_id"] != f.webhook.ID.String() {
		t.Errorf("delivery: %v", d)
	}
	one := f.call(t, "GET", "/api/v1/deliveries/"+d["id"].(string), "", f.apiKey())
	one.is(t, 200, "")
	today := time.Now().UTC().Format(time.DateOnly)
	if n := len(f.call(t, "GET", "/api/v1/deliveries?from="+today+"&to="+today, "", f.apiKey()).get(t, "data").([]any)); n != 3 {
		t.Errorf("%d deliveries today, want 3", n)
	}
}

func TestIdempotency(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	conversation := f.newConversation(t)
	path := "/api/v1/conversations/" + conversation.ID.String() + "/activities"
	post := func(body string, o ...option) answer {
		return f.call(t, "POST", path, body, append(o, f.apiKey())...)
	}
	quoted, bare := header("Idempotency-Key", `"k1"`), header("X-Idempotency-Key", "k1")
	first := post(`{"text":"hi"}`, quoted)
	first.is(t, 201, "")
	if first.Header.Get("Idempotent-Replayed") != "" {
		t.Error("the first answer is marked as a replay")
	}
	again := post(`{ "text" : "hi" }`, bare)
	again.is(t, 201, "")
	if again.Header.Get("Idempotent-Replayed") != "true" || again.get(t, "data", "id") != first.get(t, "data", "id") {
		t.Errorf("repeat: %s", again)
	}
	post(`{"text":"other"}`, bare).is(t, 422, codeKeyReused)
	post(`{"text":"hi"}`, quoted, header("X-Idempotency-Key", "k2")).is(t, 400, codeInvalidIdempotency)
	// Another key of the tenant is another caller.
	second := f.newKey(t, f.tenant.ID)
	f.refresh(t)
	other := f.call(t, "POST", path, `{"text":"other"}`, bare, header("X-Api-Key", second))
	other.is(t, 201, "")
	// A repeat is answered after the conversation was closed; a new message is not taken.
	f.call(t, "POST", "/api/v1/conversations/"+conversation.ID.String()+"/close", "", f.apiKey()).is(t, 200, "")
	post(`{"text":"hi"}`, bare).is(t, 201, "")
	post(`{"text":"new"}`).is(t, 409, codeConversationClosed)
}

// Two hundred parallel posts with one key make one activity, and everybody learns its id.
func TestIdempotencyInParallel(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	limitOverride(t, f, `{"limit":1000000,"scale_ms":1000}`, "activity_create")
	path := "/api/v1/conversations/" + f.newConversation(t).ID.String() + "/activities"
	var wg sync.WaitGroup
	ids := make([]string, 200)
	for i := range ids {
		wg.Go(func() {
			a := f.call(t, "POST", path, `{"text":"once"}`, f.apiKey(), header("Idempotency-Key", "once"))
			if a.StatusCode != 201 {
				t.Errorf("post %d: %s", i, a)
				return
			}
			ids[i] = a.get(t, "data", "id").(string)
		})
	}
	wg.Wait()
	slices.Sort(ids)
	if distinct := slices.Compact(ids); len(distinct) != 1 {
		t.Errorf("%d ids", len(distinct))
	}
	if n := len(f.call(t, "GET", path, "", f.apiKey()).get(t, "data").([]any)); n != 1 {
		t.Errorf("%d activities", n)
	}
}

func TestScopes(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	_, reader, err := f.Tenants.CreateKey(t.Context(), testActor, f.tenant.ID, tenants.NewKey{Name: "reader", Scopes: []string{"read"}})
	if err != nil {
		t.Fatal(err)
	}
	_, writer, err := f.Tenants.CreateOperatorToken(t.Context(), testActor, tenants.NewOperatorToken{Name: "w", Scopes: []string{"write"}})
	if err != nil {
		t.Fatal(err)
	}
	f.refresh(t)
	read := header("X-Api-Key", reader.Reveal())
	f.call(t, "GET", "/api/v1/conversations", "", read).is(t, 200, "")
	f.call(t, "POST", "/api/v1/conversations", `{}`, read).is(t, 403, codeInsufficientScope)
	f.call(t, "GET", managementPrefix+"/tenants", "", bearer(writer.Reveal())).is(t, 403, codeInsufficientScope)
	f.call(t, "POST", managementPrefix+"/tenants", `{"name":"by writer"}`, bearer(writer.Reveal())).is(t, 201, "")
}

func TestClientAPI(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	secret := bearer(f.webhook.Secret.Reveal())
	const base = "/api/v1/converger"
	a := f.call(t, "POST", base+"/tokens/generate", `{"user":{"id":"ada"}}`, secret)
	a.is(t, 200, "")
	if a.get(t, "conversationId") != nil || a.get(t, "expires_in") != 1800.0 {
		t.Errorf("generate: %s", a)
	}
	token := bearer(a.get(t, "token").(string))
	f.call(t, "POST", base+"/tokens/generate", "", token).is(t, 400, codeSecretRequired)
	f.call(t, "POST", base+"/tokens/generate", `{"scope":"tenant"}`, secret).is(t, 400, codeInvalidParameter)
	f.call(t, "POST", base+"/tokens/generate", `{"user":{"id":"system"}}`, secret).is(t, 422, codeValidationFailed)
	f.call(t, "POST", base+"/tokens/generate", `{"user":{"id":"`+strings.Repeat("x", 256)+`"}}`, secret).is(t, 422, codeValidationFailed)

	created := f.call(t, "POST", base+"/conversations", "", token)
	created.is(t, 201, "")
	id := created.get(t, "conversationId").(string)
	bound := bearer(created.get(t, "token").(string))
	if _, ok := created.json(t)["streamUrl"]; !ok {
		t.Errorf("no streamUrl: %s", created)
	}
	refreshed := f.call(t, "POST", base+"/tokens/refresh", "", bound)
	refreshed.is(t, 200, "")
	if refreshed.get(t, "conversationId") != id {
		t.Errorf("refresh lost the conversation: %s", refreshed)
	}

	post := func(body string, o ...option) answer {
		return f.call(t, "POST", base+"/conversations/"+id+"/activities", body, o...)
	}
	p := post(`{"text":"hi","channelData":{"clientActivityId":"1"}}`, bound, header("X-Idempotency-Key", "1"))
	p.is(t, 200, "")
	if p.get(t, "seq") != 1.0 {
		t.Errorf("post: %s", p)
	}
	if r := post(`{"text":"hi","channelData":{"clientActivityId":"1"}}`, bound, header("Idempotency-Key", "1")); r.get(t, "id") != p.get(t, "id") || r.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("repeat: %s", r)
	}
	post(`{"text":"I am Ada","from":{"id":"ada"}}`, bound).is(t, 200, "")
	post(`{"text":"I am Bob","from":{"id":"bob"}}`, bound).is(t, 403, codeSenderMismatch)
	post(`{"text":"no user","from":"ada"}`, bound).is(t, 422, codeValidationFailed)
	faulty := post(`{"type":"messageReaction","text":"+1","replyToId":"`+uuid.NewString()+`"}`, bound)
	faulty.is(t, 422, codeValidationFailed)
	if pointer := faulty.get(t, "errors").([]any)[0].(map[string]any)["pointer"]; pointer != "#/replyToId" {
		t.Errorf("pointer %v, want the client's own name", pointer)
	}

	// An anonymous token is "user" and nobody else.
	anon := bearer(f.newToken(t, auth.Claims{}))
	post(`{"text":"hi","from":{"id":"user"}}`, anon).is(t, 200, "")
	post(`{"text":"hi","from":{"id":"ada"}}`, anon).is(t, 403, codeSenderMismatch)

	list := f.call(t, "GET", base+"/conversations/"+id+"/activities?watermark=0", "", bound)
	list.is(t, 200, "")
	activities := list.get(t, "activities").([]any)
	if len(activities) != 3 {
		t.Fatalf("list: %s", list)
	}
	wantKeys := []string{"attachments", "channelData", "conversationId", "deletedAt", "editedAt", "from", "id", "replyToId", "text", "timestamp", "type"}
	if diff := cmp.Diff(wantKeys, keysOf(t, activities[0])); diff != "" {
		t.Errorf("members:\n%s", diff)
	}
	if from := activities[0].(map[string]any)["from"].(map[string]any)["id"]; from != "ada" {
		t.Errorf("sender %v", from)
	}
	if n := len(f.call(t, "GET", base+"/conversations/"+id+"/activities?watermark=2", "", bound).get(t, "activities").([]any)); n != 1 {
		t.Errorf("%d behind the plain watermark 2", n)
	}
	f.call(t, "GET", base+"/conversations/"+id+"/activities?watermark=x", "", bound).is(t, 400, codeInvalidWatermark)

	// Bound to one conversation; the channel's others are for tokens that are not bound.
	other := f.newConversation(t).ID.String()
	f.call(t, "GET", base+"/conversations/"+other, "", bound).is(t, 403, codeConversationBound)
	f.call(t, "GET", base+"/conversations/"+other, "", token).is(t, 200, "")
	foreign := must(f.Activities.CreateConversation(t.Context(), f.tenant.ID, activity.NewConversation{ChannelID: f.whatsapp.ID}))
	f.call(t, "GET", base+"/conversations/"+foreign.ID.String(), "", token).is(t, 404, codeNotFound)
	f.call(t, "POST", base+"/conversations/"+foreign.ID.String()+"/activities", `{"text":"x"}`, token).is(t, 404, codeNotFound)

	closed := f.call(t, "POST", base+"/conversations/"+id+"/close", "", bound)
	if closed.get(t, "status") != "closed" || closed.get(t, "conversationId") != id {
		t.Errorf("close: %s", closed)
	}
	post(`{"text":"late"}`, bound).is(t, 409, codeConversationClosed)
	f.call(t, "POST", base+"/conversations/"+id+"/reopen", "", bound).is(t, 200, "")
	// Its tenant sees the user as the conversation's participant.
	seen := f.call(t, "GET", "/api/v1/conversations?external_id=ada", "", f.apiKey())
	if n := len(seen.get(t, "data").([]any)); n != 1 {
		t.Errorf("the user's conversations: %s", seen)
	}
}

func TestLegacyToken(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t)
	secret := header("X-Channel-Token", f.webhook.Secret.Reveal())
	body := fmt.Sprintf(`{"conversation_id":%q,"user_id":"ada"}`, v.ID)
	a := f.call(t, "POST", "/api/v1/tokens", body, secret)
	a.is(t, 201, "")
	if a.Header.Get("Deprecation") != "@1795996800" || a.get(t, "expires_in") != 1800.0 {
		t.Errorf("%s %v", a, a.Header)
	}
	token := bearer(a.get(t, "token").(string))
	f.call(t, "POST", "/api/v1/converger/conversations/"+v.ID.String()+"/activities", `{"text":"hi","from":{"id":"ada"}}`, token).is(t, 200, "")
	f.call(t, "POST", "/api/v1/tokens", fmt.Sprintf(`{"conversation_id":%q,"user_id":"ada"}`, uuid.New()), secret).is(t, 404, codeNotFound)
	f.call(t, "POST", "/api/v1/tokens", `{}`, secret).is(t, 422, codeValidationFailed)
	// The limit is the address's and stands ahead of any credential.
	for range 7 {
		f.call(t, "POST", "/api/v1/tokens", body)
	}
	refused := f.call(t, "POST", "/api/v1/tokens", body, secret)
	refused.is(t, 429, codeRateLimited)
	if refused.get(t, "bucket") != "token_create" {
		t.Errorf("refused by %v", refused.get(t, "bucket"))
	}
	f.call(t, "POST", "/api/v1/tokens", body, secret, from("198.51.100.77:1")).is(t, 201, "")
}

// A suspended tenant and an inactive or deleted channel are stopped at every entrance with the next request.
func TestSwitchedOff(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t)
	hook := `{"text":"hi"}`
	entrances := func(t *testing.T, want map[string]int, c code) {
		t.Helper()
		token := bearer(f.newToken(t, auth.Claims{ConversationID: v.ID}))
		for name, a := range map[string]answer{
			"api":      f.call(t, "GET", "/api/v1/conversations", "", f.apiKey()),
			"token":    f.call(t, "GET", "/api/v1/converger/conversations/"+v.ID.String(), "", token),
			"generate": f.call(t, "POST", "/api/v1/converger/tokens/generate", "", bearer(f.webhook.Secret.Reveal())),
			"inbound":  f.call(t, "POST", "/api/v1/channels/"+f.webhook.ID.String()+"/inbound", hook, signed(f.webhook.Secret, hook, time.Now())),
			"status":   f.call(t, "POST", "/api/v1/channels/"+f.webhook.ID.String()+"/status", hook, signed(f.webhook.Secret, hook, time.Now())),
		} {
			if a.StatusCode != want[name] || want[name] >= 400 && c != "" && a.get(t, "code") != string(c) {
				t.Errorf("%s: %s, want %d %s", name, a, want[name], c)
			}
		}
	}
	tenant := managementPrefix + "/tenants/" + f.tenant.ID.String()
	ch := managementPrefix + "/channels/" + f.webhook.ID.String()
	on := map[string]int{"api": 200, "token": 200, "generate": 200, "inbound": 201, "status": 422}
	entrances(t, on, "")
	f.call(t, "POST", tenant+"/suspend", "", f.ops()).is(t, 200, "")
	entrances(t, map[string]int{"api": 403, "token": 403, "generate": 403, "inbound": 403, "status": 403}, codeTenantSuspended)
	f.call(t, "POST", tenant+"/activate", "", f.ops()).is(t, 200, "")
	entrances(t, on, "")
	f.call(t, "PATCH", ch, `{"status":"inactive"}`, f.ops()).is(t, 200, "")
	entrances(t, map[string]int{"api": 200, "token": 403, "generate": 403, "inbound": 400, "status": 400}, codeChannelInactive)
	f.call(t, "PATCH", ch, `{"status":"active"}`, f.ops()).is(t, 200, "")
	f.call(t, "DELETE", ch, "", f.ops()).is(t, 204, "")
	entrances(t, map[string]int{"api": 200, "token": 401, "generate": 401, "inbound": 404, "status": 404}, "")
	f.call(t, "GET", ch, "", f.ops()).is(t, 404, codeNotFound)
}

func TestManagement(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	a := f.call(t, "POST", managementPrefix+"/tenants", `{"name":"New"}`, f.ops())
	a.is(t, 201, "")
	tenant := managementPrefix + "/tenants/" + a.get(t, "data", "id").(string)
	f.call(t, "POST", managementPrefix+"/tenants", `{"name":"NEW"}`, f.ops()).is(t, 409, codeConflict)
	f.call(t, "POST", managementPrefix+"/tenants", `{"name":""}`, f.ops()).is(t, 422, codeValidationFailed)
	f.call(t, "GET", tenant, "", f.ops()).is(t, 200, "")
	if n := len(f.call(t, "GET", managementPrefix+"/tenants?limit=1", "", f.ops()).get(t, "data").([]any)); n != 1 {
		t.Errorf("%d tenants on a page of one", n)
	}

	// Keys: shown once, in force at once, revoked at once or after an overlap.
	made := f.call(t, "POST", tenant+"/keys", `{"name":"server","scopes":["read"],"expires_at":"2099-01-01T00:00:00Z"}`, f.ops())
	made.is(t, 201, "")
	key := header("X-Api-Key", made.get(t, "data", "api_key").(string))
	f.call(t, "GET", "/api/v1/conversations", "", key).is(t, 200, "")
	list := f.call(t, "GET", tenant+"/keys", "", f.ops())
	if strings.Contains(string(list.body), made.get(t, "data", "api_key").(string)) {
		t.Error("a key is shown twice")
	}
	revoke := tenant + "/keys/" + made.get(t, "data", "id").(string) + "/revoke"
	f.call(t, "POST", revoke, `{"overlap_seconds":3600}`, f.ops()).is(t, 200, "")
	f.call(t, "GET", "/api/v1/conversations", "", key).is(t, 200, "")
	f.call(t, "POST", revoke, "", f.ops()).is(t, 200, "")
	f.call(t, "GET", "/api/v1/conversations", "", key).is(t, 401, codeInvalidCredential) // revoked ones leave the directory
	f.call(t, "POST", revoke, `{"overlap_seconds":-1}`, f.ops()).is(t, 422, codeValidationFailed)

	// Channels: secret once, config redacted, edited with the redacted form sent back.
	ch := f.call(t, "POST", tenant+"/channels", `{"name":"wa","type":"whatsapp_meta","config":{"access_token":"EAAcanary","phone_number_id":"1","app_secret":"shh-canary","verify_token":"vt-canary"}}`, f.ops())
	ch.is(t, 201, "")
	if ch.get(t, "data", "secret") == nil || ch.get(t, "data", "config", "app_secret") != channel.Redacted {
		t.Errorf("created: %s", ch)
	}
	path := managementPrefix + "/channels/" + ch.get(t, "data", "id").(string)
	shown := f.call(t, "GET", path, "", f.ops())
	if strings.Contains(string(shown.body), "canary") || shown.json(t)["data"].(map[string]any)["secret"] != nil {
		t.Errorf("a secret is shown: %s", shown)
	}
	config, _ := json.Marshal(shown.get(t, "data", "config"))
	edited := f.call(t, "PATCH", path, `{"name":"wa2","rate_limit":"80/s","config":`+string(config)+`}`, f.ops())
	edited.is(t, 200, "")
	if edited.get(t, "data", "name") != "wa2" || edited.get(t, "data", "rate_limit") != "80/s" {
		t.Errorf("edited: %s", edited)
	}
	f.call(t, "PATCH", path, `{"rate_limit":null}`, f.ops()).is(t, 200, "")
	f.call(t, "PATCH", path, `{"name":null}`, f.ops()).is(t, 422, codeValidationFailed)
	f.call(t, "PATCH", path, `{"colour":"red"}`, f.ops()).is(t, 422, codeValidationFailed)
	f.call(t, "PATCH", path, `{"config":{}}`, f.ops()).is(t, 422, codeValidationFailed)
	rotated := f.call(t, "POST", path+"/secret", `{"overlap_seconds":60}`, f.ops())
	rotated.is(t, 200, "")
	for _, secret := range []any{ch.get(t, "data", "secret"), rotated.get(t, "data", "secret")} {
		f.call(t, "POST", "/api/v1/converger/tokens/generate", "", bearer(secret.(string))).is(t, 200, "")
	}
	f.call(t, "POST", path+"/secret", `{"overlap_seconds":0}`, f.ops()).is(t, 200, "")
	f.call(t, "POST", "/api/v1/converger/tokens/generate", "", bearer(ch.get(t, "data", "secret").(string))).is(t, 401, codeInvalidCredential)

	// Limits: what is shown is what is enforced.
	all := f.call(t, "GET", tenant+"/limits", "", f.ops()).get(t, "data").([]any)
	if len(all) != 13 {
		t.Errorf("%d buckets, want all 13", len(all))
	}
	put := f.call(t, "PUT", tenant+"/limits/inbound", `{"limit":2000,"scale_ms":1000,"algorithm":"token_bucket","burst":3000}`, f.ops())
	put.is(t, 200, "")
	if put.get(t, "data", "effective", "burst") != 3000.0 || put.get(t, "data", "default", "limit") != 500.0 {
		t.Errorf("put: %s", put)
	}
	f.call(t, "PUT", tenant+"/limits/management", `{"limit":1,"scale_ms":1000}`, f.ops()).is(t, 422, codeValidationFailed)
	f.call(t, "PUT", tenant+"/limits/nonsense", `{"limit":1,"scale_ms":1000}`, f.ops()).is(t, 404, codeNotFound)
	f.call(t, "PUT", tenant+"/limits/inbound", `{"limit":1,"scale_ms":1000,"burst":5}`, f.ops()).is(t, 422, codeValidationFailed)
	f.call(t, "PUT", tenant+"/limits/inbound", `{"limit":1}`, f.ops()).is(t, 422, codeValidationFailed)
	gone := f.call(t, "DELETE", tenant+"/limits/inbound", "", f.ops())
	if gone.get(t, "data", "override") != nil || gone.get(t, "data", "effective", "limit") != 500.0 {
		t.Errorf("delete: %s", gone)
	}

	// All of it is in the audit log, under the token and the request, without a secret.
	var entries, anonymous, leaks int
	err := f.pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE actor_type <> 'operator' OR actor_id = '' OR request_id IS NULL),
		count(*) FILTER (WHERE changes::text LIKE '%canary%') FROM audit_log WHERE actor_type <> 'system'`).Scan(&entries, &anonymous, &leaks)
	if err != nil || entries < 10 || anonymous != 0 || leaks != 0 {
		t.Errorf("audit log: %d entries, %d without actor, %d with a secret (%v)", entries, anonymous, leaks, err)
	}
}

func TestCORS(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	page := header("Origin", "https://app.example")
	a := f.call(t, "OPTIONS", "/api/v1/converger/conversations", "", page, header("Access-Control-Request-Method", "POST"))
	a.is(t, 204, "")
	for name, part := range map[string]string{
		"Access-Control-Allow-Origin": "https://app.example", "Access-Control-Allow-Headers": "Idempotency-Key", "Access-Control-Allow-Methods": "POST", "Vary": "Origin",
	} {
		if !strings.Contains(a.Header.Get(name), part) {
			t.Errorf("%s: %q", name, a.Header.Get(name))
		}
	}
	// Also on refusals: a page must be able to read why.
	a = f.call(t, "GET", "/api/v1/conversations", "", page)
	if a.Header.Get("Access-Control-Allow-Origin") != "https://app.example" || !strings.Contains(a.Header.Get("Access-Control-Expose-Headers"), "RateLimit-Policy") {
		t.Errorf("refusal: %v", a.Header)
	}
	for name, a := range map[string]answer{
		"another origin": f.call(t, "OPTIONS", "/api/v1/conversations", "", header("Origin", "https://evil.example"), header("Access-Control-Request-Method", "POST")),
		"management":     f.call(t, "GET", managementPrefix+"/tenants", "", page, f.ops()),
	} {
		if a.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %v", name, a.Header)
		}
	}
}
