package whatsappinfobip

import (
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"fmt"
	"net/http"

	"converger/internal/channel"
	"converger/internal/signature"
)

// Verify goes by the table in the package's documentation.
func (a *Adapter) Verify(ch *channel.Channel, r channel.Request) error {
	c, err := parseConfig(ch.Config)
	if err != nil {
		return fmt.Errorf("%w: unreadable config", channel.ErrSignature)
	}
	// All are looked at before one decides, so that the time taken does not tell which was wrong.
	var path proof
	var proofs []proof
	if c.SecretPath {
		path = check("secret in the address", r.PathSecret != "", r.PathSecret, ch.PathSecrets(r.Now)...)
		proofs = append(proofs, path)
	}
	if c.BasicUser != "" {
		proofs = append(proofs, checkBasic(r.Header, c))
	}
	if c.HeaderName != "" {
		values := r.Header.Values(c.HeaderName)
		proofs = append(proofs, check("header", len(values) > 0, single(values), c.HeaderValue, c.PreviousHeaderValue))
	}
	var wrong, missing string
	for _, p := range proofs {
		switch {
		case !p.given:
			missing = p.name
		case !p.right:
			wrong = p.name
		}
	}
	// A relay may log in elsewhere and send headers of its own; to a wrong address it has no reason to post.
	relayed := len(r.Header.Values(signature.HeaderTimestamped)) > 0
	switch {
	case relayed && (path.right || !path.given):
		return a.verifyRelay(ch, r)
	case wrong != "":
		return fmt.Errorf("%w: the %s is wrong", channel.ErrSignature, wrong)
	case len(proofs) > 0 && missing == "":
		return nil
	case len(proofs) == 0:
		missing = "proof that the channel's config should name"
	}
	if ch.RequireSignature {
		return fmt.Errorf("%w: the %s is missing", channel.ErrUnsigned, missing)
	}
	a.unsigned.Warn(ch, "the "+missing+" is missing")
	return nil
}

func (a *Adapter) verifyRelay(ch *channel.Channel, r channel.Request) error {
	err := signature.VerifyTimestamped(r.Header, r.Body, ch.Secrets(r.Now), r.Now)
	switch {
	case err == nil:
		return nil
	case errors.Is(err, signature.ErrLegacy) && !ch.RequireSignature:
		a.unsigned.Warn(ch, "signature without a timestamp")
		return nil
	}
	return fmt.Errorf("%w: %w", channel.ErrSignature, err)
}

// proof is what a request brought of one kind.
type proof struct {
	name         string // for the log
	given, right bool
}

// check compares with every one that is valid; empty ones are not.
func check(name string, given bool, got string, valid ...string) proof {
	p := proof{name: name, given: given}
	for _, want := range valid {
		if same(got, want) && want != "" {
			p.right = true
		}
	}
	return p
}

func checkBasic(h http.Header, c config) proof {
	values := h.Values("Authorization")
	// net/http's reader, for a header that was given once.
	user, password, _ := (&http.Request{Header: http.Header{"Authorization": {single(values)}}}).BasicAuth()
	p := check("password", len(values) > 0, password, c.BasicPassword, c.PreviousBasicPassword)
	p.right = same(user, c.BasicUser) && p.right
	return p
}

// single is the only value of a header. Two are none, even if one of them is right: somebody is guessing.
func single(values []string) string {
	if len(values) == 1 {
		return values[0]
	}
	return ""
}

// same compares in a time that depends on the lengths alone, and on nothing that the texts hold.
func same(a, b string) bool {
	x, y := sha256.Sum256([]byte(a)), sha256.Sum256([]byte(b))
	return subtle.ConstantTimeCompare(x[:], y[:]) == 1
}
