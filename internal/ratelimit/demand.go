package ratelimit

import (
	"cmp"
	"slices"
	"time"
)

const (
	// maxHot is how many subjects of a bucket have their demand kept, second by second.
	maxHot = 256
	// DemandSeconds is for how long it is kept.
	DemandSeconds = 3600

	minutesKept = DemandSeconds / 60

	// lately is the minutes by which subjects are compared: as many as two periods of the sketches have.
	lately = int64(2 * TopPeriod / time.Minute)
)

// Demand is what one subject asked for, admitted or not.
type Demand struct {
	Key  Key
	Name Name
	// Since is the first second that is known, in Unix seconds. Before it the subject was not among
	// the busiest, or asked for nothing.
	Since int64
	// Start is the second of Units[0], in Unix seconds; Units has DemandSeconds of them.
	Start int64
	Units []uint32
	// Sampled is for how many requests one that was counted stood at most; 1: all were counted.
	Sampled uint64
}

// Total is the sum of Units.
func (d Demand) Total() uint64 {
	n := uint64(0)
	for _, u := range d.Units {
		n += uint64(u)
	}
	return n
}

// hotSubjects keeps the demand of the busiest subjects of a bucket. watch.mu guards it.
type hotSubjects struct {
	byKey   map[Key]*series
	weighed int64 // second in which the least busy was last looked for
}

// series is the demand of one subject: a ring of minutes, made when first needed.
type series struct {
	name    Name
	since   int64
	sampled uint64
	minutes [minutesKept]*minute
}

type minute struct {
	number  int64 // since 1970
	sum     uint64
	seconds [60]uint32
}

// add counts demand. It reports whether the subject is kept and has no name.
func (h *hotSubjects) add(k Key, here, before *heavy, units, weight uint64, now Instant) (unnamed bool) {
	second := int64(now) / 1e9
	s := h.byKey[k]
	if s == nil {
		busy := here.least()
		if before != nil {
			busy += before.least()
		}
		if !h.room(busy, second) {
			return false
		}
		s = &series{since: second, name: here.name}
		h.byKey[k] = s
	}
	m := s.minutes[second/60%minutesKept]
	if m == nil {
		m = &minute{number: second / 60}
		s.minutes[second/60%minutesKept] = m
	}
	if m.number != second/60 {
		*m = minute{number: second / 60}
	}
	m.sum += units
	m.seconds[second%60] = uint32(min(uint64(m.seconds[second%60])+units, MaxLimit))
	s.sampled = max(s.sampled, weight)
	return s.name == Name{}
}

// room makes room for a subject that is twice as busy as the least busy one that
// is kept. It looks for that one once a second at most.
func (h *hotSubjects) room(busy uint64, second int64) bool {
	if len(h.byKey) < maxHot {
		return true
	}
	if h.weighed == second {
		return false
	}
	h.weighed = second
	var idle Key
	least := ^uint64(0)
	for k, s := range h.byKey {
		if sum := s.sum(second/60, lately); sum < least {
			idle, least = k, sum
		}
	}
	if busy < 2*max(least, 1) {
		return false
	}
	delete(h.byKey, idle)
	return true
}

// at is a minute since 1970, nil for one without demand.
func (s *series) at(number int64) *minute {
	if m := s.minutes[number%minutesKept]; m != nil && m.number == number {
		return m
	}
	return nil
}

// sum is the demand of so many minutes, the last of them given.
func (s *series) sum(last, minutes int64) (sum uint64) {
	for number := last - minutes + 1; number <= last; number++ {
		if m := s.at(number); m != nil {
			sum += m.sum
		}
	}
	return sum
}

// hour writes out the seconds of the hour that ends with a minute.
func (s *series) hour(k Key, last int64) Demand {
	first := last - minutesKept + 1
	d := Demand{Key: k, Name: s.name, Since: max(s.since, first*60), Start: first * 60, Units: make([]uint32, DemandSeconds), Sampled: max(s.sampled, 1)}
	for i := range int64(minutesKept) {
		if m := s.at(first + i); m != nil {
			copy(d.Units[i*60:], m.seconds[:])
		}
	}
	return d
}

// lastMinute is the running one: it has taken the place of the one an hour ago, so the hour is what the ring holds.
func lastMinute(now Instant) int64 { return int64(now) / 1e9 / 60 }

// Demand tells what the busiest subjects of a bucket asked for in the last hour on
// this node, the busiest first, at most so many: those to which a tenant's limits
// apply, or all if tenant is zero.
func (l *Limiter) Demand(b Bucket, tenant [16]byte, now Instant, most int) []Demand {
	if !b.valid() {
		return nil
	}
	w := l.watches[b]
	w.mu.Lock()
	defer w.mu.Unlock()
	type busy struct {
		key Key
		sum uint64
	}
	var found []busy
	for k, s := range w.hot.byKey {
		if tenant != ([16]byte{}) && s.name.Tenant != tenant {
			continue
		}
		if sum := s.sum(lastMinute(now), minutesKept); sum > 0 {
			found = append(found, busy{k, sum})
		}
	}
	slices.SortFunc(found, func(a, b busy) int {
		return cmp.Or(cmp.Compare(b.sum, a.sum), cmp.Compare(a.key.Hi, b.key.Hi))
	})
	var out []Demand
	for _, f := range found[:min(most, len(found))] {
		out = append(out, w.hot.byKey[f.key].hour(f.key, lastMinute(now)))
	}
	return out
}

// DemandOf is Demand of one subject, if it is among the busiest.
func (l *Limiter) DemandOf(b Bucket, k Key, now Instant) (Demand, bool) {
	if !b.valid() {
		return Demand{}, false
	}
	w := l.watches[b]
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.hot.byKey[k]
	if s == nil || s.sum(lastMinute(now), minutesKept) == 0 {
		return Demand{}, false
	}
	return s.hour(k, lastMinute(now)), true
}

// Forecast is what a demand meets under a policy.
type Forecast struct {
	Demand, Admitted, Refused uint64
	// Peak is the greatest demand of one second, and PeakAt that second, in Unix seconds.
	Peak   uint32
	PeakAt int64
	// Windows counts the windows (of a token bucket: stretches of its scale) with any demand, Exceeded those in
	// which some of it was refused.
	Windows, Exceeded int
}

// replaySteps is into how many parts a second is divided: the demand is taken as
// even within it.
const replaySteps = 10

// Replay runs a demand, by seconds from start on, through the rule itself,
// beginning with a whole budget. p may be nil: no limit.
func (p *Policy) Replay(start int64, units []uint32) Forecast {
	var f Forecast
	var s State
	if p != nil {
		s = p.Fresh(Instant(start * int64(time.Second)))
	}
	window, full := int64(-1), int64(-1)
	for i, n := range units {
		if n == 0 {
			continue
		}
		second := start + int64(i)
		f.Demand += uint64(n)
		if n > f.Peak {
			f.Peak, f.PeakAt = n, second
		}
		if p == nil {
			continue
		}
		for step := range uint64(replaySteps) {
			part := uint32(uint64(n)*(step+1)/replaySteps - uint64(n)*step/replaySteps)
			if part == 0 {
				continue
			}
			now := Instant(second*int64(time.Second)) + Instant(step)*Instant(time.Second/replaySteps)
			index, _ := p.Window(now)
			if int64(index) != window {
				window = int64(index)
				f.Windows++
			}
			var room uint32
			if _, d := p.Decide(s, 1, now); d.Allowed {
				room = min(part, d.Remaining+1)
				next, d := p.Decide(s, room, now)
				if !d.Allowed { // tokens are rounded each for itself
					room--
					next, _ = p.Decide(s, room, now)
				}
				s = next
			}
			f.Admitted += uint64(room)
			if room < part && int64(index) != full {
				full = int64(index)
				f.Exceeded++
			}
		}
	}
	if p == nil {
		f.Admitted = f.Demand
	}
	f.Refused = f.Demand - f.Admitted
	return f
}
