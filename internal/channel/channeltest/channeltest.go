package channeltest

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/fault"
)

// Secret is that of the channels made by [Subject.Channel].
const Secret = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="

// Now is the time of the suite.
var Now = time.Unix(1_796_016_600, 0).UTC()

// Subject is an adapter and what the suite has to know of it.
type Subject struct {
	Adapter channel.Adapter
	Config  json.RawMessage // valid, also with require_signature

	// For a channel.Receiver:
	Body  []byte                                               // with at least one message
	Sign  func(header http.Header, body []byte, now time.Time) // a good proof for Channel
	Timed bool                                                 // proofs expire
}

// Channel makes a channel of the subject that demands signatures.
func (s Subject) Channel() *channel.Channel {
	return &channel.Channel{
		TenantID: uuid.MustParse("01930000-0000-7000-8000-000000000001"),
		ID:       uuid.MustParse("01930000-0000-7000-8000-000000000002"),
		Type:     s.Adapter.Type(), Mode: s.Adapter.Modes()[0], Status: channel.StatusActive,
		Config: s.Config, Secret: Secret, RequireSignature: true,
	}
}

// Run runs the suite.
func Run(t *testing.T, s Subject) {
	t.Run("schema", func(t *testing.T) { t.Parallel(); testSchema(t, s) })
	t.Run("config", func(t *testing.T) { t.Parallel(); testConfig(t, s) })
	_, sends := s.Adapter.(channel.Sender)
	receiver, receives := s.Adapter.(channel.Receiver)
	for _, mode := range s.Adapter.Modes() {
		if mode.Sends() && !sends || mode.Receives() && !receives {
			t.Errorf("mode %s is offered and the adapter cannot do it", mode)
		}
	}
	if receives {
		t.Run("proof", func(t *testing.T) { t.Parallel(); testProof(t, s, receiver) })
		t.Run("parse", func(t *testing.T) { t.Parallel(); testParse(t, s, receiver) })
	}
}

func testSchema(t *testing.T, s Subject) {
	if len(s.Adapter.Modes()) == 0 || s.Adapter.Type() == "" {
		t.Error("an adapter has a type and at least one mode")
	}
	seen := map[string]bool{}
	for _, f := range s.Adapter.Fields() {
		if f.Name == "" || seen[f.Name] || f.Label == "" || f.Help == "" {
			t.Errorf("field %q: name (once), label and help are for people and have to be there", f.Name)
		}
		seen[f.Name] = true
		switch f.Type {
		case channel.FieldInteger:
			if f.Min >= f.Max {
				t.Errorf("field %q: an integer has a range", f.Name)
			}
		case channel.FieldString, channel.FieldURL, channel.FieldBoolean, channel.FieldMap:
		default:
			t.Errorf("field %q: unknown type %q", f.Name, f.Type)
		}
	}
	for _, f := range channel.CommonFields() {
		if !seen[f.Name] {
			t.Errorf("the common field %q is missing", f.Name)
		}
	}
}

func testConfig(t *testing.T, s Subject) {
	if faults := s.Adapter.Validate(s.Config, true); len(faults) > 0 {
		t.Fatalf("the subject's config is refused: %v", faults)
	}
	var good map[string]any
	if err := json.Unmarshal(s.Config, &good); err != nil {
		t.Fatal(err)
	}
	with := func(name string, value any) json.RawMessage {
		changed := map[string]any{}
		for k, v := range good {
			changed[k] = v
		}
		if value == nil {
			delete(changed, name)
		} else {
			changed[name] = value
		}
		raw, err := json.Marshal(changed)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	refused := func(what string, config json.RawMessage, pointer, code string) {
		t.Helper()
		faults := s.Adapter.Validate(config, true)
		if !slices.ContainsFunc(faults, func(f fault.Field) bool { return f.Pointer == pointer && f.Code == code }) {
			t.Errorf("%s: faults are %+v, want %s at %q", what, faults, code, pointer)
		}
	}
	refused("unknown member", with("no/such member", 1), "/no~1such member", fault.UnknownMember)
	refused("not an object", json.RawMessage(`[]`), "", fault.InvalidType)
	refused("not JSON", json.RawMessage(`{`), "", fault.Malformed)
	refused("a member twice", json.RawMessage(`{"a":1,"a":2}`), "", fault.Malformed)
	for _, f := range s.Adapter.Fields() {
		refused(f.Name+" of another type", with(f.Name, []any{1}), "/"+f.Name, fault.InvalidType)
		if f.Required || f.RequiredWithSignature {
			refused(f.Name+" missing", with(f.Name, nil), "/"+f.Name, fault.Required)
		}
		if f.Type == channel.FieldInteger {
			refused(f.Name+" too large", with(f.Name, f.Max+1), "/"+f.Name, fault.OutOfRange)
			refused(f.Name+" too small", with(f.Name, f.Min-1), "/"+f.Name, fault.OutOfRange)
			refused(f.Name+" with a fraction", with(f.Name, float64(f.Min)+0.5), "/"+f.Name, fault.InvalidType)
		}
	}
}

func testProof(t *testing.T, s Subject, r channel.Receiver) {
	ch := s.Channel()
	signed := func(body []byte, at time.Time) http.Header {
		h := http.Header{}
		s.Sign(h, body, at)
		return h
	}
	good := signed(s.Body, Now)
	if err := r.Verify(ch, channel.Request{Header: good, Body: s.Body, Now: Now}); err != nil {
		t.Fatalf("a good proof is refused: %v", err)
	}

	for name, h := range map[string]http.Header{"no header": {}, "nil header": nil} {
		if err := r.Verify(ch, channel.Request{Header: h, Body: s.Body, Now: Now}); !errors.Is(err, channel.ErrUnsigned) {
			t.Errorf("%s: got %v, want ErrUnsigned", name, err)
		}
	}
	refused := func(name string, h http.Header, body []byte, now time.Time) {
		t.Helper()
		for _, required := range []bool{true, false} {
			ch := s.Channel()
			ch.RequireSignature = required
			err := r.Verify(ch, channel.Request{Header: h, Body: body, Now: now})
			if !errors.Is(err, channel.ErrSignature) && !errors.Is(err, channel.ErrUnsigned) {
				t.Errorf("%s, require_signature %t: got %v, want a refusal", name, required, err)
			}
			if err != nil && strings.Contains(err.Error(), Secret) {
				t.Errorf("%s: the error holds the secret", name)
			}
		}
	}
	// Every byte counts, and so does every bit: one of each byte is turned.
	for i := range s.Body {
		changed := bytes.Clone(s.Body)
		changed[i] ^= 1 << (i % 8)
		refused(fmt.Sprintf("byte %d changed", i), good, changed, Now)
	}
	refused("a byte more", good, append(bytes.Clone(s.Body), '\n'), Now)
	refused("a byte less", good, s.Body[:len(s.Body)-1], Now)
	refused("no body", good, nil, Now)
	for name, values := range good {
		text := values[0]
		set := func(values ...string) http.Header {
			h := good.Clone()
			h[name] = values
			return h
		}
		refused(name+" empty", set(""), s.Body, Now)
		refused(name+" cut", set(text[:len(text)-1]), s.Body, Now)
		refused(name+" other text", set("sha1=0000"), s.Body, Now)
		refused(name+" wrong, then right", set("v1,AAAA", text), s.Body, Now)
	}
	if s.Timed {
		for _, age := range []time.Duration{301 * time.Second, -301 * time.Second, 24 * time.Hour} {
			refused(fmt.Sprintf("%s old", age), good, s.Body, Now.Add(age))
		}
		for _, age := range []time.Duration{300 * time.Second, -300 * time.Second} {
			if err := r.Verify(ch, channel.Request{Header: good, Body: s.Body, Now: Now.Add(age)}); err != nil {
				t.Errorf("%s old: got %v, want a good proof", age, err)
			}
		}
	}
	// Signatures are over bytes: what stands in them is of no account.
	for _, body := range []string{"{\"text\":\"\U0001f60a\"}", `{"text":"\ud83d\ude0a"}`, `{"text":"\u001B"}`, `{"text":"\u001b"}`,
		`{ "text" :  "x" }`, `{"b":1,"a":2,"a":3}`, "{\"text\":\"x\"}\n", "", "text=x", "\xff\x00"} {
		if err := r.Verify(ch, channel.Request{Header: signed([]byte(body), Now), Body: []byte(body), Now: Now}); err != nil {
			t.Errorf("body %q: got %v, want a good proof", body, err)
		}
	}
	if keeper, ok := s.Adapter.(channel.PathKeeper); ok && keeper.KeepsPath(ch) {
		verify := func(path string) error {
			return r.Verify(ch, channel.Request{Header: signed(s.Body, Now), PathSecret: path, Body: s.Body, Now: Now})
		}
		right := ch.PathSecrets(Now)[0]
		if err := verify(right); err != nil {
			t.Errorf("a good proof at the channel's own address is refused: %v", err)
		}
		for _, path := range []string{right[1:], right + "A", strings.ToUpper(right), Secret, "%00"} {
			if err := verify(path); !errors.Is(err, channel.ErrSignature) || strings.Contains(err.Error(), path) {
				t.Errorf("a good proof at the address %q: got %v, want ErrSignature without it", path, err)
			}
		}
	}
	ch.RequireSignature = false
	if err := r.Verify(ch, channel.Request{Header: http.Header{}, Body: s.Body, Now: Now}); err != nil {
		t.Errorf("unsigned where signatures are optional: got %v, want nil", err)
	}
}

func testParse(t *testing.T, s Subject, r channel.Receiver) {
	in, err := r.Parse(s.Channel(), channel.EndpointInbound, http.Header{}, s.Body, Now)
	if err != nil || len(in.Messages) == 0 {
		t.Fatalf("the subject's body gives %+v and %v, want a message", in, err)
	}
	for name, body := range map[string]string{
		"empty":         "",
		"blank":         "  ",
		"a word":        "hello",
		"a string":      `"hello"`,
		"null":          "null",
		"a number":      "1",
		"cut":           string(s.Body[:len(s.Body)-1]),
		"two values":    string(s.Body) + string(s.Body),
		"bad UTF-8":     "{\"text\":\"\xff\"}",
		"nested deeply": strings.Repeat(`{"a":`, 1000) + "1" + strings.Repeat("}", 1000),
		"open brackets": strings.Repeat("[", 100_000),
		"member twice":  `{"text":"a","text":"b"}`,
		"huge exponent": `{"text":"a","metadata":{"n":1e999999}}`,
	} {
		var parseErr *channel.ParseError
		if _, err := r.Parse(s.Channel(), channel.EndpointInbound, http.Header{}, []byte(body), Now); !errors.As(err, &parseErr) {
			t.Errorf("%s: got %v, want a *ParseError", name, err)
		}
	}
	// Every member of the good body, replaced by values of every type: nothing panics, the result keeps its promises.
	for _, body := range mutations(t, s.Body) {
		checkParse(t, s, r, channel.EndpointInbound, body)
	}
}

// mutations replaces each value inside a body in turn, and leaves it out.
func mutations(t *testing.T, body []byte) [][]byte {
	var root any
	decoder := json.NewDecoder(bytes.NewReader(body))
	decoder.UseNumber()
	if err := decoder.Decode(&root); err != nil {
		t.Fatal(err)
	}
	var out [][]byte
	emit := func() {
		raw, err := json.Marshal(root)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, raw)
	}
	values := []any{nil, true, json.Number("-1"), "", strings.Repeat("\x00é", 300), []any{nil, 1, "x", []any{}}, map[string]any{}}
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, old := range v {
				for _, value := range values {
					v[name] = value
					emit()
				}
				delete(v, name)
				emit()
				v[name] = old
				walk(old)
			}
		case []any:
			for i, old := range v {
				for _, value := range values {
					v[i] = value
					emit()
				}
				v[i] = old
				walk(old)
			}
		}
	}
	walk(root)
	return out
}

// FuzzParse is the body of a fuzz target: Parse of any bytes keeps its promises.
func FuzzParse(f *testing.F, s Subject, seeds ...[]byte) {
	r := s.Adapter.(channel.Receiver)
	f.Add(s.Body)
	for _, seed := range seeds {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		checkParse(t, s, r, channel.EndpointInbound, body)
		checkParse(t, s, r, channel.EndpointStatus, body)
	})
}

// checkParse parses a body and checks what Inbound promises.
func checkParse(t *testing.T, s Subject, r channel.Receiver, endpoint channel.Endpoint, body []byte) {
	t.Helper()
	in, err := r.Parse(s.Channel(), endpoint, http.Header{}, body, Now)
	if err != nil {
		var parseErr *channel.ParseError
		if !errors.As(err, &parseErr) || parseErr.Detail == "" {
			t.Errorf("body %q: error %v, want a *ParseError with a detail", body, err)
		}
		return
	}
	if fault := broken(in); fault != "" {
		t.Errorf("body %q at %s: %s", body, endpoint, fault)
	}
}

// broken says which promise of Inbound does not hold, or "".
func broken(in channel.Inbound) string {
	// Everything as JSON shows every string at once. Marshalling replaces bad UTF-8, so that it is looked for by hand.
	raw, err := json.Marshal(in)
	if err != nil {
		return "cannot be marshalled: " + err.Error()
	}
	if bytes.Contains(raw, []byte(`\u0000`)) {
		return "holds a NUL"
	}
	indexes := map[int]bool{}
	for _, rejected := range in.Rejected {
		if indexes[rejected.Index] || rejected.Err.Err() == nil {
			return "an item is rejected twice, or without a reason"
		}
		indexes[rejected.Index] = true
		for _, f := range rejected.Err.Fields {
			if f.Pointer != "" && f.Pointer[0] != '/' || f.Code == "" || f.Detail == "" {
				return fmt.Sprintf("a fault without pointer, code or detail: %+v", f)
			}
		}
	}
	for _, m := range in.Messages {
		switch {
		case m.Type == "" || m.Sender == "" || m.At.IsZero() || m.At.After(Now):
			return fmt.Sprintf("a message without type, sender or time: %+v", m)
		case len(m.ProviderID) > channel.MaxProviderID || len(m.ReplyToProviderID) > channel.MaxProviderID:
			return "a provider's id is too long"
		case !utf8.ValidString(m.Text + m.Sender + m.ProviderID):
			return "text is not UTF-8"
		case m.Participant != nil && (len(m.Participant.Identities) == 0 || utf8.RuneCountInString(m.Participant.DisplayName) > 255):
			return "a participant without identity, or with a long name"
		}
		if m.Participant != nil {
			for _, identity := range m.Participant.Identities {
				if identity.Value == "" || utf8.RuneCountInString(identity.Value) > 255 || identity.Kind == "" {
					return fmt.Sprintf("an identity that cannot be stored: %+v", identity)
				}
			}
		}
		for _, attachment := range m.Attachments {
			if !json.Valid(attachment) || attachment[0] != '{' {
				return fmt.Sprintf("an attachment that is no object: %s", attachment)
			}
		}
	}
	for _, receipt := range in.Receipts {
		if !slices.Contains([]string{"sent", "delivered", "read", "failed"}, receipt.Status) ||
			receipt.ProviderID == "" && receipt.DeliveryID == nil || receipt.At.IsZero() ||
			len(receipt.ProviderID) > channel.MaxProviderID || !utf8.ValidString(receipt.Error) {
			return fmt.Sprintf("a receipt that cannot be used: %+v", receipt)
		}
	}
	return ""
}
