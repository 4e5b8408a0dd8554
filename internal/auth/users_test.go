package auth

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/fault"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

func TestCreateUser(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	realm := TenantRealm(w.tenant)
	u, err := w.Users.Create(t.Context(), someone, realm, NewUser{
		Email: " Ada@ACME.test ", Name: "Ada", Role: RoleOwner, Password: password, MustChangePassword: true})
	if err != nil {
		t.Fatal(err)
	}
	want := User{Realm: realm, ID: u.ID, Email: "ada@acme.test", Name: "Ada", Role: RoleOwner, Status: UserActive,
		HasPassword: true, MustChangePassword: true, PasswordVersion: 1, InsertedAt: u.InsertedAt, UpdatedAt: u.InsertedAt}
	if diff := cmp.Diff(want, u, cmp.AllowUnexported(Realm{})); diff != "" || u.ID.Version() != 7 {
		t.Error(diff)
	}
	for name, get := range map[string]func() (User, error){
		"Get":     func() (User, error) { return w.Users.Get(t.Context(), realm, u.ID) },
		"ByEmail": func() (User, error) { return w.Users.ByEmail(t.Context(), realm, "ADA@acme.test\n") },
	} {
		if got, err := get(); err != nil || got != u {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}

	taken := NewUser{Email: "ADA@acme.TEST", Role: RoleViewer}
	_, err = w.Users.Create(t.Context(), someone, realm, taken)
	wantErr(t, "the same address", err, ErrEmailTaken)
	if _, err = w.Users.Create(t.Context(), someone, TenantRealm(w.newTenant(t, "Other")), taken); err != nil {
		t.Errorf("the same address at another tenant: %v", err)
	}
	if _, err = w.Users.Create(t.Context(), someone, Admins, taken); err != nil {
		t.Errorf("the same address among administrators: %v", err)
	}
	_, err = w.Users.Create(t.Context(), someone, TenantRealm(uuid.New()), taken)
	wantErr(t, "no such tenant", err, tenants.ErrNotFound)
	if _, err = w.Users.Create(t.Context(), someone, Realm{}, taken); err == nil {
		t.Error("a user of nobody's realm was made")
	}

	var hash string
	if err := w.pool.QueryRow(t.Context(), `SELECT password_hash FROM users WHERE id = $1`, u.ID).Scan(&hash); err != nil || !strings.HasPrefix(hash, "$2a$04$") {
		t.Errorf("stored as %q (%v)", hash, err)
	}
	created := w.audited(t, "create")
	if len(created) != 3 || created[0].TenantID == nil || *created[0].TenantID != w.tenant || created[0].Resource != "tenant_user" ||
		created[0].ResourceID != u.ID.String() || created[2].Resource != "admin_user" || created[2].TenantID != nil {
		t.Errorf("audit %+v", created)
	}
	for _, r := range created {
		if strings.Contains(r.Changes, "$2a$") || strings.Contains(r.Changes, password.Reveal()) {
			t.Errorf("the audit log holds a secret: %s", r.Changes)
		}
	}
}

func TestUsersAreChecked(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	for name, tt := range map[string]struct {
		n             NewUser
		pointer, code string
	}{
		"no address":            {NewUser{Role: RoleOwner}, "/email", fault.Required},
		"only space":            {NewUser{Email: " \u200b", Role: RoleOwner}, "/email", fault.Required},
		"no at":                 {NewUser{Email: "ada", Role: RoleOwner}, "/email", fault.Malformed},
		"two at":                {NewUser{Email: "a@b@c", Role: RoleOwner}, "/email", fault.Malformed},
		"space inside":          {NewUser{Email: "a b@c", Role: RoleOwner}, "/email", fault.Malformed},
		"NUL":                   {NewUser{Email: "a\x00@c", Role: RoleOwner}, "/email", fault.Malformed},
		"long address":          {NewUser{Email: strings.Repeat("a", 250) + "@x.test", Role: RoleOwner}, "/email", fault.TooLong},
		"control in the name":   {NewUser{Email: "a@x.test", Name: "a\nb", Role: RoleOwner}, "/name", fault.Malformed},
		"long name":             {NewUser{Email: "a@x.test", Name: strings.Repeat("é", 201), Role: RoleOwner}, "/name", fault.TooLong},
		"no role":               {NewUser{Email: "a@x.test"}, "/role", fault.UnknownValue},
		"administrators' role":  {NewUser{Email: "a@x.test", Role: RoleSuperAdmin}, "/role", fault.UnknownValue},
		"short password":        {NewUser{Email: "a@x.test", Role: RoleOwner, Password: "1234567"}, "/password", fault.OutOfRange},
		"seven emoji":           {NewUser{Email: "a@x.test", Role: RoleOwner, Password: "😊😊😊😊😊😊😊"}, "/password", fault.OutOfRange},
		"blanks for a password": {NewUser{Email: "a@x.test", Role: RoleOwner, Password: " \t\u00a0\u2003     \n"}, "/password", fault.Malformed},
		"NUL in the password":   {NewUser{Email: "a@x.test", Role: RoleOwner, Password: "12345678\x00"}, "/password", fault.Malformed},
		"no UTF-8":              {NewUser{Email: "a@x.test", Role: RoleOwner, Password: "12345678\xff"}, "/password", fault.Malformed},
		"the address":           {NewUser{Email: "ada@x.test", Role: RoleOwner, Password: "Ada@x.test"}, "/password", fault.Conflict},
	} {
		_, err := w.Users.Create(t.Context(), someone, TenantRealm(w.tenant), tt.n)
		wantInvalid(t, name, err, tt.pointer, tt.code)
	}
	_, err := w.Users.Create(t.Context(), someone, Admins, NewUser{Email: "a@x.test", Role: RoleOwner})
	wantInvalid(t, "tenants' role", err, "/role", fault.UnknownValue)
	_, err = w.Users.Create(t.Context(), someone, Admins, NewUser{Email: "x", Name: "\x01", Role: "x", Password: "x"})
	var invalid *fault.Invalid
	if !errors.As(err, &invalid) || len(invalid.Fields) != 4 {
		t.Errorf("everything wrong at once: %v", err)
	}
	u := w.newAdmin(t)
	_, err = w.Users.Update(t.Context(), someone, Admins, u.ID, UserChange{Status: ptr(UserStatus("gone"))})
	wantInvalid(t, "status", err, "/status", fault.UnknownValue)
	err = w.Users.SetPassword(t.Context(), someone, Admins, u.ID, "", false)
	wantInvalid(t, "no password", err, "/password", fault.Required)
	if n, err := w.Users.List(t.Context(), TenantRealm(w.tenant), uuid.Nil, 10); err != nil || len(n) != 0 {
		t.Errorf("%d users were made (%v)", len(n), err)
	}
	if _, err := w.Users.Create(t.Context(), someone, Admins, NewUser{Email: "c@x.test", Role: RoleViewer, Password: "😊😊😊😊😊😊😊😊"}); err != nil {
		t.Errorf("eight emoji: %v", err)
	}
}

func TestListUsers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	realm := TenantRealm(w.tenant)
	w.newAdmin(t)
	var want []string
	for i := range 5 {
		want = append(want, w.newUser(t, realm, fmt.Sprintf("u%d@acme.test", i), RoleMember).Email)
	}
	var got []string
	for after := uuid.Nil; ; {
		page, err := w.Users.List(t.Context(), realm, after, 2)
		if err != nil {
			t.Fatal(err)
		}
		if len(page) == 0 {
			break
		}
		for _, u := range page {
			got, after = append(got, u.Email), u.ID
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Nobody reaches another realm's users through any method.
func TestUsersOfAnotherTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	u := w.newUser(t, TenantRealm(w.tenant), "ada@acme.test", RoleOwner)
	in := w.in(t, u)
	for name, realm := range map[string]Realm{"another tenant": TenantRealm(w.newTenant(t, "Other")), "administrators": Admins, "nobody": {}, "the nil tenant": TenantRealm(uuid.Nil), "the greatest UUID": TenantRealm(uuid.Max)} {
		if realm == Admins && name != "administrators" {
			t.Errorf("%s is the administrators' realm", name)
		}
		for method, call := range map[string]func() error{
			"Get":     func() error { return second(w.Users.Get(t.Context(), realm, u.ID)) },
			"ByEmail": func() error { return second(w.Users.ByEmail(t.Context(), realm, u.Email)) },
			"Update": func() error {
				return second(w.Users.Update(t.Context(), someone, realm, u.ID, UserChange{Name: ptr("x")}))
			},
			"SetPassword": func() error { return w.Users.SetPassword(t.Context(), someone, realm, u.ID, "another password", false) },
			"Delete":      func() error { return w.Users.Delete(t.Context(), someone, realm, u.ID) },
			"IssueLink": func() error {
				_, _, err := w.Users.IssueLink(t.Context(), someone, realm, u.ID)
				return err
			},
			"End":    func() error { return w.Sessions.End(t.Context(), someone, realm, u.ID, in.Session.ID) },
			"EndAll": func() error { return second(w.Sessions.EndAll(t.Context(), someone, realm, u.ID, uuid.Nil)) },
		} {
			wantErr(t, method+" through "+name, call(), ErrUserNotFound)
		}
		if list, err := w.Users.List(t.Context(), realm, uuid.Nil, 10); err != nil || len(list) != 0 {
			t.Errorf("%s: %v, %v", name, list, err)
		}
		if list, err := w.Sessions.List(t.Context(), realm, u.ID); err != nil || len(list) != 0 {
			t.Errorf("%s: %v, %v", name, list, err)
		}
	}
	if got, err := w.Users.Get(t.Context(), u.Realm, u.ID); err != nil || got.Name != u.Name {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := w.load(t.Context(), in); err != nil {
		t.Errorf("the session: %v", err)
	}
}

func TestUpdateUser(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	w.newAdmin(t)
	u := w.newUser(t, Admins, "b@x.test", RoleAdmin)
	got, err := w.Users.Update(t.Context(), someone, Admins, u.ID, UserChange{Name: ptr("Bea"), Role: ptr(RoleViewer)})
	if err != nil || got.Name != "Bea" || got.Role != RoleViewer || got.Status != UserActive || !got.UpdatedAt.After(u.UpdatedAt) {
		t.Errorf("%+v, %v", got, err)
	}
	if same, err := w.Users.Update(t.Context(), someone, Admins, u.ID, UserChange{Role: ptr(RoleViewer)}); err != nil || same != got {
		t.Errorf("nothing to change: %+v, %v", same, err)
	}
	records := w.audited(t, "update")
	if len(records) != 1 || !strings.Contains(records[0].Changes, `"before": {"name": "Ada"`) && !strings.Contains(records[0].Changes, `"role": "admin"`) {
		t.Errorf("audit %+v", records)
	}
}

// What was taken away is gone with the next request; a role counts at once (AU-15).
func TestRightsTakenAway(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{limits: unlimited})
	w.newAdmin(t)
	const another secrets.Text = "another password"
	realm := TenantRealm(w.tenant)
	change := func(c UserChange) func(*testing.T, User) error {
		return func(t *testing.T, u User) error {
			return second(w.Users.Update(t.Context(), someone, u.Realm, u.ID, c))
		}
	}
	for i, tt := range []struct {
		what string
		do   func(*testing.T, User) error
		ends bool
	}{
		{"demotion", change(UserChange{Role: ptr(RoleViewer)}), false},
		{"switched off", change(UserChange{Status: ptr(UserInactive)}), true},
		{"another password", func(t *testing.T, u User) error {
			return w.Users.SetPassword(t.Context(), someone, u.Realm, u.ID, another, true)
		}, true},
		{"deleted", func(t *testing.T, u User) error { return w.Users.Delete(t.Context(), someone, u.Realm, u.ID) }, true},
		{"all sessions ended", func(t *testing.T, u User) error {
			n, err := w.Sessions.EndAll(t.Context(), someone, u.Realm, u.ID, uuid.Nil)
			if n != 3 {
				t.Errorf("%d sessions ended", n)
			}
			return err
		}, true},
	} {
		for _, r := range []Realm{Admins, realm} {
			u := w.newUser(t, r, fmt.Sprintf("u%d@x.test", i), RoleAdmin)
			var in []SignedIn
			for range 3 {
				in = append(in, w.in(t, u))
			}
			link, _, err := w.Users.IssueLink(t.Context(), someone, r, u.ID)
			if err != nil {
				t.Fatal(err)
			}
			if err := tt.do(t, u); err != nil {
				t.Fatalf("%s: %v", tt.what, err)
			}
			for _, in := range in {
				s, err := w.load(t.Context(), in)
				if tt.ends {
					wantErr(t, tt.what+": a session", err, ErrUnknown)
				} else if err != nil || s.User.Role != RoleViewer || s.User.May(RightWrite) {
					t.Errorf("%s: %+v, %v", tt.what, s, err)
				}
			}
			_, err = w.Link(t.Context(), Visitor{}, r != Admins, link.Reveal())
			if closed := tt.ends && tt.what != "all sessions ended"; closed != errors.Is(err, ErrLink) {
				t.Errorf("%s: the link: %v", tt.what, err)
			}
		}
	}
}

func TestSuspendedTenant(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	u := w.newUser(t, TenantRealm(w.tenant), "ada@acme.test", RoleOwner)
	in := w.in(t, u)
	link, _, err := w.Users.IssueLink(t.Context(), someone, u.Realm, u.ID)
	if err != nil {
		t.Fatal(err)
	}
	set := func(status tenants.Status) {
		t.Helper()
		if _, err := w.store.SetStatus(t.Context(), someone, w.tenant, status); err != nil {
			t.Fatal(err)
		}
	}
	set(tenants.StatusSuspended)
	_, err = w.load(t.Context(), in)
	wantErr(t, "the session", err, ErrUnknown)
	_, err = w.Link(t.Context(), Visitor{}, true, link.Reveal())
	wantErr(t, "the link", err, ErrLink)
	set(tenants.StatusActive)
	if _, err = w.load(t.Context(), in); err != nil {
		t.Errorf("the session afterwards: %v", err)
	}
	if _, err = w.Link(t.Context(), Visitor{}, true, link.Reveal()); err != nil {
		t.Errorf("the link afterwards: %v", err)
	}
}

// However many take it away at once, one super_admin stays.
func TestLastSuperAdmin(t *testing.T) {
	t.Parallel()
	for name, take := range map[string]func(*testing.T, *world, User) error{
		"demotion": func(t *testing.T, w *world, u User) error {
			return second(w.Users.Update(t.Context(), someone, Admins, u.ID, UserChange{Role: ptr(RoleAdmin)}))
		},
		"switching off": func(t *testing.T, w *world, u User) error {
			return second(w.Users.Update(t.Context(), someone, Admins, u.ID, UserChange{Status: ptr(UserInactive)}))
		},
		"deletion": func(t *testing.T, w *world, u User) error { return w.Users.Delete(t.Context(), someone, Admins, u.ID) },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, worldOptions{})
			var all []User
			for i := range 6 {
				all = append(all, w.newUser(t, Admins, fmt.Sprintf("u%d@x.test", i), RoleSuperAdmin))
			}
			off := all[5]
			if _, err := w.Users.Update(t.Context(), someone, Admins, off.ID, UserChange{Status: ptr(UserInactive)}); err != nil {
				t.Fatal(err)
			}
			kept := make([]bool, 5)
			var wg sync.WaitGroup
			for i, u := range all[:5] {
				wg.Go(func() {
					err := take(t, w, u)
					kept[i] = errors.Is(err, ErrLastSuperAdmin)
					if err != nil && !kept[i] {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			left := 0
			for i, k := range kept {
				if k {
					left++
					wantErr(t, "once more", take(t, w, all[i]), ErrLastSuperAdmin)
				}
			}
			if left != 1 {
				t.Errorf("%d were refused", left)
			}
			var n int
			if err := w.pool.QueryRow(t.Context(), `SELECT count(*) FROM users WHERE role = 'super_admin' AND status = 'active'`).Scan(&n); err != nil || n != 1 {
				t.Errorf("%d are left (%v)", n, err)
			}
			// One who is off already, or no super_admin, may go.
			if err := w.Users.Delete(t.Context(), someone, Admins, off.ID); err != nil {
				t.Error(err)
			}
		})
	}
}

func TestRights(t *testing.T) {
	t.Parallel()
	acme, other := TenantRealm(uuid.New()), TenantRealm(uuid.New())
	got := map[string]string{}
	for _, r := range []Realm{Admins, acme} {
		for _, role := range r.Roles() {
			u := User{Realm: r, Role: role}
			for _, x := range []struct {
				name string
				may  bool
			}{
				{"write", u.May(RightWrite)}, {"users", u.May(RightManageUsers)}, {"admins", u.May(RightManageAdmins)},
				{"grant super_admin", u.MayGrant(Admins, RoleSuperAdmin)}, {"grant admin viewer", u.MayGrant(Admins, RoleViewer)},
				{"grant owner", u.MayGrant(acme, RoleOwner)}, {"grant member", u.MayGrant(acme, RoleMember)}, {"grant elsewhere", u.MayGrant(other, RoleViewer)},
				{"grant what is no role", u.MayGrant(acme, RoleSuperAdmin) || u.MayGrant(Admins, RoleOwner)},
			} {
				if x.may {
					got[r.String()+" "+string(role)] += x.name + ", "
				}
			}
		}
	}
	want := map[string]string{
		"admin super_admin": "write, users, admins, grant super_admin, grant admin viewer, grant owner, grant member, grant elsewhere, ",
		"admin admin":       "write, users, grant owner, grant member, grant elsewhere, ",
		"tenant owner":      "write, users, grant owner, grant member, ",
		"tenant admin":      "write, users, grant member, ",
		"tenant member":     "write, ",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestChangePassword(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	u, err := w.Users.Create(t.Context(), someone, TenantRealm(w.tenant), NewUser{Email: "ada@acme.test", Role: RoleMember, Password: password, MustChangePassword: true})
	if err != nil {
		t.Fatal(err)
	}
	own, elsewhere := w.in(t, u), w.in(t, u)
	session, err := w.load(t.Context(), own)
	if err != nil || !session.User.MustChangePassword {
		t.Fatalf("%+v, %v", session, err)
	}
	v := Visitor{IP: ownIP}
	const fresh secrets.Text = "a fresh password"
	_, err = w.ChangePassword(t.Context(), v, session, password, "short")
	wantInvalid(t, "short", err, "/password", fault.OutOfRange)
	_, err = w.ChangePassword(t.Context(), v, session, password, password)
	wantInvalid(t, "the present one again", err, "/password", fault.Conflict)
	_, err = w.ChangePassword(t.Context(), v, session, "wrong password", fresh)
	wantInvalid(t, "wrong", err, "/current_password", fault.Conflict)
	device, err := w.ChangePassword(t.Context(), v, session, password, fresh)
	if err != nil || device == "" {
		t.Fatal(err)
	}
	if s, err := w.load(t.Context(), own); err != nil || s.User.MustChangePassword || s.User.PasswordVersion != 2 {
		t.Errorf("the own session: %+v, %v", s, err)
	}
	_, err = w.load(t.Context(), elsewhere)
	wantErr(t, "another session", err, ErrUnknown)
	c := Credentials{Portal: true, Tenant: "Acme", Email: u.Email, Password: password}
	_, err = w.Password(t.Context(), v, c)
	wantErr(t, "the old password", err, ErrBadCredentials)
	c.Password = fresh
	v.Device = device.Reveal()
	if _, err = w.Password(t.Context(), v, c); err != nil {
		t.Errorf("the new password: %v", err)
	}
	// Who sits at an open session guesses no faster than who stands outside.
	v.Device = ""
	var isLocked bool
	for range 6 {
		_, err = w.ChangePassword(t.Context(), v, session, "wrong password", fresh+"!")
		_, isLocked = locked(err)
	}
	if !isLocked {
		t.Errorf("the last of six guesses: %v", err)
	}
	if n := len(w.audited(t, "set_password")); n != 1 {
		t.Errorf("%d records", n)
	}
}

// Whoever proved the present password replaces that one and no later one: somebody has changed it for a reason.
func TestChangePasswordMeetsAChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	u := w.newAdmin(t)
	token, _, err := w.Users.IssueLink(t.Context(), someone, Admins, u.ID)
	if err != nil {
		t.Fatal(err)
	}
	in, err := w.Link(t.Context(), Visitor{IP: ownIP}, false, token.Reveal())
	if err != nil {
		t.Fatal(err)
	}
	const theirs secrets.Text = "what they have set"
	if err := w.Users.SetPassword(t.Context(), someone, Admins, u.ID, theirs, false); err != nil {
		t.Fatal(err)
	}
	_, err = w.ChangePassword(t.Context(), Visitor{IP: ownIP}, in.Session, "", "what came too late")
	wantInvalid(t, "too late", err, "", fault.Conflict)
	if _, err := w.admin(t.Context(), ownIP, u.Email, theirs); err != nil {
		t.Errorf("the later password: %v", err)
	}
}

func TestSignInLink(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin := w.newAdmin(t)
	issue := func(u User) string {
		t.Helper()
		token, expires, err := w.Users.IssueLink(t.Context(), someone, u.Realm, u.ID)
		if err != nil {
			t.Fatal(err)
		}
		if d := time.Until(expires); d < 14*time.Minute || d > 16*time.Minute {
			t.Errorf("expires in %v", d)
		}
		return token.Reveal()
	}
	for range 6 { // the account is locked, as is the address
		_, _ = w.admin(t.Context(), ownIP, admin.Email, "wrong password")
	}
	first, token := issue(admin), issue(admin)
	for name, text := range map[string]string{"an earlier link": first, "junk": "cvg_link_x", "none": "", "cut": token[:len(token)-1], "another": newLinkToken().Reveal()} {
		_, err := w.Link(t.Context(), Visitor{IP: ownIP}, false, text)
		wantErr(t, name, err, ErrLink)
	}
	_, err := w.Link(t.Context(), Visitor{IP: ownIP}, true, token)
	wantErr(t, "at the portal", err, ErrLink)

	// Twenty at once: one gets in.
	var mu sync.Mutex
	var in []SignedIn
	var wg sync.WaitGroup
	for range 20 {
		wg.Go(func() {
			s, err := w.Link(t.Context(), Visitor{IP: ownIP}, false, token)
			if err != nil {
				wantErr(t, "spent", err, ErrLink)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			in = append(in, s)
		})
	}
	wg.Wait()
	if len(in) != 1 {
		t.Fatalf("%d got in", len(in))
	}
	session, err := w.load(t.Context(), in[0])
	if err != nil || !session.ByLink || !session.MayResetPassword || session.User.ID != admin.ID || in[0].Device != "" {
		t.Fatalf("%+v, %v", session, err)
	}
	// The password is set without the current one, for a while.
	w.exec(t, `UPDATE web_sessions SET inserted_at = inserted_at - interval '16 minutes'`)
	if late, err := w.load(t.Context(), in[0]); err != nil || late.MayResetPassword {
		t.Errorf("%+v, %v", late, err)
	}
	if _, err := w.ChangePassword(t.Context(), Visitor{IP: ownIP}, session, "", "a fresh password"); err != nil {
		t.Error(err)
	}

	token = issue(admin)
	w.exec(t, `UPDATE sign_in_links SET expires_at = now() - interval '1 second'`)
	_, err = w.Link(t.Context(), Visitor{IP: ownIP}, false, token)
	wantErr(t, "expired", err, ErrLink)

	// Somebody who was made without a password.
	invited, err := w.Users.Create(t.Context(), someone, TenantRealm(w.tenant), NewUser{Email: "new@acme.test", Role: RoleViewer})
	if err != nil {
		t.Fatal(err)
	}
	guest, err := w.Link(t.Context(), Visitor{IP: ownIP}, true, issue(invited))
	if err != nil || guest.Session.User.HasPassword || !guest.Session.MayResetPassword {
		t.Errorf("%+v, %v", guest, err)
	}
	off := w.newUser(t, Admins, "off@x.test", RoleAdmin)
	if _, err := w.Users.Update(t.Context(), someone, Admins, off.ID, UserChange{Status: ptr(UserInactive)}); err != nil {
		t.Fatal(err)
	}
	_, _, err = w.Users.IssueLink(t.Context(), someone, Admins, off.ID)
	wantInvalid(t, "for somebody who is switched off", err, "", fault.Conflict)
	for _, r := range append(w.audited(t, "issue_link"), w.audited(t, "sign_in")...) {
		if strings.Contains(r.Changes, "cvg_") {
			t.Errorf("the audit log holds a token: %s", r.Changes)
		}
	}
}
