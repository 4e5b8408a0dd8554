package rotate

import (
	"context"
	"fmt"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"converger/internal/secrets"
)

const (
	// batchSize rows are read and written at a time, each batch in one short transaction: a row lock is held for
	// milliseconds. With the largest channel configs a batch is a few megabytes.
	batchSize = 100
	// maxPasses bounds the work beside nodes that keep writing with another key, or another rotation towards one.
	maxPasses = 3
	// maxNamed values that do not open are named in a report; the others are counted.
	maxNamed = 50
)

// Rotator looks at and renews the sealed values of a database. It is safe for concurrent use.
type Rotator struct {
	pool    *pgxpool.Pool
	box     *secrets.Box
	columns []secrets.Column
}

// New makes a Rotator of the columns for the keys of the box.
func New(pool *pgxpool.Pool, box *secrets.Box, columns []secrets.Column) *Rotator {
	return &Rotator{pool: pool, box: box, columns: columns}
}

// Use is how many values of a column one key has sealed.
type Use struct {
	Column secrets.Column
	Key    secrets.KeyID
	Sealed bool // false: values that are no sealed ones at all; Key is then zero
	Values int64
}

// Status counts the values of every column by the key that sealed them, from their first bytes. It opens none.
func (r *Rotator) Status(ctx context.Context) ([]Use, error) {
	var all []Use
	for _, c := range r.columns {
		rows, _ := r.pool.Query(ctx, statusQuery(c)) // the error is CollectRows' too
		uses, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (Use, error) {
			var head []byte
			use := Use{Column: c}
			err := row.Scan(&head, &use.Values)
			use.Key, use.Sealed = secrets.SealedBy(head)
			return use, err
		})
		if err != nil {
			return nil, fmt.Errorf("count the values of %s: %w", c, err)
		}
		all = append(all, uses...)
	}
	return all, nil
}

// Unopened is a value that does not open.
type Unopened struct {
	Column secrets.Column
	Row    uuid.UUID
	Err    error // [secrets.ErrUnknownKey] or [secrets.ErrSealed]
}

// Report is what a run has done.
type Report struct {
	Renewed  int // values that are now under the current key
	Left     int // values under another key at the end: changed by others while the run looked at them, each time anew
	Unopened int
	Named    []Unopened // the first of those that did not open
}

// Progress is told after each batch.
type Progress struct {
	Column secrets.Column
	Seen   int // values of the column looked at in this pass
	Report Report
}

// Rotate seals every value anew that another key than the current one has sealed. progress may be nil. The error is the
// database's or the context's; the report then says how far it came, and the next run goes on from there.
func (r *Rotator) Rotate(ctx context.Context, progress func(Progress)) (Report, error) {
	var report Report
	for _, c := range r.columns {
		unopened := map[uuid.UUID]bool{} // of this column, so that a second pass does not count them again
		for pass := 1; ; pass++ {
			left := 0
			err := r.walk(ctx, c, r.box.Current().Head(), func(batch []value, seen int) error {
				missed, err := r.renew(ctx, c, batch, unopened, &report)
				left += missed
				if err == nil && progress != nil {
					progress(Progress{Column: c, Seen: seen, Report: report})
				}
				return err
			})
			if err != nil {
				return report, fmt.Errorf("renew the values of %s: %w", c, err)
			}
			if left == 0 || pass == maxPasses {
				report.Left += left
				break
			}
		}
	}
	return report, nil
}

// Verify opens every value, whichever key sealed it, and changes none. progress may be nil.
func (r *Rotator) Verify(ctx context.Context, progress func(Progress)) (Report, error) {
	var report Report
	for _, c := range r.columns {
		err := r.walk(ctx, c, nil, func(batch []value, seen int) error {
			for _, v := range batch {
				if _, err := r.box.Open(v.sealed, c.Table, c.Name, v.row); err != nil {
					report.unopened(c, v.row, err)
				}
			}
			if progress != nil {
				progress(Progress{Column: c, Seen: seen, Report: report})
			}
			return nil
		})
		if err != nil {
			return report, fmt.Errorf("open the values of %s: %w", c, err)
		}
	}
	return report, nil
}

func (r *Report) unopened(c secrets.Column, row uuid.UUID, err error) {
	r.Unopened++
	if len(r.Named) < maxNamed {
		r.Named = append(r.Named, Unopened{Column: c, Row: row, Err: err})
	}
}

// renew replaces the values of a batch that open, and returns how many had changed meanwhile.
func (r *Rotator) renew(ctx context.Context, c secrets.Column, values []value, unopened map[uuid.UUID]bool, report *Report) (missed int, err error) {
	batch := &pgx.Batch{}
	for _, v := range values {
		plain, err := r.box.Open(v.sealed, c.Table, c.Name, v.row)
		if err != nil {
			if !unopened[v.row] {
				unopened[v.row] = true
				report.unopened(c, v.row, err)
			}
			continue
		}
		batch.Queue(replaceQuery(c), r.box.Seal(plain, c.Table, c.Name, v.row), v.row, v.sealed)
	}
	if batch.Len() == 0 {
		return 0, nil
	}
	results := r.pool.SendBatch(ctx, batch) // one implicit transaction
	renewed := 0
	for range batch.Len() {
		tag, err := results.Exec()
		if err != nil {
			_ = results.Close()
			return 0, err
		}
		renewed += int(tag.RowsAffected())
	}
	if err := results.Close(); err != nil {
		return 0, err
	}
	report.Renewed += renewed
	return batch.Len() - renewed, nil
}

// value is a sealed value as it was read.
type value struct {
	row    uuid.UUID
	sealed []byte
}

// walk visits the values of a column in the order of their rows, in batches, but not those that begin with the bytes of
// except (nil: all). seen counts them.
func (r *Rotator) walk(ctx context.Context, c secrets.Column, except []byte, visit func(batch []value, seen int) error) error {
	after, seen := uuid.Nil, 0
	for {
		rows, _ := r.pool.Query(ctx, nextQuery(c), after, except, batchSize) // the error is CollectRows' too
		batch, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (v value, err error) {
			err = row.Scan(&v.row, &v.sealed)
			return v, err
		})
		if err != nil {
			return err
		}
		if len(batch) == 0 {
			return nil
		}
		seen += len(batch)
		if err := visit(batch, seen); err != nil {
			return err
		}
		if len(batch) < batchSize {
			return nil
		}
		after = batch[len(batch)-1].row
	}
}
