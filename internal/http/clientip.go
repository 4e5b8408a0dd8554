package http

import (
	"log/slog"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"time"
)

// clientIP is the address that sent the request, as far as it can be known: the TCP peer, or, if that is a trusted proxy,
// the nearest hop of X-Forwarded-For that is not one. Hops are read from the right, since only those were written by
// proxies that are trusted; a malformed one stops at the last trusted hop; if all are trusted the left-most is the
// client. Ports, brackets and blanks are dropped, IPv4-mapped IPv6 is IPv4, zones are dropped.
//
// The doubt tells when the address is a proxy's.
func clientIP(r *http.Request, trusted []netip.Prefix) (ip netip.Addr, d doubt) {
	peer, ok := parsePeer(r.RemoteAddr)
	if !ok {
		return netip.IPv6Unspecified(), doubtNone // no TCP peer: a test, or a socket of another kind
	}
	switch {
	case isTrusted(peer, trusted):
	case hasForwarding(r.Header):
		return peer, doubtUndeclared
	default:
		return peer, doubtNone
	}
	if len(r.Header["X-Forwarded-For"]) == 0 && hasForwarding(r.Header) {
		return peer, doubtUnnamed
	}
	ip = peer
	for _, line := range slices.Backward(r.Header["X-Forwarded-For"]) {
		for line != "" {
			var hop string
			if i := strings.LastIndexByte(line, ','); i >= 0 {
				line, hop = line[:i], line[i+1:]
			} else {
				line, hop = "", line
			}
			if strings.TrimSpace(hop) == "" {
				continue
			}
			addr, ok := parseHop(hop)
			if !ok {
				return ip, doubtUnnamed
			}
			ip = addr
			if !isTrusted(addr, trusted) {
				return ip, doubtNone
			}
		}
	}
	return ip, doubtNone
}

// doubt is why an address may not be the client's.
type doubt uint8

const (
	doubtNone doubt = iota
	// A forwarding header came from a peer that is not trusted and was therefore not read: behind a proxy that was not
	// declared everybody has the proxy's address.
	doubtUndeclared
	// A trusted proxy forwards the request, and X-Forwarded-For does not name whose it is, or not in a way that can be read.
	doubtUnnamed
)

// parsePeer is parseHop of what nearly always has a port.
func parsePeer(text string) (netip.Addr, bool) {
	if with, err := netip.ParseAddrPort(text); err == nil {
		return with.Addr().Unmap().WithZone(""), true
	}
	return parseHop(text)
}

// parseHop reads an address as X-Forwarded-For and net/http write it: with or without a port, IPv6 with or without
// brackets.
func parseHop(text string) (netip.Addr, bool) {
	text = strings.TrimSpace(text)
	addr, err := netip.ParseAddr(text)
	if err != nil {
		if with, e := netip.ParseAddrPort(text); e == nil {
			addr, err = with.Addr(), nil
		} else if bare, found := strings.CutPrefix(text, "["); found && strings.HasSuffix(bare, "]") {
			addr, err = netip.ParseAddr(bare[:len(bare)-1])
		}
	}
	if err != nil {
		return netip.Addr{}, false
	}
	return addr.Unmap().WithZone(""), true
}

func isTrusted(a netip.Addr, trusted []netip.Prefix) bool {
	for _, p := range trusted {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

func hasForwarding(h http.Header) bool {
	return len(h["X-Forwarded-For"]) > 0 || len(h["Forwarded"]) > 0 || len(h["X-Real-Ip"]) > 0 || len(h["True-Client-Ip"]) > 0
}

// forwardingEvery is how often the log says that forwarding headers are ignored, and how long readiness does after one.
const forwardingEvery = time.Hour

// forwarding remembers when an untrusted peer last sent a forwarding header. Safe for concurrent use.
type forwarding struct{ last, logged atomic.Int64 } // Unix seconds

func (f *forwarding) note(now time.Time, l *slog.Logger, peer netip.Addr) {
	f.last.Store(now.Unix())
	if was := f.logged.Load(); now.Unix()-was >= int64(forwardingEvery.Seconds()) && f.logged.CompareAndSwap(was, now.Unix()) {
		l.Warn("a forwarding header came from a peer that is not in TRUSTED_PROXIES and is ignored: if that is your proxy, "+
			"all its clients count as one address", "peer", peer.String())
	}
}

// seen tells whether there was one lately.
func (f *forwarding) seen(now time.Time) bool {
	return now.Unix()-f.last.Load() < int64(forwardingEvery.Seconds())
}
