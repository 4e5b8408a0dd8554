//go:build !linux

package auth

import "time"

var started = time.Now()

// threadTime is the clock on the wall, where a thread's own time is not to be had.
func threadTime() time.Duration { return time.Since(started) }
