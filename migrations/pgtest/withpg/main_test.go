package main

import (
	"bytes"
	"os"
	"strings"
	"testing"

	"converger/migrations/pgtest"
)

func TestRun(t *testing.T) {
	none := func(string) string { return "" }
	given := func(string) string { return "a server of the caller's" }
	const show = "echo [$" + pgtest.EnvURL + "]; exit 7"
	for _, c := range []struct {
		name   string
		args   []string
		getenv func(string) string
		code   int
		out    string
	}{
		{"a private server and the command's status", []string{"--", "sh", "-c", show}, none, 7, "[postgres://converger:"},
		{"a server given", []string{"sh", "-c", show}, given, 7, "[" + os.Getenv(pgtest.EnvURL) + "]"},
		{"no command", []string{"--"}, none, 2, ""},
		{"a command that is not there", []string{"/no/such/command"}, given, 1, ""},
		{"a command that is killed", []string{"sh", "-c", "kill -9 $$"}, given, 1, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			code, err := run(t.Context(), c.args, c.getenv, strings.NewReader(""), &out, os.Stderr)
			if code != c.code {
				t.Errorf("status %d, want %d (%v)", code, c.code, err)
			}
			if !strings.Contains(out.String(), c.out) {
				t.Errorf("output %q", out.String())
			}
		})
	}
}
