//go:build kubernetes

package kubernetes_test

import (
	"encoding/json"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/crust-csi/crust-csi/deploy/monitoring"
)

// dashboard answers the dashboard's queries from a Prometheus on the first node.
type dashboard struct {
	s      *space
	panels []monitoring.Panel
}

const prometheus = "127.0.0.1:19090"

// prometheusDir has the files of that Prometheus on the node.
const prometheusDir = "/run/test/prometheus"

// newDashboard starts a Prometheus that scrapes what scrape says. Debian's has no service discovery
// of Kubernetes.
func newDashboard(s *space, project string) *dashboard {
	s.t.Helper()
	read, err := monitoring.ReadDashboard("../../deploy/monitoring")
	if err != nil {
		s.t.Fatal(err)
	}
	const dir = prometheusDir
	config := `{"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": [{"job_name": "crust",
"file_sd_configs": [{"files": ["` + dir + `/targets.json"], "refresh_interval": "1s"}]}]}`
	pid := onNode(s.t, "mkdir -p "+dir+" && cat >"+dir+"/config.json <<'E'\n"+config+"\nE\n"+monitoring.Tool(project, "prometheus")+
		" --config.file="+dir+"/config.json --storage.tsdb.path="+dir+"/data --web.listen-address="+prometheus+
		" </dev/null >"+dir+"/log 2>&1 & echo $!")
	s.t.Cleanup(func() {
		if s.t.Failed() {
			s.t.Log(onNode(s.t, "tail -n 20 "+dir+"/log"))
		}
		onNode(s.t, "kill "+pid+"; rm -rf "+dir)
	})
	d := &dashboard{s, read.Panels}
	d.scrape()
	return d
}

// scrape sets the pods of csi-node that run now as targets, with the labels of the PodMonitors.
func (d *dashboard) scrape() {
	d.s.t.Helper()
	var targets []string
	for _, node := range names() {
		ip := (&space{t: d.s.t, ns: system}).get(d.s.daemon("csi-node", node), ".status.podIP")
		targets = append(targets, `{"targets": ["`+ip+`:9808"], "labels": {"job": "crust-csi-node", "node": "`+node+`"}}`)
	}
	onNode(d.s.t, "cd "+prometheusDir+" && echo '["+strings.Join(targets, ", ")+"]' >targets.new && mv targets.new targets.json")
}

// shows returns what a panel's query shows, by the values of a label.
func (d *dashboard) shows(panel, legend, label string) map[string]float64 {
	d.s.t.Helper()
	i := slices.IndexFunc(d.panels, func(p monitoring.Panel) bool { return p.Title == panel && len(p.Targets) > 0 })
	if i < 0 {
		d.s.t.Fatalf("no panel %q", panel)
	}
	j := slices.IndexFunc(d.panels[i].Targets, func(t monitoring.Target) bool { return t.LegendFormat == legend })
	if j < 0 {
		d.s.t.Fatalf("panel %q has no %q", panel, legend)
	}
	expr := monitoring.Expand(d.panels[i].Targets[j].Expr, "10s")
	var answer struct {
		Data struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
			}
		}
	}
	out, err := try(d.s.t.Context(), "", "wget", "-qO-", "http://"+prometheus+"/api/v1/query?query="+url.QueryEscape(expr))
	if err != nil {
		return nil // it is starting
	}
	if err := json.Unmarshal([]byte(out), &answer); err != nil {
		d.s.t.Fatal(err)
	}
	all := map[string]float64{}
	for _, r := range answer.Data.Result {
		text, _ := r.Value[1].(string)
		if all[r.Metric[label]], err = strconv.ParseFloat(text, 64); err != nil {
			d.s.t.Fatal(err)
		}
	}
	return all
}
