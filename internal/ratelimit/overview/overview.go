package overview

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// Topic is the package's in a node's connections.
const Topic cluster.Topic = 'v'

// Network is this node's place in the cluster, as *cluster.Node.
type Network interface {
	ID() cluster.ID
	View() *cluster.View
	Call(ctx context.Context, to cluster.ID, t cluster.Topic, request []byte) ([]byte, error)
}

// patience is how long another node is waited for.
const patience = time.Second

const (
	// topOfNode is how many of the most refused a node tells of each bucket; of all of
	// them together the result has topShown.
	topOfNode, topShown = 50, 20
	recentShown         = 50
	// demandSubjects is of how many subjects a node tells the demand; an hour of one has
	// at most 18 KiB and mostly a quarter of that.
	demandSubjects = 32
)

// Config is what an Overview is made of. Limiter, Policy, Name and Version are required.
type Config struct {
	Limiter *ratelimit.Limiter
	// Login lets a reset reach the failures that it remembers itself; optional.
	Login *ratelimit.Login
	// Policy resolves what applies to a budget on this node, by the code that enforces; nil: no limit.
	Policy func(Budget) *ratelimit.Policy
	// Network connects the nodes; its handler for Topic must be Overview.Handler. nil: alone.
	Network Network
	// Name and Version are this node's, for people.
	Name, Version string
	// Connections tells of the connections to this node; nil: they are not counted.
	Connections func() Connections
	// Logger receives the causes, of which operators are told no more than they can use; nil: slog.Default.
	Logger *slog.Logger
}

// Overview asks and answers. Safe for concurrent use.
type Overview struct {
	Config
	started time.Time
}

// New makes an Overview. It starts nothing.
func New(c Config) *Overview {
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	return &Overview{c, time.Now()}
}

// Budget names one subject's budget in one bucket.
type Budget struct {
	Bucket ratelimit.Bucket
	Key    ratelimit.Key
	Name   ratelimit.Name
	// Channel has its own rate in the bucket channel_outbound.
	Channel [16]byte
}

// The questions. A node answers one that it does not know with an error.
type question struct {
	Op     string         `json:"op"`
	Bucket string         `json:"bucket,omitempty"`
	Key    *ratelimit.Key `json:"key,omitempty"`
	// Of a budget.
	Tenant  []byte `json:"tenant,omitempty"`
	Channel []byte `json:"channel,omitempty"`
	// At is the moment of a reset: the same for all nodes, since it is the reset's version.
	At ratelimit.Instant `json:"at,omitempty"`
}

const (
	opState  = "state"
	opUsage  = "usage"
	opReset  = "reset"
	opDemand = "demand" // of a tenant
	opBusy   = "busy"   // of all, or of one key; nodes of an earlier version do not know it
)

func (q question) budget() (Budget, error) {
	b, ok := ratelimit.ParseBucket(q.Bucket)
	if !ok {
		return Budget{}, fmt.Errorf("overview: no bucket %q", q.Bucket)
	}
	out := Budget{Bucket: b}
	if q.Key != nil {
		out.Key = *q.Key
	}
	copy(out.Name.Tenant[:], q.Tenant)
	copy(out.Channel[:], q.Channel)
	return out, nil
}

func (b Budget) question(op string) question {
	return question{Op: op, Bucket: b.Bucket.String(), Key: &b.Key, Tenant: b.Name.Tenant[:], Channel: b.Channel[:]}
}

// Handler is what the node's connections call for Topic.
func (o *Overview) Handler() cluster.Handler {
	return cluster.Handler{Answer: func(ctx context.Context, _ cluster.ID, request []byte) ([]byte, error) {
		var q question
		if err := json.Unmarshal(request, &q); err != nil {
			return nil, fmt.Errorf("overview: a question that can't be read: %w", err)
		}
		answer, err := o.answer(ctx, q)
		if err != nil {
			return nil, err
		}
		return json.Marshal(answer)
	}}
}

func (o *Overview) answer(ctx context.Context, q question) (any, error) {
	if q.Op == opState {
		return o.state(), nil
	}
	b, err := q.budget()
	if err != nil {
		return nil, err
	}
	if q.Op != opDemand && q.Op != opBusy && !b.Key.Valid() {
		return nil, fmt.Errorf("overview: a question of %q without a key", q.Op)
	}
	switch q.Op {
	case opUsage:
		return o.usage(ctx, b), nil
	case opReset:
		return o.reset(ctx, b, q.At), nil
	case opDemand, opBusy:
		return o.demand(b), nil
	}
	return nil, fmt.Errorf("overview: no question %q", q.Op)
}

// From is one node's answer.
type From[T any] struct {
	// ID and Name are the node's; Peer is what the asked node sees of it, nil for itself and
	// for the dead.
	ID, Name string
	Peer     *cluster.Peer
	// Dead is set of a node that was not asked since it is dead, or hangs.
	Dead   *cluster.Dead
	Answer T
	// Err says why there is no Answer, or none that is of use. Its text is for operators, and
	// ends a sentence that begins with the node; the cause is in the log.
	Err error
}

// ask puts a question to this node and all others at the same time. This node comes first,
// the others by their ids, and then the dead.
func ask[T any](ctx context.Context, o *Overview, q question, own func() (T, error)) []From[T] {
	all := make([]From[T], 1)
	all[0].Name = o.Name
	var wg sync.WaitGroup
	if o.Network != nil {
		request, err := json.Marshal(q)
		view := o.Network.View()
		peers := view.Peers
		all = append(all, make([]From[T], len(peers))...)
		for _, d := range view.Dead {
			all = append(all, From[T]{ID: d.ID.String(), Name: d.Name, Dead: &d, Err: fmt.Errorf("is dead or hangs (silent since %s UTC)",
				time.Now().Add(-d.Silent).UTC().Format(time.TimeOnly))})
		}
		all[0].ID = o.Network.ID().String()
		ctx, cancel := context.WithTimeout(ctx, patience)
		defer cancel()
		for i := range peers {
			p, f := &peers[i], &all[i+1]
			f.ID, f.Name, f.Peer, f.Err = p.ID.String(), p.Name, p, err
			if err == nil {
				wg.Go(func() { f.Err = o.call(ctx, p, request, &f.Answer) })
			}
		}
	}
	all[0].Answer, all[0].Err = own()
	wg.Wait()
	return all
}

func (o *Overview) call(ctx context.Context, to *cluster.Peer, request []byte, into any) error {
	answer, err := o.Network.Call(ctx, to.ID, Topic, request)
	if err == nil {
		err = json.Unmarshal(answer, into)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, context.DeadlineExceeded):
		return fmt.Errorf("did not answer within %d s", patience/time.Second)
	case errors.Is(err, cluster.ErrUnreachable):
		return errors.New("can't be reached from the node that was asked")
	}
	o.Logger.WarnContext(ctx, "a node does not answer a question about limits", slog.String("peer", to.ID.String()), slog.String("name", to.Name),
		slog.String("version", to.Version), slog.Any("error", err))
	return errors.New("answered with an error, which the log of the node that was asked has")
}

// Elsewhere is how many nodes count at the same server as this one and are no cluster with it, so that nobody can ask
// them; listed is how many nodes an answer lists.
func (o *Overview) Elsewhere(listed int) int {
	most := 0
	for _, s := range o.Limiter.States(o.Limiter.Now()) {
		most = max(most, s.Nodes)
	}
	return max(most-listed, 0)
}

// Forgot is what a node tells that has forgotten what it held of a budget itself.
type Forgot struct {
	// Away: who counts it for this node and others could not be asked to forget it too.
	Away bool `json:"away,omitempty"`
}

// reset forgets what was spent on a budget until a moment, as far as this node is concerned: whatever else fails,
// a store forgets what it has in memory.
func (o *Overview) reset(ctx context.Context, b Budget, at ratelimit.Instant) Forgot {
	at = cmp.Or(at, o.Limiter.Now()) // a node of an earlier version does not tell
	err := o.Limiter.Reset(ctx, at, b.Bucket, ratelimit.Item{Key: b.Key, Policy: o.Policy(b)})
	if o.Login != nil {
		o.Login.Forget(b.Key)
	}
	if err != nil {
		o.Logger.WarnContext(ctx, "a counter could be reset in part only", slog.String("bucket", b.Bucket.String()), slog.Any("error", err))
	}
	return Forgot{Away: err != nil}
}

// Reset forgets what was spent on a budget on every node; nobody else asks them. Those that do not answer take it in from
// the others before what they have counted counts again, if the budget is counted over several nodes. Repeating it is
// harmless. See [Overview.Kept] for what the answers come to.
func (o *Overview) Reset(ctx context.Context, b Budget) []From[Forgot] {
	q := b.question(opReset)
	q.At = o.Limiter.Now()
	return ask(ctx, o, q, func() (Forgot, error) { return o.reset(ctx, b, q.At), nil })
}

// Kept tells whether the count at Redis outlived a reset, since no node could ask there: what one of them has done is done
// for all. Where nodes keep the counts, one that did not reset has an error of its own.
func (o *Overview) Kept(b ratelimit.Bucket, all []From[Forgot]) bool {
	return o.Limiter.Backend(b) == string(ratelimit.BackendRedis) &&
		!slices.ContainsFunc(all, func(f From[Forgot]) bool { return f.Err == nil && !f.Answer.Away })
}

// Use is how much of a budget is used, as one node sees it.
type Use struct {
	Limited   bool   `json:"limited"`
	Backend   string `json:"backend"`
	Limit     uint32 `json:"limit"`
	ScaleMs   uint32 `json:"scale_ms"`
	Algorithm string `json:"algorithm"`
	Quota     uint32 `json:"quota"`
	Used      uint32 `json:"used"`
	WaitMs    uint32 `json:"wait_ms"`
	// Own is what the node has counted itself; nil: not known apart.
	Own *uint32 `json:"own"`
	// Err is of a node that could not find out: Used and WaitMs say nothing then.
	Err string `json:"error,omitempty"`
}

// unknown ends a sentence about a node that could not find out.
func (u Use) unknown() string {
	switch ratelimit.Backend(u.Backend) {
	case ratelimit.BackendRedis:
		return "does not know: it can't ask Redis, and goes by its share of the limit"
	case ratelimit.BackendOwner:
		return "does not know: it can't ask the node that counts this, and goes by its share of the limit"
	}
	return "could not find out, as its log says"
}

func (o *Overview) usage(ctx context.Context, b Budget) Use {
	u := Use{Backend: o.Limiter.Backend(b.Bucket)}
	p := o.Policy(b)
	if p == nil {
		return u
	}
	u.Limited, u.Limit, u.ScaleMs, u.Algorithm, u.Quota = true, p.Limit(), p.ScaleMs(), p.Algorithm().String(), p.Quota()
	now, it := o.Limiter.Now(), ratelimit.Item{Key: b.Key, Policy: p}
	seen, err := o.Limiter.Peek(ctx, now, it)
	if err != nil {
		o.Logger.WarnContext(ctx, "a budget can't be looked at", slog.String("bucket", b.Bucket.String()), slog.Any("error", err))
		u.Err = u.unknown()
	}
	u.Used, u.WaitMs = seen.Used, seen.WaitMs
	if own, ok := o.Limiter.Own(now, it); ok {
		u.Own = &own
	}
	return u
}

// Usage is how much of a budget is used, on every node.
func (o *Overview) Usage(ctx context.Context, b Budget) []From[Use] {
	all := ask(ctx, o, b.question(opUsage), func() (Use, error) { return o.usage(ctx, b), nil })
	for i := range all {
		if all[i].Err == nil && all[i].Answer.Err != "" {
			all[i].Err = errors.New(all[i].Answer.unknown()) // in our words: a node of an older version tells its own
		}
	}
	return all
}

// Total is the use of a budget over all nodes that told it: where each counts for itself the sum, else what
// the one who sees most sees. Of fewer than all it is a part; of none it says nothing.
func Total(all []From[Use]) (used uint64, told int) {
	for _, f := range all {
		if f.Err != nil {
			continue
		}
		told++
		if f.Answer.Backend == string(ratelimit.BackendLocal) {
			used += uint64(f.Answer.Used)
		} else {
			used = max(used, uint64(f.Answer.Used))
		}
	}
	return used, told
}

// Find is the budget of a subject that some node shows under a text. It is for subjects
// that are shown by less than their key is made of.
func (o *Overview) Find(ctx context.Context, b ratelimit.Bucket, text string) (Budget, bool) {
	if k, n, ok := o.Limiter.Find(b, text); ok {
		return Budget{Bucket: b, Key: k, Name: n}, true
	}
	for _, f := range o.states(ctx) {
		for _, h := range f.Answer.Buckets[b.String()].Top {
			if h.Subject == text {
				return Budget{Bucket: b, Key: h.Key, Name: h.name()}, true
			}
		}
	}
	return Budget{}, false
}

func (o *Overview) states(ctx context.Context) []From[State] {
	return ask(ctx, o, question{Op: opState}, func() (State, error) { return o.state(), nil })
}

// demands are the busiest subjects of a bucket on one node.
type demands struct {
	Subjects []demand `json:"subjects"`
}

type demand struct {
	subject
	Since   int64  `json:"since"`
	Start   int64  `json:"start"`
	Units   []byte `json:"units"` // varints
	Sampled uint64 `json:"sampled"`
}

func (o *Overview) demand(of Budget) demands {
	var kept []ratelimit.Demand
	if now := o.Limiter.Now(); !of.Key.Valid() {
		kept = o.Limiter.Demand(of.Bucket, of.Name.Tenant, now, demandSubjects)
	} else if d, ok := o.Limiter.DemandOf(of.Bucket, of.Key, now); ok {
		kept = append(kept, d)
	}
	var out demands
	for _, d := range kept {
		out.Subjects = append(out.Subjects, demand{subjectOf(d.Key, d.Name), d.Since, d.Start, pack(d.Units), d.Sampled})
	}
	return out
}

// Demand is what the busiest subjects of a bucket asked of all nodes together in the last hour, the busiest first: the one
// that has the key, or without a key those under the tenant's limits, or without a tenant all. The errors are of nodes that
// are missing in it. Of many subjects each node tells its 32 busiest, of the one whose key is given whatever it knows.
func (o *Overview) Demand(ctx context.Context, of Budget) ([]ratelimit.Demand, []From[struct{}]) {
	op := opDemand
	if of.Key.Valid() || of.Name.Tenant == ([16]byte{}) {
		op = opBusy
	}
	nodes := []From[struct{}]{}
	sums := map[ratelimit.Key]*ratelimit.Demand{}
	for _, f := range ask(ctx, o, of.question(op), func() (demands, error) { return o.demand(of), nil }) {
		for _, d := range f.Answer.Subjects {
			units, err := unpack(d.Units)
			if err != nil {
				f.Err = fmt.Errorf("told %w", err)
				break
			}
			sum := sums[d.Key]
			if sum == nil {
				sums[d.Key] = &ratelimit.Demand{Key: d.Key, Name: d.name(), Since: d.Since, Start: d.Start, Units: units, Sampled: d.Sampled}
				continue
			}
			shown := better(Subject{d.Key, sum.Name.Text, sum.Name.Tenant}, d.subject)
			sum.Name = ratelimit.Name{Tenant: shown.Tenant, Text: shown.Text}
			add(sum, ratelimit.Demand{Since: d.Since, Start: d.Start, Units: units, Sampled: d.Sampled})
		}
		nodes = append(nodes, From[struct{}]{ID: f.ID, Name: f.Name, Peer: f.Peer, Dead: f.Dead, Err: f.Err})
	}
	out := make([]ratelimit.Demand, 0, len(sums))
	for _, d := range sums {
		out = append(out, *d)
	}
	slices.SortFunc(out, func(a, b ratelimit.Demand) int {
		return cmp.Or(cmp.Compare(b.Total(), a.Total()), cmp.Compare(a.Key.Hi, b.Key.Hi))
	})
	return out, nodes
}
