package http

import (
	"errors"
	"log/slog"
	"net/http"
	"strconv"
	"time"

	"converger/internal/ratelimit"
)

// Values that every answer shares: assigned as they are, a header costs no allocation.
var (
	valNoSniff    = []string{"nosniff"}
	valNoReferrer = []string{"no-referrer"}
	valCSP        = []string{"default-src 'none'; frame-ancestors 'none'; base-uri 'none'"}
	valNoStore    = []string{"no-store"}
	valHSTS       = []string{"max-age=31536000"}
	valClose      = []string{"close"}
	valProblem    = []string{typeProblem}
	valJSON       = []string{typeJSON}
)

// abandonedBodyWait is how long a connection whose body nobody will read may go on sending after the answer.
const abandonedBodyWait = 500 * time.Millisecond

// setCommonHeaders sets what every answer carries. A page replaces the content policy by its own.
func (s *server) setCommonHeaders(c *call) {
	h := c.Header()
	h["X-Request-Id"] = c.value(c.id)
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
		h["Ratelimit-Policy"] = c.value(c.decision.Policy.PolicyHeader())
		h["Ratelimit"] = c.value(string(c.decision.AppendHeader(make([]byte, 0, 64))))
	}
}

// write sends an answer, once it is whole.
func (s *server) write(c *call, p *reply) {
	h := c.Header()
	for _, kv := range p.header {
		h[kv[0]] = []string{kv[1]}
	}
	s.send(c, p.status, p.contentType, p.body)
}

// send sends an answer whose own headers are set; contentType is "" with no body.
func (s *server) send(c *call, status int, contentType string, body []byte) {
	h := c.Header()
	c.setLimitHeaders()
	c.setDeprecation(s.PublicURL)
	switch contentType {
	case "":
	case typeProblem:
		h["Content-Type"] = valProblem
	case typeJSON:
		h["Content-Type"] = valJSON
	default:
		h["Content-Type"] = c.value(contentType)
	}
	if status != http.StatusNoContent && status != http.StatusNotModified {
		h["Content-Length"] = c.value(strconv.Itoa(len(body)))
	}
	if c.r.ContentLength != 0 && !c.bodyRead {
		// Nobody will read the body: don't let net/http drain it for the sake of the connection.
		h["Connection"] = valClose
		_ = http.NewResponseController(c.ResponseWriter).SetReadDeadline(time.Now().Add(abandonedBodyWait))
	}
	c.WriteHeader(status)
	_, _ = c.Write(body) // the client may be gone; there is nobody to tell
}

// refuse writes the problem that err is.
func (s *server) refuse(c *call, err error) {
	if limited, ok := errors.AsType[*refusal](err); ok && c.area() == areaNone {
		s.writeRefusal(c, ratelimit.Decision(*limited))
		return
	}
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
