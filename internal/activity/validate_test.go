package activity

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/fault"
)

func fields(err error) []string {
	var invalid *fault.Invalid
	if !errors.As(err, &invalid) {
		return nil
	}
	var words []string
	for _, f := range invalid.Fields {
		words = append(words, f.Pointer+" "+f.Code)
	}
	return words
}

func TestEmptyMessage(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		new  New
		want []string
	}{
		"nothing":         {New{Sender: "user"}, []string{"/text required"}},
		"empty text":      {New{Sender: "user", Text: ptr(""), Metadata: raw(`{ }`)}, []string{"/text required"}},
		"text":            {New{Sender: "user", Text: ptr("t")}, nil},
		"attachment":      {New{Sender: "user", Attachments: []json.RawMessage{raw(`{"contentType":"a/b","contentUrl":"/a"}`)}}, nil},
		"metadata":        {New{Sender: "user", Metadata: raw(`{"a":1}`)}, nil},
		"no message":      {New{Sender: "user", Type: TypeEvent}, nil},
		"another mistake": {New{}, []string{"/sender required"}},
	} {
		if diff := cmp.Diff(tt.want, fields(Validate(&tt.new))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestValidate(t *testing.T) {
	t.Parallel()
	attach := func(texts ...string) New {
		n := New{Sender: "user"}
		for _, text := range texts {
			n.Attachments = append(n.Attachments, json.RawMessage(text))
		}
		return n
	}
	meta := func(text string) New { return New{Sender: "user", Metadata: json.RawMessage(text)} }
	nested := func(depth int) string { return strings.Repeat(`{"a":`, depth) + "1" + strings.Repeat("}", depth) }
	long := strings.Repeat("é", 256)
	for name, tt := range map[string]struct {
		new  New
		want []string
	}{
		"least":              {New{Sender: "user"}, nil},
		"longest text":       {New{Sender: "user", Text: ptr(strings.Repeat("x", MaxText))}, nil},
		"text one too long":  {New{Sender: "user", Text: ptr(strings.Repeat("x", MaxText+1))}, []string{"/text too_long"}},
		"text is bytes":      {New{Sender: "user", Text: ptr(strings.Repeat("é", MaxText/2+1))}, []string{"/text too_long"}},
		"text with NUL":      {New{Sender: "user", Text: ptr("a\x00b")}, []string{"/text malformed"}},
		"text no UTF-8":      {New{Sender: "user", Text: ptr("a\xff")}, []string{"/text malformed"}},
		"no sender":          {New{}, []string{"/sender required"}},
		"sender 255":         {New{Sender: long[:2*255]}, nil},
		"sender 256":         {New{Sender: long}, []string{"/sender too_long"}},
		"sender with NUL":    {New{Sender: "\x00"}, []string{"/sender malformed"}},
		"key too long":       {New{Sender: "user", IdempotencyKey: strings.Repeat("k", 256)}, []string{"/idempotency_key too_long"}},
		"key with NUL":       {New{Sender: "user", IdempotencyKey: "\x00"}, []string{"/idempotency_key malformed"}},
		"everything at once": {New{Type: "x", Text: ptr("\xff"), Metadata: raw(`1`)}, []string{"/type unknown_value", "/sender required", "/text malformed", "/metadata invalid_type"}},

		"unknown type":             {New{Sender: "user", Type: "Message"}, []string{"/type unknown_value"}},
		"reserved type":            {New{Sender: "user", Type: TypeDeliveryReceipt}, []string{"/type unknown_value"}},
		"server's type":            {New{Sender: "user", Type: TypeConversationUpdate}, []string{"/type unknown_value"}},
		"server's type, by itself": {New{Sender: "user", Type: TypeConversationUpdate, Internal: true}, nil},
		"edit of nothing":          {New{Sender: "user", Type: TypeMessageUpdate}, []string{"/reply_to_id required"}},
		"reaction":                 {New{Sender: "user", Type: TypeMessageReaction, ReplyToID: ptr(uuid.New()), Text: ptr("👍🏽")}, nil},
		"reaction taken back":      {New{Sender: "user", Type: TypeMessageReaction, ReplyToID: ptr(uuid.New()), Text: ptr("")}, nil},
		"long reaction":            {New{Sender: "user", Type: TypeMessageReaction, ReplyToID: ptr(uuid.New()), Text: ptr(strings.Repeat("x", 65))}, []string{"/text too_long"}},
		"reaction with a new line": {New{Sender: "user", Type: TypeMessageReaction, ReplyToID: ptr(uuid.New()), Text: ptr("a\nb")}, []string{"/text malformed"}},

		"metadata null":             {meta(`null`), nil},
		"metadata longest":          {meta(`{"a":"` + strings.Repeat("x", MaxMetadata-8) + `"}`), nil},
		"metadata one too long":     {meta(`{"a":"` + strings.Repeat("x", MaxMetadata-7) + `"}`), []string{"/metadata too_long"}},
		"metadata array":            {meta(`[]`), []string{"/metadata invalid_type"}},
		"metadata broken":           {meta(`{"a":}`), []string{"/metadata malformed"}},
		"metadata twice":            {meta(`{} {}`), []string{"/metadata malformed"}},
		"metadata no UTF-8":         {meta("{\"a\":\"\xff\"}"), []string{"/metadata malformed"}},
		"metadata with NUL":         {meta(`{"a":["\u0000"]}`), []string{"/metadata malformed"}},
		"metadata with NUL in name": {meta(`{"\u0000":1}`), []string{"/metadata malformed"}},
		"metadata lone surrogate":   {meta(`{"a":"\ud800"}`), nil},
		"metadata 32 deep":          {meta(nested(32)), nil},
		"metadata 33 deep":          {meta(nested(33)), []string{"/metadata out_of_range"}},
		"brackets in a string":      {meta(`{"a":"` + strings.Repeat(`[{\"`, 40) + `"}`), nil},
		"huge number":               {meta(`{"a":1e309}`), []string{"/metadata out_of_range"}},
		"tiny number":               {meta(`{"a":1e-100000}`), []string{"/metadata out_of_range"}},
		"endless number":            {meta(`{"a":` + strings.Repeat("1", 500) + `}`), []string{"/metadata out_of_range"}},
		"absurd exponent":           {meta(`{"a":1e99999999999999999999}`), []string{"/metadata out_of_range"}},

		"attachment by URL":         {attach(`{"contentType":"image/png","contentUrl":"https://example.org/a.png?x=1","name":"a.png","size":12,"thumbnailUrl":"/t.png"}`), nil},
		"attachment by path":        {attach(`{"contentType":"image/png","contentUrl":"/a.png"}`), nil},
		"attachment of a provider":  {attach(`{"contentType":"image/png","channelData":{"id":"1"}}`), nil},
		"attachment with nothing":   {attach(`{"contentType":"image/png"}`), []string{"/attachments/0/contentUrl required"}},
		"second attachment":         {attach(`{"contentType":"a/b","contentUrl":"/"}`, `{}`), []string{"/attachments/1/contentType required", "/attachments/1/contentUrl required"}},
		"attachment no object":      {attach(`"x"`), []string{"/attachments/0 invalid_type"}},
		"attachment wrong types":    {attach(`{"contentType":1,"contentUrl":2,"name":3,"size":"4","content":5,"channelData":[]}`), []string{"/attachments/0/contentType invalid_type", "/attachments/0/contentUrl invalid_type", "/attachments/0/name invalid_type", "/attachments/0/size invalid_type", "/attachments/0/content invalid_type", "/attachments/0/channelData invalid_type"}},
		"no media type":             {attach(`{"contentType":"png","contentUrl":"/a"}`), []string{"/attachments/0/contentType malformed"}},
		"script URL":                {attach(`{"contentType":"a/b","contentUrl":"javascript:alert(1)"}`), []string{"/attachments/0/contentUrl malformed"}},
		"other host as a path":      {attach(`{"contentType":"a/b","contentUrl":"//example.org/a"}`), []string{"/attachments/0/contentUrl malformed"}},
		"other host, three slashes": {attach(`{"contentType":"a/b","contentUrl":"///example.org/a"}`), []string{"/attachments/0/contentUrl malformed"}},
		"other host with backslash": {attach(`{"contentType":"a/b","contentUrl":"/\\example.org/a"}`), []string{"/attachments/0/contentUrl malformed"}},
		"credentials in the URL":    {attach(`{"contentType":"a/b","contentUrl":"http://u:p@example.org/"}`), []string{"/attachments/0/contentUrl malformed"}},
		"negative size":             {attach(`{"contentType":"a/b","contentUrl":"/","size":-1}`), []string{"/attachments/0/size out_of_range"}},
		"broken size":               {attach(`{"contentType":"a/b","contentUrl":"/","size":1.5}`), []string{"/attachments/0/size out_of_range"}},
		"long URL":                  {attach(`{"contentType":"a/b","contentUrl":"/` + strings.Repeat("x", MaxURL) + `"}`), []string{"/attachments/0/contentUrl too_long"}},
		"attachment too large":      {attach(`{"contentType":"a/b","content":{"a":"` + strings.Repeat("x", MaxAttachment) + `"}}`), []string{"/attachments/0 too_long"}},
		"dropped members are free":  {attach(`{"contentType":"a/b","contentUrl":"/","other":"` + strings.Repeat("x", MaxAttachment) + `"}`), nil},
		"ten attachments":           {attach(strings.Split(strings.Repeat(`{"contentType":"a/b","contentUrl":"/"};`, 10), ";")[:10]...), nil},
		"eleven attachments":        {attach(strings.Split(strings.Repeat(`{};`, 11), ";")[:11]...), []string{"/attachments too_long"}},

		"card":                    {attach(`{"contentType":"application/vnd.converger.card.hero","content":{}}`), nil},
		"card without content":    {attach(`{"contentType":"application/vnd.converger.card.hero","content":[]}`), []string{"/attachments/0/content required"}},
		"location":                {attach(`{"contentType":"application/vnd.converger.location","content":{"latitude":48.1,"longitude":-11}}`), nil},
		"location nowhere":        {attach(`{"contentType":"application/vnd.converger.location","content":{"latitude":90.1,"longitude":"x","name":1}}`), []string{"/attachments/0/content/latitude out_of_range", "/attachments/0/content/longitude required", "/attachments/0/content/name invalid_type"}},
		"contacts":                {attach(`{"contentType":"application/vnd.converger.contacts","content":[{"name":"A","phones":["1"]}]}`), nil},
		"contacts that are none":  {attach(`{"contentType":"application/vnd.converger.contacts","content":[1,{"name":2,"phones":[3]},{"phones":{}}]}`), []string{"/attachments/0/content/0 invalid_type", "/attachments/0/content/1/name invalid_type", "/attachments/0/content/1/phones/0 invalid_type", "/attachments/0/content/2/phones invalid_type"}},
		"contacts without anyone": {attach(`{"contentType":"application/vnd.converger.contacts","content":[]}`), []string{"/attachments/0/content required"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			n := tt.new
			if n.Text == nil {
				n.Text = ptr("t") // what a message needs at least is TestEmptyMessage's
			}
			err := Validate(&n)
			if diff := cmp.Diff(tt.want, fields(err)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			if err == nil && (n.Type == "" || len(n.BodyHash) != 32 || !json.Valid(n.Metadata)) {
				t.Errorf("not normalised: %+v", n)
			}
		})
	}
}

func TestBodyHash(t *testing.T) {
	t.Parallel()
	hash := func(change func(*New)) []byte {
		n := New{
			Sender: "user", Text: ptr("hi"), Metadata: raw(`{"a":1,"b":"é"}`),
			Attachments: []json.RawMessage{raw(`{"contentType":"a/b","contentUrl":"/"}`)},
		}
		change(&n)
		if err := Validate(&n); err != nil {
			t.Fatal(err)
		}
		return n.BodyHash
	}
	base := hash(func(*New) {})
	for name, change := range map[string]func(*New){
		"explicit type":   func(n *New) { n.Type = TypeMessage },
		"spacing":         func(n *New) { n.Metadata = raw("{\n \"a\" : 1,\t\"b\":\"é\"}") },
		"order":           func(n *New) { n.Metadata = raw(`{"b":"é","a":1}`) },
		"escapes":         func(n *New) { n.Metadata = raw(`{"a":1,"b":"\u00e9"}`) },
		"dropped members": func(n *New) { n.Attachments = []json.RawMessage{raw(`{"x":1,"contentUrl":"/","contentType":"a/b"}`)} },
		"another key":     func(n *New) { n.IdempotencyKey, n.Caller = "k", "c" },
	} {
		if !bytes.Equal(base, hash(change)) {
			t.Errorf("%s makes it another body", name)
		}
	}
	seen := map[string]string{string(base): "base"}
	for name, change := range map[string]func(*New){
		"type":          func(n *New) { n.Type = TypeEvent },
		"sender":        func(n *New) { n.Sender = "use" },
		"text":          func(n *New) { n.Text = ptr("hi ") },
		"empty text":    func(n *New) { n.Text = ptr("") },
		"no text":       func(n *New) { n.Text = nil },
		"metadata":      func(n *New) { n.Metadata = raw(`{"a":2,"b":"é"}`) },
		"no metadata":   func(n *New) { n.Metadata = nil },
		"no attachment": func(n *New) { n.Attachments = nil },
		"attachment":    func(n *New) { n.Attachments[0] = raw(`{"contentType":"a/c","contentUrl":"/"}`) },
		"reply":         func(n *New) { n.ReplyToID = ptr(uuid.Nil) },
	} {
		h := string(hash(change))
		if other, there := seen[h]; there {
			t.Errorf("%s is the same body as %s", name, other)
		}
		seen[h] = name
	}
}

// FuzzValidate: whatever passes is stored by Postgres' rules (UTF-8, no NUL), is JSON, and passes again unchanged.
func FuzzValidate(f *testing.F) {
	f.Add("user", "text", []byte(`{"a":[1,"\u0000",1e400]}`), []byte(`{"contentType":"a/b","contentUrl":"/x","content":{}}`))
	f.Add("", "\xff", []byte(`{"a":"\ud800"}`), []byte(`{"contentType":"application/vnd.converger.location","content":{"latitude":1e1}}`))
	f.Fuzz(func(t *testing.T, sender, text string, metadata, attachment []byte) {
		n := New{Sender: sender, Text: &text, Metadata: metadata, Attachments: []json.RawMessage{attachment}}
		if Validate(&n) != nil {
			return
		}
		again := n
		again.valid, again.BodyHash = false, nil
		if err := Validate(&again); err != nil {
			t.Fatalf("what passed once fails: %v", err)
		}
		if !bytes.Equal(n.BodyHash, again.BodyHash) || !bytes.Equal(n.Metadata, again.Metadata) || !bytes.Equal(n.Attachments[0], again.Attachments[0]) {
			t.Fatalf("not in its final form:\n%s\n%s", n.Metadata, again.Metadata)
		}
		stored := string(n.Metadata) + string(n.Attachments[0])
		if strings.Contains(stored, "\x00") || strings.Contains(strings.ReplaceAll(stored, `\\`, ""), `\u0000`) {
			t.Fatalf("a NUL passed: %q", stored)
		}
		if !json.Valid(n.Metadata) || !json.Valid(n.Attachments[0]) {
			t.Fatalf("not JSON: %s %s", n.Metadata, n.Attachments[0])
		}
	})
}

// Postgres stores what Validate accepts at the edges.
func TestStoredAsAccepted(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	for _, metadata := range []string{
		`{"a":"\ud800"}`, `{"a":1e308,"b":-1e-308,"c":` + strings.Repeat("9", 300) + `}`, `{"\u2028":"\u007f\uffff😀"}`, `{"a":1,"a":2}`,
		strings.Repeat(`{"a":`, 32) + "null" + strings.Repeat("}", 32),
	} {
		n := w.message("\u2028 \U0010ffff \x7f \ufeff")
		n.Metadata = raw("%s", metadata)
		written := w.must(t, n)
		read, err := w.store.Get(t.Context(), w.tenant, written.ID)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(written, read, jsonEqual); diff != "" {
			t.Errorf("%s (-written +read):\n%s", metadata, diff)
		}
	}
}

func TestCanonical(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	n := w.keyed("k\"1", "a \"quote\" \\ \n\t\x01 \u2028 <b> é 😀")
	n.Metadata = raw(`{"x":[1]}`)
	a := w.must(t, n)
	var got map[string]any
	if err := json.Unmarshal(a.Canonical(), &got); err != nil {
		t.Fatalf("%v: %s", err, a.Canonical())
	}
	want := map[string]any{
		"id": a.ID.String(), "type": "message", "sender": "user", "text": *n.Text, "attachments": []any{},
		"metadata": map[string]any{"x": []any{1.0}}, "idempotency_key": "k\"1", "seq": 1.0,
		"conversation_id": w.conv.String(), "tenant_id": w.tenant.String(), "reply_to_id": nil, "edited_at": nil,
		"deleted_at": nil, "inserted_at": a.InsertedAt.Format("2006-01-02T15:04:05.000000Z"),
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if wrapped, err := json.Marshal([]Activity{a}); err != nil || !json.Valid(wrapped) {
		t.Errorf("as part of another object: %s, %v", wrapped, err)
	}
}

// FuzzCanonical: any text comes back as it was, with U+FFFD for what is no UTF-8, as encoding/json has it.
func FuzzCanonical(f *testing.F) {
	f.Add("a\x00\"\\\u2028\xff😀")
	f.Fuzz(func(t *testing.T, text string) {
		var got, want string
		if err := json.Unmarshal(appendString(nil, &text), &got); err != nil {
			t.Fatal(err)
		}
		standard, err := json.Marshal(text)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(standard, &want); err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%q became %q, encoding/json has %q", text, got, want)
		}
	})
}

func TestWatermark(t *testing.T) {
	t.Parallel()
	if got := Watermark(42); got != "c2VxOjQy" {
		t.Errorf("Watermark(42) = %q", got)
	}
	for text, want := range map[string]int64{"": 0, "c2VxOjQy": 42, "42": 42, "0": 0, Watermark(0): 0, Watermark(1<<63 - 1): 1<<63 - 1} {
		if got, err := ParseWatermark(text); err != nil || got != want {
			t.Errorf("ParseWatermark(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"-1", "x", "c2VxOg", "c2VxOi0x", "c2VxOjQy=", "c2VxOjR5", " 42", "99999999999999999999", "c2VxOjk5OTk5OTk5OTk5OTk5OTk5OTk5", "U2VxOjQy"} {
		if got, err := ParseWatermark(text); !errors.Is(err, ErrBadWatermark) {
			t.Errorf("ParseWatermark(%q) = %d, %v", text, got, err)
		}
	}
}

func FuzzWatermark(f *testing.F) {
	f.Add("c2VxOjQy")
	f.Fuzz(func(t *testing.T, text string) {
		seq, err := ParseWatermark(text)
		if err != nil {
			return
		}
		if again, err := ParseWatermark(Watermark(seq)); err != nil || again != seq || seq < 0 {
			t.Errorf("%q: %d, then %d, %v", text, seq, again, err)
		}
	})
}
