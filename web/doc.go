// Package web holds the templates and static files of the pages, embedded in the program.
//
// It decides nothing, imports nothing of ours and owns no goroutine; [Files] can't fail. internal/http is given the
// fs.FS and parses the templates at start, so that a broken one stops the program and not a request; its tests render
// every page.
//
// Pages work without scripts and load nothing from elsewhere: the content security policy allows this server's own
// style sheet and nothing more.
package web
