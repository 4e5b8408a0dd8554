// Package inbound takes what providers and other senders post to a channel: it has the body verified over its exact bytes,
// stores it before anything else is done with it, and turns it into activities and receipts.
//
// Every event ends in a state that a person can find: processed, rejected (at least one of its items could not be used)
// or failed (unreadable, or the program could not work it); received means that a job has yet to take it. Rejected and
// failed events can be processed again ([Service.Replay]).
//
// Two ways, by the adapter's contract with its provider:
//
//   - Provider-acknowledged types (WhatsApp): the answer is 200 as soon as the raw event and its job are committed. The job
//     ([Service.Process]) parses it.
//   - The generic webhook: parsed and worked in the transaction that stores it; the answer tells what it became.
//
// Repeats are recognised by the ids that the sender gives ([channel.Message.ProviderID]), claimed in the transaction of
// the activity, never by content. A message without one is claimed under the event's own id, so that working an event a
// second time changes nothing. Locks are taken in the order of the whole program: ids, participants, conversations, lanes,
// each sorted, and all messages of an event go through one append.
//
// It may import channel, activity, delivery (receipts), tenants, fault, secrets and postgres. It owns no goroutines.
//
// On failure: without the database nothing is stored and the sender is told to repeat. An event whose work fails for
// another reason is tried again by its job and is failed, with the reason, after [Options.MaxTries].
//
// Tests use a real database, the real activity store and both adapters.
package inbound
