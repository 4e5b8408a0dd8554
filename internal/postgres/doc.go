// Package postgres opens the connection pool and reads Postgres' errors for the rest of the program.
//
// It decides how every session of the program is set up (plan cache, time zone, timeouts, UUID codec), which
// connections may stay in the pool, and which errors mean "the database cannot serve now, try later". It knows
// nothing of tables: queries live in the store.go of the package that owns the data.
//
// It is a leaf: it imports pgx and nothing of ours, and any package may import it.
//
// Goroutines: those of [pgxpool.Pool] (health check, connection set-up), which end with Pool.Close. Nothing else.
//
// On failure: [Open] fails only for a URL that cannot be parsed; an unreachable server shows at the first query, and
// the pool recovers by itself when the server is back. A connection that finds itself on a read-only server (a
// failover, a switch to maintenance) is closed at once, and a new one is accepted only from a server that takes writes.
//
// Tests run against a real server (package converger/migrations/pgtest); see the tests here for how to kill, refuse and
// demote a connection.
package postgres
