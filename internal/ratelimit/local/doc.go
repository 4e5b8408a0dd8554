// Package local keeps the limiter's counters in this node's memory: exact on one
// node, without a lock or an allocation on the path of a check.
//
// It decides where a counter lives, and makes check and spend one atomic step.
// The rules themselves are those of package ratelimit, the only one of ours it
// imports; prometheus comes through an injected Registerer. It owns no
// goroutine and makes no I/O, so that nothing in it can fail; when more subjects
// are alive than MaxKeys, further ones share hashed overflow counters, which
// refuse too much rather than too little.
//
// table.go holds the memory (find, insert, grow, recycle), store.go the spending,
// resets.go what was reset lately, as a version by which backends over several nodes tell
// what they hear of before it, peers.go the seam by which backends over several nodes stand on these counters.
// Test it with ratelimittest.Run and go test -race; -bench shows the cost.
package local
