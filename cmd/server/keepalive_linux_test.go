package main

import (
	"net"
	"syscall"
	"testing"
)

// Connections of clients are probed, so that one who vanished is found out within about a minute.
func TestConnectionsAreProbed(t *testing.T) {
	t.Parallel()
	l, err := listen(t.Context(), "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	far, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	near, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	raw, err := near.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	option := func(level, name int) (v int) {
		t.Helper()
		var failed error
		if err := raw.Control(func(fd uintptr) { v, failed = syscall.GetsockoptInt(int(fd), level, name) }); err != nil || failed != nil {
			t.Fatal(err, failed)
		}
		return v
	}
	if on := option(syscall.SOL_SOCKET, syscall.SO_KEEPALIVE); on == 0 {
		t.Error("probes are off")
	}
	idle, interval, count := option(syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE), option(syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL), option(syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT)
	if total := idle + interval*count; total > 60 {
		t.Errorf("a vanished client is found out after %d s", total)
	}
}
