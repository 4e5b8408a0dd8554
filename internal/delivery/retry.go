package delivery

import (
	"cmp"
	"math"
	"strings"
	"time"
	"unicode/utf8"

	"converger/internal/channel"
)

// Defaults of a channel's retry policy, those that operators of earlier installations know.
const (
	defaultMaxAttempts = 5
	defaultBase        = 10 * time.Second
	defaultMax         = channel.DefaultMaxMS * time.Millisecond
	defaultTimeout     = 15 * time.Second
)

// jitter is the share of a wait by which it may be lengthened at random.
const jitter = 0.1

// backoff is the wait after the n-th attempt has failed: by the policy, or what the receiver asked for where that is more
// (at most an hour), lengthened by up to a tenth. random is from 0 to 1.
func backoff(p channel.RetryPolicy, n int, retryAfter time.Duration, random float64) time.Duration {
	base := float64(cmp.Or(time.Duration(p.BaseMS)*time.Millisecond, defaultBase))
	limit := float64(cmp.Or(time.Duration(p.MaxMS)*time.Millisecond, defaultMax))
	wait := base
	switch p.Backoff {
	case channel.BackoffLinear:
		wait = base * float64(n)
	case channel.BackoffFixed:
	default:
		wait = base * math.Pow(3, float64(n))
	}
	wait = min(wait, limit)
	wait = max(wait, float64(min(retryAfter, channel.MaxRetryAfter)))
	return time.Duration(wait * (1 + jitter*random))
}

func maxAttempts(p channel.RetryPolicy) int { return cmp.Or(p.MaxAttempts, defaultMaxAttempts) }

// timeout is how long an attempt may take; limit bounds it.
func timeout(p channel.RetryPolicy, limit time.Duration) time.Duration {
	return min(cmp.Or(time.Duration(p.TimeoutMS)*time.Millisecond, defaultTimeout), limit)
}

// The most that is stored of the texts of an attempt, in bytes.
const (
	maxError    = 1024
	maxResponse = 2048
)

// storable makes any text one that Postgres takes: valid UTF-8 without NUL, at most limit bytes.
func storable(s string, limit int) string {
	s = strings.ReplaceAll(strings.ToValidUTF8(s, "\uFFFD"), "\x00", "\uFFFD")
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
