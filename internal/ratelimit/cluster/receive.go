package cluster

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// peer is one start of a node that was heard of.
type peer struct {
	id      cluster.ID
	latency atomic.Int64 // ns
	heard   atomic.Int64 // Instant of the last message
	ends    atomic.Int64 // Instant at which the last window it reported ends
	healed  atomic.Int64 // Instant at which it was heard again after a split; 0: it never was away

	// guarded by peersMu
	name    string
	session uint64
	gone    bool
	delay   delays
}

// outlives notes that a count of the peer bears on what is admitted until end.
func (p *peer) outlives(end ratelimit.Instant) {
	for old := p.ends.Load(); old < int64(end) && !p.ends.CompareAndSwap(old, int64(end)); old = p.ends.Load() {
	}
}

// healedSince tells whether a split from the peer ended since a stamp.
func (p *peer) healedSince(at uint32, now ratelimit.Instant) bool {
	h := ratelimit.Instant(p.healed.Load())
	return h != 0 && now-h < ratelimit.Instant(time.Hour) && apart(at, stamp(h)) < 0
}

// delays tells how much longer than usual a message was on its way. Clocks that
// disagree move all differences alike, so the least of the last seconds stands for
// a message that waited nowhere.
type delays struct {
	least, before int64 // of this period, and of the one before
	until         ratelimit.Instant
}

const delayPeriod = ratelimit.Instant(10 * time.Second)

func (d *delays) late(diff int64, now ratelimit.Instant) int64 {
	if left := d.until - now; left <= 0 || left > delayPeriod {
		if d.before = d.least; d.until == 0 || left < -delayPeriod || left > delayPeriod {
			d.before = diff
		}
		d.least, d.until = diff, now+delayPeriod
	}
	d.least = min(d.least, diff)
	return diff - min(d.least, d.before)
}

// slot is the place of a peer in the registers; peersMu is held.
func (s *Store) slot(id cluster.ID, now ratelimit.Instant) int {
	if i, ok := s.slotOf[id]; ok {
		return i
	}
	free := -1
	for i, p := range s.peers {
		if p.gone && int64(now) > p.ends.Load() {
			free = i
			break
		}
	}
	if free < 0 && len(s.peers) >= maxSlots { // forget the one whose windows end first
		for i, p := range s.peers {
			if p.gone && (free < 0 || p.ends.Load() < s.peers[free].ends.Load()) {
				free = i
			}
		}
		if free < 0 {
			return -1
		}
	}
	if free >= 0 {
		delete(s.slotOf, s.peers[free].id)
		s.forget(free)
	} else {
		free = len(s.peers)
		s.peers = append(s.peers, nil)
		if st := int(s.stride.Load()); free >= st {
			s.widen(st + max(1, st/2))
		}
	}
	// Until a view names it, it is as good as dead: its counts stand, no more is expected of it.
	s.peers[free] = &peer{id: id, gone: true}
	s.peers[free].ends.Store(int64(now) + int64(time.Minute))
	s.slotOf[id] = free
	return free
}

// maxSlots bounds the peers whose counts are held, dead ones included.
const maxSlots = 256

// Handler is what the node's connections call for Topic.
func (s *Store) Handler() cluster.Handler {
	return cluster.Handler{
		Receive: func(from cluster.ID, m cluster.Message) {
			// What can't be read is counted; another version's messages are no use to log one by one.
			_ = s.receive(from, m.Body, s.clock.Now())
		},
		Answer: func(_ context.Context, _ cluster.ID, request []byte) ([]byte, error) {
			keys, ok := readStateRequest(request)
			if !ok {
				return nil, errMalformed
			}
			return s.stateOfKeys(keys), nil
		},
		State: func(_ context.Context, _ cluster.ID, send func([]byte) error) error { return s.state(send) },
	}
}

// receive takes in a message of a peer. Messages of one peer come one at a time,
// those of different ones side by side. body is not kept.
func (s *Store) receive(from cluster.ID, body []byte, now ratelimit.Instant) error {
	if isResets(body) {
		err := readResets(body, func(r local.Reset) { s.TakeReset(r, now) })
		if err != nil {
			s.m.dropped("malformed")
		}
		return err
	}
	var r reader
	if err := r.begin(body); err != nil {
		s.m.dropped("malformed")
		return err
	}
	s.peersMu.Lock()
	slot := s.slot(from, now)
	if slot < 0 {
		s.peersMu.Unlock()
		s.m.dropped("too_many_peers")
		return nil
	}
	p := s.peers[slot]
	late := int64(0)
	if r.kind == kindReport {
		late = p.delay.late(int64(now-r.sent), now)
	}
	s.peersMu.Unlock()
	s.m.received.Add(1)
	s.m.receivedBytes.Add(float64(len(body)))
	p.heard.Store(int64(now))
	sent := stamp(now - ratelimit.Instant(p.latency.Load()+late))
	var rec record
	for {
		ok, err := r.next(&rec)
		if err != nil {
			s.m.dropped("malformed")
			return err
		}
		if !ok {
			return nil
		}
		rec.at = sent
		s.take(p, slot, &rec, r.kind, now)
	}
}

// take merges one record.
func (s *Store) take(p *peer, slot int, rec *record, kind byte, now ratelimit.Instant) {
	tokens := rec.shape.Algorithm() == ratelimit.TokenBucket
	if win, _ := rec.shape.Window(now); !tokens && int32(rec.win-win) > 1 {
		s.m.dropped("clock")
		return
	}
	stale := s.version(p.id, rec, now)
	if rec.count|rec.prev == 0 && rec.demand == 0 && len(rec.others) == 0 {
		if _, ok := s.Counter(rec.key); !ok {
			return // it has ended there, and never began here
		}
	}
	c, ok := s.Ensure(rec.key, rec.shape, now)
	if !ok {
		s.m.dropped("full")
		return
	}
	link, _ := c.Link()
	if link == 0 {
		if link = s.attach(rec.key); link == 0 {
			s.m.dropped("full")
			return
		}
	}
	_, shape := c.Load()
	if shape == 0 {
		if c, ok = s.Counter(rec.key); ok {
			_, shape = c.Load()
		}
	}
	if !tokens {
		p.outlives(rec.shape.WindowStart(rec.win + 2))
	}
	m := rec.register
	if shape != rec.shape.Shape() && s.idle(link, shape, now) && s.Adopt(rec.key, rec.shape, now) {
		if s.Detach(rec.key, link) {
			s.Freed(link)
		}
		if link = s.attach(rec.key); link == 0 {
			s.m.dropped("full")
			return
		}
		if c, ok = s.Counter(rec.key); !ok {
			return
		}
		shape = rec.shape.Shape()
		s.Changed(rec.key) // others may have told more of it already
	}
	if shape != rec.shape.Shape() {
		// The policy has changed, there or here: for a moment the use is what counts.
		mine := ratelimit.FromShape(shape)
		if shape == 0 || tokens != (mine.Algorithm() == ratelimit.TokenBucket) {
			s.m.dropped("other_policy")
			return
		}
		if !tokens {
			m = inShape(&mine, rec.shape, m, now)
		}
	}
	e, ch, i := s.entry(link)
	ch.mu.Lock()
	if e.key != rec.key { // freed under our hands; the next report makes it anew
		ch.mu.Unlock()
		return
	}
	kept := &ch.of(i)[slot]
	reg := kept.load(m.win)
	first := reg.batch == 0
	// What a peer spent beyond a split came out of its own share.
	level := kind == kindState || !s.table.Load().visible(slot) || p.healedSince(reg.at, now)
	grown, taken := reg.merge(m)
	if taken {
		kept.store(reg)
	}
	e.head.Store(0)
	ch.mu.Unlock()
	if taken && tokens && !stale {
		s.book(c, rec, grown, first, level, now)
	}
	for _, o := range rec.others {
		s.takeOther(rec, o, shape, now)
	}
}

// version compares the last reset of a key that its sender knows of with that of this node, which takes a later one in.
// What was told without knowing of a later one is stale: what a reset has taken away is taken out, and the sender is told.
func (s *Store) version(from cluster.ID, rec *record, now ratelimit.Instant) (stale bool) {
	known := s.ResetOf(rec.key, now)
	if rec.reset.At > known.At {
		s.TakeReset(rec.reset, now)
	}
	if rec.reset.At >= known.At {
		return false
	}
	rec.forget(rec.shape, known.At)
	for i := range rec.others {
		rec.others[i].forget(rec.shape, known.At)
	}
	s.network.Send(from, Topic, appendResets(nil, []local.Reset{known})[0])
	return true
}

// idle tells that nothing that peers said of a key under a shape still counts.
func (s *Store) idle(link uint32, shape uint64, now ratelimit.Instant) bool {
	if shape == 0 {
		return false
	}
	p := ratelimit.FromShape(shape)
	near, _ := p.Window(now)
	_, ch, i := s.entry(link)
	ch.mu.Lock()
	defer ch.mu.Unlock()
	for j := range ch.of(i) {
		if r := ch.of(i)[j].load(near); r.live(&p, now) {
			return false
		}
	}
	return true
}

// inShape is a window's count in the unit of another policy.
func inShape(to, from *ratelimit.Policy, m register, now ratelimit.Instant) register {
	used := from.Used(ratelimit.State{Word: uint64(m.win)<<32 | uint64(m.count), Prev: m.prev}, now)
	m.win, _ = to.Window(now)
	m.known = max(used, m.known-min(m.known, m.count))
	m.count, m.prev = used, 0
	return m
}

// book subtracts from a token bucket what a peer has spent, even below zero; or,
// when the difference to its last report says nothing, makes the bucket no fuller
// than the peer's.
func (s *Store) book(c local.Counter, rec *record, grown int64, first, level bool, now ratelimit.Instant) {
	if level {
		state, shape := c.Load()
		if shape == 0 {
			return
		}
		p := ratelimit.FromShape(shape) // tokens are tokens, at whatever rate
		grown = int64(rec.known) - int64(p.Used(state, now))
		if grown <= 0 {
			return
		}
	} else if first { // how much of it is known already can't be told; no more counts than is in use
		grown = min(grown, int64(rec.known))
	}
	for try := 0; grown != 0 && try < 3; try++ {
		if _, shape := c.Load(); shape != 0 {
			p := ratelimit.FromShape(shape)
			// Another algorithm: its policy has changed just now.
			if p.Algorithm() != ratelimit.TokenBucket || s.Book(c, &p, grown, now) {
				return
			}
		}
		var ok bool
		if c, ok = s.Counter(rec.key); !ok {
			return
		}
	}
}

// takeOther merges what a peer knows of a node that we can't hear.
func (s *Store) takeOther(rec *record, o other, shape uint64, now ratelimit.Instant) {
	if shape != rec.shape.Shape() || o.id == s.network.ID() {
		return
	}
	s.peersMu.Lock()
	slot := s.slot(o.id, now)
	if slot < 0 {
		s.peersMu.Unlock()
		return
	}
	p := s.peers[slot]
	s.peersMu.Unlock()
	p.outlives(rec.shape.WindowStart(o.win + 2))
	c, ok := s.Counter(rec.key)
	if !ok {
		return
	}
	link, _ := c.Link()
	if link == 0 {
		return
	}
	e, ch, i := s.entry(link)
	ch.mu.Lock()
	defer ch.mu.Unlock()
	if e.key == rec.key {
		o.at, o.known = stamp(now), o.count
		kept := &ch.of(i)[slot]
		reg := kept.load(o.win)
		if _, taken := reg.merge(o.register); taken {
			kept.store(reg)
		}
		e.head.Store(0)
	}
}

// state passes on what this node has counted, and knows of nodes that the asker
// can't hear, in pieces for receive.
func (s *Store) state(send func(piece []byte) error) error {
	for _, b := range appendResets(nil, s.Resets(s.clock.Now())) {
		if err := send(b); err != nil {
			return err
		}
	}
	for part, more := 0, true; more; part++ {
		var pieces [][]byte
		now := s.clock.Now()
		s.out.Lock()
		s.send()
		more = s.Walk(part, func(c local.Counter) {
			if !s.w.open() {
				s.begin(kindState, now)
			}
			s.stateOf(c, now)
			if s.w.full() {
				pieces = append(pieces, s.w.end())
			}
		})
		if s.w.open() {
			pieces = append(pieces, s.w.end())
		}
		s.out.Unlock()
		for _, p := range pieces {
			if err := send(p); err != nil {
				return err
			}
		}
	}
	return nil
}

// stateOfKeys is the state of some keys.
func (s *Store) stateOfKeys(keys []ratelimit.Key) []byte {
	now := s.clock.Now()
	s.out.Lock()
	defer s.out.Unlock()
	s.send()
	s.begin(kindState, now)
	for _, k := range keys {
		if c, ok := s.Counter(k); ok {
			s.stateOf(c, now)
		}
	}
	return s.w.end()
}

// stateOf adds a counter to a state, if it still bears on what is admitted.
func (s *Store) stateOf(c local.Counter, now ratelimit.Instant) {
	state, shape := c.Load()
	if shape == 0 || !ratelimit.ValidShape(shape) {
		return
	}
	p := ratelimit.FromShape(shape)
	if ratelimit.Over(shape, state.Word, now) {
		return
	}
	var r register
	var others []other
	if link, _ := c.Link(); link != 0 {
		e, ch, i := s.entry(link)
		ch.mu.Lock()
		r = s.own(s.usage(link, e), &p, state, now)
		cells := ch.of(i)
		t := s.table.Load()
		if p.Algorithm() != ratelimit.TokenBucket {
			r.known = r.count
			for j := range cells {
				peer := cells[j].load(r.win)
				r.known = units(float64(r.known) + float64(peer.in(r.win)))
				if j < len(t.slots) && !t.visible(j) && peer.live(&p, now) {
					others = append(others, other{t.slots[j].id, peer})
				}
			}
		}
		ch.mu.Unlock()
	} else {
		r = s.own(nil, &p, state, now)
		r.known = max(r.known, r.count)
	}
	if r.count == 0 && r.prev == 0 && r.known == 0 && len(others) == 0 {
		return
	}
	s.w.record(c.Key(), &p, r, others, s.ResetOf(c.Key(), now))
}

// Sync asks every peer that can be heard for what it has counted, unless that was
// done since its connection was made. It is to be called before a node takes
// requests, so that a start does not loosen a limit. The errors are of peers that
// did not answer; Run asks them again.
func (s *Store) Sync(ctx context.Context) error {
	s.look(s.clock.Now())
	var asks []cluster.Peer
	s.peersMu.Lock()
	for _, p := range s.seen.Peers {
		if p.Standing == cluster.Visible && s.synced[p.ID] != p.Session+1 {
			asks = append(asks, p)
		}
	}
	s.peersMu.Unlock()
	errs := make([]error, len(asks))
	var wg sync.WaitGroup
	for i, p := range asks {
		wg.Go(func() {
			err := s.network.Fetch(ctx, p.ID, Topic, func(piece []byte) error { return s.receive(p.ID, piece, s.clock.Now()) })
			if err != nil {
				errs[i] = fmt.Errorf("ratelimit/cluster: counts of %v: %w", p.ID, err)
				return
			}
			s.peersMu.Lock()
			s.synced[p.ID] = p.Session + 1
			s.peersMu.Unlock()
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

const (
	resyncTimeout = 5 * time.Second
	resyncPause   = time.Second
)

// inquire asks peers what they have of keys whose policy has changed here: what they
// told under the new one, while this node still counted under the old one, was of no use
// to it.
func (s *Store) inquire(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case k := <-s.changed:
			s.inquireOf(ctx, append(make([]ratelimit.Key, 0, 8), k))
		}
	}
}

// inquireOf asks for some keys, and those that wait.
func (s *Store) inquireOf(ctx context.Context, keys []ratelimit.Key) {
	for more := true; more && len(keys) < maxAsked; {
		select {
		case k := <-s.changed:
			keys = append(keys, k)
		default:
			more = false
		}
	}
	ctx, cancel := context.WithTimeout(ctx, inquiryTimeout)
	defer cancel()
	request := stateRequest(keys)
	var wg sync.WaitGroup
	for _, p := range s.network.View().Peers {
		if p.Standing == cluster.Visible {
			wg.Go(func() {
				// One that does not answer tells all the same with its next report.
				if answer, err := s.network.Call(ctx, p.ID, Topic, request); err == nil {
					_ = s.receive(p.ID, answer, s.clock.Now()) // what can't be read is counted
				}
			})
		}
	}
	wg.Wait()
}

const (
	inquiryTimeout = 500 * time.Millisecond // as long as a peer counts as visible that can't be heard
	maxInquiries   = 4096                   // keys that wait for it
)

// resync asks peers for their state when connections were made anew.
func (s *Store) resync(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.behind:
		}
		asking, cancel := context.WithTimeout(ctx, resyncTimeout)
		err := s.Sync(asking)
		cancel()
		if err == nil {
			continue
		}
		if ctx.Err() == nil {
			s.log.Warn("rate limits: counts of a peer could not be had, asking again", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(resyncPause):
		}
		select {
		case s.behind <- struct{}{}:
		default:
		}
	}
}
