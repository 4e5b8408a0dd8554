package channel

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"

	"converger/internal/channel/payload"
	"converger/internal/fault"
	"converger/internal/secrets"
	"converger/internal/tenants"
)

// Redacted stands for a secret value wherever a config is shown. Sent back in a [Patch] it keeps the stored value.
const Redacted = "[redacted]"

const (
	maxName      = 200 // characters, the column's check
	maxConfig    = 64 << 10
	maxSecret    = 512
	maxText      = 2048 // bytes of a config text without a Max of its own
	maxMapPairs  = 50
	maxInFlight  = 100_000
	maxAttempts  = 100
	maxBackoffMS = 24 * 60 * 60 * 1000
	maxTimeoutMS = 30_000 // an attempt has to fit into a lane's lease
)

// CommonFields are the config members that every type has.
func CommonFields() []Field {
	return []Field{{
		Name: "conversation_idle_timeout_seconds", Type: FieldInteger, Min: 1, Max: 366 * 24 * 60 * 60,
		Label: "Conversation idle time-out (seconds)",
		Help:  "A message that comes in after this much silence opens a new conversation. Empty: never.",
	}}
}

// ValidateConfig checks a config object against a schema and returns every fault, among them one for each member that
// the schema does not know. Adapters call it first in their Validate.
func ValidateConfig(fields []Field, config json.RawMessage, requireSignature bool) []fault.Field {
	if len(config) > maxConfig {
		return []fault.Field{{Code: fault.TooLong, Detail: fmt.Sprintf("must be at most %d bytes of JSON", maxConfig)}}
	}
	members, faults := configObject(config)
	if faults != nil {
		return faults
	}
	known := make(map[string]bool, len(fields))
	for _, f := range fields {
		known[f.Name] = true
		v, ok := members[f.Name]
		if !ok || v == nil {
			if f.Required || f.RequiredWithSignature && requireSignature {
				detail := "is required"
				if !f.Required {
					detail = "is required while require_signature is true"
				}
				faults = append(faults, fault.Field{Pointer: "/" + f.Name, Code: fault.Required, Detail: detail})
			}
			continue
		}
		faults = append(faults, f.check(v)...)
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		if !known[name] {
			faults = append(faults, fault.Field{Pointer: payload.Pointer(name), Code: fault.UnknownMember,
				Detail: "is not a member of this type's config"})
		}
	}
	return faults
}

func configObject(config json.RawMessage) (map[string]any, []fault.Field) {
	if len(config) == 0 {
		return map[string]any{}, nil
	}
	v, err := payload.Decode(config)
	if err != nil {
		return nil, []fault.Field{{Code: fault.Malformed, Detail: err.Error()}}
	}
	members, ok := v.(map[string]any)
	if !ok {
		return nil, []fault.Field{{Code: fault.InvalidType, Detail: "must be an object"}}
	}
	return members, nil
}

// check looks at one value; adapters check what is special to a member.
func (f Field) check(v any) []fault.Field {
	one := func(code, format string, args ...any) []fault.Field {
		return []fault.Field{{Pointer: "/" + f.Name, Code: code, Detail: fmt.Sprintf(format, args...)}}
	}
	switch f.Type {
	case FieldString, FieldURL:
		text, ok := v.(string)
		longest := f.Max
		if longest == 0 {
			longest = maxText
		}
		switch {
		case !ok:
			return one(fault.InvalidType, "must be a string")
		case strings.TrimSpace(text) == "" && f.Required:
			return one(fault.Required, "must not be empty")
		case len(text) > longest:
			return one(fault.TooLong, "must be at most %d bytes", longest)
		case strings.TrimSpace(text) != text || hasControl(text):
			return one(fault.Malformed, "must not begin or end with a blank or hold control characters")
		case f.Secret && text == Redacted:
			return one(fault.Malformed, "%s stands for a stored value, and there is none", Redacted)
		}
	case FieldInteger:
		number, _ := v.(json.Number)
		n, err := number.Int64()
		switch {
		case err != nil:
			return one(fault.InvalidType, "must be a whole number")
		case n < int64(f.Min) || n > int64(f.Max):
			return one(fault.OutOfRange, "must be from %d to %d", f.Min, f.Max)
		}
	case FieldBoolean:
		if _, ok := v.(bool); !ok {
			return one(fault.InvalidType, "must be true or false")
		}
	case FieldMap:
		pairs, ok := v.(map[string]any)
		switch {
		case !ok:
			return one(fault.InvalidType, "must be an object with string values")
		case len(pairs) > maxMapPairs:
			return one(fault.TooLong, "must have at most %d members", maxMapPairs)
		}
		var faults []fault.Field
		for _, key := range slices.Sorted(maps.Keys(pairs)) {
			pointer := payload.Pointer(f.Name, key)
			switch text, ok := pairs[key].(string); {
			case !ok:
				faults = append(faults, fault.Field{Pointer: pointer, Code: fault.InvalidType, Detail: "must be a string"})
			case f.Secret && text == Redacted:
				faults = append(faults, fault.Field{Pointer: pointer, Code: fault.Malformed,
					Detail: Redacted + " stands for a stored value, and there is none"})
			}
		}
		return faults
	}
	return nil
}

func hasControl(s string) bool {
	return strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f })
}

// ValidHeaderName reports whether name is one of an HTTP header: a token of RFC 9110, 5.6.2, of at most 256 bytes.
func ValidHeaderName(name string) bool {
	const others = "!#$%&'*+-.^_`|~"
	return name != "" && len(name) <= 256 && !strings.ContainsFunc(name, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < 'A' || r > 'Z') && (r < '0' || r > '9') && !strings.ContainsRune(others, r)
	})
}

// ValidHeaderValue reports whether every program reads value alike in an HTTP header: printable ASCII, blanks and tabs.
func ValidHeaderValue(value string) bool {
	return !strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r >= 0x7f })
}

// RedactedConfig is the channel's config for people and for the audit log: values of secret fields are [Redacted]. Of a
// type that reg does not know nothing is shown.
func RedactedConfig(reg *Registry, ch Channel) map[string]any {
	members, faults := configObject(ch.Config)
	adapter, ok := reg.Lookup(ch.Type)
	if faults != nil || !ok {
		return map[string]any{}
	}
	for _, f := range adapter.Fields() {
		v, ok := members[f.Name]
		if !ok || !f.Secret || v == nil {
			continue
		}
		if pairs, ok := v.(map[string]any); ok {
			for key := range pairs {
				pairs[key] = Redacted
			}
			continue
		}
		members[f.Name] = Redacted
	}
	return members
}

// restoreRedacted replaces the Redacted values of secret fields in config by those of stored. Where stored has none the
// mark stays, and Validate refuses it.
func restoreRedacted(fields []Field, config, stored json.RawMessage) json.RawMessage {
	members, faults := configObject(config)
	old, oldFaults := configObject(stored)
	if faults != nil || oldFaults != nil {
		return config // Validate says what is wrong
	}
	for _, f := range fields {
		if !f.Secret {
			continue
		}
		restore(members, old, f.Name)
		pairs, ok := members[f.Name].(map[string]any)
		oldPairs, oldOK := old[f.Name].(map[string]any)
		if !ok || !oldOK {
			continue
		}
		for key := range pairs {
			restore(pairs, oldPairs, key)
		}
	}
	restored, err := json.Marshal(members)
	if err != nil {
		return config // cannot be: members were decoded from JSON
	}
	return restored
}

func restore(members, old map[string]any, name string) {
	if v, ok := old[name].(string); ok && members[name] == Redacted {
		members[name] = v
	}
}

// newChannel checks everything at once and fills in the defaults.
func (s *Store) newChannel(tenant tenants.ID, in NewChannel) (Channel, error) {
	id, err := uuid.NewV7()
	if err != nil {
		return Channel{}, fmt.Errorf("make id: %w", err)
	}
	ch := Channel{
		TenantID: tenant, ID: id, Name: in.Name, Type: in.Type, Mode: in.Mode, Status: in.Status, Config: in.Config,
		Secret:           secrets.Text(in.Secret),
		RequireSignature: in.RequireSignature == nil || *in.RequireSignature,
		Ordered:          in.Ordered == nil || *in.Ordered,
		RateLimit:        in.RateLimit,
		MaxInFlight:      in.MaxInFlight,
	}
	if ch.Status == "" {
		ch.Status = StatusActive
	}
	if ch.MaxInFlight == 0 {
		ch.MaxInFlight = DefaultMaxInFlight
	}
	if adapter, ok := s.reg.Lookup(ch.Type); ok && ch.Mode == "" {
		ch.Mode = adapter.Modes()[0]
	}
	faults := s.check(&ch)
	faults = append(faults, checkSecret(in.Secret)...)
	policy, policyFaults := parseRetryPolicy(in.RetryPolicy)
	faults = append(faults, policyFaults...)
	if len(faults) > 0 {
		return Channel{}, &fault.Invalid{Fields: faults}
	}
	ch.RetryPolicy = policy
	if ch.Secret == "" {
		ch.Secret = secrets.Text(NewSecret())
	}
	return ch, nil
}

// apply edits ch and checks everything at once.
func (s *Store) apply(ch *Channel, p Patch) error {
	set(&ch.Name, p.Name)
	set(&ch.Mode, p.Mode)
	set(&ch.Status, p.Status)
	set(&ch.RequireSignature, p.RequireSignature)
	set(&ch.Ordered, p.Ordered)
	set(&ch.RateLimit, p.RateLimit)
	set(&ch.MaxInFlight, p.MaxInFlight)
	if p.Config != nil {
		var fields []Field
		if adapter, ok := s.reg.Lookup(ch.Type); ok {
			fields = adapter.Fields()
		}
		ch.Config = restoreRedacted(fields, p.Config, ch.Config)
	}
	faults := s.check(ch)
	if p.RetryPolicy != nil {
		policy, policyFaults := parseRetryPolicy(p.RetryPolicy)
		faults = append(faults, policyFaults...)
		ch.RetryPolicy = policy
	}
	if len(faults) > 0 {
		return &fault.Invalid{Fields: faults}
	}
	return nil
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}

// check returns every fault of a channel and brings its rate limit and config into their stored form.
func (s *Store) check(ch *Channel) []fault.Field {
	var faults []fault.Field
	add := func(pointer, code, format string, args ...any) {
		faults = append(faults, fault.Field{Pointer: pointer, Code: code, Detail: fmt.Sprintf(format, args...)})
	}

	switch name := ch.Name; {
	case strings.TrimSpace(name) == "":
		add("/name", fault.Required, "is required")
	case !utf8.ValidString(name) || hasControl(name) || strings.TrimSpace(name) != name:
		add("/name", fault.Malformed, "must not begin or end with a blank or hold control characters")
	case utf8.RuneCountInString(name) > maxName:
		add("/name", fault.TooLong, "must be at most %d characters", maxName)
	}
	if ch.Status != StatusActive && ch.Status != StatusInactive {
		add("/status", fault.UnknownValue, "must be active or inactive")
	}
	if ch.MaxInFlight < 1 || ch.MaxInFlight > maxInFlight {
		add("/max_in_flight", fault.OutOfRange, "must be from 1 to %d", maxInFlight)
	}
	if limit, err := ParseRateLimit(ch.RateLimit); err != nil {
		add("/rate_limit", fault.Malformed, "%s", err)
	} else {
		ch.RateLimit = limit.String()
	}

	adapter, ok := s.reg.Lookup(ch.Type)
	switch {
	case ch.Type == "":
		add("/type", fault.Required, "is required: %s", oneOf(s.reg.Types()))
		return faults
	case !ok:
		add("/type", fault.UnknownValue, "must be %s", oneOf(s.reg.Types()))
		return faults
	case !slices.Contains(adapter.Modes(), ch.Mode):
		add("/mode", fault.UnknownValue, "channels of type %s can only be %s in this version", ch.Type, oneOf(adapter.Modes()))
	}
	if len(ch.Config) == 0 || string(ch.Config) == "null" {
		ch.Config = json.RawMessage("{}")
	}
	for _, f := range adapter.Validate(ch.Config, ch.RequireSignature) {
		f.Pointer = "/config" + f.Pointer
		faults = append(faults, f)
	}
	if members, bad := configObject(ch.Config); bad == nil && ch.Mode.Sends() {
		for _, f := range adapter.Fields() {
			if v := members[f.Name]; f.RequiredToSend && (v == nil || v == "") {
				add("/config/"+f.Name, fault.Required, "is required while the channel's mode is outbound or duplex")
			}
		}
	}
	return faults
}

func oneOf[T ~string](values []T) string {
	var b strings.Builder
	for i, v := range values {
		switch {
		case i == 0:
		case i == len(values)-1:
			b.WriteString(" or ")
		default:
			b.WriteString(", ")
		}
		b.WriteString(string(v))
	}
	return b.String()
}

// checkSecret checks a secret that somebody chose; "" is fine and means a generated one.
func checkSecret(secret string) []fault.Field {
	switch {
	case secret == "":
		return nil
	case len(secret) < MinSecret:
		return fault.Invalidf("/secret", fault.OutOfRange, "must be at least %d bytes, or left out to have one made", MinSecret).Fields
	case len(secret) > maxSecret:
		return fault.Invalidf("/secret", fault.TooLong, "must be at most %d bytes", maxSecret).Fields
	case !utf8.ValidString(secret) || hasControl(secret) || strings.TrimSpace(secret) != secret:
		return fault.Invalidf("/secret", fault.Malformed, "must not begin or end with a blank or hold control characters").Fields
	}
	return nil
}

// parseRetryPolicy reads the JSON form of a RetryPolicy. nil is the empty policy.
func parseRetryPolicy(raw json.RawMessage) (RetryPolicy, []fault.Field) {
	var p RetryPolicy
	if len(raw) == 0 || string(raw) == "null" {
		return p, nil
	}
	members, faults := configObject(raw)
	for i := range faults {
		faults[i].Pointer = "/retry_policy" + faults[i].Pointer
	}
	add := func(name, code, format string, args ...any) {
		faults = append(faults, fault.Field{Pointer: payload.Pointer("retry_policy", name), Code: code, Detail: fmt.Sprintf(format, args...)})
	}
	integer := func(name string, v any, most int) int {
		number, _ := v.(json.Number)
		n, err := number.Int64()
		switch {
		case err != nil:
			add(name, fault.InvalidType, "must be a whole number")
		case n < 1 || n > int64(most):
			add(name, fault.OutOfRange, "must be from 1 to %d", most)
		}
		return int(n)
	}
	for _, name := range slices.Sorted(maps.Keys(members)) {
		switch v := members[name]; name {
		case "max_attempts":
			p.MaxAttempts = integer(name, v, maxAttempts)
		case "base_ms":
			p.BaseMS = integer(name, v, maxBackoffMS)
		case "max_ms":
			p.MaxMS = integer(name, v, maxBackoffMS)
		case "timeout_ms":
			p.TimeoutMS = integer(name, v, maxTimeoutMS)
		case "backoff":
			text, ok := v.(string)
			p.Backoff = Backoff(text)
			switch {
			case !ok:
				add(name, fault.InvalidType, "must be a string")
			case p.Backoff != BackoffExponential && p.Backoff != BackoffLinear && p.Backoff != BackoffFixed:
				add(name, fault.UnknownValue, "must be exponential, linear or fixed")
			}
		default:
			add(name, fault.UnknownMember, "is not a member of a retry policy: max_attempts, backoff, base_ms, max_ms, timeout_ms")
		}
	}
	switch {
	case p.MaxMS > 0 && p.MaxMS < p.BaseMS:
		add("max_ms", fault.OutOfRange, "must not be less than base_ms")
	case p.MaxMS == 0 && p.BaseMS > DefaultMaxMS:
		add("max_ms", fault.Required, "is required, and not less than base_ms, when that is more than the default of %d", DefaultMaxMS)
	}
	return p, faults
}
