package main

import (
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"converger/internal/cluster/clustertest"
)

// zone is a DNS server of one name, whose answer changes.
type zone struct {
	mu  sync.Mutex
	ips []string // none: it fails
}

func (z *zone) set(ips ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.ips = ips
}

func (z *zone) serve(t testing.TB, at string) {
	t.Helper()
	var lc net.ListenConfig
	pc, err := lc.ListenPacket(t.Context(), "udp", at)
	if err != nil {
		t.Skip("no DNS server for the namespaces:", err)
	}
	started := make(chan struct{})
	s := &dns.Server{PacketConn: pc, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		z.mu.Lock()
		defer z.mu.Unlock()
		a := new(dns.Msg)
		a.SetReply(q)
		if len(z.ips) == 0 {
			a.Rcode = dns.RcodeServerFailure
		} else if q.Question[0].Qtype == dns.TypeA {
			for _, ip := range z.ips {
				a.Answer = append(a.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.ParseIP(ip)})
			}
		}
		_ = w.WriteMsg(a)
	})}
	go func() { _ = s.ActivateAndServe() }()
	<-started
	t.Cleanup(func() { _ = s.Shutdown() })
}

// Three machines that find each other by a name whose answer changes, and are cut off from each other: by both ways, and by
// one. Each side enforces its share, nobody meets an error, and a healed cluster is whole again by itself.
func TestCutsBetweenMachines(t *testing.T) {
	t.Parallel()
	m := clustertest.NewNetwork(t, 3)
	m.Resolver(t, 3)
	var z zone
	z.serve(t, m.Host()+":53")
	z.set(m.Addr(98)) // where nobody is
	f := planFleet(t, 3, map[string]string{
		"CLUSTER_SECRET": testSecretKeyBase, "CLUSTER_PEERS": "", "DNS_CLUSTER_QUERY": "hub.test", "METRICS_ALLOWED_IPS": m.Host(),
	}, func(i int) map[string]string {
		return map[string]string{"LISTEN": m.Addr(i) + ":4000", "CLUSTER_BIND": m.Addr(i) + ":7946"}
	})
	if !strings.Contains(f.url, "host=%2F") && !strings.Contains(f.url, "host=/") {
		t.Skip("the database is not on a socket, so it can't be reached from a namespace")
	}
	for i, n := range f.nodes {
		n.wrap = m.Exec(i)
		n.start()
	}
	// Led astray, they find each other by their heartbeats; nothing is joined.
	const joined, astray = `converger_cluster_joins_total{result="ok"}`, `converger_cluster_joins_total{result="failed"}`
	for _, n := range f.nodes {
		n.ready(t)
		eventually(t, patience, "an attempt to join where nobody is", func() bool { return n.number(t, astray) > 0 })
	}
	f.whole(t, 3)
	if v := f.sum(t, joined); v != 0 {
		t.Errorf("%v joined, at an address where nobody is", v)
	}
	z.set(m.Addr(0), m.Addr(1), m.Addr(2))
	changed := time.Now()
	for _, n := range f.nodes {
		eventually(t, patience, "the new answer to be joined", func() bool {
			a, err := n.api.try(t.Context(), "GET", "/health/ready", "")
			return err == nil && a.status == http.StatusOK && !strings.Contains(string(a.body), "peers:") && f.sum(t, joined) > 0
		})
	}
	t.Logf("joined %s after the answer changed", time.Since(changed).Round(time.Millisecond))
	z.set() // what is joined stays so
	f.ops = management(t, f.nodes[0].program, f.url)
	flood, calm := f.startFlood(t), f.startCalm(t)
	flood.awaitWindows(t, 3)
	held := f.heldBack(t, flood)

	sees := func(i int, want string) {
		t.Helper()
		eventually(t, patience, fmt.Sprintf("node %d to see %s", i+1, want), func() bool {
			return metric(t, f.nodes[i].base, visible)+" of "+metric(t, f.nodes[i].base, "converger_cluster_alive") == want
		})
	}
	healed := func(since time.Time) {
		t.Helper()
		f.whole(t, 3)
		if took := time.Since(since); took > 10*time.Second { // 5, and what a busy machine takes
			t.Errorf("whole again only after %s", took)
		} else {
			t.Logf("whole again after %s", took.Round(time.Millisecond))
		}
	}
	pairs := [][2]int{{2, 0}, {0, 2}, {2, 1}, {1, 2}}
	for _, p := range pairs {
		m.Mute(t, p[0], p[1])
	}
	flood.excuse()
	sees(0, "2 of 3")
	sees(1, "2 of 3")
	sees(2, "1 of 3")
	eventually(t, patience, "a node that is cut off to take requests, and to say so", func() bool { // it may have started just now
		a, err := f.nodes[2].api.try(t.Context(), "GET", "/health/ready", "")
		return err == nil && a.status == http.StatusOK && strings.Contains(string(a.body), `"degraded":["peers: `)
	})
	flood.awaitMore(t, 4)
	for _, p := range pairs {
		m.Unmute(t, p[0], p[1])
	}
	healed(time.Now())

	m.Mute(t, 1, 0) // the first no longer hears the second
	flood.excuse()
	sees(0, "2 of 3")
	sees(1, "2 of 3") // no connection lives long in one direction
	if v := metric(t, f.nodes[2].base, visible); v != "3" {
		t.Errorf("the third, which hears both, sees %s", v)
	}
	flood.awaitMore(t, 2)
	m.Unmute(t, 1, 0)
	healed(time.Now())
	within(t, flood, calm, held)
}
