package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/alecthomas/kong"
	"github.com/google/uuid"

	"converger/migrations/pgtest"
)

// Flags win over the environment, the environment over the demo; the demo's token goes to the demo only.
func TestWhichHubAndToken(t *testing.T) {
	t.Parallel()
	var got string
	newHub := func(name string) string {
		hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			got = name + " " + strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer ")
			_, _ = w.Write([]byte(`{"data":[],"meta":{"has_more":false}}`))
		}))
		t.Cleanup(hub.Close)
		return hub.URL
	}
	one, two := newHub("one"), newHub("two")
	dir, none := t.TempDir(), t.TempDir()
	if err := writeJSON(filepath.Join(dir, demoFile), demo{BaseURL: one, ManagementToken: "of-demo"}); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "token")
	if err := os.WriteFile(file, []byte("of-file\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		want    string // "" for a refusal before anybody is asked
		environ map[string]string
		flags   []string
	}{
		{"one of-demo", nil, []string{"--dir", dir}},
		{"one of-demo", nil, []string{"--dir", dir, "--server", one + "/"}},
		{"", nil, []string{"--dir", dir, "--server", two}},
		{"", map[string]string{"CONVERGER_URL": two}, []string{"--dir", dir}},
		{"two of-environment", map[string]string{"CONVERGER_URL": two, "CONVERGER_TOKEN": "of-environment"}, []string{"--dir", dir}},
		{"one of-environment", map[string]string{"CONVERGER_URL": two, "CONVERGER_TOKEN": "of-environment"}, []string{"--dir", none, "--server", one}},
		{"two of-file", map[string]string{"CONVERGER_URL": two, "CONVERGER_TOKEN_FILE": file}, []string{"--dir", none}},
		{"two of-environment", map[string]string{"CONVERGER_URL": two, "CONVERGER_TOKEN": "of-environment", "CONVERGER_TOKEN_FILE": file}, []string{"--dir", none}},
		{"two of-file", map[string]string{"CONVERGER_URL": two, "CONVERGER_TOKEN": "of-environment"}, []string{"--dir", none, "--token-file", file}},
	} {
		got = ""
		var out bytes.Buffer
		err := run(t.Context(), append([]string{"tenant", "list"}, test.flags...), func(name string) string { return test.environ[name] }, &out, &out)
		if got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("%v %v asks %q, want %q; %v %s", test.environ, test.flags, got, test.want, err, out.String())
		}
	}
}

// What a hub refuses is said in its words, with what to do next, and scripts can tell whether to try again.
func TestRefusalsOfTheHub(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		status int
		body   string
		code   int
		want   []string
	}{
		{409, `{"title":"Conflict","detail":"The name is taken.","code":"conflict","request_id":"req_1"}`, exitRefused,
			[]string{"Conflict: The name is taken.\nRead the current state, then decide", "(request req_1)"}},
		{422, `{"title":"Invalid fields","detail":"The request has an invalid field.","code":"validation_failed","errors":[{"pointer":"#/name","detail":"must not be empty"}]}`,
			exitRefused, []string{"an invalid field.\n  name: must not be empty"}},
		{422, `{"title":"Invalid fields","detail":"The request has invalid fields.","code":"validation_failed","errors":[{"pointer":"#","detail":"the user is inactive"},{"pointer":"#/types/1","detail":"\"text/html\" is none"}]}`,
			exitRefused, []string{"invalid fields.\n  the user is inactive\n  types/1: \"text/html\" is none"}},
		{422, `{"title":"Invalid fields","detail":"Not of this one.","code":"validation_failed","request_id":"req_2"}`, exitRefused, []string{"Not of this one.\n(request req_2)"}},
		{409, `{"title":"Confirmation required","detail":"It is yours. If you mean it, send \"force\": true.","code":"confirmation_required"}`, exitRefused, []string{"It is yours.\nIf you mean it, and there is another way in, pass --force."}},
		{422, `{"title":"Invalid fields","detail":"The request has an invalid field.","code":"validation_failed","errors":[{"pointer":"#/cidr","detail":"is everything; if you mean that, send \"force\": true"}]}`,
			exitRefused, []string{"\n  cidr: is everything; if you mean that, pass --force"}},
		{412, `{"title":"Changed meanwhile","detail":"Read it again.","code":"precondition_failed"}`, exitRefused, []string{"Read it again.\nShow it again", "the new ETAG"}},
		{429, `{"title":"Too many requests","detail":"come back in 1 s","code":"rate_limited"}`, exitUnavailable, []string{"come back in 1 s"}},
		{503, `{"title":"Unavailable","detail":"x","code":"unavailable"}`, exitUnavailable, nil},
		{502, `<html>Bad gateway`, exitUnavailable, []string{"502 Bad Gateway", "the right address"}},
		{404, `nothing`, exitRefused, []string{"404 Not Found"}},
		{400, `{"title":"Evil\u001b[2J","detail":"\u001b]0;x\u0007"}`, exitRefused, []string{"Evil\uFFFD[2J"}},
		{200, `<html>`, 1, []string{"does not answer as a hub does"}},
	} {
		hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(test.status)
			_, _ = w.Write([]byte(test.body))
		}))
		var out bytes.Buffer
		environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
		err := run(t.Context(), []string{"tenant", "create", "x", "--dir", t.TempDir()}, func(name string) string { return environ[name] }, &out, &out)
		hub.Close()
		if err == nil || exitCode(err) != test.code {
			t.Errorf("%d %s: %v, exit code %d, want %d", test.status, test.body, err, exitCode(err), test.code)
			continue
		}
		for _, want := range test.want {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("%d %s: %q does not say %q", test.status, test.body, err, want)
			}
		}
	}
	p := start(t, map[string]string{"CONVERGER_URL": "http://127.0.0.1:9", "CONVERGER_TOKEN": "t"}, "tenant", "list", "--dir", t.TempDir())
	if err := p.result(t); exitCode(err) != exitUnavailable || !strings.Contains(err.Error(), "Is the hub running") {
		t.Errorf("nobody there: %v", err)
	}
	if exitCode(errors.Join(errors.New("x"), &problem{status: 404})) != exitRefused || exitCode(errors.New("x")) != 1 {
		t.Error("exit codes of other errors")
	}
}

// What not every node has told or done is said to be a part, with the hub's words for what is missing, and scripts can tell.
func TestLimitsOfSomeNodes(t *testing.T) {
	t.Parallel()
	const gone = `{"node_id":"2","name":"b","error":"is dead or hangs (silent since 03:00:00 UTC)"}`
	const budget = `"bucket":"upload","subject":"t","tenant":"Acme","limited":true,"limit":10,"scale_ms":1000`
	for name, test := range map[string]struct {
		args           []string
		answer         string
		stdout, stderr []string
		err            string
	}{
		"top": {[]string{"top"}, `{"top_refused":{"upload":[["t",7]]},"subjects":{},"top_since":"2026-07-01T03:00:00Z","complete":false,"remarks":["The node b is dead."],"nodes":[{"error":null},` + gone + `]}`,
			[]string{"7        upload  t"}, []string{"The node b is dead.\n"}, "not every node has told what it saw"},
		"top of nothing": {[]string{"top"}, `{"complete":false,"top_refused":{},"top_since":"2026-07-01T03:00:00Z","remarks":[],"nodes":[` + gone + `]}`,
			[]string{"As far as the nodes tell, nothing has been refused since 2026-07-01T03:00:00Z."}, nil, "not every node has told what it saw"},
		"show a part": {[]string{"show", "upload", "t"}, `{` + budget + `,"used":3,"remaining":7,"complete":false,"detail":"The node b is dead.","nodes":[{"name":"a","error":null,"used":3,"remaining":7},` + gone + `]}`,
			[]string{"As far as the nodes tell, t (Acme) uses 3 of 10/1s in upload, and has 7 left.", "b     –"}, nil, "The node b is dead."},
		"show nothing": {[]string{"show", "upload", "t"}, `{` + budget + `,"used":null,"remaining":null,"complete":false,"detail":"How much is used is unknown while Redis can't be asked.","nodes":[{"name":"a","error":"does not know","used":null,"counted_here":2}]}`,
			[]string{"How much of 10/1s t (Acme) uses in upload is unknown.", "a     –     2              –"}, nil, "How much is used is unknown while Redis can't be asked."},
		"show a part in JSON": {[]string{"show", "upload", "t", "--json"}, `{` + budget + `,"used":3,"complete":false,"detail":"The node b is dead.","nodes":[` + gone + `]}`, []string{`"used": 3`}, nil, "The node b is dead."},
		"clear-usage": {[]string{"clear-usage", "upload", "t"}, `{"bucket":"upload","subject":"t","cleared":false,"detail":"Reset is what was counted on a. Not on b: it is dead.","nodes":[{"name":"a","error":null},` + gone + `]}`,
			nil, nil, "the counter of t in upload is not reset everywhere. Reset is what was counted on a. Not on b: it is dead."},
		"try": {[]string{"try", "01939d2c-0000-7000-8000-0000000000e0", "upload", "5/1s"}, `[{"bucket":"upload","demand":9,"missing":[` + gone + `]}]`,
			[]string{"upload  –      9"}, nil, "the demand is not that of all nodes: the node b is dead or hangs (silent since 03:00:00 UTC)"},
		"demand": {[]string{"demand", "upload"}, `{"bucket":"upload","subjects":[{"subject":"t","tenant":"Acme","total":9,"since":"2026-07-01T02:31:00Z","peak_per_second":4,"peak_at":"2026-07-01T02:44:01Z","last_minute_per_second":0.15,"sampled":1,"series":null}],
			"complete":false,"detail":"The node b is dead.","nodes":[{"error":null},` + gone + `]}`,
			[]string{"DEMAND  WHOM  TENANT  SINCE", "9       t     Acme    2026-07-01T02:31:00Z  4       2026-07-01T02:44:01Z  0.15   1\n"}, nil, "The node b is dead."},
		"demand of one": {[]string{"demand", "upload", "t"}, `{"bucket":"upload","subjects":[{"subject":"t","total":67,"series":{"start":"2026-07-01T02:57:00Z","per_second":[null` + strings.Repeat(",null", 59) +
			`,2` + strings.Repeat(",0", 59) + strings.Repeat(",null", 30) + strings.Repeat(",1", 30) + strings.Repeat(",7", 5) + `]}}],"complete":true,"detail":null,"nodes":[]}`,
			[]string{"    UTC  +0  +1  +2  +3  +4  +5  +6  +7  +8  +9\n  02:50                               –   2  30\n  03:00  35"}, nil, ""},
		"demand that is not known": {[]string{"demand", "upload"}, `{"bucket":"upload","subjects":[],"complete":false,"detail":"The node b is dead.","nodes":[` + gone + `]}`,
			[]string{"As far as the nodes tell, nothing is known of a demand in upload in the last hour.\n"}, nil, "The node b is dead."},
		"demand elsewhere": {[]string{"demand", "upload", "--json"}, `{"bucket":"upload","subjects":[],"complete":false,"detail":"One more node.","nodes":[{"error":null}]}`, []string{`"subjects": []`}, []string{"One more node.\n"}, ""},
		"nodes elsewhere": {[]string{"show", "upload", "t"}, `{` + budget + `,"used":3,"remaining":7,"complete":false,"detail":"One more node.","nodes":[{"name":"a","error":null,"used":3}]}`,
			[]string{"As far as the nodes tell, t (Acme) uses 3"}, []string{"One more node.\n"}, ""},
		"all of them": {[]string{"show", "upload", "t"}, `{` + budget + `,"used":3,"remaining":7,"complete":true,"detail":null,"nodes":[{"name":"a","error":null,"used":3}]}`,
			[]string{"t (Acme) uses 3 of 10/1s in upload, and has 7 left."}, nil, ""},
	} {
		hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte(`{"data":` + test.answer + `}`)) }))
		environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
		var out, errs bytes.Buffer
		err := run(t.Context(), append(append([]string{"limits"}, test.args...), "--dir", t.TempDir()), func(name string) string { return environ[name] }, &out, &errs)
		hub.Close()
		if test.err == "" && err != nil || test.err != "" && (err == nil || err.Error() != test.err || exitCode(err) != exitUnavailable) {
			t.Errorf("%s: %v, want %q", name, err, test.err)
		}
		for _, want := range test.stdout {
			if !strings.Contains(out.String(), want) {
				t.Errorf("%s: %q is not in\n%s", name, want, out.String())
			}
		}
		for _, want := range test.stderr {
			if !strings.Contains(errs.String(), want) {
				t.Errorf("%s: %q is not in\n%s", name, want, errs.String())
			}
		}
	}
}

// managementLines is a line for each command that asks a hub; names are ids, so that the first request is what is asked for.
func managementLines(t *testing.T) map[string][]string {
	t.Helper()
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	lines := map[string][]string{}
	for _, leaf := range parser.Model.Leaves(true) {
		top := leaf
		for top.Parent.Parent != nil {
			top = top.Parent
		}
		if top.Group == nil || top.Group.Key != "manage" {
			continue
		}
		name := strings.TrimPrefix(leaf.FullPath(), "server ")
		line := strings.Fields(name)
		for _, p := range leaf.Positional {
			switch {
			case p.Enum != "":
				line = append(line, p.EnumSlice()[0])
			case p.Name == "rate":
				line = append(line, "1/1s")
			default:
				line = append(line, "01a22bed-4fce-7919-9f38-f5f2e99b7618")
			}
		}
		flags := map[string]bool{}
		for _, f := range leaf.Flags {
			flags[f.Name] = true
		}
		switch {
		case flags["admins"]:
			line = append(line, "--admins")
		case flags["tenant"]:
			line = append(line, "--tenant", "01a22bed-4fce-7919-9f38-f5f2e99b7618")
		}
		if leaf.Name == "update" {
			line = append(line, map[bool]string{true: "--name", false: "--note"}[flags["name"]], "x")
		}
		lines[name] = line
	}
	if len(lines) < 50 {
		t.Fatalf("found %d commands only", len(lines))
	}
	return lines
}

// What answers in place of a hub is taken for no success, whichever command asks: a proxy that sends elsewhere, a page that wants a
// sign-in, an answer that was cut off. Nothing is sent to where a redirect points: not the token, and no other method than was asked for.
func TestAnswersOfOthers(t *testing.T) {
	t.Parallel()
	// Of what is deleted nothing is left to be shown, so any answer of a hub will do.
	removes := map[string]bool{"channels delete": true, "rules delete": true, "users delete": true, "users sign-out": true, "ranges remove": true}
	lines := managementLines(t)
	few := []string{"tenant create", "tenant list", "channels show", "channels delete"}
	for _, name := range slices.Concat(few, slices.Collect(maps.Keys(removes))) {
		if lines[name] == nil {
			t.Errorf("there is no command %s", name)
		}
	}
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("%s %s was sent where a redirect points", r.Method, r.URL)
		_, _ = w.Write([]byte(`{"data":{"id":"x"}}`))
	}))
	t.Cleanup(elsewhere.Close)
	redirect := func(status int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, elsewhere.URL+r.URL.String(), status)
		}
	}
	body := func(status int, text string) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(status)
			_, _ = w.Write([]byte(text))
		}
	}
	const notAHub = "does not answer as a hub does"
	toWhere := "points to " + elsewhere.URL + ";"
	for answer, test := range map[string]struct {
		hub  http.HandlerFunc
		want string
		code int
	}{ // the two of which commands might make something of nothing are tried with each, the others with a few
		"301": {redirect(301), toWhere, exitRefused}, "302": {redirect(302), toWhere, exitRefused}, "303": {redirect(303), toWhere, exitRefused},
		"307": {redirect(307), toWhere, exitRefused}, "308": {redirect(308), toWhere, exitRefused},
		"a redirect to nowhere":      {body(302, ""), "302 Found", exitRefused},
		"a page":                     {body(200, `<!doctype html><title>Sign in`), notAHub, 1},
		"nothing":                    {body(200, ""), notAHub, 1},
		"nothing, and it is made":    {body(201, ""), notAHub, 1},
		"not changed":                {body(304, ""), "304 Not Modified", exitRefused},
		"no content":                 {body(204, ""), notAHub, 1},
		"an answer of another":       {body(200, `{"status":"ok"}`), notAHub, 1},
		"a list of another":          {body(200, `[1]`), notAHub, 1},
		"null":                       {body(200, `null`), notAHub, 1},
		"no data":                    {body(200, `{"data":null}`), notAHub, 1},
		"an object of nothing":       {body(200, `{"data":{}}`), notAHub, 1},
		"data of another kind":       {body(200, `{"data":"x"}`), notAHub, 1},
		"JSON that ends":             {body(200, `{"data":{"id":"01a22bed`), notAHub, 1},
		"more, and no way to get it": {body(200, `{"data":[{"id":"x"}],"meta":{"has_more":true}}`), notAHub, 1},
		"a body that ends": {func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Length", "1000")
			body(200, `{"data":{"id":"x"}}`)(w, r)
		}, "Is the hub running", exitUnavailable},
	} {
		t.Run(answer, func(t *testing.T) {
			t.Parallel()
			hub := httptest.NewServer(test.hub)
			t.Cleanup(hub.Close)
			environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
			none := t.TempDir()
			ctx, cancel := context.WithTimeout(t.Context(), patience) // an endless list
			defer cancel()
			gone := slices.Contains([]string{"no content", "data of another kind", "more, and no way to get it"}, answer)
			for name, line := range lines {
				if answer != "no content" && answer != "an answer of another" && !slices.Contains(few, name) {
					continue
				}
				func() {
					defer func() {
						if p := recover(); p != nil {
							t.Errorf("server %s: panic: %v", name, p)
						}
					}()
					var out, log bytes.Buffer
					err := run(ctx, append(slices.Clone(line), "--dir", none), func(name string) string { return environ[name] }, &out, &log)
					switch {
					case gone && removes[name]:
						if err != nil {
							t.Errorf("server %s: %v", name, err)
						}
					case errors.Is(err, errUsage):
						t.Errorf("server %s: %s", line, log.String())
					case err == nil || out.Len() > 0:
						t.Errorf("server %s: %v, and it says %q", name, err, out.String())
					case !strings.Contains(err.Error(), test.want) && !strings.HasPrefix(err.Error(), "the hub's answer: ") || exitCode(err) != test.code:
						t.Errorf("server %s: exit code %d and %q, want %d and %q", name, exitCode(err), err, test.code, test.want)
					}
				}()
			}
		})
	}
}

// A secret that the answer does not hold is not printed as one.
func TestSecretsThatAreMissing(t *testing.T) {
	t.Parallel()
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = w.Write([]byte(`{"data":{"id":"x","name":"x","email":"x","api_key":"","secret":null}}`))
	}))
	t.Cleanup(hub.Close)
	environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
	lines := managementLines(t)
	for _, name := range []string{"keys create", "channels create", "channels rotate-secret", "tokens create", "users sign-in-link"} {
		p := start(t, environ, append(lines[name], "--dir", t.TempDir())...)
		if err := p.result(t); err == nil || !strings.Contains(err.Error(), "does not answer as a hub does") || p.out.String() != "" {
			t.Errorf("server %s: %v, and it prints %q", name, err, p.out)
		}
	}
}

// Whose deliveries are sent again is said twice, by the tenant and by the channel: both have to be the same.
func TestReplayOfAChannelOfAnotherTenant(t *testing.T) {
	t.Parallel()
	const acme, beta, channel = "01a22bec-ac96-7d00-b66c-85ff5215fb3a", "01a22bec-ac96-7d00-b66c-85ff5215fb3b", "01a22bed-4fce-7919-9f38-f5f2e99b7618"
	names := map[string]string{"Acme": acme, "Beta": beta}
	var retried atomic.Int32
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch path := strings.TrimPrefix(r.URL.Path, "/api/v1/management"); {
		case path == "/tenants":
			_, _ = fmt.Fprintf(w, `{"data":[{"id":%q}],"meta":{"has_more":false}}`, names[r.URL.Query().Get("name")])
		case path == "/channels/"+channel && r.Method == http.MethodGet:
			_, _ = fmt.Fprintf(w, `{"data":{"id":%q,"tenant_id":%q}}`, channel, acme)
		case path == "/channels/"+channel+"/deliveries/retry":
			retried.Add(1)
			_, _ = w.Write([]byte(`{"data":{"retried":3,"has_more":false}}`))
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(hub.Close)
	environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
	for tenant, mine := range map[string]bool{acme: true, "Acme": true, beta: false, "Beta": false} {
		before := retried.Load()
		p := start(t, environ, "deliveries", "replay", tenant, "--channel", channel, "--dir", t.TempDir())
		err := p.result(t)
		if sent := retried.Load() > before; sent != mine || (err == nil) != mine {
			t.Errorf("replay %s of a channel of Acme: sent again: %v, %v\n%s", tenant, sent, err, p.out)
		}
		if err != nil && !strings.Contains(err.Error(), "is of tenant "+acme) {
			t.Errorf("replay %s: %v", tenant, err)
		}
	}
}

// A range is found in whatever way it is written, by a question about it alone; what is none is said before anybody is asked.
func TestRangesAsTheyAreWritten(t *testing.T) {
	t.Parallel()
	ranges := map[string]string{"2001:db8::/32": "1", "203.0.113.0/24": "2", "203.0.113.7/32": "3", "2001:db8::7/128": "4", "2001:db8::/48": "5"}
	var asked atomic.Int32
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		if r.Method == http.MethodDelete {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		if path, one := strings.CutPrefix(r.URL.Path, "/api/v1/management/address_ranges/"); one {
			_, _ = fmt.Fprintf(w, `{"data":{"id":%q}}`, path)
			return
		}
		address, err := netip.ParseAddr(r.URL.Query().Get("address"))
		if err != nil {
			t.Errorf("all ranges are asked for: %s", r.URL)
		}
		var found []string
		for text, id := range ranges {
			if netip.MustParsePrefix(text).Contains(address.Unmap()) {
				found = append(found, fmt.Sprintf(`{"id":%q,"cidr":%q}`, id, text))
			}
		}
		_, _ = fmt.Fprintf(w, `{"data":[%s],"meta":{"has_more":false}}`, strings.Join(found, ","))
	}))
	t.Cleanup(hub.Close)
	environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
	for text, test := range map[string]struct{ id, problem string }{
		"2001:db8::/32": {id: "1"}, "2001:DB8::/32": {id: "1"}, "2001:db8:0::/32": {id: "1"}, "2001:0db8::/48": {id: "5"}, "2001:db8:0:0::7": {id: "4"},
		"203.0.113.0/24": {id: "2"}, "::ffff:203.0.113.0/120": {id: "2"}, "203.0.113.7": {id: "3"}, "203.0.113.7/32": {id: "3"}, "::ffff:203.0.113.7": {id: "3"},
		"203.0.113.9": {problem: "there is no range 203.0.113.9"}, "203.0.113.0/25": {problem: "there is no range 203.0.113.0/25"},
		"203.0.113.9/24": {problem: "did you mean 203.0.113.0/24"}, "office": {problem: "such as 203.0.113.0/24"}, "": {problem: "such as 203.0.113.0/24"},
	} {
		for _, command := range [][]string{{"show"}, {"update", "--note", "x"}, {"remove"}} {
			before := asked.Load()
			line := slices.Concat([]string{"ranges", command[0], "--dir", t.TempDir()}, command[1:], []string{"--", text})
			p := start(t, environ, line...)
			err := p.result(t)
			switch {
			case test.problem != "":
				if err == nil || !strings.Contains(err.Error(), test.problem) {
					t.Errorf("server %q: %v, want it to say %q", line, err, test.problem)
				}
				if misused := exitCode(err) == exitUsage; misused == (asked.Load() > before) {
					t.Errorf("server %q: exit code %d, and %d questions", line, exitCode(err), asked.Load()-before)
				}
			case err != nil || command[0] == "show" && !strings.Contains(p.out.String(), test.id):
				t.Errorf("server %q: %v\n%s, want the range %s", line, err, p.out, test.id)
			}
		}
	}
}

// Text from outside stays on its line and steers no terminal; long lists are read page by page.
func TestTables(t *testing.T) {
	t.Parallel()
	page := 0
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page++
		if page == 1 && r.URL.Query().Get("cursor") == "" {
			_, _ = w.Write([]byte(`{"data":[{"name":"a\u001b[31m\nb\tc","id":"1","max_in_flight":12345678901234567890,"limits":{"x":[1]},"inserted_at":"2026-11-30T07:42:20.501685Z"}],"meta":{"has_more":true,"next_cursor":"n"}}`))
			return
		}
		if r.URL.Query().Get("cursor") != "n" {
			t.Errorf("page %d: %s", page, r.URL)
		}
		_, _ = w.Write([]byte(`{"data":[{"name":"last","id":"2"}],"meta":{"has_more":true,"next_cursor":"m"}}`))
	}))
	t.Cleanup(hub.Close)
	environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
	p := start(t, environ, "tenant", "list", "--limit", "2", "--dir", t.TempDir())
	if err := p.result(t); err != nil {
		t.Fatal(err)
	}
	want := regexp.MustCompile(`^NAME +ID .*\na\x{FFFD}\[31m b c +1 +– +12345678901234567890 +\{"x":\[1\]\} +2026-11-30T07:42:20Z\nlast +2 +– +– +– +–\n$`)
	if out := p.out.String(); !want.MatchString(out) || !strings.Contains(p.log.String(), "There are more") {
		t.Errorf("table:\n%s%s", out, p.log)
	}
	page = 0
	var items []map[string]any
	if err := json.Unmarshal([]byte(runOK(t, environ, "tenant", "list", "--limit", "2", "--json", "--dir", t.TempDir())), &items); err != nil || len(items) != 2 {
		t.Errorf("as JSON: %v, %v", items, err)
	}
}

// A tag that is given goes with the change that it is for, whatever looks up the thing before; without one nothing is expected.
func TestGuardedChanges(t *testing.T) {
	t.Parallel()
	id := uuid.NewString()
	commands := map[string][]string{
		"tenant update": {id, "--name", "x"}, "tenant suspend": {id}, "tenant activate": {id}, "tenant upload-types set": {id, "image/png"}, "tenant upload-types reset": {"Acme"},
		"channels update": {id, "--name", "x"}, "channels rotate-secret": {id}, "channels delete": {id}, "rules update": {"Acme", id, "--no-enabled"}, "rules delete": {id, id},
		"limits set": {"Acme", "upload", "1/1s"}, "limits unset": {id, "upload"}, "users update": {"ada@example.com", "--admins", "--name", "x"},
		"users disable": {id, "--admins"}, "users enable": {id, "--tenant", "Acme"}, "users delete": {id, "--admins"},
		"ranges update": {"192.0.2.0/24", "--note", "x"}, "ranges remove": {id},
	}
	parser, err := kong.New(&cli{}, kong.Name("server"))
	if err != nil {
		t.Fatal(err)
	}
	for _, leaf := range parser.Model.Leaves(true) {
		name := strings.TrimPrefix(leaf.FullPath(), "server ")
		for _, f := range leaf.Flags {
			if _, known := commands[name]; f.Name == "if-match" && !known {
				t.Errorf("server %s takes --if-match and is not tried here", name)
			}
		}
	}
	for name, args := range commands {
		var changes []string
		hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet {
				changes = append(changes, strings.Join(r.Header.Values("If-Match"), "; "))
				_, _ = w.Write([]byte(`{"data":{"id":"x","secret":"x"}}`))
				return
			}
			if r.Header.Get("If-Match") != "" {
				t.Errorf("server %s looks something up with If-Match", name)
			}
			_, _ = w.Write([]byte(`{"data":[{"id":"` + id + `","cidr":"192.0.2.0/24"}],"meta":{}}`))
		}))
		environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
		args = slices.Concat(strings.Fields(name), args, []string{"--dir", t.TempDir()})
		for given, want := range map[string]string{"": "", "7.0123456789abcdef": `"7.0123456789abcdef"`, `"7.0"`: `"7.0"`} {
			changes = nil
			line := args
			if given != "" {
				line = append(slices.Clone(args), "--if-match", given)
			}
			runOK(t, environ, line...)
			if len(changes) != 1 || changes[0] != want {
				t.Errorf("server %s: changes with If-Match %q, want one with %q", strings.Join(line, " "), changes, want)
			}
		}
		hub.Close()
		p := start(t, environ, append(args, "--if-match", "")...)
		if err := p.result(t); !errors.Is(err, errUsage) || !strings.Contains(p.log.String(), "--if-match is empty") {
			t.Errorf("server %s with an empty tag: %v\n%s", name, err, p.log)
		}
	}
}

// Activities are paged by watermark, everything else by cursor.
func TestActivitiesFollowTheWatermark(t *testing.T) {
	t.Parallel()
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		page := `{"data":[{"seq":1,"text":"one"}],"meta":{"has_more":true,"watermark":"w1"}}`
		if q := r.URL.Query(); q.Has("cursor") {
			t.Errorf("asked for a cursor: %s", r.URL)
		} else if q.Get("watermark") == "w1" {
			page = `{"data":[{"seq":2,"text":"two"}],"meta":{"has_more":false,"watermark":"w2"}}`
		}
		_, _ = w.Write([]byte(page))
	}))
	t.Cleanup(hub.Close)
	environ := map[string]string{"CONVERGER_URL": hub.URL, "CONVERGER_TOKEN": "t"}
	out := runOK(t, environ, "conversations", "activities", uuid.NewString(), uuid.NewString(), "--limit", "0", "--dir", t.TempDir())
	if strings.Count(out, "one") != 1 || strings.Count(out, "two") != 1 {
		t.Errorf("activities:\n%s", out)
	}
}

// An operator does by the shell what the management API can, with a token that `operator create` made.
func TestManageByShell(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	p := serve(t, url, map[string]string{"BCRYPT_COST": "10"})
	token := strings.TrimSpace(runOK(t, nil, "operator", "create", "Ada", "--database-url", url))
	environ := map[string]string{"CONVERGER_URL": p.base, "CONVERGER_TOKEN": token}
	dir := t.TempDir()
	eventually(t, patience, "the token to be known", func() bool {
		probe := start(t, environ, "tenant", "list", "--dir", dir)
		return probe.result(t) == nil
	})
	says := func(want string, args ...string) string {
		t.Helper()
		out := runOK(t, environ, append(args, "--dir", dir)...)
		if !strings.Contains(out, want) {
			t.Errorf("server %s does not say %q:\n%s", strings.Join(args, " "), want, out)
		}
		return out
	}
	fails := func(want string, args ...string) {
		t.Helper()
		err := start(t, environ, append(args, "--dir", dir)...).result(t)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("server %s: %v, want it to say %q", strings.Join(args, " "), err, want)
		}
	}
	fromJSON := func(text string) (v map[string]any) {
		t.Helper()
		if err := json.Unmarshal([]byte(text), &v); err != nil {
			t.Fatalf("%v: %s", err, text)
		}
		return v
	}

	says("No tenants yet", "tenant", "list")
	says("Acme & Co", "tenant", "create", "Acme & Co")
	tenant := fromJSON(says("", "tenant", "show", "acme & co", "--json"))["id"].(string)
	says(tenant, "tenant", "list")
	says("25", "tenant", "update", tenant, "--max-in-flight", "25")
	says("Acme", "tenant", "update", tenant, "--name", "Acme")
	says("suspended", "tenant", "suspend", "Acme")
	says("active", "tenant", "activate", "Acme")
	fails("no tenant has the name", "tenant", "show", "Nobody")
	fails("Conflict", "tenant", "create", "ACME")
	fails("\n  max_in_flight: must be from 1", "tenant", "update", "Acme", "--max-in-flight", "0")

	// Keys: alone on standard output, for scripts.
	key := strings.TrimSpace(says("cvg_live_", "keys", "create", "Acme", "orders", "--scope", "read", "--expires", "24h"))
	byKey := newAPI(t, p.base, "X-Api-Key", key)
	byKey.call(t, 200, "GET", "/api/v1/conversations", "")
	list := says("orders", "keys", "list", "Acme")
	if strings.Contains(list, key) {
		t.Error("a key is shown twice")
	}
	id := strings.Fields(strings.Split(list, "\n")[1])[0]
	next := strings.TrimSpace(says("cvg_live_", "keys", "rotate", "Acme", id, "--overlap", "1h"))
	for _, k := range []string{key, next} {
		newAPI(t, p.base, "X-Api-Key", k).call(t, 200, "GET", "/api/v1/conversations", "")
	}
	newAPI(t, p.base, "X-Api-Key", next).call(t, 403, "POST", "/api/v1/conversations", `{}`) // the scopes of the old one
	fails("about to be", "keys", "rotate", "Acme", id)
	fails("has no key", "keys", "rotate", "Acme", uuid.NewString())
	says("is revoked", "keys", "revoke", "Acme", id)
	byKey.call(t, 401, "GET", "/api/v1/conversations", "")

	says("No channels yet", "channels", "list", "Acme")
	config := filepath.Join(dir, "config.json")
	if err := os.WriteFile(config, []byte(`{"url":"https://example.com/hook"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	secret := strings.TrimSpace(says("whsec_", "channels", "create", "Acme", "webhook", "app", "--config-file", config, "--rate-limit", "80/s", "--no-ordered"))
	list = says("app", "channels", "list", "Acme")
	ch := fromJSON(says("", "channels", "create", "Acme", "echo", "mirror", "--json"))["id"].(string)
	says("mirror", "channels", "show", ch)
	got := fromJSON(says("", "channels", "update", ch, "--name", "second", "--rate-limit", "60/m", "--max-in-flight", "7", "--no-require-signature", "--status", "active", "--retry-policy", `{"max_attempts":3}`))
	if got["name"] != "second" || got["rate_limit"] != "60/m" || got["max_in_flight"] != 7.0 || got["require_signature"] != false ||
		got["retry_policy"].(map[string]any)["max_attempts"] != 3.0 {
		t.Errorf("channel after its change: %v", got)
	}
	if got = fromJSON(says("", "channels", "update", ch, "--rate-limit", "none")); got["rate_limit"] != nil || got["name"] != "second" {
		t.Errorf("channel without its pace: %v", got)
	}
	if rotated := strings.TrimSpace(says("whsec_", "channels", "rotate-secret", ch, "--overlap", "1h")); rotated == secret || strings.Contains(list, secret) {
		t.Error("a secret stays, or is shown twice")
	}
	says("is paused", "channels", "pause", ch)
	if d := fromJSON(says("", "channels", "show", ch))["delivery"].(map[string]any); d["circuit_state"] != "paused" {
		t.Errorf("deliveries of a paused channel: %v", d)
	}
	says("delivers again", "channels", "resume", ch)
	fails("a JSON object", "channels", "create", "Acme", "webhook", "x", "--config", "[]")
	fails("retry_policy must be a JSON object", "channels", "update", ch, "--retry-policy", "7")
	fails("type: must be", "channels", "create", "Acme", "pigeon", "x")

	says("No conversations match", "conversations", "list", "Acme")
	writer := newAPI(t, p.base, "X-Api-Key", strings.TrimSpace(says("cvg_live_", "keys", "create", "Acme", "writer")))
	talk := data[map[string]any](t, writer.call(t, 201, "POST", "/api/v1/conversations", `{"channel_id":"`+ch+`","external_id":"ada","display_name":"Ada Example"}`))["id"].(string)
	says("Nothing was said", "conversations", "activities", "Acme", talk)
	for _, line := range []string{"line 1", "line 2", "line 3"} {
		writer.call(t, 201, "POST", "/api/v1/conversations/"+talk+"/activities", `{"text":"`+line+`"}`)
	}
	says("Ada Example", "conversations", "list", "Acme", "--channel", ch, "--external-id", "ada")
	if said := says("line 1", "conversations", "activities", "Acme", talk, "--limit", "2"); strings.Count(said, "line ") != 2 { // the second may be an echo
		t.Errorf("not two:\n%s", said)
	}
	says("closed", "conversations", "close", "Acme", talk)
	says(talk, "conversations", "list", "Acme", "--status", "closed")
	says("active", "conversations", "reopen", "Acme", talk)
	says("active", "conversations", "show", "Acme", talk)

	says("No rules yet", "rules", "list", "Acme")
	relay := fromJSON(says("", "channels", "create", "Acme", "webhook", "relay", "--config-file", config, "--json"))["id"].(string)
	rule := fromJSON(says("", "rules", "create", "Acme", "to the mirror", relay, ch, "--json"))
	if rule["enabled"] != true || rule["source_channel_id"] != relay || rule["target_channel_ids"].([]any)[0] != ch {
		t.Errorf("rule %v", rule)
	}
	one := rule["id"].(string)
	says("to the mirror", "rules", "list", "Acme")
	says("false", "rules", "update", "Acme", one, "--no-enabled")
	says("mirrored", "rules", "update", "Acme", one, "--name", "mirrored", "--to", ch, "--from", relay)
	fails("cannot include the source", "rules", "update", "Acme", one, "--to", relay)
	fails("has already been taken", "rules", "create", "Acme", "mirrored", relay, ch, "--disabled")
	says("mirrored", "rules", "show", "Acme", one)

	// A change that was made from what another has changed since is refused, and says how to go on.
	if tag := rule["etag"].(string); !strings.Contains(says("ETAG", "rules", "show", "Acme", one), "ETAG ") || tag == "" {
		t.Error("a rule is shown without its tag")
	} else {
		fails("repeat the command with the new ETAG", "rules", "delete", "Acme", one, "--if-match", tag)
		tag = fromJSON(says("", "rules", "show", "Acme", one, "--json"))["etag"].(string)
		says("Deleted", "rules", "delete", "Acme", one, "--if-match", tag)
	}
	fails("no such routing rule", "rules", "show", "Acme", one)

	says("application/pdf", "tenant", "upload-types", "show", "Acme")
	types := fromJSON(says("", "tenant", "upload-types", "set", "Acme", "Image/PNG", "image/gif", "image/png", "--json"))
	if got := fmt.Sprint(types["types"], types["effective"]); got != "[image/gif image/png] [image/gif image/png]" {
		t.Errorf("types of uploads: %s", got)
	}
	fails("\n  types/1: \"text/html\" is none of", "tenant", "upload-types", "set", "Acme", "image/png", "text/html")
	says("application/pdf", "tenant", "upload-types", "reset", "Acme", "--if-match", types["etag"].(string))
	says("Deleted", "channels", "delete", ch)
	fails("no such channel", "channels", "show", ch)

	says("activity_create", "limits", "get", "Acme")
	says("7/1m", "limits", "set", "Acme", "activity_create", "7/60s", "--algorithm", "token_bucket", "--burst", "3")
	says("7/1m", "limits", "get", "Acme")
	if l := fromJSON(says("", "limits", "get", "Acme", "activity_create", "--json")); l["override"].(map[string]any)["scale_ms"] != 60000.0 {
		t.Errorf("limit %v", l)
	}
	says("100/1s", "limits", "unset", "Acme", "activity_create")
	fails("the same for all tenants. Those that can be set for a tenant are activity_create, ", "limits", "set", "Acme", "login_ip", "3/1m")
	fails("the same for all tenants. Those that can be set for a tenant are activity_create, ", "limits", "unset", "Acme", "login_ip")
	fails("\n  scale_ms: must be", "limits", "set", "Acme", "activity_create", "5/1ms")
	fails("whole milliseconds", "limits", "set", "Acme", "activity_create", "5/1.0004s")
	says("0/1s (refuses everything)", "limits", "set", "Acme", "upload", "0/1s")
	says("0/1s (refuses everything)", "limits", "show", "upload", "Acme")
	says("10/1s", "limits", "unset", "Acme", "upload")
	says("each channel", "limits", "get", "Acme", "channel_outbound")
	fails("no bucket", "limits", "get", "Acme", "coffee")

	says("Nothing has been refused", "limits", "top")
	says("", "limits", "set", "Acme", "activity_create", "2/24h")
	for range 3 { // what was used under the default may count too
		if _, err := writer.try(t.Context(), "POST", "/api/v1/conversations/"+talk+"/activities", `{"text":"too much"}`); err != nil {
			t.Fatal(err)
		}
	}
	says("has 0 left", "limits", "show", "activity_create", "Acme")
	if top := says("activity_create", "limits", "top"); !strings.Contains(top, "Acme") {
		t.Errorf("top:\n%s", top)
	}
	says(`"refused": `, "limits", "top", "--json", "--bucket", "activity_create")
	fails("no bucket", "limits", "top", "--bucket", "coffee")
	if tried := says("activity_create", "limits", "try", "Acme", "activity_create", "1/24h"); !strings.Contains(tried, " 6 ") {
		t.Errorf("tried:\n%s", tried)
	}
	if asked := says("DEMAND  WHOM", "limits", "demand", "activity_create"); !strings.Contains(asked, "\n6  ") || !strings.Contains(asked, "Acme") || strings.Contains(asked, "UTC") {
		t.Errorf("demand:\n%s", asked)
	}
	if asked := says("+0  +1", "limits", "demand", "activity_create", "acme", "--tenant", "Acme"); !strings.Contains(asked, "\n6  ") {
		t.Errorf("demand of one:\n%s", asked)
	}
	if d := fromJSON(says("", "limits", "demand", "activity_create", "Acme", "--json")); d["complete"] != true || len(d["subjects"].([]any)) != 1 {
		t.Errorf("demand in JSON: %v", d)
	}
	says("Nothing is known of a demand in second_factor", "limits", "demand", "second_factor")
	fails("Invalid bucket", "limits", "demand", "coffee")
	fails("There is no tenant", "limits", "demand", "activity_create", "Nobody")
	says("is reset on 1 node", "limits", "clear-usage", "activity_create", "Acme")
	says("has 2 left", "limits", "show", "activity_create", "Acme")
	says("admin jane@example.com uses 0 of 5/1m in login_account, and has 5 left", "limits", "show", "login_account", "admin", "Jane@example.com")
	fails("There is no tenant", "limits", "show", "activity_create", "Nobody")
	fails("must be one IP address", "limits", "clear-usage", "unknown_caller", "localhost")
	says("", "limits", "unset", "Acme", "activity_create")

	says("No ranges match", "ranges", "list")
	says("deny 203.0.113.0/24", "ranges", "add", "deny", "203.0.113.0/24", "--note", "scanner", "--expires", "1h")
	says("exempt 203.0.113.7/32", "ranges", "add", "exempt", "203.0.113.7")
	fails("pass --force", "ranges", "add", "deny", "127.0.0.0/8")
	fails("did you mean", "ranges", "add", "deny", "203.0.113.9/24")
	says("scanner", "ranges", "list", "--address", "203.0.113.7")
	if r := fromJSON(says("", "ranges", "update", "203.0.113.0/24", "--note", "still at it", "--expires", "0s", "--json")); r["note"] != "still at it" || r["expires_at"] != nil || r["kind"] != "deny" {
		t.Errorf("range after its change: %v", r)
	}
	says("still at it", "ranges", "show", "203.0.113.0/24")
	fails("repeat the command with the new ETAG", "ranges", "update", "203.0.113.0/24", "--note", "x", "--if-match", "1.0")
	says("Removed", "ranges", "remove", "203.0.113.7")
	says("Removed", "ranges", "remove", strings.Fields(strings.Split(runOK(t, environ, "ranges", "list", "--dir", dir), "\n")[1])[0])
	fails("there is no range", "ranges", "remove", "203.0.113.0/24")

	other := strings.TrimSpace(says("cvg_op_", "tokens", "create", "Grace", "--scope", "read"))
	says("Grace", "tokens", "list")
	ops := newAPI(t, p.base, "Authorization", "Bearer "+other)
	ops.call(t, 403, "POST", "/api/v1/management/tenants", `{"name":"x"}`)
	tokens := data[[]map[string]any](t, ops.call(t, 200, "GET", "/api/v1/management/operator_tokens", ""))
	fails("pass --force", "tokens", "revoke", tokens[0]["id"].(string))
	says("is revoked as of", "tokens", "revoke", tokens[1]["id"].(string), "--overlap", "1m")

	fails("whose users", "users", "list")
	says("No users yet", "users", "list", "--tenant", "Acme")
	for _, people := range [][]string{{"--tenant", "Acme"}, {"--admins"}} {
		users := func(want string, args ...string) string {
			t.Helper()
			return says(want, append(append([]string{"users"}, args...), people...)...)
		}
		users("ada@example.com", "create", "Ada@example.com", "viewer", "--name", "Ada")
		users("Ada", "show", "ADA@example.com")
		users("Countess", "update", "ada@example.com", "--name", "Countess", "--role", "admin")
		link := users("/link/", "sign-in-link", "ada@example.com")
		if !strings.HasPrefix(link, "http://hub.test/") {
			t.Errorf("link %s", link)
		}
		if made := strings.TrimSpace(users("", "set-password", "ada@example.com")); len(made) < 20 {
			t.Errorf("password %q", made)
		}
		file := filepath.Join(t.TempDir(), "password")
		if err := os.WriteFile(file, []byte("correct horse battery\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		users("is set", "set-password", "ada@example.com", "--password-file", file)
		users("not signed in", "sessions", "ada@example.com")
		users("Signed out", "sign-out", "ada@example.com")
		users("inactive", "disable", "ada@example.com")
		users("active", "enable", "ada@example.com")
		users("Removed", "delete", "ada@example.com")
		fails("no user has", append([]string{"users", "show", "ada@example.com"}, people...)...)
	}

	fails("which deliveries", "deliveries", "replay", "Acme")
	fails("no such delivery", "deliveries", "replay", "Acme", uuid.NewString())
	says("No deliveries match", "deliveries", "list", "Acme", "--status", "failed")
	fails("no such delivery", "deliveries", "show", "Acme", uuid.NewString())
	says("No events match", "inbound", "list", "--tenant", "Acme")
	says("toggle_status", "audit", "--tenant", "Acme")
	log := says("address_range", "audit", "--limit", "0", "--json", "--from", time.Now().UTC().Format(time.DateOnly))
	for _, secret := range []string{key, next, secret, other, token} {
		if strings.Contains(log, secret) {
			t.Error("the audit log holds a secret")
		}
	}
	says("Nothing was changed", "audit", "--action", "nothing")
}
