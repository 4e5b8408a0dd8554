// Package channel keeps the tenants' channels and says what a provider adapter is.
//
// It decides: what a valid channel is; how its config and secrets are kept (sealed, bound to row and column) and shown
// (redacted); which addresses may be called ([Guard]); and the contract between adapters and the packages that receive
// and deliver. The adapters stand in folders of their own: echo, webhook, whatsappinfobip, whatsappmeta (with package whatsapp for
// what the last two have in common). Package payload reads bodies from
// outside, package channeltest is the conformance suite of adapters.
//
// It may import tenants, signature, secrets, fault and postgres.
//
// Goroutines: [Store.Current] reads in one that ends within five seconds; a [Guard]'s client has those of net/http, which
// end when its idle connections do. Nothing else.
//
// On failure: database errors are returned as they are, wrapped; a row that does not open (another key) is an error and
// never an empty secret; a change that fails changes nothing. Whatever a provider sends or answers gives a value of the
// types here, never a panic.
//
// Tests: parsing and the guard are pure or on loopback; the store needs a real Postgres (converger/migrations/pgtest). A
// new adapter runs package channeltest.
package channel
