package auth

import (
	"context"
	"log/slog"
	"time"

	"github.com/google/uuid"
	"github.com/puzpuzpuz/xsync/v4"
)

const (
	// usageEvery is how often uses are written, and so how exact "last used" is.
	usageEvery = time.Minute
	// usageTimeout bounds one write.
	usageTimeout = 5 * time.Second
)

// Toucher stores when keys and tokens were last used; [tenants.Store] is one.
type Toucher interface {
	TouchUsed(ctx context.Context, keys, tokens map[uuid.UUID]time.Time) error
}

// Usage gathers which keys and tokens were used, and writes them once a minute: a row must not be written for each
// request. It holds at most what the directory knows. Safe for concurrent use.
type Usage struct {
	store  Toucher
	logger *slog.Logger
	keys   *xsync.Map[uuid.UUID, time.Time]
	tokens *xsync.Map[uuid.UUID, time.Time]
}

// NewUsage makes an empty one.
func NewUsage(t Toucher, l *slog.Logger) *Usage {
	return &Usage{store: t, logger: l, keys: xsync.NewMap[uuid.UUID, time.Time](), tokens: xsync.NewMap[uuid.UUID, time.Time]()}
}

// Key notes that an API key was used.
func (u *Usage) Key(id uuid.UUID, at time.Time) { note(u.keys, id, at) }

// OperatorToken notes that an operator token was used.
func (u *Usage) OperatorToken(id uuid.UUID, at time.Time) { note(u.tokens, id, at) }

// note reads first: the same key comes thousands of times a second, and a second is exact enough.
func note(m *xsync.Map[uuid.UUID, time.Time], id uuid.UUID, at time.Time) {
	if last, ok := m.Load(id); !ok || at.Sub(last) >= time.Second {
		m.Store(id, at)
	}
}

// Run writes until ctx ends, and once more then. Its error is always nil: what can't be written is logged and forgotten,
// for the next use says it again.
func (u *Usage) Run(ctx context.Context) error {
	tick := time.NewTicker(usageEvery)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			u.flush(ctx)
		case <-ctx.Done():
			u.flush(context.WithoutCancel(ctx))
			return nil
		}
	}
}

func (u *Usage) flush(ctx context.Context) {
	keys, tokens := take(u.keys), take(u.tokens)
	if len(keys)+len(tokens) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, usageTimeout)
	defer cancel()
	if err := u.store.TouchUsed(ctx, keys, tokens); err != nil {
		u.logger.WarnContext(ctx, "last uses of keys were not stored", "error", err.Error())
	}
}

func take(m *xsync.Map[uuid.UUID, time.Time]) map[uuid.UUID]time.Time {
	taken := make(map[uuid.UUID]time.Time)
	for id := range m.All() {
		if at, ok := m.LoadAndDelete(id); ok {
			taken[id] = at
		}
	}
	return taken
}
