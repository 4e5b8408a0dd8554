// Command pathbench measures the message path of the real program beside what its machine can do at best, in one run.
//
// It starts a private Postgres with its default settings and fsync on, and `bin/server serve` as a child process with all
// limits on (only their numbers are large), and posts through the HTTP API as tenants do, one kept connection for each
// caller. In turns with it, on the same server, it runs the floors: pgbench inserting single rows of 300 bytes, and River
// working jobs that do nothing. A rate alone says little on a shared machine; the ratio of two neighbours of the same round
// says how much the hub costs. The table at the end gives the median of the rounds.
//
// Driver, hub, receiver and Postgres share the processors, so the driver speaks the small HTTP/1.1 of package wire,
// which costs a fraction of net/http's; the progress lines say who used how much of the processors.
//
//	accepted, with delivery   201s a second; the channels are on hold, so that deliveries are queued but not sent
//	accepted, without         the same on channels that only receive
//	backlog                   what was queued is let go; until the database has recorded every delivery as sent
//	accept and deliver        the lower of the rates accepted and received within the time
//	idle                      from before a post is written until its first attempt has reached the receiver
//	neighbour                 the same, before, while and after another tenant has many deliveries queued to a slow endpoint
//	kill                      SIGKILL of the hub under load, restart: what was acknowledged must be listed, once, and arrive
//
// Missed targets are a result: the exit code is 0 unless the measurement itself failed.
//
// It may import devpg, postgres, migrations and its siblings hub, procstat and wire; River is used for its floor only.
//
// Goroutines: one for each caller and each connection of the receiver; all end with the run. On failure and on a signal
// the hub, pgbench and Postgres are stopped and the folder is removed; the last lines of the hub's log are in the error.
//
// The tests cover what is pure (medians, percentiles, the table, reading pgbench) and the load against a fake hub.
package main
