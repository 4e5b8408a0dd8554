package postgres

import (
	"context"
	"sync/atomic"

	"github.com/jackc/pgx/v5"
)

// QueryCounter counts the statements sent through the pools and connections it traces: each Exec, Query and QueryRow
// (BEGIN and COMMIT among them), each statement of a batch, each CopyFrom. Tests and benchmarks use it to show what a
// request costs. The zero value is ready; it is safe for concurrent use.
type QueryCounter struct {
	n      atomic.Int64
	onCall func(sql string)
}

var (
	_ pgx.QueryTracer    = (*QueryCounter)(nil)
	_ pgx.BatchTracer    = (*QueryCounter)(nil)
	_ pgx.CopyFromTracer = (*QueryCounter)(nil)
)

// CountQueries makes a counter that also hands each statement's text to onStatement, for a test that wants to say which
// statement was one too many. onStatement may be nil; it is called from many goroutines at once.
func CountQueries(onStatement func(sql string)) *QueryCounter {
	return &QueryCounter{onCall: onStatement}
}

// Count is the number of statements so far.
func (c *QueryCounter) Count() int64 { return c.n.Load() }

// Reset sets the count to zero and returns what it was.
func (c *QueryCounter) Reset() int64 { return c.n.Swap(0) }

func (c *QueryCounter) add(sql string) {
	c.n.Add(1)
	if c.onCall != nil {
		c.onCall(sql)
	}
}

// TraceQueryStart implements [pgx.QueryTracer].
func (c *QueryCounter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	c.add(d.SQL)
	return ctx
}

// TraceQueryEnd implements [pgx.QueryTracer].
func (*QueryCounter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// TraceBatchStart implements [pgx.BatchTracer].
func (c *QueryCounter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceBatchStartData) context.Context {
	// Counted here and not in TraceBatchQuery, which is called only for results that someone reads.
	for _, q := range d.Batch.QueuedQueries {
		c.add(q.SQL)
	}
	return ctx
}

// TraceBatchQuery implements [pgx.BatchTracer].
func (*QueryCounter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}

// TraceBatchEnd implements [pgx.BatchTracer].
func (*QueryCounter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// TraceCopyFromStart implements [pgx.CopyFromTracer].
func (c *QueryCounter) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceCopyFromStartData) context.Context {
	c.add("COPY " + d.TableName.Sanitize())
	return ctx
}

// TraceCopyFromEnd implements [pgx.CopyFromTracer].
func (*QueryCounter) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {}
