package tenants

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/uuid"
)

func TestCanonical(t *testing.T) {
	t.Parallel()
	const want = "admin@x.test"
	for _, typed := range []string{
		"admin@x.test", " admin@x.test", "ADMIN@x.test", "admin@x.test\t", "admin@X.TEST ", "\u00a0admin@x.test\u2003", "\u3000admin@x.test\r\n",
		"ａｄｍｉｎ@x.test", "admin＠x.test", "ad\u200bmin@x.test", "\ufeffadmin@x.test", "admin@x\u00ad.test", "𝐚𝐝𝐦𝐢𝐧@x.test", "ⓐdmin@x.test",
		"admin@x.te\u17b4st", "admin@x.te\ufe0fst", "\u202eadmin@x.test\u202c", " \u200b admin@x.test",
	} {
		if got := Canonical(typed); got != want {
			t.Errorf("%q: %q", typed, got)
		}
	}
	for a, b := range map[string]string{
		"Straße": "STRASSE", "ﬁn": "FIN", "e\u0301": "É", "Σίσυφος": "ΣΊΣΥΦΟΣ", "ſ": "S", "\u212a": "k", "ΐ": "\u0399\u0308\u0301",
	} {
		if Canonical(a) != Canonical(b) {
			t.Errorf("%q and %q: %q and %q", a, b, Canonical(a), Canonical(b))
		}
	}
	for a, b := range map[string]string{"admin": "adm1n", "a b": "ab", "é": "e", "": "a", "ı": "i"} {
		if Canonical(a) == Canonical(b) {
			t.Errorf("%q and %q are one: %q", a, b, Canonical(a))
		}
	}
	if n := len(Canonical(strings.Repeat("x", 1<<20))); n > 2*maxCanonicalBytes {
		t.Errorf("%d bytes are kept", n)
	}
}

// Whatever is typed: the form is stable, valid, and the same with space around it and in capitals.
func FuzzCanonical(f *testing.F) {
	for _, s := range []string{"admin@x.test", "", "\xff", "ΰ", "\u0345\u0301", "ŉ \u00a8", "\u1f88", "ﷺ", "İ", "\u0130\u0307", "\u03f4", "\u1e9e", "\u2126"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		if len(s) > 1000 {
			return
		}
		c := Canonical(s)
		if again := Canonical(c); again != c {
			t.Errorf("%q: %q, then %q", s, c, again)
		}
		if !utf8.ValidString(c) || strings.TrimSpace(c) != c {
			t.Errorf("%q: %q", s, c)
		}
		if spaced := Canonical(" \u00a0" + s + "\t"); spaced != c {
			t.Errorf("%q: %q, with space %q", s, c, spaced)
		}
	})
}

func TestTenantNamed(t *testing.T) {
	t.Parallel()
	acme := &TenantEntry{ID: uuid.New(), Name: "Acme"}
	long, short := &TenantEntry{ID: uuid.New(), Name: "Straße"}, &TenantEntry{ID: uuid.New(), Name: "Strasse"}
	d := NewDirectory(nil, DirectoryOptions{})
	apply := func(all ...*TenantEntry) { d.set.Load().apply(changedRows{tenants: all}, nil) }
	find := func(typed string, want *TenantEntry) {
		t.Helper()
		if got, ok := d.TenantNamed(typed); got != want || ok != (want != nil) {
			t.Errorf("%q: %+v, want %+v", typed, got, want)
		}
	}
	d.set.Store(newEntrySet(changedRows{}))
	apply(acme)
	find(" ACME\t", acme)
	find("ac me", nil)
	find("", nil)

	apply(long)
	find("STRASSE", long)
	apply(short)
	find("STRASSE", nil) // which of the two?
	find("Strasse ", short)
	find("Straße", long)

	renamed := &TenantEntry{ID: long.ID, Name: "Road"}
	apply(renamed)
	find("road", renamed)
	find("STRASSE", short)
	find("Straße", short)
	again := &TenantEntry{ID: acme.ID, Name: "ACME", Status: StatusSuspended}
	apply(again)
	find("acme", again)
	moved := &TenantEntry{ID: acme.ID, Name: "Other"}
	apply(moved)
	find("acme", nil)
	find("other", moved)
}
