package main

import (
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"converger/internal/ratelimit/redis/redistest"
	"converger/migrations/pgtest"
)

// Two nodes that know nothing of each other count at one Redis. It is killed under load and comes back empty, or stops to
// answer for a while: nobody meets a 5xx, the limit holds over all of it, and the nodes say what is the matter.
func TestLimitsAtRedis(t *testing.T) {
	t.Parallel()
	t.Run("killed", func(t *testing.T) {
		t.Parallel()
		limitsAtRedis(t, (*redistest.Server).Kill, func(r *redistest.Server) { r.Restart(t) })
	})
	t.Run("frozen", func(t *testing.T) {
		t.Parallel()
		limitsAtRedis(t, func(r *redistest.Server) { r.Freeze(t) }, func(r *redistest.Server) { r.Thaw(t) })
	})
}

func limitsAtRedis(t *testing.T, breaks, mends func(*redistest.Server)) {
	t.Helper()
	const limit = 240
	server := redistest.Start(t, "--requirepass", "canary")
	url := pgtest.New(t)
	node := func() *program {
		return spawn(t, serveEnv(url, map[string]string{
			"UPLOAD_DIR": t.TempDir(), "METRICS_ALLOWED_IPS": "127.0.0.1",
			"RATE_LIMIT_BACKEND": "redis", "RATE_LIMIT_REDIS_URL": "redis://:canary@" + server.Addr(),
			"RATE_LIMITS": `{"activity_create":{"limit":` + strconv.Itoa(limit) + `,"scale_ms":86400000,"algorithm":"sliding_window"}}`,
		}), "serve").ready(t)
	}
	nodes := []*program{node(), node()}
	for _, n := range nodes {
		eventually(t, patience, "two nodes to be known", func() bool { return metric(t, n.base, "converger_rate_limit_redis_nodes") == "2" })
	}
	c := newCustomer(t, management(t, nodes[0], url), "Tenant")
	chat := c.newConversation(t, c.newChannel(t, "echo", "outbound", nil).ID)

	var admitted, refused atomic.Int64
	stop := make(chan struct{})
	var callers sync.WaitGroup
	var once sync.Once
	end := func() { once.Do(func() { close(stop) }); callers.Wait() }
	t.Cleanup(end)
	for i := range 6 {
		by := newAPI(t, nodes[i%2].base, "X-Api-Key", c.api.header.Get("X-Api-Key"))
		callers.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(2 * time.Millisecond):
				}
				a, err := by.try(t.Context(), "POST", "/api/v1/conversations/"+chat+"/activities", `{"text":"once more"}`)
				switch {
				case err != nil:
					t.Error(err)
				case a.status == http.StatusCreated:
					admitted.Add(1)
				case a.status == http.StatusTooManyRequests:
					refused.Add(1)
				default:
					t.Errorf("POST: %s", a)
				}
			}
		})
	}
	ready := func(n *program) string {
		return string(newAPI(t, n.base).call(t, http.StatusOK, "GET", "/health/ready", "").body)
	}
	more := func(what string, c *atomic.Int64, n int64) {
		t.Helper()
		from := c.Load()
		eventually(t, patience, what, func() bool { return c.Load() >= from+n })
	}
	more("a third to be admitted", &admitted, limit/3)
	breaks(server)
	for _, n := range nodes {
		eventually(t, patience, "the breaker to open", func() bool { return metric(t, n.base, "converger_rate_limit_redis_breaker_state") == "2" })
		eventually(t, patience, "readiness to say so", func() bool { return strings.Contains(ready(n), `"degraded":["redis: Redis can't be asked (`) })
		eventually(t, patience, "decisions without Redis to be counted", func() bool {
			return metric(t, n.base, `converger_rate_limit_fallbacks_total{backend="redis",reason="open"}`) != "0"
		})
	}
	more("the shares to be used up", &refused, 200)
	ops := management(t, nodes[1], url)
	const usage = "/api/v1/management/rate_limits/usage?bucket=activity_create&subject=Tenant"
	type told struct {
		Error *string
		Used  *int
		Own   *int `json:"counted_here"`
	}
	use := data[struct {
		Used      *int
		Complete  bool
		Detail    string
		Elsewhere int `json:"nodes_elsewhere"`
		Nodes     []told
	}](t, ops.call(t, http.StatusOK, "GET", usage, ""))
	if use.Used != nil || use.Complete || !strings.Contains(use.Detail, "unknown while Redis can't be asked") || use.Elsewhere != 1 || len(use.Nodes) != 1 ||
		use.Nodes[0].Used != nil || use.Nodes[0].Error == nil || use.Nodes[0].Own == nil || *use.Nodes[0].Own < 1 {
		t.Errorf("a look-up without Redis: %+v", use)
	}
	if got := admitted.Load(); got > limit || got < limit/2 { // on a busy machine many calls are in doubt, and count
		t.Errorf("without Redis %d of a limit of %d were admitted", got, limit)
	}
	mends(server)
	for _, n := range nodes {
		eventually(t, patience, "readiness to come back", func() bool { return !strings.Contains(ready(n), "degraded") })
		eventually(t, patience, "the breaker to close", func() bool { return metric(t, n.base, "converger_rate_limit_redis_breaker_state") == "0" })
	}
	more("refusals afterwards", &refused, 200)
	end()
	if got := admitted.Load(); got > limit {
		t.Errorf("%d of a limit of %d were admitted in all", got, limit)
	}
	for _, n := range nodes {
		if log := n.log.String(); strings.Contains(log, "canary") || strings.Contains(log, `"level":"ERROR"`) ||
			!strings.Contains(log, "deciding with a share of each limit") || !strings.Contains(log, "Redis answers again") {
			t.Errorf("the log of an outage:\n%s", log)
		}
	}
}
