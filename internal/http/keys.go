package http

import (
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/tenants"
)

// registerKeyRoutes: the API keys of a tenant.
func (s *server) registerKeyRoutes() {
	s.operatorRoute(http.MethodPost, "/tenants/{tenant_id}/keys", bodyJSON, s.createKey)
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/keys", bodyNone, s.listKeys)
	s.operatorRoute(http.MethodPost, "/tenants/{tenant_id}/keys/{key_id}/revoke", bodyOptional, s.revokeKey)
}

type keyBody struct {
	ID         uuid.UUID  `json:"id"`
	TenantID   uuid.UUID  `json:"tenant_id"`
	Name       string     `json:"name"`
	Prefix     string     `json:"prefix"`
	Scopes     []string   `json:"scopes"`
	ExpiresAt  *time.Time `json:"expires_at"`
	RevokedAt  *time.Time `json:"revoked_at"` // may lie ahead
	LastUsedAt *time.Time `json:"last_used_at"`
	InsertedAt time.Time  `json:"inserted_at"`
	// APIKey is the key itself: in the answer that made it, and never again.
	APIKey string `json:"api_key,omitempty"`
}

func keyJSON(k tenants.APIKey) keyBody {
	return keyBody{
		ID: k.ID, TenantID: k.TenantID, Name: k.Name, Prefix: k.Prefix, Scopes: k.Scopes, ExpiresAt: utc(k.ExpiresAt),
		RevokedAt: utc(k.RevokedAt), LastUsedAt: utc(k.LastUsedAt), InsertedAt: k.InsertedAt.UTC(),
	}
}

func (s *server) createKey(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("name")
	in := tenants.NewKey{Name: f.str("name"), Scopes: f.strs("scopes"), ExpiresAt: f.instant("expires_at")}
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	k, text, err := s.Tenants.CreateKey(c.ctx(), c.actor(), id, in)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	b := keyJSON(k)
	b.APIKey = text.Reveal()
	return dataReply(http.StatusCreated, b)
}

func (s *server) listKeys(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	if _, err := s.Tenants.Get(c.ctx(), id); err != nil {
		return nil, err
	}
	keys, err := s.Tenants.ListKeys(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	bodies := make([]keyBody, len(keys))
	for i, k := range keys {
		bodies[i] = keyJSON(k)
	}
	return dataReply(http.StatusOK, bodies)
}

// maxKeyOverlap is how long a key may go on after its revocation.
const maxKeyOverlap = 30 * 24 * time.Hour

// revokeKey ends a key at once, or after overlap_seconds, in which its successor is brought out.
func (s *server) revokeKey(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	key, err := c.pathID("key_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	overlap := f.seconds("overlap_seconds", maxKeyOverlap)
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	at := time.Now()
	if overlap != nil {
		at = at.Add(*overlap)
	}
	k, err := s.Tenants.RevokeKey(c.ctx(), c.actor(), id, key, at)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return dataReply(http.StatusOK, keyJSON(k))
}
