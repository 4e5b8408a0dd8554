package cluster_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"converger/migrations/pgtest"
)

// network is three machines on a switch, as network namespaces.
type network struct {
	prefix string // of all names
	net    string // the first three bytes of addresses
}

func newNetwork(t testing.TB) *network {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("network namespaces need root")
	}
	if _, err := exec.LookPath("ip"); err != nil {
		t.Skip("network namespaces need the program ip:", err)
	}
	id := rand.IntN(200) + 20
	n := &network{prefix: fmt.Sprintf("cvg%d", id), net: fmt.Sprintf("10.99.%d", id)}
	if out, err := exec.Command("ip", "link", "add", n.prefix, "type", "bridge").CombinedOutput(); err != nil {
		t.Skipf("this system makes no bridges: %v: %s", err, out)
	}
	t.Cleanup(func() { n.ip(t, "link", "del", n.prefix) })
	n.ip(t, "link", "set", n.prefix, "up")
	for i := 1; i <= 3; i++ {
		name := n.name(i)
		n.ip(t, "netns", "add", name)
		t.Cleanup(func() { n.ip(t, "netns", "del", name) })
		n.ip(t, "link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
		n.ip(t, "link", "set", name, "master", n.prefix, "up")
		n.ip(t, "-n", name, "addr", "add", n.addr(i)+"/24", "dev", "eth0")
		n.ip(t, "-n", name, "link", "set", "eth0", "up")
		n.ip(t, "-n", name, "link", "set", "lo", "up")
	}
	return n
}

func (n *network) name(i int) string { return fmt.Sprintf("%s-%d", n.prefix, i) }
func (n *network) addr(i int) string { return fmt.Sprintf("%s.%d", n.net, i) }

func (n *network) ip(t testing.TB, args ...string) {
	t.Helper()
	if out, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		t.Errorf("ip %s: %v: %s", strings.Join(args, " "), err, out)
	}
}

// link takes a machine's cable out or plugs it in.
func (n *network) link(t testing.TB, i int, state string) { n.ip(t, "link", "set", n.name(i), state) }

// mute loses what machine i sends to machine j, and that only: frames go to an address of the switch that nobody has.
func (n *network) mute(t testing.TB, i, j int) {
	t.Helper()
	n.ip(t, "-n", n.name(i), "neigh", "replace", n.addr(j), "lladdr", "02:00:00:00:be:ef", "dev", "eth0", "nud", "permanent")
}

func (n *network) unmute(t testing.TB, i, j int) {
	t.Helper()
	n.ip(t, "-n", n.name(i), "neigh", "del", n.addr(j), "dev", "eth0")
}

// start runs a node on each machine. The database is reached through its socket, as by a network of its own.
func (n *network) start(t testing.TB, url string) []*process {
	t.Helper()
	if !strings.Contains(url, "host=%2F") && !strings.Contains(url, "host=/") {
		t.Skip("the database is not on a socket, so it can't be reached from a namespace")
	}
	var peers []string
	for i := 1; i <= 3; i++ {
		peers = append(peers, n.addr(i)+":7946")
	}
	var all []*process
	for i := 1; i <= 3; i++ {
		all = append(all, spawn(t, nodeSpec{peers[i-1], peers, url}, "ip", "netns", "exec", n.name(i)))
	}
	began := time.Now()
	for _, p := range all {
		p.await(t, "3 of 3")
	}
	t.Logf("whole %s after the start", time.Since(began))
	for _, p := range all {
		beating(t, url, p.id)
	}
	return all
}

func within(t testing.TB, limit time.Duration, what string, since time.Time) {
	t.Helper()
	if took := time.Since(since); took > limit {
		t.Errorf("%s only after %s", what, took)
	} else {
		t.Logf("%s after %s", what, took)
	}
}

func TestCableOut(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	nodes := n.start(t, pgtest.New(t))
	n.link(t, 3, "down")
	cut := time.Now()
	nodes[0].await(t, "2 of 3")
	nodes[1].await(t, "2 of 3")
	nodes[2].await(t, "1 of 3")
	within(t, 2*time.Second, "shared out", cut)
	// Longer than gossip takes to declare the other side dead, on both sides: then it never looks again by itself.
	time.Sleep(max(0, 16*time.Second-time.Since(cut)))
	for i, want := range []string{"2 of 3", "2 of 3", "1 of 3"} {
		if !strings.HasPrefix(nodes[i].view(), want) {
			t.Errorf("after 16 s node %d sees %s", i+1, nodes[i].view())
		}
	}
	n.link(t, 3, "up")
	healed := time.Now()
	for _, p := range nodes {
		p.await(t, "3 of 3")
	}
	within(t, 5*time.Second, "whole again", healed)
}

// Two that can't hear each other, and a third that hears both: to gossip all three are alive, through the third.
func TestPairCut(t *testing.T) {
	t.Parallel()
	n := newNetwork(t)
	nodes := n.start(t, pgtest.New(t))
	n.mute(t, 2, 1) // one way: 1 does not hear 2
	cut := time.Now()
	nodes[0].await(t, "2 of 3")
	within(t, 2*time.Second, "the deaf one noticed", cut)
	nodes[1].await(t, "2 of 3") // no connection lives long in one direction
	within(t, 5*time.Second, "both noticed", cut)
	// As long as it takes gossip to give up a member: what is heard one way must not come and go.
	time.Sleep(max(0, 12*time.Second-time.Since(cut)))
	if !strings.HasPrefix(nodes[2].view(), "3 of 3") {
		t.Errorf("the third sees %s", nodes[2].view())
	}
	if !strings.HasPrefix(nodes[0].view(), "2 of 3") {
		t.Errorf("after 12 s the deaf one sees %s", nodes[0].view())
	}
	n.unmute(t, 2, 1)
	healed := time.Now()
	for _, p := range nodes {
		p.await(t, "3 of 3")
	}
	within(t, 5*time.Second, "whole again", healed)
}
