package redis

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

func TestParseURL(t *testing.T) {
	t.Parallel()
	notCA := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(notCA, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		url  string
		want Target // without tls
		tls  bool
	}{
		{"redis://cache", Target{addrs: []string{"cache:6379"}}, false},
		{"redis://cache:7000/", Target{addrs: []string{"cache:7000"}}, false},
		{"redis://:p%40ss%2Fw:rd@10.0.0.1/3", Target{addrs: []string{"10.0.0.1:6379"}, password: "p@ss/w:rd", db: 3}, false},
		{"rediss://hub:pw@cache.example.com:6380", Target{addrs: []string{"cache.example.com:6380"}, username: "hub", password: "pw"}, true},
		{"redis://hub:p@w@cache", Target{addrs: []string{"cache:6379"}, username: "hub", password: "p@w"}, false},
		{"redis://[::1]:7000", Target{addrs: []string{"[::1]:7000"}}, false},
		{"redis://[::1]", Target{addrs: []string{"[::1]:6379"}}, false},
		{"redis://hub:pw@a:1,b,c:3", Target{addrs: []string{"a:1", "b:6379", "c:3"}, username: "hub", password: "pw", cluster: true}, false},
		{"redis://a?cluster=true", Target{addrs: []string{"a:6379"}, cluster: true}, false},
		{"redis://a/?pool_size=7", Target{addrs: []string{"a:6379"}, poolSize: 7}, false},
	} {
		got, err := ParseURL(test.url)
		if err != nil {
			t.Errorf("%s: %v", test.url, err)
			continue
		}
		want := test.want
		if want.poolSize == 0 {
			want.poolSize = defaultPoolSize
		}
		if !slices.Equal(got.addrs, want.addrs) || got.cluster != want.cluster || got.username != want.username || got.password != want.password ||
			got.db != want.db || got.poolSize != want.poolSize || (got.tls != nil) != test.tls {
			t.Errorf("%s: %+v, want %+v", test.url, got, want)
		}
	}
	for _, url := range []string{
		"", "cache:6379", "http://cache", "redis://", "redis://:secret@", "redis://hub@cache", "redis://:@cache", "redis://:secret@cache:0",
		"redis://:secret@cache:65536", "redis://:secret@cache:port", "redis://:secret@a,,b", "redis://:se/cret@cache", "redis://:se?cret@cache",
		"redis://:se#cret@cache", "redis://:se%zzcret@cache", "redis://:secret@cache/one", "redis://:secret@cache/-1", "redis://:secret@a,b/1",
		"redis://:secret@a?cluster=maybe", "redis://:secret@a,b?cluster=false", "redis://:secret@a?read_timeout=9s", "redis://:secret@a?pool_size=0",
		"redis://:secret@a?ca_file=/secret", "rediss://:secret@a?ca_file=/secret", "rediss://:secret@a?ca_file=" + notCA, "redis://:secret@::1", "redis://:secret@[::1",
	} {
		_, err := ParseURL(url)
		if err == nil {
			t.Errorf("%s was accepted", url)
			continue
		}
		if strings.Contains(err.Error(), "secret") || strings.Contains(err.Error(), "cret@") {
			t.Errorf("%s: the error repeats it: %v", url, err)
		}
	}
}

func FuzzParseURL(f *testing.F) {
	for _, seed := range []string{"redis://hub:pw@a:1,b?cluster=true", "rediss://[::1]:7/3?pool_size=3", "redis://:p%40@x/0#"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, url string) {
		got, err := ParseURL(url)
		if err == nil && (len(got.addrs) == 0 || got.poolSize < 1 || got.db < 0 || slices.ContainsFunc(got.addrs, func(a string) bool { return !strings.Contains(a, ":") })) {
			t.Errorf("%q became %+v", url, got)
		}
	})
}
