package http

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/delivery"
)

const rulesPath = "/api/v1/routing_rules"

// ruleJSON is the body of a rule, wrapped as the API wants it.
func ruleJSON(name string, source uuid.UUID, targets ...uuid.UUID) string {
	quoted := make([]string, len(targets))
	for i, id := range targets {
		quoted[i] = `"` + id.String() + `"`
	}
	return fmt.Sprintf(`{"routing_rule":{"name":%q,"source_channel_id":%q,"target_channel_ids":[%s]}}`, name, source, strings.Join(quoted, ","))
}

func TestRoutingRules(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	echo := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "bot", Type: channel.TypeEcho})

	// Made, it is shown in the documented shape, and in force with its answer.
	made := f.call(t, "POST", rulesPath, ruleJSON("shop", f.webhook.ID, echo.ID), f.apiKey())
	made.is(t, 201, "")
	rule := made.json(t)["data"].(map[string]any)
	path := rulesPath + "/" + rule["id"].(string)
	want := map[string]any{"id": rule["id"], "name": "shop", "source_channel_id": f.webhook.ID.String(), "target_channel_ids": []any{echo.ID.String()},
		"enabled": true, "tenant_id": f.tenant.ID.String(), "inserted_at": rule["inserted_at"], "updated_at": rule["updated_at"]}
	if diff := cmp.Diff(want, rule); diff != "" || rule["inserted_at"] == nil || made.Header.Get("Location") != path {
		t.Errorf("made, at %q (-want +got):\n%s", made.Header.Get("Location"), diff)
	}
	chat := f.newConversation(t).ID
	delivered := func(what string, want ...uuid.UUID) {
		t.Helper()
		a := f.call(t, "POST", "/api/v1/conversations/"+chat.String()+"/activities", `{"text":"hi"}`, f.apiKey())
		a.is(t, 201, "")
		id := uuid.MustParse(a.get(t, "data", "id").(string))
		list, _, err := f.Deliveries.List(t.Context(), f.tenant.ID, delivery.Filter{ActivityID: &id}, uuid.Nil, 10)
		if err != nil {
			t.Fatal(err)
		}
		got := map[uuid.UUID]bool{}
		for _, d := range list {
			got[d.ChannelID] = true
		}
		expect := map[uuid.UUID]bool{}
		for _, id := range want {
			expect[id] = true
		}
		if diff := cmp.Diff(expect, got); diff != "" {
			t.Errorf("%s: delivered to (-want +got):\n%s", what, diff)
		}
	}
	delivered("a new rule", f.webhook.ID, echo.ID)

	// The list is by name, without pages.
	second := f.call(t, "POST", rulesPath, ruleJSON("after", f.whatsapp.ID, f.webhook.ID), f.apiKey())
	second.is(t, 201, "")
	list := f.call(t, "GET", rulesPath, "", f.apiKey())
	list.is(t, 200, "")
	if diff := cmp.Diff(map[string]any{"data": []any{second.get(t, "data"), want}}, list.json(t)); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}

	// PATCH and PUT are partial, and take back what was shown.
	for method, enabled := range map[string]bool{"PATCH": false, "PUT": false} {
		a := f.call(t, method, path, fmt.Sprintf(`{"routing_rule":{"id":"ignored","enabled":%t},"also":"ignored"}`, enabled), f.apiKey())
		a.is(t, 200, "")
		want["enabled"], want["updated_at"] = enabled, a.get(t, "data", "updated_at")
		if diff := cmp.Diff(any(want), a.get(t, "data")); diff != "" {
			t.Errorf("%s (-want +got):\n%s", method, diff)
		}
	}
	delivered("a disabled rule", f.webhook.ID)
	shown := f.call(t, "GET", path, "", f.apiKey())
	if diff := cmp.Diff(any(want), shown.get(t, "data")); diff != "" {
		t.Errorf("shown (-want +got):\n%s", diff)
	}
	f.call(t, "PUT", path, strings.Replace(strings.Replace(string(shown.body), `"data"`, `"routing_rule"`, 1), `"enabled":false`, `"enabled":true`, 1), f.apiKey()).is(t, 200, "")
	delivered("an enabled rule", f.webhook.ID, echo.ID)

	f.call(t, "DELETE", path, "", f.apiKey()).is(t, 204, "")
	for _, method := range []string{"GET", "DELETE"} {
		f.call(t, method, path, "", f.apiKey()).is(t, 404, codeNotFound)
	}
	f.call(t, "PATCH", path, `{"routing_rule":{"name":"x"}}`, f.apiKey()).is(t, 404, codeNotFound)
	delivered("a deleted rule", f.webhook.ID)

	// Every change is the tenant's own in the audit log.
	var changes, others int
	err := f.pool.QueryRow(t.Context(), `SELECT count(*), count(*) FILTER (WHERE actor_type <> 'tenant_api' OR actor_id = '' OR request_id IS NULL OR tenant_id <> $1)
		FROM audit_log WHERE resource_type = 'routing_rule'`, f.tenant.ID).Scan(&changes, &others)
	if err != nil || changes != 5 || others != 0 {
		t.Errorf("audit log: %d changes of rules, %d by others (%v), want 5 and 0", changes, others, err)
	}
}

func TestRoutingRuleRefusals(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	made := f.call(t, "POST", rulesPath, ruleJSON("there", f.whatsapp.ID, f.webhook.ID), f.apiKey())
	made.is(t, 201, "")
	path := rulesPath + "/" + made.get(t, "data", "id").(string)
	for _, body := range []string{`{}`, `{"name":"x"}`, `{"routing_rule":null}`, `{"routing_rule":[]}`, `{"routing_rule":"x"}`} {
		f.call(t, "POST", rulesPath, body, f.apiKey()).is(t, 400, codeMalformedBody)
		f.call(t, "PATCH", path, body, f.apiKey()).is(t, 400, codeMalformedBody)
	}
	f.call(t, "GET", rulesPath+"/7", "", f.apiKey()).is(t, 400, codeMalformedID)

	type refusal struct{ Pointer, Code, Detail any }
	for name, tt := range map[string]struct {
		method, body string
		want         []refusal
	}{
		"nothing": {"POST", `{"routing_rule":{}}`, []refusal{{"#/routing_rule/name", "required", "is required"}, {"#/routing_rule/source_channel_id", "required", "is required"},
			{"#/routing_rule/target_channel_ids", "required", "is required: name 1 to 20 channels"}}},
		"a name again": {"POST", ruleJSON("there", f.whatsapp.ID, f.webhook.ID), []refusal{{"#/routing_rule/name", "conflict", "has already been taken"}}},
		"inbound-only": {"POST", ruleJSON("back", f.webhook.ID, f.whatsapp.ID), []refusal{{"#/routing_rule/target_channel_ids", "conflict",
			"these target channels are inbound-only and cannot deliver outbound: whatsapp"}}},
		"no UUID": {"PATCH", `{"routing_rule":{"target_channel_ids":["` + f.webhook.ID.String() + `",7],"source_channel_id":"x","name":1,"enabled":"yes"}}`, []refusal{
			{"#/routing_rule/name", "invalid_type", "must be a string"}, {"#/routing_rule/source_channel_id", "malformed", "must be a UUID"},
			{"#/routing_rule/target_channel_ids/1", "malformed", "must be a UUID"}, {"#/routing_rule/enabled", "invalid_type", "must be true or false"}}},
		"null":       {"PUT", `{"routing_rule":{"name":null}}`, []refusal{{"#/routing_rule/name", "invalid_type", "can't be null; leave it out to keep it"}}},
		"no targets": {"PATCH", `{"routing_rule":{"target_channel_ids":[]}}`, []refusal{{"#/routing_rule/target_channel_ids", "required", "is required: name 1 to 20 channels"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			at := rulesPath
			if tt.method != "POST" {
				at = path
			}
			a := f.call(t, tt.method, at, tt.body, f.apiKey())
			a.is(t, 422, codeValidationFailed)
			var got []refusal
			for _, e := range a.get(t, "errors").([]any) {
				m := e.(map[string]any)
				got = append(got, refusal{m["pointer"], m["code"], m["detail"]})
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Operators keep the rules of every tenant: the body is the rule, what it does not know is refused, and the audit log has the
// operator's name.
func TestRoutingRulesByOperators(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	path := managementPrefix + "/tenants/" + f.tenant.ID.String() + "/routing_rules"
	rule := fmt.Sprintf(`{"name":"r","source_channel_id":%q,"target_channel_ids":[%q],"enabled":false}`, f.whatsapp.ID, f.webhook.ID)
	made := f.call(t, "POST", path, rule, f.ops())
	made.is(t, 201, "")
	one := path + "/" + made.get(t, "data", "id").(string)
	if made.get(t, "data", "enabled") != false || made.Header.Get("Location") != one {
		t.Errorf("made %s at %q", made, made.Header.Get("Location"))
	}
	tenants := f.call(t, "GET", rulesPath, "", f.apiKey())
	if diff := cmp.Diff(tenants.json(t), f.call(t, "GET", path, "", f.ops()).json(t)); diff != "" {
		t.Errorf("the tenant sees other rules than the operator:\n%s", diff)
	}
	a := f.call(t, "PATCH", one, `{"enabled":true}`, f.ops())
	a.is(t, 200, "")
	if a.get(t, "data", "enabled") != true || a.get(t, "data", "name") != "r" {
		t.Errorf("switched on: %s", a)
	}

	for body, pointer := range map[string]string{
		`{"routing_rule":{"name":"x"}}`: "#/routing_rule", `{"colour":1}`: "#/colour", `{"name":""}`: "#/name", `{"name":null}`: "#/name",
		`{"target_channel_ids":["` + f.whatsapp.ID.String() + `"]}`: "#/target_channel_ids",
	} {
		a := f.call(t, "PATCH", one, body, f.ops())
		a.is(t, 422, codeValidationFailed)
		if got := a.get(t, "errors").([]any)[0].(map[string]any)["pointer"]; got != pointer {
			t.Errorf("%s: refused at %v, want %s", body, got, pointer)
		}
	}
	f.call(t, "POST", path, strings.Replace(rule, "{", `{"priority":1,`, 1), f.ops()).is(t, 422, codeValidationFailed)

	f.call(t, "DELETE", one, "", f.ops()).is(t, 204, "")
	f.call(t, "GET", one, "", f.ops()).is(t, 404, codeNotFound)
	var changes string
	err := f.pool.QueryRow(t.Context(), `SELECT string_agg(action, ' ' ORDER BY id) FROM audit_log
		WHERE resource_type = 'routing_rule' AND actor_type = 'operator' AND request_id IS NOT NULL AND tenant_id = $1`, f.tenant.ID).Scan(&changes)
	if err != nil || changes != "create toggle_enabled delete" {
		t.Errorf("audit log: the operator did %q (%v)", changes, err)
	}
}

// A tenant's own programs can guard their changes too.
func TestRoutingRuleTags(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	made := f.call(t, "POST", rulesPath, ruleJSON("shop", f.whatsapp.ID, f.webhook.ID), f.apiKey())
	made.is(t, 201, "")
	path, tag := rulesPath+"/"+made.get(t, "data", "id").(string), made.Header.Get("Etag")
	f.call(t, "GET", path, "", f.apiKey(), header("If-None-Match", tag)).is(t, 304, "")
	f.call(t, "PUT", path, `{"routing_rule":{"name":"store"}}`, f.apiKey(), header("If-Match", tag)).is(t, 200, "")
	body := map[string]string{"PUT": `{"routing_rule":{"name":"boutique"}}`, "PATCH": `{"routing_rule":{"name":"boutique"}}`, "DELETE": ""}
	for method, body := range body {
		f.call(t, method, path, body, f.apiKey(), header("If-Match", tag)).is(t, 412, codePreconditionFailed)
		f.call(t, method, path, body, f.apiKey(), ifMatch("")).is(t, 400, codeInvalidParameter)
	}
	if name := f.call(t, "GET", path, "", f.apiKey()).get(t, "data", "name"); name != "store" {
		t.Errorf("the rule is named %v, want the first change's name", name)
	}
}

// A deleted channel drops out of the routes at once, and its rule stays where the tenant can see it.
func TestRoutingRuleOfADeletedChannel(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	sink := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "sink", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	made := f.call(t, "POST", rulesPath, ruleJSON("there", f.webhook.ID, sink.ID), f.apiKey())
	made.is(t, 201, "")
	a := &activity.New{Type: activity.TypeMessage, Sender: "user"}
	targets := func() int { return len(f.Deliveries.(*delivery.Service).Targets(f.webhook.ID, a)) }
	if n := targets(); n != 2 {
		t.Errorf("%d targets, want 2", n)
	}
	f.call(t, "DELETE", managementPrefix+"/channels/"+sink.ID.String(), "", f.ops()).is(t, 204, "")
	if n := targets(); n != 1 {
		t.Errorf("%d targets without the deleted channel, want 1", n)
	}
	f.call(t, "GET", rulesPath+"/"+made.get(t, "data", "id").(string), "", f.apiKey()).is(t, 200, "")
}
