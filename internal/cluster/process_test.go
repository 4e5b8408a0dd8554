package cluster_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"converger/internal/cluster"
	"converger/internal/postgres"
	"converger/migrations/pgtest"
)

// envNode makes the test binary be a node, for tests that kill or stop one. It ends with its standard input.
const envNode = "CONVERGER_CLUSTER_TEST_NODE"

type nodeSpec struct {
	Bind     string
	Peers    []string
	Database string
}

func TestMain(m *testing.M) {
	spec := os.Getenv(envNode)
	if spec == "" {
		pgtest.Main(m)
		return
	}
	if err := beNode(spec); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// beNode runs a node and writes its id, then a line for each change of its view.
func beNode(text string) error {
	var spec nodeSpec
	if err := json.Unmarshal([]byte(text), &spec); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		os.Exit(3)
	}()
	c := config(spec.Bind, spec.Peers...)
	c.Logger = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if spec.Database != "" {
		pool, err := postgres.Open(ctx, spec.Database, postgres.Options{MaxConns: 1})
		if err != nil {
			return err
		}
		defer pool.Close()
		c.Database = pool
	}
	n, err := cluster.New(c)
	if err != nil {
		return err
	}
	fmt.Println("id", n.ID())
	go func() {
		for {
			v, changed := n.Watch()
			fmt.Println("view", show(v))
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return n.Run(ctx)
}

// process is a node in a process of its own.
type process struct {
	id     cluster.ID
	cmd    *exec.Cmd
	seen   atomic.Pointer[string] // its last view, as show writes it
	ended  chan struct{}
	log    *lines
	signal func(os.Signal)
}

func spawn(t testing.TB, spec nodeSpec, wrap ...string) *process {
	t.Helper()
	text, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	args := slices.Concat(wrap, []string{os.Args[0]})
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Env = append(os.Environ(), envNode+"="+string(text))
	p := &process{cmd: cmd, ended: make(chan struct{}), log: &lines{}}
	cmd.Stderr = p.log
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	id := make(chan string, 1)
	go func() {
		for s := bufio.NewScanner(out); s.Scan(); {
			if x, ok := strings.CutPrefix(s.Text(), "id "); ok {
				id <- x
			} else if x, ok := strings.CutPrefix(s.Text(), "view "); ok {
				p.seen.Store(&x)
			}
		}
		close(id)
		_ = cmd.Wait()
		close(p.ended)
	}()
	var mu sync.Mutex
	p.signal = func(s os.Signal) {
		mu.Lock()
		defer mu.Unlock()
		_ = cmd.Process.Signal(s)
	}
	t.Cleanup(func() {
		p.signal(syscall.SIGCONT)
		p.signal(syscall.SIGKILL)
		<-p.ended
		_ = stdin.Close()
		if t.Failed() {
			t.Logf("log of %s (%s):\n%s", spec.Bind, p.id, p.log)
		}
	})
	if p.id, err = cluster.ParseID(<-id); err != nil {
		t.Fatalf("%v\n%s", err, p.log)
	}
	return p
}

// await waits until the process sees so many of so many nodes, "2 of 3".
func (p *process) await(t testing.TB, shares string) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		last := p.view()
		if strings.HasPrefix(last, shares+";") || last == shares {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("process %s never saw %s; it sees %s", p.id, shares, last)
		}
	}
}

func (p *process) view() string {
	if v := p.seen.Load(); v != nil {
		return *v
	}
	return ""
}

func (p *process) kill() {
	p.signal(syscall.SIGKILL)
	<-p.ended
}
