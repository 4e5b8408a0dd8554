package delivery

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/channel"
	"converger/internal/tenants"
)

// TestReceiptMachine goes through the whole table: every state, every receipt.
func TestReceiptMachine(t *testing.T) {
	t.Parallel()
	receipts := []string{"sent", "delivered", "read", "failed", "seen"}
	for _, row := range []struct {
		from   Status
		reason string
		to     [5]Status // "" stays
	}{
		{StatusPending, "dns", [5]Status{StatusSent, StatusDelivered, StatusRead, StatusFailed}},
		{StatusUncertain, ReasonUncertain, [5]Status{StatusSent, StatusDelivered, StatusRead, StatusFailed}},
		{StatusSent, "", [5]Status{"", StatusDelivered, StatusRead, StatusFailed}},
		{StatusDelivered, "", [5]Status{"", "", StatusRead, StatusFailed}},
		{StatusRead, "", [5]Status{}},
		{StatusFailed, ReasonReceipt, [5]Status{}},
		{StatusFailed, ReasonUncertain, [5]Status{StatusSent, StatusDelivered, StatusRead}},
		{StatusFailed, ReasonExhausted, [5]Status{StatusSent, StatusDelivered, StatusRead}},
	} {
		for i, r := range receipts {
			k := known{Status: row.from, Reason: row.reason}
			at := time.Unix(1, 0)
			fresh := k.apply(channel.Receipt{Status: r, At: at, Error: "why"})
			want := row.to[i]
			if want == "" {
				want = row.from
			}
			if k.Status != want {
				t.Errorf("%s (%s) + %s = %s, want %s", row.from, row.reason, r, k.Status, want)
			}
			if k.Status != row.from && !fresh {
				t.Errorf("%s + %s: a change is no news", row.from, r)
			}
			if k.Status == StatusFailed && row.from != StatusFailed && (k.Reason != ReasonReceipt || k.LastError != "why") {
				t.Errorf("%s + failed: reason %q, error %q", row.from, k.Reason, k.LastError)
			}
			// Once more changes nothing, and keeps the first time.
			before := k
			if k.apply(channel.Receipt{Status: r, At: at.Add(time.Hour)}) || k != before {
				t.Errorf("%s + %s twice: %+v, then %+v", row.from, r, before, k)
			}
		}
	}
}

func apply(t testing.TB, w *world, tenant tenants.ID, ch uuid.UUID, receipts ...channel.Receipt) (applied, unknown int) {
	t.Helper()
	err := pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) (err error) {
		applied, unknown, err = w.ApplyReceiptsTx(t.Context(), tx, tenant, ch, receipts)
		return err
	})
	if err != nil {
		t.Fatalf("ApplyReceiptsTx: %v", err)
	}
	return applied, unknown
}

func TestReceiptsAreScopedAndForwardOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch, otherChannel := w.newChannel(t, w.tenant, nil), w.newChannel(t, w.tenant, nil)
	stranger := w.newTenant(t)
	w.adapter.send = func(context.Context, *channel.Channel, channel.Outbound) channel.Outcome {
		return channel.Outcome{Kind: channel.Sent, ProviderMessageID: "wamid.1"}
	}
	posted := w.post(t, w.newConversation(t, ch), "x")[0]
	w.drain(t)
	d := w.only(t, posted)
	if d.ProviderMessageID != "wamid.1" {
		t.Fatalf("delivery %+v", d)
	}
	at := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	for name, who := range map[string]struct {
		tenant tenants.ID
		ch     uuid.UUID
	}{"another channel": {w.tenant, otherChannel}, "another tenant": {stranger, ch}} {
		a, u := apply(t, w, who.tenant, who.ch,
			channel.Receipt{DeliveryID: &d.ID, Status: "failed"}, channel.Receipt{ProviderID: "wamid.1", Status: "failed"})
		if a != 0 || u != 2 || w.only(t, posted).Status != StatusSent {
			t.Errorf("%s: applied %d, unknown %d", name, a, u)
		}
	}
	missing := newID()
	a, u := apply(t, w, w.tenant, ch,
		channel.Receipt{ProviderID: "wamid.1", Status: "read", At: at.Add(time.Minute)},
		channel.Receipt{DeliveryID: &d.ID, Status: "delivered", At: at},
		channel.Receipt{ProviderID: "wamid.1", Status: "sent", At: at.Add(-time.Minute)},
		channel.Receipt{ProviderID: "wamid.unknown", Status: "read"},
		channel.Receipt{DeliveryID: &missing, Status: "read"},
		channel.Receipt{})
	if a != 3 || u != 3 {
		t.Errorf("applied %d, unknown %d; want 3 and 3", a, u)
	}
	got := w.only(t, posted)
	if got.Status != StatusRead || !got.ReadAt.Equal(at.Add(time.Minute)) || !got.DeliveredAt.Equal(at) || !got.SentAt.Equal(*d.SentAt) {
		t.Errorf("after read, delivered, sent: %+v", got)
	}
	apply(t, w, w.tenant, ch, channel.Receipt{DeliveryID: &d.ID, Status: "delivered", At: at.Add(time.Hour)})
	if again := w.only(t, posted); !again.DeliveredAt.Equal(at) || !again.UpdatedAt.Equal(got.UpdatedAt) {
		t.Errorf("a repeat changed the delivery: %+v", again)
	}
}

// TestReceiptsInParallel applies the same receipts in all orders at once, as three nodes would get them.
func TestReceiptsInParallel(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	ids := w.post(t, w.newConversation(t, ch), texts(10)...)
	w.drain(t)
	statuses := []string{"read", "delivered", "sent"}
	var wg sync.WaitGroup
	for i := range 12 {
		wg.Go(func() {
			var rs []channel.Receipt
			for j := range ids {
				activityID := ids[(i+j)%len(ids)]
				d := w.only(t, activityID)
				for k := range statuses {
					rs = append(rs, channel.Receipt{DeliveryID: &d.ID, Status: statuses[(i+k)%3], At: time.Now()})
				}
			}
			apply(t, w, w.tenant, ch, rs...)
		})
	}
	wg.Wait()
	for _, id := range ids {
		if d := w.only(t, id); d.Status != StatusRead || d.DeliveredAt == nil || d.ReadAt == nil {
			t.Errorf("delivery %+v", d)
		}
	}
}

// TestReceiptSettlesWhatWaits: news of a delivery that was about to be repeated, or is uncertain, ends it, and what waits
// behind it goes on at once.
func TestReceiptSettlesWhatWaits(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.RetryPolicy.BaseMS = 3_600_000 })
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		if out.Activity.Text == "next" {
			return channel.Outcome{Kind: channel.Sent}
		}
		return channel.Outcome{Kind: channel.Retry, Reason: channel.ReasonHeaderTimeout}
	}
	ids := w.post(t, w.newConversation(t, ch), "slow", "next")
	w.drain(t)
	d := w.only(t, ids[0])
	if d.Status != StatusPending || w.only(t, ids[1]).Attempts != 0 {
		t.Fatalf("delivery %+v", d)
	}
	apply(t, w, w.tenant, ch, channel.Receipt{DeliveryID: &d.ID, Status: "delivered", At: time.Now().Add(time.Hour)})
	if at := w.only(t, ids[0]).DeliveredAt; at == nil || at.After(time.Now().Add(time.Minute)) {
		t.Errorf("a time in the future was believed: %v", at)
	}
	w.drain(t)
	if d, next := w.only(t, ids[0]), w.only(t, ids[1]); d.Status != StatusDelivered || d.Attempts != 1 || d.ReadAt != nil || next.Status != StatusSent {
		t.Errorf("after the receipt: %+v, next %+v", d, next)
	}
}

// TestReceiptBeforeOutcome: the provider's news may be faster than the answer to the attempt.
func TestReceiptBeforeOutcome(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		apply(t, w, w.tenant, ch, channel.Receipt{DeliveryID: &out.DeliveryID, Status: "delivered", At: time.Now()})
		return channel.Outcome{Kind: channel.Sent, ProviderMessageID: "p"}
	}
	posted := w.post(t, w.newConversation(t, ch), "x")[0]
	w.drain(t)
	if d := w.only(t, posted); d.Status != StatusDelivered || d.Attempts != 1 || d.SentAt == nil || d.ProviderMessageID != "p" {
		t.Errorf("delivery %+v", d)
	}
}
