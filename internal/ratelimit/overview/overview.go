package overview

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	// Connections tells of the connections to this node; nil: they are not limited.
	Connections func() Connections
}

// Overview asks and answers. Safe for concurrent use.
type Overview struct {
	Config
	started time.Time
}

// New makes an Overview. It starts nothing.
func New(c Config) *Overview { return &Overview{c, time.Now()} }

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
	opDemand = "demand"
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
	switch q.Op {
	case opUsage:
		return o.usage(ctx, b), nil
	case opReset:
		return struct{}{}, o.reset(ctx, b, q.At)
	case opDemand:
		return o.demand(b), nil
	}
	return nil, fmt.Errorf("overview: no question %q", q.Op)
}

// From is one node's answer.
type From[T any] struct {
	// ID and Name are the node's; Peer is what the asked node sees of it, nil for itself.
	ID, Name string
	Peer     *cluster.Peer
	Answer   T
	// Err says why there is no Answer.
	Err error
}

// ask puts a question to this node and all others at the same time. This node comes first,
// the others by their ids.
func ask[T any](ctx context.Context, o *Overview, wait time.Duration, q question, own func() (T, error)) []From[T] {
	all := make([]From[T], 1)
	all[0].Name = o.Name
	var wg sync.WaitGroup
	if o.Network != nil {
		request, err := json.Marshal(q)
		peers := o.Network.View().Peers
		all = append(all, make([]From[T], len(peers))...)
		all[0].ID = o.Network.ID().String()
		ctx, cancel := context.WithTimeout(ctx, wait)
		defer cancel()
		for i := range peers {
			p, f := &peers[i], &all[i+1]
			f.ID, f.Name, f.Peer, f.Err = p.ID.String(), p.Name, p, err
			if err == nil {
				wg.Go(func() { f.Err = o.call(ctx, p.ID, request, &f.Answer) })
			}
		}
	}
	all[0].Answer, all[0].Err = own()
	wg.Wait()
	return all
}

func (o *Overview) call(ctx context.Context, to cluster.ID, request []byte, into any) error {
	answer, err := o.Network.Call(ctx, to, Topic, request)
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		return errors.New("did not answer in time")
	case errors.Is(err, cluster.ErrUnreachable):
		return errors.New("can't be reached from the node that was asked")
	case err != nil:
		return err
	}
	return json.Unmarshal(answer, into)
}

// reset forgets what was spent on a budget until a moment, as far as this node is concerned.
func (o *Overview) reset(ctx context.Context, b Budget, at ratelimit.Instant) error {
	at = cmp.Or(at, o.Limiter.Now()) // a node of an earlier version does not tell
	err := o.Limiter.Reset(ctx, at, b.Bucket, ratelimit.Item{Key: b.Key, Policy: o.Policy(b)})
	if o.Login != nil {
		o.Login.Forget(b.Key)
	}
	return err
}

// Reset forgets what was spent on a budget on every node; nobody else asks them. Those that do not answer take it in from
// the others before what they have counted counts again, if the budget is counted over several nodes.
func (o *Overview) Reset(ctx context.Context, b Budget) []From[struct{}] {
	q := b.question(opReset)
	q.At = o.Limiter.Now()
	return ask(ctx, o, patience, q, func() (struct{}, error) { return struct{}{}, o.reset(ctx, b, q.At) })
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
	// Err is of a node that could not find out.
	Err string `json:"error,omitempty"`
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
		u.Err = err.Error()
		return u
	}
	u.Used, u.WaitMs = seen.Used, seen.WaitMs
	if own, ok := o.Limiter.Own(now, it); ok {
		u.Own = &own
	}
	return u
}

// Usage is how much of a budget is used, on every node.
func (o *Overview) Usage(ctx context.Context, b Budget) []From[Use] {
	all := ask(ctx, o, patience, b.question(opUsage), func() (Use, error) { return o.usage(ctx, b), nil })
	for i := range all {
		if all[i].Err == nil && all[i].Answer.Err != "" {
			all[i].Err = errors.New(all[i].Answer.Err)
		}
	}
	return all
}

// Total is the use of a budget over all nodes: where each counts for itself the sum, else what
// the one who sees most sees.
func Total(all []From[Use]) (used uint64) {
	for _, f := range all {
		switch {
		case f.Err != nil:
		case f.Answer.Backend == string(ratelimit.BackendLocal):
			used += uint64(f.Answer.Used)
		default:
			used = max(used, uint64(f.Answer.Used))
		}
	}
	return used
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
	return ask(ctx, o, patience, question{Op: opState}, func() (State, error) { return o.state(), nil })
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

func (o *Overview) demand(b Budget) demands {
	var out demands
	for _, d := range o.Limiter.Demand(b.Bucket, b.Name.Tenant, o.Limiter.Now(), demandSubjects) {
		out.Subjects = append(out.Subjects, demand{subjectOf(d.Key, d.Name), d.Since, d.Start, pack(d.Units), d.Sampled})
	}
	return out
}

// Demand is what the busiest subjects of a bucket under a tenant's limits asked of all nodes together in the last hour,
// the busiest first. The errors are of nodes that are missing in it.
func (o *Overview) Demand(ctx context.Context, b ratelimit.Bucket, tenant [16]byte) ([]ratelimit.Demand, []From[struct{}]) {
	at := Budget{Bucket: b, Name: ratelimit.Name{Tenant: tenant}}
	nodes := []From[struct{}]{}
	sums := map[ratelimit.Key]*ratelimit.Demand{}
	for _, f := range ask(ctx, o, patience, at.question(opDemand), func() (demands, error) { return o.demand(at), nil }) {
		for _, d := range f.Answer.Subjects {
			units, err := unpack(d.Units)
			if err != nil {
				f.Err = err
				break
			}
			sum := sums[d.Key]
			if sum == nil {
				sums[d.Key] = &ratelimit.Demand{Key: d.Key, Name: d.name(), Since: d.Since, Start: d.Start, Units: units, Sampled: d.Sampled}
				continue
			}
			add(sum, ratelimit.Demand{Since: d.Since, Start: d.Start, Units: units, Sampled: d.Sampled})
		}
		nodes = append(nodes, From[struct{}]{ID: f.ID, Name: f.Name, Peer: f.Peer, Err: f.Err})
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
