package jobs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/rivertype"
	"go.uber.org/goleak"

	"converger/internal/channel"
	"converger/internal/delivery"
)

// TestNothingIsLostWhenNodesDie posts while nodes are stopped in the middle of their work. Everything arrives, and first
// arrivals keep the order of their conversation.
func TestNothingIsLostWhenNodesDie(t *testing.T) {
	t.Parallel()
	const conversations, each = 20, 30
	w := newWorld(t, conversations)
	var mu sync.Mutex
	first := map[uuid.UUID]bool{}
	got := map[string][]string{}
	var attempts atomic.Int64
	receive := adapter(func(ctx context.Context, out channel.Outbound) channel.Outcome {
		n := attempts.Add(1)
		if n%17 == 0 {
			return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonServerError}
		}
		select { // a little time, so that stops meet attempts that are running
		case <-ctx.Done():
			return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonInterrupted}
		case <-time.After(2 * time.Millisecond):
		}
		var body struct {
			ConversationID string `json:"conversation_id"`
			Text           string `json:"text"`
		}
		if err := json.Unmarshal(out.Body, &body); err != nil {
			t.Errorf("body %s: %v", out.Body, err)
		}
		mu.Lock()
		defer mu.Unlock()
		if !first[out.DeliveryID] {
			first[out.DeliveryID] = true
			got[body.ConversationID] = append(got[body.ConversationID], body.Text)
		}
		return channel.Outcome{Kind: channel.Sent}
	})
	do := delivery.Options{Lease: 3 * time.Second, MaxAttempt: time.Second, WorkFor: 500 * time.Millisecond, LeaseMargin: 500 * time.Millisecond, Tick: 20 * time.Millisecond}
	o := Options{Workers: 50, SoftStop: time.Millisecond, HardStop: 20 * time.Second}
	node := w.newNode(t, receive, do, o)
	for i := range each {
		if err := w.post(t.Context(), node.service, fmt.Sprintf("%02d", i), w.conversations...); err != nil {
			t.Fatal(err)
		}
		if i%10 == 9 {
			node.kill()
			node = w.newNode(t, receive, do, o)
		}
	}
	eventually(t, "everything sent", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`) == conversations*each
	})
	mu.Lock()
	defer mu.Unlock()
	var want []string
	for i := range each {
		want = append(want, fmt.Sprintf("%02d", i))
	}
	for _, c := range w.conversations {
		if diff := cmp.Diff(want, got[c.String()]); diff != "" {
			t.Errorf("conversation %s (-want +got):\n%s", c, diff)
		}
	}
}

// TestIdlePostNeedsNoDispatcher: a post to an idle node is worked there, without dispatcher or job.
func TestIdlePostNeedsNoDispatcher(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	arrived := make(chan time.Time, 1)
	node := w.newNode(t, func(context.Context, channel.Outbound) channel.Outcome {
		arrived <- time.Now()
		return channel.Outcome{Kind: channel.Sent}
	}, delivery.Options{Tick: time.Hour}, Options{Workers: 10})
	eventually(t, "the node works", func() bool { return node.client.StartLanes(nil) })
	for i := range 30 {
		if err := w.post(t.Context(), node.service, fmt.Sprint(i), w.conversations[0]); err != nil {
			t.Fatal(err)
		}
		select {
		case <-arrived:
		case <-time.After(30 * time.Second):
			t.Fatal("a post to an idle node was not attempted: it waits for the dispatcher, whose tick is an hour here")
		}
		eventually(t, "recorded", func() bool {
			return count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`) == i+1
		})
	}
	if n := count(t, w.pool, `SELECT count(*) FROM river_job WHERE kind = 'lane'`); n != 0 {
		t.Errorf("%d jobs, want none", n)
	}
}

func TestInboundIsTriedAgain(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	var l logs
	c := newClient(t, w.pool, worker(nil), Options{Logger: l.logger()})
	var tries atomic.Int64
	done := make(chan uuid.UUID, 1)
	c.SetInbound(processor(func(_ context.Context, event uuid.UUID) error {
		switch tries.Add(1) {
		case 1:
			return errors.New("database gone")
		case 2:
			panic("boom")
		}
		done <- event
		return nil
	}))
	defer run(t, c.Run)()
	event := newID()
	insert := func() {
		t.Helper()
		if err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			return c.InsertInboundTx(t.Context(), tx, w.tenant, event)
		}); err != nil {
			t.Fatal(err)
		}
		c.PokeInbound()
	}
	insert()
	select {
	case got := <-done:
		if got != event {
			t.Errorf("event %s, want %s", got, event)
		}
	case <-time.After(60 * time.Second):
		t.Fatal("not tried again")
	}
	if n := tries.Load(); n != 3 {
		t.Errorf("%d tries", n)
	}
	if n := count(t, w.pool, `SELECT count(*) FROM river_job WHERE kind = 'inbound'`); n != 1 {
		t.Errorf("%d jobs for one event", n)
	}
	text := l.String()
	if strings.Count(text, "database gone") != 1 || strings.Count(text, "panic") != 2 || // "job panicked … panic=boom"
		!strings.Contains(text, "kind=inbound") {
		t.Errorf("log:\n%s", text)
	}
	if strings.Contains(text, "level=INFO") {
		t.Errorf("River's daily life is logged:\n%s", text)
	}
}

// An event that is run again by hand needs a job of its own even when the one before has not quite ended.
func TestInboundIsRunAgainWhileItsJobEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	c := newClient(t, w.pool, worker(nil), Options{InsertOnly: true})
	event := newID()
	for want := range 3 {
		if err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			return c.InsertInboundTx(t.Context(), tx, w.tenant, event)
		}); err != nil {
			t.Fatal(err)
		}
		if n := count(t, w.pool, `SELECT count(*) FROM river_job WHERE kind = 'inbound'`); n != want+1 {
			t.Errorf("%d jobs after %d inserts", n, want+1)
		}
	}
}

func TestRetriesOfInboundSpreadOut(t *testing.T) {
	t.Parallel()
	var w inboundWorker
	for attempt, want := range map[int]time.Duration{1: time.Second, 2: 2 * time.Second, 5: 16 * time.Second, 9: time.Minute, 1000: time.Minute} {
		job := riverJob(attempt)
		if got := time.Until(w.NextRetry(job)); got > want || got < want-time.Second {
			t.Errorf("after attempt %d: %s, want %s", attempt, got, want)
		}
	}
}

// worker is a [Deliverer] that only works.
type worker func(ctx context.Context, job delivery.LaneJob) error

func (w worker) Work(ctx context.Context, job delivery.LaneJob) error { return w(ctx, job) }

func (worker) GiveUpUncertainAllTenants(context.Context) (int, error) { return 0, nil }

func insertLane(t testing.TB, w *world, c *Client) delivery.LaneJob {
	t.Helper()
	job := delivery.LaneJob{LaneID: newID(), LeaseToken: newID()}
	if err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		return c.InsertLanesTx(t.Context(), tx, []delivery.LaneJob{job})
	}); err != nil {
		t.Fatal(err)
	}
	return job
}

// startLane starts a lane without a job, once c runs.
func startLane(t testing.TB, _ *world, c *Client) delivery.LaneJob {
	t.Helper()
	job := delivery.LaneJob{LaneID: newID(), LeaseToken: newID()}
	eventually(t, "started", func() bool { return c.StartLanes([]delivery.LaneJob{job}) })
	return job
}

// TestStopIsSoftThenHard: a lane may end by itself; then it is cancelled; one that does not care is reported.
func TestStopIsSoftThenHard(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		give    func(testing.TB, *world, *Client) delivery.LaneJob
		o       Options
		obeys   bool
		wantErr error
		hard    bool // was cancelled
	}{
		"soft":              {insertLane, Options{SoftStop: time.Minute}, true, nil, false},
		"soft, started":     {startLane, Options{SoftStop: time.Minute}, true, nil, false},
		"hard":              {insertLane, Options{SoftStop: time.Millisecond, HardStop: time.Minute}, true, nil, true},
		"hard, started":     {startLane, Options{SoftStop: time.Millisecond, HardStop: time.Minute}, true, nil, true},
		"too late":          {insertLane, Options{SoftStop: time.Millisecond, HardStop: time.Millisecond}, false, ErrNotStopped, true},
		"too late, started": {startLane, Options{SoftStop: time.Millisecond, HardStop: time.Millisecond}, false, ErrNotStopped, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 0)
			started, stopping, release := make(chan struct{}), make(chan struct{}), make(chan struct{})
			var cancelled atomic.Bool
			returned := make(chan struct{})
			c := newClient(t, w.pool, worker(func(ctx context.Context, _ delivery.LaneJob) error {
				defer close(returned)
				close(started)
				<-stopping
				if test.o.SoftStop < time.Second {
					<-ctx.Done()
				}
				cancelled.Store(ctx.Err() != nil)
				if !test.obeys {
					<-release
				}
				return nil
			}), test.o)
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error, 1)
			go func() { done <- c.Run(ctx) }()
			test.give(t, w, c)
			<-started
			cancel()
			close(stopping)
			if err := <-done; !errors.Is(err, test.wantErr) {
				t.Errorf("Run: %v, want %v", err, test.wantErr)
			}
			close(release)
			<-returned
			if cancelled.Load() != test.hard {
				t.Errorf("cancelled: %t", cancelled.Load())
			}
			if c.StartLanes([]delivery.LaneJob{{}}) {
				t.Error("a lane was started after the end")
			}
			<-c.river.Stopped()
		})
	}
}

// TestLaneJobHasOneTry: the lane is the retry.
func TestLaneJobHasOneTry(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	got := make(chan delivery.LaneJob, 10)
	c := newClient(t, w.pool, worker(func(_ context.Context, job delivery.LaneJob) error {
		got <- job
		return errors.New("no")
	}), Options{})
	defer run(t, c.Run)()
	want := insertLane(t, w, c)
	if job := <-got; job != want {
		t.Errorf("job %v, want %v", job, want)
	}
	eventually(t, "discarded", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM river_job WHERE kind = 'lane' AND state = 'discarded'`) == 1
	})
}

// TestLanesOfAJobAreWorkedAtOnce: none waits for another, and the one that crashes takes no other with it.
func TestLanesOfAJobAreWorkedAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	lanes := make([]delivery.LaneJob, lanesPerJob+1)
	for i := range lanes {
		lanes[i] = delivery.LaneJob{LaneID: newID(), LeaseToken: newID()}
	}
	var together sync.WaitGroup
	together.Add(len(lanes))
	var ended atomic.Int64
	var log logs
	c := newClient(t, w.pool, worker(func(_ context.Context, job delivery.LaneJob) error {
		together.Done()
		together.Wait()
		if job == lanes[0] {
			panic("boom")
		}
		ended.Add(1)
		return nil
	}), Options{Logger: log.logger()})
	defer run(t, c.Run)()
	err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error { return c.InsertLanesTx(t.Context(), tx, lanes) })
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "one job discarded, one completed", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM river_job WHERE kind = 'lane' AND state = 'discarded'`) == 1 &&
			count(t, w.pool, `SELECT count(*) FROM river_job WHERE kind = 'lane' AND state = 'completed'`) == 1
	})
	if n := ended.Load(); n != lanesPerJob {
		t.Errorf("%d lanes were worked to their end, want %d", n, lanesPerJob)
	}
	if !strings.Contains(log.String(), "boom") {
		t.Errorf("the log does not name the panic:\n%s", log.String())
	}
}

// TestStoredForms: jobs outlive deployments.
func TestStoredForms(t *testing.T) {
	t.Parallel()
	id := uuid.UUID{15: 1}
	for _, test := range []struct {
		args interface{ Kind() string }
		kind string
		json string
	}{
		{laneArgs{[]delivery.LaneJob{{LaneID: id, LeaseToken: id}}}, "lane", `{"lanes":[{"lane_id":"00000000-0000-0000-0000-000000000001","lease_token":"00000000-0000-0000-0000-000000000001"}]}`},
		{inboundArgs{TenantID: id, EventID: id}, "inbound", `{"tenant_id":"00000000-0000-0000-0000-000000000001","event_id":"00000000-0000-0000-0000-000000000001"}`},
		{ensurePartitions{}, "ensure_partitions", `{}`},
		{prune{}, "prune", `{}`},
		{giveUpUncertain{}, "give_up_uncertain", `{}`},
		{requeueInbound{}, "requeue_inbound", `{}`},
		{removeSessions{}, "remove_sessions", `{}`},
	} {
		got, err := json.Marshal(test.args)
		if err != nil || string(got) != test.json || test.args.Kind() != test.kind {
			t.Errorf("%s: %s, %v; want %s %s", test.args.Kind(), got, err, test.kind, test.json)
		}
	}
}

func TestInsertOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 0)
	c := newClient(t, w.pool, nil, Options{InsertOnly: true})
	stop := run(t, c.Run)
	insertLane(t, w, c)
	c.Poke()
	stop()
	if n := count(t, w.pool, `SELECT count(*) FROM river_job WHERE state = 'available' AND attempt = 0`); n != 1 {
		t.Errorf("%d jobs waiting for others", n)
	}
}

func TestMaintenance(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	exec(t, w.pool, `
INSERT INTO idempotency_keys (tenant_id, conversation_id, caller, key, body_hash, activity_id, inserted_at)
SELECT $1, $2, 'c', n::text, '', $2, now() - n * interval '1 day' FROM generate_series(1, 60) n`, w.tenant, w.conversations[0])
	exec(t, w.pool, `
INSERT INTO provider_messages (tenant_id, channel_id, direction, provider_id, activity_id, inserted_at)
SELECT $1, $2, 'in', n::text, $3, now() - n * interval '1 day' FROM generate_series(1, 60) n`, w.tenant, w.channel.ID, w.conversations[0])
	exec(t, w.pool, `
INSERT INTO idempotency_keys (tenant_id, conversation_id, caller, key, body_hash, activity_id, inserted_at)
SELECT $1, $2, 'old', n::text, '', $2, now() - interval '90 days' FROM generate_series(1, 12000) n`, w.tenant, w.conversations[0])
	var table string
	if err := w.pool.QueryRow(t.Context(), `SELECT 'attempts_p' || to_char(now() AT TIME ZONE 'UTC' + interval '2 months', 'YYYY_MM')`).Scan(&table); err != nil {
		t.Fatal(err)
	}
	exec(t, w.pool, "DROP TABLE "+table)
	stuck, fresh, failed := uuid.UUID{}, newID(), uuid.UUID{}
	for _, e := range []struct {
		id    *uuid.UUID
		age   string
		state string
	}{{&stuck, "2 minutes", "received"}, {&failed, "2 minutes", "failed"}, {nil, "", "received"}} {
		if e.id == nil {
			exec(t, w.pool, `INSERT INTO inbound_events (tenant_id, id, channel_id, endpoint, body) VALUES ($1, $2, $3, 'inbound', '')`, w.tenant, fresh, w.channel.ID)
			continue
		}
		if err := w.pool.QueryRow(t.Context(), `INSERT INTO inbound_events (tenant_id, id, channel_id, endpoint, body, state) VALUES ($1, uuid_v7_floor(now() - $2::interval), $3, 'inbound', '', $4) RETURNING id`,
			w.tenant, e.age+" "+map[string]string{"received": "1 second", "failed": "2 seconds"}[e.state], w.channel.ID, e.state).Scan(e.id); err != nil {
			t.Fatal(err)
		}
	}
	var l logs
	gaveUp := make(chan struct{})
	removed := make(chan struct{})
	c := newClient(t, w.pool, &givesUp{left: 2, done: gaveUp}, Options{Logger: l.logger(), Sessions: &removes{left: 2, done: removed}})
	processed := make(chan uuid.UUID, 10)
	c.SetInbound(processor(func(_ context.Context, event uuid.UUID) error { processed <- event; return nil }))
	defer run(t, c.Run)()

	eventually(t, "keys pruned", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM idempotency_keys`) == 29 && count(t, w.pool, `SELECT count(*) FROM provider_messages`) == 29
	})
	eventually(t, "partition made", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM pg_inherits WHERE inhrelid = to_regclass($1)`, table) == 1
	})
	if got := <-processed; got != stuck {
		t.Errorf("requeued %s, want the stuck event %s (fresh %s, failed %s)", got, stuck, fresh, failed)
	}
	for what, done := range map[string]chan struct{}{"uncertain deliveries were not given up": gaveUp, "ended sessions were not removed": removed} {
		select {
		case <-done:
		case <-time.After(60 * time.Second):
			t.Fatal(what)
		}
	}
	eventually(t, "all tasks completed", func() bool {
		return count(t, w.pool, `SELECT count(DISTINCT kind) FROM river_job WHERE queue = 'maintenance' AND state = 'completed'`) == 5
	})
	if text := l.String(); strings.Contains(text, "ERROR") {
		t.Errorf("log:\n%s", text)
	}
}

// removes has batches of ended sessions left.
type removes struct {
	left int
	done chan struct{}
}

func (r *removes) RemoveEndedAllTenants(context.Context) (int, error) {
	if r.left == 0 {
		close(r.done)
		return 0, nil
	}
	r.left--
	return 1000, nil
}

// givesUp has batches of uncertain deliveries left.
type givesUp struct {
	worker
	left int
	done chan struct{}
}

func (g *givesUp) GiveUpUncertainAllTenants(context.Context) (int, error) {
	if g.left == 0 {
		close(g.done)
		return 0, nil
	}
	g.left--
	return 1000, nil
}

// TestNoGoroutineIsLeft is not parallel: it looks at all goroutines.
func TestNoGoroutineIsLeft(t *testing.T) { //nolint:paralleltest // see above
	w := newWorld(t, 3)
	exec(t, w.pool, `SELECT 1`)
	before := goleak.IgnoreCurrent()
	sent := make(chan struct{}, 10)
	node := w.newNode(t, func(context.Context, channel.Outbound) channel.Outcome {
		sent <- struct{}{}
		return channel.Outcome{Kind: channel.Sent}
	}, delivery.Options{}, Options{Workers: 5})
	if err := w.post(t.Context(), node.service, "x", w.conversations...); err != nil {
		t.Fatal(err)
	}
	for range w.conversations {
		<-sent
	}
	node.kill()
	// The node's pool is closed when the test ends.
	goleak.VerifyNone(t, before, goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgxpool.(*Pool).backgroundHealthCheck"),
		goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgxpool.(*Pool).triggerHealthCheck.func1"),
		goleak.IgnoreAnyFunction("github.com/jackc/pgx/v5/pgconn/internal/ctxwatch.(*ContextWatcher).Watch.func1"))
}

var _ InboundProcessor = processor(nil)

func riverJob(attempt int) *river.Job[inboundArgs] {
	return &river.Job[inboundArgs]{JobRow: &rivertype.JobRow{Attempt: attempt}}
}
