package cluster

import (
	"context"
	"math"
	"math/bits"
	"slices"
	"sync"
	"time"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// Run reports to the other nodes until ctx ends; then it tells them everything
// that they may not know yet and waits for them to have it, at most until
// leaveTimeout. It returns nil.
func (s *Store) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() { s.resync(ctx) })
	wg.Go(func() { s.inquire(ctx) })
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			s.leave(context.WithoutCancel(ctx))
			return nil
		case <-s.wake:
		case <-timer.C:
		}
		now := s.clock.Now()
		timer.Reset(time.Duration(max(s.poll(now)-now, 0)))
	}
}

const leaveTimeout = time.Second

func (s *Store) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, leaveTimeout)
	defer cancel()
	s.flushAll(s.clock.Now())
	if err := s.network.Flush(ctx); err != nil {
		s.log.Warn("rate limits: last reports were not confirmed", "error", err)
	}
}

// flushAll reports every active key.
func (s *Store) flushAll(now ratelimit.Instant) {
	s.each(func(_ uint32, _ *entry, u *usage, _ []cell) {
		if u != nil {
			u.force = u.force || u.in(listedBits)
		}
	})
	s.reactivate()
	s.out.Lock()
	defer s.out.Unlock()
	s.tick(now)
	s.send()
}

// poll sends what is due at a moment and returns the moment of the next call, if
// no early report comes in before.
func (s *Store) poll(now ratelimit.Instant) ratelimit.Instant {
	s.out.Lock()
	defer s.out.Unlock()
	interval := ratelimit.Instant(s.interval)
	if s.nextTick-now > interval { // the clock stepped back
		s.nextTick, s.laterMs = now, ms(now)
	}
	if now >= s.nextTick {
		s.tick(now)
		if s.nextTick += interval; s.nextTick <= now {
			s.nextTick = now + interval
		}
	}
	s.early(now)
	s.send()
	next := s.nextTick
	for i := range s.later {
		if at := ratelimit.Instant(s.laterMs+1+int64(i)) * 1e6; len(s.later[(s.laterMs+1+int64(i))%int64(len(s.later))]) > 0 {
			next = min(next, at)
		}
	}
	return next
}

func seconds(d ratelimit.Instant) float64 { return float64(d) / 1e9 }

func ms(now ratelimit.Instant) int64 { return int64(now) / 1e6 }

// early reports what was queued, and what had to wait for minGap.
func (s *Store) early(now ratelimit.Instant) {
	links := s.urgent[:0]
	for last := ms(now); s.laterMs < last; {
		if last-s.laterMs > int64(len(s.later)) {
			s.laterMs = last - int64(len(s.later))
		}
		s.laterMs++
		l := &s.later[s.laterMs%int64(len(s.later))]
		links = append(links, *l...)
		*l = (*l)[:0]
	}
	for b := s.pending.Swap(0); b != 0; b &= b - 1 {
		pl := &s.pools[bits.TrailingZeros64(b)]
		pl.mu.Lock()
		links = append(links, pl.due...)
		pl.due = pl.due[:0]
		pl.mu.Unlock()
	}
	for _, link := range links {
		e, c, i := s.entry(link)
		u := s.usage(link, e)
		if u == nil {
			continue // freed meanwhile
		}
		c.mu.Lock()
		if wait := u.toldAt + ratelimit.Instant(minGap) - now; u.toldAt != 0 && wait > 0 && wait <= ratelimit.Instant(minGap) {
			c.mu.Unlock()
			at := (ms(now+wait-1) + 1) % int64(len(s.later))
			s.later[at] = append(s.later[at], link)
			continue
		}
		u.lists.And(^uint32(queuedBit))
		if counter, ok := s.counter(e.key, link); ok && s.report(counter, u, e.key, c.of(i), now) {
			s.m.early.Add(1)
		}
		c.mu.Unlock()
		s.sendFull()
		s.sweepDead(link, e, c, u)
	}
	s.urgent = links
}

// sweepDead frees an entry that died while it was in a list.
func (s *Store) sweepDead(link uint32, e *entry, c *chunk, u *usage) {
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	pl.collect(link, e, c, u)
	pl.mu.Unlock()
}

// tick measures the demand of active keys and reports those about which the
// others may have become wrong.
func (s *Store) tick(now ratelimit.Instant) {
	start := time.Now()
	elapsed := seconds(now - s.lastTick)
	if s.lastTick == 0 || elapsed <= 0 || elapsed > 100*s.interval.Seconds() {
		elapsed = s.interval.Seconds()
	}
	s.lastTick = now
	s.look(now)
	for n := range s.pools {
		pl := &s.pools[n]
		pl.mu.Lock()
		s.links = append(s.links[:0], pl.active...)
		pl.active = pl.active[:0]
		pl.mu.Unlock()
		links := s.links
		kept := links[:0]
		for _, link := range links {
			e, c, i := s.entry(link)
			u := s.usage(link, e)
			if u == nil {
				continue
			}
			c.mu.Lock()
			counter, ok := s.counter(e.key, link)
			keep, own := false, uint32(0)
			if ok {
				keep, own = s.measure(counter, u, e, c.of(i), now, elapsed)
			}
			c.mu.Unlock()
			s.sendFull()
			switch {
			case keep:
				kept = append(kept, link)
			case ok:
				s.rest(link, u, counter, own)
			default:
				u.lists.And(^uint32(activeBit))
			}
			if !keep {
				s.sweepDead(link, e, c, u)
			}
		}
		pl.mu.Lock()
		pl.active = append(pl.active, kept...)
		pl.mu.Unlock()
		if (s.ticks+n)%restTicks == 0 {
			s.lookAtResting(pl, now)
		}
		if s.pending.Load() != 0 { // news does not wait for the regular reports of many keys
			s.early(now)
			s.send()
		}
	}
	s.sweep(s.ticks%pools, now)
	s.ticks++
	s.m.tick.Observe(time.Since(start).Seconds())
}

// restTicks is after how many ticks each resting key is looked at again. When it has
// rested for as long, its state is sent once more, in case that the last report was
// lost, and it is in no list any more.
const restTicks = 10

// rest takes a key from the active ones, when this was its own count. The next spend
// says so.
func (s *Store) rest(link uint32, u *usage, c local.Counter, own uint32) {
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	if u.lists.And(^uint32(activeBit)); !u.dead && u.lists.Or(restingBit)&restingBit == 0 {
		pl.resting = append(pl.resting, link)
	}
	pl.mu.Unlock()
	s.awaitSpend(link, u, c, own)
}

func (s *Store) awaitSpend(link uint32, u *usage, c local.Counter, own uint32) {
	c.SetMark(own)
	state, shape := c.Load()
	if shape != 0 {
		if p := ratelimit.FromShape(shape); p.Algorithm() == ratelimit.TokenBucket {
			return // each spend of those does
		}
	}
	if shape == 0 || uint32(state.Word) != own { // somebody was faster
		c.SetMark(0)
		s.activate(link, u)
	}
}

// lookAtResting sends home who has rested long enough.
func (s *Store) lookAtResting(pl *pool, now ratelimit.Instant) {
	s.links = s.links[:0]
	pl.mu.Lock()
	for _, link := range pl.resting {
		e, _, _ := s.entry(link)
		if u := s.usage(link, e); u != nil && u.lists.Load()&(restingBit|heldBit) == restingBit { // else freed, or here twice
			u.lists.Or(heldBit)
			s.links = append(s.links, link)
		}
	}
	pl.resting = pl.resting[:0]
	pl.mu.Unlock()
	for _, link := range s.links {
		e, c, i := s.entry(link)
		u := s.usage(link, e)
		c.mu.Lock()
		active := u.in(activeBit)
		if u.quiet++; !active && u.quiet < 2 {
			c.mu.Unlock()
			continue
		}
		counter, ok := s.counter(e.key, link)
		var own ratelimit.State
		if ok = ok && !active; ok {
			own, _ = counter.Load()
			u.demand = 0
			s.report(counter, u, e.key, c.of(i), now)
		}
		c.mu.Unlock()
		u.lists.And(^uint32(restingBit))
		if ok {
			s.awaitSpend(link, u, counter, uint32(own.Word))
		}
		s.sendFull()
	}
	pl.mu.Lock()
	for _, link := range s.links {
		e, c, _ := s.entry(link)
		u := s.usage(link, e)
		if u.lists.And(^uint32(heldBit))&restingBit != 0 {
			pl.resting = append(pl.resting, link)
		}
		pl.collect(link, e, c, u)
	}
	pl.mu.Unlock()
}

// measure does for tick what concerns one key. It is kept active unless nothing of it
// will be due before it is used again; own is what this node has spent.
func (s *Store) measure(c local.Counter, u *usage, e *entry, cells []cell, now ratelimit.Instant, elapsed float64) (keep bool, own uint32) {
	state, shape := c.Load()
	if u.quota.Load() == 0 {
		return false, uint32(state.Word)
	}
	p, ok := u.policy(shape)
	if !ok {
		return true, 0 // moving
	}
	own = uint32(state.Word)
	if p.Algorithm() == ratelimit.TokenBucket {
		own = u.spent.Load()
	}
	tried := u.tried.Swap(0)
	if d := int32(own - u.base.Swap(own)); d > 0 {
		tried += uint32(d)
	}
	tick := uint8(s.ticks)
	d := float64(u.demand)
	if rested := tick - u.seen - 1; rested > 0 && d > 0 {
		d = averaged(d, 0, float64(rested)*s.interval.Seconds())
	}
	d = averaged(d, float64(tried), elapsed)
	u.seen = tick
	if d < 0.5 && tried == 0 {
		d = 0
	}
	u.demand = float32(d)
	thin := uint32(0)
	for v := d / 8192; v > 1 && thin < 16; v /= 2 { // some thousand samples a second
		thin++
	}
	e.setThin(thin)

	n := s.table.Load().n
	r := s.own(u, &p, state, now)
	unsaid := float64(r.count)
	if r.win == u.told.win {
		unsaid = math.Abs(float64(int32(r.count - u.told.count)))
	}
	age := seconds(now - u.toldAt)
	if u.toldAt == 0 || age < 0 {
		age = elapsed
	}
	wrong := max(unsaid, d*age, float64(u.told.demand)*min(age, s.interval.Seconds())) // see rumour.least
	due := u.force || wrong > 0 && wrong >= worthTelling(p.Quota(), n) || d > 0 && age > longestSilence.Seconds() || s.plain
	if due {
		s.report(c, u, e.key, cells, now)
		age, unsaid = 0, 0
	}
	u.quiet = 0
	worth := worthTelling(p.Quota(), n)
	return s.plain || u.force || u.in(queuedBit) || max(unsaid, mostAlone(d, age), float64(u.told.demand)*s.interval.Seconds()) >= worth, own
}

// counter is the counter of a key, if it still has a link.
func (s *Store) counter(k ratelimit.Key, link uint32) (local.Counter, bool) {
	if k == (ratelimit.Key{}) {
		return local.Counter{}, false
	}
	c, ok := s.Counter(k)
	if ok {
		l, _ := c.Link()
		ok = l == link
	}
	return c, ok
}

// own is what this node has to say of a key; u is nil if it was never used here. The
// chunk is locked.
func (s *Store) own(u *usage, p *ratelimit.Policy, state ratelimit.State, now ratelimit.Instant) register {
	if u == nil {
		u = &unused
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		return register{win: u.epoch, count: u.spent.Load(), known: p.Used(state, now), demand: u.demand}
	}
	r := register{count: uint32(state.Word), prev: state.Prev}
	win, _ := p.Window(now)
	r.win = uint32(state.Word >> 32)
	if p.Algorithm() == ratelimit.FixedWindow {
		r.prev = 0
		if last := u.last.Load(); uint32(last>>32)+1 == r.win {
			r.prev = uint32(last)
		}
	}
	switch d := int32(win - r.win); {
	case d == 1:
		r = register{win: win, prev: r.count}
	case d > 1:
		r = register{win: win}
	}
	r.demand = u.demand
	return r
}

var unused usage

// report adds a key to the message that is being written; sendFull is to follow. s.out
// and the chunk are locked.
func (s *Store) report(c local.Counter, u *usage, k ratelimit.Key, cells []cell, now ratelimit.Instant) bool {
	state, shape := c.Load()
	p, ok := u.policy(shape)
	if !ok {
		return false
	}
	n := s.table.Load().n
	r := s.own(u, &p, state, now)
	if p.Algorithm() == ratelimit.TokenBucket {
		left := max(0, float64(p.Quota())-float64(r.known))
		q := tokenQuantum(left, float64(p.Limit())*1000/float64(p.ScaleMs()), s.interval.Seconds(), n)
		u.early.Store(r.count + uint32(math.Ceil(q)) - 1)
	} else {
		known := uint64(r.count)
		for j := range cells {
			peer := cells[j].load(r.win)
			known += uint64(peer.in(r.win))
		}
		r.known = units(float64(known))
		s.remark(c, &p, r, n)
	}
	if n == 1 {
		return false
	}
	u.told, u.toldAt, u.force = told{r.win, r.count, r.demand}, now, false
	if !s.w.open() {
		s.begin(kindReport, now)
	}
	s.w.record(k, &p, r, nil, s.ResetOf(k, now))
	s.m.records.Add(1)
	return true
}

// remark sets the own count at which the next early report of a window is due.
func (s *Store) remark(c local.Counter, p *ratelimit.Policy, r register, n int) {
	switch {
	case s.plain:
		c.SetMark(markPending)
		return
	case n == 1:
		c.SetMark(r.count + p.Limit()/8)
		return
	}
	left := float64(p.Limit() - min(p.Limit(), r.known))
	c.SetMark(r.count + uint32(math.Ceil(quantum(left, n))) - 1)
	if state, _ := c.Load(); uint32(state.Word>>32) != r.win { // of another window, it would mean nothing
		c.SetMark(0)
	}
}

func (s *Store) begin(kind byte, now ratelimit.Instant) {
	if s.batch++; s.batch == 0 {
		s.batch = 1
	}
	s.w.begin(kind, s.batch, now)
}

func (s *Store) send() {
	if !s.w.open() {
		return
	}
	message := s.w.end()
	s.m.sent.Add(1)
	s.m.sentBytes.Add(float64(len(message)))
	s.network.Broadcast(Topic, message)
}

// sendFull sends the message that is being written if no further record should be
// added. No chunk is locked meanwhile.
func (s *Store) sendFull() {
	if s.w.full() {
		s.send()
	}
}

// sweep frees, of one pool, the entries of keys that are not in use here and of
// which no peer has anything to say any more.
func (s *Store) sweep(n int, now ratelimit.Instant) {
	type idle struct {
		link uint32
		k    ratelimit.Key
	}
	var gone []idle
	s.eachOf(n, func(link uint32, e *entry, u *usage, cells []cell) {
		if e.key == (ratelimit.Key{}) || u != nil && u.in(listedBits) {
			return
		}
		c, ok := s.counter(e.key, link)
		if !ok {
			return
		}
		_, shape := c.Load()
		if shape == 0 {
			return
		}
		p := ratelimit.FromShape(shape)
		near, _ := p.Window(now)
		live := false
		for j := range cells {
			if cells[j].batch == 0 {
				continue
			}
			r := cells[j].load(near)
			if r.demand > 0 && s.since(r.at, now) > time.Hour.Seconds() { // before stamps wrap
				r.demand = 0
				cells[j].store(r)
			}
			live = live || r.live(&p, now)
		}
		if !live {
			gone = append(gone, idle{link, e.key})
		}
	})
	for _, g := range gone {
		if s.Detach(g.k, g.link) {
			s.Freed(g.link)
		}
	}
}

// live tells whether a register still bears on what is admitted.
func (r *register) live(p *ratelimit.Policy, now ratelimit.Instant) bool {
	if r.batch == 0 {
		return false
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		return r.demand > 0 || r.known > 0 && apart(stamp(now), r.at) < stampOf(p.Tolerance())
	}
	return !ratelimit.Over(p.Shape(), uint64(r.win)<<32, now)
}

func stampOf(ns int64) int32 { return int32(min(ns>>16, 1<<(stampBits-1))) }

// look takes over the network's view, when it has changed.
func (s *Store) look(now ratelimit.Instant) {
	v := s.network.View()
	s.peersMu.Lock()
	defer s.peersMu.Unlock()
	if v == nil || v == s.seen {
		return
	}
	retell, behind := false, false
	old := s.table.Load()
	var resets [][]byte // what was reset while a peer could not be heard
	for _, p := range v.Peers {
		if p.Standing == cluster.Joining { // it admits nothing yet
			continue
		}
		slot := s.slot(p.ID, now)
		if slot < 0 {
			continue
		}
		known, visible := s.peers[slot], p.Standing == cluster.Visible
		if visible && slot < len(old.slots) && old.slots[slot].id == p.ID && !old.slots[slot].visible {
			known.healed.Store(int64(now))
			delete(s.synced, p.ID)
		}
		if visible && (p.Session > known.session || !old.visible(slot)) {
			if resets == nil {
				resets = appendResets(nil, s.Resets(now))
			}
			for _, b := range resets {
				s.network.Send(p.ID, Topic, b)
			}
		}
		retell = retell || p.Session > known.session && known.session > 0
		behind = behind || visible && s.synced[p.ID] != p.Session+1
		known.name, known.session = p.Name, p.Session
		known.latency.Store(int64(p.Latency))
	}
	t := &table{n: max(v.Alive, 1), slots: make([]standing, len(s.peers))}
	if s.full {
		t.n = max(v.Visible, 1)
	}
	for slot, p := range s.peers {
		t.slots[slot].id = p.id
		i := slices.IndexFunc(v.Peers, func(q cluster.Peer) bool { return q.ID == p.id && q.Standing != cluster.Joining })
		if p.gone = i < 0; p.gone {
			delete(s.synced, p.id)
			continue
		}
		q := v.Peers[i]
		t.slots[slot] = standing{p.id, q.Standing == cluster.Visible, q.Standing == cluster.Split && !s.full, q.Latency.Seconds()}
	}
	s.seen = v
	s.table.Store(t)
	held, of := 1, 1
	if !s.full {
		held, of = v.Visible, v.Alive
	}
	if s.SetShare(held, of) {
		s.each(func(_ uint32, e *entry, _ *usage, _ []cell) { e.head.Store(0) })
	}
	if retell { // what was sent to a peer may not have arrived
		s.each(func(_ uint32, _ *entry, u *usage, _ []cell) {
			if u != nil {
				u.force = u.force || u.toldAt != 0
			}
		})
		s.reactivate()
	}
	if behind {
		select {
		case s.behind <- struct{}{}:
		default:
		}
	}
}

// reactivate puts every entry that has something to tell on its pool's list.
func (s *Store) reactivate() {
	for n := range s.pools {
		var links []uint32
		s.eachOf(n, func(link uint32, e *entry, u *usage, _ []cell) {
			if u != nil && u.force && e.key != (ratelimit.Key{}) {
				links = append(links, link)
			}
		})
		for _, link := range links {
			e, _, _ := s.entry(link)
			s.activate(link, s.used(link, e))
		}
	}
}
