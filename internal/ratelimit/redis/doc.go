// Package redis counts at a Redis server, version 7 or newer, or a Redis Cluster: exact over all nodes that use it, at
// the price of a call ahead of each request. It is for installations that have a Redis anyway.
package redis
