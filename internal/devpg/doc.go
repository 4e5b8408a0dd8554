// Package devpg runs a private Postgres server under a folder, for development and tests, with no set-up.
//
// It decides which binaries to use ([Find] tells the order), as which user the server runs, where its data lie, and that
// one folder never has two servers. A folder holds
//
//	lock           held with flock by the starter and by every process of the server; names the starter
//	pgNN/data      the data of major version NN, never touched by another major version
//	pgNN/run       the Unix socket (a path too long for one: 127.0.0.1 and a free port)
//	pgNN/password  the password of the only user, made at random, mode 0600
//	pgNN/log       the server's log of this run; log.old of the run before
//
// Postgres refuses to run as root. For root the server runs in a user namespace in which root of the machine goes by the
// name of nobody: it may use every folder that root may (a checkout under /root), and the files stay root's. Where
// namespaces are forbidden it runs as the user postgres or nobody, and if the folder is closed to that user, with its
// data under /var/lib/converger-dev. Data that exist are always used as the user that owns them.
//
// The server dies with its starter, even when that is killed with SIGKILL (Linux; elsewhere the lock shows the orphan).
//
// It is a leaf: it imports pgx and nothing of ours; cmd/server and migrations/pgtest import it.
//
// Goroutines: one per [Server], on an OS thread of its own, which waits for the process; it ends with the server.
//
// On failure: [Start] leaves no process behind, and its error carries the last lines of the log. A server that dies
// later closes [Server.Done]; it is not started again. Data half-made by an interrupted first start are made anew.
//
// Tests start real servers, as root and as an ordinary user.
package devpg
