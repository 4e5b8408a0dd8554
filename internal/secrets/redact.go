package secrets

import (
	"bytes"
	"encoding/json"
	"slices"
	"strings"
)

// redactedMember replaces the values of secret members in audit records, in the spelling of the system whose logs
// operators already search.
const redactedMember = "[REDACTED]"

var (
	secretNames = []string{
		"access_token", "api_key", "secret", "token", "password", "password_hash", "verify_token", "app_secret",
		"authorization", "x-api-key", "x-channel-token",
	}
	secretSuffixes = []string{"_secret", "_token", "_hash"}
)

// Redact gives a copy of v, as encoding/json would decode it (maps, slices, strings, [json.Number], booleans, nil), in
// which the value of every member with a secret's name is "[REDACTED]", at any depth and in any case; null stays null,
// for "was not set" is no secret. v is anything that marshals to JSON; what does not becomes one "[REDACTED]".
func Redact(v any) any {
	text, err := json.Marshal(v)
	if err != nil {
		return redactedMember
	}
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber() // ids and amounts keep their digits
	var out any
	if err := dec.Decode(&out); err != nil {
		return redactedMember
	}
	return redact(out)
}

func redact(v any) any {
	switch v := v.(type) {
	case map[string]any:
		for name, value := range v {
			if value != nil && isSecretName(name) {
				v[name] = redactedMember
			} else {
				v[name] = redact(value)
			}
		}
	case []any:
		for i := range v {
			v[i] = redact(v[i])
		}
	}
	return v
}

func isSecretName(name string) bool {
	name = strings.ToLower(name)
	return slices.Contains(secretNames, name) ||
		slices.ContainsFunc(secretSuffixes, func(s string) bool { return strings.HasSuffix(name, s) })
}
