package auth

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"hash/crc32"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/go-cmp/cmp"
	"github.com/google/uuid"

	"converger/internal/secrets"
	"converger/internal/tenants"
)

var (
	now    = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)
	secret = []byte("a secret of at least thirty-two bytes")
	older  = []byte("the secret that was used until lately")

	tenantID  = uuid.MustParse("01930000-0000-7000-8000-000000000001")
	channelID = uuid.MustParse("01930000-0000-7000-8000-000000000002")
)

func newTokens(t testing.TB, current []byte, retired ...[]byte) *Tokens {
	t.Helper()
	tokens, err := NewTokens(current, retired...)
	if err != nil {
		t.Fatal(err)
	}
	return tokens
}

func issue(t testing.TB, tokens *Tokens, at time.Time, c Claims) (string, Claims) {
	t.Helper()
	text, full, err := tokens.Issue(at, c)
	if err != nil {
		t.Fatal(err)
	}
	return text, full
}

func TestTokenRoundTrip(t *testing.T) {
	t.Parallel()
	tokens := newTokens(t, secret)
	for name, c := range map[string]Claims{
		"anonymous": {TenantID: tenantID, ChannelID: channelID},
		"user":      {TenantID: tenantID, ChannelID: channelID, UserID: "Ada 😊"},
		"bound":     {TenantID: tenantID, ChannelID: channelID, UserID: "u", ConversationID: uuid.MustParse("01930000-0000-7000-8000-000000000003")},
		"channel":   {TenantID: tenantID, ChannelID: channelID, UserID: "u", Scope: ScopeChannel},
	} {
		text, want := issue(t, tokens, now, c)
		got, err := tokens.Parse(now, text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s:\n%s", name, diff)
		}
		if !LooksLikeToken(text) || len(text) > maxTokenBytes {
			t.Errorf("%s: %s", name, text)
		}
	}
}

// The limits of time, with what clocks may differ by (TK-03).
func TestTokenTime(t *testing.T) {
	t.Parallel()
	tokens := newTokens(t, secret)
	text, c := issue(t, tokens, now, Claims{TenantID: tenantID, ChannelID: channelID})
	for name, tt := range map[string]struct {
		at   time.Time
		want error
	}{
		"at once":                     {now, nil},
		"issuer's clock 30 s ahead":   {now.Add(-30 * time.Second), nil},
		"issuer's clock a minute off": {now.Add(-time.Minute), ErrToken},
		"issued ten minutes ahead":    {now.Add(-10 * time.Minute), ErrToken},
		"last second":                 {c.ExpiresAt.Add(-time.Second), nil},
		"ended 10 s ago":              {c.ExpiresAt.Add(10 * time.Second), nil},
		"ended a minute ago":          {c.ExpiresAt.Add(time.Minute), ErrTokenExpired},
		"ended five minutes ago":      {c.ExpiresAt.Add(5 * time.Minute), ErrTokenExpired},
	} {
		if _, err := tokens.Parse(tt.at, text); !errors.Is(err, tt.want) {
			t.Errorf("%s: %v, want %v", name, err, tt.want)
		}
	}
}

func TestTokenRotation(t *testing.T) {
	t.Parallel()
	before, during, after := newTokens(t, older), newTokens(t, secret, older), newTokens(t, secret)
	text, _ := issue(t, before, now, Claims{TenantID: tenantID, ChannelID: channelID})
	if _, err := during.Parse(now, text); err != nil {
		t.Errorf("a token of the retired secret: %v", err)
	}
	if _, err := after.Parse(now, text); !errors.Is(err, ErrToken) {
		t.Errorf("a token of a secret that is gone: %v", err)
	}
	fresh, _ := issue(t, during, now, Claims{TenantID: tenantID, ChannelID: channelID})
	if _, err := after.Parse(now, fresh); err != nil {
		t.Errorf("issued with the current secret: %v", err)
	}
	if _, err := NewTokens([]byte("short")); !errors.Is(err, ErrWeakSecret) {
		t.Errorf("weak secret: %v", err)
	}
	if a, b := must(DeriveKey(secret, "a")), must(DeriveKey(secret, "b")); string(a) == string(b) || len(a) != 32 {
		t.Error("keys of two purposes must differ")
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// forge signs claims and header as told, with our own key unless another is given.
func forge(t testing.TB, tokens *Tokens, method jwt.SigningMethod, key any, header, claims map[string]any) string {
	t.Helper()
	good, _ := issue(t, tokens, now, Claims{TenantID: tenantID, ChannelID: channelID, UserID: "u"})
	payload, err := base64.RawURLEncoding.DecodeString(strings.Split(good, ".")[1])
	if err != nil {
		t.Fatal(err)
	}
	all := jwt.MapClaims{}
	if err := json.Unmarshal(payload, &all); err != nil {
		t.Fatal(err)
	}
	for name, v := range claims {
		if all[name] = v; v == nil {
			delete(all, name)
		}
	}
	token := jwt.NewWithClaims(method, all)
	token.Header["kid"] = tokens.keyID
	for name, v := range header {
		if token.Header[name] = v; v == nil {
			delete(token.Header, name)
		}
	}
	if key == nil {
		key = tokens.keys[tokens.keyID]
	}
	text, err := token.SignedString(key)
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// The token's header chooses nothing (TK-01), and a good signature on another shape is no client token.
func TestForgedTokens(t *testing.T) {
	t.Parallel()
	tokens := newTokens(t, secret)
	ec := must(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	hs, none := jwt.SigningMethodHS256, jwt.SigningMethodNone
	unsigned := jwt.UnsafeAllowNoneSignatureType
	if _, err := tokens.Parse(now, forge(t, tokens, hs, nil, nil, nil)); err != nil {
		t.Fatalf("the forger's own token is not good: %v", err)
	}
	good, _ := issue(t, tokens, now, Claims{TenantID: tenantID, ChannelID: channelID})
	parts := strings.Split(good, ".")

	for name, text := range map[string]string{
		"none":             forge(t, tokens, none, unsigned, nil, nil),
		"None":             forge(t, tokens, none, unsigned, map[string]any{"alg": "None"}, nil),
		"nOnE":             forge(t, tokens, none, unsigned, map[string]any{"alg": "nOnE"}, nil),
		"no alg":           forge(t, tokens, hs, nil, map[string]any{"alg": nil}, nil),
		"alg of no string": forge(t, tokens, hs, nil, map[string]any{"alg": 7}, nil),
		"HS512":            forge(t, tokens, jwt.SigningMethodHS512, nil, nil, nil),
		"ES256, own key":   forge(t, tokens, jwt.SigningMethodES256, ec, nil, nil),
		"embedded jwk":     forge(t, tokens, hs, []byte("attacker"), map[string]any{"jwk": map[string]any{"kty": "oct", "k": "YXR0YWNrZXI"}}, nil),
		"jku":              forge(t, tokens, hs, []byte("attacker"), map[string]any{"jku": "https://evil.example/keys"}, nil),
		"crit":             forge(t, tokens, hs, nil, map[string]any{"crit": []string{"exp"}}, nil),
		"no kid":           forge(t, tokens, hs, nil, map[string]any{"kid": nil}, nil),
		"foreign kid":      forge(t, tokens, hs, nil, map[string]any{"kid": "../../dev/null"}, nil),
		"the raw secret":   forge(t, tokens, hs, secret, nil, nil),
		"empty key":        forge(t, tokens, hs, []byte{}, nil, nil),
		"no signature":     parts[0] + "." + parts[1] + ".",
		"two parts":        parts[0] + "." + parts[1],
		"padding":          good + "=",
		"empty":            "",
		"too long":         good + strings.Repeat("x", maxTokenBytes),

		"another type":      forge(t, tokens, hs, nil, nil, map[string]any{"type": "channel"}),
		"no type":           forge(t, tokens, hs, nil, nil, map[string]any{"type": nil}),
		"no exp":            forge(t, tokens, hs, nil, nil, map[string]any{"exp": nil}),
		"no iat":            forge(t, tokens, hs, nil, nil, map[string]any{"iat": nil}),
		"no nbf":            forge(t, tokens, hs, nil, nil, map[string]any{"nbf": nil}),
		"no jti":            forge(t, tokens, hs, nil, nil, map[string]any{"jti": nil}),
		"another issuer":    forge(t, tokens, hs, nil, nil, map[string]any{"iss": "Joken"}),
		"another audience":  forge(t, tokens, hs, nil, nil, map[string]any{"aud": "admin"}),
		"another subject":   forge(t, tokens, hs, nil, nil, map[string]any{"sub": "converger_" + tenantID.String()}),
		"tenant of no UUID": forge(t, tokens, hs, nil, nil, map[string]any{"tenant_id": "1"}),
		"no tenant":         forge(t, tokens, hs, nil, nil, map[string]any{"tenant_id": nil}),
		"nil tenant":        forge(t, tokens, hs, nil, nil, map[string]any{"tenant_id": uuid.Nil.String()}),
		"tenant by number":  forge(t, tokens, hs, nil, nil, map[string]any{"tenant_id": 7}),
		"no conversation":   forge(t, tokens, hs, nil, nil, map[string]any{"conversation_id": "mine"}),
		"another scope":     forge(t, tokens, hs, nil, nil, map[string]any{"scope": "tenant"}),
		"scope and bound":   forge(t, tokens, hs, nil, nil, map[string]any{"scope": "channel", "conversation_id": channelID.String()}),
		"long user":         forge(t, tokens, hs, nil, nil, map[string]any{"user_id": strings.Repeat("x", MaxUserID+1)}),
		"exp as text":       forge(t, tokens, hs, nil, nil, map[string]any{"exp": "never"}),
	} {
		if c, err := tokens.Parse(now, text); !errors.Is(err, ErrToken) {
			t.Errorf("%s: %+v, %v", name, c, err)
		}
	}
	// Every single changed character is noticed.
	for i := range good {
		b := []byte(good)
		if b[i] ^= 1; b[i] == good[i] || i == len(parts[0]) || i == len(parts[0])+1+len(parts[1]) {
			continue
		}
		if _, err := tokens.Parse(now, string(b)); err == nil {
			t.Fatalf("a token with character %d changed is good", i)
		}
	}
}

func FuzzTokenParse(f *testing.F) {
	tokens := newTokens(f, secret)
	good, _ := issue(f, tokens, now, Claims{TenantID: tenantID, ChannelID: channelID, UserID: "u"})
	for _, s := range []string{"", ".", "..", "a.b.c", good, strings.ToUpper(good)} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		c, err := tokens.Parse(now, text)
		switch {
		case err == nil && !signedByUs(tokens, text):
			t.Errorf("%q passes as %+v", text, c)
		case err != nil && !errors.Is(err, ErrToken) && !errors.Is(err, ErrTokenExpired):
			t.Errorf("%q: %v", text, err)
		}
	})
}

// signedByUs checks a signature the long way.
func signedByUs(tokens *Tokens, text string) bool {
	dot := strings.LastIndexByte(text, '.')
	mac := hmac.New(sha256.New, tokens.keys[tokens.keyID])
	mac.Write([]byte(text[:dot]))
	return text[dot+1:] == base64.RawURLEncoding.EncodeToString(mac.Sum(nil))
}

// memory is a directory with one of everything.
type memory struct {
	key      *tenants.KeyEntry
	tenant   *tenants.TenantEntry
	channel  *tenants.ChannelEntry
	operator *tenants.OperatorEntry
	keyHash  [32]byte
}

func (m *memory) Key(h [32]byte) (*tenants.KeyEntry, bool) { return m.key, h == m.keyHash }
func (m *memory) Tenant(id tenants.ID) (*tenants.TenantEntry, bool) {
	return m.tenant, id == m.tenant.ID
}
func (m *memory) Channel(id uuid.UUID) (*tenants.ChannelEntry, bool) {
	return m.channel, id == m.channel.ID
}
func (m *memory) ChannelBySecret(h [32]byte) (*tenants.ChannelEntry, bool) {
	return m.channel, h == m.channel.SecretHash
}
func (m *memory) OperatorToken(h [32]byte) (*tenants.OperatorEntry, bool) {
	return m.operator, h == m.keyHash
}

// apiKey is a key of the right form, but for its checksum.
const apiKey = "cvg_live_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8"

// withChecksum completes a key: the CRC-32 of it in six base62 digits.
func withChecksum(key string) string {
	const digits = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	sum := crc32.ChecksumIEEE([]byte(key))
	var tail [6]byte
	for i := range tail {
		tail[5-i] = digits[sum%62]
		sum /= 62
	}
	return key + string(tail[:])
}

func newMemory() *memory {
	tenant := &tenants.TenantEntry{ID: tenantID, Status: tenants.StatusActive}
	return &memory{
		tenant: tenant, key: &tenants.KeyEntry{TenantID: tenantID, Tenant: tenant, Scopes: tenants.ScopeRead},
		channel:  &tenants.ChannelEntry{ID: channelID, TenantID: tenantID, Status: "active", SecretHash: secrets.Hash("the channel's secret")},
		operator: &tenants.OperatorEntry{Scopes: tenants.ScopeWrite},
	}
}

func TestChannelCredentials(t *testing.T) {
	t.Parallel()
	tokens := newTokens(t, secret)
	token, _ := issue(t, tokens, now, Claims{TenantID: tenantID, ChannelID: channelID})
	foreign, _ := issue(t, tokens, now, Claims{TenantID: channelID, ChannelID: channelID})
	for name, tt := range map[string]struct {
		change             func(*memory)
		secret, token, ids error
	}{
		"all good":        {func(*memory) {}, nil, nil, nil},
		"suspended":       {func(m *memory) { m.tenant.Status = tenants.StatusSuspended }, ErrTenantSuspended, ErrTenantSuspended, ErrTenantSuspended},
		"inactive":        {func(m *memory) { m.channel.Status = "inactive" }, ErrChannelInactive, ErrChannelInactive, ErrChannelInactive},
		"unknown status":  {func(m *memory) { m.channel.Status = "" }, ErrChannelInactive, ErrChannelInactive, ErrChannelInactive},
		"channel is gone": {func(m *memory) { m.channel = &tenants.ChannelEntry{} }, ErrUnknown, ErrChannelGone, ErrUnknown},
		"moved tenant":    {func(m *memory) { m.channel.TenantID = channelID }, ErrUnknown, ErrChannelGone, ErrUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMemory()
			tt.change(m)
			a := New(m, tokens)
			if _, err := a.ChannelSecret("the channel's secret"); !errors.Is(err, tt.secret) {
				t.Errorf("secret: %v, want %v", err, tt.secret)
			}
			if _, err := a.ClientToken(now, token); !errors.Is(err, tt.token) {
				t.Errorf("token: %v, want %v", err, tt.token)
			}
			if _, err := a.Channel(channelID); !errors.Is(err, tt.ids) {
				t.Errorf("id: %v, want %v", err, tt.ids)
			}
			if _, err := a.ClientToken(now, foreign); err == nil {
				t.Error("a token whose tenant is not the channel's passes")
			}
			if _, err := a.ChannelSecret(""); !errors.Is(err, ErrUnknown) {
				t.Errorf("empty secret: %v", err)
			}
			if _, err := a.ClientToken(now.Add(time.Hour), token); !errors.Is(err, ErrExpired) {
				t.Errorf("expired: %v", err)
			}
		})
	}
}

func TestKeys(t *testing.T) {
	t.Parallel()
	for name, tt := range map[string]struct {
		change func(*memory)
		want   error
	}{
		"good":                {func(*memory) {}, nil},
		"expired":             {func(m *memory) { m.key.ExpiresAt, m.operator.ExpiresAt = now, now }, ErrExpired},
		"revoked":             {func(m *memory) { m.key.RevokedAt, m.operator.RevokedAt = now, now }, ErrRevoked},
		"revoked and expired": {func(m *memory) { m.key.RevokedAt, m.key.ExpiresAt, m.operator.RevokedAt = now, now, now }, ErrRevoked},
		"revoked in an hour":  {func(m *memory) { m.key.RevokedAt, m.operator.RevokedAt = now.Add(time.Hour), now.Add(time.Hour) }, nil},
		"unknown":             {func(m *memory) { m.keyHash = [32]byte{1} }, ErrUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			m := newMemory()
			key, operator := withChecksum(apiKey), withChecksum(strings.Replace(apiKey, "cvg_live_", "cvg_op_", 1))
			a := New(m, nil)
			m.keyHash = must(tenants.ParseKey(key))
			tt.change(m)
			if c, err := a.APIKey(now, key); !errors.Is(err, tt.want) || err == nil && c.Scopes() != tenants.ScopeRead {
				t.Errorf("key: %v, want %v", err, tt.want)
			}
			if m.keyHash != [32]byte{1} {
				m.keyHash = must(tenants.ParseOperatorToken(operator))
			}
			if c, err := a.Operator(now, operator); !errors.Is(err, tt.want) || err == nil && c.Scopes() != tenants.ScopeWrite {
				t.Errorf("operator token: %v, want %v", err, tt.want)
			}
			// Neither is taken for the other.
			if _, err := a.APIKey(now, operator); !errors.Is(err, ErrMalformed) {
				t.Errorf("operator token as key: %v", err)
			}
			if _, err := a.Operator(now, key); !errors.Is(err, ErrMalformed) {
				t.Errorf("key as operator token: %v", err)
			}
		})
	}
	m := newMemory()
	m.tenant.Status = tenants.StatusSuspended
	key := withChecksum(apiKey)
	m.keyHash = must(tenants.ParseKey(key))
	if _, err := New(m, nil).APIKey(now, key); !errors.Is(err, ErrTenantSuspended) {
		t.Errorf("suspended: %v", err)
	}
}

type touched struct{ keys, tokens []map[uuid.UUID]time.Time }

func (s *touched) TouchUsed(_ context.Context, keys, tokens map[uuid.UUID]time.Time) error {
	s.keys, s.tokens = append(s.keys, keys), append(s.tokens, tokens)
	return nil
}

func TestUsage(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		store := &touched{}
		u := NewUsage(store, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- u.Run(ctx) }()
		for i := range 1000 {
			u.Key(tenantID, now.Add(time.Duration(i)*time.Second))
		}
		time.Sleep(usageEvery + time.Second) // in the bubble's time
		u.OperatorToken(channelID, now)
		stop()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		want := &touched{
			keys:   []map[uuid.UUID]time.Time{{tenantID: now.Add(999 * time.Second)}, {}},
			tokens: []map[uuid.UUID]time.Time{{}, {channelID: now}},
		}
		if diff := cmp.Diff(want, store, cmp.AllowUnexported(touched{})); diff != "" {
			t.Errorf("written:\n%s", diff)
		}
	})
}
