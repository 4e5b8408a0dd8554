package http

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-chi/chi/v5"
	"github.com/google/uuid"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/fault"
	"converger/internal/http/openapi"
	"converger/internal/inbound"
	"converger/internal/tenants"
)

// Each route is described and each description is of a route. The message says what to write where.
func TestEveryRouteIsDescribed(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	for _, gap := range f.description.doc.Gaps {
		t.Error(gap)
	}
}

// The document is what OpenAPI 3.1 calls one, by the specification's own schema, and its schemas are JSON Schema 2020-12.
func TestOpenAPIDocument(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.Version = "1.2.3" })
	a := f.call(t, "GET", "/openapi.json", "", header("Origin", "https://any.example"))
	a.is(t, 200, "")
	if a.Header.Get("Access-Control-Allow-Origin") != "*" || a.Header.Get("Content-Type") != typeJSON {
		t.Errorf("headers: %v", a.Header)
	}
	if a.get(t, "info", "version") != "1.2.3" || a.get(t, "servers").([]any)[0].(map[string]any)["url"] != "https://hub.example" {
		t.Errorf("info %v, servers %v", a.get(t, "info"), a.get(t, "servers"))
	}
	etag := a.Header.Get("Etag")
	for value, status := range map[string]int{etag: 304, "W/" + etag: 304, `"x", ` + etag: 304, "*": 304, `"x"`: 200, "": 200} {
		if b := f.call(t, "GET", "/openapi.json", "", header("If-None-Match", value)); b.StatusCode != status || b.Header.Get("Etag") != etag {
			t.Errorf("If-None-Match %s: %d, ETag %s", value, b.StatusCode, b.Header.Get("Etag"))
		}
	}

	c := jsonschema.NewCompiler()
	// From https://spec.openapis.org/oas/3.1/schema/2022-10-07, which leaves schemas to their own.
	text := must(os.ReadFile("testdata/openapi-3.1-schema.json"))
	const specification = "https://spec.openapis.org/oas/3.1/schema/2022-10-07"
	if err := c.AddResource(specification, must(jsonschema.UnmarshalJSON(bytes.NewReader(text)))); err != nil {
		t.Fatal(err)
	}
	document := must(jsonschema.UnmarshalJSON(bytes.NewReader(a.body)))
	if err := must(c.Compile(specification)).Validate(document); err != nil {
		t.Error(err)
	}
	dialect := must(c.Compile("https://json-schema.org/draft/2020-12/schema"))
	for name, s := range document.(map[string]any)["components"].(map[string]any)["schemas"].(map[string]any) {
		if err := dialect.Validate(s); err != nil {
			t.Errorf("schema %s: %v", name, err)
		}
	}
}

// Each example is valid by its schema.
func TestExamplesAreValid(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	for _, path := range f.description.doc.Paths {
		for _, method := range *path.Value {
			op := method.Value
			base := "#/paths/" + pointer(path.Name) + "/" + method.Name
			if op.RequestBody != nil {
				f.described.examples(t, op.ID+"'s body", base+"/requestBody/content/", op.RequestBody.Content)
			}
			for _, r := range op.Responses {
				f.described.examples(t, op.ID+"'s "+r.Name, base+"/responses/"+r.Name+"/content/", r.Value.Content)
			}
			for i, p := range op.Parameters {
				if p.Example != nil {
					f.described.valid(t, op.ID+"'s parameter "+p.Name, fmt.Sprintf("%s/parameters/%d/schema", base, i), p.Example)
				}
			}
		}
	}
	for _, s := range f.description.doc.Components.Schemas {
		var examples []json.RawMessage
		if s.Value.Examples != nil {
			if err := json.Unmarshal(s.Value.Examples, &examples); err != nil {
				t.Fatal(err)
			}
		}
		for _, e := range examples {
			f.described.valid(t, "schema "+s.Name, "#/components/schemas/"+s.Name, e)
		}
	}
}

func (d *described) examples(t *testing.T, what, base string, content openapi.Map[*openapi.Media]) {
	t.Helper()
	for _, m := range content {
		if m.Value.Example != nil {
			d.valid(t, what, base+pointer(m.Name)+"/schema", m.Value.Example)
		}
	}
}

func (d *described) valid(t *testing.T, what, schema string, example []byte) {
	t.Helper()
	if err := d.closed.validate(schema, example); err != nil {
		t.Errorf("the example of %s: %v", what, err)
	}
}

// Each described operation is called as its example says, with ids of things that exist in place of the example's, and
// succeeds.
func TestExamplesWork(t *testing.T) {
	t.Parallel()
	f := newFront(t, func(d *Deps) { d.MetricsToken = "the metrics token" })
	for _, bucket := range []string{"api_read", "token_generate", "activity_create", "upload"} {
		limitOverride(t, f, `{"limit":1000000,"scale_ms":1000}`, bucket)
	}
	doc := f.description.doc
	for _, path := range doc.Paths {
		for _, method := range *path.Value {
			op := method.Value
			s := f.newSample(t)
			body, options := "", []option{header("Content-Type", "application/json")}
			if b := op.RequestBody; b != nil {
				switch {
				case b.Content[0].Name == "multipart/form-data":
					var o option
					body, o = form(t, formPart{"activity", "", `{"text":"The picture"}`}, formPart{"file", "a.png", testPNG})
					options = append(options, o)
				case b.Content[0].Value.Example == nil:
					t.Errorf("%s: write an example of its body into internal/http/openapi/%s", op.ID, op.File)
					continue
				default:
					body = s.ids.Replace(string(b.Content[0].Value.Example))
				}
			}
			address, query := path.Name, url.Values{}
			for _, p := range op.Parameters {
				if !p.Required {
					continue
				}
				var example string
				if err := json.Unmarshal(p.Example, &example); err != nil {
					t.Fatalf("%s: the %s parameter %s needs an example", op.ID, p.In, p.Name)
				}
				if p.In == "query" {
					query.Set(p.Name, example)
				}
				address = strings.ReplaceAll(address, "{"+p.Name+"}", example)
			}
			if len(query) > 0 {
				address += "?" + query.Encode()
			}
			address = s.ids.Replace(s.own.Replace(address))
			if strings.Contains(path.Name, "/{secret}") {
				address = strings.Replace(s.callback, "/inbound/", "/"+strings.Split(path.Name, "/")[5]+"/", 1)
			}
			options = append(options, f.credentialFor(t, s, op.Route.Credential, body))
			if a := f.call(t, op.Route.Method, address, body, options...); a.StatusCode > 299 {
				t.Errorf("%s %s with %s: %s", op.Route.Method, address, body, a)
			}
		}
	}
}

// credentialFor is the credential that an operation asks for.
func (f *front) credentialFor(t *testing.T, s *sample, scheme, body string) option {
	t.Helper()
	switch scheme {
	case "":
		return func(*http.Request) {}
	case "metrics":
		return bearer("the metrics token")
	case "api_key":
		return f.apiKey()
	case "operator_token":
		return f.ops()
	case "channel_secret":
		return bearer(s.channel.Secret.Reveal())
	case "channel_token":
		return header("X-Channel-Token", s.channel.Secret.Reveal())
	case "client_token":
		return bearer(f.newToken(t, auth.Claims{ChannelID: s.channel.ID, UserID: "ada"}))
	case "signature":
		return signed(s.channel.Secret, body, time.Now())
	}
	t.Fatalf("give credentialFor a credential of the kind %s", scheme)
	return nil
}

// sample is one of each thing that an example may name.
type sample struct {
	channel  channel.Channel
	callback string            // path of a channel that keeps a secret address
	ids      *strings.Replacer // of the examples' ids
	own      *strings.Replacer // of those in addresses where the sample's tenant, or the installation, has other things
}

func (f *front) newSample(t *testing.T) *sample {
	t.Helper()
	ctx := t.Context()
	s := &sample{}
	suffix := uuid.NewString()
	s.channel = f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "sample " + suffix, Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	target := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "target " + suffix, Type: channel.TypeEcho})
	secretive := f.newChannel(t, f.tenant.ID, channel.NewChannel{Name: "infobip " + suffix, Type: channel.TypeWhatsAppInfobip, Config: raw(`{"sender":"447860099299"}`)})
	rule := must(f.Rules.Create(ctx, testActor, f.tenant.ID, delivery.NewRoutingRule{Name: "rule " + suffix, SourceChannelID: f.whatsapp.ID, TargetChannelIDs: []uuid.UUID{f.webhook.ID}}))
	tenant := must(f.Tenants.Create(ctx, testActor, tenants.NewTenant{Name: "Sample " + suffix}))
	key, _, err := f.Tenants.CreateKey(ctx, testActor, tenant.ID, tenants.NewKey{Name: "k"})
	if err != nil {
		t.Fatal(err)
	}
	f.refresh(t)
	callback, _ := f.callbackURL(&secretive)
	s.callback = strings.TrimPrefix(callback, f.PublicURL)

	token := bearer(f.newToken(t, auth.Claims{ChannelID: s.channel.ID, UserID: "ada"}))
	conversation := f.call(t, "POST", clientPrefix+"/conversations", "", token).get(t, "conversationId").(string)
	body, multipart := form(t, formPart{"file", "a.png", testPNG})
	up := f.call(t, "POST", clientPrefix+"/conversations/"+conversation+"/upload", body, multipart, token)
	up.is(t, 200, "")
	f.call(t, "POST", "/api/v1/conversations/"+conversation+"/activities", `{"text":"hi"}`, f.apiKey()).is(t, 201, "")
	deliveries, _, err := f.Deliveries.List(ctx, f.tenant.ID, delivery.Filter{ChannelID: &s.channel.ID}, uuid.Nil, 1)
	if err != nil || len(deliveries) != 1 {
		t.Fatalf("%d deliveries (%v), want 1", len(deliveries), err)
	}
	if _, err := f.pool.Exec(ctx, `UPDATE deliveries SET status = 'failed' WHERE id = $1`, deliveries[0].ID); err != nil { // so that it can be retried
		t.Fatal(err)
	}
	// An event of the sample's own tenant that was rejected, so that it can be worked again.
	other := f.newChannel(t, tenant.ID, channel.NewChannel{Name: "c", Type: channel.TypeWebhook, Config: raw(`{"url":"http://127.0.0.1:9/"}`)})
	f.refresh(t)
	hook := `{"text":7}`
	f.call(t, "POST", "/api/v1/channels/"+other.ID.String()+"/inbound", hook, signed(other.Secret, hook, time.Now())).is(t, 422, codeValidationFailed)
	events, _, err := f.Inbound.ListAllTenants(ctx, inbound.Filter{TenantID: &tenant.ID}, uuid.Nil, 1)
	if err != nil || len(events) != 1 {
		t.Fatalf("%d events (%v), want 1", len(events), err)
	}
	const example = "01939d2c-0000-7000-8000-0000000000"
	realm := auth.TenantRealm(tenant.ID)
	user := must(f.Users.Create(ctx, testActor, realm, auth.NewUser{Email: suffix + "@example.com", Role: auth.RoleOwner}))
	admin := must(f.Users.Create(ctx, testActor, auth.Admins, auth.NewUser{Email: suffix + "@example.com", Role: auth.RoleViewer}))
	adminSession := f.newSession(t, auth.Admins, admin.ID.String())
	s.own = strings.NewReplacer(
		"/admin_users/"+example+"a1/sessions/"+example+"a2", "/admin_users/"+admin.ID.String()+"/sessions/"+adminSession.String(),
		"/admin_users/"+example+"a1", "/admin_users/"+admin.ID.String(),
		"/tenants/"+example+"e0/conversations", "/tenants/"+f.tenant.ID.String()+"/conversations",
		"/tenants/"+example+"e0/deliveries", "/tenants/"+f.tenant.ID.String()+"/deliveries",
		"/tenants/"+example+"e0/routing_rules", "/tenants/"+f.tenant.ID.String()+"/routing_rules",
	)
	third := strings.ReplaceAll(suffix[:9], "-", "")
	r := must(f.Tenants.CreateAddressRange(ctx, testActor, tenants.NewAddressRange{Prefix: must(tenants.ParseRange("", "2001:db8:"+third[:4]+":"+third[4:8]+"::1")), Kind: tenants.RangeDeny}, tenants.Caller{}))
	token2, _, err := f.Tenants.CreateOperatorToken(ctx, testActor, tenants.NewOperatorToken{Name: "sample"})
	if err != nil {
		t.Fatal(err)
	}
	s.ids = strings.NewReplacer(
		example+"a1", user.ID.String(), example+"a2", f.newSession(t, realm, user.ID.String()).String(), example+"a3", r.ID.String(), example+"a4", token2.ID.String(),
		example+"c0", conversation, example+"c1", s.channel.ID.String(), example+"c2", target.ID.String(), example+"d0", deliveries[0].ID.String(),
		example+"f0", rule.ID.String(), example+"a7", up.get(t, "attachments").([]any)[0].(map[string]any)["id"].(string),
		example+"e0", tenant.ID.String(), example+"b0", key.ID.String(), example+"e1", events[0].ID.String(),
	)
	return s
}

// described holds answers against the description.
type described struct {
	t            *testing.T
	doc          *openapi.Document
	routes       chi.Routes
	open, closed *schemas // of what is sent, which may have more members than are named, and of answers

	mu       sync.Mutex
	reported map[string]bool
}

// report fails the test, once for each fault of a kind.
func (d *described) report(err error) {
	kind, _, _ := strings.Cut(err.Error(), "\n")
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.reported[kind] {
		d.reported[kind] = true
		d.t.Error(err)
	}
}

// schemas are the compiled schemas of one document.
type schemas struct {
	mu       sync.Mutex
	compiler *jsonschema.Compiler
	compiled map[string]*jsonschema.Schema
}

const documentURL = "https://hub.example/openapi.json"

func newSchemas(document any) *schemas {
	c := jsonschema.NewCompiler()
	c.AssertFormat()
	if err := c.AddResource(documentURL, document); err != nil {
		panic(err)
	}
	return &schemas{compiler: c, compiled: map[string]*jsonschema.Schema{}}
}

// Compiling takes a while, and the document says the same on every front of a test run, but for its address and version.
var compiled struct {
	sync.Once
	open, closed *schemas
}

func newDescribed(t *testing.T, s *server) *described {
	compiled.Do(func() {
		document := func() any { return must(jsonschema.UnmarshalJSON(bytes.NewReader(s.description.text))) }
		closed := document()
		closeObjects(closed)
		compiled.open, compiled.closed = newSchemas(document()), newSchemas(closed)
	})
	return &described{t: t, doc: s.description.doc, routes: s.mux.(chi.Routes), open: compiled.open, closed: compiled.closed, reported: map[string]bool{}}
}

// closeObjects lets objects that name their properties have no others. The document itself leaves them open: callers must
// be ready for new members, but here one that nobody described is a fault. What is put together from several schemas
// stays open.
func closeObjects(v any) {
	switch v := v.(type) {
	case map[string]any:
		if _, open := v["additionalProperties"]; v["properties"] != nil && v["type"] != nil && !open {
			v["additionalProperties"] = false
		}
		for name, inner := range v {
			if name != "allOf" && name != "examples" && name != "example" {
				closeObjects(inner)
			}
		}
	case []any:
		for _, inner := range v {
			closeObjects(inner)
		}
	}
}

func pointer(name string) string {
	return strings.NewReplacer("~", "~0", "/", "~1", "{", "%7B", "}", "%7D").Replace(name)
}

// validate checks JSON by the schema at a place of the document.
func (s *schemas) validate(at string, body []byte) error {
	schema, err := s.at(at)
	if err != nil {
		return err
	}
	value, err := jsonschema.UnmarshalJSON(bytes.NewReader(body))
	if err != nil {
		return fmt.Errorf("it is not JSON: %w", err)
	}
	return schema.Validate(value)
}

func (s *schemas) at(place string) (*jsonschema.Schema, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if schema := s.compiled[place]; schema != nil {
		return schema, nil
	}
	schema, err := s.compiler.Compile(documentURL + place)
	if err == nil {
		s.compiled[place] = schema
	}
	return schema, err
}

// ServeHTTP answers as the server does, and holds the answer against the description: each test of the front is one of
// the description, too.
func (f *front) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if f.described == nil {
		f.server.ServeHTTP(w, r)
		return
	}
	rec := &recording{ResponseWriter: w}
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &copied{r.Body, &rec.request}
	}
	f.server.ServeHTTP(rec, r)
	if rec.status != 0 && r.Method != http.MethodOptions {
		if err := f.described.check(r, rec); err != nil {
			f.described.report(err)
		}
	}
}

// recording keeps a copy of an answer, and of the body that it is the answer to.
type recording struct {
	http.ResponseWriter
	status        int
	request, body bytes.Buffer
}

// copied keeps what is read of a body.
type copied struct {
	io.ReadCloser
	into *bytes.Buffer
}

func (c *copied) Read(b []byte) (int, error) {
	n, err := c.ReadCloser.Read(b)
	c.into.Write(b[:n])
	return n, err
}

func (r *recording) Unwrap() http.ResponseWriter { return r.ResponseWriter }

func (r *recording) WriteHeader(status int) {
	if r.status == 0 {
		r.status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

func (r *recording) Write(b []byte) (int, error) {
	if r.status == 0 {
		r.status = http.StatusOK
	}
	r.body.Write(b)
	return r.ResponseWriter.Write(b)
}

// check says in what an answer is not as described.
func (d *described) check(r *http.Request, a *recording) error {
	method := r.Method
	if method == http.MethodHead {
		method = http.MethodGet
	}
	path := r.URL.RawPath
	if path == "" {
		path = r.URL.Path
	}
	pattern := d.routes.Find(chi.NewRouteContext(), method, path)
	var op *openapi.Operation
	if item, ok := d.doc.Paths.Get(pattern); ok {
		op, _ = item.Get(strings.ToLower(method))
	}
	if op == nil {
		closed := a.status == http.StatusForbidden && (areaOf(path) == areaAdmin || bytes.Contains(a.body.Bytes(), []byte(codeAddressDenied)))
		if pattern == "" && a.status != http.StatusNotFound && a.status != http.StatusMethodNotAllowed && !closed {
			return fmt.Errorf("%s %s, which no route has: %d", method, path, a.status)
		}
		return nil // a route without a description is another test's matter
	}
	faultf := func(format string, args ...any) error {
		return fmt.Errorf("%s %s answered %d: %s\n(internal/http/openapi/%s, operation %s)\n%.2000s", method, pattern, a.status, fmt.Sprintf(format, args...), op.File, op.ID, a.body.Bytes())
	}
	status := fmt.Sprint(a.status)
	response, ok := op.Responses.Get(status)
	if !ok {
		return faultf("the status is not described: name it in `answers`, or the problem's code in `problems`")
	}
	for _, h := range response.Headers {
		name := strings.TrimPrefix(h.Value.Ref, "#/components/headers/")
		if defined, _ := d.doc.Components.Headers.Get(name); defined.Required && a.Header().Get(name) == "" {
			return faultf("the header %s is described and missing", name)
		}
	}
	if a.Header().Get("RateLimit") != "" && op.RateLimit == nil && a.status != http.StatusTooManyRequests {
		return faultf("it spends a limit that is not described")
	}
	// What was taken is what may be sent. (Providers' bodies are stored whatever they are.)
	if b := op.RequestBody; b != nil && a.status < 300 && b.Content[0].Name == "application/json" && json.Valid(a.request.Bytes()) {
		at := "#/paths/" + pointer(pattern) + "/" + strings.ToLower(method) + "/requestBody/content/application~1json/schema"
		if err := d.open.validate(at, a.request.Bytes()); err != nil {
			return faultf("it took a body that is not as described: %v\n%.500s", err, a.request.Bytes())
		}
	}
	kind := a.Header().Get("Content-Type")
	if kind == "" && len(response.Content) == 0 || r.Method == http.MethodHead {
		return nil
	}
	media, _, err := mime.ParseMediaType(kind)
	if err != nil {
		return faultf("its type %q: %v", kind, err)
	}
	if a.status >= 400 && media == "text/html" && areaOf(path) == areaPublic && acceptsHTML(r.Header) {
		return nil // the page of a problem, for somebody who asked for one
	}
	name := media
	if _, ok := response.Content.Get(name); !ok {
		name = "*/*"
		if _, ok := response.Content.Get(name); !ok {
			return faultf("the type %q is not described", media)
		}
	}
	if !strings.HasSuffix(media, "json") || name == "*/*" {
		return nil
	}
	at := "#/paths/" + pointer(pattern) + "/" + strings.ToLower(method) + "/responses/" + status
	if response.Shared != "" {
		at = "#/components/responses/" + response.Shared
	}
	if err := d.closed.validate(at+"/content/"+pointer(name)+"/schema", a.body.Bytes()); err != nil {
		return faultf("the body is not as described; new members belong into the schema's properties, with ? behind their names if they may be absent: %v", err)
	}
	if isProblem(a) {
		var p struct {
			Code   string
			Errors []struct{ Pointer, Detail string }
		}
		if err := json.Unmarshal(a.body.Bytes(), &p); err != nil || !slices.Contains(response.Problems, p.Code) {
			return faultf("the code %s is not described with this status: add it to `problems`", p.Code)
		}
		for _, e := range p.Errors { // whoever shows it puts the name in front
			if name := e.Pointer[strings.LastIndex(e.Pointer, "/")+1:]; strings.HasPrefix(e.Detail, name+" ") || strings.HasPrefix(e.Detail, "element ") {
				return faultf("the detail of %s says again what the pointer says: %q", e.Pointer, e.Detail)
			}
		}
	}
	return nil
}

func isProblem(a *recording) bool { return a.Header().Get("Content-Type") == typeProblem }

// The check itself can fail: it refuses an answer for each thing that it looks at.
func TestUndescribedAnswersAreFound(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	const list, posted = "/api/v1/routing_rules", "POST /api/v1/routing_rules"
	problem := func(code code) string {
		return string(newProblem(code, "x").reply("https://hub.example", "req_x").body)
	}
	invalid := func(pointer, detail string) string {
		return string(invalidProblem(fault.Invalidf(pointer, fault.Malformed, "%s", detail)).reply("https://hub.example", "req_x").body)
	}
	const rule = `{"data":[{"id":"01939d2c-0000-7000-8000-0000000000f0","name":"r","source_channel_id":"01939d2c-0000-7000-8000-0000000000c1","target_channel_ids":[],
		"enabled":true,"tenant_id":"01939d2c-0000-7000-8000-0000000000e0","inserted_at":"2026-11-30T07:42:20Z","updated_at":"2026-11-30T07:42:20Z"}]}`
	tests := map[string]struct {
		path, kind string
		status     int
		body, want string // want: "" for an answer as described
	}{
		"as described":            {list, typeJSON, 200, rule, ""},
		"status":                  {list, typeJSON, 203, rule, "status is not described"},
		"type":                    {list, typeText, 200, "x", "not described"},
		"no JSON":                 {list, typeJSON, 200, "{", "not JSON"},
		"new member":              {list, typeJSON, 200, strings.Replace(rule, `"name"`, `"colour":1,"name"`, 1), "colour"},
		"new member outside":      {list, typeJSON, 200, `{"data":[],"meta":{}}`, "meta"},
		"missing member":          {list, typeJSON, 200, strings.Replace(rule, `"name":"r",`, "", 1), "name"},
		"another type":            {list, typeJSON, 200, strings.Replace(rule, `"r"`, "7", 1), "/data/0/name"},
		"no UUID":                 {list, typeJSON, 200, strings.Replace(rule, "01939d2c", "x", 1), "uuid"},
		"problem":                 {list, typeProblem, 401, problem(codeMissingCredential), ""},
		"problem of another kind": {list, typeProblem, 401, problem(codeInvalidSignature), "invalid_signature"},
		"named twice":             {posted, typeProblem, 422, invalid("/a/name", "name must not be empty"), "says again"},
		"element named twice":     {posted, typeProblem, 422, invalid("/names", "element 1 must be a UUID"), "says again"},
		"named once":              {posted, typeProblem, 422, invalid("/a/name", "must not be empty"), ""},
		"page":                    {"/docs", typeHTML, 200, "x", ""},
		"no page":                 {"/docs", typeJSON, 200, "{}", "not described"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := httptest.NewRecorder()
			for header, value := range map[string]string{"Content-Type": tt.kind, "X-Request-Id": "req_x", "Www-Authenticate": "x"} {
				w.Header().Set(header, value)
			}
			a := &recording{ResponseWriter: w, status: tt.status}
			a.body.WriteString(tt.body)
			method, path, given := strings.Cut(tt.path, " ")
			if !given {
				method, path = http.MethodGet, tt.path
			}
			r := httptest.NewRequestWithContext(t.Context(), method, path, nil)
			err := f.described.check(r, a)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("%v, want %q", err, tt.want)
			}
			w.Header().Del("X-Request-Id")
			if err := f.described.check(r, a); tt.want == "" && (err == nil || !strings.Contains(err.Error(), "X-Request-Id")) {
				t.Errorf("without its id: %v", err)
			}
		})
	}
}
