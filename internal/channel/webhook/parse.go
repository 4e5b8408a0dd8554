package webhook

import (
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/fault"
	"converger/internal/signature"
)

const (
	maxBatch    = 1000 // objects of one body
	maxKey      = 255  // bytes of an idempotency key or webhook-id
	maxIdentity = 255  // characters of external_id and display_name
	maxError    = 1000 // bytes kept of a receipt's error
)

// defaultSender writes a message that does not say who did.
const defaultSender = "external"

// Parse reads messages and receipts. A message is de-duplicated by its idempotency_key, else by the request's webhook-id
// (in an array with the object's index), else not at all: two equal bodies are two messages.
func (*Adapter) Parse(_ *channel.Channel, endpoint channel.Endpoint, h http.Header, body []byte, now time.Time) (channel.Inbound, error) {
	v, err := payload.Decode(body)
	if err != nil {
		return channel.Inbound{}, &channel.ParseError{Detail: "the body " + err.Error()}
	}
	requestID := h.Get(signature.HeaderStandardID)
	if len(requestID) > maxKey || strings.ContainsFunc(requestID, func(r rune) bool { return r < '!' || r > '~' }) {
		return channel.Inbound{}, &channel.ParseError{
			Detail: fmt.Sprintf("the webhook-id header must be at most %d printable ASCII characters without blanks", maxKey)}
	}
	if requestID != "" {
		requestID = "webhook-id:" + requestID
	}

	var in channel.Inbound
	switch v := v.(type) {
	case map[string]any:
		parseItem(&in, item{object: v}, endpoint, requestID, now)
	case []any:
		if len(v) > maxBatch {
			return channel.Inbound{}, &channel.ParseError{Detail: fmt.Sprintf("the body must hold at most %d objects", maxBatch)}
		}
		for i, element := range v {
			it := item{index: i, at: []any{i}}
			object, ok := element.(map[string]any)
			if !ok {
				it.bad.Addf(it.pointer(), fault.InvalidType, "must be an object")
				in.Rejected = append(in.Rejected, channel.Rejected{Index: i, Err: &it.bad})
				continue
			}
			it.object = object
			id := requestID
			if id != "" {
				id += ":" + strconv.Itoa(i)
			}
			parseItem(&in, it, endpoint, id, now)
		}
	default:
		return channel.Inbound{}, &channel.ParseError{Detail: "the body must be a JSON object or an array of objects"}
	}
	return in, nil
}

func parseItem(in *channel.Inbound, it item, endpoint channel.Endpoint, requestID string, now time.Time) {
	_, named := it.first("delivery_id", "provider_message_id")
	_, status := it.first("status")
	if endpoint == channel.EndpointStatus || status && named {
		receipt := it.receipt(now)
		if !it.reject(in, receipt.ProviderID) {
			in.Receipts = append(in.Receipts, receipt)
		}
		return
	}
	message := it.message(requestID, now)
	if !it.reject(in, message.ProviderID) {
		in.Messages = append(in.Messages, message)
	}
}

// item is one object of a body with what was found wrong in it.
type item struct {
	index  int
	at     []any // pointer tokens of the object
	object map[string]any
	bad    fault.Invalid
}

func (it *item) pointer(tokens ...any) string {
	return payload.Pointer(append(it.at[:len(it.at):len(it.at)], tokens...)...)
}

func (it *item) reject(in *channel.Inbound, id string) bool {
	if it.bad.Err() == nil {
		return false
	}
	in.Rejected = append(in.Rejected, channel.Rejected{Index: it.index, ID: id, Err: &it.bad})
	return true
}

// first returns the name of the first member that is there and not null.
func (it *item) first(names ...string) (string, bool) {
	for _, name := range names {
		if it.object[name] != nil {
			return name, true
		}
	}
	return "", false
}

func (it *item) message(requestID string, now time.Time) channel.Message {
	m := channel.Message{
		Index:             it.index,
		ProviderID:        requestID,
		ConversationID:    it.uuid("conversation_id"),
		Sender:            it.text(1, 0, "sender", "from"),
		Type:              it.text(1, 0, "type"),
		Text:              it.text(0, 0, "text", "message", "body"),
		ReplyToID:         it.uuid("reply_to_id"),
		ReplyToProviderID: it.text(1, channel.MaxProviderID, "reply_to_provider_id"),
		At:                it.time("timestamp", now),
	}
	if m.Sender == "" {
		m.Sender = defaultSender
	}
	if m.Type == "" {
		m.Type = "message"
	}
	if key := it.text(1, maxKey, "idempotency_key"); key != "" {
		m.ProviderID = "key:" + key
	}
	if id := it.text(1, maxIdentity, "external_id"); id != "" {
		m.Participant = &channel.Participant{
			Identities:  []channel.Identity{{Kind: channel.IdentityExternalID, Value: id}},
			DisplayName: it.text(0, maxIdentity, "display_name"),
		}
	}
	m.Attachments = it.attachments()
	if v := it.object["metadata"]; v != nil {
		metadata, ok := v.(map[string]any)
		if !ok {
			it.bad.Addf(it.pointer("metadata"), fault.InvalidType, "must be an object")
		}
		m.Metadata = metadata
	}
	if m.Type == "message" && m.Text == "" && len(m.Attachments) == 0 && it.bad.Err() == nil {
		it.bad.Addf(it.pointer("text"), fault.Required, "Inbound message has no text and no attachments")
	}
	return m
}

func (it *item) attachments() []json.RawMessage {
	v := it.object["attachments"]
	if v == nil {
		return nil
	}
	list, ok := v.([]any)
	if !ok {
		it.bad.Addf(it.pointer("attachments"), fault.InvalidType, "must be an array of objects")
		return nil
	}
	raw := make([]json.RawMessage, 0, len(list))
	for i, attachment := range list {
		if _, ok := attachment.(map[string]any); !ok {
			it.bad.Addf(it.pointer("attachments", i), fault.InvalidType, "must be an object")
			continue
		}
		text, err := json.Marshal(attachment)
		if err != nil { // cannot be: it was decoded from JSON
			it.bad.Addf(it.pointer("attachments", i), fault.Malformed, "cannot be read")
			continue
		}
		raw = append(raw, text)
	}
	return raw
}

func (it *item) receipt(now time.Time) channel.Receipt {
	r := channel.Receipt{
		ProviderID: it.text(1, channel.MaxProviderID, "provider_message_id"),
		DeliveryID: it.uuid("delivery_id"),
		Status:     it.text(1, 0, "status"),
		At:         it.time("timestamp", now),
	}
	switch r.Status {
	case "sent", "delivered", "read", "failed":
	case "":
		if it.bad.Err() == nil {
			it.bad.Addf(it.pointer("status"), fault.Required, "is required: sent, delivered, read or failed")
		}
	default:
		it.bad.Addf(it.pointer("status"), fault.UnknownValue, "must be sent, delivered, read or failed")
	}
	if r.ProviderID == "" && r.DeliveryID == nil && it.bad.Err() == nil {
		it.bad.Addf(it.pointer("delivery_id"), fault.Required, "is required, or provider_message_id")
	}
	switch v := it.object["error"].(type) {
	case nil:
	case string:
		r.Error = payload.Cut(v, maxError)
	default:
		text, err := json.Marshal(v)
		if err == nil {
			r.Error = payload.Cut(string(text), maxError)
		}
	}
	return r
}

// text returns the string under the first of the names that is there; "" if none is. At least least bytes, at most most
// characters (0: any number, which package activity limits).
func (it *item) text(least, most int, names ...string) string {
	name, ok := it.first(names...)
	if !ok {
		return ""
	}
	text, ok := it.object[name].(string)
	switch {
	case !ok:
		it.bad.Addf(it.pointer(name), fault.InvalidType, "must be a string")
	case len(text) < least:
		it.bad.Addf(it.pointer(name), fault.Malformed, "must not be empty; leave it out instead")
	case most > 0 && utf8.RuneCountInString(text) > most:
		it.bad.Addf(it.pointer(name), fault.TooLong, "must be at most %d characters", most)
	}
	return text
}

func (it *item) uuid(name string) *uuid.UUID {
	text := it.text(1, 0, name)
	if text == "" {
		return nil
	}
	id, err := uuid.Parse(text)
	if err != nil || len(text) != 36 { // the parser takes other forms too
		it.bad.Addf(it.pointer(name), fault.Malformed, "must be a UUID")
		return nil
	}
	return &id
}

// time reads RFC 3339 or Unix seconds. A time that cannot be read, or lies in the future, is now: it is a remark, and no
// reason to refuse what it is about.
func (it *item) time(name string, now time.Time) time.Time {
	var at time.Time
	switch v := it.object[name].(type) {
	case string:
		if t, err := time.Parse(time.RFC3339, v); err == nil {
			at = t
		} else if seconds, err := strconv.ParseInt(v, 10, 64); err == nil {
			at = time.Unix(seconds, 0)
		}
	case json.Number:
		if seconds, err := v.Float64(); err == nil && math.Abs(seconds) < 1e12 {
			at = time.UnixMilli(int64(seconds * 1000))
		}
	}
	if at.Before(time.Unix(0, 0)) || at.After(now) {
		return now
	}
	return at.UTC()
}
