package delivery

import (
	"context"
	"time"

	"converger/internal/channel"
	"converger/internal/ratelimit"
)

// LimitPacer paces channels by their own rate_limit in the limiter's bucket channel_outbound, a token bucket that holds as
// much as its limit; a channel without one is not paced. It is safe for concurrent use.
type LimitPacer struct {
	limiter *ratelimit.Limiter
	hasher  ratelimit.Hasher
}

// NewPacer makes a [Pacer] on the program's limiter.
func NewPacer(l *ratelimit.Limiter, h ratelimit.Hasher) *LimitPacer { return &LimitPacer{l, h} }

// Reserve implements [Pacer].
func (p *LimitPacer) Reserve(ctx context.Context, ch *channel.Channel, maxWait time.Duration) (time.Duration, bool) {
	var own *ratelimit.Policy
	if pace, err := channel.ParseRateLimit(ch.RateLimit); err == nil && pace.Limit > 0 {
		// An error means a rule out of the limiter's range, which saving the channel has ruled out.
		own, _ = ratelimit.NewPolicy(ratelimit.ChannelOutbound, ratelimit.Rule{
			Limit: int64(pace.Limit), Scale: pace.Per, Algorithm: ratelimit.TokenBucket})
	}
	d := p.limiter.Reserve(ctx, p.limiter.Now(), ratelimit.Item{
		Key: p.hasher.Channel(ratelimit.ChannelOutbound, ch.TenantID, ch.ID), Policy: own, Cost: 1}, max(maxWait, 0))
	return time.Duration(d.WaitMs) * time.Millisecond, d.Allowed
}

var _ Pacer = (*LimitPacer)(nil)
