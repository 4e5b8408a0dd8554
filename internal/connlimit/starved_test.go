package connlimit

import (
	"bufio"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// envStarved makes the test binary a server that may open only so many files.
const envStarved = "CONNLIMIT_TEST_STARVED"

const starvedFiles = 40

// serveStarved is that server. It ends with its standard input.
func serveStarved() {
	limit := syscall.Rlimit{Cur: starvedFiles, Max: starvedFiles}
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		fmt.Println("skip", err)
		return
	}
	inner, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println("error", err)
		return
	}
	l, err := New(Config{PerAddress: 1000, Total: 1000, Answer: testAnswer, Logger: slog.New(slog.NewTextHandler(os.Stderr, nil))})
	if err != nil {
		fmt.Println("error", err)
		return
	}
	fmt.Println(inner.Addr())
	go func() {
		fmt.Println("error", http.Serve(l.Listen(inner), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "served") }))) //nolint:gosec // a test
	}()
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// A process that has no descriptor left goes on: it serves who is connected, and others once there are some again.
func TestOutOfDescriptors(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), envStarved+"=1")
	log := &lines{}
	cmd.Stderr = log
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		stdin.Close()
		_ = cmd.Wait()
	}()
	out := bufio.NewReader(stdout)
	line, err := out.ReadString('\n')
	addr := strings.TrimSpace(line)
	if strings.HasPrefix(addr, "skip") {
		t.Skipf("the number of open files can't be limited here: %s", addr)
	}
	if err != nil || strings.HasPrefix(addr, "error") {
		t.Fatalf("no server: %q %v", line, err)
	}
	first := dial(t, "127.0.0.1", addr)
	if got := ask(t, first); got != served {
		t.Fatal(got)
	}
	var many []*net.TCPConn
	for range 2 * starvedFiles { // those beyond wait in the kernel's queue
		many = append(many, dial(t, "127.0.0.1", addr))
	}
	await(t, "the first error", func() bool { return log.count("too many open files") > 0 })
	if got := ask(t, first); got != served {
		t.Errorf("without a descriptor left: %s", got)
	}
	for _, c := range many {
		c.Close()
	}
	if got := ask(t, dial(t, "127.0.0.1", addr)); got != served {
		t.Errorf("with descriptors again: %s", got)
	}
}
