//go:build !linux

package redistest

import "syscall"

func bindToParent(*syscall.SysProcAttr) {}
