package upload

import (
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxName is the longest name of a file, in bytes: what file systems take.
const MaxName = 255

// CleanName makes a label of the name that a sender gave its file. It is shown and offered for saving, and never
// names anything on this side. Folders of either kind of slash are gone, and so are control characters and the
// invisible ones that turn text around or break lines; what is too long loses its middle, not its extension. A name of
// which nothing is left is "file".
func CleanName(name string) string {
	if i := strings.LastIndexAny(name, `/\`); i >= 0 {
		name = name[i+1:]
	}
	name = strings.Map(func(r rune) rune {
		if unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp) {
			return -1
		}
		return r
	}, strings.ToValidUTF8(name, ""))
	name = strings.Trim(name, " .") // neither hidden nor a folder, and Windows drops them at the end
	if name == "" {
		return "file"
	}
	if len(name) <= MaxName {
		return name
	}
	stem, extension := name, ""
	if i := strings.LastIndexByte(name, '.'); i >= 0 && len(name)-i <= 20 {
		stem, extension = name[:i], name[i:]
	}
	stem = stem[:MaxName-len(extension)]
	for !utf8.ValidString(stem) {
		stem = stem[:len(stem)-1] // of a character that was cut
	}
	return stem + extension
}
