package simulate

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"

	"converger/internal/signature"
)

const (
	testAppSecret = "app-secret-for-tests"
	testChannel   = "0199a3c0-0000-7000-8000-000000000001"
)

// verifyHub answers as the hub does to a Meta channel.
func verifyHub(w http.ResponseWriter, r request) {
	if err := signature.VerifyHubSHA256(r.header, r.body, [][]byte{[]byte(testAppSecret)}, time.Now()); err != nil {
		w.WriteHeader(http.StatusUnauthorized)
		_, _ = fmt.Fprintf(w, `{"title":"Unauthorized","detail":%q}`, err)
	}
}

// newWhatsApp returns options that post to the hub.
func newWhatsApp(h *hub, out *output) WhatsAppOptions {
	return WhatsAppOptions{
		SendOptions: SendOptions{BaseURL: h.URL, ChannelID: testChannel, Out: out},
		AppSecret:   testAppSecret,
	}
}

func envelopes(t *testing.T, bodies []string) []metaEnvelope {
	t.Helper()
	var out []metaEnvelope
	for _, body := range bodies {
		var e metaEnvelope
		if err := json.Unmarshal([]byte(body), &e); err != nil {
			t.Fatalf("body %s: %v", body, err)
		}
		out = append(out, e)
	}
	return out
}

func values(envelopes []metaEnvelope) []metaValue {
	var out []metaValue
	for _, e := range envelopes {
		for _, entry := range e.Entry {
			for _, change := range entry.Changes {
				out = append(out, change.Value)
			}
		}
	}
	return out
}

// ids returns the ids of messages and statuses in the order of their bodies.
func ids(t *testing.T, bodies []string) []string {
	t.Helper()
	var out []string
	for _, v := range values(envelopes(t, bodies)) {
		for _, m := range v.Messages {
			out = append(out, m.ID)
		}
		for _, s := range v.Statuses {
			out = append(out, s.ID+" "+s.Status)
		}
	}
	return out
}

func TestWhatsAppDefaultBatch(t *testing.T) {
	t.Parallel()
	h, out := newHub(t, verifyHub), &output{}
	if err := WhatsApp(t.Context(), newWhatsApp(h, out)); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	received := h.received()
	if len(received) != 1 {
		t.Fatalf("%d posts, want 1", len(received))
	}
	if want := "POST /api/v1/channels/" + testChannel + "/inbound"; received[0].path != want {
		t.Errorf("path %q, want %q", received[0].path, want)
	}
	if got := received[0].header.Get("Content-Type"); got != "application/json" {
		t.Errorf("content type %q", got)
	}
	body := string(received[0].body)
	if strings.ContainsFunc(body, func(r rune) bool { return r > '~' }) || !strings.Contains(body, `Gr\u00fc\u00dfe aus K\u00f6ln \ud83d\udc4b`) {
		t.Errorf("characters beyond ASCII are not escaped as Meta does: %s", body)
	}

	var types, statuses []string
	for _, v := range values(envelopes(t, h.bodies())) {
		if v.MessagingProduct != "whatsapp" || v.Metadata.PhoneNumberID != defaultPhoneNumberID {
			t.Errorf("value for %+v", v.Metadata)
		}
		for _, m := range v.Messages {
			types = append(types, m.Type)
			if diff := cmp.Diff([]metaContact{person(0)}, v.Contacts); diff != "" {
				t.Errorf("contacts (-want +got):\n%s", diff)
			}
			if m.From != "16505550123" || m.FromUserID != person(0).UserID || !strings.HasPrefix(m.ID, "wamid.") {
				t.Errorf("message %+v", m)
			}
			if unix, err := strconv.ParseInt(m.Timestamp, 10, 64); err != nil || time.Since(time.Unix(unix, 0)).Abs() > time.Minute {
				t.Errorf("message of %s (%v), want about now", m.Timestamp, err)
			}
		}
		for _, s := range v.Statuses {
			statuses = append(statuses, s.Status)
		}
	}
	if diff := cmp.Diff([]string{"text", "text", "image"}, types); diff != "" {
		t.Errorf("messages (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]string{"sent"}, statuses); diff != "" {
		t.Errorf("statuses (-want +got):\n%s", diff)
	}
	out.want(t, "#1    200", "text, text, image, status sent", "1 of 1 posts sent, 1 as expected; answers: 200 × 1;")
}

// Each type of message carries its content, batches keep to their size, and
// the lists are plural at each level.
func TestWhatsAppEveryType(t *testing.T) {
	t.Parallel()
	h, out := newHub(t, verifyHub), &output{}
	o := newWhatsApp(h, out)
	o.Messages, o.Statuses, o.Batch, o.People, o.PhoneNumberID = 2*len(metaKinds), 9, 7, 3, "42"
	if err := WhatsApp(t.Context(), o); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	seen := map[string]int{}
	anonymous := 0
	for _, body := range h.bodies() {
		var raw struct {
			Entry []struct {
				Changes []struct {
					Value struct {
						Metadata struct {
							PhoneNumberID string `json:"phone_number_id"`
						}
						Messages []map[string]any
						Statuses []map[string]any
					}
				}
			}
		}
		if err := json.Unmarshal([]byte(body), &raw); err != nil {
			t.Fatal(err)
		}
		items, changes := 0, 0
		for _, e := range raw.Entry {
			changes = max(changes, len(e.Changes))
			for _, c := range e.Changes {
				items += len(c.Value.Messages) + len(c.Value.Statuses)
				if c.Value.Metadata.PhoneNumberID != "42" {
					t.Errorf("phone number id %q", c.Value.Metadata.PhoneNumberID)
				}
				for _, m := range c.Value.Messages {
					name := m["type"].(string)
					member := name
					if name == "unsupported" {
						member = "errors"
					}
					if m[member] == nil {
						t.Errorf("%s without content: %v", name, m)
					}
					if _, ok := m["from"]; !ok {
						anonymous++
					}
					seen[name]++
				}
			}
		}
		if items > 7 {
			t.Errorf("%d items in a body, want at most 7", items)
		}
		if items == 7 && (len(raw.Entry) < 2 || changes < 2) {
			t.Errorf("%d entries with at most %d changes for 7 items, want several", len(raw.Entry), changes)
		}
	}
	for _, kind := range metaKinds {
		if seen[kind.name] < 2 {
			t.Errorf("%d messages of type %s, want 2 or more", seen[kind.name], kind.name)
		}
	}
	if want := len(metaKinds) * 2 / 3; anonymous < want {
		t.Errorf("%d messages from the person without a phone number, want %d or more", anonymous, want)
	}
	all := ids(t, h.bodies())
	slices.Sort(all)
	if n := len(slices.Compact(all)); n != o.Messages+o.Statuses {
		t.Errorf("%d different ids, want %d", n, o.Messages+o.Statuses)
	}
}

func TestSeed(t *testing.T) {
	t.Parallel()
	run := func(seed uint64) []string {
		h, out := newHub(t, verifyHub), &output{}
		o := newWhatsApp(h, out)
		o.Messages, o.Batch, o.Seed, o.Shuffle, o.Repeat = 20, 3, seed, true, 2
		if err := WhatsApp(t.Context(), o); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return h.bodies()
	}
	first := run(7)
	if diff := cmp.Diff(first, run(7)); diff != "" {
		t.Errorf("the same seed sends other bodies (-first +second):\n%s", diff)
	}
	runs := map[string][]string{"another seed": run(8), "no seed": run(0), "no seed again": run(0)}
	runs["seed"] = first
	owner := map[string]string{}
	for name, bodies := range runs {
		for _, id := range ids(t, bodies) {
			if other, ok := owner[id]; ok && other != name {
				t.Fatalf("runs with %s and %s share the id %s", name, other, id)
			}
			owner[id] = name
		}
	}
}

func TestRepeatAndShuffle(t *testing.T) {
	t.Parallel()
	run := func(shuffle bool) (*hub, *output) {
		h, out := newHub(t, verifyHub), &output{}
		o := newWhatsApp(h, out)
		o.Messages, o.Batch, o.Seed, o.Repeat, o.Shuffle = 30, 5, 3, 4, shuffle
		if err := WhatsApp(t.Context(), o); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return h, out
	}
	plain, out := run(false)
	bodies := plain.bodies()
	if len(bodies) != 7*4 {
		t.Fatalf("%d posts, want 28", len(bodies))
	}
	for i := range bodies {
		if bodies[i] != bodies[i/4*4] {
			t.Errorf("post %d is not a repeat byte for byte", i)
		}
	}
	out.want(t, "again: text, text, image")

	shuffled, _ := run(true)
	distinct := func(h *hub) []string {
		bodies := slices.Clone(h.bodies())
		slices.Sort(bodies)
		return slices.Compact(bodies)
	}
	if n := len(distinct(shuffled)); n != 7 {
		t.Errorf("%d different bodies after shuffling, want 7", n)
	}
	before, after := ids(t, distinct(plain)), ids(t, distinct(shuffled))
	slices.Sort(before)
	slices.Sort(after)
	if diff := cmp.Diff(before, after); diff != "" {
		t.Errorf("shuffling changed what is sent (-before +after):\n%s", diff)
	}
	if cmp.Equal(distinct(plain), distinct(shuffled)) {
		t.Error("bodies are not shuffled inside")
	}
	repeats := 0
	for i := 1; i < len(shuffled.bodies()); i++ {
		if shuffled.bodies()[i] == shuffled.bodies()[i-1] {
			repeats++
		}
	}
	if repeats > 14 { // 21 unshuffled
		t.Errorf("%d repeats follow their original: posts are not shuffled", repeats)
	}
}

func TestBadSignature(t *testing.T) {
	t.Parallel()
	h, out := newHub(t, verifyHub), &output{}
	o := newWhatsApp(h, out)
	o.BadSignature, o.Repeat = true, 2
	if err := WhatsApp(t.Context(), o); err != nil {
		t.Errorf("refused with 401: %v", err)
	}
	out.want(t, "2 of 2 posts sent, 2 as expected; answers: 401 × 2;")

	credulous, out := newHub(t, nil), &output{}
	o = newWhatsApp(credulous, out)
	o.BadSignature = true
	if err := WhatsApp(t.Context(), o); err == nil {
		t.Error("no error although the hub accepted a wrong signature")
	}
	out.want(t, "accepted a wrong signature", "0 as expected")
}

func TestRefusals(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name   string
		status int
		body   string
		want   []string
	}{
		{"wrong secret", 401, `{"title":"Unauthorized","detail":"The signature does not match."}`,
			[]string{"#1    401", "The signature does not match.", "compare the app secret"}},
		{"fields", 422, `{"detail":"1 field needs attention.","errors":[{"pointer":"#/text","detail":"is required"}]}`,
			[]string{"1 field needs attention.; #/text is required"}},
		{"title only", 404, `{"title":"Not Found"}`, []string{"      Not Found\n", "demo.json"}},
		{"limit", 429, `{"detail":"Wait 3 s."}`, []string{"Wait 3 s.", "raise the channel's inbound limit"}},
		{"not a problem", 502, "<b>bad\x1b[31m gateway</b>", []string{"<b>bad [31m gateway</b>", "look at the hub's log"}},
		{"empty", 500, "", []string{"no body"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := newHub(t, func(w http.ResponseWriter, _ request) {
				w.WriteHeader(tt.status)
				_, _ = w.Write([]byte(tt.body))
			})
			out := &output{}
			o := newWhatsApp(h, out)
			o.Repeat = 3
			err := WhatsApp(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), "3 of 3 posts") {
				t.Errorf("error %v, want 3 of 3 posts", err)
			}
			out.want(t, tt.want...)
			if n := strings.Count(out.String(), "What to do"); n != 1 {
				t.Errorf("%d times what to do, want 1", n)
			}
			if strings.Contains(out.String(), testAppSecret) || strings.ContainsRune(out.String(), '\x1b') {
				t.Errorf("the output holds the secret or a control character: %q", out)
			}
		})
	}
}

func TestRedirectIsNotFollowed(t *testing.T) {
	t.Parallel()
	elsewhere := newHub(t, nil)
	h := newHub(t, func(w http.ResponseWriter, _ request) {
		w.Header().Set("Location", elsewhere.URL)
		w.WriteHeader(http.StatusTemporaryRedirect)
	})
	out := &output{}
	if err := WhatsApp(t.Context(), newWhatsApp(h, out)); err == nil {
		t.Error("a redirect is no error")
	}
	if n := len(elsewhere.received()); n != 0 {
		t.Errorf("%d posts went to the redirect's target", n)
	}
	out.want(t, "It redirects to "+elsewhere.URL)
}

func TestNoAnswer(t *testing.T) {
	t.Parallel()
	h, out := newHub(t, nil), &output{}
	o := newWhatsApp(h, out)
	h.Close()
	if err := WhatsApp(t.Context(), o); err == nil {
		t.Error("nobody listens, yet no error")
	}
	out.want(t, "no answer", "start the hub")

	release := make(chan struct{})
	hanging := newHub(t, func(http.ResponseWriter, request) { <-release })
	out = &output{}
	o = newWhatsApp(hanging, out)
	o.Timeout = 50 * time.Millisecond
	if err := WhatsApp(t.Context(), o); err == nil {
		t.Error("no answer within the timeout, yet no error")
	}
	close(release)
	out.want(t, "no answer")
}

func TestCancelledRunEnds(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(t.Context())
	calls := 0
	h := newHub(t, func(http.ResponseWriter, request) {
		if calls++; calls == 3 { // posts come one after the other
			cancel()
		}
	})
	out := &output{}
	o := newWhatsApp(h, out)
	o.Repeat = 1000
	if err := WhatsApp(ctx, o); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want %v", err, context.Canceled)
	}
	if n := len(h.received()); n > 4 {
		t.Errorf("%d posts after the third cancelled the run", n)
	}
	out.want(t, " of 1000 posts sent")
}

func TestWebhookTimestamped(t *testing.T) {
	t.Parallel()
	const secret = "whsec_c2VjcmV0IGtleSB3aXRoIDI0IGJ5dGVz"
	h, out := newHub(t, nil), &output{}
	err := Webhook(t.Context(), WebhookOptions{
		SendOptions:    SendOptions{BaseURL: h.URL, ChannelID: testChannel, Messages: 2, Out: out},
		Secret:         secret,
		Text:           "Grüße",
		Sender:         "Ada",
		ExternalID:     "ada-1",
		IdempotencyKey: "order.17",
	})
	if err != nil {
		t.Fatal(err)
	}
	var got []webhookBody
	for _, r := range h.received() {
		// The text of the secret is the key of this scheme, prefix and all.
		if err := signature.VerifyTimestamped(r.header, r.body, [][]byte{[]byte(secret)}, time.Now()); err != nil {
			t.Error(err)
		}
		var b webhookBody
		if err := json.Unmarshal(r.body, &b); err != nil {
			t.Fatal(err)
		}
		got = append(got, b)
	}
	want := []webhookBody{
		{Type: "message", Text: "Grüße", Sender: "Ada", DisplayName: "Ada", ExternalID: "ada-1", IdempotencyKey: "order.17"},
		{Type: "message", Text: "Grüße (2)", Sender: "Ada", DisplayName: "Ada", ExternalID: "ada-1", IdempotencyKey: "order.17-2"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("bodies (-want +got):\n%s", diff)
	}
	out.want(t, `"Grüße (2)"`, "2 as expected")
}

func TestWebhookStandard(t *testing.T) {
	t.Parallel()
	for _, secret := range []string{"whsec_c2VjcmV0IGtleSB3aXRoIDI0IGJ5dGVz", "an opaque text"} {
		h := newHub(t, nil)
		err := Webhook(t.Context(), WebhookOptions{
			SendOptions: SendOptions{BaseURL: h.URL, ChannelID: testChannel, Messages: 3, Repeat: 2, Out: &output{}},
			Secret:      secret,
			Scheme:      SchemeStandard,
		})
		if err != nil {
			t.Fatal(err)
		}
		library, err := standardwebhooks.NewWebhookRaw(signature.StandardKey(secret))
		if err != nil {
			t.Fatal(err)
		}
		received := h.received()
		if len(received) != 6 {
			t.Fatalf("%d posts, want 6", len(received))
		}
		bodyOf := map[string]string{}
		for _, r := range received {
			if err := library.Verify(r.body, r.header); err != nil {
				t.Errorf("secret %q: %v", secret, err)
			}
			id := r.header.Get("webhook-id")
			if other, ok := bodyOf[id]; ok && other != string(r.body) {
				t.Errorf("id %s stands for two messages", id)
			}
			bodyOf[id] = string(r.body)
		}
		if len(bodyOf) != 3 {
			t.Errorf("%d ids for 3 messages sent twice", len(bodyOf))
		}
	}
}

func TestWebhookBadSignature(t *testing.T) {
	t.Parallel()
	for _, scheme := range []Scheme{SchemeTimestamped, SchemeStandard} {
		h := newHub(t, func(w http.ResponseWriter, r request) {
			now := time.Now()
			if !errors.Is(signature.VerifyTimestamped(r.header, r.body, [][]byte{[]byte("secret")}, now), signature.ErrMismatch) &&
				!errors.Is(signature.VerifyStandard(r.header, r.body, [][]byte{[]byte("secret")}, now), signature.ErrMismatch) {
				return
			}
			w.WriteHeader(http.StatusUnauthorized)
		})
		err := Webhook(t.Context(), WebhookOptions{
			SendOptions: SendOptions{BaseURL: h.URL, ChannelID: testChannel, BadSignature: true, Out: &output{}},
			Secret:      "secret", Scheme: scheme,
		})
		if err != nil {
			t.Errorf("%s: %v", scheme, err)
		}
	}
}

func TestSenselessOptions(t *testing.T) {
	t.Parallel()
	h := newHub(t, nil)
	tests := []struct {
		name   string
		change func(*WhatsAppOptions)
		want   string
	}{
		{"no secret", func(o *WhatsAppOptions) { o.AppSecret = "" }, "no app secret"},
		{"no channel", func(o *WhatsAppOptions) { o.ChannelID = "" }, "no channel id"},
		{"no output", func(o *WhatsAppOptions) { o.Out = nil }, "no writer"},
		{"messages", func(o *WhatsAppOptions) { o.Messages = maxMessages + 1 }, "messages"},
		{"repeat", func(o *WhatsAppOptions) { o.Repeat = -1 }, "repeat -1"},
		{"timeout", func(o *WhatsAppOptions) { o.Timeout = -1 }, "timeout"},
		{"batch", func(o *WhatsAppOptions) { o.Batch = -1 }, "batch"},
		{"people", func(o *WhatsAppOptions) { o.People = -1 }, "people"},
		{"statuses", func(o *WhatsAppOptions) { o.Statuses = maxMessages + 1 }, "statuses"},
		{"no scheme", func(o *WhatsAppOptions) { o.BaseURL = "127.0.0.1:4000" }, "http://host:port"},
		{"other scheme", func(o *WhatsAppOptions) { o.BaseURL = "ftp://127.0.0.1" }, "http://host:port"},
		{"no host", func(o *WhatsAppOptions) { o.BaseURL = "http://:4000" }, "http://host:port"},
		{"password", func(o *WhatsAppOptions) { o.BaseURL = "http://u:hidden@127.0.0.1" }, "has a user"},
		{"another machine", func(o *WhatsAppOptions) { o.BaseURL = "http://192.0.2.1" }, "--yes"},
		{"another machine, v6", func(o *WhatsAppOptions) { o.BaseURL = "http://[2001:db8::1]:4000" }, "--yes"},
		{"every interface", func(o *WhatsAppOptions) { o.BaseURL = "http://0.0.0.0:4000" }, "--yes"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			o := newWhatsApp(h, &output{})
			tt.change(&o)
			err := WhatsApp(t.Context(), o)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
			if err != nil && (strings.Contains(err.Error(), testAppSecret) || strings.Contains(err.Error(), "hidden")) {
				t.Errorf("a secret in the error: %v", err)
			}
			if len(h.received()) != 0 {
				t.Error("something was sent")
			}
		})
	}
	o := WebhookOptions{SendOptions: newWhatsApp(h, &output{}).SendOptions}
	if err := Webhook(t.Context(), o); err == nil || !strings.Contains(err.Error(), "secret") {
		t.Errorf("error %v without a secret", err)
	}
	o.Secret, o.Scheme = "secret", "md5"
	if err := Webhook(t.Context(), o); err == nil || !strings.Contains(err.Error(), "md5") {
		t.Errorf("error %v with an unknown scheme", err)
	}
}

func TestRequireLoopback(t *testing.T) {
	t.Parallel()
	tests := []struct {
		name  string
		addrs []string
		want  error
	}{
		{"v4", []string{"127.0.0.1"}, nil},
		{"v4, another", []string{"127.8.9.10"}, nil},
		{"both families", []string{"::1", "127.0.0.1"}, nil},
		{"v4 in v6", []string{"::ffff:127.0.0.1"}, nil},
		{"private", []string{"10.0.0.1"}, errNotLoopback},
		{"private v4 in v6", []string{"::ffff:10.0.0.1"}, errNotLoopback},
		{"one of two", []string{"127.0.0.1", "192.0.2.1"}, errNotLoopback},
		{"unspecified", []string{"0.0.0.0"}, errNotLoopback},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			lookup := func(context.Context, string, string) ([]netip.Addr, error) {
				var out []netip.Addr
				for _, a := range tt.addrs {
					out = append(out, netip.MustParseAddr(a))
				}
				return out, nil
			}
			if err := RequireLoopback(t.Context(), lookup, "hub.test"); !errors.Is(err, tt.want) {
				t.Errorf("error %v, want %v", err, tt.want)
			}
			// The connection is checked alike, whatever the lookup said.
			last := netip.AddrPortFrom(netip.MustParseAddr(tt.addrs[len(tt.addrs)-1]), 80).String()
			if err := LoopbackOnly("tcp", last, nil); !errors.Is(err, tt.want) {
				t.Errorf("dial %s: error %v, want %v", last, err, tt.want)
			}
		})
	}
	nothing := func(context.Context, string, string) ([]netip.Addr, error) { return nil, nil }
	if err := RequireLoopback(t.Context(), nothing, "hub.test"); err == nil {
		t.Error("a name without addresses passes")
	}
}

func FuzzEscapeNonASCII(f *testing.F) {
	f.Add("Grüße 👋\u2028 \"<&>\"")
	f.Add("\xff\xed\xa0\x80")
	f.Fuzz(func(t *testing.T, text string) {
		plain, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		escaped := escapeNonASCII(plain)
		var want, got string
		if json.Unmarshal(plain, &want) != nil || json.Unmarshal(escaped, &got) != nil || want != got {
			t.Fatalf("%q became %q", want, got)
		}
		for _, b := range escaped {
			if b >= utf8.RuneSelf {
				t.Fatalf("%q is not ASCII", escaped)
			}
		}
	})
}
