package http

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"runtime/debug"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// call is one request on its way through the stages, and what they found out. It is the http.ResponseWriter that the
// router and the handlers get, so that no context value has to be made for it.
type call struct {
	http.ResponseWriter
	r       *http.Request
	id      string // request id
	ip      netip.Addr
	started time.Time

	address tenants.RangeKind // of the range that has ip; "" for none
	doubt   doubt             // whether ip is the client's

	route *route // nil until matched
	auth.Caller
	digest   auth.SessionDigest // of the session that a page was asked for with
	session  *auth.Session      // nil until loaded
	body     []byte
	bodyRead bool
	memory   *memory            // that the body was taken from
	held     int64              // bytes of it
	decision ratelimit.Decision // of the route's limit; zero when there is none
	proved   bool               // by a signature, a password or a link, which handlers check

	deprecated bool // the caller uses what has a successor, see showDeprecations

	status  int // 0 until the header is written
	written int64

	values [5]string // that value gave out
	given  int
}

// value is the value of a header, without an allocation for each of the first few.
func (c *call) value(v string) []string {
	i := c.given
	if i == len(c.values) {
		return []string{v}
	}
	c.given++
	c.values[i] = v
	return c.values[i : i+1 : i+1]
}

// Unwrap lets http.ResponseController reach the connection.
func (c *call) Unwrap() http.ResponseWriter { return c.ResponseWriter }

// WriteHeader notes the status.
func (c *call) WriteHeader(status int) {
	if c.status == 0 {
		c.status = status
	}
	c.ResponseWriter.WriteHeader(status)
}

// Write counts what is sent.
func (c *call) Write(b []byte) (int, error) {
	if c.status == 0 {
		c.status = http.StatusOK
	}
	n, err := c.ResponseWriter.Write(b)
	c.written += int64(n)
	return n, err
}

func (c *call) ctx() context.Context { return c.r.Context() }

// param is a parameter of the route's pattern.
func (c *call) param(name string) string { return c.r.PathValue(name) }

// actor is who changes something: a person, an operator's program, or a tenant by its API key or by the secret of one of
// its channels.
func (c *call) actor() tenants.Actor {
	switch {
	case c.session != nil:
		return c.session.Actor(c.id)
	case c.Key != nil:
		return tenants.Actor{Type: tenants.ActorTenantAPI, ID: c.Key.ID.String(), RequestID: c.id}
	case c.Operator != nil:
		return tenants.Actor{Type: tenants.ActorOperator, ID: c.Operator.ID.String(), RequestID: c.id}
	}
	return tenants.Actor{Type: tenants.ActorChannel, ID: c.Channel.ID.String(), RequestID: c.id}
}

// ownChannel is the one channel for which the caller speaks, nil for the tenant's API keys.
func (c *call) ownChannel() *uuid.UUID {
	if c.Channel == nil {
		return nil
	}
	return &c.Channel.ID
}

// ServeHTTP is the outermost stage: request id, panic guard, access log, metrics, client address and its range, CORS. Then the router
// finds the route, whose guards go on (see server.serve).
func (s *server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	c := &call{ResponseWriter: w, r: r, started: time.Now(), id: requestID(r)}
	s.metrics.inFlight.Inc()
	defer s.finish(c)

	if c.ip, c.doubt = clientIP(r, s.TrustedProxies); c.doubt == doubtUndeclared {
		s.forwarding.note(c.started, s.Logger, c.ip)
	}
	s.setCommonHeaders(c)
	if s.denied(c) {
		s.metrics.denied.Inc()
		s.refuse(c, newProblem(codeAddressDenied, "Requests from your address are refused by the operator."))
		return
	}
	if s.cors(c) {
		return // a preflight, answered
	}
	s.mux.ServeHTTP(c, r)
}

// finish turns a panic into a 500, and writes the one line and the metrics of the request.
func (s *server) finish(c *call) {
	if v := recover(); v != nil {
		if v == http.ErrAbortHandler { //nolint:errorlint // net/http compares it so
			s.metrics.inFlight.Dec()
			c.release()
			panic(v)
		}
		s.Logger.LogAttrs(c.r.Context(), slog.LevelError, "panic in a handler", slog.String("request_id", c.id),
			slog.String("route", c.pattern()), slog.Any("panic", v), slog.String("stack", string(debug.Stack())))
		if c.status == 0 {
			s.write(c, s.problemReply(c, newProblem(codeInternal, "Something went wrong here. It was logged under the request id.")))
		}
	}
	c.release()
	took := time.Since(c.started)
	s.metrics.inFlight.Dec()
	s.metrics.observe(c, took)

	// What strangers send, and refusals by a limit, are counted in metrics; a line for each would let a flood fill the disk.
	level := slog.LevelDebug
	if c.known() && c.status != http.StatusTooManyRequests {
		level = slog.LevelInfo
	}
	if !s.Logger.Enabled(c.r.Context(), level) {
		return
	}
	// The pattern and never the path or the query: both can hold secrets (a handshake's verify token) and anything at all.
	attrs := [8]slog.Attr{
		slog.String("request_id", c.id), slog.String("method", methodLabel(c.r.Method)), slog.String("route", c.pattern()),
		slog.Int("status", c.status), slog.Duration("took", took), slog.Int64("bytes", c.written), slog.String("ip", c.ip.String()),
	}
	n := 7
	if c.Tenant != nil {
		attrs[n] = slog.String("tenant_id", c.Tenant.ID.String())
		n++
	}
	s.Logger.LogAttrs(c.r.Context(), level, "request", attrs[:n]...)
}

// known tells whether the caller has proved who it is. On routes for webhooks the path alone names a channel.
func (c *call) known() bool {
	return c.proved || c.session != nil || c.Operator != nil || c.Tenant != nil && c.route.auth != credentialSignature
}

// unmatched stands for every address that no route has.
const unmatched = "unmatched"

func (c *call) pattern() string {
	if c.route == nil {
		return unmatched
	}
	return c.route.pattern
}

// requestID takes over a caller's id, so that its logs and ours can be joined, if it is harmless in a log and a header.
func requestID(r *http.Request) string {
	if given := r.Header.Get("X-Request-Id"); len(given) >= 8 && len(given) <= 128 {
		ok := true
		for i := range len(given) {
			ch := given[i]
			ok = ok && (ch >= '0' && ch <= '9' || ch >= 'A' && ch <= 'Z' || ch >= 'a' && ch <= 'z' || ch == '-' || ch == '_' || ch == '.')
		}
		if ok {
			return given
		}
	}
	// Ids must differ, not be hard to guess: the runtime's generator costs a tenth of crypto/rand.
	id := [30]byte{'r', 'e', 'q', '_'}
	for i := 4; i < len(id); {
		for bits, n := rand.Uint64(), 0; n < 13; n++ {
			id[i] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"[bits%32]
			bits /= 32
			i++
		}
	}
	return string(id[:])
}
