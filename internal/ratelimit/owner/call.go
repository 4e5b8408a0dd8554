package owner

import (
	"context"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/cluster"
)

const (
	// maxFlying is the number of calls to one node that may be under way at once.
	// What comes meanwhile waits and travels together in the next one.
	maxFlying = 2
	// maxWaiting bounds what waits for one node.
	maxWaiting = 8192
)

var errBusy = errors.New("ratelimit/owner: too many checks wait for the node")

// line carries questions to one node. A question that finds no call under way goes
// at once and alone, in its own goroutine; others are batched.
type line struct {
	to   cluster.ID
	call func(ctx context.Context, to cluster.ID, ops []*question)

	mu      sync.Mutex
	flying  int
	waiting []*question
}

// question is an op on its way. res and err are set before done is closed.
type question struct {
	op
	patience time.Duration // the time that it may take, waiting included
	res      result
	err      error
	done     chan struct{}
	// late is set when nobody waits for the answer any more: the check was decided
	// without it, and must not be spent there too.
	late atomic.Bool
}

// ask returns the answer, or after its patience an error.
func (l *line) ask(ctx context.Context, o op, patience time.Duration) (result, error) {
	q := &question{op: o, patience: patience, done: make(chan struct{})}
	l.mu.Lock()
	switch {
	case l.flying < maxFlying:
		l.flying++
		l.mu.Unlock()
		l.fly(ctx, []*question{q})
		if l.next() {
			go l.drain(context.WithoutCancel(ctx))
		}
		return q.res, q.err
	case len(l.waiting) >= maxWaiting:
		l.mu.Unlock()
		return result{}, errBusy
	}
	l.waiting = append(l.waiting, q)
	l.mu.Unlock()
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-q.done:
		return q.res, q.err
	case <-timer.C:
		q.late.Store(true)
		return result{}, context.DeadlineExceeded
	}
}

// next gives the call that has ended up, unless somebody waits for it.
func (l *line) next() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.waiting) == 0 {
		l.flying--
		return false
	}
	return true
}

// drain sends what waits until nothing does. It ends by itself: every call has a deadline.
func (l *line) drain(ctx context.Context) {
	for {
		l.mu.Lock()
		n := min(len(l.waiting), maxOps)
		if n == 0 {
			l.flying--
			l.mu.Unlock()
			return
		}
		batch := slices.DeleteFunc(l.waiting[:n:n], func(q *question) bool { return q.late.Load() })
		l.waiting = l.waiting[n:]
		l.mu.Unlock()
		if len(batch) > 0 {
			l.fly(ctx, batch)
		}
	}
}

func (l *line) fly(ctx context.Context, batch []*question) {
	patience := batch[0].patience // of those who wait for it, whoever has the least stops waiting by itself
	for _, q := range batch[1:] {
		patience = max(patience, q.patience)
	}
	// The caller may give up; the check goes on, or its spend would be in doubt.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), patience)
	defer cancel()
	l.call(ctx, l.to, batch)
	for _, q := range batch {
		close(q.done)
	}
}
