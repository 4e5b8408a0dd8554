package auth

import (
	"syscall"
	"time"
)

// threadTime is the processor time that the calling thread has used: other than the clock on the wall, it does not tell how
// busy the machine is.
func threadTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_THREAD, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
