// Command bench measures what limits cost beside other limiters of the Go world, all in one process and one run.
//
// It is a module of its own, so that the peers are no dependencies of the program. Contestants take turns in short
// rounds, so that whatever else the machine does meets all of them, and a row is the ratio of two neighbours of the same
// round: its median, with the lowest and the highest. Nothing here is a test: a row that misses its target is a result,
// and one whose rounds lie on both sides of it, far apart, is called too noisy to judge.
//
//	checks  one check of a hot key on one core and on two, of 100,000 keys in turn, and a refusal, in nanoseconds; the
//	        stores get the time passed in, as the product does once a request, the peers read their clocks as they are
//	        made to. `cluster` is one of three live nodes that report the key to each other
//	memory  bytes of a key at 1,000,000 keys, and a full collection with them
//	sync    bytes and processor time by which three nodes agree about 100,000 active keys of one of them
//	owner   a check that another node decides, over TLS on loopback, beside gubernator, which speaks plain TCP
//	http    the real program's 429 over loopback beside a bare chi handler in a process of its own that writes the same
//	        bytes; and accepted requests with limits on and off. Both need bin/server and Postgres
//
// It may import what it measures (ratelimit and its backends, cluster) and the drivers of internal/loadtest. All
// goroutines and processes end with the run. The tests cover what judges; everything else is measuring.
package main
