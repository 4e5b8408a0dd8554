package openapi

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Map is a JSON object whose members have an order.
type Map[T any] []Member[T]

// Member is a member of a [Map].
type Member[T any] struct {
	Name  string
	Value T
}

// Get finds a member by its name.
func (m Map[T]) Get(name string) (value T, ok bool) {
	for _, e := range m {
		if e.Name == name {
			return e.Value, true
		}
	}
	return value, false
}

func (m *Map[T]) add(name string, value T) { *m = append(*m, Member[T]{name, value}) }

// MarshalJSON implements json.Marshaler.
func (m Map[T]) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i, e := range m {
		if i > 0 {
			b.WriteByte(',')
		}
		value, err := encode(e.Value)
		if err != nil {
			return nil, err
		}
		name, err := encode(e.Name)
		if err != nil {
			return nil, err
		}
		b.Write(name)
		b.WriteByte(':')
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// encode is json.Marshal without the escapes that HTML inside of scripts would need.
func encode(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}

// Schema is a schema of JSON Schema 2020-12, with the keywords that the description uses. In YAML it is a mapping of them,
// or the text of its type alone. The type may be written short: a format (uuid, time, date, uri) for a string of it, a
// capitalised name for a reference to a schema, [] behind it for an array, and |null at the end for what may be null. Of
// the names in `properties`, those that end in ? may be absent.
type Schema struct {
	Ref                  string          `json:"$ref,omitempty"`
	Type                 any             `json:"type,omitempty"` // a string, or a []string
	Format               string          `json:"format,omitempty"`
	Description          string          `json:"description,omitempty"`
	Enum                 []any           `json:"enum,omitempty"`
	Const                any             `json:"const,omitempty"`
	Default              any             `json:"default,omitempty"`
	Pattern              string          `json:"pattern,omitempty"`
	MinLength            *int64          `json:"minLength,omitempty"`
	MaxLength            *int64          `json:"maxLength,omitempty"`
	Minimum              *int64          `json:"minimum,omitempty"`
	Maximum              *int64          `json:"maximum,omitempty"`
	MinItems             *int64          `json:"minItems,omitempty"`
	MaxItems             *int64          `json:"maxItems,omitempty"`
	ContentEncoding      string          `json:"contentEncoding,omitempty"`
	ContentMediaType     string          `json:"contentMediaType,omitempty"`
	Items                *Schema         `json:"items,omitempty"`
	Properties           Map[*Schema]    `json:"properties,omitempty"`
	Required             []string        `json:"required,omitempty"`
	AdditionalProperties any             `json:"additionalProperties,omitempty"` // a bool, or a *Schema
	AllOf                []*Schema       `json:"allOf,omitempty"`
	AnyOf                []*Schema       `json:"anyOf,omitempty"`
	OneOf                []*Schema       `json:"oneOf,omitempty"`
	Examples             json.RawMessage `json:"examples,omitempty"` // an array
}

const schemaRef = "#/components/schemas/"

// RefName is the name of the schema that this one refers to, "" for none.
func (s *Schema) RefName() string { return strings.TrimPrefix(s.Ref, schemaRef) }

// setType reads the short form of a type into s.
func (s *Schema) setType(text string) error {
	text, nullable := strings.CutSuffix(text, "|null")
	inner := &Schema{}
	switch element, isList := strings.CutSuffix(text, "[]"); {
	case isList:
		inner.Type, inner.Items = "array", &Schema{}
		if err := inner.Items.setType(element); err != nil {
			return err
		}
	case text == "uuid", text == "date":
		inner.Type, inner.Format = "string", text
	case text == "time":
		inner.Type, inner.Format = "string", "date-time"
	case text == "uri":
		inner.Type, inner.Format = "string", "uri-reference"
	case slices.Contains([]string{"string", "integer", "number", "boolean", "object", "array", "null"}, text):
		inner.Type = text
	case text != "" && text[0] >= 'A' && text[0] <= 'Z':
		inner.Ref = schemaRef + text
	default:
		return fmt.Errorf("%q is no type", text)
	}
	switch {
	case nullable && inner.Ref != "":
		s.AnyOf = []*Schema{inner, {Type: "null"}}
	case nullable:
		s.Type, s.Format, s.Items = []string{inner.Type.(string), "null"}, inner.Format, inner.Items
	default:
		s.Ref, s.Type, s.Format, s.Items = inner.Ref, inner.Type, inner.Format, inner.Items
	}
	return nil
}

// UnmarshalYAML implements yaml.Unmarshaler.
func (s *Schema) UnmarshalYAML(n *yaml.Node) error {
	if n.Kind == yaml.ScalarNode {
		return at(n, s.setType(n.Value))
	}
	keywords := map[string]any{
		"format": &s.Format, "description": &s.Description, "enum": &s.Enum, "const": &s.Const, "default": &s.Default, "pattern": &s.Pattern,
		"minLength": &s.MinLength, "maxLength": &s.MaxLength, "minimum": &s.Minimum, "maximum": &s.Maximum, "minItems": &s.MinItems,
		"maxItems": &s.MaxItems, "contentEncoding": &s.ContentEncoding, "contentMediaType": &s.ContentMediaType, "items": &s.Items,
		"allOf": &s.AllOf, "anyOf": &s.AnyOf, "oneOf": &s.OneOf,
	}
	err := members(n, func(name string, value *yaml.Node) error {
		switch name {
		case "type":
			return at(value, s.setType(value.Value))
		case "properties":
			if s.Type == nil {
				s.Type = "object"
			}
			return properties(value, func(name string, optional bool, p *Schema) {
				s.Properties.add(name, p)
				if !optional {
					s.Required = append(s.Required, name)
				}
			})
		case "additionalProperties":
			if value.Tag == "!!bool" {
				s.AdditionalProperties = value.Value == "true"
				return nil
			}
			inner := &Schema{}
			s.AdditionalProperties = inner
			return value.Decode(inner)
		case "example":
			example, err := toJSON(value)
			s.Examples = slices.Concat(json.RawMessage("["), example, json.RawMessage("]"))
			return err
		default:
			target, ok := keywords[name]
			if !ok {
				return at(value, fmt.Errorf("%q is no keyword of a schema", name))
			}
			return value.Decode(target)
		}
	})
	if _, nullable := s.Type.([]string); nullable && s.Enum != nil {
		s.Enum = append(s.Enum, nil)
	}
	return err
}

// parameters are the parameters of a query, or the headers, of an operation. All may be left out.
type parameters Map[*Schema]

// UnmarshalYAML implements yaml.Unmarshaler.
func (p *parameters) UnmarshalYAML(n *yaml.Node) error {
	return properties(n, func(name string, _ bool, s *Schema) { (*Map[*Schema])(p).add(name, s) })
}

func properties(n *yaml.Node, add func(name string, optional bool, s *Schema)) error {
	return members(n, func(name string, value *yaml.Node) error {
		s := &Schema{}
		name, optional := strings.CutSuffix(name, "?")
		add(name, optional, s)
		return value.Decode(s)
	})
}

// members walks over a mapping, in its order.
func members(n *yaml.Node, do func(name string, value *yaml.Node) error) error {
	if n.Kind != yaml.MappingNode {
		return at(n, fmt.Errorf("a mapping is expected"))
	}
	for i := 0; i < len(n.Content); i += 2 {
		if err := do(n.Content[i].Value, n.Content[i+1]); err != nil {
			return err
		}
	}
	return nil
}

// at says in which line an error is.
func at(n *yaml.Node, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("line %d: %w", n.Line, err)
}

// toJSON writes a YAML value as JSON, members in their order. A time is a string, as it is written.
func toJSON(n *yaml.Node) (json.RawMessage, error) {
	switch n.Kind {
	case yaml.MappingNode:
		object := Map[json.RawMessage]{}
		err := members(n, func(name string, value *yaml.Node) error {
			v, err := toJSON(value)
			object.add(name, v)
			return err
		})
		if err != nil {
			return nil, err
		}
		return object.MarshalJSON()
	case yaml.SequenceNode:
		list := make([]json.RawMessage, len(n.Content))
		for i, element := range n.Content {
			var err error
			if list[i], err = toJSON(element); err != nil {
				return nil, err
			}
		}
		return encode(list)
	case yaml.ScalarNode:
		var v any = n.Value
		if n.Tag != "!!timestamp" {
			if err := n.Decode(&v); err != nil {
				return nil, err
			}
		}
		return encode(v)
	}
	return nil, at(n, fmt.Errorf("aliases are not understood"))
}
