package whatsappinfobip

import (
	"cmp"
	"net/http"
	"strings"
	"time"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/channel/whatsapp"
	"converger/internal/fault"
)

// timeForms are the ways in which Infobip writes a time; a fraction of a second is read in each. The first is that of the
// documented payloads, 2026-11-30T05:31:02.123+0000, which RFC 3339 does not know.
var timeForms = []string{"2006-01-02T15:04:05Z0700", time.RFC3339}

// Parse reads every result of a body. Infobip lets messages and both kinds of reports go to one address or to several:
// what an item is, it says by itself.
func (*Adapter) Parse(ch *channel.Channel, _ channel.Endpoint, _ http.Header, body []byte, now time.Time) (channel.Inbound, error) {
	c, err := parseConfig(ch.Config)
	if err != nil {
		return channel.Inbound{}, &channel.ParseError{Detail: "the channel's config cannot be read"}
	}
	p := parser{Batch: whatsapp.Batch{Now: now}, sender: c.Sender}
	return p.Read(body, func(root map[string]any) {
		if root["results"] == nil {
			p.Ignore("body", "", "has no results")
		}
		p.Objects(root, "results", "", p.result)
	})
}

type parser struct {
	whatsapp.Batch
	sender string
}

func (p *parser) result(r map[string]any, at string) {
	// A message comes to our number, a report is about one that left it. Reports need not say so.
	var kind, number string
	var read func(r map[string]any, at string)
	switch {
	case r["message"] != nil:
		kind, number, read = "message", cmp.Or(payload.Text(r, "to"), "(none)"), p.message
	case r["status"] != nil:
		kind, number, read = "status", payload.Text(r, "from"), p.delivered
	case r["seenAt"] != nil:
		kind, number, read = "seen", payload.Text(r, "from"), p.seen
	default:
		p.Ignore(cmp.Or(payload.Text(r, "event"), "result"), payload.Text(r, "messageId"), "neither a message nor a report")
		return
	}
	if number != "" && number != p.sender {
		p.Ignore(kind, payload.Text(r, "messageId"), "for another sender than the channel's")
		return
	}
	read(r, at)
}

func (p *parser) message(r map[string]any, at string) {
	id, ok := p.ID(r, "messageId", at)
	if !ok {
		return
	}
	m, ok := r["message"].(map[string]any)
	if !ok {
		p.Reject(id, at+"/message", fault.InvalidType, "must be an object")
		return
	}
	contact := payload.Object(r, "contact")
	participant := whatsapp.Participant(whatsapp.UserID(payload.Text(contact, "userId")), whatsapp.Phone(payload.Text(r, "from")))
	if participant == nil {
		p.Reject(id, at+"/from", fault.Required, "is required, with at most %d bytes", whatsapp.MaxIdentity)
		return
	}
	name, username := payload.Text(contact, "name"), payload.Text(contact, "username")
	participant.DisplayName = whatsapp.CutRunes(cmp.Or(name, username), whatsapp.MaxLabel)
	if username != "" {
		participant.Metadata = map[string]any{"username": whatsapp.CutRunes(username, whatsapp.MaxLabel)}
	}

	kind, received := payload.Text(m, "type"), payload.Text(r, "receivedAt")
	msg := channel.Message{
		ProviderID:  id,
		Participant: participant,
		Sender:      participant.ExternalID(),
		Type:        "message",
		// Not "to": where that stands in metadata it names a recipient.
		Metadata: map[string]any{"whatsapp_message_id": id, "whatsapp_type": payload.Cut(kind, whatsapp.MaxLabel), "infobip_sender": p.sender},
		At:       p.time(received),
	}
	if received != "" {
		msg.Metadata["timestamp"] = payload.Cut(received, whatsapp.MaxLabel)
	}
	if name != "" {
		msg.Metadata["profile_name"] = whatsapp.CutRunes(name, whatsapp.MaxLabel)
	}
	if replied := payload.Text(payload.Object(m, "context"), "id"); replied != "" && len(replied) <= channel.MaxProviderID {
		msg.Metadata["reply_to"] = replied
		msg.ReplyToProviderID = replied
	}
	if pointer, missing := fill(&msg, kind, m); missing != "" {
		p.Reject(id, at+"/message"+pointer, fault.Required, "%s", missing)
		return
	}
	p.Message(msg)
}

// fill maps what a message of one kind says. If the part that makes the kind is missing it returns where, and what to say.
func fill(msg *channel.Message, kind string, m map[string]any) (pointer, missing string) {
	const isRequired = "is required"
	switch kind {
	case "TEXT":
		if msg.Text = payload.Text(m, "text"); msg.Text == "" {
			return "/text", isRequired
		}
	case "IMAGE", "DOCUMENT", "STICKER", "VIDEO", "VOICE", "AUDIO":
		if payload.Text(m, "url") == "" {
			return "/url", isRequired
		}
		msg.Text = payload.Text(m, "caption")
		msg.Attachments = whatsapp.Attach(media(kind, m))
	case "LOCATION":
		attachment := whatsapp.Location(m)
		if attachment == nil {
			return "", "must have latitude and longitude"
		}
		msg.Attachments = whatsapp.Attach(attachment)
	case "CONTACT":
		attachment := whatsapp.Contacts(m, whatsapp.CardNames{FormattedName: "formattedName", WhatsAppID: "waId"})
		if attachment == nil {
			return "/contacts", "must have a name or a phone number"
		}
		msg.Attachments = whatsapp.Attach(attachment)
	case "BUTTON":
		if msg.Text = cmp.Or(payload.Text(m, "text"), payload.Text(m, "payload")); msg.Text == "" {
			return "/text", isRequired
		}
		msg.Metadata["interactive_reply"] = whatsapp.Bounded(map[string]any{"type": "button", "id": payload.Text(m, "payload"), "title": msg.Text})
	case "INTERACTIVE_BUTTON_REPLY", "INTERACTIVE_LIST_REPLY":
		if msg.Text = payload.Text(m, "title"); msg.Text == "" {
			return "/title", isRequired
		}
		reply := map[string]any{"type": strings.ToLower(strings.TrimPrefix(kind, "INTERACTIVE_")), "id": payload.Text(m, "id"), "title": msg.Text}
		if description := payload.Text(m, "description"); description != "" {
			reply["description"] = description
		}
		msg.Metadata["interactive_reply"] = whatsapp.Bounded(reply)
	case "REACTION":
		if msg.ReplyToProviderID == "" {
			return "/context/id", isRequired
		}
		msg.Type = "messageReaction"
		if payload.Text(m, "action") != "UNREACT" { // without a text the reaction is taken back
			msg.Text = payload.Text(m, "emoji")
		}
	case "ORDER":
		msg.Type = "event"
		msg.Text = payload.Text(m, "text")
		msg.Metadata["order"] = whatsapp.Bounded(m)
	default:
		msg.Type = "event"
		msg.Text = "unsupported type " + payload.Cut(cmp.Or(kind, "(none)"), whatsapp.MaxLabel)
		msg.Metadata["unsupported"] = whatsapp.Bounded(m)
	}
	return "", ""
}

// media describes a file at Infobip. Its address opens with the account's API key only, so that it is none that anybody
// could follow and stands with what belongs to the channel. The file's type is not said; what is known is its kind.
func media(kind string, m map[string]any) map[string]any {
	data := map[string]any{"url": whatsapp.Detail(payload.Text(m, "url")), "kind": strings.ToLower(kind)}
	if kind == "VOICE" {
		data["voice"] = true
	}
	return map[string]any{"contentType": whatsapp.ContentTypeUnknown, "channelData": data}
}

// delivered adds the receipt of a delivery report. There may be several about one message, in one body too (it is reported
// for each part and each change); package delivery moves forward only.
func (p *parser) delivered(r map[string]any, at string) {
	id, ok := p.ID(r, "messageId", at)
	if !ok {
		return
	}
	status := payload.Object(r, "status")
	group := payload.Text(status, "groupName")
	if group == "" {
		p.Reject(id, at+"/status/groupName", fault.Required, "is required")
		return
	}
	receipt := p.receipt(r, id, cmp.Or(payload.Text(r, "doneAt"), payload.Text(r, "sentAt")))
	switch group {
	case "DELIVERED":
		receipt.Status = "delivered"
	case "SEEN":
		receipt.Status = "read"
	case "REJECTED", "UNDELIVERABLE", "EXPIRED":
		receipt.Status = "failed"
		receipt.Error = describe(payload.Object(r, "error"), status)
	default: // PENDING, and words to come: Infobip took the message
		receipt.Status = "sent"
	}
	p.Receipt(receipt)
}

// seen adds the receipt of a seen report.
func (p *parser) seen(r map[string]any, at string) {
	id, ok := p.ID(r, "messageId", at)
	if !ok {
		return
	}
	receipt := p.receipt(r, id, payload.Text(r, "seenAt"))
	receipt.Status = "read"
	p.Receipt(receipt)
}

// receipt begins a receipt. A sending call can give Infobip our delivery's id as data to carry, as the message's id, or
// both.
func (p *parser) receipt(r map[string]any, id, when string) channel.Receipt {
	delivery := whatsapp.DeliveryID(payload.Text(r, "callbackData"))
	if delivery == nil {
		delivery = whatsapp.DeliveryID(id)
	}
	return channel.Receipt{ProviderID: id, DeliveryID: delivery, At: p.time(when)}
}

// describe gives code and text of why a message failed: "7 EC_UNKNOWN_SUBSCRIBER: Unknown subscriber". Some failures are
// told by the status alone, beside an error that says "No Error".
func describe(err, status map[string]any) string {
	reason := err
	if code := payload.Text(err, "id"); code == "" || code == "0" {
		reason = status
	}
	words := payload.Text(reason, "name")
	if description := payload.Text(reason, "description"); words == "" {
		words = description
	} else if description != "" && description != words {
		words += ": " + description
	}
	return payload.Cut(strings.TrimSpace(payload.Text(reason, "id")+" "+cmp.Or(words, whatsapp.NoReason)), whatsapp.MaxError)
}

// time reads a time of Infobip's; what cannot be read, or lies in the future, is now.
func (p *parser) time(text string) time.Time {
	for _, form := range timeForms {
		if at, err := time.Parse(form, text); err == nil {
			return p.At(at)
		}
	}
	return p.Now
}
