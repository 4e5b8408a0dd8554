package main

import (
	"errors"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/activity/upload"
	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
)

// loadWith reads the environment of a sound installation with changes; "" unsets.
func loadWith(changes map[string]string) (Config, error) {
	e := serveEnv("postgres://u:p@db/converger", map[string]string{"LISTEN": "", "DRAIN_DELAY_MS": "", "WEBHOOK_ALLOW_PRIVATE_TARGETS": "", "CONN_LIMIT_PER_IP": ""})
	for name, value := range changes {
		e[name] = value
	}
	return LoadConfig(func(name string) string { return e[name] })
}

// problemsOf are the names of the variables that an error complains about.
func problemsOf(t *testing.T, err error) []string {
	t.Helper()
	if err == nil {
		return nil
	}
	var p Problems
	if !errors.As(err, &p) {
		t.Fatalf("the error is of type %T: %v", err, err)
	}
	var names []string
	for _, x := range p {
		names = append(names, x.Name)
		if !strings.Contains(err.Error(), x.Name+": "+x.Text) {
			t.Errorf("%q is not in the text:\n%v", x.Text, err)
		}
	}
	return names
}

func TestConfigDefaults(t *testing.T) {
	t.Parallel()
	c, err := loadWith(nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.RateLimits == nil {
		t.Error("no limits of the installation, want an empty set")
	}
	c.RateLimits = nil
	want := Config{
		DatabaseURL: "postgres://u:p@db/converger", PoolSize: 20, Listen: ":4000", PublicURL: "http://hub.test",
		SecretKeyBase: testSecretKeyBase, EncryptionKey: testCloakKey,
		CORSOrigins: []string{"http://127.0.0.1:5500", "http://localhost:5500"},
		AdminNets:   []netip.Prefix{netip.MustParsePrefix("127.0.0.1/32"), netip.MustParsePrefix("::1/128")},
		BcryptCost:  12, SessionIdle: 12 * time.Hour, SessionAbsolute: 7 * 24 * time.Hour,
		RateLimitEnabled: true, RateLimitSync: 100 * time.Millisecond, RateLimitMaxKeys: 1_000_000,
		ConnLimitEnabled: true, ConnLimitPerIP: 100, ConnLimitTotal: 10_000, DirectoryTTL: 30 * time.Second,
		ClusterBind: ":7946", ClusterLabel: "converger",
		APIMaxBytes: 1 << 20, InboundMaxBytes: 3 << 20, BodyMemory: 256 << 20,
		UploadDir: "uploads", UploadMaxBytes: 10 << 20, UploadAllowedTypes: upload.DefaultTypes(),
		Workers: 500, LogLevel: slog.LevelInfo, LogFormat: "json",
		DrainDelay: 5 * time.Second, ShutdownTimeout: 30 * time.Second,
	}
	if diff := cmp.Diff(want, c, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
}

func TestConfigReadsEverything(t *testing.T) {
	t.Parallel()
	other := strings.Repeat("x", 4) + testSecretKeyBase
	c, err := loadWith(map[string]string{
		"POOL_SIZE": "4", "LISTEN": "127.0.0.1:80", "PUBLIC_URL": "https://hub.example.com/", "SECRET_KEY_BASE_PREVIOUS": other,
		"CLOAK_RETIRED_KEYS": " " + testCloakKey + " , " + testCloakKey, "TRUSTED_PROXIES": "10.0.0.0/8, 192.0.2.1,::ffff:192.0.2.2,2001:db8::1",
		"ADMIN_IP_WHITELIST": "192.0.2.0/24,2001:db8::/32",
		"CORS_ORIGINS":       "*", "METRICS_TOKEN": "0123456789abcdef", "METRICS_ALLOWED_IPS": "127.0.0.1", "RATE_LIMIT_ENABLED": "0",
		"BCRYPT_COST": "11", "SESSION_IDLE_MS": "600000", "SESSION_MAX_MS": "700000",
		"RATE_LIMITS": `{"inbound":{"limit":2000,"scale_ms":1000},"api_read":"off"}`, "DIRECTORY_TTL_MS": "1000",
		"WEBHOOK_ALLOW_PRIVATE_TARGETS": "true", "WEBHOOK_ALLOWED_TARGETS": "a.test,*.b.test", "LOG_LEVEL": "debug", "LOG_FORMAT": "text",
		"DRAIN_DELAY_MS": "0", "SHUTDOWN_TIMEOUT_MS": "1500", "WORKERS": "7", "API_MAX_BYTES": "65536", "INBOUND_MAX_BYTES": "65536",
		"UPLOAD_DIR": "/srv/files", "UPLOAD_MAX_BYTES": "2048", "UPLOAD_ALLOWED_TYPES": "image/png, application/octet-stream",
		"CLUSTER_PEERS": "hub-1:7946, hub-2:7946", "CLUSTER_SECRET": other, "CLUSTER_SECRET_PREVIOUS": testSecretKeyBase, "CLUSTER_BIND": "10.0.0.1:7000", "CLUSTER_ADVERTISE": "hub-1:7001",
		"RATE_LIMIT_BACKEND": "owner", "RATE_LIMIT_SYNC_INTERVAL_MS": "50", "RATE_LIMIT_PARTITION": "full", "RATE_LIMIT_TELL_TIME": "true",
		"CONN_LIMIT_ENABLED": "false", "CONN_LIMIT_PER_IP": "7", "CONN_LIMIT_TOTAL": "70",
		"CLUSTER_LABEL": "production", "CLUSTER_NODE_NAME": "hub-1", "CLUSTER_TEST_CLOCK_OFFSET_MS": "-400",
	})
	if err != nil {
		t.Fatal(err)
	}
	prefix := netip.MustParsePrefix
	if diff := cmp.Diff([]netip.Prefix{prefix("10.0.0.0/8"), prefix("192.0.2.1/32"), prefix("192.0.2.2/32"), prefix("2001:db8::1/128")},
		c.TrustedProxies, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); diff != "" {
		t.Errorf("trusted proxies:\n%s", diff)
	}
	if diff := cmp.Diff([]secrets.Text{testCloakKey, testCloakKey}, c.RetiredKeys); diff != "" {
		t.Errorf("retired keys:\n%s", diff)
	}
	if !slices.Equal(c.AdminNets, []netip.Prefix{prefix("192.0.2.0/24"), prefix("2001:db8::/32")}) {
		t.Errorf("administration is open to %v", c.AdminNets)
	}
	if c.UploadDir != "/srv/files" || c.UploadMaxBytes != 2048 || !slices.Equal(c.UploadAllowedTypes, []string{"image/png", "application/octet-stream"}) {
		t.Errorf("read %+v", c)
	}
	if c.BcryptCost != 11 || c.SessionIdle != 10*time.Minute || c.SessionAbsolute != 700*time.Second {
		t.Errorf("read %+v", c)
	}
	if c.PublicURL != "https://hub.example.com" || c.PoolSize != 4 || c.RateLimitEnabled || c.DrainDelay != 0 || c.ShutdownTimeout != 1500*time.Millisecond ||
		c.LogLevel != slog.LevelDebug || c.SecretKeyBase != testSecretKeyBase || c.PreviousSecretKeyBase != secrets.Text(other) || !c.WebhookAllowPrivateTargets {
		t.Errorf("read %+v", c)
	}
	if c.RateLimitBackend != ratelimit.BackendOwner || c.RateLimitSync != 50*time.Millisecond || !c.RateLimitFull || !c.RateLimitTell {
		t.Errorf("limits: read %+v", c)
	}
	if c.ConnLimitEnabled || c.ConnLimitPerIP != 7 || c.ConnLimitTotal != 70 {
		t.Errorf("connections: read %+v", c)
	}
	want := cluster.Config{Label: "production", NodeName: "hub-1", Version: version, Secret: []byte(other), OtherSecret: []byte(testSecretKeyBase), Bind: "10.0.0.1:7000",
		Advertise: "hub-1:7001", Peers: []string{"hub-1:7946", "hub-2:7946"}}
	if diff := cmp.Diff(want, c.cluster()); diff != "" || !c.Clustered() || c.ClusterClockOffset != -400*time.Millisecond {
		t.Errorf("the cluster, with a clock off by %s:\n%s", c.ClusterClockOffset, diff)
	}
	if c, err = loadWith(map[string]string{"DNS_CLUSTER_QUERY": "hub.svc", "CLUSTER_BIND": "127.0.0.1:7946"}); err != nil || !c.Clustered() ||
		c.cluster().Query != "hub.svc" || c.cluster().NodeName == "" {
		t.Errorf("by DNS, on loopback without a secret: %v, %+v", err, c.cluster())
	}
}

// All that is wrong is told at once, and nothing that is right.
func TestConfigProblems(t *testing.T) {
	t.Parallel()
	unreadable := filepath.Join(t.TempDir(), "absent")
	for name, test := range map[string]struct {
		changes map[string]string
		want    []string // the variables, in the order of the table
	}{
		"nothing": {},
		"everything missing": {map[string]string{"DATABASE_URL": "", "PUBLIC_URL": "", "SECRET_KEY_BASE": "", "CLOAK_KEY": " "},
			[]string{"DATABASE_URL", "PUBLIC_URL", "SECRET_KEY_BASE", "CLOAK_KEY"}},
		"everything wrong": {map[string]string{
			"POOL_SIZE": "3", "LISTEN": "4000", "PUBLIC_URL": "hub.example.com", "SECRET_KEY_BASE": "short", "CLOAK_KEY": "short",
			"CLOAK_RETIRED_KEYS": "x", "TRUSTED_PROXIES": "proxy", "ADMIN_IP_WHITELIST": "localhost", "CORS_ORIGINS": "https://app.example.com/path", "METRICS_TOKEN": "short", "METRICS_ALLOWED_IPS": "1.2.3",
			"BCRYPT_COST": "9", "SESSION_IDLE_MS": "0", "SESSION_MAX_MS": "7d", "RATE_LIMIT_ENABLED": "maybe", "RATE_LIMIT_BACKEND": "memcached", "RATE_LIMIT_REDIS_URL": "redis://hub@cache", "RATE_LIMIT_SYNC_INTERVAL_MS": "0", "RATE_LIMIT_PARTITION": "half", "RATE_LIMITS": `{"inbound":{"limit":-1}}`, "RATE_LIMIT_MAX_KEYS": "1e6",
			"CONN_LIMIT_ENABLED": "on", "CONN_LIMIT_PER_IP": "0", "CONN_LIMIT_TOTAL": "10k", "DIRECTORY_TTL_MS": "1s",
			"WEBHOOK_ALLOW_PRIVATE_TARGETS": "?", "API_MAX_BYTES": "0", "INBOUND_MAX_BYTES": "99999999999999999999", "UPLOAD_MAX_BYTES": "0",
			"UPLOAD_ALLOWED_TYPES": "image/png,image/svg+xml", "WORKERS": "0",
			"LOG_LEVEL": "loud", "LOG_FORMAT": "xml", "DRAIN_DELAY_MS": "-1", "SHUTDOWN_TIMEOUT_MS": "0",
		}, []string{"POOL_SIZE", "LISTEN", "PUBLIC_URL", "SECRET_KEY_BASE", "CLOAK_KEY", "CLOAK_RETIRED_KEYS", "TRUSTED_PROXIES", "ADMIN_IP_WHITELIST", "CORS_ORIGINS",
			"METRICS_TOKEN", "METRICS_ALLOWED_IPS", "BCRYPT_COST", "SESSION_IDLE_MS", "SESSION_MAX_MS", "RATE_LIMIT_ENABLED", "RATE_LIMIT_BACKEND", "RATE_LIMIT_REDIS_URL", "RATE_LIMIT_SYNC_INTERVAL_MS", "RATE_LIMIT_PARTITION", "RATE_LIMITS", "RATE_LIMIT_MAX_KEYS",
			"CONN_LIMIT_ENABLED", "CONN_LIMIT_PER_IP", "CONN_LIMIT_TOTAL", "DIRECTORY_TTL_MS",
			"WEBHOOK_ALLOW_PRIVATE_TARGETS", "API_MAX_BYTES", "INBOUND_MAX_BYTES", "UPLOAD_MAX_BYTES", "UPLOAD_ALLOWED_TYPES", "WORKERS", "LOG_LEVEL", "LOG_FORMAT", "DRAIN_DELAY_MS", "SHUTDOWN_TIMEOUT_MS"}},
		"a backend for nodes that are not there":     {map[string]string{"RATE_LIMIT_BACKEND": "cluster"}, []string{"RATE_LIMIT_BACKEND"}},
		"such a backend for one bucket":              {map[string]string{"RATE_LIMITS": `{"upload":{"backend":"owner"}}`}, []string{"RATE_LIMITS"}},
		"limits at no Redis":                         {map[string]string{"RATE_LIMIT_BACKEND": "redis"}, []string{"RATE_LIMIT_BACKEND"}},
		"one bucket at no Redis":                     {map[string]string{"RATE_LIMITS": `{"upload":{"backend":"redis"}}`}, []string{"RATE_LIMITS"}},
		"limits at a Redis that can't be found":      {map[string]string{"RATE_LIMIT_BACKEND": "redis", "RATE_LIMIT_REDIS_URL": "cache:6379"}, []string{"RATE_LIMIT_REDIS_URL"}},
		"limits at Redis":                            {map[string]string{"RATE_LIMIT_BACKEND": "redis", "RATE_LIMIT_REDIS_URL": "rediss://hub:pw@cache"}, nil},
		"a cluster that others reach needs a secret": {map[string]string{"CLUSTER_PEERS": "hub-1:7946"}, []string{"CLUSTER_SECRET"}},
		"a secret of the cluster twice":              {map[string]string{"CLUSTER_PEERS": "hub-1:7946", "CLUSTER_SECRET": testSecretKeyBase, "CLUSTER_SECRET_PREVIOUS": testSecretKeyBase}, []string{"CLUSTER_SECRET_PREVIOUS"}},
		"a weak secret of the cluster":               {map[string]string{"CLUSTER_PEERS": "hub-1:7946", "CLUSTER_SECRET": "short"}, []string{"CLUSTER_SECRET"}},
		"two ways to find peers":                     {map[string]string{"CLUSTER_PEERS": "hub-1:7946", "DNS_CLUSTER_QUERY": "hub", "CLUSTER_BIND": "127.0.0.1:1"}, []string{"CLUSTER_PEERS"}},
		"a cluster with everything wrong": {map[string]string{"CLUSTER_PEERS": "hub-1,hub-2:0", "CLUSTER_BIND": "hub-1", "CLUSTER_ADVERTISE": "x", "CLUSTER_LABEL": "a b",
			"CLUSTER_NODE_NAME": "a b", "CLUSTER_TEST_CLOCK_OFFSET_MS": "1e3"},
			[]string{"CLUSTER_TEST_CLOCK_OFFSET_MS", "CLUSTER_LABEL", "CLUSTER_NODE_NAME", "CLUSTER_BIND", "CLUSTER_ADVERTISE", "CLUSTER_PEERS", "CLUSTER_PEERS"}},
		"a name without a port to go by":  {map[string]string{"DNS_CLUSTER_QUERY": "hub", "CLUSTER_BIND": "127.0.0.1:0"}, []string{"DNS_CLUSTER_QUERY"}},
		"overflowing milliseconds":        {map[string]string{"DRAIN_DELAY_MS": "-9223372036854775807"}, []string{"DRAIN_DELAY_MS"}},
		"a secret and its file":           {map[string]string{"CLOAK_KEY_FILE": unreadable}, []string{"CLOAK_KEY"}},
		"no such file":                    {map[string]string{"CLOAK_KEY": "", "CLOAK_KEY_FILE": unreadable, "RATE_LIMITS_FILE": unreadable}, []string{"CLOAK_KEY", "RATE_LIMITS_FILE"}},
		"limits twice":                    {map[string]string{"RATE_LIMITS": "{}", "RATE_LIMITS_FILE": os.DevNull}, []string{"RATE_LIMITS"}},
		"the previous secret is the same": {map[string]string{"SECRET_KEY_BASE_PREVIOUS": testSecretKeyBase}, []string{"SECRET_KEY_BASE_PREVIOUS"}},
		"URL with a user":                 {map[string]string{"PUBLIC_URL": "https://u:p@h/"}, []string{"PUBLIC_URL"}},
		"no database URL":                 {map[string]string{"DATABASE_URL": "postgres://hub:pass/word@h/hub"}, []string{"DATABASE_URL"}},
		"URL with a query":                {map[string]string{"PUBLIC_URL": "https://h/?a"}, []string{"PUBLIC_URL"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := loadWith(test.changes)
			if diff := cmp.Diff(test.want, problemsOf(t, err)); diff != "" {
				t.Errorf("problems:\n%s%v", diff, err)
			}
		})
	}
}

func TestConfigSecretFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	c, err := loadWith(map[string]string{
		"DATABASE_URL": "", "DATABASE_URL_FILE": file("url", "postgres://from-file/db\n"),
		"SECRET_KEY_BASE": "", "SECRET_KEY_BASE_FILE": file("base", testSecretKeyBase+"\r\n"),
		"CLOAK_KEY": "", "CLOAK_KEY_FILE": file("cloak", "  "+testCloakKey),
		"METRICS_TOKEN_FILE": file("metrics", "0123456789abcdef\n"),
		"RATE_LIMITS_FILE":   file("limits", `{"inbound":"off"}`),
		// Only secrets have a twin.
		"PUBLIC_URL_FILE": file("public", "https://ignored.example.com"),
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.DatabaseURL != "postgres://from-file/db" || c.SecretKeyBase != testSecretKeyBase || c.EncryptionKey != testCloakKey ||
		c.MetricsToken != "0123456789abcdef" || c.PublicURL != "http://hub.test" {
		t.Errorf("read %q %q %q %q %q", c.DatabaseURL.Reveal(), c.SecretKeyBase.Reveal(), c.EncryptionKey.Reveal(), c.MetricsToken.Reveal(), c.PublicURL)
	}
}

// What is wrong with a secret's file is said in words, by `config check`, with nothing of the file's content or name.
func TestConfigSecretFileProblems(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for name, test := range map[string]struct{ path, want string }{
		"absent":                 {filepath.Join(dir, "absent"), "does not exist"},
		"the secret as the name": {testCloakKey, "does not exist"},
		"a URL as the name":      {"postgres://hub:" + testCloakKey + "@h/hub", "does not exist"},
		"a very long name":       {strings.Repeat(testCloakKey, 200), "does not exist"},
		"below a file":           {filepath.Join(file("plain", "x"), "below"), "does not exist"},
		"a NUL in the name":      {"a\x00b", "does not exist"},
		"a folder":               {dir, "a folder"},
		"empty":                  {file("empty", ""), "nothing in it"},
		"blank":                  {file("blank", " \r\n\t\n"), "nothing in it"},
		"a mark alone":           {file("mark alone", "\ufeff\n"), "nothing in it"},
		"two lines":              {file("lines", testCloakKey+"\n"+testCloakKey+"\n"), "several lines"},
		"a NUL":                  {file("nul", testCloakKey[:20]+"\x00"+testCloakKey[21:]), "control characters"},
		"UTF-16":                 {file("utf16", "\xff\xfeq\x001\x00"), "UTF-8"},
		"endless":                {"/dev/zero", "more than"},
		"nothing at all":         {os.DevNull, "nothing in it"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			environ := serveEnv("postgres://db", map[string]string{"CLOAK_KEY": "", "CLOAK_KEY_FILE": test.path})
			err := start(t, environ, "config", "check").result(t)
			if err == nil {
				t.Fatal("accepted")
			}
			if diff := cmp.Diff([]string{"CLOAK_KEY"}, problemsOf(t, err)); diff != "" || !strings.Contains(err.Error(), "CLOAK_KEY_FILE names a file") && name != "a folder" || !strings.Contains(err.Error(), test.want) {
				t.Errorf("want %q, got %v\n%s", test.want, err, diff)
			}
			if strings.Contains(err.Error(), testCloakKey) || strings.Contains(err.Error(), dir) {
				t.Errorf("it tells too much: %v", err)
			}
		})
	}
	t.Run("unreadable", func(t *testing.T) {
		t.Parallel()
		if os.Geteuid() == 0 {
			t.Skip("root may read everything")
		}
		path := file("unreadable", testCloakKey)
		if err := os.Chmod(path, 0); err != nil {
			t.Fatal(err)
		}
		_, err := loadWith(map[string]string{"CLOAK_KEY": "", "CLOAK_KEY_FILE": path})
		if err == nil || !strings.Contains(err.Error(), "may not read") {
			t.Error(err)
		}
	})
	// Line ends of both kinds, and the mark with which some editors begin a file.
	for name, text := range map[string]string{"LF": testCloakKey + "\n", "CRLF": testCloakKey + "\r\n", "mark": "\ufeff" + testCloakKey + "\r\n", "none": testCloakKey} {
		c, err := loadWith(map[string]string{"CLOAK_KEY": "", "CLOAK_KEY_FILE": file(name, text)})
		if err != nil || c.EncryptionKey != testCloakKey {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Secrets that somebody could guess are refused, and the refusal does not repeat them.
func TestConfigWeakSecrets(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct{ variable, value string }{
		"short":                    {"SECRET_KEY_BASE", testSecretKeyBase[:63]},
		"one letter":               {"SECRET_KEY_BASE", strings.Repeat("q", 64)},
		"a repeated word":          {"SECRET_KEY_BASE", strings.Repeat("ab12", 16)},
		"a known word":             {"SECRET_KEY_BASE", strings.Repeat("ChangeMe", 3) + testSecretKeyBase[:40]},
		"previous, short":          {"SECRET_KEY_BASE_PREVIOUS", "0123456789"},
		"cluster, previous, short": {"CLUSTER_SECRET_PREVIOUS", "0123456789"},
		"key of 31 bytes":          {"CLOAK_KEY", "q1Yw0nH7v3Jz8rT5kXb2LmPd9sGfUe6cAoRi4NtWyQ=="},
		"key of 33 bytes":          {"CLOAK_KEY", "q1Yw0nH7v3Jz8rT5kXb2LmPd9sGfUe6cAoRi4NtWyZEA"},
		"key in hex":               {"CLOAK_KEY", "8f4e0a7715c2d39b60ee1a5cc04472f1b9d83a5e6f70215c94be0d8712a3c6f8"},
		"key of zeros":             {"CLOAK_KEY", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="},
		"key of two bytes in turn": {"CLOAK_KEY", "AQIBAgECAQIBAgECAQIBAgECAQIBAgECAQIBAgECAQI="},
		"retired key of zeros":     {"CLOAK_RETIRED_KEYS", testCloakKey + ",AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, err := loadWith(map[string]string{test.variable: test.value})
			if diff := cmp.Diff([]string{test.variable}, problemsOf(t, err)); diff != "" {
				t.Errorf("problems:\n%s", diff)
			}
			if err != nil && strings.Contains(err.Error(), test.value) {
				t.Errorf("the secret is in the error: %v", err)
			}
		})
	}
	for name, value := range map[string]string{
		"hex of 32 bytes":    "8f4e0a7715c2d39b60ee1a5cc04472f1b9d83a5e6f70215c94be0d8712a3c6f8",
		"base64 of 64 bytes": "b1lZ0b4vtpIR2qSNkaTqT5VQ0CzN0iXJw1sM9U3rYQkz4c1e7hGdPBo8Lf6uWmEaXtVnJyS5KxD+A/HCvR3gZw==",
	} {
		if _, err := loadWith(map[string]string{"SECRET_KEY_BASE": value}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestConfigCommands(t *testing.T) {
	t.Parallel()
	if out := runOK(t, serveEnv("postgres://db", nil), "config", "check"); !strings.Contains(out, "valid") {
		t.Errorf("check of a sound configuration: %q", out)
	}
	p := start(t, map[string]string{"CLOAK_KEY": testCloakKey}, "config", "check")
	if got := problemsOf(t, p.result(t)); len(got) != 3 {
		t.Errorf("check of a configuration with three variables missing: %v", got)
	}
	// serve refuses in the same words, before it looks for a database.
	p = start(t, map[string]string{"CLOAK_KEY": testCloakKey}, "serve")
	if got := problemsOf(t, p.result(t)); len(got) != 3 {
		t.Errorf("serve with three variables missing: %v", got)
	}

	doc := runOK(t, nil, "config", "doc")
	for _, s := range settings {
		if n := strings.Count(doc, "\n| `"+s.name+"` |"); n != 1 {
			t.Errorf("config doc has %d rows for %s", n, s.name)
		}
		if strings.Contains(doc, "`"+s.name+"_FILE`") != (s.secret || s.name == "RATE_LIMITS") {
			t.Errorf("config doc and the twin of %s", s.name)
		}
	}
	for i, line := range strings.Split(strings.TrimSpace(doc), "\n") {
		if strings.Count(strings.ReplaceAll(line, `\|`, ""), "|") != 4 {
			t.Errorf("row %d has not three cells: %s", i, line)
		}
	}
}

// The table in the README is the output of `server config doc`, between two markers.
func TestReadmeHoldsConfigDoc(t *testing.T) {
	t.Parallel()
	b, err := os.ReadFile(filepath.Join("..", "..", "README.md"))
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?s)<!-- config -->\n+(.*?)\n+<!-- /config -->`).FindSubmatch(b)
	if m == nil {
		t.Fatal("README.md has no section between <!-- config --> and <!-- /config -->; paste the output of `server config doc` there")
	}
	want := strings.TrimSpace(runOK(t, nil, "config", "doc"))
	if diff := cmp.Diff(want, strings.TrimSpace(string(m[1]))); diff != "" {
		t.Errorf("the table in README.md is not the output of `server config doc`:\n%s", diff)
	}
}

// Who counts a bucket: the operator's word for it, else owners for small limits of a cluster, else the general choice, else
// what fits.
func TestConfigBackends(t *testing.T) {
	t.Parallel()
	cluster := map[string]string{"CLUSTER_PEERS": "127.0.0.1:7946", "CLUSTER_BIND": "127.0.0.1:7946"}
	for name, tt := range map[string]struct {
		env            map[string]string
		login, inbound ratelimit.Backend
	}{
		"alone":                    {nil, ratelimit.BackendLocal, ratelimit.BackendLocal},
		"alone, told so":           {map[string]string{"RATE_LIMIT_BACKEND": "local"}, ratelimit.BackendLocal, ratelimit.BackendLocal},
		"in a cluster":             {cluster, ratelimit.BackendOwner, ratelimit.BackendCluster},
		"each for itself":          {with(cluster, "RATE_LIMIT_BACKEND", "local"), ratelimit.BackendOwner, ratelimit.BackendLocal},
		"all at Redis":             {with(with(cluster, "RATE_LIMIT_BACKEND", "redis"), "RATE_LIMIT_REDIS_URL", "redis://cache"), ratelimit.BackendRedis, ratelimit.BackendRedis},
		"alone at Redis":           {map[string]string{"RATE_LIMIT_BACKEND": "redis", "RATE_LIMIT_REDIS_URL": "redis://cache"}, ratelimit.BackendRedis, ratelimit.BackendRedis},
		"all by owners":            {with(cluster, "RATE_LIMIT_BACKEND", "owner"), ratelimit.BackendOwner, ratelimit.BackendOwner},
		"a bucket with its choice": {with(cluster, "RATE_LIMITS", `{"login_ip":{"backend":"local"},"inbound":{"limit":5,"scale_ms":1000,"backend":"owner"}}`), ratelimit.BackendLocal, ratelimit.BackendOwner},
	} {
		c, err := loadWith(tt.env)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if login, inbound := c.Backend(ratelimit.LoginIP), c.Backend(ratelimit.Inbound); login != tt.login || inbound != tt.inbound {
			t.Errorf("%s: login_ip by %s, inbound by %s, want %s and %s", name, login, inbound, tt.login, tt.inbound)
		}
	}
}

func with(env map[string]string, name, value string) map[string]string {
	env = maps.Clone(env)
	env[name] = value
	return env
}

// What browsers send as the origin of a page is compared byte by byte: it is kept as they write it, and what none of them can
// send is refused.
func TestOriginsAsBrowsersWriteThem(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{ // "" for a refusal
		"https://app.example.com": "https://app.example.com", "https://app.example.com/": "https://app.example.com", "https://App.Example.com": "https://app.example.com",
		"HTTPS://app.example.com": "https://app.example.com", "https://app.example.com:443": "https://app.example.com", "https://app.example.com:443/": "https://app.example.com",
		"http://app.example.com:80": "http://app.example.com", "http://app.example.com:443": "http://app.example.com:443", "https://app.example.com:": "https://app.example.com",
		"http://[2001:DB8::1]:80": "http://[2001:db8::1]", "http://[2001:db8::443]": "http://[2001:db8::443]", "capacitor://localhost": "capacitor://localhost", "*": "*",
		"https://*.example.com": "", "https://münchen.example": "", "https://app.example.com/x": "", "https://app.example.com?": "", "https://app.example.com/#": "",
		"https://a@app.example.com": "", "app.example.com": "", "//app.example.com": "", "https://": "", "https://:443": "", "null": "",
	} {
		c, err := LoadConfig(func(name string) string {
			return serveEnv("postgres://localhost/x", map[string]string{"UPLOAD_DIR": t.TempDir(), "CORS_ORIGINS": text})[name]
		})
		if (err == nil) != (want != "") || err == nil && !slices.Equal(c.CORSOrigins, []string{want}) {
			t.Errorf("the origin %q is kept as %q, %v; want %q", text, c.CORSOrigins, err, want)
		}
		if !strings.HasPrefix(want, "http") {
			continue
		}
		// Forms are taken by the origin of the hub's own address.
		if address, err := parsePublicURL(text); err != nil || address != want {
			t.Errorf("the address %q is kept as %q, %v", text, address, err)
		}
	}
}
