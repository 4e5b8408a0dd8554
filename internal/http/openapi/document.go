package openapi

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// Route is what the description takes from a row of the route table.
type Route struct {
	Method, Pattern string
	Credential      string // the name of a credential in common.yaml, "" for none
	OlderCredential string // another one that does, without scopes; "" for none
	Scope           string // "" for none
	Bucket          string // "" for no limit
	Limit           string // the bucket's default in words, and for whom it counts
	Body            string // the name of a kind of body in common.yaml, "" for none
	OptionalBody    bool
	BodyType        string    // the media type of the body
	MaxBody         int64     // bytes
	Problems        []Problem // that the guards of the route answer
}

func (r Route) name() string { return r.Method + " " + r.Pattern }

// Problem is a kind of problem as the catalogue has it.
type Problem struct {
	Code   string
	Status int // of this occurrence
	Title  string
}

// Options are what only the running program knows.
type Options struct {
	Version   string
	ServerURL string
	Routes    []Route
	// Catalogue finds the problems that operations name.
	Catalogue map[string]Problem
}

// Document is an OpenAPI 3.1 document.
type Document struct {
	OpenAPI    string         `json:"openapi"`
	Info       Info           `json:"info"`
	Servers    []Server       `json:"servers"`
	Tags       []Tag          `json:"tags"`
	Paths      Map[*PathItem] `json:"paths"`
	Webhooks   Map[*PathItem] `json:"webhooks"`
	Components Components     `json:"components"`

	// Gaps say what is missing between the routes and the description, and what to write where.
	Gaps []string `json:"-"`
}

// Info is about the whole document.
type Info struct {
	Title       string `json:"title"`
	Version     string `json:"version"`
	Description string `json:"description"`
}

// Server is where the API is.
type Server struct {
	URL string `json:"url"`
}

// Tag is a group of operations.
type Tag struct {
	Name        string `json:"name"`
	Description string `json:"description,omitempty"`
}

// PathItem has the operations of a path by their methods in lower case, in the order of the route table.
type PathItem = Map[*Operation]

// Components are what the document refers to.
type Components struct {
	Schemas         Map[*Schema]        `json:"schemas"`
	Headers         Map[*Header]        `json:"headers"`
	Responses       Map[*wholeResponse] `json:"responses"`
	SecuritySchemes Map[*Credential]    `json:"securitySchemes"`
}

// Operation is a route, or a webhook.
type Operation struct {
	Tags        []string        `json:"tags,omitempty"`
	ID          string          `json:"operationId"`
	Summary     string          `json:"summary"`
	Description string          `json:"description,omitempty"`
	Deprecated  bool            `json:"deprecated,omitempty"`
	Security    []Map[[]string] `json:"security"`
	RateLimit   *RateLimit      `json:"x-rate-limit,omitempty"`
	Parameters  []*Parameter    `json:"parameters,omitempty"`
	RequestBody *RequestBody    `json:"requestBody,omitempty"`
	Responses   Map[*Response]  `json:"responses"`
	Route       Route           `json:"-"` // zero for webhooks
	File        string          `json:"-"` // that describes it
}

// RateLimit says which budget an operation spends.
type RateLimit struct {
	Bucket  string `json:"bucket"`
	Default string `json:"default"` // in words
}

// Parameter is a parameter of the path, the query or the request's header.
type Parameter struct {
	Name        string          `json:"name"`
	In          string          `json:"in"`
	Description string          `json:"description,omitempty"`
	Required    bool            `json:"required,omitempty"`
	Schema      *Schema         `json:"schema"`
	Example     json.RawMessage `json:"example,omitempty"`
}

// RequestBody is the body of a request.
type RequestBody struct {
	Description string      `json:"description,omitempty"`
	Required    bool        `json:"required"`
	Content     Map[*Media] `json:"content"`
}

// Media is a body of one media type.
type Media struct {
	Schema  *Schema         `json:"schema"`
	Example json.RawMessage `json:"example,omitempty"`
}

// Response is an answer of one status.
type Response struct {
	Description string       `json:"description"`
	Headers     Map[*Header] `json:"headers,omitempty"`
	Content     Map[*Media]  `json:"content,omitempty"`
	// Problems are the codes that the answer can have.
	Problems []string `json:"x-problem-codes,omitempty"`

	// Shared is the name in the components of an answer that several operations have, "" for none: in JSON the operation
	// refers to it.
	Shared string `json:"-"`
}

// MarshalJSON implements json.Marshaler.
func (r *Response) MarshalJSON() ([]byte, error) {
	if r.Shared != "" {
		return encode(map[string]string{"$ref": "#/components/responses/" + r.Shared})
	}
	return encode((*wholeResponse)(r))
}

// wholeResponse is a response that is written out.
type wholeResponse Response

// Header is a header of an answer, or a reference to one.
type Header struct {
	Ref         string  `json:"$ref,omitempty"`
	Description string  `json:"description,omitempty"`
	Required    bool    `json:"required,omitempty"`
	Schema      *Schema `json:"schema,omitempty"`
}

const headerRef = "#/components/headers/"

// Document describes the routes. The error lists faults of the files: references to nothing, answers without a schema.
func (s *Source) Document(o Options) (*Document, error) {
	b := &builder{Source: s, Options: o, doc: &Document{
		OpenAPI: "3.1.1", Info: Info{s.common.Title, o.Version, s.common.Description}, Servers: []Server{{o.ServerURL}},
	}}
	for _, g := range s.groups {
		b.doc.Tags = append(b.doc.Tags, Tag{g.Tag, g.Description})
	}
	b.paths()
	b.webhooks()
	b.components()
	b.share()
	b.checkRefs()
	return b.doc, errors.Join(b.errs...)
}

type builder struct {
	*Source
	Options
	doc  *Document
	errs []error
}

func (b *builder) faultf(op *operation, format string, args ...any) {
	where := commonFile
	if op.group != nil {
		where = op.group.file
	}
	b.errs = append(b.errs, fmt.Errorf("openapi: %s: %s: %s", where, op.ID, fmt.Sprintf(format, args...)))
}

func (b *builder) gapf(format string, args ...any) {
	b.doc.Gaps = append(b.doc.Gaps, fmt.Sprintf(format, args...))
}

// paths makes an operation of each route: paths in the order of the groups, and within one in that of the table.
func (b *builder) paths() {
	described := map[string]bool{}
	ids := map[string]string{}
	for _, rt := range b.Routes {
		described[rt.name()] = true
		op := b.operations[rt.name()]
		if op == nil {
			b.gapf("the route %s has no description. Write into the file of its resource in internal/http/openapi:\n"+
				"operations:\n  %[1]s:\n    id: getThing\n    summary: Get a thing\n    answers:\n      200: {data: Thing}\n"+
				"%s has an operation of each kind to learn from, and common.yaml explains the words.", rt.name(), "routing_rules.yaml")
		} else if other := ids[op.ID]; other != "" {
			b.faultf(op, "the id is also that of %s", other)
		} else {
			ids[op.ID] = rt.name()
		}
	}
	for _, g := range b.groups {
		for _, rt := range b.Routes {
			op := b.operations[rt.name()]
			if op == nil || op.group != g {
				continue
			}
			item, ok := b.doc.Paths.Get(rt.Pattern)
			if !ok {
				item = &PathItem{}
				b.doc.Paths.add(rt.Pattern, item)
			}
			item.add(strings.ToLower(rt.Method), b.operation(rt, op))
		}
	}
	for name, op := range b.operations {
		if !described[name] {
			b.gapf("internal/http/openapi/%s describes %s, which is no route: remove it, or correct its method and path", op.group.file, name)
		}
	}
	slices.Sort(b.doc.Gaps)
}

// webhooks describes what the hub itself sends.
func (b *builder) webhooks() {
	for _, name := range slices.Sorted(maps.Keys(b.common.Webhooks)) {
		op := b.common.Webhooks[name]
		out := b.written(op)
		out.Parameters = b.given(op, op.Headers, "header")
		out.RequestBody = b.body(op, Route{BodyType: "application/json"})
		out.Responses = b.answers(op, Route{})
		b.doc.Webhooks.add(name, &PathItem{{"post", out}})
	}
}

// written is what operations and webhooks have in common.
func (b *builder) written(op *operation) *Operation {
	if op.ID == "" || op.Summary == "" || len(op.Answers) == 0 {
		b.faultf(op, "an operation needs id, summary and answers")
	}
	return &Operation{ID: op.ID, Summary: op.Summary, Description: op.Description, Deprecated: op.Deprecated, Security: []Map[[]string]{}}
}

func (b *builder) operation(rt Route, op *operation) *Operation {
	out := b.written(op)
	out.Route, out.File, out.Tags = rt, op.group.file, []string{op.group.Tag}
	if rt.Credential != "" {
		if b.common.Credentials[rt.Credential] == nil {
			b.gapf("the credential %q of %s is not described: add it to `credentials` of internal/http/openapi/%s, and to credentialSchemes of internal/http/describe.go",
				rt.Credential, rt.name(), commonFile)
		}
		scopes := []string{}
		if rt.Scope != "" {
			scopes = append(scopes, rt.Scope)
		}
		out.Security = append(out.Security, Map[[]string]{{rt.Credential, scopes}})
	}
	if rt.OlderCredential != "" {
		if b.common.Credentials[rt.OlderCredential] == nil {
			b.faultf(op, "%s has no credential %q", commonFile, rt.OlderCredential)
		}
		out.Security = append(out.Security, Map[[]string]{{rt.OlderCredential, []string{}}})
	}
	if rt.Bucket != "" {
		out.RateLimit = &RateLimit{rt.Bucket, rt.Limit}
	}
	out.Parameters = b.parameters(rt, op)
	out.RequestBody = b.body(op, rt)
	out.Responses = b.answers(op, rt)
	b.problems(rt, op, out)
	return out
}

var braces = regexp.MustCompile(`\{([a-z_]+)\}`)

// parameters are those of the path, of the query, and of the header.
func (b *builder) parameters(rt Route, op *operation) []*Parameter {
	var list []*Parameter
	for _, m := range braces.FindAllStringSubmatch(rt.Pattern, -1) {
		schema := b.common.PathParameters[m[1]]
		if schema == nil {
			b.gapf("the path parameter {%s} of %s is not described. Write into `path_parameters` of internal/http/openapi/%s:\n"+
				"  %[1]s: {type: uuid, description: The id of …, example: 01939d2c-0000-7000-8000-0000000000…}", m[1], rt.name(), commonFile)
			schema = &Schema{Type: "string"}
		}
		list = append(list, parameter(m[1], "path", schema))
	}
	query, headers := slices.Clone(op.Query), slices.Clone(op.Headers) // the operation is shared
	if op.hasPage() {
		query = append(query, Member[*Schema]{"limit", &Schema{}}, Member[*Schema]{"cursor", &Schema{}})
	}
	if op.Idempotent {
		headers = append(headers, Member[*Schema]{"Idempotency-Key", &Schema{}})
	}
	if op.Versioned {
		name := "If-Match"
		if rt.Method == http.MethodGet {
			name = "If-None-Match"
		}
		headers = append(headers, Member[*Schema]{name, &Schema{}})
	}
	return slices.Concat(list, b.given(op, query, "query"), b.given(op, headers, "header"))
}

func (op *operation) hasPage() bool {
	for _, a := range op.Answers {
		if a.Page != nil {
			return true
		}
	}
	return false
}

func (b *builder) given(op *operation, from parameters, in string) []*Parameter {
	var list []*Parameter
	for _, p := range from {
		name, needed := strings.CutSuffix(p.Name, "!")
		p.Name = name
		if p.Value.Type == nil && p.Value.Ref == "" {
			shared := b.common.Parameters[p.Name]
			if shared == nil {
				b.faultf(op, "the parameter %s has no type, and is not one of %s", p.Name, commonFile)
				continue
			}
			p.Value = shared
		}
		list = append(list, parameter(p.Name, in, p.Value))
		list[len(list)-1].Required = needed
	}
	return list
}

// parameter moves description and example of a schema to where a parameter has them.
func parameter(name, in string, s *Schema) *Parameter {
	bare := *s
	p := &Parameter{Name: name, In: in, Description: s.Description, Required: in == "path", Schema: &bare, Example: s.Example()}
	bare.Description, bare.Examples = "", nil
	return p
}

// Example is the first example of a schema, nil for none.
func (s *Schema) Example() json.RawMessage {
	var list []json.RawMessage
	if s.Examples == nil || json.Unmarshal(s.Examples, &list) != nil || len(list) == 0 {
		return nil
	}
	return list[0]
}

func (b *builder) body(op *operation, rt Route) *RequestBody {
	if rt.BodyType == "" {
		if op.Body != nil {
			b.faultf(op, "the route takes no body")
		}
		return nil
	}
	if op.Body == nil {
		b.faultf(op, "the route takes a body: name its schema in `body`")
		return nil
	}
	var notes []string
	if op.BodyDescription != "" {
		notes = append(notes, op.BodyDescription)
	}
	if rt.Body != "" {
		if b.common.Bodies[rt.Body] == "" {
			b.gapf("bodies of the kind %q are not described: add it to `bodies` of internal/http/openapi/%s, and to bodyTypes of internal/http/describe.go", rt.Body, commonFile)
		} else {
			notes = append(notes, fmt.Sprintf(b.common.Bodies[rt.Body], rt.MaxBody))
		}
	}
	return &RequestBody{
		Description: strings.Join(notes, " "), Required: !rt.OptionalBody,
		Content: Map[*Media]{{cmp.Or(op.BodyType, rt.BodyType), &Media{op.Body, b.example(op, &op.Example, op.Body)}}},
	}
}

// example is the one that is written, or that of the schema.
func (b *builder) example(op *operation, written *yaml.Node, of *Schema) json.RawMessage {
	if !written.IsZero() {
		example, err := toJSON(written)
		if err != nil {
			b.faultf(op, "example: %v", err)
		}
		return example
	}
	if named := b.schemas[of.RefName()]; named != nil {
		of = named
	}
	return of.Example()
}

// answers are the answers that are written by hand.
func (b *builder) answers(op *operation, rt Route) Map[*Response] {
	var all Map[*Response]
	for _, status := range slices.Sorted(maps.Keys(op.Answers)) {
		a := op.Answers[status]
		out := &Response{Description: a.Description, Headers: b.headers(op, rt, a.Headers...)}
		if status < 300 {
			if op.Idempotent {
				out.Headers = append(out.Headers, b.headers(op, Route{}, "Idempotent-Replayed")...)
			}
			if a.Page != nil {
				out.Headers = append(out.Headers, b.headers(op, Route{}, "Link")...)
			}
			if op.Versioned && status != http.StatusNoContent {
				out.Headers = append(out.Headers, b.headers(op, Route{}, "ETag")...)
			}
		}
		if out.Description == "" {
			out.Description = http.StatusText(status)
		}
		media := &Media{Schema: a.Body}
		switch {
		case a.Data != nil:
			media = b.envelope(op, a, a.Data, `{"data":%s}`, Map[*Schema]{{"data", a.Data}})
		case a.List != nil:
			media = b.envelope(op, a, a.List, `{"data":[%s]}`, Map[*Schema]{{"data", listOf(a.List)}})
		case a.Page != nil:
			media = b.envelope(op, a, a.Page, `{"data":[%s],"meta":`+string(b.schemas["PageMeta"].Example())+`}`,
				Map[*Schema]{{"data", listOf(a.Page)}, {"meta", &Schema{Ref: schemaRef + "PageMeta"}}})
		case a.Body != nil:
			media.Example = b.example(op, &a.Example, a.Body)
		}
		if media.Schema != nil {
			out.Content = Map[*Media]{{cmp.Or(a.Type, "application/json"), media}}
		}
		all.add(strconv.Itoa(status), out)
	}
	if op.Versioned && rt.Method == http.MethodGet {
		all.add("304", &Response{Description: "It is as `If-None-Match` says.", Headers: b.headers(op, rt, "ETag")})
	}
	return all
}

// envelope is an object with the given members, and the example of what is in it put into the format.
func (b *builder) envelope(op *operation, a *response, inner *Schema, format string, members Map[*Schema]) *Media {
	m := &Media{Schema: &Schema{Type: "object", Properties: members}, Example: b.example(op, &a.Example, inner)}
	for _, member := range members {
		m.Schema.Required = append(m.Schema.Required, member.Name)
	}
	if m.Example != nil && a.Example.IsZero() {
		m.Example = fmt.Appendf(nil, format, m.Example)
	}
	return m
}

func listOf(s *Schema) *Schema { return &Schema{Type: "array", Items: s} }

// headers are those that every answer of the route has, and the named ones.
func (b *builder) headers(op *operation, rt Route, names ...string) Map[*Header] {
	if rt.Pattern != "" {
		names = append(names, "X-Request-Id")
	}
	if rt.Bucket != "" {
		names = append(names, "RateLimit-Policy", "RateLimit")
	}
	var all Map[*Header]
	for _, name := range names {
		if b.common.Headers[name] == nil {
			b.faultf(op, "the header %s is not one of %s", name, commonFile)
		}
		all.add(name, &Header{Ref: headerRef + name})
	}
	return all
}

// problems adds the answers that are problems: those of the guards, those that follow from the parameters, and those
// that the operation names.
func (b *builder) problems(rt Route, op *operation, out *Operation) {
	found := slices.Clone(rt.Problems)
	codes := slices.Clone(op.Problems)
	for _, p := range out.Parameters {
		switch {
		case p.In == "query" && p.Name == "cursor":
			codes = append(codes, "invalid_cursor")
		case p.In == "query" && p.Name == "watermark":
			codes = append(codes, "invalid_watermark")
		case p.In == "path":
			codes = append(codes, "not_found")
			if p.Schema.Format == "uuid" {
				codes = append(codes, "malformed_id")
			}
		}
		if p.In == "query" {
			codes = append(codes, "invalid_parameter")
		}
	}
	if op.Versioned && rt.Method != http.MethodGet {
		codes = append(codes, "precondition_failed", "invalid_parameter") // the tag; an If-Match without one
	}
	if op.Idempotent {
		codes = append(codes, "invalid_idempotency_key", "idempotency_key_reused", "request_in_progress")
	}
	for _, c := range codes {
		c, status, otherwise := strings.Cut(c, "@")
		p, ok := b.Catalogue[c]
		if !ok {
			b.faultf(op, "there is no problem %q", c)
			continue
		}
		if otherwise {
			var err error
			if p.Status, err = strconv.Atoi(status); err != nil {
				b.faultf(op, "the problem %s has the status %q", c, status)
			}
		}
		found = append(found, p)
	}
	slices.SortFunc(found, func(a, b Problem) int { return cmp.Or(cmp.Compare(a.Status, b.Status), cmp.Compare(a.Code, b.Code)) })
	found = slices.CompactFunc(found, func(a, b Problem) bool { return a == b })
	for len(found) > 0 {
		n := 1
		for n < len(found) && found[n].Status == found[0].Status {
			n++
		}
		b.problemAnswer(rt, op, out, found[:n])
		found = found[n:]
	}
	slices.SortFunc(out.Responses, func(a, b Member[*Response]) int { return cmp.Compare(a.Name, b.Name) })
}

// problemAnswer adds the answer of one status.
func (b *builder) problemAnswer(rt Route, op *operation, out *Operation, kinds []Problem) {
	status := strconv.Itoa(kinds[0].Status)
	var names []string
	switch kinds[0].Status {
	case http.StatusUnauthorized:
		names = append(names, "WWW-Authenticate")
	case http.StatusTooManyRequests, http.StatusServiceUnavailable:
		names = append(names, "Retry-After")
	}
	a := &Response{Headers: b.headers(op, rt, names...)}
	var words []string
	for _, k := range kinds {
		words = append(words, k.Title+" (`"+k.Code+"`)")
		a.Problems = append(a.Problems, k.Code)
	}
	a.Description = strings.Join(words, "; ") + "."
	media := Member[*Media]{"application/problem+json", &Media{Schema: &Schema{Ref: schemaRef + "Problem"}}}
	if by, ok := out.Responses.Get(status); ok { // written by hand with another body
		by.Problems = a.Problems
		by.Description += " " + a.Description
		by.Content = append(by.Content, media)
		return
	}
	a.Content = Map[*Media]{media}
	out.Responses.add(status, a)
}

func (b *builder) components() {
	c := &b.doc.Components
	for _, name := range slices.Sorted(maps.Keys(b.schemas)) {
		c.Schemas.add(name, b.schemas[name])
	}
	for _, name := range slices.Sorted(maps.Keys(b.common.Headers)) {
		h := b.common.Headers[name]
		schema := h.Schema
		schema.Description = ""
		c.Headers.add(name, &Header{Description: h.Schema.Description, Required: !h.Optional, Schema: &schema})
	}
	for _, name := range slices.Sorted(maps.Keys(b.common.Credentials)) {
		c.SecuritySchemes.add(name, b.common.Credentials[name])
	}
}

// share moves problems that several operations have alike into the components: a fifth of the size, and one type each in
// generated clients.
func (b *builder) share() {
	alike := map[string][]*Response{}
	var order []string
	for _, path := range b.doc.Paths {
		for _, method := range *path.Value {
			for _, r := range method.Value.Responses {
				if len(r.Value.Problems) == 0 || len(r.Value.Content) != 1 {
					continue
				}
				text, err := encode(r.Value)
				if err != nil {
					b.errs = append(b.errs, err)
				}
				key := r.Name + string(text)
				if alike[key] == nil {
					order = append(order, key)
				}
				alike[key] = append(alike[key], r.Value)
			}
		}
	}
	count := map[string]int{}
	for _, key := range order {
		if len(alike[key]) < 2 {
			continue
		}
		status := key[:3]
		count[status]++
		name := fmt.Sprintf("Problem%s-%d", status, count[status])
		b.doc.Components.Responses.add(name, (*wholeResponse)(alike[key][0]))
		for _, r := range alike[key] {
			r.Shared = name
		}
	}
}

var refs = regexp.MustCompile(`"\$ref":"` + schemaRef + `([^"]*)"`)

// checkRefs finds references to schemas that are not there, and schemas that nothing refers to.
func (b *builder) checkRefs() {
	text, err := encode(b.doc)
	if err != nil {
		b.errs = append(b.errs, err)
		return
	}
	used := map[string]bool{}
	for _, m := range refs.FindAllSubmatch(text, -1) {
		name := string(m[1])
		if used[name] = true; b.schemas[name] == nil {
			b.errs = append(b.errs, fmt.Errorf("openapi: there is no schema %s", name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(b.schemas)) {
		if !used[name] {
			b.gapf("nothing refers to the schema %s in internal/http/openapi: remove it", name)
		}
	}
}

// JSON writes the document.
func (d *Document) JSON() ([]byte, error) {
	text, err := encode(d)
	if err != nil {
		return nil, fmt.Errorf("openapi: %w", err)
	}
	return text, nil
}
