package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"converger/internal/ratelimit"
	"converger/internal/ratelimit/local"
)

// The documented sets of settings are ones that the program takes, give each setting a reason, and are what they say.
func TestProfiles(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("../../docs/profiles/*.env")
	if err != nil || len(files) != 3 {
		t.Fatalf("%v, %v", files, err)
	}
	loaded := map[string]Config{}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), ".env")
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		explained := false
		names := map[string]bool{}
		for i, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
			setting, _, isSetting := strings.Cut(line, "=")
			switch {
			case strings.HasPrefix(line, "#"):
				explained = true
			case line == "":
				explained = false
			case !isSetting || !explained || names[setting]:
				t.Errorf("%s:%d: %q has no reason above it, or is set twice", file, i+1, line)
			default:
				names[setting] = true
			}
		}
		// As a shell reads it, which is also how systemd does.
		out, err := exec.CommandContext(t.Context(), "env", "-i", "sh", "-c", `set -a; . "$1"; exec /usr/bin/env`, "sh", file).Output()
		if err != nil {
			t.Fatal(err)
		}
		changes := map[string]string{}
		for line := range strings.Lines(string(out)) {
			if k, v, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "="); ok && names[k] {
				changes[k] = v
			}
		}
		if len(changes) != len(names) {
			t.Errorf("%s: a shell reads %d of %d settings", file, len(changes), len(names))
		}
		known := map[string]bool{}
		for _, s := range settings {
			known[s.name] = true
		}
		for k := range names {
			if !known[k] {
				t.Errorf("%s: there is no setting %s", file, k)
			}
		}
		c, err := loadWith(changes)
		if err != nil {
			t.Errorf("%s: %v", file, err)
			continue
		}
		loaded[name] = c
	}
	usual, err := loadWith(nil)
	if err != nil {
		t.Fatal(err)
	}
	high, secure, dev := loaded["high-traffic"], loaded["security"], loaded["development"]
	if high.ConnLimitTotal <= usual.ConnLimitTotal || high.PoolSize <= usual.PoolSize || high.Workers <= usual.Workers {
		t.Errorf("high traffic: %+v", high)
	}
	if secure.ConnLimitPerIP >= usual.ConnLimitPerIP || secure.BcryptCost <= usual.BcryptCost || secure.WebhookAllowPrivateTargets || !secure.RateLimitEnabled {
		t.Errorf("security: %+v", secure)
	}
	if !dev.RateLimitEnabled || !dev.WebhookAllowPrivateTargets {
		t.Errorf("development: %+v", dev)
	}
	store, err := local.New(local.Config{MaxKeys: 1000})
	if err != nil {
		t.Fatal(err)
	}
	limits := func(c Config) *ratelimit.Limiter {
		l, err := ratelimit.New(ratelimit.Config{Store: store, Operator: c.RateLimits})
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	if p := limits(dev).Policy(ratelimit.ActivityCreate, nil, nil); !p.CountOnly() {
		t.Error("development refuses activities")
	}
	if p := limits(high).Policy(ratelimit.ActivityCreate, nil, nil); p.Limit() <= limits(usual).Policy(ratelimit.ActivityCreate, nil, nil).Limit() {
		t.Errorf("high traffic admits %d activities", p.Limit())
	}
	if p := limits(secure).Policy(ratelimit.UnknownCaller, nil, nil); p.Limit() >= limits(usual).Policy(ratelimit.UnknownCaller, nil, nil).Limit() {
		t.Errorf("security admits %d strangers", p.Limit())
	}
}
