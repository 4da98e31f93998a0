package monitoring

import (
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"

	"github.com/crust-csi/crust-csi/deploy/monitoring"
	"github.com/crust-csi/crust-csi/internal/telemetry"
)

// ofTargets are the labels that the PodMonitors give every series.
var ofTargets = []string{"job", "node"}

// prometheusOwn are series that no daemon has.
var prometheusOwn = map[string][]string{"up": ofTargets, "ALERTS": {"alertname", "alertstate", "severity"}}

// read adds the labels of each metric of a metrics page to into.
func read(t *testing.T, h http.Handler, address string, into map[string][]string) {
	t.Helper()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	var families map[string]*dto.MetricFamily
	var err error
	if h != nil {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		families, err = parser.TextToMetricFamilies(w.Body)
	} else {
		r, gerr := http.Get("http://" + address + "/metrics")
		ok(t, gerr)
		defer r.Body.Close()
		families, err = parser.TextToMetricFamilies(r.Body)
	}
	ok(t, err)
	for name, f := range families {
		var labels []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			labels = append(labels, l.GetName())
		}
		slices.Sort(labels)
		into[name] = labels
		if f.GetType() == dto.MetricType_HISTOGRAM {
			into[name+"_count"], into[name+"_sum"], into[name+"_bucket"] = labels, labels, append(slices.Clone(labels), "le")
		}
	}
}

// wantMetrics checks that the daemons have each metric and label that the alerts, the dashboard and
// the documents name, and that each query of the dashboard has an answer. It runs while all faults
// last.
func (w *world) wantMetrics(p *prometheus, rules monitoring.PrometheusRule) {
	t := w.t
	t.Helper()
	have := maps.Clone(prometheusOwn)
	for _, s := range w.targets {
		if s.Labels["job"] != "crustd" { // which is dead
			read(t, nil, s.Targets[0], have)
		}
	}
	// This metric needs a kernel with SELinux: it is the real one, outside of a daemon.
	m := telemetry.New("test")
	m.ContextMount("applied", "RWO")
	selinux := map[string][]string{}
	read(t, m.Handler(func() error { return nil }), "", selinux)
	const contextMounts = "crust_selinux_context_mounts_total"
	have[contextMounts] = selinux[contextMounts]

	d, err := monitoring.ReadDashboard(directory)
	ok(t, err)
	var expressions []string
	var shown [][]string // labels that the dashboard shows of it
	for _, a := range rules.Alerts() {
		expressions = append(expressions, a.Expr)
		shown = append(shown, monitoring.Templated(a.Annotations["description"]))
	}
	for _, panel := range d.Panels {
		for _, q := range panel.Targets {
			expr := monitoring.Expand(q.Expr, "20s")
			expressions, shown = append(expressions, expr), append(shown, monitoring.Templated(q.LegendFormat))
			if r := p.query("/api/v1/query_range", lately(expr)); len(r) == 0 {
				t.Errorf("panel %q has no answer: %s", panel.Title, expr)
			}
		}
	}
	asked, err := monitoring.Ask(project, expressions)
	ok(t, err)
	for i, a := range asked {
		if a.Error != "" {
			t.Errorf("%s: %s", expressions[i], a.Error)
		}
		union := slices.Clone(ofTargets)
		for _, s := range a.Selectors {
			labels, exists := have[s.Metric]
			if !exists {
				t.Errorf("no daemon has the metric %s of %s", s.Metric, expressions[i])
			}
			for _, l := range s.Labels {
				if !slices.Contains(labels, l) && !slices.Contains(ofTargets, l) {
					t.Errorf("%s has no label %s, but %v: %s", s.Metric, l, labels, expressions[i])
				}
			}
			union = append(union, labels...)
		}
		for _, l := range append(a.Labels, shown[i]...) {
			if !slices.Contains(union, l) {
				t.Errorf("no label %s among %v: %s", l, union, expressions[i])
			}
		}
	}
	wantDocumented(t, have)
}

// lately returns a query over the time so far.
func lately(expr string) url.Values {
	now := time.Now()
	return url.Values{"query": {expr}, "start": {stamp(now.Add(-time.Minute))}, "end": {stamp(now)}, "step": {"1"}}
}

func stamp(at time.Time) string { return at.UTC().Format(time.RFC3339Nano) }

var row = regexp.MustCompile("(?m)^\\| `(crust_[a-z_]+)` \\| (.*?) \\|")

// wantDocumented expects the documents to list each metric of Crust CSI, with its labels, and no
// other.
func wantDocumented(t *testing.T, have map[string][]string) {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(project, "docs/monitoring.md"))
	ok(t, err)
	documented := map[string]bool{}
	for _, m := range row.FindAllStringSubmatch(string(b), -1) {
		labels := strings.Fields(strings.NewReplacer("`", "", ",", "").Replace(m[2]))
		slices.Sort(labels)
		documented[m[1]] = true
		if !slices.Equal(labels, have[m[1]]) {
			t.Errorf("docs/monitoring.md gives %s the labels %v; it has %v", m[1], labels, have[m[1]])
		}
	}
	ends := regexp.MustCompile("_(bucket|count|sum)$")
	for name := range have {
		if strings.HasPrefix(name, "crust_") && !documented[name] && !documented[ends.ReplaceAllString(name, "")] {
			t.Errorf("docs/monitoring.md lacks %s", name)
		}
	}
}
