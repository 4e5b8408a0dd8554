package main

import (
	"context"
	"io"
	"log/slog"
	"sync"
	"time"
)

// newLogger makes the program's logger. Debug is for developers, info for what is as it should be, warn for what somebody should look at, error
// for what was lost or needs somebody. An outage is told once when it begins and once when it is over, both as warnings with the
// attribute outage, true and false, so that no level shows one end alone.
//
// Durations are written in milliseconds, which people and log queries can read.
func newLogger(cfg Config, w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: cfg.LogLevel, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Value.Kind() == slog.KindDuration {
			return slog.Float64(a.Key+"_ms", float64(a.Value.Duration().Microseconds())/1000)
		}
		return a
	}}
	var h slog.Handler = slog.NewJSONHandler(w, opts)
	if cfg.LogFormat == "text" {
		h = slog.NewTextHandler(w, opts)
	}
	return slog.New(&calmHandler{Handler: h, seen: &seen{last: map[string]*burst{}}})
}

const (
	calmFor     = 10 * time.Second
	maxMessages = 1000 // of one program; beyond that nothing is held back
)

// calmHandler holds repeated warnings and errors back, so that a lost database is a line every ten seconds and not forty a
// second: of each message the first is written, then one for each calmFor with the number of those left out. What belongs
// to a request is always written: somebody may ask for it by its id; and so are both ends of an outage, which are told once each. Peers
// are told apart.
type calmHandler struct {
	slog.Handler
	seen *seen
}

type seen struct {
	mu   sync.Mutex
	last map[string]*burst
}

type burst struct {
	since   time.Time
	skipped int
}

// Handle implements [slog.Handler].
func (h *calmHandler) Handle(ctx context.Context, r slog.Record) error {
	always, message := r.Level < slog.LevelWarn, r.Message
	r.Attrs(func(a slog.Attr) bool {
		switch a.Key {
		case "request_id", "outage":
			always = true
		case "peer":
			message += " " + a.Value.String()
		}
		return !always
	})
	if always {
		return h.Handler.Handle(ctx, r)
	}
	skipped, write := h.seen.note(message, r.Time)
	if !write {
		return nil
	}
	if skipped > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Int("repeated", skipped))
	}
	return h.Handler.Handle(ctx, r)
}

func (s *seen) note(message string, now time.Time) (skipped int, write bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.last[message]
	if !ok {
		if len(s.last) < maxMessages {
			s.last[message] = &burst{since: now}
		}
		return 0, true
	}
	if now.Sub(b.since) < calmFor {
		b.skipped++
		return 0, false
	}
	skipped = b.skipped
	*b = burst{since: now}
	return skipped, true
}

// WithAttrs implements [slog.Handler]; the copies share what was seen.
func (h *calmHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &calmHandler{h.Handler.WithAttrs(attrs), h.seen}
}

// WithGroup implements [slog.Handler].
func (h *calmHandler) WithGroup(name string) slog.Handler {
	return &calmHandler{h.Handler.WithGroup(name), h.seen}
}
