package redis

import "converger/internal/ratelimit"

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter: Redis holds the keys, this node whether it asks there.
func (s *Store) States(ratelimit.Instant) []ratelimit.StoreState {
	return []ratelimit.StoreState{{
		Backend: string(ratelimit.BackendRedis), Breaker: breakerState(s.breaker.state.Load()).String(), FallingBack: s.Degraded() != nil,
	}}
}

// Own implements ratelimit.Reporter: what is counted at Redis is nobody's own.
func (s *Store) Own(ratelimit.Instant, ratelimit.Item) (uint32, bool) { return 0, false }
