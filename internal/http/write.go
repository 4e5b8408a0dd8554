package http

import (
	"log/slog"
	"net/http"
	"strconv"
	"time"
)

// Values that every answer shares: assigned as they are, a header costs no allocation.
var (
	valNoSniff    = []string{"nosniff"}
	valNoReferrer = []string{"no-referrer"}
	valCSP        = []string{"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"}
	valNoStore    = []string{"no-store"}
	valHSTS       = []string{"max-age=31536000"}
	valClose      = []string{"close"}
)

// abandonedBodyWait is how long a connection whose body nobody will read may go on sending after the answer.
const abandonedBodyWait = 500 * time.Millisecond

// setCommonHeaders sets what every answer carries. A page replaces the content policy by its own.
func (s *server) setCommonHeaders(c *call) {
	h := c.Header()
	h["X-Request-Id"] = []string{c.id}
	h["X-Content-Type-Options"] = valNoSniff
	h["Referrer-Policy"] = valNoReferrer
	h["Content-Security-Policy"] = valCSP
	h["Cache-Control"] = valNoStore
	if s.secure {
		h["Strict-Transport-Security"] = valHSTS
	}
}

// setLimitHeaders says what the route's limit leaves to the caller.
func (c *call) setLimitHeaders() {
	if c.decision.Limited() {
		h := c.Header()
		h["Ratelimit-Policy"] = []string{c.decision.Policy.PolicyHeader()}
		h["Ratelimit"] = []string{string(c.decision.AppendHeader(make([]byte, 0, 40)))}
	}
}

// write sends an answer, once it is whole.
func (s *server) write(c *call, p *reply) {
	h := c.Header()
	c.setLimitHeaders()
	for _, kv := range p.header {
		h[kv[0]] = []string{kv[1]}
	}
	c.setDeprecation(s.PublicURL)
	if p.contentType != "" {
		h["Content-Type"] = []string{p.contentType}
	}
	if p.status != http.StatusNoContent && p.status != http.StatusNotModified {
		h["Content-Length"] = []string{strconv.Itoa(len(p.body))}
	}
	if c.r.ContentLength != 0 && !c.bodyRead {
		// Nobody will read the body: don't let net/http drain it for the sake of the connection.
		h["Connection"] = valClose
		_ = http.NewResponseController(c.ResponseWriter).SetReadDeadline(time.Now().Add(abandonedBodyWait))
	}
	c.WriteHeader(p.status)
	_, _ = c.Write(p.body) // the client may be gone; there is nobody to tell
}

// refuse writes the problem that err is.
func (s *server) refuse(c *call, err error) {
	p, unknown := problemOf(err)
	if unknown {
		s.Logger.LogAttrs(c.ctx(), slog.LevelError, "request failed", slog.String("request_id", c.id),
			slog.String("route", c.pattern()), slog.String("error", err.Error()))
	}
	if to := s.detour(c, p); to != "" {
		s.write(c, s.seeOther(to))
		return
	}
	s.write(c, s.problemReply(c, p))
}
