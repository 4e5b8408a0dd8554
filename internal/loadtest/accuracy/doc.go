// Command accuracy measures how exactly a cluster keeps limits, under the loads and troubles for which docs/accuracy.md
// promises something, and writes the table into that page.
//
// It runs real nodes in one process: each with its own gossip, connections and counters of the `cluster` backend, on ports
// of loopback and over a private Postgres, as bin/server wires them. Callers ask a node's counters directly: that costs a
// tenth of HTTP, so that 20 nodes and a hundred times a limit fit into a small machine, and what is measured is the limiter.
// On three nodes limits of 100 and of 1,000 a second are flooded at the same time. The rows over HTTP start bin/server three times and use
// package limits, as `server loadtest limits` does.
//
// Troubles are made where the nodes can't tell them from real ones: connections that delay what they carry or stop carrying
// ([line]), messages that are lost before they are handed over, clocks that are off ([cluster.Config].Now). A node is killed
// by silencing it at once: its connections stop, its database is closed, nobody asks it; another one takes its place.
//
// The first row switches the rule off (plain reports every 100 ms): it must show the large overshoot that this has, or the
// measurement is not to be trusted.
//
// Each row says how long reports were on their way. When that was longer than what the promises are made for, the machine
// was busy elsewhere: the row is repeated, and if it is no better it stands in the table and is not judged.
//
// It may import devpg, postgres, migrations, its siblings hub and limits, and, because it is a cluster, internal/cluster,
// ratelimit and ratelimit/cluster.
//
// Goroutines: those of the nodes, and one for each node that asks; all end with the run. A promise that was not kept, and a
// measurement that failed, are its exit code; what was measured until then is printed, and not written.
//
// The tests run a short form of the same on three nodes, judged if the machine was fit, and cover the table and the lines.
package main
