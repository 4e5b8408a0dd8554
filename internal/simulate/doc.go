// Package simulate plays the parties on the other side of the hub, so that a
// user can try it, and a test can break it, without an account anywhere:
//
//   - WhatsApp sends what Meta's Cloud API sends to a whatsapp_meta channel.
//   - Webhook sends signed messages to a webhook channel.
//   - Receiver is an endpoint for the hub's deliveries; it prints, verifies and
//     can misbehave.
//
// It decides what these parties send and answer, and refuses to leave the
// machine unless told so: every target and listening address has to be
// loopback, checked by resolved address before the run and again at connect.
//
// # Imports
//
// internal/signature and the standard library. It knows the hub only through
// HTTP; only cmd/server imports it.
//
// # Goroutines
//
// Each function runs until it is done or its context ends, and leaves no
// goroutine behind. Receiver owns one HTTP server.
//
// # Failures
//
// Options that make no sense are refused before anything is sent. A post that
// is not answered as expected is printed with what to do about it, the rest is
// still sent, and the run ends with an error. Secrets never appear in the
// output or in errors, and what the other side says is printed without control
// characters.
//
// # Tests
//
// Against httptest servers that verify with internal/signature, and for the
// receiver with the reference library of Standard Webhooks as the sender.
package simulate
