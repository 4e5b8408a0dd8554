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
	key := p.hasher.Channel(ratelimit.ChannelOutbound, ch.TenantID, ch.ID)
	d := p.limiter.Reserve(ctx, p.limiter.Now(), ratelimit.Item{Key: key, Policy: PacePolicy(ch.RateLimit), Cost: 1}, max(maxWait, 0))
	if d.Unnamed {
		p.limiter.Name(ratelimit.ChannelOutbound, key, ratelimit.Name{Tenant: ch.TenantID, Text: ch.ID.String()})
	}
	return time.Duration(d.WaitMs) * time.Millisecond, d.Allowed
}

// PacePolicy is the policy by which a channel with this rate_limit is paced, nil for one without.
func PacePolicy(rateLimit string) *ratelimit.Policy {
	pace, err := channel.ParseRateLimit(rateLimit)
	if err != nil || pace.Limit == 0 {
		return nil
	}
	// An error means a rule out of the limiter's range, which saving the channel has ruled out.
	p, _ := ratelimit.NewPolicy(ratelimit.ChannelOutbound, ratelimit.Rule{
		Limit: int64(pace.Limit), Scale: pace.Per, Algorithm: ratelimit.TokenBucket})
	return p
}

var _ Pacer = (*LimitPacer)(nil)
