// Package webhook is the adapter for anything that can post and receive signed JSON.
//
// It decides: which signatures prove a request (Converger's timestamped one or Standard Webhooks), what its body means,
// how an activity is posted to a receiver, and which answers and errors are worth another attempt.
//
// A body is one object or an array of objects. Each is a receipt (with status, and delivery_id or provider_message_id)
// or a message. What is wrong with one object rejects that object only.
//
// It may import channel (and its payload), signature and fault. Goroutines: those of net/http for kept connections and a
// timer for each attempt under way. On failure: an attempt always ends in a [channel.Outcome] with its cause in words; a
// body always in items or a [channel.ParseError]. Tests: receivers on loopback that misbehave, package channeltest, a fuzz
// target for Parse, a benchmark for Send.
package webhook
