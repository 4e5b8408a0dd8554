package activity

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/tenants"
)

// Upload is a file that came with an activity. Package upload keeps its bytes.
type Upload struct {
	ID          uuid.UUID // version 7; with the tenant's it names the file in the storage
	ContentType string    // as sniffed from the bytes
	Size        int64     // bytes
	SHA256      [sha256.Size]byte
	Name        string // a label, cleaned
	URL         string // where clients fetch it: the contentUrl of its attachment; not stored beside it
}

// attachment is the upload as an attachment of its activity, in the form that Validate gives to others.
func (u *Upload) attachment() json.RawMessage {
	return encode(map[string]any{"contentType": u.ContentType, "contentUrl": u.URL, "name": u.Name, "size": u.Size})
}

const (
	insertUploadsSQL = `
INSERT INTO attachments (tenant_id, id, conversation_id, activity_id, content_type, size, sha256, filename)
SELECT tenant_id, id, conversation_id, activity_id, content_type, size, sha256, filename
FROM unnest($1::uuid[], $2::uuid[], $3::uuid[], $4::uuid[], $5::text[], $6::bigint[], $7::bytea[], $8::text[])
    AS u (tenant_id, id, conversation_id, activity_id, content_type, size, sha256, filename)`

	getUploadSQL = `
SELECT a.id, a.conversation_id, c.channel_id, a.content_type, a.size, a.sha256, a.filename
FROM attachments a
JOIN conversations c ON c.tenant_id = a.tenant_id AND c.id = a.conversation_id
WHERE a.tenant_id = $1 AND a.id = $2`

	orphanUploadsAllTenantsSQL = `
SELECT u.ord
FROM unnest($1::uuid[], $2::uuid[]) WITH ORDINALITY AS u (tenant_id, id, ord)
JOIN tenants t ON t.id = u.tenant_id
WHERE NOT EXISTS (SELECT FROM attachments a WHERE a.tenant_id = u.tenant_id AND a.id = u.id)`
)

// uploadColumns are the arguments of insertUploadsSQL.
type uploadColumns struct {
	tenant, id, conversation, activity []uuid.UUID
	contentType, name                  []string
	size                               []int64
	sum                                [][]byte
}

func (c *uploadColumns) add(a *Activity, uploads []Upload) {
	for i := range uploads {
		u := &uploads[i]
		c.tenant, c.id = append(c.tenant, a.TenantID), append(c.id, u.ID)
		c.conversation, c.activity = append(c.conversation, a.ConversationID), append(c.activity, a.ID)
		c.contentType, c.name = append(c.contentType, u.ContentType), append(c.name, u.Name)
		c.size, c.sum = append(c.size, u.Size), append(c.sum, u.SHA256[:])
	}
}

func (c *uploadColumns) args() []any {
	return []any{c.tenant, c.id, c.conversation, c.activity, c.contentType, c.size, c.sum, c.name}
}

// GetUpload returns an upload of the tenant, without its URL. ch and conversation, when set, are those that the caller is
// bound to; one of another is ErrNotFound.
func (s *Store) GetUpload(ctx context.Context, tenant tenants.ID, id uuid.UUID, ch, conversation *uuid.UUID) (Upload, error) {
	var u Upload
	var inConversation, inChannel uuid.UUID
	var sum []byte
	err := s.pool.QueryRow(ctx, getUploadSQL, tenant, id).
		Scan(&u.ID, &inConversation, &inChannel, &u.ContentType, &u.Size, &sum, &u.Name)
	if err != nil {
		return Upload{}, readError("get attachment", err)
	}
	if ch != nil && *ch != inChannel || conversation != nil && *conversation != inConversation {
		return Upload{}, ErrNotFound
	}
	copy(u.SHA256[:], sum)
	return u, nil
}

// OrphanUploadsAllTenants returns which of the files named by tenants and ids, side by side, have no row although their
// tenant is in this database, as indices.
func (s *Store) OrphanUploadsAllTenants(ctx context.Context, tenant []tenants.ID, id []uuid.UUID) ([]int, error) {
	rows, err := s.pool.Query(ctx, orphanUploadsAllTenantsSQL, tenant, id)
	if err != nil {
		return nil, fmt.Errorf("activity: find orphaned uploads: %w", err)
	}
	orphans, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (int, error) {
		var ord int
		err := row.Scan(&ord)
		return ord - 1, err
	})
	if err != nil {
		return nil, fmt.Errorf("activity: find orphaned uploads: %w", err)
	}
	return orphans, nil
}
