package monitoring

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

const project = "../.."

func ok(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

type podMonitor struct {
	APIVersion string   `json:"apiVersion"`
	Kind       string   `json:"kind"`
	Metadata   Metadata `json:"metadata"`
	Spec       struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		PodMetricsEndpoints []struct {
			Port        string `json:"port"`
			Relabelings []struct {
				SourceLabels []string `json:"sourceLabels,omitempty"`
				TargetLabel  string   `json:"targetLabel"`
				Replacement  string   `json:"replacement,omitempty"`
			} `json:"relabelings"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

// render gives the objects of a kustomization, by kind, as YAML.
func render(t *testing.T, dir string) map[string][][]byte {
	t.Helper()
	m, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	ok(t, err)
	all := map[string][][]byte{}
	for _, r := range m.Resources() {
		b, err := r.AsYAML()
		ok(t, err)
		all[r.GetKind()] = append(all[r.GetKind()], b)
	}
	return all
}

func decode[T any](t *testing.T, list [][]byte) []T {
	t.Helper()
	var all []T
	for _, b := range list {
		var v T
		if err := yaml.UnmarshalStrict(b, &v); err != nil {
			t.Errorf("%v in\n%s", err, b)
		}
		all = append(all, v)
	}
	return all
}

// Each PodMonitor finds the pods of one DaemonSet, by a port that serves metrics, and
// gives them the job that the alerts name.
func TestPodMonitorsFindTheDaemons(t *testing.T) {
	monitors := decode[podMonitor](t, render(t, "base")["PodMonitor"])
	found := map[string]string{}
	for _, d := range decode[appsv1.DaemonSet](t, render(t, "../kubernetes/microvm")["DaemonSet"]) {
		for _, m := range monitors {
			if m.APIVersion != "monitoring.coreos.com/v1" || m.Metadata.Namespace != d.Namespace || len(m.Spec.PodMetricsEndpoints) != 1 ||
				len(m.Spec.Selector.MatchLabels) == 0 {
				t.Errorf("PodMonitor %+v", m)
				continue
			}
			matches := true
			for k, v := range m.Spec.Selector.MatchLabels {
				matches = matches && d.Spec.Template.Labels[k] == v
			}
			e := m.Spec.PodMetricsEndpoints[0]
			if !matches || !servesMetrics(d.Spec.Template.Spec.Containers, e.Port) {
				continue
			}
			if len(e.Relabelings) != 2 || e.Relabelings[0].TargetLabel != "job" || e.Relabelings[1].TargetLabel != "node" ||
				!slices.Equal(e.Relabelings[1].SourceLabels, []string{"__meta_kubernetes_pod_node_name"}) {
				t.Errorf("PodMonitor %s: %+v", m.Metadata.Name, e.Relabelings)
				continue
			}
			found[d.Name] += e.Relabelings[0].Replacement
		}
	}
	want := map[string]string{"csi-node": "crust-csi-node", "crust": "crustd", "crust-vm": "crustd", "crust-agent": "crust-agent"}
	if len(monitors) != len(want) || len(found) != len(want) {
		t.Errorf("%d PodMonitors, found %v", len(monitors), found)
	}
	rules, err := ReadRules(".")
	ok(t, err)
	var expressions string
	for _, a := range rules.Alerts() {
		expressions += a.Expr + "\n"
	}
	for name, job := range want {
		if found[name] != job {
			t.Errorf("DaemonSet %s is found as job %q, want %q", name, found[name], job)
		}
		if !strings.Contains(expressions, `up{job="`+job+`"} == 0`) {
			t.Errorf("no alert tells that job %s is away", job)
		}
	}
}

func servesMetrics(containers []corev1.Container, port string) bool {
	for _, c := range containers {
		for _, p := range c.Ports {
			if p.Name == port && slices.ContainsFunc(c.Args, func(a string) bool {
				return a == "--metrics-address=*:"+itoa(p.ContainerPort)
			}) {
				return true
			}
		}
	}
	return false
}

func itoa(n int32) string {
	b, _ := yaml.Marshal(n)
	return strings.TrimSpace(string(b))
}

// What is applied is what lies here: the rules, and the dashboard as it is.
func TestTheKustomizationsRender(t *testing.T) {
	all := render(t, "base")
	if len(all) != 3 || len(all["PrometheusRule"]) != 1 || len(all["ConfigMap"]) != 1 {
		t.Fatalf("%d kinds: %s", len(all), all)
	}
	maps := decode[corev1.ConfigMap](t, all["ConfigMap"])
	b, err := os.ReadFile("base/dashboard.json")
	ok(t, err)
	if m := maps[0]; m.Data["dashboard.json"] != string(b) || len(m.Data) != 1 ||
		m.Labels["grafana_dashboard"] != "1" || m.Name != "crust-csi-dashboard" || m.Namespace != "crust-csi" {
		t.Errorf("ConfigMap %s/%s %v", m.Namespace, m.Name, m.Labels)
	}
	rules := decode[PrometheusRule](t, all["PrometheusRule"])
	if r := rules[0]; r.APIVersion != "monitoring.coreos.com/v1" || r.Metadata.Namespace != "crust-csi" || len(r.Alerts()) == 0 {
		t.Errorf("%+v", r)
	}
	all = render(t, "kube-prometheus")
	roles, bindings := decode[rbacv1.Role](t, all["Role"]), decode[rbacv1.RoleBinding](t, all["RoleBinding"])
	if len(all) != 5 || len(roles) != 1 || len(bindings) != 1 {
		t.Fatalf("kube-prometheus: %d kinds", len(all))
	}
	if r, b := roles[0], bindings[0]; r.Namespace != "crust-csi" || b.Namespace != r.Namespace || b.RoleRef.Name != r.Name ||
		len(r.Rules) != 1 ||
		!slices.Equal(r.Rules[0].Resources, []string{"pods"}) || !slices.Equal(r.Rules[0].Verbs, []string{"get", "list", "watch"}) {
		t.Errorf("%+v %+v", r, b)
	}
}

// anchors are the ids that a Markdown page's headings have.
func anchors(t *testing.T, page string) map[string]bool {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(project, page))
	ok(t, err)
	ids := map[string]bool{}
	drop := regexp.MustCompile("[^a-z0-9 _-]")
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(string(b), -1) {
		ids[strings.ReplaceAll(drop.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
	}
	return ids
}

func TestEveryAlertSaysWhatToDo(t *testing.T) {
	rules, err := ReadRules(".")
	ok(t, err)
	seen := map[string]bool{}
	ids := anchors(t, "docs/troubleshooting.md")
	for _, a := range rules.Alerts() {
		page, anchor, _ := strings.Cut(a.Annotations["runbook"], "#")
		switch {
		case seen[a.Alert] || !regexp.MustCompile(`^Crust[A-Za-z]+$`).MatchString(a.Alert):
			t.Errorf("name %q", a.Alert)
		case len(a.Labels) != 1 || a.Labels["severity"] != "warning" && a.Labels["severity"] != "critical":
			t.Errorf("%s: labels %v", a.Alert, a.Labels)
		case len(a.Annotations) != 3 || a.Annotations["summary"] == "" || !strings.HasSuffix(a.Annotations["description"], "."):
			t.Errorf("%s: annotations %v", a.Alert, a.Annotations)
		case page != "docs/troubleshooting.md" || !ids[anchor]:
			t.Errorf("%s: no heading has the anchor of %s", a.Alert, a.Annotations["runbook"])
		}
		seen[a.Alert] = true
	}
	if len(seen) < 12 {
		t.Errorf("%d alerts", len(seen))
	}
}
