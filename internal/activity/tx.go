package activity

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

const (
	beginSQL       = `BEGIN`
	lockTimeoutSQL = `SELECT set_config('lock_timeout', $1, true)` // until the end of the transaction
)

// session is a transaction of which the beginning, and the lock time-out, travel with the first query instead of taking
// a round trip each.
type session struct {
	tx          pgx.Tx
	begin       bool   // BEGIN is still to be sent
	lockTimeout string // still to be set, "" when it is
}

// query runs sql and gives each row to scan.
func (s *session) query(ctx context.Context, sql string, args []any, scan func(pgx.Rows) error) error {
	if s.lockTimeout == "" {
		rows, err := s.tx.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		return eachRow(rows, scan)
	}
	var batch pgx.Batch
	if s.begin {
		batch.Queue(beginSQL)
	}
	batch.Queue(lockTimeoutSQL, s.lockTimeout)
	s.begin, s.lockTimeout = false, ""
	ahead := batch.Len()
	batch.Queue(sql, args...)

	results := s.tx.SendBatch(ctx, &batch)
	for range ahead {
		if _, err := results.Exec(); err != nil {
			_ = results.Close() // says the same
			return err
		}
	}
	rows, _ := results.Query() // an error shows in rows.Err
	if err := eachRow(rows, scan); err != nil {
		_ = results.Close()
		return err
	}
	return results.Close()
}

func eachRow(rows pgx.Rows, scan func(pgx.Rows) error) error {
	defer rows.Close()
	for rows.Next() {
		if err := scan(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

func milliseconds(d time.Duration) string {
	return strconv.FormatInt(max(1, d.Milliseconds()), 10) // 0 would be no limit
}

// connTx is a transaction on a connection where BEGIN is sent by someone else. (pgx makes a Tx only by sending BEGIN in
// a round trip of its own.) It serves one goroutine, as every [pgx.Tx] does.
type connTx struct {
	conn   *pgx.Conn
	depth  int // 0: the transaction; above: the savepoint of that number
	closed bool
}

var _ pgx.Tx = (*connTx)(nil)

func (t *connTx) savepoint() string { return "sp_" + strconv.Itoa(t.depth) }

// Begin starts a savepoint.
func (t *connTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if t.closed {
		return nil, pgx.ErrTxClosed
	}
	inner := &connTx{conn: t.conn, depth: t.depth + 1}
	if _, err := t.conn.Exec(ctx, "SAVEPOINT "+inner.savepoint()); err != nil {
		return nil, err
	}
	return inner, nil
}

// Commit commits the transaction, or keeps what was done since the savepoint.
func (t *connTx) Commit(ctx context.Context) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	t.closed = true
	if t.depth > 0 {
		_, err := t.conn.Exec(ctx, "RELEASE SAVEPOINT "+t.savepoint())
		return err
	}
	tag, err := t.conn.Exec(ctx, "COMMIT")
	if err != nil {
		return err
	}
	if tag.String() == "ROLLBACK" { // a statement had failed
		return pgx.ErrTxCommitRollback
	}
	return nil
}

// Rollback undoes the transaction, or what was done since the savepoint. A connection that is lost has rolled back.
func (t *connTx) Rollback(ctx context.Context) error {
	if t.closed {
		return pgx.ErrTxClosed
	}
	t.closed = true
	if t.conn.IsClosed() {
		return nil
	}
	sql := "ROLLBACK"
	if t.depth > 0 {
		sql = "ROLLBACK TO SAVEPOINT " + t.savepoint()
	}
	if _, err := t.conn.Exec(ctx, sql); err != nil {
		if t.depth == 0 {
			// Unusable in the pool: whoever got it next would be in this transaction.
			return errors.Join(err, t.conn.Close(ctx))
		}
		return fmt.Errorf("activity: roll back to savepoint: %w", err)
	}
	return nil
}

func (t *connTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if t.closed {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	return t.conn.Exec(ctx, sql, args...)
}

func (t *connTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if t.closed {
		return nil, pgx.ErrTxClosed
	}
	return t.conn.Query(ctx, sql, args...)
}

func (t *connTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.conn.QueryRow(ctx, sql, args...)
}

func (t *connTx) SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults {
	return t.conn.SendBatch(ctx, b)
}

func (t *connTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if t.closed {
		return 0, pgx.ErrTxClosed
	}
	return t.conn.CopyFrom(ctx, table, columns, rows)
}

func (t *connTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	return t.conn.Prepare(ctx, name, sql)
}

// LargeObjects is not offered: pgx's can't be made outside of pgx, and nobody here has large objects.
func (t *connTx) LargeObjects() pgx.LargeObjects {
	panic("activity: no large objects in this transaction")
}

func (t *connTx) Conn() *pgx.Conn { return t.conn }
