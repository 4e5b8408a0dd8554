package activity

import (
	"encoding/base64"
	"encoding/hex"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
)

// timeLayout is RFC 3339 with the microseconds that Postgres keeps, always six digits.
const timeLayout = "2006-01-02T15:04:05.000000Z"

// Canonical is the activity as the tenant API shows it and webhooks carry it: all members always there, null where there
// is nothing, instants in UTC with microseconds.
func (a Activity) Canonical() []byte {
	size := 480 + len(a.Sender) + len(a.Attachments) + len(a.Metadata)
	if a.Text != nil {
		size += len(*a.Text) + len(*a.Text)/8
	}
	return a.AppendCanonical(make([]byte, 0, size))
}

// AppendCanonical appends what Canonical returns to b.
func (a Activity) AppendCanonical(b []byte) []byte {
	b = appendUUID(append(b, `{"id":`...), &a.ID)
	b = appendString(append(b, `,"type":`...), &a.Type)
	b = appendString(append(b, `,"sender":`...), &a.Sender)
	b = appendString(append(b, `,"text":`...), a.Text)
	b = appendRaw(append(b, `,"attachments":`...), a.Attachments, emptyArray)
	b = appendRaw(append(b, `,"metadata":`...), a.Metadata, emptyObject)
	b = appendString(append(b, `,"idempotency_key":`...), a.IdempotencyKey)
	b = strconv.AppendInt(append(b, `,"seq":`...), a.Seq, 10)
	b = appendUUID(append(b, `,"conversation_id":`...), &a.ConversationID)
	b = appendUUID(append(b, `,"tenant_id":`...), &a.TenantID)
	b = appendUUID(append(b, `,"reply_to_id":`...), a.ReplyToID)
	b = appendTime(append(b, `,"edited_at":`...), a.EditedAt)
	b = appendTime(append(b, `,"deleted_at":`...), a.DeletedAt)
	b = appendTime(append(b, `,"inserted_at":`...), &a.InsertedAt)
	return append(b, '}')
}

// MarshalJSON implements [json.Marshaler] with the canonical form.
func (a Activity) MarshalJSON() ([]byte, error) { return a.Canonical(), nil }

func appendRaw(b []byte, raw, empty []byte) []byte {
	if len(raw) == 0 {
		raw = empty
	}
	return append(b, raw...)
}

func appendUUID(b []byte, id *uuid.UUID) []byte {
	if id == nil {
		return append(b, "null"...)
	}
	b = hex.AppendEncode(append(b, '"'), id[:4])
	b = hex.AppendEncode(append(b, '-'), id[4:6])
	b = hex.AppendEncode(append(b, '-'), id[6:8])
	b = hex.AppendEncode(append(b, '-'), id[8:10])
	b = hex.AppendEncode(append(b, '-'), id[10:])
	return append(b, '"')
}

func appendTime(b []byte, t *time.Time) []byte {
	if t == nil {
		return append(b, "null"...)
	}
	b = append(b, '"')
	b = t.UTC().AppendFormat(b, timeLayout)
	return append(b, '"')
}

// appendString writes s as a JSON string. U+2028 and U+2029 are escaped, because JSON is pasted into scripts; invalid
// UTF-8, which is refused at the edge, becomes U+FFFD.
func appendString(b []byte, s *string) []byte {
	if s == nil {
		return append(b, "null"...)
	}
	const digits = "0123456789abcdef"
	text := *s
	b = append(b, '"')
	start := 0
	for i := 0; i < len(text); {
		c := text[i]
		if c >= ' ' && c != '"' && c != '\\' && c < utf8.RuneSelf {
			i++
			continue
		}
		size := 1
		if c >= utf8.RuneSelf {
			var r rune
			r, size = utf8.DecodeRuneInString(text[i:])
			if r != '\u2028' && r != '\u2029' && (r != utf8.RuneError || size > 1) {
				i += size
				continue
			}
			b = append(b, text[start:i]...)
			b = append(b, `\u`...)
			b = append(b, digits[r>>12&15], digits[r>>8&15], digits[r>>4&15], digits[r&15])
		} else {
			b = append(b, text[start:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\n':
				b = append(b, `\n`...)
			case '\r':
				b = append(b, `\r`...)
			case '\t':
				b = append(b, `\t`...)
			default:
				b = append(b, `\u00`...)
				b = append(b, digits[c>>4], digits[c&15])
			}
		}
		i += size
		start = i
	}
	b = append(b, text[start:]...)
	return append(b, '"')
}

const watermarkPrefix = "seq:"

// Watermark is the text of a position in a conversation, right after seq: base64url without padding of "seq:<n>".
func Watermark(seq int64) string {
	return base64.RawURLEncoding.EncodeToString(strconv.AppendInt([]byte(watermarkPrefix), seq, 10))
}

// parseLegacyWatermark reads an older form: base64url without padding of the text of the last activity's id.
func parseLegacyWatermark(text string) (uuid.UUID, bool) {
	plain, err := base64.RawURLEncoding.Strict().DecodeString(text)
	if err != nil || len(plain) != 36 {
		return uuid.Nil, false
	}
	id, err := uuid.ParseBytes(plain)
	return id, err == nil
}

// ParseWatermark reads what [Watermark] writes; "" is the beginning. The client API's older form, a plain number from 0
// on, is read too. (No number is mistaken: "c2Vx…" is how every watermark begins.) Anything else is ErrBadWatermark.
func ParseWatermark(text string) (afterSeq int64, err error) {
	if text == "" {
		return 0, nil
	}
	digits := text
	if strings.Trim(text, "0123456789") != "" {
		plain, err := base64.RawURLEncoding.Strict().DecodeString(text)
		if err != nil {
			return 0, ErrBadWatermark
		}
		var ok bool
		if digits, ok = strings.CutPrefix(string(plain), watermarkPrefix); !ok || strings.Trim(digits, "0123456789") != "" {
			return 0, ErrBadWatermark
		}
	}
	seq, err := strconv.ParseInt(digits, 10, 64)
	if err != nil {
		return 0, ErrBadWatermark
	}
	return seq, nil
}
