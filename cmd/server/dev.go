package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/auth"
	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/devpg"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/secrets"
	"converger/internal/tenants"
	"converger/migrations"
)

type devCmd struct {
	Dir         string `help:"Folder of the database, its secrets and demo.json." default:".dev" type:"path"`
	Addr        string `help:"Address to serve on." default:"127.0.0.1:4000"`
	DatabaseURL string `help:"Use this database instead of a private one. It must hold no tenants, or be a development database already." placeholder:"postgres://…"`
	ReceiverURL string `help:"Where the demo's webhook channel delivers to." default:"http://127.0.0.1:4100/"`
	Nodes       int    `help:"How many nodes to run as one cluster: this process, and for each more a process of its own, on the next port." default:"1"`
}

// devMark is the comment that tells a development database from one that somebody lives on.
const devMark = "converger development database"

var errNotDev = errors.New("the database holds tenants and is not marked as a development database: " +
	"`server dev` makes a demo tenant and weak demo credentials, so it keeps away from it. Use an empty database, or `server serve`")

func (c devCmd) Run(e *env) (err error) {
	ctx, stop := context.WithCancelCause(e.ctx)
	defer stop(nil)
	if c.Nodes < 1 || c.Nodes > maxDevNodes {
		return fmt.Errorf("--nodes must be from 1 to %d", maxDevNodes)
	}
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return err
	}
	// The address first: it is what is taken most often, and costs nothing to try.
	listener, err := listen(ctx, c.Addr)
	if err != nil {
		why := "--addr takes an address of this machine and a port"
		if errors.Is(err, syscall.EADDRINUSE) {
			why = "Another program has the address"
		}
		return fmt.Errorf("%w\n%s; choose one with --addr 127.0.0.1:4001 (make run ARGS=\"--addr 127.0.0.1:4001\")", err, why)
	}
	defer func() { _ = listener.Close() }() // once it serves, the server closes it
	base := "http://" + reachable(listener.Addr())

	url := c.DatabaseURL
	if url == "" {
		fmt.Fprintf(e.stderr, "Starting a private Postgres in %s …\n", c.Dir)
		pg, err := devpg.Start(ctx, devpg.Config{
			Dir: filepath.Join(c.Dir, "postgres"), BinDir: e.getenv("PG_BIN"), VendoredDir: filepath.Join(".cache", "pg")})
		if errors.Is(err, devpg.ErrRunning) {
			return fmt.Errorf("%w: --dir .dev2 --addr 127.0.0.1:4001", err)
		}
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, pg.Stop(context.Background())) }()
		go func() {
			<-pg.Done()
			if err := pg.Err(); err != nil {
				stop(fmt.Errorf("the private Postgres ended: %w", err))
			}
		}()
		url = pg.URL()
	}

	getenv, err := c.environment(e.getenv, url, base)
	if err != nil {
		return err
	}
	cfg, err := LoadConfig(getenv)
	if err != nil {
		return err
	}
	if err := claimDev(ctx, url); err != nil {
		return err
	}
	report, err := migrations.Up(ctx, url)
	if err != nil {
		return err
	}
	if len(report.Applied) > 0 {
		fmt.Fprintf(e.stderr, "Migrated the database: %s.\n", strings.Join(report.Applied, ", "))
	}
	if err := markDev(ctx, url); err != nil {
		return err
	}

	log := newLogger(cfg, e.stderr)
	h, err := newHub(ctx, cfg, log)
	if err != nil {
		return err
	}
	d, err := c.seed(ctx, h, base, url)
	d.Nodes = []demoNode{{BaseURL: base, PID: os.Getpid()}}
	if err == nil && c.Nodes == 1 {
		err = d.write(c.Dir)
	}
	if err != nil {
		h.close()
		if errors.Is(err, secrets.ErrUnknownKey) {
			return fmt.Errorf("the database was made with another folder's secrets.json than %s has: pass that folder by --dir, or another database (%w)", c.Dir, err)
		}
		return fmt.Errorf("make the demo tenant: %w", err)
	}
	if c.Nodes > 1 {
		h.close()
		err = c.serveNodes(ctx, e, getenv, listener, d)
	} else {
		err = h.serve(ctx, listener, func() { c.welcome(e.stdout, d) })
	}
	if cause := context.Cause(ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		err = errors.Join(err, cause)
	}
	return err
}

// reachable is the address by which a program on this machine reaches a listener on all its addresses.
func reachable(a net.Addr) string {
	if tcp, ok := a.(*net.TCPAddr); ok && tcp.IP.IsUnspecified() {
		return net.JoinHostPort("127.0.0.1", strconv.Itoa(tcp.Port))
	}
	return a.String()
}

// environment puts the defaults of a development hub below the real environment. The database is never taken from the
// environment: a shell that is set up for production must not be enough to touch its data.
func (c devCmd) environment(getenv func(string) string, url, base string) (func(string) string, error) {
	keys, err := c.secrets()
	if err != nil {
		return nil, err
	}
	return func(name string) string {
		switch name {
		case "DATABASE_URL":
			return url
		case "DATABASE_URL_FILE", "LISTEN":
			return ""
		}
		if v := getenv(name); v != "" {
			return v
		}
		if getenv(name+"_FILE") != "" {
			return ""
		}
		return map[string]string{
			"PUBLIC_URL":                    base,
			"SECRET_KEY_BASE":               keys.SecretKeyBase,
			"CLOAK_KEY":                     keys.CloakKey,
			"WEBHOOK_ALLOW_PRIVATE_TARGETS": "true",
			"METRICS_ALLOWED_IPS":           "127.0.0.0/8,::1",
			"UPLOAD_DIR":                    filepath.Join(c.Dir, "uploads"),
			"BCRYPT_COST":                   "10",
			"LOG_FORMAT":                    "text",
			"LOG_LEVEL":                     "warn",
			"DRAIN_DELAY_MS":                "0",
			"CONN_LIMIT_PER_IP":             "10000", // everybody is on this machine
		}[name]
	}, nil
}

type devSecrets struct {
	SecretKeyBase string `json:"secret_key_base"`
	CloakKey      string `json:"cloak_key"`
}

// secrets are made once for a folder: what is sealed in its database must open at the next start.
func (c devCmd) secrets() (devSecrets, error) {
	file := filepath.Join(c.Dir, "secrets.json")
	var s devSecrets
	b, err := os.ReadFile(file)
	switch {
	case err == nil:
		if err := json.Unmarshal(b, &s); err != nil {
			return s, fmt.Errorf("%s: %w", file, err)
		}
		return s, nil
	case !errors.Is(err, os.ErrNotExist):
		return s, err
	}
	random := func(n int) string {
		b := make([]byte, n)
		rand.Read(b)
		return base64.StdEncoding.EncodeToString(b)
	}
	s = devSecrets{SecretKeyBase: random(64), CloakKey: random(32)}
	return s, writeJSON(file, s)
}

// writeJSON replaces a file whole, readable by its owner only.
func writeJSON(file string, v any) error {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false) // people and sed read the URLs in it
	enc.SetIndent("", "  ")
	if err := enc.Encode(v); err != nil {
		return err
	}
	tmp, err := os.CreateTemp(filepath.Dir(file), filepath.Base(file)+".*") // 0600
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp.Name()) }() // gone already when it was renamed
	if _, err := tmp.Write(b.Bytes()); err != nil {
		tmp.Close()
		return err
	}
	if err := tmp.Close(); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), file)
}

// claimDev refuses a database on which somebody lives. It changes nothing.
func claimDev(ctx context.Context, url string) error {
	return withDatabase(ctx, url, func(pool *pgxpool.Pool) error {
		var schema, marked bool
		err := pool.QueryRow(ctx, `SELECT to_regclass('tenants') IS NOT NULL,
			COALESCE(obj_description(to_regclass('configuration'), 'pg_class') = $1, false)`, devMark).Scan(&schema, &marked)
		if err != nil || marked || !schema {
			return err
		}
		var inhabited bool
		if err := pool.QueryRow(ctx, `SELECT EXISTS (SELECT FROM tenants)`).Scan(&inhabited); err != nil {
			return err
		}
		if inhabited {
			return errNotDev
		}
		return nil
	})
}

func markDev(ctx context.Context, url string) error {
	return withDatabase(ctx, url, func(pool *pgxpool.Pool) error {
		_, err := pool.Exec(ctx, `COMMENT ON TABLE configuration IS '`+devMark+`'`)
		return err
	})
}

func withDatabase(ctx context.Context, url string, fn func(*pgxpool.Pool) error) error {
	pool, err := postgres.Open(ctx, url, postgres.Options{MaxConns: 1, AppName: "converger dev"})
	if err != nil {
		return err
	}
	defer pool.Close()
	return fn(pool)
}

const demoTenantName = "Demo"

// seed makes what the demo lacks. What is there already stays as it is, edits included; credentials
// that can't be read back (keys are stored as hashes) are made anew only when demo.json no longer knows them.
func (c devCmd) seed(ctx context.Context, h *hub, base, url string) (demo, error) {
	by := tenants.Actor{Type: tenants.ActorSystem, ID: "server dev"}
	old, err := demoFlags{Dir: c.Dir}.read()
	if err != nil {
		return demo{}, err
	}
	if err := h.directory.Load(ctx); err != nil {
		return demo{}, err
	}
	d := demo{BaseURL: base, DatabaseURL: url, Channels: map[string]demoChannel{}}

	tenant, err := c.seedTenant(ctx, h, by)
	if err != nil {
		return demo{}, err
	}
	d.Tenant = demoTenant{ID: tenant.ID.String(), Name: tenant.Name, APIKey: old.Tenant.APIKey}
	if hash, err := tenants.ParseKey(old.Tenant.APIKey); err != nil || !h.knowsKey(hash, tenant.ID) {
		_, text, err := h.tenants.CreateKey(ctx, by, tenant.ID, tenants.NewKey{Name: "demo"})
		if err != nil {
			return demo{}, err
		}
		d.Tenant.APIKey = text.Reveal()
	}
	d.ManagementToken = old.ManagementToken
	if hash, err := tenants.ParseOperatorToken(old.ManagementToken); err != nil || !h.knowsOperator(hash) {
		_, text, err := h.tenants.CreateOperatorToken(ctx, by, tenants.NewOperatorToken{Name: "demo"})
		if err != nil {
			return demo{}, err
		}
		d.ManagementToken = text.Reveal()
	}

	have, err := h.channels.List(ctx, tenant.ID, uuid.Nil, 100)
	if err != nil {
		return demo{}, err
	}
	for _, want := range c.demoChannels() {
		var ch channel.Channel
		for _, x := range have {
			if x.Name == want.Name {
				ch = x
			}
		}
		if ch.ID == uuid.Nil {
			if ch, err = h.channels.Create(ctx, by, tenant.ID, want); err != nil {
				return demo{}, err
			}
		}
		shown, err := newDemoChannel(ch)
		if err != nil {
			return demo{}, err
		}
		d.Channels[want.Name] = shown
	}
	if err := c.seedRule(ctx, h, by, tenant.ID, d); err != nil {
		return demo{}, err
	}
	if d.Admin, err = seedUser(ctx, h, by, auth.Admins, auth.RoleSuperAdmin, "admin@demo.test", old.Admin); err != nil {
		return demo{}, err
	}
	if d.User, err = seedUser(ctx, h, by, auth.TenantRealm(tenant.ID), auth.RoleOwner, "owner@demo.test", old.User); err != nil {
		return demo{}, err
	}
	return d, nil
}

func (h *hub) knowsKey(hash [32]byte, tenant tenants.ID) bool {
	k, ok := h.directory.Key(hash)
	return ok && k.TenantID == tenant && k.RevokedAt.IsZero()
}

func (h *hub) knowsOperator(hash [32]byte) bool {
	t, ok := h.directory.OperatorToken(hash)
	return ok && t.RevokedAt.IsZero()
}

// seedTenant finds the demo tenant or makes it.
func (c devCmd) seedTenant(ctx context.Context, h *hub, by tenants.Actor) (tenants.Tenant, error) {
	t, err := h.tenants.Create(ctx, by, tenants.NewTenant{Name: demoTenantName})
	if errors.Is(err, tenants.ErrNameTaken) {
		return h.tenants.ByName(ctx, demoTenantName)
	}
	return t, err
}

// demoChannels are the channels of the demo; their names are the keys in demo.json.
func (c devCmd) demoChannels() []channel.NewChannel {
	config := func(v map[string]any) json.RawMessage {
		b, _ := json.Marshal(v) // maps of strings always marshal
		return b
	}
	return []channel.NewChannel{
		{Name: "webhook", Type: channel.TypeWebhook, Mode: channel.ModeDuplex, Config: config(map[string]any{"url": c.ReceiverURL})},
		{Name: "echo", Type: channel.TypeEcho, Mode: channel.ModeOutbound},
		{Name: "whatsapp_meta", Type: channel.TypeWhatsAppMeta, Mode: channel.ModeInbound, Config: config(map[string]any{
			"phone_number_id": "106540352242922", "app_secret": rand.Text(), "verify_token": rand.Text()})},
	}
}

// seedRule makes the rule by which the demo's receiver gets what comes in by WhatsApp. If the channels were edited so that
// it does not fit any more, the demo goes on without it.
func (c devCmd) seedRule(ctx context.Context, h *hub, by tenants.Actor, tenant tenants.ID, d demo) error {
	const name = "WhatsApp to the receiver"
	have, err := h.rules.List(ctx, tenant)
	if err != nil || slices.ContainsFunc(have, func(r delivery.RoutingRule) bool { return r.Name == name }) {
		return err
	}
	source, err := uuid.Parse(d.Channels["whatsapp_meta"].ID)
	if err != nil {
		return err
	}
	target, err := uuid.Parse(d.Channels["webhook"].ID)
	if err != nil {
		return err
	}
	_, err = h.rules.Create(ctx, by, tenant, delivery.NewRoutingRule{Name: name, SourceChannelID: source, TargetChannelIDs: []uuid.UUID{target}})
	if invalid := new(fault.Invalid); errors.As(err, &invalid) {
		return nil
	}
	return err
}

// seedUser makes a user of the demo with a random password. One who is there already gets another password only if demo.json
// does not know one.
func seedUser(ctx context.Context, h *hub, by tenants.Actor, realm auth.Realm, role auth.Role, email string, old demoUser) (demoUser, error) {
	u, err := h.users.ByEmail(ctx, realm, email)
	missing := errors.Is(err, auth.ErrUserNotFound)
	switch {
	case err != nil && !missing:
		return demoUser{}, err
	case !missing && old.Email == u.Email && old.Password != "":
		return old, nil
	}
	password := newPassword()
	if missing {
		u, err = h.users.Create(ctx, by, realm, auth.NewUser{Email: email, Name: "Demo " + strings.ReplaceAll(string(role), "_", " "), Role: role, Password: password})
	} else {
		err = h.users.SetPassword(ctx, by, realm, u.ID, password, false)
	}
	return demoUser{Email: u.Email, Password: password.Reveal()}, err
}

// welcome says what to paste next.
func (c devCmd) welcome(w io.Writer, d demo) {
	program := shellWord(os.Args[0])
	dir := ""
	if standard, err := filepath.Abs(".dev"); err != nil || c.Dir != standard {
		dir = " --dir " + shellWord(c.Dir)
	}
	addr := ""
	if u, err := url.Parse(c.ReceiverURL); err == nil && u.Host != "127.0.0.1:4100" {
		addr = " --addr " + shellWord(u.Host)
	}
	fmt.Fprintf(w, `
Converger is running on %[1]s with the tenant %[2]q. Stop it with Ctrl-C; the data stay in %[3]s.
Sign in at %[1]s/admin as %[10]s with the password %[11]s,
or at %[1]s/portal, tenant %[2]s, as %[12]s with the password %[13]s.
The ids and keys below are also in %[3]s/demo.json. Paste this into a second terminal, in the same folder:

# 1. Let an endpoint of your own receive deliveries, in the background
%[4]s simulate receiver%[5]s%[9]s &

# 2. Open a conversation and post an activity; the receiver shows its delivery
KEY=%[6]s
CONVERSATION=$(curl -sS %[1]s/api/v1/conversations -H "x-api-key: $KEY" -H 'content-type: application/json' \
  -d '{"channel_id":"%[7]s"}' | tee /dev/stderr | sed -nE 's/^\{"data":\{"id":"([^"]+)".*/\1/p')
curl -sS %[1]s/api/v1/conversations/$CONVERSATION/activities -H "x-api-key: $KEY" \
  -H 'content-type: application/json' -H 'idempotency-key: first' -d '{"text":"Hello from curl"}'; echo

# 3. Receive a signed WhatsApp batch (two texts, an image, a status); a routing rule passes the messages on to the receiver
%[4]s simulate whatsapp%[5]s && sleep 1
CHAT=$(curl -sS "%[1]s/api/v1/conversations?channel_id=%[8]s" -H "x-api-key: $KEY" | sed -nE 's/^\{"data":\[\{"id":"([^"]+)".*/\1/p')
curl -sS "%[1]s/api/v1/conversations/$CHAT/activities" -H "x-api-key: $KEY"; echo
%[4]s inbound list%[5]s

# 4. Overdo it: 300 posts at once, of which 100 a second are accepted
curl -s -Z --no-progress-meter --parallel-max 50 -o /dev/null -w '%%{http_code}\n' "%[1]s/api/v1/conversations/$CONVERSATION/activities?[1-300]" \
  -H "x-api-key: $KEY" -H 'content-type: application/json' -d '{"text":"again"}' | sort | uniq -c

`, d.BaseURL, d.Tenant.Name, c.Dir, program, dir, d.Tenant.APIKey, d.Channels["webhook"].ID, d.Channels["whatsapp_meta"].ID, addr,
		d.Admin.Email, d.Admin.Password, d.User.Email, d.User.Password)
}

// shellWord writes a word so that a shell reads it as it is.
func shellWord(s string) string {
	const plain = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789/._-+=:,@%"
	if s != "" && strings.Trim(s, plain) == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}
