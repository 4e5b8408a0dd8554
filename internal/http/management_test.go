package http

import (
	"bytes"
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/http/openapi"
	"converger/internal/tenants"
)

// planted is in every secret that a change brings, and may be in no line of the audit log.
const planted = "planted-canary-0123456789"

// changes are a request for each changing route of the management API, made when its turn comes.
func (f *front) changes(t testing.TB) map[string]func() (path, body string) {
	tenant := "/tenants/" + f.tenant.ID.String()
	ch := "/channels/" + f.webhook.ID.String()
	conversation := f.newConversation(t).ID.String()
	at := func(path, body string) func() (string, string) { return func() (string, string) { return path, body } }
	newRange := func(cidr string) tenants.AddressRange {
		return must(f.Tenants.CreateAddressRange(t.Context(), testActor, tenants.NewAddressRange{Prefix: netip.MustParsePrefix(cidr), Kind: tenants.RangeDeny}, tenants.Caller{}))
	}
	sink := f.newChannel(t, f.tenant.ID, newEcho("sink"))
	newRule := func() string { // the path of a new one
		return tenant + "/routing_rules/" + must(f.Rules.Create(t.Context(), testActor, f.tenant.ID, delivery.NewRoutingRule{
			Name: uuid.NewString(), SourceChannelID: f.webhook.ID, TargetChannelIDs: []uuid.UUID{sink.ID}})).ID.String()
	}
	requests := map[string]func() (string, string){
		"POST /tenants":                               at("/tenants", `{"name":"New"}`),
		"PATCH /tenants/{tenant_id}":                  at(tenant, `{"name":"Renamed","max_in_flight":7}`),
		"POST /tenants/{tenant_id}/suspend":           at(tenant+"/suspend", ""),
		"POST /tenants/{tenant_id}/activate":          at(tenant+"/activate", ""),
		"POST /tenants/{tenant_id}/keys":              at(tenant+"/keys", `{"name":"k"}`),
		"PUT /tenants/{tenant_id}/limits/{bucket}":    at(tenant+"/limits/inbound", `{"limit":5,"scale_ms":1000}`),
		"DELETE /tenants/{tenant_id}/limits/{bucket}": at(tenant+"/limits/inbound", ""),
		"PUT /tenants/{tenant_id}/upload_types":       at(tenant+"/upload_types", `{"types":["image/png"]}`),
		"POST /tenants/{tenant_id}/channels": at(tenant+"/channels", `{"name":"c","type":"whatsapp_meta","secret":"`+planted+`","config":{"access_token":"`+planted+
			`","phone_number_id":"1","app_secret":"`+planted+`","verify_token":"`+planted+`"}}`),
		"PATCH /channels/{channel_id}":       at(ch, `{"name":"other","config":{"url":"http://127.0.0.1:9/","headers":{"X-Auth":"`+planted+`"}}}`),
		"POST /channels/{channel_id}/secret": at(ch+"/secret", `{"secret":"`+planted+`-2"}`),
		"DELETE /channels/{channel_id}": func() (string, string) {
			c := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "old", Type: channel.TypeEcho})
			f.refresh(t)
			return "/channels/" + c.ID.String(), ""
		},
		"DELETE /rate_limits/usage": at("/rate_limits/usage?bucket=upload&subject="+f.tenant.ID.String(), ""),
		"POST /tenants/{tenant_id}/routing_rules": at(tenant+"/routing_rules",
			fmt.Sprintf(`{"name":"r","source_channel_id":%q,"target_channel_ids":[%q]}`, f.webhook.ID, sink.ID)),
		"PATCH /tenants/{tenant_id}/routing_rules/{rule_id}":  func() (string, string) { return newRule(), `{"enabled":false}` },
		"DELETE /tenants/{tenant_id}/routing_rules/{rule_id}": func() (string, string) { return newRule(), "" },
		"POST /operator_tokens":                               at("/operator_tokens", `{"name":"t"}`),
		"POST /address_ranges":                                at("/address_ranges", `{"cidr":"203.0.113.0/24","kind":"deny","note":"scanner"}`),
		"PATCH /address_ranges/{range_id}": func() (string, string) {
			return "/address_ranges/" + newRange("198.51.100.0/24").ID.String(), `{"kind":"exempt"}`
		},
		"DELETE /address_ranges/{range_id}": func() (string, string) { return "/address_ranges/" + newRange("2001:db8::/32").ID.String(), "" },
		"POST /operator_tokens/{token_id}/revoke": func() (string, string) {
			token, _, err := f.Tenants.CreateOperatorToken(t.Context(), testActor, tenants.NewOperatorToken{Name: "old"})
			if err != nil {
				t.Fatal(err)
			}
			return "/operator_tokens/" + token.ID.String() + "/revoke", ""
		},
		"POST /tenants/{tenant_id}/keys/{key_id}/revoke": func() (string, string) {
			key, _, err := f.Tenants.CreateKey(t.Context(), testActor, f.tenant.ID, tenants.NewKey{Name: "old"})
			if err != nil {
				t.Fatal(err)
			}
			return tenant + "/keys/" + key.ID.String() + "/revoke", ""
		},
		"POST /tenants/{tenant_id}/deliveries/{delivery_id}/retry": func() (string, string) {
			return tenant + "/deliveries/" + f.failedDelivery(t).String() + "/retry", ""
		},
		"POST /channels/{channel_id}/deliveries/retry": func() (string, string) {
			f.failedDelivery(t)
			return ch + "/deliveries/retry", ""
		},
		"POST /channels/{channel_id}/pause":                                at(ch+"/pause", ""),
		"POST /channels/{channel_id}/resume":                               at(ch+"/resume", ""),
		"POST /tenants/{tenant_id}/conversations/{conversation_id}/close":  at(tenant+"/conversations/"+conversation+"/close", ""),
		"POST /tenants/{tenant_id}/conversations/{conversation_id}/reopen": at(tenant+"/conversations/"+conversation+"/reopen", ""),
		"POST /tenants/{tenant_id}/inbound_events/{event_id}/replay": func() (string, string) {
			return tenant + "/inbound_events/" + f.rejectedEvent(t).String() + "/replay", ""
		},
	}
	for people, realm := range map[string]auth.Realm{"/admin_users": auth.Admins, "/tenants/{tenant_id}/users": auth.TenantRealm(f.tenant.ID)} {
		users := strings.ReplaceAll(people, "{tenant_id}", f.tenant.ID.String())
		newUser := func() string { // the path of a new one
			name := uuid.NewString()
			u := must(f.Users.Create(t.Context(), testActor, realm, auth.NewUser{Email: name + "@example.com", Role: auth.RoleViewer}))
			return users + "/" + u.ID.String()
		}
		fresh := func(below, body string) func() (string, string) {
			return func() (string, string) { return newUser() + below, body }
		}
		requests["POST "+people] = at(users, `{"email":"ada@example.com","role":"viewer","password":"`+planted+`"}`)
		requests["PATCH "+people+"/{user_id}"] = fresh("", `{"name":"Ada","status":"inactive"}`)
		requests["DELETE "+people+"/{user_id}"] = fresh("", "")
		requests["POST "+people+"/{user_id}/password"] = fresh("/password", `{"password":"`+planted+`"}`)
		requests["POST "+people+"/{user_id}/sign_in_link"] = fresh("/sign_in_link", "")
		requests["DELETE "+people+"/{user_id}/sessions"] = fresh("/sessions", "")
		requests["DELETE "+people+"/{user_id}/sessions/{session_id}"] = func() (string, string) {
			path := newUser()
			return path + "/sessions/" + f.newSession(t, realm, path[strings.LastIndexByte(path, '/')+1:]).String(), ""
		}
	}
	return requests
}

// newSession signs a user in, as it stands in the database.
func (f *front) newSession(t testing.TB, realm auth.Realm, user string) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	owner := uuid.Max
	if tenant, ok := realm.Tenant(); ok {
		owner = tenant
	}
	_, err := f.pool.Exec(t.Context(), `INSERT INTO web_sessions (realm, user_id, id, hash, password_version, by_link, address, user_agent, expires_at)
		VALUES ($1, $2, $3, sha256($4), 1, false, '192.0.2.1', 'test', now() + interval '1 hour')`, owner, user, id, id[:])
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// failedDelivery is one of the channel site's that can be retried.
func (f *front) failedDelivery(t testing.TB) uuid.UUID {
	t.Helper()
	text := "lost"
	posted := f.Activities.Append(t.Context(), []activity.New{{TenantID: f.tenant.ID, ConversationID: f.newConversation(t).ID, Sender: "user", Text: &text}})[0]
	if posted.Err != nil {
		t.Fatal(posted.Err)
	}
	var id uuid.UUID
	if err := f.pool.QueryRow(t.Context(), `UPDATE deliveries SET status = 'failed' WHERE activity_id = $1 RETURNING id`, posted.Activity.ID).Scan(&id); err != nil {
		t.Fatal(err)
	}
	return id
}

// rejectedEvent stores an event that can be processed again.
func (f *front) rejectedEvent(t testing.TB) uuid.UUID {
	t.Helper()
	id := uuid.Must(uuid.NewV7())
	_, err := f.pool.Exec(t.Context(), `INSERT INTO inbound_events (tenant_id, id, channel_id, endpoint, body, state, error)
		VALUES ($1, $2, $3, 'inbound', '{}', 'rejected', 'test')`, f.tenant.ID, id, f.whatsapp.ID)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// Every changing route of the management API, taken from the route table, leaves a line in the audit log that says who it
// was, in the same transaction, and no secret: neither one that was sent nor one that was made.
func TestEveryChangeIsAudited(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	changes := f.changes(t)
	operator, ok := f.Directory.OperatorToken(must(tenants.ParseOperatorToken(f.operator)))
	if !ok {
		t.Fatal("the directory does not know the token")
	}
	var secrets []string
	for _, rt := range f.routes {
		if rt.auth != credentialOperator || rt.scope == tenants.ScopeRead {
			continue
		}
		name := rt.method + " " + strings.TrimPrefix(rt.pattern, managementPrefix)
		change, ok := changes[name]
		if !ok {
			t.Errorf("%s: give the test a request for it", name)
			continue
		}
		delete(changes, name)
		path, body := change()
		request := "req_of_" + uuid.NewString()
		a := f.call(t, rt.method, managementPrefix+path, body, f.ops(), header("X-Request-Id", request))
		if a.StatusCode >= 300 {
			t.Errorf("%s: %s", name, a)
			continue
		}
		var lines int
		var actor string
		err := f.pool.QueryRow(t.Context(), `SELECT count(*), COALESCE(max(actor_type || ' ' || actor_id), '') FROM audit_log WHERE request_id = $1`, request).
			Scan(&lines, &actor)
		if err != nil {
			t.Fatal(err)
		}
		if lines != 1 || actor != tenants.ActorOperator+" "+operator.ID.String() {
			t.Errorf("%s leaves %d lines in the audit log, by %q; want one by the operator token", name, lines, actor)
		}
		secrets = append(secrets, shownSecrets(t, a)...)
	}
	for name := range changes {
		t.Errorf("%s is no route", name)
	}
	if len(secrets) < 4 {
		t.Errorf("only %d secrets were shown: the test looks for the wrong members", len(secrets))
	}
	var log bytes.Buffer
	for next := managementPrefix + "/audit?limit=20"; next != ""; {
		page := f.call(t, "GET", next, "", f.ops())
		page.is(t, 200, "")
		log.Write(page.body)
		next = ""
		if m := regexp.MustCompile(`^<(.+)>; rel="next"$`).FindStringSubmatch(page.Header.Get("Link")); m != nil {
			next = m[1]
		}
	}
	for _, secret := range append(secrets, planted) {
		if strings.Contains(log.String(), secret) {
			t.Errorf("the audit log holds the secret %q", secret)
		}
	}
	if n := strings.Count(log.String(), "[REDACTED]") + strings.Count(log.String(), "[redacted]"); n == 0 {
		t.Error("nothing was redacted: the secrets never came near the log")
	}
}

// shownSecrets are the values that an answer shows this once.
func shownSecrets(t testing.TB, a answer) (found []string) {
	t.Helper()
	if len(a.body) == 0 {
		return nil
	}
	data, _ := a.get(t, "data").(map[string]any)
	for _, name := range []string{"secret", "api_key", "token", "callback_url", "url", "password"} {
		if text, ok := data[name].(string); ok && !strings.HasSuffix(text, "/inbound") {
			found = append(found, text)
		}
	}
	return found
}

func TestAuditLog(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	tenant := managementPrefix + "/tenants/" + f.tenant.ID.String()
	f.call(t, "PATCH", tenant, `{"max_in_flight":9}`, f.ops(), header("X-Request-Id", "req_of_the_patch")).is(t, 200, "")
	f.call(t, "POST", managementPrefix+"/tenants", `{"name":"Other"}`, f.ops()).is(t, 201, "")

	list := func(query string) []any {
		t.Helper()
		a := f.call(t, "GET", managementPrefix+query, "", f.ops())
		a.is(t, 200, "")
		return a.get(t, "data").([]any)
	}
	got := list("/audit?resource_type=tenant&action=update")
	if len(got) != 1 {
		t.Fatalf("%d updates of tenants, want 1: %v", len(got), got)
	}
	line := got[0].(map[string]any)
	id := line["actor_id"].(string)
	want := map[string]any{
		"id": line["id"], "tenant_id": f.tenant.ID.String(), "actor_type": "operator", "actor_id": id, "action": "update", "resource_type": "tenant",
		"resource_id": f.tenant.ID.String(), "request_id": "req_of_the_patch", "inserted_at": line["inserted_at"],
		"changes": map[string]any{"before": map[string]any{"name": "Acme", "max_in_flight": 400.0}, "after": map[string]any{"name": "Acme", "max_in_flight": 9.0}},
	}
	if fmt.Sprint(line) != fmt.Sprint(want) {
		t.Errorf("line %v\nwant %v", line, want)
	}
	today := time.Now().UTC()
	day := func(n int) string { return today.AddDate(0, 0, n).Format(time.DateOnly) }
	for query, want := range map[string]bool{
		"/audit?actor_id=" + id:                                   true,
		"/audit?actor_id=" + uuid.NewString():                     false,
		"/audit?actor_type=operator":                              true,
		"/audit?actor_type=admin":                                 false,
		"/audit?resource_id=" + f.tenant.ID.String():              true,
		"/audit?tenant_id=" + f.tenant.ID.String():                true,
		"/audit?tenant_id=" + uuid.NewString():                    false,
		"/audit?action=delete":                                    false,
		"/audit?from=" + day(0) + "&to=" + day(0):                 true,
		"/audit?from=" + day(1):                                   false,
		"/audit?to=" + day(-1):                                    false,
		"/audit?from=0001-01-01&to=9999-12-31":                    true,
		"/tenants/" + f.tenant.ID.String() + "/audit":             true,
		"/tenants/" + f.tenant.ID.String() + "/audit?action=none": false,
	} {
		if found := len(list(query)) > 0; found != want {
			t.Errorf("%s finds something: %v, want %v", query, found, want)
		}
	}
	for _, line := range list("/tenants/" + f.tenant.ID.String() + "/audit") {
		if line.(map[string]any)["tenant_id"] != f.tenant.ID.String() {
			t.Errorf("the tenant's log has %v", line)
		}
	}
	f.call(t, "GET", managementPrefix+"/tenants/"+uuid.NewString()+"/audit", "", f.ops()).is(t, 404, codeNotFound)
	f.call(t, "GET", managementPrefix+"/audit?from=yesterday", "", f.ops()).is(t, 400, codeInvalidParameter)
	f.call(t, "GET", managementPrefix+"/audit?tenant_id=7", "", f.ops()).is(t, 400, codeInvalidParameter)

	// Newest first, every line once, and a cursor is good for its own list only.
	var all []string
	path, cursor := managementPrefix+"/audit?limit=2", ""
	for {
		a := f.call(t, "GET", path+cursor, "", f.ops())
		a.is(t, 200, "")
		for _, line := range a.get(t, "data").([]any) {
			all = append(all, line.(map[string]any)["id"].(string))
		}
		next, _ := a.get(t, "meta", "next_cursor").(string)
		if next == "" {
			break
		}
		cursor = "&cursor=" + next
		f.call(t, "GET", tenant+"/audit?cursor="+next, "", f.ops()).is(t, 400, codeInvalidCursor)
		f.call(t, "GET", path+"&action=create"+cursor, "", f.ops()).is(t, 400, codeInvalidCursor)
	}
	if want := int(f.rows(t)["audit_log"]); len(all) != want || !slices.IsSortedFunc(all, func(a, b string) int { return strings.Compare(b, a) }) {
		t.Errorf("%d lines on the pages, want %d, the newest first: %v", len(all), want, all)
	}
}

func TestOperatorTokens(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	const path = managementPrefix + "/operator_tokens"
	until := time.Now().Add(time.Hour).UTC().Truncate(time.Second)
	create := func(body string, as option) answer { return f.call(t, "POST", path, body, as) }

	made := create(`{"name":"robot","scopes":["write"],"expires_at":"`+until.Format(time.RFC3339)+`"}`, f.ops())
	made.is(t, 201, "")
	text := made.get(t, "data", "token").(string)
	id := made.get(t, "data", "id").(string)
	robot := bearer(text)
	f.call(t, "GET", path, "", robot).is(t, 403, codeInsufficientScope)
	for _, shown := range []answer{f.call(t, "GET", path, "", f.ops()), f.call(t, "GET", path+"/"+id, "", f.ops())} {
		if shown.is(t, 200, ""); strings.Contains(string(shown.body), text) || !strings.Contains(string(shown.body), id) {
			t.Errorf("shown again: %s", shown)
		}
	}

	// No token makes one that can do more than it can itself, or for longer.
	create(`{"name":"more","scopes":["read"]}`, robot).is(t, 422, codeValidationFailed)
	create(`{"name":"more","scopes":["read","write"]}`, robot).is(t, 422, codeValidationFailed)
	create(`{"name":"longer","expires_at":"`+until.Add(time.Second).Format(time.RFC3339)+`"}`, robot).is(t, 422, codeValidationFailed)
	create(`{"name":"nothing","scopes":[]}`, robot).is(t, 422, codeValidationFailed)
	same := create(`{"name":"same"}`, robot)
	same.is(t, 201, "")
	if scopes, expires := fmt.Sprint(same.get(t, "data", "scopes")), same.get(t, "data", "expires_at"); scopes != "[write]" || expires != until.Format(time.RFC3339) {
		t.Errorf("a token made without words has the scopes %s until %v, want those of its maker, until %v", scopes, expires, until)
	}
	reader := create(`{"name":"reader","scopes":["read"]}`, f.ops())
	reader.is(t, 201, "")
	create(`{"name":"x"}`, bearer(reader.get(t, "data", "token").(string))).is(t, 403, codeInsufficientScope)

	// The token in use, and the last that may write, need a clear word.
	revoke := func(id, body string, as option) answer { return f.call(t, "POST", path+"/"+id+"/revoke", body, as) }
	revoke(id, "", robot).is(t, 409, codeConfirmation)
	revoke(id, `{"force":true}`, robot).is(t, 200, "")
	f.call(t, "POST", path, `{"name":"x"}`, robot).is(t, 401, codeInvalidCredential)
	operator, _ := f.Directory.OperatorToken(must(tenants.ParseOperatorToken(f.operator)))
	other := bearer(same.get(t, "data", "token").(string))
	revoke(operator.ID.String(), `{"overlap_seconds":7200}`, other).is(t, 409, codeConfirmation) // the other ends before
	revoke(reader.get(t, "data", "id").(string), "", other).is(t, 200, "")
	revoke(same.get(t, "data", "id").(string), "", f.ops()).is(t, 200, "")
	revoke(operator.ID.String(), "", f.ops()).is(t, 409, codeConfirmation)
	revoke(uuid.NewString(), "", f.ops()).is(t, 404, codeNotFound)
	if got := f.call(t, "GET", path, "", f.ops()); got.StatusCode != 200 {
		t.Errorf("after the refusal: %s", got)
	}
}

// settings are the settings that have an ETag: where they are read, and a change of each.
func (f *front) settings(t testing.TB) []struct{ get, method, path, body string } {
	tenant := managementPrefix + "/tenants/" + f.tenant.ID.String()
	ch := managementPrefix + "/channels/" + f.webhook.ID.String()
	r := must(f.Tenants.CreateAddressRange(t.Context(), testActor, tenants.NewAddressRange{Prefix: netip.MustParsePrefix("198.51.100.0/24"), Kind: tenants.RangeDeny}, tenants.Caller{}))
	ranges := managementPrefix + "/address_ranges/" + r.ID.String()
	user := tenant + "/users/" + must(f.Users.Create(t.Context(), testActor, auth.TenantRealm(f.tenant.ID), auth.NewUser{Email: "ada@acme.example", Role: auth.RoleOwner})).ID.String()
	admin := managementPrefix + "/admin_users/" + must(f.Users.Create(t.Context(), testActor, auth.Admins, auth.NewUser{Email: "ada@hub.example", Role: auth.RoleAdmin})).ID.String()
	sink := f.newChannel(t, f.tenant.ID, newEcho("sink"))
	rule := tenant + "/routing_rules/" + must(f.Rules.Create(t.Context(), testActor, f.tenant.ID, delivery.NewRoutingRule{
		Name: "rule", SourceChannelID: f.webhook.ID, TargetChannelIDs: []uuid.UUID{sink.ID}})).ID.String()
	return []struct{ get, method, path, body string }{
		{tenant, "PATCH", tenant, `{"max_in_flight":%d}`},
		{tenant, "POST", tenant + "/suspend", ``},
		{tenant, "POST", tenant + "/activate", ``},
		{tenant + "/limits", "PUT", tenant + "/limits/api_read", `{"limit":%d,"scale_ms":1000}`},
		{tenant + "/limits/api_read", "PUT", tenant + "/limits/api_read", `{"limit":%d,"scale_ms":1000}`},
		{tenant + "/limits/api_read", "DELETE", tenant + "/limits/api_read", ``},
		{tenant + "/upload_types", "PUT", tenant + "/upload_types", `{"types":["image/png"]}`},
		{tenant + "/upload_types", "PUT", tenant + "/upload_types", `{"types":["image/gif"]}`},
		{ch, "PATCH", ch, `{"max_in_flight":%d}`},
		{ch, "POST", ch + "/secret", `{"overlap_seconds":0}`},
		{rule, "PATCH", rule, `{"name":"%d"}`},
		{rule, "DELETE", rule, ``},
		{ranges, "PATCH", ranges, `{"note":"%d"}`},
		{ranges, "DELETE", ranges, ``},
		{ch, "DELETE", ch, ``},
		{user, "PATCH", user, `{"name":"%d"}`},
		{user, "DELETE", user, ``},
		{admin, "PATCH", admin, `{"name":"%d"}`},
		{admin, "DELETE", admin, ``},
	}
}

// changesByOperators counts the lines of the audit log that calls of the management API have left.
func (f *front) changesByOperators(t testing.TB) (n int) {
	t.Helper()
	if err := f.pool.QueryRow(t.Context(), `SELECT count(*) FROM audit_log WHERE actor_type = 'operator'`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	return n
}

// ifMatch sends lines of If-Match; some may be empty.
func ifMatch(lines ...string) option {
	return func(r *http.Request) { r.Header["If-Match"] = lines }
}

// otherTags are lines of If-Match that a setting does not meet whose tag is another, or this one where it may not be weak.
func otherTags(tag string) [][]string {
	return [][]string{{`"1.0000000000000000"`}, {`"x"`}, {`""`}, {`"a,b"`}, {`"*"`}, {"W/" + tag}, {"W/" + tag + `, "x"`}, {`"x"`, `"y"`}, {`"x"`, "W/" + tag}, {"", `"x"`}, {`"a,` + strings.Trim(tag, `"`) + `"`}, {`"é"`}}
}

// noTags are lines of If-Match that hold no list of tags.
func noTags(tag string) [][]string {
	bare := strings.Trim(tag, `"`)
	return [][]string{{""}, {" "}, {","}, {" ,\t, "}, {"", ""}, {"x"}, {bare}, {`"x`}, {`x"`}, {"'" + bare + "'"}, {tag + tag}, {tag + ` "x"`}, {tag + ";"}, {"w/" + tag}, {"W/ " + tag}, {"W/"},
		{"*, " + tag}, {tag + ", *"}, {"*", tag}, {"*,"}, {"**"}, {`"x y"`}, {tag, "x"}}
}

// right are lines of If-Match that name a tag.
var right = []func(tag string) []string{
	func(tag string) []string { return []string{tag} },
	func(tag string) []string { return []string{`"x", ` + tag} },
	func(tag string) []string { return []string{tag + `,W/"x",,`} },
	func(tag string) []string { return []string{`"x"`, " \t" + tag + "\t "} },
	func(tag string) []string { return []string{"", `"a,b",` + tag} },
}

func TestEntityTags(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	tried := map[string]bool{}
	for i, s := range f.settings(t) {
		name := s.method + " " + s.path
		tried[s.method+" "+f.described.routes.Find(chi.NewRouteContext(), s.method, s.path)] = true
		body := func(n int) string {
			if strings.Contains(s.body, "%d") {
				return fmt.Sprintf(s.body, 10*i+n)
			}
			return s.body
		}
		shown := f.call(t, "GET", s.get, "", bearer(f.operatorOf(t)))
		shown.is(t, 200, "")
		tag := shown.Header.Get("Etag")
		if !regexp.MustCompile(`^"\d+\.[0-9a-f]{16}"$`).MatchString(tag) {
			t.Fatalf("GET %s: ETag %q", s.get, tag)
		}
		for _, given := range []string{tag, `"x", ` + tag, "W/" + tag, "*"} {
			for _, method := range []string{"GET", "HEAD"} {
				if a := f.call(t, method, s.get, "", bearer(f.operatorOf(t)), header("If-None-Match", given)); a.StatusCode != 304 || len(a.body) != 0 || a.Header.Get("Etag") != tag || a.Header.Get("Content-Type") != "" {
					t.Errorf("%s %s with If-None-Match %s: %s %v", method, s.get, given, a, a.Header)
				}
			}
		}
		f.call(t, "GET", s.get, "", bearer(f.operatorOf(t)), header("If-None-Match", `"1.0000000000000000"`)).is(t, 200, "")

		before := f.changesByOperators(t)
		for _, given := range otherTags(tag) {
			f.call(t, s.method, s.path, body(1), bearer(f.operatorOf(t)), ifMatch(given...)).is(t, 412, codePreconditionFailed)
		}
		for _, given := range noTags(tag) {
			a := f.call(t, s.method, s.path, body(1), bearer(f.operatorOf(t)), ifMatch(given...))
			if a.is(t, 400, codeInvalidParameter); !strings.Contains(a.get(t, "detail").(string), "Invalid If-Match") {
				t.Errorf("%s with If-Match %q: %s", name, given, a)
			}
		}
		if n := f.changesByOperators(t); n != before {
			t.Errorf("%s: refused changes left %d lines in the audit log", name, n-before)
		}
		a := f.call(t, s.method, s.path, body(2), bearer(f.operatorOf(t)), ifMatch(right[i%len(right)](tag)...))
		if a.StatusCode >= 300 {
			t.Fatalf("%s with the right tag: %s", name, a)
		}
		if a.StatusCode == 204 { // deleted
			f.call(t, s.method, s.path, "", bearer(f.operatorOf(t)), header("If-Match", tag)).is(t, 404, codeNotFound)
			continue
		}
		now := f.call(t, "GET", s.get, "", bearer(f.operatorOf(t)), header("If-None-Match", tag))
		now.is(t, 200, "")
		if got := now.Header.Get("Etag"); got == tag || s.get == s.path && a.Header.Get("Etag") != got {
			t.Errorf("%s: ETag %s, then %s, shown as %s", name, tag, a.Header.Get("Etag"), got)
		}
		f.call(t, s.method, s.path, body(3), bearer(f.operatorOf(t)), header("If-Match", tag)).is(t, 412, codePreconditionFailed)
		f.call(t, s.method, s.path, body(4), bearer(f.operatorOf(t))).is(t, 200, "") // nobody has to
		f.call(t, s.method, s.path, body(5), bearer(f.operatorOf(t)), header("If-Match", "*")).is(t, 200, "")
		f.call(t, s.method, s.path, body(6), bearer(f.operatorOf(t)), ifMatch(" * ")).is(t, 200, "")
	}
	for _, path := range f.described.doc.Paths {
		for _, op := range *path.Value {
			guarded := slices.ContainsFunc(op.Value.Parameters, func(p *openapi.Parameter) bool { return p.Name == "If-Match" })
			if name := strings.ToUpper(op.Name) + " " + path.Name; guarded && !tried[name] && !strings.Contains(name, rulesPath+"/") { // TestRoutingRuleTags
				t.Errorf("%s takes If-Match and is not tried", name)
			}
		}
	}
}

// Of many who change what they have read, one wins and the others are told: nobody's change is lost.
func TestLostUpdates(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	limit := managementPrefix + "/tenants/" + f.tenant.ID.String() + "/limits/inbound"
	tag := f.call(t, "GET", limit, "", f.ops()).Header.Get("Etag")
	const writers = 20
	answers := make([]answer, writers)
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			answers[i] = f.call(t, "PUT", limit, fmt.Sprintf(`{"limit":%d,"scale_ms":1000}`, i+1), f.ops(), header("If-Match", tag))
		})
	}
	wg.Wait()
	winner := 0
	for i, a := range answers {
		switch a.StatusCode {
		case 200:
			if winner != 0 {
				t.Errorf("%d and %d both won", winner, i+1)
			}
			winner = i + 1
		case 412:
		default:
			t.Errorf("writer %d: %s", i+1, a)
		}
	}
	if got := f.call(t, "GET", limit, "", f.ops()).get(t, "data", "override", "limit"); winner == 0 || got != float64(winner) {
		t.Errorf("the limit is %v, want that of the one who was answered 200: %d", got, winner)
	}
}

// Operators use the tenant API's handlers in their own name: for any tenant, whatever its state, and audited.
func TestOperatorsSteerDeliveries(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	tenant, ch := managementPrefix+"/tenants/"+f.tenant.ID.String(), managementPrefix+"/channels/"+f.webhook.ID.String()
	conversation := f.newConversation(t).ID.String()
	one := tenant + "/conversations/" + conversation
	f.call(t, "POST", tenant+"/suspend", "", f.ops()).is(t, 200, "")
	if a := f.call(t, "POST", one+"/close", "", f.ops()); a.StatusCode != 200 || a.get(t, "data", "status") != "closed" {
		t.Errorf("closed: %s", a)
	}
	f.call(t, "POST", one+"/close", "", f.ops()).is(t, 200, "") // changes nothing
	if n := len(f.call(t, "GET", tenant+"/audit?resource_type=conversation", "", f.ops()).get(t, "data").([]any)); n != 1 {
		t.Errorf("%d lines about closing it twice, want 1", n)
	}
	if list := f.call(t, "GET", tenant+"/conversations?status=closed", "", f.ops()).get(t, "data").([]any); len(list) != 1 {
		t.Errorf("closed conversations: %v", list)
	}
	if said := f.call(t, "GET", one+"/activities", "", f.ops()).get(t, "data").([]any); len(said) != 1 {
		t.Errorf("said: %v", said)
	}
	f.call(t, "POST", one+"/reopen", "", f.ops()).is(t, 200, "")

	failed := f.failedDelivery(t).String()
	path := tenant + "/deliveries/" + failed
	if a := f.call(t, "GET", path, "", f.ops()); a.StatusCode != 200 || a.get(t, "data", "status") != "failed" {
		t.Errorf("shown: %s", a)
	}
	f.call(t, "POST", path+"/retry", "", f.ops()).is(t, 202, "")
	f.call(t, "POST", path+"/retry", "", f.ops()).is(t, 409, codeNotFailed)
	f.failedDelivery(t)
	f.call(t, "POST", ch+"/deliveries/retry", `{"form":"2026-11-30"}`, f.ops()).is(t, 422, codeValidationFailed)
	if a := f.call(t, "POST", ch+"/deliveries/retry", "", f.ops()); a.StatusCode != 200 || a.get(t, "data", "retried") != 1.0 {
		t.Errorf("retried: %s", a)
	}
	f.call(t, "POST", ch+"/pause", "", f.ops()).is(t, 200, "")
	if a := f.call(t, "GET", ch+"/delivery", "", f.ops()); a.get(t, "data", "circuit_state") != "paused" {
		t.Errorf("paused: %s", a)
	}
	f.call(t, "POST", ch+"/resume", "", f.ops()).is(t, 200, "")
	operator, _ := f.Directory.OperatorToken(must(tenants.ParseOperatorToken(f.operator)))
	if by := f.call(t, "GET", path, "", f.ops()).get(t, "data", "retried_by"); by != "operator:"+operator.ID.String() {
		t.Errorf("retried by %v", by)
	}
}

func TestUpdateTenant(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Taken"}))
	tenant := managementPrefix + "/tenants/" + f.tenant.ID.String()
	a := f.call(t, "PATCH", tenant, `{"name":"Acme & Co"}`, f.ops())
	a.is(t, 200, "")
	if a.get(t, "data", "name") != "Acme & Co" || a.get(t, "data", "max_in_flight") != 400.0 {
		t.Errorf("renamed: %s", a)
	}
	if e, _ := f.Directory.Tenant(f.tenant.ID); e.Name != "Acme & Co" {
		t.Errorf("the directory has %q", e.Name)
	}
	f.call(t, "PATCH", tenant, `{"name":"ACME & co"}`, f.ops()).is(t, 200, "") // its own name in other case
	f.call(t, "PATCH", tenant, `{"name":"taken"}`, f.ops()).is(t, 409, codeConflict)
	for _, body := range []string{`{"name":""}`, `{"name":null}`, `{"max_in_flight":0}`, `{"max_in_flight":100001}`, `{"status":"active"}`, `{"limits":{}}`} {
		f.call(t, "PATCH", tenant, body, f.ops()).is(t, 422, codeValidationFailed)
	}
	before := f.rows(t)["audit_log"]
	f.call(t, "PATCH", tenant, `{}`, f.ops()).is(t, 200, "")
	if n := f.rows(t)["audit_log"]; n != before {
		t.Error("a change of nothing is in the audit log")
	}
}

func TestAddressRanges(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	const path = managementPrefix + "/address_ranges"
	create := func(body string) answer { return f.call(t, "POST", path, body, f.ops()) }

	made := create(`{"cidr":"::ffff:203.0.113.0/120","kind":"deny","note":"scanner","expires_at":"2099-01-01T00:00:00Z"}`)
	made.is(t, 201, "")
	one := made.Header.Get("Location")
	if made.get(t, "data", "cidr") != "203.0.113.0/24" {
		t.Errorf("an IPv4-mapped range is %v", made.get(t, "data", "cidr"))
	}
	create(`{"cidr":"203.0.113.0/24","kind":"exempt"}`).is(t, 409, codeConflict)
	create(`{"cidr":"203.0.113.7","kind":"exempt"}`).is(t, 201, "")
	hint := create(`{"cidr":"203.0.113.7/24","kind":"deny"}`)
	if hint.is(t, 422, codeValidationFailed); !strings.Contains(string(hint.body), "did you mean 203.0.113.0/24") {
		t.Errorf("host bits: %s", hint)
	}
	for _, body := range []string{
		`{"kind":"deny"}`, `{"cidr":"203.0.113.0/24"}`, `{"cidr":"","kind":"deny"}`, `{"cidr":"10.0.0.0/33","kind":"deny"}`, `{"cidr":"example.com","kind":"deny"}`,
		`{"cidr":"10.0.0.0/8","kind":"allow"}`, `{"cidr":"fe80::1%eth0","kind":"deny"}`, `{"cidr":"010.0.0.0/8","kind":"deny"}`, `{"cidr":"::ffff:0:0/90","kind":"deny"}`,
		`{"cidr":"10.0.0.0/8","kind":"deny","expires_at":"2020-01-01T00:00:00Z"}`, `{"cidr":"10.0.0.0/8","kind":"deny","note":"` + strings.Repeat("x", 501) + `"}`,
		`{"cidr":"0.0.0.0/0","kind":"exempt"}`, `{"cidr":"::/0","kind":"deny"}`, `{"cidr":"::ffff:0:0/96","kind":"deny"}`, `{"cidr":"10.0.0.0/8","kind":"deny","colour":1}`,
	} {
		create(body).is(t, 422, codeValidationFailed)
	}

	// httptest's requests come from 192.0.2.1: nobody denies the address from which they call, unless they insist.
	create(`{"cidr":"192.0.2.0/24","kind":"deny"}`).is(t, 409, codeConfirmation)
	elsewhere := from("198.51.100.1:1")
	create(`{"cidr":"192.0.2.1","kind":"exempt"}`).is(t, 201, "")
	wide := create(`{"cidr":"192.0.0.0/16","kind":"deny"}`) // the narrower range keeps the caller in
	wide.is(t, 201, "")
	mine := f.call(t, "GET", path+"?address=192.0.2.1&kind=exempt", "", f.ops()).get(t, "data").([]any)[0].(map[string]any)["id"].(string)
	f.call(t, "DELETE", path+"/"+mine, "", f.ops()).is(t, 409, codeConfirmation)
	f.call(t, "PATCH", path+"/"+mine, `{"kind":"deny"}`, f.ops()).is(t, 409, codeConfirmation)
	f.call(t, "DELETE", path+"/"+mine+"?force=true", "", f.ops()).is(t, 204, "")
	f.call(t, "GET", path, "", f.ops()).is(t, 403, codeAddressDenied)
	f.call(t, "DELETE", wide.Header.Get("Location"), "", f.ops(), elsewhere).is(t, 204, "")
	everybody := create(`{"cidr":"0.0.0.0/0","kind":"deny","force":true}`)
	everybody.is(t, 201, "")
	f.call(t, "GET", path, "", f.ops(), elsewhere).is(t, 403, codeAddressDenied)
	f.call(t, "DELETE", everybody.Header.Get("Location"), "", f.ops(), from("[2001:db8::1]:1")).is(t, 204, "")

	// Changes.
	a := f.call(t, "PATCH", one, `{"kind":"exempt","note":"partner","expires_at":null}`, f.ops())
	if a.is(t, 200, ""); a.get(t, "data", "kind") != "exempt" || a.get(t, "data", "note") != "partner" || a.get(t, "data", "expires_at") != nil {
		t.Errorf("changed: %s", a)
	}
	for _, body := range []string{`{"kind":"x"}`, `{"kind":null}`, `{"cidr":"10.0.0.0/8"}`, `{"expires_at":"2020-01-01T00:00:00Z"}`} {
		f.call(t, "PATCH", one, body, f.ops()).is(t, 422, codeValidationFailed)
	}
	if n := len(f.call(t, "GET", path+"?address=::ffff:203.0.113.7", "", f.ops()).get(t, "data").([]any)); n != 2 {
		t.Errorf("%d ranges have the address, want 2", n)
	}
	first := f.call(t, "GET", path+"?limit=1", "", f.ops())
	next := f.call(t, "GET", path+"?limit=1&cursor="+first.get(t, "meta", "next_cursor").(string), "", f.ops())
	if next.is(t, 200, ""); next.get(t, "meta", "has_more") != false {
		t.Errorf("second page of two: %s", next)
	}
	f.call(t, "GET", path+"?kind=allow", "", f.ops()).is(t, 400, codeInvalidParameter)
	f.call(t, "GET", path+"?address=x", "", f.ops()).is(t, 400, codeInvalidParameter)
	f.call(t, "DELETE", one, "", f.ops()).is(t, 204, "")
	f.call(t, "DELETE", one, "", f.ops()).is(t, 404, codeNotFound)
	f.call(t, "GET", one, "", f.ops()).is(t, 404, codeNotFound)
}

// A denied address gets nothing but the probes: no query, no body read, whatever it brings. An exempt one is not counted
// where addresses are counted, and everywhere else like everybody.
func TestAddressRangesInForce(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	rangeOf := func(cidr string, kind tenants.RangeKind) {
		t.Helper()
		must(f.Tenants.CreateAddressRange(t.Context(), testActor, tenants.NewAddressRange{Prefix: netip.MustParsePrefix(cidr), Kind: kind}, tenants.Caller{}))
	}
	rangeOf("203.0.113.0/24", tenants.RangeDeny)
	rangeOf("203.0.113.128/25", tenants.RangeExempt)
	rangeOf("2001:db8:bad::/48", tenants.RangeDeny)
	f.refresh(t)

	bad, good := from("203.0.113.7:1"), from("203.0.113.200:1")
	hook := `{"text":"hi"}`
	queries := f.queries.Count()
	for name, request := range map[string]func(o ...option) answer{
		"tenant API": func(o ...option) answer {
			return f.call(t, "GET", "/api/v1/conversations", "", append(o, f.apiKey())...)
		},
		"management": func(o ...option) answer {
			return f.call(t, "GET", managementPrefix+"/tenants", "", append(o, f.ops())...)
		},
		"webhook": func(o ...option) answer {
			return f.hook(t, "inbound", hook, append(o, signed(f.webhook.Secret, hook, time.Now()))...)
		},
		"nothing": func(o ...option) answer { return f.call(t, "GET", "/nothing", "", o...) },
		"metrics": func(o ...option) answer { return f.call(t, "GET", "/metrics", "", o...) },
		"a page":  func(o ...option) answer { return f.call(t, "GET", "/problems", "", o...) },
		"a preflight": func(o ...option) answer {
			return f.call(t, "OPTIONS", "/api/v1/conversations", "", append(o, header("Origin", "https://app.example"), header("Access-Control-Request-Method", "POST"))...)
		},
	} {
		a := request(bad)
		if a.StatusCode != 403 || a.get(t, "code") != string(codeAddressDenied) {
			t.Errorf("%s from a denied address: %s", name, a)
		}
	}
	body := &unreadable{t, "a denied address"}
	a := f.call(t, "POST", "/api/v1/conversations", "", f.apiKey(), from("[2001:db8:bad:7::1]:1"), func(r *http.Request) { r.Body, r.ContentLength = body, 1000 })
	if a.is(t, 403, codeAddressDenied); a.Header.Get("Connection") != "close" {
		t.Errorf("the connection goes on: %v", a.Header)
	}
	if n := f.queries.Count() - queries; n != 0 {
		t.Errorf("refusing denied addresses took %d queries", n)
	}
	for _, path := range []string{"/health/live", "/health/ready"} {
		f.call(t, "GET", path, "", bad).is(t, 200, "")
	}
	f.call(t, "GET", "/api/v1/conversations", "", f.apiKey(), good).is(t, 200, "")

	// unknown_caller and token_create count addresses.
	for range 40 {
		f.call(t, "GET", "/api/v1/conversations", "", header("X-Api-Key", inventedKey(f.key, 1)), good).is(t, 401, codeInvalidCredential)
	}
	legacy := fmt.Sprintf(`{"conversation_id":%q,"user_id":"u"}`, f.newConversation(t).ID)
	for range 15 {
		a := f.call(t, "POST", "/api/v1/tokens", legacy, header("X-Channel-Token", f.webhook.Secret.Reveal()), good)
		if a.is(t, 201, ""); a.Header.Get("Ratelimit") != "" {
			t.Errorf("a limit that is not counted is shown: %v", a.Header)
		}
	}
	// So does login_ip; the account is guarded all the same.
	guess := func(who string) answer {
		return f.post(t, "/portal/login", url.Values{"tenant": {f.tenant.Name}, "email": {who}, "password": {"guess"}}, good)
	}
	for i := range 15 {
		guess(fmt.Sprintf("%d@acme.example", i)).is(t, 401, "")
	}
	for range 5 {
		guess("ada@acme.example").is(t, 401, "")
	}
	guess("ada@acme.example").is(t, 429, "")
	limitOverride(t, f, `{"limit":0,"scale_ms":1000}`, "api_read")
	f.call(t, "GET", "/api/v1/conversations", "", f.apiKey(), good).is(t, 429, codeRateLimited)
}
