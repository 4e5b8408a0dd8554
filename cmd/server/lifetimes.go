package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"
)

// lifetimes owns what runs beside main: services are started in the order of the program's layers and stopped the other
// way round, one at a time, so that nobody loses what it stands on while it still works. A service that ends by itself
// ends the program. Not safe for concurrent use.
type lifetimes struct {
	log     *slog.Logger
	timeout time.Duration // for each service's stop
	running []*service
	failed  chan error
}

type service struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{}
	err    error
}

func newLifetimes(log *slog.Logger, timeout time.Duration) *lifetimes {
	return &lifetimes{log: log, timeout: timeout, failed: make(chan error, 1)}
}

// start runs a service until stop reaches it. Its context is none of the signal's: what ends first is stop's decision.
func (l *lifetimes) start(name string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	s := &service{name: name, cancel: cancel, done: make(chan struct{})}
	l.running = append(l.running, s)
	go func() {
		defer close(s.done)
		s.err = run(ctx)
		if ctx.Err() == nil {
			err := fmt.Errorf("%s ended: %w", name, cmp.Or(s.err, errors.New("without a reason")))
			select {
			case l.failed <- err:
			default: // one reason to stop is enough
			}
		}
	}()
}

// wait returns when ctx ends (nil) or a service does (its error).
func (l *lifetimes) wait(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return nil
	case err := <-l.failed:
		return err
	}
}

// stop ends the services, last started first, and logs how long each took.
func (l *lifetimes) stop() error {
	var all error
	for i := len(l.running) - 1; i >= 0; i-- {
		s, began := l.running[i], time.Now()
		s.cancel()
		select {
		case <-s.done:
			took := slog.Duration("took", time.Since(began))
			if s.err != nil && !errors.Is(s.err, context.Canceled) {
				l.log.Error("stopped", slog.String("service", s.name), took, slog.Any("error", s.err))
				all = errors.Join(all, fmt.Errorf("%s: %w", s.name, s.err))
				continue
			}
			l.log.Info("stopped", slog.String("service", s.name), took)
		case <-time.After(l.timeout):
			l.log.Error("did not stop in time", slog.String("service", s.name), slog.Duration("took", time.Since(began)))
			all = errors.Join(all, fmt.Errorf("%s did not stop within %s", s.name, l.timeout))
		}
	}
	l.running = nil
	return all
}
