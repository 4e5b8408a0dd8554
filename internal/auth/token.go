package auth

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/golang-jwt/jwt/v5"
	"github.com/google/uuid"
)

const (
	// TokenTTL is the life of a client token.
	TokenTTL = 30 * time.Minute
	// tokenLeeway forgives clocks that disagree, between nodes and in exp, nbf and iat alike.
	tokenLeeway = 30 * time.Second
	// maxTokenBytes bounds what is decoded before the signature is known to be good. Ours are below 1 KB: user ids have
	// at most MaxUserID bytes.
	maxTokenBytes = 4096

	tokenType     = "converger"
	tokenIssuer   = "converger"
	tokenAudience = "converger_client"
	tokenPurpose  = "client token v1"
)

// MaxUserID is the longest user id that a token may carry, in bytes.
const MaxUserID = 255

// ScopeChannel is the one scope that a token may have: it may see its channel beyond one conversation.
const ScopeChannel = "channel"

// Failures of a client token.
var (
	// ErrToken says that the text is no token of ours: malformed, another algorithm, a wrong signature, a shape that we
	// never issue.
	ErrToken = errors.New("auth: not a valid client token")
	// ErrTokenExpired says that it was one, and its time is over.
	ErrTokenExpired = errors.New("auth: client token has expired")
)

// Claims is what a client token says.
type Claims struct {
	TenantID  uuid.UUID
	ChannelID uuid.UUID
	// ConversationID binds the token to one conversation; the zero UUID binds it to none.
	ConversationID uuid.UUID
	// UserID is the channel's name for whoever speaks; "" for an anonymous user.
	UserID string
	// Scope is "" or ScopeChannel; never with a conversation.
	Scope string

	ID        string    // of the token, set by Issue
	IssuedAt  time.Time // whole seconds
	ExpiresAt time.Time // whole seconds
}

// Tokens issues and reads client tokens. It is immutable and safe for concurrent use.
type Tokens struct {
	keyID string // of the current key
	keys  map[string][]byte
}

// NewTokens takes keys that were made for client tokens ([DeriveKey]), the retired ones of which only verify. The key that
// signs is derived from them once more, for its version.
func NewTokens(key []byte, retiredKeys ...[]byte) (*Tokens, error) {
	t := &Tokens{keys: make(map[string][]byte, 1+len(retiredKeys))}
	for i, made := range append([][]byte{key}, retiredKeys...) {
		key, err := DeriveKey(made, tokenPurpose)
		if err != nil {
			return nil, err
		}
		sum := sha256.Sum256(key)
		id := hex.EncodeToString(sum[:4]) // names a key, hides it
		if i == 0 {
			t.keyID = id
		}
		t.keys[id] = key
	}
	return t, nil
}

// wireClaims are the claims as upstream clients know them.
type wireClaims struct {
	Type           string `json:"type"`
	TenantID       string `json:"tenant_id"`
	ChannelID      string `json:"channel_id"`
	ConversationID string `json:"conversation_id,omitempty"`
	UserID         string `json:"user_id,omitempty"`
	Scope          string `json:"scope,omitempty"`
	jwt.RegisteredClaims
}

// Issue signs a token that begins now and ends TokenTTL later, and returns it with its claims completed.
func (t *Tokens) Issue(now time.Time, c Claims) (string, Claims, error) {
	c.ID = rand.Text()
	c.IssuedAt = now.Truncate(time.Second)
	c.ExpiresAt = c.IssuedAt.Add(TokenTTL)
	w := wireClaims{
		Type: tokenType, TenantID: c.TenantID.String(), ChannelID: c.ChannelID.String(), UserID: c.UserID, Scope: c.Scope,
		RegisteredClaims: jwt.RegisteredClaims{
			ID: c.ID, Issuer: tokenIssuer, Audience: jwt.ClaimStrings{tokenAudience}, Subject: subject(c.ChannelID),
			IssuedAt: jwt.NewNumericDate(c.IssuedAt), NotBefore: jwt.NewNumericDate(c.IssuedAt), ExpiresAt: jwt.NewNumericDate(c.ExpiresAt),
		},
	}
	if c.ConversationID != uuid.Nil {
		w.ConversationID = c.ConversationID.String()
	}
	token := jwt.NewWithClaims(jwt.SigningMethodHS256, w)
	token.Header["kid"] = t.keyID
	text, err := token.SignedString(t.keys[t.keyID])
	if err != nil {
		return "", Claims{}, fmt.Errorf("auth: sign token: %w", err)
	}
	return text, c, nil
}

// Parse reads a token. The error is ErrToken or ErrTokenExpired.
func (t *Tokens) Parse(now time.Time, text string) (Claims, error) {
	if len(text) > maxTokenBytes {
		return Claims{}, ErrToken
	}
	parser := jwt.NewParser(
		jwt.WithValidMethods([]string{jwt.SigningMethodHS256.Alg()}),
		jwt.WithStrictDecoding(), jwt.WithLeeway(tokenLeeway), jwt.WithTimeFunc(func() time.Time { return now }),
		jwt.WithIssuer(tokenIssuer), jwt.WithAudience(tokenAudience), jwt.WithExpirationRequired(), jwt.WithNotBeforeRequired(), jwt.WithIssuedAt(),
	)
	var w wireClaims
	_, err := parser.ParseWithClaims(text, &w, t.key)
	switch {
	case errors.Is(err, jwt.ErrTokenExpired) && !errors.Is(err, jwt.ErrTokenNotValidYet) && !errors.Is(err, jwt.ErrTokenUsedBeforeIssued):
		// The signature was good: validation of claims comes after it.
		return Claims{}, ErrTokenExpired
	case err != nil:
		return Claims{}, ErrToken
	}
	return w.claims()
}

// key finds the key that the header names, among ours; the header chooses nothing else.
func (t *Tokens) key(token *jwt.Token) (any, error) {
	if _, ok := token.Header["crit"]; ok {
		return nil, ErrToken // an extension that must be understood (RFC 7515, 4.1.11), and none is
	}
	id, _ := token.Header["kid"].(string)
	key, ok := t.keys[id]
	if !ok {
		return nil, ErrToken
	}
	return key, nil
}

// claims checks the shape: a good signature on a text of another shape is still no client token.
func (w *wireClaims) claims() (Claims, error) {
	c := Claims{UserID: w.UserID, Scope: w.Scope, ID: w.ID}
	var ok1, ok2 bool
	c.TenantID, ok1 = parseUUID(w.TenantID)
	c.ChannelID, ok2 = parseUUID(w.ChannelID)
	if !ok1 || !ok2 || w.Type != tokenType || w.ID == "" || w.IssuedAt == nil || w.Subject != subject(c.ChannelID) || len(w.UserID) > MaxUserID {
		return Claims{}, ErrToken
	}
	if w.ConversationID != "" {
		if c.ConversationID, ok1 = parseUUID(w.ConversationID); !ok1 {
			return Claims{}, ErrToken
		}
	}
	if w.Scope != "" && (w.Scope != ScopeChannel || w.ConversationID != "") {
		return Claims{}, ErrToken
	}
	c.IssuedAt, c.ExpiresAt = w.IssuedAt.Time, w.ExpiresAt.Time
	return c, nil
}

// LooksLikeToken tells whether text has the form of a JWT, three parts with dots; channel secrets have no dots. It says
// nothing about its validity.
func LooksLikeToken(text string) bool { return strings.Count(text, ".") == 2 }

func subject(channel uuid.UUID) string { return "converger_" + channel.String() }

func parseUUID(text string) (uuid.UUID, bool) {
	if len(text) != 36 {
		return uuid.UUID{}, false
	}
	id, err := uuid.Parse(text)
	return id, err == nil && id != uuid.Nil
}
