package activity

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"converger/internal/postgres"
)

// maxTries is how often one item is tried when its transaction is sacrificed to another one's.
const maxTries = 3

// Append appends each of items in a transaction that it shares with other callers of this node, and returns when all are
// committed or refused, in the order of items. Items of one conversation get their seq in that order. Each Result has
// its own error: *[fault.Invalid], ErrNotFound, ErrClosed, ErrKeyReused, ErrOverloaded, ErrLockTimeout,
// ErrUnknownOutcome, or an error for which [postgres.IsUnavailable] is true.
//
// When ctx ends, Append stops waiting and gives its error for what is not done yet; the write itself goes on.
func (s *Store) Append(ctx context.Context, items []New) []Result {
	results := make([]Result, len(items))
	queued := make([]*item, 0, len(items))
	index := make([]int, 0, len(items))
	c := &call{done: make(chan struct{})}
	for i := range items {
		it := &item{new: items[i], call: c}
		if err := Validate(&it.new); err != nil {
			results[i].Err = err
			s.metrics.countOne(&results[i])
			continue
		}
		queued, index = append(queued, it), append(index, i)
	}
	if len(queued) == 0 {
		return results
	}
	c.left.Store(int32(len(queued)))
	s.queue.add(queued)
	select {
	case <-c.done:
	case <-ctx.Done():
	}
	for i, it := range queued {
		r := &results[index[i]]
		if it.done.Load() {
			*r = it.res
		} else {
			r.Err = fmt.Errorf("activity: append: %w", ctx.Err())
		}
		s.metrics.countOne(r)
	}
	return results
}

// AppendTx is Append within the caller's transaction: nothing is there before the caller commits, and then after, which
// is never nil, must be called: it wakes the deliveries and broadcasts. The error is that of the transaction, which can
// only be rolled back; wrapped, it is ErrLockTimeout or one of the database. The lock time-out of the store holds for the
// rest of the transaction.
//
// It locks conversations, after the participant and before lanes, all in the order of their ids: a transaction that
// calls it twice for different conversations can run into a deadlock ([postgres.IsSerialization]).
func (s *Store) AppendTx(ctx context.Context, tx pgx.Tx, items []New) (_ []Result, after func(), _ error) {
	results := make([]Result, len(items))
	news, valid := make([]*New, 0, len(items)), make([]int, 0, len(items))
	for i := range items {
		n := items[i]
		if results[i].Err = Validate(&n); results[i].Err == nil {
			news, valid = append(news, &n), append(valid, i)
		}
	}
	var done appended
	if len(news) > 0 {
		written := make([]Result, len(news))
		var err error
		ses := &session{tx: tx, lockTimeout: milliseconds(s.o.LockTimeout)}
		if done, err = s.appendItems(ctx, ses, news, written); err != nil {
			return nil, nil, lockError(err)
		}
		for i, r := range written {
			results[valid[i]] = r
		}
	}
	return results, func() {
		for i := range results {
			s.metrics.countOne(&results[i])
		}
		s.committed(done)
	}, nil
}

// committed tells the rest of the program what is in the database now.
func (s *Store) committed(done appended) {
	if done.wake != nil {
		done.wake()
	}
	if s.o.Broadcast != nil && len(done.created) > 0 {
		s.o.Broadcast(done.created)
	}
}

// Run writes what Append queues. When ctx is cancelled it refuses new items with ErrOverloaded, goes on until the queue
// is empty or the drain time is over, then gives ErrOverloaded to what is left, and returns nil. It may run once.
func (s *Store) Run(ctx context.Context) error {
	// Transactions outlive ctx: they end by their own time limit, or with the drain time.
	work, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	defer context.AfterFunc(ctx, func() {
		s.queue.close()
		select {
		case <-time.After(s.o.DrainTimeout):
			cancel()
		case <-work.Done():
		}
	})()

	var flushers sync.WaitGroup
	for i := range s.o.Flushers {
		flushers.Go(func() { s.runFlusher(work, i) })
	}
	flushers.Wait()
	s.parking.wait.Wait()
	return nil
}

func (s *Store) runFlusher(ctx context.Context, flusher int) {
	var batch []*item
	for {
		var last bool
		batch, last = s.queue.take(flusher, batch)
		if last {
			return
		}
		if len(batch) == 0 {
			<-s.queue.wake[flusher]
			continue
		}
		s.queue.settle(s.flush(ctx, batch))
		s.queue.free(flusher)
		clear(batch) // results may be large, and the next batch may be long in coming
	}
}

// flush writes batch and returns the items that have a result now. The others are parked.
func (s *Store) flush(ctx context.Context, batch []*item) (done []*item) {
	if batch = s.divert(batch); len(batch) == 0 {
		return nil
	}
	err := s.write(ctx, batch, s.patience())
	switch {
	case err == nil:
		return batch
	case final(err):
		// It would be no better for each alone. After a lost COMMIT nobody may try again who has no key.
		fail(batch, err)
		return batch
	}
	// Each in its own transaction, so that an item pays only for its own trouble.
	for len(batch) > 0 {
		it := batch[0]
		err := s.writeOne(ctx, it, s.patience())
		if final(err) {
			fail(batch, err)
			return append(done, batch...)
		}
		batch = batch[1:]
		if errors.Is(err, ErrLockTimeout) && s.parking.park(it, func(items []*item) { s.writeParked(ctx, items) }) {
			batch = s.divert(batch)
			continue
		}
		if err != nil {
			it.res = Result{Err: err}
		}
		done = append(done, it)
	}
	return done
}

// divert parks the items of parked conversations, as far as there is room, and returns the rest.
func (s *Store) divert(batch []*item) []*item {
	rest, refused := s.parking.divert(batch)
	if len(refused) > 0 {
		fail(refused, ErrLockTimeout)
		s.queue.settle(refused)
	}
	return rest
}

// patience is how long a shared transaction waits for a lock: an eighth of what an item may wait, because everyone in
// the batch waits with it, and again in front of the items that are written one by one.
func (s *Store) patience() time.Duration { return s.o.LockTimeout / 8 }

// writeOne writes an item alone. A lock that it did not get is ErrLockTimeout.
func (s *Store) writeOne(ctx context.Context, it *item, patience time.Duration) error {
	one := []*item{it}
	err := s.write(ctx, one, patience)
	for try := 1; try < maxTries && postgres.IsSerialization(err); try++ {
		err = s.write(ctx, one, patience)
	}
	err = lockError(err)
	if err != nil && !final(err) && !errors.Is(err, ErrLockTimeout) {
		s.o.Logger.ErrorContext(ctx, "activity not written", "tenant_id", it.new.TenantID,
			"conversation_id", it.new.ConversationID, "error", err)
	}
	return err
}

// writeParked writes items of one conversation, which somebody else holds, with the whole of the lock time-out for each
// until one has waited in vain: nobody need wait for the same again. (Whoever holds a key of the conversation holds the
// conversation as well, or will.)
func (s *Store) writeParked(ctx context.Context, items []*item) {
	for i, it := range items {
		err := s.writeOne(ctx, it, s.o.LockTimeout)
		if final(err) || errors.Is(err, ErrLockTimeout) {
			fail(items[i:], err)
			break
		}
		if err != nil {
			it.res = Result{Err: err}
		}
	}
	s.queue.settle(items)
}

// final reports whether err is no better tried again, for any item.
func final(err error) bool {
	return postgres.IsUnavailable(err) || errors.Is(err, ErrOverloaded)
}

// lockError makes ErrLockTimeout of what means the same.
func lockError(err error) error {
	if postgres.IsLockTimeout(err) || postgres.IsSerialization(err) {
		return fmt.Errorf("%w: %w", ErrLockTimeout, err)
	}
	return err
}

func fail(batch []*item, err error) {
	for _, it := range batch {
		it.res = Result{Err: err}
	}
}

// write is one transaction: BEGIN with the insertion, deliveries, jobs, COMMIT. It waits for no lock longer than patience.
// After an error the items have no result.
func (s *Store) write(ctx context.Context, batch []*item, patience time.Duration) error {
	if ctx.Err() != nil {
		return ErrOverloaded // the drain time is over
	}
	begun := time.Now()
	parent := ctx
	ctx, cancel := context.WithTimeout(ctx, s.o.BatchTimeout)
	defer cancel()

	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		return stopError(parent, fmt.Errorf("activity: connect: %w", err))
	}
	defer conn.Release()
	tx := &connTx{conn: conn.Conn()}
	news, results := make([]*New, len(batch)), make([]Result, len(batch))
	for i, it := range batch {
		news[i] = &it.new
	}
	done, err := s.appendItems(ctx, &session{tx: tx, begin: true, lockTimeout: milliseconds(patience)}, news, results)
	if err != nil {
		// On failure the connection is closed, and the database rolls back by itself.
		_ = tx.Rollback(ctx)
		return stopError(parent, err)
	}
	if err := tx.Commit(ctx); err != nil {
		if conn.Conn().IsClosed() {
			return unknownOutcome(err)
		}
		_ = tx.Rollback(ctx)
		return fmt.Errorf("activity: commit: %w", err)
	}
	s.metrics.batchDone(len(batch), time.Since(begun))
	for i, it := range batch {
		it.res = results[i]
	}
	s.committed(done)
	return nil
}

// stopError makes ErrOverloaded of what the end of the drain time has interrupted.
func stopError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %s", ErrOverloaded, err.Error()) // not wrapped: the caller did not cancel
	}
	return err
}

// unknownOutcome is ErrUnknownOutcome for which IsUnavailable is true, whatever cut the connection.
func unknownOutcome(err error) error {
	if !postgres.IsUnavailable(err) {
		err = fmt.Errorf("%w: %s", context.DeadlineExceeded, err.Error())
	}
	return fmt.Errorf("%w: %w", ErrUnknownOutcome, err)
}
