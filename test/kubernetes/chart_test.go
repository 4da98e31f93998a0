//go:build kubernetes

package kubernetes_test

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
)

var console = regexp.MustCompile("(?ms)^```console\n(.*?)^```$")

// theChart installs, upgrades and removes the driver with Helm, with the commands of the chart's
// README, on three nodes with volumes in use. Afterwards nothing of the driver is left.
func theChart(t *testing.T, project string) {
	page, err := os.ReadFile("../../deploy/helm/crust-csi/README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := console.FindAllStringSubmatch(string(page), -1)
	if len(blocks) != 3 {
		t.Fatalf("%d blocks of commands", len(blocks))
	}
	does := func(what string, script string) string {
		t.Helper()
		begin := time.Now()
		out, err := onNodeIn(project, "export PATH=$PWD/.cache/bin:$PATH\n"+script)
		if err != nil {
			t.Fatalf("%v\n%s", err, script)
		}
		t.Logf("%s: %s", time.Since(begin).Round(time.Second), what)
		return out
	}
	all := []string{"node", "node-2", "node-3"}
	sets := []string{"daemonset/csi-node", "daemonset/csi-sidecars", "deployment/csi-resizer", "deployment/csi-steward", "daemonset/crust",
		"daemonset/crust-agent"}
	rolled := func(s *space) {
		t.Helper()
		for _, d := range sets {
			s.kubectl("rollout", "status", "-n", system, d, "--timeout=180s")
		}
	}
	does("what the other tests use is removed", "kubectl delete -k test/kubernetes/overlay --ignore-not-found --timeout=90s")
	does("helm install", strings.TrimSpace(blocks[0][1])+" --set crust.enabled=true")
	s := use(t)
	rolled(s)
	var pods []string
	for _, node := range all {
		fs, sandbox := "fs-"+node, "sandbox-"+node
		s.claim(fs, "crust-xfs", "320Mi", "ReadWriteOnce")
		s.claim(sandbox, "crust-sandbox", "64Mi", "ReadWriteOncePod")
		s.apply(podText("p-"+node, []string{fs + ":/data"}, away(node)))
		s.apply(podText("q-"+node, []string{sandbox + ":/data"}, sandboxed, away(node)))
		pods = append(pods, "p-"+node, "q-"+node)
	}
	s.ready(pods...)
	for _, pod := range pods {
		s.run(pod, "(i=0; while sleep 0.1; do echo $i >>/data/numbers || exit; i=$((i+1)); done) >/dev/null 2>&1 &")
	}
	for _, node := range all {
		s.kubectl("patch", "pvc", "fs-"+node, "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}`)
	}
	for _, node := range all {
		s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/fs-"+node, "--timeout=90s")
		if promised := metricOf(t, node, "crust_pool_promised_bytes"); promised < 640<<20 {
			t.Errorf("%s promises %g bytes, and a claim of it has 640 MiB", node, promised)
		}
	}
	// An upgrade, with images of another tag, while all pods write.
	set := ""
	for _, image := range []string{"csi-node", "csi-steward", "crustd", "crust-agent"} {
		for _, node := range all {
			onThe(t, node, "ctr -n k8s.io images tag --force localhost/crust-csi/"+image+":dev localhost/crust-csi/"+image+":next")
		}
	}
	for _, value := range []string{"csiNode", "steward", "crust.crustd", "crust.agent"} {
		set += " --set " + value + ".image.tag=next"
	}
	before := s.kubectl("get", "pods", "-n", system, "-o", "jsonpath={.items[*].metadata.name}")
	does("helm upgrade", strings.Replace(blocks[1][1], " --reset-then-reuse-values", " --reset-then-reuse-values"+set, 1))
	rolled(s)
	for _, name := range strings.Fields(before) {
		if now := s.kubectl("get", "pods", "-n", system, "-o", "jsonpath={.items[*].metadata.name}"); slices.Contains(strings.Fields(now),
			name) && !strings.HasPrefix(name, "csi-resizer") {
			t.Errorf("%s was not replaced: %s", name, now)
		}
	}
	for _, pod := range pods {
		if got := s.get("pod/"+pod, ".status.containerStatuses[0].restartCount"); got != "0" {
			t.Errorf("%s has restarted %s times", pod, got)
		}
		if got := s.run(pod,
			"a=$(wc -l </data/numbers); sleep 1; b=$(wc -l </data/numbers); [ $b -gt $a ] && head -n $b /data/numbers | awk '$1 != NR-1 {bad++} END {print bad+0}'"); got != "0" {
			t.Errorf("%s: lines that are wrong: %q", pod, got)
		}
	}
	s.delete(pods...)
	for _, node := range all { // the next release mounts what the last one made
		s.apply(podText("r-"+node, []string{"fs-" + node + ":/data"}, away(node)))
		s.ready("r-" + node)
		if got := s.run("r-"+node, "head -n 3 /data/numbers"); got != "0\n1\n2" {
			t.Errorf("%q", got)
		}
	}
	s.clear()
	does("helm uninstall", blocks[2][1])
	s.until(60*time.Second, "nothing of the driver is left", func() (string, bool) {
		left := s.kubectl("get",
			"csidrivers,storageclasses,volumesnapshotclasses,runtimeclasses,clusterroles,clusterrolebindings,validatingadmissionpolicies,validatingadmissionpolicybindings,namespaces", "-o", "name")
		left = strings.Join(slices.DeleteFunc(strings.Fields(left), func(name string) bool { return !strings.Contains(name, "crust") }),
			" ")
		for _, node := range all {
			left += onThe(t, node, "pgrep -lx 'csi-node|csi-steward|crustd|crust-agent' || true; ls /var/lib/kubelet/plugins_registry")
			left += s.kubectl("get", "node", node, "-o", `jsonpath={.metadata.labels.topology\.csi\.crust\.dev/node}`)
		}
		remains, err := leftovers()
		return fmt.Sprint(left, remains, err), left == "" && remains == "" && err == nil
	})
}
