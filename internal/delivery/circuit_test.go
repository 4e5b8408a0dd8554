package delivery

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/tenants"
)

var byKey = tenants.Actor{Type: tenants.ActorTenantAPI, ID: "key", RequestID: "req"}

func (w *world) state(t testing.TB, ch uuid.UUID) ChannelState {
	t.Helper()
	st, err := w.State(t.Context(), w.tenant, ch)
	if err != nil {
		t.Fatalf("State: %v", err)
	}
	return st
}

// cooledDown ends the cooldown of an open circuit.
func (w *world) cooledDown(t testing.TB, ch uuid.UUID) {
	t.Helper()
	exec(t, w.pool, `UPDATE channels SET hold_until = now() WHERE id = $1 AND circuit_state = 'open'`, ch)
}

// listed counts the tenant's deliveries by the status that the list shows, and holds that against the list's own filter.
func (w *world) listed(t testing.TB, tenant tenants.ID) map[Status]int {
	t.Helper()
	list := func(f Filter) []Delivery {
		page, _, err := w.List(t.Context(), tenant, f, uuid.Nil, 1000)
		if err != nil {
			t.Fatal(err)
		}
		return page
	}
	counts := map[Status]int{}
	for _, d := range list(Filter{}) {
		counts[d.Status]++
	}
	for _, status := range []Status{StatusPending, StatusPaused, StatusSent, StatusFailed} {
		if n := len(list(Filter{Status: status})); n != counts[status] {
			t.Errorf("the filter %s finds %d deliveries, the list shows %d", status, n, counts[status])
		}
	}
	return counts
}

func failing503(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
	return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonServerError, StatusCode: 503}
}

// The whole life of a circuit: it opens after five failures in a row, costs nothing while it is open, tries with one lane,
// opens again, tries again, closes, and everything goes out.
func TestCircuitOpensProbesAndCloses(t *testing.T) {
	t.Parallel()
	for name, ordered := range map[string]bool{"ordered": true, "unordered": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{Cooldown: time.Hour})
			ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.Ordered = ordered; c.RetryPolicy.MaxAttempts = 100 })
			other := w.newChannel(t, w.tenant, nil)
			var up atomic.Bool
			w.adapter.send = func(ctx context.Context, of *channel.Channel, out channel.Outbound) channel.Outcome {
				if of.ID == other || up.Load() {
					return channel.Outcome{Kind: channel.Sent}
				}
				return failing503(ctx, of, out)
			}
			if st := w.state(t, ch); st.Circuit != CircuitClosed || st.ChangedAt != nil || st.Failures != 0 || st.Parked != 0 {
				t.Errorf("state of a new channel: %+v", st)
			}
			for range 4 {
				w.post(t, w.newConversation(t, ch), "x", "y")
			}
			w.drainUntil(t, "open", func() bool { return w.state(t, ch).Circuit == CircuitOpen })
			w.post(t, w.newConversation(t, ch), "posted while it is open", "and one behind")
			w.post(t, w.newConversation(t, other), "to another channel")
			w.drain(t)
			if n := len(w.adapter.texts(ch)); n != 5 {
				t.Fatalf("%d attempts, want 5 and none while the circuit is open", n)
			}
			st := w.state(t, ch)
			if st.Failures != 5 || st.Parked != 10 || st.ChangedAt == nil {
				t.Errorf("state of an open circuit: %+v", st)
			}
			if diff := cmp.Diff(map[Status]int{StatusPaused: 10, StatusSent: 1}, w.listed(t, w.tenant)); diff != "" {
				t.Errorf("deliveries (-want +got):\n%s", diff)
			}

			w.cooledDown(t, ch)
			if st := w.state(t, ch); st.Circuit != CircuitHalfOpen || st.Parked != 10 {
				t.Errorf("state after the cooldown: %+v", st)
			}
			exec(t, w.pool, `DELETE FROM test_jobs`)
			w.post(t, w.newConversation(t, ch), "posted while it is half open")
			if jobs := count(t, w.pool, `SELECT count(*) FROM test_jobs`); jobs != 0 {
				t.Errorf("the append handed %d lanes over: they are not a probe", jobs)
			}
			eventually(t, "a probe handed over", func() bool { n, err := w.Dispatch(t.Context()); return n == 1 && err == nil })
			if n, err := w.Dispatch(t.Context()); n != 0 || err != nil {
				t.Errorf("%d, %v handed over beside the probe", n, err)
			}
			w.drain(t) // works the probe, and would hand over more
			if n, st := len(w.adapter.texts(ch)), w.state(t, ch); n != 6 || st.Circuit != CircuitOpen || st.Failures != 6 {
				t.Fatalf("%d attempts and %+v after a probe that failed", n, st)
			}

			up.Store(true)
			w.cooledDown(t, ch)
			w.drainUntil(t, "everything sent", func() bool { return w.listed(t, w.tenant)[StatusSent] == 12 })
			if st := w.state(t, ch); st.Circuit != CircuitClosed || st.Failures != 0 || st.Parked != 0 {
				t.Errorf("state in the end: %+v", st)
			}
		})
	}
}

func TestCircuitCountsOnlyFailuresInARow(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{BreakAfter: 3})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.MaxAttempts = 1 })
	var outcomes []channel.Outcome
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		next := outcomes[0]
		outcomes = outcomes[1:]
		return next
	}
	run := func(kinds ...channel.Outcome) Circuit {
		outcomes = kinds
		w.post(t, w.newConversation(t, ch), texts(len(kinds))...)
		w.drain(t)
		if len(outcomes) != 0 && w.state(t, ch).Circuit == CircuitClosed {
			t.Fatalf("%d attempts were not made", len(outcomes))
		}
		return w.state(t, ch).Circuit
	}
	sent, failed := channel.Outcome{Kind: channel.Sent}, channel.Outcome{Kind: channel.Retry, Reason: "timeout"}
	refused := channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonRejected}
	uncertain := channel.Outcome{Kind: channel.Uncertain}
	ours := channel.Outcome{Kind: channel.Retry, Reason: ReasonReply}

	run(sent)
	row := func() (version string) {
		if err := w.pool.QueryRow(t.Context(), `SELECT ctid::text || xmin::text FROM channels WHERE id = $1`, ch).Scan(&version); err != nil {
			t.Fatal(err)
		}
		return version
	}
	before := row()
	if c := run(failed, failed, sent, failed, failed, sent, sent, refused, refused, refused, uncertain, uncertain, uncertain, ours, ours, ours, failed, refused, failed); c != CircuitClosed {
		t.Fatalf("the circuit is %s: there were never three failures in a row", c)
	}
	if row() != before {
		t.Error("attempts wrote the channel's row while the circuit stayed closed")
	}
	// Two in a row by now; refusals between them neither count nor clear.
	if c := run(failed, sent); c != CircuitOpen {
		t.Errorf("the circuit is %s after three failures in a row", c)
	}
}

// What a slow attempt says does not turn a circuit that was turned meanwhile.
func TestSlowAttemptsDoNotTurnTheCircuit(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		outcome channel.Outcome
		turn    func(t *testing.T, w *world, ch uuid.UUID)
		want    Circuit
	}{
		"a failure after a pause":           {channel.Outcome{Kind: channel.Retry}, pause, CircuitPaused},
		"a failure after pause and resume":  {channel.Outcome{Kind: channel.Retry}, func(t *testing.T, w *world, ch uuid.UUID) { pause(t, w, ch); resume(t, w, ch) }, CircuitClosed},
		"a success after the circuit opens": {channel.Outcome{Kind: channel.Sent}, func(t *testing.T, w *world, ch uuid.UUID) { open5(t, w, ch) }, CircuitOpen},
		"a failure after the circuit opens": {channel.Outcome{Kind: channel.Retry}, func(t *testing.T, w *world, ch uuid.UUID) { open5(t, w, ch) }, CircuitOpen},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, Options{BreakAfter: 1, Cooldown: time.Hour})
			ch := w.newChannel(t, w.tenant, nil)
			started, answer := make(chan struct{}), make(chan channel.Outcome)
			w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
				close(started)
				return <-answer
			}
			w.post(t, w.newConversation(t, ch), "x")
			var wg sync.WaitGroup
			job := w.takeAll(t)[0]
			wg.Go(func() {
				if err := w.Work(t.Context(), job); err != nil {
					t.Errorf("Work: %v", err)
				}
			})
			<-started
			test.turn(t, w, ch)
			before := w.state(t, ch)
			before.Parked = 0
			answer <- test.outcome
			wg.Wait()
			st := w.state(t, ch)
			st.Parked = 0 // the one in flight may have left it
			if diff := cmp.Diff(before, st); diff != "" || st.Circuit != test.want {
				t.Errorf("the circuit is %s, want %s as before; difference:\n%s", st.Circuit, test.want, diff)
			}
		})
	}
}

func pause(t *testing.T, w *world, ch uuid.UUID) {
	t.Helper()
	if st, err := w.Pause(t.Context(), byKey, w.tenant, ch); err != nil || st.Circuit != CircuitPaused {
		t.Fatalf("Pause: %+v, %v", st, err)
	}
}

func resume(t *testing.T, w *world, ch uuid.UUID) {
	t.Helper()
	if st, err := w.Resume(t.Context(), byKey, w.tenant, ch); err != nil || st.Circuit != CircuitClosed {
		t.Fatalf("Resume: %+v, %v", st, err)
	}
}

func open5(t *testing.T, w *world, ch uuid.UUID) {
	t.Helper()
	exec(t, w.pool, `UPDATE channels SET circuit_state = 'open', circuit_changed_at = now(), consecutive_failures = 5,
		hold_until = now() + interval '1 hour' WHERE id = $1`, ch)
}

func TestPauseHoldsAndResumeReleasesInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	conv := w.newConversation(t, ch)
	w.post(t, conv, "a", "b") // handed over by the append, and held when its worker comes
	pause(t, w, ch)
	w.post(t, conv, "c")
	w.post(t, w.newConversation(t, ch), "elsewhere")
	w.drain(t)
	if n := len(w.adapter.sent()); n != 0 {
		t.Fatalf("%d attempts while paused", n)
	}
	if st := w.state(t, ch); st.Parked != 4 || st.ChangedAt == nil || st.Failures != 0 {
		t.Errorf("state while paused: %+v", st)
	}
	if diff := cmp.Diff(map[Status]int{StatusPaused: 4}, w.listed(t, w.tenant)); diff != "" {
		t.Errorf("deliveries (-want +got):\n%s", diff)
	}
	pause(t, w, ch) // changes nothing
	resume(t, w, ch)
	resume(t, w, ch)
	if diff := cmp.Diff(map[Status]int{StatusPending: 4}, w.listed(t, w.tenant)); diff != "" {
		t.Errorf("deliveries after the pause (-want +got):\n%s", diff)
	}
	w.drainUntil(t, "all sent", func() bool { return w.listed(t, w.tenant)[StatusSent] == 4 })
	var inOrder []string
	for _, text := range w.adapter.texts(ch) {
		if text != "elsewhere" {
			inOrder = append(inOrder, text)
		}
	}
	if diff := cmp.Diff([]string{"a", "b", "c"}, inOrder); diff != "" {
		t.Errorf("order (-want +got):\n%s", diff)
	}

	open5(t, w, ch)
	resume(t, w, ch) // also closes an open circuit
	stranger := w.newTenant(t)
	for what, call := range map[string]func(context.Context, tenants.Actor, tenants.ID, uuid.UUID) (ChannelState, error){"Pause": w.Pause, "Resume": w.Resume} {
		if _, err := call(t.Context(), byKey, stranger, ch); !errors.Is(err, channel.ErrNotFound) {
			t.Errorf("%s by a stranger: %v", what, err)
		}
	}
	if _, err := w.State(t.Context(), stranger, ch); !errors.Is(err, channel.ErrNotFound) {
		t.Errorf("State for a stranger: %v", err)
	}
	if diff := cmp.Diff([]string{
		"pause_deliveries closed>paused", "resume_deliveries paused>closed", "resume_deliveries open>closed",
	}, w.audit(t, `changes->'before'->>'circuit_state' || '>' || (changes->'after'->>'circuit_state')`)); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
}

// audit lists the tenant's audit records: the action and what an expression gives.
func (w *world) audit(t testing.TB, expression string) (lines []string) {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), `SELECT action || ' ' || (`+expression+`) FROM audit_log
		WHERE tenant_id = $1 AND actor_type = 'tenant_api' AND actor_id = 'key' AND request_id = 'req' ORDER BY id`, w.tenant)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var line string
		if err := rows.Scan(&line); err != nil {
			t.Fatal(err)
		}
		lines = append(lines, line)
	}
	return lines
}

// A worker in the middle of a long turn notices a pause that another node made.
func TestPauseReachesARunningTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		pause(t, w, ch)
		time.Sleep(freshFor) // a receiver that takes its time
		return channel.Outcome{Kind: channel.Sent}
	}
	w.post(t, w.newConversation(t, ch), texts(5)...)
	w.drain(t)
	if n := len(w.adapter.sent()); n != 1 {
		t.Errorf("%d attempts, want the one that was under way", n)
	}
	if n := count(t, w.pool, `SELECT count(*) FROM lanes WHERE lease_token IS NOT NULL`); n != 0 {
		t.Errorf("%d lanes are still held", n)
	}
}
