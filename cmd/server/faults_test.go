package main

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"converger/internal/cluster/clustertest"
)

// The requests that the faults are tried on: a list is counted by every node, a token by one.
const (
	listPath, tokenPath = "/api/v1/conversations?limit=1", "/api/v1/converger/tokens/generate"
	tokenBody           = `{"user":{"id":"ada"}}`
	day                 = 24 * time.Hour
	tokenLimit          = `{"token_generate":{"limit":10,"scale_ms":86400000}}`
	tokenShare          = 4 // of three nodes
	floodLimit          = 30
	floodWindow         = 2 * time.Second
)

// fallbacks counts the decisions of nodes that were taken without the owner of a key.
func (f *fleet) fallbacks(t testing.TB) (total float64) {
	t.Helper()
	for _, reason := range []string{"timeout", "unreachable", "busy", "refused"} {
		total += f.sum(t, `converger_rate_limit_fallbacks_total{backend="owner",reason="`+reason+`"}`)
	}
	return total
}

// missed tells whether any node, of those too that are gone, decided without the owner of a key: on a busy machine one that
// is well may take too long.
func (f *fleet) missed() bool {
	return slices.ContainsFunc(f.logs, func(j *journal) bool {
		line, _ := j.find("the owner of a key can't be asked")
		return line != ""
	})
}

// tenant makes a tenant whose requests are limited so.
func (f *fleet) tenant(t testing.TB, name string, limit int, scale time.Duration) (c customer, key []string) {
	t.Helper()
	c = newCustomer(t, f.ops, name)
	f.limit(t, c, "api_read", limit, scale)
	return c, []string{"X-Api-Key", c.api.header.Get("X-Api-Key")}
}

// exhaust sends a request to one node after the other until all refuse it, and returns how often it was admitted.
func (f *fleet) exhaust(t testing.TB, method, path, body string, headers ...string) (admitted int) {
	t.Helper()
	eventually(t, patience, "all nodes to refuse "+path, func() bool {
		refusals := 0
		for _, n := range f.nodes {
			a, err := n.api.try(t.Context(), method, path, body, headers...)
			switch {
			case err != nil:
				t.Fatal(err)
			case a.status == http.StatusOK, a.status == http.StatusCreated:
				admitted++
			case a.status == http.StatusTooManyRequests:
				refusals++
			default:
				t.Fatalf("%s %s: %s", method, path, a)
			}
		}
		return refusals == len(f.nodes)
	})
	return admitted
}

// startFlood sends many times its limit to every node, and startCalm a few requests of somebody who keeps to it.
func (f *fleet) startFlood(t testing.TB) *press {
	t.Helper()
	_, key := f.tenant(t, "Flood", floodLimit, floodWindow)
	return f.startPress(t, http.StatusOK, floodWindow, 10*time.Millisecond, "GET", listPath, "", key...)
}

func (f *fleet) startCalm(t testing.TB) *press {
	t.Helper()
	_, key := f.tenant(t, "Calm", 300, floodWindow)
	return f.startPress(t, http.StatusOK, floodWindow, 100*time.Millisecond, "GET", listPath, "", key...)
}

// within judges a flood and who is calm beside it: no error, nobody unlimited, nobody locked out. A node that was killed may
// cost a tenth of a limit; more is what may be spent twice beside that, see heldBack.
func within(t testing.TB, flood, calm *press, more int) {
	t.Helper()
	flood.awaitWindows(t, 5)
	flood.healthy(t, "the flood")
	calm.healthy(t, "the calm")
	flood.inWindows(t, "the flood", floodLimit, 0.1, more)
	if _, refused := calm.count(); refused != 0 {
		t.Errorf("%d requests of a tenant within its limit were refused", refused)
	}
}

// heldBack is how much of a flood may come between a decision and the others' knowledge of it, as slow as messages between
// nodes are on this machine.
func (f *fleet) heldBack(t testing.TB, flood *press) int {
	t.Helper()
	slowest := f.slowest(t)
	flood.mu.Lock()
	defer flood.mu.Unlock()
	offered := 0
	for _, n := range flood.offered {
		offered = max(offered, n)
	}
	held := int(math.Ceil(slowest*float64(offered)/flood.window.Seconds())) + len(f.nodes) - 1
	t.Logf("99 of 100 messages took %v s at most: %d more may be admitted in a window", slowest, held)
	return held
}

// slowest is the time in seconds in which 99 of 100 messages came to another node, in the bounds of the histogram.
func (f *fleet) slowest(t testing.TB) (slowest float64) {
	t.Helper()
	for _, n := range f.nodes {
		page := newAPI(t, n.base).call(t, http.StatusOK, "GET", "/metrics", "")
		var bounds, counts []float64 // cumulative, the last bound is +Inf
		for line := range strings.Lines(string(page.body)) {
			rest, ok := strings.CutPrefix(line, `converger_cluster_message_delay_seconds_bucket{le="`)
			if !ok {
				continue
			}
			bound, count, _ := strings.Cut(strings.TrimSpace(rest), `"} `)
			le, err := strconv.ParseFloat(bound, 64)
			if err != nil {
				t.Fatal(err)
			}
			c, err := strconv.ParseFloat(count, 64)
			if err != nil {
				t.Fatal(err)
			}
			bounds, counts = append(bounds, le), append(counts, c)
		}
		for i := range bounds {
			if counts[i] >= 0.99*counts[len(counts)-1] {
				slowest = max(slowest, min(bounds[i], floodWindow.Seconds()))
				break
			}
		}
	}
	return slowest
}

// One cluster that is restarted node by node, of which a node is killed, and at whose addresses strangers turn up.
func TestRestartsUnderLoad(t *testing.T) {
	t.Parallel()
	f := newFleet(t, 3, map[string]string{
		"CLUSTER_SECRET": testSecretKeyBase, "RATE_LIMITS": tokenLimit}, nil)
	owner, spent := f.tenant(t, "Spent", 60, day)
	bearer := []string{"Authorization", "Bearer " + owner.newChannel(t, "echo", "outbound", nil).Secret}
	if n := f.exhaust(t, "GET", listPath, "", spent...); n > 65 { // one was made to see that the limit is in force, at each node
		t.Errorf("%d requests of a limit of 60 were admitted", n)
	}
	f.exhaust(t, "POST", tokenPath, tokenBody, bearer...)

	// Nodes are restarted one after the other at their addresses, then one is killed and started again. What was spent stays
	// spent, nobody is unlimited in between nor locked out, and nobody meets an error but who calls the node that is away.
	t.Run("restarts", func(t *testing.T) {
		lists := f.startPress(t, http.StatusOK, day, 50*time.Millisecond, "GET", listPath, "", spent...)
		tokens := f.startPress(t, http.StatusOK, day, 50*time.Millisecond, "POST", tokenPath, tokenBody, bearer...)
		flood, calm := f.startFlood(t), f.startCalm(t)
		for i, n := range f.nodes {
			began := time.Now()
			n.restart(t, syscall.SIGTERM)
			t.Logf("node %d stopped and started in %s", i+1, time.Since(began).Round(time.Millisecond))
		}
		f.whole(t, 3)
		before, _ := tokens.count()
		if before > 0 && (!f.missed() || before > tokenShare*len(f.logs)) {
			t.Errorf("%d tokens were admitted in a rolling restart, of a budget that was spent; a node decided without the owner: %v", before, f.missed())
		}
		began := time.Now()
		f.nodes[1].restart(t, syscall.SIGKILL)
		t.Logf("killed and started in %s", time.Since(began).Round(time.Millisecond))
		f.whole(t, 3)
		after, _ := tokens.count()
		t.Logf("%d tokens in the rolling restart, %d when an owner was killed", before, after-before)
		if after-before > tokenShare*len(f.nodes) { // what each has until the dead one is missed
			t.Errorf("%d tokens of a budget that was spent were admitted when a node was killed", after-before)
		}
		lists.healthy(t, "lists")
		tokens.healthy(t, "tokens")
		if n, _ := lists.count(); n != 0 {
			t.Errorf("%d requests were admitted of a budget that was spent", n)
		}
		within(t, flood, calm, f.heldBack(t, flood))
	})

	// A node of another cluster at the address of one that has left, and one that has another secret, are refused, counted, and
	// told of in the log; all say so in their readiness.
	t.Run("strangers", func(t *testing.T) {
		left := f.nodes[2]
		left.end(t, syscall.SIGTERM)
		known := f.nodes[:2]
		before := []float64{known[0].number(t, refusedStrangers), known[1].number(t, refusedStrangers)}
		labelled, wrong := maps.Clone(left.environ), maps.Clone(left.environ)
		labelled["CLUSTER_LABEL"] = "staging"
		wrong["CLUSTER_SECRET"] = testSecretKeyBase[32:] + testSecretKeyBase[:32]
		wrong["LISTEN"], wrong["CLUSTER_BIND"] = clustertest.FreeAddress(t), clustertest.FreeAddress(t)
		strangers := []*program{spawn(t, labelled, "serve"), spawn(t, wrong, "serve")}
		for _, s := range strangers {
			s.ready(t)
			// Unready for the first ten seconds, then ready and degraded.
			if a, err := newAPI(t, s.base).try(t.Context(), "GET", "/health/ready", ""); err != nil || !strings.Contains(string(a.body), "expected peers: none seen of") {
				t.Errorf("a stranger: %v %s", err, a)
			}
		}
		for i, n := range known {
			eventually(t, patience, "strangers to be refused", func() bool { return n.number(t, refusedStrangers) > before[i] })
			eventually(t, patience, "the strangers in readiness", func() bool {
				a := n.api.call(t, http.StatusOK, "GET", "/health/ready", "")
				return strings.Contains(string(a.body), "CLUSTER_LABEL staging, here converger") && strings.Contains(string(a.body), "2 of 3 living nodes can be heard")
			})
			if v := metric(t, n.base, visible); v != "2" {
				t.Errorf("%s members, with strangers", v)
			}
			a, err := n.api.try(t.Context(), "GET", listPath, "", spent...)
			if err != nil || a.status != http.StatusTooManyRequests {
				t.Errorf("of a budget that was spent: %v %s", err, a)
			}
		}
		said := 0
		for line := range strings.Lines(known[0].log.String() + known[1].log.String()) {
			if strings.Contains(line, `"level":"WARN"`) && strings.Contains(line, "CLUSTER_SECRET or CLUSTER_LABEL") {
				said++
			}
		}
		if said < 1 || said > 2*4 { // by gossip and by connections, here and there
			t.Errorf("%d lines in the log for two strangers", said)
		}
		for _, s := range strangers {
			_ = s.process.Signal(syscall.SIGTERM)
			if err := s.result(t); err != nil {
				t.Errorf("a stranger ended with %v:\n%s", err, s.log)
			}
		}
		left.start()
		left.ready(t)
		f.whole(t, 3)
	})

	// A node is halted, counters are reset without it, and it goes on: what it had counted comes back to nobody, and it forgets
	// that itself.
	t.Run("resets", func(t *testing.T) {
		c, key := f.tenant(t, "Forgiven", 60, day)
		channel := c.newChannel(t, "echo", "outbound", nil)
		bearer := []string{"Authorization", "Bearer " + channel.Secret}
		budgets := []struct {
			usage, method, path, body string
			headers                   []string
			limit                     int
		}{
			{"api_read&subject=" + c.id, "GET", listPath, "", key, 60},
			{"token_generate&subject=" + channel.ID, "POST", tokenPath, tokenBody, bearer, 10},
		}
		halted := f.nodes[2]
		for _, b := range budgets {
			f.exhaust(t, b.method, b.path, b.body, b.headers...)
		}
		halted.away.Add(1)
		_ = halted.process.Signal(syscall.SIGSTOP)
		for _, b := range budgets {
			eventually(t, patience, "a reset without the node that is halted", func() bool {
				a := f.ops.call(t, http.StatusOK, "DELETE", "/api/v1/management/rate_limits/usage?bucket="+b.usage, "")
				return data[struct{ Cleared bool }](t, a).Cleared
			})
			if a, err := f.nodes[1].api.try(t.Context(), b.method, b.path, b.body, b.headers...); err != nil || a.status >= 300 {
				t.Errorf("after a reset: %v %s", err, a)
			}
		}
		_ = halted.process.Signal(syscall.SIGCONT)
		halted.away.Add(-1)
		f.whole(t, 3)
		for _, b := range budgets {
			eventually(t, patience, "all nodes to know of the reset of "+b.usage, func() bool {
				seen := data[struct {
					Nodes []struct {
						Used  int
						Error *string
					}
				}](t, f.ops.call(t, http.StatusOK, "GET", "/api/v1/management/rate_limits/usage?bucket="+b.usage, ""))
				all := len(seen.Nodes) == len(f.nodes)
				for i, n := range seen.Nodes {
					if n.Error == nil && n.Used > b.limit/2 && i == 0 { // the first is the one that is asked, which was reset
						t.Errorf("%d of %d are used at a node that was reset", n.Used, b.limit)
					}
					all = all && n.Error == nil && n.Used <= b.limit/5
				}
				return all
			})
			if n := f.exhaust(t, b.method, b.path, b.body, b.headers...); n < b.limit*4/5-1 {
				t.Errorf("%d of %d were admitted after the reset of %s", n, b.limit, b.usage)
			}
		}
	})
}

const refusedStrangers = "converger_cluster_refused_total"

// signIn sends the form to sign in from an address of its own.
func (n *fleetNode) signIn(ctx context.Context, from, email, password string) (answer, error) {
	form := url.Values{"email": {email}, "password": {password}}.Encode()
	return n.api.try(ctx, "POST", "/admin/login", form, "Content-Type", "application/x-www-form-urlencoded", "X-Forwarded-For", from)
}

const (
	passwordHashes = "converger_password_hashes_total"
	exemptAddress  = "10.255.0.1"
	guesses        = 300
)

// guess tries as many wrong passwords at once, from as many addresses, at all nodes in turn. It returns the answers by node.
// begun is closed when the first is there.
func (f *fleet) guess(t testing.TB, net byte, email string, begun chan struct{}) (byNode []map[int]int) {
	t.Helper()
	var mu sync.Mutex
	var all sync.WaitGroup
	first := sync.OnceFunc(func() { close(begun) })
	for range f.nodes {
		byNode = append(byNode, map[int]int{})
	}
	for i := range guesses {
		all.Go(func() {
			n := i % len(f.nodes)
			a, err := f.nodes[n].signIn(t.Context(), fmt.Sprintf("10.%d.%d.%d", net, i/250, i%250+1), email, "not the password")
			first()
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				t.Errorf("a guess at node %d: %v", n+1, err)
			}
			byNode[n][a.status]++
		})
	}
	all.Wait()
	return byNode
}

// unlocked tries the right password of an account that was guessed at since began, and again when it was told to. It fails
// the test unless it is refused now and admitted then.
func unlocked(t testing.TB, n *fleetNode, from, email, password string, began time.Time, window time.Duration) {
	t.Helper()
	a, err := n.signIn(t.Context(), from, email, password)
	if err == nil && a.status == http.StatusSeeOther && time.Since(began) > window {
		t.Logf("this machine was so busy that the lock had ended after %s", time.Since(began))
		return
	}
	if err != nil || a.status != http.StatusTooManyRequests {
		t.Errorf("the right password of a locked account: %v %d", err, a.status)
		return
	}
	wait, err := strconv.Atoi(a.header.Get("Retry-After"))
	if err != nil || wait < 1 || time.Duration(wait)*time.Second > window {
		t.Errorf("it is locked for %q seconds, of a window of %s", a.header.Get("Retry-After"), window)
	}
	time.Sleep(time.Duration(wait) * time.Second) // as a client is told to
	if a, err := n.signIn(t.Context(), from, email, password); err != nil || a.status != http.StatusSeeOther {
		t.Errorf("the right password after the %d seconds that were asked for: %v %d", wait, err, a.status)
	}
}

// startOfWindow waits for the beginning of a window of the clock, so that what follows fits into it.
func startOfWindow(window time.Duration) {
	time.Sleep(time.Until(time.Now().Truncate(window).Add(window + 10*time.Millisecond))) // the moment is what is waited for
}

// mostGuesses is how many verifications five failures in a sliding window allow to a flood: five, and when the window has
// ended, on a machine that took so long, one at once and as many more as have slid out of it.
func mostGuesses(began time.Time, took, window time.Duration) int {
	into := began.Add(took).Sub(began.Truncate(window).Add(window))
	if into < 0 {
		return 5
	}
	return 6 + int(5*into/window)
}

// One cluster whose clocks are off, in which passwords are guessed, and one node of which is halted for five seconds.
func TestGuessesAndHaltsAndWrongClocks(t *testing.T) {
	t.Parallel()
	const window = 12 * time.Second
	offsets := []time.Duration{0, 400 * time.Millisecond, time.Hour}
	f := newFleet(t, 3, map[string]string{
		"BCRYPT_COST": "4", "TRUSTED_PROXIES": "127.0.0.1", "ADMIN_IP_WHITELIST": "10.0.0.0/8",
		"RATE_LIMITS": `{"login_account":{"limit":5,"scale_ms":12000}}`,
	}, func(i int) map[string]string {
		return map[string]string{"CLUSTER_TEST_CLOCK_OFFSET_MS": fmt.Sprint(offsets[i].Milliseconds())}
	})
	passwords := map[string]string{}
	for _, who := range []string{"ada@example.com", "bob@example.com"} {
		p := spawn(t, map[string]string{"DATABASE_URL": f.url, "BCRYPT_COST": "4"}, "admin", "create", who)
		if err := p.result(t); err != nil {
			t.Fatalf("%v: %s", err, p.log)
		}
		passwords[who] = strings.TrimSpace(p.out.String())
	}
	f.ops.call(t, http.StatusCreated, "POST", "/api/v1/management/address_ranges", object(map[string]any{"cidr": exemptAddress + "/32", "kind": "exempt", "note": "tests"}))
	flood, calm := f.startFlood(t), f.startCalm(t)

	for i, n := range f.nodes {
		eventually(t, patience, "the skew in the metrics", func() bool {
			return math.Abs(n.number(t, "converger_cluster_clock_skew_seconds")-offsets[i].Seconds()) < 0.1
		})
		eventually(t, patience, "the skew in readiness", func() bool {
			a := n.api.call(t, http.StatusOK, "GET", "/health/ready", "")
			return strings.Contains(string(a.body), "off the database's") == (offsets[i] != 0)
		})
	}

	// Three hundred guesses at once get five verifications.
	startOfWindow(window)
	hashes, alone := f.sum(t, passwordHashes), f.fallbacks(t)
	began := time.Now()
	byNode := f.guess(t, 1, "ada@example.com", make(chan struct{}))
	verified := int(f.sum(t, passwordHashes) - hashes)
	alone = f.fallbacks(t) - alone
	took := time.Since(began)
	most := mostGuesses(began, took, window)
	if alone > 0 { // on a machine so busy that a healthy owner took longer than half a second
		most *= len(f.nodes)
	}
	wrong := 0
	for i, got := range byNode {
		wrong += got[http.StatusUnauthorized]
		if got[http.StatusUnauthorized]+got[http.StatusTooManyRequests] != guesses/len(f.nodes) {
			t.Errorf("answers of node %d: %v", i+1, got)
		}
	}
	t.Logf("%d guesses were answered within %s", guesses, took.Round(time.Millisecond))
	if verified < 5 || verified > most || wrong != verified {
		t.Errorf("%d of %d guesses were verified and %d said to be wrong, want 5; %v decided without the owner; answers by node: %v", verified, guesses, wrong, alone, byNode)
	}
	if alone == 0 { // else the owner may not know of all five
		unlocked(t, f.nodes[0], "10.9.0.1", "ada@example.com", passwords["ada@example.com"], began, window)
	}

	// The owner of the account is the one that asks nobody about it.
	const asked = "converger_rate_limit_owner_checks_total"
	var asks []float64
	for _, n := range f.nodes {
		before := n.number(t, asked)
		if a, err := n.signIn(t.Context(), exemptAddress, "bob@example.com", passwords["bob@example.com"]); err != nil || a.status != http.StatusSeeOther {
			t.Fatalf("the right password: %v %s", err, a)
		}
		asks = append(asks, n.number(t, asked)-before)
	}
	owner := slices.Index(asks, 0)
	if owner < 0 {
		t.Fatalf("checks asked of other nodes: %v", asks)
	}
	t.Logf("node %d owns the account", owner+1)

	// It is halted while guesses come in, for five seconds. Each node verifies five at most; nobody meets an error.
	halted, held := f.nodes[owner], f.heldBack(t, flood)
	var each []float64
	for _, n := range f.nodes {
		each = append(each, n.number(t, passwordHashes))
	}
	startOfWindow(window)
	began = time.Now()
	begun, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		byNode = f.guess(t, 2, "bob@example.com", begun)
	}()
	<-begun
	halted.halt(t, 5*time.Second)
	resumed := time.Now()
	<-done
	most = mostGuesses(began, time.Since(began), window)
	f.whole(t, 3)
	t.Logf("whole again %s after the halt", time.Since(resumed).Round(time.Millisecond))
	for i, n := range f.nodes {
		verified := int(n.number(t, passwordHashes) - each[i])
		got := byNode[i]
		shed := 0 // what waited in the halted one had waited for too long when it went on: "overloaded"
		if n == halted {
			shed = got[http.StatusServiceUnavailable]
		}
		if verified > most || got[http.StatusUnauthorized] > verified || got[http.StatusUnauthorized]+got[http.StatusTooManyRequests]+shed != guesses/len(f.nodes) {
			t.Errorf("node %d verified %d guesses: %v", i+1, verified, got)
		}
	}
	t.Logf("answers by node: %v", byNode)
	eventually(t, patience, "the right password to be admitted", func() bool {
		a, err := f.nodes[(owner+1)%3].signIn(t.Context(), "10.9.0.2", "bob@example.com", passwords["bob@example.com"])
		return err == nil && a.status == http.StatusSeeOther
	})
	if took := time.Since(resumed); took > 2*window {
		t.Errorf("it was locked for %s after the halt, longer than a window of %s", took, window)
	}
	// The halted one may spend a budget before it hears what has been spent meanwhile.
	within(t, flood, calm, held+floodLimit)
}

// halt stops the process as SIGSTOP does, for a while: it answers nobody, and finds everything changed.
func (n *fleetNode) halt(t testing.TB, long time.Duration) {
	t.Helper()
	n.away.Add(1)
	defer n.away.Add(-1)
	_ = n.process.Signal(syscall.SIGSTOP)
	time.Sleep(long) // the halt is the fault
	_ = n.process.Signal(syscall.SIGCONT)
}
