package main

import (
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"go.yaml.in/yaml/v3"
)

const (
	alertRules = "../../docs/alerts/converger.rules.yml"
	alertTests = "../../docs/alerts/converger.rules.test.yml"
	operations = "../../docs/operations.md"
)

type alertRule struct {
	Alert, Expr string
	Labels      map[string]string
	Annotations map[string]string
}

// readYAML reads a file of the documentation.
func readYAML(t *testing.T, file string, into any) {
	t.Helper()
	b, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(b, into); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
}

func readAlerts(t *testing.T) []alertRule {
	t.Helper()
	var file struct {
		Groups []struct{ Rules []alertRule }
	}
	readYAML(t, alertRules, &file)
	var all []alertRule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	if len(all) < 10 {
		t.Fatalf("only %d alerts in %s", len(all), alertRules)
	}
	return all
}

// findPromtool finds the program that `make promtool` fetches.
func findPromtool(t *testing.T) string {
	t.Helper()
	for _, name := range []string{os.Getenv("PROMTOOL"), "promtool", filepath.Join("..", "..", ".cache", "promtool", "promtool")} {
		if name == "" {
			continue
		}
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("CONVERGER_PROMTOOL") == "required" {
		t.Fatal("there is no promtool: `make promtool` fetches it")
	}
	t.Skip("there is no promtool: `make promtool` fetches it")
	return ""
}

// The rules are valid for Prometheus, and each fires when it should, alone, and not before.
func TestAlertRules(t *testing.T) {
	t.Parallel()
	promtool := findPromtool(t)
	for _, args := range [][]string{{"check", "rules", alertRules}, {"test", "rules", alertTests}} {
		if out, err := exec.CommandContext(t.Context(), promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %s: %v\n%s", strings.Join(args, " "), err, out)
		}
	}
}

// So are the queries of the documentation.
func TestDocumentedQueries(t *testing.T) {
	t.Parallel()
	promtool := findPromtool(t)
	b, err := os.ReadFile(operations)
	if err != nil {
		t.Fatal(err)
	}
	type rule struct{ Record, Expr string }
	var rules []rule
	for _, m := range regexp.MustCompile("`([^`\n]*converger_[^`\n]*)`").FindAllStringSubmatch(string(b), -1) {
		rules = append(rules, rule{fmt.Sprint("query_", len(rules)), m[1]})
	}
	if len(rules) < 20 {
		t.Fatalf("only %d queries found", len(rules))
	}
	file := filepath.Join(t.TempDir(), "queries.yml")
	text, err := yaml.Marshal(map[string]any{"groups": []any{map[string]any{"name": "queries", "rules": rules}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "check", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, out, text)
	}
}

// Every alert is tested, says how urgent it is, and leads to what it means and what to do next.
func TestAlertsAreExplained(t *testing.T) {
	t.Parallel()
	var tests struct {
		Tests []struct {
			Name  string
			Exprs []struct {
				Samples []struct{ Labels string } `yaml:"exp_samples"`
			} `yaml:"promql_expr_test"`
		}
	}
	readYAML(t, alertTests, &tests)
	tested := map[string]bool{}
	for _, test := range tests.Tests {
		quiet, firing := false, false
		for _, e := range test.Exprs {
			quiet = quiet || len(e.Samples) == 0
			firing = firing || len(e.Samples) == 1 && e.Samples[0].Labels == `{alertname="`+test.Name+`"}`
		}
		tested[test.Name] = quiet && firing
	}
	b, err := os.ReadFile(operations)
	if err != nil {
		t.Fatal(err)
	}
	sections := map[string]string{}
	for _, part := range strings.Split("\n"+string(b), "\n#")[1:] {
		title, text, _ := strings.Cut(strings.TrimLeft(part, "# "), "\n")
		sections[title] = text
	}
	for _, a := range readAlerts(t) {
		if !tested[a.Alert] {
			t.Errorf("%s is not tested quiet and firing", a.Alert)
		}
		if s := a.Labels["severity"]; s != "page" && s != "ticket" {
			t.Errorf("%s has the severity %q", a.Alert, s)
		}
		if a.Annotations["summary"] == "" || a.Annotations["runbook"] != "docs/operations.md#"+strings.ToLower(a.Alert) {
			t.Errorf("%s is annotated %v", a.Alert, a.Annotations)
		}
		if text := sections[a.Alert]; !strings.Contains(text, "Means: ") || !strings.Contains(text, "Do: ") {
			t.Errorf("%s has no section in %s with Means: and Do:", a.Alert, operations)
		}
		delete(sections, a.Alert)
	}
	for title := range sections {
		if strings.HasPrefix(title, "Converger") {
			t.Errorf("%s explains %s, which is no alert", operations, title)
		}
	}
}

// metricHubs are the settings of hubs that have, all together, every metric of the program.
var metricHubs = []map[string]string{
	{"CLUSTER_PEERS": "127.0.0.1:1", "CLUSTER_BIND": "127.0.0.1:0", "RATE_LIMIT_MAX_KEYS": "1000"},
	{"RATE_LIMIT_BACKEND": "redis", "RATE_LIMIT_REDIS_URL": "redis://127.0.0.1:1", "RATE_LIMIT_MAX_KEYS": "1000"},
	{"RATE_LIMIT_MAX_KEYS": "1000"},
}

// known is what the program exposes of a metric.
type known struct {
	labels map[string]bool
	values map[string]map[string]bool // of labels whose values exist from the start
}

// everyMetric collects what hubs expose, without starting them.
func everyMetric(t *testing.T) map[string]known {
	t.Helper()
	all := map[string]known{}
	fields := regexp.MustCompile(`fqName: "([^"]+)".*constLabels: \{(.*?)\}, variableLabels: \{(.*?)\}`)
	for _, changes := range metricHubs {
		cfg, err := loadWith(changes)
		if err != nil {
			t.Fatal(err)
		}
		cfg.UploadDir = t.TempDir()
		h, err := newHub(t.Context(), cfg, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(h.close)
		descs := make(chan *prometheus.Desc)
		go func() {
			h.metrics.Describe(descs)
			close(descs)
		}()
		for d := range descs {
			m := fields.FindStringSubmatch(d.String())
			if m == nil {
				t.Fatalf("can't read %s", d)
			}
			k, ok := all[m[1]]
			if !ok {
				k = known{map[string]bool{"instance": true, "job": true, "le": true}, map[string]map[string]bool{}}
			}
			for _, label := range regexp.MustCompile(`\w+`).FindAllString(regexp.MustCompile(`="[^"]*"`).ReplaceAllString(m[2], "")+","+m[3], -1) {
				k.labels[label] = true
			}
			all[m[1]] = k
		}
		families, err := h.metrics.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			for _, m := range f.Metric {
				for _, l := range m.Label {
					values := all[f.GetName()].values
					if values[l.GetName()] == nil {
						values[l.GetName()] = map[string]bool{}
					}
					values[l.GetName()][l.GetValue()] = true
				}
			}
		}
	}
	return all
}

// find returns the metric behind a name, which may be one of a histogram's series.
func find(all map[string]known, name string) (known, bool) {
	for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
		if base, ok := strings.CutSuffix(name, suffix); ok {
			if k, ok := all[base]; ok {
				return k, true
			}
		}
	}
	return known{}, false
}

// Rules and documentation name no metric, label or value that the program does not have: nobody would notice an alert that
// can't fire.
func TestDocumentedMetricsExist(t *testing.T) {
	t.Parallel()
	all := everyMetric(t)
	metrics := regexp.MustCompile(`\b(converger_[a-z0-9_]+)(\*?)(?:\{([^}]*)\})?`)
	matcher := regexp.MustCompile(`(\w+)(=~|!=|!~|=)"([^"]*)"`)
	check := func(where, text string) {
		for _, m := range metrics.FindAllStringSubmatch(text, -1) {
			if m[2] == "*" {
				if !slices.ContainsFunc(slices.Collect(maps.Keys(all)), func(name string) bool { return strings.HasPrefix(name, m[1]) }) {
					t.Errorf("%s: no metric begins with %s", where, m[1])
				}
				continue
			}
			k, ok := find(all, m[1])
			if !ok {
				t.Errorf("%s: there is no metric %s (of the hubs in metricHubs)", where, m[1])
				continue
			}
			for _, l := range matcher.FindAllStringSubmatch(m[3], -1) {
				if !k.labels[l[1]] {
					t.Errorf("%s: %s has no label %s", where, m[1], l[1])
				}
				for value := range strings.SplitSeq(l[3], "|") {
					if values := k.values[l[1]]; len(values) > 0 && !strings.ContainsAny(value, ".*+$") && !values[value] {
						t.Errorf("%s: the label %s of %s never is %q", where, l[1], m[1], value)
					}
				}
			}
		}
	}
	for _, a := range readAlerts(t) {
		check(a.Alert, a.Expr)
	}
	pages, err := filepath.Glob("../../docs/*.md")
	if err != nil || len(pages) == 0 {
		t.Fatalf("no pages of documentation: %v", err)
	}
	for _, file := range append(pages, "../../README.md") {
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		check(filepath.Base(file), string(b))
	}
}
