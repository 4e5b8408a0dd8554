package http

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/fault"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/overview"
	"converger/internal/tenants"
)

// registerRateLimitRoutes: what limits do, on all nodes. Reading asks the other nodes and costs no query.
func (s *server) registerRateLimitRoutes() {
	s.operatorRoute(http.MethodGet, "/rate_limits", bodyNone, s.getRateLimits)
	s.operatorRoute(http.MethodGet, "/rate_limits/usage", bodyNone, s.getUsage)
	s.operatorRoute(http.MethodDelete, "/rate_limits/usage", bodyNone, s.clearUsage)
	s.operatorRoute(http.MethodGet, "/rate_limits/demand", bodyNone, s.getDemand)
	// A POST for its body's sake: it changes nothing.
	s.register(route{method: http.MethodPost, pattern: managementPrefix + "/tenants/{tenant_id}/limits/preview", auth: credentialOperator,
		scope: tenants.ScopeRead, bucket: ratelimit.Management, body: bodyJSON, handle: s.previewLimits})
}

// countPair is written as [subject, count].
type countPair struct {
	subject string
	count   uint64
}

// MarshalJSON implements [json.Marshaler].
func (p countPair) MarshalJSON() ([]byte, error) { return json.Marshal([]any{p.subject, p.count}) }

// subjectBody tells what a subject's text does not.
type subjectBody struct {
	TenantID *uuid.UUID `json:"tenant_id"`
	Tenant   *string    `json:"tenant"` // its name
}

type refusalBody struct {
	Bucket       string     `json:"bucket"`
	Subject      string     `json:"subject"`
	TenantID     *uuid.UUID `json:"tenant_id"`
	NodeID       *string    `json:"node_id"`
	Count        uint64     `json:"count"`
	FirstAt      time.Time  `json:"first_at"`
	LastAt       time.Time  `json:"last_at"`
	Limit        uint32     `json:"limit"`
	ScaleMS      uint32     `json:"scale_ms"`
	RetryAfterMS uint32     `json:"retry_after_ms"`
	Counted      bool       `json:"counted"`
}

// peerBody is what one node makes of another.
type peerBody struct {
	NodeID    string   `json:"node_id"`
	Name      string   `json:"name"`
	Standing  string   `json:"standing"`
	Connected bool     `json:"connected"`
	HeardMS   *int64   `json:"heard_ms"`       // since its last message; null: never
	ReportMS  *int64   `json:"last_report_ms"` // since its last counts; null: none yet, or not of that backend
	DelayMS   *float64 `json:"report_delay_ms"`
	SkewMS    float64  `json:"skew_ms"`
	Queued    int      `json:"queued"`
	Dropped   uint64   `json:"dropped"`
	Version   string   `json:"version"`
}

type storeBody struct {
	Backend     string  `json:"backend"`
	Keys        int     `json:"keys"`
	MaxKeys     int     `json:"max_keys"`
	Overflowing bool    `json:"overflowing"`
	FallingBack bool    `json:"falling_back"`
	Breaker     *string `json:"breaker"`
}

// nodeBody is one node. Of one that did not answer only what others know of it is there.
type nodeBody struct {
	ID            *string               `json:"id"` // null: the only one
	Name          string                `json:"name"`
	Version       string                `json:"version"`
	Standing      string                `json:"standing"` // asked, dead, or as the asked node sees it
	Error         *string               `json:"error"`
	LastHeardAt   *time.Time            `json:"last_heard_at"` // by the asked node, of a dead one its heartbeat
	StartedAt     *time.Time            `json:"started_at"`
	SkewMS        float64               `json:"skew_ms"`
	Witness       bool                  `json:"witness"`
	Alive         int                   `json:"alive"`
	Visible       int                   `json:"visible"`
	ConfigDiffers []string              `json:"config_differs"`
	Stores        []storeBody           `json:"stores"`
	Peers         []peerBody            `json:"peers"`
	Connections   *overview.Connections `json:"connections"`
}

type rateLimitsBody struct {
	At             time.Time                              `json:"at"`
	Complete       bool                                   `json:"complete"` // every node has told
	Enabled        bool                                   `json:"enabled"`
	Config         map[string]*overview.Limit             `json:"config"`
	Decisions      map[string]overview.Decisions[float64] `json:"decisions_per_second"`
	RefusedTotal   map[string]uint64                      `json:"refused_total"`
	TopSince       time.Time                              `json:"top_since"`
	TopRefused     map[string][]countPair                 `json:"top_refused"`
	Subjects       map[string]subjectBody                 `json:"subjects"`
	RecentRefusals []refusalBody                          `json:"recent_refusals"`
	Connections    *overview.Connections                  `json:"connections"`
	Nodes          []nodeBody                             `json:"nodes"`
	NodesElsewhere int                                    `json:"nodes_elsewhere"`
	Remarks        []string                               `json:"remarks"`
}

func (s *server) getRateLimits(c *call) (*reply, error) {
	return dataReply(http.StatusOK, s.rateLimitsJSON(s.Overview.Picture(c.ctx())))
}

func (s *server) rateLimitsJSON(p overview.Picture) rateLimitsBody {
	out := rateLimitsBody{
		At: p.At, Complete: p.Told() == len(p.Nodes) && p.Elsewhere == 0, Enabled: p.Enabled, TopSince: p.At, Connections: p.Connections, RecentRefusals: []refusalBody{}, Nodes: []nodeBody{},
		Config: map[string]*overview.Limit{}, Decisions: map[string]overview.Decisions[float64]{}, RefusedTotal: map[string]uint64{},
		TopRefused: map[string][]countPair{}, Subjects: map[string]subjectBody{}, NodesElsewhere: p.Elsewhere, Remarks: remarks(p),
	}
	note := func(x overview.Subject) *uuid.UUID {
		if x.Tenant == uuid.Nil {
			return nil
		}
		id := uuid.UUID(x.Tenant)
		out.Subjects[x.Text] = subjectBody{&id, optional(s.tenantName(id))}
		return &id
	}
	for _, b := range p.Buckets {
		name := b.Bucket.String()
		out.Config[name], out.Decisions[name], out.RefusedTotal[name] = b.Config, b.Rate, b.Total.Refused
		out.TopRefused[name] = []countPair{}
		for _, h := range b.Top {
			note(h.Subject)
			out.TopRefused[name] = append(out.TopRefused[name], countPair{h.Text, h.Count})
		}
		if b.Since.Before(out.TopSince) {
			out.TopSince = b.Since
		}
	}
	for _, r := range p.Recent {
		out.RecentRefusals = append(out.RecentRefusals, refusalBody{r.Bucket, r.Text, note(r.Subject), optional(r.Node), r.Count, r.First, r.Last,
			r.Limit, r.ScaleMs, r.RetryAfterMs, r.Counted})
	}
	for _, n := range p.Nodes {
		out.Nodes = append(out.Nodes, nodeJSON(n, p.At, p.Differ[n.ID]))
	}
	return out
}

func nodeJSON(f overview.From[overview.State], at time.Time, differs []string) nodeBody {
	a := f.Answer
	n := nodeBody{
		ID: optional(f.ID), Name: a.Name, Version: a.Version, Standing: "asked", SkewMS: a.SkewMs, Witness: a.Witness, Alive: a.Alive, Visible: a.Visible,
		ConfigDiffers: differs, Stores: []storeBody{}, Peers: []peerBody{}, Connections: a.Connections,
	}
	if differs == nil {
		n.ConfigDiffers = []string{}
	}
	if p := f.Peer; p != nil {
		n.Name, n.Version, n.Standing = p.Name, p.Version, p.Standing.String()
		if f.Err != nil {
			n.SkewMS = float64(p.Skew.Milliseconds())
		}
		if p.Heard >= 0 {
			n.LastHeardAt = utcAgo(at, p.Heard)
		}
	}
	if d := f.Dead; d != nil {
		n.Name, n.Version, n.Standing, n.LastHeardAt = d.Name, d.Version, standingDead, utcAgo(at, d.Silent)
	}
	if f.Err != nil {
		text := f.Err.Error()
		n.Error = &text
		return n
	}
	n.StartedAt = &a.StartedAt
	reports := map[string]int64{}
	for _, x := range a.Stores {
		n.Stores = append(n.Stores, storeBody{x.Backend, x.Keys, x.MaxKeys, x.Overflowing, x.FallingBack, optional(x.Breaker)})
		for id, ms := range x.HeardMs {
			reports[id] = ms
		}
	}
	for _, x := range a.Peers {
		p := peerBody{NodeID: x.ID, Name: x.Name, Standing: x.Standing, Connected: x.Connected, SkewMS: x.SkewMs, Queued: x.Queued, Dropped: x.Dropped, Version: x.Version}
		if x.HeardMs >= 0 {
			p.HeardMS = &x.HeardMs
		}
		if ms, ok := reports[x.ID]; ok {
			p.ReportMS = &ms
		}
		if x.DelayMs > 0 {
			p.DelayMS = &x.DelayMs
		}
		n.Peers = append(n.Peers, p)
	}
	return n
}

// standingDead is that of a node which no view of the living has.
const standingDead = "dead"

func utcAgo(at time.Time, ago time.Duration) *time.Time {
	t := at.Add(-ago).UTC().Truncate(time.Millisecond)
	return &t
}

// usageNode is one subject's use on one node. What a node does not know is null.
type usageNode struct {
	NodeID    *string `json:"node_id"`
	Name      string  `json:"name"`
	Error     *string `json:"error"`
	Limited   *bool   `json:"limited"`
	Backend   *string `json:"backend"`
	Limit     *uint32 `json:"limit"`
	Used      *uint32 `json:"used"`
	Own       *uint32 `json:"counted_here"`
	Remaining *uint32 `json:"remaining"`
	WaitMS    *uint32 `json:"wait_ms"`
}

type usageBody struct {
	Bucket    string      `json:"bucket"`
	Subject   string      `json:"subject"`
	TenantID  *uuid.UUID  `json:"tenant_id"`
	Tenant    *string     `json:"tenant"`
	Key       string      `json:"key"`
	Limited   bool        `json:"limited"`
	Limit     *uint32     `json:"limit"`
	ScaleMS   *uint32     `json:"scale_ms"`
	Algorithm *string     `json:"algorithm"`
	Used      *uint64     `json:"used"` // null: unknown
	Remaining *uint64     `json:"remaining"`
	Complete  bool        `json:"complete"` // every node has told
	Detail    *string     `json:"detail"`   // what is missing, for people
	Nodes     []usageNode `json:"nodes"`
	Elsewhere int         `json:"nodes_elsewhere"`
}

func (s *server) usageJSON(b overview.Budget, all []overview.From[overview.Use]) usageBody {
	elsewhere := s.Overview.Elsewhere(len(all))
	detail := s.missingUsage(b.Bucket, all, elsewhere)
	out := usageBody{Bucket: b.Bucket.String(), Subject: b.Name.Text, Key: b.Key.String(), Complete: detail == "", Detail: optional(detail),
		Nodes: []usageNode{}, Elsewhere: elsewhere}
	used, told := overview.Total(all)
	if told > 0 {
		out.Used = &used
	}
	if id := uuid.UUID(b.Name.Tenant); id != uuid.Nil {
		out.TenantID, out.Tenant = &id, optional(s.tenantName(id))
	}
	if own := all[0].Answer; own.Limited {
		out.Limited, out.Limit, out.ScaleMS, out.Algorithm = true, &own.Limit, &own.ScaleMs, &own.Algorithm
		if told > 0 {
			remaining := uint64(own.Quota) - min(uint64(own.Quota), used)
			out.Remaining = &remaining
		}
	}
	for _, f := range all {
		n := usageNode{NodeID: optional(f.ID), Name: f.Name, Error: errorText(f.Err), Own: f.Answer.Own}
		if u := f.Answer; u.Backend != "" {
			n.Limited, n.Backend, n.Limit = &u.Limited, &u.Backend, &u.Limit
			if f.Err == nil {
				remaining := u.Quota - min(u.Quota, u.Used)
				n.Used, n.Remaining, n.WaitMS = &u.Used, &remaining, &u.WaitMs
			}
		}
		out.Nodes = append(out.Nodes, n)
	}
	return out
}

func errorText(err error) *string {
	if err == nil {
		return nil
	}
	text := err.Error()
	return &text
}

// missingUsage says what a look-up does not know, "" if it knows all.
func (s *server) missingUsage(b ratelimit.Bucket, all []overview.From[overview.Use], elsewhere int) string {
	var out []string
	atRedis := s.Limiter.Backend(b) == string(ratelimit.BackendRedis)
	_, told := overview.Total(all)
	if told == 0 && atRedis {
		out = append(out, "How much is used is unknown while Redis can't be asked. Until then each node goes by its share of the limit; what it has used of that is what it has counted itself.")
	} else if told == 0 {
		out = append(out, "How much is used is unknown.")
	}
	for _, f := range all {
		if f.Err != nil && (told > 0 || !atRedis || f.Answer.Err == "") {
			out = append(out, fmt.Sprintf("The node %s %v.", nodeName(f.ID, f.Name), f.Err))
		}
	}
	if told > 0 && told < len(all) {
		out = append(out, "What "+theyHave(len(all)-told)+" counted is not in these numbers.")
	}
	if elsewhere > 0 && !atRedis {
		words, have := elsewhereWords(elsewhere)
		out = append(out, words, "What "+have+" counted is not in these numbers.")
	}
	return strings.Join(out, " ")
}

// theyHave stands for so many nodes.
func theyHave(n int) string {
	if n == 1 {
		return "it has"
	}
	return "they have"
}

// elsewhereWords tell of nodes that can't be asked.
func elsewhereWords(n int) (words, have string) {
	words = "One more node counts at the same Redis. It is no cluster with the node that was asked (CLUSTER_PEERS), and can't be asked from there."
	if n > 1 {
		words = fmt.Sprintf("%d more nodes count at the same Redis. They are no cluster with the node that was asked (CLUSTER_PEERS), and can't be asked from there.", n)
	}
	return words, theyHave(n)
}

// askedBudget is the budget that the query names.
func (s *server) askedBudget(c *call) (overview.Budget, error) {
	q, err := c.query()
	if err != nil {
		return overview.Budget{}, err
	}
	return s.findBudget(c.ctx(), q.Get("bucket"), q.Get("subject"))
}

func (s *server) getUsage(c *call) (*reply, error) {
	b, err := s.askedBudget(c)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, s.usageJSON(b, s.Overview.Usage(c.ctx(), b)))
}

// clearedBody says on which nodes a counter was reset.
type clearedBody struct {
	Bucket  string        `json:"bucket"`
	Subject string        `json:"subject"`
	Cleared bool          `json:"cleared"` // everywhere
	Detail  *string       `json:"detail"`  // what is not, and what to do, for people
	Nodes   []clearedNode `json:"nodes"`

	notice string // of the page
}

type clearedNode struct {
	NodeID *string `json:"node_id"`
	Name   string  `json:"name"`
	Error  *string `json:"error"`
}

// reset forgets what was spent on a budget, on every node, once it is in the audit log.
func (s *server) reset(c *call, b overview.Budget) (clearedBody, error) {
	e := tenants.Entry{Action: "reset", ResourceType: "rate_limit", ResourceID: b.Bucket.String() + " " + b.Name.Text}
	if id := uuid.UUID(b.Name.Tenant); id != uuid.Nil {
		e.TenantID = &id
	}
	if err := s.Tenants.Audit(c.ctx(), c.actor(), e); err != nil {
		return clearedBody{}, err
	}
	all := s.Overview.Reset(c.ctx(), b)
	detail, notice := s.notReset(b.Bucket, all)
	out := clearedBody{Bucket: b.Bucket.String(), Subject: b.Name.Text, Cleared: detail == "", Detail: optional(detail), Nodes: []clearedNode{}, notice: notice}
	for _, f := range all {
		out.Nodes = append(out.Nodes, clearedNode{optional(f.ID), f.Name, errorText(f.Err)})
	}
	return out, nil
}

// notReset says what a reset has not reached and what to do about it, "" if nothing, and which notice a page has for it.
func (s *server) notReset(b ratelimit.Bucket, all []overview.From[overview.Forgot]) (detail, notice string) {
	var done, out []string
	again := ""
	notice = "usage_cleared"
	for _, f := range all {
		name := nodeName(f.ID, f.Name)
		if f.Err == nil {
			done = append(done, name)
			continue
		}
		if f.Dead != nil && s.Limiter.Backend(b) != string(ratelimit.BackendLocal) {
			continue // it takes the reset in before it counts again, if ever it does
		}
		notice = "usage_cleared_partly"
		out = append(out, fmt.Sprintf("Not on %s: it %v.", name, f.Err))
		again = "When all nodes answer again, look it up, and reset it again if need be."
	}
	if elsewhere := s.Overview.Elsewhere(len(all)); elsewhere > 0 && s.Limiter.Backend(b) != string(ratelimit.BackendRedis) {
		notice = "usage_elsewhere_partly"
		words, _ := elsewhereWords(elsewhere)
		out = append(out, words, "Reset it there too.")
	}
	if s.Overview.Kept(b, all) {
		notice = "usage_kept_partly"
		out = append(out, "The count at Redis, which is one for all nodes, stands: Redis can't be asked.")
		again = "Reset it again when it answers."
	}
	if len(out) == 0 {
		return "", notice
	}
	out = append([]string{"Reset is what was counted on " + enumerate(done) + "."}, out...)
	return strings.TrimSpace(strings.Join(append(out, again), " ")), notice
}

// enumerate joins names as a sentence does.
func enumerate(names []string) string {
	if n := len(names) - 1; n > 0 {
		return strings.Join(names[:n], ", ") + " and " + names[n]
	}
	return strings.Join(names, "")
}

// clearUsage answers 200 also when not all could be reset: it is said, and to ask again is harmless.
func (s *server) clearUsage(c *call) (*reply, error) {
	b, err := s.askedBudget(c)
	if err != nil {
		return nil, err
	}
	out, err := s.reset(c, b)
	if err != nil {
		return nil, err
	}
	return dataReply(http.StatusOK, out)
}

// demandBody is what the busiest subjects of a bucket asked for in the last hour, on all nodes.
type demandBody struct {
	At        time.Time           `json:"at"`
	Bucket    string              `json:"bucket"`
	TenantID  *uuid.UUID          `json:"tenant_id"` // whose subjects these are; null: of all
	Subject   *string             `json:"subject"`   // that the query names, in its canonical form
	Subjects  []subjectDemandBody `json:"subjects"`
	Complete  bool                `json:"complete"` // every node has told
	Detail    *string             `json:"detail"`   // what is missing, for people
	Nodes     []clearedNode       `json:"nodes"`
	Elsewhere int                 `json:"nodes_elsewhere"`
}

type subjectDemandBody struct {
	Subject       string            `json:"subject"`
	TenantID      *uuid.UUID        `json:"tenant_id"`
	Tenant        *string           `json:"tenant"`
	Since         time.Time         `json:"since"`
	Sampled       uint64            `json:"sampled"`
	Total         uint64            `json:"total"`
	PeakPerSecond uint32            `json:"peak_per_second"`
	PeakAt        time.Time         `json:"peak_at"`
	LastMinute    float64           `json:"last_minute_per_second"`
	Series        *demandSeriesBody `json:"series"` // null: the query names no subject
}

// demandSeriesBody is a demand by seconds. The last one is the running one; null is one of which nothing is known.
type demandSeriesBody struct {
	Start     time.Time `json:"start"`
	PerSecond []*uint32 `json:"per_second"`
}

func (s *server) subjectDemandJSON(d ratelimit.Demand, now int64, withSeries bool) subjectDemandBody {
	var unlimited *ratelimit.Policy
	sum := unlimited.Replay(d.Start, d.Units)
	out := subjectDemandBody{Subject: d.Name.Text, Since: second(d.Since), Sampled: d.Sampled, Total: sum.Demand, PeakPerSecond: sum.Peak, PeakAt: second(sum.PeakAt)}
	if id := uuid.UUID(d.Name.Tenant); id != uuid.Nil {
		out.TenantID, out.Tenant = &id, optional(s.tenantName(id))
	}
	// Up to the running second, which a node with a clock slightly ahead may have begun before this one.
	passed := d.Units[:min(max(now-d.Start+1, 0), int64(len(d.Units)))]
	minute := uint64(0)
	for _, n := range passed[max(len(passed)-60, 0):] {
		minute += uint64(n)
	}
	out.LastMinute = math.Round(float64(minute)/60*100) / 100
	if withSeries {
		out.Series = &demandSeriesBody{second(d.Start), make([]*uint32, len(passed))}
		for i := max(d.Since-d.Start, 0); i < int64(len(passed)); i++ {
			out.Series.PerSecond[i] = &passed[i]
		}
	}
	return out
}

// second is a moment in Unix seconds, as answers have it.
func second(unix int64) time.Time { return time.Unix(unix, 0).UTC() }

// missingDemand says whose demand is not known, "" if that of all nodes is.
func missingDemand(all []overview.From[struct{}], elsewhere int) string {
	var out []string
	for _, f := range all {
		if f.Err != nil {
			out = append(out, fmt.Sprintf("The node %s %v.", nodeName(f.ID, f.Name), f.Err))
		}
	}
	if n := len(out); n > 0 {
		out = append(out, "What "+theyHave(n)+" been asked is not in these numbers.")
	}
	if elsewhere > 0 {
		words, have := elsewhereWords(elsewhere)
		out = append(out, words, "What "+have+" been asked is not in these numbers.")
	}
	return strings.Join(out, " ")
}

// askedDemand is what the query asks the demand of: a budget with a key, or all of a tenant or of a bucket.
func (s *server) askedDemand(c *call) (overview.Budget, error) {
	q, err := c.query()
	if err != nil {
		return overview.Budget{}, err
	}
	b, err := bucketNamed(q.Get("bucket"))
	if err != nil {
		return overview.Budget{}, err
	}
	of := overview.Budget{Bucket: b}
	tenant, err := queryID(q, "tenant_id")
	if err != nil {
		return of, err
	}
	if tenant != nil {
		if _, err := s.knownTenant(tenant.String()); err != nil {
			return of, err
		}
		of.Name.Tenant = *tenant
	}
	if q.Get("subject") == "" {
		return of, nil
	}
	of, err = s.findBudget(c.ctx(), b.String(), q.Get("subject"))
	if err == nil && tenant != nil && *tenant != of.Name.Tenant {
		err = newProblem(codeNotFound, "The limits of tenant %s do not apply to %s.", tenant, truncate(of.Name.Text, 100))
	}
	return of, err
}

func (s *server) getDemand(c *call) (*reply, error) {
	of, err := s.askedDemand(c)
	if err != nil {
		return nil, err
	}
	demand, nodes := s.Overview.Demand(c.ctx(), of)
	elsewhere := s.Overview.Elsewhere(len(nodes))
	detail := missingDemand(nodes, elsewhere)
	now := s.Limiter.Now().Time().UTC()
	out := demandBody{At: now, Bucket: of.Bucket.String(), Subject: optional(of.Name.Text), Subjects: []subjectDemandBody{},
		Complete: detail == "", Detail: optional(detail), Nodes: []clearedNode{}, Elsewhere: elsewhere}
	if id := uuid.UUID(of.Name.Tenant); id != uuid.Nil {
		out.TenantID = &id
	}
	for _, d := range demand {
		out.Subjects = append(out.Subjects, s.subjectDemandJSON(d, now.Unix(), of.Key.Valid()))
	}
	for _, f := range nodes {
		out.Nodes = append(out.Nodes, clearedNode{optional(f.ID), f.Name, errorText(f.Err)})
	}
	return dataReply(http.StatusOK, out)
}

// forecastBody is what the last hour's demand would have met under a limit.
type forecastBody struct {
	Bucket        string                `json:"bucket"`
	Limit         ratelimit.Rule        `json:"limit"`
	Since         *time.Time            `json:"since"` // of the demand; null: none was seen
	Until         *time.Time            `json:"until"`
	Sampled       uint64                `json:"sampled"`
	Demand        uint64                `json:"demand"`
	Admitted      uint64                `json:"admitted"`
	Refused       uint64                `json:"refused"`
	PeakPerSecond uint32                `json:"peak_per_second"`
	PeakAt        *time.Time            `json:"peak_at"`
	Windows       int                   `json:"windows"`
	Exceeded      int                   `json:"windows_exceeded"`
	Subjects      []subjectForecastBody `json:"subjects"`
	Missing       []clearedNode         `json:"missing"`
}

type subjectForecastBody struct {
	Subject       string    `json:"subject"`
	Since         time.Time `json:"since"`
	Demand        uint64    `json:"demand"`
	Admitted      uint64    `json:"admitted"`
	Refused       uint64    `json:"refused"`
	PeakPerSecond uint32    `json:"peak_per_second"`
	PeakAt        time.Time `json:"peak_at"`
	Windows       int       `json:"windows"`
	Exceeded      int       `json:"windows_exceeded"`
}

// forecast runs the demand of a tenant's subjects in the last hour, on all nodes, through a rule.
func (s *server) forecast(c *call, tenant tenants.ID, b ratelimit.Bucket, r ratelimit.Rule) (forecastBody, error) {
	out := forecastBody{Bucket: b.String(), Limit: r, Sampled: 1, Subjects: []subjectForecastBody{}, Missing: []clearedNode{}}
	p, err := ratelimit.NewPolicy(b, r)
	if err != nil {
		return out, err
	}
	demand, nodes := s.Overview.Demand(c.ctx(), overview.Budget{Bucket: b, Name: ratelimit.Name{Tenant: tenant}})
	for _, f := range nodes {
		if f.Err != nil {
			out.Missing = append(out.Missing, clearedNode{optional(f.ID), f.Name, errorText(f.Err)})
		}
	}
	for _, d := range demand {
		f := p.Replay(d.Start, d.Units)
		out.Subjects = append(out.Subjects, subjectForecastBody{d.Name.Text, second(d.Since), f.Demand, f.Admitted, f.Refused, f.Peak, second(f.PeakAt), f.Windows, f.Exceeded})
		out.Sampled = max(out.Sampled, d.Sampled)
		out.Demand += f.Demand
		out.Admitted += f.Admitted
		out.Refused += f.Refused
		out.Windows += f.Windows
		out.Exceeded += f.Exceeded
		if since := second(d.Since); out.Since == nil || since.Before(*out.Since) {
			out.Since = &since
		}
		if at := second(f.PeakAt); f.Peak > out.PeakPerSecond {
			out.PeakPerSecond, out.PeakAt = f.Peak, &at
		}
		if until := second(d.Start + int64(len(d.Units))); out.Until == nil || until.After(*out.Until) {
			out.Until = &until
		}
	}
	if now := s.Limiter.Now().Time().UTC().Truncate(time.Second); out.Until != nil && out.Until.After(now) {
		out.Until = &now
	}
	return out, nil
}

// previewLimits saves nothing. The body has the form of all of a tenant's limits: a rule by the name of its bucket.
func (s *server) previewLimits(c *call) (*reply, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, err
	}
	members, err := c.object()
	if err != nil {
		return nil, err
	}
	rules := map[ratelimit.Bucket]ratelimit.Rule{}
	for _, b := range ratelimit.Buckets() {
		raw := members.raw(b.String())
		if raw == nil {
			continue
		}
		r, err := ratelimit.ParseOverride(b, raw)
		var bad ratelimit.Errors
		switch {
		case errors.As(err, &bad):
			for _, f := range bad {
				*members.faults = append(*members.faults, fault.Field{Pointer: "/" + b.String() + f.Pointer, Code: f.Code, Detail: f.Detail})
			}
		case b == ratelimit.ChannelOutbound:
			members.fault(b.String(), ratelimit.CodeUnknownValue, "is set at each channel, as its rate_limit: there is no limit of a tenant's to try")
		case err != nil:
			members.fault(b.String(), ratelimit.CodeUnknownValue, "is the same for all tenants: there is no limit of a tenant's to try")
		}
		rules[b] = r
	}
	members.refuseUnknown()
	if err := members.err(); err != nil {
		return nil, err
	}
	if len(rules) == 0 {
		return nil, fault.Invalidf("", fault.Required, `name at least one bucket: {"activity_create": {"limit": 200, "scale_ms": 1000}}`)
	}
	out := []forecastBody{}
	for _, b := range ratelimit.Buckets() {
		if r, ok := rules[b]; ok {
			f, err := s.forecast(c, t.ID, b, r)
			if err != nil {
				return nil, err
			}
			out = append(out, f)
		}
	}
	return dataReply(http.StatusOK, out)
}
