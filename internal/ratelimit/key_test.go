package ratelimit

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"testing"
)

func newHasher(t testing.TB, secret string) Hasher {
	t.Helper()
	h, err := NewHasher([]byte(secret))
	if err != nil {
		t.Fatal(err)
	}
	return h
}

const testSecret = "a secret for tests only"

func TestKeysAreDistinct(t *testing.T) {
	t.Parallel()
	h := newHasher(t, testSecret)
	a, b := [16]byte{1}, [16]byte{2}
	ip := netip.MustParseAddr
	keys := map[Key]string{}
	for name, k := range map[string]Key{
		"tenant a":               h.Tenant(APIRead, a),
		"tenant b":               h.Tenant(APIRead, b),
		"tenant a, other bucket": h.Tenant(Upload, a),
		"other secret":           newHasher(t, "another secret for tests").Tenant(APIRead, a),
		"channel b of a":         h.Channel(APIRead, a, b),
		"channel a of b":         h.Channel(APIRead, b, a),
		"unproven b of a":        h.ChannelUnproven(APIRead, a, b),
		"user x":                 h.User(APIRead, a, b, "x"),
		"user of no name":        h.User(APIRead, a, b, ""),
		"user NUL":               h.User(APIRead, a, b, "\x00"),
		"user two NULs":          h.User(APIRead, a, b, "\x00\x00"),
		"user of 8":              h.User(APIRead, a, b, "12345678"),
		"user of 9":              h.User(APIRead, a, b, "12345678\x00"),
		"operator a":             h.Operator(APIRead, a),
		"account":                h.Account(APIRead, "ab"),
		"account on device c":    h.AccountDevice(APIRead, "ab", "c"),
		"account on device bc":   h.AccountDevice(APIRead, "a", "bc"),
		"session":                h.Session(APIRead, [32]byte{1}),
		"v4":                     h.IP(APIRead, ip("192.0.2.1")),
		"v4 neighbour":           h.IP(APIRead, ip("192.0.2.2")),
		"v6":                     h.IP(APIRead, ip("2001:db8::1")),
		"v6 neighbour /64":       h.IP(APIRead, ip("2001:db8:0:1::1")),
		"v4 at channel b of a":   h.ChannelIP(APIRead, a, b, ip("192.0.2.1")),
		"no address":             h.IP(APIRead, netip.Addr{}),
	} {
		if other, ok := keys[k]; ok {
			t.Errorf("%s and %s meet in one key", name, other)
		}
		keys[k] = name
		if k.Hi < 2 {
			t.Errorf("%s uses a reserved word", name)
		}
	}
	for x, y := range map[string]string{
		"::ffff:192.0.2.1": "192.0.2.1",
		"2001:db8::1":      "2001:db8::ffff:1",
		"fe80::1%eth0":     "fe80::2%eth1",
	} {
		if h.IP(APIRead, ip(x)) != h.IP(APIRead, ip(y)) {
			t.Errorf("%s and %s own two keys", x, y)
		}
	}
}

// Whoever counts addresses by Network counts as the keys do.
func FuzzNetwork(f *testing.F) {
	for _, s := range []string{"192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1", "::1", "::"} {
		a := netip.MustParseAddr(s).As16()
		f.Add(a[:], a[:])
		b := a
		b[15]++
		f.Add(a[:], b[:])
	}
	h, err := NewHasher([]byte(testSecret))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, x, y []byte) {
		a, okA := netip.AddrFromSlice(x)
		b, okB := netip.AddrFromSlice(y)
		if !okA || !okB {
			t.Skip("no addresses")
		}
		if byKey, byNetwork := h.IP(LoginIP, a) == h.IP(LoginIP, b), Network(a) == Network(b); byKey != byNetwork {
			t.Errorf("%s and %s: one key %t, one network %t", a, b, byKey, byNetwork)
		}
		if n := Network(a); Network(n) != n || n.Is4In6() || n.Zone() != "" || h.IP(LoginIP, n) != h.IP(LoginIP, a) {
			t.Errorf("%s has the network %s", a, n)
		}
	})
}

// The keys of a given secret never change: nodes of two versions must agree.
func TestKeysAreStable(t *testing.T) {
	t.Parallel()
	h := newHasher(t, testSecret)
	for name, tt := range map[string]struct{ got, want Key }{
		"user": {h.User(APIRead, [16]byte{1}, [16]byte{2}, "somebody@example.com"), Key{0xcfcbcec1e767e31, 0x42bc2839960f2d28}},
		"ip":   {h.IP(LoginIP, netip.MustParseAddr("2001:db8::1")), Key{0x6fb1861509e6bb7f, 0xa76a5c95d3f06632}},
	} {
		if tt.got != tt.want {
			t.Errorf("%s: %#x, want %#x", name, tt.got, tt.want)
		}
	}
}

// The core is SipHash-1-3-128: with the word of length and padding that SipHash
// ends with, it gives the digest of the empty text under the key 00 to 0f that
// other implementations publish.
func TestSipHashVector(t *testing.T) {
	t.Parallel()
	k := Hasher{0x0706050403020100, 0x0f0e0d0c0b0a0908}.start().word(0).sum()
	got := binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(nil, k.Hi), k.Lo)
	if want := "e77ebcb22788a5befd62db6add303001"; hex.EncodeToString(got) != want {
		t.Errorf("%x, want %s", got, want)
	}
}

func TestShortSecret(t *testing.T) {
	t.Parallel()
	if _, err := NewHasher(make([]byte, MinSecret-1)); err == nil {
		t.Error("a short secret was accepted")
	}
}

func TestHashingAllocatesNothing(t *testing.T) {
	h := newHasher(t, testSecret)
	addr := netip.MustParseAddr("2001:db8::1")
	var k Key
	if n := testing.AllocsPerRun(100, func() {
		k = h.IP(LoginIP, addr)
		k = h.User(APIRead, [16]byte{1}, [16]byte{2}, "somebody@example.com")
		k = h.Session(WebPage, [32]byte{1})
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
	_ = k
}

// Different part lists never meet, however their bytes are divided.
func FuzzKeyInjective(f *testing.F) {
	f.Add("a", "bc", "ab", "c")
	f.Add("", "\x00", "\x00", "")
	f.Add("12345678", "", "1234567", "8")
	f.Fuzz(func(t *testing.T, a, b, c, d string) {
		h := newHasher(t, testSecret)
		if same := a == c && b == d; same != (h.AccountDevice(LoginAccount, a, b) == h.AccountDevice(LoginAccount, c, d)) {
			t.Fatalf("(%q, %q) and (%q, %q)", a, b, c, d)
		}
		if h.Account(LoginAccount, a+b) == h.AccountDevice(LoginAccount, a, b) {
			t.Fatalf("%q alone and in two parts", a+b)
		}
	})
}

func BenchmarkKeyIP(b *testing.B) {
	h, addr := newHasher(b, testSecret), netip.MustParseAddr("2001:db8::1")
	for b.Loop() {
		h.IP(LoginIP, addr)
	}
}

func BenchmarkKeyUser(b *testing.B) {
	h := newHasher(b, testSecret)
	for b.Loop() {
		h.User(APIRead, [16]byte{1}, [16]byte{2}, "somebody@example.com")
	}
}
