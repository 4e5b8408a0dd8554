package owner

import (
	"encoding/binary"
	"errors"
	"math"
	"sync"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// The format of what nodes ask each other, version 1. Numbers are little-endian
// or varints.
//
//	request = version op*
//	op      = kind, with lastBit or without, now(8, Unix ns) wait(uvarint, ms; reserve only) n(uvarint) item*
//	item    = key(16) cost(uvarint) policy
//	policy  = bucket algorithm limit(uvarint) scale(uvarint, ms) burst(uvarint)
//	answer  = version result*
//	result  = flags item remaining(uvarint) wait(uvarint) at(varint, less now of the op)
//	copies  = version (copy | reset)*, a message: copy = key(16) shape(8) word(8) prev(4)
//	reset   = key(16) resetMark(8) at(8, Unix ns) life(4, ms)
//
// A peek answers what is used in place of what remains. The copy of a key that was reset
// comes behind the reset. Copies without a copy tell a node that has joined that all keys
// of the sender's that are now its own were sent.
const (
	wireVersion = 1
	maxOps      = 1024
	maxItems    = 32
	maxCopies   = 8192 // of a message
	copyLen     = 16 + 8 + 8 + 4
	resetMark   = 1<<64 - 1 // no shape
)

type kind byte

const (
	opTake    kind = iota // spend every item or none
	opAsk                 // what opTake would answer, without spending
	opRefund              // now is the At of the decision
	opReserve             // one item
	opPeek                // one item
	numKinds
)

// lastBit of a kind says that whoever is asked shall decide, and ask nobody on.
const lastBit = 0x80

const flagAllowed = 1

var errMalformed = errors.New("ratelimit/owner: malformed message")

// op is one question.
type op struct {
	kind  kind
	last  bool // see lastBit
	now   ratelimit.Instant
	wait  time.Duration
	items []ratelimit.Item
}

type result struct {
	allowed           bool
	item              uint8
	remaining, waitMs uint32
	at                ratelimit.Instant
}

func appendOp(b []byte, o *op) []byte {
	k := byte(o.kind)
	if o.last {
		k |= lastBit
	}
	b = binary.LittleEndian.AppendUint64(append(b, k), uint64(o.now))
	if o.kind == opReserve {
		b = binary.AppendUvarint(b, uint64(o.wait.Milliseconds()))
	}
	b = binary.AppendUvarint(b, uint64(len(o.items)))
	for _, it := range o.items {
		b = binary.LittleEndian.AppendUint64(b, it.Key.Hi)
		b = binary.LittleEndian.AppendUint64(b, it.Key.Lo)
		b = binary.AppendUvarint(b, uint64(it.Cost))
		r := it.Policy.Rule()
		b = append(b, byte(it.Policy.Bucket()), byte(r.Algorithm))
		b = binary.AppendUvarint(b, uint64(r.Limit))
		b = binary.AppendUvarint(b, uint64(r.Scale.Milliseconds()))
		b = binary.AppendUvarint(b, uint64(r.Burst))
	}
	return b
}

// appendResult adds the answer to an op that was asked with the time now.
func appendResult(b []byte, now ratelimit.Instant, r result) []byte {
	flags := byte(0)
	if r.allowed {
		flags = flagAllowed
	}
	b = append(b, flags, r.item)
	b = binary.AppendUvarint(b, uint64(r.remaining))
	b = binary.AppendUvarint(b, uint64(r.waitMs))
	return binary.AppendVarint(b, int64(r.at-now))
}

type reader struct {
	b   []byte
	bad bool
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

func (r *reader) uvarint(most uint64) uint64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > most {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) varint() int64 {
	v, n := binary.Varint(r.b)
	if n <= 0 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return v
}

func (r *reader) key() ratelimit.Key { return ratelimit.Key{Hi: r.fixed(8), Lo: r.fixed(8)} }

// op reads a question; its items are valid until the next one is read.
func (r *reader) op(o *op, policies *policies) error {
	k := r.byte()
	*o = op{kind: kind(k &^ lastBit), last: k&lastBit != 0, now: ratelimit.Instant(r.fixed(8)), items: o.items[:0]}
	if o.kind == opReserve {
		o.wait = time.Duration(r.uvarint(uint64(ratelimit.MaxReserve.Milliseconds()))) * time.Millisecond
	}
	n := r.uvarint(maxItems)
	if r.bad || o.kind >= numKinds || o.now < 0 || n == 0 || n > 1 && o.kind != opTake && o.kind != opAsk && o.kind != opRefund {
		return errMalformed
	}
	for range n {
		it := ratelimit.Item{Key: r.key(), Cost: uint32(r.uvarint(math.MaxUint32))}
		id := policyID{bucket: ratelimit.Bucket(r.byte()), rule: ratelimit.Rule{
			Algorithm: ratelimit.Algorithm(r.byte()),
			Limit:     int64(r.uvarint(math.MaxInt64)),
			Scale:     time.Duration(r.uvarint(uint64(ratelimit.MaxScale.Milliseconds()))) * time.Millisecond,
			Burst:     int64(r.uvarint(math.MaxInt64)),
		}}
		if !r.bad {
			it.Policy = policies.get(id)
		}
		if r.bad || it.Key.Hi < 2 || it.Policy == nil {
			return errMalformed
		}
		o.items = append(o.items, it)
	}
	return nil
}

func (r *reader) result(o *op) (result, error) {
	flags := r.byte()
	res := result{
		allowed: flags&flagAllowed != 0, item: r.byte(),
		remaining: uint32(r.uvarint(math.MaxUint32)), waitMs: uint32(r.uvarint(math.MaxUint32)),
	}
	res.at = o.now + ratelimit.Instant(r.varint())
	if r.bad || int(res.item) >= len(o.items) {
		return result{}, errMalformed
	}
	return res, nil
}

type policyID struct {
	bucket ratelimit.Bucket
	rule   ratelimit.Rule
}

// policies remembers the policies that others ask with, since a policy is not
// made per request. There are few; beyond maxPolicies they are forgotten.
type policies struct {
	mu sync.Mutex
	m  map[policyID]*ratelimit.Policy
}

const maxPolicies = 4096

// get returns nil for what is no policy.
func (p *policies) get(id policyID) *ratelimit.Policy {
	p.mu.Lock()
	defer p.mu.Unlock()
	if q := p.m[id]; q != nil {
		return q
	}
	q, err := ratelimit.NewPolicy(id.bucket, id.rule)
	if err != nil {
		return nil
	}
	if p.m == nil || len(p.m) >= maxPolicies {
		p.m = map[policyID]*ratelimit.Policy{}
	}
	p.m[id] = q
	return q
}

func appendReset(b []byte, r local.Reset) []byte {
	life := min((r.Until-r.At+1e6-1)/1e6, math.MaxUint32)
	return appendCopy(b, r.Key, resetMark, ratelimit.State{Word: uint64(r.At), Prev: uint32(life)})
}

// resetOf is the inverse of appendReset.
func resetOf(k ratelimit.Key, s ratelimit.State) local.Reset {
	at := ratelimit.Instant(s.Word)
	return local.Reset{Key: k, At: at, Until: at + ratelimit.Instant(s.Prev)*1e6}
}

func appendCopy(b []byte, k ratelimit.Key, shape uint64, s ratelimit.State) []byte {
	b = binary.LittleEndian.AppendUint64(b, k.Hi)
	b = binary.LittleEndian.AppendUint64(b, k.Lo)
	b = binary.LittleEndian.AppendUint64(b, shape)
	b = binary.LittleEndian.AppendUint64(b, s.Word)
	return binary.LittleEndian.AppendUint32(b, s.Prev)
}
