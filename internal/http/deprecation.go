package http

import (
	"strconv"
	"time"
)

// deprecatedSince is the day from which X-Channel-Token has a successor everywhere: X-Api-Key, and tokens/generate.
var deprecatedSince = time.Date(2026, time.November, 30, 0, 0, 0, 0, time.UTC)

// valDeprecation is a structured-field date (RFC 9745, 2.1).
var valDeprecation = []string{"@" + strconv.FormatInt(deprecatedSince.Unix(), 10)}

// setDeprecation tells callers of what has a successor, whatever the answer is; base is the public URL.
func (c *call) setDeprecation(base string) {
	if c.deprecated {
		h := c.Header()
		h["Deprecation"] = valDeprecation
		h["Link"] = append(h["Link"], "<"+base+`/deprecations>; rel="deprecation"; type="text/html"`)
	}
}

// showDeprecations is the page to which rel="deprecation" leads.
func (s *server) showDeprecations(c *call) (*reply, error) {
	return s.publicPage(c, "deprecations.html", "Deprecations", deprecatedSince)
}
