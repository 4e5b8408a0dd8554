package jobs

import (
	"context"
	"time"
)

// River notifies its workers within the inserting transaction, and only once in a fetchCooldown: a second insertion that
// commits a moment later than the first is seen by the next poll only. So an insertion that may have been suppressed is
// followed by a notification of our own. Those are as rare as River's, whatever the load.

// queryNotify is what River sends (riverdriver, PGNotifyMany), for the queue of lanes.
const queryNotify = `SELECT pg_notify(current_schema() || '.river_insert', '{"queue": "lanes"}')`

// Poke implements [delivery.Jobs].
func (c *Client) Poke() {
	now := time.Now().UnixNano()
	if last := c.handed.Swap(now); now-last > int64(2*fetchCooldown) {
		return // River's own notification went out with the transaction
	}
	select {
	case c.poke <- struct{}{}:
	default:
	}
}

// pokeLoop sends the notifications that Poke asks for until ctx ends.
func (c *Client) pokeLoop(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.poke:
		}
		// A failure costs one poll interval.
		if _, err := c.pool.Exec(ctx, queryNotify); err != nil && ctx.Err() == nil {
			c.log.Debug("could not poke the workers", "error", err)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(fetchCooldown):
		}
	}
}
