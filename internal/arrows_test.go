// Package internal_test keeps the arrows between the packages: who may import whom, and who alone may use a third party.
// golangci-lint keeps the same rules while one types; this test gives each its reason.
package internal_test

import (
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "converger/"

// mayImport lists what a package may import of ours. A path ending in /... speaks for the folder and all below it. A
// package that is not listed here fails the test: new packages get their line, and their reason, with them.
var mayImport = []struct {
	pkg     string
	imports []string
	why     string
}{
	{"cmd/server", []string{"..."}, "the program wires everything"},
	{"internal", nil, "this test"},
	{"internal/http/openapi", nil, "a leaf: what it must know of routes is given to it"},
	{"internal/http", []string{"internal/http/openapi", "internal/tenants", "internal/auth", "internal/channel/...", "internal/activity/...", "internal/inbound", "internal/delivery", "internal/ratelimit", "internal/ratelimit/overview", "internal/connlimit", "internal/fault", "internal/secrets", "internal/postgres"},
		"routes call the domain; pages come as an fs.FS, so not from web"},
	{"internal/jobs", []string{"internal/tenants", "internal/auth", "internal/channel", "internal/activity", "internal/inbound", "internal/delivery", "internal/ratelimit", "internal/postgres"},
		"adapters between River and the domain"},
	{"internal/inbound", []string{"internal/channel", "internal/channel/payload", "internal/activity", "internal/delivery", "internal/tenants", "internal/fault", "internal/secrets", "internal/postgres"}, "turns events into activities and receipts"},
	{"internal/delivery", []string{"internal/channel", "internal/activity", "internal/tenants", "internal/ratelimit", "internal/fault", "internal/secrets", "internal/postgres"}, "sends activities through channels, paced"},
	{"internal/activity", []string{"internal/channel", "internal/tenants", "internal/fault", "internal/secrets", "internal/postgres"}, "the write path knows channels and tenants, not who delivers"},
	{"internal/activity/upload", nil, "a leaf: bytes know neither rows nor routes, so that another storage is one more type"},
	{"internal/channel/...", []string{"internal/channel/...", "internal/tenants", "internal/signature", "internal/fault", "internal/secrets", "internal/postgres"}, "provider adapters know neither activities nor deliveries"},
	{"internal/auth", []string{"internal/tenants", "internal/ratelimit", "internal/fault", "internal/secrets", "internal/postgres"},
		"who is calling is decided from the directory; a sign-in is throttled, and what it is refused by is a decision of the limiter"},
	{"internal/tenants", []string{"internal/fault", "internal/secrets", "internal/postgres"}, "a leaf: everybody knows tenants"},
	{"internal/ratelimit", nil, "a leaf: the limiter must be usable ahead of everything"},
	{"internal/ratelimit/...", []string{"internal/ratelimit/..."}, "a backend knows the rules and nothing else"},
	{"internal/ratelimit/cluster", []string{"internal/ratelimit/...", "internal/cluster"}, "counts travel over the node's connections to its peers"},
	{"internal/ratelimit/owner", []string{"internal/ratelimit/...", "internal/cluster"}, "checks travel over the node's connections to its peers"},
	{"internal/ratelimit/redis", []string{"internal/ratelimit"}, "who else lives is told to it as a number"},
	{"internal/ratelimit/redis/redistest", nil, "servers for tests"},
	{"internal/connlimit", []string{"internal/ratelimit"}, "what counts as one address is decided there; of requests it knows nothing"},
	{"internal/ratelimit/proofs", []string{"internal/ratelimit", "internal/cluster"}, "who has signed lately travels over the node's connections to its peers"},
	{"internal/ratelimit/overview", []string{"internal/ratelimit", "internal/cluster"}, "what operators see is gathered from the node's peers"},
	{"internal/cluster", nil, "a leaf: it carries bytes, and knows neither limits nor requests"},
	{"internal/cluster/clustertest", nil, "what lies between nodes, for tests"},
	{"internal/fault", nil, "a leaf"},
	{"internal/secrets", nil, "a leaf"},
	{"internal/secrets/rotate", []string{"internal/secrets", "internal/postgres"}, "it learns the columns from their owners, and knows no table"},
	{"internal/signature", nil, "a leaf"},
	{"internal/postgres", nil, "a leaf"},
	{"internal/devpg", nil, "the private Postgres knows no schema"},
	{"internal/simulate", []string{"internal/signature"}, "simulators speak HTTP, as strangers do"},
	{"internal/loadtest/...", []string{"internal/devpg", "internal/postgres", "internal/jobs", "migrations", "internal/loadtest/..."}, "load drivers speak HTTP; pathbench measures beside Postgres and River"},
	{"internal/loadtest/messages", []string{"internal/loadtest/...", "internal/signature", "internal/simulate"}, "it signs webhooks as providers do, and stays on this machine by the simulators' guard; the hub it knows by HTTP only"},
	{"internal/loadtest/accuracy", []string{"internal/loadtest/...", "internal/devpg", "internal/postgres", "migrations", "internal/cluster", "internal/ratelimit", "internal/ratelimit/cluster"},
		"it is a cluster in one process, to measure how exactly its nodes keep a limit"},
	{"internal/loadtest/limits", []string{"internal/loadtest/...", "internal/simulate"}, "it stays on this machine by the simulators' guard; the cluster it knows by HTTP only"},
	{"migrations", []string{"internal/postgres"}, "SQL and its runner"},
	{"migrations/pgtest/...", []string{"migrations/...", "internal/devpg", "internal/postgres"}, "databases for tests"},
	{"web", nil, "templates and static files"},
}

// owners lists the third parties that one package alone may use.
var owners = []struct {
	module string
	pkgs   []string
	why    string
}{
	{"github.com/go-chi/chi", []string{"internal/http"}, "routes live in one place"},
	{"github.com/riverqueue/river", []string{"internal/jobs", "migrations", "internal/loadtest/..."}, "the queue can be replaced in one package"},
	{"github.com/golang-migrate/migrate", []string{"migrations"}, "one runner"},
	{"github.com/alecthomas/kong", []string{"cmd/server"}, "the command line is the program's"},
	{"github.com/hashicorp/memberlist", []string{"internal/cluster"}, "gossip can be replaced in one package"},
	{"github.com/redis/go-redis", []string{"internal/ratelimit/redis"}, "nothing but limits may come to depend on a Redis"},
	{"google.golang.org/grpc", []string{"internal/cluster"}, "so can the connections between nodes"},
	{"github.com/golang-jwt/jwt", []string{"internal/auth"}, "one place decides how a token is checked"},
	{"go.yaml.in/yaml", []string{"internal/http/openapi"}, "only people's descriptions are YAML; data is JSON"},
	{"golang.org/x/crypto/bcrypt", []string{"internal/auth"}, "one place bounds how many passwords are hashed at once"},
}

type listed struct {
	ImportPath string
	Imports    []string
}

func list(t *testing.T) []listed {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", "list", "-json=ImportPath,Imports", module+"...")
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	var pkgs []listed
	for dec := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p listed
		switch err := dec.Decode(&p); {
		case errors.Is(err, io.EOF):
			return pkgs
		case err != nil:
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// covers tells whether pattern, a path or a path ending in /..., speaks for pkg.
func covers(pattern, pkg string) bool {
	if pattern == "..." {
		return true
	}
	if below, ok := strings.CutSuffix(pattern, "/..."); ok {
		return pkg == below || strings.HasPrefix(pkg, below+"/")
	}
	return pkg == pattern
}

func TestArrows(t *testing.T) {
	t.Parallel()
	pkgs := list(t)
	used := map[string]bool{}
	for _, p := range pkgs {
		name := strings.TrimPrefix(p.ImportPath, module)
		// The most exact line decides.
		at := -1
		for i, rule := range mayImport {
			if covers(rule.pkg, name) && (at < 0 || len(rule.pkg) > len(mayImport[at].pkg) && !strings.HasSuffix(rule.pkg, "/...") || rule.pkg == name) {
				at = i
			}
		}
		if at < 0 {
			t.Errorf("%s has no line in mayImport: say what it may import, and why", name)
			continue
		}
		rule := mayImport[at]
		used[rule.pkg] = true
		for _, imp := range p.Imports {
			ours, ok := strings.CutPrefix(imp, module)
			if !ok {
				continue
			}
			if !slices.ContainsFunc(rule.imports, func(pattern string) bool { return covers(pattern, ours) }) {
				t.Errorf("%s imports %s, which it may not: %s", name, ours, rule.why)
			}
		}
	}
	for _, rule := range mayImport {
		if !used[rule.pkg] {
			t.Errorf("the rule for %s speaks for no package any more: remove it", rule.pkg)
		}
	}
}

func TestThirdPartyOwners(t *testing.T) {
	t.Parallel()
	pkgs := list(t)
	for _, owner := range owners {
		used := false
		for _, p := range pkgs {
			name := strings.TrimPrefix(p.ImportPath, module)
			if !slices.ContainsFunc(p.Imports, func(imp string) bool { return imp == owner.module || strings.HasPrefix(imp, owner.module+"/") }) {
				continue
			}
			used = true
			if !slices.ContainsFunc(owner.pkgs, func(pattern string) bool { return covers(pattern, name) }) {
				t.Errorf("%s imports %s, which belongs to %v: %s", name, owner.module, owner.pkgs, owner.why)
			}
		}
		if !used {
			t.Errorf("nobody imports %s any more: remove its rule", owner.module)
		}
	}
}
