// Package web holds the templates and static files of the pages, embedded in the program.
//
// It decides nothing, imports nothing of ours and owns no goroutine; [Files] can't fail. internal/http is given the
// fs.FS and parses the templates at start, so that a broken one stops the program and not a request; its tests render
// every page.
//
// A page is a template of its own that defines "main"; layout.html is the frame around it, parts.html has what pages share:
// fields of forms, times, links to further pages. Their data is the view of internal/http (pages.go).
//
// Pages work without scripts and load nothing from elsewhere: the content security policy allows this server's own
// files, and nothing inline. Their colours follow the reader's system, they fit 320 pixels, and everything can be reached
// by keys; the tests in a real browser (cmd/server) hold them to it.
package web
