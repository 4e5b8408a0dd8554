package redistest

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// patience is how long a server may take to start on a busy machine.
const patience = 30 * time.Second

// Server is a running redis-server. It has no password and stores nothing, unless its arguments say otherwise.
type Server struct {
	// Port on 127.0.0.1; it stays the same when the server is started again.
	Port int

	path, dir string
	args      []string
	tls       bool
	process   *os.Process
	ended     chan struct{}
}

// Start starts a server with further arguments, such as "--maxmemory", "1mb". It is killed when the test ends.
func Start(t testing.TB, args ...string) *Server {
	t.Helper()
	return start(t, &Server{path: find(t), dir: t.TempDir(), args: args})
}

// StartTLS starts a server that speaks nothing but TLS and asks for no certificate of a client.
func StartTLS(t testing.TB, certFile, keyFile string) *Server {
	t.Helper()
	return start(t, &Server{path: find(t), dir: t.TempDir(), tls: true,
		args: []string{"--tls-cert-file", certFile, "--tls-key-file", keyFile, "--tls-ca-cert-file", certFile, "--tls-auth-clients", "no"}})
}

// StartCluster starts a Redis Cluster of so many shards, without replicas.
func StartCluster(t testing.TB, shards int) []*Server {
	t.Helper()
	const slots = 16384
	servers := make([]*Server, shards)
	for i := range servers {
		s := Start(t, "--cluster-enabled", "yes", "--cluster-node-timeout", "5000")
		s.ok(t, fmt.Sprintf("CLUSTER ADDSLOTSRANGE %d %d", i*slots/shards, (i+1)*slots/shards-1))
		s.ok(t, fmt.Sprintf("CLUSTER SET-CONFIG-EPOCH %d", i+1)) // as redis-cli does: else they would have to agree on it
		if i > 0 {
			s.ok(t, fmt.Sprintf("CLUSTER MEET 127.0.0.1 %d", servers[0].Port))
		}
		servers[i] = s
	}
	for _, s := range servers {
		for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
			info := s.Do(t, "CLUSTER INFO")
			if strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprintf("cluster_size:%d\r", shards)) {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("no cluster: %s", info)
			}
		}
	}
	return servers
}

func (s *Server) ok(t testing.TB, command string) {
	t.Helper()
	if got := s.Do(t, command); got != "+OK" {
		t.Fatalf("%s: %s", command, got)
	}
}

func start(t testing.TB, s *Server) *Server {
	t.Helper()
	t.Cleanup(s.Kill)
	// Below the ports that the system hands out, so that nobody has this one when the server is started again.
	for range 100 {
		s.Port = 12_000 + rand.IntN(16_000)
		if l, err := net.Listen("tcp", s.Addr()); err == nil { //nolint:noctx // it returns at once
			l.Close()
			if err = s.run(t); err == nil {
				return s
			}
			t.Log(err)
		}
	}
	t.Fatal("no port is free for a redis-server")
	return nil
}

// Addr is the server's host and port.
func (s *Server) Addr() string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(s.Port)) }

// URL is the server's address as RATE_LIMIT_REDIS_URL.
func (s *Server) URL() string { return "redis://" + s.Addr() }

func find(t testing.TB) string {
	t.Helper()
	name := os.Getenv("REDIS_SERVER")
	if name == "" {
		name = "redis-server"
	}
	path, err := exec.LookPath(name)
	if err == nil {
		return path
	}
	const hint = "no redis-server: make redis fetches one, REDIS_SERVER names one"
	if os.Getenv("CONVERGER_REDIS") == "required" {
		t.Fatal(hint)
	}
	t.Skip(hint)
	return ""
}

func (s *Server) run(t testing.TB) error {
	port := []string{"--port", strconv.Itoa(s.Port)}
	if s.tls {
		port = []string{"--port", "0", "--tls-port", strconv.Itoa(s.Port)}
	}
	cmd := exec.Command(s.path, slices.Concat(port, []string{ //nolint:noctx // killed by Kill
		"--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", s.dir, "--daemonize", "no",
	}, s.args)...)
	logPath := filepath.Join(s.dir, "log")
	log, err := os.Create(logPath)
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, &syscall.SysProcAttr{Setpgid: true}
	bindToParent(cmd.SysProcAttr)
	started, ended := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // the signal of a parent's death follows the thread that made the child
		err := cmd.Start()
		started <- err
		if err == nil {
			_ = cmd.Wait()
			close(ended)
		}
	}()
	if err := <-started; err != nil {
		t.Fatal(err)
	}
	s.process, s.ended = cmd.Process, ended
	for deadline := time.Now().Add(patience); ; {
		said, err := os.ReadFile(logPath)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(said, []byte("Ready to accept connections")) {
			return nil
		}
		select {
		case <-ended:
			return fmt.Errorf("redis-server on port %d ended: %s", s.Port, said)
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			t.Fatalf("redis-server does not start: %s", said)
		}
	}
}

// Kill ends the server as a crash does: what it held is gone.
func (s *Server) Kill() {
	if s.process != nil {
		_ = s.process.Kill() // also when frozen
		<-s.ended
	}
}

// Restart starts a killed server again, empty, on its port.
func (s *Server) Restart(t testing.TB) {
	t.Helper()
	if err := s.run(t); err != nil {
		t.Fatal(err)
	}
}

// Freeze stops the server where it is: it keeps connections, takes new ones and answers nobody.
func (s *Server) Freeze(t testing.TB) { s.signal(t, syscall.SIGSTOP) }

// Thaw lets a frozen server go on.
func (s *Server) Thaw(t testing.TB) { s.signal(t, syscall.SIGCONT) }

func (s *Server) signal(t testing.TB, sig syscall.Signal) {
	t.Helper()
	if err := s.process.Signal(sig); err != nil {
		t.Fatal(err)
	}
}

// Do sends a command as redis-cli does and returns the answer as it comes over the wire, 64 KiB at most; of an
// error it begins with "-". Several are sent on one connection, such as AUTH first, and the last answer is returned.
func (s *Server) Do(t testing.TB, commands ...string) string {
	t.Helper()
	conn, err := net.DialTimeout("tcp", s.Addr(), patience) //nolint:noctx // bounded
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(patience))
	b := make([]byte, 64<<10)
	var answer string
	for _, c := range commands {
		if _, err := fmt.Fprintf(conn, "%s\r\n", c); err != nil {
			t.Fatal(err)
		}
		n, err := conn.Read(b)
		if err != nil {
			t.Fatal(err)
		}
		answer = strings.TrimSpace(string(b[:n]))
	}
	return answer
}
