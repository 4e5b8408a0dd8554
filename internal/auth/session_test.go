package auth

import (
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

// A session ends when it was not used, at its age, and when it is ended; times are moved in the database, which keeps them.
func TestSessionEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{sessions: SessionOptions{Idle: time.Hour, Absolute: 24 * time.Hour}})
	admin := w.newAdmin(t)
	for name, tt := range map[string]struct {
		age, unused string
		ends        bool
	}{
		"fresh":                   {"0", "0", false},
		"used 59 minutes ago":     {"2 hours", "59 minutes", false},
		"not used for an hour":    {"2 hours", "61 minutes", true},
		"used, and nearly a day":  {"23 hours 59 minutes", "1 minute", false},
		"used, and a day old":     {"24 hours 1 second", "0", true},
		"neither used nor recent": {"48 hours", "48 hours", true},
	} {
		in := w.in(t, admin)
		w.exec(t, `UPDATE web_sessions SET inserted_at = inserted_at - $2::interval, expires_at = expires_at - $2::interval, seen_at = seen_at - $3::interval WHERE id = $1`,
			in.Session.ID, tt.age, tt.unused)
		listed, err := w.Sessions.List(t.Context(), Admins, admin.ID)
		if err != nil || (len(listed) == 0) != tt.ends {
			t.Errorf("%s: listed %+v, %v", name, listed, err)
		}
		got, err := w.load(t.Context(), in)
		switch {
		case tt.ends:
			wantErr(t, name, err, ErrUnknown)
		case err != nil:
			t.Errorf("%s: %v", name, err)
		case time.Until(got.ExpiresAt) > time.Hour+time.Second || got.ExpiresAt.Sub(got.OpenedAt) > 24*time.Hour:
			t.Errorf("%s: %+v", name, got)
		}
		if err := w.Sessions.End(t.Context(), someone, Admins, admin.ID, in.Session.ID); err != nil {
			t.Errorf("%s: end: %v", name, err)
		}
	}
}

// A password that was changed by whoever has the database at hand ends sessions too, if they say so.
func TestSessionOfAnEarlierPassword(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	in := w.in(t, w.newAdmin(t))
	w.exec(t, `UPDATE users SET password_version = password_version + 1`)
	_, err := w.load(t.Context(), in)
	wantErr(t, "load", err, ErrUnknown)
}

func TestSessionUseIsNotedOnceAMinute(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	in := w.in(t, w.newAdmin(t))
	seen := func() (at time.Time) {
		t.Helper()
		if err := w.pool.QueryRow(t.Context(), `SELECT seen_at FROM web_sessions`).Scan(&at); err != nil {
			t.Fatal(err)
		}
		return at
	}
	load := func() {
		t.Helper()
		var wg sync.WaitGroup
		for range 10 {
			wg.Go(func() {
				if _, err := w.load(t.Context(), in); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
	}
	first := seen()
	load()
	if at := seen(); at != first {
		t.Error("written within the minute")
	}
	w.exec(t, `UPDATE web_sessions SET seen_at = seen_at - interval '61 seconds'`)
	load()
	if at := seen(); !at.After(first) {
		t.Errorf("not written after a minute: %v, before %v", at, first)
	}
}

func TestEndSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	u := w.newUser(t, TenantRealm(w.tenant), "ada@acme.test", RoleOwner)
	bob := w.newUser(t, u.Realm, "bob@acme.test", RoleOwner)
	a, b, c, bobs := w.in(t, u), w.in(t, u), w.in(t, u), w.in(t, bob)
	gone := func(what string, in SignedIn) {
		t.Helper()
		_, err := w.load(t.Context(), in)
		wantErr(t, what, err, ErrUnknown)
	}
	if list, err := w.Sessions.List(t.Context(), u.Realm, u.ID); err != nil || len(list) != 3 || list[0].ID != c.Session.ID {
		t.Errorf("%+v, %v", list, err)
	}
	wantErr(t, "another user's session", w.Sessions.End(t.Context(), someone, u.Realm, u.ID, bobs.Session.ID), ErrUserNotFound)
	if err := w.Sessions.End(t.Context(), someone, u.Realm, u.ID, a.Session.ID); err != nil {
		t.Fatal(err)
	}
	gone("ended", a)
	wantErr(t, "twice", w.Sessions.End(t.Context(), someone, u.Realm, u.ID, a.Session.ID), ErrUserNotFound)
	if n, err := w.Sessions.EndAll(t.Context(), someone, u.Realm, u.ID, c.Session.ID); err != nil || n != 1 {
		t.Errorf("%d, %v", n, err)
	}
	gone("ended with all", b)
	for _, in := range []SignedIn{c, bobs} {
		if _, err := w.load(t.Context(), in); err != nil {
			t.Errorf("the kept session, and another user's: %v", err)
		}
	}
	if n := len(w.audited(t, "end_session")); n != 2 {
		t.Errorf("%d records", n)
	}
	_, err := w.Sessions.EndAll(t.Context(), someone, u.Realm, uuid.New(), uuid.Nil)
	wantErr(t, "of nobody", err, ErrUserNotFound)
}

// The sessions of one realm are none at the other's pages.
func TestSessionsOfTheOtherPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin, user := w.in(t, w.newAdmin(t)), w.in(t, w.newUser(t, TenantRealm(w.tenant), "admin@x.test", RoleOwner))
	for portal, in := range map[bool]SignedIn{true: admin, false: user} {
		d, err := w.Sessions.Parse(in.Token.Reveal())
		if err != nil {
			t.Fatal(err)
		}
		_, err = w.Sessions.Load(t.Context(), portal, d)
		wantErr(t, "a session of the other realm", err, ErrUnknown)
		if _, err = w.Sessions.Load(t.Context(), !portal, d); err != nil {
			t.Error(err)
		}
	}
}

// An invented token is refused from memory; a stored one holds its digest only.
func TestSessionTokens(t *testing.T) {
	t.Parallel()
	url := pgtest.New(t)
	queries := postgres.CountQueries(nil)
	key, retired := must(DeriveKey(secret, "sessions")), must(DeriveKey(older, "sessions"))
	s := NewSessions(pgtest.Open(t, url, postgres.Options{Tracer: queries}), SessionOptions{}, key, retired)
	good := s.marks.seal(sessionPrefix, random(randomBytes), "").Reveal()
	if _, err := s.Parse(good); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Parse((marker{retired}).seal(sessionPrefix, random(randomBytes), "").Reveal()); err != nil {
		t.Errorf("marked with the retired key: %v", err)
	}
	changed := func(i int) string {
		b := []byte(good)
		b[i] ^= 1
		return string(b)
	}
	for name, text := range map[string]string{
		"empty": "", "prefix": sessionPrefix, "cut": good[:len(good)-1], "longer": good + "A", "newline": good + "\n", "padded": good + "=",
		"first": changed(len(sessionPrefix)), "last": changed(len(good) - 1), "middle": changed(30),
		"another key": (marker{secret}).seal(sessionPrefix, random(randomBytes), "").Reveal(),
		"a device":    s.marks.seal(devicePrefix, random(randomBytes), "").Reveal(),
		"relabelled":  sessionPrefix + strings.TrimPrefix(s.marks.seal(devicePrefix, random(randomBytes), "").Reveal(), devicePrefix),
		"huge":        sessionPrefix + strings.Repeat("A", 1<<20),
	} {
		_, err := s.Parse(text)
		wantErr(t, name, err, ErrMalformed)
	}
	if n := queries.Count(); n != 0 {
		t.Errorf("%d queries", n)
	}
}

func TestRemoveEnded(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{})
	admin := w.newAdmin(t)
	live, idle, old := w.in(t, admin), w.in(t, admin), w.in(t, admin)
	w.exec(t, `UPDATE web_sessions SET seen_at = now() - interval '13 hours' WHERE id = $1`, idle.Session.ID)
	w.exec(t, `UPDATE web_sessions SET expires_at = now() WHERE id = $1`, old.Session.ID)
	// More than one batch.
	w.exec(t, `INSERT INTO web_sessions (realm, user_id, id, hash, password_version, by_link, address, user_agent, expires_at)
SELECT realm, id, gen_random_uuid(), sha256(i::text::bytea), 1, false, '', '', now() FROM users, generate_series(1, 1200) AS i`)
	if _, _, err := w.Users.IssueLink(t.Context(), someone, Admins, admin.ID); err != nil {
		t.Fatal(err)
	}
	other := w.newUser(t, Admins, "b@x.test", RoleViewer)
	open, _, err := w.Users.IssueLink(t.Context(), someone, Admins, other.ID)
	if err != nil {
		t.Fatal(err)
	}
	w.exec(t, `UPDATE sign_in_links SET expires_at = now() WHERE user_id = $1`, admin.ID)
	var got []int
	for {
		n, err := w.Sessions.RemoveEndedAllTenants(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, n)
		if n == 0 {
			break
		}
	}
	if len(got) != 3 || got[0] != 1001 || got[1] != 202 {
		t.Errorf("batches of %v", got)
	}
	if _, err := w.load(t.Context(), live); err != nil {
		t.Errorf("the live session: %v", err)
	}
	if _, err := w.Link(t.Context(), Visitor{IP: ownIP}, false, open.Reveal()); err != nil {
		t.Errorf("the open link: %v", err)
	}
}

// A sign-in that was under way while the password changed, or the user was switched off, opens nothing.
func TestSignInMeetsAChange(t *testing.T) {
	t.Parallel()
	w := newWorld(t, worldOptions{limits: unlimited})
	w.newAdmin(t)
	u := w.newUser(t, Admins, "b@x.test", RoleAdmin)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	var mu sync.Mutex
	var in []SignedIn
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if s, err := w.admin(t.Context(), ownIP, u.Email, password); err == nil {
					mu.Lock()
					in = append(in, s)
					mu.Unlock()
				}
			}
		})
	}
	eventually(t, "some sign-ins", func() bool { mu.Lock(); defer mu.Unlock(); return len(in) > 10 })
	if err := w.Users.SetPassword(t.Context(), someone, Admins, u.ID, "another password", false); err != nil {
		t.Fatal(err)
	}
	close(stop)
	wg.Wait()
	for _, s := range in {
		_, err := w.load(t.Context(), s)
		wantErr(t, "a session from before", err, ErrUnknown)
	}
	if list, err := w.Sessions.List(t.Context(), Admins, u.ID); err != nil || len(list) != 0 {
		t.Errorf("%d sessions, %v", len(list), err)
	}
}
