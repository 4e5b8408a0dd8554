package main

import (
	"strings"
	"testing"
	"time"

	"converger/internal/cluster/clustertest"
)

// Between two nodes everything takes 20 ms each way; then three packets of a hundred are lost, and as often a connection breaks,
// with what is on its way. The limit holds, nobody meets an error, and without faults all is well again.
func TestLateAndLostMessages(t *testing.T) {
	t.Parallel()
	outside := []string{clustertest.FreeAddress(t), clustertest.FreeAddress(t)}
	f := planFleet(t, 2, map[string]string{"CLUSTER_PEERS": strings.Join(outside, ",")}, func(i int) map[string]string {
		return map[string]string{"CLUSTER_ADVERTISE": outside[i]}
	})
	var links []*clustertest.Link
	for i, n := range f.nodes {
		links = append(links, clustertest.NewLink(t, outside[i], n.environ["CLUSTER_BIND"]))
	}
	f.startAll(t)
	flood, calm := f.startFlood(t), f.startCalm(t)
	flood.awaitWindows(t, 2)
	held := f.heldBack(t, flood)
	for _, l := range links {
		l.Delay(20 * time.Millisecond)
	}
	flood.awaitMore(t, 3)
	for _, l := range links {
		l.Lose(30)
	}
	flood.awaitMore(t, 4)
	lost := int64(0)
	for _, l := range links {
		l.Delay(0)
		l.Lose(0)
		lost += l.Lost()
	}
	if lost == 0 {
		t.Error("nothing was lost")
	}
	t.Logf("%d connections and packets were lost", lost)
	f.whole(t, 2)
	// A tenth of the limit, and what comes to the one while news of the other is held back by the delay, or by a new connection.
	within(t, flood, calm, held+floodLimit/5)
}
