package http

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/delivery"
	"converger/internal/tenants"
)

// badBodies are what every route that reads JSON must refuse with words, and never with a 5xx.
func badBodies() map[string]string {
	deep := strings.Repeat(`{"a":`, 40) + "1" + strings.Repeat("}", 40)
	return map[string]string{
		"not JSON": `{"text"`, "an array": `[]`, "a string": `"hi"`, "a number": `7`, "null": `null`, "two values": `{}{}`, "trailing text": `{} x`,
		"bad UTF-8": "{\"text\":\"\xff\"}", "raw NUL": "{\"text\":\"a\x00\"}", "escaped NUL": `{"text":"a\u0000b"}`, "escaped NUL in a name": `{"a\u0000":1}`,
		"repeated member": `{"text":"a","text":"b"}`, "repeated member by escape": `{"text":"a","te\u0078t":"b"}`,
		"repeated member inside": `{"metadata":{"a":1,"a":2}}`, "too deep": deep, "too deep array": `{"metadata":` + strings.Repeat("[", 5000) + strings.Repeat("]", 5000) + "}",
		"control character": "{\"text\":\"a\nb\"}", "single quotes": `{'text':'a'}`, "comment": `{/**/}`, "trailing comma": `{"a":1,}`,
		"blank": "   ", "BOM": "\uFEFF{}", "NaN": `{"text":NaN}`,
	}
}

// wrongMembers are objects whose members have every wrong type and size: each value for all members at once, and the
// values that are wrong in the most ways for one member at a time.
func wrongMembers(names ...string) []string {
	single := []string{`[{}]`, `"x"`, `1e400`, `"` + strings.Repeat("x", 3000) + `"`}
	all := append([]string{`1`, `{}`, `"\ud800"`, `true`, `[]`, `""`, `null`, `-1e400`, `123456789012345678901234567890`, `0.1`, `-0`, `{"id":{"id":7}}`, `["a",1]`, `[[1]]`,
		`{"a":1e999}`}, single...)
	var out []string
	for _, v := range all {
		out = append(out, `{"`+strings.Join(names, `":`+v+`,"`)+`":`+v+`}`)
	}
	for _, n := range names {
		for _, v := range single {
			out = append(out, `{"`+n+`":`+v+`}`)
		}
	}
	return out
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	conversation := f.newConversation(t).ID.String()
	rule := must(f.Rules.Create(t.Context(), testActor, f.tenant.ID, delivery.NewRoutingRule{Name: "r", SourceChannelID: f.whatsapp.ID, TargetChannelIDs: []uuid.UUID{f.webhook.ID}}))
	user := must(f.Users.Create(t.Context(), testActor, auth.TenantRealm(f.tenant.ID), auth.NewUser{Email: "ada@acme.example", Role: auth.RoleOwner}))
	denied := must(f.Tenants.CreateAddressRange(t.Context(), testActor, tenants.NewAddressRange{
		Prefix: netip.MustParsePrefix("198.51.100.0/24"), Kind: tenants.RangeDeny}, tenants.Caller{}))
	token := bearer(f.newToken(t, auth.Claims{UserID: "u"}))
	for _, bucket := range []string{"activity_create", "inbound", "token_generate", "api_read"} {
		limitOverride(t, f, `{"limit":1000000,"scale_ms":1000}`, bucket)
	}
	ids := strings.NewReplacer("{conversation_id}", conversation, "{tenant_id}", f.tenant.ID.String(), "{channel_id}", f.webhook.ID.String(),
		"{bucket}", "upload", "{secret}", "x", "{rule_id}", rule.ID.String(), "{key_id}", "01930000-0000-7000-8000-00000000dead", "{token_id}", "01930000-0000-7000-8000-00000000dead", "{range_id}", denied.ID.String(), "{user_id}", user.ID.String(), "{session_id}", user.ID.String())
	members := []string{"channel_id", "external_id", "display_name", "metadata", "type", "sender", "text", "attachments", "reply_to_id", "replyToId",
		"channelData", "from", "user", "scope", "name", "scopes", "expires_at", "overlap_seconds", "secret", "limit", "scale_ms", "algorithm", "burst",
		"mode", "status", "user_id", "config", "require_signature", "ordered", "rate_limit", "retry_policy", "max_in_flight", "idempotency_key", "conversation_id",
		"delivery_id", "provider_message_id", "timestamp", "routing_rule", "cidr", "kind", "note", "force", "email", "role", "password", "must_change_password"}
	ruleMembers := []string{"name", "source_channel_id", "target_channel_ids", "enabled"}

	for _, rt := range f.routes {
		if rt.body == bodyNone || rt.body == bodyFields { // forms: TestBadForms
			continue
		}
		path := ids.Replace(rt.pattern)
		send := func(what, body string, options ...option) {
			if rt.bucket.String() == "management" {
				options = append(options, bearer(f.operatorOf(t)))
			}
			switch rt.auth {
			case credentialKey, credentialKeyOrSecret:
				options = append(options, f.apiKey())
			case credentialToken:
				options = append(options, token)
			case credentialLegacy:
				options = append(options, header("X-Channel-Token", f.webhook.Secret.Reveal()), from(fmt.Sprintf("[2001:db8:1:%x::1]:1", f.addresses.Add(1))))
			case credentialSecret:
				options = append(options, bearer(f.webhook.Secret.Reveal()))
			case credentialSignature:
				options = append(options, signed(f.webhook.Secret, body, time.Now()))
			}
			a := f.call(t, rt.method, path, body, options...)
			if a.StatusCode >= 500 {
				t.Errorf("%s %s, %s: %s", rt.method, rt.pattern, what, a)
			}
			if a.StatusCode >= 400 {
				if a.Header.Get("Content-Type") != typeProblem || a.get(t, "detail") == "" {
					t.Errorf("%s %s, %s: no problem that says what to do: %s", rt.method, rt.pattern, what, a)
				}
			} else if rt.body != bodyRaw && what != "" && !strings.HasPrefix(what, "member") {
				t.Errorf("%s %s took a body that is %s: %s", rt.method, rt.pattern, what, a)
			}
		}
		for what, body := range badBodies() {
			if rt.body == bodyOptional && what == "blank" {
				continue
			}
			send(what, body)
		}
		send("too long", `{"text":"`+strings.Repeat("x", int(rt.maxBody))+`"}`)
		for _, body := range wrongMembers(members...) {
			send("member "+body[:min(len(body), 60)], body)
		}
		if strings.Contains(rt.pattern, "/routing_rules") {
			for _, body := range wrongMembers(ruleMembers...) {
				what := "member " + body[:min(len(body), 60)]
				if rt.auth != credentialOperator {
					body = `{"routing_rule":` + body + `}`
				}
				send(what, body)
			}
		}
		if rt.body == bodyRaw {
			continue
		}
		for _, kind := range []string{"text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "application/xml", "nonsense;;", ""} {
			send("content type "+kind, `{}`, header("Content-Type", kind))
		}
		for _, encoding := range []string{"gzip", "br", "deflate", "gzip, gzip"} {
			send("content encoding "+encoding, `{}`, header("Content-Encoding", encoding))
		}
	}
}

// operatorOf makes a new operator token now and then: each has a budget of a hundred a second.
func (f *front) operatorOf(t testing.TB) string {
	t.Helper()
	if f.sent++; f.sent%90 == 0 {
		_, text, err := f.Tenants.CreateOperatorToken(t.Context(), testActor, tenants.NewOperatorToken{Name: "ops", Scopes: []string{"read", "write"}})
		if err != nil {
			t.Fatal(err)
		}
		f.refresh(t)
		f.operator = text.Reveal()
	}
	return f.operator
}

func TestBadQueriesAndHeaders(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t).ID.String()
	tests := map[string]struct {
		path   string
		status int
		code   code
	}{
		"cursor":                   {"/api/v1/conversations?cursor=abc", 400, codeInvalidCursor},
		"cursor of nothing":        {"/api/v1/deliveries?cursor=%00", 400, codeInvalidParameter},
		"status":                   {"/api/v1/conversations?status=open", 400, codeInvalidParameter},
		"delivery status":          {"/api/v1/deliveries?status=lost", 400, codeInvalidParameter},
		"channel":                  {"/api/v1/deliveries?channel_id=1", 400, codeInvalidParameter},
		"urn is not how we say it": {"/api/v1/deliveries?channel_id=urn:uuid:01930000-0000-7000-8000-00000000dead", 400, codeInvalidParameter},
		"from":                     {"/api/v1/deliveries?from=yesterday", 400, codeInvalidParameter},
		"to":                       {"/api/v1/deliveries?to=2026-13-01", 400, codeInvalidParameter},
		"watermark":                {"/api/v1/conversations/" + v + "/activities?watermark=xyz", 400, codeInvalidWatermark},
		"bad escape":               {"/api/v1/conversations?external_id=%zz", 400, codeInvalidParameter},
		"bad UTF-8":                {"/api/v1/conversations?external_id=%ff", 400, codeInvalidParameter},
		"NUL":                      {"/api/v1/conversations?external_id=a%00b", 400, codeInvalidParameter},
		"limit too large":          {"/api/v1/conversations?limit=100000", 200, ""},
		"limit nonsense":           {"/api/v1/conversations?limit=-5", 200, ""},
		"id with braces":           {"/api/v1/conversations/{" + v + "}", 400, codeMalformedID},
		"id with NUL":              {"/api/v1/conversations/%00", 400, codeMalformedID},
		"delivery id":              {"/api/v1/deliveries/7", 400, codeMalformedID},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f.call(t, "GET", tt.path, "", f.apiKey()).is(t, tt.status, tt.code)
		})
	}
	for name, key := range map[string]string{"empty": "", "quoted empty": `""`, "too long": strings.Repeat("k", 256), "open quote": `"abc`, "control": "a\x01b", "not ASCII": "schlüssel", "two values": `"a", "b"`} {
		a := f.call(t, "POST", "/api/v1/conversations/"+v+"/activities", `{"text":"x"}`, f.apiKey(), header("Idempotency-Key", key))
		if a.StatusCode != 400 || a.get(t, "code") != string(codeInvalidIdempotency) {
			t.Errorf("idempotency key %s: %s", name, a)
		}
	}
}

// Parameters that a route does not have, and those given twice, are one thing over all routes for operators: refused. The other APIs
// ignore them, as the original did.
func TestUnknownParameters(t *testing.T) {
	t.Parallel()
	f := newFront(t, unlimited)
	v := f.newConversation(t)
	token := f.newToken(t, auth.Claims{UserID: "u", ConversationID: v.ID})
	ids := strings.NewReplacer("{conversation_id}", v.ID.String(), "{tenant_id}", f.tenant.ID.String(), "{channel_id}", f.webhook.ID.String(), "{bucket}", "upload")
	tried := 0
	for _, rt := range f.routes {
		path := ids.Replace(rt.pattern)
		for strings.Contains(path, "{") {
			begin, end := strings.Index(path, "{"), strings.Index(path, "}")
			path = path[:begin] + uuid.NewString() + path[end+1:]
		}
		switch rt.auth {
		case credentialOperator:
			before := f.changesByOperators(t)
			for _, query := range []string{"colour=red", "=1", "Limit=1", "limit%5B%5D=1", "cursor=&colour", "limit=1&limit=2", "force=true&force=true", "%zz", "limit=1;colour=1"} {
				a := f.call(t, rt.method, path+"?"+query, "{}", bearer(f.operatorOf(t)))
				a.is(t, 400, codeInvalidParameter)
				if detail := a.get(t, "detail").(string); !strings.Contains(detail, "Invalid ") && !strings.Contains(detail, "malformed") {
					t.Errorf("%s %s?%s: %s", rt.method, rt.pattern, query, detail)
				}
				tried++
			}
			if n := f.changesByOperators(t); n != before {
				t.Errorf("%s %s: refused requests changed something", rt.method, rt.pattern)
			}
		case credentialKey, credentialKeyOrSecret, credentialToken:
			if rt.method != "GET" {
				continue
			}
			with := []option{f.apiKey()}
			if rt.auth == credentialToken {
				with = []option{bearer(token)}
			}
			want := f.call(t, rt.method, path, "", with...).StatusCode
			if got := f.call(t, rt.method, path+"?colour=red&limit=1&limit=2", "", with...).StatusCode; got != want || got == 400 {
				t.Errorf("%s %s with parameters that it does not have: %d, without %d", rt.method, rt.pattern, got, want)
			}
			tried++
		}
	}
	if tried < 300 {
		t.Errorf("only %d cases: the table is not what the test thinks", tried)
	}
}

func TestIdempotencyKeyForms(t *testing.T) {
	t.Parallel()
	for value, want := range map[string]string{`abc`: "abc", `"abc"`: "abc", `"a\"b\\c"`: `a"b\c`, strings.Repeat("k", 255): strings.Repeat("k", 255), `a"b`: `a"b`} {
		for _, blank := range []string{"", " ", "\t"} {
			if got, ok := unquoteKey(blank + value + blank); !ok || got != want {
				t.Errorf("unquoteKey(%q) = %q, %v; want %q", blank+value, got, ok, want)
			}
		}
	}
}

func FuzzUnquoteKey(f *testing.F) {
	for _, s := range []string{"", `"`, `"a"`, `"a\`, `"a\"`, "é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if key, ok := unquoteKey(s); ok && (key == "" || len(key) > maxIdempotencyKey) {
			t.Errorf("unquoteKey(%q) = %q", s, key)
		}
	})
}

// What parseObject takes, encoding/json reads to the same members; what it refuses it refuses with words.
func FuzzParseObject(f *testing.F) {
	for _, b := range badBodies() {
		f.Add([]byte(b))
	}
	f.Add([]byte(`{"a":{"b":[1,2,{"c":null}]},"d":"\ud83d\ude0a"}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		members, err := parseObject(body)
		if err != nil {
			if p, _ := problemOf(err); p.code != codeMalformedBody || p.detail == "" {
				t.Errorf("parseObject(%q): %v", body, err)
			}
			return
		}
		f := newFields(members)
		for name := range members {
			f.str(name)
			f.optInt(name)
			f.id(name)
			f.sub(name).strs("a")
		}
		if err := f.err(); err != nil {
			if p, _ := problemOf(err); p.code != codeValidationFailed {
				t.Errorf("fields of %q: %v", body, err)
			}
		}
	})
}
