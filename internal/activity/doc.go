// Package activity keeps participants, conversations and their activities, and is the one way into them: [Store.Append].
//
// It decides what a valid activity is ([Validate]), which number it gets, what repeats an idempotency key, and when a
// conversation takes no more. It does not decide who may write (internal/http), which channels get a delivery
// ([Targets]) or how it gets there ([Enqueuer]); both are asked inside the activity's transaction.
//
// A file that comes with an activity is an [Upload]: its row is written in the activity's transaction, its bytes are a
// matter of package upload.
//
// It imports tenants, channel, fault and postgres. Its rules:
//
//   - Append shares transactions: the callers of a node are gathered, without waiting for more, into batches of five
//     round trips each (BEGIN with keys, locks, numbers and rows; lanes and deliveries; jobs; COMMIT). The answer, the
//     broadcast and the waking of workers come after the commit.
//   - The row of a conversation is locked from the numbering to the commit. So seq has no gap, and readers see the
//     activities of a conversation in the order of seq.
//   - An idempotency key belongs to (tenant, conversation, caller) and is claimed in the activity's transaction. On one
//     node a key is in one batch at a time; between nodes the second waits, in the database, for the first one's commit.
//   - Locks are taken in this order: participant, keys in their order, conversations by id, lanes (by the Enqueuer).
//
// Goroutines: [Store.Run] owns one for each flusher and at most four for conversations that others hold; it returns when
// all have ended. Constructors start none.
//
// On failure: an item's own trouble (closed, unknown, key reused, locked for too long) is its own result. A batch that
// fails as a whole is written again item by item; items of a conversation that some other transaction holds wait aside,
// so that nobody waits with them. While the database is away items fail at once or within the batch
// time-out, with errors for which [postgres.IsUnavailable] is true; nothing needs a restart. A connection lost during
// COMMIT is [ErrUnknownOutcome]: only a repeat with a key is safe.
//
// Tests run against a real server (package converger/migrations/pgtest), several stores on one database as several
// nodes; the queue and the validator have tests of their own without one.
package activity
