package http

import (
	"net/http"
	"net/netip"
	"testing"
)

func TestClientIP(t *testing.T) {
	t.Parallel()
	proxies := []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	tests := map[string]struct {
		peer      string
		forwarded []string
		trusted   []netip.Prefix
		want      string
		ignored   bool
	}{
		"no proxy":                           {"198.51.100.7:4711", nil, proxies, "198.51.100.7", false},
		"untrusted peer forwards":            {"198.51.100.7:4711", []string{"203.0.113.9"}, proxies, "198.51.100.7", true},
		"nobody is trusted":                  {"10.0.0.1:1", []string{"203.0.113.9"}, nil, "10.0.0.1", true},
		"one proxy":                          {"10.0.0.1:1", []string{"203.0.113.9"}, proxies, "203.0.113.9", false},
		"client wrote its own":               {"10.0.0.1:1", []string{"1.1.1.1, 203.0.113.9"}, proxies, "203.0.113.9", false},
		"two proxies":                        {"10.0.0.1:1", []string{"203.0.113.9, 10.9.9.9"}, proxies, "203.0.113.9", false},
		"two headers":                        {"10.0.0.1:1", []string{"1.1.1.1", "203.0.113.9, 10.9.9.9"}, proxies, "203.0.113.9", false},
		"port":                               {"10.0.0.1:1", []string{"203.0.113.9:1111"}, proxies, "203.0.113.9", false},
		"blanks":                             {"10.0.0.1:1", []string{"  203.0.113.9 "}, proxies, "203.0.113.9", false},
		"brackets and port":                  {"10.0.0.1:1", []string{"[2001:db8::1]:443"}, proxies, "2001:db8::1", false},
		"brackets":                           {"10.0.0.1:1", []string{"[2001:db8::1]"}, proxies, "2001:db8::1", false},
		"IPv4-mapped":                        {"[::ffff:10.0.0.1]:1", []string{"::ffff:203.0.113.9"}, proxies, "203.0.113.9", false},
		"zone":                               {"[fe80::1%eth0]:1", nil, proxies, "fe80::1", false},
		"malformed stops at the last proxy":  {"10.0.0.1:1", []string{"203.0.113.9, unknown, 10.2.2.2"}, proxies, "10.2.2.2", false},
		"malformed at once":                  {"10.0.0.1:1", []string{"203.0.113.9, 1.2.3.4.5"}, proxies, "10.0.0.1", false},
		"all trusted":                        {"10.0.0.1:1", []string{"10.3.3.3, 10.2.2.2"}, proxies, "10.3.3.3", false},
		"empty entries":                      {"10.0.0.1:1", []string{"203.0.113.9,, ", ""}, proxies, "203.0.113.9", false},
		"trusted IPv6 peer, no header":       {"[fd00::5]:1", nil, proxies, "fd00::5", false},
		"octal is malformed, not an address": {"10.0.0.1:1", []string{"0177.0.0.1"}, proxies, "10.0.0.1", false},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &http.Request{RemoteAddr: tt.peer, Header: http.Header{}}
			for _, f := range tt.forwarded {
				r.Header.Add("X-Forwarded-For", f)
			}
			got, ignored := clientIP(r, tt.trusted)
			if got.String() != tt.want || ignored != tt.ignored {
				t.Errorf("clientIP = %v, %v; want %v, %v", got, ignored, tt.want, tt.ignored)
			}
		})
	}
}

func FuzzParseHop(f *testing.F) {
	for _, s := range []string{"", "1.2.3.4", "[::1]:80", "[", "]", "::ffff:1.2.3.4%x", "1.2.3.4:", ":80"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		a, ok := parseHop(s)
		if ok && (a.Is4In6() || a.Zone() != "" || !a.IsValid()) {
			t.Errorf("parseHop(%q) = %v: not canonical", s, a)
		}
	})
}
