package cluster

import (
	"context"
	"log/slog"
	"net"
	"sync"
	"time"
)

const (
	// strangerEvery is how often one stranger is worth a line: it knocks every second for as long as it is set up wrongly.
	strangerEvery = 10 * time.Minute
	maxStrangers  = 256 // remembered
)

// strangers notes refusals of nodes that have another label or secret: each is counted, and each stranger is told of in the
// log now and then. Safe for concurrent use.
type strangers struct {
	log   *slog.Logger
	count func()

	mu   sync.Mutex
	said map[string]time.Time
}

// refused notes one refusal. Who and how make a stranger; its port changes with each attempt and is left out.
func (s *strangers) refused(who, how string, attrs ...slog.Attr) {
	s.count()
	if host, _, err := net.SplitHostPort(who); err == nil {
		who = host
	}
	level := slog.LevelDebug
	if s.worthSaying(who+" "+how, time.Now()) {
		level = slog.LevelWarn
	}
	s.log.LogAttrs(context.Background(), level, how, attrs...)
}

func (s *strangers) worthSaying(what string, now time.Time) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at, ok := s.said[what]; ok && now.Sub(at) < strangerEvery {
		return false
	}
	if len(s.said) >= maxStrangers || s.said == nil {
		s.said = map[string]time.Time{}
	}
	s.said[what] = now
	return true
}
