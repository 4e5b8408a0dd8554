package cluster

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
type register struct {
	batch  uint32 // 0: nothing heard
	win    uint32 // window index; token bucket: the epoch of the sender's count
	count  uint32 // own count in the window; token bucket: spent in the epoch, wraps
	prev   uint32 // own count in the window before
	known  uint32 // all that the sender knew to be spent in the window, its own count included; token bucket: tokens in use
	demand float32
	at     uint32 // when it was sent, by our clock, in ticks
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
