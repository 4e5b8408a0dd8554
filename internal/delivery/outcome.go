package delivery

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/postgres"
)

const (
	outcomeWriters = 2
	outcomeGroup   = 256
)

// errNotRecorded says that what a worker did could not be written in time. Its lane is taken over once the lease ends.
var errNotRecorded = errors.New("delivery: the outcome could not be written")

// outcome is what a worker has to write: an attempt, the end of its turn, or both in one transaction.
type outcome struct {
	lane     *lane
	attempt  *attempt
	end      *end
	deadline time.Time // no use in writing it later
	done     chan error

	counted bool // the attempt moved its delivery on
	ended   bool // the lane is free
}

// attempt is one attempt as it is recorded, and where it leaves the delivery.
type attempt struct {
	id         uuid.UUID
	deliveryID uuid.UUID
	activityID uuid.UUID
	number     int
	outcome    channel.Outcome
	started    time.Time
	took       time.Duration

	status Status
	reason string
	delay  time.Duration // to the delivery's next_at
}

// end ends a turn.
type end struct {
	wakes int64         // only if the lane was not woken since it had these; anyWakes: in any case
	again bool          // the lane has work left
	delay time.Duration // until then
}

const anyWakes = -1

func (e *end) delayMS() *int64 {
	if !e.again {
		return nil
	}
	ms := max(0, e.delay.Milliseconds())
	return &ms
}

func newOutcome(l *lane, a *attempt, e *end, patience time.Duration) *outcome {
	return &outcome{lane: l, attempt: a, end: e, deadline: time.Now().Add(patience), done: make(chan error, 1)}
}

// record writes an attempt or the end of a turn, or both, and waits for it, but not longer than the margin of the lease. It
// goes on when ctx ends: what a worker did is recorded while the program stops.
func (s *Service) record(ctx context.Context, l *lane, a *attempt, e *end) (*outcome, error) {
	o := newOutcome(l, a, e, s.o.LeaseMargin)
	ctx, cancel := context.WithDeadline(context.WithoutCancel(ctx), o.deadline)
	defer cancel()
	select {
	case s.outcomes <- o:
	case <-s.stopped:
		return nil, errNotRecorded
	case <-ctx.Done():
		return nil, errNotRecorded
	}
	select {
	case err := <-o.done:
		return o, err
	case <-s.stopped:
		select {
		case err := <-o.done:
			return o, err
		default:
			return nil, errNotRecorded
		}
	case <-ctx.Done():
		return nil, errNotRecorded
	}
}

// writeGroup writes what workers have handed over.
func (s *Service) writeGroup(ctx context.Context, group []*outcome) {
	s.m.groupSize.Observe(float64(len(group)))
	s.write(context.WithoutCancel(ctx), group)
}

// write tries until the group is written, or its first deadline has passed. When the fault is in the data, each is written
// by itself, so that one harms no other.
func (s *Service) write(ctx context.Context, group []*outcome) {
	deadline := group[0].deadline
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	for pause := 5 * time.Millisecond; ; pause = min(2*pause, 500*time.Millisecond) {
		err := s.storeOutcomes(ctx, group)
		if err == nil {
			break
		}
		again := postgres.IsUnavailable(err) || postgres.IsSerialization(err)
		if !again && len(group) > 1 {
			for _, o := range group {
				s.write(context.WithoutCancel(ctx), []*outcome{o})
			}
			return
		}
		s.m.errors.WithLabelValues("outcome").Inc()
		if !again || time.Now().Add(pause).After(deadline) {
			err = fmt.Errorf("%w: %w", errNotRecorded, err)
			for _, o := range group {
				o.done <- err
			}
			return
		}
		time.Sleep(pause)
	}
	for _, o := range group {
		o.done <- nil
	}
}
