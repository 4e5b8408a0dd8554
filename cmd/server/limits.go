package main

import (
	"fmt"
	"maps"
	"net/http"
	"strconv"
	"strings"
	"time"
)

type limitsCmd struct {
	Get   limitsGetCmd   `cmd:"" help:"Show a tenant's limits as they are enforced, all or one."`
	Set   limitsSetCmd   `cmd:"" help:"Give a tenant its own limit of a bucket."`
	Unset limitsUnsetCmd `cmd:"" help:"Give a tenant the default limit of a bucket again."`
	Try   limitsTryCmd   `cmd:"" help:"Try a limit against what a tenant asked for in the last hour."`

	Top        limitsTopCmd    `cmd:"" help:"Show who is refused most."`
	Show       limitsShowCmd   `cmd:"" help:"Look up how much of its limit somebody uses, on every node."`
	Demand     limitsDemandCmd `cmd:"" help:"Show who asked for how much in the last hour, admitted or not."`
	ClearUsage limitsClearCmd  `cmd:"" help:"Reset somebody's counter on every node."`
}

var limitColumns = []column{{"BUCKET", "bucket"}, {"IN FORCE", "effective.rate"}, {"OWN", "override.rate"}, {"DEFAULT", "default.rate"},
	{"ALGORITHM", "effective.algorithm"}, {"BURST", "effective.burst"}, {"MODE", "mode"}, {"SET FOR", "for"}}

// limitRow is a limit as a table shows it: rates as limits set takes them, and whether a tenant can have its own.
func limitRow(l members) members {
	l = maps.Clone(l)
	for _, of := range []string{"effective", "override", "default"} {
		rule, ok := l[of].(members)
		if !ok {
			continue
		}
		scale, err := strconv.ParseInt(cell(rule, "scale_ms"), 10, 64)
		if err != nil {
			continue
		}
		rule = maps.Clone(rule)
		rate := cell(rule, "limit") + "/" + shortDuration(time.Duration(scale)*time.Millisecond)
		if cell(rule, "limit") == "0" {
			rate += " (refuses everything)"
		}
		rule["rate"] = rate
		l[of] = rule
	}
	switch {
	case l["mode"] == "channel":
		l["for"] = "each channel"
	case l["overridable"] == true:
		l["for"] = "each tenant"
	default:
		l["for"] = "all tenants"
	}
	return l
}

// shortDuration leaves out what is zero: 1m, not 1m0s.
func shortDuration(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

type limitsGetCmd struct {
	managementFlags
	tenantArg
	Bucket string `arg:"" optional:"" help:"Name of the bucket, such as activity_create; without it all."`
}

func (c limitsGetCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	if c.Bucket != "" {
		return c.changeLimit(e, c.Tenant, c.Bucket, http.MethodGet, nil)
	}
	path, err := h.tenantPath(c.Tenant, "limits")
	if err != nil {
		return err
	}
	found, err := h.whole(path)
	if err != nil {
		return err
	}
	if !h.json {
		for i, l := range found {
			found[i] = limitRow(l)
		}
	}
	return h.showList(found, false, "There are no buckets.", limitColumns...)
}

// rateArgs are a limit as people write it.
type rateArgs struct {
	Bucket    string  `arg:"" help:"Name of the bucket, such as activity_create, see limits get."`
	Rate      string  `arg:"" help:"How many in which time, such as 200/1s or 5000/1m; 0/1s refuses everything."`
	Algorithm *string `help:"How it is counted: fixed_window, sliding_window or token_bucket; by default as the bucket's default is." enum:"fixed_window,sliding_window,token_bucket" placeholder:"NAME"`
	Burst     *int    `help:"Of token_bucket: how many at once after a pause; as many as the limit unless given." placeholder:"N"`
}

// rule is the limit as the API takes it.
func (c rateArgs) rule() (members, error) {
	count, window, _ := strings.Cut(c.Rate, "/")
	limit, err := strconv.ParseInt(count, 10, 64)
	scale, windowErr := time.ParseDuration(window)
	if err != nil || windowErr != nil {
		return nil, misused(fmt.Sprintf("the rate %q must be a number and a time, such as 200/1s or 5000/1m", c.Rate))
	}
	if scale%time.Millisecond != 0 {
		return nil, misused(fmt.Sprintf("the time of the rate %q must be whole milliseconds", c.Rate))
	}
	rule := members{"limit": limit, "scale_ms": scale.Milliseconds()}
	if c.Algorithm != nil {
		rule["algorithm"] = *c.Algorithm
	}
	if c.Burst != nil {
		rule["burst"] = *c.Burst
	}
	return rule, nil
}

type limitsSetCmd struct {
	managementFlags
	tenantArg
	guard
	rateArgs
}

// Help shows examples.
func (limitsSetCmd) Help() string {
	return `Examples:

    server limits set acme activity_create 200/1s
    server limits set acme api_read 5000/1m --algorithm token_bucket --burst 100`
}

func (c limitsSetCmd) Run(e *env) error {
	rule, err := c.rule()
	if err != nil {
		return err
	}
	return c.changeLimit(e, c.Tenant, c.Bucket, http.MethodPut, rule)
}

type limitsUnsetCmd struct {
	managementFlags
	tenantArg
	guard
	Bucket string `arg:"" help:"Name of the bucket, such as activity_create, see limits get."`
}

func (c limitsUnsetCmd) Run(e *env) error {
	return c.changeLimit(e, c.Tenant, c.Bucket, http.MethodDelete, nil)
}

// changeLimit asks for a limit, or for a change of it, and shows it.
func (f managementFlags) changeLimit(e *env, tenant, bucket, method string, in any) error {
	h, err := f.connect(e)
	if err != nil {
		return err
	}
	path, err := h.tenantPath(tenant, "limits", bucket)
	if err != nil {
		return err
	}
	l, err := h.do(method, path, in)
	if err != nil {
		return err
	}
	if !h.json {
		l = limitRow(l)
	}
	return h.show(l, limitColumns...)
}
