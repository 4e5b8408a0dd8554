package activity

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
)

// begin starts a transaction that ends with the test at the latest.
func (w *world) begin(t testing.TB) pgx.Tx {
	t.Helper()
	tx, err := w.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tx.Rollback(context.WithoutCancel(t.Context())); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
			t.Error(err)
		}
	})
	return tx
}

func commit(t testing.TB, tx pgx.Tx) {
	t.Helper()
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// What an edit names is judged under the lock: a delete that is under way is waited for.
func TestEditWaitsForDelete(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{LockTimeout: patience})
	msg := w.must(t, w.message("hello"))
	edit := func(kind string) New {
		n := w.message("")
		n.Type, n.ReplyToID = kind, &msg.ID
		return n
	}
	tx := w.begin(t)
	if r, _, err := w.store.AppendTx(t.Context(), tx, []New{edit(TypeMessageDelete)}); err != nil || r[0].Err != nil {
		t.Fatal(r, err)
	}
	update := w.start(t, w.store, edit(TypeMessageUpdate))
	waitForLock(t, w.pool)
	commit(t, tx)
	if got := describe(update())[0]; got != "invalid /reply_to_id" {
		t.Errorf("the update got %s", got)
	}
}

// Two first messages of one person: the second waits for the first one's participant, then for its conversation.
func TestSecondFirstMessageWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	type answer struct {
		p   Participant
		c   Conversation
		err error
	}
	resolve := func(tx pgx.Tx, p channel.Participant) (a answer) {
		a.p, a.err = w.store.ResolveParticipantTx(t.Context(), tx, w.tenant, w.channel, p)
		return a
	}
	both := channel.Participant{Identities: []channel.Identity{{Kind: "user_id", Value: "anna"}, {Kind: "phone", Value: "1"}}}
	race := func(first, second func(pgx.Tx) answer) (answer, answer) {
		t.Helper()
		tx1, tx2 := w.begin(t), w.begin(t)
		one := first(tx1)
		two := make(chan answer, 1)
		go func() { two <- second(tx2) }()
		waitForLock(t, w.pool)
		commit(t, tx1)
		other := <-two
		if one.err != nil || other.err != nil {
			t.Fatal(one.err, other.err)
		}
		commit(t, tx2)
		return one, other
	}
	one, two := race(
		func(tx pgx.Tx) answer { return resolve(tx, phone("1")) },
		func(tx pgx.Tx) answer { return resolve(tx, both) })
	if one.p.ID != two.p.ID {
		t.Errorf("two participants: %v, %v", one.p.ID, two.p.ID)
	}
	if n := w.count(t, `SELECT count(*) FROM participants`); n != 1 {
		t.Errorf("%d participants", n)
	}
	if n := w.count(t, `SELECT count(*) FROM participant_identities`); n != 2 {
		t.Errorf("%d identities", n)
	}
	open := func(tx pgx.Tx) (a answer) {
		a.c, _, a.err = w.store.OpenConversationTx(t.Context(), tx, w.tenant, w.channel, &one.p.ID, 0, nil)
		return a
	}
	if one, two := race(open, open); one.c.ID != two.c.ID {
		t.Errorf("two conversations: %v, %v", one.c.ID, two.c.ID)
	}
}

// Items that wait for a held conversation are part of what is finished before the stop.
func TestStopWaitsForHeldConversations(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	s, stop, stopped := w.stoppable(t, Options{LockTimeout: 8 * time.Second})
	release := w.hold(t)
	results := w.start(t, s, w.message("x"))
	waitFor(t, func() bool {
		s.parking.mu.Lock()
		defer s.parking.mu.Unlock()
		return len(s.parking.parked) == 1
	})
	stop()
	waitFor(t, func() bool {
		s.queue.mu.Lock()
		defer s.queue.mu.Unlock()
		return s.queue.closed
	})
	release()
	if r := results()[0]; r.Err != nil {
		t.Error(r.Err)
	}
	<-stopped
}
