package http

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/go-chi/chi/v5"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// credential is what a route asks for to know who is calling.
type credential uint8

const (
	credentialNone        credential = iota
	credentialMetrics                // the metrics token or address, checked by the handler
	credentialKey                    // X-Api-Key: a tenant's API key
	credentialKeyOrSecret            // the same; or, as older clients send it, X-Channel-Token: a channel's secret
	credentialSecret                 // Authorization: Bearer, a channel's secret
	credentialToken                  // Authorization: Bearer, a client token
	credentialOperator               // Authorization: Bearer, an operator token
	credentialLegacy                 // X-Channel-Token: a channel's secret, as older clients send it
	credentialSignature              // the channel in the path, and a signature over the body that the handler checks
	credentialAdmin                  // the cookie of an administrator's session
	credentialPortal                 // the cookie of a session of a tenant's user
	credentialPassword               // a password in the form, which the handler throttles and checks
	credentialLink                   // a one-time sign-in link in the path, which the handler checks
)

var credentialNames = [...]string{"none", "metrics", "api_key", "api_key or legacy", "channel_secret", "client_token", "operator_token", "channel_secret (legacy)", "signature",
	"admin_session", "portal_session", "password", "sign_in_link"}

func (c credential) String() string { return credentialNames[c] }

// isSession tells whether the credential is a browser's session.
func (c credential) isSession() bool { return c == credentialAdmin || c == credentialPortal }

// bodyKind is what a route does with a body.
type bodyKind uint8

const (
	bodyNone     bodyKind = iota // never read
	bodyJSON                     // a JSON object
	bodyOptional                 // a JSON object or nothing
	bodyRaw                      // the exact bytes, whatever they are
	bodyForm                     // a form with a file, which the handler reads as it comes
	bodyFields                   // a page's form
)

var bodyNames = [...]string{"-", "json", "json?", "raw", "form", "fields"}

func (b bodyKind) String() string { return bodyNames[b] }

// route is a row of the route table: what a request must pass, and what then answers it.
type route struct {
	method, pattern string
	auth            credential
	scope           tenants.Scopes   // 0: none
	bucket          ratelimit.Bucket // 0: not limited
	body            bodyKind
	maxBody         int64    // bytes
	query           []string // parameters of the query, of routes for operators; see checkQuery
	file            bool     // answers with the bytes of a file of any type

	area        area       // pages: whose
	right       auth.Right // pages: what the person must have the right to; 0: to look
	anyPassword bool       // pages: open to those who have to choose a password first

	handle func(*call) (*reply, error)

	series *routeSeries
}

// countsAddress tells whether the route's limit counts client addresses, and so comes ahead of any credential.
func (rt *route) countsAddress() bool {
	return rt.bucket != 0 && rt.bucket.Info().Subject == ratelimit.SubjectIP
}

// mount builds the router from the table.
func (s *server) mount() http.Handler {
	mux := chi.NewRouter()
	for i := range s.routes {
		rt := &s.routes[i]
		rt.series = s.metrics.series(rt.method, rt.pattern)
		serve := func(w http.ResponseWriter, r *http.Request) { s.serve(w.(*call), r, rt) }
		mux.MethodFunc(rt.method, rt.pattern, serve)
		if rt.method == http.MethodGet {
			mux.MethodFunc(http.MethodHead, rt.pattern, serve) // net/http keeps the body back
		}
	}
	mux.NotFound(func(w http.ResponseWriter, _ *http.Request) {
		c := w.(*call)
		if err := s.admits(c, areaOf(c.r.URL.Path)); err != nil {
			s.refuse(c, err)
			return
		}
		s.refuse(c, newProblem(codeNotFound, "There is nothing at this address."))
	})
	mux.MethodNotAllowed(func(w http.ResponseWriter, r *http.Request) {
		c := w.(*call)
		if err := s.admits(c, areaOf(c.r.URL.Path)); err != nil {
			s.refuse(c, err)
			return
		}
		allow := allowed(mux, r)
		if allow == "" { // a method that no address has, at an address that does not exist
			s.refuse(c, newProblem(codeNotFound, "There is nothing at this address."))
			return
		}
		s.refuse(c, newProblem(codeMethodNotAllowed, "This address answers to %s.", allow).with("Allow", allow))
	})
	return mux
}

// allowed lists the methods that the request's address has routes for.
func allowed(mux chi.Routes, r *http.Request) string {
	path := r.URL.RawPath
	if path == "" {
		path = r.URL.Path
	}
	var methods []string
	for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		if mux.Match(chi.NewRouteContext(), m, path) {
			methods = append(methods, m)
		}
	}
	return strings.Join(methods, ", ")
}

// serve takes a matched request through the guards of its route, in the one order there is, and answers it.
func (s *server) serve(c *call, r *http.Request, rt *route) {
	c.r, c.route = r, rt
	p, err := s.answer(c, rt)
	if err != nil {
		s.refuse(c, err)
		return
	}
	if p != nil { // nil: the handler has written by itself
		s.write(c, p)
	}
}

func (s *server) answer(c *call, rt *route) (*reply, error) {
	kind := rt.credentialOf(c.r.Header)
	c.deprecated = kind == credentialLegacy
	if rt.area != areaNone {
		if err := s.admits(c, rt.area); err != nil {
			return nil, err
		}
		if err := s.fromOurPages(c.r); err != nil {
			return nil, err
		}
	}
	if rt.countsAddress() {
		if err := s.spend(c, rt.bucket); err != nil {
			return nil, err
		}
	}
	if err := s.authenticate(c, rt, kind); err != nil {
		return nil, err
	}
	if rt.bucket != 0 && !rt.countsAddress() {
		if err := s.spend(c, rt.bucket); err != nil {
			return nil, err
		}
	}
	if rt.auth.isSession() {
		if err := s.loadSession(c, rt); err != nil {
			return nil, err
		}
	}
	s.noteUse(c)
	if rt.auth == credentialKey && c.Key == nil {
		return nil, newProblem(codeKeyRequired, "This address needs a tenant's API key in the header X-Api-Key; a channel's secret is good, but not for this.")
	}
	if rt.scope != 0 && !c.Scopes().Has(rt.scope) {
		return nil, newProblem(codeInsufficientScope, "This request needs a credential with the scope %q.", scopeName(rt.scope))
	}
	if rt.auth == credentialOperator {
		if err := rt.checkQuery(c); err != nil {
			return nil, err
		}
	}
	if !rt.file && rt.area == areaNone && !acceptsJSON(c.r.Header) && rt.auth != credentialNone && rt.auth != credentialMetrics && rt.auth != credentialSignature {
		return nil, newProblem(codeNotAcceptable, "This API answers in JSON, which the Accept header excludes.")
	}
	if rt.body == bodyForm { // which takes as long as it has bytes
		return rt.handle(c)
	}
	ctx, cancel := context.WithTimeout(c.ctx(), s.HandlerTimeout)
	defer cancel()
	c.r = c.r.WithContext(ctx)
	if rt.body != bodyNone {
		if err := s.readBody(c, rt); err != nil {
			return nil, err
		}
	}
	return rt.handle(c)
}

// checkQuery refuses parameters that the route does not have, as unknown members of bodies are, and those given twice: what an
// operator meant to narrow must not reach everything.
func (rt *route) checkQuery(c *call) error {
	if c.r.URL.RawQuery == "" {
		return nil
	}
	q, err := c.query()
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(q)) {
		switch quoted := strconv.QuoteToASCII(truncate(name, 50)); {
		case len(rt.query) == 0:
			return newProblem(codeInvalidParameter, "Invalid %s: this address takes no parameters.", quoted)
		case !slices.Contains(rt.query, name):
			return newProblem(codeInvalidParameter, "Invalid %s: this address takes the parameters %s.", quoted, strings.Join(rt.query, ", "))
		case len(q[name]) > 1:
			return newProblem(codeInvalidParameter, "Invalid %s: it is given more than once.", quoted)
		}
	}
	return nil
}

func (s *server) noteUse(c *call) {
	switch {
	case s.Usage == nil:
	case c.Key != nil:
		s.Usage.Key(c.Key.ID, c.started)
	case c.Operator != nil:
		s.Usage.OperatorToken(c.Operator.ID, c.started)
	}
}

func scopeName(s tenants.Scopes) string {
	if s == tenants.ScopeWrite {
		return "write"
	}
	return "read"
}

// credentialOf is the credential by which a request asks, out of those that the route takes. A channel's secret in place of an
// API key is looked at also where it will not do: that is for its holder to hear, and not for strangers.
func (rt *route) credentialOf(h http.Header) credential {
	if rt.auth != credentialKey && rt.auth != credentialKeyOrSecret {
		return rt.auth
	}
	if h.Get("X-Api-Key") == "" && h.Get("X-Channel-Token") != "" {
		return credentialLegacy
	}
	return credentialKey
}

// authenticate finds out who is calling, from memory.
func (s *server) authenticate(c *call, rt *route, kind credential) error {
	switch kind {
	case credentialNone, credentialMetrics, credentialPassword, credentialLink:
		return nil
	case credentialAdmin, credentialPortal:
		return s.parseSession(c, rt.area)
	case credentialSignature:
		return s.findChannel(c)
	}
	text, err := credentialText(c.r.Header, kind)
	if err != nil {
		return err
	}
	return s.identify(c, func() (auth.Caller, error) {
		switch kind {
		case credentialKey:
			return s.auth.APIKey(c.started, text)
		case credentialOperator:
			return s.auth.Operator(c.started, text)
		case credentialToken:
			return s.auth.ClientToken(c.started, text)
		default:
			return s.auth.ChannelSecret(text)
		}
	}, func(err error) error {
		if kind == credentialSecret && auth.LooksLikeToken(text) && errors.Is(err, auth.ErrUnknown) {
			return newProblem(codeSecretRequired, "Token generation requires the channel's secret, not a token.")
		}
		if kind == credentialOperator && s.Refusals != nil {
			s.Refusals.OperatorToken(s.Directory, text, err, c.ip, c.id)
		}
		p, _ := problemOf(err)
		if kinds[p.code].Status == http.StatusUnauthorized {
			p = p.with("Www-Authenticate", challenge(kind))
		}
		return p
	})
}

// findChannel finds the channel that the path names, for routes that are authenticated by a signature.
func (s *server) findChannel(c *call) error {
	id, err := parseID(c.param("channel_id"))
	if err != nil {
		// Text that can't be an id can't be a guess at one.
		return newProblem(codeMalformedID, "The channel's id in the address is not a UUID.")
	}
	return s.identify(c, func() (auth.Caller, error) { return s.auth.Channel(id) }, func(err error) error {
		switch {
		case errors.Is(err, auth.ErrUnknown):
			return newProblem(codeNotFound, "There is no such channel.")
		case errors.Is(err, auth.ErrChannelInactive):
			// 400 as in the documented API, where the status of other refusals of a webhook is 400 too.
			return newProblem(codeChannelInactive, "The channel is inactive.").as(http.StatusBadRequest)
		}
		p, _ := problemOf(err)
		return p
	})
}

// identify runs a lookup in the directory and keeps whom it found. Failures that a guesser makes are counted by address;
// one that may only be newer than the directory is looked up once more after an early poll, if there is one to have.
func (s *server) identify(c *call, lookup func() (auth.Caller, error), explain func(error) error) (err error) {
	if c.Caller, err = lookup(); err == nil {
		return nil
	}
	refund := func() {}
	if auth.IsStranger(err) {
		var refused error
		if refund, refused = s.stranger(c, nil); refused != nil {
			return refused
		}
	}
	if auth.MayBeNewer(err) && s.Directory.Miss(c.ctx()) {
		if c.Caller, err = lookup(); err == nil || !auth.IsStranger(err) {
			refund()
		}
		if err == nil {
			return nil
		}
	}
	return explain(err)
}

// credentialText takes the credential out of the headers. A missing one is not a guess and is not counted as one.
func credentialText(h http.Header, kind credential) (string, error) {
	if name, what := ownHeader(kind); name != "" {
		if text := h.Get(name); text != "" {
			return text, nil
		}
		return "", newProblem(codeMissingCredential, "This address needs %s in the header %s.", what, name).
			with("Www-Authenticate", challenge(kind))
	}
	scheme, text, _ := strings.Cut(h.Get("Authorization"), " ")
	if text = strings.TrimSpace(text); strings.EqualFold(scheme, "Bearer") && text != "" {
		return text, nil
	}
	what := map[credential]string{credentialSecret: "a channel's secret", credentialToken: "a client token", credentialOperator: "an operator token"}[kind]
	return "", newProblem(codeMissingCredential, "This address needs %s in the header Authorization: Bearer.", what).
		with("Www-Authenticate", challenge(kind))
}

// ownHeader is the header of a credential that does not come in Authorization.
func ownHeader(kind credential) (name, what string) {
	switch kind {
	case credentialKey:
		return "X-Api-Key", "a tenant's API key"
	case credentialLegacy:
		return "X-Channel-Token", "a channel's secret"
	}
	return "", ""
}

// challenge is the WWW-Authenticate header that a 401 must have (RFC 9110, 15.5.2).
func challenge(kind credential) string {
	switch name, _ := ownHeader(kind); {
	case name != "":
		return `ApiKey realm="converger", header="` + name + `"`
	case kind == credentialSignature:
		return `Signature realm="converger"`
	}
	return `Bearer realm="converger"`
}

// acceptsJSON tells whether the Accept header leaves room for JSON. Anything that can't be understood does.
func acceptsJSON(h http.Header) bool {
	values := h["Accept"]
	if len(values) == 0 {
		return true
	}
	for _, line := range values {
		for part := range strings.SplitSeq(line, ",") {
			name, params, _ := strings.Cut(part, ";")
			name = strings.ToLower(strings.TrimSpace(name))
			if refused(params) {
				continue
			}
			if name == "" || name == "*/*" || name == "application/*" || strings.HasSuffix(name, "json") {
				return true
			}
		}
	}
	return false
}

// refused tells whether the parameters of an entry of Accept say that it is not wanted (q=0).
func refused(params string) bool {
	q := strings.ReplaceAll(params, " ", "")
	return strings.HasPrefix(q, "q=0") && strings.Trim(q[3:], ".0") == ""
}

// The methods below fill in a copy of a row that a resource's rows have in common.

func (rt route) at(pattern string, handle func(*call) (*reply, error)) route {
	rt.pattern, rt.handle = pattern, handle
	return rt
}

func (rt route) takes(b bodyKind) route {
	rt.body = b
	return rt
}

func (rt route) limitedBy(b ratelimit.Bucket) route {
	rt.bucket = b
	return rt
}

func (rt route) by(method string) route {
	rt.method = method
	return rt
}

func (rt route) of(kind credential) route {
	rt.auth = kind
	return rt
}

func (rt route) upTo(bytes int64) route {
	rt.maxBody = bytes
	return rt
}

func (rt route) givesFile() route {
	rt.file = true
	return rt
}
