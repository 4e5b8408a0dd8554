package limits

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"converger/internal/loadtest/hub"
	"converger/internal/loadtest/procstat"
	"converger/internal/loadtest/wire"
)

var (
	// ErrNotKept is the verdict of a run in which a limit was not kept as promised.
	ErrNotKept = errors.New("the limit was not kept as promised: see the verdict above")
	// ErrSilent is a node that does not say when it decided.
	ErrSilent = errors.New("the node does not say when it decided (Converger-Decided-At), so nobody can tell in which window: start it with RATE_LIMIT_TELL_TIME=true for the time of the measurement")
	// ErrApart is a node that does not see the others.
	ErrApart = errors.New("the nodes are not one cluster")
)

const (
	namePrefix = "loadtest limits " // of the tenants of runs, so that operators know them

	setupPatience = 15 * time.Second // until every node knows the tenant and sees the others
	restPatience  = time.Minute      // for putting the tenant to rest
	readPatience  = 5 * time.Second  // for /metrics

	// path asks for a conversation whose id is none: it spends one of api_read, and is then a 400 without the database.
	path = "/api/v1/conversations/-"

	step = time.Millisecond // between two looks at what is due
)

// run is one run.
type run struct {
	o       Options
	report  *Report
	targets []wire.Target
	head    string // header lines of each request

	mu     sync.Mutex // guards what follows
	tally  Tally
	total  Window // of tally
	errors map[string]int64
	behind int64
}

// Run sets up a tenant with the limit, loads the nodes, and puts the tenant to rest. When ctx ends before its time, the
// report tells what was measured until then, and that is no error. Errors, beside those of setting up (ErrSilent and
// ErrApart among them): ErrNotKept; the report is there then.
func Run(ctx context.Context, o Options) (report *Report, err error) {
	targets, err := o.validate(ctx)
	if err != nil {
		return nil, err
	}
	name := strings.ToLower(rand.Text()[:6])
	r := &run{o: o, targets: targets, errors: map[string]int64{}, report: &Report{
		Run: name, Limit: o.Limit, ScaleMs: o.Scale.Milliseconds(), Algorithm: o.Algorithm, Burst: o.Burst, Load: o.Load, Factor: o.Factor,
		Settling: o.Load.Settling(),
	}}
	for _, n := range o.Nodes {
		r.report.Nodes = append(r.report.Nodes, n.Base)
	}
	tenant, err := o.Nodes[0].NewTenant(ctx, namePrefix+name)
	defer func() { // also after an error and after a Ctrl-C
		remains := o.rest(ctx, tenant)
		if report == nil {
			fmt.Fprintln(o.Progress, remains)
			return
		}
		report.WhatRemains = remains
	}()
	if err != nil {
		return nil, fmt.Errorf("set up: %w", err)
	}
	if err := r.setUp(ctx, tenant); err != nil {
		return nil, err
	}
	ahead, err := r.ahead(ctx, tenant)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(o.Progress, "Run %s: %s. Ctrl-C ends it and prints what was measured.\n", name, r.report.subject())
	r.measure(ctx, ahead)
	if k := r.report.Kept; k != nil && !*k {
		err = ErrNotKept
	}
	return r.report, err
}

// setUp gives the tenant its limit, and waits until every node enforces it and sees the others.
func (r *run) setUp(ctx context.Context, t *hub.Tenant) error {
	rule := map[string]any{"limit": r.o.Limit, "scale_ms": r.o.Scale.Milliseconds(), "algorithm": r.o.Algorithm}
	if r.o.Burst > 0 {
		rule["burst"] = r.o.Burst
	}
	if err := r.o.Nodes[0].Operate(ctx, http.MethodPut, "/tenants/"+t.ID+"/limits/api_read", rule, nil); err != nil {
		return fmt.Errorf("set up: %w", err)
	}
	r.head = "X-Api-Key: " + t.APIKey + "\r\nAccept: application/json\r\n"
	for i, n := range r.o.Nodes {
		last := "no answer"
		err := hub.Until(ctx, setupPatience, func() (bool, error) {
			h, status, err := probe(ctx, n, t)
			switch {
			case err != nil:
				return false, err
			case status != http.StatusBadRequest && status != http.StatusTooManyRequests:
				last = fmt.Sprintf("HTTP %d", status) // it has not heard of the key
				return false, nil
			case !strings.HasPrefix(h.Get("RateLimit-Policy"), fmt.Sprintf(`"api_read";q=%d;`, r.o.quota())):
				last = fmt.Sprintf("its limit is %s", h.Get("RateLimit-Policy"))
				return false, nil
			case h.Get(wire.DecidedAt) == "":
				return false, ErrSilent
			}
			return true, nil
		})
		if err != nil {
			if errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("it does not enforce the limit of the run's tenant after %s (%s): is it a node of the same hub?", setupPatience, last)
			}
			return fmt.Errorf("node %d, %s: %w", i+1, n.Base, err)
		}
	}
	if len(r.o.Nodes) == 1 {
		return nil
	}
	var seen reading
	err := hub.Until(ctx, setupPatience, func() (_ bool, err error) {
		if seen, err = readNodes(ctx, r.o.Nodes, r.o.MetricsToken); err != nil {
			r.report.NoMetrics = err.Error()
			return true, nil //nolint:nilerr // nobody knows, then, and the report says so
		}
		return int(seen.members) >= len(r.o.Nodes), nil
	})
	if errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("%w: %d are to be measured, and one of them sees %.0f, itself included (/health/ready says more; are DNS_CLUSTER_QUERY or CLUSTER_PEERS set?)",
			ErrApart, len(r.o.Nodes), seen.members)
	}
	return err
}

// probe spends one request of the budget, by net/http, which reads all headers.
func probe(ctx context.Context, n *hub.Client, t *hub.Tenant) (http.Header, int, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, n.Base+path, http.NoBody)
	if err != nil {
		return nil, 0, err
	}
	req.Header.Set("X-Api-Key", t.APIKey)
	resp, err := n.HTTP.Do(req)
	if err != nil {
		return nil, 0, err
	}
	return resp.Header, resp.StatusCode, resp.Body.Close()
}

// ahead is how far the nodes' clock is ahead of this machine's, to half the time of the quickest of a few requests.
func (r *run) ahead(ctx context.Context, t *hub.Tenant) (time.Duration, error) {
	best, ahead := time.Hour, time.Duration(0)
	for range 5 {
		began := time.Now()
		h, _, err := probe(ctx, r.o.Nodes[0], t)
		if err != nil {
			return 0, err
		}
		took := time.Since(began)
		decided, err := strconv.ParseInt(h.Get(wire.DecidedAt), 10, 64)
		if err != nil {
			return 0, ErrSilent
		}
		if took < best {
			best, ahead = took, time.UnixMilli(decided).Sub(began.Add(took/2))
		}
	}
	return ahead, nil
}

// measure runs the load from the edge of a window on and fills in the report.
func (r *run) measure(ctx context.Context, ahead time.Duration) {
	before, noMetrics := r.read(ctx)
	theirs := time.Now().Add(ahead)
	first := WindowAt(theirs.UnixMilli(), r.report.ScaleMs) + 1
	edge := time.UnixMilli(first * r.report.ScaleMs)
	if edge.Sub(theirs) < 20*time.Millisecond {
		first++
		edge = edge.Add(r.o.Scale)
	}
	began := time.Now().Add(edge.Sub(theirs))
	waits := procstat.NewWaits(r.o.PIDs...)
	watching, watched := context.WithCancel(ctx)
	var watcher sync.WaitGroup
	watcher.Go(func() { _ = waits.Run(watching) }) // it has no errors
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.load(ctx, began)
	}()
	r.follow(done, began)
	took := time.Since(began)
	watched()
	watcher.Wait()
	after, err := r.read(ctx)
	if noMetrics == nil {
		noMetrics = err
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.report
	p.Seconds = took.Seconds()
	p.Interrupted = ctx.Err() != nil
	windows := r.o.windows()
	if p.Interrupted {
		windows = max(0, min(windows, int64(took/r.o.Scale)))
	}
	p.Figures = r.tally.Figures(r.o.Limit, first+min(int64(p.Settling), windows), first+windows)
	p.Rate = float64(r.total.Admitted+r.total.Refused) / max(p.Seconds, 1e-3)
	p.Behind, p.Errors = r.behind, maps.Clone(r.errors)
	if noMetrics != nil {
		p.NoMetrics = noMetrics.Error()
	} else {
		per := float64(len(r.o.Nodes)) * took.Seconds()
		p.Reports, p.Messages, p.Bytes = (after.reports-before.reports)/per, (after.batches-before.batches)/per, (after.bytes-before.bytes)/per
		p.Delay = after.delay(before)
	}
	p.Delay.Wait = float64(waits.Longest().Microseconds()) / 1000
	p.judge(Promised(r.o.Algorithm, r.o.Limit, r.o.Scale, r.o.Load, r.o.Factor, len(r.o.Nodes)))
}

func (r *run) read(ctx context.Context) (reading, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), readPatience)
	defer cancel()
	return readNodes(ctx, r.o.Nodes, r.o.MetricsToken)
}

// load sends what is due, to all nodes side by side, and ends with the run's time or with ctx.
func (r *run) load(ctx context.Context, began time.Time) {
	sending, cancel := context.WithDeadline(ctx, began.Add(r.o.Duration))
	defer cancel()
	var senders, callers sync.WaitGroup
	for i, target := range r.targets {
		// What waits is at most what a tenth of a window may bring, and a little.
		queue := make(chan struct{}, 100+int(r.o.Factor*float64(r.o.Limit)/10))
		senders.Go(func() {
			defer close(queue)
			r.send(sending, i, began, queue)
		})
		for range r.o.Callers {
			callers.Go(func() { r.call(ctx, sending, target, queue) })
		}
	}
	senders.Wait()
	callers.Wait()
}

// send queues what is due at node i.
func (r *run) send(ctx context.Context, i int, began time.Time, queue chan<- struct{}) {
	arrivals := NewArrivals(r.o.Load, mathrand.New(mathrand.NewPCG(mathrand.Uint64(), uint64(i))))
	tick := time.NewTicker(step)
	defer tick.Stop()
	for last := 0.0; ; {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := time.Since(began).Seconds() / r.o.Scale.Seconds()
		if now <= 0 {
			continue
		}
		due := arrivals.Next(float64(r.o.Limit) * r.o.Load.Due(i, len(r.targets), last, now, r.o.Factor))
		last = now
		for k := range due {
			select {
			case queue <- struct{}{}:
				continue
			default:
			}
			r.mu.Lock()
			r.behind += int64(due - k)
			r.mu.Unlock()
			break
		}
	}
}

// call sends what is queued over one connection until sending has ended. What is under way then is awaited, unless ctx has
// ended: its node may have counted it.
func (r *run) call(ctx, sending context.Context, target wire.Target, queue <-chan struct{}) {
	c := wire.NewCaller(target)
	defer c.Close()
	defer context.AfterFunc(ctx, c.Abort)()
	for range queue {
		if sending.Err() != nil {
			return // the rest was due at the very end
		}
		a, err := c.Do(ctx, http.MethodGet, path, r.head, nil)
		if err != nil && ctx.Err() != nil {
			return
		}
		r.note(a, err)
	}
}

// note counts an answer.
func (r *run) note(a wire.Answer, err error) {
	admitted := err == nil && a.Status == http.StatusBadRequest
	refused := err == nil && a.Status == http.StatusTooManyRequests
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case (admitted || refused) && a.DecidedAt > 0:
		r.tally.Add(WindowAt(a.DecidedAt, r.report.ScaleMs), admitted)
		if admitted {
			r.total.Admitted++
		} else {
			r.total.Refused++
		}
	default:
		what := strings.TrimSpace(fmt.Sprintf("HTTP %d %s", a.Status, a.Code))
		if err != nil {
			what = wire.Reason(err)
		}
		r.errors[what]++
	}
}

// follow prints lines of progress until done.
func (r *run) follow(done <-chan struct{}, began time.Time) {
	tick := time.NewTicker(r.o.Every)
	defer tick.Stop()
	last, lastAt := Window{}, began
	for {
		select {
		case <-done:
			return
		case <-tick.C:
		}
		now := time.Now()
		if now.Before(began) {
			continue
		}
		r.mu.Lock()
		total, behind := r.total, r.behind
		failed := int64(0)
		for _, n := range r.errors {
			failed += n
		}
		r.mu.Unlock()
		span := now.Sub(lastAt).Seconds()
		fmt.Fprintf(r.o.Progress, "[%4.0f s] %7.0f/s admitted, %7.0f/s refused; the limit is %.0f/s; %d not sent, %d errors\n", now.Sub(began).Seconds(),
			float64(total.Admitted-last.Admitted)/span, float64(total.Refused-last.Refused)/span, float64(r.o.Limit)/r.o.Scale.Seconds(), behind, failed)
		last, lastAt = total, now
	}
}

// rest revokes the tenant's key and suspends it, and says what remains.
func (o Options) rest(ctx context.Context, t *hub.Tenant) string {
	switch {
	case t == nil:
		return "Nothing was made on the hub."
	case o.Started:
		return "The nodes and their database were started for this run and are removed."
	case o.Keep:
		return fmt.Sprintf("The run's tenant (%s) is kept, with its key and its limit.", t.ID)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restPatience)
	defer cancel()
	var all []error
	if t.KeyID != "" {
		all = append(all, o.Nodes[0].Operate(ctx, http.MethodPost, "/tenants/"+t.ID+"/keys/"+t.KeyID+"/revoke", nil, nil))
	}
	all = append(all, o.Nodes[0].Operate(ctx, http.MethodPost, "/tenants/"+t.ID+"/suspend", nil, nil))
	if err := errors.Join(all...); err != nil {
		return fmt.Sprintf("NOT CLEANED UP: suspend the run's tenant (%s) by hand: %v", t.ID, err)
	}
	return fmt.Sprintf("The run's tenant (%s) is suspended and its key revoked.", t.ID)
}
