// Package cluster knows the other nodes and speaks with them.
//
// It decides who is a member, who can be heard, who lives beyond a split and who is dead, what time the cluster has, and
// how bytes get from one node to another. It does not know what the bytes mean: its users register a [Handler] for each
// [Topic].
//
// # Who is there
//
// Peers are looked up in DNS or listed; a standing job joins whoever is listed and no member, so that a healed split is
// whole within five seconds. Gossip (hashicorp/memberlist) spreads who has come and who has failed. Each start of a node
// has an [ID] of its own, by which it is told apart from its predecessor at the same address. Each node keeps a connection
// to each other (gRPC, messages of plain bytes), on which it is heard at least every 100 ms and says whether it takes
// requests yet ([Node.Open]). Once a second it writes a heartbeat to the database: the witness that tells a split from a
// death. See [Standing] and the function judge, which is the whole rule. Whoever died or hangs stays in the view for operators, for
// ten minutes or until it has a successor: see [Dead]. Gossip alone would not do: a node that is alive to
// it may be unreachable from here.
//
// Gossip and connections share one port, TCP and UDP. Both are authenticated and encrypted by keys derived from the
// cluster's secret and label (docs/adr/0024-connect-nodes-by-gossip-grpc-and-a-secret.md).
//
// # What it imports
//
// Nothing of ours. memberlist and grpc are used here and nowhere else; prometheus through an injected Registerer.
//
// # Goroutines
//
// None before [Node.Run]. Run owns those of gossip and of the gRPC server, one that keeps the view, one for heartbeats, one
// that joins, and two for each peer; all have ended when it returns. Handlers run in the goroutine of a peer's stream
// (Receive) or of a call (Answer, State). Gossip's delegates copy and return. (A probe of gossip's that is under way at the end
// may outlive Run by its time-out of half a second.)
//
// # On failure
//
// Nothing blocks and nothing is repeated. A full queue, or one of a connection that broke, drops messages and counts them;
// [Peer.Session] tells users that something may be missing. A call has a deadline, and fails at once when there is no
// connection. A lookup that fails keeps the last answer. Without the database a silent peer counts as living, and the clock
// follows the members' median. A stranger is refused, counted each time and logged once in ten minutes; one of another
// label that writes heartbeats to the same database is not called, and shares limits out with this cluster.
//
// # How to test it
//
// Nodes run side by side in one process on loopback ports; those to be killed or stopped are processes made of the test
// binary; cuts and delays are made by a proxy at the advertised address, and as root between network namespaces. Pure
// rules (judge, clockFilter, advertised, finder) have tables.
package cluster
