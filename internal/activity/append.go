package activity

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/fault"
	"converger/internal/tenants"
)

// The statements of an append take columns, one value of each for every item; an item is named in the answer by its
// ordinal, from 1 on. uuid.Nil stands for no restriction and for no reply.
const (
	// inputCTE finds the items whose conversation is there, of the right channel and active, and claims their keys.
	// Whoever has a key but can't claim it falls out of fresh: the key is another's, who has committed.
	//
	// Keys are claimed before conversations are locked, and both in order, in every transaction: no deadlock.
	inputCTE = `
WITH input AS MATERIALIZED (
    SELECT i.*
    FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[], $6::bytea[], $7::boolean[], $8::uuid[])
        WITH ORDINALITY AS i (tenant_id, conversation_id, channel_id, caller, key, body_hash, claim, id, ord)
    JOIN conversations c ON c.tenant_id = i.tenant_id AND c.id = i.conversation_id
    WHERE c.status = 'active' AND i.channel_id IN (c.channel_id, '00000000-0000-0000-0000-000000000000')
), claimed AS (
    INSERT INTO idempotency_keys (tenant_id, conversation_id, caller, key, body_hash, activity_id)
    SELECT tenant_id, conversation_id, caller, key, body_hash, id
    FROM input
    WHERE claim
    ORDER BY tenant_id, conversation_id, caller, key
    ON CONFLICT DO NOTHING
    RETURNING activity_id
), fresh AS MATERIALIZED (
    SELECT i.*, row_number() OVER (PARTITION BY i.conversation_id ORDER BY i.ord) AS nth
    FROM input i
    WHERE NOT i.claim OR i.id IN (SELECT activity_id FROM claimed)
), wanted AS MATERIALIZED (
    SELECT tenant_id, conversation_id, count(*) AS items
    FROM fresh
    GROUP BY tenant_id, conversation_id
), locked AS MATERIALIZED (
    SELECT c.tenant_id, c.id, w.items
    FROM conversations c
    JOIN wanted w ON w.tenant_id = c.tenant_id AND w.conversation_id = c.id
    ORDER BY c.id
    FOR NO KEY UPDATE OF c
)`

	// lockSQL claims and locks, and answers with the fresh items: what they reply to can be judged now.
	lockSQL = inputCTE + `
SELECT f.ord
FROM fresh f
JOIN locked l ON l.id = f.conversation_id`

	// insertSQL claims, locks, numbers and inserts.
	insertSQL = inputCTE + `, content AS (
    SELECT *
    FROM unnest($8::uuid[], $9::text[], $10::text[], $11::text[], $12::text[], $13::text[], $14::uuid[], $15::text[])
        AS t (id, type, sender, text, attachments, metadata, reply_to_id, author)
), bumped AS (
    UPDATE conversations c
    SET last_seq = c.last_seq + l.items, updated_at = now()
    FROM locked l
    WHERE c.tenant_id = l.tenant_id AND c.id = l.id AND c.status = 'active'
    RETURNING c.id, c.channel_id, c.participant_id, c.last_seq - l.items AS base
), inserted AS (
    INSERT INTO activities
        (tenant_id, id, conversation_id, seq, type, sender, author, text, attachments, metadata, idempotency_key, reply_to_id)
    SELECT f.tenant_id, f.id, f.conversation_id, b.base + f.nth, t.type, t.sender, t.author, t.text,
        t.attachments::jsonb, t.metadata::jsonb, nullif(f.key, ''),
        nullif(t.reply_to_id, '00000000-0000-0000-0000-000000000000')
    FROM fresh f
    JOIN bumped b ON b.id = f.conversation_id
    JOIN content t ON t.id = f.id
)
SELECT f.ord, b.base + f.nth, b.channel_id, coalesce(p.external_id, ''), now()
FROM fresh f
JOIN bumped b ON b.id = f.conversation_id
LEFT JOIN participants p ON p.tenant_id = f.tenant_id AND p.id = b.participant_id`

	// explainSQL says why items were not inserted: no row, no such conversation; no key, closed.
	explainSQL = `
SELECT i.ord, k.activity_id, k.body_hash
FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::text[], $5::text[])
    WITH ORDINALITY AS i (tenant_id, conversation_id, channel_id, caller, key, ord)
JOIN conversations c ON c.tenant_id = i.tenant_id AND c.id = i.conversation_id
LEFT JOIN idempotency_keys k ON k.tenant_id = i.tenant_id AND k.conversation_id = i.conversation_id
    AND k.caller = i.caller AND k.key = i.key AND i.key <> ''
WHERE i.channel_id IN (c.channel_id, '00000000-0000-0000-0000-000000000000')`

	unclaimSQL = `
DELETE FROM idempotency_keys k
USING unnest($1::uuid[], $2::uuid[], $3::text[], $4::text[]) AS i (tenant_id, conversation_id, caller, key)
WHERE k.tenant_id = i.tenant_id AND k.conversation_id = i.conversation_id AND k.caller = i.caller AND k.key = i.key`

	repliedSQL = `
SELECT i.ord, a.conversation_id, a.type, a.sender, a.author, a.deleted_at IS NOT NULL
FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS i (tenant_id, id, ord)
JOIN activities a ON a.tenant_id = i.tenant_id AND a.id = i.id`

	stampSQL = `
UPDATE activities a
SET edited_at = CASE WHEN i.edited THEN now() ELSE a.edited_at END,
    deleted_at = CASE WHEN i.deleted THEN now() ELSE a.deleted_at END
FROM unnest($1::uuid[], $2::uuid[], $3::boolean[], $4::boolean[]) AS i (tenant_id, id, edited, deleted)
WHERE a.tenant_id = i.tenant_id AND a.id = i.id`
)

// entry is a New on its way through the statements of one transaction.
type entry struct {
	new     *New
	id      uuid.UUID
	res     *Result
	claimed bool // its key was claimed by an earlier statement
	settled bool // res is final
}

// appended is what a transaction has done.
type appended struct {
	created []Activity
	wake    func() // nil: nothing to wake
}

// appendItems appends news within one transaction and writes what became of each into results. news must have passed
// Validate. The error is that of the whole transaction.
func (s *Store) appendItems(ctx context.Context, tx *session, news []*New, results []Result) (done appended, _ error) {
	todo := make([]entry, len(news))
	for i, n := range news {
		id := n.ID
		if id == uuid.Nil {
			var err error
			if id, err = uuid.NewV7(); err != nil {
				return done, fmt.Errorf("activity: make an id: %w", err)
			}
		}
		todo[i] = entry{new: n, id: id, res: &results[i]}
	}
	for len(todo) > 0 {
		first, later := splitByKey(todo)
		if err := s.appendDistinct(ctx, tx, first); err != nil {
			return done, err
		}
		todo = nil
		for _, l := range later {
			lead := first[l.lead]
			if res, ok := follow(lead.new, lead.res, l.new); ok {
				*l.res = res
			} else {
				todo = append(todo, l.entry)
			}
		}
	}

	created := 0
	for i := range results {
		if results[i].Err == nil && !results[i].Repeat {
			created++
		}
	}
	if created == 0 {
		return done, nil
	}
	done.created = make([]Activity, 0, created)
	work := make([]Work, 0, created)
	var files uploadColumns
	for i, n := range news {
		r := &results[i]
		if r.Err != nil || r.Repeat {
			continue
		}
		a := &r.Activity
		done.created = append(done.created, *a)
		files.add(a, n.Uploads)
		for _, t := range s.targets.Targets(a.ChannelID, n) {
			work = append(work, Work{
				TenantID: a.TenantID, ChannelID: t.ChannelID, Ordered: t.Ordered,
				ConversationID: a.ConversationID, ActivityID: a.ID, Seq: a.Seq,
			})
		}
	}
	if len(files.id) > 0 {
		if _, err := tx.tx.Exec(ctx, insertUploadsSQL, files.args()...); err != nil {
			return done, fmt.Errorf("activity: insert attachments: %w", err)
		}
	}
	if len(work) > 0 {
		wake, err := s.enqueuer.EnqueueTx(ctx, tx.tx, work)
		if err != nil {
			return done, fmt.Errorf("activity: enqueue deliveries: %w", err)
		}
		done.wake = wake
	}
	return done, nil
}

// follower is an entry with the same key as the lead-th of the entries that go first.
type follower struct {
	entry
	lead int
}

// splitByKey takes out what repeats a key within todo.
func splitByKey(todo []entry) (first []entry, later []follower) {
	seen := make(map[keyRef]int, len(todo))
	first = todo[:0]
	for _, e := range todo {
		if e.new.IdempotencyKey != "" {
			key := keyOf(e.new)
			if lead, there := seen[key]; there {
				later = append(later, follower{e, lead})
				continue
			}
			seen[key] = len(first)
		}
		first = append(first, e)
	}
	return first, later
}

// appendDistinct appends entries of which no two have the same key.
func (s *Store) appendDistinct(ctx context.Context, tx *session, all []entry) error {
	replies := false
	for i := range all {
		replies = replies || all[i].new.ReplyToID != nil
	}
	var stamps []stamp
	if replies {
		var err error
		if stamps, err = s.lockAndCheckReplies(ctx, tx, all); err != nil {
			return err
		}
	}

	cols := newColumns(len(all))
	for i := range all {
		if !all[i].settled && (!replies || all[i].claimed) {
			cols.add(i, &all[i])
		}
	}
	if len(cols.entries) > 0 {
		err := tx.query(ctx, insertSQL, cols.insertArgs(), func(rows pgx.Rows) error {
			var ord, seq int64
			var ch uuid.UUID
			var external string
			var at time.Time
			if err := rows.Scan(&ord, &seq, &ch, &external, &at); err != nil {
				return err
			}
			e := &all[cols.entries[ord-1]]
			if e.new.ParticipantExternalID == "" {
				e.new.ParticipantExternalID = external
			}
			e.res.Activity = newActivity(e, seq, ch, at)
			e.settled = true
			return nil
		})
		if err != nil {
			return fmt.Errorf("activity: append: %w", err)
		}
	}
	if err := s.explain(ctx, tx, all); err != nil {
		return err
	}
	return s.stamp(ctx, tx, all, stamps)
}

func newActivity(e *entry, seq int64, ch uuid.UUID, at time.Time) Activity {
	n := e.new
	a := Activity{
		TenantID: n.TenantID, ID: e.id, ConversationID: n.ConversationID, ChannelID: ch, Seq: seq,
		Type: n.Type, Sender: n.Sender, Text: n.Text, Attachments: joinArray(n.Attachments), Metadata: n.Metadata,
		ReplyToID: n.ReplyToID, InsertedAt: at.UTC(),
	}
	if n.IdempotencyKey != "" {
		a.IdempotencyKey = &n.IdempotencyKey
	}
	return a
}

// columns are the arguments of inputCTE and insertSQL.
type columns struct {
	entries                                          []int // which entry each row is
	tenant, conversation, channel, id, replyTo       []uuid.UUID
	caller, key, kind, sender, attachments, metadata []string
	author                                           []string
	text                                             []*string
	hash                                             [][]byte
	claim                                            []bool
}

func newColumns(n int) *columns {
	ids, words := make([]uuid.UUID, 5*n), make([]string, 7*n)
	id := func(i int) []uuid.UUID { return ids[i*n : i*n : (i+1)*n] }
	word := func(i int) []string { return words[i*n : i*n : (i+1)*n] }
	return &columns{
		entries: make([]int, 0, n),
		tenant:  id(0), conversation: id(1), channel: id(2), id: id(3), replyTo: id(4),
		caller: word(0), key: word(1), kind: word(2), sender: word(3), attachments: word(4), metadata: word(5), author: word(6),
		text: make([]*string, 0, n), hash: make([][]byte, 0, n), claim: make([]bool, 0, n),
	}
}

func (c *columns) add(index int, e *entry) {
	n := e.new
	c.entries = append(c.entries, index)
	c.tenant = append(c.tenant, n.TenantID)
	c.conversation = append(c.conversation, n.ConversationID)
	c.channel = append(c.channel, orNil(n.ChannelID))
	c.caller = append(c.caller, n.Caller)
	c.key = append(c.key, n.IdempotencyKey)
	c.hash = append(c.hash, n.BodyHash)
	c.claim = append(c.claim, n.IdempotencyKey != "" && !e.claimed)
	c.id = append(c.id, e.id)
	c.kind = append(c.kind, n.Type)
	c.sender = append(c.sender, n.Sender)
	c.author = append(c.author, n.Author)
	c.text = append(c.text, n.Text)
	c.attachments = append(c.attachments, string(joinArray(n.Attachments)))
	c.metadata = append(c.metadata, string(n.Metadata))
	c.replyTo = append(c.replyTo, orNil(n.ReplyToID))
}

func (c *columns) lockArgs() []any {
	return []any{c.tenant, c.conversation, c.channel, c.caller, c.key, c.hash, c.claim, c.id}
}

func (c *columns) insertArgs() []any {
	return append(c.lockArgs(), c.kind, c.sender, c.text, c.attachments, c.metadata, c.replyTo, c.author)
}

func orNil(id *uuid.UUID) uuid.UUID {
	if id == nil {
		return uuid.Nil
	}
	return *id
}

// joinArray makes one JSON array of its elements.
func joinArray(elements []json.RawMessage) json.RawMessage {
	if len(elements) == 0 {
		return emptyArray
	}
	size := 1
	for _, e := range elements {
		size += len(e) + 1
	}
	b := make([]byte, 0, size)
	for i, e := range elements {
		if i == 0 {
			b = append(b, '[')
		} else {
			b = append(b, ',')
		}
		b = append(b, e...)
	}
	return append(b, ']')
}

// stamp is what an accepted edit does to the activity that it names.
type stamp struct {
	entry  int
	target uuid.UUID
}

// lockAndCheckReplies claims the keys and locks the conversations of all entries in a statement of its own, so that what
// they reply to can be read as it is under the lock. Entries with a wrong target are settled; those that may be inserted
// are marked as claimed.
func (s *Store) lockAndCheckReplies(ctx context.Context, tx *session, all []entry) ([]stamp, error) {
	cols := newColumns(len(all))
	for i := range all {
		cols.add(i, &all[i])
	}
	err := tx.query(ctx, lockSQL, cols.lockArgs(), func(rows pgx.Rows) error {
		var ord int64
		if err := rows.Scan(&ord); err != nil {
			return err
		}
		all[ord-1].claimed = true
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("activity: lock conversations: %w", err)
	}

	var replying []int
	var tenant, target []uuid.UUID
	for i := range all {
		if all[i].claimed && all[i].new.ReplyToID != nil {
			replying = append(replying, i)
			tenant, target = append(tenant, all[i].new.TenantID), append(target, *all[i].new.ReplyToID)
		}
	}
	if len(replying) == 0 {
		return nil, nil
	}
	found := make([]replied, len(replying))
	err = tx.query(ctx, repliedSQL, []any{tenant, target}, func(rows pgx.Rows) error {
		var ord int64
		var r replied
		if err := rows.Scan(&ord, &r.conversation, &r.kind, &r.sender, &r.author, &r.deleted); err != nil {
			return err
		}
		found[ord-1] = r
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("activity: read what is replied to: %w", err)
	}

	var stamps []stamp
	gone := make(map[uuid.UUID]bool) // deleted by an earlier entry of this transaction
	for i, index := range replying {
		e, r := &all[index], &found[i]
		r.deleted = r.deleted || gone[target[i]]
		if err := r.accepts(e.new); err != nil {
			e.res.Err = err
			e.settled = true
			continue
		}
		switch e.new.Type {
		case TypeMessageDelete:
			gone[target[i]] = true
			stamps = append(stamps, stamp{index, target[i]})
		case TypeMessageUpdate:
			stamps = append(stamps, stamp{index, target[i]})
		}
	}
	return stamps, nil
}

// replied is an activity that another one replies to.
type replied struct {
	conversation uuid.UUID // uuid.Nil: there is none
	kind, sender string
	author       string
	deleted      bool
}

const replyPointer = "/reply_to_id"

func (r *replied) accepts(n *New) error {
	if r.conversation != n.ConversationID {
		return fault.Invalidf(replyPointer, fault.NotFound, "does not exist in this conversation")
	}
	switch n.Type {
	case TypeMessageReaction, TypeMessageUpdate, TypeMessageDelete:
	default:
		return nil
	}
	switch {
	case r.kind != TypeMessage:
		return fault.Invalidf(replyPointer, fault.Conflict, "%s needs the id of a message, this is a %s", n.Type, r.kind)
	case n.Type == TypeMessageReaction:
	case r.sender != n.Sender, n.Author == "", n.Author != r.author && n.Author != AuthorTenant:
		return fault.Invalidf(replyPointer, fault.Conflict, "only the sender of a message may change or delete it")
	case r.deleted:
		return fault.Invalidf(replyPointer, fault.Conflict, "the message was deleted")
	}
	return nil
}

// explain settles the entries that were not inserted, and gives back the keys that they claimed.
func (s *Store) explain(ctx context.Context, tx *session, all []entry) error {
	var open []int
	cols := newColumns(0)
	for i := range all {
		if !all[i].settled {
			open = append(open, i)
			cols.add(i, &all[i])
			all[i].res.Err = ErrNotFound
		}
	}
	var unclaim []int
	for i := range all {
		if all[i].settled && all[i].claimed && all[i].res.Err != nil && all[i].new.IdempotencyKey != "" {
			unclaim = append(unclaim, i)
		}
	}
	var repeats []int
	var original []uuid.UUID
	if len(open) > 0 {
		args := []any{cols.tenant, cols.conversation, cols.channel, cols.caller, cols.key}
		err := tx.query(ctx, explainSQL, args, func(rows pgx.Rows) error {
			var ord int64
			var id *uuid.UUID
			var hash []byte
			if err := rows.Scan(&ord, &id, &hash); err != nil {
				return err
			}
			e := &all[open[ord-1]]
			switch {
			case id == nil:
				e.res.Err = ErrClosed
			case *id == e.id:
				e.res.Err = ErrClosed // after the key was claimed
				unclaim = append(unclaim, open[ord-1])
			case !bytes.Equal(hash, e.new.BodyHash):
				e.res.Err = ErrKeyReused
			default:
				repeats, original = append(repeats, open[ord-1]), append(original, *id)
			}
			return nil
		})
		if err != nil {
			return fmt.Errorf("activity: find out why: %w", err)
		}
	}
	if len(unclaim) > 0 {
		cols := newColumns(len(unclaim))
		for _, i := range unclaim {
			cols.add(i, &all[i])
		}
		if _, err := tx.tx.Exec(ctx, unclaimSQL, cols.tenant, cols.conversation, cols.caller, cols.key); err != nil {
			return fmt.Errorf("activity: give keys back: %w", err)
		}
	}
	if len(repeats) > 0 {
		tenant := make([]tenants.ID, len(repeats))
		for i, index := range repeats {
			tenant[i] = all[index].new.TenantID
		}
		return s.answerRepeats(ctx, tx, all, repeats, tenant, original)
	}
	return nil
}

func (s *Store) answerRepeats(ctx context.Context, tx *session, all []entry, repeats []int, tenant, original []uuid.UUID) error {
	byID := make(map[uuid.UUID]Activity, len(original))
	err := tx.query(ctx, originalsSQL, []any{tenant, original}, func(rows pgx.Rows) error {
		a, err := scanActivity(rows)
		byID[a.ID] = a
		return err
	})
	if err != nil {
		return fmt.Errorf("activity: read originals: %w", err)
	}
	for i, index := range repeats {
		// Without an original its month was dropped while the key still stands: ErrNotFound stays.
		if a, ok := byID[original[i]]; ok {
			*all[index].res = Result{Activity: a, Repeat: true}
		}
	}
	return nil
}

// stamp marks the originals of the edits that were inserted.
func (s *Store) stamp(ctx context.Context, tx *session, all []entry, stamps []stamp) error {
	var tenant, target []uuid.UUID
	var edited, deleted []bool
	row := make(map[uuid.UUID]int, len(stamps))
	for _, st := range stamps {
		e := &all[st.entry]
		if e.res.Err != nil {
			continue
		}
		i, there := row[st.target]
		if !there {
			i = len(target)
			row[st.target] = i
			tenant, target = append(tenant, e.new.TenantID), append(target, st.target)
			edited, deleted = append(edited, false), append(deleted, false)
		}
		edited[i] = edited[i] || e.new.Type == TypeMessageUpdate
		deleted[i] = deleted[i] || e.new.Type == TypeMessageDelete
	}
	if len(target) == 0 {
		return nil
	}
	if _, err := tx.tx.Exec(ctx, stampSQL, tenant, target, edited, deleted); err != nil {
		return fmt.Errorf("activity: stamp originals: %w", err)
	}
	return nil
}

// isRefusal reports whether err is the fault of the one item that it belongs to.
func isRefusal(err error) bool {
	var invalid *fault.Invalid
	return errors.Is(err, ErrNotFound) || errors.Is(err, ErrClosed) || errors.Is(err, ErrKeyReused) || errors.As(err, &invalid)
}
