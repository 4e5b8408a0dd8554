// Package cluster counts limits over the nodes of a cluster: every node decides in
// its own memory, without a network hop, and reports what it has admitted to the
// others, at regular times and, near a limit, at once.
//
// rule.go decides how much the others must be expected to have spent and when they
// must be told; register.go how messages merge, whatever order they come in;
// entry.go where what was said of a key is kept; store.go answers checks, on top of
// the counters of ratelimit/local; report.go sends and forgets; receive.go takes in,
// hands what is known to nodes that join, and asks for it; wire.go holds the format.
//
// It may import ratelimit, ratelimit/local and the membership in internal/cluster;
// prometheus comes through an injected Registerer. Store.Run owns three goroutines,
// one that reports, one that asks peers for their counts when a connection was made
// anew, and one that asks for those of a key whose policy has changed; messages are taken in by the goroutines of the node's connections.
//
// Nothing fails a check. A message that is lost leaves the others with an older
// picture until the next one; a connection that breaks has both sides tell and ask
// everything again; a node that dies leaves its counts behind until their windows
// end; a reset that it missed is told to a node that is heard again, and until it has taken
// that in, what it says of before does not count; in a split each side enforces its share of every limit (or, if so
// configured, the whole); a store that is full counts strangers together, as local
// does, over all nodes.
//
// Test the rule with table and property tests, the merge laws with rapid, the
// format with go test -fuzz=FuzzReceive, accuracy in simulated time on the real
// stores (sim_test.go: no sockets, no goroutines, seconds), callers and reporters
// side by side with go test -race; -bench compares a check with that of local.
package cluster
