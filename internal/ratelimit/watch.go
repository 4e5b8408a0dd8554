package ratelimit

import (
	"cmp"
	"math/bits"
	"slices"
	"sync"
	"time"
)

// What operators see of decisions (docs/adr/0028-watch-by-samples-and-gather.md). A check
// adds one to a counter in any case; by that counter, every 2^n-th decision of a
// bucket and outcome is looked at closely, and stands for 2^n. n follows the rate,
// so that some thousand a second are looked at however many there are, and all
// while there are not more.
const (
	// tickShift makes ticks of 268 ms of an Instant, tickSamples is how many
	// decisions of one outcome are looked at in one.
	tickShift   = 28
	tickSamples = 1024

	// TopPeriod is the length of the periods in which the most refused are counted:
	// the running one and the one before are shown.
	TopPeriod = 5 * time.Minute

	recentLen = 64 // refused subjects remembered of each bucket

	// ratePeriod is the time over which decisions per second are averaged.
	ratePeriod = 10 * time.Second
	historyLen = 16
)

// Name is whom a key stands for. Text is canonical and fit to be shown: an id, an
// address as in RFC 5952, of secrets a digest or a beginning.
type Name struct {
	Tenant [16]byte // whose limits apply; zero: nobody's
	Text   string
}

// Heavy is a subject and what was counted of it: at least so much, and at most a
// 256th of the bucket's total more.
type Heavy struct {
	Key   Key
	Name  Name // zero: not known
	Count uint64
}

// Refusal is what was lately refused of one subject.
type Refusal struct {
	Key         Key
	Name        Name // zero: not known
	First, Last Instant
	Count       uint64 // from First to Last; of many an estimate
	Policy      *Policy
	WaitMs      uint32 // of the last
	Counted     bool   // in count mode: it would have been refused
}

// Observation is what was seen of one bucket on this node.
type Observation struct {
	// Allowed, Refused and Counted are decisions since the start.
	Allowed, Refused, Counted uint64
	// AllowedRate, RefusedRate and CountedRate are decisions per second, averaged over the last ten.
	AllowedRate, RefusedRate, CountedRate float64
	// Since is from when on Top has counted.
	Since Instant
	// Top are the subjects most refused (or counted as such), the most first.
	Top []Heavy
	// Recent are the subjects lately refused, the last first.
	Recent []Refusal
}

// watch observes one bucket. mu guards all of it.
type watch struct {
	mu      sync.Mutex
	ticked  [numOutcomes]uint64 // decisions when the tick began
	looked  [numOutcomes]uint32 // decisions looked at in it
	history [numOutcomes]history
	period  int64 // of TopPeriod since 1970
	refused [2]*sketch
	asked   [2]*sketch // whatever came of it
	recent  []Refusal
	hot     hotSubjects
}

func newWatch() *watch {
	return &watch{refused: [2]*sketch{newSketch(), nil}, asked: [2]*sketch{newSketch(), nil}, hot: hotSubjects{byKey: map[Key]*series{}}}
}

func tickOf(now Instant) uint32 { return uint32(uint64(now) >> tickShift) }

// weigh is how many decisions the n-th stands for, 0 for one that does not count.
func (w *watch) weigh(m *meter, b Bucket, o outcome, n uint64, now Instant) uint64 {
	pace, tick := m.pace[b][o].Load(), tickOf(now)
	mask := pace & (1<<32 - 1)
	// A caller that was held up brings the time of a tick before; more than that is a clock that was set back.
	if passed := int32(tick - uint32(pace>>32)); passed > 0 || passed < -8 || pace == 0 {
		total := m.total(b, o)
		perTick := (total - w.ticked[o]) / uint64(max(passed, 1))
		if w.ticked[o] == 0 {
			perTick = 0
		}
		// Of a bucket and outcome without a decision a second, the next are all looked at.
		mask = 1<<bits.Len64(perTick/tickSamples) - 1
		w.ticked[o], w.looked[o] = total, 0
		m.pace[b][o].Store(uint64(tick)<<32 | mask)
		w.history[o].push(now, total-1)
	}
	if n&mask != 0 {
		return 0
	}
	if w.looked[o]++; w.looked[o] >= 2*tickSamples { // more than the tick before let expect
		w.looked[o] = tickSamples
		m.pace[b][o].Store(m.pace[b][o].Load()>>32<<32 | mask<<1 | 1)
	}
	return mask + 1
}

// see takes note of the n-th decision. It reports whether the subject is to be
// shown and has no name yet.
func (w *watch) see(m *meter, it *Item, o outcome, n uint64, waitMs uint32, now Instant) (unnamed bool) {
	b := it.Policy.bucket
	w.mu.Lock()
	defer w.mu.Unlock()
	weight := w.weigh(m, b, o, n, now)
	if weight == 0 {
		return false
	}
	w.turn(now)
	demand := w.asked[0].add(it.Key, weight)
	unnamed = w.hot.add(it.Key, demand, w.asked[1].get(it.Key), weight*uint64(it.Spend()), weight, now)
	if o == allowed {
		return unnamed
	}
	refused := w.refused[0].add(it.Key, weight)
	if refused.name == (Name{}) {
		refused.name = w.nameOf(it.Key)
	}
	w.remember(it, refused.name, o, weight, waitMs, now)
	return unnamed || refused.name == (Name{})
}

// turn begins a new period when the last has ended.
func (w *watch) turn(now Instant) {
	switch period := int64(now) / int64(TopPeriod); {
	case period <= w.period: // also when a clock stepped back
	case period == w.period+1:
		w.refused[0], w.refused[1] = newSketch(), w.refused[0]
		w.asked[0], w.asked[1] = newSketch(), w.asked[0]
		w.period = period
	default:
		if w.period != 0 {
			w.refused, w.asked = [2]*sketch{newSketch(), nil}, [2]*sketch{newSketch(), nil}
		}
		w.period = period
	}
}

// nameOf finds a name that the key was given before.
func (w *watch) nameOf(k Key) Name {
	for _, s := range []*sketch{w.refused[0], w.refused[1], w.asked[0], w.asked[1]} {
		if h := s.get(k); h != nil && h.name != (Name{}) {
			return h.name
		}
	}
	return Name{}
}

func (w *watch) name(k Key, n Name) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range []*sketch{w.refused[0], w.refused[1], w.asked[0], w.asked[1]} {
		if h := s.get(k); h != nil {
			h.name = n
		}
	}
	for i := range w.recent {
		if w.recent[i].Key == k {
			w.recent[i].Name = n
		}
	}
	if s := w.hot.byKey[k]; s != nil {
		s.name = n
	}
}

// remember notes a refusal; of a subject that is remembered already it counts one
// more, else the one that was quiet for longest makes room.
func (w *watch) remember(it *Item, name Name, o outcome, weight uint64, waitMs uint32, now Instant) {
	r := Refusal{Key: it.Key, Name: name, First: now, Last: now, Count: weight, Policy: it.Policy, WaitMs: waitMs, Counted: o == counted}
	oldest := 0
	for i := range w.recent {
		if old := &w.recent[i]; old.Key == it.Key {
			r.First, r.Count = old.First, old.Count+weight
			*old = r
			return
		} else if old.Last < w.recent[oldest].Last {
			oldest = i
		}
	}
	if len(w.recent) < recentLen {
		w.recent = append(w.recent, r)
		return
	}
	w.recent[oldest] = r
}

func (w *watch) observe(m *meter, b Bucket, now, started Instant, top int) Observation {
	totals := [numOutcomes]uint64{m.total(b, allowed), m.total(b, refused), m.total(b, counted)}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.turn(now)
	out := Observation{
		Allowed: totals[allowed], Refused: totals[refused], Counted: totals[counted],
		Since: Instant((w.period - 1) * int64(TopPeriod)),
	}
	if w.refused[1] == nil {
		out.Since = Instant(w.period * int64(TopPeriod))
	}
	out.Since = max(out.Since, started)
	over := min(ratePeriod, time.Duration(max(now-started, Instant(time.Second))))
	for o, rate := range []*float64{&out.AllowedRate, &out.RefusedRate, &out.CountedRate} {
		*rate = w.history[o].rate(totals[o], now, over)
	}
	sums := map[Key]int{}
	for _, s := range w.refused {
		if s == nil {
			continue
		}
		for i := range s.heap {
			h := &s.heap[i]
			at, ok := sums[h.key]
			if !ok {
				at = len(out.Top)
				sums[h.key] = at
				out.Top = append(out.Top, Heavy{Key: h.key, Name: h.name})
			}
			out.Top[at].Count += h.least()
			if out.Top[at].Name == (Name{}) {
				out.Top[at].Name = h.name
			}
		}
	}
	slices.SortFunc(out.Top, func(a, b Heavy) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.Key.Hi, b.Key.Hi))
	})
	out.Top = out.Top[:min(top, len(out.Top))]
	out.Recent = slices.Clone(w.recent)
	slices.SortFunc(out.Recent, func(a, b Refusal) int { return cmp.Compare(b.Last, a.Last) })
	return out
}

// find is the key of a subject that is shown under a text.
func (w *watch) find(text string) (Key, Name, bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, s := range []*sketch{w.refused[0], w.refused[1], w.asked[0], w.asked[1]} {
		if s == nil {
			continue
		}
		for i := range s.heap {
			if s.heap[i].name.Text == text {
				return s.heap[i].key, s.heap[i].name, true
			}
		}
	}
	return Key{}, Name{}, false
}

// history is a counter's course: its value at moments a second apart at least,
// each just before the decision that made it be looked at.
type history struct {
	at    [historyLen]Instant
	value [historyLen]uint64
	n     int
}

func (h *history) push(now Instant, value uint64) {
	if h.n > 0 && now-h.at[(h.n-1)%historyLen] < Instant(time.Second) {
		return
	}
	h.at[h.n%historyLen], h.value[h.n%historyLen] = now, value
	h.n++
}

// rate is how much the counter grew a second. What came within a second after the
// last moment before the period counts as before it.
func (h *history) rate(value uint64, now Instant, period time.Duration) float64 {
	from := now - Instant(period)
	for i := max(0, h.n-historyLen); i < h.n; i++ {
		if at := h.at[i%historyLen]; at >= from {
			return float64(value-min(value, h.value[i%historyLen])) / period.Seconds()
		}
	}
	return 0
}

// Name says whom a key stands for; it is asked for by Decision.Unnamed. What is
// not being shown is forgotten at once.
func (l *Limiter) Name(b Bucket, k Key, n Name) {
	if b.valid() {
		l.watches[b].name(k, n)
	}
}

// Observe tells what was seen of a bucket here: at most top of the most refused.
func (l *Limiter) Observe(b Bucket, now Instant, top int) Observation {
	if !b.valid() {
		return Observation{}
	}
	return l.watches[b].observe(l.meter, b, now, l.started, top)
}

// Find is the key of a subject that Observe shows under a text, or would if it were
// refused: of those whose key can't be made from what is shown.
func (l *Limiter) Find(b Bucket, text string) (Key, Name, bool) {
	if !b.valid() || text == "" {
		return Key{}, Name{}, false
	}
	return l.watches[b].find(text)
}
