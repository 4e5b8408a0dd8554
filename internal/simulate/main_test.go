package simulate

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// output is a writer for several goroutines.
type output struct {
	mu     sync.Mutex
	buf    bytes.Buffer
	awaits map[string]chan struct{}
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.buf.Write(p)
	for text, seen := range o.awaits {
		if bytes.Contains(p, []byte(text)) {
			close(seen)
			delete(o.awaits, text)
		}
	}
	return len(p), nil
}

// await returns a channel that is closed when a write holds the text.
func (o *output) await(text string) <-chan struct{} {
	o.mu.Lock()
	defer o.mu.Unlock()
	seen := make(chan struct{})
	if o.awaits == nil {
		o.awaits = map[string]chan struct{}{}
	}
	o.awaits[text] = seen
	return seen
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// want fails unless the output holds all of the texts.
func (o *output) want(t *testing.T, texts ...string) {
	t.Helper()
	for _, text := range texts {
		if !strings.Contains(o.String(), text) {
			t.Errorf("the output lacks %q:\n%s", text, o)
		}
	}
}

// request is a post that a hub received.
type request struct {
	path   string
	header http.Header
	body   []byte
}

// hub stands in for the server: it keeps what is posted and answers as told.
type hub struct {
	*httptest.Server
	mu       sync.Mutex
	requests []request
}

// newHub answers every post with answer, 200 if it is nil.
func newHub(t *testing.T, answer func(w http.ResponseWriter, r request)) *hub {
	t.Helper()
	h := &hub{}
	h.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		body, err := io.ReadAll(req.Body)
		if err != nil {
			t.Errorf("read the post: %v", err)
		}
		r := request{path: req.Method + " " + req.URL.Path, header: req.Header.Clone(), body: body}
		h.mu.Lock()
		h.requests = append(h.requests, r)
		h.mu.Unlock()
		if answer != nil {
			answer(w, r)
		}
	}))
	t.Cleanup(h.Close)
	return h
}

func (h *hub) received() []request {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.requests
}

func (h *hub) bodies() []string {
	var out []string
	for _, r := range h.received() {
		out = append(out, string(r.body))
	}
	return out
}
