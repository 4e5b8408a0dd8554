package activity

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/tenants"
)

const (
	conversationColumns = `c.tenant_id, c.id, c.channel_id, c.participant_id, c.status, c.last_seq, c.metadata,
    c.inserted_at, c.updated_at`

	conversationSelect = `
SELECT ` + conversationColumns + `, p.channel_id, p.external_id, p.display_name, p.metadata, p.inserted_at, p.updated_at
FROM conversations c
LEFT JOIN participants p ON p.tenant_id = c.tenant_id AND p.id = c.participant_id`

	getConversationSQL = conversationSelect + `
WHERE c.tenant_id = $1 AND c.id = $2`

	// createConversationSQL makes none when the channel was deleted, or the participant is of another channel.
	createConversationSQL = `
INSERT INTO conversations AS c (tenant_id, id, channel_id, participant_id, metadata, status)
SELECT h.tenant_id, $2::uuid, h.id, $4::uuid, $5::jsonb, $6
FROM channels h
WHERE h.tenant_id = $1 AND h.id = $3 AND h.deleted_at IS NULL AND ($4::uuid IS NULL OR EXISTS (
    SELECT FROM participants p WHERE p.tenant_id = $1 AND p.id = $4 AND p.channel_id = $3))
RETURNING ` + conversationColumns

	lockConversationSQL = `
SELECT ` + conversationColumns + `
FROM conversations c
WHERE c.tenant_id = $1 AND c.id = $2
FOR NO KEY UPDATE`

	setStatusSQL = `
UPDATE conversations c
SET status = $3, updated_at = now()
WHERE c.tenant_id = $1 AND c.id = $2 AND c.status <> $3
RETURNING ` + conversationColumns

	openConversationSQL = `
SELECT ` + conversationColumns + `
FROM conversations c
WHERE c.tenant_id = $1 AND c.participant_id = $2 AND c.channel_id = $3 AND c.status = 'active'
    AND ($4::bigint = 0 OR c.updated_at > now() - $4::bigint * interval '1 microsecond')
ORDER BY c.id DESC
LIMIT 1
FOR NO KEY UPDATE`
)

// CreateConversation makes a conversation. With n.Participant the person is found or made in the same transaction.
// ErrNotFound when the tenant has no such channel, or the channel no such participant; *[fault.Invalid] for metadata or a
// participant beyond the limits.
func (s *Store) CreateConversation(ctx context.Context, tenant tenants.ID, n NewConversation) (c Conversation, err error) {
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		c, err = s.CreateConversationTx(ctx, tx, tenant, n)
		return err
	})
	return c, err
}

// CreateConversationTx is CreateConversation in the caller's transaction, which is still usable after ErrNotFound.
func (s *Store) CreateConversationTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, n NewConversation) (Conversation, error) {
	var bad fault.Invalid
	metadata := checkMetadata(&bad, n.Metadata)
	status := cmp.Or(n.Status, StatusActive)
	if status != StatusActive && status != StatusClosed {
		bad.Addf("/status", fault.Malformed, "must be active or closed")
	}
	if n.Participant != nil && n.ParticipantID != nil {
		bad.Addf("/participant_id", fault.Conflict, "give a participant or the id of one, not both")
	}
	if err := bad.Err(); err != nil {
		return Conversation{}, err
	}
	participantID := n.ParticipantID
	if n.Participant != nil {
		p, err := s.ResolveParticipantTx(ctx, tx, tenant, n.ChannelID, *n.Participant)
		if err != nil {
			return Conversation{}, err
		}
		participantID = &p.ID
	}
	return s.insertConversation(ctx, tx, tenant, n.ChannelID, participantID, metadata, status)
}

func (s *Store) insertConversation(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, participant *uuid.UUID, metadata json.RawMessage, status string) (Conversation, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Conversation{}, fmt.Errorf("activity: make an id: %w", err)
	}
	return s.queryConversation(ctx, tx, "create conversation", createConversationSQL, tenant, id, ch, participant, metadata, status)
}

// queryConversation runs a statement that answers with conversationColumns, and loads the participant.
func (s *Store) queryConversation(ctx context.Context, q postgres.Querier, doing, sql string, args ...any) (Conversation, error) {
	rows, err := q.Query(ctx, sql, args...)
	if err != nil {
		return Conversation{}, readError(doing, err)
	}
	c, err := pgx.CollectExactlyOneRow(rows, scanConversation)
	if err != nil {
		return Conversation{}, readError(doing, err)
	}
	if c.ParticipantID != nil {
		p, err := s.participant(ctx, q, c.TenantID, *c.ParticipantID)
		if err != nil {
			return Conversation{}, err
		}
		c.Participant = &p
	}
	return c, nil
}

// GetConversation returns a conversation, or ErrNotFound. ch, when set, is the channel that the caller is bound to.
func (s *Store) GetConversation(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID) (Conversation, error) {
	rows, err := s.pool.Query(ctx, getConversationSQL, tenant, id)
	if err != nil {
		return Conversation{}, fmt.Errorf("activity: get conversation: %w", err)
	}
	c, err := pgx.CollectExactlyOneRow(rows, scanConversationWithParticipant)
	if err != nil {
		return Conversation{}, readError("get conversation", err)
	}
	if ch != nil && *ch != c.ChannelID {
		return Conversation{}, ErrNotFound
	}
	return c, nil
}

// ListConversations returns the tenant's conversations, newest first: those with an id below before (uuid.Nil: from the
// newest on), at most limit (1 to MaxPage) of them. The id of the last one is where the next page begins. What exists
// during the whole reading is never skipped and never comes twice: the order is by id, which does not change.
func (s *Store) ListConversations(ctx context.Context, tenant tenants.ID, f Filter, before uuid.UUID, limit int) (_ []Conversation, hasMore bool, _ error) {
	limit = pageSize(limit)
	sql, args := listConversationsSQL(tenant, f, before, limit+1)
	rows, err := s.pool.Query(ctx, sql, args...)
	if err != nil {
		return nil, false, fmt.Errorf("activity: list conversations: %w", err)
	}
	list, err := pgx.CollectRows(rows, scanConversationWithParticipant)
	if err != nil {
		return nil, false, readError("list conversations", err)
	}
	list, hasMore = cut(list, limit)
	return list, hasMore, nil
}

// listConversationsSQL has a text for each set of filters, so that each is planned with the index that it needs; one text
// with "$2 IS NULL OR …" would be planned once for all.
func listConversationsSQL(tenant tenants.ID, f Filter, before uuid.UUID, limit int) (string, []any) {
	var b strings.Builder
	var args []any
	arg := func(v any) string {
		args = append(args, v)
		return "$" + strconv.Itoa(len(args))
	}
	b.WriteString(conversationSelect)
	b.WriteString("\nWHERE c.tenant_id = " + arg(tenant))
	if before != uuid.Nil {
		b.WriteString(" AND c.id < " + arg(before))
	}
	if f.Status != "" {
		b.WriteString(" AND c.status = " + arg(f.Status))
	}
	if f.ChannelID != nil {
		b.WriteString(" AND c.channel_id = " + arg(*f.ChannelID))
	}
	if f.ExternalID != "" {
		// The identities' key begins with the channel; a tenant has few.
		b.WriteString(` AND c.participant_id IN (
    SELECT i.participant_id
    FROM participant_identities i
    JOIN channels h ON h.id = i.channel_id
    WHERE h.tenant_id = $1 AND i.tenant_id = $1 AND i.kind IN ('user_id', 'phone', 'external_id') AND i.value = ` + arg(f.ExternalID) + ")")
	}
	b.WriteString("\nORDER BY c.id DESC\nLIMIT " + arg(limit))
	return b.String(), args
}

// Reasons of a close or a reopening.
const (
	ReasonManual  = "manual"
	ReasonExpired = "expired"
)

// Close closes a conversation: its last activity is a conversationUpdate with metadata {"event":"closed","reason":reason},
// written and delivered in the same transaction; everything that was accepted before has a lower seq, everything after
// is ErrClosed. changed is false, and nothing is written, when it was closed already. ch, when set, is the channel that
// the caller is bound to. Errors: ErrNotFound, ErrLockTimeout.
func (s *Store) Close(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID, reason string) (_ Conversation, changed bool, _ error) {
	return s.setStatus(ctx, tenant, id, ch, StatusClosed, "closed", reason, nil)
}

// Reopen makes a closed conversation active again and writes a conversationUpdate with the event "reopened"; else as
// Close.
func (s *Store) Reopen(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID, reason string) (_ Conversation, changed bool, _ error) {
	return s.setStatus(ctx, tenant, id, ch, StatusActive, "reopened", reason, nil)
}

// CloseBy is Close by somebody who is not the tenant, with a record in the audit log.
func (s *Store) CloseBy(ctx context.Context, by tenants.Actor, tenant tenants.ID, id uuid.UUID, reason string) (_ Conversation, changed bool, _ error) {
	return s.setStatus(ctx, tenant, id, nil, StatusClosed, "closed", reason, &by)
}

// ReopenBy is Reopen by somebody who is not the tenant, with a record in the audit log.
func (s *Store) ReopenBy(ctx context.Context, by tenants.Actor, tenant tenants.ID, id uuid.UUID, reason string) (_ Conversation, changed bool, _ error) {
	return s.setStatus(ctx, tenant, id, nil, StatusActive, "reopened", reason, &by)
}

func (s *Store) setStatus(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch *uuid.UUID, status, event, reason string, by *tenants.Actor) (c Conversation, changed bool, err error) {
	metadata, err := json.Marshal(map[string]string{"event": event, "reason": reason})
	if err != nil {
		return c, false, fmt.Errorf("activity: encode reason: %w", err)
	}
	announce := []New{{
		TenantID: tenant, ConversationID: id, Type: TypeConversationUpdate, Sender: SenderSystem, Author: SenderSystem, Internal: true,
		Metadata: metadata,
	}}
	var after func()
	err = s.inTx(ctx, func(tx pgx.Tx) error {
		changed, after = false, nil
		if c, err = s.queryConversation(ctx, tx, "lock conversation", lockConversationSQL, tenant, id); err != nil {
			return err
		}
		switch {
		case ch != nil && *ch != c.ChannelID:
			return ErrNotFound
		case c.Status == status:
			return nil
		}
		changed = true
		before := c.Status
		// The activity is appended while the conversation is active: before it is closed, after it is reopened.
		if status == StatusActive {
			if c, err = s.queryConversation(ctx, tx, "reopen", setStatusSQL, tenant, id, status); err != nil {
				return err
			}
		}
		results, done, err := s.AppendTx(ctx, tx, announce)
		if err != nil {
			return err
		}
		if results[0].Err != nil {
			return results[0].Err
		}
		after = done
		c.LastSeq = results[0].Activity.Seq
		c.UpdatedAt = results[0].Activity.InsertedAt
		if status == StatusClosed {
			if c, err = s.queryConversation(ctx, tx, "close", setStatusSQL, tenant, id, status); err != nil {
				return err
			}
		}
		if by == nil {
			return nil
		}
		return tenants.AuditTx(ctx, tx, *by, tenants.Entry{TenantID: &tenant, Action: "toggle_status", ResourceType: "conversation", ResourceID: id.String(),
			Before: map[string]any{"status": before}, After: map[string]any{"status": status}})
	})
	if err != nil {
		return Conversation{}, false, err
	}
	if after != nil {
		after()
	}
	return c, changed, nil
}

// OpenConversationTx returns the conversation in which a message of participant goes on: the newest active one on the
// channel, unless nothing was said in it for longer than idle (0: however long), else a new one with metadata. Without a
// participant it is a new one each time. The participant's row, then the conversation's, are locked until the end of the
// transaction, so that parallel first messages of one person find one conversation. ErrNotFound when the channel or the
// participant is not there.
func (s *Store) OpenConversationTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, participant *uuid.UUID, idle time.Duration, metadata json.RawMessage) (_ Conversation, created bool, _ error) {
	var bad fault.Invalid
	metadata = checkMetadata(&bad, metadata)
	if err := bad.Err(); err != nil {
		return Conversation{}, false, err
	}
	if participant != nil {
		if _, err := s.queryParticipant(ctx, tx, "lock participant", lockParticipantSQL, tenant, *participant); err != nil {
			return Conversation{}, false, err
		}
		c, err := s.queryConversation(ctx, tx, "find conversation", openConversationSQL, tenant, *participant, ch, idle.Microseconds())
		if !errors.Is(err, ErrNotFound) {
			return c, false, err
		}
	}
	c, err := s.insertConversation(ctx, tx, tenant, ch, participant, metadata, StatusActive)
	return c, err == nil, err
}

// inTx runs do in a transaction that waits no longer than the lock time-out for a lock, again when it was sacrificed to
// another one.
func (s *Store) inTx(ctx context.Context, do func(pgx.Tx) error) error {
	for try := 1; ; try++ {
		err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, lockTimeoutSQL, milliseconds(s.o.LockTimeout)); err != nil {
				return fmt.Errorf("activity: set lock time-out: %w", err)
			}
			return do(tx)
		})
		if try == maxTries || !postgres.IsSerialization(err) {
			return lockError(err)
		}
	}
}

// scanConversation reads conversationColumns.
func scanConversation(row pgx.CollectableRow) (Conversation, error) {
	var c Conversation
	err := row.Scan(&c.TenantID, &c.ID, &c.ChannelID, &c.ParticipantID, &c.Status, &c.LastSeq, (*[]byte)(&c.Metadata),
		&c.InsertedAt, &c.UpdatedAt)
	c.InsertedAt, c.UpdatedAt = c.InsertedAt.UTC(), c.UpdatedAt.UTC()
	return c, err
}

// scanConversationWithParticipant reads the columns of conversationSelect.
func scanConversationWithParticipant(row pgx.CollectableRow) (Conversation, error) {
	var c Conversation
	var p struct {
		channelID             *uuid.UUID
		externalID            *string
		displayName           *string
		metadata              []byte
		insertedAt, updatedAt *time.Time
	}
	err := row.Scan(&c.TenantID, &c.ID, &c.ChannelID, &c.ParticipantID, &c.Status, &c.LastSeq, (*[]byte)(&c.Metadata),
		&c.InsertedAt, &c.UpdatedAt, &p.channelID, &p.externalID, &p.displayName, &p.metadata, &p.insertedAt, &p.updatedAt)
	if err != nil {
		return c, err
	}
	c.InsertedAt, c.UpdatedAt = c.InsertedAt.UTC(), c.UpdatedAt.UTC()
	if p.channelID != nil {
		c.Participant = &Participant{
			TenantID: c.TenantID, ID: *c.ParticipantID, ChannelID: *p.channelID, ExternalID: *p.externalID,
			DisplayName: p.displayName, Metadata: p.metadata, InsertedAt: p.insertedAt.UTC(), UpdatedAt: p.updatedAt.UTC(),
		}
	}
	return c, nil
}
