// Package whatsappmeta is the adapter of the WhatsApp Business Cloud API (Meta). In this version it receives only.
//
// It decides: whether a request comes from Meta (X-Hub-Signature-256 over the exact bytes, with the app's secret, since
// one app signs for all its numbers), the subscription handshake, and what each message and status of a batch means.
// People are known by Meta's user_id first and by phone number second, for whoever takes a user name shows no number.
// Kinds of messages that it does not know become events that say so; items of other phone numbers and other subjects are
// ignored and stay in the raw event; an item that is broken is rejected alone.
//
// It may import channel (and its payload), signature and fault. It owns no goroutine and keeps no state. On failure: a
// body that is not a JSON object is a [channel.ParseError]; nothing else fails. Tests: the documented payloads, tables of
// broken ones, package channeltest, and a fuzz target for Parse.
package whatsappmeta
