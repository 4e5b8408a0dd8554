package procstat

import (
	"os"
	"runtime"
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
