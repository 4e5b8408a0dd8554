package delivery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/tenants"
)

// Times: everything that decides is compared by the database's clock; the program passes and reads spans, in milliseconds.
//
// Plans: they are cached for all parameters and may have been made while the tables were empty. Where a plain join could
// then become a hash join that reads whole partitions later on, a LATERAL subquery with a LIMIT leaves only the index; and
// where a group of rows comes in as arrays, a LIMIT of their number makes the planner, who does not know it, expect one row.

// enqueue: new lanes and woken lanes, in the caller's order, which is that of (channel, conversation); then the deliveries.
// A lane that was idle may be leased at once ($11), within what channel and tenant have left. The caps are exact but for
// transactions that run at the same moment.
const queryEnqueue = `
WITH offer AS MATERIALIZED (
    SELECT w.tenant_id, w.id, w.channel_id, w.key, w.ord, CASE WHEN $11::boolean AND EXISTS (
            SELECT FROM channels c JOIN tenants t ON t.id = c.tenant_id
            WHERE c.tenant_id = w.tenant_id AND c.id = w.channel_id
                AND c.status = 'active' AND c.circuit_state = 'closed' AND c.deleted_at IS NULL
                AND coalesce(c.hold_until <= now(), true) AND t.status = 'active'
                AND w.nth <= c.max_in_flight - (SELECT count(*) FROM lanes l
                    WHERE l.tenant_id = w.tenant_id AND l.channel_id = w.channel_id AND l.lease_token IS NOT NULL)
                AND w.ord <= t.max_in_flight - (SELECT count(*) FROM lanes l
                    WHERE l.tenant_id = w.tenant_id AND l.lease_token IS NOT NULL)
        ) THEN $12::uuid END AS token
    FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::integer[])
        WITH ORDINALITY AS w (tenant_id, id, channel_id, key, nth, ord)
), lane AS (
    INSERT INTO lanes AS l (tenant_id, id, channel_id, conversation_id, next_at, wakes, lease_token, lease_until)
    SELECT tenant_id, id, channel_id, key, now(), 1, token,
        CASE WHEN token IS NOT NULL THEN now() + $13::bigint * interval '1 millisecond' END
    FROM offer ORDER BY ord
    ON CONFLICT (channel_id, conversation_id) DO UPDATE SET
        wakes = l.wakes + 1,
        next_at = coalesce(l.next_at, excluded.next_at),
        lease_token = CASE WHEN l.lease_token IS NULL AND l.next_at IS NULL THEN excluded.lease_token ELSE l.lease_token END,
        lease_until = CASE WHEN l.lease_token IS NULL AND l.next_at IS NULL THEN excluded.lease_until ELSE l.lease_until END
    RETURNING l.id, l.channel_id, l.conversation_id, l.lease_token
), delivery AS (
    INSERT INTO deliveries (tenant_id, id, activity_id, channel_id, lane_id, seq)
    SELECT d.tenant_id, d.id, d.activity_id, d.channel_id, lane.id, d.seq
    FROM unnest($6::uuid[], $7::uuid[], $8::uuid[], $9::uuid[], $14::uuid[], $10::bigint[])
        AS d (tenant_id, id, activity_id, channel_id, key, seq)
    JOIN lane ON lane.channel_id = d.channel_id AND lane.conversation_id = d.key
)
SELECT id FROM lane WHERE lease_token = $12::uuid`

func enqueueTx(ctx context.Context, tx pgx.Tx, w wakeup, handover bool, token uuid.UUID, lease time.Duration) ([]uuid.UUID, error) {
	n := len(w.lanes)
	laneTenants, laneIDs, laneChannels, laneKeys := make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n)
	nth := make([]int32, n)
	for i, l := range w.lanes {
		laneTenants[i], laneIDs[i], laneChannels[i], laneKeys[i], nth[i] = l.tenant, newID(), l.channel, l.key, int32(l.nth)
	}
	n = len(w.deliveries)
	tenantIDs, ids, activities, channels, keys := make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n), make([]uuid.UUID, n)
	seqs := make([]int64, n)
	for i, d := range w.deliveries {
		tenantIDs[i], ids[i], activities[i], channels[i], keys[i], seqs[i] = d.TenantID, newID(), d.ActivityID, d.ChannelID, d.key, d.seq
	}
	rows, err := tx.Query(ctx, queryEnqueue, laneTenants, laneIDs, laneChannels, laneKeys, nth,
		tenantIDs, ids, activities, channels, seqs, handover, token, lease.Milliseconds(), keys)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
}

// Lanes as workers read them, with their first open deliveries: of a conversation all, due or not, for the first one that
// must wait ends the turn; of a slot those that are due. Lane and deliveries are of one snapshot, so that wakes counts every
// delivery that is not among them.
const queryLanes = `
SELECT r.ord, l.tenant_id, l.channel_id, l.conversation_id, l.wakes, extract(epoch FROM l.lease_until - now())::float8,
    c.type, c.mode, c.version, c.deleted_at IS NOT NULL, c.circuit_state = 'open', c.circuit_changed_at,
    t.status <> 'active' OR c.deleted_at IS NULL
        AND (c.status <> 'active' OR c.circuit_state = 'paused' OR coalesce(c.hold_until > now(), false)),
    d.id, d.attempts, greatest(extract(epoch FROM d.next_at - now()), 0)::float8,
    a.id, a.conversation_id, a.seq, a.type, a.sender, a.text, a.attachments, a.metadata, a.idempotency_key, a.reply_to_id,
    a.edited_at, a.deleted_at, a.inserted_at
FROM (SELECT * FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS u (lane_id, token, ord) LIMIT $3) r
JOIN lanes l ON l.id = r.lane_id AND l.lease_token = r.token AND l.lease_until > now()
JOIN channels c ON c.tenant_id = l.tenant_id AND c.id = l.channel_id
JOIN tenants t ON t.id = l.tenant_id
LEFT JOIN LATERAL (
    SELECT p.tenant_id, p.id, p.activity_id, p.attempts, p.next_at, p.seq FROM deliveries p
    WHERE p.lane_id = l.id AND p.status = 'pending'
        AND (p.next_at <= now() OR l.conversation_id >= '00000000-0000-0001-0000-000000000000')
    ORDER BY p.seq LIMIT $4
) d ON true
LEFT JOIN LATERAL (SELECT * FROM activities x WHERE x.tenant_id = d.tenant_id AND x.id = d.activity_id LIMIT 1) a ON true
ORDER BY r.ord, d.seq`

// lane is what a worker knows of a lane it holds.
type lane struct {
	job      LaneJob
	tenant   tenants.ID
	channel  uuid.UUID
	key      uuid.UUID
	wakes    int64
	read     time.Time // when the worker asked for what stands here, by the monotonic clock
	deadline time.Time // when the lease ends, by the same
	typ      channel.Type
	mode     channel.Mode
	version  int64 // of the channel
	deleted  bool  // the channel is
	held     bool  // tenant suspended, channel inactive, paused or on hold: the dispatcher keeps the lane until that ends
	open     []open
	full     bool // there may be more than open

	probe        bool       // the channel's circuit is open and lets this lane through to see
	circuitSince *time.Time // when the circuit changed last, nil: never
}

func (l *lane) since() time.Time {
	if l.circuitSince == nil {
		return time.Time{}
	}
	return *l.circuitSince
}

func (l *lane) ordered() bool { return !isSlot(l.key) }

func (l *lane) laneKey() laneKey { return laneKey{l.channel, l.key} }

// open is a pending delivery.
type open struct {
	id       uuid.UUID
	attempts int
	wait     time.Duration // until it is due, 0 when it is
	activity activity.Activity
}

// readLanes reads the lanes of a group.
func (s *Service) readLanes(ctx context.Context, group []*reading) error {
	lanes, tokens := make([]uuid.UUID, len(group)), make([]uuid.UUID, len(group))
	for i, r := range group {
		lanes[i], tokens[i] = r.job.LaneID, r.job.LeaseToken
	}
	rows, err := s.pool.Query(ctx, queryLanes, lanes, tokens, len(group), readAhead)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var (
			ord           int64
			l             lane
			left          float64
			id, aid, conv *uuid.UUID
			attempts      *int
			wait          *float64
			seq           *int64
			typ, sender   *string
			inserted      *time.Time
			a             activity.Activity
		)
		if err := rows.Scan(&ord, &l.tenant, &l.channel, &l.key, &l.wakes, &left,
			&l.typ, &l.mode, &l.version, &l.deleted, &l.probe, &l.circuitSince, &l.held, &id, &attempts, &wait, &aid, &conv, &seq, &typ, &sender,
			&a.Text, &a.Attachments, &a.Metadata, &a.IdempotencyKey, &a.ReplyToID, &a.EditedAt, &a.DeletedAt, &inserted); err != nil {
			return err
		}
		r := group[ord-1]
		if r.lane == nil {
			l.job, l.read, l.deadline = r.job, r.asked, r.asked.Add(seconds(left))
			r.lane = &l
		}
		if id == nil {
			continue // the lane has nothing to do
		}
		a.TenantID, a.ID, a.ConversationID, a.Seq, a.Type, a.Sender, a.InsertedAt = l.tenant, *aid, *conv, *seq, *typ, *sender, *inserted
		r.lane.open = append(r.lane.open, open{id: *id, attempts: *attempts, wait: seconds(*wait), activity: a})
		r.lane.full = len(r.lane.open) == readAhead
	}
	return rows.Err()
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// When the first open delivery of a slot is due that readLanes did not return; read after the lane's wakes.
const queryNextInSlot = `
SELECT extract(epoch FROM min(next_at) - now())::float8 FROM deliveries WHERE lane_id = $1 AND status = 'pending'`

// nextInSlot returns how long until the slot has work; false when nothing is open.
func (s *Service) nextInSlot(ctx context.Context, laneID uuid.UUID) (time.Duration, bool, error) {
	var in *float64
	if err := s.pool.QueryRow(ctx, queryNextInSlot, laneID).Scan(&in); err != nil || in == nil {
		return 0, false, err
	}
	return max(0, seconds(*in)), true, nil
}

// Outcomes of a group. An attempt is recorded even when it comes too late to count. It counts when the lane is still the
// worker's and nobody else has recorded that attempt; a receipt that was faster than the outcome is not taken back.
const queryOutcomes = `
WITH o AS MATERIALIZED (
    SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::uuid[], $6::uuid[], $7::uuid[],
        $8::integer[], $9::text[], $10::text[], $11::integer[], $12::text[], $13::text[], $14::bigint[], $15::integer[],
        $16::text[], $17::text[], $18::bigint[], $19::text[])
    AS o (tenant_id, attempt_id, activity_id, delivery_id, channel_id, lane_id, token,
        number, outcome, attempt_reason, status_code, error, response, age_ms, duration_ms,
        status, reason, delay_ms, provider_id)
    LIMIT $20
), attempt AS (
    INSERT INTO attempts (tenant_id, id, activity_id, delivery_id, number, outcome, reason, status_code, error, response,
        started_at, duration_ms)
    SELECT tenant_id, attempt_id, activity_id, delivery_id, number, outcome, attempt_reason, status_code, error, response,
        now() - age_ms * interval '1 millisecond', duration_ms
    FROM o ON CONFLICT DO NOTHING
), named AS (
    INSERT INTO provider_messages (tenant_id, channel_id, direction, provider_id, activity_id, delivery_id)
    SELECT tenant_id, channel_id, 'out', provider_id, activity_id, delivery_id
    FROM o WHERE provider_id IS NOT NULL ON CONFLICT DO NOTHING
)
UPDATE deliveries d SET
    attempts = o.number,
    status = CASE WHEN d.status = 'pending' THEN o.status ELSE d.status END,
    reason = CASE WHEN d.status = 'pending' THEN o.reason ELSE d.reason END,
    last_error = CASE WHEN d.status = 'pending' THEN o.error ELSE d.last_error END,
    next_at = now() + o.delay_ms * interval '1 millisecond',
    sent_at = CASE WHEN o.outcome = 'sent' THEN coalesce(d.sent_at, now()) ELSE d.sent_at END,
    provider_message_id = coalesce(o.provider_id, d.provider_message_id),
    updated_at = now()
FROM o JOIN lanes l ON l.id = o.lane_id AND l.lease_token = o.token
WHERE d.tenant_id = o.tenant_id AND d.id = o.delivery_id AND d.activity_id = o.activity_id AND d.attempts = o.number - 1
RETURNING d.id`

// The lanes of a group whose work is done, but for those that were woken since they were read. Who holds a lane's lock is
// waking it, in a transaction that the group need not wait for.
const queryEndTurns = `
UPDATE lanes l SET lease_token = NULL, lease_until = NULL, next_at = now() + s.delay_ms * interval '1 millisecond'
FROM (
    SELECT x.id, e.delay_ms
    FROM (SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[], $4::bigint[]) AS u (lane_id, token, delay_ms, wakes) LIMIT $5) e
    CROSS JOIN LATERAL (
        SELECT id FROM lanes WHERE id = e.lane_id AND lease_token = e.token AND wakes = e.wakes
        FOR NO KEY UPDATE SKIP LOCKED) x
) s
WHERE l.id = s.id
RETURNING l.id`

// The lanes of a group that are given back with work left, in the order in which EnqueueTx locks them.
const queryGiveBack = `
UPDATE lanes l SET lease_token = NULL, lease_until = NULL, next_at = now() + s.delay_ms * interval '1 millisecond'
FROM (
    SELECT x.id, e.delay_ms
    FROM (SELECT * FROM unnest($1::uuid[], $2::uuid[], $3::bigint[]) AS u (lane_id, token, delay_ms) LIMIT $4) e
    CROSS JOIN LATERAL (SELECT id FROM lanes WHERE id = e.lane_id AND lease_token = e.token FOR NO KEY UPDATE) x
) s
WHERE l.id = s.id
RETURNING l.id`

// storeOutcomes writes a group in one transaction and notes in each what came of it.
func (s *Service) storeOutcomes(ctx context.Context, group []*outcome) error {
	var (
		tenantIDs, attemptIDs, activities, ids, channels, lanes, tokens []uuid.UUID
		numbers, durations                                              []int32
		codes                                                           []*int32
		outcomes, attemptReasons, errs, responses, statuses             []*string
		reasons, providers                                              []*string
		ages, delays                                                    []int64
	)
	var ends, backs []*outcome
	for _, o := range group {
		if a := o.attempt; a != nil {
			tenantIDs, attemptIDs, activities = append(tenantIDs, o.lane.tenant), append(attemptIDs, a.id), append(activities, a.activityID)
			ids, channels = append(ids, a.deliveryID), append(channels, o.lane.channel)
			lanes, tokens = append(lanes, o.lane.job.LaneID), append(tokens, o.lane.job.LeaseToken)
			numbers = append(numbers, int32(a.number))
			outcomes, attemptReasons = append(outcomes, text(string(a.outcome.Kind))), append(attemptReasons, text(a.outcome.Reason))
			codes = append(codes, number(a.outcome.StatusCode))
			errs, responses = append(errs, text(a.outcome.Error)), append(responses, text(a.outcome.Response))
			ages, durations = append(ages, time.Since(a.started).Milliseconds()), append(durations, int32(a.took.Milliseconds()))
			statuses, reasons = append(statuses, text(string(a.status))), append(reasons, text(a.reason))
			delays = append(delays, a.delay.Milliseconds())
			providers = append(providers, text(a.outcome.ProviderMessageID))
		}
		switch {
		case o.end == nil:
		case o.end.wakes == anyWakes:
			backs = append(backs, o)
		default:
			ends = append(ends, o)
		}
	}
	batch := &pgx.Batch{}
	counted, ended := map[uuid.UUID]bool{}, map[uuid.UUID]bool{}
	collect := func(into map[uuid.UUID]bool) func(pgx.Rows) error {
		return func(rows pgx.Rows) error {
			ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
			for _, id := range ids {
				into[id] = true
			}
			return err
		}
	}
	if len(ids) > 0 {
		batch.Queue(queryOutcomes, tenantIDs, attemptIDs, activities, ids, channels, lanes, tokens,
			numbers, outcomes, attemptReasons, codes, errs, responses, ages, durations, statuses, reasons, delays, providers, len(ids),
		).Query(collect(counted))
	}
	if len(ends) > 0 {
		lanes, tokens, delays := ending(ends)
		wakes := make([]int64, len(ends))
		for i, o := range ends {
			wakes[i] = o.end.wakes
		}
		batch.Queue(queryEndTurns, lanes, tokens, delays, wakes, len(ends)).Query(collect(ended))
	}
	if len(backs) > 0 {
		slices.SortFunc(backs, func(a, b *outcome) int { return a.lane.laneKey().compare(b.lane.laneKey()) })
		lanes, tokens, delays := ending(backs)
		batch.Queue(queryGiveBack, lanes, tokens, delays, len(backs)).Query(collect(ended))
	}
	// Statements that are sent together without BEGIN are one transaction.
	if err := s.pool.SendBatch(ctx, batch).Close(); err != nil {
		return err
	}
	for _, o := range group {
		o.counted = o.attempt != nil && counted[o.attempt.deliveryID]
		o.ended = o.end != nil && ended[o.lane.job.LaneID]
	}
	return nil
}

// ending makes columns of outcomes that end turns.
func ending(ends []*outcome) (lanes, tokens []uuid.UUID, delays []*int64) {
	for _, o := range ends {
		lanes, tokens = append(lanes, o.lane.job.LaneID), append(tokens, o.lane.job.LeaseToken)
		delays = append(delays, o.end.delayMS())
	}
	return lanes, tokens, delays
}

// number makes NULL of 0.
func number(n int) *int32 {
	if n == 0 {
		return nil
	}
	i := int32(n)
	return &i
}

// text makes NULL of "".
func text(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// Open deliveries of a lane that can never be made, a thousand at a time.
const queryFailLane = `
UPDATE deliveries d SET status = 'failed', reason = $3, last_error = $4, updated_at = now()
FROM lanes l
WHERE l.id = $1 AND l.lease_token = $2
    AND (d.tenant_id, d.id, d.activity_id) IN (SELECT x.tenant_id, x.id, x.activity_id FROM deliveries x
        WHERE x.lane_id = $1 AND x.status = 'pending' ORDER BY x.seq LIMIT 1000)`

func (s *Service) failLane(ctx context.Context, job LaneJob, reason, detail string) (failed int64, err error) {
	for {
		tag, err := s.pool.Exec(ctx, queryFailLane, job.LaneID, job.LeaseToken, reason, detail)
		if err != nil {
			return failed, fmt.Errorf("fail the deliveries of a lane: %w", err)
		}
		failed += tag.RowsAffected()
		if tag.RowsAffected() < 1000 {
			return failed, nil
		}
	}
}

// ready lists, for each channel that has lanes waiting, the first of them: one index probe for each channel. Of a channel whose
// circuit is open one lane at a time is let through once its cooldown is over.
const withReady = `
WITH RECURSIVE ready AS (
    (SELECT tenant_id, channel_id, next_at FROM lanes
     WHERE lease_token IS NULL AND next_at IS NOT NULL ORDER BY tenant_id, channel_id, next_at LIMIT 1)
    UNION ALL
    SELECT n.tenant_id, n.channel_id, n.next_at FROM ready r CROSS JOIN LATERAL (
        SELECT tenant_id, channel_id, next_at FROM lanes
        WHERE lease_token IS NULL AND next_at IS NOT NULL AND (tenant_id, channel_id) > (r.tenant_id, r.channel_id)
        ORDER BY tenant_id, channel_id, next_at LIMIT 1) n
), candidate AS (
    SELECT r.tenant_id, r.channel_id, t.max_in_flight AS tenant_max,
        CASE WHEN c.circuit_state = 'closed' OR c.deleted_at IS NOT NULL THEN c.max_in_flight ELSE 1 END AS max_in_flight,
        greatest(r.next_at, CASE WHEN c.deleted_at IS NULL THEN c.hold_until END) AS at
    FROM ready r
    JOIN channels c ON c.tenant_id = r.tenant_id AND c.id = r.channel_id
    JOIN tenants t ON t.id = r.tenant_id
    WHERE t.status = 'active' AND (c.status = 'active' AND c.circuit_state <> 'paused' OR c.deleted_at IS NOT NULL)
)`

const queryFirstReadyAllTenants = withReady + `
SELECT extract(epoch FROM min(at) - now())::float8 FROM candidate`

// firstReadyAllTenants returns how long until a lane may be handed over, 0 or less for now: since when. False when none waits.
func (s *Service) firstReadyAllTenants(ctx context.Context) (time.Duration, bool, error) {
	var in *float64
	if err := s.pool.QueryRow(ctx, queryFirstReadyAllTenants).Scan(&in); err != nil || in == nil {
		return 0, false, err
	}
	return seconds(*in), true, nil
}

const queryDispatchLock = `SELECT pg_try_advisory_xact_lock($1)`

// dispatchLock is the key of the lock under which one node at a time hands lanes over: "cnvlanes" in ASCII.
const dispatchLock int64 = 0x636e766c616e6573

// Counting what is in flight reads the small index of leased lanes.
const queryInFlightAllTenants = `
SELECT tenant_id, channel_id, count(*) FROM lanes WHERE lease_token IS NOT NULL GROUP BY tenant_id, channel_id`

const queryCandidatesAllTenants = withReady + `
SELECT c.tenant_id, c.channel_id, c.max_in_flight, c.tenant_max, due.n
FROM candidate c CROSS JOIN LATERAL (
    SELECT count(*) AS n FROM (
        SELECT FROM lanes l WHERE l.tenant_id = c.tenant_id AND l.channel_id = c.channel_id
            AND l.lease_token IS NULL AND l.next_at <= now()
        LIMIT least(c.max_in_flight, $1::integer)) first) due
WHERE c.at <= now()
ORDER BY c.tenant_id, c.channel_id`

// readCandidatesTx reads what there is to hand over; false when another node is at it.
func readCandidatesTx(ctx context.Context, tx pgx.Tx, workers int) (candidates []candidate, working []busy, locked bool, err error) {
	batch := &pgx.Batch{}
	batch.Queue(queryDispatchLock, dispatchLock).QueryRow(func(row pgx.Row) error { return row.Scan(&locked) })
	batch.Queue(queryInFlightAllTenants).Query(func(rows pgx.Rows) (err error) {
		working, err = pgx.CollectRows(rows, pgx.RowToStructByPos[busy])
		return err
	})
	batch.Queue(queryCandidatesAllTenants, workers).Query(func(rows pgx.Rows) (err error) {
		candidates, err = pgx.CollectRows(rows, pgx.RowToStructByPos[candidate])
		return err
	})
	err = tx.SendBatch(ctx, batch).Close()
	return candidates, working, locked, err
}

const queryLeaseAllTenants = `
UPDATE lanes l SET lease_token = $1, lease_until = now() + $2::bigint * interval '1 millisecond'
FROM (
    SELECT x.id FROM unnest($3::uuid[], $4::uuid[], $5::integer[]) AS g (tenant_id, channel_id, n)
    CROSS JOIN LATERAL (
        SELECT id FROM lanes
        WHERE tenant_id = g.tenant_id AND channel_id = g.channel_id AND lease_token IS NULL AND next_at <= now()
        ORDER BY next_at LIMIT g.n FOR NO KEY UPDATE SKIP LOCKED) x
) s
WHERE l.id = s.id
RETURNING l.id`

func leaseTx(ctx context.Context, tx pgx.Tx, token uuid.UUID, lease time.Duration, grants []grant) ([]uuid.UUID, error) {
	tenantIDs, channels, counts := make([]uuid.UUID, len(grants)), make([]uuid.UUID, len(grants)), make([]int32, len(grants))
	for i, g := range grants {
		tenantIDs[i], channels[i], counts[i] = g.Tenant, g.Channel, int32(g.lanes)
	}
	rows, err := tx.Query(ctx, queryLeaseAllTenants, token, lease.Milliseconds(), tenantIDs, channels, counts)
	if err != nil {
		return nil, err
	}
	return pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
}

// Lanes whose worker is dead, or could not record what it did, go back to those that wait, in their old place.
const queryExpireAllTenants = `
UPDATE lanes SET lease_token = NULL, lease_until = NULL, next_at = coalesce(next_at, now())
WHERE id = ANY (ARRAY(SELECT id FROM lanes
    WHERE lease_token IS NOT NULL AND lease_until < now() LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED))`

func (s *Service) expireAllTenants(ctx context.Context) (int64, error) {
	tag, err := s.pool.Exec(ctx, queryExpireAllTenants)
	return tag.RowsAffected(), err
}

const queryGiveUpAllTenants = `
UPDATE deliveries SET status = 'failed', reason = $1, updated_at = now(),
    last_error = coalesce(last_error, 'Nobody reported whether the message had arrived.')
WHERE (tenant_id, id, activity_id) IN (SELECT tenant_id, id, activity_id FROM deliveries
    WHERE status = 'uncertain' AND next_at <= now() ORDER BY next_at LIMIT 1000 FOR NO KEY UPDATE SKIP LOCKED)
    AND status = 'uncertain'`

// GiveUpUncertainAllTenants fails the uncertain deliveries whose time to wait for a receipt is over, at most a thousand a
// call, and returns how many those were. Any number of nodes may call it at once.
func (s *Service) GiveUpUncertainAllTenants(ctx context.Context) (int, error) {
	tag, err := s.pool.Exec(ctx, queryGiveUpAllTenants, ReasonUncertain)
	if err != nil {
		return 0, fmt.Errorf("give up uncertain deliveries: %w", err)
	}
	s.m.finished.WithLabelValues(string(StatusFailed), ReasonUncertain).Add(float64(tag.RowsAffected()))
	return int(tag.RowsAffected()), nil
}

// statedStatus is the status that is shown: whether a channel's circuit is closed is no matter of each of its deliveries, so
// that it can change without touching them.
const statedStatus = `
    CASE WHEN d.status = 'pending' AND d.channel_id = ANY (ARRAY(
        SELECT id FROM channels WHERE tenant_id = $1 AND circuit_state <> 'closed' AND deleted_at IS NULL)) THEN 'paused' ELSE d.status END`

const deliveryColumns = `
    d.id, d.activity_id, d.channel_id, ` + statedStatus + `, d.attempts, d.next_at, coalesce(d.reason, ''), coalesce(d.last_error, ''),
    coalesce(d.provider_message_id, ''), d.sent_at, d.delivered_at, d.read_at, d.retry_count, d.retried_by, d.retried_at,
    d.inserted_at, d.updated_at,
    a.conversation_id, a.seq, a.type, a.sender, a.text, a.attachments, a.metadata, a.idempotency_key, a.reply_to_id,
    a.edited_at, a.deleted_at, a.inserted_at`

// Filters that are not set cost nothing; the activities are joined after the page is cut at $8 deliveries. It ends earlier
// behind the one with which it passes $9 bytes of content; total counts what the first bound alone would have let through.
const queryList = `
SELECT` + deliveryColumns + `, d.total
FROM (
    SELECT sized.*, count(*) OVER () AS total, sum(bytes) OVER (ORDER BY id DESC) - bytes AS before
    FROM (
        SELECT page.*, coalesce(octet_length(b.text), 0) + octet_length(b.attachments::text) + octet_length(b.metadata::text) AS bytes
        FROM (
            SELECT * FROM deliveries d
            WHERE tenant_id = $1 AND ($2::uuid IS NULL OR id < $2) AND ($3::text IS NULL OR ` + statedStatus + ` = $3)
                AND ($4::uuid IS NULL OR channel_id = $4) AND ($5::uuid IS NULL OR activity_id = $5)
                AND ($6::timestamptz IS NULL OR updated_at >= $6) AND ($7::timestamptz IS NULL OR updated_at <= $7)
            ORDER BY id DESC LIMIT $8
        ) page
        JOIN activities b ON b.tenant_id = page.tenant_id AND b.id = page.activity_id
    ) sized
) d
JOIN activities a ON a.tenant_id = d.tenant_id AND a.id = d.activity_id
WHERE d.before < $9
ORDER BY d.id DESC`

// List returns a page of the tenant's deliveries, the newest first: at most limit of those older than before (uuid.Nil for
// the first page) and little more than [activity.MaxPageBytes] of content, but at least one, and whether there are more.
func (s *Service) List(ctx context.Context, tenant tenants.ID, f Filter, before uuid.UUID, limit int) (page []Delivery, more bool, err error) {
	var cursor *uuid.UUID
	if before != uuid.Nil {
		cursor = &before
	}
	rows, err := s.pool.Query(ctx, queryList, tenant, cursor, text(string(f.Status)), f.ChannelID, f.ActivityID,
		timestamp(f.From), timestamp(f.To), limit+1, activity.MaxPageBytes)
	total := 0
	if err == nil {
		page, err = pgx.CollectRows(rows, scanDelivery(tenant, &total))
	}
	if err != nil {
		return nil, false, fmt.Errorf("list deliveries: %w", err)
	}
	if len(page) > limit {
		return page[:limit], true, nil
	}
	return page, len(page) < total, nil
}

const queryGet = `
SELECT` + deliveryColumns + `
FROM deliveries d JOIN activities a ON a.tenant_id = d.tenant_id AND a.id = d.activity_id
WHERE d.tenant_id = $1 AND d.id = $2`

// Get returns one delivery, or ErrNotFound.
func (s *Service) Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (Delivery, error) {
	rows, err := s.pool.Query(ctx, queryGet, tenant, id)
	if err != nil {
		return Delivery{}, fmt.Errorf("get delivery: %w", err)
	}
	d, err := pgx.CollectExactlyOneRow(rows, scanDelivery(tenant))
	if errors.Is(err, pgx.ErrNoRows) {
		return Delivery{}, ErrNotFound
	}
	if err != nil {
		return Delivery{}, fmt.Errorf("get delivery: %w", err)
	}
	return d, nil
}

// scanDelivery reads deliveryColumns, and what stands behind them into more.
func scanDelivery(tenant tenants.ID, more ...any) pgx.RowToFunc[Delivery] {
	return func(row pgx.CollectableRow) (d Delivery, err error) {
		a := &d.Activity
		d.TenantID, a.TenantID = tenant, tenant
		err = row.Scan(append([]any{&d.ID, &d.ActivityID, &d.ChannelID, &d.Status, &d.Attempts, &d.NextAt, &d.Reason, &d.LastError,
			&d.ProviderMessageID, &d.SentAt, &d.DeliveredAt, &d.ReadAt, &d.RetryCount, &d.RetriedBy, &d.RetriedAt,
			&d.InsertedAt, &d.UpdatedAt,
			&a.ConversationID, &a.Seq, &a.Type, &a.Sender, &a.Text, &a.Attachments, &a.Metadata, &a.IdempotencyKey, &a.ReplyToID,
			&a.EditedAt, &a.DeletedAt, &a.InsertedAt}, more...)...)
		a.ID = d.ActivityID
		return d, err
	}
}

func timestamp(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	return &t
}

const queryAttempts = `
SELECT id, number, outcome, coalesce(reason, ''), coalesce(status_code, 0), coalesce(error, ''), coalesce(response, ''),
    started_at, duration_ms
FROM attempts WHERE tenant_id = $1 AND delivery_id = $2 ORDER BY id`

// Attempts returns the attempts of a delivery in the order of their recording, or ErrNotFound.
func (s *Service) Attempts(ctx context.Context, tenant tenants.ID, deliveryID uuid.UUID) ([]Attempt, error) {
	if _, err := s.Get(ctx, tenant, deliveryID); err != nil {
		return nil, err
	}
	rows, err := s.pool.Query(ctx, queryAttempts, tenant, deliveryID)
	if err != nil {
		return nil, fmt.Errorf("list attempts: %w", err)
	}
	attempts, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (a Attempt, err error) {
		var ms int64
		err = row.Scan(&a.ID, &a.Number, (*string)(&a.Outcome), &a.Reason, &a.StatusCode, &a.Error, &a.Response, &a.StartedAt, &ms)
		a.Duration = time.Duration(ms) * time.Millisecond
		return a, err
	})
	if err != nil {
		return nil, fmt.Errorf("list attempts: %w", err)
	}
	return attempts, nil
}
