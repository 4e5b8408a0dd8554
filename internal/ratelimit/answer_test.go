package ratelimit

import (
	"testing"
	"time"
)

func TestAnswers(t *testing.T) {
	t.Parallel()
	rule := func(limit int64, scale time.Duration) Rule { return Rule{Limit: limit, Scale: scale} }
	bucket := func(limit, burst int64, scale time.Duration) Rule {
		return Rule{Limit: limit, Scale: scale, Algorithm: TokenBucket, Burst: burst}
	}
	for _, tt := range []struct {
		name   string
		bucket Bucket
		rule   Rule
		d      Decision
		policy string
		header string
		retry  int64
		detail string
	}{
		{
			"admitted", ActivityCreate, rule(100, time.Second), Decision{Allowed: true, Remaining: 99, WaitMs: 1},
			`"activity_create";q=100;w=1`, `"activity_create";r=99;t=1`, 1, "",
		},
		{
			"admitted, whole again", ChannelOutbound, bucket(10, 0, time.Second), Decision{Allowed: true, Remaining: 10},
			`"channel_outbound";q=10;w=1`, `"channel_outbound";r=10;t=0`, 1, "",
		},
		{
			"refused", ActivityCreate, rule(100, time.Second), Decision{WaitMs: 412},
			`"activity_create";q=100;w=1`, `"activity_create";r=0;t=1`, 1,
			"More than 100 activities per second; come back in 1 s.",
		},
		{
			"rounded up", LoginIP, rule(5, time.Minute), Decision{WaitMs: 12_001},
			`"login_ip";q=5;w=60`, `"login_ip";r=0;t=13`, 13,
			"More than 5 failed logins per minute; come back in 13 s.",
		},
		{
			"never beyond the window", Inbound, rule(500, 1500*time.Millisecond), Decision{WaitMs: 5000},
			`"inbound";q=500;w=2`, `"inbound";r=0;t=2`, 2,
			"More than 500 webhook requests per 1500 ms; come back in 2 s.",
		},
		{
			"at least a second", APIRead, bucket(300, 0, time.Minute), Decision{WaitMs: 200},
			`"api_read";q=300;w=60`, `"api_read";r=0;t=1`, 1,
			"More than 300 API requests per minute; come back in 1 s.",
		},
		{
			"burst", Upload, bucket(10, 50, time.Second), Decision{WaitMs: 100},
			`"upload";q=50;w=5`, `"upload";r=0;t=1`, 1,
			"More than 10 uploads per second; come back in 1 s.",
		},
		{
			"burst that refills in no time", Upload, bucket(10, 1, time.Second), Decision{WaitMs: 100},
			`"upload";q=1;w=1`, `"upload";r=0;t=1`, 1,
			"More than 10 uploads per second; come back in 1 s.",
		},
		{
			"limit of 0", Management, rule(0, 30*time.Second), Decision{WaitMs: 30_000},
			`"management";q=0;w=30`, `"management";r=0;t=30`, 30,
			"The limit of management is 0: every request is refused until the limit is raised.",
		},
	} {
		p, err := NewPolicy(tt.bucket, tt.rule)
		if err != nil {
			t.Fatal(err)
		}
		tt.d.Policy = p
		if got := p.PolicyHeader(); got != tt.policy {
			t.Errorf("%s: RateLimit-Policy %s, want %s", tt.name, got, tt.policy)
		}
		if got := string(tt.d.AppendHeader(nil)); got != tt.header {
			t.Errorf("%s: RateLimit %s, want %s", tt.name, got, tt.header)
		}
		if got := tt.d.RetryAfterSeconds(); got != tt.retry {
			t.Errorf("%s: Retry-After %d, want %d", tt.name, got, tt.retry)
		}
		if tt.detail != "" {
			if got := string(tt.d.AppendDetail(nil)); got != tt.detail {
				t.Errorf("%s: detail %q, want %q", tt.name, got, tt.detail)
			}
		}
	}
}

func TestEveryBucketCanBeExplained(t *testing.T) {
	t.Parallel()
	for _, b := range Buckets() {
		if nouns[b] == "" {
			t.Errorf("%s has no noun", b)
		}
		if got, ok := ParseBucket(b.String()); !ok || got != b {
			t.Errorf("ParseBucket(%q) = %v, %v", b.String(), got, ok)
		}
		if d := b.Info().Default; d != (Rule{}) && d.Validate() != nil {
			t.Errorf("%s: %v", b, d.Validate())
		}
	}
	if _, ok := ParseBucket(""); ok {
		t.Error("the empty name is a bucket")
	}
}

func TestAnswersAllocateNothing(t *testing.T) {
	p, err := NewPolicy(ActivityCreate, ActivityCreate.Info().Default)
	if err != nil {
		t.Fatal(err)
	}
	d, buf := Decision{Policy: p, WaitMs: 412}, make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() {
		buf = d.AppendDetail(d.AppendHeader(append(buf[:0], p.PolicyHeader()...)))
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
