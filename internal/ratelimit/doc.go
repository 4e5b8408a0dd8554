// Package ratelimit decides who may go on.
//
// It owns the buckets and their limits, the rules by which they admit, the keys
// of their subjects, the order in which limits are resolved, and the words and
// headers of the answer. Counters live in a Store; see the packages below this
// one.
//
// [Login] is the throttle of sign-ins over the same counters: it reserves an
// attempt before the password is looked at and gives back what succeeds.
//
// What operators see of it (the most refused, the lately refused, the demand of the
// last hour, a forecast under another limit) is gathered from a sample of decisions,
// in bounded memory; see docs/adr/0028-watch-by-samples-and-gather.md. Package
// overview asks it of all nodes.
//
// It imports nothing of ours and no third party but prometheus, through an
// injected Registerer. It owns no goroutine. A check cannot fail: stores decide
// on their own when a peer or server is gone. An attempt to sign in may wait for
// others; only the end of its context makes it fail.
//
// Tests pass time in; ratelimittest holds the suite that every Store passes.
package ratelimit
