package channel_test

import (
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"converger/internal/channel"
)

func newGuard(t *testing.T, opts channel.GuardOptions) *channel.Guard {
	t.Helper()
	g, err := channel.NewGuard(opts)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func TestCheckURL(t *testing.T) {
	t.Parallel()
	type verdict string
	const (
		ok      verdict = "ok"
		blocked verdict = "blocked" // ErrBlockedTarget
		bad     verdict = "bad"     // any other error
	)
	strict := newGuard(t, channel.GuardOptions{})
	private := newGuard(t, channel.GuardOptions{AllowPrivate: true})
	lan := newGuard(t, channel.GuardOptions{Allowed: []string{"Hub.Internal.", "*.lan.example", "10.1.0.0/16", "fd00::1", "127.0.0.1", "localhost"}})
	for url, want := range map[string]struct{ strict, private, lan verdict }{
		"https://hooks.example.com/in?x=1":        {ok, ok, ok},
		"http://example.com:8080":                 {ok, ok, ok},
		"http://no-such-name.invalid/":            {ok, ok, ok},
		"http://8.8.8.8/":                         {ok, ok, ok},
		"http://[2606:4700::1111]/":               {ok, ok, ok},
		"http://1-2-3-4.example.com":              {ok, ok, ok},
		"http://[::ffff:127.0.0.1]/":              {blocked, ok, ok}, // judged as 127.0.0.1
		"http://[::ffff:10.0.0.1]/":               {blocked, ok, blocked},
		"http://2130706433/":                      {blocked, ok, blocked},
		"http://0x7f.1/":                          {blocked, ok, blocked},
		"http://0x7f000001/":                      {blocked, ok, blocked},
		"http://0177.0.0.1/":                      {blocked, ok, blocked},
		"http://127.1/":                           {blocked, ok, blocked},
		"http://127.0.0.1./":                      {blocked, ok, ok},
		"http://0/":                               {blocked, ok, blocked},
		"http://0.0.0.0/":                         {blocked, ok, blocked},
		"http://localhost/":                       {blocked, ok, ok},
		"http://LOCALHOST./":                      {blocked, ok, ok},
		"http://a.localhost:5432/":                {blocked, ok, blocked},
		"http://169.254.169.254/latest/meta-data": {blocked, ok, blocked},
		"http://[fd00::1]/":                       {blocked, ok, ok},
		"http://[fd00::2]/":                       {blocked, ok, blocked},
		"http://[fe80::1%25eth0]/":                {blocked, ok, blocked},
		"http://[::1]/":                           {blocked, ok, blocked},
		"http://[::]/":                            {blocked, ok, blocked},
		"http://100.64.0.1/":                      {blocked, ok, blocked},
		"http://[64:ff9b::7f00:1]/":               {blocked, ok, blocked},
		"http://[64:ff9b:1::7f00:1]/":             {blocked, ok, blocked},
		"http://[2002:7f00:1::]/":                 {blocked, ok, blocked},
		"http://[2001:db8::1]/":                   {blocked, ok, blocked},
		"http://[::127.0.0.1]/":                   {blocked, ok, blocked},
		"http://[ff02::1]/":                       {blocked, ok, blocked},
		"http://[fec0::1]/":                       {blocked, ok, blocked},
		"http://[100::1]/":                        {blocked, ok, blocked},
		"http://10.0.0.1/":                        {blocked, ok, blocked},
		"http://10.1.2.3/":                        {blocked, ok, ok},
		"http://172.16.0.1/":                      {blocked, ok, blocked},
		"http://192.168.1.1/":                     {blocked, ok, blocked},
		"http://192.0.0.1/":                       {blocked, ok, blocked},
		"http://192.0.2.1/":                       {blocked, ok, blocked},
		"http://192.88.99.1/":                     {blocked, ok, blocked},
		"http://198.18.0.1/":                      {blocked, ok, blocked},
		"http://198.51.100.1/":                    {blocked, ok, blocked},
		"http://203.0.113.1/":                     {blocked, ok, blocked},
		"http://224.0.0.1/":                       {blocked, ok, blocked},
		"http://255.255.255.255/":                 {blocked, ok, blocked},
		"http://hub.internal/":                    {ok, ok, ok},
		"http://a.lan.example/":                   {ok, ok, ok},
		"":                                        {bad, bad, bad},
		"/hook":                                   {bad, bad, bad},
		"example.com":                             {bad, bad, bad},
		"http://":                                 {bad, bad, bad},
		"http:///path":                            {bad, bad, bad},
		"http://:80/":                             {bad, bad, bad},
		"http://./":                               {bad, bad, bad},
		"ftp://example.com/":                      {bad, bad, bad},
		"file:///etc/passwd":                      {bad, bad, bad},
		"javascript:alert(1)":                     {bad, bad, bad},
		"http://user:pass@example.com/":           {bad, bad, bad},
		"http://example.com:0/":                   {bad, bad, bad},
		"http://example.com:99999/":               {bad, bad, bad},
		"http://exa mple.com/":                    {bad, bad, bad},
		"http://a..b/":                            {bad, bad, bad},
		"http://127。0。0。1/":                       {bad, bad, bad},
		"http://１２７.0.0.1/":                       {bad, bad, bad},
		"http://example.com/\x00":                 {bad, bad, bad},
		"http://" + strings.Repeat("a", 64) + ".example/": {bad, bad, bad},
		"http://example.com/" + strings.Repeat("a", 2048): {bad, bad, bad},
	} {
		for name, g := range map[string]struct {
			guard *channel.Guard
			want  verdict
		}{"strict": {strict, want.strict}, "private": {private, want.private}, "lan": {lan, want.lan}} {
			got := ok
			switch err := g.guard.CheckURL(url); {
			case errors.Is(err, channel.ErrBlockedTarget):
				got = blocked
			case err != nil:
				got = bad
			}
			if got != g.want {
				t.Errorf("%s guard, %q: %s, want %s", name, url, got, g.want)
			}
		}
	}
}

func TestCheckURLDoesNotRepeatPasswords(t *testing.T) {
	t.Parallel()
	for _, url := range []string{"http://user:hunter2@example.com/", "http://user:hunter2@exa mple.com:x/"} {
		if err := newGuard(t, channel.GuardOptions{}).CheckURL(url); err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func TestNewGuardNamesBadEntries(t *testing.T) {
	t.Parallel()
	_, err := channel.NewGuard(channel.GuardOptions{Allowed: []string{"ok.example", "10.0.0.0/33", "*.", "a b", "127.1"}})
	for _, bad := range []string{"10.0.0.0/33", "*.", "a b", "127.1"} {
		if err == nil || !strings.Contains(err.Error(), bad) {
			t.Errorf("error %v does not name %q", err, bad)
		}
	}
}

// newServer counts the requests that come through.
func newServer(t *testing.T, handler http.HandlerFunc) (*httptest.Server, *atomic.Int64) {
	t.Helper()
	var hits atomic.Int64
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { hits.Add(1); handler(w, r) }))
	t.Cleanup(s.Close)
	return s, &hits
}

func get(t *testing.T, g *channel.Guard, url string) (*http.Response, error) {
	t.Helper()
	client := g.Client()
	t.Cleanup(client.CloseIdleConnections)
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	resp, err := client.Do(req)
	if err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
	}
	return resp, err
}

// A name is judged by what it resolves to when it is called: localhost passes as an allowed name only, and stands for any
// name whose owner points it inside after it was saved.
func TestClientChecksResolvedAddresses(t *testing.T) {
	t.Parallel()
	server, hits := newServer(t, func(http.ResponseWriter, *http.Request) {})
	named := strings.Replace(server.URL, "127.0.0.1", "localhost", 1)
	strict := newGuard(t, channel.GuardOptions{})
	for _, url := range []string{server.URL, named, strings.Replace(server.URL, "127.0.0.1", "[::ffff:127.0.0.1]", 1)} {
		if _, err := get(t, strict, url); !errors.Is(err, channel.ErrBlockedTarget) {
			t.Errorf("%s: got %v, want ErrBlockedTarget", url, err)
		}
	}
	if n := hits.Load(); n != 0 {
		t.Fatalf("%d requests came through", n)
	}
	for _, opts := range []channel.GuardOptions{
		{AllowPrivate: true},
		{Allowed: []string{"localhost"}},
		{Allowed: []string{"127.0.0.0/8", "::1"}},
	} {
		if _, err := get(t, newGuard(t, opts), named); err != nil {
			t.Errorf("%+v: %v", opts, err)
		}
	}
	// An allowed name says nothing of its address, nor of other names.
	if _, err := get(t, newGuard(t, channel.GuardOptions{Allowed: []string{"localhost", "*.localhost"}}), server.URL); !errors.Is(err, channel.ErrBlockedTarget) {
		t.Errorf("address of an allowed name: got %v, want ErrBlockedTarget", err)
	}
}

func TestClientFollowsNoRedirect(t *testing.T) {
	t.Parallel()
	inside, hits := newServer(t, func(http.ResponseWriter, *http.Request) {})
	outside, _ := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, inside.URL, http.StatusTemporaryRedirect)
	})
	resp, err := get(t, newGuard(t, channel.GuardOptions{AllowPrivate: true}), outside.URL)
	if err != nil || resp.StatusCode != http.StatusTemporaryRedirect || hits.Load() != 0 {
		t.Errorf("got %v, %v, %d requests inside", resp, err, hits.Load())
	}
}

func TestClientIgnoresProxies(t *testing.T) {
	// Not parallel: sets the environment.
	proxy, hits := newServer(t, func(http.ResponseWriter, *http.Request) {})
	server, _ := newServer(t, func(http.ResponseWriter, *http.Request) {})
	t.Setenv("HTTP_PROXY", proxy.URL)
	t.Setenv("NO_PROXY", "")
	// Loopback addresses never go to a proxy, so that only the transport's own setting shows it.
	client := newGuard(t, channel.GuardOptions{AllowPrivate: true}).Client()
	if client.Transport.(*http.Transport).Proxy != nil {
		t.Error("the client asks a proxy, which would dial unchecked addresses")
	}
	if _, err := get(t, newGuard(t, channel.GuardOptions{AllowPrivate: true}), server.URL); err != nil || hits.Load() != 0 {
		t.Errorf("got %v, %d requests at the proxy", err, hits.Load())
	}
}
