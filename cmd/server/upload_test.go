package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io/fs"
	"mime/multipart"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/migrations/pgtest"
)

// old makes a file look a day old, and makes it if it is not there.
func old(t testing.TB, path string) string {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		if err = os.MkdirAll(filepath.Dir(path), 0o700); err == nil {
			f, err = os.Create(path)
		}
	}
	day := time.Now().Add(-24 * time.Hour)
	if err == nil {
		err = errors.Join(f.Close(), os.Chtimes(path, day, day))
	}
	if err != nil {
		t.Fatal(err)
	}
	return path
}

// A client sends a picture, an endpoint is told where it is, the client fetches it, also after the hub has been started
// again; and what is refused leaves nothing in the folder.
func TestUploads(t *testing.T) {
	t.Parallel()
	url, dir := pgtest.New(t), filepath.Join(t.TempDir(), "files")
	own := newEndpoint(t)
	p := serve(t, url, map[string]string{"UPLOAD_DIR": dir, "UPLOAD_MAX_BYTES": "100000"})
	c := newCustomer(t, management(t, p, url), "Tenant")
	hook := c.newChannel(t, "webhook", "duplex", map[string]any{"url": own.url})
	secret := c.api.with("Authorization", "Bearer "+hook.Secret)
	var token struct{ Token, ConversationID string }
	decode := func(a answer, v any) {
		t.Helper()
		if err := json.Unmarshal(a.body, v); err != nil {
			t.Fatalf("%v: %s", err, a)
		}
	}
	decode(secret.call(t, 200, "POST", "/api/v1/converger/tokens/generate", `{}`), &token)
	decode(c.api.with("Authorization", "Bearer "+token.Token).call(t, 201, "POST", "/api/v1/converger/conversations", ""), &token)
	client := c.api.with("Authorization", "Bearer "+token.Token)

	picture := "\x89PNG\r\n\x1a\n" + strings.Repeat("pixels ", 10_000)
	send := func(want int, name, text string) answer {
		t.Helper()
		var b bytes.Buffer
		w := multipart.NewWriter(&b)
		if err := w.WriteField("activity", `{"text":"look"}`); err != nil {
			t.Fatal(err)
		}
		part, err := w.CreateFormFile("file", name)
		if err == nil {
			_, err = part.Write([]byte(text))
		}
		if err == nil {
			err = w.Close()
		}
		if err != nil {
			t.Fatal(err)
		}
		return client.call(t, want, "POST", "/api/v1/converger/conversations/"+token.ConversationID+"/upload", b.String(),
			"Content-Type", w.FormDataContentType())
	}
	files := func() (n int) {
		err := filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
			if err == nil && !d.IsDir() {
				n++
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	send(415, "a.png", "\x7fELF\x02\x01\x01\x00")
	send(413, "a.png", picture+strings.Repeat("x", 100_000))
	if n := files(); n != 0 {
		t.Errorf("%d files of refused uploads", n)
	}
	var sent struct {
		ID          string
		Attachments []struct{ ContentURL string }
	}
	decode(send(200, "a.png", picture), &sent)
	link := sent.Attachments[0].ContentURL
	told := own.await(t, sent.ID).message
	if len(told.Attachments) != 1 || told.Attachments[0]["contentUrl"] != link || told.Attachments[0]["name"] != "a.png" || told.Text != "look" {
		t.Errorf("the endpoint was told %+v", told)
	}
	fetch := func() {
		t.Helper()
		a := client.call(t, 200, "GET", link, "")
		if string(a.body) != picture || a.header.Get("Content-Type") != "image/png" || a.header.Get("X-Content-Type-Options") != "nosniff" {
			t.Errorf("fetched %d bytes, %v", len(a.body), a.header)
		}
	}
	fetch()
	if ready := c.api.call(t, 200, "GET", "/health/ready", ""); !strings.Contains(string(ready.body), `"uploads":"ok"`) {
		t.Errorf("readiness: %s", ready)
	}

	if err := p.stop(t); err != nil {
		t.Fatal(err)
	}
	// A node that was killed between a file and its row leaves an orphan; a folder of another database is not swept.
	orphan := old(t, filepath.Join(dir, c.id, uuid.NewString()))
	stranger := old(t, filepath.Join(dir, uuid.NewString(), uuid.NewString()))
	old(t, filepath.Join(dir, filepath.Base(filepath.Dir(orphan)), filepath.Base(link)))
	p = serve(t, url, map[string]string{"UPLOAD_DIR": dir})
	client.base.Store(&p.base)
	eventually(t, patience, "the orphan to be removed", func() bool {
		_, err := os.Stat(orphan)
		return errors.Is(err, fs.ErrNotExist)
	})
	fetch()
	if _, err := os.Stat(stranger); err != nil || files() != 2 {
		t.Errorf("%d files, want 2; %v", files(), err)
	}

	// The folder goes: the hub stays ready for all the rest, and says what is wrong.
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, "readiness to tell", func() bool {
		a := client.call(t, 200, "GET", "/health/ready", "")
		return strings.Contains(string(a.body), "UPLOAD_DIR") && strings.Contains(string(a.body), `"degraded"`)
	})
	client.call(t, 503, "GET", link, "")
	send(503, "a.png", picture)
}
