package ratelimit

import (
	"context"
	"net/netip"
	"sync"
	"time"
)

// loginPatience is how long an attempt waits for the outcome of others, and how long a failure counts in full: a few
// password hashes of a busy node.
const loginPatience = 5 * time.Second

// LoginAttempt names whom an attempt to sign in counts against.
type LoginAttempt struct {
	// IP is the client's address; IPv6 counts by its /64. The zero Addr is one that the operator has exempted: only the
	// account is counted.
	IP netip.Addr
	// Account is the canonical name of the account, whether it exists or not: the text that also finds it.
	Account string
	// Device is the id of a device that has signed in to this very account before, "" for none. The caller has verified
	// that. Such an attempt counts against the account on this device instead of the account at large, so that strangers
	// do not keep the owner out.
	Device string
	// Shown is called for the text by which operators are shown the account while NameAccount has not been called: what was
	// typed may be anything, a password too. nil: nothing is shown.
	Shown func() string
}

// Login is the throttle in front of passwords: buckets LoginIP and LoginAccount, both consulted and reserved together,
// before the password is looked at. Failures stay counted, successes are given back.
//
// A budget that is used up by reservations whose outcome is open does not lock: an attempt that meets one waits until one
// of them is given back, and is refused once all of them turned out to be failures, or after five seconds. Only what is
// given back admits a waiting attempt. Whatever the estimate of a sliding window says at a window's edge, open
// reservations, and failures of the last five seconds, count in full: a hundred parallel guesses get as many
// verifications as the limit says, and no more.
//
// All of that is of this node. On several nodes the open reservations of others are not seen: an attempt that meets only
// those is refused, as by failures; what the store promises holds for the sum.
//
// It is safe for concurrent use, holds memory only for attempts that are under way and for failures of the last five
// seconds, and owns no goroutine.
type Login struct {
	limiter *Limiter
	hasher  Hasher

	mu     sync.Mutex // never held over a call of the store
	gates  map[Key]*gate
	recent []failure // of all gates, to find those that are over
}

// NewLogin makes a throttle over a limiter's store.
func NewLogin(l *Limiter, h Hasher) *Login {
	return &Login{limiter: l, hasher: h, gates: make(map[Key]*gate)}
}

// gate is what this node knows of one budget's attempts.
type gate struct {
	asking  int           // attempts that are asking the store
	held    int           // reservations whose outcome is open
	waiting int           // attempts that wait for outcomes
	failed  []Instant     // until when failures count in full, the oldest first
	refunds int           // reservations given back since the gate was made
	changed chan struct{} // closed when waiting attempts have to look again
}

// failure is a failure of one gate, as long as it counts in full.
type failure struct {
	key   Key
	until Instant
}

// room is how many more attempts may be under way or have failed lately.
func (g *gate) room(p *Policy) int { return int(p.limit) - g.held - len(g.failed) }

// wake lets the waiting attempts look again.
func (g *gate) wake() {
	close(g.changed)
	g.changed = make(chan struct{})
}

// LoginReservation is room for the verification of one password. Exactly one of Keep and Refund must be called, once.
type LoginReservation struct {
	login   *Login
	items   []Item         // enforced
	at      Decision       // the admission to them
	counted []countedSpend // of buckets in count mode, where they admitted
}

// countedSpend is a spend in count mode.
type countedSpend struct {
	item Item
	at   Decision
}

// Reserve makes room for one attempt in every budget that it counts against, or in none.
//
// A nil reservation without an error is a refusal: the decision tells the bucket and the wait, as for any other limit. The
// error is ctx's own, when it ends while the attempt waits.
func (t *Login) Reserve(ctx context.Context, a LoginAttempt) (*LoginReservation, Decision, error) {
	address := t.limiter.Policy(LoginIP, nil, nil)
	if !a.IP.IsValid() {
		address = nil
	}
	var enforced, counted []Item
	for _, it := range []Item{
		{Key: t.hasher.IP(LoginIP, a.IP), Policy: address},
		{Key: t.accountKey(a), Policy: t.limiter.Policy(LoginAccount, nil, nil)},
	} {
		switch {
		case it.Policy == nil: // switched off
		case it.Policy.count:
			counted = append(counted, it)
		default:
			enforced = append(enforced, it)
		}
	}
	d, err := t.reserve(ctx, enforced)
	if err != nil {
		return nil, d, err
	}
	now := t.limiter.Now()
	if !d.Allowed {
		if it := enforced[d.Item]; t.limiter.note(it, refused, d.WaitMs, now) {
			t.name(it, a)
		}
		return nil, d, nil
	}
	r := &LoginReservation{login: t, items: enforced, at: d}
	for _, it := range enforced {
		t.limiter.note(it, allowed, 0, now)
	}
	for _, it := range counted {
		d := t.limiter.Check(ctx, d.At, it)
		if d.Unnamed {
			t.name(it, a)
		}
		if !d.Counted {
			r.counted = append(r.counted, countedSpend{it, d})
		}
	}
	return r, d, nil
}

// name says whom an item of an attempt counts against.
func (t *Login) name(it Item, a LoginAttempt) {
	switch b := it.Policy.bucket; {
	case b == LoginIP:
		t.limiter.Name(b, it.Key, Name{Text: AddressText(a.IP)})
	case a.Shown != nil:
		t.limiter.Name(b, it.Key, Name{Text: a.Shown()})
	}
}

// NameAccount says by which text operators are to be shown the account of an attempt, now that it is known to exist.
func (t *Login) NameAccount(a LoginAttempt, text string) {
	t.limiter.Name(LoginAccount, t.accountKey(a), Name{Text: text})
}

func (t *Login) accountKey(a LoginAttempt) Key {
	if a.Device != "" {
		return t.hasher.AccountDevice(LoginAccount, a.Account, a.Device)
	}
	return t.hasher.Account(LoginAccount, a.Account)
}

// Forget lets the failures of a budget that this node knows of count in full no longer: it was reset.
func (t *Login) Forget(k Key) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if g := t.gates[k]; g != nil {
		g.failed = nil
		g.refunds++ // who waits asks again
		g.wake()
		t.settled(k, g)
	}
}

func (t *Login) reserve(ctx context.Context, items []Item) (Decision, error) {
	if len(items) == 0 {
		return Decision{At: t.limiter.Now(), Allowed: true}, nil
	}
	var patience <-chan time.Time
	for {
		seen := t.ask(items)
		d := t.limiter.store.TakeAll(ctx, t.limiter.Now(), items)
		wait := t.answered(items, &d)
		if wait == nil {
			return d, nil
		}
		if patience == nil {
			timer := time.NewTimer(loginPatience)
			defer timer.Stop()
			patience = timer.C
		}
		// The refusing budget may have been spent by attempts that are about to succeed.
		again, err := t.outcome(ctx, items[d.Item], wait, seen[d.Item], patience)
		if err != nil || !again {
			return d, err
		}
	}
}

// ask notes that an attempt asks the store about items, and returns how many reservations of each were given back before.
func (t *Login) ask(items []Item) (seen [2]int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.limiter.Now()
	t.forget(now)
	for i, it := range items {
		g := t.gates[it.Key]
		if g == nil {
			g = &gate{changed: make(chan struct{})}
			t.gates[it.Key] = g
		}
		g.forget(now)
		g.asking++
		seen[i] = g.refunds
	}
	return seen
}

// answered takes note of the store's answer. What the store admits and this node may not is given back and becomes a
// refusal. Of a refusal it returns the gate to wait at.
func (t *Login) answered(items []Item, d *Decision) *gate {
	t.mu.Lock()
	now := t.limiter.Now()
	booked := *d
	wait := d.WaitMs
	for i, it := range items {
		if g := t.gates[it.Key]; g.room(it.Policy) <= 0 {
			if d.Allowed {
				*d = Decision{Policy: it.Policy, At: d.At, Item: uint8(i)}
				wait = 0
			}
			// No sooner than the failures that count in full leave room: whoever comes after the wait is admitted.
			wait = max(wait, g.wait(it.Policy, now))
		}
	}
	if !d.Allowed {
		d.WaitMs = max(wait, 1)
	}
	var at *gate
	for i, it := range items {
		g := t.gates[it.Key]
		g.asking--
		switch {
		case d.Allowed:
			g.held++
		case i == int(d.Item):
			g.waiting++
			at = g
		default:
			t.settled(it.Key, g)
		}
	}
	t.mu.Unlock()
	if booked.Allowed && !d.Allowed {
		for i, it := range items {
			t.limiter.store.Refund(context.Background(), booked.Booking(i), it)
		}
	}
	return at
}

// outcome waits at a gate and reports whether to ask the store again: yes once a reservation was given back since seen, no
// when there is nothing left to wait for or patience ends.
func (t *Login) outcome(ctx context.Context, it Item, g *gate, seen int, patience <-chan time.Time) (again bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for over := false; ; {
		again = g.refunds != seen
		if again || over || g.asking+g.held == 0 {
			g.waiting--
			t.settled(it.Key, g)
			return again && !over, err
		}
		changed := g.changed
		t.mu.Unlock()
		select {
		case <-changed:
		case <-patience:
			over = true
		case <-ctx.Done():
			over, err = true, ctx.Err()
		}
		t.mu.Lock()
	}
}

// settled lets the attempts at a gate know when no outcome is open any more, and forgets the gate when nothing needs it.
func (t *Login) settled(k Key, g *gate) {
	if g.asking+g.held > 0 {
		return
	}
	g.wake()
	if g.waiting == 0 && len(g.failed) == 0 {
		delete(t.gates, k)
	}
}

// forget drops failures that no longer count in full.
func (t *Login) forget(now Instant) {
	for len(t.recent) > 0 && t.recent[0].until <= now {
		k := t.recent[0].key
		t.recent = t.recent[1:]
		if g := t.gates[k]; g != nil {
			g.forget(now)
			t.settled(k, g)
		}
	}
}

// Keep counts the attempt as a failure. If that used up a budget it returns its bucket, else 0: a lock begins with it.
func (r *LoginReservation) Keep() (locked Bucket) {
	t := r.login
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.limiter.Now()
	for _, it := range r.items {
		g, until := t.gates[it.Key], now.Add(fullFor(it.Policy))
		g.held--
		g.failed = append(g.failed, until)
		t.recent = append(t.recent, failure{it.Key, until})
		t.settled(it.Key, g)
	}
	if r.at.Policy != nil && r.at.Remaining == 0 {
		return r.at.Policy.bucket
	}
	return 0
}

// Refund gives the attempt back: the password was right, or was never looked at. It does so also when ctx has ended.
func (r *LoginReservation) Refund(ctx context.Context) {
	t, ctx := r.login, context.WithoutCancel(ctx)
	t.limiter.Refund(ctx, r.at, r.items...)
	for _, c := range r.counted {
		t.limiter.Refund(ctx, c.at, c.item)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, it := range r.items {
		g := t.gates[it.Key]
		g.held--
		g.refunds++
		g.wake()
		t.settled(it.Key, g)
	}
}

// forget drops the failures that no longer count in full.
func (g *gate) forget(now Instant) {
	for len(g.failed) > 0 && g.failed[0] <= now {
		g.failed = g.failed[1:]
	}
}

// wait is the time in milliseconds until the failures that count in full leave room for one attempt; for reservations
// whose outcome is open there is no telling.
func (g *gate) wait(p *Policy, now Instant) uint32 {
	last := len(g.failed) - int(p.limit) // of those that have to be over
	if last < 0 || p.limit == 0 {
		return 0
	}
	return uint32(max(int64(g.failed[last]-now)+1e6-1, 0) / 1e6)
}

// fullFor is how long a failure counts in full: no longer than a window, so that no wait is.
func fullFor(p *Policy) time.Duration {
	return min(loginPatience, time.Duration(p.scaleMs)*time.Millisecond)
}
