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
		doubt     doubt
	}{
		"no proxy":                           {"198.51.100.7:4711", nil, proxies, "198.51.100.7", doubtNone},
		"untrusted peer forwards":            {"198.51.100.7:4711", []string{"203.0.113.9"}, proxies, "198.51.100.7", doubtUndeclared},
		"nobody is trusted":                  {"10.0.0.1:1", []string{"203.0.113.9"}, nil, "10.0.0.1", doubtUndeclared},
		"one proxy":                          {"10.0.0.1:1", []string{"203.0.113.9"}, proxies, "203.0.113.9", doubtNone},
		"client wrote its own":               {"10.0.0.1:1", []string{"1.1.1.1, 203.0.113.9"}, proxies, "203.0.113.9", doubtNone},
		"two proxies":                        {"10.0.0.1:1", []string{"203.0.113.9, 10.9.9.9"}, proxies, "203.0.113.9", doubtNone},
		"two headers":                        {"10.0.0.1:1", []string{"1.1.1.1", "203.0.113.9, 10.9.9.9"}, proxies, "203.0.113.9", doubtNone},
		"port":                               {"10.0.0.1:1", []string{"203.0.113.9:1111"}, proxies, "203.0.113.9", doubtNone},
		"blanks":                             {"10.0.0.1:1", []string{"  203.0.113.9 "}, proxies, "203.0.113.9", doubtNone},
		"brackets and port":                  {"10.0.0.1:1", []string{"[2001:db8::1]:443"}, proxies, "2001:db8::1", doubtNone},
		"brackets":                           {"10.0.0.1:1", []string{"[2001:db8::1]"}, proxies, "2001:db8::1", doubtNone},
		"IPv4-mapped":                        {"[::ffff:10.0.0.1]:1", []string{"::ffff:203.0.113.9"}, proxies, "203.0.113.9", doubtNone},
		"zone":                               {"[fe80::1%eth0]:1", nil, proxies, "fe80::1", doubtNone},
		"malformed stops at the last proxy":  {"10.0.0.1:1", []string{"203.0.113.9, unknown, 10.2.2.2"}, proxies, "10.2.2.2", doubtUnnamed},
		"malformed at once":                  {"10.0.0.1:1", []string{"203.0.113.9, 1.2.3.4.5"}, proxies, "10.0.0.1", doubtUnnamed},
		"all trusted":                        {"10.0.0.1:1", []string{"10.3.3.3, 10.2.2.2"}, proxies, "10.3.3.3", doubtNone},
		"empty entries":                      {"10.0.0.1:1", []string{"203.0.113.9,, ", ""}, proxies, "203.0.113.9", doubtNone},
		"trusted IPv6 peer, no header":       {"[fd00::5]:1", nil, proxies, "fd00::5", doubtNone},
		"octal is malformed, not an address": {"10.0.0.1:1", []string{"0177.0.0.1"}, proxies, "10.0.0.1", doubtUnnamed},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &http.Request{RemoteAddr: tt.peer, Header: http.Header{}}
			for _, f := range tt.forwarded {
				r.Header.Add("X-Forwarded-For", f)
			}
			got, d := clientIP(r, tt.trusted)
			if got.String() != tt.want || d != tt.doubt {
				t.Errorf("clientIP = %v, %v; want %v, %v", got, d, tt.want, tt.doubt)
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
