package delivery

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	"pgregory.net/rapid"

	"converger/internal/activity"
	"converger/internal/channel"
	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

func id(n byte) uuid.UUID { return uuid.UUID{15: n} }

func TestPlan(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		candidates []candidate
		working    []busy
		workers    int
		want       []int // lanes per candidate
		more       bool
	}{
		"nothing":                         {nil, nil, 10, nil, false},
		"one tenant leaves a fifth free":  {[]candidate{{id(1), id(11), 1000, 1000, 500}}, nil, 100, []int{80}, true},
		"all of it fits":                  {[]candidate{{id(1), id(11), 1000, 1000, 5}}, nil, 100, []int{5}, false},
		"a channel's cap":                 {[]candidate{{id(1), id(11), 7, 1000, 7}}, []busy{{id(1), id(11), 3}}, 100, []int{4}, true},
		"a tenant's cap over channels":    {[]candidate{{id(1), id(11), 50, 10, 50}, {id(1), id(12), 50, 10, 50}}, nil, 100, []int{5, 5}, true},
		"two tenants share":               {[]candidate{{id(1), id(11), 1000, 1000, 500}, {id(2), id(21), 1000, 1000, 500}}, nil, 100, []int{40, 40}, true},
		"a late one gets the free fifth":  {[]candidate{{id(1), id(11), 1000, 1000, 500}, {id(2), id(21), 1000, 1000, 500}}, []busy{{id(1), id(11), 80}}, 100, []int{0, 20}, true},
		"a busy tenant counts as active":  {[]candidate{{id(2), id(21), 1000, 1000, 500}}, []busy{{id(1), id(11), 10}}, 100, []int{40}, true},
		"a small need is met beside more": {[]candidate{{id(1), id(11), 1000, 1000, 500}, {id(2), id(21), 1000, 1000, 1}}, nil, 100, []int{40, 1}, true},
		"no worker is free":               {[]candidate{{id(2), id(21), 1000, 1000, 5}}, []busy{{id(1), id(11), 100}}, 100, []int{0}, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var turns turns
			grants, behind := turns.plan(test.candidates, test.working, test.workers)
			more := behind != nil
			got := make([]int, len(test.candidates))
			for i, c := range test.candidates {
				for _, g := range grants {
					if g.Channel == c.Channel {
						got[i] += g.lanes
					}
				}
			}
			if !slices.Equal(got, test.want) || more != test.more {
				t.Errorf("got %v, more %t; want %v, %t", got, more, test.want, test.more)
			}
		})
	}
}

// TestPlanIsFair checks against random situations: no cap is passed, nothing is granted that is not due, nobody is left out
// for more than one round of all, and no lane stays behind while there is room for it.
func TestPlanIsFair(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var state turns
		workers := rapid.IntRange(1, 60).Draw(t, "workers")
		tenants := rapid.IntRange(1, 12).Draw(t, "tenants")
		var candidates []candidate
		for i := range tenants {
			tenantMax := rapid.IntRange(1, 40).Draw(t, "tenant max")
			for j := range rapid.IntRange(1, 3).Draw(t, "channels") {
				candidates = append(candidates, candidate{id(byte(i + 1)), id(byte(100 + 4*i + j)), rapid.IntRange(1, 30).Draw(t, "channel max"), tenantMax, rapid.IntRange(1, 30).Draw(t, "due")})
			}
		}
		share := max(1, workers*8/10/tenants)
		served := map[uuid.UUID]int{}
		rounds := (tenants+workers-1)/workers + 1
		for range rounds {
			grants, left := state.plan(candidates, nil, workers)
			total, byTenant := 0, map[uuid.UUID]int{}
			due := map[uuid.UUID]int{}
			for _, c := range candidates {
				due[c.Tenant] += c.Due
				for _, g := range grants {
					if g.Channel == c.Channel {
						if g.lanes > c.Due || g.lanes > c.ChannelMax {
							t.Fatalf("%d lanes of %+v", g.lanes, c)
						}
						total += g.lanes
						byTenant[c.Tenant] += g.lanes
						served[c.Tenant] += g.lanes
					}
				}
			}
			for _, c := range candidates {
				if n := byTenant[c.Tenant]; n > min(share, c.TenantMax) {
					t.Fatalf("tenant got %d of share %d, cap %d", n, share, c.TenantMax)
				}
			}
			if total > workers {
				t.Fatalf("%d lanes for %d workers", total, workers)
			}
			behind := tenantSet{}
			if left != nil {
				behind = *left
			}
			for tenant, n := range due {
				if _, ok := behind[tenant]; ok != (byTenant[tenant] < n) {
					t.Fatalf("behind %t with %d of %d handed over", ok, byTenant[tenant], n)
				}
			}
			if total < workers {
				for _, c := range candidates {
					given := 0
					for _, g := range grants {
						if g.Channel == c.Channel {
							given = g.lanes
						}
					}
					if given < min(c.Due, c.ChannelMax) && byTenant[c.Tenant] < min(share, c.TenantMax) {
						t.Fatalf("%+v got %d with room for more", c, given)
					}
				}
			}
		}
		for i := range tenants {
			if served[id(byte(i+1))] == 0 {
				t.Fatalf("tenant %d of %d got nothing in %d rounds with %d workers", i+1, tenants, rounds, workers)
			}
		}
	})
}

// TestParkedTenantDelaysNobody: one tenant has thousands of lanes waiting for an endpoint that hangs. What another tenant
// posts then is attempted before anything else of the first: compared by order, since times depend on the machine.
func TestParkedTenantDelaysNobody(t *testing.T) {
	t.Parallel()
	const parked, workers = 5000, 20
	w := newWorld(t, Options{Workers: workers, Tick: 10 * time.Millisecond})
	slow := w.newChannel(t, w.tenant, nil)
	other := w.newTenant(t)
	fast := w.newChannel(t, other, nil)
	release := make(chan struct{})
	defer sync.OnceFunc(func() { close(release) })()
	var mu sync.Mutex
	hanging := 0
	w.adapter.send = func(ctx context.Context, ch *channel.Channel, _ channel.Outbound) channel.Outcome {
		if ch.ID == slow {
			mu.Lock()
			hanging++
			mu.Unlock()
			select {
			case <-release:
			case <-ctx.Done():
				return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonInterrupted}
			}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	seedParked(t, w, slow, parked)
	w.workers(t, w.Service, workers)
	w.dispatcher(t, w.Service)
	w.pokeDispatcher()
	eventually(t, "the slow endpoint has all it may have", func() bool { mu.Lock(); defer mu.Unlock(); return hanging == workers*8/10 })
	conv := w.newConversation(t, fast)
	for i := range 20 {
		before := len(w.adapter.texts(slow))
		posted := w.post(t, conv, fmt.Sprint(i))[0]
		eventually(t, "the other tenant's message", func() bool { return w.only(t, posted).Status == StatusSent })
		if after := len(w.adapter.texts(slow)); after != before {
			t.Errorf("%d attempts of the slow tenant went before", after-before)
		}
	}
	if n := count(t, w.pool, `SELECT count(*) FROM test_jobs`); n != 0 {
		t.Errorf("%d jobs of the backlog stand in the queue", n)
	}
}

// seedParked stores one due delivery in each of n lanes of a channel.
func seedParked(t testing.TB, w *world, ch uuid.UUID, n int) {
	t.Helper()
	ids := func() []uuid.UUID {
		out := make([]uuid.UUID, n)
		for i := range out {
			out[i] = newID()
		}
		return out
	}
	convs, acts, lanes, dels := ids(), ids(), ids(), ids()
	exec(t, w.pool, `INSERT INTO conversations (tenant_id, id, channel_id, last_seq) SELECT $1, c, $2, 1 FROM unnest($3::uuid[]) c`, w.tenant, ch, convs)
	exec(t, w.pool, `INSERT INTO activities (tenant_id, id, conversation_id, seq, type, sender, text) SELECT $1, a, c, 1, 'message', 'user', 'parked' FROM unnest($2::uuid[], $3::uuid[]) u (a, c)`, w.tenant, acts, convs)
	exec(t, w.pool, `INSERT INTO lanes (tenant_id, id, channel_id, conversation_id, next_at, wakes) SELECT $1, l, $2, c, now(), 1 FROM unnest($3::uuid[], $4::uuid[]) u (l, c)`, w.tenant, ch, lanes, convs)
	exec(t, w.pool, `INSERT INTO deliveries (tenant_id, id, activity_id, channel_id, lane_id, seq) SELECT $1, d, a, $2, l, 1 FROM unnest($3::uuid[], $4::uuid[], $5::uuid[]) u (d, a, l)`, w.tenant, ch, dels, acts, lanes)
}

// TestTwoDispatchers hands over from two nodes at once; each lane is worked once.
func TestTwoDispatchers(t *testing.T) {
	t.Parallel()
	o := Options{Workers: 40, Tick: 5 * time.Millisecond}
	w := newWorld(t, o)
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.MaxInFlight = 25 })
	var mu sync.Mutex
	inFlight, most := 0, 0
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		mu.Lock()
		inFlight++
		most = max(most, inFlight)
		mu.Unlock()
		time.Sleep(time.Millisecond) // work, not synchronisation
		mu.Lock()
		inFlight--
		mu.Unlock()
		return channel.Outcome{Kind: channel.Sent}
	}
	const n = 1000
	seedParked(t, w, ch, n)
	node := w.node(t, pgtest.Open(t, w.url, postgres.Options{MaxConns: 16}), o)
	w.workers(t, w.Service, 20)
	w.workers(t, node, 20)
	w.dispatcher(t, w.Service)
	w.dispatcher(t, node)
	eventually(t, "all sent", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`) == n
	})
	seen := map[uuid.UUID]int{}
	for _, c := range w.adapter.sent() {
		seen[c.DeliveryID]++
	}
	if len(seen) != n || len(w.adapter.sent()) != n {
		t.Errorf("%d deliveries in %d attempts, want %d each", len(seen), len(w.adapter.sent()), n)
	}
	if most > 25 {
		t.Errorf("%d attempts at once on a channel that bears 25", most)
	}
}

func TestExpiredLeaseIsTakenOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{Lease: time.Second, LeaseMargin: 500 * time.Millisecond, MaxAttempt: 100 * time.Millisecond, WorkFor: 100 * time.Millisecond, Tick: 20 * time.Millisecond})
	conv := w.newConversation(t, w.newChannel(t, w.tenant, nil))
	posted := w.post(t, conv, "x")[0]
	if jobs := w.takeAll(t); len(jobs) != 1 {
		t.Fatalf("%d jobs", len(jobs)) // taken by a worker that was killed
	}
	w.workers(t, w.Service, 1)
	w.dispatcher(t, w.Service)
	eventually(t, "sent by another worker", func() bool { return w.only(t, posted).Status == StatusSent })
}

// What waits too long shows, from whichever node one looks, and no longer once it is handed over. Paused channels and those
// whose moment is to come are not late.
func TestOverdueIsMeasured(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	w := newWorld(t, Options{Registerer: reg})
	overdue := func() float64 {
		t.Helper()
		if _, err := w.look(t.Context()); err != nil {
			t.Fatal(err)
		}
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if f.GetName() == "converger_delivery_overdue_seconds" {
				return f.Metric[0].GetGauge().GetValue()
			}
		}
		t.Fatal("there is no such series")
		return 0
	}
	if v := overdue(); v != 0 {
		t.Errorf("%v s with nothing to do", v)
	}
	ch := w.newChannel(t, w.tenant, nil)
	seedParked(t, w, ch, 2)
	exec(t, w.pool, `UPDATE lanes SET next_at = now() + interval '1 hour'`)
	if v := overdue(); v != 0 {
		t.Errorf("%v s before its time", v)
	}
	exec(t, w.pool, `UPDATE lanes SET next_at = now() - interval '1 minute'`)
	exec(t, w.pool, `UPDATE channels SET circuit_state = 'paused'`)
	if v := overdue(); v != 0 {
		t.Errorf("%v s while its channel is paused", v)
	}
	exec(t, w.pool, `UPDATE channels SET circuit_state = 'closed'`)
	if v := overdue(); v < 60 || v > 600 {
		t.Errorf("%v s after a minute", v) // and now they are handed over
	}
	if v := overdue(); v != 0 {
		t.Errorf("%v s after the hand-over", v)
	}
}

// TestOneDispatcherAtATime: the caps are counted and used up under one lock.
func TestOneDispatcherAtATime(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	seedParked(t, w, w.newChannel(t, w.tenant, nil), 3)
	tx, err := pgtest.Open(t, w.url, postgres.Options{MaxConns: 1}).Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), queryDispatchLock, dispatchLock); err != nil {
		t.Fatal(err)
	}
	if n, err := w.Dispatch(t.Context()); n != 0 || err != nil {
		t.Errorf("handed over %d, %v while another node does", n, err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n, err := w.Dispatch(t.Context()); n != 3 || err != nil {
		t.Errorf("handed over %d, %v", n, err)
	}
}

func TestDispatchCapsCountOtherNodes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.MaxInFlight = 3 })
	seedParked(t, w, ch, 10)
	for _, want := range []int{3, 0} {
		if n, err := w.Dispatch(t.Context()); n != want || err != nil {
			t.Fatalf("handed over %d, %v; want %d", n, err, want)
		}
	}
	// The append keeps to the caps too, also where no dispatcher has seen that others wait.
	w.behind.Store(nil)
	w.post(t, w.newConversation(t, ch), "x")
	if n := len(w.takeAll(t)); n != 3 {
		t.Errorf("%d lanes handed over, want 3", n)
	}
}

func TestEnqueue(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	conv := w.newConversation(t, ch)
	state := func() (wakes int, next, leased bool) {
		t.Helper()
		if err := w.pool.QueryRow(t.Context(), `SELECT wakes, next_at > now() + interval '30 minutes', lease_token IS NOT NULL FROM lanes`).Scan(&wakes, &next, &leased); err != nil {
			t.Fatal(err)
		}
		return wakes, next, leased
	}
	w.post(t, conv, "a", "b")
	if wakes, _, leased := state(); wakes != 1 || !leased {
		t.Errorf("idle lane: wakes %d, leased %t; want 1 and handed over", wakes, leased)
	}
	// A lane that backs off is woken without cutting the wait short.
	exec(t, w.pool, `UPDATE lanes SET lease_token = NULL, lease_until = NULL, next_at = now() + interval '1 hour'`)
	w.post(t, conv, "c")
	if wakes, later, leased := state(); wakes != 2 || !later || leased {
		t.Errorf("waiting lane: wakes %d, still waiting %t, leased %t", wakes, later, leased)
	}
	if jobs := w.takeAll(t); len(jobs) != 1 {
		t.Errorf("%d jobs, want the first one", len(jobs))
	}
	if n := count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'pending'`); n != 3 {
		t.Errorf("%d deliveries, want 3", n)
	}
}

// TestLanesThatCannotStartGoBack: a node that stops gives the lanes of its last appends to others at once.
func TestLanesThatCannotStartGoBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	w.queue.stopping.Store(true)
	id := w.post(t, w.newConversation(t, w.newChannel(t, w.tenant, nil)), "a")[0]
	eventually(t, "the lane is free and due", func() bool {
		return count(t, w.pool, `SELECT count(*) FROM lanes WHERE lease_token IS NULL AND next_at <= now()`) == 1
	})
	w.drain(t)
	if d := w.only(t, id); d.Status != StatusSent || d.Attempts != 1 {
		t.Errorf("%s after %d attempts, want sent after one", d.Status, d.Attempts)
	}
}

// TestEnqueueLeavesManyToTheDispatcher: only a small batch is handed over by the append, only while workers are free, and not
// ahead of others of the same tenant; what is not is there for the dispatcher.
func TestEnqueueLeavesManyToTheDispatcher(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		lanes   int
		running int64
		behind  string // who waits
		handed  int
	}{
		"few":                         {handoverLanes, 0, "", handoverLanes},
		"many":                        {handoverLanes + 1, 0, "", 0},
		"a busy node":                 {1, 80, "", 0}, // of 100 workers a fifth stays free
		"others of the tenant wait":   {1, 0, "itself", 0},
		"another tenant waits":        {1, 39, "another", 1},
		"another waits, none is free": {1, 40, "another", 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{Workers: 100})
			ch := w.newChannel(t, w.tenant, nil)
			w.running.Store(test.running)
			switch test.behind {
			case "itself":
				w.behind.Store(&tenantSet{w.tenant: {}})
			case "another":
				w.behind.Store(&tenantSet{newID(): {}})
			}
			work := make([]activity.Work, test.lanes)
			for i := range work {
				work[i] = activity.Work{TenantID: w.tenant, ChannelID: ch, Ordered: true, ConversationID: w.newConversation(t, ch), ActivityID: newID(), Seq: 1}
				exec(t, w.pool, `INSERT INTO activities (tenant_id, id, conversation_id, seq, type, sender) VALUES ($1, $2, $3, 1, 'message', 'user')`,
					w.tenant, work[i].ActivityID, work[i].ConversationID)
			}
			var wake func()
			if err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) (err error) {
				wake, err = w.EnqueueTx(t.Context(), tx, work)
				return err
			}); err != nil {
				t.Fatal(err)
			}
			wake()
			if n := count(t, w.pool, `SELECT count(*) FROM test_jobs`); n != test.handed {
				t.Errorf("%d lanes handed over, want %d", n, test.handed)
			}
			if poked := len(w.poke) == 1; poked != (test.handed < test.lanes) {
				t.Errorf("dispatcher poked: %t", poked)
			}
			w.drain(t)
			if n := count(t, w.pool, `SELECT count(*) FROM deliveries WHERE status = 'sent'`); n != test.lanes {
				t.Errorf("%d sent, want %d", n, test.lanes)
			}
		})
	}
}
