package whatsappmeta

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/channel/channeltest"
	"converger/internal/signature"
)

const (
	appSecret = "app-secret-for-tests"
	ourNumber = "106540352242922"
	ada       = `{"profile":{"name":"Ada Example"},"wa_id":"16505550123","user_id":"US.10020030040050060070"}`
	bo        = `{"profile":{"name":"Bo","username":"bo.sample"},"user_id":"DE.90080070060050040030"}`
)

func newAdapter() *Adapter { return New(slog.New(slog.DiscardHandler)) }

// change wraps the inside of a change's value ("messages":[...]) for our number.
func change(inside string) string {
	return `{"field":"messages","value":{"messaging_product":"whatsapp","metadata":{"display_phone_number":"15550783881","phone_number_id":"` +
		ourNumber + `"}` + inside + `}}`
}

func body(changes ...string) string {
	return `{"object":"whatsapp_business_account","entry":[{"id":"102290129340398","changes":[` + strings.Join(changes, ",") + `]}]}`
}

// message wraps the inside of a message from Ada.
func message(id, inside string) string {
	return `{"from":"16505550123","from_user_id":"US.10020030040050060070","id":"` + id + `","timestamp":"1796016500",` + inside + `}`
}

func subject(t testing.TB) channeltest.Subject {
	return channeltest.Subject{
		Adapter: newAdapter(),
		Config:  json.RawMessage(`{"phone_number_id":"` + ourNumber + `","verify_token":"let me in","app_secret":"` + appSecret + `","graph_api_version":"v26.0"}`),
		Body: []byte(body(change(`,"contacts":[` + ada + `],"messages":[
			` + message("m1", `"type":"text","text":{"body":"hi"},"context":{"id":"m0","forwarded":true}`) + `,
			` + message("m2", `"type":"image","image":{"id":"1003","mime_type":"image/jpeg","sha256":"kW0=","caption":"c"}`) + `,
			` + message("m3", `"type":"location","location":{"latitude":1.5,"longitude":2,"name":"n"}`) + `,
			` + message("m4", `"type":"contacts","contacts":[{"name":{"formatted_name":"C"},"phones":[{"phone":"+1"}]}]`) + `,
			` + message("m5", `"type":"interactive","interactive":{"type":"list_reply","list_reply":{"id":"i","title":"t"}}`) + `,
			` + message("m6", `"type":"reaction","reaction":{"message_id":"m1","emoji":"x"}`) + `,
			` + message("m7", `"type":"system","system":{"body":"b","wa_id":"2"}`) + `],
			"statuses":[{"id":"s1","status":"failed","timestamp":"1796016501","biz_opaque_callback_data":"x",
				"errors":[{"code":1,"title":"t","error_data":{"details":"d"}}]}]`))),
		Sign: func(h http.Header, body []byte, _ time.Time) {
			if err := signature.SignHubSHA256(h, body, []byte(appSecret)); err != nil {
				t.Fatal(err)
			}
		},
	}
}

func TestConformance(t *testing.T) {
	t.Parallel()
	channeltest.Run(t, subject(t))
}

func FuzzParse(f *testing.F) {
	channeltest.FuzzParse(f, subject(f), []byte(`{"entry":[{"changes":[{"field":"messages","value":7},3]},null]}`), []byte(`{"object":"x"}`))
}

// The vectors were computed apart from this code, with escapes as Meta sends them.
func TestVerifyVectors(t *testing.T) {
	t.Parallel()
	ch := subject(t).Channel()
	for body, sum := range map[string]string{
		`{"object":"whatsapp_business_account","entry":[]}`: "1ca363dab318df784e1963b29dca91e2098e6cf2fbf0d3c14e09580a90684a61",
		`{"text":"Gr\u00fc\u00dfe"}`:                        "301ac3c75567a8a1245f7a847c99645f6c8b72854af90a2710c9c46b763363bf",
		`{"text":"Grüße"}`:                                  "a75b010603d02bbfe5480ee1bcfa5ebe92b717ad95b4276f2c72f901aa471ba6",
	} {
		if err := newAdapter().Verify(ch, channel.Request{Header: http.Header{"X-Hub-Signature-256": {"sha256=" + sum}}, Body: []byte(body), Now: channeltest.Now}); err != nil {
			t.Errorf("%s: %v", body, err)
		}
	}
}

func TestVerifyTable(t *testing.T) {
	t.Parallel()
	text := []byte(`{"entry":[]}`)
	signed := func(secret string) http.Header {
		h := http.Header{}
		if err := signature.SignHubSHA256(h, text, []byte(secret)); err != nil {
			t.Fatal(err)
		}
		return h
	}
	generic := http.Header{}
	if err := signature.SignTimestamped(generic, text, [][]byte{[]byte(channeltest.Secret)}, channeltest.Now); err != nil {
		t.Fatal(err)
	}
	twice := signed(appSecret)
	twice.Add(signature.HeaderHubSHA256, "sha256="+strings.Repeat("0", 64))
	for name, tt := range map[string]struct {
		config      string
		header      http.Header
		strict, lax error
	}{
		"current":                    {`{"app_secret":"` + appSecret + `"}`, signed(appSecret), nil, nil},
		"previous":                   {`{"app_secret":"new","previous_app_secret":"` + appSecret + `"}`, signed(appSecret), nil, nil},
		"another":                    {`{"app_secret":"new"}`, signed(appSecret), channel.ErrSignature, channel.ErrSignature},
		"the channel's own secret":   {`{"app_secret":"new"}`, signed(channeltest.Secret), channel.ErrSignature, channel.ErrSignature},
		"missing":                    {`{"app_secret":"new"}`, nil, channel.ErrUnsigned, nil},
		"the generic scheme":         {`{"app_secret":"new"}`, generic, channel.ErrUnsigned, nil},
		"twice":                      {`{"app_secret":"` + appSecret + `"}`, twice, channel.ErrSignature, channel.ErrSignature},
		"no app_secret":              {`{}`, signed(appSecret), channel.ErrUnsigned, nil},
		"no app_secret, empty key":   {`{"app_secret":""}`, signed(appSecret), channel.ErrUnsigned, nil},
		"no app_secret, no header":   {`{}`, nil, channel.ErrUnsigned, nil},
		"upper-case digits are fine": {`{"app_secret":"` + appSecret + `"}`, http.Header{signature.HeaderHubSHA256: {"sha256=" + strings.ToUpper(strings.TrimPrefix(signed(appSecret).Get(signature.HeaderHubSHA256), "sha256="))}}, nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for required, want := range map[bool]error{true: tt.strict, false: tt.lax} {
				ch := &channel.Channel{Config: json.RawMessage(tt.config), Secret: channeltest.Secret, RequireSignature: required}
				if err := newAdapter().Verify(ch, channel.Request{Header: tt.header, Body: text, Now: channeltest.Now}); !errors.Is(err, want) || (err == nil) != (want == nil) {
					t.Errorf("require_signature %t: got %v, want %v", required, err, want)
				}
			}
		})
	}
}

func TestSubscribe(t *testing.T) {
	t.Parallel()
	ch := subject(t).Channel()
	good := "hub.mode=subscribe&hub.verify_token=let+me+in&hub.challenge=1158201444"
	for query, want := range map[string]string{
		good:                                    "1158201444",
		"hub.verify_token=let+me+in":            "",
		strings.Replace(good, "let+me", "x", 1): "",
		strings.Replace(good, "let+me+in", "", 1):                       "",
		strings.Replace(good, "subscribe", "unsubscribe", 1):            "",
		strings.Replace(good, "hub.mode=subscribe&", "", 1):             "",
		strings.Replace(good, "1158201444", "", 1):                      "",
		strings.Replace(good, "1158201444", "abc%3Cscript%3E", 1):       "",
		strings.Replace(good, "1158201444", "12%0a34", 1):               "",
		strings.Replace(good, "1158201444", "-1", 1):                    "",
		strings.Replace(good, "1158201444", strings.Repeat("1", 65), 1): "",
		good + "&hub.verify_token=x":                                    "",
		"hub.verify_token=x&" + good:                                    "",
		good + "&hub.challenge=2":                                       "",
		"":                                                              "",
	} {
		values, err := url.ParseQuery(query)
		if err != nil {
			t.Fatal(err)
		}
		got, err := newAdapter().Subscribe(ch, values)
		if got != want || (want == "") != errors.Is(err, channel.ErrForbidden) || err != nil && strings.Contains(err.Error(), "let me in") {
			t.Errorf("%s: got %q and %v, want %q", query, got, err, want)
		}
	}
	if _, err := newAdapter().Subscribe(&channel.Channel{Config: json.RawMessage(`{}`)}, url.Values{"hub.mode": {"subscribe"}, "hub.challenge": {"1"}}); !errors.Is(err, channel.ErrForbidden) {
		t.Errorf("a channel without a token: %v", err)
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		config string
		signed bool
		want   []string
	}{
		{`{"phone_number_id":"1","verify_token":"t","app_secret":"s"}`, true, nil},
		{`{"phone_number_id":"1","verify_token":"t"}`, false, nil},
		{`{}`, true, []string{"/phone_number_id required", "/verify_token required", "/app_secret required"}},
		{`{"phone_number_id":"1","verify_token":"t","app_secret":""}`, true, []string{"/app_secret required"}},
		{`{"phone_number_id":"+49 1","verify_token":"t"}`, false, []string{"/phone_number_id malformed"}},
		{`{"phone_number_id":1,"verify_token":" ","x":1}`, false, []string{"/phone_number_id invalid_type", "/verify_token required", "/x unknown_member"}},
		{`{"phone_number_id":"1","verify_token":"t","graph_api_version":"26.0"}`, false, []string{"/graph_api_version malformed"}},
		{`{"phone_number_id":"1","verify_token":"t","graph_api_version":"v26"}`, false, []string{"/graph_api_version malformed"}},
		{`{"phone_number_id":"1","verify_token":"t","graph_api_version":"v26.0/../x"}`, false, []string{"/graph_api_version malformed"}},
	} {
		var got []string
		for _, f := range newAdapter().Validate(json.RawMessage(tt.config), tt.signed) {
			got = append(got, f.Pointer+" "+f.Code)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.config, diff)
		}
	}
}

func parse(t *testing.T, body string) channel.Inbound {
	t.Helper()
	in, err := newAdapter().Parse(subject(t).Channel(), channel.EndpointInbound, nil, []byte(body), channeltest.Now)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func TestParseMessages(t *testing.T) {
	t.Parallel()
	adaIs := func() *channel.Participant {
		return &channel.Participant{DisplayName: "Ada Example", Identities: []channel.Identity{
			{Kind: channel.IdentityUserID, Value: "US.10020030040050060070"}, {Kind: channel.IdentityPhone, Value: "16505550123"}}}
	}
	// want is a message from Ada of a kind, changed as the case says.
	want := func(kind string, change func(*channel.Message)) channel.Message {
		m := channel.Message{
			ProviderID: "wamid.1", Participant: adaIs(), Sender: "US.10020030040050060070", Type: "message",
			Metadata: map[string]any{"whatsapp_message_id": "wamid.1", "whatsapp_type": kind, "timestamp": "1796016500",
				"phone_number_id": ourNumber, "profile_name": "Ada Example"},
			At: time.Unix(1796016500, 0).UTC(),
		}
		change(&m)
		return m
	}
	attachment := func(text string) []json.RawMessage { return []json.RawMessage{json.RawMessage(text)} }
	for name, tt := range map[string]struct {
		inside string
		want   channel.Message
	}{
		"text": {`"type":"text","text":{"body":"Is the \ud83c\udf70 shop open?\u0000"}`,
			want("text", func(m *channel.Message) { m.Text = "Is the \U0001f370 shop open?\uFFFD" })},
		"reply, forwarded": {`"type":"text","text":{"body":"yes"},"context":{"from":"15550783881","id":"wamid.0","frequently_forwarded":true}`,
			want("text", func(m *channel.Message) {
				m.Text, m.ReplyToProviderID = "yes", "wamid.0"
				m.Metadata["reply_to"], m.Metadata["forwarded"] = "wamid.0", true
			})},
		"image": {`"type":"image","image":{"caption":"the label","mime_type":"image/jpeg","sha256":"kW0=","id":"1003383421387256","url":"https://lookaside.example/?asset"}`,
			want("image", func(m *channel.Message) {
				m.Text = "the label"
				m.Attachments = attachment(`{"channelData":{"providerMediaId":"1003383421387256","sha256":"kW0="},"contentType":"image/jpeg"}`)
			})},
		"voice": {`"type":"audio","audio":{"mime_type":"audio/ogg; codecs=opus","id":"1","voice":true}`,
			want("audio", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"providerMediaId":"1","voice":true},"contentType":"audio/ogg; codecs=opus"}`)
			})},
		"document": {`"type":"document","document":{"filename":"a.pdf","mime_type":"application/pdf","id":"1"}`,
			want("document", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"providerMediaId":"1"},"contentType":"application/pdf","name":"a.pdf"}`)
			})},
		"sticker without a type": {`"type":"sticker","sticker":{"animated":false,"id":"1"}`,
			want("sticker", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"animated":false,"providerMediaId":"1"},"contentType":"application/octet-stream"}`)
			})},
		"location": {`"type":"location","location":{"latitude":37.483307,"longitude":-122.148981,"name":"Shop","address":"1 Way"}`,
			want("location", func(m *channel.Message) {
				m.Attachments = attachment(`{"content":{"address":"1 Way","latitude":37.483307,"longitude":-122.148981,"name":"Shop"},"contentType":"application/vnd.converger.location"}`)
			})},
		"contacts": {`"type":"contacts","contacts":[{"name":{"formatted_name":"Bo"},"phones":[{"phone":"+49 1","wa_id":"491"},{"wa_id":"492"}]},7,{"name":{"formatted_name":"Cy"}}]`,
			want("contacts", func(m *channel.Message) {
				m.Attachments = attachment(`{"content":[{"name":"Bo","phones":["+49 1","492"]},{"name":"Cy","phones":[]}],"contentType":"application/vnd.converger.contacts"}`)
			})},
		"button": {`"type":"button","button":{"payload":"NO","text":"No, thanks"}`,
			want("button", func(m *channel.Message) {
				m.Text = "No, thanks"
				m.Metadata["interactive_reply"] = map[string]any{"type": "button", "id": "NO", "title": "No, thanks"}
			})},
		"button reply": {`"type":"interactive","interactive":{"type":"button_reply","button_reply":{"id":"b1","title":"Yes"}}`,
			want("interactive", func(m *channel.Message) {
				m.Text = "Yes"
				m.Metadata["interactive_reply"] = map[string]any{"type": "button_reply", "id": "b1", "title": "Yes"}
			})},
		"list reply": {`"type":"interactive","interactive":{"type":"list_reply","list_reply":{"id":"l1","title":"Two","description":"the second"}}`,
			want("interactive", func(m *channel.Message) {
				m.Text = "Two"
				m.Metadata["interactive_reply"] = map[string]any{"type": "list_reply", "id": "l1", "title": "Two", "description": "the second"}
			})},
		"form": {`"type":"interactive","interactive":{"type":"nfm_reply","nfm_reply":{"name":"flow","body":"Sent","response_json":"{}"}}`,
			want("interactive", func(m *channel.Message) {
				m.Text = "Sent"
				m.Metadata["interactive_reply"] = map[string]any{"type": "nfm_reply", "name": "flow", "body": "Sent", "response_json": "{}"}
			})},
		"reaction": {`"type":"reaction","reaction":{"message_id":"wamid.0","emoji":"\ud83d\ude00"}`,
			want("reaction", func(m *channel.Message) {
				m.Type, m.Text, m.ReplyToProviderID = "messageReaction", "\U0001f600", "wamid.0"
			})},
		"reaction taken back": {`"type":"reaction","reaction":{"message_id":"wamid.0"}`,
			want("reaction", func(m *channel.Message) { m.Type, m.ReplyToProviderID = "messageReaction", "wamid.0" })},
		"order": {`"type":"order","order":{"catalog_id":"c","text":"two, please","product_items":[]}`,
			want("order", func(m *channel.Message) {
				m.Type, m.Text = "event", "two, please"
				m.Metadata["order"] = map[string]any{"catalog_id": "c", "text": "two, please", "product_items": []any{}}
			})},
		"a new number": {`"type":"system","system":{"body":"Ada changed her number","wa_id":"16505550199","type":"user_changed_number"}`,
			want("system", func(m *channel.Message) {
				m.Type, m.Text = "event", "Ada changed her number"
				m.Metadata["system"] = map[string]any{"body": "Ada changed her number", "wa_id": "16505550199", "type": "user_changed_number"}
				m.Participant.Identities = append(m.Participant.Identities, channel.Identity{Kind: channel.IdentityPhone, Value: "16505550199"})
			})},
		"a kind to come": {`"type":"hologram","hologram":{"x":[1.0]}`,
			want("hologram", func(m *channel.Message) {
				m.Type, m.Text = "event", "unsupported type hologram"
				m.Metadata["unsupported"] = map[string]any{"from": "16505550123", "from_user_id": "US.10020030040050060070", "id": "wamid.1",
					"timestamp": "1796016500", "type": "hologram", "hologram": map[string]any{"x": []any{json.Number("1.0")}}}
			})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := parse(t, body(change(`,"contacts":[`+bo+`,`+ada+`],"messages":[`+message("wamid.1", tt.inside)+`]`)))
			if diff := cmp.Diff(channel.Inbound{Messages: []channel.Message{tt.want}}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseParticipants(t *testing.T) {
	t.Parallel()
	userID := func(v string) channel.Identity { return channel.Identity{Kind: channel.IdentityUserID, Value: v} }
	phone := func(v string) channel.Identity { return channel.Identity{Kind: channel.IdentityPhone, Value: v} }
	for name, tt := range map[string]struct {
		contacts, from string
		want           *channel.Participant
	}{
		"phone only, as before user ids": {`{"profile":{"name":"Cy"},"wa_id":"1"}`, `"from":"1"`,
			&channel.Participant{Identities: []channel.Identity{phone("1")}, DisplayName: "Cy"}},
		"the contact knows the user id": {`{"wa_id":"1","user_id":"US.1"}`, `"from":"1"`,
			&channel.Participant{Identities: []channel.Identity{userID("US.1"), phone("1")}}},
		"no phone": {bo, `"from_user_id":"DE.90080070060050040030"`,
			&channel.Participant{Identities: []channel.Identity{userID("DE.90080070060050040030")}, DisplayName: "Bo", Metadata: map[string]any{"username": "bo.sample"}}},
		"a user name is a name": {`{"profile":{"username":"cy"},"user_id":"US.1"}`, `"from_user_id":"US.1"`,
			&channel.Participant{Identities: []channel.Identity{userID("US.1")}, DisplayName: "cy", Metadata: map[string]any{"username": "cy"}}},
		"the contact is somebody else": {ada, `"from":"1"`, &channel.Participant{Identities: []channel.Identity{phone("1")}}},
		"the contact's number differs": {`{"wa_id":"5215512345678","user_id":"MX.1"}`, `"from":"525512345678","from_user_id":"MX.1"`,
			&channel.Participant{Identities: []channel.Identity{userID("MX.1"), phone("525512345678"), phone("5215512345678")}}},
		"contacts of the wrong type": {`7,null,{"profile":"x","wa_id":[]}`, `"from":"1"`, &channel.Participant{Identities: []channel.Identity{phone("1")}}},
		"a number that is a number":  {`{"wa_id":1,"profile":{"name":"Cy"}}`, `"from":1`, &channel.Participant{Identities: []channel.Identity{phone("1")}, DisplayName: "Cy"}},
		"a long name": {`{"wa_id":"1","profile":{"name":"` + strings.Repeat("é", 300) + `"}}`, `"from":"1"`,
			&channel.Participant{Identities: []channel.Identity{phone("1")}, DisplayName: strings.Repeat("é", 255)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := parse(t, body(change(`,"contacts":[`+tt.contacts+`],"messages":[{`+tt.from+`,"id":"m","type":"text","text":{"body":"hi"}}]`)))
			if len(got.Messages) != 1 {
				t.Fatalf("got %+v", got)
			}
			if diff := cmp.Diff(tt.want, got.Messages[0].Participant); diff != "" {
				t.Error(diff)
			}
			if got.Messages[0].Sender != tt.want.ExternalID() {
				t.Errorf("sender %q", got.Messages[0].Sender)
			}
		})
	}
}

func TestParseStatuses(t *testing.T) {
	t.Parallel()
	delivery := uuid.MustParse("01930000-0000-7000-8000-00000000000d")
	for inside, want := range map[string]channel.Receipt{
		`"status":"sent"`:      {Status: "sent"},
		`"status":"delivered"`: {Status: "delivered"},
		`"status":"read"`:      {Status: "read"},
		`"status":"played"`:    {Status: "read"},
		`"status":"hologram"`:  {Status: "sent"},
		`"status":"delivered","biz_opaque_callback_data":"dlv_` + delivery.String() + `"`: {Status: "delivered", DeliveryID: &delivery},
		`"status":"delivered","biz_opaque_callback_data":"` + delivery.String() + `"`:     {Status: "delivered", DeliveryID: &delivery},
		`"status":"delivered","biz_opaque_callback_data":"dlv_01J9ZK2A"`:                  {Status: "delivered"},
		`"status":"failed"`:                            {Status: "failed", Error: "no reason given"},
		`"status":"failed","errors":[]`:                {Status: "failed", Error: "no reason given"},
		`"status":"failed","errors":7`:                 {Status: "failed", Error: "no reason given"},
		`"status":"failed","errors":[{}]`:              {Status: "failed", Error: "no reason given"},
		`"status":"failed","errors":[{"code":131047}]`: {Status: "failed", Error: "131047 no reason given"},
		`"status":"failed","errors":[{"code":131047,"title":"Re-engagement message","message":"Re-engagement message","error_data":{"details":"More than 24 hours have passed."}}]`: {Status: "failed", Error: "131047 Re-engagement message: More than 24 hours have passed."},
		`"status":"failed","errors":[{"code":1,"message":"one"},{"code":2,"error_data":{"details":"two"}}]`:                                                                         {Status: "failed", Error: "1 one; 2 two"},
		`"status":"delivered","errors":[{"code":1}]`: {Status: "delivered"},
	} {
		t.Run(inside, func(t *testing.T) {
			t.Parallel()
			want.ProviderID, want.At = "wamid.s", time.Unix(1796016500, 0).UTC()
			got := parse(t, body(change(`,"statuses":[{"id":"wamid.s","timestamp":"1796016500","recipient_id":"1",`+inside+`}]`)))
			if diff := cmp.Diff(channel.Inbound{Receipts: []channel.Receipt{want}}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Two entries of two changes with two messages and two statuses each, and another number's change between them.
func TestParseWholeBatch(t *testing.T) {
	t.Parallel()
	n := 0
	one := func() string {
		n++
		return change(fmt.Sprintf(`,"contacts":[%s],"messages":[%s,%s],"statuses":[{"id":"s%da","status":"sent"},{"id":"s%db","status":"read"}]`,
			ada, message(fmt.Sprintf("m%da", n), `"type":"text","text":{"body":"hi"}`), message(fmt.Sprintf("m%db", n), `"type":"text","text":{"body":"hi"}`), n, n))
	}
	foreign := strings.ReplaceAll(change(`,"messages":[`+message("x", `"type":"text","text":{"body":"hi"}`)+`],"statuses":[{"id":"y","status":"sent"}]`), ourNumber, "999")
	template := `{"field":"message_template_status_update","value":{"event":"APPROVED"}}`
	entry := func(changes ...string) string { return `{"id":"waba","changes":[` + strings.Join(changes, ",") + `]}` }
	got := parse(t, `{"entry":[`+entry(one(), foreign, one())+`,`+entry(one(), template, one())+`]}`)
	if len(got.Messages) != 8 || len(got.Receipts) != 8 || len(got.Rejected) != 0 {
		t.Fatalf("%d messages, %d receipts, %d rejected; want 8, 8, 0", len(got.Messages), len(got.Receipts), len(got.Rejected))
	}
	ids := map[string]bool{}
	for _, m := range got.Messages {
		ids[m.ProviderID] = true
	}
	for _, r := range got.Receipts {
		ids[r.ProviderID] = true
	}
	if len(ids) != 16 {
		t.Errorf("%d different ids, want 16", len(ids))
	}
	const another = "for another phone_number_id than the channel's"
	if diff := cmp.Diff([]channel.Ignored{{Kind: "message", ID: "x", Reason: another}, {Kind: "status", ID: "y", Reason: another},
		{Kind: "message_template_status_update", ID: "waba", Reason: "not about messages"}}, got.Ignored); diff != "" {
		t.Error(diff)
	}
}

// Each broken item is rejected alone: the good ones around it live.
func TestParseBrokenItems(t *testing.T) {
	t.Parallel()
	first, last := message("first", `"type":"text","text":{"body":"hi"}`), message("last", `"type":"text","text":{"body":"hi"}`)
	for broken, want := range map[string]string{
		`"a string"`:                  "/entry/0/changes/0/value/messages/1 invalid_type",
		`null`:                        "/entry/0/changes/0/value/messages/1 invalid_type",
		`[]`:                          "/entry/0/changes/0/value/messages/1 invalid_type",
		`{}`:                          "/entry/0/changes/0/value/messages/1/id required",
		`{"id":"x"}`:                  "/entry/0/changes/0/value/messages/1/from required",
		`{"id":{},"from":"1"}`:        "/entry/0/changes/0/value/messages/1/id required",
		message("x", `"type":"text"`): "/entry/0/changes/0/value/messages/1/text/body required",
		message("x", `"type":"text","text":"hi"`):                               "/entry/0/changes/0/value/messages/1/text/body required",
		message("x", `"type":"text","text":{"body":7}`):                         "/entry/0/changes/0/value/messages/1/text/body required",
		message("x", `"type":"image","image":{}`):                               "/entry/0/changes/0/value/messages/1/image/id required",
		message("x", `"type":"location","location":{"latitude":"1"}`):           "/entry/0/changes/0/value/messages/1/location required",
		message("x", `"type":"contacts","contacts":[]`):                         "/entry/0/changes/0/value/messages/1/contacts required",
		message("x", `"type":"reaction","reaction":{}`):                         "/entry/0/changes/0/value/messages/1/reaction/message_id required",
		message("x", `"type":"interactive","interactive":{"type":"x"}`):         "/entry/0/changes/0/value/messages/1/interactive required",
		message(strings.Repeat("x", 513), `"type":"text","text":{"body":"hi"}`): "/entry/0/changes/0/value/messages/1/id too_long",
	} {
		t.Run(broken, func(t *testing.T) {
			t.Parallel()
			got := parse(t, body(change(`,"messages":[`+first+`,`+broken+`,`+last+`]`)))
			if len(got.Messages) != 2 || got.Messages[0].Index != 0 || got.Messages[1].Index != 2 {
				t.Errorf("messages %+v", got.Messages)
			}
			if len(got.Rejected) != 1 || got.Rejected[0].Index != 1 || got.Rejected[0].Err.Fields[0].Pointer+" "+got.Rejected[0].Err.Fields[0].Code != want {
				t.Errorf("rejected %+v, want %s", got.Rejected, want)
			}
		})
	}
	t.Run("lists of other types", func(t *testing.T) {
		t.Parallel()
		got := parse(t, `{"entry":[7,{"changes":{}},{"changes":[null,{"field":"messages","value":"x"},`+change(`,"messages":"x","statuses":null,"errors":[{"code":1,"title":"t"}]`)+`,`+change(`,"messages":[`+first+`]`)+`]},{}]}`)
		var pointers []string
		for _, r := range got.Rejected {
			pointers = append(pointers, r.Err.Fields[0].Pointer)
		}
		if diff := cmp.Diff([]string{"/entry/0", "/entry/1/changes", "/entry/2/changes/0", "/entry/2/changes/1/value", "/entry/2/changes/2/value/messages"}, pointers); diff != "" {
			t.Error(diff)
		}
		if len(got.Messages) != 1 || len(got.Ignored) != 1 || got.Ignored[0].Reason != "1 t" {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("nothing in it", func(t *testing.T) {
		t.Parallel()
		for _, text := range []string{`{"entry":[]}`, body(), body(change("")), body(change(`,"messages":[],"statuses":[]`))} {
			if diff := cmp.Diff(channel.Inbound{}, parse(t, text)); diff != "" {
				t.Errorf("%s: %s", text, diff)
			}
		}
		if got := parse(t, `{"object":"x"}`); len(got.Ignored) != 1 {
			t.Errorf("no entry: %+v", got)
		}
	})
	t.Run("too much in it", func(t *testing.T) {
		t.Parallel()
		var parseErr *channel.ParseError
		text := body(change(`,"messages":[` + strings.Repeat("0,", 10_000) + `0]`))
		if _, err := newAdapter().Parse(subject(t).Channel(), channel.EndpointInbound, nil, []byte(text), channeltest.Now); !errors.As(err, &parseErr) {
			t.Errorf("got %v, want a *ParseError", err)
		}
	})
}

// What is kept of large parts fits into an activity: attachments up to 4,096 bytes, metadata up to 16,384.
func TestParseKeepsWithinAnActivity(t *testing.T) {
	t.Parallel()
	long := strings.Repeat(`\"\u00e9`, 3_000)
	controls := strings.Repeat(`\u0001`, 5000)
	contacts := strings.Repeat(`{"name":{"formatted_name":"`+strings.Repeat("x", 300)+`"},"phones":[{"phone":"+1"}]},`, 100)
	for _, inside := range []string{
		`"type":"hologram","hologram":"` + long + `"`,
		`"type":"order","order":{"x":"` + long + `"}`,
		`"type":"interactive","interactive":{"type":"nfm_reply","nfm_reply":{"body":"b","response_json":"` + long + `"}}`,
		`"type":"image","image":{"id":"` + long + `","sha256":"` + long + `","mime_type":"` + long + `"}`,
		`"type":"document","document":{"id":"1","filename":"` + long + `"}`,
		`"type":"location","location":{"latitude":1,"longitude":1,"name":"` + long + `","address":"` + long + `"}`,
		`"type":"location","location":{"latitude":1,"longitude":1,"name":"` + controls + `","address":"` + controls + `","url":"` + controls + `"}`,
		`"type":"document","document":{"id":"` + controls + `","filename":"` + controls + `"}`,
		`"type":"button","button":{"text":"t","payload":"` + controls + `"}`,
		`"type":"contacts","contacts":[` + contacts + `{"name":{"formatted_name":"last"}}]`,
		`"type":"` + long + `"`,
	} {
		got := parse(t, body(change(`,"contacts":[{"wa_id":"16505550123","profile":{"name":"`+long+`"}}],"messages":[`+message("m", inside)+`]`)))
		if len(got.Messages) != 1 {
			t.Errorf("%.30s: %+v", inside, got.Rejected)
			continue
		}
		metadata, err := json.Marshal(got.Messages[0].Metadata)
		if err != nil || len(metadata) > 16_384 {
			t.Errorf("%.30s: metadata of %d bytes, %v", inside, len(metadata), err)
		}
		for _, a := range got.Messages[0].Attachments {
			if len(a) > 4096 {
				t.Errorf("%.30s: attachment of %d bytes", inside, len(a))
			}
		}
	}
}

func BenchmarkParse(b *testing.B) {
	s := subject(b)
	a, ch := newAdapter(), s.Channel()
	b.SetBytes(int64(len(s.Body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := a.Parse(ch, channel.EndpointInbound, nil, s.Body, channeltest.Now); err != nil {
			b.Fatal(err)
		}
	}
}
