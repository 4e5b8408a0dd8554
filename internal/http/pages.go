package http

import (
	"bytes"
	"fmt"
	"html/template"
	"io/fs"
	"net/http"
	"path"
)

// registerPageRoutes: pages that need no sign-in. They cost no query.
func (s *server) registerPageRoutes() {
	page := route{method: http.MethodGet}
	s.register(page.at("/", s.showIndex))
	s.register(page.at("/problems", s.showProblems))
	s.register(page.at("/problems/{code}", s.showProblem))
	s.register(page.at("/deprecations", s.showDeprecations))
	s.register(page.at("/static/{file}", s.showStatic))
}

// pageCSP allows a page this server's own style sheet, and nothing else at all.
const pageCSP = "default-src 'none'; style-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

// pages are the parsed templates and the static files.
type pages struct {
	templates *template.Template
	static    fs.FS
}

// newPages reads the templates: a broken one stops the program, not a request.
func newPages(files fs.FS) (*pages, error) {
	t, err := template.ParseFS(files, "templates/*.html")
	if err != nil {
		return nil, fmt.Errorf("http: read templates: %w", err)
	}
	static, err := fs.Sub(files, "static")
	if err != nil {
		return nil, fmt.Errorf("http: open static files: %w", err)
	}
	return &pages{t, static}, nil
}

func (p *pages) render(name string, data any) (*reply, error) {
	var b bytes.Buffer
	if err := p.templates.ExecuteTemplate(&b, name, data); err != nil {
		return nil, fmt.Errorf("http: render %s: %w", name, err)
	}
	r := &reply{status: http.StatusOK, contentType: typeHTML, body: b.Bytes()}
	return r.with("Content-Security-Policy", pageCSP).with("Cache-Control", "public, max-age=300"), nil
}

func (s *server) showIndex(*call) (*reply, error) { return s.pages.render("index.html", nil) }

func (s *server) showProblems(*call) (*reply, error) {
	return s.pages.render("problems.html", sortedCatalogue())
}

func (s *server) showProblem(c *call) (*reply, error) {
	kind, ok := kinds[code(c.param("code"))]
	if !ok {
		return nil, newProblem(codeNotFound, "There is no problem of this code; /problems lists them all.")
	}
	return s.pages.render("problem.html", kind)
}

// staticTypes are the files that may be served, by the end of their names.
var staticTypes = map[string]string{".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}

func (s *server) showStatic(c *call) (*reply, error) {
	name := c.param("file")
	kind, ok := staticTypes[path.Ext(name)]
	if !ok || !fs.ValidPath(name) {
		return nil, newProblem(codeNotFound, "There is no such file.")
	}
	body, err := fs.ReadFile(s.pages.static, name)
	if err != nil {
		return nil, newProblem(codeNotFound, "There is no such file.")
	}
	r := &reply{status: http.StatusOK, contentType: kind, body: body}
	return r.with("Cache-Control", "public, max-age=300"), nil
}
