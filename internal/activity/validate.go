package activity

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"mime"
	"net/url"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"converger/internal/fault"
)

// Limits of what one activity may hold.
const (
	MaxText         = 65_536 // bytes
	MaxReaction     = 64     // bytes of a messageReaction's text
	MaxSender       = 255    // characters
	MaxAttachments  = 10
	MaxAttachment   = 4_096  // bytes of one attachment as compact JSON
	MaxMetadata     = 16_384 // bytes as compact JSON
	MaxKey          = 255    // bytes of an idempotency key
	MaxContentType  = 255    // bytes
	MaxURL          = 2_048  // bytes
	MaxName         = 1_024  // characters of an attachment's name
	MaxNesting      = 32     // of objects and arrays in metadata and in an attachment, the outermost counted
	maxExponent     = 308    // of a number: that of a double, so that every reader of the JSON can hold it
	maxNumberLength = 400    // digits and signs of a number
)

const (
	typeCardPrefix = "application/vnd.converger.card."
	typeLocation   = "application/vnd.converger.location"
	typeContacts   = "application/vnd.converger.contacts"
)

var (
	emptyObject = json.RawMessage("{}")
	emptyArray  = json.RawMessage("[]")
)

// Validate checks n and brings it into the form in which it is stored: the type is filled in, metadata and attachments
// are compact JSON with sorted members and without the members that an attachment does not have, BodyHash is set unless
// the caller has set it. The error is a *[fault.Invalid] that lists everything wrong.
//
// BodyHash is SHA-256 over that form of type, sender, text, attachments, metadata and reply_to_id, each with its length:
// the same JSON with other spacing, escapes or order of members is the same body, an absent text is not an empty one. Of
// an upload it takes the name and the SHA-256 of the bytes.
//
// A second call on an accepted n costs nothing, so a caller may validate early; n must not be changed in between.
func Validate(n *New) error {
	if n.valid {
		return nil
	}
	var bad fault.Invalid
	if n.Type == "" {
		n.Type = TypeMessage
	}
	checkType(&bad, n)
	switch {
	case n.Sender == "":
		bad.Addf("/sender", fault.Required, "must not be empty")
	case checkText(&bad, "/sender", n.Sender) && utf8.RuneCountInString(n.Sender) > MaxSender:
		bad.Addf("/sender", fault.TooLong, "should be at most %d characters", MaxSender)
	}
	if n.Text != nil {
		limit := MaxText
		if n.Type == TypeMessageReaction {
			limit = MaxReaction
		}
		if len(*n.Text) > limit {
			bad.Addf("/text", fault.TooLong, "should be at most %d byte(s)", limit)
		} else if checkText(&bad, "/text", *n.Text) && n.Type == TypeMessageReaction && strings.ContainsFunc(*n.Text, unicode.IsControl) {
			bad.Addf("/text", fault.Malformed, "a reaction is an emoji or a short name, or empty to take it back")
		}
	}
	if len(n.IdempotencyKey) > MaxKey {
		bad.Addf("/idempotency_key", fault.TooLong, "should be at most %d byte(s)", MaxKey)
	} else {
		checkText(&bad, "/idempotency_key", n.IdempotencyKey)
	}

	// The caller's slices are left alone: it may send the same ones again.
	metadata := checkMetadata(&bad, n.Metadata)
	var attachments []json.RawMessage
	if len(n.Attachments)+len(n.Uploads) > MaxAttachments {
		bad.Addf("/attachments", fault.TooLong, "should have at most %d item(s)", MaxAttachments)
	} else if len(n.Attachments)+len(n.Uploads) > 0 {
		attachments = make([]json.RawMessage, 0, len(n.Attachments)+len(n.Uploads))
		for i, raw := range n.Attachments {
			attachments = append(attachments, checkAttachment(&bad, i, raw))
		}
	}
	// A misspelt member would else become an empty message in somebody's hands.
	if bad.Err() == nil && n.Type == TypeMessage && (n.Text == nil || *n.Text == "") && len(n.Attachments)+len(n.Uploads) == 0 && string(metadata) == string(emptyObject) {
		bad.Addf("/text", fault.Required, "a message needs text, an attachment or metadata")
	}
	if err := bad.Err(); err != nil {
		return err
	}
	n.Metadata, n.Attachments = metadata, attachments
	if n.BodyHash == nil {
		n.BodyHash = bodyHash(n)
	}
	for i := range n.Uploads { // not in the hash: their ids are new each time
		n.Attachments = append(n.Attachments, n.Uploads[i].attachment())
	}
	n.valid = true
	return nil
}

func checkType(bad *fault.Invalid, n *New) {
	switch n.Type {
	case TypeMessage, TypeEvent, TypeTyping, TypeEndOfConversation:
	case TypeMessageReaction, TypeMessageUpdate, TypeMessageDelete:
		if n.ReplyToID == nil {
			bad.Addf("/reply_to_id", fault.Required, "%s needs the id of a message", n.Type)
		}
	case TypeConversationUpdate, TypeDeliveryReceipt:
		if !n.Internal {
			bad.Addf("/type", fault.UnknownValue, "%s is written by the server only", n.Type)
		}
	default:
		bad.Addf("/type", fault.UnknownValue, "must be one of %s", strings.Join([]string{TypeMessage, TypeEvent, TypeTyping,
			TypeMessageReaction, TypeMessageUpdate, TypeMessageDelete, TypeEndOfConversation}, ", "))
	}
}

// checkText refuses what Postgres can't store as text.
func checkText(bad *fault.Invalid, pointer, s string) bool {
	switch {
	case !utf8.ValidString(s):
		bad.Addf(pointer, fault.Malformed, "is not valid UTF-8")
	case strings.IndexByte(s, 0) >= 0:
		bad.Addf(pointer, fault.Malformed, "must not contain the character U+0000")
	default:
		return true
	}
	return false
}

func checkMetadata(bad *fault.Invalid, raw json.RawMessage) json.RawMessage {
	switch string(raw) {
	case "", "{}", "null":
		return emptyObject
	}
	v, ok := decode(bad, "/metadata", raw)
	if !ok {
		return nil
	}
	object, ok := v.(map[string]any)
	if !ok {
		if v != nil {
			bad.Addf("/metadata", fault.InvalidType, "must be an object")
			return nil
		}
		return emptyObject
	}
	out := encode(object)
	if len(out) > MaxMetadata {
		bad.Addf("/metadata", fault.TooLong, "is %d bytes, max is %d", len(out), MaxMetadata)
	}
	return out
}

func checkAttachment(bad *fault.Invalid, index int, raw json.RawMessage) json.RawMessage {
	at := "/attachments/" + strconv.Itoa(index)
	v, ok := decode(bad, at, raw)
	if !ok {
		return nil
	}
	in, ok := v.(map[string]any)
	if !ok {
		bad.Addf(at, fault.InvalidType, "must be an object")
		return nil
	}
	a := attachment{bad: bad, at: at, in: in, out: make(map[string]any, len(in))}
	contentType := a.contentType()
	a.url("contentUrl")
	a.url("thumbnailUrl")
	a.text("name", MaxName)
	a.size()
	a.content()
	a.known(contentType)
	out := encode(a.out)
	if len(out) > MaxAttachment {
		bad.Addf(at, fault.TooLong, "attachment %d is %d bytes, max is %d", index, len(out), MaxAttachment)
	}
	return out
}

// attachment copies the members that an attachment has from in to out, and notes what is wrong with them. A null is
// the same as nothing.
type attachment struct {
	bad     *fault.Invalid
	at      string
	in, out map[string]any
}

func (a *attachment) text(name string, limit int) string {
	v := a.in[name]
	if v == nil {
		return ""
	}
	s, ok := v.(string)
	switch {
	case !ok:
		a.bad.Addf(a.at+"/"+name, fault.InvalidType, "must be a string")
		return ""
	case utf8.RuneCountInString(s) > limit:
		a.bad.Addf(a.at+"/"+name, fault.TooLong, "should be at most %d characters", limit)
		return ""
	}
	a.out[name] = s
	return s
}

func (a *attachment) contentType() string {
	s := a.text("contentType", MaxContentType)
	if s == "" {
		if v, there := a.in["contentType"]; !there || v == nil || v == "" {
			a.bad.Addf(a.at+"/contentType", fault.Required, "must be a media type such as image/png")
		}
		return ""
	}
	media, _, err := mime.ParseMediaType(s)
	if err != nil || !strings.Contains(media, "/") {
		a.bad.Addf(a.at+"/contentType", fault.Malformed, "must be a media type such as image/png")
	}
	return media
}

// url accepts absolute http(s) URLs and paths on this server. A path that begins with two slashes, or with a slash and a
// backslash, would be another host to a browser.
func (a *attachment) url(name string) {
	s := a.text(name, MaxURL)
	if s == "" {
		return
	}
	u, err := url.Parse(s)
	switch {
	case err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Hostname() != "" && u.User == nil:
	case err == nil && u.Scheme == "" && u.Host == "" && strings.HasPrefix(s, "/") && !strings.HasPrefix(s, "//") && !strings.Contains(s, `\`):
	default:
		a.bad.Addf(a.at+"/"+name, fault.Malformed, "must be an http or https URL without credentials, or a path that begins with /")
	}
}

func (a *attachment) size() {
	v := a.in["size"]
	if v == nil {
		return
	}
	number, ok := v.(json.Number)
	if !ok {
		a.bad.Addf(a.at+"/size", fault.InvalidType, "must be an integer")
		return
	}
	if n, err := strconv.ParseInt(number.String(), 10, 64); err != nil || n < 0 {
		a.bad.Addf(a.at+"/size", fault.OutOfRange, "must be an integer from 0 on")
		return
	}
	a.out["size"] = number
}

func (a *attachment) content() {
	switch v := a.in["content"].(type) {
	case nil:
	case map[string]any, []any:
		a.out["content"] = v
	default:
		a.bad.Addf(a.at+"/content", fault.InvalidType, "must be an object or an array")
	}
	switch v := a.in["channelData"].(type) {
	case nil:
	case map[string]any:
		a.out["channelData"] = v
	default:
		a.bad.Addf(a.at+"/channelData", fault.InvalidType, "must be an object")
	}
	// Media that lie with a provider have no address of their own, only the provider's id in channelData.
	if a.in["contentUrl"] == nil && a.in["content"] == nil && a.in["channelData"] == nil {
		a.bad.Addf(a.at+"/contentUrl", fault.Required, "an attachment needs contentUrl, content or channelData")
	}
}

// known checks the content of the types that the program itself gives a meaning to.
func (a *attachment) known(contentType string) {
	at := a.at + "/content"
	switch {
	case strings.HasPrefix(contentType, typeCardPrefix):
		if _, ok := a.in["content"].(map[string]any); !ok {
			a.bad.Addf(at, fault.Required, "a card needs an object here")
		}
	case contentType == typeLocation:
		place, ok := a.in["content"].(map[string]any)
		if !ok {
			a.bad.Addf(at, fault.Required, "a location needs an object with latitude and longitude")
			return
		}
		degrees(a.bad, at+"/latitude", place["latitude"], 90)
		degrees(a.bad, at+"/longitude", place["longitude"], 180)
		optionalStrings(a.bad, at, place, "name", "address", "url")
	case contentType == typeContacts:
		people, ok := a.in["content"].([]any)
		if !ok || len(people) == 0 {
			a.bad.Addf(at, fault.Required, "contacts need an array of objects with name and phones")
			return
		}
		for i, v := range people {
			contact(a.bad, at+"/"+strconv.Itoa(i), v)
		}
	}
}

func contact(bad *fault.Invalid, at string, v any) {
	person, ok := v.(map[string]any)
	if !ok {
		bad.Addf(at, fault.InvalidType, "must be an object")
		return
	}
	optionalStrings(bad, at, person, "name")
	phones, ok := person["phones"].([]any)
	if !ok && person["phones"] != nil {
		bad.Addf(at+"/phones", fault.InvalidType, "must be an array of strings")
	}
	for i, p := range phones {
		if _, ok := p.(string); !ok {
			bad.Addf(at+"/phones/"+strconv.Itoa(i), fault.InvalidType, "must be a string")
		}
	}
}

func degrees(bad *fault.Invalid, at string, v any, limit float64) {
	number, ok := v.(json.Number)
	if !ok {
		bad.Addf(at, fault.Required, "must be a number")
		return
	}
	if f, err := number.Float64(); err != nil || f < -limit || f > limit {
		bad.Addf(at, fault.OutOfRange, "must be from %g to %g", -limit, limit)
	}
}

func optionalStrings(bad *fault.Invalid, at string, object map[string]any, names ...string) {
	for _, name := range names {
		if v := object[name]; v != nil {
			if _, ok := v.(string); !ok {
				bad.Addf(at+"/"+name, fault.InvalidType, "must be a string")
			}
		}
	}
}

// decode reads one JSON value that Postgres can keep as jsonb: no U+0000 in a string, no absurd number. Lone surrogates
// become U+FFFD, of repeated members the last one counts.
func decode(bad *fault.Invalid, pointer string, raw json.RawMessage) (any, bool) {
	if !utf8.Valid(raw) {
		bad.Addf(pointer, fault.Malformed, "is not valid UTF-8")
		return nil, false
	}
	// Before the decoder, which would build the tree first.
	if nesting(raw) > MaxNesting {
		bad.Addf(pointer, fault.OutOfRange, "is nested more than %d deep", MaxNesting)
		return nil, false
	}
	d := json.NewDecoder(bytes.NewReader(raw))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		bad.Addf(pointer, fault.Malformed, "is not valid JSON")
		return nil, false
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		bad.Addf(pointer, fault.Malformed, "is more than one JSON value")
		return nil, false
	}
	if code, detail := unstorable(v); code != "" {
		bad.Addf(pointer, code, "%s", detail)
		return nil, false
	}
	return v, true
}

// nesting is the depth of a JSON text, correct for well-formed ones.
func nesting(raw []byte) int {
	depth, deepest, quoted := 0, 0, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
			deepest = max(deepest, depth)
		case c == '}' || c == ']':
			depth--
		}
	}
	return deepest
}

func unstorable(v any) (code, detail string) {
	switch v := v.(type) {
	case string:
		if strings.IndexByte(v, 0) >= 0 {
			return fault.Malformed, "must not contain the character U+0000"
		}
	case json.Number:
		if !reasonable(v.String()) {
			return fault.OutOfRange, "has a number outside the range of a double"
		}
	case []any:
		for _, item := range v {
			if code, detail = unstorable(item); code != "" {
				return code, detail
			}
		}
	case map[string]any:
		for name, item := range v {
			if code, detail = unstorable(name); code != "" {
				return code, detail
			}
			if code, detail = unstorable(item); code != "" {
				return code, detail
			}
		}
	}
	return "", ""
}

// reasonable keeps numbers away from the limits of Postgres' numeric, where 1e100000 takes 100,000 digits.
func reasonable(number string) bool {
	if len(number) > maxNumberLength {
		return false
	}
	i := strings.IndexAny(number, "eE")
	if i < 0 {
		return true
	}
	exponent, err := strconv.Atoi(number[i+1:])
	return err == nil && -maxExponent <= exponent && exponent <= maxExponent
}

// encode writes compact JSON with sorted members.
func encode(v any) json.RawMessage {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic("activity: a decoded JSON value cannot be encoded: " + err.Error())
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

func bodyHash(n *New) []byte {
	size := 64 + len(n.Type) + len(n.Sender) + len(n.Metadata) + 16
	if n.Text != nil {
		size += len(*n.Text)
	}
	for _, a := range n.Attachments {
		size += 8 + len(a)
	}
	b := make([]byte, 0, size)
	b = appendPart(b, n.Type)
	b = appendPart(b, n.Sender)
	if n.Text == nil {
		b = append(b, 0)
	} else {
		b = appendPart(append(b, 1), *n.Text)
	}
	b = binary.AppendUvarint(b, uint64(len(n.Attachments)))
	for _, a := range n.Attachments {
		b = appendPart(b, a)
	}
	b = appendPart(b, n.Metadata)
	if n.ReplyToID != nil {
		b = append(b, n.ReplyToID[:]...)
	}
	for _, u := range n.Uploads {
		b = append(appendPart(b, u.Name), u.SHA256[:]...)
	}
	sum := sha256.Sum256(b)
	return sum[:]
}

func appendPart[T ~string | ~[]byte](b []byte, part T) []byte {
	return append(binary.AppendUvarint(b, uint64(len(part))), part...)
}
