package http

import (
	"net/http"
	"slices"
	"strings"
)

// Headers that a browser's page may send beyond the safe ones, and may read in answers.
const (
	corsAllowHeaders = "Authorization, Content-Type, Idempotency-Key, X-Api-Key, X-Channel-Token, X-Idempotency-Key, X-Request-Id"
	corsAllowMethods = "GET, POST, PUT, PATCH, DELETE, OPTIONS"
	corsExpose       = "Content-Disposition, Deprecation, ETag, RateLimit, RateLimit-Policy, Retry-After, Idempotent-Replayed, Link, X-Request-Id"
	corsMaxAge       = "7200"
)

var (
	valCORSExpose = []string{corsExpose}
	valAny        = []string{"*"}
	valVaryOrigin = []string{"Origin"}
)

// cors lets pages of the configured origins use the client and tenant APIs. The management API is for programs and is
// not opened to pages. It reports whether the request was a preflight and is answered.
//
// No cookies are involved, so credentials are never allowed, and "*" is safe.
func (s *server) cors(c *call) (answered bool) {
	r := c.r
	if r.Header["Origin"] == nil || !strings.HasPrefix(r.URL.Path, "/api/v1/") || strings.HasPrefix(r.URL.Path, managementPrefix+"/") {
		return false
	}
	h := c.Header()
	origin := r.Header.Get("Origin")
	allowed := true
	switch {
	case slices.Contains(s.CORSOrigins, "*"):
		h["Access-Control-Allow-Origin"] = valAny
	default:
		h["Vary"] = valVaryOrigin
		if allowed = slices.Contains(s.CORSOrigins, origin); allowed {
			h["Access-Control-Allow-Origin"] = []string{origin}
		}
	}
	if allowed {
		h["Access-Control-Expose-Headers"] = valCORSExpose
	}
	if r.Method != http.MethodOptions || r.Header["Access-Control-Request-Method"] == nil {
		return false
	}
	p := &reply{status: http.StatusNoContent}
	if allowed {
		p.with("Access-Control-Allow-Methods", corsAllowMethods).
			with("Access-Control-Allow-Headers", corsAllowHeaders).
			with("Access-Control-Max-Age", corsMaxAge)
	}
	s.write(c, p)
	return true
}
