package delivery

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/activity"
	"converger/internal/channel"
)

func TestBackoff(t *testing.T) {
	t.Parallel()
	s := time.Second
	for name, test := range map[string]struct {
		policy     channel.RetryPolicy
		retryAfter time.Duration
		want       []time.Duration // after attempts 1, 2, …, without jitter
	}{
		"default":                    {channel.RetryPolicy{}, 0, []time.Duration{30 * s, 90 * s, 270 * s, 810 * s, 2430 * s, 3600 * s, 3600 * s}},
		"linear":                     {channel.RetryPolicy{Backoff: channel.BackoffLinear}, 0, []time.Duration{10 * s, 20 * s, 30 * s}},
		"fixed":                      {channel.RetryPolicy{Backoff: channel.BackoffFixed, BaseMS: 500}, 0, []time.Duration{s / 2, s / 2}},
		"a maximum":                  {channel.RetryPolicy{MaxMS: 60_000}, 0, []time.Duration{30 * s, 60 * s, 60 * s}},
		"retry-after lengthens":      {channel.RetryPolicy{}, 120 * s, []time.Duration{120 * s, 120 * s, 270 * s}},
		"retry-after never shortens": {channel.RetryPolicy{}, s, []time.Duration{30 * s, 90 * s}},
		"retry-after is capped":      {channel.RetryPolicy{}, 999_999_999 * s, []time.Duration{3600 * s}},
		"nothing overflows":          {channel.RetryPolicy{BaseMS: 1 << 40, MaxMS: 1 << 41}, 0, []time.Duration{1 << 41 * time.Millisecond}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for i, want := range test.want {
				if got := backoff(test.policy, i+1, test.retryAfter, 0); got != want {
					t.Errorf("after attempt %d: %s, want %s", i+1, got, want)
				}
				got := backoff(test.policy, i+1, test.retryAfter, 0.999)
				if got <= want || float64(got) > 1.1*float64(want) {
					t.Errorf("after attempt %d with jitter: %s, want up to a tenth more than %s", i+1, got, want)
				}
			}
		})
	}
	if got := backoff(channel.RetryPolicy{}, 1_000_000, 0, 0); got != time.Hour {
		t.Errorf("after a million attempts: %s", got)
	}
}

func TestTimeout(t *testing.T) {
	t.Parallel()
	for ms, want := range map[int]time.Duration{0: 15 * time.Second, 2000: 2 * time.Second, 600_000: 30 * time.Second} {
		if got := timeout(channel.RetryPolicy{TimeoutMS: ms}, 30*time.Second); got != want {
			t.Errorf("timeout_ms %d: %s, want %s", ms, got, want)
		}
	}
}

func TestStorable(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"":            "",
		"plain":       "plain",
		"a\x00b\xff":  "a\uFFFDb\uFFFD",
		"12345678é90": "12345678",
	} {
		if got := storable(in, 9); got != want {
			t.Errorf("storable(%q) = %q, want %q", in, got, want)
		}
	}
}

func FuzzStorable(f *testing.F) {
	f.Add("é\x00\xff", 3)
	f.Fuzz(func(t *testing.T, s string, limit int) {
		limit = max(0, limit%4096)
		got := storable(s, limit)
		if len(got) > limit || !utf8.ValidString(got) || strings.ContainsRune(got, 0) {
			t.Errorf("storable(%q, %d) = %q", s, limit, got)
		}
	})
}

func TestTargets(t *testing.T) {
	t.Parallel()
	webhook, echo, deaf := newID(), newID(), newID()
	dir := &directory{channels: map[uuid.UUID]channel.Channel{
		webhook: {ID: webhook, Type: channel.TypeWebhook, Mode: channel.ModeDuplex, Status: channel.StatusInactive, Ordered: true},
		echo:    {ID: echo, Type: channel.TypeEcho, Mode: channel.ModeOutbound},
		deaf:    {ID: deaf, Type: channel.TypeWebhook, Mode: channel.ModeInbound},
	}}
	s := NewService(nil, dir, channel.NewRegistry(&adapter{typ: channel.TypeWebhook}, &adapter{typ: channel.TypeEcho}), dir, Options{})
	for name, test := range map[string]struct {
		ch   uuid.UUID
		new  activity.New
		want bool
	}{
		"a message":                      {webhook, activity.New{Type: activity.TypeMessage, Sender: "u"}, true},
		"a message to echo":              {echo, activity.New{Type: activity.TypeMessage, Sender: "u"}, true},
		"to its author":                  {webhook, activity.New{Type: activity.TypeMessage, Sender: "u", ParticipantExternalID: "u"}, false},
		"of another":                     {webhook, activity.New{Type: activity.TypeMessage, Sender: "v", ParticipantExternalID: "u"}, true},
		"without author and participant": {webhook, activity.New{Type: activity.TypeMessage}, true},
		"an own reply":                   {echo, activity.New{Type: activity.TypeMessage, Sender: "bot", Caller: "echo"}, false},
		"typing":                         {webhook, activity.New{Type: activity.TypeTyping, Sender: "u"}, true},
		"typing to people":               {echo, activity.New{Type: activity.TypeTyping, Sender: "u"}, false},
		"life cycle":                     {webhook, activity.New{Type: activity.TypeConversationUpdate, Sender: "system"}, true},
		"life cycle to people":           {echo, activity.New{Type: activity.TypeConversationUpdate, Sender: "system"}, false},
		"receipt":                        {webhook, activity.New{Type: activity.TypeDeliveryReceipt, Sender: "system"}, false},
		"a channel that only receives":   {deaf, activity.New{Type: activity.TypeMessage, Sender: "u"}, false},
		"an unknown channel":             {newID(), activity.New{Type: activity.TypeMessage, Sender: "u"}, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := s.Targets(test.ch, &test.new)
			if (len(got) == 1) != test.want {
				t.Fatalf("targets %v, want one: %t", got, test.want)
			}
			if test.want && (got[0] != activity.Target{ChannelID: test.ch, Ordered: dir.channels[test.ch].Ordered}) {
				t.Errorf("target %+v", got[0])
			}
		})
	}
}

func TestTargetsOfRules(t *testing.T) {
	t.Parallel()
	tenant, source, own := newID(), newID(), newID()
	crm, bot, off, deaf, foreign, gone := newID(), newID(), newID(), newID(), newID(), newID()
	dir := &directory{channels: map[uuid.UUID]channel.Channel{
		source:  {TenantID: tenant, ID: source, Type: channel.TypeWhatsAppMeta, Mode: channel.ModeInbound, Status: channel.StatusActive},
		own:     {TenantID: tenant, ID: own, Type: channel.TypeWebhook, Mode: channel.ModeDuplex, Status: channel.StatusInactive, Ordered: true},
		crm:     {TenantID: tenant, ID: crm, Type: channel.TypeWebhook, Mode: channel.ModeOutbound, Status: channel.StatusActive, Ordered: true},
		bot:     {TenantID: tenant, ID: bot, Type: channel.TypeEcho, Mode: channel.ModeOutbound, Status: channel.StatusActive},
		off:     {TenantID: tenant, ID: off, Type: channel.TypeWebhook, Mode: channel.ModeDuplex, Status: channel.StatusInactive},
		deaf:    {TenantID: tenant, ID: deaf, Type: channel.TypeWebhook, Mode: channel.ModeInbound, Status: channel.StatusActive},
		foreign: {TenantID: newID(), ID: foreign, Type: channel.TypeWebhook, Mode: channel.ModeDuplex, Status: channel.StatusActive},
	}, routes: map[uuid.UUID][]uuid.UUID{
		source: {crm, bot, off, deaf, foreign, gone},
		own:    {bot, crm},
		crm:    {own}, // not followed from the others
		gone:   {crm},
	}}
	s := NewService(nil, dir, channel.NewRegistry(&adapter{typ: channel.TypeWebhook}, &adapter{typ: channel.TypeEcho}), dir, Options{})
	for name, test := range map[string]struct {
		ch   uuid.UUID
		new  activity.New
		want []uuid.UUID
	}{
		"those that are active, send and are ours": {source, activity.New{Type: activity.TypeMessage, Sender: "u"}, []uuid.UUID{crm, bot}},
		"also what the participant wrote":          {source, activity.New{Type: activity.TypeMessage, Sender: "u", ParticipantExternalID: "u"}, []uuid.UUID{crm, bot}},
		"the own channel first, though inactive":   {own, activity.New{Type: activity.TypeMessage, Sender: "agent", ParticipantExternalID: "u"}, []uuid.UUID{own, bot, crm}},
		"the author is spared the copy, they not":  {own, activity.New{Type: activity.TypeMessage, Sender: "u", ParticipantExternalID: "u"}, []uuid.UUID{bot, crm}},
		"a bot's reply not to bots":                {own, activity.New{Type: activity.TypeMessage, Sender: "bot", Caller: "echo"}, []uuid.UUID{own, crm}},
		"life cycle not to people":                 {source, activity.New{Type: activity.TypeConversationUpdate, Sender: "system"}, []uuid.UUID{crm}},
		"receipts to nobody":                       {source, activity.New{Type: activity.TypeDeliveryReceipt, Sender: "system"}, nil},
		"a deleted source leads nowhere":           {gone, activity.New{Type: activity.TypeMessage, Sender: "u"}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var want []activity.Target
			for _, id := range test.want {
				want = append(want, activity.Target{ChannelID: id, Ordered: dir.channels[id].Ordered})
			}
			if diff := cmp.Diff(want, s.Targets(test.ch, &test.new)); diff != "" {
				t.Errorf("targets (-want +got):\n%s", diff)
			}
		})
	}
}

func TestListAndGet(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	ch := w.newChannel(t, w.tenant, nil)
	conv := w.newConversation(t, ch)
	ids := w.post(t, conv, texts(7)...)
	stranger := w.newTenant(t)
	w.adapter.send = func(_ context.Context, _ *channel.Channel, out channel.Outbound) channel.Outcome {
		if out.Activity.Text == "m002" {
			return channel.Outcome{Kind: channel.Failed, Reason: channel.ReasonRejected, Error: "no"}
		}
		return channel.Outcome{Kind: channel.Sent}
	}
	w.drain(t)
	var got []string
	before := uuid.Nil
	for {
		page, more, err := w.List(t.Context(), w.tenant, Filter{}, before, 3)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range page {
			got = append(got, *d.Activity.Text)
			before = d.ID
		}
		if !more {
			break
		}
	}
	if strings.Join(got, " ") != "m006 m005 m004 m003 m002 m001 m000" {
		t.Errorf("pages, newest first: %v", got)
	}
	now := time.Now()
	other := newID()
	for name, test := range map[string]struct {
		f    Filter
		want int
	}{
		"failed":        {Filter{Status: StatusFailed}, 1},
		"channel":       {Filter{ChannelID: &ch}, 7},
		"other channel": {Filter{ChannelID: &other}, 0},
		"activity":      {Filter{ActivityID: &ids[0]}, 1},
		"past":          {Filter{To: now.Add(-time.Hour)}, 0},
		"present":       {Filter{From: now.Add(-time.Hour), To: now.Add(time.Hour)}, 7},
	} {
		page, _, err := w.List(t.Context(), w.tenant, test.f, uuid.Nil, 100)
		if err != nil || len(page) != test.want {
			t.Errorf("%s: %d, %v; want %d", name, len(page), err, test.want)
		}
	}
	d := w.only(t, ids[2])
	if got, err := w.Get(t.Context(), w.tenant, d.ID); err != nil || got.LastError != "no" || got.Activity.ConversationID != conv {
		t.Errorf("Get: %+v, %v", got, err)
	}
	if _, err := w.Get(t.Context(), stranger, d.ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("Get by another tenant: %v", err)
	}
	if _, err := w.Attempts(t.Context(), stranger, d.ID); !errors.Is(err, ErrNotFound) {
		t.Errorf("Attempts by another tenant: %v", err)
	}
	if page, _, err := w.List(t.Context(), stranger, Filter{}, uuid.Nil, 10); err != nil || len(page) != 0 {
		t.Errorf("List by another tenant: %d, %v", len(page), err)
	}
}

// A page of deliveries of large activities ends early and says that there is more.
func TestPagesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	large := strings.Repeat("x", 64<<10)
	sent := make([]string, 80) // 5 MiB
	for i := range sent {
		sent[i] = large
	}
	w.post(t, w.newConversation(t, w.newChannel(t, w.tenant, nil)), sent...)
	seen, pages := 0, 0
	for before, more := uuid.Nil, true; more; pages++ {
		var page []Delivery
		var err error
		if page, more, err = w.List(t.Context(), w.tenant, Filter{}, before, 500); err != nil {
			t.Fatal(err)
		}
		if bytes := len(page) * len(large); bytes > activity.MaxPageBytes+2*len(large) || len(page) == 0 {
			t.Fatalf("a page of %d deliveries, %d bytes", len(page), bytes)
		}
		seen, before = seen+len(page), page[len(page)-1].ID
	}
	if seen != len(sent) || pages < 2 {
		t.Errorf("%d deliveries on %d pages, want %d on some", seen, pages, len(sent))
	}
}

func TestParseStatus(t *testing.T) {
	t.Parallel()
	if s, err := ParseStatus("read"); s != StatusRead || err != nil {
		t.Errorf("read: %q, %v", s, err)
	}
	if _, err := ParseStatus("lost"); !errors.Is(err, ErrUnknownStatus) {
		t.Errorf("lost: %v", err)
	}
}

// TestPlansUseIndexes: plans are cached, and made while tables are small. One that reads a whole partition then stays for a
// while when they are not. What was analysed while it was empty, such as next month's partitions by somebody's ANALYZE, is
// the worst case: the planner takes it for empty until it is analysed again.
func TestPlansUseIndexes(t *testing.T) {
	t.Parallel()
	for _, analyzed := range []bool{false, true} {
		t.Run(fmt.Sprintf("analyzed=%t", analyzed), func(t *testing.T) {
			t.Parallel()
			testPlansUseIndexes(t, analyzed)
		})
	}
}

func testPlansUseIndexes(t *testing.T, analyzed bool) {
	w := newWorld(t, Options{})
	if analyzed {
		if _, err := w.pool.Exec(t.Context(), "ANALYZE"); err != nil {
			t.Fatal(err)
		}
	}
	u, n := uuid.UUID{1}, []uuid.UUID{{1}}
	i, s := []int32{1}, []string{"x"}
	ms := []int64{1}
	for name, q := range map[string]struct {
		sql  string
		args []any
	}{
		"enqueue":    {queryEnqueue, []any{n, n, n, n, i, n, n, n, n, ms, true, u, 1, n}},
		"expire":     {queryExpireAllTenants, nil},
		"ready":      {queryFirstReadyAllTenants, nil},
		"candidates": {queryCandidatesAllTenants, []any{100}},
		"in flight":  {queryInFlightAllTenants, nil},
		"settled":    {queryWakeSettled, []any{n}},
		"lanes":      {queryLanes, []any{n, n, 1, readAhead}},
		"slot":       {queryNextInSlot, []any{u}},
		"outcomes":   {queryOutcomes, []any{n, n, n, n, n, n, n, i, s, s, i, s, s, ms, i, s, s, ms, s, 1}},
		"end":        {queryEndTurns, []any{n, n, ms, ms, 1}},
		"give back":  {queryGiveBack, []any{n, n, ms, 1}},
		"lease":      {queryLeaseAllTenants, []any{u, 1, n, n, i}},
		"known":      {queryKnown, []any{u, u, n, s}},
		"fail":       {queryFailLane, []any{u, u, "x", "x"}},
		"give up":    {queryGiveUpAllTenants, []any{"x"}},
		"parked":     {queryParked, []any{u, u, 10}},
		"pick one":   {queryPickOne, []any{u, u}},
		"pick many":  {queryPickMany, []any{u, u, u, time.Now(), u, time.Now(), time.Now(), 500}},
		"more":       {queryMore, []any{u, u, u, time.Now(), u, time.Now(), time.Now()}},
		"retry":      {queryRetry, []any{u, n, n, "x", 1}},
		"wake":       {queryWakeRetried, []any{n}},
	} {
		var plan []string
		rows, err := w.pool.Query(t.Context(), "EXPLAIN "+q.sql, q.args...)
		if err == nil {
			plan, err = pgx.CollectRows(rows, pgx.RowTo[string])
		}
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		for _, line := range plan {
			if strings.Contains(line, "Seq Scan on deliveries") || strings.Contains(line, "Seq Scan on activities") || strings.Contains(line, "Seq Scan on lanes") {
				t.Errorf("%s reads a whole table:\n%s", name, strings.Join(plan, "\n"))
				break
			}
		}
	}
}
