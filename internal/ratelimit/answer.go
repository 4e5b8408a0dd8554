package ratelimit

import (
	"strconv"
	"time"
)

// RetryAfterMs is how many milliseconds a refused caller is told to wait: at most
// one window. After a change of policy more than that may be in debt.
func (d Decision) RetryAfterMs() uint32 {
	if d.Policy != nil {
		return min(d.WaitMs, d.Policy.WindowMs())
	}
	return d.WaitMs
}

// RetryAfterSeconds is the value of Retry-After for a refusal: rounded up, at
// least 1, at most one window (in whole seconds, rounded up).
func (d Decision) RetryAfterSeconds() int64 {
	return max(ceilSeconds(d.RetryAfterMs()), 1)
}

func ceilSeconds(ms uint32) int64 { return max((int64(ms)+999)/1000, 1) }

// PolicyHeader is the value of RateLimit-Policy (draft-ietf-httpapi-ratelimit-
// headers-11), such as `"activity_create";q=100;w=1`. A token bucket publishes
// its burst as q and the time in which it refills as w.
func (p *Policy) PolicyHeader() string { return p.header }

// AppendHeader appends the value of RateLimit, such as
// `"activity_create";r=99;t=1`, t being a number of seconds rounded up.
func (d Decision) AppendHeader(b []byte) []byte {
	b = append(b, d.Policy.prefix...)
	b = append(b, ";r="...)
	b = strconv.AppendUint(b, uint64(d.Remaining), 10)
	b = append(b, ";t="...)
	if !d.Allowed {
		return strconv.AppendInt(b, d.RetryAfterSeconds(), 10)
	}
	return strconv.AppendInt(b, int64(d.WaitMs+999)/1000, 10)
}

// nouns name what a bucket counts, for the sentence of a refusal.
var nouns = [NumBuckets]string{
	ActivityCreate: "activities", Upload: "uploads", Inbound: "webhook requests",
	TokenGenerate: "client tokens", TokenCreate: "token requests",
	LoginIP: "failed logins", LoginAccount: "failed logins", SecondFactor: "failed codes",
	UnknownCaller: "requests with unknown credentials", APIRead: "API requests",
	WebPage: "page requests", Management: "management requests", ChannelOutbound: "deliveries",
}

// Noun names what the bucket counts, in the plural: "activities".
func (b Bucket) Noun() string {
	if !b.valid() {
		return ""
	}
	return nouns[b]
}

// AppendDetail appends the sentence that explains a refusal to a person:
// what was exceeded and when to come back.
func (d Decision) AppendDetail(b []byte) []byte {
	p := d.Policy
	if p.limit == 0 {
		b = append(b, "The limit of "...)
		b = append(b, p.bucket.String()...)
		return append(b, " is 0: every request is refused until the limit is raised."...)
	}
	b = append(b, "More than "...)
	b = strconv.AppendUint(b, uint64(p.limit), 10)
	b = append(b, ' ')
	b = append(b, nouns[p.bucket]...)
	b = append(b, " per "...)
	b = append(b, scaleWords(p.rule.Scale)...)
	b = append(b, "; come back in "...)
	b = strconv.AppendInt(b, d.RetryAfterSeconds(), 10)
	return append(b, " s."...)
}

// scaleWords says a scale as people do: "second", "30 seconds", "1500 ms".
func scaleWords(d time.Duration) string {
	for _, u := range []struct {
		d    time.Duration
		name string
	}{{24 * time.Hour, "day"}, {time.Hour, "hour"}, {time.Minute, "minute"}, {time.Second, "second"}} {
		if d == u.d {
			return u.name
		}
		if d > 0 && d%u.d == 0 {
			return strconv.FormatInt(int64(d/u.d), 10) + " " + u.name + "s"
		}
	}
	return strconv.FormatInt(d.Milliseconds(), 10) + " ms"
}
