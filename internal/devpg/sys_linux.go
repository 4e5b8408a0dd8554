package devpg

import (
	"bytes"
	"fmt"
	"os"
	"syscall"
)

// bindToParent makes the kernel send sig to the process when the thread that starts it ends.
func bindToParent(a *syscall.SysProcAttr, sig syscall.Signal) { a.Pdeathsig = sig }

// inNamespace starts the process in a user namespace in which our user and group are uid and gid. It has no rights there
// beyond what we have on the machine.
func inNamespace(a *syscall.SysProcAttr, uid, gid int) error {
	a.Cloneflags |= syscall.CLONE_NEWUSER
	a.UidMappings = []syscall.SysProcIDMap{{ContainerID: uid, HostID: os.Geteuid(), Size: 1}}
	a.GidMappings = []syscall.SysProcIDMap{{ContainerID: gid, HostID: os.Getegid(), Size: 1}}
	return nil
}

// zombie reports whether pid has ended but was not waited for: "PID (NAME) Z ...", see proc_pid_stat(5).
func zombie(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	return bytes.HasPrefix(b[bytes.LastIndexByte(b, ')')+1:], []byte(" Z"))
}
