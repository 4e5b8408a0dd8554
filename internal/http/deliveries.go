package http

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/delivery"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// registerDeliveryRoutes: what became of the tenant's messages, and how to steer it.
func (s *server) registerDeliveryRoutes() {
	read := route{method: http.MethodGet, auth: credentialKey, scope: tenants.ScopeRead, bucket: ratelimit.APIRead}
	s.register(read.at("/api/v1/deliveries", s.listDeliveries))
	s.register(read.at("/api/v1/deliveries/{delivery_id}", s.getDelivery))
	write := route{method: http.MethodPost, auth: credentialKey, scope: tenants.ScopeWrite, bucket: ratelimit.APIRead}
	s.register(write.at("/api/v1/deliveries/{delivery_id}/retry", s.retryDelivery))
	s.register(write.at("/api/v1/channels/{channel_id}/deliveries/retry", s.retryDeliveries).takes(bodyOptional))
	s.register(read.of(credentialKeyOrSecret).at("/api/v1/channels/{channel_id}/delivery", s.getDeliveryState))
	s.register(write.of(credentialKeyOrSecret).at("/api/v1/channels/{channel_id}/pause", s.pauseDeliveries))
	s.register(write.of(credentialKeyOrSecret).at("/api/v1/channels/{channel_id}/resume", s.resumeDeliveries))
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
	Payload           json.RawMessage `json:"payload"` // the canonical activity, secrets in it replaced
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
	d.Activity.Attachments, d.Activity.Metadata = redacted(d.Activity.Attachments), redacted(d.Activity.Metadata)
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

// redacted replaces the values of members with a secret's name: people look at deliveries, and show them to others.
func redacted(raw json.RawMessage) json.RawMessage {
	if len(raw) <= len("{}") {
		return raw
	}
	b, err := json.Marshal(secrets.Redact(raw))
	if err != nil { // what Redact gives marshals
		return json.RawMessage(`null`)
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
			return nil, newProblem(codeInvalidParameter, "Invalid status: it must be pending, paused, uncertain, sent, delivered, read or failed.")
		}
	}
	if f.ChannelID, err = queryID(q, "channel_id"); err != nil {
		return nil, err
	}
	if f.ActivityID, err = queryID(q, "activity_id"); err != nil {
		return nil, err
	}
	if f.From, f.To, err = querySpan(q); err != nil {
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

// querySpan reads from and to, both inclusive.
func querySpan(q url.Values) (from, to time.Time, err error) {
	if from, err = queryTime(q, "from", 0); err == nil {
		to, err = queryTime(q, "to", 24*time.Hour-time.Microsecond)
	}
	return from, to, err
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

func (s *server) retryDelivery(c *call) (*reply, error) {
	id, err := c.pathID("delivery_id")
	if err != nil {
		return nil, err
	}
	d, err := s.Deliveries.Retry(c.ctx(), c.actor(), c.Tenant.ID, id)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusAccepted, deliveryJSON(d))
}

// retryDeliveries retries what failed of a channel. The filter comes in the query or in the body, whose members go first.
func (s *server) retryDeliveries(c *call) (*reply, error) {
	id, err := c.pathID("channel_id")
	if err != nil {
		return nil, err
	}
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	body, err := c.object()
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"from", "to", "activity_id"} {
		if text := body.optStr(name); text != nil {
			q.Set(name, *text)
		}
	}
	if n := body.positive("limit"); n != nil {
		q.Set("limit", strconv.Itoa(*n))
	}
	if c.Operator != nil { // as everywhere in the management API: a mistyped filter must not retry everything
		body.refuseUnknown()
	}
	if err := body.err(); err != nil {
		return nil, err
	}
	if n, err := strconv.Atoi(q.Get("limit")); q.Has("limit") && (err != nil || n < 1) { // a list shows its default; this does something
		return nil, newProblem(codeInvalidParameter, "Invalid limit: it must be a whole number from 1 to %d.", delivery.MaxRetries)
	}
	var f delivery.RetryFilter
	if f.ActivityID, err = queryID(q, "activity_id"); err != nil {
		return nil, err
	}
	if f.From, f.To, err = querySpan(q); err != nil {
		return nil, err
	}
	n, more, err := s.Deliveries.RetryChannel(c.ctx(), c.actor(), c.Tenant.ID, id, f, pageLimit(q, delivery.MaxRetries, delivery.MaxRetries))
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, struct {
		Retried int  `json:"retried"`
		HasMore bool `json:"has_more"`
	}{n, more})
}

// deliveryStateBody is where a channel's deliveries stand.
type deliveryStateBody struct {
	ChannelID           uuid.UUID        `json:"channel_id"`
	CircuitState        delivery.Circuit `json:"circuit_state"`
	CircuitChangedAt    *time.Time       `json:"circuit_changed_at"`
	ConsecutiveFailures int              `json:"consecutive_failures"`
	RateLimit           *paceBody        `json:"rate_limit"`
	ParkedDeliveries    int              `json:"parked_deliveries"`
}

type paceBody struct {
	Limit   int   `json:"limit"`
	ScaleMS int64 `json:"scale_ms"`
}

func deliveryStateJSON(st delivery.ChannelState) deliveryStateBody {
	b := deliveryStateBody{
		ChannelID: st.ChannelID, CircuitState: st.Circuit, CircuitChangedAt: utc(st.ChangedAt), ConsecutiveFailures: st.Failures,
		ParkedDeliveries: st.Parked,
	}
	if st.RateLimit != (channel.RateLimit{}) {
		b.RateLimit = &paceBody{st.RateLimit.Limit, st.RateLimit.Per.Milliseconds()}
	}
	return b
}

func (s *server) getDeliveryState(c *call) (*reply, error) {
	return c.deliveryState(s.Deliveries.State)
}

func (s *server) pauseDeliveries(c *call) (*reply, error) {
	return c.deliveryState(func(ctx context.Context, tenant tenants.ID, id uuid.UUID) (delivery.ChannelState, error) {
		return s.Deliveries.Pause(ctx, c.actor(), tenant, id)
	})
}

func (s *server) resumeDeliveries(c *call) (*reply, error) {
	return c.deliveryState(func(ctx context.Context, tenant tenants.ID, id uuid.UUID) (delivery.ChannelState, error) {
		return s.Deliveries.Resume(ctx, c.actor(), tenant, id)
	})
}

// deliveryState answers with the state of the path's channel that do gives.
func (c *call) deliveryState(do func(ctx context.Context, tenant tenants.ID, id uuid.UUID) (delivery.ChannelState, error)) (*reply, error) {
	id, err := c.pathID("channel_id")
	if err != nil {
		return nil, err
	}
	if own := c.ownChannel(); own != nil && *own != id {
		return nil, channel.ErrNotFound
	}
	st, err := do(c.ctx(), c.Tenant.ID, id)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, deliveryStateJSON(st))
}
