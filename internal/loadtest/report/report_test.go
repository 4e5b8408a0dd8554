package report

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTable(t *testing.T) {
	t.Parallel()
	got := Table([][]string{{"what", "ratio", ""}, {"größer", "≥ 0.5", "met"}, {"x", "", ""}})
	want := `| what   | ratio |     |
|--------|-------|-----|
| größer | ≥ 0.5 | met |
| x      | –     | –   |
`
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}
