package http

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"net/textproto"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/postgres"
	"converger/internal/tenants"
	"converger/migrations/pgtest"
)

const testPNG = "\x89PNG\r\n\x1a\nthe rest of a picture"

// formPart is a part of a form; those with a file are files.
type formPart struct{ name, file, text string }

// form makes the body of an upload and the option that declares it.
func form(t testing.TB, parts ...formPart) (string, option) {
	t.Helper()
	var b strings.Builder
	w := multipart.NewWriter(&b)
	for _, p := range parts {
		text := `form-data; name="` + p.name + `"`
		if p.file != "" {
			text += `; filename="` + p.file + `"`
		}
		part, err := w.CreatePart(textproto.MIMEHeader{"Content-Disposition": {text}, "Content-Type": {"text/html"}})
		if err == nil {
			_, err = io.WriteString(part, p.text)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String(), header("Content-Type", w.FormDataContentType())
}

// filesIn lists the files below a folder.
func filesIn(t testing.TB, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// uploader is a front with a conversation and a token for it.
type uploader struct {
	*front
	conversation activity.Conversation
	token        string
	path         string
}

func newUploader(t testing.TB, change ...func(*Deps)) *uploader {
	t.Helper()
	f := newFront(t, change...)
	u := &uploader{front: f, conversation: f.newConversation(t)}
	u.token = f.newToken(t, auth.Claims{UserID: "ada", ConversationID: u.conversation.ID})
	u.path = "/api/v1/converger/conversations/" + u.conversation.ID.String() + "/upload"
	limitOverride(t, f, `{"limit":100000,"scale_ms":1000}`, "upload")
	return u
}

func (u *uploader) send(t testing.TB, parts []formPart, options ...option) answer {
	t.Helper()
	body, kind := form(t, parts...)
	return u.call(t, "POST", u.path, body, append([]option{bearer(u.token), kind}, options...)...)
}

// attachment is the address of the only attachment in an upload's answer.
func attachment(t testing.TB, a answer) string {
	t.Helper()
	a.is(t, 200, "")
	return a.get(t, "attachments").([]any)[0].(map[string]any)["contentUrl"].(string)
}

// empty checks that no file and no row is there.
func (u *uploader) empty(t testing.TB) {
	t.Helper()
	if left := filesIn(t, u.files); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
	if n := u.rows(t); n["attachments"] != 0 || n["activities"] != 0 {
		t.Errorf("%d attachments, %d activities", n["attachments"], n["activities"])
	}
}

func TestUpload(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	a := u.send(t, []formPart{
		{"other", "", "ignored"}, {"activity", "", `{"type":"message","text":"look","from":{"id":"ada"},"channelData":{"a":1}}`},
		{"file", `../../my \"cat\".png`, testPNG}, {"more", "x.html", "ignored"},
	})
	a.is(t, 200, "")
	link := attachment(t, a)
	id := filepath.Base(link)
	want := map[string]any{"id": id, "contentType": "image/png", "contentUrl": "/api/v1/converger/attachments/" + id, "name": `my "cat".png`, "size": float64(len(testPNG))}
	if diff := cmp.Diff(want, a.get(t, "attachments").([]any)[0]); diff != "" {
		t.Error(diff)
	}
	if got := a.Header.Get("Ratelimit-Policy"); !strings.Contains(got, "upload") {
		t.Errorf("RateLimit-Policy: %q", got)
	}
	stored, err := os.ReadFile(filepath.Join(u.files, u.tenant.ID.String(), id))
	if err != nil || string(stored) != testPNG || len(filesIn(t, u.files)) != 1 {
		t.Errorf("stored %q, %v", stored, err)
	}
	list := u.call(t, "GET", strings.TrimSuffix(u.path, "upload")+"activities", "", bearer(u.token))
	got := list.get(t, "activities").([]any)[0].(map[string]any)
	if got["id"] != a.get(t, "id") || got["text"] != "look" || got["from"].(map[string]any)["id"] != "ada" || got["channelData"].(map[string]any)["a"] != 1.0 ||
		got["attachments"].([]any)[0].(map[string]any)["contentUrl"] != link {
		t.Errorf("activity: %v", got)
	}

	// Members as forms write them, and the file ahead of them.
	a = u.send(t, []formPart{{"file", "b.txt", "hello"}, {"activity[text]", "", "as a form"}, {"activity[from][id]", "", "ada"},
		{"activity[type]", "", "event"}, {"activity[channelData]", "", `{"b":2}`}, {"activity[else]", "", "ignored"}})
	a.is(t, 200, "")
	list = u.call(t, "GET", strings.TrimSuffix(u.path, "upload")+"activities?watermark=1", "", bearer(u.token))
	got = list.get(t, "activities").([]any)[0].(map[string]any)
	if got["text"] != "as a form" || got["type"] != "event" || got["channelData"].(map[string]any)["b"] != 2.0 {
		t.Errorf("activity: %v", got)
	}
	// Without an activity it is a message.
	u.send(t, []formPart{{"file", "c.txt", "hello"}}).is(t, 200, "")
}

// Who posted may change and delete it, by whichever way it came, and nobody else.
func TestOwnUploadsCanBeEdited(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	talk := u.conversation.ID
	other := u.newToken(t, auth.Claims{UserID: "bo", ConversationID: talk})
	activities := strings.TrimSuffix(u.path, "upload") + "activities"
	post := func(token, body string) answer { return u.call(t, "POST", activities, body, bearer(token)) }
	ways := map[string]func(token string) answer{
		"a message": func(token string) answer { return post(token, `{"type":"message","text":"look"}`) },
		"an upload": func(token string) answer {
			return u.send(t, []formPart{{"activity[type]", "", "message"}, {"activity[text]", "", "look"}, {"file", "x.png", testPNG}}, bearer(token))
		},
		"an upload with its activity in JSON": func(token string) answer {
			return u.send(t, []formPart{{"activity", "", `{"type":"message","text":"look"}`}, {"file", "x.png", testPNG}}, bearer(token))
		},
	}
	for who, own := range map[string]string{"a user": u.token, "an anonymous user": u.newToken(t, auth.Claims{ConversationID: talk})} {
		for way, send := range ways {
			a := send(own)
			a.is(t, 200, "")
			id := a.get(t, "id").(string)
			for _, change := range []string{`{"type":"messageUpdate","text":"look here","replyToId":"` + id + `"}`, `{"type":"messageDelete","replyToId":"` + id + `"}`} {
				if a := post(other, change); a.StatusCode != 422 {
					t.Errorf("%s of %s is changed by somebody else: %s", way, who, a)
				}
				if a := post(own, change); a.StatusCode != 200 {
					t.Errorf("%s of %s can't be changed by its author: %s", way, who, a)
				}
			}
		}
	}
}

// A key makes repeats harmless: no second activity, no second file.
func TestUploadIdempotency(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	parts := []formPart{{"file", "a.png", testPNG}}
	first := u.send(t, parts, header("Idempotency-Key", "k"))
	again := u.send(t, parts, header("Idempotency-Key", "k"))
	if attachment(t, first) != attachment(t, again) || string(first.body) != string(again.body) || again.Header.Get("Idempotent-Replayed") != "true" {
		t.Errorf("%s\n%s", first, again)
	}
	u.send(t, []formPart{{"file", "a.png", testPNG + "!"}}, header("Idempotency-Key", "k")).is(t, 422, codeKeyReused)
	if n := u.rows(t); n["attachments"] != 1 || len(filesIn(t, u.files)) != 1 {
		t.Errorf("%d rows, files %v", n["attachments"], filesIn(t, u.files))
	}
}

// Every refusal leaves neither a file nor a row.
func TestUploadRefused(t *testing.T) {
	t.Parallel()
	u := newUploader(t, func(d *Deps) {
		d.Uploads = upload.NewIntake(d.Uploads.Storage, upload.Options{MaxBytes: 100_000})
	})
	file := formPart{"file", "a.png", testPNG}
	whole, kind := form(t, file)
	many := func(n int, p formPart) (parts []formPart) {
		for range n {
			parts = append(parts, p)
		}
		return append(parts, file)
	}
	head := func(headers string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x\"\r\n" + headers + "\r\n" + testPNG + "\r\n--b--\r\n"
	}
	b := header("Content-Type", "multipart/form-data; boundary=b")
	loose := u.newToken(t, auth.Claims{UserID: "ada"})
	other := u.newConversation(t)
	closed := u.newConversation(t)
	if _, _, err := u.Activities.Close(t.Context(), u.tenant.ID, closed.ID, nil, activity.ReasonManual); err != nil {
		t.Fatal(err)
	}
	closedActivities := u.rows(t)["activities"]
	to := func(conversation string) option {
		return func(r *http.Request) {
			r.URL.Path = "/api/v1/converger/conversations/" + conversation + "/upload"
			r.Header.Set("Authorization", "Bearer "+loose)
		}
	}
	tests := map[string]struct {
		parts   []formPart
		body    string
		options []option
		status  int
		code    code
	}{
		"no file":                  {[]formPart{{"activity", "", "{}"}}, "", nil, 400, codeMalformedUpload},
		"no parts":                 {nil, "--b--\r\n", []option{b}, 400, codeMalformedUpload},
		"file without a name":      {[]formPart{{"file", "", testPNG}}, "", nil, 400, codeMalformedUpload},
		"two files":                {[]formPart{file, file}, "", nil, 400, codeMalformedUpload},
		"empty file":               {[]formPart{{"file", "a", ""}}, "", nil, 422, codeValidationFailed},
		"too large":                {[]formPart{{"file", "a", testPNG + strings.Repeat("x", 100_000)}}, "", nil, 413, codeBodyTooLarge},
		"far too large":            {[]formPart{{"file", "a", testPNG + strings.Repeat("x", 2_000_000)}}, "", nil, 413, codeBodyTooLarge},
		"a program":                {[]formPart{{"file", "a.png", "\x7fELF\x00\x01"}}, "", nil, 415, codeFileType},
		"a program, then text":     {[]formPart{{"file", "a.png", "\x7fELF\x00\x01"}, {"activity", "", "{}"}}, "", nil, 415, codeFileType},
		"json":                     {nil, "{}", nil, 415, codeUnsupportedMedia},
		"compressed":               {nil, whole, []option{kind, header("Content-Encoding", "gzip")}, 415, codeUnsupportedMedia},
		"no boundary":              {nil, whole, []option{header("Content-Type", "multipart/form-data")}, 400, codeMalformedUpload},
		"a long boundary":          {nil, whole, []option{header("Content-Type", "multipart/form-data; boundary="+strings.Repeat("b", 71))}, 400, codeMalformedUpload},
		"another boundary":         {nil, whole, []option{b}, 400, codeMalformedUpload},
		"cut in the file":          {nil, whole[:len(whole)-70], []option{kind}, 400, codeMalformedUpload},
		"cut in the last boundary": {nil, whole[:len(whole)-8], []option{kind}, 400, codeMalformedUpload},
		"5,000 parts":              {many(5000, formPart{"x", "", "y"}), "", nil, 400, codeMalformedUpload},
		"10,000 headers":           {nil, head(strings.Repeat("X: y\r\n", 10_000)), []option{b}, 400, codeMalformedUpload},
		"a long header":            {nil, head("X: " + strings.Repeat("y", 900_000) + "\r\n"), []option{b}, 400, codeMalformedUpload},
		"a long preamble":          {nil, strings.Repeat("y", 900_000) + head(""), []option{b}, 400, codeMalformedUpload},
		"a long end":               {nil, head("") + strings.Repeat("y", 900_000), []option{b}, 400, codeMalformedUpload},
		"activity too large":       {[]formPart{file, {"activity", "", strings.Repeat(" ", DefaultMaxBody) + "{}"}}, "", nil, 413, codeBodyTooLarge},
		"activity is no JSON":      {[]formPart{file, {"activity", "", "text"}}, "", nil, 400, codeMalformedBody},
		"activity twice":           {[]formPart{file, {"activity", "", `{"text":"a"}`}, {"activity[text]", "", "b"}}, "", nil, 400, codeMalformedUpload},
		"text with a NUL":          {[]formPart{file, {"activity[text]", "", "a\x00"}}, "", nil, 400, codeMalformedUpload},
		"text too long":            {[]formPart{file, {"activity[text]", "", strings.Repeat("x", activity.MaxText+1)}}, "", nil, 422, codeValidationFailed},
		"a wrong member":           {[]formPart{file, {"activity", "", `{"text":1}`}}, "", nil, 422, codeValidationFailed},
		"a type of the hub's":      {[]formPart{file, {"activity", "", `{"type":"conversationUpdate"}`}}, "", nil, 422, codeValidationFailed},
		"somebody else":            {[]formPart{file, {"activity", "", `{"from":{"id":"eve"}}`}}, "", nil, 403, codeSenderMismatch},
		"another conversation": {[]formPart{file}, "", []option{func(r *http.Request) {
			r.URL.Path = strings.Replace(u.path, u.conversation.ID.String(), other.ID.String(), 1)
		}}, 403, codeConversationBound},
		"no conversation": {[]formPart{file}, "", []option{to(uuid.NewString())}, 404, codeNotFound},
		"closed":          {[]formPart{file}, "", []option{to(closed.ID.String())}, 409, codeConversationClosed},
		"two keys":        {[]formPart{file}, "", []option{header("Idempotency-Key", "a"), header("X-Idempotency-Key", "b")}, 400, codeInvalidIdempotency},
		"no token":        {[]formPart{file}, "", []option{header("Authorization", "")}, 401, codeMissingCredential},
		"not JSON wanted": {[]formPart{file}, "", []option{header("Accept", "text/html")}, 406, codeNotAcceptable},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var a answer
			if tt.body != "" {
				a = u.call(t, "POST", u.path, tt.body, append([]option{bearer(u.token)}, tt.options...)...)
			} else {
				a = u.send(t, tt.parts, tt.options...)
			}
			a.is(t, tt.status, tt.code)
			if left := filesIn(t, u.files); len(left) != 0 {
				t.Errorf("files left: %v", left)
			}
		})
	}
	if n := u.rows(t); n["attachments"] != 0 || n["activities"] != closedActivities {
		t.Errorf("%d attachments, %d activities", n["attachments"], n["activities"])
	}
	if len(u.uploading.tenants) != 0 || u.uploading.total != 0 {
		t.Errorf("places still taken: %d", u.uploading.total)
	}
}

// The bucket of uploads counts the tenant's, ahead of the body.
func TestUploadLimit(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	limitOverride(t, u.front, `{"limit":0,"scale_ms":1000}`, "upload")
	a := u.send(t, []formPart{{"file", "a.png", testPNG}})
	a.is(t, 429, codeRateLimited)
	if a.get(t, "bucket") != "upload" || a.Header.Get("Retry-After") == "" {
		t.Errorf("%s", a)
	}
	u.empty(t)
}

// The uploads at one time are bounded, and one tenant can't have them all.
func TestUploadingIsBounded(t *testing.T) {
	t.Parallel()
	var u uploading
	a, b := uuid.New(), uuid.New()
	var leave []func()
	count := func(tenant tenants.ID) (n int) {
		for {
			l, ok := u.enter(tenant)
			if !ok {
				return n
			}
			leave = append(leave, l)
			n++
		}
	}
	if n := count(a); n != maxUploading/2 {
		t.Errorf("one tenant has %d", n)
	}
	if n := count(b); n != maxUploading/2 {
		t.Errorf("the other has %d", n)
	}
	if n := count(uuid.New()); n != 0 {
		t.Errorf("a third has %d", n)
	}
	for _, l := range leave {
		l()
	}
	if u.total != 0 || len(u.tenants) != 0 {
		t.Errorf("left: %d, %v", u.total, u.tenants)
	}
	front := newUploader(t)
	for range maxUploading / 2 {
		if _, ok := front.uploading.enter(front.tenant.ID); !ok {
			t.Fatal("no place")
		}
	}
	front.send(t, []formPart{{"file", "a.png", testPNG}}).is(t, 503, codeOverloaded)
	front.empty(t)
}

// A folder that can't be written to is 503, and comes back by itself.
func TestUploadStorageFails(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	block := filepath.Join(u.files, u.tenant.ID.String())
	if err := os.WriteFile(block, nil, 0o600); err != nil { // where the tenant's folder should be
		t.Fatal(err)
	}
	a := u.send(t, []formPart{{"file", "a.png", testPNG}})
	a.is(t, 503, codeStorageUnavailable)
	if a.Header.Get("Retry-After") == "" || strings.Contains(string(a.body), u.files) || !strings.Contains(u.log.String(), "upload not stored") {
		t.Errorf("%s", a)
	}
	if n := counter(t, u.front, "converger_uploads_total", map[string]string{"result": "failed"}); n != 1 {
		t.Errorf("failures counted: %v", n)
	}
	if err := os.Remove(block); err != nil {
		t.Fatal(err)
	}
	u.empty(t)
	link := attachment(t, u.send(t, []formPart{{"file", "a.png", testPNG}}))
	for _, name := range filesIn(t, u.files) {
		if err := os.Remove(name); err != nil {
			t.Fatal(err)
		}
	}
	u.call(t, "GET", link, "", bearer(u.token)).is(t, 503, codeStorageUnavailable)
}

// storageThen does something once it has stored a file.
type storageThen struct {
	upload.Storage
	put func()
}

func (g storageThen) Put(ctx context.Context, key string, r io.Reader) error {
	defer g.put()
	return g.Storage.Put(ctx, key, r)
}

// The database goes between the file and its row: the answer says so and the file goes with it.
func TestUploadDatabaseGone(t *testing.T) {
	t.Parallel()
	direct := must(url.Parse(pgtest.New(t)))
	network, target := "tcp", direct.Host
	if host := direct.Query().Get("host"); host != "" {
		network, target = "unix", filepath.Join(host, ".s.PGSQL."+direct.Query().Get("port"))
	}
	g := newGate(t, network, target)
	behind := *direct
	q := behind.Query()
	q.Del("host")
	q.Del("port")
	behind.Host, behind.RawQuery = g.listener.Addr().String(), q.Encode()
	f := newFrontAt(t, behind.String(), func(d *Deps) {
		d.Uploads = upload.NewIntake(storageThen{d.Uploads.Storage, func() { g.set(true) }}, upload.Options{})
	})
	v := f.newConversation(t)
	body, kind := form(t, formPart{"file", "a.png", testPNG})
	a := f.call(t, "POST", "/api/v1/converger/conversations/"+v.ID.String()+"/upload", body, kind, bearer(f.newToken(t, auth.Claims{})))
	a.is(t, 503, codeUnavailable)
	if left := filesIn(t, f.files); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
	g.set(false)
	pool := pgtest.Open(t, direct.String(), postgres.Options{MaxConns: 1})
	var n int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM attachments`).Scan(&n); err != nil || n != 0 {
		t.Errorf("%d rows, %v", n, err)
	}
}

// It closes while the file is on its way: 409, and the file is gone.
func TestUploadClosedMeanwhile(t *testing.T) {
	t.Parallel()
	var u *uploader
	u = newUploader(t, func(d *Deps) {
		activities := d.Activities
		d.Uploads = upload.NewIntake(storageThen{d.Uploads.Storage, func() {
			if _, _, err := activities.Close(t.Context(), u.tenant.ID, u.conversation.ID, nil, activity.ReasonManual); err != nil {
				t.Error(err)
			}
		}}, upload.Options{})
	})
	u.send(t, []formPart{{"file", "a.png", testPNG}}).is(t, 409, codeConversationClosed)
	if left := filesIn(t, u.files); len(left) != 0 {
		t.Errorf("files left: %v", left)
	}
}

func TestDownload(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	tag := func(text string) string { return fmt.Sprintf(`"%x"`, sha256.Sum256([]byte(text))) }
	svg := `<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>`
	for name, tt := range map[string]struct{ file, text, contentType, disposition string }{
		"picture":      {"a.png", testPNG, "image/png", `inline; filename="a.png"`},
		"pdf":          {"a.pdf", "%PDF-1.7 /JavaScript", "application/pdf", `inline; filename="a.pdf"`},
		"svg":          {"a.svg", svg, "text/plain", `attachment; filename="a.svg"`},
		"html":         {"a.html", "<script>alert(1)</script>", "text/plain", `attachment; filename="a.html"`},
		"a lying name": {"a.exe", testPNG, "image/png", `inline; filename="a.exe"`},
		"quotes":       {`say \"hi\".txt`, "x", "text/plain", `attachment; filename="say _hi_.txt"; filename*=UTF-8''say%20%22hi%22.txt`},
		"another tongue": {"Grüße (2).txt", "x", "text/plain",
			`attachment; filename="Gr__e (2).txt"; filename*=UTF-8''Gr%C3%BC%C3%9Fe%20%282%29.txt`},
		"text turned around": {"a\u202eb.txt", "x", "text/plain", `attachment; filename="ab.txt"`},
		"a windows path":     {`C:\x.txt`, "x", "text/plain", `attachment; filename="x.txt"`},
	} {
		t.Run(name, func(t *testing.T) {
			link := attachment(t, u.send(t, []formPart{{"file", tt.file, tt.text}}))
			for _, method := range []string{"GET", "HEAD"} {
				a := u.call(t, method, link, "", bearer(u.token), header("Accept", "image/*"))
				a.is(t, 200, "")
				if method == "GET" && string(a.body) != tt.text || method == "HEAD" && len(a.body) != 0 {
					t.Errorf("%s: %q", method, a.body)
				}
				for h, want := range map[string]string{
					"Content-Type": tt.contentType, "Content-Disposition": tt.disposition, "X-Content-Type-Options": "nosniff",
					"Content-Security-Policy": "default-src 'none'; sandbox", "Cache-Control": "private, max-age=300", "Etag": tag(tt.text),
					"Content-Length": fmt.Sprint(len(tt.text)), "Accept-Ranges": "bytes",
				} {
					if got := a.Header.Get(h); got != want {
						t.Errorf("%s %s: %q, want %q", method, h, got, want)
					}
				}
				if _, _, err := mime.ParseMediaType(a.Header.Get("Content-Disposition")); err != nil {
					t.Errorf("disposition: %v", err)
				}
				if a.Header.Get("Ratelimit") == "" {
					t.Error("no RateLimit")
				}
			}
		})
	}

	link := attachment(t, u.send(t, []formPart{{"file", "a.png", testPNG}}))
	get := func(options ...option) answer { return u.call(t, "GET", link, "", append(options, bearer(u.token))...) }
	get(header("If-None-Match", tag(testPNG))).is(t, 304, "")
	a := get(header("Range", "bytes=1-3"))
	a.is(t, 206, "")
	if string(a.body) != "PNG" || a.Header.Get("Content-Range") != fmt.Sprintf("bytes 1-3/%d", len(testPNG)) {
		t.Errorf("range: %q %v", a.body, a.Header)
	}
	if a := get(header("Range", "bytes=1-3"), header("If-Range", tag("other"))); a.StatusCode != 200 || string(a.body) != testPNG {
		t.Errorf("if-range: %s", a)
	}
	a = get(header("Range", "bytes=100000-"))
	a.is(t, 416, codeBadRange)
	if a.Header.Get("Content-Type") != typeProblem || a.Header.Get("Content-Range") != fmt.Sprintf("bytes */%d", len(testPNG)) ||
		a.Header.Get("Content-Disposition") != "" || a.Header.Get("Cache-Control") != "no-store" || a.Header.Get("Etag") != "" {
		t.Errorf("%v", a.Header)
	}
	u.call(t, "GET", link, "").is(t, 401, codeMissingCredential)
	u.call(t, "GET", "/api/v1/converger/attachments/x", "", bearer(u.token)).is(t, 400, codeMalformedID)

	// Whose it is not, does not learn that it is there (UP-08).
	elsewhere := u.newConversation(t)
	second := u.newChannel(t, u.tenant.ID, channel.NewChannel{Name: "second", Type: channel.TypeEcho})
	u.refresh(t)
	missing := u.call(t, "GET", "/api/v1/converger/attachments/"+uuid.NewString(), "", bearer(u.token))
	missing.is(t, 404, codeNotFound)
	for name, claims := range map[string]auth.Claims{
		"bound to another conversation": {UserID: "ada", ConversationID: elsewhere.ID},
		"of another channel":            {UserID: "ada", ChannelID: second.ID},
	} {
		a := u.call(t, "GET", link, "", bearer(u.newToken(t, claims)))
		a.is(t, 404, codeNotFound)
		if a.get(t, "detail") != missing.get(t, "detail") {
			t.Errorf("%s: %s", name, a)
		}
	}
	u.call(t, "GET", link, "", bearer(u.newToken(t, auth.Claims{UserID: "bob"}))).is(t, 200, "")
}

// A tenant's list of types holds in place of the installation's, from the change on.
func TestUploadTypes(t *testing.T) {
	t.Parallel()
	u := newUploader(t)
	path := "/api/v1/management/tenants/" + u.tenant.ID.String() + "/upload_types"
	a := u.call(t, "GET", path, "", u.ops())
	a.is(t, 200, "")
	if n := len(a.get(t, "data", "effective").([]any)); n != len(upload.DefaultTypes()) || len(a.get(t, "data", "types").([]any)) != 0 {
		t.Errorf("%s", a)
	}
	a = u.call(t, "PUT", path, `{"types":["application/pdf","Text/Plain","text/plain"]}`, u.ops())
	a.is(t, 200, "")
	if diff := cmp.Diff([]any{"application/pdf", "text/plain"}, a.get(t, "data", "effective")); diff != "" {
		t.Error(diff)
	}
	u.send(t, []formPart{{"file", "a.png", testPNG}}).is(t, 415, codeFileType)
	u.send(t, []formPart{{"file", "a.txt", "x"}}).is(t, 200, "")
	for body, c := range map[string]code{
		`{"types":["image/svg+xml"]}`: codeValidationFailed, `{"types":"x"}`: codeValidationFailed, `{}`: codeValidationFailed,
		`{"types":[],"x":1}`: codeValidationFailed,
	} {
		u.call(t, "PUT", path, body, u.ops()).is(t, 422, c)
	}
	u.call(t, "PUT", path, `{"types":[]}`, u.ops()).is(t, 200, "")
	u.send(t, []formPart{{"file", "a.png", testPNG}}).is(t, 200, "")
	var audited int
	err := u.pool.QueryRow(t.Context(), `SELECT count(*) FROM audit_log WHERE action = 'update' AND resource_type = 'tenant'
		AND changes->'after' ? 'allowed_upload_types'`).Scan(&audited)
	if err != nil || audited != 2 {
		t.Errorf("%d changes audited, %v", audited, err)
	}
}

// request is an upload on the wire, with a body of its own making.
func (u *uploader) request(headers string) string {
	return "POST " + u.path + " HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + u.token +
		"\r\nContent-Type: multipart/form-data; boundary=b\r\n" + headers + "\r\n"
}

const wireFile = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"x.png\"\r\n\r\n" + testPNG

// A body that goes on coming is not cut at the time of others; one that stops, or sends a byte now and then, is (UP-11).
func TestSlowUploads(t *testing.T) {
	t.Parallel()
	// Handlers have time enough to set the scene, and to store the file, on a machine that is busy with other tests.
	const start, handler = 2 * time.Second, 10 * time.Second
	u := newUploader(t, func(d *Deps) { d.BodyTimeout, d.HandlerTimeout = start, handler })
	pump := func(t *testing.T, chunk string, end string, long time.Duration) *http.Response {
		t.Helper()
		conn := u.dial(t)
		fmt.Fprintf(conn, "%s%x\r\n%s\r\n", u.request("Transfer-Encoding: chunked\r\n"), len(wireFile), wireFile)
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			tick := time.NewTicker(20 * time.Millisecond)
			defer tick.Stop()
			for begun := time.Now(); time.Since(begun) < long; {
				select {
				case <-tick.C:
					if _, err := fmt.Fprintf(conn, "%x\r\n%s\r\n", len(chunk), chunk); err != nil {
						return
					}
				case <-stop:
					return
				}
			}
			fmt.Fprintf(conn, "%x\r\n%s\r\n0\r\n\r\n", len(end), end)
		})
		res, err := http.ReadResponse(bufio.NewReader(conn), nil)
		close(stop)
		wg.Wait()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { res.Body.Close() })
		return res
	}
	t.Run("steady", func(t *testing.T) {
		t.Parallel()
		// Four times the least rate, for longer than a stopped one, or any other handler, may take.
		res := pump(t, strings.Repeat("x", 4*leastRate/50), "\r\n--b--\r\n", handler+start)
		if res.StatusCode != http.StatusOK {
			t.Errorf("status %d", res.StatusCode)
		}
	})
	t.Run("a byte now and then", func(t *testing.T) {
		t.Parallel()
		res := pump(t, "x", "\r\n--b--\r\n", patienceOfTest)
		if res.StatusCode != http.StatusRequestTimeout || !res.Close {
			t.Errorf("status %d, close %v", res.StatusCode, res.Close)
		}
	})
	t.Cleanup(func() {
		if left := filesIn(t, u.files); len(left) != 1 {
			t.Errorf("%d files, want that of the steady one", len(left))
		}
	})
}

const patienceOfTest = 60 * time.Second

// Two hundred large uploads, half of them cut midway: the size is kept, nothing is left, memory does not follow (UP-07).
func TestManyCutUploads(t *testing.T) {
	t.Parallel()
	const size = 200_000_000
	u := newUploader(t, func(d *Deps) {
		d.Uploads = upload.NewIntake(d.Uploads.Storage, upload.Options{MaxBytes: 2 << 20})
	})
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	chunk := strings.Repeat("x", 64<<10)
	var wg sync.WaitGroup
	slots := make(chan struct{}, 20)
	for i := range 200 {
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			conn := u.dial(t)
			defer conn.Close()
			switch i % 4 {
			case 0: // says how large it is
				fmt.Fprint(conn, u.request(fmt.Sprintf("Content-Length: %d\r\n", size))+wireFile)
			case 1: // does not
				fmt.Fprintf(conn, "%s%x\r\n%s\r\n", u.request("Transfer-Encoding: chunked\r\n"), len(wireFile), wireFile)
				for range size / len(chunk) {
					if _, err := fmt.Fprintf(conn, "%x\r\n%s\r\n", len(chunk), chunk); err != nil {
						break
					}
				}
			default: // goes away
				fmt.Fprint(conn, u.request("Content-Length: 2500000\r\n")+wireFile+strings.Repeat("x", 1_000_000))
				return
			}
			res, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				return // the answer was lost in the reset that ends an unread body
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusRequestEntityTooLarge {
				t.Errorf("status %d", res.StatusCode)
			}
		})
	}
	wg.Wait()
	eventually(t, "the last handlers to end", func() bool {
		u.uploading.mu.Lock()
		defer u.uploading.mu.Unlock()
		return u.uploading.total == 0
	})
	u.empty(t)
	runtime.GC()
	runtime.ReadMemStats(&after)
	if grown := int64(after.HeapAlloc) - int64(before.HeapAlloc); grown > 32<<20 {
		t.Errorf("the heap grew by %d bytes", grown)
	}
}

// eventually waits for what needs no more than other goroutines to get on.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	for begun := time.Now(); !done(); runtime.Gosched() {
		if time.Since(begun) > patienceOfTest {
			t.Fatalf("waited in vain for %s", what)
		}
	}
}

// The reader of forms passes on why it ended, whatever package multipart makes of it.
func TestFormReader(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	body := strings.Join([]string{"--b", `Content-Disposition: form-data; name="a"`, "", "text", "--b--", ""}, "\r\n")
	for cut := range len(body) {
		f := &formReader{r: io.MultiReader(strings.NewReader(body[:cut]), errReader{broken})}
		f.parts = multipart.NewReader(f, "b")
		var err error
		for err == nil {
			_, err = f.next()
		}
		if errors.Is(err, io.EOF) {
			err = f.finish()
		}
		if !errors.Is(err, broken) {
			t.Errorf("cut at %d: %v", cut, err)
		}
	}
}

type errReader struct{ err error }

func (e errReader) Read([]byte) (int, error) { return 0, e.err }

// Neither part names nor values make a form that the reader stumbles over.
func FuzzUploadForm(f *testing.F) {
	f.Add([]byte(wireFile + "\r\n--b--\r\n"))
	f.Add([]byte("--b\r\nContent-Disposition: form-data; name=\"activity[from][id]\"\r\n\r\n\"x\r\n--b--"))
	f.Fuzz(func(t *testing.T, body []byte) {
		form := &formReader{r: bytes.NewReader(body)}
		form.parts = multipart.NewReader(form, "b")
		for n := 0; n <= maxParts; n++ {
			part, err := form.next()
			if err != nil {
				break
			}
			text, err := io.ReadAll(part)
			if err != nil {
				break
			}
			got := map[string]json.RawMessage{}
			if addMember(got, part.FormName(), text) == nil {
				for name, value := range got {
					if checkJSON(value) != nil {
						t.Errorf("%s: %q", name, value)
					}
				}
			}
		}
	})
}

// A form's text counts against the memory for bodies; its file does not.
func TestUploadMemory(t *testing.T) {
	t.Parallel()
	u := newUploader(t, func(d *Deps) { d.BodyMemory = 40 << 10 })
	large := formPart{"activity[text]", "", strings.Repeat("x", 60<<10)}
	for range 2 {
		u.send(t, []formPart{{"file", "a.png", testPNG + strings.Repeat("x", 1<<20)}, large}).is(t, 503, codeOverloaded)
	}
	u.empty(t)
	u.send(t, []formPart{{"file", "a.png", testPNG + strings.Repeat("x", 1<<20)}, {"activity[text]", "", "short"}}).is(t, 200, "")
}
