package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"time"
)

// ticksPerSecond is USER_HZ, in which /proc counts; it is 100 on every architecture that Go supports.
const ticksPerSecond = 100

// usage is processor time used so far, in ticks. Where there is no /proc it stays zero and nothing is reported.
type usage struct {
	at                time.Time
	driver, hub, busy int64 // busy is that of the whole machine
}

func readUsage(hubPID int) usage {
	return usage{at: time.Now(), driver: processTicks(os.Getpid()), hub: processTicks(hubPID), busy: machineTicks()}
}

// since says who used the processors, in per cent of all of them. The rest is Postgres and whatever else runs.
func (u usage) since(before usage) string {
	all := u.at.Sub(before.at).Seconds() * ticksPerSecond * float64(runtime.NumCPU())
	if u.busy == 0 || all == 0 {
		return ""
	}
	driver, hub, busy := float64(u.driver-before.driver), float64(u.hub-before.hub), float64(u.busy-before.busy)
	return fmt.Sprintf("cpu: driver %.0f%%, hub %.0f%%, Postgres and others %.0f%%", 100*driver/all, 100*hub/all, 100*(busy-driver-hub)/all)
}

// processTicks is utime + stime, fields 14 and 15 of proc_pid_stat(5); the name in field 2 may contain anything.
func processTicks(pid int) int64 {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0
	}
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(f) < 13 {
		return 0
	}
	return number(f[11]) + number(f[12])
}

// machineTicks is user, nice, system, irq and softirq of the first line of proc_stat(5).
func machineTicks() int64 {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	line, _, _ := bytes.Cut(b, []byte("\n"))
	f := bytes.Fields(line)
	if len(f) < 8 {
		return 0
	}
	return number(f[1]) + number(f[2]) + number(f[3]) + number(f[6]) + number(f[7])
}

func number(b []byte) int64 {
	n, _ := strconv.ParseInt(string(b), 10, 64) // the kernel writes numbers
	return n
}
