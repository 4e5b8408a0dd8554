//go:build unix

package main

import (
	"math"
	"syscall"
)

// maxOpenFiles is how many files and sockets this process may have open. Go has raised the soft limit to the hard one at
// start (package os).
func maxOpenFiles() uint64 {
	var r syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &r); err != nil {
		return math.MaxUint64
	}
	return uint64(r.Cur) //nolint:unconvert // of another type on some systems
}
