package ratelimit_test

import (
	"context"
	"errors"
	"reflect"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
	"converger/internal/ratelimit/ratelimittest"
)

// named is a store with a name, which may fail to reset.
type named struct {
	ratelimit.Store
	name  string
	fails error
}

func (n *named) Backend(ratelimit.Bucket) string { return n.name }

func (n *named) Reset(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) error {
	return errors.Join(n.fails, n.Store.Reset(ctx, now, it))
}

func newNamed(t *testing.T, name string) *named {
	t.Helper()
	s, err := local.New(local.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return &named{Store: s, name: name}
}

func TestRouterConformance(t *testing.T) {
	t.Parallel()
	ratelimittest.Run(t, func(t *testing.T) ratelimit.Store {
		s := newNamed(t, "one")
		return ratelimit.NewRouter(func(ratelimit.Bucket) ratelimit.Store { return s })
	})
}

func TestRouterGivesEachBucketItsStore(t *testing.T) {
	t.Parallel()
	one, two := newNamed(t, "one"), newNamed(t, "two")
	r := ratelimit.NewRouter(func(b ratelimit.Bucket) ratelimit.Store {
		if b.Info().Exact {
			return two
		}
		return one
	})
	if r.Backend(ratelimit.LoginIP) != "two" || r.Backend(ratelimit.APIRead) != "one" {
		t.Errorf("login_ip at %s, api_read at %s", r.Backend(ratelimit.LoginIP), r.Backend(ratelimit.APIRead))
	}
	now := ratelimit.Instant(500_000 * time.Hour)
	item := func(b ratelimit.Bucket, n uint64, limit int64) ratelimit.Item {
		p, err := ratelimit.NewPolicy(b, ratelimit.Rule{Limit: limit, Scale: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		return ratelimit.Item{Key: ratelimit.Key{Hi: n + 2, Lo: n}, Policy: p}
	}
	used := func(s ratelimit.Store, it ratelimit.Item) uint32 {
		u, err := s.Peek(t.Context(), now, it)
		if err != nil {
			t.Fatal(err)
		}
		return u.Used
	}
	read, login, read2 := item(ratelimit.APIRead, 1, 10), item(ratelimit.LoginIP, 2, 3), item(ratelimit.APIRead, 3, 100)
	for n := range 3 {
		d := r.TakeAll(t.Context(), now, []ratelimit.Item{read, login, read2})
		if !d.Allowed || d.Item != 1 || d.Remaining != uint32(2-n) {
			t.Errorf("spend %d: %+v", n+1, d)
		}
	}
	d := r.TakeAll(t.Context(), now, []ratelimit.Item{read, login, read2})
	if d.Allowed || d.Item != 1 || d.Policy != login.Policy {
		t.Errorf("refused: %+v", d)
	}
	if used(one, read) != 3 || used(two, login) != 3 || used(one, read2) != 3 || used(two, read) != 0 {
		t.Errorf("used %d, %d, %d; and %d of a key at the other store", used(one, read), used(two, login), used(one, read2), used(two, read))
	}
	r.Refund(t.Context(), ratelimit.Booking{At: now}, login)
	if used(two, login) != 2 {
		t.Errorf("%d used after a refund", used(two, login))
	}
	two.fails = errors.New("away")
	if err := r.Reset(t.Context(), now, ratelimit.Item{Key: login.Key}); !errors.Is(err, two.fails) {
		t.Errorf("Reset: %v", err)
	}
	if used(two, login) != 0 {
		t.Errorf("%d used after a reset", used(two, login))
	}
	// A limiter knows the bucket: a store that is away does not matter to the others.
	l, err := ratelimit.New(ratelimit.Config{Store: r})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Reset(t.Context(), now, ratelimit.APIRead, ratelimit.Item{Key: read.Key}); err != nil || used(one, read) != 0 {
		t.Errorf("reset of a bucket whose store is there: %v, %d used", err, used(one, read))
	}
	if err := l.Reset(t.Context(), now, ratelimit.LoginIP, login); !errors.Is(err, two.fails) {
		t.Errorf("reset of a bucket whose store is away: %v", err)
	}
}

func TestOperatorChoosesBackends(t *testing.T) {
	t.Parallel()
	o, err := ratelimit.ParseOperator([]byte(`{"login_ip":{"backend":"cluster"},"inbound":{"limit":7,"scale_ms":1000,"backend":"owner"},"upload":{"limit":1,"scale_ms":1000}}`))
	if err != nil {
		t.Fatal(err)
	}
	for b, want := range map[ratelimit.Bucket]ratelimit.Backend{
		ratelimit.LoginIP: ratelimit.BackendCluster, ratelimit.Inbound: ratelimit.BackendOwner, ratelimit.Upload: "", ratelimit.APIRead: "",
	} {
		if got := o.Backend(b); got != want {
			t.Errorf("%v: %q, want %q", b, got, want)
		}
	}
	if p, _ := o.Policy(ratelimit.LoginIP); p == nil || p.Rule() != ratelimit.LoginIP.Info().Default {
		t.Errorf("a backend alone changed the limit: %+v", p)
	}
	for _, bad := range []string{`{"inbound":{"limit":7,"scale_ms":1000,"backend":"memcached"}}`, `{"inbound":{"backend":1}}`, `{"inbound":{"mode":"count","backend":"owner"}}`} {
		if _, err := ratelimit.ParseOperator([]byte(bad)); err == nil {
			t.Errorf("%s: accepted", bad)
		}
	}
	if _, err := ratelimit.ParseOverride(ratelimit.Inbound, []byte(`{"limit":7,"scale_ms":1000,"backend":"owner"}`)); err == nil {
		t.Error("a tenant chose a backend")
	}
	var none *ratelimit.Operator
	if none.Backend(ratelimit.Inbound) != "" {
		t.Error("no configuration chose a backend")
	}
}

// lonely is a store that decides without the one who counts, for login_account. It remembers what it was given back.
type lonely struct {
	ratelimit.Store
	returned []ratelimit.Bucket
	wrong    int // refunds that went to another place than the spend
}

func (l *lonely) mark(d ratelimit.Decision, items ...ratelimit.Item) ratelimit.Decision {
	for i, it := range items {
		if it.Policy.Bucket() == ratelimit.LoginAccount {
			d.Alone |= 1 << i
		}
	}
	return d
}

func (l *lonely) Take(ctx context.Context, now ratelimit.Instant, it ratelimit.Item) ratelimit.Decision {
	return l.mark(l.Store.Take(ctx, now, it), it)
}

func (l *lonely) TakeAll(ctx context.Context, now ratelimit.Instant, items []ratelimit.Item) ratelimit.Decision {
	return l.mark(l.Store.TakeAll(ctx, now, items), items...)
}

func (l *lonely) Refund(ctx context.Context, b ratelimit.Booking, it ratelimit.Item) {
	bucket := it.Policy.Bucket()
	if l.returned = append(l.returned, bucket); b.Alone != (bucket == ratelimit.LoginAccount) {
		l.wrong++
		return
	}
	l.Store.Refund(ctx, b, it)
}

// Of items that several stores decide on, each part is given back where it was booked, in whatever order the items stand.
func TestEachPartIsGivenBackWhereItWasBooked(t *testing.T) {
	t.Parallel()
	one, two := newNamed(t, "one"), &lonely{Store: newNamed(t, "two")}
	r := ratelimit.NewRouter(func(b ratelimit.Bucket) ratelimit.Store {
		if b == ratelimit.APIRead {
			return one
		}
		return two
	})
	item := func(b ratelimit.Bucket) ratelimit.Item {
		p, err := ratelimit.NewPolicy(b, ratelimit.Rule{Limit: 1, Scale: time.Minute})
		if err != nil {
			t.Fatal(err)
		}
		return ratelimit.Item{Key: ratelimit.Key{Hi: uint64(b) + 2, Lo: 7}, Policy: p}
	}
	upload, login, read := item(ratelimit.Upload), item(ratelimit.LoginAccount), item(ratelimit.APIRead)
	unspent := func(when string, items ...ratelimit.Item) {
		t.Helper()
		for _, it := range items {
			if u, err := r.Peek(t.Context(), noon, it); err != nil || u.Used != 0 {
				t.Errorf("%s: %d of %v used (%v)", when, u.Used, it.Policy.Bucket(), err)
			}
		}
		if two.wrong != 0 {
			t.Errorf("%s: %d of %v went to the wrong place", when, two.wrong, two.returned)
		}
		two.returned, two.wrong = nil, 0
	}
	for _, items := range [][]ratelimit.Item{
		{upload, login, read}, {login, upload, read}, {read, login, upload}, {read, upload, login}, {login, upload},
	} {
		d := r.TakeAll(t.Context(), noon, items)
		if !d.Allowed {
			t.Fatalf("%+v", d)
		}
		for i, it := range items {
			r.Refund(t.Context(), d.Booking(i), it)
		}
		unspent("given back by the caller", upload, login, read)
	}
	// Refused by one store, what the other booked is given back by the router.
	if d := r.Take(t.Context(), noon, read); !d.Allowed || d.Booking(0).Alone {
		t.Fatalf("%+v", d)
	}
	if d := r.TakeAll(t.Context(), noon, []ratelimit.Item{upload, login, read}); d.Allowed || d.Item != 2 {
		t.Errorf("%+v", d)
	}
	if len(two.returned) != 2 {
		t.Errorf("%d parts were given back, want 2", len(two.returned))
	}
	unspent("refused", upload, login)
}

// A bigger result would cost more than the check.
func TestDecisionIsFourWords(t *testing.T) {
	t.Parallel()
	if got, most := reflect.TypeFor[ratelimit.Decision]().Size(), 4*reflect.TypeFor[uintptr]().Size(); got > most {
		t.Errorf("%d bytes, %d are four words", got, most)
	}
}
