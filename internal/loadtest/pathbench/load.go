package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"converger/internal/loadtest/wire"
)

// text makes the body as large as a row of pgbench's: 300 bytes.
var text = strings.Repeat("x", 300)

// keys makes idempotency keys that are unique within a run.
var keys atomic.Int64

func newKey() string { return "bench-" + strconv.FormatInt(keys.Add(1), 36) }

func newCaller(addr string) *wire.Caller { return wire.NewCaller(wire.Target{Address: addr}) }

// post sends one activity and returns the status of the answer.
func post(ctx context.Context, c *wire.Caller, conv *conversation, key, text string) (int, error) {
	a, err := c.Do(ctx, http.MethodPost, "/api/v1/conversations/"+conv.id+"/activities",
		"X-Api-Key: "+conv.tenant.APIKey+"\r\nContent-Type: application/json\r\nIdempotency-Key: \""+key+"\"\r\n", []byte(`{"text":"`+text+`"}`))
	return a.Status, err
}

// load is callers that post without a pause, each over its own connection to the next conversation in turn.
type load struct {
	addr    string
	callers []*wire.Caller
}

// newLoad makes n callers with no connection yet.
func newLoad(addr string, n int) *load {
	l := &load{addr: addr, callers: make([]*wire.Caller, n)}
	for i := range l.callers {
		l.callers[i] = newCaller(addr)
	}
	return l
}

func (l *load) close() {
	for _, c := range l.callers {
		c.Close()
	}
}

// run posts until d has passed, or until at most number posts were made if that is not 0, and returns how many were
// accepted and in what time. Any other answer than 201 ends it with an error.
func (l *load) run(ctx context.Context, to []*conversation, d time.Duration, number int64) (accepted int64, took time.Duration, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var ok, begun atomic.Int64
	var wg sync.WaitGroup
	start := time.Now()
	for i, c := range l.callers {
		wg.Go(func() {
			for n := i; ctx.Err() == nil && (d == 0 || time.Since(start) < d); n += len(l.callers) {
				if number > 0 && begun.Add(1) > number {
					return
				}
				status, err := post(ctx, c, to[n%len(to)], newKey(), text)
				switch {
				case err != nil:
					cancel(fmt.Errorf("post an activity: %w", err))
				case status != http.StatusCreated:
					cancel(fmt.Errorf("post an activity: HTTP %d", status))
				default:
					ok.Add(1)
				}
			}
		})
	}
	wg.Wait()
	return ok.Load(), time.Since(start), context.Cause(ctx)
}

const (
	gap             = 10 * time.Millisecond // between two posts that are timed
	arrivalPatience = 30 * time.Second
)

// latencies posts one activity after the other, n of them, and returns for each the time from before it was written until
// its first attempt had reached the receiver.
func latencies(ctx context.Context, addr string, to []*conversation, r *wire.Receiver, n int) ([]time.Duration, error) {
	c := newCaller(addr)
	defer c.Close()
	arrivals := make(chan wire.Arrival, 1024)
	r.Observe(func(a wire.Arrival) {
		a.Body = slices.Clone(a.Body)
		select {
		case arrivals <- a:
		default: // nobody waits: the run is ending
		}
	})
	defer r.Observe(nil)
	took := make([]time.Duration, 0, n)
	for i := range n {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(gap):
		}
		key := newKey()
		start := time.Now()
		status, err := post(ctx, c, to[i%len(to)], key, text)
		if err != nil {
			return nil, fmt.Errorf("post an activity: %w", err)
		}
		if status != http.StatusCreated {
			return nil, fmt.Errorf("post an activity: HTTP %d", status)
		}
		patience := time.NewTimer(arrivalPatience)
	wait:
		for {
			select {
			case a := <-arrivals:
				if a.Key() == key {
					took = append(took, a.At.Sub(start))
					break wait
				}
			case <-patience.C:
				return nil, fmt.Errorf("a delivery did not arrive within %s", arrivalPatience)
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		patience.Stop()
	}
	return took, nil
}
