package http

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
)

// documentedRoute is a route of the original system's documentation.
type documentedRoute struct {
	method, path string // with the names of a stage's ids in braces
	as           string // the credentials that do, see stage.credentials
	refused      string // those that don't, although they are good for others
	body         string // with names of ids
	status       int
	members      string // that the answer has; "a.b.0.c"; "-": no body
}

// documented is every route of the original that is here; absent ones are listed in docs/api.md.
var documented = []documentedRoute{
	// The tenant API.
	{"POST", "/api/v1/tokens", "C", "K", `{"conversation_id":"{conversation}","user_id":"ada"}`, 201, "token expires_in"},
	{"POST", "/api/v1/conversations", "C", "", `{"status":"active","metadata":{"a":1}}`, 201, conversationMembers("data.")},
	{"POST", "/api/v1/conversations", "C", "", ``, 201, conversationMembers("data.")},
	{"POST", "/api/v1/conversations", "KC", "", `{"channel_id":"{channel}"}`, 201, conversationMembers("data.")},
	{"GET", "/api/v1/conversations", "K", "C", "", 200, conversationMembers("data.0.") + pageMembers},
	{"GET", "/api/v1/conversations?status=active&channel_id={channel}&external_id=ada", "K", "C", "", 200,
		conversationMembers("data.0.") + " data.0.participant.id data.0.participant.external_id data.0.participant.display_name"},
	{"GET", "/api/v1/conversations/{conversation}", "KC", "", "", 200, conversationMembers("data.")},
	{"POST", "/api/v1/conversations/{conversation}/close", "KC", "", "", 200, conversationMembers("data.")},
	{"POST", "/api/v1/conversations/{conversation}/reopen", "KC", "", "", 200, conversationMembers("data.")},
	{"POST", "/api/v1/conversations/{conversation}/activities", "KC", "", `{"text":"hi","sender":"ada","metadata":{"a":1}}`, 201, activityMembers("data.")},
	{"GET", "/api/v1/conversations/{conversation}/activities", "KC", "", "", 200, activityMembers("data.0.") + " meta.watermark meta.has_more meta.limit"},
	{"GET", "/api/v1/routing_rules", "KC", "", "", 200, ruleMembers("data.0.")},
	{"GET", "/api/v1/routing_rules/{rule}", "KC", "", "", 200, ruleMembers("data.")},
	{"POST", "/api/v1/routing_rules", "KC", "", `{"routing_rule":{"name":"{unique}","source_channel_id":"{channel}","target_channel_ids":["{target}"]}}`, 201, ruleMembers("data.")},
	{"PATCH", "/api/v1/routing_rules/{rule}", "KC", "", `{"routing_rule":{"enabled":false}}`, 200, ruleMembers("data.")},
	{"PUT", "/api/v1/routing_rules/{rule}", "KC", "", `{"routing_rule":{"enabled":false}}`, 200, ruleMembers("data.")},
	{"DELETE", "/api/v1/routing_rules/{rule}", "KC", "", "", 204, "-"},
	{"GET", "/api/v1/deliveries", "K", "C", "", 200, deliveryMembers("data.0.") + pageMembers},
	{"GET", "/api/v1/deliveries?status=failed&channel_id={channel}&activity_id={activity}&from=2026-01-01&to=2126-01-01T00:00:00Z&limit=1", "K", "C", "", 200, deliveryMembers("data.0.")},
	{"POST", "/api/v1/deliveries/{delivery}/retry", "K", "C", "", 202, deliveryMembers("data.")},
	{"POST", "/api/v1/channels/{channel}/deliveries/retry", "K", "C", `{"from":"2026-01-01","to":"2126-01-01","activity_id":"{activity}","limit":10}`, 200, "data.retried data.has_more"},
	{"POST", "/api/v1/channels/{channel}/deliveries/retry?from=2026-01-01&limit=10", "K", "C", "", 200, "data.retried data.has_more"},
	{"GET", "/api/v1/channels/{channel}/delivery", "KC", "", "", 200, stateMembers},
	{"POST", "/api/v1/channels/{channel}/pause", "KC", "", "", 200, stateMembers},
	{"POST", "/api/v1/channels/{channel}/resume", "KC", "", "", 200, stateMembers},

	// The client API.
	{"POST", "/api/v1/converger/tokens/generate", "S", "T", `{"user":{"id":"ada"}}`, 200, "conversationId token expires_in"},
	{"POST", "/api/v1/converger/tokens/refresh", "T", "S", "", 200, "conversationId token expires_in"},
	{"POST", "/api/v1/converger/conversations", "T", "S", "", 201, "conversationId token expires_in streamUrl"},
	{"GET", "/api/v1/converger/conversations/{conversation}?watermark=c2VxOjA", "T", "S", "", 200, "conversationId token expires_in streamUrl"},
	{"POST", "/api/v1/converger/conversations/{conversation}/close", "T", "S", "", 200, "conversationId status"},
	{"POST", "/api/v1/converger/conversations/{conversation}/reopen", "T", "S", "", 200, "conversationId status"},
	{"POST", "/api/v1/converger/conversations/{conversation}/activities", "T", "S", `{"type":"message","text":"hi","from":{"id":"ada"},"channelData":{}}`, 200, "id"},
	{"GET", "/api/v1/converger/conversations/{conversation}/activities", "T", "S", "", 200,
		"activities.0.id activities.0.type activities.0.from.id activities.0.text activities.0.timestamp activities.0.attachments activities.0.conversationId " +
			"activities.0.channelData activities.0.replyToId activities.0.editedAt activities.0.deletedAt watermark has_more"},
	{"POST", "/api/v1/converger/conversations/{conversation}/upload", "T", "S", uploadBody, 200, "id attachments.0.id attachments.0.contentType attachments.0.contentUrl attachments.0.size"},
	{"GET", "/api/v1/converger/attachments/{attachment}", "T", "S", "", 200, ""},

	// Providers.
	{"GET", "/api/v1/channels/{whatsapp}/inbound?hub.mode=subscribe&hub.verify_token=verify-canary&hub.challenge=42", "N", "", "", 200, ""},
	{"POST", "/api/v1/channels/{channel}/inbound", "W", "", `{"text":"hi"}`, 201, "status activity_id activity_ids duplicates rejected receipts_processed"},
	{"POST", "/api/v1/channels/{channel}/status", "W", "", `{"status":"delivered","delivery_id":"{delivery}"}`, 200, "status receipts_processed"},

	// Health and metrics.
	{"GET", "/health/live", "N", "", "", 200, "status"},
	{"HEAD", "/health/live", "N", "", "", 200, ""},
	{"GET", "/health/ready", "N", "", "", 200, "status checks"},
	{"HEAD", "/health/ready", "N", "", "", 200, ""},
	{"GET", "/metrics", "M", "", "", 200, ""},
}

// absentRoutes are those of the original that are not here.
var absentRoutes = []string{
	"GET /api/v1/converger/conversations/{id}/events",
	"GET /admin/deliveries/export", "GET /portal/deliveries/export", "GET /admin/oban",
	"GET /socket/converger/v1", "GET /socket/converger/websocket", "GET /socket/converger/longpoll", "GET /socket/websocket",
}

const (
	pageMembers  = " meta.next_cursor meta.has_more meta.limit"
	stateMembers = "data.channel_id data.circuit_state data.circuit_changed_at data.consecutive_failures data.rate_limit data.parked_deliveries"
	uploadBody   = "a form with a file"
)

func base64URL(text string) string { return base64.URLEncoding.EncodeToString([]byte(text)) }

func newEcho(name string) channel.NewChannel {
	return channel.NewChannel{Name: name, Type: channel.TypeEcho}
}

func prefixed(prefix, names string) string {
	return prefix + strings.ReplaceAll(names, " ", " "+prefix)
}

func conversationMembers(prefix string) string {
	return prefixed(prefix, "id status metadata channel_id tenant_id participant_id participant inserted_at updated_at")
}

func activityMembers(prefix string) string {
	return prefixed(prefix, "id type sender text attachments metadata idempotency_key seq conversation_id tenant_id inserted_at reply_to_id edited_at deleted_at")
}

func ruleMembers(prefix string) string {
	return prefixed(prefix, "id name source_channel_id target_channel_ids enabled tenant_id inserted_at updated_at")
}

func deliveryMembers(prefix string) string {
	return prefixed(prefix, "id activity_id channel_id status attempts last_error provider_message_id sent_at delivered_at read_at retry_count retried_by retried_at "+
		"inserted_at updated_at payload.id payload.text payload.metadata payload.conversation_id payload.seq")
}

// stage is a front with one of everything that a route may name.
type stage struct {
	*front
	ids *strings.Replacer
}

// newStage makes everything anew: most routes change what they name.
func (f *front) newStage(t testing.TB, target uuid.UUID) *stage {
	t.Helper()
	ctx := t.Context()
	token := bearer(f.newToken(t, auth.Claims{UserID: "ada"}))
	conversation := f.call(t, "POST", "/api/v1/converger/conversations", "", token).get(t, "conversationId").(string)
	body, kind := form(t, formPart{"file", "a.txt", "some text"})
	uploaded := f.call(t, "POST", "/api/v1/converger/conversations/"+conversation+"/upload", body, token, kind)
	uploaded.is(t, 200, "")
	posted := f.call(t, "POST", "/api/v1/conversations/"+conversation+"/activities", `{"text":"to ada"}`, f.apiKey())
	posted.is(t, 201, "")
	activityID := uuid.MustParse(posted.get(t, "data", "id").(string))
	file := uploaded.get(t, "attachments").([]any)[0].(map[string]any)["id"].(string)
	page, _, err := f.Deliveries.List(ctx, f.tenant.ID, delivery.Filter{ActivityID: &activityID, ChannelID: &f.webhook.ID}, uuid.Nil, 1)
	if err != nil || len(page) != 1 {
		t.Fatalf("%d deliveries, %v", len(page), err)
	}
	if _, err := f.pool.Exec(ctx, `UPDATE deliveries SET status = 'failed' WHERE id = $1`, page[0].ID); err != nil {
		t.Fatal(err)
	}
	unique := uuid.Must(uuid.NewV7()).String()
	rule := must(f.Rules.Create(ctx, testActor, f.tenant.ID, delivery.NewRoutingRule{Name: "rule " + unique, SourceChannelID: f.webhook.ID, TargetChannelIDs: []uuid.UUID{target}}))
	return &stage{f, strings.NewReplacer("{conversation}", conversation, "{activity}", activityID.String(), "{attachment}", file,
		"{delivery}", page[0].ID.String(), "{rule}", rule.ID.String(), "{channel}", f.webhook.ID.String(), "{target}", target.String(),
		"{whatsapp}", f.whatsapp.ID.String(), "{unique}", unique)}
}

// credentials: K API key, C channel secret in X-Channel-Token, S channel secret and T client token as bearers, W signature,
// M metrics token, N none.
func (f *stage) credentials(t testing.TB, kind rune, body string) option {
	t.Helper()
	switch kind {
	case 'K':
		return f.apiKey()
	case 'C':
		return header("X-Channel-Token", f.webhook.Secret.Reveal())
	case 'S':
		return bearer(f.webhook.Secret.Reveal())
	case 'T':
		return bearer(f.newToken(t, auth.Claims{UserID: "ada"}))
	case 'W':
		return signed(f.webhook.Secret, body, time.Now())
	case 'M':
		return bearer("the metrics token")
	}
	return func(*http.Request) {}
}

// Every documented route answers every documented credential with the documented status and members, and deprecated uses,
// and only those, say so.
func TestDocumentedRoutes(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.MetricsToken = "the metrics token" })
	target := f.newChannel(t, f.tenant.ID, newEcho("target"))
	for _, bucket := range []string{"upload", "token_generate", "activity_create", "inbound", "api_read"} {
		limitOverride(t, f, `{"limit":1000000,"scale_ms":1000}`, bucket)
	}
	f.refresh(t)
	tried := map[string]bool{}
	for _, tt := range documented {
		for _, kind := range tt.as + tt.refused {
			s := f.newStage(t, target.ID)
			path, body := s.ids.Replace(tt.path), s.ids.Replace(tt.body)
			var options []option
			if tt.body == uploadBody {
				text, declared := form(t, formPart{"file", "a.txt", "some text"})
				body, options = text, append(options, declared)
			}
			// Each from an address of its own: some limits count addresses.
			options = append(options, s.credentials(t, kind, body), from(fmt.Sprintf("[2001:db8:2:%x::1]:1", f.addresses.Add(1))))
			a := f.call(t, tt.method, path, body, options...)
			name := fmt.Sprintf("%s %s as %c", tt.method, tt.path, kind)

			deprecated := kind == 'C' || tt.path == "/api/v1/tokens"
			link := strings.Join(a.Header.Values("Link"), ", ")
			if got := a.Header.Get("Deprecation") == "@1795996800" && strings.Contains(link, `<https://hub.example/deprecations>; rel="deprecation"`); got != deprecated {
				t.Errorf("%s: deprecated %v, want %v: %v", name, got, deprecated, a.Header)
			}
			if strings.ContainsRune(tt.refused, kind) {
				want := 401
				switch kind {
				case 'C':
					want = 403
				case 'T':
					want = 400
				}
				if a.StatusCode != want {
					t.Errorf("%s: %s, want %d", name, a, want)
				}
				continue
			}
			if a.StatusCode != tt.status {
				t.Errorf("%s: %s, want %d", name, a, tt.status)
				continue
			}
			if tt.members == "-" && len(a.body) > 0 {
				t.Errorf("%s: a body: %s", name, a)
			}
			if members := strings.Trim(tt.members, "-"); members != "" {
				missing := slices.DeleteFunc(strings.Fields(members), func(m string) bool { return hasMember(a.json(t), strings.Split(m, ".")) })
				if len(missing) > 0 {
					t.Errorf("%s: no %v in %s", name, missing, a)
				}
			}
			if pattern, _, _ := strings.Cut(tt.path, "?"); tt.method != http.MethodHead {
				tried[tt.method+" "+regexp.MustCompile(`\{\w+\}`).ReplaceAllString(pattern, "{}")] = true
			}
		}
		// Nobody is nobody.
		if want := 401; !strings.ContainsAny(tt.as, "NM") {
			s := f.newStage(t, target.ID)
			a := f.call(t, tt.method, s.ids.Replace(tt.path), s.ids.Replace(tt.body), from(fmt.Sprintf("[2001:db8:2:%x::1]:1", f.addresses.Add(1))))
			if a.StatusCode != want {
				t.Errorf("%s %s without a credential: %s", tt.method, tt.path, a)
			}
		}
	}
	// What the original documents no route for is ours, by name: a route that is taken out of the table shows.
	ours := regexp.MustCompile(`^\w+ (/|/problems.*|/deprecations|/openapi\.json|/docs|/static/.*|/(admin|portal)(/.*)?|/sign-in/.*|/api/v1/management/.*|/api/v1/deliveries/\{\}|/api/v1/channels/\{\}/(inbound|status)/\{\})$`)
	for _, rt := range f.routes {
		name := rt.method + " " + regexp.MustCompile(`\{\w+\}`).ReplaceAllString(rt.pattern, "{}")
		if !tried[name] && !ours.MatchString(name) {
			t.Errorf("%s is neither documented nor known as our own", name)
		}
	}
}

// hasMember follows names, and indices of arrays.
func hasMember(v any, path []string) bool {
	for _, name := range path {
		switch at := v.(type) {
		case map[string]any:
			var ok bool
			if v, ok = at[name]; !ok {
				return false
			}
		case []any:
			if name != "0" || len(at) == 0 {
				return false
			}
			v = at[0]
		default:
			return false
		}
	}
	return true
}

// The documentation lists what is absent, and lists nothing that is there.
func TestAbsentRoutesAreListed(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	text, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, ok := strings.Cut(string(text), "\n## Routes of the original that are absent\n")
	if !ok {
		t.Fatal("docs/api.md has no section on what is absent")
	}
	section, _, _ = strings.Cut(section, "\n## ")
	var listed []string
	for line := range strings.Lines(section) {
		cells := strings.Split(line, "|")
		if len(cells) < 4 || !strings.Contains(cells[1], "`") {
			continue
		}
		if reason := strings.TrimSpace(cells[2]); len(reason) < 10 {
			t.Errorf("no reason in: %s", line)
		}
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[1], -1) {
			listed = append(listed, name[1])
		}
	}
	for _, name := range absentRoutes {
		if !slices.Contains(listed, name) {
			t.Errorf("%s is absent and not listed", name)
		}
	}
	for _, name := range listed {
		method, path, _ := strings.Cut(name, " ")
		a := f.call(t, method, strings.ReplaceAll(path, "{id}", uuid.NewString()), "", f.apiKey())
		a.is(t, 404, codeNotFound)
		if a.get(t, "detail") != "There is nothing at this address." {
			t.Errorf("%s is listed as absent and is there: %s", name, a)
		}
	}
}

// An API key goes first, whatever comes beside it; and a channel's secret is counted and refused as every credential is.
func TestLegacyCredential(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t)
	path := "/api/v1/conversations/" + v.ID.String()
	secret := header("X-Channel-Token", f.webhook.Secret.Reveal())

	both := f.call(t, "GET", path, "", f.apiKey(), header("X-Channel-Token", "nonsense"))
	both.is(t, 200, "")
	if both.Header.Get("Deprecation") != "" {
		t.Error("a request by API key is called deprecated")
	}
	f.call(t, "GET", path, "", header("X-Api-Key", "nonsense"), secret).is(t, 401, codeInvalidCredential)
	wrong := f.call(t, "GET", path, "", header("X-Channel-Token", "nonsense"))
	wrong.is(t, 401, codeInvalidCredential)
	if wrong.Header.Get("Deprecation") == "" || !strings.Contains(wrong.Header.Get("Www-Authenticate"), "X-Channel-Token") {
		t.Errorf("headers of a refused secret: %v", wrong.Header)
	}
	f.call(t, "GET", "/api/v1/deliveries", "", header("X-Channel-Token", "nonsense")).is(t, 401, codeInvalidCredential)
	f.call(t, "GET", "/api/v1/deliveries", "", secret).is(t, 403, codeKeyRequired)
	// It speaks for its channel, and for no other.
	f.call(t, "POST", "/api/v1/conversations", `{"channel_id":"`+f.whatsapp.ID.String()+`"}`, secret).is(t, 404, codeNotFound)
	made := f.call(t, "POST", "/api/v1/conversations", `{"status":"closed"}`, secret)
	made.is(t, 201, "")
	if made.get(t, "data", "channel_id") != f.webhook.ID.String() || made.get(t, "data", "status") != activity.StatusClosed {
		t.Errorf("a conversation by secret: %s", made)
	}
	f.call(t, "POST", "/api/v1/conversations", `{"status":"open"}`, secret).is(t, 422, codeValidationFailed)
	f.call(t, "POST", "/api/v1/conversations", "", f.apiKey()).is(t, 422, codeValidationFailed)
	rule := `{"routing_rule":{"name":"r","source_channel_id":"` + f.whatsapp.ID.String() + `","target_channel_ids":["` + f.webhook.ID.String() + `"]}}`
	f.call(t, "POST", "/api/v1/routing_rules", rule, secret).is(t, 422, codeValidationFailed)
	f.call(t, "POST", "/api/v1/routing_rules", rule, f.apiKey()).is(t, 201, "")
	if n := len(f.call(t, "GET", "/api/v1/routing_rules", "", secret).get(t, "data").([]any)); n != 0 {
		t.Errorf("the secret lists %d rules of another channel", n)
	}
	// What it does is audited under its channel, and its idempotency keys are its own.
	f.call(t, "POST", "/api/v1/channels/"+f.webhook.ID.String()+"/pause", "", secret).is(t, 200, "")
	var actor string
	if err := f.pool.QueryRow(t.Context(), `SELECT actor_type || ' ' || actor_id FROM audit_log WHERE action = 'pause_deliveries'`).Scan(&actor); err != nil || actor != "channel "+f.webhook.ID.String() {
		t.Errorf("audited as %q, %v", actor, err)
	}
	first := f.call(t, "POST", path+"/activities", `{"text":"a"}`, secret, header("Idempotency-Key", "k"))
	again := f.call(t, "POST", path+"/activities", `{"text":"a"}`, secret, header("Idempotency-Key", "k"))
	others := f.call(t, "POST", path+"/activities", `{"text":"a"}`, f.apiKey(), header("Idempotency-Key", "k"))
	if id := first.get(t, "data", "id"); id != again.get(t, "data", "id") || id == others.get(t, "data", "id") {
		t.Errorf("one key: %s, %s and by API key %s", first, again, others)
	}

	// Refusals by its limit cost no query.
	limitOverride(t, f, `{"limit":0,"scale_ms":60000}`, "api_read")
	before := f.queries.Count()
	refused := f.call(t, "GET", path, "", secret)
	refused.is(t, 429, codeRateLimited)
	if n := f.queries.Count() - before; n != 0 {
		t.Errorf("the refused request made %d queries", n)
	}
	if refused.Header.Get("Deprecation") == "" {
		t.Error("a refused request by secret is not called deprecated")
	}
}

func TestDeliveryControl(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	paced := f.newChannel(t, f.tenant.ID, newEcho("paced"))
	if _, err := f.pool.Exec(t.Context(), `UPDATE channels SET rate_limit = '600/m' WHERE id = $1`, paced.ID); err != nil {
		t.Fatal(err)
	}
	f.refresh(t)
	a := f.call(t, "GET", "/api/v1/channels/"+paced.ID.String()+"/delivery", "", f.apiKey())
	a.is(t, 200, "")
	if got, err := json.Marshal(a.get(t, "data", "rate_limit")); string(got) != `{"limit":600,"scale_ms":60000}` {
		t.Errorf("rate_limit %s, %v", got, err)
	}

	s := f.newStage(t, paced.ID)
	one, all := s.ids.Replace("/api/v1/deliveries/{delivery}/retry"), s.ids.Replace("/api/v1/channels/{channel}/deliveries/retry")
	for what, query := range map[string]string{"limit": "?limit=0", "limit in words": "?limit=all", "from": "?from=yesterday", "to": "?to=2026-13-01", "activity": "?activity_id=7"} {
		if a := f.call(t, "POST", all+query, "", f.apiKey()); a.StatusCode != 400 || a.get(t, "code") != string(codeInvalidParameter) {
			t.Errorf("bad %s: %s", what, a)
		}
	}
	f.call(t, "POST", all, `{"from":"yesterday"}`, f.apiKey()).is(t, 400, codeInvalidParameter)
	f.call(t, "POST", all, `{"from":7}`, f.apiKey()).is(t, 422, codeValidationFailed)
	f.call(t, "POST", all, `{"limit":0}`, f.apiKey()).is(t, 422, codeValidationFailed)
	a = f.call(t, "POST", all+"?to=2026-01-01", `{"to":"2126-01-01"}`, f.apiKey()) // the body goes first
	a.is(t, 200, "")
	if a.get(t, "data", "retried") != 1.0 || a.get(t, "data", "has_more") != false {
		t.Errorf("retry of a channel: %s", a)
	}
	f.call(t, "POST", one, "", f.apiKey()).is(t, 409, codeNotFailed)

	f.call(t, "POST", "/api/v1/channels/"+f.webhook.ID.String()+"/pause", "", f.apiKey()).is(t, 200, "")
	a = f.call(t, "GET", "/api/v1/deliveries?status=paused", "", f.apiKey())
	if list := a.get(t, "data").([]any); len(list) != 1 || list[0].(map[string]any)["status"] != "paused" {
		t.Errorf("paused deliveries: %s", a)
	}
	if a = f.call(t, "GET", "/api/v1/channels/"+f.webhook.ID.String()+"/delivery", "", f.apiKey()); a.get(t, "data", "parked_deliveries") != 1.0 || a.get(t, "data", "circuit_state") != "paused" {
		t.Errorf("state: %s", a)
	}

	s = f.newStage(t, paced.ID)
	ch := managementPrefix + "/channels/" + f.webhook.ID.String()
	f.call(t, "PATCH", ch, `{"status":"inactive"}`, f.ops()).is(t, 200, "")
	for _, path := range []string{s.ids.Replace("/api/v1/deliveries/{delivery}/retry"), all} {
		f.call(t, "POST", path, "", f.apiKey()).is(t, 400, codeChannelInactive)
	}
}

// Deliveries show the activity without the secrets in it.
func TestDeliveryPayloadIsRedacted(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t)
	f.call(t, "POST", "/api/v1/conversations/"+v.ID.String()+"/activities", `{"text":"token: fine","metadata":{"order":{"API_KEY":"canary-1","n":12345678901234567890}},
		"attachments":[{"contentType":"application/json","content":{"password":"canary-2","id":7}}]}`, f.apiKey()).is(t, 201, "")
	list := f.call(t, "GET", "/api/v1/deliveries", "", f.apiKey())
	id := list.get(t, "data").([]any)[0].(map[string]any)["id"].(string)
	for _, a := range []answer{list, f.call(t, "GET", "/api/v1/deliveries/"+id, "", f.apiKey())} {
		if text := string(a.body); strings.Contains(text, "canary") || strings.Count(text, "[REDACTED]") != 2 || !strings.Contains(text, "12345678901234567890") || !strings.Contains(text, "token: fine") {
			t.Errorf("payload: %s", text)
		}
	}
}

func TestLegacyWatermark(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v, other := f.newConversation(t), f.newConversation(t)
	post := func(conversation uuid.UUID) string {
		a := f.call(t, "POST", "/api/v1/conversations/"+conversation.String()+"/activities", `{"text":"x"}`, f.apiKey())
		a.is(t, 201, "")
		return a.get(t, "data", "id").(string)
	}
	ids := []string{post(v.ID), post(v.ID), post(v.ID)}
	elsewhere := post(other.ID)
	encode := func(id string) string { return strings.TrimRight(base64URL(id), "=") }
	for path, as := range map[string]option{
		"/api/v1/conversations/":           f.apiKey(),
		"/api/v1/converger/conversations/": bearer(f.newToken(t, auth.Claims{UserID: "ada"})),
	} {
		path += v.ID.String() + "/activities?watermark="
		list := "data"
		if strings.Contains(path, "/converger/") {
			list = "activities"
		}
		for mark, want := range map[string]int{encode(ids[0]): 2, encode(ids[2]): 0, "c2VxOjE": 2} {
			a := f.call(t, "GET", path+mark, "", as)
			a.is(t, 200, "")
			if n := len(a.get(t, list).([]any)); n != want {
				t.Errorf("%s%s: %d activities, want %d", path, mark, n, want)
			}
		}
		for _, mark := range []string{encode(elsewhere), encode(uuid.NewString()), encode("no id, but as long as one: thirty-six"), "xyz", "c2VxOi0x"} {
			f.call(t, "GET", path+mark, "", as).is(t, 400, codeInvalidWatermark)
		}
		f.call(t, "GET", strings.Replace(path, v.ID.String(), uuid.NewString(), 1)+encode(ids[0]), "", as).is(t, 404, codeNotFound)
	}
}
