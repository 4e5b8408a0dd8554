package http

import (
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// registerChannelRoutes: a tenant's channels and their secrets.
func (s *server) registerChannelRoutes() {
	s.operatorRoute(http.MethodPost, "/tenants/{tenant_id}/channels", bodyJSON, s.createChannel)
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/channels", bodyNone, s.listChannels)
	s.operatorRoute(http.MethodGet, "/channels/{channel_id}", bodyNone, s.getChannel)
	s.operatorRoute(http.MethodPatch, "/channels/{channel_id}", bodyJSON, s.updateChannel)
	s.operatorRoute(http.MethodDelete, "/channels/{channel_id}", bodyNone, s.deleteChannel)
	s.operatorRoute(http.MethodPost, "/channels/{channel_id}/secret", bodyOptional, s.rotateSecret)
}

type channelBody struct {
	ID                      uuid.UUID           `json:"id"`
	TenantID                uuid.UUID           `json:"tenant_id"`
	Name                    string              `json:"name"`
	Type                    channel.Type        `json:"type"`
	Mode                    channel.Mode        `json:"mode"`
	Status                  channel.Status      `json:"status"`
	Config                  map[string]any      `json:"config"` // secret members show as "[redacted]"
	RequireSignature        bool                `json:"require_signature"`
	Ordered                 bool                `json:"ordered"`
	RateLimit               *string             `json:"rate_limit"`
	RetryPolicy             channel.RetryPolicy `json:"retry_policy"`
	MaxInFlight             int                 `json:"max_in_flight"`
	HoldUntil               *time.Time          `json:"hold_until"`
	PreviousSecretExpiresAt *time.Time          `json:"previous_secret_expires_at"`
	InsertedAt              time.Time           `json:"inserted_at"`
	UpdatedAt               time.Time           `json:"updated_at"`
	// Secret is shown in the answer that made it, and never again.
	Secret string `json:"secret,omitempty"`
	// CallbackURL is for the provider. One that ends in a secret is shown with the channel's secret, from which it is made,
	// and in the answer to a change of the config, which decides whether there is one.
	CallbackURL string `json:"callback_url,omitempty"`
}

func (s *server) channelJSON(ch channel.Channel) channelBody {
	b := channelBody{
		ID: ch.ID, TenantID: ch.TenantID, Name: ch.Name, Type: ch.Type, Mode: ch.Mode, Status: ch.Status,
		Config: channel.RedactedConfig(s.Registry, ch), RequireSignature: ch.RequireSignature, Ordered: ch.Ordered,
		RateLimit: optional(ch.RateLimit), RetryPolicy: ch.RetryPolicy, MaxInFlight: ch.MaxInFlight, HoldUntil: utc(ch.HoldUntil),
		InsertedAt: ch.InsertedAt.UTC(), UpdatedAt: ch.UpdatedAt.UTC(),
	}
	if ch.PreviousSecret != "" {
		b.PreviousSecretExpiresAt = utc(&ch.PreviousUntil)
	}
	if address, secret := s.callbackURL(&ch); !secret {
		b.CallbackURL = address
	}
	return b
}

// newSecretJSON is a channel in the answer that gave it its secret.
func (s *server) newSecretJSON(ch channel.Channel) channelBody {
	b := s.channelJSON(ch)
	b.Secret = ch.Secret.Reveal()
	b.CallbackURL, _ = s.callbackURL(&ch)
	return b
}

// channelReply is a channel with what is shown this once, and the tag of what is shown later.
func (s *server) channelReply(status int, ch channel.Channel, b channelBody) (*reply, error) {
	p, err := dataReply(status, b)
	if err != nil {
		return nil, err
	}
	tag, err := entityTag(ch.Version, s.channelJSON(ch))
	if err != nil {
		return nil, err
	}
	return p.with("Etag", tag), nil
}

func (s *server) createChannel(c *call) (*reply, error) {
	tenant, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("name")
	f.require("type")
	in := channel.NewChannel{
		Name: f.str("name"), Type: channel.Type(f.str("type")), Mode: channel.Mode(f.str("mode")), Status: channel.Status(f.str("status")),
		Config: f.object("config"), Secret: f.str("secret"), RequireSignature: f.optBool("require_signature"), Ordered: f.optBool("ordered"),
		RateLimit: f.str("rate_limit"), RetryPolicy: f.object("retry_policy"),
	}
	if n := f.positive("max_in_flight"); n != nil {
		in.MaxInFlight = *n
	}
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	ch, err := s.Channels.Create(c.ctx(), c.actor(), tenant, in)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return s.channelReply(http.StatusCreated, ch, s.newSecretJSON(ch))
}

func (s *server) listChannels(c *call) (*reply, error) {
	tenant, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	list := []string{"channels", tenant.String()}
	after, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	if _, err := s.Tenants.Get(c.ctx(), tenant); err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, err := s.Channels.List(c.ctx(), tenant, after, limit+1)
	if err != nil {
		return nil, err
	}
	next := ""
	if len(found) > limit {
		found = found[:limit]
		next = s.cursors.encode(found[limit-1].ID, list...)
	}
	bodies := make([]channelBody, len(found))
	for i, ch := range found {
		bodies[i] = s.channelJSON(ch)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

// channelOf finds whose channel the path names.
func (s *server) channelOf(c *call) (tenants.ID, uuid.UUID, error) {
	id, err := c.pathID("channel_id")
	if err != nil {
		return uuid.Nil, uuid.Nil, err
	}
	entry, ok := s.Directory.Channel(id)
	if !ok && s.Directory.Miss(c.ctx()) {
		entry, ok = s.Directory.Channel(id)
	}
	if !ok {
		return uuid.Nil, uuid.Nil, channel.ErrNotFound
	}
	return entry.TenantID, id, nil
}

func (s *server) getChannel(c *call) (*reply, error) {
	tenant, id, err := s.channelOf(c)
	if err != nil {
		return nil, err
	}
	ch, err := s.Channels.Get(c.ctx(), tenant, id)
	if err != nil {
		return nil, err
	}
	return settingReply(c, http.StatusOK, ch.Version, s.channelJSON(ch))
}

// updateChannel changes the members that are given. null is not a value of any of them but rate_limit, where it takes
// the limit away.
func (s *server) updateChannel(c *call) (*reply, error) {
	tenant, id, err := s.channelOf(c)
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	patch := channel.Patch{
		Name: f.optStr("name"), Mode: (*channel.Mode)(f.optStr("mode")), Status: (*channel.Status)(f.optStr("status")),
		Config: f.object("config"), RequireSignature: f.optBool("require_signature"), Ordered: f.optBool("ordered"),
		RateLimit: f.optStr("rate_limit"), RetryPolicy: f.object("retry_policy"), MaxInFlight: f.optInt("max_in_flight"),
	}
	if f.isNull("rate_limit") {
		patch.RateLimit = new(string)
	}
	f.refuseNull("rate_limit")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	ch, err := s.Channels.Update(c.ctx(), c.actor(), tenant, id, patch, expected...)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	b := s.channelJSON(ch)
	if patch.Config != nil {
		b.CallbackURL, _ = s.callbackURL(&ch)
	}
	return s.channelReply(http.StatusOK, ch, b)
}

func (s *server) deleteChannel(c *call) (*reply, error) {
	tenant, id, err := s.channelOf(c)
	if err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	if err := s.Channels.Delete(c.ctx(), c.actor(), tenant, id, expected...); err != nil {
		return nil, err
	}
	s.changed(c)
	return &reply{status: http.StatusNoContent}, nil
}

// rotateSecret gives the channel a new secret, generated or chosen; the old one goes on for overlap_seconds, a day unless
// it says otherwise.
func (s *server) rotateSecret(c *call) (*reply, error) {
	tenant, id, err := s.channelOf(c)
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	overlap := channel.DefaultOverlap
	if given := f.seconds("overlap_seconds", channel.MaxOverlap); given != nil {
		overlap = *given
	}
	secret := f.str("secret")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	expected, err := c.ifMatch()
	if err != nil {
		return nil, err
	}
	ch, err := s.Channels.RotateSecret(c.ctx(), c.actor(), tenant, id, overlap, secret, expected...)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return s.channelReply(http.StatusOK, ch, s.newSecretJSON(ch))
}
