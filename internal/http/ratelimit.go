package http

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strconv"
	"sync"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// Deriver prepares, for each entry of the tenants directory, what a request's limit needs: the hashed keys of its
// budgets and the tenant's compiled overrides. Give it to [tenants.NewDirectory].
type Deriver struct {
	hasher ratelimit.Hasher
	logger *slog.Logger
}

var _ tenants.Deriver = Deriver{}

// NewDeriver makes a deriver; the hasher is the one given in [Deps].
func NewDeriver(h ratelimit.Hasher, l *slog.Logger) Deriver { return Deriver{h, l} }

type tenantLimits struct {
	overrides                       *ratelimit.Overrides // nil: none
	activityCreate, upload, apiRead ratelimit.Key
}

type channelLimits struct{ inbound, unproven, tokenGenerate ratelimit.Key }

type operatorLimits struct{ management ratelimit.Key }

// Tenant implements [tenants.Deriver].
func (d Deriver) Tenant(t *tenants.TenantEntry) any {
	overrides, err := ratelimit.Compile(t.Limits)
	if err != nil {
		// Checked when it was saved: another version of the program, or a hand, wrote it. The other entries stand.
		d.logger.Warn("a tenant's stored limit is not valid and is ignored", "tenant_id", t.ID, "error", err.Error())
	}
	return &tenantLimits{
		overrides:      overrides,
		activityCreate: d.hasher.Tenant(ratelimit.ActivityCreate, t.ID),
		upload:         d.hasher.Tenant(ratelimit.Upload, t.ID),
		apiRead:        d.hasher.Tenant(ratelimit.APIRead, t.ID),
	}
}

// Channel implements [tenants.Deriver].
func (d Deriver) Channel(c *tenants.ChannelEntry) any {
	return &channelLimits{
		inbound:       d.hasher.Channel(ratelimit.Inbound, c.TenantID, c.ID),
		unproven:      d.hasher.ChannelUnproven(ratelimit.Inbound, c.TenantID, c.ID),
		tokenGenerate: d.hasher.Channel(ratelimit.TokenGenerate, c.TenantID, c.ID),
	}
}

// OperatorToken implements [tenants.Deriver].
func (d Deriver) OperatorToken(t *tenants.OperatorEntry) any {
	return &operatorLimits{management: d.hasher.Operator(ratelimit.Management, t.ID)}
}

func overridesOf(t *tenants.TenantEntry) *ratelimit.Overrides {
	if t == nil {
		return nil
	}
	return t.Derived.(*tenantLimits).overrides
}

// budget is the key of whom the bucket counts for this caller.
func (s *server) budget(c *call, b ratelimit.Bucket) ratelimit.Key {
	switch b {
	case ratelimit.Inbound:
		ch := c.Channel.Derived.(*channelLimits)
		if s.Proofs.Has(s.proofKey(c), c.started) {
			return ch.inbound
		}
		return ch.unproven
	case ratelimit.TokenCreate:
		return s.Hasher.IP(b, c.ip)
	case ratelimit.TokenGenerate:
		return c.Channel.Derived.(*channelLimits).tokenGenerate
	case ratelimit.ActivityCreate:
		return c.Tenant.Derived.(*tenantLimits).activityCreate
	case ratelimit.Upload:
		return c.Tenant.Derived.(*tenantLimits).upload
	case ratelimit.WebPage:
		return s.Hasher.Session(b, c.digest)
	case ratelimit.Management:
		return c.Operator.Derived.(*operatorLimits).management
	case ratelimit.APIRead:
		if c.Token == nil {
			return c.Tenant.Derived.(*tenantLimits).apiRead
		}
		return s.Hasher.User(b, c.Tenant.ID, c.Channel.ID, tokenUser(c.Token))
	}
	panic("http: no subject for bucket " + b.String()) // a fault of the route table, which a test drives whole
}

// proofKey names the caller's address at the channel, to which it may have proved itself.
func (s *server) proofKey(c *call) ratelimit.Key {
	return s.Hasher.ChannelIP(ratelimit.Inbound, c.Channel.TenantID, c.Channel.ID, c.ip)
}

// tokenUser is whom a client token speaks for: a user; an anonymous one is known by the conversation that the token is
// bound to, else by its channel only.
func tokenUser(t *auth.Claims) string {
	if t.UserID == "" {
		return "conversation:" + t.ConversationID.String()
	}
	return "user:" + t.UserID
}

// spend takes one from the budget of the route's bucket, or refuses with the problem that says so.
func (s *server) spend(c *call, b ratelimit.Bucket) error {
	if c.exempt() && b.Info().Subject == ratelimit.SubjectIP {
		return nil
	}
	key := s.budget(c, b)
	c.decision = s.Limiter.Check(c.ctx(), s.Limiter.Now(), ratelimit.Item{
		Key: key, Policy: s.Limiter.Policy(b, overridesOf(c.Tenant), nil), Cost: 1,
	})
	if s.TellDecisionTime {
		c.tellTime()
	}
	if c.decision.Unnamed {
		s.Limiter.Name(b, key, s.subject(c, b, key))
	}
	if c.decision.Allowed {
		return nil
	}
	return (*refusal)(&c.decision)
}

// tellTime says when the limit was decided, in Unix milliseconds of the clock by which this node numbers its windows: that
// tells in which window the request was counted, which nothing else tells exactly. Load tests need it; other callers would
// learn the hub's clock, so it is off unless the operator asks for it.
func (c *call) tellTime() {
	if c.decision.Limited() {
		c.Header()["Converger-Decided-At"] = []string{strconv.FormatInt(int64(c.decision.At)/1e6, 10)}
	}
}

// stranger answers a request whose credential nobody issued: with the problem, or, when its address has sent too many
// of them, with 429 in its place. refund takes the count back: the caller turned out to be known.
func (s *server) stranger(c *call, answer error) (refund func(), err error) {
	if c.exempt() {
		return func() {}, answer
	}
	it := ratelimit.Item{
		Key: s.Hasher.IP(ratelimit.UnknownCaller, c.ip), Policy: s.Limiter.Policy(ratelimit.UnknownCaller, nil, nil), Cost: 1,
	}
	d := s.Limiter.Check(c.ctx(), s.Limiter.Now(), it)
	if d.Unnamed {
		s.Limiter.Name(ratelimit.UnknownCaller, it.Key, ratelimit.Name{Text: ratelimit.AddressText(c.ip)})
	}
	if !d.Allowed {
		c.decision = d
		return nil, (*refusal)(&c.decision)
	}
	return func() { s.Limiter.Refund(c.ctx(), d, it) }, answer
}

// refusal is a decision as the error by which guards refuse a request. It is the call's own decision, so that a flood of
// refusals allocates none.
type refusal ratelimit.Decision

// Error implements error; the text is also what the caller sees.
func (d *refusal) Error() string { return limitProblem(ratelimit.Decision(*d)).Error() }

// limitProblem is the 429 of a refusal.
func limitProblem(d ratelimit.Decision) *problem {
	p := &problem{
		code: codeRateLimited, detail: string(d.AppendDetail(nil)),
		extra: &limitDetail{
			Bucket: d.Policy.Bucket().String(), Limit: uint64(d.Policy.Limit()), ScaleMS: int64(d.Policy.ScaleMs()),
			RetryAfterMS: int64(d.RetryAfterMs()),
		},
	}
	return p.retryAfter(d.RetryAfterSeconds())
}

// refusalBodies are buffers for the bodies of refusals.
var refusalBodies = sync.Pool{New: func() any { b := make([]byte, 0, 512); return &b }}

// writeRefusal is write of limitProblem's reply, without what a flood need not cost: see ADR 0029.
func (s *server) writeRefusal(c *call, d ratelimit.Decision) {
	b := refusalBodies.Get().(*[]byte)
	*b = s.appendRefusal((*b)[:0], c.id, d)
	c.Header()["Retry-After"] = c.value(strconv.FormatInt(d.RetryAfterSeconds(), 10))
	s.send(c, http.StatusTooManyRequests, typeProblem, *b)
	refusalBodies.Put(b)
}

// refusalHead is what the bodies of all refusals begin with; base is the public URL.
func refusalHead(base string) []byte {
	kind := kinds[codeRateLimited]
	text := func(s string) []byte {
		b, _ := json.Marshal(s) // of a text can't fail
		return b
	}
	return fmt.Appendf(nil, `{"type":%s,"title":%s,"status":%d,"detail":"`, text(base+"/problems/"+string(kind.Code)), text(kind.Title), kind.Status)
}

// appendRefusal appends the body of limitProblem's reply, byte for byte, which a test holds it to. The sentence, the
// bucket's name and a request id have nothing that JSON escapes.
func (s *server) appendRefusal(b []byte, requestID string, d ratelimit.Decision) []byte {
	p := d.Policy
	b = append(b, s.refusalHead...)
	b = d.AppendDetail(b)
	b = append(b, `","code":"`...)
	b = append(b, codeRateLimited...)
	b = append(b, `","request_id":"`...)
	b = append(b, requestID...)
	b = append(b, `","bucket":"`...)
	b = append(b, p.Bucket().String()...)
	b = append(b, `","limit":`...)
	b = strconv.AppendUint(b, uint64(p.Limit()), 10)
	b = append(b, `,"scale_ms":`...)
	b = strconv.AppendUint(b, uint64(p.ScaleMs()), 10)
	b = append(b, `,"retry_after_ms":`...)
	b = strconv.AppendUint(b, uint64(d.RetryAfterMs()), 10)
	return append(b, '}')
}
