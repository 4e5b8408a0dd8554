package simulate

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"converger/internal/signature"
)

const (
	defaultPhoneNumberID = "106540352242922"
	displayPhoneNumber   = "15550783881"
	businessAccountID    = "102290129340398"
	defaultBatch         = 10
	maxBatch             = 1000 // the most updates that Meta puts into one body
)

// WhatsAppOptions tells WhatsApp what to send. Messages defaults to 3, so that
// the zero value makes one body with two texts, an image and a status.
type WhatsAppOptions struct {
	SendOptions
	// AppSecret is the secret of the Meta app, from the channel's config.
	// Required.
	AppSecret string
	// PhoneNumberID is the business number that was written to. Empty means
	// 106540352242922, which Meta's examples use.
	PhoneNumberID string
	// Statuses is how many receipts to send after the messages: sent, delivered,
	// read, failed and again, for messages that the hub does not know. Zero
	// means 1, less than zero none.
	Statuses int
	// People is how many people write, in turn. They are the same in every run,
	// so that a second run continues their conversations. The first has a phone
	// number, the second only a username. Zero means 1.
	People int
	// Batch is how many messages and statuses go into one body at most, up to
	// 1000. Zero means 10.
	Batch int
}

// WhatsApp posts what Meta's Cloud API posts to a channel of type
// whatsapp_meta: every message type in turn, and statuses, in bodies with
// several entries and changes, escaped and signed as Meta does. It returns an
// error for senseless options, if any post was not answered as expected, or the
// context's if that ended the run.
//
// The forms are those of
// https://developers.facebook.com/documentation/business-messaging/whatsapp/webhooks/.
func WhatsApp(ctx context.Context, o WhatsAppOptions) error {
	o.PhoneNumberID = cmp.Or(o.PhoneNumberID, defaultPhoneNumberID)
	o.Statuses = max(cmp.Or(o.Statuses, 1), 0)
	o.People = cmp.Or(o.People, 1)
	o.Batch = cmp.Or(o.Batch, defaultBatch)
	switch {
	case o.AppSecret == "":
		return errors.New("simulate whatsapp: no app secret")
	case o.People < 0 || o.People > 10_000:
		return fmt.Errorf("simulate whatsapp: %d people: want 1 to 10000", o.People)
	case o.Batch < 0 || o.Batch > maxBatch:
		return fmt.Errorf("simulate whatsapp: batch of %d: want 1 to %d", o.Batch, maxBatch)
	case o.Statuses > maxMessages:
		return fmt.Errorf("simulate whatsapp: %d statuses: want at most %d", o.Statuses, maxMessages)
	}
	s, err := newSender(ctx, o.SendOptions, 3)
	if err != nil {
		return fmt.Errorf("simulate whatsapp: %w", err)
	}

	updates := newMeta(s, o).updates()
	if s.Shuffle {
		s.rand.Shuffle(len(updates), func(i, j int) { updates[i], updates[j] = updates[j], updates[i] })
	}
	var posts []*post
	for len(updates) > 0 {
		n := min(o.Batch, len(updates))
		body, err := json.Marshal(envelopeOf(updates[:n], o.PhoneNumberID))
		if err != nil {
			return fmt.Errorf("simulate whatsapp: encode a batch: %w", err)
		}
		body = escapeNonASCII(body)
		p := &post{body: body, sign: func(header http.Header, _ time.Time) error {
			return signature.SignHubSHA256(header, body, s.key([]byte(o.AppSecret)))
		}}
		for _, u := range updates[:n] {
			p.holds = append(p.holds, u.String())
		}
		posts = append(posts, p)
		updates = updates[n:]
	}
	if err := s.run(ctx, posts, map[int]string{
		http.StatusUnauthorized: "compare the app secret with app_secret in the channel's config.",
	}); err != nil {
		return fmt.Errorf("simulate whatsapp: %w", err)
	}
	return nil
}

// The body that Meta posts.
type (
	metaEnvelope struct {
		Object string      `json:"object"`
		Entry  []metaEntry `json:"entry"`
	}
	metaEntry struct {
		ID      string       `json:"id"`
		Changes []metaChange `json:"changes"`
	}
	metaChange struct {
		Field string    `json:"field"`
		Value metaValue `json:"value"`
	}
	metaValue struct {
		MessagingProduct string        `json:"messaging_product"`
		Metadata         metaMetadata  `json:"metadata"`
		Contacts         []metaContact `json:"contacts,omitempty"`
		Messages         []metaMessage `json:"messages,omitempty"`
		Statuses         []metaStatus  `json:"statuses,omitempty"`
	}
	metaMetadata struct {
		DisplayPhoneNumber string `json:"display_phone_number"`
		PhoneNumberID      string `json:"phone_number_id"`
	}
	metaContact struct {
		Profile metaProfile `json:"profile"`
		WaID    string      `json:"wa_id,omitempty"` // absent for people with a username
		UserID  string      `json:"user_id"`
	}
	metaProfile struct {
		Name     string `json:"name"`
		Username string `json:"username,omitempty"`
	}
	metaMessage struct {
		From       string       `json:"from,omitempty"`
		FromUserID string       `json:"from_user_id"`
		ID         string       `json:"id"`
		Timestamp  string       `json:"timestamp"`
		Context    *metaContext `json:"context,omitempty"`
		Type       string       `json:"type"`
		member     string       // that holds the content
		content    any
	}
	metaContext struct {
		From string `json:"from"`
		ID   string `json:"id"`
	}
	metaStatus struct {
		ID              string       `json:"id"`
		Status          string       `json:"status"`
		Timestamp       string       `json:"timestamp"`
		RecipientID     string       `json:"recipient_id,omitempty"`
		RecipientUserID string       `json:"recipient_user_id"`
		Pricing         *metaPricing `json:"pricing,omitempty"`
		Errors          []metaError  `json:"errors,omitempty"`
	}
	metaPricing struct {
		Billable     bool   `json:"billable"`
		PricingModel string `json:"pricing_model"`
		Category     string `json:"category"`
		Type         string `json:"type"`
	}
	metaError struct {
		Code      int            `json:"code"`
		Title     string         `json:"title"`
		Message   string         `json:"message"`
		ErrorData map[string]any `json:"error_data"`
	}
)

// MarshalJSON adds the content as the member that the type calls for.
func (m metaMessage) MarshalJSON() ([]byte, error) {
	type head metaMessage // without this method
	out, err := json.Marshal(head(m))
	if err != nil {
		return nil, err
	}
	content, err := json.Marshal(m.content)
	if err != nil {
		return nil, err
	}
	out = fmt.Appendf(out[:len(out)-1], ",%q:%s}", m.member, content)
	return out, nil
}

// metaUpdate is one message, with who wrote it, or one status.
type metaUpdate struct {
	contact metaContact
	message *metaMessage
	status  *metaStatus
}

func (u metaUpdate) String() string {
	if u.status != nil {
		return "status " + u.status.Status
	}
	return u.message.Type
}

// envelopeOf spreads updates over changes of at most two of one kind and
// entries of at most two changes. Meta's lists are plural at every level; a
// receiver that reads only the first of one of them loses something here.
func envelopeOf(updates []metaUpdate, phoneNumberID string) metaEnvelope {
	const perList = 2
	var changes []metaChange
	for _, u := range updates {
		var value *metaValue
		if n := len(changes); n > 0 {
			last := &changes[n-1].Value
			if u.message != nil && len(last.Statuses) == 0 && len(last.Messages) < perList ||
				u.status != nil && len(last.Messages) == 0 && len(last.Statuses) < perList {
				value = last
			}
		}
		if value == nil {
			changes = append(changes, metaChange{Field: "messages", Value: metaValue{
				MessagingProduct: "whatsapp",
				Metadata:         metaMetadata{DisplayPhoneNumber: displayPhoneNumber, PhoneNumberID: phoneNumberID},
			}})
			value = &changes[len(changes)-1].Value
		}
		if u.status != nil {
			value.Statuses = append(value.Statuses, *u.status)
			continue
		}
		value.Messages = append(value.Messages, *u.message)
		if len(value.Contacts) == 0 || value.Contacts[len(value.Contacts)-1] != u.contact {
			value.Contacts = append(value.Contacts, u.contact)
		}
	}
	envelope := metaEnvelope{Object: "whatsapp_business_account"}
	for len(changes) > 0 {
		n := min(perList, len(changes))
		envelope.Entry = append(envelope.Entry, metaEntry{ID: businessAccountID, Changes: changes[:n:n]})
		changes = changes[n:]
	}
	return envelope
}

// escapeNonASCII writes every character beyond ASCII of a JSON text as \uXXXX,
// as Meta does before it signs. They occur in strings only.
func escapeNonASCII(text []byte) []byte {
	out := make([]byte, 0, len(text))
	for len(text) > 0 {
		r, size := utf8.DecodeRune(text)
		switch {
		case r < utf8.RuneSelf:
			out = append(out, text[0])
		case r > 0xffff:
			high, low := utf16.EncodeRune(r)
			out = fmt.Appendf(out, `\u%04x\u%04x`, high, low)
		default:
			out = fmt.Appendf(out, `\u%04x`, r)
		}
		text = text[size:]
	}
	return out
}

// meta makes the updates of one run.
type meta struct {
	*sender
	o     WhatsAppOptions
	first string // id of the first message, for reactions
}

func newMeta(s *sender, o WhatsAppOptions) *meta { return &meta{sender: s, o: o} }

// updates returns the messages and then the statuses, a second apart, the last
// of them now.
func (m *meta) updates() []metaUpdate {
	var updates []metaUpdate
	first := m.now.Unix() - int64(m.Messages+m.o.Statuses-1)
	at := func() string { return strconv.FormatInt(first+int64(len(updates)), 10) }

	for i := range m.Messages {
		contact := person(i % m.o.People)
		kind := metaKinds[i%len(metaKinds)]
		message := &metaMessage{
			From: contact.WaID, FromUserID: contact.UserID, ID: m.wamid(contact, inboundMark),
			Timestamp: at(), Type: kind.name, member: cmp.Or(kind.member, kind.name),
		}
		if kind.answers {
			message.Context = &metaContext{From: displayPhoneNumber, ID: m.wamid(contact, outboundMark)}
		}
		m.first = cmp.Or(m.first, message.ID)
		message.content = kind.content(m)
		updates = append(updates, metaUpdate{contact: contact, message: message})
	}

	var outbound string
	for i := range m.o.Statuses {
		contact := person(i / len(metaStatuses) % m.o.People)
		name := metaStatuses[i%len(metaStatuses)]
		if name == "sent" || name == "failed" {
			outbound = m.wamid(contact, outboundMark)
		}
		status := &metaStatus{ID: outbound, Status: name, Timestamp: at(), RecipientID: contact.WaID, RecipientUserID: contact.UserID}
		if name == "failed" {
			status.Errors = []metaError{{
				Code: 131047, Title: "Re-engagement message", Message: "Re-engagement message",
				ErrorData: map[string]any{"details": "More than 24 hours have passed since the recipient last replied."},
			}}
		} else {
			status.Pricing = &metaPricing{Billable: true, PricingModel: "PMP", Category: "utility", Type: "regular"}
		}
		updates = append(updates, metaUpdate{contact: contact, status: status})
	}
	return updates
}

var metaStatuses = []string{"sent", "delivered", "read", "failed"}

// person returns the i-th person that writes.
func person(i int) metaContact {
	switch i {
	case 0:
		return metaContact{Profile: metaProfile{Name: "Ada Example"}, WaID: "16505550123", UserID: "US.10020030040050060070"}
	case 1:
		return metaContact{Profile: metaProfile{Name: "Bo", Username: "bo.sample"}, UserID: "DE.90080070060050040030"}
	default:
		return metaContact{
			Profile: metaProfile{Name: fmt.Sprintf("Zoë Example %d", i+1)},
			WaID:    fmt.Sprintf("1650556%04d", i), UserID: fmt.Sprintf("US.2002003004005006%04d", i),
		}
	}
}

// The bytes that tell the direction in a message id.
const (
	inboundMark  = 0x12
	outboundMark = 0x11
)

// wamid makes a message id of the form that Meta's have: the other party and a
// random part, in base64.
func (m *meta) wamid(contact metaContact, mark byte) string {
	party := cmp.Or(contact.WaID, contact.UserID)
	random := fmt.Sprintf("3A%016X%02X", m.rand.Uint64(), m.rand.Uint32()&0xff)
	raw := append([]byte{0x1c, 0x18, byte(len(party))}, party...)
	raw = append(raw, 0x15, 0x02, 0x00, mark, 0x18, byte(len(random)))
	raw = append(raw, random...)
	return "wamid." + base64.StdEncoding.EncodeToString(append(raw, 0))
}

type object = map[string]any

// metaKind is one type of message.
type metaKind struct {
	name    string
	member  string // with the content, if it is not the name
	answers bool   // in reply to a message of the business
	content func(*meta) any
}

// metaKinds is the cycle of messages: all types that the documentation names
// and, last, one that it does not.
var metaKinds = []metaKind{
	{name: "text", content: func(*meta) any { return object{"body": "Is the shop open?"} }},
	{name: "text", content: func(*meta) any { return object{"body": "Grüße aus Köln 👋"} }},
	{name: "image", content: func(m *meta) any { return m.media("image/jpeg", object{"caption": "the label"}) }},
	{name: "audio", content: func(m *meta) any { return m.media("audio/ogg; codecs=opus", object{"voice": true}) }},
	{name: "video", content: func(m *meta) any { return m.media("video/mp4", object{"caption": "how it rattles"}) }},
	{name: "document", content: func(m *meta) any { return m.media("application/pdf", object{"filename": "Beleg für März.pdf"}) }},
	{name: "sticker", content: func(m *meta) any { return m.media("image/webp", object{"animated": false}) }},
	{name: "location", content: func(*meta) any {
		return object{"latitude": 50.941278, "longitude": 6.958281, "name": "Kölner Dom", "address": "Domkloster 4, 50667 Köln"}
	}},
	{name: "contacts", content: func(*meta) any {
		return []object{{"name": object{"formatted_name": "Cem Örnek", "first_name": "Cem", "last_name": "Örnek"},
			"phones": []object{{"phone": "+1 650-555-0199", "type": "CELL", "wa_id": "16505550199"}}}}
	}},
	{name: "interactive", answers: true, content: func(*meta) any {
		return object{"type": "button_reply", "button_reply": object{"id": "size-m", "title": "Größe M"}}
	}},
	{name: "button", answers: true, content: func(*meta) any { return object{"payload": "confirm", "text": "Yes, confirm"} }},
	{name: "reaction", content: func(m *meta) any { return object{"message_id": m.first, "emoji": "👍"} }},
	{name: "order", content: func(*meta) any {
		return object{"catalog_id": "194836987003835", "text": "as last time", "product_items": []object{
			{"product_retailer_id": "di9ozbzfi4", "quantity": 2, "item_price": 30, "currency": "EUR"}}}
	}},
	{name: "system", content: func(*meta) any {
		return object{"type": "user_changed_number", "body": "A user changed their number", "wa_id": "16505550124"}
	}},
	{name: "unsupported", member: "errors", content: func(*meta) any {
		return []metaError{{Code: 131051, Title: "Message type unknown", Message: "Message type unknown",
			ErrorData: object{"details": "Message type is currently not supported."}}}
	}},
	{name: "hologram", content: func(*meta) any { return object{"depth": 3} }},
}

// media adds to the members those of every stored file.
func (m *meta) media(mimeType string, members object) object {
	var sum [32]byte
	for i := range sum {
		sum[i] = byte(m.rand.Uint32())
	}
	members["mime_type"] = mimeType
	members["sha256"] = base64.StdEncoding.EncodeToString(sum[:])
	members["id"] = strconv.FormatUint(1e15+m.rand.Uint64N(9e15), 10)
	return members
}
