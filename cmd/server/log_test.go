package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestRepeatedErrorsAreHeldBack(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var out bytes.Buffer
		log := newLogger(Config{LogFormat: "text"}, &out)
		lines := func() (n int) {
			n = strings.Count(out.String(), "\n")
			return n
		}
		for i := range 100 {
			log.With(slog.Int("i", i)).Error("database gone", slog.Duration("took", 1500*time.Microsecond))
		}
		if lines() != 1 || !strings.Contains(out.String(), "took_ms=1.5") {
			t.Fatalf("after 100 equal errors:\n%s", out.String())
		}
		log.Error("another")
		for range 3 { // what is no complaint, or belongs to a request, is never held back
			log.Info("request")
			log.Error("unexpected", slog.String("request_id", "r"))
		}
		if lines() != 8 {
			t.Fatalf("other lines are missing:\n%s", out.String())
		}
		time.Sleep(calmFor)
		log.Error("database gone")
		if lines() != 9 || !strings.Contains(out.String(), "repeated=99") {
			t.Fatalf("after a while:\n%s", out.String())
		}
	})
}
