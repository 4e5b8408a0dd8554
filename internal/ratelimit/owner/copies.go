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
	out := outbox{s: s, now: s.clock.Now()}
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
	out := outbox{s: s, now: now}
	if resets := s.counts.Resets(now); len(resets) > 0 { // a node that could not be heard has not heard of them
		for _, id := range is {
			if !slices.Contains(was, id) {
				for _, r := range resets {
					out.reset(id, r)
				}
			}
		}
	}
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
	now  ratelimit.Instant
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
	b := o.s.appendState(o.buf(to), c.Key(), shape, state, o.now)
	o.put(to, b)
}

// reset tells a node of a reset.
func (o *outbox) reset(to cluster.ID, r local.Reset) {
	if to != o.s.network.ID() {
		o.put(to, appendReset(o.buf(to), r))
	}
}

func (o *outbox) buf(to cluster.ID) []byte {
	if b := o.bufs[to]; b != nil {
		return b
	}
	return []byte{wireVersion}
}

func (o *outbox) put(to cluster.ID, b []byte) {
	if o.bufs == nil {
		o.bufs = map[cluster.ID][]byte{}
	}
	if len(b) >= maxCopies*copyLen {
		o.post(to, b)
		b = nil
	}
	o.bufs[to] = b
}

// appendState adds the copy of a counter, and the last reset of its key before it: a version of which it is a state.
func (s *Store) appendState(b []byte, k ratelimit.Key, shape uint64, state ratelimit.State, now ratelimit.Instant) []byte {
	if r := s.counts.ResetOf(k, now); r != (local.Reset{}) {
		b = appendReset(b, r)
	}
	return appendCopy(b, k, shape, state)
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
	if err := s.takeIn(from, b, false); err != nil {
		s.m.malformed.Inc()
	} else if len(b) == 1 {
		s.joins.got(from)
	}
}

// takeIn reads copies; all tells that they are of every key that the sender has. One
// whose sender has not heard of the key's last reset holds only what was spent in windows after it.
func (s *Store) takeIn(from cluster.ID, b []byte, all bool) error {
	r := reader{b: b}
	if r.byte() != wireVersion || len(r.b)%copyLen != 0 {
		return errMalformed
	}
	ring, self, now := s.ring(), s.network.ID(), s.clock.Now()
	shapes := map[uint64]*ratelimit.Policy{}
	var told local.Reset // the last one in the message
	answer := outbox{s: s, now: now}
	defer answer.send()
	for len(r.b) > 0 {
		k, shape := r.key(), r.fixed(8)
		state := ratelimit.State{Word: r.fixed(8), Prev: uint32(r.fixed(4))}
		if shape == resetMark {
			if told = resetOf(k, state); !told.Valid() {
				return errMalformed
			}
			s.takeReset(told, now)
			continue
		}
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
		greater := all || owner == self
		if reset := s.counts.ResetOf(k, now); reset.At > 0 && (told.Key != k || told.At < reset.At) {
			answer.reset(from, reset)
			state, greater = p.Forget(state, reset.At, now), true
		}
		if ratelimit.Over(shape, state.Word, now) || all && owner != self && next != self {
			continue
		}
		if !s.counts.Put(k, p, state, greater, now) {
			s.m.dropped.Inc()
		}
	}
	return nil
}

// state passes on every counter that bears on what is admitted.
func (s *Store) state(send func(piece []byte) error) error {
	now := s.clock.Now()
	b := []byte{wireVersion}
	for _, r := range s.counts.Resets(now) { // of keys, too, of which nothing is known
		b = appendReset(b, r)
	}
	var err error
	for part := 0; err == nil && s.counts.Walk(part, func(c local.Counter) {
		state, shape := c.Load()
		if err != nil || shape == 0 || !ratelimit.ValidShape(shape) || ratelimit.Over(shape, state.Word, now) {
			return
		}
		if b = s.appendState(b, c.Key(), shape, state, now); len(b) >= maxCopies*copyLen {
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
			err := s.network.Fetch(ctx, p.ID, Topic, func(piece []byte) error { return s.takeIn(p.ID, piece, true) })
			if err != nil {
				errs[i] = fmt.Errorf("ratelimit/owner: counters of %v: %w", p.ID, err)
			}
		})
	}
	wg.Wait()
	s.joins.fetched()
	return errors.Join(errs...)
}
