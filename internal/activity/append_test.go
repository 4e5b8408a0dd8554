package activity

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
	"github.com/jackc/pgx/v5"

	"converger/internal/fault"
)

func TestAppendWritesWhatListAndGetReturn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	first := w.must(t, w.message("one"))
	n := w.keyed("k", "two")
	n.ReplyToID = &first.ID
	n.Attachments = []json.RawMessage{raw(`{"contentType":"image/png","contentUrl":"/a.png","other":1}`)}
	n.Metadata = raw(`{"a": 1.50}`)
	second := w.must(t, n)

	if first.Seq != 1 || second.Seq != 2 {
		t.Errorf("seqs are %d and %d, want 1 and 2", first.Seq, second.Seq)
	}
	got, more, err := w.store.List(t.Context(), w.tenant, w.conv, nil, 0, 10)
	if err != nil || more {
		t.Fatalf("List: more %v, err %v", more, err)
	}
	if diff := cmp.Diff([]Activity{first, second}, got, jsonEqual); diff != "" {
		t.Errorf("List differs from the answers (-answers +list):\n%s", diff)
	}
	one, err := w.store.Get(t.Context(), w.tenant, second.ID)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(second, one, jsonEqual); diff != "" {
		t.Errorf("Get differs (-answer +get):\n%s", diff)
	}
	if second.ChannelID != w.channel || second.InsertedAt.IsZero() || second.InsertedAt.Location() != first.InsertedAt.Location() {
		t.Errorf("channel %v, inserted at %v", second.ChannelID, second.InsertedAt)
	}
	w.checkDatabase(t)
	if n := w.lanes.woken.Load(); n != 2 {
		t.Errorf("%d deliveries woken after commit, want 2", n)
	}
}

func TestParallelPostsWithOneKeyMakeOneActivity(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	other := w.node(t, Options{})
	const posts = 200
	results := make([]Result, posts)
	parallel(posts, func(i int) {
		s := w.store
		if i%2 == 1 {
			s = other
		}
		results[i] = s.Append(t.Context(), []New{w.keyed("k", "hello")})[0]
	})
	fresh := 0
	for i, r := range results {
		if r.Err != nil {
			t.Fatalf("post %d: %v", i, r.Err)
		}
		if !r.Repeat {
			fresh++
		}
		if r.Activity.ID != results[0].Activity.ID || r.Activity.Seq != 1 {
			t.Fatalf("post %d got another activity", i)
		}
	}
	if fresh != 1 {
		t.Errorf("%d answers say that they are the first", fresh)
	}
	w.checkDatabase(t)
}

func TestParallelPostsNumberWithoutGap(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	other := w.node(t, Options{})
	const posts = 200
	seqs := make([]int64, posts)
	parallel(posts, func(i int) {
		s := w.store
		if i%2 == 1 {
			s = other
		}
		r := s.Append(t.Context(), []New{w.message("x")})[0]
		if r.Err != nil {
			t.Error(r.Err)
		}
		seqs[i] = r.Activity.Seq
	})
	slices.Sort(seqs)
	for i, seq := range seqs {
		if seq != int64(i+1) {
			t.Fatalf("seqs: %v", seqs)
		}
	}
	w.checkDatabase(t)
}

func TestRepeats(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	n := w.keyed("k", "hello")
	n.Metadata = raw(`{"a":1,"b":[2]}`)
	original := w.must(t, n)

	n.Metadata = raw("{ \"b\" : [2],\n\"a\":1 }")
	r := w.append(t, n)[0]
	if r.Err != nil || !r.Repeat {
		t.Fatalf("same JSON with other spacing: %+v", r)
	}
	if diff := cmp.Diff(original, r.Activity, jsonEqual); diff != "" {
		t.Errorf("a repeat answers something else (-original +repeat):\n%s", diff)
	}
	if r := w.append(t, w.keyed("k", "other"))[0]; !errors.Is(r.Err, ErrKeyReused) {
		t.Errorf("other body: %v", r.Err)
	}
	another := n
	another.Caller = "key:2"
	if r := w.append(t, another)[0]; r.Err != nil || r.Repeat {
		t.Errorf("another caller's same key: %+v", r)
	}
	bound := n
	bound.ChannelID = ptr(uuid.New())
	if r := w.append(t, bound)[0]; !errors.Is(r.Err, ErrNotFound) {
		t.Errorf("repeat from another channel: %v", r.Err)
	}
	elsewhere := n
	elsewhere.ConversationID = w.newConversation(t)
	if r := w.append(t, elsewhere)[0]; r.Err != nil || r.Repeat {
		t.Errorf("same key in another conversation: %+v", r)
	}

	if _, _, err := w.store.Close(t.Context(), w.tenant, w.conv, nil, ReasonManual); err != nil {
		t.Fatal(err)
	}
	if r := w.append(t, n)[0]; r.Err != nil || !r.Repeat || r.Activity.ID != original.ID {
		t.Errorf("repeat after the close: %+v", r)
	}
	if r := w.append(t, w.keyed("k", "other"))[0]; !errors.Is(r.Err, ErrKeyReused) {
		t.Errorf("other body after the close: %v", r.Err)
	}
	if r := w.append(t, w.keyed("new", "x"))[0]; !errors.Is(r.Err, ErrClosed) {
		t.Errorf("new key after the close: %v", r.Err)
	}
	w.checkDatabase(t)

	// The refused key is not claimed.
	if _, _, err := w.store.Reopen(t.Context(), w.tenant, w.conv, nil, ReasonManual); err != nil {
		t.Fatal(err)
	}
	if r := w.append(t, w.keyed("new", "y"))[0]; r.Err != nil || r.Repeat {
		t.Errorf("after reopening: %+v", r)
	}
	w.checkDatabase(t)
}

// One batch with everything in it: each item has its own result, and what fails takes no seq.
func TestMixedBatch(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	otherTenant, _ := addTenant(t, w.pool)
	closed, second := w.newConversation(t), w.newConversation(t)
	if _, _, err := w.store.Close(t.Context(), w.tenant, closed, nil, ReasonManual); err != nil {
		t.Fatal(err)
	}
	old := w.must(t, w.keyed("old", "old"))
	in := func(n New, conv uuid.UUID) New { n.ConversationID = conv; return n }

	foreign := w.message("not yours")
	foreign.TenantID = otherTenant
	bound := w.keyed("bound", "wrong channel")
	bound.ChannelID = ptr(uuid.New())
	right := w.message("right channel")
	right.ChannelID = &w.channel
	badReply := w.keyed("bad", "no such target")
	badReply.ReplyToID = ptr(uuid.New())
	goodReply := w.keyed("good", "re: old")
	goodReply.ReplyToID = &old.ID
	crossReply := in(w.message("other conversation"), second)
	crossReply.ReplyToID = &old.ID

	items := []New{
		w.message("a"),                       // 0: seq 2
		foreign,                              // 1: not found
		in(w.keyed("c", "late"), closed),     // 2: closed
		w.keyed("old", "old"),                // 3: repeat
		w.keyed("old", "new"),                // 4: reused
		in(w.message("b"), uuid.New()),       // 5: not found
		in(w.keyed("miss", "b"), uuid.New()), // 6: not found, though it has a key
		bound,                                // 7: not found
		right,                                // 8: seq 3
		w.keyed("twice", "t"),                // 9: seq 4
		w.keyed("twice", "t"),                // 10: repeat of 9
		w.keyed("twice", "u"),                // 11: reused
		badReply,                             // 12: invalid
		goodReply,                            // 13: seq 5
		crossReply,                           // 14: invalid
		in(w.message("c"), second),           // 15: seq 1 there
		{TenantID: w.tenant, ConversationID: w.conv}, // 16: invalid, no sender
	}
	tests := map[string]func() []Result{
		"AppendTx": func() (results []Result) {
			err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) (err error) {
				results, _, err = w.store.AppendTx(t.Context(), tx, items)
				return errors.Join(err, errRollback)
			})
			if !errors.Is(err, errRollback) || errors.Is(err, ErrLockTimeout) {
				t.Fatal(err)
			}
			return results
		},
		"Append": func() []Result { return w.append(t, items...) },
	}
	for _, name := range []string{"AppendTx", "Append"} {
		results := tests[name]()
		want := []string{
			"seq 2", "not found", "closed", "repeat 1", "reused", "not found", "not found", "not found", "seq 3", "seq 4",
			"repeat 4", "reused", "invalid /reply_to_id", "seq 5", "invalid /reply_to_id", "seq 1", "invalid /sender",
		}
		if diff := cmp.Diff(want, describe(results)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	w.checkDatabase(t)
}

var errRollback = errors.New("rolled back on purpose")

func describe(results []Result) []string {
	words := make([]string, len(results))
	for i, r := range results {
		var invalid *fault.Invalid
		switch {
		case errors.As(r.Err, &invalid):
			words[i] = "invalid"
			for _, f := range invalid.Fields {
				words[i] += " " + f.Pointer
			}
		case errors.Is(r.Err, ErrNotFound):
			words[i] = "not found"
		case errors.Is(r.Err, ErrClosed):
			words[i] = "closed"
		case errors.Is(r.Err, ErrKeyReused):
			words[i] = "reused"
		case r.Err != nil:
			words[i] = r.Err.Error()
		case r.Repeat:
			words[i] = fmt.Sprintf("repeat %d", r.Activity.Seq)
		default:
			words[i] = fmt.Sprintf("seq %d", r.Activity.Seq)
		}
	}
	return words
}

func TestEdits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	about := func(kind string, target uuid.UUID, sender, text string) New {
		n := w.message(text)
		n.Type, n.ReplyToID, n.Sender = kind, &target, sender
		return n
	}
	msg := w.must(t, w.message("hello"))
	event := w.must(t, New{TenantID: w.tenant, ConversationID: w.conv, Type: TypeEvent, Sender: "user"})

	got := describe(w.append(t,
		about(TypeMessageReaction, msg.ID, "other", "👍"),
		about(TypeMessageReaction, event.ID, "other", "👍"),
		about(TypeMessageUpdate, msg.ID, "other", "not mine"),
		about(TypeMessageUpdate, event.ID, "user", "no message"),
		about(TypeMessageUpdate, msg.ID, "user", "hello!"),
		about(TypeMessageDelete, msg.ID, "user", ""),
		about(TypeMessageUpdate, msg.ID, "user", "too late"),
		about(TypeMessageDelete, msg.ID, "user", ""),
	))
	bad := "invalid /reply_to_id"
	if diff := cmp.Diff([]string{"seq 3", bad, bad, bad, "seq 4", "seq 5", bad, bad}, got); diff != "" {
		t.Errorf("in one batch (-want +got):\n%s", diff)
	}
	if got := describe(w.append(t, about(TypeMessageUpdate, msg.ID, "user", "later"))); got[0] != bad {
		t.Errorf("change after the delete: %v", got)
	}
	after, err := w.store.Get(t.Context(), w.tenant, msg.ID)
	if err != nil {
		t.Fatal(err)
	}
	if after.EditedAt == nil || after.DeletedAt == nil || *after.Text != "hello" {
		t.Errorf("the original: edited %v, deleted %v, text %q", after.EditedAt, after.DeletedAt, *after.Text)
	}
	untouched, err := w.store.Get(t.Context(), w.tenant, event.ID)
	if err != nil || untouched.EditedAt != nil || untouched.DeletedAt != nil {
		t.Errorf("another activity was stamped: %+v, %v", untouched, err)
	}
	w.checkDatabase(t)
}

// An edit with a key keeps the rules of keys: twice is once, and a refused one leaves the key free.
func TestEditsWithKeys(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	msg := w.must(t, w.message("hello"))
	del := w.keyed("del", "")
	del.Type, del.ReplyToID = TypeMessageDelete, &msg.ID
	foreign := del
	foreign.Sender = "other"
	if got := describe(w.append(t, foreign)); got[0] != "invalid /reply_to_id" {
		t.Fatalf("another's message: %v", got)
	}
	w.checkDatabase(t)
	if got := describe(w.append(t, del)); got[0] != "seq 2" {
		t.Fatalf("first: %v", got)
	}
	if got := describe(w.append(t, del)); got[0] != "repeat 2" {
		t.Fatalf("second: %v", got)
	}
	w.checkDatabase(t)
}

// A second transaction with the same key waits for the first one's end, and takes its answer or its place.
func TestKeyHeldByAnotherTransaction(t *testing.T) {
	t.Parallel()
	for _, commit := range []bool{true, false} {
		w := newWorld(t, Options{LockTimeout: patience})
		tx, err := w.pool.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		first, after, err := w.store.AppendTx(t.Context(), tx, []New{w.keyed("k", "x")})
		if err != nil || first[0].Err != nil {
			t.Fatal(err, first)
		}
		second := make(chan Result, 1)
		go func() { second <- w.store.Append(context.WithoutCancel(t.Context()), []New{w.keyed("k", "x")})[0] }()
		waitForLock(t, w.pool)
		if commit {
			err = tx.Commit(t.Context())
			after()
		} else {
			err = tx.Rollback(t.Context())
		}
		if err != nil {
			t.Fatal(err)
		}
		if r := <-second; r.Err != nil || r.Repeat != commit || (r.Activity.ID == first[0].Activity.ID) != commit {
			t.Errorf("commit %v: the second got %+v", commit, r)
		}
		w.checkDatabase(t)
	}
}

// A conversation that somebody holds costs its own items a time-out, and nobody else theirs.
func TestLockTimeoutIsTheItemsOwn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{LockTimeout: 100 * time.Millisecond})
	free := w.newConversation(t)
	tx, err := w.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM conversations WHERE id = $1 FOR UPDATE`, w.conv); err != nil {
		t.Fatal(err)
	}
	items := []New{w.message("a"), w.keyed("b", "b"), w.message("c"), w.message("d")}
	for _, i := range []int{0, 3} {
		items[i].ConversationID = free
	}
	results := w.append(t, items...)
	for i, r := range results {
		if busy := i == 1 || i == 2; errors.Is(r.Err, ErrLockTimeout) != busy || !busy && r.Err != nil {
			t.Errorf("item %d: %v", i, r.Err)
		}
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := w.append(t, items[1])[0]; r.Err != nil || r.Repeat || r.Activity.Seq != 1 {
		t.Errorf("afterwards: %+v", r)
	}
	w.checkDatabase(t)
}

func TestNothingIsWrittenWithoutItsDeliveries(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	w.lanes.fail.Store(true)
	if r := w.append(t, w.keyed("k", "x"))[0]; !errors.Is(r.Err, errEnqueue) {
		t.Fatalf("got %+v", r)
	}
	if n := w.count(t, `SELECT (SELECT count(*) FROM activities) + (SELECT count(*) FROM idempotency_keys)`); n != 0 {
		t.Errorf("%d rows were written", n)
	}
	w.lanes.fail.Store(false)
	if r := w.append(t, w.keyed("k", "x"))[0]; r.Err != nil || r.Activity.Seq != 1 {
		t.Errorf("afterwards: %+v", r)
	}
}

func parallel(n int, do func(i int)) {
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() { do(i) })
	}
	wg.Wait()
}

// Who may change a message is decided by who wrote it, not by the name shown: an anonymous client is called "user", and so
// is the tenant's own server.
func TestEditNeedsTheAuthor(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	by := func(author string, kind string, of *uuid.UUID) New {
		n := w.message("text")
		n.Author, n.Type, n.ReplyToID = author, kind, of
		return n
	}
	for _, tt := range []struct {
		writer, editor string
		may            bool
	}{
		{"user:a", "user:a", true},
		{"user:a", "user:b", false},
		{"conversation:1", "conversation:1", true},
		{AuthorTenant, AuthorTenant, true},
		{"user:a", AuthorTenant, true}, // the tenant names the sender: it is trusted with that
		{AuthorTenant, "user:a", false},
		{AuthorTenant, "conversation:1", false},
		{AuthorTenant, "", false},
		{"", "", false},
	} {
		original := w.must(t, by(tt.writer, TypeMessage, nil))
		for _, kind := range []string{TypeMessageUpdate, TypeMessageDelete} {
			err := w.append(t, by(tt.editor, kind, &original.ID))[0].Err
			var invalid *fault.Invalid
			if tt.may && err != nil || !tt.may && !errors.As(err, &invalid) {
				t.Errorf("%s by %q of what %q wrote: %v", kind, tt.editor, tt.writer, err)
			}
		}
	}
}
