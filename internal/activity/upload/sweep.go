package upload

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
)

const (
	sweepEvery = 15 * time.Minute
	// sweepAge is far beyond the longest time between the first byte of a file and the commit of its row.
	sweepAge   = time.Hour
	sweepBatch = 500
)

// Orphans finds the files that surely belong to nobody, among those of the tenants and ids side by side, and returns
// their indices: the tenant is in the database, and has no row for the id. A tenant that the database does not know says
// that folder and database do not belong together, not that its files may go.
type Orphans func(ctx context.Context, tenant, id []uuid.UUID) ([]int, error)

// Sweeper removes files that have no row.
type Sweeper struct {
	storage Storage
	orphans Orphans
	log     *slog.Logger
	swept   prometheus.Counter
}

// NewSweeper makes a sweeper; it starts nothing. reg and log may be nil.
func NewSweeper(s Storage, orphans Orphans, reg prometheus.Registerer, log *slog.Logger) *Sweeper {
	swept := prometheus.NewCounter(prometheus.CounterOpts{
		Name: "converger_uploads_swept_total",
		Help: "Files removed because no attachment named them.",
	})
	if reg != nil {
		reg.MustRegister(swept)
	}
	return &Sweeper{storage: s, orphans: orphans, log: cmp.Or(log, slog.Default()), swept: swept}
}

// Run sweeps now and every quarter of an hour until ctx ends, then returns nil. Each node sweeps: a local folder is its
// own, and sweeping a shared one twice does no harm.
func (s *Sweeper) Run(ctx context.Context) error {
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		if n, err := s.sweep(ctx, time.Now().Add(-sweepAge)); err != nil && ctx.Err() == nil {
			s.log.WarnContext(ctx, "files without an attachment were not all removed", "error", err.Error())
		} else if n > 0 {
			s.log.InfoContext(ctx, "removed files without an attachment", "count", n)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// sweep removes the orphans last written before an instant, and says how many they were.
func (s *Sweeper) sweep(ctx context.Context, before time.Time) (n int, err error) {
	var tenants, ids []uuid.UUID
	flush := func() error {
		orphans, err := s.orphans(ctx, tenants, ids)
		if err != nil {
			return fmt.Errorf("upload: find files without a row: %w", err)
		}
		for _, i := range orphans {
			if err := s.storage.Delete(ctx, Key(tenants[i], ids[i])); err != nil {
				return err
			}
			s.swept.Inc()
			n++
		}
		tenants, ids = tenants[:0], ids[:0]
		return nil
	}
	err = s.storage.List(ctx, before, func(key string) error {
		if tenant, id, ok := ParseKey(key); ok {
			tenants, ids = append(tenants, tenant), append(ids, id)
		}
		if len(ids) < sweepBatch {
			return nil
		}
		return flush()
	})
	if err == nil && len(ids) > 0 {
		err = flush()
	}
	return n, err
}
