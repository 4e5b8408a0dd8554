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
	s.each(func(_ uint32, e *entry, _ []register) { e.force = e.force || e.active.Load() })
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
		e.mu.Lock()
		if wait := e.toldAt + ratelimit.Instant(minGap) - now; e.toldAt != 0 && wait > 0 && wait <= ratelimit.Instant(minGap) {
			e.mu.Unlock()
			at := (ms(now+wait-1) + 1) % int64(len(s.later))
			s.later[at] = append(s.later[at], link)
			continue
		}
		e.queued.Store(false)
		if s.report(link, e, c.registers(i), now) {
			s.m.early.Add(1)
		}
		e.mu.Unlock()
		s.sweepDead(link, e)
	}
	s.urgent = links
}

// sweepDead frees an entry that died while it was queued.
func (s *Store) sweepDead(link uint32, e *entry) {
	pl := &s.pools[link>>entryBits]
	pl.mu.Lock()
	s.collect(pl, e, link)
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
			e.mu.Lock()
			keep := s.measure(link, e, c.registers(i), now, elapsed)
			if !keep {
				e.demand = 0
				e.active.Store(false)
			}
			e.mu.Unlock()
			if keep {
				kept = append(kept, link)
			} else {
				s.retire(link, e)
			}
		}
		pl.mu.Lock()
		pl.active = append(pl.active, kept...)
		pl.mu.Unlock()
		if s.pending.Load() != 0 { // news does not wait for the regular reports of many keys
			s.early(now)
			s.send()
		}
	}
	s.sweep(s.ticks%pools, now)
	s.ticks++
	s.m.tick.Observe(time.Since(start).Seconds())
}

// quietTicks is how many ticks a key stays active without demand. At the end of
// them its state is sent once more, in case that the last report was lost.
const quietTicks = 10

// measure does for tick what concerns one key; false: it is no longer active.
func (s *Store) measure(link uint32, e *entry, regs []register, now ratelimit.Instant, elapsed float64) bool {
	c, ok := s.counter(e.key, link)
	p := e.policy.Load()
	if !ok || p == nil {
		return false
	}
	state, shape := c.Load()
	if shape != p.Shape() {
		return true // moving, or not yet under the new policy
	}
	own := uint32(state.Word)
	if p.Algorithm() == ratelimit.TokenBucket {
		own = e.spent.Load()
	}
	tried := e.tried.Swap(0)
	if d := int32(own - e.base.Swap(own)); d > 0 {
		tried += uint32(d)
	}
	d := averaged(float64(e.demand), float64(tried), elapsed)
	if d < 0.5 && tried == 0 {
		d = 0
	}
	e.demand = float32(d)
	thin := uint32(0)
	for v := d / 8192; v > 1 && thin < 16; v /= 2 { // some thousand samples a second
		thin++
	}
	e.thin.Store(thin)

	n := s.table.Load().n
	r := s.own(e, c, p, state, now)
	unsaid := float64(r.count)
	if r.win == e.told.win {
		unsaid = math.Abs(float64(int32(r.count - e.told.count)))
	}
	age := seconds(now - e.toldAt)
	if e.toldAt == 0 || age < 0 {
		age = elapsed
	}
	known := max(d, float64(e.told.demand))
	due := e.force || max(known*age, unsaid) >= worthTelling(p.Quota(), n) && known+unsaid > 0 ||
		known > 0 && age > longestSilence.Seconds() || s.plain
	if d > 0 || tried > 0 || e.told.demand > 0 && n > 1 {
		e.quiet = 0
	} else {
		e.quiet++
	}
	if due || e.quiet == quietTicks {
		s.report(link, e, regs, now)
	}
	return e.quiet < quietTicks
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

// retire takes an entry that is no longer active from its counter's mark, so that
// the next spend says so.
func (s *Store) retire(link uint32, e *entry) {
	e.mu.Lock()
	k := e.key
	e.mu.Unlock()
	if c, ok := s.counter(k, link); ok {
		c.SetMark(0)
	}
	s.sweepDead(link, e)
}

// own is what this node has to say of a key. e is locked.
func (s *Store) own(e *entry, c local.Counter, p *ratelimit.Policy, state ratelimit.State, now ratelimit.Instant) register {
	if p.Algorithm() == ratelimit.TokenBucket {
		return register{win: e.epoch, count: e.spent.Load(), known: p.Used(state, now)}
	}
	r := register{count: uint32(state.Word), prev: state.Prev}
	win, _ := p.Window(now)
	r.win = uint32(state.Word >> 32)
	if p.Algorithm() == ratelimit.FixedWindow {
		r.prev = 0
		if last := e.last.Load(); uint32(last>>32)+1 == r.win {
			r.prev = uint32(last)
		}
	}
	switch d := int32(win - r.win); {
	case d == 1:
		r = register{win: win, prev: r.count}
	case d > 1:
		r = register{win: win}
	}
	return r
}

// report adds a key to the message that is being written. s.out and e are locked.
func (s *Store) report(link uint32, e *entry, regs []register, now ratelimit.Instant) bool {
	c, ok := s.counter(e.key, link)
	p := e.policy.Load()
	if !ok || p == nil {
		return false
	}
	state, shape := c.Load()
	if shape != p.Shape() {
		return false
	}
	n := s.table.Load().n
	r := s.own(e, c, p, state, now)
	r.demand = e.demand
	if p.Algorithm() == ratelimit.TokenBucket {
		left := max(0, float64(p.Quota())-float64(r.known))
		q := tokenQuantum(left, float64(p.Limit())*1000/float64(p.ScaleMs()), s.interval.Seconds(), n)
		e.early.Store(r.count + uint32(math.Ceil(q)) - 1)
	} else {
		known := uint64(r.count)
		for j := range regs {
			known += uint64(regs[j].in(r.win))
		}
		r.known = units(float64(known))
		s.remark(c, p, r, n)
	}
	if n == 1 {
		return false
	}
	e.told, e.toldAt, e.force = told{r.win, r.count, r.demand}, now, false
	if s.w.b == nil {
		s.begin(kindReport, now)
	}
	s.w.record(e.key, p, r, nil)
	s.m.records.Add(1)
	if s.w.full() {
		s.send()
	}
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
	if s.w.b == nil {
		return
	}
	s.m.sent.Add(1)
	s.m.sentBytes.Add(float64(len(s.w.b)))
	s.network.Broadcast(Topic, s.w.b)
	s.w.b = nil
}

// sweep frees, of one pool, the entries of keys that are not in use here and of
// which no peer has anything to say any more.
func (s *Store) sweep(n int, now ratelimit.Instant) {
	type idle struct {
		link uint32
		k    ratelimit.Key
	}
	var gone []idle
	s.eachOf(n, func(link uint32, e *entry, regs []register) {
		if e.key == (ratelimit.Key{}) || e.active.Load() || e.queued.Load() {
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
		live := false
		for j := range regs {
			r := &regs[j]
			if s.since(r.at, now) > time.Hour.Seconds() { // before stamps wrap
				r.demand = 0
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
		return r.demand > 0 || r.known > 0 && int32(stamp(now)-r.at) < int32(stampOf(p.Tolerance()))
	}
	return !ratelimit.Over(p.Shape(), uint64(r.win)<<32, now)
}

func stampOf(ns int64) uint32 { return uint32(min(ns>>16, math.MaxInt32)) }

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
	if s.full {
		s.SetShare(1, 1)
	} else {
		s.SetShare(v.Visible, v.Alive)
	}
	if retell { // what was sent to a peer may not have arrived
		s.each(func(link uint32, e *entry, _ []register) { e.force = e.force || e.toldAt != 0 })
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
		s.eachOf(n, func(link uint32, e *entry, _ []register) {
			if e.force && e.key != (ratelimit.Key{}) {
				links = append(links, link)
			}
		})
		for _, link := range links {
			e, _, _ := s.entry(link)
			s.activate(link, e)
		}
	}
}
