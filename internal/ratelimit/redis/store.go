package redis

import (
	"context"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	goredis "github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/logging"

	"converger/internal/ratelimit"
)

// keyPrefix begins the names of all keys. What follows is in braces, as a Redis Cluster places keys by it.
const keyPrefix = "converger:limit:"

// Config is what a Store is made of.
type Config struct {
	// Target is the Redis to count at. Required.
	Target Target
	// Installation tells the nodes that share limits from others that use the same Redis: any text that they have in
	// common and others have not. It becomes part of a key's name. Required.
	Installation string
	// Nodes is the number of live nodes, 1 for this one alone, if somebody else knows it; else those that are heard of
	// at Redis are counted.
	Nodes func() int
	// Clock is read to learn how far Redis' own is from it. Required.
	Clock ratelimit.Clock
	// MaxKeys bounds the budgets that this node remembers for when Redis is away; 0 means DefaultMaxKeys. One costs
	// about 200 bytes.
	MaxKeys int
	// Registerer receives the metrics; nil for none.
	Registerer prometheus.Registerer
	// Logger; nil means slog.Default.
	Logger *slog.Logger
}

// DefaultMaxKeys is the default of Config.MaxKeys.
const DefaultMaxKeys = 1_000_000

// Store implements ratelimit.Store by scripts at Redis.
type Store struct {
	client   goredis.UniversalClient
	clock    ratelimit.Clock
	nodes    func() int
	log      *slog.Logger
	prefix   string
	id       string        // of this node, in the list of nodes
	roster   string        // the key of that list
	test     bool          // the caller's time is Redis'
	patience time.Duration // of a check, in all

	shadow   *shadow
	breaker  *breaker
	failures atomic.Uint32 // calls that failed, counted from 1
	failed   atomic.Pointer[string]
	careful  atomic.Int64 // Unix ns of the clock until when this node keeps to its share
	offset   atomic.Int64 // of Redis' clock from ours, ns
	present  atomic.Int64 // nodes heard of at Redis
	fewer    atomic.Int64 // Unix ns of the clock since when it has been fewer; 0: it has not

	outage outage
	m      metrics
}

var _ ratelimit.Store = (*Store)(nil)

// quiet silences the client's own log, which writes to standard error: every failure comes back as an error.
var quiet = sync.OnceFunc(logging.Disable)

// New makes a store. It connects to nobody yet. The error is of the configuration or of the registration of metrics.
func New(c Config) (*Store, error) {
	if len(c.Target.addrs) == 0 || c.Installation == "" || c.Clock.IsZero() || c.MaxKeys < 0 {
		return nil, errors.New("ratelimit/redis: a target, an installation, a clock and no negative number of keys are required")
	}
	quiet()
	if c.MaxKeys == 0 {
		c.MaxKeys = DefaultMaxKeys
	}
	s := &Store{
		client: c.Target.client(), clock: c.Clock, nodes: c.Nodes, log: c.Logger, prefix: keyPrefix, id: newID(),
		roster: keyPrefix + "nodes:{" + c.Installation + "}",
		shadow: newShadow(c.MaxKeys), breaker: newBreaker(), patience: timeout,
	}
	s.failures.Store(1)
	s.present.Store(1)
	if s.log == nil {
		s.log = slog.Default()
	}
	if s.nodes == nil {
		s.nodes = func() int { return int(s.present.Load()) }
	}
	s.outage.log, s.outage.clock = s.log, ratelimit.NewClock()
	if err := s.register(c.Registerer); err != nil {
		return nil, fmt.Errorf("ratelimit/redis: register metrics: %w", err)
	}
	return s, nil
}

// Close ends the connections. Nobody may use the store any more.
func (s *Store) Close() error { return s.client.Close() }

// Backend implements ratelimit.Store.
func (s *Store) Backend(ratelimit.Bucket) string { return "redis" }

// key is the name of a budget's key: its digest, which nobody without the hashing key can tell the subject from.
func (s *Store) key(k ratelimit.Key) string {
	b := make([]byte, 0, len(s.prefix)+2+32)
	b = append(b, s.prefix...)
	b = append(b, '{')
	var digest [16]byte
	binary.BigEndian.PutUint64(digest[:], k.Hi)
	binary.BigEndian.PutUint64(digest[8:], k.Lo)
	b = hex.AppendEncode(b, digest[:])
	return string(append(b, '}'))
}

// live is the number of nodes that share the limits.
func (s *Store) live() int { return max(s.nodes(), 1) }

// serverTime is Redis' time as far as known.
func (s *Store) serverTime(now ratelimit.Instant) ratelimit.Instant {
	return now + ratelimit.Instant(s.offset.Load())
}

// learn keeps the offset within what an answer proves: Redis read its clock between sending and receiving.
func (s *Store) learn(sent, received, server ratelimit.Instant) {
	least, most := int64(server-received), int64(server-sent)
	for {
		was := s.offset.Load()
		is := min(max(was, least), most)
		if is == was || s.offset.CompareAndSwap(was, is) {
			return
		}
	}
}

// timeArgs are the first arguments of a script: no time, for Redis to take its own.
func (s *Store) timeArgs(now ratelimit.Instant) []any {
	if s.test {
		return []any{int64(now) / 1e9, int64(now) % 1e9}
	}
	return []any{"", ""}
}

// run has scripts done and books how that went.
func (s *Store) run(ctx context.Context, ops []op) error {
	sent := s.clock.Now()
	err := do(ctx, s.client, ops)
	received := s.clock.Now()
	if err != nil {
		s.failures.Add(1)
		s.failed.Store(&ops[0].key)
		if s.breaker.report(received, true) {
			s.log.Debug("rate limits: too many calls to Redis fail, it is not asked until it answers probes",
				slog.String("reason", reasonOf(err)))
		}
		return err
	}
	s.breaker.report(received, false)
	if a := ops[0].answer; !s.test && len(a) >= 3 { // of a refund one number
		s.learn(sent, received, ratelimit.Instant(a[1]*1e9+a[2]))
	}
	return nil
}

// Take implements ratelimit.Store.
func (s *Store) Take(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) ratelimit.Decision {
	if s.breaker.is(closed) {
		return s.decide(ctx, now, []ratelimit.Item{it}, 0)
	}
	s.m.fallen[reasonOpen].Inc() // without Redis a check is as cheap as any in memory
	s.outage.alone()
	d := s.shadow.spend(it, s.serverTime(now), 0, s.live(), true)
	d.Alone = ratelimit.AllAlone
	return d
}

// TakeAll implements ratelimit.Store. Items have a key each, which a Redis Cluster keeps in different places: all are
// looked at before any is spent, and what was spent is given back when somebody else came in between.
func (s *Store) TakeAll(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item) ratelimit.Decision {
	return s.decide(ctx, now, items, 0)
}

// Reserve implements ratelimit.Store.
func (s *Store) Reserve(ctx context.Context, now ratelimit.Instant, it ratelimit.Item, maxWait time.Duration) ratelimit.Decision {
	ahead := min(max(maxWait, 0), ratelimit.MaxReserve).Truncate(time.Millisecond).Nanoseconds()
	if it.Policy.Algorithm() != ratelimit.TokenBucket {
		ahead = 0
	}
	d := s.decide(ctx, now, []ratelimit.Item{it}, ahead)
	if d.Allowed && ahead == 0 {
		d.WaitMs = 0
	}
	return d
}

// decide asks Redis, or decides alone when it can't be asked in time.
func (s *Store) decide(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item, ahead int64) ratelimit.Decision {
	now = s.serverTime(now)
	for i, it := range items {
		if p := it.Policy; p.Limit() == 0 { // nothing to ask for
			_, d := p.Decide(p.Fresh(now), it.Spend(), now)
			d.Item = uint8(i)
			return d
		}
	}
	if !s.breaker.is(closed) {
		s.m.fallen[reasonOpen].Inc()
		s.outage.alone()
		return s.alone(now, items, ahead, true)
	}
	t := transaction{s: s, now: now, items: items, ahead: ahead}
	if !t.claim() {
		s.m.fallen[reasonSettling].Inc()
		return s.alone(now, items, ahead, true)
	}
	// Soon after an outage the others may not have told Redis yet what they admitted without it.
	var own ratelimit.Decision
	if t.booked = s.clock.Now() < ratelimit.Instant(s.careful.Load()); t.booked {
		if own = s.alone(now, items, ahead, false); !own.Allowed {
			s.m.fallen[reasonSettling].Inc()
			t.release(items)
			return own
		}
	}
	// Whoever gives up leaves the spend in doubt, so the call goes on.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.patience)
	defer cancel()
	d, err := t.ask(ctx)
	if err == nil {
		s.outage.well()
		return d
	}
	s.fell(err)
	t.release(items)
	if !t.booked {
		return s.alone(now, items, ahead, true)
	}
	for _, it := range items {
		s.shadow.owe(it, now)
	}
	return own
}

// alone decides without Redis, by this node's share of each limit. What it admits is owed to Redis, unless Redis is going
// to be asked all the same.
func (s *Store) alone(now ratelimit.Instant, items []ratelimit.Item, ahead int64, owe bool) ratelimit.Decision {
	nodes := s.live()
	var all strictest
	if len(items) > 1 {
		for i, it := range items {
			all.add(i, s.shadow.look(it, now, nodes))
		}
		if d := all.decision(); !d.Allowed {
			d.Alone = ratelimit.AllAlone
			return d
		}
		all = strictest{}
	}
	for i, it := range items {
		d := s.shadow.spend(it, now, ahead, nodes, owe)
		all.add(i, d)
		if !d.Allowed { // somebody came in between
			for _, spent := range items[:i] {
				s.shadow.giveBack(spent, now, nodes, bookedAt(owe))
			}
			break
		}
	}
	d := all.decision()
	d.Alone = ratelimit.AllAlone
	return d
}

func bookedAt(owed bool) booked {
	if owed {
		return bookedHere
	}
	return bookedOnly
}

// strictest gathers the decisions on several items.
type strictest struct {
	d  ratelimit.Decision
	at ratelimit.Instant
}

func (s *strictest) add(i int, d ratelimit.Decision) {
	d.Item = uint8(i)
	s.at = max(s.at, d.At)
	if i == 0 || d.Stricter(s.d) {
		s.d = d
	}
}

func (s *strictest) decision() ratelimit.Decision {
	s.d.At = s.at
	return s.d
}

// transaction is a request that asks Redis.
type transaction struct {
	s      *Store
	now    ratelimit.Instant
	items  []ratelimit.Item
	ahead  int64
	claims []claim
	booked bool // this node has booked the spend already
}

// claim takes over what is owed on the items. It reports false if another call is doing so.
func (t *transaction) claim() bool {
	failures := t.s.failures.Load()
	t.claims = make([]claim, len(t.items))
	for i, it := range t.items {
		c, ok := t.s.shadow.claim(it, t.now, failures)
		if !ok {
			t.release(t.items[:i])
			return false
		}
		t.claims[i] = c
	}
	return true
}

// release ends the claims on the first items: nothing was told.
func (t *transaction) release(items []ratelimit.Item) {
	for i, it := range items {
		t.s.shadow.release(it, t.now, &t.claims[i])
	}
}

// ask asks Redis.
func (t *transaction) ask(ctx context.Context) (ratelimit.Decision, error) {
	if len(t.items) > 1 {
		replies, err := t.run(ctx, "look")
		if err != nil {
			return ratelimit.Decision{}, err
		}
		if d := t.decision(replies, true); !d.Allowed {
			t.undo()
			t.release(t.items)
			return d, nil
		}
	}
	replies, err := t.run(ctx, "take")
	if err != nil {
		return ratelimit.Decision{}, err
	}
	d := t.decision(replies, false)
	nodes := t.s.live()
	for i, it := range t.items {
		spent := uint32(0)
		if replies[i].free && d.Allowed && !t.booked {
			spent = it.Spend()
		}
		t.s.shadow.note(it, replies[i], spent, nodes, &t.claims[i])
	}
	if !d.Allowed {
		for i, it := range t.items {
			if replies[i].free { // somebody came in between
				t.s.refund(ctx, replies[i].now, it)
			}
		}
		t.undo()
	}
	return d, nil
}

// undo takes back what this node has booked and Redis refused.
func (t *transaction) undo() {
	if !t.booked {
		return
	}
	for _, it := range t.items {
		t.s.shadow.giveBack(it, t.now, t.s.live(), bookedOnly)
	}
}

// run has the script of each item done.
func (t *transaction) run(ctx context.Context, mode string) ([]reply, error) {
	ops := make([]op, len(t.items))
	for i, it := range t.items {
		ops[i] = t.s.op(mode, it, t.now, t.ahead, &t.claims[i])
	}
	if err := t.s.run(ctx, ops); err != nil {
		return nil, err
	}
	replies := make([]reply, len(ops))
	for i := range ops {
		var ok bool
		if replies[i], ok = newReply(t.items[i].Policy, ops[i].answer); !ok {
			return nil, errMalformed
		}
	}
	return replies, nil
}

// op is the script of an item; mode is "take", "look" or "settle".
func (s *Store) op(mode string, it ratelimit.Item, now ratelimit.Instant, ahead int64, c *claim) op {
	p, cost := it.Policy, it.Spend()
	args := append(s.timeArgs(now), mode, p.Bucket().String(), p.ScaleMs(), p.Limit())
	if mode == "settle" {
		cost = 0
	}
	if p.Algorithm() == ratelimit.TokenBucket {
		need := p.Tolerance() + ahead + 1 // never free
		if cost <= p.Quota() {
			need = p.TokenTime(cost)
		}
		args = append(args, p.Quota(), need, p.Tolerance(), ahead)
	} else {
		args = append(args, cost)
	}
	if c.known {
		args = append(args, c.args(p)...)
	}
	return op{script: takeScripts[p.Algorithm()], key: s.key(it.Key), args: args}
}

// reply is what a script tells.
type reply struct {
	free  bool // the cost was, and was spent if the script was to spend
	now   ratelimit.Instant
	state ratelimit.State
	born  int64 // Unix µs
	reset bool  // by being reset, and others may still know of what was spent before
}

func newReply(p *ratelimit.Policy, a []int64) (reply, bool) {
	if len(a) != 8 || slices.Min(a) < 0 {
		return reply{}, false
	}
	r := reply{free: a[0] == 1, now: ratelimit.Instant(a[1]*1e9 + a[2]), born: a[6], reset: a[7] == 1}
	bounded := func(n int64) uint32 { return uint32(min(n, math.MaxInt32)) }
	if p.Algorithm() == ratelimit.TokenBucket {
		r.state = ratelimit.State{Word: uint64(a[3]*1e9 + a[4]), Prev: bounded(a[5])}
	} else {
		r.state = ratelimit.State{Word: uint64(a[3])<<32 | uint64(bounded(a[4])), Prev: bounded(a[5])}
	}
	return r, true
}

// decision is the answer to the request; look says that nothing was spent yet.
func (t *transaction) decision(replies []reply, look bool) ratelimit.Decision {
	var all strictest
	for i, it := range t.items {
		d := replies[i].decision(it.Policy, it.Spend(), t.ahead, look)
		all.add(i, d)
	}
	return all.decision()
}

func (r reply) decision(p *ratelimit.Policy, cost uint32, ahead int64, look bool) (d ratelimit.Decision) {
	if p.Algorithm() == ratelimit.TokenBucket {
		return r.tokens(p, cost, ahead, look)
	}
	index, into := p.Window(r.now)
	at := r.now
	if tag(r.state) == index+1 { // Redis' clock is behind
		into, at = 0, p.WindowStart(index+1)
	}
	used, prev, carried := count(r.state), r.state.Prev, uint32(0)
	if p.Algorithm() == ratelimit.SlidingWindow {
		carried = p.Carried(prev, into)
	}
	if !r.free {
		p.RefuseWindow(&d, prev, used, carried, cost, into, at)
		return d
	}
	if look {
		used += cost
	}
	p.AdmitWindow(&d, prev, used, carried, into, at)
	return d
}

func (r reply) tokens(p *ratelimit.Policy, cost uint32, ahead int64, look bool) (d ratelimit.Decision) {
	tat := max(int64(r.state.Word), int64(r.now))
	if cost > p.Quota() {
		return ratelimit.Decision{Policy: p, At: r.now, Remaining: p.Tokens(p.Tolerance() - tat + int64(r.now)), WaitMs: p.WindowMs()}
	}
	next := tat
	if !r.free || look {
		next += p.TokenTime(cost)
	}
	over := next - int64(r.now) - p.Tolerance()
	if !r.free {
		p.RefuseTokens(&d, tat, over, r.now)
		return d
	}
	p.AdmitTokens(&d, next, r.now)
	if ahead > 0 {
		d.WaitMs = uint32(max(over+1e6-1, 0) / 1e6)
	}
	return d
}

// Refund implements ratelimit.Store. One that Redis does not hear of is lost, which only counts more.
func (s *Store) Refund(ctx context.Context, b ratelimit.Booking, it ratelimit.Item) {
	where := bookedThere
	if b.Alone {
		where = bookedHere
	}
	if s.shadow.giveBack(it, b.At, s.live(), where) {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.patience)
	defer cancel()
	s.refund(ctx, b.At, it)
}

func (s *Store) refund(ctx context.Context, at ratelimit.Instant, it ratelimit.Item) {
	if s.breaker.is(closed) {
		args := append(s.timeArgs(at), int64(at)/1e6, it.Spend())
		if s.run(ctx, []op{{script: refundScript, key: s.key(it.Key), args: args}}) == nil {
			return
		}
	}
	s.m.fallen[reasonRefundLost].Inc()
}

// Peek implements ratelimit.Store. As a check does, it tells Redis what this node owes, and turns the state into the
// policy's shape. The error is of a Redis that can't be asked.
func (s *Store) Peek(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) (ratelimit.Usage, error) {
	p := it.Policy
	if p.Quota() == 0 && p.Algorithm() == ratelimit.TokenBucket { // it has no unit to count in
		return ratelimit.Usage{Policy: p}, nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.patience)
	defer cancel()
	now = s.serverTime(now)
	c, told := s.shadow.claim(it, now, s.failures.Load()) // else another call tells
	ops := []op{s.op("settle", it, now, 0, &c)}
	err := s.run(ctx, ops)
	r, ok := newReply(p, ops[0].answer)
	switch {
	case ok && told:
		s.shadow.note(it, r, 0, s.live(), &c)
	case told:
		s.shadow.release(it, now, &c)
	}
	if err != nil {
		return ratelimit.Usage{}, fmt.Errorf("ratelimit/redis: look at a budget: %w", err)
	}
	if !ok {
		return ratelimit.Usage{}, errMalformed
	}
	return p.Usage(r.state, r.now), nil
}

// Reset implements ratelimit.Store: at Redis, where the key remembers it as long as a node may know of what was spent
// before, and in what this node knows. The error is of a Redis that can't be asked.
func (s *Store) Reset(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	s.shadow.forget(it.Key)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.patience)
	defer cancel()
	p := it.Policy
	if p == nil || p.Quota() == 0 { // nothing is counted, unless that has just changed
		if err := s.client.Del(ctx, s.key(it.Key)).Err(); err != nil {
			return fmt.Errorf("ratelimit/redis: reset a budget: %w", err)
		}
		return nil
	}
	now = s.serverTime(now)
	rate := uint32(0)
	if p.Algorithm() == ratelimit.TokenBucket {
		rate = p.Limit()
	}
	args := append(s.timeArgs(now), int64(p.Ends(now)-now)/1e6+1, p.Bucket().String(), p.Algorithm().String(), p.ScaleMs(), rate)
	if err := do(ctx, s.client, []op{{script: resetScript, key: s.key(it.Key), args: args}}); err != nil {
		return fmt.Errorf("ratelimit/redis: reset a budget: %w", err)
	}
	return nil
}
