package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// Failures of retries by hand.
var (
	// ErrNotFailed says that the delivery has not failed: it is under way or has arrived.
	ErrNotFailed = errors.New("delivery: not failed")
	// ErrInactive says that the delivery's channel is inactive or deleted: it would only fail again, or wait.
	ErrInactive = errors.New("delivery: the channel is inactive")
)

const (
	// MaxRetries is how many deliveries one call of RetryChannel retries.
	MaxRetries = 10_000
	// retryChunk is how many it retries in one transaction.
	retryChunk = 500
)

// RetryFilter narrows what RetryChannel retries; the zero value takes everything that has failed.
type RetryFilter struct {
	ActivityID *uuid.UUID
	From, To   time.Time // of the last change, both inclusive; zero for open
}

const (
	queryPickOne = `
SELECT d.id, d.activity_id, d.lane_id, d.status, c.status = 'active' AND c.deleted_at IS NULL
FROM deliveries d JOIN channels c ON c.tenant_id = d.tenant_id AND c.id = d.channel_id
WHERE d.tenant_id = $1 AND d.id = $2
FOR NO KEY UPDATE OF d`

	// whereRetryable: $3 behind which id, $4 as of when, then the filter. Whatever fails after the call began, such as a
	// delivery that it retried, is not its business.
	whereRetryable = `
FROM deliveries
WHERE tenant_id = $1 AND channel_id = $2 AND status = 'failed' AND id > $3 AND updated_at <= $4
    AND ($5::uuid IS NULL OR activity_id = $5) AND ($6::timestamptz IS NULL OR updated_at >= $6) AND ($7::timestamptz IS NULL OR updated_at <= $7)`

	queryPickMany = `SELECT id, activity_id, lane_id` + whereRetryable + ` ORDER BY id LIMIT $8 FOR NO KEY UPDATE SKIP LOCKED`
	queryMore     = `SELECT EXISTS (SELECT` + whereRetryable + `)`

	queryRetryChannel = `SELECT status = 'active', now() FROM channels WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`

	// queryRetry makes deliveries as good as new. What earlier attempts came to stays in last_error, retry_count and the
	// attempts themselves.
	queryRetry = `
UPDATE deliveries d SET status = 'pending', attempts = 0, next_at = now(), reason = NULL, provider_message_id = NULL,
    sent_at = NULL, delivered_at = NULL, read_at = NULL,
    retry_count = d.retry_count + 1, retried_by = $4, retried_at = now(), updated_at = now()
FROM (SELECT * FROM unnest($2::uuid[], $3::uuid[]) AS u (id, activity_id) LIMIT $5) p
WHERE d.tenant_id = $1 AND d.id = p.id AND d.activity_id = p.activity_id`

	// queryWakeRetried has the lanes looked at at once: a delivery that is retried stands, by its number, ahead of those
	// that its lane waits with. They are locked in the order in which everybody locks them.
	queryWakeRetried = `
UPDATE lanes l SET wakes = l.wakes + 1, next_at = least(l.next_at, now())
FROM (SELECT id FROM lanes WHERE id = ANY ($1) ORDER BY channel_id, conversation_id FOR NO KEY UPDATE) s
WHERE l.id = s.id`
)

// picked is a failed delivery that a transaction has locked.
type picked struct{ ID, ActivityID, LaneID uuid.UUID }

// retryTx makes deliveries pending and wakes their lanes.
func retryTx(ctx context.Context, tx pgx.Tx, by tenants.Actor, tenant tenants.ID, list []picked) error {
	ids, activities, lanes := make([]uuid.UUID, len(list)), make([]uuid.UUID, len(list)), make([]uuid.UUID, len(list))
	for i, p := range list {
		ids[i], activities[i], lanes[i] = p.ID, p.ActivityID, p.LaneID
	}
	if _, err := tx.Exec(ctx, queryRetry, tenant, ids, activities, by.Type+":"+by.ID, len(list)); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, queryWakeRetried, lanes)
	return err
}

// Retry makes a failed delivery pending again, under its old id and with all its attempts before it, in its place in the
// conversation's order: ahead of later ones that still wait; what has been sent since stays sent. Of two calls at once
// one succeeds. Errors: ErrNotFound, ErrInactive, ErrNotFailed.
func (s *Service) Retry(ctx context.Context, by tenants.Actor, tenant tenants.ID, id uuid.UUID) (Delivery, error) {
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		var p picked
		var status Status
		var active bool
		err := tx.QueryRow(ctx, queryPickOne, tenant, id).Scan(&p.ID, &p.ActivityID, &p.LaneID, &status, &active)
		switch {
		case errors.Is(err, pgx.ErrNoRows):
			return ErrNotFound
		case err != nil:
			return err
		case !active:
			return ErrInactive
		case status != StatusFailed:
			return ErrNotFailed
		}
		if err := retryTx(ctx, tx, by, tenant, []picked{p}); err != nil {
			return err
		}
		return tenants.AuditTx(ctx, tx, by, tenants.Entry{TenantID: &tenant, Action: "retry", ResourceType: "delivery", ResourceID: id.String(),
			Before: map[string]any{"status": StatusFailed}, After: map[string]any{"status": StatusPending}})
	})
	if err != nil {
		return Delivery{}, fmt.Errorf("retry delivery: %w", err)
	}
	s.m.retried.Inc()
	s.pokeDispatcher()
	return s.Get(ctx, tenant, id)
}

// RetryChannel retries, as Retry does, the deliveries of a channel that had failed by now, the oldest first: at most limit (1 to
// MaxRetries) of them, in transactions of 500 with an audit record each. Any number of calls may run at once: no delivery
// is retried twice. more says that there are further ones. When the database fails in between, what was done is done: it
// is returned with more true. Errors: [channel.ErrNotFound], ErrInactive.
func (s *Service) RetryChannel(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID, f RetryFilter, limit int) (retried int, more bool, err error) {
	var active bool
	var asOf time.Time
	err = s.pool.QueryRow(ctx, queryRetryChannel, tenant, channelID).Scan(&active, &asOf)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return 0, false, channel.ErrNotFound
	case err != nil:
		return 0, false, fmt.Errorf("retry deliveries: %w", err)
	case !active:
		return 0, false, ErrInactive
	}
	limit = min(max(limit, 1), MaxRetries)
	var last uuid.UUID // of the chunk before
	which := func() []any {
		return []any{tenant, channelID, last, asOf, f.ActivityID, timestamp(f.From), timestamp(f.To)}
	}
	for retried < limit {
		n := min(retryChunk, limit-retried)
		var list []picked
		err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) (err error) {
			rows, _ := tx.Query(ctx, queryPickMany, append(which(), n)...) // the error is CollectRows' too
			if list, err = pgx.CollectRows(rows, pgx.RowToStructByPos[picked]); err != nil || len(list) == 0 {
				return err
			}
			if err := retryTx(ctx, tx, by, tenant, list); err != nil {
				return err
			}
			return tenants.AuditTx(ctx, tx, by, tenants.Entry{TenantID: &tenant, Action: "retry", ResourceType: "channel", ResourceID: channelID.String(),
				After: map[string]any{"retried": len(list), "first_delivery_id": list[0].ID, "last_delivery_id": list[len(list)-1].ID,
					"activity_id": f.ActivityID, "from": timestamp(f.From), "to": timestamp(f.To)}})
		})
		if err != nil && retried > 0 {
			s.log.Warn("retrying the deliveries of a channel ended early", "tenant_id", tenant, "channel_id", channelID, "retried", retried, "error", err)
			return retried, true, nil
		}
		if err != nil {
			return 0, false, fmt.Errorf("retry deliveries: %w", err)
		}
		retried += len(list)
		s.m.retried.Add(float64(len(list)))
		s.pokeDispatcher()
		if len(list) < n {
			return retried, false, nil // what is left is in the hands of others
		}
		last = list[len(list)-1].ID
	}
	if err := s.pool.QueryRow(ctx, queryMore, which()...).Scan(&more); err != nil {
		return retried, true, nil //nolint:nilerr // unknown: asking again tells
	}
	return retried, more, nil
}
