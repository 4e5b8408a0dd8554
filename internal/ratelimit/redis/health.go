package redis

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"converger/internal/ratelimit"
)

const (
	// beatEvery is how often a node says at Redis that it lives, and hears who else does.
	beatEvery = time.Second
	// beatLife is how long it counts as live after that.
	beatLife = 3 * time.Second
	// forgetAfter is how long fewer nodes must have been heard of, without a failure, until they are believed.
	forgetAfter = 2 * beatLife
	// probeEvery is how often Redis is tried while the breaker is open.
	probeEvery = 200 * time.Millisecond
	// probes is how many have to be answered in a row for it to close.
	probes = 3
	// carefulFor is how long a node keeps to its share after its breaker has closed: by then the others, which try as
	// often, have told Redis what they admitted without it.
	carefulFor = 2 * time.Second
	// settleBatch is how many budgets are brought to Redis at once.
	settleBatch = 256
)

// newID tells this start of this node from all others.
func newID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails
	return hex.EncodeToString(b)
}

// Join hears which nodes live, and lets them know of this one. It is to be called before a node takes requests. It tries
// until ctx ends; the error is of the last try.
func (s *Store) Join(ctx context.Context) error {
	for {
		err := s.beat(ctx, beatLife)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("ratelimit/redis: no answer: %w", err)
		case <-time.After(probeEvery):
		}
	}
}

// Run keeps this node on the list of the live ones, tries Redis while it is not asked, and brings what was admitted
// without it, until ctx ends. It returns nil.
func (s *Store) Run(ctx context.Context) error {
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			_ = s.beat(context.WithoutCancel(ctx), 0) // else the others hear of it in three seconds
			return nil
		case <-s.breaker.tripped:
			s.recover(ctx)
		case <-tick.C:
			if err := s.beat(ctx, beatLife); err != nil {
				if ctx.Err() == nil {
					s.outage.failed(reasonOf(err), err, s.live())
				}
				continue
			}
			s.outage.well()
			if err := s.settle(ctx, false); err != nil && ctx.Err() == nil {
				s.outage.failed(reasonOf(err), err, s.live())
			}
		}
	}
}

// beat says that this node lives, for so long, and hears how many do.
func (s *Store) beat(ctx context.Context, life time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	sent := s.clock.Now()
	ops := []op{{script: nodesScript, key: s.roster, args: []any{s.id, life.Milliseconds()}}}
	err := do(ctx, s.client, ops)
	a := ops[0].answer
	if err == nil && len(a) != 3 {
		err = errMalformed
	}
	if err != nil {
		s.fewer.Store(0)
		return err
	}
	if !s.test {
		s.learn(sent, s.clock.Now(), ratelimit.Instant(a[0]*1e9+a[1]))
	}
	s.count(a[2])
	return nil
}

// count takes in how many nodes there are. A Redis that has lost the list hears of one after the other: a node that
// believed it would take the whole limit for itself.
func (s *Store) count(n int64) {
	now := int64(s.clock.Now())
	since := s.fewer.Load()
	switch {
	case n >= s.present.Load():
		s.fewer.Store(0)
		s.present.Store(n)
	case since == 0:
		s.fewer.Store(now)
	case now-since >= int64(forgetAfter):
		s.fewer.Store(0)
		s.present.Store(max(n, 1))
	}
}

// recover tries Redis until it answers again, brings it what was admitted meanwhile and closes the breaker.
func (s *Store) recover(ctx context.Context) {
	tick := time.NewTicker(probeEvery)
	defer tick.Stop()
	for good := 0; good < probes; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		err := s.probe(ctx)
		if good++; err == nil && good == probes {
			s.breaker.set(halfOpen)
			err = s.settle(ctx, false)
		}
		if err != nil && ctx.Err() == nil {
			good = 0
			s.breaker.set(open)
			s.outage.failed(reasonOf(err), err, s.live())
		}
	}
	s.careful.Store(int64(s.clock.Now().Add(carefulFor)))
	s.breaker.set(closed)
	s.log.Debug("rate limits: Redis answers probes, it is asked again", slog.Int("nodes", s.live()))
	// What Redis lost comes back key by key as they are asked for, and the rest here.
	if err := s.settle(ctx, true); err != nil && ctx.Err() == nil {
		s.outage.failed(reasonOf(err), err, s.live())
	}
}

// probe does what checks do: it writes, and where the last failure was.
func (s *Store) probe(ctx context.Context) error {
	if err := s.beat(ctx, beatLife); err != nil {
		return err
	}
	key := s.failed.Load()
	if key == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	return do(ctx, s.client, []op{{script: nodesScript, key: *key + ":probe", args: []any{s.id, beatLife.Milliseconds()}}})
}

// settle tells Redis what this node admitted without it; with all, also what it had heard of it, in case it was lost.
func (s *Store) settle(ctx context.Context, all bool) error {
	failures := s.failures.Load()
	for shard := range shadowShards {
		now := s.serverTime(s.clock.Now())
		items := s.shadow.unsettled(shard, now, failures, all)
		for len(items) > 0 {
			n := min(len(items), settleBatch)
			if err := s.settleItems(ctx, now, items[:n], failures); err != nil {
				return err
			}
			items = items[n:]
		}
	}
	return nil
}

func (s *Store) settleItems(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item, failures uint32) error {
	ops := make([]op, 0, len(items))
	claims := make([]claim, 0, len(items))
	claimed := items[:0]
	for _, it := range items {
		c, ok := s.shadow.claim(it, now, failures)
		if !ok || !c.known { // a check has done it meanwhile
			continue
		}
		claimed, claims = append(claimed, it), append(claims, c)
		ops = append(ops, s.op("settle", it, now, 0, &c))
	}
	if len(ops) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, 10*timeout)
	defer cancel()
	err := do(ctx, s.client, ops)
	nodes := s.live()
	for i, it := range claimed {
		r, ok := newReply(it.Policy, ops[i].answer)
		if ok {
			s.shadow.note(it, r, 0, nodes, &claims[i])
			continue
		}
		s.shadow.release(it, now, &claims[i])
		if err == nil {
			err = errMalformed
		}
	}
	return err
}

// Degraded is nil, or what an operator should look at: Redis can't be asked.
func (s *Store) Degraded() error {
	if why := s.outage.why(); why != "" {
		return fmt.Errorf("Redis can't be asked (%s): this node enforces its share of every limit, one of %d", why, s.live()) //nolint:staticcheck,revive // a name
	}
	if !s.breaker.is(closed) {
		return errors.New("Redis is not asked until it answers probes: this node enforces its share of every limit") //nolint:staticcheck,revive // a name
	}
	return nil
}
