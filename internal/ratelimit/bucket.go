package ratelimit

import "time"

// Bucket names one kind of budget: what is counted, for whom, and how much of
// it there is by default. The zero value is not a bucket, so that a forgotten
// field is noticed.
type Bucket uint8

// The buckets of the product. The names of the first seven, their limits and
// their subjects are those that operators of earlier installations know.
const (
	ActivityCreate  Bucket = iota + 1 // both activity-create APIs, one shared budget
	Upload                            // uploads
	Inbound                           // inbound and status webhooks
	TokenGenerate                     // client tokens: generate and refresh
	TokenCreate                       // legacy token creation, ahead of any credential
	LoginIP                           // failed logins from one address
	LoginAccount                      // failed logins to one account
	SecondFactor                      // failed TOTP and recovery codes of one account
	UnknownCaller                     // 401 and 404 for credentials that nobody issued
	APIRead                           // every other authenticated API call
	WebPage                           // admin and portal pages and their live streams
	Management                        // management API
	ChannelOutbound                   // deliveries of one channel
)

// NumBuckets is one more than the greatest Bucket: the length of an array
// indexed by Bucket.
const NumBuckets = int(ChannelOutbound) + 1

// Algorithm is the rule by which a bucket admits.
type Algorithm uint8

const (
	// FixedWindow counts in windows aligned to the Unix epoch, the same on
	// every node. Up to twice the limit may pass around a window's edge.
	FixedWindow Algorithm = iota
	// SlidingWindow adds the previous window, weighted by the part of it that
	// still overlaps a window ending now.
	SlidingWindow
	// TokenBucket refills continuously and holds at most Burst.
	TokenBucket
)

var algorithmNames = [...]string{"fixed_window", "sliding_window", "token_bucket"}

// String returns the name used in configuration.
func (a Algorithm) String() string {
	if int(a) >= len(algorithmNames) {
		return "unknown"
	}
	return algorithmNames[a]
}

// ParseAlgorithm is the inverse of Algorithm.String.
func ParseAlgorithm(name string) (Algorithm, bool) {
	for a, n := range algorithmNames {
		if n == name {
			return Algorithm(a), true
		}
	}
	return 0, false
}

// Subject is whom a bucket counts.
type Subject string

// The subjects.
const (
	SubjectTenant   Subject = "tenant"
	SubjectChannel  Subject = "channel"
	SubjectIP       Subject = "client_ip"
	SubjectAccount  Subject = "account"
	SubjectCaller   Subject = "tenant_or_user" // tenant for API keys, user for client tokens
	SubjectSession  Subject = "session"
	SubjectOperator Subject = "operator_token"
)

// Info describes a bucket.
type Info struct {
	Name    string
	Subject Subject
	// Default is the built-in limit; a zero Scale means that there is none.
	Default Rule
	// Algorithm holds for a rule that names none.
	Algorithm Algorithm
	// TenantOverride tells whether tenants.limits may name the bucket.
	TenantOverride bool
	// Exact marks the buckets whose limits are so small that in a cluster each key
	// is counted by one node, unless configured otherwise: N nodes that each admit
	// one early guess are too many for a limit of five.
	Exact bool
	// Guard marks the buckets that protect credentials: they stay on when
	// limiting is switched off.
	Guard bool
}

// buckets is the table of design and documentation; its order is that of the
// constants.
var buckets = [NumBuckets]Info{
	ActivityCreate:  builtin("activity_create", SubjectTenant, 100, time.Second, FixedWindow, tenantMay),
	Upload:          builtin("upload", SubjectTenant, 10, time.Second, FixedWindow, tenantMay),
	Inbound:         builtin("inbound", SubjectChannel, 500, time.Second, FixedWindow, tenantMay),
	TokenGenerate:   builtin("token_generate", SubjectChannel, 10, time.Minute, FixedWindow, tenantMay|exact),
	TokenCreate:     builtin("token_create", SubjectIP, 10, time.Minute, FixedWindow, exact),
	LoginIP:         builtin("login_ip", SubjectIP, 5, time.Minute, SlidingWindow, guard|exact),
	LoginAccount:    builtin("login_account", SubjectAccount, 5, time.Minute, SlidingWindow, guard|exact),
	SecondFactor:    builtin("second_factor", SubjectAccount, 5, time.Minute, SlidingWindow, guard|exact),
	UnknownCaller:   builtin("unknown_caller", SubjectIP, 30, time.Minute, SlidingWindow, 0),
	APIRead:         builtin("api_read", SubjectCaller, 300, time.Second, FixedWindow, tenantMay),
	WebPage:         builtin("web_page", SubjectSession, 300, time.Minute, FixedWindow, 0),
	Management:      builtin("management", SubjectOperator, 100, time.Second, FixedWindow, 0),
	ChannelOutbound: {Name: "channel_outbound", Subject: SubjectChannel, Algorithm: TokenBucket},
}

type trait uint8

const (
	tenantMay trait = 1 << iota
	guard
	exact
)

func builtin(name string, s Subject, limit int64, scale time.Duration, a Algorithm, t trait) Info {
	return Info{
		Name: name, Subject: s, Algorithm: a,
		Default:        Rule{Limit: limit, Scale: scale, Algorithm: a},
		TenantOverride: t&tenantMay != 0,
		Exact:          t&exact != 0,
		Guard:          t&guard != 0,
	}
}

// Buckets returns every bucket in the order of the documentation.
func Buckets() []Bucket {
	all := make([]Bucket, 0, NumBuckets-1)
	for b := Bucket(1); int(b) < NumBuckets; b++ {
		all = append(all, b)
	}
	return all
}

// ParseBucket is the inverse of Bucket.String.
func ParseBucket(name string) (Bucket, bool) {
	for b, info := range buckets {
		if b > 0 && info.Name == name {
			return Bucket(b), true
		}
	}
	return 0, false
}

// Info returns the bucket's row of the table; the zero Info if b is none.
func (b Bucket) Info() Info {
	if !b.valid() {
		return Info{}
	}
	return buckets[b]
}

// String returns the name used in configuration, answers and metrics.
func (b Bucket) String() string {
	if !b.valid() {
		return "unknown"
	}
	return buckets[b].Name
}

func (b Bucket) valid() bool { return b > 0 && int(b) < NumBuckets }
