package messages

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/loadtest/wire"
)

// load is the callers and what they were answered. Its counters are read while it runs.
type load struct {
	o      Options
	world  *world
	ledger *ledger

	next     atomic.Int64 // number of the next message
	sent     atomic.Int64 // with those that were refused
	accepted atomic.Int64
	failed   atomic.Int64
	took     hist // of accepted messages, both kinds
	posts    hist
	webhooks hist

	mu     sync.Mutex
	errors map[string]int64 // by status and code, or by what broke
}

const (
	maxErrors  = 100 // kinds that are told apart
	backOff    = 100 * time.Millisecond
	maxBackOff = time.Second
)

func newLoad(o Options, w *world, l *ledger) *load {
	return &load{o: o, world: w, ledger: l, errors: map[string]int64{}}
}

// run sends what is due from now on for d, and returns how many messages were due and not sent. ctx ends it early, and
// what is under way with it.
func (l *load) run(ctx context.Context, target wire.Target, d time.Duration) (behind int64) {
	start := time.Since(l.ledger.began)
	first, sent := l.next.Load(), l.sent.Load()
	var wg sync.WaitGroup
	for range l.o.Callers {
		wg.Go(func() {
			c := wire.NewCaller(target)
			defer c.Close()
			defer context.AfterFunc(ctx, c.Abort)()
			for ctx.Err() == nil && l.one(ctx, c, first, start, start+d) {
			}
		})
	}
	wg.Wait()
	if l.o.Rate == 0 || ctx.Err() != nil {
		return 0
	}
	return max(0, int64(l.o.Rate*d.Seconds())-(l.sent.Load()-sent))
}

// one sends one message, when it is due. It returns false when none is due any more.
func (l *load) one(ctx context.Context, c *wire.Caller, first int64, start, end time.Duration) bool {
	now := func() time.Duration { return time.Since(l.ledger.began) }
	due := now()
	var number int64
	if l.o.Rate > 0 {
		number = l.next.Add(1) - 1
		due = start + time.Duration(float64(number-first)/l.o.Rate*float64(time.Second))
		// What was due and found every caller busy until the end is not sent: it was behind.
		if due >= end || now() >= end || !pause(ctx, due-now()) {
			return false
		}
	} else {
		if due >= end {
			return false
		}
		number = l.next.Add(1) - 1
	}

	l.sent.Add(1)
	place, kind := l.place(number)
	key := l.ledger.key(number, due)
	head, body, err := place.request(key, l.o.text(key), time.Now())
	var answer wire.Answer
	if err == nil {
		answer, err = c.Do(ctx, http.MethodPost, place.path, head, body)
	}
	if err == nil && (answer.Status == http.StatusCreated || answer.Status == http.StatusOK) {
		took := now() - due
		l.accepted.Add(1)
		l.took.add(took)
		kind.add(took)
		l.ledger.ack(number)
		return true
	}
	if ctx.Err() != nil {
		return false // it was cut off by us
	}
	l.failed.Add(1)
	l.count(reason(answer, err))
	if l.o.Rate == 0 { // who waits for answers also listens to them
		pause(ctx, min(maxBackOff, max(backOff, answer.RetryAfter)))
	}
	return true
}

// place chooses where a message goes. The shares of both kinds are kept in every stretch of numbers, not only in the end.
func (l *load) place(number int64) (place, *hist) {
	in := int64(float64(number+1)*l.o.Inbound) - int64(float64(number)*l.o.Inbound)
	if in > 0 && len(l.world.webhooks) > 0 {
		n := int64(float64(number) * l.o.Inbound)
		return l.world.webhooks[n%int64(len(l.world.webhooks))], &l.webhooks
	}
	return l.world.posts[number%int64(len(l.world.posts))], &l.posts
}

func (l *load) count(what string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if _, known := l.errors[what]; !known && len(l.errors) >= maxErrors {
		what = "others"
	}
	l.errors[what]++
}

// resetErrors forgets those of the warm-up.
func (l *load) resetErrors() {
	l.mu.Lock()
	defer l.mu.Unlock()
	clear(l.errors)
}

func (l *load) readErrors() map[string]int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.errors)
}

// reason names a failure, by few names.
func reason(a wire.Answer, err error) string {
	switch {
	case err != nil:
		return wire.Reason(err)
	case a.Code != "":
		return fmt.Sprintf("%d %s", a.Status, a.Code)
	}
	return fmt.Sprint(a.Status)
}

// pause waits and reports whether it waited to the end.
func pause(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
