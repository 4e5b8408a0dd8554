package http

import (
	"context"
	"encoding/hex"
	"net/netip"
	"strings"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/delivery"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/overview"
	"converger/internal/tenants"
)

// unprovenMark ends the text of the budget that unsigned callers of a channel share.
const unprovenMark = "/unproven"

// subject names whom the bucket counts for this caller, as operators are shown it and look it up; key is that of
// [server.budget].
func (s *server) subject(c *call, b ratelimit.Bucket, key ratelimit.Key) ratelimit.Name {
	switch b.Info().Subject {
	case ratelimit.SubjectIP:
		return ratelimit.Name{Text: ratelimit.AddressText(c.ip)}
	case ratelimit.SubjectSession:
		return ratelimit.Name{Text: hex.EncodeToString(c.digest[:8])}
	case ratelimit.SubjectOperator:
		return ratelimit.Name{Text: c.Operator.ID.String()}
	case ratelimit.SubjectChannel:
		n := ratelimit.Name{Tenant: c.Channel.TenantID, Text: c.Channel.ID.String()}
		if b == ratelimit.Inbound && key == c.Channel.Derived.(*channelLimits).unproven {
			n.Text += unprovenMark
		}
		return n
	case ratelimit.SubjectCaller:
		if c.Token != nil {
			return ratelimit.Name{Tenant: c.Tenant.ID, Text: c.Channel.ID.String() + "/" + tokenUser(c.Token)}
		}
	}
	return ratelimit.Name{Tenant: c.Tenant.ID, Text: c.Tenant.ID.String()}
}

// NewPolicyOf makes the resolver that [overview.Config] asks for: as requests and deliveries are limited.
func NewPolicyOf(l *ratelimit.Limiter, d *tenants.Directory) func(overview.Budget) *ratelimit.Policy {
	return func(b overview.Budget) *ratelimit.Policy {
		if b.Bucket == ratelimit.ChannelOutbound {
			ch, ok := d.Channel(b.Channel)
			if !ok {
				return nil
			}
			return l.Policy(b.Bucket, nil, delivery.PacePolicy(ch.RateLimit))
		}
		t, _ := d.Tenant(b.Name.Tenant)
		return l.Policy(b.Bucket, overridesOf(t), nil)
	}
}

// counted say whom a bucket counts.
var counted = map[ratelimit.Subject]string{
	ratelimit.SubjectTenant: "tenants", ratelimit.SubjectChannel: "channels", ratelimit.SubjectIP: "addresses of clients", ratelimit.SubjectAccount: "accounts",
	ratelimit.SubjectCaller: "tenants, and users of client tokens", ratelimit.SubjectSession: "sessions", ratelimit.SubjectOperator: "operator tokens",
}

// subjectForms say how a subject is written, for whoever wrote it another way.
var subjectForms = map[ratelimit.Subject]string{
	ratelimit.SubjectTenant:  "the id or the name of a tenant",
	ratelimit.SubjectChannel: "the id of a channel",
	ratelimit.SubjectIP:      "one IP address, such as 203.0.113.7 or 2001:db8::1; of IPv6 the /64 is counted",
	ratelimit.SubjectAccount: `"admin EMAIL", or the id or name of a tenant and the email address: "Acme jane@acme.example"; ` +
		`what counts for a known device, as this list shows it: "admin EMAIL on known device 1a2b3c4d"`,
	ratelimit.SubjectCaller:   "the id or the name of a tenant, or of a client token CHANNEL_ID/user:USER_ID or CHANNEL_ID/conversation:ID",
	ratelimit.SubjectSession:  "the first 16 digits of the session's digest, as this list shows them, or all 64",
	ratelimit.SubjectOperator: "the id of an operator token",
}

// findBudget finds the budget of a subject that an operator named, by what the bucket counts. Whatever the overview shows as a
// subject is understood. Errors are problems: 400 for what is no such subject, 404 for one that there is not.
func (s *server) findBudget(ctx context.Context, bucket, text string) (overview.Budget, error) {
	b, err := bucketNamed(bucket)
	if err != nil {
		return overview.Budget{}, err
	}
	text = strings.TrimSpace(text)
	if text == "" {
		return overview.Budget{}, newProblem(codeInvalidParameter, "Invalid subject: %s counts %s; it must be %s.", b,
			counted[b.Info().Subject], subjectForms[b.Info().Subject])
	}
	out := overview.Budget{Bucket: b, Name: ratelimit.Name{Text: text}}
	if digits, ok := strings.CutPrefix(text, overview.KeyPrefix); ok && out.Key.UnmarshalText([]byte(digits)) == nil && out.Key.Valid() {
		if k, n, ok := s.Limiter.Find(b, text); ok {
			out.Key, out.Name = k, n
		}
		return out, nil
	}
	invalid := newProblem(codeInvalidParameter, "Invalid subject: it must be %s.", subjectForms[b.Info().Subject])
	switch b.Info().Subject {
	case ratelimit.SubjectIP:
		addr, ok := parseClient(text)
		if !ok {
			return out, invalid
		}
		out.Key, out.Name.Text = s.Hasher.IP(b, addr), ratelimit.AddressText(addr)
		return out, nil
	case ratelimit.SubjectChannel:
		return s.channelBudget(out, text, invalid)
	case ratelimit.SubjectTenant:
		return s.tenantBudget(out, text)
	case ratelimit.SubjectCaller:
		if id, user, ok := strings.Cut(text, "/"); ok && (strings.HasPrefix(user, "user:") || strings.HasPrefix(user, "conversation:")) {
			ch, err := s.channelNamed(id, invalid)
			if err != nil {
				return out, err
			}
			out.Key, out.Name.Tenant = s.Hasher.User(b, ch.TenantID, ch.ID, user), ch.TenantID
			out.Name.Text = ch.ID.String() + "/" + user
			return out, nil
		}
		return s.tenantBudget(out, text)
	case ratelimit.SubjectOperator:
		id, err := parseID(text)
		if err != nil {
			return out, invalid
		}
		out.Key, out.Name.Text = s.Hasher.Operator(b, id), id.String()
		return out, nil
	case ratelimit.SubjectAccount:
		if found, ok := s.Overview.Find(ctx, b, text); ok {
			return found, nil
		}
		who, email, ok := cutLast(text)
		switch {
		case ok && strings.Contains(email, "@"):
		case strings.Contains(text, auth.OnKnownDevice): // its id is in its cookie and nowhere else
			return out, newProblem(codeNotFound, "No attempts from this device have been refused lately; its lock ends by itself.")
		default:
			return out, invalid
		}
		if who == "admin" {
			out.Name.Text = s.SignIn.AccountName(false, "", email)
		} else {
			t, err := s.knownTenant(strings.TrimPrefix(who, "tenant "))
			if err != nil {
				if t, err = s.knownTenant(who); err != nil { // its name begins so
					return out, err
				}
			}
			out.Name.Text = s.SignIn.AccountName(true, t.Name, email)
		}
		out.Key = s.Hasher.Account(b, out.Name.Text)
		return out, nil
	case ratelimit.SubjectSession:
		var digest [32]byte
		if n, err := hex.Decode(digest[:], []byte(text[:min(len(text), 64)])); err == nil && n == len(digest) && len(text) == 64 {
			out.Key, out.Name.Text = s.Hasher.Session(b, digest), text[:16]
			return out, nil
		}
		if found, ok := s.Overview.Find(ctx, b, text); ok {
			return found, nil
		}
		if _, err := hex.DecodeString(text); err != nil || len(text) != 16 {
			return out, invalid
		}
		return out, newProblem(codeNotFound, "No session with a digest that begins so has been seen lately; with all 64 digits it is found in any case.")
	}
	return out, invalid
}

// cutLast cuts at the last space.
func cutLast(text string) (before, after string, ok bool) {
	i := strings.LastIndexByte(text, ' ')
	if i < 0 {
		return "", text, false
	}
	return strings.TrimSpace(text[:i]), text[i+1:], true
}

// bucketNamed is a bucket by its name in a query.
func bucketNamed(text string) (ratelimit.Bucket, error) {
	b, ok := ratelimit.ParseBucket(text)
	if !ok {
		return 0, newProblem(codeInvalidParameter, "Invalid bucket: it must be one of %s.", bucketNames())
	}
	return b, nil
}

func bucketNames() string {
	names := make([]string, 0, ratelimit.NumBuckets)
	for _, b := range ratelimit.Buckets() {
		names = append(names, b.String())
	}
	return strings.Join(names, ", ")
}

// parseClient reads an address as logs and lists have it: alone, with a port, in brackets, or as the network that is
// counted. Zones and ports are dropped, since they are not counted.
func parseClient(text string) (netip.Addr, bool) {
	if p, err := netip.ParseAddrPort(text); err == nil {
		return p.Addr(), true
	}
	if p, err := netip.ParsePrefix(text); err == nil {
		return p.Addr(), p.IsSingleIP() || p.Addr().Is6() && p.Bits() == 64
	}
	if inner, ok := strings.CutPrefix(text, "["); ok {
		text, ok = strings.CutSuffix(inner, "]")
		if !ok {
			return netip.Addr{}, false
		}
	}
	addr, err := netip.ParseAddr(text)
	return addr, err == nil
}

func (s *server) knownTenant(text string) (*tenants.TenantEntry, error) {
	t, ok := s.Directory.TenantNamed(text)
	if id, err := parseID(text); err == nil {
		t, ok = s.Directory.Tenant(id)
	}
	if !ok {
		return nil, newProblem(codeNotFound, "There is no tenant of this id or name: %s.", truncate(text, 100))
	}
	return t, nil
}

func (s *server) tenantBudget(out overview.Budget, text string) (overview.Budget, error) {
	t, err := s.knownTenant(text)
	if err != nil {
		return out, err
	}
	out.Key, out.Name = s.Hasher.Tenant(out.Bucket, t.ID), ratelimit.Name{Tenant: t.ID, Text: t.ID.String()}
	return out, nil
}

func (s *server) channelNamed(text string, invalid error) (*tenants.ChannelEntry, error) {
	id, err := parseID(text)
	if err != nil {
		return nil, invalid
	}
	ch, ok := s.Directory.Channel(id)
	if !ok {
		return nil, newProblem(codeNotFound, "There is no channel %s.", id)
	}
	return ch, nil
}

func (s *server) channelBudget(out overview.Budget, text string, invalid error) (overview.Budget, error) {
	id, unproven := strings.CutSuffix(text, unprovenMark)
	if unproven && out.Bucket != ratelimit.Inbound {
		return out, invalid
	}
	ch, err := s.channelNamed(id, invalid)
	if err != nil {
		return out, err
	}
	out.Channel, out.Name = ch.ID, ratelimit.Name{Tenant: ch.TenantID, Text: ch.ID.String()}
	out.Key = s.Hasher.Channel(out.Bucket, ch.TenantID, ch.ID)
	if unproven {
		out.Key = s.Hasher.ChannelUnproven(out.Bucket, ch.TenantID, ch.ID)
		out.Name.Text += unprovenMark
	}
	return out, nil
}

// tenantName is a tenant's name for people, "" if it is gone.
func (s *server) tenantName(id uuid.UUID) string {
	if t, ok := s.Directory.Tenant(id); ok {
		return t.Name
	}
	return ""
}
