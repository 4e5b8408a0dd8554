package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	apphttp "converger/internal/http"
)

// managementFlags say which hub to ask, by whose token, and how to show what it answers.
type managementFlags struct {
	demoFlags
	Server    string `help:"Address of the hub. Default: CONVERGER_URL of the environment, then the demo's." aliases:"base-url" placeholder:"https://hub.example.com"`
	TokenFile string `help:"File with an operator token. Default: CONVERGER_TOKEN, or the file in CONVERGER_TOKEN_FILE, then the demo's." type:"path" placeholder:"FILE"`
	JSON      bool   `name:"json" help:"Print the hub's answer as JSON."`
}

// guard is the flag of commands that change a setting which has an entity tag. The tag goes with every change that the command
// asks for.
type guard struct {
	IfMatch *string `help:"Change it only if nobody has since it was shown with this ETAG; without it, whatever it is by now." placeholder:"ETAG"`
}

// AfterApply is called by kong when the command line is read.
func (g guard) AfterApply(e *env) error {
	if g.IfMatch == nil {
		return nil
	}
	tag := strings.Trim(*g.IfMatch, `"`)
	if tag == "" { // of a script whose first command has failed
		return errors.New("--if-match is empty: pass the ETAG that the setting was shown with, or leave the flag out to change it whatever it is by now")
	}
	e.ifMatch = `"` + tag + `"`
	return nil
}

// hubClient calls the management API of a hub as anybody with a token can.
type hubClient struct {
	e     *env
	base  string // without a slash at its end
	token string
	json  bool
	http  *http.Client
}

// newHTTPClient makes a client that follows no redirect: with one a DELETE becomes a GET, which succeeds, and a token may go
// where nobody meant it to.
func newHTTPClient() *http.Client {
	return &http.Client{Timeout: 30 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// members are an object of an answer, or of a body.
type members = map[string]any

// connect finds out whom to ask. It calls nobody.
func (f managementFlags) connect(e *env) (*hubClient, error) {
	d, err := f.read()
	if err != nil {
		return nil, err
	}
	h := &hubClient{e: e, json: f.JSON, http: newHTTPClient()}
	h.base = strings.TrimRight(cmp.Or(f.Server, e.getenv("CONVERGER_URL"), d.BaseURL), "/")
	h.token = e.getenv("CONVERGER_TOKEN")
	if file := cmp.Or(f.TokenFile, e.getenv("CONVERGER_TOKEN_FILE")); f.TokenFile != "" || h.token == "" && file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, fmt.Errorf("operator token: %w", err)
		}
		h.token = strings.TrimSpace(string(text))
	}
	if h.token == "" && h.base == strings.TrimRight(d.BaseURL, "/") { // the demo's token is for the demo alone
		h.token = d.ManagementToken
	}
	switch {
	case h.base == "":
		return nil, errors.New("which hub? Pass --server https://… or set CONVERGER_URL, or start `server dev` in this folder")
	case !strings.HasPrefix(h.base, "http://") && !strings.HasPrefix(h.base, "https://"):
		return nil, fmt.Errorf("the hub's address must begin with http:// or https://, not %q", h.base)
	case strings.ContainsFunc(h.token, func(r rune) bool { return r <= ' ' || r > '~' }):
		return nil, errors.New("the operator token is not one line without blanks: is it that which `server operator create` has printed?")
	case h.token == "":
		return nil, errors.New("by whose token? Set CONVERGER_TOKEN or pass --token-file; `server operator create` makes the first token, in the database")
	}
	return h, nil
}

// problem is what the hub answers when it refuses.
type problem struct {
	Title     string `json:"title"`
	Detail    string `json:"detail"`
	Code      string `json:"code"`
	RequestID string `json:"request_id"`
	Errors    []struct {
		Pointer string `json:"pointer"`
		Detail  string `json:"detail"`
	} `json:"errors"`

	status int
}

// Error says what was wrong and what to do next. What came from the hub is shown as printable text.
func (p *problem) Error() string {
	var b strings.Builder
	detail, _, _ := strings.Cut(p.Detail, ` If you mean it, send "force"`) // here it is a flag
	fmt.Fprintf(&b, "%s: %s", p.Title, detail)
	for _, f := range p.Errors {
		b.WriteString("\n  ")
		if name := strings.TrimLeft(f.Pointer, "#/"); name != "" {
			b.WriteString(name + ": ")
		}
		b.WriteString(strings.ReplaceAll(f.Detail, `send "force": true`, "pass --force"))
	}
	next := apphttp.Remedy(p.Code)
	switch p.Code {
	case "confirmation_required":
		next = "If you mean it, and there is another way in, pass --force."
	case "precondition_failed":
		next = "Show it again and look at what has changed. To go on, repeat the command with the new ETAG; without --if-match it is changed in any case."
	}
	if next != "" && p.Code != "validation_failed" { // its remedy is to look at the list above
		b.WriteString("\n" + next)
	}
	if p.RequestID != "" {
		fmt.Fprintf(&b, "\n(request %s)", p.RequestID)
	}
	return printable([]byte(b.String()))
}

// Exit codes beside 1, for anything else.
const (
	exitUsage       = 2 // the command line was not understood
	exitRefused     = 3 // the hub refused; the same again will not succeed
	exitUnavailable = 4 // the hub can't be reached, or is busy; the same again may succeed later
)

// ExitCode tells scripts whether it is worth trying again.
func (p *problem) ExitCode() int {
	if p.status >= 500 || p.status == http.StatusTooManyRequests || p.status == http.StatusRequestTimeout {
		return exitUnavailable
	}
	return exitRefused
}

// unreachable is a hub that did not answer.
type unreachable struct {
	err  error
	base string
}

func (u *unreachable) Error() string {
	return fmt.Sprintf("%v\nIs the hub running at %s?", u.err, u.base)
}
func (u *unreachable) Unwrap() error { return u.err }
func (u *unreachable) ExitCode() int { return exitUnavailable }

// pageMeta is the `meta` of a list.
type pageMeta struct {
	NextCursor string `json:"next_cursor"`
	Watermark  string `json:"watermark"` // in place of the cursor, of activities
	HasMore    bool   `json:"has_more"`
}

// envelope is the frame of every answer but an empty one.
type envelope struct {
	Data json.RawMessage `json:"data"`
	Meta pageMeta        `json:"meta"`

	etag string // without quotes; "" for none
}

// errNotAHub is the error of an answer that no hub gives.
func (h *hubClient) errNotAHub() error {
	return fmt.Errorf("%s does not answer as a hub does; is it the right address?", h.base)
}

// call asks for one thing. in is sent as JSON, nil for no body. The answer has data, unless something was to be deleted.
func (h *hubClient) call(method, path string, query url.Values, in any) (envelope, error) {
	var answer envelope
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return answer, err
		}
		body = bytes.NewReader(b)
	}
	target := h.base + "/api/v1/management" + path
	if len(query) > 0 {
		target += "?" + query.Encode()
	}
	req, err := http.NewRequestWithContext(h.e.ctx, method, target, body)
	if err != nil {
		return answer, err
	}
	req.Header.Set("Authorization", "Bearer "+h.token)
	req.Header.Set("User-Agent", "converger/"+version)
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if method != http.MethodGet && h.e.ifMatch != "" {
		req.Header.Set("If-Match", h.e.ifMatch)
	}
	res, err := h.http.Do(req)
	if err != nil {
		return answer, &unreachable{err, h.base}
	}
	defer res.Body.Close()
	text, err := io.ReadAll(io.LimitReader(res.Body, 64<<20))
	if err != nil {
		return answer, &unreachable{err, h.base}
	}
	if res.StatusCode >= 300 {
		p := problem{status: res.StatusCode}
		if json.Unmarshal(text, &p) != nil || p.Title == "" {
			p.Title, p.Detail = "The hub answered "+res.Status, "and not as a hub does; is "+h.base+" the right address?"
			if to, err := res.Location(); err == nil {
				p.Detail = "it points to " + strings.TrimSuffix(to.String(), req.URL.RequestURI()) + "; is that the address to use?"
			}
		}
		return answer, &p
	}
	answer.etag = strings.Trim(res.Header.Get("Etag"), `"`)
	if res.StatusCode == http.StatusNoContent && method == http.MethodDelete {
		return answer, nil
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return answer, h.errNotAHub()
	}
	switch string(answer.Data) {
	case "", "null", "{}":
		return answer, h.errNotAHub()
	}
	return answer, nil
}

// get asks for one object.
func (h *hubClient) get(path string) (members, error) { return h.do(http.MethodGet, path, nil) }

// etagMember is where do puts the entity tag of a setting.
const etagMember = "etag"

// do asks for one object, or for a change that answers with one. A setting's entity tag becomes a member of it.
func (h *hubClient) do(method, path string, in any) (members, error) {
	answer, err := h.call(method, path, nil, in)
	if err != nil {
		return nil, err
	}
	o := members{}
	if decode(answer.Data, &o) != nil {
		return nil, h.errNotAHub()
	}
	if answer.etag != "" {
		o[etagMember] = answer.etag
	}
	return o, nil
}

// remove deletes one thing, of which nothing is left to be shown.
func (h *hubClient) remove(path string, query url.Values) error {
	_, err := h.call(http.MethodDelete, path, query, nil)
	return err
}

// decode keeps the digits of numbers.
func decode(data json.RawMessage, into any) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(into); err != nil {
		return fmt.Errorf("the hub's answer: %w", err)
	}
	return nil
}

// maxPage is how many items the hub puts on a page at most.
const maxPage = 500

// list follows the pages of a list until it has limit items, 0: all.
func (h *hubClient) list(path string, query url.Values, limit int) (items []members, more bool, err error) {
	if query == nil {
		query = url.Values{}
	}
	items = []members{} // an empty list is [] in JSON
	for {
		size := maxPage
		if limit > 0 {
			size = min(size, limit-len(items))
		}
		query.Set("limit", strconv.Itoa(size))
		answer, err := h.call(http.MethodGet, path, query, nil)
		if err != nil {
			return nil, false, err
		}
		var page []members
		if decode(answer.Data, &page) != nil {
			return nil, false, h.errNotAHub()
		}
		items = append(items, page...)
		if more = answer.Meta.HasMore; !more || limit > 0 && len(items) >= limit {
			return items, more, nil
		}
		switch {
		case answer.Meta.Watermark != "": // activities
			query.Set("watermark", answer.Meta.Watermark)
		case answer.Meta.NextCursor != "":
			query.Set("cursor", answer.Meta.NextCursor)
		default:
			return nil, false, h.errNotAHub()
		}
	}
}

// whole reads a list that has no pages.
func (h *hubClient) whole(path string) ([]members, error) {
	answer, err := h.call(http.MethodGet, path, nil, nil)
	if err != nil {
		return nil, err
	}
	items := []members{} // an empty list is [] in JSON
	return items, decode(answer.Data, &items)
}

// tenantID finds a tenant's id by what was typed: an id, or a name.
func (h *hubClient) tenantID(typed string) (string, error) {
	if isID(typed) {
		return typed, nil
	}
	found, _, err := h.list("/tenants", url.Values{"name": {typed}}, 1)
	if err != nil {
		return "", err
	}
	if len(found) == 0 {
		return "", &problem{status: http.StatusNotFound, Title: "Not found",
			Detail: fmt.Sprintf("no tenant has the name or id %q; `server tenant list` shows them", typed)}
	}
	return cell(found[0], "id"), nil
}

// tenantPath is the address of a tenant, by its id or name, or of what is below it.
func (h *hubClient) tenantPath(typed string, below ...string) (string, error) {
	id, err := h.tenantID(typed)
	if err != nil {
		return "", err
	}
	path := "/tenants/" + url.PathEscape(id)
	for _, part := range below {
		path += "/" + url.PathEscape(part)
	}
	return path, nil
}

// column is a column of a table: its title, and the member, or the path of members with dots, that it shows.
type column struct{ title, member string }

// showList prints a list as a table, or as JSON.
func (h *hubClient) showList(items []members, more bool, none string, columns ...column) error {
	if h.json {
		return h.showJSON(items)
	}
	if len(items) == 0 {
		fmt.Fprintln(h.e.stdout, none)
		return nil
	}
	w := tabwriter.NewWriter(h.e.stdout, 0, 4, 2, ' ', 0)
	row := func(text func(column) string) {
		cells := make([]string, len(columns))
		for i, c := range columns {
			cells[i] = text(c)
		}
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	row(func(c column) string { return c.title })
	for _, o := range items {
		row(func(c column) string { return cell(o, c.member) })
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if more {
		fmt.Fprintln(h.e.stderr, "There are more; narrow the list or raise --limit (0: all).")
	}
	return nil
}

// show prints one object, a line for each of the columns and for its entity tag, or as JSON.
func (h *hubClient) show(o members, columns ...column) error {
	if h.json {
		return h.showJSON(o)
	}
	w := tabwriter.NewWriter(h.e.stdout, 0, 4, 2, ' ', 0)
	for _, c := range columns {
		fmt.Fprintf(w, "%s\t%s\n", c.title, cell(o, c.member))
	}
	if o[etagMember] != nil {
		fmt.Fprintf(w, "ETAG\t%s\n", cell(o, etagMember))
	}
	return w.Flush()
}

// done says what a change has come to, or prints the object in JSON.
func (h *hubClient) done(o members, format string, args ...any) error {
	if h.json && o != nil {
		return h.showJSON(o)
	}
	fmt.Fprintf(h.e.stdout, format+"\n", args...)
	return nil
}

// reveal prints a secret that is shown this once: what it is on standard error, and alone on standard output, for scripts.
func (h *hubClient) reveal(o members, member, format string, args ...any) error {
	if text, _ := o[member].(string); text == "" {
		return h.errNotAHub()
	}
	if h.json {
		return h.showJSON(o)
	}
	fmt.Fprintf(h.e.stderr, format+" It is shown this once:\n", args...)
	fmt.Fprintln(h.e.stdout, cell(o, member))
	return nil
}

func (h *hubClient) showJSON(v any) error {
	enc := json.NewEncoder(h.e.stdout)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// cell is a member as a table shows it: one line, whatever came from outside; a dash for nothing.
func cell(o members, member string) string {
	var v any = o
	for name := range strings.SplitSeq(member, ".") {
		inner, _ := v.(members)
		v = inner[name]
	}
	switch v := v.(type) {
	case nil:
		return "–"
	case string:
		if v == "" {
			return "–"
		}
		if at, err := time.Parse(time.RFC3339Nano, v); err == nil {
			return at.UTC().Format(time.RFC3339)
		}
		return oneLine(v)
	case []any:
		parts := make([]string, len(v))
		for i, x := range v {
			parts[i] = oneLine(fmt.Sprint(x))
		}
		return cmp.Or(strings.Join(parts, ","), "–")
	case members:
		if len(v) == 0 {
			return "–"
		}
		b, err := json.Marshal(v)
		if err != nil {
			return "?"
		}
		return oneLine(string(b))
	default:
		return fmt.Sprint(v)
	}
}

// oneLine is printable text without line breaks and tabs.
func oneLine(s string) string {
	return strings.Join(strings.FieldsFunc(printable([]byte(s)), func(r rune) bool { return r == '\n' || r == '\t' }), " ")
}

// printable shows bytes from outside on a terminal: what could steer it is escaped.
func printable(b []byte) string {
	return strings.Map(func(r rune) rune {
		if r == '\n' || r == '\t' || unicode.IsPrint(r) {
			return r
		}
		return unicode.ReplacementChar
	}, string(b))
}

// each does the same for several things, and goes on behind one that fails. Its error names the things that failed.
func each[T any](things []T, do func(T) error) error {
	var all error
	for _, x := range things {
		if err := do(x); err != nil {
			all = errors.Join(all, fmt.Errorf("%v: %w", x, err))
		}
	}
	return all
}

// given is the text of a flag that may be left out; "" when it is.
func given[T any](flag *T) string {
	if flag == nil {
		return ""
	}
	return fmt.Sprint(*flag)
}

// filter makes a query of what is set.
func filter(pairs map[string]string) url.Values {
	q := url.Values{}
	for name, v := range pairs {
		if v != "" {
			q.Set(name, v)
		}
	}
	return q
}

// expiry is when something ends that lives for a duration; nil for 0, which is for ever. What is negative has ended: the hub refuses it.
func expiry(life time.Duration) *time.Time {
	if life == 0 {
		return nil
	}
	at := time.Now().Add(life).UTC().Truncate(time.Second)
	return &at
}
