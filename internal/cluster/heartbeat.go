package cluster

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// firstReadings of the clock are taken in a row at the start: one alone may have met a busy moment.
const firstReadings = 5

// heartbeat writes this node's row, reads the others' and follows the database's clock, each second until ctx ends; then
// it takes the row away. Without a database, or while it is away, it follows the members' clocks.
func (n *Node) heartbeat(ctx context.Context) {
	first := sync.OnceFunc(func() { close(n.firstBeat) })
	var filter clockFilter
	var lastSweep time.Time
	failing := false
	tick := time.NewTicker(beatEvery)
	defer tick.Stop()
	for rounds := firstReadings; ; rounds = 1 {
		sweep := time.Since(lastSweep) > time.Minute
		err := n.beat(ctx, &filter, rounds, sweep)
		switch {
		case ctx.Err() != nil: // told to stop: it says nothing about the database
		case n.config.Database == nil:
		case err == nil:
			if sweep {
				lastSweep = time.Now()
			}
			if failing {
				n.log.Warn("heartbeats reach the database again", slog.Bool("outage", false))
			}
			failing = false
		default:
			if !failing {
				n.log.Warn("the heartbeat does not reach the database: silent nodes count as living until it does", slog.Bool("outage", true), slog.Any("error", err))
			}
			failing = true
		}
		n.metrics.beat(err)
		first()
		n.followMembers()
		n.kick()
		select {
		case <-ctx.Done():
			n.retire()
			return
		case <-tick.C:
		}
	}
}

// beat is one heartbeat.
func (n *Node) beat(ctx context.Context, filter *clockFilter, rounds int, sweep bool) error {
	if n.config.Database == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, beatTimeout)
	defer cancel()
	c, err := n.config.Database.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	for range rounds {
		r, err := readClock(ctx, c.Conn(), n.local)
		if err != nil {
			return err
		}
		n.correct(filter.add(r))
	}
	select {
	case <-n.settled: // it admits requests from now on
		if err := writeBeat(ctx, c.Conn(), n.config.Label, n.id, n.me); err != nil {
			return err
		}
	default:
	}
	beats, err := readBeats(ctx, c.Conn(), n.id)
	if err != nil {
		return err
	}
	if sweep {
		if err := sweepBeats(ctx, c.Conn()); err != nil {
			return err
		}
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	now := time.Now()
	if n.beatAt.IsZero() || now.Sub(n.beatAt) > staleAfter {
		n.steady = now
	}
	n.beatAt = now
	clear(n.beats)
	for _, b := range beats {
		n.beats[b.id] = b
	}
	return nil
}

// correct sets the offset of the clock.
func (n *Node) correct(offset int64) {
	n.offset.Store(offset)
	n.measureSkew()
}

// measureSkew compares the wall clock of this moment, which Config.Now does not follow when it is set.
func (n *Node) measureSkew() {
	n.skew.Store(time.Now().UnixNano() + n.shift - n.Now())
}

// followMembers goes by the median of the members' clocks, this node's included, while the database is away.
func (n *Node) followMembers() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if w := n.witness(time.Now()); w == witnessRecent || w == witnessSteady {
		return
	}
	offsets := []int64{n.offset.Load()}
	for _, p := range n.roster {
		if p.listed && p.standing == Visible && p.latency.Load() != 0 {
			offsets = append(offsets, p.offset.Load())
		}
	}
	if len(offsets) > 1 {
		n.correct(median(offsets))
	}
}

// retire takes the row away: the others need not wait until it is stale.
func (n *Node) retire() {
	if n.config.Database == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), beatTimeout/2)
	defer cancel()
	c, err := n.config.Database.Acquire(ctx)
	if err == nil {
		err = removeBeat(ctx, c.Conn(), n.id)
		c.Release()
	}
	if err != nil {
		n.log.Warn("the heartbeat's row stays until it is stale", slog.Any("error", err))
	}
}
