package jobs

import (
	"context"
	"log/slog"
	"strings"

	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"

	"converger/internal/postgres"
)

// quiet lets River's warnings and errors through; the rest is its daily life, and its own report of a panic comes before
// errorLog's.
type quiet struct{ slog.Handler }

// Handle implements slog.Handler.
func (h quiet) Handle(ctx context.Context, r slog.Record) error {
	if strings.HasSuffix(r.Message, "panic recovery; possible bug with Worker") {
		return nil
	}
	return h.Handler.Handle(ctx, r)
}

// Enabled implements slog.Handler.
func (h quiet) Enabled(ctx context.Context, l slog.Level) bool {
	return l >= slog.LevelWarn && h.Handler.Enabled(ctx, l)
}

// WithAttrs implements slog.Handler.
func (h quiet) WithAttrs(attrs []slog.Attr) slog.Handler { return quiet{h.Handler.WithAttrs(attrs)} }

// WithGroup implements slog.Handler.
func (h quiet) WithGroup(name string) slog.Handler { return quiet{h.Handler.WithGroup(name)} }

// errorLog logs what jobs return and how they crash; it changes nothing about their retries.
type errorLog struct{ log *slog.Logger }

// HandleError implements river.ErrorHandler.
func (l errorLog) HandleError(ctx context.Context, job *rivertype.JobRow, err error) *river.ErrorHandlerResult {
	level := slog.LevelError
	if job.Attempt < job.MaxAttempts {
		level = slog.LevelWarn
	}
	l.log.LogAttrs(ctx, level, "job failed", slog.String("kind", job.Kind), slog.Int64("job_id", job.ID),
		slog.Int("attempt", job.Attempt), slog.Int("max_attempts", job.MaxAttempts),
		slog.Bool("database_unavailable", postgres.IsUnavailable(err)), slog.Any("error", err))
	return nil
}

// HandlePanic implements river.ErrorHandler.
func (l errorLog) HandlePanic(ctx context.Context, job *rivertype.JobRow, value any, trace string) *river.ErrorHandlerResult {
	l.log.LogAttrs(ctx, slog.LevelError, "job panicked", slog.String("kind", job.Kind), slog.Int64("job_id", job.ID),
		slog.Int("attempt", job.Attempt), slog.Any("panic", value), slog.String("stack", trace))
	return nil
}
