package http

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/tenants"
)

// Both kinds of people are managed alike, and one realm knows nothing of another's.
func TestManageUsers(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	other := must(f.Tenants.Create(t.Context(), testActor, tenants.NewTenant{Name: "Other"}))
	f.refresh(t)
	tenantUsers := managementPrefix + "/tenants/" + f.tenant.ID.String() + "/users"
	for _, test := range []struct {
		realm               auth.Realm
		users, elsewhere    string // where they are, and where others are
		mighty, small, none string // roles
		link                string
	}{
		{auth.TenantRealm(f.tenant.ID), tenantUsers, managementPrefix + "/tenants/" + other.ID.String() + "/users", "owner", "member", "super_admin", "https://hub.example/portal/link/"},
		{auth.Admins, managementPrefix + "/admin_users", tenantUsers, "super_admin", "viewer", "owner", "https://hub.example/admin/link/"},
	} {
		t.Run(test.realm.String(), func(t *testing.T) {
			ops := func() option { return bearer(f.operatorOf(t)) }
			create := func(body string) answer { return f.call(t, "POST", test.users, body, ops()) }
			const password = "correct horse battery staple"
			made := create(`{"email":" Ada@Example.com ","name":"Ada","role":"` + test.mighty + `","password":"` + password + `"}`)
			made.is(t, 201, "")
			one := made.Header.Get("Location")
			data := made.get(t, "data").(map[string]any)
			if data["email"] != "ada@example.com" || data["role"] != test.mighty || data["status"] != "active" || data["has_password"] != true || data["must_change_password"] != true {
				t.Errorf("made: %s", made)
			}
			if tenant, ok := test.realm.Tenant(); ok != (data["tenant_id"] != nil) || ok && data["tenant_id"] != tenant.String() {
				t.Errorf("whose: %v", data["tenant_id"])
			}
			create(`{"email":"ADA@example.com","role":"`+test.small+`"}`).is(t, 409, codeConflict)
			create(`{"email":"x@example.com","role":"`+test.none+`"}`).is(t, 422, codeValidationFailed)
			for _, body := range []string{`{"role":"viewer"}`, `{"email":"x","role":"viewer"}`, `{"email":"x@example.com"}`, `{"email":"x@example.com","role":"viewer","password":"short"}`,
				`{"email":"x@example.com","role":"viewer","password":"` + strings.Repeat("é", 37) + `"}`, `{"email":"x@example.com","role":"viewer","hash":"x"}`} {
				create(body).is(t, 422, codeValidationFailed)
			}
			second := create(`{"email":"grace@example.com","role":"` + test.small + `"}`)
			if second.is(t, 201, ""); second.get(t, "data", "has_password") != false || second.get(t, "data", "must_change_password") != false {
				t.Errorf("without a password: %s", second)
			}

			// Found by page and by address, in any spelling; not by others.
			page := f.call(t, "GET", test.users+"?limit=1", "", ops())
			next := f.call(t, "GET", test.users+"?limit=1&cursor="+page.get(t, "meta", "next_cursor").(string), "", ops())
			if next.is(t, 200, ""); next.get(t, "data").([]any)[0].(map[string]any)["email"] != "grace@example.com" {
				t.Errorf("second page: %s", next)
			}
			f.call(t, "GET", test.elsewhere+"?cursor="+page.get(t, "meta", "next_cursor").(string), "", ops()).is(t, 400, codeInvalidCursor)
			for query, want := range map[string]int{"?email=ADA%40example.com": 1, "?email=nobody%40example.com": 0} {
				if n := len(f.call(t, "GET", test.users+query, "", ops()).get(t, "data").([]any)); n != want {
					t.Errorf("%s finds %d, want %d", query, n, want)
				}
			}
			id := one[strings.LastIndexByte(one, '/'):]
			f.call(t, "GET", test.elsewhere+id, "", ops()).is(t, 404, codeNotFound)
			f.call(t, "POST", test.elsewhere+id+"/sign_in_link", "", ops()).is(t, 404, codeNotFound)
			f.call(t, "GET", test.users+"/"+uuid.NewString()+"/sessions", "", ops()).is(t, 404, codeNotFound)

			// Sessions are listed and ended; the other's go on.
			mine, theirs := f.newSession(t, test.realm, id[1:]), f.newSession(t, test.realm, second.get(t, "data", "id").(string))
			sessions := func(user string) []any { return f.call(t, "GET", user+"/sessions", "", ops()).get(t, "data").([]any) }
			if list := sessions(one); len(list) != 1 || list[0].(map[string]any)["id"] != mine.String() || list[0].(map[string]any)["user_agent"] != "test" {
				t.Errorf("sessions %v", list)
			}
			f.call(t, "DELETE", one+"/sessions/"+theirs.String(), "", ops()).is(t, 404, codeNotFound)
			f.call(t, "DELETE", one+"/sessions/"+mine.String(), "", ops()).is(t, 204, "")
			f.newSession(t, test.realm, id[1:])
			f.call(t, "DELETE", one+"/sessions", "", ops()).is(t, 204, "")
			if n, others := len(sessions(one)), len(sessions(second.Header.Get("Location"))); n != 0 || others != 1 {
				t.Errorf("%d sessions are left, and %d of the other; want 0 and 1", n, others)
			}

			// A new password, or a link, ends what was.
			f.newSession(t, test.realm, id[1:])
			set := f.call(t, "POST", one+"/password", `{"password":"`+password+`2","must_change_password":false}`, ops())
			if set.is(t, 200, ""); set.get(t, "data", "must_change_password") != false || len(sessions(one)) != 0 || strings.Contains(string(set.body), password) {
				t.Errorf("password set: %s, %v", set, sessions(one))
			}
			f.call(t, "POST", one+"/password", `{"password":"short"}`, ops()).is(t, 422, codeValidationFailed)
			link := f.call(t, "POST", one+"/sign_in_link", "", ops())
			if link.is(t, 201, ""); !strings.HasPrefix(fmt.Sprint(link.get(t, "data", "url")), test.link) || link.get(t, "data", "expires_at") == nil {
				t.Errorf("link: %s", link)
			}

			// Roles and status; the last super_admin stays.
			for _, body := range []string{`{"role":"` + test.none + `"}`, `{"status":"locked"}`, `{"email":"new@example.com"}`, `{"role":null}`} {
				f.call(t, "PATCH", one, body, ops()).is(t, 422, codeValidationFailed)
			}
			want := 200
			if test.realm == auth.Admins {
				want = 409
			}
			if a := f.call(t, "PATCH", one, `{"status":"inactive"}`, ops()); a.StatusCode != want {
				t.Errorf("switched off: %s, want %d", a, want)
			}
			if want == 200 {
				f.call(t, "POST", one+"/sign_in_link", "", ops()).is(t, 422, codeValidationFailed)
				f.call(t, "DELETE", one, "", ops()).is(t, 204, "")
				f.call(t, "GET", one, "", ops()).is(t, 404, codeNotFound)
			}
			f.call(t, "DELETE", second.Header.Get("Location"), "", ops()).is(t, 204, "")
		})
	}
	f.call(t, "GET", managementPrefix+"/tenants/"+uuid.NewString()+"/users", "", f.ops()).is(t, 404, codeNotFound)
}
