// Package monitoring reads what is beside it: the alerts and the dashboard. It is for
// their tests, and for the program that draws the dashboard.
package monitoring

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"

	"sigs.k8s.io/yaml"
)

// PrometheusRule is the operator's object, as far as it is used here.
type PrometheusRule struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Metadata   Metadata `json:"metadata"`
	Spec       Groups   `json:"spec"`
}

// Metadata is an object's.
type Metadata struct {
	Name      string            `json:"name"`
	Namespace string            `json:"namespace,omitempty"`
	Labels    map[string]string `json:"labels,omitempty"`
}

// Groups are what Prometheus calls a rule file.
type Groups struct {
	Groups []Group `json:"groups"`
}

// Group is evaluated in one go.
type Group struct {
	Name     string  `json:"name"`
	Interval string  `json:"interval,omitempty"`
	Rules    []Alert `json:"rules"`
}

// Alert is one rule.
type Alert struct {
	Alert       string            `json:"alert"`
	Expr        string            `json:"expr"`
	For         string            `json:"for,omitempty"`
	Labels      map[string]string `json:"labels"`
	Annotations map[string]string `json:"annotations"`
}

// ReadRules reads the rules; dir is that of this package.
func ReadRules(dir string) (PrometheusRule, error) {
	var r PrometheusRule
	b, err := os.ReadFile(filepath.Join(dir, "base/rules.yaml"))
	if err == nil {
		err = yaml.UnmarshalStrict(b, &r)
	}
	return r, err
}

// Alerts gives all of them.
func (r PrometheusRule) Alerts() []Alert {
	var all []Alert
	for _, g := range r.Spec.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// Dashboard is Grafana's, as far as it is looked at here.
type Dashboard struct {
	UID        string  `json:"uid"`
	Title      string  `json:"title"`
	Panels     []Panel `json:"panels"`
	Templating struct {
		List []Variable `json:"list"`
	} `json:"templating"`
}

// Variable is one that its user can set.
type Variable struct {
	Name       string     `json:"name"`
	Type       string     `json:"type"`
	Definition string     `json:"definition"`
	Datasource Datasource `json:"datasource"`
}

// Datasource is where numbers come from.
type Datasource struct {
	Type string `json:"type"`
	UID  string `json:"uid"`
}

// Panel is one picture.
type Panel struct {
	ID          int        `json:"id"`
	Type        string     `json:"type"`
	Title       string     `json:"title"`
	Description string     `json:"description"`
	Datasource  Datasource `json:"datasource"`
	GridPos     struct{ X, Y, W, H int }
	FieldConfig struct {
		Defaults struct {
			Unit       string
			Max        *float64
			Thresholds struct {
				Steps []struct {
					Color string
					Value *float64
				}
			}
		}
	}
	Targets []Target `json:"targets"`
}

// Target is a query of a panel.
type Target struct {
	RefID        string `json:"refId"`
	Expr         string `json:"expr"`
	LegendFormat string `json:"legendFormat"`
}

// ReadDashboard reads the dashboard; dir is that of this package.
func ReadDashboard(dir string) (Dashboard, error) {
	var d Dashboard
	b, err := os.ReadFile(filepath.Join(dir, "base/dashboard.json"))
	if err == nil {
		err = json.Unmarshal(b, &d)
	}
	return d, err
}

// Expand gives an expression as Grafana sends it: all nodes, and a window for rates.
func Expand(expr, window string) string {
	return strings.NewReplacer("$node", ".*", "$__rate_interval", window).Replace(expr)
}

// Asked is what an expression asks for; see tools/promql.
type Asked struct {
	Error     string
	Selectors []struct {
		Metric string
		Labels []string
	}
	Labels []string
}

// Ask has expressions parsed; project is its directory, where scripts/monitoring.sh has
// put the parser.
func Ask(project string, expressions []string) ([]Asked, error) {
	in, err := json.Marshal(expressions)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(Tool(project, "promql")) //nolint:forbidigo // for tests
	cmd.Stdin = bytes.NewReader(in)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%w; scripts/monitoring.sh builds it", err)
	}
	var all []Asked
	if err := json.Unmarshal(out, &all); err != nil {
		return nil, err
	}
	if len(all) != len(expressions) {
		return nil, errors.New("an answer is missing")
	}
	return all, nil
}

// Tool is a program that scripts/monitoring.sh provides.
func Tool(project, name string) string {
	return filepath.Join(project, ".cache/monitoring", name)
}

var templated = regexp.MustCompile(`\$labels\.([a-z_]+)|\{\{\s*([a-z_]+)\s*\}\}`)

// Templated gives the labels that a legend or an annotation shows.
func Templated(text string) []string {
	var names []string
	for _, m := range templated.FindAllStringSubmatch(text, -1) {
		if name := m[1] + m[2]; name != "end" && name != "else" {
			names = append(names, name)
		}
	}
	return names
}
