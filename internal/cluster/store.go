package cluster

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// The heartbeat runs on one connection of a pool, statement by statement: the clock is read alone, so that nothing but
// the way there and back lies between our two readings.

const clockSQL = `SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`

// readClock compares the database's clock with now.
func readClock(ctx context.Context, c *pgx.Conn, now func() int64) (reading, error) {
	before := now()
	var micros int64
	if err := c.QueryRow(ctx, clockSQL).Scan(&micros); err != nil {
		return reading{}, fmt.Errorf("read the database's clock: %w", err)
	}
	after := now()
	middle := before + (after-before)/2
	return reading{offset: micros*1000 - middle, delay: after - before, at: after}, nil
}

const beatSQL = `INSERT INTO cluster_nodes (id, label, name, address, version, started_at, seen_at)
	VALUES ($1, $2, $3, $4, $5, $6, clock_timestamp())
	ON CONFLICT (id) DO UPDATE SET address = excluded.address, seen_at = excluded.seen_at`

func writeBeat(ctx context.Context, c *pgx.Conn, label string, id ID, m member) error {
	if _, err := c.Exec(ctx, beatSQL, id.String(), label, m.Name, m.Address, m.Version, m.started()); err != nil {
		return fmt.Errorf("write the heartbeat: %w", err)
	}
	return nil
}

// beat is a row of another node.
type beat struct {
	id    ID
	label string
	m     member
	age   time.Duration // by the database's clock
}

// Rows of every label count: whoever shares the database shares the limits. Those of the living come first; the dead of a crash
// loop are more than anybody needs.
const beatsSQL = `SELECT id, label, name, address, version, started_at, (extract(epoch FROM clock_timestamp() - seen_at) * 1000000)::bigint
	FROM cluster_nodes WHERE id <> $1 AND seen_at > clock_timestamp() - $2::interval ORDER BY seen_at DESC LIMIT 1000`

func readBeats(ctx context.Context, c *pgx.Conn, own ID) ([]beat, error) {
	rows, err := c.Query(ctx, beatsSQL, own.String(), deadFor)
	if err != nil {
		return nil, fmt.Errorf("read heartbeats: %w", err)
	}
	beats, err := pgx.CollectRows(rows, func(r pgx.CollectableRow) (b beat, err error) {
		var id string
		var started time.Time
		var age int64
		if err := r.Scan(&id, &b.label, &b.m.Name, &b.m.Address, &b.m.Version, &started, &age); err != nil {
			return b, err
		}
		b.m.Started = started.UnixMilli()
		b.age = time.Duration(age) * time.Microsecond
		b.id, err = ParseID(id)
		return b, err
	})
	if err != nil {
		return nil, fmt.Errorf("read heartbeats: %w", err)
	}
	return beats, nil
}

const (
	sweepSQL  = `DELETE FROM cluster_nodes WHERE seen_at < clock_timestamp() - interval '1 hour'`
	removeSQL = `DELETE FROM cluster_nodes WHERE id = $1`
)

// sweepBeats forgets nodes that were killed long ago.
func sweepBeats(ctx context.Context, c *pgx.Conn) error {
	if _, err := c.Exec(ctx, sweepSQL); err != nil {
		return fmt.Errorf("sweep heartbeats: %w", err)
	}
	return nil
}

// removeBeat says that the node has left of its own will.
func removeBeat(ctx context.Context, c *pgx.Conn, id ID) error {
	if _, err := c.Exec(ctx, removeSQL, id.String()); err != nil {
		return fmt.Errorf("remove the heartbeat: %w", err)
	}
	return nil
}
