package owner

import (
	"converger/internal/ratelimit"
)

var _ ratelimit.Reporter = (*Store)(nil)

// States implements ratelimit.Reporter. Keys are those that this node owns or keeps a copy of.
func (s *Store) States(now ratelimit.Instant) []ratelimit.StoreState {
	states := s.counts.States(now)
	for i := range states {
		states[i].Backend, states[i].FallingBack = "owner", s.outage.down.Load()
	}
	return states
}

// Own implements ratelimit.Reporter: of a key that another node owns, what was decided here while it could not be asked.
func (s *Store) Own(now ratelimit.Instant, it ratelimit.Item) (uint32, bool) {
	if to, _ := s.ring().first(it.Key); to == s.network.ID() {
		return s.counts.Own(now, it)
	}
	return s.alone.Own(now, it)
}
