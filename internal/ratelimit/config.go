package ratelimit

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Codes of FieldError.
const (
	CodeOutOfRange    = "out_of_range"
	CodeInvalidType   = "invalid_type"
	CodeRequired      = "required"
	CodeUnknownMember = "unknown_member"
	CodeUnknownValue  = "unknown_value"
	CodeMalformed     = "malformed"
)

// FieldError is one thing that is wrong with a limit.
type FieldError struct {
	Pointer string // JSON pointer to the member, "" for the whole document
	Code    string // one of the Code constants
	Detail  string // what the member must be, with the allowed range; its name is in Pointer
}

// Errors is everything that is wrong with a document of limits.
type Errors []FieldError

// Error joins the details, one field after the other.
func (e Errors) Error() string {
	parts := make([]string, len(e))
	for i, f := range e {
		parts[i] = strings.TrimPrefix(f.Pointer+": "+f.Detail, ": ")
	}
	return strings.Join(parts, "; ")
}

func (e Errors) orNil() error {
	if len(e) == 0 {
		return nil
	}
	return e
}

var (
	limitRange = FieldError{"/limit", CodeOutOfRange,
		"must be a whole number from 0 (refuse everything) to " + Grouped(MaxLimit)}
	scaleRange = FieldError{"/scale_ms", CodeOutOfRange,
		fmt.Sprintf("must be a whole number of milliseconds from %s to %s", Grouped(MinScale.Milliseconds()), Grouped(MaxScale.Milliseconds()))}
	algorithmRange = FieldError{"/algorithm", CodeUnknownValue,
		"must be one of " + strings.Join(algorithmNames[:], ", ")}
	burstRange = FieldError{"/burst", CodeOutOfRange,
		"must be a whole number from 1 to " + Grouped(MaxLimit)}
	burstElsewhere = FieldError{"/burst", CodeUnknownMember, "is allowed with algorithm token_bucket only"}
	burstRefill    = FieldError{"/burst", CodeOutOfRange,
		fmt.Sprintf("must refill within %d days at the rate of limit per scale_ms", int(MaxRefill/(24*time.Hour)))}
)

// ErrNoOverride says that tenants have no say in a bucket's limit.
var ErrNoOverride = errors.New("ratelimit: the bucket's limit cannot be overridden per tenant")

// Overrides are the limits that one tenant was given, compiled. Immutable; a nil
// *Overrides is a tenant without any.
type Overrides struct{ policies [NumBuckets]*Policy }

// Policy returns the tenant's own policy, nil if the tenant has none.
func (o *Overrides) Policy(b Bucket) *Policy {
	if o == nil || !b.valid() {
		return nil
	}
	return o.policies[b]
}

// Compile reads tenants.limits, {"bucket": {"limit": 200, "scale_ms": 1000}}.
// Entries that are not valid are skipped and reported as Errors, so that one of
// them never costs a tenant the others; the result is usable in any case, and
// nil when nothing is left.
func Compile(raw []byte) (*Overrides, error) {
	if blank(raw) {
		return nil, nil
	}
	members, errs := object(raw, "")
	var o Overrides
	found := false
	for _, m := range members {
		b, ok := ParseBucket(m.name)
		if !ok {
			errs = append(errs, unknownBucket(m.pointer))
			continue
		}
		r, err := ParseOverride(b, m.value)
		if err != nil {
			errs = append(errs, under(m.pointer, err)...)
			continue
		}
		p, err := NewPolicy(b, r)
		if err != nil {
			errs = append(errs, under(m.pointer, err)...)
			continue
		}
		o.policies[b], found = p, true
	}
	if !found {
		return nil, errs.orNil()
	}
	return &o, errs.orNil()
}

// ParseOverride reads and validates one entry of tenants.limits, as an operator
// sends it for bucket b. The error is ErrNoOverride, or Errors with pointers into
// raw. Store the rule's JSON form, which is canonical.
func ParseOverride(b Bucket, raw []byte) (Rule, error) {
	if !b.Info().TenantOverride {
		return Rule{}, ErrNoOverride
	}
	r, err := parseRule(b, raw, false)
	return r.Rule, err
}

// Operator is the operator's configuration of every bucket, compiled. Immutable;
// nil is none.
type Operator struct {
	set      [NumBuckets]bool
	policies [NumBuckets]*Policy // nil where set: off
	backends [NumBuckets]Backend
}

// Backend is the backend that the operator chose for a bucket, "" for none.
func (o *Operator) Backend(b Bucket) Backend {
	if o == nil || !b.valid() {
		return ""
	}
	return o.backends[b]
}

// Policy returns the operator's policy for a bucket, nil for "off", and whether
// the operator said anything.
func (o *Operator) Policy(b Bucket) (*Policy, bool) {
	if o == nil || !b.valid() {
		return nil, false
	}
	return o.policies[b], o.set[b]
}

// ParseOperator reads RATE_LIMITS, {"bucket": rule | "off"}, a rule being that
// of an override, optionally with "mode": "count" and "backend". A rule with
// nothing but a backend keeps the built-in limit. Empty text is no configuration. The error is Errors.
func ParseOperator(raw []byte) (*Operator, error) {
	if blank(raw) {
		return nil, nil
	}
	members, errs := object(raw, "")
	var o Operator
	for _, m := range members {
		b, ok := ParseBucket(m.name)
		switch {
		case !ok:
			errs = append(errs, unknownBucket(m.pointer))
			continue
		case b.Info().Default == Rule{}:
			errs = append(errs, FieldError{m.pointer, CodeUnknownValue,
				"is set by the channel's own rate_limit"})
			continue
		}
		o.set[b] = true
		if string(m.value) == `"off"` {
			continue
		}
		r, err := parseRule(b, m.value, true)
		if err == nil {
			o.backends[b] = r.backend
			o.policies[b], err = newPolicy(b, r.Rule, r.count)
		}
		errs = append(errs, under(m.pointer, err)...)
	}
	if len(errs) > 0 {
		return nil, errs
	}
	return &o, nil
}

func blank(raw []byte) bool {
	raw = bytes.TrimSpace(raw)
	return len(raw) == 0 || string(raw) == "null"
}

func unknownBucket(pointer string) FieldError {
	names := make([]string, 0, NumBuckets)
	for _, b := range Buckets() {
		names = append(names, b.String())
	}
	return FieldError{pointer, CodeUnknownMember, "no such bucket; the buckets are " + strings.Join(names, ", ")}
}

// under moves errors below a pointer.
func under(pointer string, err error) Errors {
	var errs Errors
	switch {
	case err == nil:
	case errors.As(err, &errs):
		errs = slices.Clone(errs)
		for i := range errs {
			errs[i].Pointer = pointer + errs[i].Pointer
		}
	default:
		errs = Errors{{pointer, CodeUnknownValue, err.Error()}}
	}
	return errs
}

// configured is a rule with what only operators may say.
type configured struct {
	Rule
	count   bool
	backend Backend
}

// parseRule reads {"limit", "scale_ms", "algorithm", "burst"} and, for
// operators, "mode" and "backend". Every problem is reported, each once.
func parseRule(b Bucket, raw []byte, operator bool) (r configured, err error) {
	members, errs := object(raw, "")
	if len(errs) > 0 && members == nil {
		return configured{}, errs
	}
	r.Algorithm = b.Info().Algorithm
	allowed := "limit, scale_ms, algorithm, burst"
	if operator {
		allowed += ", mode, backend"
	}
	bad := map[string]bool{} // fields already reported
	report := func(e FieldError) {
		if !bad[e.Pointer] {
			bad[e.Pointer] = true
			errs = append(errs, e)
		}
	}
	for _, e := range errs {
		bad[e.Pointer] = true
	}
	var limit, scale, burst *int64
	for _, m := range members {
		switch {
		case m.name == "limit":
			limit = integer(m, limitRange, report)
		case m.name == "scale_ms":
			scale = integer(m, scaleRange, report)
		case m.name == "burst":
			burst = integer(m, burstRange, report)
		case m.name == "algorithm":
			a, ok := ParseAlgorithm(text(m.value))
			if !ok {
				report(algorithmRange)
			}
			r.Algorithm = a
		case m.name == "mode" && operator:
			if r.count = text(m.value) == "count"; !r.count && text(m.value) != "enforce" {
				report(FieldError{m.pointer, CodeUnknownValue, `must be "enforce" or "count"`})
			}
		case m.name == "backend" && operator:
			var ok bool
			if r.backend, ok = ParseBackend(text(m.value)); !ok {
				report(FieldError{m.pointer, CodeUnknownValue, "must be one of " + strings.Join(backends, ", ")})
			}
		default:
			report(FieldError{m.pointer, CodeUnknownMember, "no such member; allowed are " + allowed})
		}
	}
	if len(members) == 1 && r.backend != "" {
		r.Rule = b.Info().Default
		return r, nil
	}
	required := func(v *int64, rng FieldError) int64 {
		if v == nil {
			report(FieldError{rng.Pointer, CodeRequired, rng.Detail})
			return 0
		}
		return *v
	}
	r.Limit = required(limit, limitRange)
	// Out-of-range numbers stay out of range as durations.
	r.Scale = time.Duration(min(max(required(scale, scaleRange), 0), MaxScale.Milliseconds()+1)) * time.Millisecond
	if burst != nil {
		if r.Burst = *burst; r.Burst == 0 {
			r.Burst = -1 // written out, 0 is out of range
		}
	}
	if e, ok := r.Validate().(Errors); ok { //nolint:errorlint // Validate returns Errors unwrapped
		for _, f := range e {
			report(f)
		}
	}
	if len(errs) > 0 {
		return configured{}, errs
	}
	return r, nil
}

// integer reads a whole number. Numbers with a fraction or an exponent and
// values of another type are reported as such, numbers beyond 64 bits as out of
// range.
func integer(m member, rng FieldError, report func(FieldError)) *int64 {
	n, err := strconv.ParseInt(string(m.value), 10, 64)
	switch {
	case err == nil:
	case errors.Is(err, strconv.ErrRange):
		report(rng)
	default:
		report(FieldError{rng.Pointer, CodeInvalidType, rng.Detail})
	}
	return &n
}

// text is the string that a JSON value holds, "" if it is none.
func text(v json.RawMessage) string {
	var s string
	if json.Unmarshal(v, &s) != nil {
		return ""
	}
	return s
}

// maxMembers is well above what any document here may hold; it bounds the errors.
const maxMembers = 64

type member struct {
	name, pointer string
	value         json.RawMessage
}

// object reads the members of a JSON object, each name once. A repeated name is
// reported and its later values dropped; anything but one object gives no member.
func object(raw []byte, pointer string) ([]member, Errors) {
	malformed := Errors{{pointer, CodeMalformed, "must be a JSON object"}}
	d := json.NewDecoder(bytes.NewReader(raw))
	if t, err := d.Token(); err != nil || t != json.Delim('{') {
		return nil, malformed
	}
	members := []member{}
	var errs Errors
	for seen := map[string]bool{}; d.More(); {
		t, err := d.Token()
		name, ok := t.(string)
		if err != nil || !ok {
			return nil, malformed
		}
		m := member{name: name, pointer: pointer + "/" + pointerEscape.Replace(name)}
		if err := d.Decode(&m.value); err != nil {
			return nil, malformed
		}
		switch {
		case seen[name]:
			errs = append(errs, FieldError{m.pointer, CodeMalformed, "is given more than once"})
		case len(seen) == maxMembers:
			return nil, Errors{{pointer, CodeMalformed, "has too many members"}}
		default:
			seen[name] = true
			members = append(members, m)
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, malformed
	}
	if _, err := d.Token(); err != io.EOF {
		return nil, malformed
	}
	return members, errs
}

var pointerEscape = strings.NewReplacer("~", "~0", "/", "~1")
