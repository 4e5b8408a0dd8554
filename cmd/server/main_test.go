package main

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"converger/migrations/pgtest"
)

// envProgram makes the test binary be the program, for tests that need a process: one to kill, or one that a pasted line
// starts. With the value "tied" the process ends with whoever holds its standard input, so that none outlives the tests.
const envProgram = "CONVERGER_TEST_AS_PROGRAM"

func TestMain(m *testing.M) {
	switch os.Getenv(envProgram) {
	case "":
		slog.SetDefault(slog.New(noLog{slog.NewTextHandler(os.Stderr, nil)}))
		pgtest.Main(m)
	case "tied":
		go func() {
			_, _ = io.Copy(io.Discard, os.Stdin)
			os.Exit(3)
		}()
		cheapPasswords()
		fallthrough
	default:
		main()
	}
}

// noLog is the default log, to which nothing of ours may write: operators read the program's.
type noLog struct{ slog.Handler }

// Handle implements slog.Handler.

func (h noLog) Handle(ctx context.Context, r slog.Record) error {
	if f, _ := runtime.CallersFrames([]uintptr{r.PC}).Next(); strings.HasPrefix(f.Function, "converger/") {
		panic(f.Function + " was not given the program's log, and writes to slog.Default: " + r.Message)
	}
	return h.Handler.Handle(ctx, r)
}

// patience is how long a test waits for what should happen at once: two busy processors and the race detector included.
const patience = 40 * time.Second

// withinASecond is how long a test waits for what is promised within a second: beyond that it is the machine's.
const withinASecond = 10 * time.Second

// journal keeps what a program writes, and lets a test wait for a line. Safe for concurrent use.
type journal struct {
	mu      sync.Mutex
	text    []byte
	changed chan struct{} // closed at the next write
}

func newJournal() *journal { return &journal{changed: make(chan struct{})} }

func (j *journal) Write(b []byte) (int, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.text = append(j.text, b...)
	close(j.changed)
	j.changed = make(chan struct{})
	return len(b), nil
}

func (j *journal) String() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return string(j.text)
}

// find returns the first whole line that holds part, and the channel that tells of more text.
func (j *journal) find(part string) (line string, more <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for l := range bytes.Lines(j.text) {
		if bytes.HasSuffix(l, []byte("\n")) && bytes.Contains(l, []byte(part)) {
			return string(bytes.TrimSpace(l)), j.changed
		}
	}
	return "", j.changed
}

// await waits for a line that holds part; ended tells that no more will come.
func (j *journal) await(part string, ended <-chan struct{}) (string, error) {
	timeout := time.After(patience)
	for over := false; ; {
		line, more := j.find(part)
		if line != "" {
			return line, nil
		}
		if over {
			return "", fmt.Errorf("it ended before it said %q:\n%s", part, j)
		}
		select {
		case <-more:
		case <-ended:
			over = true // look once more: the line may have come just before
		case <-timeout:
			return "", fmt.Errorf("%s have passed without %q:\n%s", patience, part, j)
		}
	}
}

// program is a run of the program, in this process or in one of its own.
type program struct {
	out, log *journal
	base     string        // where it serves, when it does
	ended    chan struct{} // closed when it has ended
	err      error         // why, set before
	cancel   func()
	process  *os.Process // of a spawned one
}

// start runs the program in this process, until the test ends or [program.stop].
func start(t testing.TB, environ map[string]string, args ...string) *program {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	p := &program{out: newJournal(), log: newJournal(), ended: make(chan struct{}), cancel: cancel}
	go func() {
		defer close(p.ended)
		p.err = run(ctx, args, func(name string) string { return environ[name] }, p.out, p.log)
	}()
	t.Cleanup(func() { _ = p.stop(t) })
	return p
}

// spawn runs the program in a process of its own, until the test ends, [program.stop] or [program.kill].
func spawn(t testing.TB, environ map[string]string, args ...string) *program {
	t.Helper()
	return spawnCommand(t, environ, append([]string{os.Args[0]}, args...))
}

// spawnCommand is spawn for a whole command, such as the program in a network namespace.
func spawnCommand(t testing.TB, environ map[string]string, command []string) *program {
	t.Helper()
	p := &program{out: newJournal(), log: newJournal(), ended: make(chan struct{})}
	cmd := exec.Command(command[0], command[1:]...) //nolint:noctx // ended by cancel
	cmd.Stdout, cmd.Stderr = p.out, p.log
	cmd.Env = []string{envProgram + "=tied", "HOME=" + os.Getenv("HOME"), "PATH=" + os.Getenv("PATH")}
	for name, value := range environ {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.ended)
		p.err = cmd.Wait()
	}()
	p.process = cmd.Process
	p.cancel = func() {
		_ = cmd.Process.Kill()
		_ = stdin.Close()
	}
	t.Cleanup(p.kill)
	return p
}

// kill ends a spawned program as SIGKILL does, at once and without a word, and waits for its end.
func (p *program) kill() {
	p.cancel()
	<-p.ended
}

// stop asks the program to stop and returns what it ended with.
func (p *program) stop(t testing.TB) error {
	t.Helper()
	p.cancel()
	select {
	case <-p.ended:
		return p.err
	case <-time.After(patience):
		t.Errorf("the program did not stop:\n%s", p.log)
		return errors.New("did not stop")
	}
}

// result waits for the end of a program that ends by itself.
func (p *program) result(t testing.TB) error {
	t.Helper()
	select {
	case <-p.ended:
		return p.err
	case <-time.After(patience):
		t.Fatalf("the program did not end:\n%s\n%s", p.out, p.log)
		return nil
	}
}

// runOK runs a command that ends by itself and returns what it printed.
func runOK(t testing.TB, environ map[string]string, args ...string) string {
	t.Helper()
	p := start(t, environ, args...)
	if err := p.result(t); err != nil {
		t.Fatalf("server %s: %v\n%s%s", strings.Join(args, " "), err, p.out, p.log)
	}
	return p.out.String()
}

// Secrets of the tests: random once, and of no installation.
const (
	testSecretKeyBase = "Zk1fT0pQxw2u8RrYb7NnVd4LhC9sMjEaGq5tKzXi3PyUwoB6vFJHlDgSmRcWTe0A"
	testCloakKey      = "q1Yw0nH7v3Jz8rT5kXb2LmPd9sGfUe6cAoRi4NtWyZE="
)

// serveEnv is the environment of `server serve` on a database, with changes.
func serveEnv(url string, changes map[string]string) map[string]string {
	e := map[string]string{
		"DATABASE_URL":                  url,
		"LISTEN":                        "127.0.0.1:0",
		"PUBLIC_URL":                    "http://hub.test",
		"SECRET_KEY_BASE":               testSecretKeyBase,
		"CLOAK_KEY":                     testCloakKey,
		"WEBHOOK_ALLOW_PRIVATE_TARGETS": "true",
		"DRAIN_DELAY_MS":                "0",
		"CONN_LIMIT_PER_IP":             "10000", // all callers of a test are one address
	}
	maps.Copy(e, changes)
	return e
}

// noLimits switches off what would slow a test's load down.
var noLimits = map[string]string{"RATE_LIMIT_ENABLED": "false"}

// ready waits until a `serve` answers and finds out where.
func (p *program) ready(t testing.TB) *program {
	t.Helper()
	line, err := p.log.await(`"msg":"ready"`, p.ended)
	if err != nil {
		t.Fatal(err)
	}
	var entry struct {
		Address string `json:"address"`
	}
	if err := json.Unmarshal([]byte(line), &entry); err != nil {
		t.Fatal(err)
	}
	p.base = "http://" + entry.Address
	return p
}

// serve starts `server serve` in this process and waits until it is ready.
func serve(t testing.TB, url string, changes map[string]string) *program {
	t.Helper()
	environ := serveEnv(url, changes)
	if environ["UPLOAD_DIR"] == "" {
		environ["UPLOAD_DIR"] = t.TempDir()
	}
	return start(t, environ, "serve").ready(t)
}

// api calls a hub with one credential. The address may change under it, for a hub that comes back elsewhere. Safe for
// concurrent use.
type api struct {
	base   *atomic.Pointer[string]
	header http.Header
	client *http.Client
}

// newAPI makes an api with headers given as name, value, ….
func newAPI(t testing.TB, base string, headers ...string) *api {
	a := &api{base: new(atomic.Pointer[string]), header: http.Header{}, client: &http.Client{
		Timeout: patience, Transport: &http.Transport{MaxIdleConnsPerHost: 64},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}
	a.base.Store(&base)
	for i := 0; i < len(headers); i += 2 {
		a.header.Set(headers[i], headers[i+1])
	}
	t.Cleanup(a.client.CloseIdleConnections)
	return a
}

// with is the same hub by other headers.
func (a *api) with(headers ...string) *api {
	b := &api{base: a.base, header: http.Header{}, client: a.client}
	for i := 0; i < len(headers); i += 2 {
		b.header.Set(headers[i], headers[i+1])
	}
	return b
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

func (a answer) String() string { return fmt.Sprintf("%d %s", a.status, a.body) }

// data decodes the member data of the answer.
func data[T any](t testing.TB, a answer) T {
	t.Helper()
	var v struct{ Data T }
	if err := json.Unmarshal(a.body, &v); err != nil {
		t.Fatalf("%v: %s", err, a)
	}
	return v.Data
}

// try sends a request; its error is that of the connection. Further headers are given as name, value, ….
func (a *api) try(ctx context.Context, method, path, body string, headers ...string) (answer, error) {
	req, err := http.NewRequestWithContext(ctx, method, *a.base.Load()+path, strings.NewReader(body))
	if err != nil {
		return answer{}, err
	}
	req.Header = a.header.Clone()
	if body != "" && req.Header.Get("Content-Type") == "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(headers); i += 2 {
		req.Header.Set(headers[i], headers[i+1])
	}
	res, err := a.client.Do(req)
	if err != nil {
		return answer{}, err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	return answer{res.StatusCode, res.Header, b}, err
}

// call sends a request and fails the test unless it is answered with the status. It may be used by the test's goroutine only.
func (a *api) call(t testing.TB, want int, method, path, body string, headers ...string) answer {
	t.Helper()
	got, err := a.try(t.Context(), method, path, body, headers...)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	if got.status != want {
		t.Fatalf("%s %s: want %d, got %s", method, path, want, got)
	}
	return got
}

// object marshals a body; it never fails on maps of plain values.
func object(v map[string]any) string {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return string(b)
}

// management gives the management API of a hub, by a token that `server operator create` made.
func management(t testing.TB, p *program, url string) *api {
	t.Helper()
	token := strings.TrimSpace(runOK(t, nil, "operator", "create", "tests", "--database-url", url))
	return newAPI(t, p.base, "Authorization", "Bearer "+token)
}

// customer is a tenant with a key.
type customer struct {
	id  string
	api *api // by the key
	ops *api // the management API that made it
}

func newCustomer(t testing.TB, ops *api, name string) customer {
	t.Helper()
	type made struct {
		ID  string
		Key string `json:"api_key"`
	}
	tenant := data[made](t, ops.call(t, 201, "POST", "/api/v1/management/tenants", object(map[string]any{"name": name})))
	key := data[made](t, ops.call(t, 201, "POST", "/api/v1/management/tenants/"+tenant.ID+"/keys", `{"name":"tests"}`))
	return customer{tenant.ID, ops.with("X-Api-Key", key.Key), ops}
}

type wire struct {
	ID, Secret  string
	CallbackURL string `json:"callback_url"`
}

func (c customer) newChannel(t testing.TB, kind, mode string, config map[string]any) wire {
	t.Helper()
	return data[wire](t, c.ops.call(t, 201, "POST", "/api/v1/management/tenants/"+c.id+"/channels",
		object(map[string]any{"name": kind + " " + mode, "type": kind, "mode": mode, "config": config})))
}

func (c customer) newConversation(t testing.TB, channel string) string {
	t.Helper()
	return data[wire](t, c.api.call(t, 201, "POST", "/api/v1/conversations", object(map[string]any{"channel_id": channel}))).ID
}

// message is an activity as the API shows it.
type message struct {
	ID, Type, Sender, Text string
	Seq                    int64
	Metadata               map[string]any
	Attachments            []map[string]any
}

// activities lists a conversation by its watermark, page by page.
func (c customer) activities(t testing.TB, conversation string) []message {
	t.Helper()
	var all []message
	mark := ""
	for {
		a := c.api.call(t, 200, "GET", "/api/v1/conversations/"+conversation+"/activities?limit=500"+mark, "")
		var page struct {
			Data []message
			Meta struct {
				Watermark *string
				HasMore   bool `json:"has_more"`
			}
		}
		if err := json.Unmarshal(a.body, &page); err != nil {
			t.Fatal(err)
		}
		all = append(all, page.Data...)
		if !page.Meta.HasMore {
			return all
		}
		mark = "&watermark=" + *page.Meta.Watermark
	}
}

// gapless fails the test unless the activities carry seq 1, 2, 3, … in this order.
func gapless(t testing.TB, all []message) {
	t.Helper()
	for i, m := range all {
		if m.Seq != int64(i)+1 {
			t.Fatalf("seq %d stands at place %d of %d", m.Seq, i+1, len(all))
		}
	}
}

// eventually waits for something that nobody tells of. The pause between two looks is no synchronisation: it only keeps
// the processor free.
func eventually(t testing.TB, within time.Duration, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !ok(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %s: %s", within, what)
		}
	}
}

// metaSignature signs a body as Meta does (X-Hub-Signature-256).
func metaSignature(body, secret string) string {
	mac := hmac.New(sha256.New, []byte(secret))
	mac.Write([]byte(body))
	return "sha256=" + hex.EncodeToString(mac.Sum(nil))
}
