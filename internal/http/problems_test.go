package http

import (
	"bytes"
	"encoding/json"
	"go/ast"
	"go/parser"
	"go/token"
	"html"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"converger/internal/fault"
)

// parseDir parses a package's files, without its tests.
func parseDir(t testing.TB, dir string) []*ast.File {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil || len(paths) == 0 {
		t.Fatalf("no files in %s: %v", dir, err)
	}
	var files []*ast.File
	for _, p := range paths {
		if strings.HasSuffix(p, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), p, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, file)
	}
	return files
}

// Every code that the source can send is in the catalogue, and everything in the catalogue is a code of the source.
func TestCatalogueIsTheCode(t *testing.T) {
	t.Parallel()
	var inSource []string
	for _, file := range parseDir(t, ".") {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || len(spec.Values) != 1 {
				return true
			}
			if kind, ok := spec.Type.(*ast.Ident); ok && kind.Name == "code" {
				text, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
				if err != nil {
					t.Fatal(err)
				}
				inSource = append(inSource, text)
			}
			return true
		})
	}
	var inCatalogue []string
	for _, k := range catalogue {
		inCatalogue = append(inCatalogue, string(k.Code))
		if k.Title == "" || k.Meaning == "" || k.Remedy == "" || k.Status < 400 {
			t.Errorf("%s is incomplete", k.Code)
		}
	}
	slices.Sort(inSource)
	slices.Sort(inCatalogue)
	if diff := cmp.Diff(inSource, inCatalogue); diff != "" {
		t.Errorf("source and catalogue differ:\n%s", diff)
	}
	if len(kinds) != len(catalogue) {
		t.Error("a code is in the catalogue twice")
	}
}

// The served catalogue is the one in the code: its list links each code to a page that exists and names its meaning.
func TestCataloguePages(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	list := f.call(t, "GET", "/problems", "")
	list.is(t, 200, "")
	var linked []string
	for _, m := range regexp.MustCompile(`href="/problems/([a-z_]+)"`).FindAllSubmatch(list.body, -1) {
		linked = append(linked, string(m[1]))
	}
	if m := regexp.MustCompile(`<script|<style| style=| on[a-z]+=|https?://`).Find(list.body); m != nil {
		t.Errorf("the page holds %q, which its content policy forbids", m)
	}
	var want []string
	for _, k := range catalogue {
		want = append(want, string(k.Code))
		page := f.call(t, "GET", "/problems/"+string(k.Code), "")
		page.is(t, 200, "")
		if !bytes.Contains(page.body, []byte(html.EscapeString(k.Title))) {
			t.Errorf("page of %s lacks its title", k.Code)
		}
		if got := page.Header.Get("Content-Security-Policy"); got != pageCSP {
			t.Errorf("page of %s: content policy %q", k.Code, got)
		}
	}
	slices.Sort(linked)
	slices.Sort(want)
	if diff := cmp.Diff(want, linked); diff != "" {
		t.Errorf("catalogue and list differ:\n%s", diff)
	}
	f.call(t, "GET", "/problems/made_up", "").is(t, 404, codeNotFound)
	css := f.call(t, "GET", "/static/site.css", "")
	css.is(t, 200, "")
	for _, path := range []string{"/static/..%2fweb.go", "/static/web.go", "/static/.css"} {
		f.call(t, "GET", path, "").is(t, 404, codeNotFound)
	}
}

// mapped lists the packages whose exported errors callers may meet.
var mapped = []string{"auth", "tenants", "channel", "activity", "activity/upload", "inbound", "delivery", "ratelimit", "secrets"}

func TestEveryDomainErrorIsMapped(t *testing.T) {
	t.Parallel()
	inMap := map[string]bool{}
	for _, file := range parseDir(t, ".") {
		ast.Inspect(file, func(n ast.Node) bool {
			if lit, ok := n.(*ast.CompositeLit); ok && len(lit.Elts) == 4 {
				if sel, ok := lit.Elts[0].(*ast.SelectorExpr); ok {
					inMap[sel.X.(*ast.Ident).Name+"."+sel.Sel.Name] = true
				}
			}
			return true
		})
	}
	if len(inMap) != len(mappings) {
		t.Fatalf("found %d of %d mappings in the source", len(inMap), len(mappings))
	}
	for _, pkg := range mapped {
		for _, file := range parseDir(t, "../"+pkg) {
			for _, decl := range file.Decls {
				g, ok := decl.(*ast.GenDecl)
				if !ok || g.Tok != token.VAR {
					continue
				}
				for _, spec := range g.Specs {
					for _, name := range spec.(*ast.ValueSpec).Names {
						if full := path.Base(pkg) + "." + name.Name; strings.HasPrefix(name.Name, "Err") && !inMap[full] {
							t.Errorf("%s has no line in mappings", full)
						}
					}
				}
			}
		}
	}
}

func TestProblemOf(t *testing.T) {
	t.Parallel()
	for _, m := range mappings {
		p, unknown := problemOf(m.is)
		if m.code == codeInternal {
			if !unknown || p.code != codeInternal {
				t.Errorf("%v: %v, want an unknown error", m.is, p)
			}
			continue
		}
		if unknown || p.code != m.code || p.detail == "" {
			t.Errorf("%v: %v, want code %s", m.is, p, m.code)
		}
	}
	p, _ := problemOf(&fault.Invalid{Fields: []fault.Field{{Pointer: "/a", Code: "required", Detail: "is required"}, {Pointer: "/b/0", Code: "malformed", Detail: "x"}}})
	if p.code != codeValidationFailed || !reflect.DeepEqual(p.fields[1], fieldProblem{"#/b/0", "malformed", "x"}) {
		t.Errorf("invalid: %+v", p)
	}
}

// Problems as callers see them, one of each kind of sender.
func TestProblemBodies(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	v := f.newConversation(t)
	limitOverride(t, f, `{"limit":0,"scale_ms":1000}`, "token_generate")
	requests := []struct {
		name, method, path, body string
		options                  []option
	}{
		{"not_found", "GET", "/nothing", "", nil},
		{"method_not_allowed", "PUT", "/health/live", "", nil},
		{"missing_key", "GET", "/api/v1/conversations", "", nil},
		{"malformed_key", "GET", "/api/v1/conversations", "", []option{header("X-Api-Key", "cvg_live_nope")}},
		{"malformed_id", "GET", "/api/v1/conversations/7", "", []option{f.apiKey()}},
		{"foreign_id", "GET", "/api/v1/conversations/01930000-0000-7000-8000-00000000dead", "", []option{f.apiKey()}},
		{"malformed_json", "POST", "/api/v1/conversations", `{"channel_id":`, []option{f.apiKey()}},
		{"invalid_fields", "POST", "/api/v1/conversations", `{"channel_id":7,"display_name":"x"}`, []option{f.apiKey()}},
		{"unknown_member", "POST", "/api/v1/management/tenants", `{"name":"B","colour/~":1}`, []option{f.ops()}},
		{"limit_range", "PUT", "/api/v1/management/tenants/" + f.tenant.ID.String() + "/limits/inbound", `{"limit":-1,"scale_ms":5}`, []option{f.ops()}},
		{"media_type", "POST", "/api/v1/conversations", `{}`, []option{f.apiKey(), header("Content-Type", "text/plain")}},
		{"not_acceptable", "GET", "/api/v1/conversations", "", []option{f.apiKey(), header("Accept", "text/csv")}},
		{"limit_zero", "POST", "/api/v1/converger/tokens/generate", "", []option{bearer(f.webhook.Secret.Reveal())}},
		{"text_too_long", "POST", "/api/v1/conversations/" + v.ID.String() + "/activities", `{"text":"` + strings.Repeat("x", 65537) + `"}`, []option{f.apiKey()}},
	}
	var b bytes.Buffer
	for _, r := range requests {
		a := f.call(t, r.method, r.path, r.body, append(r.options, header("X-Request-Id", "req_of_the_test"))...)
		if a.Header.Get("X-Request-Id") != "req_of_the_test" || a.Header.Get("Content-Type") != typeProblem || a.Header.Get("Cache-Control") != "no-store" {
			t.Errorf("%s: headers %v", r.name, a.Header)
		}
		b.WriteString(r.name + ": " + strconv.Itoa(a.StatusCode))
		for _, h := range []string{"Allow", "Www-Authenticate", "Retry-After", "Ratelimit-Policy", "Ratelimit"} {
			if v := a.Header.Get(h); v != "" {
				b.WriteString("\n  " + h + ": " + v)
			}
		}
		b.WriteString("\n")
		var indented bytes.Buffer
		if err := json.Indent(&indented, a.body, "  ", "  "); err != nil {
			t.Fatal(err)
		}
		b.WriteString("  " + indented.String() + "\n")
	}
	// The window's end is not ours to choose.
	golden(t, "problems.golden", maskNumbers(b.Bytes()))
}

// maskNumbers replaces what depends on the clock.
func maskNumbers(b []byte) []byte {
	lines := strings.Split(string(b), "\n")
	for i, l := range lines {
		for _, name := range []string{`"retry_after_ms": `, "Retry-After: ", `;r=`, "come back in "} {
			if at := strings.Index(l, name); at >= 0 {
				lines[i] = l[:at+len(name)] + "N"
				l = lines[i]
			}
		}
	}
	return []byte(strings.Join(lines, "\n"))
}

// A panic is one line in the log and a 500 that tells nothing.
func TestPanicIsHidden(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	f.routes[0].handle = func(*call) (*reply, error) { panic("canary-in-a-panic") }
	a := f.call(t, "GET", f.routes[0].pattern, "")
	a.is(t, 500, codeInternal)
	if bytes.Contains(a.body, []byte("canary")) {
		t.Errorf("the text got out: %s", a)
	}
	if n := strings.Count(f.log.String(), "canary-in-a-panic"); n != 1 {
		t.Errorf("logged %d times", n)
	}
	f.routes[0].handle = func(*call) (*reply, error) { return nil, os.ErrInvalid }
	a = f.call(t, "GET", f.routes[0].pattern, "")
	a.is(t, 500, codeInternal)
	if bytes.Contains(a.body, []byte("invalid argument")) || !strings.Contains(f.log.String(), "invalid argument") {
		t.Errorf("an unknown error must be in the log and nowhere else: %s", a)
	}
}
