package ratelimit

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// problems reduces an error to pointer -> code; every detail must say something.
func problems(t *testing.T, err error) map[string]string {
	t.Helper()
	got := map[string]string{}
	if err == nil {
		return got
	}
	var errs Errors
	if !errors.As(err, &errs) {
		t.Fatalf("%v is not Errors", err)
	}
	for _, e := range errs {
		if _, twice := got[e.Pointer]; twice {
			t.Errorf("%s is reported twice", e.Pointer)
		}
		if got[e.Pointer] = e.Code; e.Detail == "" {
			t.Errorf("%s has no detail", e.Pointer)
		}
		if name := e.Pointer[strings.LastIndex(e.Pointer, "/")+1:]; name != "" && strings.HasPrefix(e.Detail, name+" ") {
			t.Errorf("the detail of %s names it again: %q", e.Pointer, e.Detail)
		}
	}
	return got
}

func TestParseOverride(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		raw  string
		want Rule
		errs map[string]string
	}{
		{"plain", `{"limit":200,"scale_ms":1000}`, Rule{Limit: 200, Scale: time.Second}, nil},
		{"zero refuses", `{"limit":0,"scale_ms":1000}`, Rule{Scale: time.Second}, nil},
		{"greatest", `{"limit":1000000000,"scale_ms":86400000}`, Rule{Limit: MaxLimit, Scale: 24 * time.Hour}, nil},
		{"algorithm", `{"limit":1,"scale_ms":1500,"algorithm":"sliding_window"}`, Rule{Limit: 1, Scale: 1500 * time.Millisecond, Algorithm: SlidingWindow}, nil},
		{"burst", `{"limit":10,"scale_ms":1000,"algorithm":"token_bucket","burst":50}`, Rule{Limit: 10, Scale: time.Second, Algorithm: TokenBucket, Burst: 50}, nil},
		{"burst before algorithm", `{"burst":50,"limit":10,"scale_ms":1000,"algorithm":"token_bucket"}`, Rule{Limit: 10, Scale: time.Second, Algorithm: TokenBucket, Burst: 50}, nil},

		{"missing", `{}`, Rule{}, map[string]string{"/limit": CodeRequired, "/scale_ms": CodeRequired}},
		{"negative", `{"limit":-1,"scale_ms":-1}`, Rule{}, map[string]string{"/limit": CodeOutOfRange, "/scale_ms": CodeOutOfRange}},
		{"too much", `{"limit":1000000001,"scale_ms":86400001}`, Rule{}, map[string]string{"/limit": CodeOutOfRange, "/scale_ms": CodeOutOfRange}},
		{"too short", `{"limit":1,"scale_ms":999}`, Rule{}, map[string]string{"/scale_ms": CodeOutOfRange}},
		{"beyond 64 bits", `{"limit":99999999999999999999,"scale_ms":9223372036854775807}`, Rule{}, map[string]string{"/limit": CodeOutOfRange, "/scale_ms": CodeOutOfRange}},
		{"fraction", `{"limit":1.5,"scale_ms":1e3}`, Rule{}, map[string]string{"/limit": CodeInvalidType, "/scale_ms": CodeInvalidType}},
		{"types", `{"limit":"200","scale_ms":null}`, Rule{}, map[string]string{"/limit": CodeInvalidType, "/scale_ms": CodeInvalidType}},
		{"unknown", `{"limit":1,"scale_ms":1000,"scale":1,"mode":"count"}`, Rule{}, map[string]string{"/scale": CodeUnknownMember, "/mode": CodeUnknownMember}},
		{"case matters", `{"Limit":1,"scale_ms":1000}`, Rule{}, map[string]string{"/Limit": CodeUnknownMember, "/limit": CodeRequired}},
		{"escaped pointer", `{"limit":1,"scale_ms":1000,"a/b~c":1}`, Rule{}, map[string]string{"/a~1b~0c": CodeUnknownMember}},
		{"repeated", `{"limit":1,"scale_ms":1000,"limit":2}`, Rule{}, map[string]string{"/limit": CodeMalformed}},
		{"algorithm unknown", `{"limit":1,"scale_ms":1000,"algorithm":"gcra"}`, Rule{}, map[string]string{"/algorithm": CodeUnknownValue}},
		{"algorithm no string", `{"limit":1,"scale_ms":1000,"algorithm":1}`, Rule{}, map[string]string{"/algorithm": CodeUnknownValue}},
		{"burst without bucket", `{"limit":1,"scale_ms":1000,"burst":1}`, Rule{}, map[string]string{"/burst": CodeUnknownMember}},
		{"burst of 0", `{"limit":1,"scale_ms":1000,"burst":0,"algorithm":"token_bucket"}`, Rule{}, map[string]string{"/burst": CodeOutOfRange}},
		{"burst never refills", `{"limit":1,"scale_ms":86400000,"burst":31,"algorithm":"token_bucket"}`, Rule{}, map[string]string{"/burst": CodeOutOfRange}},
		{"off is not for tenants", `"off"`, Rule{}, map[string]string{"": CodeMalformed}},
		{"array", `[]`, Rule{}, map[string]string{"": CodeMalformed}},
		{"empty", ``, Rule{}, map[string]string{"": CodeMalformed}},
		{"cut", `{"limit":1`, Rule{}, map[string]string{"": CodeMalformed}},
		{"trailing", `{"limit":1,"scale_ms":1000}{}`, Rule{}, map[string]string{"": CodeMalformed}},
	} {
		got, err := ParseOverride(ActivityCreate, []byte(tt.raw))
		if got != tt.want {
			t.Errorf("%s: %+v, want %+v", tt.name, got, tt.want)
		}
		if tt.errs == nil {
			tt.errs = map[string]string{}
		}
		if diff := cmp.Diff(tt.errs, problems(t, err)); diff != "" {
			t.Errorf("%s: %s", tt.name, diff)
		}
	}
	for _, b := range Buckets() {
		_, err := ParseOverride(b, []byte(`{"limit":1,"scale_ms":1000}`))
		if errors.Is(err, ErrNoOverride) == b.Info().TenantOverride {
			t.Errorf("%s: %v", b, err)
		}
	}
}

func TestCompile(t *testing.T) {
	t.Parallel()
	o, err := Compile([]byte(`{
		"activity_create": {"limit": 20, "scale_ms": 1000},
		"upload": {"limit": "x", "scale_ms": 1},
		"login_ip": {"limit": 1, "scale_ms": 1000},
		"nonsense": {}
	}`))
	want := map[string]string{
		"/upload/limit": CodeInvalidType, "/upload/scale_ms": CodeOutOfRange,
		"/login_ip": CodeUnknownValue, "/nonsense": CodeUnknownMember,
	}
	if diff := cmp.Diff(want, problems(t, err)); diff != "" {
		t.Error(diff)
	}
	if p := o.Policy(ActivityCreate); p == nil || p.Limit() != 20 || p.Bucket() != ActivityCreate {
		t.Errorf("activity_create: %+v", p)
	}
	if o.Policy(Upload) != nil || o.Policy(LoginIP) != nil {
		t.Error("an invalid entry was compiled")
	}
	for _, none := range []string{"", " ", "null", "{}"} {
		if o, err := Compile([]byte(none)); o != nil || err != nil {
			t.Errorf("Compile(%q) = %v, %v", none, o, err)
		}
	}
	if o, err := Compile([]byte(`[`)); o.Policy(Upload) != nil || err == nil {
		t.Errorf("malformed: %v, %v", o, err)
	}
}

func TestParseOperator(t *testing.T) {
	t.Parallel()
	o, err := ParseOperator([]byte(`{
		"login_ip": {"limit": 3, "scale_ms": 1000},
		"upload": "off",
		"web_page": {"limit": 1, "scale_ms": 1000, "mode": "count"}
	}`))
	if err != nil {
		t.Fatal(err)
	}
	if p, ok := o.Policy(LoginIP); !ok || p.Limit() != 3 || p.Algorithm() != SlidingWindow || p.CountOnly() {
		t.Errorf("login_ip: %+v, %v", p, ok)
	}
	if p, ok := o.Policy(Upload); !ok || p != nil {
		t.Errorf("upload: %+v, %v", p, ok)
	}
	if p, ok := o.Policy(WebPage); !ok || !p.CountOnly() {
		t.Errorf("web_page: %+v, %v", p, ok)
	}
	if p, ok := o.Policy(Inbound); ok || p != nil {
		t.Errorf("inbound: %+v, %v", p, ok)
	}
	_, err = ParseOperator([]byte(`{"a": 1, "channel_outbound": "off", "upload": "on",
		"web_page": {"limit": 1, "scale_ms": 1000, "mode": "watch"}}`))
	want := map[string]string{
		"/a": CodeUnknownMember, "/channel_outbound": CodeUnknownValue,
		"/upload": CodeMalformed, "/web_page/mode": CodeUnknownValue,
	}
	if diff := cmp.Diff(want, problems(t, err)); diff != "" {
		t.Error(diff)
	}
}

// Whatever is accepted is within the ranges, and its stored form reads the same.
func FuzzParseOverride(f *testing.F) {
	for _, seed := range []string{
		`{"limit":200,"scale_ms":1000}`, `{"limit":1,"scale_ms":1000,"algorithm":"token_bucket","burst":5}`,
		`{"limit":1e9}`, `{"limit":1,"limit":2}`, `{"\u0000":[[[[]]]]}`, `nul`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, raw []byte) {
		r, err := ParseOverride(ActivityCreate, raw)
		if err != nil {
			problems(t, err)
			return
		}
		if r.Limit < 0 || r.Limit > MaxLimit || r.Scale < MinScale || r.Scale > MaxScale || r.Burst < 0 || r.Burst > MaxLimit {
			t.Fatalf("%q gave %+v", raw, r)
		}
		stored, err := json.Marshal(r)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseOverride(ActivityCreate, stored)
		if err != nil || again != r {
			t.Fatalf("%q was stored as %s, which reads as %+v, %v", raw, stored, again, err)
		}
		p, err := NewPolicy(ActivityCreate, r)
		if err != nil {
			t.Fatal(err)
		}
		if _, d := p.Decide(p.Fresh(noon), 1, noon); d.Allowed != (r.Limit > 0) || d.WaitMs > p.WindowMs() {
			t.Fatalf("%+v: %+v", r, d)
		}
	})
}
