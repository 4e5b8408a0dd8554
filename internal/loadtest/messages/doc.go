// Package messages loads a running hub over HTTP as many tenants at once would, and tells what it took: accepted per
// second, latencies, errors, deliveries, what was lost, doubled or out of order, and what it cost the hub.
//
// It decides how tenants, channels and conversations are made for a run (through the management API, under a name of their
// own) and put to rest after it; when each message is due; and what counts as lost. Messages are posts of tenants and signed
// webhooks of providers. With a rate, messages are due at fixed instants and latency is counted from those, so that a hub
// that stalls is not spared the messages that it kept from being sent (coordinated omission); without one, each caller
// sends as soon as it has its answer. Each message carries its number in its idempotency key and comes back to the built-in
// receiver with it; a bit for each is all that is remembered, so that a long run stays small.
//
// It imports its siblings, signature (to sign webhooks) and simulate (to stay on this machine unless told otherwise).
//
// Goroutines: one for each caller, one for progress, those of the receiver; all end with [Run].
//
// On failure while it sets up, what was made is put to rest. Refusals and broken connections under load are counted, not
// fatal. When the context ends, the load does, and the report tells what was measured until then.
//
// The tests cover the arithmetic by tables and the run against a fake hub; the real one is in cmd/server's tests.
package messages
