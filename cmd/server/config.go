package main

import (
	"cmp"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"
	"unicode"
	"unicode/utf8"

	"converger/internal/activity/upload"
	"converger/internal/auth"
	"converger/internal/cluster"
	apphttp "converger/internal/http"
	"converger/internal/postgres"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis"
	"converger/internal/secrets"
)

// Config is everything that the environment decides. It is read once at start; [settings] names, explains and checks
// each field, and is what `config check` and `config doc` print.
type Config struct {
	DatabaseURL secrets.Text
	PoolSize    int

	Listen    string
	PublicURL string

	SecretKeyBase         secrets.Text
	PreviousSecretKeyBase secrets.Text
	EncryptionKey         secrets.Text
	RetiredKeys           []secrets.Text

	TrustedProxies    []netip.Prefix
	AdminNets         []netip.Prefix
	CORSOrigins       []string
	MetricsToken      secrets.Text
	MetricsAllowedIPs []netip.Prefix

	BcryptCost      int
	SessionIdle     time.Duration
	SessionAbsolute time.Duration

	RateLimitEnabled bool
	RateLimitBackend ratelimit.Backend // "": cluster if Clustered, else local; see Backend
	RateLimitSync    time.Duration
	RateLimitFull    bool // each side of a split enforces whole limits
	RateLimits       *ratelimit.Operator
	RateLimitMaxKeys int
	RateLimitRedis   secrets.Text
	RateLimitTell    bool // answers say when their limit was decided

	ConnLimitEnabled bool
	ConnLimitPerIP   int
	ConnLimitTotal   int

	ClusterQuery       string
	ClusterPeers       []string
	ClusterSecret      secrets.Text
	ClusterOtherSecret secrets.Text
	ClusterBind        string
	ClusterAdvertise   string
	ClusterLabel       string
	ClusterNodeName    string
	ClusterClockOffset time.Duration

	DirectoryTTL time.Duration

	WebhookAllowPrivateTargets bool
	WebhookAllowedTargets      []string

	APIMaxBytes     int
	InboundMaxBytes int
	BodyMemory      int

	UploadDir          string
	UploadMaxBytes     int
	UploadAllowedTypes []string

	Workers int

	LogLevel  slog.Level
	LogFormat string

	DrainDelay      time.Duration
	ShutdownTimeout time.Duration
}

// setting is one environment variable. Secrets have a twin NAME_FILE that names a file with the value.
type setting struct {
	name     string
	def      string // the default as it would be written; "" is none
	required bool
	secret   bool
	doc      string
	set      func(c *Config, value string) error
}

// maxSecretFile is more than the longest list of keys; a wrong path may lead to something endless.
const maxSecretFile = 64 << 10

// value reads the variable, or for a secret the file that its twin names; "" when neither is set. White space around the
// value, such as the line's end in a file, does not count.
func (s setting) value(getenv func(string) string) (string, error) {
	value := strings.TrimSpace(getenv(s.name))
	if !s.secret {
		return value, nil
	}
	file := getenv(s.name + "_FILE")
	switch {
	case file == "":
		return value, nil
	case value != "":
		return "", fmt.Errorf("is set, and so is %s_FILE: set one of them", s.name)
	}
	value, err := readSecret(file)
	if err != nil {
		return "", fmt.Errorf("%s_FILE %w", s.name, err)
	}
	return value, nil
}

// readSecret reads a file that holds one value. Its errors complete a sentence and show neither the content nor the name:
// some put the secret itself where its file belongs.
func readSecret(file string) (string, error) {
	f, err := os.Open(file)
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.EINVAL):
		return "", errors.New("names a file that does not exist (the name is not shown, in case it is the secret itself)")
	case errors.Is(err, fs.ErrPermission):
		return "", errors.New("names a file that this program's user may not read")
	case err != nil:
		return "", errors.New("names a file that can't be opened")
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.IsDir() {
		return "", errors.New("names a folder and not a file")
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecretFile+1))
	switch {
	case err != nil:
		return "", errors.New("names a file that can't be read to its end")
	case len(b) > maxSecretFile:
		return "", fmt.Errorf("names a file of more than %d bytes, which can't be one secret", maxSecretFile)
	case !utf8.Valid(b):
		return "", errors.New("names a file that is not text in UTF-8")
	}
	// Some editors begin a file with a byte order mark.
	value := strings.TrimSpace(strings.TrimPrefix(string(b), "\ufeff"))
	switch {
	case value == "":
		return "", errors.New("names a file with nothing in it")
	case strings.ContainsFunc(value, unicode.IsControl):
		return "", errors.New("names a file with several lines or control characters; the value must be one line")
	}
	return value, nil
}

// readSetting reads one variable, or its default, for commands that need not be told everything else.
func readSetting(c *Config, getenv func(string) string, name string) error {
	i := slices.IndexFunc(settings, func(s setting) bool { return s.name == name })
	s := settings[i]
	value, err := s.value(getenv)
	if err == nil {
		err = s.set(c, cmp.Or(value, s.def))
	}
	if err != nil {
		return Problems{{name, err.Error()}}
	}
	return nil
}

// The published or trivial secrets that people paste from examples.
var knownSecrets = []string{"changeme", "secret", "password", "converger", "example", "development", "insecure"}

const minSecretBytes = 64

var settings = []setting{
	{name: "DATABASE_URL", required: true, secret: true,
		doc: "Postgres (15 or newer), as `postgres://user:password@host/database`.",
		set: func(c *Config, v string) error {
			c.DatabaseURL = secrets.Text(v)
			_, err := postgres.ParseURL(v)
			return err
		}},
	{name: "POOL_SIZE", def: "20", doc: "Most database connections of this node, jobs included.",
		set: intBetween(func(c *Config) *int { return &c.PoolSize }, 4, 1000)},

	{name: "LISTEN", def: ":4000", doc: "Address and port to serve on.",
		set: func(c *Config, v string) error {
			if !strings.Contains(v, ":") {
				return fmt.Errorf("needs a port, such as :4000 or 127.0.0.1:4000")
			}
			c.Listen = v
			return nil
		}},
	{name: "PUBLIC_URL", required: true, doc: "Where clients and browsers reach this hub, such as `https://hub.example.com`. Links in answers begin with it, forms are taken from its pages only, and cookies keep to https when it is https.",
		set: func(c *Config, v string) (err error) {
			c.PublicURL, err = parsePublicURL(v)
			return err
		}},

	{name: "SECRET_KEY_BASE", required: true, secret: true,
		doc: "At least 64 random bytes of text (`openssl rand -hex 64`). Client tokens, sessions, cursors and limiter keys derive from it; the same on every node.",
		set: func(c *Config, v string) error {
			c.SecretKeyBase = secrets.Text(v)
			return strongSecret(v)
		}},
	{name: "SECRET_KEY_BASE_PREVIOUS", secret: true,
		doc: "The value before the last change: client tokens and sessions made with it stay valid until they end.",
		set: func(c *Config, v string) error {
			c.PreviousSecretKeyBase = secrets.Text(v)
			return strongSecret(v)
		}},
	{name: "CLOAK_KEY", required: true, secret: true,
		doc: "32 random bytes in base64 (`openssl rand -base64 32`): encrypts channel secrets and settings at rest.",
		set: func(c *Config, v string) error {
			c.EncryptionKey = secrets.Text(v)
			_, err := decodeKey(v)
			return err
		}},
	{name: "CLOAK_RETIRED_KEYS", secret: true,
		doc: "Keys that are read and not written, separated by commas: earlier values of CLOAK_KEY, and on several nodes the next one (see Changing secrets).",
		set: func(c *Config, v string) error {
			for _, k := range list(v) {
				if _, err := decodeKey(k); err != nil {
					return err
				}
				c.RetiredKeys = append(c.RetiredKeys, secrets.Text(k))
			}
			return nil
		}},

	{name: "TRUSTED_PROXIES", doc: "Addresses or ranges of the proxies in front, separated by commas. Only they may name the client in X-Forwarded-For.",
		set: func(c *Config, v string) (err error) {
			c.TrustedProxies, err = prefixes(v)
			return err
		}},
	{name: "ADMIN_IP_WHITELIST", def: "127.0.0.1,::1",
		doc: "Addresses or ranges that the pages of administration (`/admin`) are open to, separated by commas. Behind a proxy set TRUSTED_PROXIES too, and have it send X-Forwarded-For, or they are open to nobody.",
		set: func(c *Config, v string) (err error) {
			c.AdminNets, err = prefixes(v)
			return err
		}},
	{name: "CORS_ORIGINS", def: "http://127.0.0.1:5500,http://localhost:5500",
		doc: "Origins whose pages may call the client API, separated by commas, or `*`.",
		set: func(c *Config, v string) error {
			c.CORSOrigins = list(v)
			for i, o := range c.CORSOrigins {
				if o == "*" {
					continue
				}
				var err error
				if c.CORSOrigins[i], err = parseOrigin(o); err != nil {
					return err
				}
			}
			return nil
		}},
	{name: "METRICS_TOKEN", secret: true, doc: "Bearer token for `/metrics`. Without it and METRICS_ALLOWED_IPS, `/metrics` is not there.",
		set: func(c *Config, v string) error {
			c.MetricsToken = secrets.Text(v)
			if len(v) < 16 {
				return errors.New("must have at least 16 characters")
			}
			return nil
		}},
	{name: "METRICS_ALLOWED_IPS", doc: "Addresses or ranges that may read `/metrics` without a token.",
		set: func(c *Config, v string) (err error) {
			c.MetricsAllowedIPs, err = prefixes(v)
			return err
		}},

	{name: "BCRYPT_COST", def: "12", doc: "Cost of password hashes, 10 to 16: each step doubles the time of a sign-in. Hashes of another cost are made anew when their users sign in.",
		set: intBetween(func(c *Config) *int { return &c.BcryptCost }, 10, 16)},
	{name: "SESSION_IDLE_MS", def: strconv.FormatInt(auth.DefaultSessionIdle.Milliseconds(), 10),
		doc: "How long a session of the pages lives without being used.",
		set: duration(func(c *Config) *time.Duration { return &c.SessionIdle }, 5*time.Minute, 30*24*time.Hour)},
	{name: "SESSION_MAX_MS", def: strconv.FormatInt(auth.DefaultSessionAbsolute.Milliseconds(), 10),
		doc: "How long it lives at most.",
		set: duration(func(c *Config) *time.Duration { return &c.SessionAbsolute }, 5*time.Minute, 90*24*time.Hour)},

	{name: "RATE_LIMIT_ENABLED", def: "true", doc: "`false` switches every limit off but those that guard logins.",
		set: boolean(func(c *Config) *bool { return &c.RateLimitEnabled })},
	{name: "RATE_LIMIT_BACKEND",
		doc: "Where limits are counted: `local` (each node for itself), `cluster` (every node, with reports between them), `owner` (one node for each subject, exact, a call away) or `redis` (at RATE_LIMIT_REDIS_URL, exact, a call away). If empty, `cluster` in a cluster and `local` alone. In a cluster without `redis` the limits of logins, second factors and tokens are counted by owners unless `RATE_LIMITS` says otherwise.",
		set: func(c *Config, v string) error {
			var ok bool
			if c.RateLimitBackend, ok = ratelimit.ParseBackend(v); !ok {
				return fmt.Errorf("unknown backend %q: this version has local, cluster, owner and redis", v)
			}
			return nil
		}},
	{name: "RATE_LIMIT_REDIS_URL", secret: true,
		doc: "Redis 7 or newer for the limits counted there, as `redis://user:password@host:6379/0`; `rediss://` for TLS, several addresses with commas, or `?cluster=true`, for a Redis Cluster. See [docs/redis.md](docs/redis.md).",
		set: func(c *Config, v string) error {
			c.RateLimitRedis = secrets.Text(v)
			_, err := redis.ParseURL(v)
			return err
		}},
	{name: "RATE_LIMIT_SYNC_INTERVAL_MS", def: "100", doc: "How often a node tells the others what it has admitted; near a limit it does so at once.",
		set: duration(func(c *Config) *time.Duration { return &c.RateLimitSync }, 10*time.Millisecond, 10*time.Second)},
	{name: "RATE_LIMIT_PARTITION", def: "share", doc: "What a part of the cluster that is cut off enforces: `share`, its share of each limit, or `full`, the whole.",
		set: func(c *Config, v string) error {
			if v != "share" && v != "full" {
				return fmt.Errorf("must be share or full, not %q", v)
			}
			c.RateLimitFull = v == "full"
			return nil
		}},
	{name: "RATE_LIMITS", def: "{}",
		doc: "Limits in place of the built-in ones, as JSON: `{\"inbound\":{\"limit\":2000,\"scale_ms\":1000},\"api_read\":\"off\",\"management\":{\"limit\":50,\"scale_ms\":1000,\"mode\":\"count\"}}`.",
		set: setRateLimits},
	{name: "RATE_LIMITS_FILE", doc: "A file with that JSON, in place of RATE_LIMITS.",
		set: func(c *Config, v string) error {
			b, err := os.ReadFile(v)
			if err != nil {
				return err
			}
			return setRateLimits(c, string(b))
		}},
	{name: "RATE_LIMIT_MAX_KEYS", def: "1000000", doc: "Subjects whose budgets this node keeps apart, about 64 bytes each (at Redis 200, for when it is away); beyond that newcomers share budgets.",
		set: intBetween(func(c *Config) *int { return &c.RateLimitMaxKeys }, 1000, 1<<30)},
	{name: "RATE_LIMIT_TELL_TIME", def: "false", doc: "For `server loadtest limits`: `true` adds to limited answers when they were decided, by the clock that numbers the windows (`Converger-Decided-At`, Unix milliseconds).",
		set: boolean(func(c *Config) *bool { return &c.RateLimitTell })},
	{name: "CONN_LIMIT_ENABLED", def: "true", doc: "`false` lets anybody have any number of connections to this node.",
		set: boolean(func(c *Config) *bool { return &c.ConnLimitEnabled })},
	{name: "CONN_LIMIT_PER_IP", def: "100", doc: "Connections that one client address (of IPv6 a /64) may have open to this node; beyond it 503 `connection_limit_exceeded`. The proxies in TRUSTED_PROXIES and exempt address ranges may have more.",
		set: intBetween(func(c *Config) *int { return &c.ConnLimitPerIP }, 1, 10_000_000)},
	{name: "CONN_LIMIT_TOTAL", def: "10000", doc: "Connections that all together may have open to this node; beyond it 503 `global_limit_exceeded`. An idle one costs a file descriptor and about 20 KiB.",
		set: intBetween(func(c *Config) *int { return &c.ConnLimitTotal }, 1, 10_000_000)},
	{name: "DNS_CLUSTER_QUERY", doc: "A DNS name whose A and AAAA records are the nodes, with a port if it is not CLUSTER_BIND's: joins them. A headless service has to publish addresses that are not ready.",
		set: text(func(c *Config) *string { return &c.ClusterQuery })},
	{name: "CLUSTER_PEERS", doc: "The nodes as `host:port`, separated by commas, in place of DNS_CLUSTER_QUERY. This node may be among them.",
		set: func(c *Config, v string) error {
			c.ClusterPeers = list(v)
			return nil
		}},
	{name: "CLUSTER_SECRET", secret: true,
		doc: "At least 64 random bytes of text (`openssl rand -hex 64`), the same on every node: encrypts and authenticates what they say to each other. Required unless CLUSTER_BIND is a loopback address.",
		set: func(c *Config, v string) error {
			c.ClusterSecret = secrets.Text(v)
			return strongSecret(v)
		}},
	{name: "CLUSTER_SECRET_PREVIOUS", secret: true,
		doc: "A secret that is accepted beside CLUSTER_SECRET. To change that without a split, restart the nodes one by one, three times: with the new one here, with the two exchanged, without this.",
		set: func(c *Config, v string) error {
			c.ClusterOtherSecret = secrets.Text(v)
			return strongSecret(v)
		}},
	{name: "CLUSTER_BIND", def: ":7946", doc: "Address and port for the other nodes, TCP and UDP.",
		set: text(func(c *Config) *string { return &c.ClusterBind })},
	{name: "CLUSTER_ADVERTISE", doc: "`host:port` at which the other nodes reach this one, if it is not what it finds by itself: an address that the list of nodes holds, else a private one.",
		set: text(func(c *Config) *string { return &c.ClusterAdvertise })},
	{name: "CLUSTER_LABEL", def: "converger", doc: "Name of the cluster: nodes with another one are refused.",
		set: text(func(c *Config) *string { return &c.ClusterLabel })},
	{name: "CLUSTER_NODE_NAME", doc: "Name of this node in logs, metrics and pages; its host name if empty.",
		set: text(func(c *Config) *string { return &c.ClusterNodeName })},
	{name: "CLUSTER_TEST_CLOCK_OFFSET_MS", def: "0", doc: "For tests: sets this node's clock off, before it is corrected.",
		set: func(c *Config, v string) error {
			n, err := strconv.ParseInt(v, 10, 64)
			if err != nil || max(n, -n) > (24*time.Hour).Milliseconds() || n == math.MinInt64 {
				return fmt.Errorf("must be whole milliseconds, at most a day, not %q", v)
			}
			c.ClusterClockOffset = time.Duration(n) * time.Millisecond
			return nil
		}},

	{name: "DIRECTORY_TTL_MS", def: "30000", doc: "How old this node's copy of tenants, keys and channels may be before it calls itself degraded.",
		set: duration(func(c *Config) *time.Duration { return &c.DirectoryTTL }, time.Second, time.Hour)},

	{name: "WEBHOOK_ALLOW_PRIVATE_TARGETS", def: "false", doc: "Deliver to loopback and private addresses too. For development.",
		set: boolean(func(c *Config) *bool { return &c.WebhookAllowPrivateTargets })},
	{name: "WEBHOOK_ALLOWED_TARGETS", doc: "Private targets that are allowed all the same: hosts, `*.suffix`, addresses or ranges, separated by commas.",
		set: func(c *Config, v string) error {
			c.WebhookAllowedTargets = list(v)
			return nil
		}},

	{name: "API_MAX_BYTES", def: strconv.Itoa(apphttp.DefaultMaxBody), doc: "Largest request body of the REST APIs, in bytes.",
		set: intBetween(func(c *Config) *int { return &c.APIMaxBytes }, 1<<16, 1<<26)},
	{name: "INBOUND_MAX_BYTES", def: strconv.Itoa(apphttp.DefaultMaxInboundBody), doc: "Largest webhook body that a provider may post, in bytes (WhatsApp sends up to 3 MiB).",
		set: intBetween(func(c *Config) *int { return &c.InboundMaxBytes }, 1<<16, 1<<26)},

	{name: "BODY_MEMORY_BYTES", def: strconv.Itoa(apphttp.DefaultBodyMemory), doc: "Memory for request bodies at one time; beyond it 503 `overloaded`. Webhook senders that have not yet proven themselves by a signature share a quarter of it.",
		set: intBetween(func(c *Config) *int { return &c.BodyMemory }, 16<<20, 1<<40)},

	{name: "UPLOAD_DIR", def: "uploads", doc: "Folder of uploaded files. Nodes of one installation need the same one.",
		set: func(c *Config, v string) error {
			c.UploadDir = v
			return nil
		}},
	{name: "UPLOAD_MAX_BYTES", def: strconv.Itoa(upload.DefaultMaxBytes), doc: "Largest uploaded file, in bytes.",
		set: intBetween(func(c *Config) *int { return &c.UploadMaxBytes }, 1<<10, 1<<30)},
	{name: "UPLOAD_ALLOWED_TYPES", def: strings.Join(upload.DefaultTypes(), ","),
		doc: "Types that uploaded files may have, found in their bytes, separated by commas; of those in the default, and `application/octet-stream` for all others. A tenant may have its own list.",
		set: func(c *Config, v string) error {
			c.UploadAllowedTypes = list(v)
			for i, t := range c.UploadAllowedTypes {
				var ok bool
				if c.UploadAllowedTypes[i], ok = upload.ParseType(t); !ok {
					return fmt.Errorf("%q is no type that is told apart: the default lists them", t)
				}
			}
			return nil
		}},

	{name: "WORKERS", def: "500", doc: "Deliveries that this node attempts at the same time.",
		set: intBetween(func(c *Config) *int { return &c.Workers }, 1, 10000)},

	{name: "LOG_LEVEL", def: "info", doc: "`debug`, `info`, `warn` or `error`.",
		set: func(c *Config, v string) error {
			if c.LogLevel.UnmarshalText([]byte(v)) != nil {
				return fmt.Errorf("must be debug, info, warn or error, not %q", v)
			}
			return nil
		}},
	{name: "LOG_FORMAT", def: "json", doc: "`json` or `text`.",
		set: func(c *Config, v string) error {
			if v != "json" && v != "text" {
				return errors.New("must be json or text")
			}
			c.LogFormat = v
			return nil
		}},

	{name: "DRAIN_DELAY_MS", def: "5000", doc: "After the stop signal: how long to answer `not ready` before the listener closes, so that the balancer looks away first.",
		set: duration(func(c *Config) *time.Duration { return &c.DrainDelay }, 0, 5*time.Minute)},
	{name: "SHUTDOWN_TIMEOUT_MS", def: "30000", doc: "How long each step of the stop may take before it is cut short.",
		set: duration(func(c *Config) *time.Duration { return &c.ShutdownTimeout }, time.Second, 10*time.Minute)},
}

// Problem is one thing that is wrong with the configuration.
type Problem struct{ Name, Text string }

// Problems is the error of a configuration that can't be used: all that is wrong with it, not only the first.
type Problems []Problem

func (p Problems) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "the configuration has %d problem(s):", len(p))
	for _, x := range p {
		fmt.Fprintf(&b, "\n  %s: %s", x.Name, x.Text)
	}
	b.WriteString("\n`server config doc` explains every variable.")
	return b.String()
}

// LoadConfig reads the environment. Its error is of type [Problems]; the Config is then unusable.
func LoadConfig(getenv func(string) string) (Config, error) {
	return loadSettings(getenv, func(string) bool { return true })
}

// loadSettings reads the variables that are wanted, for commands that need no more; the other fields are zero.
func loadSettings(getenv func(string) string, wanted func(name string) bool) (Config, error) {
	var c Config
	var problems Problems
	add := func(name, format string, args ...any) {
		problems = append(problems, Problem{name, fmt.Sprintf(format, args...)})
	}
	for _, s := range settings {
		if !wanted(s.name) {
			continue
		}
		value, err := s.value(getenv)
		if err != nil {
			add(s.name, "%v", err)
			continue
		}
		switch {
		case value == "" && s.required:
			add(s.name, "is missing. %s", s.doc)
			continue
		case value == "" && s.def == "":
			continue
		case value == "":
			value = s.def
		}
		if err := s.set(&c, value); err != nil {
			add(s.name, "%v", err)
		}
	}
	if wanted("RATE_LIMITS") && getenv("RATE_LIMITS") != "" && getenv("RATE_LIMITS_FILE") != "" {
		add("RATE_LIMITS", "is set, and so is RATE_LIMITS_FILE: set one of them")
	}
	if c.SecretKeyBase != "" && c.SecretKeyBase == c.PreviousSecretKeyBase {
		add("SECRET_KEY_BASE_PREVIOUS", "is the same as SECRET_KEY_BASE")
	}
	if c.Clustered() {
		told := slices.Clone(problems)
		for _, p := range c.cluster().Check() {
			name := clusterVariables[p.Field]
			if !slices.ContainsFunc(told, func(q Problem) bool { return q.Name == name }) {
				add(name, "%v", p.Err)
			}
		}
	}
	told := func(name string) bool {
		return slices.ContainsFunc(problems, func(q Problem) bool { return q.Name == name })
	}
	for _, b := range ratelimit.Buckets() {
		name := "RATE_LIMIT_BACKEND"
		if c.RateLimits.Backend(b) != "" {
			name = "RATE_LIMITS"
		}
		switch used := c.Backend(b); {
		case told(name):
		case used == ratelimit.BackendRedis && c.RateLimitRedis == "" && !told("RATE_LIMIT_REDIS_URL") && wanted("RATE_LIMIT_REDIS_URL"):
			add(name, "redis needs a Redis server: set RATE_LIMIT_REDIS_URL")
		case (used == ratelimit.BackendCluster || used == ratelimit.BackendOwner) && !c.Clustered():
			add(name, "%s needs other nodes: set DNS_CLUSTER_QUERY or CLUSTER_PEERS", used)
		}
	}
	if len(problems) > 0 {
		return Config{}, problems
	}
	return c, nil
}

// Backend is what counts a bucket.
func (c Config) Backend(b ratelimit.Bucket) ratelimit.Backend {
	own := c.RateLimits.Backend(b)
	switch {
	case own != "":
		return own
	case c.Clustered() && b.Info().Exact && c.RateLimitBackend != ratelimit.BackendRedis: // which is as exact
		return ratelimit.BackendOwner
	case c.RateLimitBackend != "":
		return c.RateLimitBackend
	case c.Clustered():
		return ratelimit.BackendCluster
	}
	return ratelimit.BackendLocal
}

// clusterVariables are the variables behind the fields of a [cluster.Config].
var clusterVariables = map[string]string{
	"Label": "CLUSTER_LABEL", "NodeName": "CLUSTER_NODE_NAME", "Bind": "CLUSTER_BIND", "Secret": "CLUSTER_SECRET",
	"OtherSecret": "CLUSTER_SECRET_PREVIOUS", "Advertise": "CLUSTER_ADVERTISE", "Peers": "CLUSTER_PEERS", "Query": "DNS_CLUSTER_QUERY",
}

// Clustered tells whether this node has others beside it.
func (c Config) Clustered() bool { return c.ClusterQuery != "" || len(c.ClusterPeers) > 0 }

// cluster is what the variables say of the node's place among others.
func (c Config) cluster() cluster.Config {
	name := c.ClusterNodeName
	if name == "" {
		name, _ = os.Hostname() // a node without one is known by its id
		name = name[:min(len(name), 64)]
	}
	return cluster.Config{
		Label: c.ClusterLabel, NodeName: name, Version: version, Secret: []byte(c.ClusterSecret.Reveal()), OtherSecret: []byte(c.ClusterOtherSecret.Reveal()),
		Bind: c.ClusterBind, Advertise: c.ClusterAdvertise, Peers: c.ClusterPeers, Query: c.ClusterQuery,
	}
}

// WriteConfigDoc prints the table of the README.
func WriteConfigDoc(w io.Writer) {
	fmt.Fprintln(w, "| Variable | Default | Meaning |")
	fmt.Fprintln(w, "| --- | --- | --- |")
	for _, s := range settings {
		def := "–"
		if s.def != "" {
			def = "`" + s.def + "`"
		}
		if s.required {
			def = "required"
		}
		doc := s.doc
		if s.secret {
			doc += " Or `" + s.name + "_FILE`."
		}
		fmt.Fprintf(w, "| `%s` | %s | %s |\n", s.name, def, strings.ReplaceAll(doc, "|", "\\|"))
	}
}

// parsePublicURL reads the address of a hub, and returns it without a slash at its end.
func parsePublicURL(v string) (string, error) {
	u, err := url.Parse(v)
	if err != nil || (u.Scheme != "http" && u.Scheme != "https") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" {
		return "", errors.New("must be an http or https URL with a host, no user, and nothing after the path")
	}
	u.Host = originHost(u)
	return strings.TrimRight(u.String(), "/"), nil
}

// parseOrigin reads an origin and writes it as browsers do: the two are compared byte by byte.
func parseOrigin(v string) (string, error) {
	u, err := url.Parse(v)
	if err != nil || u.Scheme == "" || u.Hostname() == "" || strings.TrimRight(v[len(u.Scheme):], "/") != "://"+u.Host {
		return "", fmt.Errorf("%q is no origin: write scheme and host, such as https://app.example.com, or *", v)
	}
	if strings.ContainsFunc(u.Host, func(r rune) bool { return r == '*' || r > unicode.MaxASCII }) {
		return "", fmt.Errorf("%q is the origin of no page: write each host by itself, as browsers do (xn--… for other letters), or * for all", v)
	}
	return u.Scheme + "://" + originHost(u), nil
}

// originHost is host and port as browsers write them in an origin (RFC 6454, 6.2).
func originHost(u *url.URL) string {
	host := strings.TrimSuffix(strings.ToLower(u.Host), ":")
	if port := map[string]string{"http": ":80", "https": ":443"}[u.Scheme]; port != "" {
		host = strings.TrimSuffix(host, port)
	}
	return host
}

func setRateLimits(c *Config, v string) (err error) {
	c.RateLimits, err = ratelimit.ParseOperator([]byte(v))
	return err
}

// strongSecret refuses what somebody could guess: too short, too even, or known from examples.
func strongSecret(v string) error {
	if len(v) < minSecretBytes {
		return fmt.Errorf("has %d bytes and needs at least %d; make one with: openssl rand -hex 64", len(v), minSecretBytes)
	}
	lower := strings.ToLower(v)
	for _, k := range knownSecrets {
		if strings.Count(lower, k)*len(k) > len(v)/4 {
			return fmt.Errorf("is made of the well-known word %q; make one with: openssl rand -hex 64", k)
		}
	}
	if entropyBits(v) < 200 {
		return errors.New("is too regular to be random; make one with: openssl rand -hex 64")
	}
	return nil
}

// entropyBits is the Shannon entropy of the bytes of v, in bits, over its whole length.
func entropyBits(v string) float64 {
	var count [256]int
	for i := range len(v) {
		count[v[i]]++
	}
	bits, n := 0.0, float64(len(v))
	for _, k := range count {
		if k > 0 {
			bits -= float64(k) * math.Log2(float64(k)/n)
		}
	}
	return bits
}

func decodeKey(v string) ([]byte, error) {
	b, err := base64.StdEncoding.DecodeString(v)
	if err != nil {
		b, err = base64.RawURLEncoding.DecodeString(strings.TrimRight(v, "="))
	}
	switch {
	case err != nil:
		return nil, errors.New("is not base64; make one with: openssl rand -base64 32")
	case len(b) != 32:
		return nil, fmt.Errorf("has %d bytes and needs 32; make one with: openssl rand -base64 32", len(b))
	case len(slices.Compact(slices.Sorted(slices.Values(b)))) < 16: // different bytes; random ones have about 30
		return nil, errors.New("is too regular to be random; make one with: openssl rand -base64 32")
	}
	return b, nil
}

// list splits at commas and drops what is empty.
func list(v string) []string {
	var out []string
	for part := range strings.SplitSeq(v, ",") {
		if part = strings.TrimSpace(part); part != "" {
			out = append(out, part)
		}
	}
	return out
}

func prefixes(v string) ([]netip.Prefix, error) {
	var out []netip.Prefix
	for _, s := range list(v) {
		p, err := netip.ParsePrefix(s)
		if err != nil {
			a, aerr := netip.ParseAddr(s)
			if aerr != nil {
				return nil, fmt.Errorf("%q is neither an address nor a range such as 10.0.0.0/8", s)
			}
			p = netip.PrefixFrom(a.Unmap(), a.Unmap().BitLen())
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

func text(field func(*Config) *string) func(*Config, string) error {
	return func(c *Config, v string) error {
		*field(c) = v
		return nil
	}
}

func intBetween(field func(*Config) *int, low, high int) func(*Config, string) error {
	return func(c *Config, v string) error {
		n, err := strconv.Atoi(v)
		if err != nil || n < low || n > high {
			return fmt.Errorf("must be a whole number from %d to %d, not %q", low, high, v)
		}
		*field(c) = n
		return nil
	}
}

func boolean(field func(*Config) *bool) func(*Config, string) error {
	return func(c *Config, v string) error {
		b, err := strconv.ParseBool(v)
		if err != nil {
			return fmt.Errorf("must be true or false, not %q", v)
		}
		*field(c) = b
		return nil
	}
}

// duration reads whole milliseconds.
func duration(field func(*Config) *time.Duration, low, high time.Duration) func(*Config, string) error {
	return func(c *Config, v string) error {
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < low.Milliseconds() || n > high.Milliseconds() {
			return fmt.Errorf("must be milliseconds from %d to %d, not %q", low.Milliseconds(), high.Milliseconds(), v)
		}
		*field(c) = time.Duration(n) * time.Millisecond
		return nil
	}
}
