// Package pgtest gives each test a database of its own with the whole schema in it. It is for tests only.
//
// It decides where the server comes from: the one that CONVERGER_TEST_DATABASE_URL names (its user may create
// databases), which `make test` sets to one private server for all test binaries through the program withpg; else a
// private server of this test binary, started at the first use. A template database is migrated once per server and
// schema, and cloned per test.
//
// It imports migrations, internal/devpg and internal/postgres.
//
// It owns no goroutine but that of a private server. A package whose tests start none of their own needs nothing more
// than calls of [Pool] or [New]; [Main] in its TestMain also removes the private server's folder at the end, which
// otherwise the next run of any test does.
//
// On failure it ends the test: a missing Postgres is no reason to skip.
package pgtest
