package webhook

import (
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/channel/channeltest"
	"converger/internal/fault"
	"converger/internal/signature"
)

func newAdapter(t testing.TB, opts channel.GuardOptions) *Adapter {
	t.Helper()
	guard, err := channel.NewGuard(opts)
	if err != nil {
		t.Fatal(err)
	}
	a := New(guard, slog.New(slog.DiscardHandler))
	t.Cleanup(a.client.CloseIdleConnections)
	return a
}

func subject(t testing.TB) channeltest.Subject {
	return channeltest.Subject{
		Adapter: newAdapter(t, channel.GuardOptions{}),
		Config:  json.RawMessage(`{"url":"https://hooks.example.com/in","method":"PUT","headers":{"Authorization":"Bearer abc"}}`),
		Body: []byte(`[{"text":"hello","sender":"ada","type":"message","external_id":"u1","display_name":"Ada",
			"idempotency_key":"k1","conversation_id":"9b2f6c1e-0000-4000-8000-000000000001","timestamp":1796016500,
			"reply_to_id":"9b2f6c1e-0000-4000-8000-000000000002","metadata":{"n":1.5},"attachments":[{"contentType":"image/png"}]},
			{"status":"failed","delivery_id":"9b2f6c1e-0000-4000-8000-000000000003","provider_message_id":"p","error":{"a":1}}]`),
		Sign: func(h http.Header, body []byte, now time.Time) {
			if err := signature.SignTimestamped(h, body, [][]byte{[]byte(channeltest.Secret)}, now); err != nil {
				t.Fatal(err)
			}
		},
		Timed: true,
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	s := subject(t)
	t.Run("timestamped", func(t *testing.T) { channeltest.Run(t, s) })
	s.Sign = func(h http.Header, body []byte, now time.Time) {
		if err := signature.SignStandard(h, "msg_1", body, [][]byte{signature.StandardKey(channeltest.Secret)}, now); err != nil {
			t.Fatal(err)
		}
	}
	t.Run("standard", func(t *testing.T) { channeltest.Run(t, s) })
}

func FuzzParse(f *testing.F) {
	channeltest.FuzzParse(f, subject(f), []byte(`{"message":"a","from":"b"}`), []byte(`[]`), []byte(`{"status":"read","provider_message_id":"x"}`))
}

// The vector is the published one of the system that this one is compatible with.
func TestVerifyPublishedVector(t *testing.T) {
	t.Parallel()
	a, ch := newAdapter(t, channel.GuardOptions{}), &channel.Channel{Secret: "whsec_test_secret", RequireSignature: true}
	h := http.Header{"X-Converger-Signature": {"t=1700000000,v1=c8945aa2aa4e6d043cdd46907fdf4ab1d4cedd12737ea10bb6f246ed39533a8a"}}
	body := []byte(`{"id":"9b2f6c1e-0000-4000-8000-000000000001","text":"hello"}`)
	if err := a.Verify(ch, channel.Request{Header: h, Body: body, Now: time.Unix(1_700_000_000, 0)}); err != nil {
		t.Error(err)
	}
}

func TestVerifyTable(t *testing.T) {
	t.Parallel()
	a, body, now := newAdapter(t, channel.GuardOptions{}), []byte(`{"text":"hi"}`), channeltest.Now
	timestamped := func(secret string, at time.Time) http.Header {
		h := http.Header{}
		if err := signature.SignTimestamped(h, body, [][]byte{[]byte(secret)}, at); err != nil {
			t.Fatal(err)
		}
		return h
	}
	standard := func(secret string) http.Header {
		h := http.Header{}
		if err := signature.SignStandard(h, "m", body, [][]byte{signature.StandardKey(secret)}, now); err != nil {
			t.Fatal(err)
		}
		return h
	}
	legacy := func(secret string) http.Header {
		h := http.Header{}
		if err := signature.SignHubSHA256(h, body, []byte(secret)); err != nil {
			t.Fatal(err)
		}
		return http.Header{signature.HeaderTimestamped: h.Values(signature.HeaderHubSHA256)}
	}
	with := func(h http.Header, more http.Header) http.Header {
		h = h.Clone()
		for k, v := range more {
			h[k] = v
		}
		return h
	}
	const current, previous, other = "a current secret", "a previous secret", "another secret!!"
	for name, tt := range map[string]struct {
		header   http.Header
		strict   error // with require_signature
		lax      error
		overOver bool // the overlap is over
	}{
		"current, timestamped":             {header: timestamped(current, now)},
		"current, standard":                {header: standard(current)},
		"previous, timestamped":            {header: timestamped(previous, now)},
		"previous, standard":               {header: standard(previous)},
		"previous, too late":               {header: timestamped(previous, now), strict: channel.ErrSignature, lax: channel.ErrSignature, overOver: true},
		"previous, standard, too late":     {header: standard(previous), strict: channel.ErrSignature, lax: channel.ErrSignature, overOver: true},
		"other":                            {header: timestamped(other, now), strict: channel.ErrSignature, lax: channel.ErrSignature},
		"other, standard":                  {header: standard(other), strict: channel.ErrSignature, lax: channel.ErrSignature},
		"stale":                            {header: timestamped(current, now.Add(-301*time.Second)), strict: channel.ErrSignature, lax: channel.ErrSignature},
		"missing":                          {strict: channel.ErrUnsigned},
		"an id is no proof":                {header: http.Header{"Webhook-Id": {"m"}}, strict: channel.ErrUnsigned},
		"meta's header is none either":     {header: http.Header{"X-Hub-Signature-256": legacy(current).Values(signature.HeaderTimestamped)}, strict: channel.ErrUnsigned},
		"legacy":                           {header: legacy(current), strict: channel.ErrSignature},
		"legacy, previous":                 {header: legacy(previous), strict: channel.ErrSignature},
		"legacy, other":                    {header: legacy(other), strict: channel.ErrSignature, lax: channel.ErrSignature},
		"one good proof beside a bad one":  {header: with(standard(current), timestamped(other, now))},
		"one good proof beside a bad one2": {header: with(timestamped(current, now), standard(other))},
		"empty header":                     {header: http.Header{signature.HeaderTimestamped: {""}}, strict: channel.ErrSignature, lax: channel.ErrSignature},
		"empty standard header":            {header: http.Header{signature.HeaderStandardSignature: {""}}, strict: channel.ErrSignature, lax: channel.ErrSignature},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			until := now.Add(time.Minute)
			if tt.overOver {
				until = now
			}
			for required, want := range map[bool]error{true: tt.strict, false: tt.lax} {
				ch := &channel.Channel{Secret: current, PreviousSecret: previous, PreviousUntil: until, RequireSignature: required}
				if err := a.Verify(ch, channel.Request{Header: tt.header, Body: body, Now: now}); !errors.Is(err, want) || (err == nil) != (want == nil) {
					t.Errorf("require_signature %t: got %v, want %v", required, err, want)
				}
			}
		})
	}
}

func parse(t *testing.T, endpoint channel.Endpoint, id, body string) (channel.Inbound, error) {
	t.Helper()
	h := http.Header{}
	if id != "" {
		h.Set("webhook-id", id)
	}
	return (*Adapter)(nil).Parse(&channel.Channel{}, endpoint, h, []byte(body), channeltest.Now)
}

func TestParse(t *testing.T) {
	t.Parallel()
	id := uuid.MustParse("9b2f6c1e-0000-4000-8000-000000000001")
	at := channeltest.Now
	hi := channel.Message{Sender: "external", Type: "message", Text: "hi", At: at}
	with := func(change func(*channel.Message)) channel.Message {
		m := hi
		change(&m)
		return m
	}
	messages := func(m ...channel.Message) channel.Inbound { return channel.Inbound{Messages: m} }
	receipts := func(r ...channel.Receipt) channel.Inbound { return channel.Inbound{Receipts: r} }
	rejected := func(pointer, code, detail string) channel.Inbound {
		return channel.Inbound{Rejected: []channel.Rejected{{Err: fault.Invalidf(pointer, code, "%s", detail)}}}
	}
	for name, tt := range map[string]struct {
		endpoint channel.Endpoint
		id, body string
		want     channel.Inbound
	}{
		"text":                      {body: `{"text":"hi"}`, want: messages(hi)},
		"alias message":             {body: `{"message":"hi"}`, want: messages(hi)},
		"alias body":                {body: `{"body":"hi"}`, want: messages(hi)},
		"text before its aliases":   {body: `{"body":"b","message":"m","text":"hi"}`, want: messages(hi)},
		"null is absent":            {body: `{"text":null,"message":"hi","metadata":null,"external_id":null}`, want: messages(hi)},
		"alias from":                {body: `{"text":"hi","from":"ada"}`, want: messages(with(func(m *channel.Message) { m.Sender = "ada" }))},
		"unknown members":           {body: `{"text":"hi","hologram":{"x":[1,2]}}`, want: messages(hi)},
		"half a pair and a NUL":     {body: `{"text":"\ud83d|\u0000|\udE0A"}`, want: messages(with(func(m *channel.Message) { m.Text = "\uFFFD|\uFFFD|\uFFFD" }))},
		"a pair":                    {body: `{"text":"\ud83d\ude0a"}`, want: messages(with(func(m *channel.Message) { m.Text = "\U0001f60a" }))},
		"key":                       {id: "req", body: `{"text":"hi","idempotency_key":"k"}`, want: messages(with(func(m *channel.Message) { m.ProviderID = "key:k" }))},
		"webhook-id":                {id: "req", body: `{"text":"hi"}`, want: messages(with(func(m *channel.Message) { m.ProviderID = "webhook-id:req" }))},
		"numbers keep their digits": {body: `{"text":"hi","metadata":{"n":12345678901234567890.10}}`, want: messages(with(func(m *channel.Message) { m.Metadata = map[string]any{"n": json.Number("12345678901234567890.10")} }))},
		"attachments without a text": {body: `{"attachments":[{"contentType":"a/b","n":1.0}]}`, want: messages(with(func(m *channel.Message) {
			m.Text, m.Attachments = "", []json.RawMessage{json.RawMessage(`{"contentType":"a/b","n":1.0}`)}
		}))},
		"an event needs no text": {body: `{"type":"event"}`, want: messages(with(func(m *channel.Message) { m.Text, m.Type = "", "event" }))},
		"participant": {body: `{"text":"hi","external_id":"u1","display_name":"Ada","reply_to_provider_id":"p"}`, want: messages(with(func(m *channel.Message) {
			m.Participant = &channel.Participant{Identities: []channel.Identity{{Kind: "external_id", Value: "u1"}}, DisplayName: "Ada"}
			m.ReplyToProviderID = "p"
		}))},
		"ids":               {body: `{"text":"hi","conversation_id":"` + id.String() + `","reply_to_id":"` + id.String() + `"}`, want: messages(with(func(m *channel.Message) { m.ConversationID, m.ReplyToID = &id, &id }))},
		"seconds":           {body: `{"text":"hi","timestamp":1796016500}`, want: messages(with(func(m *channel.Message) { m.At = at.Add(-100 * time.Second) }))},
		"an unusable time":  {body: `{"text":"hi","timestamp":"soon"}`, want: messages(hi)},
		"a time to come":    {body: `{"text":"hi","timestamp":1996016500}`, want: messages(hi)},
		"status alone":      {body: `{"text":"hi","status":"busy"}`, want: messages(hi)},
		"empty batch":       {body: `[]`},
		"no text":           {body: `{"text":""}`, want: rejected("/text", fault.Required, "Inbound message has no text and no attachments")},
		"a number as text":  {body: `{"text":5}`, want: rejected("/text", fault.InvalidType, "must be a string")},
		"no UUID":           {body: `{"text":"hi","conversation_id":"urn:uuid:9b2f6c1e-0000-4000-8000-000000000001"}`, want: rejected("/conversation_id", fault.Malformed, "must be a UUID")},
		"receipt":           {body: `{"status":"read","provider_message_id":"p","timestamp":"2026-11-30T05:28:20Z"}`, want: receipts(channel.Receipt{ProviderID: "p", Status: "read", At: at.Add(-100 * time.Second)})},
		"receipt by ours":   {body: `{"status":"failed","delivery_id":"` + id.String() + `","error":"no such user"}`, want: receipts(channel.Receipt{DeliveryID: &id, Status: "failed", At: at, Error: "no such user"})},
		"receipt at status": {endpoint: channel.EndpointStatus, body: `[{"status":"sent","provider_message_id":"p","timestamp":"1796016500"}]`, want: receipts(channel.Receipt{ProviderID: "p", Status: "sent", At: at.Add(-100 * time.Second)})},
		"unknown status":    {body: `{"status":"lost","delivery_id":"` + id.String() + `"}`, want: rejected("/status", fault.UnknownValue, "must be sent, delivered, read or failed")},
		"no receipt":        {endpoint: channel.EndpointStatus, body: `{"status":"read"}`, want: rejected("/delivery_id", fault.Required, "is required, or provider_message_id")},
		"a batch harms nobody": {id: "req", body: `[{"text":"hi"},7,{"text":[]},{"message":"hi","idempotency_key":"k"}]`, want: channel.Inbound{
			Messages: []channel.Message{
				with(func(m *channel.Message) { m.ProviderID = "webhook-id:req:0" }),
				with(func(m *channel.Message) { m.ProviderID, m.Index = "key:k", 3 }),
			},
			Rejected: []channel.Rejected{
				{Index: 1, Err: fault.Invalidf("/1", fault.InvalidType, "must be an object")},
				{Index: 2, ID: "webhook-id:req:2", Err: fault.Invalidf("/2/text", fault.InvalidType, "must be a string")},
			},
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if tt.endpoint == "" {
				tt.endpoint = channel.EndpointInbound
			}
			got, err := parse(t, tt.endpoint, tt.id, tt.body)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("two equal bodies are two messages", func(t *testing.T) {
		t.Parallel()
		got, err := parse(t, channel.EndpointInbound, "", `[{"text":"hi"},{"text":"hi"}]`)
		if err != nil || len(got.Messages) != 2 || got.Messages[0].ProviderID != "" {
			t.Errorf("got %+v, %v", got, err)
		}
	})
	t.Run("all faults of an item", func(t *testing.T) {
		t.Parallel()
		got, err := parse(t, channel.EndpointInbound, "", `{"text":1,"sender":"","external_id":[],"metadata":"x","attachments":[1]}`)
		if err != nil || len(got.Rejected) != 1 || len(got.Rejected[0].Err.Fields) != 5 {
			t.Errorf("got %+v, %v; want one item with five faults", got, err)
		}
	})
	t.Run("bad webhook-id", func(t *testing.T) {
		t.Parallel()
		var parseErr *channel.ParseError
		if _, err := parse(t, channel.EndpointInbound, "a b", `{"text":"hi"}`); !errors.As(err, &parseErr) {
			t.Errorf("got %v, want a *ParseError", err)
		}
	})
}

func TestValidate(t *testing.T) {
	t.Parallel()
	a := newAdapter(t, channel.GuardOptions{})
	for config, want := range map[string][]string{
		`{}`:                                        nil,
		`{"url":"http://example.com"}`:              nil,
		`{"url":"http://127.0.0.1/"}`:               {"/url malformed"},
		`{"url":"ftp://example.com"}`:               {"/url malformed"},
		`{"method":"GET"}`:                          {"/method unknown_value"},
		`{"method":"post"}`:                         {"/method unknown_value"},
		`{"headers":{"Host":"x"}}`:                  {"/headers/Host conflict"},
		`{"headers":{"X-Converger-Signature":"x"}}`: {"/headers/X-Converger-Signature conflict"},
		`{"headers":{"webhook-id":"x","Proxy-Authorization":"x"}}`:      {"/headers/Proxy-Authorization conflict", "/headers/webhook-id conflict"},
		`{"headers":{"A B":"x","":"y"}}`:                                {"/headers/ malformed", "/headers/A B malformed"},
		`{"headers":{"X-A":"a\r\nX-B: c"}}`:                             {"/headers/X-A malformed"},
		`{"headers":{"X-A":"é"}}`:                                       {"/headers/X-A malformed"},
		`{"headers":{"X-A":"1","x-a":"2"}}`:                             {"/headers/x-a conflict"},
		`{"headers":{"X-A":1}}`:                                         {"/headers/X-A invalid_type"},
		`{"headers":{"X-A":"[redacted]"}}`:                              {"/headers/X-A malformed"},
		`{"method":"GET","url":"http://[::1]/","headers":{"Host":"x"}}`: {"/url malformed", "/method unknown_value", "/headers/Host conflict"},
	} {
		var got []string
		for _, f := range a.Validate(json.RawMessage(config), true) {
			got = append(got, f.Pointer+" "+f.Code)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", config, diff)
		}
	}
}
