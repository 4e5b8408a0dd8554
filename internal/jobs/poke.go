package jobs

import (
	"context"
	"sync/atomic"
	"time"
)

// River notifies its workers within the inserting transaction, and only once in a fetchCooldown: a second insertion that
// commits a moment later than the first is seen by the next poll only. So an insertion that may have been suppressed is
// followed by a notification of our own. Those are as rare as River's, whatever the load.

// queryNotify is what River sends (riverdriver, PGNotifyMany) when there are jobs in a queue.
const queryNotify = `SELECT pg_notify(current_schema() || '.river_insert', json_build_object('queue', $1::text)::text)`

// poker remembers what was inserted into a queue on this node.
type poker struct {
	queue  string
	last   atomic.Int64 // when a transaction with jobs was committed last, in nanoseconds
	wanted atomic.Bool
}

// poke reports whether pokeLoop has to do something.
func (p *poker) poke() bool {
	now := time.Now().UnixNano()
	if now-p.last.Swap(now) > int64(2*fetchCooldown) {
		return false // River's own notification went out with the transaction
	}
	return p.wanted.CompareAndSwap(false, true)
}

// Poke implements [delivery.Jobs].
func (c *Client) Poke() { c.pokeQueue(&c.lanes) }

// PokeInbound is Poke for the jobs of inbound events.
func (c *Client) PokeInbound() { c.pokeQueue(&c.events) }

func (c *Client) pokeQueue(p *poker) {
	if !p.poke() {
		return
	}
	select {
	case c.pokes <- struct{}{}:
	default: // pokeLoop has one waiting and will see this one too
	}
}

// pokeLoop sends the notifications that are wanted until ctx ends.
func (c *Client) pokeLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.pokes:
		}
		for _, p := range []*poker{&c.lanes, &c.events} {
			if !p.wanted.Swap(false) {
				continue
			}
			// A failure costs one poll interval.
			if _, err := c.pool.Exec(ctx, queryNotify, p.queue); err != nil && ctx.Err() == nil {
				c.log.Debug("could not poke the workers", "error", err)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(fetchCooldown):
		}
	}
}
