package whatsapp

import (
	"cmp"
	"encoding/json"
	"unicode/utf8"

	"converger/internal/channel/payload"
)

// MaxLabel is the longest name that is kept, in characters.
const MaxLabel = 255

const (
	maxRaw      = 8 << 10 // bytes of JSON kept of a part without a mapping
	maxDetail   = 1000    // bytes of JSON of a text inside an attachment, which must stay below 4 KiB
	maxContacts = 20      // people on one contact card
)

// Content types of attachments that have no file, and of a file whose type is not said.
const (
	ContentTypeLocation = "application/vnd.converger.location"
	ContentTypeContacts = "application/vnd.converger.contacts"
	ContentTypeUnknown  = "application/octet-stream"
)

// Attach makes a message's attachments of one.
func Attach(attachment map[string]any) []json.RawMessage {
	raw, err := json.Marshal(attachment)
	if err != nil { // cannot be: it is made of decoded JSON
		return nil
	}
	return []json.RawMessage{raw}
}

// Location is the attachment of a place; nil if part has no coordinates.
func Location(part map[string]any) map[string]any {
	content := map[string]any{}
	for _, name := range []string{"latitude", "longitude"} {
		number, ok := part[name].(json.Number)
		if _, err := number.Float64(); !ok || err != nil {
			return nil
		}
		content[name] = number
	}
	for _, name := range []string{"name", "address", "url"} {
		if v := payload.Text(part, name); v != "" {
			content[name] = Detail(v)
		}
	}
	return map[string]any{"contentType": ContentTypeLocation, "content": content}
}

// CardNames says how a provider spells the members of a contact card.
type CardNames struct{ FormattedName, WhatsAppID string }

// Contacts is the attachment of the contact cards in m; nil if none has a name or a number.
func Contacts(m map[string]any, names CardNames) map[string]any {
	list, _ := m["contacts"].([]any)
	var cards []any
	size := 0
	for _, v := range list {
		c, _ := v.(map[string]any)
		name := CutRunes(payload.Text(payload.Object(c, "name"), names.FormattedName), MaxLabel)
		phones := []string{}
		numbers, _ := c["phones"].([]any)
		for _, n := range numbers {
			number, _ := n.(map[string]any)
			phone := cmp.Or(payload.Text(number, "phone"), payload.Text(number, names.WhatsAppID))
			if phone != "" && len(phone) <= MaxLabel && len(phones) < maxContacts {
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
	if len(cards) == 0 {
		return nil
	}
	return map[string]any{"contentType": ContentTypeContacts, "content": cards}
}

func jsonSize(v any) int {
	raw, err := json.Marshal(v)
	if err != nil { // cannot be: v was decoded from JSON
		return 0
	}
	return len(raw)
}

// Detail cuts a text inside an attachment so that its JSON form, where a character can take six bytes, leaves room for
// the others.
func Detail(s string) string {
	for size := jsonSize(s); size > maxDetail; size = jsonSize(s) {
		s = payload.Cut(s, len(s)*maxDetail/size)
	}
	return s
}

// Bounded is v, or of a large one the beginning of its text.
func Bounded(v any) any {
	raw, err := json.Marshal(v)
	if err != nil || len(raw) <= maxRaw {
		return v
	}
	return payload.Cut(string(raw), maxRaw/2) // quotes double when the text is marshalled again
}

// CutRunes shortens s to at most n characters.
func CutRunes(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n])
}
