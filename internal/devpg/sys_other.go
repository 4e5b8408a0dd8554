//go:build !linux

package devpg

import (
	"errors"
	"syscall"
)

// bindToParent has no counterpart here: an orphaned server keeps the folder's lock until it is stopped by hand.
func bindToParent(*syscall.SysProcAttr, syscall.Signal) {}

func inNamespace(*syscall.SysProcAttr, int, int) error {
	return errors.New("no user namespaces on this system")
}

func zombie(int) bool { return false }
