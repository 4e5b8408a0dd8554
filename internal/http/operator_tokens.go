package http

import (
	"net/http"
	"slices"
	"time"

	"github.com/google/uuid"

	"converger/internal/fault"
	"converger/internal/tenants"
)

// registerOperatorTokenRoutes: the credentials of this API itself.
func (s *server) registerOperatorTokenRoutes() {
	s.operatorRoute(http.MethodPost, "/operator_tokens", bodyJSON, s.createOperatorToken)
	s.operatorRoute(http.MethodGet, "/operator_tokens", bodyNone, s.listOperatorTokens)
	s.operatorRoute(http.MethodGet, "/operator_tokens/{token_id}", bodyNone, s.getOperatorToken)
	s.operatorRoute(http.MethodPost, "/operator_tokens/{token_id}/revoke", bodyOptional, s.revokeOperatorToken)
}

type operatorTokenBody struct {
	ID         uuid.UUID  `json:"id"`
	Name       string     `json:"name"`
	Prefix     string     `json:"prefix"`
	Scopes     []string   `json:"scopes"`
	ExpiresAt  *time.Time `json:"expires_at"`
	RevokedAt  *time.Time `json:"revoked_at"` // may lie ahead
	LastUsedAt *time.Time `json:"last_used_at"`
	InsertedAt time.Time  `json:"inserted_at"`
	// Token is the token itself: in the answer that made it, and never again.
	Token string `json:"token,omitempty"`
}

func operatorTokenJSON(t tenants.OperatorToken) operatorTokenBody {
	return operatorTokenBody{
		ID: t.ID, Name: t.Name, Prefix: t.Prefix, Scopes: t.Scopes, ExpiresAt: utc(t.ExpiresAt), RevokedAt: utc(t.RevokedAt),
		LastUsedAt: utc(t.LastUsedAt), InsertedAt: t.InsertedAt.UTC(),
	}
}

// createOperatorToken makes a token that can do no more than the one that asks for it, and not for longer.
func (s *server) createOperatorToken(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("name")
	in := tenants.NewOperatorToken{Name: f.str("name"), Scopes: f.strs("scopes"), ExpiresAt: f.instant("expires_at")}
	for _, scope := range []tenants.Scopes{tenants.ScopeRead, tenants.ScopeWrite} {
		name, may := scopeName(scope), c.Operator.Scopes.Has(scope)
		switch {
		case !f.has("scopes") && may:
			in.Scopes = append(in.Scopes, name)
		case slices.Contains(in.Scopes, name) && !may:
			f.fault("scopes", fault.OutOfRange, "must not name %q, which your own token does not have", name)
		}
	}
	// Until: the end of the token that asks.
	if until := c.Operator.ExpiresAt; !until.IsZero() {
		switch {
		case in.ExpiresAt == nil:
			in.ExpiresAt = &until
		case in.ExpiresAt.After(until):
			f.fault("expires_at", fault.OutOfRange, "must not be later than %s, when your own token expires", until.Format(time.RFC3339))
		}
	}
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	t, text, err := s.Tenants.CreateOperatorToken(c.ctx(), c.actor(), in)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	b := operatorTokenJSON(t)
	b.Token = text.Reveal()
	return dataReply(http.StatusCreated, b)
}

// listOperatorTokens has no pages: people and programs that operate the hub are few.
func (s *server) listOperatorTokens(c *call) (*reply, error) {
	found, err := s.Tenants.ListOperatorTokens(c.ctx())
	if err != nil {
		return nil, err
	}
	bodies := make([]operatorTokenBody, len(found))
	for i, t := range found {
		bodies[i] = operatorTokenJSON(t)
	}
	return dataReply(http.StatusOK, bodies)
}

func (s *server) getOperatorToken(c *call) (*reply, error) {
	id, err := c.pathID("token_id")
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.GetOperatorToken(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, operatorTokenJSON(t))
}

// revokeOperatorToken ends a token at once, or after overlap_seconds. The token that asks, and the last that may write, end
// only by force: true.
func (s *server) revokeOperatorToken(c *call) (*reply, error) {
	id, err := c.pathID("token_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	overlap, force := f.seconds("overlap_seconds", maxKeyOverlap), f.flag("force")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	if id == c.Operator.ID && !force {
		return nil, newProblem(codeConfirmation, `This is the token that you are calling with. If you mean it, send "force": true.`)
	}
	at := time.Now()
	if overlap != nil {
		at = at.Add(*overlap)
	}
	t, err := s.Tenants.RevokeOperatorToken(c.ctx(), c.actor(), id, at, !force)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return dataReply(http.StatusOK, operatorTokenJSON(t))
}
