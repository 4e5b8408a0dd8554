// Package owner counts each key at one node, its owner by rendezvous hashing, and
// asks that node whenever another is asked: exact while the cluster is healthy, at
// the price of a call between nodes. It is for limits so small that one early
// admission at every node would be too many, such as those of logins.
//
// ring.go decides who owns a key and who keeps its copy; call.go batches questions
// that come together; store.go asks and answers; copies.go keeps copies warm and
// moves keys when nodes come or go; joins.go sees to it that a join loosens nothing
// meanwhile; wire.go holds the format. Counters are those of
// ratelimit/local.
//
// It may import ratelimit, ratelimit/local and the membership in internal/cluster;
// prometheus comes through an injected Registerer. Store.Run owns one goroutine,
// for copies and moves. A question that finds others waiting may leave a goroutine
// behind that sends them; it ends when none waits, each call having a deadline.
//
// When an owner can't be asked in time, 20 ms, or half a second where the check
// guards a credential, the node decides by itself with the limit
// divided by the live nodes, rounded up, counts that by reason and says so in one
// line at the start and one at the end. No check fails, and none is admitted
// without being counted: a guard of credentials does not open. Peek returns an error
// then. A reset is taken in at each node by itself; a node that missed it hears of it
// when it is on the ring again, and its copies of before it are not believed.
//
// Test it with ratelimittest.Run over nodes in memory (every call asks another
// node), time by testing/synctest, the formats with -fuzz.
package owner
