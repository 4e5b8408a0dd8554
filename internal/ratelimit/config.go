package ratelimit

import (
	"errors"
	"fmt"
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
	Detail  string // names the field and the allowed range
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
		fmt.Sprintf("limit must be a whole number from 0 (refuse everything) to %d", MaxLimit)}
	scaleRange = FieldError{"/scale_ms", CodeOutOfRange,
		fmt.Sprintf("scale_ms must be a whole number of milliseconds from %d to %d", MinScale.Milliseconds(), MaxScale.Milliseconds())}
	algorithmRange = FieldError{"/algorithm", CodeUnknownValue,
		"algorithm must be one of " + strings.Join(algorithmNames[:], ", ")}
	burstRange = FieldError{"/burst", CodeOutOfRange,
		fmt.Sprintf("burst must be a whole number from 1 to %d", MaxLimit)}
	burstElsewhere = FieldError{"/burst", CodeUnknownMember, "burst is allowed with algorithm token_bucket only"}
	burstRefill    = FieldError{"/burst", CodeOutOfRange,
		fmt.Sprintf("burst must refill within %d days at the rate of limit per scale_ms", int(MaxRefill/(24*time.Hour)))}
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
func Compile(raw []byte) (*Overrides, error) { return nil, nil }

// ParseOverride reads and validates one entry of tenants.limits, as an operator
// sends it for bucket b. The error is ErrNoOverride, or Errors with pointers into
// raw. Store the rule's JSON form, which is canonical.
func ParseOverride(b Bucket, raw []byte) (Rule, error) { return Rule{}, nil }

// Operator is the operator's configuration of every bucket, compiled. Immutable;
// nil is none.
type Operator struct {
	set      [NumBuckets]bool
	policies [NumBuckets]*Policy // nil when set: off
}

// ParseOperator reads RATE_LIMITS, {"bucket": rule | "off"}, a rule being that
// of an override, optionally with "mode": "count". The error is Errors.
func ParseOperator(raw []byte) (*Operator, error) { return nil, nil }
