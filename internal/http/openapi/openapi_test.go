package openapi

import (
	"encoding/json"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

const testCommon = `
title: T
groups: [things]
credentials: {key: {type: apiKey, in: header, name: X-Key}}
path_parameters: {thing_id: {type: uuid, description: The id., example: 01939d2c-0000-7000-8000-000000000001}}
parameters: {limit: {type: integer}, cursor: {type: string}, Idempotency-Key: {type: string}}
headers:
  X-Request-Id: {schema: {type: string}}
  RateLimit-Policy: {optional: true, schema: {type: string}}
  RateLimit: {optional: true, schema: {type: string}}
  Retry-After: {schema: {type: integer}}
  Link: {optional: true, schema: {type: string}}
  Idempotent-Replayed: {optional: true, schema: {type: string}}
bodies: {json: "Up to %d bytes."}
schemas:
  Problem: {properties: {code: string}}
  PageMeta: {properties: {next_cursor: string|null}, example: {next_cursor: null}}
`

const testThings = `
tag: Things
operations:
  GET /things:
    id: listThings
    summary: List things
    answers: {200: {page: Thing}}
  PUT /things/{thing_id}:
    id: putThing
    summary: Put a thing
    idempotent: true
    body: Thing
    example: {name: b}
    answers: {200: {data: Thing}}
    problems: [conflict]
schemas:
  Thing: {properties: {name: string, "at?": time|null}, example: {name: a}}
`

func testFiles(things string) fstest.MapFS {
	return fstest.MapFS{commonFile: {Data: []byte(testCommon)}, "things.yaml": {Data: []byte(things)}}
}

var testOptions = Options{
	Version: "1", ServerURL: "https://hub.example",
	Routes: []Route{
		{Method: "GET", Pattern: "/things", Credential: "key", Scope: "read", Bucket: "b", Limit: "1 per second", Problems: []Problem{{"limited", 429, "Limited"}}},
		{Method: "PUT", Pattern: "/things/{thing_id}", Credential: "key", Body: "json", BodyType: "application/json", MaxBody: 9},
	},
	Catalogue: map[string]Problem{},
}

func init() {
	for code, status := range map[string]int{
		"conflict": 409, "not_found": 404, "malformed_id": 400, "invalid_cursor": 400, "invalid_parameter": 400, "invalid_idempotency_key": 400,
		"idempotency_key_reused": 422, "request_in_progress": 409,
	} {
		testOptions.Catalogue[code] = Problem{code, status, strings.ToUpper(code)}
	}
}

func newDocument(t *testing.T, things string, o Options) (*Document, error) {
	t.Helper()
	s, err := load(testFiles(things))
	if err != nil {
		t.Fatal(err)
	}
	return s.Document(o)
}

// What follows from a route is there without being written: security, parameters, headers, problems by status.
func TestDerived(t *testing.T) {
	t.Parallel()
	doc, err := newDocument(t, testThings, testOptions)
	if err != nil || len(doc.Gaps) != 0 {
		t.Fatalf("%v, gaps %q", err, doc.Gaps)
	}
	text, err := doc.JSON()
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(text, &got); err != nil {
		t.Fatal(err)
	}
	at := func(path ...string) any {
		var v any = got
		for _, name := range path {
			v = v.(map[string]any)[name]
		}
		return v
	}
	names := func(v any) (list []string) {
		for _, p := range v.([]any) {
			list = append(list, p.(map[string]any)["in"].(string)+" "+p.(map[string]any)["name"].(string))
		}
		return list
	}
	list, put := []string{"paths", "/things", "get"}, []string{"paths", "/things/{thing_id}", "put"}
	in := func(op []string, path ...string) any { return at(append(op[:len(op):len(op)], path...)...) }
	for what, c := range map[string][2]any{
		"security":           {in(list, "security"), []any{map[string]any{"key": []any{"read"}}}},
		"parameters":         {names(in(list, "parameters")), []string{"query limit", "query cursor"}},
		"parameters of put":  {names(in(put, "parameters")), []string{"path thing_id", "header Idempotency-Key"}},
		"limit":              {in(list, "x-rate-limit", "bucket"), "b"},
		"codes of 400":       {in(list, "responses", "400", "x-problem-codes"), []any{"invalid_cursor", "invalid_parameter"}},
		"codes of 409":       {in(put, "responses", "409", "x-problem-codes"), []any{"conflict", "request_in_progress"}},
		"header of 429":      {in(list, "responses", "429", "headers", "Retry-After", "$ref"), "#/components/headers/Retry-After"},
		"header of the page": {in(list, "responses", "200", "headers", "Link", "$ref"), "#/components/headers/Link"},
		"example of a page":  {in(list, "responses", "200", "content", "application/json", "example"), map[string]any{"data": []any{map[string]any{"name": "a"}}, "meta": map[string]any{"next_cursor": nil}}},
		"example of a body":  {in(put, "requestBody", "content", "application/json", "example"), map[string]any{"name": "b"}},
		"words of a body":    {in(put, "requestBody", "description"), "Up to 9 bytes."},
		"required":           {at("components", "schemas", "Thing", "required"), []any{"name"}},
		"nullable":           {at("components", "schemas", "Thing", "properties", "at", "type"), []any{"string", "null"}},
	} {
		if diff := cmp.Diff(c[1], c[0]); diff != "" {
			t.Errorf("%s:\n%s", what, diff)
		}
	}
}

// What is missing between the routes and the files is said with the place where it belongs.
func TestGaps(t *testing.T) {
	t.Parallel()
	o := testOptions
	o.Routes = append(o.Routes[:1:1], Route{Method: "GET", Pattern: "/others/{other_id}"}, Route{Method: "PUT", Pattern: "/things/{thing_id}", Credential: "session", Body: "file", BodyType: "x/y"})
	doc, err := newDocument(t, strings.Replace(testThings, "  PUT /things/{thing_id}:", "  GET /none:\n    id: x\n    summary: x\n    answers: {200: {}}\n  PUT /things/{thing_id}:", 1)+"  Unused: string\n", o)
	if err != nil {
		t.Fatal(err)
	}
	gaps := strings.Join(doc.Gaps, "\n")
	for _, want := range []string{"GET /others/{other_id} has no description", "things.yaml describes GET /none, which is no route", "schema Unused",
		`credential "session" of PUT /things/{thing_id}`, `the kind "file"`} {
		if !strings.Contains(gaps, want) {
			t.Errorf("no gap says %q:\n%s", want, gaps)
		}
	}
}

// A file that can't be understood is refused with its name and the line.
func TestFaults(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct{ old, new, want string }{
		"unknown word":       {"summary: List", "title: List", "things.yaml"},
		"unknown keyword":    {"{name: string,", "{name: {kind: string},", `"kind" is no keyword`},
		"unknown type":       {"\"at?\": time|null", "\"at?\": instant", `"instant" is no type`},
		"unknown schema":     {"{page: Thing}", "{page: Thong}", "no schema Thong"},
		"unknown problem":    {"[conflict]", "[conflicts]", `no problem "conflicts"`},
		"unknown header":     {"{data: Thing}", "{data: Thing, headers: [X-Thing]}", "X-Thing"},
		"unknown parameter":  {"answers: {200: {page", "query: {colour: }\n    answers: {200: {page", "colour"},
		"no summary":         {"summary: List things", "description: x", "needs id, summary and answers"},
		"no body":            {"body: Thing", "description: x", "takes a body"},
		"an id twice":        {"putThing", "listThings", "GET /things"},
		"a schema twice":     {"schemas:", "schemas:\n  Problem: string", "another schema Problem"},
		"a mapping expected": {"{properties: {name: string, \"at?\": time|null}", "{properties: [name]", "mapping"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			things := strings.Replace(testThings, tt.old, tt.new, 1)
			if things == testThings {
				t.Fatalf("%q is not in the file", tt.old)
			}
			s, err := load(testFiles(things))
			if err == nil {
				_, err = s.Document(testOptions)
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q", err, tt.want)
			}
		})
	}
}

func TestTypes(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"string":                         `{"type":"string"}`,
		"uuid":                           `{"type":"string","format":"uuid"}`,
		"time|null":                      `{"type":["string","null"],"format":"date-time"}`,
		"Thing":                          `{"$ref":"#/components/schemas/Thing"}`,
		"Thing|null":                     `{"anyOf":[{"$ref":"#/components/schemas/Thing"},{"type":"null"}]}`,
		"Thing[]":                        `{"type":"array","items":{"$ref":"#/components/schemas/Thing"}}`,
		"uuid[]|null":                    `{"type":["array","null"],"items":{"type":"string","format":"uuid"}}`,
		"{type: string|null, enum: [a]}": `{"type":["string","null"],"enum":["a",null]}`,
		"{properties: {b: string, \"a?\": {type: integer, minimum: 0}}}": `{"type":"object","properties":{"b":{"type":"string"},"a":{"type":"integer","minimum":0}},"required":["b"]}`,
		"{type: string, example: 2026-11-30}":                            `{"type":"string","examples":["2026-11-30"]}`,
		"{type: object, additionalProperties: string}":                   `{"type":"object","additionalProperties":{"type":"string"}}`,
		"{type: object, additionalProperties: true}":                     `{"type":"object","additionalProperties":true}`,
	} {
		var s Schema
		if err := yaml.Unmarshal([]byte(text), &s); err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		got, err := json.Marshal(&s)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("%s:\n got %s\nwant %s", text, got, want)
		}
	}
}
