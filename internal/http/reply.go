package http

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
)

const (
	typeJSON    = "application/json; charset=utf-8"
	typeProblem = "application/problem+json"
	typeHTML    = "text/html; charset=utf-8"
	typeText    = "text/plain; charset=utf-8"
)

// reply is a whole answer. Handlers make it and the server writes it, so that nothing is sent before it is known to be
// complete.
type reply struct {
	status      int
	contentType string // "" with no body
	body        []byte
	header      [][2]string // further headers, in canonical form
}

// with adds a header, named in canonical form.
func (p *reply) with(name, value string) *reply {
	p.header = append(p.header, [2]string{name, value})
	return p
}

// jsonReply marshals v.
func jsonReply(status int, v any) (*reply, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("http: encode answer: %w", err)
	}
	return &reply{status: status, contentType: typeJSON, body: body}, nil
}

// dataReply is {"data": v}, the envelope of a single object.
func dataReply(status int, v any) (*reply, error) {
	return jsonReply(status, struct {
		Data any `json:"data"`
	}{v})
}

// pageMeta is the `meta` member of a keyset page.
type pageMeta struct {
	NextCursor *string `json:"next_cursor"`
	HasMore    bool    `json:"has_more"`
	Limit      int     `json:"limit"`
}

// pageReply is {"data": [...], "meta": {...}} with a Link to the next page (RFC 8288). next is "" on the last page.
func pageReply(u *url.URL, data any, limit int, next string) (*reply, error) {
	meta := pageMeta{Limit: limit}
	if next != "" {
		meta.NextCursor, meta.HasMore = &next, true
	}
	p, err := jsonReply(http.StatusOK, struct {
		Data any      `json:"data"`
		Meta pageMeta `json:"meta"`
	}{data, meta})
	if err != nil || next == "" {
		return p, err
	}
	return p.with("Link", nextLink(u, "cursor", next)), nil
}

// nextLink is the Link header to the address u with one query parameter replaced.
func nextLink(u *url.URL, name, value string) string {
	q := u.Query()
	q.Set(name, value)
	// Path only: whichever host and scheme the caller used stays right, and none is taken from its headers.
	return "<" + u.EscapedPath() + "?" + q.Encode() + `>; rel="next"`
}

// problem is an RFC 9457 problem, and the error by which handlers and guards refuse a request.
type problem struct {
	code   code
	status int // 0: the catalogue's
	detail string
	fields []fieldProblem
	header [][2]string
	extra  *limitDetail
}

// fieldProblem is an entry of `errors`.
type fieldProblem struct {
	Pointer string `json:"pointer"` // fragment form: "#/text"
	Code    string `json:"code"`
	Detail  string `json:"detail"`
}

// limitDetail is what a 429 says beyond the common members.
type limitDetail struct {
	Bucket       string `json:"bucket"`
	Limit        uint64 `json:"limit"`
	ScaleMS      int64  `json:"scale_ms"`
	RetryAfterMS int64  `json:"retry_after_ms"`
}

// problemBody is the order in which members are written.
type problemBody struct {
	Type      string         `json:"type"`
	Title     string         `json:"title"`
	Status    int            `json:"status"`
	Detail    string         `json:"detail"`
	Code      code           `json:"code"`
	RequestID string         `json:"request_id"`
	Errors    []fieldProblem `json:"errors,omitempty"`
	*limitDetail
}

func newProblem(c code, format string, args ...any) *problem {
	return &problem{code: c, detail: fmt.Sprintf(format, args...)}
}

// Error implements error; the text is also what the caller sees.
func (p *problem) Error() string { return string(p.code) + ": " + p.detail }

func (p *problem) as(status int) *problem {
	p.status = status
	return p
}

func (p *problem) with(name, value string) *problem {
	p.header = append(p.header, [2]string{name, value})
	return p
}

// retryAfter adds Retry-After in seconds.
func (p *problem) retryAfter(seconds int64) *problem {
	return p.with("Retry-After", strconv.FormatInt(seconds, 10))
}

// reply renders the problem; base is the public URL without a slash at its end.
func (p *problem) reply(base, requestID string) *reply {
	kind := kinds[p.code]
	status := p.status
	if status == 0 {
		status = kind.Status
	}
	body, err := json.Marshal(problemBody{
		Type: base + "/problems/" + string(p.code), Title: kind.Title, Status: status, Detail: p.detail,
		Code: p.code, RequestID: requestID, Errors: p.fields, limitDetail: p.extra,
	})
	if err != nil { // strings and numbers only: can't fail
		body = []byte(`{"status":500,"code":"internal_error"}`)
	}
	return &reply{
		status: status, contentType: typeProblem, body: body,
		header: append(p.header, [2]string{"Cache-Control", "no-store"}),
	}
}
