package procstat

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

// Usage is processor time used so far. Where there is no /proc nothing is known.
type Usage struct {
	At       time.Time
	driver   int64 // ticks of this process, with those of its children that it has waited for
	hub      int64
	postgres int64 // all its processes
	busy     int64 // of the whole machine, ours and others'
}

// Read reads the processor time of this process, of the hub's and of Postgres', of which it takes the children too.
func Read(hubPID, postgresPID int) Usage {
	u := Usage{At: time.Now(), busy: machineTicks()}
	driver := process(os.Getpid())
	u.driver = driver.own + driver.waited
	u.hub = process(hubPID).own
	postmaster := process(postgresPID)
	u.postgres = postmaster.own + postmaster.waited
	for _, pid := range children(postgresPID) {
		u.postgres += process(pid).own
	}
	return u
}

// Spent is the processor time between two readings: shares of all processors, from 0 to 1.
type Spent struct {
	Driver, Hub, Postgres float64
	Others                float64 // everybody else on the machine
	Seconds               float64 // of processors, by all of ours
}

// Since returns false where processor time is not known.
func (u Usage) Since(before Usage) (Spent, bool) {
	all := u.At.Sub(before.At).Seconds() * ticksPerSecond * float64(runtime.NumCPU())
	if u.busy == 0 || all <= 0 {
		return Spent{}, false
	}
	driver, hub, postgres := u.driver-before.driver, u.hub-before.hub, u.postgres-before.postgres
	ours := driver + hub + postgres
	return Spent{
		Driver: float64(driver) / all, Hub: float64(hub) / all, Postgres: float64(postgres) / all,
		Others:  max(0, float64(u.busy-before.busy-ours)/all),
		Seconds: float64(ours) / ticksPerSecond,
	}, true
}

// String shows the shares in percent.
func (s Spent) String() string {
	return fmt.Sprintf("cpu: driver %.0f%%, hub %.0f%%, Postgres %.0f%%, others %.0f%%", 100*s.Driver, 100*s.Hub, 100*s.Postgres, 100*s.Others)
}

type ticks struct {
	own    int64 // utime and stime
	waited int64 // cutime and cstime: of children that ended and were waited for
	parent int64
}

// process reads proc_pid_stat(5); the name in field 2 may contain anything. A process that is gone used nothing.
func process(pid int) ticks {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ticks{}
	}
	return parseStat(b)
}

func parseStat(b []byte) ticks {
	f := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:]) // from field 3 on
	if len(f) < 15 {
		return ticks{}
	}
	return ticks{own: number(f[11]) + number(f[12]), waited: number(f[13]) + number(f[14]), parent: number(f[1])}
}

// children lists the living children of a process.
func children(pid int) []int {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	var found []int
	for _, e := range entries {
		if child, err := strconv.Atoi(e.Name()); err == nil && process(child).parent == int64(pid) {
			found = append(found, child)
		}
	}
	return found
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
