package monitoring

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"
)

// promtool runs it, with the rules as Prometheus itself reads them beside the unit tests.
func promtool(t *testing.T, args ...string) {
	t.Helper()
	tool, err := filepath.Abs(Tool(project, "promtool"))
	ok(t, err)
	rules, err := ReadRules(".")
	ok(t, err)
	for _, a := range rules.Alerts() {
		delete(a.Annotations, "summary")
		delete(a.Annotations, "runbook")
	}
	b, err := yaml.Marshal(rules.Spec)
	ok(t, err)
	dir := t.TempDir()
	ok(t, os.WriteFile(filepath.Join(dir, "rules.yaml"), b, 0o600))
	tests, err := os.ReadFile("alerts_test.yaml")
	ok(t, err)
	ok(t, os.WriteFile(filepath.Join(dir, "tests.yaml"), tests, 0o600))
	cmd := exec.Command(tool, args...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("promtool %s: %v (scripts/monitoring.sh gets it)\n%s", strings.Join(args, " "), err, out)
	}
}

func TestPrometheusTakesTheRules(t *testing.T) {
	promtool(t, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
}

func TestEveryAlertFiresAndDoesNot(t *testing.T) {
	promtool(t, "test", "rules", "tests.yaml")
	var file struct {
		Tests []struct {
			Cases []struct {
				Alertname string `json:"alertname"`
				Expected  []any  `json:"exp_alerts"`
			} `json:"alert_rule_test"`
		} `json:"tests"`
	}
	b, err := os.ReadFile("alerts_test.yaml")
	ok(t, err)
	ok(t, yaml.Unmarshal(b, &file))
	fires, quiet := map[string]bool{}, map[string]bool{}
	for _, test := range file.Tests {
		for _, c := range test.Cases {
			fires[c.Alertname] = fires[c.Alertname] || len(c.Expected) > 0
			quiet[c.Alertname] = quiet[c.Alertname] || len(c.Expected) == 0
		}
	}
	rules, err := ReadRules(".")
	ok(t, err)
	for _, a := range rules.Alerts() {
		if !fires[a.Alert] || !quiet[a.Alert] {
			t.Errorf("%s: seen to fire: %v, seen not to: %v", a.Alert, fires[a.Alert], quiet[a.Alert])
		}
	}
}

func TestTheDashboard(t *testing.T) {
	d, err := ReadDashboard(".")
	ok(t, err)
	ids, at := map[int]bool{}, map[[2]int]string{}
	var expressions, titles []string
	source := Datasource{Type: "prometheus", UID: "${datasource}"}
	for _, p := range d.Panels {
		if ids[p.ID] || p.ID == 0 || p.Title == "" {
			t.Errorf("panel %d %q: the id is not unique, or there is no title", p.ID, p.Title)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := at[[2]int{x, y}]; other != "" || x >= 24 {
					t.Errorf("%q lies over %q, or beyond the edge", p.Title, other)
				}
				at[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Datasource != source || len(p.Targets) == 0 || p.FieldConfig.Defaults.Unit == "" {
			t.Errorf("%q: data source %v, %d queries, unit %q", p.Title, p.Datasource, len(p.Targets), p.FieldConfig.Defaults.Unit)
		}
		for _, target := range p.Targets {
			expressions, titles = append(expressions, Expand(target.Expr, "5m")), append(titles, p.Title)
			if !strings.Contains(target.Expr, "$node") && !strings.Contains(target.Expr, "ALERTS") {
				t.Errorf("%q does not heed the variable: %s", p.Title, target.Expr)
			}
		}
	}
	asked, err := Ask(project, expressions)
	ok(t, err)
	for i, a := range asked {
		if a.Error != "" || len(a.Selectors) == 0 {
			t.Errorf("%q: %s: %s", titles[i], expressions[i], a.Error)
		}
	}
	if len(expressions) < 20 {
		t.Errorf("%d queries", len(expressions))
	}
	if v := d.Templating.List; len(v) != 2 || v[0].Name != "datasource" || v[0].Type != "datasource" || v[1].Name != "node" ||
		v[1].Datasource != source {
		t.Errorf("variables: %+v", v)
	}
}

var update = flag.Bool("update", false, "write the table of alerts into docs/monitoring.md")

var table = regexp.MustCompile(`(?s)\| alert \| severity \|.*?\n\n`)

// The table of alerts in the documents is made of the rules:
// go test ./deploy/monitoring -run TestTheTableOfAlerts -update
func TestTheTableOfAlerts(t *testing.T) {
	rules, err := ReadRules(".")
	ok(t, err)
	want := "| alert | severity | after | when | what to do |\n|---|---|---|---|---|\n"
	for _, a := range rules.Alerts() {
		link := strings.TrimPrefix(a.Annotations["runbook"], "docs/")
		_, anchor, _ := strings.Cut(link, "#")
		after := a.For
		if after == "" {
			after = "at once"
		}
		want += fmt.Sprintf("| `%s` | %s | %s | %s | [%s](%s) |\n", a.Alert, a.Labels["severity"], after, a.Annotations["summary"],
			strings.ReplaceAll(anchor, "-", " "), link)
	}
	want += "\n"
	page := filepath.Join(project, "docs/monitoring.md")
	b, err := os.ReadFile(page)
	ok(t, err)
	if *update {
		b = table.ReplaceAllLiteral(b, []byte(want))
		ok(t, os.WriteFile(page, b, 0o644))
	}
	if got := table.FindString(string(b)); got != want {
		t.Errorf("docs/monitoring.md has\n%s\nand the rules say\n%s\n(-update writes it)", got, want)
	}
}

// Metrics that are not the driver's own: Prometheus makes them, and every Go program has
// them.
var foreign = []string{"up", "ALERTS", "process_resident_memory_bytes", "process_cpu_seconds_total"}

// What rules and dashboard ask for is in the documents. test/monitoring finds it in the
// metrics of daemons that run.
func TestTheTableOfMetricsHasWhatIsAskedFor(t *testing.T) {
	b, err := os.ReadFile(filepath.Join(project, "docs/monitoring.md"))
	ok(t, err)
	documented := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `(crust_[a-z_]+)` ").FindAllStringSubmatch(string(b), -1) {
		documented[m[1]] = true
	}
	var expressions []string
	rules, err := ReadRules(".")
	ok(t, err)
	for _, a := range rules.Alerts() {
		expressions = append(expressions, a.Expr)
	}
	d, err := ReadDashboard(".")
	ok(t, err)
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			expressions = append(expressions, Expand(target.Expr, "5m"))
		}
	}
	asked, err := Ask(project, expressions)
	ok(t, err)
	missing := map[string]bool{}
	for _, a := range asked {
		for _, s := range a.Selectors {
			name := regexp.MustCompile("_(bucket|count|sum)$").ReplaceAllString(s.Metric, "")
			if !documented[name] && !slices.Contains(foreign, s.Metric) {
				missing[name] = true
			}
		}
	}
	if len(missing) > 0 || len(documented) < 15 {
		t.Errorf("docs/monitoring.md has %d metrics and lacks %v", len(documented), slices.Sorted(maps.Keys(missing)))
	}
}
