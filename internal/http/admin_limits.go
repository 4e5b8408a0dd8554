package http

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"converger/internal/auth"
	"converger/internal/ratelimit"
	"converger/internal/tenants"
)

// registerAdminLimitRoutes: a tenant's limits. A bucket has a page of its own to change it.
func (s *server) registerAdminLimitRoutes() {
	s.adminPage(http.MethodGet, "/tenants/{tenant_id}/limits", s.showLimits)
	s.adminPage(http.MethodGet, "/tenants/{tenant_id}/limits/{bucket}", s.showLimit)
	s.adminPage(http.MethodPost, "/tenants/{tenant_id}/limits/{bucket}", s.saveLimit)
	s.adminPage(http.MethodPost, "/tenants/{tenant_id}/limits/{bucket}/remove", s.removeLimit)
}

// limitView is one bucket as a page shows it. What is in force comes from the code that enforces.
type limitView struct {
	Bucket   string
	Counts   string // what it counts, and for whom
	BuiltIn  string
	Operator string // what the installation's configuration says, "" for nothing
	Override string // "" for none
	InForce  string
	Rule     string // InForce as a sentence
	Zero     bool   // refuses everything
}

// subjects name whom a bucket counts.
var subjects = map[ratelimit.Subject]string{
	ratelimit.SubjectTenant: "of the tenant", ratelimit.SubjectChannel: "of each channel", ratelimit.SubjectIP: "from each client address",
	ratelimit.SubjectAccount: "to each account", ratelimit.SubjectCaller: "of the tenant, or of each user of a client token",
	ratelimit.SubjectSession: "of each session", ratelimit.SubjectOperator: "of each operator token",
}

func (s *server) limitView(t *tenants.TenantEntry, b ratelimit.Bucket) limitView {
	info, overrides := b.Info(), overridesOf(t)
	v := limitView{Bucket: b.String(), Counts: b.Noun() + " " + subjects[info.Subject], BuiltIn: "none", InForce: "no limit", Rule: "Nothing is refused."}
	if info.Default != (ratelimit.Rule{}) {
		v.BuiltIn = ruleWords(info.Default)
	}
	if p, set := s.Limiter.Operator(b); set {
		v.Operator = "off"
		if p != nil {
			v.Operator = ruleWords(p.Rule())
			if p.CountOnly() {
				v.Operator += ", only counted"
			}
		}
	}
	if p := overrides.Policy(b); p != nil {
		v.Override = ruleWords(p.Rule())
	}
	if p := s.Limiter.Policy(b, overrides, nil); p != nil {
		v.InForce, v.Rule, v.Zero = ruleWords(p.Rule()), ruleSentence(b, p.Rule()), p.Limit() == 0
		if p.CountOnly() {
			v.InForce += ", only counted"
			v.Rule += " What is beyond is counted and let through."
			v.Zero = false
		}
	}
	if b == ratelimit.ChannelOutbound {
		v.BuiltIn, v.InForce = "set at each channel", "set at each channel"
	}
	return v
}

// ruleWords is a rule in short.
func ruleWords(r ratelimit.Rule) string {
	if r.Limit == 0 {
		return "0: refuses everything"
	}
	words := r.String()
	if r.Algorithm == ratelimit.TokenBucket {
		burst := r.Burst
		if burst == 0 {
			burst = r.Limit
		}
		words += ", " + ratelimit.Grouped(burst) + " at once"
	}
	return words
}

// ruleSentence restates a rule so that nobody has to know what its algorithm is called.
func ruleSentence(b ratelimit.Bucket, r ratelimit.Rule) string {
	if r.Limit == 0 {
		return "The limit is 0: every request is refused."
	}
	noun := b.Noun()
	limit, scale, _ := strings.Cut(r.String(), " per ")
	switch r.Algorithm {
	case ratelimit.SlidingWindow:
		return fmt.Sprintf("At most %s %s in any %s, wherever it begins; how the one before was used is taken as even.", limit, noun, scale)
	case ratelimit.TokenBucket:
		burst := r.Burst
		if burst == 0 {
			burst = r.Limit
		}
		return fmt.Sprintf("%s %s per %s on the long run, and up to %s at once after a pause.", limit, noun, scale, ratelimit.Grouped(burst))
	}
	return fmt.Sprintf("At most %s %s in each %s of the clock. Around the moment when one ends and the next begins, up to %s may pass in a short time.",
		limit, noun, scale, ratelimit.Grouped(2*r.Limit))
}

type limitsView struct {
	TenantID, Tenant string
	Own, Others      []limitView // those that the tenant may have its own limit of, and those that count others
	Write            bool
}

func (s *server) limitsView(c *call, t *tenants.TenantEntry) limitsView {
	v := limitsView{TenantID: t.ID.String(), Tenant: t.Name, Write: c.may(auth.RightWrite)}
	for _, b := range ratelimit.Buckets() {
		if b.Info().TenantOverride {
			v.Own = append(v.Own, s.limitView(t, b))
		} else {
			v.Others = append(v.Others, s.limitView(t, b))
		}
	}
	return v
}

func (s *server) showLimits(c *call) (*reply, error) {
	t, err := s.enforcedTenant(c)
	if err != nil {
		return nil, err
	}
	return s.page(c, http.StatusOK, "admin-limits.html", view{Title: "Limits of " + t.Name, Main: s.limitsView(c, t)})
}

// oneLimitView is the page of one bucket.
type oneLimitView struct {
	TenantID, Tenant string
	Limit            limitView
	Form             *pageForm // nil for those who may not
	Preview          string
	Tried            []string // what the last hour would have met
}

// scaleUnits are the units in which a page takes the length of a window.
var scaleUnits = []struct {
	name, text string
	unit       time.Duration
}{{"ms", "milliseconds", time.Millisecond}, {"s", "seconds", time.Second}, {"min", "minutes", time.Minute}, {"h", "hours", time.Hour}}

// ownLimit is the tenant's own limit as forms remember it, to tell whether somebody has changed it since; "" is none.
func ownLimit(t *tenants.TenantEntry, b ratelimit.Bucket) (string, error) {
	p := overridesOf(t).Policy(b)
	if p == nil {
		return "", nil
	}
	text, err := json.Marshal(p.Rule())
	return string(text), err
}

// limitForm shows a rule to be changed, and remembers the tenant's own limit. Its fields have the names that package
// ratelimit uses in its errors.
func limitForm(r ratelimit.Rule, own string) *pageForm {
	f := newForm(
		&formField{Name: "was", Type: "hidden", Value: own},
		&formField{Name: "limit", Label: "Limit", InputMode: "numeric", Autocomplete: "off", Required: true, Value: strconv.FormatInt(r.Limit, 10),
			Hint: "How many, from 0 to " + ratelimit.Grouped(ratelimit.MaxLimit) + "; 0 refuses everything. The time is from 1 second to 1 day."},
		&formField{Name: "scale_ms", Label: "In every", InputMode: "numeric", Autocomplete: "off", Required: true},
		&formField{Name: "unit", Label: "Unit", Autocomplete: "off"},
		&formField{Name: "algorithm", Label: "How it is counted", Autocomplete: "off", Value: r.Algorithm.String(), Options: []formOption{
			{ratelimit.FixedWindow.String(), "Fixed window: starts anew with the clock"},
			{ratelimit.SlidingWindow.String(), "Sliding window: no double helping around the edge"},
			{ratelimit.TokenBucket.String(), "Token bucket: an even rate, with a burst"},
		}},
		&formField{Name: "burst", Label: "Burst", InputMode: "numeric", Autocomplete: "off",
			Hint: "Token bucket only: how many may come at once. Empty: as many as the limit."},
	)
	if r.Burst != 0 {
		f.Get("burst").Value = strconv.FormatInt(r.Burst, 10)
	}
	unit, scale := f.Get("unit"), f.Get("scale_ms")
	for _, u := range scaleUnits {
		unit.Options = append(unit.Options, formOption{u.name, u.text})
		if r.Scale%u.unit == 0 { // the largest that divides it
			unit.Value, scale.Value = u.name, strconv.FormatInt(int64(r.Scale/u.unit), 10)
		}
	}
	return f
}

// readRule reads the form. What is no number becomes one that is out of range, and is so reported.
func readRule(f *pageForm, values url.Values) ratelimit.Rule {
	f.fill(values)
	number := func(name string) int64 {
		n, err := strconv.ParseInt(strings.TrimSpace(values.Get(name)), 10, 64)
		if err != nil {
			return -1
		}
		return n
	}
	r := ratelimit.Rule{Limit: number("limit")}
	for _, u := range scaleUnits {
		if n := number("scale_ms"); u.name == values.Get("unit") && n <= int64(ratelimit.MaxScale/u.unit) {
			r.Scale = time.Duration(n) * u.unit
		}
	}
	var ok bool
	if r.Algorithm, ok = ratelimit.ParseAlgorithm(values.Get("algorithm")); !ok {
		r.Algorithm = ratelimit.TokenBucket + 1
	}
	if strings.TrimSpace(values.Get("burst")) != "" {
		if r.Burst = number("burst"); r.Burst == 0 {
			r.Burst = -1 // written out, 0 is out of range
		}
	}
	return r
}

// overridable is limitOf for the buckets that a tenant can have its own limit of: the others have no page.
func (s *server) overridable(c *call) (*tenants.TenantEntry, ratelimit.Bucket, error) {
	t, b, err := s.limitOf(c)
	if err == nil && !b.Info().TenantOverride {
		err = newProblem(codeNotFound, "Tenants can't have a limit of their own for %s.", b)
	}
	return t, b, err
}

func (s *server) limitPage(c *call, status int, t *tenants.TenantEntry, b ratelimit.Bucket, f *pageForm, preview string, tried ...string) (*reply, error) {
	v := oneLimitView{TenantID: t.ID.String(), Tenant: t.Name, Limit: s.limitView(t, b), Preview: preview, Tried: tried}
	if c.may(auth.RightWrite) {
		v.Form = f
	}
	return s.page(c, status, "admin-limit.html", view{Title: b.String() + " of " + t.Name, Failed: f.failed(), Main: v})
}

func (s *server) showLimit(c *call) (*reply, error) {
	t, b, err := s.overridable(c)
	if err != nil {
		return nil, err
	}
	f, err := s.presentLimit(t, b)
	if err != nil {
		return nil, err
	}
	return s.limitPage(c, http.StatusOK, t, b, f, "")
}

// presentLimit is the form before anything was entered.
func (s *server) presentLimit(t *tenants.TenantEntry, b ratelimit.Bucket) (*pageForm, error) {
	r := b.Info().Default
	if p, _ := s.Limiter.Operator(b); p != nil {
		r = p.Rule()
	}
	if p := overridesOf(t).Policy(b); p != nil {
		r = p.Rule()
	}
	own, err := ownLimit(t, b)
	if err != nil {
		return nil, err
	}
	return limitForm(r, own), nil
}

// changeLimit makes the tenant's own limit what is wanted ("": none), if it still is what the form remembers. If it is not, it
// returns [tenants.ErrChanged] and the tenant as it is now; what else of the tenant was changed meanwhile does not matter.
func (s *server) changeLimit(c *call, t *tenants.TenantEntry, b ratelimit.Bucket, was, wanted string) (*tenants.TenantEntry, error) {
	for {
		switch own, err := ownLimit(t, b); {
		case err != nil:
			return t, err
		case own == wanted: // a form that was sent twice
			return t, nil
		case own != was:
			return t, tenants.ErrChanged
		}
		var err error
		if wanted == "" {
			err = s.Tenants.DeleteLimit(c.ctx(), c.actor(), t.ID, b.String(), t.Version)
		} else {
			err = s.Tenants.SetLimit(c.ctx(), c.actor(), t.ID, b.String(), json.RawMessage(wanted), t.Version)
		}
		if !errors.Is(err, tenants.ErrChanged) {
			s.changed(c)
			return t, err
		}
		// This node is behind: catch up, and look again.
		if err := s.Directory.Refresh(c.ctx()); err != nil {
			return t, err
		}
		now, ok := s.Directory.Tenant(t.ID)
		if !ok {
			return t, tenants.ErrNotFound
		}
		if now.Version == t.Version {
			return t, tenants.ErrChanged
		}
		t = now
	}
}

// limitChanged shows a form that was sent to change what is not there any more; sent again, it does.
func (s *server) limitChanged(c *call, t *tenants.TenantEntry, b ratelimit.Bucket, f *pageForm) (*reply, error) {
	own, err := ownLimit(t, b)
	if err != nil {
		return nil, err
	}
	f.Get("was").Value = own
	f.Problem = "Nothing was saved: somebody has changed this limit since you opened the page. What is in force now stands above; to replace it, save again."
	return s.limitPage(c, http.StatusConflict, t, b, f.focus("limit"), "")
}

// saveLimit saves what the form says. With the buttons beside it says it in other words, or what the last hour would have met,
// and saves nothing.
func (s *server) saveLimit(c *call) (*reply, error) {
	t, b, err := s.overridable(c)
	if err != nil {
		return nil, err
	}
	values, err := c.formValues()
	if err != nil {
		return nil, err
	}
	f := limitForm(b.Info().Default, "")
	r := readRule(f, values)
	if err := r.Validate(); err != nil {
		f.take(err)
		if x := f.Get("scale_ms"); x.Error != "" { // which speaks of milliseconds
			x.Error = "Must be a whole number, and the time from 1 second to 1 day."
		}
		return s.limitPage(c, http.StatusUnprocessableEntity, t, b, f.focus(""), "")
	}
	switch values.Get("action") {
	case "preview":
		return s.limitPage(c, http.StatusOK, t, b, f, ruleSentence(b, r))
	case "try":
		tried, err := s.forecast(c, t.ID, b, r)
		if err != nil {
			return nil, err
		}
		return s.limitPage(c, http.StatusOK, t, b, f, ruleSentence(b, r), forecastWords(tried)...)
	}
	canonical, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	if t, err = s.changeLimit(c, t, b, values.Get("was"), string(canonical)); errors.Is(err, tenants.ErrChanged) {
		return s.limitChanged(c, t, b, f)
	}
	if err != nil {
		return nil, err
	}
	notice := "limit_saved"
	if r.Limit == 0 {
		notice = "limit_zero"
	}
	return s.done(c, notice, "/admin/tenants/"+t.ID.String()+"/limits"), nil
}

func (s *server) removeLimit(c *call) (*reply, error) {
	t, b, err := s.overridable(c)
	if err != nil {
		return nil, err
	}
	values, err := c.formValues()
	if err != nil {
		return nil, err
	}
	if t, err = s.changeLimit(c, t, b, values.Get("was"), ""); errors.Is(err, tenants.ErrChanged) {
		f, err := s.presentLimit(t, b)
		if err != nil {
			return nil, err
		}
		return s.limitChanged(c, t, b, f)
	}
	if err != nil {
		return nil, err
	}
	return s.done(c, "limit_removed", "/admin/tenants/"+t.ID.String()+"/limits"), nil
}
