package ratelimit_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// newLogin makes a throttle whose time is that of the caller: in a bubble, the bubble's.
func newLogin(t testing.TB, operator string) *ratelimit.Login {
	t.Helper()
	login, _ := newLoginLimiter(t, operator)
	return login
}

func newLoginLimiter(t testing.TB, operator string) (*ratelimit.Login, *prometheus.Registry) {
	t.Helper()
	clock := ratelimit.NewClock()
	store, err := local.New(local.Config{Clock: clock})
	if err != nil {
		t.Fatal(err)
	}
	return newLoginOver(t, operator, clock, store)
}

func newLoginOver(t testing.TB, operator string, clock ratelimit.Clock, store ratelimit.Store) (*ratelimit.Login, *prometheus.Registry) {
	t.Helper()
	reg := prometheus.NewRegistry()
	o, err := ratelimit.ParseOperator([]byte(operator))
	if err != nil {
		t.Fatal(err)
	}
	l, err := ratelimit.New(ratelimit.Config{Store: store, Clock: clock, Operator: o, Registerer: reg})
	if err != nil {
		t.Fatal(err)
	}
	h, err := ratelimit.NewHasher([]byte("sixteen bytes and more"))
	if err != nil {
		t.Fatal(err)
	}
	return ratelimit.NewLogin(l, h), reg
}

// untilWindow sleeps to a moment of the next window of a minute, such as -100 ms for shortly before it begins.
func untilWindow(d time.Duration) {
	now := time.Now()
	at := now.Truncate(time.Minute).Add(time.Minute + d)
	if !at.After(now) {
		at = at.Add(time.Minute)
	}
	time.Sleep(time.Until(at))
}

func reserve(t testing.TB, l *ratelimit.Login, a ratelimit.LoginAttempt) (*ratelimit.LoginReservation, ratelimit.Decision) {
	t.Helper()
	r, d, err := l.Reserve(t.Context(), a)
	if err != nil {
		t.Fatal(err)
	}
	return r, d
}

// fail makes n failures one after the other, and ends the test unless all were let through.
func fail(t testing.TB, l *ratelimit.Login, n int, a ratelimit.LoginAttempt) {
	t.Helper()
	for i := range n {
		r, d := reserve(t, l, a)
		if r == nil {
			t.Fatalf("attempt %d refused: %+v", i+1, d)
		}
		r.Keep()
	}
}

var (
	here  = netip.MustParseAddr("192.0.2.1")
	there = netip.MustParseAddr("198.51.100.7")
)

func attempt(ip netip.Addr, account string) ratelimit.LoginAttempt {
	return ratelimit.LoginAttempt{IP: ip, Account: account}
}

// A hundred parallel guesses get five verifications, at whatever moment of a window they come, however long a
// verification takes, and whether they share an address, an account or both.
func TestParallelGuesses(t *testing.T) {
	t.Parallel()
	for name, who := range map[string]func(i int) ratelimit.LoginAttempt{
		"one address, one account":           func(int) ratelimit.LoginAttempt { return attempt(here, "ada") },
		"one account, many addresses":        func(i int) ratelimit.LoginAttempt { return attempt(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), "ada") },
		"one address, many accounts":         func(i int) ratelimit.LoginAttempt { return attempt(here, fmt.Sprint("user ", i)) },
		"one /64 of IPv6, many accounts":     func(i int) ratelimit.LoginAttempt { return attempt(rotated(i), fmt.Sprint("user ", i)) },
		"one known device":                   func(int) ratelimit.LoginAttempt { a := attempt(there, "ada"); a.Device = "d"; return a },
		"one account, the address mapped v6": func(int) ratelimit.LoginAttempt { return attempt(netip.AddrFrom16(here.As16()), "ada") },
	} {
		for _, begin := range []time.Duration{0, 10 * time.Second, -time.Millisecond, -150 * time.Millisecond, -300 * time.Millisecond, -900 * time.Millisecond} {
			t.Run(fmt.Sprint(name, ", ", begin), func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) {
					l := newLogin(t, "")
					untilWindow(begin)
					var verified, refused, running atomic.Int32
					var wg sync.WaitGroup
					for i := range 100 {
						wg.Go(func() {
							time.Sleep(time.Duration(i) * 4 * time.Millisecond) // they come within 0.4 s
							r, d := reserve(t, l, who(i))
							if r == nil {
								refused.Add(1)
								if d.Allowed || d.WaitMs == 0 || d.WaitMs > 60_000 || d.Policy == nil {
									t.Errorf("refused with %+v", d)
								}
								return
							}
							verified.Add(1)
							time.Sleep(250 * time.Millisecond * time.Duration(running.Add(1))) // a busy machine
							running.Add(-1)
							r.Keep()
						})
					}
					wg.Wait()
					if verified.Load() != 5 || refused.Load() != 95 {
						t.Errorf("%d verified, %d refused", verified.Load(), refused.Load())
					}
				})
			})
		}
	}
}

// rotated is another address of the same /64.
func rotated(i int) netip.Addr {
	a := netip.MustParseAddr("2001:db8:1:2::").As16()
	a[9], a[15] = byte(i), byte(i*7)
	return netip.AddrFrom16(a)
}

// The same on real processors: nothing here but the order of things decides.
func TestParallelGuessesForReal(t *testing.T) {
	t.Parallel()
	for range 20 {
		l := newLogin(t, "")
		var verified atomic.Int32
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				r, _ := reserve(t, l, attempt(here, "ada"))
				if r == nil {
					return
				}
				verified.Add(1)
				runtime.Gosched()
				r.Keep()
			})
		}
		wg.Wait()
		if verified.Load() != 5 {
			t.Fatalf("%d verified", verified.Load())
		}
	}
}

// People who all know their password are all let in, be they more than the limit at once: open attempts are waited for.
func TestOpenReservationsDoNotLock(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		var wg sync.WaitGroup
		for i := range 40 {
			wg.Go(func() {
				r, d := reserve(t, l, attempt(here, fmt.Sprint("user ", i)))
				if r == nil {
					t.Errorf("refused: %+v", d)
					return
				}
				time.Sleep(300 * time.Millisecond)
				r.Refund(t.Context())
			})
		}
		wg.Wait()
		fail(t, l, 5, attempt(here, "user 1")) // the budget is whole again
	})
}

// A success among failures: what it gives back lets one more guess through, and no more.
func TestSuccessLetsOneMoreThrough(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		var verified atomic.Int32
		var wg sync.WaitGroup
		for i := range 60 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				r, _ := reserve(t, l, attempt(here, "ada"))
				if r == nil {
					return
				}
				n := verified.Add(1)
				time.Sleep(300 * time.Millisecond)
				if n == 3 {
					r.Refund(t.Context())
					return
				}
				r.Keep()
			})
		}
		wg.Wait()
		if verified.Load() != 6 {
			t.Errorf("%d verified, want 5 failures and a success", verified.Load())
		}
	})
}

// Who waits for an outcome is not kept for ever, and goes when the caller does.
func TestPatience(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		var held []*ratelimit.LoginReservation
		for range 5 {
			r, _ := reserve(t, l, attempt(here, "ada"))
			held = append(held, r)
		}
		began := time.Now()
		if r, d := reserve(t, l, attempt(there, "ada")); r != nil || time.Since(began) != 5*time.Second || d.Policy.Bucket() != ratelimit.LoginAccount {
			t.Errorf("%+v after %v", d, time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		began = time.Now()
		if r, _, err := l.Reserve(ctx, attempt(there, "ada")); r != nil || !errors.Is(err, context.DeadlineExceeded) || time.Since(began) != time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
		for _, r := range held {
			r.Refund(t.Context())
		}
		fail(t, l, 5, attempt(there, "ada"))
	})
}

// A lock ends when the answer said it would, and attempts during it do not move its end.
func TestLockEnds(t *testing.T) {
	t.Parallel()
	for _, begin := range []time.Duration{0, 7 * time.Second, 30 * time.Second, -30 * time.Second, -3 * time.Second, -10 * time.Millisecond} {
		t.Run(begin.String(), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				l := newLogin(t, "")
				untilWindow(begin)
				fail(t, l, 5, attempt(here, "ada"))
				began := time.Now()
				r, first := reserve(t, l, attempt(there, "ada"))
				if r != nil {
					t.Fatal("not locked after five failures")
				}
				wait := time.Duration(first.WaitMs) * time.Millisecond
				if wait > time.Minute || first.Policy.Bucket() != ratelimit.LoginAccount {
					t.Errorf("wait %v for %v", wait, first.Policy.Bucket())
				}
				for time.Since(began) < wait-time.Second {
					if r, d := reserve(t, l, attempt(there, "ada")); r != nil || time.Duration(d.WaitMs)*time.Millisecond > wait-time.Since(began)+time.Millisecond {
						t.Fatalf("after %v of %v: %+v", time.Since(began), wait, d)
					}
					time.Sleep(time.Second)
				}
				time.Sleep(wait - time.Since(began))
				r, d := reserve(t, l, attempt(there, "ada"))
				if r == nil {
					t.Fatalf("still locked after the wait of %v: %+v", wait, d)
				}
				r.Refund(t.Context())
			})
		})
	}
}

// A stranger fails for as long as the lock lets him; the owner gets in from a known device, and from no other.
func TestKnownDevice(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		fail(t, l, 5, attempt(there, "ada"))
		own := attempt(here, "ada")
		if r, _ := reserve(t, l, own); r != nil {
			t.Fatal("the account is not locked")
		}
		own.Device = "of ada"
		r, d := reserve(t, l, own)
		if r == nil {
			t.Fatalf("the known device is locked: %+v", d)
		}
		r.Refund(t.Context())
		fail(t, l, 5, own)
		if r, _ := reserve(t, l, own); r != nil {
			t.Error("a known device guesses without limit")
		}
		own.Account, own.IP = "bob", netip.MustParseAddr("192.0.2.2")
		if r, _ := reserve(t, l, own); r == nil {
			t.Error("the counter of one account's device is that of another account's")
		}
	})
}

// An address that has failed is refused for every account, and a refusal by one counter leaves no trace in the other.
func TestBothCounters(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		fail(t, l, 5, attempt(here, "ada"))
		for range 20 {
			if r, d := reserve(t, l, attempt(here, "bob")); r != nil || d.Policy.Bucket() != ratelimit.LoginIP {
				t.Fatalf("%+v", d)
			}
			if r, d := reserve(t, l, attempt(there, "ada")); r != nil || d.Policy.Bucket() != ratelimit.LoginAccount {
				t.Fatalf("%+v", d)
			}
		}
		fail(t, l, 5, attempt(there, "bob"))
	})
}

// An exempt address is not counted, however many accounts it tries; each account is.
func TestExemptAddress(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		for i := range 20 {
			fail(t, l, 5, attempt(netip.Addr{}, fmt.Sprint("account ", i)))
		}
		if r, d := reserve(t, l, attempt(netip.Addr{}, "account 7")); r != nil || d.Policy.Bucket() != ratelimit.LoginAccount {
			t.Errorf("a sixth attempt on an account: %+v", d)
		}
		fail(t, l, 5, attempt(here, "another"))
		if r, _ := reserve(t, l, attempt(here, "yet another")); r != nil {
			t.Error("other addresses are not counted either")
		}
	})
}

func TestLockedBucket(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, `{"login_ip": {"limit": 3, "scale_ms": 60000}}`)
		var got []ratelimit.Bucket
		for range 3 {
			r, _ := reserve(t, l, attempt(here, "ada"))
			got = append(got, r.Keep())
		}
		for range 2 {
			r, _ := reserve(t, l, attempt(there, "ada"))
			got = append(got, r.Keep())
		}
		if want := []ratelimit.Bucket{0, 0, ratelimit.LoginIP, 0, ratelimit.LoginAccount}; !slices.Equal(got, want) {
			t.Errorf("locks %v, want %v", got, want)
		}
	})
}

// What an operator set holds here too: off, count only, refuse all.
func TestLoginLimitsByTheOperator(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, `{"login_ip": "off", "login_account": {"limit": 2, "scale_ms": 1000}}`)
		fail(t, l, 2, attempt(here, "ada"))
		fail(t, l, 2, attempt(here, "bob"))
		_, d := reserve(t, l, attempt(here, "ada"))
		if d.Allowed || d.WaitMs > 1000 {
			t.Errorf("%+v", d)
		}
		time.Sleep(time.Duration(d.WaitMs) * time.Millisecond)
		fail(t, l, 1, attempt(here, "ada"))

		fail(t, newLogin(t, `{"login_ip": "off", "login_account": "off"}`), 50, attempt(here, "ada"))
		fail(t, newLogin(t, `{"login_ip": "off", "login_account": {"limit": 2, "scale_ms": 60000, "mode": "count"}}`), 50, attempt(here, "ada"))
		l = newLogin(t, `{"login_account": {"limit": 0, "scale_ms": 60000}}`)
		if r, d := reserve(t, l, attempt(here, "ada")); r != nil || d.WaitMs != 60000 {
			t.Errorf("limit 0: %+v", d)
		}
	})
}

// A counter in count mode beside one that is enforced refuses nobody, is asked only about attempts that go on, gets back
// what successes spent, and each counter is shown under its own name.
func TestLoginCountMode(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		f := newLimiter(t, `{"login_ip": {"limit": 2, "scale_ms": 60000, "mode": "count"}}`, false)
		l := ratelimit.NewLogin(f.Limiter, f.hasher)
		a := attempt(here, "ada")
		a.Shown = func() string { return "account ada" }
		for range 20 {
			r, d := reserve(t, l, a)
			if r == nil || d.Policy.Bucket() != ratelimit.LoginAccount {
				t.Fatalf("%+v", d)
			}
			r.Refund(t.Context())
		}
		fail(t, l, 5, a)
		for range 2 {
			if r, d := reserve(t, l, a); r != nil || d.Policy.Bucket() != ratelimit.LoginAccount {
				t.Errorf("after five failures: %+v", d)
			}
		}
		for series, n := range map[string]int{
			`bucket="login_ip",decision="allowed"`:      20 + 2,
			`bucket="login_ip",decision="counted"`:      3,
			`bucket="login_ip",decision="refused"`:      0,
			`bucket="login_account",decision="allowed"`: 20 + 5,
			`bucket="login_account",decision="refused"`: 2,
		} {
			f.series(fmt.Sprintf(`converger_rate_limit_decisions_total{backend="local",%s} %d`, series, n))
		}
		f.series(`converger_rate_limit_exceeded_count{bucket="login_account"} 2`)
		for b, want := range map[ratelimit.Bucket]string{ratelimit.LoginIP: "192.0.2.1: 3; ", ratelimit.LoginAccount: "account ada: 2; "} {
			if got := counts(f.Observe(b, f.Now(), 10).Top); got != want {
				t.Errorf("%v: %s want %s", b, got, want)
			}
		}
	})
}

// What a success spent is given back to each counter where it was booked, be the counters enforced or not.
func TestSuccessIsGivenBackWhereItWasBooked(t *testing.T) {
	t.Parallel()
	for _, operator := range []string{
		"",
		`{"login_ip": {"limit": 5, "scale_ms": 60000, "mode": "count"}}`,
		`{"login_account": {"limit": 5, "scale_ms": 60000, "mode": "count"}}`,
	} {
		store := &lonely{Store: newNamed(t, "store")}
		l, _ := newLoginOver(t, operator, ratelimit.NewClock(), store)
		r, d := reserve(t, l, attempt(here, "ada"))
		if r == nil {
			t.Fatalf("%s: %+v", operator, d)
		}
		r.Refund(t.Context())
		slices.Sort(store.returned)
		if want := []ratelimit.Bucket{ratelimit.LoginIP, ratelimit.LoginAccount}; !slices.Equal(store.returned, want) || store.wrong != 0 {
			t.Errorf("%s: given back to %v, %d of them at the wrong place", operator, store.returned, store.wrong)
		}
	}
}

// One refusal is one event in one series, however often the store was asked meanwhile.
func TestLoginMetrics(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l, reg := newLoginLimiter(t, "")
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if r, _ := reserve(t, l, attempt(here, "ada")); r != nil {
					time.Sleep(300 * time.Millisecond)
					r.Keep()
				}
			})
		}
		wg.Wait()
		families, err := reg.Gather()
		if err != nil {
			t.Fatal(err)
		}
		got := map[string]float64{}
		for _, f := range families {
			if f.GetName() != "converger_rate_limit_decisions_total" {
				continue
			}
			for _, m := range f.GetMetric() {
				if v := m.GetCounter().GetValue(); v != 0 {
					got[m.GetLabel()[1].GetValue()+" "+m.GetLabel()[2].GetValue()] += v
				}
			}
		}
		want := map[string]float64{"login_ip allowed": 5, "login_account allowed": 5, "login_ip refused": 45}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("decisions (-want +got):\n%s", diff)
		}
	})
}

// Memory is held for what is under way and for failures of a few seconds, not for every address that ever came (RL-23).
func TestLoginForgets(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := newLogin(t, "")
		for i := range 20_000 {
			fail(t, l, 1, attempt(netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}), fmt.Sprint("user ", i)))
		}
		if n := l.Gates(); n != 40_000 {
			t.Errorf("%d gates", n)
		}
		time.Sleep(6 * time.Second)
		r, _ := reserve(t, l, attempt(here, "ada"))
		if n := l.Gates(); n != 2 {
			t.Errorf("%d gates are left", n)
		}
		r.Refund(t.Context())
		if n := l.Gates(); n != 0 {
			t.Errorf("%d gates are left at the end", n)
		}
	})
}
