// Package redis counts at a Redis server, version 7 or newer, or a Redis Cluster: exact over all nodes that use it, at
// the price of a call ahead of each request. It is for installations that have a Redis anyway.
//
// url.go reads the address; the .lua files are the scripts, one for each algorithm, and script.go sends them; store.go
// asks and turns answers into decisions by the rules of package ratelimit; shadow.go is what a node knows of the budgets
// for when Redis is away; breaker.go decides when not to ask any more; health.go tries again, tells Redis what was
// admitted without it, and knows how many nodes live; metrics.go holds the series and the two log lines of an outage.
//
// It may import ratelimit and the Redis client, which no other package uses; prometheus comes through an injected
// Registerer. Store.Run owns one goroutine. The client dials in goroutines of its own, each for a second at most, and
// looks for a server that refuses connections once a second.
//
// A check waits for Redis no longer than 50 ms, waiting for a connection included. When there is no answer the node
// decides by itself with the limit divided by the live nodes, rounded up, counts that by reason and says so in one line
// at the start and one at the end. What it had been admitted in the window counts against its share, and so does its
// share of what it last heard that all were. As long as no node had more than its share before the failure, or the
// others heard of it, all of them together admit no more than the limit, in that window and over the return of Redis,
// be it with its data or without: what was admitted without it, and what it lost, is brought there before it is believed
// again. docs/redis.md states the bound. No check fails, and none is admitted without being counted: a guard of
// credentials does not open. Peek and Reset return an error then.
//
// Test it on the servers of redistest: ratelimittest.Run with the caller's time in place of the server's, the scripts
// against the rules in Go with random policies, outages under load with several stores as nodes. What a node does alone
// passes ratelimittest as well.
package redis
