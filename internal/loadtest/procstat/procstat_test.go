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

func TestParseWait(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]int64{"1519176 4202266 3\n": 4202266, "0 0 0\n": 0} {
		if got, ok := parseWait([]byte(text)); !ok || got != want {
			t.Errorf("%q: %d, %v", text, got, ok)
		}
	}
	for _, text := range []string{"", "1 2\n", "1 x 3\n"} {
		if got, ok := parseWait([]byte(text)); ok {
			t.Errorf("%q: %d", text, got)
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
	if w.Reset(); w.Longest() != 0 {
		t.Error("the longest is not forgotten")
	}
}
