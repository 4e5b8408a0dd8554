package http

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"strings"
)

// The entity tag of a setting is "VERSION.DIGEST": the version of the row that holds it, and a digest of what is shown, for
// some of that changes without the row's version (a channel's hold_until, the installation's default of a limit). A GET
// compares whole tags. If-Match compares versions, in the transaction of the change: it guards against overwriting
// somebody else's change, and what nobody has set can't be overwritten.

// settingReply is {"data": body} of the setting that has this version, with its tag; or 304 when the caller of a GET has it.
func settingReply(c *call, status int, version int64, body any) (*reply, error) {
	p, err := dataReply(status, body)
	if err != nil {
		return nil, err
	}
	tag, err := entityTag(version, body)
	if err != nil {
		return nil, err
	}
	if c.route.method == http.MethodGet && matches(c.r.Header, tag) {
		p = &reply{status: http.StatusNotModified}
	}
	return p.with("Etag", tag), nil
}

func entityTag(version int64, body any) (string, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return "", fmt.Errorf("http: encode entity tag: %w", err)
	}
	digest := sha256.Sum256(text)
	return `"` + strconv.FormatInt(version, 10) + "." + hex.EncodeToString(digest[:8]) + `"`, nil
}

// ifMatch is the versions of which the caller expects the setting to have one; none: it expects nothing.
func (c *call) ifMatch() []int64 {
	var versions []int64
	for t := range tags(c.r.Header["If-Match"]) {
		if t == "*" { // that it exists, which every change asks for
			return nil
		}
		version := int64(-1) // no row's: what is no tag of ours, or a weak one, matches nothing
		if head, _, ok := strings.Cut(strings.Trim(t, `"`), "."); ok && t[0] == '"' {
			if v, err := strconv.ParseInt(head, 10, 64); err == nil {
				version = v
			}
		}
		versions = append(versions, version)
	}
	return versions
}

// tags are the members of the header's lists. Our tags hold no comma; what others hold matches nothing in any case.
func tags(lines []string) func(yield func(string) bool) {
	return func(yield func(string) bool) {
		for _, line := range lines {
			for t := range strings.SplitSeq(line, ",") {
				if t = strings.TrimSpace(t); t != "" && !yield(t) {
					return
				}
			}
		}
	}
}
