package internal_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The fuzzing script runs every target of every package, whatever packages without one stand before or behind it, and a
// package that doesn't compile, a target that fails and the absence of all targets are failures. The go command is
// played. Not parallel: a program that is written while another test forks may be busy when it is to run.
func TestFuzzScript(t *testing.T) {
	const played = `#!/bin/bash
pkg=${!#}
case "$1 $2" in
"list ./...") for p in $PACKAGES; do echo "${p%%:*}"; done ;;
"test -list")
	[ "$pkg" != "$BROKEN" ] || { echo "does not compile" >&2; exit 1; }
	for p in $PACKAGES; do
		if [ "${p%%:*}" = "$pkg" ]; then tr ':' '\n' <<<"$p" | tail -n +2; fi
	done
	echo "ok  $pkg" ;;
"test -run") [ "$6 $7" = "-fuzztime 1x" ] || exit 9; t=${5#^}; echo "$pkg ${t%\$}" >>"$RAN"; [ "${t%\$}" != "$FAILS" ] ;;
*) exit 9 ;;
esac
`
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte(played), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	for name, test := range map[string]struct {
		packages string // each with its targets behind colons
		broken   string // does not compile
		fails    string // the target that finds something
		ran      string
		ok       bool
	}{
		"targets between packages without": {packages: "a b:FuzzOne:FuzzTwo c d:FuzzOne e", ran: "b FuzzOne, b FuzzTwo, d FuzzOne", ok: true},
		"no package without":               {packages: "b:FuzzOne", ran: "b FuzzOne", ok: true},
		"no target at all":                 {packages: "a c"},
		"a package that doesn't compile":   {packages: "a b:FuzzOne c d:FuzzTwo", broken: "c", ran: "b FuzzOne"},
		"a target that fails":              {packages: "a b:FuzzOne d:FuzzTwo", fails: "FuzzOne", ran: "b FuzzOne"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ran := filepath.Join(t.TempDir(), "ran")
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			cmd := exec.CommandContext(ctx, "../scripts/fuzz", "1x")
			cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "PACKAGES="+test.packages, "BROKEN="+test.broken, "FAILS="+test.fails, "RAN="+ran)
			out, err := cmd.CombinedOutput()
			if (err == nil) != test.ok {
				t.Errorf("%v, want success: %v\n%s", err, test.ok, out)
			}
			got, _ := os.ReadFile(ran) // not there if none ran
			if lines := strings.Join(strings.Split(strings.TrimSpace(string(got)), "\n"), ", "); lines != test.ran {
				t.Errorf("ran %q, want %q\n%s", lines, test.ran, out)
			}
		})
	}
}
