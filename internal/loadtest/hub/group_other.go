//go:build !unix

package hub

import "syscall"

func ownGroup() *syscall.SysProcAttr { return nil }
