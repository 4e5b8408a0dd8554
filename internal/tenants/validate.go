package tenants

import (
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"converger/internal/fault"
)

// As the migrations check.
const (
	maxNameChars = 200
	maxInFlight  = 100_000
)

func checkName(bad *fault.Invalid, name string) {
	switch {
	case strings.TrimSpace(name) == "":
		bad.Addf("/name", fault.Required, "must not be empty")
	case !utf8.ValidString(name) || strings.ContainsFunc(name, unicode.IsControl):
		bad.Addf("/name", fault.Malformed, "must be UTF-8 without control characters")
	case strings.TrimSpace(name) != name:
		// Two names that look the same would be two tenants.
		bad.Addf("/name", fault.Malformed, "must not begin or end with a space")
	case utf8.RuneCountInString(name) > maxNameChars:
		bad.Addf("/name", fault.TooLong, "must have at most %d characters", maxNameChars)
	}
}

// checkCredential validates the input for a key or token, and gives its scopes sorted, without repeats, all if none.
func checkCredential(name string, scopes []string, expires *time.Time) ([]string, error) {
	var bad fault.Invalid
	checkName(&bad, name)
	for i, scope := range scopes {
		if _, ok := parseScopes([]string{scope}); !ok {
			bad.Addf("/scopes/"+strconv.Itoa(i), fault.UnknownValue, `must be "read" or "write"`)
		}
	}
	if expires != nil && !expires.After(time.Now()) {
		bad.Addf("/expires_at", fault.OutOfRange, "must be in the future")
	}
	switch {
	case scopes == nil:
		scopes = []string{"read", "write"}
	case len(scopes) == 0: // asking for nothing must not give everything
		bad.Addf("/scopes", fault.Required, `must name "read", "write" or both; leave it out for both`)
	}
	scopes = slices.Clone(scopes)
	slices.Sort(scopes)
	return slices.Compact(scopes), bad.Err()
}
