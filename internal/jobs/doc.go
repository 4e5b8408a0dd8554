// Package jobs runs the background work on River, a queue in Postgres. It is the only package that knows River (package
// migrations brings its schema).
//
// It decides which queues there are and how many workers each has, how long a job may take and how often it is tried, what
// runs periodically, and how all of it stops. What a job does is decided elsewhere: lanes by package delivery, inbound
// events by whoever is set as the [InboundProcessor].
//
// Kinds and arguments of jobs are stored, and old jobs outlive a deployment: a kind is never renamed and its arguments are
// only added to.
//
//	kind               queue        tries  argument
//	lane               lanes        1      lanes, each lane_id and lease_token: the lane itself is the retry
//	inbound            inbound      10     tenant_id, event_id; one open job per event, but for runs by hand
//	ensure_partitions  maintenance  10     daily: the months ahead
//	prune              maintenance  3      hourly: keys and provider ids older than 30 days
//	give_up_uncertain  maintenance  1      every 30 s: uncertain deliveries without a receipt
//	requeue_inbound    maintenance  1      every 30 s: events stored and without a job for a minute
//	remove_sessions    maintenance  3      hourly: web sessions and sign-in links whose time is over
//
// Every job may run twice, or stop anywhere. Periodic jobs are queued by one node, the leader that River elects. Maintenance
// waits for no lock longer than a few seconds.
//
// It may import tenants, auth, channel, activity, inbound, delivery, ratelimit and postgres.
//
// A lane that an idle node has leased itself is worked there without a job ([Client.StartLanes]).
//
// Goroutines: those of River's client, one that pokes it, and one for each lane without a job, between the start and the end of [Client.Run]. They work with
// a context of their own: the end of Run's context first stops the fetching, then the waiting jobs get SoftStop to end,
// then they are cancelled and get HardStop.
//
// On failure: a job that fails is tried again or left to what it stands for; errors and panics are logged once, with kind and
// id. Without a database River reconnects by itself.
//
// Tests use a real database; [Options.InsertOnly] makes a client that only inserts.
package jobs
