package http

import (
	"html"
	"html/template"
	"regexp"
	"strings"
	"testing"
)

// The page shows every operation and every schema, has no link into nothing, and needs nothing that its content policy
// forbids.
func TestDocsPage(t *testing.T) {
	t.Parallel()
	f := newFront(t)
	a := f.call(t, "GET", "/docs", "")
	a.is(t, 200, "")
	page := string(a.body)
	if got := a.Header.Get("Content-Security-Policy"); got != pageCSP {
		t.Errorf("content policy %q", got)
	}
	if m := regexp.MustCompile(`<script|<style| style=| on[a-z]+=|src="|href="http:`).FindString(page); m != "" {
		t.Errorf("the page holds %q, which its content policy forbids", m)
	}
	ids := map[string]bool{}
	for _, m := range regexp.MustCompile(` id="([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if ids[m[1]] {
			t.Errorf("the id %s is there twice", m[1])
		}
		ids[m[1]] = true
	}
	for _, m := range regexp.MustCompile(`href="#([^"]+)"`).FindAllStringSubmatch(page, -1) {
		if !ids[m[1]] {
			t.Errorf("a link leads to #%s, which is not there", m[1])
		}
	}
	codes := map[string]bool{}
	for _, m := range regexp.MustCompile(`href="(/problems/[^"]+)"`).FindAllStringSubmatch(page, -1) {
		codes[m[1]] = true
	}
	for path := range codes {
		f.call(t, "GET", path, "").is(t, 200, "")
	}
	f.call(t, "GET", "/static/docs.css", "").is(t, 200, "")
	for _, path := range f.description.doc.Paths {
		for _, method := range *path.Value {
			op := method.Value
			if !ids[op.ID] || !strings.Contains(page, html.EscapeString(op.Summary)) {
				t.Errorf("the page lacks %s", op.ID)
			}
		}
	}
	for _, s := range f.description.doc.Components.Schemas {
		if !ids["schema-"+s.Name] {
			t.Errorf("the page lacks the schema %s", s.Name)
		}
	}
	// The calls are shown with the address of this hub, the credential and the body.
	for _, want := range []string{
		`curl -sS &#34;https://hub.example/api/v1/conversations/$CONVERSATION_ID/activities&#34;`, `-H &#34;x-api-key: $API_KEY&#34;`,
		`-H &#34;idempotency-key: order-4711&#34;`, `&#34;text&#34;:&#34;Your order is on its way&#34;`, `curl -sS -X DELETE &#34;https://hub.example/api/v1/routing_rules/$RULE_ID&#34;`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %s", want)
		}
	}
}

func TestMarkdown(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]template.HTML{
		"":                     "",
		"a\nb\n\nc":            "<p>a\nb</p><p>c</p>",
		"x:\n\n- a\n- b `c`\n": "<p>x:</p><ul><li>a</li><li>b <code>c</code></li></ul>",
		"**a** *b* <script>":   "<p><strong>a</strong> <em>b</em> &lt;script&gt;</p>",
		"[a](/b) [c](#d)":      `<p><a href="/b">a</a> <a href="#d">c</a></p>`,
		"[a](javascript:b)":    "<p>[a](javascript:b)</p>",
		`[a](/b"onclick="x)`:   `<p><a href="/b&#34;onclick=&#34;x">a</a></p>`,
	} {
		if got := markdown(text); got != want {
			t.Errorf("markdown(%q) = %s, want %s", text, got, want)
		}
	}
}
