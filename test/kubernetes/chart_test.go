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

// otherVersion is a version of crust-oci that is not today's, and does the same.
const otherVersion = "crust-oci-000000000000"

// anotherVersion installs it on the first node.
func anotherVersion(t *testing.T) {
	t.Helper()
	onNode(t, "cd /opt/crust/bin && cp $(readlink crust-oci) "+otherVersion+" && echo another >>"+otherVersion+" && ln -sfn "+otherVersion+
		" crust-oci")
}

// theOtherVersionStays looks after an upgrade at a node with a pod in a microVM, which that version made: the pod keeps it, and others get
// today's.
func theOtherVersionStays(t *testing.T) {
	t.Helper()
	if got := onNode(t, "readlink /opt/crust/bin/crust-oci"); got == otherVersion {
		t.Errorf("crust-oci is the version from before the upgrade: %s", got)
	}
	got := strings.Fields(onNode(t, "for p in $(pgrep -f '[p]od-(monitor|stub)'); do [ /proc/$p/exe -ef /opt/crust/bin/"+otherVersion+
		" ] && echo its-own || readlink /proc/$p/exe; done"))
	if len(got) < 2 || slices.ContainsFunc(got, func(name string) bool { return name != "its-own" }) {
		t.Errorf("a pod from before the upgrade has the programs %q", got)
	}
}

// theChart installs, upgrades and removes the driver with Helm, with the commands of the chart's
// README, on three nodes with volumes in use. Afterwards nothing of the driver is left.
func theChart(t *testing.T, project string) {
	page, err := os.ReadFile("../../deploy/helm/crust-csi/README.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := console.FindAllStringSubmatch(string(page), -1)
	if len(blocks) != 4 {
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
	// replaced waits until other pods than these have taken over.
	replaced := func(s *space, before string) {
		t.Helper()
		rolled(s)
		now := strings.Fields(s.kubectl("get", "pods", "-n", system, "-o", "jsonpath={.items[*].metadata.name}"))
		for _, name := range strings.Fields(before) {
			if slices.Contains(now, name) && !strings.HasPrefix(name, "csi-resizer") {
				t.Errorf("%s was not replaced: %s", name, now)
			}
		}
	}
	drivers := func(s *space) string {
		return s.kubectl("get", "pods", "-n", system, "-o", "jsonpath={.items[*].metadata.name}")
	}
	first, set := release{version: "next", source: project}, " --set crust.enabled=true"
	microVMs := !whole // v0.1.0 has none
	if microVMs {
		set += " --set crust.microVM.enabled=true"
		sets = append(sets, "daemonset/crust-vm")
	} else {
		first = lastRelease(t, project)
	}
	first.load(t, all)
	does("what the other tests use is removed", "kubectl delete -k test/kubernetes/overlay --ignore-not-found --timeout=90s")
	does("helm install of "+first.version, "cd "+first.source+"\n"+strings.TrimSpace(blocks[0][1])+set+
		tags(first.version, microVMs))
	s := use(t)
	rolled(s)
	d := newDashboard(s, project)
	var pods []string
	for _, node := range all {
		fs, sandbox := "fs-"+node, "sandbox-"+node
		s.claim(fs, "crust-xfs", "320Mi", "ReadWriteOnce")
		s.claim(sandbox, "crust-sandbox", "64Mi", "ReadWriteOncePod")
		s.apply(podText("p-"+node, []string{fs + ":/data"}, away(node)))
		s.apply(podText("q-"+node, []string{sandbox + ":/data"}, sandboxed, away(node)))
		pods = append(pods, "p-"+node, "q-"+node)
	}
	if microVMs {
		anotherVersion(t)
		s.claim("microvm", "crust-sandbox", "64Mi", "ReadWriteOncePod")
		s.apply(podText("microvm", []string{"microvm:/data"}, microVM, away("node")))
		s.until(4*time.Minute, "the pod in a microVM is ready", func() (string, bool) {
			got := s.get("pod/microvm", ".status.conditions[?(@.type==\"Ready\")].status")
			return s.get("pod/microvm", ".status") + got, got == "True"
		})
		pods = append(pods, "microvm")
	}
	s.ready(pods...)
	for _, pod := range pods {
		s.run(pod, "(i=0; while sleep 0.1; do echo $i >>/data/numbers || exit; i=$((i+1)); done) >/dev/null 2>&1 &")
	}
	// writes fails unless every pod has written without a gap, and goes on.
	writes := func(when string) {
		t.Helper()
		for _, pod := range pods {
			if got := s.get("pod/"+pod, ".status.containerStatuses[0].restartCount"); got != "0" {
				t.Errorf("%s: %s has restarted %s times", when, pod, got)
			}
			if got := s.run(pod,
				"a=$(wc -l </data/numbers); sleep 1; b=$(wc -l </data/numbers); [ $b -gt $a ] && head -n $b /data/numbers | awk '$1 != NR-1 {bad++} END {print bad+0}'"); got != "0" {
				t.Errorf("%s: %s: lines that are wrong: %q", when, pod, got)
			}
		}
	}

	// A claim of each node grows, and the dashboard shows it.
	var before float64
	s.until(60*time.Second, "the dashboard has three nodes", func() (string, bool) {
		before = d.shows("Bytes", "promised", "")[""]
		nodes := d.shows("Nodes", "", "")[""]
		return fmt.Sprint(nodes, before), nodes == 3 && before > 3*320<<20
	})
	for _, node := range all {
		s.kubectl("patch", "pvc", "fs-"+node, "-n", s.ns, "-p", `{"spec":{"resources":{"requests":{"storage":"640Mi"}}}}`)
	}
	for _, node := range all {
		s.kubectl("wait", "-n", s.ns, "--for=jsonpath={.status.capacity.storage}=640Mi", "pvc/fs-"+node, "--timeout=90s")
	}
	s.until(60*time.Second, "the dashboard shows the growth", func() (string, bool) {
		now := d.shows("Bytes", "promised", "")[""]
		grown := d.shows("Room promised", "{{node}} {{pool}}", "node")
		return fmt.Sprint(before, now, grown), now-before >= 3*320<<20 && len(grown) == 3
	})

	// Upgrade to today's, and of a release back and up again, while all pods write.
	upgrade := strings.Replace(blocks[1][1], " --reset-then-reuse-values", " --reset-then-reuse-values"+tags("dev", microVMs), 1)
	old := drivers(s)
	does("helm upgrade from "+first.version, upgrade)
	replaced(s, old)
	d.scrape()
	writes("upgraded")
	if microVMs {
		theOtherVersionStays(t)
	}
	s.until(60*time.Second, "the dashboard shows the new version only", func() (string, bool) {
		got := d.shows("Versions", "{{job}} {{version}}", "version")
		return fmt.Sprint(got), len(got) == 1 && got[strings.TrimPrefix(first.version, "v")] == 0
	})
	if whole {
		for _, node := range all { // made by the newer version, for the older one
			s.claim("late-"+node, "crust-ext4", "64Mi", "ReadWriteOnce")
			s.pod("m-"+node, []string{"late-" + node + ":/data"}, away(node), group(2000))
			s.run("m-"+node, "echo late >/data/f; sync")
			s.delete("m-" + node)
		}
		old = drivers(s)
		does("helm rollback", "helm rollback crust-csi -n crust-csi")
		replaced(s, old)
		writes("rolled back")
		for _, node := range all {
			s.pod("n-"+node, []string{"late-" + node + ":/data"}, away(node), group(2000))
			if got := s.run("n-"+node, "cat /data/f"); got != "late" {
				t.Errorf("%s: what the newer version made: %q", node, got)
			}
		}
		old = drivers(s)
		does("helm upgrade again", upgrade)
		replaced(s, old)
		writes("upgraded again")
	}
	s.delete(pods...)
	for _, node := range all { // the newer version mounts what the older one made
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
	for _, node := range all {
		// /etc/crust, the handler and the mount at /var/lib/crust-csi are of cluster.sh.
		if left := onThe(t, node, blocks[3][1]+`ls -d /opt/*crust* /run/*crust* /var/lib/crust /var/lib/crust-agent /var/lib/crust-csi/* /var/lib/csi-node* \
			/var/lib/kubelet/plugins/*crust* /var/lib/kubelet/plugins_registry/*crust* 2>/dev/null
			awk '$5 ~ "^/(opt|run|var/lib)/.*crust" && $5 != "/var/lib/crust-csi"' /proc/1/mountinfo`); left != "" {
			t.Errorf("left on %s: %s", node, left)
		}
	}
}
