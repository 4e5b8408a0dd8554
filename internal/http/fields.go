package http

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/fault"
)

// fields reads the members of a body's object one by one, by their exact names, and gathers every fault it meets, so
// that the caller learns all of them at once. An absent member and null read alike, as the zero value; has tells.
type fields struct {
	prefix  string // JSON pointer of the object itself: "" for the body
	members map[string]json.RawMessage
	asked   map[string]struct{}
	faults  *[]fault.Field
}

func newFields(members map[string]json.RawMessage) *fields {
	return &fields{members: members, asked: make(map[string]struct{}, len(members)), faults: new([]fault.Field)}
}

// err is nil, or a *fault.Invalid with all that was wrong so far.
func (f *fields) err() error {
	if len(*f.faults) == 0 {
		return nil
	}
	return &fault.Invalid{Fields: *f.faults}
}

// refuseUnknown notes a fault for each member that nobody asked for. Called after the last read.
func (f *fields) refuseUnknown() {
	for _, name := range slices.Sorted(maps.Keys(f.members)) {
		if _, ok := f.asked[name]; !ok {
			f.fault(name, fault.UnknownMember, "is not a member of this request")
		}
	}
}

func (f *fields) fault(name, code, format string, args ...any) {
	*f.faults = append(*f.faults, fault.Field{
		Pointer: f.prefix + "/" + escapePointer(name), Code: code, Detail: fmt.Sprintf(format, args...),
	})
}

// faultIn notes a fault of an element of an array.
func (f *fields) faultIn(name string, element int, code, format string, args ...any) {
	list := fields{prefix: f.prefix + "/" + escapePointer(name), faults: f.faults}
	list.fault(strconv.Itoa(element), code, format, args...)
}

// escapePointer escapes a reference token (RFC 6901), and bounds it: unknown names come from outside.
func escapePointer(name string) string {
	if len(name) > 100 {
		name = strings.ToValidUTF8(name[:100], "")
	}
	return strings.NewReplacer("~", "~0", "/", "~1").Replace(name)
}

// raw is the member's JSON, nil when absent or null.
func (f *fields) raw(name string) json.RawMessage {
	f.asked[name] = struct{}{}
	if f.isNull(name) {
		return nil
	}
	return f.members[name]
}

// has tells whether the member is given and not null.
func (f *fields) has(name string) bool { return f.raw(name) != nil }

// refuseNull notes a fault for each member that was asked for and is null, but those that may be: a change keeps what it
// leaves out. Called after the last read.
func (f *fields) refuseNull(nullable ...string) {
	for _, name := range slices.Sorted(maps.Keys(f.asked)) {
		if f.isNull(name) && !slices.Contains(nullable, name) {
			f.fault(name, fault.InvalidType, "can't be null; leave it out to keep it")
		}
	}
}

func (f *fields) isNull(name string) bool {
	return bytes.Equal(bytes.TrimSpace(f.members[name]), []byte("null"))
}

func (f *fields) require(name string) {
	if !f.has(name) {
		f.fault(name, fault.Required, "is required")
	}
}

// str reads a string.
func (f *fields) str(name string) string {
	p := f.optStr(name)
	if p == nil {
		return ""
	}
	return *p
}

// optStr reads a string, nil when absent.
func (f *fields) optStr(name string) *string {
	return read[string](f, name, "a string")
}

// firstRaw reads the first of several names of the same member that is given, and says which.
func (f *fields) firstRaw(names ...string) (name string, raw json.RawMessage) {
	name = names[0]
	for _, n := range names {
		if r := f.raw(n); r != nil && raw == nil {
			name, raw = n, r
		}
	}
	return name, raw
}

func (f *fields) optBool(name string) *bool {
	return read[bool](f, name, "true or false")
}

// flag reads a boolean, false when absent.
func (f *fields) flag(name string) bool { return f.flagOr(name, false) }

// flagOr reads a boolean, otherwise when absent.
func (f *fields) flagOr(name string, otherwise bool) bool {
	if b := f.optBool(name); b != nil {
		return *b
	}
	return otherwise
}

// optInt reads a whole number that fits an int; 1e3 and 1.0 are not taken for one.
func (f *fields) optInt(name string) *int {
	raw := f.raw(name)
	if raw == nil {
		return nil
	}
	if n, err := strconv.Atoi(string(raw)); err == nil {
		return &n
	}
	if c := raw[0]; c == '-' || c >= '0' && c <= '9' {
		f.fault(name, fault.OutOfRange, "must be a whole number that is not out of range")
	} else {
		f.fault(name, fault.InvalidType, "must be a whole number")
	}
	return nil
}

// positive reads a whole number above 0, nil when absent: where 0 would mean the default to a store.
func (f *fields) positive(name string) *int {
	n := f.optInt(name)
	if n != nil && *n < 1 {
		f.fault(name, fault.OutOfRange, "must be 1 or more")
		return nil
	}
	return n
}

// seconds reads a whole number of seconds from 0 to most, nil when absent.
func (f *fields) seconds(name string, most time.Duration) *time.Duration {
	n := f.optInt(name)
	if n == nil {
		return nil
	}
	if *n < 0 || *n > int(most.Seconds()) {
		f.fault(name, fault.OutOfRange, "must be from 0 to %d", int(most.Seconds()))
		return nil
	}
	d := time.Duration(*n) * time.Second
	return &d
}

// id reads a UUID, nil when absent.
func (f *fields) id(name string) *uuid.UUID {
	text := f.optStr(name)
	if text == nil {
		return nil
	}
	id, err := parseID(*text)
	if err != nil {
		f.fault(name, fault.Malformed, "must be a UUID")
		return nil
	}
	return &id
}

// ids reads an array of UUIDs, nil when absent.
func (f *fields) ids(name string) []uuid.UUID {
	list := f.list(name)
	if list == nil {
		return nil
	}
	ids := make([]uuid.UUID, 0, len(list))
	for i, raw := range list {
		var text string
		_ = json.Unmarshal(raw, &text) // what is no string stays ""
		id, err := parseID(text)
		if err != nil {
			f.faultIn(name, i, fault.Malformed, "must be a UUID")
			return nil
		}
		ids = append(ids, id)
	}
	return ids
}

// instant reads an RFC 3339 time, nil when absent.
func (f *fields) instant(name string) *time.Time {
	text := f.optStr(name)
	if text == nil {
		return nil
	}
	at, err := time.Parse(time.RFC3339, *text)
	if err != nil {
		f.fault(name, fault.Malformed, "must be a time such as 2026-11-30T12:00:00Z")
		return nil
	}
	return &at
}

// object reads an object as it is, nil when absent.
func (f *fields) object(name string) json.RawMessage {
	raw := f.raw(name)
	if raw != nil && raw[0] != '{' {
		f.fault(name, fault.InvalidType, "must be an object")
		return nil
	}
	return raw
}

// sub reads an object's own members; faults carry its pointer. An absent object has no members.
func (f *fields) sub(name string) *fields {
	inner := &fields{prefix: f.prefix + "/" + escapePointer(name), asked: map[string]struct{}{}, faults: f.faults}
	if raw := f.object(name); raw != nil {
		if err := json.Unmarshal(raw, &inner.members); err != nil {
			f.fault(name, fault.InvalidType, "must be an object")
		}
	}
	return inner
}

// list reads an array's elements as they are, nil when absent.
func (f *fields) list(name string) []json.RawMessage {
	p := read[[]json.RawMessage](f, name, "an array")
	if p == nil {
		return nil
	}
	return *p
}

// strs reads an array of strings, nil when absent.
func (f *fields) strs(name string) []string {
	list := f.list(name)
	if list == nil {
		return nil
	}
	texts := make([]string, 0, len(list)) // an empty array is not an absent one
	for i, raw := range list {
		var text *string
		if err := json.Unmarshal(raw, &text); err != nil || text == nil {
			f.faultIn(name, i, fault.InvalidType, "must be a string")
			return nil
		}
		texts = append(texts, *text)
	}
	return texts
}

// read unmarshals one member. Anything but the wanted type is a fault.
func read[T any](f *fields, name, what string) *T {
	raw := f.raw(name)
	if raw == nil {
		return nil
	}
	v := new(T)
	if err := json.Unmarshal(raw, v); err != nil {
		f.fault(name, fault.InvalidType, "must be %s", what)
		return nil
	}
	return v
}

// parseID reads a UUID in the one form that the API writes; the other forms that uuid.Parse knows are refused.
func parseID(text string) (uuid.UUID, error) {
	if len(text) != 36 {
		return uuid.UUID{}, fmt.Errorf("http: %d characters are no UUID", len(text))
	}
	return uuid.Parse(text)
}
