// Package signature signs and verifies webhooks: it decides whether the bytes
// of a body came from somebody who holds a secret.
//
// Three schemes, each with a Sign function for senders and a Verify function
// for receivers:
//
//   - Timestamped, Converger's own: X-Converger-Signature: t=<unix>,v1=<hex>
//   - Standard, Standard Webhooks 1.0.0: Webhook-Id, Webhook-Timestamp, Webhook-Signature
//   - HubSHA256, Meta's: X-Hub-Signature-256: sha256=<hex>
//
// All work on the bytes exactly as they were sent or received. Never decode
// and encode a body before verifying it: senders escape and order JSON in
// their own ways, and the result would no longer match.
//
// A verification takes every key that is valid now (the current and, during a
// rotation, the previous one) and fails closed: no header, an empty header, a
// header given twice, or no key at all is a failure. Comparison takes the same
// time wherever the first difference is.
//
// # Keys
//
// The package accepts any key of at least one byte, because receivers have to
// work with what the other side chose. Standard Webhooks asks for 24 to 64
// random bytes; Converger's own secrets are 32 random bytes. Who lets a user
// choose a secret has to enforce a minimum there.
//
// # Imports, goroutines, failures, tests
//
// A leaf: it imports the standard library only. It starts no goroutine, keeps
// no state, never reads the clock, and is safe for concurrent use. Failures
// are the Err values below, with a reason that never holds a key or the
// signature that was received. The tests use published vectors, fuzzing, and
// the reference library of Standard Webhooks as the other side.
package signature
