package channel

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"code.dny.dev/ssrf"
)

// ErrBlockedTarget says that an address may not be called: it is not public, and the operator has not allowed it. Found
// by errors.Is in errors of [Guard.CheckURL] and of requests of a [Guard]'s client.
var ErrBlockedTarget = errors.New("the address is not a public one")

// MaxURL is the longest address, in bytes, that a channel may call.
const MaxURL = 2048

// GuardOptions says which addresses may be called beside the public ones.
type GuardOptions struct {
	AllowPrivate bool     // all of them: for development
	Allowed      []string // exact host names, "*.suffix" (subdomains of it), IP addresses and CIDRs
}

// Guard keeps the program from being used to reach what stands beside it: it checks addresses when they are saved, and
// every address again at the moment of connecting, after the name was resolved. Safe for concurrent use.
type Guard struct {
	allowPrivate bool
	hosts        map[string]bool // lower case, without trailing dot
	suffixes     []string        // with leading dot
	prefixes     []netip.Prefix
}

// NewGuard makes a guard. The error names the entries of Allowed that cannot be read.
func NewGuard(opts GuardOptions) (*Guard, error) {
	g := &Guard{allowPrivate: opts.AllowPrivate, hosts: map[string]bool{}}
	var bad []string
	for _, entry := range opts.Allowed {
		text := canonicalHost(strings.Trim(strings.TrimSpace(entry), "[]"))
		suffix, wildcard := strings.CutPrefix(text, "*.")
		addr, addrErr := netip.ParseAddr(text)
		prefix, prefixErr := netip.ParsePrefix(text)
		switch {
		case addrErr == nil:
			addr = addr.Unmap().WithZone("")
			g.prefixes = append(g.prefixes, netip.PrefixFrom(addr, addr.BitLen()))
		case prefixErr == nil:
			g.prefixes = append(g.prefixes, prefix.Masked())
		case wildcard && validHost(suffix):
			g.suffixes = append(g.suffixes, "."+suffix)
		case !wildcard && validHost(text) && !endsInNumber(text):
			g.hosts[text] = true
		default:
			bad = append(bad, strconv.Quote(entry))
		}
	}
	if bad != nil {
		return nil, fmt.Errorf("allowed targets: neither host, *.suffix, IP address nor CIDR: %s", strings.Join(bad, ", "))
	}
	return g, nil
}

// CheckURL checks an address that is about to be saved. A name that does not resolve, or resolves to an address that
// may not be called, is accepted: what a name means is decided when it is called. The error is made for people; it is
// ErrBlockedTarget if the address itself names a place that is not public.
func (g *Guard) CheckURL(raw string) error {
	if len(raw) > MaxURL {
		return fmt.Errorf("must be at most %d bytes", MaxURL)
	}
	u, err := url.Parse(raw)
	switch {
	case err != nil:
		return errors.New("is not a URL") // the parser's text repeats it, with a password if there is one
	case u.Scheme != "http" && u.Scheme != "https":
		return errors.New("must begin with http:// or https://")
	case u.User != nil:
		return errors.New("must not hold a user or password; use a header")
	case u.Hostname() == "":
		return errors.New("must name a host")
	}
	if port := u.Port(); port != "" {
		if n, err := strconv.Atoi(port); err != nil || n < 1 || n > 65535 {
			return errors.New("must have a port from 1 to 65535")
		}
	}
	return g.checkHost(u.Hostname())
}

func (g *Guard) checkHost(raw string) error {
	host := canonicalHost(raw)
	if addr, err := netip.ParseAddr(host); err == nil {
		return g.checkAddr(addr)
	}
	switch {
	case !validHost(host):
		return errors.New("must name a host of letters, digits, hyphens and dots (write international names in their xn-- form)")
	case g.allowPrivate || g.allowedHost(host):
		return nil
	case host == "localhost" || strings.HasSuffix(host, ".localhost"):
		return fmt.Errorf("%w: %s is this machine", ErrBlockedTarget, host)
	case endsInNumber(host):
		// 2130706433, 0x7f.1, 0177.0.0.1, 127.1: some resolvers read these as addresses, no name ends like that.
		return fmt.Errorf("%w: write an IP address as four decimal numbers", ErrBlockedTarget)
	}
	return nil
}

// canonicalHost is the one spelling by which hosts are compared.
func canonicalHost(host string) string { return strings.TrimRight(strings.ToLower(host), ".") }

func validHost(host string) bool {
	if host == "" || len(host) > 253 {
		return false
	}
	for label := range strings.SplitSeq(host, ".") {
		if label == "" || len(label) > 63 {
			return false
		}
	}
	return !strings.ContainsFunc(host, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '-' && r != '.' && r != '_'
	})
}

// endsInNumber is the rule of the WHATWG URL standard by which a host is an IPv4 address and not a name.
func endsInNumber(host string) bool {
	last := host[strings.LastIndexByte(host, '.')+1:]
	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
}

func (g *Guard) allowedHost(host string) bool {
	return g.hosts[host] || slices.ContainsFunc(g.suffixes, func(s string) bool { return strings.HasSuffix(host, s) })
}

// checkAddr returns ErrBlockedTarget unless addr may be called.
func (g *Guard) checkAddr(addr netip.Addr) error {
	// An address is judged as what it leads to: ::ffff:127.0.0.1 is 127.0.0.1.
	addr = addr.Unmap().WithZone("")
	if g.allowPrivate || public(addr) ||
		slices.ContainsFunc(g.prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }) {
		return nil
	}
	return fmt.Errorf("%w: %s", ErrBlockedTarget, addr)
}

// public goes by IANA's registries of special-purpose addresses, which the ssrf module keeps. Of IPv6 only global
// unicast is public, which leaves out loopback, unique local, link local, multicast, and the forms that carry an IPv4
// address to a translator (64:ff9b::/96, 64:ff9b:1::/48, ::/96).
func public(addr netip.Addr) bool {
	in := func(p netip.Prefix) bool { return p.Contains(addr) }
	if addr.Is4() {
		return !slices.ContainsFunc(ssrf.IPv4DeniedPrefixes, in)
	}
	return ssrf.IPv6GlobalUnicast.Contains(addr) && !slices.ContainsFunc(ssrf.IPv6DeniedPrefixes, in)
}

// maxDial is the longest that a connection may take; channels have shorter time-outs of their own.
const maxDial = 30 * time.Second

// Client returns a new client that connects to addresses that the guard lets pass, checked on each connection; it
// follows no redirect, asks no proxy, and inflates nothing. Its connections are kept for other requests, so share one
// among all channels. Time-outs and the answer's size are the caller's: it has none of its own but for connecting.
func (g *Guard) Client() *http.Client {
	dialer := &net.Dialer{Timeout: maxDial, KeepAlive: 30 * time.Second}
	guarded := *dialer
	guarded.Control = func(_, address string, _ syscall.RawConn) error {
		addr, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("%w: %s", ErrBlockedTarget, address)
		}
		return g.checkAddr(addr.Addr())
	}
	return &http.Client{
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		Transport: &http.Transport{
			DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				if host, _, err := net.SplitHostPort(address); err == nil && g.allowedHost(canonicalHost(host)) {
					return dialer.DialContext(ctx, network, address)
				}
				return guarded.DialContext(ctx, network, address)
			},
			TLSHandshakeTimeout: maxDial,
			ForceAttemptHTTP2:   true, // a DialContext of one's own turns it off
			DisableCompression:  true, // an answer's size on the wire is its size in memory
			MaxIdleConns:        2048,
			MaxIdleConnsPerHost: 256, // hundreds of workers may deliver to one receiver
			// Below what receivers keep them (Node 5 s, nginx 75 s): a request that meets a connection being closed fails, since
			// it is not known whether it was read, and waits for its next attempt.
			IdleConnTimeout:        4 * time.Second,
			MaxResponseHeaderBytes: 64 << 10,
		},
	}
}
