package redis

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/redis/redistest"
)

// counts fails unless a store counts at Redis: two nodes get what one limit holds.
func counts(t *testing.T, url string) {
	t.Helper()
	a, b := unhurried(t, url, nil), unhurried(t, url, nil)
	if err := a.Join(t.Context()); err != nil {
		t.Fatal(err)
	}
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 9, Lo: 9}, Policy: rule(t, 3, ratelimit.SlidingWindow)}
	if err := a.Reset(t.Context(), a.clock.Now(), it); err != nil { // another store may have counted before
		t.Fatal(err)
	}
	for n, s := range []*Store{a, b, a, b} {
		if d := s.Take(t.Context(), s.clock.Now(), it); d.Allowed != (n < 3) || d.Alone != 0 {
			t.Errorf("request %d: %+v", n+1, d)
		}
	}
	if err := b.Reset(t.Context(), b.clock.Now(), it); err != nil {
		t.Fatal(err)
	}
	if d := a.Take(t.Context(), a.clock.Now(), it); !d.Allowed || d.Remaining != 2 {
		t.Errorf("after a reset: %+v", d)
	}
}

// A user who may do what docs/redis.md lists, and no more, is enough.
func TestLeastRights(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t, "--user", "default", "off", "--user", "hub", "on", ">right", "~converger:limit:*",
		"+evalsha", "+eval", "+time", "+get", "+set", "+del", "+pexpire", "+zadd", "+zrem", "+zcard", "+zremrangebyscore")
	counts(t, "redis://hub:right@"+server.Addr())
	s := unhurried(t, "redis://hub:wrong@"+server.Addr(), nil)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 9, Lo: 9}, Policy: rule(t, 3, ratelimit.SlidingWindow)}
	if d := s.Take(t.Context(), s.clock.Now(), it); !d.Allowed || d.Alone == 0 || s.fallbacks(t, reasonSignIn) == 0 {
		t.Errorf("with a wrong password: %+v", d)
	}
}

func TestTLS(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	cert, key := filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	selfSigned(t, cert, key)
	server := redistest.StartTLS(t, cert, key)
	counts(t, "rediss://"+server.Addr()+"?ca_file="+cert)
	s := newStore(t, "rediss://"+server.Addr(), nil)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 9, Lo: 9}, Policy: rule(t, 3, ratelimit.SlidingWindow)}
	if d := s.Take(t.Context(), s.clock.Now(), it); d.Alone == 0 {
		t.Errorf("a server with a certificate of nobody known was asked: %+v", d)
	}
}

func selfSigned(t *testing.T, certFile, keyFile string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "redis"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IsCA: true, BasicConstraintsValid: true,
	}
	cert, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{certFile: {Type: "CERTIFICATE", Bytes: cert}, keyFile: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(file, pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// A Redis Cluster of three keeps the keys of one request in different places.
func TestCluster(t *testing.T) {
	t.Parallel()
	shards := redistest.StartCluster(t, 3)
	url := shards[0].URL() + "," + shards[1].Addr()
	counts(t, url)
	counts(t, shards[2].URL()+"/?cluster=true")
	var log bytes.Buffer
	plain := unhurried(t, shards[0].URL(), func(c *Config) { c.Logger = slog.New(slog.NewTextHandler(&log, nil)) })
	for n := range uint64(20) {
		plain.Take(t.Context(), plain.clock.Now(), ratelimit.Item{Key: ratelimit.Key{Hi: 8, Lo: n}, Policy: rule(t, 3, ratelimit.FixedWindow)})
	}
	if plain.fallbacks(t, reasonCluster) == 0 || !strings.Contains(log.String(), "?cluster=true") {
		t.Errorf("a URL that does not tell of the cluster: %s", log.String())
	}
	s := unhurried(t, url, nil)
	wide, tight := rule(t, 100, ratelimit.FixedWindow), rule(t, 5, ratelimit.TokenBucket)
	for n := range 8 {
		items := []ratelimit.Item{{Key: ratelimit.Key{Hi: 3, Lo: uint64(n)}, Policy: wide}, {Key: ratelimit.Key{Hi: 4, Lo: uint64(n)}, Policy: tight}}
		for i := range 7 {
			d := s.TakeAll(t.Context(), s.clock.Now(), items)
			if d.Allowed != (i < 5) || d.Policy != tight || d.Alone != 0 {
				t.Fatalf("request %d: %+v", i+1, d)
			}
			if i == 4 {
				for _, it := range items {
					s.Refund(t.Context(), d.Booking(0), it)
				}
				if d := s.TakeAll(t.Context(), s.clock.Now(), items); !d.Allowed {
					t.Errorf("after a refund: %+v", d)
				}
			}
		}
		if u, err := s.Peek(t.Context(), s.clock.Now(), items[0]); err != nil || u.Used != 5 {
			t.Errorf("%d used of the wide limit, want 5: refusals by the tight one left a trace (%v)", u.Used, err)
		}
	}
	used := 0
	for _, shard := range shards {
		if n, err := strconv.Atoi(strings.TrimPrefix(shard.Do(t, "DBSIZE"), ":")); err == nil && n > 0 {
			used++
		}
	}
	if used < 2 {
		t.Errorf("all keys are at %d of 3 shards: this tests nothing", used)
	}
}

// A key lives until its state is full again, never for ever and never shorter, and reads as documented.
func TestLifetimes(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	s := unhurried(t, server.URL(), nil)
	for _, test := range []struct {
		rule         ratelimit.Rule
		cost         uint32
		least, most  time.Duration
		value        string
		withinWindow bool
	}{
		{ratelimit.Rule{Limit: 10, Scale: time.Hour, Algorithm: ratelimit.FixedWindow}, 3, 0, time.Hour, "upload fixed_window 3600000 0 W 3 0 ", true},
		{ratelimit.Rule{Limit: 10, Scale: time.Hour, Algorithm: ratelimit.SlidingWindow}, 3, time.Hour, 2 * time.Hour, "upload sliding_window 3600000 0 W 3 0 ", true},
		{ratelimit.Rule{Limit: 10, Scale: time.Hour, Algorithm: ratelimit.TokenBucket}, 5, 29 * time.Minute, 30 * time.Minute, "upload token_bucket 3600000 10 ", false},
		{ratelimit.Rule{Limit: 10, Scale: time.Hour, Algorithm: ratelimit.TokenBucket, Burst: 200}, 200, 1199 * time.Minute, 1200 * time.Minute, "upload token_bucket 3600000 10 ", false},
	} {
		p, err := ratelimit.NewPolicy(ratelimit.Upload, test.rule)
		if err != nil {
			t.Fatal(err)
		}
		it := ratelimit.Item{Key: ratelimit.Key{Hi: 0x0123456789abcdef, Lo: uint64(stores.Add(1))}, Policy: p, Cost: test.cost}
		d := s.Take(t.Context(), s.clock.Now(), it)
		if !d.Allowed || d.Alone != 0 {
			t.Fatalf("%+v: %+v", test.rule, d)
		}
		key := s.key(it.Key)
		if !strings.HasPrefix(key, "converger:limit:{0123456789abcdef0") {
			t.Errorf("a key named %s", key)
		}
		ttl := func() time.Duration {
			n, err := strconv.Atoi(strings.TrimPrefix(server.Do(t, "PTTL "+key), ":"))
			if err != nil {
				t.Fatal(err)
			}
			return time.Duration(n) * time.Millisecond
		}
		if got := ttl(); got <= test.least || got > test.most {
			t.Errorf("%+v: lives for %v, want %v to %v", test.rule, got, test.least, test.most)
		}
		want := test.value
		if test.withinWindow {
			index, into := p.Window(d.At)
			want = strings.Replace(want, "W", strconv.Itoa(int(index)), 1)
			full := time.Duration(p.ScaleMs()-into)*time.Millisecond + test.least
			if got := ttl(); got < full-10*time.Second || got > full {
				t.Errorf("%+v: lives for %v, want %v", test.rule, got, full)
			}
		}
		if got := server.Do(t, "GET "+key); !strings.Contains(got, "\n"+want) {
			t.Errorf("%+v: reads %q, want %q", test.rule, got, want)
		}
		before := ttl()
		for range 20 { // refusals
			it.Cost = 200
			s.Take(t.Context(), s.clock.Now(), it)
		}
		if got := ttl(); got > before {
			t.Errorf("%+v: refusals lengthened its life from %v to %v", test.rule, before, got)
		}
		it.Cost = test.cost
		s.Refund(t.Context(), d.Booking(0), it)
		if got := ttl(); !test.withinWindow && got >= 0 {
			t.Errorf("%+v: lives for %v after everything was given back", test.rule, got)
		}
	}
	// The time of a decision is Redis', even if the caller's is far off.
	p := rule(t, 5, ratelimit.FixedWindow)
	it := ratelimit.Item{Key: ratelimit.Key{Hi: 5, Lo: 5}, Policy: p}
	for n, now := range []ratelimit.Instant{0, s.clock.Now(), s.clock.Now().Add(48 * time.Hour), begin} {
		d := s.Take(t.Context(), now, it)
		if off := time.Duration(d.At - s.clock.Now()); d.Remaining != uint32(4-n) || off > time.Minute || off < -time.Minute {
			t.Errorf("asked at %v: %+v", now.Time(), d)
		}
	}
}
