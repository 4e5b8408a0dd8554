package delivery

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/google/uuid"

	"converger/internal/postgres"
)

const (
	// lookPause is the least time between two looks: pokes that come faster share one. It is as long as the look itself where
	// that took longer, so that many channels with waiting lanes do not keep the database busy.
	lookPause = 3 * time.Millisecond
	// busyPause is when to look again after another node was found handing lanes over.
	busyPause = 10 * time.Millisecond
	// expireEvery is how often expired leases are looked for, at most a quarter of the lease.
	expireEvery = time.Second
)

func (s *Service) pokeDispatcher() {
	select {
	case s.poke <- struct{}{}:
	default:
	}
}

// dispatchLoop looks for due lanes when poked, when the next one is due, and every Tick.
func (s *Service) dispatchLoop(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.poke:
		case <-timer.C:
		}
		start := time.Now()
		next, err := s.look(ctx)
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			s.m.errors.WithLabelValues("dispatch").Inc()
			s.log.Error("handing lanes over failed; trying again", "error", err, "database_unavailable", postgres.IsUnavailable(err))
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(lookPause, time.Since(start))):
		}
		timer.Reset(next)
	}
}

// look is one round of the loop: one cheap query when nothing is due. It returns when to look again.
func (s *Service) look(ctx context.Context) (next time.Duration, err error) {
	s.dispatching.Lock()
	due := time.Since(s.expired) >= min(expireEvery, s.o.Lease/4)
	if due {
		s.expired = time.Now()
	}
	s.dispatching.Unlock()
	if due {
		n, err := s.expireAllTenants(ctx)
		if err != nil {
			return s.o.Tick, fmt.Errorf("take over expired leases: %w", err)
		}
		if n > 0 {
			s.m.expired.Add(float64(n))
			s.log.Warn("took over lanes whose lease had expired", "lanes", n)
		}
	}
	wait, waiting, err := s.firstReadyAllTenants(ctx)
	if err == nil {
		s.overdue.Store(int64(max(0, -wait)))
	}
	switch {
	case err != nil:
		return s.o.Tick, fmt.Errorf("look for due lanes: %w", err)
	case !waiting:
		s.behind.Store(nil)
		return s.o.Tick, nil
	case wait > 0:
		s.behind.Store(nil)
		return min(wait, s.o.Tick), nil
	}
	n, turn, err := s.dispatch(ctx)
	switch {
	case err != nil:
		return s.o.Tick, err
	case !turn:
		return min(busyPause, s.o.Tick), nil
	case n > 0:
		return 0, nil // there may be more
	}
	return s.o.Tick, nil // all caps are reached: a worker that ends pokes
}

// Dispatch hands due lanes over to workers once: expired leases are taken over first, then tenants take turns, within the
// caps in flight of each channel and tenant (a tenant gets at most 80 % of the workers divided by the active tenants) and
// of the workers. It returns how many lanes were handed over: 0 also when another node is at it.
func (s *Service) Dispatch(ctx context.Context) (n int, err error) {
	if _, err := s.expireAllTenants(ctx); err != nil {
		return 0, fmt.Errorf("take over expired leases: %w", err)
	}
	n, _, err = s.dispatch(ctx)
	return n, err
}

// dispatch returns turn false when another node held the lock.
func (s *Service) dispatch(ctx context.Context) (n int, turn bool, err error) {
	s.dispatching.Lock() // not a lock over I/O that anybody on a request's path waits for
	defer s.dispatching.Unlock()
	start := time.Now()
	tx, err := s.pool.Begin(ctx)
	if err != nil {
		return 0, false, fmt.Errorf("hand lanes over: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	candidates, working, locked, err := readCandidatesTx(ctx, tx, s.o.Workers)
	if err != nil {
		return 0, false, fmt.Errorf("read due lanes: %w", err)
	}
	if !locked {
		return 0, false, nil
	}
	grants, behind := s.turns.plan(candidates, working, s.o.Workers)
	s.behind.Store(behind)
	if len(grants) == 0 {
		return 0, true, nil
	}
	token := newID()
	lanes, err := leaseTx(ctx, tx, token, s.o.Lease, grants)
	if err != nil {
		return 0, true, fmt.Errorf("lease lanes: %w", err)
	}
	if len(lanes) == 0 {
		return 0, true, nil // they are locked by appends, which will poke
	}
	if err := s.jobs.InsertLanesTx(ctx, tx, laneJobs(lanes, token)); err != nil {
		return 0, true, fmt.Errorf("hand lanes over: %w", err)
	}
	if err := tx.Commit(ctx); err != nil {
		return 0, true, fmt.Errorf("hand lanes over: %w", err)
	}
	s.jobs.Poke()
	s.m.handedOver.WithLabelValues("dispatcher").Add(float64(len(lanes)))
	s.m.dispatchSeconds.Observe(time.Since(start).Seconds())
	return len(lanes), true, nil
}

// candidate is a channel with due lanes that may be handed over now.
type candidate struct {
	Tenant, Channel       uuid.UUID
	ChannelMax, TenantMax int // lanes in flight
	Due                   int // lanes, counted up to ChannelMax
}

// busy is how many lanes of a channel workers hold, or are about to.
type busy struct {
	Tenant, Channel uuid.UUID
	Lanes           int
}

// grant is how many lanes of a channel to hand over.
type grant struct {
	Tenant, Channel uuid.UUID
	lanes           int
}

// turns is the memory of the round robin over tenants. Every lane costs its tenant one turn, since a worker holds any lane
// for about the same bounded time: so it is a deficit round robin whose quantum is one lane, and no deficit is left to carry.
type turns struct {
	next   uuid.UUID // whose turn it is; if it has nothing to do, that of the next greater id
	rounds int       // shifts which of a tenant's channels comes first
}

// tenantSet is a set of tenants; nil is the empty one. It is not changed once it is stored.
type tenantSet map[uuid.UUID]struct{}

// plan deals out what is free, one lane a turn. behind are the tenants that have due lanes left, nil for none. candidates are
// sorted by tenant.
func (t *turns) plan(candidates []candidate, working []busy, workers int) (grants []grant, behind *tenantSet) {
	free := workers
	held, heldBy := map[uuid.UUID]int{}, map[uuid.UUID]int{} // by channel, by tenant
	for _, b := range working {
		free -= b.Lanes
		held[b.Channel] = b.Lanes
		heldBy[b.Tenant] += b.Lanes
	}
	var queues []*turnQueue
	for _, c := range candidates {
		if len(queues) == 0 || queues[len(queues)-1].tenant != c.Tenant {
			queues = append(queues, &turnQueue{tenant: c.Tenant, room: c.TenantMax - heldBy[c.Tenant]})
			heldBy[c.Tenant] += 0 // it is active
		}
		q := queues[len(queues)-1]
		q.grants = append(q.grants, grant{Tenant: c.Tenant, Channel: c.Channel})
		q.left = append(q.left, min(c.Due, c.ChannelMax-held[c.Channel]))
		q.due += c.Due
	}
	if len(queues) == 0 {
		return nil, nil
	}
	share := fairShare(workers, len(heldBy))
	for _, q := range queues {
		q.room = min(q.room, share-heldBy[q.tenant])
		q.channel = t.rounds % len(q.grants)
	}
	t.rounds++

	at, _ := slices.BinarySearchFunc(queues, t.next, func(q *turnQueue, id uuid.UUID) int { return bytes.Compare(q.tenant[:], id[:]) })
	for passed := 0; passed < len(queues) && free > 0; at++ {
		if !queues[at%len(queues)].turn() {
			passed++
			continue
		}
		passed = 0
		free--
	}
	t.next = queues[at%len(queues)].tenant
	waiting := tenantSet{}
	for _, q := range queues {
		for _, g := range q.grants {
			if g.lanes > 0 {
				grants = append(grants, g)
			}
			q.due -= g.lanes
		}
		if q.due > 0 {
			waiting[q.tenant] = struct{}{}
		}
	}
	if len(waiting) == 0 {
		return grants, nil
	}
	return grants, &waiting
}

// fairShare is how many workers one of some active tenants may hold: 20 % stay free for who comes next.
func fairShare(workers, tenants int) int { return max(1, workers*8/10/tenants) }

// turnQueue is what a tenant may get in one plan.
type turnQueue struct {
	tenant  uuid.UUID
	room    int // lanes, over all its channels
	due     int // lanes that are due and not granted
	grants  []grant
	left    []int // lanes that each channel may still get
	channel int   // whose turn it is among the channels
}

// turn grants one lane; false when there is none to grant.
func (q *turnQueue) turn() bool {
	if q.room <= 0 {
		return false
	}
	for range q.grants {
		i := q.channel
		q.channel = (q.channel + 1) % len(q.grants)
		if q.left[i] > 0 {
			q.grants[i].lanes++
			q.left[i]--
			q.room--
			return true
		}
	}
	return false
}
