package http

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/ratelimit/overview"
)

// registerAdminRateLimitRoutes: what limits do, live for whoever chooses so.
func (s *server) registerAdminRateLimitRoutes() {
	s.adminPage(http.MethodGet, "/rate_limits", s.showRateLimits)
	s.adminPage(http.MethodPost, "/rate_limits/reset", s.resetOnPage)
}

const (
	rateLimitsPath = "/admin/rate_limits"
	// liveFor is how long a page loads itself again: a screen that nobody looks at must not keep a session open.
	liveFor = time.Hour
)

// liveEvery are the seconds after which the page may load itself again.
var liveEvery = []int{5, 15, 60}

// rateLimitsView is the page of limits.
type rateLimitsView struct {
	At, Since time.Time
	Live      liveView
	Remarks   []string // what to look at first
	Only      string   // the bucket shown, "" for all
	Buckets   []string
	Rows      []bucketRow
	Top       []topRow
	Recent    []recentRow
	Nodes     []nodeRow
	Several   bool
	Told      string // how many of them the sums are of, "" for all
	Links     *overview.Connections
	Form      *pageForm
	Use       *useView
}

type liveView struct {
	Every int // seconds, 0: not live
	Ended bool
	Pause string
	Start []liveLink
}

type liveLink struct {
	Text, Path string
	Current    bool
}

type bucketRow struct {
	Bucket, Counts, Limit, Backend string
	Off, Operator                  bool
	Rate                           overview.Decisions[float64]
	Total                          overview.Decisions[uint64]
}

type shownSubject struct{ Bucket, Text, Tenant, LookUp string }

type topRow struct {
	shownSubject
	Count uint64
}

type recentRow struct {
	shownSubject
	Node    string
	Count   uint64
	Last    time.Time
	Ago     string
	Limit   string
	Counted bool
}

type nodeRow struct {
	Name, ID, Version, Standing, Error, Skew, Keys, Heard, Delay, State string
	Queued, Dropped                                                     string
}

// useView is one subject's use.
type useView struct {
	shownSubject
	Body            usageBody
	Limit           string
	Used, Remaining string // "" for what is not known
	Write           bool
	Nodes           []useNodeRow
}

type useNodeRow struct{ Name, Used, Own, Free, Error string }

func (s *server) shown(bucket string, x overview.Subject) shownSubject {
	out := shownSubject{Bucket: bucket, Text: x.Text, LookUp: rateLimitsPath + "?" + url.Values{"bucket": {bucket}, "subject": {x.Text}}.Encode() + "#look-up"}
	if x.Tenant != uuid.Nil {
		out.Tenant = s.tenantName(x.Tenant)
	}
	return out
}

// lookUpForm asks for a bucket and a subject.
func lookUpForm(bucket, subject string) *pageForm {
	f := newForm(
		&formField{Name: "bucket", Label: "Bucket", Autocomplete: "off", Value: bucket},
		&formField{Name: "subject", Label: "Whom", Autocomplete: "off", Required: true, Value: subject,
			Hint: "The id or the name of a tenant, the id of a channel, an address, an account such as “admin jane@example.com”: as the lists above show them."},
	)
	for _, b := range ratelimit.Buckets() {
		f.Get("bucket").Options = append(f.Get("bucket").Options, formOption{b.String(), b.String()})
	}
	return f
}

func (s *server) showRateLimits(c *call) (*reply, error) {
	q, err := c.query()
	if err != nil {
		return nil, err
	}
	f := lookUpForm(q.Get("bucket"), q.Get("subject"))
	var use *useView
	status := http.StatusOK
	if q.Has("subject") {
		if use, err = s.lookUp(c, q.Get("bucket"), q.Get("subject")); err != nil {
			var p *problem
			if !errors.As(err, &p) {
				return nil, err
			}
			f.fault(map[bool]string{true: "subject", false: "bucket"}[f.Get("bucket").known()], strings.TrimPrefix(strings.TrimPrefix(p.detail, "Invalid subject: "), "Invalid bucket: "))
			status = p.reply("", "").status
		}
	}
	return s.rateLimitsPage(c, status, q, f, use)
}

// known tells whether the value is one of the options.
func (x *formField) known() bool {
	return slices.ContainsFunc(x.Options, func(o formOption) bool { return o.Value == x.Value })
}

func (s *server) rateLimitsPage(c *call, status int, q url.Values, f *pageForm, use *useView) (*reply, error) {
	p := s.Overview.Picture(c.ctx())
	v := rateLimitsView{At: p.At, Since: p.At, Links: p.Connections, Form: f, Use: use, Several: len(p.Nodes) > 1, Live: live(q, c.started)}
	if told := p.Told(); told < len(p.Nodes) {
		v.Told = fmt.Sprintf("%d of %d nodes", told, len(p.Nodes))
	}
	if _, ok := ratelimit.ParseBucket(q.Get("only")); ok {
		v.Only = q.Get("only")
	}
	names := map[string]string{}
	for _, n := range p.Nodes {
		names[n.ID] = nodeName(n.ID, n.Name)
	}
	for _, b := range p.Buckets {
		name := b.Bucket.String()
		v.Buckets = append(v.Buckets, name)
		if b.Since.Before(v.Since) {
			v.Since = b.Since
		}
		if v.Only != "" && v.Only != name {
			continue
		}
		v.Rows = append(v.Rows, s.bucketRow(b))
		for _, h := range b.Top {
			v.Top = append(v.Top, topRow{s.shown(name, h.Subject), h.Count})
		}
	}
	slices.SortStableFunc(v.Top, func(a, b topRow) int {
		switch {
		case a.Count > b.Count:
			return -1
		case a.Count < b.Count:
			return 1
		}
		return 0
	})
	v.Top = v.Top[:min(len(v.Top), 25)]
	for _, r := range p.Recent {
		if v.Only != "" && v.Only != r.Bucket {
			continue
		}
		v.Recent = append(v.Recent, recentRow{s.shown(r.Bucket, r.Subject), names[r.Node], r.Count, r.Last, ago(p.At.Sub(r.Last)),
			ruleWords(ratelimit.Rule{Limit: int64(r.Limit), Scale: time.Duration(r.ScaleMs) * time.Millisecond}), r.Counted})
	}
	v.Recent = v.Recent[:min(len(v.Recent), 25)]
	for _, n := range p.Nodes {
		v.Nodes = append(v.Nodes, rowOfNode(n))
	}
	v.Remarks = remarks(p)
	page, err := s.page(c, status, "admin-rate-limits.html", view{Title: "Rate limits", Failed: f.failed(), Main: v})
	if err == nil && v.Live.Every > 0 {
		page = page.with("Refresh", strconv.Itoa(v.Live.Every))
	}
	return page, err
}

// live reads whether the page is to load itself again. The address says until when.
func live(q url.Values, now time.Time) liveView {
	var v liveView
	path := func(every int) string {
		with := url.Values{}
		for _, name := range []string{"only", "bucket", "subject"} {
			if q.Has(name) {
				with.Set(name, q.Get(name))
			}
		}
		if every > 0 {
			with.Set("every", strconv.Itoa(every))
			with.Set("until", strconv.FormatInt(now.Add(liveFor).Unix(), 10))
		}
		if len(with) == 0 {
			return rateLimitsPath
		}
		return rateLimitsPath + "?" + with.Encode()
	}
	if every, err := strconv.Atoi(q.Get("every")); err == nil && slices.Contains(liveEvery, every) {
		until, err := strconv.ParseInt(q.Get("until"), 10, 64)
		if left := until - now.Unix(); err == nil && left > 0 && left <= int64(liveFor/time.Second) {
			v.Every = every
		}
		v.Ended = v.Every == 0
	}
	v.Pause = path(0)
	for _, every := range liveEvery {
		v.Start = append(v.Start, liveLink{fmt.Sprintf("every %d s", every), path(every), every == v.Every})
	}
	return v
}

func (s *server) bucketRow(b overview.BucketPicture) bucketRow {
	lv := s.limitView(nil, b.Bucket)
	r := bucketRow{Bucket: lv.Bucket, Counts: lv.Counts, Limit: lv.InForce, Off: b.Config == nil, Rate: b.Rate, Total: b.Total}
	if b.Config != nil {
		r.Backend, r.Operator = b.Config.Backend, b.Config.Source == "operator"
	}
	return r
}

func nodeName(id, name string) string {
	return cmp.Or(name, id, "that you asked")
}

func rowOfNode(n overview.From[overview.State]) nodeRow {
	r := nodeRow{Name: nodeName(n.ID, n.Name), ID: n.ID, Version: n.Answer.Version, Standing: "asked", Skew: "–", Keys: "–", Heard: "–", Delay: "–", Queued: "–", Dropped: "–"}
	if d := n.Dead; d != nil {
		r.Version, r.Standing, r.Heard = d.Version, standingDead, ago(d.Silent)
	}
	if p := n.Peer; p != nil {
		r.Version, r.Standing = p.Version, p.Standing.String()
		r.Queued, r.Dropped = ratelimit.Grouped(int64(p.Queued)), ratelimit.Grouped(int64(p.Dropped))
		if p.Heard >= 0 {
			r.Heard = ago(p.Heard)
		}
		if p.Latency > 0 {
			r.Delay = fmt.Sprintf("%.2f ms", float64(p.Latency)/1e6)
		}
	}
	if n.Err != nil {
		r.Error = n.Err.Error()
		return r
	}
	a := n.Answer
	r.Skew = fmt.Sprintf("%.1f ms", math.Round(10*a.SkewMs)/10+0) // never -0.0
	keys := 0
	for _, x := range a.Stores {
		keys += x.Keys
		if x.Breaker != "" {
			r.State = "breaker " + strings.ReplaceAll(x.Breaker, "_", "-")
		}
	}
	r.Keys = ratelimit.Grouped(int64(keys))
	return r
}

// remarks are what an operator should look at first.
func remarks(p overview.Picture) []string {
	out := []string{}
	for _, n := range p.Nodes {
		out = append(out, remarksOf(n, p.Differ[n.ID])...)
	}
	if p.Elsewhere > 0 {
		words, have := elsewhereWords(p.Elsewhere)
		out = append(out, words+" What "+have+" seen is missing here.")
	}
	return out
}

func remarksOf(n overview.From[overview.State], differs []string) []string {
	name := nodeName(n.ID, n.Name)
	if n.Err != nil {
		return []string{fmt.Sprintf("The node %s %v. What it has seen is missing here.", name, n.Err)}
	}
	var out []string
	for _, x := range n.Answer.Stores {
		if x.Overflowing {
			out = append(out, fmt.Sprintf("On %s there are more subjects than RATE_LIMIT_MAX_KEYS (%s keys): new ones share counters.", name, ratelimit.Grouped(int64(x.MaxKeys))))
		}
		if x.FallingBack || x.Breaker == "open" {
			out = append(out, fmt.Sprintf("On %s the backend %s can't be asked: it decides with its share of the limits.", name, x.Backend))
		}
	}
	if a := n.Answer; a.Visible < a.Alive {
		out = append(out, fmt.Sprintf("%s hears %d of %d nodes that live: limits are shared out.", name, a.Visible, a.Alive))
	}
	if skew := n.Answer.SkewMs; max(skew, -skew) > 100 {
		out = append(out, fmt.Sprintf("The clock of %s is %.0f ms off; limits are corrected for it (is NTP running?).", name, skew))
	}
	if len(differs) > 0 {
		out = append(out, fmt.Sprintf("%s is configured with other limits than the node that you asked: %s.", name, strings.Join(differs, ", ")))
	}
	return out
}

// ago says how long ago something was.
func ago(d time.Duration) string {
	switch {
	case d < time.Second:
		return "just now"
	case d < 2*time.Minute:
		return fmt.Sprintf("%d s ago", int(d.Seconds()))
	}
	return fmt.Sprintf("%d min ago", int(d.Minutes()))
}

func (s *server) lookUp(c *call, bucket, subject string) (*useView, error) {
	b, err := s.findBudget(c.ctx(), bucket, subject)
	if err != nil {
		return nil, err
	}
	all := s.Overview.Usage(c.ctx(), b)
	number := func(n *uint32) string {
		if n == nil {
			return ""
		}
		return ratelimit.Grouped(int64(*n))
	}
	v := &useView{shownSubject: s.shown(bucket, overview.Subject{Text: b.Name.Text, Tenant: b.Name.Tenant}), Body: s.usageJSON(b, all), Limit: "no limit", Write: c.may(auth.RightWrite)}
	if p := s.Overview.Policy(b); p != nil {
		v.Limit = ruleWords(p.Rule())
	}
	if u := v.Body.Used; u != nil {
		v.Used = ratelimit.Grouped(int64(*u))
	}
	if r := v.Body.Remaining; r != nil {
		v.Remaining = ratelimit.Grouped(int64(*r))
	}
	for _, n := range v.Body.Nodes {
		r := useNodeRow{Name: n.Name, Used: cmp.Or(number(n.Used), "unknown"), Own: cmp.Or(number(n.Own), "–"), Free: "–"}
		if n.NodeID != nil {
			r.Name = nodeName(*n.NodeID, n.Name)
		}
		if n.WaitMS != nil && *n.WaitMS > 0 {
			r.Free = "in " + wait(time.Duration(*n.WaitMS)*time.Millisecond)
		}
		if n.Error != nil {
			r.Error = *n.Error
		}
		v.Nodes = append(v.Nodes, r)
	}
	return v, nil
}

// wait says how long something takes: to the tenth of a second, of what is longer than ten seconds to the second.
func wait(d time.Duration) string {
	if d > 10*time.Second {
		return d.Round(time.Second).String()
	}
	return max(d.Round(100*time.Millisecond), 100*time.Millisecond).String()
}

// resetOnPage resets a counter, and says so when not all could be.
func (s *server) resetOnPage(c *call) (*reply, error) {
	values, err := c.formValues()
	if err != nil {
		return nil, err
	}
	b, err := s.findBudget(c.ctx(), values.Get("bucket"), values.Get("subject"))
	if err != nil {
		return nil, err
	}
	done, err := s.reset(c, b)
	if err != nil {
		return nil, err
	}
	return s.done(c, done.notice, rateLimitsPath+"?"+url.Values{"bucket": {done.Bucket}, "subject": {done.Subject}}.Encode()), nil
}

// forecastWords say what the last hour would have met.
func forecastWords(f forecastBody) []string {
	if f.Demand == 0 {
		return []string{"In the last hour nothing was asked for that would be counted here, or the tenant was not among the busiest: there is nothing to try the limit against."}
	}
	out := []string{fmt.Sprintf("Of %s %s since %s UTC, %s would have been let through and %s refused (%s).", ratelimit.Grouped(int64(f.Demand)), bucketNoun(f.Bucket),
		f.Since.Format("15:04"), ratelimit.Grouped(int64(f.Admitted)), ratelimit.Grouped(int64(f.Refused)), percent(f.Refused, f.Demand))}
	peak := fmt.Sprintf("The busiest second had %s, at %s UTC.", ratelimit.Grouped(int64(f.PeakPerSecond)), f.PeakAt.Format("15:04:05"))
	if f.Exceeded > 0 {
		peak += fmt.Sprintf(" The limit would have been reached in %s of %s windows with any demand.", ratelimit.Grouped(int64(f.Exceeded)), ratelimit.Grouped(int64(f.Windows)))
	}
	out = append(out, peak)
	if f.Sampled > 1 {
		out = append(out, fmt.Sprintf("The demand was so high that one in up to %d requests was looked at: the numbers are estimates.", f.Sampled))
	}
	for _, m := range f.Missing {
		out = append(out, fmt.Sprintf("The node %s %s. Its demand is missing.", m.Name, *m.Error))
	}
	return out
}

func bucketNoun(name string) string {
	b, _ := ratelimit.ParseBucket(name)
	return b.Noun()
}

func percent(part, whole uint64) string {
	p := 100 * float64(part) / float64(max(whole, 1))
	if part > 0 && p < 0.1 {
		return "less than 0.1 %"
	}
	return fmt.Sprintf("%.1f %%", p)
}
