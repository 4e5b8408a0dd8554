package local

import (
	"time"

	"converger/internal/ratelimit"
)

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter.
func (s *Store) States(ratelimit.Instant) []ratelimit.StoreState {
	return []ratelimit.StoreState{{Backend: "local", Keys: s.Keys(), MaxKeys: s.maxKeys * len(s.shards), Overflowing: s.overflowing()}}
}

// overflowing tells whether subjects without room shared counters within the last ten seconds.
func (s *Store) overflowing() bool {
	return ratelimit.InstantOf(time.Now())-ratelimit.Instant(s.overflowedAt.Load()) < grace
}

// Own implements ratelimit.Reporter.
func (s *Store) Own(now ratelimit.Instant, it ratelimit.Item) (uint32, bool) {
	return it.Policy.Used(s.state(it.Key, it.Policy, now), now), true
}
