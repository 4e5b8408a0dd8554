// Package ratelimittest holds the suite that every ratelimit.Store passes. It is
// for tests only, imports ratelimit and nothing else of ours, and passes time in:
// a store under test must take the time of its caller.
package ratelimittest
