package http

import (
	"bytes"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"text/tabwriter"

	"github.com/go-chi/chi/v5"

	"converger/internal/auth"
	"converger/internal/ratelimit"
)

// onLimiterFailure says what happens when the limiter's backend can't decide for the whole cluster. The stores then go on by
// this node's share of the limit, the guards of credentials too: no route lets everybody through because of the limiter, and
// none turns into a 5xx.
func (rt *route) onLimiterFailure() string {
	if rt.bucket == 0 && rt.auth != credentialPassword && rt.auth != credentialLink {
		return "-"
	}
	return "local"
}

// The route table is reviewed as a file: what each route demands, and what limits it.
func TestRouteTable(t *testing.T) {
	t.Parallel()
	f := newFront(t)

	byName := map[string]*route{}
	for i := range f.routes {
		rt := &f.routes[i]
		name := rt.method + " " + rt.pattern
		if byName[name] != nil {
			t.Errorf("%s is registered twice", name)
		}
		byName[name] = rt
	}
	// What the router really has is the table, and for each GET also HEAD.
	walked := map[string]bool{}
	err := chi.Walk(f.mux.(chi.Routes), func(method, pattern string, _ http.Handler, _ ...func(http.Handler) http.Handler) error {
		if method != http.MethodHead {
			walked[method+" "+pattern] = true
		} else if byName["GET "+pattern] == nil {
			t.Errorf("HEAD %s without GET", pattern)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := slices.Sorted(maps.Keys(walked)), slices.Sorted(maps.Keys(byName)); !slices.Equal(got, want) {
		t.Errorf("the router has %v, the table %v", got, want)
	}

	var b bytes.Buffer
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "METHOD\tPATTERN\tCREDENTIAL\tSCOPE\tBUCKET\tLIMITER DOWN\tBODY\tMAX BYTES")
	for _, rt := range f.routes {
		scope, bucket, limit := "-", "-", "-"
		if rt.scope != 0 {
			scope = scopeName(rt.scope)
		}
		if rt.right != 0 {
			scope = map[auth.Right]string{auth.RightWrite: "write", auth.RightManageUsers: "users", auth.RightManageAdmins: "admins"}[rt.right]
		}
		if rt.bucket != 0 {
			bucket = rt.bucket.String()
		}
		if rt.body != bodyNone {
			limit = fmt.Sprint(rt.maxBody)
		}
		fmt.Fprintln(w, strings.Join([]string{rt.method, rt.pattern, rt.auth.String(), scope, bucket, rt.onLimiterFailure(), rt.body.String(), limit}, "\t"))
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(b.String(), "\n")
	for i := range lines {
		lines[i] = strings.TrimRight(lines[i], " ")
	}
	golden(t, "routes.golden", []byte(strings.Join(lines, "\n")))
}

// What has a credential has a limit, and what is not limited is a probe or a page.
func TestEveryAuthenticatedRouteIsLimited(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	for _, rt := range f.routes {
		if rt.auth == credentialPassword || rt.auth == credentialLink {
			continue // limited by failures, in their handlers
		}
		limited := rt.bucket != 0
		if authenticated := rt.auth != credentialNone && rt.auth != credentialMetrics; authenticated != limited {
			t.Errorf("%s %s: credential %v, bucket %v", rt.method, rt.pattern, rt.auth, rt.bucket)
		}
		if rt.bucket == ratelimit.APIRead && rt.pattern == "/metrics" {
			t.Error("metrics spend a client's budget")
		}
	}
}

func TestUnmatched(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	tests := map[string]struct {
		method, path string
		status       int
		code         code
		allow        string
	}{
		"unknown path":                 {"GET", "/nothing/here", 404, codeNotFound, ""},
		"slash at the end":             {"GET", "/health/live/", 404, codeNotFound, ""},
		"two slashes":                  {"GET", "//evil.test/health", 404, codeNotFound, ""},
		"wrong method":                 {"DELETE", "/health/live", 405, codeMethodNotAllowed, "GET, HEAD"},
		"wrong method, same pattern":   {"PATCH", "/api/v1/conversations", 405, codeMethodNotAllowed, "GET, HEAD, POST"},
		"invented method":              {"BREW", "/health/live", 405, codeMethodNotAllowed, "GET, HEAD"},
		"invented method, no path":     {"BREW", "/coffee", 404, codeNotFound, ""},
		"options without preflight":    {"OPTIONS", "/api/v1/conversations", 405, codeMethodNotAllowed, "GET, HEAD, POST"},
		"encoded slash is no route":    {"GET", "/health%2Flive", 404, codeNotFound, ""},
		"path of the removed upstream": {"GET", "/api/v1/nothing", 404, codeNotFound, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := f.call(t, tt.method, tt.path, "")
			a.is(t, tt.status, tt.code)
			if got := a.Header.Get("Allow"); got != tt.allow {
				t.Errorf("Allow: %q, want %q", got, tt.allow)
			}
			if got := a.Header.Get("Content-Type"); got != typeProblem {
				t.Errorf("Content-Type: %q", got)
			}
		})
	}
}
