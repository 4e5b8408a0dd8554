package delivery

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// clocksApart is how far a provider's clock may be from ours, with the fractions of seconds that its times lack.
const clocksApart = time.Minute

// known is a delivery that receipts speak of.
type known struct {
	ID, ActivityID, LaneID      uuid.UUID
	Status                      Status
	Reason, LastError           string
	SentAt, DeliveredAt, ReadAt *time.Time
	RetriedAt                   *time.Time // by hand
}

// apply is the whole machine of receipts. It only moves forward, so that receipts may come in any order, twice, and late:
//
//	from \ receipt              sent   delivered   read   failed
//	pending, uncertain          sent   delivered   read   failed
//	sent                        –      delivered   read   failed
//	delivered                   –      –           read   failed
//	read                        –      –           –      –
//	failed, by a receipt        –      –           –      –
//	failed, by our conclusion   sent   delivered   read   –
//
// The last line: we had given up (exhausted, uncertain, …) and the provider knows better. A failure from before the last
// retry by hand is what was retried. Whatever the status does, the first time of each kind of news is kept. It reports whether anything is new.
func (k *known) apply(r channel.Receipt) bool {
	stamp := func(at **time.Time) bool {
		if *at != nil {
			return false
		}
		*at = &r.At
		return true
	}
	var fresh bool
	var rank int
	switch Status(r.Status) {
	case StatusSent:
		fresh, rank = stamp(&k.SentAt), 1
	case StatusDelivered:
		fresh, rank = stamp(&k.DeliveredAt), 2
	case StatusRead:
		fresh, rank = stamp(&k.ReadAt), 3
	case StatusFailed:
		if k.Status == StatusRead || k.Status == StatusFailed || k.RetriedAt != nil && r.At.Before(k.RetriedAt.Add(-clocksApart)) {
			return false
		}
		k.Status, k.Reason, k.LastError = StatusFailed, ReasonReceipt, storable(r.Error, maxError)
		return true
	default:
		return false // adapters translate; a word of their own is not news
	}
	if rank <= k.rank() || k.Status == StatusFailed && k.Reason == ReasonReceipt {
		return fresh
	}
	k.Status, k.Reason, k.LastError = Status(r.Status), "", ""
	return true
}

func (k *known) rank() int {
	switch k.Status {
	case StatusSent:
		return 1
	case StatusDelivered:
		return 2
	case StatusRead:
		return 3
	}
	return 0
}

// The deliveries that receipts name, by our id or by the provider's, locked in the order of their ids.
const queryKnown = `
SELECT r.ord, d.id, d.activity_id, d.lane_id, d.status, coalesce(d.reason, ''), coalesce(d.last_error, ''),
    d.sent_at, d.delivered_at, d.read_at, d.retried_at
FROM unnest($3::uuid[], $4::text[]) WITH ORDINALITY AS r (delivery_id, provider_id, ord)
LEFT JOIN LATERAL (
    SELECT delivery_id, activity_id FROM provider_messages
    WHERE tenant_id = $1 AND channel_id = $2 AND direction = 'out' AND provider_id = r.provider_id
) p ON r.delivery_id IS NULL
JOIN deliveries d ON d.tenant_id = $1 AND d.id = coalesce(r.delivery_id, p.delivery_id) AND d.channel_id = $2
    AND d.activity_id = coalesce(p.activity_id, d.activity_id)
ORDER BY d.id, r.ord
FOR NO KEY UPDATE OF d`

// Times of providers are not believed to lie in the future.
const queryApplyReceipts = `
UPDATE deliveries d SET status = r.status, reason = r.reason, last_error = r.last_error,
    sent_at = CASE WHEN r.sent_at > now() THEN now() ELSE r.sent_at END,
    delivered_at = CASE WHEN r.delivered_at > now() THEN now() ELSE r.delivered_at END,
    read_at = CASE WHEN r.read_at > now() THEN now() ELSE r.read_at END,
    updated_at = now()
FROM unnest($2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::text[], $7::timestamptz[], $8::timestamptz[], $9::timestamptz[])
    AS r (id, activity_id, status, reason, last_error, sent_at, delivered_at, read_at)
WHERE d.tenant_id = $1 AND d.id = r.id AND d.activity_id = r.activity_id`

// A lane that waited to repeat what has arrived need not wait any longer.
const queryWakeSettled = `
UPDATE lanes l SET next_at = now()
FROM (SELECT id FROM lanes WHERE id = ANY ($1) AND lease_token IS NULL AND next_at > now()
    ORDER BY channel_id, conversation_id FOR NO KEY UPDATE) s
WHERE l.id = s.id`

// ApplyReceiptsTx applies a provider's receipts for a channel, in their order, in the caller's transaction. applied counts
// those whose delivery the channel has, also when they bring nothing new; unknown the others. The caller holds no lock on
// deliveries or lanes.
func (s *Service) ApplyReceiptsTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, channelID uuid.UUID, receipts []channel.Receipt) (applied, unknown int, err error) {
	if len(receipts) == 0 {
		return 0, 0, nil
	}
	ids, names := make([]*uuid.UUID, len(receipts)), make([]*string, len(receipts))
	for i, r := range receipts {
		ids[i], names[i] = r.DeliveryID, text(storable(r.ProviderID, channel.MaxProviderID))
	}
	rows, err := tx.Query(ctx, queryKnown, tenant, channelID, ids, names)
	if err != nil {
		return 0, 0, fmt.Errorf("find the deliveries of receipts: %w", err)
	}
	of := make([]*known, len(receipts))
	byID := map[uuid.UUID]*known{}
	var k known
	var ord int
	_, err = pgx.ForEachRow(rows, []any{&ord, &k.ID, &k.ActivityID, &k.LaneID, &k.Status, &k.Reason, &k.LastError,
		&k.SentAt, &k.DeliveredAt, &k.ReadAt, &k.RetriedAt}, func() error {
		if byID[k.ID] == nil {
			found := k
			byID[k.ID] = &found
		}
		of[ord-1] = byID[k.ID]
		return nil
	})
	if err != nil {
		return 0, 0, fmt.Errorf("find the deliveries of receipts: %w", err)
	}
	changed := map[*known]bool{}
	var settled []uuid.UUID
	for i, r := range receipts {
		k := of[i]
		if k == nil {
			unknown++
			s.m.receipts.WithLabelValues("unknown").Inc()
			continue
		}
		applied++
		if r.At.IsZero() {
			r.At = time.Now()
		}
		before := k.Status
		if !k.apply(r) {
			s.m.receipts.WithLabelValues("stale").Inc()
			continue
		}
		s.m.receipts.WithLabelValues("applied").Inc()
		changed[k] = true
		if before == StatusPending {
			settled = append(settled, k.LaneID)
		}
	}
	if err := updateKnownTx(ctx, tx, tenant, changed); err != nil {
		return 0, 0, fmt.Errorf("apply receipts: %w", err)
	}
	if len(settled) > 0 {
		if _, err := tx.Exec(ctx, queryWakeSettled, settled); err != nil {
			return 0, 0, fmt.Errorf("wake the lanes of receipts: %w", err)
		}
	}
	return applied, unknown, nil
}

func updateKnownTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, changed map[*known]bool) error {
	if len(changed) == 0 {
		return nil
	}
	var (
		ids, activities           []uuid.UUID
		statuses, reasons, errs   []*string
		sents, delivereds, readAt []*time.Time
	)
	for k := range changed {
		ids, activities = append(ids, k.ID), append(activities, k.ActivityID)
		statuses, reasons, errs = append(statuses, text(string(k.Status))), append(reasons, text(k.Reason)), append(errs, text(k.LastError))
		sents, delivereds, readAt = append(sents, k.SentAt), append(delivereds, k.DeliveredAt), append(readAt, k.ReadAt)
	}
	_, err := tx.Exec(ctx, queryApplyReceipts, tenant, ids, activities, statuses, reasons, errs, sents, delivereds, readAt)
	return err
}
