package main

import (
	"bytes"
	"net/http"
	"net/http/httptest"
	"testing"
)

// The token comes from the environment that the program was given, and a flag wins over it.
func TestManagementToken(t *testing.T) {
	t.Parallel()
	var got string
	hub := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header.Get("Authorization")
		_, _ = w.Write([]byte(`{"data":[],"meta":{"has_more":false}}`))
	}))
	t.Cleanup(hub.Close)
	getenv := func(name string) string {
		if name == "MANAGEMENT_TOKEN" {
			return "from-environment"
		}
		return ""
	}
	for _, test := range []struct {
		want  string
		flags []string
	}{
		{"Bearer from-environment", nil},
		{"Bearer from-flag", []string{"--token", "from-flag"}},
	} {
		var out bytes.Buffer
		args := append([]string{"inbound", "list", "--dir", t.TempDir(), "--base-url", hub.URL}, test.flags...)
		if err := run(t.Context(), args, getenv, &out, &out); err != nil || got != test.want {
			t.Errorf("%v: sent %q, want %q; %v %s", test.flags, got, test.want, err, out.String())
		}
	}
}
