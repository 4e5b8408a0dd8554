//go:build unix

package hub

import "syscall"

// ownGroup keeps a Ctrl-C, which goes to the terminal's whole group, from the program: it is stopped by Stop.
func ownGroup() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }
