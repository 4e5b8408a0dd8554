package cluster

import (
	"encoding/binary"
	"errors"
	"math"
	"slices"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// The format of what nodes tell each other, version 1. Numbers are little-endian
// or varints.
//
//	message  = version kind batch(uvarint) sent(8, Unix ns) record*
//	record   = key(16) shape register [others, if kind is state]
//	shape    = 0 shape(8), the next in the message's list | its place in the list, from 1 |
//	           0 shape(8) with the highest bit, at(8) until(8) of the key's last reset; in no list
//	register = win(varint, less the window of sent; token bucket: uvarint, the epoch)
//	           count(uvarint) known(uvarint; windows: less count)
//	           prev(uvarint, windows only) demand(2, the upper half of a float32)
//	others   = n(uvarint) n times: id(8) batch(4) win count(uvarint) prev(uvarint)
//
// A request asks for what is known of some keys: version kindState key(16)*, and its
// answer is a state.
//
// Resets are a message too, and begin a state: version kindResets reset*, with
// reset = key(16) at(8) until(8), both Unix ns.
//
// In a state a window's record is followed by what other nodes that the asker can't
// hear were known to have spent of it.
const (
	wireVersion = 1
	kindReport  = 0
	kindState   = 1
	kindResets  = 2

	// batchLen is the length at which a message is sent off. A record adds less than
	// a hundred bytes to it, and in a state those of the others.
	batchLen  = 32 << 10
	maxShapes = 4096

	resetLen  = 32
	resetFlag = 1 << 63
)

var errMalformed = errors.New("ratelimit/cluster: malformed message")

type record struct {
	key   ratelimit.Key
	shape *ratelimit.Policy // as ratelimit.FromShape
	reset local.Reset       // the last one of the key that the sender knows of
	register
	others []other
}

type other struct {
	id cluster.ID
	register
}

// writer builds one message.
type writer struct {
	b      []byte
	sent   ratelimit.Instant
	batch  uint32
	kind   byte
	shapes []uint64
}

func (w *writer) begin(kind byte, batch uint32, sent ratelimit.Instant) {
	w.b = append(make([]byte, 0, 512), wireVersion, kind)
	w.b = binary.AppendUvarint(w.b, uint64(batch))
	w.b = binary.LittleEndian.AppendUint64(w.b, uint64(sent))
	w.kind, w.batch, w.sent, w.shapes = kind, batch, sent, w.shapes[:0]
}

func (w *writer) shape(shape uint64, reset local.Reset) {
	if reset != (local.Reset{}) {
		w.b = binary.LittleEndian.AppendUint64(append(w.b, 0), shape|resetFlag)
		w.b = binary.LittleEndian.AppendUint64(w.b, uint64(reset.At))
		w.b = binary.LittleEndian.AppendUint64(w.b, uint64(reset.Until))
		return
	}
	for i, s := range w.shapes {
		if s == shape {
			w.b = binary.AppendUvarint(w.b, uint64(i+1))
			return
		}
	}
	w.shapes = append(w.shapes, shape)
	w.b = binary.LittleEndian.AppendUint64(append(w.b, 0), shape)
}

// full tells that no further record should be added.
func (w *writer) full() bool { return len(w.b) >= batchLen || len(w.shapes) >= maxShapes }

func (w *writer) record(k ratelimit.Key, p *ratelimit.Policy, r register, others []other, reset local.Reset) {
	w.b = binary.LittleEndian.AppendUint64(w.b, k.Hi)
	w.b = binary.LittleEndian.AppendUint64(w.b, k.Lo)
	w.shape(p.Shape(), reset)
	if p.Algorithm() == ratelimit.TokenBucket {
		w.b = binary.AppendUvarint(w.b, uint64(r.win))
		w.b = binary.AppendUvarint(w.b, uint64(r.count))
		w.b = binary.AppendUvarint(w.b, uint64(r.known))
	} else {
		w.window(p, r.win)
		w.b = binary.AppendUvarint(w.b, uint64(r.count))
		w.b = binary.AppendUvarint(w.b, uint64(max(r.known, r.count)-r.count))
		w.b = binary.AppendUvarint(w.b, uint64(r.prev))
	}
	w.b = binary.LittleEndian.AppendUint16(w.b, half(r.demand))
	if w.kind != kindState {
		return
	}
	w.b = binary.AppendUvarint(w.b, uint64(len(others)))
	for _, o := range others {
		w.b = binary.LittleEndian.AppendUint64(w.b, uint64(o.id))
		w.b = binary.LittleEndian.AppendUint32(w.b, o.batch)
		w.window(p, o.win)
		w.b = binary.AppendUvarint(w.b, uint64(o.count))
		w.b = binary.AppendUvarint(w.b, uint64(o.prev))
	}
}

func (w *writer) window(p *ratelimit.Policy, win uint32) {
	base, _ := p.Window(w.sent)
	w.b = binary.AppendVarint(w.b, int64(int32(win-base)))
}

// half rounds a demand to the 16 bits that travel, never to 0.
func half(f float32) uint16 { return uint16((math.Float32bits(f) + 0xffff) >> 16) }

// reader reads one message.
type reader struct {
	b      []byte
	kind   byte
	batch  uint32
	sent   ratelimit.Instant
	shapes []*ratelimit.Policy
	others []other
	bad    bool
}

func (r *reader) begin(b []byte) error {
	*r = reader{b: b, shapes: r.shapes[:0], others: r.others[:0]}
	if r.byte() != wireVersion {
		return errMalformed
	}
	r.kind, r.batch, r.sent = r.byte(), r.u32(), ratelimit.Instant(r.fixed(8))
	if r.bad || r.kind > kindState || r.batch == 0 || r.sent < 0 {
		return errMalformed
	}
	return nil
}

// next reads a record; false at the end. The record's others are valid until the
// next call.
func (r *reader) next(rec *record) (bool, error) {
	if len(r.b) == 0 {
		return false, nil
	}
	*rec = record{key: ratelimit.Key{Hi: r.fixed(8), Lo: r.fixed(8)}, register: register{batch: r.batch}}
	switch i := r.u32(); {
	case r.bad:
	case i == 0:
		rec.shape, rec.reset = r.newShape(rec.key)
	case int(i) > len(r.shapes):
		r.bad = true
	default:
		rec.shape = r.shapes[i-1]
	}
	if r.bad || rec.key.Hi < 2 {
		return false, errMalformed
	}
	windows := rec.shape.Algorithm() != ratelimit.TokenBucket
	if windows {
		rec.win, rec.count = r.window(rec.shape), r.units()
		rec.known = rec.count + r.units()
		rec.prev = r.units()
	} else {
		rec.win, rec.count, rec.known = r.u32(), r.u32(), r.units()
	}
	rec.demand = math.Float32frombits(uint32(r.fixed(2)) << 16)
	if !(rec.demand >= 0 && rec.demand <= math.MaxFloat32) {
		r.bad = true
	}
	if r.kind == kindState {
		r.others = r.others[:0]
		for n := r.u32(); n > 0 && !r.bad; n-- {
			o := other{id: cluster.ID(r.fixed(8)), register: register{batch: uint32(r.fixed(4))}}
			if o.id == 0 || o.batch == 0 || !windows {
				r.bad = true
				break
			}
			o.win, o.count, o.prev = r.window(rec.shape), r.units(), r.units()
			r.others = append(r.others, o)
		}
		rec.others = r.others
	}
	if r.bad {
		return false, errMalformed
	}
	return true, nil
}

func (r *reader) newShape(k ratelimit.Key) (*ratelimit.Policy, local.Reset) {
	v := r.fixed(8)
	var reset local.Reset
	if v&resetFlag != 0 {
		reset = local.Reset{Key: k, At: ratelimit.Instant(r.fixed(8)), Until: ratelimit.Instant(r.fixed(8))}
		r.bad = r.bad || !reset.Valid()
	}
	v &^= resetFlag
	if r.bad || !ratelimit.ValidShape(v) || len(r.shapes) >= maxShapes {
		r.bad = true
		return nil, reset
	}
	p := ratelimit.FromShape(v)
	if reset == (local.Reset{}) {
		r.shapes = append(r.shapes, &p)
	}
	return &p, reset
}

func (r *reader) window(p *ratelimit.Policy) uint32 {
	d, n := binary.Varint(r.b)
	if n <= 0 || d != int64(int32(d)) {
		r.bad = true
		return 0
	}
	r.b = r.b[n:]
	base, _ := p.Window(r.sent)
	return base + uint32(int32(d))
}

func (r *reader) byte() byte { return byte(r.fixed(1)) }

func (r *reader) fixed(n int) uint64 {
	if len(r.b) < n {
		r.b, r.bad = nil, true
		return 0
	}
	v := uint64(0)
	for i := range n {
		v |= uint64(r.b[i]) << (8 * i)
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) u32() uint32 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > math.MaxUint32 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return uint32(v)
}

// units reads a count of a limit's units.
func (r *reader) units() uint32 { return min(r.u32(), ratelimit.MaxLimit) }

// appendResets are messages that tell resets.
func appendResets(messages [][]byte, all []local.Reset) [][]byte {
	for part := range slices.Chunk(all, batchLen/resetLen) {
		b := append(make([]byte, 0, 2+resetLen*len(part)), wireVersion, kindResets)
		for _, r := range part {
			for _, n := range [...]uint64{r.Key.Hi, r.Key.Lo, uint64(r.At), uint64(r.Until)} {
				b = binary.LittleEndian.AppendUint64(b, n)
			}
		}
		messages = append(messages, b)
	}
	return messages
}

// isResets tells whether a message tells resets.
func isResets(b []byte) bool { return len(b) >= 2 && b[0] == wireVersion && b[1] == kindResets }

// readResets calls each with the resets of such a message.
func readResets(b []byte, each func(local.Reset)) error {
	for r := (reader{b: b[2:]}); len(r.b) > 0; {
		reset := local.Reset{Key: ratelimit.Key{Hi: r.fixed(8), Lo: r.fixed(8)}, At: ratelimit.Instant(r.fixed(8)), Until: ratelimit.Instant(r.fixed(8))}
		if r.bad || !reset.Valid() {
			return errMalformed
		}
		each(reset)
	}
	return nil
}

// maxAsked bounds the keys of one question.
const maxAsked = 512

func stateRequest(keys []ratelimit.Key) []byte {
	b := make([]byte, 0, 2+16*len(keys))
	b = append(b, wireVersion, kindState)
	for _, k := range keys {
		b = binary.LittleEndian.AppendUint64(b, k.Hi)
		b = binary.LittleEndian.AppendUint64(b, k.Lo)
	}
	return b
}

// readStateRequest reports false for what is no such request.
func readStateRequest(b []byte) ([]ratelimit.Key, bool) {
	if len(b) < 2 || len(b)%16 != 2 || len(b)/16 > maxAsked || b[0] != wireVersion || b[1] != kindState {
		return nil, false
	}
	keys := make([]ratelimit.Key, 0, len(b)/16)
	for r := (reader{b: b[2:]}); len(r.b) > 0; {
		k := ratelimit.Key{Hi: r.fixed(8), Lo: r.fixed(8)}
		if k.Hi < 2 {
			return nil, false
		}
		keys = append(keys, k)
	}
	return keys, true
}
