package activity

import (
	"bytes"
	"sync"
	"sync/atomic"

	"github.com/google/uuid"

	"converger/internal/tenants"
)

// soloLimit is how many activities may wait for the first flusher before another one takes over its shard: as long as
// there are few, one transaction after the other is cheaper for the database than two at a time.
const soloLimit = 16

// item is one activity between Append and the commit.
type item struct {
	new  New
	res  Result // written before done is set
	done atomic.Bool
	call *call
	// joined are later items with the same key. Guarded by queue.mu.
	joined []*item
}

// call is one call of Append, which waits for several items.
type call struct {
	left atomic.Int32
	done chan struct{} // closed when none is left
}

// finish gives the item its result; the item is the caller's from then on.
func (it *item) finish(r Result) {
	it.res = r
	it.done.Store(true)
	if it.call.left.Add(-1) == 0 {
		close(it.call.done)
	}
}

// keyRef is the scope of an idempotency key.
type keyRef struct {
	tenant       tenants.ID
	conversation uuid.UUID
	caller, key  string
}

func keyOf(n *New) keyRef {
	return keyRef{n.TenantID, n.ConversationID, n.Caller, n.IdempotencyKey}
}

// queue is what waits in front of the database, in one shard for each flusher; a conversation always falls into the
// same shard. Flusher 0 is the one that works under low load: it also takes what little the other shards hold. A shard
// has one flusher at a time, so that the activities of a conversation are committed, and broadcast, in their order.
//
// A key that is queued or being written never enters a second batch: there it would wait, inside the database, for the
// first batch's commit, and everybody in its batch with it. Its item joins the first one's answer instead.
type queue struct {
	capacity, maxBatch int
	wake               []chan struct{} // one for each flusher, capacity 1

	mu      sync.Mutex
	shards  []shard
	waiting int // items in shards, and joined ones
	keys    map[keyRef]*item
	closed  bool
}

type shard struct {
	items []*item
	owner int // the flusher that writes some of its items, or nobody
}

const nobody = -1

func newQueue(flushers, maxBatch, capacity int) *queue {
	q := &queue{
		capacity: capacity, maxBatch: maxBatch,
		wake: make([]chan struct{}, flushers), shards: make([]shard, flushers), keys: make(map[keyRef]*item),
	}
	for i := range flushers {
		q.wake[i] = make(chan struct{}, 1)
		q.shards[i].owner = nobody
	}
	return q
}

// add queues items, in order; those that find no room, or a closed queue, are finished with ErrOverloaded.
func (q *queue) add(items []*item) {
	var refused []*item
	q.mu.Lock()
	for _, it := range items {
		if q.closed || q.waiting >= q.capacity {
			refused = append(refused, it)
			continue
		}
		q.waiting++
		if it.new.IdempotencyKey != "" {
			key := keyOf(&it.new)
			if first := q.keys[key]; first != nil {
				first.joined = append(first.joined, it)
				continue
			}
			q.keys[key] = it
		}
		i := int(it.new.ConversationID[15]) % len(q.shards)
		q.shards[i].items = append(q.shards[i].items, it)
		if i > 0 && len(q.shards[i].items) > soloLimit {
			q.signal(i)
		}
	}
	q.mu.Unlock()
	q.signal(0)
	for _, it := range refused {
		it.finish(Result{Err: ErrOverloaded})
	}
}

func (q *queue) signal(flusher int) {
	select {
	case q.wake[flusher] <- struct{}{}:
	default:
	}
}

// take moves what the flusher shall write next into batch[:0]. When that is nothing, the flusher waits for its wake
// channel, unless last says that nothing will come any more.
func (q *queue) take(flusher int, batch []*item) (_ []*item, last bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	batch = batch[:0]
	idle := true // all other shards are empty and nobody works on them
	if flusher == 0 {
		// The others' few first: shard 0 alone may fill batch after batch.
		for i := 1; i < len(q.shards); i++ {
			if s := &q.shards[i]; s.owner == nobody && (len(s.items) <= soloLimit || q.closed) {
				batch = q.move(batch, s, flusher)
			}
			idle = idle && q.shards[i].owner == nobody && len(q.shards[i].items) == 0
		}
		batch = q.move(batch, &q.shards[0], flusher)
		return batch, q.closed && idle && len(batch) == 0
	}
	if s := &q.shards[flusher]; s.owner == nobody && len(s.items) > soloLimit {
		batch = q.move(batch, s, flusher)
	}
	return batch, q.closed && len(batch) == 0
}

func (q *queue) move(batch []*item, s *shard, flusher int) []*item {
	n := min(len(s.items), q.maxBatch-len(batch))
	if n == 0 {
		return batch
	}
	batch = append(batch, s.items[:n]...)
	rest := copy(s.items, s.items[n:])
	clear(s.items[rest:])
	s.items = s.items[:rest]
	s.owner = flusher
	q.waiting -= n
	return batch
}

// free ends the flusher's work on its shards.
func (q *queue) free(flusher int) {
	q.mu.Lock()
	for i := range q.shards {
		if s := &q.shards[i]; s.owner == flusher {
			s.owner = nobody
			if i > 0 && len(s.items) > soloLimit {
				q.signal(i)
			}
		}
	}
	q.mu.Unlock()
	if flusher != 0 {
		q.signal(0) // for what this one left, and for the end of both
	}
}

// settle hands the results that stand in the items to everyone who waits for them.
func (q *queue) settle(items []*item) {
	var joined [][]*item
	q.mu.Lock()
	for i, it := range items {
		if it.new.IdempotencyKey == "" {
			continue
		}
		delete(q.keys, keyOf(&it.new))
		if len(it.joined) > 0 {
			if joined == nil {
				joined = make([][]*item, len(items))
			}
			joined[i] = it.joined
			q.waiting -= len(it.joined)
		}
	}
	q.mu.Unlock()
	for i, it := range items {
		var again []*item
		if joined != nil {
			for _, other := range joined[i] {
				if res, ok := follow(&it.new, &it.res, &other.new); ok {
					other.finish(res)
				} else {
					again = append(again, other)
				}
			}
		}
		it.finish(it.res)
		if len(again) > 0 {
			q.add(again)
		}
	}
}

// close lets no more items in.
func (q *queue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	for i := range q.wake {
		q.signal(i)
	}
}

// length is the number of items that wait.
func (q *queue) length() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.waiting
}

// follow answers n, which has the same key as first, from first's result. It can't when first was refused for something
// that need not be true of n.
func follow(first *New, r *Result, n *New) (_ Result, ok bool) {
	same := bytes.Equal(first.BodyHash, n.BodyHash)
	if r.Err != nil {
		return Result{Err: r.Err}, !isRefusal(r.Err) || same && sameChannel(first.ChannelID, n.ChannelID)
	}
	if n.ChannelID != nil && *n.ChannelID != r.Activity.ChannelID {
		return Result{Err: ErrNotFound}, true
	}
	if !same {
		return Result{Err: ErrKeyReused}, true
	}
	return Result{Activity: r.Activity, Repeat: true}, true
}

func sameChannel(a, b *uuid.UUID) bool {
	return a == b || a != nil && b != nil && *a == *b
}
