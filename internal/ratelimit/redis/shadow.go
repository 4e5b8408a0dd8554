package redis

import (
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/ratelimit"
)

const (
	shadowShards = 64
	// purgeEvery is how often a full shard looks for ended entries.
	purgeEvery = ratelimit.Instant(250 * time.Millisecond)
	// overflowLen is the number of entries that the subjects of a bucket share when there is no room for more.
	overflowLen = 1024
	// overflowShown is how long operators are shown that it came to that.
	overflowShown = ratelimit.Instant(10 * time.Second)
)

// shadow is what this node knows of the budgets that it asks Redis for: enough to decide alone when Redis is away, and
// to tell Redis afterwards. It is safe for concurrent use; a lock is shared by a 64th of the keys and held for no I/O.
type shadow struct {
	shards [shadowShards]shadowShard
	most   int // entries of a shard
	// checks that an entry decided which subjects share, and when subjects last had to
	overflowed   atomic.Uint64
	overflowedAt atomic.Int64
}

type shadowShard struct {
	mu      sync.Mutex
	entries map[ratelimit.Key]*entry
	purged  ratelimit.Instant
}

// entry is one budget. Its states are in the shape of policy.
type entry struct {
	policy *ratelimit.Policy
	// mine is what this node has used of its share: what it was admitted, and when it last decided alone at least its
	// share of what all were; see level.
	mine ratelimit.State
	// heard is the state at Redis as heard at a moment of Redis' clock. It brings back what Redis lost.
	heard   ratelimit.State
	heardAt ratelimit.Instant
	// owed is what was admitted without Redis and not yet told: of windows by window, of token buckets a number of
	// tokens, which only says that mine has to be told.
	owed     ratelimit.State
	since    ratelimit.Instant // of the first admission that is owed, by Redis' clock
	born     int64             // the birth of the key at Redis, as heard, Unix µs
	failures uint32            // of the store, when the call began whose answer was heard last
	settling bool              // a call is on its way that tells what was owed; until it is answered nobody else asks Redis
	shared   bool              // by subjects that found no room; Redis is not told what they owe
}

func newShadow(maxKeys int) *shadow {
	s := &shadow{most: max(maxKeys/shadowShards, 1)}
	for i := range s.shards {
		s.shards[i].entries = map[ratelimit.Key]*entry{}
	}
	return s
}

// keys is the number of entries.
func (s *shadow) keys() int {
	n := 0
	for i := range s.shards {
		s.shards[i].mu.Lock()
		n += len(s.shards[i].entries)
		s.shards[i].mu.Unlock()
	}
	return n
}

// bound is the greatest number of entries, those apart that subjects share.
func (s *shadow) bound() int { return s.most * shadowShards }

// overflowing tells whether subjects without room shared entries within the last ten seconds.
func (s *shadow) overflowing(now ratelimit.Instant) bool {
	return now-ratelimit.Instant(s.overflowedAt.Load()) < overflowShown
}

// hold returns a budget's entry with its shard locked, in the policy's shape and present window. A budget without an
// entry gets one; if there is no room for it, one that subjects share. The caller unlocks.
func (s *shadow) hold(it ratelimit.Item, now ratelimit.Instant) (*entry, *shadowShard) {
	k := it.Key
	sh := &s.shards[k.Lo%shadowShards]
	sh.mu.Lock()
	e := sh.entries[k]
	shared := e == nil && !sh.room(s.most, now)
	if shared {
		sh.mu.Unlock()
		s.overflowedAt.Store(int64(now))
		k = ratelimit.Key{Hi: uint64(it.Policy.Bucket()), Lo: k.Lo % overflowLen}
		sh = &s.shards[k.Lo%shadowShards]
		sh.mu.Lock()
		e = sh.entries[k]
	}
	if e == nil {
		e = &entry{policy: it.Policy, mine: it.Policy.Fresh(now), shared: shared}
		sh.entries[k] = e
	}
	e.turn(it.Policy, now)
	return e, sh
}

// find is hold for a budget that may have no entry: then it returns nil, with nothing locked.
func (s *shadow) find(it ratelimit.Item, now ratelimit.Instant) (*entry, *shadowShard) {
	sh := &s.shards[it.Key.Lo%shadowShards]
	sh.mu.Lock()
	e := sh.entries[it.Key]
	if e == nil {
		sh.mu.Unlock()
		return nil, nil
	}
	e.turn(it.Policy, now)
	return e, sh
}

// room makes room for one more if it can.
func (sh *shadowShard) room(most int, now ratelimit.Instant) bool {
	if len(sh.entries) < most {
		return true
	}
	if d := now - sh.purged; 0 <= d && d < purgeEvery {
		return false
	}
	sh.purged = now
	for k, e := range sh.entries {
		if e.over(now) {
			delete(sh.entries, k)
		}
	}
	return len(sh.entries) < most
}

// over tells that an entry says no more than none would.
func (e *entry) over(now ratelimit.Instant) bool {
	shape := e.policy.Shape()
	return !e.settling && ratelimit.Over(shape, e.mine.Word, now) && ratelimit.Over(shape, e.heard.Word, now)
}

// turn brings an entry into a policy's shape and, of windows, into the present one.
func (e *entry) turn(p *ratelimit.Policy, now ratelimit.Instant) {
	tokens := p.Algorithm() == ratelimit.TokenBucket
	if e.policy != p {
		if shape := e.policy.Shape(); shape != p.Shape() {
			e.mine, e.heard = p.Convert(shape, e.mine, now), p.Convert(shape, e.heard, now)
			e.owed = ratelimit.State{Word: uint64(count(e.owed))}
			if !tokens {
				e.owed.Word |= e.mine.Word >> 32 << 32
			}
		}
		e.policy = p
	}
	if !tokens {
		index, _ := p.Window(now)
		e.roll(index)
	}
}

// roll begins a window, unless it or a later one has begun.
func (e *entry) roll(index uint32) {
	e.mine, e.heard, e.owed = rolled(e.mine, index), rolled(e.heard, index), rolled(e.owed, index)
}

func rolled(s ratelimit.State, index uint32) ratelimit.State {
	switch d := int32(index - tag(s)); {
	case d == 1:
		return ratelimit.State{Word: uint64(index) << 32, Prev: count(s)}
	case d > 1:
		return ratelimit.State{Word: uint64(index) << 32}
	}
	return s
}

func tag(s ratelimit.State) uint32   { return uint32(s.Word >> 32) }
func count(s ratelimit.State) uint32 { return uint32(s.Word) }

// share is a node's part of n, rounded up.
func share(n uint32, nodes int) uint32 {
	return uint32((uint64(n) + uint64(nodes) - 1) / uint64(nodes))
}

// needed is the time in which n tokens refill at a node's share of the rate.
func needed(p *ratelimit.Policy, n uint32, nodes int) int64 {
	hi, lo := bits.Mul64(uint64(p.TokenTime(n)), uint64(nodes))
	if hi > 0 || lo > 1<<62 {
		return 1 << 62
	}
	return int64(lo)
}

// level is what is gone of this node's share: what it was admitted, or its share of what all were, whichever is more. A
// node that was given more than its share gets nothing when it is alone, one that was given less no more than its share
// of the rest.
func (e *entry) level(nodes int) ratelimit.State {
	s := e.mine
	if e.policy.Algorithm() == ratelimit.TokenBucket { // a share of the rate, of the same debt
		s.Word, s.Prev = max(s.Word, e.heard.Word), max(s.Prev, e.heard.Prev)
		return s
	}
	if tag(e.heard) == tag(s) {
		s.Word = s.Word>>32<<32 | uint64(max(count(s), share(count(e.heard), nodes)))
		s.Prev = max(s.Prev, share(e.heard.Prev, nodes))
	}
	return s
}

// decide is the answer of this node alone: the policy's rule with the node's share of the limit. The entry is in the
// policy's shape and window.
func (e *entry) decide(cost uint32, now ratelimit.Instant, ahead int64, nodes int) (_ ratelimit.State, d ratelimit.Decision) {
	p := e.policy
	if p.Algorithm() != ratelimit.TokenBucket {
		withheld := uint64(p.Limit() - share(p.Limit(), nodes))
		s := e.level(nodes)
		s.Word += withheld
		s, d := p.Decide(s, cost, now)
		s.Word -= withheld
		return s, d
	}
	s := e.level(nodes)
	if cost > p.Quota() {
		return p.Decide(s, cost, now)
	}
	if p.SteppedBack(int64(s.Word), s.Prev, now) {
		s.Word = uint64(int64(now) + p.Tolerance())
	}
	need := needed(p, cost, nodes)
	tolerance := max(p.Tolerance(), need) // a share of a burst is at least this one
	tat := max(int64(s.Word), int64(now))
	next := tat + need
	over := next - int64(now) - tolerance
	if over > ahead {
		p.RefuseTokens(&d, tat, over, now)
		return s, d
	}
	s.Word = uint64(next)
	if far := next - int64(now) - p.Tolerance(); far > 0 { // no clock that was set back
		s.Prev = max(s.Prev, uint32(far/1e6+1))
	}
	p.AdmitTokens(&d, next, now)
	if ahead > 0 {
		d.WaitMs = uint32(max(over+1e6-1, 0) / 1e6)
	}
	return s, d
}

// look is what spend would answer.
func (s *shadow) look(it ratelimit.Item, now ratelimit.Instant, nodes int) ratelimit.Decision {
	e, sh := s.hold(it, now)
	defer sh.mu.Unlock()
	_, d := e.decide(it.Spend(), now, 0, nodes)
	return d
}

// spend decides alone, if need be so far ahead (nanoseconds, token buckets only). What it admits is owed to Redis,
// unless Redis is going to be asked all the same.
func (s *shadow) spend(it ratelimit.Item, now ratelimit.Instant, ahead int64, nodes int, owe bool) ratelimit.Decision {
	e, sh := s.hold(it, now)
	defer sh.mu.Unlock()
	if e.shared {
		s.overflowed.Add(1)
	}
	state, d := e.decide(it.Spend(), now, ahead, nodes)
	if e.mine = state; d.Allowed && owe {
		e.owe(it.Spend(), now)
	}
	return d
}

func (e *entry) owes() bool { return count(e.owed)|e.owed.Prev != 0 }

func (e *entry) owe(cost uint32, now ratelimit.Instant) {
	if !e.owes() {
		e.since = now
	}
	switch {
	case e.shared:
	case e.policy.Algorithm() == ratelimit.TokenBucket:
		e.owed.Word = min(e.owed.Word+uint64(cost), ratelimit.MaxLimit)
	default:
		e.owed = rolled(e.owed, tag(e.mine))
		e.owed.Word += uint64(cost)
	}
}

// owe books what spend has admitted and Redis did not hear of.
func (s *shadow) owe(it ratelimit.Item, now ratelimit.Instant) {
	e, sh := s.hold(it, now)
	defer sh.mu.Unlock()
	e.owe(it.Spend(), now)
}

// booked is where a spend was booked, besides in this node's share.
type booked int

const (
	bookedOnly  booked = iota // nowhere
	bookedThere               // at Redis
	bookedHere                // in what is owed to Redis
)

// giveBack takes back what was spent at a moment. It reports whether nothing is left to be given back at Redis.
func (s *shadow) giveBack(it ratelimit.Item, at ratelimit.Instant, nodes int, where booked) bool {
	e, sh := s.hold(it, at)
	defer sh.mu.Unlock()
	p, cost := it.Policy, it.Spend()
	if p.Algorithm() == ratelimit.TokenBucket {
		back := func(s *ratelimit.State, d int64) { s.Word = uint64(max(int64(s.Word)-d, 0)) }
		back(&e.mine, needed(p, cost, nodes))
		switch {
		case where == bookedThere:
			back(&e.heard, p.TokenTime(cost))
			return false
		case where == bookedHere && !e.shared:
			told := e.owed.Word < uint64(cost)
			e.owed.Word -= min(e.owed.Word, uint64(cost))
			return !told
		}
		return true
	}
	index, _ := p.Window(at)
	less(&e.mine, index, cost)
	switch {
	case where == bookedThere:
		less(&e.heard, index, cost)
		return false
	case where == bookedHere && !e.shared:
		return less(&e.owed, index, cost)
	}
	return true
}

// less takes cost from the count of a window, which may be the previous one, and reports whether it was there.
func less(s *ratelimit.State, index, cost uint32) bool {
	switch tag(*s) - index {
	case 0:
		if count(*s) < cost {
			s.Word -= uint64(count(*s))
			return false
		}
		s.Word -= uint64(cost)
		return true
	case 1:
		if s.Prev < cost {
			s.Prev = 0
			return false
		}
		s.Prev -= cost
		return true
	}
	return true // over
}

// claim is what a call tells Redis of a budget after a failure.
type claim struct {
	failures uint32 // of the store, when the call began
	known    bool   // there is something to tell: the rest
	born     int64
	heard    ratelimit.State
	mine     ratelimit.State // token bucket: what to raise the state to, if tokens are owed
	owed     ratelimit.State // windows: the call takes it over
	since    ratelimit.Instant
}

// claim prepares a call. It reports false while another one brings what is owed.
func (s *shadow) claim(it ratelimit.Item, now ratelimit.Instant, failures uint32) (claim, bool) {
	c := claim{failures: failures}
	e, sh := s.find(it, now)
	if e == nil {
		return c, true
	}
	defer sh.mu.Unlock()
	if e.settling {
		return c, false
	}
	owes := e.owes()
	if e.failures == failures && !owes {
		return c, true
	}
	c.known, c.born, c.heard = true, e.born, e.heard
	if !owes {
		return c, true
	}
	c.since = e.since
	if it.Policy.Algorithm() == ratelimit.TokenBucket {
		c.mine = e.mine
	}
	c.owed, e.owed, e.settling = e.owed, ratelimit.State{}, true
	return c, true
}

// args are the arguments of a script that tell a claim.
func (c *claim) args(p *ratelimit.Policy) []any {
	if p.Algorithm() != ratelimit.TokenBucket {
		return []any{c.born, tag(c.heard), count(c.heard), c.heard.Prev, tag(c.owed), count(c.owed), c.owed.Prev, int64(c.since) / 1e3}
	}
	owed := p.TokenTime(uint32(min(c.owed.Word, uint64(p.Quota()))))
	return []any{c.born, c.heard.Word / 1e9, c.heard.Word % 1e9, c.mine.Word / 1e9, c.mine.Word % 1e9, int64(c.since) / 1e3, owed}
}

// release ends a claim whose call was not answered, or told nothing.
func (s *shadow) release(it ratelimit.Item, now ratelimit.Instant, c *claim) {
	if c.owed.Word == 0 {
		return
	}
	e, sh := s.find(it, now)
	if e == nil {
		return
	}
	defer sh.mu.Unlock()
	e.settling, e.since = false, c.since
	if it.Policy.Algorithm() == ratelimit.TokenBucket {
		e.owed.Word += c.owed.Word
		return
	}
	e.owed = rolled(e.owed, tag(c.owed))
	c.owed = rolled(c.owed, tag(e.owed))
	e.owed.Word += uint64(count(c.owed))
	e.owed.Prev += c.owed.Prev
}

// note takes in what Redis answered, and what was spent by it, if this node has not booked that already. It ends the
// claim. When there is no room for another entry nothing is remembered.
func (s *shadow) note(it ratelimit.Item, r reply, spent uint32, nodes int, c *claim) {
	e, sh := s.hold(it, r.now)
	defer sh.mu.Unlock()
	if e.shared {
		return
	}
	p := it.Policy
	if r.reset && e.born < r.born { // heard of only now: what was admitted before is no longer used
		e.mine = p.Fresh(r.now)
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		if spent > 0 {
			need := needed(p, spent, nodes)
			next := max(int64(e.mine.Word), int64(r.now)) + need
			e.mine.Word = uint64(min(next, int64(r.now)+max(p.Tolerance(), need)))
		}
	} else if now := tag(r.state); int32(now-tag(e.mine)) >= 0 {
		e.roll(now)
		e.mine.Word += uint64(spent)
	}
	if r.now >= e.heardAt { // answers may come out of order
		e.born, e.heard, e.heardAt = r.born, r.state, r.now
	}
	e.failures = c.failures
	if c.owed.Word != 0 {
		e.settling = false
	}
}

// forget drops what is known of a key.
func (s *shadow) forget(k ratelimit.Key) {
	sh := &s.shards[k.Lo%shadowShards]
	sh.mu.Lock()
	delete(sh.entries, k)
	sh.mu.Unlock()
}

// unsettled returns the budgets of a shard that have to be told to Redis: those that owe, or all that are not over. It
// drops those that are.
func (s *shadow) unsettled(shard int, now ratelimit.Instant, failures uint32, all bool) []ratelimit.Item {
	sh := &s.shards[shard]
	sh.mu.Lock()
	defer sh.mu.Unlock()
	var items []ratelimit.Item
	for k, e := range sh.entries {
		owes := e.owes()
		switch {
		case e.shared || e.settling:
		case !owes && e.over(now):
			delete(sh.entries, k)
		case owes, all && e.failures != failures && !ratelimit.Over(e.policy.Shape(), e.heard.Word, now):
			items = append(items, ratelimit.Item{Key: k, Policy: e.policy})
		}
	}
	return items
}
