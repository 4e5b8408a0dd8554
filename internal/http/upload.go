package http

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/fault"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerUploadRoutes: files that come with an activity of a client, and their bytes.
func (s *server) registerUploadRoutes() {
	token := route{auth: credentialToken}
	s.register(token.by(http.MethodPost).at(clientPrefix+"/conversations/{conversation_id}/upload", s.clientUpload).
		takes(bodyForm).limitedBy(ratelimit.Upload).upTo(s.Uploads.MaxBytes() + formAllowance))
	s.register(token.by(http.MethodGet).at(attachmentPath("{attachment_id}"), s.clientDownload).
		limitedBy(ratelimit.APIRead).givesFile())
}

// registerUploadTypeRoutes: which files a tenant may upload.
func (s *server) registerUploadTypeRoutes() {
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/upload_types", bodyNone, s.getUploadTypes)
	s.operatorRoute(http.MethodPut, "/tenants/{tenant_id}/upload_types", bodyJSON, s.putUploadTypes)
}

func attachmentPath(id string) string { return clientPrefix + "/attachments/" + id }

// Limits of an upload's body beside those of the file.
const (
	// formAllowance is what the body may have beyond its file, in bytes.
	formAllowance = 1 << 20
	// maxPartHeader bounds what lies between two parts: the boundary and the headers, of which a form needs two.
	maxPartHeader = 16 << 10
	maxParts      = 32
	maxBoundary   = 70 // RFC 2046, 5.1.1
	// leastRate is how fast a body must come, and may have to be sent, in bytes a second: a telephone at the edge of its
	// network. Each body has a head start of the time that others may take.
	leastRate = 16 << 10
	// maxUploading bounds the uploads that come in at one time, each of which has a connection, a file and about 100 KiB of
	// memory; one tenant has at most half of them.
	maxUploading = 256
)

// clientUpload stores the file of a form and posts an activity with it as the token's own user.
func (s *server) clientUpload(c *call) (*reply, error) {
	id, err := c.ownConversation()
	if err != nil {
		return nil, err
	}
	key, err := idempotencyKey(c.r.Header)
	if err != nil {
		return nil, err
	}
	// A closed conversation is not worth the upload. (It may still be closed meanwhile, which Append sees.)
	if err := s.checkOpen(c, id); err != nil {
		return nil, err
	}
	up, members, err := s.receiveForm(c)
	if err != nil {
		return nil, err
	}
	keep := false
	defer func() {
		if !keep {
			s.discard(c, up.ID)
		}
	}()
	f := newFields(members)
	n, err := c.message(id, key, f, activity.New{Metadata: f.object("channelData"), Uploads: []activity.Upload{up}})
	if err != nil {
		return nil, err
	}
	// The file is here: a client that leaves now has posted. And without a deadline of ours the answer is a definite one.
	r := s.Activities.Append(context.WithoutCancel(c.ctx()), []activity.New{n})[0]
	if r.Err != nil {
		keep = errors.Is(r.Err, activity.ErrUnknownOutcome) // it may have its row; else the sweeper finds it
		return nil, renamed(r.Err)
	}
	keep = !r.Repeat
	p, err := uploadReply(r.Activity)
	if err != nil {
		return nil, err
	}
	return replayed(p, r.Repeat), nil
}

func (s *server) checkOpen(c *call, conversation uuid.UUID) error {
	ctx, cancel := context.WithTimeout(c.ctx(), s.HandlerTimeout)
	defer cancel()
	v, err := s.Activities.GetConversation(ctx, c.Tenant.ID, conversation, &c.Channel.ID)
	if err != nil {
		return err
	}
	if v.Status != activity.StatusActive {
		return activity.ErrClosed
	}
	return nil
}

// uploadReply is the answer to an upload, taken from the activity: that of a repeated request is the first one's.
func uploadReply(a activity.Activity) (*reply, error) {
	type attachment struct {
		ID          string `json:"id"`
		ContentType string `json:"contentType"`
		ContentURL  string `json:"contentUrl"`
		Name        string `json:"name"`
		Size        int64  `json:"size"`
	}
	var list []attachment
	if err := json.Unmarshal(a.Attachments, &list); err != nil {
		return nil, fmt.Errorf("http: attachments of an upload: %w", err)
	}
	for i := range list {
		list[i].ID = path.Base(list[i].ContentURL)
	}
	return jsonReply(http.StatusOK, struct {
		ID          uuid.UUID    `json:"id"`
		Seq         int64        `json:"seq"`
		Attachments []attachment `json:"attachments"`
	}{a.ID, a.Seq, list})
}

// discard removes a file that got no row. What it can't remove the sweeper will.
func (s *server) discard(c *call, id uuid.UUID) {
	if err := s.Uploads.Delete(context.WithoutCancel(c.ctx()), upload.Key(c.Tenant.ID, id)); err != nil {
		s.Logger.WarnContext(c.ctx(), "a refused upload was not removed", "request_id", c.id, "error", err.Error())
	}
}

// uploading counts the uploads that are coming in. The zero value is ready; safe for concurrent use.
type uploading struct {
	mu      sync.Mutex
	total   int
	tenants map[tenants.ID]int
}

// enter takes a place, which leave gives back, or says that there is none.
func (u *uploading) enter(t tenants.ID) (leave func(), ok bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.total >= maxUploading || u.tenants[t] >= maxUploading/2 {
		return nil, false
	}
	if u.tenants == nil {
		u.tenants = make(map[tenants.ID]int)
	}
	u.total++
	u.tenants[t]++
	return func() {
		u.mu.Lock()
		defer u.mu.Unlock()
		u.total--
		if u.tenants[t]--; u.tenants[t] == 0 {
			delete(u.tenants, t)
		}
	}, true
}

// receiveForm reads the body of an upload: the file goes to the storage as it comes, the other members are returned.
// After an error nothing is left of the file.
func (s *server) receiveForm(c *call) (up activity.Upload, members map[string]json.RawMessage, err error) {
	boundary, err := formBoundary(c)
	if err != nil {
		return up, nil, err
	}
	leave, ok := s.uploading.enter(c.Tenant.ID)
	if !ok {
		return up, nil, newProblem(codeOverloaded, "Too many uploads are coming in at this moment. Nothing was stored; send the file again.").
			retryAfter(retryUnavailable)
	}
	defer leave()

	control := http.NewResponseController(c.ResponseWriter)
	// Whatever time the body took, its answer has that of any other.
	defer func() { _ = control.SetWriteDeadline(time.Now().Add(writeTimeout)) }()
	form := &formReader{
		r: &pacedReader{r: http.MaxBytesReader(c, c.r.Body, c.route.maxBody), control: control, started: time.Now(), patience: s.BodyTimeout},
	}
	form.parts = multipart.NewReader(form, boundary)
	defer func() {
		if err != nil && up.ID != uuid.Nil {
			s.discard(c, up.ID)
		}
		err = s.formProblem(c, form, err)
	}()

	c.memory = s.memory
	members = make(map[string]json.RawMessage)
	for n := 0; ; n++ {
		part, err := form.next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return up, nil, err
		}
		if n == maxParts {
			return up, nil, newProblem(codeMalformedUpload, "The form has more than %d parts.", maxParts)
		}
		switch name := part.FormName(); {
		case name == "file" && part.FileName() != "" && up.ID != uuid.Nil:
			return up, nil, newProblem(codeMalformedUpload, "The form has more than one file. Send each in a request of its own.")
		case name == "file" && part.FileName() != "":
			if up, err = s.receiveFile(c, part); err != nil {
				return up, nil, err
			}
		case name == "activity" || strings.HasPrefix(name, "activity["):
			text, err := c.readAll(io.LimitReader(part, s.MaxBody+1), -1)
			if err != nil {
				return up, nil, err
			}
			if int64(len(text)) > s.MaxBody {
				return up, nil, newProblem(codeBodyTooLarge, "The part %q is longer than %d bytes.", "activity", s.MaxBody)
			}
			if err := addMember(members, name, text); err != nil {
				return up, nil, err
			}
		}
		// Other parts are of no interest; the next one skips them.
	}
	if err := form.finish(); err != nil {
		return up, nil, err
	}
	// The deadline must not outlive the body: net/http watches the connection for a client that leaves.
	_ = control.SetReadDeadline(time.Time{})
	c.bodyRead = true
	if up.ID == uuid.Nil {
		return up, nil, newProblem(codeMalformedUpload, "Missing file in upload: a part named %q with a file name.", "file")
	}
	return up, members, nil
}

// formBoundary checks what can be known of an upload's body before it is read.
func formBoundary(c *call) (string, error) {
	if c.r.ContentLength > c.route.maxBody {
		return "", fileTooLarge(c.route.maxBody - formAllowance)
	}
	if e := c.r.Header.Get("Content-Encoding"); e != "" && !strings.EqualFold(e, "identity") {
		return "", newProblem(codeUnsupportedMedia, "The body must not be compressed (Content-Encoding).")
	}
	kind, params, err := mime.ParseMediaType(c.r.Header.Get("Content-Type"))
	if kind != "multipart/form-data" {
		return "", newProblem(codeUnsupportedMedia, "The body must be a form with a file: Content-Type: multipart/form-data.")
	}
	if b := params["boundary"]; err == nil && b != "" && len(b) <= maxBoundary {
		return b, nil
	}
	return "", newProblem(codeMalformedUpload, "The Content-Type has no boundary of 1 to %d characters.", maxBoundary)
}

// receiveFile stores a file under an id of its own.
func (s *server) receiveFile(c *call, part *multipart.Part) (activity.Upload, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return activity.Upload{}, fmt.Errorf("http: make an id: %w", err)
	}
	f, err := s.Uploads.Receive(c.ctx(), upload.Key(c.Tenant.ID, id), part, c.Tenant.UploadTypes)
	if err != nil {
		return activity.Upload{}, err
	}
	return activity.Upload{
		ID: id, ContentType: f.Type, Size: f.Size, SHA256: f.SHA256, Name: upload.CleanName(part.FileName()),
		URL: attachmentPath(id.String()),
	}, nil
}

// addMember takes a part of the form into the activity: the whole as JSON in "activity", or members one by one as forms
// write them, "activity[text]" and "activity[from][id]"; "activity[channelData]" is JSON.
func addMember(members map[string]json.RawMessage, part string, text []byte) error {
	quoted := func() json.RawMessage {
		b, _ := json.Marshal(string(text)) // a string always marshals; what is not UTF-8 was refused
		return b
	}
	add := func(name string, value json.RawMessage) error {
		if _, twice := members[name]; twice {
			return newProblem(codeMalformedUpload, "The form gives the activity's %s twice.", name)
		}
		members[name] = value
		return nil
	}
	if !cleanText(string(text)) {
		return newProblem(codeMalformedUpload, "The form's activity holds text that is not UTF-8, or a NUL character.")
	}
	switch part {
	case "activity":
		whole, err := parseObject(text)
		if err != nil {
			return err
		}
		for name, value := range whole {
			if err := add(name, value); err != nil {
				return err
			}
		}
		return nil
	case "activity[type]", "activity[text]":
		return add(strings.TrimSuffix(strings.TrimPrefix(part, "activity["), "]"), quoted())
	case "activity[from][id]":
		return add("from", json.RawMessage(`{"id":`+string(quoted())+`}`))
	case "activity[channelData]":
		if _, err := parseObject(text); err != nil {
			return err
		}
		return add("channelData", text)
	}
	return nil // as unknown members of JSON are
}

// formProblem is what the sender is told of an error in receiveForm.
func (s *server) formProblem(c *call, form *formReader, err error) error {
	var (
		known *problem
		size  *http.MaxBytesError
		kind  *upload.TypeError
	)
	switch {
	case err == nil, errors.As(err, &known):
		return err
	case errors.As(err, &size), errors.Is(err, upload.ErrTooLarge):
		return fileTooLarge(s.Uploads.MaxBytes())
	case errors.As(err, &kind):
		return newProblem(codeFileType, "File type %s is not allowed. The type is found in the bytes; name and declared type don't matter.", kind.Type)
	case errors.Is(err, upload.ErrEmpty):
		return fault.Invalidf("/file", fault.Required, "the file is empty")
	case errors.Is(err, upload.ErrStorage):
		s.Logger.LogAttrs(c.ctx(), slog.LevelError, "upload not stored", slog.String("request_id", c.id), slog.String("error", err.Error()))
		return upload.ErrStorage
	case errors.Is(err, errNoMemory):
		return noMemory()
	case errors.Is(err, os.ErrDeadlineExceeded):
		return newProblem(codeRequestTimeout, "The body came too slowly: less than %d bytes a second, after the first %v.", leastRate, s.BodyTimeout)
	case errors.Is(form.err, errPartHeader):
		return newProblem(codeMalformedUpload, "There are more than %d bytes between two parts of the form, or behind the last.", maxPartHeader)
	}
	return newProblem(codeMalformedUpload, "The form ended too early, or is not what its boundary says.")
}

func fileTooLarge(most int64) *problem {
	return newProblem(codeBodyTooLarge, "File too large (max %.1fMB)", float64(most)/(1<<20))
}

var errPartHeader = errors.New("http: too much between two parts")

// formReader reads a form part by part and bounds what the reader of package multipart gathers in memory: what lies
// between two parts, skipped ones aside.
type formReader struct {
	r     io.Reader
	parts *multipart.Reader
	part  *multipart.Part // the last one
	left  int64           // that may be read
	err   error           // why reading ended; package multipart does not always pass it on
}

// Read implements io.Reader for the reader of the parts.
func (f *formReader) Read(b []byte) (int, error) {
	if f.left <= 0 {
		f.err = errPartHeader
		return 0, f.err
	}
	n, err := f.r.Read(b[:min(int64(len(b)), f.left)])
	f.left -= int64(n)
	if err != nil {
		f.err = err
	}
	return n, err
}

// next skips what is left of the last part and finds the next; io.EOF when there is none.
func (f *formReader) next() (*multipart.Part, error) {
	if f.part != nil {
		if _, err := io.Copy(io.Discard, f.part); err != nil {
			return nil, f.cause(err)
		}
	}
	f.left = maxPartHeader
	part, err := f.parts.NextRawPart()
	if err != nil {
		if errors.Is(err, io.EOF) && f.err != nil && !errors.Is(f.err, io.EOF) {
			return nil, f.err
		}
		if errors.Is(err, io.EOF) {
			return nil, io.EOF
		}
		return nil, f.cause(err)
	}
	f.left = math.MaxInt64
	f.part = part
	return part, nil
}

// finish reads the end of the body, behind the last part.
func (f *formReader) finish() error {
	f.left = maxPartHeader
	if _, err := io.Copy(io.Discard, f); err != nil {
		return f.cause(err)
	}
	return nil
}

// cause is the error of the body, if it has one, in place of what was made of it.
func (f *formReader) cause(err error) error {
	if f.err != nil && !errors.Is(f.err, io.EOF) {
		return f.err
	}
	return err
}

// pacedReader gives a body the time that it may take: a start, and then as long as its bytes need at the least rate. So
// a slow sender is served as long as it goes on, one that sends a byte now and then is not, and the size of the body
// bounds the whole.
type pacedReader struct {
	r        io.Reader
	control  *http.ResponseController
	started  time.Time
	patience time.Duration
	received int64
}

// Read implements io.Reader.
func (p *pacedReader) Read(b []byte) (int, error) {
	_ = p.control.SetReadDeadline(p.started.Add(p.patience + transferTime(p.received)))
	n, err := p.r.Read(b)
	p.received += int64(n)
	return n, err
}

// transferTime is how long so many bytes may take.
func transferTime(n int64) time.Duration { return time.Duration(n) * time.Second / leastRate }

// clientDownload sends the bytes of an upload. A token that is bound to a conversation sees that one's only, any token
// those of its channel.
func (s *server) clientDownload(c *call) (*reply, error) {
	id, err := c.pathID("attachment_id")
	if err != nil {
		return nil, err
	}
	var bound *uuid.UUID
	if c.Token.ConversationID != uuid.Nil {
		bound = &c.Token.ConversationID
	}
	up, err := s.Activities.GetUpload(c.ctx(), c.Tenant.ID, id, &c.Channel.ID, bound)
	if errors.Is(err, activity.ErrNotFound) {
		return nil, newProblem(codeNotFound, "There is no such attachment.")
	}
	if err != nil {
		return nil, err
	}
	file, err := s.Uploads.Open(c.ctx(), upload.Key(c.Tenant.ID, up.ID))
	if err != nil {
		s.Logger.LogAttrs(c.ctx(), slog.LevelError, "an attachment's file can't be read", slog.String("request_id", c.id),
			slog.String("attachment_id", up.ID.String()), slog.String("error", err.Error()))
		return nil, err
	}
	defer file.Close()
	h := c.Header()
	h.Set("Content-Type", up.ContentType)
	h.Set("Content-Disposition", disposition(up))
	h.Set("Content-Security-Policy", "default-src 'none'; sandbox")
	h.Set("Cache-Control", "private, max-age=300")
	h.Set("Etag", fmt.Sprintf(`"%x"`, up.SHA256))
	c.setLimitHeaders()
	_ = http.NewResponseController(c.ResponseWriter).SetWriteDeadline(time.Now().Add(writeTimeout + transferTime(up.Size)))
	w := &fileWriter{call: c}
	http.ServeContent(w, c.r, "", time.Time{}, file)
	if w.badRange {
		h.Del("Content-Disposition")
		return nil, newProblem(codeBadRange, "The file has %d bytes, and Range asks for others.", up.Size)
	}
	return nil, nil
}

// fileWriter keeps the plain text back with which net/http refuses a range; its Content-Range stays.
type fileWriter struct {
	*call
	badRange bool
}

// WriteHeader implements http.ResponseWriter.
func (w *fileWriter) WriteHeader(status int) {
	if w.badRange = status == http.StatusRequestedRangeNotSatisfiable; !w.badRange {
		w.call.WriteHeader(status)
	}
}

// Write implements http.ResponseWriter.
func (w *fileWriter) Write(b []byte) (int, error) {
	if w.badRange {
		return len(b), nil
	}
	return w.call.Write(b)
}

// disposition is the Content-Disposition of a download (RFC 6266): the name in ASCII for all, and as it is (RFC 8187)
// where that differs. Quotes and percent signs are read differently by different clients, so the first form has none.
func disposition(up activity.Upload) string {
	kind := "attachment"
	if upload.Inline(up.ContentType) {
		kind = "inline"
	}
	plain := strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' || r == '"' || r == '\\' || r == '%' {
			return '_'
		}
		return r
	}, up.Name)
	text := kind + `; filename="` + plain + `"`
	if plain != up.Name {
		// PathEscape leaves a few characters that RFC 8187 has no room for.
		text += "; filename*=UTF-8''" + strings.NewReplacer("'", "%27", "(", "%28", ")", "%29", "*", "%2A", ":", "%3A",
			"@", "%40", "=", "%3D", ",", "%2C", ";", "%3B").Replace(url.PathEscape(up.Name))
	}
	return text
}

// uploadTypesBody is which types of files a tenant's uploads may have.
type uploadTypesBody struct {
	Types     []string `json:"types"`     // the tenant's own; none: those of the installation
	Effective []string `json:"effective"` // as this node enforces them
}

func (s *server) uploadTypesReply(c *call, t *tenants.TenantEntry) (*reply, error) {
	b := uploadTypesBody{Types: t.UploadTypes, Effective: s.Uploads.Allowed(t.UploadTypes)}
	if b.Types == nil {
		b.Types = []string{}
	}
	return settingReply(c, http.StatusOK, t.Version, b)
}

func (s *server) getUploadTypes(c *call) (*reply, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, err
	}
	return s.uploadTypesReply(c, t)
}

func (s *server) putUploadTypes(c *call) (*reply, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("types")
	types := f.strs("types")
	f.refuseUnknown()
	for i, name := range types {
		var ok bool
		if types[i], ok = upload.ParseType(name); !ok {
			f.faultIn("types", i, fault.UnknownValue, "%q is none of %s, %s", truncate(name, 100), strings.Join(upload.DefaultTypes(), ", "), upload.TypeUnknown)
		}
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if _, err := s.Tenants.SetUploadTypes(c.ctx(), c.actor(), t.ID, types, expected...); err != nil {
		return nil, err
	}
	s.changed(c)
	if now, ok := s.Directory.Tenant(t.ID); ok {
		t = now
	}
	return s.uploadTypesReply(c, t)
}
