package http

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"converger/internal/secrets"
)

// hook posts a webhook to the tenant's generic channel.
func (f *front) hook(t testing.TB, endpoint, body string, o ...option) answer {
	t.Helper()
	return f.call(t, "POST", "/api/v1/channels/"+f.webhook.ID.String()+"/"+endpoint, body, append([]option{header("Content-Type", "application/json")}, o...)...)
}

func TestInboundAnswers(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	sign := func(body string) option { return signed(f.webhook.Secret, body, time.Now()) }

	body := `{"text":"hi","external_id":"ada","display_name":"Ada","idempotency_key":"m1"}`
	a := f.hook(t, "inbound", body, sign(body))
	a.is(t, 201, "")
	id := a.get(t, "activity_id")
	if a.get(t, "status") != "accepted" || id == nil || len(a.get(t, "activity_ids").([]any)) != 1 || a.get(t, "duplicates") != 0.0 || a.get(t, "rejected") != 0.0 || a.get(t, "receipts_processed") != 0.0 {
		t.Errorf("accepted: %s", a)
	}
	again := f.hook(t, "inbound", body, sign(body))
	again.is(t, 200, "")
	if again.get(t, "activity_id") != id || again.get(t, "duplicates") != 1.0 {
		t.Errorf("repeat: %s", again)
	}
	empty := `{"external_id":"ada"}`
	f.hook(t, "inbound", empty, sign(empty)).is(t, 422, codeValidationFailed)
	conversation := f.newConversation(t)
	if _, _, err := f.Activities.Close(t.Context(), f.tenant.ID, conversation.ID, nil, "manual"); err != nil {
		t.Fatal(err)
	}
	closed := fmt.Sprintf(`{"text":"x","conversation_id":%q}`, conversation.ID)
	f.hook(t, "inbound", closed, sign(closed)).is(t, 409, codeConversationClosed)
	broken := `{"text":`
	unreadable := f.hook(t, "inbound", broken, sign(broken))
	unreadable.is(t, 400, codeMalformedBody)
	receipt := `{"status":"delivered","provider_message_id":"nobody-knows"}`
	r := f.hook(t, "status", receipt, sign(receipt))
	r.is(t, 200, "")
	if _, has := r.json(t)["activity_ids"]; has {
		t.Errorf("a receipt alone: %s", r)
	}
	f.hook(t, "status", `{}`, sign(`{}`)).is(t, 422, codeValidationFailed)

	// The failed one is visible and can be asked to run again; a processed one can't.
	list := f.call(t, "GET", managementPrefix+"/inbound_events?state=failed", "", f.ops())
	events := list.get(t, "data").([]any)
	if len(events) == 0 {
		t.Fatalf("no failed event: %s", list)
	}
	event := managementPrefix + "/tenants/" + f.tenant.ID.String() + "/inbound_events/" + events[len(events)-1].(map[string]any)["id"].(string)
	shown := f.call(t, "GET", event, "", f.ops())
	var stored struct{ Data struct{ Body []byte } }
	if err := json.Unmarshal(shown.body, &stored); err != nil || string(stored.Data.Body) != broken {
		t.Errorf("stored body %q (%v), want %q", stored.Data.Body, err, broken)
	}
	f.call(t, "POST", event+"/replay", "", f.ops()).is(t, 202, "")
	f.call(t, "POST", event+"/replay", "", f.ops()).is(t, 409, codeConflict)
}

// The signature is over the exact bytes, whatever they are called and however they are written.
func TestInboundSignatures(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	meta := func(body string, o ...option) answer {
		return f.call(t, "POST", "/api/v1/channels/"+f.whatsapp.ID.String()+"/inbound", body, o...)
	}
	for _, body := range []string{
		`{"object":"whatsapp_business_account","entry":[]}`, `{"a":"😊"}`, `{"a":"\ud83d\ude0a"}`, `{"a":"\u001B"}`, `{"a":"\u001b"}`,
		` { "a" : 1 } `, `{"b":1,"a":2}`, `{"a":1,"a":2}`, "{}\n", `not JSON at all`,
	} {
		meta(body, metaSigned(body)).is(t, 200, "")
		changed := strings.Replace(body, "a", "A", 1) + " "
		meta(changed, metaSigned(body)).is(t, 401, codeInvalidSignature)
	}
	body := `{"object":"whatsapp_business_account","entry":[]}`
	good := func() string {
		r := httptest.NewRequest("POST", "/", nil)
		metaSigned(body)(r)
		return r.Header.Get("X-Hub-Signature-256")
	}()
	before := f.rows(t)["inbound_events"]
	for name, o := range map[string]option{
		"none": func(*http.Request) {}, "empty": header("X-Hub-Signature-256", ""), "no digest": header("X-Hub-Signature-256", "sha256="),
		"sha1": header("X-Hub-Signature-256", strings.Replace(good, "sha256", "sha1", 1)), "cut": header("X-Hub-Signature-256", good[:len(good)-2]),
		"bad then good":  func(r *http.Request) { r.Header["X-Hub-Signature-256"] = []string{"sha256=00", good} },
		"another scheme": signed(f.whatsapp.Secret, body, time.Now()),
	} {
		if a := meta(body, o); a.StatusCode != 401 {
			t.Errorf("signature %s: %s", name, a)
		}
	}
	if after := f.rows(t)["inbound_events"]; after != before {
		t.Errorf("%d forged events were stored", after-before)
	}
	// The verdict does not depend on the content type (WH-02), and no content type turns a signed body into a 401.
	hook := `{"text":"typed"}`
	for _, kind := range []string{"application/x-www-form-urlencoded", "text/plain", ""} {
		a := f.hook(t, "inbound", hook, signed(f.webhook.Secret, hook, time.Now()), header("Content-Type", kind))
		if a.StatusCode != 201 && a.StatusCode != 415 && a.StatusCode != 400 {
			t.Errorf("content type %q: %s", kind, a)
		}
		f.hook(t, "inbound", hook, signed(f.whatsapp.Secret, hook, time.Now()), header("Content-Type", kind)).is(t, 401, codeInvalidSignature)
	}
	f.hook(t, "inbound", hook, signed(f.webhook.Secret, hook, time.Now().Add(-10*time.Minute))).is(t, 401, codeInvalidSignature)
}

// A stranger who knows a channel's id can't spend what its provider needs: addresses without a valid signature share a
// budget of their own, and bad signatures count against nothing else.
func TestUnprovenAddresses(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	limitOverride(t, f, `{"limit":3,"scale_ms":60000}`, "inbound")
	provider, stranger := from("198.51.100.1:443"), from("203.0.113.66:1")
	post := func(text string, o option, secret secrets.Text) answer {
		body := `{"text":"` + text + `"}`
		return f.hook(t, "inbound", body, o, signed(secret, body, time.Now()))
	}
	post("first", provider, f.webhook.Secret).is(t, 201, "") // unproven yet: one of the three
	for range 2 {
		post("forged", stranger, "wrong secret of the stranger").is(t, 401, codeInvalidSignature)
	}
	post("forged", stranger, "wrong secret of the stranger").is(t, 429, codeRateLimited)
	post("from elsewhere", from("[2001:db8::1]:1"), f.webhook.Secret).is(t, 429, codeRateLimited)
	for i := range 3 {
		post(fmt.Sprint("mine ", i), provider, f.webhook.Secret).is(t, 201, "")
	}
	post("too many", provider, f.webhook.Secret).is(t, 429, codeRateLimited)
	// The stranger's bad signatures made no unknown caller of it.
	f.call(t, "GET", "/api/v1/conversations", "", stranger, header("X-Api-Key", "cvg_live_x")).is(t, 401, codeInvalidCredential)
}

func TestHandshake(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	path := "/api/v1/channels/" + f.whatsapp.ID.String() + "/inbound?hub.mode=subscribe&hub.verify_token="
	a := f.call(t, "GET", path+"verify-canary&hub.challenge=1158201444", "")
	a.is(t, 200, "")
	if string(a.body) != "1158201444" || !strings.HasPrefix(a.Header.Get("Content-Type"), "text/plain") || a.Header.Get("X-Content-Type-Options") != "nosniff" {
		t.Errorf("handshake: %s %v", a, a.Header)
	}
	for name, query := range map[string]string{
		"wrong token": "wrong&hub.challenge=1", "markup": "verify-canary&hub.challenge=<script>", "no challenge": "verify-canary",
		"long": "verify-canary&hub.challenge=" + strings.Repeat("1", 10_000), "two tokens": "verify-canary&hub.verify_token=x&hub.challenge=1",
	} {
		a := f.call(t, "GET", path+query, "")
		if a.StatusCode != 403 || strings.Contains(string(a.body), "<script>") {
			t.Errorf("%s: %s", name, a)
		}
	}
	if a := f.call(t, "GET", "/api/v1/channels/"+f.webhook.ID.String()+"/inbound", ""); a.StatusCode != 200 || string(a.body) != "ok" {
		t.Errorf("a type without handshake: %s", a)
	}
	if strings.Contains(f.log.String(), "canary") || strings.Contains(f.log.String(), "hub.") {
		t.Error("the query string is in the log")
	}
}

// Whatever was sent as a secret, right or wrong, is nowhere in the log, the metrics or an answer that is an error.
func TestNoSecretGetsOut(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.MetricsToken = "metrics-canary" })
	const canary = "canary-c4n4ry-canary"
	hook := `{"text":"x"}`
	wrong := inventedKey(f.key, 1)
	var answers []answer
	send := func(method, path, body string, o ...option) {
		answers = append(answers, f.call(t, method, path, body, append(o, header("X-Extra", canary))...))
	}
	send("GET", "/api/v1/conversations?api_key="+canary, "", header("X-Api-Key", wrong))
	send("GET", "/api/v1/conversations?token="+canary, "", header("X-Api-Key", canary))
	send("GET", "/api/v1/converger/conversations/"+canary+"?token="+canary, "", bearer(canary+"."+canary+"."+canary))
	send("POST", "/api/v1/converger/tokens/generate", `{"scope":"`+canary+`"}`, bearer(canary))
	send("POST", "/api/v1/channels/"+f.webhook.ID.String()+"/inbound", hook, header("X-Converger-Signature", "t=1,v1="+canary))
	send("GET", "/api/v1/channels/"+f.whatsapp.ID.String()+"/inbound?hub.mode=subscribe&hub.challenge=1&hub.verify_token="+canary, "")
	send("GET", managementPrefix+"/"+canary, "", bearer(canary))
	send("GET", "/metrics", "", bearer(canary))
	send("GET", "/"+canary, "", func(r *http.Request) { r.SetBasicAuth("u", canary) })
	send("POST", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/channels", `{"name":"x","type":"whatsapp_meta","config":{"access_token":"`+canary+`","app_secret":7}}`, f.ops())
	send("POST", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/channels", `{"name":"x","type":"echo","secret":"`+canary+`"`, f.ops())
	// A handler that panics while all of that is in its hands.
	at := slices.IndexFunc(f.routes, func(r route) bool { return r.pattern == "/problems/{code}" })
	handle := f.routes[at].handle
	f.routes[at].handle = func(c *call) (*reply, error) {
		return nil, errors.New(strings.Fields(c.r.URL.RawQuery)[len(c.r.Header.Get("Authorization"))])
	}
	send("GET", "/problems/"+canary+"?token="+canary, "", bearer(canary), header("X-Api-Key", canary), header("Cookie", "session="+canary))
	if !strings.Contains(f.log.String(), "panic in a handler") {
		t.Error("no panic")
	}
	f.routes[at].handle = handle
	for _, a := range answers {
		if a.StatusCode < 400 || strings.Contains(string(a.body), canary) || strings.Contains(fmt.Sprint(a.Header), canary) {
			t.Errorf("%s %v", a, a.Header)
		}
	}
	f.call(t, "GET", "/api/v1/conversations", "", f.apiKey()).is(t, 200, "")
	metrics := f.call(t, "GET", "/metrics", "", bearer("metrics-canary"))
	metrics.is(t, 200, "")
	for _, secret := range []string{canary, wrong, f.key, f.operator, f.webhook.Secret.Reveal(), "metrics-canary"} {
		if strings.Contains(f.log.String(), secret) || strings.Contains(string(metrics.body), secret) {
			t.Errorf("%q is in the log or the metrics", secret[:12])
		}
	}
	if !strings.Contains(f.log.String(), `"route":"/api/v1/conversations"`) {
		t.Error("the log has lost the route")
	}
}

// A signed batch posted many times at once is one set of events for the queue, and answered alike.
func TestSignedBatchInParallel(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	body := `{"text":"once","idempotency_key":"k"}`
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			if a := f.hook(t, "inbound", body, signed(f.webhook.Secret, body, time.Now())); a.StatusCode != 200 && a.StatusCode != 201 {
				t.Errorf("%s", a)
			}
		})
	}
	wg.Wait()
	if n := f.rows(t)["activities"]; n != 1 {
		t.Errorf("%d activities", n)
	}
}
