package fault

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestInvalid(t *testing.T) {
	t.Parallel()
	var bad Invalid
	if err := bad.Err(); err != nil {
		t.Errorf("nothing wrong, but error %v", err)
	}
	if err := (*Invalid)(nil).Err(); err != nil {
		t.Errorf("nil pointer, but error %v", err)
	}
	bad.Addf("/text", TooLong, "must have at most %d characters", 5)
	bad.Addf("", Malformed, "must be an object")
	err := fmt.Errorf("append: %w", bad.Err())
	var got *Invalid
	if !errors.As(err, &got) {
		t.Fatalf("%v holds no Invalid", err)
	}
	want := []Field{{"/text", TooLong, "must have at most 5 characters"}, {"", Malformed, "must be an object"}}
	if diff := cmp.Diff(want, got.Fields); diff != "" {
		t.Errorf("fields (-want +got):\n%s", diff)
	}
	if want := "append: invalid input: /text must have at most 5 characters; must be an object"; err.Error() != want {
		t.Errorf("error %q, want %q", err, want)
	}
	type word string
	if got := List([]word{"a", "b"}) + List([]word(nil)) + List([]word{"c"}); got != "a, bc" {
		t.Errorf("List: %q", got)
	}
	one := Invalidf("/a", Required, "must be there")
	if diff := cmp.Diff(&Invalid{Fields: []Field{{"/a", Required, "must be there"}}}, one); diff != "" {
		t.Errorf("Invalidf (-want +got):\n%s", diff)
	}
}
