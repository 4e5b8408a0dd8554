package cluster_test

import (
	"strings"
	"testing"
	"time"

	"converger/internal/cluster/clustertest"
	"converger/migrations/pgtest"
)

// onMachines runs a node on each machine. The database is reached through its socket, as by a network of its own.
func onMachines(t testing.TB, n *clustertest.Network, url string) []*process {
	t.Helper()
	if !strings.Contains(url, "host=%2F") && !strings.Contains(url, "host=/") {
		t.Skip("the database is not on a socket, so it can't be reached from a namespace")
	}
	var peers []string
	for i := range 3 {
		peers = append(peers, n.Addr(i)+":7946")
	}
	var all []*process
	for i := range 3 {
		all = append(all, spawn(t, nodeSpec{peers[i], peers, url}, n.Exec(i)...))
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
	n := clustertest.NewNetwork(t, 3)
	nodes := onMachines(t, n, pgtest.New(t))
	n.Unplug(t, 2)
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
	n.Plug(t, 2)
	healed := time.Now()
	for _, p := range nodes {
		p.await(t, "3 of 3")
	}
	within(t, 5*time.Second, "whole again", healed)
}

// Two that can't hear each other, and a third that hears both: to gossip all three are alive, through the third.
func TestPairCut(t *testing.T) {
	t.Parallel()
	n := clustertest.NewNetwork(t, 3)
	nodes := onMachines(t, n, pgtest.New(t))
	n.Mute(t, 1, 0) // one way: the first does not hear the second
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
	n.Unmute(t, 1, 0)
	healed := time.Now()
	for _, p := range nodes {
		p.await(t, "3 of 3")
	}
	within(t, 5*time.Second, "whole again", healed)
}
