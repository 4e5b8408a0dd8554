package http

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"net/http"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/inbound"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

const managementPrefix = "/api/v1/management"

// registerManagementRoutes: for operators and their programs, across tenants. Members that are not known are refused: a
// mistyped setting must not look as if it had been saved.
func (s *server) registerManagementRoutes() {
	any := route{auth: credentialOperator, bucket: ratelimit.Management}
	row := func(method, pattern string, body bodyKind, handle func(*call) (*reply, error)) {
		rt := any.by(method).at(managementPrefix+pattern, handle).takes(body)
		rt.scope = tenants.ScopeWrite
		if method == http.MethodGet {
			rt.scope = tenants.ScopeRead
		}
		s.register(rt)
	}
	row(http.MethodPost, "/tenants", bodyJSON, s.createTenant)
	row(http.MethodGet, "/tenants", bodyNone, s.listTenants)
	row(http.MethodGet, "/tenants/{tenant_id}", bodyNone, s.getTenant)
	row(http.MethodPost, "/tenants/{tenant_id}/suspend", bodyNone, s.suspendTenant)
	row(http.MethodPost, "/tenants/{tenant_id}/activate", bodyNone, s.activateTenant)

	row(http.MethodPost, "/tenants/{tenant_id}/keys", bodyJSON, s.createKey)
	row(http.MethodGet, "/tenants/{tenant_id}/keys", bodyNone, s.listKeys)
	row(http.MethodPost, "/tenants/{tenant_id}/keys/{key_id}/revoke", bodyOptional, s.revokeKey)

	row(http.MethodGet, "/tenants/{tenant_id}/limits", bodyNone, s.listLimits)
	row(http.MethodGet, "/tenants/{tenant_id}/limits/{bucket}", bodyNone, s.getLimit)
	row(http.MethodPut, "/tenants/{tenant_id}/limits/{bucket}", bodyJSON, s.putLimit)
	row(http.MethodDelete, "/tenants/{tenant_id}/limits/{bucket}", bodyNone, s.deleteLimit)

	row(http.MethodPost, "/tenants/{tenant_id}/channels", bodyJSON, s.createChannel)
	row(http.MethodGet, "/tenants/{tenant_id}/channels", bodyNone, s.listChannels)
	row(http.MethodGet, "/channels/{channel_id}", bodyNone, s.getChannel)
	row(http.MethodPatch, "/channels/{channel_id}", bodyJSON, s.updateChannel)
	row(http.MethodDelete, "/channels/{channel_id}", bodyNone, s.deleteChannel)
	row(http.MethodPost, "/channels/{channel_id}/secret", bodyOptional, s.rotateSecret)

	row(http.MethodGet, "/inbound_events", bodyNone, s.listEvents)
	row(http.MethodGet, "/tenants/{tenant_id}/inbound_events/{event_id}", bodyNone, s.getEvent)
	row(http.MethodPost, "/tenants/{tenant_id}/inbound_events/{event_id}/replay", bodyNone, s.replayEvent)
}

// changed makes a change of configuration be in force on this node before its answer is sent. The change is committed: if
// this fails, the next poll brings it.
func (s *server) changed(c *call) {
	if err := s.Directory.Refresh(c.ctx()); err != nil {
		s.Logger.WarnContext(c.ctx(), "a change is stored but not yet in force on this node", "request_id", c.id, "error", err.Error())
	}
}

// Tenants.

type tenantBody struct {
	ID          uuid.UUID       `json:"id"`
	Name        string          `json:"name"`
	Status      tenants.Status  `json:"status"`
	Limits      json.RawMessage `json:"limits"`
	MaxInFlight int             `json:"max_in_flight"`
	InsertedAt  time.Time       `json:"inserted_at"`
	UpdatedAt   time.Time       `json:"updated_at"`
}

func tenantJSON(t tenants.Tenant) tenantBody {
	return tenantBody{t.ID, t.Name, t.Status, orObject(t.Limits), t.MaxInFlight, t.InsertedAt.UTC(), t.UpdatedAt.UTC()}
}

func (s *server) createTenant(c *call) (*reply, error) {
	f, err := c.object()
	if err != nil {
		return nil, err
	}
	f.require("name")
	in := tenants.NewTenant{Name: f.str("name")}
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	t, err := s.Tenants.Create(c.ctx(), c.actor(), in)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return dataReply(http.StatusCreated, tenantJSON(t))
}

func (s *server) listTenants(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	after, err := s.cursors.decode(q.Get("cursor"), "tenants")
	if err != nil {
		return nil, err
	}
	limit := pageLimit(q, defaultPage, maxPage)
	found, err := s.Tenants.ListAllTenants(c.ctx(), after, limit+1)
	if err != nil {
		return nil, err
	}
	next := ""
	if len(found) > limit {
		found = found[:limit]
		next = s.cursors.encode(found[limit-1].ID, "tenants")
	}
	bodies := make([]tenantBody, len(found))
	for i, t := range found {
		bodies[i] = tenantJSON(t)
	}
	return pageReply(c.r.URL, bodies, limit, next)
}

func (s *server) getTenant(c *call) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.Get(c.ctx(), id)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, tenantJSON(t))
}

func (s *server) suspendTenant(c *call) (*reply, error) {
	return s.setStatus(c, tenants.StatusSuspended)
}

func (s *server) activateTenant(c *call) (*reply, error) { return s.setStatus(c, tenants.StatusActive) }

func (s *server) setStatus(c *call, status tenants.Status) (*reply, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	t, err := s.Tenants.SetStatus(c.ctx(), c.actor(), id, status)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return dataReply(http.StatusOK, tenantJSON(t))
}

// Keys.

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

// seconds reads a whole number of seconds from 0 to most, nil when absent.
func (f *fields) seconds(name string, most time.Duration) *time.Duration {
	n := f.optInt(name)
	if n == nil {
		return nil
	}
	if *n < 0 || *n > int(most.Seconds()) {
		f.fault(name, fault.OutOfRange, "must be from 0 to %d", int(most.Seconds()))
		return nil
	}
	d := time.Duration(*n) * time.Second
	return &d
}

// Limits.

// limitBody is one bucket as it stands for a tenant. A null rule is no limit, or no override.
type limitBody struct {
	Bucket      string          `json:"bucket"`
	Overridable bool            `json:"overridable"`
	Default     *ratelimit.Rule `json:"default"` // of the installation
	Override    *ratelimit.Rule `json:"override"`
	Effective   *ratelimit.Rule `json:"effective"` // as this node enforces it
}

func (s *server) limitJSON(t *tenants.TenantEntry, b ratelimit.Bucket) limitBody {
	overrides := overridesOf(t)
	return limitBody{
		Bucket: b.String(), Overridable: b.Info().TenantOverride,
		Default: ruleOf(s.Limiter.Policy(b, nil, nil)), Override: ruleOf(overrides.Policy(b)),
		Effective: ruleOf(s.Limiter.Policy(b, overrides, nil)),
	}
}

func ruleOf(p *ratelimit.Policy) *ratelimit.Rule {
	if p == nil {
		return nil
	}
	r := p.Rule()
	return &r
}

// enforcedTenant is the tenant of the path as this node has it in memory: what is shown is what is enforced.
func (s *server) enforcedTenant(c *call) (*tenants.TenantEntry, error) {
	id, err := c.pathID("tenant_id")
	if err != nil {
		return nil, err
	}
	t, ok := s.Directory.Tenant(id)
	if !ok && s.Directory.Miss(c.ctx()) {
		t, ok = s.Directory.Tenant(id)
	}
	if !ok {
		return nil, tenants.ErrNotFound
	}
	return t, nil
}

func (s *server) listLimits(c *call) (*reply, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, err
	}
	var bodies []limitBody
	for _, b := range ratelimit.Buckets() {
		bodies = append(bodies, s.limitJSON(t, b))
	}
	return dataReply(http.StatusOK, bodies)
}

// limitOf finds the tenant and the bucket of the path.
func (s *server) limitOf(c *call) (*tenants.TenantEntry, ratelimit.Bucket, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, 0, err
	}
	b, ok := ratelimit.ParseBucket(c.param("bucket"))
	if !ok {
		return nil, 0, newProblem(codeNotFound, "There is no bucket of this name.")
	}
	return t, b, nil
}

func (s *server) getLimit(c *call) (*reply, error) {
	t, b, err := s.limitOf(c)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, s.limitJSON(t, b))
}

func (s *server) putLimit(c *call) (*reply, error) {
	t, b, err := s.limitOf(c)
	if err != nil {
		return nil, err
	}
	if _, err := c.object(); err != nil {
		return nil, err
	}
	rule, err := ratelimit.ParseOverride(b, c.body)
	if err != nil {
		return nil, err
	}
	canonical, err := json.Marshal(rule)
	if err != nil {
		return nil, err
	}
	if err := s.Tenants.SetLimit(c.ctx(), c.actor(), t.ID, b.String(), canonical); err != nil {
		return nil, err
	}
	return s.limitNow(c, t.ID, b)
}

// deleteLimit restores the default. Removing what is not there changes nothing and is no error.
func (s *server) deleteLimit(c *call) (*reply, error) {
	t, b, err := s.limitOf(c)
	if err != nil {
		return nil, err
	}
	if err := s.Tenants.DeleteLimit(c.ctx(), c.actor(), t.ID, b.String()); err != nil {
		return nil, err
	}
	return s.limitNow(c, t.ID, b)
}

// limitNow answers with the limit that is in force after a change.
func (s *server) limitNow(c *call, tenant tenants.ID, b ratelimit.Bucket) (*reply, error) {
	s.changed(c)
	t, ok := s.Directory.Tenant(tenant)
	if !ok {
		return nil, tenants.ErrNotFound
	}
	return dataReply(http.StatusOK, s.limitJSON(t, b))
}

// Channels.

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
	return b
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
	b := s.channelJSON(ch)
	b.Secret = ch.Secret.Reveal()
	return dataReply(http.StatusCreated, b)
}

// positive reads a whole number above 0, nil when absent: where 0 would mean the default to a store.
func (f *fields) positive(name string) *int {
	n := f.optInt(name)
	if n != nil && *n < 1 {
		f.fault(name, fault.OutOfRange, "must be 1 or more")
		return nil
	}
	return n
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
	return dataReply(http.StatusOK, s.channelJSON(ch))
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
	for name, raw := range f.members {
		if !bytes.Equal(bytes.TrimSpace(raw), []byte("null")) {
			continue
		}
		if name == "rate_limit" {
			patch.RateLimit = new(string)
		} else if _, known := f.asked[name]; known {
			f.fault(name, fault.InvalidType, "can't be null; leave it out to keep it")
		}
	}
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	ch, err := s.Channels.Update(c.ctx(), c.actor(), tenant, id, patch)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	return dataReply(http.StatusOK, s.channelJSON(ch))
}

func (s *server) deleteChannel(c *call) (*reply, error) {
	tenant, id, err := s.channelOf(c)
	if err != nil {
		return nil, err
	}
	if err := s.Channels.Delete(c.ctx(), c.actor(), tenant, id); err != nil {
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
	overlap := time.Duration(channel.DefaultOverlap)
	if given := f.seconds("overlap_seconds", channel.MaxOverlap); given != nil {
		overlap = *given
	}
	secret := f.str("secret")
	f.refuseUnknown()
	if err := f.err(); err != nil {
		return nil, err
	}
	ch, err := s.Channels.RotateSecret(c.ctx(), c.actor(), tenant, id, overlap, secret)
	if err != nil {
		return nil, err
	}
	s.changed(c)
	b := s.channelJSON(ch)
	b.Secret = ch.Secret.Reveal()
	return dataReply(http.StatusOK, b)
}

// Inbound events.

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
