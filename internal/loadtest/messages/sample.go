package messages

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/loadtest/hub"
)

// process is what the hub tells of itself.
type process struct {
	cpuSeconds float64
	resident   float64 // bytes
	heap       float64 // bytes of living and not yet collected objects
	goroutines float64
}

// readProcess reads the hub's /metrics.
func readProcess(ctx context.Context, c *hub.Client, token string) (process, error) {
	m, err := c.Metrics(ctx, token)
	if err != nil {
		return process{}, fmt.Errorf("the hub: %w", err)
	}
	p := process{m["process_cpu_seconds_total"], m["process_resident_memory_bytes"], m["go_memstats_heap_alloc_bytes"], m["go_goroutines"]}
	if p == (process{}) {
		return p, errors.New("the hub's /metrics tells nothing of the process")
	}
	return p, nil
}

// Table is a table of the database with its partitions.
type Table struct {
	Name    string `json:"name"`
	Bytes   int64  `json:"bytes"`       // with indexes
	Rows    int64  `json:"rows"`        // living, as Postgres counts
	Dead    int64  `json:"dead_rows"`   // not yet vacuumed
	Vacuums int64  `json:"autovacuums"` // so far
	Growing bool   `json:"growing"`     // it keeps what comes in: to grow is its work
}

// tablesQuery reads all tables of the schema that take part; a partition counts as its parent.
const tablesQuery = `
SELECT coalesce(p.relname, c.relname) AS name, sum(pg_total_relation_size(c.oid))::bigint AS bytes,
       sum(coalesce(s.n_live_tup, 0))::bigint AS rows, sum(coalesce(s.n_dead_tup, 0))::bigint AS dead,
       sum(coalesce(s.autovacuum_count, 0))::bigint AS vacuums
FROM pg_class c
JOIN pg_namespace n ON n.oid = c.relnamespace
LEFT JOIN pg_inherits i ON i.inhrelid = c.oid
LEFT JOIN pg_class p ON p.oid = i.inhparent
LEFT JOIN pg_stat_user_tables s ON s.relid = c.oid
WHERE c.relkind = 'r' AND n.nspname = 'public'
GROUP BY 1 HAVING sum(coalesce(s.n_live_tup, 0)) + sum(coalesce(s.n_dead_tup, 0)) > 0 ORDER BY bytes DESC, name`

// growing are the tables that a row is added to for each message and that nothing is taken from within a month. All others
// should stay as large as they are.
var growing = map[string]bool{
	"activities": true, "deliveries": true, "attempts": true, "idempotency_keys": true, "provider_messages": true, "inbound_events": true,
}

func readTables(ctx context.Context, pool *pgxpool.Pool) ([]Table, error) {
	rows, _ := pool.Query(ctx, tablesQuery) // the error is CollectRows' too
	tables, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (t Table, err error) {
		err = row.Scan(&t.Name, &t.Bytes, &t.Rows, &t.Dead, &t.Vacuums)
		t.Growing = growing[t.Name]
		return t, err
	})
	if err != nil {
		return nil, fmt.Errorf("look at the tables: %w", err)
	}
	return tables, nil
}

// standing sums the tables that should not grow.
func standing(tables []Table) (bytes, dead int64) {
	for _, t := range tables {
		if !t.Growing {
			bytes += t.Bytes
			dead += t.Dead
		}
	}
	return bytes, dead
}
