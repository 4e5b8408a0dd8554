package delivery

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/channel"
	"converger/internal/fault"
	"converger/internal/tenants"
)

var ruleActor = tenants.Actor{Type: tenants.ActorTenantAPI, ID: "key-1", RequestID: "req-1"}

// newRules makes a store over a world's database, and a few duplex channels of its tenant.
func newRules(t testing.TB, channels int) (*Rules, *world, []uuid.UUID) {
	t.Helper()
	w := newWorld(t, Options{})
	ids := make([]uuid.UUID, channels)
	for i := range ids {
		ids[i] = w.newChannel(t, w.tenant, nil)
	}
	return NewRules(w.pool, channel.NewRegistry(w.adapter, &adapter{typ: channel.TypeEcho})), w, ids
}

func newRule(t testing.TB, s *Rules, tenant tenants.ID, name string, source uuid.UUID, targets ...uuid.UUID) RoutingRule {
	t.Helper()
	r, err := s.Create(t.Context(), ruleActor, tenant, NewRoutingRule{Name: name, SourceChannelID: source, TargetChannelIDs: targets})
	if err != nil {
		t.Fatalf("create rule %s: %v", name, err)
	}
	return r
}

// faults lists what an error refuses, as "pointer code: detail".
func faults(t testing.TB, err error) []string {
	t.Helper()
	var invalid *fault.Invalid
	if err != nil && !errors.As(err, &invalid) {
		t.Fatalf("error %v is no *fault.Invalid", err)
	}
	var out []string
	if invalid != nil {
		for _, f := range invalid.Fields {
			out = append(out, f.Pointer+" "+f.Code+": "+f.Detail)
		}
	}
	return out
}

// trail is the audit log of rules: actions with their changes, oldest first.
func trail(t testing.TB, w *world) (out []string) {
	t.Helper()
	rows, err := w.pool.Query(t.Context(), `SELECT action, resource_id, changes #>> '{before,name}', changes #>> '{after,name}', actor_type, request_id
		FROM audit_log WHERE resource_type = 'routing_rule' AND tenant_id = $1 ORDER BY id`, w.tenant)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var action, id, actor, request string
		var before, after *string
		if err := rows.Scan(&action, &id, &before, &after, &actor, &request); err != nil {
			t.Fatal(err)
		}
		out = append(out, fmt.Sprint(action, " ", deref(before), ">", deref(after), " by ", actor, " ", request))
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

func ptr[T any](v T) *T { return &v }

func TestRules(t *testing.T) {
	t.Parallel()
	s, w, ch := newRules(t, 4)
	ctx := t.Context()
	b := newRule(t, s, w.tenant, "b", ch[0], ch[1], ch[2], ch[1])
	want := RoutingRule{TenantID: w.tenant, ID: b.ID, Name: "b", SourceChannelID: ch[0], TargetChannelIDs: []uuid.UUID{ch[1], ch[2]}, Enabled: true,
		Version: b.Version, InsertedAt: b.InsertedAt, UpdatedAt: b.UpdatedAt}
	if diff := cmp.Diff(want, b); diff != "" || b.Version < 2 || b.InsertedAt.IsZero() {
		t.Errorf("created (-want +got):\n%s", diff)
	}
	a := newRule(t, s, w.tenant, "a", ch[1], ch[3])
	list, err := s.List(ctx, w.tenant)
	if diff := cmp.Diff([]RoutingRule{a, b}, list); diff != "" || err != nil {
		t.Errorf("list (-want +got): %v\n%s", err, diff)
	}

	// A change is partial, marks the row with a newer version, and is audited; none is no change.
	changed, err := s.Update(ctx, ruleActor, w.tenant, b.ID, RoutingRulePatch{TargetChannelIDs: []uuid.UUID{ch[3]}})
	want.TargetChannelIDs, want.Version, want.UpdatedAt = []uuid.UUID{ch[3]}, changed.Version, changed.UpdatedAt
	if diff := cmp.Diff(want, changed); diff != "" || err != nil || changed.Version <= a.Version || !changed.UpdatedAt.After(b.UpdatedAt) {
		t.Errorf("changed (-want +got): %v\n%s", err, diff)
	}
	same, err := s.Update(ctx, ruleActor, w.tenant, b.ID, RoutingRulePatch{Name: ptr("b"), Enabled: ptr(true), SourceChannelID: &ch[0], TargetChannelIDs: []uuid.UUID{ch[3], ch[3]}})
	if diff := cmp.Diff(changed, same); diff != "" || err != nil {
		t.Errorf("unchanged (-want +got): %v\n%s", err, diff)
	}
	// Who expects another version changes nothing; one of several is enough.
	if _, err := s.Update(ctx, ruleActor, w.tenant, b.ID, RoutingRulePatch{Name: ptr("lost")}, b.Version); !errors.Is(err, tenants.ErrChanged) {
		t.Errorf("update of an old version: %v", err)
	}
	if err := s.Delete(ctx, ruleActor, w.tenant, b.ID, b.Version, 0); !errors.Is(err, tenants.ErrChanged) {
		t.Errorf("delete of an old version: %v", err)
	}
	if off, err := s.Update(ctx, ruleActor, w.tenant, b.ID, RoutingRulePatch{Enabled: ptr(false)}, b.Version, changed.Version); err != nil || off.Enabled {
		t.Errorf("switched off: %+v, %v", off, err)
	}
	if got, err := s.Get(ctx, w.tenant, b.ID); err != nil || got.Enabled || got.Name != "b" {
		t.Errorf("got %+v, %v", got, err)
	}

	// Names are unique among the living, and each tenant has its own.
	taken := []string{"/name conflict: has already been taken"}
	_, err = s.Create(ctx, ruleActor, w.tenant, NewRoutingRule{Name: "a", SourceChannelID: ch[0], TargetChannelIDs: ch[1:2]})
	if diff := cmp.Diff(taken, faults(t, err)); diff != "" {
		t.Errorf("a name again (-want +got):\n%s", diff)
	}
	_, err = s.Update(ctx, ruleActor, w.tenant, b.ID, RoutingRulePatch{Name: ptr("a")})
	if diff := cmp.Diff(taken, faults(t, err)); diff != "" {
		t.Errorf("renamed to a name of another (-want +got):\n%s", diff)
	}
	if err := s.Delete(ctx, ruleActor, w.tenant, a.ID); err != nil {
		t.Fatal(err)
	}
	newRule(t, s, w.tenant, "a", ch[0], ch[1])
	stranger := w.newTenant(t)
	newRule(t, s, stranger, "a", w.newChannel(t, stranger, nil), w.newChannel(t, stranger, nil))

	// What is deleted, unknown or another tenant's is not there.
	for what, id := range map[string]uuid.UUID{"deleted": a.ID, "unknown": newID()} {
		for _, tenant := range []tenants.ID{w.tenant, stranger} {
			absent(t, s, tenant, id, what)
		}
	}
	absent(t, s, stranger, b.ID, "another tenant's")

	if diff := cmp.Diff([]string{"create >b by tenant_api req-1", "create >a by tenant_api req-1", "update b>b by tenant_api req-1",
		"toggle_enabled b>b by tenant_api req-1", "delete a> by tenant_api req-1", "create >a by tenant_api req-1"}, trail(t, w)); diff != "" {
		t.Errorf("audit log (-want +got):\n%s", diff)
	}
}

func absent(t *testing.T, s *Rules, tenant tenants.ID, id uuid.UUID, what string) {
	t.Helper()
	_, got := s.Get(t.Context(), tenant, id)
	_, changed := s.Update(t.Context(), ruleActor, tenant, id, RoutingRulePatch{Name: ptr("mine")})
	for i, err := range []error{got, changed, s.Delete(t.Context(), ruleActor, tenant, id)} {
		if !errors.Is(err, ErrRuleNotFound) {
			t.Errorf("%s, call %d: %v", what, i, err)
		}
	}
}

func TestRuleValidation(t *testing.T) {
	t.Parallel()
	s, w, ch := newRules(t, 23)
	inbound := func(c *channel.Channel) { c.Mode = channel.ModeInbound }
	ears, moreEars := w.newChannel(t, w.tenant, inbound), w.newChannel(t, w.tenant, inbound)
	// A type of this database that this program can't send by is as good as inbound-only.
	unknown := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.Type = "carrier_pigeon" })
	mouth := w.newChannel(t, w.tenant, func(c *channel.Channel) { c.Mode = channel.ModeOutbound })
	deleted := w.newChannel(t, w.tenant, nil)
	exec(t, w.pool, `UPDATE channels SET deleted_at = now() WHERE id = $1`, deleted)
	theirs := w.newChannel(t, w.newTenant(t), nil)
	newRule(t, s, w.tenant, "0 to 1", ch[0], ch[1])
	newRule(t, s, w.tenant, "1 to 2 and 3", ch[1], ch[2], ch[3])
	off := newRule(t, s, w.tenant, "3 to 4, off", ch[3], ch[4])
	if _, err := s.Update(t.Context(), ruleActor, w.tenant, off.ID, RoutingRulePatch{Enabled: ptr(false)}); err != nil {
		t.Fatal(err)
	}
	const tenant = "not_found: all channels must belong to the same tenant"
	const cycle = "/target_channel_ids conflict: would create a routing cycle"
	for name, test := range map[string]struct {
		in   NewRoutingRule
		want []string
	}{
		"nothing": {NewRoutingRule{}, []string{"/name required: is required", "/source_channel_id required: is required",
			"/target_channel_ids required: is required: name 1 to 20 channels"}},
		"no name":             {NewRoutingRule{Name: " ", SourceChannelID: ch[5], TargetChannelIDs: ch[6:7]}, []string{"/name required: is required"}},
		"a padded name":       {NewRoutingRule{Name: "a ", SourceChannelID: ch[5], TargetChannelIDs: ch[6:7]}, []string{"/name malformed: must not begin or end with a blank or hold control characters"}},
		"a long name":         {NewRoutingRule{Name: strings.Repeat("é", 201), SourceChannelID: ch[5], TargetChannelIDs: ch[6:7]}, []string{"/name too_long: must be at most 200 characters"}},
		"the longest name":    {NewRoutingRule{Name: strings.Repeat("é", 200), SourceChannelID: ch[5], TargetChannelIDs: ch[6:7]}, nil},
		"twenty targets":      {NewRoutingRule{SourceChannelID: ch[22], TargetChannelIDs: ch[2:22]}, nil},
		"twenty-one targets":  {NewRoutingRule{SourceChannelID: ch[22], TargetChannelIDs: ch[1:22]}, []string{"/target_channel_ids too_long: must name at most 20 channels"}},
		"itself":              {NewRoutingRule{SourceChannelID: ch[5], TargetChannelIDs: ch[4:6]}, []string{"/target_channel_ids conflict: cannot include the source channel"}},
		"a foreign source":    {NewRoutingRule{SourceChannelID: theirs, TargetChannelIDs: ch[:1]}, []string{"/source_channel_id " + tenant}},
		"a foreign target":    {NewRoutingRule{SourceChannelID: ch[5], TargetChannelIDs: []uuid.UUID{ch[6], theirs}}, []string{"/target_channel_ids " + tenant}},
		"an invented channel": {NewRoutingRule{SourceChannelID: newID(), TargetChannelIDs: []uuid.UUID{newID()}}, []string{"/source_channel_id " + tenant, "/target_channel_ids " + tenant}},
		"a deleted channel":   {NewRoutingRule{SourceChannelID: ch[5], TargetChannelIDs: []uuid.UUID{deleted}}, []string{"/target_channel_ids " + tenant}},
		"an outbound source": {NewRoutingRule{SourceChannelID: mouth, TargetChannelIDs: ch[:1]},
			[]string{"/source_channel_id conflict: source channel is outbound-only and cannot receive inbound messages"}},
		"inbound targets": {NewRoutingRule{SourceChannelID: ch[5], TargetChannelIDs: []uuid.UUID{ears, ch[6], moreEars, unknown}},
			[]string{fmt.Sprintf("/target_channel_ids conflict: these target channels are inbound-only and cannot deliver outbound: %s, %s, %s", ears, moreEars, unknown)}},
		"an inbound source and an outbound target": {NewRoutingRule{SourceChannelID: ears, TargetChannelIDs: []uuid.UUID{mouth}}, nil},
		"back":                              {NewRoutingRule{SourceChannelID: ch[1], TargetChannelIDs: ch[:1]}, []string{cycle}},
		"back over another":                 {NewRoutingRule{SourceChannelID: ch[3], TargetChannelIDs: []uuid.UUID{ch[7], ch[0]}}, []string{cycle}},
		"back, but off":                     {NewRoutingRule{SourceChannelID: ch[3], TargetChannelIDs: ch[:1], Enabled: ptr(false)}, nil},
		"back to what only a rule off does": {NewRoutingRule{SourceChannelID: ch[4], TargetChannelIDs: ch[:1]}, nil},
		"two ways to one place":             {NewRoutingRule{SourceChannelID: ch[0], TargetChannelIDs: ch[2:4]}, nil},
	} {
		if test.in.Name == "" && name != "nothing" {
			test.in.Name = name
		}
		r, err := s.Create(t.Context(), ruleActor, w.tenant, test.in)
		if diff := cmp.Diff(test.want, faults(t, err)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if err != nil {
			continue
		}
		if err := s.Delete(t.Context(), ruleActor, w.tenant, r.ID); err != nil {
			t.Fatal(err)
		}
	}
	if n := count(t, w.pool, `SELECT count(*) FROM routing_rules WHERE deleted_at IS NULL`); n != 3 {
		t.Errorf("%d rules are left, want the 3 from before", n)
	}
}

// A rule that was fine when it was switched off is looked at again when it is switched on.
func TestRuleCycleOnEnable(t *testing.T) {
	t.Parallel()
	s, w, ch := newRules(t, 3)
	ctx := t.Context()
	there := newRule(t, s, w.tenant, "there", ch[0], ch[1])
	set := func(id uuid.UUID, p RoutingRulePatch) []string {
		t.Helper()
		_, err := s.Update(ctx, ruleActor, w.tenant, id, p)
		return faults(t, err)
	}
	if f := set(there.ID, RoutingRulePatch{Enabled: ptr(false)}); f != nil {
		t.Fatal(f)
	}
	back := newRule(t, s, w.tenant, "back", ch[1], ch[0])
	cycle := []string{"/target_channel_ids conflict: would create a routing cycle"}
	if diff := cmp.Diff(cycle, set(there.ID, RoutingRulePatch{Enabled: ptr(true)})); diff != "" {
		t.Errorf("enabled (-want +got):\n%s", diff)
	}
	if f := set(there.ID, RoutingRulePatch{Enabled: ptr(true), TargetChannelIDs: ch[2:]}); f != nil {
		t.Errorf("enabled with another target: %v", f)
	}
	if diff := cmp.Diff(cycle, set(there.ID, RoutingRulePatch{TargetChannelIDs: ch[1:]})); diff != "" {
		t.Errorf("rewired (-want +got):\n%s", diff)
	}

	// What a deleted channel led to is no way any more; its rule can be renamed and switched off, but not be given new work.
	exec(t, w.pool, `UPDATE channels SET deleted_at = now() WHERE id = $1`, ch[1])
	if f := set(there.ID, RoutingRulePatch{Name: ptr("still there"), Enabled: ptr(false)}); f != nil {
		t.Errorf("renamed and switched off: %v", f)
	}
	if f := set(back.ID, RoutingRulePatch{Enabled: ptr(false)}); f != nil {
		t.Errorf("switched off: %v", f)
	}
	gone := []string{"/source_channel_id not_found: all channels must belong to the same tenant"}
	if diff := cmp.Diff(gone, set(back.ID, RoutingRulePatch{TargetChannelIDs: ch[2:]})); diff != "" {
		t.Errorf("other targets of a deleted source (-want +got):\n%s", diff)
	}
}

// Two rules that are each fine and together a cycle: however they race, one is refused.
func TestRulesAtOnceMakeNoCycle(t *testing.T) {
	t.Parallel()
	const n = 6
	s, w, ch := newRules(t, n)
	for round := range 5 {
		var wg sync.WaitGroup
		errs := make([]error, n)
		for i := range n {
			wg.Go(func() {
				_, errs[i] = s.Create(context.WithoutCancel(t.Context()), ruleActor, w.tenant, NewRoutingRule{
					Name: fmt.Sprint(round, i), SourceChannelID: ch[i], TargetChannelIDs: []uuid.UUID{ch[(i+1)%n]}})
			})
		}
		wg.Wait()
		refused := 0
		for _, err := range errs {
			if err != nil {
				refused++
				if diff := cmp.Diff([]string{"/target_channel_ids conflict: would create a routing cycle"}, faults(t, err)); diff != "" {
					t.Errorf("refused (-want +got):\n%s", diff)
				}
			}
		}
		if refused != 1 {
			t.Errorf("round %d: %d of %d rules around a circle were refused, want the last one", round, refused, n)
		}
		exec(t, w.pool, `UPDATE routing_rules SET deleted_at = now() WHERE deleted_at IS NULL`)
	}
}

func TestTooManyRules(t *testing.T) {
	t.Parallel()
	s, w, ch := newRules(t, 2)
	exec(t, w.pool, `INSERT INTO routing_rules (tenant_id, id, name, source_channel_id, target_channel_ids, version)
		SELECT $1, gen_random_uuid(), 'rule ' || i, $2, $3, 1 FROM generate_series(1, $4) i`, w.tenant, ch[0], ch[1:], MaxRules)
	in := NewRoutingRule{Name: "one more", SourceChannelID: ch[0], TargetChannelIDs: ch[1:]}
	if _, err := s.Create(t.Context(), ruleActor, w.tenant, in); !errors.Is(err, ErrTooManyRules) {
		t.Errorf("one rule too many: %v", err)
	}
	list, err := s.List(t.Context(), w.tenant)
	if err != nil || len(list) != MaxRules {
		t.Fatalf("%d rules listed, %v", len(list), err)
	}
	if err := s.Delete(t.Context(), ruleActor, w.tenant, list[0].ID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Create(t.Context(), ruleActor, w.tenant, in); err != nil {
		t.Errorf("in place of a deleted one: %v", err)
	}
}

// reaches agrees with the closure of the graph.
func TestReaches(t *testing.T) {
	t.Parallel()
	random := rand.New(rand.NewPCG(1, 2))
	found := 0
	for range 2000 {
		n := 1 + random.IntN(7)
		ids := make([]uuid.UUID, n)
		for i := range ids {
			ids[i] = newID()
		}
		leads := map[uuid.UUID][]uuid.UUID{}
		closure := make([][]bool, n) // ways of one step or more
		for i := range closure {
			closure[i] = make([]bool, n)
			for j := range n {
				if random.IntN(n+1) == 0 {
					leads[ids[i]] = append(leads[ids[i]], ids[j])
					closure[i][j] = true
				}
			}
		}
		for k := range n {
			for i := range n {
				for j := range n {
					closure[i][j] = closure[i][j] || closure[i][k] && closure[k][j]
				}
			}
		}
		from, to := random.IntN(n), random.IntN(n)
		want := from == to || closure[from][to]
		if want {
			found++
		}
		if got := reaches(leads, ids[from:from+1], ids[to]); got != want {
			t.Fatalf("%v from %v to %v: %v, want %v", leads, ids[from], ids[to], got, want)
		}
	}
	if found < 500 || found > 1900 {
		t.Errorf("%d of 2000 have a way: the graphs test nothing", found)
	}
}
