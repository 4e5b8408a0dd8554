package whatsappmeta

import (
	"cmp"
	"maps"
	"mime"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/channel/whatsapp"
	"converger/internal/fault"
)

// Parse reads every message and status of every change of every entry.
func (*Adapter) Parse(ch *channel.Channel, _ channel.Endpoint, _ http.Header, body []byte, now time.Time) (channel.Inbound, error) {
	c, err := parseConfig(ch.Config)
	if err != nil {
		return channel.Inbound{}, &channel.ParseError{Detail: "the channel's config cannot be read"}
	}
	p := parser{Batch: whatsapp.Batch{Now: now}, phoneNumberID: c.PhoneNumberID}
	return p.Read(body, p.body)
}

type parser struct {
	whatsapp.Batch
	phoneNumberID string
}

func (p *parser) body(root map[string]any) {
	if root["entry"] == nil {
		p.Ignore("body", "", "has no entry")
	}
	p.Objects(root, "entry", "", func(entry map[string]any, at string) {
		p.Objects(entry, "changes", at, func(change map[string]any, at string) {
			if field := payload.Text(change, "field"); field != "messages" {
				p.Ignore(cmp.Or(field, "change"), payload.Text(entry, "id"), "not about messages")
				return
			}
			value, ok := change["value"].(map[string]any)
			if !ok {
				p.Reject("", at+"/value", fault.InvalidType, "must be an object")
				return
			}
			p.value(value, at+"/value")
		})
	})
}

func (p *parser) value(value map[string]any, at string) {
	number := payload.Text(payload.Object(value, "metadata"), "phone_number_id")
	foreign := number != p.phoneNumberID
	each := func(kind string, use func(map[string]any, string)) func(map[string]any, string) {
		return func(item map[string]any, at string) {
			if foreign {
				// One app has one callback URL for all its numbers, unless each number overrides it.
				p.Ignore(kind, payload.Text(item, "id"), "for another phone_number_id than the channel's")
				return
			}
			use(item, at)
		}
	}
	contacts := contactsOf(value)
	p.Objects(value, "messages", at, each("message", func(m map[string]any, at string) { p.message(m, contacts, number, at) }))
	p.Objects(value, "statuses", at, each("status", p.status))
	p.Objects(value, "errors", at, each("error", func(e map[string]any, _ string) { p.Ignore("error", "", describeError(e)) }))
}

// contact is who wrote, as Meta describes them beside the messages.
type contact struct{ userID, phone, name, username string }

func contactsOf(value map[string]any) []contact {
	list, _ := value["contacts"].([]any)
	var contacts []contact
	for _, v := range list {
		c, _ := v.(map[string]any)
		profile := payload.Object(c, "profile")
		contacts = append(contacts, contact{userID: payload.Text(c, "user_id"), phone: payload.Text(c, "wa_id"),
			name: payload.Text(profile, "name"), username: payload.Text(profile, "username")})
	}
	return contacts
}

// message adds one message. Contacts are matched by who they are: the lists need not have one length or order.
func (p *parser) message(m map[string]any, contacts []contact, phoneNumberID, at string) {
	id, ok := p.ID(m, "id", at)
	if !ok {
		return
	}
	phone, userID := payload.Text(m, "from"), payload.Text(m, "from_user_id")
	var who contact
	if i := slices.IndexFunc(contacts, func(c contact) bool {
		return userID != "" && c.userID == userID || phone != "" && c.phone == phone
	}); i >= 0 {
		who = contacts[i]
	}
	participant := whatsapp.Participant(whatsapp.UserID(cmp.Or(userID, who.userID)), whatsapp.Phone(phone), whatsapp.Phone(who.phone))
	if participant == nil {
		p.Reject(id, at+"/from", fault.Required, "is required, or from_user_id, with at most %d bytes", whatsapp.MaxIdentity)
		return
	}
	participant.DisplayName = whatsapp.CutRunes(cmp.Or(who.name, who.username), whatsapp.MaxLabel)
	if who.username != "" {
		participant.Metadata = map[string]any{"username": whatsapp.CutRunes(who.username, whatsapp.MaxLabel)}
	}

	kind := payload.Text(m, "type")
	timestamp := payload.Text(m, "timestamp")
	msg := channel.Message{
		ProviderID:  id,
		Participant: participant,
		Sender:      participant.ExternalID(),
		Type:        "message",
		Metadata:    map[string]any{"whatsapp_message_id": id, "whatsapp_type": payload.Cut(kind, whatsapp.MaxLabel), "phone_number_id": phoneNumberID},
		At:          p.time(timestamp),
	}
	if timestamp != "" {
		msg.Metadata["timestamp"] = payload.Cut(timestamp, whatsapp.MaxLabel)
	}
	if who.name != "" {
		msg.Metadata["profile_name"] = whatsapp.CutRunes(who.name, whatsapp.MaxLabel)
	}
	context := payload.Object(m, "context")
	if replied := payload.Text(context, "id"); replied != "" && len(replied) <= channel.MaxProviderID {
		msg.Metadata["reply_to"] = replied
		msg.ReplyToProviderID = replied
	}
	if context["forwarded"] == true || context["frequently_forwarded"] == true {
		msg.Metadata["forwarded"] = true
	}

	if pointer, missing := fill(&msg, kind, m); missing != "" {
		p.Reject(id, at+pointer, fault.Required, "%s", missing)
		return
	}
	p.Message(msg)
}

// fill maps what a message of one kind says. If the part that makes the kind is missing it returns where, and what to say.
func fill(msg *channel.Message, kind string, m map[string]any) (pointer, missing string) {
	part := payload.Object(m, kind)
	switch kind {
	case "text":
		body, ok := part["body"].(string)
		if !ok || body == "" {
			return "/text/body", "is required"
		}
		msg.Text = body
	case "image", "audio", "video", "document", "sticker":
		if payload.Text(part, "id") == "" {
			return payload.Pointer(kind, "id"), "is required"
		}
		msg.Text = payload.Text(part, "caption")
		msg.Attachments = whatsapp.Attach(media(part))
	case "location":
		attachment := whatsapp.Location(part)
		if attachment == nil {
			return "/location", "must have latitude and longitude"
		}
		msg.Attachments = whatsapp.Attach(attachment)
	case "contacts":
		attachment := whatsapp.Contacts(m, whatsapp.CardNames{FormattedName: "formatted_name", WhatsAppID: "wa_id"})
		if attachment == nil {
			return "/contacts", "must have a name or a phone number"
		}
		msg.Attachments = whatsapp.Attach(attachment)
	case "button":
		msg.Text = cmp.Or(payload.Text(part, "text"), payload.Text(part, "payload"))
		if msg.Text == "" {
			return "/button/text", "is required"
		}
		msg.Metadata["interactive_reply"] = map[string]any{"type": "button", "id": whatsapp.Detail(payload.Text(part, "payload")), "title": msg.Text}
	case "interactive":
		replyKind := payload.Text(part, "type")
		reply := payload.Object(part, replyKind)
		msg.Text = cmp.Or(payload.Text(reply, "title"), payload.Text(reply, "body"), payload.Text(reply, "name"))
		if msg.Text == "" {
			return "/interactive", "must have a reply with a title"
		}
		interactive := map[string]any{"type": replyKind}
		maps.Copy(interactive, reply)
		msg.Metadata["interactive_reply"] = whatsapp.Bounded(interactive)
	case "reaction":
		target := payload.Text(part, "message_id")
		if target == "" || len(target) > channel.MaxProviderID {
			return "/reaction/message_id", "is required"
		}
		msg.Type = "messageReaction"
		msg.Text = payload.Text(part, "emoji") // without one the reaction is taken back
		msg.ReplyToProviderID = target
	case "order", "system":
		msg.Type = "event"
		msg.Text = cmp.Or(payload.Text(part, "body"), payload.Text(part, "text"))
		msg.Metadata[kind] = whatsapp.Bounded(part)
		if number := payload.Text(part, "wa_id"); number != "" && kind == "system" {
			// The person has a new number: one more name of the same participant.
			msg.Participant.Identities = whatsapp.Participant(append(msg.Participant.Identities, whatsapp.Phone(number))...).Identities
		}
	default:
		msg.Type = "event"
		if kind == "unsupported" {
			kind = cmp.Or(payload.Text(part, "type"), kind) // newer payloads say what it would have been
		}
		msg.Text = "unsupported type " + payload.Cut(cmp.Or(kind, "(none)"), whatsapp.MaxLabel)
		msg.Metadata["unsupported"] = whatsapp.Bounded(m)
	}
	return "", ""
}

// media describes a file that Meta keeps; it has no address of its own that anybody could open.
func media(part map[string]any) map[string]any {
	data := map[string]any{"providerMediaId": whatsapp.Detail(payload.Text(part, "id"))}
	if sha256 := payload.Text(part, "sha256"); sha256 != "" {
		data["sha256"] = payload.Cut(sha256, whatsapp.MaxLabel)
	}
	for _, flag := range []string{"voice", "animated"} {
		if v, ok := part[flag].(bool); ok {
			data[flag] = v
		}
	}
	contentType := payload.Text(part, "mime_type")
	if _, _, err := mime.ParseMediaType(contentType); err != nil || len(contentType) > whatsapp.MaxLabel {
		contentType = whatsapp.ContentTypeUnknown
	}
	attachment := map[string]any{"contentType": contentType, "channelData": data}
	if name := payload.Text(part, "filename"); name != "" {
		attachment["name"] = whatsapp.Detail(name)
	}
	return attachment
}

// status adds one receipt.
func (p *parser) status(s map[string]any, at string) {
	id, ok := p.ID(s, "id", at)
	if !ok {
		return
	}
	if payload.Text(s, "status") == "" {
		p.Reject(id, at+"/status", fault.Required, "is required")
		return
	}
	receipt := channel.Receipt{ProviderID: id, At: p.time(payload.Text(s, "timestamp"))}
	switch status := payload.Text(s, "status"); status {
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
	receipt.DeliveryID = whatsapp.DeliveryID(payload.Text(s, "biz_opaque_callback_data"))
	p.Receipt(receipt)
}

func describeErrors(s map[string]any) string {
	list, _ := s["errors"].([]any)
	var reasons []string
	for _, v := range list {
		e, _ := v.(map[string]any)
		reasons = append(reasons, describeError(e))
	}
	if len(reasons) == 0 {
		return whatsapp.NoReason
	}
	return payload.Cut(strings.Join(reasons, "; "), whatsapp.MaxError)
}

// describeError gives code and text: "131047 Re-engagement message: More than 24 hours have passed ...".
func describeError(e map[string]any) string {
	words := cmp.Or(payload.Text(e, "title"), payload.Text(e, "message"))
	details := payload.Text(payload.Object(e, "error_data"), "details")
	if words == "" {
		words = details
	} else if details != "" && details != words {
		words += ": " + details
	}
	return payload.Cut(strings.TrimSpace(payload.Text(e, "code")+" "+cmp.Or(words, whatsapp.NoReason)), whatsapp.MaxError)
}

// time reads Unix seconds; what cannot be read, or lies in the future, is now.
func (p *parser) time(seconds string) time.Time {
	n, err := strconv.ParseInt(seconds, 10, 64)
	if err != nil {
		return p.Now
	}
	return p.At(time.Unix(n, 0))
}
