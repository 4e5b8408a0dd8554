package cluster

import (
	"converger/internal/ratelimit"
)

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter.
func (s *Store) States(now ratelimit.Instant) []ratelimit.StoreState {
	states := s.Store.States(now)
	heard := map[string]int64{}
	s.peersMu.Lock()
	for _, p := range s.peers {
		if at := p.heard.Load(); !p.gone && at != 0 {
			heard[p.id.String()] = max(int64(now)-at, 0) / 1e6
		}
	}
	s.peersMu.Unlock()
	for i := range states {
		states[i].Backend, states[i].HeardMs = "cluster", heard
	}
	return states
}

// Own implements ratelimit.Reporter. A token bucket holds what all nodes have spent: a node's own part is not told.
func (s *Store) Own(now ratelimit.Instant, it ratelimit.Item) (uint32, bool) {
	if it.Policy.Algorithm() == ratelimit.TokenBucket {
		return 0, false
	}
	return s.Store.Own(now, it)
}
