// Package ratelimit decides who may go on.
//
// It owns the buckets and their limits, the rules by which they admit, the keys
// of their subjects, the order in which limits are resolved, and the words and
// headers of the answer. Counters live in a Store; see the packages below this
// one.
//
// It imports nothing of ours and no third party but prometheus, through an
// injected Registerer. It owns no goroutine. A check cannot fail: stores decide
// on their own when a peer or server is gone.
//
// Tests pass time in; ratelimittest holds the suite that every Store passes.
package ratelimit
