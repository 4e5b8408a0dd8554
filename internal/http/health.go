package http

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// registerHealthRoutes: probes and metrics stand outside every client's budget.
func (s *server) registerHealthRoutes() {
	s.register(route{method: http.MethodGet, pattern: "/health/live", handle: s.live})
	s.register(route{method: http.MethodGet, pattern: "/health/ready", handle: s.ready})
	s.register(route{method: http.MethodGet, pattern: "/metrics", auth: credentialMetrics, handle: s.showMetrics})
}

const (
	checkTimeout = time.Second
	// checkEvery is how long an answer stands: whoever floods the probe costs the database two pings a second.
	checkEvery = 500 * time.Millisecond
)

// live touches nothing: a database that blinks must not restart every node.
func (s *server) live(*call) (*reply, error) {
	return jsonReply(http.StatusOK, map[string]string{"status": "ok"})
}

// health holds the last answers of the checks.
type health struct {
	mu   sync.Mutex
	at   time.Time
	last []string // by check: "ok" or the reason
}

// run runs the checks side by side, unless that was done a moment ago. Callers that come meanwhile wait for its answer.
func (h *health) run(checks []Check) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.last != nil && time.Since(h.at) < checkEvery {
		return h.last
	}
	// Not the request's own context: the answer is for everybody who waits.
	ctx, cancel := context.WithTimeout(context.Background(), checkTimeout)
	defer cancel()
	answers := make([]string, len(checks))
	var wg sync.WaitGroup
	for i, check := range checks {
		wg.Go(func() {
			answers[i] = "ok"
			if err := check.Run(ctx); err != nil {
				answers[i] = err.Error()
			}
		})
	}
	wg.Wait()
	h.at, h.last = time.Now(), answers
	return answers
}

type readyBody struct {
	Status   string            `json:"status"` // ready, draining or unavailable
	Reasons  []string          `json:"reasons"`
	Degraded []string          `json:"degraded,omitempty"` // shown, and no reason to take traffic away
	Checks   map[string]string `json:"checks"`
}

func (s *server) ready(c *call) (*reply, error) {
	b := s.readiness(c.started)
	status := http.StatusOK
	if b.Status != "ready" {
		status = http.StatusServiceUnavailable
	}
	return jsonReply(status, b)
}

// readiness asks everything that has to be right.
func (s *server) readiness(now time.Time) readyBody {
	b := readyBody{Status: "ready", Reasons: []string{}, Checks: map[string]string{}}
	for i, answer := range s.health.run(s.Checks) {
		check := s.Checks[i]
		b.Checks[check.Name] = answer
		switch {
		case answer == "ok":
		case check.Degrades:
			b.Degraded = append(b.Degraded, check.Name+": "+answer)
		default:
			b.Status = "unavailable"
			b.Reasons = append(b.Reasons, check.Name+": "+answer)
		}
	}
	if s.forwarding.seen(now) {
		b.Degraded = append(b.Degraded, "forwarding: a peer outside TRUSTED_PROXIES sends forwarding headers, which are ignored")
	}
	if s.Draining != nil && s.Draining() {
		b.Status = "draining"
		b.Reasons = append(b.Reasons, "draining: the node is going down")
	}
	return b
}

// showMetrics writes the metrics to whoever has the token or comes from a listed address. With neither configured the
// address does not exist.
func (s *server) showMetrics(c *call) (*reply, error) {
	if s.MetricsToken == "" && len(s.MetricsNets) == 0 || s.Gatherer == nil {
		return nil, newProblem(codeNotFound, "There is nothing at this address.")
	}
	if !isTrusted(c.ip, s.MetricsNets) {
		scheme, given, _ := strings.Cut(c.r.Header.Get("Authorization"), " ")
		// Hashed first: a comparison in constant time still tells the length.
		got, want := sha256.Sum256([]byte(given)), sha256.Sum256([]byte(s.MetricsToken.Reveal()))
		if s.MetricsToken == "" || !strings.EqualFold(scheme, "Bearer") || subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			_, err := s.stranger(c, newProblem(codeInvalidCredential, "Metrics need the token, or a listed address.").
				with("Www-Authenticate", `Bearer realm="converger metrics"`))
			return nil, err
		}
	}
	promhttp.HandlerFor(s.Gatherer, promhttp.HandlerOpts{DisableCompression: true}).ServeHTTP(c, c.r)
	return nil, nil
}
