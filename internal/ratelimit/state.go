package ratelimit

// StoreState is what an operator should know of a store on this node.
type StoreState struct {
	Backend string
	// Keys are held, ended ones included that still have their place, of at most
	// MaxKeys; where another server counts they are those remembered for when it is away.
	Keys, MaxKeys int
	// Overflowing says that subjects without room share counters.
	Overflowing bool
	// FallingBack says that this node decides with its share of the limits, since who
	// counts can't be asked.
	FallingBack bool
	// Breaker is "closed", "open" or "half_open"; "" for a store that has none.
	Breaker string
	// Nodes is how many live nodes count at the same server, this one included, as was last heard there; 0 where
	// no server knows.
	Nodes int
	// HeardMs is how many milliseconds ago each other node's counts last came, by its id.
	HeardMs map[string]int64
}

// Reporter is a Store that tells operators about itself. It is apart from Store
// since no decision needs it.
type Reporter interface {
	States(now Instant) []StoreState
	// Own is Limiter.Own.
	Own(now Instant, it Item) (used uint32, ok bool)
}

func statesOf(s Store, now Instant) []StoreState {
	if r, ok := s.(Reporter); ok {
		return r.States(now)
	}
	return nil
}

func ownOf(s Store, now Instant, it Item) (uint32, bool) {
	if r, ok := s.(Reporter); ok {
		return r.Own(now, it)
	}
	return 0, false
}
