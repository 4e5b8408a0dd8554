package local

import (
	"testing"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/ratelimittest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	ratelimittest.Run(t, func(t *testing.T) ratelimit.Store { return newStore(t, Config{}) })
	ratelimittest.RunBound(t, func(t *testing.T, maxKeys int) ratelimit.Store {
		return newStore(t, Config{MaxKeys: maxKeys})
	})
}
