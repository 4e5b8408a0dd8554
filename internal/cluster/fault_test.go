package cluster_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/jackc/pgx/v5"
	"github.com/miekg/dns"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"converger/internal/cluster"
	"converger/internal/cluster/clustertest"
	"converger/migrations/pgtest"
)

// Not parallel: it counts goroutines.
func TestNothingIsLeftRunning(t *testing.T) {
	before := goleak.IgnoreCurrent()
	addresses := ports(t, 2)
	nodes := runAll(t, addresses, nil)
	awaitWhole(t, nodes...)
	lonely := run(t, config(clustertest.FreeAddress(t), addresses[0], clustertest.FreeAddress(t)))
	lonely.await(t, "the others", func(v *cluster.View) bool { return v.Visible == 3 })
	for _, n := range append(nodes, lonely) {
		n.stop()
	}
	// A probe of gossip's that was under way ends with its own time-out.
	err := goleak.Find(before)
	for deadline := time.Now().Add(patience); err != nil && time.Now().Before(deadline); {
		err = goleak.Find(before)
	}
	if err != nil {
		t.Error(err)
	}
}

func standing(id cluster.ID, want cluster.Standing) func(*cluster.View) bool {
	return func(v *cluster.View) bool {
		return slices.ContainsFunc(v.Peers, func(p cluster.Peer) bool { return p.ID == id && p.Standing == want })
	}
}

func alone(v *cluster.View) bool { return len(v.Peers) == 0 && v.Alive == 1 }

func TestKilledAndRestartedAtTheSameAddress(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	addresses := ports(t, 2)
	c := config(addresses[0], addresses...)
	c.Database = heartbeats(t, url)
	node := run(t, c)
	spec := nodeSpec{addresses[1], addresses, url}
	first := spawn(t, spec)
	node.await(t, "the process", standing(first.id, cluster.Visible))
	beating(t, url, first.id)

	// Killed: first its share stays its own, then the others take it.
	first.kill()
	killed := time.Now()
	v := node.await(t, "the killed one silent", standing(first.id, cluster.Split))
	if v.Visible != 1 || v.Alive != 2 {
		t.Errorf("the share is %d of %d", v.Visible, v.Alive)
	}
	node.await(t, "the killed one dead", alone)
	if took := time.Since(killed); took < 2*time.Second {
		t.Errorf("declared dead after %s, though its heartbeat was fresh", took)
	} else {
		t.Logf("declared dead after %s", took)
	}

	// Back at the same address, as another, and while gossip still believes in the first.
	second := spawn(t, spec)
	began := time.Now()
	if second.id == first.id {
		t.Fatal("the restarted node is the same member")
	}
	node.await(t, "the second alone", func(v *cluster.View) bool { return len(v.Peers) == 1 && standing(second.id, cluster.Visible)(v) })
	t.Logf("the restarted node was seen after %s", time.Since(began))

	// Killed and restarted at once: the first one's row is fresh, but somebody else answers at its address.
	beating(t, url, second.id)
	second.kill()
	began = time.Now()
	third := spawn(t, spec)
	node.await(t, "the third alone", func(v *cluster.View) bool {
		return v.Alive == 2 && standing(third.id, cluster.Visible)(v)
	})
	if took := time.Since(began); took > 2500*time.Millisecond { // before the first one's row is stale
		t.Errorf("killed and restarted, it took its predecessor's place only after %s", took)
	} else {
		t.Logf("killed and restarted, it took its predecessor's place after %s", took)
	}
	// Gossip believes in the second for some seconds more; nobody is to look into why it can't be reached.
	for gone := time.After(7*time.Second - time.Since(began)); ; {
		select {
		case <-gone:
			return
		case <-time.After(100 * time.Millisecond):
		}
		if log := node.log.String(); strings.Contains(log, "can't be reached") {
			t.Fatalf("a warning of a dead member:\n%s", log)
		}
	}
}

// beating waits until the node's heartbeat is in the database.
func beating(t testing.TB, url string, id cluster.ID) {
	t.Helper()
	pool := heartbeats(t, url)
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		var n int
		if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM cluster_nodes WHERE id = $1`, id.String()).Scan(&n); err != nil {
			t.Fatal(err)
		}
		if n == 1 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("no heartbeat of %s", id)
		}
	}
}

func TestStoppedForFiveSeconds(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	addresses := ports(t, 2)
	c := config(addresses[0], addresses...)
	c.Database = heartbeats(t, url)
	node := run(t, c)
	other := spawn(t, nodeSpec{addresses[1], addresses, url})
	node.await(t, "the process", standing(other.id, cluster.Visible))
	beating(t, url, other.id)
	other.signal(syscall.SIGSTOP)
	stopped := time.Now()
	node.await(t, "it silent", standing(other.id, cluster.Split))
	node.await(t, "it dead", alone)
	missed := func(v *cluster.View) bool {
		return len(v.Dead) == 1 && v.Dead[0].ID == other.id && v.Dead[0].Address == addresses[1] && v.Dead[0].Silent >= 3*time.Second
	}
	node.await(t, "it missed", missed)
	if err := node.Degraded(); err == nil || !strings.Contains(err.Error(), addresses[1]+") is dead or hangs: its last heartbeat was ") {
		t.Errorf("degraded: %v", err)
	}
	time.Sleep(max(0, 5*time.Second-time.Since(stopped))) // the pause is the test
	newcomer := clustertest.FreeAddress(t)
	late := config(newcomer, append(addresses, newcomer)...)
	late.Database = heartbeats(t, url)
	third := run(t, late)
	third.await(t, "it missed by one that has never seen it", missed)
	third.stop()
	node.await(t, "nobody missed who said that it leaves", func(v *cluster.View) bool { return alone(v) && missed(v) })
	other.signal(syscall.SIGCONT)
	resumed := time.Now()
	node.await(t, "it back, under its own name", func(v *cluster.View) bool {
		return v.Visible == 2 && v.Alive == 2 && standing(other.id, cluster.Visible)(v) && v.Peers[0].Connected && len(v.Dead) == 0
	})
	if took := time.Since(resumed); took > 5*time.Second {
		t.Errorf("whole again after %s", took)
	} else {
		t.Logf("whole again after %s", took)
	}
}

// pair is two nodes that reach each other through links only.
type pair struct {
	a, b running
	to   [2]*clustertest.Link // a, b
}

// cutAB blocks what a sends to b.
func (p pair) cutAB() { p.to[1].In.Block(); p.to[0].Out.Block() }

// cutBA blocks what b sends to a.
func (p pair) cutBA() { p.to[0].In.Block(); p.to[1].Out.Block() }

func (p pair) heal() {
	for _, x := range p.to {
		x.In.Open()
		x.Out.Open()
	}
}

func newPair(t testing.TB, url string) pair {
	t.Helper()
	var p pair
	binds := ports(t, 2)
	outside := ports(t, 2)
	for i := range p.to {
		p.to[i] = clustertest.NewLink(t, outside[i], binds[i])
	}
	var nodes []running
	for i, b := range binds {
		c := config(b, outside...)
		c.Advertise = outside[i]
		if url != "" {
			c.Database = heartbeats(t, url)
		}
		nodes = append(nodes, run(t, c))
	}
	p.a, p.b = nodes[0], nodes[1]
	awaitWhole(t, nodes...)
	if url != "" {
		beating(t, url, p.a.ID())
		beating(t, url, p.b.ID())
	}
	return p
}

func halves(v *cluster.View) bool { return v.Visible == 1 && v.Alive == 2 }

// Each side of a split enforces its share, the sum of which is the limit, until the split is healed; then it is whole within five
// seconds, however long it took.
func TestSplitAndHeal(t *testing.T) {
	t.Parallel()
	for name, cut := range map[string]func(pair){
		"both ways": func(p pair) { p.cutAB(); p.cutBA() },
		"one way":   pair.cutAB,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newPair(t, pgtest.New(t))
			cut(p)
			began := time.Now()
			p.b.await(t, "a split", halves)
			t.Logf("the deaf side noticed after %s", time.Since(began))
			p.a.await(t, "a split", halves)
			t.Logf("both sides after %s", time.Since(began))
			if err := p.a.Degraded(); err == nil || !strings.Contains(err.Error(), "none seen") {
				t.Errorf("degraded: %v", err)
			}
			// The cut itself: long enough for gossip to give up on the other side, and for the kernel to repeat at long intervals.
			time.Sleep(max(0, 12*time.Second-time.Since(began)))
			if v := p.a.View(); !halves(v) {
				t.Errorf("after 12 s: %s", show(v))
			}
			p.heal()
			healed := time.Now()
			awaitWhole(t, p.a, p.b)
			if took := time.Since(healed); took > 5*time.Second {
				t.Errorf("whole again only after %s", took)
			} else {
				t.Logf("whole again after %s", took)
			}
			if err := p.a.Degraded(); err != nil {
				t.Errorf("after the heal: %v", err)
			}
		})
	}
}

// With gossip alone both sides give each other up, and nothing but the standing job brings them together again.
func TestHealByJoining(t *testing.T) {
	t.Parallel()
	p := newPair(t, "")
	p.cutAB()
	p.cutBA()
	p.a.await(t, "nobody", alone)
	p.b.await(t, "nobody", alone)
	p.heal()
	healed := time.Now()
	awaitWhole(t, p.a, p.b)
	if took := time.Since(healed); took > 5*time.Second {
		t.Errorf("whole again only after %s", took)
	} else {
		t.Logf("whole again after %s", took)
	}
}

func TestLatencyIsMeasured(t *testing.T) {
	t.Parallel()
	p := newPair(t, "")
	const delay = 40 * time.Millisecond
	for _, x := range p.to {
		x.Delay(delay)
	}
	p.a.await(t, "the delay", func(v *cluster.View) bool {
		l := v.Peers[0].Latency
		return l > delay*9/10 && l < 2*delay
	})
}

// The share stays when the database, the witness, goes away too.
func TestDatabaseGone(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	addresses := ports(t, 2)
	c := config(addresses[0], addresses...)
	pool := heartbeats(t, url)
	c.Database = pool
	node := run(t, c)
	other := spawn(t, nodeSpec{addresses[1], addresses, url})
	node.await(t, "the process, by the witness's word", func(v *cluster.View) bool { return v.Witness && standing(other.id, cluster.Visible)(v) })
	pool.Close()
	node.await(t, "the witness gone", func(v *cluster.View) bool { return !v.Witness && v.Visible == 2 })
	if err := node.Degraded(); err == nil || !strings.Contains(err.Error(), "heartbeat") {
		t.Errorf("degraded: %v", err)
	}
	if err := node.Ready(); err != nil {
		t.Errorf("ready: %v", err)
	}
	other.kill()
	node.await(t, "a split", halves)
	time.Sleep(5 * time.Second) // longer than a heartbeat speaks for its node
	if v := node.View(); !halves(v) {
		t.Errorf("a silent node was declared dead without a witness: %s", show(v))
	}
}

func TestClocks(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	addresses := ports(t, 3)
	offsets := []time.Duration{0, time.Hour, -400 * time.Millisecond}
	nodes := runAll(t, addresses, func(i int, c *cluster.Config) {
		c.Now = func() int64 { return time.Now().Add(offsets[i]).UnixNano() }
		if i < 2 { // the third has only the others to go by
			c.Database = heartbeats(t, url)
		}
	})
	awaitWhole(t, nodes...)
	near := func(d time.Duration) bool { return max(d, -d) < 20*time.Millisecond }
	for i, n := range nodes {
		// What the third sees of the others' clocks passes through them, so wait.
		n.await(t, "its clock corrected", func(*cluster.View) bool { return near(n.Offset() + offsets[i]) })
		if d := time.Duration(n.Now() - time.Now().UnixNano()); !near(d) {
			t.Errorf("node %d: %s off", i, d)
		}
		n.await(t, "its skew", func(v *cluster.View) bool { return near(v.Skew - offsets[i]) })
	}
	nodes[0].await(t, "the skew of the second", func(v *cluster.View) bool {
		return slices.ContainsFunc(v.Peers, func(p cluster.Peer) bool { return p.ID == nodes[1].ID() && near(p.Skew-time.Hour) })
	})
	if err := nodes[1].Degraded(); err == nil || !strings.Contains(err.Error(), "1h0m0s off") {
		t.Errorf("degraded: %v", err)
	}
}

func TestStrangersAreRefused(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*cluster.Config){
		"another secret": func(c *cluster.Config) { c.Secret = []byte("another") },
		"another label":  func(c *cluster.Config) { c.Label = "staging" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			addresses := ports(t, 3)
			registry := prometheus.NewPedanticRegistry()
			nodes := runAll(t, addresses[:2], func(i int, c *cluster.Config) {
				c.Peers = addresses
				if i == 0 {
					c.Registerer = registry
				}
			})
			awaitWhole(t, nodes...)
			// A member stops, and a stranger gets its address; it has the others on its list, and they have it.
			nodes[1].stop()
			c := config(addresses[1], addresses...)
			change(&c)
			stranger := run(t, c)
			for refused := 0.0; refused == 0; time.Sleep(50 * time.Millisecond) { // the pace of looking
				refused = value(t, registry, "converger_cluster_refused_total")
			}
			<-stranger.Settled()
			if err := stranger.Ready(); err == nil || !strings.Contains(err.Error(), "none seen of 2 listed") {
				t.Errorf("the stranger is ready: %v", err)
			}
			for _, n := range []running{nodes[0], stranger} {
				if v := n.View(); !alone(v) {
					t.Errorf("a stranger is a member: %s", show(v))
				}
			}
			for refused := 0.0; refused < 5; time.Sleep(50 * time.Millisecond) { // the pace of looking; it knocks each second
				refused = value(t, registry, "converger_cluster_refused_total")
			}
			warnings := 0
			for line := range strings.Lines(nodes[0].log.String()) {
				if strings.Contains(line, "level=WARN") && strings.Contains(line, "CLUSTER_SECRET or CLUSTER_LABEL") {
					warnings++
				}
			}
			if warnings < 1 || warnings > 2 { // by gossip, and by connections
				t.Errorf("%d lines in the log for one stranger:\n%s", warnings, nodes[0].log)
			}
		})
	}
}

// Clusters of two labels that use one database share limits out between them, and each says with whom.
func TestAnotherClusterOnTheDatabase(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	start := func(label string) running {
		c := config(clustertest.FreeAddress(t))
		c.Label, c.Peers, c.Database = label, []string{c.Bind}, heartbeats(t, url)
		return run(t, c)
	}
	a, b := start("test"), start("staging")
	for _, n := range []running{a, b} {
		n.await(t, "the other's heartbeat", halves)
	}
	for other, node := range map[string]running{"staging": a, "test": b} {
		err := node.Degraded()
		if err == nil || !strings.Contains(err.Error(), "1 nodes of another cluster (CLUSTER_LABEL "+other) || strings.Contains(err.Error(), "living nodes can be heard") {
			t.Errorf("degraded: %v", err)
		}
		if err := node.Ready(); err != nil { // it expects nobody
			t.Errorf("ready: %v", err)
		}
	}
	const line = "a node of another cluster uses this database"
	for _, n := range []running{a, b} { // it is written after the view
		n.await(t, "a line in the log", func(*cluster.View) bool { return strings.Contains(n.log.String(), line) })
	}
	b.stop()
	a.await(t, "itself alone", alone)
	if said := strings.Count(a.log.String(), line); said != 1 {
		t.Errorf("said %d times:\n%s", said, a.log)
	}
	if err := a.Degraded(); err != nil {
		t.Errorf("degraded: %v", err)
	}
}

func value(t testing.TB, g prometheus.Gatherer, name string) float64 {
	t.Helper()
	families, err := g.Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() == name {
			for _, m := range f.GetMetric() {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
			return sum
		}
	}
	t.Fatalf("no metric %s", name)
	return 0
}

// zone is a DNS server whose answer changes.
type zone struct {
	mu   sync.Mutex
	ips  []string
	fail bool
}

func (z *zone) set(fail bool, ips ...string) {
	z.mu.Lock()
	defer z.mu.Unlock()
	z.ips, z.fail = ips, fail
}

// resolver starts the server and returns a resolver that asks nobody else.
func (z *zone) resolver(t testing.TB) *net.Resolver {
	t.Helper()
	pc, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	started := make(chan struct{})
	s := &dns.Server{PacketConn: pc, NotifyStartedFunc: func() { close(started) }, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		z.mu.Lock()
		defer z.mu.Unlock()
		m := new(dns.Msg)
		m.SetReply(q)
		if z.fail {
			m.Rcode = dns.RcodeServerFailure
		} else if q.Question[0].Qtype == dns.TypeA {
			for _, ip := range z.ips {
				m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.ParseIP(ip)})
			}
		}
		_ = w.WriteMsg(m)
	})}
	go func() { _ = s.ActivateAndServe() }()
	<-started
	t.Cleanup(func() { _ = s.Shutdown() })
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "udp", pc.LocalAddr().String())
	}}
}

func TestDNSAnswerThatChanges(t *testing.T) {
	t.Parallel()
	const first, second = "127.0.0.2", "127.0.0.3"
	if l, err := net.Listen("tcp", second+":0"); err != nil {
		t.Skip("this system has one loopback address only:", err)
	} else {
		l.Close()
	}
	port := netip.MustParseAddrPort(clustertest.FreeAddress(t)).Port()
	var z zone
	resolver := z.resolver(t)
	start := func(ip string) running {
		c := config(netip.AddrPortFrom(netip.MustParseAddr(ip), port).String())
		c.Peers, c.Query, c.Resolver = nil, "hub.test", resolver
		return run(t, c)
	}
	// A node that is on its own, as its own list says, is ready at once.
	z.set(false, first)
	a := start(first)
	<-a.Settled()
	if err := errors.Join(a.Ready(), a.Degraded()); err != nil {
		t.Errorf("alone by its list: %v", err)
	}
	// One that can't look anything up expects peers.
	z.set(true)
	b := start(second)
	<-b.Settled()
	if err := b.Ready(); err == nil || !strings.Contains(err.Error(), "looking them up fails") {
		t.Errorf("without an answer: %v", err)
	}
	z.set(false, "127.0.0.9", second) // a wrong address first
	changed := time.Now()
	time.Sleep(500 * time.Millisecond) // what must not happen nobody tells of: time for it to show
	if v := a.View(); !alone(v) {
		t.Errorf("found without being listed: %s", show(v))
	}
	z.set(false, first, second)
	awaitWhole(t, a, b)
	t.Logf("found %s after the first change", time.Since(changed))
	z.set(true)                         // what is joined stays so
	time.Sleep(1500 * time.Millisecond) // more than one lookup that fails, and longer than a member may be silent
	if v := a.View(); v.Visible != 2 {
		t.Errorf("a failing lookup lost a member: %s", show(v))
	}
}

// A node that misses its peers is unready for ten seconds only: a blocked port must not become an outage.
func TestLonelyNodeBecomesReady(t *testing.T) {
	t.Parallel()
	n := run(t, config(clustertest.FreeAddress(t), clustertest.FreeAddress(t)))
	began := time.Now()
	<-n.Settled()
	if took := time.Since(began); took > 4*time.Second {
		t.Errorf("settled after %s", took)
	}
	for err := n.Ready(); err != nil; err = n.Ready() {
		if !strings.Contains(err.Error(), "expected peers: none seen of 1 listed") {
			t.Fatal(err)
		}
		if time.Since(began) > 12*time.Second {
			t.Fatal("still not ready")
		}
		time.Sleep(50 * time.Millisecond) // the pace of looking: nobody tells when it becomes ready
	}
	if took := time.Since(began); took < 9*time.Second {
		t.Errorf("ready after %s", took)
	}
	if err := n.Degraded(); err == nil {
		t.Error("it does not say that it misses its peers")
	}
}

// All are killed and started again at once: nobody is taken for dead by those that come back, and nobody is remembered who
// does not.
func TestMassRestart(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	addresses := ports(t, 3)
	start := func() (all []*process) {
		for _, a := range addresses {
			all = append(all, spawn(t, nodeSpec{a, addresses, url}))
		}
		return all
	}
	nodes := start()
	for range 3 {
		for _, p := range nodes {
			p.await(t, "3 of 3")
			beating(t, url, p.id)
		}
		for _, p := range nodes {
			p.kill()
		}
		began := time.Now()
		nodes = start()
		for _, p := range nodes {
			p.await(t, "3 of 3")
		}
		t.Logf("whole again after %s", time.Since(began))
	}
}

// A node that advertises an address where it can't be reached is told so, and does not come and go.
func TestUnreachableAddress(t *testing.T) {
	t.Parallel()
	addresses := ports(t, 2)
	wrong := clustertest.FreeAddress(t)
	nodes := runAll(t, addresses, func(i int, c *cluster.Config) {
		if i == 1 {
			c.Advertise = wrong
		}
	})
	a, b := nodes[0], nodes[1]
	a.await(t, "the other, by its own calls", standing(b.ID(), cluster.Visible))
	for err := a.Degraded(); err == nil || !strings.Contains(err.Error(), "can be heard and not reached at the address that they advertise"); err = a.Degraded() {
		if v := a.View(); v.Visible != 2 {
			t.Fatalf("it went away: %s", show(v))
		}
		select {
		case <-t.Context().Done():
		case <-time.After(100 * time.Millisecond):
		}
	}
	a.await(t, "a warning", func(*cluster.View) bool {
		return strings.Contains(a.log.String(), "can't be reached at the address that it advertises")
	})
	if log := a.log.String(); !strings.Contains(log, wrong) || strings.Contains(log, "is gone") {
		t.Errorf("the log does not name %s, or the node came and went", wrong)
	}
}

func TestIPv6(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "[::1]:0")
	if err != nil {
		t.Skip("this system has no IPv6 loopback:", err)
	}
	l.Close()
	var addresses []string
	for _, a := range ports(t, 2) {
		addresses = append(addresses, strings.Replace(a, "127.0.0.1", "[::1]", 1))
	}
	awaitWhole(t, runAll(t, addresses, nil)...)
}

// Bound to all addresses it advertises one that the others can use.
func TestBoundToAllAddresses(t *testing.T) {
	t.Parallel()
	address := clustertest.FreeAddress(t)
	c := config(address, address)
	c.Bind = strings.TrimPrefix(c.Bind, "127.0.0.1")
	all := run(t, c)
	other := run(t, config(clustertest.FreeAddress(t), address))
	awaitWhole(t, all, other)
	if err := all.Degraded(); err != nil {
		t.Errorf("its own address counts as a peer that is missing: %v", err)
	}
}

// The row of a node comes when it takes requests and goes when it stops; those of nodes that were killed long ago are swept.
func TestHeartbeatRow(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	pool := heartbeats(t, url)
	const old, older = "00000000000000aa", "00000000000000bb"
	for id, age := range map[string]string{old: "30 seconds", older: "2 hours"} {
		if _, err := pool.Exec(t.Context(), `INSERT INTO cluster_nodes (id, label, name, address, version, started_at, seen_at)
			VALUES ($1, 'test', '', '127.0.0.1:1', '', now(), clock_timestamp() - $2::text::interval)`, id, age); err != nil {
			t.Fatal(err)
		}
	}
	address := clustertest.FreeAddress(t)
	c := config(address, address)
	c.Database = heartbeats(t, url)
	n := run(t, c)
	beating(t, url, n.ID())
	if v := n.View(); !alone(v) || !v.Witness {
		t.Errorf("it sees %s", show(v))
	}
	type row struct{ ID, Label, Name, Address, Version string }
	read := func() []row {
		t.Helper()
		rows, err := pool.Query(t.Context(), `SELECT id, label, name, address, version FROM cluster_nodes WHERE started_at <= now() ORDER BY id`)
		if err != nil {
			t.Fatal(err)
		}
		all, err := pgx.CollectRows(rows, pgx.RowToStructByPos[row])
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	kept := row{old, "test", "", "127.0.0.1:1", ""}
	if diff := cmp.Diff([]row{kept, {n.ID().String(), "test", c.NodeName, address, "test"}}, read(), cmpopts.SortSlices(func(a, b row) bool { return a.ID < b.ID })); diff != "" {
		t.Error(diff)
	}
	n.stop()
	if diff := cmp.Diff([]row{kept}, read()); diff != "" {
		t.Errorf("after its stop:\n%s", diff)
	}
}
