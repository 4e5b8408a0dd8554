package simulate

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"syscall"
)

// errNotLoopback refuses an address outside this machine. The flag is the
// command's name for Yes in the options.
var errNotLoopback = errors.New("not a loopback address; pass --yes if that is what you want")

// LookupFunc is [net.Resolver.LookupNetIP].
type LookupFunc func(ctx context.Context, network, host string) ([]netip.Addr, error)

// RequireLoopback resolves host, a name or an address, and returns an error
// unless every address is loopback. One of several is not enough, because the
// connection might be made to any of them.
func RequireLoopback(ctx context.Context, lookup LookupFunc, host string) error {
	if host == "" { // to a listener, every interface
		return fmt.Errorf("every interface of this machine: %w", errNotLoopback)
	}
	addrs, err := lookup(ctx, "ip", host)
	if err != nil {
		return fmt.Errorf("resolve the host: %w", err)
	}
	if len(addrs) == 0 {
		return fmt.Errorf("resolve the host: %q has no address", host)
	}
	for _, addr := range addrs {
		if !addr.IsLoopback() {
			return fmt.Errorf("%q is %s: %w", host, addr, errNotLoopback)
		}
	}
	return nil
}

// StayHere refuses the URL of something, what, that is not on this machine; "" is nothing. Its error does not quote the URL,
// which may hold a password.
func StayHere(ctx context.Context, what, address string) error {
	if address == "" {
		return nil
	}
	u, err := url.Parse(address)
	if err != nil || u.Host == "" {
		return fmt.Errorf("%s: the address is not of the form http://host:port", what)
	}
	if err := RequireLoopback(ctx, net.DefaultResolver.LookupNetIP, u.Hostname()); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	return nil
}

// LoopbackOnly is a net.Dialer.Control that sees the address actually dialled,
// whatever the name resolves to by then.
func LoopbackOnly(_, address string, _ syscall.RawConn) error {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return err
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return err
	}
	if !addr.IsLoopback() {
		return fmt.Errorf("%s: %w", addr, errNotLoopback)
	}
	return nil
}
