package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// machines are network namespaces on a switch, at which this process has an address too: it reaches every one, whatever they
// can't say to each other.
type machines struct {
	name, net string // the start of all names, and the first three bytes of addresses
}

func newMachines(t testing.TB, n int) *machines {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the program ip:", err)
	}
	id := rand.IntN(200) + 20
	m := &machines{fmt.Sprintf("cvp%d", id), fmt.Sprintf("10.98.%d", id)}
	if out, err := exec.Command("ip", "link", "add", m.name, "type", "bridge").CombinedOutput(); err != nil { //nolint:noctx // at once
		t.Skipf("this system makes no bridges: %v: %s", err, out)
	}
	t.Cleanup(func() { m.ip(t, "link", "del", m.name) })
	m.ip(t, "link", "set", m.name, "up")
	m.ip(t, "addr", "add", m.host()+"/24", "dev", m.name)
	for i := range n {
		space := m.space(i)
		m.ip(t, "netns", "add", space)
		t.Cleanup(func() { m.ip(t, "netns", "del", space) })
		m.ip(t, "link", "add", space, "type", "veth", "peer", "name", "eth0", "netns", space)
		m.ip(t, "link", "set", space, "master", m.name, "up")
		m.ip(t, "-n", space, "addr", "add", m.addr(i)+"/24", "dev", "eth0")
		m.ip(t, "-n", space, "link", "set", "eth0", "up")
		m.ip(t, "-n", space, "link", "set", "lo", "up")
		// ip netns exec puts these files in place of those of /etc.
		etc := filepath.Join("/etc/netns", space)
		if err := os.MkdirAll(etc, 0o755); err != nil {
			t.Skip("a namespace needs a resolv.conf of its own:", err)
		}
		t.Cleanup(func() { _ = os.RemoveAll(etc); _ = os.Remove(filepath.Dir(etc)) }) // the folder goes with the last
		if err := os.WriteFile(filepath.Join(etc, "resolv.conf"), []byte("nameserver "+m.host()+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

func (m *machines) space(i int) string { return fmt.Sprintf("%s-%d", m.name, i) }
func (m *machines) host() string       { return m.net + ".254" }
func (m *machines) addr(i int) string  { return fmt.Sprintf("%s.%d", m.net, i+1) }

func (m *machines) ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil { //nolint:noctx // at once
		t.Errorf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// mute loses what machine i sends to machine j, and that only: frames go to an address of the switch that nobody has.
func (m *machines) mute(t testing.TB, i, j int) {
	t.Helper()
	m.ip(t, "-n", m.space(i), "neigh", "replace", m.addr(j), "lladdr", "02:00:00:00:be:ef", "dev", "eth0", "nud", "permanent")
}

func (m *machines) unmute(t testing.TB, i, j int) {
	t.Helper()
	m.ip(t, "-n", m.space(i), "neigh", "del", m.addr(j), "dev", "eth0")
}

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
	m := newMachines(t, 3)
	var z zone
	z.serve(t, m.host()+":53")
	z.set(m.addr(98)) // where nobody is
	f := planFleet(t, 3, map[string]string{
		"CLUSTER_SECRET": testSecretKeyBase, "CLUSTER_PEERS": "", "DNS_CLUSTER_QUERY": "hub.test", "METRICS_ALLOWED_IPS": m.host(),
	}, func(i int) map[string]string {
		return map[string]string{"LISTEN": m.addr(i) + ":4000", "CLUSTER_BIND": m.addr(i) + ":7946"}
	})
	if !strings.Contains(f.url, "host=%2F") && !strings.Contains(f.url, "host=/") {
		t.Skip("the database is not on a socket, so it can't be reached from a namespace")
	}
	for i, n := range f.nodes {
		n.wrap = []string{"ip", "netns", "exec", m.space(i)}
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
	z.set(m.addr(0), m.addr(1), m.addr(2))
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
		m.mute(t, p[0], p[1])
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
		m.unmute(t, p[0], p[1])
	}
	healed(time.Now())

	m.mute(t, 1, 0) // the first no longer hears the second
	flood.excuse()
	sees(0, "2 of 3")
	sees(1, "2 of 3") // no connection lives long in one direction
	if v := metric(t, f.nodes[2].base, visible); v != "3" {
		t.Errorf("the third, which hears both, sees %s", v)
	}
	flood.awaitMore(t, 2)
	m.unmute(t, 1, 0)
	healed(time.Now())
	within(t, flood, calm, held)
}
