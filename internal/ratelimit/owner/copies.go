package owner

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

const (
	// copyGap is the least time between two rounds of copies.
	copyGap = 2 * time.Millisecond
	// lookEvery is how often the ring is compared with the view when nobody checks.
	lookEvery = 100 * time.Millisecond
)

// Handler is what the node's connections call for Topic.
func (s *Store) Handler() cluster.Handler {
	return cluster.Handler{
		Receive: func(from cluster.ID, m cluster.Message) { s.receive(from, m.Body) },
		Answer: func(ctx context.Context, _ cluster.ID, request []byte) ([]byte, error) {
			return s.answer(ctx, request)
		},
		State: func(_ context.Context, _ cluster.ID, send func([]byte) error) error { return s.state(send) },
	}
}

// Run keeps copies of this node's keys at the next nodes, and hands keys over when
// nodes come or go, until ctx ends. It returns nil.
func (s *Store) Run(ctx context.Context) error {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	var gap <-chan time.Time // running after a round
	var wake <-chan struct{} = s.wake
	was := s.ring()
	for {
		select {
		case <-ctx.Done():
			s.copyDirty()
			return nil
		case <-s.moved:
			is := s.ring()
			s.handOver(was, is)
			s.hangUp(s.network.View())
			was = is
		case <-tick.C:
			s.ring()
			s.outage.look()
			s.joins.look()
		case <-wake:
			s.copyDirty()
			gap, wake = time.After(copyGap), nil
		case <-gap:
			gap, wake = nil, s.wake
		}
	}
}

// stale notes that the copy of a key is out of date.
func (s *Store) stale(k ratelimit.Key) {
	if len(s.ring()) == 1 {
		return
	}
	s.dirtyMu.Lock()
	s.dirty[k] = struct{}{}
	s.dirtyMu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// copyDirty sends the state of keys that were spent on to the next of each.
func (s *Store) copyDirty() {
	s.dirtyMu.Lock()
	dirty := s.dirty
	s.dirty = make(map[ratelimit.Key]struct{}, len(dirty))
	s.dirtyMu.Unlock()
	ring, self := s.ring(), s.network.ID()
	out := outbox{s: s}
	for k := range dirty {
		c, ok := s.counts.Counter(k)
		if !ok {
			continue
		}
		// Asked though it is not ours, by a node that sees other nodes: then the owner is told.
		owner, next := ring.first(k)
		if owner != self {
			next = owner
		}
		out.add(next, c)
	}
	out.send()
}

// handOver sends the keys of this node, and those it inherited from nodes that are
// gone, to the nodes that own and copy them now.
func (s *Store) handOver(was, is ring) {
	self, now := s.network.ID(), s.clock.Now()
	out := outbox{s: s}
	for part := 0; s.counts.Walk(part, func(c local.Counter) {
		state, shape := c.Load()
		if shape == 0 || ratelimit.Over(shape, state.Word, now) {
			return
		}
		owned, copied := was.first(c.Key())
		owns, copies := is.first(c.Key())
		mine := owned == self || copied == self && !slices.Contains(is, owned)
		if mine && (owns != owned || copies != copied) {
			out.add(owns, c)
			out.add(copies, c)
		}
	}); part++ {
	}
	out.send()
	s.welcome(was, is)
}

// outbox gathers copies by the node they go to.
type outbox struct {
	s    *Store
	bufs map[cluster.ID][]byte
}

func (o *outbox) add(to cluster.ID, c local.Counter) {
	if to == 0 || to == o.s.network.ID() {
		return
	}
	state, shape := c.Load()
	if shape == 0 || !ratelimit.ValidShape(shape) {
		return
	}
	if o.bufs == nil {
		o.bufs = map[cluster.ID][]byte{}
	}
	b := o.bufs[to]
	if b == nil {
		b = []byte{wireVersion}
	}
	if b = appendCopy(b, c.Key(), shape, state); len(b) >= maxCopies*copyLen {
		o.post(to, b)
		b = nil
	}
	o.bufs[to] = b
}

func (o *outbox) send() {
	for to, b := range o.bufs {
		if b != nil {
			o.post(to, b)
		}
	}
}

func (o *outbox) post(to cluster.ID, b []byte) {
	o.s.m.copies.Add(float64((len(b) - 1) / copyLen))
	o.s.m.bytes.Add(float64(len(b)))
	if !o.s.network.Send(to, Topic, b) {
		o.s.m.dropped.Inc()
	}
}

// receive takes copies in. A key that this node owns by now keeps the greater use:
// it may have been spent on here already.
func (s *Store) receive(from cluster.ID, b []byte) {
	if err := s.takeIn(b, false); err != nil {
		s.m.malformed.Inc()
	} else if len(b) == 1 {
		s.joins.got(from)
	}
}

// takeIn reads copies; all tells that they are of every key that the sender has.
func (s *Store) takeIn(b []byte, all bool) error {
	r := reader{b: b}
	if r.byte() != wireVersion || len(r.b)%copyLen != 0 {
		return errMalformed
	}
	ring, self, now := s.ring(), s.network.ID(), s.clock.Now()
	shapes := map[uint64]*ratelimit.Policy{}
	for len(r.b) > 0 {
		k, shape := r.key(), r.fixed(8)
		state := ratelimit.State{Word: r.fixed(8), Prev: uint32(r.fixed(4))}
		p := shapes[shape]
		if p == nil {
			if !ratelimit.ValidShape(shape) {
				return errMalformed
			}
			q := ratelimit.FromShape(shape)
			p = &q
			shapes[shape] = p
		}
		if k.Hi < 2 || state.Word>>32 == 1<<32-1 {
			return errMalformed
		}
		owner, next := ring.first(k)
		if ratelimit.Over(shape, state.Word, now) || all && owner != self && next != self {
			continue
		}
		if !s.counts.Put(k, p, state, all || owner == self, now) {
			s.m.dropped.Inc()
		}
	}
	return nil
}

// state passes on every counter that bears on what is admitted.
func (s *Store) state(send func(piece []byte) error) error {
	now := s.clock.Now()
	b := []byte{wireVersion}
	var err error
	for part := 0; err == nil && s.counts.Walk(part, func(c local.Counter) {
		state, shape := c.Load()
		if err != nil || shape == 0 || !ratelimit.ValidShape(shape) || ratelimit.Over(shape, state.Word, now) {
			return
		}
		if b = appendCopy(b, c.Key(), shape, state); len(b) >= maxCopies*copyLen {
			err = send(b)
			b = []byte{wireVersion}
		}
	}); part++ {
	}
	if err == nil && len(b) > 1 {
		err = send(b)
	}
	return err
}

// Sync asks every peer that can be heard for its counters. It is to be called
// before a node takes requests, and before the others see it as one that does
// (cluster.Node.Open). The errors are of peers that did not answer.
func (s *Store) Sync(ctx context.Context) error {
	s.joins.begin(slices.DeleteFunc(slices.Clone(s.ring()), func(id cluster.ID) bool { return id == s.network.ID() }))
	var wg sync.WaitGroup
	peers := s.network.View().Peers
	errs := make([]error, len(peers))
	for i, p := range peers {
		if p.Standing != cluster.Visible {
			continue
		}
		wg.Go(func() {
			err := s.network.Fetch(ctx, p.ID, Topic, func(piece []byte) error { return s.takeIn(piece, true) })
			if err != nil {
				errs[i] = fmt.Errorf("ratelimit/owner: counters of %v: %w", p.ID, err)
			}
		})
	}
	wg.Wait()
	s.joins.fetched()
	return errors.Join(errs...)
}
