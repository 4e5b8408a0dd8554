package auth

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"golang.org/x/crypto/bcrypt"

	"converger/internal/fault"
	"converger/internal/ratelimit"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

func TestSignInByPassword(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin, member := w.newAdmin(t), w.newUser(t, TenantRealm(w.tenant), "Ada@Acme.test", RoleMember)

	in, err := w.admin(t.Context(), ownIP, " ADMIN@x.test\t", password)
	if err != nil {
		t.Fatal(err)
	}
	if in.Session.User.ID != admin.ID || in.Session.Address != "192.0.2.1" || in.Session.UserAgent != "test" || in.Session.ByLink || in.Device == "" {
		t.Errorf("%+v", in.Session)
	}
	got, err := w.load(t.Context(), in)
	if err != nil || got.ID != in.Session.ID || got.User.Email != "admin@x.test" || got.User.Role != RoleSuperAdmin || got.User.LastSignInAt == nil {
		t.Errorf("%+v, %v", got, err)
	}
	if d := got.ExpiresAt.Sub(got.OpenedAt); d < 12*time.Hour || d > 12*time.Hour+time.Minute {
		t.Errorf("ends %v after it was opened", d)
	}

	in, err = w.Password(t.Context(), Visitor{IP: netip.MustParseAddr("::ffff:192.0.2.9")},
		Credentials{Portal: true, Tenant: "  ACME ", Email: "ada@ACME.test", Password: password})
	if err != nil || in.Session.User.ID != member.ID || in.Session.Address != "192.0.2.9" {
		t.Errorf("%+v, %v", in.Session, err)
	}

	// Neither realm's users are the other's, though one address may be in both.
	_, err = w.admin(t.Context(), ownIP, "ada@acme.test", password)
	wantErr(t, "a tenant's user at the admin pages", err, ErrBadCredentials)
	_, err = w.Password(t.Context(), Visitor{IP: ownIP}, Credentials{Portal: true, Tenant: "Acme", Email: "admin@x.test", Password: password})
	wantErr(t, "an administrator at the portal", err, ErrBadCredentials)
	w.newTenant(t, "Other")
	_, err = w.Password(t.Context(), Visitor{IP: ownIP}, Credentials{Portal: true, Tenant: "Other", Email: "ada@acme.test", Password: password})
	wantErr(t, "at another tenant", err, ErrBadCredentials)

	signIns := w.audited(t, "sign_in")
	if len(signIns) != 2 || signIns[0].Actor != "admin@x.test" || signIns[0].ActorType != tenants.ActorAdmin || signIns[0].TenantID != nil ||
		signIns[1].ActorType != tenants.ActorTenantUser || signIns[1].TenantID == nil || *signIns[1].TenantID != w.tenant {
		t.Errorf("audit %+v", signIns)
	}
}

// A hundred parallel wrong passwords cost five verifications, from however many addresses they come and however the name
// is spelled; then the right one is refused too, until the window lets one through (AU-01, AU-03, AU-08).
func TestHundredWrongPasswords(t *testing.T) {
	t.Parallel()
	spelled := []string{"admin@x.test", " admin@x.test", "ADMIN@x.test", "admin@x.test\t", "admin@X.TEST ", "ａdmin@x.test",
		"\u00a0admin@x.test", "ad\u200bmin@x.test", "admin＠x.test", "\ufeffAdmin@x.test\u3000"}
	rotate := func(i int) netip.Addr {
		a := netip.MustParseAddr("2001:db8:1:2::").As16()
		a[8], a[15] = byte(i), byte(i*7)
		return netip.AddrFrom16(a)
	}
	for name, tt := range map[string]struct {
		who      func(i int) (netip.Addr, string)
		bucket   ratelimit.Bucket
		ownerMay bool // from an address of his own
	}{
		"one IPv4 address":        {func(int) (netip.Addr, string) { return strange, "admin@x.test" }, ratelimit.LoginAccount, false},
		"many IPv4 addresses":     {func(i int) (netip.Addr, string) { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), "admin@x.test" }, ratelimit.LoginAccount, false},
		"IPv6 rotation in a /64":  {func(i int) (netip.Addr, string) { return rotate(i), "admin@x.test" }, ratelimit.LoginAccount, false},
		"rotation, many accounts": {func(i int) (netip.Addr, string) { return rotate(i), fmt.Sprintf("user%d@x.test", i) }, 0, true},
		"variants of the name": {func(i int) (netip.Addr, string) {
			return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), spelled[i%len(spelled)]
		}, ratelimit.LoginAccount, false},
		"a name that does not exist": {func(i int) (netip.Addr, string) { return netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), "Nobody@x.test" }, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const limits = `{"login_ip": {"limit": 5, "scale_ms": 30000, "algorithm": "sliding_window"},
				"login_account": {"limit": 5, "scale_ms": 30000, "algorithm": "sliding_window"}}`
			w := newWorld(t, worldOptions{limits: limits})
			w.newAdmin(t)
			var wrong, refused atomic.Int32
			cost := w.hashes(func() {
				var wg sync.WaitGroup
				for i := range 100 {
					wg.Go(func() {
						ip, email := tt.who(i)
						_, err := w.admin(t.Context(), ip, email, secrets.Text(fmt.Sprint("guess number ", i)))
						switch _, isLocked := locked(err); {
						case errors.Is(err, ErrBadCredentials):
							wrong.Add(1)
						case isLocked:
							refused.Add(1)
						default:
							t.Error(err)
						}
					})
				}
				wg.Wait()
			})
			if cost != 5 || wrong.Load() != 5 || refused.Load() != 95 {
				t.Errorf("%v verifications; %d wrong, %d refused", cost, wrong.Load(), refused.Load())
			}
			_, err := w.admin(t.Context(), ownIP, "admin@x.test", password)
			l, isLocked := locked(err)
			if isLocked == tt.ownerMay || !isLocked && err != nil {
				t.Errorf("the right password from elsewhere: %v", err)
			}
			if isLocked && (l.Decision.Policy.Bucket() != tt.bucket || l.Decision.RetryAfterSeconds() > 30) {
				t.Errorf("locked by %+v", l.Decision)
			}
			if locks := w.audited(t, "lock"); len(locks) == 0 {
				t.Error("the lock is not in the audit log")
			}
		})
	}
}

// The lock ends by itself, and soon, though somebody goes on guessing (AU-07).
func TestRightPasswordAfterTheLock(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{limits: `{"login_ip": "off", "login_account": {"limit": 5, "scale_ms": 1000, "algorithm": "sliding_window"}}`})
	w.newAdmin(t)
	for {
		_, err := w.admin(t.Context(), strange, "admin@x.test", "wrong password")
		if _, isLocked := locked(err); isLocked {
			break
		}
		wantErr(t, "guess", err, ErrBadCredentials)
	}
	_, err := w.admin(t.Context(), ownIP, "admin@x.test", password)
	l, isLocked := locked(err)
	if !isLocked {
		t.Fatalf("the right password while locked: %v", err)
	}
	wait := time.Duration(l.Decision.WaitMs) * time.Millisecond
	if wait > time.Second {
		t.Errorf("a wait of %v in a window of a second", wait)
	}
	began := time.Now()
	for time.Since(began) < wait-100*time.Millisecond {
		_, err := w.admin(t.Context(), strange, "admin@x.test", "wrong password")
		if _, isLocked := locked(err); !isLocked {
			t.Fatalf("after %v of %v: %v", time.Since(began), wait, err)
		}
	}
	time.Sleep(wait - time.Since(began)) // what the answer told to wait is what is promised
	if _, err := w.admin(t.Context(), ownIP, "admin@x.test", password); err != nil {
		t.Errorf("after the wait: %v", err)
	}
}

// A device that has signed in before gets in while a stranger keeps the account locked; not with a cookie of another
// account, an invented one, or one from before the password was changed.
func TestKnownDevice(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin := w.newAdmin(t)
	other := w.newUser(t, Admins, "other@x.test", RoleAdmin)
	own, others := w.in(t, admin).Device, w.in(t, other).Device
	try := func(device, typed secrets.Text) error {
		_, err := w.Password(t.Context(), Visitor{IP: ownIP, Device: device.Reveal()}, Credentials{Email: "admin@x.test", Password: typed})
		return err
	}
	for i := range 5 {
		_, err := w.admin(t.Context(), netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), "admin@x.test", "wrong password")
		wantErr(t, "guess", err, ErrBadCredentials)
	}
	tampered := []byte(own.Reveal())
	tampered[20] ^= 1
	for name, device := range map[string]secrets.Text{"none": "", "another account's": others, "tampered": secrets.Text(tampered), "junk": "cvg_dev_", "cut": own[:len(own)-1]} {
		if _, isLocked := locked(try(device, password)); !isLocked {
			t.Errorf("%s: not locked", name)
		}
	}
	if err := try(own, password); err != nil {
		t.Errorf("the known device: %v", err)
	}
	for range 5 {
		wantErr(t, "guess on the known device", try(own, "wrong password"), ErrBadCredentials)
	}
	if _, isLocked := locked(try(own, password)); !isLocked {
		t.Error("the known device may guess without limit")
	}
}

func TestDeviceForgottenWithThePassword(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin := w.newAdmin(t)
	old := w.in(t, admin).Device
	if err := w.Users.SetPassword(t.Context(), someone, Admins, admin.ID, "another password", false); err != nil {
		t.Fatal(err)
	}
	guess := func(ip netip.Addr) error {
		_, err := w.Password(t.Context(), Visitor{IP: ip, Device: old.Reveal()}, Credentials{Email: "admin@x.test", Password: "wrong password"})
		return err
	}
	for i := range 5 {
		wantErr(t, "guess", guess(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)})), ErrBadCredentials)
	}
	if l, isLocked := locked(guess(ownIP)); !isLocked || l.Decision.Policy.Bucket() != ratelimit.LoginAccount {
		t.Error("an old cookie still has its own counter")
	}
	if _, err := w.admin(t.Context(), ownIP, "admin@x.test", "another password"); err == nil {
		t.Error("its failures did not count on the account")
	}
}

func TestDeviceExpires(t *testing.T) {
	t.Parallel()
	m := marker{secret}
	d := deviceMark{id: "0123456789abcdef", user: uuid.New(), version: 7}
	text := m.deviceCookie(d, "admin a", now)
	if got := m.device(text.Reveal(), "admin a", now.Add(DeviceLife)); got != d {
		t.Errorf("%+v", got)
	}
	if got := m.device(text.Reveal(), "admin a", now.Add(DeviceLife+time.Second)); got.id != "" {
		t.Errorf("works after its time")
	}
	if got := (marker{older, secret}).device(text.Reveal(), "admin a", now); got != d {
		t.Error("a retired key does not know its device")
	}
}

// People who know their password are let in however many come at once.
func TestManyAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	w.newAdmin(t)
	var wg sync.WaitGroup
	for range 15 {
		wg.Go(func() {
			if _, err := w.admin(t.Context(), ownIP, "admin@x.test", password); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// One attempt is one failure, with capitals too; a success is none (AU-06).
func TestOnlyFailuresCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin := w.newAdmin(t)
	for i := range 7 {
		email := admin.Email
		if i%2 == 0 {
			email = strings.ToUpper(email)
		}
		if _, err := w.admin(t.Context(), ownIP, email, password); err != nil {
			t.Fatal(err)
		}
	}
	for range 5 {
		_, err := w.admin(t.Context(), ownIP, "ADMIN@x.test", "wrong password")
		wantErr(t, "guess", err, ErrBadCredentials)
	}
	if _, err := w.admin(t.Context(), ownIP, "admin@x.test", "wrong password"); errors.Is(err, ErrBadCredentials) {
		t.Error("a sixth failure was let through")
	}
}

// failures are the ways not to get in that must look and cost the same.
func (w *world) failures(t testing.TB) map[string]Credentials {
	t.Helper()
	realm := TenantRealm(w.tenant)
	w.newAdmin(t)
	off := w.newUser(t, Admins, "off@x.test", RoleAdmin)
	if _, err := w.Users.Update(t.Context(), someone, Admins, off.ID, UserChange{Status: ptr(UserInactive)}); err != nil {
		t.Fatal(err)
	}
	w.newUser(t, realm, "ada@acme.test", RoleOwner)
	if _, err := w.Users.Create(t.Context(), someone, realm, NewUser{Email: "invited@acme.test", Role: RoleMember}); err != nil {
		t.Fatal(err)
	}
	gone := w.newTenant(t, "Gone")
	w.newUser(t, TenantRealm(gone), "ada@gone.test", RoleOwner)
	if _, err := w.store.SetStatus(t.Context(), someone, gone, tenants.StatusSuspended); err != nil {
		t.Fatal(err)
	}
	if err := w.names.Load(t.Context()); err != nil {
		t.Fatal(err)
	}
	weak, err := bcrypt.GenerateFromPassword([]byte(password.Reveal()), MinCost)
	if err != nil {
		t.Fatal(err)
	}
	old := w.newUser(t, Admins, "old@x.test", RoleViewer)
	w.exec(t, `UPDATE users SET password_hash = $1 WHERE id = $2`, string(weak), old.ID)
	return map[string]Credentials{
		"hash of a lower cost": {Email: "old@x.test", Password: "wrong password"},
		"unknown":              {Email: "nobody@x.test", Password: password},
		"wrong":                {Email: "admin@x.test", Password: "wrong password"},
		"empty":                {Email: "admin@x.test"},
		"disabled, right":      {Email: "off@x.test", Password: password},
		"disabled, wrong":      {Email: "off@x.test", Password: "wrong password"},
		"unknown in a tenant":  {Portal: true, Tenant: "Acme", Email: "nobody@acme.test", Password: password},
		"wrong in a tenant":    {Portal: true, Tenant: "Acme", Email: "ada@acme.test", Password: "wrong password"},
		"without a password":   {Portal: true, Tenant: "Acme", Email: "invited@acme.test", Password: ""},
		"unknown tenant":       {Portal: true, Tenant: "Nowhere", Email: "ada@acme.test", Password: password},
		"suspended tenant":     {Portal: true, Tenant: "Gone", Email: "ada@gone.test", Password: password},
		"no name at all":       {Password: password},
		"NUL and bad encoding": {Portal: true, Tenant: "Ac\x00me\xff", Email: "a\x00da@acme.test\xfe", Password: "\x00\xff"},
	}
}

func ptr[T any](v T) *T { return &v }

// Each of them costs one hash and one query beside the record, and says the same.
func TestFailuresCostOneHash(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{limits: unlimited, cost: 5})
	for name, c := range w.failures(t) {
		queries := w.queries.Count()
		cost := w.hashes(func() {
			_, err := w.Password(t.Context(), Visitor{IP: ownIP}, c)
			if err != ErrBadCredentials { //nolint:errorlint // the very error: nothing else may be told
				t.Errorf("%s: %v", name, err)
			}
		})
		if n := w.queries.Count() - queries; cost != 1 || n != 1 { // the record waits for nobody
			t.Errorf("%s: %v hashes, %d queries", name, cost, n)
		}
	}
	reasons := map[string]int{}
	for _, r := range w.audited(t, "sign_in_failed") {
		reasons[r.after(t)["reason"].(string)]++
		if strings.Contains(r.Changes+r.ResourceID, "nobody") || r.after(t)["address"] != "192.0.2.1" || r.ActorType != tenants.ActorSystem {
			t.Errorf("%+v", r)
		}
	}
	want := map[string]int{"unknown": 5, "wrong_password": 6, "inactive": 1, "tenant_suspended": 1}
	if diff := cmp.Diff(want, reasons); diff != "" {
		t.Errorf("reasons in the audit log (-want +got):\n%s", diff)
	}
}

// They take the same time. On a busy machine single attempts say little: rounds go on until the medians are close. The bound
// is generous; what the work is, to the round of bcrypt, the test above counts.
func TestFailuresTakeTheSameTime(t *testing.T) {
	t.Parallel()
	const atLeast, atMost, bound = 9, 60, 2
	w := newWorld(t, worldOptions{limits: unlimited, cost: 7})
	all := w.failures(t)
	maps.DeleteFunc(all, func(name string, _ Credentials) bool {
		return !slices.Contains([]string{"unknown", "wrong", "disabled, right", "hash of a lower cost"}, name)
	})
	took := map[string][]time.Duration{}
	for round := 1; ; round++ {
		medians := map[string]time.Duration{}
		for name, c := range all {
			began := time.Now()
			_, err := w.Password(t.Context(), Visitor{IP: ownIP}, c)
			took[name] = append(took[name], time.Since(began))
			wantErr(t, name, err, ErrBadCredentials)
			medians[name] = slices.Sorted(slices.Values(took[name]))[round/2]
		}
		from, to := slices.Min(slices.Collect(maps.Values(medians))), slices.Max(slices.Collect(maps.Values(medians)))
		switch near := to <= bound*from; {
		case round >= atLeast && near:
			t.Logf("after %d rounds from %v to %v", round, from, to)
			return
		case round == atMost:
			t.Fatalf("after %d rounds still from %v to %v: %v", round, from, to, medians)
		}
	}
}

// A hash of another cost is made anew once its password is at hand.
func TestRehash(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{cost: 5})
	admin := w.newAdmin(t)
	for _, cost := range []int{4, 6} {
		hash, err := bcrypt.GenerateFromPassword([]byte(password.Reveal()), cost)
		if err != nil {
			t.Fatal(err)
		}
		w.exec(t, `UPDATE users SET password_hash = $1 WHERE id = $2`, string(hash), admin.ID)
		first := w.in(t, admin)
		var stored string
		if err := w.pool.QueryRow(t.Context(), `SELECT password_hash FROM users WHERE id = $1`, admin.ID).Scan(&stored); err != nil {
			t.Fatal(err)
		}
		if got, err := bcrypt.Cost([]byte(stored)); err != nil || got != 5 {
			t.Errorf("cost %d: now %d (%v)", cost, got, err)
		}
		w.in(t, admin)
		if _, err := w.load(t.Context(), first); err != nil {
			t.Errorf("the session from before: %v", err)
		}
	}
}

// Beyond 72 bytes bcrypt looks at nothing: such a password is nobody's, and costs nothing, however long (AU-11).
func TestLongPasswords(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{limits: unlimited})
	long := strings.Repeat("0123456789", 8)
	_, err := w.Users.Create(t.Context(), someone, Admins, NewUser{Email: "a@x.test", Role: RoleAdmin, Password: secrets.Text(long)})
	wantInvalid(t, "80 bytes", err, "/password", fault.TooLong)
	if err == nil || !strings.Contains(err.Error(), "72 bytes") {
		t.Errorf("%v does not say how long", err)
	}
	_, err = w.Users.Create(t.Context(), someone, Admins, NewUser{Email: "a@x.test", Role: RoleAdmin, Password: secrets.Text(strings.Repeat("😊", 30))})
	wantInvalid(t, "30 emoji", err, "/password", fault.TooLong)
	u, err := w.Users.Create(t.Context(), someone, Admins, NewUser{Email: "a@x.test", Role: RoleAdmin, Password: secrets.Text(long[:72])})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.admin(t.Context(), ownIP, u.Email, secrets.Text(long[:72])); err != nil {
		t.Errorf("72 bytes: %v", err)
	}
	for name, typed := range map[string]string{
		"80 bytes": long, "another tail": long[:72] + "x", "NUL after the end": long[:72] + "\x00", "1 MB": long[:72] + strings.Repeat("x", 1<<20),
	} {
		cost := w.hashes(func() {
			_, err := w.admin(t.Context(), ownIP, u.Email, secrets.Text(typed))
			wantErr(t, name, err, ErrBadCredentials)
		})
		if cost != 0 {
			t.Errorf("%s: %v hashes", name, cost)
		}
	}
	if _, err := w.admin(t.Context(), ownIP, strings.Repeat("a", 1<<20), password); !errors.Is(err, ErrBadCredentials) {
		t.Errorf("a name of 1 MB: %v", err)
	}
	if _, err := w.admin(t.Context(), ownIP, u.Email, secrets.Text(long[:71])); !errors.Is(err, ErrBadCredentials) {
		t.Errorf("71 of 72 bytes: %v", err)
	}
}

func TestLongPasswordsCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	w.newAdmin(t)
	for range 5 {
		_, err := w.admin(t.Context(), strange, "admin@x.test", secrets.Text(strings.Repeat("x", 100)))
		wantErr(t, "long", err, ErrBadCredentials)
	}
	if _, isLocked := locked(second(w.admin(t.Context(), strange, "admin@x.test", password))); !isLocked {
		t.Error("they do not count as failures")
	}
}

func second[A, B any](_ A, b B) B { return b }

// A refusal by the counters costs no query and no hash.
func TestLockedCostsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	w.newAdmin(t)
	for range 5 {
		_, err := w.admin(t.Context(), strange, "admin@x.test", "wrong password")
		wantErr(t, "guess", err, ErrBadCredentials)
	}
	w.pool.Close() // whoever asks it now gets an error
	cost := w.hashes(func() {
		for range 100 {
			if _, isLocked := locked(second(w.admin(t.Context(), ownIP, "admin@x.test", password))); !isLocked {
				t.Fatal("not locked")
			}
		}
	})
	if cost != 0 {
		t.Errorf("%v hashes", cost)
	}
}

// What went wrong here is no failure of the visitor's: it is given back.
func TestOwnTroubleDoesNotCount(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	w.newAdmin(t)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for range 10 {
		if _, err := w.admin(gone, ownIP, "admin@x.test", password); !errors.Is(err, context.Canceled) {
			t.Fatalf("%v", err)
		}
	}
	for range cap(w.Users.passwords.slots) { // every processor is busy
		w.Users.passwords.slots <- struct{}{}
	}
	busy, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	for range 10 { // the first waits for a processor, if the time suffices for the query before; the others have none left for it
		if _, err := w.admin(busy, ownIP, "admin@x.test", password); !errors.Is(err, ErrOverloaded) && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("%v", err)
		}
	}
	for range cap(w.Users.passwords.slots) {
		<-w.Users.passwords.slots
	}
	if _, err := w.admin(t.Context(), ownIP, "admin@x.test", password); err != nil {
		t.Error(err)
	}
}

// lateContext is one whose time runs out with the next hash.
type lateContext struct {
	context.Context
	p      *Passwords
	hashed int64
}

func (w *world) late(t testing.TB) context.Context {
	return lateContext{t.Context(), w.Users.passwords, w.Users.passwords.hashed.Load()}
}

func (c lateContext) Err() error {
	if c.p.hashed.Load() > c.hashed {
		return context.DeadlineExceeded
	}
	return c.Context.Err()
}

// Time that went by with hashes, or in the wait for one, is not laid to the database's charge; a wrong guess stays one.
func TestTimeRunsOut(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	u := w.newAdmin(t)
	for range 7 {
		_, err := w.admin(w.late(t), ownIP, u.Email, password)
		wantErr(t, "the right password", err, ErrOverloaded)
	}
	if list, err := w.Sessions.List(t.Context(), Admins, u.ID); err != nil || len(list) != 0 {
		t.Errorf("%d sessions, %v", len(list), err)
	}
	_, err := w.Users.Create(w.late(t), someone, Admins, NewUser{Email: "b@x.test", Role: RoleAdmin, Password: password})
	wantErr(t, "a new user", err, ErrOverloaded)
	wantErr(t, "a set password", w.Users.SetPassword(w.late(t), someone, Admins, u.ID, "another password", false), ErrOverloaded)

	over, cancel := context.WithDeadline(t.Context(), time.Now())
	defer cancel()
	p := w.Users.passwords
	for range cap(p.slots) {
		p.slots <- struct{}{}
	}
	_, _, err = p.compare(over, "", password)
	wantErr(t, "no processor is free", err, ErrOverloaded)
	for range cap(p.slots) {
		<-p.slots
	}

	for range 5 {
		_, err := w.admin(w.late(t), ownIP, u.Email, "wrong password")
		wantErr(t, "a wrong password", err, ErrBadCredentials)
	}
	_, err = w.admin(t.Context(), ownIP, u.Email, password)
	if _, ok := locked(err); !ok {
		t.Errorf("after five wrong guesses: %v", err)
	}

	for range 5 {
		room, _, err := w.Throttle.Reserve(t.Context(), ratelimit.LoginAttempt{IP: strange, Account: "admin b@x.test"})
		if err != nil || room == nil {
			t.Fatal("no room", err)
		}
		defer room.Refund(t.Context())
	}
	_, err = w.admin(over, netip.MustParseAddr("198.51.100.8"), "b@x.test", password)
	wantErr(t, "the outcome of other attempts is open", err, ErrOverloaded)
}

// A flood of failures does not flood the audit log, of whatever kinds they are; what is left out is counted once.
func TestAuditIsCapped(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{limits: unlimited})
	const failures = 200
	began := time.Now()
	for i := range failures {
		_, err := w.admin(t.Context(), strange, fmt.Sprintf("user%d@x.test", i), secrets.Text(strings.Repeat("x", 100)))
		wantErr(t, "guess", err, ErrBadCredentials)
		w.Refusals.OperatorToken(oneToken{}, newOperatorToken(t), ErrUnknown, strange, "")
	}
	most := refusalRecordsBurst + int(time.Since(began).Seconds()*refusalRecords/60) + 1
	n := len(w.audited(t, "sign_in_failed")) + len(w.audited(t, "refused"))
	if n < refusalRecordsBurst || n > most {
		t.Errorf("%d records of %d failures, want at most %d", n, 2*failures, most)
	}
	families, err := w.reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := f.GetName()
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			got[name] = m.GetCounter().GetValue()
		}
	}
	if got["converger_sign_ins_total admin wrong"] != failures || got["converger_audit_left_out_total"] != float64(2*failures-n) ||
		got["converger_password_hashes_total"] != float64(w.Users.passwords.hashed.Load()) {
		t.Errorf("%v", got)
	}
	if _, ok := got["converger_sign_ins_total tenant locked"]; !ok {
		t.Error("series do not exist from the start")
	}
}
