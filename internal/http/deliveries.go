package http

import (
	"encoding/json"
	"net/http"
	"net/url"
	"time"

	"github.com/google/uuid"

	"converger/internal/delivery"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerDeliveryRoutes: what became of the tenant's messages.
func (s *server) registerDeliveryRoutes() {
	read := route{method: http.MethodGet, auth: credentialKey, scope: tenants.ScopeRead, bucket: ratelimit.APIRead}
	s.register(read.at("/api/v1/deliveries", s.listDeliveries))
	s.register(read.at("/api/v1/deliveries/{delivery_id}", s.getDelivery))
}

// deliveryBody is a delivery on the tenant API.
type deliveryBody struct {
	ID                uuid.UUID       `json:"id"`
	ActivityID        uuid.UUID       `json:"activity_id"`
	ChannelID         uuid.UUID       `json:"channel_id"`
	Status            delivery.Status `json:"status"`
	Attempts          int             `json:"attempts"`
	NextAttemptAt     *time.Time      `json:"next_attempt_at"` // of a pending one
	Reason            *string         `json:"reason"`
	LastError         *string         `json:"last_error"`
	ProviderMessageID *string         `json:"provider_message_id"`
	SentAt            *time.Time      `json:"sent_at"`
	DeliveredAt       *time.Time      `json:"delivered_at"`
	ReadAt            *time.Time      `json:"read_at"`
	RetryCount        int             `json:"retry_count"`
	RetriedBy         *string         `json:"retried_by"`
	RetriedAt         *time.Time      `json:"retried_at"`
	Payload           json.RawMessage `json:"payload"` // the canonical activity
	InsertedAt        time.Time       `json:"inserted_at"`
	UpdatedAt         time.Time       `json:"updated_at"`
	AttemptList       []attemptBody   `json:"attempt_list,omitempty"` // of a single delivery, oldest first
}

type attemptBody struct {
	ID         uuid.UUID `json:"id"`
	Number     int       `json:"number"`
	Outcome    string    `json:"outcome"`
	Reason     *string   `json:"reason"`
	StatusCode *int      `json:"status_code"`
	Error      *string   `json:"error"`
	Response   *string   `json:"response"`
	StartedAt  time.Time `json:"started_at"`
	DurationMS int64     `json:"duration_ms"`
}

func deliveryJSON(d delivery.Delivery) deliveryBody {
	b := deliveryBody{
		ID: d.ID, ActivityID: d.ActivityID, ChannelID: d.ChannelID, Status: d.Status, Attempts: d.Attempts,
		Reason: optional(d.Reason), LastError: optional(d.LastError), ProviderMessageID: optional(d.ProviderMessageID),
		SentAt: utc(d.SentAt), DeliveredAt: utc(d.DeliveredAt), ReadAt: utc(d.ReadAt),
		RetryCount: d.RetryCount, RetriedBy: d.RetriedBy, RetriedAt: utc(d.RetriedAt),
		Payload: d.Activity.Canonical(), InsertedAt: d.InsertedAt.UTC(), UpdatedAt: d.UpdatedAt.UTC(),
	}
	if d.Status == delivery.StatusPending {
		b.NextAttemptAt = utc(&d.NextAt)
	}
	return b
}

func optional[T comparable](v T) *T {
	var zero T
	if v == zero {
		return nil
	}
	return &v
}

func utc(t *time.Time) *time.Time {
	if t == nil || t.IsZero() {
		return nil
	}
	u := t.UTC()
	return &u
}

func (s *server) listDeliveries(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	var f delivery.Filter
	if text := q.Get("status"); text != "" {
		if f.Status, err = delivery.ParseStatus(text); err != nil {
			return nil, newProblem(codeInvalidParameter, "Invalid status: it must be pending, uncertain, sent, delivered, read or failed.")
		}
	}
	if f.ChannelID, err = queryID(q, "channel_id"); err != nil {
		return nil, err
	}
	if f.ActivityID, err = queryID(q, "activity_id"); err != nil {
		return nil, err
	}
	if f.From, err = queryTime(q, "from", 0); err != nil {
		return nil, err
	}
	if f.To, err = queryTime(q, "to", 24*time.Hour-time.Microsecond); err != nil {
		return nil, err
	}
	list := []string{"deliveries", c.Tenant.ID.String()}
	for _, name := range []string{"status", "channel_id", "activity_id", "from", "to"} {
		list = append(list, q.Get(name))
	}
	before, err := s.cursors.decode(q.Get("cursor"), list...)
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, more, err := s.Deliveries.List(c.ctx(), c.Tenant.ID, f, before, limit)
	if err != nil {
		return nil, err
	}
	bodies := make([]deliveryBody, len(found))
	for i, d := range found {
		bodies[i] = deliveryJSON(d)
	}
	next := ""
	if more {
		next = s.cursors.encode(found[len(found)-1].ID, list...)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

// queryTime reads an RFC 3339 time, or a day: then the instant `into` it, in UTC.
func queryTime(q url.Values, name string, into time.Duration) (time.Time, error) {
	text := q.Get(name)
	if text == "" {
		return time.Time{}, nil
	}
	if day, err := time.Parse(time.DateOnly, text); err == nil {
		return day.Add(into), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return time.Time{}, newProblem(codeInvalidParameter, "Invalid %s: it must be a time such as 2026-11-30T12:00:00Z, or a day such as 2026-11-30.", name)
	}
	return at, nil
}

func (s *server) getDelivery(c *call) (*reply, error) {
	id, err := c.pathID("delivery_id")
	if err != nil {
		return nil, err
	}
	d, err := s.Deliveries.Get(c.ctx(), c.Tenant.ID, id)
	if err != nil {
		return nil, err
	}
	attempts, err := s.Deliveries.Attempts(c.ctx(), c.Tenant.ID, id)
	if err != nil {
		return nil, err
	}
	b := deliveryJSON(d)
	for _, a := range attempts {
		b.AttemptList = append(b.AttemptList, attemptBody{
			ID: a.ID, Number: a.Number, Outcome: string(a.Outcome), Reason: optional(a.Reason), StatusCode: optional(a.StatusCode),
			Error: optional(a.Error), Response: optional(a.Response), StartedAt: a.StartedAt.UTC(), DurationMS: a.Duration.Milliseconds(),
		})
	}
	return dataReply(http.StatusOK, b)
}
