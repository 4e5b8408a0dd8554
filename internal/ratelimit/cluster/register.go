package cluster

import (
	"math"

	"converger/internal/ratelimit"
)

// register is what one node said last about one key. Only that node writes it:
// what travels is its own count, as a whole, never a difference.
//
// Merge laws, over a set of registers (key, node): the message with the greatest
// version, (incarnation of the node, number of the batch), wins, whatever the
// order and however often it comes. So merging is idempotent, commutative and
// associative; a lower count in a newer message (a refund, a reset) stands; a
// node that restarts has a new incarnation, which is another register, so that it
// is never taken for old news, and what its predecessor spent stands until its
// window ends.
//
// Above that stands the version of the key, its last reset (local.Reset): of what a node tells
// that has not heard of it, only the windows after the reset count, and who is told of a later
// one takes that in first. So a reset holds against whoever did not hear of it, too.
type register struct {
	batch  uint32 // 0: nothing heard
	win    uint32 // window index; token bucket: the epoch of the sender's count
	count  uint32 // own count in the window; token bucket: spent in the epoch, wraps
	prev   uint32 // own count in the window before
	known  uint32 // all that the sender knew to be spent in the window, its own count included; token bucket: tokens in use
	demand float32
	at     uint32 // when it was sent, by our clock, as stamp tells
}

// cell is a register as it is kept, in 24 bytes: for each key there are as many as
// there are peers. A window index is kept as its lower 24 bits, which tell it among
// the windows near to the present one, the demand as the 16 bits that travel, and
// the time, of 28 bits, in what the others leave. Both numbers of units are below
// 1<<30, as ratelimit.MaxLimit is; a token bucket's count wraps at 1<<32.
type cell struct {
	batch  uint32
	win    uint32 // at's bits 20 to 27 above the window
	count  uint32
	prev   uint32 // bits 18 and 19 above
	known  uint32 // bits 16 and 17 above
	demand uint16
	at     uint16 // bits 0 to 15
}

const maxUnits = 1<<30 - 1

// load unpacks a cell. near is a window not further than 1<<23 from the register's;
// of a token bucket it tells only whether near is its epoch.
func (c *cell) load(near uint32) register {
	return register{
		batch: c.batch, win: near + uint32(int32((c.win-near)<<8)>>8), count: c.count, prev: c.prev & maxUnits, known: c.known & maxUnits,
		demand: math.Float32frombits(uint32(c.demand) << 16),
		at:     c.win>>24<<20 | c.prev>>30<<18 | c.known>>30<<16 | uint32(c.at),
	}
}

func (c *cell) store(r register) {
	*c = cell{
		batch: r.batch, win: r.win&(1<<24-1) | r.at>>20<<24, count: r.count,
		prev: min(r.prev, maxUnits) | r.at>>18<<30, known: min(r.known, maxUnits) | r.at>>16<<30,
		demand: half(r.demand), at: uint16(r.at),
	}
}

// newer compares batch numbers, which wrap.
func newer(a, b uint32) bool { return b == 0 || int32(a-b) > 0 }

// merge takes a message in, unless it is old, and returns by how much the
// cumulative spend of a token bucket grew.
func (r *register) merge(m register) (grown int64, taken bool) {
	if !newer(m.batch, r.batch) {
		return 0, false
	}
	grown = int64(m.count)
	if r.batch != 0 && m.win == r.win {
		grown = int64(int32(m.count - r.count))
	}
	*r = m
	return grown, true
}

// forget takes out what was spent before a reset that was not heard of when the register was told. Of a token bucket the
// count stays, from which the next report's differs.
func (r *register) forget(p *ratelimit.Policy, at ratelimit.Instant) {
	if p.Algorithm() == ratelimit.TokenBucket {
		r.known = 0
		return
	}
	win, _ := p.Window(at)
	switch d := int32(r.win - win); {
	case d <= 0:
		r.count, r.prev, r.known = 0, 0, 0
	case d == 1:
		r.prev = 0
	}
}

// in is the count in a window, before in the one before it.
func (r *register) in(win uint32) uint32 {
	switch {
	case r.batch == 0:
	case r.win == win:
		return r.count
	case r.win == win+1:
		return r.prev
	}
	return 0
}

func (r *register) before(win uint32) uint32 {
	switch {
	case r.batch == 0:
	case r.win == win:
		return r.prev
	case r.win+1 == win:
		return r.count
	}
	return 0
}
