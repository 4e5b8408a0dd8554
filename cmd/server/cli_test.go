package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alecthomas/kong"
)

// Every command explains itself and each of its flags.
func TestHelp(t *testing.T) {
	t.Parallel()
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	nodes := 0
	var visit func(n *kong.Node, path []string)
	visit = func(n *kong.Node, path []string) {
		nodes++
		help := runOK(t, nil, append(path, "--help")...)
		if n.Help != "" && !strings.Contains(squeeze(help), squeeze(n.Help)) {
			t.Errorf("%v --help does not say %q:\n%s", path, n.Help, help)
		}
		for _, f := range n.Flags {
			if !f.Hidden && !strings.Contains(help, "--"+f.Name) && !strings.Contains(help, "--[no-]"+f.Name) {
				t.Errorf("%v --help does not mention --%s:\n%s", path, f.Name, help)
			}
			if slices.Contains(f.EnumSlice(), "") && f.Enum != "" {
				t.Errorf("%v --%s offers nothing as a choice: %q", path, f.Name, f.Enum)
			}
			if f.Help == "" {
				t.Errorf("%v: --%s is not explained", path, f.Name)
			}
		}
		for _, child := range n.Children {
			if child.Help == "" {
				t.Errorf("%v %s is not explained", path, child.Name)
			}
			if !strings.Contains(help, child.Name) {
				t.Errorf("%v --help does not mention %s:\n%s", path, child.Name, help)
			}
			visit(child, append(path[:len(path):len(path)], child.Name))
		}
	}
	visit(parser.Model.Node, nil)
	if nodes < 15 {
		t.Errorf("visited %d commands only", nodes)
	}
	if bare := runOK(t, nil); bare != runOK(t, nil, "--help") {
		t.Errorf("no arguments at all is no help:\n%s", bare)
	}
}

// Examples can be pasted: each stands on a line of its own and is understood.
func TestExamplesOfHelp(t *testing.T) {
	t.Parallel()
	parser, err := kong.New(&cli{}, kong.Name("server"), kong.Bind(&env{}))
	if err != nil {
		t.Fatal(err)
	}
	tried := 0
	for _, leaf := range parser.Model.Leaves(true) {
		help := runOK(t, nil, append(strings.Fields(leaf.FullPath())[1:], "--help")...)
		for line := range strings.Lines(leaf.Detail) {
			_, command, found := strings.Cut(strings.TrimRight(line, "\n"), "server ")
			if !found {
				continue
			}
			if !strings.Contains(help, line[:len(line)-1]) {
				t.Errorf("%s --help breaks the example\n%s", leaf.FullPath(), line)
			}
			words, err := exec.CommandContext(t.Context(), "sh", "-c", `printf '%s\n' `+strings.TrimSuffix(command, ")")).Output()
			if err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			if _, err := parser.Parse(strings.Split(strings.TrimSuffix(string(words), "\n"), "\n")); err != nil {
				t.Errorf("%s: %v", line, err)
			}
			tried++
		}
	}
	if tried < 15 {
		t.Errorf("found %d examples only", tried)
	}
}

// squeeze undoes line breaks.
func squeeze(s string) string { return strings.Join(strings.Fields(s), " ") }

func TestUsageErrors(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{
		{"frobnicate"}, {"dev", "--no-such-flag"}, {"migrate"}, {"serve", "extra"}, {"operator", "create"}, {"operator", "revoke", "not-a-uuid"},
		{"tenant", "create"}, {"channels", "pause", "app"}, {"channels", "create", "acme", "webhook", "app", "--config", "{}", "--config-file", "x"}, {"keys", "revoke", "acme", "not-a-uuid"}, {"ranges", "add", "allow", "10.0.0.0/8"}, {"audit", "--limit", "many"},
		{"inbound", "list", "--state", "lost"}, {"inbound", "replay"}, {"simulate", "whatsapp", "--messages", "many"}, {"simulate", "webhook", "--scheme", "rot13"},
	} {
		p := start(t, nil, args...)
		if err := p.result(t); !errors.Is(err, errUsage) {
			t.Errorf("server %v: %v, want a usage error", args, err)
		}
		if !strings.Contains(p.log.String(), "server: ") || !strings.Contains(p.log.String(), "Try: server ") || p.out.String() != "" {
			t.Errorf("server %v says %q, and %q on standard output", args, p.log, p.out)
		}
	}
}

// exampleID is an id of nothing.
const exampleID = "01a22bed-4fce-7919-9f38-f5f2e99b7618"

// exampleOf is text that kong reads into a value.
func exampleOf(v *kong.Value) string {
	typ := v.Target.Type()
	for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
		typ = typ.Elem()
	}
	switch {
	case typ == reflect.TypeFor[idArg]():
		return exampleID
	case typ == reflect.TypeFor[time.Duration]():
		return "1h"
	case v.Name == "email":
		return "ada@example.com"
	case v.Enum != "":
		return v.EnumSlice()[0]
	case typ.Kind() == reflect.String:
		return "x"
	}
	return "1"
}

// lineOf is a line for a command whose arguments can be read, all but the one that is wrong: an argument, or a flag.
func lineOf(leaf *kong.Node, wrong *kong.Value, text string) []string {
	line := strings.Fields(leaf.FullPath())[1:]
	for _, p := range leaf.Positional {
		if p == wrong {
			line = append(line, text)
		} else {
			line = append(line, exampleOf(p))
		}
	}
	if wrong != nil && wrong.Flag != nil {
		line = append(line, "--"+wrong.Name, text)
	}
	return line
}

// A command that changes something says so when it is told nothing to change, and one that lacks something names it.
func TestCommandsSayWhatIsMissing(t *testing.T) {
	t.Parallel()
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	updates := 0
	for _, leaf := range parser.Model.Leaves(true) {
		line := lineOf(leaf, nil, "")
		if leaf.Name == "update" {
			updates++
			if strings.HasPrefix(leaf.FullPath(), "server users") {
				line = append(line, "--admins")
			}
			if err := start(t, nil, line...).result(t); err == nil || exitCode(err) != exitUsage || !strings.Contains(err.Error(), "what is to be changed?") {
				t.Errorf("server %q without a change: %v", line, err)
			}
		}
		for _, arg := range leaf.Positional[:min(1, len(leaf.Positional))] {
			if !arg.Required {
				continue
			}
			p := start(t, nil, strings.Fields(leaf.FullPath())[1:]...)
			if err := p.result(t); !errors.Is(err, errUsage) || !strings.HasPrefix(p.log.String(), "server: missing <"+arg.Name+">") {
				t.Errorf("%s without %s: %v\n%s", leaf.FullPath(), arg.Name, err, p.log)
			}
		}
		for _, flag := range leaf.Flags {
			typ := flag.Target.Type()
			if typ.Kind() == reflect.Pointer {
				typ = typ.Elem()
			}
			if typ == reflect.TypeFor[time.Duration]() {
				p := start(t, nil, append(slices.Clone(line), "--"+flag.Name, "30d")...)
				if err := p.result(t); !errors.Is(err, errUsage) || !strings.HasPrefix(p.log.String(), "server: --"+flag.Name+`: must be a time such as 90s, 15m or 24h, not "30d"`) {
					t.Errorf("%s --%s 30d: %v\n%s", leaf.FullPath(), flag.Name, err, p.log)
				}
			}
		}
	}
	if updates < 5 {
		t.Errorf("found %d commands that update", updates)
	}
}

// What has to be an id is read alike by every command, and what is none is said before anybody is asked.
func TestIDsOfCommands(t *testing.T) {
	t.Parallel()
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	notOurs := map[string]bool{"external-id": true, "phone-number-id": true, "actor": true, "resource": true}
	named := regexp.MustCompile(`^(Channel id|Ids? of [^,]*$|Ids? of [^,]*,)`)
	tried := 0
	for _, leaf := range parser.Model.Leaves(true) {
		values := slices.Clone(leaf.Positional)
		for _, flag := range leaf.Flags {
			values = append(values, flag.Value)
		}
		for _, v := range values {
			typ := v.Target.Type()
			for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
				typ = typ.Elem()
			}
			if typ != reflect.TypeFor[idArg]() {
				if id := v.Flag != nil && v.Flag.PlaceHolder == "ID" && !notOurs[v.Name]; id || named.MatchString(v.Help) && !strings.Contains(v.Help, " or ") {
					t.Errorf("%s: %s is an id and not read as one", leaf.FullPath(), v.ShortSummary())
				}
				continue
			}
			tried++
			line := lineOf(leaf, v, "x")
			p := start(t, nil, line...)
			want := fmt.Sprintf("server: %s: must be an id such as "+exampleID+", not \"x\"\nTry: %s --help\n", v.ShortSummary(), leaf.FullPath())
			if err := p.result(t); !errors.Is(err, errUsage) || p.log.String() != want {
				t.Errorf("server %q: %v\n%s\nwant %s", line, err, p.log, want)
			}
		}
	}
	for _, text := range []string{"", "01a22bed", "01a22bed4fce79199f38f5f2e99b7618", "urn:uuid:" + exampleID, "{" + exampleID + "}", exampleID[:35] + "g", exampleID + " "} {
		if err := new(idArg).UnmarshalText([]byte(text)); err == nil || !strings.Contains(err.Error(), fmt.Sprintf(", not %q", text)) || isID(text) {
			t.Errorf("%q is read as an id: %v", text, err)
		}
	}
	if tried < 20 {
		t.Errorf("tried %d ids only", tried)
	}
}

// The exit code tells scripts what happened: 0 done, 1 failed, 2 not understood.
func TestExitCodes(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		want int
		args []string
	}{
		{0, []string{"version"}}, {1, []string{"migrate", "status"}}, {2, []string{"frobnicate"}},
		{2, []string{"limits", "set", "acme", "upload", "200"}}, {2, []string{"deliveries", "replay", "acme"}}, {2, []string{"users", "list"}},
	} {
		args, want := test.args, test.want
		p := spawn(t, nil, args...)
		err := p.result(t)
		got := 0
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			got = exit.ExitCode()
		} else if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("server %v exits with %d, want %d\n%s%s", args, got, want, p.out, p.log)
		}
	}
}

// A command that can't reach the database says that, and nothing of a success or of what it has not looked at.
func TestCommandsWithoutTheirDatabase(t *testing.T) {
	t.Parallel()
	environ := serveEnv("postgres://127.0.0.1:1/none", nil)
	tried := 0
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	for _, leaf := range parser.Model.Leaves(true) {
		if !slices.ContainsFunc(leaf.Flags, func(f *kong.Flag) bool { return f.Name == "database-url" }) || leaf.Name == "dev" {
			continue
		}
		tried++
		line := lineOf(leaf, nil, "")
		p := start(t, environ, line...)
		if err := p.result(t); err == nil || !strings.Contains(err.Error(), "connection refused") || strings.Contains(err.Error(), "shows all") || strings.Contains(p.out.String(), "Nothing") || strings.Contains(p.out.String(), "sealed") {
			t.Errorf("server %q: %v\n%s", line, err, p.out)
		}
	}
	if tried < 10 {
		t.Errorf("tried %d commands only", tried)
	}
}

// Who gets an argument wrong is pointed to the help of that very command.
func TestUsageErrorsPointToTheCommand(t *testing.T) {
	t.Parallel()
	for want, args := range map[string][]string{
		"Try: server --help":                 {"frobnicate"},
		"Try: server tenant --help":          {"tenant", "frobnicate"},
		"Try: server deliveries list --help": {"deliveries", "list"},
	} {
		p := start(t, nil, args...)
		if err := p.result(t); !errors.Is(err, errUsage) || !strings.HasSuffix(p.log.String(), "\n"+want+"\n") {
			t.Errorf("server %v: %v, %q, want %q", args, err, p.log, want)
		}
	}
}

func TestVersion(t *testing.T) {
	t.Parallel()
	if out := runOK(t, nil, "version"); out != "converger "+version+"\n" {
		t.Errorf("version: %q", out)
	}
}

// Commands that need something say what, instead of failing somewhere inside.
func TestCommandsSayWhatTheyNeed(t *testing.T) {
	t.Parallel()
	empty := t.TempDir()
	token := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(token, []byte("cvg_op_x\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	twice := filepath.Join(t.TempDir(), "twice")
	if err := os.WriteFile(twice, []byte("cvg_op_x\ncvg_op_y\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		args []string
		want string
	}{
		{[]string{"migrate", "up"}, "DATABASE_URL"},
		{[]string{"operator", "list"}, "DATABASE_URL"},
		{[]string{"inbound", "list", "--dir", empty}, "--server"},
		{[]string{"tenant", "list", "--dir", empty, "--server", "http://127.0.0.1:9"}, "CONVERGER_TOKEN"},
		{[]string{"tenant", "list", "--dir", empty, "--server", "127.0.0.1:9", "--token-file", token}, "must begin with"},
		{[]string{"tenant", "list", "--dir", empty, "--server", "http://127.0.0.1:9", "--token-file", empty + "/none"}, "no such file"},
		{[]string{"limits", "set", "acme", "upload", "200", "--dir", empty}, "such as 200/1s"},
		{[]string{"tenant", "list", "--dir", empty, "--server", "http://127.0.0.1:9", "--token-file", twice}, "is not one line"},
		{[]string{"dev", "--dir", empty, "--addr", "127.0.0.1:99999"}, "invalid port\n--addr takes an address of this machine"},
		{[]string{"simulate", "whatsapp", "--dir", empty}, "which hub"},
		{[]string{"simulate", "webhook", "--dir", empty, "--base-url", "http://127.0.0.1:9"}, "which channel"},
		{[]string{"simulate", "webhook", "--dir", empty, "--base-url", "http://127.0.0.1:9", "--channel", exampleID}, "which secret"},
		{[]string{"simulate", "webhook", "--dir", empty, "--base-url", "http://192.0.2.1", "--channel", exampleID, "--secret", "s"}, "loopback"},
		{[]string{"simulate", "receiver", "--dir", empty, "--addr", "192.0.2.1:0"}, "loopback"},
		{[]string{"inbound", "list", "--dir", empty, "--base-url", "http://127.0.0.1:9", "--token-file", token}, "Is the hub running"},
	} {
		p := start(t, nil, test.args...)
		if err := p.result(t); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("server %v: %v, want it to say %q", test.args, err, test.want)
		}
	}
}
