package http

import (
	"encoding/json"
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerConversationRoutes: the tenant API, for servers with an API key; on most routes also for older clients with the
// secret of a channel, for whom the other channels of the tenant do not exist.
func (s *server) registerConversationRoutes() {
	read := route{method: http.MethodGet, auth: credentialKeyOrSecret, scope: tenants.ScopeRead, bucket: ratelimit.APIRead}
	write := route{method: http.MethodPost, auth: credentialKeyOrSecret, scope: tenants.ScopeWrite, bucket: ratelimit.APIRead}

	s.register(write.at("/api/v1/conversations", s.createConversation).takes(bodyOptional))
	s.register(read.of(credentialKey).at("/api/v1/conversations", s.listConversations))
	s.register(read.at("/api/v1/conversations/{conversation_id}", s.getConversation))
	s.register(write.at("/api/v1/conversations/{conversation_id}/close", s.closeConversation))
	s.register(write.at("/api/v1/conversations/{conversation_id}/reopen", s.reopenConversation))
	s.register(write.at("/api/v1/conversations/{conversation_id}/activities", s.createActivity).takes(bodyJSON).limitedBy(ratelimit.ActivityCreate))
	s.register(read.at("/api/v1/conversations/{conversation_id}/activities", s.listActivities))
}

// conversationBody is a conversation on the tenant API.
type conversationBody struct {
	ID            uuid.UUID        `json:"id"`
	Status        string           `json:"status"`
	Metadata      json.RawMessage  `json:"metadata"`
	ChannelID     uuid.UUID        `json:"channel_id"`
	TenantID      uuid.UUID        `json:"tenant_id"`
	ParticipantID *uuid.UUID       `json:"participant_id"`
	Participant   *participantBody `json:"participant"`
	InsertedAt    time.Time        `json:"inserted_at"`
	UpdatedAt     time.Time        `json:"updated_at"`
}

type participantBody struct {
	ID          uuid.UUID `json:"id"`
	ExternalID  string    `json:"external_id"`
	DisplayName *string   `json:"display_name"`
}

func conversationJSON(v activity.Conversation) conversationBody {
	b := conversationBody{
		ID: v.ID, Status: v.Status, Metadata: orObject(v.Metadata), ChannelID: v.ChannelID, TenantID: v.TenantID,
		ParticipantID: v.ParticipantID, InsertedAt: v.InsertedAt.UTC(), UpdatedAt: v.UpdatedAt.UTC(),
	}
	if p := v.Participant; p != nil {
		b.Participant = &participantBody{ID: p.ID, ExternalID: p.ExternalID, DisplayName: p.DisplayName}
	}
	return b
}

func orObject(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("{}")
	}
	return raw
}

// createConversation opens a conversation: on channel_id, and optionally with somebody. Older clients leave channel_id out:
// their secret says it.
func (s *server) createConversation(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	own := c.ownChannel()
	if own == nil {
		f.require("channel_id")
	}
	ch := f.id("channel_id")
	external, name := f.str("external_id"), f.str("display_name")
	n := activity.NewConversation{Status: f.str("status"), Metadata: f.object("metadata")}
	if name != "" && external == "" {
		f.fault("external_id", fault.Required, "is required with display_name")
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	switch {
	case ch == nil:
		ch = own
	case own != nil && *own != *ch:
		return nil, channel.ErrNotFound
	}
	n.ChannelID = *ch
	if external != "" {
		n.Participant = &channel.Participant{
			Identities:  []channel.Identity{{Kind: channel.IdentityExternalID, Value: external}},
			DisplayName: name,
		}
	}
	v, err := s.Activities.CreateConversation(c.ctx(), c.Tenant.ID, n)
	if err != nil {
		return nil, err
	}
	p, err := dataReply(http.StatusCreated, conversationJSON(v))
	if err != nil {
		return nil, err
	}
	return p.with("Location", "/api/v1/conversations/"+v.ID.String()), nil
}

func (s *server) listConversations(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	f := activity.Filter{Status: q.Get("status"), ExternalID: q.Get("external_id")}
	switch f.Status {
	case "", activity.StatusActive, activity.StatusClosed:
	default:
		return nil, newProblem(codeInvalidParameter, "Invalid status: it must be active or closed.")
	}
	if f.ChannelID, err = queryID(q, "channel_id"); err != nil {
		return nil, err
	}
	list := []string{"conversations", c.Tenant.ID.String(), f.Status, q.Get("channel_id"), f.ExternalID}
	before, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, more, err := s.Activities.ListConversations(c.ctx(), c.Tenant.ID, f, before, limit)
	if err != nil {
		return nil, err
	}
	bodies := make([]conversationBody, len(found))
	for i, v := range found {
		bodies[i] = conversationJSON(v)
	}
	next := ""
	if more {
		next = s.cursors.encode(found[len(found)-1].ID, list...)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

func (s *server) getConversation(c *call) (*reply, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return nil, err
	}
	v, err := s.Activities.GetConversation(c.ctx(), c.Tenant.ID, id, c.ownChannel())
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, conversationJSON(v))
}

func (s *server) closeConversation(c *call) (*reply, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return nil, err
	}
	v, _, err := s.Activities.Close(c.ctx(), c.Tenant.ID, id, c.ownChannel(), reasonManual)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, conversationJSON(v))
}

func (s *server) reopenConversation(c *call) (*reply, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return nil, err
	}
	v, _, err := s.Activities.Reopen(c.ctx(), c.Tenant.ID, id, c.ownChannel(), reasonManual)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, conversationJSON(v))
}

// reasonManual is the reason noted when somebody closes or reopens by a call.
const reasonManual = "manual"

// createActivity posts one activity. The sender is trusted: a server of the tenant speaks for everybody.
func (s *server) createActivity(c *call) (*reply, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return nil, err
	}
	key, err := idempotencyKey(c.r.Header)
	if err != nil {
		return nil, err
	}
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	n := activity.New{
		TenantID: c.Tenant.ID, ConversationID: id, ChannelID: c.ownChannel(), IdempotencyKey: key,
		Type: f.str("type"), Sender: "user", Author: activity.AuthorTenant, Text: f.optStr("text"), Attachments: f.list("attachments"),
		Metadata: f.object("metadata"), ReplyToID: f.id("reply_to_id"),
	}
	if c.Key != nil {
		n.Caller = "key:" + c.Key.ID.String()
	} else {
		n.Caller = "channel:" + c.Channel.ID.String()
	}
	if sender := f.optStr("sender"); sender != nil {
		n.Sender = *sender
	}
	if err := f.err(); err != nil {
		return nil, err
	}
	a, repeat, err := s.append(c, n)
	if err != nil {
		return nil, err
	}
	p, err := dataReply(http.StatusCreated, json.RawMessage(a.Canonical()))
	if err != nil {
		return nil, err
	}
	return replayed(p, repeat), nil
}

// append stores one activity.
func (s *server) append(c *call, n activity.New) (activity.Activity, bool, error) {
	r := s.Activities.Append(c.ctx(), []activity.New{n})[0]
	return r.Activity, r.Repeat, r.Err
}

// replayed marks the answer to a repeated request.
func replayed(p *reply, repeat bool) *reply {
	if repeat {
		p.with("Idempotent-Replayed", "true")
	}
	return p
}

// activitiesMeta is the `meta` of a page of activities.
type activitiesMeta struct {
	Watermark *string `json:"watermark"`
	HasMore   bool    `json:"has_more"`
	Limit     int     `json:"limit"`
}

// Limits of pages of activities.
const (
	defaultActivities = 100
	maxActivities     = 1000
)

func (s *server) listActivities(c *call) (*reply, error) {
	id, err := c.pathID("conversation_id")
	if err != nil {
		return nil, err
	}
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	given := q.Get("watermark")
	after, err := s.Activities.ReadWatermark(c.ctx(), c.Tenant.ID, id, c.ownChannel(), given)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultActivities, maxActivities)
	found, more, err := s.Activities.List(c.ctx(), c.Tenant.ID, id, c.ownChannel(), after, limit)
	if err != nil {
		return nil, err
	}
	bodies := make([]json.RawMessage, len(found))
	for i, a := range found {
		bodies[i] = a.Canonical()
	}
	mark := nextWatermark(given, found)
	p, err := jsonReply(http.StatusOK, struct {
		Data []json.RawMessage `json:"data"`
		Meta activitiesMeta    `json:"meta"`
	}{bodies, activitiesMeta{mark, more, limit}})
	if err == nil && more {
		p.with("Link", nextLink(c.r.URL, "watermark", *mark))
	}
	return p, err
}

// nextWatermark is the position after the page; an empty one repeats the given position.
func nextWatermark(given string, page []activity.Activity) *string {
	if len(page) > 0 {
		given = activity.Watermark(page[len(page)-1].Seq)
	}
	if given == "" {
		return nil
	}
	return &given
}
