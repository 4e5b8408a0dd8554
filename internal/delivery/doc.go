// Package delivery decides which channels get an activity, in which order, when, how often, and what became of it.
//
// A delivery is a row for (activity, channel). A lane is the order in which a channel receives: one for each conversation,
// or one of 16 slots of an unordered channel. Order holds within an ordered lane: its first open delivery is tried until
// it has arrived or failed for good, and the others wait behind it. In a slot a delivery that waits lets the others pass.
//
// # How a delivery travels
//
// The append transaction inserts the delivery and wakes its lane ([Service.EnqueueTx]): wakes + 1, and next_at only where
// there was none, so that new messages do not cut a back-off short. While workers are free and none of the tenant's lanes
// wait, the same transaction leases the lane, and the node works it right after the commit, without a job; else the
// dispatcher is poked. The dispatcher
// ([Service.Dispatch]) hands due lanes over as jobs in turns over the tenants, within the caps of channels, tenants and
// workers; the backlog stays in the lanes table. A worker ([Service.Work]) reads token and wakes, works due deliveries for
// 5 s at most, and finishes the lane only if nobody woke it meanwhile. Lanes are read and outcomes are written in groups, as
// many as wait at the moment, each worker waiting for its own.
//
// Delivery is at least once, always under the same delivery id. What fences: an outcome counts only if the lane still has the
// worker's lease token and the delivery still has the number of attempts that the worker saw. Leases are measured by the
// database's clock, time-outs by the node's monotonic one; no wall clock of a node decides anything.
//
// # Where to
//
// An activity goes to its conversation's own channel and to the targets of the tenant's routing rules ([Rules]) with that
// channel as the source; [Service.Targets] says under which conditions. The rules come from the directory, so that the append
// makes no query for them: a change is in force on every node within a second, and on the node that made it with its answer.
// In a lane of a target the conversation's order holds as in its own channel's.
//
// # Rules of delivery
//
//   - Retries: 5 attempts by default, after attempt n a wait of base * 3^n (10 s: 30, 90, 270, 810 s), at most an hour,
//     lengthened by up to 10 % at random so that what failed together does not come back together. Retry-After lengthens a
//     wait to at most an hour and never shortens it.
//   - A suspended tenant, a channel that is inactive, paused or has hold_until in the future: its lanes are not handed over and
//     cost nothing; they go on, in order, once that ends. No attempt is used.
//   - Five attempts for a channel that fail one after the other, on one node, open its circuit for 30 s; then one lane at a
//     time goes out, and its first attempt closes the circuit or opens it again. See [Circuit], and docs/adr/0020.
//   - A deleted channel, or one that no longer sends: its open deliveries fail with channel_deleted or unsupported.
//   - 410 Gone: the delivery fails with reason gone. Nothing else is held and the channel stays as it is; a receiver that
//     answers 410 to everything so fails everything at once, visibly, until someone edits the channel.
//   - An uncertain attempt (may have arrived, a repeat would be a second message) is not repeated. A receipt settles it;
//     after 10 minutes it fails with reason uncertain. Its lane goes on at once.
//   - What has failed can be retried by hand ([Service.Retry], [Service.RetryChannel]): in its old place in its lane, with all
//     its attempts before it.
//   - An attempt that this program cut off itself, while stopping, is not counted and is made again.
//
// It may import activity, channel, tenants, ratelimit, fault, secrets and postgres. Package jobs brings the queue ([Jobs]).
//
// Goroutines: [Service.Run] owns the dispatcher's loop, two readers of lanes and two writers of outcomes; Work runs in its
// caller's.
//
// On failure: without the database nothing moves and nothing is lost. A worker that dies, or cannot record, leaves a lease
// that the dispatcher takes over after at most 45 s. A panic of an adapter fails the delivery, not the lane.
//
// Tests use a real database, an adapter made for the test and a queue in memory; package jobs tests the same over River.
package delivery
