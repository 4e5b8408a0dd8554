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
)

// Demand is what one subject asked for, admitted or not.
type Demand struct {
	Key  Key
	Name Name
	// Since is the first second that was looked at, in Unix seconds. Before it the subject was not
	// among the busiest.
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
		if sum := s.lately(second); sum < least {
			idle, least = k, sum
		}
	}
	if busy < 2*max(least, 1) {
		return false
	}
	delete(h.byKey, idle)
	return true
}

// lately is the demand of two periods of the sketches: what a newcomer is compared by.
func (s *series) lately(second int64) (sum uint64) {
	for i := range int64(2 * TopPeriod / time.Minute) {
		number := second/60 - i
		if m := s.minutes[number%minutesKept]; m != nil && m.number == number {
			sum += m.sum
		}
	}
	return sum
}

// units writes out the seconds from start on.
func (s *series) units(start int64) []uint32 {
	out := make([]uint32, DemandSeconds)
	for i := range out {
		second := start + int64(i)
		if m := s.minutes[second/60%minutesKept]; m != nil && m.number == second/60 {
			out[i] = m.seconds[second%60]
		}
	}
	return out
}

// Demand tells what the busiest subjects of a bucket to which a tenant's limits
// apply asked for in the last hour on this node, the busiest first, at most so
// many. It is kept for the buckets that a tenant's limits may name.
func (l *Limiter) Demand(b Bucket, tenant [16]byte, now Instant, most int) []Demand {
	if !b.valid() {
		return nil
	}
	w := l.watches[b]
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.hot == nil {
		return nil
	}
	// The running minute has taken the place of the one an hour ago: the hour is what the ring holds.
	start := (int64(now)/1e9/60 - minutesKept + 1) * 60
	var out []Demand
	for k, s := range w.hot.byKey {
		if s.name.Tenant != tenant {
			continue
		}
		d := Demand{Key: k, Name: s.name, Since: max(s.since, start), Start: start, Units: s.units(start), Sampled: max(s.sampled, 1)}
		if d.Total() > 0 {
			out = append(out, d)
		}
	}
	slices.SortFunc(out, func(a, b Demand) int {
		return cmp.Or(cmp.Compare(b.Total(), a.Total()), cmp.Compare(a.Key.Hi, b.Key.Hi))
	})
	return out[:min(most, len(out))]
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
