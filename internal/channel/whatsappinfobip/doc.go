// Package whatsappinfobip is the adapter of WhatsApp by way of Infobip. In this version it receives only.
//
// It decides: whether a request comes from Infobip, and what each message, delivery report and seen report of a batch
// means. People are known by Meta's user id where Infobip passes it on, and by phone number.
//
// # Who is posting
//
// Infobip signs nothing. What it can do is post to an address that nobody else knows (secret_path, on unless it is switched
// off), log in with a user and a password (basic_user), and send a header (header_name). A request must bring every proof
// that the channel's config names. A relay that signs may stand between: a request with the generic X-Converger-Signature,
// made with the channel's secret, needs no other proof, for it covers the body and the time, and the others do not.
//
//	a request's proofs                           require_signature true   false
//	all that are configured, or the signature    taken                    taken
//	one of them wrong                            refused                  refused
//	one of them missing, none wrong              refused                  taken, with a warning in the log
//	signature of the old form, without a time    refused                  taken, with a warning in the log
//
// With require_signature a config that names no proof can't be saved. The address changes with the channel's secret; the
// old one works as long as the old secret does. For the others there are previous_basic_password and
// previous_header_value.
//
// # Rules of the package
//
// It may import channel (and its payload and whatsapp), signature and fault. It owns no goroutine and keeps no state. On
// failure: a body that is not a JSON object is a [channel.ParseError]; an item that is broken is rejected alone; nothing
// else fails. Tests: the documented payloads, tables of broken ones and of proofs, package channeltest, and a fuzz target
// for Parse.
package whatsappinfobip
