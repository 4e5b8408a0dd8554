package inbound

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/channel/payload"
	"converger/internal/postgres"
	"converger/internal/tenants"
)

const (
	insertEventQuery = `
INSERT INTO inbound_events (tenant_id, id, channel_id, endpoint, content_type, headers, body, state, error, result, processed_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, NULLIF($9, ''), $10, CASE WHEN $8::text <> 'received' THEN now() END)`

	lockEventQuery = `
SELECT tenant_id, id, channel_id, endpoint, content_type, body, state, tries, COALESCE(error, ''), inserted_at, headers
FROM inbound_events WHERE tenant_id = $1 AND id = $2 FOR NO KEY UPDATE`

	finishEventQuery = `
UPDATE inbound_events SET state = $3, error = NULLIF($4, ''), result = $5, processed_at = now() WHERE tenant_id = $1 AND id = $2`

	reopenEventQuery = `
UPDATE inbound_events SET state = 'received', tries = 0, error = NULL WHERE tenant_id = $1 AND id = $2`

	countFailureQuery = `
UPDATE inbound_events SET tries = tries + 1, error = $3,
    state = CASE WHEN tries + 1 >= $4 THEN 'failed' ELSE state END,
    processed_at = CASE WHEN tries + 1 >= $4 THEN now() END
WHERE tenant_id = $1 AND id = $2 AND state = 'received'
RETURNING state`

	// Newest first, by id: (id) < the last one seen.
	listEventsAllTenantsQuery = `
SELECT tenant_id, id, channel_id, endpoint, content_type, length(body), state, tries, COALESCE(error, ''), result, inserted_at, processed_at
FROM inbound_events
WHERE id < $1 AND ($2::uuid IS NULL OR tenant_id = $2) AND ($3::uuid IS NULL OR channel_id = $3) AND ($4::text = '' OR state = $4)
ORDER BY id DESC LIMIT $5`

	getEventQuery = `
SELECT tenant_id, id, channel_id, endpoint, content_type, body, state, tries, COALESCE(error, ''), result, inserted_at, processed_at
FROM inbound_events WHERE tenant_id = $1 AND id = $2`

	// A claim waits for a transaction that holds the same id, and then finds it taken.
	claimQuery = `
INSERT INTO provider_messages (tenant_id, channel_id, direction, provider_id, activity_id)
SELECT $1, $2, 'in', c.provider_id, c.activity_id
FROM unnest($3::text[], $4::uuid[]) AS c (provider_id, activity_id)
ORDER BY c.provider_id
ON CONFLICT DO NOTHING
RETURNING activity_id`

	claimedQuery = `
SELECT provider_id, activity_id FROM provider_messages
WHERE tenant_id = $1 AND channel_id = $2 AND direction = 'in' AND provider_id = ANY($3)`

	unclaimQuery = `
DELETE FROM provider_messages
WHERE tenant_id = $1 AND channel_id = $2 AND direction = 'in' AND provider_id = ANY($3)`

	// What a reply names may have come in or gone out; only a message of the same conversation counts.
	referencesQuery = `
SELECT r.n, a.id
FROM unnest($3::int[], $4::text[], $5::uuid[]) AS r (n, provider_id, conversation_id)
JOIN provider_messages p ON p.channel_id = $2 AND p.tenant_id = $1 AND p.provider_id = r.provider_id
JOIN activities a ON a.tenant_id = $1 AND a.id = p.activity_id AND a.conversation_id = r.conversation_id`
)

func (s *Service) store(ctx context.Context, q postgres.Querier, id uuid.UUID, r Request, state State, reason string, result *Result) error {
	body := r.Body
	if body == nil {
		body = []byte{} // an empty body is one too, and no NULL
	}
	_, err := q.Exec(ctx, insertEventQuery, r.Channel.TenantID, id, r.Channel.ID, r.Endpoint,
		payload.Cut(payload.Clean(r.Header.Get("Content-Type")), 255), keptHeaders(r.Header), body, state, reason, result)
	if err != nil {
		return fmt.Errorf("insert inbound event: %w", err)
	}
	return nil
}

// lockTx reads an event for working it; another worker waits.
func (s *Service) lockTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, id uuid.UUID) (ev Event, kept json.RawMessage, err error) {
	err = tx.QueryRow(ctx, lockEventQuery, tenant, id).Scan(&ev.TenantID, &ev.ID, &ev.ChannelID, &ev.Endpoint, &ev.ContentType,
		&ev.Body, &ev.State, &ev.Tries, &ev.Error, &ev.InsertedAt, &kept)
	if errors.Is(err, pgx.ErrNoRows) {
		return Event{}, nil, ErrNotFound
	}
	if err != nil {
		return Event{}, nil, fmt.Errorf("lock inbound event: %w", err)
	}
	return ev, kept, nil
}

func (s *Service) finishTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, id uuid.UUID, state State, reason string, result *Result) error {
	if _, err := tx.Exec(ctx, finishEventQuery, tenant, id, state, reason, result); err != nil {
		return fmt.Errorf("finish inbound event: %w", err)
	}
	return nil
}

func (s *Service) reopenTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, id uuid.UUID) error {
	if _, err := tx.Exec(ctx, reopenEventQuery, tenant, id); err != nil {
		return fmt.Errorf("reopen inbound event: %w", err)
	}
	return nil
}

// countFailure notes one more failure and reports whether it was the last that is allowed.
func (s *Service) countFailure(ctx context.Context, tenant tenants.ID, id uuid.UUID, cause error) (failed bool, err error) {
	var state State
	reason, _, _ := strings.Cut(cause.Error(), "\n") // without the stack of a panic
	err = s.pool.QueryRow(ctx, countFailureQuery, tenant, id, payload.Cut(payload.Clean(reason), 500), s.maxTries).Scan(&state)
	if errors.Is(err, pgx.ErrNoRows) {
		return true, nil
	}
	if err != nil {
		return false, fmt.Errorf("count failure: %w", err)
	}
	return state == StateFailed, nil
}

// ListAllTenants lists events, newest first, without their bodies: those with an id below before, uuid.Nil for the
// beginning. more tells whether there are others behind the page.
func (s *Service) ListAllTenants(ctx context.Context, f Filter, before uuid.UUID, limit int) (page []Event, more bool, err error) {
	if before == uuid.Nil {
		before = uuid.Max // above every id
	}
	rows, err := s.pool.Query(ctx, listEventsAllTenantsQuery, before, f.TenantID, f.ChannelID, string(f.State), limit+1)
	if err != nil {
		return nil, false, fmt.Errorf("inbound: list events: %w", err)
	}
	page, err = pgx.CollectRows(rows, func(row pgx.CollectableRow) (e Event, err error) {
		err = row.Scan(&e.TenantID, &e.ID, &e.ChannelID, &e.Endpoint, &e.ContentType, &e.Size, &e.State, &e.Tries, &e.Error,
			&e.Result, &e.InsertedAt, &e.ProcessedAt)
		return e, err
	})
	if err != nil {
		return nil, false, fmt.Errorf("inbound: list events: %w", err)
	}
	if len(page) > limit {
		return page[:limit], true, nil
	}
	return page, false, nil
}

// Get reads one event with its body.
func (s *Service) Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (Event, error) {
	var e Event
	err := s.pool.QueryRow(ctx, getEventQuery, tenant, id).Scan(&e.TenantID, &e.ID, &e.ChannelID, &e.Endpoint, &e.ContentType,
		&e.Body, &e.State, &e.Tries, &e.Error, &e.Result, &e.InsertedAt, &e.ProcessedAt)
	if errors.Is(err, pgx.ErrNoRows) {
		return Event{}, ErrNotFound
	}
	if err != nil {
		return Event{}, fmt.Errorf("inbound: get event: %w", err)
	}
	e.Size = len(e.Body)
	return e, nil
}

// claimTx takes the ids of the messages; those that are taken, also by an earlier message of the same event, are repeats.
func (s *Service) claimTx(ctx context.Context, tx pgx.Tx, ch *channel.Channel, messages []*message) error {
	first := map[string]*message{}
	var ids []string
	var activities []uuid.UUID
	for _, m := range messages {
		if of, ok := first[m.claim]; ok {
			m.repeat, m.activityID = true, of.activityID
			continue
		}
		first[m.claim] = m
		ids, activities = append(ids, m.claim), append(activities, m.activityID)
	}
	rows, err := tx.Query(ctx, claimQuery, ch.TenantID, ch.ID, ids, activities)
	if err != nil {
		return fmt.Errorf("claim message ids: %w", err)
	}
	won, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
	if err != nil {
		return fmt.Errorf("claim message ids: %w", err)
	}
	if len(won) == len(ids) {
		return nil
	}
	rows, err = tx.Query(ctx, claimedQuery, ch.TenantID, ch.ID, ids)
	if err != nil {
		return fmt.Errorf("read claimed message ids: %w", err)
	}
	type claimed struct {
		claim    string
		activity uuid.UUID
	}
	holders, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c claimed, err error) {
		err = row.Scan(&c.claim, &c.activity)
		return c, err
	})
	if err != nil {
		return fmt.Errorf("read claimed message ids: %w", err)
	}
	original := map[string]uuid.UUID{}
	for _, h := range holders {
		original[h.claim] = h.activity
	}
	for _, m := range messages {
		if holder, ok := original[m.claim]; ok && holder != m.activityID {
			m.repeat, m.activityID = true, holder
		}
	}
	return nil
}

// unclaimTx gives ids back whose messages were rejected, so that a repeat is tried again.
func (s *Service) unclaimTx(ctx context.Context, tx pgx.Tx, ch *channel.Channel, claims []string) error {
	if _, err := tx.Exec(ctx, unclaimQuery, ch.TenantID, ch.ID, claims); err != nil {
		return fmt.Errorf("give message ids back: %w", err)
	}
	return nil
}

// referencesTx resolves the provider's names of the messages that others reply to.
func (s *Service) referencesTx(ctx context.Context, tx pgx.Tx, ch *channel.Channel, messages []*message) error {
	var n []int
	var ids []string
	var conversations []uuid.UUID
	for i, m := range messages {
		if !m.repeat && m.ReplyToID == nil && m.ReplyToProviderID != "" {
			n, ids, conversations = append(n, i), append(ids, m.ReplyToProviderID), append(conversations, m.conversation)
		}
	}
	if len(n) == 0 {
		return nil
	}
	rows, err := tx.Query(ctx, referencesQuery, ch.TenantID, ch.ID, n, ids, conversations)
	if err != nil {
		return fmt.Errorf("resolve references: %w", err)
	}
	var i int
	var id uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&i, &id}, func() error {
		found := id
		messages[i].ReplyToID = &found
		return nil
	})
	if err != nil {
		return fmt.Errorf("resolve references: %w", err)
	}
	return nil
}
