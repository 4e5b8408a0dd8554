package owner

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
)

// joinGrace is how long after a join it is looked after at most: the others see it
// within a tenth of a second of each other, and what they hand over is there at once.
const joinGrace = 2 * time.Second

// joins is what is going on while keys move to a node that joins. The others see it
// one after the other, and each hands its keys over when it does. Until then the
// newcomer asks on, at the node that owned a key before it, which decides; a node
// that has handed its keys over asks on at the newcomer for those who have not seen
// it yet. So one node decides on a key at any moment, but for those in which a
// question and a copy overtake each other.
type joins struct {
	going atomic.Bool // else a check need not look at the rest

	mu     sync.Mutex
	until  time.Time           // all is over then, whatever was not heard
	elders ring                // this node joins: who was there before
	owing  map[cluster.ID]bool // those of them that have not handed over yet
	handed map[cluster.ID]bool // nodes that join, to which this one has handed over
}

// begin notes that this node joins others.
func (j *joins) begin(elders ring) {
	if len(elders) == 0 {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.elders, j.owing = elders, map[cluster.ID]bool{}
	for _, id := range elders {
		j.owing[id] = true
	}
	j.until = time.Now().Add(joinGrace)
	j.going.Store(true)
}

// fetched begins the time of a join anew: the others are about to see this node.
func (j *joins) fetched() {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.until = time.Now().Add(joinGrace)
}

// got notes that an elder has handed over what is this node's.
func (j *joins) got(from cluster.ID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	delete(j.owing, from)
	j.going.Store(len(j.owing)+len(j.handed) > 0)
}

// gave notes that a node that joins was handed its keys.
func (j *joins) gave(to cluster.ID) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.handed == nil {
		j.handed = map[cluster.ID]bool{}
	}
	j.handed[to] = true
	j.until = time.Now().Add(joinGrace)
	j.going.Store(true)
}

// look ends what has gone on for long enough.
func (j *joins) look() {
	if !j.going.Load() {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if time.Now().After(j.until) {
		j.elders = nil
		clear(j.owing)
		clear(j.handed)
		j.going.Store(false)
	}
}

// route names who is asked about a key.
func (s *Store) route(k ratelimit.Key) target {
	owner, _ := s.ring().first(k)
	if owner == s.network.ID() && s.joins.going.Load() {
		return s.holder(k)
	}
	return target{to: owner}
}

// holder names who decides on a key about which this node is asked.
func (s *Store) holder(k ratelimit.Key) target {
	ring, self, j := s.ring(), s.network.ID(), &s.joins
	owner, _ := ring.first(k)
	j.mu.Lock()
	defer j.mu.Unlock()
	if owner == self {
		// One that is gone has left its keys to the next of those that were there.
		living := slices.DeleteFunc(slices.Clone(j.elders), func(id cluster.ID) bool { return !slices.Contains(ring, id) })
		if before, _ := living.first(k); j.owing[before] {
			return target{before, true}
		}
	} else if j.handed[owner] {
		return target{owner, true}
	}
	return target{to: self}
}

// serve does for another node what it asks, or has it done, while keys move.
func (s *Store) serve(ctx context.Context, o *op) result {
	if o.last {
		return s.own(ctx, o)
	}
	groups := s.group(o.items, s.holder)
	for _, g := range groups {
		if g.last {
			s.m.passed.Add(float64(len(g.items)))
		}
	}
	var d ratelimit.Decision
	switch o.kind {
	case opTake:
		d = s.takeAll(ctx, o.now, groups)
	case opAsk:
		d = decideAll(ctx, groups, opAsk, o.now)
	default:
		var res result
		for _, g := range groups {
			res, _ = s.ask(ctx, g.target, op{kind: o.kind, now: o.now, wait: o.wait, items: g.items}) // whoever is asked on or here: no error
		}
		return res
	}
	return result{d.Allowed, d.Item, d.Remaining, d.WaitMs, d.At}
}

// serveAll is serve for many, side by side.
func (s *Store) serveAll(ctx context.Context, ops []op) []result {
	results := make([]result, len(ops))
	var wg sync.WaitGroup
	for i := range ops {
		wg.Go(func() { results[i] = s.serve(ctx, &ops[i]) })
	}
	wg.Wait()
	return results
}

// welcome tells the nodes that have joined that they were handed all that is theirs:
// by copies that hold nothing, behind those that do.
func (s *Store) welcome(was, is ring) {
	for _, id := range is {
		if id != s.network.ID() && !slices.Contains(was, id) {
			s.network.Send(id, Topic, []byte{wireVersion})
			s.joins.gave(id)
		}
	}
}
