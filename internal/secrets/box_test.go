package secrets

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"strings"
	"testing"

	"github.com/google/uuid"
)

var (
	row   = uuid.MustParse("0198c1a2-0000-7000-8000-000000000001")
	other = uuid.MustParse("0198c1a2-0000-7000-8000-000000000002")
)

func key(fill byte) []byte { return bytes.Repeat([]byte{fill}, KeySize) }

func newBox(t testing.TB, current []byte, retired ...[]byte) *Box {
	t.Helper()
	b, err := NewBox(current, retired...)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestBox(t *testing.T) {
	t.Parallel()
	b := newBox(t, key(1))
	for _, plain := range []string{"", "x", strings.Repeat("long", 10_000)} {
		sealed := b.Seal([]byte(plain), "channels", "secret", row)
		if len(sealed) != len(plain)+33 {
			t.Errorf("%d bytes sealed are %d", len(plain), len(sealed))
		}
		got, err := b.Open(sealed, "channels", "secret", row)
		if err != nil || string(got) != plain {
			t.Errorf("opened %q, %v", got, err)
		}
	}
	if bytes.Equal(b.Seal([]byte("x"), "t", "c", row), b.Seal([]byte("x"), "t", "c", row)) {
		t.Error("the same value seals the same twice: it can be told from outside")
	}
}

func TestSealedLayout(t *testing.T) {
	t.Parallel()
	sealed := newBox(t, key(1)).Seal([]byte("x"), "t", "c", row)
	sum := sha256.Sum256(key(1))
	if sealed[0] != 1 || !bytes.Equal(sealed[1:5], sum[:4]) {
		t.Errorf("head %x, want version 1 and key id %x", sealed[:5], sum[:4])
	}
}

func TestBoxRefuses(t *testing.T) {
	t.Parallel()
	b := newBox(t, key(1))
	sealed := b.Seal([]byte("value"), "channels", "secret", row)
	open := func(what string, sealed []byte, table, column string, row uuid.UUID, want error) {
		t.Helper()
		if got, err := b.Open(sealed, table, column, row); !errors.Is(err, want) || got != nil {
			t.Errorf("%s: %q, %v; want %v", what, got, err, want)
		}
	}
	open("another row", sealed, "channels", "secret", other, ErrSealed)
	open("another column", sealed, "channels", "config", row, ErrSealed)
	open("another table", sealed, "tenants", "secret", row, ErrSealed)
	open("names shifted", sealed, "channelss", "ecret", row, ErrSealed)
	for i := range sealed {
		altered := bytes.Clone(sealed)
		altered[i] ^= 1
		want := ErrSealed
		if i >= 1 && i <= 4 {
			want = ErrUnknownKey
		}
		open("one bit altered", altered, "channels", "secret", row, want)
		open("cut", sealed[:i], "channels", "secret", row, ErrSealed)
	}
	open("longer", append(bytes.Clone(sealed), 0), "channels", "secret", row, ErrSealed)
	open("nothing", nil, "channels", "secret", row, ErrSealed)
}

func TestBoxKeys(t *testing.T) {
	t.Parallel()
	sealed := newBox(t, key(1)).Seal([]byte("value"), "t", "c", row)
	if got, err := newBox(t, key(2), key(3), key(1)).Open(sealed, "t", "c", row); err != nil || string(got) != "value" {
		t.Errorf("with a retired key: %q, %v", got, err)
	}
	if _, err := newBox(t, key(2)).Open(sealed, "t", "c", row); !errors.Is(err, ErrUnknownKey) {
		t.Errorf("without the key: %v", err)
	}
	renewed := newBox(t, key(2), key(1)).Seal([]byte("value"), "t", "c", row)
	if _, err := newBox(t, key(2)).Open(renewed, "t", "c", row); err != nil {
		t.Errorf("sealed with other than the current key: %v", err)
	}
	newBox(t, key(1), key(1)) // the same key twice is no collision
	for _, bad := range [][][]byte{{nil}, {key(1)[:31]}, {append(key(1), 0)}, {key(1), nil}, {key(1), []byte("short")}} {
		if _, err := NewBox(bad[0], bad[1:]...); err == nil {
			t.Errorf("accepted keys of %d bytes, retired %v", len(bad[0]), bad[1:])
		} else if strings.Contains(err.Error(), "short") {
			t.Errorf("the error shows the key: %v", err)
		}
	}
}

func FuzzOpen(f *testing.F) {
	b := newBox(f, key(1), key(2))
	good := b.Seal([]byte("value"), "t", "c", row)
	f.Add(good)
	f.Add(good[:headSize])
	f.Add([]byte{})
	f.Add(newBox(f, key(3)).Seal(nil, "t", "c", row))
	f.Fuzz(func(t *testing.T, sealed []byte) {
		plain, err := b.Open(sealed, "t", "c", row)
		switch {
		case err == nil && string(plain) != "value": // a fuzzing worker has seeds of another process, with other nonces
			t.Errorf("opened a forgery: %q", plain)
		case err != nil && !errors.Is(err, ErrSealed) && !errors.Is(err, ErrUnknownKey):
			t.Errorf("error %v", err)
		case err != nil && plain != nil:
			t.Errorf("error %v and %q", err, plain)
		}
	})
}

func BenchmarkOpen(b *testing.B) {
	box := newBox(b, key(1))
	sealed := box.Seal(make([]byte, 512), "channels", "config", row)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := box.Open(sealed, "channels", "config", row); err != nil {
			b.Fatal(err)
		}
	}
}
