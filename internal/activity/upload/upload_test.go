package upload

import (
	"archive/zip"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
)

// zipped makes a zip with entries of these names, each with more text than its header.
func zipped(t testing.TB, names ...string) string {
	t.Helper()
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for _, name := range names {
		w, err := z.Create(name)
		if err == nil {
			_, err = io.WriteString(w, strings.Repeat("<?xml version=\"1.0\"?> PK ", 50))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestSniff(t *testing.T) {
	t.Parallel()
	ogg := "OggS\x00\x02" + strings.Repeat("\x00", 20) + "\x01\x1e"
	tests := map[string]struct{ head, want string }{
		"png":                     {"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR", TypePNG},
		"jpeg":                    {"\xff\xd8\xff\xe0\x00\x10JFIF", TypeJPEG},
		"gif 87":                  {"GIF87a\x01\x00", TypeGIF},
		"gif 89":                  {"GIF89a\x01\x00", TypeGIF},
		"webp":                    {"RIFF\x24\x00\x00\x00WEBPVP8 ", TypeWebP},
		"pdf":                     {"%PDF-1.7\n%\xe2\xe3\xcf\xd3", TypePDF},
		"mp4":                     {"\x00\x00\x00\x20ftypisom\x00\x00\x02\x00", TypeMP4},
		"quicktime":               {"\x00\x00\x00\x14ftypqt  \x00\x00\x00\x00", TypeQuickTime},
		"old quicktime":           {"\x00\x00\x00\x08wide\x00\x00", TypeQuickTime},
		"m4a":                     {"\x00\x00\x00\x20ftypM4A \x00\x00\x00\x00", TypeMP4Audio},
		"webm":                    {"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\xf7\x81\x01B\xf2\x81\x04B\xf3\x81\x08B\x82\x84webm", TypeWebM},
		"mp3 with a tag":          {"ID3\x04\x00", TypeMP3},
		"mp3":                     {"\xff\xfb\x90\x64", TypeMP3},
		"aac":                     {"\xff\xf1\x50\x80", TypeAAC},
		"ogg":                     {ogg + "vorbis", TypeOgg},
		"wav":                     {"RIFF\x24\x00\x00\x00WAVEfmt ", TypeWAV},
		"text":                    {"Grüße\n", TypeText},
		"latin-1":                 {"Gr\xfc\xdfe\n", TypeText},
		"docx":                    {zipped(t, "[Content_Types].xml", "_rels/.rels", "word/document.xml"), TypeDOCX},
		"xlsx":                    {zipped(t, "[Content_Types].xml", "_rels/.rels", "docProps/app.xml", "xl/workbook.xml"), TypeXLSX},
		"pptx, packed otherwise":  {zipped(t, "_rels/.rels", "docProps/core.xml", "ppt/presentation.xml", "[Content_Types].xml"), TypePPTX},
		"svg":                     {`<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"/>`, TypeText},
		"html":                    {"<!DOCTYPE html><script>alert(1)</script>", TypeText},
		"xslt":                    {`<?xml version="1.0"?><?xml-stylesheet type="text/xsl" href="x"?>`, TypeText},
		"nothing":                 {"", TypeUnknown},
		"any zip":                 {zipped(t, "report.txt", "word/document.xml"), TypeUnknown},
		"a zip of office's front": {zipped(t, "[Content_Types].xml", "elsewhere/x"), TypeUnknown},
		"cut zip":                 {"PK\x03\x04\x14\x00", TypeUnknown},
		"zip with a long name":    {"PK\x03\x04" + strings.Repeat("\x00", 22) + "\xff\xff\x00\x00word/", TypeUnknown},
		"program":                 {"\x7fELF\x02\x01\x01\x00", TypeUnknown},
		"windows program":         {"MZ\x90\x00\x03\x00", TypeUnknown},
		"heic":                    {"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00", TypeUnknown},
		"theora":                  {"OggS\x00\x02" + strings.Repeat("\x00", 22) + "\x80theora", TypeUnknown},
		"matroska":                {"\x1aE\xdf\xa3\x9fB\x86\x81\x01B\x82\x88matroska", TypeUnknown},
		"avi":                     {"RIFF\x24\x00\x00\x00AVI LIST", TypeUnknown},
		"utf-16":                  {"\xff\xfeG\x00r\x00", TypeUnknown},
		"text with a NUL":         {"abc\x00def", TypeUnknown},
		"sync word, bad rate":     {"\xff\xfb\xff\xff\x00", TypeUnknown},
	}
	for name, tt := range tests {
		if got := Sniff([]byte(tt.head)); got != tt.want {
			t.Errorf("%s: %s, want %s", name, got, tt.want)
		}
	}
	for _, known := range DefaultTypes() {
		if is, ok := ParseType(strings.ToUpper(known)); !ok || is != known {
			t.Errorf("%s in capitals is %q, %v", known, is, ok)
		}
		if !slices.ContainsFunc(slices.Collect(func(yield func(string) bool) {
			for _, tt := range tests {
				if !yield(tt.want) {
					return
				}
			}
		}), func(s string) bool { return s == known }) {
			t.Errorf("%s is in the default list, and no file of the table has it", known)
		}
	}
	for _, is := range []string{"image/svg+xml", "text/html", "", "application/zip", "text/plain; charset=utf-8", "*/*"} {
		if _, ok := ParseType(is); ok {
			t.Errorf("%q is known", is)
		}
	}
}

func TestInline(t *testing.T) {
	t.Parallel()
	for _, kind := range append(DefaultTypes(), TypeUnknown) {
		want := kind != TypeText && kind != TypeUnknown && !strings.Contains(kind, "openxml")
		if Inline(kind) != want {
			t.Errorf("%s inline: %v", kind, !want)
		}
	}
}

func FuzzSniff(f *testing.F) {
	f.Add([]byte("PK\x03\x04"))
	f.Add([]byte("\x00\x00\x00\x20ftypisom"))
	f.Add([]byte("<svg"))
	f.Fuzz(func(t *testing.T, head []byte) {
		is := Sniff(head)
		if same, ok := ParseType(is); !ok || same != is {
			t.Errorf("%q is unknown", is)
		}
	})
}

func TestCleanName(t *testing.T) {
	t.Parallel()
	tests := map[string]string{
		"report.pdf": "report.pdf", "../../etc/passwd": "passwd", `..\..\x.txt`: "x.txt", "/etc/x": "x", `C:\x`: "x", "..": "file", ".": "file",
		"": "file", "a/": "file", "a\x00b\nc\x7f.txt": "abc.txt", "gnp.\u202etxt.exe": "gnp.txt.exe", `say "hi".txt`: `say "hi".txt`,
		".htaccess": "htaccess", "Grüße 😀.txt": "Grüße 😀.txt", "bad\xff.txt": "bad.txt", "line\u2028break": "linebreak", "trailing. . ": "trailing",
		"\ufeffa\u200b.txt":               "a.txt",
		strings.Repeat("x", 300) + ".txt": strings.Repeat("x", MaxName-4) + ".txt",
		"x." + strings.Repeat("y", 300):   "x." + strings.Repeat("y", MaxName-2),
	}
	for in, want := range tests {
		if got := CleanName(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

func FuzzCleanName(f *testing.F) {
	f.Add("../x")
	f.Add(strings.Repeat("ü", 200) + ".txt")
	f.Fuzz(func(t *testing.T, in string) {
		got := CleanName(in)
		if got == "" || len(got) > MaxName || !utf8.ValidString(got) || strings.ContainsAny(got, "/\\\x00\r\n") || got == "." || got == ".." {
			t.Errorf("%q: %q", in, got)
		}
		if again := CleanName(got); again != got && len(got) < MaxName {
			t.Errorf("%q, cleaned again: %q", got, again)
		}
	})
}

// filesIn lists everything in a folder but folders.
func filesIn(t testing.TB, dir string) []string {
	t.Helper()
	var names []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

func newKey() string { return Key(uuid.New(), uuid.New()) }

func TestDir(t *testing.T) {
	t.Parallel()
	ctx, root := t.Context(), filepath.Join(t.TempDir(), "made", "later")
	d := NewDir(root)
	key := newKey()
	if _, err := d.Open(ctx, key); !errors.Is(err, ErrNoFile) {
		t.Errorf("open before: %v", err)
	}
	if err := d.Put(ctx, key, strings.NewReader("hello")); err != nil {
		t.Fatal(err)
	}
	f, err := d.Open(ctx, key)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if b, err := io.ReadAll(f); err != nil || string(b) != "hello" {
		t.Errorf("read %q, %v", b, err)
	}
	if info, err := os.Stat(filepath.Join(root, key)); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", info, err)
	}
	for range 2 {
		if err := d.Delete(ctx, key); err != nil {
			t.Error(err)
		}
	}
	if left := filesIn(t, root); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	for _, bad := range []string{"", "x", "../" + uuid.NewString(), uuid.NewString() + "/..", key + "/x", strings.ToUpper(key), key + partSuffix} {
		if err := d.Put(ctx, bad, strings.NewReader("x")); err == nil {
			t.Errorf("%q was taken for a key", bad)
		}
		if _, err := d.Open(ctx, bad); err == nil || errors.Is(err, ErrNoFile) {
			t.Errorf("open %q: %v", bad, err)
		}
	}
}

// Whatever ends a Put, nothing is left of it.
func TestDirPutFails(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	d := NewDir(root)
	broken := errors.New("broken")
	if err := d.Put(t.Context(), newKey(), io.MultiReader(strings.NewReader("some"), iotest.ErrReader(broken))); !errors.Is(err, broken) {
		t.Errorf("a reader's error: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	if err := d.Put(ctx, newKey(), io.MultiReader(strings.NewReader("some"), readerFunc(func(b []byte) (int, error) {
		cancel()
		return copy(b, "more"), nil
	}))); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if left := filesIn(t, root); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	// A folder in place of the file: the rename fails.
	key := newKey()
	if err := os.MkdirAll(filepath.Join(root, key, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.Put(t.Context(), key, strings.NewReader("x")); err == nil {
		t.Error("stored over a folder")
	}
	if left := filesIn(t, root); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(b []byte) (int, error) { return f(b) }

func TestDirCheck(t *testing.T) {
	t.Parallel()
	root := filepath.Join(t.TempDir(), "a", "b")
	if err := NewDir(root).Check(t.Context()); err != nil {
		t.Error(err)
	}
	if left := filesIn(t, root); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
	file := filepath.Join(root, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := NewDir(filepath.Join(file, "below")).Check(t.Context()); !errors.Is(err, ErrStorage) {
		t.Errorf("below a file: %v", err)
	}
}

const png = "\x89PNG\r\n\x1a\n"

func TestReceive(t *testing.T) {
	t.Parallel()
	broken := errors.New("broken")
	rest := strings.Repeat("x", SniffLen)
	tests := map[string]struct {
		in      io.Reader
		allowed []string
		err     error
		size    int64
	}{
		"small":                {strings.NewReader(png), nil, nil, 8},
		"at the limit":         {strings.NewReader(png + rest + rest[8:]), nil, nil, 2 * SniffLen},
		"one over":             {strings.NewReader(png + rest + rest[7:]), nil, ErrTooLarge, 0},
		"byte by byte":         {iotest.OneByteReader(strings.NewReader(png + "x")), nil, nil, 9},
		"empty":                {strings.NewReader(""), nil, ErrEmpty, 0},
		"cut at the beginning": {io.MultiReader(strings.NewReader(png), iotest.ErrReader(broken)), nil, broken, 0},
		"cut later":            {io.MultiReader(strings.NewReader(png+rest), iotest.ErrReader(broken)), nil, broken, 0},
		"the tenant's list":    {strings.NewReader(png), []string{TypePDF}, &TypeError{TypePNG}, 0},
		"a wider list":         {strings.NewReader("\x7fELF\x00"), []string{TypeUnknown}, nil, 5},
		"the common list":      {strings.NewReader("\x7fELF\x00"), nil, &TypeError{TypeUnknown}, 0},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			root := t.TempDir()
			reg := prometheus.NewRegistry()
			in := NewIntake(NewDir(root), Options{MaxBytes: 2 * SniffLen, Registerer: reg})
			var got bytes.Buffer
			key := newKey()
			f, err := in.Receive(t.Context(), key, io.TeeReader(tt.in, &got), tt.allowed)
			var kind, want *TypeError
			if errors.As(tt.err, &want) {
				if !errors.As(err, &kind) || kind.Type != want.Type {
					t.Errorf("%v, want %v", err, tt.err)
				}
			} else if !errors.Is(err, tt.err) || errors.Is(err, ErrStorage) {
				t.Errorf("%v, want %v", err, tt.err)
			}
			if tt.err != nil {
				if left := filesIn(t, root); len(left) != 0 {
					t.Errorf("left: %v", left)
				}
				return
			}
			b, err := os.ReadFile(filepath.Join(root, key))
			if err != nil || !bytes.Equal(b, got.Bytes()) {
				t.Errorf("stored %d of %d bytes, %v", len(b), got.Len(), err)
			}
			if diff := cmp.Diff(File{Key: key, Type: Sniff(b), Size: tt.size, SHA256: sha256.Sum256(b)}, f); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// A fault of the storage is told from one of the sender.
func TestReceiveStorageFails(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	in := NewIntake(NewDir(filepath.Join(file, "below")), Options{})
	if _, err := in.Receive(t.Context(), newKey(), strings.NewReader(png), nil); !errors.Is(err, ErrStorage) {
		t.Errorf("%v, want %v", err, ErrStorage)
	}
}

// The sweeper removes what is old and has no row, interrupted files, and nothing else.
func TestSweep(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	d := NewDir(root)
	now := time.Now()
	put := func(name string, age time.Duration) string {
		t.Helper()
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("x"), 0o600),
			os.Chtimes(path, now.Add(-age), now.Add(-age))); err != nil {
			t.Fatal(err)
		}
		return path
	}
	tenant := uuid.New()
	known := uuid.New()
	keep := []string{
		put(Key(tenant, known), 2*time.Hour),
		put(newKey(), time.Minute),
		put(newKey()+partSuffix, time.Minute),
		put("notes.txt", 2*time.Hour),
		put(tenant.String()+"/README", 2*time.Hour),
	}
	put(Key(tenant, uuid.New()), 2*time.Hour)
	put(newKey()+partSuffix, 2*time.Hour)
	for range sweepBatch {
		put(Key(tenant, uuid.New()), 2*time.Hour)
	}
	asked := 0
	orphans := func(_ context.Context, tenants, ids []uuid.UUID) (out []int, _ error) {
		asked++
		for i := range ids {
			if tenants[i] == tenant && ids[i] != known {
				out = append(out, i)
			}
		}
		return out, nil
	}
	s := NewSweeper(d, orphans, prometheus.NewRegistry(), slog.New(slog.DiscardHandler))
	n, err := s.sweep(t.Context(), now.Add(-time.Hour))
	if err != nil || n != sweepBatch+1 || asked != 2 {
		t.Errorf("removed %d with %d questions, %v", n, asked, err)
	}
	left := filesIn(t, root)
	slices.Sort(keep)
	slices.Sort(left)
	if diff := cmp.Diff(keep, left); diff != "" {
		t.Errorf("files:\n%s", diff)
	}

	// Without an answer nothing is removed; without a folder there is nothing to do.
	gone := errors.New("gone")
	s = NewSweeper(d, func(context.Context, []uuid.UUID, []uuid.UUID) ([]int, error) { return nil, gone }, nil, nil)
	if _, err := s.sweep(t.Context(), now.Add(time.Hour)); !errors.Is(err, gone) {
		t.Errorf("%v, want %v", err, gone)
	}
	if _, err := NewSweeper(NewDir(filepath.Join(root, "none")), orphans, nil, nil).sweep(t.Context(), now); err != nil {
		t.Errorf("no folder: %v", err)
	}
}

func TestSweeperRun(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	key := newKey()
	d := NewDir(root)
	if err := d.Put(t.Context(), key, strings.NewReader("x")); err != nil {
		t.Fatal(err)
	}
	old := time.Now().Add(-2 * sweepAge)
	if err := os.Chtimes(filepath.Join(root, key), old, old); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	s := NewSweeper(d, func(context.Context, []uuid.UUID, []uuid.UUID) ([]int, error) {
		stop()
		return []int{0}, nil
	}, nil, slog.New(slog.DiscardHandler))
	if err := s.Run(ctx); err != nil {
		t.Error(err)
	}
}
