package main

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"sync"
	"testing"
	"time"
)

// load posts messages of its own numbering, each with an idempotency key, from several callers into several conversations,
// and remembers which were acknowledged.
type load struct {
	customer
	chats []string

	stopped chan struct{} // closed: no further messages
	stop    func()
	callers sync.WaitGroup

	mu       sync.Mutex
	acked    map[string]message // by text
	faults   []string           // answers that no state of the hub explains
	statuses map[int]int        // how often each was answered; 0 counts broken connections
	progress chan struct{}      // closed at the next acknowledgement
}

// startLoad starts the callers; each repeats a message, with pauses, until it is acknowledged or the load is stopped.
func startLoad(t testing.TB, c customer, chats []string, callers int) *load {
	t.Helper()
	l := &load{
		customer: c, chats: chats, stopped: make(chan struct{}),
		acked: map[string]message{}, statuses: map[int]int{}, progress: make(chan struct{}),
	}
	l.stop = sync.OnceFunc(func() {
		close(l.stopped)
		l.callers.Wait()
	})
	for caller := range callers {
		l.callers.Go(func() {
			for n := 0; l.post(t, chats[(caller+n)%len(chats)], fmt.Sprintf("%d/%d", caller, n)); n++ {
			}
		})
	}
	t.Cleanup(l.stop)
	return l
}

// post sends a message until it is acknowledged. It returns false once the load is stopped, with that or without.
func (l *load) post(t testing.TB, chat, text string) bool {
	body := object(map[string]any{"text": text, "metadata": map[string]any{"chat": chat}})
	for {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		a, err := l.api.try(ctx, "POST", "/api/v1/conversations/"+chat+"/activities", body, "Idempotency-Key", text)
		cancel()
		acked := l.note(t, text, a, err)
		select {
		case <-l.stopped:
			return false
		default:
		}
		if acked {
			return true
		}
		time.Sleep(10 * time.Millisecond) // the hub is away: a polite client waits, if longer
	}
}

// note keeps what a message was answered with and tells whether it was acknowledged.
func (l *load) note(t testing.TB, text string, a answer, err error) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.statuses[a.status]++
	switch {
	case err != nil:
	case a.status == http.StatusCreated:
		l.acked[text] = data[message](t, a)
		close(l.progress)
		l.progress = make(chan struct{})
		return true
	case a.status == http.StatusServiceUnavailable || a.status == http.StatusConflict: // 409: the key's first request still runs
		if n, err := strconv.Atoi(a.header.Get("Retry-After")); err != nil || n < 1 {
			l.faults = append(l.faults, fmt.Sprintf("without Retry-After: %s", a))
		}
	default:
		l.faults = append(l.faults, a.String())
	}
	return false
}

// count is the number of acknowledged messages.
func (l *load) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.acked)
}

// awaitMore waits until n more messages are acknowledged.
func (l *load) awaitMore(t testing.TB, n int) {
	t.Helper()
	timeout := time.After(patience)
	l.mu.Lock()
	want := len(l.acked) + n
	l.mu.Unlock()
	for {
		l.mu.Lock()
		have, progress := len(l.acked), l.progress
		l.mu.Unlock()
		if have >= want {
			return
		}
		select {
		case <-progress:
		case <-timeout:
			l.mu.Lock()
			defer l.mu.Unlock()
			t.Fatalf("%d messages acknowledged and not %d within %s; answers: %v, faults: %v", have, want, patience, l.statuses, l.faults)
		}
	}
}

// verify fails the test unless each acknowledged message is stored once, under the id that was answered, none is stored
// twice, and each conversation is numbered without a gap. It returns all that is stored, by conversation.
func (l *load) verify(t testing.TB) map[string][]message {
	t.Helper()
	l.stop()
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, f := range l.faults {
		t.Errorf("an answer that a client can't act on: %s", f)
	}
	stored := map[string][]message{}
	seen := map[string]string{}
	for _, chat := range l.chats {
		all := l.activities(t, chat)
		gapless(t, all)
		stored[chat] = all
		for _, m := range all {
			if _, twice := seen[m.Text]; twice {
				t.Errorf("message %s is stored twice", m.Text)
			}
			seen[m.Text] = m.ID
			if m.Metadata["chat"] != chat {
				t.Errorf("message %s of conversation %v is stored in %s", m.Text, m.Metadata["chat"], chat)
			}
		}
	}
	for text, m := range l.acked {
		if seen[text] != m.ID {
			t.Errorf("message %s was acknowledged as %s and is stored as %q", text, m.ID, seen[text])
		}
	}
	t.Logf("%d messages acknowledged, %d stored; answers: %v", len(l.acked), len(seen), l.statuses)
	return stored
}

// delivered fails the test unless the endpoint gets each stored message: always under one id, and for the first time in
// the order of its conversation. It waits for what is still under way, and returns how many arrivals were repeats.
func (e *endpoint) delivered(t testing.TB, stored map[string][]message, within time.Duration) (repeats int) {
	t.Helper()
	total := 0
	for _, all := range stored {
		total += len(all)
	}
	ids := map[string]string{} // delivery by activity
	eventually(t, within, fmt.Sprintf("%d messages to be delivered", total), func() bool {
		clear(ids)
		for _, a := range e.arrivals() {
			ids[a.message.ID] = a.delivery
		}
		return len(ids) >= total
	})
	last := map[string]int64{}
	first := map[string]bool{}
	for _, a := range e.arrivals() {
		if ids[a.message.ID] != a.delivery {
			t.Errorf("activity %s came as delivery %s and as %s", a.message.ID, a.delivery, ids[a.message.ID])
		}
		if first[a.message.ID] {
			repeats++
			continue
		}
		first[a.message.ID] = true
		if a.seq != last[a.chat]+1 {
			t.Errorf("conversation %s: seq %d arrived after %d", a.chat, a.seq, last[a.chat])
		}
		last[a.chat] = a.seq
	}
	for chat, all := range stored {
		for _, m := range all {
			if !first[m.ID] {
				t.Errorf("conversation %s: seq %d was never delivered", chat, m.Seq)
			}
		}
	}
	return repeats
}
