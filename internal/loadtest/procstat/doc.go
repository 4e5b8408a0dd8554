// Package procstat tells who used the processors of this machine: the load driver, the hub, Postgres, or strangers. It reads
// Linux' /proc; elsewhere nothing is known, which is no error.
//
// It imports the standard library only and owns no goroutines. The tests read their own process. [Waits] has a loop that its owner runs.
package procstat
