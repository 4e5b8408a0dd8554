package http

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"converger/internal/http/openapi"
	"converger/internal/ratelimit"
)

// registerDescriptionRoutes: what this API is, for programs and for people.
func (s *server) registerDescriptionRoutes() {
	s.register(route{method: http.MethodGet}.at("/openapi.json", s.showOpenAPI))
	s.register(route{method: http.MethodGet, area: areaPublic}.at("/docs", s.showDocs))
}

// loadDescription reads the files of package openapi once: they are part of the program and never change.
var loadDescription = sync.OnceValues(openapi.Load)

// description is the API as it is described to others. The page is made when somebody asks for it first.
type description struct {
	doc  *openapi.Document
	text []byte // JSON
	etag string
	page func() (*reply, error)
}

// describe makes the description of the routes.
func (s *server) describe() (*description, error) {
	source, err := loadDescription()
	if err != nil {
		return nil, err
	}
	o := openapi.Options{Version: s.Version, ServerURL: s.PublicURL, Catalogue: map[string]openapi.Problem{}}
	for i := range s.routes {
		// Pages that need a session are for people and change with them: no program should go by them.
		if a := s.routes[i].area; a != areaAdmin && a != areaPortal {
			o.Routes = append(o.Routes, s.routes[i].described())
		}
	}
	for _, k := range catalogue {
		o.Catalogue[string(k.Code)] = problemOfKind(k.Code, 0)
	}
	d := &description{}
	if d.doc, err = source.Document(o); err != nil {
		return nil, err
	}
	if d.text, err = d.doc.JSON(); err != nil {
		return nil, err
	}
	sum := sha256.Sum256(d.text)
	d.etag = `"` + hex.EncodeToString(sum[:16]) + `"`
	d.page = sync.OnceValues(func() (*reply, error) { return s.pages.whole("docs.html", newDocsPage(d.doc)) })
	return d, nil
}

// query is the names of the parameters that a route takes in its query, as it is described; the description is checked against what routes
// do by every request of the tests.
func (d *description) query(rt *route) (names []string) {
	if item, ok := d.doc.Paths.Get(rt.pattern); ok {
		if op, ok := item.Get(strings.ToLower(rt.method)); ok {
			for _, p := range op.Parameters {
				if p.In == "query" {
					names = append(names, p.Name)
				}
			}
		}
	}
	return names
}

func (s *server) showOpenAPI(c *call) (*reply, error) {
	p := &reply{status: http.StatusOK, contentType: typeJSON, body: s.description.text}
	if matches(c.r.Header, s.description.etag) {
		p = &reply{status: http.StatusNotModified}
	}
	return p.with("Etag", s.description.etag).with("Cache-Control", "public, max-age=300").with("Access-Control-Allow-Origin", "*"), nil
}

func (s *server) showDocs(*call) (*reply, error) { return s.description.page() }

// matches tells whether the caller's copy, of which it sends the entity tag, is current (RFC 9110, 13.1.2).
func matches(h http.Header, etag string) bool {
	for _, line := range h["If-None-Match"] {
		for given := range strings.SplitSeq(line, ",") {
			if given = strings.TrimSpace(given); given == "*" || strings.TrimPrefix(given, "W/") == etag {
				return true
			}
		}
	}
	return false
}

// credentialSchemes are the names that the description gives to credentials.
var credentialSchemes = map[credential]string{
	credentialNone: "", credentialMetrics: "metrics", credentialKey: "api_key", credentialKeyOrSecret: "api_key", credentialSecret: "channel_secret", credentialToken: "client_token",
	credentialOperator: "operator_token", credentialLegacy: "channel_token", credentialSignature: "signature",
}

// bodyTypes are the media types of bodies, and what the description calls their kinds.
var bodyTypes = map[bodyKind]struct{ kind, media string }{
	bodyJSON: {"json", "application/json"}, bodyOptional: {"json", "application/json"}, bodyRaw: {"raw", "application/octet-stream"},
	bodyForm: {"form", "multipart/form-data"},
}

// described is what the description says of the route by itself.
func (rt *route) described() openapi.Route {
	body, known := bodyTypes[rt.body]
	if !known && rt.body != bodyNone { // so that it is missed in the description, by its name
		body.kind, body.media = rt.body.String(), "application/octet-stream"
	}
	credential, known := credentialSchemes[rt.auth]
	if !known {
		credential = rt.auth.String()
	}
	d := openapi.Route{
		Method: rt.method, Pattern: rt.pattern, Credential: credential, Body: body.kind, BodyType: body.media,
		OptionalBody: rt.body == bodyOptional, MaxBody: rt.maxBody,
	}
	if rt.auth == credentialKeyOrSecret {
		d.OlderCredential = credentialSchemes[credentialLegacy]
	}
	if strings.Contains(rt.pattern, "{secret}") {
		d.Credential = "" // the address is one
	}
	if rt.scope != 0 {
		d.Scope = scopeName(rt.scope)
	}
	if rt.bucket != 0 {
		info := rt.bucket.Info()
		subject := subjectWords[info.Subject]
		if rt.auth == credentialToken && info.Subject == ratelimit.SubjectCaller {
			subject = "user"
		}
		d.Bucket, d.Limit = info.Name, fmt.Sprintf("%s for each %s", info.Default, subject)
	}
	for _, c := range rt.guardProblems() {
		d.Problems = append(d.Problems, problemOfKind(c, 0))
	}
	if rt.auth == credentialSignature {
		d.Problems = append(d.Problems, problemOfKind(codeChannelInactive, http.StatusBadRequest)) // as findChannel says
	}
	return d
}

var subjectWords = map[ratelimit.Subject]string{
	ratelimit.SubjectTenant: "tenant", ratelimit.SubjectChannel: "channel", ratelimit.SubjectIP: "client address", ratelimit.SubjectAccount: "account",
	ratelimit.SubjectCaller: "tenant", ratelimit.SubjectSession: "session", ratelimit.SubjectOperator: "operator token",
}

// guardProblems are the codes with which a request can end before its handler runs, and those that any handler behind the
// same guards can answer: the database may be away, its time may be over.
func (rt *route) guardProblems() []code {
	codes := []code{codeInternal}
	if !isProbe(rt.pattern) {
		codes = append(codes, codeAddressDenied)
	}
	add := func(more ...code) { codes = append(codes, more...) }
	switch rt.auth {
	case credentialNone:
	case credentialMetrics:
		add(codeInvalidCredential, codeRateLimited)
	case credentialSignature:
		add(codeNotFound, codeTenantSuspended, codeRateLimited, codeUnavailable, codeRequestTimeout)
	default:
		add(codeMissingCredential, codeInvalidCredential, codeRateLimited, codeNotAcceptable, codeUnavailable, codeRequestTimeout)
		if rt.auth == credentialKey || rt.auth == credentialKeyOrSecret || rt.auth == credentialOperator || rt.auth == credentialToken {
			add(codeCredentialExpired, codeCredentialRevoked)
		}
		if rt.auth == credentialOperator {
			add(codeInvalidParameter)
		} else {
			add(codeTenantSuspended)
		}
		if rt.auth == credentialSecret || rt.auth == credentialToken || rt.auth == credentialLegacy || rt.auth == credentialKey || rt.auth == credentialKeyOrSecret {
			add(codeChannelInactive) // of API keys too: a channel's secret may come in their place
		}
		if rt.auth == credentialKey {
			add(codeKeyRequired)
		}
	}
	if rt.scope != 0 {
		add(codeInsufficientScope)
	}
	switch rt.body {
	case bodyNone:
	case bodyJSON, bodyOptional:
		add(codeMalformedBody, codeValidationFailed, codeUnsupportedMedia, codeBodyTooLarge, codeRequestTimeout, codeOverloaded)
	case bodyRaw:
		add(codeMalformedBody, codeUnsupportedMedia, codeBodyTooLarge, codeRequestTimeout, codeOverloaded)
	case bodyForm:
		add(codeMalformedUpload, codeMalformedBody, codeValidationFailed, codeUnsupportedMedia, codeBodyTooLarge, codeRequestTimeout, codeOverloaded)
	}
	slices.Sort(codes)
	return slices.Compact(codes)
}

// problemOfKind is an entry of the catalogue for the description; status 0 is the catalogue's.
func problemOfKind(c code, status int) openapi.Problem {
	kind := kinds[c]
	if status == 0 {
		status = kind.Status
	}
	return openapi.Problem{Code: string(c), Status: status, Title: kind.Title}
}
