package http

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"html/template"
	"io/fs"
	"net/http"
	"path"
	"strings"
)

// registerPageRoutes: pages that need no sign-in. They cost no query.
func (s *server) registerPageRoutes() {
	page := route{method: http.MethodGet, area: areaPublic}
	s.register(page.at("/", s.showIndex))
	s.register(page.at("/problems", s.showProblems))
	s.register(page.at("/problems/{code}", s.showProblem))
	s.register(page.at("/deprecations", s.showDeprecations))
	s.register(page.at("/static/{file}", s.showStatic))
}

// area is the part of the pages that a route belongs to. Routes of an area answer browsers in HTML, errors too, and take
// changes from their own pages only.
type area uint8

const (
	areaNone   area = iota // an API
	areaPublic             // pages for anybody
	areaAdmin              // for operators, from listed addresses
	areaPortal             // for the staff of tenants
)

// areas are the words and addresses of each area.
var areas = [...]struct {
	home, place string
	nav         []navItem
}{
	areaNone:   {home: "/"},
	areaPublic: {home: "/"},
	areaAdmin:  {"/admin", "Administration", []navItem{{"/admin", "Overview"}, {"/admin/tenants", "Tenants"}, {"/admin/rate_limits", "Rate limits"}, {"/admin/account", "Account"}}},
	areaPortal: {"/portal", "Portal", []navItem{{"/portal", "Overview"}, {"/portal/account", "Account"}}},
}

func (a area) home() string { return areas[a].home }

type navItem struct{ Path, Text string }

// areaOf tells whose address a path is, be there something or not.
func areaOf(p string) area {
	for _, a := range []area{areaAdmin, areaPortal} {
		if rest, ok := strings.CutPrefix(p, a.home()); ok && (rest == "" || rest[0] == '/') {
			return a
		}
	}
	if strings.HasPrefix(p, "/api/") {
		return areaNone
	}
	return areaPublic
}

// pageCSP allows a page this server's own style sheets, images and scripts, and forms that lead back to it; nothing
// inline, nothing from elsewhere, no frame around it.
const pageCSP = "default-src 'none'; style-src 'self'; img-src 'self'; script-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"

// pages are the parsed templates and the static files.
type pages struct {
	base      string // path of the public URL, without a slash at its end
	templates map[string]*template.Template
	static    map[string]staticFile
}

type staticFile struct {
	kind    string
	body    []byte
	version string // of the bytes
}

// sharedTemplates are parsed into every page: the frame, and the parts that pages are made of.
var sharedTemplates = []string{"templates/layout.html", "templates/parts.html"}

// staticTypes are the files that may be served, by the end of their names.
var staticTypes = map[string]string{".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

// newPages reads the templates and static files: a broken one stops the program, not a request.
func newPages(files fs.FS, base string) (*pages, error) {
	p := &pages{base: base, templates: map[string]*template.Template{}, static: map[string]staticFile{}}
	entries, err := fs.ReadDir(files, "static")
	if err != nil {
		return nil, fmt.Errorf("http: open static files: %w", err)
	}
	for _, e := range entries {
		kind, ok := staticTypes[path.Ext(e.Name())]
		if !ok {
			continue
		}
		body, err := fs.ReadFile(files, "static/"+e.Name())
		if err != nil {
			return nil, fmt.Errorf("http: read static files: %w", err)
		}
		sum := sha256.Sum256(body)
		p.static[e.Name()] = staticFile{kind, body, hex.EncodeToString(sum[:6])}
	}
	shared, err := template.New("").Funcs(template.FuncMap{"link": p.link, "asset": p.asset}).ParseFS(files, sharedTemplates...)
	if err != nil {
		return nil, fmt.Errorf("http: read templates: %w", err)
	}
	names, err := fs.Glob(files, "templates/*.html")
	if err != nil {
		return nil, fmt.Errorf("http: list templates: %w", err)
	}
	for _, name := range names {
		t, err := shared.Clone()
		if err == nil {
			t, err = t.ParseFS(files, name)
		}
		if err != nil {
			return nil, fmt.Errorf("http: read templates: %w", err)
		}
		p.templates[path.Base(name)] = t
	}
	return p, nil
}

// link is the address of a path of this hub, as browsers see it: below the path of the public URL.
func (p *pages) link(to string) string { return p.base + to }

// asset is the address of a static file with the version of its bytes, by which it may be kept for ever.
func (p *pages) asset(name string) (string, error) {
	f, ok := p.static[name]
	if !ok {
		return "", fmt.Errorf("no static file %s", name)
	}
	return p.link("/static/" + name + "?v=" + f.version), nil
}

// view is a page: what stands in its frame, and for its template Main.
type view struct {
	Title  string
	Failed bool // it answers a form that was not right
	Main   any

	// Filled in by the server.
	Area      area
	Who       *who
	Notice    string // what was done
	Partly    string // what was done in part
	LimitsOff bool
	here      string
}

// who is the signed-in person as the frame names them.
type who struct{ Name, Role string }

// Home is where the area begins.
func (v view) Home() string { return v.Area.home() }

// Place names the area.
func (v view) Place() string { return areas[v.Area].place }

// navEntry is a line of the navigation.
type navEntry struct {
	navItem
	Current bool
}

// Nav is the area's navigation; the entry of the page, or of what it is part of, is marked.
func (v view) Nav() []navEntry {
	var out []navEntry
	for _, item := range areas[v.Area].nav {
		current := v.here == item.Path || item.Path != v.Home() && strings.HasPrefix(v.here, item.Path+"/")
		out = append(out, navEntry{item, current})
	}
	return out
}

// page renders a page for a call.
func (s *server) page(c *call, status int, name string, v view) (*reply, error) {
	v.Area, v.here = c.area(), c.r.URL.Path
	v.Who = c.who()
	v.LimitsOff = v.Area == areaAdmin && v.Who != nil && !s.Limiter.Enabled()
	t := s.pages.templates[name]
	if t == nil {
		return nil, fmt.Errorf("http: no template %s", name)
	}
	r := &reply{status: status, contentType: typeHTML}
	if v.Area != areaPublic {
		v.Notice, v.Partly = s.takeNotice(c)
	}
	var b bytes.Buffer
	if err := t.ExecuteTemplate(&b, "layout", v); err != nil {
		return nil, fmt.Errorf("http: render %s: %w", name, err)
	}
	r.body = b.Bytes()
	return r.asPage(), nil
}

// asPage adds the headers of a page: its content policy, and a referrer policy under which browsers name the origin of a
// form, which they would hide under the API's.
func (p *reply) asPage() *reply {
	return p.with("Content-Security-Policy", pageCSP).with("Referrer-Policy", "same-origin").
		with("Cross-Origin-Opener-Policy", "same-origin").with("Cross-Origin-Resource-Policy", "same-origin").
		with("Permissions-Policy", "camera=(), geolocation=(), microphone=()")
}

// publicPage renders a page that is the same for everybody.
func (s *server) publicPage(c *call, name, title string, data any) (*reply, error) {
	r, err := s.page(c, http.StatusOK, name, view{Title: title, Main: data})
	if err != nil {
		return nil, err
	}
	return r.with("Cache-Control", "public, max-age=300"), nil
}

// whole renders a page that brings its own frame and is the same for everybody.
func (p *pages) whole(name string, data any) (*reply, error) {
	var b bytes.Buffer
	if err := p.templates[name].ExecuteTemplate(&b, name, data); err != nil {
		return nil, fmt.Errorf("http: render %s: %w", name, err)
	}
	r := &reply{status: http.StatusOK, contentType: typeHTML, body: b.Bytes()}
	return r.asPage().with("Cache-Control", "public, max-age=300"), nil
}

// seeOther sends the browser on to another page of ours, after a form.
func (s *server) seeOther(to string) *reply {
	r := &reply{status: http.StatusSeeOther}
	return r.with("Location", s.pages.link(to))
}

func (s *server) showIndex(c *call) (*reply, error) {
	return s.publicPage(c, "index.html", "A messaging hub", nil)
}

func (s *server) showProblems(c *call) (*reply, error) {
	return s.publicPage(c, "problems.html", "Problems", sortedCatalogue())
}

func (s *server) showProblem(c *call) (*reply, error) {
	kind, ok := kinds[code(c.param("code"))]
	if !ok {
		return nil, newProblem(codeNotFound, "There is no problem of this code; /problems lists them all.")
	}
	return s.publicPage(c, "problem.html", kind.Title, kind)
}

func (s *server) showStatic(c *call) (*reply, error) {
	f, ok := s.pages.static[c.param("file")]
	if !ok {
		return nil, newProblem(codeNotFound, "There is no such file.")
	}
	r := &reply{status: http.StatusOK, contentType: f.kind, body: f.body}
	keep := "public, max-age=300"
	if c.r.URL.RawQuery == "v="+f.version {
		keep = "public, max-age=31536000, immutable"
	}
	return r.with("Cache-Control", keep).with("Cross-Origin-Resource-Policy", "same-origin"), nil
}

// problemView is a problem as its page shows it.
type problemView struct {
	Title, Detail, Remedy string
	Status                int
	Code                  code
	RequestID             string
	Fields                []fieldProblem
}

// area is whose page was asked for, be there one or not.
func (c *call) area() area {
	if c.route != nil {
		return c.route.area
	}
	return areaOf(c.r.URL.Path)
}

// acceptsHTML tells whether the Accept header names HTML. A program that names nothing gets problem+json.
func acceptsHTML(h http.Header) bool {
	for _, line := range h["Accept"] {
		for part := range strings.SplitSeq(line, ",") {
			name, params, _ := strings.Cut(part, ";")
			if name = strings.TrimSpace(name); (strings.EqualFold(name, "text/html") || strings.EqualFold(name, "application/xhtml+xml")) && !refused(params) {
				return true
			}
		}
	}
	return false
}

// problemReply is the answer that a problem is: a page for somebody who asked for one, anywhere but in an API, else
// problem+json.
func (s *server) problemReply(c *call, p *problem) *reply {
	plain := p.reply(s.PublicURL, c.id)
	if c.area() == areaNone {
		return plain
	}
	plain = plain.with("Vary", "Accept")
	if !acceptsHTML(c.r.Header) {
		return plain
	}
	kind := kinds[p.code]
	v := problemView{Title: kind.Title, Detail: p.detail, Remedy: kind.Remedy, Status: plain.status, Code: p.code, RequestID: c.id, Fields: p.fields}
	if p.code == codeRateLimited {
		v.Title, v.Remedy = "Please wait", "Nothing is lost: wait, then load this page again."
	}
	r, err := s.page(c, plain.status, "error.html", view{Title: v.Title, Main: v})
	if err != nil { // the plain answer says the same
		s.Logger.ErrorContext(c.ctx(), "can't render the page of a problem", "request_id", c.id, "error", err.Error())
		return plain
	}
	r.header = append(r.header, plain.header...)
	return r
}
