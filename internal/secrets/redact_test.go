package secrets

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRedact(t *testing.T) {
	t.Parallel()
	for _, name := range []string{
		"access_token", "api_key", "secret", "token", "password", "password_hash", "verify_token", "app_secret",
		"authorization", "x-api-key", "x-channel-token", "Authorization", "X-API-Key", "TOKEN",
		"client_secret", "refresh_token", "secret_hash", "My_Secret",
	} {
		for _, value := range []any{planted, 1, true, []any{planted}, map[string]any{"inner": planted}} {
			got := Redact(map[string]any{"a": []any{map[string]any{name: value}}})
			want := map[string]any{"a": []any{map[string]any{name: "[REDACTED]"}}}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("%s: %v (-want +got):\n%s", name, value, diff)
			}
		}
		if diff := cmp.Diff(any(map[string]any{name: nil}), Redact(map[string]any{name: nil})); diff != "" {
			t.Errorf("%s: null (-want +got):\n%s", name, diff)
		}
	}
}

func TestRedactKeepsTheRest(t *testing.T) {
	t.Parallel()
	in := json.RawMessage(`{"tokens":3,"secretary":"Ms Hash","token_generate":{"limit":1},"id":12345678901234567890,"l":[null,true,"x"]}`)
	out, err := json.Marshal(Redact(in))
	if err != nil {
		t.Fatal(err)
	}
	var got, want any
	if err := json.Unmarshal(out, &got); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(in, &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" || !strings.Contains(string(out), "12345678901234567890") {
		t.Errorf("%s (-want +got):\n%s", out, diff)
	}
	original := map[string]any{"secret": planted}
	Redact(original)
	if original["secret"] != planted {
		t.Error("the original was changed")
	}
	if got := Redact(nil); got != nil {
		t.Errorf("nil became %v", got)
	}
	if got := Redact(make(chan int)); got != "[REDACTED]" {
		t.Errorf("what does not marshal became %v", got)
	}
	if got := Redact(struct{ Config, Key any }{map[string]string{"app_secret": planted}, Text(planted)}); !cmp.Equal(got,
		any(map[string]any{"Config": map[string]any{"app_secret": "[REDACTED]"}, "Key": "[redacted]"})) {
		t.Errorf("struct became %v", got)
	}
}

// FuzzRedact plants a secret under a secret's name at the depth that the fuzzer makes.
func FuzzRedact(f *testing.F) {
	f.Add(`{"a":1}`, "client")
	f.Add(`[[{"b":null}]]`, "")
	f.Fuzz(func(t *testing.T, around, prefix string) {
		var v any
		if json.Unmarshal([]byte(around), &v) != nil {
			return
		}
		out, err := json.Marshal(Redact([]any{v, map[string]any{"x": map[string]any{prefix + "_secret": planted + around}}}))
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(out), planted) && !strings.Contains(around, planted) {
			t.Errorf("the secret is in %s", out)
		}
	})
}
