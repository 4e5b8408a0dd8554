package tenants

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
)

func TestSearchAllTenants(t *testing.T) {
	t.Parallel()
	s, _ := newStore(t)
	ids := map[string]uuid.UUID{}
	for _, name := range []string{"zebra", "Äpfel", "apple pie", "Apple", "100% cotton", "a_b", `back\slash`} {
		made, err := s.Create(t.Context(), operator, NewTenant{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = made.ID
	}
	for name, tt := range map[string]struct {
		text, after string
		limit       int
		want        []string
	}{
		"all, by name":        {"", "", 10, []string{"100% cotton", "a_b", "Apple", "apple pie", `back\slash`, "zebra", "Äpfel"}},
		"in whatever case":    {"APPLE", "", 10, []string{"Apple", "apple pie"}},
		"beyond ASCII":        {"ÄP", "", 10, []string{"Äpfel"}},
		"the first":           {"", "", 2, []string{"100% cotton", "a_b"}},
		"those after":         {"", "Apple", 2, []string{"apple pie", `back\slash`}},
		"those after, found":  {"p", "Apple", 10, []string{"apple pie", "Äpfel"}},
		"nothing after":       {"", "Äpfel", 10, nil},
		"a sign, no pattern":  {"%", "", 10, []string{"100% cotton"}},
		"a sign, no one char": {"_", "", 10, []string{"a_b"}},
		"a sign, no escape":   {`\`, "", 10, []string{`back\slash`}},
		"nobody":              {"nobody", "", 10, nil},
	} {
		found, err := s.SearchAllTenants(t.Context(), tt.text, ids[tt.after], tt.limit)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, x := range found {
			got = append(got, x.Name)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
	}
	if found, err := s.SearchAllTenants(t.Context(), "", uuid.Must(uuid.NewV7()), 10); err != nil || len(found) != 0 {
		t.Errorf("after a tenant that is none: %v, %v", found, err)
	}
}

// A tenant that is made twice under one id is one, with one audit record.
func TestCreateTenantTwice(t *testing.T) {
	t.Parallel()
	s, pool := newStore(t)
	id := uuid.Must(uuid.NewV7())
	first, err := s.Create(t.Context(), operator, NewTenant{ID: id, Name: "Acme"})
	if err != nil || first.ID != id {
		t.Fatalf("%v, %v, want the id %v", first.ID, err, id)
	}
	before := version(t, pool)
	again, err := s.Create(t.Context(), operator, NewTenant{ID: id, Name: "Acme"})
	if diff := cmp.Diff(first, again); diff != "" || err != nil {
		t.Errorf("again: %v\n%s", err, diff)
	}
	if v := version(t, pool); v != before {
		t.Errorf("the second time changed the configuration: %d became %d", before, v)
	}
	other, err := s.Create(t.Context(), operator, NewTenant{ID: id, Name: "Other"})
	if err != nil || other.ID == id {
		t.Errorf("another name under the same id: %v, %v", other.ID, err)
	}
	if got, err := s.Get(t.Context(), id); err != nil || got.Name != "Acme" {
		t.Errorf("the first became %q, %v", got.Name, err)
	}
}
