package delivery

import (
	"testing"
	"time"

	"converger/internal/channel"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

func newLimitPacer(t testing.TB) *LimitPacer {
	t.Helper()
	store, err := local.New(local.Config{})
	if err != nil {
		t.Fatal(err)
	}
	limiter, err := ratelimit.New(ratelimit.Config{Store: store})
	if err != nil {
		t.Fatal(err)
	}
	hasher, err := ratelimit.NewHasher(make([]byte, ratelimit.MinSecret))
	if err != nil {
		t.Fatal(err)
	}
	return NewPacer(limiter, hasher)
}

func TestLimitPacer(t *testing.T) {
	t.Parallel()
	p := newLimitPacer(t)
	free := &channel.Channel{TenantID: newID(), ID: newID()}
	paced := &channel.Channel{TenantID: newID(), ID: newID(), RateLimit: "60/m"}
	for range 1000 {
		if wait, ok := p.Reserve(t.Context(), free, 0); wait != 0 || !ok {
			t.Fatalf("a channel without a limit waits %s, %t", wait, ok)
		}
	}
	for i := range 60 {
		if wait, ok := p.Reserve(t.Context(), paced, 0); wait != 0 || !ok {
			t.Fatalf("delivery %d of 60: %s, %t", i+1, wait, ok)
		}
	}
	if wait, ok := p.Reserve(t.Context(), paced, 0); ok || wait <= 0 || wait > time.Second {
		t.Errorf("without waiting: %s, %t; want to come back within a second", wait, ok)
	}
	first, ok1 := p.Reserve(t.Context(), paced, 10*time.Second)
	second, ok2 := p.Reserve(t.Context(), paced, 10*time.Second)
	if !ok1 || !ok2 || first <= 0 || first > time.Second || second-first < 900*time.Millisecond || second-first > 1100*time.Millisecond {
		t.Errorf("booked after %s, %t and %s, %t; want a second apart", first, ok1, second, ok2)
	}
	if wait, ok := p.Reserve(t.Context(), free, 0); wait != 0 || !ok {
		t.Errorf("another channel waits %s, %t", wait, ok)
	}
}
