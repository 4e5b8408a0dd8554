package main

import (
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"
)

type limitsCmd struct {
	Get   limitsGetCmd   `cmd:"" help:"Show a tenant's limits as they are enforced, all or one."`
	Set   limitsSetCmd   `cmd:"" help:"Give a tenant its own limit of a bucket."`
	Unset limitsUnsetCmd `cmd:"" help:"Give a tenant the default limit of a bucket again."`
}

var limitColumns = []column{{"BUCKET", "bucket"}, {"LIMIT", "effective.limit"}, {"PER MS", "effective.scale_ms"}, {"ALGORITHM", "effective.algorithm"},
	{"BURST", "effective.burst"}, {"MODE", "mode"}, {"DEFAULT", "default.limit"}, {"OWN", "override.limit"}, {"MAY BE OWN", "overridable"}}

type limitsGetCmd struct {
	managementFlags
	tenantArg
	Bucket string `arg:"" optional:"" help:"The bucket; without it all."`
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
	found, _, err := h.list(path, nil, 0)
	if err != nil {
		return err
	}
	return h.showList(found, false, "There are no buckets.", limitColumns...)
}

type limitsSetCmd struct {
	managementFlags
	tenantArg
	Bucket    string `arg:"" help:"The bucket, see limits get."`
	Rate      string `arg:"" help:"How many in which time, such as 200/1s or 5000/1m; 0/1s refuses everything."`
	Algorithm string `help:"How it is counted: ${enum}; by default as the bucket's default is." enum:"fixed_window,sliding_window,token_bucket," default:"" placeholder:"NAME"`
	Burst     *int   `help:"Of token_bucket: how many at once." placeholder:"N"`
}

// Help shows examples.
func (limitsSetCmd) Help() string {
	return `Examples:

server limits set acme activity_create 200/1s

server limits set acme api_read 5000/1m --algorithm token_bucket --burst 100`
}

func (c limitsSetCmd) Run(e *env) error {
	count, window, _ := strings.Cut(c.Rate, "/")
	limit, err := strconv.ParseInt(count, 10, 64)
	scale, windowErr := time.ParseDuration(window)
	if err != nil || windowErr != nil {
		return fmt.Errorf("the rate %q must be a number and a time, such as 200/1s or 5000/1m", c.Rate)
	}
	rule := members{"limit": limit, "scale_ms": scale.Milliseconds()}
	if c.Algorithm != "" {
		rule["algorithm"] = c.Algorithm
	}
	if c.Burst != nil {
		rule["burst"] = *c.Burst
	}
	return c.changeLimit(e, c.Tenant, c.Bucket, http.MethodPut, rule)
}

type limitsUnsetCmd struct {
	managementFlags
	tenantArg
	Bucket string `arg:"" help:"The bucket, see limits get."`
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
	return h.show(l, limitColumns...)
}
