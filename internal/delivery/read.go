package delivery

import (
	"context"
	"errors"
	"time"
)

const (
	laneReaders = 2
	laneGroup   = 64
)

// errNotRead says that a lane could not be read because the service has stopped.
var errNotRead = errors.New("delivery: stopped before the lane was read")

// reading is a lane that a worker wants to read.
type reading struct {
	job   LaneJob
	asked time.Time
	done  chan error // capacity 1

	lane *lane // nil: the job no longer holds it
}

// readLane returns nil when the job no longer holds the lane. Workers that ask at the same time share a statement: most
// turns are for one message, and finding the partitions costs more than reading it.
func (s *Service) readLane(ctx context.Context, job LaneJob) (*lane, error) {
	r := &reading{job: job, asked: time.Now(), done: make(chan error, 1)}
	select {
	case s.readings <- r:
	case <-s.stopped:
		return nil, errNotRead
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	select {
	case err := <-r.done:
		return r.lane, err
	case <-s.stopped:
		return nil, errNotRead
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// readGroup reads lanes for the workers that wait for them.
func (s *Service) readGroup(ctx context.Context, group []*reading) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.o.LeaseMargin)
	defer cancel()
	err := s.readLanes(ctx, group)
	for _, r := range group {
		r.done <- err
	}
}

// inGroups calls do with what is sent to in, as much at once as waits there but at most most, until ctx has ended and
// nothing is left. A lone one goes at once.
func inGroups[T any](ctx context.Context, in <-chan T, most int, do func(group []T)) {
	stop := ctx.Done()
	for {
		group := make([]T, 0, min(most, len(in)+1))
		select {
		case first := <-in:
			group = append(group, first)
		case <-stop:
			stop = nil
		}
	fill:
		for len(group) < most {
			select {
			case next := <-in:
				group = append(group, next)
			default:
				break fill
			}
		}
		switch {
		case len(group) > 0:
			do(group)
		case stop == nil:
			return
		}
	}
}
