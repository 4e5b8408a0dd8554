package payload_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"converger/internal/channel/payload"
)

func TestDecode(t *testing.T) {
	t.Parallel()
	nested := func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) }
	for body, want := range map[string]any{
		`{}`:                       map[string]any{},
		` [1, "a", true, null] `:   []any{json.Number("1"), "a", true, nil},
		`{"a":{"b":[]}}`:           map[string]any{"a": map[string]any{"b": []any{}}},
		`"\u0000\ud800x\udc00"`:    "\uFFFD\uFFFDx\uFFFD",
		`"\ud83d\ude0a"`:           "\U0001f60a",
		`{"a\u0000":1}`:            map[string]any{"a\uFFFD": json.Number("1")},
		`-0.10e+5`:                 json.Number("-0.10e+5"),
		`1e400`:                    json.Number("1e400"),
		`12345678901234567890`:     json.Number("12345678901234567890"),
		`{"a":1,"A":2,"\u00e9":3}`: map[string]any{"a": json.Number("1"), "A": json.Number("2"), "é": json.Number("3")},

		``:                              payload.ErrSyntax,
		`{`:                             payload.ErrSyntax,
		`[1,]`:                          payload.ErrSyntax,
		`[1 2]`:                         payload.ErrSyntax,
		`{"a" 1}`:                       payload.ErrSyntax,
		`{a:1}`:                         payload.ErrSyntax,
		`{"a":1,}`:                      payload.ErrSyntax,
		`{} {}`:                         payload.ErrSyntax,
		`{}x`:                           payload.ErrSyntax,
		`nul`:                           payload.ErrSyntax,
		`01`:                            payload.ErrSyntax,
		`NaN`:                           payload.ErrSyntax,
		"\"a\nb\"":                      payload.ErrSyntax,
		"\"\xff\"":                      payload.ErrUTF8,
		"\"\xed\xa0\x80\"":              payload.ErrUTF8, // a surrogate in UTF-8
		`{"a":1,"a":1}`:                 payload.ErrDuplicate,
		`{"a":1,"\u0061":1}`:            payload.ErrDuplicate,
		`[{"x":{"a":1,"b":2,"a":1}}]`:   payload.ErrDuplicate,
		`1e401`:                         payload.ErrNumber,
		`[1e-401]`:                      payload.ErrNumber,
		`1e99999999999999999999`:        payload.ErrNumber,
		strings.Repeat("9", 401):        payload.ErrNumber,
		nested(payload.MaxDepth + 1):    payload.ErrDepth,
		strings.Repeat(`{"a":`, 10_000): payload.ErrDepth,
	} {
		got, err := payload.Decode([]byte(body))
		if wantErr, ok := want.(error); ok {
			if !errors.Is(err, wantErr) {
				t.Errorf("%.60s: got %v and %v, want %v", body, got, err, wantErr)
			}
			continue
		}
		if err != nil {
			t.Errorf("%.60s: %v", body, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%.60s: %s", body, diff)
		}
	}
	if _, err := payload.Decode([]byte(nested(payload.MaxDepth))); err != nil {
		t.Errorf("at the deepest: %v", err)
	}
}

// What Decode accepts encoding/json accepts too, and both mean the same.
func FuzzDecode(f *testing.F) {
	for _, seed := range []string{`{"a":[1,"x",null]}`, `"\ud83d"`, `1e5`, `{"a":1,"a":2}`, `[[[`, "\xff"} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := payload.Decode(body)
		if err != nil {
			return
		}
		var want any
		decoder := json.NewDecoder(bytes.NewReader(body))
		decoder.UseNumber()
		if err := decoder.Decode(&want); err != nil {
			t.Fatalf("encoding/json refuses %q: %v", body, err)
		}
		gotJSON, gotErr := json.Marshal(got)
		wantJSON, wantErr := json.Marshal(want)
		if gotErr != nil || wantErr != nil {
			t.Fatal(gotErr, wantErr)
		}
		if string(gotJSON) != strings.ReplaceAll(string(wantJSON), `\u0000`, "\uFFFD") && !bytes.Contains(body, []byte(`\\u0000`)) {
			t.Errorf("%q: got %s, want %s", body, gotJSON, wantJSON)
		}
	})
}

func TestExcerpt(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		in   string
		n    int
		want string
	}{
		{"plain", 100, "plain"},
		{" a\x00b\x1b[31m\r\n c\t", 100, "a b [31m \n c"},
		{"\xff|\xfe", 100, "\uFFFD|\uFFFD"},
		{"0123456789", 8, "01234567"},
		{"1234567é", 8, "1234567"},
		{"", 8, ""},
	} {
		if got := payload.Excerpt([]byte(tt.in), tt.n); got != tt.want || !utf8.ValidString(got) {
			t.Errorf("%q: got %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestCut(t *testing.T) {
	t.Parallel()
	for n, want := range map[int]string{0: "", 1: "a", 2: "a", 3: "aé", 4: "aé", 9: "aé\U0001f60ab"} {
		if got := payload.Cut("aé\U0001f60ab", n); got != want {
			t.Errorf("%d: got %q, want %q", n, got, want)
		}
	}
}

func TestPointer(t *testing.T) {
	t.Parallel()
	if got, want := payload.Pointer("a/b", 0, "~", ""), "/a~1b/0/~0/"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
