// Package limits measures how exactly a cluster enforces a limit: it floods a limit over several nodes, counts what was
// admitted in each window, and tells by how much that missed the limit.
//
// It decides how requests arrive ([Load]), in which window one counts ([Tally]), what a run says ([Figures]), what is
// promised ([Promised]) and whether the machine was fit to judge by ([Delay]). The load goes to a route that is decided and
// answered without the database: a conversation whose id is none, which spends one of the tenant's `api_read` and is then
// a 400; a refusal is a 429.
//
// A request counts in the window in which its node has counted it, by the node's own word and clock
// (RATE_LIMIT_TELL_TIME): by the driver's clock, a millisecond at each edge of a window would look like an overshoot.
// The driver begins at the edge of a window, and leaves out the first two, in which nodes learn what is asked of the others.
//
// Accuracy is made of reports that arrive in a millisecond. On a machine whose processors are busy elsewhere they do not,
// and what is measured is the machine: then the figures are told and not judged.
//
// It imports its siblings and simulate (to stay on this machine unless told otherwise). What is pure serves `make accuracy` as well.
//
// Goroutines: for each node one that sends and as many as it has callers, one for progress; all end with [Run].
//
// On failure while it sets up, what was made is put to rest. Broken connections and answers that are neither admission nor
// refusal are counted by what they were, not fatal. When the context ends, the load does, and the report tells what was measured until then.
//
// The tests cover loads, windows, figures and verdicts by tables, and a run against fake nodes; real ones are in
// cmd/server's tests.
package limits
