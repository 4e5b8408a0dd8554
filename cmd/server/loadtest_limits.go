package main

import (
	"cmp"
	"errors"
	"fmt"
	"strings"
	"time"

	loadhub "converger/internal/loadtest/hub"
	"converger/internal/loadtest/limits"
	"converger/internal/ratelimit"
)

// loadtestLimitsCmd runs against nodes that run already, or starts some with a private database.
type loadtestLimitsCmd struct {
	demoFlags
	Nodes        []string `help:"Addresses of the nodes of one cluster, separated by commas; RATE_LIMIT_TELL_TIME=true has to be set on each. Default: the nodes of server dev --nodes." placeholder:"URL"`
	TokenFile    string   `help:"File with an operator token. Default: CONVERGER_TOKEN, or the file in CONVERGER_TOKEN_FILE, then the demo's." type:"path" placeholder:"FILE"`
	MetricsToken string   `help:"The nodes' METRICS_TOKEN, for reports and their delay; default is the environment's."`
	Start        int      `help:"Start so many nodes with a private database, for this run only." placeholder:"N"`
	Backend      string   `help:"With --start: what counts (RATE_LIMIT_BACKEND)." placeholder:"cluster"`
	Program      string   `help:"With --start: the program; default is this one." placeholder:"bin/server" type:"path"`

	Limit     int64         `help:"The limit: requests in a window." default:"1000"`
	Scale     time.Duration `help:"The length of a window." default:"1s"`
	Algorithm string        `help:"fixed_window, sliding_window or token_bucket." default:"fixed_window"`
	Burst     int64         `help:"Of a token bucket; default is the limit."`

	Load     string        `help:"even over the nodes, zipf (skewed), sticky (one node), spike (0.005 of a window at one node), bursts (on and off), cold (a flood after silence) or moving (from node to node)." default:"even"`
	Factor   float64       `help:"How many times the limit is offered." default:"10"`
	Duration time.Duration `help:"Time of the load. Default: as many windows as the load needs to be judged." placeholder:"14s"`
	Callers  int           `help:"Connections to each node." default:"8"`
	Timeout  time.Duration `help:"How long to wait for one answer." default:"10s"`

	JSON  bool          `name:"json" help:"Print the report as JSON."`
	Every time.Duration `help:"Time between lines of progress." default:"2s"`
	Keep  bool          `help:"Leave the run's tenant as it is, instead of suspending it."`
	Yes   bool          `help:"Load nodes on other machines than this one."`
}

// Help says what the short lines can't.
func (loadtestLimitsCmd) Help() string {
	return `It makes a tenant with the limit, sends requests that are decided and answered without the database, and counts each in the window
in which its node has counted it. At the end it tells what was admitted, by how much more than the limit, what was refused though there was room, what the nodes
told each other and how long that was on its way, and whether that is what docs/accuracy.md promises. On a machine that is too busy for reports to arrive in time it
says so and does not judge. It fails if a promise was not kept.

  server loadtest limits --start 3
  server loadtest limits --start 3 --load cold --limit 100
  server loadtest limits --nodes http://127.0.0.1:4000,http://127.0.0.1:4001 --factor 2`
}

func (c loadtestLimitsCmd) Run(e *env) (err error) {
	load, err := limits.ParseLoad(c.Load)
	if err != nil {
		return misused(err.Error())
	}
	o := limits.Options{
		Limit: c.Limit, Scale: c.Scale, Algorithm: c.Algorithm, Burst: c.Burst, Load: load, Factor: c.Factor,
		Duration: cmp.Or(c.Duration, time.Duration(load.Settling()+load.Windows())*c.Scale), Callers: c.Callers, Timeout: c.Timeout,
		Yes: c.Yes, Keep: c.Keep, Progress: e.stderr, Every: c.Every,
	}
	switch {
	case c.Start != 0 && len(c.Nodes) > 0:
		return misused("which nodes? Pass --nodes or --start, not both")
	case c.Start < 0 || c.Start > maxDevNodes:
		return misused(fmt.Sprintf("--start %d: want 1 to %d", c.Start, maxDevNodes))
	case c.Start == 0 && (c.Backend != "" || c.Program != ""):
		return misused("--backend and --program are for nodes that --start starts")
	case c.Start > 0:
		s, err := c.start(e)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, s.stop()) }()
		o.Started = true
		for _, h := range s.hubs {
			o.Nodes, o.PIDs = append(o.Nodes, &h.Client), append(o.PIDs, h.PID())
		}
	default:
		if err := c.find(e, &o); err != nil {
			return err
		}
	}
	report, err := limits.Run(e.ctx, o)
	if report == nil {
		return err
	}
	write := report.Write
	if c.JSON {
		write = report.WriteJSON
	}
	return errors.Join(err, write(e.stdout))
}

// find fills in nodes that run already.
func (c loadtestLimitsCmd) find(e *env, o *limits.Options) error {
	nodes := c.Nodes
	if len(nodes) == 0 {
		d, err := c.read()
		if err != nil {
			return err
		}
		for _, n := range d.Nodes {
			nodes, o.PIDs = append(nodes, n.BaseURL), append(o.PIDs, n.PID)
		}
	}
	if len(nodes) == 0 {
		return misused("which nodes? Pass --nodes URL,URL or --start 3, or run `RATE_LIMIT_TELL_TIME=true server dev --nodes 3` in this folder")
	}
	h, err := managementFlags{demoFlags: c.demoFlags, Server: nodes[0], TokenFile: c.TokenFile}.connect(e)
	if err != nil {
		return err
	}
	o.MetricsToken = cmp.Or(c.MetricsToken, e.getenv("METRICS_TOKEN"))
	client := newHTTPClient()
	for _, n := range nodes {
		o.Nodes = append(o.Nodes, &loadhub.Client{Base: strings.TrimRight(n, "/"), Token: h.token, HTTP: client})
	}
	return nil
}

// start starts nodes that say when they decided.
func (c loadtestLimitsCmd) start(e *env) (*startedHubs, error) {
	settings := []string{"RATE_LIMIT_TELL_TIME=true"}
	if c.Backend != "" {
		if _, ok := ratelimit.ParseBackend(c.Backend); !ok {
			return nil, misused(fmt.Sprintf("--backend: there is no %q", c.Backend))
		}
		settings = append(settings, "RATE_LIMIT_BACKEND="+c.Backend)
	}
	fmt.Fprintf(e.stderr, "Starting %d nodes with a private Postgres …\n", c.Start)
	return startHubs(e, c.Program, func(program, database, dir string) ([]*loadhub.Process, error) {
		return loadhub.NewNodes(e.ctx, program, database, dir, c.Start, settings...)
	})
}
