package connlimit

import (
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/ratelimit"
)

// Reason is why a connection is refused.
type Reason uint8

// Reasons, the more particular first: a client that is over its own cap is told so even if all are.
const (
	OverAddress Reason = iota // the client's address has as many as it may have
	OverTotal                 // all together have
	numReasons
)

var reasonNames = [numReasons]string{"address", "total"}

func (r Reason) String() string { return reasonNames[r] }

// Config is what a [Limiter] is made of.
type Config struct {
	PerAddress int // most connections of one client; 0: any number
	Total      int // most connections of all; 0: any number
	// Exempt tells that an address, unmapped and without a zone, may have any number, up to Total: a trusted proxy speaks for
	// many clients. It is called for each connection and must answer from memory. Optional.
	Exempt func(netip.Addr) bool
	// Answer makes the HTTP response that tells a client so, whole, header and body. It has to ask the client to close.
	Answer func(Reason) []byte

	Registerer prometheus.Registerer // optional
	Logger     *slog.Logger
}

// Limiter counts the connections of its listeners. It is safe for concurrent use.
type Limiter struct {
	Config

	mu      sync.Mutex
	open    int
	clients map[netip.Addr]int // by ratelimit.Network; no zeros
	refused [numReasons]uint64
	// What the log does not know yet.
	unsaid [numReasons]uint64
	said   time.Time

	unanswered, failures prometheus.Counter
}

// Snapshot is the state of a [Limiter] at one moment.
type Snapshot struct {
	Total     int // open connections
	Addresses int // that have them: IPv4 addresses and IPv6 /64s

	MaxPerAddress, MaxTotal int // the caps; 0: none

	RefusedAddress, RefusedTotal uint64 // since the start, because the address was at its cap, and because all were
}

// New makes a limiter. The error is of the registration of metrics.
func New(c Config) (*Limiter, error) {
	l := &Limiter{Config: c, clients: map[netip.Addr]int{}}
	return l, l.register()
}

// Snapshot returns what is open and what was refused.
func (l *Limiter) Snapshot() Snapshot {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Snapshot{
		Total: l.open, Addresses: len(l.clients), MaxPerAddress: l.PerAddress, MaxTotal: l.Total,
		RefusedAddress: l.refused[OverAddress], RefusedTotal: l.refused[OverTotal],
	}
}

// admit counts a connection of addr, or says why not. client is to be given to leave.
func (l *Limiter) admit(addr netip.Addr) (client netip.Addr, reason Reason, ok bool) {
	client = ratelimit.Network(addr)
	exempt := !addr.IsValid() || l.Exempt != nil && l.Exempt(addr)
	if exempt { // its connections are not its neighbours' in the same /64
		client = addr
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	n := l.clients[client]
	switch {
	case l.PerAddress > 0 && n >= l.PerAddress && !exempt:
		return client, OverAddress, false
	case l.Total > 0 && l.open >= l.Total:
		return client, OverTotal, false
	}
	l.open++
	l.clients[client] = n + 1
	return client, 0, true
}

// leave gives a place back.
func (l *Limiter) leave(client netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if n := l.clients[client]; n > 1 {
		l.clients[client] = n - 1
	} else {
		delete(l.clients, client)
	}
}

// sayEvery is the least time between two lines of one kind in the log.
const sayEvery = time.Second

// refuse counts a refusal, and says so now and then.
func (l *Limiter) refuse(addr netip.Addr, reason Reason) {
	now := time.Now()
	l.mu.Lock()
	l.refused[reason]++
	l.unsaid[reason]++
	if now.Sub(l.said) < sayEvery {
		l.mu.Unlock()
		return
	}
	unsaid, open, of := l.unsaid, l.open, l.clients[ratelimit.Network(addr)]
	l.unsaid, l.said = [numReasons]uint64{}, now
	l.mu.Unlock()
	l.Logger.Warn("connections are refused: if one address is your proxy, name it in TRUSTED_PROXIES; the caps are CONN_LIMIT_PER_IP and CONN_LIMIT_TOTAL",
		slog.Uint64("over_the_cap_of_an_address", unsaid[OverAddress]), slog.Uint64("over_the_cap_of_all", unsaid[OverTotal]),
		slog.String("last_address", addr.String()), slog.Int("its_connections", of), slog.Int("connections", open))
}

func (l *Limiter) register() error {
	l.unanswered = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "converger_connections_unanswered_total",
		Help: "Refused connections that were closed without waiting for their request, because too many were waited for: some saw a reset instead of the answer.",
	})
	l.failures = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "converger_connections_accept_errors_total",
		Help: "Times that a connection could not be accepted, for example for want of a file descriptor.",
	})
	if l.Registerer == nil {
		return nil
	}
	gauge := func(name, help string, labels prometheus.Labels, value func(Snapshot) int) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "converger_connections_" + name, Help: help, ConstLabels: labels},
			func() float64 { return float64(value(l.Snapshot())) })
	}
	refused := func(r Reason, value func(Snapshot) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{
			Name:        "converger_connections_refused_total",
			Help:        "Connections refused, because their address had as many as it may have, or because all had.",
			ConstLabels: prometheus.Labels{"reason": r.String()},
		}, func() float64 { return float64(value(l.Snapshot())) })
	}
	const capHelp = "The most connections of one address, and of all, at one time; 0: no cap."
	for _, c := range []prometheus.Collector{
		l.unanswered, l.failures,
		gauge("open", "Connections that are open.", nil, func(s Snapshot) int { return s.Total }),
		gauge("addresses", "Addresses that have connections open; an IPv6 /64 is one.", nil, func(s Snapshot) int { return s.Addresses }),
		gauge("max", capHelp, prometheus.Labels{"of": OverAddress.String()}, func(s Snapshot) int { return s.MaxPerAddress }),
		gauge("max", capHelp, prometheus.Labels{"of": OverTotal.String()}, func(s Snapshot) int { return s.MaxTotal }),
		refused(OverAddress, func(s Snapshot) uint64 { return s.RefusedAddress }),
		refused(OverTotal, func(s Snapshot) uint64 { return s.RefusedTotal }),
	} {
		if err := l.Registerer.Register(c); err != nil {
			return fmt.Errorf("connlimit: register metrics: %w", err)
		}
	}
	return nil
}
