package http

import (
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/inbound"
	"converger/internal/tenants"
)

// registerEventRoutes: what was posted to channels, and what became of it.
func (s *server) registerEventRoutes() {
	s.operatorRoute(http.MethodGet, "/inbound_events", bodyNone, s.listEvents)
	s.operatorRoute(http.MethodGet, "/tenants/{tenant_id}/inbound_events/{event_id}", bodyNone, s.getEvent)
	s.operatorRoute(http.MethodPost, "/tenants/{tenant_id}/inbound_events/{event_id}/replay", bodyNone, s.replayEvent)
}

type eventBody struct {
	ID          uuid.UUID        `json:"id"`
	TenantID    uuid.UUID        `json:"tenant_id"`
	ChannelID   uuid.UUID        `json:"channel_id"`
	Endpoint    channel.Endpoint `json:"endpoint"`
	ContentType string           `json:"content_type"`
	Size        int              `json:"size"` // of the body, in bytes
	State       inbound.State    `json:"state"`
	Tries       int              `json:"tries"`
	Error       *string          `json:"error"`
	Result      *inbound.Result  `json:"result"`
	InsertedAt  time.Time        `json:"inserted_at"`
	ProcessedAt *time.Time       `json:"processed_at"`
	Body        []byte           `json:"body,omitempty"` // base64 of the exact bytes; of a single event
}

func eventJSON(e inbound.Event) eventBody {
	return eventBody{
		ID: e.ID, TenantID: e.TenantID, ChannelID: e.ChannelID, Endpoint: e.Endpoint, ContentType: e.ContentType, Size: e.Size,
		State: e.State, Tries: e.Tries, Error: optional(e.Error), Result: e.Result, InsertedAt: e.InsertedAt.UTC(), ProcessedAt: utc(e.ProcessedAt),
		Body: e.Body,
	}
}

func (s *server) listEvents(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	var f inbound.Filter
	switch f.State = inbound.State(q.Get("state")); f.State {
	case "", inbound.StateReceived, inbound.StateProcessed, inbound.StateRejected, inbound.StateFailed:
	default:
		return nil, newProblem(codeInvalidParameter, "Invalid state: it must be received, processed, rejected or failed.")
	}
	if f.TenantID, err = queryID(q, "tenant_id"); err != nil {
		return nil, err
	}
	if f.ChannelID, err = queryID(q, "channel_id"); err != nil {
		return nil, err
	}
	list := []string{"inbound_events", q.Get("tenant_id"), q.Get("channel_id"), string(f.State)}
	before, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, more, err := s.Inbound.ListAllTenants(c.ctx(), f, before, limit)
	if err != nil {
		return nil, err
	}
	bodies := make([]eventBody, len(found))
	for i, e := range found {
		bodies[i] = eventJSON(e)
	}
	next := ""
	if more {
		next = s.cursors.encode(found[len(found)-1].ID, list...)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

// eventOf is the tenant and the event of the path.
func (c *call) eventOf() (tenants.ID, uuid.UUID, error) {
	tenant, err := c.pathID("tenant_id")
	if err != nil {
		return uuid.Nil, uuid.Nil, err
	}
	event, err := c.pathID("event_id")
	return tenant, event, err
}

func (s *server) getEvent(c *call) (*reply, error) {
	tenant, id, err := c.eventOf()
	if err != nil {
		return nil, err
	}
	e, err := s.Inbound.Get(c.ctx(), tenant, id)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, eventJSON(e))
}

func (s *server) replayEvent(c *call) (*reply, error) {
	tenant, id, err := c.eventOf()
	if err != nil {
		return nil, err
	}
	e, err := s.Inbound.Replay(c.ctx(), c.actor(), tenant, id)
	if err != nil {
		return nil, err
	}
	s.Logger.LogAttrs(c.ctx(), slog.LevelInfo, "event queued again", slog.String("request_id", c.id), slog.String("event_id", id.String()))
	e.Body = nil
	return dataReply(http.StatusAccepted, eventJSON(e))
}
