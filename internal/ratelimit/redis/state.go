package redis

import "converger/internal/ratelimit"

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter: Redis holds the budgets; the keys are those that this node remembers for when it
// can't ask there.
func (s *Store) States(now ratelimit.Instant) []ratelimit.StoreState {
	return []ratelimit.StoreState{{
		Backend: string(ratelimit.BackendRedis), Breaker: breakerState(s.breaker.state.Load()).String(), FallingBack: s.Degraded() != nil,
		Keys: s.shadow.keys(), MaxKeys: s.shadow.bound(), Overflowing: s.shadow.overflowing(s.serverTime(now)),
	}}
}

// Own implements ratelimit.Reporter: what is counted at Redis is nobody's own.
func (s *Store) Own(ratelimit.Instant, ratelimit.Item) (uint32, bool) { return 0, false }
