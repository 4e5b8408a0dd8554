// Package channeltest is the conformance suite of provider adapters: what holds for every type, whatever its provider.
//
// A new adapter's tests call [Run] with a [Subject], and [FuzzParse] from a fuzz target. It is for tests only; it may
// import channel and fault, owns no goroutine, and fails the test it is given.
package channeltest
