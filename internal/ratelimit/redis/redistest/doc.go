// Package redistest runs private Redis servers for tests: on loopback, in a folder of the test's own, ended with it. It
// finds redis-server where scripts/fetch-redis looks; without one a test is skipped, and with CONVERGER_REDIS=required,
// which continuous integration sets, it fails.
//
// It imports nothing of ours. A server has one goroutine, which waits for its process.
package redistest
