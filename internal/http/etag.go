package http

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"regexp"
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

// ifMatch is the versions of which the caller expects the setting to have one; none: it expects nothing. An If-Match that
// holds no tag guards against nothing while its sender thinks that it does, and so is refused.
func (c *call) ifMatch() ([]int64, error) {
	lines, given := c.r.Header["If-Match"]
	if !given {
		return nil, nil
	}
	list := strings.Join(lines, ",")      // they are one (RFC 9110, 5.2)
	if strings.Trim(list, " \t") == "*" { // that it exists, which every change asks for
		return nil, nil
	}
	var versions []int64
	for list != "" {
		tag := entityTags.FindStringSubmatch(list)
		if tag == nil {
			return nil, malformedIfMatch()
		}
		list = list[len(tag[0]):]
		if tag[2] == "" { // an empty element
			continue
		}
		version := int64(-1) // no row's: what is no tag of ours, or a weak one, matches nothing
		head, _, ok := strings.Cut(strings.Trim(tag[2], `"`), ".")
		if v, err := strconv.ParseInt(head, 10, 64); err == nil && ok && tag[1] == "" {
			version = v
		}
		versions = append(versions, version)
	}
	if versions == nil {
		return nil, malformedIfMatch()
	}
	return versions, nil
}

// entityTags matches the first element of a list of entity tags, with the comma behind it (RFC 9110, 8.8.3 and 5.6.1).
var entityTags = regexp.MustCompile(`^[ \t]*(?:(W/)?("[^\x00-\x20"\x7F]*"))?[ \t]*(?:,|$)`)

func malformedIfMatch() *problem {
	return newProblem(codeInvalidParameter, `Invalid If-Match: it must be * or entity tags in quotes, as ETag shows them. Leave the header out to change the setting whatever it is by now.`)
}
