package openapi

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

//go:embed *.yaml
var files embed.FS

const commonFile = "common.yaml"

// Source is what the YAML files say. It is never changed after [Load]; safe for concurrent use.
type Source struct {
	common     common
	groups     []*group
	operations map[string]*operation // by method and pattern
	schemas    map[string]*Schema
}

// common is the file common.yaml.
type common struct {
	Title, Description string
	Groups             []string // file names without their end, in the order of the document
	Credentials        map[string]*Credential
	PathParameters     map[string]*Schema `yaml:"path_parameters"`
	Parameters         map[string]*Schema // of queries, and headers of requests; by name
	Headers            map[string]*header // of answers, by name
	Bodies             map[string]string  // descriptions of kinds of bodies
	Schemas            map[string]*Schema
	Webhooks           map[string]*operation
}

// Credential is a security scheme, with how it is sent and an example of it.
type Credential struct {
	Type        string `json:"type"`
	Description string `json:"description"`
	Name        string `json:"name,omitempty"`
	In          string `json:"in,omitempty"`
	Scheme      string `json:"scheme,omitempty"`
	Format      string `json:"bearerFormat,omitempty" yaml:"format"`
	Curl        string `json:"-"` // the header in examples, with a variable of the shell
}

// header is a header of an answer. Optional says that an answer which names it may lack it.
type header struct {
	Schema   Schema
	Optional bool
}

// group is a file of operations: a tag of the document.
type group struct {
	file             string
	Tag, Description string
	Operations       map[string]*operation // by method and pattern
	Schemas          map[string]*Schema
}

// operation is what is written by hand of an operation.
type operation struct {
	group                    *group
	ID, Summary, Description string
	Deprecated               bool
	Idempotent               bool       // takes Idempotency-Key
	Versioned                bool       // answers with an ETag; takes If-None-Match where it reads, If-Match where it changes
	Query                    parameters // one whose type is left out is a parameter of common.yaml
	Headers                  parameters // of the request; likewise
	Body                     *Schema
	BodyType                 string `yaml:"body_type"` // "": as the route's kind of body says
	BodyDescription          string `yaml:"body_description"`
	Example                  yaml.Node
	Answers                  map[int]*response
	Problems                 []string // codes that the handler adds to those of the guards
}

// response is an answer: one of Data (in the envelope of a single object), List (all of them), Page (with a cursor) or
// Body, or nothing.
type response struct {
	Description            string
	Data, List, Page, Body *Schema
	Type                   string // of Body; "": JSON
	Headers                []string
	Example                yaml.Node // none: made from the example of the schema
}

// Load reads the files that the program was built with. The error names file and line.
func Load() (*Source, error) { return load(files) }

func load(from fs.FS) (*Source, error) {
	s := &Source{operations: map[string]*operation{}, schemas: map[string]*Schema{}}
	if err := decode(from, commonFile, &s.common); err != nil {
		return nil, err
	}
	names, err := fs.Glob(from, "*.yaml")
	if err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	var errs []error
	s.addSchemas(commonFile, s.common.Schemas, &errs)
	for _, name := range names {
		if name == commonFile {
			continue
		}
		g := &group{file: name}
		if err := decode(from, name, g); err != nil {
			errs = append(errs, err)
			continue
		}
		if !slices.Contains(s.common.Groups, g.name()) {
			errs = append(errs, fmt.Errorf("openapi: %s: its name is not in `groups` of %s", name, commonFile))
		}
		s.groups = append(s.groups, g)
		s.addSchemas(name, g.Schemas, &errs)
		for route, op := range g.Operations {
			op.group = g
			if s.operations[route] != nil {
				errs = append(errs, fmt.Errorf("openapi: %s: %s is also in %s", name, route, s.operations[route].group.file))
			}
			s.operations[route] = op
		}
	}
	slices.SortFunc(s.groups, func(a, b *group) int {
		return slices.Index(s.common.Groups, a.name()) - slices.Index(s.common.Groups, b.name())
	})
	return s, errors.Join(errs...)
}

func (g *group) name() string { return strings.TrimSuffix(g.file, ".yaml") }

func (s *Source) addSchemas(file string, schemas map[string]*Schema, errs *[]error) {
	for name, schema := range schemas {
		if s.schemas[name] != nil {
			*errs = append(*errs, fmt.Errorf("openapi: %s: there is another schema %s", file, name))
		}
		s.schemas[name] = schema
	}
}

// decode reads a file and refuses what it does not know.
func decode(from fs.FS, name string, into any) error {
	text, err := fs.ReadFile(from, name)
	if err != nil {
		return fmt.Errorf("openapi: %w", err)
	}
	d := yaml.NewDecoder(bytes.NewReader(text))
	d.KnownFields(true)
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("openapi: %s: %w", name, err)
	}
	return nil
}
