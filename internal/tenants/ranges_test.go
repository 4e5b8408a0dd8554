package tenants

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/fault"
)

func TestParseRange(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]string{
		"203.0.113.0/24": "203.0.113.0/24", "203.0.113.7": "203.0.113.7/32", "2001:db8::/32": "2001:db8::/32", "2001:DB8::1": "2001:db8::1/128",
		"::ffff:203.0.113.0/120": "203.0.113.0/24", "::ffff:203.0.113.7": "203.0.113.7/32", "::ffff:0:0/96": "0.0.0.0/0", "0.0.0.0/0": "0.0.0.0/0", "::/0": "::/0",
	} {
		if got, err := ParseRange("/cidr", text); err != nil || got.String() != want {
			t.Errorf("ParseRange(%q) = %v, %v; want %s", text, got, err, want)
		}
	}
	for _, text := range []string{
		"", " ", "x", "203.0.113.0/33", "203.0.113.0/-1", "203.0.113.0/024", "203.0.113.0/", "/24", "203.0.113.0/24 ", "fe80::1%eth0", "fe80::%eth0/64",
		"203.0.113.7/24", "2001:db8::1/32", "::ffff:0:0/90", "256.0.0.0/8", "010.0.0.0/8", "203.0.113.0-203.0.113.9",
	} {
		_, err := ParseRange("/cidr", text)
		wantInvalid(t, text, err, "/cidr", fault.Malformed)
	}
}

// What is taken for a range is one, written in one way, and has no bits behind its prefix.
func FuzzParseRange(f *testing.F) {
	for _, text := range []string{"203.0.113.0/24", "::ffff:203.0.113.0/120", "::/0", "fe80::1%eth0", "10.0.0.1/8", "::ffff:0:0/90"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseRange("/cidr", text)
		if err != nil {
			return
		}
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() || p.Addr().Zone() != "" {
			t.Errorf("ParseRange(%q) = %v", text, p)
		}
		if again, err := ParseRange("/cidr", p.String()); err != nil || again != p {
			t.Errorf("%v reads as %v, %v", p, again, err)
		}
	})
}

// The table answers as a walk over all ranges does.
func TestRangeKind(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	now := time.Unix(1_000_000, 0)
	randomAddr := func() netip.Addr {
		if r.IntN(2) == 0 {
			return netip.AddrFrom4([4]byte{10, byte(r.IntN(2)), byte(r.IntN(4)), byte(r.IntN(4))})
		}
		return netip.AddrFrom16([16]byte{0x20, 1, 0, 0, 0, 0, byte(r.IntN(2)), byte(r.IntN(2)), 15: byte(r.IntN(4))})
	}
	for range 200 {
		var entries []*rangeEntry
		taken := map[netip.Prefix]bool{}
		for range r.IntN(30) {
			addr := randomAddr()
			p := netip.PrefixFrom(addr, r.IntN(addr.BitLen()+1)).Masked()
			if taken[p] {
				continue
			}
			taken[p] = true
			e := &rangeEntry{id: uuid.New(), prefix: p, kind: []RangeKind{RangeDeny, RangeExempt}[r.IntN(2)]}
			if r.IntN(3) == 0 {
				e.expires = now.Add(time.Duration(r.IntN(3)-1) * time.Second) // before, at and after
			}
			entries = append(entries, e)
		}
		table := newAddressRanges(entries)
		if table.len() != len(entries) {
			t.Fatalf("%d ranges in the table, want %d", table.len(), len(entries))
		}
		for range 50 {
			addr, longest, want := randomAddr(), -1, RangeKind("")
			for _, e := range entries {
				if e.prefix.Contains(addr) && e.prefix.Bits() > longest && (e.expires.IsZero() || e.expires.After(now)) {
					longest, want = e.prefix.Bits(), e.kind
				}
			}
			if got := table.kind(addr, now); got != want {
				t.Fatalf("%v is %q, want %q", addr, got, want)
			}
		}
	}
	if got := newAddressRanges([]*rangeEntry{{prefix: netip.MustParsePrefix("0.0.0.0/0"), kind: RangeDeny}}).kind(netip.Addr{}, now); got != "" {
		t.Errorf("no address at all is %q", got)
	}
}

// A look-up stands in front of every request.
func TestRangeKindAllocatesNothing(t *testing.T) { // not parallel: it counts the allocations of the whole program
	var entries []*rangeEntry
	for _, cidr := range []string{"203.0.113.0/24", "10.0.0.0/8", "198.51.100.7/32", "2001:db8::/32", "2001:db8:1::/48"} {
		entries = append(entries, &rangeEntry{id: uuid.New(), prefix: netip.MustParsePrefix(cidr), kind: RangeDeny})
	}
	table, now, denied := newAddressRanges(entries), time.Now(), 0
	addrs := []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8:1::1"), netip.MustParseAddr("2001:db9::1")}
	allocs := testing.AllocsPerRun(100, func() {
		for _, a := range addrs {
			if table.kind(a, now) == RangeDeny {
				denied++
			}
		}
	})
	if allocs != 0 || denied != 2*101 {
		t.Errorf("%v allocations for %d look-ups, %d denied", allocs, len(addrs), denied)
	}
}

func TestAddressRangeStore(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	ctx := t.Context()
	expires := time.Now().Add(time.Hour).UTC().Truncate(time.Microsecond)
	prefix := netip.MustParsePrefix("203.0.113.0/24")
	r, err := s.CreateAddressRange(ctx, operator, NewAddressRange{Prefix: prefix, Kind: RangeDeny, Note: "scanner", ExpiresAt: &expires}, Caller{})
	if err != nil || r.Prefix != prefix || !r.ExpiresAt.Equal(expires) || r.Version != version(t, pool) {
		t.Fatalf("created %+v, %v", r, err)
	}
	row, _ := lastAudit(t, pool)
	sameJSON(t, "audit", row.Changes, `{"before":null,"after":{"cidr":"203.0.113.0/24","kind":"deny","note":"scanner","expires_at":"`+expires.Format(time.RFC3339Nano)+`"}}`)
	if row.TenantID != nil || row.Action != "create" || row.ResourceType != "address_range" || row.ResourceID != r.ID.String() {
		t.Errorf("audit %+v", row)
	}
	if got, err := s.GetAddressRange(ctx, r.ID); err != nil || got.ID != r.ID || got.Note != "scanner" {
		t.Errorf("got %+v, %v", got, err)
	}
	_, err = s.CreateAddressRange(ctx, operator, NewAddressRange{Prefix: prefix, Kind: RangeExempt}, Caller{})
	wantErr(t, "the same addresses again", err, ErrRangeExists)
	_, err = s.UpdateAddressRange(ctx, operator, r.ID, AddressRangePatch{}, Caller{}, r.Version-1)
	wantErr(t, "another version", err, ErrChanged)
	wantErr(t, "deleting another version", s.DeleteAddressRange(ctx, operator, r.ID, Caller{}, r.Version-1), ErrChanged)

	// What has expired gives way.
	if _, err := pool.Exec(ctx, `UPDATE address_ranges SET expires_at = now() - interval '1 second'`); err != nil {
		t.Fatal(err)
	}
	again, err := s.CreateAddressRange(ctx, operator, NewAddressRange{Prefix: prefix, Kind: RangeExempt}, Caller{})
	if err != nil {
		t.Fatalf("in place of an expired one: %v", err)
	}
	if list, err := s.ListAddressRanges(ctx, AddressRangeFilter{}, uuid.Nil, 10); err != nil || len(list) != 1 || list[0].ID != again.ID {
		t.Errorf("list %+v, %v", list, err)
	}
	_, err = s.GetAddressRange(ctx, r.ID)
	wantErr(t, "the expired one", err, ErrNotFound)
	if err := s.DeleteAddressRange(ctx, operator, again.ID, Caller{}, again.Version); err != nil {
		t.Fatal(err)
	}
	wantErr(t, "a second time", s.DeleteAddressRange(ctx, operator, again.ID, Caller{}), ErrNotFound)
	_, err = s.UpdateAddressRange(ctx, operator, again.ID, AddressRangePatch{}, Caller{})
	wantErr(t, "changing a deleted one", err, ErrNotFound)

	if _, err := pool.Exec(ctx, `INSERT INTO address_ranges (id, cidr, kind, version)
		SELECT gen_random_uuid(), network(('10.' || n / 256 || '.' || n % 256 || '.0/24')::inet), 'deny', 1 FROM generate_series(1, $1) n`, MaxAddressRanges); err != nil {
		t.Fatal(err)
	}
	_, err = s.CreateAddressRange(ctx, operator, NewAddressRange{Prefix: prefix, Kind: RangeDeny}, Caller{})
	wantErr(t, "one too many", err, ErrTooManyRanges)
	before := version(t, pool)
	if _, err := s.CreateAddressRange(ctx, operator, NewAddressRange{Kind: "x", Note: strings.Repeat("x", 501)}, Caller{}); err == nil || version(t, pool) != before {
		t.Errorf("an invalid range: %v, version %d then %d", err, before, version(t, pool))
	}
}

// A change, on whatever node, is in force on this one without a question.
func TestDirectoryFollowsAddressRanges(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	d := NewDirectory(pool, DirectoryOptions{PollEvery: 20 * time.Millisecond})
	if err := d.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	run(t, d)
	addr := netip.MustParseAddr("203.0.113.9")
	is := func(want RangeKind) {
		t.Helper()
		eventually(t, fmt.Sprintf("the address is %q", want), func() bool { return d.RangeKind(addr, time.Now()) == want })
	}
	wide, err := s.CreateAddressRange(t.Context(), operator, NewAddressRange{Prefix: netip.MustParsePrefix("203.0.0.0/16"), Kind: RangeDeny}, Caller{})
	if err != nil {
		t.Fatal(err)
	}
	is(RangeDeny)
	narrow, err := s.CreateAddressRange(t.Context(), operator, NewAddressRange{Prefix: netip.MustParsePrefix("203.0.113.0/24"), Kind: RangeExempt}, Caller{})
	if err != nil {
		t.Fatal(err)
	}
	is(RangeExempt)
	deny := RangeDeny
	if _, err := s.UpdateAddressRange(t.Context(), operator, narrow.ID, AddressRangePatch{Kind: &deny}, Caller{}); err != nil {
		t.Fatal(err)
	}
	is(RangeDeny)
	for _, id := range []uuid.UUID{wide.ID, narrow.ID} {
		if err := s.DeleteAddressRange(t.Context(), operator, id, Caller{}); err != nil {
			t.Fatal(err)
		}
	}
	is("")
	fresh := NewDirectory(pool, DirectoryOptions{})
	if err := fresh.Load(t.Context()); err != nil || fresh.RangeKind(addr, time.Now()) != "" {
		t.Errorf("a new node: %v, %q", err, fresh.RangeKind(addr, time.Now()))
	}
}

// Of many changes of one version one is made.
func TestExpectedVersions(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	tenant := newTenant(t, s, "Acme")
	var won, lost int
	var mu sync.Mutex
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			n := i + 1
			_, err := s.Update(t.Context(), operator, tenant.ID, TenantPatch{MaxInFlight: &n}, tenant.Version, -1)
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				won++
			} else {
				lost++
				wantErr(t, "the others", err, ErrChanged)
			}
		})
	}
	wg.Wait()
	if won != 1 || lost != 7 {
		t.Errorf("%d changes were made and %d refused, want 1 and 7", won, lost)
	}
	_, err := s.SetStatus(t.Context(), operator, tenant.ID, StatusActive, tenant.Version)
	wantErr(t, "a change of nothing, from an old version", err, ErrChanged)
}

func TestKeepLastOperatorToken(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	ctx := t.Context()
	create := func(scopes ...string) OperatorToken {
		t.Helper()
		token, _, err := s.CreateOperatorToken(ctx, operator, NewOperatorToken{Name: "t", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		return token
	}
	reader, one, two := create("read"), create("write"), create("read", "write")
	now := time.Now()
	var lost int
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, token := range []OperatorToken{one, two} { // each is the last for the other
		wg.Go(func() {
			if _, err := s.RevokeOperatorToken(ctx, operator, token.ID, now, true); err != nil {
				mu.Lock()
				defer mu.Unlock()
				lost++
				wantErr(t, "the last", err, ErrLastToken)
			}
		})
	}
	wg.Wait()
	if lost != 1 {
		t.Errorf("%d of two revocations were refused, want 1", lost)
	}
	if _, err := s.RevokeOperatorToken(ctx, operator, reader.ID, now, true); err != nil {
		t.Errorf("one that may only read: %v", err)
	}
	for _, token := range []OperatorToken{one, two} {
		if _, err := s.RevokeOperatorToken(ctx, operator, token.ID, now, false); err != nil {
			t.Errorf("by force: %v", err)
		}
	}
}

func TestListAudit(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	ctx := t.Context()
	a, b := newTenant(t, s, "A"), newTenant(t, s, "B")
	newKey(t, s, a.ID)
	if _, err := s.CreateAddressRange(ctx, Actor{Type: ActorSystem, ID: "x"}, NewAddressRange{Prefix: netip.MustParsePrefix("10.0.0.0/8"), Kind: RangeDeny}, Caller{}); err != nil {
		t.Fatal(err)
	}
	// Written by an older program, which did not know that this was a secret.
	if _, err := pool.Exec(ctx, `UPDATE audit_log SET changes = '{"after":{"app_secret":"canary"}}' WHERE resource_type = 'api_key'`); err != nil {
		t.Fatal(err)
	}
	mine, more, err := s.ListAudit(ctx, a.ID, AuditFilter{}, uuid.Nil, 10)
	if err != nil || more || len(mine) != 2 || mine[0].ResourceType != "api_key" || mine[1].ResourceType != "tenant" {
		t.Fatalf("of one tenant: %+v, %v, %v", mine, more, err)
	}
	sameJSON(t, "redacted again", string(mine[0].Changes), `{"after":{"app_secret":"[REDACTED]"}}`)
	if theirs, _, err := s.ListAudit(ctx, b.ID, AuditFilter{}, uuid.Nil, 10); err != nil || len(theirs) != 1 || theirs[0].ResourceID != b.ID.String() {
		t.Errorf("of the other: %+v, %v", theirs, err)
	}
	all, more, err := s.ListAuditAllTenants(ctx, AuditFilter{}, uuid.Nil, 3)
	if err != nil || !more || len(all) != 3 || all[0].TenantID != nil || all[0].ActorType != ActorSystem {
		t.Errorf("of all: %+v, %v, %v", all, more, err)
	}
	rest, more, err := s.ListAuditAllTenants(ctx, AuditFilter{}, all[2].ID, 3)
	if err != nil || more || len(rest) != 1 {
		t.Errorf("the rest: %+v, %v, %v", rest, more, err)
	}
	now := time.Now()
	for what, f := range map[string]AuditFilter{
		"actor": {ActorType: ActorSystem, ActorID: "x"}, "resource": {ResourceType: "address_range", ResourceID: all[0].ResourceID, Action: "create"},
		"time": {From: now.Add(-time.Hour), To: now.Add(time.Hour), ActorID: "x"},
	} {
		if found, _, err := s.ListAuditAllTenants(ctx, f, uuid.Nil, 10); err != nil || len(found) != 1 || found[0].ID != all[0].ID {
			t.Errorf("by %s: %+v, %v", what, found, err)
		}
	}
	for what, f := range map[string]AuditFilter{"later": {From: now.Add(time.Hour)}, "earlier": {To: now.Add(-time.Hour)}, "nobody": {ActorID: "y"}} {
		if found, _, err := s.ListAuditAllTenants(ctx, f, uuid.Nil, 10); err != nil || len(found) != 0 {
			t.Errorf("%s: %+v, %v", what, found, err)
		}
	}
}
