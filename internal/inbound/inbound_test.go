package inbound_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/channel/webhook"
	"converger/internal/channel/whatsappmeta"
	"converger/internal/inbound"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/internal/signature"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

func TestMain(m *testing.M) { pgtest.Main(m) }

// world is a database with a tenant, a webhook and a WhatsApp channel, and the service on it.
type world struct {
	t          *testing.T
	pool       *pgxpool.Pool
	tenant     tenants.ID
	channels   *channel.Store
	registry   *channel.Registry
	activities *activity.Store
	service    *inbound.Service
	jobs       *queue
	receipts   *ledger
	webhook    *channel.Channel
	whatsapp   *channel.Channel
}

// nowhere delivers nothing.
type nowhere struct{}

func (nowhere) Targets(uuid.UUID, *activity.New) []activity.Target { return nil }
func (nowhere) EnqueueTx(context.Context, pgx.Tx, []activity.Work) (func(), error) {
	return func() {}, nil
}

// queue notes what was queued in transactions.
type queue struct {
	mu     sync.Mutex
	events []uuid.UUID
	pokes  int
}

func (q *queue) InsertInboundTx(_ context.Context, _ pgx.Tx, _ tenants.ID, event uuid.UUID) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.events = append(q.events, event)
	return nil
}

func (q *queue) PokeInbound() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.pokes++
}

// ledger notes receipts; err, when set, is its answer.
type ledger struct {
	mu       sync.Mutex
	receipts []channel.Receipt
	err      error
}

func (l *ledger) ApplyReceiptsTx(_ context.Context, _ pgx.Tx, _ tenants.ID, _ uuid.UUID, r []channel.Receipt) (int, int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.receipts = append(l.receipts, r...)
	return 0, len(r), l.err
}

const appSecret = "app-secret-for-tests"

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{t: t, pool: pgtest.PoolWith(t, postgres.Options{MaxConns: 10}), jobs: &queue{}, receipts: &ledger{}}
	by := tenants.Actor{Type: tenants.ActorSystem, ID: "test"}
	tenant, err := tenants.NewStore(w.pool).Create(t.Context(), by, tenants.NewTenant{Name: "T1"})
	must(t, err)
	w.tenant = tenant.ID
	box, err := secrets.NewBox(bytes.Repeat([]byte{7}, 32))
	must(t, err)
	guard, err := channel.NewGuard(channel.GuardOptions{AllowPrivate: true})
	must(t, err)
	quiet := slog.New(slog.DiscardHandler)
	w.registry = channel.NewRegistry(webhook.New(guard, quiet), whatsappmeta.New(quiet))
	w.channels = channel.NewStore(w.pool, box, w.registry)
	w.webhook = w.newChannel(channel.NewChannel{Name: "hook", Type: channel.TypeWebhook, Mode: channel.ModeDuplex,
		Config: json.RawMessage(`{"url":"http://127.0.0.1:9/"}`)})
	w.whatsapp = w.newChannel(channel.NewChannel{Name: "wa", Type: channel.TypeWhatsAppMeta,
		Config: json.RawMessage(`{"phone_number_id":"106540352242922","app_secret":"` + appSecret + `","verify_token":"v"}`)})
	w.activities = activity.NewStore(w.pool, nowhere{}, nowhere{}, activity.Options{})
	w.service = w.newService()
	return w
}

func (w *world) newService() *inbound.Service {
	s := inbound.NewService(w.pool, w.channels, w.registry, w.activities, w.receipts, inbound.Options{MaxTries: 2})
	s.SetJobs(w.jobs)
	return s
}

func (w *world) newChannel(n channel.NewChannel) *channel.Channel {
	w.t.Helper()
	ch, err := w.channels.Create(w.t.Context(), tenants.Actor{Type: tenants.ActorSystem, ID: "test"}, w.tenant, n)
	must(w.t, err)
	return &ch
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func (w *world) request(ch *channel.Channel, endpoint channel.Endpoint, body string) inbound.Request {
	w.t.Helper()
	r := inbound.Request{Channel: ch, Endpoint: endpoint, Header: http.Header{"Content-Type": {"application/json"}}, Body: []byte(body), Now: time.Now()}
	if ch.Type == channel.TypeWhatsAppMeta {
		must(w.t, signature.SignHubSHA256(r.Header, r.Body, []byte(appSecret)))
	} else {
		must(w.t, signature.SignTimestamped(r.Header, r.Body, ch.Secrets(r.Now), r.Now))
	}
	return r
}

// receive verifies and receives.
func (w *world) receive(ch *channel.Channel, endpoint channel.Endpoint, body string) (inbound.Answer, error) {
	w.t.Helper()
	r := w.request(ch, endpoint, body)
	must(w.t, w.service.Verify(r))
	return w.service.Receive(w.t.Context(), r)
}

func (w *world) event(id uuid.UUID) inbound.Event {
	w.t.Helper()
	e, err := w.service.Get(w.t.Context(), w.tenant, id)
	must(w.t, err)
	return e
}

func (w *world) count(table string) (n int) {
	w.t.Helper()
	must(w.t, w.pool.QueryRow(w.t.Context(), "SELECT count(*) FROM "+table).Scan(&n))
	return n
}

// batch is a WhatsApp body: texts by "name:id:text", statuses by "=id:status", anything else raw.
func batch(items ...string) string {
	var messages, contacts, statuses []string
	for _, item := range items {
		switch {
		case strings.HasPrefix(item, "="):
			id, status, _ := strings.Cut(item[1:], ":")
			statuses = append(statuses, fmt.Sprintf(`{"id":%q,"status":%q,"timestamp":"1796016702","recipient_id":"1650"}`, id, status))
		case strings.HasPrefix(item, "{"):
			messages = append(messages, item)
		default:
			p := strings.SplitN(item, ":", 3)
			contacts = append(contacts, fmt.Sprintf(`{"profile":{"name":%q},"wa_id":%q}`, p[0], "1650"+p[0]))
			messages = append(messages, fmt.Sprintf(`{"from":%q,"id":%q,"timestamp":"1796016600","type":"text","text":{"body":%q}}`, "1650"+p[0], p[1], p[2]))
		}
	}
	return fmt.Sprintf(`{"object":"whatsapp_business_account","entry":[{"id":"1","changes":[{"field":"messages","value":{"messaging_product":"whatsapp",
"metadata":{"display_phone_number":"1555","phone_number_id":"106540352242922"},"contacts":[%s],"messages":[%s],"statuses":[%s]}}]}]}`,
		strings.Join(contacts, ","), strings.Join(messages, ","), strings.Join(statuses, ","))
}

func TestProviderEventIsStoredThenWorked(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	answer, err := w.receive(w.whatsapp, channel.EndpointInbound, batch("Ada:wamid.1:Hello", "Bo:wamid.2:Hi", "Ada:wamid.3:Again", "=wamid.9:read",
		`{"from":"1650Ada","id":"wamid.4","timestamp":"1796016600","type":"hologram","hologram":{}}`))
	must(t, err)
	if !answer.Acknowledged || w.count("activities") != 0 || w.jobs.pokes != 1 || !slices.Contains(w.jobs.events, answer.EventID) {
		t.Fatalf("answer %+v, %d activities, queue %+v: want stored, queued, poked and not yet parsed", answer, w.count("activities"), w.jobs)
	}
	if e := w.event(answer.EventID); e.State != inbound.StateReceived {
		t.Fatalf("state %s", e.State)
	}

	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	e := w.event(answer.EventID)
	if e.State != inbound.StateProcessed || e.Result.Created != 4 || e.Result.UnknownReceipts != 1 || len(e.Result.ActivityIDs) != 4 || e.ProcessedAt == nil {
		t.Fatalf("event %+v result %+v", e, e.Result)
	}
	if p, c := w.count("participants"), w.count("conversations"); p != 2 || c != 2 {
		t.Errorf("%d participants in %d conversations, want 2 in 2", p, c)
	}
	first, err := w.activities.Get(t.Context(), w.tenant, e.Result.ActivityIDs[0])
	must(t, err)
	if *first.Text != "Hello" || first.Sender != "1650Ada" || first.Seq != 1 {
		t.Errorf("first activity %+v", first)
	}

	// A job that runs twice, and the same bytes four times more, change nothing.
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	for range 4 {
		again, err := w.receive(w.whatsapp, channel.EndpointInbound, string(e.Body))
		must(t, err)
		must(t, w.service.Process(t.Context(), w.tenant, again.EventID))
		if r := w.event(again.EventID).Result; r.Created != 0 || r.Duplicates != 4 || !slices.Equal(r.ActivityIDs, e.Result.ActivityIDs) {
			t.Fatalf("a repeat became %+v", r)
		}
	}
	if n := w.count("activities"); n != 4 {
		t.Errorf("%d activities after repeats, want 4", n)
	}
}

func TestParallelRepeatsMakeOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var wg sync.WaitGroup
	body := batch("Ada:wamid.1:Hello", "Bo:wamid.2:Hi")
	mirrored := batch("Bo:wamid.2:Hi", "Ada:wamid.1:Hello")
	ids := make([]uuid.UUID, 20)
	for i := range ids {
		a, err := w.receive(w.whatsapp, channel.EndpointInbound, []string{body, mirrored}[i%2])
		must(t, err)
		ids[i] = a.EventID
	}
	for _, id := range ids {
		wg.Go(func() {
			if err := w.service.Process(t.Context(), w.tenant, id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	created := 0
	for _, id := range ids {
		created += w.event(id).Result.Created
	}
	if a, c, p := w.count("activities"), w.count("conversations"), w.count("participants"); a != 2 || c != 2 || p != 2 || created != 2 {
		t.Fatalf("%d activities, %d conversations, %d participants, %d reported as created; want 2 of each", a, c, p, created)
	}
}

func TestGenericWebhook(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other := w.newChannel(channel.NewChannel{Name: "other", Type: channel.TypeWebhook, Config: json.RawMessage(`{"url":"http://127.0.0.1:9/"}`)})
	foreign, err := w.activities.CreateConversation(t.Context(), w.tenant, activity.NewConversation{ChannelID: other.ID})
	must(t, err)

	type want struct {
		created, duplicates, rejected int
		reason                        string
	}
	for _, tc := range []struct {
		name, body string
		want       want
	}{
		{"a message", `{"text":"hi","external_id":"ada"}`, want{created: 1}},
		{"the same again is a second message", `{"text":"hi","external_id":"ada"}`, want{created: 1}},
		{"a key", `{"text":"hi","external_id":"ada","idempotency_key":"k"}`, want{created: 1}},
		{"the key again", `{"text":"other","external_id":"bo","idempotency_key":"k"}`, want{duplicates: 1}},
		{"a batch with a broken item", `[{"text":"a"},{"text":7},{"text":"c"}]`, want{created: 2, rejected: 1, reason: inbound.ReasonInvalid}},
		{"a key twice in one batch", `[{"text":"a","idempotency_key":"b"},{"text":"a","idempotency_key":"b"}]`, want{created: 1, duplicates: 1}},
		{"text over the limit", `{"text":"` + strings.Repeat("x", 65537) + `"}`, want{rejected: 1, reason: inbound.ReasonInvalid}},
		{"an unknown conversation", `{"text":"a","conversation_id":"` + uuid.NewString() + `"}`, want{rejected: 1, reason: inbound.ReasonConversationNotFound}},
		{"a conversation of another channel", `{"text":"a","conversation_id":"` + foreign.ID.String() + `"}`, want{rejected: 1, reason: inbound.ReasonConversationNotFound}},
	} {
		answer, err := w.receive(w.webhook, channel.EndpointInbound, tc.body)
		if err != nil {
			t.Fatalf("%s: %v", tc.name, err)
		}
		got := want{created: answer.Created, duplicates: answer.Duplicates, rejected: len(answer.Rejected)}
		if len(answer.Rejected) > 0 {
			got.reason = answer.Rejected[0].Reason
		}
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(want{})); diff != "" {
			t.Errorf("%s: %s", tc.name, diff)
		}
		e := w.event(answer.EventID)
		state := inbound.StateProcessed
		if tc.want.rejected > 0 {
			state = inbound.StateRejected
		}
		if e.State != state || string(e.Body) != tc.body {
			t.Errorf("%s: stored as %s with %d bytes", tc.name, e.State, len(e.Body))
		}
	}
	if c := w.count("conversations WHERE participant_id IS NOT NULL"); c != 1 {
		t.Errorf("ada has %d conversations, want 1", c)
	}
}

func TestRejectedKeyIsFreeAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	conversation, err := w.activities.CreateConversation(t.Context(), w.tenant, activity.NewConversation{ChannelID: w.webhook.ID})
	must(t, err)
	_, _, err = w.activities.Close(t.Context(), w.tenant, conversation.ID, nil, "manual")
	must(t, err)
	body := `{"text":"a","idempotency_key":"k","conversation_id":"` + conversation.ID.String() + `"}`
	answer, err := w.receive(w.webhook, channel.EndpointInbound, body)
	must(t, err)
	if len(answer.Rejected) != 1 || answer.Rejected[0].Reason != inbound.ReasonConversationClosed {
		t.Fatalf("answer %+v", answer)
	}
	_, _, err = w.activities.Reopen(t.Context(), w.tenant, conversation.ID, nil, "manual")
	must(t, err)
	if answer, err = w.receive(w.webhook, channel.EndpointInbound, body); err != nil || answer.Created != 1 {
		t.Fatalf("after reopening: %+v %v", answer, err)
	}
}

func TestClosedConversationIsFollowedByANewOne(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	one, err := w.receive(w.webhook, channel.EndpointInbound, `{"text":"a","external_id":"ada"}`)
	must(t, err)
	a, err := w.activities.Get(t.Context(), w.tenant, one.ActivityIDs[0])
	must(t, err)
	_, _, err = w.activities.Close(t.Context(), w.tenant, a.ConversationID, nil, "manual")
	must(t, err)
	two, err := w.receive(w.webhook, channel.EndpointInbound, `{"text":"b","external_id":"ada"}`)
	must(t, err)
	b, err := w.activities.Get(t.Context(), w.tenant, two.ActivityIDs[0])
	must(t, err)
	if a.ConversationID == b.ConversationID || w.count("participants") != 1 {
		t.Errorf("conversations %s and %s of %d participants", a.ConversationID, b.ConversationID, w.count("participants"))
	}
}

func TestReferencesToProviderMessages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	reaction := func(id, of string) string {
		return fmt.Sprintf(`{"from":"1650Ada","id":%q,"timestamp":"1796016600","type":"reaction","reaction":{"message_id":%q,"emoji":"👍"}}`, id, of)
	}
	answer, err := w.receive(w.whatsapp, channel.EndpointInbound, batch("Ada:wamid.1:Hello"))
	must(t, err)
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	answer, err = w.receive(w.whatsapp, channel.EndpointInbound, batch(reaction("wamid.2", "wamid.1"), reaction("wamid.3", "wamid.unknown")))
	must(t, err)
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	e := w.event(answer.EventID)
	if e.State != inbound.StateProcessed || len(e.Result.ActivityIDs) != 2 {
		t.Fatalf("event %+v result %+v", e, e.Result)
	}
	known, err := w.activities.Get(t.Context(), w.tenant, e.Result.ActivityIDs[0])
	must(t, err)
	if known.Type != activity.TypeMessageReaction || known.ReplyToID == nil {
		t.Errorf("reaction to a known message: %+v", known)
	}
	unknown, err := w.activities.Get(t.Context(), w.tenant, e.Result.ActivityIDs[1])
	must(t, err)
	if unknown.Type != activity.TypeEvent || unknown.ReplyToID != nil {
		t.Errorf("reaction to an unknown message: %+v", unknown)
	}
}

// A person known by telephone number stays the same sender when WhatsApp names a user id later.
func TestSenderSurvivesABetterIdentity(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	later := strings.Replace(batch("Ada:wamid.2:Hello again"), `"from":"1650Ada"`, `"from":"1650Ada","from_user_id":"US.1"`, 1)
	var senders []string
	for _, body := range []string{batch("Ada:wamid.1:Hello"), later} {
		answer, err := w.receive(w.whatsapp, channel.EndpointInbound, body)
		must(t, err)
		must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
		a, err := w.activities.Get(t.Context(), w.tenant, w.event(answer.EventID).Result.ActivityIDs[0])
		must(t, err)
		senders = append(senders, a.Sender)
	}
	if p, i := w.count("participants"), w.count("participant_identities"); senders[0] != senders[1] || p != 1 || i != 2 {
		t.Errorf("senders %v, %d participants, %d identities", senders, p, i)
	}
}

func TestUnreadableIsKeptAndReplayable(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	by := tenants.Actor{Type: tenants.ActorOperator, ID: "op"}

	answer, err := w.receive(w.webhook, channel.EndpointInbound, `{"text":`)
	if !errors.Is(err, inbound.ErrUnreadable) || answer.EventID == uuid.Nil {
		t.Fatalf("answer %+v, error %v", answer, err)
	}
	if e := w.event(answer.EventID); e.State != inbound.StateFailed || e.Error == "" {
		t.Fatalf("event %+v", e)
	}

	answer, err = w.receive(w.whatsapp, channel.EndpointInbound, `[]`)
	must(t, err) // the provider gets its 200: a repeat would not help
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	if e := w.event(answer.EventID); e.State != inbound.StateFailed {
		t.Fatalf("event %+v", e)
	}
	e, err := w.service.Replay(t.Context(), by, w.tenant, answer.EventID)
	must(t, err)
	if e.State != inbound.StateReceived || w.jobs.events[len(w.jobs.events)-1] != answer.EventID || w.count("audit_log WHERE resource_type = 'inbound_event'") != 1 {
		t.Errorf("replayed event %+v", e)
	}
	if _, err := w.service.Replay(t.Context(), by, w.tenant, answer.EventID); !errors.Is(err, inbound.ErrNotReplayable) {
		t.Errorf("a second replay: %v, want ErrNotReplayable", err)
	}
	// Once a reader understands the body, the same event becomes messages.
	_, err = w.pool.Exec(t.Context(), `UPDATE inbound_events SET body = $1 WHERE id = $2`, []byte(batch("Ada:wamid.1:Hello")), answer.EventID)
	must(t, err)
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	if e := w.event(answer.EventID); e.State != inbound.StateProcessed || e.Result.Created != 1 {
		t.Errorf("after the replay: %+v %+v", e, e.Result)
	}
}

func TestReplayOfRejectedMakesNothingTwice(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	answer, err := w.receive(w.webhook, channel.EndpointInbound, `[{"text":"a"},{"text":7},{"text":"c"}]`)
	must(t, err)
	if answer.Created != 2 {
		t.Fatalf("answer %+v", answer)
	}
	_, err = w.service.Replay(t.Context(), tenants.Actor{Type: tenants.ActorOperator, ID: "op"}, w.tenant, answer.EventID)
	must(t, err)
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	e := w.event(answer.EventID)
	if w.count("activities") != 2 || e.Result.Duplicates != 2 || e.State != inbound.StateRejected {
		t.Errorf("%d activities, result %+v", w.count("activities"), e.Result)
	}
}

func TestReceipts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	outbound := w.newChannel(channel.NewChannel{Name: "out", Type: channel.TypeWebhook, Mode: channel.ModeOutbound, Config: json.RawMessage(`{"url":"http://127.0.0.1:9/"}`)})
	receipt := `{"status":"delivered","provider_message_id":"m1"}`
	for _, tc := range []struct {
		name     string
		ch       *channel.Channel
		endpoint channel.Endpoint
		body     string
		err      error
		receipts int
	}{
		{"status endpoint", w.webhook, channel.EndpointStatus, receipt, nil, 1},
		{"inbound endpoint", w.webhook, channel.EndpointInbound, receipt, nil, 1},
		{"outbound channel", outbound, channel.EndpointInbound, receipt, nil, 1},
		{"outbound channel, with a message", outbound, channel.EndpointInbound, `[` + receipt + `,{"text":"a"}]`, nil, 1},
		{"outbound channel, only a message", outbound, channel.EndpointInbound, `{"text":"a"}`, inbound.ErrNotAccepting, 0},
	} {
		before := len(w.receipts.receipts)
		_, err := w.receive(tc.ch, tc.endpoint, tc.body)
		if !errors.Is(err, tc.err) {
			t.Errorf("%s: error %v, want %v", tc.name, err, tc.err)
		}
		if n := len(w.receipts.receipts) - before; n != tc.receipts {
			t.Errorf("%s: %d receipts, want %d", tc.name, n, tc.receipts)
		}
	}
	if n := w.count("activities"); n != 0 {
		t.Errorf("%d activities from receipts", n)
	}
}

// A status body that holds no receipt is never a success.
func TestStatusWithoutReceipt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, body := range []string{`{"text":"hi"}`, `{}`, `{"status":"melted","delivery_id":"x"}`} {
		answer, err := w.receive(w.webhook, channel.EndpointStatus, body)
		if err == nil && len(answer.Rejected) == 0 {
			t.Errorf("%s was accepted: %+v", body, answer)
		}
		if e := w.event(answer.EventID); e.State != inbound.StateFailed && e.State != inbound.StateRejected {
			t.Errorf("%s is stored as %s", body, e.State)
		}
	}
}

func TestVerify(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, ch := range []*channel.Channel{w.webhook, w.whatsapp} {
		r := w.request(ch, channel.EndpointInbound, `{"text":"hi"}`)
		must(t, w.service.Verify(r))
		r.Body = []byte(`{"text":"ho"}`)
		if err := w.service.Verify(r); !errors.Is(err, channel.ErrSignature) {
			t.Errorf("%s: changed body: %v", ch.Type, err)
		}
		r.Header = http.Header{}
		if err := w.service.Verify(r); !errors.Is(err, channel.ErrUnsigned) {
			t.Errorf("%s: unsigned: %v", ch.Type, err)
		}
	}
}

// What fails for another reason than the database's absence is tried again a few times and then failed with its reason.
func TestFailingEventEndsFailed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.receipts.err = errors.New("no such luck")
	answer, err := w.receive(w.whatsapp, channel.EndpointInbound, batch("Ada:wamid.1:Hello", "=wamid.2:read"))
	must(t, err)
	if err := w.service.Process(t.Context(), w.tenant, answer.EventID); err == nil {
		t.Fatal("the first try asked for no other")
	}
	if e := w.event(answer.EventID); e.State != inbound.StateReceived || e.Tries != 1 {
		t.Fatalf("after one try: %+v", e)
	}
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	e := w.event(answer.EventID)
	if e.State != inbound.StateFailed || !strings.Contains(e.Error, "no such luck") || w.count("activities") != 0 {
		t.Fatalf("after the last try: %+v, %d activities", e, w.count("activities"))
	}
}

func TestDatabaseGone(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r := w.request(w.webhook, channel.EndpointInbound, `{"text":"hi"}`)
	w.pool.Close()
	if _, err := w.service.Receive(t.Context(), r); !postgres.IsUnavailable(err) {
		t.Errorf("error %v, want one that says the database is unavailable", err)
	}
}

func TestDeletedChannel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	answer, err := w.receive(w.whatsapp, channel.EndpointInbound, batch("Ada:wamid.1:Hello"))
	must(t, err)
	must(t, w.channels.Delete(t.Context(), tenants.Actor{Type: tenants.ActorSystem, ID: "test"}, w.tenant, w.whatsapp.ID))
	must(t, w.service.Process(t.Context(), w.tenant, answer.EventID))
	if e := w.event(answer.EventID); e.State != inbound.StateFailed || e.Error != "the channel was deleted" {
		t.Errorf("event %+v", e)
	}
}

func TestOtherTenantFindsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	answer, err := w.receive(w.webhook, channel.EndpointInbound, `{`)
	if err == nil {
		t.Fatal("accepted")
	}
	stranger := uuid.New()
	if _, err := w.service.Get(t.Context(), stranger, answer.EventID); !errors.Is(err, inbound.ErrNotFound) {
		t.Errorf("Get: %v", err)
	}
	if _, err := w.service.Replay(t.Context(), tenants.Actor{}, stranger, answer.EventID); !errors.Is(err, inbound.ErrNotFound) {
		t.Errorf("Replay: %v", err)
	}
	must(t, w.service.Process(t.Context(), stranger, answer.EventID))
	if e := w.event(answer.EventID); e.State != inbound.StateFailed {
		t.Errorf("event %+v", e)
	}
}

func TestList(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var all []uuid.UUID
	for i := range 7 {
		answer, err := w.receive(w.webhook, channel.EndpointInbound, []string{`{"text":"hi"}`, `{`}[i%2])
		if err != nil && !errors.Is(err, inbound.ErrUnreadable) {
			t.Fatal(err)
		}
		all = append(all, answer.EventID)
	}
	slices.Reverse(all)
	var seen []uuid.UUID
	for before, more := uuid.Nil, true; more; {
		var page []inbound.Event
		var err error
		page, more, err = w.service.ListAllTenants(t.Context(), inbound.Filter{}, before, 3)
		must(t, err)
		for _, e := range page {
			seen, before = append(seen, e.ID), e.ID
		}
	}
	if !slices.Equal(seen, all) {
		t.Errorf("pages hold %v, want %v", seen, all)
	}
	failed, _, err := w.service.ListAllTenants(t.Context(), inbound.Filter{TenantID: &w.tenant, ChannelID: &w.webhook.ID, State: inbound.StateFailed}, uuid.Nil, 10)
	must(t, err)
	if len(failed) != 3 || failed[0].Size != 1 || failed[0].Body != nil {
		t.Errorf("failed events: %+v", failed)
	}
}
