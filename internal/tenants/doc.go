// Package tenants knows who may use the hub: tenants, their API keys and limit overrides, operator tokens, and the ranges of
// addresses that may not or are not counted. It keeps the audit log, and the directory: what a request is judged by before any database work.
//
// It decides how keys look ([ParseKey]) and when they are usable; what a change of configuration is ([BumpTx] first, the
// change, [AuditTx], one transaction) and how it reaches every node ([Directory]). It does not decide what a limit
// override may say (package ratelimit) nor what a channel is (package channel); the directory holds of a channel only
// what is needed ahead of the database, and of routing rules (package delivery) only where they lead.
//
// It may import fault, secrets and postgres; it is a leaf to everything else.
//
// Goroutines: [Directory.Run] and one more that listens for notifications; both end with Run's context, before Run
// returns. Everything else runs in its caller's goroutine.
//
// On failure: a Store method returns an error and has changed nothing. The directory keeps its last good set when the
// database cannot be read, tells its age ([Directory.State], metrics), and catches up by itself.
//
// Tests need a real Postgres (converger/migrations/pgtest): one test per store method with another tenant's id, and the
// directory against changes, outages and restores. The key format and the index are pure.
package tenants
