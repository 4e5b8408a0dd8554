package upload

import (
	"bytes"
	"encoding/binary"
	"slices"
	"strings"
)

// The types that [Sniff] tells apart. Nothing else is ever said of a file, whatever its sender called it.
const (
	TypePNG       = "image/png"
	TypeJPEG      = "image/jpeg"
	TypeGIF       = "image/gif"
	TypeWebP      = "image/webp"
	TypePDF       = "application/pdf"
	TypeMP4       = "video/mp4"
	TypeWebM      = "video/webm"
	TypeQuickTime = "video/quicktime"
	TypeMP3       = "audio/mpeg"
	TypeOgg       = "audio/ogg"
	TypeMP4Audio  = "audio/mp4"
	TypeAAC       = "audio/aac"
	TypeWAV       = "audio/wav"
	TypeText      = "text/plain" // HTML and SVG among them: their text is shown, never run
	TypeDOCX      = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
	TypeXLSX      = "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"
	TypePPTX      = "application/vnd.openxmlformats-officedocument.presentationml.presentation"
	TypeUnknown   = "application/octet-stream" // everything else
)

// DefaultTypes returns the types that are allowed unless somebody says otherwise: all but TypeUnknown.
func DefaultTypes() []string {
	return []string{
		TypePNG, TypeJPEG, TypeGIF, TypeWebP, TypePDF, TypeMP4, TypeWebM, TypeQuickTime, TypeMP3, TypeOgg, TypeMP4Audio,
		TypeAAC, TypeWAV, TypeText, TypeDOCX, TypeXLSX, TypePPTX,
	}
}

// ParseType reads the name of a type, whose case does not matter (RFC 9110, 8.3.1). It fails unless Sniff can say that type:
// another one in an allow-list would never allow anything.
func ParseType(name string) (contentType string, ok bool) {
	contentType = strings.ToLower(name)
	return contentType, contentType == TypeUnknown || slices.Contains(DefaultTypes(), contentType)
}

// Inline tells whether a browser may show a file of this type in place: pictures, sound, film and PDF. Everything else
// is to be saved.
func Inline(contentType string) bool {
	major, _, _ := strings.Cut(contentType, "/")
	return major == "image" || major == "video" || major == "audio" || contentType == TypePDF
}

// SniffLen is how much of a file's beginning [Sniff] looks at, in bytes. Office documents name their parts in the order
// in which they were packed; the first telling one is far within this in all that common programs write.
const SniffLen = 32 << 10

// signatures are fixed bytes at fixed places, tried in this order.
var signatures = []struct {
	offset int
	magic  string
	is     string
}{
	{0, "\x89PNG\r\n\x1a\n", TypePNG},
	{0, "\xff\xd8\xff", TypeJPEG},
	{0, "GIF87a", TypeGIF},
	{0, "GIF89a", TypeGIF},
	{0, "%PDF-", TypePDF},
	{0, "ID3", TypeMP3},
	{0, "ADIF", TypeAAC},
	{4, "moov", TypeQuickTime}, // from before there was ftyp
	{4, "mdat", TypeQuickTime},
	{4, "wide", TypeQuickTime},
}

// Sniff tells the type of a file from its first bytes, at most SniffLen of them. An empty one is TypeUnknown.
func Sniff(head []byte) string {
	head = head[:min(len(head), SniffLen)]
	for _, s := range signatures {
		if len(head) >= s.offset && bytes.HasPrefix(head[s.offset:], []byte(s.magic)) {
			return s.is
		}
	}
	switch {
	case isRIFF(head, "WEBP"):
		return TypeWebP
	case isRIFF(head, "WAVE"):
		return TypeWAV
	case bytes.HasPrefix(head, []byte("OggS")):
		return sniffOgg(head)
	case bytes.HasPrefix(head, []byte("\x1aE\xdf\xa3")):
		// The document type comes in the EBML header, a few dozen bytes; Matroska has the same one otherwise.
		if bytes.Contains(head[:min(len(head), 64)], []byte("\x42\x82\x84webm")) {
			return TypeWebM
		}
	case len(head) >= 12 && string(head[4:8]) == "ftyp":
		return sniffBrand(string(head[8:12]))
	case bytes.HasPrefix(head, []byte("PK\x03\x04")):
		return sniffOffice(head)
	case isAAC(head):
		return TypeAAC
	case isMP3(head):
		return TypeMP3
	case isText(head):
		return TypeText
	}
	return TypeUnknown
}

func isRIFF(head []byte, form string) bool {
	return len(head) >= 12 && string(head[:4]) == "RIFF" && string(head[8:12]) == form
}

// sniffOgg: the first page of each stream in the file begins with the name of its codec; pictures that move are none of
// the types.
func sniffOgg(head []byte) string {
	first := head[:min(len(head), 512)]
	if bytes.Contains(first, []byte("\x80theora")) || bytes.Contains(first, []byte("BBCD")) {
		return TypeUnknown
	}
	return TypeOgg
}

// sniffBrand reads the major brand of an ISO base media file (ISO/IEC 14496-12). HEIF and AVIF pictures use the same box.
func sniffBrand(brand string) string {
	switch brand {
	case "qt  ":
		return TypeQuickTime
	case "M4A ", "M4B ", "F4A ", "F4B ":
		return TypeMP4Audio
	case "isom", "iso2", "iso3", "iso4", "iso5", "iso6", "iso7", "iso8", "iso9", "mp41", "mp42", "mp71", "avc1", "dash",
		"M4V ", "M4VH", "M4VP", "MSNV", "F4V ", "mmp4":
		return TypeMP4
	}
	return TypeUnknown
}

// sniffOffice finds out what an Office Open XML document (ECMA-376) is: a zip whose first entry is one that such a
// document has, and whose parts lie in the folder of its kind. Any other zip is TypeUnknown.
func sniffOffice(head []byte) string {
	kinds := []struct{ folder, is string }{{"word/", TypeDOCX}, {"xl/", TypeXLSX}, {"ppt/", TypePPTX}}
	for first := true; ; first = false {
		name, rest, ok := zipEntry(head)
		if !ok {
			return TypeUnknown
		}
		for _, k := range kinds {
			if strings.HasPrefix(name, k.folder) {
				return k.is
			}
		}
		if first && name != "[Content_Types].xml" && !strings.HasPrefix(name, "_rels/") && !strings.HasPrefix(name, "docProps/") &&
			!strings.HasPrefix(name, "customXml/") {
			return TypeUnknown
		}
		// The size of what follows need not be in the header: look for the next one.
		next := bytes.Index(rest, []byte("PK\x03\x04"))
		if next < 0 {
			return TypeUnknown
		}
		head = rest[next:]
	}
}

// zipEntry reads the name in a local file header of 30 bytes (APPNOTE.TXT, 4.3.7) and returns what is behind it.
func zipEntry(b []byte) (name string, rest []byte, ok bool) {
	const size = 30
	if len(b) < size {
		return "", nil, false
	}
	n := int(binary.LittleEndian.Uint16(b[26:28]))
	if n > len(b)-size {
		return "", nil, false
	}
	return string(b[size : size+n]), b[size+n:], true
}

// isAAC: an ADTS frame begins with twelve ones and a layer of zero (ISO/IEC 13818-7).
func isAAC(head []byte) bool { return len(head) >= 2 && head[0] == 0xff && head[1]&0xf6 == 0xf0 }

// isMP3: a frame of MPEG audio layer III begins with eleven ones; the reserved versions, bit rates and sampling rates
// keep most other files that begin so out (ISO/IEC 11172-3, 2.4.1.3).
func isMP3(head []byte) bool {
	return len(head) >= 3 && head[0] == 0xff && head[1]&0xe6 == 0xe2 && head[1]&0x18 != 0x08 &&
		head[2]&0xf0 != 0xf0 && head[2]&0x0c != 0x0c
}

// isText: no byte that text has no use for (WHATWG MIME Sniffing, "binary data byte").
func isText(head []byte) bool {
	return len(head) > 0 && !slices.ContainsFunc(head, func(b byte) bool {
		return b < 0x20 && b != '\t' && b != '\n' && b != '\f' && b != '\r' && b != 0x1b
	}) && !bytes.HasPrefix(head, []byte("\xff\xfe")) && !bytes.HasPrefix(head, []byte("\xfe\xff"))
}
