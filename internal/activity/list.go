package activity

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/tenants"
)

// MaxPage is the most rows that one page has; a larger limit is cut to it, one below 1 is taken as 1.
const MaxPage = 1000

// MaxPageBytes is the content (text, attachments and metadata as JSON) behind which a page of activities ends early: a page
// of a thousand of the largest would hold 130 MB of memory for each reader.
const MaxPageBytes = 2 << 20

const (
	activityColumns = `a.tenant_id, a.id, a.conversation_id, c.channel_id, a.seq, a.type, a.sender, a.text,
    a.attachments, a.metadata, a.idempotency_key, a.reply_to_id, a.edited_at, a.deleted_at, a.inserted_at`

	getSQL = `
SELECT ` + activityColumns + `
FROM activities a
JOIN conversations c ON c.tenant_id = a.tenant_id AND c.id = a.conversation_id
WHERE a.tenant_id = $1 AND a.id = $2`

	originalsSQL = `
SELECT ` + activityColumns + `
FROM unnest($1::uuid[], $2::uuid[]) AS i (tenant_id, id)
JOIN activities a ON a.tenant_id = i.tenant_id AND a.id = i.id
JOIN conversations c ON c.tenant_id = a.tenant_id AND c.id = a.conversation_id`

	channelSQL = `
SELECT channel_id
FROM conversations
WHERE tenant_id = $1 AND id = $2`

	seqSQL = `
SELECT seq
FROM activities
WHERE tenant_id = $1 AND id = $2 AND conversation_id = $3`

	// listSQL reads the index (conversation_id, seq) of each partition in order and stops at the limit.
	// A page ends at $4 activities or behind the one with which it passes $6 bytes of content; total counts what the
	// first of the two bounds alone would have let through.
	listSQL = `
SELECT p.tenant_id, p.id, p.conversation_id, $5::uuid, p.seq, p.type, p.sender, p.text,
    p.attachments, p.metadata, p.idempotency_key, p.reply_to_id, p.edited_at, p.deleted_at, p.inserted_at, p.total
FROM (
    SELECT a.*, count(*) OVER () AS total, sum(a.bytes) OVER (ORDER BY a.seq) - a.bytes AS before
    FROM (
        SELECT a.*, coalesce(octet_length(a.text), 0) + octet_length(a.attachments::text) + octet_length(a.metadata::text) AS bytes
        FROM activities a
        WHERE a.tenant_id = $1 AND a.conversation_id = $2 AND a.seq > $3
        ORDER BY a.seq
        LIMIT $4
    ) a
) p
WHERE p.before < $6
ORDER BY p.seq`
)

// Get returns one activity, or ErrNotFound.
func (s *Store) Get(ctx context.Context, tenant tenants.ID, id uuid.UUID) (Activity, error) {
	rows, err := s.pool.Query(ctx, getSQL, tenant, id)
	if err != nil {
		return Activity{}, fmt.Errorf("activity: get: %w", err)
	}
	a, err := pgx.CollectExactlyOneRow(rows, func(row pgx.CollectableRow) (Activity, error) { return scanActivity(row) })
	return a, readError("get", err)
}

// List returns the activities of a conversation with a seq above afterSeq, in the order of seq, at most limit
// (1 to MaxPage) of them and little more than MaxPageBytes of content, but at least one; hasMore says whether there are more. ch, when set, is the channel that the caller is bound to.
// ErrNotFound when there is no such conversation; a conversation without activities is an empty list.
//
// A reader that goes on from the last seq it has seen misses nothing: activities of a conversation become visible in the
// order of their seq, because its row is locked from the numbering to the commit.
func (s *Store) List(ctx context.Context, tenant tenants.ID, conversation uuid.UUID, ch *uuid.UUID, afterSeq int64, limit int) (_ []Activity, hasMore bool, _ error) {
	limit = pageSize(limit)
	channelID, err := s.channelOf(ctx, tenant, conversation, ch)
	if err != nil {
		return nil, false, err
	}
	rows, err := s.pool.Query(ctx, listSQL, tenant, conversation, afterSeq, limit+1, channelID, MaxPageBytes)
	if err != nil {
		return nil, false, fmt.Errorf("activity: list: %w", err)
	}
	total := 0
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Activity, error) { return scanActivity(row, &total) })
	if err != nil {
		return nil, false, readError("list", err)
	}
	list, hasMore = cut(list, limit)
	return list, hasMore || len(list) < total, nil
}

// ReadWatermark returns the seq that a watermark of a conversation stands for: one that [ParseWatermark] reads, or the form of
// the original system's earlier clients, base64url without padding of the text of an activity's id. ch is as for List.
// ErrBadWatermark for anything else and for an activity that the conversation does not have; ErrNotFound only for the
// older form, which needs queries.
func (s *Store) ReadWatermark(ctx context.Context, tenant tenants.ID, conversation uuid.UUID, ch *uuid.UUID, text string) (afterSeq int64, err error) {
	id, ok := parseLegacyWatermark(text)
	if !ok {
		return ParseWatermark(text)
	}
	if _, err := s.channelOf(ctx, tenant, conversation, ch); err != nil {
		return 0, err
	}
	err = s.pool.QueryRow(ctx, seqSQL, tenant, id, conversation).Scan(&afterSeq)
	if errors.Is(err, pgx.ErrNoRows) {
		return 0, ErrBadWatermark
	}
	return afterSeq, readError("read watermark", err)
}

// channelOf returns the channel of a conversation, which must be ch unless that is nil.
func (s *Store) channelOf(ctx context.Context, tenant tenants.ID, conversation uuid.UUID, ch *uuid.UUID) (uuid.UUID, error) {
	var id uuid.UUID
	if err := s.pool.QueryRow(ctx, channelSQL, tenant, conversation).Scan(&id); err != nil {
		return uuid.Nil, readError("read channel", err)
	}
	if ch != nil && *ch != id {
		return uuid.Nil, ErrNotFound
	}
	return id, nil
}

// scanActivity reads activityColumns, and what stands behind them into more.
func scanActivity(row pgx.CollectableRow, more ...any) (Activity, error) {
	var a Activity
	err := row.Scan(append([]any{&a.TenantID, &a.ID, &a.ConversationID, &a.ChannelID, &a.Seq, &a.Type, &a.Sender, &a.Text,
		(*[]byte)(&a.Attachments), (*[]byte)(&a.Metadata), &a.IdempotencyKey, &a.ReplyToID, &a.EditedAt, &a.DeletedAt,
		&a.InsertedAt}, more...)...)
	a.InsertedAt = a.InsertedAt.UTC()
	a.EditedAt, a.DeletedAt = utc(a.EditedAt), utc(a.DeletedAt)
	return a, err
}

func utc(t *time.Time) *time.Time {
	if t != nil {
		*t = t.UTC()
	}
	return t
}

func pageSize(limit int) int { return min(max(limit, 1), MaxPage) }

// cut takes off the row beyond the limit, which was read only to know that it is there.
func cut[T any](list []T, limit int) (_ []T, more bool) {
	if len(list) > limit {
		return list[:limit], true
	}
	return list, false
}

func readError(doing string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, pgx.ErrNoRows):
		return ErrNotFound
	}
	return fmt.Errorf("activity: %s: %w", doing, err)
}
