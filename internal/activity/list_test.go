package activity

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

// spread writes activities of the world's conversation into three months, n each, as if time had passed.
func (w *world) spread(t testing.TB, n int) {
	t.Helper()
	_, err := w.pool.Exec(t.Context(), `
		SELECT ensure_partitions(((now() AT TIME ZONE 'UTC') - interval '3 months')::date, 4)`)
	if err != nil {
		t.Fatal(err)
	}
	_, err = w.pool.Exec(t.Context(), `
		INSERT INTO activities (tenant_id, id, conversation_id, seq, type, sender, text, inserted_at)
		SELECT $1, (left(uuid_v7_floor(at)::text, 19) || right(gen_random_uuid()::text, 17))::uuid, $2, i, 'message', 'user', 'old', at
		FROM generate_series(1, $3::int * 3) AS i,
			LATERAL (SELECT now() - (3 - (i - 1) / $3::int) * interval '1 month') AS m (at)`, w.tenant, w.conv, n)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.pool.Exec(t.Context(), `UPDATE conversations SET last_seq = $2 WHERE id = $1`, w.conv, 3*n); err != nil {
		t.Fatal(err)
	}
}

func TestListAcrossMonths(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	w.spread(t, 10)
	now := w.must(t, w.message("new"))
	if now.Seq != 31 {
		t.Fatalf("seq %d", now.Seq)
	}
	if n := w.count(t, `SELECT count(DISTINCT tableoid) FROM activities`); n < 3 {
		t.Fatalf("the activities lie in %d partitions", n)
	}
	var seqs []int64
	for after, more := int64(0), true; more; {
		var page []Activity
		var err error
		page, more, err = w.store.List(t.Context(), w.tenant, w.conv, &w.channel, after, 4)
		if err != nil {
			t.Fatal(err)
		}
		for _, a := range page {
			seqs = append(seqs, a.Seq)
			after = a.Seq
		}
	}
	want := make([]int64, 31)
	for i := range want {
		want[i] = int64(i + 1)
	}
	if diff := cmp.Diff(want, seqs); diff != "" {
		t.Error(diff)
	}
	// An old month's message can be answered, changed and found by its id.
	page, _, err := w.store.List(t.Context(), w.tenant, w.conv, nil, 0, 1)
	if err != nil {
		t.Fatal(err)
	}
	n := w.message("corrected")
	n.Type, n.ReplyToID = TypeMessageUpdate, &page[0].ID
	w.must(t, n)
	if got, err := w.store.Get(t.Context(), w.tenant, page[0].ID); err != nil || got.EditedAt == nil {
		t.Errorf("%+v, %v", got, err)
	}
	if list, more, err := w.store.List(t.Context(), w.tenant, w.conv, nil, 99, 10); err != nil || more || len(list) != 0 {
		t.Errorf("beyond the end: %v, %v, %v", list, more, err)
	}
}

// The reads use an index of each partition, and none reads what it does not need.
func TestPlans(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	w.spread(t, 2000)
	for range 20 {
		w.newConversation(t)
	}
	if _, err := w.pool.Exec(t.Context(), `ANALYZE`); err != nil {
		t.Fatal(err)
	}
	ids := make([]uuid.UUID, 3)
	for i := range ids {
		if err := w.pool.QueryRow(t.Context(), `SELECT id FROM activities WHERE seq = $1`, 1+i*2000).Scan(&ids[i]); err != nil {
			t.Fatal(err)
		}
	}
	tenant := []uuid.UUID{w.tenant, w.tenant, w.tenant}
	for name, q := range map[string]struct {
		sql  string
		args []any
		rows float64 // at most so many activities read
	}{
		"list":      {listSQL, []any{w.tenant, w.conv, int64(3000), 101, w.channel, MaxPageBytes}, 110},
		"get":       {getSQL, []any{w.tenant, ids[0]}, 1},
		"originals": {originalsSQL, []any{tenant, ids}, 3},
		"replied":   {repliedSQL, []any{tenant, ids}, 3},
		"stamp":     {stampSQL, []any{tenant, ids, []bool{true, true, true}, []bool{false, false, false}}, 3},
	} {
		plan := explain(t, w, q.sql, q.args...)
		read := 0.0
		walk(plan, func(node map[string]any) {
			relation, _ := node["Relation Name"].(string)
			if !strings.HasPrefix(relation, "activities_p") {
				return
			}
			kind := node["Node Type"].(string)
			loops := node["Actual Loops"].(float64)
			if kind == "Seq Scan" && loops > 0 {
				t.Errorf("%s reads all of %s", name, relation)
			}
			if kind != "ModifyTable" {
				removed, _ := node["Rows Removed by Filter"].(float64)
				read += (node["Actual Rows"].(float64) + removed) * loops
			}
		})
		if read == 0 || read > q.rows {
			t.Errorf("%s reads %v activities, want 1 to %v", name, read, q.rows)
		}
	}
}

func explain(t testing.TB, w *world, sql string, args ...any) map[string]any {
	t.Helper()
	var text []byte
	if err := w.pool.QueryRow(t.Context(), "EXPLAIN (ANALYZE, FORMAT JSON) "+sql, args...).Scan(&text); err != nil {
		t.Fatal(err)
	}
	var plans []struct{ Plan map[string]any }
	if err := json.Unmarshal(text, &plans); err != nil {
		t.Fatal(err)
	}
	return plans[0].Plan
}

func walk(node map[string]any, visit func(map[string]any)) {
	visit(node)
	children, _ := node["Plans"].([]any)
	for _, c := range children {
		walk(c.(map[string]any), visit)
	}
}

// What a batch costs: BEGIN, the lock time-out and the insertion in one round trip; the deliveries; COMMIT. Replies and
// repeats, and nothing else, cost more.
func TestStatements(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	var statements []string
	counter := postgres.CountQueries(func(sql string) {
		words := strings.Fields(sql)
		statements = append(statements, strings.ToUpper(words[0]+" "+words[min(1, len(words)-1)]))
	})
	s := NewStore(pgtest.Open(t, w.url, postgres.Options{Tracer: counter}), toChannel{w.channel}, w.lanes, Options{})
	run(t, s)
	msg := w.must(t, w.message("x"))
	reply := w.keyed("r", "re")
	reply.ReplyToID = &msg.ID
	many := make([]New, 100)
	for i := range many {
		many[i] = w.message("x")
	}
	head := []string{"BEGIN BEGIN", "SELECT SET_CONFIG('LOCK_TIMEOUT',"}
	body := []string{"WITH INPUT", "WITH WORK", "COMMIT COMMIT"}
	for _, tt := range []struct {
		name  string
		items []New
		want  []string
	}{
		{"one", []New{w.keyed("k", "x")}, slices.Concat(head, body)},
		{"a hundred", many, slices.Concat(head, body)},
		{"reply", []New{reply}, slices.Concat(head, []string{"WITH INPUT", "SELECT I.ORD,"}, body)},
		{"repeat", []New{w.keyed("k", "x")}, slices.Concat(head, []string{"WITH INPUT", "SELECT I.ORD,", "SELECT A.TENANT_ID,", "COMMIT COMMIT"})},
		{"refused", []New{{TenantID: w.tenant, ConversationID: w.conv}}, nil},
	} {
		statements = nil
		for _, r := range s.Append(t.Context(), tt.items) {
			if r.Err != nil && tt.want != nil {
				t.Fatal(tt.name, r.Err)
			}
		}
		if diff := cmp.Diff(tt.want, statements); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// The broadcast comes after the commit and in the order of seq.
func TestBroadcast(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	var got []int64
	s := NewStore(w.pool, toChannel{w.channel}, w.lanes, Options{Broadcast: func(list []Activity) {
		for _, a := range list {
			got = append(got, a.Seq)
			if _, err := w.store.Get(t.Context(), a.TenantID, a.ID); err != nil {
				t.Errorf("seq %d is broadcast and not there: %v", a.Seq, err)
			}
		}
	}})
	run(t, s)
	ctx := t.Context()
	// Append returns after the broadcast of what it waits for: got needs no lock.
	results := s.Append(ctx, []New{w.message("a"), w.keyed("k", "b"), w.keyed("k", "b"), {}, w.message("c")})
	if diff := cmp.Diff([]string{"seq 1", "seq 2", "repeat 2", "invalid /sender", "seq 3"}, describe(results)); diff != "" {
		t.Error(diff)
	}
	var after func()
	err := pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) (err error) {
		_, after, err = s.AppendTx(ctx, tx, []New{w.message("d")})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	after()
	if diff := cmp.Diff([]int64{1, 2, 3, 4}, got); diff != "" {
		t.Error(diff)
	}
}

// A page of large activities ends early and says that there is more; nothing is skipped, and one that is larger than a page
// by itself still comes.
func TestPagesAreBoundedInBytes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, Options{})
	const count = 100
	items := make([]New, count)
	for i := range items {
		items[i] = w.message(strings.Repeat("x", MaxText))
		items[i].Metadata = json.RawMessage(`{"a":"` + strings.Repeat("y", MaxMetadata-8) + `"}`)
	}
	w.append(t, items...)
	var seen []int64
	for after, more := int64(0), true; more; {
		var page []Activity
		var err error
		if page, more, err = w.store.List(t.Context(), w.tenant, w.conv, nil, after, MaxPage); err != nil {
			t.Fatal(err)
		}
		if bytes := len(page) * (MaxText + MaxMetadata); bytes > MaxPageBytes+MaxText+MaxMetadata || len(page) == 0 {
			t.Fatalf("a page of %d activities, %d bytes", len(page), bytes)
		}
		for _, a := range page {
			seen, after = append(seen, a.Seq), a.Seq
		}
	}
	if len(seen) != count || seen[0] != 1 || seen[count-1] != count {
		t.Errorf("pages hold %v", seen)
	}
}
