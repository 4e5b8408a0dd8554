package main

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"converger/internal/auth"
	"converger/internal/cluster/clustertest"
	"converger/migrations/pgtest"
)

// fleet is a cluster of processes that can be stopped, killed, halted and started again at the same addresses.
type fleet struct {
	url   string
	nodes []*fleetNode
	ops   *api       // the management API, by the first node
	logs  []*journal // of every process that there was
}

// fleetNode is the place of one process.
type fleetNode struct {
	*program
	fleet   *fleet
	t       testing.TB // the test that the processes may outlive none of
	environ map[string]string
	wrap    []string     // what runs it: ip netns exec …
	away    atomic.Int32 // while it may not be reached
	api     *api         // without a credential
}

// newFleet starts n nodes. own gives settings of one alone.
func newFleet(t testing.TB, n int, common map[string]string, own func(i int) map[string]string) *fleet {
	t.Helper()
	f := planFleet(t, n, common, own)
	f.startAll(t)
	return f
}

// planFleet is newFleet without the start.
func planFleet(t testing.TB, n int, common map[string]string, own func(i int) map[string]string) *fleet {
	t.Helper()
	f := &fleet{url: pgtest.New(t)}
	var members []string
	for range n {
		members = append(members, clustertest.FreeAddress(t))
	}
	uploads := t.TempDir()
	for i := range n {
		e := serveEnv(f.url, map[string]string{
			"UPLOAD_DIR": uploads, "LISTEN": clustertest.FreeAddress(t), "CLUSTER_BIND": members[i], "CLUSTER_PEERS": strings.Join(members, ","),
			"CLUSTER_NODE_NAME": fmt.Sprint("node", i+1), "METRICS_ALLOWED_IPS": "127.0.0.1", "POOL_SIZE": "5", "WORKERS": "4",
		})
		maps.Copy(e, common)
		if own != nil {
			maps.Copy(e, own(i))
		}
		f.nodes = append(f.nodes, &fleetNode{fleet: f, t: t, environ: e, api: newAPI(t, "http://"+e["LISTEN"])})
	}
	return f
}

func (f *fleet) startAll(t testing.TB) {
	t.Helper()
	for _, n := range f.nodes {
		n.start()
	}
	for _, n := range f.nodes {
		n.ready(t)
	}
	f.whole(t, len(f.nodes))
	f.ops = management(t, f.nodes[0].program, f.url)
}

// whole waits until every node sees so many.
func (f *fleet) whole(t testing.TB, want int) {
	t.Helper()
	for _, n := range f.nodes {
		eventually(t, patience, fmt.Sprint(want, " members in the eyes of ", n.environ["CLUSTER_NODE_NAME"]), func() bool {
			return metric(t, n.base, visible) == strconv.Itoa(want)
		})
	}
}

// restart ends the process by a signal and starts another in its place, which takes requests when restart returns.
func (n *fleetNode) restart(t testing.TB, by syscall.Signal) {
	t.Helper()
	n.away.Add(1)
	defer n.away.Add(-1)
	n.end(t, by)
	n.start()
	n.ready(t)
}

// start starts the process, in whatever place it has.
func (n *fleetNode) start() {
	n.program = spawnCommand(n.t, n.environ, slices.Concat(n.wrap, []string{os.Args[0], "serve"}))
	n.fleet.logs = append(n.fleet.logs, n.log)
}

// end ends the process by a signal and waits for it. One that is asked to stop stops well.
func (n *fleetNode) end(t testing.TB, by syscall.Signal) {
	t.Helper()
	_ = n.process.Signal(by)
	select {
	case <-n.ended:
	case <-time.After(patience):
		t.Fatalf("%v does not end it:\n%s", by, n.log)
	}
	if by == syscall.SIGTERM && n.err != nil {
		t.Errorf("asked to stop it ended with %v:\n%s", n.err, n.log)
	}
	// The kernel gives the ports back with the process; nobody else takes them: see clustertest.FreeAddress.
}

// number reads a metric.
func (n *fleetNode) number(t testing.TB, series string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(metric(t, n.base, series), 64)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// sum reads a metric of all nodes.
func (f *fleet) sum(t testing.TB, series string) (total float64) {
	t.Helper()
	for _, n := range f.nodes {
		total += n.number(t, series)
	}
	return total
}

// limit gives a tenant a limit of its own, and waits until it is in force on every node.
func (f *fleet) limit(t testing.TB, c customer, bucket string, limit int, scale time.Duration) {
	t.Helper()
	f.ops.call(t, 200, "PUT", "/api/v1/management/tenants/"+c.id+"/limits/"+bucket, object(map[string]any{"limit": limit, "scale_ms": scale.Milliseconds()}))
	want := fmt.Sprintf(`"%s";q=%d;w=%d`, bucket, limit, int(scale.Seconds()))
	for _, n := range f.nodes {
		eventually(t, patience, "a limit to be in force", func() bool {
			a, err := n.api.try(t.Context(), "GET", "/api/v1/conversations?limit=1", "", "X-Api-Key", c.api.header.Get("X-Api-Key"))
			return err == nil && a.header.Get("RateLimit-Policy") == want
		})
	}
}

// press is one kind of request that is sent to every node again and again, and what became of it.
type press struct {
	good   int // the status of an admission
	window time.Duration

	stopped chan struct{}
	stop    func()
	callers sync.WaitGroup

	mu       sync.Mutex
	admitted int
	refused  int
	broken   int           // connections, to a node that was away
	windows  map[int64]int // admitted, by the window that the deciding node counted them in
	offered  map[int64]int
	excused  map[int64]bool // windows in which a fault began: twice a limit may be admitted
	slowest  time.Duration
	faults   []string
}

// startPress sends the request to each node, a pause after each answer.
func (f *fleet) startPress(t testing.TB, good int, window, pause time.Duration, method, path, body string, headers ...string) *press {
	p := &press{good: good, window: window, stopped: make(chan struct{}), windows: map[int64]int{}, offered: map[int64]int{}, excused: map[int64]bool{}}
	p.stop = sync.OnceFunc(func() {
		close(p.stopped)
		p.callers.Wait()
	})
	for _, n := range f.nodes {
		p.callers.Go(func() {
			for {
				p.send(n, method, path, body, headers...)
				select {
				case <-p.stopped:
					return
				case <-time.After(pause):
				}
			}
		})
	}
	t.Cleanup(p.stop)
	return p
}

func (p *press) send(n *fleetNode, method, path, body string, headers ...string) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	away, sent := n.away.Load(), time.Now()
	a, err := n.api.try(ctx, method, path, body, headers...)
	took := time.Since(sent)
	away += n.away.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case err != nil && away > 0:
		p.broken++
	case err != nil:
		p.faults = append(p.faults, fmt.Sprintf("%s: %v", n.environ["CLUSTER_NODE_NAME"], err))
	case a.status == p.good, a.status == http.StatusTooManyRequests:
		if away == 0 {
			p.slowest = max(p.slowest, took)
		}
		w := p.windowOf(a, sent.Add(took))
		p.offered[w]++
		if a.status != p.good {
			p.refused++
			break
		}
		p.admitted++
		p.windows[w]++
	default:
		p.faults = append(p.faults, fmt.Sprintf("%s: %s", n.environ["CLUSTER_NODE_NAME"], a))
	}
}

// windowOf finds the window in which a request was decided on: the answer says in how many seconds it ends, rounded up.
func (p *press) windowOf(a answer, at time.Time) int64 {
	_, rest, _ := strings.Cut(a.header.Get("RateLimit"), ";t=")
	left, err := strconv.Atoi(rest)
	if err != nil || p.window < 2*time.Second {
		return 0
	}
	return at.Add(time.Duration(left)*time.Second).UnixMilli()/p.window.Milliseconds() - 1
}

// count is what has been admitted and refused so far.
func (p *press) count() (admitted, refused int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.admitted, p.refused
}

// awaitWindows waits until the load was counted in so many windows.
func (p *press) awaitWindows(t testing.TB, n int) {
	t.Helper()
	eventually(t, patience, "enough windows", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		return len(p.offered) >= n
	})
}

// awaitMore waits for n more windows.
func (p *press) awaitMore(t testing.TB, n int) {
	t.Helper()
	p.mu.Lock()
	have := len(p.offered)
	p.mu.Unlock()
	p.awaitWindows(t, have+n)
}

// excuse says that nodes have just been cut off: until they know, each may spend what the others spend too, in this window
// and the one that follows.
func (p *press) excuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now().UnixMilli() / p.window.Milliseconds()
	for w := now - 1; w <= now+1; w++ {
		p.excused[w] = true
	}
}

// healthy fails the test if there was an answer that is neither an admission nor a refusal, or a node that was there did
// not answer.
func (p *press) healthy(t testing.TB, what string) {
	t.Helper()
	p.stop()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.faults[:min(len(p.faults), 10)] {
		t.Errorf("%s: %s", what, f)
	}
	t.Logf("%s: %d admitted, %d refused, %d to a node that was away; slowest %s", what, p.admitted, p.refused, p.broken, p.slowest.Round(time.Millisecond))
}

// inWindows fails the test if more than limit was admitted in a window, beyond a part of it and a number of requests, or
// nothing was though much was offered: nobody is unlimited, and nobody is locked out. The first and last window are only
// in part of this load.
func (p *press) inWindows(t testing.TB, what string, limit int, part float64, more int) {
	t.Helper()
	p.stop()
	order := slices.Sorted(maps.Keys(p.offered))
	var line strings.Builder
	for i, w := range order {
		fmt.Fprintf(&line, " %d/%d", p.windows[w], p.offered[w])
		if i == 0 || i == len(order)-1 {
			continue
		}
		most := int(float64(limit)*(1+part)) + more
		if p.excused[w] {
			most += limit
		}
		if got := p.windows[w]; got > most {
			t.Errorf("%s: %d admitted in a window of %s, of a limit of %d; want at most %d", what, got, p.window, limit, most)
		}
		if p.windows[w] == 0 && p.offered[w] > limit {
			t.Errorf("%s: of %d requests in a window of %s none was admitted", what, p.offered[w], p.window)
		}
	}
	t.Logf("%s: admitted of offered in windows of %s, limit %d:%s", what, p.window, limit, line.String())
}

// cheapPasswords lets a program that tests run hash at a cost that is no protection, and quick under the race detector.
func cheapPasswords() {
	i := slices.IndexFunc(settings, func(s setting) bool { return s.name == "BCRYPT_COST" })
	settings[i].set = intBetween(func(c *Config) *int { return &c.BcryptCost }, auth.MinCost, 16)
}
