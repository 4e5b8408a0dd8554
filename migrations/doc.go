// Package migrations holds the schema and brings a database to it.
//
// It decides what the schema is (NNNN_name.up.sql, in order), how several nodes that start at once stay out of each
// other's way (one advisory lock around everything), and whether a database fits this program ([Check]). River's tables
// are part of the schema: its own migrator runs after ours, under the same lock, because it takes none itself.
//
// There are no down files. A change is made in two releases, expand and contract: first add what the new program needs
// in a way that the old one does not notice, later, when no old program runs, remove what nobody reads. So the way back is
// the previous program on the newer schema, which a down file run in haste would rather break, data first. A mistake
// in a migration is mended by a further migration.
//
// Rules for a file: it runs as one transaction (Postgres treats a multi-statement message so), unless it is the one
// statement that cannot, such as CREATE INDEX CONCURRENTLY, which gets a file of its own. A statement that locks a busy
// table sets lock_timeout first. A released file is never edited.
//
// The package imports golang-migrate and River's migrator, alone in the program, and nothing of ours. It owns no
// goroutine that outlives a call.
//
// On failure: a migration that fails leaves the version marked dirty and everything after it undone; [Up] then refuses
// ([ErrDirty]) with the way out until an operator has looked. A process killed at any moment loses its lock with its
// connection, and the next one goes on.
//
// Tests run against fresh databases of a real server; they give the unexported functions small schemas of their own.
package migrations
