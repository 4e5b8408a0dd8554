package main

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

const (
	maxDevNodes = 20
	// nodeStart and nodeStop bound what a node of `server dev` may take; SHUTDOWN_TIMEOUT_MS bounds each step of its stop.
	nodeStart = time.Minute
	nodeStop  = time.Minute
	// nodePause is how long the place of a node that ended stays empty: the others take it for dead after four seconds at most.
	nodePause = 6 * time.Second
)

// serveNodes runs the nodes of a development cluster, each `server serve` in a process of its own, until ctx ends; then
// it stops them all. One that ends before all are ready is an error; after that the others go on, and another process
// takes its place. first holds the address of the first one; the others take the ports after it.
func (c devCmd) serveNodes(ctx context.Context, e *env, getenv func(string) string, first net.Listener, d demo) (err error) {
	host, _, err := net.SplitHostPort(c.Addr)
	if err != nil {
		return err
	}
	addresses, members, err := nodeAddresses(ctx, first, host, c.Addr, c.Nodes)
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err != nil {
		return err
	}

	out := &lineWriter{to: e.stderr}
	ended := make(chan *devNode, c.Nodes)
	nodes := make([]*devNode, c.Nodes) // nil: none at the moment
	d.Nodes = make([]demoNode, c.Nodes)
	defer func() { err = errors.Join(err, stopNodes(nodes)) }()
	start := func(i int) error {
		n, err := startNode(program, childEnvironment(getenv, map[string]string{
			"POOL_SIZE": cmp.Or(getenv("POOL_SIZE"), strconv.Itoa(devPool(c.Nodes))), "LISTEN": addresses[i], "CLUSTER_BIND": members[i],
			"CLUSTER_PEERS": strings.Join(members, ","), "CLUSTER_NODE_NAME": "node" + strconv.Itoa(i+1),
		}), i, out, ended)
		if err != nil {
			return err
		}
		nodes[i], d.Nodes[i] = n, demoNode{BaseURL: "http://" + addresses[i], PID: n.cmd.Process.Pid}
		return nil
	}
	for i := range nodes {
		if err := start(i); err != nil {
			return err
		}
	}
	for _, n := range d.Nodes {
		if err := awaitReady(ctx, http.DefaultClient, n.BaseURL, ended); err != nil || ctx.Err() != nil {
			return err
		}
	}
	if err := d.write(c.Dir); err != nil {
		return err
	}
	c.welcome(e.stdout, d)
	fmt.Fprintf(e.stdout, "%d nodes run as one cluster:\n", len(d.Nodes))
	for i, n := range d.Nodes {
		fmt.Fprintf(e.stdout, "  node%d %s, process %d\n", i+1, n.BaseURL, n.PID)
	}
	empty := make(chan int, c.Nodes)
	for {
		select {
		case <-ctx.Done():
			return nil
		case n := <-ended:
			if ctx.Err() != nil { // it had the terminal's signal too
				continue
			}
			nodes[n.place] = nil
			out.say(fmt.Sprintf("%v; another process takes its place in %s", n.end(), nodePause))
			time.AfterFunc(nodePause, func() { empty <- n.place })
		case i := <-empty:
			if err := start(i); err != nil {
				return err
			}
			if err := d.write(c.Dir); err != nil {
				return err
			}
			out.say(fmt.Sprintf("%s starts as process %d", nodes[i].name(), d.Nodes[i].PID))
		}
	}
}

// nodeAddresses finds an address for the requests to each node, and one for the other nodes. Every one is held until all
// are found, so that they differ; then they are given back, and a moment is left in which somebody else might take one.
func nodeAddresses(ctx context.Context, first net.Listener, host, addr string, n int) (addresses, members []string, err error) {
	var lc net.ListenConfig
	held := []io.Closer{first}
	defer func() {
		for _, h := range held {
			_ = h.Close()
		}
	}()
	addresses = append(addresses, reachable(first.Addr()))
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, nil, err
	}
	base, err := strconv.Atoi(port)
	if err != nil {
		return nil, nil, fmt.Errorf("the port of --addr: %w", err)
	}
	for i := 1; i < n; i++ {
		next := 0
		if base != 0 {
			next = base + i
		}
		l, err := lc.Listen(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(next)))
		if err != nil {
			return nil, nil, fmt.Errorf("the address of node %d: %w", i+1, err)
		}
		held = append(held, l)
		addresses = append(addresses, reachable(l.Addr()))
	}
	for range n {
		l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
		if err != nil {
			return nil, nil, err
		}
		held = append(held, l)
		p, err := lc.ListenPacket(ctx, "udp", l.Addr().String())
		if err != nil {
			return nil, nil, err
		}
		held = append(held, p)
		members = append(members, l.Addr().String())
	}
	return addresses, members, nil
}

// childEnvironment is this process's own, with every setting as `server dev` resolved it.
func childEnvironment(getenv func(string) string, own map[string]string) []string {
	var all []string
	ours := map[string]bool{}
	for _, s := range settings {
		ours[s.name], ours[s.name+"_FILE"] = true, true
		for _, name := range []string{s.name, s.name + "_FILE"} {
			if v := cmp.Or(own[name], getenv(name)); v != "" {
				all = append(all, name+"="+v)
			}
		}
	}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); !ours[name] {
			all = append(all, v)
		}
	}
	return all
}

// devPool shares out the 200 connections of the private Postgres; each node uses a few beside its pool.
func devPool(nodes int) int { return min(20, max(4, 150/nodes-3)) }

// devNode is one process of a development cluster.
type devNode struct {
	place int
	cmd   *exec.Cmd
	done  chan struct{}
	err   error // set before done
}

func (n *devNode) name() string { return "node" + strconv.Itoa(n.place+1) }

// end tells how a node ended that has.
func (n *devNode) end() error {
	return fmt.Errorf("%s ended: %w", n.name(), cmp.Or(n.err, errors.New("without a reason")))
}

// startNode starts `server serve`, its log prefixed with its name. ended, which must have room, hears when it ends by
// itself or not.
func startNode(program string, environ []string, place int, out *lineWriter, ended chan<- *devNode) (*devNode, error) {
	cmd := exec.Command(program, "serve", "--until-input-ends") //nolint:noctx // stopped in order, by stopNodes
	cmd.Env = environ
	// Not the terminal's: its interrupt would be the first of two, and the second ends a node at once.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if _, err := cmd.StdinPipe(); err != nil { // it stops when that ends, should this process die
		return nil, err
	}
	r, w := io.Pipe()
	cmd.Stdout, cmd.Stderr = w, w
	n := &devNode{place: place, cmd: cmd, done: make(chan struct{})}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", n.name(), err)
	}
	var lines sync.WaitGroup
	lines.Go(func() { out.copy("["+n.name()+"] ", r) })
	go func() {
		n.err = cmd.Wait()
		_ = w.Close()
		lines.Wait()
		close(n.done)
		ended <- n
	}()
	return n, nil
}

// stopNodes asks all to stop, waits, and kills whoever doesn't.
func stopNodes(nodes []*devNode) (err error) {
	nodes = slices.DeleteFunc(nodes, func(n *devNode) bool { return n == nil })
	for _, n := range nodes {
		_ = n.cmd.Process.Signal(os.Interrupt) // it may have ended
	}
	late := time.After(nodeStop)
	for _, n := range nodes {
		select {
		case <-n.done:
		case <-late:
			_ = n.cmd.Process.Kill()
			<-n.done
		}
		if n.err != nil {
			err = errors.Join(err, fmt.Errorf("%s: %w", n.name(), n.err))
		}
	}
	return err
}

// errLate ends the wait for a node.
var errLate = errors.New("late")

// awaitReady waits until a node takes traffic, one of them ends, or ctx does. A node that takes requests and answers none is
// late as any other.
func awaitReady(ctx context.Context, client *http.Client, base string, ended <-chan *devNode) error {
	ctx, cancel := context.WithTimeoutCause(ctx, nodeStart, errLate)
	defer cancel()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			if errors.Is(context.Cause(ctx), errLate) {
				return fmt.Errorf("%s is not ready after %s", base, nodeStart)
			}
			return nil
		case n := <-ended:
			return n.end()
		case <-tick.C:
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, base+"/health/ready", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			continue
		}
		_ = resp.Body.Close()
		if resp.StatusCode == http.StatusOK {
			return nil
		}
	}
}

// lineWriter keeps the lines of several writers whole. Safe for concurrent use.
type lineWriter struct {
	mu sync.Mutex
	to io.Writer
}

// copy writes each line of r behind a prefix until r ends.
func (w *lineWriter) copy(prefix string, r io.Reader) {
	b := bufio.NewReader(r)
	for {
		line, err := b.ReadString('\n')
		if line != "" {
			w.say(prefix + strings.TrimSuffix(line, "\n"))
		}
		if err != nil {
			return
		}
	}
}

// say writes one line.
func (w *lineWriter) say(line string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	fmt.Fprintln(w.to, line)
}
