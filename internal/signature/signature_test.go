package signature

import (
	"bytes"
	"encoding/base64"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"
	"time"

	standardwebhooks "github.com/standard-webhooks/standard-webhooks/libraries/go"
)

func keysOf(secrets ...string) [][]byte {
	var keys [][]byte
	for _, s := range secrets {
		keys = append(keys, []byte(s))
	}
	return keys
}

func wantErr(t *testing.T, got, want error) {
	t.Helper()
	if !errors.Is(got, want) { // errors.Is(nil, nil) holds
		t.Fatalf("error %v, want %v", got, want)
	}
}

// Published vectors and vectors computed elsewhere: signing must produce
// exactly these texts, verifying must accept them.
func TestTimestampedVectors(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, secret, body, value string }{
		{
			"published", "whsec_test_secret",
			`{"id":"9b2f6c1e-0000-4000-8000-000000000001","text":"hello"}`,
			"t=1700000000,v1=c8945aa2aa4e6d043cdd46907fdf4ab1d4cedd12737ea10bb6f246ed39533a8a",
		},
		{
			"own", "conv-secret", `{"text":"hi"}`,
			"t=1796016600,v1=a69ac2eae81cb1d07065c7e254fffe1f604f6cad615cae48aea77f0790d01df0",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			unix, _, _ := strings.Cut(strings.TrimPrefix(tt.value, "t="), ",")
			seconds, err := strconv.ParseInt(unix, 10, 64)
			wantErr(t, err, nil)
			now := time.Unix(seconds, 0)
			header := http.Header{}
			wantErr(t, SignTimestamped(header, []byte(tt.body), keysOf(tt.secret), now), nil)
			if got := header.Get("x-converger-signature"); got != tt.value {
				t.Errorf("signed %q, want %q", got, tt.value)
			}
			wantErr(t, VerifyTimestamped(header, []byte(tt.body), keysOf(tt.secret), now), nil)
		})
	}
}

func TestVerifyTimestamped(t *testing.T) {
	t.Parallel()
	const (
		good   = "a69ac2eae81cb1d07065c7e254fffe1f604f6cad615cae48aea77f0790d01df0"
		bad    = "b69ac2eae81cb1d07065c7e254fffe1f604f6cad615cae48aea77f0790d01df0"
		legacy = "aa0c85ac7a93a4d1cfd5ea83ed0fa6c5fcb4cd7a10bc1ae2a7e6d2bc0dd2ac2f"
	)
	at := time.Unix(1796016600, 0)
	current := keysOf("conv-secret")
	values := func(v ...string) []string { return v }
	body := `{"text":"hi"}`
	legacyGood := http.Header{}
	wantErr(t, SignHubSHA256(legacyGood, []byte(body), current[0]), nil)

	tests := []struct {
		name   string
		values []string
		keys   [][]byte
		now    time.Time
		want   error
	}{
		{"valid", values("t=1796016600,v1=" + good), current, at, nil},
		{"upper-case hex", values("t=1796016600,v1=" + strings.ToUpper(good)), current, at, nil},
		{"other order, blanks and unknown elements", values("v2=zz, v1=" + good + ", t=1796016600,x"), current, at, nil},
		{"several signatures, good last", values("t=1796016600,v1=" + bad + ",v1=" + good), current, at, nil},
		{"several signatures, good first", values("t=1796016600,v1=" + good + ",v1=" + bad), current, at, nil},
		{"a broken signature beside a good one", values("t=1796016600,v1=zz,v1=" + good), current, at, nil},
		{"previous secret", values("t=1796016600,v1=" + good), keysOf("new-secret", "conv-secret"), at, nil},
		{"no previous secret", values("t=1796016600,v1=" + good), keysOf("conv-secret", ""), at, nil},
		{"300 s old", values("t=1796016600,v1=" + good), current, at.Add(300 * time.Second), nil},
		{"300 s ahead", values("t=1796016600,v1=" + good), current, at.Add(-300 * time.Second), nil},
		{"301 s old", values("t=1796016600,v1=" + good), current, at.Add(301 * time.Second), ErrStale},
		{"301 s ahead", values("t=1796016600,v1=" + good), current, at.Add(-301 * time.Second), ErrStale},
		{"far future", values("t=1099511627775,v1=" + good), current, at, ErrStale},
		{"changed timestamp", values("t=1796016601,v1=" + good), current, at, ErrMismatch},
		{"wrong signature", values("t=1796016600,v1=" + bad), current, at, ErrMismatch},
		{"other secret", values("t=1796016600,v1=" + good), keysOf("other"), at, ErrMismatch},
		{"no secret", values("t=1796016600,v1=" + good), nil, at, ErrNoKey},
		{"empty secrets", values("t=1796016600,v1=" + good), keysOf("", ""), at, ErrNoKey},
		{"no header", nil, current, at, ErrMissing},
		{"empty header", values(""), current, at, ErrMissing},
		{"header twice, one good", values("t=1796016600,v1="+bad, "t=1796016600,v1="+good), current, at, ErrMalformed},
		{"header twice, both good", values("t=1796016600,v1="+good, "t=1796016600,v1="+good), current, at, ErrMalformed},
		{"header twice, joined by a proxy", values("t=1796016600,v1=" + good + ", t=1796016600,v1=" + good), current, at, ErrMalformed},
		{"no timestamp", values("v1=" + good), current, at, ErrMalformed},
		{"no signature", values("t=1796016600"), current, at, ErrMalformed},
		{"non-numeric timestamp", values("t=soon,v1=" + good), current, at, ErrMalformed},
		{"signed timestamp", values("t=+1796016600,v1=" + good), current, at, ErrMalformed},
		{"leading zero", values("t=01796016600,v1=" + good), current, at, ErrMalformed},
		{"huge timestamp", values("t=99999999999999999999999,v1=" + good), current, at, ErrMalformed},
		{"short signature", values("t=1796016600,v1=" + good[:62]), current, at, ErrMalformed},
		{"not hex", values("t=1796016600,v1=" + strings.Repeat("z", 64)), current, at, ErrMalformed},
		{"legacy, right", legacyGood[HeaderHubSHA256], current, at, ErrLegacy},
		{"legacy, wrong", values("sha256=" + legacy), current, at, ErrMismatch},
		{"legacy, empty", values("sha256="), current, at, ErrMalformed},
		{"sha1", values("sha1=" + good[:40]), current, at, ErrMalformed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			err := VerifyTimestamped(http.Header{HeaderTimestamped: tt.values}, []byte(body), tt.keys, tt.now)
			wantErr(t, err, tt.want)
			if err == nil {
				return
			}
			// Error texts end up in logs.
			for _, secret := range []string{good, bad, "conv-secret"} {
				if strings.Contains(err.Error(), secret) {
					t.Errorf("error text %q holds %q", err, secret)
				}
			}
		})
	}
}

func TestHubSHA256(t *testing.T) {
	t.Parallel()
	const (
		empty    = `{"object":"whatsapp_business_account","entry":[]}`
		escaped  = `{"text":"Gr\u00fc\u00dfe"}`
		utf8     = `{"text":"Grüße"}`
		emptySig = "sha256=1ca363dab318df784e1963b29dca91e2098e6cf2fbf0d3c14e09580a90684a61"
	)
	tests := []struct {
		name   string
		body   string
		values []string
		keys   [][]byte
		want   error
	}{
		{"vector", empty, []string{emptySig}, keysOf("app-secret-for-tests"), nil},
		{"vector, escaped", escaped, []string{"sha256=301ac3c75567a8a1245f7a847c99645f6c8b72854af90a2710c9c46b763363bf"}, keysOf("app-secret-for-tests"), nil},
		{"vector, UTF-8", utf8, []string{"sha256=a75b010603d02bbfe5480ee1bcfa5ebe92b717ad95b4276f2c72f901aa471ba6"}, keysOf("app-secret-for-tests"), nil},
		{"escaped body decoded before the check", utf8, []string{"sha256=301ac3c75567a8a1245f7a847c99645f6c8b72854af90a2710c9c46b763363bf"}, keysOf("app-secret-for-tests"), ErrMismatch},
		{"upper-case hex", empty, []string{"sha256=" + strings.ToUpper(emptySig[7:])}, keysOf("app-secret-for-tests"), nil},
		{"second app secret", empty, []string{emptySig}, keysOf("new", "app-secret-for-tests"), nil},
		{"trailing newline", empty + "\n", []string{emptySig}, keysOf("app-secret-for-tests"), ErrMismatch},
		{"other secret", empty, []string{emptySig}, keysOf("other"), ErrMismatch},
		{"no header", empty, nil, keysOf("app-secret-for-tests"), ErrMissing},
		{"empty header", empty, []string{""}, keysOf("app-secret-for-tests"), ErrMissing},
		{"prefix only", empty, []string{"sha256="}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"no prefix", empty, []string{emptySig[7:]}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"sha1", empty, []string{"sha1=" + emptySig[7:47]}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"sha1 label", empty, []string{"sha1=" + emptySig[7:]}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"header twice, bad and good", empty, []string{"sha256=" + strings.Repeat("0", 64), emptySig}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"header twice, good and good", empty, []string{emptySig, emptySig}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"header twice, joined by a proxy", empty, []string{emptySig + ", " + emptySig}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"one digit more", empty, []string{emptySig + "0"}, keysOf("app-secret-for-tests"), ErrMalformed},
		{"no secret", empty, []string{emptySig}, keysOf(""), ErrNoKey},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			header := http.Header{HeaderHubSHA256: tt.values}
			wantErr(t, VerifyHubSHA256(header, []byte(tt.body), tt.keys, time.Time{}), tt.want)
		})
	}
	header := http.Header{}
	wantErr(t, SignHubSHA256(header, []byte(empty), []byte("app-secret-for-tests")), nil)
	if got := header.Get("x-hub-signature-256"); got != emptySig {
		t.Errorf("signed %q, want %q", got, emptySig)
	}
}

// standardVector is the message of the vector for the Standard scheme: key
// bytes 0 to 31.
const (
	vectorSecret = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8="
	vectorID     = "msg_01TESTVECTOR"
	vectorBody   = `{"type":"message.received","timestamp":"2026-11-30T05:30:00Z","data":{"seq":1}}`
	vectorSig    = "v1,gGAb/u06TjkWfCwRsDlkB/Fm3f8Z4tNNZJ0mHlWp14g="
)

func TestStandard(t *testing.T) {
	t.Parallel()
	at := time.Unix(1796016600, 0)
	key := [][]byte{StandardKey(vectorSecret)}
	header := http.Header{}
	wantErr(t, SignStandard(header, vectorID, []byte(vectorBody), key, at), nil)
	if got := header.Get("webhook-signature"); got != vectorSig {
		t.Fatalf("signed %q, want %q", got, vectorSig)
	}

	const other = "v1,AAAAAAAATjkWfCwRsDlkB/Fm3f8Z4tNNZJ0mHlWp14g="
	tests := []struct {
		name   string
		header string // to replace
		values []string
		keys   [][]byte
		after  time.Duration
		want   error
	}{
		{"valid", HeaderStandardSignature, []string{vectorSig}, key, 0, nil},
		{"other signature first", HeaderStandardSignature, []string{other + " " + vectorSig}, key, 0, nil},
		{"other signature last", HeaderStandardSignature, []string{vectorSig + " " + other}, key, 0, nil},
		{"other versions beside it", HeaderStandardSignature, []string{"v1a,AAAA v2 " + vectorSig}, key, 0, nil},
		{"previous secret", HeaderStandardSignature, []string{vectorSig}, append(keysOf("new"), key...), 0, nil},
		{"5 min old", HeaderStandardSignature, []string{vectorSig}, key, Tolerance, nil},
		{"older than 5 min", HeaderStandardSignature, []string{vectorSig}, key, Tolerance + time.Second, ErrStale},
		{"5 min ahead", HeaderStandardSignature, []string{vectorSig}, key, -Tolerance, nil},
		{"more than 5 min ahead", HeaderStandardSignature, []string{vectorSig}, key, -Tolerance - time.Second, ErrStale},
		{"other secret", HeaderStandardSignature, []string{vectorSig}, keysOf("other"), 0, ErrMismatch},
		{"secret not decoded", HeaderStandardSignature, []string{vectorSig}, keysOf(vectorSecret), 0, ErrMismatch},
		{"no secret", HeaderStandardSignature, []string{vectorSig}, nil, 0, ErrNoKey},
		{"other version only", HeaderStandardSignature, []string{"v2" + vectorSig[2:]}, key, 0, ErrMalformed},
		{"no version", HeaderStandardSignature, []string{vectorSig[3:]}, key, 0, ErrMalformed},
		{"unpadded", HeaderStandardSignature, []string{strings.TrimSuffix(vectorSig, "=")}, key, 0, ErrMalformed},
		{"short", HeaderStandardSignature, []string{"v1,AAAA"}, key, 0, ErrMalformed},
		{"signature twice", HeaderStandardSignature, []string{other, vectorSig}, key, 0, ErrMalformed},
		{"no signature", HeaderStandardSignature, nil, key, 0, ErrMissing},
		{"empty signature", HeaderStandardSignature, []string{""}, key, 0, ErrMissing},
		{"blank signature", HeaderStandardSignature, []string{"  "}, key, 0, ErrMalformed},
		{"no id", HeaderStandardID, nil, key, 0, ErrMissing},
		{"other id", HeaderStandardID, []string{"msg_02"}, key, 0, ErrMismatch},
		{"id with a dot", HeaderStandardID, []string{"msg.01"}, key, 0, ErrMalformed},
		{"id twice", HeaderStandardID, []string{vectorID, vectorID}, key, 0, ErrMalformed},
		{"no timestamp", HeaderStandardTimestamp, nil, key, 0, ErrMissing},
		{"other timestamp", HeaderStandardTimestamp, []string{"1796016601"}, key, 0, ErrMismatch},
		{"timestamp with a fraction", HeaderStandardTimestamp, []string{"1796016600.5"}, key, 0, ErrMalformed},
		{"timestamp twice", HeaderStandardTimestamp, []string{"1796016600", "1796016600"}, key, 0, ErrMalformed},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			h := header.Clone()
			h[tt.header] = tt.values
			wantErr(t, VerifyStandard(h, []byte(vectorBody), tt.keys, at.Add(tt.after)), tt.want)
		})
	}
}

// An id that ends inside another one's timestamp would let one signature stand
// for two messages.
func TestSignStandardRefusesIDs(t *testing.T) {
	t.Parallel()
	for _, id := range []string{"", "msg.1", "msg 1", "msg\n1", "msg\x7f", "mß"} {
		header := http.Header{}
		wantErr(t, SignStandard(header, id, nil, keysOf("k"), time.Unix(0, 0)), ErrBadID)
		if len(header) != 0 {
			t.Errorf("id %q: headers set: %v", id, header)
		}
	}
}

func TestSignRefusesEmptyKeys(t *testing.T) {
	t.Parallel()
	for _, keys := range [][][]byte{nil, {}, {nil}, {{}, nil}} {
		header := http.Header{}
		wantErr(t, SignTimestamped(header, nil, keys, time.Unix(0, 0)), ErrNoKey)
		wantErr(t, SignStandard(header, "id", nil, keys, time.Unix(0, 0)), ErrNoKey)
		if len(header) != 0 {
			t.Errorf("headers set: %v", header)
		}
	}
	wantErr(t, SignHubSHA256(http.Header{}, nil, nil), ErrNoKey)
}

func TestStandardKey(t *testing.T) {
	t.Parallel()
	tests := []struct{ name, secret, key string }{
		{"encoded", "whsec_c2VjcmV0IGtleSE=", "secret key!"},
		{"plain text", "conv-secret", "conv-secret"},
		{"base64 without the prefix is text", "c2VjcmV0IGtleSE=", "c2VjcmV0IGtleSE="},
		{"prefix, not base64", "whsec_test_secret", "whsec_test_secret"},
		{"prefix, padding lost", "whsec_c2VjcmV0IGtleSE", "whsec_c2VjcmV0IGtleSE"},
		{"prefix alone is no empty key", "whsec_", "whsec_"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			if got := string(StandardKey(tt.secret)); got != tt.key {
				t.Errorf("StandardKey = %q, want %q", got, tt.key)
			}
		})
	}
}

// The reference library accepts what we sign and we accept what it signs, for
// each form of secret. It reads the clock itself, hence time.Now.
func TestStandardAgainstReferenceLibrary(t *testing.T) {
	t.Parallel()
	secrets := []string{
		vectorSecret, "whsec_test_secret", "whsec_",
		"plain text chosen by somebody", "3q2-7wAAAABJb2FkZWRTZWNyZXRPZlRoaXJ0eVR3b0I",
	}
	bodies := []string{"", vectorBody, "{\"text\":\"Gr\\u00fc\u00dfe \U0001f44b\"}\n", "\x00\xff"}
	now := time.Now()
	for _, secret := range secrets {
		key := StandardKey(secret)
		library, err := standardwebhooks.NewWebhookRaw(key)
		wantErr(t, err, nil)
		for _, body := range bodies {
			ours := http.Header{}
			wantErr(t, SignStandard(ours, vectorID, []byte(body), [][]byte{[]byte("old"), key}, now), nil)
			if err := library.Verify([]byte(body), ours); err != nil {
				t.Errorf("secret %q, body %q: the library refuses ours: %v", secret, body, err)
			}
			if err := library.Verify([]byte(body+" "), ours); err == nil {
				t.Errorf("secret %q, body %q: the library accepts a changed body", secret, body)
			}

			signed, err := library.Sign(vectorID, now, []byte(body))
			wantErr(t, err, nil)
			theirs := http.Header{}
			theirs.Set(standardwebhooks.HeaderWebhookID, vectorID)
			theirs.Set(standardwebhooks.HeaderWebhookTimestamp, strconv.FormatInt(now.Unix(), 10))
			theirs.Set(standardwebhooks.HeaderWebhookSignature, signed)
			wantErr(t, VerifyStandard(theirs, []byte(body), [][]byte{[]byte("new"), key}, now), nil)
		}
	}
}

// schemes pairs each Sign with its Verify for the fuzz targets; every name is
// a header that the scheme reads.
var schemes = []struct {
	names  []string
	sign   func(h http.Header, body, key []byte, now time.Time) error
	verify func(http.Header, []byte, [][]byte, time.Time) error
}{
	{
		[]string{HeaderTimestamped},
		func(h http.Header, body, key []byte, now time.Time) error {
			return SignTimestamped(h, body, [][]byte{key}, now)
		},
		VerifyTimestamped,
	},
	{
		[]string{HeaderStandardID, HeaderStandardTimestamp, HeaderStandardSignature},
		func(h http.Header, body, key []byte, now time.Time) error {
			return SignStandard(h, "msg_1", body, [][]byte{key}, now)
		},
		VerifyStandard,
	},
	{
		[]string{HeaderHubSHA256},
		func(h http.Header, body, key []byte, _ time.Time) error { return SignHubSHA256(h, body, key) },
		VerifyHubSHA256,
	},
}

// What is signed verifies; with one byte of the body, the key or a header
// changed it does not. The exceptions are the case of hex digits and what
// stands in for a blank, which mean the same.
func FuzzRoundTrip(f *testing.F) {
	f.Add([]byte(vectorBody), []byte("key"), uint16(3), byte(1))
	f.Add([]byte{}, []byte{0}, uint16(0), byte(0x20))
	f.Add([]byte("\x00\xff"), []byte("whsec_"), uint16(500), byte(0xff))
	now := time.Unix(1796016600, 0)
	f.Fuzz(func(t *testing.T, body, key []byte, at uint16, flip byte) {
		if len(key) == 0 || flip == 0 {
			t.Skip("nothing to sign with, or nothing to change")
		}
		change := func(b []byte) []byte {
			out := bytes.Clone(b)
			out[int(at)%len(out)] ^= flip
			return out
		}
		for _, s := range schemes {
			header := http.Header{}
			wantErr(t, s.sign(header, body, key, now), nil)
			wantErr(t, s.verify(header, body, [][]byte{key}, now), nil)
			if len(body) > 0 && s.verify(header, change(body), [][]byte{key}, now) == nil {
				t.Fatalf("%s accepts a changed body", s.names)
			}
			// HMAC pads a short key with zeros and so takes "k" and "k\x00" as
			// the same key; of equal length, two keys differ (short of hashing
			// those beyond a block).
			if s.verify(header, body, [][]byte{change(key)}, now) == nil {
				t.Fatalf("%s accepts another key", s.names)
			}
			for _, name := range s.names {
				value := header.Get(name)
				changed := string(change([]byte(value)))
				if strings.EqualFold(changed, value) && name != HeaderStandardSignature {
					continue
				}
				h := header.Clone()
				h.Set(name, changed)
				if s.verify(h, body, [][]byte{key}, now) == nil {
					t.Fatalf("%s accepts %q for %q", name, changed, value)
				}
			}
		}
	})
}

// No header makes a parser panic or pass without the key.
func FuzzVerify(f *testing.F) {
	f.Add("t=1796016600,v1=00", "msg_1", "1796016600", []byte("{}"))
	f.Add("sha256=", "", "", []byte{})
	f.Add("v1,AAAA v1a,BBBB ,", "a.b", "-1", []byte("\xff"))
	f.Add("t=,t=,v1=,=,,", "\x00", "99999999999999999999", []byte("x"))
	f.Add(vectorSig, vectorID, "1796016600", []byte(vectorBody))
	now := time.Unix(1796016600, 0)
	f.Fuzz(func(t *testing.T, value, id, timestamp string, body []byte) {
		for _, s := range schemes {
			header := http.Header{}
			for _, name := range s.names {
				header.Set(name, value)
			}
			if len(s.names) > 1 {
				header.Set(HeaderStandardID, id)
				header.Set(HeaderStandardTimestamp, timestamp)
			}
			err := s.verify(header, body, keysOf("a key that no corpus entry was made with"), now)
			if err == nil {
				t.Fatalf("%s accepts %q", s.names, value)
			}
			wantErr(t, s.verify(header, body, nil, now), firstOf(err, ErrMismatch, ErrNoKey))
		}
	})
}

// firstOf returns replacement for err where it is what, else err's sentinel.
func firstOf(err, what, replacement error) error {
	if errors.Is(err, what) {
		return replacement
	}
	for _, sentinel := range []error{ErrMissing, ErrMalformed, ErrStale} {
		if errors.Is(err, sentinel) {
			return sentinel
		}
	}
	return err
}

// Every secret is a key, which can be given to the library as text.
func FuzzStandardKey(f *testing.F) {
	f.Add("whsec_AAEC")
	f.Add("whsec_")
	f.Add("text")
	f.Fuzz(func(t *testing.T, secret string) {
		if secret == "" {
			t.Skip("no key")
		}
		pasted := standardPrefix + base64.StdEncoding.EncodeToString(StandardKey(secret))
		if !bytes.Equal(StandardKey(pasted), StandardKey(secret)) || len(StandardKey(secret)) == 0 {
			t.Fatalf("%q and %q stand for different keys", secret, pasted)
		}
		if _, err := standardwebhooks.NewWebhook(pasted); err != nil {
			t.Fatalf("the library refuses %q: %v", pasted, err)
		}
	})
}
