package redis

import "converger/internal/ratelimit"

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter: Redis holds the budgets; the keys are those that this node remembers for when it
// can't ask there.
func (s *Store) States(now ratelimit.Instant) []ratelimit.StoreState {
	return []ratelimit.StoreState{{
		Backend: string(ratelimit.BackendRedis), Breaker: breakerState(s.breaker.state.Load()).String(), FallingBack: s.Degraded() != nil,
		Nodes: int(s.present.Load()), Keys: s.shadow.keys(), MaxKeys: s.shadow.bound(), Overflowing: s.shadow.overflowing(s.serverTime(now)),
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
