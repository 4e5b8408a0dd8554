package http

import (
	"errors"
	"net/url"
	"strings"
	"unicode"
	"unicode/utf8"

	"converger/internal/fault"
	"converger/internal/ratelimit"
)

// maxFormBody bounds the forms of pages, in bytes: a few short fields.
const maxFormBody = 16 << 10

// formValues are what a form's fields hold. Text that Postgres could not hold is refused.
func (c *call) formValues() (url.Values, error) {
	values, err := url.ParseQuery(string(c.body))
	if err != nil {
		return nil, newProblem(codeMalformedBody, "The form can't be read.")
	}
	for name, list := range values {
		for _, v := range append(list, name) {
			if !cleanText(v) {
				return nil, newProblem(codeMalformedBody, "The form can't be read: its text must be UTF-8 without NUL.")
			}
		}
	}
	return values, nil
}

// pageForm is a form on a page: what its fields hold, and what is wrong with them.
type pageForm struct {
	Fields  []*formField
	Problem string // what is wrong with the form as a whole
}

// formField is one field. Its name is also that of the member that domain packages name in errors.
type formField struct {
	Name, Label, Hint string
	Type              string // of the input; "" is text
	Value, Error      string
	Autocomplete      string
	InputMode         string
	Required          bool
	Autofocus         bool
	Options           []formOption // makes it a list to choose from
}

type formOption struct{ Value, Text string }

func newForm(fields ...*formField) *pageForm { return &pageForm{Fields: fields} }

// Get finds a field by its name; templates use it. There must be one.
func (f *pageForm) Get(name string) *formField {
	for _, x := range f.Fields {
		if x.Name == name {
			return x
		}
	}
	panic("http: a form has no field " + name)
}

// fill puts what was typed back into the fields. Passwords are typed again.
func (f *pageForm) fill(values url.Values) {
	for _, x := range f.Fields {
		if x.Type != "password" {
			x.Value = values.Get(x.Name)
		}
	}
}

// fault marks a field.
func (f *pageForm) fault(name, text string) { f.Get(name).Error = text }

// take spreads an error of the input over the fields that it is about. It reports whether err was one.
func (f *pageForm) take(err error) bool {
	var invalid *fault.Invalid
	var limits ratelimit.Errors
	switch {
	case errors.As(err, &invalid):
		for _, e := range invalid.Fields {
			f.add(e.Pointer, e.Detail)
		}
	case errors.As(err, &limits):
		for _, e := range limits {
			f.add(e.Pointer, e.Detail)
		}
	default:
		return false
	}
	return true
}

// add puts a fault beside its field, or above the form if it has no such field.
func (f *pageForm) add(pointer, detail string) {
	text := sentence(detail)
	name := strings.TrimPrefix(pointer, "/")
	for _, x := range f.Fields {
		if x.Name == name {
			if x.Error == "" {
				x.Error = text
			}
			return
		}
	}
	f.Problem = strings.TrimSpace(f.Problem + " " + text)
}

// failed tells whether something is wrong.
func (f *pageForm) failed() bool {
	if f.Problem != "" {
		return true
	}
	for _, x := range f.Fields {
		if x.Error != "" {
			return true
		}
	}
	return false
}

// focus puts the cursor into the first field that is wrong, else into the given one, if any.
func (f *pageForm) focus(otherwise string) *pageForm {
	for _, x := range f.Fields {
		x.Autofocus = false
	}
	for _, x := range f.Fields {
		if x.Error != "" {
			x.Autofocus = true
			return f
		}
	}
	if otherwise != "" {
		f.Get(otherwise).Autofocus = true
	}
	return f
}

// sentence makes the detail of a fault one.
func sentence(detail string) string {
	first, size := utf8.DecodeRuneInString(detail)
	return string(unicode.ToUpper(first)) + strings.TrimSuffix(detail[size:], ".") + "."
}
