package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// ask asks for one object by a query.
func (h *hubClient) ask(method, path string, query url.Values) (members, error) {
	answer, err := h.call(method, path, query, nil)
	if err != nil {
		return nil, err
	}
	var o members
	return o, decode(answer.Data, &o)
}

// objects are the objects of a list in an answer.
func objects(v any) []members {
	list, _ := v.([]any)
	out := make([]members, 0, len(list))
	for _, x := range list {
		if o, ok := x.(members); ok {
			out = append(out, o)
		}
	}
	return out
}

// failed is whether a node of an answer has not told what it should. (Nodes that can't be asked from here, since Redis alone
// joins them, are no failure: they are never in an answer.)
func failed(nodes []members) bool {
	return slices.ContainsFunc(nodes, func(n members) bool { return n["error"] != nil })
}

type limitsTopCmd struct {
	managementFlags
	Bucket string `help:"Only this bucket." placeholder:"BUCKET"`
	Limit  int    `help:"Most to show of all buckets together; 0: all." default:"20"`
}

// Help shows how to go on.
func (limitsTopCmd) Help() string {
	return `Counts the last five to ten minutes, on all nodes together. Under a flood the numbers are estimates, and not too high.

What stands under WHOM is what limits show, limits clear-usage and, for addresses, ranges add deny take:

    server limits top --bucket unknown_caller
    server limits show unknown_caller 203.0.113.7
    server ranges add deny 203.0.113.7 --expires 1h --note "guessing keys"`
}

func (c limitsTopCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	o, err := h.get("/rate_limits")
	if err != nil {
		return err
	}
	top, _ := o["top_refused"].(members)
	if _, ok := top[c.Bucket]; c.Bucket != "" && !ok {
		names := make([]string, 0, len(top))
		for name := range top {
			names = append(names, name)
		}
		slices.Sort(names)
		return misused(fmt.Sprintf("there is no bucket %q; there are %s", c.Bucket, strings.Join(names, ", ")))
	}
	type row struct {
		count float64
		shown members
	}
	var rows []row
	for bucket, pairs := range top {
		list, _ := pairs.([]any)
		for _, p := range list {
			pair, _ := p.([]any)
			if len(pair) != 2 || c.Bucket != "" && bucket != c.Bucket {
				continue
			}
			subject, _ := pair[0].(string)
			number, _ := pair[1].(json.Number)
			count, _ := number.Float64() // what is no number stands last
			subjects, _ := o["subjects"].(members)
			of, _ := subjects[subject].(members)
			decisions, _ := o["decisions_per_second"].(members)
			rate, _ := decisions[bucket].(members)
			rows = append(rows, row{count, members{"bucket": bucket, "subject": subject, "tenant": of["tenant"], "refused": pair[1], "rate": rate["refused"]}})
		}
	}
	slices.SortFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(b.count, a.count), strings.Compare(cell(a.shown, "subject"), cell(b.shown, "subject")))
	})
	more := c.Limit > 0 && len(rows) > c.Limit
	if more {
		rows = rows[:c.Limit]
	}
	shown := make([]members, len(rows))
	for i, r := range rows {
		shown[i] = r.shown
	}
	remarks, _ := o["remarks"].([]any)
	for _, r := range remarks {
		fmt.Fprintln(h.e.stderr, r)
	}
	none := "Nothing has been refused since %s."
	if o["complete"] != true {
		none = "As far as the nodes tell, nothing has been refused since %s."
	}
	if err := h.showList(shown, more, fmt.Sprintf(none, cell(o, "top_since")),
		column{"REFUSED", "refused"}, column{"BUCKET", "bucket"}, column{"WHOM", "subject"}, column{"TENANT", "tenant"}); err != nil {
		return err
	}
	if failed(objects(o["nodes"])) {
		return partly{"not every node has told what it saw"}
	}
	return nil
}

// subjectArgs name a budget.
type subjectArgs struct {
	Bucket  string   `arg:"" help:"The bucket, see limits get."`
	Subject []string `arg:"" help:"Whom it counts, as limits top shows it: id or name of a tenant, id of a channel, an address, \"admin EMAIL\" or \"TENANT EMAIL\" for an account."`
}

func (a subjectArgs) query() url.Values {
	return url.Values{"bucket": {a.Bucket}, "subject": {strings.Join(a.Subject, " ")}}
}

type limitsShowCmd struct {
	managementFlags
	subjectArgs
}

// Help shows examples.
func (limitsShowCmd) Help() string {
	return `Examples:

    server limits show activity_create acme
    server limits show login_account admin jane@example.com
    server limits show unknown_caller 2001:db8::1`
}

func (c limitsShowCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	o, err := h.ask(http.MethodGet, "/rate_limits/usage", c.query())
	if err != nil {
		return err
	}
	if err := c.show(h, o); err != nil {
		return err
	}
	return tellMissing(e, o)
}

// tellMissing says what an answer of all nodes lacks; it is an error if one of them did not answer.
func tellMissing(e *env, o members) error {
	if failed(objects(o["nodes"])) {
		return partly{cell(o, "detail")}
	}
	if o["detail"] != nil {
		fmt.Fprintln(e.stderr, cell(o, "detail"))
	}
	return nil
}

func (c limitsShowCmd) show(h *hubClient, o members) error {
	if h.json {
		return h.showJSON(o)
	}
	whom := cell(o, "subject")
	if name := cell(o, "tenant"); name != "–" {
		whom += " (" + name + ")"
	}
	bucket := cell(o, "bucket")
	rate := cell(limitRow(members{"effective": members{"limit": o["limit"], "scale_ms": o["scale_ms"]}}), "effective.rate")
	switch {
	case o["limited"] != true:
		fmt.Fprintf(h.e.stdout, "No limit applies to %s in %s.\n", whom, bucket)
		return nil
	case o["used"] == nil:
		fmt.Fprintf(h.e.stdout, "How much of %s %s uses in %s is unknown.\n\n", rate, whom, bucket)
	case o["complete"] != true:
		fmt.Fprintf(h.e.stdout, "As far as the nodes tell, %s uses %s of %s in %s, and has %s left.\n\n", whom, cell(o, "used"), rate, bucket, cell(o, "remaining"))
	default:
		fmt.Fprintf(h.e.stdout, "%s uses %s of %s in %s, and has %s left.\n\n", whom, cell(o, "used"), rate, bucket, cell(o, "remaining"))
	}
	return h.showList(objects(o["nodes"]), false, "There are no nodes.", column{"NODE", "name"}, column{"USED", "used"}, column{"COUNTED THERE", "counted_here"},
		column{"LEFT", "remaining"}, column{"WHOLE IN MS", "wait_ms"}, column{"BACKEND", "backend"}, column{"TROUBLE", "error"})
}

type limitsClearCmd struct {
	managementFlags
	subjectArgs
}

// Help says what it does and does not.
func (limitsClearCmd) Help() string {
	return `The whole budget is free again at once, on every node; what was refused stays counted. It is in the audit log. To do it again is harmless.
A known device of an account is locked by its own failures and has a budget of its own, whose subject "limits top" shows.

    server limits clear-usage login_account admin jane@example.com`
}

// partly is an answer or a change that is not of every node.
type partly struct{ what string }

func (p partly) Error() string { return p.what }

// ExitCode says that it is worth trying again.
func (partly) ExitCode() int { return exitUnavailable }

func (c limitsClearCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	o, err := h.ask(http.MethodDelete, "/rate_limits/usage", c.query())
	if err != nil {
		return err
	}
	if o["cleared"] == true {
		living := slices.DeleteFunc(objects(o["nodes"]), func(n members) bool { return n["error"] != nil })
		return h.done(o, "The counter of %s in %s is reset on %s.", cell(o, "subject"), cell(o, "bucket"), counted(len(living), "node", "nodes"))
	}
	if h.json {
		if err := h.showJSON(o); err != nil {
			return err
		}
	}
	return partly{fmt.Sprintf("the counter of %s in %s is not reset everywhere. %s", cell(o, "subject"), cell(o, "bucket"), cell(o, "detail"))}
}

// counted says how many.
func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}

type limitsTryCmd struct {
	managementFlags
	tenantArg
	rateArgs
}

// Help shows an example.
func (limitsTryCmd) Help() string {
	return `Nothing is saved. The demand is that of the tenant's busiest subjects on all nodes.

    server limits try acme activity_create 50/1s`
}

func (c limitsTryCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	rule, err := c.rule()
	if err != nil {
		return err
	}
	path, err := h.tenantPath(c.Tenant, "limits", "preview")
	if err != nil {
		return err
	}
	answer, err := h.call(http.MethodPost, path, nil, members{c.Bucket: rule})
	if err != nil {
		return err
	}
	var list []members
	if err := decode(answer.Data, &list); err != nil {
		return err
	}
	if err := h.showList(list, false, "Nothing was tried.", column{"BUCKET", "bucket"}, column{"SINCE", "since"}, column{"DEMAND", "demand"}, column{"ADMITTED", "admitted"},
		column{"REFUSED", "refused"}, column{"PEAK/S", "peak_per_second"}, column{"PEAK AT", "peak_at"}, column{"WINDOWS OVER", "windows_exceeded"}, column{"OF", "windows"}); err != nil {
		return err
	}
	for _, f := range list {
		for _, node := range objects(f["missing"]) {
			return partly{fmt.Sprintf("the demand is not that of all nodes: the node %s %s", cell(node, "name"), cell(node, "error"))}
		}
	}
	return nil
}

type limitsDemandCmd struct {
	managementFlags
	Bucket  string   `arg:"" help:"The bucket, see limits get."`
	Subject []string `arg:"" optional:"" help:"Whom it counts, as limits show takes it: then with the demand of each minute."`
	Tenant  string   `help:"Only whom this tenant's limits apply to, by its id or name." placeholder:"TENANT"`
}

// Help shows examples, and how to go on.
func (limitsDemandCmd) Help() string {
	return `Of all nodes together: the 32 busiest of each, or of one subject what every node knows of it, minute by minute (with --json second by second). A dash is a minute
before it was among the 256 busiest, or asked for anything.

    server limits demand activity_create
    server limits demand activity_create acme
    server limits demand api_read --tenant acme
    server limits try acme activity_create 50/1s`
}

func (c limitsDemandCmd) Run(e *env) error {
	h, err := c.connect(e)
	if err != nil {
		return err
	}
	tenant := ""
	if c.Tenant != "" {
		if tenant, err = h.tenantID(c.Tenant); err != nil {
			return err
		}
	}
	o, err := h.ask(http.MethodGet, "/rate_limits/demand", filter(map[string]string{"bucket": c.Bucket, "subject": strings.Join(c.Subject, " "), "tenant_id": tenant}))
	if err != nil {
		return err
	}
	if err := c.show(h, o); err != nil {
		return err
	}
	return tellMissing(e, o)
}

func (limitsDemandCmd) show(h *hubClient, o members) error {
	if h.json {
		return h.showJSON(o)
	}
	none := "Nothing is known of a demand in %s in the last hour."
	if o["complete"] != true {
		none = "As far as the nodes tell, nothing is known of a demand in %s in the last hour."
	}
	list := objects(o["subjects"])
	if err := h.showList(list, false, fmt.Sprintf(none, cell(o, "bucket")), column{"DEMAND", "total"}, column{"WHOM", "subject"}, column{"TENANT", "tenant"},
		column{"SINCE", "since"}, column{"PEAK/S", "peak_per_second"}, column{"PEAK AT", "peak_at"}, column{"NOW/S", "last_minute_per_second"}, column{"SAMPLED 1 IN", "sampled"}); err != nil {
		return err
	}
	if len(list) == 0 || list[0]["series"] == nil {
		return nil
	}
	return showMinutes(h.e.stdout, list[0])
}

// showMinutes prints the demand of one subject by minutes, ten in a row: a dash for one of which nothing is known.
func showMinutes(to io.Writer, subject members) error {
	start, err := time.Parse(time.RFC3339, cell(subject, "series.start"))
	if err != nil {
		return fmt.Errorf("the hub's answer: %w", err)
	}
	series, _ := subject["series"].(members)
	seconds, _ := series["per_second"].([]any)
	w := tabwriter.NewWriter(to, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintf(w, "\nUTC\t")
	for column := range 10 {
		fmt.Fprintf(w, "+%d\t", column)
	}
	at := start.UTC()
	fmt.Fprintf(w, "\n%s\t%s", at.Truncate(10*time.Minute).Format("15:04"), strings.Repeat("\t", at.Minute()%10))
	for i := 0; i < len(seconds); i, at = i+60, at.Add(time.Minute) {
		if i > 0 && at.Minute()%10 == 0 {
			fmt.Fprintf(w, "\n%s\t", at.Format("15:04"))
		}
		sum, known := int64(0), false
		for _, second := range seconds[i:min(i+60, len(seconds))] {
			if n, ok := second.(json.Number); ok {
				n, _ := n.Int64() // what is no number counts as nothing
				sum, known = sum+n, true
			}
		}
		if known {
			fmt.Fprintf(w, "%d\t", sum)
		} else {
			fmt.Fprint(w, "–\t")
		}
	}
	fmt.Fprintln(w)
	return w.Flush()
}
