package whatsappinfobip

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
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
	sender     = "447860099299"
	deliveryID = "01930000-0000-7000-8000-00000000000d"
	password   = "correct horse battery"
	value      = "Token 0123456789abcdef"
)

func newAdapter(t testing.TB) *Adapter {
	t.Helper()
	guard, err := channel.NewGuard(channel.GuardOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return New(guard, slog.New(slog.DiscardHandler))
}

func results(items ...string) string {
	return `{"results":[` + strings.Join(items, ",") + `],"messageCount":1,"pendingMessageCount":0}`
}

// message wraps the inside of a message from Ada, as the documentation shows one.
func message(id, inside string) string {
	return `{"from":"385919998888","to":"` + sender + `","integrationType":"WHATSAPP","receivedAt":"2026-11-30T05:29:02.123+0000",
		"messageId":"` + id + `","pairedMessageId":null,"callbackData":null,"message":{` + inside + `},
		"contact":{"name":"Ada Example"},"price":{"pricePerMessage":0.000000,"currency":"EUR"}}`
}

// report wraps the inside of a delivery report.
func report(id, inside string) string {
	return `{"bulkId":"b-01","messageId":"` + id + `","to":"385919998888","from":"` + sender + `","sentAt":"2026-11-30T05:29:05.000+0000",
		"doneAt":"2026-11-30T05:29:06.400+0000","messageCount":1,"price":{"pricePerMessage":0.01,"currency":"EUR"},` + inside + `}`
}

func subject(t testing.TB) channeltest.Subject {
	return channeltest.Subject{
		Adapter: newAdapter(t),
		Config: json.RawMessage(`{"sender":"` + sender + `","basic_user":"infobip","basic_password":"` + password +
			`","header_name":"X-Hook-Token","header_value":"` + value + `","base_url":"https://abc123.api.infobip.com","api_key":"key"}`),
		Body: []byte(results(
			message("m1", `"type":"TEXT","text":"hi","context":{"from":"1","id":"m0"}`),
			message("m2", `"type":"IMAGE","url":"https://abc123.api.infobip.com/whatsapp/1/senders/1/media/2","caption":"c"`),
			message("m3", `"type":"LOCATION","latitude":1.5,"longitude":2,"name":"n"`),
			message("m4", `"type":"CONTACT","contacts":[{"name":{"formattedName":"C"},"phones":[{"phone":"+1"}]}]`),
			message("m5", `"type":"INTERACTIVE_LIST_REPLY","id":"i","title":"t","description":"d"`),
			message("m6", `"type":"REACTION","emoji":"x","action":"REACT","context":{"id":"m1"}`),
			message("m7", `"type":"BUTTON","text":"t","payload":"p"`),
			report("s1", `"callbackData":"x","status":{"groupId":5,"groupName":"REJECTED","id":8,"name":"n","description":"d"},
				"error":{"groupId":1,"groupName":"HANDSET_ERRORS","id":1,"name":"EC","description":"e","permanent":true}`),
			`{"messageId":"s2","from":"`+sender+`","to":"1","sentAt":"2026-11-30T05:29:05.000+0000","seenAt":"2026-11-30T05:29:07.000+0000"}`,
		)),
		// Infobip's own proofs are not over the body; the relay's is.
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
	channeltest.Run(t, subject(t))
}

func FuzzParse(f *testing.F) {
	channeltest.FuzzParse(f, subject(f), []byte(`{"results":[{"message":7},3,null,{"status":[]},{"seenAt":{}}]}`), []byte(`{"results":{}}`))
}

func basic(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

func TestVerify(t *testing.T) {
	t.Parallel()
	const (
		path   = `{"sender":"1"}`
		login  = `{"sender":"1","secret_path":false,"basic_user":"infobip","basic_password":"` + password + `","previous_basic_password":"the one before that"}`
		header = `{"sender":"1","secret_path":false,"header_name":"x-hook-token","header_value":"` + value + `","previous_header_value":"Token of last year"}`
		all    = `{"sender":"1","basic_user":"infobip","basic_password":"` + password + `","header_name":"X-Hook-Token","header_value":"` + value + `"}`
		none   = `{"sender":"1","secret_path":false}`
	)
	body := []byte(`{"results":[]}`)
	of := func(pairs ...string) http.Header {
		h := http.Header{}
		for i := 0; i < len(pairs); i += 2 {
			h.Add(pairs[i], pairs[i+1])
		}
		return h
	}
	signed := func(secret string, more ...string) http.Header {
		h := of(more...)
		if err := signature.SignTimestamped(h, body, [][]byte{[]byte(secret)}, channeltest.Now); err != nil {
			t.Fatal(err)
		}
		return h
	}
	legacy := http.Header{}
	if err := signature.SignHubSHA256(legacy, body, []byte(channeltest.Secret)); err != nil {
		t.Fatal(err)
	}
	legacy = of(signature.HeaderTimestamped, legacy.Get(signature.HeaderHubSHA256))

	ch := subject(t).Channel()
	current := ch.PathSecrets(channeltest.Now)[0]
	before := *ch
	before.Secret = "whsec_the one before"
	previous := before.PathSecrets(channeltest.Now)[0]
	other := *ch
	other.ID = uuid.MustParse("01930000-0000-7000-8000-00000000ffff")
	others := other.PathSecrets(channeltest.Now)[0]

	missing, wrong := channel.ErrUnsigned, channel.ErrSignature
	for name, tt := range map[string]struct {
		config      string
		path        string
		header      http.Header
		strict, lax error
	}{
		"path":                           {path, current, nil, nil, nil},
		"path of the previous secret":    {path, previous, nil, nil, nil},
		"path missing":                   {path, "", nil, missing, nil},
		"path wrong":                     {path, strings.Repeat("A", 32), nil, wrong, wrong},
		"path cut":                       {path, current[:31], nil, wrong, wrong},
		"path of another channel":        {path, others, nil, wrong, wrong},
		"the channel's secret as path":   {path, channeltest.Secret, nil, wrong, wrong},
		"login":                          {login, "", of("Authorization", basic("infobip", password)), nil, nil},
		"login, previous password":       {login, "", of("Authorization", basic("infobip", "the one before that")), nil, nil},
		"login missing":                  {login, "", nil, missing, nil},
		"login empty":                    {login, "", of("Authorization", ""), wrong, wrong},
		"login, wrong password":          {login, "", of("Authorization", basic("infobip", "x")), wrong, wrong},
		"login, no password":             {login, "", of("Authorization", basic("infobip", "")), wrong, wrong},
		"login, wrong user":              {login, "", of("Authorization", basic("x", password)), wrong, wrong},
		"login, another scheme":          {login, "", of("Authorization", "Bearer "+password), wrong, wrong},
		"login twice":                    {login, "", of("Authorization", "Basic eA==", "Authorization", basic("infobip", password)), wrong, wrong},
		"header":                         {header, "", of("X-Hook-Token", value), nil, nil},
		"header, previous":               {header, "", of("X-Hook-Token", "Token of last year"), nil, nil},
		"header missing":                 {header, "", nil, missing, nil},
		"header empty":                   {header, "", of("X-Hook-Token", ""), wrong, wrong},
		"header wrong":                   {header, "", of("X-Hook-Token", value+"x"), wrong, wrong},
		"header twice":                   {header, "", of("X-Hook-Token", value, "X-Hook-Token", value), wrong, wrong},
		"all":                            {all, current, of("Authorization", basic("infobip", password), "X-Hook-Token", value), nil, nil},
		"all but the path":               {all, "", of("Authorization", basic("infobip", password), "X-Hook-Token", value), missing, nil},
		"all but the login":              {all, current, of("X-Hook-Token", value), missing, nil},
		"all but the header":             {all, current, of("Authorization", basic("infobip", password)), missing, nil},
		"all, the path wrong":            {all, others, of("Authorization", basic("infobip", password), "X-Hook-Token", value), wrong, wrong},
		"all, the login wrong":           {all, current, of("Authorization", basic("infobip", "x"), "X-Hook-Token", value), wrong, wrong},
		"all, the header wrong":          {all, current, of("Authorization", basic("infobip", password), "X-Hook-Token", "x"), wrong, wrong},
		"all, an empty password":         {all, current, of("Authorization", basic("infobip", ""), "X-Hook-Token", value), wrong, wrong},
		"all, an empty header":           {all, current, of("Authorization", basic("infobip", password), "X-Hook-Token", ""), wrong, wrong},
		"nothing to prove":               {none, "", nil, missing, nil},
		"relay, nothing to prove":        {none, "", signed(channeltest.Secret), nil, nil},
		"relay":                          {all, "", signed(channeltest.Secret), nil, nil},
		"relay with its own login":       {all, "", signed(channeltest.Secret, "Authorization", "Bearer of the relay"), nil, nil},
		"relay, its own login, the path": {all, current, signed(channeltest.Secret, "Authorization", "Bearer of the relay"), nil, nil},
		"relay, wrong path":              {path, others, signed(channeltest.Secret), wrong, wrong},
		"relay, wrong secret":            {path, "", signed("whsec_another"), wrong, wrong},
		"relay, wrong secret, good path": {path, current, signed("whsec_another"), wrong, wrong},
		"relay, old form":                {path, "", legacy, wrong, nil},
		"unreadable config":              {`{"sender":7}`, current, nil, wrong, wrong},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for required, want := range map[bool]error{true: tt.strict, false: tt.lax} {
				ch := *ch
				ch.Config, ch.RequireSignature = json.RawMessage(tt.config), required
				ch.PreviousSecret, ch.PreviousUntil = before.Secret, channeltest.Now.Add(time.Hour)
				err := newAdapter(t).Verify(&ch, channel.Request{Header: tt.header, PathSecret: tt.path, Body: body, Now: channeltest.Now})
				if !errors.Is(err, want) || (err == nil) != (want == nil) {
					t.Errorf("require_signature %t: got %v, want %v", required, err, want)
				}
				for _, secret := range []string{current, password, value, channeltest.Secret} {
					if err != nil && strings.Contains(err.Error(), secret) {
						t.Errorf("the error holds a secret: %v", err)
					}
				}
			}
		})
	}

	t.Run("the previous path ends with its secret", func(t *testing.T) {
		t.Parallel()
		ch := *ch
		ch.PreviousSecret, ch.PreviousUntil = before.Secret, channeltest.Now
		if err := newAdapter(t).Verify(&ch, channel.Request{PathSecret: previous, Body: body, Now: channeltest.Now}); !errors.Is(err, wrong) {
			t.Errorf("got %v", err)
		}
	})
}

func TestKeepsPath(t *testing.T) {
	t.Parallel()
	for config, want := range map[string]bool{`{}`: true, `{"secret_path":true}`: true, `{"secret_path":false}`: false, `{"secret_path":7}`: false} {
		if got := newAdapter(t).KeepsPath(&channel.Channel{Config: json.RawMessage(config)}); got != want {
			t.Errorf("%s: %v, want %v", config, got, want)
		}
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	const long = `0123456789abcdef`
	for _, tt := range []struct {
		config string
		signed bool
		want   []string
	}{
		{`{"sender":"1"}`, true, nil},
		{`{"sender":"1","secret_path":false}`, false, nil},
		{`{"sender":"1","secret_path":false}`, true, []string{"/secret_path required"}},
		{`{"sender":"1","secret_path":false,"basic_user":"","header_name":""}`, true, []string{"/secret_path required"}},
		{`{"sender":"1","secret_path":false,"basic_user":"u","basic_password":"` + long + `"}`, true, nil},
		{`{"sender":"1","secret_path":false,"header_name":"Authorization","header_value":"App ` + long + `"}`, true, nil},
		{`{}`, true, []string{"/sender required"}},
		{`{"sender":"+44 7"}`, true, []string{"/sender malformed"}},
		{`{"sender":"1","basic_user":"u"}`, true, []string{"/basic_password required"}},
		{`{"sender":"1","basic_password":"` + long + `"}`, true, []string{"/basic_user required"}},
		{`{"sender":"1","previous_basic_password":"` + long + `"}`, true, []string{"/basic_user required"}},
		{`{"sender":"1","basic_user":"u:v","basic_password":"short","previous_basic_password":"short"}`, true,
			[]string{"/basic_password out_of_range", "/previous_basic_password out_of_range", "/basic_user malformed"}},
		{`{"sender":"1","header_name":"X-A"}`, true, []string{"/header_value required"}},
		{`{"sender":"1","header_value":"` + long + `"}`, true, []string{"/header_name required"}},
		{`{"sender":"1","header_name":"X A","header_value":"` + long + `"}`, true, []string{"/header_name malformed"}},
		{`{"sender":"1","header_name":"Content-Type","header_value":"` + long + `"}`, true, []string{"/header_name conflict"}},
		{`{"sender":"1","header_name":"X-Converger-Signature","header_value":"` + long + `"}`, true, []string{"/header_name conflict"}},
		{`{"sender":"1","header_name":"X-A","header_value":"` + long + `é"}`, true, []string{"/header_value malformed"}},
		{`{"sender":"1","header_name":"authorization","header_value":"` + long + `","basic_user":"u","basic_password":"` + long + `"}`, true, []string{"/header_name conflict"}},
		{`{"sender":"1","base_url":"http://127.0.0.1/"}`, true, []string{"/base_url malformed"}},
		{`{"sender":"1","base_url":"https://abc.api.infobip.com"}`, true, nil},
	} {
		var got []string
		for _, f := range newAdapter(t).Validate(json.RawMessage(tt.config), tt.signed) {
			got = append(got, f.Pointer+" "+f.Code)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s: %s", tt.config, diff)
		}
	}
}

func parse(t *testing.T, body string) channel.Inbound {
	t.Helper()
	in, err := newAdapter(t).Parse(subject(t).Channel(), channel.EndpointInbound, nil, []byte(body), channeltest.Now)
	if err != nil {
		t.Fatal(err)
	}
	return in
}

func TestParseMessages(t *testing.T) {
	t.Parallel()
	// want is a message from Ada of a kind, changed as the case says.
	want := func(kind string, change func(*channel.Message)) channel.Message {
		m := channel.Message{
			ProviderID: "ABEGEXAMPLE0001", Sender: "385919998888", Type: "message",
			Participant: &channel.Participant{DisplayName: "Ada Example", Identities: []channel.Identity{{Kind: channel.IdentityPhone, Value: "385919998888"}}},
			Metadata: map[string]any{"whatsapp_message_id": "ABEGEXAMPLE0001", "whatsapp_type": kind, "timestamp": "2026-11-30T05:29:02.123+0000",
				"infobip_sender": sender, "profile_name": "Ada Example"},
			At: time.Date(2026, 11, 30, 5, 29, 2, 123e6, time.UTC),
		}
		change(&m)
		return m
	}
	attachment := func(text string) []json.RawMessage { return []json.RawMessage{json.RawMessage(text)} }
	for name, tt := range map[string]struct {
		inside string
		want   channel.Message
	}{
		"text": {`"type":"TEXT","text":"Is the \ud83c\udf70 shop open?\u0000"`,
			want("TEXT", func(m *channel.Message) { m.Text = "Is the \U0001f370 shop open?\uFFFD" })},
		"reply": {`"type":"TEXT","text":"yes","context":{"from":"447860099299","id":"ABEG0"}`,
			want("TEXT", func(m *channel.Message) {
				m.Text, m.ReplyToProviderID = "yes", "ABEG0"
				m.Metadata["reply_to"] = "ABEG0"
			})},
		"image": {`"type":"IMAGE","url":"https://x.example/1","caption":"the label"`,
			want("IMAGE", func(m *channel.Message) {
				m.Text = "the label"
				m.Attachments = attachment(`{"channelData":{"kind":"image","url":"https://x.example/1"},"contentType":"application/octet-stream"}`)
			})},
		"document": {`"type":"DOCUMENT","url":"https://x.example/1","caption":"a.pdf"`,
			want("DOCUMENT", func(m *channel.Message) {
				m.Text = "a.pdf"
				m.Attachments = attachment(`{"channelData":{"kind":"document","url":"https://x.example/1"},"contentType":"application/octet-stream"}`)
			})},
		"sticker": {`"type":"STICKER","url":"https://x.example/1"`,
			want("STICKER", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"kind":"sticker","url":"https://x.example/1"},"contentType":"application/octet-stream"}`)
			})},
		"video": {`"type":"VIDEO","url":"https://x.example/1"`,
			want("VIDEO", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"kind":"video","url":"https://x.example/1"},"contentType":"application/octet-stream"}`)
			})},
		"voice": {`"type":"VOICE","url":"https://x.example/1"`,
			want("VOICE", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"kind":"voice","url":"https://x.example/1","voice":true},"contentType":"application/octet-stream"}`)
			})},
		"audio": {`"type":"AUDIO","url":"https://x.example/1"`,
			want("AUDIO", func(m *channel.Message) {
				m.Attachments = attachment(`{"channelData":{"kind":"audio","url":"https://x.example/1"},"contentType":"application/octet-stream"}`)
			})},
		"location": {`"type":"LOCATION","latitude":45.793,"longitude":15.946,"name":"Shop","address":"1 Way"`,
			want("LOCATION", func(m *channel.Message) {
				m.Attachments = attachment(`{"content":{"address":"1 Way","latitude":45.793,"longitude":15.946,"name":"Shop"},"contentType":"application/vnd.converger.location"}`)
			})},
		"contact": {`"type":"CONTACT","contacts":[{"name":{"formattedName":"Bo","firstName":"Bo"},"phones":[{"phone":"+49 1","waId":"491"},{"waId":"492"}]}]`,
			want("CONTACT", func(m *channel.Message) {
				m.Attachments = attachment(`{"content":[{"name":"Bo","phones":["+49 1","492"]}],"contentType":"application/vnd.converger.contacts"}`)
			})},
		"button": {`"type":"BUTTON","text":"No, thanks","payload":"NO"`,
			want("BUTTON", func(m *channel.Message) {
				m.Text = "No, thanks"
				m.Metadata["interactive_reply"] = map[string]any{"type": "button", "id": "NO", "title": "No, thanks"}
			})},
		"button reply": {`"type":"INTERACTIVE_BUTTON_REPLY","id":"b1","title":"Yes"`,
			want("INTERACTIVE_BUTTON_REPLY", func(m *channel.Message) {
				m.Text = "Yes"
				m.Metadata["interactive_reply"] = map[string]any{"type": "button_reply", "id": "b1", "title": "Yes"}
			})},
		"list reply": {`"type":"INTERACTIVE_LIST_REPLY","id":"l1","title":"Two","description":"the second"`,
			want("INTERACTIVE_LIST_REPLY", func(m *channel.Message) {
				m.Text = "Two"
				m.Metadata["interactive_reply"] = map[string]any{"type": "list_reply", "id": "l1", "title": "Two", "description": "the second"}
			})},
		"reaction": {`"type":"REACTION","emoji":"\ud83d\ude00","action":"REACT","context":{"id":"ABEG0"}`,
			want("REACTION", func(m *channel.Message) {
				m.Type, m.Text, m.ReplyToProviderID = "messageReaction", "\U0001f600", "ABEG0"
				m.Metadata["reply_to"] = "ABEG0"
			})},
		"reaction taken back": {`"type":"REACTION","emoji":"\ud83d\ude00","action":"UNREACT","context":{"id":"ABEG0"}`,
			want("REACTION", func(m *channel.Message) {
				m.Type, m.ReplyToProviderID = "messageReaction", "ABEG0"
				m.Metadata["reply_to"] = "ABEG0"
			})},
		"order": {`"type":"ORDER","catalogId":"c","text":"two, please","productItems":[]`,
			want("ORDER", func(m *channel.Message) {
				m.Type, m.Text = "event", "two, please"
				m.Metadata["order"] = map[string]any{"type": "ORDER", "catalogId": "c", "text": "two, please", "productItems": []any{}}
			})},
		"a kind to come": {`"type":"HOLOGRAM","x":[1.0]`,
			want("HOLOGRAM", func(m *channel.Message) {
				m.Type, m.Text = "event", "unsupported type HOLOGRAM"
				m.Metadata["unsupported"] = map[string]any{"type": "HOLOGRAM", "x": []any{json.Number("1.0")}}
			})},
		"no kind": {``,
			want("", func(m *channel.Message) {
				m.Type, m.Text = "event", "unsupported type (none)"
				m.Metadata["unsupported"] = map[string]any{}
			})},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := parse(t, results(message("ABEGEXAMPLE0001", tt.inside)))
			if diff := cmp.Diff(channel.Inbound{Messages: []channel.Message{tt.want}}, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestParseParticipants(t *testing.T) {
	t.Parallel()
	item := func(from, contact string) string {
		return `{` + from + `"to":"` + sender + `","messageId":"m","message":{"type":"TEXT","text":"x"},"contact":` + contact + `}`
	}
	phone := func(v string) channel.Identity { return channel.Identity{Kind: channel.IdentityPhone, Value: v} }
	userID := channel.Identity{Kind: channel.IdentityUserID, Value: "MX.1"}
	for name, tt := range map[string]struct {
		item string
		want channel.Participant
	}{
		"no contact": {item(`"from":"385919998888",`, `null`), channel.Participant{Identities: []channel.Identity{phone("385919998888")}}},
		"one person, two spellings": {item(`"from":"5215512345678",`, `{"name":"Cy"}`),
			channel.Participant{Identities: []channel.Identity{phone("5215512345678"), phone("525512345678")}, DisplayName: "Cy"}},
		"the user id is the better name": {item(`"from":"525512345678",`, `{"userId":"MX.1","phoneNumber":"525512345678"}`),
			channel.Participant{Identities: []channel.Identity{userID, phone("525512345678"), phone("5215512345678")}}},
		"no number": {item(``, `{"userId":"MX.1","username":"bo.sample"}`),
			channel.Participant{Identities: []channel.Identity{userID}, DisplayName: "bo.sample", Metadata: map[string]any{"username": "bo.sample"}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in := parse(t, results(tt.item))
			if len(in.Messages) != 1 {
				t.Fatalf("%+v", in)
			}
			if diff := cmp.Diff(&tt.want, in.Messages[0].Participant); diff != "" {
				t.Error(diff)
			}
			if in.Messages[0].Sender != tt.want.Identities[0].Value {
				t.Errorf("sender %s", in.Messages[0].Sender)
			}
		})
	}
}

func TestParseReports(t *testing.T) {
	t.Parallel()
	status := func(group string) string {
		return `"status":{"groupId":1,"groupName":"` + group + `","id":5,"name":"NAME_OF_` + group + `","description":"Words about it"}`
	}
	const noError = `"error":{"groupId":0,"groupName":"OK","id":0,"name":"NO_ERROR","description":"No Error","permanent":false}`
	done := time.Date(2026, 11, 30, 5, 29, 6, 400e6, time.UTC)
	id := uuid.MustParse(deliveryID)
	for name, tt := range map[string]struct {
		item string
		want channel.Receipt
	}{
		"pending":   {report("m", status("PENDING")), channel.Receipt{ProviderID: "m", Status: "sent", At: done}},
		"delivered": {report("m", status("DELIVERED")+","+noError), channel.Receipt{ProviderID: "m", Status: "delivered", At: done}},
		"seen":      {report("m", status("SEEN")), channel.Receipt{ProviderID: "m", Status: "read", At: done}},
		"to come":   {report("m", status("TELEPORTED")), channel.Receipt{ProviderID: "m", Status: "sent", At: done}},
		"undeliverable": {report("m", status("UNDELIVERABLE")+`,"error":{"groupId":2,"groupName":"USER_ERRORS","id":7,"name":"EC_UNKNOWN","description":"Unknown user","permanent":true}`),
			channel.Receipt{ProviderID: "m", Status: "failed", At: done, Error: "7 EC_UNKNOWN: Unknown user"}},
		"rejected, told by the status": {report("m", status("REJECTED")+","+noError),
			channel.Receipt{ProviderID: "m", Status: "failed", At: done, Error: "5 NAME_OF_REJECTED: Words about it"}},
		"expired, no error": {report("m", status("EXPIRED")),
			channel.Receipt{ProviderID: "m", Status: "failed", At: done, Error: "5 NAME_OF_EXPIRED: Words about it"}},
		"rejected, no words": {report("m", `"status":{"groupName":"REJECTED"}`),
			channel.Receipt{ProviderID: "m", Status: "failed", At: done, Error: "no reason given"}},
		"carries our id": {report("m", status("DELIVERED")+`,"callbackData":"dlv_`+deliveryID+`"`),
			channel.Receipt{ProviderID: "m", DeliveryID: &id, Status: "delivered", At: done}},
		"is called by our id": {report(deliveryID, status("DELIVERED")),
			channel.Receipt{ProviderID: deliveryID, DeliveryID: &id, Status: "delivered", At: done}},
		"carries something else": {report("dlv_01J9ZK2A", status("DELIVERED")+`,"callbackData":"dlv_01J9ZK2A"`),
			channel.Receipt{ProviderID: "dlv_01J9ZK2A", Status: "delivered", At: done}},
		"not done": {`{"messageId":"m","sentAt":"2026-11-30T06:29:05.000+0100",` + status("PENDING") + `}`,
			channel.Receipt{ProviderID: "m", Status: "sent", At: done.Add(-1400 * time.Millisecond)}},
		"seen report": {`{"messageId":"m","from":"` + sender + `","to":"1","sentAt":"2026-11-30T05:29:05.000+0000","seenAt":"2026-11-30T05:29:06.400+0000"}`,
			channel.Receipt{ProviderID: "m", Status: "read", At: done}},
		"time with a colon":    {`{"messageId":"m","seenAt":"2026-11-30T05:29:06.400+00:00"}`, channel.Receipt{ProviderID: "m", Status: "read", At: done}},
		"time of Zulu":         {`{"messageId":"m","seenAt":"2026-11-30T05:29:06.4Z"}`, channel.Receipt{ProviderID: "m", Status: "read", At: done}},
		"time without reason":  {`{"messageId":"m","seenAt":"yesterday"}`, channel.Receipt{ProviderID: "m", Status: "read", At: channeltest.Now}},
		"time of another kind": {`{"messageId":"m","seenAt":{}}`, channel.Receipt{ProviderID: "m", Status: "read", At: channeltest.Now}},
		"time in the future":   {`{"messageId":"m","seenAt":"2036-11-30T05:29:06.400+0000"}`, channel.Receipt{ProviderID: "m", Status: "read", At: channeltest.Now}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if diff := cmp.Diff(channel.Inbound{Receipts: []channel.Receipt{tt.want}}, parse(t, results(tt.item))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// One body may hold several reports of one message, beside messages and things that nobody knows: each is taken for itself
// and in its order.
func TestParseBatch(t *testing.T) {
	t.Parallel()
	group := func(name string) string { return `"status":{"groupName":"` + name + `"}` }
	in := parse(t, results(
		report("m", group("PENDING")), message("in1", `"type":"TEXT","text":"a"`), report("m", group("DELIVERED")), `7`, report("m", group("SEEN")),
		`{"messageId":"gone","event":"DELETED"}`, message("in2", `"type":"TEXT"`), `{"messageId":"m","status":{}}`, `{"seenAt":"x"}`, `{"messageId":"n","to":"`+sender+`","message":7}`,
		strings.Replace(message("in3", `"type":"TEXT","text":"b"`), sender, "1", 1), strings.Replace(report("m", group("REJECTED")), sender, "1", 1),
		`{"messageId":"in4","from":"1","message":{"type":"TEXT","text":"c"}}`, `{"messageId":"in5","to":"`+sender+`","message":{"type":"TEXT","text":"c"}}`,
		message(strings.Repeat("x", channel.MaxProviderID+1), `"type":"TEXT","text":"d"`), message("in6", `"type":"TEXT","text":"e"`),
	))
	var got []string
	for _, m := range in.Messages {
		got = append(got, fmt.Sprintf("message %d %s", m.Index, m.ProviderID))
	}
	for _, r := range in.Receipts {
		got = append(got, "receipt "+r.ProviderID+" "+r.Status)
	}
	for _, r := range in.Rejected {
		got = append(got, fmt.Sprintf("rejected %d %s %s", r.Index, r.Err.Fields[0].Pointer, r.Err.Fields[0].Code))
	}
	for _, i := range in.Ignored {
		got = append(got, "ignored "+i.Kind+" "+i.ID)
	}
	want := []string{
		"message 1 in1", "message 15 in6", "receipt m sent", "receipt m delivered", "receipt m read",
		"rejected 3 /results/3 invalid_type", "rejected 6 /results/6/message/text required", "rejected 7 /results/7/status/groupName required",
		"rejected 8 /results/8/messageId required", "rejected 9 /results/9/message invalid_type", "rejected 13 /results/13/from required",
		"rejected 14 /results/14/messageId too_long",
		"ignored DELETED gone", "ignored message in3", "ignored status m", "ignored message in4",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if in := parse(t, `{}`); len(in.Ignored) != 1 {
		t.Errorf("a body without results: %+v", in)
	}
}

// What makes a kind of message is said when it is missing.
func TestParseIncomplete(t *testing.T) {
	t.Parallel()
	for kind, pointer := range map[string]string{
		"TEXT": "/text", "IMAGE": "/url", "DOCUMENT": "/url", "STICKER": "/url", "VIDEO": "/url", "VOICE": "/url", "AUDIO": "/url", "LOCATION": "",
		"CONTACT": "/contacts", "BUTTON": "/text", "INTERACTIVE_BUTTON_REPLY": "/title", "INTERACTIVE_LIST_REPLY": "/title", "REACTION": "/context/id",
	} {
		in := parse(t, results(message("m", `"type":"`+kind+`"`)))
		if len(in.Messages) != 0 || len(in.Rejected) != 1 || in.Rejected[0].ID != "m" || in.Rejected[0].Err.Fields[0].Pointer != "/results/0/message"+pointer {
			t.Errorf("%s: %+v", kind, in)
		}
	}
}
