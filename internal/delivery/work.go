package delivery

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"time"

	"converger/internal/activity"
	"converger/internal/channel"
)

const (
	// readAhead is how many deliveries a worker reads at once.
	readAhead = 20
	// wakePause is given to the transaction that is waking a lane: what it brings can be read once it has committed.
	wakePause = 2 * time.Millisecond
	// channelRetry is when to look again at a lane whose channel cannot be read, such as one sealed with an unknown key.
	channelRetry = 30 * time.Second
	// freshFor is how long a worker goes by what it has read of a lane: a pause, say, is in force by then.
	freshFor = 250 * time.Millisecond
)

// Work works a lane: its due deliveries in order, for about WorkFor. It does nothing when the job came too late, and so may
// run twice or at any time. When ctx ends it stops after the attempt that is running, which it cuts off, and gives the lane
// back. Run must be running. An error means that the machinery failed, not a delivery: the lane is tried again by itself.
func (s *Service) Work(ctx context.Context, job LaneJob) error {
	s.running.Add(1)
	again, err := s.work(ctx, job)
	s.running.Add(-1)
	// An idle node is not woken for every lane that ends.
	if again || s.behind.Load() != nil {
		s.pokeDispatcher()
	}
	return err
}

// work reports whether the lane was given back with work that is due.
func (s *Service) work(ctx context.Context, job LaneJob) (again bool, err error) {
	until := time.Now().Add(s.o.WorkFor)
	for {
		l, err := s.readLane(ctx, job)
		switch {
		case err != nil:
			// The lease would heal it too, later.
			_, _ = s.record(ctx, &lane{job: job}, nil, giveBack(time.Second))
			if ctx.Err() != nil {
				err = nil // cancellation is not an error
			} else {
				err = fmt.Errorf("read lane: %w", err)
			}
			return false, err
		case l == nil:
			s.m.stale.Inc()
			return false, nil
		case l.held || ctx.Err() != nil || time.Now().After(until):
			_, err := s.record(ctx, l, nil, giveBack(0))
			return !l.held, err
		}
		sender, reason := s.reachable(l)
		if reason != "" {
			if err := s.fail(ctx, l, reason); err != nil {
				return false, err
			}
			l.open, l.full = nil, false
		}
		if len(l.open) > 0 {
			done, again, err := s.deliver(ctx, l, sender, until)
			if done || err != nil {
				return again, err
			}
			continue
		}
		// Nothing is due. Who wakes the lane from here on changes wakes.
		e := &end{wakes: l.wakes}
		if !l.ordered() {
			if e.delay, e.again, err = s.nextInSlot(ctx, job.LaneID); err != nil {
				return false, fmt.Errorf("read slot: %w", err)
			}
		}
		if o, err := s.record(ctx, l, nil, e); err != nil || o.ended {
			return false, err
		}
		sleep(ctx, wakePause)
	}
}

// waiting ends the turn of an ordered lane whose first open delivery must wait, unless the lane was woken meanwhile: by a
// message that goes behind, or by one that is retried and may go ahead.
func (l *lane) waiting(in time.Duration) *end { return &end{wakes: l.wakes, again: true, delay: in} }

// giveBack ends a turn with work left.
func giveBack(in time.Duration) *end { return &end{wakes: anyWakes, again: true, delay: in} }

// reachable returns the sender of a lane's channel, or the reason why there is none any more.
func (s *Service) reachable(l *lane) (channel.Sender, string) {
	if l.deleted {
		return nil, ReasonChannelDeleted
	}
	sender, ok := s.sender(l.typ)
	if !ok || !l.mode.Sends() {
		return nil, ReasonUnsupported
	}
	return sender, ""
}

// fail fails every open delivery of a lane.
func (s *Service) fail(ctx context.Context, l *lane, reason string) error {
	detail := "The channel was deleted."
	if reason == ReasonUnsupported {
		detail = "The channel's type or mode does not deliver."
	}
	n, err := s.failLane(ctx, l.job, reason, detail)
	s.m.finished.WithLabelValues(string(StatusFailed), reason).Add(float64(n))
	return err
}

// deliver works what was read of a lane. done says that the turn is over, else the lane is to be read again.
func (s *Service) deliver(ctx context.Context, l *lane, sender channel.Sender, until time.Time) (done, again bool, err error) {
	ch, err := s.channels.Current(ctx, l.tenant, l.channel, l.version)
	switch {
	case errors.Is(err, channel.ErrNotFound):
		return false, false, nil // deleted just now
	case ctx.Err() != nil:
		_, err := s.record(ctx, l, nil, giveBack(0))
		return true, true, err
	case err != nil:
		_, _ = s.record(ctx, l, nil, giveBack(channelRetry))
		return true, false, fmt.Errorf("read channel %s: %w", l.channel, err)
	}
	limit := timeout(ch.RetryPolicy, s.o.MaxAttempt)
	stop := func(in time.Duration) (bool, bool, error) {
		_, err := s.record(ctx, l, nil, giveBack(in))
		return true, in <= 0, err
	}
	for i, d := range l.open {
		if i > 0 && time.Since(l.read) > freshFor {
			return false, false, nil
		}
		if d.wait > 0 {
			o, err := s.record(ctx, l, nil, l.waiting(d.wait))
			if err != nil || o.ended {
				return true, false, err
			}
			sleep(ctx, wakePause)
			return false, false, nil
		}
		// The last moment to start an attempt of this turn and of this lease.
		latest := l.deadline.Add(-limit - s.o.LeaseMargin)
		if until.Before(latest) {
			latest = until
		}
		if ctx.Err() != nil || time.Now().After(latest) {
			return stop(0)
		}
		if s.o.Pacer != nil {
			wait, ok := s.o.Pacer.Reserve(ctx, ch, time.Until(latest))
			if !ok {
				return stop(max(wait, time.Millisecond))
			}
			if !sleep(ctx, wait) {
				return stop(0)
			}
		}
		a := s.attempt(ctx, ch, sender, d, limit)
		if a == nil {
			return stop(0)
		}
		turned := s.judge(ctx, l, a.outcome)
		var e *end
		if l.ordered() {
			if a.status == StatusPending {
				e = l.waiting(a.delay)
			} else if i == len(l.open)-1 && !l.full {
				e = &end{wakes: l.wakes}
			}
		}
		o, err := s.record(ctx, l, a, e)
		if err != nil {
			return true, false, err
		}
		s.m.count(l, a, o.counted)
		if o.ended {
			return true, false, nil
		}
		if e != nil || !o.counted || turned {
			return false, false, nil
		}
	}
	// Of a slot everything that was due has been tried; of a conversation there was more than one reading.
	return false, false, nil
}

// sleep waits for d; false when ctx ended first.
func sleep(ctx context.Context, d time.Duration) bool {
	if d <= 0 {
		return true
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// attempt makes one attempt and decides where it leaves the delivery. It returns nil when it was cut off by the end of ctx:
// that is no attempt of the receiver's.
func (s *Service) attempt(ctx context.Context, ch *channel.Channel, sender channel.Sender, d open, limit time.Duration) *attempt {
	a := &attempt{id: newID(), deliveryID: d.id, activityID: d.activity.ID, number: d.attempts + 1, started: time.Now()}
	timed, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	a.outcome = s.send(timed, ch, sender, d, a.number)
	if a.outcome.Kind == channel.Sent && len(a.outcome.Replies) > 0 {
		if err := s.reply(timed, ch, d.activity, a.outcome.Replies); err != nil {
			s.log.Warn("a reply could not be stored; the delivery is tried again", "tenant_id", d.activity.TenantID,
				"delivery_id", d.id, "error", err)
			a.outcome = channel.Outcome{Kind: channel.Retry, Reason: ReasonReply, Error: "The reply could not be stored."}
		}
	}
	a.took = time.Since(a.started)
	if a.outcome.Kind == channel.Retry && ctx.Err() != nil {
		return nil
	}
	a.outcome.Error = storable(a.outcome.Error, maxError)
	a.outcome.Response = storable(a.outcome.Response, maxResponse)
	if id := a.outcome.ProviderMessageID; storable(id, channel.MaxProviderID) != id {
		s.log.Warn("a provider named a message by an id that cannot be stored", "type", ch.Type, "delivery_id", d.id)
		a.outcome.ProviderMessageID = ""
	}
	a.status, a.reason, a.delay = decide(ch.RetryPolicy, a.number, a.outcome, s.o.UncertainFor, rand.Float64())
	return a
}

// send calls the adapter; a panic of its is a failed attempt.
func (s *Service) send(ctx context.Context, ch *channel.Channel, sender channel.Sender, d open, number int) (out channel.Outcome) {
	defer func() {
		if v := recover(); v != nil {
			s.log.Error("a channel adapter panicked", "type", ch.Type, "delivery_id", d.id, "panic", v, "stack", string(debug.Stack()))
			out = channel.Outcome{Kind: channel.Failed, Reason: ReasonCrashed, Error: "The channel's adapter failed."}
		}
	}()
	now := time.Now()
	a := &d.activity
	text := ""
	if a.Text != nil {
		text = *a.Text
	}
	return sender.Send(ctx, ch, channel.Outbound{
		DeliveryID: d.id,
		ActivityID: a.ID,
		Attempt:    number,
		Body:       body(a, now),
		Activity:   channel.OutboundActivity{Type: a.Type, Sender: a.Sender, Text: text, Metadata: a.Metadata},
		Now:        now,
	})
}

// body is the canonical activity with the time of the attempt as its last member.
func body(a *activity.Activity, now time.Time) []byte {
	b := bytes.TrimSuffix(a.Canonical(), []byte("}"))
	b = append(b, `,"timestamp":"`...)
	b = now.UTC().AppendFormat(b, "2006-01-02T15:04:05.000Z07:00")
	return append(b, `"}`...)
}

// decide is where an attempt, the number-th of its delivery, leaves it. random is from 0 to 1.
func decide(p channel.RetryPolicy, number int, out channel.Outcome, uncertainFor time.Duration, random float64) (Status, string, time.Duration) {
	switch {
	case out.Kind == channel.Sent:
		return StatusSent, "", 0
	case out.Kind == channel.Uncertain:
		return StatusUncertain, ReasonUncertain, uncertainFor
	case out.Disable:
		return StatusFailed, channel.ReasonGone, 0
	case out.Kind != channel.Retry:
		return StatusFailed, cmp.Or(out.Reason, channel.ReasonRejected), 0
	case number >= maxAttempts(p):
		return StatusFailed, ReasonExhausted, 0
	}
	return StatusPending, out.Reason, backoff(p, number, out.RetryAfter, random)
}

// reply appends what an adapter answered. The key makes it safe to be called again for the same activity. A conversation
// that takes no reply is no reason to deliver again: the reply is dropped and counted. Any other error is.
func (s *Service) reply(ctx context.Context, ch *channel.Channel, to activity.Activity, replies []channel.Message) error {
	in := make([]activity.New, len(replies))
	for i, r := range replies {
		n, err := newReply(ch, to, i, r)
		if err != nil {
			return err
		}
		in[i] = n
	}
	var failed error
	for _, res := range s.append(ctx, in) {
		switch {
		case res.Err == nil:
			s.m.replies.WithLabelValues("stored").Inc()
		case dropsReply(res.Err):
			s.m.replies.WithLabelValues("dropped").Inc()
			s.log.Info("dropped a reply", "tenant_id", to.TenantID, "activity_id", to.ID, "error", res.Err)
		default:
			failed = res.Err
		}
	}
	return failed
}
