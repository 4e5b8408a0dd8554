package channel_test

import (
	"bytes"
	"encoding/json"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"converger/internal/channel"
	"converger/internal/channel/echo"
	"converger/internal/channel/whatsappmeta"
)

func TestRegistry(t *testing.T) {
	t.Parallel()
	reg := channel.NewRegistry(whatsappmeta.New(slog.New(slog.DiscardHandler)), echo.New())
	if got := reg.Types(); !slices.Equal(got, []channel.Type{"echo", "whatsapp_meta"}) {
		t.Errorf("types %v", got)
	}
	if a, ok := reg.Lookup("echo"); !ok || a.Type() != "echo" {
		t.Errorf("echo: %v, %t", a, ok)
	}
	if _, ok := reg.Lookup("pigeon"); ok {
		t.Error("an unknown type was found")
	}
	defer func() {
		if recover() == nil {
			t.Error("one type twice was accepted")
		}
	}()
	channel.NewRegistry(echo.New(), echo.New())
}

func TestRedactedConfig(t *testing.T) {
	t.Parallel()
	reg := channel.NewRegistry(whatsappmeta.New(slog.New(slog.DiscardHandler)))
	config := json.RawMessage(`{"phone_number_id":"1","verify_token":"t","app_secret":"s","access_token":null,"conversation_idle_timeout_seconds":60}`)
	got := channel.RedactedConfig(reg, channel.Channel{Type: channel.TypeWhatsAppMeta, Config: config})
	want := map[string]any{"phone_number_id": "1", "verify_token": "[redacted]", "app_secret": "[redacted]", "access_token": nil,
		"conversation_idle_timeout_seconds": json.Number("60")}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	// Of a type whose secrets are not known nothing is shown.
	if got := channel.RedactedConfig(reg, channel.Channel{Type: channel.TypeWebhook, Config: config}); len(got) != 0 {
		t.Errorf("unknown type: %v", got)
	}
}

// Strangers decide how often a request without proof arrives; they do not decide how long the log gets.
func TestUnsignedWarningIsRare(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		warning := channel.NewUnsignedWarning(slog.New(slog.NewTextHandler(&log, nil)))
		for range 1000 {
			warning.Warn(&channel.Channel{}, "no signature")
		}
		time.Sleep(time.Minute)
		warning.Warn(&channel.Channel{}, "no signature")
		if n := strings.Count(log.String(), "DEPRECATED"); n != 2 {
			t.Errorf("%d lines, want one a minute", n)
		}
	})
}
