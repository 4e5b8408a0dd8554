package overview

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math"
	"slices"
	"time"

	"converger/internal/ratelimit"
)

// Connections are those to one node, or to all.
type Connections struct {
	// Total are open now, from Addresses different client addresses.
	Total     int `json:"total"`
	Addresses int `json:"addresses"`
	// MaxTotal and MaxPerAddress are the bounds, of each node; 0: none.
	MaxTotal      int `json:"max_total"`
	MaxPerAddress int `json:"max_per_address"`
	// Refused counts since the start, by the code of the refusal.
	Refused map[string]uint64 `json:"refused"`
}

// subject is whom something is about, as it is shown and found again.
type subject struct {
	Key     ratelimit.Key `json:"key"`
	Subject string        `json:"subject"`
	Tenant  []byte        `json:"tenant,omitempty"`
}

// KeyPrefix begins the text of a subject whose name nobody knows.
const KeyPrefix = "key:"

func subjectOf(k ratelimit.Key, n ratelimit.Name) subject {
	s := subject{Key: k, Subject: n.Text}
	if n.Text == "" {
		s.Subject = KeyPrefix + k.String()
	}
	if n.Tenant != ([16]byte{}) {
		s.Tenant = n.Tenant[:]
	}
	return s
}

func (s subject) known() bool { return s.Subject != KeyPrefix+s.Key.String() }

func (s subject) name() ratelimit.Name {
	n := ratelimit.Name{Text: s.Subject}
	copy(n.Tenant[:], s.Tenant)
	return n
}

type heavy struct {
	subject
	Count uint64 `json:"count"`
}

type refusal struct {
	subject
	Bucket       string `json:"bucket"`
	First        int64  `json:"first"` // Unix ms
	Last         int64  `json:"last"`
	Count        uint64 `json:"count"`
	Limit        uint32 `json:"limit"`
	ScaleMs      uint32 `json:"scale_ms"`
	RetryAfterMs uint32 `json:"retry_after_ms"`
	Counted      bool   `json:"counted"`
}

// Decisions are so many, or so many a second.
type Decisions[T uint64 | float64] struct {
	Allowed T `json:"allowed"`
	Refused T `json:"refused"`
	Counted T `json:"counted"` // would have been refused, but the bucket is in count mode
}

func (d *Decisions[T]) add(o Decisions[T]) {
	d.Allowed += o.Allowed
	d.Refused += o.Refused
	d.Counted += o.Counted
}

// Limit is what is enforced of a bucket for those without a limit of their own.
type Limit struct {
	Limit     int64  `json:"limit"`
	ScaleMs   int64  `json:"scale_ms"`
	Algorithm string `json:"algorithm"`
	Burst     int64  `json:"burst,omitempty"`
	Mode      string `json:"mode"`    // enforce, count
	Backend   string `json:"backend"` // local, cluster, owner, redis
	Source    string `json:"source"`  // operator, built_in
}

// Bucket is what one node has seen of a bucket. Config is nil when there is no limit.
type Bucket struct {
	Config *Limit             `json:"config"`
	Total  Decisions[uint64]  `json:"total"`
	Rate   Decisions[float64] `json:"rate"`
	Since  int64              `json:"since"` // Unix ms; of Top
	Top    []heavy            `json:"top"`
}

// State is what one node tells of itself.
type State struct {
	Name        string                 `json:"name"`
	Version     string                 `json:"version"`
	StartedAt   time.Time              `json:"started_at"`
	Enabled     bool                   `json:"enabled"`
	Stores      []ratelimit.StoreState `json:"stores"`
	SkewMs      float64                `json:"skew_ms"`
	Witness     bool                   `json:"witness"`
	Alive       int                    `json:"alive"`
	Visible     int                    `json:"visible"`
	Peers       []Peer                 `json:"peers"`
	Connections *Connections           `json:"connections"`
	Buckets     map[string]Bucket      `json:"buckets"`
	Recent      []refusal              `json:"recent"`
}

// Peer is what a node makes of another.
type Peer struct {
	ID        string  `json:"id"`
	Name      string  `json:"name"`
	Standing  string  `json:"standing"` // joining, visible, split
	Connected bool    `json:"connected"`
	HeardMs   int64   `json:"heard_ms"` // since its last message; -1: never heard
	DelayMs   float64 `json:"delay_ms"` // of messages, one way
	SkewMs    float64 `json:"skew_ms"`
	Queued    int     `json:"queued"`
	Dropped   uint64  `json:"dropped"`
	Version   string  `json:"version"`
}

func milliseconds(d time.Duration) float64 { return math.Round(float64(d)/1e4)/100 + 0 } // never -0

func (o *Overview) config(b ratelimit.Bucket) *Limit {
	p := o.Limiter.Policy(b, nil, nil)
	if p == nil {
		return nil
	}
	r := p.Rule()
	l := &Limit{Limit: r.Limit, ScaleMs: r.Scale.Milliseconds(), Algorithm: r.Algorithm.String(), Burst: r.Burst,
		Mode: "enforce", Backend: o.Limiter.Backend(b), Source: "built_in"}
	if p.CountOnly() {
		l.Mode = "count"
	}
	if _, set := o.Limiter.Operator(b); set {
		l.Source = "operator"
	}
	return l
}

func (o *Overview) state() State {
	now := o.Limiter.Now()
	s := State{
		Name: o.Name, Version: o.Version, StartedAt: o.started.UTC(), Enabled: o.Limiter.Enabled(), Alive: 1, Visible: 1,
		Stores: o.Limiter.States(now), Buckets: map[string]Bucket{},
	}
	if o.Connections != nil {
		c := o.Connections()
		s.Connections = &c
	}
	if o.Network != nil {
		v := o.Network.View()
		s.SkewMs, s.Witness, s.Alive, s.Visible = milliseconds(v.Skew), v.Witness, v.Alive, v.Visible
		for _, p := range v.Peers {
			heard := int64(-1)
			if p.Heard >= 0 {
				heard = p.Heard.Milliseconds()
			}
			s.Peers = append(s.Peers, Peer{p.ID.String(), p.Name, p.Standing.String(), p.Connected, heard, milliseconds(p.Latency), milliseconds(p.Skew),
				p.Queued, p.Dropped, p.Version})
		}
	}
	for _, b := range ratelimit.Buckets() {
		seen := o.Limiter.Observe(b, now, topOfNode)
		out := Bucket{
			Config: o.config(b),
			Total:  Decisions[uint64]{seen.Allowed, seen.Refused, seen.Counted},
			Rate:   Decisions[float64]{seen.AllowedRate, seen.RefusedRate, seen.CountedRate},
			Since:  int64(seen.Since) / 1e6, Top: []heavy{},
		}
		for _, h := range seen.Top {
			out.Top = append(out.Top, heavy{subjectOf(h.Key, h.Name), h.Count})
		}
		s.Buckets[b.String()] = out
		for _, r := range seen.Recent {
			s.Recent = append(s.Recent, refusal{subjectOf(r.Key, r.Name), b.String(), int64(r.First) / 1e6, int64(r.Last) / 1e6, r.Count,
				r.Policy.Limit(), r.Policy.ScaleMs(), r.WaitMs, r.Counted})
		}
	}
	slices.SortFunc(s.Recent, func(a, b refusal) int { return cmp.Compare(b.Last, a.Last) })
	s.Recent = s.Recent[:min(len(s.Recent), recentShown)]
	return s
}

// Subject is whom a row is about.
type Subject struct {
	Key    ratelimit.Key
	Text   string
	Tenant [16]byte
}

// Heavy is a subject and how often it was refused, at least.
type Heavy struct {
	Subject
	Count uint64
}

// Refusal is what was lately refused of one subject on one node.
type Refusal struct {
	Subject
	Bucket, Node   string // Node is its id, "" when there is one only
	First, Last    time.Time
	Count          uint64
	Limit, ScaleMs uint32
	RetryAfterMs   uint32
	Counted        bool
}

// BucketPicture is a bucket over all nodes.
type BucketPicture struct {
	Bucket ratelimit.Bucket
	Config *Limit // of the node that was asked
	Total  Decisions[uint64]
	Rate   Decisions[float64]
	// Since is from when on Top counts, on the node that counts the longest.
	Since time.Time
	Top   []Heavy
}

// Picture is the whole cluster's state, as one node could find it out.
type Picture struct {
	At          time.Time
	Enabled     bool
	Buckets     []BucketPicture // every bucket, in the order of the documentation
	Recent      []Refusal       // the last first
	Connections *Connections    // the sum of the nodes; nil: not counted
	Nodes       []From[State]
	// Elsewhere is how many nodes are in none of this: see [Overview.Elsewhere].
	Elsewhere int
	// Differ names, by node, the buckets whose configuration is another than that of the node that was asked.
	Differ map[string][]string
}

// Told is how many nodes the sums are of.
func (p Picture) Told() (n int) {
	for _, f := range p.Nodes {
		if f.Err == nil {
			n++
		}
	}
	return n
}

// Picture asks every node for its state and adds up.
func (o *Overview) Picture(ctx context.Context) Picture {
	p := merge(o.Limiter, o.states(ctx))
	p.Elsewhere = o.Elsewhere(len(p.Nodes))
	return p
}

func merge(l *ratelimit.Limiter, nodes []From[State]) Picture {
	p := Picture{At: l.Now().Time().UTC(), Enabled: l.Enabled(), Nodes: nodes, Differ: map[string][]string{}}
	asked := nodes[0].Answer
	for _, b := range ratelimit.Buckets() {
		out := BucketPicture{Bucket: b, Config: asked.Buckets[b.String()].Config}
		since := asked.Buckets[b.String()].Since
		at := map[ratelimit.Key]int{}
		for i, f := range nodes {
			n, ok := f.Answer.Buckets[b.String()]
			if f.Err != nil || !ok { // not there: a bucket that an older version does not have
				continue
			}
			out.Total.add(n.Total)
			out.Rate.add(n.Rate)
			since = min(since, n.Since)
			for _, h := range n.Top {
				j, known := at[h.Key]
				if !known {
					j = len(out.Top)
					at[h.Key] = j
					out.Top = append(out.Top, Heavy{Subject: h.shown()})
				}
				out.Top[j].Count += h.Count
				out.Top[j].Subject = better(out.Top[j].Subject, h.subject)
			}
			if i > 0 && !same(n.Config, out.Config) {
				p.Differ[f.ID] = append(p.Differ[f.ID], b.String())
			}
		}
		slices.SortFunc(out.Top, func(a, b Heavy) int { return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Text, b.Text)) })
		out.Top = out.Top[:min(topShown, len(out.Top))]
		out.Since = time.UnixMilli(since).UTC()
		p.Buckets = append(p.Buckets, out)
	}
	for _, f := range nodes {
		if f.Err != nil {
			continue
		}
		for _, r := range f.Answer.Recent {
			p.Recent = append(p.Recent, Refusal{r.shown(), r.Bucket, f.ID, time.UnixMilli(r.First).UTC(), time.UnixMilli(r.Last).UTC(),
				r.Count, r.Limit, r.ScaleMs, r.RetryAfterMs, r.Counted})
		}
		if c := f.Answer.Connections; c != nil {
			if p.Connections == nil {
				p.Connections = &Connections{MaxTotal: c.MaxTotal, MaxPerAddress: c.MaxPerAddress, Refused: map[string]uint64{}}
			}
			p.Connections.Total += c.Total
			p.Connections.Addresses += c.Addresses // one that is connected to two nodes counts twice
			for code, n := range c.Refused {
				p.Connections.Refused[code] += n
			}
		}
	}
	slices.SortFunc(p.Recent, func(a, b Refusal) int { return cmp.Or(b.Last.Compare(a.Last), cmp.Compare(a.Text, b.Text)) })
	p.Recent = p.Recent[:min(recentShown, len(p.Recent))]
	return p
}

func (s subject) shown() Subject { return Subject{s.Key, s.Subject, s.name().Tenant} }

// better prefers a name to the text of a key, and what names an account to a digest of what was typed.
func better(have Subject, other subject) Subject {
	unknown := have.Text == KeyPrefix+have.Key.String()
	if other.known() && (unknown || len(have.Text) > len(DigestPrefix) && have.Text[:len(DigestPrefix)] == DigestPrefix) {
		return other.shown()
	}
	return have
}

// DigestPrefix begins the text of an account of which it is not known that it exists.
const DigestPrefix = "account:"

func same(a, b *Limit) bool { return a == b || a != nil && b != nil && *a == *b }

// pack writes seconds as varints: most are 0 or small.
func pack(units []uint32) []byte {
	b := make([]byte, 0, len(units))
	for _, u := range units {
		b = binary.AppendUvarint(b, uint64(u))
	}
	return b
}

// unpack reads what pack writes.
func unpack(b []byte) ([]uint32, error) {
	units := make([]uint32, 0, ratelimit.DemandSeconds)
	for len(b) > 0 {
		u, n := binary.Uvarint(b)
		if n <= 0 || u > ratelimit.MaxLimit || len(units) == ratelimit.DemandSeconds {
			return nil, errors.New("a demand that can't be read")
		}
		units, b = append(units, uint32(u)), b[n:]
	}
	if len(units) != ratelimit.DemandSeconds {
		return nil, errors.New("a demand that is cut short")
	}
	return units, nil
}

// add adds one node's demand to another's. Their hours may begin a minute apart; what sum's does not hold is left out.
func add(sum *ratelimit.Demand, d ratelimit.Demand) {
	if d.Start > sum.Start { // go by the later hour
		*sum, d = ratelimit.Demand{Key: sum.Key, Name: sum.Name, Since: d.Since, Start: d.Start, Units: d.Units, Sampled: d.Sampled}, *sum
	}
	sum.Since, sum.Sampled = min(sum.Since, d.Since), max(sum.Sampled, d.Sampled)
	for i, u := range d.Units {
		if at := d.Start + int64(i) - sum.Start; at >= 0 && at < int64(len(sum.Units)) {
			sum.Units[at] = min(sum.Units[at]+u, ratelimit.MaxLimit)
		}
	}
}
