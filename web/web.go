package web

import (
	"embed"
	"io/fs"
)

//go:embed templates static
var files embed.FS

// Files is the folder tree: templates/*.html, each a page for html/template, and static/*, served as they are.
func Files() fs.FS { return files }
