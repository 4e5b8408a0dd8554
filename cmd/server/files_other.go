//go:build !unix

package main

import "math"

// maxOpenFiles is how many files and sockets this process may have open.
func maxOpenFiles() uint64 { return math.MaxUint64 }
