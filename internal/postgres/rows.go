package postgres

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
)

// One reads the only row of a query. missing is the error when there is none; all others are pgx's, among them
// [pgx.ErrTooManyRows].
func One[T any](ctx context.Context, q Querier, missing error, scan pgx.RowToFunc[T], sql string, args ...any) (T, error) {
	rows, _ := q.Query(ctx, sql, args...) // CollectExactlyOneRow returns its error too
	v, err := pgx.CollectExactlyOneRow(rows, scan)
	if errors.Is(err, pgx.ErrNoRows) {
		err = missing
	}
	return v, err
}

// Many reads all rows of a query; no row is an empty list and no error.
func Many[T any](ctx context.Context, q Querier, scan pgx.RowToFunc[T], sql string, args ...any) ([]T, error) {
	rows, _ := q.Query(ctx, sql, args...) // CollectRows returns its error too
	return pgx.CollectRows(rows, scan)
}
