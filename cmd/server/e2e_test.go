package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"converger/internal/auth"
	"converger/internal/devpg"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/migrations/pgtest"
)

// arrival is a delivery as an endpoint got it.
type arrival struct {
	delivery string // its id
	message  message
	seq      int64
	chat     string
	header   http.Header
	body     []byte
}

// endpoint is a receiver of deliveries.
type endpoint struct {
	url        string
	disconnect func() // closes all connections

	mu  sync.Mutex
	all []arrival
}

func newEndpoint(t testing.TB) *endpoint {
	e := &endpoint{}
	server := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return // the sender died while it sent
		}
		a := arrival{delivery: r.Header.Get("X-Converger-Delivery-Id"), header: r.Header, body: body}
		var m struct {
			message
			Conversation string `json:"conversation_id"`
		}
		if err := json.Unmarshal(body, &m); err != nil {
			t.Errorf("a delivery that is no JSON: %v: %s", err, body)
		}
		a.message, a.seq, a.chat = m.message, m.Seq, m.Conversation
		e.mu.Lock()
		e.all = append(e.all, a)
		e.mu.Unlock()
	}))
	t.Cleanup(server.Close)
	e.url, e.disconnect = server.URL, server.CloseClientConnections
	return e
}

func (e *endpoint) arrivals() []arrival {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.all)
}

// await waits for a delivery of the activity.
func (e *endpoint) await(t testing.TB, activity string) arrival {
	t.Helper()
	var found arrival
	eventually(t, patience, "a delivery of activity "+activity, func() bool {
		for _, a := range e.arrivals() {
			if a.message.ID == activity {
				found = a
				return true
			}
		}
		return false
	})
	return found
}

// tempDir is a folder with a short path, in which a socket fits; its name is one that a shell would split.
func tempDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "my hub *")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// startDev runs `server dev` on a folder until it has said what to paste.
func startDev(t testing.TB, dir string, args ...string) (*program, demo) {
	t.Helper()
	found, err := devpg.Find(os.Getenv("PG_BIN"), vendored)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, map[string]string{"PG_BIN": found[0].Dir}, append([]string{"dev", "--dir", dir}, args...)...)
	if _, err := p.out.await("sort | uniq -c", p.ended); err != nil {
		<-p.ended
		t.Fatalf("%v\n%v\n%s", err, p.err, p.log)
	}
	d, err := demoFlags{Dir: dir}.read()
	if err != nil {
		t.Fatal(err)
	}
	p.base = d.BaseURL
	return p, d
}

// by gives the hub of a demo by its key.
func (d demo) by(t testing.TB) customer {
	a := newAPI(t, d.BaseURL, "X-Api-Key", d.Tenant.APIKey)
	return customer{d.Tenant.ID, a, a.with("Authorization", "Bearer "+d.ManagementToken)}
}

// A newcomer starts a hub on an empty folder, pastes what it prints, stops it, and finds everything again.
func TestNewcomer(t *testing.T) {
	t.Parallel()
	dir := filepath.Join(tempDir(t), ".dev")
	own := newEndpoint(t)
	first, d := startDev(t, dir, "--addr", "127.0.0.1:0", "--receiver-url", own.url)

	if info, err := os.Stat(filepath.Join(dir, demoFile)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%s: %v, %v", demoFile, info.Mode(), err)
	}
	said := first.out.String()
	pasted := paste(t, said, own.url)
	for _, want := range []string{`"text":"Hello from curl"`, "text, text, image, status sent", "1 as expected", "Is the shop open?", "processed"} {
		if !strings.Contains(pasted, want) {
			t.Errorf("the pasted lines did not show %s:\n%s", want, pasted)
		}
	}
	if d.Admin.Password == "" || d.User.Password == "" || !strings.Contains(said, d.Admin.Password) || !strings.Contains(said, d.User.Password) {
		t.Errorf("the welcome does not say how to sign in:\n%s", said)
	}
	total := 0
	for line := range strings.Lines(pasted) {
		if count, status, ok := strings.Cut(strings.TrimSpace(line), " "); ok && (status == "201" || status == "429") {
			n, _ := strconv.Atoi(count)
			total += n
		}
	}
	if total != 300 {
		t.Errorf("%d of 300 posts were accepted or refused:\n%s", total, pasted)
	}

	c := d.by(t)
	var chats struct{ Data []wire }
	a := c.api.call(t, 200, "GET", "/api/v1/conversations?channel_id="+d.Channels["webhook"].ID, "")
	if err := json.Unmarshal(a.body, &chats); err != nil || len(chats.Data) != 1 {
		t.Fatalf("conversations: %v %s", err, a)
	}
	before := c.activities(t, chats.Data[0].ID)
	gapless(t, before)
	if got := own.await(t, before[0].ID); got.message.Text != "Hello from curl" {
		t.Errorf("delivered %s", got.body)
	}
	// The demo's rule passed the WhatsApp messages on.
	for _, m := range c.activities(t, onlyChat(t, c, d.Channels["whatsapp_meta"].ID)) {
		own.await(t, m.ID)
	}
	if rules := data[[]map[string]any](t, c.api.call(t, 200, "GET", "/api/v1/routing_rules", "")); len(rules) != 1 {
		t.Errorf("the demo's rules: %v", rules)
	}
	if a.header.Get("X-Request-Id") == "" {
		t.Error("an answer without a request id")
	}
	if missing := c.api.call(t, 404, "GET", "/api/v1/conversations/"+c.id, ""); !strings.Contains(string(missing.body), `"type":"`+d.BaseURL+`/problems/not_found"`) {
		t.Errorf("the link of a problem does not lead to this hub: %s", missing)
	}

	// A second start on the folder is refused, and the first goes on.
	second := start(t, nil, "dev", "--dir", dir, "--addr", "127.0.0.1:0")
	if err := second.result(t); err == nil || !strings.Contains(err.Error(), devpg.ErrRunning.Error()) {
		t.Errorf("a second start: %v\n%s", err, second.log)
	}
	c.api.call(t, 200, "GET", "/health/ready", "")

	// Stopped, it leaves the address; started again on it, it knows everybody.
	if err := first.stop(t); err != nil {
		t.Errorf("stopping: %v\n%s", err, first.log)
	}
	addr := strings.TrimPrefix(d.BaseURL, "http://")
	l, err := net.Listen("tcp", addr) //nolint:noctx // at once
	if err != nil {
		t.Fatalf("the address is still taken: %v", err)
	}
	_ = l.Close()
	_, again := startDev(t, dir, "--addr", addr, "--receiver-url", own.url)
	if diff := cmp.Diff(d, again); diff != "" {
		t.Errorf("%s after a restart:\n%s", demoFile, diff)
	}
	if diff := cmp.Diff(before, c.activities(t, chats.Data[0].ID)); diff != "" {
		t.Errorf("activities after a restart:\n%s", diff)
	}
	c.ops.call(t, 200, "GET", "/api/v1/management/tenants", "")
	here := auth.Visitor{IP: netip.MustParseAddr("127.0.0.1")}
	h := newTestHub(t, again.DatabaseURL, nil)
	if _, err := h.signIn.Password(t.Context(), here, auth.Credentials{Email: d.Admin.Email, Password: secrets.Text(d.Admin.Password)}); err != nil {
		t.Errorf("the demo's administrator after a restart: %v", err)
	}
	if _, err := h.signIn.Password(t.Context(), here, auth.Credentials{
		Portal: true, Tenant: d.Tenant.Name, Email: d.User.Email, Password: secrets.Text(d.User.Password)}); err != nil {
		t.Errorf("the demo's owner after a restart: %v", err)
	}
	h.pool.Close() // before the demo's Postgres ends
	if rules := data[[]map[string]any](t, c.api.call(t, 200, "GET", "/api/v1/routing_rules", "")); len(rules) != 1 {
		t.Errorf("the demo's rules after a restart: %v", rules)
	}
}

// onlyChat is the id of a channel's one conversation.
func onlyChat(t *testing.T, c customer, channel string) string {
	t.Helper()
	chats := data[[]struct{ ID string }](t, c.api.call(t, 200, "GET", "/api/v1/conversations?channel_id="+channel, ""))
	if len(chats) != 1 {
		t.Fatalf("channel %s has %d conversations, want 1", channel, len(chats))
	}
	return chats[0].ID
}

// What comes in by WhatsApp goes out to the webhook channel of a rule: in order, as the API shows it, and only while the rule
// is enabled.
func TestRouting(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, nil)
	c := newCustomer(t, management(t, p, url), "Shop")
	own := newEndpoint(t)
	meta := c.newChannel(t, "whatsapp_meta", "inbound", map[string]any{"phone_number_id": "1", "app_secret": "the app's secret", "verify_token": "handshake"})
	hook := c.newChannel(t, "webhook", "duplex", map[string]any{"url": own.url})
	rule := data[map[string]any](t, c.api.call(t, 201, "POST", "/api/v1/routing_rules", object(map[string]any{"routing_rule": map[string]any{
		"name": "to the shop", "source_channel_id": meta.ID, "target_channel_ids": []string{hook.ID}}})))

	from := startProvider(t, c, meta.ID, "the app's secret", 0)
	const n = 20
	for i := range n {
		from.post(fmt.Sprint("wamid.", i), "491700001")
	}
	var chat string
	var shown []json.RawMessage
	eventually(t, patience, "all messages to be stored", func() bool {
		if chats := data[[]struct{ ID string }](t, c.api.call(t, 200, "GET", "/api/v1/conversations?channel_id="+meta.ID, "")); len(chats) == 1 {
			chat = chats[0].ID
			shown = data[[]json.RawMessage](t, c.api.call(t, 200, "GET", "/api/v1/conversations/"+chat+"/activities", ""))
		}
		return len(shown) == n
	})
	eventually(t, patience, "all deliveries", func() bool { return len(own.arrivals()) >= n })
	all := own.arrivals()
	if len(all) != n {
		t.Fatalf("%d deliveries of %d messages", len(all), n)
	}
	for i, got := range all {
		var sent, want map[string]any
		if err := errors.Join(json.Unmarshal(got.body, &sent), json.Unmarshal(shown[i], &want)); err != nil {
			t.Fatal(err)
		}
		delete(sent, "timestamp") // the delivery's own
		if diff := cmp.Diff(want, sent); diff != "" {
			t.Errorf("delivery %d is not activity %d as the API shows it (-want +got):\n%s", i, i, diff)
		}
	}

	// Switched off on one node, it leads nowhere on another either, within a second.
	there := newAPI(t, serve(t, url, nil).base, "X-Api-Key", c.api.header.Get("X-Api-Key"))
	routed := func() bool {
		t.Helper()
		m := data[message](t, there.call(t, 201, "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"hi"}`))
		return len(data[[]any](t, there.call(t, 200, "GET", "/api/v1/deliveries?activity_id="+m.ID, ""))) > 0
	}
	if !routed() {
		t.Error("a node that starts doesn't know the rule")
	}
	c.api.call(t, 200, "PATCH", "/api/v1/routing_rules/"+fmt.Sprint(rule["id"]), `{"routing_rule":{"enabled":false}}`)
	eventually(t, withinASecond, "the neighbour to follow", func() bool { return !routed() })
}

// paste runs what `server dev` printed as a newcomer would, in a shell, and returns what that printed. The one line that
// runs for ever is left out; it is looked at instead.
func paste(t *testing.T, said, receiver string) string {
	t.Helper()
	for _, tool := range []string{"bash", "curl"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Fatalf("%s is needed to paste what is printed: %v", tool, err)
		}
	}
	_, lines, ok := strings.Cut(said, "in the same folder:\n")
	if !ok {
		t.Fatalf("nothing to paste in:\n%s", said)
	}
	var script strings.Builder
	// A refusal is a failure, but for the line that provokes one.
	script.WriteString("set -euo pipefail\n" +
		`curl() { case " $* " in *" -Z "*) command curl "$@";; *) command curl --fail-with-body "$@";; esac; }` + "\n# ")
	receivers := 0
	for line := range strings.Lines(lines) {
		if strings.Contains(line, " simulate receiver") {
			receivers++
			if want := " --addr " + strings.TrimPrefix(receiver, "http://"); !strings.Contains(line, want) {
				t.Errorf("the receiver's line does not listen where the demo delivers to (%s): %s", want, line)
			}
			continue
		}
		script.WriteString(line)
	}
	if receivers != 1 || strings.Count(lines, "curl -") != 5 {
		t.Errorf("unexpected lines to paste:\n%s", lines)
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, "bash", "-c", script.String())
	cmd.Env = append(os.Environ(), envProgram+"=1")
	cmd.Dir = t.TempDir() // another folder than that of the hub
	var out strings.Builder
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Run(); err != nil {
		t.Fatalf("pasting failed: %v\n%s\n%s", err, script.String(), out.String())
	}
	return out.String()
}

// A signed batch becomes activities of a participant; sent again, in any order, it changes nothing.
func TestSimulatedWhatsApp(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	_, d := startDev(t, dir, "--addr", "127.0.0.1:0", "--database-url", pgtest.Empty(t))
	c := d.by(t)
	simulate := func(args ...string) string {
		t.Helper()
		return runOK(t, nil, append([]string{"simulate", "whatsapp", "--dir", dir, "--seed", "7"}, args...)...)
	}
	type chat struct {
		ID          string
		Participant struct {
			ExternalID  string `json:"external_id"`
			DisplayName string `json:"display_name"`
		}
	}
	chats := func() []chat {
		t.Helper()
		return data[[]chat](t, c.api.call(t, 200, "GET", "/api/v1/conversations?channel_id="+d.Channels["whatsapp_meta"].ID, ""))
	}
	// Each event ends in a state, whose number says how many there were.
	processed := func(want int) {
		t.Helper()
		eventually(t, patience, fmt.Sprintf("%d processed events", want), func() bool {
			return len(data[[]wire](t, c.ops.call(t, 200, "GET", "/api/v1/management/inbound_events?state=processed&limit=100", ""))) == want
		})
		for _, state := range []string{"received", "rejected", "failed"} {
			if left := c.ops.call(t, 200, "GET", "/api/v1/management/inbound_events?state="+state, ""); len(data[[]wire](t, left)) > 0 {
				t.Errorf("%s events: %s", state, left)
			}
		}
	}

	simulate()
	processed(1)
	found := chats()
	if len(found) != 1 || found[0].Participant.ExternalID == "" || found[0].Participant.DisplayName == "" {
		t.Fatalf("conversations: %+v", found)
	}
	all := c.activities(t, found[0].ID)
	gapless(t, all)
	images := 0
	for _, m := range all {
		if m.Sender == "" || m.Type != "message" || m.Text == "" && len(m.Attachments) == 0 {
			t.Errorf("activity: %+v", m)
		}
		images += len(m.Attachments)
	}
	if len(all) != 3 || images != 1 {
		t.Fatalf("two texts and an image became %+v", all)
	}

	if out := simulate("--repeat", "5", "--shuffle"); !strings.Contains(out, "5 as expected") {
		t.Errorf("five times the same: %s", out)
	}
	processed(6)
	if diff := cmp.Diff(found, chats()); diff != "" {
		t.Errorf("conversations after five repeats:\n%s", diff)
	}
	if diff := cmp.Diff(all, c.activities(t, found[0].ID)); diff != "" {
		t.Errorf("activities after five repeats:\n%s", diff)
	}

	// Four providers at once, five times each.
	var at []*program
	for range 4 {
		at = append(at, start(t, nil, "simulate", "whatsapp", "--dir", dir, "--seed", "7", "--repeat", "5"))
	}
	for _, p := range at {
		if err := p.result(t); err != nil {
			t.Errorf("parallel repeats: %v\n%s", err, p.out)
		}
	}
	processed(26)
	if diff := cmp.Diff(all, c.activities(t, found[0].ID)); diff != "" {
		t.Errorf("activities after parallel repeats:\n%s", diff)
	}

	if out := simulate("--bad-signature"); !strings.Contains(out, "1 as expected; answers: 401") {
		t.Errorf("a bad signature: %s", out)
	}
	processed(26)

	// Generic webhooks, by both schemes of signing; the same key again is the same message.
	for _, scheme := range []string{"timestamped", "standard"} {
		runOK(t, nil, "simulate", "webhook", "--dir", dir, "--scheme", scheme, "--text", "hi by "+scheme, "--external-id", "ada", "--idempotency-key", "key "+scheme, "--repeat", "3")
	}
	hooks := data[[]chat](t, c.api.call(t, 200, "GET", "/api/v1/conversations?external_id=ada", ""))
	if len(hooks) != 1 {
		t.Fatalf("conversations of ada: %+v", hooks)
	}
	var texts []string
	for _, m := range c.activities(t, hooks[0].ID) {
		texts = append(texts, m.Text)
	}
	if diff := cmp.Diff([]string{"hi by timestamped", "hi by standard"}, texts); diff != "" {
		t.Errorf("messages of ada:\n%s", diff)
	}
	processed(32)
}

// What cannot be parsed is seen in the list, shown with its body, and can be run again by hand.
func TestInboundByHand(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	_, d := startDev(t, dir, "--addr", "127.0.0.1:0", "--database-url", pgtest.Empty(t))
	c := d.by(t)
	body := `{"object":"whatsapp_business_account","entry":`
	hub := d.Channels["whatsapp_meta"]
	c.api.with("X-Hub-Signature-256", metaSignature(body, hub.AppSecret)).call(t, 200, "POST", "/api/v1/channels/"+hub.ID+"/inbound", body)

	list := func(args ...string) string {
		t.Helper()
		return runOK(t, nil, append([]string{"inbound", "list", "--dir", dir}, args...)...)
	}
	var row []string
	eventually(t, patience, "a failed event in the list", func() bool {
		lines := strings.Split(list("--state", "failed"), "\n")
		if len(lines) > 1 {
			row = strings.Fields(lines[1])
		}
		return len(row) > 3
	})
	id := row[2]
	shown := runOK(t, nil, "inbound", "show", "--dir", dir, id)
	if !strings.Contains(shown, "whatsapp_business_account") || !strings.Contains(shown, `"state": "failed"`) {
		t.Errorf("shown:\n%s", shown)
	}
	if out := runOK(t, nil, "inbound", "replay", "--dir", dir, id); !strings.Contains(out, id+" is queued again") {
		t.Errorf("replay: %s", out)
	}
	var state any
	eventually(t, patience, "the event to fail again", func() bool {
		var v map[string]any
		shown := runOK(t, nil, "inbound", "show", "--dir", dir, id) // the body follows
		if err := json.NewDecoder(strings.NewReader(shown)).Decode(&v); err != nil {
			t.Fatal(err)
		}
		state = v["state"]
		return state != "received"
	})
	if state != "failed" {
		t.Errorf("after a second run the event is %v", state)
	}
}

// Deliveries of a tenant's posts reach the simulated receiver and one of an independent library, signed.
func TestDeliveriesAreSigned(t *testing.T) {
	t.Parallel()
	dir := tempDir(t)
	_, d := startDev(t, dir, "--addr", "127.0.0.1:0", "--database-url", pgtest.Empty(t))
	c := d.by(t)

	receiver := start(t, nil, "simulate", "receiver", "--dir", dir, "--addr", "127.0.0.1:0", "--show-body")
	line, err := receiver.out.await("listening on ", receiver.ended)
	if err != nil {
		t.Fatal(err)
	}
	point := func(url string) {
		t.Helper()
		c.ops.call(t, 200, "PATCH", "/api/v1/management/channels/"+d.Channels["webhook"].ID, object(map[string]any{"config": map[string]any{"url": url}}))
	}
	point(strings.TrimPrefix(line, "listening on "))
	chat := c.newConversation(t, d.Channels["webhook"].ID)
	post := func(text string) message {
		t.Helper()
		return data[message](t, c.api.call(t, 201, "POST", "/api/v1/conversations/"+chat+"/activities", object(map[string]any{"text": text})))
	}
	post("to the simulated receiver")
	line, err = receiver.out.await(`"to the simulated receiver"`, receiver.ended)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(line, "converger VALID  standard VALID") || !strings.Contains(line, "try 1") {
		t.Errorf("the receiver says: %s", line)
	}
	if err := receiver.stop(t); err != nil || !strings.Contains(receiver.out.String(), "deliveries: 1, repeats: 0") {
		t.Errorf("the receiver ends with %v:\n%s", err, receiver.out)
	}

	own := newEndpoint(t)
	point(own.url + "/hook")
	got := own.await(t, post("to the library's receiver").ID)
	hook, err := standardwebhooks.NewWebhook(d.Channels["webhook"].Secret)
	if err != nil {
		t.Fatal(err)
	}
	if err := hook.Verify(got.body, got.header); err != nil {
		t.Errorf("the library refuses the delivery: %v\n%v", err, got.header)
	}
	if err := hook.Verify(append(got.body, ' '), got.header); err == nil {
		t.Error("the library accepts a changed body")
	}
	type row struct{ ID, Status string }
	eventually(t, patience, "the delivery to be sent in the list", func() bool {
		rows := data[[]row](t, c.api.call(t, 200, "GET", "/api/v1/deliveries?activity_id="+got.message.ID, ""))
		return len(rows) == 1 && rows[0] == row{got.delivery, "sent"}
	})

	// The echo channel answers in the conversation, once, as the bot.
	echo := c.newConversation(t, d.Channels["echo"].ID)
	c.api.call(t, 201, "POST", "/api/v1/conversations/"+echo+"/activities", `{"text":"is anybody there"}`)
	var all []message
	eventually(t, patience, "the echo", func() bool {
		all = c.activities(t, echo)
		return len(all) == 2
	})
	if all[0].Sender == "bot" || all[1].Sender != "bot" || all[1].Text != "is anybody there" {
		t.Errorf("the echo conversation: %+v", all)
	}
}

// snapshot counts the rows of every table of the schema and reads its comments.
func snapshot(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	rows, err := pool.Query(t.Context(), `SELECT c.relname || ' ' ||
		coalesce((xpath('/row/c/text()', query_to_xml('SELECT count(*) AS c FROM ' || c.oid::regclass, false, true, '')))[1]::text, '') || ' ' ||
		coalesce(obj_description(c.oid, 'pg_class'), '')
		FROM pg_class c WHERE c.relkind IN ('r', 'p') AND c.relnamespace = 'public'::regnamespace ORDER BY 1`)
	if err != nil {
		t.Fatal(err)
	}
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// A database on which somebody lives is refused and stays as it is; one of development is taken again.
func TestDevKeepsAwayFromOthersData(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	pool := pgtest.Open(t, url, postgres.Options{MaxConns: 2})
	if _, err := pool.Exec(t.Context(), `INSERT INTO tenants (id, name, version) VALUES (gen_random_uuid(), 'Somebody', 1)`); err != nil {
		t.Fatal(err)
	}
	before := snapshot(t, pool)
	dir := tempDir(t)
	p := start(t, nil, "dev", "--dir", dir, "--addr", "127.0.0.1:0", "--database-url", url)
	if err := p.result(t); err == nil || !strings.Contains(err.Error(), errNotDev.Error()) {
		t.Errorf("dev on a database with tenants: %v", err)
	}
	if diff := cmp.Diff(before, snapshot(t, pool)); diff != "" {
		t.Errorf("the refused database was changed:\n%s", diff)
	}
	if _, err := os.Stat(filepath.Join(dir, demoFile)); err == nil {
		t.Error("a refused start wrote demo.json")
	}

	// The database of the environment is not taken: a shell set up for production must not be enough.
	own := start(t, map[string]string{"DATABASE_URL": url, "PG_BIN": filepath.Join(dir, "no binaries here")}, "dev", "--dir", dir, "--addr", "127.0.0.1:0")
	if err := own.result(t); err == nil || strings.Contains(err.Error(), errNotDev.Error()) {
		t.Errorf("dev without --database-url asked the environment's: %v", err)
	}

	empty := pgtest.Empty(t)
	first, d := startDev(t, dir, "--addr", "127.0.0.1:0", "--database-url", empty)
	if err := first.stop(t); err != nil {
		t.Fatal(err)
	}
	elsewhere := start(t, nil, "dev", "--dir", tempDir(t), "--addr", "127.0.0.1:0", "--database-url", empty)
	if err := elsewhere.result(t); err == nil || !strings.Contains(err.Error(), "pass that folder by --dir") {
		t.Errorf("dev on the database of another folder: %v", err)
	}
	_, again := startDev(t, dir, "--addr", "127.0.0.1:0", "--database-url", empty)
	again.BaseURL, again.Nodes = d.BaseURL, d.Nodes // another port
	if diff := cmp.Diff(d, again); diff != "" {
		t.Errorf("a second start on the same database:\n%s", diff)
	}
}

// untilWithin repeats a measurement until it fits into one window of the clock: limits are counted in windows aligned to
// it, and a run across an edge would rightly get two budgets.
func untilWithin(t *testing.T, window time.Duration, measure func()) {
	t.Helper()
	for range 3 {
		began := time.Now().Truncate(window)
		measure()
		if time.Now().Truncate(window).Equal(began) {
			return
		}
	}
	t.Fatalf("no run of three fits into a window of %s", window)
}

// A tenant that overdoes it is refused beyond exactly its limit, in words and headers; the others notice nothing.
func TestLimits(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, map[string]string{"RATE_LIMITS": `{"activity_create":{"limit":100,"scale_ms":3600000}}`})
	ops := management(t, p, url)

	n := 0
	untilWithin(t, time.Hour, func() {
		n++
		noisy, quiet := newCustomer(t, ops, fmt.Sprint("noisy ", n)), newCustomer(t, ops, fmt.Sprint("quiet ", n))
		chat := noisy.newConversation(t, noisy.newChannel(t, "echo", "outbound", nil).ID)
		other := quiet.newConversation(t, quiet.newChannel(t, "webhook", "inbound", nil).ID)
		answers := parallel(t, 16, 160, func(ctx context.Context, i int) (answer, error) {
			return noisy.api.try(ctx, "POST", "/api/v1/conversations/"+chat+"/activities", object(map[string]any{"text": fmt.Sprint(i)}))
		})
		accepted := 0
		for _, a := range answers {
			switch a.status {
			case 201:
				accepted++
				if a.header.Get("RateLimit-Policy") != `"activity_create";q=100;w=3600` || !strings.HasPrefix(a.header.Get("RateLimit"), `"activity_create";r=`) {
					t.Errorf("headers of an accepted post: %v", a.header)
				}
			case 429:
				refused(t, a, 100, time.Hour)
			default:
				t.Errorf("answer: %s", a)
			}
		}
		// The echo's replies are the hub's own and cost the tenant nothing.
		if accepted != 100 {
			t.Errorf("%d of 160 were accepted, want 100", accepted)
		}
		for i := range 3 {
			quiet.api.call(t, 201, "POST", "/api/v1/conversations/"+other+"/activities", object(map[string]any{"text": fmt.Sprint(i)}))
		}
	})
}

// refused checks a 429 whole.
func refused(t *testing.T, a answer, limit int, window time.Duration) {
	t.Helper()
	var body struct {
		Type, Title, Detail, Code, Bucket string
		Status, Limit                     int
		RequestID                         string `json:"request_id"`
		ScaleMS                           int64  `json:"scale_ms"`
		RetryAfterMS                      int64  `json:"retry_after_ms"`
	}
	if err := json.Unmarshal(a.body, &body); err != nil {
		t.Fatalf("%v: %s", err, a)
	}
	retry, err := strconv.Atoi(a.header.Get("Retry-After"))
	seconds := int(window / time.Second)
	if err != nil || retry < 1 || retry > seconds {
		t.Errorf("Retry-After: %q", a.header.Get("Retry-After"))
	}
	if want := fmt.Sprintf(`"activity_create";q=%d;w=%d`, limit, seconds); a.header.Get("RateLimit-Policy") != want {
		t.Errorf("RateLimit-Policy: %q, want %q", a.header.Get("RateLimit-Policy"), want)
	}
	if want := fmt.Sprintf(`"activity_create";r=0;t=%d`, retry); a.header.Get("RateLimit") != want {
		t.Errorf("RateLimit: %q, want %q", a.header.Get("RateLimit"), want)
	}
	if a.header.Get("Content-Type") != "application/problem+json" || body.Code != "rate_limited" || body.Status != 429 || body.Bucket != "activity_create" ||
		body.Limit != limit || body.ScaleMS != window.Milliseconds() || body.RetryAfterMS < 1 || body.RetryAfterMS > window.Milliseconds() ||
		body.RequestID == "" || body.RequestID != a.header.Get("X-Request-Id") || !strings.Contains(body.Detail, strconv.Itoa(limit)) {
		t.Errorf("body of a refusal: %s %q", a, a.header.Get("Content-Type"))
	}
}

// An override is in force on this node with its answer, and within a second on another; taken away, the default is back.
func TestOverrideIsInForceWithinASecond(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p, neighbour := serve(t, url, nil), serve(t, url, nil)
	ops := management(t, p, url)
	c := newCustomer(t, ops, "Tenant")
	chat := c.newConversation(t, c.newChannel(t, "webhook", "inbound", nil).ID)
	there := newAPI(t, neighbour.base, "X-Api-Key", c.api.header.Get("X-Api-Key"))
	path := "/api/v1/conversations/" + chat + "/activities"

	// The neighbour says the limit with each answer.
	policy := func() string {
		t.Helper()
		a, err := there.try(t.Context(), "POST", path, `{"text":"which limit?"}`)
		if err != nil {
			t.Fatal(err)
		}
		return a.header.Get("RateLimit-Policy")
	}
	eventually(t, patience, "the neighbour to know the tenant", func() bool { return policy() == `"activity_create";q=100;w=1` })
	began := time.Now()
	ops.call(t, 200, "PUT", "/api/v1/management/tenants/"+c.id+"/limits/activity_create", `{"limit":20,"scale_ms":3600000}`)
	eventually(t, withinASecond, "the override on the neighbour", func() bool { return policy() == `"activity_create";q=20;w=3600` })
	t.Logf("in force on another node after %s", time.Since(began))

	untilWithin(t, time.Hour, func() {
		ops.call(t, 200, "PUT", "/api/v1/management/tenants/"+c.id+"/limits/activity_create", `{"limit":20,"scale_ms":3600000}`)
		accepted := 0
		for i := range 30 {
			a, err := c.api.try(t.Context(), "POST", path, object(map[string]any{"text": fmt.Sprint(i)}))
			switch {
			case err != nil:
				t.Fatal(err)
			case a.status == 201:
				accepted++
			default:
				refused(t, a, 20, time.Hour)
			}
		}
		if accepted != 20 {
			t.Errorf("%d of 30 were accepted, want 20", accepted)
		}
	})
	ops.call(t, 200, "DELETE", "/api/v1/management/tenants/"+c.id+"/limits/activity_create", "")
	c.api.call(t, 201, "POST", path, `{"text":"the default again"}`)
	eventually(t, withinASecond, "the default on the neighbour", func() bool { return policy() == `"activity_create";q=100;w=1` })
}

// A suspended tenant is stopped at every entrance, and goes on where it was.
func TestSuspension(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, nil)
	ops := management(t, p, url)
	c := newCustomer(t, ops, "Late payer")
	own := newEndpoint(t)
	hook := c.newChannel(t, "webhook", "duplex", map[string]any{"url": own.url})
	meta := c.newChannel(t, "whatsapp_meta", "inbound", map[string]any{"phone_number_id": "1", "app_secret": "the app's secret", "verify_token": "handshake"})
	chat := c.newConversation(t, hook.ID)
	type token struct{ Token string }
	var client token
	a := c.api.with("Authorization", "Bearer "+hook.Secret).call(t, 200, "POST", "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"},"scope":"channel"}`)
	if err := json.Unmarshal(a.body, &client); err != nil {
		t.Fatal(err)
	}
	ada := c.api.with("Authorization", "Bearer "+client.Token)
	body := `{"object":"whatsapp_business_account","entry":[]}`
	provider := c.api.with("X-Hub-Signature-256", metaSignature(body, "the app's secret"))
	entrances := func(want func(method, path string, a answer)) {
		t.Helper()
		for _, try := range []struct {
			by                 *api
			method, path, body string
		}{
			{c.api, "GET", "/api/v1/conversations", ""},
			{c.api, "POST", "/api/v1/conversations/" + chat + "/activities", `{"text":"hi"}`},
			{ada, "POST", "/api/v1/converger/conversations", ""},
			{ada, "POST", "/api/v1/converger/tokens/refresh", ""},
			{c.api.with("Authorization", "Bearer "+hook.Secret), "POST", "/api/v1/converger/tokens/generate", ""},
			{provider, "POST", "/api/v1/channels/" + meta.ID + "/inbound", body},
		} {
			a, err := try.by.try(t.Context(), try.method, try.path, try.body)
			if err != nil {
				t.Fatal(err)
			}
			want(try.method, try.path, a)
		}
	}
	good := func(method, path string, a answer) {
		if a.status > 201 {
			t.Errorf("%s %s: %s", method, path, a)
		}
	}
	entrances(good)
	before := len(c.activities(t, chat))
	ops.call(t, 200, "POST", "/api/v1/management/tenants/"+c.id+"/suspend", "")
	entrances(func(method, path string, a answer) {
		if a.status != 403 || !strings.Contains(string(a.body), `"code":"tenant_suspended"`) {
			t.Errorf("suspended: %s %s: %s", method, path, a)
		}
	})
	ops.call(t, 200, "POST", "/api/v1/management/tenants/"+c.id+"/activate", "")
	if after := len(c.activities(t, chat)); after != before {
		t.Errorf("a suspended tenant stored %d activities", after-before)
	}
	entrances(good)
}

// parallel makes n calls by so many callers at once and returns the answers in the order of their numbers.
func parallel(t *testing.T, callers, n int, call func(ctx context.Context, i int) (answer, error)) []answer {
	t.Helper()
	answers, errs := make([]answer, n), make([]error, n)
	next := make(chan int)
	var wg sync.WaitGroup
	for range callers {
		wg.Go(func() {
			for i := range next {
				answers[i], errs[i] = call(t.Context(), i)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	wg.Wait()
	for i, err := range errs {
		if err != nil {
			t.Fatalf("call %d: %v", i, err)
		}
	}
	return answers
}
