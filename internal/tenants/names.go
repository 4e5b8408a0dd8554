package tenants

import (
	"hash/maphash"
	"slices"
	"strings"
	"unicode"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// maxCanonicalBytes bounds the work on what a stranger typed; no name or address that is stored comes near.
const maxCanonicalBytes = 4096

// Canonical is the form in which names that people type at a sign-in are compared, stored, counted and shown: without
// space around them, in Unicode normalisation form KC, folded to one case, without characters that are invisible by
// definition (Unicode's toNFKC_Casefold, but for the space). It is its own canonical form. Text beyond 4096 bytes is cut
// off first.
func Canonical(text string) string {
	if len(text) > maxCanonicalBytes {
		text = text[:maxCanonicalBytes]
	}
	text = strings.ToValidUTF8(text, "\uFFFD")
	for { // normalising makes new capitals and spaces now and then, and folding new things to normalise
		next := strings.TrimSpace(norm.NFKC.String(cases.Fold().String(norm.NFKC.String(strings.Map(visible, text)))))
		if next == text {
			return text
		}
		text = next
	}
}

// visible drops what takes no room on a screen: formatting characters, and those that Unicode calls default ignorable. NUL,
// which the database can't store, becomes the character for what can't be read.
func visible(r rune) rune {
	if r == 0 {
		return unicode.ReplacementChar
	}
	if unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) {
		return -1
	}
	return r
}

// nameEntry holds the tenants whose names have one canonical form: one, but for names that the database tells apart.
type nameEntry struct {
	canonical string
	tenants   []*TenantEntry
}

var nameSeed = maphash.MakeSeed()

func nameSpot(canonical string) uint64 { return maphash.String(nameSeed, canonical) }

// TenantNamed finds a tenant by what somebody typed as its name, whatever the case, form and space around it. Of names that
// differ in nothing else the one that was typed exactly is meant. It answers from memory.
func (d *Directory) TenantNamed(typed string) (*TenantEntry, bool) {
	e, ok := d.set.Load().names.get(Canonical(typed))
	if !ok {
		return nil, false
	}
	if len(e.tenants) == 1 {
		return e.tenants[0], true
	}
	typed = strings.TrimSpace(typed)
	for _, t := range e.tenants {
		if t.Name == typed {
			return t, true
		}
	}
	return nil, false
}

// rename puts t, which may be new, under its name, in place of old, the entry before, or nil. The new name is found before
// the old one is not.
func (s *entrySet) rename(old, t *TenantEntry) {
	named := func(canonical string, but ID) []*TenantEntry {
		e, ok := s.names.get(canonical)
		if !ok {
			return nil
		}
		return slices.DeleteFunc(slices.Clone(e.tenants), func(x *TenantEntry) bool { return x.ID == but })
	}
	canonical := Canonical(t.Name)
	s.names.put(&nameEntry{canonical, append(named(canonical, t.ID), t)})
	if old == nil {
		return
	}
	before := Canonical(old.Name)
	switch rest := named(before, old.ID); {
	case before == canonical:
	case len(rest) == 0:
		s.names.remove(before)
	default:
		s.names.put(&nameEntry{before, rest})
	}
}
