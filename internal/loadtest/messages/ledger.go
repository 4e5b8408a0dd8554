package messages

import (
	"encoding/json"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/loadtest/wire"
)

// bitset remembers numbers from 0 on, a bit each.
type bitset []uint64

// set sets a bit and tells whether it was set before.
func (b *bitset) set(i int64) (before bool) {
	for int64(len(*b))*64 <= i {
		*b = append(*b, make([]uint64, max(16, len(*b)))...) // doubled
	}
	before = (*b)[i/64]>>(i%64)&1 == 1
	(*b)[i/64] |= 1 << (i % 64)
	return before
}

func (b bitset) has(i int64) bool { return i/64 < int64(len(b)) && b[i/64]>>(i%64)&1 == 1 }

const (
	// maxNumber bounds what a forged key can make the bitsets grow to: half a gigabyte, and more than a day's messages.
	maxNumber = 1 << 32
	// maxChats bounds what a forged conversation can.
	maxChats = 1 << 20
)

// ledger is what was acknowledged and what arrived. It is safe for concurrent use.
type ledger struct {
	run   string // of the keys of this run
	began time.Time
	took  hist // from when a message was due to its first arrival

	delivered atomic.Int64 // messages, at their first arrival
	arrivals  atomic.Int64 // with repeats

	mu       sync.Mutex
	acked    bitset // by number
	arrived  bitset // by number
	chats    map[string]*chat
	ackedN   int64
	ackedIn  int64 // acknowledged and arrived
	doubled  int64
	repeats  int64
	disorder int64
	strange  int64
	lastAt   time.Time
	probed   chan struct{} // closed when the probe arrives
}

// chat is what arrived of one conversation.
type chat struct {
	seen bitset // by seq
	last int64
}

func newLedger(run string, began time.Time) *ledger {
	return &ledger{run: run, began: began, chats: map[string]*chat{}, probed: make(chan struct{})}
}

const probeNumber = -1

// key is the idempotency key of a message, and the first word of its text, because the keys of webhooks do not go out with
// their messages: the run, the number and the microsecond at which it was due.
func (l *ledger) key(number int64, due time.Duration) string {
	return "lt-" + l.run + "-" + strconv.FormatInt(number, 10) + "-" + strconv.FormatInt(due.Microseconds(), 10)
}

func (l *ledger) parse(key string) (number int64, due time.Duration, ok bool) {
	rest, ok := strings.CutPrefix(key, "lt-"+l.run+"-")
	if !ok {
		return 0, 0, false
	}
	if rest, ok := strings.CutPrefix(rest, "-1-"); ok { // the probe
		_, err := strconv.ParseInt(rest, 10, 64)
		return probeNumber, 0, err == nil
	}
	a, b, _ := strings.Cut(rest, "-")
	number, err := strconv.ParseInt(a, 10, 64)
	us, err2 := strconv.ParseInt(b, 10, 64)
	return number, time.Duration(us) * time.Microsecond, err == nil && err2 == nil && number >= 0 && number < maxNumber
}

// ack notes that a message was accepted.
func (l *ledger) ack(number int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acked.set(number)
	l.ackedN++
	if l.arrived.has(number) {
		l.ackedIn++
	}
}

// observe notes an arrival at the receiver.
func (l *ledger) observe(a wire.Arrival) {
	var activity struct {
		Text         string `json:"text"`
		Seq          int64  `json:"seq"`
		Conversation string `json:"conversation_id"`
	}
	err := json.Unmarshal(a.Body, &activity)
	key, _, _ := strings.Cut(activity.Text, " ")
	number, due, ok := l.parse(key)
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case err != nil || !ok || activity.Seq < 1 || activity.Seq >= maxNumber || activity.Conversation == "":
		l.strange++
		return
	case number == probeNumber:
		select {
		case <-l.probed:
		default:
			close(l.probed)
		}
		return
	}
	l.arrivals.Add(1)
	c := l.chats[activity.Conversation]
	if c == nil {
		if len(l.chats) >= maxChats {
			l.strange++
			return
		}
		c = &chat{}
		l.chats[activity.Conversation] = c
	}
	if c.seen.set(activity.Seq) { // another attempt of the same delivery
		l.repeats++
		return
	}
	if activity.Seq < c.last {
		l.disorder++
	}
	c.last = max(c.last, activity.Seq)
	if l.arrived.set(number) { // a message that became two activities
		l.doubled++
		return
	}
	if l.acked.has(number) {
		l.ackedIn++
	}
	l.lastAt = a.At
	l.delivered.Add(1)
	l.took.add(a.At.Sub(l.began) - due)
}

// lastArrival is when the last message arrived; zero when none did.
func (l *ledger) lastArrival() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastAt
}

// open is how many acknowledged messages have not arrived.
func (l *ledger) open() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ackedN - l.ackedIn
}

// Check is what became of the messages. Without the built-in receiver it is all zeros.
type Check struct {
	Lost       int64 `json:"lost"`         // acknowledged, and not arrived when the run ended
	Doubled    int64 `json:"doubled"`      // one message that arrived as two activities
	OutOfOrder int64 `json:"out_of_order"` // arrived for the first time after a later one of its conversation
	Repeats    int64 `json:"repeats"`      // further attempts of a delivery; at least once is what is promised
	Strange    int64 `json:"strange"`      // not of this run
}

func (l *ledger) check() Check {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Check{Lost: l.ackedN - l.ackedIn, Doubled: l.doubled, OutOfOrder: l.disorder, Repeats: l.repeats, Strange: l.strange}
}
