package procstat

import (
	"context"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
)

func TestParseStat(t *testing.T) {
	t.Parallel()
	line := "4242 (a b) c) S 17 4242 4242 0 -1 4194560 10 20 0 0 100 23 7 5 20 0 1 0 9999 1000 200 18446744073709551615\n"
	if got, want := parseStat([]byte(line)), (ticks{own: 123, waited: 12, parent: 17}); got != want {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if got := parseStat([]byte("nothing")); got != (ticks{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

func TestReadKnowsThisProcess(t *testing.T) {
	t.Parallel()
	if runtime.GOOS != "linux" {
		t.Skip("no /proc")
	}
	before := Read(os.Getpid(), os.Getpid())
	x := 0
	for deadline := time.Now().Add(5 * time.Second); ; x++ { // until the clock of /proc has ticked
		s, ok := Read(os.Getpid(), os.Getpid()).Since(before)
		if ok && s.Driver > 0 && s.Hub > 0 && s.Postgres > 0 && s.Seconds > 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("busy for 5 s, and found %+v, %v (%d)", s, ok, x)
		}
	}
}

func TestLongestWait(t *testing.T) {
	t.Parallel()
	before, ok := parseWaited([]byte("1519176 4000000 3\n"))
	if !ok || before != (waited{4_000_000, 3}) {
		t.Fatalf("read %+v, %v", before, ok)
	}
	for text, want := range map[string]int64{
		"2 4000000 3": 0, "2 29000000 4": 25_000_000, "2 29000000 9": 20_000_000, // one of 25 ms, and with five short ones
		"2 10000000 43": 150_000, "2 14000000 8": 6_000_000, "2 24000000 7": 17_000_000,
	} {
		now, ok := parseWaited([]byte(text))
		if got := now.longestSince(before); !ok || got != want {
			t.Errorf("%q: %d, want %d", text, got, want)
		}
	}
	for _, text := range []string{"", "1 2", "1 x 3", "1 2 x"} {
		if got, ok := parseWaited([]byte(text)); ok {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

// More threads that work than processors have to wait.
func TestWaits(t *testing.T) {
	t.Parallel()
	if b, err := os.ReadFile("/proc/self/schedstat"); err != nil || len(b) < 6 {
		t.Skipf("this system does not tell: %v", err)
	}
	w := NewWaits(os.Getpid())
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var all sync.WaitGroup
	all.Go(func() { _ = w.Run(ctx) })
	for deadline := time.Now().Add(30 * time.Second); w.Longest() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("no wait was seen in 30 s")
		}
	}
	cancel()
	all.Wait()
}
