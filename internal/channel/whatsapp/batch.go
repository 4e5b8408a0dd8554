package whatsapp

import (
	"fmt"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/fault"
)

// maxItems bounds the messages and statuses of one body; providers send hundreds at most.
const maxItems = 5000

// Batch collects the items of one body. Set Now; the rest begins empty.
type Batch struct {
	Now time.Time // when the body came in

	in    channel.Inbound
	index int // of the next item
}

// Read decodes a body and calls read with its object, which adds the items. The error is a *channel.ParseError.
func (b *Batch) Read(body []byte, read func(root map[string]any)) (channel.Inbound, error) {
	v, err := payload.Decode(body)
	if err != nil {
		return channel.Inbound{}, &channel.ParseError{Detail: "the body " + err.Error()}
	}
	root, ok := v.(map[string]any)
	if !ok {
		return channel.Inbound{}, &channel.ParseError{Detail: "the body must be a JSON object"}
	}
	read(root)
	if b.index > maxItems {
		return channel.Inbound{}, &channel.ParseError{Detail: fmt.Sprintf("the body must hold at most %d items", maxItems)}
	}
	return b.in, nil
}

// Message adds a message and gives it its index.
func (b *Batch) Message(m channel.Message) {
	m.Index = b.next()
	b.in.Messages = append(b.in.Messages, m)
}

// Receipt adds a receipt.
func (b *Batch) Receipt(r channel.Receipt) {
	b.next()
	b.in.Receipts = append(b.in.Receipts, r)
}

// Reject adds an item that cannot be used; id is how the provider names it, "" when it does not.
func (b *Batch) Reject(id, pointer, code, format string, args ...any) {
	b.in.Rejected = append(b.in.Rejected, channel.Rejected{Index: b.next(), ID: id, Err: fault.Invalidf(pointer, code, format, args...)})
}

// Ignore adds an item without meaning for the channel.
func (b *Batch) Ignore(kind, id, reason string) {
	b.next()
	b.in.Ignored = append(b.in.Ignored, channel.Ignored{Kind: payload.Cut(kind, MaxLabel), ID: payload.Cut(id, channel.MaxProviderID), Reason: reason})
}

func (b *Batch) next() int {
	b.index++
	return b.index - 1
}

// Objects calls each with every object of the list under a name of the object at the pointer at, and rejects what is
// something else in its place.
func (b *Batch) Objects(parent map[string]any, name, at string, each func(object map[string]any, at string)) {
	at += payload.Pointer(name)
	switch list := parent[name].(type) {
	case nil:
	case []any:
		for i, v := range list {
			if b.index > maxItems {
				return
			}
			at := at + payload.Pointer(i)
			if object, ok := v.(map[string]any); ok {
				each(object, at)
			} else {
				b.Reject("", at, fault.InvalidType, "must be an object")
			}
		}
	default:
		b.Reject("", at, fault.InvalidType, "must be an array")
	}
}

// ID returns the provider's name of an item, which de-duplicates it; one without a usable name is rejected.
func (b *Batch) ID(item map[string]any, name, at string) (id string, ok bool) {
	id = payload.Text(item, name)
	switch {
	case id == "":
		b.Reject("", at+payload.Pointer(name), fault.Required, "is required")
	case len(id) > channel.MaxProviderID:
		b.Reject("", at+payload.Pointer(name), fault.TooLong, "must be at most %d bytes", channel.MaxProviderID)
	default:
		return id, true
	}
	return "", false
}

// What receipts say about a failure.
const (
	NoReason = "no reason given"
	MaxError = 1000 // bytes kept of a reason
)

// DeliveryID reads what a sending call gave the provider to carry: our delivery's id, so that news that overtakes the
// call's answer is not lost. nil: it is something else.
func DeliveryID(carried string) *uuid.UUID {
	id, err := uuid.Parse(strings.TrimPrefix(carried, "dlv_"))
	if err != nil {
		return nil
	}
	return &id
}

// At is a provider's time in UTC; one that lies in the future, or before there was any provider, is now.
func (b *Batch) At(t time.Time) time.Time {
	if t.Unix() <= 0 || t.After(b.Now) {
		return b.Now
	}
	return t.UTC()
}
