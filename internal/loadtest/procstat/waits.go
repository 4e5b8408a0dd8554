package procstat

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"time"
)

// waitsEvery is the time between two looks. A wait shows when it is over, and then whole.
const waitsEvery = 20 * time.Millisecond

// Waits watches how long threads of processes waited for a processor, while they could have gone on: that is how a busy
// machine makes a quick program slow. Where there is no /proc, or it doesn't tell, nothing is known.
type Waits struct {
	pids    []int
	seen    map[string]int64 // by the thread's file, nanoseconds so far
	longest atomic.Int64     // nanoseconds
}

// NewWaits makes one that watches these processes; with none it sees nothing.
func NewWaits(pids ...int) *Waits { return &Waits{pids: pids, seen: map[string]int64{}} }

// Run watches until ctx ends, and returns nil.
func (w *Waits) Run(ctx context.Context) error {
	tick := time.NewTicker(waitsEvery)
	defer tick.Stop()
	for w.runOnce(); ; w.runOnce() {
		select {
		case <-ctx.Done():
			w.runOnce()
			return nil
		case <-tick.C:
		}
	}
}

func (w *Waits) runOnce() {
	for _, pid := range w.pids {
		threads, _ := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/schedstat") // the pattern is a good one
		for _, file := range threads {
			b, err := os.ReadFile(file)
			if err != nil {
				continue // it ended
			}
			now, ok := parseWait(b)
			if before, known := w.seen[file]; ok && known {
				w.longest.Store(max(w.longest.Load(), now-before))
			}
			w.seen[file] = now
		}
	}
}

// parseWait reads the time on the run queue of a schedstat (Documentation/scheduler/sched-stats.rst of Linux): time on the
// processor, time waiting for it, both in nanoseconds, and how often.
func parseWait(b []byte) (ns int64, ok bool) {
	fields := bytes.Fields(b)
	if len(fields) != 3 {
		return 0, false
	}
	ns, err := strconv.ParseInt(string(fields[1]), 10, 64)
	return ns, err == nil
}

// Longest is the longest wait, or sum of waits within 20 ms, since Reset or the beginning. Safe beside Run.
func (w *Waits) Longest() time.Duration { return time.Duration(w.longest.Load()) }

// Reset forgets the longest. Safe beside Run.
func (w *Waits) Reset() { w.longest.Store(0) }
