package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"mime/multipart"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/devpg"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/migrations/pgtest"
)

// canary is a planted secret.
type canary struct {
	name, value string
	public      int  // bytes at the beginning that may be shown, as of an API key in lists
	content     bool // no credential but what people write: it may be stored, and never logged
}

// exit is something that came out of the program.
type exit struct {
	where, text string
	shows       []string // values that this answer is there to show, once
	holds       bool     // content: the database, and answers that are no refusals
}

// aviary plants canaries and collects what comes out. One goroutine uses it.
type aviary struct {
	t     *testing.T
	birds []canary
	exits []exit
}

// plant makes a new secret of 26 random letters and digits.
func (a *aviary) plant(name string) string { return a.known(name, rand.Text()) }

// known adds a secret that somebody else made.
func (a *aviary) known(name, value string) string {
	a.t.Helper()
	if len(value) < 16 {
		a.t.Fatalf("%s is too short to be found: %q", name, value)
	}
	a.birds = append(a.birds, canary{name: name, value: value})
	return value
}

// content makes a text that is nobody's credential, and nobody's business.
func (a *aviary) content(name string) string {
	value := rand.Text()
	a.birds = append(a.birds, canary{name: name, value: value, content: true})
	return value
}

// token adds one of ours, whose first characters are shown in lists.
func (a *aviary) token(name, value string) string {
	a.t.Helper()
	a.known(name, value)
	a.birds[len(a.birds)-1].public = 13
	return value
}

// jwt adds a token of three parts. The first two are alike in all of them: the signature is what nobody else has.
func (a *aviary) jwt(name, value string) string {
	a.t.Helper()
	a.known(name, value)
	a.birds[len(a.birds)-1].public = strings.LastIndexByte(value, '.') + 1
	return value
}

// cookie adds the value of a cookie. What it is about may stand elsewhere: its end is what nobody else has.
func (a *aviary) cookie(name, value string) string {
	a.t.Helper()
	a.known(name, value)
	a.birds[len(a.birds)-1].public = len(value) - 24
	return value
}

func (a *aviary) saw(where, text string) { a.exits = append(a.exits, exit{where: where, text: text}) }

// call sends a request and keeps the whole answer, which may show the given values of its body's members and nothing else.
func (a *aviary) call(to *api, method, path, body string, shows []string, headers ...string) answer {
	a.t.Helper()
	got, err := to.try(a.t.Context(), method, path, body, headers...)
	if err != nil {
		a.saw("an error of the client", err.Error()) // it names the address: of no interest
		return answer{}
	}
	e := exit{where: fmt.Sprintf("answer %d of %s %s", got.status, method, strings.SplitN(path, "?", 2)[0]), text: fmt.Sprint(got.header, "\n", string(got.body)), holds: got.status < 400}
	var members any
	if json.Unmarshal(got.body, &members) == nil {
		for _, name := range shows {
			e.shows = append(e.shows, membersOf(members, name)...)
		}
	}
	a.exits = append(a.exits, e)
	return got
}

// membersOf finds the texts of all members of a name, at any depth.
func membersOf(v any, name string) (found []string) {
	switch v := v.(type) {
	case map[string]any:
		for k, x := range v {
			if s, ok := x.(string); ok && k == name {
				found = append(found, s)
			}
			found = append(found, membersOf(x, name)...)
		}
	case []any:
		for _, x := range v {
			found = append(found, membersOf(x, name)...)
		}
	}
	return found
}

// needles are what gives a value away: its pieces, and the beginnings of its encodings.
func (c canary) needles() []string {
	secret := c.value[c.public:]
	size := min(12, len(secret))
	var all []string
	for i := 0; i+size <= len(secret); i += size {
		all = append(all, secret[i:i+size])
	}
	all = append(all, secret[len(secret)-size:])
	b := []byte(c.value)
	all = append(all, hex.EncodeToString(b[c.public:][:size]), base64.StdEncoding.EncodeToString(b)[c.public*4/3:][:16])
	if escaped := url.QueryEscape(secret); escaped != secret {
		all = append(all, escaped)
	}
	if quoted, _ := json.Marshal(secret); string(quoted) != `"`+secret+`"` {
		all = append(all, strings.Trim(string(quoted), `"`))
	}
	return all
}

// search fails the test for every canary that flew out.
func (a *aviary) search() {
	a.t.Helper()
	for _, bird := range a.birds {
		needles := bird.needles()
		for _, e := range a.exits {
			if bird.content && e.holds || slices.ContainsFunc(e.shows, func(v string) bool { return strings.Contains(v, bird.value) || strings.Contains(bird.value, v) }) {
				continue
			}
			for _, n := range needles {
				if at := strings.Index(e.text, n); at >= 0 {
					a.t.Errorf("the %s is in the %s: …%.200q…", bird.name, e.where, e.text[max(0, at-60):])
					break
				}
			}
		}
	}
}

// An echoing provider answers 400 with everything that it was sent; to fill the excerpt so that its end cuts a secret in
// two, it begins with so many dots.
func newEchoingProvider(t *testing.T) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		dots, _ := strconv.Atoi(r.Header.Get("X-Dots"))
		w.WriteHeader(http.StatusBadRequest)
		fmt.Fprintf(w, "%sAuthorization: %s\nheaders: %v\nbody: %s", strings.Repeat(".", dots), r.Header.Get("Authorization"), r.Header, body)
	}))
	t.Cleanup(s.Close)
	return s
}

// TestCanaries plants a secret in every place where one can enter, at the finest log level, provokes what goes wrong, and
// searches everything that comes out: logs, answers, pages, metrics, every table, the log of Postgres, its sessions, and
// the arguments of processes.
//
// To extend it: a new variable goes into environment; a new credential, header or member into one of the plant functions
// of plantings; a new page into pages; a new command into commands.
func TestCanaries(t *testing.T) {
	t.Parallel()
	a := &aviary{t: t}
	dir := tempDir(t)
	config := devpg.Config{Dir: filepath.Join(dir, "pg"), BinDir: os.Getenv("PG_BIN"), VendoredDir: vendored, Fast: true}
	pg, err := devpg.Start(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = pg.Stop(context.Background()) })
	database, err := url.Parse(pg.URL())
	if err != nil {
		t.Fatal(err)
	}
	password, _ := database.User.Password()
	a.known("database password", password)
	runOK(t, nil, "migrate", "up", "--database-url", pg.URL())

	environ := a.environment(dir, pg.URL())
	p := spawn(t, environ, "serve").ready(t)
	w := &canaryWorld{aviary: a, environ: environ, url: pg.URL(), program: p, provider: newEchoingProvider(t)}
	w.prepare()
	for _, plant := range w.plantings() {
		plant()
	}
	w.processes("while it serves", p.process.Pid, pg.PID())
	w.metrics(environ)
	w.pages()

	// The database goes away under everything that was sent before.
	if err := pg.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, plant := range w.plantings() {
		plant()
	}
	w.pages()
	if pg, err = devpg.Start(t.Context(), config); err != nil {
		t.Fatal(err)
	}
	eventually(t, patience, "the hub to be ready again", func() bool {
		got, err := w.nobody.try(t.Context(), "GET", "/health/ready", "")
		return err == nil && got.status == http.StatusOK
	})
	w.plantings()[0]()
	w.metrics(environ)
	w.commands()
	p.kill()
	a.saw("standard output of serve", p.out.String())
	a.saw("log of serve", p.log.String())
	if strings.Count(p.log.String(), "\n") < 100 || !strings.Contains(p.log.String(), `"level":"DEBUG"`) {
		t.Errorf("the log is too short, or not fine enough, to prove anything:\n%.2000s", p.log)
	}
	w.tables()
	w.postgresLog(config.Dir)
	a.search()
	for _, e := range a.exits {
		if e.text == "" {
			t.Logf("nothing came out of %s", e.where)
		}
	}
	t.Logf("%d canaries, %d exits", len(a.birds), len(a.exits))
}

// environment is that of the hub: some secrets as variables, some as files with either kind of line end.
func (a *aviary) environment(dir, databaseURL string) map[string]string {
	a.t.Helper()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			a.t.Fatal(err)
		}
		return path
	}
	key := func() string {
		b := make([]byte, secrets.KeySize)
		_, _ = rand.Read(b)
		return base64.StdEncoding.EncodeToString(b)
	}
	base := func() string { return rand.Text() + rand.Text() + rand.Text() }
	return serveEnv("", map[string]string{
		"DATABASE_URL_FILE":         file("url", databaseURL+"\n"),
		"SECRET_KEY_BASE":           "",
		"SECRET_KEY_BASE_FILE":      file("base", a.known("SECRET_KEY_BASE_FILE", base())+"\r\n"),
		"SECRET_KEY_BASE_PREVIOUS":  a.known("SECRET_KEY_BASE_PREVIOUS", base()),
		"CLOAK_KEY":                 a.known("CLOAK_KEY", key()),
		"CLOAK_RETIRED_KEYS_FILE":   file("retired", a.known("first of CLOAK_RETIRED_KEYS_FILE", key())+","+a.known("second of CLOAK_RETIRED_KEYS_FILE", key())),
		"METRICS_TOKEN":             a.plant("METRICS_TOKEN"),
		"UPLOAD_DIR":                filepath.Join(dir, "uploads"),
		"LOG_LEVEL":                 "debug",
		"RATE_LIMITS":               `{"unknown_caller":"off","token_generate":"off","token_create":"off","login_ip":"off","login_account":"off","web_page":{"backend":"redis"}}`,
		"RATE_LIMIT_REDIS_URL_FILE": file("redis", "redis://hub:"+a.plant("password of a Redis that is not there")+"@127.0.0.1:1\n"),
		"BCRYPT_COST":               "10",
	})
}

// canaryWorld is a hub with everything that has a secret.
type canaryWorld struct {
	*aviary
	environ     map[string]string
	url         string
	program     *program
	provider    *httptest.Server
	nobody, ops *api
	tenant      string
	key         *api
	hook, meta  wire
	infobip     wire
	lost        wire // its endpoint is not there
	path        string
	client      string // token
	chats       []string
	people      []person
	appSecret   string
	verifyToken string
	basic       string
	fixed       string
	pool        *pgxpool.Pool
	jobs        int // rows of jobs that were seen
}

// person is somebody who signs in.
type person struct {
	home, at        string // of the pages, and of the user in the management API
	email, password string
	link            string // the path that spends the last sign-in link
	browser         *api   // with the cookies of the last sign-in
}

// form sends a page's form, as a browser does.
func (w *canaryWorld) form(to *api, path string, fields ...string) answer {
	values := url.Values{}
	for i := 0; i < len(fields); i += 2 {
		values.Set(fields[i], fields[i+1])
	}
	return w.call(to, "POST", path, values.Encode(), nil, "Content-Type", "application/x-www-form-urlencoded", "Accept", "text/html", "Sec-Fetch-Site", "same-origin")
}

// signIn sends a form that opens a session. Its answer is there to give the cookies.
func (w *canaryWorld) signIn(p *person, path string, fields ...string) {
	got := w.form(w.nobody, path, fields...)
	if got.status != http.StatusSeeOther {
		return // the database is away
	}
	var pairs []string
	for _, c := range (&http.Response{Header: got.header}).Cookies() {
		pairs = append(pairs, c.Name+"="+w.cookie("cookie "+c.Name, c.Value))
		gives := &w.exits[len(w.exits)-1]
		gives.shows = append(gives.shows, c.Value)
	}
	p.browser = w.nobody.with("Cookie", strings.Join(pairs, "; "), "Accept", "text/html")
}

// issueLink makes a sign-in link. The page with its button has it in the button's address.
func (w *canaryWorld) issueLink(p *person) {
	got := w.call(w.ops, "POST", p.at+"/sign_in_link", "", []string{"url"})
	if got.status != http.StatusCreated {
		return
	}
	link := membersOf(decoded(got), "url")[0]
	token := w.known("sign-in link", link[strings.LastIndexByte(link, '/')+1:])
	p.link = p.home + "/link/" + token
	w.call(w.nobody, "GET", p.link, "", nil, "Accept", "text/html")
	w.exits[len(w.exits)-1].shows = []string{token}
}

func (w *canaryWorld) prepare() {
	t := w.t
	t.Helper()
	w.nobody = newAPI(t, w.program.base)
	w.pool = pgtest.Open(t, w.url, postgres.Options{MaxConns: 2})
	const management = "/api/v1/management"
	w.ops = w.nobody.with("Authorization", "Bearer "+w.token("operator token", strings.TrimSpace(runOK(t, nil, "operator", "create", "canary", "--database-url", w.url))))
	create := func(to *api, path string, body map[string]any, shows ...string) wire {
		t.Helper()
		got := w.call(to, "POST", path, object(body), shows)
		if got.status != http.StatusCreated {
			t.Fatalf("POST %s: %s", path, got)
		}
		return data[wire](t, got)
	}
	w.tenant = create(w.ops, management+"/tenants", map[string]any{"name": "Canary"}).ID
	tenant := management + "/tenants/" + w.tenant
	got := w.call(w.ops, "POST", tenant+"/keys", `{"name":"canary"}`, []string{"api_key"})
	w.key = w.nobody.with("X-Api-Key", w.token("API key", data[map[string]any](t, got)["api_key"].(string)))
	channels := tenant + "/channels"
	w.hook = create(w.ops, channels, map[string]any{"name": "hook", "type": "webhook", "secret": w.plant("chosen secret of a channel"), "config": map[string]any{
		"url": w.provider.URL + "/?token=" + w.content("token in a channel's address"), "headers": map[string]any{
			"Authorization": "Bearer " + w.plant("Authorization of a channel"), "X-Own-Key": w.plant("header of a channel"), "X-Dots": "0"}}}, "secret")
	split := create(w.ops, channels, map[string]any{"name": "split", "type": "webhook", "config": map[string]any{
		"url": w.provider.URL, "headers": map[string]any{"X-Dots": fmt.Sprint(2048 - len("Authorization: Bearer ") - 14),
			"Authorization": "Bearer " + w.plant("credential that the end of an excerpt cuts in two")}}}, "secret")
	w.known("made secret of a channel", split.Secret)
	w.lost = create(w.ops, channels, map[string]any{"name": "lost", "type": "webhook", "config": map[string]any{
		"url": "http://127.0.0.1:1/?key=" + w.content("key in a lost channel's address")}}, "secret")
	w.known("secret of a lost channel", w.lost.Secret)
	w.appSecret, w.verifyToken = w.plant("app secret"), w.plant("verify token")
	w.meta = create(w.ops, channels, map[string]any{"name": "meta", "type": "whatsapp_meta", "config": map[string]any{"phone_number_id": "1",
		"app_secret": w.appSecret, "previous_app_secret": w.plant("previous app secret"), "verify_token": w.verifyToken, "access_token": w.plant("access token of a provider")}}, "secret")
	w.known("secret of the Meta channel", w.meta.Secret)
	w.basic, w.fixed = w.plant("basic password"), w.plant("fixed header")
	w.infobip = create(w.ops, channels, map[string]any{"name": "infobip", "type": "whatsapp_infobip", "config": map[string]any{"sender": "1", "basic_user": "infobip",
		"basic_password": w.basic, "previous_basic_password": w.plant("previous basic password"), "header_name": "X-Fixed", "header_value": w.fixed,
		"previous_header_value": w.plant("previous fixed header"), "api_key": w.plant("API key of a provider"), "base_url": "https://example.com"}}, "secret", "callback_url")
	w.known("secret of the Infobip channel", w.infobip.Secret)
	w.path = w.known("secret in an address", w.infobip.CallbackURL[strings.LastIndex(w.infobip.CallbackURL, "/")+1:])

	// Rotated, so that there is a previous one.
	got = w.call(w.ops, "POST", management+"/channels/"+w.infobip.ID+"/secret", "", []string{"secret", "callback_url"})
	rotated := data[wire](t, got)
	w.known("secret after a rotation", rotated.Secret)
	w.known("secret in an address after a rotation", rotated.CallbackURL[strings.LastIndex(rotated.CallbackURL, "/")+1:])

	for _, p := range []person{{home: "/admin", at: management + "/admin_users"}, {home: "/portal", at: tenant + "/users"}} {
		p.email, p.password = "ada@example.com", w.plant("password of a user at "+p.home)
		p.at += "/" + create(w.ops, p.at, map[string]any{"email": p.email, "role": map[string]string{"/admin": "super_admin", "/portal": "owner"}[p.home],
			"password": p.password, "must_change_password": false}).ID
		w.people = append(w.people, p)
	}
	for _, channel := range []string{w.hook.ID, split.ID, w.lost.ID} {
		w.chats = append(w.chats, create(w.key, "/api/v1/conversations", map[string]any{"channel_id": channel}).ID)
	}
	got = w.call(w.nobody, "POST", "/api/v1/converger/tokens/generate", `{"user":{"id":"ada"}}`, []string{"token"}, "Authorization", "Bearer "+w.hook.Secret)
	w.client = w.jwt("client token", member(t, got, "token"))
	got = w.call(w.nobody, "POST", "/api/v1/converger/conversations", "", []string{"token"}, "Authorization", "Bearer "+w.client)
	w.jwt("bound client token", member(t, got, "token"))
	w.chats = append(w.chats, member(t, got, "conversationId"))
	got = w.call(w.nobody, "POST", "/api/v1/tokens", object(map[string]any{"conversation_id": w.chats[0], "user_id": "ada"}), []string{"token"}, "X-Channel-Token", w.hook.Secret)
	w.jwt("legacy client token", member(t, got, "token"))
	for i, chat := range w.chats[:3] {
		if got := w.call(w.key, "POST", "/api/v1/conversations/"+chat+"/activities", object(map[string]any{"text": w.content("text of message " + fmt.Sprint(i))}), nil); got.status != http.StatusCreated {
			t.Fatalf("%s", got)
		}
	}
	// The provider's 400 with the echo must have been stored, or the tables prove nothing.
	eventually(t, patience, "three failed attempts", func() bool {
		var n int
		return w.pool.QueryRow(t.Context(), `SELECT count(DISTINCT delivery_id) FROM attempts`).Scan(&n) == nil && n >= 3
	})
}

func member(t *testing.T, a answer, name string) string {
	t.Helper()
	var v map[string]any
	if err := json.Unmarshal(a.body, &v); err != nil {
		t.Fatalf("%v: %s", err, a)
	}
	s, ok := v[name].(string)
	if !ok {
		t.Fatalf("no %s: %s", name, a)
	}
	return s
}

// plantings are what enters by HTTP, right and wrong. They are played with the database and without.
func (w *canaryWorld) plantings() []func() {
	const management = "/api/v1/management"
	inbound := "/api/v1/channels/%s/inbound"
	at := func(ch wire) string { return fmt.Sprintf(inbound, ch.ID) }
	return []func(){
		func() { // credentials that work
			w.call(w.key, "GET", "/api/v1/conversations", "", nil)
			w.call(w.ops, "GET", management+"/tenants/"+w.tenant+"/channels", "", nil)
			w.call(w.ops, "GET", management+"/channels/"+w.infobip.ID, "", nil)
			w.call(w.ops, "GET", management+"/tenants/"+w.tenant+"/keys", "", nil)
			w.call(w.ops, "GET", management+"/inbound_events", "", nil)
			for _, chat := range w.chats {
				w.call(w.key, "GET", "/api/v1/conversations/"+chat, "", nil)
			}
			for _, d := range membersOf(decoded(w.call(w.key, "GET", "/api/v1/deliveries", "", nil)), "id") {
				w.call(w.key, "GET", "/api/v1/deliveries/"+d, "", nil)
			}
			w.call(w.nobody, "GET", "/api/v1/converger/conversations/"+w.chats[3]+"/activities", "", nil, "Authorization", "Bearer "+w.client)
			w.call(w.nobody, "GET", at(w.meta)+"?hub.mode=subscribe&hub.challenge=1&hub.verify_token="+w.verifyToken, "", nil)
			w.call(w.nobody, "POST", at(w.meta), `{"object":"whatsapp_business_account"}`, nil, "X-Hub-Signature-256", metaSignature(`{"object":"whatsapp_business_account"}`, w.appSecret))
			w.call(w.nobody, "POST", at(w.meta), "not JSON", nil, "X-Hub-Signature-256", metaSignature("not JSON", w.appSecret))
			w.seeJobs()
			w.call(w.nobody, "POST", at(w.infobip)+"/"+w.path, `{"results":[]}`, nil, "X-Fixed", w.fixed,
				"Authorization", "Basic "+w.known("basic credentials", base64.StdEncoding.EncodeToString([]byte("infobip:"+w.basic))))
			w.call(w.ops, "PATCH", management+"/channels/"+w.meta.ID, object(map[string]any{"name": "meta " + rand.Text()[:4], "config": map[string]any{"phone_number_id": "1",
				"app_secret": w.appSecret, "verify_token": w.verifyToken, "access_token": w.plant("new access token")}}), nil)
		},
		func() { // credentials that nobody issued
			for name, header := range map[string][2]string{
				"invented API key": {"X-Api-Key", ""}, "altered API key": {"X-Api-Key", w.key.header.Get("X-Api-Key")}, "bearer token": {"Authorization", "Bearer "},
				"basic credentials": {"Authorization", "Basic "}, "operator token": {"Authorization", "Bearer cvg_op_"}, "session token": {"Authorization", "Bearer cvg_ses_"},
				"JWT": {"Authorization", "Bearer eyJhbGciOiJIUzI1NiJ9."}, "channel token": {"X-Channel-Token", "whsec_"}, "cookie": {"Cookie", "session="}, "API key header": {"X-Api-Key", "cvg_live_"},
				"untrusted forwarding": {"X-Forwarded-For", ""}, "strange header": {"X-Secret", ""}, "user agent": {"User-Agent", ""}, "referer": {"Referer", "https://x.test/?token="},
				"origin": {"Origin", "https://u:"}, "idempotency key": {"Idempotency-Key", ""},
			} {
				value := header[1] + w.plant("wrong "+name)
				for _, path := range []string{"/api/v1/conversations", "/api/v1/converger/conversations/" + w.chats[3], management + "/tenants", "/metrics", "/", "/admin/login", "/no/such/page"} {
					w.call(w.nobody, "GET", path, "", nil, header[0], value)
				}
				w.call(w.nobody, "POST", "/api/v1/converger/tokens/generate", `{}`, nil, header[0], value)
				w.call(w.nobody, "POST", "/api/v1/converger/tokens/refresh", "", nil, header[0], value)
				w.call(w.nobody, "POST", "/api/v1/tokens", `{}`, nil, header[0], value)
				w.call(w.nobody, "POST", at(w.infobip), `{"results":[]}`, nil, header[0], value)
			}
		},
		func() { // signatures and proofs of webhooks that do not fit
			for name, value := range map[string]string{"X-Converger-Signature": "t=1,v1=", "Webhook-Signature": "v1,", "X-Hub-Signature-256": "sha256=", "X-Fixed": "", "Authorization": "Basic "} {
				for _, ch := range []wire{w.hook, w.meta, w.infobip} {
					w.call(w.nobody, "POST", at(ch), `{"text":"x"}`, nil, name, value+w.plant("wrong "+name), "Webhook-Id", "1", "Webhook-Timestamp", "1")
				}
			}
			w.call(w.nobody, "POST", at(w.infobip)+"/"+w.plant("wrong secret in an address"), `{"results":[]}`, nil)
			w.call(w.nobody, "GET", at(w.infobip)+"/"+w.plant("secret in an address, by GET"), "", nil)
			w.call(w.nobody, "POST", at(w.infobip)+"/"+w.path+"x", `{"results":[]}`, nil)
			w.call(w.nobody, "GET", at(w.meta)+"?hub.mode=subscribe&hub.challenge=1&hub.verify_token="+w.plant("wrong verify token"), "", nil)
		},
		func() { // addresses and queries
			for _, name := range []string{"api_key", "token", "access_token", "secret", "password", "cursor", "watermark", "limit", "status", "state", "from"} {
				for _, path := range []string{"/api/v1/conversations", "/api/v1/deliveries", "/api/v1/conversations/" + w.chats[0] + "/activities", "/health/ready", "/no/such/page"} {
					w.call(w.key, "GET", path+"?"+name+"="+w.plant("query "+name), "", nil)
				}
				w.call(w.ops, "GET", management+"/inbound_events?"+name+"="+w.plant("management query "+name), "", nil)
			}
			for _, path := range []string{"/%s", "/api/v1/conversations/%s", "/api/v1/deliveries/%s", management + "/tenants/%s", "/api/v1/channels/%s/inbound", "/problems/%s", "/static/%s", "/admin/sign-in/%s"} {
				w.call(w.nobody, "GET", fmt.Sprintf(path, w.plant("address "+path)), "", nil)
				w.call(w.key, "DELETE", fmt.Sprintf(path, w.plant("address to delete "+path)), "", nil)
			}
		},
		func() { // bodies that are refused
			secret := func(name string) string { return `"` + w.plant("refused body: "+name) + `"` }
			channels := management + "/tenants/" + w.tenant + "/channels"
			for name, body := range map[string]string{
				"cut off":           `{"name":"x","type":"echo","secret":` + secret("cut off"),
				"a wrong type":      `{"name":7,"type":"echo","secret":` + secret("a wrong type") + `}`,
				"an unknown type":   `{"name":"x","type":` + secret("an unknown type") + `}`,
				"an unknown member": `{"name":"x","type":"echo","password":` + secret("an unknown member") + `}`,
				"config":            `{"name":"x","type":"whatsapp_meta","config":{"phone_number_id":1,"app_secret":` + secret("app secret") + `,"verify_token":` + secret("verify token") + `,"access_token":[` + secret("access token") + `]}}`,
				"unknown config":    `{"name":"x","type":"whatsapp_meta","config":{"surprise":` + secret("unknown config") + `}}`,
				"header":            `{"name":"x","type":"webhook","config":{"url":"http://127.0.0.1/","headers":{"Host":` + secret("header") + `}}}`,
				"user in a URL":     `{"name":"x","type":"webhook","config":{"url":"https://user:` + strings.Trim(secret("user in a URL"), `"`) + `@example.com/"}}`,
				"URL":               `{"name":"x","type":"webhook","config":{"url":` + secret("URL") + `}}`,
				"taken":             `{"name":"hook","type":"echo","secret":` + secret("taken") + `}`,
				"taken secret":      `{"name":"y","type":"echo","secret":"` + w.hook.Secret + `"}`,
				"rate limit":        `{"name":"x","type":"echo","rate_limit":` + secret("rate limit") + `}`,
				"JSON within":       `{"name":"x","type":"webhook","config":"{\"headers\":{\"Authorization\":\"` + strings.Trim(secret("JSON within"), `"`) + `\"}}"}`,
			} {
				if got := w.call(w.ops, "POST", channels, body, nil); got.status == http.StatusCreated {
					w.t.Errorf("%s: accepted", name)
				}
			}
			w.call(w.ops, "POST", management+"/channels/"+w.hook.ID+"/secret", `{"secret":`+secret("secret with overlap")+`,"overlap_seconds":"x"}`, nil)
			w.call(w.ops, "POST", management+"/channels/"+w.hook.ID+"/secret", `{"secret":"`+w.hook.Secret+`"}`, nil)
			w.call(w.ops, "POST", management+"/tenants/"+w.tenant+"/keys", `{"name":"x","scopes":[`+secret("scope")+`]}`, nil)
			w.call(w.key, "POST", "/api/v1/conversations/"+w.chats[0]+"/activities", `{"type":`+secret("type of an activity")+`,"text":`+secret("text")+`}`, nil)
			w.call(w.nobody, "POST", "/api/v1/converger/tokens/generate", `{"scope":`+secret("scope of a token")+`}`, nil, "Authorization", "Bearer "+w.hook.Secret)
			w.call(w.nobody, "POST", "/api/v1/tokens", `{"channel_token":`+secret("token in a body")+`,"secret":`+secret("secret in a body")+`}`, nil)
			for _, path := range []string{"/admin/login", "/portal/login"} {
				w.call(w.nobody, "POST", path, url.Values{"email": {"a@example.com"}, "tenant": {"Canary"}, "password": {w.plant("password at " + path)}}.Encode(), nil,
					"Content-Type", "application/x-www-form-urlencoded", "Origin", w.program.base, "Sec-Fetch-Site", "same-origin")
			}
		},
		func() { // people
			for i := range w.people {
				p := &w.people[i]
				w.signIn(p, p.home+"/login", "tenant", "Canary", "email", p.email, "password", p.password)
				if p.browser == nil {
					w.t.Fatalf("nobody signs in at %s", p.home)
				}
				w.form(w.nobody, p.home+"/login", "tenant", "Canary", "email", p.email, "password", w.plant("wrong password at "+p.home))
				typed := w.plant("password in place of an address") // the form keeps what was typed there, and nothing else does
				w.form(w.nobody, p.home+"/login", "tenant", "Canary", "email", typed, "password", "x")
				w.exits[len(w.exits)-1].shows = []string{typed}
				w.form(w.nobody, p.home+"/login", "tenant", "Canary", "email", p.email, "password", strings.Repeat(w.plant("long password at "+p.home), 3))
				w.form(w.nobody, p.home+"/login?password="+w.plant("password in an address"), "password", "")
				w.form(w.nobody.with("Cookie", "cvg_admin_device=cvg_dev_"+w.plant("wrong device")+"; cvg_admin_session=cvg_ses_"+w.plant("wrong session")), p.home+"/logout")
				fresh := w.plant("new password at " + p.home)
				w.form(p.browser, p.home+"/password", "current_password", p.password, "password", w.plant("first of two"), "repeat", w.plant("second of two"))
				w.form(p.browser, p.home+"/password", "current_password", w.plant("wrong current password"), "password", fresh, "repeat", fresh)
				long := strings.Repeat(w.plant("long new password"), 3)
				w.form(p.browser, p.home+"/password", "current_password", p.password, "password", long, "repeat", long)
				if got := w.form(p.browser, p.home+"/password", "current_password", p.password, "password", fresh, "repeat", fresh); got.status == http.StatusSeeOther {
					p.password = fresh
				}
				w.call(w.ops, "POST", p.at+"/password", object(map[string]any{"password": long}), nil)
				w.call(w.ops, "PATCH", p.at, object(map[string]any{"password": w.plant("password in a change of a user")}), nil)
				w.call(w.ops, "GET", p.at, "", nil)
				w.call(w.ops, "GET", p.at+"/sessions", "", nil)
				w.issueLink(p)
				w.form(w.nobody, p.home+"/link/cvg_lnk_"+w.plant("wrong link"))
				w.form(w.nobody, map[string]string{"/admin": "/portal", "/portal": "/admin"}[p.home]+strings.TrimPrefix(p.link, p.home))
				w.signIn(p, p.link)
				w.form(w.nobody, p.link) // spent
			}
		},
		func() { // files
			var form bytes.Buffer
			m := multipart.NewWriter(&form)
			part, _ := m.CreateFormFile("file", w.content("name of a file")+".svg")
			_, _ = part.Write([]byte("<svg>" + w.content("content of a file") + "</svg>"))
			_ = m.WriteField("password", w.plant("field of a form"))
			_ = m.Close()
			w.call(w.nobody, "POST", "/api/v1/converger/conversations/"+w.chats[3]+"/upload", form.String(), nil, "Content-Type", m.FormDataContentType(), "Authorization", "Bearer "+w.client)
		},
		func() { // what is no HTTP, or too much of it
			for name, text := range map[string]string{
				"a request line":     "GET /" + w.plant("request line") + " HTTP/9.9\r\n\r\n",
				"a header's name":    "GET / HTTP/1.1\r\nHost: x\r\n" + w.plant("header's name") + " : x\r\n\r\n",
				"a header's value":   "GET / HTTP/1.1\r\nHost: x\r\nAuthorization: " + w.plant("header's value") + "\x00\r\n\r\n",
				"too many headers":   "GET / HTTP/1.1\r\nHost: x\r\nAuthorization: " + strings.Repeat(w.plant("long header"), 5000) + "\r\n\r\n",
				"a method":           w.plant("method") + " / HTTP/1.1\r\nHost: x\r\n\r\n",
				"a host":             "GET / HTTP/1.1\r\nHost: " + w.plant("host") + "/x\r\n\r\n",
				"a length":           "POST / HTTP/1.1\r\nHost: x\r\nContent-Length: " + w.plant("length") + "\r\n\r\n",
				"an encoding":        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: " + w.plant("encoding") + "\r\n\r\n",
				"a body that is cut": "POST /api/v1/tokens HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{\"secret\":\"" + w.plant("cut body"),
			} {
				w.raw(name, text)
			}
		},
	}
}

func decoded(a answer) any {
	var v any
	_ = json.Unmarshal(a.body, &v) // what is none has no members
	return v
}

// raw sends bytes and keeps what comes back.
func (w *canaryWorld) raw(name, text string) {
	w.t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(w.program.base, "http://"))
	if err != nil {
		w.t.Fatal(err)
	}
	defer conn.Close()
	_, _ = conn.Write([]byte(text)) // it may be cut off
	_ = conn.(*net.TCPConn).CloseWrite()
	b, _ := io.ReadAll(conn)
	w.saw("answer to "+name+" that is no HTTP", string(b))
}

func (w *canaryWorld) metrics(environ map[string]string) {
	got := w.call(w.nobody, "GET", "/metrics", "", nil, "Authorization", "Bearer "+environ["METRICS_TOKEN"])
	if got.status != http.StatusOK || !bytes.Contains(got.body, []byte("converger_rate_limit")) {
		w.t.Errorf("metrics: %.200s", got)
	}
}

// pages are what people and browsers open.
func (w *canaryWorld) pages() {
	for _, path := range []string{"/", "/problems", "/problems/invalid_signature", "/health/live", "/health/ready", "/openapi.json", "/docs", "/admin", "/admin/login", "/portal", "/portal/login", "/favicon.ico", "/debug/pprof/", "/debug/vars"} {
		w.call(w.nobody, "GET", path, "", nil)
		w.call(w.key, "GET", path, "", nil)
	}
	tenant := "/admin/tenants/" + w.tenant
	for _, p := range w.people {
		for _, path := range []string{"", "/account", "/password", "/login", "/nothing"} {
			w.call(p.browser, "GET", p.home+path, "", nil)
		}
		for _, path := range []string{"/admin/tenants", tenant, tenant + "/limits", tenant + "/limits/inbound"} {
			w.call(p.browser, "GET", path, "", nil)
		}
	}
}

// processes reads the arguments of processes and their children, where the system shows them.
func (w *canaryWorld) processes(when string, pids ...int) {
	if runtime.GOOS != "linux" {
		return
	}
	for _, pid := range pids {
		pids = append(pids, childrenOf(pid)...)
	}
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			continue // it has ended
		}
		w.saw("arguments of a process "+when, strings.ReplaceAll(string(b), "\x00", " "))
	}
	rows, _ := w.pool.Query(w.t.Context(), `SELECT application_name || ' ' || query FROM pg_stat_activity`)
	sessions, err := pgx.CollectRows(rows, pgx.RowTo[*string])
	if err != nil {
		w.t.Fatal(err)
	}
	for _, s := range sessions {
		if s != nil {
			w.saw("sessions of Postgres", *s)
		}
	}
}

func childrenOf(pid int) (found []int) {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		for _, field := range strings.Fields(string(b)) {
			if child, err := strconv.Atoi(field); err == nil {
				found = append(found, child)
			}
		}
	}
	return found
}

// commands are those that read the environment or the database, also when the environment is wrong.
func (w *canaryWorld) commands() {
	keep := func(environ map[string]string, args ...string) {
		p := start(w.t, environ, args...)
		err := p.result(w.t)
		w.saw("output of server "+strings.Join(args, " "), fmt.Sprint(p.out, p.log, err))
	}
	for _, args := range [][]string{{"config", "check"}, {"config", "doc"}, {"migrate", "status"}, {"operator", "list"}, {"secrets", "status", "--verify"}, {"secrets", "rotate"},
		{"inbound", "list", "--base-url", w.program.base}, {"version"}, {"--help"}} {
		environ := maps.Clone(w.environ)
		environ["CONVERGER_TOKEN"] = strings.TrimPrefix(w.ops.header.Get("Authorization"), "Bearer ")
		keep(environ, args...)
	}
	// Wrong values of everything secret, and secrets in the place of everything else: each is refused without being shown.
	for _, s := range settings {
		if s.secret {
			keep(map[string]string{s.name: w.plant("weak " + s.name)}, "config", "check")
			keep(map[string]string{s.name + "_FILE": w.plant("secret in the place of " + s.name + "_FILE")}, "config", "check")
			keep(map[string]string{s.name: w.plant("twice " + s.name), s.name + "_FILE": "/dev/null"}, "serve")
		}
	}
	for _, format := range []string{
		"postgres://hub:%s@127.0.0.1:1/hub?sslmode=disable", "postgres://hub:%s@h:port/hub", "postgres://hub:%s/x@h/hub", "postgres://hub:a:%s@h/hub", "postgres://hub:%s@[::1/hub",
		"postgres//hub:%s@h/hub", "postgres:hub:%s@h", "host=h password=%s port=x", "host=127.0.0.1 port=1 password=%s", "password = '%s", "%s", "postgres://hub:%%zz%s@h/hub", "postgres://h/hub?password=%s&sslmode=x",
		"postgres://%s@h:port/hub", "mysql://hub:%s@h/hub", "postgres://hub:%s@nowhere.invalid/hub",
	} {
		environ := maps.Clone(w.environ)
		delete(environ, "DATABASE_URL_FILE")
		environ["DATABASE_URL"] = fmt.Sprintf(format, w.plant("password in "+format))
		for _, args := range [][]string{{"config", "check"}, {"serve"}, {"migrate", "up"}, {"migrate", "status"}, {"operator", "list"}, {"secrets", "status"}} {
			if strings.Contains(format, "nowhere") && args[0] != "serve" {
				continue // names take long to be found not to exist
			}
			keep(environ, args...)
		}
	}
	// A hub whose key does not open what is stored.
	environ := maps.Clone(w.environ)
	environ["CLOAK_KEY"], environ["CLOAK_RETIRED_KEYS_FILE"] = newCloakKey(w.t, 9), ""
	p := start(w.t, environ, "serve").ready(w.t)
	blind := newAPI(w.t, p.base)
	w.call(blind, "POST", "/api/v1/channels/"+w.meta.ID+"/inbound", "{}", nil, "X-Hub-Signature-256", metaSignature("{}", w.appSecret))
	w.call(blind, "GET", "/api/v1/management/channels/"+w.meta.ID, "", nil, "Authorization", w.ops.header.Get("Authorization"))
	if err := p.stop(w.t); err != nil {
		w.t.Error(err)
	}
	w.saw("log of a hub with another key", p.log.String())
	keep(environ, "secrets", "rotate")
}

// tables reads every row of every table: the audit log, the jobs' arguments and errors, attempts, events and all others.
func (w *canaryWorld) tables() {
	t := w.t
	pool := w.pool
	rows, _ := pool.Query(t.Context(), `SELECT c.oid::regclass::text FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
		WHERE c.relkind IN ('r', 'p') AND NOT c.relispartition AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'pg_toast')`)
	tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		t.Fatal(err)
	}
	filled := map[string]int{}
	for _, table := range tables {
		rows, _ := pool.Query(t.Context(), `SELECT t::text FROM `+table+` t`)
		texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		filled[table] = len(texts)
		for _, text := range texts {
			w.exits = append(w.exits, exit{where: "table " + table, text: text, holds: true})
		}
	}
	for _, table := range []string{"audit_log", "attempts", "deliveries", "inbound_events", "channels", "api_keys", "operator_tokens", "users", "web_sessions"} {
		if filled[table] == 0 {
			t.Errorf("the table %s is empty and proves nothing", table)
		}
	}
	if w.jobs == 0 {
		t.Error("no job was seen")
	}
	// What is sealed stands where the rotation looks for it, and nowhere else.
	var sealed []string
	for _, c := range sealedColumns() {
		sealed = append(sealed, c.String())
	}
	key, err := decodeKey(w.environ["CLOAK_KEY"])
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range bytesColumns(t, pool) {
		table, column, _ := strings.Cut(c, ".")
		var n int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM `+table+` WHERE substring(`+column+`::bytea FROM 1 FOR 5) = $1`, secrets.IDOf(key).Head()).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if (n > 0) != slices.Contains(sealed, c) {
			t.Errorf("%s holds %d sealed values", c, n)
		}
	}
}

// seeJobs reads the jobs while they are there: finished ones are removed within the minute. Without the database there are none.
func (w *canaryWorld) seeJobs() {
	rows, _ := w.pool.Query(w.t.Context(), `SELECT t::text FROM river_job t`)
	texts, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return
	}
	for _, text := range texts {
		w.exits = append(w.exits, exit{where: "table river_job", text: text, holds: true})
	}
	w.jobs += len(texts)
}

// postgresLog reads what the server wrote: errors come with their statement.
func (w *canaryWorld) postgresLog(dir string) {
	found := false
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && strings.HasPrefix(d.Name(), "log") {
			found = true
			b, rerr := os.ReadFile(path)
			w.saw("log of Postgres", string(b))
			return rerr
		}
		return nil //nolint:nilerr // the data may be another user's
	})
	if err != nil || !found {
		w.t.Logf("the log of Postgres was not found: %v", err)
	}
}
