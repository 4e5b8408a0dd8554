package http

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"regexp"
	"strconv"
	"strings"

	"converger/internal/http/openapi"
)

// docsPage is the description as a page shows it.
type docsPage struct {
	Title, Version, Server string
	Intro                  template.HTML
	Credentials            []docsCredential
	Groups                 []docsGroup
	Webhooks               []docsOperation
	Schemas                []docsSchema
}

type docsCredential struct {
	Name, Header string
	Description  template.HTML
}

type docsGroup struct {
	ID, Name    string
	Description template.HTML
	Operations  []docsOperation
}

type docsOperation struct {
	ID, Method, Path, Summary string
	Description               template.HTML
	Deprecated                bool
	Credential, Scope         string
	OlderCredential           string
	Limit                     *openapi.RateLimit
	Parameters                *docsTable
	Body                      *docsBody
	Curl                      string
	Answers                   []docsAnswer
	Problems                  []docsProblem
}

// docsTable are fields with what a screen reader calls them.
type docsTable struct {
	Name   string
	Fields []docsField
}

// newDocsTable makes one; nil of no fields.
func newDocsTable(name string, fields []docsField) *docsTable {
	if fields == nil {
		return nil
	}
	return &docsTable{name, fields}
}

// docsField is a parameter, or a member of a body.
type docsField struct {
	Name, Where string // Where: of a parameter
	Optional    bool
	Type        template.HTML
	Description template.HTML
}

type docsBody struct {
	Media       string
	Description template.HTML
	Schema      template.HTML // of what it is, where it is not an object of its own
	Fields      *docsTable
	Example     string // JSON; "" for none
}

type docsAnswer struct {
	Status      string
	Description template.HTML
	Headers     []string
	Body        *docsBody
}

// docsProblem are the codes of a status.
type docsProblem struct {
	Status string
	Codes  []string
}

type docsSchema struct {
	Name        string
	Description template.HTML
	Type        template.HTML // of one that is no object
	Fields      *docsTable
	Example     string
}

func newDocsPage(doc *openapi.Document) docsPage {
	p := docsPage{Title: doc.Info.Title, Version: doc.Info.Version, Server: doc.Servers[0].URL, Intro: markdown(doc.Info.Description)}
	for _, c := range doc.Components.SecuritySchemes {
		p.Credentials = append(p.Credentials, docsCredential{c.Name, c.Value.Curl, markdown(c.Value.Description)})
	}
	for i, tag := range doc.Tags {
		g := docsGroup{ID: "group-" + strconv.Itoa(i+1), Name: tag.Name, Description: markdown(tag.Description)}
		for _, path := range doc.Paths {
			for _, method := range *path.Value {
				if op := method.Value; op.Tags[0] == tag.Name {
					g.Operations = append(g.Operations, docsOperationOf(doc, strings.ToUpper(method.Name), path.Name, op))
				}
			}
		}
		p.Groups = append(p.Groups, g)
	}
	for _, hook := range doc.Webhooks {
		for _, method := range *hook.Value {
			p.Webhooks = append(p.Webhooks, docsOperationOf(doc, strings.ToUpper(method.Name), hook.Name, method.Value))
		}
	}
	for _, s := range doc.Components.Schemas {
		out := docsSchema{Name: s.Name, Description: markdown(s.Value.Description), Fields: newDocsTable("Members of "+s.Name, fieldsOf("", s.Value))}
		if out.Fields == nil {
			out.Type = typeOf(s.Value)
		}
		if example := s.Value.Example(); example != nil {
			out.Example = pretty(example)
		}
		p.Schemas = append(p.Schemas, out)
	}
	return p
}

func docsOperationOf(doc *openapi.Document, method, path string, op *openapi.Operation) docsOperation {
	out := docsOperation{
		ID: op.ID, Method: method, Path: path, Summary: op.Summary, Description: markdown(op.Description), Deprecated: op.Deprecated,
		Credential: op.Route.Credential, OlderCredential: op.Route.OlderCredential, Scope: op.Route.Scope, Limit: op.RateLimit,
	}
	var parameters []docsField
	for _, p := range op.Parameters {
		parameters = append(parameters, docsField{p.Name, p.In, !p.Required, typeOf(p.Schema), inline(p.Description)})
	}
	out.Parameters = newDocsTable("Parameters of "+method+" "+path, parameters)
	if b := op.RequestBody; b != nil {
		out.Body = docsBodyOf(b.Content[0])
		out.Body.Description = markdown(b.Description)
		// What one has to send stands with the operation; what comes back is a link away.
		if s, ok := doc.Components.Schemas.Get(b.Content[0].Value.Schema.RefName()); ok {
			out.Body.Fields = newDocsTable("Body of "+method+" "+path, fieldsOf("", s))
		}
	}
	for _, r := range op.Responses {
		if r.Value.Problems != nil {
			out.Problems = append(out.Problems, docsProblem{r.Name, r.Value.Problems})
		}
		if len(r.Value.Content) > 0 && r.Value.Content[0].Name == typeProblem {
			continue
		}
		a := docsAnswer{Status: r.Name, Description: inline(r.Value.Description)}
		for _, h := range r.Value.Headers {
			a.Headers = append(a.Headers, h.Name)
		}
		if len(r.Value.Content) > 0 {
			a.Body = docsBodyOf(r.Value.Content[0])
		}
		out.Answers = append(out.Answers, a)
	}
	if op.Route.Pattern != "" {
		out.Curl = curl(doc, op)
	}
	return out
}

func docsBodyOf(m openapi.Member[*openapi.Media]) *docsBody {
	b := &docsBody{Media: m.Name, Schema: typeOf(m.Value.Schema)}
	// The members of an envelope need no table.
	for i, member := range m.Value.Schema.Properties {
		if i == 0 {
			b.Schema = ""
		} else {
			b.Schema += ", "
		}
		b.Schema += template.HTML("<code>"+template.HTMLEscapeString(member.Name)+"</code>: ") + typeOf(member.Value) //nolint:gosec // escaped
	}
	if m.Value.Example != nil && strings.HasSuffix(m.Name, "json") {
		b.Example = pretty(m.Value.Example)
	}
	return b
}

// fieldsOf lists the members of an object, and those of objects without a name in it behind theirs: "user.id",
// "attachments[].id".
func fieldsOf(prefix string, s *openapi.Schema) []docsField {
	var list []docsField
	for _, part := range s.AllOf {
		if name := part.RefName(); name != "" {
			list = append(list, docsField{Name: "…", Type: schemaLink(name), Description: "All of its members."})
		}
		list = append(list, fieldsOf(prefix, part)...)
	}
	for _, m := range s.Properties {
		name := prefix + m.Name
		required := false
		for _, r := range s.Required {
			required = required || r == m.Name
		}
		list = append(list, docsField{name, "", !required, typeOf(m.Value), inline(m.Value.Description)})
		list = append(list, fieldsOf(name+".", m.Value)...)
		if m.Value.Items != nil {
			list = append(list, fieldsOf(name+"[].", m.Value.Items)...)
		}
	}
	return list
}

func schemaLink(name string) template.HTML {
	return template.HTML(`<a href="#schema-` + name + `">` + name + `</a>`) //nolint:gosec // a name that package openapi has checked
}

// typeOf says in words what values a schema takes, names linked.
func typeOf(s *openapi.Schema) template.HTML {
	var b strings.Builder
	text := func(format string, args ...any) {
		b.WriteString(template.HTMLEscapeString(fmt.Sprintf(format, args...)))
	}
	alternatives := s.AnyOf
	if alternatives == nil {
		alternatives = s.OneOf
	}
	types, _ := s.Type.([]string)
	if t, ok := s.Type.(string); ok {
		types = []string{t}
	}
	switch {
	case s.Ref != "":
		b.WriteString(string(schemaLink(s.RefName())))
	case alternatives != nil:
		for i, a := range alternatives {
			if i > 0 {
				text(" or ")
			}
			b.WriteString(string(typeOf(a)))
		}
	case s.AllOf != nil:
		text("object")
	case len(types) == 0:
		text("any")
	}
	for i, t := range types {
		if i > 0 {
			text(" or ")
		}
		switch {
		case t == "array" && s.Items != nil:
			text("array of ")
			b.WriteString(string(typeOf(s.Items)))
		case t == "string" && s.Format != "":
			text("%s", map[string]string{"uuid": "UUID", "date-time": "time", "date": "day", "uri-reference": "URI"}[s.Format])
		case t == "string" && s.ContentMediaType == "application/octet-stream":
			text("bytes")
		case t == "string" && s.ContentEncoding != "":
			text("%s", s.ContentEncoding)
		default:
			text("%s", t)
		}
	}
	if rule, ok := s.AdditionalProperties.(*openapi.Schema); ok {
		text(" of ")
		b.WriteString(string(typeOf(rule)))
	}
	text("%s", bounds(s))
	if s.Enum != nil {
		text(": ")
		for i, v := range s.Enum {
			if i > 0 {
				text(", ")
			}
			b.WriteString("<code>" + template.HTMLEscapeString(fmt.Sprint(cmp.Or(v, any("null")))) + "</code>")
		}
	}
	if s.Const != nil {
		b.WriteString(" <code>" + template.HTMLEscapeString(fmt.Sprint(s.Const)) + "</code>")
	}
	return template.HTML(b.String()) //nolint:gosec // escaped above
}

// bounds says which numbers, lengths or counts a schema takes.
func bounds(s *openapi.Schema) string {
	between := func(low, high *int64, what string) string {
		switch {
		case low != nil && high != nil:
			return fmt.Sprintf(", %d to %d%s", *low, *high, what)
		case low != nil && (*low > 0 || what == ""):
			return fmt.Sprintf(", %d or more%s", *low, what)
		case high != nil:
			return fmt.Sprintf(", up to %d%s", *high, what)
		}
		return ""
	}
	out := between(s.Minimum, s.Maximum, "") + between(s.MinLength, s.MaxLength, " characters") + between(s.MinItems, s.MaxItems, " of them")
	if s.Default != nil {
		out += fmt.Sprintf(", default %v", s.Default)
	}
	return out
}

func pretty(text json.RawMessage) string {
	var b bytes.Buffer
	if err := json.Indent(&b, text, "", "  "); err != nil {
		return string(text)
	}
	return b.String()
}

// folded is JSON in one line where that is short.
func folded(text json.RawMessage) string {
	if len(text) <= 72 {
		return string(text)
	}
	return pretty(text)
}

var pathParameter = regexp.MustCompile(`\{([a-z_]+)\}`)

// curl is a call of the operation as one would type it. What depends on the caller are variables of the shell.
func curl(doc *openapi.Document, op *openapi.Operation) string {
	lines := []string{"curl -sS"}
	if op.Route.Method != http.MethodGet && (op.RequestBody == nil || op.Route.Method != http.MethodPost) {
		lines[0] += " -X " + op.Route.Method
	}
	path := pathParameter.ReplaceAllStringFunc(op.Route.Pattern, func(p string) string { return "$" + strings.ToUpper(strings.Trim(p, "{}")) })
	lines[0] += ` "` + doc.Servers[0].URL + path + `"`
	if c, ok := doc.Components.SecuritySchemes.Get(op.Route.Credential); ok {
		lines = append(lines, `-H "`+c.Curl+`"`)
	}
	for _, p := range op.Parameters {
		if p.Name == "Idempotency-Key" {
			lines = append(lines, `-H "idempotency-key: order-4711"`)
		}
	}
	if b := op.RequestBody; b != nil {
		media := b.Content[0]
		switch {
		case media.Name == "multipart/form-data":
			lines = append(lines, `-F "file=@$FILE"`)
		case media.Value.Example != nil:
			lines = append(lines, `-H "content-type: `+media.Name+`"`, "-d '"+strings.ReplaceAll(folded(media.Value.Example), "'", `'\''`)+"'")
		}
	}
	return strings.Join(lines, " \\\n  ")
}

var (
	mdCode = regexp.MustCompile("`([^`]+)`")
	mdLink = regexp.MustCompile(`\[([^\]]+)\]\(((?:https://|/|#)[^)\s]*)\)`)
	mdBold = regexp.MustCompile(`\*\*([^*]+)\*\*`)
	mdEm   = regexp.MustCompile(`\*([^*]+)\*`)
)

// inline renders the Markdown of a line: `code`, links, emphasis. Everything else is text.
func inline(text string) template.HTML {
	text = template.HTMLEscapeString(strings.TrimSpace(text))
	text = mdBold.ReplaceAllString(text, "<strong>$1</strong>")
	text = mdEm.ReplaceAllString(text, "<em>$1</em>")
	text = mdCode.ReplaceAllString(text, "<code>$1</code>")
	return template.HTML(mdLink.ReplaceAllString(text, `<a href="$2">$1</a>`)) //nolint:gosec // escaped above
}

// markdown renders paragraphs, and lists of lines that begin with "- ".
func markdown(text string) template.HTML {
	var b strings.Builder
	for block := range strings.SplitSeq(strings.TrimSpace(text), "\n\n") {
		if block == "" {
			continue
		}
		if rest, ok := strings.CutPrefix(block, "- "); ok {
			b.WriteString("<ul>")
			for item := range strings.SplitSeq(rest, "\n- ") {
				b.WriteString("<li>" + string(inline(item)) + "</li>")
			}
			b.WriteString("</ul>")
			continue
		}
		b.WriteString("<p>" + string(inline(block)) + "</p>")
	}
	return template.HTML(b.String()) //nolint:gosec // made of escaped parts
}
