package delivery

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// Circuit says whether a channel's deliveries go out.
type Circuit string

// The states of a circuit. Deliveries that wait behind one that is not closed read as [StatusPaused].
const (
	CircuitClosed   Circuit = "closed"    // they go out
	CircuitOpen     Circuit = "open"      // attempts failed one after the other: none goes out until the cooldown is over
	CircuitHalfOpen Circuit = "half_open" // it is over: one lane at a time goes out, and what comes of it closes or opens
	CircuitPaused   Circuit = "paused"    // by hand, until somebody resumes
)

// MaxParked is as far as [ChannelState.Parked] is counted.
const MaxParked = 100_000

// countFor bounds a count, which outlives the caller that began it.
const countFor = 5 * time.Second

// ChannelState is where the deliveries of a channel stand.
type ChannelState struct {
	ChannelID uuid.UUID
	Circuit   Circuit
	ChangedAt *time.Time // nil: it has been closed from the beginning
	// Failures are the attempts that failed one after the other until the circuit opened, and its probes since; 0 while it
	// is closed.
	Failures  int
	RateLimit channel.RateLimit // the zero value: none
	Parked    int               // open deliveries that wait for the circuit, MaxParked at most; 0 while it is closed
}

// An open circuit turns half open by itself: nobody has to be there at that moment.
const queryState = `
SELECT CASE WHEN half THEN 'half_open' ELSE circuit_state END, CASE WHEN half THEN hold_until ELSE circuit_changed_at END,
    consecutive_failures, coalesce(rate_limit, '')
FROM (SELECT *, circuit_state = 'open' AND hold_until <= now() AS half FROM channels) c
WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL`

// Lanes that wait and lanes that a worker still holds, each by its own index.
const queryParked = `
SELECT count(*) FROM (
    SELECT FROM (
        SELECT id FROM lanes WHERE tenant_id = $1 AND channel_id = $2 AND lease_token IS NULL AND next_at IS NOT NULL
        UNION ALL
        SELECT id FROM lanes WHERE tenant_id = $1 AND channel_id = $2 AND lease_token IS NOT NULL
    ) l CROSS JOIN LATERAL (SELECT FROM deliveries d WHERE d.lane_id = l.id AND d.status = 'pending' LIMIT $3) d
    LIMIT $3) parked`

// State returns where the deliveries of a channel stand, or [channel.ErrNotFound].
func (s *Service) State(ctx context.Context, tenant tenants.ID, channelID uuid.UUID) (ChannelState, error) {
	st := ChannelState{ChannelID: channelID}
	var pace string
	err := s.pool.QueryRow(ctx, queryState, tenant, channelID).Scan(&st.Circuit, &st.ChangedAt, &st.Failures, &pace)
	if errors.Is(err, pgx.ErrNoRows) {
		return ChannelState{}, channel.ErrNotFound
	}
	if err == nil {
		st.RateLimit, err = channel.ParseRateLimit(pace)
	}
	if err == nil && st.Circuit != CircuitClosed {
		st.Parked, err = s.parked(ctx, tenant, channelID)
	}
	if err != nil {
		return ChannelState{}, fmt.Errorf("read the state of a channel: %w", err)
	}
	return st, nil
}

// parked counts what waits. Those who ask at the same time share a count: it may read many rows.
func (s *Service) parked(ctx context.Context, tenant tenants.ID, channelID uuid.UUID) (int, error) {
	result := s.counts.DoChan(tenant.String()+channelID.String(), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), countFor)
		defer cancel()
		var n int
		err := s.pool.QueryRow(ctx, queryParked, tenant, channelID, MaxParked).Scan(&n)
		return n, err
	})
	select {
	case r := <-result:
		return r.Val.(int), r.Err
	case <-ctx.Done():
		return 0, context.Cause(ctx)
	}
}

const (
	lockCircuitQuery = `
SELECT circuit_state FROM channels WHERE tenant_id = $1 AND id = $2 AND deleted_at IS NULL FOR NO KEY UPDATE`
	setCircuitQuery = `
UPDATE channels SET circuit_state = $3, circuit_changed_at = now(), consecutive_failures = 0, hold_until = NULL
WHERE tenant_id = $1 AND id = $2`
)

// Pause holds a channel's deliveries back until Resume, whatever its circuit does. Nothing is lost, no attempt is used, and
// it costs one row. It is in force for every worker as soon as it reads its lane again, which it does at least every
// freshFor: attempts that are under way by then are finished. A second time changes nothing. Errors: [channel.ErrNotFound].
func (s *Service) Pause(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID) (ChannelState, error) {
	return s.steer(ctx, by, tenant, channelID, CircuitPaused, "pause_deliveries")
}

// Resume lets a channel's deliveries go out, in order, be it paused or its circuit open. A second time changes nothing.
// Errors: [channel.ErrNotFound].
func (s *Service) Resume(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID) (ChannelState, error) {
	return s.steer(ctx, by, tenant, channelID, CircuitClosed, "resume_deliveries")
}

// steer does not count as a change of configuration: nobody holds the circuit in memory.
func (s *Service) steer(ctx context.Context, by tenants.Actor, tenant tenants.ID, channelID uuid.UUID, to Circuit, action string) (ChannelState, error) {
	var before Circuit
	err := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
		err := tx.QueryRow(ctx, lockCircuitQuery, tenant, channelID).Scan(&before)
		if errors.Is(err, pgx.ErrNoRows) {
			return channel.ErrNotFound
		}
		if err != nil || before == to {
			return err
		}
		if _, err := tx.Exec(ctx, setCircuitQuery, tenant, channelID, to); err != nil {
			return err
		}
		return tenants.AuditTx(ctx, tx, by, tenants.Entry{TenantID: &tenant, Action: action, ResourceType: "channel",
			ResourceID: channelID.String(), Before: circuitSnapshot(before), After: circuitSnapshot(to)})
	})
	if err != nil {
		return ChannelState{}, fmt.Errorf("%s: %w", action, err)
	}
	if before != to {
		s.m.circuits.WithLabelValues(string(to), "by_hand").Inc()
		s.pokeDispatcher()
	}
	return s.State(ctx, tenant, channelID)
}

func circuitSnapshot(c Circuit) map[string]any { return map[string]any{"circuit_state": c} }

// breaker counts, on this node, how many attempts for a channel have failed one after the other. A row is written only when a
// circuit changes: to count in the database would cost an update of one hot row for every message. So each node comes to
// its own conclusion, and the first to come to one decides for all. Safe for concurrent use.
type breaker struct {
	mu      sync.Mutex
	failing map[uuid.UUID]failing // only channels whose last attempt failed, so that it stays small
}

type failing struct {
	n     int
	since time.Time // the circuit's last change that the attempts knew of
}

// failed counts a failure and returns how many there are in a row.
func (b *breaker) failed(ch uuid.UUID, since time.Time) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	f := b.failing[ch]
	if !f.since.Equal(since) {
		f = failing{since: since}
	}
	f.n++
	if b.failing == nil {
		b.failing = map[uuid.UUID]failing{}
	}
	b.failing[ch] = f
	return f.n
}

func (b *breaker) forget(ch uuid.UUID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.failing, ch)
}

// What an attempt says of a circuit counts only if that is still as the attempt knew it ($3): one that was slow says nothing
// about a circuit that has been opened, closed or paused meanwhile.
const (
	whereKnown = `
WHERE tenant_id = $1 AND id = $2 AND circuit_changed_at IS NOT DISTINCT FROM $3 AND deleted_at IS NULL`

	queryOpenCircuit = `
UPDATE channels SET circuit_state = 'open', circuit_changed_at = now(), consecutive_failures = consecutive_failures + $4,
    hold_until = now() + $5::bigint * interval '1 millisecond'` + whereKnown + ` AND circuit_state <> 'paused'`
	queryCloseCircuit = `
UPDATE channels SET circuit_state = 'closed', circuit_changed_at = now(), consecutive_failures = 0, hold_until = NULL` +
		whereKnown + ` AND circuit_state = 'open'`
)

// judge tells the circuit of a lane's channel what an attempt came to, before the lane can go to another worker. It reports
// whether the circuit is no longer as the lane was read. Failures that are the message's own, or this program's, say nothing
// about the receiver.
func (s *Service) judge(ctx context.Context, l *lane, out channel.Outcome) (changed bool) {
	switch {
	case out.Kind == channel.Sent:
		s.breaker.forget(l.channel)
		if !l.probe {
			return false
		}
		if s.turnCircuit(ctx, l, CircuitClosed, queryCloseCircuit) {
			s.pokeDispatcher()
		}
	case out.Kind != channel.Retry || out.Reason == ReasonReply:
		return false
	case l.probe:
		s.turnCircuit(ctx, l, CircuitOpen, queryOpenCircuit, 1, s.o.Cooldown.Milliseconds())
	default:
		n := s.breaker.failed(l.channel, l.since())
		if n < s.o.BreakAfter {
			return false
		}
		s.turnCircuit(ctx, l, CircuitOpen, queryOpenCircuit, n, s.o.Cooldown.Milliseconds())
	}
	return true
}

// turnCircuit reports whether it turned. When the database fails, the next attempt judges again.
func (s *Service) turnCircuit(ctx context.Context, l *lane, to Circuit, sql string, args ...any) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.o.LeaseMargin)
	defer cancel()
	tag, err := s.pool.Exec(ctx, sql, append([]any{l.tenant, l.channel, l.circuitSince}, args...)...)
	if err != nil {
		s.m.errors.WithLabelValues("circuit").Inc()
		s.log.Error("a circuit could not be turned", "channel_id", l.channel, "to", to, "error", err)
		return false
	}
	s.breaker.forget(l.channel)
	if tag.RowsAffected() == 0 {
		return false
	}
	s.m.circuits.WithLabelValues(string(to), "by_attempts").Inc()
	level := slog.LevelWarn
	if l.probe && to == CircuitOpen {
		level = slog.LevelDebug // once more, as every Cooldown
	}
	s.log.Log(ctx, level, "a channel's circuit has turned", "tenant_id", l.tenant, "channel_id", l.channel, "to", to)
	return true
}
