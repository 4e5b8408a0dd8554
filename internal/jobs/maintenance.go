package jobs

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"

	"converger/internal/tenants"
)

// task is a periodic job: it has no arguments and one open job at a time.
type task interface {
	river.JobArgs
	run(ctx context.Context, c *Client) error
}

type taskWorker[T task] struct {
	river.WorkerDefaults[T]
	c *Client
}

// Work implements river.Worker.
func (w *taskWorker[T]) Work(ctx context.Context, job *river.Job[T]) error {
	return job.Args.run(ctx, w.c)
}

// Timeout implements river.Worker: batches are small, and a task that is cut off goes on where it was.
func (*taskWorker[T]) Timeout(*river.Job[T]) time.Duration { return 2 * time.Minute }

// addTask registers the worker of a task and queues it at the start of a leader and every interval after.
func addTask[T task](config *river.Config, c *Client, interval time.Duration, maxAttempts int) {
	river.AddWorker(config.Workers, &taskWorker[T]{c: c})
	config.PeriodicJobs = append(config.PeriodicJobs, river.NewPeriodicJob(river.PeriodicInterval(interval),
		func() (river.JobArgs, *river.InsertOpts) {
			var args T
			return args, &river.InsertOpts{Queue: queueMaintenance, MaxAttempts: maxAttempts,
				UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: openStates}}
		}, &river.PeriodicJobOpts{RunOnStart: true}))
}

func addMaintenance(config *river.Config, c *Client) {
	addTask[ensurePartitions](config, c, 24*time.Hour, 10)
	addTask[prune](config, c, time.Hour, 3)
	addTask[giveUpUncertain](config, c, 30*time.Second, 1)
	addTask[requeueInbound](config, c, 30*time.Second, 1)
	addTask[removeSessions](config, c, time.Hour, 3)
}

// ensurePartitions makes the partitions of the last month and the next three, as the first migration did.
type ensurePartitions struct{}

// Kind implements river.JobArgs.
func (ensurePartitions) Kind() string { return "ensure_partitions" }

// Attaching a partition must not stand in a queue of locks with everybody behind it.
const queryEnsurePartitions = `SELECT ensure_partitions(((now() AT TIME ZONE 'UTC') - interval '1 month')::date, 5)`

func (ensurePartitions) run(ctx context.Context, c *Client) error {
	var made int
	err := pgx.BeginFunc(ctx, c.pool, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '2s'`); err != nil {
			return err
		}
		return tx.QueryRow(ctx, queryEnsurePartitions).Scan(&made)
	})
	if err != nil {
		return fmt.Errorf("make partitions: %w", err)
	}
	if made > 0 {
		c.log.Info("made partitions", "count", made)
	}
	return nil
}

// prune removes what is kept beyond a month's partition only for a while: 30 days are longer than any provider repeats.
type prune struct{}

// Kind implements river.JobArgs.
func (prune) Kind() string { return "prune" }

const (
	pruneBatch = 5000
	pruneAge   = 30 * 24 * time.Hour
)

// queryPrune* use the tables' BRIN indexes on inserted_at.
const (
	queryPruneKeysAllTenants = `
DELETE FROM idempotency_keys WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM idempotency_keys WHERE inserted_at < now() - $1::interval LIMIT $2 FOR UPDATE SKIP LOCKED))`
	queryPruneProviderMessagesAllTenants = `
DELETE FROM provider_messages WHERE ctid = ANY (ARRAY(
    SELECT ctid FROM provider_messages WHERE inserted_at < now() - $1::interval LIMIT $2 FOR UPDATE SKIP LOCKED))`
)

func (prune) run(ctx context.Context, c *Client) error {
	for _, query := range []string{queryPruneKeysAllTenants, queryPruneProviderMessagesAllTenants} {
		for {
			tag, err := c.pool.Exec(ctx, query, pruneAge, pruneBatch)
			if err != nil {
				return fmt.Errorf("prune: %w", err)
			}
			if tag.RowsAffected() < pruneBatch {
				break
			}
		}
	}
	return nil
}

// giveUpUncertain fails the deliveries of which nobody said in time whether they had arrived.
type giveUpUncertain struct{}

// Kind implements river.JobArgs.
func (giveUpUncertain) Kind() string { return "give_up_uncertain" }

func (giveUpUncertain) run(ctx context.Context, c *Client) error {
	for {
		n, err := c.deliverer.GiveUpUncertainAllTenants(ctx)
		if err != nil || n == 0 {
			return err
		}
	}
}

// requeueInbound queues the stored events that are still to be worked and may have lost their job.
type requeueInbound struct{}

// Kind implements river.JobArgs.
func (requeueInbound) Kind() string { return "requeue_inbound" }

// The id tells the time: see uuid_v7_floor.
const queryStuckInboundAllTenants = `
SELECT tenant_id, id FROM inbound_events
WHERE state = 'received' AND id < uuid_v7_floor(now() - interval '1 minute') AND id > $1
ORDER BY id LIMIT 1000`

func (requeueInbound) run(ctx context.Context, c *Client) error {
	var after uuid.UUID
	for {
		rows, err := c.pool.Query(ctx, queryStuckInboundAllTenants, after)
		if err != nil {
			return fmt.Errorf("find stuck inbound events: %w", err)
		}
		events, err := pgx.CollectRows(rows, pgx.RowToStructByPos[struct {
			Tenant tenants.ID
			ID     uuid.UUID
		}])
		if err != nil {
			return fmt.Errorf("find stuck inbound events: %w", err)
		}
		if len(events) == 0 {
			return nil
		}
		params := make([]river.InsertManyParams, len(events))
		for i, e := range events {
			params[i].Args = inboundArgs{TenantID: e.Tenant, EventID: e.ID}
		}
		if _, err := c.river.InsertMany(ctx, params); err != nil {
			return fmt.Errorf("queue stuck inbound events: %w", err)
		}
		after = events[len(events)-1].ID
	}
}

// removeSessions removes web sessions and sign-in links whose time is over.
type removeSessions struct{}

// Kind implements river.JobArgs.
func (removeSessions) Kind() string { return "remove_sessions" }

func (removeSessions) run(ctx context.Context, c *Client) error {
	for c.o.Sessions != nil {
		n, err := c.o.Sessions.RemoveEndedAllTenants(ctx)
		if err != nil || n == 0 {
			return err
		}
	}
	return nil
}
