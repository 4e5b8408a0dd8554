package whatsappmeta

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/fault"
)

const (
	maxItems    = 5000    // messages and statuses of one body; Meta sends hundreds at most
	maxIdentity = 255     // bytes, as stored
	maxRaw      = 8 << 10 // bytes of JSON kept of a part without a mapping
	maxError    = 1000    // bytes kept of a failed status' errors
	maxLabel    = 255     // characters of a name shown
	maxDetail   = 1000    // bytes of JSON of a text inside an attachment, which must stay below 4 KiB
	maxContacts = 20      // people on one contact card
)

// What attachments are made of that have no file.
const (
	contentTypeLocation = "application/vnd.converger.location"
	contentTypeContacts = "application/vnd.converger.contacts"
	contentTypeUnknown  = "application/octet-stream"
)

// Parse reads every message and status of every change of every entry.
func (*Adapter) Parse(ch *channel.Channel, _ channel.Endpoint, _ http.Header, body []byte, now time.Time) (channel.Inbound, error) {
	v, err := payload.Decode(body)
	if err != nil {
		return channel.Inbound{}, &channel.ParseError{Detail: "the body " + err.Error()}
	}
	root, ok := v.(map[string]any)
	if !ok {
		return channel.Inbound{}, &channel.ParseError{Detail: "the body must be a JSON object"}
	}
	c, err := parseConfig(ch.Config)
	if err != nil {
		return channel.Inbound{}, &channel.ParseError{Detail: "the channel's config cannot be read"}
	}
	p := parser{phoneNumberID: c.PhoneNumberID, now: now}
	p.body(root)
	if p.index > maxItems {
		return channel.Inbound{}, &channel.ParseError{Detail: fmt.Sprintf("the body must hold at most %d items", maxItems)}
	}
	return p.in, nil
}

type parser struct {
	phoneNumberID string
	now           time.Time
	in            channel.Inbound
	index         int // of the next item
}

func (p *parser) reject(id, pointer, code, format string, args ...any) {
	p.in.Rejected = append(p.in.Rejected, channel.Rejected{Index: p.next(), ID: id, Err: fault.Invalidf(pointer, code, format, args...)})
}

func (p *parser) ignore(kind, id, reason string) {
	p.next()
	p.in.Ignored = append(p.in.Ignored, channel.Ignored{Kind: payload.Cut(kind, maxLabel), ID: payload.Cut(id, channel.MaxProviderID), Reason: reason})
}

func (p *parser) next() int {
	p.index++
	return p.index - 1
}

// objects calls each for the objects of a list and rejects everything else in its place.
func (p *parser) objects(parent map[string]any, name, at string, each func(object map[string]any, at string)) {
	at += payload.Pointer(name)
	switch list := parent[name].(type) {
	case nil:
	case []any:
		for i, v := range list {
			if p.index > maxItems {
				return
			}
			at := at + payload.Pointer(i)
			if object, ok := v.(map[string]any); ok {
				each(object, at)
			} else {
				p.reject("", at, fault.InvalidType, "must be an object")
			}
		}
	default:
		p.reject("", at, fault.InvalidType, "must be an array")
	}
}

func (p *parser) body(root map[string]any) {
	if root["entry"] == nil {
		p.ignore("body", "", "has no entry")
	}
	p.objects(root, "entry", "", func(entry map[string]any, at string) {
		p.objects(entry, "changes", at, func(change map[string]any, at string) {
			if field := text(change, "field"); field != "messages" {
				p.ignore(cmp.Or(field, "change"), text(entry, "id"), "not about messages")
				return
			}
			value, ok := change["value"].(map[string]any)
			if !ok {
				p.reject("", at+"/value", fault.InvalidType, "must be an object")
				return
			}
			p.value(value, at+"/value")
		})
	})
}

func (p *parser) value(value map[string]any, at string) {
	number := text(object(value, "metadata"), "phone_number_id")
	foreign := number != p.phoneNumberID
	each := func(kind string, use func(map[string]any, string)) func(map[string]any, string) {
		return func(item map[string]any, at string) {
			if foreign {
				// One app has one callback URL for all its numbers, unless each number overrides it.
				p.ignore(kind, text(item, "id"), "for another phone_number_id than the channel's")
				return
			}
			use(item, at)
		}
	}
	contacts := contactsOf(value)
	p.objects(value, "messages", at, each("message", func(m map[string]any, at string) { p.message(m, contacts, number, at) }))
	p.objects(value, "statuses", at, each("status", p.status))
	p.objects(value, "errors", at, each("error", func(e map[string]any, _ string) { p.ignore("error", "", describeError(e)) }))
}

// contact is who wrote, as Meta describes them beside the messages.
type contact struct{ userID, phone, name, username string }

func contactsOf(value map[string]any) []contact {
	list, _ := value["contacts"].([]any)
	var contacts []contact
	for _, v := range list {
		c, _ := v.(map[string]any)
		profile := object(c, "profile")
		contacts = append(contacts, contact{userID: text(c, "user_id"), phone: text(c, "wa_id"),
			name: text(profile, "name"), username: text(profile, "username")})
	}
	return contacts
}

// message adds one message. Contacts are matched by who they are: the lists need not have one length or order.
func (p *parser) message(m map[string]any, contacts []contact, phoneNumberID, at string) {
	id := text(m, "id")
	switch {
	case id == "":
		p.reject("", at+"/id", fault.Required, "is required")
		return
	case len(id) > channel.MaxProviderID:
		p.reject("", at+"/id", fault.TooLong, "must be at most %d bytes", channel.MaxProviderID)
		return
	}
	phone, userID := text(m, "from"), text(m, "from_user_id")
	var who contact
	if i := slices.IndexFunc(contacts, func(c contact) bool {
		return userID != "" && c.userID == userID || phone != "" && c.phone == phone
	}); i >= 0 {
		who = contacts[i]
	}
	participant := participantOf(
		channel.Identity{Kind: channel.IdentityUserID, Value: cmp.Or(userID, who.userID)},
		channel.Identity{Kind: channel.IdentityPhone, Value: phone},
		channel.Identity{Kind: channel.IdentityPhone, Value: who.phone},
	)
	if participant == nil {
		p.reject(id, at+"/from", fault.Required, "is required, or from_user_id, with at most %d bytes", maxIdentity)
		return
	}
	participant.DisplayName = cutRunes(cmp.Or(who.name, who.username), maxLabel)
	if who.username != "" {
		participant.Metadata = map[string]any{"username": cutRunes(who.username, maxLabel)}
	}

	kind := text(m, "type")
	timestamp := text(m, "timestamp")
	msg := channel.Message{
		ProviderID:  id,
		Participant: participant,
		Sender:      participant.ExternalID(),
		Type:        "message",
		Metadata:    map[string]any{"whatsapp_message_id": id, "whatsapp_type": payload.Cut(kind, maxLabel), "phone_number_id": phoneNumberID},
		At:          p.time(timestamp),
	}
	if timestamp != "" {
		msg.Metadata["timestamp"] = payload.Cut(timestamp, maxLabel)
	}
	if who.name != "" {
		msg.Metadata["profile_name"] = cutRunes(who.name, maxLabel)
	}
	context := object(m, "context")
	if replied := text(context, "id"); replied != "" && len(replied) <= channel.MaxProviderID {
		msg.Metadata["reply_to"] = replied
		msg.ReplyToProviderID = replied
	}
	if context["forwarded"] == true || context["frequently_forwarded"] == true {
		msg.Metadata["forwarded"] = true
	}

	if pointer, missing := fill(&msg, kind, m); missing != "" {
		p.reject(id, at+pointer, fault.Required, "%s", missing)
		return
	}
	msg.Index = p.next()
	p.in.Messages = append(p.in.Messages, msg)
}

// participantOf keeps the identities that can be stored, each once; nil if there is none.
func participantOf(identities ...channel.Identity) *channel.Participant {
	var kept []channel.Identity
	for _, identity := range identities {
		if identity.Value != "" && len(identity.Value) <= maxIdentity && !slices.Contains(kept, identity) {
			kept = append(kept, identity)
		}
	}
	if kept == nil {
		return nil
	}
	return &channel.Participant{Identities: kept}
}

// fill maps what a message of one kind says. If the part that makes the kind is missing it returns where, and what to say.
func fill(msg *channel.Message, kind string, m map[string]any) (pointer, missing string) {
	part := object(m, kind)
	switch kind {
	case "text":
		body, ok := part["body"].(string)
		if !ok || body == "" {
			return "/text/body", "is required"
		}
		msg.Text = body
	case "image", "audio", "video", "document", "sticker":
		if text(part, "id") == "" {
			return payload.Pointer(kind, "id"), "is required"
		}
		msg.Text = text(part, "caption")
		msg.Attachments = attach(media(part))
	case "location":
		attachment := location(part)
		if attachment == nil {
			return "/location", "must have latitude and longitude"
		}
		msg.Attachments = attach(attachment)
	case "contacts":
		cards := cards(m)
		if len(cards) == 0 {
			return "/contacts", "must have a name or a phone number"
		}
		msg.Attachments = attach(map[string]any{"contentType": contentTypeContacts, "content": cards})
	case "button":
		msg.Text = cmp.Or(text(part, "text"), text(part, "payload"))
		if msg.Text == "" {
			return "/button/text", "is required"
		}
		msg.Metadata["interactive_reply"] = map[string]any{"type": "button", "id": detail(text(part, "payload")), "title": msg.Text}
	case "interactive":
		replyKind := text(part, "type")
		reply := object(part, replyKind)
		msg.Text = cmp.Or(text(reply, "title"), text(reply, "body"), text(reply, "name"))
		if msg.Text == "" {
			return "/interactive", "must have a reply with a title"
		}
		interactive := map[string]any{"type": replyKind}
		maps.Copy(interactive, reply)
		msg.Metadata["interactive_reply"] = bounded(interactive)
	case "reaction":
		target := text(part, "message_id")
		if target == "" || len(target) > channel.MaxProviderID {
			return "/reaction/message_id", "is required"
		}
		msg.Type = "messageReaction"
		msg.Text = text(part, "emoji") // without one the reaction is taken back
		msg.ReplyToProviderID = target
	case "order", "system":
		msg.Type = "event"
		msg.Text = cmp.Or(text(part, "body"), text(part, "text"))
		msg.Metadata[kind] = bounded(part)
		if number := text(part, "wa_id"); number != "" && kind == "system" {
			// The person has a new number: one more name of the same participant.
			msg.Participant.Identities = participantOf(append(msg.Participant.Identities,
				channel.Identity{Kind: channel.IdentityPhone, Value: number})...).Identities
		}
	default:
		msg.Type = "event"
		if kind == "unsupported" {
			kind = cmp.Or(text(part, "type"), kind) // newer payloads say what it would have been
		}
		msg.Text = "unsupported type " + payload.Cut(cmp.Or(kind, "(none)"), maxLabel)
		msg.Metadata["unsupported"] = bounded(m)
	}
	return "", ""
}

// media describes a file that Meta keeps; it has no address of its own that anybody could open.
func media(part map[string]any) map[string]any {
	data := map[string]any{"providerMediaId": detail(text(part, "id"))}
	if sha256 := text(part, "sha256"); sha256 != "" {
		data["sha256"] = payload.Cut(sha256, maxLabel)
	}
	for _, flag := range []string{"voice", "animated"} {
		if v, ok := part[flag].(bool); ok {
			data[flag] = v
		}
	}
	contentType := text(part, "mime_type")
	if _, _, err := mime.ParseMediaType(contentType); err != nil || len(contentType) > maxLabel {
		contentType = contentTypeUnknown
	}
	attachment := map[string]any{"contentType": contentType, "channelData": data}
	if name := text(part, "filename"); name != "" {
		attachment["name"] = detail(name)
	}
	return attachment
}

func location(part map[string]any) map[string]any {
	content := map[string]any{}
	for _, name := range []string{"latitude", "longitude"} {
		number, ok := part[name].(json.Number)
		if _, err := number.Float64(); !ok || err != nil {
			return nil
		}
		content[name] = number
	}
	for _, name := range []string{"name", "address", "url"} {
		if v := text(part, name); v != "" {
			content[name] = detail(v)
		}
	}
	return map[string]any{"contentType": contentTypeLocation, "content": content}
}

func cards(m map[string]any) []any {
	list, _ := m["contacts"].([]any)
	var cards []any
	size := 0
	for _, v := range list {
		c, _ := v.(map[string]any)
		name := cutRunes(text(object(c, "name"), "formatted_name"), maxLabel)
		phones := []string{}
		numbers, _ := c["phones"].([]any)
		for _, n := range numbers {
			number, _ := n.(map[string]any)
			if phone := cmp.Or(text(number, "phone"), text(number, "wa_id")); phone != "" && len(phone) <= maxLabel && len(phones) < maxContacts {
				phones = append(phones, phone)
			}
		}
		card := map[string]any{"name": name, "phones": phones}
		// An attachment holds 4 KiB; whole cards only.
		if size += jsonSize(card) + 1; size > maxRaw/2-256 || len(cards) == maxContacts {
			break
		}
		if name != "" || len(phones) > 0 {
			cards = append(cards, card)
		}
	}
	return cards
}

func attach(attachment map[string]any) []json.RawMessage {
	raw, err := json.Marshal(attachment)
	if err != nil { // cannot be: it is made of decoded JSON
		return nil
	}
	return []json.RawMessage{raw}
}

func jsonSize(v any) int {
	raw, err := json.Marshal(v)
	if err != nil { // cannot be: v was decoded from JSON
		return 0
	}
	return len(raw)
}

// detail cuts s so that its JSON form, where a character can take six bytes, has at most maxDetail.
func detail(s string) string {
	for size := jsonSize(s); size > maxDetail; size = jsonSize(s) {
		s = payload.Cut(s, len(s)*maxDetail/size)
	}
	return s
}

// bounded is v, or of a large one the beginning of its text.
func bounded(v any) any {
	raw, err := json.Marshal(v)
	if err != nil || len(raw) <= maxRaw {
		return v
	}
	return payload.Cut(string(raw), maxRaw/2) // quotes double when the text is marshalled again
}

// status adds one receipt.
func (p *parser) status(s map[string]any, at string) {
	receipt := channel.Receipt{ProviderID: text(s, "id"), At: p.time(text(s, "timestamp"))}
	switch {
	case receipt.ProviderID == "" || len(receipt.ProviderID) > channel.MaxProviderID:
		p.reject("", at+"/id", fault.Required, "is required, with at most %d bytes", channel.MaxProviderID)
		return
	case text(s, "status") == "":
		p.reject(receipt.ProviderID, at+"/status", fault.Required, "is required")
		return
	}
	switch status := text(s, "status"); status {
	case "delivered", "read":
		receipt.Status = status
	case "played": // a voice message that was heard
		receipt.Status = "read"
	case "failed":
		receipt.Status = status
		receipt.Error = describeErrors(s)
	default: // also words to come: Meta took the message
		receipt.Status = "sent"
	}
	// What the sending call gave Meta to carry: our delivery's id, so that news that overtakes the call's answer is not lost.
	if id, err := uuid.Parse(strings.TrimPrefix(text(s, "biz_opaque_callback_data"), "dlv_")); err == nil {
		receipt.DeliveryID = &id
	}
	p.next()
	p.in.Receipts = append(p.in.Receipts, receipt)
}

const noReason = "no reason given"

func describeErrors(s map[string]any) string {
	list, _ := s["errors"].([]any)
	var reasons []string
	for _, v := range list {
		e, _ := v.(map[string]any)
		reasons = append(reasons, describeError(e))
	}
	if len(reasons) == 0 {
		return noReason
	}
	return payload.Cut(strings.Join(reasons, "; "), maxError)
}

// describeError gives code and text: "131047 Re-engagement message: More than 24 hours have passed ...".
func describeError(e map[string]any) string {
	words := cmp.Or(text(e, "title"), text(e, "message"))
	details := text(object(e, "error_data"), "details")
	if words == "" {
		words = details
	} else if details != "" && details != words {
		words += ": " + details
	}
	return payload.Cut(strings.TrimSpace(text(e, "code")+" "+cmp.Or(words, noReason)), maxError)
}

// time reads Unix seconds; what cannot be read, or lies in the future, is now.
func (p *parser) time(seconds string) time.Time {
	n, err := strconv.ParseInt(seconds, 10, 64)
	if at := time.Unix(n, 0); err == nil && n > 0 && !at.After(p.now) {
		return at.UTC()
	}
	return p.now
}

// text is the string, or the digits of the number, under a name; "" if there is something else or nothing.
func text(m map[string]any, name string) string {
	switch v := m[name].(type) {
	case string:
		return v
	case json.Number:
		return string(v)
	}
	return ""
}

// object is the object under a name; nil, from which reading gives nothing, if there is something else.
func object(m map[string]any, name string) map[string]any {
	o, _ := m[name].(map[string]any)
	return o
}

func cutRunes(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n])
}
