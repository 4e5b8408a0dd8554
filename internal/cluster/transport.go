package cluster

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"
)

// transport is the node's one port: gossip's packets and streams, and the connections between nodes, which are told apart
// by their first byte. An operator has one number to open.
type transport struct {
	*memberlist.NetTransport
	port   int
	gossip chan net.Conn
	rpc    chan net.Conn
	ctx    context.Context // ends when the transport shuts down
	cancel context.CancelFunc
	slots  chan struct{} // connections whose first byte has not come
	wg     sync.WaitGroup
}

const (
	// tlsHandshake is the first byte of a TLS connection (RFC 8446, section 5.1: content type 22). Gossip's streams begin with
	// the mark of a label, 244.
	tlsHandshake = 22
	firstByteIn  = 3 * time.Second
	maxUnknown   = 256
)

// openTransport listens on TCP and UDP. An invalid host is all addresses.
func openTransport(host netip.Addr, port int, logger *log.Logger) (*transport, error) {
	addr := ""
	if host.IsValid() {
		addr = host.String()
	}
	var nt *memberlist.NetTransport
	var err error
	// A port that is free for TCP may be taken for UDP.
	for range 10 {
		nt, err = memberlist.NewNetTransport(&memberlist.NetTransportConfig{BindAddrs: []string{addr}, BindPort: port, Logger: logger})
		if err == nil || port != 0 {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("cluster: %w", err)
	}
	t := &transport{NetTransport: nt, port: nt.GetAutoBindPort(), gossip: make(chan net.Conn), rpc: make(chan net.Conn),
		slots: make(chan struct{}, maxUnknown)}
	t.ctx, t.cancel = context.WithCancel(context.Background())
	t.wg.Go(t.pump)
	return t, nil
}

// pump never waits for a connection to say what it is.
func (t *transport) pump() {
	for {
		select {
		case <-t.ctx.Done():
			return
		case conn := <-t.NetTransport.StreamCh():
			select {
			case t.slots <- struct{}{}:
				t.wg.Go(func() { t.sort(conn) })
			default: // somebody holds them open and says nothing
				conn.Close()
			}
		}
	}
}

// sort hands a connection to whom it is for.
func (t *transport) sort(conn net.Conn) {
	stop := context.AfterFunc(t.ctx, func() { conn.Close() })
	var first [1]byte
	_ = conn.SetReadDeadline(time.Now().Add(firstByteIn))
	_, err := conn.Read(first[:])
	<-t.slots
	_ = conn.SetReadDeadline(time.Time{})
	if !stop() || err != nil {
		conn.Close()
		return
	}
	to := t.gossip
	if first[0] == tlsHandshake {
		to = t.rpc
	}
	select {
	case to <- &begun{Conn: conn, first: first[:]}:
	case <-t.ctx.Done():
		conn.Close()
	}
}

// StreamCh implements [memberlist.Transport].
func (t *transport) StreamCh() <-chan net.Conn { return t.gossip }

// Shutdown implements [memberlist.Transport].
func (t *transport) Shutdown() error {
	err := t.NetTransport.Shutdown() // needs the pump until it is over
	t.cancel()
	t.wg.Wait()
	return err
}

// listener makes the node-to-node connections a net.Listener. Its end is not the transport's.
func (t *transport) listener() net.Listener {
	ctx, cancel := context.WithCancel(t.ctx)
	return rpcListener{t, ctx, cancel}
}

type rpcListener struct {
	t      *transport
	ctx    context.Context
	cancel context.CancelFunc
}

// Accept implements [net.Listener].
func (l rpcListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.t.rpc:
		return conn, nil
	case <-l.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Close implements [net.Listener].
func (l rpcListener) Close() error {
	l.cancel()
	return nil
}

// Addr implements [net.Listener].
func (l rpcListener) Addr() net.Addr { return &net.TCPAddr{Port: l.t.port} }

// begun is a connection whose first byte was read already.
type begun struct {
	net.Conn
	first []byte
}

// Read implements [net.Conn].
func (b *begun) Read(p []byte) (int, error) {
	if len(b.first) > 0 && len(p) > 0 {
		n := copy(p, b.first)
		b.first = b.first[n:]
		return n, nil
	}
	return b.Conn.Read(p)
}

// localAddresses lists the addresses of this machine's interfaces that are up.
func localAddresses() ([]netip.Addr, error) {
	interfaces, err := net.Interfaces()
	if err != nil {
		return nil, err
	}
	var all []netip.Addr
	for _, i := range interfaces {
		if i.Flags&net.FlagUp == 0 {
			continue
		}
		addrs, err := i.Addrs()
		if err != nil {
			continue // it went away
		}
		for _, a := range addrs {
			if p, err := netip.ParsePrefix(a.String()); err == nil {
				all = append(all, p.Addr().Unmap())
			}
		}
	}
	return all, nil
}

var errNoAddress = errors.New("cluster: no address of this machine can be advertised to the others; set CLUSTER_ADVERTISE")

// advertised chooses the address that the others are told: one that discovery lists, since there it is known to be right;
// else a private one, else any that is routed, IPv4 first; loopback only if all the listed peers are there.
func advertised(local, listed []netip.Addr) (netip.Addr, error) {
	best, rank := netip.Addr{}, 0
	for _, a := range local {
		r := 0
		switch is := func(b netip.Addr) bool { return a == b.WithZone("") }; {
		case a.IsLinkLocalUnicast(), a.IsMulticast(), a.IsUnspecified():
		case containsFunc(listed, is):
			r = 5
		case a.IsLoopback():
		case a.IsPrivate() && a.Is4():
			r = 4
		case a.Is4():
			r = 3
		case a.IsPrivate():
			r = 2
		default:
			r = 1
		}
		if r > rank {
			best, rank = a, r
		}
	}
	if rank == 0 {
		return best, fmt.Errorf("%w (found: %v)", errNoAddress, local)
	}
	return best, nil
}

func containsFunc(list []netip.Addr, is func(netip.Addr) bool) bool {
	for _, a := range list {
		if is(a) {
			return true
		}
	}
	return false
}
