package delivery

import (
	"context"
	"errors"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/channel"
)

func (w *world) retry(t testing.TB, id uuid.UUID) Delivery {
	t.Helper()
	d, err := w.Retry(t.Context(), byKey, w.tenant, id)
	if err != nil {
		t.Fatalf("Retry: %v", err)
	}
	return d
}

func TestRetryStartsAfresh(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.MaxAttempts = 2 })
	down := true
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		if down {
			return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonServerError, Error: "busy", ProviderMessageID: "p"}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	id := w.post(t, w.newConversation(t, ch), "x")[0]
	w.drainUntil(t, "failed", func() bool { return w.only(t, id).Status == StatusFailed })
	failed := w.only(t, id)

	d := w.retry(t, failed.ID)
	if d.Status != StatusPending || d.Attempts != 0 || d.Reason != "" || d.LastError != "busy" || d.ProviderMessageID != "" || d.RetryCount != 1 ||
		d.RetriedBy == nil || *d.RetriedBy != "tenant_api:key" || d.RetriedAt == nil || d.UpdatedAt.Before(failed.UpdatedAt) {
		t.Errorf("a retried delivery: %+v", d)
	}
	if _, err := w.Retry(t.Context(), byKey, w.tenant, d.ID); !errors.Is(err, ErrNotFailed) {
		t.Errorf("a second retry: %v", err)
	}
	w.drainUntil(t, "failed again", func() bool { return w.only(t, id).Status == StatusFailed })
	if d := w.only(t, id); d.Attempts != 2 {
		t.Errorf("%d attempts after the retry, want 2 of its own", d.Attempts)
	}
	down = false
	w.retry(t, d.ID)
	w.drainUntil(t, "sent", func() bool { return w.only(t, id).Status == StatusSent })
	if d := w.only(t, id); d.Attempts != 1 || d.RetryCount != 2 || d.LastError != "" {
		t.Errorf("delivery %+v in the end", d)
	}
	if attempts, err := w.Attempts(t.Context(), w.tenant, d.ID); err != nil || len(attempts) != 5 {
		t.Errorf("%d attempts recorded, %v; want all 5", len(attempts), err)
	}
	for _, call := range w.adapter.sent() {
		if call.DeliveryID != failed.ID {
			t.Errorf("an attempt under the id %s, want %s", call.DeliveryID, failed.ID)
		}
	}
	if diff := cmp.Diff([]string{"retry failed>pending", "retry failed>pending"},
		w.audit(t, `changes->'before'->>'status' || '>' || (changes->'after'->>'status')`)); diff != "" {
		t.Errorf("audit (-want +got):\n%s", diff)
	}
}

func TestRetryRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch, off, gone := w.newChannel(t, w.tenant, nil), w.newChannel(t, w.tenant, nil), w.newChannel(t, w.tenant, nil)
	delivery := func(of uuid.UUID, status Status) uuid.UUID {
		d := w.only(t, w.post(t, w.newConversation(t, of), "x")[0])
		exec(t, w.pool, `UPDATE deliveries SET status = $2 WHERE id = $1`, d.ID, status)
		return d.ID
	}
	failed, onOff, onGone := delivery(ch, StatusFailed), delivery(off, StatusFailed), delivery(gone, StatusFailed)
	exec(t, w.pool, `UPDATE channels SET status = 'inactive' WHERE id = $1`, off)
	exec(t, w.pool, `UPDATE channels SET deleted_at = now() WHERE id = $1`, gone)
	stranger := w.newTenant(t)
	for name, test := range map[string]struct {
		tenant, id uuid.UUID
		want       error
	}{
		"of another tenant": {stranger, failed, ErrNotFound},
		"no delivery":       {w.tenant, newID(), ErrNotFound},
		"inactive channel":  {w.tenant, onOff, ErrInactive},
		"deleted channel":   {w.tenant, onGone, ErrInactive},
		"pending":           {w.tenant, delivery(ch, StatusPending), ErrNotFailed},
		"uncertain":         {w.tenant, delivery(ch, StatusUncertain), ErrNotFailed},
		"sent":              {w.tenant, delivery(ch, StatusSent), ErrNotFailed},
		"read":              {w.tenant, delivery(ch, StatusRead), ErrNotFailed},
	} {
		if _, err := w.Retry(t.Context(), byKey, test.tenant, test.id); !errors.Is(err, test.want) {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	for name, test := range map[string]struct {
		tenant, channel uuid.UUID
		want            error
	}{
		"of another tenant": {stranger, ch, channel.ErrNotFound},
		"no channel":        {w.tenant, newID(), channel.ErrNotFound},
		"deleted":           {w.tenant, gone, channel.ErrNotFound},
		"inactive":          {w.tenant, off, ErrInactive},
	} {
		if n, _, err := w.RetryChannel(t.Context(), byKey, test.tenant, test.channel, RetryFilter{}, 10); n != 0 || !errors.Is(err, test.want) {
			t.Errorf("all of a channel, %s: %d, %v, want %v", name, n, err, test.want)
		}
	}
	if n := count(t, w.pool, `SELECT count(*) FROM deliveries WHERE retry_count > 0`) + len(w.audit(t, `''`)); n != 0 {
		t.Errorf("refused retries changed %d rows", n)
	}
}

// A retried delivery goes ahead of those of its conversation that wait, at once, and does not hurry those.
func TestRetryGoesAheadInItsLane(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.BaseMS = 3_600_000 })
	refuse := true
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		switch {
		case out.Activity.Text == "m000" && refuse:
			return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonRejected}
		case out.Activity.Text == "m001":
			return channel.Outcome{Kind: channel.Retry}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	ids := w.post(t, w.newConversation(t, ch), texts(3)...)
	w.drain(t)
	refuse = false
	w.retry(t, w.only(t, ids[0]).ID)
	w.drain(t)
	if diff := cmp.Diff([]string{"m000", "m001", "m000"}, w.adapter.texts(ch)); diff != "" {
		t.Errorf("attempts (-want +got):\n%s", diff)
	}
	if d := w.only(t, ids[1]); d.Status != StatusPending || time.Until(d.NextAt) < 50*time.Minute {
		t.Errorf("the one that waits was hurried: %+v", d)
	}
}

// A retry while a worker is trying a later message of the lane is not held up by that one's back-off.
func TestRetryBesideARunningTurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.BaseMS = 3_600_000 })
	var first uuid.UUID
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		switch {
		case first == uuid.Nil:
			first = out.DeliveryID
			return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonRejected}
		case out.Activity.Text == "m001":
			w.retry(t, first)
			return channel.Outcome{Kind: channel.Retry}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	ids := w.post(t, w.newConversation(t, ch), texts(2)...)
	w.drain(t)
	if d := w.only(t, ids[0]); d.Status != StatusSent {
		t.Errorf("the retried one waits behind a later one: %+v", d)
	}
	if diff := cmp.Diff([]string{"m000", "m001", "m000"}, w.adapter.texts(ch)); diff != "" {
		t.Errorf("attempts (-want +got):\n%s", diff)
	}
}

// fail makes failed deliveries of a channel, in conversations of a hundred, as if their lanes had been worked.
func (w *world) fail(t testing.TB, ch uuid.UUID, n int) {
	t.Helper()
	for left := n; left > 0; left -= 100 {
		w.post(t, w.newConversation(t, ch), texts(min(left, 100))...)
	}
	exec(t, w.pool, `UPDATE deliveries SET status = 'failed', reason = 'exhausted', attempts = 5 WHERE channel_id = $1`, ch)
	w.drain(t)
	exec(t, w.pool, `VACUUM ANALYZE deliveries, lanes`)
}

// However many ask at once, each delivery is retried once, and what was retried goes out.
func TestRetryChannelOnceEach(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch, other := w.newChannel(t, w.tenant, nil), w.newChannel(t, w.tenant, nil)
	w.fail(t, ch, 1300)
	w.fail(t, other, 3)
	var wg sync.WaitGroup
	counts := make([]int, 4)
	for i := range counts {
		wg.Go(func() {
			var err error
			if counts[i], _, err = w.RetryChannel(t.Context(), byKey, w.tenant, ch, RetryFilter{}, MaxRetries); err != nil {
				t.Errorf("RetryChannel: %v", err)
			}
		})
	}
	wg.Wait()
	// What a call had to pass over, because another held it, that other has retried.
	sum := 0
	for _, n := range counts {
		sum += n
	}
	if once := count(t, w.pool, `SELECT count(*) FROM deliveries WHERE channel_id = $1 AND status = 'pending' AND retry_count = 1 AND attempts = 0`, ch); sum != 1300 || once != 1300 {
		t.Fatalf("calls retried %v, %d deliveries stand retried once; want 1300", counts, once)
	}
	if n, more, err := w.RetryChannel(t.Context(), byKey, w.tenant, ch, RetryFilter{}, MaxRetries); n != 0 || more || err != nil {
		t.Errorf("a further call: %d, %v, %v", n, more, err)
	}
	audited := 0
	for _, line := range w.audit(t, `changes->'after'->>'retried'`) {
		n, err := strconv.Atoi(strings.TrimPrefix(line, "retry "))
		if err != nil || n > retryChunk {
			t.Errorf("audit: %s", line)
		}
		audited += n
	}
	if audited != 1300 {
		t.Errorf("%d retries audited, want 1300", audited)
	}
	w.drain(t)
	if n := count(t, w.pool, `SELECT count(*) FROM deliveries WHERE channel_id = $1 AND status = 'sent'`, ch); n != 1300 {
		t.Errorf("%d of the retried are sent", n)
	}
	if n := count(t, w.pool, `SELECT count(*) FROM deliveries WHERE channel_id = $1 AND status = 'failed' AND retry_count = 0`, other); n != 3 {
		t.Errorf("of another channel %d are as before, want 3", n)
	}
}

func TestRetryChannelFilters(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	w.fail(t, ch, 10)
	page, _, err := w.List(t.Context(), w.tenant, Filter{}, uuid.Nil, 10)
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(page) // the oldest first
	day := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC)
	for i, d := range page {
		exec(t, w.pool, `UPDATE deliveries SET updated_at = $2 WHERE id = $1`, d.ID, day.Add(time.Duration(i)*time.Hour))
	}
	retry := func(f RetryFilter, limit int) (n int, more bool) {
		t.Helper()
		n, more, err := w.RetryChannel(t.Context(), byKey, w.tenant, ch, f, limit)
		if err != nil {
			t.Fatalf("RetryChannel: %v", err)
		}
		return n, more
	}
	retried := func() (which []int) {
		for i, d := range page {
			if got, err := w.Get(t.Context(), w.tenant, d.ID); err != nil || got.RetryCount > 0 {
				which = append(which, i)
			}
		}
		return which
	}
	for _, step := range []struct {
		name   string
		filter RetryFilter
		limit  int
		n      int
		more   bool
		so     []int
	}{
		{"an activity", RetryFilter{ActivityID: &page[4].ActivityID}, 10, 1, false, []int{4}},
		{"another's activity", RetryFilter{ActivityID: new(uuid.UUID)}, 10, 0, false, []int{4}},
		{"from and to, both inclusive", RetryFilter{From: day.Add(6 * time.Hour), To: day.Add(7 * time.Hour)}, 10, 2, false, []int{4, 6, 7}},
		{"the oldest first", RetryFilter{}, 2, 2, true, []int{0, 1, 4, 6, 7}},
		{"as many as there are", RetryFilter{To: day.Add(5 * time.Hour)}, 3, 3, false, []int{0, 1, 2, 3, 4, 5, 6, 7}},
		{"the rest", RetryFilter{}, MaxRetries + 1, 2, false, []int{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}},
	} {
		if n, more := retry(step.filter, step.limit); n != step.n || more != step.more {
			t.Errorf("%s: %d, %v; want %d, %v", step.name, n, more, step.n, step.more)
		}
		if diff := cmp.Diff(step.so, retried()); diff != "" {
			t.Errorf("%s: retried so far (-want +got):\n%s", step.name, diff)
		}
	}
}

// The provider's word on what was retried, when it comes once more, is not taken for a word on the retry.
func TestReceiptsFromBeforeTheRetry(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		return channel.Outcome{Kind: channel.Sent, ProviderMessageID: "p" + strconv.Itoa(len(w.adapter.sent()))}
	}
	id := w.post(t, w.newConversation(t, ch), "x")[0]
	w.drain(t)
	d := w.only(t, id)
	old := channel.Receipt{DeliveryID: &d.ID, Status: "failed", At: time.Now().Add(-2 * time.Minute)}
	apply(t, w, w.tenant, ch, old)
	w.retry(t, d.ID)
	apply(t, w, w.tenant, ch, old)
	w.drain(t)
	if d := w.only(t, id); d.Status != StatusSent || d.ProviderMessageID != "p2" || d.SentAt == nil {
		t.Errorf("after the old receipt once more: %+v", d)
	}
	apply(t, w, w.tenant, ch, channel.Receipt{DeliveryID: &d.ID, Status: "failed", At: time.Now().Truncate(time.Second)})
	if d := w.only(t, id); d.Status != StatusFailed {
		t.Errorf("after a receipt for the retry: %+v", d)
	}
}
