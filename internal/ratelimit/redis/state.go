package redis

import "converger/internal/ratelimit"

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter: Redis holds the keys, this node whether it asks there.
func (s *Store) States(ratelimit.Instant) []ratelimit.StoreState {
	return []ratelimit.StoreState{{
		Backend: string(ratelimit.BackendRedis), Breaker: breakerState(s.breaker.state.Load()).String(), FallingBack: s.Degraded() != nil,
		Nodes: int(s.present.Load()),
	}}
}

// Own implements ratelimit.Reporter: what is counted at Redis is nobody's own. While it can't be asked, what this node has
// used of its share is; of a token bucket, whose share refills more slowly, no number of units would be true.
func (s *Store) Own(now ratelimit.Instant, it ratelimit.Item) (uint32, bool) {
	if s.Degraded() == nil || it.Policy.Algorithm() == ratelimit.TokenBucket {
		return 0, false
	}
	now = s.serverTime(now)
	e, sh := s.shadow.find(it, now)
	if e == nil {
		return 0, true
	}
	defer sh.mu.Unlock()
	return it.Policy.Used(e.mine, now), true
}
