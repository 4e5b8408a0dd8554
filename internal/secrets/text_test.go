package secrets

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

const planted = "planted-secret"

// holder has a Text in every place where it may stand.
type holder struct {
	Plain Text
	Point *Text
	List  []Text
	Map   map[string]Text
	Any   any
}

func newHolder() holder {
	t := Text(planted)
	return holder{t, &t, []Text{t}, map[string]Text{"k": t}, t}
}

func TestTextIsNeverPrinted(t *testing.T) {
	t.Parallel()
	text, h := Text(planted), newHolder()
	printed := map[string]string{
		"Sprint":       fmt.Sprint(text, h),
		"error":        fmt.Errorf("refused %s: %w", text, fmt.Errorf("key %v", h)).Error(),
		"joined error": errors.Join(fmt.Errorf("%+v", text)).Error(),
		"panic value":  fmt.Sprint(recovered(text)),
	}
	// Every verb, known or not, with every flag; but for those that fmt does not hand on: [ begins an index, %T is the
	// type, and %p and %w, mistakes with a string, are refused by go vet.
	for verb := 'A'; verb <= 'z'; verb++ {
		if strings.ContainsRune("[Tpw", verb) {
			continue
		}
		for _, flags := range []string{"", "+", "#", "-", " ", "0", "+#", "9.3"} {
			format := "%" + flags + string(verb)
			printed["Sprintf "+format] = fmt.Sprintf(format, text)
			printed["Sprintf in slice "+format] = fmt.Sprintf(format, []Text{text})
		}
	}
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		h.Point = nil // a pointer inside a struct prints as an address
		printed["Sprintf holder "+format] = fmt.Sprintf(format, h)
	}
	h = newHolder()
	out, err := json.Marshal(h)
	if err != nil {
		t.Error(err)
	}
	printed["json"] = string(out)
	out, err = xml.Marshal(text)
	if err != nil {
		t.Error(err)
	}
	printed["xml"] = string(out)
	for name, handler := range map[string]func(*bytes.Buffer) slog.Handler{
		"slog text": func(b *bytes.Buffer) slog.Handler { return slog.NewTextHandler(b, nil) },
		"slog json": func(b *bytes.Buffer) slog.Handler { return slog.NewJSONHandler(b, nil) },
	} {
		var b bytes.Buffer
		slog.New(handler(&b)).With("with", text).WithGroup("g").Info("m", "text", text, "holder", h, "pointer", &text,
			slog.Group("group", "text", text), "err", fmt.Errorf("with %v", text))
		printed[name] = b.String()
	}
	for how, got := range printed {
		if strings.Contains(got, planted) || strings.Contains(got, planted[:5]) || strings.Contains(got, fmt.Sprintf("%x", planted)) {
			t.Errorf("%s shows the secret: %s", how, got)
		}
		if !strings.Contains(got, redacted) {
			t.Errorf("%s does not say %s: %s", how, redacted, got)
		}
	}
}

func recovered(v any) (got any) {
	defer func() { got = recover() }()
	panic(v)
}

func TestTextRevealsOnDemandOnly(t *testing.T) {
	t.Parallel()
	if got := Text(planted).Reveal(); got != planted {
		t.Errorf("Reveal = %q", got)
	}
	if got := Text("").String(); got != redacted {
		t.Errorf("an empty secret prints %q: it tells that there is none", got)
	}
	var read struct{ Key Text }
	if err := json.Unmarshal([]byte(`{"Key":"`+planted+`"}`), &read); err != nil || read.Key.Reveal() != planted {
		t.Errorf("read %q, %v", read.Key.Reveal(), err)
	}
}

func TestHash(t *testing.T) {
	for _, text := range []string{"", planted, strings.Repeat("x", 1000)} {
		if Hash(text) != sha256.Sum256([]byte(text)) {
			t.Errorf("Hash of %d bytes is not their SHA-256", len(text))
		}
	}
	text := strings.Repeat("x", 64)
	if n := testing.AllocsPerRun(100, func() { Hash(text) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
