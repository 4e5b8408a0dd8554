package http

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/inbound"
	"converger/internal/secrets"
)

// infobip is a channel of that type, made through the management API, and what the API told about it.
type infobip struct {
	*front
	id, path, secret string
}

func newInfobip(t *testing.T, f *front, settings string) infobip {
	t.Helper()
	a := f.call(t, "POST", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/channels",
		`{"name":"infobip","type":"whatsapp_infobip","config":{"sender":"447860099299"`+settings+`}}`, f.ops())
	a.is(t, 201, "")
	i := infobip{front: f, id: a.get(t, "data", "id").(string), secret: a.get(t, "data", "secret").(string)}
	i.path = i.callback(t, a)
	return i
}

// callback is the path of the callback URL in an answer.
func (i infobip) callback(t *testing.T, a answer) string {
	t.Helper()
	url, _ := a.get(t, "data", "callback_url").(string)
	path, ok := strings.CutPrefix(url, "https://hub.example")
	if !ok || !strings.HasPrefix(path, "/api/v1/channels/"+i.id+"/inbound") {
		t.Fatalf("callback_url %q", url)
	}
	return path
}

func (i infobip) manage(t *testing.T, method, rest, body string) answer {
	t.Helper()
	a := i.call(t, method, managementPrefix+"/channels/"+i.id+rest, body, i.ops())
	a.is(t, 200, "")
	return a
}

func infobipText(id, text string) string {
	return `{"results":[{"from":"385919998888","to":"447860099299","integrationType":"WHATSAPP","receivedAt":"2026-11-29T05:31:02.123+0000","messageId":"` +
		id + `","pairedMessageId":null,"callbackData":null,"message":{"type":"TEXT","text":"` + text + `"},"contact":{"name":"Ada Example"},
		"price":{"pricePerMessage":0.000000,"currency":"EUR"}}],"messageCount":1,"pendingMessageCount":0}`
}

// The whole way of an operator: the address is told once, Infobip posts to it, and what was posted becomes messages and
// news; without it, or with another, nothing is stored.
func TestInfobip(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	i := newInfobip(t, f, "")
	if segment := i.path[strings.LastIndex(i.path, "/")+1:]; len(segment) != 32 {
		t.Errorf("the address ends in %d characters of base64, want 192 bits", len(segment))
	}
	plain := "/api/v1/channels/" + i.id + "/inbound"

	body := infobipText("ABEGEXAMPLE0001", "Is the shop open?")
	a := f.call(t, "POST", i.path, body)
	a.is(t, 200, "")
	if got := a.Header.Get("Referrer-Policy"); got != "no-referrer" {
		t.Errorf("Referrer-Policy: %q", got)
	}
	event := uuid.MustParse(a.get(t, "event_id").(string))
	f.call(t, "POST", strings.Replace(i.path, "/inbound/", "/status/", 1), body).is(t, 200, "")

	stored := f.rows(t)["inbound_events"]
	for name, path := range map[string]string{
		"no secret": plain, "a wrong one": plain + "/AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "a cut one": i.path[:len(i.path)-1], "one more": i.path + "A",
		"an escape": plain + "/%00", "the channel's own": plain + "/" + strings.ReplaceAll(i.secret, "/", "%2F"), "status": "/api/v1/channels/" + i.id + "/status/x",
	} {
		a := f.call(t, "POST", path, body)
		if a.StatusCode != 401 || a.get(t, "code") == "" || a.Header.Get("Www-Authenticate") == "" {
			t.Errorf("%s: %s", name, a)
		}
	}
	f.call(t, "POST", i.path+"/more", body).is(t, 404, codeNotFound)
	f.call(t, "GET", i.path, "").is(t, 405, codeMethodNotAllowed)
	if now := f.rows(t)["inbound_events"]; now != stored {
		t.Errorf("%d forged events were stored", now-stored)
	}
	// Such an address belongs to types that have one: elsewhere it is no second door, signature or not.
	hook := `{"text":"x"}`
	f.hook(t, "inbound/x", hook, signed(f.webhook.Secret, hook, time.Now())).is(t, 401, codeInvalidSignature)
	// A relay that signs needs no secret address.
	f.call(t, "POST", plain, body, signed(f.secretOf(t, i.id), body, time.Now())).is(t, 200, "")

	service := f.Inbound.(*inbound.Service)
	process := func(event uuid.UUID) inbound.Event {
		t.Helper()
		if err := service.Process(t.Context(), f.tenant.ID, event); err != nil {
			t.Fatal(err)
		}
		return must(service.Get(t.Context(), f.tenant.ID, event))
	}
	e := process(event)
	if e.State != inbound.StateProcessed || e.Result == nil || e.Result.Created != 1 {
		t.Fatalf("the message became %+v %+v", e, e.Result)
	}
	list := f.call(t, "GET", "/api/v1/conversations?channel_id="+i.id, "", f.apiKey()).get(t, "data").([]any)
	if len(list) != 1 {
		t.Fatalf("%d conversations", len(list))
	}
	activities := f.call(t, "GET", "/api/v1/conversations/"+list[0].(map[string]any)["id"].(string)+"/activities", "", f.apiKey())
	if !strings.Contains(string(activities.body), "Is the shop open?") || !strings.Contains(string(activities.body), `"385919998888"`) {
		t.Errorf("the conversation holds %s", activities)
	}

	// One person, however the number is written, has one conversation, under the name that the provider gave first.
	for id, number := range []string{"5215512345678", "525512345678"} {
		a := f.call(t, "POST", i.path, strings.Replace(infobipText(fmt.Sprint("mx", id), "hola"), "385919998888", number, 1))
		a.is(t, 200, "")
		process(uuid.MustParse(a.get(t, "event_id").(string)))
	}
	list = f.call(t, "GET", "/api/v1/conversations?channel_id="+i.id+"&external_id=5215512345678", "", f.apiKey()).get(t, "data").([]any)
	if all := f.call(t, "GET", "/api/v1/conversations?channel_id="+i.id, "", f.apiKey()).get(t, "data").([]any); len(list) != 1 || len(all) != 2 {
		t.Errorf("%d conversations, %d of them of the Mexican number", len(all), len(list))
	}

	// Three reports of one message in one body, posted many times: each is one event, and none a message.
	report := func(group string) string {
		return `{"bulkId":"b-01","messageId":"m","to":"385919998888","from":"447860099299","sentAt":"2026-11-29T05:31:05.000+0000","doneAt":"2026-11-29T05:31:06.400+0000",
			"callbackData":"dlv_01J9ZK2A","status":{"groupId":3,"groupName":"` + group + `","id":5,"name":"N","description":"D"}}`
	}
	reports := `{"results":[` + report("DELIVERED") + `,` + report("PENDING") + `,` + report("SEEN") + `]}`
	for range 3 {
		a := f.call(t, "POST", i.path, reports)
		a.is(t, 200, "")
		e := process(uuid.MustParse(a.get(t, "event_id").(string)))
		if e.State != inbound.StateProcessed || e.Result.UnknownReceipts != 3 || e.Result.Created != 0 {
			t.Errorf("reports became %+v %+v", e, e.Result)
		}
	}
}

// secretOf reads a channel's secret behind the front's back.
func (f *front) secretOf(t *testing.T, id string) secrets.Text {
	t.Helper()
	return must(f.Channels.Get(t.Context(), f.tenant.ID, uuid.MustParse(id))).Secret
}

// The address is told where the secret is, and to whoever changes the config; never by merely asking. It is nowhere else:
// not in the log at its most talkative, not in the metrics, not in the audit log or any other table.
func TestCallbackURL(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.MetricsToken = "metrics" })
	i := newInfobip(t, f, "")
	body := infobipText("m", "hi")
	segments := []string{i.path[strings.LastIndex(i.path, "/")+1:]}

	shown := i.manage(t, "GET", "", "")
	if _, has := shown.get(t, "data").(map[string]any)["callback_url"]; has {
		t.Errorf("shown to whoever asks: %s", shown)
	}
	if a := i.manage(t, "PATCH", "", `{"name":"renamed"}`); strings.Contains(string(a.body), segments[0]) {
		t.Errorf("shown with a change of the name: %s", a)
	}
	list := f.call(t, "GET", managementPrefix+"/tenants/"+f.tenant.ID.String()+"/channels", "", f.ops())
	if strings.Contains(string(list.body), segments[0]) || !strings.Contains(string(list.body), f.webhook.ID.String()+`/inbound"`) {
		t.Errorf("a list shows plain addresses and no secret ones: %s", list)
	}

	// A new secret is a new address; the old one goes on during the overlap.
	rotated := i.manage(t, "POST", "/secret", `{"overlap_seconds":3600}`)
	next := i.callback(t, rotated)
	segments = append(segments, next[strings.LastIndex(next, "/")+1:])
	if next == i.path {
		t.Error("the address outlived its secret")
	}
	for _, path := range []string{i.path, next} {
		f.call(t, "POST", path, body).is(t, 200, "")
	}
	last := i.callback(t, i.manage(t, "POST", "/secret", `{"overlap_seconds":0}`))
	segments = append(segments, last[strings.LastIndex(last, "/")+1:])
	f.call(t, "POST", next, body).is(t, 401, codeInvalidSignature)
	f.call(t, "POST", last, body).is(t, 200, "")

	// Without it a login, and the address is no secret any more; back again.
	changed := i.manage(t, "PATCH", "", `{"config":{"sender":"447860099299","secret_path":false,"basic_user":"infobip","basic_password":"canary-password-1"}}`)
	if got, want := i.callback(t, changed), "/api/v1/channels/"+i.id+"/inbound"; got != want {
		t.Errorf("callback_url %s, want %s", got, want)
	}
	login := func(user, password string) option {
		return func(r *http.Request) { r.SetBasicAuth(user, password) }
	}
	plain := "/api/v1/channels/" + i.id + "/inbound"
	f.call(t, "POST", plain, body, login("infobip", "canary-password-1")).is(t, 200, "")
	f.call(t, "POST", plain, body, login("infobip", "canary-password-2")).is(t, 401, codeInvalidSignature)
	f.call(t, "POST", plain, body).is(t, 401, codeInvalidSignature)
	f.call(t, "POST", last, body, login("infobip", "canary-password-1")).is(t, 401, codeInvalidSignature)
	if a := f.call(t, "PATCH", managementPrefix+"/channels/"+i.id, `{"config":{"sender":"447860099299","secret_path":false}}`, f.ops()); a.StatusCode != 422 ||
		!strings.Contains(string(a.body), "/config/secret_path") {
		t.Errorf("a channel without any proof: %s", a)
	}
	if got := i.callback(t, i.manage(t, "PATCH", "", `{"config":{"sender":"447860099299"}}`)); got != last {
		t.Errorf("callback_url %s, want %s", got, last)
	}

	if !strings.Contains(f.log.String(), `"route":"/api/v1/channels/{channel_id}/inbound/{secret}"`) {
		t.Error("the log has lost the route")
	}
	metrics := f.call(t, "GET", "/metrics", "", bearer("metrics"))
	metrics.is(t, 200, "")
	everything := map[string]string{"log": f.log.String(), "metrics": string(metrics.body), "tables": f.dump(t)}
	if !strings.Contains(everything["tables"], "rotate_secret") {
		t.Error("the dump misses the audit log")
	}
	for _, secret := range slices.Concat(segments, []string{"canary-password-1", "canary-password-2"}) {
		for name, text := range everything {
			if strings.Contains(text, secret) {
				t.Errorf("%q is in the %s", secret, name)
			}
		}
	}
}

// dump is every row of every table as text.
func (f *front) dump(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for table := range f.rows(t) {
		rows, err := f.pool.Query(t.Context(), fmt.Sprintf("SELECT t::text FROM %q t", table))
		if err != nil {
			t.Fatal(err)
		}
		for rows.Next() {
			var row string
			if err := rows.Scan(&row); err != nil {
				t.Fatal(err)
			}
			b.WriteString(row + "\n")
		}
		if err := rows.Err(); err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

// The guards of the plain address stand before the secret one: the budget of strangers, the size of a body, the channel's
// state.
func TestInfobipGuards(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	i := newInfobip(t, f, "")
	limitOverride(t, f, `{"limit":3,"scale_ms":60000}`, "inbound")
	provider, stranger := from("198.51.100.1:443"), from("203.0.113.66:1")
	body := infobipText("m", "hi")
	f.call(t, "POST", i.path, body, provider).is(t, 200, "") // unproven yet: one of the three
	wrong := i.path[:len(i.path)-1] + "."
	for range 2 {
		f.call(t, "POST", wrong, body, stranger).is(t, 401, codeInvalidSignature)
	}
	f.call(t, "POST", wrong, body, stranger).is(t, 429, codeRateLimited)
	for range 3 {
		f.call(t, "POST", i.path, body, provider).is(t, 200, "")
	}
	f.call(t, "POST", i.path, body, provider).is(t, 429, codeRateLimited)

	limitOverride(t, f, `{"limit":1000,"scale_ms":1000}`, "inbound")
	f.call(t, "POST", i.path, strings.Repeat("x", int(f.MaxInboundBody)+1)).is(t, 413, codeBodyTooLarge)
	i.manage(t, "PATCH", "", `{"status":"inactive"}`)
	f.call(t, "POST", i.path, body).is(t, 400, codeChannelInactive)
	f.call(t, "POST", strings.Replace(i.path, i.id, uuid.NewString(), 1), body).is(t, 404, codeNotFound)
	f.call(t, "POST", strings.Replace(i.path, i.id, "x", 1), body).is(t, 400, codeMalformedID)
}

// A channel that asks for no proof takes what brings none, and still not what brings a wrong one.
func TestInfobipWithoutProof(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	ch := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "open", Type: channel.TypeWhatsAppInfobip, Config: raw(`{"sender":"447860099299"}`), RequireSignature: new(bool)})
	f.refresh(t)
	path, body := "/api/v1/channels/"+ch.ID.String()+"/inbound", infobipText("m", "hi")
	f.call(t, "POST", path, body).is(t, 200, "")
	f.call(t, "POST", path+"/x", body).is(t, 401, codeInvalidSignature)
	if !strings.Contains(f.log.String(), "the secret in the address is missing") {
		t.Error("no warning in the log")
	}
}
