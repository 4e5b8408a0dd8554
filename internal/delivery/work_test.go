package delivery

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/migrations/pgtest"

	"converger/internal/postgres"
)

func TestWorkKeepsTheOrderOfALane(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	conv := w.newConversation(t, ch)
	failures := map[string]int{"m003": 2, "m007": 1, "m040": 3}
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		if out.Attempt <= failures[out.Activity.Text] {
			return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonServerError, StatusCode: 503, Error: "busy"}
		}
		return channel.Outcome{Kind: channel.Sent, StatusCode: 200, Response: "ok"}
	}
	ids := w.post(t, conv, texts(50)...)
	last := ids[len(ids)-1]
	w.drainUntil(t, "everything sent", func() bool { return w.only(t, last).Status == StatusSent })

	var want []string
	for _, text := range texts(50) {
		for range failures[text] + 1 {
			want = append(want, text)
		}
	}
	if diff := cmp.Diff(want, w.adapter.texts(ch)); diff != "" {
		t.Errorf("attempts (-want +got):\n%s", diff)
	}
	d := w.only(t, ids[3])
	if d.Attempts != 3 || d.SentAt == nil || d.Reason != "" || d.LastError != "" {
		t.Errorf("delivery after two failures: %+v", d)
	}
	attempts, err := w.Attempts(t.Context(), w.tenant, d.ID)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, a := range attempts {
		got = append(got, fmt.Sprintf("%d %s %s %d %s %s", a.Number, a.Outcome, a.Reason, a.StatusCode, a.Error, a.Response))
	}
	if diff := cmp.Diff([]string{"1 retry server_error 503 busy ", "2 retry server_error 503 busy ", "3 sent  200  ok"}, got); diff != "" {
		t.Errorf("recorded attempts (-want +got):\n%s", diff)
	}
	if n := count(t, w.pool, `SELECT count(*) FROM lanes WHERE next_at IS NOT NULL OR lease_token IS NOT NULL`); n != 0 {
		t.Errorf("%d lanes still have work or a lease", n)
	}
}

func TestWorkSendsTheCanonicalActivityFresh(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		if out.Attempt == 1 {
			return channel.Outcome{Kind: channel.Retry}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	id := w.post(t, conv, "hello")[0]
	w.drainUntil(t, "sent", func() bool { return w.only(t, id).Status == StatusSent })
	d := w.only(t, id)
	calls := w.adapter.sent()
	if len(calls) != 2 || calls[0].DeliveryID != d.ID || calls[1].DeliveryID != d.ID || !calls[1].Now.After(calls[0].Now) {
		t.Fatalf("attempts %+v of delivery %s: want the same id and a new time", calls, d.ID)
	}
	var body, canonical map[string]any
	if err := json.Unmarshal(calls[1].Body, &body); err != nil {
		t.Fatalf("body %s: %v", calls[1].Body, err)
	}
	at, err := time.Parse(time.RFC3339, body["timestamp"].(string))
	if err != nil || at.Sub(calls[1].Now).Abs() > time.Millisecond {
		t.Errorf("timestamp %v of an attempt at %v", body["timestamp"], calls[1].Now)
	}
	delete(body, "timestamp")
	if err := json.Unmarshal(d.Activity.Canonical(), &canonical); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(canonical, body); diff != "" {
		t.Errorf("body (-canonical +sent):\n%s", diff)
	}
}

func TestWorkEndsWithEveryOutcome(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		out      func(attempt int) channel.Outcome
		status   Status
		reason   string
		attempts int
	}{
		"exhausted": {func(int) channel.Outcome { return channel.Outcome{Kind: channel.Retry, Reason: "dns"} }, StatusFailed, ReasonExhausted, 3},
		"permanent": {func(int) channel.Outcome {
			return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonBlockedTarget}
		}, StatusFailed, channel.ReasonBlockedTarget, 1},
		"gone": {func(int) channel.Outcome {
			return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonGone, Disable: true}
		}, StatusFailed, channel.ReasonGone, 1},
		"uncertain": {func(int) channel.Outcome {
			return channel.Outcome{Kind: channel.Uncertain, ProviderMessageID: "p1"}
		}, StatusUncertain, ReasonUncertain, 1},
		"panic": {func(int) channel.Outcome { panic("boom") }, StatusFailed, ReasonCrashed, 1},
		"text that cannot be stored": {func(int) channel.Outcome {
			return channel.Outcome{Kind: channel.Sent, Response: "a\x00\xffb", Error: "\x00", ProviderMessageID: "\x00"}
		}, StatusSent, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{})
			ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.MaxAttempts = 3 })
			conv := w.newConversation(t, ch)
			w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
				if out.Activity.Text == "after" {
					return channel.Outcome{Kind: channel.Sent}
				}
				return test.out(out.Attempt)
			}
			ids := w.post(t, conv, "first", "after")
			// The lane goes on behind whatever ended.
			w.drainUntil(t, "the next one sent", func() bool { return w.only(t, ids[1]).Status == StatusSent })
			d := w.only(t, ids[0])
			if d.Status != test.status || d.Reason != test.reason || d.Attempts != test.attempts {
				t.Errorf("got %s, %q after %d attempts; want %s, %q after %d", d.Status, d.Reason, d.Attempts, test.status, test.reason, test.attempts)
			}
			attempts, err := w.Attempts(t.Context(), w.tenant, d.ID)
			if err != nil || len(attempts) != test.attempts {
				t.Errorf("%d attempts recorded, %v; want %d", len(attempts), err, test.attempts)
			}
		})
	}
}

func TestUncertainIsGivenUpAndNeverRepeated(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{UncertainFor: time.Millisecond})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		return channel.Outcome{Kind: channel.Uncertain, Error: "no answer"}
	}
	id := w.post(t, conv, "x")[0]
	w.drain(t)
	eventually(t, "given up", func() bool {
		if _, err := w.GiveUpUncertainAllTenants(t.Context()); err != nil {
			t.Fatal(err)
		}
		w.drain(t)
		return w.only(t, id).Status == StatusFailed
	})
	if d := w.only(t, id); d.Reason != ReasonUncertain || d.LastError != "no answer" || len(w.adapter.sent()) != 1 {
		t.Errorf("delivery %+v after %d attempts", d, len(w.adapter.sent()))
	}
}

func TestUnorderedSlotLetsOthersPass(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.Ordered = false; c.RetryPolicy.BaseMS = 50 })
	conv := w.newConversation(t, ch)
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		if out.Activity.Text == "m000" && out.Attempt < 4 {
			return channel.Outcome{Kind: channel.Retry}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	ids := w.post(t, conv, texts(30)...)
	w.drainUntil(t, "the failing one sent", func() bool { return w.only(t, ids[0]).Status == StatusSent })
	got := w.adapter.texts(ch)
	if got[0] != "m000" || got[len(got)-1] != "m000" {
		t.Errorf("attempts %v: want the failing one first and last", got)
	}
	others := slices.DeleteFunc(got, func(s string) bool { return s == "m000" })
	if diff := cmp.Diff(texts(30)[1:], others); diff != "" {
		t.Errorf("the others (-want +got):\n%s", diff)
	}
	if n := count(t, w.pool, `SELECT count(*) FROM lanes`); n != 1 {
		t.Errorf("%d lanes for one conversation", n)
	}
}

func TestDeletedChannelFailsItsDeliveries(t *testing.T) {
	t.Parallel()
	for reason, change := range map[string]string{
		ReasonChannelDeleted: `UPDATE channels SET deleted_at = now(), status = 'inactive', hold_until = now() + interval '1 day' WHERE id = $1`,
		ReasonUnsupported:    `UPDATE channels SET mode = 'inbound' WHERE id = $1`,
	} {
		t.Run(reason, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{})
			ch := w.newChannel(t, w.tenant, nil)
			ids := w.post(t, w.newConversation(t, ch), texts(30)...)
			exec(t, w.pool, change, ch)
			w.drain(t)
			for _, id := range []uuid.UUID{ids[0], ids[29]} {
				if d := w.only(t, id); d.Status != StatusFailed || d.Reason != reason || d.Attempts != 0 {
					t.Errorf("delivery %+v", d)
				}
			}
			if n := count(t, w.pool, `SELECT count(*) FROM lanes WHERE next_at IS NOT NULL OR lease_token IS NOT NULL`); n != 0 {
				t.Errorf("%d lanes still have work or a lease", n)
			}
		})
	}
}

func TestHeldLanesCostNothingAndGoOn(t *testing.T) {
	t.Parallel()
	for name, sql := range map[string][2]string{
		"hold_until": {`UPDATE channels SET hold_until = now() + interval '1 hour' WHERE id = $1`, `UPDATE channels SET hold_until = now() WHERE id = $1`},
		"paused":     {`UPDATE channels SET circuit_state = 'paused' WHERE id = $1`, `UPDATE channels SET circuit_state = 'closed' WHERE id = $1`},
		"open":       {`UPDATE channels SET circuit_state = 'open', hold_until = now() + interval '1 hour' WHERE id = $1`, `UPDATE channels SET hold_until = now() WHERE id = $1`},
		"inactive":   {`UPDATE channels SET status = 'inactive' WHERE id = $1`, `UPDATE channels SET status = 'active' WHERE id = $1`},
		"suspended":  {`UPDATE tenants SET status = 'suspended' WHERE id = (SELECT tenant_id FROM channels WHERE id = $1)`, `UPDATE tenants SET status = 'active' WHERE id = (SELECT tenant_id FROM channels WHERE id = $1)`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{})
			ch := w.newChannel(t, w.tenant, nil)
			conv := w.newConversation(t, ch)
			before := w.post(t, conv, "before")[0] // handed over by the append, and held when its worker comes
			exec(t, w.pool, sql[0], ch)
			after := w.post(t, w.newConversation(t, ch), "after")[0] // not handed over
			if jobs := count(t, w.pool, `SELECT count(*) FROM test_jobs`); jobs != 1 {
				t.Errorf("%d lanes handed over, want that of before the hold", jobs)
			}
			w.drain(t)
			if n := len(w.adapter.sent()); n != 0 {
				t.Fatalf("%d attempts while held", n)
			}
			if n, err := w.Dispatch(t.Context()); n != 0 || err != nil {
				t.Errorf("handed over %d, %v while held", n, err)
			}
			exec(t, w.pool, sql[1], ch)
			w.drain(t)
			for _, id := range []uuid.UUID{before, after} {
				if d := w.only(t, id); d.Status != StatusSent || d.Attempts != 1 {
					t.Errorf("delivery %+v after the hold", d)
				}
			}
		})
	}
}

// TestStaleWorkerIsFenced: a worker that was stopped for longer than its lease comes back while another is making the same
// attempt. What it says is recorded and does not count.
func TestStaleWorkerIsFenced(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	started := make(chan chan channel.Outcome)
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		answer := make(chan channel.Outcome)
		started <- answer
		return <-answer
	}
	id := w.post(t, conv, "x")[0]
	var wg sync.WaitGroup
	work := func(job LaneJob) (answer chan channel.Outcome, done chan struct{}) {
		done = make(chan struct{})
		wg.Go(func() {
			defer close(done)
			if err := w.Work(t.Context(), job); err != nil {
				t.Errorf("Work: %v", err)
			}
		})
		return <-started, done
	}
	defer wg.Wait()
	stale := w.takeAll(t)[0]
	answer1, done1 := work(stale)
	exec(t, w.pool, `UPDATE lanes SET lease_until = now() - interval '1 second'`)
	if n, err := w.Dispatch(t.Context()); n != 1 || err != nil {
		t.Fatalf("taken over: %d, %v", n, err)
	}
	answer2, done2 := work(w.takeAll(t)[0])
	answer1 <- channel.Outcome{Kind: channel.Failed, Reason: "late"}
	<-done1
	if d := w.only(t, id); d.Status != StatusPending || d.Attempts != 0 {
		t.Errorf("the stale worker changed the delivery: %+v", d)
	}
	answer2 <- channel.Outcome{Kind: channel.Sent}
	<-done2
	d := w.only(t, id)
	if d.Status != StatusSent || d.Attempts != 1 {
		t.Errorf("delivery %+v", d)
	}
	attempts, err := w.Attempts(t.Context(), w.tenant, d.ID)
	if err != nil || len(attempts) != 2 {
		t.Errorf("%d attempts recorded, %v; want both", len(attempts), err)
	}
	// A job that is started again, or too late, does nothing.
	if err := w.Work(t.Context(), stale); err != nil || len(w.adapter.sent()) != 2 {
		t.Errorf("second start: %v, %d attempts", err, len(w.adapter.sent()))
	}
}

func TestStoppedWorkerGivesTheLaneBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	started := make(chan struct{}, 1)
	w.adapter.send = func(ctx context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		started <- struct{}{}
		<-ctx.Done()
		return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonInterrupted}
	}
	id := w.post(t, conv, "x")[0]
	job := w.takeAll(t)[0]
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = w.Work(ctx, job) })
	<-started
	cancel()
	wg.Wait()
	if d := w.only(t, id); d.Attempts != 0 || d.Status != StatusPending {
		t.Errorf("an attempt that was cut off counted: %+v", d)
	}
	w.adapter.send = nil
	w.drain(t) // at once: without waiting for the lease
	if d := w.only(t, id); d.Status != StatusSent {
		t.Errorf("delivery %+v", d)
	}
}

func TestTooLittleLeaseLeftIsGivenBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	id := w.post(t, conv, "x")[0]
	job := w.takeAll(t)[0]
	exec(t, w.pool, `UPDATE lanes SET lease_until = now() + interval '10 seconds'`) // an attempt may take 15
	if err := w.Work(t.Context(), job); err != nil {
		t.Fatal(err)
	}
	if n := len(w.adapter.sent()); n != 0 {
		t.Errorf("%d attempts on a lease that may end meanwhile", n)
	}
	w.drain(t)
	if d := w.only(t, id); d.Status != StatusSent {
		t.Errorf("delivery %+v", d)
	}
}

// TestNoWakeIsLost appends while lanes are being finished: a lost wake would leave its delivery behind for ever.
func TestNoWakeIsLost(t *testing.T) {
	t.Parallel()
	for name, ordered := range map[string]bool{"ordered": true, "unordered": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{Tick: 5 * time.Millisecond})
			ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.Ordered = ordered })
			w.workers(t, w.Service, 8)
			w.dispatcher(t, w.Service)
			const conversations, each = 4, 150
			var wg sync.WaitGroup
			for range conversations {
				conv := w.newConversation(t, ch)
				wg.Go(func() {
					for i := range each {
						if _, err := post(t.Context(), w.Service, conv, fmt.Sprint(i)); err != nil {
							t.Errorf("post: %v", err)
						}
					}
				})
			}
			wg.Wait()
			eventually(t, "everything sent", func() bool {
				return count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`) == conversations*each
			})
			eventually(t, "lanes at rest", func() bool {
				return count(t, w.pool, `SELECT count(*) FROM lanes WHERE next_at IS NOT NULL OR lease_token IS NOT NULL`) == 0
			})
			if n := len(w.adapter.sent()); n != conversations*each {
				t.Errorf("%d attempts for %d deliveries", n, conversations*each)
			}
		})
	}
}

// TestAppendInTheMakingHoldsNobodyUp: what workers record does not wait for a transaction that is waking their lane. The turn
// ends after it.
func TestAppendInTheMakingHoldsNobodyUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	w.post(t, w.newConversation(t, w.newChannel(t, w.tenant, nil)), "a")
	job := w.takeAll(t)[0]
	tx, err := w.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = tx.Rollback(context.Background()) }() // after the commit it does nothing
	if _, err := tx.Exec(t.Context(), `UPDATE lanes SET wakes = wakes + 1`); err != nil {
		t.Fatal(err)
	}
	worked := make(chan error, 1)
	go func() { worked <- w.Work(t.Context(), job) }()
	eventually(t, "recorded", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`) == 1
	})
	select {
	case err := <-worked:
		t.Errorf("the turn ended while its lane was being woken: %v", err)
	default:
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-worked; err != nil {
		t.Errorf("Work: %v", err)
	}
	if n := count(t, w.pool, `SELECT count(*) FROM lanes WHERE next_at IS NULL AND lease_token IS NULL`); n != 1 {
		t.Error("the lane is not at rest")
	}
}

func TestRepliesAreAppended(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err      error
		status   Status
		attempts int
	}{
		"stored":    {nil, StatusSent, 1},
		"closed":    {activity.ErrClosed, StatusSent, 1},
		"no answer": {errors.New("database gone"), StatusFailed, 2},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{})
			ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.MaxAttempts = 2 })
			conv := w.newConversation(t, ch)
			w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
				return channel.Outcome{Kind: channel.Sent, Replies: []channel.Message{{Type: "message", Sender: "bot", Text: "re: " + out.Activity.Text}}}
			}
			var got []activity.New
			w.SetAppender(func(_ context.Context, in []activity.New) []activity.Result {
				got = append(got, in...)
				return []activity.Result{{Err: test.err}}
			})
			id := w.post(t, conv, "x")[0]
			w.drainUntil(t, "ended", func() bool { return w.only(t, id).Status == test.status })
			if d := w.only(t, id); d.Attempts != test.attempts {
				t.Errorf("%d attempts, want %d", d.Attempts, test.attempts)
			}
			n := got[0]
			if len(got) != test.attempts || n.Caller != "webhook" || n.IdempotencyKey != "webhook:"+id.String() ||
				n.TenantID != w.tenant || n.ConversationID != conv || n.Sender != "bot" || *n.Text != "re: x" {
				t.Errorf("appended %d times: %+v", len(got), n)
			}
			if targets := w.Targets(ch, &n); len(targets) != 0 {
				t.Errorf("a channel's own reply goes back to it: %v", targets)
			}
		})
	}
}

// fakePacer lets a test decide when a channel is free.
type fakePacer func(maxWait time.Duration) (time.Duration, bool)

func (p fakePacer) Reserve(_ context.Context, _ *channel.Channel, maxWait time.Duration) (time.Duration, bool) {
	return p(maxWait)
}

func TestPaceUsesNoAttempt(t *testing.T) {
	t.Parallel()
	var mu sync.Mutex
	var asked []time.Duration
	answers := []struct {
		wait time.Duration
		ok   bool
	}{{0, true}, {5 * time.Millisecond, true}, {30 * time.Millisecond, false}, {0, true}}
	w := newWorld(t, Options{Pacer: fakePacer(func(maxWait time.Duration) (time.Duration, bool) {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, maxWait)
		a := answers[min(len(asked), len(answers))-1]
		return a.wait, a.ok
	})})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	ids := w.post(t, conv, "a", "b", "c")
	if err := w.Work(t.Context(), w.takeAll(t)[0]); err != nil {
		t.Fatal(err)
	}
	if got := w.adapter.sent(); len(got) != 2 || got[1].Now.Sub(got[0].Now) < 5*time.Millisecond {
		t.Fatalf("%d attempts before the budget was used up", len(got))
	}
	if n := count(t, w.pool, `SELECT count(*) FROM lanes WHERE lease_token IS NULL AND next_at > now() - interval '1 minute'`); n != 1 {
		t.Error("the lane does not wait for the budget")
	}
	w.drainUntil(t, "all sent", func() bool { return w.only(t, ids[2]).Status == StatusSent })
	if d := w.only(t, ids[2]); d.Attempts != 1 {
		t.Errorf("%d attempts: waiting for the budget counted", d.Attempts)
	}
	for _, m := range asked {
		if m <= 0 || m > 5*time.Second {
			t.Errorf("asked to wait up to %s: not within the turn", m)
		}
	}
}

// TestDatabaseLossIsSurvived cuts the connections while workers record.
func TestDatabaseLossIsSurvived(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{Tick: 5 * time.Millisecond, Lease: 2 * time.Second, LeaseMargin: 500 * time.Millisecond, MaxAttempt: time.Second, WorkFor: 200 * time.Millisecond})
	ch := w.newChannel(t, w.tenant, nil)
	node := w.node(t, pgtest.Open(t, w.url, postgres.Options{MaxConns: 8, AppName: "victim"}), w.o)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for ctx.Err() == nil {
				jobs, err := w.queue.take(ctx, 1)
				if err != nil || len(jobs) == 0 {
					_ = sleep(ctx, time.Millisecond)
					continue
				}
				_ = node.Work(ctx, jobs[0]) // errors are the point
			}
		})
	}
	defer wg.Wait()
	defer cancel()
	w.dispatcher(t, w.Service)
	const conversations, each = 20, 20
	for range conversations {
		w.post(t, w.newConversation(t, ch), texts(each)...)
	}
	admin := pgtest.Open(t, w.url, postgres.Options{MaxConns: 1})
	for i := range 10 { // each time after some more progress
		eventually(t, "some progress", func() bool { return len(w.adapter.sent()) >= 15*(i+1) })
		exec(t, admin, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = 'victim'`)
	}
	eventually(t, "everything sent in spite of it all", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`) == conversations*each
	})
	perLane := map[uuid.UUID][]string{}
	seen := map[uuid.UUID]bool{}
	for _, c := range w.adapter.sent() {
		if seen[c.DeliveryID] {
			continue // a repeat, under the same id
		}
		seen[c.DeliveryID] = true
		var body struct {
			ConversationID uuid.UUID `json:"conversation_id"`
		}
		if err := json.Unmarshal(c.Body, &body); err != nil {
			t.Fatal(err)
		}
		perLane[body.ConversationID] = append(perLane[body.ConversationID], c.Activity.Text)
	}
	for conv, got := range perLane {
		if diff := cmp.Diff(texts(each), got); diff != "" {
			t.Errorf("conversation %s (-want +got):\n%s", conv, diff)
		}
	}
}
