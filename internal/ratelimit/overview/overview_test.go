package overview

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// wire joins the nodes of a test: a call is a call, unless the node is to be away.
type wire struct {
	nodes map[cluster.ID]*Overview
	fails map[cluster.ID]error
	hangs map[cluster.ID]bool
	dead  []cluster.Dead
	old   []byte // what everybody answers
}

type place struct {
	wire *wire
	id   cluster.ID
}

func (p place) ID() cluster.ID { return p.id }

func (p place) View() *cluster.View {
	v := &cluster.View{Visible: 1, Alive: len(p.wire.nodes), Skew: 3 * time.Millisecond, Witness: true, Dead: p.wire.dead}
	for id := range cluster.ID(10) {
		if p.wire.nodes[id] != nil && id != p.id {
			standing := cluster.Visible
			if p.wire.fails[id] != nil {
				standing = cluster.Split
			}
			v.Peers = append(v.Peers, cluster.Peer{ID: id, Name: fmt.Sprint("node ", id), Standing: standing, Heard: 20 * time.Millisecond, Latency: 250 * time.Microsecond, Version: "2"})
		}
	}
	return v
}

func (p place) Call(ctx context.Context, to cluster.ID, _ cluster.Topic, request []byte) ([]byte, error) {
	if err := p.wire.fails[to]; err != nil {
		return nil, err
	}
	if p.wire.hangs[to] {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if p.wire.old != nil {
		return p.wire.old, nil
	}
	return p.wire.nodes[to].Handler().Answer(ctx, p.id, request)
}

var tenant = [16]byte{7}

const bucket = ratelimit.ActivityCreate

type node struct {
	*Overview
	hasher ratelimit.Hasher
	store  *store
	log    *bytes.Buffer
}

// store counts in memory and says that it is another: one whose count is kept elsewhere, and can't be asked while
// there is an error.
type store struct {
	*local.Store
	backend ratelimit.Backend
	nodes   int
	err     error
}

func (s *store) Backend(ratelimit.Bucket) string { return string(s.backend) }

func (s *store) States(now ratelimit.Instant) []ratelimit.StoreState {
	states := s.Store.States(now)
	states[0].Nodes = s.nodes
	return states
}

func (s *store) Peek(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	if s.err != nil {
		return ratelimit.Usage{}, s.err
	}
	return s.Store.Peek(ctx, now, it)
}

func (s *store) Reset(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	return errors.Join(s.Store.Reset(ctx, now, it), s.err)
}

func newNodes(t *testing.T, configs ...string) ([]node, *wire) {
	t.Helper()
	w := &wire{nodes: map[cluster.ID]*Overview{}, fails: map[cluster.ID]error{}, hangs: map[cluster.ID]bool{}}
	h, err := ratelimit.NewHasher([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	clock := ratelimit.NewClock()
	var nodes []node
	for i, text := range configs {
		op, err := ratelimit.ParseOperator([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		memory, err := local.New(local.Config{MaxKeys: 10_000})
		if err != nil {
			t.Fatal(err)
		}
		store := &store{Store: memory, backend: ratelimit.BackendLocal}
		l, err := ratelimit.New(ratelimit.Config{Store: store, Clock: clock, Operator: op})
		if err != nil {
			t.Fatal(err)
		}
		id := cluster.ID(i + 1)
		log := &bytes.Buffer{}
		o := New(Config{Logger: slog.New(slog.NewTextHandler(log, nil)), Limiter: l, Login: ratelimit.NewLogin(l, h), Name: fmt.Sprint("node ", id), Version: "1", Network: place{w, id},
			Policy: func(b Budget) *ratelimit.Policy { return l.Policy(b.Bucket, nil, nil) },
			Connections: func() Connections {
				return Connections{Total: 10, Addresses: 4, MaxTotal: 100, Refused: map[string]uint64{"global_limit_exceeded": 1}}
			}})
		w.nodes[id] = o
		nodes = append(nodes, node{o, h, store, log})
	}
	return nodes, w
}

// spend asks so many times for a subject; named tells whether the caller knows it.
func (n node) spend(t *testing.T, subject string, times int, named bool) Budget {
	t.Helper()
	b := Budget{Bucket: bucket, Key: n.hasher.Account(bucket, subject), Name: ratelimit.Name{Tenant: tenant, Text: subject}}
	for range times {
		d := n.Limiter.Check(t.Context(), n.Limiter.Now(), ratelimit.Item{Key: b.Key, Policy: n.Policy(b)})
		if d.Unnamed && named {
			n.Limiter.Name(bucket, b.Key, b.Name)
		}
	}
	return b
}

const two = `{"activity_create": {"limit": 2, "scale_ms": 86400000}}`

func TestPictureOfAllNodes(t *testing.T) {
	t.Parallel()
	nodes, w := newNodes(t, two, two, `{"activity_create": {"limit": 3, "scale_ms": 86400000}}`)
	nodes[0].spend(t, "a", 12, false) // 10 refused, by a node that does not know the name
	nodes[1].spend(t, "a", 7, true)   // 5
	nodes[2].spend(t, "b", 7, true)   // 4
	at := slices.Index(ratelimit.Buckets(), bucket)
	for _, asked := range nodes {
		p := asked.Picture(t.Context())
		b := p.Buckets[at]
		if len(p.Buckets) != len(ratelimit.Buckets()) || b.Total.Refused != 19 || b.Total.Allowed != 7 {
			t.Errorf("%s: %d buckets, %+v", asked.Name, len(p.Buckets), b.Total)
		}
		if len(b.Top) != 2 || b.Top[0].Text != "a" || b.Top[0].Count != 15 || b.Top[0].Tenant != tenant || b.Top[1].Text != "b" || b.Top[1].Count != 4 {
			t.Errorf("%s: most refused %+v", asked.Name, b.Top)
		}
		if len(p.Recent) != 3 || p.Connections.Total != 30 || p.Connections.MaxTotal != 100 || p.Connections.Refused["global_limit_exceeded"] != 3 {
			t.Errorf("%s: recent %+v, connections %+v", asked.Name, p.Recent, p.Connections)
		}
		if len(p.Nodes) != 3 || p.Nodes[0].Answer.Name != asked.Name || p.Nodes[0].Answer.Stores[0].Keys != 1 || p.Nodes[1].Answer.SkewMs != 3 {
			t.Errorf("%s: nodes %+v", asked.Name, p.Nodes)
		}
	}
	if d := nodes[0].Picture(t.Context()).Differ; len(d) != 1 || !slices.Equal(d[cluster.ID(3).String()], []string{"activity_create"}) {
		t.Errorf("configurations differ: %v", d)
	}

	// One is away: it is said, and the rest stands.
	for _, err := range []error{cluster.ErrUnreachable, context.DeadlineExceeded, fmt.Errorf("%w: nobody answers on topic 118", cluster.ErrRefused)} {
		w.fails[2] = err
		p := nodes[0].Picture(t.Context())
		if p.Nodes[1].Err == nil || p.Nodes[1].Peer.Standing != cluster.Split || p.Buckets[at].Total.Refused != 14 {
			t.Errorf("%v: %+v", err, p.Nodes[1])
		}
	}
}

func TestUsageOfAllNodes(t *testing.T) {
	t.Parallel()
	nodes, w := newNodes(t, two, two)
	b := nodes[0].spend(t, "a", 2, true)
	nodes[1].spend(t, "a", 1, true)
	all := nodes[1].Usage(t.Context(), b)
	if len(all) != 2 || all[0].Answer.Used != 1 || all[1].Answer.Used != 2 || *all[1].Answer.Own != 2 || all[1].Answer.Limit != 2 {
		t.Errorf("%+v", all)
	}
	if used, told := Total(all); used != 3 || told != 2 {
		t.Errorf("%d used, as %d nodes told", used, told)
	}
	if found, ok := nodes[1].Find(t.Context(), bucket, "a"); !ok || found.Key != b.Key || found.Name != b.Name {
		t.Errorf("found %+v", found)
	}
	nodes[0].spend(t, "refused elsewhere", 5, true)
	if found, ok := nodes[1].Find(t.Context(), bucket, "refused elsewhere"); !ok || found.Name.Tenant != tenant {
		t.Errorf("found %+v", found)
	}

	w.fails[1] = cluster.ErrUnreachable
	if all := nodes[1].Reset(t.Context(), b); all[0].Err != nil || all[1].Err == nil {
		t.Errorf("a reset without the other: %+v", all)
	}
	delete(w.fails, 1)
	if all := nodes[1].Usage(t.Context(), b); all[0].Answer.Used != 0 || all[1].Answer.Used != 2 {
		t.Errorf("after it: %+v", all)
	}
	for range 2 {
		if all := nodes[1].Reset(t.Context(), b); all[0].Err != nil || all[1].Err != nil {
			t.Errorf("a reset: %+v", all)
		}
	}
	if used, told := Total(nodes[0].Usage(t.Context(), b)); used != 0 || told != 2 {
		t.Errorf("after it %d are used, as %d nodes told", used, told)
	}

	// A node of an earlier version does not tell the moment.
	nodes[0].spend(t, "a", 2, true)
	request, err := json.Marshal(b.question(opReset))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := nodes[0].Handler().Answer(t.Context(), 2, request); err != nil || nodes[0].Usage(t.Context(), b)[0].Answer.Used != 0 {
		t.Errorf("asked without a moment: %v", err)
	}
}

// TestNodesThatDoNotTell: whoever hangs, died or fails is in every answer, with words for people, and the cause in the log.
func TestNodesThatDoNotTell(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		nodes, w := newNodes(t, two, two, two, two)
		b := nodes[0].spend(t, "a", 2, true)
		w.hangs[2], w.fails[3], w.fails[4] = true, cluster.ErrUnreachable, fmt.Errorf("%w: dial tcp 10.1.2.3:9: broken pipe", cluster.ErrRefused)
		w.dead = []cluster.Dead{{ID: 9, Name: "node 9", Version: "1", Silent: time.Minute}}
		const silent = "is dead or hangs (silent since 23:59:00 UTC)" // a bubble's clock begins at midnight
		want := []string{"<nil>", "did not answer within ", "can't be reached from the node that was asked",
			"answered with an error, which the log of the node that was asked has", "is dead or hangs (silent since "}
		check := func(what string, got []error) {
			t.Helper()
			if len(got) != len(want) {
				t.Fatalf("%s: %v", what, got)
			}
			for i, err := range got {
				if !strings.HasPrefix(fmt.Sprint(err), want[i]) {
					t.Errorf("%s: node %d: %v, want %q", what, i, err, want[i])
				}
			}
		}
		p := nodes[0].Picture(t.Context())
		check("picture", errs(p.Nodes))
		if last := p.Nodes[4]; last.Name != "node 9" || last.ID != cluster.ID(9).String() || last.Peer != nil || last.Dead == nil || last.Err.Error() != silent {
			t.Errorf("the dead: %+v", last)
		}
		use := nodes[0].Usage(t.Context(), b)
		check("usage", errs(use))
		if used, told := Total(use); used != 2 || told != 1 {
			t.Errorf("%d used, as %d nodes told", used, told)
		}
		reset := nodes[0].Reset(t.Context(), b)
		check("reset", errs(reset))
		if nodes[0].Kept(bucket, reset) {
			t.Error("a count is kept that is nobody's")
		}
		_, demand := nodes[0].Demand(t.Context(), ofTenant)
		check("demand", errs(demand))
		if log := nodes[0].log.String(); !strings.Contains(log, "broken pipe") || !strings.Contains(log, "peer=0000000000000004") {
			t.Errorf("the log: %s", log)
		}
	})
}

func errs[T any](all []From[T]) []error {
	var out []error
	for _, f := range all {
		out = append(out, f.Err)
	}
	return out
}

// TestCountThatCannotBeAsked: a count that is kept elsewhere and can't be asked for is unknown, not nothing; and a reset
// of what the nodes hold themselves is one, whatever becomes of the rest.
func TestCountThatCannotBeAsked(t *testing.T) {
	t.Parallel()
	chain := errors.New("ratelimit/redis: look: dial tcp 127.0.0.1:6379: connect: connection refused")
	for name, tt := range map[string]struct {
		backend ratelimit.Backend
		away    []int // nodes from which it can't be asked
		silent  bool  // the last does not answer
		unknown string
		kept    bool
	}{
		"Redis, from nowhere":              {ratelimit.BackendRedis, []int{0, 1, 2}, false, "does not know: it can't ask Redis, and goes by its share of the limit", true},
		"Redis, from one node of three":    {ratelimit.BackendRedis, []int{0}, false, "does not know: it can't ask Redis, and goes by its share of the limit", false},
		"Redis, from those that answer":    {ratelimit.BackendRedis, []int{0, 1}, true, "does not know: it can't ask Redis, and goes by its share of the limit", true},
		"the owner does not answer at all": {ratelimit.BackendOwner, []int{0, 1}, true, "does not know: it can't ask the node that counts this, and goes by its share of the limit", false},
		"the owner, from one node":         {ratelimit.BackendOwner, []int{1}, false, "does not know: it can't ask the node that counts this, and goes by its share of the limit", false},
		"others of a cluster":              {ratelimit.BackendCluster, []int{0, 1}, true, "could not find out, as its log says", false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			nodes, w := newNodes(t, two, two, two)
			for _, n := range nodes {
				n.store.backend = tt.backend
			}
			b := nodes[0].spend(t, "a", 2, true)
			nodes[1].spend(t, "a", 1, true)
			for _, i := range tt.away {
				nodes[i].store.err = chain
			}
			if tt.silent {
				w.fails[3] = cluster.ErrUnreachable
			}
			use := nodes[0].Usage(t.Context(), b)
			for i, f := range use {
				away := slices.Contains(tt.away, i)
				if silent := tt.silent && i == 2; away != (fmt.Sprint(f.Err) == tt.unknown) || !away && !silent && f.Err != nil {
					t.Errorf("node %d: %v", i, f.Err)
				}
				if away && (f.Answer.Own == nil || *f.Answer.Own != uint32(2-i)) {
					t.Errorf("node %d has counted %v itself", i, f.Answer.Own)
				}
			}
			if _, told := Total(use); told != 3-len(tt.away)-map[bool]int{true: 1}[tt.silent] {
				t.Errorf("%d nodes told", told)
			}
			reset := nodes[0].Reset(t.Context(), b)
			for i, f := range reset {
				if (f.Err != nil) != (tt.silent && i == 2) {
					t.Errorf("reset at node %d: %v", i, f.Err)
				}
			}
			if got := nodes[0].Kept(bucket, reset); got != tt.kept {
				t.Errorf("the count is kept: %t", got)
			}
			for _, i := range tt.away {
				if log := nodes[i].log.String(); strings.Count(log, "connection refused") != 2 {
					t.Errorf("the log of node %d: %s", i, log)
				}
				nodes[i].store.err = nil
			}
			for i, f := range nodes[0].Usage(t.Context(), b)[:2] {
				if f.Answer.Used != 0 {
					t.Errorf("node %d has kept %d", i, f.Answer.Used)
				}
			}
		})
	}
}

// TestWordsOfOlderNodes: what a node of an older version says of its trouble is for its log.
func TestWordsOfOlderNodes(t *testing.T) {
	t.Parallel()
	nodes, w := newNodes(t, two, two)
	w.old = []byte(`{"limited":true,"backend":"redis","limit":2,"quota":2,"used":0,"error":"ratelimit/redis: dial tcp: refused"}`)
	b := nodes[0].spend(t, "a", 1, true)
	all := nodes[0].Usage(t.Context(), b)
	if err := all[1].Err; err == nil || strings.Contains(err.Error(), "dial") {
		t.Errorf("%v", err)
	}
	w.old = []byte(`{}`)
	if all := nodes[0].Reset(t.Context(), b); all[1].Err != nil || all[1].Answer.Away {
		t.Errorf("%+v", all[1])
	}
}

func TestNodesElsewhere(t *testing.T) {
	t.Parallel()
	nodes, w := newNodes(t, two, two)
	nodes[0].store.nodes = 5
	if p := nodes[0].Picture(t.Context()); p.Elsewhere != 3 {
		t.Errorf("%d nodes elsewhere", p.Elsewhere)
	}
	w.dead = []cluster.Dead{{ID: 9}} // Redis may not have missed it yet
	if p := nodes[0].Picture(t.Context()); p.Elsewhere != 2 {
		t.Errorf("%d nodes elsewhere", p.Elsewhere)
	}
	if p := nodes[1].Picture(t.Context()); p.Elsewhere != 0 { // nobody knows of any
		t.Errorf("%d nodes elsewhere", p.Elsewhere)
	}
}

// TestNoNegativeZero: a clock that is behind by less than is shown is not behind.
func TestNoNegativeZero(t *testing.T) {
	t.Parallel()
	for _, d := range []time.Duration{0, -1, -4 * time.Microsecond} {
		if text := fmt.Sprintf("%.1f", milliseconds(d)); text != "0.0" {
			t.Errorf("%s: %s", d, text)
		}
	}
}

// ofTenant asks for the demand under the tenant's limits.
var ofTenant = Budget{Bucket: bucket, Name: ratelimit.Name{Tenant: tenant}}

func TestDemandOfAllNodes(t *testing.T) {
	t.Parallel()
	nodes, w := newNodes(t, two, two)
	nodes[0].spend(t, "a", 30, true)
	nodes[1].spend(t, "a", 12, true)
	nodes[1].spend(t, "b", 5, true)
	demand, from := nodes[0].Demand(t.Context(), ofTenant)
	if len(demand) != 2 || demand[0].Total() != 42 || demand[0].Name.Text != "a" || demand[1].Total() != 5 || len(from) != 2 {
		t.Errorf("%d subjects: %v", len(demand), demand)
	}
	if other, _ := nodes[0].Demand(t.Context(), Budget{Bucket: bucket, Name: ratelimit.Name{Tenant: [16]byte{8}}}); len(other) != 0 {
		t.Error("another tenant's demand is told")
	}
	// Of all tenants, and of one key: also of a subject that the node which was asked has never seen, by the name that one of them knows.
	nodes[0].spend(t, "nobody's", 20, false)
	nodes[1].spend(t, "nobody's", 1, true)
	all, _ := nodes[0].Demand(t.Context(), Budget{Bucket: bucket})
	if len(all) != 3 || all[0].Total() != 42 || all[1].Total() != 21 || all[1].Name != (ratelimit.Name{Tenant: tenant, Text: "nobody's"}) || all[2].Total() != 5 {
		t.Errorf("of all: %d subjects: %v", len(all), all)
	}
	for subject, total := range map[string]uint64{"a": 42, "b": 5, "c": 0} {
		of := Budget{Bucket: bucket, Key: nodes[0].hasher.Account(bucket, subject)}
		if one, _ := nodes[0].Demand(t.Context(), of); total == 0 && len(one) != 0 || total > 0 && (len(one) != 1 || one[0].Total() != total || one[0].Name.Text != subject) {
			t.Errorf("of %s: %v", subject, one)
		}
	}
	w.fails[2] = cluster.ErrUnreachable
	if demand, from := nodes[0].Demand(t.Context(), ofTenant); len(demand) != 1 || from[1].Err == nil {
		t.Errorf("without the other: %v, %+v", demand, from)
	}
}

func TestHoursAreJoined(t *testing.T) {
	t.Parallel()
	units := func(at int, n uint32) []uint32 {
		u := make([]uint32, ratelimit.DemandSeconds)
		u[at] = n
		return u
	}
	for _, tt := range []struct{ first, second int64 }{{600, 660}, {660, 600}} {
		sum := ratelimit.Demand{Start: tt.first, Units: units(int(700-tt.first), 3), Since: 620, Sampled: 1}
		add(&sum, ratelimit.Demand{Start: tt.second, Units: units(int(700-tt.second), 4), Since: 610, Sampled: 8})
		if sum.Start != 660 || sum.Units[40] != 7 || sum.Total() != 7 || sum.Since != 610 || sum.Sampled != 8 {
			t.Errorf("%v: start %d, %d at 700, %d in all", tt, sum.Start, sum.Units[40], sum.Total())
		}
	}
}

// TestAnswersFit holds the greatest answers against what a call may carry.
func TestAnswersFit(t *testing.T) {
	t.Parallel()
	name := strings.Repeat("x", 256)
	s := State{Buckets: map[string]Bucket{}}
	for _, b := range ratelimit.Buckets() {
		out := Bucket{}
		for range topOfNode {
			out.Top = append(out.Top, heavy{subject{Subject: name, Tenant: tenant[:]}, math.MaxUint64})
		}
		s.Buckets[b.String()] = out
	}
	for range recentShown {
		s.Recent = append(s.Recent, refusal{subject: subject{Subject: name, Tenant: tenant[:]}})
	}
	d := demands{}
	for range demandSubjects {
		d.Subjects = append(d.Subjects, demand{subject: subject{Subject: name, Tenant: tenant[:]},
			Units: pack(slices.Repeat([]uint32{1<<21 - 1}, ratelimit.DemandSeconds))}) // two million a second
	}
	for _, answer := range []any{s, d} {
		if b, err := json.Marshal(answer); err != nil || len(b) > cluster.MaxMessage {
			t.Errorf("%T: %d bytes, %v", answer, len(b), err)
		}
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add(pack(make([]uint32, ratelimit.DemandSeconds)))
	f.Add([]byte{0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		units, err := unpack(b)
		if err != nil {
			return
		}
		if again, err := unpack(pack(units)); err != nil || !slices.Equal(again, units) {
			t.Errorf("%v, %v", again, err)
		}
	})
}

func TestQuestionsOfStrangers(t *testing.T) {
	t.Parallel()
	nodes, _ := newNodes(t, two)
	for _, q := range []string{"", "{}", `{"op":"busy","bucket":"nothing"}`, `{"op":"state"`, `{"op":"usage","bucket":"nothing"}`, `{"op":"what","bucket":"upload"}`,
		`{"op":"reset","bucket":"upload"}`, `{"op":"usage","bucket":"upload","key":"00000000000000010000000000000000"}`} {
		if _, err := nodes[0].Handler().Answer(t.Context(), 1, []byte(q)); err == nil {
			t.Errorf("%q has an answer", q)
		}
	}
	if _, err := nodes[0].Handler().Answer(t.Context(), 1, []byte(`{"op":"state","newer":1}`)); err != nil {
		t.Errorf("a question of a newer version: %v", err)
	}
}
