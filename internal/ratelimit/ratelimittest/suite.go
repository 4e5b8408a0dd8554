package ratelimittest

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"converger/internal/ratelimit"
)

// start is the first moment of a window of every scale up to an hour.
const start = ratelimit.Instant(500_000 * time.Hour)

var algorithms = []ratelimit.Algorithm{ratelimit.FixedWindow, ratelimit.SlidingWindow, ratelimit.TokenBucket}

// Run checks the laws of ratelimit.Store. newStore returns an empty store.
func Run(t *testing.T, newStore func(*testing.T) ratelimit.Store) {
	tests := []struct {
		name string
		run  func(*suite, ratelimit.Algorithm)
	}{
		{"exact under parallel callers", (*suite).exact},
		{"counts down and keeps subjects apart", (*suite).countsDown},
		{"a refusal leaves no trace", (*suite).refusalLeavesNoTrace},
		{"who waits as told is admitted", (*suite).obedient},
		{"a failed big cost is never seen", (*suite).bigCost},
		{"impossible costs and a limit of 0", (*suite).impossible},
		{"several items, all or nothing", (*suite).allOrNothing},
		{"several items under parallel callers", (*suite).allOrNothingParallel},
		{"refund", (*suite).refund},
		{"reserve", (*suite).reserve},
		{"a change of limit keeps past use", (*suite).changeLimit},
		{"a change of scale or algorithm starts from the use", (*suite).changeShape},
		{"a look-up says what a check finds", (*suite).lookUp},
		{"a clock that steps back", (*suite).stepBack},
		{"peek and reset", (*suite).peekAndReset},
	}
	for _, tt := range tests {
		for _, a := range algorithms {
			t.Run(tt.name+"/"+a.String(), func(t *testing.T) {
				t.Parallel()
				tt.run(newSuite(t, newStore(t)), a)
			})
		}
	}
	t.Run("windows are aligned", func(t *testing.T) {
		t.Parallel()
		newSuite(t, newStore(t)).aligned()
	})
	t.Run("a sliding window remembers the one before", func(t *testing.T) {
		t.Parallel()
		newSuite(t, newStore(t)).slides()
	})
	t.Run("a token bucket refills continuously", func(t *testing.T) {
		t.Parallel()
		newSuite(t, newStore(t)).refills()
	})
}

// RunBound checks a store that holds at most maxKeys keys: a flood of subjects
// neither frees a heavy one nor passes unlimited, and ends with its window.
func RunBound(t *testing.T, newStore func(t *testing.T, maxKeys int) ratelimit.Store) {
	for _, a := range algorithms {
		t.Run("a flood of keys/"+a.String(), func(t *testing.T) {
			t.Parallel()
			const maxKeys = 500
			s := newSuite(t, newStore(t, maxKeys))
			p := s.policy(ratelimit.Rule{Limit: 5, Scale: time.Minute, Algorithm: a})
			heavy := s.item(p, 0)
			s.want(5, heavy, 10, start)
			admitted := 0
			const strangers = 20_000
			for n := range strangers {
				admitted += s.admitted(s.item(p, 1+n), 1, start)
			}
			s.want(0, heavy, 10, start)
			// The overflow counters together admit no more than they hold.
			if admitted < maxKeys-1 || admitted >= strangers {
				t.Errorf("%d of %d subjects were admitted", admitted, strangers)
			}
			s.want(0, s.item(p, 1+strangers), 5, start) // all counters are full
			later := start.Add(3 * time.Minute)
			s.want(5, s.item(p, 2+strangers), 10, later)
		})
	}
}

// RunInvented checks that memory stays flat under so many subjects that each come once, and that a heavy one among them
// is refused all the while. newStore returns a store of at most maxKeys keys; a key may weigh perKey bytes.
func RunInvented(t *testing.T, subjects, maxKeys int, perKey float64, newStore func(t *testing.T, maxKeys int) ratelimit.Store) {
	s := newSuite(t, newStore(t, maxKeys))
	p := s.policy(ratelimit.Rule{Limit: 30, Scale: time.Minute, Algorithm: ratelimit.SlidingWindow})
	const moments = 50 // in which they come, within four minutes
	heavy := ratelimit.Item{Key: s.hasher.IP(ratelimit.UnknownCaller, address(0)), Policy: p}
	s.want(30, heavy, 40, start)
	before := liveHeap()
	grown := func(when string) {
		s.Helper()
		if got, most := liveHeap()-before, float64(maxKeys)*perKey; got > most {
			s.Errorf("%s: %.2f MB more are in use, want at most %.2f", when, got/1e6, most/1e6)
		}
	}
	for m := range moments {
		now := start.Add(time.Duration(m) * 4 * time.Minute / moments)
		for n := range subjects / moments {
			s.take(ratelimit.Item{Key: s.hasher.IP(ratelimit.UnknownCaller, address(1+m*(subjects/moments)+n)), Policy: p}, now)
		}
		// It goes on all the time: no more than its limit in any minute, and a half of it again in the next.
		if got := s.admitted(heavy, 100, now); got > 30*4*60/moments/60+1 {
			s.Errorf("moment %d: the heavy subject was admitted %d times", m, got)
		}
		if m == moments/2 {
			grown("half way")
		}
	}
	grown("in the end")
	runtime.KeepAlive(s.store)
}

// address is an invented one, each in a network of its own.
func address(n int) netip.Addr {
	b := [16]byte{0x20, 0x01, 0x0d, 0xb8}
	binary.BigEndian.PutUint32(b[4:], uint32(n))
	return netip.AddrFrom16(b)
}

// liveHeap is what lives after a collection, in bytes.
func liveHeap() float64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc)
}

type suite struct {
	*testing.T
	store  ratelimit.Store
	hasher ratelimit.Hasher
}

func newSuite(t *testing.T, store ratelimit.Store) *suite {
	t.Helper()
	h, err := ratelimit.NewHasher([]byte("a secret for tests only"))
	if err != nil {
		t.Fatal(err)
	}
	return &suite{t, store, h}
}

func (s *suite) policy(r ratelimit.Rule) *ratelimit.Policy {
	s.Helper()
	p, err := ratelimit.NewPolicy(ratelimit.ActivityCreate, r)
	if err != nil {
		s.Fatal(err)
	}
	return p
}

func (s *suite) item(p *ratelimit.Policy, tenant int) ratelimit.Item {
	var id [16]byte
	binary.LittleEndian.PutUint64(id[:], uint64(tenant))
	return ratelimit.Item{Key: s.hasher.Tenant(ratelimit.ActivityCreate, id), Policy: p}
}

func (s *suite) take(it ratelimit.Item, now ratelimit.Instant) ratelimit.Decision {
	return s.store.Take(s.Context(), now, it)
}

func (s *suite) admitted(it ratelimit.Item, n int, now ratelimit.Instant) int {
	got := 0
	for range n {
		if s.take(it, now).Allowed {
			got++
		}
	}
	return got
}

// want offers n requests at once and wants so many admitted.
func (s *suite) want(admitted int, it ratelimit.Item, n int, now ratelimit.Instant) {
	s.Helper()
	if got := s.admitted(it, n, now); got != admitted {
		s.Errorf("%s at %v: %d of %d admitted, want %d", it.Policy.Rule(), time.Duration(now-start), got, n, admitted)
	}
}

func (s *suite) used(it ratelimit.Item, now ratelimit.Instant) uint32 {
	s.Helper()
	u, err := s.store.Peek(s.Context(), now, it)
	if err != nil {
		s.Fatal(err)
	}
	return u.Used
}

func (s *suite) exact(a ratelimit.Algorithm) {
	for round := range 20 {
		it := s.item(s.policy(ratelimit.Rule{Limit: 50, Scale: time.Second, Algorithm: a}), round)
		if got := s.parallel(400, func(int) bool { return s.take(it, start).Allowed }); got != 50 {
			s.Errorf("%d of 400 admitted, want 50", got)
		}
	}
	// Far from the limit, too, and at its end.
	it := s.item(s.policy(ratelimit.Rule{Limit: 5000, Scale: time.Second, Algorithm: a}), 1000)
	if got := s.parallel(400, func(int) bool { s.admitted(it, 10, start); return true }); got != 400 {
		s.Fatal(got)
	}
	if got := s.used(it, start); got != 4000 {
		s.Errorf("%d used after 4000 admissions", got)
	}
	s.want(1000, it, 2000, start)
}

// parallel counts the calls that return true.
func (s *suite) parallel(n int, call func(int) bool) int64 {
	var admitted atomic.Int64
	var wg sync.WaitGroup
	begin := make(chan struct{})
	for i := range n {
		wg.Go(func() {
			<-begin
			if call(i) {
				admitted.Add(1)
			}
		})
	}
	close(begin)
	wg.Wait()
	return admitted.Load()
}

func (s *suite) countsDown(a ratelimit.Algorithm) {
	p := s.policy(ratelimit.Rule{Limit: 3, Scale: time.Second, Algorithm: a})
	for n := range 2 {
		for want := range 3 {
			d := s.take(s.item(p, n), start)
			if !d.Allowed || d.Policy != p || d.Remaining != uint32(2-want) || d.WaitMs > 1000 {
				s.Errorf("request %d: %+v", want+1, d)
			}
		}
		d := s.take(s.item(p, n), start)
		if d.Allowed || d.Policy != p || d.Remaining != 0 || d.WaitMs == 0 || d.WaitMs > 1000 {
			s.Errorf("request 4: %+v", d)
		}
	}
}

func (s *suite) refusalLeavesNoTrace(a ratelimit.Algorithm) {
	it := s.item(s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a}), 1)
	s.want(10, it, 10, start)
	first := s.take(it, start)
	s.want(0, it, 1000, start)
	if d := s.take(it, start); d.WaitMs != first.WaitMs {
		s.Errorf("wait went from %d ms to %d ms by refusals", first.WaitMs, d.WaitMs)
	}
	if n := s.admitted(it, 1, start.Add(time.Duration(first.WaitMs)*time.Millisecond)); n != 1 {
		s.Error("refusals extended the refusal")
	}
}

func (s *suite) obedient(a ratelimit.Algorithm) {
	n := 0
	for _, limit := range []int64{1, 2, 5, 7, 100} {
		for _, scale := range []time.Duration{time.Second, 1537 * time.Millisecond, time.Minute} {
			for _, into := range []time.Duration{0, 1, 999_999, 317 * time.Millisecond, 999_999_999} {
				n++
				it := s.item(s.policy(ratelimit.Rule{Limit: limit, Scale: scale, Algorithm: a}), n)
				now := start.Add(into)
				s.admitted(it, int(limit), now)
				for range 20 {
					d := s.take(it, now)
					if d.Allowed {
						continue
					}
					if wait := time.Duration(d.WaitMs) * time.Millisecond; wait <= 0 || wait > scale {
						s.Errorf("%s: a wait of %v", it.Policy.Rule(), wait)
					}
					now = now.Add(time.Duration(d.WaitMs) * time.Millisecond)
					if !s.take(it, now).Allowed {
						s.Fatalf("%s: refused again after waiting %d ms", it.Policy.Rule(), d.WaitMs)
					}
				}
			}
		}
	}
}

func (s *suite) bigCost(a ratelimit.Algorithm) {
	for round := range 50 {
		it := s.item(s.policy(ratelimit.Rule{Limit: 100, Scale: time.Second, Algorithm: a}), round)
		s.want(50, it, 50, start)
		big := it
		big.Cost = 51
		got := s.parallel(100, func(i int) bool {
			if i%2 == 0 {
				if s.take(big, start).Allowed {
					s.Error("51 admitted where 50 remained")
				}
				return false
			}
			return s.take(it, start).Allowed
		})
		if got != 50 {
			s.Errorf("%d of 50 admitted beside costs that failed", got)
		}
	}
}

func (s *suite) impossible(a ratelimit.Algorithm) {
	it := s.item(s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a}), 1)
	s.want(4, it, 4, start)
	it.Cost = 1 << 31
	if d := s.take(it, start); d.Allowed || d.Remaining != 6 || d.WaitMs != 1000 {
		s.Errorf("a cost above the limit: %+v", d)
	}
	it.Cost = 6
	s.want(1, it, 3, start)
	for _, burst := range []int64{0, 1} {
		if burst > 0 && a != ratelimit.TokenBucket {
			continue
		}
		zero := s.policy(ratelimit.Rule{Limit: 0, Scale: time.Second, Algorithm: a, Burst: burst})
		for _, cost := range []uint32{0, 1, 1000} {
			none := s.item(zero, 2)
			none.Cost = cost
			if d := s.take(none, start); d.Allowed || d.Policy != zero || d.WaitMs != 1000 || d.Remaining != 0 {
				s.Errorf("a limit of 0: %+v", d)
			}
			if d := s.store.TakeAll(s.Context(), start, []ratelimit.Item{it, none}); d.Allowed {
				s.Errorf("a limit of 0 among others: %+v", d)
			}
		}
	}
}

func (s *suite) allOrNothing(a ratelimit.Algorithm) {
	tight := s.policy(ratelimit.Rule{Limit: 2, Scale: time.Minute, Algorithm: a})
	wide := s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a})
	items := []ratelimit.Item{s.item(wide, 1), s.item(tight, 2), s.item(wide, 3)}
	for n := range 2 {
		d := s.store.TakeAll(s.Context(), start, items)
		if !d.Allowed || d.Policy != tight || d.Item != 1 || d.Remaining != uint32(1-n) {
			s.Errorf("spend %d: %+v", n+1, d)
		}
	}
	d := s.store.TakeAll(s.Context(), start, items)
	if d.Allowed || d.Policy != tight || d.Item != 1 || d.WaitMs == 0 {
		s.Errorf("refusal: %+v", d)
	}
	for i, want := range []uint32{2, 2, 2} {
		if got := s.used(items[i], start); got != want {
			s.Errorf("item %d: %d used, want %d", i, got, want)
		}
	}
	// Two refuse: the one with the longer wait is the answer.
	s.want(8, items[0], 20, start)
	if d := s.store.TakeAll(s.Context(), start, items); d.Allowed || d.Item != 1 {
		s.Errorf("two refusals: %+v", d)
	}
	if got := s.used(items[2], start); got != 2 {
		s.Errorf("refusals spent %d of the third item", got-2)
	}
	// Of one policy, the one that has less left.
	used, idle := s.item(wide, 4), s.item(wide, 5)
	s.want(5, used, 5, start)
	for place, items := range [][]ratelimit.Item{{used, idle}, {idle, used}} {
		if d := s.store.TakeAll(s.Context(), start, items); int(d.Item) != place {
			s.Errorf("two of one policy: %+v, want item %d", d, place)
		}
	}
}

func (s *suite) allOrNothingParallel(a ratelimit.Algorithm) {
	for round := range 20 {
		wide := s.item(s.policy(ratelimit.Rule{Limit: 1000, Scale: time.Second, Algorithm: a}), 2*round)
		tight := s.item(s.policy(ratelimit.Rule{Limit: 50, Scale: time.Second, Algorithm: a}), 2*round+1)
		var got atomic.Int64
		s.parallel(8, func(int) bool {
			for range 50 {
				if s.store.TakeAll(s.Context(), start, []ratelimit.Item{wide, tight}).Allowed {
					got.Add(1)
				}
			}
			return true
		})
		if got.Load() != 50 || s.used(wide, start) != 50 || s.used(tight, start) != 50 {
			s.Errorf("%d admitted, %d and %d used, want 50", got.Load(), s.used(wide, start), s.used(tight, start))
		}
	}
}

func (s *suite) refund(a ratelimit.Algorithm) {
	p := s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a})
	it := s.item(p, 1)
	it.Cost = 7
	d := s.take(it, start)
	if s.take(it, start).Allowed {
		s.Fatal("14 of 10 admitted")
	}
	s.store.Refund(s.Context(), d.Booking(0), it)
	if got := s.used(it, start); got != 0 {
		s.Errorf("%d used after a refund", got)
	}
	it.Cost = 1
	s.want(10, it, 20, start)

	// When the window is over there is nothing to give back.
	late := s.item(p, 2)
	late.Cost = 10
	old := s.take(late, start)
	now := start.Add(5 * time.Second)
	late.Cost = 1
	s.want(10, late, 20, now)
	if a != ratelimit.TokenBucket {
		late.Cost = 10
		s.store.Refund(s.Context(), old.Booking(0), late)
		late.Cost = 1
		s.want(0, late, 20, now)
	}

	// In a sliding window a spend of the window before still counts.
	slide := s.item(p, 3)
	slide.Cost = 10
	old = s.take(slide, start)
	now = start.Add(1100 * time.Millisecond)
	s.used(slide, now)
	slide.Cost = 1
	s.admitted(slide, 1, now)
	slide.Cost = 10
	s.store.Refund(s.Context(), old.Booking(0), slide)
	slide.Cost = 1
	if a == ratelimit.SlidingWindow {
		s.want(9, slide, 20, now)
	}

	// Spends and refunds in parallel leave nothing behind.
	busy := s.item(s.policy(ratelimit.Rule{Limit: 10_000, Scale: time.Second, Algorithm: a}), 4)
	s.parallel(200, func(int) bool {
		d := s.take(busy, start)
		s.store.Refund(s.Context(), d.Booking(0), busy)
		return true
	})
	if got := s.used(busy, start); got != 0 {
		s.Errorf("%d used after as many refunds as spends", got)
	}
}

func (s *suite) reserve(a ratelimit.Algorithm) {
	it := s.item(s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a}), 1)
	s.want(9, it, 9, start)
	reserve := func(maxWait time.Duration) ratelimit.Decision {
		return s.store.Reserve(s.Context(), start, it, maxWait)
	}
	if d := reserve(time.Second); !d.Allowed || d.WaitMs != 0 {
		s.Errorf("the last free unit: %+v", d)
	}
	if a != ratelimit.TokenBucket {
		if d := reserve(time.Minute); d.Allowed || d.WaitMs != 1000 {
			s.Errorf("a window cannot be booked ahead: %+v", d)
		}
		return
	}
	var last ratelimit.Decision
	for n := range 5 { // a unit refills in 100 ms
		if last = reserve(500 * time.Millisecond); !last.Allowed || last.WaitMs != uint32(100*(n+1)) {
			s.Errorf("reservation %d: %+v", n+1, last)
		}
	}
	if d := reserve(500 * time.Millisecond); d.Allowed || d.WaitMs != 600 {
		s.Errorf("beyond the longest wait: %+v", d)
	}
	s.want(0, it, 1, start.Add(599*time.Millisecond)) // in line behind the reservations
	s.store.Refund(s.Context(), last.Booking(0), it)
	if d := reserve(500 * time.Millisecond); !d.Allowed || d.WaitMs != 500 {
		s.Errorf("after a refund: %+v", d)
	}
	s.want(1, it, 2, start.Add(600*time.Millisecond))
	// Longer than two bursts ahead is still a reservation, not a clock gone wrong.
	long := s.item(s.policy(ratelimit.Rule{Limit: 1, Scale: time.Second, Algorithm: a}), 2)
	for n := range 30 {
		if d := s.store.Reserve(s.Context(), start, long, 30*time.Second); !d.Allowed || d.WaitMs != uint32(1000*n) {
			s.Errorf("reservation %d of one a second: %+v", n+1, d)
		}
	}
	s.want(0, long, 1, start)
}

func (s *suite) changeLimit(a ratelimit.Algorithm) {
	rule := func(limit int64) *ratelimit.Policy {
		return s.policy(ratelimit.Rule{Limit: limit, Scale: time.Minute, Algorithm: a})
	}
	raised := s.item(rule(10), 1)
	s.want(10, raised, 20, start)
	raised.Policy = rule(15)
	if d := s.take(raised, start); !d.Allowed || d.Policy != raised.Policy || d.Remaining != 4 {
		s.Errorf("raised from 10 to 15: %+v", d)
	}
	s.want(4, raised, 20, start)

	lowered := s.item(rule(100), 2)
	s.want(20, lowered, 20, start)
	lowered.Policy = rule(10)
	d := s.take(lowered, start)
	if d.Allowed || d.Policy != lowered.Policy || d.Remaining != 0 || d.WaitMs > 60_000 {
		s.Errorf("lowered below the use: %+v", d)
	}
	s.want(1, lowered, 1, start.Add(time.Duration(d.WaitMs)*time.Millisecond))

	partly := s.item(rule(100), 3)
	s.want(20, partly, 20, start)
	partly.Policy = rule(50)
	s.want(30, partly, 100, start)
}

func (s *suite) changeShape(from ratelimit.Algorithm) {
	n := 0
	for _, to := range algorithms {
		for _, scale := range []time.Duration{time.Second, 20 * time.Second, time.Minute} {
			n++
			it := s.item(s.policy(ratelimit.Rule{Limit: 50, Scale: 20 * time.Second, Algorithm: from}), n)
			s.want(20, it, 20, start)
			it.Policy = s.policy(ratelimit.Rule{Limit: 30, Scale: scale, Algorithm: to})
			if got := s.used(it, start); got != 20 {
				s.Errorf("%v to %v in %v: %d used before a spend, want 20", from, to, scale, got)
			}
			s.want(10, it, 100, start)
			d := s.take(it, start)
			wait := time.Duration(d.WaitMs) * time.Millisecond
			if d.Allowed || wait > scale {
				s.Errorf("%v to %v in %v: %+v", from, to, scale, d)
			}
			s.want(1, it, 1, start.Add(wait))
		}
	}
}

// lookUp changes the policy, and looks before anybody asks: at once, while the old window runs, and after it.
func (s *suite) lookUp(from ratelimit.Algorithm) {
	n := 0
	for _, to := range algorithms {
		for _, scale := range []time.Duration{time.Second, 20 * time.Second, time.Minute} {
			for _, wait := range []time.Duration{0, 300 * time.Millisecond, 7 * time.Second, 25 * time.Second, 2 * time.Minute} {
				n++
				it := s.item(s.policy(ratelimit.Rule{Limit: 50, Scale: 20 * time.Second, Algorithm: from}), n)
				s.want(20, it, 20, start)
				it.Policy = s.policy(ratelimit.Rule{Limit: 40, Scale: scale, Algorithm: to})
				now := start.Add(wait)
				used := s.used(it, now)
				if wait == 0 && used != 20 {
					s.Errorf("%v to %v in %v: %d used, want 20", from, to, scale, used)
				}
				// From the look on the new policy holds: a token bucket refills.
				refill := scale / 8 // five tokens
				if to == ratelimit.TokenBucket && used >= 5 {
					now = now.Add(refill)
					if got := s.used(it, now); got != used-5 {
						s.Errorf("%v to %v in %v, %v later: %d used when five of %d have refilled", from, to, scale, wait, got, used)
					}
					used -= 5
				}
				if d := s.take(it, now); !d.Allowed || d.Remaining != 40-used-1 {
					s.Errorf("%v to %v in %v, %v later: %d used, and a check finds %+v", from, to, scale, wait, used, d)
				}
			}
		}
	}
}

func (s *suite) stepBack(a ratelimit.Algorithm) {
	for n, step := range []time.Duration{time.Millisecond, 900 * time.Millisecond, 5 * time.Second, time.Hour, 24 * time.Hour} {
		it := s.item(s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a}), n)
		s.want(10, it, 10, start)
		now := start.Add(-step)
		s.want(0, it, 20, now)
		if d := s.take(it, now); d.WaitMs > 2000 {
			s.Errorf("%v back: a wait of %d ms", step, d.WaitMs)
		}
		// In real time the lock is over a window after the step at the latest.
		locked := min(step, time.Second) + time.Second
		if s.admitted(it, 1, now.Add(locked)) != 1 {
			s.Errorf("%v back: still locked after %v", step, locked)
		}
	}
}

func (s *suite) peekAndReset(a ratelimit.Algorithm) {
	p := s.policy(ratelimit.Rule{Limit: 10, Scale: time.Second, Algorithm: a})
	it, other := s.item(p, 1), s.item(p, 2)
	now := start.Add(400 * time.Millisecond)
	for _, i := range []ratelimit.Item{it, other} {
		if got := s.used(i, now); got != 0 {
			s.Errorf("%d used before the first request", got)
		}
		s.want(10, i, 20, now)
	}
	// A sliding window is whole when less than one of what the next carries over counts.
	whole := map[ratelimit.Algorithm]uint32{ratelimit.FixedWindow: 600, ratelimit.SlidingWindow: 1500, ratelimit.TokenBucket: 1000}[a]
	u, err := s.store.Peek(s.Context(), now, it)
	if err != nil || u.Used != 10 || u.Remaining != 0 || u.WaitMs != whole || u.Policy != p {
		s.Errorf("Peek: %+v, %v, want a wait of %d ms", u, err, whole)
	}
	if err := s.store.Reset(s.Context(), now, it); err != nil {
		s.Fatal(err)
	}
	if u, err := s.store.Peek(s.Context(), now, it); err != nil || u.Used != 0 || u.Remaining != 10 || u.WaitMs != 0 {
		s.Errorf("Peek after a reset: %+v, %v", u, err)
	}
	s.want(10, it, 20, now)
	s.want(0, other, 20, now)
	for wait := range whole / 100 {
		at := now.Add(time.Duration(wait) * 100 * time.Millisecond)
		if u, err := s.store.Peek(s.Context(), at, other); err != nil || u.Used == 0 || u.Remaining == 10 || u.WaitMs != whole-100*wait {
			s.Errorf("Peek %d ms later: %+v, %v", 100*wait, u, err)
		}
	}
	if u, err := s.store.Peek(s.Context(), now.Add(time.Duration(whole)*time.Millisecond), other); err != nil || u.Used != 0 || u.WaitMs != 0 {
		s.Errorf("Peek when all is free again: %+v, %v", u, err)
	}
	if err := s.store.Reset(s.Context(), now, s.item(p, 3)); err != nil {
		s.Errorf("Reset of an unknown key: %v", err)
	}
}

func (s *suite) aligned() {
	it := s.item(s.policy(ratelimit.Rule{Limit: 10, Scale: time.Minute, Algorithm: ratelimit.FixedWindow}), 1)
	end := start.Add(time.Minute)
	s.want(10, it, 20, start.Add(30*time.Second))
	s.want(0, it, 20, end-1)
	if d := s.take(it, end.Add(-1500*time.Millisecond)); d.WaitMs != 1500 {
		s.Errorf("1.5 s before the edge: a wait of %d ms", d.WaitMs)
	}
	s.want(10, it, 20, end)
}

func (s *suite) slides() {
	it := s.item(s.policy(ratelimit.Rule{Limit: 100, Scale: time.Second, Algorithm: ratelimit.SlidingWindow}), 1)
	s.want(100, it, 200, start.Add(900*time.Millisecond))
	// 10 ms into the next window 98.9 of the 100 still count, half way 49.9.
	s.want(2, it, 200, start.Add(1010*time.Millisecond))
	s.want(49, it, 200, start.Add(1500*time.Millisecond))
	s.want(100, it, 200, start.Add(5*time.Second))
}

func (s *suite) refills() {
	it := s.item(s.policy(ratelimit.Rule{Limit: 100, Scale: time.Second, Algorithm: ratelimit.TokenBucket, Burst: 20}), 1)
	s.want(20, it, 50, start)
	s.want(0, it, 1, start.Add(10*time.Millisecond)-1)
	s.want(1, it, 2, start.Add(10*time.Millisecond))
	s.want(5, it, 50, start.Add(60*time.Millisecond))
	s.want(20, it, 50, start.Add(time.Hour))
	// Part tokens carry over: 25 ms bring two and a half.
	s.want(2, it, 50, start.Add(time.Hour+25*time.Millisecond))
	s.want(1, it, 50, start.Add(time.Hour+30*time.Millisecond))
}
