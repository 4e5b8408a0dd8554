package cluster

import (
	"cmp"
	"encoding/binary"
	"errors"
	"math"
	"slices"

	"converger/internal/cluster"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// The format of what nodes tell each other, version 2. Numbers are little-endian
// or varints.
//
//	message  = version kind batch(uvarint) sent(8, Unix ns) n(uvarint) n times: shape(8)
//	           record*, by key
//	record   = key mark [shape, if marked; else the first in the message's list and no reset]
//	           register [others, if kind is state]
//	shape    = twice its place in the list(uvarint) | the same and 1, at(8) until(8) of the key's
//	           last reset
//	key      = the upper 16 bits, less those of the record before(uvarint) the others(14)
//	register = [win(varint, less the window of sent), if marked; token bucket: uvarint, the epoch]
//	           [count(uvarint)] [known(uvarint; windows: less count), if marked]
//	           [prev(uvarint)] demand
//	demand   = eighths(1, below 128) | 128 and the upper half of a float32(2)
//	others   = n(uvarint) n times: id(8) batch(4) win count(uvarint) prev(uvarint)
//
// The mark, of 8 bits, holds from below: the count, up to 6 (3 bits), prev, up to 2 (2
// bits), or that they follow; whether known, win and shape follow. Most keys of most
// batches were asked once or twice: they take 17 bytes, 15 of them for the key.
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
	wireVersion = 2
	kindReport  = 0
	kindState   = 1
	kindResets  = 2

	markCount = 7 // follows
	markPrev  = 3 << 3
	markKnown = 1 << 5
	markWin   = 1 << 6
	markShape = 1 << 7

	// batchLen is the length at which a message is sent off. A record adds less than
	// a hundred bytes to it, and in a state those of the others.
	batchLen  = 32 << 10
	maxShapes = 4096

	resetLen = 32
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

// writer builds one message: record by record, put in order at the end.
type writer struct {
	kind    byte
	sent    ratelimit.Instant
	batch   uint32 // 0: no message is being written
	shapes  []uint64
	keys    []place
	records []byte // without their keys
}

// place is where a key's record ends in the records of a writer.
type place struct {
	key        ratelimit.Key
	start, end uint32
}

func (w *writer) begin(kind byte, batch uint32, sent ratelimit.Instant) {
	*w = writer{kind: kind, batch: batch, sent: sent, shapes: w.shapes[:0], keys: w.keys[:0], records: w.records[:0]}
}

func (w *writer) open() bool { return w.batch != 0 }

// full tells that no further record should be added.
func (w *writer) full() bool {
	return len(w.records)+keyLen*len(w.keys) >= batchLen || len(w.shapes) >= maxShapes
}

const keyLen = 15 // on average

// end returns the message; the next one is to begin.
func (w *writer) end() []byte {
	slices.SortFunc(w.keys, func(a, b place) int { return cmp.Compare(a.key.Hi, b.key.Hi) })
	b := append(make([]byte, 0, 32+8*len(w.shapes)+(keyLen+2)*len(w.keys)+len(w.records)), wireVersion, w.kind)
	b = binary.AppendUvarint(b, uint64(w.batch))
	b = binary.LittleEndian.AppendUint64(b, uint64(w.sent))
	b = binary.AppendUvarint(b, uint64(len(w.shapes)))
	for _, s := range w.shapes {
		b = binary.LittleEndian.AppendUint64(b, s)
	}
	last := uint64(0)
	for _, k := range w.keys {
		upper := k.key.Hi >> 48
		b = binary.AppendUvarint(b, upper-last)
		last = upper
		b = binary.LittleEndian.AppendUint64(b, k.key.Hi)[:len(b)+6]
		b = binary.LittleEndian.AppendUint64(b, k.key.Lo)
		b = append(b, w.records[k.start:k.end]...)
	}
	w.batch = 0
	return b
}

// shape is the place of a shape in the message's list.
func (w *writer) shape(shape uint64) int {
	i := slices.Index(w.shapes, shape)
	if i < 0 {
		i = len(w.shapes)
		w.shapes = append(w.shapes, shape)
	}
	return i
}

func (w *writer) record(k ratelimit.Key, p *ratelimit.Policy, r register, others []other, reset local.Reset) {
	windows := p.Algorithm() != ratelimit.TokenBucket
	win, known := uint64(r.win), r.known
	if windows {
		win, known = w.window(p, r.win), max(r.known, r.count)-r.count
	}
	shape := 2 * w.shape(p.Shape())
	if reset != (local.Reset{}) {
		shape++
	}
	start := len(w.records)
	mark := byte(min(r.count, markCount)) | byte(min(r.prev, markPrev>>3))<<3
	w.records = append(w.records, 0)
	b := w.records
	if shape != 0 {
		mark |= markShape
		b = binary.AppendUvarint(b, uint64(shape))
		if shape&1 != 0 {
			b = binary.LittleEndian.AppendUint64(b, uint64(reset.At))
			b = binary.LittleEndian.AppendUint64(b, uint64(reset.Until))
		}
	}
	if win != 0 {
		mark |= markWin
		b = binary.AppendUvarint(b, win)
	}
	if r.count >= markCount {
		b = binary.AppendUvarint(b, uint64(r.count))
	}
	if known != 0 {
		mark |= markKnown
		b = binary.AppendUvarint(b, uint64(known))
	}
	if r.prev >= markPrev>>3 {
		b = binary.AppendUvarint(b, uint64(r.prev))
	}
	b[start] = mark
	if d := math.Ceil(float64(r.demand) * 8); d < 128 {
		b = append(b, byte(d))
	} else {
		b = binary.BigEndian.AppendUint16(b, half(r.demand)|1<<15)
	}
	if w.kind == kindState {
		b = binary.AppendUvarint(b, uint64(len(others)))
		for _, o := range others {
			b = binary.LittleEndian.AppendUint64(b, uint64(o.id))
			b = binary.LittleEndian.AppendUint32(b, o.batch)
			b = binary.AppendUvarint(b, w.window(p, o.win))
			b = binary.AppendUvarint(b, uint64(o.count))
			b = binary.AppendUvarint(b, uint64(o.prev))
		}
	}
	w.keys = append(w.keys, place{k, uint32(start), uint32(len(b))})
	w.records = b
}

// window is an index less that of the moment of sending, as a varint holds it.
func (w *writer) window(p *ratelimit.Policy, win uint32) uint64 {
	base, _ := p.Window(w.sent)
	d := int64(int32(win - base))
	return uint64(d<<1 ^ d>>63)
}

// half rounds a demand to the 16 bits that are kept, never to 0.
func half(f float32) uint16 { return uint16((math.Float32bits(f) + 0xffff) >> 16) }

// reader reads one message.
type reader struct {
	b      []byte
	kind   byte
	batch  uint32
	sent   ratelimit.Instant
	shapes []ratelimit.Policy
	upper  uint64 // bits of the last key
	others []other
	bad    bool
}

func (r *reader) begin(b []byte) error {
	*r = reader{b: b, shapes: r.shapes[:0], others: r.others[:0]}
	if r.byte() != wireVersion {
		return errMalformed
	}
	r.kind, r.batch, r.sent = r.byte(), r.u32(), ratelimit.Instant(r.fixed(8))
	shapes := int(r.u32())
	if r.bad || r.kind > kindState || r.batch == 0 || r.sent < 0 || shapes > maxShapes {
		return errMalformed
	}
	for range shapes {
		v := r.fixed(8)
		if r.bad || !ratelimit.ValidShape(v) {
			return errMalformed
		}
		r.shapes = append(r.shapes, ratelimit.FromShape(v))
	}
	return nil
}

// next reads a record; false at the end. The record's others are valid until the
// next call.
func (r *reader) next(rec *record) (bool, error) {
	if len(r.b) == 0 {
		return false, nil
	}
	r.upper += uint64(r.u32())
	*rec = record{key: ratelimit.Key{Hi: r.upper<<48 | r.fixed(6), Lo: r.fixed(8)}, register: register{batch: r.batch}}
	mark, shape := r.byte(), 0
	if mark&markShape != 0 {
		v := r.u32()
		if shape = int(v / 2); v&1 != 0 {
			rec.reset = local.Reset{Key: rec.key, At: ratelimit.Instant(r.fixed(8)), Until: ratelimit.Instant(r.fixed(8))}
			r.bad = r.bad || !rec.reset.Valid()
		}
	}
	if r.bad || r.upper >= 1<<16 || rec.key.Hi < 2 || shape >= len(r.shapes) {
		return false, errMalformed
	}
	rec.shape = &r.shapes[shape]
	windows := rec.shape.Algorithm() != ratelimit.TokenBucket
	switch {
	case windows && mark&markWin != 0:
		rec.win = r.window(rec.shape)
	case windows:
		rec.win, _ = rec.shape.Window(r.sent)
	case mark&markWin != 0:
		rec.win = r.u32()
	}
	if rec.count = uint32(mark & markCount); rec.count == markCount {
		rec.count = r.u32()
	}
	if windows {
		rec.count = min(rec.count, ratelimit.MaxLimit)
		rec.known = rec.count
	}
	if mark&markKnown != 0 {
		rec.known += r.units()
	}
	if rec.prev = uint32(mark & markPrev >> 3); rec.prev == markPrev>>3 {
		rec.prev = r.units()
	}
	d := uint32(r.byte())
	if rec.demand = float32(d) / 8; d >= 128 {
		rec.demand = math.Float32frombits((d&127<<8 | uint32(r.byte())) << 16)
	}
	if !(rec.demand >= 0 && rec.demand <= math.MaxFloat32) || !windows && rec.prev != 0 {
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
