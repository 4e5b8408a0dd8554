package activity

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/postgres"
	"converger/internal/tenants"
)

// MaxExternalID is the limit of an identity and of a display name, in characters.
const MaxExternalID = 255

const (
	participantColumns = `p.tenant_id, p.id, p.channel_id, p.external_id, p.display_name, p.metadata, p.inserted_at, p.updated_at`

	participantSelect = `
SELECT ` + participantColumns + `
FROM participants p
WHERE p.tenant_id = $1 AND p.id = $2`

	lockParticipantSQL = participantSelect + `
FOR NO KEY UPDATE`

	identitiesSQL = `
SELECT i.ord, p.participant_id
FROM unnest($3::text[], $4::text[]) WITH ORDINALITY AS i (kind, value, ord)
JOIN participant_identities p ON p.tenant_id = $1 AND p.channel_id = $2 AND p.kind = i.kind AND p.value = i.value
ORDER BY i.ord`

	createParticipantSQL = `
INSERT INTO participants AS p (tenant_id, id, channel_id, external_id, display_name, metadata)
SELECT h.tenant_id, $2::uuid, h.id, $4::text, $5::text, $6::jsonb
FROM channels h
WHERE h.tenant_id = $1 AND h.id = $3 AND h.deleted_at IS NULL
RETURNING ` + participantColumns

	// addIdentitiesSQL waits for a concurrent transaction that adds one of them, in an order that all keep.
	addIdentitiesSQL = `
INSERT INTO participant_identities (tenant_id, channel_id, kind, value, participant_id)
SELECT $1::uuid, $2::uuid, i.kind, i.value, $5::uuid
FROM unnest($3::text[], $4::text[]) AS i (kind, value)
ORDER BY i.kind, i.value
ON CONFLICT DO NOTHING`

	updateParticipantSQL = `
UPDATE participants p
SET display_name = coalesce($3, p.display_name), metadata = p.metadata || $4, updated_at = now()
WHERE p.tenant_id = $1 AND p.id = $2
RETURNING ` + participantColumns
)

// errTaken: an identity of a new participant was another's by the time it was written.
var errTaken = errors.New("activity: identity is taken")

// ResolveParticipantTx finds the person behind the identities of p, or makes a new participant of them, and locks the
// row until the end of the transaction. A user_id counts before any other kind, else their order does. Identities that
// are new are added; when two of them belong to two participants, the better one wins, nothing is merged or moved, and
// the log says so. A display name that is given replaces the old one, members of the metadata are merged in.
//
// ErrNotFound when the channel is not there, *[fault.Invalid] for identities or a name that can't be stored.
func (s *Store) ResolveParticipantTx(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, p channel.Participant) (Participant, error) {
	person, err := newPerson(p)
	if err != nil {
		return Participant{}, err
	}
	for try := 1; ; try++ {
		id, found, err := s.findParticipant(ctx, tx, tenant, ch, person)
		if err != nil {
			return Participant{}, err
		}
		if found {
			return s.refreshParticipant(ctx, tx, tenant, ch, id, person)
		}
		created, err := s.createParticipant(ctx, tx, tenant, ch, person)
		if try == maxTries || !errors.Is(err, errTaken) {
			return created, err
		}
	}
}

// person is a [channel.Participant] in the form in which it is stored.
type person struct {
	kinds, values []string // the best first
	displayName   *string
	metadata      json.RawMessage
}

func newPerson(p channel.Participant) (person, error) {
	var bad fault.Invalid
	if len(p.Identities) == 0 {
		bad.Addf("/external_id", fault.Required, "a participant needs an identity")
	}
	ids := slices.Clone(p.Identities)
	slices.SortStableFunc(ids, func(a, b channel.Identity) int { return cmp.Compare(rank(a), rank(b)) })
	var out person
	for i, id := range ids {
		if slices.Contains(ids[:i], id) {
			continue
		}
		checkName(&bad, "/external_id", id.Value)
		out.kinds, out.values = append(out.kinds, string(id.Kind)), append(out.values, id.Value)
	}
	if p.DisplayName != "" {
		checkName(&bad, "/display_name", p.DisplayName)
		out.displayName = &p.DisplayName
	}
	if len(p.Metadata) > 0 {
		raw, err := json.Marshal(p.Metadata)
		if err != nil {
			return out, fmt.Errorf("activity: encode the participant's metadata: %w", err)
		}
		out.metadata = raw
	}
	out.metadata = checkMetadata(&bad, out.metadata)
	return out, bad.Err()
}

// rank is 0 for the kind that never changes hands; a telephone number may be another's next year.
func rank(id channel.Identity) int {
	if id.Kind == channel.IdentityUserID {
		return 0
	}
	return 1
}

func checkName(bad *fault.Invalid, pointer, name string) {
	if checkText(bad, pointer, name) {
		switch {
		case strings.TrimSpace(name) == "":
			bad.Addf(pointer, fault.Required, "must not be empty")
		case utf8.RuneCountInString(name) > MaxExternalID:
			bad.Addf(pointer, fault.TooLong, "should be at most %d characters", MaxExternalID)
		}
	}
}

func (s *Store) findParticipant(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, p person) (best uuid.UUID, found bool, _ error) {
	rows, err := tx.Query(ctx, identitiesSQL, tenant, ch, p.kinds, p.values)
	if err != nil {
		return best, false, fmt.Errorf("activity: find participant: %w", err)
	}
	var ord int64
	var id uuid.UUID
	_, err = pgx.ForEachRow(rows, []any{&ord, &id}, func() error {
		if !found {
			best, found = id, true
		} else if id != best {
			// The values are personal data and stay out of the log.
			s.o.Logger.WarnContext(ctx, "identities of two participants in one message", "tenant_id", tenant,
				"channel_id", ch, "kept", best, "other", id, "other_kind", p.kinds[ord-1])
		}
		return nil
	})
	if err != nil {
		return best, false, fmt.Errorf("activity: find participant: %w", err)
	}
	return best, found, nil
}

// createParticipant makes a participant, or fails with errTaken and leaves nothing when another transaction has just
// made one of these identities.
func (s *Store) createParticipant(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch uuid.UUID, p person) (created Participant, _ error) {
	id, err := uuid.NewV7()
	if err != nil {
		return created, fmt.Errorf("activity: make an id: %w", err)
	}
	// A savepoint and not a DELETE: who waits for one of our identities goes on at once, and not after our commit.
	err = pgx.BeginFunc(ctx, tx, func(tx pgx.Tx) error {
		created, err = s.queryParticipant(ctx, tx, "create participant", createParticipantSQL,
			tenant, id, ch, p.values[0], p.displayName, p.metadata)
		if err != nil {
			return err
		}
		tag, err := tx.Exec(ctx, addIdentitiesSQL, tenant, ch, p.kinds, p.values, id)
		if err != nil {
			return fmt.Errorf("activity: add identities: %w", err)
		}
		if tag.RowsAffected() < int64(len(p.kinds)) {
			return errTaken
		}
		return nil
	})
	return created, err
}

// refreshParticipant locks a participant and brings it up to date.
func (s *Store) refreshParticipant(ctx context.Context, tx pgx.Tx, tenant tenants.ID, ch, id uuid.UUID, p person) (Participant, error) {
	old, err := s.queryParticipant(ctx, tx, "lock participant", lockParticipantSQL, tenant, id)
	if err != nil {
		return old, err
	}
	if len(p.kinds) > 1 {
		if _, err := tx.Exec(ctx, addIdentitiesSQL, tenant, ch, p.kinds, p.values, id); err != nil {
			return old, fmt.Errorf("activity: add identities: %w", err)
		}
	}
	renamed := p.displayName != nil && (old.DisplayName == nil || *old.DisplayName != *p.displayName)
	if !renamed && bytes.Equal(p.metadata, emptyObject) {
		return old, nil
	}
	return s.queryParticipant(ctx, tx, "update participant", updateParticipantSQL, tenant, id, p.displayName, p.metadata)
}

func (s *Store) participant(ctx context.Context, q postgres.Querier, tenant tenants.ID, id uuid.UUID) (Participant, error) {
	return s.queryParticipant(ctx, q, "read participant", participantSelect, tenant, id)
}

func (s *Store) queryParticipant(ctx context.Context, q postgres.Querier, doing, sql string, args ...any) (Participant, error) {
	rows, err := q.Query(ctx, sql, args...)
	if err != nil {
		return Participant{}, readError(doing, err)
	}
	p, err := pgx.CollectExactlyOneRow(rows, scanParticipant)
	return p, readError(doing, err)
}

// scanParticipant reads participantColumns.
func scanParticipant(row pgx.CollectableRow) (Participant, error) {
	var p Participant
	err := row.Scan(&p.TenantID, &p.ID, &p.ChannelID, &p.ExternalID, &p.DisplayName, (*[]byte)(&p.Metadata), &p.InsertedAt, &p.UpdatedAt)
	p.InsertedAt, p.UpdatedAt = p.InsertedAt.UTC(), p.UpdatedAt.UTC()
	return p, err
}
