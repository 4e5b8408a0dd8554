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

const (
	// waitsEvery is the time between two looks. A wait shows when it is over, and then whole.
	waitsEvery = 20 * time.Millisecond
	// shortWait is taken for each other wait between two looks, since only their sum is known: threads of a program that
	// has enough processors wait less than that for one of their own kind.
	shortWait = int64(time.Millisecond)
)

// Waits watches how long threads of processes waited for a processor, while they could have gone on: that is how a busy
// machine makes a quick program slow. Where there is no /proc, or it doesn't tell, nothing is known.
type Waits struct {
	pids    []int
	seen    map[string]waited // by the thread's file
	longest atomic.Int64      // nanoseconds
}

// NewWaits makes one that watches these processes; with none it sees nothing.
func NewWaits(pids ...int) *Waits { return &Waits{pids: pids, seen: map[string]waited{}} }

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
			now, ok := parseWaited(b)
			if before, known := w.seen[file]; ok && known {
				w.longest.Store(max(w.longest.Load(), now.longestSince(before)))
			}
			w.seen[file] = now
		}
	}
}

// waited is how long a thread has waited so far, and how often it got a processor.
type waited struct{ ns, times int64 }

// longestSince guesses the longest of the waits between two readings.
func (w waited) longestSince(before waited) int64 {
	ns, times := w.ns-before.ns, w.times-before.times
	if times <= 0 {
		return 0
	}
	return max(ns/times, ns-(times-1)*shortWait)
}

// parseWaited reads a schedstat (Documentation/scheduler/sched-stats.rst of Linux): time on the processor, time waiting for
// it, both in nanoseconds, and how often it had it.
func parseWaited(b []byte) (w waited, ok bool) {
	fields := bytes.Fields(b)
	if len(fields) != 3 {
		return w, false
	}
	var err [2]error
	w.ns, err[0] = strconv.ParseInt(string(fields[1]), 10, 64)
	w.times, err[1] = strconv.ParseInt(string(fields[2]), 10, 64)
	return w, err[0] == nil && err[1] == nil
}

// Longest is the longest wait since the beginning, as far as can be told. Safe beside Run.
func (w *Waits) Longest() time.Duration { return time.Duration(w.longest.Load()) }
