package fault

import (
	"fmt"
	"strings"
)

// Codes are what programs read in [Field.Code]; the list is closed, and clients may switch on it.
const (
	Required      = "required"       // a member that must be there is missing, null or empty
	TooLong       = "too_long"       // more characters, items or bytes than allowed
	OutOfRange    = "out_of_range"   // a number or an instant outside its range
	InvalidType   = "invalid_type"   // another JSON type than expected
	UnknownValue  = "unknown_value"  // not one of a closed list
	UnknownMember = "unknown_member" // a member that the object does not have
	NotFound      = "not_found"      // names something that does not exist, or not for this caller
	Conflict      = "conflict"       // contradicts another member or the present state
	Malformed     = "malformed"      // the right type, but not well formed: bad UTF-8, URL, JSON, control characters
)

// Field is one thing wrong with an input.
type Field struct {
	// Pointer is the RFC 6901 JSON pointer of the member ("/limits/activity_create/limit"), "" for the whole document.
	Pointer string `json:"pointer"`
	// Code is one of the constants above.
	Code string `json:"code"`
	// Detail says what is wrong and what would be right, in a sentence for people. It never repeats a secret.
	Detail string `json:"detail"`
}

// Invalid is the error of an input that is refused; it lists everything found wrong. Nothing was changed.
// Callers find it with [errors.As].
type Invalid struct {
	Fields []Field
}

// Invalidf makes an Invalid of one field.
func Invalidf(pointer, code, format string, args ...any) *Invalid {
	e := &Invalid{}
	e.Addf(pointer, code, format, args...)
	return e
}

// Addf records one more field.
func (e *Invalid) Addf(pointer, code, format string, args ...any) {
	e.Fields = append(e.Fields, Field{Pointer: pointer, Code: code, Detail: fmt.Sprintf(format, args...)})
}

// List writes the values of a closed list for people: a, b, c.
func List[S ~string](values []S) string {
	var b strings.Builder
	for i, v := range values {
		if i > 0 {
			b.WriteString(", ")
		}
		b.WriteString(string(v))
	}
	return b.String()
}

// Err is e when it lists a field, else nil: a validator collects into a zero Invalid and ends with `return bad.Err()`.
// (Returning the pointer itself as an error would never be nil.)
func (e *Invalid) Err() error {
	if e == nil || len(e.Fields) == 0 {
		return nil
	}
	return e
}

// Error lists the fields in the order in which they were found.
func (e *Invalid) Error() string {
	if len(e.Fields) == 0 {
		return "invalid input"
	}
	var b strings.Builder
	b.WriteString("invalid input: ")
	for i, f := range e.Fields {
		if i > 0 {
			b.WriteString("; ")
		}
		if f.Pointer != "" {
			b.WriteString(f.Pointer)
			b.WriteByte(' ')
		}
		b.WriteString(f.Detail)
	}
	return b.String()
}
