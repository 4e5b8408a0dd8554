package redistest

import "syscall"

// bindToParent has the server killed with the test's process, should that be killed.
func bindToParent(a *syscall.SysProcAttr) { a.Pdeathsig = syscall.SIGKILL }
