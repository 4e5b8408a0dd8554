package tenants

import (
	"errors"
	"strings"
	"testing"

	"converger/internal/secrets"
)

func TestKeyForm(t *testing.T) {
	t.Parallel()
	key := generateKey(apiKeyPrefix).Reveal()
	if len(key) != 58 || !strings.HasPrefix(key, "cvg_live_") {
		t.Errorf("key %q, want cvg_live_ and 49 characters", key)
	}
	hash, err := ParseKey(key)
	if err != nil || hash != secrets.Hash(key) {
		t.Errorf("ParseKey(%q) = %x, %v", key, hash, err)
	}
	token := generateKey(operatorTokenPrefix).Reveal()
	if _, err := ParseOperatorToken(token); err != nil {
		t.Errorf("ParseOperatorToken(%q): %v", token, err)
	}
	if again := generateKey(apiKeyPrefix).Reveal(); again == key {
		t.Error("two keys are alike")
	}
	wantErr(t, "a token as a key", second(ParseKey(token)), ErrMalformedKey)
	wantErr(t, "a key as a token", second(ParseOperatorToken(key)), ErrMalformedKey)
}

// TestChecksumIsCRC32 holds the format to numbers computed elsewhere: CRC-32("123456789") = 0xCBF43926, 3421780262.
func TestChecksumIsCRC32(t *testing.T) {
	t.Parallel()
	if got := checksum("123456789"); string(got[:]) != "3jZRME" {
		t.Errorf("checksum = %s", got[:])
	}
	if got := checksum(""); string(got[:]) != "000000" {
		t.Errorf("checksum of nothing = %s, want zeros", got[:])
	}
}

func TestParseKeyRefusesEveryTypingError(t *testing.T) {
	t.Parallel()
	key := generateKey(apiKeyPrefix).Reveal()
	for i := range key {
		other := byte('x')
		if key[i] == other {
			other = 'y'
		}
		wantErr(t, "one letter wrong", second(ParseKey(key[:i]+string(other)+key[i+1:])), ErrMalformedKey)
		wantErr(t, "one letter missing", second(ParseKey(key[:i]+key[i+1:])), ErrMalformedKey)
		if i > 0 && key[i] != key[i-1] {
			swapped := key[:i-1] + key[i:i+1] + key[i-1:i] + key[i+1:]
			wantErr(t, "two letters swapped", second(ParseKey(swapped)), ErrMalformedKey)
		}
	}
	for _, bad := range []string{"", "cvg_live_", " " + key, key + "\n", strings.ToUpper(key), strings.Repeat(key, 1000)} {
		wantErr(t, "not a key", second(ParseKey(bad)), ErrMalformedKey)
	}
}

func TestParseKeyAllocatesNothing(t *testing.T) {
	key, bad := generateKey(apiKeyPrefix).Reveal(), strings.Repeat("x", 58)
	if n := testing.AllocsPerRun(100, func() { _, _ = ParseKey(key); _, _ = ParseKey(bad) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func FuzzParseKey(f *testing.F) {
	f.Add(generateKey(apiKeyPrefix).Reveal())
	f.Add("")
	f.Add("cvg_live_" + strings.Repeat("A", 49))
	f.Fuzz(func(t *testing.T, text string) {
		hash, err := ParseKey(text)
		switch {
		case err == nil:
			if len(text) != 58 || hash != secrets.Hash(text) {
				t.Errorf("accepted %q with %x", text, hash)
			}
		case !errors.Is(err, ErrMalformedKey) || hash != [32]byte{}:
			t.Errorf("refused %q with %v and %x", text, err, hash)
		}
	})
}

func BenchmarkParseKey(b *testing.B) {
	key := generateKey(apiKeyPrefix).Reveal()
	b.ReportAllocs()
	for b.Loop() {
		_, _ = ParseKey(key)
	}
}

func second[T any](_ T, err error) error { return err }
