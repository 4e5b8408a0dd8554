package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"go.uber.org/goleak"

	"converger/internal/devpg"
	"converger/internal/postgres"
	"converger/migrations"
	"converger/migrations/pgtest"
)

func TestServeRefusesAnOldSchema(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	p := start(t, serveEnv(url, nil), "serve")
	err := p.result(t)
	if !errors.Is(err, migrations.ErrPending) || !strings.Contains(err.Error(), "server migrate up") {
		t.Errorf("serve on an empty database: %v", err)
	}
	if n := len(snapshot(t, pgtest.Open(t, url, postgres.Options{MaxConns: 1}))); n != 0 {
		t.Errorf("serve made %d tables", n)
	}
	status := start(t, nil, "migrate", "status", "--database-url", url)
	if err := status.result(t); !errors.Is(err, migrations.ErrPending) || !strings.Contains(err.Error(), "server migrate up") || strings.Contains(err.Error(), "0001_init") {
		t.Errorf("status of an empty database: %v", err)
	}
	for _, missing := range []string{"missing  0001_init\n", "missing  job queue: "} {
		if !strings.Contains(status.out.String(), missing) {
			t.Errorf("status of an empty database does not say %q:\n%s", missing, status.out)
		}
	}
}

// Four nodes of a rolling update may all migrate first.
func TestMigrateByFourAtOnce(t *testing.T) {
	t.Parallel()
	url := pgtest.Empty(t)
	nodes := make([]*program, 4)
	for i := range nodes {
		nodes[i] = start(t, map[string]string{"DATABASE_URL": url}, "migrate", "up")
	}
	applied := 0
	for i, p := range nodes {
		if err := p.result(t); err != nil {
			t.Errorf("node %d: %v", i, err)
		}
		applied += strings.Count(p.out.String(), "applied 0001_init")
	}
	if applied != 1 {
		t.Errorf("the first migration was applied %d times", applied)
	}
	if out := runOK(t, map[string]string{"DATABASE_URL": url}, "migrate", "status"); !strings.Contains(out, "applied  0001_init") || strings.Contains(out, "missing  ") {
		t.Errorf("status: %s", out)
	}
	serve(t, url, nil)
}

// Operators' tokens are made, listed without their text, and revoked by the command line; a running hub follows.
func TestOperatorTokens(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, nil)
	token := strings.TrimSpace(runOK(t, nil, "operator", "create", "Ada", "--scope", "read", "--database-url", url))
	ops := newAPI(t, p.base, "Authorization", "Bearer "+token)
	eventually(t, patience, "the token to be known", func() bool {
		a, err := ops.try(t.Context(), "GET", "/api/v1/management/tenants", "")
		return err == nil && a.status == http.StatusOK
	})
	ops.call(t, 403, "POST", "/api/v1/management/tenants", `{"name":"x"}`)
	list := runOK(t, nil, "operator", "list", "--database-url", url)
	if !strings.Contains(list, "Ada") || strings.Contains(list, token) {
		t.Errorf("list:\n%s", list)
	}
	id := strings.Fields(strings.Split(list, "\n")[1])[0]
	runOK(t, nil, "operator", "revoke", id, "--database-url", url)
	eventually(t, withinASecond, "the token to be refused", func() bool {
		a, err := ops.try(t.Context(), "GET", "/api/v1/management/tenants", "")
		return err == nil && a.status == http.StatusUnauthorized
	})
}

// stopOrder is the order in which a node ends its parts: each stands on those after it.
var stopOrder = []string{"http", "jobs", "deliveries", "uploads", "activities", "refusals", "usage", "directory"}

// A node that is asked to stop under load answers what it has begun, delivers what it has in hand, and leaves nothing
// running. Not parallel: it counts goroutines.
func TestStopUnderLoad(t *testing.T) {
	url := pgtest.New(t)
	before := goleak.IgnoreCurrent()
	own := newEndpoint(t)
	p := serve(t, url, map[string]string{"RATE_LIMIT_ENABLED": "false", "DRAIN_DELAY_MS": "300"})
	c := newCustomer(t, management(t, p, url), "Tenant")
	hook := c.newChannel(t, "webhook", "outbound", map[string]any{"url": own.url}).ID
	l := startLoad(t, c, []string{c.newConversation(t, hook), c.newConversation(t, hook), c.newConversation(t, hook)}, 8)
	l.awaitMore(t, 100)

	p.cancel()
	if _, err := p.log.await(`"msg":"draining"`, p.ended); err != nil {
		t.Fatal(err)
	}
	if a, err := c.api.try(t.Context(), "GET", "/health/ready", ""); err != nil || a.status != 503 || !strings.Contains(string(a.body), "draining") {
		t.Errorf("readiness while draining: %v %s", err, a)
	}
	if a, err := c.api.try(t.Context(), "GET", "/api/v1/conversations", ""); err != nil || a.status != 200 {
		t.Errorf("a call while draining: %v %s", err, a)
	}
	if err := p.stop(t); err != nil {
		t.Errorf("stopping: %v", err)
	}
	l.stop()
	l.api.client.CloseIdleConnections()

	var order []string
	for line := range strings.Lines(p.log.String()) {
		var entry struct {
			Level, Msg, Service string
			TookMS              *float64 `json:"took_ms"`
		}
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Errorf("the log is not JSON: %s", line)
		}
		if entry.Msg == "stopped" {
			order = append(order, entry.Service)
			if entry.TookMS == nil {
				t.Errorf("a step without its time: %s", line)
			}
		}
		if entry.Level == "ERROR" {
			t.Errorf("log: %s", line)
		}
	}
	if diff := cmp.Diff(stopOrder, order); diff != "" {
		t.Errorf("order of the stop:\n%s", diff)
	}
	addr := strings.TrimPrefix(p.base, "http://")
	if listener, err := net.Listen("tcp", addr); err != nil { //nolint:noctx // at once
		t.Errorf("the address is still taken: %v", err)
	} else {
		_ = listener.Close()
	}
	own.disconnect() // the far end of connections that the hub keeps for the next delivery
	goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction("net/http/httptest.(*Server).goServe.func1"))

	next := serve(t, url, noLimits)
	c.api.base.Store(&next.base)
	stored := l.verify(t)
	total := 0
	for _, all := range stored {
		total += len(all)
	}
	if total != l.count() {
		t.Errorf("%d stored, %d acknowledged: a stop must answer what it stores", total, l.count())
	}
	if n := own.delivered(t, stored, patience); n > 0 {
		t.Errorf("%d deliveries came twice", n)
	}
}

// Parallel posts with one key are one activity, each answered with it; parallel posts without are numbered without a gap.
func TestParallelPosts(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, noLimits)
	c := newCustomer(t, management(t, p, url), "Tenant")
	chat := c.newConversation(t, c.newChannel(t, "webhook", "inbound", nil).ID)
	path := "/api/v1/conversations/" + chat + "/activities"

	const n = 200
	answers := parallel(t, n, n, func(ctx context.Context, _ int) (answer, error) {
		return c.api.try(ctx, "POST", path, `{"text":"once"}`, "Idempotency-Key", "the key")
	})
	originals := 0
	ids := map[string]bool{}
	for _, a := range answers {
		if a.status != 201 {
			t.Fatalf("answer: %s", a)
		}
		ids[data[message](t, a).ID] = true
		if a.header.Get("Idempotent-Replayed") == "" {
			originals++
		}
	}
	if len(ids) != 1 || originals != 1 {
		t.Errorf("%d ids and %d originals for one key", len(ids), originals)
	}
	c.api.call(t, 422, "POST", path, `{"text":"another"}`, "Idempotency-Key", "the key")

	answers = parallel(t, n, n, func(ctx context.Context, i int) (answer, error) {
		return c.api.try(ctx, "POST", path, object(map[string]any{"text": fmt.Sprint(i)}))
	})
	seqs := map[int64]bool{}
	for _, a := range answers {
		if a.status != 201 {
			t.Fatalf("answer: %s", a)
		}
		seqs[data[message](t, a).Seq] = true
	}
	all := c.activities(t, chat)
	gapless(t, all)
	if len(all) != n+1 || len(seqs) != n {
		t.Errorf("%d stored and %d numbers answered, want %d and %d", len(all), len(seqs), n+1, n)
	}
}

// With four connections, eight callers of any writing endpoint all get their answers: nobody holds a connection while
// asking for a second, and no transaction waits for anything but the database.
func TestSmallPool(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, map[string]string{"RATE_LIMIT_ENABLED": "false", "POOL_SIZE": "4", "BCRYPT_COST": "10"})
	ops := management(t, p, url)
	c := newCustomer(t, ops, "Tenant")
	own := newEndpoint(t)
	hook := c.newChannel(t, "webhook", "duplex", map[string]any{"url": own.url})
	c.newChannel(t, "echo", "outbound", nil)
	unsigned := data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/channels",
		`{"name":"unsigned","type":"webhook","mode":"inbound","require_signature":false}`))
	meta := c.newChannel(t, "whatsapp_meta", "inbound", map[string]any{"phone_number_id": "1", "app_secret": "the app's secret", "verify_token": "handshake"})
	infobip := c.newChannel(t, "whatsapp_infobip", "inbound", map[string]any{"sender": "1"})
	secretPath := infobip.CallbackURL[strings.LastIndex(infobip.CallbackURL, "/"):]
	chat := c.newConversation(t, hook.ID)
	secret := c.api.with("Authorization", "Bearer "+hook.Secret)
	var token struct{ Token string }
	if err := json.Unmarshal(secret.call(t, 200, "POST", "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"},"scope":"channel"}`).body, &token); err != nil {
		t.Fatal(err)
	}
	ada := c.api.with("Authorization", "Bearer "+token.Token)
	var own0 struct{ ConversationID string }
	if err := json.Unmarshal(ada.call(t, 201, "POST", "/api/v1/converger/conversations", "").body, &own0); err != nil {
		t.Fatal(err)
	}
	broken := `{"object":"whatsapp_business_account","entry":`
	c.api.with("X-Hub-Signature-256", metaSignature(broken, "the app's secret")).call(t, 200, "POST", "/api/v1/channels/"+meta.ID+"/inbound", broken)
	var failed []wire
	eventually(t, patience, "a failed event", func() bool {
		failed = data[[]wire](t, ops.call(t, 200, "GET", "/api/v1/management/inbound_events?state=failed", ""))
		return len(failed) == 1
	})
	// Failed deliveries for the tenant and for operators to try again, each of a channel of its own.
	newDead := func(name string) (channel, delivery string) {
		channel = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/channels",
			fmt.Sprintf(`{"name":%q,"type":"webhook","mode":"outbound","config":{"url":"http://127.0.0.1:1/"},"retry_policy":{"max_attempts":1}}`, name))).ID
		c.api.call(t, 201, "POST", "/api/v1/conversations/"+c.newConversation(t, channel)+"/activities", `{"text":"in vain"}`)
		eventually(t, patience, "a failed delivery", func() bool {
			failed := data[[]wire](t, c.api.call(t, 200, "GET", "/api/v1/deliveries?status=failed&channel_id="+channel, ""))
			if len(failed) == 1 {
				delivery = failed[0].ID
			}
			return delivery != ""
		})
		return channel, delivery
	}
	dead, undelivered := newDead("dead")
	opsDead, opsUndelivered := newDead("dead too")
	victims := make([]struct{ channel, key, rule, opsRule, token, addressRange, admin, user string }, 8)
	ruleTo := fmt.Sprintf(`"source_channel_id":%q,"target_channel_ids":[%q]`, meta.ID, hook.ID)
	for i := range victims {
		victims[i].channel = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/channels", fmt.Sprintf(`{"name":"victim %d","type":"echo","mode":"outbound"}`, i))).ID
		victims[i].key = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/keys", fmt.Sprintf(`{"name":"victim %d"}`, i))).ID
		victims[i].rule = data[wire](t, c.api.call(t, 201, "POST", "/api/v1/routing_rules", fmt.Sprintf(`{"routing_rule":{"name":"victim %d",%s}}`, i, ruleTo))).ID
		victims[i].opsRule = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/routing_rules", fmt.Sprintf(`{"name":"victim too %d",%s}`, i, ruleTo))).ID
		victims[i].token = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/operator_tokens", fmt.Sprintf(`{"name":"victim %d"}`, i))).ID
		victims[i].addressRange = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/address_ranges", fmt.Sprintf(`{"cidr":"198.51.100.%d","kind":"deny"}`, i))).ID
		victims[i].admin = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/admin_users", fmt.Sprintf(`{"email":"victim%d@example.com","role":"viewer"}`, i))).ID
		victims[i].user = data[wire](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/users", fmt.Sprintf(`{"email":"victim%d@example.com","role":"viewer"}`, i))).ID
	}
	admins := newStaff(t, ops, "Tenant", "/admin", "admin_users", "super_admin")
	staff := newStaff(t, ops, "Tenant", "/portal", "tenants/"+c.id+"/users", "owner")

	stopWatch := watchIdleTransactions(t, url, time.Second)
	const conversations, client, channels, mgmt = "/api/v1/conversations", "/api/v1/converger", "/api/v1/channels/", "/api/v1/management"
	const rules = "/api/v1/routing_rules"
	tenant := mgmt + "/tenants/" + c.id
	steady := func(by *api, path, body string) func(int) (*api, string, string) {
		return func(int) (*api, string, string) { return by, path, body }
	}
	numbered := func(by *api, path, format string) func(int) (*api, string, string) {
		return func(i int) (*api, string, string) { return by, path, fmt.Sprintf(format, i) }
	}
	calls := map[string]func(i int) (by *api, path, body string){
		"POST /api/v1/conversations":                                        steady(c.api, conversations, fmt.Sprintf(`{"channel_id":%q,"external_id":"bob"}`, hook.ID)),
		"POST /api/v1/conversations/{conversation_id}/close":                steady(c.api, conversations+"/"+chat+"/close", ""),
		"POST /api/v1/conversations/{conversation_id}/reopen":               steady(c.api, conversations+"/"+chat+"/reopen", ""),
		"POST /api/v1/conversations/{conversation_id}/activities":           numbered(c.api, conversations+"/"+chat+"/activities", `{"text":"%d"}`),
		"POST /api/v1/deliveries/{delivery_id}/retry":                       steady(c.api, "/api/v1/deliveries/"+undelivered+"/retry", ""),
		"POST /api/v1/channels/{channel_id}/deliveries/retry":               steady(c.api, channels+dead+"/deliveries/retry", ""),
		"POST /api/v1/channels/{channel_id}/pause":                          steady(c.api, channels+dead+"/pause", ""),
		"POST /api/v1/channels/{channel_id}/resume":                         steady(c.api, channels+dead+"/resume", ""),
		"POST /api/v1/converger/tokens/generate":                            steady(secret, client+"/tokens/generate", ""),
		"POST /api/v1/converger/tokens/refresh":                             steady(ada, client+"/tokens/refresh", ""),
		"POST /api/v1/tokens":                                               steady(c.api.with("X-Channel-Token", hook.Secret), "/api/v1/tokens", fmt.Sprintf(`{"conversation_id":%q,"user_id":"ada"}`, chat)),
		"POST /api/v1/converger/conversations":                              steady(ada, client+"/conversations", ""),
		"POST /api/v1/converger/conversations/{conversation_id}/close":      steady(ada, client+"/conversations/"+own0.ConversationID+"/close", ""),
		"POST /api/v1/converger/conversations/{conversation_id}/reopen":     steady(ada, client+"/conversations/"+own0.ConversationID+"/reopen", ""),
		"POST /api/v1/converger/conversations/{conversation_id}/activities": numbered(ada, client+"/conversations/"+own0.ConversationID+"/activities", `{"type":"message","text":"%d"}`),
		"POST /api/v1/converger/conversations/{conversation_id}/upload": numbered(c.api.with("Authorization", "Bearer "+token.Token, "Content-Type", "multipart/form-data; boundary=b"),
			client+"/conversations/"+own0.ConversationID+"/upload", "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"%d.txt\"\r\n\r\ntext\r\n--b--\r\n"),
		"PUT /api/v1/management/tenants/{tenant_id}/upload_types":                      steady(ops, tenant+"/upload_types", `{"types":["image/png"]}`),
		"POST /api/v1/channels/{channel_id}/inbound":                                   numbered(c.api.with(), channels+unsigned.ID+"/inbound", `{"text":"%d","external_id":"eve"}`),
		"POST /api/v1/channels/{channel_id}/status":                                    steady(c.api.with(), channels+unsigned.ID+"/status", `{"status":"delivered","provider_message_id":"unknown"}`),
		"POST /api/v1/channels/{channel_id}/inbound/{secret}":                          numbered(c.api.with(), channels+infobip.ID+"/inbound"+secretPath, `{"results":[{"messageId":"m%d","from":"2","to":"1","message":{"type":"TEXT","text":"hi"}}]}`),
		"POST /api/v1/channels/{channel_id}/status/{secret}":                           steady(c.api.with(), channels+infobip.ID+"/status"+secretPath, `{"results":[{"messageId":"unknown","seenAt":"2026-11-30T05:31:02.123+0000"}]}`),
		"POST /api/v1/management/tenants":                                              numbered(ops, mgmt+"/tenants", `{"name":"tenant %d"}`),
		"POST /api/v1/management/tenants/{tenant_id}/keys":                             numbered(ops, tenant+"/keys", `{"name":"key %d"}`),
		"PUT /api/v1/management/tenants/{tenant_id}/limits/{bucket}":                   steady(ops, tenant+"/limits/inbound", `{"limit":9,"scale_ms":1000}`),
		"DELETE /api/v1/management/tenants/{tenant_id}/limits/{bucket}":                steady(ops, tenant+"/limits/inbound", ""),
		"POST /api/v1/management/tenants/{tenant_id}/limits/preview":                   steady(ops, tenant+"/limits/preview", `{"upload":{"limit":9,"scale_ms":1000}}`),
		"DELETE /api/v1/management/rate_limits/usage":                                  steady(ops, mgmt+"/rate_limits/usage?bucket=upload&subject="+c.id, ""),
		"POST /api/v1/management/tenants/{tenant_id}/channels":                         numbered(ops, tenant+"/channels", `{"name":"channel %d","type":"echo","mode":"outbound"}`),
		"PATCH /api/v1/management/channels/{channel_id}":                               numbered(ops, mgmt+"/channels/"+hook.ID, `{"max_in_flight":1%d}`),
		"POST /api/v1/management/channels/{channel_id}/secret":                         steady(ops, mgmt+"/channels/"+meta.ID+"/secret", ""),
		"POST /api/v1/management/tenants/{tenant_id}/suspend":                          steady(ops, tenant+"/suspend", ""),
		"POST /api/v1/management/tenants/{tenant_id}/activate":                         steady(ops, tenant+"/activate", ""),
		"POST /api/v1/management/tenants/{tenant_id}/inbound_events/{event_id}/replay": steady(ops, tenant+"/inbound_events/"+failed[0].ID+"/replay", ""),
		"POST /api/v1/routing_rules":                                                   numbered(c.api, rules, `{"routing_rule":{"name":"rule %d",`+ruleTo+`}}`),
		"PATCH /api/v1/routing_rules/{rule_id}":                                        numbered(c.api, rules+"/"+victims[0].rule, `{"routing_rule":{"name":"patched %d"}}`),
		"PUT /api/v1/routing_rules/{rule_id}":                                          numbered(c.api, rules+"/"+victims[0].rule, `{"routing_rule":{"name":"put %d"}}`),
		"POST /api/v1/management/tenants/{tenant_id}/routing_rules":                    numbered(ops, tenant+"/routing_rules", `{"name":"operator's rule %d",`+ruleTo+`}`),
		"PATCH /api/v1/management/tenants/{tenant_id}/routing_rules/{rule_id}":         numbered(ops, tenant+"/routing_rules/"+victims[0].opsRule, `{"name":"patched by operator %d"}`),
		"DELETE /api/v1/management/tenants/{tenant_id}/routing_rules/{rule_id}": func(i int) (*api, string, string) {
			return ops, tenant + "/routing_rules/" + victims[i].opsRule, ""
		},
		"DELETE /api/v1/routing_rules/{rule_id}": func(i int) (*api, string, string) {
			return c.api, rules + "/" + victims[i].rule, ""
		},
		"POST /api/v1/management/tenants/{tenant_id}/keys/{key_id}/revoke": func(i int) (*api, string, string) {
			return ops, tenant + "/keys/" + victims[i].key + "/revoke", ""
		},
		"DELETE /api/v1/management/channels/{channel_id}": func(i int) (*api, string, string) {
			return ops, mgmt + "/channels/" + victims[i].channel, ""
		},
	}
	const adminLimit = "limit=9&scale_ms=1&unit=s&algorithm=fixed_window"
	adminTenant := "/admin/tenants/" + c.id
	for route, call := range map[string]func(i int) (by *api, path, body string){
		"POST /admin/tenants": func(i int) (*api, string, string) {
			return admins.sessions[sessionOpen][0], "/admin/tenants", fmt.Sprintf("id=%s&name=form+%d", uuid.NewString(), i)
		},
		"POST /admin/tenants/{tenant_id}/suspend":                                            steady(admins.sessions[sessionOpen][0], adminTenant+"/suspend", "x=1"),
		"POST /admin/tenants/{tenant_id}/activate":                                           steady(admins.sessions[sessionOpen][0], adminTenant+"/activate", "x=1"),
		"POST /admin/tenants/{tenant_id}/limits/{bucket}":                                    steady(admins.sessions[sessionOpen][0], adminTenant+"/limits/upload", adminLimit),
		"POST /admin/tenants/{tenant_id}/limits/{bucket}/remove":                             steady(admins.sessions[sessionOpen][0], adminTenant+"/limits/upload/remove", "was="+strings.ReplaceAll(`{"limit":9,"scale_ms":1000,"algorithm":"fixed_window"}`, `"`, "%22")),
		"POST /admin/rate_limits/reset":                                                      steady(admins.sessions[sessionOpen][0], "/admin/rate_limits/reset", "bucket=upload&subject="+c.id),
		"PATCH /api/v1/management/tenants/{tenant_id}":                                       numbered(ops, tenant, `{"max_in_flight":10%d}`),
		"POST /api/v1/management/tenants/{tenant_id}/conversations/{conversation_id}/close":  steady(ops, tenant+"/conversations/"+chat+"/close", ""),
		"POST /api/v1/management/tenants/{tenant_id}/conversations/{conversation_id}/reopen": steady(ops, tenant+"/conversations/"+chat+"/reopen", ""),
		"POST /api/v1/management/tenants/{tenant_id}/deliveries/{delivery_id}/retry":         steady(ops, tenant+"/deliveries/"+opsUndelivered+"/retry", ""),
		"POST /api/v1/management/channels/{channel_id}/deliveries/retry":                     steady(ops, mgmt+"/channels/"+opsDead+"/deliveries/retry", ""),
		"POST /api/v1/management/channels/{channel_id}/pause":                                steady(ops, mgmt+"/channels/"+opsDead+"/pause", ""),
		"POST /api/v1/management/channels/{channel_id}/resume":                               steady(ops, mgmt+"/channels/"+opsDead+"/resume", ""),
		"POST /api/v1/management/operator_tokens":                                            numbered(ops, mgmt+"/operator_tokens", `{"name":"token %d"}`),
		"POST /api/v1/management/address_ranges":                                             numbered(ops, mgmt+"/address_ranges", `{"cidr":"203.0.113.%d","kind":"deny"}`),
		"PATCH /api/v1/management/address_ranges/{range_id}":                                 numbered(ops, mgmt+"/address_ranges/"+victims[0].addressRange, `{"note":"%d"}`),
		"DELETE /api/v1/management/address_ranges/{range_id}": func(i int) (*api, string, string) {
			return ops, mgmt + "/address_ranges/" + victims[i].addressRange, ""
		},
		"POST /api/v1/management/operator_tokens/{token_id}/revoke": func(i int) (*api, string, string) {
			return ops, mgmt + "/operator_tokens/" + victims[i].token + "/revoke", ""
		},
		"DELETE /api/v1/management/admin_users/{user_id}": func(i int) (*api, string, string) {
			return ops, mgmt + "/admin_users/" + victims[i].admin, ""
		},
		"DELETE /api/v1/management/tenants/{tenant_id}/users/{user_id}": func(i int) (*api, string, string) {
			return ops, tenant + "/users/" + victims[i].user, ""
		},
	} {
		calls[route] = call
	}
	maps.Copy(calls, admins.calls(ops, "/admin", mgmt+"/admin_users", "/api/v1/management/admin_users"))
	maps.Copy(calls, staff.calls(ops, "/portal", tenant+"/users", "/api/v1/management/tenants/{tenant_id}/users"))

	for _, route := range writingRoutes(t) {
		call, ok := calls[route]
		if !ok {
			t.Errorf("%s writes and is not called here", route)
			continue
		}
		method, _, _ := strings.Cut(route, " ")
		accepted := 0
		for _, a := range parallel(t, 8, 8, func(ctx context.Context, i int) (answer, error) {
			by, path, body := call(i)
			return by.try(ctx, method, path, body)
		}) {
			// Passwords are hashed a few at a time, and whoever would wait too long for that is told to come back.
			busy := a.status == 503 && (strings.HasSuffix(route, "/password") || strings.HasSuffix(route, "/login")) && a.header.Get("Retry-After") != ""
			if a.status >= 500 && !busy || a.status == 404 || a.status == 401 {
				t.Errorf("%s: %s", route, a)
			}
			if a.status < 400 {
				accepted++
			}
		}
		if accepted == 0 {
			t.Errorf("%s: not one of 8 calls was accepted", route)
		}
	}
	stopWatch()
}

// staff are people who sign in to one area of the pages. They have no passwords, which would take their time to hash; but one has.
type staff struct {
	fields   string // of the form to sign in, for the one with a password
	ids      []string
	links    []string // paths of their sign-in links
	sessions [5][]*api
	ended    [5][]string // the sessions' ids
}

// What the sessions of staff are for: some calls end them, and some those of the whole person.
const (
	sessionOpen     = iota // of people 0 to 7
	sessionLogout          // of the same
	sessionOne             // of the same
	sessionPassword        // of people 8 to 15
	sessionAll             // of people 16 to 23
)

const (
	staffPassword = "correct horse battery staple"
	formType      = "application/x-www-form-urlencoded"
)

func newStaff(t *testing.T, ops *api, tenant, area, users, role string) staff {
	t.Helper()
	s := staff{fields: "tenant=" + url.QueryEscape(tenant) + "&email=password%40example.com&password=" + url.QueryEscape(staffPassword)}
	users = "/api/v1/management/" + users
	ops.call(t, 201, "POST", users, object(map[string]any{"email": "password@example.com", "role": role, "password": staffPassword}))
	link := func(id string) string {
		made := data[struct{ URL string }](t, ops.call(t, 201, "POST", users+"/"+id+"/sign_in_link", "")).URL
		_, token, _ := strings.Cut(made, "/link/")
		return area + "/link/" + token
	}
	for i := range 24 {
		s.ids = append(s.ids, data[wire](t, ops.call(t, 201, "POST", users, object(map[string]any{"email": fmt.Sprintf("person%d@example.com", i), "role": role}))).ID)
	}
	for n, first := range [...]int{sessionOpen: 0, sessionLogout: 0, sessionOne: 0, sessionPassword: 8, sessionAll: 16} {
		for i := range 8 {
			id := s.ids[first+i]
			for _, set := range ops.with().call(t, 303, "POST", link(id), "").header["Set-Cookie"] {
				if value, _, _ := strings.Cut(set, ";"); strings.Contains(value, "cvg_ses_") {
					s.sessions[n] = append(s.sessions[n], ops.with("Content-Type", formType, "Cookie", value))
				}
			}
			s.ended[n] = append(s.ended[n], data[[]wire](t, ops.call(t, 200, "GET", users+"/"+id+"/sessions", ""))[0].ID)
		}
	}
	for i := range 8 {
		s.links = append(s.links, link(s.ids[i]))
	}
	return s
}

// calls are those of the area's own routes, and of the management of its users at users, by the patterns of routes.
func (s staff) calls(ops *api, area, users, pattern string) map[string]func(i int) (by *api, path, body string) {
	own := func(session int, path, body string) func(int) (*api, string, string) {
		return func(i int) (*api, string, string) { return s.sessions[session][i], area + path, body }
	}
	managed := func(first int, path, body string) func(int) (*api, string, string) {
		return func(i int) (*api, string, string) { return ops, users + "/" + s.ids[first+i] + path, body }
	}
	secret := url.QueryEscape(staffPassword)
	return map[string]func(i int) (by *api, path, body string){
		"POST " + area + "/login": func(int) (*api, string, string) {
			return ops.with("Content-Type", formType), area + "/login", s.fields
		},
		"POST " + area + "/link/{token}": func(i int) (*api, string, string) { return ops.with(), s.links[i], "" },
		"POST " + area + "/logout":       own(sessionLogout, "/logout", ""),
		"POST " + area + "/sessions/end": own(sessionAll, "/sessions/end", ""),
		"POST " + area + "/password":     own(sessionPassword, "/password", "password="+secret+"&repeat="+secret),
		"POST " + area + "/sessions/{session_id}/end": func(i int) (*api, string, string) {
			return s.sessions[sessionOne][i], area + "/sessions/" + s.ended[sessionOne][i] + "/end", ""
		},
		"POST " + pattern: func(i int) (*api, string, string) {
			return ops, users, fmt.Sprintf(`{"email":"new%d@example.com","role":"viewer"}`, i)
		},
		"PATCH " + pattern + "/{user_id}":             managed(0, "", `{"name":"Ada"}`),
		"POST " + pattern + "/{user_id}/password":     managed(8, "/password", object(map[string]any{"password": staffPassword})),
		"POST " + pattern + "/{user_id}/sign_in_link": managed(0, "/sign_in_link", ""),
		"DELETE " + pattern + "/{user_id}/sessions":   managed(16, "/sessions", ""),
		"DELETE " + pattern + "/{user_id}/sessions/{session_id}": func(i int) (*api, string, string) {
			return ops, users + "/" + s.ids[i] + "/sessions/" + s.ended[sessionOpen][i], ""
		},
	}
}

// writingRoutes are the rows of the route table that change something, as "METHOD pattern", in its order. Suspending comes
// before activating, so that what follows is let in.
func writingRoutes(t *testing.T) []string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("..", "..", "internal", "http", "testdata", "routes.golden"))
	if err != nil {
		t.Fatal(err)
	}
	var routes []string
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] != "METHOD" && f[0] != "GET" {
			routes = append(routes, f[0]+" "+f[1])
		}
	}
	if len(routes) < 20 {
		t.Fatalf("only %d routes write: %v", len(routes), routes)
	}
	return routes
}

// watchIdleTransactions fails the test when a session of the database stays idle in a transaction for longer than most,
// until it is stopped.
func watchIdleTransactions(t *testing.T, url string, most time.Duration) (stop func()) {
	t.Helper()
	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 1, AppName: "watch"})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			var age time.Duration
			var query string
			err := pool.QueryRow(ctx, `SELECT coalesce(max(now() - state_change), '0'), coalesce(max(query), '') FROM pg_stat_activity
				WHERE datname = current_database() AND state LIKE 'idle in transaction%' AND now() - state_change > $1`, most).Scan(&age, &query)
			if ctx.Err() != nil {
				return
			}
			if err != nil || age > 0 {
				t.Errorf("a session is idle in a transaction for %s (%v): %s", age, err, query)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
		}
	})
	return func() { cancel(); wg.Wait() }
}

// A database that loses every session, or goes away and comes back, costs callers a 503 that says when to come again, and
// nothing else: refusals are answered meanwhile, and nobody has to restart the hub.
func TestDatabaseGoesAway(t *testing.T) {
	t.Parallel()
	config := devpg.Config{Dir: tempDir(t), BinDir: os.Getenv("PG_BIN"), VendoredDir: vendored, Fast: true}
	pg, err := devpg.Start(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Stop(context.Background()) })
	url := pg.URL()
	runOK(t, nil, "migrate", "up", "--database-url", url)
	p := serve(t, url, map[string]string{"RATE_LIMITS": `{"activity_create":"off","api_read":{"limit":3,"scale_ms":3600000,"algorithm":"token_bucket"},"management":"off"}`})
	ops := management(t, p, url)
	own := newEndpoint(t)
	c, greedy := newCustomer(t, ops, "Tenant"), newCustomer(t, ops, "Greedy")
	ops.call(t, 200, "PUT", "/api/v1/management/tenants/"+c.id+"/limits/api_read", `{"limit":1000000,"scale_ms":1000}`)
	hook := c.newChannel(t, "webhook", "outbound", map[string]any{"url": own.url}).ID
	l := startLoad(t, c, []string{c.newConversation(t, hook), c.newConversation(t, hook)}, 8)
	for range 3 {
		greedy.api.call(t, 200, "GET", "/api/v1/conversations", "")
	}

	for range 3 {
		l.awaitMore(t, 30)
		terminate(t, url)
	}
	l.awaitMore(t, 30)

	if err := pg.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	greedy.api.call(t, 429, "GET", "/api/v1/conversations", "")
	c.api.with("X-Api-Key", "cvg_live_nobody").call(t, 401, "GET", "/api/v1/conversations", "")
	c.api.with().call(t, 401, "GET", "/api/v1/management/tenants", "")
	c.api.call(t, 404, "GET", "/no/such/page", "")
	c.api.call(t, 200, "GET", "/health/live", "")
	eventually(t, patience, "readiness to say so", func() bool {
		a, err := c.api.try(t.Context(), "GET", "/health/ready", "")
		return err == nil && a.status == 503 && strings.Contains(string(a.body), "database unavailable")
	})
	for _, path := range []string{"/api/v1/conversations", "/api/v1/deliveries"} {
		if a := c.api.call(t, 503, "GET", path, ""); a.header.Get("Retry-After") == "" || !strings.Contains(string(a.body), `"code":"unavailable"`) {
			t.Errorf("GET %s without a database: %s", path, a)
		}
	}

	if pg, err = devpg.Start(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	if pg.URL() != url {
		t.Fatalf("the database came back at another address")
	}
	l.awaitMore(t, 30)
	eventually(t, patience, "readiness to come back", func() bool {
		a, err := c.api.try(t.Context(), "GET", "/health/ready", "")
		return err == nil && a.status == 200
	})
	stored := l.verify(t)
	if l.statuses[503] == 0 || l.statuses[0] > 0 {
		t.Errorf("answers while the database was away: %v, want some 503 and no broken connection (0)", l.statuses)
	}
	// What was being attempted when its session was lost is taken over after its lease.
	t.Logf("%d deliveries came twice", own.delivered(t, stored, leaseAndMore))
}

// leaseAndMore is how long a delivery of a dead worker may be away: its lease of 45 s, and the time to find and work it.
const leaseAndMore = 75 * time.Second

// vendored is where `make` lets npm install a server.
var vendored = filepath.Join("..", "..", ".cache", "pg")

// terminate ends all other sessions of the server.
func terminate(t *testing.T, url string) {
	t.Helper()
	pool, err := postgres.Open(t.Context(), url, postgres.Options{MaxConns: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(t.Context(), `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`); err != nil {
		t.Fatal(err)
	}
}

// A node that can't start says why, in words and without the password, and leaves nothing behind.
func TestServeSaysWhyItCannotStart(t *testing.T) {
	t.Parallel()
	taken, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // at once
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = taken.Close() })
	for name, test := range map[string]struct {
		changes map[string]string
		want    string
	}{
		"no database":       {map[string]string{"DATABASE_URL": "postgres://hub:hunter2secret@127.0.0.1:1/hub?sslmode=disable"}, "refused"},
		"no such host":      {map[string]string{"DATABASE_URL": "postgres://hub:hunter2secret@nowhere.invalid/hub?sslmode=disable"}, "nowhere.invalid"},
		"no URL":            {map[string]string{"DATABASE_URL": "postgres://hub:hunter2secret@h:port/hub"}, "DATABASE_URL: can't be read"},
		"password with /":   {map[string]string{"DATABASE_URL": "postgres://hub:hunter2secret/x@h/hub"}, "DATABASE_URL: can't be read"},
		"address taken":     {map[string]string{"LISTEN": taken.Addr().String()}, "address already in use"},
		"targets not a set": {map[string]string{"WEBHOOK_ALLOWED_TARGETS": "10.0.0.0/99"}, "WEBHOOK_ALLOWED_TARGETS"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := start(t, serveEnv("postgres://hub:hunter2secret@127.0.0.1:1/hub", test.changes), "serve")
			err := p.result(t)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("it ended with %v, want it to say %q", err, test.want)
			}
			if text := fmt.Sprint(err, p.out, p.log); strings.Contains(text, "hunter2secret") {
				t.Errorf("the password is told: %s", text)
			}
		})
	}
}

// Whoever can't wait for a stop that takes its time asks a second time.
func TestSecondSignalEndsAtOnce(t *testing.T) {
	t.Parallel()
	for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM} {
		p := spawn(t, serveEnv(pgtest.New(t), map[string]string{"UPLOAD_DIR": t.TempDir(), "DRAIN_DELAY_MS": "300000"}), "serve")
		if _, err := p.log.await("ready", p.ended); err != nil {
			t.Fatal(err)
		}
		if err := p.process.Signal(signal); err != nil {
			t.Fatal(err)
		}
		if _, err := p.log.await("draining", p.ended); err != nil {
			t.Fatal(err)
		}
		// The first of these may come before the program has let go of its signals.
		eventually(t, patience, "the end after a second signal", func() bool {
			_ = p.process.Signal(signal) // it may have ended
			select {
			case <-p.ended:
				return true
			default:
				return false
			}
		})
		exit, _ := errors.AsType[*exec.ExitError](p.err)
		if status, ok := exit.Sys().(syscall.WaitStatus); !ok || status.Signal() != signal {
			t.Errorf("after %v twice the program ended with %v", signal, p.err)
		}
	}
}
