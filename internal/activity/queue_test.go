package activity

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/fault"
)

// inShard is an item of a conversation that falls into a shard of two.
func inShard(c *call, shard byte, key string) *item {
	conv := uuid.UUID{15: shard}
	return &item{call: c, new: New{ConversationID: conv, IdempotencyKey: key, BodyHash: []byte("hash")}}
}

func fill(q *queue, shard byte, n int) (*call, []*item) {
	c := &call{done: make(chan struct{})}
	c.left.Store(int32(n))
	items := make([]*item, n)
	for i := range items {
		items[i] = inShard(c, shard, "")
	}
	q.add(items)
	return c, items
}

// batch returns how many items the flusher would write now.
func batch(q *queue, flusher int) int {
	items, _ := q.take(flusher, nil)
	return len(items)
}

func TestOneFlusherAtLowLoad(t *testing.T) {
	t.Parallel()
	q := newQueue(2, 100, 1000)
	fill(q, 0, 2)
	fill(q, 1, soloLimit)
	if n := batch(q, 1); n != 0 {
		t.Errorf("the second flusher took %d items of few", n)
	}
	if n := batch(q, 0); n != 2+soloLimit {
		t.Errorf("the first flusher took %d, want all", n)
	}
}

func TestTwoFlushersUnderLoad(t *testing.T) {
	t.Parallel()
	q := newQueue(2, 100, 1000)
	fill(q, 0, 150)
	fill(q, 1, soloLimit+1)
	if n := batch(q, 0); n != 100 {
		t.Errorf("the first flusher took %d, want a full batch of its own shard", n)
	}
	select {
	case <-q.wake[1]:
	default:
		t.Error("the second flusher sleeps")
	}
	if n := batch(q, 1); n != soloLimit+1 {
		t.Errorf("the second flusher took %d, want its shard", n)
	}
}

// A shard that the first flusher is writing is not the second one's, however much comes: the order of a conversation.
func TestShardHasOneFlusher(t *testing.T) {
	t.Parallel()
	q := newQueue(2, 100, 1000)
	fill(q, 1, 3)
	first, _ := q.take(0, nil)
	fill(q, 1, 50)
	if n := batch(q, 1); n != 0 {
		t.Fatalf("the second flusher took %d items beside the first one", n)
	}
	<-q.wake[1] // from the 50
	q.free(0)
	q.settle(first)
	select {
	case <-q.wake[1]:
	default:
		t.Error("nobody wakes the second flusher when the shard is free")
	}
	if n := batch(q, 1); n != 50 {
		t.Errorf("then it took %d", n)
	}
}

// A full shard of the first flusher does not starve the few of the other.
func TestFewAreNotStarved(t *testing.T) {
	t.Parallel()
	q := newQueue(2, 10, 1000)
	fill(q, 0, 100)
	_, few := fill(q, 1, 2)
	got, _ := q.take(0, nil)
	if len(got) != 10 || got[0] != few[0] || got[1] != few[1] {
		t.Errorf("the batch of %d does not begin with them", len(got))
	}
}

func TestKeyInFlightJoins(t *testing.T) {
	t.Parallel()
	q := newQueue(1, 100, 1000)
	c := &call{done: make(chan struct{})}
	c.left.Store(5)
	first, same, other, bound, later := inShard(c, 0, "k"), inShard(c, 0, "k"), inShard(c, 0, "k"), inShard(c, 0, "k"), inShard(c, 0, "k")
	other.new.BodyHash = []byte("other")
	bound.new.ChannelID = ptr(uuid.New())
	q.add([]*item{first, same})
	got, _ := q.take(0, nil)
	q.add([]*item{other, bound}) // while it is being written
	if len(got) != 1 || batch(q, 0) != 0 {
		t.Fatal("a key entered a batch twice")
	}
	first.res = Result{Activity: Activity{ID: uuid.New(), Seq: 7}}
	q.free(0)
	q.settle(got)
	for name, it := range map[string]*item{"repeat 7": same, "reused": other, "not found": bound} {
		if !it.done.Load() || describe([]Result{it.res})[0] != name {
			t.Errorf("want %s, got %v", name, describe([]Result{it.res}))
		}
	}
	if n := q.length(); n != 0 {
		t.Errorf("%d items are still counted", n)
	}
	q.add([]*item{later})
	if n := batch(q, 0); n != 1 {
		t.Errorf("the key is still in flight: %d", n)
	}
}

// What was refused for the first one's own fault is tried anew by those that differ from it, and not by those that don't.
func TestJoinedToAFailure(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		err  error
		want []bool // which of {same, other body, other channel} get the error at once
	}{
		{ErrClosed, []bool{true, false, false}},
		{fault.Invalidf("/reply_to_id", fault.NotFound, "x"), []bool{true, false, false}},
		{errors.New("no database"), []bool{true, true, true}},
		{ErrLockTimeout, []bool{true, true, true}},
	} {
		q := newQueue(1, 100, 1000)
		c := &call{done: make(chan struct{})}
		c.left.Store(4)
		items := make([]*item, 4)
		for i := range items {
			items[i] = inShard(c, 0, "k")
		}
		items[2].new.BodyHash = []byte("other")
		items[3].new.ChannelID = ptr(uuid.New())
		q.add(items)
		got, _ := q.take(0, nil)
		items[0].res.Err = tt.err
		q.free(0)
		q.settle(got)
		var done []bool
		for _, it := range items[1:] {
			done = append(done, it.done.Load())
		}
		if diff := cmp.Diff(tt.want, done); diff != "" {
			t.Errorf("%v:\n%s", tt.err, diff)
		}
		if n := q.length(); n != len(items)-1-count(done) {
			t.Errorf("%v: %d items wait", tt.err, n)
		}
	}
}

func count(bools []bool) (n int) {
	for _, b := range bools {
		if b {
			n++
		}
	}
	return n
}

func TestQueueBound(t *testing.T) {
	t.Parallel()
	q := newQueue(2, 100, 10)
	_, items := fill(q, 0, 12)
	for i, it := range items {
		if refused := it.done.Load(); refused != (i >= 10) || refused && !errors.Is(it.res.Err, ErrOverloaded) {
			t.Errorf("item %d: refused %v, %v", i, refused, it.res.Err)
		}
	}
}

// After the close each flusher ends, the first one last, and nothing is left behind.
func TestQueueClose(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, soloLimit, soloLimit + 1, 100} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			t.Parallel()
			q := newQueue(2, 8, 1000)
			call0, _ := fill(q, 0, n)
			call1, _ := fill(q, 1, n)
			q.close()
			late, _ := fill(q, 0, 1)
			<-late.done
			ended := [2]bool{}
			for rounds := 0; !ended[0] || !ended[1]; rounds++ {
				if rounds > 1000 {
					t.Fatal("the flushers do not end")
				}
				for f := range ended {
					if ended[f] {
						continue
					}
					items, last := q.take(f, nil)
					ended[f] = last
					q.free(f)
					q.settle(items)
				}
			}
			if n > 0 {
				<-call0.done
				<-call1.done
			}
			if left := q.length(); left != 0 {
				t.Errorf("%d are left", left)
			}
		})
	}
}
